"""Every way tinygrad runs kernels, on both kernels: right numbers, the expected number of submits, and times that are true.

A reference is numpy, never another run of the same device.
"""
from __future__ import annotations
import contextlib, gc, io, json, os, pickle, re, subprocess, sys, threading, time, warnings
import numpy as np
import pytest
from test.qcom_open import virtual
from tinygrad import Tensor, TinyJit, UOp, Variable
from tinygrad.device import Compiled, ProfileDeviceEvent, ProfileGraphEvent
from tinygrad.helpers import BEAM, Context, GlobalCounters, ProfilePointEvent, cpu_events
from tinygrad.runtime import ops_qcom
from tinygrad.runtime.support.qcom_iface import QCOMError

KINDS, KERNELS = ("MSM", "KGSL"), 4
@pytest.fixture(params=KINDS)
def kind(request): return request.param

def submits(machine, kind): return machine.msm.calls["GEM_SUBMIT"] if kind == "MSM" else machine.kgsl.calls["GPU_COMMAND"]

RNG = np.random.default_rng(3)
X = [RNG.integers(-50, 50, (17, 33)).astype(np.float32) for _ in range(5)]
W = RNG.integers(-50, 50, (33, 9)).astype(np.float32)

def net(x: Tensor, w: Tensor) -> Tensor:
  """KERNELS kernels: two reductions and two elementwise ones that must not be fused into them. Exact in float32."""
  return (((x @ w).contiguous() + 1).contiguous().max(axis=1, keepdim=True).contiguous() * 2 - (x @ w).contiguous()).contiguous()
def expected(x: np.ndarray) -> np.ndarray: return (x @ W + 1).max(axis=1, keepdims=True) * 2 - x @ W

# *** eager

@pytest.mark.parametrize("error", (ValueError("not modelled"), "instruction", ZeroDivisionError("bug"), MemoryError("no room")), ids=str)
def test_what_the_shader_core_refuses_is_an_error_of_the_call_and_not_of_the_next(kind, monkeypatch, error):
  from test.mockgpu.qcom.ir3.native import Engine, UnknownInstruction
  if error == "instruction": error = UnknownInstruction(3, 0xc4c6000008010001, "atomic.inc")
  def refuse(self, prog, d): raise error
  with virtual(kind, strict={"raise_to_waiter": False}) as (machine, dev):
    x = Tensor(X[0]).realize()
    monkeypatch.setattr(Engine, "run", refuse)
    with pytest.raises(QCOMError): (x + 1).numpy()
    assert any(str(error) in str(v) for v in machine.gpu.reports), "the report does not say why"
    machine.gpu.reports.clear()
    monkeypatch.undo()
    np.testing.assert_array_equal((x * 3).numpy(), X[0] * 3)

def test_eager(kind):
  with virtual(kind):
    w = Tensor(W).realize()
    for x in X: np.testing.assert_array_equal(net(Tensor(x), w).numpy(), expected(x))

def test_eager_again_compiles_and_allocates_nothing_new(kind):
  with virtual(kind) as (machine, dev):
    w, xs = Tensor(W).realize(), [Tensor(x).realize() for x in X]
    for x in xs[:2]: net(x, w).numpy()
    live, programs = len(dev.iface.live.starts), len(ops_qcom.programs)
    for x in xs[2:]: net(x, w).numpy()
    assert len(ops_qcom.programs) == programs
    assert len(dev.iface.live.starts) == live

def test_noopt(kind):
  with virtual(kind), Context(NOOPT=1): np.testing.assert_array_equal(net(Tensor(X[0]), Tensor(W)).numpy(), expected(X[0]))

@pytest.mark.parametrize("schedule", ["late", 1, 2])
def test_eager_and_replays_whatever_the_order_of_events(kind, schedule):
  with virtual(kind, schedule=schedule):
    w, f = Tensor(W).realize(), TinyJit(lambda x, w: net(x, w).realize())
    for i in range(6):
      x = X[i % 5]
      np.testing.assert_array_equal(net(Tensor(x), w).numpy(), expected(x))
      np.testing.assert_array_equal(f(Tensor(x).realize(), w).numpy(), expected(x))

