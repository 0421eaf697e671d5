"""`dev rebase`: tries the series on another tinygrad and runs its proving tests there. Reports apart: changes that do not fit (conflict),
tests that do not pass although the change fits (semantic breakage: a clean apply proves nothing), and tests that pass there without the change."""
from __future__ import annotations
import dataclasses, os, pathlib, re, zipfile
from stack import check, env, prove, series as ser, tree
from stack.apply import apply_series
from stack.env import PYTHON, Problem, TREE
from stack.prove import Outcome
from stack.series import Conflict, Series, git, out

@dataclasses.dataclass(frozen=True)
class Report:
  conflicts: dict[str, Conflict]
  broken: dict[str, list[Outcome]]  # entry -> its failing tests, for entries that apply
  needless: list[str]               # proving tests that pass on the unpatched base
  passed: list[str]                 # entries that apply and whose tests pass

def base_tree(source: str, series: Series) -> str:
  """Commit in build/tree's object store that holds the tinygrad that `source` names: a folder (HEAD of a git checkout, else files) or a version."""
  path = pathlib.Path(source)
  if path.is_dir() and git(path, "rev-parse", "-q", "--verify", "HEAD", check=False).returncode == 0:
    top = out(git(path, "rev-parse", "--show-toplevel"))
    git(TREE, "fetch", "-q", "--no-tags", "--depth=1", pathlib.Path(top).resolve().as_uri(), "HEAD")
    return out(git(TREE, "rev-parse", "FETCH_HEAD"))
  if path.is_dir():
    if not (path / "tinygrad" / "tensor.py").is_file(): raise Problem(f"{source}: has no tinygrad/tensor.py")
    return tree.commit_folder(TREE, path, f"files of {path.name}", series.author)
  if not re.fullmatch(r"\d+(\.\d+)+", source): raise Problem(f"{source} is neither a folder nor a version such as 0.13.0")
  dest = prove.folder("base-" + source)
  pip: list[str | os.PathLike[str]] = [PYTHON, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
  env.run_step(f"downloading tinygrad {source}", [*pip, "--only-binary", ":all:",
                                                  f"tinygrad=={source}", "-d", dest], env.NETWORK)
  with zipfile.ZipFile(next(dest.glob("*.whl"))) as z: z.extractall(dest / "files")
  return tree.commit_folder(TREE, dest / "files", f"tinygrad {source}, unmodified", series.author)

def rebase(source: str) -> Report:
  """Tries the series on `source` (see base_tree). Changes neither `source` nor build/tree's branch. Raises Problem if `source` cannot be read."""
  series = ser.load()
  base, commits = tree.history(series)
  onto = base_tree(source, series)
  applied = apply_series(TREE, onto, series, base, commits, go_on=True)
  for name, c in applied.conflicts.items():
    print(f"rebase: conflict: {name}: {', '.join(c.files) or 'see below'}", *("  " + x for x in str(c).splitlines()[1:6]), sep="\n")
  final = commits[-1] if commits else base
  without, patched = prove.folder("rebase-without"), prove.folder("rebase-with")
  prove.lay_out(TREE, prove.with_files(TREE, onto, final, ["test/"]), without)
  prove.lay_out(TREE, prove.with_files(TREE, applied.head, final, ["test/"]), patched)
  broken, passed, needless = {}, [], []
  fitting = [e for e in series.entries if e.name not in applied.conflicts and e.proves]
  shown = env.Progress("commits tested", len(fitting))
  for e in fitting:
    outcomes = prove.run_tests(patched, e.proves, e.env)
    shown.step()
    shown.clear()
    if (bad := [o for o in outcomes if o.status in ("failed", "error")]) or not any(o.status == "passed" for o in outcomes):
      broken[e.name] = bad or outcomes
      print(f"rebase: BROKEN: {e.name} applies, but:", flush=True)
      for o in broken[e.name]: print(f"  {o.node}: {o.status}: {check.first_line(o.text)}", flush=True)
      continue
    passed.append(e.name)
    if not any(f.startswith("test/mockgpu/") for f in ser.owners(series)[0][e.name]):
      before = prove.run_tests(without, e.proves, e.env)
      needless += [o.node for o in before if o.status == "passed" and any("::" in p and prove.belongs(o.node, p) for p in e.proves)]
    print(f"rebase: {e.name}: applies, tests pass", flush=True)
  for node in needless: print(f"rebase: {node} passes there without the series: fixed upstream?")
  report = Report(applied.conflicts, broken, needless, passed)
  counts = f"{len(passed)} fit and pass, {len(report.conflicts)} conflict, {len(broken)} fit but break"
  print(f"rebase: {'FAILED' if report.conflicts or broken else 'ok'}: {counts}")
  return report

def main(args: list[str]) -> int:
  """dev rebase BASE"""
  if len(args) != 1: raise Problem("usage: dev rebase BASE (a tinygrad checkout or a version)")
  report = rebase(args[0])
  return 1 if report.conflicts or report.broken else 0
