"""Bad input ends in one clear error that names cause and remedy, leaks nothing, and leaves the device usable."""
from __future__ import annotations
import contextlib, errno, gc, importlib.util, json, os, pickle, subprocess, sys
import numpy as np
import pytest
from test.qcom_open import opened, virtual
from test.mockgpu import qcom
from test.mockgpu.qcom.gpu import Strict
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.device import Buffer
from tinygrad.engine.jit import JitError
from tinygrad.helpers import Context, getenv
from tinygrad.runtime import ops_qcom
from tinygrad.runtime.support import qcom_iface
from tinygrad.runtime.support.qcom_iface import QCOMError

KINDS = ("MSM", "KGSL")
NODE = {"MSM": "/dev/dri/renderD128", "KGSL": "/dev/kgsl-3d0"}
SUBMIT = {"MSM": "GEM_SUBMIT", "KGSL": "GPU_COMMAND"}
WAIT = {"MSM": "WAIT_FENCE", "KGSL": "DEVICE_WAITTIMESTAMP_CTXTID"}

def model(machine, kind): return machine.msm if kind == "MSM" else machine.kgsl
def fail_next(machine, kind, name, code, n=1):
  """The next n calls of an ioctl fail."""
  first = model(machine, kind).calls[name] + 1
  machine.config.fail = {name: {range(first, first + n): code}}
def works():
  """A computation from host data to host data, with numbers of its own."""
  works.n = getattr(works, "n", 0) + 1
  a = np.arange(40, dtype=np.float32) + works.n
  np.testing.assert_array_equal((Tensor(a) * 3 + works.n).numpy(), a * 3 + works.n)
def nothing_open(machine):
  assert machine.msm.live()["clients"] == 0 and machine.kgsl.live()["clients"] == 0

# *** opening

# as the real interfaces, which are tried when DEV names none, but on the virtual machine
PROBED = [type(name, (base,), {}) for name, base in zip(("MSMIface", "KGSLIface"), qcom_iface.ifaces[2:])]

def test_without_any_device_one_error_gives_the_reason_of_each_interface():
  qcom.configure(nodes=())
  with pytest.raises(RuntimeError) as e, opened("QCOM:IR3", PROBED): pass
  text = str(e.value)
  assert "msm" in text and "/dev/dri/renderD*" in text and "/dev/kgsl-3d0" in text and "ENOENT" in text and "qcom_doctor" in text, text
  qcom.configure(nodes=(NODE["KGSL"],), denied=(NODE["KGSL"],))
  with pytest.raises(RuntimeError, match="renderD.*kgsl-3d0 gave EACCES.*Do: join the node's group") as e, opened("QCOM:IR3", PROBED): pass
  qcom.configure()
  with opened("QCOM:IR3", PROBED): works()

@pytest.mark.parametrize("settings,reason", [({"nodes": []}, "QCOM did not open: there is no msm render node"),
                                             ({"chip_id": 0x06040001}, "chip_id=0x06040001 is not supported")])
def test_a_record_outlives_a_run_that_does_not_open(tmp_path, settings, reason):
  (record := tmp_path / "record.json").write_text("{}")
  env = {**os.environ, "DEV": "MOCKMSM+QCOM:IR3", "QCOM_RECORD": str(record), "QCOM_MOCK": json.dumps(settings)}
  path = importlib.util.find_spec("test.device.test_qcom_replay").origin
  done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path], env=env, capture_output=True, text=True, timeout=120)
  assert done.returncode == 1 and record.read_text() == "{}" and list(tmp_path.iterdir()) == [record], done.stdout
  assert f"nothing ran: {reason}" in done.stdout and "is of an earlier run" in done.stdout, done.stdout
  assert "Traceback" not in done.stdout and len(done.stdout.splitlines()) < 12, done.stdout

