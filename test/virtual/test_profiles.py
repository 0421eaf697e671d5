"""The runtime on every kernel that is modelled, and on machines with little of everything: the same program, the same numbers, nothing to report."""
from __future__ import annotations
from typing import Any
import numpy as np
import pytest
from test.qcom_open import virtual
from tinygrad import Tensor, TinyJit

MACHINES: list[tuple[str, dict[str, Any]]] = [
  *(("MSM", {"kernel": k}) for k in ("6.1", "6.6", "6.12", "7.2")),
  *(("MSM", {"kernel": k, "private_vm": False}) for k in ("6.1", "7.2")),           # boards without the GPU's aperture: cheza
  ("MSM", {"kernel": "7.2", "preemption": True}), ("KGSL", {"preemption": True}),
  ("MSM", {"va_size": 8 << 20}), ("KGSL", {"kgsl_va_size": 8 << 20}),               # room for the slabs and a few megabytes
  ("MSM", {"memory": 8 << 20}), ("MSM", {"memory": 8 << 20, "swap": True}), ("KGSL", {"memory": 8 << 20}),
  ("MSM", {"chip_id": 0x06030001}), ("KGSL", {"chip_id": 0x06030001}),
]

@pytest.mark.parametrize("kind,settings", [pytest.param(k, s, id=f"{k}-" + "-".join(f"{n}={v}" for n, v in s.items())) for k, s in MACHINES])
def test_the_same_program(kind: str, settings: dict[str, Any]) -> None:
  rng = np.random.default_rng(2)
  a, w = rng.integers(-9, 9, (40, 32)).astype(np.float32), rng.integers(-9, 9, (32, 24)).astype(np.float32)
  with virtual(kind, **settings) as (machine, dev):
    tw = Tensor(w).realize()
    f = TinyJit(lambda x: ((x @ tw).relu().contiguous() + 1).max(axis=0).realize())
    for i in range(5): np.testing.assert_array_equal(f(Tensor(a + i).realize()).numpy(), (np.maximum((a + i) @ w, 0) + 1).max(axis=0))
    for n in range(6):                                  # more in turn than the small machines hold at once
      big = Tensor(np.full(400_000, n, np.float32)).realize()
      assert float((big + 1).max().numpy()) == n + 1
      del big
    dev.synchronize()
    assert not machine.gpu.reports and (kind == "KGSL" or machine.msm.submits[-1].client.vm.faults == 0)
