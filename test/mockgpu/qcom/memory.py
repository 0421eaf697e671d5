"""One GPU address space of the virtual Adreno 630: translation, residency, and the UCHE (L2) as a second view of memory.

The shader core is C, so the translation table is C-visible: an array of SEG records sorted by iova. `ram` is the backing store that the
CPU maps; with the cache model on, `cache` is a shadow of the same size that shaders see, filled line by line. The CP talks to `ram` directly
and sees nothing that is still dirty in UCHE, as on hardware (Mesa docs/drivers/freedreno, "cache model").
"""
from __future__ import annotations
import bisect, ctypes, functools, itertools, os, pathlib, threading, time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
import numpy as np

PAGE, LINE = 4096, 64                                   # UCHE line size in bytes
READ, WRITE, RESIDENT = 1, 2, 4                         # SEG.flags
# SEG.line, one byte a cache line. STALE: the CPU changed memory under a cached line. UNSETTLED: written by a dispatch nobody waited for yet.
# OLD stands in for DIRTY while several dispatches run without a wait between them, so that the lines of each one can be told apart.
VALID, DIRTY, STALE, UNSETTLED, OLD = 1, 2, 4, 8, 16

SEG = np.dtype([("iova", "<u8"), ("size", "<u8"), ("ram", "<u8"), ("cache", "<u8"), ("line", "<u8"), ("flags", "<u4"), ("bo", "<u4")])

class MemoryFault(Exception):
  """A GPU access that the SMMU refuses. kind: unmapped (no translation), not_resident (mapped, but not listed in this submit), readonly, privileged
  (the kernel's own)."""
  def __init__(self, kind: str, address: int, size: int, write: bool, source: str = "CP"):
    self.kind, self.address, self.size, self.write, self.source = kind, address, size, write, source
    super().__init__(f"{source} {'write' if write else 'read'} of {size} bytes at {address:#x}: {kind}")

_bo_ids, _spaces = itertools.count(1), itertools.count(1)

@dataclass(eq=False)
class BoInfo:
  """What a report can say about a buffer. `history` is free text lines: allocated where, freed when; `listed`: by which submit last."""
  name: str = ""
  handle: int = 0
  size: int = 0
  listed: str = ""
  kernel: bool = False                                  # mapped for everybody, listed by nobody
  history: list[str] = field(default_factory=list)
  id: int = field(default_factory=lambda: next(_bo_ids))

  def __str__(self) -> str:
    return f"BO {self.handle or self.id}" + (f" '{self.name}'" if self.name else "")