def test_mock_interfaces_are_never_a_fallback():
  qcom.configure()
  only_mocks = qcom_iface.ifaces[2:]
  with pytest.raises(Exception) as e, opened("QCOM", only_mocks): pass
  assert "MOCK" not in str(e.value)

@pytest.mark.parametrize("kind", KINDS)
def test_a_node_without_permission_names_node_errno_and_group(kind):
  machine = qcom.configure(denied=(NODE[kind],))
  with pytest.raises(RuntimeError) as e, opened(f"MOCK{kind}+QCOM:IR3"): pass
  assert "EACCES" in str(e.value) and f"join the node's group (ls -l {NODE[kind]})" in str(e.value)
  nothing_open(machine)
  with virtual(kind): works()

@pytest.mark.parametrize("kind,name", [("MSM", "GET_PARAM"), ("MSM", "SUBMITQUEUE_NEW"), ("KGSL", "DEVICE_GETPROPERTY"), ("KGSL", "DRAWCTXT_CREATE")])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_denied_ioctl_names_ioctl_node_and_policy_and_closes_the_node(kind, name, code):
  machine = qcom.configure(fail={name: {1: code}})
  with pytest.raises(RuntimeError) as e, opened(f"MOCK{kind}+QCOM:IR3"): pass
  for part in (name, errno.errorcode[code], NODE[kind], "SELinux", "did not open"): assert part in str(e.value), f"{part} missing in: {e.value}"
  nothing_open(machine) # although the traceback is alive
  machine.config.fail = {}
  with opened(f"MOCK{kind}+QCOM:IR3"): works()

def test_without_gpu_firmware_the_error_says_what_is_missing():
  qcom.configure(gpu=False)
  with pytest.raises(RuntimeError, match="ENXIO.*a630_sqe.fw") as e, opened("MOCKMSM+QCOM"): pass
  assert NODE["MSM"] in str(e.value)

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", [0x05040001, 0x06040001, 0x07030001])
def test_another_chip_is_refused_with_its_id_and_the_supported_ones(kind, chip):
  machine = qcom.configure(chip_id=chip)
  with pytest.raises(RuntimeError, match=f"{chip:#010x}.*Adreno 630"), opened(f"MOCK{kind}+QCOM:IR3"): pass
  nothing_open(machine)
  with virtual(kind): works()

@pytest.mark.parametrize("chip", [0x06030001, 0x06030002])
def test_every_revision_of_the_630_is_accepted(chip):
  with virtual("MSM", chip_id=chip) as (_, dev):
    assert dev.iface.gpu_id[:3] == (6, 3, 0)
    works()

@pytest.mark.parametrize("ms", ["0", "-5"])
def test_a_time_out_must_leave_time(ms, monkeypatch):
  monkeypatch.setenv("HCQDEV_WAIT_TIMEOUT_MS", ms)
  getenv.cache_clear()
  try:
    with pytest.raises(RuntimeError, match=f"HCQDEV_WAIT_TIMEOUT_MS={ms}: it is a number of ms above 0"), virtual("MSM"): pass
  finally:
    monkeypatch.undo()
    getenv.cache_clear()

def test_an_unknown_interface_is_named():
  with pytest.raises(Exception, match="FOO"), opened("FOO+QCOM"): pass

def test_a_second_device_does_not_exist():
  with virtual("MSM"):
    with pytest.raises(RuntimeError, match="device 1 does not exist"): ops_qcom.QCOMDevice("QCOM:1")
    works()

# *** memory

@pytest.mark.parametrize("name,code,words", [("GEM_NEW", errno.ENOMEM, "out of memory"), ("GEM_INFO", errno.ENOSPC, "address space"),
                                             ("mmap", errno.ENOMEM, "out of memory.*max_map_count")])
