import collections, pickle, unittest
import numpy as np
from tinygrad import Tensor, TinyJit, dtypes

Pair = collections.namedtuple("Pair", "a b")

def flat(ret) -> list[np.ndarray]: return [t.numpy() for t in ((ret,) if isinstance(ret, Tensor) else ret.values() if isinstance(ret, dict) else ret)]

def numbers(n:int, i:int=0, device=None) -> Tensor: return Tensor(np.arange(n, dtype=np.float32) + 100*i, device=device).realize()

class TestJitOutputs(unittest.TestCase):
  """What a captured function returns of an input is that of the call's input, not of the captured one."""
  def check(self, f, make=lambda i: numbers(16, i)) -> TinyJit:
    jit = TinyJit(f)
    for i in range(5): self.same(jit(make(i)), f(make(i)), i)
    self.same((loaded:=pickle.loads(pickle.dumps(jit)))(make(7)), f(make(7)), "pickled")
    return loaded
  def same(self, got, want, msg) -> None:
    self.assertIs(type(got), type(want))
    for g, w in zip(flat(got), flat(want), strict=True): np.testing.assert_array_equal(g, w, f"call {msg}")

  def test_contiguous_slice(self): self.check(lambda x: x[4:12].contiguous())
  def test_slice_and_more(self): self.check(lambda x: (x * 2, x[4:12].contiguous(), x[1:3]))
  def test_input(self): self.check(lambda x: ((x * 2).realize(), x))
  def test_reshaped_and_transposed(self):
    self.check(lambda x: [x + 1, x.reshape(4, 4).contiguous(), x.reshape(4, 4).T, x.reshape(16, 1).expand(16, 2)])
  def test_other_dtype(self): self.check(lambda x: (x + 1, x.bitcast(dtypes.int32)))
  def test_containers(self):
    self.check(lambda x: {"b": x[1:3], "a": x * 2})
    self.check(lambda x: Pair(x * 2, x[1:3]))
  def test_input_that_is_a_view(self):
    self.check(lambda x: (x * 2, x[1:3], x[2:4].contiguous()), lambda i: numbers(64, i)[8:24].contiguous().realize())
  def test_npy(self): self.check(lambda x: (x.to("CPU") * 2, x[4:12].contiguous()), lambda i: numbers(16, i, "NPY"))
  def test_in_place(self):
    def add(x:Tensor) -> Tensor:
      x += 1
      return x.realize()
    self.check(add)
    def slice_of_it(x:Tensor) -> tuple[Tensor, Tensor]:
      x[2:4] = x[0:2] * 3
      return x.realize(), x[1:5].contiguous()
    self.check(slice_of_it)

  def test_results_of_two_calls(self):
    jit = TinyJit(lambda x: (x * 2, x[4:12].contiguous()))
    kept = [jit(numbers(16, i))[1] for i in range(5)]
    self.assertEqual([t[0].item() for t in kept], [4, 104, 204, 304, 404])

  def test_fed_back(self):
    jit, x = TinyJit(lambda x: (x + 1, x[:8].contiguous())), numbers(16)
    for i in range(6):
      x, part = jit(x)
      self.assertEqual((x[0].item(), part[0].item()), (i + 1, i))

  def test_own_outputs_are_the_same_tensors(self):
    jit = TinyJit(lambda x: (x + 1, x[:8].contiguous()))
    outs = [jit(numbers(16, i)) for i in range(4)]
    self.assertIs(outs[2][0], outs[3][0])
    self.assertIsNot(outs[2][1], outs[3][1])

if __name__ == "__main__": unittest.main()
