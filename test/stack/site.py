"""A clone in miniature: the real `dev` and `stack/`, over an invented base package that needs no network."""
from __future__ import annotations
import hashlib, io, json, os, pathlib, shutil, subprocess, tarfile, zipfile
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE = {  # the "unmodified tinygrad" of these tests
  "tinygrad/__init__.py": "",
  "tinygrad/tensor.py": "from tinygrad.calc import double\n",
  "tinygrad/calc.py": "def double(x):\n  return x + x + 1\n\n\n\n\n\n\n\ndef half(x):\n  return x / 3\n",
  "test/test_tiny.py": "from tinygrad.calc import double\ndef test_tiny(): assert double(0) in (0, 1)\n",
}
FIX_DOUBLE = """\
diff --git a/tinygrad/calc.py b/tinygrad/calc.py
--- a/tinygrad/calc.py
+++ b/tinygrad/calc.py
@@ -1,3 +1,3 @@
 def double(x):
-  return x + x + 1
+  return x + x
 
"""
FIX_HALF = """\
diff --git a/tinygrad/calc.py b/tinygrad/calc.py
--- a/tinygrad/calc.py
+++ b/tinygrad/calc.py
@@ -9,3 +9,3 @@
 
 def half(x):
-  return x / 3
+  return x / 2
"""
DOUBLE_TEST = "from tinygrad.calc import double\ndef test_double(): assert double(4) == 8, 'doubles wrongly'\n"
HALF_TEST = "from tinygrad.calc import half\ndef test_half(): assert half(4) == 2, 'halves wrongly'\n"
SERIES = """\
base = "1.0"
release = 7
author = "Ann Author <ann@example.org>"
"""

def entry(name: str, **keys: object) -> str:
  """One [[commit]] of a series.toml. Claims a change of generated code unless told otherwise, so that the probe does not run."""
  keys = {"title": f"calc: {name}", "changes_codegen": "everything", **keys}
  return f'\n[[commit]]\nname = "{name}"\n' + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items())

DOUBLE = entry("double", patch="patches/01-double.patch", files=["test/unit/test_double.py"], proves=["test/unit/test_double.py::test_double"])
HALF = entry("half", patch="patches/02-half.patch", files=["test/unit/test_half.py"], proves=["test/unit/test_half.py::test_half"])

class Site:
  """`root` is a clone whose series is DOUBLE then HALF until a test writes something else."""
  def __init__(self, root: pathlib.Path, python_env: pathlib.Path):
    self.root, self.tree = root, root / "build" / "tree"
    for name in ("dev", "pyproject.toml", "requirements.txt", "requirements-nodeps.txt", "LICENSE"): shutil.copy(ROOT / name, self.write(name, ""))
    shutil.copytree(ROOT / "stack", root / "stack", ignore=shutil.ignore_patterns("__pycache__"))
    (root / ".venv").symlink_to(python_env)
    sums = [self.archive_sdist(), self.archive_wheel()]
    self.write("base.txt", "tinygrad==1.0 \\\n" + " \\\n".join(f"    --hash=sha256:{s}" for s in sums) + "\n")
    for name, text in {"patches/01-double.patch": FIX_DOUBLE, "patches/02-half.patch": FIX_HALF, "test/unit/test_double.py": DOUBLE_TEST,
                       "test/unit/test_half.py": HALF_TEST, "series.toml": SERIES + DOUBLE + HALF}.items(): self.write(name, text)

  def write(self, name: str, text: str) -> pathlib.Path:
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path

  def archive_sdist(self) -> str:
    path = self.write("build/dl/tinygrad-1.0.tar.gz", "")
    with tarfile.open(path, "w:gz") as tar:
      for name, text in {**BASE, "PKG-INFO": "Name: tinygrad\n"}.items():
        info = tarfile.TarInfo("tinygrad-1.0/" + name)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()

  def archive_wheel(self) -> str:
    path = self.write("build/dl/tinygrad-1.0-py3-none-any.whl", "")
    info = "tinygrad-1.0.dist-info/"
    with zipfile.ZipFile(path, "w") as z:
      for name, text in BASE.items():
        if name.startswith("tinygrad/"): z.writestr(name, text)
      z.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tinygrad\nVersion: 1.0\nAuthor: Upstream\n\nabout\n")
      z.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
      z.writestr(info + "RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()

  def dev(self, *args: object) -> subprocess.CompletedProcess[str]:
    """Runs `dev` there; output and errors together in stdout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "STACK_", "GIT_")) and k not in ("PYTHONPATH", "XDG_CACHE_HOME")}
    return subprocess.run([str(self.root / ".venv" / "bin" / "python"), str(self.root / "dev"), *map(str, args)], env=env, text=True, cwd=self.root,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)

  def ok(self, *args: object) -> str:
    done = self.dev(*args)
    assert done.returncode == 0, done.stdout
    return done.stdout

  def refused(self, *args: object) -> str:
    """Output of a command that must fail, with a message and not a traceback."""
    done = self.dev(*args)
    assert done.returncode != 0 and "Traceback" not in done.stdout, done.stdout
    return done.stdout

  def checkout(self, name: str, files: dict[str, str]) -> pathlib.Path:
    """A git checkout of some tinygrad, beside the clone."""
    at = self.root.parent / name
    for f, text in files.items():
      (at / f).parent.mkdir(parents=True, exist_ok=True)
      (at / f).write_text(text)
    git(at, "init", "-q", "-b", "master")
    git(at, "add", "-A")
    git(at, "commit", "-qm", "base")
    return at

def git(at: pathlib.Path, *args: str) -> str:
  env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
  who = ("-c", "user.name=Tess Tester", "-c", "user.email=tess@example.org")
  return subprocess.run(["git", *who, *args], cwd=at, env=env, text=True, check=True, capture_output=True).stdout.strip()

def state(at: pathlib.Path) -> tuple[str, str, dict[str, bytes]]:
  """All that a command which must change nothing could have changed: commit, status, working files."""
  files = {str(p.relative_to(at)): p.read_bytes() for p in at.rglob("*") if p.is_file() and ".git" not in p.relative_to(at).parts}
  return git(at, "rev-parse", "HEAD"), git(at, "status", "--porcelain"), files

# imported by the test modules: a conftest.py below a linked folder would put this repository's `test` before the tree's
@pytest.fixture(name="site")
def site_fixture(tmp_path: pathlib.Path) -> Site:
  if not (ROOT / ".venv" / "requirements.sha256").is_file(): pytest.skip("needs the .venv that `dev` makes")
  return Site(tmp_path / "clone", ROOT / ".venv")
