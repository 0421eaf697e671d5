import gc, unittest
from unittest.mock import patch
import numpy as np
from tinygrad import Tensor, TinyJit, Variable
from tinygrad.engine.jit import JitError
from tinygrad.uop.ops import UOp

def const(v:float, n:int=4) -> Tensor: return Tensor(np.full(n, v, np.float32)).realize()

class TestJitInputs(unittest.TestCase):
  """What a replay is checked against is worked out once for each input, not at each call."""
  def rewrites(self, f:TinyJit, *args:Tensor) -> int:
    with patch.object(UOp, "substitute", autospec=True, side_effect=UOp.substitute) as substitute: f(*args)
    return substitute.call_count

  def test_no_rewrite_for_known_inputs(self):
    for view in (lambda t: t, lambda t: t.reshape(2, 2), lambda t: t[2:]):
      f, bases = TinyJit(lambda a, b: (a + b).realize()), [const(n) for n in range(4)]
      inputs = [view(b) for b in bases]
      for n in range(6): f(inputs[n % 4], inputs[(n + 1) % 4])
      self.assertEqual([self.rewrites(f, inputs[n % 4], inputs[(n + 1) % 4]) for n in range(4)], [0] * 4)
      np.testing.assert_array_equal(f(inputs[3], inputs[1]).numpy(), np.full(inputs[0].shape, 4, np.float32))

  def test_one_input_at_two_places(self):
    # the same input has another number when another one comes before it
    f, (a, b, c) = TinyJit(lambda x, y: (x - y).realize()), [const(n) for n in (1, 2, 5)]
    for _ in range(3): f(a, b)
    for x, y in ((a, b), (b, a), (c, a), (a, c), (b, c)): self.assertEqual(f(x, y).tolist(), (x - y).tolist())

  def test_a_known_input_is_still_checked(self):
    f, a, b = TinyJit(lambda x: (x + 1).realize()), const(1), const(2, n=8)
    for _ in range(3): f(a)
    for _ in range(2):
      with self.assertRaises(JitError): f(b)
      self.assertEqual(f(a).tolist(), [2.0] * 4)
    g = TinyJit(lambda x, y: (x + y).realize())
    for n in range(3): g(a, const(n))
    with self.assertRaisesRegex(JitError, "duplicate"): g(a, a)

  def test_a_known_input_that_was_freed(self):
    f, a, b = TinyJit(lambda x: (x + 1).realize()), const(1), const(2)
    for _ in range(3): f(a)
    a.uop.buffer.deallocate()
    with self.assertRaisesRegex(JitError, "never written"): f(a)
    self.assertEqual(f(b).tolist(), [3.0] * 4)
    a.assign(const(5)).realize()
    self.assertEqual(f(a).tolist(), [6.0] * 4)

  def test_symbolic_views(self):
    base, f = Tensor(np.arange(10, dtype=np.float32)).realize(), TinyJit(lambda x: (x * 2).sum().realize())
    for n in (2, 3, 4, 7, 3): self.assertEqual(f(base[:Variable("n", 1, 10).bind(n)]).item(), float(np.arange(n).sum() * 2))

  def test_inputs_are_not_kept(self):
    from tinygrad.engine.jit import input_infos
    f, g = TinyJit(lambda x: (x + 1).realize()), TinyJit(lambda x: (x + 1).realize())
    f(const(0))
    gc.collect()
    before = len(input_infos)
    for n in range(20):
      f(const(n))
      g(const(n, n=8)[4:])
    gc.collect()
    self.assertLessEqual(len(input_infos), before + 2)

if __name__ == "__main__": unittest.main()
