"""`dev tree`: what the built tree holds, and that neither edits nor this repository's own files are ever lost."""
from __future__ import annotations
import os, subprocess, sys
import pytest
from test.stack.site import DOUBLE, FIX_HALF, HALF, SERIES, Site, entry, git, site_fixture  # noqa: F401

def test_history_is_the_base_and_one_commit_an_entry(site: Site):
  site.ok("tree")
  assert git(site.tree, "log", "--format=%s").splitlines() == ["calc: half", "calc: double", "tinygrad 1.0, unmodified"]
  assert git(site.tree, "show", "HEAD~2:tinygrad/calc.py").startswith("def double(x):\n  return x + x + 1")
  assert "x + x + 1" not in git(site.tree, "show", "HEAD:tinygrad/calc.py")
  assert git(site.tree, "status", "--porcelain") == ""
  assert git(site.tree, "show", "HEAD:test/unit/test_half.py") == (site.root / "test/unit/test_half.py").read_text().strip()

def test_equal_content_gives_equal_commits(site: Site, tmp_path):
  site.ok("tree")
  other = Site(tmp_path / "other", (site.root / ".venv").resolve())
  other.ok("tree")
  assert git(site.tree, "rev-parse", "HEAD") == git(other.tree, "rev-parse", "HEAD")

def test_own_files_are_links_so_an_edit_is_live(site: Site):
  site.ok("tree")
  linked = site.tree / "test/unit/test_half.py"
  assert linked.is_symlink()
  site.write("test/unit/test_half.py", "# edited\n")
  assert linked.read_text() == "# edited\n"
  assert (site.tree / "tinygrad/calc.py").is_file() and not (site.tree / "tinygrad/calc.py").is_symlink()

def test_a_new_file_is_linked_and_a_removed_one_goes(site: Site):
  site.ok("tree")
  site.write("tinygrad/runtime/new.py", "x = 1\n")
  assert site.ok("run", "-c", "from tinygrad.runtime import new; print(new.x)").splitlines()[-1] == "1"
  (site.root / "tinygrad/runtime/new.py").unlink()
  site.ok("tree")
  assert not os.path.lexists(site.tree / "tinygrad/runtime/new.py")

def test_a_file_of_the_base_can_be_replaced_whole_and_given_back(site: Site):
  site.write("tinygrad/tensor.py", "mine = 1\n")
  site.write("series.toml", SERIES + DOUBLE + HALF + entry("own", files=["tinygrad/tensor.py"]))
  site.ok("tree")
  assert (site.tree / "tinygrad/tensor.py").is_symlink() and git(site.tree, "show", "HEAD:tinygrad/tensor.py") == "mine = 1"
  assert git(site.tree, "status", "--porcelain") == ""
  (site.root / "tinygrad/tensor.py").unlink()
  site.write("series.toml", SERIES + DOUBLE + HALF)
  site.ok("tree")
  assert not (site.tree / "tinygrad/tensor.py").is_symlink() and "calc" in (site.tree / "tinygrad/tensor.py").read_text()

def test_nothing_is_rebuilt_when_nothing_changed(site: Site):
  assert "+ 2 commits" in site.ok("tree")
  assert "commits" not in site.ok("tree")

def test_a_damaged_link_is_repaired(site: Site):
  site.ok("tree")
  (site.tree / "test/unit/test_half.py").unlink()
  site.ok("tree")
  assert (site.tree / "test/unit/test_half.py").is_symlink()

def test_edits_survive_a_rebuild_that_does_not_concern_them(site: Site):
  site.ok("tree")
  (site.tree / "tinygrad/tensor.py").write_text("# mine\n")
  site.write("test/unit/test_more.py", "")
  site.ok("tree")
  assert (site.tree / "tinygrad/tensor.py").read_text() == "# mine\n"

def test_a_rebuild_that_would_lose_edits_is_refused_until_forced(site: Site):
  site.ok("tree")
  edited = (site.tree / "tinygrad/calc.py")
  edited.write_text(edited.read_text() + "# mine\n")
  site.write("series.toml", SERIES + DOUBLE)
  assert "tinygrad/calc.py" in (text := site.refused("tree")) and "--save" in text
  assert edited.read_text().endswith("# mine\n")
  assert "tinygrad/calc.py" in site.refused("tree"), "the second attempt must be as careful as the first"
  site.ok("tree", "--force")
  assert "# mine" not in edited.read_text()

