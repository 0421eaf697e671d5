"""What is left after an error: what did not begin has had no effect and can be repeated, what began is refused where its result would be read."""
from __future__ import annotations
import errno
import numpy as np
import pytest
from test.qcom_open import virtual
from test.virtual.test_bad_input import KINDS, SUBMIT, WAIT, fail_next, model
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import Context
from tinygrad.runtime import ops_qcom
from tinygrad.runtime.support import hcq2
from tinygrad.runtime.support.qcom_iface import QCOMError

def host(n, size=70000): return np.arange(size, dtype=np.float32) + n
RELEASE = {"MSM": "GEM_CLOSE", "KGSL": "GPUOBJ_FREE"}

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["submit", "wait", "release"])
@pytest.mark.parametrize("how", ["captured", "eager"])
def test_a_step_in_place_that_did_not_begin_is_repeated(kind, what, how):
  with Context(LRU=int(what != "release")), virtual(kind, schedule="late" if what == "wait" else "asap") as (machine, dev):
    weight, grad, *garbage = (Tensor(host(n)).realize() for n in (1, 2, 3))
    def step(g):
      loss = (g * 3).contiguous()
      weight.assign(weight - g * 2)
      Tensor.realize(loss, weight)
      return loss
    f = TinyJit(step) if how == "captured" else step
    want = host(1)
    for _ in range(3): f(grad)
    dev.synchronize()
    want -= 3 * 2 * host(2)
    if what == "wait":
      f(grad)
      want -= 2 * host(2)
    fail_next(machine, kind, {"submit": SUBMIT, "wait": WAIT, "release": RELEASE}[what][kind], errno.EINVAL)
    if what == "release": garbage.clear()
    with pytest.raises(QCOMError, match="EINVAL.*Do: (run it again|repeat what raised this)"): f(grad)
    machine.config.fail = {}
    np.testing.assert_array_equal(weight.numpy(), want)       # for who gives up and saves what there is
    for n in (2, 5):
      np.testing.assert_array_equal(f(Tensor(host(n)).realize()).numpy(), host(n) * 3)
      want -= 2 * host(n)
      np.testing.assert_array_equal(weight.numpy(), want)

@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_in_a_step_does_not_take_the_weights_away(kind, monkeypatch):
  """Before the submit and after it, captured and eager: the step was made or it was not."""
  with virtual(kind) as (machine, dev):
    weight, grad = Tensor(host(1)).realize(), Tensor(host(2)).realize()
    def step(g): return weight.assign(weight - g).realize()
    f = TinyJit(step)
    for _ in range(3): f(grad), step(grad)
    run = dev._run
    for made in (0, 1):
      for run_step in (f, step):
        want = weight.numpy() - made * host(2)
        def interrupted(*args, made=made, **kwargs):
          if made: run(*args, **kwargs)
          raise KeyboardInterrupt
        with monkeypatch.context() as m:
          m.setattr(dev, "_run", interrupted)
          with pytest.raises(KeyboardInterrupt): run_step(grad)
        np.testing.assert_array_equal(weight.numpy(), want)
        run_step(grad)
        np.testing.assert_array_equal(weight.numpy(), want - host(2))

@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_before_it_is_linked_leaves_what_it_updates(kind, monkeypatch):
  with virtual(kind) as (machine, dev):
    weight, other = Tensor(host(1)).realize(), Tensor(host(2)).realize()
    def failing(*args, **kwargs): raise MemoryError("no room to link")
    with monkeypatch.context() as m:
      m.setattr(hcq2, "hcq_link", failing)
      with pytest.raises(MemoryError, match="no room"): weight.assign(weight * 2 + 7).realize()
      with pytest.raises(MemoryError, match="no room"): other.assign(weight * 5).realize()
      with pytest.raises(MemoryError, match="no room"): (made:=weight * 11).realize()
    np.testing.assert_array_equal(weight.numpy(), host(1))
    with pytest.raises(QCOMError, match="undefined.*Do: run again what was to write it, or copy"): other.numpy()
    with pytest.raises(QCOMError, match="no contents.*Do: make it anew"): made.numpy()
    weight.assign(weight * 2 + 7).realize()
    np.testing.assert_array_equal(weight.numpy(), host(1) * 2 + 7)
    other.assign(weight * 5).realize()
    np.testing.assert_array_equal(other.numpy(), (host(1) * 2 + 7) * 5)

@pytest.mark.parametrize("kind", KINDS)
def test_what_one_batch_made_and_the_next_was_to_update_is_neither_old_nor_new(kind):
  """A copy to another device splits a capture: the second batch fails, and what it updates is refused until the whole step runs again."""
  with virtual(kind) as (machine, dev):
    a, b = Tensor(host(1)).realize(), Tensor(host(2)).realize()
    def step(x):
      a.assign(a + x).realize()
      there = a.to("CPU").realize()
      b.assign(b + there.to("QCOM")).realize()
      return there
    f = TinyJit(step)
    one = Tensor(host(0) * 0 + 1).realize()
    for _ in range(3): f(one)
    submits = dev.queue.submits
    f(one)
    if dev.queue.submits - submits < 2: pytest.fail("the capture is one batch")
    dev.synchronize()
    want_a = host(1) + 4
    want_b = host(2) + sum(host(1) + n for n in range(1, 5))
    np.testing.assert_array_equal(b.numpy(), want_b)
    first = model(machine, kind).calls[SUBMIT[kind]]
    machine.config.fail = {SUBMIT[kind]: {first + 2: errno.EINVAL}}
    with pytest.raises(QCOMError, match="Nothing of.*EINVAL"): f(one)
    machine.config.fail = {}
    np.testing.assert_array_equal(a.numpy(), want_a + 1)
    with pytest.raises(QCOMError, match="undefined"): b.numpy()
    f(one)
    np.testing.assert_array_equal(a.numpy(), want_a + 2)
    np.testing.assert_array_equal(b.numpy(), want_b + want_a + 2)

@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_place_of_which_a_part_ran_is_not_repeated(kind, monkeypatch):
  monkeypatch.setattr(ops_qcom, "SUBMIT_BUDGET_MS", 1e-9)
  with virtual(kind) as (machine, _):
    a, b = Tensor(host(1)).realize(), Tensor(host(2)).realize()
    f = TinyJit(lambda x: Tensor.realize(a.assign(a + x), b.assign(b + x * 2)))
    one = Tensor(host(0) * 0 + 1).realize()
    for _ in range(3): f(one)
    a.numpy()
    first = model(machine, kind).calls[SUBMIT[kind]]
    machine.config.fail = {SUBMIT[kind]: {first + 2: errno.EINVAL}}
    with pytest.raises(QCOMError, match="ran 1 of its 2 parts only.*Do: write anew what it updates in place and run it again"): f(one)
    machine.config.fail = {}
    for _ in range(2):
      with pytest.raises(QCOMError, match="undefined. Do: copy all of it from the host again"): f(one)
      with pytest.raises(QCOMError, match="undefined. Do: copy all of it from the host again"): a.numpy()
    a.assign(Tensor(host(5))).realize()
    b.assign(Tensor(host(6))).realize()
    f(one)
    np.testing.assert_array_equal(a.numpy(), host(6))
    np.testing.assert_array_equal(b.numpy(), host(8))
