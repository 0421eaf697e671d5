"""`dev tree`: build/tree, a git repository of the unmodified base and the series, with this repository's own files linked into its working tree.

The history holds real copies; the working tree holds links wherever a file is this repository's, so that an edit is live. Linked paths are marked
skip-worktree: `git -C build/tree diff` shows exactly the edits to tinygrad's own files that `dev tree --save NAME` would put into a patch."""
from __future__ import annotations
import dataclasses, hashlib, os, pathlib, shutil, tarfile, tempfile
from stack import env, series as ser
from stack.env import Problem, ROOT, TREE, say
from stack.series import Series, git, out

BRANCH = "refs/heads/stack"
# A checkout of tinygrad has these empty files; its sdist leaves them out. Without them the standard library's package `test` would win.
MARKERS = ("test/__init__.py", "test/null/__init__.py", "test/unit/__init__.py", "test/device/__init__.py")

def commit_folder(repo: pathlib.Path, top: pathlib.Path, text: str, author: str) -> str:
  """Commit in `repo` of tinygrad's files in `top`: package, tests, licence; no packaging metadata, and with MARKERS. `top` is not changed."""
  walks = [w for part in ("tinygrad", "test") for w in os.walk(top / part)]
  files = [os.path.relpath(os.path.join(d, f), top) for d, _, fs in walks for f in fs if not f.endswith(".pyc")]
  files += [f for f in ("LICENSE", "README.md", "pyproject.toml") if (top / f).is_file()]
  with tempfile.TemporaryDirectory(prefix="stack-") as tmp:
    index = os.path.join(tmp, "index")
    ser.add_blobs(repo, index, top, sorted(files))
    empty = out(git(repo, "hash-object", "-w", "--stdin"))
    for m in MARKERS:
      if m not in files: git(repo, "update-index", "--add", "--cacheinfo", f"100644,{empty},{m}", index=index)
    return ser.commit_tree(repo, out(git(repo, "write-tree", index=index)), None, text, author)

def base_commit(repo: pathlib.Path, sdist: pathlib.Path, series: Series) -> str:
  """Commit of the unmodified sdist (package, tests, licence; no packaging metadata) in `repo`, made once per sdist content."""
  ref = f"refs/base/{hashlib.sha256(sdist.read_bytes()).hexdigest()[:16]}"
  if (known := git(repo, "rev-parse", "-q", "--verify", ref, check=False)).returncode == 0: return out(known)
  with tempfile.TemporaryDirectory(prefix="stack-") as tmp:
    with tarfile.open(sdist) as tar: tar.extractall(tmp, filter="data")
    text = f"tinygrad {series.base}, unmodified\n\nThe published sdist, plus the empty package markers of test/ that a checkout has."
    commit = commit_folder(repo, next(pathlib.Path(tmp).iterdir()), text, series.author)
  git(repo, "update-ref", ref, commit)
  return commit

def history(series: Series, python: str | os.PathLike[str] = env.PYTHON) -> tuple[str, list[str]]:
  """(base commit, series commits) in build/tree's object store, from the files as they are now. Moves no branch, touches no working file.
  `python`: whose pip downloads the base if need be."""
  TREE.mkdir(parents=True, exist_ok=True)
  if not (TREE / ".git").is_dir(): git(TREE, "init", "-q", "-b", "stack")
  base = base_commit(TREE, env.base_archives(python)[0], series)
  return base, ser.build(TREE, base, series)

def link_plan(root: pathlib.Path, tree_files: set[str]) -> dict[str, str]:
  """Links that the working tree needs: path in the tree -> its target, relative to the link. A folder is linked whole where no file of
  the tree but the overlay's own lies in it."""
  files = [*ser.overlay_files(root), *(f"test/stack/{p.name}" for p in sorted((root / "test" / "stack").glob("*.py")))]
  foreign = {str(p) for f in tree_files - set(files) for p in pathlib.PurePosixPath(f).parents}
  plan = {}
  for f in files:
    path = pathlib.PurePosixPath(f)
    at = next((str(p) for p in list(path.parents)[::-1][1:] if str(p) not in foreign), f)
    plan[at] = os.path.relpath(root / at, (TREE / at).parent)
  return plan

def links_in_place(plan: dict[str, str]) -> bool:
  try: return all(os.readlink(TREE / at) == target for at, target in plan.items())
  except OSError: return False

def recorded_links() -> dict[str, str]:
  """Links made by the last build of the working tree."""
  path = TREE / ".git" / "linked"
  return dict(line.split("\t") for line in path.read_text().splitlines()) if path.is_file() else {}

