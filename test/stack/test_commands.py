"""Every command in every document: it parses, names what exists, and is executed by a test, by CI, or by this file."""
from __future__ import annotations
import functools, importlib.util, os, pathlib, re, shlex, subprocess, sys
import pytest
from test.stack.site import ROOT

sys.path.append(str(ROOT))  # behind build/tree, so that tinygrad and test stay those of the built tree
from stack import cli
from tinygrad.runtime.support.qcom_iface import ifaces

PAGES = [p for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")) if p.is_file()]
TREE = ROOT / "build" / "tree"
STANDS_FOR_YOURS = {"script.py", "model.onnx", "model.pkl", "SCRIPT", "CLONE", "TESTS", "CHECKOUT"}
# which file has the command run: a verb of `dev`, a script or a module. "-" is for what only CI's set-up can do in full
RUN_BY = {"demo": ".ci/run", "test": ".ci/run", "tree": ".ci/run", "lint": ".ci/run", "doctor": "test/stack/test_doctor_report.py",
          "check": "test/stack/test_check.py", "export": "test/stack/test_apply.py", "apply": "test/stack/test_apply.py",
          "rebase": "test/stack/test_apply.py", "wheel": "test/stack/test_apply.py", "bench": "test/stack/test_progress.py",
          "records": "test/stack/test_progress.py"}
BY_HAND = {"help": "the usage, printed by an unknown command as well"}

def commands(page: pathlib.Path) -> list[str]:
  """What a reader would type: lines of code blocks, and inline code, that begin with settings, ./dev or Python. Comments are cut off."""
  text = page.read_text()
  blocks = re.findall(r"^(?: {4}|\s{7})(\S.*)$", text, re.M) + [line for b in re.findall(r"```\w*\n(.*?)```", text, re.S) for line in b.splitlines()]
  inline = [" ".join(c.split()) for c in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))]
  start = re.compile(r"(?:[A-Z][A-Z0-9_]*=(?:'[^']*'|\S+) +)*(?:\./dev|python3?) \S")
  return [c.split(" #")[0].split(" | ")[0].split(" -->")[0].strip() for c in blocks + inline if start.match(c)]

ALL = sorted({(c, p.name) for p in PAGES for c in commands(p)})

@functools.cache
def known_settings() -> str:
  """All sources in which a setting may be read. IR3_SHADER_DEBUG is read by Mesa's library."""
  where = [*TREE.glob("tinygrad/**/*.py"), *(ROOT / "stack").glob("*.py"), *ROOT.glob("bench/*.py"), *ROOT.glob("examples/*.py"),
           *TREE.glob("test/device/*.py"), *TREE.glob("test/mockgpu/**/*.py"), *TREE.glob("test/virtual/*.py")]
  return "\n".join(p.read_text() for p in where) + ' "IR3_SHADER_DEBUG" "DEV" "PIP_FIND_LINKS"'

def exists(path: str, base: pathlib.Path) -> bool:
  return bool({path, *path.split("/")} & STANDS_FOR_YOURS) or path.startswith("path/to/") or (base / path.split("::")[0]).exists()

def check_python(args: list[str]) -> None:
  """A script or -m MODULE with its options, as `dev run` and Python take them."""
  if args[0] == "-c": return
  if args[0] == "-m":
    module, rest = args[1], args[2:]
    if module == "pytest":
      for a in rest:
        if "/" in a and not a.startswith(("-", "/")): assert exists(a, TREE) or exists(a, ROOT), a
      return
    if module in ("pip", "venv"): return
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin, f"no module {module}"
    source = pathlib.Path(spec.origin).read_text()
  else:
    assert exists(args[0], ROOT), f"no script {args[0]}"
    if not (ROOT / args[0]).is_file(): return
    rest = args[1:]
    source = (ROOT / args[0]).read_text()
    for name in re.findall(r"^(?:from|import) (\w+)", source, re.M): # options that scripts of a folder share
      if (shared := (ROOT / args[0]).with_name(name + ".py")).is_file(): source += shared.read_text()
  for a in rest:
    if a.startswith("--"): assert f'"{a.split("=")[0]}"' in source, f"{args} has no option {a}"

@pytest.mark.parametrize("command,page", ALL, ids=[f"{p}:{c}"[:90] for c, p in ALL])
def test_a_documented_command_is_what_it_says(command: str, page: str):
  words = shlex.split(command)
  settings = [w for w in words if re.match(r"[A-Z][A-Z0-9_]*=", w)]
  words = words[len(settings):]
  for name, value in (s.split("=", 1) for s in settings):
    assert f'"{name}"' in known_settings(), f"nothing reads {name}"
    if name == "DEV" and "+" in value: assert value.split("+")[0] in {i.__name__.removesuffix("Iface") for i in ifaces}, value
  if words[0] != "./dev": return check_python(words[1:])
  verb, args = words[1], words[2:]
  assert verb in cli.COMMANDS or verb == "COMMAND", f"dev has no command {verb}"
  if verb == "run": return check_python(args)
  if verb == "test":
    for a in args:
      if a.startswith("test/"): assert exists(a, TREE), f"nothing at {a}"
    return
  if verb in ("demo", "bench"): source = "".join(p.read_text() for p in [*ROOT.glob("examples/*.py"), *ROOT.glob("bench/*.py")])
  else: source = (ROOT / "stack" / f"{'cli' if verb in ('lint', 'COMMAND') else verb}.py").read_text()
  for a in args:
    if a.startswith("--"): assert f'"{a}"' in source or f" {a}" in source, f"dev {verb} has no option {a}"
    elif verb == "bench": assert f'"{a}"' in source or (ROOT / "bench" / f"{a}.py").is_file(), f"no benchmark {a}"

