"""`dev export`: the series as patches for `git am`, with a cover letter that says what was run."""
from __future__ import annotations
import pathlib, shutil
from stack import series as ser, tree
from stack.env import BUILD, Problem, TREE, output_folder
from stack.series import Series, git

def cover(series: Series) -> str:
  """Body of the cover letter: what the series says of itself, and per commit the tests that prove it."""
  lines = [series.cover, ""] if series.cover else []
  lines += ["Commits, and what fails without each and passes with it (`dev check`):", ""]
  for i, e in enumerate(series.entries, 1):
    lines.append(f"{i}. {e.title}")
    files = {p.partition("::")[0]: [q for q in e.proves if q.partition("::")[0] == p.partition("::")[0]] for p in e.proves}
    for tests in files.values():
      more = [f"and {len(tests) - 1} more of it"] if len(tests) > 1 else []
      lines.append(" ".join(["   proved by", tests[0], *more, *(f"({k}={v})" for k, v in e.env.items())]))
  return "\n".join(lines) + "\n"

def export(dest: pathlib.Path) -> list[pathlib.Path]:
  """Writes 0000-cover-letter.txt and one patch per commit to `dest`, so that `git am DEST/*.patch` takes the commits. Replaces patches of an earlier
  export there, touches nothing else. Returns the letter and the patches."""
  series = ser.load()
  if not series.entries: raise Problem("series.toml has no commit to export")
  base, commits = tree.history(series)
  output_folder(dest)
  for old in dest.glob("[0-9][0-9][0-9][0-9]-*.patch"): old.unlink()
  mailer = ("-c", f"user.name={series.author.rsplit(' <', 1)[0]}", "-c", f"user.email={series.author.rsplit('<', 1)[1].rstrip('>')}")
  git(TREE, *mailer, "format-patch", "-q", "--binary", "--full-index", "--no-signature", "--cover-letter", "--zero-commit",
      "-o", dest.resolve(), f"{base}..{commits[-1]}")
  letter = (dest / "0000-cover-letter.patch").rename(dest / "0000-cover-letter.txt")
  text = letter.read_text().replace("*** SUBJECT HERE ***", f"tinygrad on mainline Adreno 630, for {series.base}")
  letter.write_text(text.replace("*** BLURB HERE ***\n", cover(series)))
  return [letter, *sorted(dest.glob("*.patch"))]

def main(args: list[str]) -> int:
  """dev export [DIR]"""
  if len(args) > 1: raise Problem("usage: dev export [DIR]")
  dest = pathlib.Path(args[0]) if args else BUILD / "export"
  if not args and dest.exists(): shutil.rmtree(dest)
  for path in export(dest): print(path)
  return 0
