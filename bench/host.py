"""Child of `dev bench`: what eager launches, captures and replays cost the host, with the QCOM driver that DEV and PYTHONPATH select.

Nothing is executed. Prints one line of JSON when it is ready: {"first": seconds of the first kernel of the process}. Then answers each line on stdin,
a JSON list of a measurement's name and its arguments, with one line of JSON. Times are in ns and without what the virtual kernel took. The two inputs
of a captured function take turns.
"""
from __future__ import annotations
import ctypes, functools, gc, json, pathlib, sys, time
from collections.abc import Callable
from typing import Any
from test.mockgpu import qcom
from test.mockgpu.qcom import files
from test.mockgpu.qcom.ir3.native import compile_c
from tinygrad import Device, Tensor, TinyJit

class Inside:
  """Time spent in the virtual kernel, from where a driver would enter a real one, and how often it was entered."""
  ns = calls = 0
  @classmethod
  def timed(cls, fn: Any) -> Any:
    def timed(*args: Any) -> Any:
      cls.calls += 1
      start = time.perf_counter_ns()
      try: return fn(*args)
      finally: cls.ns += time.perf_counter_ns() - start
    return timed

files.MockFileIOInterface.ioctl = Inside.timed(files.MockFileIOInterface.ioctl) # type: ignore[method-assign]
entry = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, use_errno=True)(Inside.timed(files._c_ioctl))
qcom.ioctl_pointer = lambda: ctypes.cast(entry, ctypes.c_void_p).value # type: ignore[assignment,return-value]

def hold_jobs(gpu: Any) -> None:
  """Jobs wait for somebody to wait for them. The schedule "late" does the same, but its thread wakes up at each submit and takes the interpreter."""
  held: list[Any] = []
  submit, poke = gpu.submit, gpu.poke
  def release(job: Any = None) -> None:
    while held: submit(held.pop(0))
    poke(job)
  gpu.submit, gpu.poke = held.append, release

@functools.cache
def native() -> ctypes.PyDLL:
  return ctypes.PyDLL(str(compile_c(pathlib.Path(__file__).with_suffix(".c"), ["-O2", "-shared", "-fPIC"])))

def synchronize() -> None: Device[Device.DEFAULT].synchronize()

def clocked(fn: Callable[[int], Any], count: int, after: Callable[[], None] = lambda: None) -> list[int]:
  """ns of each of `count` calls; `after` runs between them."""
  out = []
  for n in range(count):
    gc.disable()
    Inside.ns, start = 0, time.perf_counter_ns()
    fn(n)
    out.append(time.perf_counter_ns() - start - Inside.ns)
    gc.enable()
    after()
  return out

def chain(kernels: int) -> TinyJit:
  def fn(x: Tensor) -> Tensor:
    for n in range(kernels): x = (x * 0.5 + n % 5).contiguous()
    return x.realize()
  return TinyJit(fn)

@functools.cache
def inputs() -> list[Tensor]: return [Tensor.full((1024,), float(n)).contiguous().realize() for n in range(5)]

@functools.cache
def replayed(kernels: int) -> Callable[[int], Any]:
  f = chain(kernels)
  for n in range(6): f(inputs()[n % 2])
  synchronize()
  gc.collect()
  gc.freeze()
  return lambda n: f(inputs()[n % 2])

@functools.cache
def weighted(weights: int) -> Callable[[int], Any]:
  """100 kernels over 4 inputs and 5 weights each, `weights` different ones in all."""
  ws = [Tensor.full((1024,), 0.1 * n).contiguous().realize() for n in range(weights)]
  def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    x = (a + b * c - d).contiguous()
    for n in range(100):
      v, w, y, z, q = [ws[(5 * n + i) % weights] for i in range(5)]
      x = (x * v + w - y * z + q).contiguous()
    return x.realize()
  f = TinyJit(fn)
  def run(n: int) -> Any: return f(*[inputs()[(i + n) % 5] for i in range(4)])
  for n in range(4): run(n)
  synchronize()
  return run

def queue(kernels: int, count: int) -> list[int]: return clocked(replayed(kernels), count, synchronize)
def sync(kernels: int, count: int) -> list[int]:
  f = replayed(kernels)
  def both(n: int) -> None:
    f(n)
    synchronize()
  return clocked(both, count)
