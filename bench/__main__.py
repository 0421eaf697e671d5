"""`dev bench [--quick] [NAME ...]`: measured ratios, one JSON object a line on stdout, then a table with goals and verdicts.
--quick: one turn of each instead of many, to see that it works; its numbers say little.

replay   host cost of a replay, with and without waiting for it, against the unmodified tinygrad 0.14.0 driver; its ioctls and allocations
eager    host cost of a launch outside of captures
capture  captures, and the first kernel of a process
memory   what a captured kernel keeps, and GPU memory and BOs of the runtime's own
         In these four nothing is executed, the time inside the virtual kernel is not counted on either side, and processes of all drivers live side
         by side and take turns. Medians are compared; minima are in the JSON.
aligned  CPU kernels on aligned data against the unmodified tinygrad's, by both compilers: what the alignment fix costs
shader   lane-instructions a second of the virtual shader core on one thread
models   compilation, replays and reload of the pipeline of examples/drive.py; ONNX models of rapidocr-onnxruntime on the virtual device
demo     time and memory of `dev demo` with everything set up and compiled before
"""
from __future__ import annotations
import json, os, pathlib, statistics, subprocess, sys, tempfile, time
from collections.abc import Iterator
from typing import IO, Any, NamedTuple
from test.virtual.unmodified import environment
from tinygrad.helpers import trange

HERE = pathlib.Path(__file__).resolve().parent
COUNTS, OURS = (1, 30, 300), ("MSM", "KGSL")
GENERATIONS, TURNS, REPLAYS = 2, 8, 25
TAIL = "sync 30 1000" # in one go: the first replays of a turn find the caches as another process left them

class Line(NamedTuple):
  """One measured value. `goal`: (comparison, limit), None for a value that is only reported."""
  bench: str
  what: str
  value: float
  unit: str
  goal: tuple[str, float] | None = None
  detail: dict[str, Any] = {}

  @property
  def ok(self) -> bool | None:
    if self.goal is None: return None
    return self.value <= self.goal[1] if self.goal[0] == "<=" else self.value >= self.goal[1]
  def json(self) -> str:
    return json.dumps({"bench": self.bench, "what": self.what, "value": self.value, "unit": self.unit,
                       "goal": " ".join(map(str, self.goal)) if self.goal else None, "ok": self.ok, **self.detail})

def ours(iface: str, **settings: object) -> dict[str, str]:
  return {**os.environ, "DEV": f"MOCK{iface}+QCOM:IR3", "PARALLEL": "0", "QCOM_MOCK": json.dumps(settings)}

