"""Raw clients of the kernel models: structs are packed with the compiler's layouts, no bindings; and a GPU whose jobs end when the test says so."""
from __future__ import annotations
import ctypes, mmap, os, threading, time
from collections.abc import Callable, Sequence
from typing import Any
from test.mockgpu import qcom
from test.mockgpu.qcom import kgsl, msm
from test.mockgpu.qcom.gpu import FaultRecord, JobResult, Strict
from test.mockgpu.qcom.kernel import Abi
from test.mockgpu.qcom.memory import Space

RW = mmap.PROT_READ | mmap.PROT_WRITE
WC, CACHED, COHERENT, UNCACHED = 0x20000, 0x10000, 0x80000, 0x40000
READ, WRITE = 1, 2
SUBMIT_3D = 0x10

class HeldGPU:
  """Takes jobs and keeps them until finish(). Same surface as VirtualGPU; nothing is executed."""
  def __init__(self, auto: bool = False):
    self.auto, self.strict = auto, Strict(uche=False)
    self.jobs, self.done, self.pokes = list[Any](), list[Any](), list[Any]()
  def new_space(self, name: str = "") -> Space: return Space(uche=False, name=name)
  def submit(self, job: Any) -> None:
    self.jobs.append(job)
    if self.auto: self.finish()
  def finish(self, n: int = 1, status: str = "ok", reports: Sequence[Any] = (), faults: Sequence[FaultRecord] = ()) -> None:
    """The next n jobs end, as the GPU thread would end them."""
    for _ in range(n):
      job = self.jobs.pop(0)
      if job.on_start: job.on_start(job)
      self.done.append(job)
      if job.on_retire: job.on_retire(job, JobResult(status, status, list(faults), list(reports), [f.dmesg for f in faults]))
  def finish_in(self, seconds: float, *args: Any, **kw: Any) -> threading.Thread:
    def run() -> None:
      time.sleep(seconds)
      self.finish(*args, **kw)
    (t:=threading.Thread(target=run, daemon=True)).start()
    return t
  def poke(self, job: Any = None) -> None: self.pokes.append(job)
  def kill(self, job: Any, reason: str = "") -> None:
    assert job is self.jobs[0], "only the oldest one is on the GPU"
    self.finish(status="hang")
  position = 0
  def progress(self) -> int: return self.position
  def counter_ticks(self) -> int: return 123456789
  def close(self) -> None: self.finish(len(self.jobs))

def boot(**settings: Any) -> tuple[Any, HeldGPU]:
  """A fresh machine around a HeldGPU."""
  machine = qcom.configure(**settings)
  machine._gpu = held = HeldGPU()
  return machine, held

class Node:
  """An open device node. `node(NAME, field=value...)` issues the ioctl and returns the record as the kernel left it; OSError as from fcntl.ioctl."""
  abi: Abi
  prefixes: tuple[str, ...] = ()
  table: dict[str, str] = {}
  path = ""
  def __init__(self) -> None:
    self.file = qcom.open_node(self.path, os.O_RDWR)
    self.keep: list[Any] = []
    self.last: Any = None

  def request(self, name: str) -> int: return next(self.abi.ioctls[p + name] for p in self.prefixes if p + name in self.abi.ioctls)

  def __call__(self, name: str, /, **fields: Any) -> Any:
    layout = self.abi.layout(self.table[name])
    rec = layout.unpack(bytes(layout.size))
    for k, v in fields.items(): setattr(rec, k, v)
    buf = bytearray(layout.pack(rec))
    try: self.file.ioctl(self.request(name), buf)
    finally: self.last = layout.unpack(bytes(buf))
    return self.last

  def buffer(self, data: bytes | int) -> int:
    """Address of `data` (or of that many zero bytes), alive as long as the node."""
    self.keep.append(b:=ctypes.create_string_buffer(data if isinstance(data, int) else len(data)))
    if not isinstance(data, int): ctypes.memmove(b, data, len(data))
    return ctypes.addressof(b)
  def bytes_at(self, addr: int, n: int) -> bytes: return ctypes.string_at(addr, n)
  def close(self) -> None: self.file.close()

