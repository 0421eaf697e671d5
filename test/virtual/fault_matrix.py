"""The fault-injection matrix: every ioctl that a piece of work makes fails with every errno the kernel can give it, at each of the first calls.

    ./dev run -m test.virtual.fault_matrix build/fault-matrix.md [FIRST]      runs all cells of the first FIRST calls (3), writes what each gave

A cell must end in the right numbers or in one exception that names ioctl, errno, what was being done and what to do. What the failed work should have
written is read back afterwards: right, or refused. Then the same work must succeed, nothing may be left allocated, and nothing may be printed by a
finalizer. Devices live on through all cells of a scenario, but for `open` and `exit`, which have a device of their own in each cell.
"""
from __future__ import annotations
import collections, contextlib, errno, gc, io, pathlib, re, sys
from collections.abc import Iterator
from typing import Any, NamedTuple
import numpy as np
from test.mockgpu import qcom
from test.qcom_open import forget_qcom, opened
from tinygrad import Tensor, TinyJit
from tinygrad.runtime.support.qcom_iface import QCOMError

KINDS, SCENARIOS, FIRST, STORM = ("MSM", "KGSL"), ("open", "capture", "replay", "copy", "free", "exit"), 3, 200
# what a kernel may answer, by ioctl: from the sources of drivers/gpu/drm/msm, the DRM core and drivers/gpu/msm/kgsl
ERRNOS = {
  "MSM": {"VERSION": "EACCES ENODEV", "GET_PARAM": "EACCES EINVAL ENXIO ENODEV", "SUBMITQUEUE_NEW": "EACCES ENOMEM EINVAL ENODEV",
          "SUBMITQUEUE_QUERY": "ENOENT EINVAL EFAULT ENODEV", "SUBMITQUEUE_CLOSE": "ENOENT ENODEV", "GEM_NEW": "ENOMEM EINVAL ENODEV",
          "GEM_INFO": "ENOSPC ENOMEM ENOENT EINVAL ENODEV", "mmap": "ENOMEM EACCES EINVAL", "GEM_CLOSE": "EINVAL ENODEV",
          "GEM_SUBMIT": "EINVAL ENOENT EFAULT ENOMEM ENXIO EBUSY EALREADY ENOSPC EPERM ENODEV", "WAIT_FENCE": "ENOENT EINVAL ETIMEDOUT ENODEV"},
  "KGSL": {"DEVICE_GETPROPERTY": "EACCES EINVAL EFAULT", "DRAWCTXT_CREATE": "EACCES ENOSPC ENOMEM EINVAL", "SETPROPERTY": "EINVAL EFAULT ENOMEM",
           "GPUOBJ_ALLOC": "ENOMEM EINVAL", "mmap": "ENOMEM EBUSY ERANGE EINVAL", "GPUOBJ_FREE": "EINVAL", "SHAREDMEM_FREE": "EINVAL",
           "MAP_USER_MEM": "ENOMEM EINVAL EOPNOTSUPP", "GPU_COMMAND": "EINVAL EPROTO EDEADLK ENOENT ENOMEM EFAULT ETIMEDOUT",
           "DEVICE_WAITTIMESTAMP_CTXTID": "EDEADLK ENOENT EINVAL ETIMEDOUT", "DRAWCTXT_DESTROY": "EINVAL"}}
RETRIED = "EINTR EAGAIN"

class Cell(NamedTuple):
  """`at`: which calls of `ioctl` fail, counted from the start of the work: "2", "1-200", or "1-" for all from then on."""
  kind: str
  scenario: str
  ioctl: str
  code: str
  at: str

class Outcome(NamedTuple):
  """`error`: the text the caller saw, None if the numbers were right. `wrong`: what must not be, empty if the cell holds."""
  error: str|None
  wrong: list[str]

# *** the work. each gives tensors and what numpy says they hold

SIZE = 3000
Made = list[tuple[Tensor, np.ndarray]]

def numbers(n: int) -> np.ndarray: return (np.arange(SIZE, dtype=np.float32) * 7 + n) % 23
def graph(x: Tensor) -> Tensor: return ((x + 1).contiguous() * 2).contiguous().realize()
def graph_np(x: np.ndarray) -> np.ndarray: return (x + 1) * 2

