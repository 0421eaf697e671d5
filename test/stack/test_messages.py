"""What an upstream reader is told: each commit says how to see its problem and what was run, the letter has every part, neither promises hardware."""
from __future__ import annotations
import re, sys
import pytest
from test.stack.site import ROOT

sys.path.append(str(ROOT))  # behind build/tree, so that tinygrad and test stay those of the built tree
from stack import export, series

SERIES = series.load()
NEW = {"msm-bindings", "external-fd", "qcom"} # there is nothing to see before them: what they add is not there

@pytest.mark.parametrize("entry", SERIES.entries, ids=lambda e: e.name)
def test_a_message_says_how_to_see_the_problem_and_what_was_run(entry: series.Entry):
  assert re.search(r"\bRun\b", entry.why), "what was run?"
  # an expression to type, or the words for it
  assert entry.name in NEW or re.search(r"[Tt]o see (it|that one)", entry.why), "how does a reader see the problem on the tree before?"
  assert len(entry.title) <= 90 and max(map(len, entry.why.splitlines())) <= 160
  assert not re.search(r"(ran|run|tested|measured) on (a physical|real|hardware|the device)", entry.why, re.I), "nothing was"

def test_the_cover_letter_has_every_part():
  letter = export.cover(SERIES)
  for part in ("Problem.", "Change.", "To see it.", "Evidence, by rung.", "Limits."): assert part in letter
  assert re.search(r"^  hardware +none", letter, re.M)
  for i, e in enumerate(SERIES.entries, 1): assert f"\n{i}. {e.title}\n   proved by {e.proves[0]}" in letter, e.name

def test_patches_that_a_page_names_exist():
  for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
    named = set(re.findall(r"patches/\d+[\w-]*\.patch", page.read_text()))
    assert not {n for n in named if not (ROOT / n).is_file()}, page.name
