"""`dev apply`: the series on a tinygrad checkout, whole or not at all. Commits are made beside the checkout's branch and the branch moves last."""
from __future__ import annotations
import dataclasses, os, pathlib, tempfile
from stack import series as ser, tree
from stack.env import Problem, TREE
from stack.series import Conflict, Entry, Series, git, out

@dataclasses.dataclass(frozen=True)
class Applied:
  """Result of trying the series on a commit: the new commit of each entry that fits, and the conflict of each that does not."""
  commits: dict[str, str]
  conflicts: dict[str, Conflict]
  head: str

def apply_series(repo: pathlib.Path, onto: str, series: Series, base: str, commits: list[str], go_on: bool) -> Applied:
  """Puts each commit's change (`base`, `commits`: in build/tree) onto commit `onto` in `repo`'s object store; moves no branch and no file. A change
  that does not fit by its context is merged three-way where `repo` has the original content. With `go_on`, an entry that does not fit is left out;
  without it, Conflict is raised."""
  head, made, conflicts = onto, {}, {}
  with tempfile.TemporaryDirectory(prefix="stack-") as tmp:
    for i, (entry, commit) in enumerate(zip(series.entries, commits, strict=True)):
      index = os.path.join(tmp, str(i))
      git(repo, "read-tree", head, index=index)
      patch = git(TREE, "diff", "--binary", "--full-index", commits[i - 1] if i else base, commit).stdout
      try: fit(repo, index, entry, patch)
      except Conflict as c:
        if not go_on: raise
        conflicts[entry.name] = c
        continue
      head = made[entry.name] = ser.commit_tree(repo, out(git(repo, "write-tree", index=index)), head, ser.message(entry), series.author)
  return Applied(made, conflicts, head)

def fit(repo: pathlib.Path, index: str, entry: Entry, patch: bytes) -> None:
  """By exact context, else by a three-way merge. Raises Conflict."""
  try: ser.apply_to_index(repo, index, entry, patch)
  except Conflict as exact:
    try: ser.apply_to_index(repo, index, entry, patch, three_way=True)
    except Conflict as merged: raise (merged if merged.files else exact) from None

def apply(checkout: pathlib.Path) -> list[str]:
  """Applies the whole series to the branch that `checkout` is on. Returns the new commits. On any problem (Problem) the checkout is as it was."""
  if not checkout.is_dir(): raise Problem(f"{checkout} is no folder; give the path of a tinygrad git checkout")
  if git(checkout, "rev-parse", "--show-toplevel", check=False).returncode: raise Problem(f"{checkout} is no git checkout; clone tinygrad with git")
  top = pathlib.Path(out(git(checkout, "rev-parse", "--show-toplevel")))
  if not (top / "tinygrad" / "tensor.py").is_file(): raise Problem(f"{top} is not a tinygrad checkout: it has no tinygrad/tensor.py")
  if (dirty := out(git(top, "status", "--porcelain", "--untracked-files=no")).splitlines()):
    raise Problem(f"{top} has changes that are not committed ({dirty[0].split()[-1]}{' ...' if len(dirty) > 1 else ''}); commit or stash them first")
  series = ser.load()
  titles = out(git(top, "log", "-200", "--format=%s")).splitlines()
  if (there := [e.name for e in series.entries if ser.message(e).split("\n")[0] in titles]):
    raise Problem(f"{top} has commits of this series already ({', '.join(there)}); apply it to a branch without them")
  base, commits = tree.history(series)
  applied = apply_series(top, out(git(top, "rev-parse", "HEAD")), series, base, commits, go_on=False)
  # refuses, with nothing changed, if an untracked file is in the way
  git(top, "merge", "-q", "--ff-only", applied.head)
  return list(applied.commits.values())

def main(args: list[str]) -> int:
  """dev apply CHECKOUT"""
  if len(args) != 1: raise Problem("usage: dev apply CHECKOUT")
  made = apply(pathlib.Path(args[0]))
  print(f"apply: {len(made)} commits on {args[0]}, now at {made[-1][:12] if made else 'the same commit'}")
  return 0
