import tempfile, unittest
import numpy as np
try: import onnx
except ModuleNotFoundError as e: raise unittest.SkipTest("needs onnx") from e
from tinygrad.nn.onnx import OnnxRunner

def runner(a, b) -> OnnxRunner:
  """A model that multiplies matrix `a` by `b`; both shapes as a model file may give them, None for no shape."""
  ins = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("a", a), ("b", b))]
  out = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, None)
  graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["a", "b"], ["c"])], "g", ins, [out])
  with tempfile.NamedTemporaryFile(suffix=".onnx") as f:
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), f.name)
    return OnnxRunner(f.name)

class TestOnnxDims(unittest.TestCase):
  def check(self, model:OnnxRunner, a:tuple, b:tuple):
    x, y = np.random.default_rng(0).standard_normal(a, dtype=np.float32), np.random.default_rng(1).standard_normal(b, dtype=np.float32)
    np.testing.assert_allclose(model({"a": x, "b": y})["c"].numpy(), x @ y, rtol=1e-5, atol=1e-5)

  def test_unknown(self):
    for unknown in ("?", "-1", "None", -1, None): self.check(runner([unknown, 4], [4, unknown]), (2, 4), (4, 2))
  def test_unknown_may_differ(self):
    for unknown in ("?", "-1", -1, None):
      model = runner([unknown, unknown, 4], [4, unknown])
      self.check(model, (2, 3, 4), (4, 5))
      self.check(model, (3, 1, 4), (4, 2))
  def test_no_shape(self):
    model = runner(None, None)
    for a, b in (((2, 3), (3, 2)), ((5, 2, 3), (5, 3, 4))): self.check(model, a, b)

  def test_rank(self):
    model = runner(["?", 4], [4, 2])
    with self.assertRaisesRegex(RuntimeError, "input a has mismatch on rank. Expected 2 dimensions, received 3"):
      self.check(model, (1, 2, 4), (4, 2))
  def test_a_name_is_one_size(self):
    with self.assertRaisesRegex(RuntimeError, "input b has mismatch on dim=1. Expected 2, received 3"):
      self.check(runner(["n", 4], [4, "n"]), (2, 4), (4, 3))
  def test_a_size_is_a_size(self):
    with self.assertRaisesRegex(RuntimeError, "input a has mismatch on dim=1. Expected 4, received 5"):
      self.check(runner(["?", 4], [4, 2]), (2, 5), (4, 2))

if __name__ == "__main__": unittest.main()