class Work:
  def __init__(self, dev: Any):
    self.dev, self.n, self.made = dev, 0, Made()
    self.xs = [(Tensor(numbers(i)).realize(), numbers(i)) for i in range(3)]
    self.jit = TinyJit(graph)
    for x, _ in self.xs: self.jit(x)

  def check(self, t: Tensor, want: np.ndarray) -> None:
    self.made.append((t, want))
    np.testing.assert_array_equal(t.numpy(), want)

  def capture(self) -> None:
    f = TinyJit(graph)
    for x, want in self.xs: self.made[:] = [(f(x), graph_np(want))]
    self.check(*self.made.pop())
  def replay(self) -> None:
    for x, want in self.xs: self.made[:] = [(self.jit(x), graph_np(want))]
    self.check(*self.made.pop())
    self.made.clear()                                   # the next replay writes the same buffer
    self.check(self.jit(self.xs[1][0]), graph_np(self.xs[1][1]))
  def copy(self) -> None:
    host = numbers(5)
    t = Tensor(host)
    self.made.append((t, host))
    t.realize()
    out = t * 3                                         # still queued when the next copy overwrites what it reads
    self.made.append((out, host * 3))
    out.realize()
    self.check(out, host * 3)
    t.assign(Tensor(numbers(6), device="PYTHON").to("QCOM")).realize()
    self.made[0] = (t, numbers(6))
    self.check(t, numbers(6))
  def free(self) -> None:
    t = Tensor(numbers(9)).realize()
    out = (t + 4).realize()
    del t                                               # the GPU may still read it
    gc.collect()
    self.dev.allocator.free_cache()
    self.check(out, numbers(9) + 4)
    if self.dev.iface.renderers and "KGSL" in type(self.dev.iface).__name__:
      host = numbers(8)
      self.check(Tensor.from_blob(host.ctypes.data, (SIZE,), device="QCOM") + 1, host + 1)
      self.made.clear()
      gc.collect()

  def clear(self) -> None:
    self.made.clear()
    gc.collect()
    self.dev.allocator.free_cache()

# *** one cell

@contextlib.contextmanager
def finalizers() -> Iterator[list[str]]:
  """What finalizers could not raise, and what was printed."""
  said: list[str] = []
  old, sys.unraisablehook = sys.unraisablehook, lambda u: said.append(f"{u.err_msg or 'exception ignored'}: {u.exc_value}")
  out = io.StringIO()
  try:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out): yield said
  finally:
    sys.unraisablehook = old
    said += [line for line in out.getvalue().splitlines() if line.strip()]

def model(machine: Any, kind: str) -> Any: return machine.msm if kind == "MSM" else machine.kgsl
def live(machine: Any, kind: str) -> dict[str, int]:
  machine.gpu.idle(10)
  return {k: v for k, v in model(machine, kind).live().items() if k not in ("fences", "pending")}

def inject(machine: Any, cell: Cell) -> None:
  done = model(machine, cell.kind).calls[cell.ioctl]
  lo, _, hi = cell.at.partition("-")
  machine.config.fail = {cell.ioctl: {range(done + int(lo), done + (int(hi) if hi else int(lo) if "-" not in cell.at else 1 << 40) + 1):
                                      getattr(errno, cell.code)}}

def unclear(cell: Cell, e: BaseException) -> list[str]:
  """What an error message lacks. A call that was only interrupted gives none."""
  text = str(e)
  if cell.code in RETRIED.split(): return [f"{cell.ioctl} was not made again: {text}"]
  lacks = [f"the error does not name {part}: {type(e).__name__}: {text}" for part in (cell.code, cell.ioctl) if part not in text]
  if not isinstance(e, (QCOMError, MemoryError, RuntimeError)): lacks.append(f"{type(e).__name__} is not what a user can catch: {text}")
  if not any(cause in text for cause in (" while ", " ran", " run,", " lost ")): lacks.append(f"the error does not say what was being done: {text}")
  memory = cell.code == "ENOMEM" or (cell.code == "ENOSPC" and cell.ioctl != "DRAWCTXT_CREATE")
  if memory != isinstance(e, MemoryError): lacks.append(f"{cell.code} is {type(e).__name__}: {text}")
  if "Do:" not in text: lacks.append(f"the error does not say what to do: {text}")
  if "Do: report" in text: lacks.append(f"the error has no way on but a report: {text}")
  return lacks

