"""`./dev demo`: compiles a text-direction classifier for an Adreno 630, replays it on alternating images, and holds every answer against onnxruntime.

The device is a real Adreno 630 if one opens, else the virtual one, which executes the same machine code; the output says which. DEV=... decides
otherwise (DEV=MOCKKGSL+QCOM:IR3, DEV=MSM+QCOM). The model ships in the PyPI package rapidocr-onnxruntime: one image of 3x48x192 with values
(v/255 - 0.5) / 0.5 and zeros right of the text in, probabilities of "upright" and "upside down" out. Exit status 0 if every answer agrees, 1 if not.
"""
from __future__ import annotations
import contextlib, importlib.util, io, math, os, pathlib, resource, sys, time, traceback
from dataclasses import replace
from typing import Any
import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageFont
from tinygrad import Context, Device, GlobalCounters, Tensor, TinyJit
from tinygrad.helpers import DEBUG, DEV, tqdm
from tinygrad.nn.onnx import OnnxRunner

PACKAGE, MODEL = "rapidocr_onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx"
SHAPE, LABELS = (1, 3, 48, 192), ("upright", "upside down")
TEXTS = ("Adreno 630", "Snapdragon 845", "fence 1024", "mainline Linux")
ROUNDS = 2            # replays over all images; a text and its upside-down twin are two images
TOLERANCE = 1e-3      # of log(probability), where the confident answers still differ: float32 sums in another order

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

def model_path() -> pathlib.Path:
  """The classifier inside the installed package, which is not imported: only its data is needed."""
  spec = importlib.util.find_spec(PACKAGE)
  path = pathlib.Path(spec.origin).parent / "models" / MODEL if spec is not None and spec.origin else None
  if path is None or not path.is_file(): raise RuntimeError(f"{MODEL} is missing: pip install --no-deps rapidocr-onnxruntime==1.4.4")
  return path

def draw(text: str, upside_down: bool) -> np.ndarray:
  """A line of text as the model takes it: float32 of SHAPE."""
  font = ImageFont.load_default(36)
  left, top, right, bottom = font.getbbox(text)
  img = Image.new("RGB", (round(right - left) + 16, round(bottom - top) + 16), (244, 240, 228))
  ImageDraw.Draw(img).text((8 - left, 8 - top), text, fill=(24, 32, 48), font=font)
  if upside_down: img = img.rotate(180)
  _, _, height, width = SHAPE
  img = img.resize((min(width, math.ceil(height * img.width / img.height)), height), Image.Resampling.BILINEAR)
  out = np.zeros(SHAPE, np.float32)
  out[0, :, :, :img.width] = (np.asarray(img, np.float32).transpose(2, 0, 1) / 255 - 0.5) / 0.5
  return out

class Meter:
  """What one replay costs, counted the same way on hardware and on the virtual device; what hardware does not count is None."""
  def __init__(self, dev: Any, virtual: bool):
    self.dev, self.gpu = dev, None
    if virtual:
      from test.mockgpu.qcom import current
      self.gpu = current().gpu
    self.start()

  def start(self) -> None:
    self.kernels, self.submits, self.seconds = GlobalCounters.kernel_count, self.dev.queue.submits, time.perf_counter()
    self.counted = dict(self.gpu.counters) if self.gpu is not None else {}

  def since(self) -> dict[str, float | None]:
    gpu = {n: self.gpu.counters[n] - self.counted.get(n, 0) if self.gpu is not None else None for n in ("wave_instructions", "lane_instructions")}
    return {"kernels": GlobalCounters.kernel_count - self.kernels, "submits": self.dev.queue.submits - self.submits,
            "seconds": time.perf_counter() - self.seconds, **gpu}

  def buffers(self) -> int | None:
    """Length of the last submit's buffer list. None on KGSL, where every mapped buffer is part of every submit."""
    return getattr(self.dev.iface.submit_args[0], "nr_bos", None)

  def image_reads(self) -> int | None:
    """By lanes, in all runs. None on hardware."""
    return None if self.gpu is None else sum(n for name, (_, n) in self.gpu.engine.counts().items() if name.startswith(("isam", "sam")))

def check(answer: np.ndarray, reference: np.ndarray, what: str) -> float:
  """The largest difference of log(probability). Raises AssertionError in words."""
  with np.errstate(all="ignore"): worst = float(np.abs(np.log(answer) - np.log(reference)).max())
  if not worst <= TOLERANCE:
    raise AssertionError(f"{what}: {answer[0]} instead of onnxruntime's {reference[0]}, log(probability) off by {worst:.1e}, allowed {TOLERANCE:g}")
  if answer.argmax() != reference.argmax(): raise AssertionError(f"{what}: {LABELS[answer.argmax()]}, onnxruntime says {LABELS[reference.argmax()]}")
  return worst

def count(n: float | None, of: str = "") -> str:
  if n is None: return "n/a (hardware does not count them)"
  scale, prefix = next((s for s in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if n >= s[0]), (1, ""))
  return f"{n / scale:.{1 if prefix else 0}f}{prefix} {of}".rstrip()

