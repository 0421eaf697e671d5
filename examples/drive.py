"""A driving pipeline of openpilot's shape on an Adreno 630: camera frames, warp, queues, vision, policy; with a numpy model beside it.

    DEV=MOCKMSM+QCOM IMAGE=1 FLOAT16=1 NOLOCALS=1 OPENPILOT_HACKS=1 ./dev run examples/drive.py
    DEV=QCOM ./dev run examples/drive.py --size full --steps 50
    DEV=MOCKMSM+QCOM ./dev run examples/drive.py --sweep           every combination of openpilot's flags, each in a process of its own

Two cameras write NV12 frames into ring slots that this process wraps once and keeps (DMA-BUFs on MSM, pointers on KGSL). One captured function warps
Y, U and V by a perspective (a gather whose index is computed in float), shifts six planes a camera into a uint8 queue, runs a convolutional network
over that queue, shifts its feature into a float queue, and multiplies that queue with the policy: recurrent state is updated in the capture. Small
inputs lie in numpy arrays that are rewritten in place (device NPY), or on the device.

Every step of every way to run it has to give the same bytes, outputs and queues: called eagerly, captured with JIT=1 and 2, with JIT_BATCH_SIZE 0 and
32, with and without memory planner, loaded from a pickle here and (--reload) in another process. The eager run is held against numpy at every step.
"""
from __future__ import annotations
import argparse, contextlib, ctypes, hashlib, io, itertools, json, mmap, os, pathlib, pickle, struct, subprocess, sys, tempfile, time, traceback
from collections.abc import Iterator
from typing import Any, NamedTuple
import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, dtypes
from tinygrad.engine import realize
from tinygrad.helpers import DEBUG, FLOAT16, getenv, tqdm
import adreno

class Size(NamedTuple):
  """Pixels of a camera and of what the network sees, both with chroma at half of it; frames in the queue, and every how many the network sees one."""
  camera: tuple[int, int]
  model: tuple[int, int]
  frames: int
  every: int
  channels: tuple[int, ...]
  feature: int
  history: int
  outputs: int

SIZES = {"small": Size((160, 98), (64, 32), 5, 2, (8, 12, 6), 24, 7, 40), "full": Size((1928, 1208), (512, 256), 5, 4, (32, 48, 32), 512, 25, 1000)}
SLOTS, PLANES = 4, 6

# *** the machine: frames in memory of others

