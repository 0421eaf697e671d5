"""Sharing the GPU and its addresses: priorities, the budget of a submit, a compositor beside us, little address space and little memory."""
from __future__ import annotations
import contextlib, gc, threading
import numpy as np
import pytest
from test.qcom_open import opened, virtual
from test.mockgpu import qcom
from test.mockgpu.qcom.gpu import Job
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import Context, getenv
from tinygrad.runtime import ops_qcom

@pytest.fixture(params=("MSM", "KGSL"))
def kind(request): return request.param
def host(n, size=200): return np.arange(size, dtype=np.float32) + n

@pytest.fixture
def set_priority(monkeypatch):
  def to(value):
    monkeypatch.setenv("QCOM_PRIORITY", value) if value else monkeypatch.delenv("QCOM_PRIORITY", raising=False)
    getenv.cache_clear()
  yield to
  monkeypatch.undo()
  getenv.cache_clear()

def given_priority(machine, kind):
  """What the kernel was asked for: MSM, of as many levels as it has; KGSL, 1 to 15."""
  if kind == "MSM": return max(q.prio for c in machine.msm.clients for i, q in c.queues.items() if i)
  return next(c.flags >> 12 & 15 for c in machine.kgsl.contexts.values())

@pytest.mark.parametrize("value,msm,msm_preempting,kgsl", [(None, 2, 11, 15), ("15", 2, 11, 15), ("8", 1, 5, 8), ("1", 0, 0, 1)])
def test_the_priority_is_low_unless_asked_for(kind, set_priority, value, msm, msm_preempting, kgsl):
  set_priority(value)
  for preemption in (False, True):
    with virtual(kind, preemption=preemption) as (machine, _):
      assert given_priority(machine, kind) == (kgsl if kind == "KGSL" else msm_preempting if preemption else msm)

@pytest.mark.parametrize("value", ["0", "16", "17", "-1", "100"])
def test_a_priority_that_does_not_exist_is_refused_on_both_kernels(kind, set_priority, value):
  set_priority(value)
  machine = qcom.configure()
  with pytest.raises(RuntimeError, match=f"QCOM_PRIORITY={value}.*1.*15"), opened(f"MOCK{kind}+QCOM:IR3"): pass
  assert not any(machine.msm.live().values()) and not any(machine.kgsl.live().values())

@contextlib.contextmanager
def submit_costs():
  """The estimated cost in ms of each IB that is encoded in here, and a monkeypatch for what it is estimated and cut with."""
  costs, real_split = [], ops_qcom.Encoder.split
  def split(self):
    if self.cost: costs.append(self.cost)
    real_split(self)
  with pytest.MonkeyPatch.context() as m:
    m.setattr(ops_qcom.Encoder, "split", split)
    yield costs, m

def test_no_submit_holds_more_than_the_budget_of_estimated_work(kind):
  """A batch is cut between kernels. One kernel that alone is longer goes in a submit of its own."""
  with submit_costs() as (costs, m):
    m.setattr(ops_qcom, "SUBMIT_BUDGET_MS", budget:=0.005)
    with virtual(kind) as (machine, dev):
      calls = (machine.msm if kind == "MSM" else machine.kgsl).calls
      x, name = Tensor(np.ones((64, 64), np.float32)).realize(), "GEM_SUBMIT" if kind == "MSM" else "GPU_COMMAND"
      def chain(x):
        for n in range(12): x = (x * 0.5 + n).contiguous()
        return x.realize()
      f, want = TinyJit(chain), np.ones((64, 64), np.float32)
      for n in range(12): want = want * np.float32(0.5) + n
      for _ in range(3): out = f(x)
      before = calls[name]
      np.testing.assert_array_equal(f(x).numpy(), want)
      assert 1 < calls[name] - before < 12 and out is not None
      assert all(c <= budget for c in costs), costs

