"""Random sequences of everything a user does with tensors on the device, against numpy: hypothesis searches for an order that breaks it.

    ./dev test -q test/virtual/test_state_machine.py                    2,000 sequences, 1,000 on either kernel, as part of the suite
    QCOM_EXAMPLES=50000 QCOM_SEED=1000 ./dev test -q test/virtual/test_state_machine.py     so many on either kernel, others than the suite's

Injected errors may make a step fail; then what it should have written is either right or refused from there on, and never wrong.
"""
from __future__ import annotations
import errno, gc, os, random
from typing import Any
import numpy as np
import pytest
from hypothesis import HealthCheck, seed, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from test.mockgpu import qcom
from test.qcom_open import opened, virtual
from tinygrad import Device, Tensor, TinyJit
from tinygrad.helpers import getenv
from tinygrad.runtime.support.qcom_iface import QCOMError

EXAMPLES, SEED = getenv("QCOM_EXAMPLES", 1000), getenv("QCOM_SEED", 0)
PART, STEPS = 250, 25 # sequences of one seed, so that pytest's workers share them
SIZES = (5, 64, 300, 70000) # a slab's and a BO's of their own
FAILS = {
  "MSM": [("GEM_SUBMIT", errno.EINVAL), ("GEM_SUBMIT", errno.ENOMEM), ("GEM_SUBMIT", errno.EINTR), ("WAIT_FENCE", errno.EINTR),
          ("GEM_NEW", errno.ENOMEM), ("GEM_INFO", errno.ENOSPC), ("mmap", errno.ENOMEM), ("GEM_CLOSE", errno.EINVAL)],
  "KGSL": [("GPU_COMMAND", errno.EINVAL), ("GPU_COMMAND", errno.EDEADLK), ("GPU_COMMAND", errno.EINTR), ("GPUOBJ_ALLOC", errno.ENOMEM),
           ("DEVICE_WAITTIMESTAMP_CTXTID", errno.EINTR), ("DEVICE_WAITTIMESTAMP_CTXTID", errno.EDEADLK), ("mmap", errno.ENOMEM),
           ("GPUOBJ_FREE", errno.EINVAL)]}

class Pair:
  """A tensor and what numpy says it holds. `doubt`: a step that should have written it failed, so that reading it may be refused."""
  def __init__(self, t: Tensor, host: np.ndarray, doubt: bool = False): self.t, self.host, self.doubt = t, host, doubt

FUNCTIONS = ((lambda x, y: x + y, lambda x, y: x + y), (lambda x, y: (x * 2).contiguous() - y, lambda x, y: x * 2 - y),
             (lambda x, y: (x.maximum(y) + x.sum()).contiguous() - 1, lambda x, y: np.maximum(x, y) + x.sum(dtype=np.int32) - 1))

class Opened:
  """A machine and its open device: most sequences go on with those of the one before, as a process does that lives on."""
  def __init__(self, kind: str, schedule: Any, order: Any):
    self.kind, self.machine, self.open = kind, qcom.configure(schedule=schedule, order=order), opened(f"MOCK{kind}+QCOM:IR3")
    self.dev = self.open.__enter__()
  def model(self) -> Any: return self.machine.msm if self.kind == "MSM" else self.machine.kgsl
  def close(self) -> None:
    self.open.__exit__(None, None, None)
    self.machine.gpu.idle(10)
    left = {k: v for k, v in self.model().live().items() if v}
    assert not left, f"left after closing: {left}"

