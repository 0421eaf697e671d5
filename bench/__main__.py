"""`dev bench [NAME ...]`: measured ratios, one JSON object a line on stdout, then a table with goals and verdicts.

replay   host cost of one replay, without waiting for it, against the unmodified tinygrad 0.14.0 driver; execution is off, and the time inside the
         virtual kernel is not counted on either side. Processes of all drivers live side by side and take turns, so that a busy machine is equally
         busy for each; minima are compared, medians are shown.
capture  the first kernel of a process and captures, same processes
shader   lane-instructions a second of the virtual shader core on one thread
memory   GPU memory and BOs of the runtime's own
demo     time and memory of `dev demo` with everything set up and compiled before
"""
from __future__ import annotations
import json, os, pathlib, statistics, subprocess, sys, tempfile, time
from collections.abc import Iterator
from typing import IO, NamedTuple
from test.virtual.unmodified import environment

HERE = pathlib.Path(__file__).resolve().parent
COUNTS, OURS = (1, 30, 300), ("MSM", "KGSL")
GENERATIONS, TURNS, REPLAYS = 2, 12, 25

class Line(NamedTuple):
  """One measured value. `goal`: (comparison, limit), None for a value that is only reported."""
  bench: str
  what: str
  value: float
  unit: str
  goal: tuple[str, float] | None = None
  detail: dict[str, float] = {}

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
  """A process of replay.py, which measures when it is asked."""
  def __init__(self, env: dict[str, str], log: IO[str]):
    self.log = log
    self.process = subprocess.Popen([sys.executable, HERE / "replay.py"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                    text=True)
    self.start = self.answer()
  def answer(self) -> dict:
    assert self.process.stdout is not None
    if line := self.process.stdout.readline(): return json.loads(line) # type: ignore[no-any-return]
    self.log.seek(0)
    raise RuntimeError(f"replay.py ended with status {self.process.wait()}:\n{self.log.read()[-2000:]}")
  def replay(self, kernels: int) -> list[int]:
    assert self.process.stdin is not None
    print(kernels, REPLAYS, file=self.process.stdin, flush=True)
    return self.answer() # type: ignore[return-value]
  def close(self) -> None:
    if self.process.stdin is not None: self.process.stdin.close()
    try: self.process.wait(30)
    except subprocess.TimeoutExpired: self.process.kill()

def replays(names: set[str]) -> Iterator[Line]:
  off = {"execute": False, "schedule": "late"}
  with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
    envs = {"unmodified": {**environment(pathlib.Path(folder)), "QCOM_MOCK": json.dumps(off)}, **{i: ours(i, **off) for i in OURS}}
    times = {(d, n): list[int]() for d in envs for n in COUNTS}
    starts: dict[str, list[dict]] = {d: [] for d in envs}
    for _ in range(GENERATIONS):
      children: dict[str, Child] = {}
      try:
        for d, env in envs.items(): starts[d].append((children.setdefault(d, Child(env, log))).start)
        for _ in range(TURNS if "replay" in names else 0):
          for n in COUNTS:
            for d, child in children.items(): times[d, n] += child.replay(n)
      finally:
        for child in children.values(): child.close()
  if "replay" in names:
    low = {k: min(v) / 1e3 for k, v in times.items()}
    mid = {k: statistics.median(v) / 1e3 for k, v in times.items()}
    for d in OURS:
      for n in COUNTS:
        old, new = ("unmodified", n), (d, n)
        yield Line("replay", f"{d}, {n} kernel{'s' * (n > 1)}, against unmodified", round(low[new] / low[old], 3), "", ("<=", 1.0),
                   {"us": round(low[new], 1), "us_median": round(mid[new], 1), "us_unmodified": round(low[old], 1),
                    "us_unmodified_median": round(mid[old], 1), "ratio_of_medians": round(mid[new] / mid[old], 3)})
      yield Line("replay", f"{d}, 300 kernels against 1", round(low[d, 300] / low[d, 1], 3), "", ("<=", 2.0))
  if "capture" in names:
    for d in OURS:
      for what, pick in (("first kernel of a process", lambda s: s["first"]), ("capture of 300 kernels", lambda s: s["captures"]["300"])):
        new, old = (min(map(pick, starts[x])) for x in (d, "unmodified"))
        yield Line("capture", f"{d}, {what}", round(new, 3), "s", None, {"s_unmodified": round(old, 3)})

def child(name: str, env: dict[str, str]) -> dict:
  done = subprocess.run([sys.executable, HERE / name], env=env, capture_output=True, text=True)
  if done.returncode: raise RuntimeError(f"{name} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
  return json.loads(done.stdout) # type: ignore[no-any-return]

def shader() -> Iterator[Line]:
  for name, r in child("shader.py", ours("MSM")).items():
    rates = sorted(r["lanes"] / s / 1e6 for s in r["seconds"])
    yield Line("shader", f"{name}, float32, one thread", round(rates[-1], 1), "M lane-instructions/s", (">=", 50.0) if name == "matmul 256" else None,
               {"median": round(statistics.median(rates), 1), "lane_instructions": r["lanes"]})

def memory() -> Iterator[Line]:
  r = child("memory.py", ours("MSM"))
  yield Line("memory", "GPU memory beyond tensors and private memory", round(r["own"] / 2**20, 2), "MiB", ("<=", 8.0), r)
  yield Line("memory", "BOs of the runtime's own in a submit", r["own_bos"], "", ("<=", 4))

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

BENCHES = ("replay", "capture", "shader", "memory", "demo")

def measure(names: set[str]) -> Iterator[Line]:
  if names & {"replay", "capture"}: yield from replays(names)
  for fn in (shader, memory, demo):
    if fn.__name__ in names: yield from fn()

def main(args: list[str]) -> int:
  if unknown := [a for a in args if a not in BENCHES]:
    print(f"dev bench: no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHES)}", file=sys.stderr)
    return 2
  lines = []
  try:
    for line in measure(set(args or BENCHES)):
      lines.append(line)
      print(line.json(), flush=True)
  except RuntimeError as e:
    print(f"dev bench: {e}", file=sys.stderr)
    return 1
  width = max(len(x.what) for x in lines)
  print(f"\n{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; virtual Adreno 630, nothing here was measured on hardware")
  for x in lines:
    verdict = {True: "ok", False: "MISSED", None: ""}[x.ok]
    more = f"{x.detail['us']:.0f} µs, unmodified {x.detail['us_unmodified']:.0f} µs" if "us" in x.detail else \
           f"unmodified {x.detail['s_unmodified']} s" if "s_unmodified" in x.detail else \
           f"{x.detail['cpu_s']} s of CPU" if "cpu_s" in x.detail else ""
    goal = f"{x.goal[0]} {x.goal[1]:g}" if x.goal else ""
    print(f"  {x.bench:<8} {x.what:<{width}} {x.value:>9g} {x.unit:<22} {goal:<8} {verdict:<7} {more}".rstrip())
  return 0

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
