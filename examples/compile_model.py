"""Compiles an ONNX model for an Adreno 630 into one file that a process loads and replays without compiling anything.

    DEV=QCOM IMAGE=1 FLOAT16=1 NOLOCALS=1 JIT_BATCH_SIZE=0 OPENPILOT_HACKS=1 ./dev run examples/compile_model.py model.onnx model.pkl
    ./dev run examples/compile_model.py model.onnx model.pkl --shape x=1,3,320,320 --input state=state.npy

Each of these variables may be set or not; with no DEV and no Adreno the virtual one is used, and what it compiles runs on a real one. As openpilot
does, an input with "img" in its name lies in GPU memory, the others in host memory (device NPY) and are copied by the capture; outputs are float32.
Held against each other: eager, captured and replayed outputs, and those of the file in another process (equal bit for bit); onnxruntime's
(--tolerance); and outputs of doubled inputs (different). Exit status 0 if all of that holds.
"""
from __future__ import annotations
import argparse, hashlib, os, pathlib, subprocess, sys, time, traceback
from typing import Any
import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.dtype import _to_np_dtype
from tinygrad.helpers import DEBUG, FLOAT16, getenv, tqdm
from tinygrad.nn.onnx import limit
import adreno, model_file

FLAGS = ("IMAGE", "FLOAT16", "NOLOCALS", "JIT_BATCH_SIZE", "OPENPILOT_HACKS", "JIT", "BEAM", "NO_MEMORY_PLANNER")

def output(option: str, file: str | None) -> None:
  """Raises RuntimeError, before work of minutes is done for it, for a file that can't be written."""
  if file is None: return
  folder = pathlib.Path(file).parent
  if not folder.is_dir(): raise RuntimeError(f"{option} {file}: there is no folder {folder}, make it first")
  if not os.access(folder, os.W_OK | os.X_OK): raise RuntimeError(f"{option} {file}: the folder {folder} can't be written, name another one")
  if pathlib.Path(file).is_dir(): raise RuntimeError(f"{option} {file} is a folder, name a file in it")

def arguments(doc: str | None, *names: str) -> argparse.ArgumentParser:
  """Options that compile_model and run_model share."""
  p = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
  for name in names: p.add_argument(name)
  p.add_argument("--input", metavar="NAME=FILE.npy", action="append", default=[], help="contents of an input; else random")
  p.add_argument("--seed", type=adreno.number(int, 0, "a whole number from 0"), default=0, help="of random inputs")
  p.add_argument("--runs", type=adreno.number(int, 1, "a whole number from 1"), default=3, help="timed replays")
  return p

def pairs(options: list[str], what: str) -> dict[str, str]:
  for o in options:
    if "=" not in o: raise RuntimeError(f"{what} is NAME=VALUE, not {o!r}")
  return dict(o.split("=", 1) for o in options)

def shape(name: str, text: str) -> adreno.Shape:
  """Of an option --shape NAME=1,3,320,320; NAME= is a scalar's."""
  sizes = tuple(int(d) if d.isdecimal() else 0 for d in text.split(",")) if text else ()
  if 0 in sizes: raise RuntimeError(f"--shape {name}={text} is no shape, which is whole numbers from 1 like {name}=1,3,320,320")
  return sizes

def array(file: str) -> np.ndarray:
  if not pathlib.Path(file).is_file(): raise RuntimeError(f"there is no file {file}")
  try: value = np.load(file, allow_pickle=False)
  except (ValueError, EOFError) as e: raise RuntimeError(f"{file} is no array that np.save wrote") from e
  if not isinstance(value, np.ndarray): raise RuntimeError(f"{file} is no single array: write one with np.save")
  return value

def contents(specs: dict[str, tuple[adreno.Shape, Any]], files: dict[str, str], seed: int) -> dict[str, np.ndarray]:
  """What each input holds. Raises RuntimeError for a file of another shape or dtype."""
  if unknown := files.keys() - specs.keys(): raise RuntimeError(f"the model has no input {min(unknown)!r}, its inputs are {', '.join(specs)}")
  rng, out = np.random.default_rng(seed), {}
  for name, (shape, dtype) in specs.items():
    out[name] = value = array(files[name]) if name in files else adreno.random_input(rng, shape, dtype)
    kind = np.dtype(_to_np_dtype(dtype))
    if value.shape != shape or value.dtype != kind:
      raise RuntimeError(f"{files[name]} is {value.dtype} {value.shape}, input {name!r} is {kind} {shape}: save it with .astype and .reshape")
  return out