# *** jit

@pytest.mark.parametrize("batch_size", [0, 1, 32])
def test_replays_of_every_batch_size(kind, batch_size):
  with virtual(kind) as (machine, _), Context(JIT_BATCH_SIZE=batch_size):
    w, f = Tensor(W).realize(), TinyJit(lambda x, w: net(x, w).realize())
    xs = [Tensor(x).realize() for x in X]
    for x in xs[:2]: f(x, w)
    captured, programs = f.captured.linear, len(ops_qcom.programs)
    for i in range(12):
      n, k = submits(machine, kind), GlobalCounters.kernel_count
      out = f(xs[i % 5], w)
      assert GlobalCounters.kernel_count - k == KERNELS
      assert submits(machine, kind) - n == len(captured.src) <= KERNELS
      np.testing.assert_array_equal(out.numpy(), expected(X[i % 5]))
    assert f.captured.linear is captured and len(ops_qcom.programs) == programs, "a replay is not a replay"

def test_jit_2_runs_captured_kernels(kind):
  with virtual(kind), Context(JIT=2):
    w, f = Tensor(W).realize(), TinyJit(lambda x, w: net(x, w).realize())
    for i in range(6): np.testing.assert_array_equal(f(Tensor(X[i % 5]).realize(), w).numpy(), expected(X[i % 5]))

def test_replays_in_flight_do_not_disturb_each_other(kind):
  """The same batch again and again without a wait: each run has its own inputs, and its result is read much later."""
  with virtual(kind, schedule="late"):
    f = TinyJit(lambda x: (x * 3 + 1).realize())
    xs = [Tensor(np.full((64,), i, np.float32)).realize() for i in range(20)]
    acc = Tensor(np.zeros(64, np.float32)).realize()
    add = TinyJit(lambda a, b: a.assign(a + b).realize())
    for i in range(20): add(acc, f(xs[i]).contiguous().realize()) if i < 2 else add(acc, f(xs[i]))
    np.testing.assert_array_equal(acc.numpy(), np.full(64, sum(3 * i + 1 for i in range(20))))

def test_a_copy_inside_a_capture(kind):
  with virtual(kind):
    f = TinyJit(lambda x: ((x + 1).contiguous().to("CPU").contiguous() * 2).contiguous().to("QCOM").realize())
    for i in range(5): np.testing.assert_array_equal(f(Tensor(X[i]).realize()).numpy(), (X[i] + 1) * 2)

def test_a_long_batch_is_split_for_the_display_and_still_right(kind, monkeypatch):
  monkeypatch.setattr(ops_qcom, "SUBMIT_BUDGET_MS", 1e-6)
  with virtual(kind) as (machine, _):
    w, f = Tensor(W).realize(), TinyJit(lambda x, w: net(x, w).realize())
    for x in X[:2]: f(Tensor(x).realize(), w)
    for x in X:
      n = submits(machine, kind)
      x_ = Tensor(x).realize()
      np.testing.assert_array_equal(f(x_, w).numpy(), expected(x))
      assert submits(machine, kind) - n == KERNELS

# *** symbolic variables

def test_symbolic_shapes_eager_and_replayed(kind):
  with virtual(kind):
    base = np.arange(200, dtype=np.float32).reshape(20, 10)
    t = Tensor(base).realize()
    f = TinyJit(lambda x: (x * 2 + 1).sum(axis=1).contiguous().realize())
    for jitted in (False, True):
      for n in (3, 20, 7, 1, 19, 4):
        v = Variable("n", 1, 20).bind(n)
        out = f(t[:v]) if jitted else (t[:v] * 2 + 1).sum(axis=1).contiguous().realize()
        got = out[:n].numpy() if jitted else out.reshape(v)[:n].numpy()
        np.testing.assert_array_equal(got, (base[:n] * 2 + 1).sum(axis=1), err_msg=f"{jitted=} {n=}")

