"""Speed of CPU kernels on aligned data: the built tree against the unmodified tinygrad, which promises compilers more alignment than views have.
Two processes live side by side and take turns, kernel by kernel; the fastest run of each counts."""
from __future__ import annotations
import json, pathlib, statistics, subprocess, sys, tempfile, time
from collections.abc import Iterator
from typing import IO, Any

DEVICES = ("CPU", "CPU:LLVM")

def kernels() -> dict[str, Any]:
  """name -> captured function of no arguments. Inputs are whole buffers, hence aligned."""
  import numpy as np
  from tinygrad import Tensor, TinyJit  # type: ignore[attr-defined]
  rng = np.random.default_rng(0)
  def real(*shape: int, dtype: type = np.float32) -> Tensor: return Tensor((rng.random(shape) * 100).astype(dtype)).realize()
  a, b, m, n = real(1 << 20), real(1 << 20), real(256, 256), real(256, 256)
  u, h, i = real(1 << 20, dtype=np.uint8), real(1 << 19, dtype=np.float16), real(1 << 20, dtype=np.int32)
  img, w = real(1, 16, 64, 64), real(16, 16, 3, 3)
  fns = {"add": lambda: a + b, "chain": lambda: (a * 2 + b).relu() * a, "sum": lambda: a.sum(), "rows": lambda: a.reshape(1024, 1024).sum(1),
         "matmul": lambda: m @ n, "softmax": lambda: a.reshape(1024, 1024).softmax(), "conv": lambda: img.conv2d(w, padding=1),
         "int": lambda: i * 3 + 1, "uint8": lambda: u.float() / 255, "half": lambda: h * 2 + h}
  def capture(f: Any) -> Any: return TinyJit(lambda: f().realize())
  return {name: capture(f) for name, f in fns.items()}

def child() -> None:
  from tinygrad import Device  # type: ignore[attr-defined]
  fns = kernels()
  for f in fns.values():
    for _ in range(3): f()
  print(json.dumps(sorted(fns)), flush=True)
  for line in sys.stdin:
    best = 1e9
    for _ in range(10):
      Device["CPU"].synchronize()
      start = time.perf_counter_ns()
      fns[line.strip()]()
      Device["CPU"].synchronize()
      best = min(best, time.perf_counter_ns() - start)
    print(json.dumps(best), flush=True)

def ratios(old: dict[str, str], new: dict[str, str], turns: int = 30) -> Iterator[tuple[str, dict[str, float]]]:
  """(device, kernel -> time of the new code over that of the old) for both CPU compilers. `old`, `new`: environments of the two trees."""
  for dev in DEVICES:
    with tempfile.TemporaryDirectory() as tmp, tempfile.TemporaryFile("w+") as log:
      def start(env: dict[str, str], name: str, log: IO[str] = log, dev: str = dev, tmp: str = tmp) -> subprocess.Popen[str]:
        full = {**env, "DEV": dev, "THREADS": "0", "PARALLEL": "0", "XDG_CACHE_HOME": str(pathlib.Path(tmp) / name)}
        return subprocess.Popen([sys.executable, __file__], env=full, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
      def ask(p: subprocess.Popen[str], what: str | None, log: IO[str] = log) -> Any:
        assert p.stdin is not None and p.stdout is not None
        if what is not None: print(what, file=p.stdin, flush=True)
        if line := p.stdout.readline(): return json.loads(line)
        log.seek(0)
        raise RuntimeError(f"aligned.py ended with status {p.wait()}:\n{log.read()[-2000:]}")
      pair = start(old, "old"), start(new, "new")
      try:
        names = [ask(p, None) for p in pair][0]
        times: list[dict[str, list[int]]] = [{n: [] for n in names} for _ in pair]
        for turn in range(turns):
          for n in names:
            for k in (0, 1) if turn % 2 else (1, 0): times[k][n].append(ask(pair[k], n))
        yield dev, {n: round(min(times[1][n]) / min(times[0][n]), 3) for n in names}
      finally:
        for p in pair:
          if p.stdin is not None: p.stdin.close()
          p.wait(30)

def summary(kernel_ratios: dict[str, float]) -> tuple[float, str]:
  """(median ratio, name of the slowest kernel by ratio)."""
  return round(statistics.median(kernel_ratios.values()), 3), max(kernel_ratios, key=kernel_ratios.__getitem__)

if __name__ == "__main__": child()
