"""What both kernel models share: ABI layouts, user copies, shared memory, address ranges, fences, dma-buf and sync_file descriptors.

A model decodes raw bytes with layouts that a C compiler produced (abi/*.json) and never sees a client's bindings. User pointers are read and
written through /proc/self/mem, so that a bad pointer is EFAULT here as it is in a kernel, not a crash of the test process.
"""
from __future__ import annotations
import bisect, collections, contextlib, ctypes, dataclasses, errno, functools, heapq, json, mmap, operator, os, pathlib, struct, sys, time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
import numpy as np
from test.mockgpu.qcom.collector import outside_python

PAGE = 4096
ENOTSUPP, ETOOSMALL = 524, 525                          # kernel-private codes that both drivers leak to userspace
JIFFY_NS = 4_000_000                                    # HZ=250, arm64 defconfig
MAP_SHARED, MAP_PRIVATE, MAP_TYPE, MAP_FIXED, MAP_FIXED_NOREPLACE = 1, 2, 0xf, 0x10, 0x100000

class Process(NamedTuple):
  """What a kernel knows of the calling task."""
  comm: str
  cmdline: str

@functools.cache
def process() -> Process:
  comm, cmdline = (pathlib.Path("/proc/self", n).read_bytes() for n in ("comm", "cmdline"))
  return Process(comm.decode(errors="replace").strip(), cmdline.replace(b"\0", b" ").decode(errors="replace").strip())

_TINYGRAD = f"{os.sep}tinygrad{os.sep}"
# frames that say nothing: these models, Python's own library, and how tinygrad calls ioctl
_PLUMBING = (str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).resolve().parent), str(pathlib.Path(os.__file__).parent), "<")

def whence() -> str:
  """Where in the client an ioctl came from: its innermost frame and, if that is in tinygrad, the innermost one outside of it."""
  out, f = list[str](), sys._getframe(1)
  while f is not None and len(out) < 2:
    file = f.f_code.co_filename
    if not file.startswith(_PLUMBING) and f.f_code.co_name not in ("_do_ioctl", "ioctl") and (not out or _TINYGRAD not in file):
      out.append(f"{os.sep.join(file.split(os.sep)[-3:])}:{f.f_lineno} in {f.f_code.co_name}")
      if _TINYGRAD not in file: break
    f = f.f_back # type: ignore[assignment]
  return ", called from ".join(out)

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def error(code: int, why: str) -> OSError:
  """The OSError a client sees. `why` is what a kernel would put in its log; it travels as a note, since errno is all a real client gets."""
  e = OSError(code, os.strerror(code))
  e.add_note(why)
  return e

def real_mmap(start: int, size: int, prot: int, flags: int, fd: int, offset: int = 0) -> int:
  """mmap(2): the address. Raises OSError."""
  addr = libc.mmap(start, size, prot, flags, fd, offset)
  if addr in (None, ctypes.c_void_p(-1).value): raise OSError(e:=ctypes.get_errno(), os.strerror(e))
  return addr

# *** ABI layouts

class Layout:
  """One struct of the kernel's ABI: `unpack` gives a mutable record, `pack` its bytes. Nested structs and arrays stay bytes.

  Of the members of a union, the first named one is decoded.
  """
  def __init__(self, name: str, size: int, fields: dict[str, list[int]], signed: Iterable[str] = ()):
    fmt, pos, names = "<", 0, []
    for field, (off, n) in sorted(fields.items(), key=lambda kv: kv[1][0]):
      if off < pos: continue
      code = {1: "B", 2: "H", 4: "I", 8: "Q"}.get(n, f"{n}s")
      fmt += "x" * (off - pos) + (code.lower() if field in signed and len(code) == 1 else code)
      names.append(field.lstrip("_") if field != "or" else "or_")
      pos = off + n
    self.name, self.size, self.struct = name, size, struct.Struct(fmt + "x" * (size - pos))
    self.record: Any = dataclasses.make_dataclass(name, names, slots=True)
    get = operator.attrgetter(*names)
    self._values: Callable[[Any], Iterable[Any]] = get if len(names) > 1 else lambda rec: (get(rec),)

  def unpack(self, data: bytes) -> Any: return self.record(*self.struct.unpack(data))
  def pack(self, rec: Any) -> bytes: return self.struct.pack(*self._values(rec))

