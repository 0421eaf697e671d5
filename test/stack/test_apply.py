"""`dev apply`, `dev export`, `dev rebase`: the series leaves this repository whole or not at all, and a clean apply is not taken for proof."""
from __future__ import annotations
import pathlib, subprocess
import pytest
from test.stack.site import BASE, Site, git, state, site_fixture  # noqa: F401

def test_apply_commits_the_series_with_its_messages(site: Site):
  there = site.checkout("there", BASE)
  site.ok("apply", there)
  assert git(there, "log", "--format=%s|%an").splitlines()[:2] == ["calc: half|Ann Author", "calc: double|Ann Author"]
  assert "x / 2" in (there / "tinygrad/calc.py").read_text() and (there / "test/unit/test_half.py").is_file()
  assert git(there, "status", "--porcelain") == ""

def test_apply_is_whole_or_nothing_when_a_later_commit_conflicts(site: Site):
  there = site.checkout("there", {**BASE, "tinygrad/calc.py": BASE["tinygrad/calc.py"].replace("x / 3", "x / 9")})
  before = state(there)
  text = site.refused("apply", there)
  assert "half" in text and "tinygrad/calc.py" in text
  assert state(there) == before

def test_apply_refuses_where_it_would_overwrite_work(site: Site):
  there = site.checkout("there", BASE)
  (there / "tinygrad/tensor.py").write_text("changed\n")
  before = state(there)
  assert "tinygrad/tensor.py" in site.refused("apply", there) and state(there) == before
  git(there, "checkout", "-q", ".")
  (there / "test/unit").mkdir()
  (there / "test/unit/test_half.py").write_text("mine\n")  # untracked, and the series brings a file of this name
  before = state(there)
  assert "test/unit/test_half.py" in site.refused("apply", there) and state(there) == before

def test_apply_names_what_is_no_checkout(site: Site, tmp_path: pathlib.Path):
  assert "no folder" in site.refused("apply", tmp_path / "nowhere")
  (tmp_path / "plain").mkdir()
  assert "no git checkout" in site.refused("apply", tmp_path / "plain")
  assert "not a tinygrad checkout" in site.refused("apply", site.checkout("other", {"a.py": ""}))

def test_apply_follows_code_that_moved(site: Site):
  there = site.checkout("there", BASE)
  calc = there / "tinygrad/calc.py"
  calc.write_text("# header\n" * 30 + calc.read_text())
  git(there, "commit", "-qam", "moved")
  site.ok("apply", there)
  assert "x / 2" in calc.read_text() and calc.read_text().startswith("# header")

def test_exported_patches_apply_with_git_am(site: Site, tmp_path: pathlib.Path):
  site.ok("export", tmp_path / "out")
  patches = sorted((tmp_path / "out").glob("*.patch"))
  assert [p.name[:4] for p in patches] == ["0001", "0002"]
  letter = (tmp_path / "out" / "0000-cover-letter.txt").read_text()
  assert "proved by test/unit/test_half.py::test_half" in letter and "HERE ***" not in letter
  there = site.checkout("there", BASE)
  git(there, "am", "-q", *map(str, patches))
  assert git(there, "rev-parse", "HEAD^{tree}:tinygrad") == git(site.tree, "rev-parse", "stack:tinygrad")

def test_export_replaces_an_older_export_and_nothing_else(site: Site, tmp_path: pathlib.Path):
  (out := tmp_path / "out").mkdir()
  (out / "notes.txt").write_text("keep")
  (out / "0009-stale.patch").write_text("old")
  site.ok("export", out)
  assert (out / "notes.txt").read_text() == "keep" and not (out / "0009-stale.patch").exists()

def test_rebase_tells_a_conflict_from_a_change_that_fits_and_breaks(site: Site):
  # half's line differs: conflict. double's line is the same, but what it calls means something else by now: fits, and its test fails
  calc = BASE["tinygrad/calc.py"].replace("x / 3", "x / 9")
  there = site.checkout("there", {**BASE, "tinygrad/calc.py": calc + "_double = double\ndef double(x):\n  return -_double(x)\n"})
  before = state(there)
  text = site.refused("rebase", there)
  assert "conflict: half: tinygrad/calc.py" in text
  assert "BROKEN: double applies" in text and "test_double" in text and "doubles wrongly" in text
  assert "0 fit and pass, 1 conflict, 1 fit but break" in text
  assert state(there) == before

def test_rebase_on_a_base_where_all_is_well(site: Site):
  there = site.checkout("there", {**BASE, "tinygrad/more.py": ""})
  assert "2 fit and pass, 0 conflict, 0 fit but break" in site.ok("rebase", there)

def test_rebase_says_what_was_fixed_upstream(site: Site):
  there = site.checkout("there", {**BASE, "tinygrad/__init__.py": "import tinygrad.calc as c\nc.half = lambda x: x / 2\n"})
  assert "test_half.py::test_half passes there without the series" in site.ok("rebase", there)

@pytest.mark.parametrize("verb", ["export", "wheel"])
def test_what_is_no_folder_to_write_to_is_named(site: Site, tmp_path: pathlib.Path, verb: str):
  (tmp_path / "file").write_text("kept")
  for where in ("file", "file/below"): assert "is no folder to write to" in site.refused(verb, tmp_path / where)
  assert (tmp_path / "file").read_text() == "kept"

def test_wheel_installs_runs_and_leaves_nothing(site: Site, tmp_path: pathlib.Path):
  wheel = site.ok("wheel", tmp_path / "dist").splitlines()[-1]
  assert wheel.endswith("tinygrad-1.0+msm.7-py3-none-any.whl")
  content = pathlib.Path(wheel).read_bytes()
  site.ok("wheel", tmp_path / "dist")
  assert pathlib.Path(wheel).read_bytes() == content, "the same series must give the same wheel"
  python = str(site.root / ".venv/bin/python")
  target = tmp_path / "target"
  def run(*args: str) -> str:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(target), "HOME": str(tmp_path)}
    done = subprocess.run([python, *args], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
  run("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target), wheel)
  assert run("-c", "from tinygrad.calc import half; print(half(4))") == "2.0"
  assert run("-c", "import importlib.metadata as m; print(m.version('tinygrad'))") == "1.0+msm.7"
  about = run("-c", "import importlib.metadata as m; print(m.metadata('tinygrad'))")
  assert "Upstream" not in about and "no release of tinygrad's" in about and "not to tinygrad." in about, about
  # every installed file is in RECORD, so that an uninstall takes all of it
  listed = {line.split(",")[0] for line in (target / "tinygrad-1.0+msm.7.dist-info/RECORD").read_text().splitlines()}
  assert {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file() and "__pycache__" not in p.parts} <= listed
