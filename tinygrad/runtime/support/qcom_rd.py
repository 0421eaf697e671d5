"""
Captures of submits in the .rd format of Mesa's freedreno tools (cffdump, replay, rddecompiler).

A file is a sequence of {u32 type, u32 size, payload}, little-endian; gzip if the name ends in .gz, which the tools read as well. Section types and
order: drivers/gpu/drm/msm/msm_rd.c and Mesa common/redump.h. A reader takes a CMD for the beginning of a submit, forgets its buffers at the first
GPUADDR after a CMDSTREAM_ADDR, and executes at each CMDSTREAM_ADDR; sizes there are dwords, elsewhere bytes.
"""
from __future__ import annotations
import atexit, contextlib, functools, gzip, os, re, struct, sys, threading
from collections.abc import Iterable
from typing import BinaryIO, cast

RD_CMD, RD_GPUADDR, RD_CMDSTREAM_ADDR, RD_BUFFER_CONTENTS, RD_GPU_ID, RD_CHIP_ID = 2, 3, 6, 12, 13, 14
SMALL = 1 << 20

class RdWriter:
  """
  Writes one section per listed buffer and one per command stream for every submit, before it runs. The file can be read after a crash.

  Buffers above 1 MiB are declared without contents unless `full`: command streams, shaders and arguments are small, tensors are not. `only`: numbers
  of the submits to be written, from 1. Raises OSError if the file can't be written.
  """
  def __init__(self, path:str, chip_id:int, *, full:bool=False, only:range|None=None):
    self.path, self.full, self.only, self.submits = path, full, only, 0
    try: self._file = cast(BinaryIO, gzip.open(path, "wb", 1) if path.endswith(".gz") else open(path, "wb"))
    except OSError as e: raise OSError(e.errno, f"cannot write the .rd capture: {e.strerror}", path) from None
    self._lock = threading.Lock()
    major, minor, patch = chip_id >> 24, chip_id >> 16 & 0xff, chip_id >> 8 & 0xff
    self._section(RD_GPU_ID, struct.pack("<I", major * 100 + minor * 10 + patch))
    self._section(RD_CHIP_ID, struct.pack("<Q", chip_id))

  def _section(self, kind:int, payload:bytes|memoryview): self._file.write(struct.pack("<II", kind, len(payload)) + bytes(payload))

  def wants(self) -> bool:
    """Counts a submit. Whether it is one of those to be written."""
    self.submits += 1
    return not self._file.closed and (self.only is None or self.submits in self.only)

  def submit(self, text:str, buffers:Iterable[tuple[int, int, memoryview|None]], ibs:Iterable[tuple[int, int]]):
    """`text` names task and submit. `buffers`: (iova, bytes, contents as memory holds them now, if there are any); `ibs`: (iova, dwords)."""
    with self._lock:
      if self._file.closed: return
      data, ibs = text.encode(), list(ibs)
      self._section(RD_CMD, data + bytes(-len(data) % 4))
      for iova, size, mem in buffers:
        self._section(RD_GPUADDR, struct.pack("<III", iova & 0xffffffff, min(size, 0xffffffff), iova >> 32))
        if mem is not None and (self.full or size <= SMALL or any(iova <= ib < iova + size for ib,_ in ibs)): self._section(RD_BUFFER_CONTENTS, mem)
      for iova, dwords in ibs: self._section(RD_CMDSTREAM_ADDR, struct.pack("<III", iova & 0xffffffff, dwords, iova >> 32))
      self._file.flush()

  def close(self):
    with self._lock, contextlib.suppress(OSError): self._file.close() # a full disk was reported by the submit that met it

@functools.cache # a device that is opened again goes on with the file
def from_environment(chip_id:int, path:str, only:str, full:bool) -> RdWriter:
  bounds = None
  if only:
    if (m:=re.fullmatch(r"(\d+)(-(\d*))?", only)): bounds = range(int(m[1]), int(m[1]) + 1 if not m[2] else int(m[3]) + 1 if m[3] else 1 << 62)
    if not bounds or bounds[0] == 0: raise ValueError(f"QCOM_RD_RANGE={only} is not a range of submits, counted from 1, like 7, 7-9 or 7-")
  try: ret = RdWriter(path, chip_id, full=full, only=bounds)
  except OSError as e: raise OSError(e.errno, f"QCOM_RD: {e.strerror}", path) from None
  def finish():
    ret.close()
    if bounds and ret.submits < bounds[0]:
      print(f"QCOM_RD_RANGE={only}: the process made {ret.submits} submits, {path} has none of them", file=sys.stderr)
  atexit.register(finish)
  return ret

def capture(chip_id:int) -> RdWriter|None:
  """The writer that QCOM_RD=FILE[.gz], QCOM_RD_RANGE=FIRST[-[LAST]] and QCOM_RD_FULL=1 ask for. Raises OSError, ValueError."""
  path, only, full = (os.environ.get(n, "") for n in ("QCOM_RD", "QCOM_RD_RANGE", "QCOM_RD_FULL"))
  if full not in ("", "0", "1"): raise ValueError(f"QCOM_RD_FULL={full}: it is 0 or 1")
  if not path and only: raise ValueError(f"QCOM_RD_RANGE={only} chooses submits of a capture: name its file with QCOM_RD")
  return from_environment(chip_id, os.path.abspath(path), only, full == "1") if path else None
