"""What went wrong on the virtual GPU, in words a driver author can act on.

A Violation is one finding: its one-line summary, where in the command stream it was found, and details. `str()` gives the whole report. Kinds are
stable identifiers: tests and the lenient list of Strict name them, optionally with a subject (`field_overflow:SP_CS_PVT_MEM_STACK_OFFSET`).
"""
from __future__ import annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
if TYPE_CHECKING: from .gpu import Job

# kind -> what it means for the client. The text ends every report.
REMEDY = {
  "unmapped": "No BO of this address space is there: a bad address, a use after close, or an access out of bounds.",
  "not_resident": "The BO exists but this submit does not list it. On hardware it works until the kernel evicts it, and its close is not waited for.",
  "readonly": "The BO was created GPU_READONLY, the SMMU refuses the write.",
  "misaligned": "Global, local and private accesses must be aligned to their element size.",
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
  "local_out_of_bounds": "SP_CS_CNTL_1.SHARED_SIZE declares less local memory than the access needs.",
  "private_out_of_bounds": "SP_CS_PVT_MEM_PARAM.MEMSIZEPERITEM declares less private memory than the access needs.",
  "out_of_bounds": "The access leaves the buffer or image it addresses.",
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
    if self.dmesg: lines.append(f"  dmesg: {self.dmesg}")
    return "\n".join(lines)

def smmu_fault_line(iova: int, write: bool, permission: bool, source: str) -> str:
  """The kernel's log line of an SMMU fault (drm/msm adreno_gpu.c). The four scratch values are not modelled and read 0."""
  return (f"*** gpu fault: ttbr0={0:016x} iova={iova:016x} dir={'WRITE' if write else 'READ'} "
          f"type={'PERMISSION' if permission else 'TRANSLATION'} source={source} (0,0,0,0)")

def hang_lines(job: Job, ib1: int, rem: int, ring: int = 0) -> list[str]:
  """What the kernel logs around a recovery (drm/msm msm_gpu.c, a6xx_gpu.c)."""
  return [f"gpu fault ring {ring} fence {job.number:x} status 00800005 rb 0000/0000 ib1 {ib1:016X}/{rem:04x} ib2 0000000000000000/0000",
          f"6.3.0.2: hangcheck recover! offending task: {job.name or 'unknown'}"]
