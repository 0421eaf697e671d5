"""A kernel that only remembers: raw ioctl bytes in, plausible answers out. No GPU, nothing runs.

Written from the rules of the MSM DRM UAPI (struct layouts below are byte offsets of drm.h and msm_drm.h), not from the bindings under test. GPU
addresses start at 0x5A_0000_0000 and are unlike any CPU address, so that a 64-bit value that lies in that range is an address and nothing else.
The only thing done to memory at a submit is what a finished one leaves for the CPU: the value of the last CACHE_FLUSH_TS of each IB.
"""
from __future__ import annotations
import ctypes, errno, itertools, mmap, os, struct
from typing import Any, NamedTuple

IOVA = 0x5A << 32
NODE = "/dev/dri/renderD128"
GET_PARAM, GEM_NEW, GEM_INFO, SUBMIT, WAIT_FENCE, QUEUE_NEW, QUEUE_CLOSE, QUEUE_QUERY = 0x40, 0x42, 0x43, 0x46, 0x47, 0x4a, 0x4b, 0x4c
VERSION, GEM_CLOSE = 0x00, 0x09
EV_CACHE_FLUSH_TS, EV_CACHE_INVALIDATE, EV_LABEL = 4, 49, 63

class BO(NamedTuple):
  handle: int
  iova: int
  size: int
  mem: mmap.mmap
  cpu: int

class Submit(NamedTuple):
  """One GEM_SUBMIT: flags of the submit, (flags, handle) of the list, the one command, and the bytes of its IB and of the whole memory then."""
  flags: int
  bos: list[tuple[int, int]]
  cmd: tuple[int, int, int, int]      # type, submit_idx, submit_offset, size
  ib: bytes
  memory: dict[int, bytes]            # handle -> contents, of the BOs listed
  raw: bytes