def test_running_out_frees_the_cache_and_tries_once_more(name, code, words):
  with virtual("MSM") as (machine, dev):
    (Tensor.full((1 << 18,), 2.0).contiguous() + 1).realize() # leaves buffers in the allocator's cache
    cached = sum(map(len, dev.allocator.cache.values()))
    assert cached
    fail_next(machine, "MSM", name, code)
    t = (Tensor.full((1 << 16,), 1.0).contiguous() + 1).realize()
    assert sum(map(len, dev.allocator.cache.values())) < cached
    assert t.numpy().max() == t.numpy().min() == 2
    handles = machine.msm.live()["handles"]
    fail_next(machine, "MSM", name, code, n=4)
    with pytest.raises(MemoryError, match=words): Tensor.full((1 << 17,), 1.0).contiguous().realize()
    machine.config.fail = {}
    assert machine.msm.live()["handles"] <= handles
    works()

def test_a_tensor_larger_than_the_address_space_is_a_memory_error():
  with virtual("MSM", va_size=64 << 20):
    with pytest.raises(MemoryError, match="address space"): Tensor.full((32 << 20,), 1.0).contiguous().realize()
    works()

# *** replays

def jitted(w):
  @TinyJit
  def f(x): return ((x + w).contiguous() * 2).realize()
  return f

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reuse", [False, True])
def test_a_weight_that_was_freed_stops_the_replay(kind, reuse):
  with virtual(kind) as (machine, _):
    w = Tensor(np.full(1000, 5, np.float32)).realize()
    f = jitted(w)
    for i in range(4): np.testing.assert_array_equal(f(Tensor(np.full(1000, i, np.float32)).realize()).numpy(), np.full(1000, 2 * (i + 5)))
    x = Tensor(np.ones(1000, np.float32)).realize()
    w.uop.buffer.deallocate()
    if reuse: other = Tensor(np.full(1000, 77, np.float32)).realize() # of the same size: it takes the freed memory over
    submits = model(machine, kind).calls[SUBMIT[kind]]
    with pytest.raises(QCOMError, match="freed"): f(x)
    assert model(machine, kind).calls[SUBMIT[kind]] == submits, "the stale batch reached the kernel"
    works()
    if reuse: assert other.numpy()[0] == 77

@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_was_freed_is_an_error_and_not_a_read_of_old_memory(kind):
  with virtual(kind) as (machine, _):
    f = jitted(Tensor(np.full(1000, 5, np.float32)).realize())
    for i in range(4): f(Tensor(np.full(1000, i, np.float32)).realize())
    x = Tensor(np.ones(1000, np.float32)).realize()
    x.uop.buffer.deallocate()
    submits = model(machine, kind).calls[SUBMIT[kind]]
    with pytest.raises((IndexError, AssertionError, RuntimeError, JitError)): f(x).numpy() # of TinyJit, before anything reaches the device
    assert model(machine, kind).calls[SUBMIT[kind]] == submits
    np.testing.assert_array_equal(f(Tensor(np.full(1000, 3, np.float32)).realize()).numpy(), np.full(1000, 16))

# *** fork

@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_that_touches_the_device_gets_an_error_and_the_parent_goes_on(kind):
  with virtual(kind):
    w = Tensor(np.full(1000, 5, np.float32)).realize()
    f = jitted(w)
    for i in range(3): f(Tensor(np.full(1000, i, np.float32)).realize())
    x = Tensor(np.ones(1000, np.float32)).realize()
    gone = Tensor(np.full(1000, 9, np.float32)).realize()
    del gone                                                  # in the allocator's cache: a child could take it without an ioctl
    attempts = {"replay": lambda: f(x).numpy(), "kernel": lambda: (x + 3).numpy(), "read": lambda: x.numpy(),
                "write": lambda: Tensor(np.full(1000, 1, np.float32)).realize(), "alloc": lambda: Buffer("QCOM", 12345, dtypes.float32).allocate(),
                "sync": lambda: Device["QCOM"].synchronize()}
    r, wr = os.pipe()
    if (pid:=os.fork()) == 0:
      out = {}
      for name, attempt in attempts.items():
        try: out[name] = f"no error: {attempt()}"
        except BaseException as e: out[name] = f"{type(e).__name__}: {e}"
      try: Device["QCOM"].iface.close()
      except BaseException as e: out["close"] = str(e)
      with os.fdopen(wr, "wb") as pipe: pickle.dump(out, pipe)
      os._exit(0)
    os.close(wr)
    with os.fdopen(r, "rb") as pipe: out = pickle.load(pipe)
    assert os.waitpid(pid, 0)[1] == 0
    assert out.keys() == attempts.keys()
    for name, text in out.items(): assert "fork" in text and "spawn" in text, f"{name}: {text}"
    np.testing.assert_array_equal(f(x).numpy(), np.full(1000, 12))
    works()

