"""What the examples share: opening the device, ONNX models as functions of fixed shapes, and the cost of a replay."""
from __future__ import annotations
import argparse, contextlib, importlib.util, io, math, os, pathlib, sys, time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
import numpy as np
from tinygrad import Context, Device, GlobalCounters, dtypes
from tinygrad.dtype import DType, _to_np_dtype
from tinygrad.engine.realize import get_call_kernels
from tinygrad.helpers import DEBUG, DEV
from tinygrad.nn.onnx import OnnxRunner
from tinygrad.uop.ops import Ops

Shape = tuple[int, ...]

def number(kind: type, least: float, what: str) -> Callable[[str], float]:
  """An option's value of at least `least`."""
  def parse(text: str) -> float:
    try:
      if math.isfinite(value := kind(text)) and value >= least: return value # type: ignore[no-any-return]
    except ValueError: pass
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
  return parse

def open_device() -> tuple[Any, bool]:
  """(device, whether it is virtual). Raises RuntimeError with each interface's reason if DEV names one that does not open."""
  asked = bool(DEV.device)
  if asked and DEV.device != "QCOM": raise RuntimeError(f"DEV={os.environ['DEV']} is not an Adreno: unset DEV, or use DEV=QCOM or DEV=MOCKMSM+QCOM")
  if not asked: DEV.value = os.environ["DEV"] = "QCOM" # the environment is for compile workers
  try: dev = Device["QCOM"]
  except RuntimeError as e:
    if asked: raise
    print(f"no Adreno 630 opens here ({e})")
    DEV.value = os.environ["DEV"] = "MOCKMSM+QCOM"
    dev = Device["QCOM"]
  return dev, type(dev.iface).__name__.startswith("MOCK") # type: ignore[attr-defined]

def interface(dev: Any) -> str: return type(dev.iface).__name__.removeprefix("MOCK").removesuffix("Iface")

def describe(dev: Any, virtual: bool) -> str:
  return f"{'VIRTUAL' if virtual else 'real'} Adreno 630 (chip {dev.iface.chip_id:#010x}) through {interface(dev)}, {type(dev.renderer).__name__}" + \
         (": a model of the chip and of its kernel driver executes the machine code, no hardware is used,\n"
          "times are those of the emulation" if virtual else "")

def packaged(package: str, file: str) -> pathlib.Path:
  """A data file inside an installed package, which is not imported."""
  spec = importlib.util.find_spec(package)
  path = pathlib.Path(spec.origin).parent / file if spec is not None and spec.origin else None
  if path is None or not path.is_file(): raise RuntimeError(f"{file} is missing: pip install --no-deps {package.replace('_', '-')}")
  return path

# *** ONNX

def load_onnx(path: pathlib.Path | str, shapes: Mapping[str, Shape] = {}) -> tuple[OnnxRunner, dict[str, tuple[Shape, DType]]]:
  """The model, and shape and dtype of each input. Dimensions that the file leaves open are taken from `shapes`; the first one, a batch, may be left
  out and is 1. Raises RuntimeError for a shape that contradicts the file or is missing, and for a file of something else."""
  try: model = OnnxRunner(str(path))
  except (ValueError, IndexError, KeyError, EOFError, UnicodeDecodeError) as e:
    raise RuntimeError(f"{path} can't be read as an ONNX model ({type(e).__name__}: {e})") from e
  if unknown := shapes.keys() - model.graph_inputs.keys():
    raise RuntimeError(f"the model has no input {min(unknown)!r}, its inputs are {', '.join(model.graph_inputs)}")
  inputs = {}
  for name, spec in model.graph_inputs.items():
    fixed = [d if isinstance(d, int) else None for d in spec.shape] if spec.shape is not None else [None] * len(shapes.get(name, ()))
    if name not in shapes and None in fixed[1:]:
      raise RuntimeError(f"the model leaves dimensions of input {name!r} open, {open_shape(fixed)}: say which with "
                         f"--shape {name}={','.join('1' if d is None else str(d) for d in fixed)}, the ones being yours to choose")
    shape = shapes.get(name, tuple(1 if d is None else d for d in fixed))
    if len(shape) != len(fixed) or any(d is not None and d != s for d, s in zip(fixed, shape)):
      raise RuntimeError(f"input {name!r} has the shape {open_shape(fixed)} in the model, not {shape}")
    model.graph_inputs[name] = replace(spec, shape=shape)
    inputs[name] = (shape, spec.dtype)
  for node in model.graph_nodes:
    try: model._select_op(node.op, node.opset_id)
    except NotImplementedError:
      raise RuntimeError(f"tinygrad's ONNX importer (tinygrad/nn/onnx.py) has no operator {node.op} of {node.opset_id.domain.value} "
                         f"{node.opset_id.version}, which computes {', '.join(map(repr, filter(None, node.outputs)))}: export the model without "
                         "it, for example with other operators in its place, or add it there") from None
  return model, inputs

