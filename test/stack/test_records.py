"""The README's table of hardware runs is what records/*.json say, and nothing else gets into it."""
from __future__ import annotations
import json, pathlib, sys
import pytest
from test.stack.site import ROOT

sys.path.append(str(ROOT))  # behind build/tree, so that tinygrad and test stay those of the built tree
from stack import records
from stack.env import Problem

MODE = {"replays": 800, "seconds": 1.6, "results_sha256": "0" * 64}
RECORD = {"test": "qcom_replay", "ok": True, "time": "2026-01-02T03:04:05Z", "rung": "hardware", "interface": "MSM", "kernel": "6.99-invented",
          "chip_id": "0x06030001", "mesa": "25.2.7.2", "tinygrad": "0.14.0+msm.1", "board": "Invented | Phone", "faults_before": {"FAULTS": 1},
          "faults_after": {"FAULTS": 1}, "normal": MODE, "profiled": MODE}

def folder(at: pathlib.Path, *found: dict | str) -> pathlib.Path:
  for n, r in enumerate(found): (at / f"{n}.json").write_text(r if isinstance(r, str) else json.dumps(r))
  return at

def test_the_readme_has_the_table_of_the_records_that_are_there():
  readme = (ROOT / "README.md").read_text()
  assert records.put(readme, records.table(ROOT / "records")) == readme, "run ./dev records"

def test_a_row_per_record_good_or_bad(tmp_path: pathlib.Path):
  bad = {**RECORD, "ok": False, "error": "AssertionError: replay 7: 1 instead of 2", "faults_after": {"FAULTS": 3}}
  text = records.table(folder(tmp_path, RECORD, bad)).splitlines()
  assert len(text) == 4 and "| Invented \\| Phone | 0x06030001 | 6.99-invented (MSM) | 25.2.7.2 |" in text[2]
  assert "1600 replays, exact | no | 2.00 ms | 2026-01-02 | [record](records/0.json)" in text[2]
  assert "FAILED: AssertionError: replay 7" in text[3] and "{'FAULTS': 1} -> {'FAULTS': 3}" in text[3] and "exact" not in text[3]

@pytest.mark.parametrize("content,why", [({**RECORD, "rung": "virtual"}, "is of the virtual device"), ({"ok": True}, "lacks rung, interface"),
                                         ("{", "is not JSON"), ("[]", "lacks everything")])
def test_what_is_no_record_of_hardware_is_refused(tmp_path: pathlib.Path, content, why):
  with pytest.raises(Problem, match=why): records.table(folder(tmp_path, content))

def test_a_readme_without_the_marks_is_an_error():
  with pytest.raises(Problem, match="lacks the lines"): records.put("# no table\n", "x")