def show(inputs: dict[str, dict[str, Any]], flags: dict[str, str]) -> None:
  """What a file says of its model."""
  print(f"  {'inputs':<22} " + ", ".join(f"{n} {i['dtype']} {tuple(i['shape'])} on {i['device']}" for n, i in inputs.items()))
  print(f"  {'flags':<22} {' '.join(map('='.join, flags.items())) or 'none'}", flush=True)

def numpy(outputs: dict[str, Tensor]) -> dict[str, np.ndarray]: return {n: t.numpy().copy() for n, t in outputs.items()}

def digest(outputs: dict[str, np.ndarray]) -> str:
  h = hashlib.sha256()
  for name, value in sorted(outputs.items()): h.update(f"{name} {value.shape} {value.dtype}\0".encode() + value.tobytes())
  return h.hexdigest()

def same(what: str, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
  for name, w in want.items():
    if got[name].tobytes() != w.tobytes():
      raise AssertionError(f"{what}: {np.count_nonzero(got[name] != w)} of {w.size} values of {name!r} differ")

def timed(jit: Any, inputs: dict[str, Tensor], runs: int) -> tuple[dict[str, np.ndarray], float, float]:
  """(outputs, ms until a replay is submitted, ms until its outputs are there), the shortest of `runs`."""
  times, out = [], dict[str, np.ndarray]()
  for _ in range(runs):
    Device[Device.DEFAULT].synchronize()
    start = time.perf_counter()
    result = jit(**inputs)
    enqueued = time.perf_counter()
    out = numpy(result)
    times.append((enqueued - start, time.perf_counter() - start))
  return out, min(t[0] for t in times) * 1e3, min(t[1] for t in times) * 1e3

def onnxruntime_outputs(path: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
  try: import onnxruntime
  except ImportError: return None
  session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
  names = [o.name for o in session.get_outputs()]
  return dict(zip(names, session.run(names, values)))

def worst(got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float) -> float:
  """The largest difference, of each output in units of its largest value if that is above 1. Raises AssertionError beyond `tolerance`."""
  found = 0.0
  for name, w in want.items():
    if name not in got: raise AssertionError(f"the model gave no output {name!r}, but {', '.join(got)}" + (": unset ONNXLIMIT" if limit >= 0 else ""))
    g, w = got[name].astype(np.float64), np.asarray(w, np.float64)
    if g.shape != w.shape: raise AssertionError(f"output {name!r} is {g.shape}, onnxruntime says {w.shape}")
    if not w.size: continue
    with np.errstate(invalid="ignore"): apart = np.where(np.isfinite(w), np.abs(g - w), np.where((g == w) | (np.isnan(g) & np.isnan(w)), 0, np.inf))
    off = float(apart.max() / max(1.0, float(np.abs(w[np.isfinite(w)]).max(initial=0))))
    if not off <= tolerance: raise AssertionError(f"output {name!r} is {off:.1e} from onnxruntime's, allowed {tolerance:g}")
    found = max(found, off)
  return found

def main(args: argparse.Namespace) -> str:
  if getenv("JIT", 1) == 0: raise RuntimeError("JIT=0 captures nothing, so there would be nothing to save: use JIT=1 or 2")
  if not pathlib.Path(args.model).is_file(): raise RuntimeError(f"there is no file {args.model}")
  output("out", args.out)
  if pathlib.Path(args.out).resolve() == pathlib.Path(args.model).resolve(): raise RuntimeError(f"{args.out} is the model itself, name another file")
  shapes = {n: shape(n, v) for n, v in pairs(args.shape, "--shape").items()}
  dev, virtual = adreno.open_device()
  print(adreno.describe(dev, virtual), flush=True)
  model, specs = adreno.load_onnx(args.model, shapes)
  values, flags = contents(specs, pairs(args.input, "--input"), args.seed), {f: os.environ[f] for f in FLAGS if f in os.environ}
  described: dict[str, dict[str, Any]] = {
    n: {"shape": list(s), "dtype": np.dtype(_to_np_dtype(d)).name, "device": Device.DEFAULT if "img" in n else "NPY"} for n, (s, d) in specs.items()}
  show(described, flags)

  @TinyJit(prune=True)
  def jit(**inputs: Tensor) -> dict[str, Tensor]:
    placed = {n: t.to(Device.DEFAULT).cast(specs[n][1]) for n, t in inputs.items()}
    return {n: t.cast(dtypes.float32).contiguous() for n, t in model(placed).items() if isinstance(t, Tensor)}

  inputs, meter, outputs, phases = model_file.tensors(described, values), adreno.Meter(dev, virtual), list[dict[str, np.ndarray]](), list[float]()
  cost: dict[str, float | None] = {}
  with tqdm(total=6, unit="steps", disable=None) as bar:
    for n, phase in enumerate(("eager", "capture", "replay")):
      bar.set_description(phase)
      meter.start()
      with adreno.progress(n == 0): outputs.append(numpy(jit(**inputs)))
      cost = meter.since()
      phases.append(cost["seconds"] or 0)
      if n: same(phase, outputs[n], outputs[0])
      bar.update(1)
    if jit.captured is None or not outputs[0]: raise RuntimeError("the model has no output that is a tensor")

    bar.set_description("onnxruntime")
    tolerance = args.tolerance if args.tolerance is not None else 3e-2 if FLOAT16 else 1e-3
    reference = onnxruntime_outputs(args.model, values)
    off = None if reference is None else worst(outputs[0], reference, tolerance)
    bar.update(1)
    bar.set_description("timed replays")
    again, enqueue, total = timed(jit, inputs, args.runs)
    same("a later replay", again, outputs[0])
    bar.update(1)
    bar.set_description("doubled inputs")
    doubled = {n: ~v if v.dtype == bool else v * 2 for n, v in values.items()}
    if all(v.tobytes() == outputs[0][n].tobytes() for n, v in numpy(jit(**model_file.tensors(described, doubled))).items()):
      raise AssertionError("doubled inputs give the same outputs, so the inputs are not used")
    bar.update(1)
  if (why := meter.trouble()) is not None: raise AssertionError(why)

  size = model_file.save(args.out, jit, {
    "model": pathlib.Path(args.model).name, "flags": flags, "inputs": described,
    "outputs": {n: list(v.shape) for n, v in outputs[0].items()}})
  kernels, copies = adreno.kernels_and_copies(jit)
  rows = {"kernels": kernels, "copies": copies, "submits": cost["submits"],
          "buffers per submit": b if (b := meter.buffers()) is not None else "KGSL takes no list, all that is mapped takes part",
          "image reads": adreno.count(cost["image_reads"], "by lanes"), "operations, estimated": adreno.count(cost["operations"]),
          "instructions, counted": adreno.instructions(cost), "enqueue": f"{enqueue:.2f} ms", "replay": f"{total:.1f} ms",
          "eager, capture": f"{phases[0]:.1f} s, {phases[1]:.1f} s (compiling and encoding)",
          "onnxruntime": "is not installed, not compared" if off is None else f"at most {off:.1e} off, allowed {tolerance:g}",
          "sizes": f"model {pathlib.Path(args.model).stat().st_size / 1e6:.2f} MB, {args.out} {size / 1e6:.2f} MB"}
  print(*(f"  {k:<22} {v}" for k, v in rows.items()), sep="\n", flush=True)

  rerun = [sys.executable, str(pathlib.Path(__file__).with_name("run_model.py")), args.out, "--seed", str(args.seed), "--runs", "1",
           "--expect", digest(outputs[0]), *(x for i in args.input for x in ("--input", i))]
  with tqdm(total=1, unit="steps", desc="another process", disable=None) as bar:
    done = subprocess.run(rerun, capture_output=True, text=True)
    bar.update(1)
  if done.returncode:
    raise AssertionError(f"{args.out} in another process: {(done.stdout.strip() or done.stderr.strip()).splitlines()[-1]}\n{done.stderr}")
  print(*(line for line in done.stdout.splitlines() if line.startswith("  reload")), sep="\n")
  return f"eager, captured, replayed and reloaded outputs are equal bit for bit; {args.out} is for {model_file.spell(model_file.target())}"

if __name__ == "__main__":
  parser = arguments(__doc__, "model", "out")
  parser.add_argument("--shape", metavar="NAME=1,3,320,320", action="append", default=[],
                      help="of an input that the model leaves open; only its first dimension, a batch, is 1 otherwise")
  parser.add_argument("--tolerance", type=adreno.number(float, 0, "a number from 0"),
                      help="difference from onnxruntime, relative to an output's largest value (1e-3; FLOAT16=1: 3e-2)")
  try: verdict = main(parser.parse_args())
  except (Exception, KeyboardInterrupt) as e: # whatever it is, it is told in words
    if DEBUG: traceback.print_exc()
    print(adreno.in_words(e, "compile_model"), flush=True)
    sys.exit(1)
  print(f"compile_model: ok {verdict}")