def open_shape(dims: list[int | None]) -> str: return f"({', '.join('any' if d is None else str(d) for d in dims)})"

def random_input(rng: np.random.Generator, shape: Shape, dtype: DType) -> np.ndarray:
  """As a camera or a network would give it: uint8 over its range, other integers small, floats normal."""
  if dtype == dtypes.bool: return rng.integers(0, 2, shape).astype(bool)
  if dtypes.is_int(dtype): return rng.integers(0, 256 if dtype == dtypes.uint8 else 8, shape).astype(_to_np_dtype(dtype))
  return rng.standard_normal(shape, np.float32).astype(_to_np_dtype(dtype))

# *** what a replay costs

@contextlib.contextmanager
def progress(compiling: bool) -> Iterator[None]:
  """While kernels compile a terminal shows tinygrad's progress bar; what else that level prints is not for here."""
  with Context(DEBUG=max(DEBUG.value, int(compiling and sys.stderr.isatty()))):
    with contextlib.nullcontext() if DEBUG > 1 or not compiling else contextlib.redirect_stdout(io.StringIO()): yield

def kernels_and_copies(jit: Any) -> tuple[int, int]:
  """How many of each a replay of a captured TinyJit makes; copies are from and to the host."""
  ops = [kernel.src[0].op for call in jit.captured.linear.src for _, kernel in get_call_kernels(call)]
  return len(ops) - ops.count(Ops.COPY), ops.count(Ops.COPY)

class Meter:
  """What one replay costs, counted the same way on hardware and on the virtual device; what hardware does not count is None."""
  def __init__(self, dev: Any, virtual: bool):
    self.dev, self.gpu = dev, None
    if virtual:
      from test.mockgpu.qcom import current
      self.gpu = current().gpu
    self.start()

  def start(self) -> None:
    self.submits, self.ops = self.dev.queue.submits, GlobalCounters.global_ops
    self.counted, self.reads = dict(self.gpu.counters) if self.gpu is not None else {}, self.image_reads()
    self.seconds = time.perf_counter()

  def since(self) -> dict[str, float | None]:
    """`operations` is tinygrad's estimate, `image_reads` is by lanes."""
    gpu = {n: self.gpu.counters[n] - self.counted.get(n, 0) if self.gpu is not None else None for n in ("wave_instructions", "lane_instructions")}
    reads = None if self.reads is None else (self.image_reads() or 0) - self.reads
    return {"submits": self.dev.queue.submits - self.submits, "operations": int(GlobalCounters.global_ops - self.ops), "image_reads": reads,
            "seconds": time.perf_counter() - self.seconds, **gpu}

  def buffers(self) -> int | None:
    """Length of the last submit's buffer list. None on KGSL, where every mapped buffer is part of every submit."""
    return getattr(self.dev.iface.submit_args[0], "nr_bos", None)

  def image_reads(self) -> int | None:
    """By lanes, in all runs. None on hardware."""
    return None if self.gpu is None else sum(n for name, (_, n) in self.gpu.engine.counts().items() if name.startswith(("isam", "sam")))

  def trouble(self) -> str | None:
    """What the kernel's fault counters, or the virtual GPU, have to say against the runs since the device was opened."""
    if (why := self.dev.iface.lost()) is not None: return f"the kernel's fault counter moved: {why}"
    return f"the virtual GPU reports: {self.gpu.reports[0]}" if self.gpu is not None and self.gpu.reports else None

def count(n: float | None, of: str = "") -> str:
  if n is None: return "n/a (hardware does not count them)"
  scale, prefix = next((s for s in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if n >= s[0]), (1, ""))
  return f"{n / scale:.{1 if prefix else 0}f}{prefix} {of}".rstrip()

def instructions(cost: Mapping[str, float | None]) -> str:
  text = count(cost["wave_instructions"], "by waves")
  return text + (f", {count(cost['lane_instructions'], 'by their lanes')}" if cost["lane_instructions"] is not None else "")

def in_words(e: BaseException, script: str) -> str:
  """One line for what stopped a script; the rest of a longer text goes to stderr."""
  if isinstance(e, KeyboardInterrupt): return f"{script}: FAILED interrupted"
  first, _, rest = (str(e) or type(e).__name__).partition("\n")
  if rest: print(rest, file=sys.stderr)
  if not isinstance(e, (RuntimeError, AssertionError)): first = f"{type(e).__name__}: {first}"
  return f"{script}: FAILED {first}" + ("" if DEBUG else " (DEBUG=1 shows where)")
