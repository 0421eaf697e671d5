"""A GPU that gets stuck, faults or refuses its stream: the wait ends, the error has the facts, nothing wrong is returned, and work goes on."""
from __future__ import annotations
import re
import numpy as np
import pytest
from test.qcom_open import virtual
from test.mockgpu import qcom
from test.mockgpu.qcom.gpu import Strict
from test.virtual.ir3_asm import assemble
from tinygrad import Device, Tensor, TinyJit
from tinygrad.runtime import ops_qcom
from tinygrad.runtime.autogen import mesa
from tinygrad.runtime.support.qcom_iface import QCOMError

QUIET = Strict(raise_to_waiter=False)                         # what a real kernel tells a client
N = 100
@pytest.fixture(params=("MSM", "KGSL"))
def kind(request): return request.param

def host(n): return np.arange(N, dtype=np.float32) + n
works_n = 0
def works():
  global works_n
  works_n += 1
  np.testing.assert_array_equal((Tensor(host(works_n)) * 3 + works_n).numpy(), host(works_n) * 3 + works_n)

# *** the troubles: each makes kernels launched inside it go wrong

def endless_shader(m):
  """Machine code that jumps to itself, written by Mesa's assembler."""
  loop = assemble("jump #0\nend\n")
  parse = ops_qcom.QCOMProgram._parse_ir3
  def parsed(self, lib):
    parse(self, lib)
    self.image = loop + bytes(-len(loop) % 128) + self.image[len(loop) + -len(loop) % 128:]
  m.setattr(ops_qcom.QCOMProgram, "_parse_ir3", parsed)

def missing_signal(m):
  """The command processor waits for a value that nobody writes, as after a lost signal of another queue."""
  begin = ops_qcom.Encoder.begin
  def begun(self):
    begin(self)
    self.ib.cmd(mesa.CP_WAIT_REG_MEM, 0x13, ops_qcom.Addr(None, 0), 0x1234, 0xffffffff, 32)
  m.setattr(ops_qcom.Encoder, "begin", begun)

def bad_packet(m):
  """A header with a wrong parity bit."""
  begin = ops_qcom.Encoder.begin
  def begun(self):
    begin(self)
    self.ib.q(ops_qcom.pkt7_hdr(mesa.CP_NOP, 1) ^ 1 << 15, 0)
  m.setattr(ops_qcom.Encoder, "begin", begun)

TROUBLES = (endless_shader, missing_signal, bad_packet)

def brief(machine):
  """A kernel's hang detection takes 1.3 to 3.3 s; here it takes as much work as a test can afford."""
  machine.gpu.budget, machine.gpu.hang_wait_s = 1 << 16, 0.2

@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_stuck_gpu_is_one_error_with_the_facts_and_the_device_goes_on(kind, trouble, monkeypatch):
  with virtual(kind, strict=QUIET) as (machine, dev):
    brief(machine)
    x = Tensor(host(0)).realize()
    before = (x * 2).realize()
    np.testing.assert_array_equal(before.numpy(), host(0) * 2)
    contexts = machine.kgsl.calls["DRAWCTXT_CREATE"]
    with monkeypatch.context() as m:
      trouble(m)
      bad = (x * 7 + 11).realize()
      behind = bad + 1                                        # queued behind it, or refused by KGSL if that knows of the hang already
      with pytest.raises(QCOMError) as e: behind.numpy()
    text = str(e.value)
    assert re.search(r"QCOM lost 'submit 1 kernels: E_\d+\w*'", text), text
    fence, submitted, retired = map(int, re.search(r"fence (\d+), last submitted (\d+), last retired (?:before )?(\d+)", text).groups())
    assert retired <= fence <= submitted and submitted >= 2, text
    assert "devcoredump" in text if kind == "MSM" else "snapshot" in text
    assert "Do: compute again" in text
    for lost in (bad, behind):
      with pytest.raises(QCOMError, match="undefined"): lost.numpy()
      with pytest.raises(QCOMError, match="undefined"): (lost + 3).numpy()
    np.testing.assert_array_equal(before.numpy(), host(0) * 2)
    np.testing.assert_array_equal(x.numpy(), host(0))
    works()
    if kind == "KGSL": assert machine.kgsl.calls["DRAWCTXT_CREATE"] == contexts + 1, "the lost context was not replaced"

@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_capture_that_got_stuck_gives_right_numbers_when_it_runs_again(kind, trouble, monkeypatch):
  """Also one of several batches, with a copy of the host between them, whose intermediates share memory."""
  with virtual(kind, strict=QUIET) as (machine, dev):
    brief(machine)
    def step(x):
      a = ((x + 1).contiguous() * 2).contiguous()
      b = (a.to("PYTHON").to("QCOM") + a.sum()).contiguous()
      return (b * 3 - a).contiguous().realize()
    def want(x): return (2 * (x + 1) + (2 * (x + 1)).sum()) * 3 - 2 * (x + 1)
    f = TinyJit(step)
    xs = [Tensor(host(i)).realize() for i in range(3)]
    for i in range(3): np.testing.assert_array_equal(f(xs[i]).numpy(), want(host(i)))
    out = f(xs[0])
    assert len(f.captured.linear.src) >= 3, "the capture is one batch"
    out.numpy()
    machine.gpu.strict = QUIET
    stuck(machine)
    with pytest.raises(QCOMError, match="Do:"):
      f(xs[1])
      out.numpy()
    with pytest.raises(QCOMError, match="undefined"): out.numpy()
    for i in range(3): np.testing.assert_array_equal(f(xs[i]).numpy(), want(host(i)))
    works()

