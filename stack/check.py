"""`dev check`: proves each commit of the series. Its tests fail on the tree before it, for the stated reason, and pass on the tree after it; tests of
earlier commits still pass; and the code that other devices get is the same before and after, unless the entry says what it changes.

The tree before a commit is its parent and the commit's proving test files; the tree after it is the commit. So each stands on its own. Tests of
earlier commits that touch a file which this one touches run after this one, all of them at the end of the series, and where one fails there, the
commit that broke it is looked for.
What was found good is remembered in build/check under a hash of the tree and of all that goes into the run."""
from __future__ import annotations
import concurrent.futures, dataclasses, json, os, pathlib, re, time
from collections.abc import Iterable, Iterator, Sequence
from stack import env, prove, series as ser, tree
from stack.env import Problem, TREE
from stack.prove import Outcome
from stack.series import Entry, git, out

def first_line(text: str) -> str:
  """The line of a failure report that says what went wrong."""
  lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
  errors = [line[1:].strip() for line in lines if line.startswith("E ") and line[1:].strip()]
  if errors: return (" ".join(errors[:2]) if errors[0].endswith(":") else errors[0])[:150]
  return lines[0 if "pytest ended" in lines[0] else -1][:150] if lines else ""

def judge_before(entry: Entry, outcomes: Sequence[Outcome]) -> list[str]:
  """Complaints about how the proving tests ended on the tree without the commit."""
  said = []
  for asked in entry.proves:
    mine = [o for o in outcomes if prove.belongs(o.node, asked) or (o.status == "error" and prove.belongs(asked, o.node))]
    failing = [o for o in mine if o.status in ("failed", "error")]
    # a single test must fail; of a whole file at least one test must
    if not failing or ("::" in asked and len(failing) < len(mine)):
      kinds = ", ".join(sorted({o.status for o in mine})) or "not run"
      said.append(f"{asked} does not fail without this commit ({kinds}): it proves nothing")
    for o in failing:
      if entry.before:
        if not re.search(entry.before, o.text):
          said.append(f"{o.node} fails without this commit, but not for the stated reason /{entry.before}/: {first_line(o.text)}")
      elif o.status == "error":
        said.append(f"{o.node} cannot even start without this commit ({first_line(o.text)}); state that as `before` if that is the point")
      elif re.search(r"^E\s+(ModuleNotFoundError|ImportError|NameError|SyntaxError)\b", o.text, re.M):
        said.append(f"{o.node} fails without this commit by {first_line(o.text)}; state that as `before` if that is the point")
  return said

def judge_after(outcomes: Sequence[Outcome], asked: Sequence[str], what: str) -> list[str]:
  """Complaints about the tests `asked` on a tree that should pass them."""
  mine = [o for o in outcomes if any(prove.belongs(o.node, a) or prove.belongs(a, o.node) for a in asked)]
  bad = [o for o in mine if o.status in ("failed", "error")]
  said = [f"{o.node} {what}: {first_line(o.text)}" for o in bad]
  if not bad and not any(o.status == "passed" for o in mine): said.append(f"no test ran {what}: all skipped")
  return said

def judge(entry: Entry, earlier: Sequence[Entry], before: Sequence[Outcome], after: Sequence[Outcome]) -> list[str]:
  """All complaints about tests: `before` the commit its own, `after` it its own and those of `earlier` ones."""
  if not entry.proves: return ["names no proving test"]
  # a run that ended without a result concerns every test in it
  said = [f"{o.node[:80]}{'...' * (len(o.node) > 80)}: {first_line(o.text)}" for o in after if " " in o.node and o.status == "error"]
  if said: return said
  said = judge_before(entry, before) + judge_after(after, entry.proves, "with this commit")
  return said + [c for e in earlier if e.proves for c in judge_after(after, e.proves, "of an earlier commit, with this one")]

@dataclasses.dataclass(frozen=True)
class Run:
  """Tests in git tree `tree` with environment `env`."""
  tree: str
  env: tuple[tuple[str, str], ...]
  nodes: tuple[str, ...]
  @property
  def record(self) -> pathlib.Path: return prove.record(self.tree, self.env, self.nodes)

  def outcomes(self) -> list[Outcome]:
    if self.record.is_file(): return [Outcome(*o) for o in json.loads(self.record.read_text())]
    with prove.laid_out(TREE, self.tree) as folder: found = prove.run_tests(folder, self.nodes, dict(self.env))
    with env.written_whole(self.record) as part: part.write_text(json.dumps([dataclasses.astuple(o) for o in found]))
    return found

def runs(commit: str, entries: Iterable[Entry]) -> list[Run]:
  tree_id = out(git(TREE, "rev-parse", commit + "^{tree}"))
  return [Run(tree_id, tuple(sorted(extra.items())), tuple(nodes)) for extra, nodes in prove.proofs(entries)]

def touched(before: str, after: str) -> set[str]:
  """Files of tinygrad that differ between two commits."""
  return set(out(git(TREE, "diff", "--name-only", before, after, "--", "tinygrad")).splitlines())

