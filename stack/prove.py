"""Runs tests in a tree that is laid out from git objects, and reads what each test said."""
from __future__ import annotations
import dataclasses, hashlib, json, os, pathlib, shutil, subprocess, tempfile
from collections.abc import Iterable, Iterator, Mapping
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
  caches = {"XDG_CACHE_HOME": str(tree / ".cache"), "HYPOTHESIS_STORAGE_DIRECTORY": str(tree / ".cache" / "hypothesis")}
  return env.environment({**caches, **extra}, tree=tree)

def run_tests(tree: pathlib.Path, nodes: Iterable[str], extra: Mapping[str, str], workers: int = 0) -> list[Outcome]:
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
           *(["-n", str(workers)] if workers else []), *present]
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

def generated_code(tree: pathlib.Path, tree_id: str) -> dict[str, str]:
  """'device/kernel' -> hash of the code that `tree` generates for it, for the kernels of stack/codegen.py. `tree_id`: git id of its tinygrad folder;
  the answer is remembered by it, the probe and the compiler."""
  script = ROOT / "stack" / "codegen.py"
  key = f"{tree_id} {env.clang()} {CODEGEN_DEVICES} {script.read_text()}"
  known = BUILD / "work" / f"codegen-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
  if known.is_file(): return dict(json.loads(known.read_text()))
  found = {}
  for dev in CODEGEN_DEVICES:
    done = subprocess.run([str(PYTHON), str(script)], env=settings(tree, {"DEV": dev, "PARALLEL": "0"}), cwd=tree, capture_output=True,
                          stdin=subprocess.DEVNULL, text=True, timeout=LIMIT)
    if done.returncode: raise Problem(f"generating code on {dev} in {tree.name} failed:\n{done.stderr.strip()[-1500:]}")
    found.update({f"{dev}/{k}": str(v) for k, v in json.loads(done.stdout).items()})
  known.write_text(json.dumps(found))
  return found

def with_tests(repo: pathlib.Path, source: str, final: str, without: Iterable[str] = (), plus: Iterable[str] = ()) -> str:
  """Tree object: `source` and, over it, the test/ folder of `final`; less the files `without`, except those that are in `plus`."""
  with tempfile.TemporaryDirectory(prefix="stack-") as tmp:
    index, drop = os.path.join(tmp, "index"), set(without) - set(plus)
    git(repo, "read-tree", source, index=index)
    lines = [line for line in out(git(repo, "ls-tree", "-r", final, "test/")).splitlines() if line.split("\t")[1] not in drop]
    git(repo, "update-index", "--add", "--index-info", index=index, data="".join(line + "\n" for line in lines).encode())
    git(repo, "update-index", "--force-remove", "--stdin", index=index, data="".join(f + "\n" for f in sorted(drop)).encode())
    return out(git(repo, "write-tree", index=index))