class FakeKernel:
  def __init__(self) -> None:
    self.bos: dict[int, BO] = {}
    self.by_offset: dict[int, BO] = {}
    self.by_cpu: dict[int, BO] = {}
    self.submits: list[Submit] = []
    self.calls: list[int] = []
    self.fail: dict[int, list[int]] = {}   # ioctl nr -> errnos of the next calls
    self.next_iova, self.fence, self.faults, self.hang = IOVA, 0, 0, False # hang: submits are killed, their fences signal all the same
    self.open_files, self.closed = 0, 0
    self._ids = itertools.count(1)

  def at(self, addr: int) -> BO | None: return next((b for b in self.bos.values() if b.iova <= addr < b.iova + b.size), None)

  def ioctl(self, request: int, arg: int) -> None:
    nr, size = request & 0xff, request >> 16 & 0x3fff
    assert request >> 8 & 0xff == ord("d")
    self.calls.append(nr)
    if self.fail.get(nr): raise OSError(e:=self.fail[nr].pop(0), os.strerror(e))
    data = bytearray(ctypes.string_at(arg, size))
    def u32(off: int) -> int: return struct.unpack_from("<I", data, off)[0]
    def u64(off: int) -> int: return struct.unpack_from("<Q", data, off)[0]
    if nr == VERSION:                                                    # version 0,4,8; name_len 16; name 24
      if u64(24): ctypes.memmove(u64(24), b"msm", 3)
      struct.pack_into("<Q", data, 16, 3)
    elif nr == GET_PARAM:                                                # pipe 0, param 4, value 8
      assert u32(0) == 0x10, "the 3D pipe"
      struct.pack_into("<Q", data, 8, {3: 0x06030002, 7: 3}[u32(4)])     # CHIP_ID, PRIORITIES
    elif nr == QUEUE_NEW: struct.pack_into("<I", data, 8, 5)             # flags 0, prio 4, id 8
    elif nr == QUEUE_QUERY: ctypes.memmove(u64(0), struct.pack("<I", self.faults), u32(16)) # data 0, id 8, param 12, len 16
    elif nr == GEM_NEW:                                                  # size 0, flags 8, handle 12
      assert u32(8) & 0xf0000, "flags must name one cache mode"
      self._new(data, u64(0))
    elif nr == GEM_INFO:                                                 # handle 0, info 4, value 8
      b = self.bos[u32(0)]
      struct.pack_into("<Q", data, 8, {0: b.handle << 12, 1: b.iova}[u32(4)])
    elif nr == GEM_CLOSE:
      b = self.bos.pop(u32(0))
      del self.by_offset[b.handle << 12]
    elif nr == SUBMIT: self._submit(data, u32, u64)
    elif nr in (WAIT_FENCE, QUEUE_CLOSE): pass
    else: raise AssertionError(f"ioctl {nr:#x} is not for this client")
    ctypes.memmove(arg, bytes(data), size)

  def _new(self, data: bytearray, size: int) -> None:
    h = next(self._ids)
    mem = mmap.mmap(-1, size)
    b = BO(h, self.next_iova, size, mem, ctypes.addressof(ctypes.c_char.from_buffer(mem)))
    self.next_iova += size + (3 << 12)                                   # a gap: an overrun hits nothing
    self.bos[h] = self.by_offset[h << 12] = b
    struct.pack_into("<I", data, 12, h)

  def _submit(self, data: bytearray, u32: Any, u64: Any) -> None:
    # flags 0, fence 4, nr_bos 8, nr_cmds 12, bos 16, cmds 24, fence_fd 32, queueid 36
    bos = [struct.unpack("<II", ctypes.string_at(u64(16) + 16 * i, 8)) for i in range(u32(8))]
    assert u32(12) == 1 and u32(36) == 5
    typ, idx, offset, size = struct.unpack("<4I", ctypes.string_at(u64(24), 16))
    ib = self.bos[bos[idx][1]]
    assert offset + size <= ib.size, "a kernel refuses this"
    code = ctypes.string_at(ib.cpu + offset, size)
    self.submits.append(Submit(u32(0), bos, (typ, idx, offset, size), code,
                               {h: ctypes.string_at(self.bos[h].cpu, self.bos[h].size) for _, h in bos}, bytes(data)))
    self.faults += self.hang
    for p in packets(code) if not self.hang else ():
      if p.opcode == 0x46 and len(p.args) == 4 and p.args[0] & 0xff == EV_CACHE_FLUSH_TS:
        addr = p.args[1] | p.args[2] << 32
        b = self.at(addr)
        assert b is not None
        ctypes.memmove(b.cpu + addr - b.iova, struct.pack("<I", p.args[3]), 4)
    self.fence += 1
    struct.pack_into("<I", data, 4, self.fence)

# *** reading a stream, from the packet formats and register offsets of the register database

class Packet(NamedTuple):
  opcode: int | None                  # None: writes registers from `reg`
  reg: int
  args: tuple[int, ...]

def odd(*values: int) -> bool: return sum(v.bit_count() for v in values) % 2 == 1

def packets(code: bytes) -> list[Packet]:
  """The packets of an IB. AssertionError at a header that hardware would refuse."""
  words, out, i = struct.unpack(f"<{len(code) // 4}I", code), [], 0
  while i < len(words):
    w = words[i]
    if w >> 28 == 4:
      reg, n = w >> 8 & 0x3ffff, w & 0x7f
      assert odd(reg, w >> 27 & 1) and odd(n, w >> 7 & 1), f"parity of {w:#x} at dword {i}"
      out.append(Packet(None, reg, words[i+1:i+1+n]))
    else:
      assert w >> 28 == 7, f"{w:#x} at dword {i} is no packet header"
      op, n = w >> 16 & 0x7f, w & 0x3fff
      assert w >> 24 & 0xf == 0 and w >> 14 & 1 == 0 and odd(op, w >> 23 & 1) and odd(n, w >> 15 & 1), f"header {w:#x} at dword {i}"
      out.append(Packet(op, 0, words[i+1:i+1+n]))
    assert len(out[-1].args) == n, f"the packet at dword {i} goes past the end of the IB"
    i += 1 + n
  return out

