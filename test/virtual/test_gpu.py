"""The virtual GPU end to end: compiled kernels through the command processor, compared with numpy; what a wrong driver gets told."""
import numpy as np, pytest
pytest.importorskip("tinygrad.runtime.autogen.mesa")
from test.virtual.rig import Rig, Stream, tinygrad_on

@pytest.fixture
def rig():
  r = Rig(hang_wait_s=0.3, budget=1 << 22)
  yield r
  r.close()

def test_elementwise_reduce_and_matmul_match_numpy(rig):
  from tinygrad import Tensor
  rng = np.random.default_rng(0)
  a, b = rng.standard_normal((64, 48), np.float32), rng.standard_normal((48, 32), np.float32)
  with tinygrad_on(rig) as calls:
    ta, tb = Tensor(a, device="NULL").contiguous().realize(), Tensor(b, device="NULL").contiguous().realize()
    np.testing.assert_allclose((ta * 2 + 1).numpy(), a * 2 + 1, rtol=1e-6)
    np.testing.assert_allclose((ta @ tb).numpy(), a @ b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ta.sum(axis=0).numpy(), a.sum(axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(tb.softmax().numpy(), np.exp(b) / np.exp(b).sum(-1, keepdims=True), rtol=1e-5)
  assert len(calls) >= 4 and rig.gpu.counters["dispatches"] == len(calls) and not rig.gpu.reports
