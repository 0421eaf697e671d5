"""A signal, or a finalizer that frees a buffer, at any line of the runtime: what is read afterwards is right or refused, nothing is freed twice."""
from __future__ import annotations
import collections, contextlib, errno, gc, os, sys, threading, time
import numpy as np
import pytest
from test.qcom_open import virtual
from test.virtual.test_bad_input import QUIET, fail_next, model
from test.virtual.test_external_memory import Frame
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.runtime.support.qcom_iface import QCOMError

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning") # a signal in a finalizer, which Python prints
@pytest.fixture(params=("MSM", "KGSL"))
def kind(request): return request.param
def host(n, size=8): return np.arange(size, dtype=np.float32) + n
def mortal(): return Buffer("QCOM", 64, dtypes.uint8, options=BufferSpec(nolru=True), preallocate=True)

def hang_next(machine):
  gpu, submit = machine.gpu, machine.gpu.submit
  def hang(job):
    job.killed, gpu.submit = "a hang to try", submit
    submit(job)
  gpu.submit = hang

class AtLine:
  """
  Interrupts this thread at the n-th line of the runtime that it executes: with KeyboardInterrupt, or as the garbage collector does. The first and the
  second time that a line is executed count.
  """
  def __init__(self, how: str, n: int):
    self.how, self.n, self.lines, self.victims, self.times, self.where = how, n, 0, [mortal()], collections.Counter[tuple](), ""
  def trace(self, frame, event, arg):
    return self.line if frame.f_code.co_filename.endswith(("ops_qcom.py", "qcom_iface.py")) else None
  def line(self, frame, event, arg):
    if event != "line" or self.times[at:=(frame.f_code, frame.f_lineno)] == 2: return self.line
    self.times[at] += 1
    self.lines += 1
    if self.lines - 1 == self.n:
      self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
      if self.how == "signal": raise KeyboardInterrupt
      if gc.isenabled():                                      # else no collection runs here
        sys.settrace(None)
        self.victims.clear()
        sys.settrace(self.trace)
    return self.line
  def __enter__(self):
    sys.settrace(self.trace)
    return self
  def __exit__(self, *_): sys.settrace(None)
  @property
  def over(self) -> bool: return self.lines <= self.n

def read(t: Tensor) -> np.ndarray | None:
  """None if it is refused. An error of earlier work, which a signal kept from being told, may come first, once."""
  for _ in range(3):
    try: return t.numpy()
    except QCOMError as e: assert "EINVAL" not in str(e), e   # a handle that is freed twice
  return None

def lines(how: str, stride: int = 1):
  n = 0
  while True:
    yield (at:=AtLine(how, n))
    if at.over: break
    n += stride
  assert n > 20, "nothing of the runtime was traced"

HOW = pytest.mark.parametrize("how", ["signal", "finalizer"])

@HOW
def test_at_any_line_of_a_step_in_place(kind, how):
  with virtual(kind) as (machine, dev):
    weight, grad = Tensor(host(0)).realize(), Tensor(host(1)).realize()
    f = TinyJit(lambda g: weight.assign(weight + g).realize())
    for _ in range(3): f(grad)
    made = 3
    for at in lines(how):
      with contextlib.suppress(KeyboardInterrupt), at: f(grad)
      got = weight.numpy()
      assert any(np.array_equal(got, host(0) + n * host(1)) for n in ((made, made + 1) if how == "signal" else (made + 1,))), (at.n, got)
      made = int(got[0])
      f(grad)
      made += 1
      np.testing.assert_array_equal(weight.numpy(), host(0) + made * host(1))

@HOW
@pytest.mark.parametrize("kind,what", [("MSM", "wait"), ("MSM", "submit and wait"), ("KGSL", "submit and wait")])
def test_at_any_line_of_what_notices_a_hang(kind, how, what):
  """One submit is killed and the next runs: the next one's value of the timeline covers it, so that only the kernel's counter tells."""
  with virtual(kind, strict=QUIET) as (machine, dev):
    a, c, old = Tensor(host(0)).realize(), Tensor(host(0) * 0).realize(), host(0) * 0 + 77
    out = Tensor(old).realize()
    def write(): out.assign(a * 2 + 5).realize()
    write()
    np.testing.assert_array_equal((c * 3 + 1).realize().numpy(), host(0) * 0 + 1)
    for at in lines(how, 2):
      out.assign(Tensor(old)).realize()
      dev.synchronize()
      hang_next(machine)
      with contextlib.suppress(QCOMError): write()
      behind: list[Tensor] = []
      def after(behind=behind): behind.append((c * 3 + 1).realize())
      with contextlib.suppress(QCOMError, KeyboardInterrupt):
        if what == "wait":
          with contextlib.suppress(QCOMError): after()        # KGSL refuses it if it knows already
          with at: dev.synchronize()
        else:
          with at:
            after()
            dev.synchronize()
      if (got:=read(out)) is not None: np.testing.assert_array_equal(got, host(0) * 2 + 5, f"line {at.n}")
      if behind and (got:=read(behind[0])) is not None: np.testing.assert_array_equal(got, host(0) * 0 + 1, f"line {at.n}")
      np.testing.assert_array_equal(read(c + 2), host(0) * 0 + 2)

