"""Model of mainline Linux' MSM DRM driver for one Adreno 630.

Rules and their order follow drivers/gpu/drm/msm (msm_drv.c, msm_gem.c, msm_gem_submit.c, msm_submitqueue.c, msm_gem_vma.c, adreno_gpu.c) and the
DRM core (drm_ioctl.c, drm_gem.c, drm_prime.c, drm_syncobj.c); each check names what was wrong in the machine's dmesg. Kernel versions differ by
PROFILES. Not modelled: perf counters.
"""
from __future__ import annotations
import collections, ctypes, dataclasses, errno, functools, mmap, os, struct
from collections.abc import Callable
from typing import Any, NamedTuple
from test.mockgpu.qcom import vm_bind
from test.mockgpu.qcom.crash import Hangcheck, devcoredump
from test.mockgpu.qcom.files import map_shared, vmas
from test.mockgpu.qcom.gpu import Job
from test.mockgpu.qcom.kernel import (ETOOSMALL, PAGE, Abi, Entity, Fence, Ids, Model, Ranges, Resv, Shmem, copy_from_user, copy_to_user, error,
                                      jiffies_deadline, process, whence)
from test.mockgpu.qcom.memory import READ as READABLE
from test.mockgpu.qcom.memory import WRITE as WRITABLE
from test.mockgpu.qcom.memory import BoInfo
from test.mockgpu.qcom.report import recover_lines

ABI = Abi("msm.json")
U32 = struct.Struct("<I")
BO, CMD, SYNCOBJ, TIMESPEC = (ABI.layout(f"drm_msm_{n}") for n in ("gem_submit_bo", "gem_submit_cmd", "syncobj", "timespec"))
PIPE_3D0, INT_MAX = 0x10, 0x7fffffff
# what the submit path reads, as plain names: it runs once a replay in host-cost measurements
NO_IMPLICIT, FENCE_FD_IN, FENCE_FD_OUT, FENCE_SN_IN, SUDO, SYNCOBJ_IN, SYNCOBJ_OUT, SUBMIT_FLAGS = (
  getattr(ABI, f"MSM_SUBMIT_{n}") for n in (
    "NO_IMPLICIT", "FENCE_FD_IN", "FENCE_FD_OUT", "FENCE_SN_IN", "SUDO", "SYNCOBJ_IN", "SYNCOBJ_OUT", "FLAGS"))
BO_WRITE, BO_NO_IMPLICIT, CMD_BUF, CMD_RESTORE = (
  getattr(ABI, f"MSM_SUBMIT_{n}") for n in ("BO_WRITE", "BO_NO_IMPLICIT", "CMD_BUF", "CMD_CTX_RESTORE_BUF"))
VA_START = 1 << 32                                      # private VM of an A630 (a6xx_catalog.c: 4GB_VA)
SHARED_START, MMAP_START = 16 << 20, 1 << 32            # shared VM: above the first 16 MiB. mmap offsets: DRM_FILE_PAGE_OFFSET_START
# The kernel's own buffers as the GPU sees them from a client's stream (no HW APRIV on a630): name, bytes, access
KERNEL_START = 1 << 48                                  # TTBR1
KERNEL_BOS = (("memptrs", 4096, READABLE | WRITABLE), ("ring0", 32768, READABLE), ("sqefw", 36864, READABLE), ("shadow", 4096, 0))
KMALLOC_MAX = 4 << 20                                   # one kmalloc holds a submit's tables
SUBMIT_BO_BYTES, SUBMIT_CMD_BYTES = 24, 40              # their kernel-side entries (msm_gem.h, K7)

@dataclasses.dataclass(frozen=True)
class Profile:
  """What differs between kernels, for a client without VM_BIND. Releases between the named ones behave like the older neighbour."""
  minor: int                                            # UAPI minor version
  duplicate: int = errno.EALREADY                       # <6.8: the driver's own list check
  no_implicit_bo: bool = True                           # per-BO NO_IMPLICIT (1.10)
  writers_always_ordered: bool = False                  # NO_IMPLICIT does not cover BOs written by the submit
  relocs: bool = False
  boost: bool = True                                    # WAIT_FENCE_BOOST (1.11)
  metadata: bool = True
  bank_bit: bool = True                                 # HIGHEST_BANK_BIT, RAYTRACING
  ubwc: bool = False                                    # UBWC_SWIZZLE, MACROTILE_MODE, UCHE_TRAP_BASE
  gpuvm: bool = False                                   # 6.17: lazy VM, NO_SHARE, VM_BIND, 64-bit sizes, GEM_CLOSE waits, closed fds drop their jobs
  eviction: bool = True
  progress: bool = True                                 # hangcheck looks at the CP's progress
  perfcntr: bool = False                                # 7.2: PERFCNTR_CONFIG, AQE
  set_iova_busy: bool = False                           # SET_IOVA 0 of a busy BO is EBUSY

PROFILES = {
  "6.1": Profile(9, duplicate=errno.EINVAL, no_implicit_bo=False, writers_always_ordered=True, relocs=True, boost=False, metadata=False,
                 bank_bit=False, eviction=False, progress=False, set_iova_busy=True),
  "6.6": Profile(10, duplicate=errno.EINVAL, boost=False, metadata=False, bank_bit=False),
  "6.12": Profile(12),
  "7.2": Profile(13, ubwc=True, gpuvm=True, perfcntr=True),
}

class SubmitRecord(NamedTuple):
  """One accepted GEM_SUBMIT, for tests: raw tables as the client passed them, decoded on demand."""
  client: Client
  queue: int
  fence: int
  flags: int
  bo_table: bytes
  cmd_table: bytes
  @property
  def bos(self) -> list[tuple[int, int]]:
    """(handle, flags) in the order of the table."""
    return [(h, f) for f, h, _ in BO.struct.iter_unpack(self.bo_table)]
  @property
  def handles(self) -> list[int]: return [h for h, _ in self.bos]
  @property
  def cmds(self) -> list[tuple[int, int, int, int]]:
    """(type, submit_idx, submit_offset in bytes, size in bytes)."""
    return [c[:4] for c in CMD.struct.iter_unpack(self.cmd_table)]

class Vm:
  """A GPU address space: private to one open of the node, or the one shared by all."""
  def __init__(self, model: MSM, start: int, size: int, shared: bool):
    self.model, self.shared, self.start, self.size = model, shared, start, size
    self.ranges, self.space, self.faults, self.resv = Ranges(start, size), model.machine.gpu.new_space("msm"), 0, Resv()
    self.bindings, self.unusable = vm_bind.Bindings(), False        # of a VM that the client manages (VM_BIND)
    memory = model.kernel_memory()
    for iova, nbytes, access in model.kernel_bos.values():
      self.space.map(iova, nbytes, memory + iova - model.kernel_start, access=access, bo=model.kernel_bo)

