"""The table of strictness checks is complete, and the runtime comes by every one of them and passes."""
from __future__ import annotations
import ast, pathlib
from dataclasses import fields
from typing import Any
import numpy as np
import pytest
from test.mockgpu.qcom import Config, GpuViolation
from test.mockgpu.qcom.report import REMEDY
from test.qcom_open import virtual
from test.virtual.dispatch_log import optimized
from test.virtual.ir3_asm import assemble
from test.virtual.rig import Rig, Stream
from test.virtual.strictness import BEHAVIOURS, CHECKS, Seen, table
from test.virtual.test_qcomcl import by_hand
from tinygrad import Tensor, TinyJit
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.device import Compiled, ProfileGraphEvent
from tinygrad.helpers import Context
from tinygrad.runtime.support.qcom_iface import QCOMError

HERE = pathlib.Path(__file__).resolve().parent
functions: dict[str, set[str]] = {}

def exists(name: str) -> bool:
  file, function = name.split("::")
  if file not in functions: functions[file] = {n.name for n in ast.parse((HERE / file).read_text()).body if isinstance(n, ast.FunctionDef)}
  return function in functions[file]

def test_every_kind_of_finding_is_a_check_of_the_table() -> None: assert CHECKS.keys() == REMEDY.keys()

def test_every_test_that_is_named_exists_and_speaks_of_its_check() -> None:
  for kind, c in CHECKS.items(): assert exists(c.fires) and f'"{kind}"' in (HERE / c.fires.split("::")[0]).read_text(), (kind, c.fires)
  for b in BEHAVIOURS:
    for name in (*b.fires, *b.passes): assert exists(name), name

def test_the_page_has_the_table_and_every_setting() -> None:
  page = HERE.parents[1] / "docs" / "virtual-adreno.md"
  if not page.is_file(): pytest.skip("docs/ is in the stack's own repository only")
  assert [f.name for f in fields(Config) if f.name != "clock" and f"`{f.name}`" not in page.read_text()] == []
  assert table() in page.read_text(), "put into the page what `PYTHONPATH=. python -m test.virtual.strictness` prints"

# *** the runtime

def workload(rng: np.random.Generator, image: bool) -> int:
  """Local and private memory, a long program, a divergent one, images, dependent kernels, inputs that the CPU rewrites. Returns how often."""
  def f32(*shape: int) -> np.ndarray: return rng.integers(-9, 9, shape).astype(np.float32)
  if image:
    x, k = f32(1, 16, 20, 20), f32(16, 16, 1, 1)
    np.testing.assert_allclose(Tensor(x).conv2d(Tensor(k)).relu().numpy(), np.maximum(np.einsum("nchw,oc->nohw", x, k[:, :, 0, 0]), 0), 1e-3)
    return 0
  a, b, u, v, y = f32(96, 64), f32(64, 80), f32(32, 8), f32(32, 8), f32(256)
  product = Tensor(a).realize() @ Tensor(b).realize()
  # GROUPTOP takes local memory, 256 accumulators a thread spill
  np.testing.assert_array_equal(optimized(product, Opt(OptOps.GROUPTOP, 0, 8), Opt(OptOps.LOCAL, 0, 16)).numpy(), a @ b)
  outer = (Tensor(u).realize().reshape(32, 1, 8) * Tensor(v).realize().reshape(1, 32, 8)).sum(2)
  np.testing.assert_array_equal(optimized(outer, Opt(OptOps.UPCAST, 0, 16), Opt(OptOps.UPCAST, 1, 16)).numpy(), u @ v.T)
  t, want = Tensor(y).realize(), y
  for n in range(60): t, want = t + (t * 3 + n).sin() * 0.02, want + np.sin(want * 3 + n) * 0.02
  np.testing.assert_allclose(t.numpy(), want, 1e-3, 1e-3)
  p = f32(5, 5)                                         # fibers of the padding take a branch that the others do not
  np.testing.assert_array_equal(Tensor(p).realize().pad(((1, 2), (0, 3))).contiguous().numpy(), np.pad(p, ((1, 2), (0, 3))))
  f = TinyJit(lambda x: (((x + 1).contiguous() * 3).contiguous() - 5).contiguous().max(axis=1).contiguous().realize())
  x = Tensor(f32(40, 32)).realize()
  for _ in range(6):
    new = f32(40, 32)
    x.assign(Tensor(new, device="CPU").to(x.device)).realize()
    np.testing.assert_array_equal(f(x).numpy(), ((new + 1) * 3 - 5).max(axis=1))
  return 6