@HOW
def test_at_any_line_of_allocating_and_freeing(kind, how):
  with virtual(kind) as (machine, dev):
    c = Tensor(host(0) * 0).realize()
    (c + 2).numpy()
    def count():
      dev.synchronize()
      gc.collect()
      dev.allocator.free_cache()
      dev.synchronize()
      assert len(dev.iface.live.starts) == dev.queue.nallocs
      return model(machine, kind).live()["handles" if kind == "MSM" else "entries"]
    def work():
      z = [Tensor(np.full(100000 + 4096 * i, 3, np.uint8)).realize() for i in range(2)]
      assert (z[0] + 1).numpy()[-1] == 4
      del z
      dev.allocator.free_cache()
    work()
    before = start = count()
    for at in lines(how, 3):
      with contextlib.suppress(KeyboardInterrupt), at: work()
      at.victims.clear()
      np.testing.assert_array_equal((c + 2).numpy(), host(0) * 0 + 2)
      assert (now:=count()) <= before + 2 * (how == "signal"), f"line {at.n} {at.where}: {now - before} more"
      before = now
    if how == "finalizer": assert before <= start + 1

@HOW
def test_at_any_line_of_reopening(kind, how):
  with virtual(kind) as (machine, dev):
    Tensor(host(0)).realize()
    for at in lines(how, 4):
      with contextlib.suppress(KeyboardInterrupt), at: dev.reopen()
      at.victims.clear()
      dev.reopen()
      x = Tensor(host(3)).realize()
      np.testing.assert_array_equal((x + 2).numpy(), host(5))
      assert model(machine, kind).live()["clients"] == 1, f"line {at.n}"

def test_an_import_whose_release_failed_can_be_imported_again():
  """The kernel gives the same handle, which the release that is tried again must not take away."""
  with virtual("MSM") as (machine, dev):
    frame = Frame("dmabuf", 4096)
    frame.write(want:=np.arange(4096).astype(np.uint8))
    t = frame.tensor((4096,)).realize()
    np.testing.assert_array_equal((t + 1).numpy(), want + 1)
    dev.synchronize()
    fail_next(machine, "MSM", "GEM_CLOSE", errno.EINVAL)
    del t
    gc.collect()
    machine.config.fail = {}
    with pytest.raises(QCOMError, match="not released yet.*releasing an imported DMA-BUF"): dev.synchronize()
    t = frame.tensor((4096,)).realize()
    others = [mortal() for _ in range(3)]
    others.clear()                                            # tries again what was not released
    others = [Tensor(np.full(300000, 9, np.uint8)).realize() for _ in range(3)]
    np.testing.assert_array_equal((t + 1).numpy(), want + 1)
    assert all(o.numpy()[0] == 9 for o in others)
    del t
    frame.close()
    gc.collect()
    dev.synchronize()

def test_a_fork_may_drop_tensors_while_a_thread_of_the_parent_holds_the_lock(kind):
  with virtual(kind) as (_, dev):
    tensors, held, release = [Tensor(host(n)).realize() for n in range(3)], threading.Event(), threading.Event()
    def hold():
      with dev.iface.live.lock:
        held.set()
        release.wait(60)
    (thread:=threading.Thread(target=hold)).start()
    assert held.wait(10)
    if (pid:=os.fork()) == 0:
      tensors.clear()
      gc.collect()
      try: dev.reopen()
      except QCOMError as e: os._exit(0 if "fork" in str(e) else 1)
      os._exit(2)
    end = time.monotonic() + 30
    while (done:=os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end: time.sleep(0.01)
    if done[0] == 0:
      os.kill(pid, 9)
      os.waitpid(pid, 0)
    release.set()
    thread.join()
    assert done == (pid, 0), "the child waits for a lock that nobody in it holds"
    np.testing.assert_array_equal(tensors[1].numpy(), host(1))

def test_an_error_that_was_kept_is_told_although_a_finalizer_waits_for_work_in_flight(kind):
  with virtual(kind, schedule="late") as (_, dev):
    x = Tensor(host(1)).realize()
    y = (x + 1).realize()
    dev.kept = QCOMError("kept", "nothing")
    mortal()
    with pytest.raises(QCOMError, match="kept"): dev.synchronize()
    np.testing.assert_array_equal(y.numpy(), host(2))
