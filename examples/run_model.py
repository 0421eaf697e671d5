"""Loads a file of compile_model.py, without compiling or reading the ONNX model again, and replays it.

    DEV=QCOM ./dev run examples/run_model.py model.pkl --input img=frame.npy --save outputs.npz

Inputs that are not given are random, from --seed. With no DEV and no Adreno the virtual one is used. Flags like IMAGE=1 are those the file was
compiled with, setting them here changes nothing. Loading a file on another device than it was compiled for is refused in one sentence.
"""
from __future__ import annotations
import json, pathlib, sys, time, traceback
import numpy as np
from tinygrad import Device, dtypes
from tinygrad.engine import realize
from tinygrad.helpers import DEBUG, DEV, getenv
import adreno, model_file
from compile_model import arguments, contents, digest, numpy, output, pairs, show, timed

def main(args) -> str:
  if not pathlib.Path(args.file).is_file(): raise RuntimeError(f"there is no file {args.file}")
  for option, file in (("--save", args.save), ("--json", args.json)): output(option, file)
  if getenv("JIT", 1) == 0: raise RuntimeError("JIT=0 replays nothing, and a file holds nothing else: use JIT=1 or 2")
  if not DEV.device: adreno.open_device()
  _ = Device[Device.DEFAULT] # opening it is not part of a reload
  began = time.perf_counter()
  jit, about = model_file.load(args.file)
  specs = {n: (tuple(i["shape"]), getattr(dtypes, i["dtype"])) for n, i in about["inputs"].items()}
  inputs, loaded = model_file.tensors(about["inputs"], contents(specs, pairs(args.input, "--input"), args.seed)), time.perf_counter()
  print(adreno.describe(*adreno.open_device()))
  show(about["inputs"], about["flags"])
  start = time.perf_counter()
  out = numpy(jit(**inputs))
  first = time.perf_counter()
  if realize.to_program_cache: raise AssertionError(f"{len(realize.to_program_cache)} kernels were compiled to run the file")
  again, enqueue, total = timed(jit, inputs, args.runs)
  if digest(again) != digest(out): raise AssertionError("a later replay differs from the first one")
  print(f"  {'reload':<22} {(loaded - began) * 1e3:.0f} ms, first replay {(first - start) * 1e3:.0f} ms, "
        f"then {total:.1f} ms, enqueue {enqueue:.2f} ms")
  times = {"load_ms": (loaded - began) * 1e3, "first_ms": (first - start) * 1e3, "replay_ms": total, "enqueue_ms": enqueue}
  if args.json: pathlib.Path(args.json).write_text(json.dumps(times))
  for name, v in out.items():
    print(f"  {name:<22} {v.shape}, from {np.nanmin(v):.4g} to {np.nanmax(v):.4g}" if v.size else f"  {name:<22} {v.shape}")
  if args.save: np.savez(args.save, **out)
  if args.expect and digest(out) != args.expect: raise AssertionError("the outputs are not those of the process that compiled the model")
  return f"{about['model']} on {Device.DEFAULT}, outputs {digest(out)[:16]}"

if __name__ == "__main__":
  parser = arguments(__doc__, "file")
  parser.add_argument("--save", metavar="FILE.npz", help="where to write the outputs")
  parser.add_argument("--json", metavar="FILE.json", help="where to write the times")
  parser.add_argument("--expect", metavar="SHA256", help="fail if the outputs are others")
  try: verdict = main(parser.parse_args())
  except (Exception, KeyboardInterrupt) as e:
    if DEBUG: traceback.print_exc()
    print(adreno.in_words(e, "run_model"), flush=True)
    sys.exit(1)
  print(f"run_model: ok {verdict}")
