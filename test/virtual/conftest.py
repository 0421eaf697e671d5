"""Ends a test run with a line on the IR3 instruction table: how much of it was executed, and which rows were not. Workers' counts are added up."""
from __future__ import annotations
import sys
from collections import Counter
from typing import Any
import pytest

KEY = pytest.StashKey[Counter]()

def executed() -> dict[str, int]:
  """Waves by row, of this process. Empty if nothing here loaded the shader core."""
  if (native := sys.modules.get("test.mockgpu.qcom.ir3.native")) is None: return {}
  return {r.name: int(n) for r, n in zip(native.ROWS, native.Engine.executed) if n}

def pytest_sessionfinish(session: Any) -> None:
  config = session.config
  if hasattr(config, "workeroutput"): config.workeroutput["ir3_rows"] = executed()
  else: config.stash.setdefault(KEY, Counter()).update(executed())

@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
  node.config.stash.setdefault(KEY, Counter()).update(getattr(node, "workeroutput", {}).get("ir3_rows", {}))

def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
  if not (counts := config.stash.get(KEY, Counter())): return
  from test.mockgpu.qcom.ir3.isa import ROWS
  missing = [r.name for r in ROWS if not counts[r.name]]
  line = f"IR3 table: {len(ROWS) - len(missing)} of {len(ROWS)} rows executed, {sum(counts.values())} instructions by waves"
  if missing: line += f"; not executed: {' '.join(missing)}" if len(missing) <= 40 else f"; {len(missing)} rows not executed"
  terminalreporter.write_line(line)