@dataclasses.dataclass(slots=True)
class Vma:
  """A BO's address in one VM; `mapped` says whether PTEs exist."""
  iova: int
  mapped: bool = False

class GpuJob(NamedTuple):
  """What the model remembers of a submit until it retires."""
  client: Client
  queue: Queue
  fence: Fence
  bos: list[tuple[Bo, int]]                             # with their flags in the BO table
  restore: list[tuple[int, int]]                        # (iova, dwords) of CTX_RESTORE buffers, run only if the ring holds another client's state

class Bo:
  """A GEM object. Lives while any handle, CPU mapping, dma-buf descriptor or unfinished submit refers to it.

  `mem` is the memory the GPU sees. A CACHED BO is not coherent: CPU mappings see `cpu`, a second copy, until the client cleans or invalidates
  (cpu_cache below). WC and CACHED_COHERENT mappings see `mem`.
  """
  def __init__(self, model: MSM, size: int, flags: int, mem: Shmem, *, imported: bool = False):
    self.model, self.machine, self.size, self.flags, self.mem, self.imported = model, model.machine, size, flags, mem, imported
    self.cpu = Shmem(size, "msm-bo-cached") if flags & ABI.MSM_BO_CACHE_MASK == ABI.MSM_BO_CACHED else mem
    self.resv, self.addrs = mem.resv, dict[Vm, Vma]()
    self.handles, self.vmas, self.submits, self.bound, self.madv, self.purged, self.pages = 0, 0, 0, 0, 0, False, False
    self.offset = model.offsets.alloc(size)
    self.info, self.name, self.metadata = BoInfo(size=size), b"", b""
    self.owners: collections.Counter[Client] = collections.Counter()
    model.bos[self] = None
    model.by_offset[self.offset] = self

  def unmapped(self) -> None:
    """The last CPU mapping went away."""
    with self.model.lock: self.model.put(self)

class Queue:
  def __init__(self, id: int, flags: int, prio: int, entity: Entity):
    self.id, self.flags, self.prio, self.entity = id, flags, prio, entity
    self.last_fence, self.faults, self.next_id = 0, 0, 1
    self.fences: dict[int, Fence] = {}

class Client:
  """One open of the render node: handles, submit queues, syncobjs and usually an address space of its own."""
  def __init__(self, model: MSM):
    self.model, self.vm = model, None
    self.handles: dict[int, Bo] = {}
    self.ids = Ids()
    self.queues: dict[int, Queue] = {}
    self.entities: dict[int, Entity] = {}
    self.syncobjs: dict[int, Fence | None] = {}
    self.syncobj_ids, self.next_queue = Ids(), 0
    self.reports: list[BaseException] = []
    self.closed, self.comm, self.cmdline, self.vm_bind = False, "", "", False
  @property
  def task(self) -> tuple[str, str]: return self.comm or process().comm, self.cmdline or process().cmdline

