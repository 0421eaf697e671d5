"""Processes and signals: fork and spawn, several clients, Ctrl-C during a wait, and exits at any point.

The virtual machine is one per process: processes that share one kernel are not tested here. Two clients of one kernel, and processes beside each
other, are.
"""
from __future__ import annotations
import multiprocessing, os, re, signal, subprocess, sys, textwrap, threading, time
import numpy as np
import pytest
from test.qcom_open import virtual
from test.mockgpu import qcom
from test.mockgpu.qcom.gpu import Strict
from tinygrad import Tensor, TinyJit
from tinygrad.runtime.support.qcom_iface import ifaces

@pytest.fixture(params=("MSM", "KGSL"))
def kind(request): return request.param
def host(n): return np.arange(200, dtype=np.float32) + n

def script(kind, code, **env):
  return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={
    **os.environ, "DEV": f"MOCK{kind}+QCOM:IR3", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **env})

@pytest.mark.parametrize("when", ["waiting", "replaying"])
def test_ctrl_c_leaves_a_usable_device(kind, when):
  with virtual(kind, schedule="late", strict=Strict(raise_to_waiter=False)) as (machine, dev):
    f, xs = TinyJit(lambda x: (x * 2 + 1).contiguous().realize()), [Tensor(host(i)).realize() for i in range(3)]
    for x in xs: f(x)
    dev.synchronize()
    real = machine.gpu._execute
    def slow(job):
      time.sleep(0.02 if when == "replaying" else 0.4)
      real(job)
    machine.gpu._execute = slow
    for n in range(6):
      timer = threading.Timer(0.1 + 0.013 * n, os.kill, (os.getpid(), signal.SIGINT))
      timer.start()
      with pytest.raises(KeyboardInterrupt):
        while True: f(xs[n % 3]).numpy()
      timer.join()
    machine.gpu._execute = real
    for i in range(3): np.testing.assert_array_equal(f(xs[i]).numpy(), host(i) * 2 + 1)
    np.testing.assert_array_equal((Tensor(host(9)) * 3).numpy(), host(9) * 3)

def child(conn, kind):
  os.environ["DEV"] = f"MOCK{kind}+QCOM:IR3"
  from tinygrad.helpers import DEV
  DEV.value = f"MOCK{kind}+QCOM:IR3"
  conn.send((Tensor(host(4)) * 3).tolist())

def test_a_spawned_process_has_a_device_of_its_own(kind):
  with virtual(kind):
    x = Tensor(host(1)).realize()
    here, there = multiprocessing.Pipe()
    p = multiprocessing.get_context("spawn").Process(target=child, args=(there, kind))
    p.start()
    assert here.poll(240)
    assert here.recv() == (host(4) * 3).tolist()
    p.join(60)
    assert p.exitcode == 0
    np.testing.assert_array_equal((x + 1).numpy(), host(1) + 1)

def test_compile_workers_do_not_touch_the_device(kind):
  p = script(kind, """
    from tinygrad import Tensor, Device
    from tinygrad.helpers import Context
    x = Tensor.arange(100).contiguous().realize()
    outs = [(x + 1).sum(), (x * 2).max(), (x.float().exp().log() + 3).sum().cast("int")]
    Tensor.realize(*outs)
    print([o.item() for o in outs])""", PARALLEL="2", CACHELEVEL="0")
  out, err = p.communicate(timeout=240)
  assert p.returncode == 0 and not err, err
  assert out.strip().startswith("[5050, 198,"), out

