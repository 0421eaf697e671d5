"""/dev/dma_heap/system: a foreign dma-buf exporter, for clients that import buffers of a camera, a decoder or another GPU driver."""
from __future__ import annotations
import errno, os, types
from typing import Any
from test.mockgpu.qcom.kernel import PAGE, Layout, Model, Shmem, error

# struct dma_heap_allocation_data and DMA_HEAP_IOCTL_ALLOC of linux/dma-heap.h
_DATA = Layout("dma_heap_allocation_data", 24, {"len": [0, 8], "fd": [8, 4], "fd_flags": [12, 4], "heap_flags": [16, 8]})
_ABI: Any = types.SimpleNamespace(ioctls={"DMA_HEAP_IOCTL_ALLOC": 0xc0184800}, layout=lambda name: _DATA)

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

  def alloc(self, client: None, a: Any) -> None:
    """Zeroed memory behind a new dma-buf descriptor; it lives until the last descriptor and import are gone."""
    if a.fd or a.heap_flags or a.fd_flags & ~(os.O_CLOEXEC | os.O_ACCMODE):
      raise error(errno.EINVAL, f"fd {a.fd}, flags {a.fd_flags:#x}, {a.heap_flags:#x}")
    if not a.len: raise error(errno.EINVAL, "len 0")
    self.reap()
    mem = Shmem(-(-a.len // PAGE) * PAGE, "dma-heap")
    a.fd = os.dup(mem.fd)
    os.set_inheritable(a.fd, not a.fd_flags & os.O_CLOEXEC)
    self.machine.export(mem)
    self._buffers.append(mem)
