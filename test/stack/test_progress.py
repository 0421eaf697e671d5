"""Work of minutes shows how far it is on a terminal, and nothing where stderr is a file; `dev bench` and `dev records` as a whole."""
from __future__ import annotations
import json, os, pathlib, pty, re, subprocess, sys
import pytest
from test.stack.site import ROOT

def on_terminal(args: list[str], cwd: pathlib.Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
  """(exit status, stdout, what the terminal got) of a command whose stderr is a terminal."""
  ours, theirs = pty.openpty()
  try:
    with subprocess.Popen(args, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, text=True) as child:
      assert child.stdout is not None
      out = child.stdout.read()
    os.write(theirs, b"\0")
    shown = b""
    while not shown.endswith(b"\0"): shown += os.read(ours, 4096)
  finally:
    for fd in (ours, theirs): os.close(fd)
  return child.returncode, out, shown.decode()

STEPS = """
from stack.env import Progress
p = Progress("steps", 3)
for n in range(3):
  p.step()
  p.clear()
  print("line", n)
"""
def test_progress_is_for_terminals():
  status, out, shown = on_terminal([sys.executable, "-c", STEPS], ROOT)
  assert status == 0 and out.split("\n") == ["line 0", "line 1", "line 2", ""]
  assert "steps: 0 of 3" in shown and "steps: 3 of 3" in shown and shown.rstrip("\0").endswith("\r\033[K"), shown
  quiet = subprocess.run([sys.executable, "-c", STEPS], cwd=ROOT, capture_output=True, text=True)
  assert (quiet.stdout, quiet.stderr) == (out, "")

def environment() -> dict[str, str]: return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "DEV", "QCOM_MOCK")}

@pytest.mark.timeout(600)
def test_a_benchmark_in_its_shortest_form():
  """Measures, prints a JSON object a line, then a table of the same. Its numbers are not judged here."""
  status, out, shown = on_terminal([str(ROOT / "dev"), "bench", "--quick", "eager"], ROOT, environment())
  assert status == 0, out + shown
  assert "turns of the host benchmarks: 100%" in shown and "Traceback" not in shown, shown
  lines, table = [json.loads(l) for l in out.splitlines() if l.startswith("{")], out.split("hardware\n")[1].splitlines()
  assert [(l["what"], l["unit"], l["in"]) for l in lines] == [(f"{i}, eager launch", "x", "us") for i in ("MSM", "KGSL")]
  for line, row in zip(lines, table, strict=True):
    assert line["ours"] > 0 and line["value"] == pytest.approx(line["ours"] / line["unmodified"], abs=2e-3)
    assert line["ok"] == (line["value"] <= 0.8) and ("ok" if line["ok"] else "MISSED") in row and f"{line['value']:g} x" in row

def test_the_self_test_says_what_it_is_at():
  status, out, shown = on_terminal([str(ROOT / "dev"), "doctor"], ROOT, environment())
  assert status in (0, 1) and "self-test replay: " in out and "self-test image: " in out and "..." not in out, out # 1: this machine has a problem
  assert re.search(r"self-test on .*: add, matmul, replay\r\033\[K.*self-test on .*: image\r\033\[K", shown, re.S), shown

def test_unknown_benchmarks_are_refused():
  done = subprocess.run([str(ROOT / "dev"), "bench", "nosuch"], cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert done.returncode == 2 and "there are replay, eager" in done.stderr

def test_records_as_a_command():
  readme = (ROOT / "README.md").read_text()
  done = subprocess.run([str(ROOT / "dev"), "records"], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0 and done.stdout == f"README.md: {len(list((ROOT / 'records').glob('*.json')))} record(s)\n"
  assert (ROOT / "README.md").read_text() == readme, "the README's table was not made from the records that are there"
