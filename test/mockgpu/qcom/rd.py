"""Captures of what the virtual GPU was given, in the .rd format of Mesa's freedreno tools (cffdump, replay, rddecompiler).

A file is a sequence of {u32 type, u32 size, payload}, little-endian; gzip if the name ends in .gz, which the tools read as well. Section types and
order: drivers/gpu/drm/msm/msm_rd.c and Mesa common/redump.h. A reader takes a CMD for the beginning of a submit, forgets its buffers at the first
GPUADDR after a CMDSTREAM_ADDR, and executes at each CMDSTREAM_ADDR; sizes there are dwords, elsewhere bytes.
"""
from __future__ import annotations
import gzip, os, struct, sys, threading
from typing import TYPE_CHECKING, BinaryIO, cast
if TYPE_CHECKING: from .gpu import Job

RD_CMD, RD_GPUADDR, RD_CMDSTREAM_ADDR, RD_BUFFER_CONTENTS, RD_GPU_ID, RD_CHIP_ID = 2, 3, 6, 12, 13, 14
SMALL = 1 << 20

class RdWriter:
  """Writes one section per listed buffer and one per command stream for every submit, before it runs.

  Buffers above 1 MiB are declared without contents unless `full`: command streams, shaders and arguments are small, tensors are not.
  """
  def __init__(self, path: str, chip_id: int, *, full: bool = False):
    self.path, self.full = path, full
    try: self._file = cast(BinaryIO, gzip.open(path, "wb", 1) if path.endswith(".gz") else open(path, "wb"))
    except OSError as e: raise OSError(e.errno, f"cannot write the .rd capture: {e.strerror}", path) from None
    self._lock = threading.Lock()
    major, minor, patch = chip_id >> 24, chip_id >> 16 & 0xff, chip_id >> 8 & 0xff
    self._section(RD_GPU_ID, struct.pack("<I", major * 100 + minor * 10 + patch))
    self._section(RD_CHIP_ID, struct.pack("<Q", chip_id))

  def _section(self, kind: int, payload: bytes) -> None: self._file.write(struct.pack("<II", kind, len(payload)) + payload)

  def submit(self, job: Job) -> None:
    """Records a submit: its buffers as memory holds them now, then its command streams."""
    with self._lock:
      if self._file.closed: return
      text = f"{job.name or os.path.basename(sys.argv[0] or 'python')}/{job.pid}: fence={job.number}".encode()
      self._section(RD_CMD, text + bytes(-len(text) % 4))
      streams = {s.iova for iova, _ in job.ibs if (s := job.space.find(iova)) is not None}
      for s in list(job.space._segs):
        if s.bo.kernel or not job.space.resident(s.bo): continue
        self._section(RD_GPUADDR, struct.pack("<III", s.iova & 0xffffffff, min(s.size, 0xffffffff), s.iova >> 32))
        if self.full or s.size <= SMALL or s.iova in streams: self._section(RD_BUFFER_CONTENTS, s.mem.tobytes())
      for iova, dwords in job.ibs: self._section(RD_CMDSTREAM_ADDR, struct.pack("<III", iova & 0xffffffff, dwords, iova >> 32))
      self._file.flush()

  def close(self) -> None:
    with self._lock: self._file.close()