class Abi:
  """Layouts, constants and ioctl numbers of one abi/*.json."""
  def __init__(self, file: str):
    self.facts = json.loads((pathlib.Path(__file__).parent / "abi" / file).read_text())
    self.ioctls: dict[str, int] = self.facts["ioctls"]

  @functools.cache
  def layout(self, name: str) -> Layout:
    if name == "u32": return Layout("u32", 4, {"value": [0, 4]})
    s = self.facts["structs"][name]
    return Layout(name, s["size"], s["fields"], s.get("signed", ()))

  def __getattr__(self, name: str) -> int:
    try: return self.facts["constants"][name]
    except KeyError: raise AttributeError(f"{name} is not in the kernel's header") from None

# *** user memory

_mem_fd = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)

def copy_from_user(addr: int, size: int) -> bytes:
  """EFAULT unless all `size` bytes at `addr` are mapped."""
  try: data = os.pread(_mem_fd, size, addr) if size else b""
  except (OSError, OverflowError): data = None
  if data is None or len(data) != size: raise error(errno.EFAULT, f"{size} bytes at {addr:#x} are not readable")
  return data

def copy_to_user(addr: int, data: bytes) -> None:
  """EFAULT unless all bytes at `addr` are mapped. Write protection is not checked (/proc/self/mem overrides it)."""
  try: done = os.pwrite(_mem_fd, data, addr) if data else 0
  except (OSError, OverflowError): done = -1
  if done != len(data): raise error(errno.EFAULT, f"{len(data)} bytes at {addr:#x} are not writable")

# *** address ranges and ids

