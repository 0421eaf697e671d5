"""`dev check`: accepts a commit only if its tests fail before it for the stated reason, pass after it, and nothing else changed."""
from __future__ import annotations
import pathlib
from test.stack.site import DOUBLE, DOUBLE_TEST, HALF, HALF_TEST, SERIES, Site, entry, site_fixture  # noqa: F401

HALF_KEYS = {"patch": "patches/02-half.patch", "files": ["test/unit/test_half.py"], "proves": ["test/unit/test_half.py::test_half"]}

def test_a_good_series_is_proved(site: Site):
  text = site.ok("check")
  assert "double: proved" in text and "half: proved" in text and "check: ok (2 of 2 commits," in text and "halves wrongly" in text

def test_a_test_that_passes_before_the_commit_proves_nothing(site: Site):
  site.write("test/unit/test_half.py", HALF_TEST.replace("half(4) == 2", "half(0) == 0"))
  assert "test_half does not fail without this commit" in site.refused("check", "half")

def test_of_a_whole_file_one_failing_test_is_enough(site: Site):
  site.write("test/unit/test_half.py", HALF_TEST + "def test_zero(): assert half(0) == 0\n")
  site.write("series.toml", SERIES + DOUBLE + entry("half", **{**HALF_KEYS, "proves": ["test/unit/test_half.py"]}))
  assert "half: proved" in site.ok("check", "half")

def test_a_test_that_fails_after_the_commit(site: Site):
  site.write("test/unit/test_half.py", HALF_TEST.replace("== 2", "== 3"))
  assert "test_half with this commit: AssertionError: halves wrongly" in site.refused("check", "half")

def test_a_test_that_fails_before_by_an_import_error(site: Site):
  site.write("test/unit/test_half.py", HALF_TEST.replace("import half", "import half, third"))
  assert "cannot even start without this commit" in site.refused("check", "half")

def test_the_stated_reason_must_be_the_reason(site: Site):
  site.write("series.toml", SERIES + DOUBLE + entry("half", before="ZeroDivisionError", **HALF_KEYS))
  assert "not for the stated reason /ZeroDivisionError/" in site.refused("check", "half")
  site.write("series.toml", SERIES + DOUBLE + entry("half", before="halves wrongly", **HALF_KEYS))
  assert "half: proved" in site.ok("check", "half")

def test_a_new_module_states_the_import_error(site: Site):
  site.write("tinygrad/fresh.py", "x = 1\n")
  site.write("test/unit/test_fresh.py", "from tinygrad.fresh import x\ndef test_x(): assert x == 1\n")
  keys = {"files": ["tinygrad/fresh.py", "test/unit/test_fresh.py"], "proves": ["test/unit/test_fresh.py"]}
  site.write("series.toml", SERIES + DOUBLE + HALF + entry("fresh", before="No module named 'tinygrad.fresh'", **keys))
  assert "fresh: proved" in site.ok("check", "fresh")

def test_a_commit_that_breaks_an_earlier_one(site: Site):
  breaks = (site.root / "patches/02-half.patch").read_text() + "+def double(x):\n+  return 9\n"
  site.write("patches/02-half.patch", breaks.replace("@@ -9,3 +9,3 @@", "@@ -9,3 +9,5 @@"))
  assert "test_double of an earlier commit, with this one" in site.refused("check", "half")

def test_a_commit_that_breaks_an_earlier_one_from_afar(site: Site):
  # it touches no file that the earlier one touches, so its own run does not see it; the end of the series does, and finds it
  site.write("tinygrad/fresh.py", "x = 1\n")
  site.write("test/unit/test_fresh.py", "def test_x(): import tinygrad.fresh as f; assert f.x == 1\n")
  fresh = entry("fresh", files=["tinygrad/fresh.py", "tinygrad/tensor.py", "test/unit/test_fresh.py"], proves=["test/unit/test_fresh.py::test_x"],
                before="No module named 'tinygrad.fresh'")
  site.write("tinygrad/tensor.py", "import tinygrad.calc as c\nc.double = lambda x: 9\n")
  site.write("test/unit/test_double.py", "import tinygrad.tensor\n" + DOUBLE_TEST)
  site.write("series.toml", SERIES + DOUBLE + HALF + fresh)
  text = site.refused("check")
  assert "fresh: proved" in text and "double: broken later, by fresh" in text and "test_double at the end of the series: AssertionError" in text

