"""The patch stack: series.toml, which files an entry owns, and its commits. Commits are made with git plumbing on a private index, so one mechanism
serves the built tree, a foreign checkout and a test repository alike, and a failure leaves nothing but unreachable objects."""
from __future__ import annotations
import dataclasses, os, pathlib, re, subprocess, tempfile, tomllib
from collections.abc import Iterable, Mapping
from typing import Any
from stack.env import Problem, ROOT

DATE = "2026-08-25T00:00:00+0000"  # fixed, so that equal content gives equal commit ids
# Folders of this repository that mirror a tinygrad checkout. test/stack tests this tool and belongs to no entry; upstream has test/__init__.py;
# tinygrad/device.py is for a clone without an installed tinygrad.
OVERLAY = ("tinygrad", "test")
NOT_OVERLAY = re.compile(r"test/stack/|test/__init__\.py$|tinygrad/device\.py$|(.*/)?(__pycache__|\.[^/]*)/|.*\.pyc$")

@dataclasses.dataclass(frozen=True)
class Entry:
  """One commit of the series, in review order.

  name    short id: used on the command line and in exported file names
  title   first line of the commit message
  why     body of the commit message: what was wrong, how to see it, what changed, what was run
  files   globs of whole files of this repository that the commit adds or replaces (`**` crosses folders)
  patch   edits to files that tinygrad owns, relative to this repository; made by `dev tree --save NAME`
  proves  pytest node ids that fail without the commit and pass with it
  before  regular expression that the failure of every proving test without the commit must match
  env     environment of the proving tests, for example {DEV = "CPU"}
  changes_codegen  what the commit changes in code generated for other devices; empty: `dev check` holds it against the code before, byte for byte
  """
  name: str
  title: str
  why: str = ""
  files: tuple[str, ...] = ()
  patch: str = ""
  proves: tuple[str, ...] = ()
  before: str = ""
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  changes_codegen: str = ""

@dataclasses.dataclass(frozen=True)
class Series:
  base: str
  release: int
  author: str
  cover: str # of the exported series, before the list of its commits
  entries: tuple[Entry, ...]
  root: pathlib.Path
  def __getitem__(self, name: str) -> Entry:
    for e in self.entries:
      if e.name == name: return e
    raise Problem(f"no entry {name!r} in series.toml; it has: {', '.join(e.name for e in self.entries)}")

def load(root: pathlib.Path = ROOT) -> Series:
  """Reads ROOT/series.toml. Raises Problem naming the entry and key that is wrong."""
  path = root / "series.toml"
  try: raw = tomllib.loads(path.read_text())
  except (OSError, tomllib.TOMLDecodeError) as e: raise Problem(f"series.toml: {e}") from e
  known, entries = {f.name: f for f in dataclasses.fields(Entry)}, []
  for i, item in enumerate(raw.get("commit", [])):
    label = item.get("name", f"commit {i + 1}")
    if (odd := set(item) - set(known)): raise Problem(f"series.toml: {label}: unknown key {', '.join(sorted(odd))}; known are {', '.join(known)}")
    if not item.get("name") or not item.get("title"): raise Problem(f"series.toml: {label}: name and title are needed")
    if not item.get("files") and not item.get("patch"): raise Problem(f"series.toml: {label}: has neither files nor a patch")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}
    entries.append(Entry(**values))
  names = [e.name for e in entries]
  if (twice := sorted({n for n in names if names.count(n) > 1})): raise Problem(f"series.toml: two entries share a name: {', '.join(twice)}")
  for key in ("base", "release", "author"):
    if key not in raw: raise Problem(f"series.toml: {key} is missing")
  return Series(raw["base"], raw["release"], raw["author"], raw.get("cover", "").strip(), tuple(entries), root)

# *** which files belong to whom ***

def overlay_files(root: pathlib.Path = ROOT) -> list[str]:
  """Every file below tinygrad/ and test/ that takes part in the stack, as sorted paths relative to `root`."""
  found = (os.path.join(at, f) for top in OVERLAY for at, _, files in os.walk(root / top) for f in files)
  return sorted(rel for f in found if not NOT_OVERLAY.match(rel := os.path.relpath(f, root)))

def glob_pattern(glob: str) -> re.Pattern[str]:
  """`**` matches any number of folders, `*` and `?` stay inside one."""
  parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
  return re.compile("".join(parts.get(p) or re.escape(p) for p in re.split(r"(\*\*/|\*\*|\*|\?)", glob)) + r"\Z")

