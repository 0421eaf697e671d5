"""Runs tests in a tree that is laid out from git objects, and reads what each test said."""
from __future__ import annotations
import contextlib, dataclasses, hashlib, json, os, pathlib, shutil, subprocess, sys, tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from stack import env
from stack.env import BUILD, PYTHON, Problem, ROOT
from stack.series import Entry, git, out

CODEGEN_DEVICES = ("CPU", "CPU:LLVM", "NULL", "NULL:WGSL")  # IR3 is out: its binaries hold addresses, no two runs are alike
LIMIT = 1800  # seconds for one pytest run

@dataclasses.dataclass(frozen=True)
class Outcome:
  """Of one test or of one file that could not be collected. status: passed, failed, skipped, or error (collection or fixture)."""
  node: str
  status: str
  text: str

# Written for every run: pytest imports it by name, and it imports nothing of this repository.
PLUGIN = '''
import json, os
seen = {}
def note(node, status, text):
  if seen.get(node, ("passed",))[0] in ("passed", "skipped"): seen[node] = (status, text)
def pytest_runtest_logreport(report):
  if report.failed: note(report.nodeid, "failed" if report.when == "call" else "error", report.longreprtext)
  elif report.skipped:
    # an expected failure counts as a pass, an unexpected skip as a skip
    note(report.nodeid, "passed" if hasattr(report, "wasxfail") else "skipped", str(report.longrepr))
  elif report.when == "call": seen.setdefault(report.nodeid, ("passed", ""))
def pytest_collectreport(report):
  if report.failed: note(report.nodeid, "error", report.longreprtext)
def pytest_sessionfinish(session):
  if not hasattr(session.config, "workerinput"):
    with open(os.environ["STACK_OUTCOMES"], "w") as f: json.dump(seen, f)
'''

def lay_out(repo: pathlib.Path, tree: str, dest: pathlib.Path) -> None:
  """Writes the files of git object `tree` into the new folder `dest`."""
  with tempfile.TemporaryDirectory(prefix="stack-") as tmp:
    index = os.path.join(tmp, "index")
    git(repo, "read-tree", tree, index=index)
    git(repo, f"--work-tree={dest}", "checkout-index", "-a", "-f", f"--prefix={dest}/", index=index)

def folder(name: str) -> pathlib.Path:
  """A new empty folder below build/work."""
  at = BUILD / "work" / name
  if at.exists(): shutil.rmtree(at)
  at.mkdir(parents=True)
  return at

def settings(tree: pathlib.Path, extra: Mapping[str, str]) -> dict[str, str]:
  """Environment of a run in `tree`: its own caches, so that nothing compiled before a change is taken for the result after it."""
  caches = {"XDG_CACHE_HOME": str(tree / ".cache"), "HYPOTHESIS_STORAGE_DIRECTORY": str(tree / ".cache" / "hypothesis"),
            "PYTHONPYCACHEPREFIX": str(tree / ".cache" / "bytecode")}
  return env.environment({**caches, **extra}, tree=tree)

def run_tests(tree: pathlib.Path, nodes: Iterable[str], extra: Mapping[str, str]) -> list[Outcome]:
  """pytest over `nodes` (ids relative to `tree`) in `tree`. A file that does not exist there is one error. Never raises for what a test does."""
  nodes = list(dict.fromkeys(nodes))
  missing = [Outcome(n, "error", f"No such file: {n.partition('::')[0]}") for n in nodes if not (tree / n.partition("::")[0]).exists()]
  present = [n for n in nodes if (tree / n.partition("::")[0]).exists()]
  if not present: return missing
  with tempfile.TemporaryDirectory(prefix="stack-") as tmp:
    (pathlib.Path(tmp) / "stack_outcomes.py").write_text(PLUGIN)
    result = pathlib.Path(tmp) / "outcomes.json"
    full = settings(tree, {"PARALLEL": "0", **extra, "STACK_OUTCOMES": str(result)})
    full["PYTHONPATH"] = os.pathsep.join([str(tree), tmp])
    cmd = [str(PYTHON), "-m", "pytest", "-q", "-p", "stack_outcomes", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tree), "--tb=short",
           *present]
    pipes: dict[str, int] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try: done = subprocess.run(cmd, cwd=tree, env=full, text=True, timeout=LIMIT, **pipes)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired: return [*missing, Outcome(" ".join(present), "error", f"no result within {LIMIT} s")]
    tail = "\n".join(done.stdout.splitlines()[-15:])
    if not result.is_file(): return [*missing, Outcome(" ".join(present), "error", f"pytest ended with status {done.returncode}:\n{tail}")]
    seen = [Outcome(node, *what) for node, what in json.loads(result.read_text()).items()]
    none = f"no such test (pytest status {done.returncode}):\n{tail}"
    unmatched = [Outcome(n, "error", none) for n in present if not any(belongs(o.node, n) for o in seen)]
    return [*missing, *seen, *unmatched]

