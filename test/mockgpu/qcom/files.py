"""Device nodes as files: open, ioctl, mmap, munmap, close, and the C function pointer that a compiled submitter calls.

Every virtual file owns a real descriptor (an empty memfd), so its number is unique in the process and dup/fork/limits behave. CPU mappings are
real mappings of the BOs' memfds; they are recorded here, because they keep a BO alive after its handle is closed.
"""
from __future__ import annotations
import bisect, ctypes, errno, mmap, os, sys, threading, traceback, weakref
from typing import Any, NamedTuple
from test.mockgpu.qcom.collector import outside_python
from test.mockgpu.qcom.kernel import MAP_FIXED, MAP_FIXED_NOREPLACE, PAGE, error, libc, real_mmap

class Vma(NamedTuple):
  """One CPU mapping, [start, end). `base` is where the owner's first byte is or would be: a split leaves it alone."""
  start: int
  end: int
  owner: Any
  base: int

class Vmas:
  """CPU mappings of BOs; an owner's `vmas` counts its own. A partial munmap trims or splits, as in a kernel."""
  def __init__(self) -> None: self._starts, self._maps, self._lock = list[int](), list[Vma](), threading.RLock()

  def add(self, start: int, size: int, owner: Any, base: int) -> None:
    with self._lock:
      i = bisect.bisect(self._starts, start)
      self._starts.insert(i, start)
      self._maps.insert(i, Vma(start, start + size, owner, base))
      owner.vmas += 1

  def find(self, addr: int, size: int = 1) -> list[Vma]:
    out = []
    with self._lock:
      for m in self._maps[max(0, bisect.bisect(self._starts, addr) - 1):]:
        if m.start >= addr + size: break
        if m.end > addr: out.append(m)
    return out

  def punch(self, addr: int, size: int) -> list[Any]:
    """Forgets [addr, addr+size); returns owners that lost their last mapping."""
    dead = []
    with self._lock:
      for start, end, owner, base in self.find(addr, size):
        i = bisect.bisect_left(self._starts, start)
        del self._starts[i], self._maps[i]
        for a, b in ((start, addr), (addr + size, end)):
          if a < b: self.add(a, b - a, owner, base)
        owner.vmas -= 1
        if not owner.vmas: dead.append(owner)
    return dead

  def of(self, machine: Any, kind: type) -> list[Vma]:
    """The mappings of one machine's BOs of class `kind`."""
    with self._lock: return [m for m in self._maps if type(m.owner) is kind and m.owner.machine is machine]

_files: weakref.WeakValueDictionary[int, VirtualFile] = weakref.WeakValueDictionary()      # by descriptor
vmas = Vmas()                                           # of this process, whichever machine the BOs belong to

