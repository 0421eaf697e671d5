"""The script to start from: a matrix product and a JIT replay on an Adreno 630, checked with numpy.

    DEV=MOCKMSM+QCOM ./dev run examples/matmul.py        the virtual Adreno 630, on any Linux machine
    DEV=QCOM ./dev run examples/matmul.py                a phone or board that has one

DEBUG=2 lists the kernels with their GPU times, DEBUG=4 shows their source.
"""
import time
import numpy as np
from tinygrad import Device, Tensor, TinyJit

N = 256

@TinyJit # the first call runs eagerly, the second captures, the third and all later ones replay what was captured: one submit to the kernel
def layer(x: Tensor, w: Tensor) -> Tensor: return (x @ w).relu().realize()

print(f"on {Device.DEFAULT}, interface {type(getattr(Device[Device.DEFAULT], 'iface', None)).__name__}")
rng = np.random.default_rng(0)
w = rng.standard_normal((N, N), dtype=np.float32)
weights = Tensor(w).realize() # lives in GPU memory from here on

for run in ("eager", "capture", "replay", "replay"):
  x = rng.standard_normal((N, N), dtype=np.float32)
  inputs, start = Tensor(x).realize(), time.perf_counter()
  result = layer(inputs, weights).numpy() # numpy() waits for the GPU
  seconds, error = time.perf_counter() - start, np.abs(result - np.maximum(x @ w, 0)).max()
  print(f"{run:8} {seconds * 1e3:8.1f} ms, {2 * N**3 / seconds / 1e9:7.3f} GFLOPS, largest difference from numpy {error:.1e}")
  assert error < 1e-3, "not what numpy computes"
