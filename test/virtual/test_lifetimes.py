"""Work that repeats for weeks: after a warm-up nothing grows, and what is dropped is given back. All checks of the virtual GPU are on."""
from __future__ import annotations
import ctypes, errno, functools, gc, itertools, json, os, pathlib, pickle, subprocess, sys, threading, time
import numpy as np
import pytest
from test.qcom_open import virtual
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.device import Buffer
from tinygrad.helpers import Context
from tinygrad.runtime import ops_qcom
from tinygrad.runtime.support import hcq2
from tinygrad.runtime.support.qcom_iface import QCOMError

@pytest.fixture(params=("MSM", "KGSL"))
def kind(request): return request.param


class Counts:
  """What is alive, by name. `flat` compares two of them."""
  def __init__(self, machine, dev, kind):
    dev.synchronize()
    gc.collect()
    dev.allocator.free_cache()
    machine.gpu.idle(10)
    machine.msm.submits.clear(), machine.kgsl.commands.clear() # what the models keep for tests
    live = (machine.msm if kind == "MSM" else machine.kgsl).live()
    self.kernel = {k: live[k] for k in (("handles", "bos", "bytes", "iova_bytes", "mappings", "mapped_bytes", "queues") if kind == "MSM" else
                                        ("contexts", "entries", "bytes", "va_bytes", "mappings", "mapped_bytes"))}
    self.kernel |= {"fds": len(os.listdir("/proc/self/fd")), "slots": sum(s.used for s in dev.allocator.slabs), "live": len(dev.iface.live.starts),
                    "slab_bytes": sum(size for s in dev.allocator.slabs for size, _, _, free in s.tlsf.blocks.values() if not free)}
    self.objects = len(gc.get_objects())
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as f: self.rss = int(f.read().split()[1]) * 4096

  def flat(self, before, objects, rss=4 << 20):
    """The same things of the kernel's, at most `objects` more Python objects, at most `rss` more resident bytes."""
    assert self.kernel == before.kernel, f"grew: {[(k, before.kernel[k], v) for k, v in self.kernel.items() if v != before.kernel[k]]}"
    assert self.objects - before.objects <= objects, f"{self.objects - before.objects} more Python objects"
    assert self.rss - before.rss <= rss, f"{self.rss - before.rss} more resident bytes"

def steady(kind, once, warm, times, objects, **settings):
  with virtual(kind, **settings) as (machine, dev):
    once = once(machine, dev)
    for i in range(warm): once(i)
    before = Counts(machine, dev, kind)
    for i in range(warm, warm + times): once(i)
    Counts(machine, dev, kind).flat(before, objects)

SHAPE = (33, 20)
def data(i): return (np.arange(660, dtype=np.float32).reshape(SHAPE) * 3 + i) % 17

def test_replays_with_new_inputs(kind):
  def work(machine, dev):
    w = Tensor(data(7)).realize()
    f = TinyJit(lambda x: ((x * w).contiguous() + x.sum()).realize())
    def once(i): np.testing.assert_array_equal(f(Tensor(data(i)).realize()).numpy(), data(i) * data(7) + data(i).sum())
    return once
  steady(kind, work, 6, 60, 60)

@pytest.mark.parametrize("schedule", ["asap", "late", 3])
def test_captures_that_are_dropped_with_work_in_flight(kind, schedule):
  def work(machine, dev):
    x = Tensor(data(1)).realize()
    def once(i):
      f = TinyJit(lambda x: ((x + 2).contiguous() * 3).contiguous().realize())
      for _ in range(3): out = f(x)
      del f
      if i % 4 == 0: np.testing.assert_array_equal(out.numpy(), (data(1) + 2) * 3)
    return once
  steady(kind, work, 5, 15, 120, schedule=schedule)