def owners(series: Series) -> tuple[dict[str, list[str]], list[str]]:
  """(files of each entry by name, overlay files that no entry owns). Raises Problem if two entries claim one file or a glob matches nothing."""
  files, owned, of = overlay_files(series.root), {}, {e.name: [] for e in series.entries}  # type: ignore[var-annotated]
  for e in series.entries:
    for glob in e.files:
      hits = [f for f in files if glob_pattern(glob).match(f)]
      if not hits: raise Problem(f"series.toml: {e.name}: no file matches {glob!r}")
      for f in hits:
        if owned.setdefault(f, e.name) != e.name: raise Problem(f"series.toml: {f} belongs to both {owned[f]} and {e.name}; merge the entries")
        if f not in of[e.name]: of[e.name].append(f)
  return of, [f for f in files if f not in owned]

# *** git ***

class Conflict(Problem):
  """A patch does not fit. `entry`: its name; `files`: paths that it could not change."""
  def __init__(self, entry: Entry, files: list[str], detail: str):
    super().__init__(f"{entry.name} ({entry.title}): does not apply to {', '.join(files) or 'the tree'}\n{detail}".rstrip())
    self.entry, self.files = entry, files

ISOLATED = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}

def git(repo: str | os.PathLike[str], *args: str | os.PathLike[str], index: str | os.PathLike[str] | None = None, data: bytes | None = None,
        env: Mapping[str, str] | None = None, check: bool = True) -> subprocess.CompletedProcess[bytes]:
  """git in `repo` without the user's configuration, optionally on another index file. Raises Problem with git's own words."""
  inherited = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
  full = inherited | ISOLATED | ({"GIT_INDEX_FILE": os.fspath(index)} if index else {}) | dict(env or {})
  cmd = ["git", "-c", "safe.directory=*", "-C", os.fspath(repo), *(os.fspath(a) for a in args)]
  try: done = subprocess.run(cmd, input=data if data is not None else b"", capture_output=True, env=full)
  except FileNotFoundError as e: raise Problem("git is needed and not on PATH; install it") from e
  if check and done.returncode: raise Problem(f"git {' '.join(cmd[5:])} in {repo}: {done.stderr.decode(errors='replace').strip()}")
  return done

def out(done: subprocess.CompletedProcess[bytes]) -> str: return done.stdout.decode(errors="replace").strip()

def commit_tree(repo: pathlib.Path, tree: str, parent: str | None, message: str, author: str) -> str:
  """Commit object with a fixed date. Returns its id; moves no branch."""
  name, mail = author.rstrip(">").rsplit(" <", 1)
  who = {f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in (("NAME", name), ("EMAIL", mail), ("DATE", DATE))}
  return out(git(repo, "commit-tree", tree, *(["-p", parent] if parent else []), "-F", "-", data=message.encode(), env=who))

def add_blobs(repo: pathlib.Path, index: str | os.PathLike[str], root: pathlib.Path, files: Iterable[str]) -> None:
  """Puts real copies of `files` (relative to `root`) into `index`."""
  files = list(files)
  if not files: return
  ids = out(git(repo, "hash-object", "-w", "--no-filters", "--stdin-paths", data="\n".join(str(root / f) for f in files).encode())).split()
  lines = (f"{'100755' if os.access(root / f, os.X_OK) else '100644'} {i}\t{f}\n" for f, i in zip(files, ids, strict=True))
  git(repo, "update-index", "--add", "--index-info", index=index, data="".join(lines).encode())

def apply_to_index(repo: pathlib.Path, index: str | os.PathLike[str], entry: Entry, patch: bytes, three_way: bool = False) -> None:
  """Applies `patch` to `index` only. Exact context unless `three_way`. Raises Conflict naming the files."""
  done = git(repo, "apply", "--cached", "--whitespace=nowarn", *(["--3way"] if three_way else []), "-", index=index, data=patch, check=False)
  if done.returncode == 0: return
  text = done.stderr.decode(errors="replace")
  hits = re.findall(r"^error: (?:patch failed: )?([^\s:]+):(?:\d+$| )", text, re.M) + re.findall(r"^U (.+)$", text, re.M)
  raise Conflict(entry, list(dict.fromkeys(h for h in hits if h != "corrupt")), text.strip())

def message(entry: Entry) -> str: return f"{entry.title}\n\n{entry.why.strip()}\n" if entry.why.strip() else entry.title + "\n"

def build(repo: pathlib.Path, base: str, series: Series) -> list[str]:
  """Commits the series on top of commit `base` inside `repo`'s object store. Returns one commit id per entry."""
  of, _ = owners(series)
  parent, made = base, []
  with tempfile.TemporaryDirectory(prefix="stack-") as tmp:
    index = os.path.join(tmp, "index")
    git(repo, "read-tree", base, index=index)
    for e in series.entries:
      add_blobs(repo, index, series.root, of[e.name])
      if e.patch:
        try: patch = (series.root / e.patch).read_bytes()
        except OSError as err: raise Problem(f"series.toml: {e.name}: {e.patch}: {err.strerror}") from err
        apply_to_index(repo, index, e, patch)
      parent = commit_tree(repo, out(git(repo, "write-tree", index=index)), parent, message(e), series.author)
      made.append(parent)
  return made