def main() -> str:
  began = time.perf_counter()
  dev, virtual = open_device()
  iface = type(dev.iface).__name__.removeprefix("MOCK").removesuffix("Iface")
  print(f"{'VIRTUAL' if virtual else 'real'} Adreno 630 (chip {dev.iface.chip_id:#010x}) through {iface}, {type(dev.renderer).__name__}" +
        (": a model of the chip and of its kernel driver executes the machine code, no hardware is used" if virtual else ""), flush=True)

  images = [(f"{text!r}, {LABELS[flip]}", flip, draw(text, bool(flip))) for text in TEXTS for flip in (0, 1)]
  path, options = model_path(), onnxruntime.SessionOptions()
  options.intra_op_num_threads = 1
  session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
  references = [session.run(None, {session.get_inputs()[0].name: x})[0] for _, _, x in images]

  model = OnnxRunner(path)
  name = next(iter(model.graph_inputs))
  model.graph_inputs[name] = replace(model.graph_inputs[name], shape=SHAPE) # the file says -1 where any size is allowed
  classify = TinyJit(lambda x: next(iter(model({name: x}).values())).realize())
  inputs = [Tensor(x).realize() for _, _, x in images]
  meter, phases, worst, correct, costs = Meter(dev, virtual), dict[str, float](), 0.0, 0, list[dict[str, float | None]]()

  # eager compiles every kernel, capture records them into batches, then each replay has another image in another buffer
  with tqdm(total=2 + ROUNDS * len(images), desc="eager", unit="runs", disable=None) as bar:
    for n in range(bar.t):
      which = (n - 2) % len(images)
      phase = "eager" if n == 0 else "capture" if n == 1 else "replay"
      bar.set_description(f"{phase} {images[which][0]}")
      captured = classify.captured
      meter.start()
      # the compilation has tinygrad's progress bar; what else that level prints is not for here
      quiet = contextlib.nullcontext() if DEBUG else contextlib.redirect_stdout(io.StringIO())
      with Context(DEBUG=max(DEBUG.value, int(n == 0 and sys.stderr.isatty()))), quiet:
        answer = classify(inputs[which]).numpy()
      cost = meter.since()
      phases[phase] = phases.get(phase, 0) + (cost["seconds"] or 0)
      worst = max(worst, check(answer, references[which], f"{phase} of {images[which][0]}"))
      if phase == "replay":
        if classify.captured is not captured: raise AssertionError("a replay captured again instead of replaying")
        costs.append(cost)
        correct += int(answer.argmax()) == images[which][1]
      bar.update(1)

  if (why := dev.iface.lost()) is not None: raise AssertionError(f"the kernel's fault counter moved: {why}")
  if meter.gpu is not None and meter.gpu.reports: raise AssertionError(f"the virtual GPU reports: {meter.gpu.reports[0]}")
  one, n, rss = costs[0], len(costs), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  for what in ("kernels", "submits", "lane_instructions"):
    if any(c[what] != one[what] or one[what] == 0 for c in costs): raise AssertionError(f"{what} of the replays: {[c[what] for c in costs]}")
  instructions, rate = count(one["wave_instructions"], "by waves"), ""
  if one["lane_instructions"] is not None:
    instructions += f", {count(one['lane_instructions'], 'by their lanes')}"
    rate = f", {count(one['lane_instructions'] * n / phases['replay'], 'lane-instructions/s')}"
  rows = {"kernels per replay": one["kernels"], "submits per replay": one["submits"],
          "buffers per submit": b if (b := meter.buffers()) is not None else "KGSL takes no list, all that is mapped takes part",
          "instructions per replay": instructions, "time per replay": f"{phases['replay'] / n * 1e3:.1f} ms{rate}",
          "eager, capture": f"{phases['eager']:.1f} s, {phases['capture']:.1f} s (compiling and encoding)",
          "answers": f"{correct} of {n} as drawn, log(probability) at most {worst:.1e} from onnxruntime's", "peak memory": f"{rss:.0f} MiB"}
  if (reads := meter.image_reads()): rows["image reads"] = count(reads, "by lanes")
  print(*(f"  {k:<24} {v}" for k, v in rows.items()), sep="\n")
  return f"{n} replays of {one['kernels']} kernels agree with onnxruntime on the {'VIRTUAL ' if virtual else ''}Adreno 630 ({iface}), " \
         f"{time.perf_counter() - began:.0f} s"

if __name__ == "__main__":
  if sys.argv[1:]: sys.exit(f"demo: takes no arguments, not {' '.join(sys.argv[1:])}; DEV and IMAGE=1 choose how it runs")
  try: verdict = main()
  except KeyboardInterrupt: sys.exit("demo: FAILED interrupted")
  except Exception as e: # whatever it is, it is told in words
    if DEBUG: traceback.print_exc()
    first, _, rest = (str(e) or type(e).__name__).partition("\n")
    if rest: print(rest, file=sys.stderr)
    if not isinstance(e, (RuntimeError, AssertionError)): first = f"{type(e).__name__}: {first}"
    print(f"demo: FAILED {first}" + ("" if DEBUG else " (DEBUG=1 shows where)"), flush=True)
    sys.exit(1)
  print(f"demo: ok {verdict}")
