"""A minimal GPU client for tests of the virtual Adreno 630: buffers, a PM4 stream builder, and tinygrad kernels run through them.

It shares nothing with the runtime under test: packets and registers are written from Mesa's descriptions, in the order Mesa emits them.
"""
from __future__ import annotations
import contextlib, mmap, struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
import numpy as np
from test.mockgpu.qcom.gpu import Job, VirtualGPU
from test.mockgpu.qcom.memory import BoInfo

def odd(v: int) -> int: return 1 ^ bin(v).count("1") & 1

class Stream:
  """Dwords of a command stream. Chainable."""
  def __init__(self) -> None: self.words: list[int] = []

  def pkt7(self, op: int, *dw: int) -> Stream:
    self.words += [0x70000000 | odd(op) << 23 | op << 16 | odd(len(dw)) << 15 | len(dw), *(d & 0xffffffff for d in dw)]
    return self

  def pkt4(self, reg: int, *dw: int) -> Stream:
    self.words += [0x40000000 | odd(reg) << 27 | reg << 8 | odd(len(dw)) << 7 | len(dw), *(d & 0xffffffff for d in dw)]
    return self

  def nop(self, *dw: int) -> Stream: return self.pkt7(0x10, *dw)
  def wfi(self) -> Stream: return self.pkt7(0x26)
  def event(self, event: int, addr: int | None = None, value: int = 0) -> Stream:
    return self.pkt7(0x46, event) if addr is None else self.pkt7(0x46, event, addr, addr >> 32, value)
  def flush(self, addr: int, value: int = 0) -> Stream: return self.event(4, addr, value)
  def invalidate(self) -> Stream: return self.event(49)
  def mem_write(self, addr: int, *dw: int) -> Stream: return self.pkt7(0x3d, addr, addr >> 32, *dw)
  def wait_mem(self, addr: int, ref: int, func: int = 5) -> Stream: return self.pkt7(0x3c, 0x10 | func, addr, addr >> 32, ref, 0xffffffff, 32)
  def timestamp(self, addr: int) -> Stream: return self.pkt7(0x3e, 0x980 | 2 << 18 | 1 << 30, addr, addr >> 32)
  def load_state(self, kind: int, block: int, units: int, addr: int, first: int = 0) -> Stream:
    return self.pkt7(0x34, first | kind << 14 | 2 << 16 | block << 18 | units << 22, addr, addr >> 32)
  def call(self, addr: int, dwords: int) -> Stream: return self.pkt7(0x3f, addr, addr >> 32, dwords)

@dataclass
class Kernel:
  """A compiled program and what a driver must know about it."""
  name: str
  code: bytes
  variant: Any
  const_state: Any
  immediates: bytes
  iova: int = 0

  @classmethod
  def from_lib(cls, name: str, lib: bytes) -> Kernel:
    from tinygrad.runtime.support.compiler_mesa import IR3Compiler
    v, cs, imm, code = IR3Compiler.unpack_lib(lib)
    return cls(name, code + bytes(-len(code) % 128), v, cs, imm)

  @property
  def groups(self) -> int: return len(self.code) // 128