def test_a_compositor_meets_its_deadlines_beside_replays(kind):
  """
  A model of the ring in GPU time: nothing running is preempted, and what waits with more importance goes first, as on a630. Submits take their
  estimated time. A compositor of the highest priority hands in 2 ms of work each 16.7 ms and must be done with it in time.
  """
  with virtual(kind) as (machine, dev):
    cost_of = ops_qcom.estimate_ms
    with submit_costs() as (costs, m):
      m.setattr(ops_qcom, "estimate_ms", lambda est: cost_of(est) * 2000) # as if each of the kernels took about a millisecond
      def chain(x):
        for n in range(40): x = (x * 0.5 + n).contiguous()
        return x.realize()
      f, x = TinyJit(chain), Tensor(np.ones((64, 64), np.float32)).realize()
      for _ in range(3): f(x)
    assert len(costs) > 3 and max(costs) <= ops_qcom.SUBMIT_BUDGET_MS
    ours = given_priority(machine, kind)
    def late(budgeted):
      """Milliseconds from hand-in to completion of the worst frame, on a ring that our submits of these lengths keep busy."""
      now, worst, frame, work = 0.0, 0.0, 0, budgeted * 50
      while work:
        if now >= frame * 16.7: now, worst, frame = now + 2, max(worst, now + 2 - frame * 16.7), frame + 1
        else: now += work.pop()
      return worst
    assert late(costs) < 16.7, "the compositor misses a frame"
    assert late([sum(costs)]) > 16.7, "the model of the ring cannot fail"
    # the virtual ring keeps to that order: what is more important goes first, what runs is not interrupted
    space, order = machine.gpu.new_space("compositor"), []
    hold, started = threading.Event(), threading.Event()
    jobs = [Job(space, [], None, ours, name, on_start=lambda j, n=name: (order.append(n), started.set(), n == "first" and hold.wait(5)))
            for name in ("first", "second", "third")]
    for j in jobs: machine.gpu.submit(j)
    assert started.wait(10)
    machine.gpu.submit(frame_job:=Job(space, [], None, 0, "frame", on_start=lambda j: order.append("frame")))
    hold.set()
    assert frame_job.wait(10) and all(j.wait(10) for j in jobs)
    assert order == ["first", "frame", "second", "third"]

# *** little of everything

def test_a_model_that_fits_runs_in_little_address_space_although_garbage_does_not(kind):
  """Buffers that are dropped while compiling and running are given back in time."""
  small = {"va_size": 24 << 20} if kind == "MSM" else {"kgsl_va_size": 24 << 20}
  with virtual(kind, **small) as (machine, dev):
    ws = [Tensor(host(i, 1 << 18)).realize() for i in range(3)] # 3 MiB that stay
    def model(x):
      for w in ws: x = (x + w).contiguous() * 2
      return x.contiguous().realize()
    want = host(5, 1 << 18)
    for i in range(3): want = (want + host(i, 1 << 18)) * 2
    for size in range(6):                                     # 6 MiB of other sizes go through the cache
      t = (Tensor(host(0, (1 << 18) + size * 1000)).realize() + 1).realize()
      assert t.numpy()[3] == 4
    del t
    f = TinyJit(model)
    for _ in range(4): np.testing.assert_array_equal(f(Tensor(host(5, 1 << 18)).realize()).numpy(), want)
    gc.collect()

def test_a_beam_search_in_little_address_space():
  with virtual("MSM", va_size=24 << 20), Context(PARALLEL=0, IGNORE_BEAM_CACHE=1, CACHELEVEL=0, BEAM=1):
    a = np.ones((16, 40), np.float32)
    np.testing.assert_array_equal((Tensor(a) + 1).numpy(), a + 1)

@pytest.mark.parametrize("image", (0, 1))
def test_a_kernel_with_more_than_4_gib_of_addresses(image):
  """msm's module parameter address_space_size, and kernels that are patched: addresses of 35 bits, in descriptors, streams and shaders."""
  with Context(IMAGE=image), virtual("MSM", va_size=64 << 30) as (machine, dev):
    room = [dev.allocator.alloc(1 << 30) for _ in range(12)]
    a, b = (Tensor(np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % n).realize() for n in (5, 7))
    assert min(int(t.uop.buffer._buf.va_addr) for t in (a, b)) >= 4 << 32
    f = TinyJit(lambda a, b: (a @ b + 1).realize())
    want = (np.arange(64 * 64) % 5).reshape(64, 64) @ (np.arange(64 * 64) % 7).reshape(64, 64) + 1
    for _ in range(3): np.testing.assert_array_equal(f(a, b).numpy(), want)
    del room

@pytest.mark.parametrize("what,settings,words", [("addresses", {"va_size": 12 << 20}, "address space.*ENOSPC.*Do: free some tensors"),
                                                 ("memory", {"memory": 12 << 20}, "out of memory.*ENOMEM.*Do: free tensors")])
def test_addresses_and_memory_that_run_out_are_told_apart(what, settings, words):
  """MSM: KGSL answers ENOMEM to both."""
  with virtual("MSM", **settings) as (machine, dev):
    kept = []
    with pytest.raises(MemoryError, match=words) as e:
      for i in range(20): kept.append(Tensor(host(i, 1 << 18)).realize())
    assert len(kept) >= 8 and "Used: " in str(e.value)
    for i, t in enumerate(kept): np.testing.assert_array_equal(t.numpy(), host(i, 1 << 18))
    t = None
    del kept[-2:]
    gc.collect()
    np.testing.assert_array_equal((Tensor(host(9)) + 1).numpy(), host(9) + 1)