def recompute(work: Work) -> list[str]:
  """What the failed work should have written: right, refused, or a wrong number."""
  bad = []
  for t, want in work.made:
    with contextlib.suppress(RuntimeError, MemoryError):
      got = t.numpy()
      if not np.array_equal(got, want): bad.append(f"a wrong number was returned after the error: {got[:4]} instead of {want[:4]}")
  return bad

class Bench:
  """An open device with warm caches, for all cells of the scenarios that work on one."""
  def __init__(self, machine: Any, kind: str, dev: Any):
    self.machine, self.kind, self.dev = machine, kind, dev
    self.work = Work(dev)
    for scenario in ("capture", "replay", "copy", "free"): self.calls(scenario)
    gc.collect()
    gc.freeze()                                         # the cells' collections look at what the cells made

  def calls(self, scenario: str) -> collections.Counter[str]:
    before = model(self.machine, self.kind).calls.copy()
    getattr(self.work, scenario)()
    self.work.clear()
    return model(self.machine, self.kind).calls - before

  def run(self, cell: Cell) -> Outcome:
    self.work.clear()
    before, error, wrong = live(self.machine, cell.kind), None, list[str]()
    with finalizers() as said:
      inject(self.machine, cell)
      try:
        getattr(self.work, cell.scenario)()
        self.work.clear()
        self.dev.synchronize()                          # hears of what went wrong in a finalizer
      except AssertionError as e: wrong.append(f"wrong numbers and no error: {e}")
      except BaseException as e:
        error, wrong = f"{type(e).__name__}: {e}", unclear(cell, e)
        wrong += recompute(self.work)
      hit = model(self.machine, cell.kind).calls[cell.ioctl] >= next(iter(self.machine.config.fail[cell.ioctl])).start
      self.machine.config.fail = {}
      if not hit: error = error or "not reached"
      try: getattr(self.work, cell.scenario)()
      except BaseException as e:
        wrong.append(f"the same work fails afterwards: {type(e).__name__}: {e}")
      self.work.clear()
    wrong += [f"a finalizer said: {s}" for s in said]
    if (after:=live(self.machine, cell.kind)) != before: wrong.append(f"leak: {before} before, {after} after")
    return Outcome(error, wrong)

@contextlib.contextmanager
def bench(kind: str) -> Iterator[Bench]:
  machine = qcom.configure()
  try:
    with opened(f"MOCK{kind}+QCOM:IR3") as dev: yield Bench(machine, kind, dev)
  finally: gc.unfreeze()

def lifetime(cell: Cell|None, kind: str, scenario: str) -> tuple[Outcome, collections.Counter[str]]:
  """A device from open to exit; `cell` injects in the part that its scenario names. Also counts that part's calls."""
  machine = qcom.configure()
  m, error, wrong, dev = model(machine, kind), None, list[str](), None
  made, count = Made(), collections.Counter[str]()
  with finalizers() as said:
    try:
      if cell is not None and scenario == "open": inject(machine, cell)
      with opened(f"MOCK{kind}+QCOM:IR3") as dev:
        count = m.calls.copy()
        machine.config.fail = {}
        out = (Tensor(numbers(1)) * 2).realize()
        np.testing.assert_array_equal(out.numpy(), numbers(1) * 2)
        if scenario == "exit":
          made.append((pending:=(out + 1).realize(), numbers(1) * 2 + 1)) # left to the exit
          del out, pending
          before = m.calls.copy()
          if cell is not None: inject(machine, cell)
          dev.finalize()
          count = m.calls - before
    except AssertionError as e: wrong.append(f"wrong numbers: {e}")
    except BaseException as e:
      error = f"{type(e).__name__}: {e}"
      if cell is not None: wrong += unclear(cell, e)
      else: raise
    made.clear()
    dev = None
    forget_qcom()
  if scenario == "exit":
    error, said = (said[0] if said else error), said[1:]
    if error and (hit:=re.search("reopen|takes new work", error)): wrong.append(f"{hit[0]!r} is no advice at exit: {error}")
  wrong += [f"said at exit: {s}" for s in said]
  machine.config.fail = {}
  if any((left:=live(machine, kind)).values()): wrong.append(f"left over: {left}")
  with opened(f"MOCK{kind}+QCOM:IR3"):
    if not np.array_equal((Tensor(numbers(2)) * 2).numpy(), numbers(2) * 2): wrong.append("wrong numbers of the next device")
  return Outcome(error, wrong), count