def test_a_reference_cycle_of_captures_is_given_back_by_the_collector(kind):
  def work(machine, dev):
    x = Tensor(data(1)).realize()
    def once(i):
      holder = {}
      holder["me"], holder["f"] = holder, TinyJit(lambda x: ((x + 2).contiguous() * 3).realize())
      for _ in range(3): holder["f"](x)
    return once
  steady(kind, work, 4, 8, 120)

def test_a_model_that_is_loaded_again(kind):
  """Other weights into the same capture's tensors, a new model of new tensors, and captures that were pickled."""
  class Model:
    def __init__(self): self.a, self.b = Tensor(data(1)).realize(), Tensor(data(2)).realize()
    def __call__(self, x): return ((x @ self.a.T).relu().contiguous() @ self.b).realize()
  def ref(x, a, b): return np.maximum(x @ a.T, 0) @ b
  def work(machine, dev):
    kept, x = Model(), Tensor(data(3)).realize()
    jit = TinyJit(kept.__call__)
    for _ in range(3): jit(x)
    def once(i):
      kept.a.assign(Tensor(data(i))).realize(), kept.b.assign(Tensor(data(i + 1))).realize() # in place: a capture knows its weights by address
      np.testing.assert_allclose(jit(x).numpy(), ref(data(3), data(i), data(i + 1)))
      new = Model()
      f = TinyJit(new.__call__)
      for _ in range(3): out = f(x)
      np.testing.assert_allclose(out.numpy(), ref(data(3), data(1), data(2)))
      f = pickle.loads(pickle.dumps(f))
      np.testing.assert_allclose(f(x).numpy(), ref(data(3), data(1), data(2)))
    return once
  steady(kind, work, 4, 6, 400)

def test_eager_work_over_many_shapes_stays_within_the_caches(kind, monkeypatch):
  """What eager kernels keep on the device (arguments, streams, code) is bounded however many different ones there are."""
  for cache, size in ((hcq2.hcq_compile_cache, 8), (hcq2.link_linear_cache, 8), (hcq2.link_buf_cache, 12)): monkeypatch.setattr(cache, "size", size)
  with virtual(kind) as (machine, dev):
    x = Tensor(np.arange(400, dtype=np.float32)).realize()
    def once(n): assert (x[:n] * 2 + 1).sum().item() == n * (n - 1) + n
    counts = []
    for n in range(1, 46):
      once(n)
      if n % 15 == 0: counts.append(Counts(machine, dev, kind))
    _, second, third = (c.kernel for c in counts)
    assert third["bytes"] == second["bytes"] and third["slots"] <= second["slots"] + 8 and third["slots"] < 60, counts
    for n in (1, 5, 45): once(n)                              # those that went come back

def test_a_beam_search(kind):
  def work(machine, dev):
    a = data(1)
    def once(i):
      with Context(PARALLEL=0, IGNORE_BEAM_CACHE=1, CACHELEVEL=0, BEAM=1):
        from tinygrad.engine import realize
        for c in (realize.to_program_cache, hcq2.link_linear_cache, hcq2.link_buf_cache): c.clear() # the same kernel is searched for again
        np.testing.assert_array_equal((Tensor(a) + 1).numpy(), a + 1)
    return once
  steady(kind, work, 3, 2, 3000)

def test_freed_addresses_and_handles_that_the_kernel_gives_again_are_not_confused(kind):
  """A capture with a baked weight, while tensors of the same size come and go: right numbers, or a refusal once the weight itself went."""
  with virtual(kind, schedule="late") as (machine, dev):
    sizes = [300000, 700000]                                  # BOs of their own
    weights = {n: Tensor(np.full(n, 5, np.float32)).realize() for n in sizes}
    fs = {n: TinyJit(lambda x, n=n: (x + weights[n]).realize()) for n in sizes}
    seen: set[int] = set()
    again = 0
    for i in range(24):
      n = sizes[i % 2]
      x = Tensor(np.full(n, i, np.float32)).realize()
      again += (addr:=int(x.uop.buffer._buf.va_addr)) in seen
      seen.add(addr)
      out = fs[n](x)
      del x
      if i % 3 == 0: dev.allocator.free_cache()
      if i % 5 == 0: np.testing.assert_array_equal(out.numpy(), np.full(n, i + 5))
    assert again, "no address was used twice"


