"""The operator and model tests that come with the onnx package, through tinygrad's OnnxRunner on the device that DEV selects.

    DEV=CPU ./dev run -m test.device.onnx_cases --out cpu.json                          all of them
    DEV=MOCKMSM+QCOM ./dev run -m test.device.onnx_cases --only cpu.json --out msm.json those that passed there
    DEV=MOCKMSM+QCOM ./dev run -m test.device.onnx_cases conv_with relu                 those with one of these words in their names
    DEV=MOCKMSM+QCOM ./dev run -m test.device.onnx_cases --replay relu                  called, captured and replayed twice

Each prints one line if it fails; at the end a count, and with --out a JSON object from name to "ok" or the failure in a line. Exit status 1 if one
of --only fails. A case that takes longer than --seconds counts as failed.
"""
from __future__ import annotations
import argparse, json, pathlib, signal, sys, tempfile, warnings
from collections.abc import Iterator
from typing import Any
import numpy as np
import onnx
from onnx import numpy_helper
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import DEV
from tinygrad.nn.onnx import OnnxRunner

def cases() -> Iterator[Any]:
  """onnx's TestCases: node ones are made by its generators, the others lie in files. "real" and "light" are not among them: large models."""
  from onnx.backend.test.case.node import collect_testcases
  yield from collect_testcases(None) # type: ignore[arg-type]
  from onnx.backend.test import loader
  for kind in ("simple", "pytorch-converted", "pytorch-operator"): yield from loader.load_model_tests(kind=kind)

def plain(value: Any) -> Any:
  """What numpy scalars and stored tensors among the inputs hold, as arrays."""
  if isinstance(value, (list, tuple)): return [plain(v) for v in value]
  return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value) if isinstance(value, np.generic) else value

def data_sets(case: Any) -> tuple[onnx.ModelProto, list[tuple[list[Any], list[Any]]]]:
  """(model, [(inputs, outputs)]) as numpy arrays, lists of them, or None."""
  if case.model is not None: return case.model, case.data_sets
  folder = pathlib.Path(case.model_dir)
  model, sets = onnx.load(folder / "model.onnx"), []
  for d in sorted(folder.glob("test_data_set_*")):
    def read(kind: str, infos: Any, d: pathlib.Path = d) -> list[Any]:
      return [numpy_helper.to_array(onnx.load_tensor(d / f"{kind}_{i}.pb")) for i in range(len(infos))]
    sets.append((read("input", model.graph.input[:len(list(d.glob("input_*.pb")))]), read("output", model.graph.output)))
  return model, sets

def compare(got: Any, want: Any, case: Any) -> None:
  if isinstance(want, (list, tuple)):
    assert len(got) == len(want), f"{len(got)} outputs instead of {len(want)}"
    for g, w in zip(got, want): compare(g, w, case)
    return
  if want is None:
    assert got is None
    return
  value, want = got.numpy() if isinstance(got, Tensor) else np.asarray(got), np.asarray(want)
  if want.dtype.kind not in "biufc": want = want.astype(np.float32) # bfloat16, float8
  np.testing.assert_allclose(value.astype(want.dtype) if value.dtype.kind not in "biufc" else value, want, case.rtol, case.atol)
  assert value.shape == want.shape, f"shape {value.shape} instead of {want.shape}"

def calls(runner: OnnxRunner, given: dict[str, Any], replay: bool) -> Iterator[dict[str, Any]]:
  """Outputs of one call, or of four: before, at and after a capture."""
  if not replay:
    yield runner(given)
    return
  moving = {n for n, a in given.items() if isinstance(a, np.ndarray) and a.size > 1} # smaller ones, as axes, are constants of a capture
  @TinyJit
  def call(**tensors: Tensor) -> dict[str, Tensor]: return {n: t for n, t in runner({**given, **tensors}).items() if isinstance(t, Tensor)}
  for _ in range(4): yield call(**{n: Tensor(given[n].copy()).realize() for n in moving})

def run(case: Any, replay: bool = False) -> None:
  """Raises whatever is wrong with it. `replay`: calls, captures and replays it, inputs and outputs being tensors."""
  model, sets = data_sets(case)
  with tempfile.NamedTemporaryFile(suffix=".onnx") as f:
    f.write(model.SerializeToString())
    f.flush()
    runner = OnnxRunner(f.name)
    names = [i.name for i in model.graph.input]
    for inputs, outputs in sets:
      for out in calls(runner, dict(zip(names, plain(inputs))), replay):
        compare([out[o.name] for o in model.graph.output], plain(outputs), case)

def attempt(case: Any, seconds: int, replay: bool = False) -> str:
  """"ok", or the failure in one line."""
  def late(*_: Any) -> None: raise TimeoutError(f"took longer than {seconds} s")
  signal.signal(signal.SIGALRM, late)
  signal.alarm(seconds)
  try: run(case, replay)
  except KeyboardInterrupt: raise
  except BaseException as e: # tinygrad raises all kinds
    lines = [x.strip() for x in str(e).splitlines() if x.strip()]
    return f"{type(e).__name__}: {' '.join(lines[:4])}"[:300]
  finally: signal.alarm(0)
  return "ok"

def part_of(text: str) -> tuple[int, int]:
  part, sep, parts = text.partition("/")
  if not (sep and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
    raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N-1, like 2/8")
  return int(part), int(parts)

def main(args: argparse.Namespace) -> int:
  try:
    only = {n for n, r in json.loads(pathlib.Path(args.only).read_text()).items() if r == "ok"} if args.only else None
    if args.out: pathlib.Path(args.out).touch()
  except (OSError, ValueError, AttributeError) as e: sys.exit(f"--only is a file that --out wrote, --out one that can be written: {e}")
  results: dict[str, str] = {}
  part, parts = args.part
  for n, case in enumerate(cases()):
    if n % parts != part or (only is not None and case.name not in only) or (args.words and not any(w in case.name for w in args.words)): continue
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      results[case.name] = attempt(case, args.seconds, args.replay)
    if results[case.name] != "ok": print(f"{case.name}: {results[case.name]}", flush=True)
    if args.out: pathlib.Path(args.out).write_text(json.dumps(results, indent=1))
  if not results: sys.exit(f"no case is left by {' '.join(sys.argv[1:])}")
  ok = sum(r == "ok" for r in results.values())
  print(f"DEV={DEV}: {ok} of {len(results)} cases agree")
  return int(only is not None and ok < len(results))

if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("words", nargs="*")
  parser.add_argument("--only", metavar="FILE.json", help="only cases that are ok there")
  parser.add_argument("--out", metavar="FILE.json")
  parser.add_argument("--part", metavar="I/N", type=part_of, default=(0, 1), help="every Nth case, from the Ith on: for several processes")
  parser.add_argument("--replay", action="store_true", help="through a capture")
  parser.add_argument("--seconds", type=int, default=120)
  sys.exit(main(parser.parse_args()))
