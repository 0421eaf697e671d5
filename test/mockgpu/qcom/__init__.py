"""The virtual Adreno 630: an SDM845 whose GPU can be opened through mainline MSM DRM or downstream KGSL, without hardware or root.

    from test.mockgpu import qcom
    qcom.configure(kernel="6.12", schedule="late")       # a fresh machine; open files of the previous one keep their own
    node = qcom.open_node("/dev/dri/renderD128", os.O_RDWR)
    node.ioctl(request, buffer); node.mmap(...); qcom.current().msm.calls

Settings may also come from the environment as one JSON object: QCOM_MOCK='{"kernel": "6.6", "va_size": 268435456}'.
"""
from __future__ import annotations
import collections, ctypes, dataclasses, errno, json, os, resource, threading, time, weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from test.mockgpu.qcom.crash import debugfs_gem
from test.mockgpu.qcom.files import MockFileIOInterface, VirtualFile, exists, ioctl_pointer, listdir, munmap
from test.mockgpu.qcom.heap import CachedBuffer
from test.mockgpu.qcom.kernel import GpuViolation, Shmem, SyncFiles, error, inode

NODES = MSM_NODE, KGSL_NODE, HEAP_NODE = "/dev/dri/renderD128", "/dev/kgsl-3d0", "/dev/dma_heap/system"
KGSL_SYSFS = "/sys/class/kgsl/kgsl-3d0/"
DEVCOREDUMP, DEBUGFS_GEM = "/sys/class/devcoredump/devcd1/data", "/sys/kernel/debug/dri/128/gem"

