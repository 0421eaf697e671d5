"""`dev check`: proves each commit of the series. Its tests fail on the tree before it, for the stated reason, and pass on the tree after it; tests of
earlier commits still pass; and the code that other devices get is the same before and after, unless the entry says what it changes.

Trees before and after a commit both carry the final test/ folder, because a commit may be proved by the virtual GPU that a later one adds. The files
of test/ that the commit itself owns are absent before it, except the proving tests."""
from __future__ import annotations
import re, time
from collections.abc import Sequence
from stack import prove, series as ser, tree
from stack.env import Problem, TREE
from stack.prove import Outcome
from stack.series import Entry, git, out

def first_line(text: str) -> str:
  """The line of a failure report that says what went wrong."""
  lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
  return next((line[1:].strip() for line in lines if line.startswith("E ")), lines[0 if "pytest ended" in lines[0] else -1] if lines else "")[:150]

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

def judge_after(outcomes: Sequence[Outcome], what: str) -> list[str]:
  bad = [o for o in outcomes if o.status in ("failed", "error")]
  said = [f"{o.node} {what}: {first_line(o.text)}" for o in bad]
  if not bad and not any(o.status == "passed" for o in outcomes): said.append(f"no test ran {what}: all skipped")
  return said

def check(names: Sequence[str] = (), workers: int = 0) -> bool:
  """Checks the named entries, or all. Prints one line per entry and its complaints. Returns whether all are proved."""
  series = ser.load()
  base, commits = tree.history(series)
  of, unowned = ser.owners(series)
  ok = True
  if unowned and not names:
    ok = False
    print(f"check: {len(unowned)} files belong to no entry of series.toml: {', '.join(unowned[:8])}{' ...' if len(unowned) > 8 else ''}")
  for name in names: series[name]
  final = commits[-1] if commits else base
  for i, entry in enumerate(series.entries):
    if names and entry.name not in names: continue
    start, said = time.monotonic(), []
    parent = commits[i - 1] if i else base
    if not entry.proves: said.append("names no proving test")
    before, after = prove.folder(f"{entry.name}-before"), prove.folder(f"{entry.name}-after")
    own_tests = [f for f in of[entry.name] if f.startswith("test/")]
    proving = [f for f in own_tests if any(prove.belongs(f, p.partition("::")[0]) for p in entry.proves)]
    prove.lay_out(TREE, prove.with_tests(TREE, parent, final, without=own_tests, plus=proving), before)
    prove.lay_out(TREE, prove.with_tests(TREE, commits[i], final), after)
    if entry.proves:
      failing = prove.run_tests(before, entry.proves, entry.env, workers)
      said += judge_before(entry, failing)
      said += judge_after(prove.run_tests(after, entry.proves, entry.env, workers), "with this commit")
    for extra, nodes in prove.proofs(series.entries[:i]):
      said += judge_after(prove.run_tests(after, nodes, extra, workers), "of an earlier commit, with this one")
    if not entry.changes_codegen:
      ids = [out(git(TREE, "rev-parse", f"{commit}:tinygrad")) for commit in (parent, commits[i])]
      old, new = prove.generated_code(before, ids[0]), prove.generated_code(after, ids[1])
      if (differ := [k for k in new if old.get(k) != new[k]]):
        said.append(f"changes the code generated for {', '.join(differ[:6])}{' ...' if len(differ) > 6 else ''}; if meant: see `changes_codegen`")
    if entry.proves and not said:
      reasons = {first_line(o.text) for o in failing if o.status in ("failed", "error")}
      print(f"check: {entry.name}: proved in {time.monotonic() - start:.0f} s; without it: {min(reasons, key=len)}", flush=True)
    elif said:
      ok = False
      print(f"check: {entry.name}: NOT proved", *(f"  {s}" for s in said), sep="\n", flush=True)
  print(f"check: {'ok' if ok else 'FAILED'} ({len(names) or len(series.entries)} of {len(series.entries)} commits)")
  return ok

def main(args: list[str]) -> int:
  """dev check [-n WORKERS] [NAME ...]"""
  workers = 0
  if args[:1] == ["-n"]:
    if len(args) < 2 or not args[1].isdigit(): raise Problem("usage: dev check [-n WORKERS] [NAME ...]")
    workers, args = int(args[1]), args[2:]
  return 0 if check(args, workers) else 1