class Ranges:
  """First-fit allocator over [start, start+size) in bytes; a released range is available at once, as drm_mm gives it."""
  def __init__(self, start: int, size: int):
    self.start, self.size = start, size
    self._free: list[tuple[int, int]] = [(start, start + size)]    # sorted, never adjacent

  def alloc(self, size: int, align: int = PAGE) -> int | None:
    for i, (a, b) in enumerate(self._free):
      if (at:=-(-a // align) * align) + size <= b:
        self._free[i:i+1] = [(x, y) for x, y in ((a, at), (at + size, b)) if x < y]
        return at
    return None

  def reserve(self, at: int, size: int) -> bool:
    """Takes exactly [at, at+size); False if any of it is taken or outside."""
    i = bisect.bisect_right(self._free, (at, 1 << 65)) - 1
    if i < 0 or at + size > self._free[i][1]: return False
    a, b = self._free[i]
    self._free[i:i+1] = [(x, y) for x, y in ((a, at), (at + size, b)) if x < y]
    return True

  def release(self, at: int, size: int) -> None:
    i, a, b = bisect.bisect(self._free, (at, 0)), at, at + size
    if i < len(self._free) and self._free[i][0] == b: b = self._free.pop(i)[1]
    if i and self._free[i-1][1] == a: a, i = self._free.pop(i-1)[0], i - 1
    self._free.insert(i, (a, b))

  @property
  def used(self) -> int: return self.size - sum(b - a for a, b in self._free)

class Ids:
  """Lowest free id first, as the kernel's idr hands out GEM handles and KGSL object ids."""
  def __init__(self, first: int = 1, limit: int = 1 << 31): self._next, self._limit, self._freed = first, limit, list[int]()
  def take(self) -> int | None:
    if self._freed: return heapq.heappop(self._freed)
    if self._next >= self._limit: return None
    self._next += 1
    return self._next - 1
  def give_back(self, i: int) -> None: heapq.heappush(self._freed, i)

# *** fences

class Fence:
  """A dma_fence: signals once, never with an error (both drivers signal killed work as if it had finished). Access under the machine's lock."""
  __slots__ = ("context", "seqno", "signalled", "callbacks", "job")
  def __init__(self, context: object, seqno: int, job: Any = None):
    self.context, self.seqno, self.job, self.signalled, self.callbacks = context, seqno, job, False, None

  def then(self, call: Callable[[], None]) -> None:
    if self.signalled: call()
    elif self.callbacks is None: self.callbacks = [call]
    else: self.callbacks.append(call)

  def signal(self) -> None:
    if self.signalled: return
    self.signalled, calls, self.callbacks = True, self.callbacks, None
    for call in calls or (): call()

class Resv:
  """A dma_resv: the last unsignalled fence of each fence context, writers and readers apart."""
  __slots__ = ("writers", "readers")
  def __init__(self) -> None: self.writers, self.readers = dict[object, Fence](), dict[object, Fence]()

  def add(self, fence: Fence, write: int) -> None:
    if write:
      self.writers[fence.context] = fence
      if self.readers: self.readers.pop(fence.context, None)
    else: self.readers[fence.context] = fence

  def remove(self, fence: Fence) -> None:
    if self.writers.get(c:=fence.context) is fence: del self.writers[c]
    if self.readers and self.readers.get(c) is fence: del self.readers[c]

  def busy(self, write: bool) -> list[Fence]:
    """What a writer (all fences) or a reader (only writers' fences) has to wait for."""
    out = [f for f in self.writers.values() if not f.signalled]
    return out + [f for f in self.readers.values() if not f.signalled] if write else out

# *** shared memory, dma-buf, sync_file

LINE = 64                                               # bytes of a CPU cache line

class CpuCache:
  """A CPU's cached view of memory whose other readers do not snoop: lines of `cpu` that differ from `seen`, the bytes as they were when CPU and
  memory last agreed, are dirty. Addresses of `size` bytes each, multiples of LINE."""
  def __init__(self, cpu: int, ram: int, seen: int, size: int):
    self.cpu, self.ram, self.seen = (np.ctypeslib.as_array((ctypes.c_uint64 * (size // 8)).from_address(a)).reshape(-1, LINE // 8)
                                     for a in (cpu, ram, seen))

  def maintain(self, offset: int, size: int, clean: bool = False, invalidate: bool = False) -> None:
    """dc cvac, ivac or both on the lines of [offset, offset + size): dirty lines are written to memory, or lost; others are fetched again.

    The first and the last line may hold something else, such as the heap's bookkeeping. The CPU goes on writing it and loses nothing of that, nor
    does it get there what devices wrote: the model of UCHE writes whole lines back, with what they held when they were read."""
    cpu, ram, seen = (x[offset // LINE:-(-(offset + size) // LINE)] for x in (self.cpu, self.ram, self.seen))
    if clean:
      dirty = (cpu != seen).any(1)
      seen[dirty] = ram[dirty] = cpu[dirty]
    if invalidate:
      changed = ram != (seen if clean else cpu)         # words that devices wrote; lines that are dirty again stay so
      words, first = changed.reshape(-1), offset % LINE // 8
      words[:first] = words[first + -(-(offset % 8 + size) // 8):] = False
      cpu[changed] = seen[changed] = ram[changed]
      if not clean: seen[:] = ram

class Shmem:
  """`size` bytes of zeroed shared memory (a memfd): mapped once for the GPU on first use, any number of times for the CPU, exported by dup.
  With `ram_fd` the GPU sees that memory and `fd` is what cached CPU mappings see of it."""
  def __init__(self, size: int, name: str = "qcom-bo", fd: int | None = None, ram_fd: int | None = None):
    self.size, self.resv, self.dmabuf, self.ram_fd = size, Resv(), False, ram_fd
    self.fd, self._ram = os.memfd_create(name, os.MFD_CLOEXEC) if fd is None else fd, 0
    try:
      if fd is None: os.ftruncate(self.fd, size)
    except BaseException:
      os.close(self.fd)
      raise

  @property
  def ram(self) -> int:
    if not self._ram:
      self._ram = real_mmap(0, self.size, mmap.PROT_READ | mmap.PROT_WRITE, MAP_SHARED, self.fd if self.ram_fd is None else self.ram_fd)
    return self._ram

  def bytes(self) -> bytes: return ctypes.string_at(self.ram, self.size)
  def key(self) -> tuple[int, int]: return inode(self.fd)

  def exported_fds(self) -> int:
    """How many other descriptors of this process refer to the memory: open dma-buf files."""
    mine, n = self.key(), 0
    for name in os.listdir("/proc/self/fd"):
      try: n += int(name) != self.fd and inode(int(name)) == mine
      except OSError: pass
    return n

  def release(self) -> None:
    if self._ram: libc.munmap(self._ram, self.size)
    for fd in (self.fd, self.ram_fd):
      if fd is not None: os.close(fd)
    self._ram, self.fd, self.ram_fd = 0, -1, None

def inode(fd: int) -> tuple[int, int]:
  try: st = os.fstat(fd)
  except (OSError, OverflowError): raise error(errno.EBADF, f"{fd} is not an open descriptor") from None
  return st.st_dev, st.st_ino

class SyncFiles:
  """sync_file descriptors: the read end of a pipe that becomes readable when the fence signals, so poll() works as on the real thing."""
  def __init__(self) -> None: self._fences: dict[tuple[int, int], Fence] = {}

  def create(self) -> tuple[int, int]:
    """A reserved (descriptor, write end); EMFILE if there is none left."""
    return os.pipe2(os.O_CLOEXEC)

  def install(self, fds: tuple[int, int], fence: Fence) -> int:
    if len(self._fences) >= 4096:                       # forget those whose descriptors are all closed
      alive = {k for n in os.listdir("/proc/self/fd") if (k:=self._key(int(n))) is not None}
      self._fences = {k: f for k, f in self._fences.items() if k in alive}
    self._fences[inode(fds[0])] = fence
    def signal() -> None:
      with contextlib.suppress(BrokenPipeError): os.write(fds[1], b"!")       # nobody holds the sync_file any more
      os.close(fds[1])
    fence.then(signal)
    return fds[0]

  @staticmethod
  def _key(fd: int) -> tuple[int, int] | None:
    try: return inode(fd)
    except OSError: return None

  def find(self, fd: int) -> Fence:
    try: return self._fences[inode(fd)]
    except (KeyError, OSError): raise error(errno.EINVAL, f"descriptor {fd} is not a sync_file") from None

# *** dispatch

class Call(NamedTuple):
  name: str
  handler: Callable[[Any, Any], None]
  layout: Layout
  direction: int                                        # 1: kernel reads the struct, 2: kernel writes it

class Model:
  """A device node: finds the ioctl by number, copies the argument in and out, counts, injects failures.

  `calls` counts ioctls by name (and "mmap"); machine.config.fail makes the nth of them fail before the handler runs.
  """
  prefix: tuple[str, ...] = ()
  unknown = errno.EINVAL
  copy_back_on_error = True
  abi: Abi
  table: dict[str, str] = {}                            # ioctl name without prefix -> struct name

  def __init__(self, machine: Any):
    self.machine, self.lock = machine, machine.lock
    self.calls: collections.Counter[str] = collections.Counter()
    self._by_nr: dict[int, Call] = {}
    for name, struct_name in self.table.items():
      code = next(self.abi.ioctls[p + name] for p in self.prefix if p + name in self.abi.ioctls)
      self._by_nr[code & 0xff] = Call(name, getattr(self, name.lower()), self.abi.layout(struct_name), code >> 30)

  def count(self, name: str) -> None:
    """One more call of `name`. Raises OSError if the test asked for this one to fail, RuntimeError in a forked child."""
    machine = self.machine
    if machine.forked: raise RuntimeError("the virtual GPU does not cross a fork: its kernel model lives in the parent's memory. A real kernel would "
                                          "share the open file; open the device in the child, after configure(), instead")
    self.calls[name] = n = self.calls[name] + 1
    if machine.config.fail and (e:=machine.config.injected(name, n)): raise error(e, f"injected: call {n} of {name}")

  def ioctl(self, file: Any, request: int, arg: Any) -> int:
    nr, size, direction = request & 0xff, request >> 16 & 0x3fff, request >> 30 & 3
    call = self._by_nr.get(nr) if request >> 8 & 0xff == self.type_byte else None
    if call is None: raise self.no_such_ioctl(request)
    name, handler, layout, direction = call.name, call.handler, call.layout, direction & call.direction
    buf = None
    if type(arg) is not int and arg is not None:
      if memoryview(arg).nbytes < size: raise ValueError(f"{name}: the argument has {memoryview(arg).nbytes} bytes, the request says {size}")
      buf = (ctypes.c_char * size).from_buffer(arg)
    data = b"" if not direction & 1 else buf.raw if buf is not None else copy_from_user(arg or 0, size)
    rec = layout.unpack(data if len(data) == layout.size else data[:layout.size].ljust(layout.size, b"\0"))
    ok = False
    try:
      self.count(name)
      with outside_python, self.lock: handler(file, rec)
      ok = True
    except OSError as e:
      self.machine.log(f"{self.prefix[0]}{name}: errno {e.errno}: " + "; ".join(getattr(e, "__notes__", ())))
      raise
    finally:
      if direction & 2 and (ok or self.copy_back_on_error):
        out = layout.pack(rec)
        if size != layout.size: out = out[:size].ljust(size, b"\0")
        if buf is not None: buf[:size] = out
        else: copy_to_user(arg or 0, out)
    return 0

  type_byte = 0
  def no_such_ioctl(self, request: int) -> OSError: return error(self.unknown, f"no ioctl {request:#x}")

  def wait(self, done: Callable[[], bool], deadline_ns: int | None, job: Any = None) -> bool:
    """Sleeps until done() or CLOCK_MONOTONIC reaches deadline_ns (None: for ever). The lock is held, and dropped while sleeping.

    `job` is what is waited for, if it is one job: schedule="late" then lets no later one start.
    """
    machine = self.machine
    while not done():
      machine.gpu.poke(job)
      now = machine.clock()
      if deadline_ns is not None and now >= deadline_ns: return False
      machine.cond.wait(60.0 if deadline_ns is None else min((deadline_ns - now) / 1e9, 60.0 if machine.clock is time.monotonic_ns else 0.005))
    return True

  def tell(self, file: Any) -> None:
    """Raises what the GPU reported about this client's work since it last waited: the thread that waits learns of it at once."""
    if file.reports: raise file.reports.pop(0)

  def keep_reports(self, file: Any, result: Any) -> None:
    strict = self.machine.gpu.strict
    if result.reports and strict.raise_to_waiter: file.reports.append(GpuViolation(list(result.reports)))

class GpuViolation(RuntimeError):
  """The virtual GPU saw the client break a rule that real hardware punishes at random or in silence. `violations`: report.Violation objects."""
  def __init__(self, violations: list[Any]):
    self.violations = violations
    super().__init__("\n".join(map(str, violations)))

def jiffies_deadline(now_ns: int, timeout_ns: int) -> int:
  """An absolute deadline as the kernel sleeps it: rounded up to whole jiffies from now, at or before now meaning a poll."""
  return now_ns if timeout_ns <= now_ns else now_ns - (now_ns - timeout_ns) // JIFFY_NS * JIFFY_NS

class Entity:
  """A drm_sched entity: a FIFO of jobs, each held back until its dependencies have signalled, then handed to the GPU. Lock held."""
  __slots__ = ("queue", "submit", "blocked")
  def __init__(self, submit: Callable[[Any], None]):
    self.queue, self.submit, self.blocked = collections.deque[tuple[Any, list[Fence]]](), submit, False

  def push(self, job: Any, deps: list[Fence]) -> None:
    if not self.queue and not deps: self.submit(job)
    else:
      self.queue.append((job, deps))
      self.pump()

  def pump(self) -> None:
    while self.queue and not self.blocked:
      if (dep:=next((d for d in self.queue[0][1] if not d.signalled), None)) is not None:
        self.blocked = True
        dep.then(self._unblock)
        return
      self.submit(self.queue.popleft()[0])

  def _unblock(self) -> None:
    self.blocked = False
    self.pump()