def test_a_test_that_does_not_exist_or_is_skipped(site: Site):
  site.write("series.toml", SERIES + DOUBLE + entry("half", **{**HALF_KEYS, "proves": ["test/unit/test_half.py::test_other"]}))
  assert "half: NOT proved" in site.refused("check", "half")
  site.write("test/unit/test_half.py", "import pytest\n@pytest.mark.skip\ndef test_half(): pass\n")
  site.write("series.toml", SERIES + DOUBLE + HALF)
  text = site.refused("check", "half")
  assert "does not fail without this commit (skipped)" in text and "all skipped" in text

def test_a_commit_without_proof_and_a_file_without_owner(site: Site):
  site.write("test/unit/test_stray.py", "")
  site.write("series.toml", SERIES + DOUBLE + entry("half", **{**HALF_KEYS, "proves": []}))
  text = site.refused("check")
  assert "half: NOT proved" in text and "names no proving test" in text and "test/unit/test_stray.py" in text

def test_an_undeclared_change_of_generated_code(site: Site):
  # the probe is replaced, the comparison and its claim are the real ones
  site.write("stack/codegen.py", "import json\nfrom tinygrad.calc import half\nprint(json.dumps({'kernel': str(half(4))}))\n")
  site.write("series.toml", SERIES + DOUBLE + entry("half", changes_codegen="", **HALF_KEYS))
  assert "changes the code generated for CPU/kernel" in site.refused("check", "half")
  site.write("stack/codegen.py", "import json\nprint(json.dumps({'kernel': 'same'}))\n")
  assert "half: proved" in site.ok("check", "half")

def test_of_several_commits_the_one_that_changes_generated_code_is_named(site: Site):
  site.write("stack/codegen.py", "import json\nfrom tinygrad.calc import half\nprint(json.dumps({'kernel': str(half(4))}))\n")
  site.write("tinygrad/fresh.py", "x = 1\n")
  site.write("test/unit/test_fresh.py", "def test_x(): import tinygrad.fresh as f; assert f.x == 1\n")
  fresh = entry("fresh", changes_codegen="", files=["tinygrad/fresh.py", "test/unit/test_fresh.py"], proves=["test/unit/test_fresh.py::test_x"],
                before="No module named 'tinygrad.fresh'")
  site.write("series.toml", SERIES + DOUBLE.replace('"everything"', '""') + entry("half", changes_codegen="", **HALF_KEYS) + fresh)
  text = site.refused("check")
  assert "double: proved" in text and "fresh: proved" in text and "half: NOT proved\n  changes the code generated for CPU/kernel" in text

def test_what_was_proved_is_remembered_until_it_changes(site: Site, tmp_path: pathlib.Path):
  # the test leaves a mark for each run
  def mark(body: str) -> str: return f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n{body}"
  def count() -> int: return (tmp_path / "runs").stat().st_size
  site.write("test/unit/test_half.py", mark(HALF_TEST))
  site.ok("check", "half")
  assert count() == 2
  assert "half: proved" in site.ok("check", "half") and count() == 2
  site.write("test/unit/test_half.py", mark(HALF_TEST.replace("half(4) == 2", "half(4) == 3")))
  site.refused("check", "half")
  assert count() == 4
  site.refused("check", "half")
  assert count() == 6, "a failure is tried again"
  site.write("test/unit/test_half.py", mark(HALF_TEST))
  assert "half: proved" in site.ok("check", "half") and count() == 6

def test_a_crash_of_the_test_process_is_a_finding(site: Site):
  site.write("test/unit/test_half.py", HALF_TEST.replace("assert half(4) == 2", "import os; half(4) == 2 or os.abort(); assert half(4) == 2"))
  text = site.refused("check", "half")
  assert "half: NOT proved" in text and "pytest ended with status" in text

def test_an_unknown_entry_is_named(site: Site):
  assert "no entry 'nothing'" in site.refused("check", "nothing")
