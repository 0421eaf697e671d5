"""Model of downstream KGSL (msm-4.9 of SDM845) for one Adreno 630.

Memory and the pagetable belong to the process, contexts to the file. Everything allocated is visible to the GPU; a buffer with USE_CPU_MAP gets its
GPU address from mmap, equal to the CPU's. Rules follow drivers/gpu/msm of that tree (kgsl.c, kgsl_iommu.c, kgsl_drawobj.c, adreno_dispatch.c,
adreno_drawctxt.c, adreno.c). Not modelled: sparse memory, perf counters, sync sources, secure memory, SUBMIT_COMMANDS and older submit calls.
"""
from __future__ import annotations
import collections, errno, functools, os, struct
from collections.abc import Callable
from typing import Any, NamedTuple
from test.mockgpu.qcom.collector import outside_python
from test.mockgpu.qcom.files import map_shared, vmas
from test.mockgpu.qcom.gpu import Job
from test.mockgpu.qcom.kernel import (ENOTSUPP, MAP_FIXED, MAP_FIXED_NOREPLACE, PAGE, Abi, CpuCache, Entity, Fence, Ids, Model, Ranges,
                                      Shmem, copy_from_user, copy_to_user, error, libc, process, real_mmap,
                                      whence)
from test.mockgpu.qcom.memory import BoInfo
from test.mockgpu.qcom.report import hang_line

ABI = Abi("kgsl.json")
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
CMD, SYNC, DEVINFO, VERSION = (ABI.layout(f"kgsl_{n}") for n in ("command_object", "command_syncpoint", "devinfo", "version"))
SVM_BASE, VA_BASE = 0x700000000, 0x500000000            # kgsl_iommu.h (4.9): USE_CPU_MAP buffers, and all others
MAX_IBS, MAX_SYNCPOINTS, MAX_SYNC_OBJS = 100000, 32, 128
MAX_CONTEXTS = 197                                      # memstore slots: 8 KiB / 40 bytes, less the global and per-ring ones
CONTEXT_QUEUE, INFLIGHT = 50, 15                        # adreno_dispatch.c: entries a context may queue, commands in the ringbuffer
FAULT_LIMIT, FAULT_WINDOW_NS = 3, 3_000_000_000
MARKER, SYNC_ONLY, MEMOBJ = ABI.KGSL_CMDBATCH_MARKER, ABI.KGSL_CMDBATCH_SYNC, ABI.KGSL_OBJLIST_MEMOBJ
NO_FAULT_TOLERANCE, USER_TS = ABI.KGSL_CONTEXT_NO_FAULT_TOLERANCE, ABI.KGSL_CONTEXT_USER_GENERATED_TS
CONTEXT_FLAGS = (ABI.KGSL_CONTEXT_PREAMBLE | ABI.KGSL_CONTEXT_NO_GMEM_ALLOC | ABI.KGSL_CONTEXT_PER_CONTEXT_TS | USER_TS | NO_FAULT_TOLERANCE
                 | ABI.KGSL_CONTEXT_INVALIDATE_ON_FAULT | ABI.KGSL_CONTEXT_CTX_SWITCH | ABI.KGSL_CONTEXT_PRIORITY_MASK | ABI.KGSL_CONTEXT_TYPE_MASK
                 | ABI.KGSL_CONTEXT_PWR_CONSTRAINT | ABI.KGSL_CONTEXT_IFH_NOP | ABI.KGSL_CONTEXT_PREEMPT_STYLE_MASK | ABI.KGSL_CONTEXT_NO_SNAPSHOT)
MEM_FLAGS = (ABI.KGSL_MEMFLAGS_GPUREADONLY | ABI.KGSL_CACHEMODE_MASK | ABI.KGSL_MEMTYPE_MASK | ABI.KGSL_MEMALIGN_MASK | ABI.KGSL_MEMFLAGS_USE_CPU_MAP
             | ABI.KGSL_MEMFLAGS_SECURE | ABI.KGSL_MEMFLAGS_FORCE_32BIT | ABI.KGSL_MEMFLAGS_IOCOHERENT)

def after(a: int, b: int) -> bool:
  """Timestamp a is later than b, wrap-aware."""
  return 0 < (a - b) & 0xffffffff < 1 << 31

class Entry:
  """A kgsl_mem_entry. `vmas` counts its CPU mappings; object, PTEs and id go when it is freed and unmapped."""
  def __init__(self, model: KGSL, id: int, size: int, flags: int, mem: Shmem | None, name: str):
    self.model, self.machine, self.id, self.size, self.flags, self.mem = model, model.machine, id, size, flags, mem
    self.gpuaddr = self.useraddr = self.vmas = 0
    self.mapped = self.freed = False
    self.host: HostPages | None = None
    self.info = BoInfo(name, id, size)

  @property
  def cpu_map(self) -> bool: return bool(self.flags & ABI.KGSL_MEMFLAGS_USE_CPU_MAP)
  def unmapped(self) -> None:
    with self.model.lock: self.model.put(self)