def belongs(node: str, asked: str) -> bool:
  """Whether test id `node` is what `asked` names: the same id, a parametrisation of it, or a test in its class, file or folder."""
  return node == asked or any(node.startswith(asked + mark) for mark in ("::", "[", "/"))

def proofs(entries: Iterable[Entry]) -> Iterator[tuple[dict[str, str], list[str]]]:
  """Proving tests of `entries`, grouped by the environment that they run in."""
  groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
  for e in entries: groups.setdefault(tuple(sorted(e.env.items())), []).extend(e.proves)
  yield from ((dict(k), v) for k, v in groups.items() if v)

def record(*parts: object) -> pathlib.Path:
  """File in build/check for the result of a run that `parts`, and what is the same for all runs, decide."""
  text = json.dumps([sys.version, env.clang(), env.digest(env.REQUIREMENTS, env.NODEPS), pathlib.Path(__file__).read_text(), *map(repr, parts)])
  return BUILD / "check" / (hashlib.sha256(text.encode()).hexdigest()[:32] + ".json")

@contextlib.contextmanager
def laid_out(repo: pathlib.Path, tree: str) -> Iterator[pathlib.Path]:
  """A folder of its own with the files of git object `tree`, for as long as it is needed."""
  (BUILD / "work").mkdir(parents=True, exist_ok=True)
  at = pathlib.Path(tempfile.mkdtemp(prefix="tree-", dir=BUILD / "work"))
  try:
    lay_out(repo, tree, at)
    yield at
  finally: shutil.rmtree(at, ignore_errors=True)

def generated_code(pool: Executor, repo: pathlib.Path, commits: Sequence[str]) -> list[dict[str, str]]:
  """Per commit: 'device/kernel' -> hash of the code that its tinygrad generates for it, for the kernels of stack/codegen.py."""
  script = ROOT / "stack" / "codegen.py"
  def one(package: str, commit: str, dev: str) -> dict[str, str]:
    if (known := record(package, dev, script.read_text())).is_file(): return dict(json.loads(known.read_text()))
    with laid_out(repo, commit) as tree:
      done = subprocess.run([str(PYTHON), str(script)], env=settings(tree, {"DEV": dev, "PARALLEL": "0"}), cwd=tree, capture_output=True,
                            stdin=subprocess.DEVNULL, text=True, timeout=LIMIT)
    if done.returncode: raise Problem(f"generating code on {dev} at {commit[:12]} failed:\n{done.stderr.strip()[-1500:]}")
    found = {f"{dev}/{k}": str(v) for k, v in json.loads(done.stdout).items()}
    with env.written_whole(known) as part: part.write_text(json.dumps(found))
    return found
  packages = [out(git(repo, "rev-parse", f"{c}:tinygrad")) for c in commits]
  jobs = {(p, dev): pool.submit(one, p, c, dev) for p, c in dict(zip(packages, commits)).items() for dev in CODEGEN_DEVICES}
  return [{k: v for dev in CODEGEN_DEVICES for k, v in jobs[p, dev].result().items()} for p in packages]

def with_files(repo: pathlib.Path, source: str, other: str, files: Iterable[str]) -> str:
  """Tree object: `source` and, over it, `files` (paths of files or folders) as they are in `other`."""
  with tempfile.TemporaryDirectory(prefix="stack-") as tmp:
    index = os.path.join(tmp, "index")
    git(repo, "read-tree", source, index=index)
    if (files := list(files)): git(repo, "update-index", "--add", "--index-info", index=index, data=git(repo, "ls-tree", "-r", other, *files).stdout)
    return out(git(repo, "write-tree", index=index))