class Releases:
  """Records for everything that is released how many jobs the GPU had left. `hold`: it starts none until `go`."""
  def __init__(self, machine, dev, monkeypatch):
    self.gpu, self.left, self.patch = machine.gpu, list[int](), monkeypatch
    remove = dev.iface.live.remove
    def removed(start):
      self.left.append(len(self.gpu._queue) + self.gpu.executing())
      remove(start)
    monkeypatch.setattr(dev.iface.live, "remove", removed)
    self.gpu.idle(10)
    self.gpu.grace_s = 600.0
  def hold(self): self.patch.setattr(self.gpu, "poke", lambda job=None: None)
  def go(self):
    self.patch.undo()
    self.gpu.poke()

@pytest.mark.parametrize("what", ["tensor", "capture"])
def test_what_queued_work_uses_is_released_when_it_is_done(kind, what, monkeypatch):
  with Context(LRU=0), virtual(kind, schedule="late") as (machine, dev):
    x = Tensor(data(1)).realize()
    f = TinyJit(lambda x: ((x + 2).contiguous() * 3).contiguous().realize())
    for _ in range(3): f(x).numpy()
    seen = Releases(machine, dev, monkeypatch)
    out = f(x)
    if what == "tensor": del x
    else: del f
    gc.collect()
    np.testing.assert_array_equal(out.numpy(), (data(1) + 2) * 3)
    gc.collect()
    assert seen.left and not any(seen.left), f"released while the GPU had work: {seen.left}"

def test_nothing_is_released_after_a_wait_that_failed(kind, monkeypatch):
  """The GPU may still use it. It is released with the first wait that succeeds."""
  with Context(LRU=0), virtual(kind, schedule="late") as (machine, dev):
    x = Tensor(data(1)).realize()
    (x + 4).realize().numpy()
    seen = Releases(machine, dev, monkeypatch)
    seen.hold()
    monkeypatch.setattr(dev, "wait_timeout_ms", 100.0)
    out = (x + 4).realize()
    del x
    gc.collect()
    assert not seen.left, f"released while the GPU had work: {seen.left}"
    with pytest.raises(QCOMError, match="timed out after 100 ms"): out.numpy()
    assert not seen.left
    alive = len(dev.iface.live.starts)
    seen.go()
    np.testing.assert_array_equal(out.numpy(), data(1) + 4)
    assert len(dev.iface.live.starts) < alive

def test_what_the_kernel_took_of_a_rejected_batch_stays_in_flight(kind, monkeypatch):
  """The first half of a batch is queued, the second is rejected, and the wait for the first times out: nothing of it is freed or patched under it."""
  monkeypatch.setattr(ops_qcom, "SUBMIT_BUDGET_MS", 1e-9)
  with Context(LRU=0), virtual(kind, schedule="late") as (machine, dev):
    x, y = Tensor(data(1)).realize(), Tensor(data(2)).realize()
    f = TinyJit(lambda x: ((x + 2).contiguous() * 3).contiguous().realize())
    for _ in range(3): f(x).numpy()
    submit, calls = ("GEM_SUBMIT", machine.msm.calls) if kind == "MSM" else ("GPU_COMMAND", machine.kgsl.calls)
    (seen:=Releases(machine, dev, monkeypatch)).hold()
    monkeypatch.setattr(dev, "wait_timeout_ms", 100.0)
    machine.config.fail = {submit: {calls[submit] + 2: errno.EINVAL}}
    with pytest.raises(QCOMError, match="ran 1 of its 2 parts only.*EINVAL"): f(y)
    machine.config.fail = {}
    addr = int(y.uop.buffer._buf.va_addr)
    del y
    gc.collect()
    assert machine.gpu._queue and dev.iface.live.find(addr), "released while the GPU had work"
    for work in (lambda: f(x), lambda: (x + 1).realize()):
      with pytest.raises(QCOMError, match="timed out after 100 ms.*waiting for .submit 2 kernels"): work()
    seen.go()
    np.testing.assert_array_equal(f(x).numpy(), (data(1) + 2) * 3)
    assert dev.iface.live.find(addr) is None and not dev.inflight

