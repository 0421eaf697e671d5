"""What mainline keeps of a GPU that went wrong: the hang check, devcoredump, and debugfs's list of GEM objects.

Sources: drivers/gpu/drm/msm msm_gpu.c (hangcheck_handler, recover_worker, crash state), adreno_gpu.c (adreno_show), msm_gem.c (msm_gem_describe).
"""
from __future__ import annotations
import struct
from typing import TYPE_CHECKING, Any
from test.mockgpu.qcom.report import GPU_NAME, RBBM_STATUS, lockup_lines
if TYPE_CHECKING: from test.mockgpu.qcom.msm import MSM

PROGRESS_RETRIES = 3                                    # DRM_MSM_HANGCHECK_PROGRESS_RETRIES
BO_DUMP = 4                                             # MSM_SUBMIT_BO_DUMP

class Hangcheck:
  """The timer that kills a submit when no fence has moved from one tick to the next. Runs on the machine's clock; the lock is held.

  Ticks are a period after a submit or a tick, rounded up to whole seconds. Where the kernel can read the CP's progress, a CP that moved is given
  three more ticks. The virtual GPU is slower than the one these times are made for: off unless the configuration asks for it.
  """
  def __init__(self, model: MSM):
    self.model = model
    self.period_ns = 250_000_000 if model.profile.progress else 500_000_000
    self.due: int | None = None
    self.fence, self.retries, self.position = 0, 0, None

  def arm(self) -> None:
    second = 1_000_000_000
    self.due = -(-(self.model.machine.clock() + self.period_ns) // second) * second

  def tick(self) -> None:
    """What is due by now."""
    m = self.model
    if self.due is None or m.machine.clock() < self.due: return
    self.due = None
    completed, submitted = m.completed, m.completed + len(m.ring)
    if completed != self.fence: self.fence, self.retries = completed, 0
    elif submitted > completed and not self.progressed():
      self.retries = 0
      for line in lockup_lines(completed, submitted): m.machine.log(line)
      job = m.ring[0]
      m.machine.gpu.kill(job, "hangcheck: no fence was reached since the last tick")
    if submitted > self.fence: self.arm()

  def progressed(self) -> bool:
    if self.retries >= PROGRESS_RETRIES or not self.model.profile.progress: return False
    position, self.position = self.position, self.model.machine.gpu.progress()
    if position == self.position: return False
    self.retries += 1
    return True

def ascii85(data: bytes) -> str:
  """The kernel's: 32-bit words, most significant digit first, `z` for zero."""
  out = []
  for v, in struct.iter_unpack("<I", data):
    digits = ""
    for _ in range(5): digits, v = chr(33 + v % 85) + digits, v // 85
    out.append("z" if digits == "!!!!!" else digits)
  return "".join(out)

def devcoredump(model: MSM, job: Any, bos: list[tuple[Any, int]], comm: str, cmdline: str, fault: Any = None) -> str:
  """Text of /sys/class/devcoredump/devcd*/data. bos: (BO, flags in the submit); contents only of those with BO_DUMP. fault: the FaultRecord that made
  it, None for a hang. Registers are not in it, as they are not modelled."""
  ring, now = job.result.ring, model.machine.clock()
  out = ["---", f"kernel: {model.machine.config.kernel}", "module: msm", f"time: {now // 10**9}.{now % 10**9:09d}", f"comm: {comm}",
         f"cmdline: {cmdline}", f"revision: 630 ({GPU_NAME})"]
  if fault is not None:
    out += ["fault-info:", f"  - ttbr0={job.space.ttbr0:016x}", f"  - iova={fault.iova:016x}", f"  - dir={'WRITE' if fault.write else 'READ'}",
            f"  - type={fault.kind}", f"  - source={fault.source}"]
  out += [f"rbbm-status: 0x{RBBM_STATUS:08x}", "ringbuffer:", "  - id: 0", f"    iova: 0x{model.kernel_bos['ring0'][0]:016x}",
          f"    last-fence: {model.completed + len(model.ring)}", f"    retired-fence: {model.completed}", f"    rptr: {ring.rptr}",
          f"    wptr: {ring.wptr}", "    size: 32768"]
  if bos: out.append("bos:")
  for bo, flags in bos:
    iova = next((v.iova for v in bo.addrs.values()), 0)
    out += [f"  - iova: 0x{iova:016x}", f"    size: {bo.size}", f"    flags: 0x{bo.flags:x}", f"    name: {bo.info.name}"]
    if flags & BO_DUMP: out += ["    data: !!ascii85 |", "     " + ascii85(bo.mem.bytes())]
  return "\n".join(out) + "\n"

def debugfs_gem(model: MSM) -> str:
  """/sys/kernel/debug/dri/128/gem: a line a BO, then its addresses. Kernel pointers are zeros, as kptr_restrict shows them."""
  def vma(iova: int, mapped: bool) -> str:
    if model.profile.gpuvm: return f"      vmas: [gpu: vm={0:016x}, {iova:x}, {'mapped' if mapped else 'unmapped'}]"
    return f"      vmas: [gpu: aspace={0:016x}, {iova:x},{'mapped' if mapped else 'unmapped'},inuse={int(mapped)}]"
  out = ["   flags       id ref  offset   kaddr            size     madv      name"]
  model.kernel_memory()
  for name, (iova, size, _) in model.kernel_bos.items():
    out += [f"   00020002: I  0 ( 1) 00000000 {0:016x} {size:08d}           {name}", vma(iova, True)]
  for bo in model.bos:
    out.append(f"   {bo.flags:08x}: {'A' if bo.submits else 'I'} {bo.info.handle:2d} ({bo.handles:2d}) {bo.offset or 0:08x} {0:016x} {bo.size:08d} "
               f"{'purged' if bo.purged else 'dontneed' if bo.madv else '':8s}  {bo.info.name}")
    out += [vma(v.iova, v.mapped) for v in bo.addrs.values()]
  return "\n".join(out) + "\n"
