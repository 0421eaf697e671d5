"""Replays and captures without end: counts of everything that could leak, as they are along the way. All checks of the virtual GPU are on.

    DEV=MOCKMSM+QCOM ./dev run bench/soak.py [REPLAYS [CAPTURES]]      also MOCKKGSL+QCOM; on hardware without the kernel model's counts

Replays a graph of two tiny kernels REPLAYS times (default 1,000,000) with inputs that change, and makes, runs and drops CAPTURES captures (20,000).
Every 1000th result is compared with numpy, and an accumulator shows a replay that was lost, doubled or out of order. Prints JSON lines, ends with
status 1 if a count grew between the first tenth, which warms up, and the end.
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
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)
  with open("/proc/self/statm") as f: rss = int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")
  found = {"allocations": len(dev.iface.live.starts), "slots": sum(s.used for s in dev.allocator.slabs), "fds": len(os.listdir("/proc/self/fd"))}
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
  """What is not flat. A few Python objects and MiB come and go with the allocators of both."""
  slack = {"objects": 200, "rss_mib": 16}
  return [f"{k}: {before[k]} -> {after[k]}" for k in before if after[k] > before[k] + slack.get(k, 0)]

def soak(what: str, times: int, once: Callable[[int], None]) -> list[str]:
  """Calls once(0), once(1), ...; returns what grew after the first tenth. Raises ValueError for fewer than 30 times, which show nothing."""
  if times < 30: raise ValueError(f"{times} {what} show nothing")
  start, before = time.perf_counter(), dict[str, int]()
  for n in range(times):
    if n == max(times // 10, 20): before = counts()
    if n % max(times // 10, 1) == 0: print(json.dumps({"soak": what, "n": n, "s": round(time.perf_counter() - start, 1), **counts()}), flush=True)
    once(n)
  after = counts()
  print(json.dumps({"soak": what, "n": times, "s": round(time.perf_counter() - start, 1), **after, "grew": grew(before, after)}), flush=True)
  return grew(before, after)

def replays(times: int) -> list[str]:
  acc, want = Tensor.zeros(N, dtype=dtypes.int32).contiguous().realize(), np.zeros(N, np.int32)
  hosts = [np.arange(N, dtype=np.int32) * 7 + k for k in range(5)]
  xs = [Tensor(h).realize() for h in hosts]
  def step(x: Tensor) -> Tensor:
    acc.assign(acc * 5 + x)
    return (acc + 1).contiguous().realize(acc)
  f = TinyJit(step)
  def once(n: int) -> None:
    nonlocal want
    out, want = f(xs[n % 5]), want * np.int32(5) + hosts[n % 5]
    if n % 1000 == 0 and not (out.numpy() == want + 1).all(): raise AssertionError(f"replay {n}: {out.numpy()} instead of {want + 1}")
  ret = soak("replays", times, once)
  if not (acc.numpy() == want).all(): raise AssertionError(f"after {times} replays: {acc.numpy()} instead of {want}")
  return ret

def captures(times: int) -> list[str]:
  x, host = Tensor(np.arange(N, dtype=np.float32)).realize(), np.arange(N, dtype=np.float32)
  def once(n: int) -> None:
    f = TinyJit(lambda x: ((x + 1).contiguous() * 2).contiguous().realize())
    for _ in range(3): out = f(x)
    if n % 100 == 0 and not (out.numpy() == (host + 1) * 2).all(): raise AssertionError(f"capture {n}: {out.numpy()}")
  return soak("captures", times, once)

def main(args: list[str]) -> int:
  bad = replays(int(args[0]) if args else 1_000_000) + captures(int(args[1]) if len(args) > 1 else 20_000)
  for line in bad: print("grew:", line)
  return bool(bad)

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
