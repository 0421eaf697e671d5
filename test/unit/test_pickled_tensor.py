import copy, gc, pickle, unittest
import numpy as np
from tinygrad import Tensor, TinyJit, nn

def load(make): # what was pickled is gone when it is loaded
  blob = pickle.dumps(make())
  gc.collect()
  return pickle.loads(blob)
def const(v:float) -> Tensor: return Tensor(np.full(4, v, np.float32)).realize()

class TestPickledTensor(unittest.TestCase):
  """A tensor that comes from a pickle or a copy takes part in what happens to its graph like one that was constructed."""
  def check(self, x:Tensor, v:float): np.testing.assert_array_equal(x.numpy(), np.full(4, v, np.float32))

  def test_assign_happens_once(self):
    x = load(lambda: const(3))
    x.assign(x + 1).realize()
    for _ in range(2): self.check(x, 4)

  def test_assign_without_realize(self):
    x = load(lambda: const(3))
    x.assign(x + 1)
    for _ in range(2): self.check(x + 0, 4)

  def test_lazy_tensor_is_realized_once(self):
    x = load(lambda: const(3)*2)
    self.assertFalse(x.uop.is_realized)
    self.assertTrue(x.realize().uop.is_realized)
    self.check(x, 6)

  def test_sharing_within_a_pickle(self):
    x, (y, z) = load(lambda: ((a:=const(3)), [a, a.reshape(2, 2)]))
    x.assign(x + 1).realize()
    self.check(y, 4)
    self.check(z.reshape(4), 4)

  def test_state_next_to_a_capture(self):
    def make():
      state = const(0)
      jit = TinyJit(lambda x: state.assign(state + x).realize())
      for _ in range(3): jit(const(1))
      return jit, state
    jit, state = load(make)
    jit(const(1))
    self.check(state, 4)
    state.assign(state*10).realize()
    jit(const(1))
    self.check(state, 41)

  def test_gradients(self):
    lin = load(lambda: nn.Linear(4, 2))
    lin(const(1)).sum().backward()
    np.testing.assert_array_equal(lin.weight.grad.numpy(), np.ones((2, 4), np.float32))

  def test_copy(self):
    x = const(3)
    y = copy.copy(x)
    y.assign(y + 1).realize()
    for _ in range(2): self.check(y, 4)

if __name__ == "__main__": unittest.main()