def weights(number: int, count: int) -> list[int]:
  """What a real kernel does in C for each buffer of a list the virtual one does in Python, for milliseconds and all over the caches: another replay
  between any two leaves them alike."""
  other = replayed(1)
  def between() -> None:
    synchronize()
    for n in range(2):
      other(n)
      synchronize()
  return clocked(weighted(number), count, between)

def submitter(number: int, count: int) -> list[int]:
  """ns in the C submitter, without Python and without a kernel, for a replay with `number` weights. Empty for a driver that has none."""
  dev: Any = Device[Device.DEFAULT]
  if not hasattr(dev, "run_batch"): return []
  synchronize()
  ran, run = [], dev._run
  dev._run = lambda *args, **kw: ran.append(args) or run(*args, **kw)
  weighted(number)(0)
  del dev._run
  synchronize()
  fxn, args, batch = ran[0][:3]
  before, words, out = bytes(dev.queue), bytes(batch), []
  dev.queue.ioctl = ctypes.cast(native().no_kernel, ctypes.c_void_p).value
  for _ in range(count):
    start = time.perf_counter_ns()
    fxn(*args)
    out.append(time.perf_counter_ns() - start)
  ctypes.memmove(ctypes.addressof(dev.queue), before, len(before))
  batch.cast("B")[:] = words
  return out

def eager(count: int) -> list[int]:
  x = inputs()[0]
  def launch(n: int) -> None: (x + 1).realize()
  for n in range(5): launch(n)
  synchronize()
  return clocked(launch, count, synchronize)

def capture(kernels: int, count: int) -> list[int]:
  """Captures whose kernels were compiled before. What a capture allocates is freed between them."""
  def one(n: int) -> None:
    f.append(chain(kernels))
    f[-1](inputs()[0])
    synchronize()
  def captured(n: int) -> None:
    f[-1](inputs()[1])
    synchronize()
  out, f = [], list[TinyJit]()
  for n in range(count + 1):
    one(n)
    out += clocked(captured, 1)
    f.clear()
    gc.collect()
  return out[1:]

def ioctls(kernels: int) -> list[int]:
  """Number of ioctls of a replay and the wait for it, ten times."""
  f, out = replayed(kernels), []
  for n in range(10):
    Inside.calls = 0
    f(n)
    synchronize()
    out.append(Inside.calls)
  return out

def objects(kernels: int) -> float:
  """Memory blocks that Python's object allocator hands out in a replay, on average of 20."""
  f, lib = replayed(kernels), native()
  lib.allocations.restype = ctypes.c_uint64
  api = [ctypes.cast(getattr(ctypes.pythonapi, f"PyMem_{x}Allocator"), ctypes.c_void_p) for x in ("Get", "Set")]
  for _ in range(2):
    lib.start(*api)
    for n in range(20): f(n)
    count = lib.allocations()
    lib.stop()
    synchronize()
  return int(count) / 20

def memory(kernels: int, captures: int) -> dict[str, float]:
  """Bytes that stay for each captured kernel: resident memory of the process, and BOs of the virtual kernel."""
  def resident() -> int:
    with open("/proc/self/statm") as f: return int(f.read().split()[1]) * 4096
  def bos() -> int:
    m = qcom.current()
    with m.lock: return int(sum(k.live()["bytes"] for k in (m.msm, m.kgsl)))
  kept = []
  def more() -> None:
    f = chain(kernels)
    for n in range(3): f(inputs()[n % 2])
    synchronize()
    kept.append(f)
  for _ in range(2): more()
  gc.collect()
  host, gpu = resident(), bos()
  for _ in range(captures): more()
  gc.collect()
  return {"host": (resident() - host) / captures / kernels, "gpu": (bos() - gpu) / captures / kernels}

def main() -> None:
  hold_jobs(qcom.current().gpu)
  start = time.perf_counter()
  (Tensor([1.0, 2.0]) + 1).realize()
  synchronize()
  print(json.dumps({"first": time.perf_counter() - start}), flush=True)
  measurements = {f.__name__: f for f in (queue, sync, weights, submitter, eager, capture, ioctls, objects, memory)}
  for line in sys.stdin:
    name, *args = json.loads(line)
    print(json.dumps(measurements[name](*args)), flush=True)

if __name__ == "__main__": main()
