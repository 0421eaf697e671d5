"""docs/failures.md shows messages as they are: each of its code lines is part of an error that is provoked here, but for the numbers of one run."""
from __future__ import annotations
import errno, os, pathlib
import numpy as np
import pytest
from test.mockgpu import qcom
from test.mockgpu.qcom.gpu import Strict
from test.qcom_open import opened, virtual
from test.virtual.fault_matrix import general
from tinygrad import Device, Tensor, TinyJit
from tinygrad.helpers import getenv
from tinygrad.runtime.support import qcom_iface

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/failures.md"

def text(call, *args) -> str:
  with pytest.raises((RuntimeError, MemoryError)) as e: call(*args)
  return str(e.value)

def opening(ifaces=None, **settings) -> str:
  qcom.configure(**settings)
  def attempt():
    with opened("QCOM:IR3" if ifaces else "MOCKMSM+QCOM:IR3", ifaces): pass
  return text(attempt)

def provoked(monkeypatch) -> list[str]:
  probed = [type(n, (b,), {}) for n, b in zip(("MSMIface", "KGSLIface"), qcom_iface.ifaces[2:])]
  found = [opening(probed, nodes=()), opening(denied=(qcom.MSM_NODE,)), opening(fail={"GET_PARAM": {1: errno.EACCES}}), opening(gpu=False)]
  monkeypatch.setenv("QCOM_PRIORITY", "16")
  getenv.cache_clear()
  found.append(opening())
  monkeypatch.delenv("QCOM_PRIORITY")
  getenv.cache_clear()
  def x(n=100): return Tensor(np.arange(n, dtype=np.float32)).realize()
  for settings in ({"va_size": 4 << 20}, {"memory": 4 << 20}):
    with virtual("MSM", **settings): found.append(text(lambda: [x(1 << 18) for _ in range(9)]))
  with virtual("MSM") as (machine, _):
    for call in ("GEM_NEW", "mmap"):
      machine.config.fail = {call: {range(1, 100): errno.ENOMEM}}
      found.append(text(x, 1 << 18))
    machine.config.fail = {}
  with virtual("MSM", strict=Strict(raise_to_waiter=False), schedule="late") as (machine, dev):
    a, f = x(), TinyJit(lambda y: (y * weight["w"]).realize())
    weight = {"w": x()}
    for _ in range(3): f(x())
    dev.synchronize()
    grace, poke, machine.gpu.grace_s = machine.gpu.grace_s, machine.gpu.poke, 20.0
    bad = (a + 1).realize()
    machine.gpu.kill(machine.gpu._queue[0][2])
    machine.gpu.grace_s = grace
    found += [text(bad.numpy), text(bad.numpy)]
    machine.config.fail = {"GEM_SUBMIT": {machine.msm.calls["GEM_SUBMIT"] + 1: errno.EINVAL}}
    found.append(text((a + 1).realize))
    machine.config.fail = {"WAIT_FENCE": {machine.msm.calls["WAIT_FENCE"] + 1: errno.EINVAL}}
    found.append(text((a + 1).numpy))
    y = x()
    weight["w"].uop.buffer.deallocate()
    found.append(text(f, y))
    machine.devcoredump = None # of the killed one: read since
    machine.gpu.poke, machine.gpu.grace_s, dev.wait_timeout_ms = lambda job=None: None, 20.0, 100.0
    found.append(text((a + 1).numpy))
    machine.gpu.poke, machine.gpu.grace_s = poke, grace
    machine.gpu.poke()
    r, w = os.pipe()
    if (pid:=os.fork()) == 0:
      try: dev.synchronize()
      except RuntimeError as e: os.write(w, str(e).encode())
      os._exit(0)
    os.waitpid(pid, 0)
    found.append(os.read(r, 4096).decode())
    os.close(r), os.close(w)
    Device["QCOM"].reopen()
    found.append(text(a.numpy))
    dev.iface.close()
    found.append(text(dev.synchronize))
  return found

@pytest.mark.skipif(not PAGE.is_file(), reason="no docs beside the tests")
def test_the_page_on_failures_shows_real_messages(monkeypatch):
  shown = [line[4:] for line in PAGE.read_text().splitlines() if line.startswith("    ")]
  real = [general(t) for t in provoked(monkeypatch)]
  missing = [line for line in shown if not any(general(line) in t for t in real)]
  assert not missing, "\n".join(["not a message of the runtime:", *missing, "messages are:", *real])
  assert len(shown) >= 16

@pytest.mark.skipif(not PAGE.is_file(), reason="no docs beside the tests")
@pytest.mark.parametrize("kind", ["MSM", "KGSL"])
@pytest.mark.parametrize("raises", [True, False])
def test_the_hang_to_try(kind, raises):
  code = PAGE.read_text().split("```python\n")[1].split("```")[0]
  with virtual(kind, strict=Strict(raise_to_waiter=raises)):
    x = Tensor(np.arange(3, dtype=np.float32)).realize()
    Device["QCOM"].synchronize()
    exec(code, {})
    bad = (x * 3).realize()
    if raises:
      with pytest.raises(qcom.GpuViolation, match="a hang to try"): bad.numpy()
    assert text(bad.numpy).startswith("QCOM lost 'submit 1 kernels: E_")
    np.testing.assert_array_equal((x * 3).numpy(), [0, 3, 6])
