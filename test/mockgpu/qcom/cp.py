"""Command processor of the virtual Adreno 630: PM4 packets, register file, state loads, dispatch set-up.

Sources: Mesa registers/adreno/adreno_pm4.xml (packets), a6xx.xml (registers), vulkan/tu_cmd_buffer (what must be ordered how). A dispatch is not
executed at its packet: it waits in `pending` until something in the stream waits for it (WAIT_FOR_IDLE, RB_DONE_TS, a poll that is not satisfied,
the end of the job). Until then the CP goes on, so a client that signals without waiting signals too early, as it may on hardware.
"""
from __future__ import annotations
import ctypes, struct, time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
import numpy as np
from . import registers as R
from .memory import DIRTY, LINE, MemoryFault
from .report import RingState, Violation
if TYPE_CHECKING: from .gpu import Job, VirtualGPU

OPCODES = {0x10: "CP_NOP", 0x12: "CP_WAIT_MEM_WRITES", 0x13: "CP_WAIT_FOR_ME", 0x14: "CP_WAIT_MEM_GTE", 0x21: "CP_REG_RMW", 0x26: "CP_WAIT_FOR_IDLE",
           0x31: "CP_RUN_OPENCL", 0x32: "CP_LOAD_STATE6_GEOM", 0x33: "CP_EXEC_CS", 0x34: "CP_LOAD_STATE6_FRAG", 0x36: "CP_LOAD_STATE6",
           0x39: "CP_REG_TEST", 0x3c: "CP_WAIT_REG_MEM", 0x3d: "CP_MEM_WRITE", 0x3e: "CP_REG_TO_MEM", 0x3f: "CP_INDIRECT_BUFFER",
           0x41: "CP_EXEC_CS_INDIRECT", 0x42: "CP_MEM_TO_REG", 0x44: "CP_COND_EXEC", 0x45: "CP_COND_WRITE5", 0x46: "CP_EVENT_WRITE",
           0x47: "CP_COND_REG_EXEC", 0x56: "CP_SET_PSEUDO_REG", 0x57: "CP_INDIRECT_BUFFER_CHAIN", 0x65: "CP_SET_MARKER",
           0x6b: "CP_CONTEXT_SWITCH_YIELD", 0x73: "CP_MEM_TO_MEM", 0x75: "CP_MEMCPY"}

CACHE_FLUSH_TS, RB_DONE_TS, CACHE_INVALIDATE, LABEL = 4, 22, 49, 63
# events without an effect on this model: counters (13-16), CCU flush and invalidate (24-29, blits and render targets only), dummy (1)
QUIET_EVENTS = frozenset({1, 13, 14, 15, 16, 24, 25, 26, 28, 29})

# limits of a630 (Mesa common/freedreno_devices.py): 16 waves of 64 fibers an SP, 96 vec4 registers for each of 128 fibers
MAX_THREADS, REG_VEC4, LOCAL_BYTES, SP_COUNT, ICACHE_GROUPS = 1024, 96, 32768, 2, 64
CP_SCRATCH = 0x883
POISON = 0x52525252                                     # registers a client left alone; enables no shared constants and no F16_NO_INF
ABSENT = 252                                            # register id "none"
FIRST_SHARED, LAST_SHARED = 48 * 4, 56 * 4 - 1          # ids of r48.x .. r55.w

COMPARE: tuple[Callable[[int, int], bool], ...] = (lambda a, b: True, lambda a, b: a < b, lambda a, b: a <= b, lambda a, b: a == b,
                                                   lambda a, b: a != b, lambda a, b: a >= b, lambda a, b: a > b)

SYMBOL = ("", "<", "<=", "==", "!=", ">=", ">")

def parity(v: int) -> int:
  """PM4's odd parity bit: 1 when v has an even number of set bits."""
  return 1 - v.bit_count() % 2

def signed(v: int) -> int: return v - (1 << 32) if v & 0x80000000 else v

class CPError(Exception):
  """The CP stops: bad packet, opcode, register. `line` is what the kernel logs for the interrupt."""
  def __init__(self, text: str, line: str = ""):
    self.line = line
    super().__init__(text)

@dataclass(slots=True)
class Packet:
  """A decoded header. handler None: register write of `count` dwords from `reg`; bad[i] are the bits register i does not have."""
  count: int
  handler: Callable[[Sequence[int]], Any] | None
  reg: int = 0
  bad: tuple[int, ...] | None = None

# (state block, state type) -> what is loaded, bytes a unit
LOADS = {(13, 0): ("shader", 128), (13, 1): ("constants", 16), (13, 2): ("ubo", 8), (13, 3): ("uav", 64), (15, 0): ("uav", 64),
         (5, 0): ("sampler", 16), (5, 1): ("texture", 64)}

REGION = {"undefined_register": "register", "undefined_const": "constant", "undefined_local": "local memory",
          "undefined_private": "private memory"}

@dataclass
class Load:
  """A LOAD_STATE6 of this submit: what, from where, first unit in the destination, and what memory held."""
  what: str
  address: int
  first: int
  data: bytes

# packets that do nothing when dispatches are not executed, and packets that a Plan cannot foresee
INERT = frozenset({0x10, 0x12, 0x13, 0x26, 0x32, 0x34, 0x36, 0x56, 0x65, 0x6b})
BRANCHING = frozenset({0x21, 0x39, 0x3f, 0x42, 0x44, 0x45, 0x47, 0x57})
LAUNCH = frozenset({0x31, 0x33, 0x41})

@dataclass
class Plan:
  """How a command stream was parsed: where its headers lie, and the packets with an effect outside the GPU. Valid while the headers are the same."""
  at: np.ndarray
  headers: np.ndarray
  effects: list[tuple[int, Callable[[Sequence[int]], Any], int]]     # dword of the header, handler, payload dwords
  launches: int

class Checked(NamedTuple):
  """What registers say about a dispatch, once every check passed. Threads of a workgroup and of the grid, bytes a fiber, footprints in vec4."""
  local: tuple[int, int, int]
  size: tuple[int, int, int]
  ids: dict[str, int]
  full: int
  half: int
  pvt: int
  ntex: int
  nsamp: int
  nuav: int
  merged: bool

@dataclass
class Pending:
  """A dispatch that was launched and not waited for."""
  number: int
  program: Any
  dispatch: Any
  loads: list[Load]
  where: str
  kernel: str
  code: bytes
  base: int