@dataclasses.dataclass
class Config:
  """Sizes in bytes. `fail` = {ioctl name or "mmap": {n: errno}}: the nth call (from 1; an int, a range or "5-8") fails before it does anything,
  but for KGSL's EPROTO, which says that a command is queued all the same."""
  kernel: str = "6.12"                                  # MSM profile: see msm.PROFILES
  chip_id: int = 0x06030002
  schedule: str | int = "asap"                          # asap | late | seed of a random order
  execute: bool = True                                  # False: jobs retire without being run (host-cost benchmarks)
  order: str | int = "forward"                          # of workgroups: forward | reversed | seed
  strict: Any = None                                    # gpu.Strict, or what Strict.of takes; None: everything is checked
  private_vm: bool = True                               # False: the shared VM of boards whose firmware does not set the GPU's aperture (cheza)
  va_size: int = 1 << 32                                # MSM: size of a private VM
  kgsl_va_size: int = 1 << 32                           # KGSL: size of each of the two windows
  memory: int | None = None                             # bytes of pages all BOs together may have; None: no limit
  swap: bool = False                                    # shrink() may evict idle WILLNEED BOs
  gpu: bool = True                                      # False: firmware missing, no GPU bound
  kgsl_wait_s: float = 120.0                            # KGSL: how long a full context queue and DRAWCTXT_DESTROY wait without any job retiring
                                                        # (a kernel: 10 s and 30 s in all, but of a faster GPU)
  hang_polls: int = 2000                                # a CP that has polled as often is a hang: 2 s at least, more on a loaded machine
  counter_start: int = 1 << 32                          # of the always-on counter, in ticks of 19.2 MHz
  hangcheck: bool = False                               # MSM: the kernel's check by the clock, made for a GPU that is not emulated
  preemption: bool = False                              # MSM enable_preemption / KGSL priority levels (4 rings)
  nodes: tuple[str, ...] = NODES
  denied: tuple[str, ...] = ()                          # nodes whose open gives EACCES
  sysfs: dict[str, str] = dataclasses.field(default_factory=dict)      # replaces the content of KGSL sysfs files by name
  fail: dict[str, dict[Any, int]] = dataclasses.field(default_factory=dict)
  rd: str | None = None                                 # write a Mesa .rd capture here; gzip if it ends in .gz
  rd_full: bool = False                                 # with the contents of buffers above 1 MiB, too
  estimate: str | None = None                           # print estimated times of an A630 when the GPU closes, and draw them here (SVG)
  clock: Callable[[], int] | None = None                # CLOCK_MONOTONIC in ns, injectable

  def __post_init__(self) -> None:
    """Raises ValueError for a value that would mean nothing, with what is allowed."""
    from test.mockgpu.qcom import gpu, kgsl, msm
    def need(name: str, ok: bool, allowed: str) -> None:
      if not ok: raise ValueError(f"{name} is {getattr(self, name)!r}, allowed: {allowed}")
    def whole(v: Any, least: int) -> bool: return isinstance(v, int) and not isinstance(v, bool) and v >= least
    for name in ("execute", "private_vm", "swap", "gpu", "hangcheck", "preemption", "rd_full"):
      need(name, isinstance(getattr(self, name), bool), "true, false")
    for name in ("chip_id", "va_size", "kgsl_va_size", "hang_polls"): need(name, whole(getattr(self, name), 1), "a whole number from 1")
    need("counter_start", whole(self.counter_start, 0), "a whole number from 0")
    need("memory", self.memory is None or whole(self.memory, 1), "a number of bytes, or null for no limit")
    need("kgsl_wait_s", isinstance(self.kgsl_wait_s, (int, float)) and self.kgsl_wait_s > 0, "seconds")
    need("kernel", self.kernel in msm.PROFILES, ", ".join(msm.PROFILES))
    need("schedule", self.schedule in ("asap", "late") or whole(self.schedule, 0), "asap, late, or a whole number as a seed")
    need("order", self.order in ("forward", "reversed") or whole(self.order, 0), "forward, reversed, or a whole number as a seed")
    gpu.Strict.of(self.strict)
    for name in ("nodes", "denied"): need(name, set(getattr(self, name)) <= set(NODES), "a list of " + ", ".join(NODES))
    for name in ("rd", "estimate"):
      ok = (path := getattr(self, name)) is None or (isinstance(path, str) and os.access(os.path.dirname(os.path.abspath(path)), os.W_OK))
      need(name, ok, "the name of a file in a folder that can be written")
    calls = (*msm.MSM.table, *kgsl.KGSL.table, "mmap")
    need("fail", not (unknown := set(self.fail) - set(calls)), f"calls are {', '.join(calls)}, not {', '.join(map(repr, unknown))}")
    for name in self.fail:
      try: self.injected(name, 0)
      except ValueError: need("fail", False, 'numbers of calls like "2" or "5-8", each with an errno')
      need("fail", all(code in errno.errorcode for code in self.fail[name].values()), "the number of an errno, as 12 for ENOMEM")

  def injected(self, name: str, n: int) -> int | None:
    for key, code in self.fail.get(name, {}).items():
      if isinstance(key, str):
        lo, _, hi = key.partition("-")
        key = range(int(lo), int(hi or lo) + 1)
      if n == key or (isinstance(key, range) and n in key): return code
    return None

