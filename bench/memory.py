"""Child of `dev bench`: GPU memory and BOs of the runtime's own, in a process that has compiled, captured and replayed. MSM. Prints JSON.

"own": bytes of BOs that hold no tensor and no private memory (programs, command streams, arguments, signals). "cache": freed tensors that tinygrad's
allocator keeps for reuse. "own_bos", "bos": the most BOs of the runtime's own, and of all, in a submit.
"""
from __future__ import annotations
import gc, json
from typing import Any
from test.mockgpu import qcom
from tinygrad import Device, Tensor, TinyJit
from tinygrad.device import Buffer

def main() -> None:
  machine = qcom.current()
  gpu, submit, lists = machine.gpu, machine.gpu.submit, list[tuple[Any, set[Any]]]()
  def watched(job: Any) -> None:
    lists.append((job.space, set(job.resident)))
    submit(job)
  gpu.submit = watched

  def chain(x: Tensor) -> Tensor:
    for n in range(300): x = (x * 0.5 + n % 5).contiguous()
    return x.realize()
  def model(x: Tensor) -> Tensor: return ((x @ w1).relu() @ w2).softmax().realize()
  w1, w2 = [Tensor.rand(64, 64).realize() for _ in range(2)]
  inputs = [Tensor.rand(64, 64).realize() for _ in range(2)]
  functions = [TinyJit(chain), TinyJit(model)]
  for n in range(40):
    for f in functions: f(inputs[n % 2])
  dev: Any = Device[Device.DEFAULT]
  dev.synchronize()
  gc.collect()

  slabs = {int(s.buf.va_addr): s.buf.size for s in dev.allocator.slabs}
  private = getattr(dev, "_scratch", None)
  scratch = {} if private is None else {int(private._buf.va_addr): private.nbytes}
  live = {int(b._buf.va_addr): b._buf.size for b in gc.get_objects() if type(b) is Buffer and b.device == dev.device and b._base is None
          and b.is_allocated() and b is not private and not isinstance(b._buf.meta, tuple)}
  cached = {int(b.va_addr): b.size for bufs in dev.allocator.cache.values() for b in bufs}
  with machine.lock: total = machine.msm.live()["bytes"]
  def pages(bufs: dict[int, int]) -> int: return sum(-(-n // 4096) * 4096 for n in bufs.values())
  own_bos = max(sum(space.find(a) is not None and space.find(a).bo in resident for a in {**slabs, **scratch}) for space, resident in lists)
  print(json.dumps({"total": total, "own": total - pages(live) - pages(scratch) - pages(cached), "tensors": pages(live), "private": pages(scratch),
                    "cache": pages(cached), "slabs": pages(slabs), "own_bos": own_bos, "bos": max(len(r) for _, r in lists),
                    "submits": len(lists)}))

if __name__ == "__main__": main()