def test_work_that_nobody_waits_for_is_forgotten_once_it_is_over(kind, monkeypatch):
  """Two captures by turns: each waits for its own last run, never for both."""
  with virtual(kind, schedule="late") as (machine, dev):
    x = Tensor(data(1)).realize()
    fs = [TinyJit(lambda x: (x + 2).contiguous().realize()), TinyJit(lambda x: (x * 3).contiguous().realize())]
    for f in fs * 3: f(x)
    most = 0
    for _ in range(300):
      for f in fs: out = f(x)
      most = max(most, len(dev.inflight))
    assert most < 300, f"{most} runs are kept of two captures, of which each has one in flight"
    np.testing.assert_array_equal(out.numpy(), data(1) * 3)

# *** threads

def waiting_thread(dev, monkeypatch, work):
  """A thread that does `work`, what it gave or raised, once it waits in the kernel."""
  entered, result, wait = threading.Event(), list[object](), dev.iface.wait
  def body():
    try: result.append(work())
    except Exception as e: result.append(e)
  monkeypatch.setattr(dev.iface, "wait", lambda fence, ms: (entered.set(), wait(fence, ms))[1])
  (t:=threading.Thread(target=body)).start()
  assert entered.wait(30)
  return t, result

def test_a_wait_keeps_no_other_thread_from_freeing_allocating_and_submitting(kind, monkeypatch):
  with virtual(kind, schedule="late") as (machine, dev):
    x, spare = Tensor(data(1)).realize(), Tensor(data(2)).realize()
    f = TinyJit(lambda x: (x * 3).contiguous().realize())
    for _ in range(3): f(x).numpy()
    (seen:=Releases(machine, dev, monkeypatch)).hold()
    out = (x + 4).realize()
    t, result = waiting_thread(dev, monkeypatch, lambda: out.uop.buffer.numpy())
    del spare
    Buffer("QCOM", 12345, dtypes.float32).allocate()
    tripled = f(x)
    assert t.is_alive() and not result, "it had to wait for the other thread's wait"
    seen.go()
    t.join()
    np.testing.assert_array_equal(result[0].reshape(SHAPE), data(1) + 4)
    np.testing.assert_array_equal(tripled.numpy(), data(1) * 3)

def test_a_device_is_given_up_while_another_thread_waits_for_it(monkeypatch):
  with virtual("MSM", schedule="late") as (machine, dev):
    x = Tensor(data(1)).realize()
    (x + 4).realize().numpy()
    (seen:=Releases(machine, dev, monkeypatch)).hold()
    out = (x + 4).realize()
    t, result = waiting_thread(dev, monkeypatch, lambda: out.uop.buffer.numpy())
    dev.reopen()
    seen.go()
    t.join()
    assert isinstance(result[0], QCOMError), result
    np.testing.assert_array_equal((Tensor(data(3)).realize() + 1).numpy(), data(3) + 1)

@pytest.mark.parametrize("schedule", ["asap", 5])
def test_threads_that_replay_free_and_wait_at_once(kind, schedule):
  with virtual(kind, schedule=schedule) as (machine, dev):
    xs = [Tensor(data(n)).realize() for n in range(3)]
    fs = [TinyJit(lambda x, n=n: ((x + n).contiguous() * 2).contiguous().realize()) for n in range(3)]
    outs = [[f(x) for _ in range(3)][-1].uop.buffer for f, x in zip(fs, xs)]
    errors = list[Exception]()
    def work(n):
      try:
        for i in range(25):
          fs[n](xs[n])
          Buffer("QCOM", 1000 + i % 7, dtypes.float32).allocate()
          np.testing.assert_array_equal(outs[n].numpy().reshape(SHAPE), (data(n) + n) * 2)
      except Exception as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors, errors
    dev.synchronize()
    assert not dev.inflight and not dev.allocator.waiting