class VirtualMachine:
  """One booted phone: a GPU, both kernel models, and the descriptors they share. Everything mutable is guarded by `lock`."""
  def __init__(self, config: Config):
    from test.mockgpu.qcom import heap, kgsl, msm
    self.config, self.lock, self.forked = config, threading.RLock(), False
    self.cond = threading.Condition(self.lock)
    self.clock = config.clock or time.monotonic_ns
    self.dmesg: collections.deque[str] = collections.deque(maxlen=1000)
    self.syncs = SyncFiles()
    self.dmabufs: dict[tuple[int, int], Shmem] = {}
    self.devcoredump: str | None = None                 # one is kept until somebody clears it
    self.jobs_in_flight, self._graveyard, self.pages = 0, list[Any](), 0
    self._gpu: Any = None
    _machines.add(self)
    self.msm, self.kgsl, self.heap = msm.MSM(self), kgsl.KGSL(self), heap.DmaHeap(self)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 65536 and soft != hard:                   # every BO holds a memfd, which on a phone would not be a descriptor of the client
      resource.setrlimit(resource.RLIMIT_NOFILE, (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536), hard))

  @property
  def gpu(self) -> Any:
    if self._gpu is None: self._gpu = make_gpu(self.config)
    return self._gpu

  def uptime(self) -> str: return f"{self.clock() / 1e9:.6f} s"
  def log(self, line: str) -> None: self.dmesg.append(f"[{self.clock() / 1e9:12.6f}] {line}")

  def submit(self, job: Any) -> None:
    self.jobs_in_flight += 1
    self.gpu.submit(job)

  def retired(self) -> None:
    """A job left the GPU: wakes waiters, and lets go of memory that was freed while the GPU might still have been reading it. Lock held."""
    self.jobs_in_flight -= 1
    if not self.jobs_in_flight:
      while self._graveyard: self._graveyard.pop().release()
    self.cond.notify_all()

  def bury(self, mem: Any) -> None:
    """Frees memory whose PTEs are gone already. With the GPU at work the host mapping outlives that work."""
    if self.dmabufs.get(mem.key()) is mem: del self.dmabufs[mem.key()]
    if self.jobs_in_flight: self._graveyard.append(mem)
    else: mem.release()

  def take_pages(self, size: int) -> None:
    """ENOMEM when the machine's memory limit would be passed, also after MSM's shrinker took what it may."""
    limit = self.config.memory
    if limit is not None and self.pages + size > limit: self.msm.shrink()
    if limit is not None and self.pages + size > limit: raise error(errno.ENOMEM, f"{size} more bytes, {self.pages} of {limit} are used")
    self.pages += size

  def export(self, mem: Shmem) -> None:
    """Makes the memory known as a dma-buf, by the inode that all its descriptors share."""
    mem.dmabuf = True
    self.dmabufs.setdefault(mem.key(), mem)

  def dmabuf_of(self, fd: int) -> Shmem:
    mem = self.dmabufs.get(inode(fd))
    if mem is None: raise error(errno.EINVAL, f"descriptor {fd} is not a dma-buf")
    return mem

  def attach(self, mem: Shmem) -> Shmem:
    """A device's reference to a dma-buf. Mapping it for the device cleans the CPU's caches once; what the CPU writes later is its business."""
    if isinstance(mem, CachedBuffer): mem.to_devices()
    own = Shmem(mem.size, fd=os.dup(mem.fd), ram_fd=None if mem.ram_fd is None else os.dup(mem.ram_fd))
    own.dmabuf = True
    return own

  def _watch(self) -> None:
    """The kernel's hang check, for as long as this machine is the current one."""
    while _current is self:
      with self.lock: self.msm.hangcheck.tick()
      time.sleep(0.05)

  def close(self) -> None:
    """Stops the GPU. Open files stay, their queued work is lost."""
    if self._gpu is not None: self._gpu.close()

def make_gpu(config: Config) -> Any:
  from test.mockgpu.qcom.gpu import VirtualGPU
  try:
    gpu = VirtualGPU(config.chip_id, strict=config.strict, schedule=config.schedule, execute=config.execute,
                     order=config.order, hang_polls=config.hang_polls, counter_start=config.counter_start, rd=config.rd, rd_full=config.rd_full,
                     estimate=config.estimate)
    if config.execute: _ = gpu.engine                   # its first build takes longer than a client's patience with a submit
  except OSError as e: raise RuntimeError(f"the virtual Adreno 630 can't start: {e}") from e # not what a kernel answers to an open
  return gpu

_current: VirtualMachine | None = None
_machines: weakref.WeakSet[VirtualMachine] = weakref.WeakSet()

def from_environment() -> dict[str, Any]:
  """The settings in QCOM_MOCK. Raises ValueError for what is no JSON object and for a setting or a value that does not exist."""
  env = os.environ.get("QCOM_MOCK", "")
  try:
    if not isinstance(base := json.loads(env) if env else {}, dict): raise ValueError(f"it is {env}")
  except ValueError as e: raise ValueError(f"QCOM_MOCK is not a JSON object ({e}); example: QCOM_MOCK='{{\"kernel\": \"6.6\"}}'") from None
  known = [f.name for f in dataclasses.fields(Config) if f.name != "clock"]
  if unknown := sorted(set(base) - set(known)): raise ValueError(f"QCOM_MOCK has no setting {unknown[0]!r}, there are {', '.join(known)}")
  try: Config(**base)
  except ValueError as e: raise ValueError(f"QCOM_MOCK: {e}") from None
  return base

