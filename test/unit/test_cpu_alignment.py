import os, subprocess, sys, unittest

PRELUDE = """
import numpy as np
from tinygrad import Tensor, dtypes
def sliced(dtype, offset, n):
  a = (np.arange(n + 8) % 100).astype(dtype)
  return Tensor(a).realize()[offset:offset + n].contiguous().realize(), a[offset:offset + n]
"""

class TestCPUAlignment(unittest.TestCase):
  """Views and external memory are aligned to their elements only. In child processes: a broken promise of alignment ends the process."""
  dev = "CPU"

  def run_child(self, script:str):
    ret = subprocess.run([sys.executable, "-c", PRELUDE + script + "\nprint('done')"], capture_output=True, text=True, timeout=120,
                         env={**os.environ, "DEV":self.dev})
    self.assertGreaterEqual(ret.returncode, 0, f"the child died with signal {-ret.returncode}")
    self.assertIn("done", ret.stdout, ret.stderr)

  def test_slices(self):
    self.run_child("""
for dtype in (np.float32, np.int32, np.float64, np.float16, np.uint8, np.int64):
  for offset in (1, 2, 3):
    x, a = sliced(dtype, offset, 64)
    np.testing.assert_array_equal((x + x).numpy(), a + a)""")

  def test_reduce_and_matmul(self):
    self.run_child("""
for offset in (1, 2, 3, 5):
  x, a = sliced(np.float32, offset, 4096)
  np.testing.assert_array_equal(x.sum().numpy(), a.sum())
  m = a.reshape(64, 64)
  np.testing.assert_allclose((x.reshape(64, 64) @ x.reshape(64, 64)).numpy(), m @ m)
  np.testing.assert_array_equal(x.reshape(64, 64).pad(((1, 1), (2, 2))).relu().contiguous().numpy(), np.pad(m, ((1, 1), (2, 2))))""")

  def test_store(self):
    self.run_child("""
for offset in (1, 2, 3):
  x, a = sliced(np.int32, offset, 64)
  np.testing.assert_array_equal(x.assign(x * 3 + 1).realize().numpy(), a * 3 + 1)""")

  def test_from_blob(self):
    self.run_child("""
raw = np.zeros(4096 + 64, np.uint8)
start = -raw.ctypes.data % 64
for dtype, name in ((np.float32, "float32"), (np.int32, "int32"), (np.float64, "float64")):
  for byte in (4, 8, 12, 20) if dtype is not np.float64 else (8, 24):
    mem = raw[start + byte:start + byte + 2048].view(dtype)
    mem[:] = np.arange(len(mem))
    x = Tensor.from_blob(mem.ctypes.data, (len(mem),), dtype=name)
    np.testing.assert_array_equal((x * 2 + 1).numpy(), mem * 2 + 1)
    mem[:] = mem[::-1].copy()
    np.testing.assert_array_equal((x * 3 + 1).numpy(), mem * 3 + 1)""")

  def test_view_of_other_dtype(self):
    self.run_child("""
a = np.arange(300, dtype=np.uint8)
for offset in (1, 4, 7):
  x = Tensor(a).realize()[offset:offset + 256].contiguous().realize().bitcast(dtypes.uint32).contiguous().realize()
  np.testing.assert_array_equal((x + 1).numpy(), a[offset:offset + 256].view(np.uint32) + 1)""")

class TestCPULLVMAlignment(TestCPUAlignment): dev = "CPU:LLVM"

if __name__ == "__main__": unittest.main()
