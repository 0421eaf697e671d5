from __future__ import annotations
import array, bisect, contextlib, ctypes, errno, fcntl, functools, importlib, mmap, os, platform, struct, sys, threading, time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from tinygrad.device import TinyELF
from tinygrad.helpers import DEBUG, PROFILE, Target, ansistrip, disable_gc, getenv, round_up, to_mv, unwrap
from tinygrad.renderer.cstyle import QCOMCLRenderer
from tinygrad.renderer.nir import IR3Renderer
from tinygrad.runtime.autogen import kgsl, libc, msm_drm
from tinygrad.runtime.support.compiler_cpu import ClangCompiler
from tinygrad.runtime.support.hcq import FileIOInterface, HCQBuffer, MMIOInterface
from tinygrad.runtime.support.qcom_rd import capture
if TYPE_CHECKING:
  from tinygrad.renderer import Renderer
  from tinygrad.runtime.ops_cpu import CPUProgram
  from tinygrad.runtime.ops_qcom import QCOMDevice

# What Python and the submitter, which is C, have in common. Both make their structs of this: a field is a u64, or what follows its colon.
FIELDS = {name: [(n, typ or "u64") for n,_,typ in (f.partition(":") for f in fields.split())] for name,fields in {
  "alloc": "start end base birth host tainted handle:u32 shared:u32",
  "ref": "addr input:u32 flags:u32 seen",       # seen: where its allocation was last time
  "patch": "dst ref:u32 low:u32 addend",        # *(u64*)(arena + dst) = address of ref + addend, whose bits in `low` must be 0
  "seg": "offset size refs nrefs",              # one IB: bytes in the arena, a slice of segrefs
  "batch": "arena refs nrefs patches nstatic npatches segs nsegs segrefs timeline_dst last birth id",
  "queue": "ioctl errno_fn flush fd request arg cmd allocs nallocs marks bos inputs serial timeline fence error error_arg submits batches "
           "nbos nbytes hook",                  # nbos, nbytes: listed buffers and bytes of IBs of all submits
}.items()}
# flags of a ref: its contents matter; written; its address is inputs[input]; this capture's; read before anything in the batch writes it
REF_READ, REF_WRITTEN, REF_INPUT, REF_OWN, REF_FIRST = 1, 2, 4, 8, 16
NOT_LIVE, TAINTED, MISALIGNED = 1001, 1002, 1003       # errors of the submitter's own, beside the kernel's errnos
QUEUED = errno.EPROTO                                  # KGSL: an earlier submit faulted; this one is queued all the same
# An allocation is tainted by the id of the batch that is to write it, or else by
BEYOND_REPAIR, OUTDATED = (1 << 64) - 1, (1 << 64) - 2 # more than a batch that can run again; what did not get as far as a batch, and any may write
C_NUMBERS = ("REF_READ", "REF_WRITTEN", "REF_INPUT", "REF_OWN", "REF_FIRST", "NOT_LIVE", "TAINTED", "MISALIGNED", "BEYOND_REPAIR", "OUTDATED",
             "QUEUED")

# The submitter runs without the interpreter lock and allocates nothing. It patches a batch, turns the addresses that the batch references into the
# kernel's buffer list, and submits. All its state is in CPU memory that Python lays out.
# An allocation born after a batch was linked is not what the batch was linked against, even at the same address: `birth` tells.
SUBMIT_SRC = """#define AT(T, base, off) (*(T*)((char*)(base) + (off)))
static struct alloc* find(struct queue* q, u64 addr);
static struct alloc* alloc_of(struct queue* q, struct ref* r);
static int kernel_submit(struct queue* q, struct alloc* ib, u64 addr, u64 size, u32 nbos, u32 shared);
static u64 fail(struct queue* q, struct batch* b, u64 error, u64 arg, u32 begun);
static u64 addr_of(struct queue* q, struct ref* r) { return (r->flags & REF_INPUT) ? ((u64*)q->inputs)[r->input] : r->addr; }
static int do_ioctl(struct queue* q);

u64 qcom_submit(struct queue* q, struct batch* b) {
  struct ref* refs = (struct ref*)b->refs; struct patch* ps = (struct patch*)b->patches;
  struct seg* segs = (struct seg*)b->segs; u32* segrefs = (u32*)b->segrefs; u64* marks = (u64*)q->marks;
  if (q->error) return q->error;
  if (!b->birth) b->birth = q->serial;
  if (!b->id) b->id = ++q->batches;
  for (u64 i = 0; i < b->nrefs; i++) {
    struct alloc* a = alloc_of(q, &refs[i]);
    if (!a || a->birth > ((refs[i].flags & REF_INPUT) ? q->serial : b->birth)) return fail(q, b, NOT_LIVE, addr_of(q, &refs[i]), 0);
    if (a->tainted && (refs[i].flags & REF_READ) && a->tainted != b->id) return fail(q, b, TAINTED, addr_of(q, &refs[i]), 0);
    // the GPU doesn't snoop: what the CPU wrote must be in memory, and no dirty line may land on what the GPU is going to write
    if (a->host && q->flush) ((void (*)(u64, u64))q->flush)(a->host, a->end - a->start);
  }
  for (u64 i = b->last ? b->nstatic : 0; i < b->npatches; i++) {
    u64 addr = addr_of(q, &refs[ps[i].ref]) + ps[i].addend;
    if (addr & ps[i].low) return fail(q, b, MISALIGNED, addr, 0);
    *(u64*)(b->arena + ps[i].dst) = addr;
  }
  AT(u32, b->arena, b->timeline_dst) = (u32)(q->timeline + 1);
  __sync_synchronize();
  for (u64 s = 0; s < b->nsegs; s++) {
    u32 n = 0, shared = 0; struct alloc* ib = alloc_of(q, &refs[0]);
    q->submits++;
    for (u64 i = 0; i < segs[s].nrefs; i++) {
      struct alloc* a = alloc_of(q, &refs[segrefs[segs[s].refs + i]]);
      if (marks[a->handle] == q->submits) continue;  // another allocation in the same BO
      marks[a->handle] = q->submits; shared |= a->shared;
      ((u64*)q->bos)[2*n] = BO_FLAGS | (u64)a->handle << 32; ((u64*)q->bos)[2*n+1] = 0; n++;
    }
    if (q->hook) ((void (*)(u64, u64, u64))q->hook)(refs[0].addr + segs[s].offset, segs[s].size, n);
    int err = kernel_submit(q, ib, refs[0].addr + segs[s].offset, segs[s].size, n, shared);
    if (err == QUEUED && s + 1 == b->nsegs) q->timeline++; // it runs all the same, and signals
    if (err) return fail(q, b, (u64)err, s, s > 0 || err == QUEUED);
    q->nbos += n; q->nbytes += segs[s].size;
  }
  for (u64 i = 0; i < b->nrefs; i++) {
    struct alloc* a = alloc_of(q, &refs[i]);
    if ((refs[i].flags & REF_WRITTEN) && (a->tainted == b->id || a->tainted == OUTDATED || (refs[i].flags & REF_OWN))) a->tainted = 0;
  }
  b->last = ++q->timeline;
  return 0;
}
static struct alloc* find(struct queue* q, u64 addr) {
  struct alloc* a = (struct alloc*)q->allocs; u64 lo = 0, hi = q->nallocs;
  while (lo < hi) { u64 mid = (lo + hi) / 2; if (a[mid].start <= addr) lo = mid + 1; else hi = mid; }
  return lo && addr < a[lo-1].end ? &a[lo-1] : 0;
}
// a batch refers to many buffers that stay where they are: look there first
static struct alloc* alloc_of(struct queue* q, struct ref* r) {
  struct alloc* a = (struct alloc*)q->allocs; u64 addr = addr_of(q, r);
  if (r->seen < q->nallocs && a[r->seen].start <= addr && addr < a[r->seen].end) return &a[r->seen];
  struct alloc* ret = find(q, addr);
  if (ret) r->seen = (u64)(ret - a);
  return ret;
}
// Nothing that this batch should have written may be taken for its result until the batch runs again: others may write a part of it only.
// What it updates in place is as before, unless it was begun: then what it reads and writes is beyond repair.
static u64 fail(struct queue* q, struct batch* b, u64 error, u64 arg, u32 begun) {
  struct ref* refs = (struct ref*)b->refs;
  for (u64 i = 0; i < b->nrefs; i++) {
    struct alloc* a = alloc_of(q, &refs[i]); u64 id = begun && (refs[i].flags & REF_READ) ? BEYOND_REPAIR : b->id;
    if (!a || !(refs[i].flags & REF_WRITTEN) || (!begun && (refs[i].flags & REF_FIRST))) continue;
    a->tainted = !a->tainted || a->tainted == OUTDATED || a->tainted == id ? id : BEYOND_REPAIR;
  }
  q->error_arg = arg;
  return q->error = error;
}
static int do_ioctl(struct queue* q) {
  for (;;) {
    if (((int (*)(int, unsigned long, void*))q->ioctl)((int)q->fd, (unsigned long)q->request, (void*)q->arg) == 0) return 0;
    int err = *((int* (*)(void))q->errno_fn)();
    if (err != RETRY0 && err != RETRY1) return err;
  }
}
"""