def machine_for(kind: str, kept: list[Opened]) -> type[RuleBasedStateMachine]:
  """`kept`: at most one, for the next sequence. What a sequence draws must not depend on how the device did before, hence no preconditions."""
  class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
      super().__init__()
      self.pairs, self.jits = list[Pair](), list[tuple[Any, int, int, Any]]()
      self.opened: Opened | None = None
      self.injected = False

    @initialize(schedule=st.sampled_from(["asap", "late", 1, 2]), order=st.sampled_from(["forward", "reversed", 1]), anew=st.integers(0, 15))
    def boot(self, schedule: Any, order: Any, anew: int) -> None:
      if kept and anew == 1: kept.pop().close()
      if not kept:
        if not gc.get_freeze_count():                          # collections look at what the sequences made; one on the GPU's thread thaws
          gc.collect()
          gc.freeze()
        kept.append(Opened(kind, schedule, order))
      self.opened = kept.pop()
      self.machine, self.dev, self.model = self.opened.machine, self.opened.dev, self.opened.model
      gpu = self.machine.gpu
      gpu.schedule, gpu.order, gpu.random = schedule, order, random.Random(str(schedule))

    def host(self, n: int, seed: int) -> np.ndarray: return ((np.arange(n) * 7 + seed) % 101).astype(np.int32)
    def pick(self, i: int, size: int | None = None) -> Pair | None:
      found = [p for p in self.pairs if size is None or p.host.size == size]
      return found[i % len(found)] if found else None

    def attempt(self, step: Any, *written: Pair) -> bool:
      """Runs a step. An error is only allowed after one was injected or where doubtful contents are used, and puts `written` in doubt."""
      try: step()
      except (QCOMError, MemoryError) as e:
        assert self.injected or any(p.doubt for p in self.pairs) or "undefined" in str(e) or "no contents" in str(e), e
        assert "Do:" in str(e), e
        for p in (*written, *self.pairs): p.doubt = True       # what was in flight may be lost with it
        return False
      return True

    def check(self, p: Pair) -> None:
      try: got = p.t.numpy()
      except (QCOMError, MemoryError) as e:
        assert (p.doubt or self.injected) and "Do:" in str(e), e
        for q in self.pairs: q.doubt = True
        return
      np.testing.assert_array_equal(got, p.host)

    @rule(n=st.sampled_from(SIZES), seed=st.integers(0, 100))
    def allocate(self, n: int, seed: int) -> None:
      p = Pair(Tensor(self.host(n, seed)), self.host(n, seed))
      if self.attempt(lambda: p.t.realize(), p): self.pairs.append(p)

    @rule(i=st.integers(0, 99))
    def copy_out(self, i: int) -> None:
      if self.pairs: self.check(self.pairs[i % len(self.pairs)])

    @rule(i=st.integers(0, 99), seed=st.integers(0, 100))
    def copy_in(self, i: int, seed: int) -> None:
      if not self.pairs: return
      p = self.pairs[i % len(self.pairs)]
      new = self.host(p.host.size, seed)
      if self.attempt(lambda: p.t.assign(Tensor(new, device="PYTHON").to("QCOM")).realize(), p): p.host = new

    @rule(i=st.integers(0, 99), lo=st.integers(0, 3))
    def view(self, i: int, lo: int) -> None:
      if not self.pairs: return
      p = self.pairs[i % len(self.pairs)]
      self.check(Pair(p.t[lo:].contiguous() if lo else p.t.reshape(-1, 1).reshape(-1), p.host[lo:], p.doubt))

    @rule(i=st.integers(0, 99), j=st.integers(0, 99), f=st.integers(0, 2))
    def run(self, i: int, j: int, f: int) -> None:
      if not self.pairs: return
      x = self.pairs[i % len(self.pairs)]
      y = self.pick(j, x.host.size) or x
      p = Pair(FUNCTIONS[f][0](x.t, y.t), FUNCTIONS[f][1](x.host, y.host), x.doubt or y.doubt)
      if self.attempt(lambda: p.t.realize(), p): self.pairs.append(p)

    @rule(i=st.integers(0, 99), j=st.integers(0, 99))
    def in_place(self, i: int, j: int) -> None:
      if not self.pairs: return
      x = self.pairs[i % len(self.pairs)]
      y = self.pick(j, x.host.size) or x
      new = x.host + y.host + 1
      if self.attempt(lambda: x.t.assign(x.t + y.t + 1).realize(), x): x.host, x.doubt = new, x.doubt or y.doubt

    @rule(n=st.sampled_from(SIZES), f=st.integers(0, 2), seed=st.integers(0, 100))
    def capture(self, n: int, f: int, seed: int) -> None:
      if len(self.jits) >= 3: self.jits.pop(0)
      weight = Pair(Tensor(self.host(n, seed)), self.host(n, seed))
      jit = TinyJit(lambda x: FUNCTIONS[f][0](x, weight.t).contiguous().realize())
      def record() -> None:
        weight.t.realize()
        for k in range(2): jit(Tensor(self.host(n, k)).realize())
      if self.attempt(record, weight): self.jits.append((jit, n, f, weight))

    @rule(i=st.integers(0, 99), j=st.integers(0, 99), read=st.booleans())
    def replay(self, i: int, j: int, read: bool) -> None:
      if not self.jits: return
      jit, n, f, weight = self.jits[i % len(self.jits)]
      if (x:=self.pick(j, n)) is None: return
      out: list[Tensor] = []
      if not self.attempt(lambda: out.append(jit(x.t)), weight): return
      if read: self.check(Pair(out[0], FUNCTIONS[f][1](x.host, weight.host), x.doubt or weight.doubt))

    @rule(i=st.integers(0, 99))
    def free(self, i: int) -> None:
      if self.pairs: del self.pairs[i % len(self.pairs)]

    @rule(cache=st.booleans())
    def collect(self, cache: bool) -> None:
      gc.collect(1)
      if cache: self.attempt(self.dev.allocator.free_cache)

    @rule()
    def sync(self) -> None: self.attempt(self.dev.synchronize)

    @rule()
    def fork_check(self) -> None:
      if (pid:=os.fork()) == 0:
        try: Device["QCOM"].synchronize()
        except QCOMError as e: os._exit(0 if "fork" in str(e) else 1)
        except BaseException: os._exit(2)
        os._exit(3)
      assert os.waitpid(pid, 0)[1] == 0, "the device works in a fork, or fails without saying why"

    @rule(which=st.integers(0, 7), after=st.integers(1, 3), times=st.integers(1, 2))
    def inject_error(self, which: int, after: int, times: int) -> None:
      name, code = FAILS[kind][which]
      first = self.model().calls[name] + after
      self.machine.config.fail = {name: {range(first, first + times): code}}
      self.injected = True

    @invariant()
    def the_lists_agree(self) -> None:
      if self.opened is None: return
      live = self.dev.iface.live
      assert live.starts == sorted(live.starts) and len(live.starts) == self.dev.queue.nallocs
      assert not self.machine.gpu.reports, self.machine.gpu.reports[0]

    def teardown(self) -> None:
      if (opened:=self.opened) is None: return
      try:
        self.machine.config.fail = {}
        for p in self.pairs: self.check(p)
        self.pairs.clear(), self.jits.clear()
        self.dev.drain()
        self.dev.kept = None                                   # what nobody waited for
        works = Tensor(self.host(9, 1)).realize()
        np.testing.assert_array_equal((works * 2).numpy(), self.host(9, 1) * 2)
      except BaseException:
        opened.open.__exit__(None, None, None)
        raise
      kept.append(opened)
  return Life

@pytest.mark.parametrize("part", range(-(-EXAMPLES // PART)))
@pytest.mark.parametrize("kind", ("MSM", "KGSL"))
def test_any_sequence_of_what_a_user_does_gives_numpys_numbers_or_one_error(kind, part):
  with virtual(kind): (Tensor([1, 2]) + 1).numpy()             # loads what a first kernel needs
  kept: list[Opened] = []
  try:
    run_state_machine_as_test(seed(SEED + part)(machine_for(kind, kept)), settings=settings(
      max_examples=min(PART, EXAMPLES - part * PART), stateful_step_count=STEPS, deadline=None, database=None,
      suppress_health_check=list(HealthCheck)))
    while kept: kept.pop().close()
  finally:
    for o in kept: o.open.__exit__(None, None, None)
    gc.unfreeze()
