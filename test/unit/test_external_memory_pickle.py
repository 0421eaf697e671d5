import gc, os, pathlib, pickle, subprocess, sys, tempfile, unittest
import numpy as np
from tinygrad import Tensor, TinyJit, dtypes

def wrap(a:np.ndarray) -> Tensor: return Tensor.from_blob(a.ctypes.data, a.shape, dtype=dtypes.float32, device="CPU")

class TestExternalMemoryPickle(unittest.TestCase):
  """Memory wrapped with from_blob is pickled by contents: what is loaded owns its memory."""
  def setUp(self): self.mem = np.arange(64, dtype=np.float32)

  def load_while_changed(self, make, protocol:int) -> Tensor:
    """Loads what was pickled before the memory changed, when the original is gone. Loading must leave the memory alone."""
    buffers:list[pickle.PickleBuffer] = []
    kwargs = {"buffer_callback": buffers.append} if protocol == 5 else {}
    blob = pickle.dumps(make(), protocol=protocol, **kwargs)
    bufs = [bytes(b.raw()) for b in buffers]
    gc.collect()
    self.mem[:] = 7
    ret = pickle.loads(blob, buffers=bufs)
    np.testing.assert_array_equal(self.mem, np.full(64, 7, np.float32), "loading wrote to the wrapped memory")
    return ret

  def test_tensor(self):
    for protocol in (4, 5):
      with self.subTest(protocol=protocol):
        self.mem[:] = np.arange(64)
        loaded = self.load_while_changed(lambda: wrap(self.mem).realize(), protocol)
        np.testing.assert_array_equal((loaded + 1).numpy(), np.arange(1, 65, dtype=np.float32))

  def test_view(self):
    loaded = self.load_while_changed(lambda: wrap(self.mem)[16:32].contiguous().realize(), 4)
    np.testing.assert_array_equal((loaded + 1).numpy(), np.arange(17, 33, dtype=np.float32))

  def test_memory_is_still_wrapped_after_pickling(self):
    x = wrap(self.mem).realize()
    pickle.dumps(x)
    self.mem[:] = 3
    np.testing.assert_array_equal((x + 1).numpy(), np.full(64, 4, np.float32))

  def test_capture_in_another_process(self):
    weights = wrap(self.mem).realize()
    jit = TinyJit(lambda x: (x + weights).realize())
    for k in range(3): jit(Tensor(np.full(64, k, np.float32), device="CPU").realize())
    script = """import pickle, sys
import numpy as np
from tinygrad import Tensor
jit = pickle.load(open(sys.argv[1], "rb"))
for k in range(3): np.testing.assert_array_equal(jit(Tensor(np.full(64, k, np.float32), device="CPU").realize()).numpy(), np.arange(64) + k)"""
    with tempfile.TemporaryDirectory() as d:
      (path:=pathlib.Path(d)/"capture.pkl").write_bytes(pickle.dumps(jit))
      ret = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120, env=dict(os.environ))
    self.assertEqual(ret.returncode, 0, f"the loading process ended with {ret.returncode}: {ret.stderr}")

if __name__ == "__main__": unittest.main()
