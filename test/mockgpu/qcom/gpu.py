"""The virtual Adreno 630 as the kernel sees it: one ring fed by submits, one thread that executes them, faults and hangs as records.

A submit returns at once. Jobs run in order within a priority, a lower number first; a running job is never preempted (a630 has one ring and no
preemption). The `schedule` decides when a queued job may start:
  asap   at once
  late   when somebody waits for its fence or polls it (`poke`), or `grace_s` after the submit (a client may also poll memory, which nobody sees)
  N      (an int) seeded random delays of up to `grace_s`, and dispatches nobody waited for yet run in random order
"""
from __future__ import annotations
import heapq, itertools, os, random, threading, time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from . import report
from .collector import outside_python
from .memory import BoInfo, Space
from .report import Violation
if TYPE_CHECKING: from .cp import Pending

# What the unmodified tinygrad 0.14.0 driver is known to do: CONSTLEN without its shift, the call stack's offset in bytes, registers left alone
TINYGRAD_0_14 = frozenset({"constlen", "field_overflow:SP_CS_PVT_MEM_STACK_OFFSET", "pvt_mem:stack_offset", "stale_register:SP_FLOAT_CNTL",
                           "stale_register:HLSQ_SHARED_CONSTS", "fixed_register", "icache_bound"})

@dataclass
class Strict:
  """Which checks are on. `lenient` names kinds (or `kind:subject`) that are tolerated in silence; cp errors, hangs and SMMU faults cannot be.

  residency: only BOs listed in the submit translate. uche: caches are modelled. stale: registers and state must be programmed in each submit,
  others hold poison. shader: undefined registers, constants and local memory. raise_to_waiter: the client's next wait raises the reports.
  """
  residency: bool = True
  uche: bool = True
  stale: bool = True
  shader: bool = True
  raise_to_waiter: bool = True
  lenient: frozenset[str] = frozenset()

  def tolerates(self, kind: str, subject: str = "") -> bool: return kind in self.lenient or f"{kind}:{subject}" in self.lenient

  @classmethod
  def of(cls, setting: Strict | str | dict[str, Any] | None) -> Strict:
    """From a configuration: None (everything on), "off", "tinygrad-0.14" (tolerates that driver's known slips), or a dict of fields.

    Raises ValueError for anything else.
    """
    if setting is None: return cls()
    if isinstance(setting, Strict): return setting
    if setting == "off": return cls(False, False, False, False, False)
    if setting == "tinygrad-0.14": return cls(lenient=TINYGRAD_0_14)
    if isinstance(setting, dict):
      if unknown := set(setting) - set(cls.__dataclass_fields__):
        raise ValueError(f"strict has no {', '.join(sorted(unknown))}, there are {', '.join(cls.__dataclass_fields__)}")
      lenient = frozenset(setting.get("lenient", ()))
      if kinds := {k.partition(":")[0] for k in lenient} - set(report.REMEDY):
        raise ValueError(f"strict: lenient has no kind {', '.join(sorted(kinds))}, there are {', '.join(report.REMEDY)}")
      return cls(**{**setting, "lenient": lenient})
    raise ValueError(f"strict must be 'off', 'tinygrad-0.14' or a dict of checks, not {setting!r}")

@dataclass
class FaultRecord:
  """One SMMU fault as the kernel logs it: the access was dropped (reads gave 0), the job went on."""
  iova: int
  write: bool
  kind: str                    # TRANSLATION or PERMISSION
  source: str                  # UCHE, TP, CP, CDP Prefetch
  scratch: tuple[int, ...] = (0, 0, 0, 0)
  dmesg: str = ""

@dataclass
class JobResult:
  """status: ok, fault (completed, with SMMU faults) or hang (killed; `reason` says why). dmesg: what its interrupts made the kernel log."""
  status: str = "ok"
  reason: str = ""
  faults: list[FaultRecord] = field(default_factory=list)
  reports: list[Violation] = field(default_factory=list)
  dmesg: list[str] = field(default_factory=list)
  ring: report.RingState = field(default_factory=report.RingState)

