"""Replays and captures without end: counts of everything that could leak, as they are along the way. All checks of the virtual GPU are on.

    DEV=MOCKMSM+QCOM ./dev run bench/soak.py [REPLAYS [CAPTURES [SECONDS]]]    also MOCKKGSL+QCOM; on hardware without the kernel model's counts
    QCOM_MOCK='{"schedule": 3, "order": "reversed"}' DEV=...                   the virtual GPU's order of work: asap, late or a seed, see Config

Replays two captures in turn REPLAYS times (default 1,000,000) with inputs that change: one of a tiny kernel that updates an accumulator in place,
and every tenth time one of two kernels with an output of its own. Then makes, runs and drops CAPTURES captures (20,000). Either part ends after
SECONDS, if given, and says how far it came. Every 1000th result is compared with numpy, and the accumulator shows a replay that was lost, doubled or
out of order. Prints JSON lines, ends with status 1 if a count grew between the end of the warm-up (a tenth, at most 500) and the end.
"""
from __future__ import annotations
import ctypes, gc, json, os, sys, time
from collections.abc import Callable
from typing import Any
import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes

N = 16
def counts() -> dict[str, int]:
  """What is alive: Python objects, fds, resident MiB, allocations; on the virtual device also what its kernel model holds."""
  dev: Any = Device[Device.DEFAULT]
  dev.synchronize()
  gc.collect()                                                 # dropped captures are cycles, their buffers are kept for reuse
  dev.allocator.free_cache()
  ctypes.CDLL(None).malloc_trim(0)
  with open("/proc/self/statm") as f: rss = int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")
  found = {"allocations": len(dev.iface.live.starts), "fds": len(os.listdir("/proc/self/fd")),
           "slots": sum(s.used for s in dev.allocator.slabs),
           "slab_bytes": sum(size for s in dev.allocator.slabs for size, _, _, free in s.tlsf.blocks.values() if not free)}
  if type(dev.iface).__name__.startswith("MOCK"):
    from test.mockgpu import qcom
    machine = qcom.current()
    machine.gpu.idle(60)
    model = machine.msm if "MSM" in type(dev.iface).__name__ else machine.kgsl
    model.submits.clear() if hasattr(model, "submits") else model.commands.clear() # kept for tests
    found |= {k: v for k, v in model.live().items() if k not in ("fences", "pending")}
    assert not machine.gpu.reports, machine.gpu.reports[0]
  return found | {"objects": len(gc.get_objects()), "rss_mib": rss >> 20}

def grew(before: dict[str, int], after: dict[str, int]) -> list[str]:
  """What is not flat. MiB come and go with the allocators; bounded caches of tinygrad take some 1500 Python objects until they are full."""
  slack = {"objects": 2000, "rss_mib": 16}
  return [f"{k}: {before[k]} -> {after[k]}" for k in before if after[k] > before[k] + slack.get(k, 0)]

def soak(what: str, times: int, seconds: float, once: Callable[[int], None]) -> tuple[int, list[str]]:
  """Calls once(0), once(1), ..., until `times` or `seconds` are over. Returns how often, and what grew after the warm-up."""
  start, n, before = time.perf_counter(), 0, dict[str, int]()
  def say(**what: Any) -> None:
    print(json.dumps({"n": n, "s": round(time.perf_counter() - start, 1), "cpu_s": round(time.process_time(), 1), **what}), flush=True)
  while n < times and (not before or time.perf_counter() - start < seconds):
    if n == max(min(times // 10, 500), 20): before = counts()
    if n % min(max(times // 20, 1), 10000) == 0: say(soak=what, **counts())
    once(n)
    n += 1
  bad = grew(before, after := counts())
  say(soak=what, **after, grew=bad)
  return n, bad

def replays(times: int, seconds: float) -> list[str]:
  acc, want = Tensor.zeros(N, dtype=dtypes.int32).contiguous().realize(), np.zeros(N, np.int32)
  hosts = [np.arange(N, dtype=np.int32) * 7 + k for k in range(5)]
  xs = [Tensor(h).realize() for h in hosts]
  in_place = TinyJit(lambda x: acc.assign(acc * 5 + x).realize())
  def step(x: Tensor) -> Tensor:
    acc.assign(acc * 5 + x)
    return (acc + 1).contiguous().realize(acc)
  two = TinyJit(step)
  def once(n: int) -> None:
    nonlocal want
    out, want = (in_place if n % 10 else two)(xs[n % 7 % 5]), want * np.int32(5) + hosts[n % 7 % 5]
    if n % 1000 == 0 and not (out.numpy() == want + 1).all(): raise AssertionError(f"replay {n}: {out.numpy()} instead of {want + 1}")
  n, bad = soak("replays", times, seconds, once)
  if not (acc.numpy() == want).all(): raise AssertionError(f"after {n} replays: {acc.numpy()} instead of {want}")
  return bad

def captures(times: int, seconds: float) -> list[str]:
  x, host = Tensor(np.arange(N, dtype=np.float32)).realize(), np.arange(N, dtype=np.float32)
  def once(n: int) -> None:
    f = TinyJit(lambda x: ((x + 1).contiguous() * 2).contiguous().realize())
    for _ in range(3): out = f(x)
    if n % 100 == 0 and not (out.numpy() == (host + 1) * 2).all(): raise AssertionError(f"capture {n}: {out.numpy()}")
  return soak("captures", times, seconds, once)[1]

def main(args: list[str]) -> int:
  defaults = (1_000_000, 20_000, float("inf"))
  try: times, drops, seconds = (kind(a) if a else d for kind, a, d in zip((int, int, float), [*args, "", "", ""], defaults))
  except ValueError as e: sys.exit(f"usage: soak.py [REPLAYS [CAPTURES [SECONDS]]], in numbers: {e}")
  if Device.DEFAULT != "QCOM": sys.exit(f"DEV={os.environ.get('DEV', '')} is not an Adreno: use DEV=MOCKMSM+QCOM, or DEV=QCOM on a device")
  if min(times, drops) < 30: sys.exit(f"fewer than 30 show nothing: {min(times, drops)}")
  bad = replays(times, seconds) + captures(drops, seconds)
  for line in bad: print("grew:", line)
  return bool(bad)

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