class Ring:
  """Ring slots of one camera: NV12, rows padded to 64 bytes, chroma in a row of its own after 64 bytes that nobody reads."""
  def __init__(self, dev: Any, size: Size):
    (w, h), self.dev = size.camera, dev
    self.stride = -(-w // 64) * 64
    self.uv = self.stride * h + 64
    self.bytes, self.size = self.uv + self.stride * (h // 2), size
    self.fds = [self.dmabuf() if adreno.interface(dev) == "MSM" else -1 for _ in range(SLOTS)]
    self.maps = [mmap.mmap(fd, -(-self.bytes // mmap.PAGESIZE) * mmap.PAGESIZE) for fd in self.fds]
    self.tensors: dict[int, Tensor] = {}

  def dmabuf(self) -> int:
    arg = bytearray(struct.pack("<QIIQ", self.bytes, 0, os.O_RDWR | os.O_CLOEXEC, 0))
    self.dev.iface.io("/dev/dma_heap/system", os.O_RDWR).ioctl(0xc0184800, arg) # DMA_HEAP_IOCTL_ALLOC
    return int(struct.unpack_from("<I", arg, 8)[0])

  def write(self, slot: int, frame: np.ndarray) -> None:
    self.maps[slot][:self.bytes] = frame.tobytes()
    if self.fds[slot] >= 0: self.dev.iface.dmabuf_sync(self.fds[slot], 6) # END | WRITE: a CPU that plays camera owes this, a camera does not

  def tensor(self, slot: int) -> Tensor:
    """The wrap of a slot: made once."""
    if slot not in self.tensors:
      ptr = ctypes.addressof(ctypes.c_char.from_buffer(self.maps[slot])) if self.fds[slot] < 0 else None
      self.tensors[slot] = Tensor.from_blob(ptr, (self.bytes,), fd=self.fds[slot] if ptr is None else None, dtype=dtypes.uint8, device="QCOM")
    return self.tensors[slot]

class Drive(NamedTuple):
  """What happens in each step: frames of both cameras, perspectives, and the small inputs."""
  frames: np.ndarray
  transforms: np.ndarray
  desire: np.ndarray
  traffic: np.ndarray

def drive(size: Size, ring: Ring, steps: int, seed: int) -> Drive:
  rng, (w, h), (mw, mh) = np.random.default_rng(seed), size.camera, size.model
  base = np.array([[w / mw, 0, 0], [0, h / mh, 0], [0, 0, 1]])
  jitter = rng.uniform(-1, 1, (steps, 2, 3, 3)) * np.array([[.06, .06, w * .05], [.06, .06, h * .05], [4e-4, 4e-4, 0]])
  frames = rng.integers(0, 256, (min(steps, 8), 2, ring.bytes), np.uint8)  # a few frames that come back, each step with another perspective
  traffic = rng.uniform(0, 1, (steps, 2)).astype(np.float32)
  return Drive(frames, (base + jitter).astype(np.float32), rng.standard_normal((steps, 8), np.float32), traffic)

# *** the pipeline

class Model:
  """Weights and recurrent state. `step` is the function that is captured; everything in `state()` changes inside of it."""
  def __init__(self, size: Size, ring: Ring, seed: int = 1):
    rng, self.size, self.stride, self.uv = np.random.default_rng(seed), size, ring.stride, ring.uv
    (mw, mh), seen = size.model, len(range(0, size.frames, size.every))
    chans = (2 * PLANES * seen, *size.channels)
    flat = size.channels[-1] * (mh // 16) * (mw // 16)
    def weights(*shape: int, fan: int) -> np.ndarray: return (rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)
    self.numpy = {**{f"conv{i}": weights(o, c, 3, 3, fan=9 * c) for i, (c, o) in enumerate(zip(chans, chans[1:]))},
                  "feature": weights(flat, size.feature, fan=flat), "hidden": weights(size.history * size.feature + 10, 64, fan=size.feature),
                  "policy": weights(64, size.outputs, fan=64)}
    kind = dtypes.half if FLOAT16 else dtypes.float32
    self.weights = {k: Tensor(v).cast(kind).contiguous().realize() for k, v in self.numpy.items()}
    self.images = Tensor.zeros(size.frames, 2 * PLANES, mh // 2, mw // 2, dtype=dtypes.uint8).contiguous().realize()
    self.features = Tensor.zeros(size.history, size.feature, dtype=dtypes.float32).contiguous().realize()

  def state(self) -> dict[str, Tensor]: return {"images": self.images, "features": self.features}

  def warp(self, plane: Tensor, stride: int, size: tuple[int, int], out: tuple[int, int], transform: Tensor) -> Tensor:
    (w, h), (ow, oh) = size, out
    x, y = Tensor.arange(ow).reshape(1, ow).expand(oh, ow).cast(dtypes.float32), Tensor.arange(oh).reshape(oh, 1).expand(oh, ow).cast(dtypes.float32)
    sx, sy, sz = (transform[i, 0] * x + transform[i, 1] * y + transform[i, 2] for i in range(3))
    column, row = (sx / sz).round().clip(0, w - 1), (sy / sz).round().clip(0, h - 1)
    return plane[(row * stride + column).cast(dtypes.int32).flatten()].reshape(oh, ow)

  def planes(self, frame: Tensor, transform: Tensor) -> Tensor:
    """(6, h/2, w/2) uint8: Y at even and odd rows and columns, U, V."""
    (w, h), (mw, mh) = self.size.camera, self.size.model
    half = transform * Tensor([[1, 1, .5], [1, 1, .5], [2, 2, 1]]) # chroma has half the pixels, in camera and model
    uv = frame[self.uv:self.uv + self.stride * (h // 2)].reshape(h // 2, self.stride // 2, 2)
    with Context(SPLIT_REDUCEOP=0):
      y = self.warp(frame[:self.stride * h], self.stride, (w, h), (mw, mh), transform)
      u, v = (self.warp(uv[:, :, c].flatten(), self.stride // 2, (w // 2, h // 2), (mw // 2, mh // 2), half) for c in range(2))
      out = Tensor.stack(y[::2, ::2], y[1::2, ::2], y[::2, 1::2], y[1::2, 1::2], u, v).contiguous()
      return out.realize()

  def step(self, road: Tensor, wide: Tensor, transforms: Tensor, desire: Tensor, traffic: Tensor) -> tuple[Tensor, Tensor]:
    t, d = transforms.to(Device.DEFAULT), desire.to(Device.DEFAULT)
    new = self.planes(road, t[0]).cat(self.planes(wide, t[1])).reshape(1, *self.images.shape[1:])
    self.images.assign(self.images[1:].cat(new).contiguous()).realize()
    kind = self.weights["policy"].dtype
    x = self.images[::self.size.every].reshape(1, -1, *self.images.shape[2:]).cast(kind) / 255
    for i in range(len(self.size.channels)): x = x.conv2d(self.weights[f"conv{i}"], stride=2, padding=1).relu()
    feature = (x.flatten(1) @ self.weights["feature"]).tanh().cast(dtypes.float32)
    self.features.assign(self.features[1:].cat(feature).contiguous()).realize()
    hidden = (self.features.reshape(1, -1).cat(d.reshape(1, -1), traffic.reshape(1, -1), dim=1).cast(kind) @ self.weights["hidden"]).relu()
    out = (hidden @ self.weights["policy"]).cast(dtypes.float32).flatten().contiguous()
    return out, out[4:12].contiguous()

# *** the same in numpy, float64

class Numpy:
  def __init__(self, model: Model):
    self.m, self.size = model, model.size
    self.images, self.features = np.zeros(model.images.shape, np.uint8), np.zeros(model.features.shape)

  def warp(self, plane: np.ndarray, stride: int, size: tuple[int, int], out: tuple[int, int], transform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(pixels, where float32 may round a coordinate the other way)."""
    xy1 = np.stack([*np.meshgrid(np.arange(out[0]), np.arange(out[1])), np.ones(out[::-1])])
    sx, sy, sz = np.einsum("ij,jyx->iyx", transform.astype(np.float64), xy1)
    column, row = sx / sz, sy / sz
    near = sum((np.abs(c - np.floor(c) - 0.5) < 2e-6 * np.abs(c).max()).astype(int) for c in (column, row)) > 0
    index = np.round(row).clip(0, size[1] - 1) * stride + np.round(column).clip(0, size[0] - 1)
    return plane[index.astype(np.int64)], near

  def planes(self, frame: np.ndarray, transform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    (w, h), (mw, mh), m = self.size.camera, self.size.model, self.m
    half = transform * np.array([[1, 1, .5], [1, 1, .5], [2, 2, 1]], np.float32)
    uv = frame[m.uv:].reshape(h // 2, m.stride // 2, 2)
    y = self.warp(frame[:m.stride * h], m.stride, (w, h), (mw, mh), transform)
    u, v = (self.warp(uv[:, :, c].ravel(), m.stride // 2, (w // 2, h // 2), (mw // 2, mh // 2), half) for c in range(2))
    split = [np.stack([a[::2, ::2], a[1::2, ::2], a[::2, 1::2], a[1::2, 1::2], b, c]) for a, b, c in zip(y, u, v)]
    return split[0], split[1]

  def step(self, frames: np.ndarray, transforms: np.ndarray, desire: np.ndarray, traffic: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Output of one step. `images` is the device's queue: where a coordinate lies between two pixels both are right, and its choice is taken."""
    new, near = (np.concatenate(x) for x in zip(*(self.planes(f, t) for f, t in zip(frames, transforms))))
    wrong = (new != images[-1]) & ~near
    assert not wrong.any(), f"{wrong.sum()} of {new.size} warped pixels differ from numpy's"
    assert np.array_equal(images[:-1], self.images[1:]), "older frames of the queue differ from numpy's"
    self.images = images.copy()
    x = self.images[::self.size.every].reshape(-1, *self.images.shape[2:]) / 255
    for i in range(len(self.size.channels)):
      w = self.m.numpy[f"conv{i}"].astype(np.float64)
      x = np.pad(x, ((0, 0), (1, 1), (1, 1)))
      windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))[:, ::2, ::2]
      x = np.maximum(np.einsum("cyxij,ocij->oyx", windows, w), 0)
    feature = np.tanh(x.ravel() @ self.m.numpy["feature"])
    self.features = np.concatenate([self.features[1:], feature[None]])
    hidden = np.maximum(np.concatenate([self.features.ravel(), desire, traffic]) @ self.m.numpy["hidden"], 0)
    return hidden @ self.m.numpy["policy"] # type: ignore[no-any-return]

# *** running it

class Run:
  """One way to run the pipeline: `bytes` per step of outputs and queues."""
  def __init__(self, rings: list[Ring], what: Drive, model: Model):
    self.rings, self.what, self.model = rings, what, model
    self.transforms, self.desire = np.zeros_like(what.transforms[0]), np.zeros_like(what.desire[0])

  def inputs(self, n: int) -> dict[str, Tensor]:
    slot, small = n % SLOTS, {"transforms": (self.transforms, self.what.transforms), "desire": (self.desire, self.what.desire)}
    for array, values in small.values(): array[:] = values[n]
    for c, ring in enumerate(self.rings): ring.write(slot, self.what.frames[n % len(self.what.frames), c])
    if not hasattr(self, "npy"): self.npy = {k: Tensor(a, device="NPY") for k, (a, _) in small.items()}
    return {"road": self.rings[0].tensor(slot), "wide": self.rings[1].tensor(slot), **self.npy, "traffic": Tensor(self.what.traffic[n]).realize()}

  def __call__(self, step: Any, state: dict[str, Tensor], steps: range) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], bytes]]:
    """(output, queues, digest of both and of the slice) of each step."""
    for n in steps:
      out, part = step(**self.inputs(n))
      o, p, queues = out.numpy(), part.numpy(), {k: t.numpy() for k, t in state.items()}
      assert np.array_equal(o[4:12], p), f"step {n}: the slice is not a slice of the output"
      yield o, queues, hashlib.sha256(b"".join([o.tobytes(), p.tobytes(), *(q.tobytes() for q in queues.values())])).digest()

WAYS = [{"JIT": j, "JIT_BATCH_SIZE": b, "NO_MEMORY_PLANNER": p} for j in (1, 2) for b in (0, 32) for p in (0, 1)]

FLAGS = ("IMAGE", "FLOAT16", "NOLOCALS", "OPENPILOT_HACKS")

def sweep(args: argparse.Namespace) -> str:
  """Each combination of FLAGS with both batch sizes: as main, with few steps. The table is printed as it grows."""
  failed = []
  print(f"  {' '.join(FLAGS)}  kernels  image reads a step  from numpy", flush=True)
  combinations = list(itertools.product((0, 1), repeat=len(FLAGS)))
  for combination in tqdm(combinations, unit="combinations", disable=None):
    command = [sys.executable, __file__, "--size", args.size, "--seed", str(args.seed), "--steps", str(min(args.steps, 4)), "--ways", "batches",
               "--json"]
    env = {**os.environ, **{f: str(v) for f, v in zip(FLAGS, combination)}}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    cells = "  ".join(f"{v:<{len(f) - 1}}" for f, v in zip(FLAGS, combination))
    if done.returncode:
      failed.append(combination)
      print(f"  {cells}  {(done.stdout.strip() or done.stderr.strip()).splitlines()[-1]}", flush=True)
    else:
      found = json.loads(done.stdout.strip().splitlines()[-1])
      print(f"  {cells}  {found['kernels']:<7}  {adreno.count(found['image_reads']):<18}  {found['off']:.1e}", flush=True)
  if failed: raise AssertionError(f"{len(failed)} of {len(combinations)} combinations fail")
  return f"{len(combinations)} combinations of flags, JIT_BATCH_SIZE 0 and 32: eager, captured and loaded runs are equal in every byte"

def reset(state: dict[str, Tensor]) -> None:
  for t in state.values(): t.assign(Tensor.zeros(*t.shape, dtype=t.dtype).contiguous()).realize()

def main(args: argparse.Namespace) -> str:
  dev, virtual = adreno.open_device()
  size = SIZES[args.size]
  rings = [Ring(dev, size) for _ in range(2)]
  what, tolerance = drive(size, rings[0], args.steps, args.seed), 3e-2 if FLOAT16 else 1e-3
  if args.loaded: return loaded(args, rings, what)
  print(adreno.describe(dev, virtual), flush=True)
  model, meter, worst, want = Model(size, rings[0]), adreno.Meter(dev, virtual), 0.0, list[bytes]()
  run, reference, began = Run(rings, what, model), Numpy(model), time.perf_counter()
  with tqdm(total=args.steps, desc="eager", unit="steps", disable=None) as bar, adreno.progress(compiling=True):
    for n, (out, queues, digest) in enumerate(run(model.step, model.state(), range(args.steps))):
      frames = what.frames[n % len(what.frames)]
      expected = reference.step(frames, what.transforms[n], what.desire[n], what.traffic[n], queues["images"])
      for name, got, ref in (("output", out, expected), ("features", queues["features"], reference.features)):
        off = float(np.abs(got - ref).max() / max(1, np.abs(ref).max()))
        assert off <= tolerance, f"step {n}: {name} is {off:.1e} from numpy's, allowed {tolerance:g}"
        worst = max(worst, off)
      want.append(digest)
      bar.update(1)
  print(f"  {'eager':<40} {args.steps} steps, at most {worst:.1e} from numpy, {time.perf_counter() - began:.0f} s", flush=True)
  if len(set(want)) != len(want): raise AssertionError("two steps gave the same outputs and queues")

  stored = b""
  for way in {"all": WAYS, "one": WAYS[:1], "batches": WAYS[:4:2]}[args.ways]:
    name = " ".join(f"{k}={v}" for k, v in way.items())
    with environment(way), tqdm(total=2 * args.steps, desc=name, unit="steps", disable=None) as bar:
      reset(model.state())
      jit, costs, times = TinyJit(model.step), list[dict](), list[float]()
      for n in range(args.steps):
        inputs = run.inputs(n)
        dev.synchronize()
        meter.start()
        start = time.perf_counter()
        out, part = jit(**inputs)
        times.append(time.perf_counter() - start)
        o, p, queues = out.numpy(), part.numpy(), {k: t.numpy() for k, t in model.state().items()}
        costs.append(meter.since())
        digest = hashlib.sha256(b"".join([o.tobytes(), p.tobytes(), *(q.tobytes() for q in queues.values())])).digest()
        if digest != want[n]: raise AssertionError(f"{name}: step {n} differs from the eager one, {differences(n, o, queues, run, model)}")
        bar.update(1)
      # the same capture from a pickle, with its state; it goes on where the original is, so both start anew
      buffers: list[pickle.PickleBuffer] = []
      reset(model.state())
      data = pickle.dumps((jit, model.state()), protocol=5, buffer_callback=buffers.append)
      again, state = pickle.load(io.BytesIO(data), buffers=buffers)
      for n, (_, _, digest) in enumerate(run(again, state, range(args.steps))):
        if digest != want[n]: raise AssertionError(f"{name}: step {n} of the loaded capture differs from the eager one")
        bar.update(1)
      stored = stored or pickle.dumps((jit, model.state()), protocol=5)
    last, (kernels, copies) = costs[-1], adreno.kernels_and_copies(jit)
    print(f"  {name:<40} {kernels} kernels, {copies} copies, {last['submits']} submits a step, enqueue {min(times[2:]) * 1e3:.2f} ms, "
          "equal, also loaded", flush=True)
  if (why := meter.trouble()) is not None: raise AssertionError(why)
  if args.json: return json.dumps({"kernels": kernels, "image_reads": last["image_reads"], "off": worst})
  if args.reload:
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "drive.pkl"
      path.write_bytes(stored)
      done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--loaded", str(path)], capture_output=True, text=True)
      if done.returncode: raise AssertionError(f"in another process: {(done.stdout + done.stderr).strip().splitlines()[-1]}\n{done.stderr}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if found["digests"] != [d.hex() for d in want]: raise AssertionError("another process computes something else with the pickle")
    print(f"  {'another process':<40} reload {found['reload_ms']} ms, first replay {found['first_ms']} ms, no kernel compiled, equal")
  return f"{args.steps} steps of {kernels} kernels are equal in every way, digest {hashlib.sha256(b''.join(want)).hexdigest()[:16]}"

def loaded(args: argparse.Namespace, rings: list[Ring], what: Drive) -> str:
  data, start = pathlib.Path(args.loaded).read_bytes(), time.perf_counter()
  jit, state = pickle.loads(data)
  ready = time.perf_counter()
  run, digests = Run(rings, what, None), list[str]() # type: ignore[arg-type]
  first, begin = 0.0, time.perf_counter()
  for _, _, digest in run(jit, state, range(args.steps)):
    first = first or time.perf_counter() - begin
    digests.append(digest.hex())
  if realize.to_program_cache: raise AssertionError(f"{len(realize.to_program_cache)} kernels were compiled")
  return json.dumps({"reload_ms": round((ready - start) * 1e3), "first_ms": round(first * 1e3), "digests": digests})

def differences(n: int, out: np.ndarray, queues: dict[str, np.ndarray], run: Run, model: Model) -> str:
  """Which part is wrong: the same steps again, eagerly."""
  reset(model.state())
  with Context(JIT=0): o, q, _ = list(run(model.step, model.state(), range(n + 1)))[-1]
  parts = {"output": (out, o), **{k: (v, q[k]) for k, v in queues.items()}}
  return ", ".join(f"{k}: {np.count_nonzero(a != b)} of {a.size} values" for k, (a, b) in parts.items() if not np.array_equal(a, b))

@contextlib.contextmanager
def environment(settings: dict[str, int]) -> Iterator[None]:
  """Variables of tinygrad, whichever way it reads each."""
  before = {k: os.environ.get(k) for k in settings}
  os.environ.update({k: str(v) for k, v in settings.items()})
  getenv.cache_clear()
  from tinygrad import helpers
  try:
    with Context(**{k: v for k, v in settings.items() if isinstance(getattr(helpers, k, None), helpers.ContextVar)}): yield
  finally:
    for k, v in before.items(): os.environ.pop(k) if v is None else os.environ.update({k: v})
    getenv.cache_clear()

if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--size", choices=SIZES, default="small")
  parser.add_argument("--steps", type=adreno.number(int, 3, "a whole number from 3: one eager, one captured, the rest replayed"), default=50)
  parser.add_argument("--seed", type=adreno.number(int, 0, "a whole number from 0"), default=0)
  parser.add_argument("--ways", choices=("all", "batches", "one"), default="all",
                      help="of capturing: all eight, those of both JIT_BATCH_SIZEs, or the first")
  parser.add_argument("--reload", action="store_true", help="also load the capture in another process")
  parser.add_argument("--sweep", action="store_true", help="all combinations of flags, at most 4 steps each")
  parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--loaded", help=argparse.SUPPRESS)
  options = parser.parse_args()
  try: verdict = sweep(options) if options.sweep else main(options)
  except (Exception, KeyboardInterrupt) as e: # whatever it is, it is told in words
    if DEBUG: traceback.print_exc()
    print(adreno.in_words(e, "drive"), flush=True)
    sys.exit(1)
  print(verdict if options.loaded or options.json else f"drive: ok {verdict}")