def registers(ps: list[Packet]) -> dict[int, int]:
  """Last value written to each register."""
  return {p.reg + i: v for p in ps if p.opcode is None for i, v in enumerate(p.args)}

def addresses(data: bytes) -> set[int]:
  """Every GPU address in `data`, at any dword."""
  words = struct.unpack(f"<{len(data) // 4}I", data[:len(data) // 4 * 4])
  return {lo | hi << 32 for lo, hi in zip(words, words[1:]) if IOVA >> 32 <= hi < (IOVA >> 32) + 4}

def arguments(s: Submit, kernel: FakeKernel) -> list[bytes]:
  """Constants and descriptors that the submit's LOAD_STATE6 packets fetch: what shaders take their addresses from."""
  unit = {(13, 1): 16, (13, 3): 64, (5, 0): 16, (5, 1): 64}
  out = []
  for p in packets(s.ib):
    if p.opcode != 0x34: continue
    d0, addr = p.args[0], p.args[1] | p.args[2] << 32
    if (n:=unit.get((d0 >> 18 & 0xf, d0 >> 14 & 3))) is None: continue
    b = kernel.at(addr)
    assert b is not None and b.handle in s.memory, f"arguments at {addr:#x} are in no listed BO"
    out.append(s.memory[b.handle][addr - b.iova:][:n * (d0 >> 22)])
    assert len(out[-1]) == n * (d0 >> 22), "arguments go past the end of their BO"
  return out

def needed(s: Submit, kernel: FakeKernel) -> set[int]:
  """Handles of all BOs that the stream or the arguments of the submit point into, and of the IB itself. Every address must be in a BO."""
  out = {s.bos[s.cmd[1]][1]}
  for a in addresses(s.ib).union(*map(addresses, arguments(s, kernel))):
    b = kernel.at(a)
    assert b is not None, f"{a:#x} points nowhere"
    out.add(b.handle)
  return out

# *** the file that the interface opens

def fake_iface(kernel: FakeKernel) -> type:
  """MSMIface on `kernel`."""
  from tinygrad.runtime.support.hcq import FileIOInterface
  from tinygrad.runtime.support.qcom_iface import MSMIface
  files: dict[int, Any] = {}

  class File(FileIOInterface):
    def __init__(self, path: str, flags: int = 0, fd: int | None = None):
      if path != NODE: raise FileNotFoundError(errno.ENOENT, "not here", path)
      self.path, self.fd = path, os.memfd_create("fake-node")
      files[self.fd] = self
      kernel.open_files += 1
    def __del__(self) -> None:
      if hasattr(self, "fd"):
        files.pop(self.fd)
        os.close(self.fd)
        kernel.open_files -= 1
    def ioctl(self, request: int, arg: Any) -> int: return kernel.ioctl(request, ctypes.addressof(arg)) or 0
    def mmap(self, start: int, sz: int, prot: int, flags: int, offset: int) -> int:
      kernel.by_cpu[kernel.by_offset[offset].cpu] = kernel.by_offset[offset]
      return kernel.by_offset[offset].cpu
    @staticmethod
    def munmap(buf: int, sz: int) -> int: return 0 if kernel.by_cpu.pop(buf).size == sz else -1
    @staticmethod
    def exists(path: str) -> bool: return path == NODE

  def entry(fd: int, request: int, arg: int) -> int:
    try: kernel.ioctl(request & 0xffffffff, arg)
    except OSError as e:
      ctypes.set_errno(e.errno or errno.EIO)
      return -1
    ctypes.set_errno(0)
    return 0
  pointer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, use_errno=True)(entry)

  class FakeIface(MSMIface):
    io = File
    keep = pointer
    def io_pointer(self) -> int:
      addr = ctypes.cast(pointer, ctypes.c_void_p).value
      assert addr is not None
      return addr
  return FakeIface