class Segment:
  """One mapping: [iova, iova+size) -> ram. Sizes in bytes. Numpy views are made once, they alias the memory the CPU maps."""
  __slots__ = ("iova", "size", "ram", "flags", "bo", "mem", "cache", "line")
  def __init__(self, iova: int, size: int, ram: int, flags: int, bo: BoInfo, uche: bool):
    self.iova, self.size, self.ram, self.flags, self.bo = iova, size, ram, flags, bo
    self.mem = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(ram))
    # calloc'ed: untouched shadow pages cost no memory
    self.cache = np.zeros(size, np.uint8) if uche else None
    self.line = np.zeros(-(-size // (LINE * 8)) * 8, np.uint8) if uche else None

class Space:
  """A GPU address space (one pagetable). Kernel models map and unmap, the CP and the shader core translate.

  map/unmap may be called from any thread. A dispatch runs against the table as it was when it started; unmap waits for a running dispatch, so
  the caller may release the memory once unmap has returned.
  """
  def __init__(self, *, uche: bool = True, name: str = ""):
    self.uche, self.name = uche, name
    if uche: _library()                                 # its first build may take longer than a job is waited for
    self.ttbr0 = (n := next(_spaces)) << 48 | 0x9_0000_0000 + n * PAGE    # as the SMMU reports it: ASID and the address of a table nobody can see
    self._lock, self._running = threading.RLock(), threading.Lock()
    self._iovas: list[int] = []                         # sorted, parallel to _segs
    self._segs: list[Segment] = []
    self._freed: deque[tuple[int, int, BoInfo, float]] = deque(maxlen=512)    # iova, size, BO, when
    self._resident: frozenset[BoInfo] | None = None
    self._tables: dict[frozenset[BoInfo] | None, tuple[np.ndarray, int, list[int]]] = {}   # by what is resident: submits repeat a few lists
    self._touched = False                               # anything cached since the last flush / invalidate
    self._last: Segment | None = None

  # *** mapping

  def map(self, iova: int, size: int, ram_addr: int, *, readonly: bool = False, access: int = READ | WRITE, bo: BoInfo) -> None:
    """Maps `size` bytes of CPU memory at `ram_addr`. Raises ValueError if empty, unaligned (4 KiB) or overlapping."""
    if size <= 0 or iova & 0xfff: raise ValueError(f"cannot map {size} bytes at {iova:#x}: iova must be 4 KiB aligned, size positive")
    seg = Segment(iova, size, ram_addr, access & ~(WRITE if readonly else 0), bo, self.uche)
    with self._lock:
      i = bisect.bisect_right(self._iovas, iova)
      for other in self._segs[max(0, i - 1):i + 1]:
        if other.iova < iova + size and iova < other.iova + other.size:
          raise ValueError(f"[{iova:#x}, {iova + size:#x}) overlaps {other.bo} at [{other.iova:#x}, {other.iova + other.size:#x})")
      self._iovas.insert(i, iova)
      self._segs.insert(i, seg)
      self._tables.clear()

  def unmap(self, iova: int) -> None:
    """Removes the mapping that starts at `iova`, dirty UCHE lines included. KeyError if there is none. Waits for a running dispatch."""
    with self._lock:
      i = bisect.bisect_left(self._iovas, iova)
      if i == len(self._iovas) or self._iovas[i] != iova: raise KeyError(f"nothing is mapped at {iova:#x}")
      seg = self._segs.pop(i)
      del self._iovas[i]
      self._freed.append((seg.iova, seg.size, seg.bo, time.monotonic()))
      self._last = None
      self._tables.clear()
    with self._running: pass

  def set_resident(self, bos: Iterable[BoInfo] | None) -> None:
    """Only BOs in `bos` translate from now on; None: everything mapped does (KGSL)."""
    new = None if bos is None else frozenset(bos)
    with self._lock:
      if new != self._resident: self._resident, self._last = new, None

  def resident(self, bo: BoInfo) -> bool: return self._resident is None or bo.kernel or bo in self._resident

  def table(self) -> np.ndarray:
    """The C-visible SEG array, sorted by iova. Immutable once made: a change makes a new one."""
    return self._snapshot()[0]

  def _snapshot(self) -> tuple[np.ndarray, int, list[int]]:
    """The table, its address and its iovas."""
    with self._lock:
      if (found := self._tables.get(self._resident)) is None:
        t = np.zeros(max(1, len(self._segs)), SEG)
        t[:len(self._segs)] = [(s.iova, s.size, s.ram, 0 if s.cache is None else s.cache.ctypes.data, 0 if s.line is None else s.line.ctypes.data,
                                s.flags | (RESIDENT if s.flags & READ and self.resident(s.bo) else 0), s.bo.id) for s in self._segs]
        if len(self._tables) >= 16: self._tables.clear()
        self._tables[self._resident] = found = t[:len(self._segs)], t.ctypes.data, self._iovas.copy()
      return found

  @contextmanager
  def running(self) -> Iterator[np.ndarray]:
    """Holds the table and the memory behind it still while a dispatch runs."""
    with self._running:
      self._touched = True
      yield self.table()

  # *** lookup

  def find(self, addr: int) -> Segment | None:
    """The mapping that contains `addr`, resident or not."""
    with self._lock:
      i = bisect.bisect_right(self._iovas, addr) - 1
      return s if i >= 0 and addr < (s := self._segs[i]).iova + s.size else None

  def translate(self, addr: int, size: int, write: bool = False, source: str = "CP") -> Segment:
    """The resident mapping of `addr`. Raises MemoryFault. The access may run past its end: see _pieces."""
    if (s := self._last) is not None and s.iova <= addr < s.iova + s.size and s.flags & (WRITE if write else READ): return s
    with self._lock:                                    # _last must not come back after an unmap has cleared it
      if (s := self.find(addr)) is None: raise MemoryFault("unmapped", addr, size, write, source)
      if not self.resident(s.bo): raise MemoryFault("not_resident", addr, size, write, source)
      if not s.flags & READ: raise MemoryFault("privileged", addr, size, write, source)
      if write and not s.flags & WRITE: raise MemoryFault("readonly", addr, size, write, source)
      self._last = s
      return s

  def _pieces(self, addr: int, size: int, write: bool, source: str) -> Iterator[tuple[Segment, int, int]]:
    while size > 0:
      s = self.translate(addr, size, write, source)
      n = min(size, s.iova + s.size - addr)
      yield s, addr - s.iova, n
      addr, size = addr + n, size - n

  def explain(self, addr: int) -> str:
    """Names the BO at or nearest to `addr`, whether this submit lists it, and what was freed there."""
    with self._lock:
      if (s := self.find(addr)) is not None:
        state = "listed" if self.resident(s.bo) else "mapped, but NOT in this submit's buffer list"
        text = f"{addr - s.iova:#x} into {s.bo} [{s.iova:#x}, {s.iova + s.size:#x}), {state}" + ("" if s.flags & WRITE else ", read-only")
        return text + _history(s.bo)
      dead = next((f for f in reversed(self._freed) if f[0] <= addr < f[0] + f[1]), None)
      if dead is not None:
        iova, _, bo, when = dead
        return f"{addr - iova:#x} into {bo}, which was freed {1e3 * (time.monotonic() - when):.1f} ms ago" + _history(bo)
      i = bisect.bisect_right(self._iovas, addr)
      near = []
      if i > 0: near.append((addr - (s := self._segs[i - 1]).iova - s.size, "past the end of", s))
      if i < len(self._segs): near.append((self._segs[i].iova - addr, "before the start of", self._segs[i]))
      if not near: return "nothing is mapped in this address space"
      dist, how, s = min(near, key=lambda x: x[0])
      return f"{dist:#x} bytes {how} {s.bo} [{s.iova:#x}, {s.iova + s.size:#x})" + _history(s.bo)

  def neighbours(self, addr: int) -> tuple[str, str]:
    """The mappings below and above an address that has none, as KGSL prints them."""
    with self._lock:
      i = bisect.bisect_right(self._iovas, addr)
      def text(s: Segment) -> str:
        return f"[{s.iova:016X} - {s.iova + s.size - 1:016X}] {'+' if s.iova <= addr else ' '} (pid = {os.getpid()}) ({s.bo.name or 'any'})"
      return text(self._segs[i - 1]) if i else "*EMPTY*", text(self._segs[i]) if i < len(self._segs) else "*EMPTY*"

  # *** CP accesses: memory, not UCHE

  def read(self, addr: int, size: int, source: str = "CP") -> bytes:
    """`size` bytes of memory as the CP sees them. Raises MemoryFault."""
    s = self.translate(addr, size, False, source)
    if addr + size <= s.iova + s.size: return ctypes.string_at(s.ram + addr - s.iova, size)
    return b"".join(ctypes.string_at(s.ram + off, n) for s, off, n in self._pieces(addr, size, False, source))

  def write(self, addr: int, data: bytes, source: str = "CP") -> None:
    """Stores `data` to memory as the CP does: cached lines are not updated. Raises MemoryFault, then nothing was written."""
    done = 0
    for s, off, n in list(self._pieces(addr, len(data), True, source)):
      ctypes.memmove(s.ram + off, data[done:done + n], n)
      done += n

  # *** UCHE. Each operation walks the whole table in C, under the lock that keeps unmapped memory alive.

  def _uche(self, op: str, *args: int) -> int:
    with self._running:
      table, ptr, _ = self._snapshot()
      return getattr(_library(), op)(ptr, len(table), *args)

  def read_uche(self, addr: int, size: int, source: str = "UCHE") -> tuple[bytes, bool]:
    """`size` bytes as the shader core sees them (descriptor, constant and instruction fetch), and whether a line was stale. Raises MemoryFault."""
    if not self.uche: return self.read(addr, size, source), False
    pieces = list(self._pieces(addr, size, False, source))
    out, stale, done = ctypes.create_string_buffer(size), False, 0
    to, read = ctypes.addressof(out), _library().uche_read
    self._touched = True
    with self._running:
      _table, ptr, iovas = self._snapshot()
      for s, off, n in pieces:
        at = bisect.bisect_left(iovas, s.iova)
        if at == len(iovas) or iovas[at] != s.iova: raise MemoryFault("unmapped", s.iova + off, n, False, source)
        stale |= bool(read(ptr, at, off, n, to + done) & STALE)
        done += n
    return out.raw, stale

  def uche_flush(self) -> int:
    """CACHE_FLUSH_TS: writes dirty lines to memory, which stay valid. Returns the number of lines."""
    return self._uche("uche_flush") if self._touched else 0

  def uche_invalidate(self) -> None:
    """CACHE_INVALIDATE: forgets clean lines. Dirty ones stay (hardware keeps or writes them back, Mesa relies on it)."""
    if self._touched: self._touched = bool(self._uche("uche_invalidate"))

  def uche_reset(self) -> None:
    """A GPU reset: cached contents are lost, dirty ones too."""
    if self._touched: self._uche("uche_reset")
    self._touched = False

  def mark_stale(self) -> int:
    """Marks clean lines whose memory has changed since they were filled: a reader of such a line misses a CACHE_INVALIDATE. Returns their number."""
    return self._uche("uche_mark_stale") if self._touched else 0

  def uche_unsettle(self, first: bool) -> None:
    """Before each of several dispatches with no wait between them: what the one before it wrote must not be read by this one."""
    if self.uche: self._uche("uche_unsettle", first)

  def uche_settle(self) -> None:
    """After the last of them: everything written is dirty and may be read."""
    if self.uche: self._uche("uche_settle")

@functools.cache
def _library() -> ctypes.CDLL:
  """uche.c, compiled on first use and cached by content beside the shader core."""
  from .ir3.native import compile_c
  lib = ctypes.CDLL(str(compile_c(pathlib.Path(__file__).parent / "uche.c", ["-O3", "-shared", "-fPIC", "-fvisibility=hidden"])))
  types = {"p": ctypes.c_void_p, "I": ctypes.c_uint32, "Q": ctypes.c_uint64}
  for name, args, res in [("flush", "pI", "Q"), ("invalidate", "pI", "I"), ("mark_stale", "pI", "Q"), ("unsettle", "pII", ""), ("settle", "pI", ""),
                          ("reset", "pI", ""), ("read", "pIQQp", "I")]:
    fn = getattr(lib, f"uche_{name}")
    fn.argtypes, fn.restype = [types[a] for a in args], types.get(res)
  return lib

def _history(bo: BoInfo) -> str:
  return "".join(f"\n    {line}" for line in bo.history + ([f"last listed by {bo.listed}"] if bo.listed else []))