def test_a_symbolic_offset_and_a_scalar_argument(kind):
  with virtual(kind):
    base = np.arange(300, dtype=np.float32)
    t = Tensor(base).realize()
    @TinyJit
    def f(x, v: UOp): return (x[v:v + 17] + v).contiguous().realize()
    for n in (0, 100, 3, 283, 64): np.testing.assert_array_equal(f(t, Variable("v", 0, 283).bind(n)).numpy(), base[n:n + 17] + n)

# *** search

def test_beam_times_candidates_on_the_device(kind):
  with virtual(kind) as (machine, _), Context(BEAM=1, PARALLEL=0, IGNORE_BEAM_CACHE=1, CACHELEVEL=0):
    n = submits(machine, kind)
    a, b = RNG.integers(-9, 9, (16, 16)).astype(np.float32), RNG.integers(-9, 9, (16, 16)).astype(np.float32)
    np.testing.assert_array_equal((Tensor(a) @ Tensor(b)).numpy(), a @ b)
    assert submits(machine, kind) - n > 4, "nothing was timed"
    assert BEAM.value == 1

def test_a_beam_search_leaves_nothing_allocated(kind):
  with virtual(kind) as (machine, dev), Context(PARALLEL=0, IGNORE_BEAM_CACHE=1, CACHELEVEL=0):
    def search(i):
      with Context(BEAM=1): (Tensor(np.ones((8, 8 + i), np.float32)) @ Tensor(np.ones((8 + i, 8), np.float32))).numpy()
    def live(): return sum(dev.iface.live.arr[i].end - dev.iface.live.arr[i].start for i in range(len(dev.iface.live.starts)))
    search(0)
    before = live()
    search(1)
    assert live() - before < 1 << 20

# *** times

def graph_events(): return [e for e in Compiled.profile_events if isinstance(e, ProfileGraphEvent)]

def entries(events):
  """(start, end) in us of every kernel, in the order of the events."""
  return [(float(e.sigs[x.st_id]), float(e.sigs[x.en_id])) for e in events for x in e.ents]

def check_times(spans, n):
  assert len(spans) == n
  for st, en in spans: assert en > st, "a kernel took no time"
  for (_, en), (st, _) in zip(spans, spans[1:]): assert st >= en, "kernels of one ring overlap or are out of order"

def test_profile_events_of_eager_kernels(kind):
  with virtual(kind) as (_, dev), Context(PROFILE=1):
    Compiled.profile_events.clear()
    w = Tensor(W).realize()
    out = net(Tensor(X[0]), w)
    np.testing.assert_array_equal(out.numpy(), expected(X[0]))
    check_times(entries(graph_events()), KERNELS)

def test_profile_events_of_replays_nobody_waited_for(kind):
  """10 replays without a wait in between: each one's kernels have times of their own."""
  with virtual(kind) as (machine, dev), Context(PROFILE=1):
    w, f = Tensor(W).realize(), TinyJit(lambda x, w: net(x, w).realize())
    xs = [Tensor(x).realize() for x in X]
    for x in xs[:3]: f(x, w)
    dev.synchronize()
    Compiled.profile_events.clear()
    t0 = machine.gpu.counter_ticks() / 19.2
    for i in range(10): out = f(xs[i % 5], w)
    dev.synchronize()
    t1 = machine.gpu.counter_ticks() / 19.2
    spans = entries(graph_events())
    check_times(spans, 10 * KERNELS)
    assert t0 <= spans[0][0] and spans[-1][1] <= t1, "times are not those of the counter"
    np.testing.assert_array_equal(out.numpy(), expected(X[4]))

def test_a_longer_kernel_takes_longer(kind):
  with virtual(kind) as (_, dev), Context(PROFILE=1, NOOPT=1):
    small, large = Tensor(np.ones((4, 4), np.float32)).realize(), Tensor(np.ones((128, 512), np.float32)).realize()
    for t in (small, large): t.sum(axis=1).realize()
    dev.synchronize()
    Compiled.profile_events.clear()
    for t in (small, large): t.sum(axis=1).realize()
    dev.synchronize()
    (a, b), (c, d) = entries(graph_events())
    assert d - c > b - a