def test_documents_have_commands_and_every_verb_is_run_somewhere():
  assert len(ALL) > 30, "the commands are not found any more"
  table = re.findall(r"^\| `dev (\w+)", (ROOT / "README.md").read_text(), re.M)
  verbs = {m[1] for c, _ in ALL if (m := re.search(r"\./dev (\w+)", c))} | set(table)
  assert verbs - {"run", "COMMAND"} <= set(RUN_BY) | set(BY_HAND), verbs - set(RUN_BY) - set(BY_HAND)
  for verb, where in RUN_BY.items():
    text = (ROOT / where).read_text()
    assert f'"{verb}"' in text or f"./dev {verb}" in text, f"{where} does not run dev {verb}"

def test_help_lists_the_commands_that_there_are():
  listed = re.findall(r"^  (\w+)", cli.HELP, re.M)
  assert sorted(listed) == sorted(cli.COMMANDS)
  table = re.findall(r"^\| `dev (\w+)", (ROOT / "README.md").read_text(), re.M)
  assert sorted(table) == sorted(cli.COMMANDS)

def test_the_suite_does_not_skip_the_device_tests() -> None:
  """tinygrad puts the default device into DEV of the environment as soon as a test module asks for it."""
  code = f"import os, runpy; from tinygrad import Device; Device.DEFAULT; assert os.environ['DEV']; print(*(bool(m.get('DEVICES', m.get('RUN')) or " \
         f"m.get('RUNS')) for m in (runpy.run_path(p) for p in {[str(p) for p in (TREE / 'test' / 'device').glob('test_*.py')]!r}) if 'ASKED' in m))"
  env = {**{k: v for k, v in os.environ.items() if k != "DEV"}, "PYTHONPATH": os.pathsep.join([str(TREE), os.environ.get("PYTHONPATH", "")])}
  done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
  assert done.stdout.split() == ["True"] * 4, done.stdout + done.stderr

def test_the_workflow_runs_local_commands_with_time_limits():
  """Every part of `dev test`, and the other checks. Actions are pinned by commit. GitHub's schema is checked by hand: no YAML parser is required."""
  text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
  rows = [dict(re.findall(r"(\w+): ([^,}]+)", row)) for row in re.findall(r"^ +- \{(name: .*)\}$", text, re.M)]
  assert len(rows) == len(re.findall(r"^ +- \{", text, re.M)) > 5 and all(0 < int(r["minutes"]) <= 60 for r in rows)
  assert "timeout-minutes: ${{ matrix.minutes }}" in text and "run: ${{ matrix.command }}" in text
  words = [shlex.split(r["command"]) for r in rows]
  assert all(w[0] == "./dev" and w[1] in cli.COMMANDS for w in words)
  parts = {p for w in words if w[1] == "test" for p in w[2:]}
  assert parts == set(re.findall(r'"(test/[\w./]*\w)"', (ROOT / "stack" / "cli.py").read_text())), "`dev test` runs other parts"
  assert {w[1] for w in words} >= {"lint", "check", "doctor", "demo"}
  uses = re.findall(r"uses: \S+@(\S+)", text)
  assert len(uses) == 2 and all(re.fullmatch(r"[0-9a-f]{40}", u) for u in uses)

SHORT = [c for c, _ in ALL if re.search(r"examples/matmul\.py$", c)]
@pytest.mark.parametrize("command", sorted(set(SHORT)))
def test_short_commands_run_as_written(command: str):
  env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "DEV")}
  done = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stdout + done.stderr

def test_links_between_documents_lead_somewhere():
  for page in PAGES:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
      if not target.startswith("http"): assert (page.parent / target).exists(), f"{page.name} links to {target}"

NONSENSE = [("examples/drive.py --steps 2", "argument --steps: '2' is not a whole number from 3"),
            ("examples/drive.py --seed x", "argument --seed: 'x'"), ("bench/soak.py abc", "usage: soak.py [REPLAYS [CAPTURES [SECONDS]]], in n"),
            ("bench/soak.py 100 5", "DEV=CPU is not an Adreno: use DEV=MOCKMSM+QCOM"),
            *((f"-m test.device.onnx_cases --part {p}", f"argument --part: '{p}' is not I/N") for p in ("8/8", "x", "1/0")),
            ("-m test.device.onnx_cases --only /nonexistent.json", "--only is a file that --out wrote"),
            ("-m test.device.onnx_cases --out /nonexistent/x.json", "--out one that can be written"),
            ("-m test.device.onnx_cases nosuchword", "no case is left by nosuchword")]
@pytest.mark.parametrize("command,words", NONSENSE, ids=[c for c, _ in NONSENSE])
def test_an_option_that_means_nothing_is_named_before_the_work(command: str, words: str):
  env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TREE), str(ROOT)]), "DEV": "CPU"}
  done = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
  assert done.returncode and words in done.stderr and "Traceback" not in done.stderr, done.stderr
