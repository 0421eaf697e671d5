import gc, unittest, weakref
from tinygrad import Tensor, TinyJit
from tinygrad.runtime.support.memory import TLSFAllocator

class TestTLSFLeak(unittest.TestCase):
  def test_a_dropped_allocator_is_freed(self):
    a = TLSFAllocator(1 << 20, block_size=64)
    self.assertIn(a.alloc(100), range(1 << 20))
    gone = weakref.ref(a)
    del a
    gc.collect()
    self.assertIsNone(gone())

  def test_dropped_captures_leave_no_planner_behind(self):
    def count():
      gc.collect()
      return sum(type(o) is TLSFAllocator for o in gc.get_objects())
    def capture():
      f = TinyJit(lambda x: ((x + 1).contiguous() * 2).contiguous().sum().realize())
      for i in range(3): f(Tensor.full((64,), float(i)).contiguous().realize())
    capture()
    before = count()
    for _ in range(20): capture()
    self.assertEqual(count(), before)

if __name__ == "__main__": unittest.main()