ARM64 = platform.machine().lower() in ("aarch64", "arm64")

class QCOMError(RuntimeError):
  """`what`: what failed, by which cause, and what is left of results and device. `do`: what to do about it. `stage`: of STAGES, if a call failed."""
  def __init__(self, what:str, do:str, stage:str=""):
    super().__init__(what, do)
    self.what, self.do, self.stage = what, do, stage
  def __str__(self): return f"{self.what}. Do: {self.do}"
class QCOMMemoryError(QCOMError, MemoryError):
  """Memory or addresses ran out."""

# What was being done when a call failed: what its caller has then, and how to say that it be repeated.
NODE, OPEN, RENEW, MEMORY, MAP, HOST, SUBMIT, WAIT, FREE = "node", "open", "renew", "memory", "map", "host", "submit", "wait", "free"
CLOSED = "QCOM did not open"
STAGES = {
  NODE: (CLOSED, "open it again"), OPEN: (CLOSED, "open it again"), MEMORY: ("", "try again"), MAP: ("", "try again"), HOST: ("", "try again"),
  SUBMIT: ("Nothing of {work} ran", "run it again"), WAIT: ("Whether {work} ended well is not known", "repeat what raised this"),
  FREE: ("Memory is not released yet", "repeat what raised this"), RENEW: ("The lost context is not replaced yet", "repeat what raised this")}
REOPEN, REPORT = "Device['QCOM'].reopen() (drops all tensors) or start anew", "report it (docs/failures.md)"
RECURS = "if it recurs, QCOM_DEBUG=sync names the kernel"
NO_NODE = ("load the GPU's driver (mainline: msm, downstream: kgsl), in a container pass /dev/dri or /dev/kgsl-3d0 into it; "
           "python3 -m tinygrad.runtime.support.qcom_doctor says what is missing")
# Cause and what to do, by errno (0: any other), by what was being done and errno, or by these and the kernel. docs/failures.md says more.
REMEDY:dict[Any, tuple[str, str]] = {
  0: ("", f"{{again}}; if it stays so, {REOPEN}, and {REPORT}"),
  errno.EACCES: ("a container, sandbox or SELinux denies it, not the node's group", "allow it there (SELinux: dmesg has avc: denied), then {again}"),
  errno.ENOMEM: ("Linux is out of memory", "free tensors, end other programs or add swap, then {again}"),
  errno.ENOSPC: ("the GPU's address space is full", "free some tensors (mainline: all share 4 GiB of GPU addresses), then {again}"),
  errno.ENODEV: ("the GPU or its driver is gone, dmesg says why", f"save what can still be read (.numpy()), then {REOPEN}"),
  errno.EDEADLK: ("the GPU hung or faulted on earlier work", f"{{again}}, the device takes new work; {RECURS}"),
  errno.ETIMEDOUT: ("the GPU is stuck on earlier work", f"{{again}}; if it stays so, {REOPEN}"),
  errno.EBUSY: ("Linux was busy and did not take it", f"{{again}}; if it stays so, {REOPEN}"),
  errno.EMFILE: ("too many files are open", "close some or raise the limit (ulimit -n), then {again}"),
  (NODE, errno.EACCES): ("this user has no access", "join the node's group (ls -l {node}), log in again"),
  (NODE, errno.ENOENT): ("there is no such node", NO_NODE),
  (OPEN, 0): ("", f"reboot or try another Linux, and {REPORT}"),
  (OPEN, errno.ENOMEM): ("Linux is out of memory", "end other programs or add swap, then {again}"),
  (OPEN, errno.ENOSPC): ("there is no room for another GPU context", "end other programs that use the GPU, then {again}"),
  (OPEN, errno.ENODEV): ("the GPU driver is gone or not ready", "look for its errors (dmesg | grep -iE 'msm|adreno|kgsl'), reboot"),
  (OPEN, errno.ENXIO): ("the driver has no GPU, usually for want of firmware",
                        "put the file that dmesg names (a630_sqe.fw, a630_gmu.bin or a630_zap.mbn) below /lib/firmware/qcom, reboot"),
  (OPEN, errno.EINVAL, "MSM"): ("", f"try another Linux, 6.1 or newer, and {REPORT}"),
  (SUBMIT, errno.EPERM): ("Linux forbids it, dmesg says why",
                          "for want of an IOMMU try another Linux, for avc: denied allow it in SELinux, else in the container; then {again}"),
  (MEMORY, 0): ("", f"{{again}}, all else is as before; if it stays so, {REOPEN}, and {REPORT}"),
  (MEMORY, errno.ENOMEM, "KGSL"): ("Linux is out of memory, or the GPU's address space is full",
                                   "free tensors, end other programs or add swap, then {again}"),
  (MAP, errno.ENOMEM): ("Linux is out of memory, or a limit of this process is reached",
                        "free tensors, add swap, raise ulimit -v or vm.max_map_count, then {again}"),
  (MAP, errno.ENOMEM, "KGSL"): ("Linux is out of memory, the GPU's address space is full, or a limit of this process is reached",
                                "free tensors, then {again}; if that does not help, add swap, raise ulimit -v or vm.max_map_count"),
  (MAP, errno.EACCES): ("SELinux or a sandbox denies it, or Linux takes this memory for another process's",
                        f"if dmesg has avc: denied, allow it there, then {{again}}; if not, {REOPEN}, and {REPORT}"),
  (MAP, errno.EBUSY): ("Linux is busy with this memory", f"{{again}}, all else is as before; if it stays so, {REOPEN}"),
  (HOST, 0): ("", f"copy it into a tensor instead of Tensor.from_blob, and {REPORT}"),
  (HOST, errno.EOPNOTSUPP): ("Linux can't map this memory", "copy it into a tensor instead of Tensor.from_blob"),
  (FREE, 0): ("", f"{{again}}, all else is as before; if it recurs, {REOPEN}, and {REPORT}")}
