"""Host and GPU in each other's way: what is queued sees the contents it was queued with, however far the GPU lags behind.

    QCOM_LAUNCHES=10000 ./dev test -q -n0 test/virtual/test_order.py       the long form: that many replays and eager launches that nobody waits for
"""
from __future__ import annotations
import numpy as np
import pytest
from test.qcom_open import virtual
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import getenv

@pytest.fixture(params=("MSM", "KGSL"))
def kind(request): return request.param
LAUNCHES = getenv("QCOM_LAUNCHES", 1000)
def host(n, size=500): return (np.arange(size, dtype=np.int32) * 3 + n) % 1009
def overwrite(t, data): t.assign(Tensor(data, device="PYTHON").to("QCOM")).realize()

@pytest.mark.parametrize("schedule", ["late", 5])
def test_a_host_copy_into_a_buffer_waits_for_queued_work_that_reads_it(kind, schedule):
  with virtual(kind, schedule=schedule) as (machine, _):
    machine.gpu.grace_s = 0.2
    x, f = Tensor(host(0)).realize(), TinyJit(lambda x: (x * 2).realize())
    for _ in range(2): f(x)
    outs = []
    for i in range(6):
      overwrite(x, host(i))
      outs.append((x + i).realize())                          # not waited for when the next copy comes
      jitted = f(x)
    for i, out in enumerate(outs): np.testing.assert_array_equal(out.numpy(), host(i) + i)
    np.testing.assert_array_equal(jitted.numpy(), host(5) * 2)

def test_a_captured_copy_in_the_middle_of_a_graph(kind):
  with virtual(kind, schedule="late"):
    def step(x):
      a = (x + 1).contiguous()
      b = a.to("PYTHON").to("QCOM").contiguous()              # the host reads what the first batch writes
      return (b * 2 + a).contiguous().realize()
    f, xs = TinyJit(step), [Tensor(host(i)).realize() for i in range(5)]
    for i in range(15): np.testing.assert_array_equal(f(xs[i % 5]).numpy(), (host(i % 5) + 1) * 3)
    assert len(f.captured.linear.src) > 2, "the copy did not cut the graph"

def test_in_place_updates_eager_and_captured_and_of_a_part(kind):
  with virtual(kind, schedule=3):
    acc, want = Tensor.zeros(500, dtype=dtypes.int32).contiguous().realize(), np.zeros(500, np.int32)
    whole = TinyJit(lambda x: acc.assign(acc * 3 + x).realize())
    part = TinyJit(lambda x: acc[100:200].assign(acc[100:200] - x).realize())
    xs, ys = [Tensor(host(i)).realize() for i in range(3)], [Tensor(host(i, 100)).realize() for i in range(3)]
    for i in range(20):
      whole(xs[i % 3])
      part(ys[i % 3])
      want = want * np.int32(3) + host(i % 3)
      want[100:200] -= host(i % 3, 100)
      if i % 4 == 3:
        acc.assign(acc + 1).realize()
        want += 1
    np.testing.assert_array_equal(acc.numpy(), want)

@pytest.mark.parametrize("schedule", ["late", 5])
def test_the_timeline_goes_past_32_bits(kind, schedule):
  """The GPU writes its low 32 bits only."""
  with virtual(kind, schedule=schedule) as (machine, dev):
    acc, want = Tensor.zeros(16, dtype=dtypes.int32).contiguous().realize(), np.zeros(16, np.int32)
    f, xs = TinyJit(lambda x: acc.assign(acc * 5 + x).realize()), [Tensor(host(i, 16)).realize() for i in range(7)]
    dev.synchronize()
    dev.queue.timeline = (1 << 32) - 6                          # as after 4 thousand million submits
    dev.done[0] = dev.queue.timeline
    for i in range(14):
      f(xs[i % 7])
      want = want * np.int32(5) + host(i % 7, 16)
      if i in (3, 9): np.testing.assert_array_equal(acc.numpy(), want)
    np.testing.assert_array_equal(acc.numpy(), want)
    assert dev.queue.timeline > 1 << 32

def test_thousands_of_replays_that_nobody_waits_for(kind):
  """Each adds to an accumulator in a way that shows one that is missing, doubled or out of order. The GPU starts when it must."""
  with virtual(kind, schedule="late") as (machine, dev):
    machine.gpu.grace_s = 1.0
    acc, want = Tensor.zeros(16, dtype=dtypes.int32).contiguous().realize(), np.zeros(16, np.int32)
    f, xs = TinyJit(lambda x: acc.assign(acc * 5 + x).realize()), [Tensor(host(i, 16)).realize() for i in range(7)]
    for i in range(LAUNCHES):
      f(xs[i % 7])
      want = want * np.int32(5) + host(i % 7, 16)
    np.testing.assert_array_equal(acc.numpy(), want)

def test_thousands_of_eager_launches_with_the_gpu_held_back(kind):
  """Every result is read, a batch of them at a time."""
  with virtual(kind, schedule="late") as (machine, dev):
    machine.gpu.grace_s = 1.0
    xs, made, deepest = [Tensor(host(i, 8)).realize() for i in range(5)], [], 0
    for i in range(LAUNCHES):
      made.append((host(i % 5, 8) + i % 3, (xs[i % 5] + i % 3).realize()))
      deepest = max(deepest, len(machine.gpu._queue))
      if len(made) == LAUNCHES // 2:
        for want, out in made: np.testing.assert_array_equal(out.numpy(), want)
        made.clear()
    assert deepest > 1, "nothing was ever queued"