# *** submits that fail

ERRNOS = {"MSM": "EINVAL ENOENT EFAULT ENOMEM ENXIO EBUSY EALREADY ENOSPC EPERM ENODEV",
          "KGSL": "EINVAL EPROTO EDEADLK ENOMEM EFAULT EPERM EBUSY ENODEV"}

@pytest.mark.parametrize("kind,code", [(kind, getattr(errno, name)) for kind, names in ERRNOS.items() for name in names.split()])
def test_a_rejected_submit_is_one_error_and_its_results_are_never_returned(kind, code):
  with virtual(kind) as (machine, _):
    a = Tensor(np.arange(100, dtype=np.float32)).realize()
    good = (a + 1).realize()
    good.numpy()
    fail_next(machine, kind, SUBMIT[kind], code)
    bad = a * 7
    with pytest.raises(QCOMError) as e:
      bad.realize()
      bad.numpy()
    assert SUBMIT[kind] in str(e.value) and qcom_iface.errname(code) in str(e.value), str(e.value)
    with contextlib.suppress(QCOMError): # a second try may compute it, but must not give what was not computed
      np.testing.assert_array_equal(bad.numpy(), np.arange(100) * 7)
    np.testing.assert_array_equal(good.numpy(), np.arange(100) + 1)
    np.testing.assert_array_equal((a * 9).numpy(), np.arange(100) * 9)
    works()

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_an_interrupted_submit_is_repeated(kind, code):
  with virtual(kind) as (machine, _):
    works()
    fail_next(machine, kind, SUBMIT[kind], code, n=3)
    works()
    fail_next(machine, kind, WAIT[kind], code, n=3)
    works()

@pytest.mark.parametrize("kind", KINDS)
def test_what_depends_on_a_rejected_submit_is_refused_until_it_is_computed_again(kind):
  with virtual(kind) as (machine, _):
    a = Tensor(np.arange(100, dtype=np.float32)).realize()
    f = TinyJit(lambda x: (x * 2).realize())
    for _ in range(3): out = f(a)
    np.testing.assert_array_equal(out.numpy(), np.arange(100) * 2)
    b = Tensor(np.arange(100, dtype=np.float32) + 50).realize()
    fail_next(machine, kind, SUBMIT[kind], errno.EINVAL)
    with pytest.raises(QCOMError, match="EINVAL"): f(b)
    with pytest.raises(QCOMError, match="undefined"): out.numpy()         # the old result is overwritten or not, nobody knows
    with pytest.raises(QCOMError, match="undefined"): (out + 1).numpy()
    np.testing.assert_array_equal(f(b).numpy(), (np.arange(100) + 50) * 2)
    np.testing.assert_array_equal(out.numpy(), (np.arange(100) + 50) * 2)