@dataclass(eq=False)
class Job:
  """One submit. ibs: [(iova, dwords)]. resident: the BOs it lists, None for all. on_start(job) and on_retire(job, result) run on the GPU thread.
  name, pid: of the task. context, timestamp: KGSL's."""
  space: Space
  ibs: list[tuple[int, int]]
  resident: set[BoInfo] | None = None
  priority: int = 1
  name: str = ""
  pid: int = field(default_factory=os.getpid)
  context: int = 0
  timestamp: int = 0
  on_start: Callable[[Job], None] | None = None
  on_retire: Callable[[Job, JobResult], None] | None = None
  number: int = 0
  result: JobResult = field(default_factory=JobResult)
  finished: threading.Event = field(default_factory=threading.Event)
  killed: str = ""
  ready_at: float = 0.0
  ring_end: int = 0

  def wait(self, timeout: float | None = None) -> bool: return self.finished.wait(timeout)

# The kernel's part of a submit in the ring: pagetable switch, counters, invalidates, fence write, and the calls of its IBs (a6xx_submit), in dwords
RING_DWORDS, SUBMIT_DWORDS, CALL_DWORDS = 8192, 60, 4

class Hang(Exception):
  """The job cannot go on. `kind` is hang or cp_error."""
  def __init__(self, reason: str, kind: str = "hang"):
    self.reason, self.kind = reason, kind
    super().__init__(reason)

class Stalled(Exception):
  """KGSL lets an SMMU fault stall the GPU (kgsl_iommu.c): what comes after it in the command does not run, and a reset follows."""

