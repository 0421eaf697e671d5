"""Captures of what the virtual GPU was given by whatever client, in the format of tinygrad.runtime.support.qcom_rd."""
from __future__ import annotations
import atexit, os, sys
from typing import TYPE_CHECKING
from tinygrad.runtime.support.qcom_rd import RdWriter
if TYPE_CHECKING: from .gpu import Job

class JobWriter(RdWriter):
  """Complete, with the end of its compression, also if nobody closes the machine."""
  def __init__(self, path: str, chip_id: int, *, full: bool = False):
    super().__init__(path, chip_id, full=full)
    atexit.register(self.close)

  def job(self, job: Job) -> None:
    """Records a submit: its buffers as memory holds them now, then its command streams."""
    segs = [s for s in list(job.space._segs) if not s.bo.kernel and job.space.resident(s.bo)]
    self.submit(f"{job.name or os.path.basename(sys.argv[0] or 'python')}/{job.pid}: fence={job.number}",
                ((s.iova, s.size, memoryview(s.mem).cast("B")) for s in segs), job.ibs)