for same, as_ in ((errno.EPERM, errno.EACCES), (errno.ENXIO, errno.ENODEV), (errno.EIO, errno.ENODEV), (errno.EPROTO, errno.EDEADLK),
                  ((SUBMIT, errno.ENOENT, "KGSL"), errno.EDEADLK), ((MAP, 0), (MEMORY, 0)), ((RENEW, errno.ENOSPC), (OPEN, errno.ENOSPC)),
                  *(((NODE, e), (OPEN, e)) for e in (0, errno.ENOMEM, errno.ENODEV, errno.ENXIO))): REMEDY[same] = REMEDY[as_]

U64 = ctypes.c_uint64
def ctypes_fields(name:str) -> list[tuple[str, Any]]: return [(n, ctypes.c_uint32 if typ == "u32" else U64) for n,typ in FIELDS[name]]
class Queue(ctypes.Structure): # of a device: it outlives an interface that is closed, since captures know its address
  prog:Any
  _fields_ = ctypes_fields("queue")
  def __init__(self):
    super().__init__()
    self.lock = threading.RLock()
class Alloc(ctypes.Structure): _fields_ = ctypes_fields("alloc")
REF, PATCH, SEG = (struct.Struct("<" + "".join("I" if typ == "u32" else "Q" for _,typ in FIELDS[name])) for name in ("ref", "patch", "seg"))
BATCH = [n for n,_ in FIELDS["batch"]]
DEAD = (1 << 64) - 1 # birth of an allocation that was freed but is kept for reuse
LOST = 1 << 63 # stands for the address of a buffer that never got any, or whose device was closed

class LiveAllocs:
  """Every allocation the GPU may touch, sorted by GPU address, in the form the C submitter searches. Changed while guarded()."""
  def __init__(self, queue:Queue):
    self.queue, self.lock, self.starts, self.marks = queue, queue.lock, list[int](), array.array('Q', [0]) * 256
    self.arr, self.spare = (Alloc * 256)(), (Alloc * 256)()
    self.reserve(1)
    self.publish([], self.arr, self.marks)

  @contextlib.contextmanager
  def guarded(self):
    """Nobody else allocates, frees or submits: no other thread, and no finalizer that the garbage collector runs on this one."""
    with self.lock, disable_gc(): yield

  def publish(self, starts:list[int], arr:Any, marks:array.array):
    """A change is made aside. Here it comes into force, and nothing is called in between that a signal could interrupt."""
    q, n, at, marks_at, spare = self.queue, len(starts), ctypes.addressof(arr), marks.buffer_info()[0], self.spare if arr is self.arr else self.arr
    q.nallocs, q.allocs, q.marks, self.starts, self.arr, self.spare, self.marks = n, at, marks_at, starts, arr, spare, marks

  def reserve(self, nbos:int):
    """Room for a buffer list of `nbos` entries and for `nbos` input addresses."""
    if nbos > getattr(self, "room", 0):
      room = round_up(nbos, 256)
      q, bos, inputs = self.queue, (U64 * (2 * room))(), (U64 * room)()
      bos_at, inputs_at = ctypes.addressof(bos), ctypes.addressof(inputs)
      q.bos, q.inputs, self.bos, self.inputs, self.room = bos_at, inputs_at, bos, inputs, room

  def replaced(self, i:int, old:int, *new:Alloc) -> Any:
    """The spare array with what `arr` has, but `new` in place of `old` entries from `i` on."""
    n, sz = len(self.starts), ctypes.sizeof(Alloc)
    arr = self.spare if len(self.spare) >= n + len(new) - old else (Alloc * (2*n))()
    ctypes.memmove(arr, self.arr, i * sz)
    for k,a in enumerate(new): arr[i+k] = a
    ctypes.memmove(ctypes.addressof(arr) + (i + len(new)) * sz, ctypes.addressof(self.arr) + (i + old) * sz, (n - i - old) * sz)
    return arr

  def add(self, start:int, size:int, handle:int, base:int, host:int=0, shared:bool=False):
    """`host`: CPU address of memory that the CPU caches and the GPU doesn't snoop. `shared`: others order their work on it by the kernel's fences."""
    with self.guarded():
      marks = self.marks if handle < len(self.marks) else self.marks + array.array('Q', [0]) * (handle + 256 - len(self.marks))
      self.queue.serial += 1
      i = bisect.bisect(self.starts, start)
      arr = self.replaced(i, 0, Alloc(start, start + size, base, self.queue.serial, host, 0, handle, shared))
      self.publish([*self.starts[:i], start, *self.starts[i:]], arr, marks)

  def remove(self, start:int):
    with self.guarded():
      i = bisect.bisect_left(self.starts, start)
      self.publish(self.starts[:i] + self.starts[i+1:], self.replaced(i, 1), self.marks)

  def find(self, addr:int) -> Alloc|None:
    starts, arr = self.starts, self.arr
    i = bisect.bisect(starts, addr) - 1
    return arr[i] if i >= 0 and addr < arr[i].end else None

  def rebirth(self, addr:int, dead:bool=False):
    """An allocation goes to the allocator's cache (dead) or comes out of it as a new one, with no contents to trust or distrust."""
    with self.lock:
      self.queue.serial += 1
      if (a:=self.find(addr)) is not None: a.birth, a.tainted = (DEAD, 0) if dead else (self.queue.serial, 0)

