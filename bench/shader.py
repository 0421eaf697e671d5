"""Child of `dev bench`: lane-instructions a second of the virtual shader core on one thread, with all strict checks. Prints JSON.

{workload: {"lanes": active lanes times instructions of a run, "seconds": [CPU time of each run]}}. Decoding and translation are not counted: the
first run does them.
"""
from __future__ import annotations
import json, sys, time
from collections.abc import Callable
from typing import Any
import numpy as np
from test.mockgpu import qcom
from test.mockgpu.qcom.ir3.native import Engine
from tinygrad import Tensor

def workloads() -> dict[str, tuple[Callable[..., Tensor], Callable[..., np.ndarray], list[tuple[int, ...]], int]]:
  """name -> (computation, the same by numpy, shapes of the inputs, runs)."""
  def softmax(x: np.ndarray) -> np.ndarray: return (e := np.exp(x - x.max(1, keepdims=True))) / e.sum(1, keepdims=True)
  def conv(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    p = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return sum(np.einsum("nchw,oc->nohw", p[:, :, i:i + 64, j:j + 64], w[:, :, i, j], optimize=True) for i in range(3) for j in range(3))
  return {"matmul 256": (Tensor.matmul, np.matmul, [(256, 256)] * 2, 5), "matmul 512": (Tensor.matmul, np.matmul, [(512, 512)] * 2, 2),
          "conv 3x3": (lambda x, w: x.conv2d(w, padding=1), conv, [(1, 32, 64, 64), (32, 32, 3, 3)], 3),
          "softmax": (Tensor.softmax, softmax, [(512, 1024)], 5)}

class Meter:
  """Stands around Engine.run: the dispatches of a run together."""
  def __init__(self, engine: Any):
    self.engine, self.seconds, self.real = engine, 0.0, engine.run
    engine.run = self
  def __call__(self, *args: Any) -> None:
    start = time.thread_time()                          # with one thread the engine runs on the caller's
    try: self.real(*args)
    finally: self.seconds += time.thread_time() - start

def main() -> None:
  engine = qcom.current().gpu._engine = Engine(threads=1)
  meter, rng, out = Meter(engine), np.random.default_rng(1), {}
  for name, (compute, reference, shapes, runs) in workloads().items():
    arrays = [rng.random(s, np.float32) - 0.5 for s in shapes]
    inputs = [Tensor(a).realize() for a in arrays]
    seconds, lanes = [], 0
    for _ in range(runs + 1):
      meter.seconds, lanes = 0.0, int(engine.lanes.sum())
      got = compute(*inputs).numpy()
      lanes = int(engine.lanes.sum()) - lanes
      seconds.append(meter.seconds)
    if not np.allclose(got, reference(*arrays), rtol=1e-3, atol=1e-3): sys.exit(f"{name}: wrong result")
    out[name] = {"lanes": lanes, "seconds": seconds[1:]}
  print(json.dumps(out))

if __name__ == "__main__": main()