def culprit(entries: Sequence[Entry], commits: Sequence[str], victim: int) -> str:
  """Name of the first entry after number `victim` with which its tests don't pass."""
  e = entries[victim]
  def passes(i: int) -> bool: return not judge_after([o for run in runs(commits[i], [e]) for o in run.outcomes()], e.proves, "")
  return next((entries[i].name for i in range(victim + 1, len(entries)) if not passes(i)), "all of them together, no single commit")

def stretches(entries: Sequence[Entry], names: Sequence[str]) -> Iterator[range]:
  """Runs of neighbouring entries, of those asked for, that claim no effect on generated code."""
  start = None
  for i in range(len(entries) + 1):
    inside = i < len(entries) and not entries[i].changes_codegen and (not names or entries[i].name in names)
    if inside and start is None: start = i
    elif not inside and start is not None:
      yield range(start, i)
      start = None

def code_changes(pool: concurrent.futures.Executor, stretch: range, points: Sequence[str]) -> dict[int, list[str]]:
  """Entry number -> kernels whose code changes with it; points[i], points[i + 1]: commits before and after entry i. Where the code is the same at
  both ends of a stretch nothing between is compiled; where it differs, every commit is looked at to name the one."""
  def code(commits: Sequence[str]) -> list[dict[str, str]]: return prove.generated_code(pool, TREE, commits)
  first, last = code([points[stretch.start], points[stretch.stop]])
  if first == last: return {}
  between = code(points[stretch.start:stretch.stop + 1])
  found = {i: sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k)) for i, old, new in zip(stretch, between, between[1:])}
  return {i: kernels for i, kernels in found.items() if kernels}

def check(names: Sequence[str] = (), workers: int = 2) -> bool:
  """Checks the named entries, or all. Prints one line per entry and its complaints. Returns whether all are proved."""
  series, start = ser.load(), time.monotonic()
  base, commits = tree.history(series)
  of, unowned = ser.owners(series)
  points = [base, *commits]
  ok = True
  if unowned and not names:
    ok = False
    print(f"check: {len(unowned)} files belong to no entry of series.toml: {', '.join(unowned[:8])}{' ...' if len(unowned) > 8 else ''}")
  picked = [series.entries.index(series[name]) for name in names] if names else range(len(series.entries))
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    try:
      before, after, near = {}, {}, {}
      for i in sorted(picked):
        entry, own_tests = series.entries[i], [f for f in of[series.entries[i].name] if f.startswith("test/")]
        proving = [f for f in own_tests if any(prove.belongs(f, p.partition("::")[0]) for p in entry.proves)]
        mine = touched(points[i], points[i + 1])
        near[i] = [e for j, e in enumerate(series.entries[:i]) if mine & touched(points[j], points[j + 1])]
        before[i] = runs(prove.with_files(TREE, points[i], commits[i], proving), [entry])
        after[i] = runs(commits[i], [*near[i], entry])
      last = [] if names or not commits else runs(commits[-1], series.entries)
      changed: dict[int, list[str]] = {}
      for stretch in stretches(series.entries, names): changed |= code_changes(pool, stretch, points)
      jobs = {run: pool.submit(run.outcomes) for run in dict.fromkeys([*(run for i in before for run in (*before[i], *after[i])), *last])}
      shown = env.Progress("runs of tests", len(jobs))
      for job in jobs.values(): job.add_done_callback(lambda _: shown.step())
      for i in before:
        entry = series.entries[i]
        failing, passing = ([o for run in of_tree[i] for o in jobs[run].result()] for of_tree in (before, after))
        shown.clear()
        said = judge(entry, near[i], failing, passing)
        if (kernels := changed.get(i)):
          said.append(f"changes the code generated for {', '.join(kernels[:6])}{' ...' if len(kernels) > 6 else ''}; if meant: see `changes_codegen`")
        if said:
          ok = False
          for run in (*before[i], *after[i]): run.record.unlink(missing_ok=True)
          print(f"check: {entry.name}: NOT proved", *(f"  {s}" for s in said), sep="\n", flush=True)
        else:
          reasons = {first_line(o.text) for o in failing if o.status in ("failed", "error")}
          print(f"check: {entry.name}: proved; without it: {min(reasons, key=len)}", flush=True)
      at_the_end = [o for run in last for o in jobs[run].result()]
      shown.clear()
      for j, e in enumerate(series.entries) if last else ():
        if e.proves and (said := judge_after(at_the_end, e.proves, "at the end of the series")):
          ok = False
          print(f"check: {e.name}: broken later, by {culprit(series.entries, commits, j)}", *(f"  {x}" for x in said), sep="\n", flush=True)
      if not ok:
        for run in last: run.record.unlink(missing_ok=True)
    finally: pool.shutdown(cancel_futures=True)
  print(f"check: {'ok' if ok else 'FAILED'} ({len(before)} of {len(series.entries)} commits, {time.monotonic() - start:.0f} s)")
  return ok

def main(args: list[str]) -> int:
  """dev check [-n WORKERS] [NAME ...]"""
  workers = min(2, os.cpu_count() or 1)
  if args[:1] == ["-n"]:
    if len(args) < 2 or not args[1].isdigit() or args[1] == "0": raise Problem("usage: dev check [-n WORKERS] [NAME ...]")
    workers, args = int(args[1]), args[2:]
  return 0 if check(args, workers) else 1