def test_the_soak_in_its_short_form(kind):
  """bench/soak.py is not part of a tinygrad checkout."""
  root = pathlib.Path(__file__).resolve().parents[2]
  if not (root / "bench/soak.py").is_file(): pytest.skip("no bench/soak.py beside the tests")
  env = {**os.environ, "DEV": f"MOCK{kind}+QCOM:IR3", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
  done = subprocess.run([sys.executable, str(root / "bench/soak.py"), "300", "40"], env=env, capture_output=True, text=True, timeout=500)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  last = json.loads(done.stdout.splitlines()[-1])
  assert last["n"] == 40 and last["grew"] == []

def test_a_collection_in_the_middle_of_an_allocation(kind):
  """Finalizers of garbage free memory of the slab that is being divided: no two allocations may get the same bytes, and every one is given back."""
  with virtual(kind) as (_, dev):
    def make(size): return dev.gpu_bytes(bytes(size))
    def live(): return [(a.start, a.end) for a in dev.iface.live.arr[:len(dev.iface.live.starts)]]
    make(256)
    gc.collect()
    before, sizes, kept, old = live(), itertools.cycle([256, 700, 3000, 9000, 700]), [], gc.get_threshold()
    gc.set_threshold(13, 5, 5)
    try:
      for n in range(1500):
        (cycle:=[make(next(sizes))]).append(cycle)
        del cycle
        kept.append(make(next(sizes)))
        if len(kept) > 40: kept.pop(n % 40)
        spans = live()
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])), f"round {n}"
    finally: gc.set_threshold(*old)
    kept.clear()
    gc.collect()
    assert live() == before

def test_what_is_not_released_keeps_nothing_else():
  """One thing that the kernel refuses to release is tried again; whatever comes after it goes, and nothing goes twice."""
  with virtual("MSM") as (_, dev):
    ran, refuse = [], [True]
    def stuck():
      ran.append("stuck")
      if refuse[0]: raise QCOMError("refused", "nothing")
    for n in range(3):
      with pytest.raises(QCOMError, match="refused"): dev.iface.release(stuck if n == 0 else functools.partial(ran.append, n))
    assert [r for r in ran if r != "stuck"] == [1, 2]
    refuse[0] = False
    dev.iface.release(functools.partial(ran.append, 3))
    assert ran.count("stuck") == 4 and not dev.iface.unfreed and [r for r in ran if r != "stuck"] == [1, 2, 3]

def test_work_in_flight_that_does_not_end_after_a_loss(monkeypatch):
  """A queue that lost one submit and does not end the next: what that one writes is refused, and nothing is freed under it."""
  with virtual("MSM") as (machine, dev):
    x = Tensor(np.arange(8, dtype=np.float32)).realize()
    f, g = TinyJit(lambda x: (x + 1).realize()), TinyJit(lambda x: (x * 2).realize())
    for _ in range(3): _ = f(x), g(x)
    dev.synchronize()
    f(x)
    out = g(x)
    stuck = dev.inflight[-1].fence
    while not dev.retired(dev.queue.timeline): time.sleep(0.01)
    with monkeypatch.context() as m:
      m.setattr(dev, "retired", lambda timeline: False)
      m.setattr(dev.iface, "wait", lambda fence, ms, wait=dev.iface.wait: fence != stuck and wait(fence, ms))
      m.setattr(dev.iface, "lost", lambda: "1 hang recovery of the submit queue")
      with pytest.raises(QCOMError, match="does not end.*reopen"): f(x)
      assert len(dev.inflight) == 2
    dev.synchronize()
    with pytest.raises(QCOMError, match="undefined"): out.numpy()
    np.testing.assert_equal(g(x).numpy(), np.arange(8) * 2)