@pytest.mark.parametrize("kind", KINDS)
def test_an_undefined_buffer_stays_so_when_another_kernel_writes_a_part_of_it(kind):
  with virtual(kind) as (machine, _):
    cache = Tensor.zeros(100).contiguous().realize()
    fill, part = TinyJit(lambda x: cache.assign(x * 2).realize()), TinyJit(lambda x: cache[17:34].assign(x + 1).realize())
    a, b = Tensor(np.arange(100, dtype=np.float32)).realize(), Tensor(np.arange(17, dtype=np.float32)).realize()
    for _ in range(3): fill(a), part(b)
    want = np.arange(100, dtype=np.float32) * 2
    want[17:34] = np.arange(17) + 1
    np.testing.assert_array_equal(cache.numpy(), want)
    fail_next(machine, kind, SUBMIT[kind], errno.EINVAL)
    with pytest.raises(QCOMError, match="EINVAL"): fill(Tensor(np.arange(100, dtype=np.float32) + 7).realize())
    with contextlib.suppress(QCOMError): part(b)
    with pytest.raises(QCOMError, match="undefined"): cache.numpy()
    fill(a), part(b)
    np.testing.assert_array_equal(cache.numpy(), want)

@pytest.mark.parametrize("kind", KINDS)
def test_an_undefined_buffer_is_defined_again_by_a_copy(kind):
  with virtual(kind) as (machine, _):
    out, ones = Tensor(np.zeros(100, np.float32)).realize(), Tensor(np.ones(100, np.float32)).realize()
    fail_next(machine, kind, SUBMIT[kind], errno.EINVAL)
    with pytest.raises(QCOMError): out.assign(ones + 1).realize()
    buf = out.uop.buffer
    with pytest.raises(QCOMError, match="undefined"): buf.numpy()
    host = np.arange(100, dtype=np.float32)
    for first in (0, 99): # a copy into a part leaves the rest undefined
      buf.view(1, dtypes.float32, first * 4).ensure_allocated().copy_from(Buffer("PYTHON", 1, dtypes.float32, opaque=memoryview(bytearray(4))))
      with pytest.raises(QCOMError, match="undefined"): buf.numpy()
    buf.copy_from(Buffer("PYTHON", 100, dtypes.float32, opaque=memoryview(bytearray(host.tobytes()))))
    np.testing.assert_array_equal(buf.numpy(), host)

@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_a_finalizer_met_is_raised_by_the_next_wait(kind):
  with Context(LRU=0), virtual(kind) as (machine, dev):
    x = Tensor(np.arange(1 << 18, dtype=np.float32)).realize()
    dev.synchronize()
    fail_next(machine, kind, "GEM_CLOSE" if kind == "MSM" else "GPUOBJ_FREE", errno.EINVAL)
    del x
    gc.collect()
    with pytest.raises(QCOMError, match="EINVAL.*while freeing|while freeing.*EINVAL"): dev.synchronize()
    np.testing.assert_array_equal((Tensor(np.arange(100)) + 1).numpy(), np.arange(100) + 1)

@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_fails_halfway_is_not_patched_while_its_first_half_runs(kind, monkeypatch):
  """A long batch is several submits: the second is rejected while the GPU has yet to run the first."""
  monkeypatch.setattr(ops_qcom, "SUBMIT_BUDGET_MS", 1e-9)
  with virtual(kind, schedule="late") as (machine, _):
    f = TinyJit(lambda x: ((x + 1).contiguous() * 2).contiguous().realize())
    xs = [Tensor(np.full(5000, i, np.float32)).realize() for i in range(3)]
    for x in xs: f(x)
    f(xs[0]).numpy()
    first = model(machine, kind).calls[SUBMIT[kind]]
    machine.config.fail = {SUBMIT[kind]: {first + 2: errno.EINVAL}}
    with pytest.raises(QCOMError, match="EINVAL"): f(xs[1])
    assert model(machine, kind).calls[SUBMIT[kind]] == first + 2, "the batch was not split"
    for i, x in enumerate(xs): np.testing.assert_array_equal(f(x).numpy(), np.full(5000, (i + 1) * 2))
    works()

