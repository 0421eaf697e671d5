"""800 replays of one captured graph on an Adreno 630, with other buffers each time, normal and profiled, exact against numpy.

    DEV=QCOM python -m pytest test/device          on hardware, whichever interface opens (DEV=MSM+QCOM and DEV=KGSL+QCOM choose)
    python -m pytest test/device                   on the virtual Adreno 630, through both interfaces

A record of the run is written as JSON to $QCOM_RECORD, or build/qcom-replay-DEV.json: kernel, chip, versions, counts, faults and a hash of results.
Attach it to a report of what was run on hardware. A failed run writes its record too; where nothing ran, a record of before stays. Each run has a
process of its own.
"""
from __future__ import annotations
import contextlib, errno, hashlib, importlib.metadata, importlib.util, json, os, pathlib, platform, subprocess, sys, tempfile, time, traceback
from typing import Any
import numpy as np
import pytest
import tinygrad.engine.realize as realize
from tinygrad import Context, Device, GlobalCounters, Tensor, TinyJit, dtypes
from tinygrad.device import Compiled, ProfileGraphEvent
from tinygrad.helpers import DEV
from tinygrad.runtime.support.qcom_doctor import installed
from tinygrad.runtime.support.qcom_iface import QCOMError
from tinygrad.uop.ops import UOp

REPLAYS, N, SLOTS, SEED = 800, 17, 32, 630
NO_DEVICE, NOTHING_RAN = 77, "nothing ran: " # exit status of a run that found nothing to run on, and how its last line begins
Pair = tuple[np.ndarray, Tensor] # the same contents for numpy and for the device

class Inputs:
  """Random integers in tensors at changing addresses: whole buffers, views of a larger buffer, and a slice at a fixed offset of changing buffers."""
  def __init__(self, rng: np.random.Generator):
    self.rng = rng
    self.whole = [self.fresh(N) for _ in range(5)]
    self.sliced = [self.fresh(3 * N, np.float32) for _ in range(3)]
    pools = [self.fresh(N * SLOTS) for _ in range(2)]
    buffers = [[pool.uop.base.realized.view(N, dtypes.int32, 4 * N * k).ensure_allocated() for k in range(1, SLOTS)] for _, pool in pools]
    self.views = [(data[N*k:N*(k+1)], Tensor(UOp.from_buffer(buf))) for (data, _), bufs in zip(pools, buffers) for k, buf in enumerate(bufs, 1)]

  def fresh(self, size: int, dtype: type = np.int32) -> Pair:
    data = self.rng.integers(-1000, 1000, size).astype(dtype)
    return data, Tensor(data).realize()

  def pick(self) -> tuple[Pair, Pair, Pair]:
    self.used, k, s = (int(self.rng.integers(len(pairs))) for pairs in (self.whole, self.views, self.sliced))
    data, wide = self.sliced[s]
    return self.whole[self.used], self.views[k], (data[N:2*N], wide[N:2*N])

  def renew(self) -> None:
    """Frees the whole buffer that the last replay, perhaps still running, reads, and fills a new one: usually the same memory."""
    del self.whole[self.used]
    self.whole.append(self.fresh(N))