def stuck(machine):
  """The next job hangs."""
  real, gpu = machine.gpu.submit, machine.gpu
  def submit(job):
    gpu.submit = real
    job.killed = "a hang of the test"
    real(job)
  gpu.submit = submit

def test_a_translation_fault_is_reported(kind, monkeypatch):
  """KGSL: the kernel stops the context. MSM: the kernel tells nobody but its log; the virtual GPU is strict and raises."""
  with virtual(kind, strict=QUIET if kind == "KGSL" else None) as (machine, dev):
    x = Tensor(host(0)).realize()
    (x + 1).numpy()
    real = ops_qcom.Encoder.launch
    def elsewhere(self, prg, code, bufs, *args, **kw):
      real(self, prg, code, bufs, *args, **kw)
      refs = {self.refs[b.buf] for b in bufs}
      self.patches = [(o, i, m, a + (1 << 30) if i in refs else a) for o, i, m, a in self.patches]
    with monkeypatch.context() as m:
      m.setattr(ops_qcom.Encoder, "launch", elsewhere)
      bad = (x * 5 + 13).realize()
    with pytest.raises((QCOMError, qcom.GpuViolation)) as e: bad.numpy()
    if kind == "KGSL": assert "lost 'submit 1 kernels" in str(e.value) and "snapshot" in str(e.value), e.value
    else: assert any("smmu" in line.lower() or "iova" in line for line in machine.dmesg), list(machine.dmesg)
    works()

# *** opening again

def test_a_device_that_is_reopened_works_and_what_it_held_is_refused(kind, monkeypatch):
  with virtual(kind, strict=QUIET) as (machine, dev):
    model = {"w": Tensor(host(1)).realize()}
    f, g = TinyJit(lambda x: (x * model["w"]).realize()), TinyJit(lambda x: (x + 5).realize())
    xs = [Tensor(host(i)).realize() for i in range(3)]
    for x in xs: f(x), g(x)
    view = xs[1][10:20].contiguous()
    pending = (xs[0] + 1).realize()
    Device["QCOM"].reopen()
    for old in (model["w"], xs[0], pending):
      with pytest.raises(QCOMError, match="reopened"): old.numpy()
    with pytest.raises(QCOMError): view.numpy()
    fresh = [Tensor(host(i + 10)).realize() for i in range(4)]      # takes over the addresses
    for _ in range(2):
      with pytest.raises(QCOMError, match="reopened|freed"): f(fresh[0])
      with pytest.raises(QCOMError, match="reopened|freed"): g(xs[0])
    for i, t in enumerate(fresh): np.testing.assert_array_equal(t.numpy(), host(i + 10))
    with pytest.raises(QCOMError): xs[1].assign(fresh[0] + 1).realize(); xs[1].numpy()
    g.reset()
    for i in range(4): np.testing.assert_array_equal(g(fresh[i]).numpy(), host(i + 10) + 5)
    works()
    model.clear()
    del xs, view, pending, old, x, f
    live = (machine.msm if kind == "MSM" else machine.kgsl).live()
    assert live["clients"] == 1
    works()

@pytest.mark.parametrize("kernel_kills_it", [True, False])
def test_a_wait_ends_at_its_limit_and_reopening_helps(kind, kernel_kills_it, monkeypatch):
  """Hang detection switched off or not there: the job stays in the ring for ever."""
  with virtual(kind, strict=QUIET, schedule="late") as (machine, dev):
    works()
    monkeypatch.setattr(machine.gpu, "poke", lambda job=None: None)
    monkeypatch.setattr(machine.gpu, "grace_s", 20.0)
    bad = (Tensor(host(0)).realize() * 7).realize()
    monkeypatch.setattr(dev, "wait_timeout_ms", 200.0)
    with pytest.raises(QCOMError, match="timed out after 200 ms.*submit 1 kernels.*fence.*last submitted.*last retired.*dump.*Do: .*reopen"):
      bad.numpy()
    monkeypatch.undo()
    if kernel_kills_it: machine.gpu.kill(machine.gpu._queue[0][2])
    machine.gpu.poke()
    dev.reopen()
    with pytest.raises(QCOMError, match="reopened"): bad.numpy()
    works()

def test_a_slow_kernel_of_the_virtual_gpu_is_waited_for(monkeypatch):
  """Its limit is for a GPU that makes no progress. A limit that the user sets is kept, slow or not."""
  with virtual("MSM") as (machine, dev):
    monkeypatch.setattr(dev, "wait_timeout_ms", 50.0)
    real = machine.gpu._execute
    import threading
    hold = threading.Event()
    def slow(job):
      hold.wait(0.5)
      real(job)
    monkeypatch.setattr(machine.gpu, "_execute", slow)
    np.testing.assert_array_equal((Tensor(host(3)) * 3).numpy(), host(3) * 3)
    monkeypatch.setenv("HCQDEV_WAIT_TIMEOUT_MS", "50")
    from tinygrad.helpers import getenv
    getenv.cache_clear()
    try:
      out = (Tensor(host(4)) * 3).realize()
      with pytest.raises(QCOMError, match="timed out after 50 ms"): out.numpy()
    finally:
      monkeypatch.delenv("HCQDEV_WAIT_TIMEOUT_MS")
      getenv.cache_clear()
      hold.set()
    np.testing.assert_array_equal(out.numpy(), host(4) * 3)
