"""`./dev demo`: compiles a text-direction classifier for an Adreno 630, replays it on alternating images, and holds every answer against onnxruntime.

The device is a real Adreno 630 if one opens, else the virtual one, which executes the same machine code; the output says which. DEV=... decides
otherwise (DEV=MOCKKGSL+QCOM:IR3, DEV=MSM+QCOM). The model ships in the PyPI package rapidocr-onnxruntime: one image of 3x48x192 with values
(v/255 - 0.5) / 0.5 and zeros right of the text in, probabilities of "upright" and "upside down" out. Exit status 0 if every answer agrees, 1 if not.
"""
from __future__ import annotations
import math, resource, sys, time, traceback
import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageFont
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import DEBUG, tqdm
from adreno import Meter, count, describe, in_words, instructions, interface, kernels_and_copies, load_onnx, open_device, packaged, progress

PACKAGE, MODEL = "rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
SHAPE, LABELS = (1, 3, 48, 192), ("upright", "upside down")
TEXTS = ("Adreno 630", "Snapdragon 845", "fence 1024", "mainline Linux")
ROUNDS = 2            # replays over all images; a text and its upside-down twin are two images
TOLERANCE = 1e-3      # of log(probability), where the confident answers still differ: float32 sums in another order

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

def check(answer: np.ndarray, reference: np.ndarray, what: str) -> float:
  """The largest difference of log(probability). Raises AssertionError in words."""
  with np.errstate(all="ignore"): worst = float(np.abs(np.log(answer) - np.log(reference)).max())
  if not worst <= TOLERANCE:
    raise AssertionError(f"{what}: {answer[0]} instead of onnxruntime's {reference[0]}, log(probability) off by {worst:.1e}, allowed {TOLERANCE:g}")
  if answer.argmax() != reference.argmax(): raise AssertionError(f"{what}: {LABELS[answer.argmax()]}, onnxruntime says {LABELS[reference.argmax()]}")
  return worst

def main() -> str:
  began = time.perf_counter()
  dev, virtual = open_device()
  print(describe(dev, virtual), flush=True)

  images = [(f"{text!r}, {LABELS[flip]}", flip, draw(text, bool(flip))) for text in TEXTS for flip in (0, 1)]
  path, options = packaged(PACKAGE, MODEL), onnxruntime.SessionOptions()
  options.intra_op_num_threads = 1
  session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
  references = [session.run(None, {session.get_inputs()[0].name: x})[0] for _, _, x in images]

  name = session.get_inputs()[0].name
  model, _ = load_onnx(path, {name: SHAPE})
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
      with progress(compiling=n == 0): answer = classify(inputs[which]).numpy()
      cost = meter.since()
      phases[phase] = phases.get(phase, 0) + (cost["seconds"] or 0)
      worst = max(worst, check(answer, references[which], f"{phase} of {images[which][0]}"))
      if phase == "replay":
        if classify.captured is not captured: raise AssertionError("a replay captured again instead of replaying")
        costs.append(cost)
        correct += int(answer.argmax()) == images[which][1]
      bar.update(1)

  if (why := meter.trouble()) is not None: raise AssertionError(why)
  one, n, rss = costs[0], len(costs), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  for what in ("submits", "lane_instructions"):
    if any(c[what] != one[what] or one[what] == 0 for c in costs): raise AssertionError(f"{what} of the replays: {[c[what] for c in costs]}")
  lanes = one["lane_instructions"]
  rate = f", {count(lanes * n / phases['replay'], 'lane-instructions/s')}" if lanes is not None else ""
  kernels, copies = kernels_and_copies(classify)
  rows = {"kernels, copies per replay": f"{kernels}, {copies}", "submits per replay": one["submits"],
          "buffers per submit": b if (b := meter.buffers()) is not None else "KGSL takes no list, all that is mapped takes part",
          "instructions per replay": instructions(one), "time per replay": f"{phases['replay'] / n * 1e3:.1f} ms{rate}",
          "eager, capture": f"{phases['eager']:.1f} s, {phases['capture']:.1f} s (compiling and encoding)",
          "answers": f"{correct} of {n} as drawn, log(probability) at most {worst:.1e} from onnxruntime's", "peak memory": f"{rss:.0f} MiB"}
  if one["image_reads"]: rows["image reads per replay"] = count(one["image_reads"], "by lanes")
  print(*(f"  {k:<24} {v}" for k, v in rows.items()), sep="\n")
  return f"{n} replays of {kernels} kernels agree with onnxruntime on the {'VIRTUAL ' if virtual else ''}Adreno 630 ({interface(dev)}), " \
         f"{time.perf_counter() - began:.0f} s"

if __name__ == "__main__":
  if sys.argv[1:]: sys.exit(f"demo: takes no arguments, not {' '.join(sys.argv[1:])}; DEV and IMAGE=1 choose how it runs")
  try: verdict = main()
  except (Exception, KeyboardInterrupt) as e: # whatever it is, it is told in words
    if DEBUG: traceback.print_exc()
    print(in_words(e, "demo"), flush=True)
    sys.exit(1)
  print(f"demo: ok {verdict}")