def test_the_device_and_host_clocks_are_related(kind):
  """What the event says of the clocks' difference is within the error that it states. Both it and the interval measured here hold the true one."""
  with virtual(kind) as (machine, dev), Context(PROFILE=1):
    Compiled.profile_events.clear()
    begin = time.perf_counter_ns() / 1e3
    dev._at_profile_finalize()
    took = time.perf_counter_ns() / 1e3 - begin
    (e,) = [e for e in Compiled.profile_events if isinstance(e, ProfileDeviceEvent) and e.device == "QCOM"]
    before, ticks, after = time.perf_counter_ns() / 1e3, machine.gpu.counter_ticks(), time.perf_counter_ns() / 1e3
  error = float(e.props["tdiff_error_us"]) + 1 / 19.2
  assert before - ticks / 19.2 - error <= float(e.tdiff) <= after - ticks / 19.2 + error
  assert 0 < error < took, "no bound of ten can be wider than all ten together"

def test_each_kernel_of_a_replay_has_an_exec_event(kind):
  with virtual(kind) as (_, dev), Context(PROFILE=1):
    w, f = Tensor(W).realize(), TinyJit(lambda x, w: net(x, w).realize())
    for i in range(3): f(Tensor(X[i]).realize(), w)
    x = Tensor(X[0]).realize()
    n = len(cpu_events)
    f(x, w)
    dev.synchronize()
    found = [e for e in cpu_events[n:] if isinstance(e, ProfilePointEvent) and e.name == "exec" and e.device == "QCOM"]
    assert len(found) == KERNELS and all(e.arg["name"] for e in found)

def test_debug_2_prints_a_time_of_every_kernel(kind):
  with virtual(kind) as (machine, _), Context(DEBUG=2, NO_COLOR=1):
    w, f = Tensor(W).realize(), TinyJit(lambda x, w: net(x, w).realize())
    with contextlib.redirect_stdout(out:=io.StringIO()):
      for i in range(4): np.testing.assert_array_equal(f(Tensor(X[i]).realize(), w).numpy(), expected(X[i]))
    text = re.sub(r"\x1b\[\d+m", "", out.getvalue())
    lines = [l for l in text.splitlines() if l.startswith("*** QCOM") and "copy" not in l]
    assert len(lines) == 4 * KERNELS, text
    for l in lines:
      us = re.search(r"tm +([\d.]+)(us|ms|s)", l)
      assert us and float(us[1]) > 0, l

def test_debug_2_and_a_profile_tell_the_same_times(kind):
  with virtual(kind) as (_, dev), Context(PROFILE=1, DEBUG=2, NO_COLOR=1), contextlib.redirect_stdout(out:=io.StringIO()):
    w, f = Tensor(W).realize(), TinyJit(lambda x, w: net(x, w).realize())
    Compiled.profile_events.clear()
    for i in range(3): f(Tensor(X[i]).realize(), w)
    dev.synchronize()
    spans = entries(graph_events())
  lines = [l for l in re.sub(r"\x1b\[\d+m", "", out.getvalue()).splitlines() if l.startswith("*** QCOM") and "copy" not in l]
  check_times(spans, 3 * KERNELS)
  unit = {"us": 1, "ms": 1e3, "s": 1e6}
  for l, (st, en) in zip(lines, spans, strict=True):
    tm = re.search(r"tm +([\d.]+)(us|ms|s)/", l)
    assert tm and abs(float(tm[1]) - (en - st) / unit[tm[2]]) <= 0.006, (l, en - st) # two decimals are printed

def test_debug_2_ends_with_counters(kind):
  """Submits, and means over them of buffers and of bytes of commands, as the kernel's side has them."""
  jobs = []
  with virtual(kind) as (machine, dev):
    submit = machine.gpu.submit
    machine.gpu.submit = lambda job: (jobs.append(job), submit(job))
    w, f = Tensor(W).realize(), TinyJit(lambda x, w: net(x, w).realize())
    for i in range(5): f(Tensor(X[i]).realize(), w)
    (w + 1).realize()
    with Context(DEBUG=2), contextlib.redirect_stdout(out:=io.StringIO()): dev.finalize()
  said = re.search(r"QCOM: (\d+) submits, ([\d.]+) buffers and (\d+) bytes of commands in each, (\d+) batches linked", out.getvalue())
  assert said and int(said[1]) == len(jobs) == 6, out.getvalue()
  assert abs(int(said[3]) - sum(4 * dwords for job in jobs for _, dwords in job.ibs) / 6) <= 0.5
  assert int(said[4]) == 3 # an eager one, a captured one, w + 1
  if kind == "MSM": assert abs(float(said[2]) - sum(len(job.resident) for job in jobs) / 6) <= 0.05

