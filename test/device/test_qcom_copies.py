"""Copies from the host inside a captured function, on both kernels, against numpy."""
from __future__ import annotations
import numpy as np
import pytest
from test.qcom_open import virtual
from tinygrad import Tensor, TinyJit

RNG = np.random.default_rng(11)

def submits(machine, kind): return machine.msm.calls["GEM_SUBMIT"] if kind == "MSM" else machine.kgsl.calls["GPU_COMMAND"]

@pytest.mark.parametrize("kind", ["MSM", "KGSL"])
def test_copies_from_the_host_do_not_split_a_batch(kind):
  """Arrays that are rewritten in place and enter at several depths: one submit a step. What a copy overwrites is read before it is overwritten."""
  with virtual(kind) as (machine, _):
    a, b = np.zeros(3000, np.float32), np.zeros(3000, np.float32)
    small = [Tensor(x, device="NPY") for x in (a, b)]
    f = TinyJit(lambda x, p, q: (((x + 1).contiguous() * p.to("QCOM")).contiguous() - q.to("QCOM")).contiguous().realize())
    for step in range(6):
      a[:], b[:], x = step, 7 * step + 1, RNG.integers(-9, 9, 3000).astype(np.float32)
      before = submits(machine, kind)
      out = f(Tensor(x).realize(), *small)
      if step > 1: assert submits(machine, kind) == before + 1
      np.testing.assert_array_equal(out.numpy(), (x + 1) * step - (7 * step + 1))

    state = Tensor(np.arange(64, dtype=np.float32)).realize()
    def overwritten(s, p):
      old = (s[:32] * 2).contiguous().realize()
      s[:32].assign(p.to("QCOM")[:32]).realize()
      return old, (s + 1).contiguous().realize()
    g, ref = TinyJit(overwritten), np.arange(64, dtype=np.float32)
    for step in range(6):
      a[:] = 100 * step
      old, new = g(state, small[0])
      np.testing.assert_array_equal(old.numpy(), ref[:32] * 2)
      ref[:32] = 100 * step
      np.testing.assert_array_equal(new.numpy(), ref + 1)