def test_two_clients_of_one_kernel_do_not_see_each_other(kind):
  """A second open of the node, with memory and work of its own, beside the device; it goes away in the middle, as killed."""
  with virtual(kind) as (machine, dev):
    f, xs = TinyJit(lambda x: (x + 5).realize()), [Tensor(host(i)).realize() for i in range(3)]
    for x in xs: f(x)
    model = machine.msm if kind == "MSM" else machine.kgsl
    before = model.live()
    other = next(i for i in ifaces if i.__name__ == f"MOCK{kind}Iface")(type("Dev", (), {"device": "other"})(), 0)
    bufs = [other.alloc(1 << 16) for _ in range(3)]
    bufs[0].cpu_view()[:4] = b"abcd"
    for i in range(3): np.testing.assert_array_equal(f(xs[i]).numpy(), host(i) + 5)
    assert bytes(bufs[0].cpu_view()[:4]) == b"abcd" and model.live()["clients"] == 2
    for buf in bufs if kind == "KGSL" else (): other.free(buf) # there memory is a process's, not an open file's
    other.close()
    machine.gpu.idle(10)
    assert {k: v for k, v in model.live().items() if k not in ("fences", "pending")} == \
           {k: v for k, v in before.items() if k not in ("fences", "pending")}
    for i in range(3): np.testing.assert_array_equal(f(xs[i]).numpy(), host(i) + 5)

FAILING = "{k: {range(1, 10**6): 22} for k in ('WAIT_FENCE', 'DEVICE_WAITTIMESTAMP_CTXTID')}"
KEEPING = "{k: {range(1, 10**6): 22} for k in ('GEM_CLOSE', 'GPUOBJ_FREE')}"
MACHINE = "from test.mockgpu import qcom; m = qcom.current()"
EXITS = {"normally, with work in flight": "f(x)", "by sys.exit": "f(x); import sys; sys.exit(3)", "by an exception": "f(x); raise ValueError('mine')",
         "by os._exit": "f(x); import os; os._exit(4)", "before the first kernel": "pass",
         "while a thread replays": "import threading; threading.Thread(target=lambda: [f(x) for _ in range(300)]).start()",
         "after an error nobody waited for": f"{MACHINE}; m.config.fail = {FAILING}; f(x)",
         "after a release that failed": f"{MACHINE}; y = Tensor([1.] * 70000).realize(); m.config.fail = {KEEPING}; f(x); del y"}

@pytest.mark.parametrize("how", EXITS)
def test_an_exit_at_any_point_says_nothing_misleading(how):
  kind = "MSM" if len(how) % 2 else "KGSL"
  p = script(kind, f"""
    from tinygrad import Tensor, TinyJit, Device
    x = Tensor([1., 2., 3.]).realize()
    f = TinyJit(lambda x: (x * 2).realize())
    if {how != 'before the first kernel'}:
      for _ in range(3): f(x)
      Device.default.synchronize()
    {EXITS[how]}""", **{"LRU": "0"} if "release" in how else {})
  out, err = p.communicate(timeout=240)
  code = {"by sys.exit": 3, "by an exception": 1, "by os._exit": 4}.get(how, 0)
  assert p.returncode == code, (p.returncode, err)
  if how == "by an exception": assert re.findall(r"^\w*Error.*", err, re.M) == ["ValueError: mine"], err
  else: assert not err, err
  told = {"nobody waited": "had read is right.*EINVAL", "release": "results are right.*EINVAL while freeing 282624 bytes"}
  if expected:=[t for k, t in told.items() if k in how]:
    assert len(out.splitlines()) == 1 and re.search(expected[0], out) and "Do:" in out and "reopen" not in out, out
  else: assert not out, out

def test_kill_9_of_one_process_does_not_disturb_another(kind):
  with virtual(kind):
    f, xs = TinyJit(lambda x: (x + 5).realize()), [Tensor(host(i)).realize() for i in range(3)]
    p = script(kind, """
      from tinygrad import Tensor, TinyJit
      f, x = TinyJit(lambda x: (x + 1).realize()), Tensor([1., 2.]).realize()
      for _ in range(3): f(x)
      print("up", flush=True)
      while True: f(x)""")
    assert p.stdout.readline().strip() == "up"
    for i in range(6): np.testing.assert_array_equal(f(xs[i % 3]).numpy(), host(i % 3) + 5)
    p.kill()
    p.communicate(timeout=60)
    assert p.returncode == -signal.SIGKILL
    for i in range(6): np.testing.assert_array_equal(f(xs[i % 3]).numpy(), host(i % 3) + 5)
    assert qcom.current().gpu.reports == []