def test_a_submit_that_kgsl_queued_and_refused_is_not_run_again_on_what_it_updates():
  """EPROTO: an earlier command faulted, this one runs all the same."""
  with virtual("KGSL") as (machine, dev):
    acc = Tensor(np.zeros(100, np.float32)).realize()
    f = TinyJit(lambda x: acc.assign(acc + x).realize())
    ones = Tensor(np.ones(100, np.float32)).realize()
    for _ in range(3): f(ones)
    np.testing.assert_array_equal(acc.numpy(), np.full(100, 3))
    machine.kgsl.contexts[dev.iface.ctx].faulted = True
    with pytest.raises(QCOMError, match="may have run.*EPROTO.*Do: write anew"): f(ones)
    with pytest.raises(QCOMError, match="undefined"): f(ones)
    acc.assign(Tensor(np.full(100, 3, np.float32))).realize()
    f(ones)
    np.testing.assert_array_equal(acc.numpy(), np.full(100, 4))

@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPERM, errno.ENOMEM])
def test_a_context_without_full_clocks_computes_the_same(code, capfd):
  qcom.configure(fail={"SETPROPERTY": {1: code}})
  with Context(DEBUG=1), opened("MOCKKGSL+QCOM:IR3"): works()
  assert qcom_iface.errname(code) in capfd.readouterr().out

# *** hangs

QUIET = Strict(raise_to_waiter=False) # what a real kernel tells: nothing but counters

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("then", ["wait", "submit"])
def test_a_killed_submit_is_one_error_although_its_fence_signals(kind, then):
  with virtual(kind, schedule=7, strict=QUIET) as (machine, _):
    a = Tensor(np.arange(100, dtype=np.float32)).realize()
    (a + 1).numpy()
    machine.gpu.grace_s = 5.0                                 # long enough to be killed in the queue
    bad = (a * 7).realize()
    machine.gpu.kill(machine.gpu._queue[0][2])
    machine.gpu.grace_s = 0.01
    assert machine.gpu.idle(10)
    with pytest.raises(QCOMError, match="lost .submit 1 kernels.*compute again") as e:
      if then == "submit": (a + 2).numpy()                    # KGSL refuses it, MSM runs it
      bad.numpy()
    assert ("Linux's dump is in" if kind == "MSM" else "If Linux made a dump") in str(e.value)
    with pytest.raises(QCOMError, match="undefined"): bad.numpy()
    works()
    np.testing.assert_array_equal((a * 7).numpy(), np.arange(100) * 7)

@pytest.mark.parametrize("code", [errno.EDEADLK, errno.ENOENT])
def test_a_wait_that_hears_of_a_dead_context_tells_although_its_submit_had_signalled(code):
  """Not later, of work that had nothing to do with it."""
  with virtual("KGSL") as (machine, dev):
    a = Tensor(np.arange(100, dtype=np.float32)).realize()
    (a + 1).numpy()
    out = (a + 1).realize()
    assert machine.gpu.idle(30) and dev.retired(dev.queue.timeline)
    fail_next(machine, "KGSL", WAIT["KGSL"], code)
    with pytest.raises(QCOMError, match="lost"): out.numpy()
    for n in range(3): assert ((a * n).contiguous() + 1).numpy()[9] == 9 * n + 1

@pytest.mark.parametrize("kind", KINDS)
def test_what_was_queued_behind_a_killed_submit_is_not_trusted_either(kind):
  with virtual(kind, schedule=7, strict=QUIET) as (machine, dev):
    f = TinyJit(lambda x: (x * 2).realize())
    xs = [Tensor(np.full(100, i, np.float32)).realize() for i in range(3)]
    for x in xs: out = f(x)
    out.numpy()
    machine.gpu.grace_s = 5.0
    mid = (xs[1] + 5).realize()
    machine.gpu.kill(machine.gpu._queue[0][2])
    machine.gpu.grace_s = 0.01
    with pytest.raises(QCOMError): (mid + 1).numpy(); out.numpy()
    with pytest.raises(QCOMError, match="undefined"): (mid + 1).numpy()
    np.testing.assert_array_equal(f(xs[2]).numpy(), np.full(100, 4))
    works()

