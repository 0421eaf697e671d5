"""The fault-injection matrix: the first calls of each ioctl and all of them, each errno, each kind of work. fault_matrix.py has the rules."""
import pytest
from test.virtual import fault_matrix

@pytest.mark.parametrize("scenario", fault_matrix.SCENARIOS)
@pytest.mark.parametrize("kind", fault_matrix.KINDS)
def test_every_failing_ioctl_is_right_numbers_or_one_actionable_error(kind, scenario):
  results = fault_matrix.run(kind, scenario)
  assert results
  assert not [(cell, o.wrong) for cell, o in results if o.wrong]
  reached = [o for _, o in results if o.error != "not reached"]
  assert len(reached) > 0.8 * len(results), "most failing calls were never made"