def checkout(head: str, plan: dict[str, str], force: bool) -> None:
  """Makes the working tree show `head`, with the links of `plan` over it. Only files that differ are touched; edits to tinygrad's own files are
  kept, unless `force` drops them. Raises Problem, with nothing changed, where an edited file would have to change."""
  linked = [f for f in out(git(TREE, "ls-tree", "-r", "--name-only", head)).splitlines() if any(f == at or f.startswith(at + "/") for at in plan)]
  for at in recorded_links():
    if at not in plan and (TREE / at).is_symlink(): (TREE / at).unlink()
  with tempfile.TemporaryDirectory(prefix="stack-") as tmp:
    index = os.path.join(tmp, "index")
    git(TREE, "read-tree", head, index=index)
    if linked: git(TREE, "update-index", "--force-remove", "--stdin", index=index, data="\n".join(linked).encode())
    plain = out(git(TREE, "write-tree", index=index))
  # git must never see a linked path here: it would write through the link into this repository
  previous = out(git(TREE, "rev-parse", "-q", "--verify", "refs/plain", check=False))
  git(TREE, "read-tree", previous or "--empty")
  if previous and not force:
    git(TREE, "update-index", "-q", "--refresh", check=False)
    if git(TREE, "read-tree", "-m", "-u", previous, plain, check=False).returncode:
      changing = set(out(git(TREE, "diff", "--name-only", previous, plain)).splitlines())
      edited = out(git(TREE, "diff-index", "--name-only", previous)).splitlines()
      clash = ", ".join(f for f in edited if f in changing)
      raise Problem(f"build/tree has edits that are in no patch, to files that the series changes too: {clash}\n"
                    "Save them with `dev tree --save NAME` (the entry they belong to), or drop them with `dev tree --force`.")
  else: git(TREE, "read-tree", "--reset", "-u", plain)
  git(TREE, "update-ref", "refs/plain", plain)
  for at, target in plan.items():
    path = TREE / at
    if path.is_symlink() and os.readlink(path) == target: continue
    if path.is_dir() and not path.is_symlink(): shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
  git(TREE, "read-tree", head)
  if linked: git(TREE, "update-index", "--skip-worktree", "--stdin", data="\n".join(linked).encode())
  git(TREE, "update-index", "-q", "--refresh", check=False)
  git(TREE, "update-ref", BRANCH, head)
  git(TREE, "symbolic-ref", "HEAD", BRANCH)
  (TREE / ".git" / "info" / "exclude").write_text("".join(f"/{at}\n" for at in plan))
  (TREE / ".git" / "linked").write_text("".join(f"{at}\t{target}\n" for at, target in plan.items()))

def fingerprint(root: pathlib.Path) -> str:
  """Of everything the working tree depends on beside the contents of linked files: patches, series, base, and which overlay files exist."""
  inputs = [root / "series.toml", env.BASE, *sorted((root / "patches").glob("*.patch")), pathlib.Path(__file__), pathlib.Path(ser.__file__)]
  return env.digest(*inputs, salt="\n".join(ser.overlay_files(root)))

def ensure(force: bool = False) -> None:
  """Brings build/tree up to date; returns at once if nothing it depends on changed. Raises Problem, also for edits that would be lost."""
  stamp, want = TREE / ".git" / "stack-stamp", fingerprint(ROOT)
  def current() -> bool: return stamp.is_file() and stamp.read_text() == want and links_in_place(recorded_links())
  if not force and current(): return
  with env.locked("tree"):
    if not force and current(): return
    series = ser.load()
    if series.base != env.base_version(): raise Problem(f"series.toml is for tinygrad {series.base}, base.txt names {env.base_version()}")
    base, commits = history(series)
    head = commits[-1] if commits else base
    plan = link_plan(ROOT, set(out(git(TREE, "ls-tree", "-r", "--name-only", head)).splitlines()))
    checkout(head, plan, force)
    stamp.write_text(want)
    say(f"build/tree: tinygrad {series.base} + {len(commits)} commits")

def save(name: str) -> None:
  """Moves the edits in build/tree into the patch of entry `name` and rebuilds. The edits must apply at the entry's place in the series."""
  series = ser.load()
  entry = series[name]
  if not entry.patch: raise Problem(f"series.toml: {name} has no patch; add patch = \"patches/{len(series.entries):02}-{name}.patch\" to it")
  target = series.root / entry.patch
  edits = git(TREE, "diff", "--binary", "--full-index").stdout
  if not edits: raise Problem("build/tree has no edits to save")
  at = series.entries.index(entry)
  before = dataclasses.replace(series, entries=series.entries[:at])
  base = base_commit(TREE, env.base_archives()[0], series)
  parent = ([base] + ser.build(TREE, base, before))[-1]
  with tempfile.TemporaryDirectory(prefix="stack-") as tmp:
    index = os.path.join(tmp, "index")
    git(TREE, "read-tree", parent, index=index)
    if target.is_file(): ser.apply_to_index(TREE, index, entry, target.read_bytes())
    ser.apply_to_index(TREE, index, entry, edits, three_way=True)
    tree = out(git(TREE, "write-tree", index=index))
  target.parent.mkdir(exist_ok=True)
  target.write_bytes(git(TREE, "diff", "--binary", parent, tree).stdout)
  say(f"{entry.patch}: {len(git(TREE, 'diff', '--numstat', parent, tree).stdout.splitlines())} file(s); rebuilding")
  ensure(force=True)

def main(args: list[str]) -> int:
  """dev tree [--force | --save NAME]"""
  if args[:1] == ["--save"] and len(args) == 2: save(args[1])
  elif args in ([], ["--force"]): ensure(force=bool(args))
  else: raise Problem("usage: dev tree [--force | --save NAME]")
  print(TREE)
  return 0
