"""`dev records`: the README's table of hardware runs, made from records/*.json, the records that `test/device` writes on hardware."""
from __future__ import annotations
import json, pathlib, re
from typing import Any
from stack.env import Problem, ROOT

BEGIN, END = "<!-- records/*.json: ./dev records -->\n", "<!-- end of records -->\n"
NONE = "No record yet: **nothing in this repository was run on a physical Adreno.**\n"
NEEDS = ("ok", "rung", "interface", "kernel", "chip_id", "mesa", "tinygrad", "time")

def load(path: pathlib.Path) -> dict[str, Any]:
  """A record of a run on hardware. Raises Problem for anything else, above all for one of the virtual device."""
  try: record = json.loads(path.read_text())
  except ValueError as e: raise Problem(f"{path.name} is not JSON ({e}): put the file that test/device wrote there, unchanged") from None
  if not isinstance(record, dict) or (missing := [n for n in NEEDS if n not in record]):
    raise Problem(f"{path.name} is no record of test/device: it lacks {', '.join(missing) if isinstance(record, dict) else 'everything'}")
  if record["rung"] != "hardware": raise Problem(f"{path.name} is of the {record['rung']} device: the table is for runs on hardware")
  return record

def row(r: dict[str, Any], name: str) -> str:
  modes = [r[m] for m in ("normal", "profiled") if m in r]
  ran = f"{sum(m['replays'] for m in modes)} replays, exact" if r["ok"] else f"FAILED: {r.get('error', 'no reason given')}"
  before, after = (r.get(f"faults_{when}", {}) for when in ("before", "after"))
  faults = ("no" if before == after else f"{before} -> {after}") if after else "not read"
  time = f"{modes[0]['seconds'] / modes[0]['replays'] * 1e3:.2f} ms" if r["ok"] else ""
  cells = [r.get("board") or "?", r["chip_id"], f"{r['kernel']} ({r['interface']})", r["mesa"], r["tinygrad"], ran, faults, time, r["time"][:10],
           f"[record](records/{name})"]
  return "| " + " | ".join(str(c).replace("|", "\\|").replace("\n", " ") for c in cells) + " |\n"

def table(folder: pathlib.Path) -> str:
  """The table as Markdown, or NONE. Raises Problem for a file that is no record of hardware."""
  files = sorted(folder.glob("*.json"))
  if not files: return NONE
  head = ["board", "chip", "kernel (interface)", "Mesa", "tinygrad", "test_qcom_replay", "new faults", "one replay", "date", ""]
  return f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n" + "".join(row(load(f), f.name) for f in files)

def put(readme: str, text: str) -> str:
  """`readme` with `text` between the marks. Raises Problem if they are not there."""
  if not re.search(re.escape(BEGIN) + ".*?" + re.escape(END), readme, re.S):
    raise Problem(f"README.md lacks the lines {BEGIN.strip()} and {END.strip()}")
  return readme[:readme.index(BEGIN) + len(BEGIN)] + text + readme[readme.index(END):]

def main(args: list[str]) -> int:
  """dev records"""
  if args: raise Problem("usage: dev records")
  readme = ROOT / "README.md"
  readme.write_text(put(readme.read_text(), table(ROOT / "records")))
  print(f"README.md: {len(list((ROOT / 'records').glob('*.json')))} record(s)")
  return 0
