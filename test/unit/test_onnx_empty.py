import tempfile, unittest
import numpy as np
try: import onnx
except ModuleNotFoundError as e: raise unittest.SkipTest("needs onnx") from e
from tinygrad.nn.onnx import OnnxRunner

def concat(dims:list[int], kind:int, values:list) -> OnnxRunner:
  """A model that appends a stored tensor to its input."""
  x, y = (onnx.helper.make_tensor_value_info(n, kind, ["n", *dims[1:]]) for n in "xy")
  stored = onnx.TensorProto(dims=dims, data_type=kind, name="stored", float_data=values)
  graph = onnx.helper.make_graph([onnx.helper.make_node("Concat", ["x", "stored"], ["y"], axis=0)], "g", [x], [y], [stored])
  with tempfile.NamedTemporaryFile(suffix=".onnx") as f:
    f.write(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]).SerializeToString())
    f.flush()
    return OnnxRunner(f.name)

class TestOnnxEmpty(unittest.TestCase):
  def test_a_tensor_of_no_elements_has_no_data(self):
    for dims, kind, dtype in (([0], onnx.TensorProto.FLOAT, np.float32), ([0, 3], onnx.TensorProto.FLOAT, np.float32),
                              ([0], onnx.TensorProto.INT64, np.int64)):
      x = np.arange(6).reshape(-1, *dims[1:]).astype(dtype)
      np.testing.assert_array_equal(concat(dims, kind, [])({"x": x})["y"].numpy(), x)

  def test_missing_data_is_an_error_that_names_the_tensor(self):
    with self.assertRaisesRegex(ValueError, r"stored of shape \(2,\) has no data"): concat([2], onnx.TensorProto.FLOAT, [])
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(concat([2], onnx.TensorProto.FLOAT, [7, 8])({"x": x})["y"].numpy(), [0, 1, 2, 7, 8])

if __name__ == "__main__": unittest.main()