class Buf:
  """A BO: `ram` is what the CPU maps, `iova` what the GPU uses."""
  def __init__(self, rig: Rig, size: int, name: str = "", readonly: bool = False):
    self.size, self.info = size, BoInfo(name=name, size=size)
    self._map = mmap.mmap(-1, -(-size // 4096) * 4096)
    self.ram = np.frombuffer(self._map, np.uint8)
    self.iova = rig.next_iova
    rig.next_iova += self.ram.size + 4096                 # a hole behind every buffer
    rig.space.map(self.iova, self.ram.size, self.ram.ctypes.data, readonly=readonly, bo=self.info)

  def put(self, data: bytes | np.ndarray, offset: int = 0) -> Buf:
    raw = data.tobytes() if isinstance(data, np.ndarray) else data
    self.ram[offset:offset + len(raw)] = np.frombuffer(raw, np.uint8)
    return self

  def view(self, dtype: Any, count: int = -1, offset: int = 0) -> np.ndarray: return np.frombuffer(self._map, dtype, count, offset)
  def u32(self, offset: int = 0) -> int: return int(self.view(np.uint32, 1, offset)[0])

class Rig:
  """One GPU with one address space. Everything allocated is listed in every submit unless `without` takes it out."""
  def __init__(self, **gpu: Any):
    self.gpu = VirtualGPU(**gpu)
    if self.gpu.execute: _ = self.gpu.engine            # its first build may take longer than a job is waited for
    self.space, self.next_iova = self.gpu.new_space("rig"), 0x1_0000_0000
    self.bufs: list[Buf] = []
    self.dummy = self.alloc(4096, "dummy")

  def alloc(self, size: int, name: str = "", **kw: Any) -> Buf:
    self.bufs.append(b := Buf(self, size, name, **kw))
    return b

  def job(self, stream: Stream, without: Sequence[Buf] = (), **kw: Any) -> Job:
    ib = self.alloc(max(4, len(stream.words) * 4), "ib").put(struct.pack(f"<{len(stream.words)}I", *stream.words))
    return Job(self.space, [(ib.iova, len(stream.words))], {b.info for b in self.bufs if b not in without}, **kw)

  def run(self, stream: Stream, **kw: Any) -> Job:
    """Submits and waits. Returns the retired job."""
    job = self.job(stream, **kw)
    self.gpu.submit(job)
    self.gpu.poke(job)
    assert job.wait(60), "the job did not retire"
    return job

  def load(self, k: Kernel) -> Kernel:
    if not k.iova: k.iova = self.alloc(len(k.code), f"code {k.name}").put(k.code).iova
    return k

  def args(self, k: Kernel, *values: int, fmt: str = "") -> Buf:
    """A constants buffer: values (8-byte addresses unless fmt says otherwise) where the kernel's UBO 0 lies, then its immediates."""
    base, imm = k.const_state.ubo_state.range[0].offset, k.const_state.allocs.max_const_offset_vec4 * 16
    return self.alloc(4096, f"args {k.name}").put(struct.pack("<" + (fmt or "Q" * len(values)), *values), base).put(k.immediates, imm)

  def setup(self, s: Stream, k: Kernel, args: Buf, groups: Sequence[int], local: Sequence[int], **over: int) -> Stream:
    """Everything before the dispatch packet. `over` replaces single registers by lower-case name, or leaves them out with -1."""
    v, off = k.variant, over.get
    consts = over.get("consts", v.constlen)
    def reg(name: str, at: int, *vals: int) -> None:
      if off(name, 0) != -1: s.pkt4(at, *((over[name],) + vals[1:] if name in over else vals))
    s.pkt7(0x65, 8).invalidate()
    for at, val in FIXED.items(): reg(f"fixed_{at:x}", at, val)
    reg("sp_update_cntl", 0xbb08, 0x60)
    if off("sp_update_cntl", 0) != -1: s.pkt4(0xbb08, 0)
    reg("sp_mode_cntl", 0xab00, 1 | 2 << 1)
    reg("sp_float_cntl", 0xae04, 0)
    reg("shared_consts", 0xbb11, 0)
    reg("tpl1_mode_cntl", 0xb309, 2)
    reg("cntl_0", 0xa9b0, v.info.max_half_reg + 1 << 1 | v.info.max_reg + 1 << 7 | v.branchstack // 2 + 1 << 14 | v.mergedregs << 31)
    reg("cntl_1", 0xa9b1, max(1, (v.shared_size - 1) // 1024) | 2 << 5)
    s.pkt4(0xa9b2, 0, 0)
    reg("base", 0xa9b4, k.iova, k.iova >> 32)
    pvt = -(-v.pvtmem_size // 512)
    if pvt:
      self.pvt = self.alloc(pvt * 256 * 4096 * 2, "pvt")
      s.pkt4(0xa9b6, pvt, self.pvt.iova, self.pvt.iova >> 32, pvt * 256).pkt4(0xa9bd, pvt * 512)
    else: s.pkt4(0xa9b6, 0)
    reg("instr_size", 0xa9bc, k.groups)
    if k.groups > 64 and off("icache", 0) != -1: s.pkt4(0xab05, k.groups).event(63)
    reg("config", 0xa9bb, 1 << 8)
    reg("const_config", 0xb987, -(-v.constlen // 4) | 1 << 8)
    s.pkt4(0xb990, 3 | local[0] - 1 << 2 | local[1] - 1 << 12 | local[2] - 1 << 22,
           groups[0] * local[0], 0, groups[1] * local[1], 0, groups[2] * local[2], 0,
           v.cs.work_group_id | 0xfc << 8 | 0xfc << 16 | v.cs.local_invocation_id << 24, 0xfc, 1, 1, 1)
    if consts: s.load_state(1, 13, consts, args.iova)
    if off("preload", 0) != -1: s.load_state(0, 13, min(k.groups, 64), k.iova)
    return s

  def dispatch(self, s: Stream, k: Kernel, args: Buf, groups: Sequence[int], local: Sequence[int], **over: int) -> Stream:
    """A whole dispatch: state, EXEC_CS, wait, flush."""
    return self.setup(s, self.load(k), args, groups, local, **over).pkt7(0x33, 0, *groups).wfi().flush(self.dummy.iova)

  def close(self) -> None: self.gpu.close()

# what Mesa programs on a630 before compute work
FIXED = {0x0e12: 0x10000001, 0x0e19: 4, 0xae00: 0, 0xae03: 0x1430, 0xb600: 0x00108000, 0xbe04: 0x80000}

@dataclass
class Call:
  """One kernel launch that tinygrad asked for."""
  kernel: Kernel
  bufs: list[Any]
  groups: tuple[int, ...]
  local: tuple[int, ...]
  vals: tuple[int, ...]
  signature: Any

@contextlib.contextmanager
def tinygrad_on(rig: Rig, **context: Any) -> Iterator[list[Call]]:
  """Inside, tinygrad's device NULL allocates in `rig` and runs its IR3 kernels there, one submit a kernel. Yields the list of launches."""
  from tinygrad.device import Device, TinyELF
  from tinygrad.helpers import Context
  from tinygrad.runtime import ops_null
  calls: list[Call] = []

  class Program:
    def __init__(self, dev: Any, obj: Any):
      self.kernel, self.signature = Kernel.from_lib(obj.name, obj.lib), obj.signature
      self.name, self.device, self.profile_key = obj.name, dev.device, None
    def __call__(self, *bufs: Any, global_size: Any = (1, 1, 1), local_size: Any = (1, 1, 1), vals: Any = (), wait: bool = False, **kw: Any) -> float:
      scalars = list(zip(vals, TinyELF.iter_sig(self.signature[len(bufs):], len(bufs) * 8)))
      base = self.kernel.const_state.ubo_state.range[0].offset
      args = rig.args(self.kernel, *(b.iova + o for b, o in bufs))
      for v, (off, dt) in scalars: args.put(struct.pack("<" + dt.fmt, v), base + off)
      calls.append(Call(self.kernel, list(bufs), tuple(global_size), tuple(local_size), tuple(vals), self.signature))
      job = rig.run(rig.dispatch(Stream(), self.kernel, args, global_size, local_size), name=self.name)
      if job.result.status != "ok" or job.result.reports: raise RuntimeError("\n".join(map(str, job.result.reports)) or job.result.reason)
      return 1e-3

  class Allocator(ops_null.NullAllocator):
    def _alloc(self, size: int, options: Any) -> tuple[Buf, int]: return rig.alloc(size, "tensor"), 0
    def _copyin(self, dest: Any, src: memoryview) -> None: dest[0].put(bytes(src), dest[1])
    def _copyout(self, dest: memoryview, src: Any) -> None: dest[:] = src[0].ram[src[1]:src[1] + dest.nbytes].tobytes()
    def _offset(self, buf: Any, size: int, offset: int) -> tuple[Buf, int]: return buf[0], buf[1] + offset
    def _free(self, opaque: Any, options: Any) -> None: pass

  with Context(DEV="NULL:IR3:a630", PARALLEL=0, **context):
    from tinygrad.engine.realize import runtime_cache     # programs of another rig must not run here
    runtime_cache.clear()
    dev = Device["NULL"]
    saved = dev.allocator, dev.runtime_t, dev.graph
    dev.allocator, dev.runtime_t, dev.graph = Allocator(dev), Program, None  # type: ignore[assignment]
    try: yield calls
    finally:
      dev.allocator, dev.runtime_t, dev.graph = saved
      runtime_cache.clear()
