"""Commands of `dev`."""
from __future__ import annotations
import os, subprocess, sys
from collections.abc import Callable
from stack import env, series
from stack.env import BUILD, PYTHON, Problem, ROOT

HELP = """usage: ./dev COMMAND [args]

  demo                   compile a model for an Adreno 630, replay it, compare with onnxruntime
  test [pytest args]     the whole test suite, or the part named by pytest's arguments
  run SCRIPT|-m|-c ...   Python with the built tree; DEV as you set it
  lint [ruff args]       ruff and mypy
  doctor [--json]        what this machine offers, what to do about each problem, and a self-test
  bench [--quick] [NAME] measured ratios
  tree                   build build/tree: the unmodified tinygrad and one commit per entry of series.toml
  check [NAME ...]       prove each commit: its tests fail before it and pass after it
  export [DIR]           the series as `git am` patches with a cover letter
  apply CHECKOUT         put the series on a tinygrad checkout, whole or not at all
  rebase BASE            try the series on another tinygrad (checkout or version) and run its tests there
  wheel [DIR]            build the drop-in wheel
  records                put the records of hardware runs (records/*.json) into the README's table
"""

def ready() -> None:
  """Everything `dev run` needs: .venv and build/tree."""
  from stack import tree
  env.venv()
  tree.ensure()

def python(args: list[str], extra: dict[str, str] | None = None) -> int:
  """Replaces this process by .venv's Python. Never returns."""
  sys.stdout.flush()
  os.execve(PYTHON, [str(PYTHON), *args], env.environment(extra))

def run(args: list[str]) -> int:
  if not args: raise Problem("usage: dev run SCRIPT|-m module|-c code [args]")
  ready()
  return python(args)

def test(args: list[str]) -> int:
  """pytest over build/tree, so that test modules and tinygrad are found as in a tinygrad checkout. Paths may be given relative to this repository."""
  ready()
  workers = [] if any(a in ("-s", "--pdb", "-n") or a.startswith(("-n", "--numprocesses", "--dist")) for a in args) else ["-n", "2"]
  paths = [str(p) for a in args if not a.startswith("-") and (p := tree_path(a))]
  if len(paths) == 1 and "::" in paths[0]: workers = []
  where = [] if paths else [str(env.TREE / p) for p in ("test/test_tiny.py", "test/null", "test/unit", "test/virtual", "test/device", "test/stack")
                            if (env.TREE / p).exists()]
  rest = [tree_path(a) or a for a in args]
  return python(["-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(env.TREE), *workers, *rest, *where],
                {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(BUILD / "cache")),
                 "PARALLEL": os.environ.get("PARALLEL", "0")}) # the cores are pytest's: small kernels are not worth the start of compile workers

def lint(args: list[str]) -> int:
  """ruff over this repository, mypy over the tool, the runtime files and the virtual GPU (as part of the built tree)."""
  ready()
  ours = ("tinygrad/runtime/ops_", "tinygrad/runtime/support/", "test/mockgpu/")
  runtime = [f for f in series.overlay_files() if f.endswith(".py") and f.startswith(ours)]
  mypy = [str(env.VENV / "bin" / "mypy"), "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir"]
  commands = [([str(env.VENV / "bin" / "ruff"), "check", "-q", *args, str(ROOT)], ROOT), ([*mypy, str(BUILD / "mypy-stack"), "stack"], ROOT),
              ([*mypy, str(BUILD / "mypy-tree"), *runtime], env.TREE)]
  return max([subprocess.run(cmd, cwd=cwd).returncode for cmd, cwd in commands])

def tree_path(arg: str) -> str | None:
  """`arg` as a path in build/tree, if it names a test file or folder of ours or of tinygrad (with or without `::`)."""
  path, sep, node = arg.partition("::")
  full = os.path.abspath(path)
  rel = os.path.relpath(full, ROOT) if full.startswith(str(ROOT) + os.sep) else path
  return str(env.TREE / rel) + sep + node if rel.split("/")[0] == "test" and (env.TREE / rel).exists() else None

def script(path: str, missing: str) -> Callable[[list[str]], int]:
  def command(args: list[str]) -> int:
    if not (ROOT / path).is_file(): raise Problem(f"{path} is missing from this clone ({missing})")
    ready()
    return python([str(ROOT / path), *args])
  return command

def lazy(module: str, setup: Callable[[], object]) -> Callable[[list[str]], int]:
  def command(args: list[str]) -> int:
    import importlib
    setup()
    result: int = importlib.import_module(f"stack.{module}").main(args)
    return result
  return command

COMMANDS: dict[str, Callable[[list[str]], int]] = {
  "demo": script("examples/demo.py", "the demonstration"), "bench": script("bench/__main__.py", "the benchmarks"),
  "run": run, "test": test, "lint": lint,
  "tree": lazy("tree", env.venv), "doctor": lazy("doctor", ready),
  "records": lazy("records", lambda: None),
  **{name: lazy(name, ready) for name in ("check", "export", "apply", "rebase", "wheel")},
}

def main(argv: list[str]) -> int:
  if not argv or argv[0] in ("help", "-h", "--help"):
    print(HELP, end="")
    return 0 if argv else 2
  if argv[0] not in COMMANDS:
    print(f"dev: unknown command {argv[0]!r}\n\n{HELP}", end="", file=sys.stderr)
    return 2
  try: return COMMANDS[argv[0]](argv[1:])
  except Problem as e: print(f"dev: {e}", file=sys.stderr)
  except KeyboardInterrupt: print("dev: interrupted", file=sys.stderr)
  return 1