def configure(**settings: Any) -> VirtualMachine:
  """Boots a fresh machine with `settings` (fields of Config) over those of the environment, and returns it. TypeError names an unknown setting."""
  global _current
  base = from_environment()
  machine = VirtualMachine(Config(**{**base, **settings}))
  if _current is not None: _current.close()
  _current = machine
  if machine.config.hangcheck and machine.clock is time.monotonic_ns: threading.Thread(target=machine._watch, name="hangcheck", daemon=True).start()
  return machine

def current(create: bool = True) -> Any:
  """The live VirtualMachine; boots one on first use unless create=False."""
  return configure() if _current is None and create else _current

def _after_fork() -> None:
  for machine in _machines: machine.forked = True
os.register_at_fork(after_in_child=_after_fork)

def nodes() -> tuple[str, ...]: return current().config.nodes
def listed() -> tuple[str, ...]:
  """Virtual files that a folder's list shows."""
  return (*nodes(), *((DEVCOREDUMP,) if current().devcoredump is not None else ()))

def open_node(path: str, flags: int = os.O_RDWR) -> VirtualFile:
  """Opens a virtual device node. OSError: ENOENT if the machine has no such node, EACCES if configured as denied, EMFILE as the process runs out."""
  m = current()
  if path not in m.config.nodes: raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
  if path in m.config.denied: raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
  return VirtualFile(path, {MSM_NODE: m.msm, KGSL_NODE: m.kgsl, HEAP_NODE: m.heap}[path])

class Sysfs(NamedTuple):
  """One virtual file of sysfs or debugfs."""
  get: Callable[[], str]
  set: Callable[[str], None]

def sysfs(path: str) -> Sysfs | None:
  """The virtual file at `path`: KGSL's attributes, a pending devcoredump (a write discards it), debugfs's list of GEM objects. None for others."""
  if not path.startswith((KGSL_SYSFS, DEVCOREDUMP, DEBUGFS_GEM)): return None
  m = current()
  if path.startswith(KGSL_SYSFS) and KGSL_NODE in m.config.nodes and (name:=path[len(KGSL_SYSFS):]) in m.kgsl.attributes():
    return Sysfs(lambda: m.kgsl.attributes()[name] + "\n", lambda text: m.config.sysfs.__setitem__(name, text.strip()))
  if path == DEVCOREDUMP and m.devcoredump is not None: return Sysfs(lambda: m.devcoredump or "", lambda text: setattr(m, "devcoredump", None))
  if path == DEBUGFS_GEM and MSM_NODE in m.config.nodes: return Sysfs(lambda: debugfs_gem(m.msm), lambda text: None)
  return None

def cpu_cache(op: str, addr: int, size: int) -> None:
  """arm64's cache maintenance by address on memory the GPU does not snoop: CPU mappings of MSM_BO_CACHED BOs, host memory mapped through KGSL.
  "clean" (dc cvac) writes the CPU's lines to memory, "invalidate" drops them, "flush" (dc civac) does both. Other memory is coherent here."""
  if op not in ("clean", "invalidate", "flush"): raise ValueError(f"cache operation {op!r} is not clean, invalidate or flush")
  from test.mockgpu.qcom import msm
  msm.cpu_cache(op, addr, size)
  current().kgsl.cpu_cache(op, addr, size)

def _flush(addr: int, size: int) -> None: cpu_cache("flush", addr, size)
_C_FLUSH = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64)(_flush)

def flush_pointer() -> int:
  """Address of `void flush(u64 addr, u64 size)`: what arm64 does with dc civac on a range of user memory."""
  return ctypes.cast(_C_FLUSH, ctypes.c_void_p).value or 0

def dmabuf_sync(fd: int, flags: int) -> None:
  """DMA_BUF_IOCTL_SYNC on a descriptor of the virtual machine. Raises OSError."""
  current().heap.sync(fd, flags)

__all__ = ["Config", "GpuViolation", "MockFileIOInterface", "VirtualFile", "VirtualMachine", "configure", "cpu_cache", "current",
           "dmabuf_sync", "exists", "flush_pointer", "ioctl_pointer", "listdir", "munmap", "open_node"]