class Child:
  """A process of host.py, which measures when it is asked."""
  def __init__(self, env: dict[str, str], log: IO[str]):
    self.log = log
    self.process = subprocess.Popen([sys.executable, HERE / "host.py"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                    text=True)
    self.first: float = self.answer()["first"]
  def answer(self) -> Any:
    assert self.process.stdout is not None
    if line := self.process.stdout.readline(): return json.loads(line)
    self.log.seek(0)
    raise RuntimeError(f"host.py ended with status {self.process.wait()}:\n{self.log.read()[-2000:]}")
  def ask(self, name: str, *args: int) -> Any:
    assert self.process.stdin is not None
    print(json.dumps([name, *args]), file=self.process.stdin, flush=True)
    return self.answer()
  def close(self) -> None:
    if self.process.stdin is not None: self.process.stdin.close()
    try: self.process.wait(30)
    except subprocess.TimeoutExpired: self.process.kill()

Samples = dict[tuple[str, str], list[float]]
def rounds(names: set[str], children: dict[str, Child], turns: int) -> Iterator[tuple[str, str, list[float]]]:
  """(measurement, driver, values) of processes that live side by side and take turns: a busy machine is equally busy for each."""
  asks = {"replay": [f"queue {n}" for n in COUNTS] + [f"sync {n}" for n in COUNTS] + ["weights 5", "weights 500"], "eager": ["eager"]}
  for _ in trange(turns, desc="turns of the host benchmarks", disable=None):
    for what in (a for name, group in asks.items() if name in names for a in group):
      for d, child in children.items(): yield what, d, child.ask(what.split()[0], *map(int, what.split()[1:]), REPLAYS)
  once = {"replay": [f"ioctls {n}" for n in COUNTS] + ["submitter 5 100", "submitter 500 100", "objects 30", TAIL],
          "capture": ["capture 300 3"], "memory": ["memory 300 4"]}
  for what in (a for name, group in once.items() if name in names for a in group):
    for d, child in children.items():
      got = child.ask(what.split()[0], *map(int, what.split()[1:]))
      if isinstance(got, dict): yield from ((f"{what.split()[0]} {k}", d, [v]) for k, v in got.items())
      else: yield what, d, got if isinstance(got, list) else [got]

def host(names: set[str], quick: bool) -> Iterator[Line]:
  off, samples = {"execute": False, "schedule": "late"}, Samples()
  with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
    envs = {"unmodified": {**environment(pathlib.Path(folder)), "QCOM_MOCK": json.dumps(off)}, **{i: ours(i, **off) for i in OURS}}
    for _ in range(1 if quick else GENERATIONS):
      children: dict[str, Child] = {}
      try:
        for d, env in envs.items(): samples.setdefault(("first", d), []).append((children.setdefault(d, Child(env, log))).first * 1e9)
        for what, d, got in rounds(names, children, 1 if quick else TURNS): samples.setdefault((what, d), []).extend(got)
      finally:
        for child in children.values(): child.close()

  def against(bench: str, what: str, name: str, unit: str, scale: float, limit: float) -> Iterator[Line]:
    if not any(w == what for w, _ in samples): return
    for d in OURS:
      new, old = (statistics.median(samples[what, x]) / scale for x in (d, "unmodified"))
      low = min(samples[what, d]) / min(samples[what, "unmodified"])
      yield Line(bench, f"{d}, {name}", round(new / old, 3), "x", ("<=", limit),
                 {"ours": round(new, 2), "unmodified": round(old, 2), "in": unit, "ratio_of_minima": round(low, 3)})
  for n in COUNTS: yield from against("replay", f"queue {n}", f"replay of {n} kernel{'s' * (n > 1)}", "us", 1e3, 0.5)
  for n in COUNTS: yield from against("replay", f"sync {n}", f"replay and wait, {n} kernel{'s' * (n > 1)}", "us", 1e3, 0.6)
  if "replay" in names:
    for d in OURS:
      tail, old = (statistics.quantiles(samples[TAIL, x], n=100)[98] / 1e3 for x in (d, "unmodified"))
      yield Line("replay", f"{d}, replay and wait, 30 kernels, p99 against median", round(tail / statistics.median(samples[TAIL, d]) * 1e3, 2), "x",
                 ("<=", 2.0), {"ours": round(tail, 2), "unmodified": round(old, 2), "in": "us"})
      for more, less, limit, name in (("queue 300", "queue 1", 1.5, "300 kernels against 1"),
                                     ("weights 500", "weights 5", 1.1, "500 weights against 5")):
        ratio = statistics.median(samples[more, d]) / statistics.median(samples[less, d])
        yield Line("replay", f"{d}, replay, {name}", round(ratio, 3), "x", ("<=", limit))
      for n in (5, 500):
        yield Line("replay", f"{d}, C submitter alone, {n} weights", round(statistics.median(samples[f"submitter {n} 100", d]) / 1e3, 2), "us")
      for n in COUNTS:
        yield Line("replay", f"{d}, ioctls of a replay and wait, {n} kernel{'s' * (n > 1)}", max(samples[f"ioctls {n}", d]), "", ("<=", 2.0),
                   {"ours": max(samples[f"ioctls {n}", d]), "unmodified": max(samples[f"ioctls {n}", "unmodified"]), "in": "ioctls"})
  yield from against("replay", "objects 30", "blocks allocated by Python in a replay of 30", "", 1, 0.5)
  yield from against("eager", "eager", "eager launch", "us", 1e3, 0.8)
  yield from against("capture", "capture 300 3", "capture of 300 kernels, compiled before", "s", 1e9, 1.0)
  if "capture" in names: yield from against("capture", "first", "first kernel of a process", "s", 1e9, 1.0)
  yield from against("memory", "memory host", "host memory kept for a captured kernel", "bytes", 1, 1.0)
  yield from against("memory", "memory gpu", "GPU memory kept for a captured kernel", "bytes", 1, 1.0)

def child(name: str, env: dict[str, str], *args: str) -> dict:
  done = subprocess.run([sys.executable, HERE / name, *args], env=env, capture_output=True, text=True)
  if done.returncode: raise RuntimeError(f"{name} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
  return json.loads(done.stdout) # type: ignore[no-any-return]

def shader() -> Iterator[Line]:
  results = {}
  for strict in (None, "off"):
    for image in ("0", "1"): results[strict] = {**results.get(strict, {}), **child("shader.py", {**ours("MSM", strict=strict), "IMAGE": image})}
  for name, r in results[None].items():
    goal = {"matmul 512": 200.0, "conv 3x3": 200.0}.get(name)
    best, cpu, loose = min(r["seconds"]), min(r["cpu"]), min(results["off"][name]["seconds"])
    yield Line("shader", f"{name}, one thread", round(r["lanes"] / best / 1e6, 1), "M lane-instr/s", (">=", goal) if goal else None,
               {"median": round(r["lanes"] / statistics.median(r["seconds"]) / 1e6, 1), "lane_instructions": r["lanes"]})
    yield Line("shader", f"{name}, against DEV=CPU, one thread each", round(best / cpu, 2), "x", ("<=", 8.0) if goal else None,
               {"ours": round(best * 1e3, 1), "unmodified": round(cpu * 1e3, 2), "in": "ms", "other": "DEV=CPU"})
    yield Line("shader", f"{name}, {os.cpu_count()} threads against one", round(min(r["wall"][str(os.cpu_count())]) / min(r["wall"]["1"]), 2), "x",
               ("<=", 1.2 / (os.cpu_count() or 1)) if goal else None)
    yield Line("shader", f"{name}, checks on against off", round(best / loose, 2), "x", ("<=", 2.5))
  translations = [t for r in results[None].values() for t in r["translate"]]
  worst = max(translations, key=lambda t: t[0])
  yield Line("shader", f"translation of the slowest of {len(translations)} programs", round(worst[0] * 1e3, 1), "ms", ("<=", 30.0),
             {"instructions": worst[1]})

def memory() -> Iterator[Line]:
  r = child("memory.py", ours("MSM"))
  yield Line("memory", "GPU memory beyond tensors and private memory", round(r["own"] / 2**20, 2), "MiB", ("<=", 8.0), r)
  yield Line("memory", "BOs of the runtime's own in a submit", r["own_bos"], "", ("<=", 4))

def models() -> Iterator[Line]:
  with tempfile.TemporaryDirectory() as folder:
    pickled, off = f"{folder}/pipeline.pkl", {"QCOM_MOCK": json.dumps({"execute": False, "schedule": "late"})}
    envs = {"unmodified": environment(pathlib.Path(folder, "unmodified")), "KGSL": ours("KGSL"), "MSM": ours("MSM")}
    got: dict[str, list[dict]] = {d: [] for d in envs}
    for n in range(2):
      for d, env in envs.items():
        caches = {"XDG_CACHE_HOME": f"{folder}/{d}{n}"}
        got[d].append(child("models.py", {**env, **off, **caches}, "compile", *([pickled] if d == "MSM" else [])))
    low = {d: (min(r["compile"] for r in rs), statistics.median(t for r in rs for t in r["replays"])) for d, rs in got.items()}
    for d in OURS:
      for i, (what, limit, scale, unit) in enumerate((("compilation", 1.5, 1, "s"), ("enqueue of a replay", 1.0, 1e-3, "us"))):
        yield Line("models", f"{d}, {what} of the pipeline", round(low[d][i] / low["unmodified"][i], 3), "x", ("<=", limit),
                   {"ours": round(low[d][i] * scale, 2), "unmodified": round(low["unmodified"][i] * scale, 2), "in": unit})
    loads = [child("models.py", envs["MSM"], "load", pickled) for _ in range(2)]    # the second has the shader core's translations
    yield Line("models", "MSM, reload and first replay of the pipeline", round(loads[1]["load"] + loads[1]["first"], 2), "s", ("<=", 2.0), loads[1])
    where = pathlib.Path(sys.prefix).glob("lib/python3*/site-packages/rapidocr_onnxruntime/models/*.onnx")
    files, examples = {p.name: p for p in where}, HERE.parent / "examples"
    for name, file, shape, limit in (("direction classifier 48x192", "ch_ppocr_mobile_v2.0_cls_infer.onnx", "1,3,48,192", 2.0),
                                     ("detection 320x320", "ch_PP-OCRv4_det_infer.onnx", "1,3,320,320", 60.0)):
      for script in ([examples / "compile_model.py", files[file], f"{folder}/m.pkl", "--shape", f"x={shape}", "--runs", "1"],
                     [examples / "run_model.py", f"{folder}/m.pkl", "--runs", "2", "--json", f"{folder}/m.json"]):
        done = subprocess.run([sys.executable, *script], env=envs["MSM"], capture_output=True, text=True)
        if done.returncode: raise RuntimeError(f"{script[0].name} of {file} ended with status {done.returncode}:\n{done.stdout[-500:]}")
      numbers = json.loads(pathlib.Path(folder, "m.json").read_text())
      yield Line("models", f"MSM, {name}, a replay on the virtual device", round(numbers["replay_ms"] / 1e3, 2), "s", ("<=", limit), numbers)

def demo() -> Iterator[Line]:
  for _ in range(2):                                    # the second is the one that counts
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
      process = subprocess.Popen([sys.executable, HERE.parent / "dev", "demo"], stdout=out, stderr=subprocess.STDOUT)
      _, status, usage = os.wait4(process.pid, 0)
      process.returncode = os.waitstatus_to_exitcode(status)
      out.seek(0)
      if process.returncode: raise RuntimeError(f"dev demo ended with status {process.returncode}:\n{out.read()[-2000:]}")
  yield Line("demo", "dev demo, second run", round(time.perf_counter() - start, 1), "s", ("<=", 60.0),
             {"cpu_s": round(usage.ru_utime + usage.ru_stime, 1)})
  yield Line("demo", "resident memory of dev demo", round(usage.ru_maxrss / 1024), "MiB", ("<=", 2048.0))

def alignment() -> Iterator[Line]:
  from aligned import ratios, summary
  with tempfile.TemporaryDirectory() as folder:
    for dev, kernels in ratios(environment(pathlib.Path(folder)), dict(os.environ)):
      middle, slowest = summary(kernels)
      yield Line("aligned", f"{dev}: time of {len(kernels)} kernels, median", middle, "x", ("<=", 1.02), {"kernels": kernels})
      yield Line("aligned", f"{dev}: the slowest, {slowest}", kernels[slowest], "x")

BENCHES = ("replay", "eager", "capture", "memory", "aligned", "shader", "models", "demo")

def measure(names: set[str], quick: bool) -> Iterator[Line]:
  if names & {"replay", "eager", "capture", "memory"}: yield from host(names, quick)
  for name, fn in (("aligned", alignment), ("shader", shader), ("memory", memory), ("models", models), ("demo", demo)):
    if name not in names: continue
    if sys.stderr.isatty(): print(f"{name} ...", file=sys.stderr)
    yield from fn()

def main(args: list[str]) -> int:
  quick, args = "--quick" in args, [a for a in args if a != "--quick"]
  if unknown := [a for a in args if a not in BENCHES]:
    print(f"dev bench: no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHES)}", file=sys.stderr)
    return 2
  lines = []
  try:
    for line in measure(set(args or BENCHES), quick):
      lines.append(line)
      print(line.json(), flush=True)
  except RuntimeError as e:
    print(f"dev bench: {e}", file=sys.stderr)
    return 1
  width = max(len(x.what) for x in lines)
  print(f"\n{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; virtual Adreno 630, nothing here was measured on hardware")
  for x in lines:
    verdict = {True: "ok", False: "MISSED", None: ""}[x.ok]
    other = x.detail.get("other", "unmodified")
    more = f"{x.detail['ours']:g} {x.detail['in']}, {other} {x.detail['unmodified']:g}" if "unmodified" in x.detail else \
           f"{x.detail['cpu_s']} s of CPU" if "cpu_s" in x.detail else ""
    goal = f"{x.goal[0]} {x.goal[1]:g}" if x.goal else ""
    print(f"  {x.bench:<8} {x.what:<{width}} {x.value:>9g} {x.unit:<22} {goal:<8} {verdict:<7} {more}".rstrip())
  return 0

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
