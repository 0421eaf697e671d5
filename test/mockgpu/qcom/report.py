"""What went wrong on the virtual GPU, in words a driver author can act on.

A Violation is one finding: its one-line summary, where in the command stream it was found, and details. `str()` gives the whole report. Kinds are
stable identifiers: tests and the lenient list of Strict name them, optionally with a subject (`field_overflow:SP_CS_PVT_MEM_STACK_OFFSET`).
"""
from __future__ import annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
if TYPE_CHECKING:
  from .gpu import FaultRecord, Job

# kind -> what it means for the client. The text ends every report.
REMEDY = {
  "unmapped": "No BO of this address space is there: a bad address, a use after close, or an access out of bounds.",
  "not_resident": "The BO exists but this submit does not list it. On hardware it works until the kernel evicts it, and its close is not waited for.",
  "readonly": "The BO was created GPU_READONLY, the SMMU refuses the write.",
  "privileged": "A buffer of the kernel's own, which only its part of the ring may touch.",
  "misaligned": "Global, local and private accesses must be aligned to their element size, the CP's to a dword.",
  "cp_error": "The command processor stops at this packet. The kernel sees a hang and drops the rest of the submit.",
  "hang": "The kernel's hang check kills the submit, signals its fence without an error and counts a fault.",
  "field_overflow": "The value has bits outside the register's fields, the hardware drops them: check the field's unit and shift.",
  "stale_register": "The value is whatever the previous client left. Program every register that the dispatch depends on in each submit.",
  "fixed_register": "The kernel or another client may have left another value. Mesa programs this one for the chip before compute work.",
  "stale_state": "State loaded by another client or an earlier submit is not this dispatch's state: load it in this submit.",
  "load_state_changed": "LOAD_STATE6 loads are queued: hardware may read the memory at any time until the dispatch has started.",
  "constlen": "CONSTLEN counts units of 4 vec4. 0 declares no constants at all.",
  "limit": "The chip cannot run such a workgroup: it would hang or compute garbage.",
  "bad_state": "The dispatch state contradicts itself.",
  "pvt_mem": "Spilled registers would overwrite foreign memory: see SP_CS_PVT_MEM_PARAM (512 bytes a fiber), _BASE, _SIZE (4 KiB an SP).",
  "icache_bound": "Programs beyond the 64-group instruction cache can hang in branch prefetch, unless SP_PS_INSTR_SIZE holds the same size and "
                  "a LABEL event follows (Mesa issue 5892).",
  "fetch_bounds": "The shader core fetches SP_CS_INSTR_SIZE groups of 128 bytes from SP_CS_BASE, and they must be mapped.",
  "unflushed_read": "The CP reads memory, the newest data is still dirty in UCHE: CACHE_FLUSH_TS and WAIT_FOR_IDLE first.",
  "cp_order": "The CP's writes are posted: emit CP_WAIT_MEM_WRITES before it reads them back (and CP_WAIT_FOR_ME before indirect dispatches).",
  "stale_line": "UCHE still holds what memory held before the CPU or the CP wrote it: emit CACHE_INVALIDATE before the dispatch.",
  "missing_wait": "The line was written by a dispatch that need not have finished: emit WAIT_FOR_IDLE between dependent dispatches.",
  "unknown_instruction": "The virtual shader core does not know this encoding: data instead of code, or a gap in its table.",
  "unsupported": "The virtual GPU does not model this. It stops instead of guessing.",
  "fetch_past_end": "The program ran past the instructions that SP_CS_INSTR_SIZE declares: no `end` was met.",
  "undefined_register": "The register was read before anything wrote it.",
  "undefined_const": "The constant was not loaded, or lies beyond CONSTLEN.",
  "undefined_local": "Local memory has no defined contents before the workgroup writes it.",
  "undefined_private": "Private memory of a fiber has no defined contents before the fiber writes it.",
  "branch_stack": "The stack of diverged fibers overflows: hardware would lose fibers. BRANCHSTACK is half of what the compiler counts.",
  "local_out_of_bounds": "SP_CS_CNTL_1.SHARED_SIZE declares less local memory than the access needs.",
  "private_out_of_bounds": "SP_CS_PVT_MEM_PARAM.MEMSIZEPERITEM declares less private memory than the access needs.",
  "out_of_bounds": "The access leaves the buffer or image it addresses.",
  "image_type": "The instruction's register type and the descriptor's format must both be float-like or both integer; raw access needs a buffer.",
  "barrier_divergence": "A barrier must be reached by all fibers of the workgroup that have not ended.",
}