class HostPages:
  """User pages that are mapped for the GPU: it reads and writes `ram`. Goes when the GPU is done with it, like the memory of a BO."""
  def __init__(self, addr: int, size: int, fds: list[int]):
    self.addr, self.size, self.fds = addr, size, fds
    self.ram, self.seen = (real_mmap(0, size, 3, 1, fd, addr) for fd in fds)
    self.cache = CpuCache(addr, self.ram, self.seen, size)
  def key(self) -> tuple[int, int]: return -1, self.addr
  def release(self) -> None:
    for addr in (self.ram, self.seen): libc.munmap(addr, self.size)
    for fd in self.fds: os.close(fd)

class HostMemory:
  """User memory as the GPU has it, which does not snoop the CPU's caches: a second copy that cache maintenance brings up to date, in a sparse file
  with the pages' addresses as offsets, so that overlapping mappings are one memory. At first the CPU's copy is dirty."""
  def __init__(self) -> None: self.fds, self.maps = list[int](), list[HostPages]()

  def map(self, addr: int, size: int) -> HostPages:
    if not self.fds:
      self.fds = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("host-ram", "host-seen")]
      for fd in self.fds: os.ftruncate(fd, 1 << 48)
    self.maps.append(pages:=HostPages(addr, size, [os.dup(fd) for fd in self.fds]))
    return pages

  def unmap(self, pages: HostPages) -> None:
    self.maps.remove(pages)
    while self.fds and not self.maps: os.close(self.fds.pop())

  def maintain(self, op: str, addr: int, size: int) -> None:
    for p in self.maps:
      lo, hi = max(addr, p.addr), min(addr + size, p.addr + p.size)
      if lo < hi: p.cache.maintain(lo - p.addr, hi - lo, op != "invalidate", op != "clean")

class Context:
  def __init__(self, id: int, client: Client, flags: int, entity: Entity):
    self.id, self.client, self.flags, self.entity = id, client, flags, entity
    self.priority = (flags & ABI.KGSL_CONTEXT_PRIORITY_MASK) >> ABI.KGSL_CONTEXT_PRIORITY_SHIFT
    self.queued = self.started = self.retired = 0
    self.invalid = self.detached = self.faulted = False
    self.reset_status = ABI.KGSL_CTX_STAT_NO_ERROR
    self.pending: dict[int, Fence] = {}
    self.syncs: list[tuple[int, Fence]] = []            # fences of timestamps, also future ones
    self.waits: list[Fence] = []                        # sync-only commands hold back what follows
    self.faults: collections.deque[int] = collections.deque(maxlen=FAULT_LIMIT + 1)
    self.pwrlevel: int | None = None

class Client:
  """One open of the node."""
  def __init__(self, model: KGSL):
    self.model, self.contexts, self.reports = model, dict[int, Context](), list[BaseException]()

class CommandRecord(NamedTuple):
  """One accepted GPU_COMMAND, for tests. ibs: (gpuaddr, dwords)."""
  context: int
  timestamp: int
  flags: int
  ibs: list[tuple[int, int]]

