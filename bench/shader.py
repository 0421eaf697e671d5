"""Child of `dev bench shader`: the virtual shader core on some kernels, against tinygrad's CPU device on the same computations. Prints JSON.

{workload: {"lanes": active lanes times instructions of a run, "seconds": [CPU time of each run on one thread], "wall": {threads: [time of each run]},
"cpu": [CPU time of the same on DEV=CPU], "translate": [time of each program that it needs, instructions]}}. A result that is wrong, or not the same
bits with more threads, ends the process. IMAGE=1 runs only the workload with images.
"""
from __future__ import annotations
import json, os, sys, time
from collections.abc import Callable
from typing import Any
import numpy as np
from test.mockgpu import qcom
from test.mockgpu.qcom.ir3.native import Engine, Program
from tinygrad import Device, Tensor, TinyJit
from tinygrad.helpers import IMAGE

def workloads() -> dict[str, tuple[Callable[..., Tensor], Callable[..., np.ndarray], list[np.ndarray], int]]:
  """name -> (computation, the same by numpy, inputs, runs)."""
  rng = np.random.default_rng(1)
  def floats(*shape: int) -> np.ndarray: return rng.random(shape, np.float32) - 0.5
  def softmax(x: np.ndarray) -> np.ndarray: return (e := np.exp(x - x.max(1, keepdims=True))) / e.sum(1, keepdims=True)
  def conv(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    p = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return sum(np.einsum("nchw,oc->nohw", p[:, :, i:i + 64, j:j + 64], w[:, :, i, j], optimize=True) for i in range(3) for j in range(3))
  conv_inputs = [floats(1, 32, 64, 64), floats(32, 32, 3, 3)]
  if IMAGE: return {"conv 3x3, images": (lambda x, w: x.conv2d(w, padding=1), conv, conv_inputs, 3)}
  return {"matmul 256": (Tensor.matmul, np.matmul, [floats(256, 256), floats(256, 256)], 5),
          "matmul 512": (Tensor.matmul, np.matmul, [floats(512, 512), floats(512, 512)], 2),
          "conv 3x3": (lambda x, w: x.conv2d(w, padding=1), conv, conv_inputs, 3),
          "softmax": (Tensor.softmax, softmax, [floats(512, 1024)], 5),
          "gather, int64": (lambda x, i: x.gather(0, i), lambda x, i: x[i], [floats(1 << 16), rng.integers(0, 1 << 16, 1 << 18)], 5)}

translations: dict[Program, float] = {}                             # program -> CPU time of decoding and translation

def clocked(name: str) -> None:
  """Adds the time of that method of Program to `translations`."""
  real = getattr(Program, name)
  def timed(self: Program, *args: Any, **kwargs: Any) -> Any:
    start = time.thread_time()
    try: return real(self, *args, **kwargs)
    finally: translations[self] = translations.get(self, 0.0) + time.thread_time() - start
  setattr(Program, name, timed)

class Meter:
  """Stands around Engine.run: the dispatches of a run together."""
  def __init__(self, engine: Any):
    self.engine, self.seconds, self.wall, self.real = engine, 0.0, 0.0, engine.run
    engine.run = self
  def __call__(self, prog: Program, d: Any) -> None:
    start, wall = time.thread_time(), time.perf_counter()           # with one thread the engine runs on the caller's
    try: self.real(prog, d)
    finally:
      self.seconds += time.thread_time() - start
      self.wall += time.perf_counter() - wall

def native(compute: Callable[..., Tensor], arrays: list[np.ndarray]) -> list[float]:
  """CPU time of the process for one run on DEV=CPU, captured."""
  inputs, f = [Tensor(a, device="CPU").realize() for a in arrays], TinyJit(lambda *xs: compute(*xs).realize())
  def run() -> None:
    f(*inputs)
    Device["CPU"].synchronize()
  for _ in range(3): run()
  out = []
  for _ in range(5):
    start = time.process_time()
    run()
    out.append(time.process_time() - start)
  return out

def main() -> None:
  gpu, out = qcom.current().gpu, {}
  meters = {threads: Meter(Engine(threads=threads)) for threads in (1, os.cpu_count() or 1)}
  for method in ("__init__", "translated"): clocked(method)
  for name, (compute, reference, arrays, runs) in workloads().items():
    inputs, results = [Tensor(a).realize() for a in arrays], {}
    entry = out[name] = {"lanes": 0, "seconds": [], "wall": {n: [] for n in meters}, "translate": [], "cpu": native(compute, arrays)}
    for threads, meter in meters.items():
      gpu._engine = meter.engine
      translations.clear()
      for run in range(runs + 1):
        meter.seconds, meter.wall, lanes = 0.0, 0.0, int(meter.engine.lanes.sum())
        results[threads] = compute(*inputs).numpy()
        if run == 0: continue                                       # which decodes and translates
        if threads == 1:
          entry["lanes"] = int(meter.engine.lanes.sum()) - lanes
          entry["seconds"].append(meter.seconds)
        entry["wall"][threads].append(meter.wall)
        if threads == 1: entry["translate"] = [(t, len(p.instrs)) for p, t in translations.items()]
    if not np.allclose(results[1], reference(*arrays), rtol=1e-3, atol=1e-3): sys.exit(f"{name}: wrong result")
    if results[1].tobytes() != results[max(meters)].tobytes(): sys.exit(f"{name}: other bits with {max(meters)} threads")
  print(json.dumps(out))

if __name__ == "__main__": main()
