import os, unittest
import numpy as np
from tinygrad import Tensor, dtypes

class TestExternalFd(unittest.TestCase):
  def test_a_device_that_imports_nothing_refuses(self):
    fd = os.memfd_create("x")
    self.addCleanup(os.close, fd)
    os.ftruncate(fd, 4096)
    with self.assertRaisesRegex(RuntimeError, "can't use memory behind a file descriptor.*pointer"):
      Tensor.from_blob(None, (16,), fd=fd, dtype=dtypes.float32, device="CPU")

  def test_one_of_pointer_and_descriptor(self):
    a = np.arange(4, dtype=np.float32)
    for ptr, fd, said in ((None, None, "neither"), (a.ctypes.data, 3, "both")):
      with self.assertRaisesRegex(ValueError, said): Tensor.from_blob(ptr, (4,), fd=fd, dtype=dtypes.float32, device="CPU")

  def test_elements_lie_at_multiples_of_their_size(self):
    a = np.arange(8, dtype=np.int16)
    self.assertEqual(Tensor.from_blob(a.ctypes.data + 2, (4,), dtype=dtypes.int16, device="CPU").tolist(), [1, 2, 3, 4])
    with self.assertRaisesRegex(ValueError, "multiple of 4"): Tensor.from_blob(a.ctypes.data + 2, (2,), dtype=dtypes.int32, device="CPU")
    with self.assertRaisesRegex(ValueError, "multiple of 8"): Tensor.from_blob(None, (2,), fd=0, offset=4, dtype=dtypes.float64, device="CPU")

if __name__ == "__main__": unittest.main()