class MSM(Model):
  prefix, unknown, abi, type_byte = ("DRM_IOCTL_MSM_", "DRM_IOCTL_"), errno.EINVAL, ABI, ord("d")
  table = {"GET_PARAM": "drm_msm_param", "SET_PARAM": "drm_msm_param", "GEM_NEW": "drm_msm_gem_new", "GEM_INFO": "drm_msm_gem_info",
           "GEM_CPU_PREP": "drm_msm_gem_cpu_prep", "GEM_CPU_FINI": "drm_msm_gem_cpu_fini", "GEM_SUBMIT": "drm_msm_gem_submit",
           "WAIT_FENCE": "drm_msm_wait_fence", "GEM_MADVISE": "drm_msm_gem_madvise", "SUBMITQUEUE_NEW": "drm_msm_submitqueue",
           "SUBMITQUEUE_CLOSE": "u32", "SUBMITQUEUE_QUERY": "drm_msm_submitqueue_query", "VM_BIND": "drm_msm_vm_bind",
           "PERFCNTR_CONFIG": "drm_msm_perfcntr_config", "VERSION": "drm_version", "GET_CAP": "drm_get_cap", "GEM_CLOSE": "drm_gem_close",
           "PRIME_HANDLE_TO_FD": "drm_prime_handle", "PRIME_FD_TO_HANDLE": "drm_prime_handle", "SYNCOBJ_CREATE": "drm_syncobj_create",
           "SYNCOBJ_DESTROY": "drm_syncobj_destroy", "SYNCOBJ_WAIT": "drm_syncobj_wait", "SYNCOBJ_RESET": "drm_syncobj_array",
           "SYNCOBJ_SIGNAL": "drm_syncobj_array"}

  def __init__(self, machine: Any):
    super().__init__(machine)
    self.profile = p = PROFILES[machine.config.kernel]
    if not p.gpuvm: del self._by_nr[ABI.ioctls["DRM_IOCTL_MSM_VM_BIND"] & 0xff]
    if not p.perfcntr: del self._by_nr[ABI.ioctls["DRM_IOCTL_MSM_PERFCNTR_CONFIG"] & 0xff]
    self.bo_flags = 0xf if p.no_implicit_bo else 7
    self.rings = 4 if machine.config.preemption else 1
    self.offsets = Ranges(MMAP_START, 1 << 44)
    self.bos: dict[Bo, None] = {}
    self.by_offset: dict[int | None, Bo] = {}
    self.exported: dict[Bo, None] = {}                  # BOs without other references that a dma-buf descriptor may keep alive
    self.clients: dict[Client, None] = {}
    self.shared: Vm | None = None
    self.global_faults = self.suspends = 0
    self.submits: collections.deque[SubmitRecord] = collections.deque(maxlen=4096)
    self.current_client: Client | None = None           # whose state the ring holds: decides CTX_RESTORE buffers
    self.ring: list[Any] = []                           # jobs handed to the GPU and not retired, oldest first
    self.completed = 0                                  # jobs retired
    self.hangcheck = Hangcheck(self)
    self.unplugged = False                              # the device went away: every ioctl is ENODEV
    self.kernel_start, at = (start := KERNEL_START if machine.config.private_vm else SHARED_START), start
    self.kernel_bo, self.kernel_bos = BoInfo("kernel", kernel=True), dict[str, tuple[int, int, int]]()
    for name, size, access in KERNEL_BOS: self.kernel_bos[name], at = (at, size, access), at + size
    self._kernel_memory: Any = None

  def kernel_memory(self) -> int:
    """Address of the memory behind the kernel's own buffers, which every VM maps: TTBR1's half of a private VM, the beginning of the shared one."""
    if self._kernel_memory is None:
      self._kernel_memory = mmap.mmap(-1, sum(size for _, size, _ in KERNEL_BOS))
      self._kernel_bytes = ctypes.c_char.from_buffer(self._kernel_memory)
    return ctypes.addressof(self._kernel_bytes)

  def ioctl(self, file: Any, request: int, arg: Any) -> int:
    if self.unplugged: raise error(errno.ENODEV, "the device was unplugged")
    return super().ioctl(file, request, arg)

  def _to_ring(self, job: Any) -> None:
    self.ring.append(job)
    if self.machine.config.hangcheck: self.hangcheck.arm()
    self.machine.submit(job)

  # *** files

  def open(self) -> Client:
    c = Client(self)
    self.clients[c] = None
    if self.machine.config.gpu:
      self._new_queue(c, 0, self.rings * 3 // 2)
      if not self.profile.gpuvm: self.vm(c)
    return c

  def release(self, c: Client) -> None:
    c.closed = True
    for h in list(c.handles): self._close_handle(c, h)
    c.queues.clear()
    if c.vm_bind and c.vm is not None: vm_bind.close(self, c.vm)
    del self.clients[c]

  def vm(self, c: Client) -> Vm:
    if c.vm is None:
      cfg = self.machine.config
      if not cfg.private_vm:
        if self.shared is None:
          self.shared = Vm(self, SHARED_START, (1 << 32) - SHARED_START, True)
          for iova, size, _ in self.kernel_bos.values(): self.shared.ranges.reserve(iova, size)
        c.vm = self.shared
      else: c.vm = Vm(self, VA_START, cfg.va_size, False)
    return c.vm

  def _gpu_present(self, code: int) -> None:
    if not self.machine.config.gpu: raise error(code, "no GPU is bound: firmware missing or probe failed")

  # *** DRM core

  def version(self, c: Client, a: Any) -> None:
    a.version_major, a.version_minor, a.version_patchlevel = 1, self.profile.minor, 0
    for field, text in (("name", b"msm"), ("date", b"20130625" if self.profile.minor < 13 else b"0"), ("desc", b"MSM Snapdragon DRM")):
      if (n:=min(getattr(a, field + "_len"), len(text))) and getattr(a, field): copy_to_user(getattr(a, field), text[:n])
      setattr(a, field + "_len", len(text))

  def get_cap(self, c: Client, a: Any) -> None:
    caps = {ABI.DRM_CAP_PRIME: 3, ABI.DRM_CAP_TIMESTAMP_MONOTONIC: 1, ABI.DRM_CAP_SYNCOBJ: 1, ABI.DRM_CAP_SYNCOBJ_TIMELINE: 0}
    if a.capability not in caps: raise error(errno.EOPNOTSUPP if a.capability < 0x16 else errno.EINVAL, f"capability {a.capability:#x}")
    a.value = caps[a.capability]

  def gem_close(self, c: Client, a: Any) -> None:
    if a.handle not in c.handles: raise error(errno.EINVAL, f"handle {a.handle} does not exist")
    self._close_handle(c, a.handle)

  def _close_handle(self, c: Client, handle: int) -> None:
    bo = c.handles.pop(handle)
    bo.owners[c] -= 1
    if self.profile.gpuvm and not bo.owners[c] and (vm:=c.vm) is not None and vm in bo.addrs:
      # msm_gem_close waits uninterruptibly, then unmaps; the handle no longer resolves, but its number is not free yet
      self.wait(lambda: not bo.resv.busy(True), None)
      if not vm.shared: self._drop_vma(bo, vm)
    c.ids.give_back(handle)
    bo.handles -= 1
    bo.info.history.append(f"handle {handle} closed at {self.machine.uptime()}: {whence()}")
    self.put(bo)

  def put(self, bo: Bo) -> None:
    """Frees the object if nothing refers to it any more."""
    if bo.handles or bo.vmas or bo.submits or bo.bound or bo not in self.bos: return
    if bo.mem.dmabuf and not bo.imported and bo.mem.exported_fds():
      self.exported[bo] = None
      return
    for vm in list(bo.addrs): self._drop_vma(bo, vm)
    self._drop_pages(bo)
    del self.bos[bo], self.by_offset[bo.offset]
    self.exported.pop(bo, None)
    self.offsets.release(bo.offset, bo.size)
    self.machine.bury(bo.mem)
    if bo.cpu is not bo.mem: self.machine.bury(bo.cpu)

  def _reap(self) -> None:
    """Notices dma-buf descriptors that were closed behind the model's back."""
    for bo in list(self.exported):
      del self.exported[bo]
      self.put(bo)

  def _drop_vma(self, bo: Bo, vm: Vm) -> None:
    vma = bo.addrs.pop(vm)
    if vma.mapped: vm.space.unmap(vma.iova)
    vm.ranges.release(vma.iova, bo.size)

  def _drop_pages(self, bo: Bo) -> None:
    if bo.pages: self.machine.pages -= bo.size
    bo.pages = False

  def prime_handle_to_fd(self, c: Client, a: Any) -> None:
    if a.flags & ~(os.O_CLOEXEC | os.O_RDWR): raise error(errno.EINVAL, f"flags {a.flags:#x}")
    bo = self._lookup(c, a.handle)
    if bo.flags & ABI.MSM_BO_NO_SHARE: raise error(errno.EPERM, f"handle {a.handle} is NO_SHARE")
    fd = os.dup(bo.mem.fd)
    os.set_inheritable(fd, not a.flags & os.O_CLOEXEC)
    self.machine.export(bo.mem)
    a.fd = fd

  def prime_fd_to_handle(self, c: Client, a: Any) -> None:
    mem = self.machine.dmabuf_of(a.fd)
    handle = next((h for h, b in c.handles.items() if b.mem is mem or (b.imported and b.mem.key() == mem.key())), None)
    if handle is None:
      bo = next((b for b in self.bos if b.mem is mem), None)
      if bo is None:
        own = self.machine.attach(mem)                  # a foreign exporter: the import holds its own reference, shares the reservation
        own.resv = mem.resv
        bo = Bo(self, mem.size, 0, own, imported=True)
        bo.info.history.append(f"imported at {self.machine.uptime()}: {whence()}")
      handle = self._new_handle(c, bo)
    a.handle = handle

  def _new_handle(self, c: Client, bo: Bo) -> int:
    handle = c.ids.take()
    assert handle is not None
    c.handles[handle] = bo
    bo.handles += 1
    bo.owners[c] += 1
    bo.info.handle = handle
    return handle

  def _lookup(self, c: Client, handle: int) -> Bo:
    if (bo:=c.handles.get(handle)) is None: raise error(errno.ENOENT, f"handle {handle} does not exist")
    return bo

  def mmap(self, c: Client, start: int, size: int, prot: int, flags: int, offset: int) -> int:
    """drm_gem_mmap: the offset must be a BO's, the caller must hold a handle to it, the length may not exceed it."""
    bo = self.by_offset.get(offset)
    if bo is None or size > bo.size: raise error(errno.EINVAL, f"offset {offset:#x}, {size} bytes: not the start of a BO of that size")
    if not bo.owners[c]: raise error(errno.EACCES, "the BO was not opened by this file")
    if bo.madv: raise error(errno.ENOMEM, "the BO is DONTNEED or purged; a CPU access would be SIGBUS")
    self._get_pages(bo)                                 # a kernel allocates on first touch, and kills the process if it cannot
    return map_shared(bo, bo.cpu.fd, start, size, prot, flags)

  def _get_pages(self, bo: Bo) -> None:
    if bo.pages: return
    self.machine.take_pages(bo.size)
    bo.pages = True

  # *** parameters

  def _param_prefix(self, c: Client, a: Any) -> None:
    if a.pipe != PIPE_3D0 or a.pad: raise error(errno.EINVAL, f"pipe {a.pipe:#x}, pad {a.pad:#x}")
    self._gpu_present(errno.ENXIO)

  def get_param(self, c: Client, a: Any) -> None:
    self._param_prefix(c, a)
    p, vm = self.profile, self.vm(c)                    # 6.17: creating the VM is a side effect of any GET_PARAM
    if a.len: raise error(errno.EINVAL, f"len {a.len}")
    chip = self.machine.config.chip_id
    values: dict[int, Callable[[], int]] = {
      ABI.MSM_PARAM_GPU_ID: lambda: (chip >> 24) * 100 + (chip >> 16 & 0xff) * 10 + (chip >> 8 & 0xff),
      ABI.MSM_PARAM_GMEM_SIZE: lambda: 0x100000, ABI.MSM_PARAM_CHIP_ID: lambda: chip, ABI.MSM_PARAM_MAX_FREQ: lambda: 710_000_000,
      ABI.MSM_PARAM_TIMESTAMP: lambda: self.machine.gpu.counter_ticks(), ABI.MSM_PARAM_GMEM_BASE: lambda: 0x100000,
      ABI.MSM_PARAM_PRIORITIES: lambda: self.rings * 3, ABI.MSM_PARAM_PP_PGTABLE: lambda: 0,
      ABI.MSM_PARAM_FAULTS: lambda: self.global_faults + vm.faults, ABI.MSM_PARAM_SUSPENDS: lambda: self.suspends}
    if not vm.shared: values |= {ABI.MSM_PARAM_VA_START: lambda: vm.start, ABI.MSM_PARAM_VA_SIZE: lambda: vm.size}
    if p.bank_bit: values |= {ABI.MSM_PARAM_HIGHEST_BANK_BIT: lambda: 15, ABI.MSM_PARAM_RAYTRACING: lambda: 0}
    if p.ubwc: values |= {ABI.MSM_PARAM_UBWC_SWIZZLE: lambda: 6, ABI.MSM_PARAM_MACROTILE_MODE: lambda: 0,
                          ABI.MSM_PARAM_UCHE_TRAP_BASE: lambda: 0x1fffffffff000}
    if p.gpuvm: values[ABI.MSM_PARAM_HAS_PRR] = lambda: 0
    if p.perfcntr: values[ABI.MSM_PARAM_AQE] = lambda: 0
    if a.param not in values: raise error(errno.EINVAL, f"param {a.param:#x} is unknown, write-only, or not offered by this address space")
    a.value = values[a.param]()

  def set_param(self, c: Client, a: Any) -> None:
    self._param_prefix(c, a)
    text = a.param in (ABI.MSM_PARAM_COMM, ABI.MSM_PARAM_CMDLINE)
    if a.len > (PAGE if text else 0): raise error(errno.EINVAL, f"len {a.len}")
    if text:
      name = copy_from_user(a.value, a.len).split(b"\0")[0].decode(errors="replace")
      setattr(c, "comm" if a.param == ABI.MSM_PARAM_COMM else "cmdline", name)
    elif a.param == ABI.MSM_PARAM_SYSPROF: raise error(errno.EPERM, "SYSPROF needs CAP_PERFMON")
    elif a.param == ABI.MSM_PARAM_EN_VM_BIND and self.profile.gpuvm and self.machine.config.private_vm:
      if c.vm is not None: raise error(errno.EBUSY, "the VM exists already")
      c.vm_bind = bool(a.value)
    else: raise error(errno.EINVAL, f"param {a.param:#x} is unknown, read-only, or needs a private VM")

  # *** BOs

  def gem_new(self, c: Client, a: Any) -> None:
    no_share = ABI.MSM_BO_NO_SHARE if self.profile.gpuvm else 0
    if a.flags & ~(ABI.MSM_BO_SCANOUT | ABI.MSM_BO_GPU_READONLY | ABI.MSM_BO_CACHE_MASK | no_share): raise error(errno.EINVAL, f"flags {a.flags:#x}")
    size = a.size if self.profile.gpuvm else a.size & 0xffffffff      # carried as u32 before drm_gpuvm
    size = -(-size // PAGE) * PAGE & (0xffffffffffffffff if self.profile.gpuvm else 0xffffffff)
    if not size: raise error(errno.EINVAL, "size is 0 after rounding to pages")
    if a.flags & ABI.MSM_BO_CACHE_MASK not in (ABI.MSM_BO_CACHED, ABI.MSM_BO_WC, ABI.MSM_BO_CACHED_COHERENT):
      raise error(errno.EINVAL, f"flags {a.flags:#x}: exactly one of CACHED, WC, CACHED_COHERENT")
    if a.flags & no_share and self.vm(c).shared: raise error(errno.EINVAL, "NO_SHARE needs a private VM")
    self._reap()
    try: mem = Shmem(size, "msm-bo")
    except OSError as e: raise error(errno.ENOMEM, f"no memory for {size} bytes: {e}") from None
    bo = Bo(self, size, a.flags, mem)
    if a.flags & no_share: bo.resv = self.vm(c).resv
    bo.info.history.append(f"GEM_NEW of {size} bytes at {self.machine.uptime()}: {whence()}")
    a.handle = self._new_handle(c, bo)

  def gem_info(self, c: Client, a: Any) -> None:
    if a.pad: raise error(errno.EINVAL, f"pad {a.pad}")
    if a.info in (0, 1, 4, 5):
      if a.len: raise error(errno.EINVAL, f"len {a.len}")
    elif a.info not in ((2, 3, 6, 7) if self.profile.metadata else (2, 3)): raise error(errno.EINVAL, f"info {a.info}")
    bo = self._lookup(c, a.handle)
    if a.info == ABI.MSM_INFO_GET_OFFSET: a.value = bo.offset
    elif a.info == ABI.MSM_INFO_GET_IOVA: a.value = self._address(bo, self._info_vm(c)).iova
    elif a.info == ABI.MSM_INFO_SET_IOVA: self._set_iova(bo, self._info_vm(c), a.value)
    elif a.info == ABI.MSM_INFO_GET_FLAGS:
      if bo.imported: raise error(errno.EINVAL, "imported dma-buf")
      a.value = bo.flags
    elif a.info == ABI.MSM_INFO_SET_NAME:
      if a.len >= 32: raise error(errno.EINVAL, f"a name of {a.len} bytes")
      bo.name = copy_from_user(a.value, a.len).split(b"\0")[0]
      bo.info.name = bo.name.decode(errors="replace")
    elif a.info == ABI.MSM_INFO_SET_METADATA:
      if a.len > 128: raise error(errno.EOVERFLOW, f"{a.len} bytes of metadata")
      bo.metadata = copy_from_user(a.value, a.len)
    else:
      data = bo.name if a.info == ABI.MSM_INFO_GET_NAME else bo.metadata
      if a.value and a.len < len(data): raise error(ETOOSMALL, f"{len(data)} bytes do not fit in {a.len}")
      a.len = len(data)
      if a.value: copy_to_user(a.value, data)

  def _info_vm(self, c: Client) -> Vm:
    self._gpu_present(errno.EINVAL)
    if c.vm_bind: raise error(errno.EINVAL, "VM_BIND is enabled: the client chooses addresses")
    return self.vm(c)

  def _address(self, bo: Bo, vm: Vm) -> Vma:
    """The BO's address in `vm`, reserved (lowest fit) on first use: no pages, no PTEs."""
    if (vma:=bo.addrs.get(vm)) is None:
      self._reap()
      if (iova:=vm.ranges.alloc(bo.size)) is None: raise error(errno.ENOSPC, f"{bo.size} bytes do not fit: {vm.ranges.used} of {vm.size} used")
      vma = bo.addrs[vm] = Vma(iova)
    return vma

  def _set_iova(self, bo: Bo, vm: Vm, iova: int) -> None:
    if vm.shared: raise error(errno.EOPNOTSUPP, "SET_IOVA in the shared VM")
    if not iova:
      if self.profile.set_iova_busy and bo.resv.busy(True): raise error(errno.EBUSY, "the BO is in use by the GPU")
      if vm in bo.addrs: self._drop_vma(bo, vm)         # now, whatever the GPU is doing
    elif (vma:=bo.addrs.get(vm)) is not None:
      if vma.iova == iova: return
      self._drop_vma(bo, vm)
      raise error(errno.EBUSY, f"the BO was at {vma.iova:#x}")
    else:
      if iova % PAGE or not vm.ranges.reserve(iova, bo.size): raise error(errno.ENOSPC, f"{iova:#x} is unaligned, outside the VM or occupied")
      bo.addrs[vm] = Vma(iova)

  def gem_cpu_prep(self, c: Client, a: Any) -> None:
    if a.op & ~ABI.MSM_PREP_FLAGS: raise error(errno.EINVAL, f"op {a.op:#x}")
    bo, write, now = self._lookup(c, a.handle), bool(a.op & ABI.MSM_PREP_WRITE), self.machine.clock()
    deadline = now if a.op & ABI.MSM_PREP_NOSYNC else jiffies_deadline(now, timespec_ns(a.timeout))
    if not self._client_wait(c, lambda: not bo.resv.busy(write), deadline):
      raise error(errno.EBUSY if deadline <= now else errno.ETIMEDOUT, "the GPU is not done with the BO")

  def gem_cpu_fini(self, c: Client, a: Any) -> None: self._lookup(c, a.handle)

  def gem_madvise(self, c: Client, a: Any) -> None:
    if a.madv not in (0, 1): raise error(errno.EINVAL, f"madv {a.madv}")
    bo = self._lookup(c, a.handle)
    if not bo.purged: bo.madv = a.madv
    a.retained = int(not bo.purged)

  def shrink(self) -> int:
    """The shrinker under memory pressure: purges idle DONTNEED BOs, evicts idle WILLNEED ones if there is swap. Returns the bytes freed."""
    freed = 0
    with self.lock:
      for bo in list(self.bos):
        if not bo.pages or bo.submits or bo.bound or bo.imported or bo.resv.busy(True): continue
        if bo.madv:
          for vm in list(bo.addrs): self._drop_vma(bo, vm)
          for fd in {bo.mem.fd, bo.cpu.fd}:             # contents are lost; CPU mappings see zeros where a kernel would raise SIGBUS
            os.ftruncate(fd, 0)
            os.ftruncate(fd, bo.size)
          bo.purged = True
        elif self.profile.eviction and self.machine.config.swap:
          for vm, vma in bo.addrs.items():
            if vma.mapped: vm.space.unmap(vma.iova)
            vma.mapped = False
        else: continue
        freed += bo.size
        self._drop_pages(bo)
    return freed

  # *** submit queues and fences

  def _new_queue(self, c: Client, flags: int, prio: int) -> Queue:
    if flags & ABI.MSM_SUBMITQUEUE_VM_BIND: entity = vm_bind.entity()
    elif prio in c.entities: entity = c.entities[prio]
    else: entity = c.entities[prio] = Entity(self._to_ring)
    q = c.queues[c.next_queue] = Queue(c.next_queue, flags, prio, entity)
    c.next_queue += 1
    return q

  def _queue(self, c: Client, id: int) -> Queue:
    if (q:=c.queues.get(id)) is None: raise error(errno.ENOENT, f"submitqueue {id} does not exist")
    return q

  def submitqueue_new(self, c: Client, a: Any) -> None:
    known = ABI.MSM_SUBMITQUEUE_FLAGS if self.profile.gpuvm else ABI.MSM_SUBMITQUEUE_ALLOW_PREEMPT
    if a.flags & ~known: raise error(errno.EINVAL, f"flags {a.flags:#x}")
    self._gpu_present(errno.ENODEV)
    if a.flags & ABI.MSM_SUBMITQUEUE_VM_BIND and (not c.vm_bind or a.prio):
      raise error(errno.EINVAL, "a VM_BIND queue needs a VM_BIND file and priority 0")
    if a.flags & ABI.MSM_SUBMITQUEUE_ALLOW_PREEMPT and self.rings == 1: raise error(errno.EINVAL, "ALLOW_PREEMPT with one ring")
    if a.prio // 3 >= self.rings: raise error(errno.EINVAL, f"priority {a.prio}, {self.rings * 3} levels")
    a.id = self._new_queue(c, a.flags, a.prio).id

  def submitqueue_close(self, c: Client, a: Any) -> None:
    if not a.value or a.value not in c.queues: raise error(errno.ENOENT, f"submitqueue {a.value} does not exist or is the default")
    del c.queues[a.value]

  def submitqueue_query(self, c: Client, a: Any) -> None:
    if a.pad: raise error(errno.EINVAL, f"pad {a.pad}")
    q = self._queue(c, a.id)
    if a.param != ABI.MSM_SUBMITQUEUE_PARAM_FAULTS: raise error(errno.EINVAL, f"param {a.param}")
    if a.len: copy_to_user(a.data, U32.pack(q.faults & 0xffffffff)[:a.len])

  def wait_fence(self, c: Client, a: Any) -> None:
    if a.flags & ~(ABI.MSM_WAIT_FENCE_FLAGS if self.profile.boost else 0): raise error(errno.EINVAL, f"flags {a.flags:#x}")
    if not self.machine.config.gpu: return
    q = self._queue(c, a.queueid)
    if 0 < (a.fence - q.last_fence) & 0xffffffff < 1 << 31:
      raise error(errno.EINVAL, f"fence {a.fence} of queue {q.id} was not submitted yet, the last one is {q.last_fence}")
    if (fence:=q.fences.get(a.fence)) is None: return self.tell(c)
    if not self._client_wait(c, lambda: fence.signalled, jiffies_deadline(self.machine.clock(), timespec_ns(a.timeout)), fence.job):
      raise error(errno.ETIMEDOUT, f"fence {a.fence} of queue {q.id} has not signalled")

  def _client_wait(self, c: Client, done: Callable[[], bool], deadline: int, job: Any = None) -> bool:
    self.tell(c)
    ok = self.wait(lambda: done() or bool(c.reports), deadline, job)
    self.tell(c)
    return ok

  # *** submit

  def gem_submit(self, c: Client, a: Any) -> None:
    p, flags = self.profile, a.flags
    self._gpu_present(errno.ENXIO)
    vm = self.vm(c)
    if a.pad: raise error(errno.EINVAL, f"pad {a.pad}")
    if vm.unusable: raise error(errno.EPIPE, "the VM is unusable since a hang")
    if flags & 0xffff != PIPE_3D0: raise error(errno.EINVAL, f"pipe {flags & 0xffff:#x}")
    if flags & 0xffff0000 & ~SUBMIT_FLAGS: raise error(errno.EINVAL, f"flags {flags:#x}")
    if flags & SUDO: raise error(errno.EINVAL, "SUDO needs a kernel option and CAP_SYS_RAWIO")
    q = self._queue(c, a.queueid)
    if q.flags & ABI.MSM_SUBMITQUEUE_VM_BIND: raise error(errno.EINVAL, f"queue {q.id} is for VM_BIND")
    out_fd = self.machine.syncs.create() if flags & FENCE_FD_OUT else None
    try: fence = self._submit(c, a, p, vm, q, flags)
    except BaseException:
      for fd in out_fd or (): os.close(fd)
      raise
    a.fence = fence.seqno
    if out_fd is not None: a.fence_fd = self.machine.syncs.install(out_fd, fence)

  def _submit(self, c: Client, a: Any, p: Profile, vm: Vm, q: Queue, flags: int) -> Fence:
    nb, nc = a.nr_bos, a.nr_cmds
    if nb * SUBMIT_BO_BYTES + nc * SUBMIT_CMD_BYTES > KMALLOC_MAX: raise error(errno.ENOMEM, f"{nb} BOs and {nc} cmds do not fit in one allocation")
    deps = [self.machine.syncs.find(a.fence_fd)] if flags & FENCE_FD_IN else []
    resets, outs = self._submit_syncobjs(c, a, flags, deps) if flags & (SYNCOBJ_IN | SYNCOBJ_OUT) else ((), ())

    bo_table, bo_flags = self._user_table(a.bos, nb, BO.size), self.bo_flags
    entries = list(BO.struct.iter_unpack(bo_table))
    for f, h, _ in entries:
      if f & ~bo_flags or not f & 3: raise error(errno.EINVAL, f"BO {h}: flags {f:#x}")
    if len(bo_table) < nb * BO.size: raise error(errno.EFAULT, f"BO table at {a.bos:#x}")
    try: bos = [c.handles[h] for _, h, _ in entries]
    except KeyError as e: raise error(errno.EINVAL, f"BO table names handle {e}, which does not exist") from None

    cmd_table = self._user_table(a.cmds, nc, CMD.size)
    cmds = list(CMD.struct.iter_unpack(cmd_table))
    for typ, _, _, size, _, nr_relocs, relocs in cmds:
      if not 1 <= typ <= 3: raise error(errno.EINVAL, f"cmd type {typ}")
      if size & 3: raise error(errno.EINVAL, f"cmd size {size} is not a multiple of 4")
      if nr_relocs and not c.vm_bind: copy_from_user(relocs, nr_relocs * 24)
    if len(cmd_table) < nc * CMD.size: raise error(errno.EFAULT, f"cmd table at {a.cmds:#x}")

    if c.vm_bind: bound = vm_bind.submit_cmds(cmds)
    resvs = {bo.resv for bo in bos}
    if not c.vm_bind and (len(resvs) != nb or vm.resv in resvs):
      raise error(p.duplicate, "a BO is listed twice, shares its reservation with another, or is NO_SHARE")
    context = q.entity
    if not flags & NO_IMPLICIT or p.writers_always_ordered:
      for bo, (f, _, _) in zip(bos, entries):
        if (flags & NO_IMPLICIT or f & BO_NO_IMPLICIT) and not (p.writers_always_ordered and f & BO_WRITE): continue
        if bo.resv.writers or bo.resv.readers: deps += [d for d in bo.resv.busy(bool(f & BO_WRITE)) if d.context is not context]

    for bo in bos: bo.submits += 1                      # from here on the shrinker leaves them alone
    try:
      ibs, restore = bound if c.vm_bind else self._check_cmds(cmds, bos, self._pin(bos, vm))
      fence = self._new_fence(q, a.fence if flags & FENCE_SN_IN else None)
    except BaseException:
      for bo in bos: bo.submits -= 1
      raise

    listed = f"submit of queue {q.id}, fence {fence.seqno}"
    for bo in bos: bo.info.listed = listed
    job = Job(vm.space, ibs, None if c.vm_bind else {bo.info for bo in bos}, q.prio, c.task[0])
    record = GpuJob(c, q, fence, list(zip(bos, (f for f, _, _ in entries))), restore)
    if c.vm_bind: vm.resv.add(fence, True)
    fence.job, job.on_start, job.on_retire = job, functools.partial(self._start, record), functools.partial(self._retire, record)
    for bo, (f, _, _) in zip(bos, entries): bo.resv.add(fence, f & BO_WRITE)
    for handle in resets: c.syncobjs[handle] = None
    for handle in outs: c.syncobjs[handle] = fence
    self.submits.append(SubmitRecord(c, q.id, fence.seqno, flags, bo_table, cmd_table))
    q.entity.push(job, deps)
    return fence

  def _user_table(self, addr: int, n: int, size: int) -> bytes:
    """n entries of `size` bytes; on a fault only the readable ones, since a kernel checks each entry before it copies the next."""
    try: return copy_from_user(addr, n * size)
    except OSError:
      got = b""
      try:
        for i in range(n): got += copy_from_user(addr + i * size, size)
      except OSError: pass
      return got

  def _pin(self, bos: list[Bo], vm: Vm) -> list[int]:
    iovas = []
    for bo in bos:
      vma = bo.addrs.get(vm)
      if vma is None: vma = self._address(bo, vm)
      if bo.madv or bo.purged: raise error(errno.EBUSY, f"BO {bo.info} is DONTNEED or purged")
      if not bo.pages: self._get_pages(bo)
      if not vma.mapped:
        vm.space.map(vma.iova, bo.size, bo.mem.ram, readonly=bool(bo.flags & ABI.MSM_BO_GPU_READONLY), bo=bo.info)
        vma.mapped = True
      iovas.append(vma.iova)
    return iovas

  def _check_cmds(self, cmds: list[tuple], bos: list[Bo], iovas: list[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    ibs: list[tuple[int, int]] = []
    restore: list[tuple[int, int]] = []
    for typ, idx, offset, size, _, nr_relocs, relocs in cmds:
      if idx >= len(bos): raise error(errno.EINVAL, f"cmd names BO {idx} of {len(bos)}")
      end = size + offset if self.profile.gpuvm else size + offset & 0xffffffff
      if not size or end > bos[idx].size: raise error(errno.EINVAL, f"cmd of {size} bytes at {offset:#x} of a BO of {bos[idx].size}")
      if nr_relocs:
        if not self.profile.relocs: raise error(errno.EINVAL, "relocs on a6xx")
        self._relocate(bos[idx], offset, copy_from_user(relocs, nr_relocs * 24), bos, iovas)
      if typ == CMD_BUF: ibs.append((iovas[idx] + (offset & ~3), size >> 2))
      elif typ == CMD_RESTORE: restore.append((iovas[idx] + (offset & ~3), size >> 2))
    return ibs, restore

  def _relocate(self, cmd: Bo, offset: int, table: bytes, bos: list[Bo], iovas: list[int]) -> None:
    """submit_reloc: patches 32-bit addresses into the command buffer, in ascending order (kernels that still allow it)."""
    if offset % 4: raise error(errno.EINVAL, "relocs of a non-aligned cmdstream buffer")
    last = 0
    for at, orval, shift, idx, off in struct.iter_unpack("<IIiIQ", table):
      if at % 4: raise error(errno.EINVAL, f"reloc at {at:#x} is not aligned")
      if at // 4 >= cmd.size // 4 or at // 4 < last: raise error(errno.EINVAL, f"reloc at {at:#x} is out of order or bounds")
      if idx >= len(bos): raise error(errno.EINVAL, f"reloc names BO {idx} of {len(bos)}")
      value = iovas[idx] + off
      copy_to_user(cmd.mem.ram + at, U32.pack((value >> -shift if shift < 0 else value << shift) & 0xffffffff | orval))
      last = at // 4

  def _new_fence(self, q: Queue, wanted: int | None) -> Fence:
    if wanted is not None:
      if not wanted or wanted in q.fences: raise error(errno.EINVAL, f"fence id {wanted} is 0 or in use")
      seqno = wanted
    else:
      seqno = q.next_id
      while seqno in q.fences: seqno = seqno % (INT_MAX - 1) + 1
      q.next_id = seqno % (INT_MAX - 1) + 1
    q.last_fence = seqno
    fence = q.fences[seqno] = Fence(q.entity, seqno)
    return fence

  def _start(self, r: GpuJob, job: Any) -> None:
    """Ring time, on the GPU thread: jobs of a closed file become no-ops, CTX_RESTORE buffers run if another context was last."""
    with self.lock:
      if (r.client.closed and self.profile.gpuvm) or (r.client.vm is not None and r.client.vm.unusable): job.ibs = []
      elif self.current_client is not r.client: job.ibs = r.restore + job.ibs
      self.current_client = r.client

  def _retire(self, r: GpuJob, job: Any, result: Any) -> None:
    with self.lock:
      for line in result.dmesg: self.machine.log(line)
      if result.status == "hang":
        for line in recover_lines(*r.client.task): self.machine.log(line)
        r.queue.faults += 1
        if r.client.closed: self.global_faults += 1
        elif r.client.vm is not None:
          r.client.vm.faults += 1
          r.client.vm.unusable = r.client.vm_bind
      if result.status != "ok" and self.machine.devcoredump is None:
        self.machine.devcoredump = devcoredump(self, job, r.bos, *r.client.task, fault=next(iter(result.faults), None) if result.status == "fault"
                                               else None)
      self.ring.remove(job)
      self.completed += 1
      if result.reports: self.keep_reports(r.client, result)
      r.queue.fences.pop(r.fence.seqno, None)
      if r.client.vm is not None: r.client.vm.resv.remove(r.fence)
      for bo, _ in r.bos:
        bo.resv.remove(r.fence)
        bo.submits -= 1
        if not bo.handles: self.put(bo)
      r.fence.signal()
      self.machine.retired()

  # *** syncobjs and sync_files

  def _submit_syncobjs(self, c: Client, a: Any, flags: int, deps: list[Fence]) -> tuple[list[int], list[int]]:
    resets, outs, n = [], [], min(a.syncobj_stride, SYNCOBJ.size)
    def read(addr: int, i: int) -> Any: return SYNCOBJ.unpack(copy_from_user(addr + i * a.syncobj_stride, n).ljust(SYNCOBJ.size, b"\0"))
    if flags & SYNCOBJ_IN:
      for i in range(a.nr_in_syncobjs):
        s = read(a.in_syncobjs, i)
        if s.point: raise error(errno.EOPNOTSUPP, "timeline point")
        if s.flags & ~ABI.MSM_SYNCOBJ_FLAGS: raise error(errno.EINVAL, f"syncobj flags {s.flags:#x}")
        if s.handle not in c.syncobjs: raise error(errno.ENOENT, f"syncobj {s.handle} does not exist")
        if (fence:=c.syncobjs[s.handle]) is None: raise error(errno.EINVAL, f"syncobj {s.handle} has no fence")
        deps.append(fence)
        if s.flags & ABI.MSM_SYNCOBJ_RESET: resets.append(s.handle)
    if flags & SYNCOBJ_OUT:
      for i in range(a.nr_out_syncobjs):
        s = read(a.out_syncobjs, i)
        if s.flags: raise error(errno.EINVAL, f"syncobj flags {s.flags:#x}")
        if s.point: raise error(errno.EOPNOTSUPP, "timeline point")
        if s.handle not in c.syncobjs: raise error(errno.EINVAL, f"syncobj {s.handle} does not exist")
        outs.append(s.handle)
    return resets, outs

  def syncobj_create(self, c: Client, a: Any) -> None:
    if a.flags & ~ABI.DRM_SYNCOBJ_CREATE_SIGNALED: raise error(errno.EINVAL, f"flags {a.flags:#x}")
    handle = c.syncobj_ids.take()
    assert handle is not None
    c.syncobjs[handle] = signalled_fence() if a.flags else None
    a.handle = handle

  def syncobj_destroy(self, c: Client, a: Any) -> None:
    if a.pad or a.handle not in c.syncobjs: raise error(errno.EINVAL, f"syncobj {a.handle} does not exist, or pad {a.pad}")
    del c.syncobjs[a.handle]
    c.syncobj_ids.give_back(a.handle)

  def _syncobj_array(self, c: Client, a: Any) -> list[int]:
    if a.pad or not a.count_handles: raise error(errno.EINVAL, f"pad {a.pad}, {a.count_handles} handles")
    handles = [h for h, in U32.iter_unpack(copy_from_user(a.handles, a.count_handles * 4))]
    if (bad:=next((h for h in handles if h not in c.syncobjs), None)) is not None: raise error(errno.ENOENT, f"syncobj {bad} does not exist")
    return handles

  def syncobj_reset(self, c: Client, a: Any) -> None:
    for h in self._syncobj_array(c, a): c.syncobjs[h] = None
  def syncobj_signal(self, c: Client, a: Any) -> None:
    for h in self._syncobj_array(c, a): c.syncobjs[h] = signalled_fence()
    self.machine.cond.notify_all()

  def syncobj_wait(self, c: Client, a: Any) -> None:
    every, for_submit = a.flags & ABI.DRM_SYNCOBJ_WAIT_FLAGS_WAIT_ALL, a.flags & ABI.DRM_SYNCOBJ_WAIT_FLAGS_WAIT_FOR_SUBMIT
    if a.flags & ~(ABI.DRM_SYNCOBJ_WAIT_FLAGS_WAIT_ALL | ABI.DRM_SYNCOBJ_WAIT_FLAGS_WAIT_FOR_SUBMIT): raise error(errno.EINVAL, f"flags {a.flags:#x}")
    handles = self._syncobj_array(c, a)
    if not for_submit and any(c.syncobjs[h] is None for h in handles): raise error(errno.EINVAL, "a syncobj has no fence")
    def signalled() -> list[int]: return [i for i, h in enumerate(handles) if (f:=c.syncobjs.get(h)) is not None and f.signalled]
    if not self._client_wait(c, lambda: len(signalled()) >= (len(handles) if every else 1), jiffies_deadline(self.machine.clock(), a.timeout_nsec)):
      raise error(errno.ETIME, "a syncobj has not signalled")
    a.first_signaled = signalled()[0]

  # *** the rest

  def vm_bind(self, c: Client, a: Any) -> None:
    self._gpu_present(errno.ENXIO)
    vm_bind.ioctl(self, c, a)

  def perfcntr_config(self, c: Client, a: Any) -> None: raise error(errno.EPERM, "perf counters need CAP_PERFMON")

  # *** for tests

  def live(self) -> dict[str, int]:
    """What is alive now, counts and bytes by name. All zero once every file is closed, every mapping gone and no work in flight."""
    with self.lock:
      self._reap()
      maps = vmas.of(self.machine, Bo)
      spaces = {vm for bo in self.bos for vm in bo.addrs}
      return {"clients": len(self.clients), "handles": sum(len(c.handles) for c in self.clients), "bos": len(self.bos),
              "bytes": sum(b.size for b in self.bos), "iova_bytes": sum(vm.ranges.used for vm in spaces),
              "mappings": len(maps), "mapped_bytes": sum(m.end - m.start for m in maps),
              "fences": sum(len(q.fences) for c in self.clients for q in c.queues.values()), "queues": sum(len(c.queues) for c in self.clients)}

def cpu_cache(op: str, addr: int, size: int) -> None:
  """What arm64's cache maintenance by address does to mappings of CACHED BOs: "clean" (dc cvac) writes the CPU's copy to memory, "invalidate"
  drops it, "flush" (dc civac) does both. Whole 64-byte lines; other memory is left alone, as it is coherent here."""
  lo, hi = addr & ~63, -(-(addr + size) // 64) * 64
  for start, end, bo, base in vmas.find(lo, hi - lo):
    if type(bo) is not Bo or bo.cpu is bo.mem: continue
    a, n = max(lo, start), min(hi, end) - max(lo, start)
    ram = bo.mem.ram + a - base
    if op != "invalidate": ctypes.memmove(ram, a, n)
    if op != "clean": ctypes.memmove(a, ram, n)

def timespec_ns(raw: bytes) -> int:
  t = TIMESPEC.unpack(raw)
  return t.tv_sec * 1_000_000_000 + t.tv_nsec

def signalled_fence() -> Fence:
  fence = Fence(object(), 0)
  fence.signalled = True
  return fence
