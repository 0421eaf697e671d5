"""Half registers are halves of full ones in what Mesa's compiler makes for an A6xx, and a launch says so (SP_CS_CNTL_0.MERGEDREGS)."""
from __future__ import annotations
import numpy as np
import pytest
from test.qcom_open import virtual
from tinygrad import Tensor, dtypes

@pytest.mark.parametrize("kind", ["MSM", "KGSL"])
def test_bfloat16_values_survive_the_moves_that_the_compiler_drops(kind: str) -> None:
  """Four results a fiber, each narrowed from 32 to 16 bits. In code for separate register files one of these moves is missing, as its source and
  its destination would be the same register if they were merged."""
  rng = np.random.default_rng(1)
  with virtual(kind):
    a, b = (Tensor(rng.standard_normal((16, 16)).astype(np.float32)).cast(dtypes.bfloat16).realize() for _ in range(2))
    got = (a.exp2() + b).realize().float().numpy()
    np.testing.assert_allclose(got, np.exp2(a.float().numpy()) + b.float().numpy(), 2 ** -7, 2 ** -7)