def cells(kind: str, scenario: str, calls: collections.Counter[str], first: int) -> Iterator[Cell]:
  for ioctl, n in sorted(calls.items()):
    for code in ERRNOS[kind][ioctl].split():
      for at in [*map(str, range(1, min(n, first) + 1)), "1-"]:
        # a wait that times out for ever is a limit's matter, test_gpu_trouble.py
        if at != "1-" or code != "ETIMEDOUT" or "WAIT" not in ioctl: yield Cell(kind, scenario, ioctl, code, at)
    if ioctl != "mmap":
      for code in RETRIED.split(): yield Cell(kind, scenario, ioctl, code, f"1-{STORM}")

def run(kind: str, scenario: str, first: int = FIRST) -> list[tuple[Cell, Outcome]]:
  """All cells of a kernel and scenario that fail one of the `first` calls, in order."""
  if scenario in ("open", "exit"):
    _, calls = lifetime(None, kind, scenario)
    return [(c, lifetime(c, kind, scenario)[0]) for c in cells(kind, scenario, calls, first)]
  with bench(kind) as b: return [(c, b.run(c)) for c in cells(kind, scenario, b.calls(scenario), first)]

# *** the table

def general(text: str) -> str:
  """An error's text without the numbers of one run."""
  text = re.sub(r"'[^']*?(submit \d+ kernels|\bE_)[^']*'( and \d+ more)?", "'KERNEL'", text).replace("last retired before", "last retired")
  text = re.sub(r"[\d.]+ [kKMG]?B( failed)?\b", r"N B\1", text)
  return re.sub(r"\b(0x[0-9a-f]+|\d+)\b(?!_|K| GiB|\.1 or| or newer)", "N", text)

def table(results: list[tuple[Cell, Outcome]]) -> str:
  """Markdown: what each cell gave, then the distinct messages. `ok`: right numbers; a number: message; -: the work makes no such call."""
  messages: dict[str, int] = {}
  rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
  for c, o in results:
    got = "FAILED" if o.wrong else "ok" if o.error in (None, "not reached") else str(messages.setdefault(general(o.error or ""), len(messages) + 1))
    rows.setdefault((c.kind, c.ioctl, c.code), {}).setdefault(c.scenario, []).append(got)
  lines = ["| kernel | ioctl | errno | " + " | ".join(SCENARIOS) + " |", "|" + "---|" * (3 + len(SCENARIOS))]
  for (kind, ioctl, code), by in sorted(rows.items(), key=lambda r: (KINDS.index(r[0][0]), r[0][1], r[0][2])):
    shown = [" ".join(v) if len(set(v)) > 1 else v[0] for v in (by.get(s, ["-"]) for s in SCENARIOS)]
    lines.append(f"| {kind} | {ioctl} | {code}{' x' + str(STORM) if code in RETRIED.split() else ''} | " + " | ".join(shown) + " |")
  return "\n".join(lines) + "\n\n" + "\n".join(f"{n}. {text}" for text, n in messages.items()) + "\n"

HEAD = """# What every failing ioctl gives

Executed on the virtual Adreno 630; made by `./dev run -m test.virtual.fault_matrix docs/fault-matrix.md {first}`, which fails if a
cell does not hold.

A row is an ioctl and an errno, a column the work during which it failed. Calls 1 to {first} of the ioctl fail, one at a time, each in a run of
its own, and in a last run all of them fail; where these gave different things, all are listed in order. `ok`: the numbers were right, as the call
was repeated or not needed. A number: one exception with that message, below (N stands for the numbers of one run). `-`: that work makes no such
call. In every cell: nothing wrong was returned afterwards, the same work then gave the right numbers, nothing was left allocated and no finalizer
complained. What to do is in [failures.md](failures.md).

"""

def main(args: list[str]) -> int:
  first = int(args[1]) if len(args) > 1 else FIRST
  if args: pathlib.Path(args[0]).touch() # before the work, not after it: can it be written?
  results = [r for kind in KINDS for scenario in SCENARIOS for r in run(kind, scenario, first)]
  bad = [(c, o) for c, o in results if o.wrong]
  for c, o in bad: print("FAILED", *c, *(f"\n    {w}" for w in o.wrong))
  print(f"{len(results)} cells, {sum(o.error is None for _, o in results)} right numbers, {sum(o.error is not None for _, o in results)} errors, "
        f"{len(bad)} failed")
  if args: pathlib.Path(args[0]).write_text(HEAD.format(first=first) + table(results))
  return bool(bad)

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