@dataclass
class Violation:
  """One finding. `where` locates the packet, `details` are extra lines (register values, nearest BO, disassembly), `dmesg` the kernel's log line."""
  kind: str
  summary: str
  subject: str = ""
  submit: int = 0
  job_name: str = ""
  kernel: str = ""
  where: str = ""
  dispatch: int | None = None
  details: list[str] = field(default_factory=list)
  dmesg: str = ""
  count: int = 1

  def __str__(self) -> str:
    head = f"virtual Adreno 630: {self.kind}: {self.summary}"
    what = f"submit {self.submit}" + (f" '{self.job_name}'" if self.job_name else "")
    if self.dispatch is not None: what += f", dispatch {self.dispatch}"
    if self.kernel: what += f", kernel {self.kernel}"
    lines = [head, f"  in {what}" + (f", {self.where}" if self.where else "")] + [f"  {d}" for d in self.details]
    if self.count > 1: lines.append(f"  seen {self.count} times")
    if self.kind in REMEDY: lines.append(f"  {REMEDY[self.kind]}")
    lines += [f"  dmesg: {line}" for line in self.dmesg.splitlines()]
    return "\n".join(lines)

# *** the kernel's log, in the shape that dmesg shows. MSM: drm/msm adreno_gpu.c, a6xx_gpu.c, msm_gpu.c. KGSL (4.9): kgsl_iommu.c, adreno_dispatch.c

GPU_NAME, DRM_DEVICE = "6.3.0.2", "msm_dpu ae01000.display-controller"
RBBM_STATUS = 0x00800005                                # not modelled: what a CP that waits or has stopped shows

@dataclass
class RingState:
  """Where the CP is, as its registers tell after a hang: positions in the ring and what is left of each IB, in dwords."""
  rptr: int = 0
  wptr: int = 0
  ib1: tuple[int, int] = (0, 0)
  ib2: tuple[int, int] = (0, 0)
  fence: int = 0                                        # of the last submit in the ring
  def __str__(self) -> str:
    (a, m), (b, n) = self.ib1, self.ib2
    return f"status {RBBM_STATUS:08X} rb {self.rptr:04x}/{self.wptr:04x} ib1 {a:016X}/{m:04x} ib2 {b:016X}/{n:04x}"

FAULT_LINES = 10, 1                                     # of one submit: MSM limits the rate, KGSL stalls the GPU at the first

def fault_lines(job: Job, f: FaultRecord) -> list[str]:
  """An SMMU fault. `scratch` holds CP_SCRATCH_REG 4 to 7."""
  space, direction = job.space, "write" if f.write else "read"
  if space.name != "kgsl":
    return [f"*** gpu fault: ttbr0={space.ttbr0:016x} iova={f.iova:016x} dir={direction.upper()} type={f.kind} source={f.source} "
            f"({','.join(map(str, f.scratch))})"]
  before, after = space.neighbours(f.iova)
  return [f"kgsl kgsl-3d0: GPU PAGE FAULT: addr = {f.iova:X} pid= {job.pid} name={job.name}",
          f"kgsl kgsl-3d0: context=gfx3d_user TTBR0=0x{space.ttbr0:x} ({direction} {f.kind.lower()} fault)",
          f"kgsl kgsl-3d0: FAULTING BLOCK: {f.source}", "kgsl kgsl-3d0: ---- nearby memory ----", f"kgsl kgsl-3d0: {before}",
          f"kgsl kgsl-3d0:  <- fault @ {f.iova:08X}", f"kgsl kgsl-3d0: {after}"]

def hang_line(job: Job, ring: RingState) -> str:
  """What either kernel says of the CP when a job is given up. KGSL says it of a faulting command, too."""
  if job.space.name != "kgsl": return f"adreno 5000000.gpu: [drm:a6xx_irq] *ERROR* gpu fault ring 0 fence {ring.fence:x} {ring}"
  return f"kgsl kgsl-3d0: |adreno| {job.name}[{job.pid}]: gpu fault ctx {job.context} ts {job.timestamp} {ring}"

def recover_lines(comm: str, cmdline: str) -> list[str]:
  """MSM's recover_worker, on the DRM device."""
  task = f"{comm} ({cmdline})" if comm and cmdline else "unknown"
  return [f"{DRM_DEVICE}: [drm:recover_worker] *ERROR* {GPU_NAME}: {t}" for t in ("hangcheck recover!", f"offending task: {task}")]

def lockup_lines(completed: int, submitted: int) -> list[str]:
  """MSM's hangcheck_handler, ahead of the recovery."""
  return [f"{DRM_DEVICE}: [drm:hangcheck_handler] *ERROR* {GPU_NAME}: {t}" for t in (
    "hangcheck detected gpu lockup rb 0!", f"    completed fence: {completed}", f"    submitted fence: {submitted}")]