class Graph:
  """The function under test and what numpy says of it. A replay that was lost, doubled or out of order shows in `acc` ever after."""
  def __init__(self) -> None:
    self.acc, self.want, self.calls = Tensor.zeros(N, dtype=dtypes.int32).contiguous().realize(), np.zeros(N, np.int32), 0
    self.kernels, self.jit = 0, TinyJit(self.step)

  def step(self, x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    self.calls += 1
    a = (x * 3 + v).contiguous()
    b = (a.cast(dtypes.float32) * 0.5 - w).contiguous() # halves of small integers, and their sum: exact in float32
    self.acc.assign(self.acc * 5 + a)
    out = b + b.sum()
    Tensor.realize(a, out, self.acc)
    return a, out

  def __call__(self, x: Pair, v: Pair, w: Pair) -> tuple[tuple[Tensor, Tensor], tuple[np.ndarray, np.ndarray]]:
    a = x[0] * np.int32(3) + v[0]
    b = a.astype(np.float32) * np.float32(0.5) - w[0]
    self.want = self.want * np.int32(5) + a
    before = GlobalCounters.kernel_count
    got = self.jit(x[1], v[1], w[1])
    self.kernels += GlobalCounters.kernel_count - before
    return got, (a, b + b.sum(dtype=np.float32))

def same(what: str, got: np.ndarray, want: np.ndarray, digest: Any) -> None:
  digest.update(got.tobytes())
  if not np.array_equal(got, want): raise AssertionError(f"{what}: {got} instead of {want}")

def progress(text: str) -> None:
  """Shown on the terminal that the test was started from, if it was: pytest keeps the usual ways for itself."""
  if fd := int(os.environ.get("QCOM_PROGRESS_FD", "0")):
    with contextlib.suppress(OSError): os.write(fd, f"\r\033[K{text}".encode())

def replay(dev: Any, profiled: bool) -> dict[str, Any]:
  """Captures and replays. Raises AssertionError in words, returns what the record says of this mode."""
  inputs, graph, digest = Inputs(np.random.default_rng(SEED)), Graph(), hashlib.sha256()
  with Context(PROFILE=int(profiled)):
    for n in range(2):
      (a, out), want = graph(*inputs.pick())
      same(f"{'eager' if n == 0 else 'captured'} run", a.numpy(), want[0], digest)
      same(f"{'eager' if n == 0 else 'captured'} run", out.numpy(), want[1], digest)
    captured, programs = graph.jit.captured, len(realize.to_program_cache)
    submits, kernels, events, start = dev.queue.submits, graph.kernels, len(Compiled.profile_events), time.perf_counter()
    for n in range(REPLAYS):
      if n % 16 == 8: inputs.renew()
      if n % 20 == 0: progress(f"  replay {n} of {REPLAYS}, {'profiled' if profiled else 'normal'}")
      if n % 50 == 49: inputs.sliced[n // 50 % 3] = inputs.fresh(3 * N, np.float32)
      (a, out), want = graph(*inputs.pick())
      if n < REPLAYS // 2 or n % 16 == 15: # first each result, then bursts that nobody waits for
        same(f"replay {n}", a.numpy(), want[0], digest)
        same(f"replay {n}", out.numpy(), want[1], digest)
        same(f"accumulator after replay {n}", graph.acc.numpy(), graph.want, digest)
    dev.synchronize()
    seconds = time.perf_counter() - start
    assert graph.jit.captured is captured and graph.calls == 2, f"not a replay: the function ran {graph.calls} times"
    assert len(realize.to_program_cache) == programs, f"{len(realize.to_program_cache) - programs} kernels were compiled while replaying"
    submits, kernels = dev.queue.submits - submits, graph.kernels - kernels
    assert submits == REPLAYS, f"{submits} submits for {REPLAYS} replays of a graph that fits one"
    assert kernels % REPLAYS == 0 and kernels > 0, f"{kernels} kernels in {REPLAYS} replays"
    found = {"replays": REPLAYS, "submits_per_replay": submits // REPLAYS, "kernels_per_replay": kernels // REPLAYS,
             "buffers_per_submit": getattr(dev.iface.submit_args[0], "nr_bos", None), # KGSL takes no list
             "seconds": round(seconds, 3), "results_sha256": digest.hexdigest()}
    return found | (timestamps(Compiled.profile_events[events:], kernels) if profiled else {})

def timestamps(events: list[Any], kernels: int) -> dict[str, Any]:
  """Checks that each kernel of each replay has a duration and that they follow each other. Times are in us of the GPU's clock."""
  spans = [(float(e.sigs[x.st_id]), float(e.sigs[x.en_id])) for e in events if isinstance(e, ProfileGraphEvent) for x in e.ents]
  assert len(spans) == kernels, f"{len(spans)} kernels in the profile, {kernels} ran"
  for (_, before), (start, end) in zip([(0.0, 0.0), *spans], spans):
    assert before <= start < end, f"a kernel from {start} to {end} us, the one before ended at {before}"
  return {"profiled_kernels": len(spans), "median_kernel_us": round(float(np.median([en - st for st, en in spans])), 3)}

def faults(dev: Any) -> dict[str, Any]:
  """Everything that counts faults. `lost` covers this context since the last call, FAULTS is the whole GPU since boot."""
  found: dict[str, Any] = {"lost": dev.iface.lost()}
  if hasattr(dev.iface, "param"): found["FAULTS"] = dev.iface.param("FAULTS")
  if type(dev.iface).__name__.startswith("MOCK"):
    from test.mockgpu.qcom import current
    gpu = current().gpu
    found |= {"smmu_faults": gpu.counters["faults"], "hangs": gpu.counters["hangs"], "violations": len(gpu.reports)}
  return found

def version(package: str) -> str | None:
  with contextlib.suppress(importlib.metadata.PackageNotFoundError): return importlib.metadata.version(package)
  return None

def package_sha256(package: pathlib.Path) -> str:
  """One hash of every Python file of the tinygrad that is imported: the same for the same series in a wheel, a clone and a checkout."""
  h = hashlib.sha256()
  for f in sorted(package.rglob("*.py"), key=lambda f: f.relative_to(package).as_posix()):
    h.update(f.relative_to(package).as_posix().encode() + b"\0" + hashlib.sha256(f.read_bytes()).digest())
  return h.hexdigest()

def commit() -> str | None:
  """Of the repository that this file is from, with -dirty if files differ from it."""
  cmd = ["git", "-C", str(pathlib.Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
  with contextlib.suppress(OSError): return subprocess.run(cmd, capture_output=True, text=True).stdout.strip() or None
  return None

def identity(dev: Any) -> dict[str, Any]:
  iface, virtual = type(dev.iface).__name__.removesuffix("Iface"), type(dev.iface).__name__.startswith("MOCK")
  if virtual: from test.mockgpu.qcom import current
  kernel = platform.release() if not virtual else f"model of MSM DRM in Linux {current().config.kernel}" if "MSM" in iface else "model of KGSL"
  board = ""
  with contextlib.suppress(OSError): board = pathlib.Path("/proc/device-tree/model").read_text().strip("\0\n ") if not virtual else "virtual"
  return {"rung": "virtual" if virtual else "hardware", "board": board, "interface": iface, "kernel": kernel, "chip_id": f"{dev.iface.chip_id:#010x}",
          "renderer": type(dev.renderer).__name__, "machine": platform.machine(), "python": platform.python_version(),
          "tinygrad": installed().removeprefix("tinygrad "), "tinygrad_sha256": package_sha256(pathlib.Path(realize.__file__).parents[1]),
          "commit": commit(), "mesa": version("tinymesa") or os.environ.get("MESA_PATH"), "numpy": np.__version__}

def run(path: str) -> int:
  """One run in this process: writes the record to `path`. Exit status NO_DEVICE with the reason on stderr if nothing opens."""
  try: dev: Any = Device["QCOM"]
  except RuntimeError as e:
    if not isinstance(e, QCOMError) and "is not supported" not in str(e): raise
    print(f"{NOTHING_RAN}{e}", file=sys.stderr)
    return NO_DEVICE
  record: dict[str, Any] = {"test": "qcom_replay", "ok": False, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
  try:
    record |= identity(dev) | {"faults_before": faults(dev)}
    for mode in ("normal", "profiled"): record[mode] = replay(dev, mode == "profiled")
    assert record["normal"]["results_sha256"] == record["profiled"]["results_sha256"], "profiling changes results"
    record["faults_after"] = faults(dev)
    assert record["faults_after"] == record["faults_before"], f"fault counters moved: {record['faults_before']} -> {record['faults_after']}"
    record["ok"] = True
  except Exception as e:
    record["error"] = f"{type(e).__name__}: {e}"
    traceback.print_exc()
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  part = pathlib.Path(f"{path}.part")
  part.write_text(json.dumps(record, indent=2) + "\n")
  part.replace(path) # the record of before is there until this one is whole
  return 0 if record["ok"] else 1

# *** pytest

ASKED = repr(DEV) # the environment may have what another test module took as the default
DEVICES = [ASKED] if DEV.device == "QCOM" else ["MOCKMSM+QCOM:IR3", "MOCKKGSL+QCOM:IR3"] if not ASKED else []

@pytest.mark.skipif(not DEVICES, reason=f"DEV={ASKED} is not an Adreno")
@pytest.mark.parametrize("dev", DEVICES)
def test_800_replays_with_other_buffers_each_time_are_exact(dev: str, capfd: pytest.CaptureFixture[str]) -> None:
  if dev.startswith("MOCK") and importlib.util.find_spec("test.mockgpu.qcom") is None: pytest.skip("no test.mockgpu.qcom: not a source tree")
  target = pathlib.Path(os.environ.get("QCOM_RECORD") or "build/qcom-replay.json").absolute()
  if not (ASKED and "QCOM_RECORD" in os.environ): target = target.with_stem(f"{target.stem}-{dev.replace(':', '-')}")
  try: # before the work of a minute, not after it
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir(): raise IsADirectoryError(errno.EISDIR, "it is a folder")
    tempfile.TemporaryFile(dir=target.parent).close()
  except OSError as e: pytest.fail(f"the record {target} can't be written: {e.strerror}", pytrace=False)
  env = {**os.environ, "DEV": dev, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
  with capfd.disabled(): terminal = (os.dup(2),) if os.isatty(2) else ()
  if terminal: env["QCOM_PROGRESS_FD"] = str(terminal[0])
  before = target.stat().st_mtime_ns if target.exists() else 0
  done = subprocess.run([sys.executable, __file__, str(target)], env=env, capture_output=True, text=True, timeout=570, pass_fds=terminal)
  for fd in terminal:
    os.write(fd, b"\r\033[K")
    os.close(fd)
  written = target.exists() and target.stat().st_mtime_ns != before
  where = f"record: {target}" if written else f"no record was written, {target} is of an earlier run" if before else "no record was written"
  if done.returncode == NO_DEVICE:
    reason = next(line for line in done.stderr.splitlines() if line.startswith(NOTHING_RAN))
    if dev == "QCOM" and "QCOM_RECORD" not in os.environ: pytest.skip(reason)
    pytest.fail(f"{reason} ({where})", pytrace=False)
  if done.returncode: pytest.fail(f"{dev}: exit status {done.returncode}; {where}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}", pytrace=False)
  record = json.loads(target.read_text())
  assert record["ok"] and record["rung"] == ("virtual" if dev.startswith("MOCK") else "hardware")
  assert record["profiled"]["profiled_kernels"] == REPLAYS * record["profiled"]["kernels_per_replay"]
  print(where)

if __name__ == "__main__": sys.exit(run(sys.argv[1]))