@pytest.mark.parametrize("kind", KINDS)
def test_a_submit_that_never_ends_times_out_with_facts(kind, monkeypatch):
  with virtual(kind, schedule="late") as (machine, dev):
    works()
    monkeypatch.setattr(machine.gpu, "poke", lambda job=None: None)
    monkeypatch.setattr(machine.gpu, "grace_s", 30.0)
    out = (Tensor(np.ones(100, np.float32)).realize() * 7).realize()
    monkeypatch.setattr(dev, "wait_timeout_ms", 300.0)
    dump = "Linux left no dump" if kind == "MSM" else "If Linux made a dump" # nothing was killed
    with pytest.raises(QCOMError, match=f"timed out after 300 ms.*last submitted.*last retired.*{dump}"): out.numpy()
    monkeypatch.undo()
    machine.gpu.poke()
    np.testing.assert_array_equal(out.numpy(), np.full(100, 7))
    works()

@pytest.mark.parametrize("code,words", [(errno.ENOMEM, "out of memory"), (errno.ENOSPC, "no room for another GPU context")])
def test_a_lost_context_that_cannot_be_replaced_at_once_is_replaced_later(code, words):
  with virtual("KGSL", schedule=7, strict=QUIET) as (machine, dev):
    a = Tensor(np.arange(100, dtype=np.float32)).realize()
    machine.gpu.grace_s = 5.0
    bad = (a * 7).realize()
    machine.gpu.kill(machine.gpu._queue[0][2])
    machine.gpu.grace_s = 0.01
    fail_next(machine, "KGSL", "DRAWCTXT_CREATE", code)
    with pytest.raises(QCOMError, match=f"not replaced yet: .*{words}.*{qcom_iface.errname(code)}.*Do: .*repeat"): bad.numpy()
    with pytest.raises(QCOMError, match="lost.*Do: compute again"): bad.numpy()
    with pytest.raises(QCOMError, match="undefined"): bad.numpy()
    np.testing.assert_array_equal((a * 7).numpy(), np.arange(100) * 7)

# *** shaders that need too much

def test_a_workgroup_or_local_memory_beyond_the_chip_is_refused(monkeypatch):
  from tinygrad.runtime.support.compiler_mesa import IR3Compiler
  with virtual("MSM") as (machine, dev):
    works()
    (key, prg), = list(ops_qcom.programs.items())[-1:]
    with pytest.raises(RuntimeError, match="Too many resources|threads in a workgroup"): prg.check_launch((1, 1, 1), (1024, 2, 1))
    with pytest.raises(RuntimeError, match="Invalid global/local"): prg.check_launch((1 << 24, 1, 1), (512, 1, 1))
    real = IR3Compiler.unpack_lib
    def with_field(**fields):
      def unpack(lib):
        v, *rest = real(lib)
        for k, val in fields.items(): setattr(v, k, val)
        return (v, *rest)
      return staticmethod(unpack)
    for fields, words in (({"shared_size": 40 << 10}, "local memory.*32768"), ({"constlen": 300}, "constants.*4096")):
      with monkeypatch.context() as m:
        m.setattr(IR3Compiler, "unpack_lib", with_field(**fields))
        with pytest.raises(RuntimeError, match=words): ops_qcom.QCOMProgram(dev, key.to_elf())
    works()

# *** closing

@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_device_holds_nothing_and_says_that_it_is_closed(kind):
  with virtual(kind) as (machine, dev):
    works()
    kept = Tensor(np.ones(1000, np.float32)).realize()
    later = kept + 1
    dev.synchronize()
    dev.iface.close()
    dev.iface.close()
    assert machine.gpu.idle(10)
    assert not any(model(machine, kind).live().values()), model(machine, kind).live()
    for touch in (kept.numpy, later.realize, dev.synchronize, lambda: Buffer("QCOM", 10, dtypes.float32).allocate()):
      with pytest.raises(RuntimeError, match="closed"): touch()
    del kept, later
  with virtual(kind): works()
