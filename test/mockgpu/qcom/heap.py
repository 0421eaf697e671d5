"""/dev/dma_heap/system: a foreign dma-buf exporter, for clients that import buffers of a camera, a decoder or another GPU driver.

Its buffers are cached, as on a phone: what the CPU writes reaches devices with DMA_BUF_IOCTL_SYNC only, or when a device maps the buffer
(drivers/dma-buf/heaps/system_heap.c). Memory that GPU drivers export is write-combined and needs none.
"""
from __future__ import annotations
import errno, mmap, os, types
from typing import Any
from test.mockgpu.qcom.kernel import MAP_SHARED, PAGE, CpuCache, Layout, Model, Shmem, error, libc, real_mmap

# struct dma_heap_allocation_data and DMA_HEAP_IOCTL_ALLOC of linux/dma-heap.h
_DATA = Layout("dma_heap_allocation_data", 24, {"len": [0, 8], "fd": [8, 4], "fd_flags": [12, 4], "heap_flags": [16, 8]})
_ABI: Any = types.SimpleNamespace(ioctls={"DMA_HEAP_IOCTL_ALLOC": 0xc0184800}, layout=lambda name: _DATA)

READ, WRITE, END = 1, 2, 4                              # DMA_BUF_SYNC_*, linux/dma-buf.h

class CachedBuffer(Shmem):
  """Memory whose descriptors give cached CPU mappings. Devices see `ram`."""
  def __init__(self, size: int):
    super().__init__(size, "dma-heap", ram_fd=os.memfd_create("dma-heap-ram", os.MFD_CLOEXEC))
    assert self.ram_fd is not None
    os.ftruncate(self.ram_fd, size)
    self._cpu, self._seen = (real_mmap(0, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd) for flags, fd in ((MAP_SHARED, self.fd), (0x22, -1)))
    self.cache = CpuCache(self._cpu, self.ram, self._seen, size)

  def to_devices(self) -> None: self.cache.maintain(0, self.size, clean=True)
  def release(self) -> None:
    for addr in (self._cpu, self._seen): libc.munmap(addr, self.size)
    super().release()

class DmaHeap(Model):
  prefix, unknown, abi, type_byte = ("DMA_HEAP_IOCTL_",), errno.ENOTTY, _ABI, ord("H")
  table = {"ALLOC": "dma_heap_allocation_data"}

  def __init__(self, machine: Any):
    super().__init__(machine)
    self._buffers: list[Shmem] = []

  def reap(self) -> int:
    """Drops buffers without descriptors or imports; returns how many are left."""
    for mem in [m for m in self._buffers if not m.exported_fds()]:
      self._buffers.remove(mem)
      self.machine.bury(mem)
    return len(self._buffers)

  def open(self) -> None: return None
  def release(self, client: None) -> None: pass
  def mmap(self, client: None, *args: int) -> int: raise error(errno.ENODEV, "a dma-heap node cannot be mapped")

  def sync(self, fd: int, flags: int) -> None:
    """DMA_BUF_IOCTL_SYNC of any dma-buf. The start of a read drops the CPU's lines, also dirty ones; the end of a write cleans them."""
    try: mem = self.machine.dmabuf_of(fd)
    except OSError as e: raise error(errno.ENOTTY if e.errno == errno.EINVAL else e.errno or 0, f"descriptor {fd} is not a dma-buf") from None
    if flags & ~(READ | WRITE | END) or not flags & (READ | WRITE): raise error(errno.EINVAL, f"flags {flags:#x}")
    self.calls["SYNC"] += 1
    if not isinstance(mem, CachedBuffer): return
    if flags & END and flags & WRITE: mem.to_devices()
    if not flags & END and flags & READ: mem.cache.maintain(0, mem.size, invalidate=True)

  def alloc(self, client: None, a: Any) -> None:
    """Zeroed memory behind a new dma-buf descriptor; it lives until the last descriptor and import are gone."""
    if a.fd or a.heap_flags or a.fd_flags & ~(os.O_CLOEXEC | os.O_ACCMODE):
      raise error(errno.EINVAL, f"fd {a.fd}, flags {a.fd_flags:#x}, {a.heap_flags:#x}")
    if not a.len: raise error(errno.EINVAL, "len 0")
    self.reap()
    mem = CachedBuffer(-(-a.len // PAGE) * PAGE)
    a.fd = os.dup(mem.fd)
    os.set_inheritable(a.fd, not a.fd_flags & os.O_CLOEXEC)
    self.machine.export(mem)
    self._buffers.append(mem)
