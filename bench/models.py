"""Child of `dev bench models`: the pipeline of examples/drive.py with the QCOM driver that DEV and PYTHONPATH select; frames lie in device memory.

    models.py compile [FILE]    compiles and captures with empty caches while nothing is executed, then measures replays; writes the capture to FILE
    models.py load FILE         loads FILE and replays it once

Prints one line of JSON: CPU seconds of this process and its compilers, ns of replays without the time in the virtual kernel; wall seconds for load.
"""
from __future__ import annotations
import json, os, pathlib, pickle, sys, time, types
import numpy as np
import host
from tinygrad import Tensor, TinyJit
from tinygrad.engine import realize
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
import drive

SIZE = drive.SIZES["small"]
STRIDE = -(-SIZE.camera[0] // 64) * 64
FRAME = types.SimpleNamespace(stride=STRIDE, uv=STRIDE * SIZE.camera[1] + 64, bytes=STRIDE * SIZE.camera[1] + 64 + STRIDE * (SIZE.camera[1] // 2))

def inputs(seed: int) -> dict[str, Tensor]:
  what = drive.drive(SIZE, FRAME, 1, seed) # type: ignore[arg-type]
  return {**{n: Tensor(what.frames[0, i]).realize() for i, n in enumerate(("road", "wide"))}, "traffic": Tensor(what.traffic[0]).realize(),
          "transforms": Tensor(what.transforms[0], device="NPY"), "desire": Tensor(what.desire[0], device="NPY")}

def used() -> float: return sum(os.times()[:4])

def compile(path: str = "") -> dict:
  host.hold_jobs(host.qcom.current().gpu)
  model = drive.Model(SIZE, FRAME) # type: ignore[arg-type]
  jit, sets = TinyJit(model.step), [inputs(n) for n in range(2)]
  start = used()
  for s in sets: jit(**s)
  host.synchronize()
  compiled = used() - start
  for s in sets * 2: jit(**s)
  host.synchronize()
  replays = host.clocked(lambda n: jit(**sets[n % 2]), 60, host.synchronize)
  if path: pathlib.Path(path).write_bytes(pickle.dumps((jit, model.state()), protocol=5))
  return {"compile": compiled, "replays": replays}

def load(path: str) -> dict:
  with open(path, "rb") as f: data = f.read()
  sets, _ = inputs(0), host.synchronize()
  start = time.perf_counter()
  jit, _ = pickle.loads(data)
  loaded = time.perf_counter()
  out, _ = jit(**sets)
  assert np.isfinite(out.numpy()).all() and not realize.to_program_cache, "kernels were compiled"
  return {"load": loaded - start, "first": time.perf_counter() - loaded}

if __name__ == "__main__": print(json.dumps({"compile": compile, "load": load}[sys.argv[1]](*sys.argv[2:])))