class VirtualFile:
  """An open virtual device node. `client` is the kernel model's per-open state."""
  def __init__(self, path: str, model: Any):
    self.path, self.model, self.fd = path, model, os.memfd_create(path.rpartition("/")[2], os.MFD_CLOEXEC)
    try: self.client = model.open()
    except BaseException:
      os.close(self.fd)
      self.fd = -1
      raise
    _files[self.fd] = self

  def ioctl(self, request: int, arg: Any = 0) -> int:
    """Like fcntl.ioctl: `arg` is a ctypes object, a writable buffer or an address. Returns 0 or raises OSError with the kernel's errno; in a
    forked child RuntimeError; from a wait, the strictness report kept for this file."""
    if self.fd < 0: raise error(errno.EBADF, f"{self.path} is closed")
    return self.model.ioctl(self.client, request & 0xffffffff, arg)

  def mmap(self, start: int, size: int, prot: int, flags: int, offset: int) -> int:
    """Maps a BO (`offset` chooses it) into the process and returns the address. Raises OSError."""
    if self.fd < 0: raise error(errno.EBADF, f"{self.path} is closed")
    if size <= 0 or offset % PAGE or (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) and start % PAGE):
      raise error(errno.EINVAL, f"mmap of {size} bytes at {start:#x}, offset {offset:#x}: empty or unaligned")
    model = self.model
    model.count("mmap")
    with outside_python, model.lock: return model.mmap(self.client, start, -(-size // PAGE) * PAGE, prot, flags, offset)

  def close(self) -> None:
    """Releases what this open of the node holds. Idempotent. CPU mappings stay valid."""
    if self.fd < 0: return
    _files.pop(self.fd, None)
    os.close(self.fd)
    self.fd = -1
    if not self.model.machine.forked:
      with outside_python, self.model.lock: self.model.release(self.client)

  def __enter__(self) -> VirtualFile: return self
  def __exit__(self, *exc: object) -> None: self.close()
  def __del__(self) -> None:
    if getattr(self, "fd", -1) >= 0 and not sys.is_finalizing(): self.close()

def munmap(addr: int, size: int) -> int:
  """Unmaps [addr, addr+size) like munmap(2): 0, or -1 with ctypes.get_errno(). Mappings of BOs must be released through here to be counted."""
  if (ret:=libc.munmap(addr, size)) == 0:
    with outside_python:
      for owner in vmas.punch(addr, -(-size // PAGE) * PAGE): owner.unmapped()
  return ret

def map_shared(owner: Any, fd: int, start: int, size: int, prot: int, flags: int) -> int:
  """mmap of `size` bytes of a BO's memory, recorded for `owner`."""
  if flags & 3 != 1 and prot & mmap.PROT_WRITE: raise error(errno.EINVAL, "a private writable mapping of device memory")
  addr = real_mmap(start, size, prot, flags, fd)
  for dead in vmas.punch(addr, size): dead.unmapped()   # MAP_FIXED over an older mapping
  vmas.add(addr, size, owner, addr)
  return addr

# *** the C entry point

def _c_ioctl(fd: int, request: int, arg: int | None) -> int:
  file = _files.get(fd)
  if file is None:
    ret = libc.ioctl(fd, ctypes.c_ulong(request), ctypes.c_void_p(arg))
    return ret
  try:
    file.ioctl(request, arg or 0)
    ctypes.set_errno(0)
    return 0
  except OSError as e: code = e.errno or errno.EIO
  except BaseException as e:                            # C cannot raise; the next wait from Python does
    if hasattr(file.client, "reports"): file.client.reports.append(e)
    code = errno.EINTR if isinstance(e, KeyboardInterrupt) else errno.EIO
    if code == errno.EIO: traceback.print_exc()
  ctypes.set_errno(code)
  return -1

_C_IOCTL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, use_errno=True)(_c_ioctl)

def ioctl_pointer() -> int:
  """Address of `int ioctl(int fd, unsigned long request, void *arg)`: -1 and errno on failure; descriptors that are not virtual go to libc."""
  addr = ctypes.cast(_C_IOCTL, ctypes.c_void_p).value
  assert addr is not None
  return addr

# *** drop-in for tinygrad's FileIOInterface

class MockFileIOInterface:
  """The method surface of tinygrad's FileIOInterface; paths the virtual machine knows are virtual, all others real."""
  def __init__(self, path: str = "", flags: int = os.O_RDONLY, fd: int | None = None):
    from test.mockgpu.qcom import listed, open_node, sysfs
    self.path, self._node, self._text = path, None, None
    if fd: self.fd = fd
    elif any(f.startswith(path.rstrip("/") + "/") for f in listed()): self.fd = os.memfd_create("folder", os.MFD_CLOEXEC)
    elif (text:=sysfs(path)) is not None: self._text, self.fd = text, os.memfd_create("sysfs", os.MFD_CLOEXEC)
    elif self.is_virtual(path):
      self._node = open_node(path, flags)
      self.fd = self._node.fd
    else: self.fd = os.open(path, flags)

  @staticmethod
  def is_virtual(path: str) -> bool:
    from test.mockgpu.qcom import nodes
    return path in nodes()

  def close(self) -> None:
    node, self._node = self._node, None
    fd, self.fd = getattr(self, "fd", -1), -1
    if node is not None: node.close()
    elif fd >= 0: os.close(fd)
  def __del__(self) -> None:
    if not sys.is_finalizing(): self.close()

  def ioctl(self, request: int, arg: Any) -> int:
    if self._node is not None: return self._node.ioctl(request, arg)
    import fcntl
    return fcntl.ioctl(self.fd, request, arg)
  def mmap(self, start: int, sz: int, prot: int, flags: int, offset: int) -> int:
    return self._node.mmap(start, sz, prot, flags, offset) if self._node is not None else self._mmap(start, sz, prot, flags, self.fd, offset)
  def read(self, size: int | None = None, binary: bool = False, offset: int | None = None) -> Any:
    if self._text is not None:
      text = self._text.get()[offset or 0:][:size]
      return text.encode() if binary else text
    if offset is not None: self.seek(offset)
    with open(self.fd, "rb" if binary else "r", closefd=False) as file: return file.read(size)
  def write(self, content: Any, binary: bool = False, offset: int | None = None) -> None:
    if self._text is not None: return self._text.set(content.decode() if binary else content)
    if offset is not None: self.seek(offset)
    with open(self.fd, "wb" if binary else "w", closefd=False) as file: file.write(content)
  def listdir(self) -> list[str]: return listdir(self.path)
  def seek(self, offset: int) -> None: os.lseek(self.fd, offset, os.SEEK_SET)
  @staticmethod
  def _mmap(start: int, sz: int, prot: int, flags: int, fd: int, offset: int) -> int: return real_mmap(start, sz, prot, flags, fd, offset)
  @staticmethod
  def anon_mmap(start: int, sz: int, prot: int, flags: int, offset: int) -> int: return real_mmap(start, sz, prot, flags, -1, offset)
  @staticmethod
  def munmap(buf: int, sz: int) -> int: return munmap(buf, sz)
  @staticmethod
  def exists(path: str) -> bool: return exists(path)
  @staticmethod
  def readlink(path: str) -> str: return os.readlink(path)
  @staticmethod
  def eventfd(initval: int, flags: int | None = None) -> MockFileIOInterface: return MockFileIOInterface(fd=os.eventfd(initval, flags or 0))

def exists(path: str) -> bool:
  from test.mockgpu.qcom import listed, sysfs
  return path in listed() or sysfs(path) is not None or any(n.startswith(path.rstrip("/") + "/") for n in listed()) or os.path.exists(path)

def listdir(path: str) -> list[str]:
  """Entries of a directory, virtual and real."""
  from test.mockgpu.qcom import listed
  base = path.rstrip("/") + "/"
  virtual = {n[len(base):].split("/")[0] for n in listed() if n.startswith(base)}
  try: real = set(os.listdir(path))
  except OSError:
    if not virtual: raise
    real = set()
  return sorted(virtual | real)