class Msm(Node):
  abi, prefixes, table, path = msm.ABI, msm.MSM.prefix, msm.MSM.table, qcom.MSM_NODE

  def new(self, size: int = 4096, flags: int = WC) -> int: return self("GEM_NEW", size=size, flags=flags).handle
  def info(self, handle: int, what: int, value: int = 0, **kw: Any) -> int: return self("GEM_INFO", handle=handle, info=what, value=value, **kw).value
  def offset(self, handle: int) -> int: return self.info(handle, 0)
  def iova(self, handle: int) -> int: return self.info(handle, 1)
  def mmap(self, handle: int, size: int = 4096) -> int: return self.file.mmap(0, size, RW, mmap.MAP_SHARED, self.offset(handle))
  def param(self, nr: int, **kw: Any) -> int: return self("GET_PARAM", **{"pipe": 0x10, "param": nr, **kw}).value
  def close_bo(self, handle: int) -> None: self("GEM_CLOSE", handle=handle)
  def queue(self, prio: int = 1, flags: int = 0) -> int: return self("SUBMITQUEUE_NEW", prio=prio, flags=flags).id
  def faults(self, queue: int = 0) -> int:
    self("SUBMITQUEUE_QUERY", id=queue, param=0, data=(p:=self.buffer(4)), len=4)
    return int.from_bytes(self.bytes_at(p, 4), "little")

  def submit(self, bos: Sequence[tuple[int, int]] = (), cmds: Sequence[tuple[int, ...]] = (), /, flags: int = SUBMIT_3D, queue: int = 0,
             **kw: Any) -> Any:
    """bos: (handle, flags). cmds: (type, submit_idx, submit_offset, size[, nr_relocs, relocs])."""
    bo_table = b"".join(msm.BO.struct.pack(f, h, 0) for h, f in bos)
    cmd_table = b"".join(msm.CMD.struct.pack(*c[:4], 0, *(c[4:] or (0, 0))) for c in cmds)
    return self("GEM_SUBMIT", **{"flags": flags, "queueid": queue, "nr_bos": len(bos), "bos": self.buffer(bo_table) if bos else 0,
                                 "nr_cmds": len(cmds), "cmds": self.buffer(cmd_table) if cmds else 0, **kw})
  def wait(self, fence: int, seconds: float = 0.0, queue: int = 0, flags: int = 0) -> None:
    self("WAIT_FENCE", fence=fence, queueid=queue, flags=flags, timeout=deadline(seconds))
  def prep(self, handle: int, op: int, seconds: float = 0.0) -> None: self("GEM_CPU_PREP", handle=handle, op=op, timeout=deadline(seconds))
  def export(self, handle: int) -> int: return self("PRIME_HANDLE_TO_FD", handle=handle, flags=os.O_CLOEXEC | os.O_RDWR).fd
  def import_(self, fd: int) -> int: return self("PRIME_FD_TO_HANDLE", fd=fd).handle

def deadline(seconds: float) -> bytes:
  """drm_msm_timespec, absolute CLOCK_MONOTONIC."""
  ns = time.monotonic_ns() + int(seconds * 1e9)
  return msm.TIMESPEC.struct.pack(ns // 10**9, ns % 10**9)

class Kgsl(Node):
  abi, prefixes, table, path = kgsl.ABI, kgsl.KGSL.prefix, kgsl.KGSL.table, qcom.KGSL_NODE
  CPU_MAP, ALIGN = 0x10000000, 12 << 16

  def alloc(self, size: int = 4096, flags: int = CPU_MAP | ALIGN) -> int: return self("GPUOBJ_ALLOC", size=size, flags=flags).id
  def mmap(self, id: int, size: int = 4096, start: int = 0, flags: int = mmap.MAP_SHARED) -> int:
    return self.file.mmap(start, size, RW, flags, id << 12)
  def context(self, flags: int = 0x12) -> int: return self("DRAWCTXT_CREATE", flags=flags).drawctxt_id
  def command(self, ctx: int, ibs: Sequence[tuple[int, int]] = (), ib_flags: int = 1, **kw: Any) -> int:
    """ibs: (gpuaddr, bytes). Returns the timestamp."""
    table = b"".join(kgsl.CMD.struct.pack(0, g, n, ib_flags, 0) for g, n in ibs)
    return self("GPU_COMMAND", **{"context_id": ctx, "cmdlist": self.buffer(table) if ibs else 0, "cmdsize": 32 if ibs else 0,
                                  "numcmds": len(ibs), **kw}).timestamp
  def wait(self, ctx: int, ts: int, ms: int = 1) -> None: self("DEVICE_WAITTIMESTAMP_CTXTID", context_id=ctx, timestamp=ts, timeout=ms)
  def timestamp(self, ctx: int, kind: int = 2) -> int: return self("CMDSTREAM_READTIMESTAMP_CTXTID", context_id=ctx, type=kind).timestamp
  def property(self, kind: int, size: int, data: bytes = b"") -> bytes:
    p = self.buffer(data.ljust(size, b"\0"))
    self("DEVICE_GETPROPERTY", type=kind, value=p, sizebytes=size)
    return self.bytes_at(p, size)

def errno_of(call: Callable[[], Any]) -> int:
  """The errno that `call` fails with, 0 if it does not fail."""
  try: call()
  except OSError as e: return e.errno or -1
  return 0