class QCOMIface:
  """
  The kernel boundary: allocation, mapping, submission, waiting. Knows ioctls and never a packet or a program; ops_qcom knows the opposite.
  A GPU address (`HCQBuffer.va_addr`) and the CPU's view of the same memory are different things, also where a kernel makes the numbers equal.
  """
  io:type[FileIOInterface] = FileIOInterface
  renderers:list[type[Renderer]] = []
  api:Any = None
  kind, prefix, submit_src, retry = "", "", "", (errno.EINTR, errno.EAGAIN)
  count = 1

  def __init__(self, dev:QCOMDevice, device_id:int):
    if device_id != 0: raise RuntimeError(f"{type(self).__name__}: there is one Adreno 630 per machine, device {device_id} does not exist")
    self.dev, self.closed, self.pid, self.queue = dev, False, os.getpid(), getattr(dev, "queue", None) or Queue()
    self.maps, self.unfreed, self.opened = dict[int, int](), list[Callable[[], Any]](), False
    self.live, self.imports = LiveAllocs(self.queue), dict[int, DMABuf]()
    try:
      self._open()
      if self.chip_id >> 16 != 0x0603:
        raise RuntimeError(f"chip_id={self.chip_id:#010x} is not supported, supported: {', '.join(self.supported)}")
      self.gpu_id = (self.chip_id >> 24, (self.chip_id >> 16) & 0xFF, (self.chip_id >> 8) & 0xFF)
      self.rd, self.bos = capture(self.chip_id), dict[int, HCQBuffer]()
      self._open_queue()
      self.opened = True
    except BaseException:
      self.close()
      raise
  supported = ("Adreno 630 (chip_id 0x0603xxxx)",)

  # what a kernel provides. sizes in bytes, times in ms
  chip_id:int = 0
  def _open(self): raise NotImplementedError
  def _open_queue(self): raise NotImplementedError
  def _alloc(self, size:int) -> HCQBuffer: raise NotImplementedError
  def map_host(self, ptr:int, size:int) -> HCQBuffer: raise NotImplementedError
  def unmap_host(self, buf:HCQBuffer): raise NotImplementedError
  def _import(self, fd:int) -> tuple[int, int|None]: raise NotImplementedError # (handle, GPU address), None if the handle was imported before
  def _drop(self, handle:int): raise NotImplementedError
  def wait(self, fence:int, timeout_ms:int) -> bool: raise NotImplementedError
  def lost(self) -> str|None: raise NotImplementedError
  dead = "" # why the kernel takes no more work on this queue, for lost() to tell
  def dump(self) -> str: raise NotImplementedError # where Linux's dump of a hang is, a sentence
  def recover(self, inflight:list): raise NotImplementedError # takes new work from here on, and empties `inflight` at once with that
  def _close_queue(self): raise NotImplementedError
  def executing(self) -> bool: return False # kernels kill what runs for too long; only the virtual GPU may take its time

  def ioctl(self, req:str, stage:str, doing:str, /, *args, **kwargs) -> Any:
    """Calls `req` of this kernel's API; a signal or a full queue retries. Raises error(), OSError as its cause."""
    self.check_process()
    while True:
      try: return getattr(self.api, self.prefix + req)(self.fd, *args, **kwargs)
      except OSError as e:
        if e.errno in self.retry: continue
        raise self.error(stage, e.errno, self.prefix + req, f" while {doing}") from e

  def error(self, stage:str, err:int|None, call:str, doing:str="", work:str="", **said:str) -> QCOMError:
    """`call` gave `err`. `stage`: what was being done, `work` named; `said`: means= or again= in place of the stage's; node= is a path."""
    if stage != NODE and not self.opened: stage, doing = OPEN, f"{doing} of {self.fd.path}"
    elif stage == OPEN: stage = RENEW
    means, again = STAGES[stage]
    cause, do = next(REMEDY[k] for k in ((stage, err, self.kind), (stage, err), err, (stage, 0), 0) if k in REMEDY)
    what = f"{cause} ({call} gave {errname(err)}{doing})" if cause else f"{call} gave {errname(err)}{doing}"
    if means:=said.get("means", means): what = means.format(work=work or self.work()) + ": " + what
    return (QCOMMemoryError if err == errno.ENOMEM or (err == errno.ENOSPC and stage not in (OPEN, RENEW)) else QCOMError)(
      what, do.format(again=said.get("again", again), node=said.get("node", "")), stage)

  def work(self) -> str:
    """What is in flight, in words."""
    names = [repr(ansistrip(r.name)) for r in self.dev.inflight]
    return " and ".join(names[:1] + [f"{len(names) - 1} more"] * (len(names) > 1)) or "what was in flight"

  def check_process(self):
    if os.getpid() != self.pid: raise QCOMError(f"QCOM was opened by process {self.pid}: process {os.getpid()}, a fork of it, can't use it",
                                                "start workers with spawn, or open QCOM after the fork")
    if self.closed and not hasattr(self, "fd"): raise QCOMError("QCOM is closed", "Device['QCOM'].reopen()")

  def alloc(self, size:int) -> HCQBuffer:
    """`size` bytes, zeroed, readable and writable by GPU and CPU. Raises QCOMMemoryError telling full addresses from full memory."""
    try:
      buf = self._alloc(round_up(size, mmap.PAGESIZE))
      if self.rd is not None: self.bos[buf.meta.handle] = buf.offset(0, buf.size)
      buf.size, buf.view = size, buf.cpu_view().view(size=size)
      return buf
    except OSError as e: raise self.error(MAP, e.errno, "mmap", f" while mapping {size} bytes for the CPU") from e

  def undo(self, call:Callable, *args, **kwargs):
    """Releases what an allocation that failed has got so far. If that fails too, it is tried again later: the caller's error is the one to tell."""
    with contextlib.suppress(QCOMError): self.release(functools.partial(call, *args, **kwargs))
  def free(self, buf:HCQBuffer): self.release(functools.partial(self._free, buf.meta))
  def _free(self, bo:BO): raise NotImplementedError
  def release(self, call:Callable[[], Any]):
    """Makes `call`, once. What the kernel refuses to release is tried again with the next that goes, which it does not keep from being released."""
    with self.live.guarded():
      todo, self.unfreed, error = [*self.unfreed, call], [], None
      try:
        while todo:
          try: (c:=todo.pop())()
          except QCOMError as e:
            self.unfreed.append(c)
            error = error or e
      finally: self.unfreed += todo
    if error is not None: raise error

  # *** memory of others

  def import_fd(self, fd:int, offset:int, size:int) -> HCQBuffer:
    """
    `size` bytes at `offset` of a DMA-BUF. The kernel keeps the buffer until the last import of it is released; `fd` may be closed at once. Where the
    kernel knows a buffer again, it is imported once and counted. Raises QCOMError, ValueError for bytes that the buffer has not.
    """
    try: total = os.lseek(fd, 0, os.SEEK_END)
    except (OSError, OverflowError) as e:
      raise QCOMError(f"file descriptor {fd} is {'no DMA-BUF' if getattr(e, 'errno', None) == errno.ESPIPE else 'not open'}", DMABUFS) from e
    if offset < 0 or size <= 0 or offset + size > total: raise ValueError(f"a DMA-BUF of {total} bytes has no {size} bytes at offset {offset}")
    with self.live.lock:
      try: handle, va = self._import(fd)
      except QCOMError as e:
        if getattr(e.__cause__, "errno", None) not in (errno.EINVAL, errno.ENOTTY): raise
        raise QCOMError(f"file descriptor {fd} is no DMA-BUF: {e.what}", DMABUFS) from e
      if va is not None:
        try: self.imports[handle] = DMABuf(handle, va, total, os.dup(fd))
        except OSError as e:
          self.undo(self._drop, handle)
          raise self.error(MEMORY, e.errno, "dup", f" while importing file descriptor {fd}") from e
        self.live.add(va, total, handle, va, shared=True)
      (buf:=self.imports[handle]).refs += 1
    view = MMIOInterface(buf.cpu + offset, size, fmt='B') if buf.cpu else None
    return HCQBuffer(buf.va + offset, size, meta=buf, view=view, owner=self.dev)

  def release_fd(self, buf:HCQBuffer):
    with self.live.lock:
      (dmabuf:=buf.meta).refs -= 1
      if dmabuf.refs: return
      del self.imports[dmabuf.handle]
      self.live.remove(dmabuf.va)
      dmabuf.close()
      self.release(functools.partial(self._drop, dmabuf.handle))

  @contextlib.contextmanager
  def cpu_access(self, buf:HCQBuffer, write:bool):
    """Around what the CPU reads or writes of `buf`. Only memory of others, which the CPU may cache, needs anything."""
    if isinstance(buf.meta, DMABuf):
      if buf.view is None or (write and not buf.meta.writable):
        raise QCOMError(f"the exporter of this DMA-BUF lets no process map it to {'write' if write else 'read'}",
                        "copy it on the GPU, and use the copy")
      self.dmabuf_sync(buf.meta.fd, mode:=DMA_BUF_SYNC_WRITE if write else DMA_BUF_SYNC_READ)
      try: yield
      finally: self.dmabuf_sync(buf.meta.fd, mode | DMA_BUF_SYNC_END)
    else:
      if isinstance(buf.meta, HostMap) and self.queue.flush: CFUNC_FLUSH(self.queue.flush)(buf.cpu_view().addr, buf.size)
      yield

  def dmabuf_sync(self, fd:int, flags:int):
    """Linux, Documentation/driver-api/dma-buf.rst, CPU access."""
    while True:
      try: fcntl.ioctl(fd, DMA_BUF_IOCTL_SYNC, struct.pack("<Q", flags))
      except OSError as e:
        if e.errno in (errno.EINTR, errno.EAGAIN): continue
        raise self.error(MEMORY, e.errno, "DMA_BUF_IOCTL_SYNC", " before or after the CPU's access to a DMA-BUF") from e
      return

  def flush_pointer(self) -> int: return 0

  def open_node(self, path:str) -> FileIOInterface:
    try: return self.io(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as e: raise self.error(NODE, e.errno, f"open of {path}", node=path) from e

  def mapped(self, size:int, offset:int) -> int:
    self.maps[addr:=self.fd.mmap(0, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, offset)] = size
    return addr
  def unmap(self, bo:BO):
    if bo.cpu: self.io.munmap(bo.cpu, self.maps.pop(bo.cpu))
    bo.cpu = 0

  def link_submitter(self, arg:Any, cmd:Any, request:str, bo_flags:int=0):
    """Prepares the queue for the C submitter: `arg` is the ioctl's argument, `cmd` the one command it points to, both reused by every submit."""
    from tinygrad.runtime.ops_cpu import CPUProgram
    from tinygrad.device import Device
    q, compiler = self.queue, ClangCompiler(unwrap(Device["CPU"].arch).split(","), "compile_qcom_submit")
    numbers = {n: globals()[n] for n in C_NUMBERS} | {"RETRY0": self.retry[0], "RETRY1": self.retry[1], "BO_FLAGS": bo_flags,
                                                      "SUBMIT_FLAGS": msm_drm.MSM_PIPE_3D0, "NO_IMPLICIT": msm_drm.MSM_SUBMIT_NO_IMPLICIT}
    for typ in (type(arg), type(cmd)): # struct_field is a field's offset
      numbers |= {f"{typ.__name__.removeprefix('struct_')}_{n}": o for n,_,o,*_ in typ._real_fields_}
    src = "\n".join(["typedef unsigned int u32; typedef unsigned long long u64;", *(f"#define {k} {v}ull" for k,v in numbers.items()),
                     *(f"struct {name} {{ {' '.join(f'{typ} {n};' for n,typ in fields)} }};" for name,fields in FIELDS.items()),
                     SUBMIT_SRC, self.submit_src])
    if not hasattr(q, "prog"): q.prog = CPUProgram(Device["CPU"], TinyELF(compiler.compile_cached(src), "qcom_submit", Target(), ()))
    q.flush, self.hook = self.flush_pointer(), CFUNC_HOOK(self.record)
    q.hook = 0 if self.rd is None else unwrap(ctypes.cast(self.hook, ctypes.c_void_p).value)
    q.ioctl, q.errno_fn = self.io_pointer(), unwrap(ctypes.cast(getattr(libc.dll, "__errno_location"), ctypes.c_void_p).value)
    q.fd, q.arg, q.cmd, q.request = self.fd.fd, ctypes.addressof(arg), ctypes.addressof(cmd), ioctl_request(getattr(self.api, self.prefix + request))
    self.submit_args = (arg, cmd)

  def record(self, ib:int, size:int, nbos:int):
    """Called by the submitter before each submit if it is captured: what the kernel is about to be given, with contents. Disturbs no submit."""
    if (rd:=self.rd) is None or not rd.wants(): return
    def buffers():
      for handle in [b >> 32 for b in self.live.bos[:2*nbos:2]]:
        if (d:=self.imports.get(handle)) is not None: yield d.va, d.size, to_mv(d.cpu, d.size) if d.cpu else None
        elif (b:=self.bos.get(handle)) is not None: yield int(b.va_addr), b.size, to_mv(b.cpu_view().addr, b.size)
        else: yield from ((a.start, a.end - a.start, to_mv(a.host, a.end - a.start)) for a in self.live.arr[:len(self.live.starts)] if a.host)
    try: rd.submit(f"{ansistrip(self.dev.inflight[-1].name)}/{self.pid}: submit={rd.submits}", buffers(), [(ib, size // 4)])
    except OSError as e:
      self.rd, self.queue.hook = None, 0
      print(f"{rd.path}: the .rd capture ends before submit {rd.submits}: {e}", file=sys.stderr)

  def io_pointer(self) -> int: return unwrap(ctypes.cast(libc.dll.ioctl, ctypes.c_void_p).value)

  def submit_error(self, name:str, parts:int) -> QCOMError:
    """The failure of batch `name`, of `parts` submits, that the submitter kept, in words. Who clears queue.error makes the device
    accept work again."""
    err, arg = self.queue.error, self.queue.error_arg
    if err == NOT_LIVE and arg < LOST:
      return QCOMError(f"{name!r} references {arg:#x}, which is not allocated: a buffer was freed, or the device reopened, since it was captured",
                       "capture it again (TinyJit.reset)")
    if err in (NOT_LIVE, TAINTED): return self.undefined(arg)
    if err == MISALIGNED:
      return QCOMError(f"a kernel of {name!r} takes memory at {arg:#x} as an image, which has to begin at a multiple of 64 bytes",
                       "copy that view first, with Context(IMAGE=0): x = x.clone().realize(), or compute with IMAGE=0")
    said = dict[str, str]()
    if (queued:=err == QUEUED) or arg > 0:
      said["means"] = "{work} may have run, its results are refused" if queued else f"{{work}} ran {arg} of its {parts} parts only"
      said["again"] = "write anew what it updates in place and run it again"
    return self.error(SUBMIT, err, self.prefix + self.submit_name, work=repr(name), **said)
  submit_name = ""
  def undefined(self, addr:int) -> QCOMError:
    if addr >= LOST: return QCOMError("a buffer has no contents: what should have written it failed, or the device was reopened", "make it anew")
    again = "" if (a:=self.live.find(addr)) is not None and a.tainted == BEYOND_REPAIR else "run again what was to write it, or "
    return QCOMError(f"the buffer at {addr:#x} was to be written by a submit that failed, its contents are undefined",
                     f"{again}copy all of it from the host again")

  def close(self):
    """
    Releases queue, handles, mappings and fd. Works on a half-opened interface, may be repeated, goes on where it was interrupted, leaves the parent's
    device alone in a forked child.
    """
    self.closed = True
    if os.getpid() != self.pid: return
    while self.imports: self.imports.popitem()[1].close()
    if hasattr(self, "fd"):
      with contextlib.suppress(QCOMError): self._close_queue() # closing the node, which cannot fail, releases it too
      fd = self.__dict__.pop("fd")
      try: fd.__del__()                                        # now: the traceback of a failed open may hold on to the file
      finally: del fd.fd
    while self.maps: self.io.munmap(*self.maps.popitem())
  def device_fini(self): self.close()

ERRNAMES = {v:k for k,v in vars(errno).items() if k[0] == "E" and k not in ("EDEADLOCK", "EWOULDBLOCK", "ENOTSUP")}
def errname(err:int|None) -> str: return ERRNAMES.get(err or 0, str(err))
DMABUFS = "pass one that /dev/dma_heap/*, a GPU or a camera driver exports, or that /dev/udmabuf makes of a memfd"
def ioctl_request(fn:functools.partial) -> int:
  idir, base, nr, st = fn.args
  return (idir << 30) | (ctypes.sizeof(st) << 16) | (base << 8) | nr

DMA_BUF_IOCTL_SYNC, DMA_BUF_SYNC_READ, DMA_BUF_SYNC_WRITE, DMA_BUF_SYNC_END = 0x40086200, 1, 2, 4 # linux/dma-buf.h
CFUNC_FLUSH, CFUNC_HOOK = ctypes.CFUNCTYPE(None, U64, U64), ctypes.CFUNCTYPE(None, U64, U64, U64)

class DMABuf:
  """An imported DMA-BUF: the kernel's handle, GPU address, size in bytes, a descriptor and a CPU mapping of our own (0 if there is none)."""
  def __init__(self, handle:int, va:int, size:int, fd:int):
    self.handle, self.va, self.size, self.fd, self.refs, self.cpu = handle, va, size, fd, 0, 0
    self.writable = False
    for prot in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ):
      with contextlib.suppress(OSError):
        self.cpu = FileIOInterface._mmap(0, size, prot, mmap.MAP_SHARED, fd, 0)
        self.writable = bool(prot & mmap.PROT_WRITE)
        break
  def close(self):
    if self.cpu: FileIOInterface.munmap(self.cpu, self.size)
    os.close(self.fd)

class HostMap:
  """Host memory that KGSL mapped. `va`: GPU address of its first page, None for memory of another allocation, which still owns it."""
  def __init__(self, va:int|None): self.va = va

class BO:
  """What a kernel knows an allocation by. `cpu`: address of the CPU mapping, size in bytes."""
  def __init__(self, handle:int, cpu:int, size:int): self.handle, self.cpu, self.size = handle, cpu, size

class MSMIface(QCOMIface):
  """Mainline Linux, drivers/gpu/drm/msm. Buffers have an iova of their own and are visible only to submits that list them."""
  kind, api, prefix, submit_name, renderers = "MSM", msm_drm, "DRM_IOCTL_", "MSM_GEM_SUBMIT", [IR3Renderer]
  submit_src = """static int kernel_submit(struct queue* q, struct alloc* ib, u64 addr, u64 size, u32 nbos, u32 shared) {
  AT(u32, q->arg, drm_msm_gem_submit_flags) = SUBMIT_FLAGS | (shared ? 0 : NO_IMPLICIT);
  AT(u32, q->arg, drm_msm_gem_submit_nr_bos) = nbos; AT(u64, q->arg, drm_msm_gem_submit_bos) = q->bos;
  AT(u32, q->cmd, drm_msm_gem_submit_cmd_submit_idx) = 0; AT(u32, q->cmd, drm_msm_gem_submit_cmd_submit_offset) = (u32)(addr - ib->base);
  AT(u32, q->cmd, drm_msm_gem_submit_cmd_size) = (u32)size;
  int err = do_ioctl(q);
  if (!err) q->fence = AT(u32, q->arg, drm_msm_gem_submit_fence);
  return err;
}
"""
  def _open(self):
    other, failed = list[str](), list[QCOMError]()
    for node in [p for i in range(128, 192) if self.io.exists(p:=f"/dev/dri/renderD{i}")]:
      try:
        self.fd = self.open_node(node)
        name = (ctypes.c_ubyte * 32)()
        v = self.ioctl("VERSION", OPEN, "asking for the driver", name_len=32, name=ctypes.cast(name, ctypes.POINTER(ctypes.c_ubyte)))
        if (drv:=bytes(name[:v.name_len]).decode()) == "msm": break
        other.append(f"{node} is {drv}")
      except QCOMError as e: failed.append(e)
      self.__dict__.pop("fd", None)
    else: raise failed[0] if failed else QCOMError(f"{CLOSED}: there is no msm render node ({'; '.join(other) or 'no /dev/dri/renderD*'})", NO_NODE)
    self.chip_id = self.param("CHIP_ID")

  def _open_queue(self):
    levels = self.param("PRIORITIES")
    self.queue_id = self.ioctl("MSM_SUBMITQUEUE_NEW", OPEN, "creating the submit queue", prio=(priority() - 1) * levels // 15).id
    self.faults = self.told = self._faults()
    cmd = msm_drm.struct_drm_msm_gem_submit_cmd(type=msm_drm.MSM_SUBMIT_CMD_BUF)
    arg = msm_drm.struct_drm_msm_gem_submit(nr_cmds=1, cmds=ctypes.addressof(cmd), queueid=self.queue_id)
    self.link_submitter(arg, cmd, self.submit_name, msm_drm.MSM_SUBMIT_BO_READ | msm_drm.MSM_SUBMIT_BO_WRITE)

  def param(self, name:str) -> int:
    return self.ioctl("MSM_GET_PARAM", OPEN, f"reading {name}", pipe=msm_drm.MSM_PIPE_3D0, param=getattr(msm_drm, f"MSM_PARAM_{name}")).value

  def _alloc(self, size:int) -> HCQBuffer:
    if size >= 1 << 32: raise QCOMMemoryError(f"{size} bytes are too many for one buffer, which has to be below 4 GiB", "use smaller tensors")
    h = self.ioctl("MSM_GEM_NEW", MEMORY, f"allocating {size} bytes", size=size, flags=msm_drm.MSM_BO_WC).handle
    try:
      iova = self.ioctl("MSM_GEM_INFO", MEMORY, "reserving a GPU address", handle=h, info=msm_drm.MSM_INFO_GET_IOVA).value
      cpu = self.mapped(size, self.ioctl("MSM_GEM_INFO", MEMORY, "mapping for the CPU", handle=h, info=msm_drm.MSM_INFO_GET_OFFSET).value)
    except BaseException:
      self.undo(self.ioctl, "GEM_CLOSE", FREE, "undoing an allocation", handle=h)
      raise
    return HCQBuffer(iova, size, meta=BO(h, cpu, size), view=MMIOInterface(cpu, size, fmt='B'), owner=self.dev)

  def _free(self, bo:BO):
    self.unmap(bo)
    self.ioctl("GEM_CLOSE", FREE, f"freeing {bo.size} bytes", handle=bo.handle)

  def map_host(self, ptr:int, size:int) -> HCQBuffer:
    raise QCOMError(f"mainline Linux can't map host memory ({ptr:#x}, {size} bytes) for the GPU",
                    "copy it into a tensor, or pass the DMA-BUF that holds it: Tensor.from_blob(None, shape, fd=, offset=)")

  def _import(self, fd:int) -> tuple[int, int|None]:
    handle = self.ioctl("PRIME_FD_TO_HANDLE", MEMORY, f"importing file descriptor {fd}", fd=fd).handle
    if handle in self.imports: return handle, None # the kernel gives one handle for one buffer, and one GEM_CLOSE takes it away
    # nor may a release of it that failed be tried again
    self.unfreed = [c for c in self.unfreed if not (isinstance(c, functools.partial) and c.func == self._drop and c.args == (handle,))]
    try: return handle, self.ioctl("MSM_GEM_INFO", MEMORY, "reserving a GPU address", handle=handle, info=msm_drm.MSM_INFO_GET_IOVA).value
    except BaseException:
      self.undo(self._drop, handle)
      raise
  def _drop(self, handle:int): self.ioctl("GEM_CLOSE", FREE, "releasing an imported DMA-BUF", handle=handle)

  def wait(self, fence:int, timeout_ms:int) -> bool:
    """True once `fence` of the submit queue is retired, False after `timeout_ms`. Also True for a submit that hang recovery killed: see lost()."""
    sec, ms = divmod(int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1000) + timeout_ms, 1000)
    arg = msm_drm.struct_drm_msm_wait_fence() # filled in here: a third of the time that its constructor takes with keywords
    arg.fence, arg.queueid, arg.timeout.tv_sec, arg.timeout.tv_nsec = fence, self.queue_id, sec, ms * 1000000
    try: self.ioctl("MSM_WAIT_FENCE", WAIT, "waiting", __payload=arg)
    except QCOMError as e:
      if getattr(e.__cause__, "errno", None) == errno.ETIMEDOUT: return False
      raise
    return True

  def _faults(self) -> int:
    val = ctypes.c_uint32()
    self.ioctl("MSM_SUBMITQUEUE_QUERY", WAIT, "reading the fault counter", id=self.queue_id, param=msm_drm.MSM_SUBMITQUEUE_PARAM_FAULTS,
               data=ctypes.addressof(val), len=4)
    return val.value

  def lost(self) -> str|None:
    """Why submits since the last recover() may not have run, if so. The fence of a killed submit is signalled without error: only counters tell."""
    self.told = self._faults()
    return f"a hang ({self.told - self.faults} hang recovery of the submit queue)" if self.told != self.faults else None

  def dump(self) -> str:
    try: found = any(name.startswith("devcd") for name in self.io("/sys/class/devcoredump").listdir())
    except OSError: found = False
    return "Linux's dump is in /sys/class/devcoredump/devcd*/data (root; kept until read or for 5 minutes)" if found else \
           "Linux left no dump"

  def recover(self, inflight:list): self.faults, inflight[:] = self.told, [] # a legacy address space and its queues survive a hang recovery

  def _close_queue(self):
    if hasattr(self, "queue_id"): self.ioctl("MSM_SUBMITQUEUE_CLOSE", FREE, "closing the submit queue", self.queue_id)

def priority() -> int:
  """QCOM_PRIORITY in KGSL's terms: 1, most important, to 15, the default, since a compositor shares the ring. Raises RuntimeError for others."""
  if 1 <= (prio:=getenv("QCOM_PRIORITY", 15)) <= 15: return prio
  raise RuntimeError(f"QCOM_PRIORITY={prio} is not a priority. Do: choose 1 (most important) to 15 (least, the default)")

def kgsl_flag(name:str, val:int) -> int: return (val << getattr(kgsl, f"{name}_SHIFT")) & getattr(kgsl, f"{name}_MASK")

class KGSLIface(QCOMIface):
  """Downstream Linux (msm-4.9 to 5.4), drivers/gpu/msm/kgsl. Every mapped buffer is visible to every submit, at its CPU address."""
  kind, api, prefix, submit_name, node = "KGSL", kgsl, "IOCTL_KGSL_", "GPU_COMMAND", "/dev/kgsl-3d0"
  HUNG = "a hang or a page fault" # what KGSL tells apart by the reset status only
  renderers = [QCOMCLRenderer, IR3Renderer] if ARM64 else [IR3Renderer, QCOMCLRenderer] # the vendor's compiler is an arm64 library
  submit_src = """static int kernel_submit(struct queue* q, struct alloc* ib, u64 addr, u64 size, u32 nbos, u32 shared) {
  AT(u64, q->cmd, kgsl_command_object_gpuaddr) = addr; AT(u64, q->cmd, kgsl_command_object_size) = size;
  int err = do_ioctl(q);
  if (!err) q->fence = AT(u32, q->arg, kgsl_gpu_command_timestamp);
  return err;
}
"""
  def _open(self):
    self.fd, info = self.open_node(self.node), kgsl.struct_kgsl_devinfo()
    self.ioctl("DEVICE_GETPROPERTY", OPEN, "identifying the GPU", type=kgsl.KGSL_PROP_DEVICE_INFO, value=ctypes.addressof(info),
               sizebytes=ctypes.sizeof(info))
    self.chip_id = info.chip_id
    if PROFILE: self.set_idle_timer(4000000000) # the always-on counter stands still while the GPU sleeps

  def set_idle_timer(self, ms:int):
    with contextlib.suppress(OSError): self.io("/sys/class/kgsl/kgsl-3d0/idle_timer", os.O_WRONLY).write(str(ms)) # root only on most systems

  def create_context(self) -> int:
    flags = kgsl.KGSL_CONTEXT_PREAMBLE | kgsl.KGSL_CONTEXT_PWR_CONSTRAINT | kgsl.KGSL_CONTEXT_NO_FAULT_TOLERANCE | kgsl.KGSL_CONTEXT_NO_GMEM_ALLOC \
      | kgsl_flag("KGSL_CONTEXT_PRIORITY", priority()) \
      | kgsl_flag("KGSL_CONTEXT_PREEMPT_STYLE", kgsl.KGSL_CONTEXT_PREEMPT_STYLE_FINEGRAIN)
    ctx = self.ioctl("DRAWCTXT_CREATE", OPEN, "creating the context", flags=flags).drawctxt_id
    level = ctypes.c_uint32(kgsl.KGSL_CONSTRAINT_PWR_MAX)
    constraint = kgsl.struct_kgsl_device_constraint(type=kgsl.KGSL_CONSTRAINT_PWRLEVEL, context_id=ctx, data=ctypes.addressof(level), size=4)
    try: self.ioctl("SETPROPERTY", OPEN, "asking for full clocks", type=kgsl.KGSL_PROP_PWR_CONSTRAINT, value=ctypes.addressof(constraint),
                    sizebytes=ctypes.sizeof(constraint))
    except QCOMError as e: # results are the same without
      if DEBUG >= 1: print(f"QCOM runs at the clocks that the GPU's load asks for, which may be slower: {e.what.partition(': ')[2]}")
    return ctx

  def _open_queue(self):
    self.ctx = self.create_context()
    cmd = kgsl.struct_kgsl_command_object(flags=kgsl.KGSL_CMDLIST_IB)
    arg = kgsl.struct_kgsl_gpu_command(cmdlist=ctypes.addressof(cmd), cmdsize=ctypes.sizeof(cmd), numcmds=1, context_id=self.ctx)
    self.link_submitter(arg, cmd, self.submit_name)

  def _alloc(self, size:int) -> HCQBuffer:
    obj = self.ioctl("GPUOBJ_ALLOC", MEMORY, f"allocating {size} bytes", size=size,
                     flags=kgsl_flag("KGSL_MEMALIGN", 12) | kgsl.KGSL_MEMFLAGS_USE_CPU_MAP)
    try: va = self.mapped(obj.mmapsize, obj.id * 0x1000)
    except BaseException:
      self.undo(self.ioctl, "GPUOBJ_FREE", FREE, "undoing an allocation", id=obj.id)
      raise
    return HCQBuffer(va, size, meta=BO(obj.id, va, obj.mmapsize), view=MMIOInterface(va, size, fmt='B'), owner=self.dev)

  def _free(self, bo:BO):
    self.ioctl("GPUOBJ_FREE", FREE, f"freeing {bo.size} bytes", id=bo.handle)
    self.unmap(bo)

  def map_host(self, ptr:int, size:int) -> HCQBuffer:
    """Maps caller-owned memory. KGSL does not keep it coherent: every submit that uses it flushes it first. KGSL's own memory is mapped already."""
    start, end = ptr & ~(mmap.PAGESIZE - 1), round_up(ptr + size, mmap.PAGESIZE)
    view = MMIOInterface(ptr, size, fmt='B')
    try: va = self.ioctl("MAP_USER_MEM", HOST, f"mapping {size} bytes of host memory", hostptr=start, len=end - start,
                         memtype=kgsl.KGSL_USER_MEM_TYPE_ADDR).gpuaddr
    except QCOMError as e:
      if getattr(e.__cause__, "errno", None) != errno.EFAULT or self.live.find(ptr) is None: raise
      return HCQBuffer(ptr, size, meta=HostMap(None), view=view, owner=self.dev)
    self.live.add(va + ptr - start, size, 0, va, host=ptr)
    return HCQBuffer(va + ptr - start, size, meta=HostMap(va), view=view, owner=self.dev)

  def unmap_host(self, buf:HCQBuffer):
    if buf.meta.va is None: return
    self.live.remove(int(buf.va_addr))
    self.release(lambda: self.ioctl("SHAREDMEM_FREE", FREE, f"unmapping {buf.size} bytes of host memory", gpuaddr=buf.meta.va))

  def _import(self, fd:int) -> tuple[int, int|None]:
    what, priv = f"importing file descriptor {fd}", ctypes.c_int32(fd)
    obj = self.ioctl("GPUOBJ_IMPORT", MEMORY, what, priv=ctypes.addressof(priv), priv_len=4, type=kgsl.KGSL_USER_MEM_TYPE_DMABUF).id
    try: return obj, self.ioctl("GPUOBJ_INFO", MEMORY, what, id=obj).gpuaddr
    except BaseException:
      self.undo(self._drop, obj)
      raise
  def _drop(self, handle:int): self.ioctl("GPUOBJ_FREE", FREE, "releasing an imported DMA-BUF", id=handle)

  def flush_pointer(self) -> int: return flush_dcache().addr if ARM64 else 0 # only arm64 has GPUs that need it

  def wait(self, fence:int, timeout_ms:int) -> bool:
    """True once `fence`, a timestamp of the context, is retired, False after `timeout_ms`. A lost context is reported by lost()."""
    ctx = self.ctx
    try: self.ioctl("DEVICE_WAITTIMESTAMP_CTXTID", WAIT, "waiting", context_id=ctx, timestamp=fence, timeout=min(max(1, timeout_ms), 0xffffffff))
    except QCOMError as e:
      if (err:=getattr(e.__cause__, "errno", None)) == errno.ETIMEDOUT: return False
      if err not in (errno.EDEADLK, errno.ENOENT): raise
      with self.live.lock: # another thread may have replaced the context since
        if ctx == self.ctx: self.dead = f"{self.HUNG} (IOCTL_KGSL_DEVICE_WAITTIMESTAMP_CTXTID gave {errname(err)})"
    return True

  def lost(self) -> str|None:
    """Why submits since the last recover() may not have run, if so."""
    stat = ctypes.c_uint32(self.ctx)
    self.ioctl("DEVICE_GETPROPERTY", WAIT, "reading the reset status", type=kgsl.KGSL_PROP_GPU_RESET_STAT, value=ctypes.addressof(stat), sizebytes=4)
    if stat.value != kgsl.KGSL_CTX_STAT_NO_ERROR: # told once
      self.dead = f"{self.HUNG} ({kgsl.enum_kgsl_ctx_reset_stat.get(stat.value, f'reset status {stat.value}')})"
    return self.dead or None

  def dump(self) -> str: return "If Linux made a dump, it is in /sys/class/kgsl/kgsl-3d0/snapshot/dump (root)"

  def recover(self, inflight:list):
    """A context that faulted never comes back; memory belongs to the process and stays."""
    old, new, arg, q = self.ctx, self.create_context(), self.submit_args[0], self.queue
    arg.context_id, self.ctx, q.fence, self.dead, inflight[:] = new, new, 0, "", [] # timestamps are a context's
    with contextlib.suppress(QCOMError): self.ioctl("DRAWCTXT_DESTROY", FREE, "dropping the lost context", drawctxt_id=old)

  def submit_error(self, name:str, parts:int) -> QCOMError:
    if (err:=self.queue.error) in (errno.EDEADLK, errno.ENOENT): self.dead = self.HUNG
    e = super().submit_error(name, parts)
    if err == errno.EPROTO: # an earlier one faulted; this one is queued all the same, without its timestamp being told
      self.queue.fence = self.ioctl("CMDSTREAM_READTIMESTAMP_CTXTID", WAIT, "looking for what is queued", context_id=self.ctx,
                                    type=kgsl.KGSL_TIMESTAMP_QUEUED).timestamp
    return e

  def _close_queue(self):
    if PROFILE: self.set_idle_timer(10)
    if hasattr(self, "ctx"): self.ioctl("DRAWCTXT_DESTROY", FREE, "closing the context", drawctxt_id=self.ctx)

@functools.cache
def flush_dcache() -> CPUProgram:
  """void flush(u64 addr, u64 size): writes the CPU's cache lines of a range back to memory and drops them (DC CIVAC, Arm ARM D7.5)."""
  from tinygrad.runtime.ops_cpu import CPUProgram
  from tinygrad.device import Device
  src = "void flush(unsigned long p, unsigned long n) { for (unsigned long end = p + n, i = p & ~63ul; i < end; i += 64) " \
        "__asm__ volatile(\"dc civac, %0\" :: \"r\"(i) : \"memory\"); __asm__ volatile(\"dsb sy\" ::: \"memory\"); }"
  lib = ClangCompiler(unwrap(Device["CPU"].arch).split(","), "compile_qcom_flush").compile_cached(src)
  return CPUProgram(Device["CPU"], TinyELF(lib, "flush", Target(), ()))

def _mock(iface:type[QCOMIface]) -> type[QCOMIface]:
  # the virtual Adreno 630 lives in the test tree: it is imported when it is asked for by name, never as a fallback
  class Mock(iface): # type: ignore[valid-type,misc]
    def __init__(self, dev:QCOMDevice, device_id:int):
      try: self.virtual = importlib.import_module("test.mockgpu.qcom")
      except ImportError as e: raise RuntimeError(f"the virtual Adreno 630 comes with the source tree only: {e}") from e
      self.io = type("VirtualFileIO", (self.virtual.MockFileIOInterface, FileIOInterface), {})
      super().__init__(dev, device_id)
    def io_pointer(self) -> int: return self.virtual.ioctl_pointer()
    def flush_pointer(self) -> int: return self.virtual.flush_pointer() if issubclass(iface, KGSLIface) else 0
    def dmabuf_sync(self, fd:int, flags:int): self.virtual.dmabuf_sync(fd, flags)
    def executing(self) -> bool: return self.virtual.current().gpu.executing()
  return type(f"MOCK{iface.__name__}", (Mock,), {})

ifaces = [MSMIface, KGSLIface, _mock(MSMIface), _mock(KGSLIface)]
