"""Child of `dev bench`: what captures and replays cost the host, with the QCOM driver that DEV and PYTHONPATH select. Nothing is executed.

Prints one line of JSON when captured: seconds of the first kernel and of the captures. Then answers each line "KERNELS REPLAYS" on stdin with the
nanoseconds of as many replays, without the time that the virtual kernel took. The two inputs of a captured function take turns.
"""
from __future__ import annotations
import ctypes, gc, json, sys, time
from typing import Any
from test.mockgpu import qcom
from test.mockgpu.qcom import files
from tinygrad import Device, Tensor, TinyJit

COUNTS = (1, 30, 300)

class Inside:
  """Time spent in the virtual kernel: from where a driver would enter a real one."""
  ns = 0
  @classmethod
  def timed(cls, fn: Any) -> Any:
    def timed(*args: Any) -> Any:
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

def function(kernels: int) -> TinyJit:
  def chain(x: Tensor) -> Tensor:
    for n in range(kernels): x = (x * 0.5 + n % 5).contiguous()
    return x.realize()
  return TinyJit(chain)

def main() -> None:
  hold_jobs(qcom.current().gpu)
  start = time.perf_counter()
  (Tensor([1.0, 2.0]) + 1).realize()
  Device[Device.DEFAULT].synchronize()
  first = time.perf_counter() - start
  inputs = [Tensor.full((1024,), float(n)).contiguous().realize() for n in range(2)]
  functions, captures = {}, {}
  for count in COUNTS:
    f = functions[count] = function(count)
    f(inputs[0])
    Device[Device.DEFAULT].synchronize()
    start = time.perf_counter()
    f(inputs[1])
    Device[Device.DEFAULT].synchronize()
    captures[count] = time.perf_counter() - start
    for n in range(4): f(inputs[n % 2])
  print(json.dumps({"first": first, "captures": captures}), flush=True)
  gc.collect()
  gc.freeze()
  for line in sys.stdin:
    count, replays = map(int, line.split())
    f, out = functions[count], []
    for n in range(replays):
      Device[Device.DEFAULT].synchronize()
      gc.disable()
      Inside.ns, start = 0, time.perf_counter_ns()
      f(inputs[n % 2])
      out.append(time.perf_counter_ns() - start - Inside.ns)
      gc.enable()
    print(json.dumps(out), flush=True)

if __name__ == "__main__": main()