class VirtualGPU:
  """chip_id as MSM_PARAM_CHIP_ID gives it. execute=False: streams are parsed, memory writes of the CP happen, dispatches do nothing.

  order: workgroup order, "forward", "reversed" or a seed. hang_polls: how often a WAIT_REG_MEM looks, a millisecond apart or more,
  and budget: how many instructions a wave may execute before its job counts as hung. Neither is a time: a loaded machine is slower, not more stuck.
  counter_start: first value of the 19.2 MHz always-on counter. engine: a shader core with the interface of
  ir3.native.Engine.
  """
  def __init__(self, chip_id: int = 0x06030002, strict: Strict | str | dict[str, Any] | None = None, schedule: str | int = "asap",
               execute: bool = True, *, order: str | int = "forward", hang_polls: int = 2000, grace_s: float = 0.02,
               counter_start: int = 0x1_0000_0000, budget: int = 1 << 29, rd: str | None = None, rd_full: bool = False,
               estimate: str | None = None, engine: Any = None):
    self.chip_id, self.strict, self.schedule, self.execute = chip_id, Strict.of(strict), schedule, execute
    self.order, self.hang_polls, self.grace_s, self.budget = order, hang_polls, grace_s, budget
    self.random = random.Random(schedule if isinstance(schedule, int) else 0)
    self.counters: Counter[str] = Counter()
    self.reports: list[Violation] = []
    self.observer: Callable[[Pending, dict[int, int]], None] | None = None      # sees each dispatch with the registers its submit wrote (by offset)
    self.dmesg: list[str] = []                          # lines that interrupts made the kernel log, of all jobs
    self._wptr = 0
    self._counter_start, self._t0 = counter_start, time.perf_counter_ns()
    self._engine = engine
    self._numbers = itertools.count(1)
    self._cond = threading.Condition()
    self._queue: list[tuple[int, int, Job]] = []
    self._current: Job | None = None
    self._last_space: Space | None = None
    self._thread: threading.Thread | None = None
    self._closing = False
    from .cp import CommandProcessor
    self.cp = CommandProcessor(self)
    self.rd = None
    if rd is not None:
      from .rd import JobWriter
      self.rd = JobWriter(rd, chip_id, full=rd_full)

    self.estimate: Any = None
    if estimate is not None:
      from .estimate import Estimate
      self.estimate = Estimate(estimate)

  # *** client side

  def new_space(self, name: str = "") -> Space: return Space(uche=self.strict.uche, name=name)

  @property
  def engine(self) -> Any:
    if self._engine is None:
      from .ir3.native import Engine
      self._engine = Engine()
    return self._engine

  def instructions(self) -> dict[str, tuple[int, int]]:
    """Executed instructions by mnemonic: (by waves, by active lanes)."""
    return self._engine.counts() if self._engine is not None else {}

  def counter_ticks(self) -> int:
    """The always-on counter, in ticks of 19.2 MHz."""
    return self._counter_start + (time.perf_counter_ns() - self._t0) * 12 // 625

  def submit(self, job: Job) -> None:
    """Queues the job and returns. Raises RuntimeError after close()."""
    with self._cond:
      if self._closing: raise RuntimeError("the virtual GPU was closed")
      job.number = next(self._numbers)
      job.ring_end = self._wptr = (self._wptr + SUBMIT_DWORDS + CALL_DWORDS * len(job.ibs)) % RING_DWORDS
      now = time.monotonic()
      if self.schedule == "late": job.ready_at = now + self.grace_s
      elif self.schedule != "asap": job.ready_at = now + self.random.random() * self.grace_s
      self.counters["submits"] += 1
      self.counters["submit_bos"] += len(job.resident or ())
      heapq.heappush(self._queue, (job.priority, job.number, job))
      if self._thread is None:
        self._thread = threading.Thread(target=self._run, name="virtual-adreno", daemon=True)
        self._thread.start()
      self._cond.notify_all()

  def poke(self, job: Job | None = None) -> None:
    """Somebody waits for `job` (None: for anything): it and what is queued before it may start. Only matters to the late schedule."""
    if self.schedule != "late": return
    with self._cond:
      for priority, number, j in self._queue:
        if job is None or (priority, number) <= (job.priority, job.number): j.ready_at = 0.0
      self._cond.notify_all()

  def kill(self, job: Job, reason: str = "killed by the kernel") -> None:
    """Ends the job as a hang, queued or running. Returns at once; on_retire follows."""
    job.killed = reason
    with self._cond:
      if self._current is job: self.cp.abort()
      self._cond.notify_all()

  def progress(self) -> Any:
    """Something that changes as the CP moves along, as a kernel reads it while the GPU runs: the IBs and what is left of them."""
    return self._current, self.cp.ib, self.cp.pos

  def executing(self) -> bool:
    """Whether a job is running: the virtual GPU, which kills what hangs, may be slow but will end it."""
    return self._current is not None

  def idle(self, timeout: float | None = None) -> bool:
    """Waits until nothing is queued or running."""
    self.poke()
    with self._cond: return self._cond.wait_for(lambda: not self._queue and self._current is None, timeout)

  def close(self) -> None:
    """Kills what is queued or running and ends the GPU thread. Idempotent."""
    with self._cond:
      self._closing = True
      for _, _, job in self._queue: job.killed = job.killed or "the GPU was closed"
      if self._current is not None:
        self._current.killed = self._current.killed or "the GPU was closed"
        self.cp.abort()
      self._cond.notify_all()
    if self._thread is not None and self._thread is not threading.current_thread(): self._thread.join()
    self._thread = None
    if self.rd is not None: self.rd.close()
    if self.estimate is not None: self.estimate.finish()

  # *** records

  def report(self, v: Violation, job: Job | None = None) -> bool:
    """Files a violation unless the strictness tolerates it. The same finding (kind, summary) again in one job only counts up."""
    if self.strict.tolerates(v.kind, v.subject): return False
    if job is not None:
      v.submit, v.job_name = job.number, job.name + (f" ctx {job.context} ts {job.timestamp}" if job.context else "")
      same = next((r for r in job.result.reports if r.kind == v.kind and r.summary == v.summary), None)
      if same is not None:
        same.count += 1
        return True
      job.result.reports.append(v)
    self.counters["violations"] += 1
    self.reports.append(v)
    return True

  def log(self, job: Job, *lines: str) -> None:
    """Lines of the kernel log, for whoever models the kernel."""
    job.result.dmesg += lines
    self.dmesg += lines

  def fault(self, v: Violation | None, job: Job, iova: int, write: bool, permission: bool, source: str) -> None:
    """An SMMU fault: recorded and logged whatever the strictness, the job goes on. v None: one more of a finding that was reported."""
    f, result = FaultRecord(iova, write, "PERMISSION" if permission else "TRANSLATION", source, self.cp.scratch()), job.result
    lines = report.fault_lines(job, f)
    f.dmesg = "\n".join(lines)
    if not result.faults: result.ring = self.cp.ring_state((job.ring_end - CALL_DWORDS) % RING_DWORDS, self._wptr)
    if len(result.faults) < report.FAULT_LINES[job.space.name == "kgsl"]: self.log(job, *lines)
    result.faults.append(f)
    if result.status == "ok": result.status = "fault"
    self.counters["faults"] += 1
    if v is not None:
      v.dmesg = f.dmesg
      self.report(v, job)

  # *** the GPU thread

  def _next(self) -> Job | None:
    with self._cond:
      while True:
        if self._queue:
          job = self._queue[0][2]
          wait = job.ready_at - time.monotonic()
          if wait <= 0 or job.killed or self._closing:
            heapq.heappop(self._queue)
            self._current = job
            return job
          self._cond.wait(wait)
        elif self._closing: return None
        else: self._cond.wait()

  def _run(self) -> None:
    with outside_python: self._work()

  def _work(self) -> None:
    while (job := self._next()) is not None:
      result = job.result
      try:
        if job.on_start is not None: job.on_start(job)
        if job.killed: raise Hang(job.killed)
        self._execute(job)
      except Hang as e:
        result.status, result.reason = "hang", e.reason
        self.counters["hangs"] += 1
        result.ring = self.cp.ring_state((job.ring_end - CALL_DWORDS) % RING_DWORDS, self._wptr)
        v = Violation(e.kind, e.reason, kernel=self.cp.kernel, where=self.cp.where(), dmesg=report.hang_line(job, result.ring),
                      details=self.cp.state_lines() if self.cp.kernel else [])
        self.log(job, v.dmesg)
        self.report(v, job)
        self.cp.reset()
        job.space.uche_reset()
      except Stalled:
        self.cp.reset()
        job.space.uche_reset()
      except BaseException as e:      # a bug of the model must reach the waiting client, not end in a silent thread
        result.status, result.reason = "hang", f"internal error of the virtual GPU: {type(e).__name__}: {e}"
        self.report(Violation("internal", result.reason, details=_traceback(e)), job)
        self.cp.reset()
      try:
        if job.on_retire is not None: job.on_retire(job, result)
      finally:
        with self._cond:
          self._current = None
          job.finished.set()
          self._cond.notify_all()

  def _execute(self, job: Job) -> None:
    space = job.space
    space.set_resident(job.resident if self.strict.residency else None)
    if space is not self._last_space:        # the kernel invalidates when it switches pagetables, and only then
      space.uche_invalidate()
      self._last_space = space
    if self.rd is not None: self.rd.job(job)
    self.cp.run(job)
    space.uche_flush()                       # the ring's CACHE_FLUSH_TS with the fence value
    if (engine := self._engine) is not None:
      self.counters["wave_instructions"], self.counters["lane_instructions"] = int(engine.waves.sum()), int(engine.lanes.sum())
      self.counters["bytes_read"], self.counters["bytes_written"] = engine.bytes_read, engine.bytes_written

def _traceback(e: BaseException) -> list[str]:
  import traceback
  return [line for part in traceback.format_exception(e)[-6:] for line in part.rstrip().splitlines()]