def test_times_of_a_capture_from_a_file(kind):
  """It has timestamps if it was captured with them. Where they are asked for and missing, a warning says so, once."""
  with virtual(kind) as (_, dev):
    def loaded(profile):
      with Context(PROFILE=profile):
        f, w = TinyJit(lambda x, w: net(x, w).realize()), Tensor(W).realize()
        for i in range(3): f(Tensor(X[i]).realize(), w)
        return pickle.loads(pickle.dumps(f)), w
    for profile in (0, 1):
      (f, w), xs = loaded(profile), [Tensor(x).realize() for x in X]
      with Context(PROFILE=1), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Compiled.profile_events.clear()
        for i in range(3): np.testing.assert_array_equal(f(xs[i], w).numpy(), expected(X[i]))
        dev.synchronize()
        check_times(entries(graph_events()), 3 * KERNELS * profile)
      assert len([x for x in said if "captured without them" in str(x.message)]) == 1 - profile, said

# *** a process of its own, from start to exit

RUN = """
import numpy as np
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import cpu_profile
def two(x): return (x * 2).contiguous().sum().realize()
f, xs = TinyJit(two), [Tensor(np.full(5000, i, np.float32)).realize() for i in range(5)]
for i in range(5):
  with cpu_profile(f"replay {i}", "HOST"): print(f(xs[i]).item())
for i in range(3):
  with cpu_profile(f"launch {i}", "HOST"): print(two(xs[i]).item())
"""
# tinygrad's own reader of the files, in a process without a device
READ = """
import json, pathlib, sys
from tinygrad.viz import cli, serve
load = lambda name, default: serve.load_pickle(next(pathlib.Path(sys.argv[1]).glob(name), "none"), default=default)
events = load("profile.pkl*", None)
rewrites = load("rewrites.pkl*", serve.RewriteTrace([], [], {}))
serve.load_rewrites(data:=serve.VizData(rewrites))
rows = cli.decode_profile(serve.get_profile(data, events))["layout"]
error = next(float(e.props["tdiff_error_us"]) for e in events if type(e).__name__ == "ProfileDeviceEvent" and e.device == "QCOM")
print(json.dumps({"error": error, "rewrites": len(rewrites.rewrites),
                  **{k: [(e["name"], e["st"], e["dur"]) for e in rows[k]["events"]] for k in ("HOST", "QCOM", "QCOM:COPY")}}))
"""

@pytest.mark.parametrize("switch", ["PROFILE=1", "VIZ=-1"])
def test_the_timeline_of_a_whole_process(kind, switch, tmp_path):
  """As `python -m tinygrad.viz.cli` shows it: every launch has a bar, in order, no two overlap, inside of the host's call that it was made by."""
  paths = os.pathsep.join(p for p in sys.path if p)
  env = {**os.environ, "DEV": f"MOCK{kind}+QCOM:IR3", "TMPDIR": str(tmp_path), "PYTHONPATH": paths, **dict([switch.split("=")])}
  r = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True, timeout=300)
  assert r.returncode == 0 and not r.stderr, r.stderr
  assert [l for l in r.stdout.splitlines() if l[0].isdigit()] == [str(1e4 * i) for i in (0, 1, 2, 3, 4, 0, 1, 2)], r.stdout
  env = {k: v for k, v in env.items() if k not in ("PROFILE", "VIZ")} | {"DEV": "CPU"}
  r = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], env=env, capture_output=True, text=True, timeout=300)
  assert r.returncode == 0, r.stderr
  found = json.loads(r.stdout)
  assert (found["rewrites"] > 0) == (switch == "VIZ=-1")
  top = subprocess.run([sys.executable, "-m", "tinygrad.viz.cli", "-s", "QCOM", "-t"], env={**env, "NO_COLOR": "1"}, capture_output=True, text=True)
  counts = [re.search(r"s +(\d+) +[\d.]+%", l) for l in top.stdout.splitlines()]
  assert top.returncode == 0 and [c and c[1] for c in counts] == ["8", "8"], top.stdout + top.stderr
  bars, calls = found["QCOM"], found["HOST"]
  assert [name for name, _, _ in calls] == [*(f"replay {i}" for i in range(5)), *(f"launch {i}" for i in range(3))]
  assert len(bars) == 2 * len(calls) and len({name for name, _, _ in bars}) == 2, bars
  spare = found["error"] + 2 # starts are whole us there
  for i, (name, begin, took) in enumerate(calls):
    (_, a, first), (_, b, second) = bars[2*i:2*i+2]
    assert first > 0 and second > 0 and a + first <= b + 1, f"{name}: its kernels take no time, or overlap"
    assert begin - spare <= a and b + second <= begin + took + spare, f"{name}: [{a}, {b + second}] is not within [{begin}, {begin + took}]"
  outs = [st for name, st, _ in found["QCOM:COPY"] if "-> TINY" in name]
  assert len(outs) == len(calls) and all(st + spare >= b + t for st, (_, b, t) in zip(outs, bars[1::2])), "a result was read before it was there"

