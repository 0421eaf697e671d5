"""The steps of the debug ladder (docs/debugging.md): each has the effect that it is there for, on both kernels' virtual GPU."""
from __future__ import annotations
import os, subprocess, sys
import numpy as np
import pytest
from test.qcom_open import virtual
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import Context
from tinygrad.runtime.support.qcom_iface import QCOMError

both = pytest.mark.parametrize("kind", ["MSM", "KGSL"])

def chain(n: int = 3) -> tuple[Tensor, np.ndarray]:
  """`n` kernels in a row, and what the last one gives."""
  x = np.arange(64, dtype=np.float32)
  t, want = Tensor(x).realize(), x
  for k in range(n): t, want = (t * 2 + k).contiguous(), want * 2 + k
  return t, want

@both
@pytest.mark.parametrize("steps,submits", [("", 1), ("single", 3), ("sync", 3), ("flush", 1), ("single,flush,poison,sync", 3)])
def test_kernels_per_submit_and_results(kind, steps, submits):
  with Context(QCOM_DEBUG=steps), virtual(kind) as (machine, dev):
    @TinyJit
    def step(x: Tensor) -> Tensor: return chain_of(x).realize()
    def chain_of(x: Tensor) -> Tensor:
      for k in range(3): x = (x * 2 + k).contiguous()
      return x
    for n in range(4):
      before, x = dev.queue.submits, np.arange(64, dtype=np.float32) + n
      got = step(Tensor(x).realize())
      assert dev.queue.submits - before == submits
      np.testing.assert_array_equal(got.numpy(), ((x * 2) * 2 + 1) * 2 + 2)
    assert not machine.gpu.reports
    assert dev.queue.nbos >= dev.queue.submits > 0 and dev.queue.nbytes > 64 * dev.queue.submits

@both
def test_sync_waits_for_each_kernel(kind):
  """A schedule that starts nothing until somebody waits: with sync nothing is in flight when realize() returns."""
  for steps in ("", "sync"):
    with Context(QCOM_DEBUG=steps), virtual(kind, schedule="late") as (_, dev):
      t, want = chain()
      t.realize()
      assert (not dev.inflight) == (steps == "sync")
      np.testing.assert_array_equal(t.numpy(), want)

@both
def test_sync_names_the_kernel_that_failed(kind):
  """The second of three kernels hangs: with sync the error comes from the call that launched it and names no other."""
  with Context(QCOM_DEBUG="sync"), virtual(kind, strict={"raise_to_waiter": False}) as (machine, _):
    names: list[str] = []
    def observe(p, _registers):
      names.append(p.kernel)
      if len(names) == 2: machine.gpu.kill(machine.gpu._current, "killed by the test")
    t, _ = chain()
    machine.gpu.observer = observe
    with pytest.raises(QCOMError, match="lost") as e: t.realize()
    machine.gpu.observer = None
    assert len(names) == 2 and names[1] in str(e.value)

@both
def test_flush_writes_results_back_between_kernels(kind):
  """What the first kernel wrote is in memory, not only in UCHE, when the second begins. Without the step it is not."""
  seen = {}
  for steps in ("", "flush"):
    with Context(QCOM_DEBUG=steps), virtual(kind) as (machine, dev):
      x = np.arange(1, 65, dtype=np.float32)
      a = (Tensor(x).realize() * 2).contiguous()
      b = (a + 1).contiguous()
      launches: list[list[bytes]] = []
      machine.gpu.observer = lambda p, _registers, launches=launches: launches.append(
        [s.mem.tobytes() for s in machine.gpu._current.space._segs])
      Tensor.realize(a, b)
      np.testing.assert_array_equal(b.numpy(), x * 2 + 1)
      machine.gpu.observer = None
      seen[steps] = any((x * 2).tobytes() in mem for mem in launches[1])
  assert seen == {"": False, "flush": True}

@both
def test_poison_is_in_memory_that_nobody_wrote(kind):
  for steps, fresh in (("", 0), ("poison", -1)):
    with Context(QCOM_DEBUG=steps), virtual(kind) as (_, dev):
      assert (Tensor.empty(1000, dtype=dtypes.int32).contiguous().realize().numpy() == fresh).all()
      old = Tensor(np.full(3000, 7, np.int32)).realize()
      del old                                     # goes to the allocator's cache and comes out of it
      again = Tensor.empty(3000, dtype=dtypes.int32).realize().numpy()
      assert (again == (-1 if steps else 7)).all()

def test_an_unknown_step_is_refused_by_name():
  with Context(QCOM_DEBUG="sync,flsh"), pytest.raises(RuntimeError, match="flsh is none of single, sync, flush, poison"):
    with virtual("MSM"): pass

SCRIPT = """
from tinygrad import Tensor, Device, dtypes
from tinygrad.runtime import ops_qcom
import numpy as np, struct
x = np.arange(256, dtype=np.float32).reshape(16, 16) % 7
a, b = Tensor(x).realize(), Tensor(x.astype(np.float16)).realize()
assert ((a @ a).numpy() == x @ x).all() and ((b + 1).numpy() == x.astype(np.float16) + 1).all()
images = [bytes(p.image) for p in ops_qcom.programs.values()]
words = [w for i in images for (w,) in struct.iter_unpack("<Q", i)]
print(sum(p.pvtmem for p in ops_qcom.programs.values()), sum(w >> 60 & 1 for w in words), len(words))
"""
def run(script: str, **env: str) -> str:
  env = {**os.environ, "DEV": "MOCKMSM+QCOM:IR3", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), **env}
  done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=240)
  assert done.returncode == 0, done.stderr
  return done.stdout

def test_options_of_mesas_compiler_reach_kernels_that_are_in_the_cache(tmp_path):
  """Compiled plainly, then with Mesa's debug options and the same cache: private memory in bytes, (sy) flags, instructions."""
  plain, spill, sync, nop = ([int(n) for n in run(SCRIPT, CACHEDB=str(tmp_path / "cache.db"), IR3_SHADER_DEBUG=o).splitlines()[-1].split()]
                             for o in ("", "spillall", "fullsync", "fullnop"))
  assert plain[0] == 0 and spill[0] > 0
  assert sync[1] > 2 * plain[1] and nop[2] > plain[2]

def test_counters_are_printed_at_debug_2():
  script = "from tinygrad import Tensor; print((Tensor([1, 2, 3]) + 1).tolist())"
  line = [t for t in run(script, DEBUG="2").splitlines() if " submits, " in t]
  assert len(line) == 1 and line[0].startswith("QCOM: 1 submits, ") and "bytes of commands" in line[0], line
  assert " submits, " not in run(script, DEBUG="0")
