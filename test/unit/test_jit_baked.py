import pickle, unittest, warnings
import numpy as np
from tinygrad import Tensor, TinyJit, Variable
from tinygrad.helpers import Context

def const(v:float) -> Tensor: return Tensor(np.full(4, v, np.float32)).realize()

class Model:
  def __init__(self, scale:float): self.scale = const(scale)
  @TinyJit
  def forward(self, x:Tensor) -> Tensor: return (x * self.scale).realize()

class TestJitBaked(unittest.TestCase):
  """What a capture took as a constant can't change afterwards. A call that tries is told so."""
  def assert_quiet(self, fxn, *args, **kwargs):
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      return fxn(*args, **kwargs)

  def test_another_instance(self):
    a, b = Model(2), Model(3)
    Model.__dict__["forward"].reset()
    for k in range(3): self.assert_quiet(a.forward, const(k))
    with self.assertWarnsRegex(UserWarning, "shared by all instances of Model.*TinyJit"): b.forward(const(1))
    np.testing.assert_array_equal(self.assert_quiet(a.forward, const(5)).numpy(), np.full(4, 10, np.float32))

  def test_jit_of_each_instance(self):
    class Own(Model):
      def __init__(self, scale:float):
        super().__init__(scale)
        self.forward = TinyJit(self.plain)
      def plain(self, x:Tensor) -> Tensor: return (x * self.scale).realize()
    models = [Own(2), Own(3)]
    for k in range(4):
      for m, s in zip(models, (2, 3)):
        np.testing.assert_array_equal(self.assert_quiet(m.forward, const(k)).numpy(), np.full(4, k*s, np.float32))

  def test_other_constants(self):
    for old, new in ((2, 3), (True, False), (1.5, 2.5), ("sum", "max"), (None, 1), (1, None)):
      with self.subTest(f"{old!r} -> {new!r}"):
        jit = TinyJit(lambda x, how, also=None: (x + (how if isinstance(how, (int, float)) else 0)).realize())
        for k in range(4): self.assert_quiet(jit, const(k), old, also=old)
        with self.assertWarnsRegex(UserWarning, f"argument 1 .* constant {old!r}, {new!r} is ignored"): jit(const(1), new, also=old)
        with self.assertWarnsRegex(UserWarning, f"argument also .* constant {old!r}, {new!r} is ignored"): jit(const(1), old, also=new)

  def test_what_may_change(self):
    v, jit = Variable("n", 1, 4), TinyJit(lambda x, n, rest: (x[:n].sum() + rest["b"].sum()).realize())
    for k in range(1, 5): self.assertEqual(self.assert_quiet(jit, const(k), v.bind(k), {"b": const(k)}).item(), k*k + 4*k)

  def test_no_capture_no_constant(self):
    jit = TinyJit(lambda x, n: (x * n).realize())
    with Context(JIT=0):
      for k in range(4): np.testing.assert_array_equal(self.assert_quiet(jit, const(1), k).numpy(), np.full(4, k, np.float32))

  def test_loaded_capture(self):
    jit = TinyJit(lambda x, n: (x * n).realize())
    for k in range(3): jit(const(k), 2)
    np.testing.assert_array_equal(self.assert_quiet(pickle.loads(pickle.dumps(jit)), const(3), 2).numpy(), np.full(4, 6, np.float32))

if __name__ == "__main__": unittest.main()