# *** life of a capture

def test_dropped_captures_give_their_memory_back(kind):
  with virtual(kind) as (_, dev):
    x = Tensor(np.ones(1 << 16, np.float32)).realize()
    def one(i):
      f = TinyJit(lambda x: (((x + i).contiguous() * 2).contiguous().sum() + 1).realize())
      for _ in range(3): assert f(x).item() == (1 + i) * 2 * (1 << 16) + 1
    def live():
      gc.collect()
      return sum(dev.iface.live.arr[i].end - dev.iface.live.arr[i].start for i in range(len(dev.iface.live.starts)))
    for i in range(2): one(i)
    before = live()
    for i in range(2, 6): one(i)
    assert live() - before <= 4 * 4096, "more than the code of the new kernels, which is kept"

def test_threads_that_replay_at_the_same_time(kind):
  """Submits from several threads are in some order, each with its own inputs and buffer list."""
  with virtual(kind):
    fs = [TinyJit(lambda x, k=k: (x * k + 1).contiguous().realize()) for k in range(4)]
    ins = [[Tensor(np.full(1000, 10 * k + j, np.float32)).realize() for j in range(5)] for k in range(4)]
    for k in range(4):
      for j in range(3): fs[k](ins[k][j])
    wrong: list[object] = []
    def work(k):
      try:
        for n in range(40):
          if not (fs[k](ins[k][n % 5]).numpy() == (10 * k + n % 5) * k + 1).all(): wrong.append((k, n))
      except BaseException as e: wrong.append(repr(e))
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not wrong

@pytest.mark.parametrize("schedule", ["forward", "reversed", 5])
def test_an_output_fed_back_is_the_next_input(kind, schedule):
  """Rings and in-place updates: what a capture overwrites is not what it reads, whatever order workgroups run in."""
  with virtual(kind, order=schedule):
    ring, x, ref = TinyJit(lambda x: (y:=x[3:].cat(x[:3]).contiguous().realize(), y[:1].contiguous().realize())), Tensor(X[0]).realize(), X[0]
    count, n = TinyJit(lambda s: s.assign(s * 2 + 1).realize()), Tensor(np.zeros(3000, np.float32)).realize()
    for step in range(7):
      x, first = ring(x)
      ref = np.roll(ref, -3, axis=0)
      np.testing.assert_array_equal(x.numpy(), ref)
      np.testing.assert_array_equal(first.numpy(), ref[:1])
      count(n)
      np.testing.assert_array_equal(n.numpy(), np.full(3000, 2.0 ** (step + 1) - 1, np.float32))

def test_a_submitter_on_another_device_is_refused():
  with Context(HCQ_RUNTIME_DEV="NULL"), pytest.raises(RuntimeError, match="HCQ_RUNTIME_DEV must be CPU"):
    with virtual("MSM"): pass