def test_save_moves_edits_into_the_patch_of_an_entry(site: Site):
  site.ok("tree")
  edited = site.tree / "tinygrad/calc.py"
  edited.write_text(edited.read_text().replace("return x / 2", "return x * 0.5"))
  site.ok("tree", "--save", "half")
  assert "+  return x * 0.5" in (site.root / "patches/02-half.patch").read_text()
  assert git(site.tree, "status", "--porcelain") == "" and "x * 0.5" in git(site.tree, "show", "HEAD:tinygrad/calc.py")
  assert "x * 0.5" not in git(site.tree, "show", "HEAD~1:tinygrad/calc.py")

def test_a_patch_that_does_not_fit_names_entry_and_file_and_leaves_the_tree(site: Site):
  site.ok("tree")
  before = git(site.tree, "rev-parse", "HEAD")
  site.write("patches/02-half.patch", FIX_HALF.replace("return x / 3", "return x / 4"))
  text = site.refused("tree")
  assert "half" in text and "tinygrad/calc.py" in text
  assert git(site.tree, "rev-parse", "HEAD") == before and "return x / 2" in (site.tree / "tinygrad/calc.py").read_text()

def test_mistakes_in_series_toml_are_named(site: Site):
  for text, said in ((SERIES + entry("a", pach="x"), "unknown key pach"), (SERIES + entry("a"), "neither files nor a patch"),
                     (SERIES + DOUBLE + DOUBLE, "share a name: double"),
                     (SERIES + entry("a", files=["test/nowhere.py"]), "no file matches 'test/nowhere.py'"),
                     (SERIES + DOUBLE + entry("b", files=["test/unit/*.py"]), "test/unit/test_double.py belongs to both double and b"),
                     ("base = 3.3.3", "series.toml: "), (SERIES.replace("1.0", "2.0") + DOUBLE, "base.txt names 1.0")):
    site.write("series.toml", text)
    assert said in site.refused("tree")

def test_an_interrupted_build_of_the_tree_is_finished_by_the_next_command(site: Site):
  site.ok("tree")
  (site.tree / ".git" / "stack-stamp").unlink()
  (site.tree / "tinygrad/tensor.py").unlink()
  site.ok("tree", "--force")
  assert (site.tree / "tinygrad/tensor.py").is_file()

def test_the_compiler_is_chosen_by_many_at_once(site: Site):
  (site.root / "build" / "bin").mkdir()
  code = """if True:
    import concurrent.futures, sys, threading
    sys.path.insert(0, ".")
    from stack import env
    together, link = [threading.Barrier(4), threading.Barrier(4)], env.pathlib.Path.symlink_to
    env.clang_works = lambda path: together[0].wait(20) is not None
    env.pathlib.Path.symlink_to = lambda self, path: (link(self, path), together[1].wait(20))
    with concurrent.futures.ThreadPoolExecutor(4) as pool: found = {job.result() for job in [pool.submit(env.clang) for _ in range(4)]}
    print(len(found), (env.BUILD / "bin" / "clang").readlink() in map(env.pathlib.Path, found), *(p.name for p in (env.BUILD / "bin").iterdir()))"""
  done = subprocess.run([sys.executable, "-c", code], cwd=site.root, capture_output=True, text=True, timeout=120)
  assert done.stdout == "1 True clang\n", done.stderr

@pytest.mark.parametrize("name", ["LLVM_PATH", "MESA_PATH"])
def test_a_library_that_was_asked_for_is_not_passed_over_in_silence(site: Site, name: str):
  code = "import sys; sys.path.insert(0, '.'); from stack import env; env.environment()"
  done = subprocess.run([sys.executable, "-c", code], cwd=site.root, env={**os.environ, name: "/nonexistent.so"}, capture_output=True, text=True)
  assert done.returncode and f"{name}=/nonexistent.so is no file" in done.stderr, done.stderr

@pytest.mark.parametrize("cc,said", [("nope", "CC=nope is no program on PATH"), ("ccache clang", "CC=ccache clang is no program"),
                                     ("false", "CC=false does not compile as tinygrad's CPU device needs it, ")])
def test_a_compiler_that_was_asked_for_is_not_passed_over_in_silence(site: Site, cc: str, said: str):
  code = "import sys; sys.path.insert(0, '.'); from stack import env; print(env.clang())"
  for _ in range(2):
    done = subprocess.run([sys.executable, "-c", code], cwd=site.root, env={**os.environ, "CC": cc}, capture_output=True, text=True, timeout=120)
    assert said in done.stderr and (done.returncode == 0) == ("does not compile" in said), done.stderr
    if not done.returncode: assert f"{done.stdout.strip()} is used instead" in done.stderr