class CommandProcessor:
  """Executes the IBs of one job at a time on the GPU thread. Registers keep their values across jobs, as on hardware."""
  def __init__(self, gpu: VirtualGPU):
    self.gpu = gpu
    self.headers: dict[int, Packet] = {}
    self.plans: dict[tuple[int, int], Plan] = {}
    self.checked: dict[tuple, Checked] = {}
    self.handlers = {op: getattr(self, name[3:].lower()) for op, name in OPCODES.items()}
    self.old: dict[int, int] = {}                       # registers as earlier jobs left them
    self.consts = np.zeros(1024, np.uint32)
    self.job: Job | None = None
    self._abort: Any = None
    self.needs = {k: R.needs(k) for k in "dtsupgx"}
    self.fixed = {r: R.REGISTERS[r].fixed for r in self.needs["x"]}
    self._begin()

  def _begin(self) -> None:
    self.now: dict[int, int] = {}                       # registers written by this job
    self.const_valid = np.zeros(1024, bool)
    self.shader: Load | None = None
    self.desc: dict[str, dict[int, bytes]] = {"texture": {}, "sampler": {}, "uav": {}, "ubo": {}}
    self.loads: list[Load] = []                         # queued since the last dispatch
    self.pending: list[Pending] = []
    self.predicate = False
    self.stack: list[tuple[int, int]] = []              # (iova, dwords) of the IBs being executed, outermost first
    self.frames: list[tuple[int, int, int, Any]] = []   # what each of them will return to
    self.ib, self.size, self.pos, self.words, self.label = 0, 0, 0, [], None
    self.icache_label = 0                               # SP_PS_INSTR_SIZE at the last LABEL event
    self.cp_wrote = True                                # memory may have changed under UCHE: the CPU before this job, the CP within it
    self.unlanded: dict[int, int] = {}                  # bytes the CP wrote since the last WAIT_MEM_WRITES, by address
    self.dispatches, self.kernel = 0, ""
    self.complaints = 0                                 # of this job, also those that were already reported

  def reset(self) -> None:
    """GPU recovery: registers hold nothing in particular, queued work is gone."""
    self.old.clear()
    self._begin()

  def abort(self) -> None:
    """Stops a running dispatch; called from other threads after job.killed was set."""
    if (flag := self._abort) is not None: flag.value = 1

  # *** job

  def run(self, job: Job) -> None:
    """Raises gpu.Hang when the job cannot go on."""
    from .gpu import Hang
    self.job = job
    self.old.update(self.now)
    self._begin()
    try:
      for iova, dwords in job.ibs: self.indirect(iova, dwords)
      self.drain()
    except CPError as e:
      if e.line: self.gpu.log(job, "adreno 5000000.gpu: " + e.line)
      raise Hang(str(e), "cp_error") from None
    except MemoryFault as e:
      self.smmu_fault(e)
      raise Hang(f"{e.source} cannot continue after a fault at {e.address:#x}") from None

  def indirect(self, iova: int, dwords: int, chain: bool = False) -> None:
    if iova & 3: raise CPError(f"indirect buffer at {iova:#x} is not dword aligned")
    if len(self.stack) >= 3: raise CPError("indirect buffers nest deeper than IB2")
    raw = self.space.read(iova, dwords * 4, "CDP Prefetch") if dwords else b""
    self.frames.append((self.ib, self.size, self.pos, self.words))
    self.stack.append((iova, dwords))
    self.ib, self.size, self.words = iova, dwords, memoryview(raw).cast("I")
    self.gpu.counters["ib_dwords"] += dwords
    if self.gpu.execute or not self.replay(iova, dwords, raw): self.execute(0, dwords)
    self.stack.pop()
    self.ib, self.size, self.pos, self.words = self.frames.pop()

  def replay(self, iova: int, dwords: int, raw: bytes) -> bool:
    """Without execution: only the packets whose effect the CPU can see, as an earlier parse found them. False if there was none that fits."""
    words = np.frombuffer(raw, np.uint32)
    plan = self.plans.get((iova, dwords))
    if plan is None or not np.array_equal(words[plan.at], plan.headers):
      if (plan := self.plan(words.tolist())) is not None:
        if len(self.plans) >= 256: self.plans.clear()
        self.plans[iova, dwords] = plan
      return False                                      # the first time every packet is checked
    view = self.words
    for i, handler, count in plan.effects:
      self.pos = i
      handler(view[i + 1:i + 1 + count].tolist())
    self.gpu.counters["packets"] += len(plan.at)
    self.gpu.counters["dispatches"] += plan.launches
    return True

  def plan(self, words: list[int]) -> Plan | None:
    """None for a stream that branches or is broken: that one is executed packet by packet."""
    at, effects, launches, i = [], [], 0, 0
    while i < len(words):
      try: p = self.headers.get(words[i]) or self.header(words[i])
      except CPError: return None
      if i + 1 + p.count > len(words): return None
      at.append(i)
      if p.handler is not None:
        op = words[i] >> 16 & 0x7f
        if op in BRANCHING: return None
        if op in LAUNCH: launches += 1
        elif op not in INERT and (op != 0x46 or p.count > 1): effects.append((i, p.handler, p.count))
      i += 1 + p.count
    where = np.array(at, np.int64)
    return Plan(where, np.array(words, np.uint32)[where], effects, launches)

  def execute(self, i: int, end: int) -> None:
    self.words = words = self.words.tolist() if isinstance(self.words, memoryview) else self.words
    from .gpu import Stalled
    assert self.job is not None
    headers, now, update, packets = self.headers, self.now, self.now.update, 0
    stalls, faults = self.job.space.name == "kgsl", self.job.result.faults
    while i < end:
      self.pos = i
      h = words[i]
      p = headers.get(h)
      if p is None: p = self.header(h)
      i += 1
      j = i + p.count
      if j > end: raise CPError(f"{self.packet_name(h)} wants {p.count} dwords, the buffer ends after {end - i}")
      packets += 1
      if p.handler is None:
        vals = words[i:j]
        if p.bad is not None:
          for v, b in zip(vals, p.bad):
            if v & b:
              vals = self.overflow(p, vals)
              break
        if p.count == 1: now[p.reg] = vals[0]
        else: update(zip(range(p.reg, p.reg + p.count), vals))
        if p.reg == 0xbb08: self.update_cntl(vals[0])
      else:
        skip = p.handler(words[i:j])
        if stalls and faults: raise Stalled
        if skip: j += skip
      i = j
    self.gpu.counters["packets"] += packets

  def header(self, h: int) -> Packet:
    """Decodes and caches a packet header. Raises CPError for what the CP does not take."""
    typ = h >> 28
    if typ == 4:
      count, reg = h & 0x7f, h >> 8 & 0x3ffff
      if h >> 7 & 1 != parity(count) or h >> 27 & 1 != parity(reg): raise self.bad_header(h, "has a wrong parity bit")
      if count == 0: raise self.bad_header(h, "writes no register")
      for r in range(reg, reg + count):
        if R.protected(r, True):
          raise CPError(f"write to {R.name(r)}, which the kernel protects",
                        f"CP | protected mode error | WRITE | addr=0x{r:08X} | status=0x{r:08X}")
        if r not in R.REGISTERS:
          raise CPError(f"write to register {r:#x} (dword {r - reg} of {count} from {reg:#x}), which no compute client of a6xx writes",
                        "CP | AHB bus error")
      bad = tuple(~R.REGISTERS[r].mask & 0xffffffff for r in range(reg, reg + count))
      p = Packet(count, None, reg, bad if any(bad) else None)
    elif typ == 7:
      count, op = h & 0x3fff, h >> 16 & 0x7f
      if h >> 15 & 1 != parity(count) or h >> 23 & 1 != parity(op): raise self.bad_header(h, "has a wrong parity bit")
      if h & 0x0f004000: raise self.bad_header(h, "has reserved bits set")
      if op not in self.handlers: raise self.bad_header(h, f"has the unknown opcode {op:#x}")
      p = Packet(count, self.handlers[op])
    else: raise self.bad_header(h, "is not a packet header (only type 4 and type 7 exist since a5xx)")
    self.headers[h] = p
    return p

  @staticmethod
  def bad_header(h: int, what: str) -> CPError: return CPError(f"dword {h:#010x} {what}", f"CP | opcode error | possible opcode=0x{h:08X}")

  @staticmethod
  def packet_name(h: int) -> str:
    return OPCODES.get(h >> 16 & 0x7f, f"opcode {h >> 16 & 0x7f:#x}") if h >> 28 == 7 else f"write of {R.name(h >> 8 & 0x3ffff)}"

  # *** common to packets

  @property
  def space(self):
    assert self.job is not None
    return self.job.space

  def where(self) -> str:
    if not self.words or self.pos >= len(self.words): return ""
    return f"IB{max(1, len(self.stack))} {self.ib:#x} dword {self.pos:#x} ({self.packet_name(self.words[self.pos])})"

  def ring_state(self, rptr: int, wptr: int) -> RingState:
    """Where a job that is given up stands, as the registers of the CP would tell."""
    ibs = [(iova, dwords - pos) for (iova, dwords), pos in zip(self.stack, [*(p for _, _, p, _ in self.frames[1:]), self.pos])]
    ib1, ib2 = (ibs + [(0, 0), (0, 0)])[:2]
    return RingState(rptr, wptr, ib1, ib2, self.gpu.counters["submits"])

  def scratch(self) -> tuple[int, ...]: return tuple(self.now.get(r, self.old.get(r, 0)) for r in range(CP_SCRATCH + 4, CP_SCRATCH + 8))

  def state_lines(self) -> list[str]:
    """The compute state as this job programmed it, for a report."""
    return [R.REGISTERS[r].decode(v) for r, v in sorted(self.now.items()) if r in self.needs["d"]]

  def report(self, kind: str, summary: str, subject: str = "", details: Sequence[str] = (), where: str | None = None, kernel: str = "",
             dispatch: int | None = None) -> None:
    self.complaints += 1
    self.gpu.report(Violation(kind, summary, subject, kernel=kernel or self.kernel, where=self.where() if where is None else where, dispatch=dispatch,
                              details=list(details)), self.job)

  def smmu_fault(self, e: MemoryFault, *, source: str = "", what: str = "", **kw: Any) -> None:
    assert self.job is not None
    v = Violation(e.kind, what or f"{e.source} {'writes' if e.write else 'reads'} {e.size} bytes at {e.address:#x}", where=self.where(),
                  details=[self.space.explain(e.address)], **kw)
    self.gpu.fault(v, self.job, e.address, e.write, e.kind in ("readonly", "privileged"), source or e.source)

  def expect(self, args: Sequence[int], *counts: int) -> None:
    if len(args) not in counts:
      raise CPError(f"{self.packet_name(self.words[self.pos])} takes {' or '.join(map(str, counts))} dwords, got {len(args)}")

  def read_mem(self, addr: int, dwords: int) -> list[int]:
    """CP read from memory; a fault reads zero. Says so when the newest data is still in UCHE."""
    addr = self.dword_aligned(addr, "read from")
    try: raw = self.space.read(addr, dwords * 4)
    except MemoryFault as e:
      self.smmu_fault(e)
      return [0] * dwords
    self.check_flushed(addr, dwords * 4)
    if self.unlanded and any(a < addr + dwords * 4 and addr < a + n for a, n in self.unlanded.items()):
      self.report("cp_order", f"CP reads {dwords * 4} bytes at {addr:#x}, which it wrote itself, without CP_WAIT_MEM_WRITES")
    return list(struct.unpack(f"<{dwords}I", raw))

  def dword_aligned(self, addr: int, what: str) -> int:
    """The CP addresses dwords: the lowest bits are dropped, and the packet goes on (IGT msm_recovery@iova-fault writes to 0x1deaddead)."""
    if addr & 3: self.report("misaligned", f"CP {what} {addr:#x}, which is not dword aligned: the lowest bits are dropped", "cp")
    return addr & ~3

  def check_flushed(self, addr: int, size: int) -> None:
    if not self.space.uche or not self.space._touched or (s := self.space.find(addr)) is None: return
    off = addr - s.iova
    lines = s.line[off // LINE:(off + size - 1) // LINE + 1]
    if (lines & DIRTY).any() and (s.mem[off:off + size] != s.cache[off:off + size]).any():
      self.report("unflushed_read", f"CP reads {size} bytes at {addr:#x}, which a dispatch has written and nobody flushed",
                  details=[self.space.explain(addr)])

  def write_mem(self, addr: int, data: bytes) -> None:
    """CP write to memory; a fault drops it."""
    addr = self.dword_aligned(addr, "write to")
    try: self.space.write(addr, data)
    except MemoryFault as e:
      self.smmu_fault(e)
      return
    self.cp_wrote = True
    self.unlanded[addr] = max(len(data), self.unlanded.get(addr, 0))

  def overflow(self, p: Packet, vals: list[int]) -> list[int]:
    """Reports values that do not fit their register and returns what the hardware keeps."""
    assert p.bad is not None
    out = []
    for k, (v, b) in enumerate(zip(vals, p.bad)):
      if v & b:
        reg = R.REGISTERS[p.reg + k]
        self.report("field_overflow", f"{reg.name} = {v:#x} has bits {v & b:#x} outside its fields", reg.name, [reg.decode(v)])
      out.append(v & ~b)
    return out

  def value(self, reg: int) -> int:
    """A register as the hardware would use it: this job's value; otherwise poison, if the client should have written it."""
    v = self.now.get(reg)
    if v is not None: return v
    if self.gpu.strict.stale and not self.gpu.strict.tolerates("stale_register", R.name(reg)): return POISON & R.REGISTERS[reg].mask
    return self.old.get(reg, 0)

  def get(self, name: str, fieldname: str) -> int:
    reg, lo, mask = R.FIELDS[name, fieldname]
    v = self.now.get(reg)
    return (self.value(reg) if v is None else v) >> lo & mask

  def get64(self, reg: int) -> int: return self.value(reg) | self.value(reg + 1) << 32

  def read_reg(self, reg: int) -> int:
    if reg in (R.CP_ALWAYS_ON_COUNTER, R.CP_ALWAYS_ON_COUNTER_HI):
      ticks = self.gpu.counter_ticks() & (1 << 64) - 1
      return ticks >> 32 if reg == R.CP_ALWAYS_ON_COUNTER_HI else ticks & 0xffffffff
    if reg in R.REGISTERS: return self.now.get(reg, self.old.get(reg, 0))
    raise CPError(f"read of register {reg:#x}, which " + ("the kernel protects" if R.protected(reg, False) else "is not known"),
                  f"CP | protected mode error | READ | addr=0x{reg:08X} | status=0x{reg | 1 << 20:08X}" if R.protected(reg, False) else "")

  def write_reg(self, reg: int, value: int) -> None:
    """A register write by another packet than type 4, with the same checks."""
    h = 0x40000000 | parity(reg) << 27 | reg << 8 | parity(1) << 7 | 1
    p = self.headers.get(h) or self.header(h)
    vals = self.overflow(p, [value]) if p.bad is not None and value & p.bad[0] else [value]
    self.now[reg] = vals[0]
    if reg == 0xbb08: self.update_cntl(vals[0])

  # *** packets: one method an opcode, named like it; args are the payload dwords; a returned number skips that many dwords

  def nop(self, a: Sequence[int]) -> None:
    if len(a) >= 2: self.label = a                      # drivers hide names in NOPs; decoded only for reports

  def wait_for_idle(self, a: Sequence[int]) -> None:
    self.drain()

  def wait_for_me(self, a: Sequence[int]) -> None: pass
  def wait_mem_writes(self, a: Sequence[int]) -> None: self.unlanded.clear()
  def set_marker(self, a: Sequence[int]) -> None: self.expect(a, 1)
  def context_switch_yield(self, a: Sequence[int]) -> None: pass

  def set_pseudo_reg(self, a: Sequence[int]) -> None:
    if len(a) % 3: raise CPError("CP_SET_PSEUDO_REG takes triples of dwords")

  def event_write(self, a: Sequence[int]) -> None:
    self.expect(a, 1, 3, 4)
    event, ts = a[0] & 0xff, a[0] >> 30 & 1
    if event == CACHE_FLUSH_TS: self.space.uche_flush()
    elif event == CACHE_INVALIDATE: self.space.uche_invalidate()
    elif event == RB_DONE_TS: self.drain()
    elif event == LABEL: self.icache_label = self.now.get(0xab05, 0)
    elif event not in QUIET_EVENTS: raise CPError(f"CP_EVENT_WRITE of event {event}, which compute work does not use")
    if len(a) == 1: return
    if ts: data = struct.pack("<Q", self.gpu.counter_ticks() & (1 << 64) - 1)
    elif len(a) == 4: data = struct.pack("<I", a[3])
    else: raise CPError("CP_EVENT_WRITE with an address and no TIMESTAMP bit needs a value")
    self.write_mem(a[1] | a[2] << 32, data)

  def wait_reg_mem(self, a: Sequence[int]) -> None:
    self.expect(a, 6)
    func, is_signed, poll, ref, mask = a[0] & 7, a[0] >> 3 & 1, a[0] >> 4 & 3, a[3], a[4]
    if func > 6: raise CPError(f"CP_WAIT_REG_MEM with compare function {func}")
    if poll == 1:
      addr = self.dword_aligned(a[1] | a[2] << 32, "poll of")
      try: s = self.space.translate(addr, 4)
      except MemoryFault as e:
        self.smmu_fault(e)
        self.poll(lambda: 0, func, is_signed, ref, mask, f"memory at {addr:#x} (faulted, reads 0)")
        return
      cell = s.mem[addr - s.iova:addr - s.iova + 4].view(np.uint32)
      self.poll(lambda: int(cell[0]), func, is_signed, ref, mask, f"memory at {addr:#x}, {self.space.explain(addr)}")
      self.check_flushed(addr, 4)
    elif poll == 0: self.poll(lambda: self.read_reg(a[1] & 0x3ffff), func, is_signed, ref, mask, f"{R.name(a[1] & 0x3ffff)}")
    else: raise CPError(f"CP_WAIT_REG_MEM polls source {poll}, only registers and memory are known")

  def wait_mem_gte(self, a: Sequence[int]) -> None:
    self.expect(a, 4)
    addr, ref = a[1] | a[2] << 32, a[3]
    self.poll(lambda: (self.read_mem(addr, 1)[0] - ref) & 0xffffffff, 5, 1, 0, 0xffffffff, f"memory at {addr:#x} to reach {ref:#x}")

  def poll(self, read: Callable[[], int], func: int, is_signed: int, ref: int, mask: int, what: str) -> None:
    from .gpu import Hang
    conv = signed if is_signed else int
    compare, want, job = COMPARE[func], conv(ref), self.job
    assert job is not None
    if compare(conv(read() & mask), want): return
    self.drain()                                        # launched work goes on while the CP waits
    # patience is counted in polls, not in time: on a loaded machine the CPU that would write the value gets more of it
    left, delay = int(self.gpu.hang_polls), 2e-5
    while not compare(conv((v := read()) & mask), want):
      if job.killed: raise Hang(job.killed)
      if left <= 0: raise Hang(f"polled {self.gpu.hang_polls} times for {what}: value {v:#x} & {mask:#x} must be {SYMBOL[func]} {ref:#x}")
      time.sleep(delay)
      delay = min(delay * 1.5, 1e-3)
      left -= delay >= 1e-3

  def reg_to_mem(self, a: Sequence[int]) -> None:
    self.expect(a, 3)
    reg, count, wide, accumulate = a[0] & 0x3ffff, max(1, a[0] >> 18 & 0xfff), a[0] >> 30 & 1, a[0] >> 31
    if wide and count % 2: raise CPError(f"CP_REG_TO_MEM of {count} dwords in 64-bit pieces")
    addr = a[1] | a[2] << 32
    if reg == R.CP_ALWAYS_ON_COUNTER and count == 2:    # one sample: the halves of two samples need not belong together
      ticks = self.gpu.counter_ticks()
      vals = [ticks & 0xffffffff, ticks >> 32 & 0xffffffff]
    else: vals = [self.read_reg(reg + k) for k in range(count)]
    if accumulate:
      old = self.read_mem(addr, count)
      if wide:
        for k in range(0, count, 2):
          total = (vals[k] | vals[k + 1] << 32) + (old[k] | old[k + 1] << 32)
          vals[k], vals[k + 1] = total & 0xffffffff, total >> 32 & 0xffffffff
      else: vals = [(v + o) & 0xffffffff for v, o in zip(vals, old)]
    self.write_mem(addr, struct.pack(f"<{count}I", *vals))

  def mem_to_reg(self, a: Sequence[int]) -> None:
    self.expect(a, 3)
    reg, count = a[0] & 0x3ffff, max(1, a[0] >> 19 & 0x7ff)
    for k, v in enumerate(self.read_mem(a[1] | a[2] << 32, count)): self.write_reg(reg + k, v << 2 & 0xffffffff if a[0] >> 30 & 1 else v)

  def mem_write(self, a: Sequence[int]) -> None:
    if len(a) < 3: raise CPError("CP_MEM_WRITE needs an address and data")
    self.write_mem(a[0] | a[1] << 32, struct.pack(f"<{len(a) - 2}I", *a[2:]))

  def mem_to_mem(self, a: Sequence[int]) -> None:
    self.expect(a, 5, 7, 9)
    n = 2 if a[0] >> 29 & 1 else 1
    if a[0] >> 30 & 1: self.unlanded.clear()
    total = 0
    for k in range((len(a) - 3) // 2):
      lo = self.read_mem(a[3 + 2 * k] | a[4 + 2 * k] << 32, n)
      v = lo[0] | (lo[1] << 32 if n == 2 else 0)
      total += -v if a[0] >> k & 1 else v
    self.write_mem(a[1] | a[2] << 32, (total & (1 << 32 * n) - 1).to_bytes(4 * n, "little"))

  def memcpy(self, a: Sequence[int]) -> None:
    self.expect(a, 5)
    self.write_mem(a[3] | a[4] << 32, struct.pack(f"<{a[0]}I", *self.read_mem(a[1] | a[2] << 32, a[0])))

  def reg_rmw(self, a: Sequence[int]) -> None:
    # dst = rotl(dst, ROTATE) & src0 (a mask or a register), then | or + src1
    self.expect(a, 3)
    reg, rot = a[0] & 0x3ffff, a[0] >> 24 & 31
    if a[0] >> 19 & 1: raise CPError("CP_REG_RMW of scratch registers is not modelled")
    v = self.read_reg(reg)
    v = (v << rot | v >> (32 - rot)) & 0xffffffff
    v &= self.read_reg(a[1] & 0x3ffff) if a[0] >> 31 else a[1]
    src1 = self.read_reg(a[2] & 0x3ffff) if a[0] >> 30 & 1 else a[2]
    self.write_reg(reg, (v + src1) & 0xffffffff if a[0] >> 29 & 1 else v | src1)

  def reg_test(self, a: Sequence[int]) -> None:
    # REG 17:0, BIT 24:20: the predicate of CP_COND_REG_EXEC
    self.expect(a, 1)
    self.predicate = bool(self.read_reg(a[0] & 0x3ffff) >> (a[0] >> 20 & 31) & 1)

  def cond_reg_exec(self, a: Sequence[int]) -> int:
    self.expect(a, 2)
    if a[0] >> 28 != 1: raise CPError(f"CP_COND_REG_EXEC mode {a[0] >> 28}: only PRED_TEST means something for compute")
    return 0 if self.predicate else a[1]

  def cond_exec(self, a: Sequence[int]) -> int:
    self.expect(a, 6)
    (first,), (second,) = self.read_mem(a[0] | a[1] << 32, 1), self.read_mem(a[2] | a[3] << 32, 1)
    return 0 if first != 0 and signed(second) < signed(a[4]) else a[5]

  def cond_write5(self, a: Sequence[int]) -> None:
    self.expect(a, 8)
    func, poll = a[0] & 7, a[0] >> 4 & 3
    if func > 6 or poll > 1: raise CPError(f"CP_COND_WRITE5 with function {func}, source {poll}")
    v = self.read_mem(a[1] | a[2] << 32, 1)[0] if poll == 1 else self.read_reg(a[1] & 0x3ffff)
    conv = signed if a[0] >> 3 & 1 else int
    if not COMPARE[func](conv(v & a[4]), conv(a[3])): return
    if a[0] >> 8 & 1: self.write_mem(a[5] | a[6] << 32, struct.pack("<I", a[7]))
    else: self.write_reg(a[5] & 0x3ffff, a[7])

  def indirect_buffer(self, a: Sequence[int]) -> None:
    self.expect(a, 3)
    self.indirect(a[0] | a[1] << 32, a[2] & 0xfffff)

  def indirect_buffer_chain(self, a: Sequence[int]) -> int:
    self.indirect_buffer(a)
    return len(self.words) - self.pos - 4               # a jump: the rest of this buffer is not executed

  # *** state

  def update_cntl(self, v: int) -> None:
    """SP_UPDATE_CNTL drops queued LOAD_STATE6 loads of the stages it names: CS_STATE 5, CS_UAV 6."""
    keep = []
    for load in self.loads:
      if not v >> (6 if load.what == "uav" else 5) & 1: keep.append(load)
      elif load.what == "constants": self.const_valid[load.first * 4:load.first * 4 + len(load.data) // 4] = False
      elif load.what == "shader": self.shader = None
      elif load.what in self.desc: self.desc[load.what].clear()
    self.loads = keep

  def load_state6(self, a: Sequence[int]) -> None:
    if len(a) < 3: raise CPError("CP_LOAD_STATE6 needs 3 dwords")
    dst, typ, src, block, units = a[0] & 0x3fff, a[0] >> 14 & 3, a[0] >> 16 & 3, a[0] >> 18 & 15, a[0] >> 22
    what, size = LOADS.get((block, typ), ("", 0))
    if not what: raise CPError(f"CP_LOAD_STATE6 of type {typ} for state block {block} is not compute state")
    if not self.gpu.execute: return
    addr = a[1] & ~3 | a[2] << 32
    if src == 0:
      data = struct.pack(f"<{len(a) - 3}I", *a[3:])
      if len(data) != units * size: raise CPError(f"CP_LOAD_STATE6 has {len(data)} bytes inline for {units} units of {size}")
    elif src == 2:
      self.expect(a, 3)
      if addr & 15: self.report("bad_state", f"CP_LOAD_STATE6 of {what} from {addr:#x}, which is not 16-byte aligned", "alignment")
      data = self.fetch(addr, units * size, f"CP_LOAD_STATE6 of {what}") or bytes(units * size)
    else: raise CPError(f"CP_LOAD_STATE6 source {src} ({'bindless' if src == 1 else 'UBO'}) is not modelled")
    load = Load(what, addr, dst, data)
    if what == "constants":
      if dst + units > 256: raise CPError(f"CP_LOAD_STATE6 of constants c{dst}..c{dst + units - 1}, the file ends at c255")
      self.consts[dst * 4:(dst + units) * 4] = np.frombuffer(data, np.uint32)
      self.const_valid[dst * 4:(dst + units) * 4] = True
    elif what == "shader": self.shader = load
    elif what in self.desc: self.desc[what].update((dst + k, data[k * size:(k + 1) * size]) for k in range(units))
    if src == 2: self.loads.append(load)

  load_state6_geom = load_state6_frag = load_state6

  def fetch(self, addr: int, size: int, what: str) -> bytes | None:
    """State and instruction fetch of the shader core, which goes through UCHE. None after a fault."""
    if self.cp_wrote:
      self.space.mark_stale()
      self.cp_wrote = False
    try: data, stale = self.space.read_uche(addr, size)
    except MemoryFault as e:
      self.smmu_fault(e, source="UCHE", what=f"{what} reads {size} bytes at {addr:#x}, {e.size} of them from {e.address:#x} on")
      return None
    if stale: self.report("stale_line", f"{what} at {addr:#x} hits lines that are older than memory", details=[self.space.explain(addr)])
    return data

  # *** dispatch

  def exec_cs(self, a: Sequence[int]) -> None:
    self.expect(a, 4)
    self.launch((a[1], a[2], a[3]))

  def exec_cs_indirect(self, a: Sequence[int]) -> None:
    self.expect(a, 4)
    if not self.gpu.execute: return self.launch((0, 0, 0))
    x, y, z = self.read_mem(a[1] | a[2] << 32, 3)
    local = tuple((a[3] >> s & 0x3ff) + 1 for s in (2, 12, 22))
    if local != (want := self.local_size()):
      self.report("bad_state", f"CP_EXEC_CS_INDIRECT says local size {local}, SP_CS_NDRANGE_0 {want}", "local_size")
    self.launch((x, y, z), indirect=True)

  def run_opencl(self, a: Sequence[int]) -> None:
    self.expect(a, 1)
    groups = (self.value(0xb999), self.value(0xb99a), self.value(0xb99b))
    self.launch(groups, opencl=True)

  def local_size(self) -> tuple[int, int, int]:
    v = self.value(0xb990)
    return (v >> 2 & 0x3ff) + 1, (v >> 12 & 0x3ff) + 1, (v >> 22 & 0x3ff) + 1

  def kernel_name(self, base: int) -> str:
    if self.label is not None:
      raw = struct.pack(f"<{len(self.label)}I", *self.label).rstrip(b"\0")
      if raw and all(32 <= c < 127 for c in raw): return raw.decode()
    s = self.space.find(base)
    return f"at {base:#x}" + (f" in {s.bo}" if s is not None else "")

  def launch(self, groups: tuple[int, int, int], *, indirect: bool = False, opencl: bool = False) -> None:
    self.dispatches += 1
    self.gpu.counters["dispatches"] += 1
    if not self.gpu.execute: return
    self.kernel = self.kernel_name(self.get64(0xa9b4))
    p = self.prepare(groups, indirect, opencl, self.kernel)
    if self.gpu.observer is not None: self.gpu.observer(p, dict(self.now))
    self.loads, self.kernel = [], ""
    if 0 in groups: return
    self.pending.append(p)

  def stop(self, kind: str, text: str) -> NoReturn:
    """A dispatch the hardware would not survive."""
    from .gpu import Hang
    raise Hang(text, kind)

  def check_programmed(self, kinds: str) -> None:
    missing = [n for k in kinds for r in sorted(self.needs[k] - self.now.keys()) if not self.gpu.strict.tolerates("stale_register", n := R.name(r))]
    if missing: self.report("stale_register", f"the dispatch depends on {', '.join(missing)}, not written in this submit", missing[0])
    wrong = [R.REGISTERS[r] for r, v in self.fixed.items() if self.now.get(r) != v]
    if wrong:
      text = ", ".join(f"{r.name} {f'= {self.now[r.offset]:#x}' if r.offset in self.now else 'not written'} (wants {r.fixed:#x})" for r in wrong)
      self.report("fixed_register", text, wrong[0].name)

  def prepare(self, groups: tuple[int, int, int], indirect: bool, opencl: bool, kernel: str) -> Pending:
    """Reads the dispatch state as the hardware would at this packet, with every check. Raises Hang for state that cannot run."""
    get, gpu, now = self.get, self.gpu, self.now
    key = groups, indirect, opencl, tuple(now), tuple(now.values())
    if (c := self.checked.get(key)) is None:
      before = self.complaints
      c = self.check(groups, indirect, opencl)
      if gpu.strict.stale and not gpu.strict.lenient and self.complaints == before: # else registers of earlier jobs may matter
        if len(self.checked) >= 256: self.checked.clear()
        self.checked[key] = c
    local, size, ids, full, half, pvt, ntex, nsamp, nuav, merged = c
    self.check_private_memory(pvt)
    base, code = self.fetch_program()
    shared = get("SP_CS_CNTL_1", "SHARED_SIZE")

    from .ir3 import image
    from .ir3.native import Dispatch
    samplers = self.descriptors("sampler", nsamp, 0xa9e2, 16)
    borders = [self.fetch(self.get64(0xb180) + image.border_offset(s), 128, "fetch of border colours") or bytes(128) for s in samplers]
    ubos = [self.desc["ubo"].get(k, bytes(8)) for k in range(max(self.desc["ubo"], default=-1) + 1)]
    d = Dispatch(groups=groups, local=local, size=size, offset=(self.value(0xb992), self.value(0xb994), self.value(0xb996)),
                 consts=self.consts.copy(), const_valid=self.loaded_consts() if gpu.strict.shader else None,
                 wgid_reg=ids["WGIDCONSTID"], lid_reg=ids["LOCALIDREGID"], wgsize_reg=ids["WGSIZECONSTID"],
                 wgoffset_reg=ids["WGOFFSETCONSTID"], linear_lid_reg=ids["LINEARLOCALIDREGID"], full_regs=full, half_regs=half,
                 branchstack=get("SP_CS_CNTL_0", "BRANCHSTACK"), local_bytes=(shared + 1) * 1024 if shared else LOCAL_BYTES, pvt_bytes=pvt,
                 demote=bool(get("SP_MODE_CNTL", "CONSTANT_DEMOTION_ENABLE")), merged_regs=merged,
                 f16_no_inf=bool(get("SP_FLOAT_CNTL", "F16_NO_INF")), textures=self.descriptors("texture", ntex, 0xa9e6, 64),
                 samplers=samplers, borders=borders, uavs=self.descriptors("uav", nuav, 0xa9f2, 64), ubos=ubos, cf_mask=self.value(0xa9b2),
                 space=self.space, order=gpu.order, budget=gpu.budget, strict=gpu.strict.shader, abort=ctypes.c_int32(0))
    return Pending(self.dispatches, self.program(code, merged, base), d, self.loads, self.where(), kernel, code, base)

  def check(self, groups: tuple[int, int, int], indirect: bool, opencl: bool) -> Checked:
    """The checks that depend on nothing but registers."""
    get, gpu = self.get, self.gpu
    ntex, nsamp, nuav = get("SP_CS_CONFIG", "NTEX"), get("SP_CS_CONFIG", "NSAMP"), get("SP_CS_CONFIG", "NUAV")
    pvt = get("SP_CS_PVT_MEM_PARAM", "MEMSIZEPERITEM") * 512
    if gpu.strict.stale:
      self.check_programmed("d" + "t" * (ntex > 0) + "s" * (nsamp > 0) + "u" * (nuav > 0) + "p" * (pvt > 0) + "g" * opencl)
    self.check_modes()
    local = self.local_size()
    size = self.check_size(groups, local, indirect, opencl)
    self.check_fit(local)
    full, half = get("SP_CS_CNTL_0", "FULLREGFOOTPRINT"), get("SP_CS_CNTL_0", "HALFREGFOOTPRINT")
    return Checked(local, size, self.check_ids(full), full, half, pvt, ntex, nsamp, nuav, bool(get("SP_CS_CNTL_0", "MERGEDREGS")))

  def check_modes(self) -> None:
    get = self.get
    if not get("SP_CS_CONFIG", "ENABLED"): self.stop("bad_state", "dispatch with SP_CS_CONFIG.ENABLED = 0")
    if not get("SP_CS_CONST_CONFIG", "ENABLED"): self.stop("bad_state", "dispatch with SP_CS_CONST_CONFIG.ENABLED = 0")
    if self.value(0xa9bb) & 15: self.stop("unsupported", "bindless descriptors (SP_CS_CONFIG) are not modelled")
    if get("SP_MODE_CNTL", "SHARED_CONSTS_ENABLE") or get("HLSQ_SHARED_CONSTS", "ENABLE") or get("SP_CS_CONST_CONFIG", "READ_IMM_SHARED_CONSTS"):
      self.stop("unsupported", "shared constants are enabled, which is not modelled")
    if get("SP_CS_CNTL_0", "THREADSIZE") != get("SP_CS_WGE_CNTL", "THREADSIZE"):
      self.report("bad_state", "SP_CS_CNTL_0 and SP_CS_WGE_CNTL disagree about THREADSIZE", "threadsize")
    if get("SP_CS_CNTL_0", "THREADSIZE"): self.stop("unsupported", "waves of 128 fibers (SP_CS_CNTL_0.THREADSIZE) are not modelled")
    if get("SP_CS_CNTL_0", "EARLYPREAMBLE"): self.stop("bad_state", "early preambles (SP_CS_CNTL_0) do not exist on a630")

  def check_size(self, groups: tuple[int, int, int], local: tuple[int, int, int], indirect: bool, opencl: bool) -> tuple[int, int, int]:
    """Threads of the grid: group counts against the NDRANGE. RUN_OPENCL clips the last groups to it, EXEC_CS runs whole ones."""
    total, want = (self.value(0xb991), self.value(0xb993), self.value(0xb995)), tuple(g * n for g, n in zip(groups, local))
    if total != want and not indirect:
      if opencl and all(w - n < t <= w for t, w, n in zip(total, want, local)): return total
      self.report("bad_state", f"{groups} groups of {local} are {want} threads, SP_CS_NDRANGE_1/3/5 say {total}", "ndrange")
    return want

  def check_fit(self, local: tuple[int, int, int]) -> None:
    """Threads and registers against what an SP holds."""
    get, threads = self.get, local[0] * local[1] * local[2]
    full, half = get("SP_CS_CNTL_0", "FULLREGFOOTPRINT"), get("SP_CS_CNTL_0", "HALFREGFOOTPRINT")
    if threads > MAX_THREADS: self.stop("limit", f"a workgroup of {local} = {threads} threads, the chip runs {MAX_THREADS}")
    regs = max(full, (half + 1) // 2) if get("SP_CS_CNTL_0", "MERGEDREGS") else full + (half + 1) // 2
    if threads > (fit := REG_VEC4 // max(1, regs) * 128):
      self.stop("limit", f"a workgroup of {threads} threads with {full} full and {half} half vec4 registers, {fit} threads fit the register file")

  def check_ids(self, full: int) -> dict[str, int]:
    """Registers that the hardware initialises: workgroup values are shared, the local id lies in the wave's own registers."""
    ids = {n: self.get("SP_CS_CONST_CONFIG_0", n) for n in ("WGIDCONSTID", "WGSIZECONSTID", "WGOFFSETCONSTID", "LOCALIDREGID")}
    for n, v in ids.items():
      if v != ABSENT and n != "LOCALIDREGID" and not FIRST_SHARED <= v <= LAST_SHARED - 2:
        self.report("bad_state", f"SP_CS_CONST_CONFIG_0.{n} = {v}: must be a shared register, r48.x to r55.y (192 to 221), or 252 for none", n)
    if (lid := ids["LOCALIDREGID"]) != ABSENT and lid + 2 >= full * 4:
      self.report("bad_state", f"SP_CS_CONST_CONFIG_0.LOCALIDREGID = {lid} lies outside the {full} vec4 registers of the wave", "LOCALIDREGID")
    ids["LINEARLOCALIDREGID"] = linear = self.get("SP_CS_WGE_CNTL", "LINEARLOCALIDREGID")
    if linear != ABSENT and linear >= full * 4:
      self.report("bad_state", f"SP_CS_WGE_CNTL.LINEARLOCALIDREGID = {linear} lies outside the {full} vec4 registers of the wave", "linear_id")
    return ids

  def loaded_consts(self) -> np.ndarray:
    """Which dwords of the constant file the shader may read: loaded in this submit, and within CONSTLEN (units of 4 vec4)."""
    valid, constlen = self.const_valid.copy(), self.get("SP_CS_CONST_CONFIG", "CONSTLEN")
    if constlen == 0 and valid.any(): self.report("constlen", f"SP_CS_CONST_CONFIG = {self.value(0xb987):#x}: CONSTLEN 0 with constants loaded")
    else: valid[constlen * 16:] = False
    return valid

  def check_private_memory(self, pvt: int) -> None:
    """`pvt` bytes a fiber, for 128 fibers of 16 waves on each SP."""
    per_sp = self.get("SP_CS_PVT_MEM_SIZE", "TOTALPVTMEMSIZE") * 4096 if pvt or 0xa9b9 in self.now else 0
    if pvt:
      base, total = self.get64(0xa9b7), per_sp * SP_COUNT
      if per_sp < pvt * 2048:
        self.report("pvt_mem", f"{pvt} bytes a fiber need {pvt * 2048:#x} bytes an SP, SP_CS_PVT_MEM_SIZE says {per_sp:#x}", "size")
      if (short := self.unmapped(base, total)) is not None:
        self.smmu_fault(short, source="UCHE", what=f"private memory of {total:#x} bytes at {base:#x} ends at {short.address:#x}")
    if 0xa9bd in self.now and (off := self.get("SP_CS_PVT_MEM_STACK_OFFSET", "OFFSET") * 2048) > per_sp:
      self.report("pvt_mem", f"SP_CS_PVT_MEM_STACK_OFFSET puts the call stack at {off:#x} of {per_sp:#x} bytes an SP (2 KiB units)", "stack_offset")

  def fetch_program(self) -> tuple[int, bytes]:
    """(address of the first instruction, code from there to the end that SP_CS_INSTR_SIZE declares)."""
    base, size, first = self.get64(0xa9b4), self.get("SP_CS_INSTR_SIZE", "GROUPS"), self.value(0xa9b3)
    if size == 0: self.stop("fetch_bounds", "SP_CS_INSTR_SIZE is 0")
    if base & 127: self.report("bad_state", f"SP_CS_BASE = {base:#x} is not 128-byte aligned", "base_alignment")
    if self.shader is None:
      self.report("stale_state", f"no LOAD_STATE6 of the shader at {base:#x} in this submit: the instruction cache may hold older code", "shader")
    elif self.shader.address != base:
      self.report("stale_state", f"LOAD_STATE6 preloads the shader at {self.shader.address:#x}, SP_CS_BASE is {base:#x}", "shader")
    if size > ICACHE_GROUPS and self.icache_label < size:
      self.report("icache_bound", f"{size} groups of instructions without the prefetch workaround")
    code = self.fetch(base, size * 128, f"instruction fetch of {size} groups")
    if code is None: self.stop("fetch_bounds", f"SP_CS_INSTR_SIZE declares {size * 128} bytes of code at {base:#x}, which are not all mapped")
    if first % 8 or first >= len(code): self.stop("bad_state", f"SP_CS_PROGRAM_COUNTER_OFFSET = {first:#x} in a program of {len(code)} bytes")
    return base + first, code[first:]

  def unmapped(self, addr: int, size: int) -> MemoryFault | None:
    try:
      for _ in self.space._pieces(addr, size, True, "UCHE"): pass
    except MemoryFault as e: return e
    return None

  def descriptors(self, what: str, count: int, base_reg: int, size: int) -> list[bytes]:
    """`count` descriptors: preloaded ones, the rest from the base register's array, as a miss of the hardware would fetch them."""
    if count == 0: return []
    loaded, base = self.desc[what], self.get64(base_reg)
    data = self.fetch(base, count * size, f"fetch of {count} {what} descriptors") or bytes(count * size)
    memory = [data[k * size:(k + 1) * size] for k in range(count)]
    for k in range(count):
      if k in loaded and loaded[k] != memory[k]:
        self.report("bad_state", f"{what} {k}: LOAD_STATE6 loaded another descriptor than {R.name(base_reg)} {base:#x} holds", "descriptor",
                    [f"loaded {loaded[k].hex(' ', 4)}", f"memory {memory[k].hex(' ', 4)}"])
    return [loaded.get(k, memory[k]) for k in range(count)]

  def program(self, code: bytes, merged: bool, base: int) -> Any:
    """Decodes; what the shader core cannot run ends the job."""
    from .ir3.native import UnknownInstruction
    try: return self.gpu.engine.program(code, merged_regs=merged)
    except UnknownInstruction as e: self.stop("unknown_instruction", f"{e}, program at {base:#x}")
    except ValueError as e: self.stop("unsupported", f"{e}, program at {base:#x}")

  # *** execution

  def drain(self) -> None:
    """Everything launched has finished when this returns."""
    if not self.pending: return
    todo, self.pending = self.pending, []
    if len(todo) > 1 and isinstance(self.gpu.schedule, int): self.gpu.random.shuffle(todo)
    for k, p in enumerate(todo):
      if len(todo) > 1: self.space.uche_unsettle(first=k == 0)
      self.run_dispatch(p)
    if len(todo) > 1: self.space.uche_settle()

  def run_dispatch(self, p: Pending) -> None:
    from .gpu import Hang
    from .ir3.native import ShaderFault, UnknownInstruction
    job, abort = self.job, p.dispatch.abort
    assert job is not None
    self._abort = abort                                 # before the test: abort() sets killed first
    if job.killed: raise Hang(job.killed)
    if self.cp_wrote:
      self.space.mark_stale()
      self.cp_wrote = False
    for load in p.loads: self.verify(load, p)
    engine, estimate = self.gpu.engine, self.gpu.estimate
    before = estimate.before(engine) if estimate is not None else None
    try:
      with self.space.running(): engine.run(p.program, p.dispatch)
    except ShaderFault as e: self.shader_faults(e, p)
    except UnknownInstruction as e: raise Hang(f"{e}, in kernel {p.kernel}", "unknown_instruction") from None
    except (ValueError, MemoryError) as e: raise Hang(f"{e}, in kernel {p.kernel}", "unsupported") from None
    finally: self._abort = None
    if job.killed: raise Hang(job.killed)
    if estimate is not None: estimate.launched(p, engine, before)

  def verify(self, load: Load, p: Pending) -> None:
    """LOAD_STATE6 may be performed as late as the dispatch: memory must still hold what it held at the packet."""
    data = load.data[:64 * self.get("SP_CS_CONST_CONFIG", "CONSTLEN")] if load.what == "constants" else load.data
    if data and self.space.read_uche(load.address, len(data))[0] != data:
      self.report("load_state_changed", f"{load.what} at {load.address:#x} changed between CP_LOAD_STATE6 and the dispatch", where=p.where,
                  kernel=p.kernel, dispatch=p.number, details=[self.space.explain(load.address)])

  def shader_faults(self, e: Any, p: Pending) -> None:
    """Files what the shader core found: SMMU faults as the kernel would, the rest as violations. Raises Hang for a hang."""
    from .gpu import Hang
    at: dict[str, Any] = {"kernel": p.kernel, "where": p.where, "dispatch": p.number}
    hang = None
    found = dict[tuple, list[Any]]()                    # what one instruction did wrong in one buffer is one finding, however many lanes did it
    for f in e.faults: found.setdefault((f.kind, f.pc, f.write, s.bo if (s := self.space.find(f.address)) else None), []).append(f)
    for f, *others in found.values():
      details = [f"instruction {f.pc} at {p.base + f.pc * 8:#x}: {self.disassemble(p, f.pc)}", f"lane {f.lane} of workgroup {tuple(f.workgroup)}"]
      what = f"{'store' if f.write else 'load'} of {f.size} bytes at {f.address:#x}"
      kind = {"stale": "stale_line", "unsettled": "missing_wait", "register_limit": "limit", "call_stack": "limit"}.get(f.kind, f.kind)
      if others:
        addresses = [g.address for g in (f, *others)]
        details.append(f"and {len(others)} more lanes, addresses {min(addresses):#x} to {max(addresses):#x}")
      if kind == "hang": hang = f
      elif kind in ("unmapped", "readonly", "not_resident"):
        v = Violation(kind, f"shader {what}", details=details + [self.space.explain(f.address)], **at)
        for g in (f, *others): self.gpu.fault(v if g is f else None, self.job, g.address, g.write, kind == "readonly", "UCHE")
      elif kind == "limit": raise Hang(f"{f.text}, in kernel {p.kernel}", "limit")
      else:
        if kind.startswith("undefined_"): what = f"{REGION[kind]} {self.region_name(kind, f.address)} read before it was written"
        elif kind == "branch_stack":
          what = f"has fibers waiting in {f.address} places, SP_CS_CNTL_0.BRANCHSTACK = {p.dispatch.branchstack} is for {2 * p.dispatch.branchstack}"
        elif kind == "image_type": what = f"{'store to' if f.write else 'load from'} an image of another kind at {f.address:#x}"
        elif kind in ("stale_line", "missing_wait"): details.append(self.space.explain(f.address))
        self.report(kind, f"shader {what}", details=details, **at)
    if hang is not None:
      raise Hang(f"kernel {p.kernel}: a wave of workgroup {tuple(hang.workgroup)} is still at instruction {hang.pc} "
                 f"({self.disassemble(p, hang.pc)}) after {self.gpu.budget} instructions")

  @staticmethod
  def region_name(kind: str, address: int) -> str:
    if kind == "undefined_const": return f"c{address >> 2}.{'xyzw'[address & 3]}"
    if kind == "undefined_register": return f"r{address >> 2}.{'xyzw'[address & 3]}"
    return f"byte {address:#x}"

  def disassemble(self, p: Pending, pc: int) -> str:
    word = p.code[pc * 8:pc * 8 + 8]
    if len(word) < 8: return "beyond the program"
    from .ir3 import decode
    try: return str(decode.decode_one(int.from_bytes(word, "little"), pc))
    except decode.UnknownInstruction as e: return str(e)