class KGSL(Model):
  prefix, unknown, abi, type_byte, copy_back_on_error = ("IOCTL_KGSL_",), errno.ENOTTY, ABI, ABI.KGSL_IOC_TYPE, False
  table = {n: f"kgsl_{n.lower()}" for n in ("DEVICE_GETPROPERTY", "DEVICE_WAITTIMESTAMP_CTXTID", "DRAWCTXT_CREATE", "DRAWCTXT_DESTROY",
    "MAP_USER_MEM", "CMDSTREAM_READTIMESTAMP_CTXTID", "SHAREDMEM_FREE", "TIMESTAMP_EVENT", "GPUMEM_ALLOC_ID", "GPUMEM_FREE_ID", "GPUMEM_GET_INFO",
    "GPUMEM_SYNC_CACHE", "GPUOBJ_ALLOC", "GPUOBJ_FREE", "GPUOBJ_INFO", "GPUOBJ_IMPORT", "GPUOBJ_SYNC", "GPU_COMMAND", "GPUOBJ_SET_INFO")}
  table["SETPROPERTY"] = "kgsl_device_getproperty"

  def __init__(self, machine: Any):
    super().__init__(machine)
    size = machine.config.kgsl_va_size
    self.svm, self.va = Ranges(SVM_BASE, size), Ranges(VA_BASE, size)
    self.entries: dict[int, Entry] = {}
    self.ids, self.context_ids = Ids(), Ids(1, MAX_CONTEXTS + 1)
    self.contexts: dict[int, Context] = {}
    self.clients: dict[Client, None] = {}
    self.commands: collections.deque[CommandRecord] = collections.deque(maxlen=4096)
    self._space: Any = None
    self.retired = 0                                    # jobs
    self.host = HostMemory()

  @property
  def space(self) -> Any:
    """The pagetable of this process."""
    if self._space is None: self._space = self.machine.gpu.new_space("kgsl")
    return self._space

  def attributes(self) -> dict[str, str]:
    """Content of the sysfs files below /sys/class/kgsl/kgsl-3d0."""
    return {"gpu_model": "Adreno630v2", "idle_timer": "80", "gpuclk": "710000000", "max_gpuclk": "710000000", "reset_count": "0", "gpubusy": "0 0",
            **self.machine.config.sysfs}

  # *** files

  def open(self) -> Client:
    if not self.machine.config.gpu: raise error(errno.ENODEV, "no GPU: firmware missing or probe failed")
    self.clients[c:=Client(self)] = None
    return c

  def release(self, c: Client) -> None:
    for ctx in list(c.contexts.values()): self._destroy(ctx)
    del self.clients[c]
    if not self.clients:                                # memory is the process's: it goes with the last file
      for e in list(self.entries.values()): self._free(e)

  # *** memory

  def _entry(self, id: int) -> Entry:
    if (e:=self.entries.get(id)) is None or e.freed: raise error(errno.EINVAL, f"object {id} does not exist")
    return e

  def _at(self, gpuaddr: int) -> Entry:
    for e in self.entries.values():
      if e.gpuaddr and not e.freed and e.gpuaddr <= gpuaddr < e.gpuaddr + e.size: return e
    raise error(errno.EINVAL, f"no object at {gpuaddr:#x}")

  def _new(self, size: int, flags: int, mem: Shmem | None, name: str) -> Entry:
    id = self.ids.take()
    assert id is not None
    e = self.entries[id] = Entry(self, id, size, flags, mem, name)
    e.info.history.append(f"allocated, {size} bytes, at {self.machine.uptime()}: {whence()}")
    return e

  def _map_gpu(self, e: Entry, gpuaddr: int, ram: int) -> None:
    self.space.map(gpuaddr, e.size, ram, readonly=bool(e.flags & ABI.KGSL_MEMFLAGS_GPUREADONLY), bo=e.info)
    e.gpuaddr, e.mapped = gpuaddr, True

  def _place(self, e: Entry, ram: int, align: int = PAGE) -> None:
    """GPU address and PTEs of an entry without USE_CPU_MAP. ENOMEM if the window is full; the entry is gone then."""
    if (gpuaddr:=self.va.alloc(e.size, align)) is None:
      self._free(e)
      raise error(errno.ENOMEM, f"{e.size} bytes do not fit the GPU's address space")
    self._map_gpu(e, gpuaddr, ram)

  def _alloc(self, size: int, flags: int) -> Entry:
    flags &= MEM_FLAGS
    if flags & ABI.KGSL_MEMFLAGS_SECURE: raise error(errno.EOPNOTSUPP, "secure memory")
    if not size or size > 0xffffffff: raise error(errno.EINVAL, f"size {size}")
    cache, align = (flags & ABI.KGSL_CACHEMODE_MASK) >> ABI.KGSL_CACHEMODE_SHIFT, (flags & ABI.KGSL_MEMALIGN_MASK) >> ABI.KGSL_MEMALIGN_SHIFT
    if cache == ABI.KGSL_CACHEMODE_WRITETHROUGH: flags |= ABI.KGSL_CACHEMODE_MASK      # arm64 has no write-through: write-back
    flags = flags & ~ABI.KGSL_MEMALIGN_MASK | min(max(align, 12), 25) << ABI.KGSL_MEMALIGN_SHIFT
    size = -(-size // PAGE) * PAGE
    self.machine.take_pages(size)
    try: mem = Shmem(size, "kgsl-bo")
    except OSError as e:
      self.machine.pages -= size
      raise error(errno.ENOMEM, f"no memory for {size} bytes: {e}") from None
    entry = self._new(size, flags, mem, "")
    if not entry.cpu_map: self._place(entry, mem.ram, 1 << min(max(align, 12), 25))
    return entry

  def gpuobj_alloc(self, c: Client, a: Any) -> None:
    e = self._alloc(a.size, a.flags)
    if a.metadata and a.metadata_len: e.info.name = copy_from_user(a.metadata, min(a.metadata_len, 64)).split(b"\0")[0].decode(errors="replace")
    a.size, a.flags, a.mmapsize, a.id = e.size, e.flags, e.size, e.id

  def gpumem_alloc_id(self, c: Client, a: Any) -> None:
    e = self._alloc(a.size, a.flags)
    a.flags, a.size, a.mmapsize, a.gpuaddr, a.id = e.flags & 0xffffffff, e.size, e.size, e.gpuaddr, e.id

  def gpuobj_info(self, c: Client, a: Any) -> None:
    e = self._entry(a.id)
    a.gpuaddr, a.flags, a.size, a.va_len, a.va_addr = e.gpuaddr, e.flags, e.size, e.size, e.useraddr

  def gpumem_get_info(self, c: Client, a: Any) -> None:
    e = self._entry(a.id) if a.id else self._at(a.gpuaddr)
    a.gpuaddr, a.id, a.flags, a.size, a.mmapsize, a.useraddr = e.gpuaddr, e.id, e.flags & 0xffffffff, e.size, e.size, e.useraddr

  def gpuobj_set_info(self, c: Client, a: Any) -> None:
    e = self._entry(a.id)
    if a.flags & ABI.KGSL_GPUOBJ_SET_INFO_METADATA:
      if a.metadata_len > ABI.KGSL_GPUOBJ_ALLOC_METADATA_MAX: raise error(errno.EINVAL, f"{a.metadata_len} bytes of metadata")
      e.info.name = copy_from_user(a.metadata, a.metadata_len).split(b"\0")[0].decode(errors="replace")
    if a.flags & ABI.KGSL_GPUOBJ_SET_INFO_TYPE: e.flags = e.flags & ~ABI.KGSL_MEMTYPE_MASK | a.type << ABI.KGSL_MEMTYPE_SHIFT & ABI.KGSL_MEMTYPE_MASK

  def gpuobj_free(self, c: Client, a: Any) -> None:
    e = self._entry(a.id)
    if not a.flags & ABI.KGSL_GPUOBJ_FREE_ON_EVENT: return self._free(e)
    if a.type == ABI.KGSL_GPU_EVENT_TIMESTAMP:
      context, timestamp = struct.unpack("<II", self._priv(a.priv, a.len, 8))
      self._fence_of(self._context(c, context), timestamp).then(lambda: self._free(e))
    elif a.type == ABI.KGSL_GPU_EVENT_FENCE:
      if (fd:=struct.unpack("<i", self._priv(a.priv, a.len, 4))[0]) < 0: raise error(errno.EINVAL, f"fence descriptor {fd}")
      self.machine.syncs.find(fd).then(lambda: self._free(e))
    else: raise error(errno.EINVAL, f"free on event type {a.type}")

  def gpumem_free_id(self, c: Client, a: Any) -> None: self._free(self._entry(a.id))
  def sharedmem_free(self, c: Client, a: Any) -> None: self._free(self._at(a.gpuaddr))

  def _priv(self, addr: int, size: int, want: int) -> bytes:
    if size != want: raise error(errno.EINVAL, f"private data of {size} bytes, {want} expected")
    return copy_from_user(addr, want)

  def _free(self, e: Entry) -> None:
    """Immediate: does not wait for the GPU."""
    if not e.freed:
      e.freed = True
      e.info.history.append(f"freed at {self.machine.uptime()}: {whence()}")
      self.put(e)

  def put(self, e: Entry) -> None:
    if e.vmas: return
    e.useraddr = 0
    if not e.freed or self.entries.pop(e.id, None) is None: return
    if e.mapped: self.space.unmap(e.gpuaddr)
    if e.gpuaddr: (self.svm if e.gpuaddr >= SVM_BASE else self.va).release(e.gpuaddr, e.size)
    if e.mem is not None:
      if not e.mem.dmabuf: self.machine.pages -= e.size
      self.machine.bury(e.mem)
    if e.host is not None:
      self.host.unmap(e.host)
      self.machine.bury(e.host)
    self.ids.give_back(e.id)

  def mmap(self, c: Client, start: int, size: int, prot: int, flags: int, offset: int) -> int:
    """The offset is an object's id in pages, or its GPU address. With USE_CPU_MAP the address chosen becomes the GPU's."""
    e = self.entries.get(offset // PAGE) or next((e for e in self.entries.values() if e.gpuaddr == offset), None)
    if e is None or e.freed or e.mem is None: raise error(errno.EINVAL, f"offset {offset:#x} names no object that can be mapped")
    if e.useraddr: raise error(errno.EBUSY, f"object {e.id} is mapped already, at {e.useraddr:#x}")
    if size != e.size: raise error(errno.ERANGE, f"{size} bytes of object {e.id}, which has {e.size}")
    if not e.cpu_map: addr = map_shared(e, e.mem.fd, start, size, prot, flags)
    else:
      addr = self._map_svm(e, start, prot, flags)
      if not e.mapped: self._map_gpu(e, addr, e.mem.ram)
    e.useraddr = addr
    return addr

  def _map_svm(self, e: Entry, start: int, prot: int, flags: int) -> int:
    """Maps at an address that is free for the CPU and the GPU. ENOMEM if the window has none."""
    assert e.mem is not None
    fixed, plain = flags & (MAP_FIXED | MAP_FIXED_NOREPLACE), flags & ~(MAP_FIXED | MAP_FIXED_NOREPLACE)
    if e.gpuaddr: return map_shared(e, e.mem.fd, e.gpuaddr, e.size, prot, plain | MAP_FIXED_NOREPLACE)     # mapped again after a munmap
    if fixed or start:
      if self.svm.reserve(start, e.size):
        try: return map_shared(e, e.mem.fd, start, e.size, prot, flags if fixed else plain | MAP_FIXED_NOREPLACE)
        except OSError:
          self.svm.release(start, e.size)
          if fixed: raise
      elif fixed: raise error(errno.ENOMEM, f"{start:#x} is outside the shared window or occupied")
    align, taken = 1 << ((e.flags & ABI.KGSL_MEMALIGN_MASK) >> ABI.KGSL_MEMALIGN_SHIFT), []
    try:
      while (addr:=self.svm.alloc(e.size, align)) is not None:
        try: return map_shared(e, e.mem.fd, addr, e.size, prot, plain | MAP_FIXED_NOREPLACE)
        except OSError as err:
          taken.append(addr)                            # something of the process lies there
          if err.errno != errno.EEXIST: raise
      raise error(errno.ENOMEM, f"no room for {e.size} bytes in the shared window, {self.svm.used} of {self.svm.size} used")
    finally:
      for addr in taken: self.svm.release(addr, e.size)

  def map_user_mem(self, c: Client, a: Any) -> None:
    if a.memtype not in (ABI.KGSL_USER_MEM_TYPE_ADDR, ABI.KGSL_USER_MEM_TYPE_ION): raise error(errno.EOPNOTSUPP, f"memtype {a.memtype}")
    flags = a.flags & (ABI.KGSL_MEMFLAGS_GPUREADONLY | ABI.KGSL_CACHEMODE_MASK | ABI.KGSL_MEMTYPE_MASK | ABI.KGSL_MEMALIGN_MASK
                       | ABI.KGSL_MEMFLAGS_USE_CPU_MAP)
    if a.memtype == ABI.KGSL_USER_MEM_TYPE_ION: e = self._import(a.fd, flags)
    else:
      if not a.hostptr or a.hostptr % PAGE: raise error(errno.EINVAL, f"hostptr {a.hostptr:#x}")
      if vmas.find(a.hostptr): raise error(errno.EFAULT, f"{a.hostptr:#x} lies in a mapping of GPU memory")
      if not a.len or a.len % PAGE or a.offset: raise error(errno.EINVAL, f"{a.len} bytes, offset {a.offset}: not whole pages")
      self._check_host(a.hostptr, a.len, writable=not flags & ABI.KGSL_MEMFLAGS_GPUREADONLY)
      e = self._new(a.len, flags | ABI.KGSL_MEMFLAGS_USERMEM_ADDR, None, "host memory")
      e.useraddr, e.host = a.hostptr, self.host.map(a.hostptr, a.len)
      if flags & ABI.KGSL_MEMFLAGS_USE_CPU_MAP:
        if not self.svm.reserve(a.hostptr, a.len):
          self._free(e)
          raise error(errno.ENOMEM, f"{a.hostptr:#x} is outside the shared window")
        self._map_gpu(e, a.hostptr, e.host.ram)
      else: self._place(e, e.host.ram)
    a.gpuaddr, a.flags = e.gpuaddr, e.flags & 0xffffffff

  def _check_host(self, addr: int, size: int, writable: bool) -> None:
    """Pinning pages for DMA: each must be mapped, with the permission the GPU will have. A kernel keeps them; here the client must not unmap them."""
    at = addr
    with open("/proc/self/maps") as f:
      for line in f:
        lo, hi = (int(x, 16) for x in line.split()[0].split("-"))
        if hi <= at: continue
        perms = line.split()[1]
        if lo > at or perms[0] != "r" or (writable and perms[1] != "w"): break
        if (at:=hi) >= addr + size: return
    raise error(errno.EFAULT, f"{addr:#x}, {size} bytes: not mapped, or read-only")

  def _import(self, fd: int, flags: int) -> Entry:
    if fd < 0: raise error(errno.EINVAL, f"descriptor {fd}")
    mem = self.machine.dmabuf_of(fd)
    own = self.machine.attach(mem)
    e = self._new(mem.size, flags & ~ABI.KGSL_MEMFLAGS_USE_CPU_MAP | ABI.KGSL_MEMFLAGS_USERMEM_ION, own, "dma-buf")
    self._place(e, own.ram)
    return e

  def gpuobj_import(self, c: Client, a: Any) -> None:
    if a.type == ABI.KGSL_USER_MEM_TYPE_DMABUF: a.id = self._import(struct.unpack("<i", self._priv(a.priv, a.priv_len, 4))[0], a.flags & MEM_FLAGS).id
    else: raise error(ENOTSUPP, f"import of type {a.type}")

  def gpuobj_sync(self, c: Client, a: Any) -> None:
    if not a.count or a.count > MAX_SYNC_OBJS: raise error(errno.EINVAL, f"{a.count} objects")
    if not a.obj_len: raise error(errno.EINVAL, "obj_len 0")
    for i in range(a.count):                            # all modes but write-back are coherent, and that one has nothing to show here
      copy_from_user(a.objs + i * a.obj_len, min(a.obj_len, 24))

  def gpumem_sync_cache(self, c: Client, a: Any) -> None:
    self._entry(a.id) if a.id else self._at(a.gpuaddr)

  def cpu_cache(self, op: str, addr: int, size: int) -> None:
    with outside_python, self.lock: self.host.maintain(op, addr, size)

  # *** contexts

  def _context(self, c: Client, id: int) -> Context:
    if (ctx:=c.contexts.get(id)) is None: raise error(errno.EINVAL, f"context {id} does not exist or belongs to another file")
    return ctx

  def drawctxt_create(self, c: Client, a: Any) -> None:
    flags = a.flags
    if flags & ABI.KGSL_CONTEXT_SECURE: raise error(errno.EOPNOTSUPP, "secure contexts")
    need = ABI.KGSL_CONTEXT_PREAMBLE | ABI.KGSL_CONTEXT_NO_GMEM_ALLOC
    if flags & need != need: raise error(errno.EINVAL, f"flags {flags:#x}: PREAMBLE and NO_GMEM_ALLOC are required")
    flags = flags & CONTEXT_FLAGS | ABI.KGSL_CONTEXT_PER_CONTEXT_TS
    if not flags & ABI.KGSL_CONTEXT_PRIORITY_MASK: flags |= 8 << ABI.KGSL_CONTEXT_PRIORITY_SHIFT
    if (id:=self.context_ids.take()) is None: raise error(errno.ENOSPC, f"{MAX_CONTEXTS} contexts exist")
    self.contexts[id] = c.contexts[id] = Context(id, c, flags, Entity(self.machine.submit))
    a.flags, a.drawctxt_id = flags, id

  def drawctxt_destroy(self, c: Client, a: Any) -> None: self._destroy(self._context(c, a.drawctxt_id))

  def _destroy(self, ctx: Context) -> None:
    """Detaches; waits for the GPU to finish the context's commands. If it does not, forces their timestamps."""
    ctx.detached = True
    del ctx.client.contexts[ctx.id], self.contexts[ctx.id]
    self.machine.cond.notify_all()
    if not self._patient(lambda: not ctx.pending): self._force_retire(ctx)
    self.context_ids.give_back(ctx.id)

  def _patient(self, done: Callable[[], bool]) -> bool:
    """Waits for the GPU for as long as it gets anything done. A kernel gives up after a time (10 s for room in a queue, 30 s for a context's end)."""
    while True:
      n = self.retired
      if not self.wait(lambda n=n: done() or self.retired != n, self.machine.clock() + int(self.machine.config.kgsl_wait_s * 1e9)): return False
      if done(): return True

  # *** commands and timestamps

  def count(self, name: str) -> None:
    try: super().count(name)
    except OSError as e:                                # an injected EPROTO comes where the kernel gives it
      if (name, e.errno) != ("GPU_COMMAND", errno.EPROTO): raise

  def gpu_command(self, c: Client, a: Any) -> None:
    if a.numcmds > MAX_IBS or a.numobjs > MAX_IBS or a.numsyncs > MAX_SYNCPOINTS: raise error(errno.EINVAL, "too many IBs, objects or syncpoints")
    ctx = self._context(c, a.context_id)
    marker = a.flags & MARKER
    sync_only = not marker and (a.flags & SYNC_ONLY or (a.numsyncs and not a.numcmds))
    deps = [] if marker else self._syncpoints(a.synclist, a.syncsize, a.numsyncs)
    if sync_only:
      self._check_state(ctx)
      ctx.waits += deps
      return
    ibs = self._objects(a.cmdlist, a.cmdsize, a.numcmds, 7)
    self._objects(a.objlist, a.objsize, a.numobjs, MEMOBJ)
    self._check_state(ctx)
    for gpuaddr, size in ibs:
      if not size or size // 4 > 0xfffff: raise error(errno.EINVAL, f"IB of {size} bytes")
      if not any(r.start <= gpuaddr < r.start + r.size for r in (self.svm, self.va)): raise error(errno.EINVAL, f"IB at {gpuaddr:#x}")
    if len(ctx.pending) >= CONTEXT_QUEUE + INFLIGHT:
      if not self._patient(lambda: len(ctx.pending) < CONTEXT_QUEUE + INFLIGHT or ctx.invalid or ctx.detached):
        raise error(errno.ETIMEDOUT, f"context {ctx.id} has {len(ctx.pending)} commands queued")
      self._check_state(ctx)
    if ctx.flags & USER_TS:
      if not after(a.timestamp, ctx.queued): raise error(errno.ERANGE, f"timestamp {a.timestamp} is not after {ctx.queued}")
      ts = a.timestamp
    else: ts = ctx.queued + 1 & 0xffffffff
    ctx.queued = ts
    job = Job(self.space, [] if marker else [(g, s >> 2) for g, s in ibs], None, ctx.priority, process().comm, context=ctx.id, timestamp=ts)
    fence = ctx.pending[ts] = Fence(ctx, ts, job)
    job.on_start, job.on_retire = functools.partial(self._start, ctx, ts), functools.partial(self._retire, ctx, fence)
    self.commands.append(CommandRecord(ctx.id, ts, a.flags, job.ibs))
    ctx.entity.push(job, deps + ctx.waits)
    ctx.waits = []
    if ctx.faulted or self.machine.config.injected("GPU_COMMAND", self.calls["GPU_COMMAND"]) == errno.EPROTO:
      # queued all the same, but the caller is not told its timestamp
      ctx.faulted = False
      raise error(errno.EPROTO, f"an earlier command of context {ctx.id} faulted and was skipped")
    a.timestamp = ts

  def _objects(self, addr: int, size: int, n: int, wanted: int) -> list[tuple[int, int]]:
    if n and (not addr or not size): raise error(errno.EINVAL, f"list of {n} at {addr:#x}, entries of {size} bytes")
    out = []
    for i in range(n):
      o = CMD.unpack(copy_from_user(addr + i * size, min(size, CMD.size)).ljust(CMD.size, b"\0"))
      if not o.flags & wanted: raise error(errno.EINVAL, f"entry {i} has flags {o.flags:#x}")
      out.append((o.gpuaddr, o.size))
    return out

  def _syncpoints(self, addr: int, size: int, n: int) -> list[Fence]:
    if n and (not addr or not size): raise error(errno.EINVAL, f"list of {n} at {addr:#x}, entries of {size} bytes")
    deps = []
    for i in range(n):
      s = SYNC.unpack(copy_from_user(addr + i * size, min(size, SYNC.size)).ljust(SYNC.size, b"\0"))
      if s.type == ABI.KGSL_CMD_SYNCPOINT_TYPE_TIMESTAMP:
        context, ts = struct.unpack("<II", self._priv(s.priv, s.size, 8))
        if (ctx:=self.contexts.get(context)) is None or after(ts, ctx.queued): raise error(errno.EINVAL, f"context {context}, timestamp {ts}")
        deps.append(self._fence_of(ctx, ts))
      elif s.type == ABI.KGSL_CMD_SYNCPOINT_TYPE_FENCE: deps.append(self.machine.syncs.find(struct.unpack("<i", self._priv(s.priv, s.size, 4))[0]))
      else: raise error(errno.EINVAL, f"syncpoint type {s.type}")
    return deps

  def _check_state(self, ctx: Context) -> None:
    if ctx.invalid: raise error(errno.EDEADLK, f"context {ctx.id} was invalidated by a GPU fault")
    if ctx.detached: raise error(errno.ENOENT, f"context {ctx.id} was destroyed")

  def _fence_of(self, ctx: Context, ts: int) -> Fence:
    """A fence that signals once `ts` has retired, also if it was not queued yet."""
    if (fence:=ctx.pending.get(ts)) is not None: return fence
    fence = Fence(ctx, ts)
    if after(ts, ctx.retired): ctx.syncs.append((ts, fence))
    else: fence.signal()
    return fence

  def _start(self, ctx: Context, ts: int, job: Any) -> None:
    with self.lock:
      if ctx.invalid: job.ibs = []
      ctx.started = ts

  def _retire(self, ctx: Context, fence: Fence, job: Any, result: Any) -> None:
    with self.lock:
      if result.reports: self.keep_reports(ctx.client, result)
      ctx.pending.pop(fence.seqno, None)
      self.retired += 1
      if not ctx.invalid: self._advance(ctx, fence.seqno)
      fence.signal()
      for line in result.dmesg: self.machine.log(line)
      if result.status != "ok" and not ctx.invalid: self._fault(ctx, job, result)
      self.machine.retired()

  def _advance(self, ctx: Context, ts: int) -> None:
    if after(ts, ctx.retired): ctx.retired = ts
    for s in [s for s in ctx.syncs if not after(s[0], ctx.retired)]:
      ctx.syncs.remove(s)
      s[1].signal()

  def _fault(self, ctx: Context, job: Any, result: Any) -> None:
    """adreno_dispatcher_do_fault: unlike MSM, an SMMU fault stalls the GPU and ends in recovery, too."""
    if result.status == "fault": self.machine.log(hang_line(job, result.ring))
    now = self.machine.clock()
    ctx.faults.append(now)
    ctx.reset_status = ABI.KGSL_CTX_STAT_GUILTY_CONTEXT_RESET_EXT
    for other in self.contexts.values():
      if other is not ctx and other.pending and other.reset_status == ABI.KGSL_CTX_STAT_NO_ERROR:
        other.reset_status = ABI.KGSL_CTX_STAT_INNOCENT_CONTEXT_RESET_EXT
    if ctx.flags & (NO_FAULT_TOLERANCE | ABI.KGSL_CONTEXT_INVALIDATE_ON_FAULT) or \
       sum(now - t <= FAULT_WINDOW_NS for t in ctx.faults) > FAULT_LIMIT:
      ctx.invalid = True
      self._force_retire(ctx)
    else: ctx.faulted = True

  def _force_retire(self, ctx: Context) -> None:
    self._advance(ctx, ctx.queued)
    for fence in list(ctx.pending.values()): fence.signal()
    self.machine.cond.notify_all()

  def device_waittimestamp_ctxtid(self, c: Client, a: Any) -> None:
    ctx = self._context(c, a.context_id)
    self.tell(c)                                        # why the context is invalid, before that it is
    self._check_state(ctx)
    if not ctx.flags & USER_TS and after(a.timestamp, ctx.queued): raise error(errno.EINVAL, f"timestamp {a.timestamp} of {ctx.queued} queued")
    deadline = None if a.timeout in (0, 0xffffffff) else self.machine.clock() + a.timeout * 1_000_000
    pending = ctx.pending.get(a.timestamp)
    ok = self.wait(lambda: not after(a.timestamp, ctx.retired) or ctx.invalid or ctx.detached or bool(c.reports), deadline,
                   pending.job if pending else None)
    self.tell(c)
    self._check_state(ctx)
    if not ok: raise error(errno.ETIMEDOUT, f"timestamp {a.timestamp} of context {ctx.id}, {ctx.retired} retired")

  def cmdstream_readtimestamp_ctxtid(self, c: Client, a: Any) -> None:
    ctx = self._context(c, a.context_id)
    values = {ABI.KGSL_TIMESTAMP_CONSUMED: ctx.started, ABI.KGSL_TIMESTAMP_RETIRED: ctx.retired, ABI.KGSL_TIMESTAMP_QUEUED: ctx.queued}
    if a.type not in values: raise error(errno.EINVAL, f"timestamp type {a.type}")
    self.machine.gpu.poke()
    a.timestamp = values[a.type]

  def timestamp_event(self, c: Client, a: Any) -> None:
    if a.type != ABI.KGSL_TIMESTAMP_EVENT_FENCE: raise error(errno.EINVAL, f"event type {a.type}")
    ctx = self._context(c, a.context_id)
    if a.len != 4: raise error(errno.EINVAL, f"private data of {a.len} bytes")
    fds = self.machine.syncs.create()
    try: copy_to_user(a.priv, struct.pack("<i", fds[0]))
    except OSError:
      for fd in fds: os.close(fd)
      raise
    self.machine.syncs.install(fds, self._fence_of(ctx, a.timestamp))

  # *** properties

  def device_getproperty(self, c: Client, a: Any) -> None:
    chip = self.machine.config.chip_id
    if a.type == ABI.KGSL_PROP_GPU_RESET_STAT:
      if a.sizebytes != 4: raise error(errno.EINVAL, f"{a.sizebytes} bytes")
      ctx = self._context(c, U32.unpack(copy_from_user(a.value, 4))[0])
      copy_to_user(a.value, U32.pack(ctx.reset_status))
      ctx.reset_status = ABI.KGSL_CTX_STAT_NO_ERROR
      return
    values = {
      ABI.KGSL_PROP_DEVICE_INFO: DEVINFO.pack(DEVINFO.record(1, chip, 1, 0x100000, 0, 0x100000)),     # gpu_id stays 0 on 4.9
      ABI.KGSL_PROP_VERSION: VERSION.pack(VERSION.record(ABI.KGSL_VERSION_MAJOR, ABI.KGSL_VERSION_MINOR, 3, 1)),
      ABI.KGSL_PROP_UCHE_GMEM_VADDR: U64.pack(0x100000), ABI.KGSL_PROP_DEVICE_BITNESS: U32.pack(48), ABI.KGSL_PROP_MMU_ENABLE: U32.pack(1),
      ABI.KGSL_PROP_INTERRUPT_WAITS: U32.pack(1), ABI.KGSL_PROP_HIGHEST_BANK_BIT: U32.pack(15), ABI.KGSL_PROP_MIN_ACCESS_LENGTH: U32.pack(32),
      ABI.KGSL_PROP_UBWC_MODE: U32.pack(2)}
    if (data:=values.get(a.type)) is None: raise error(errno.EINVAL, f"property {a.type:#x}")
    if a.sizebytes != len(data) and not (a.type == ABI.KGSL_PROP_MMU_ENABLE and a.sizebytes > len(data)):
      raise error(errno.EINVAL, f"property {a.type:#x} has {len(data)} bytes, not {a.sizebytes}")
    copy_to_user(a.value, data)

  def setproperty(self, c: Client, a: Any) -> None:
    if a.type != ABI.KGSL_PROP_PWR_CONSTRAINT: raise error(errno.EINVAL, f"property {a.type:#x}")
    if a.sizebytes != 24: raise error(errno.EINVAL, f"{a.sizebytes} bytes")
    k = ABI.layout("kgsl_device_constraint").unpack(copy_from_user(a.value, 24))
    ctx = self._context(c, k.context_id)
    if k.type == ABI.KGSL_CONSTRAINT_NONE: ctx.pwrlevel = None
    elif k.type == ABI.KGSL_CONSTRAINT_PWRLEVEL:
      if k.size != 4: raise error(errno.EINVAL, f"power level of {k.size} bytes")
      level, = U32.unpack(copy_from_user(k.data, 4))
      if level > 1: raise error(errno.EINVAL, f"power level {level}")
      ctx.pwrlevel = level
    else: raise error(errno.EINVAL, f"constraint type {k.type}")

  # *** for tests

  def live(self) -> dict[str, int]:
    """What is alive now; all zero after every file is closed and every mapping is gone."""
    with self.lock:
      maps = vmas.of(self.machine, Entry)
      return {"clients": len(self.clients), "contexts": len(self.contexts), "entries": len(self.entries),
              "bytes": sum(e.size for e in self.entries.values()), "va_bytes": self.svm.used + self.va.used, "mappings": len(maps),
              "mapped_bytes": sum(m.end - m.start for m in maps), "pending": sum(len(x.pending) for x in self.contexts.values())}