@pytest.mark.parametrize("kind,order,schedule", [("MSM", "reversed", "late"), ("KGSL", 7, 3)])
def test_the_runtime_passes_every_check(kind: str, order: str | int, schedule: str | int) -> None:
  seen, rng = Seen(kind), np.random.default_rng(5)
  for image in (False, True):
    with Context(IMAGE=int(image), PARALLEL=0), virtual(kind, order=order, schedule=schedule) as (machine, _):
      def observe(p: Any, registers: dict[int, int]) -> None:
        d = p.dispatch
        for r, v in registers.items(): seen.registers.setdefault(r, set()).add(v)
        seen.loads |= {load.what for load in p.loads}
        seen.threads, seen.pvt_bytes = max(seen.threads, int(np.prod(d.local))), max(seen.pvt_bytes, d.pvt_bytes)
        seen.images, seen.per_submit = seen.images + len(d.textures), max(seen.per_submit, p.number)
      machine.gpu.observer = observe
      seen.rewritten += workload(rng, image)
      assert machine.gpu.idle(60) and not machine.gpu.reports, "\n".join(map(str, machine.gpu.reports))
      seen.counters += machine.gpu.counters
      seen.instructions |= set(machine.gpu.instructions())
      seen.opcodes |= {h >> 16 & 0x7f for h in machine.gpu.cp.headers if h >> 28 == 7}
  assert [k for k, c in CHECKS.items() if not c.met(seen)] == [], seen

# *** behaviours

@pytest.mark.parametrize("kind", ["MSM", "KGSL"])
def test_an_error_of_the_emulator_reaches_the_thread_that_waits(kind: str) -> None:
  """Its GPU thread never dies in silence: the runtime's next wait raises, and the device goes on."""
  with virtual(kind) as (machine, _):
    x = Tensor(np.arange(64, dtype=np.float32)).realize()
    np.testing.assert_array_equal((x + 1).numpy(), np.arange(64) + 1)
    with pytest.MonkeyPatch.context() as m:
      def broken(*args: Any) -> None: raise ZeroDivisionError("boom")
      m.setattr(machine.gpu.engine, "run", broken)
      with pytest.raises(GpuViolation, match="ZeroDivisionError: boom"): (x + 2).numpy()
    while True:                                         # what the lost submit left behind is told, too
      try: np.testing.assert_array_equal((x + 3).numpy(), np.arange(64) + 3)
      except QCOMError: continue
      break

@pytest.mark.parametrize("order,last", [("forward", 9), ("reversed", 0)])
def test_the_order_of_workgroups_shows_in_a_race(order: str, last: int) -> None:
  """Ten workgroups store their number to the same place: who is last depends on the order, which no check can call wrong."""
  rig = Rig(order=order)
  rig.gpu.engine.threads = 1
  k = by_hand(rig, assemble("mov.u32u32 r1.x, c0.x\nmov.u32u32 r1.y, c0.y\nmov.u32u32 r2.x, r48.x\n(rpt5)nop\nstg.u32 g[r1.x], r2.x, 1\nend"), 4, 192)
  out = rig.alloc(4096, "out")
  args = rig.alloc(4096, "args").put(np.array([out.iova], np.uint64))
  job = rig.run(rig.dispatch(Stream(), k, args, (10, 1, 1), (1, 1, 1)))
  assert not job.result.reports and out.u32() == last
  rig.close()

def test_half_a_timestamp_runs_backwards() -> None:
  """What a client sees that keeps 32 bits of the counter, where it carries."""
  rig = Rig(counter_start=1 << 31)
  ts = rig.alloc(4096, "timestamps")
  first = rig.run(Stream().timestamp(ts.iova))
  rig.gpu._counter_start += 1 << 31
  rig.run(Stream().timestamp(ts.iova + 8))
  a, b = ts.view(np.uint64, 2).tolist()
  assert not first.result.reports and a < 1 << 32 <= b and b & 0xffffffff < a
  rig.close()

@pytest.mark.parametrize("kind,bits", [("MSM", 32), ("KGSL", 32), ("MSM", 48), ("KGSL", 48)])
def test_times_are_true_where_the_counter_carries(kind: str, bits: int) -> None:
  """Profiled replays before, across and after a carry: each kernel takes a time that is positive and not absurd, and they are in order."""
  with virtual(kind) as (machine, dev), Context(PROFILE=1):
    f = TinyJit(lambda x: ((x + 1).contiguous() * 2).realize())
    x = Tensor(np.arange(256, dtype=np.float32)).realize()
    for _ in range(3): f(x)
    dev.synchronize()
    Compiled.profile_events.clear()
    machine.gpu._counter_start += (1 << bits) - machine.gpu.counter_ticks() - 3_000_000
    begin = machine.gpu.counter_ticks()
    while machine.gpu.counter_ticks() < (1 << bits) + 2_000_000:
      np.testing.assert_array_equal(f(x).numpy(), (np.arange(256) + 1) * 2)
    end = machine.gpu.counter_ticks()
    spans = [(float(e.sigs[k.st_id]), float(e.sigs[k.en_id])) for e in Compiled.profile_events if isinstance(e, ProfileGraphEvent) for k in e.ents]
  assert begin < 1 << bits < end and len(spans) >= 2
  assert all(begin / 19.2 <= st < en <= end / 19.2 for st, en in spans) and all(en <= st for (_, en), (st, _) in zip(spans, spans[1:]))
