"""MSMIface against a kernel that only records: submits, their buffer lists, and what follows when the kernel says no. No GPU, nothing runs."""
from __future__ import annotations
import ctypes, errno, sys
import numpy as np
import pytest
from test.null.qcom_fake import GEM_CLOSE, GEM_INFO, GEM_NEW, SUBMIT, WAIT_FENCE, FakeKernel, addresses, arguments, fake_iface, needed, packets
from test.qcom_open import opened
from tinygrad import Tensor, TinyJit, UOp, Variable, dtypes
from tinygrad.device import Buffer
from tinygrad.engine import realize
from tinygrad.helpers import Context
from tinygrad.runtime import ops_qcom
from tinygrad.runtime.support.qcom_iface import QCOMError

EXEC_CS, REG_TO_MEM = 0x33, 0x3e
READ_WRITE, PIPE_3D0, NO_IMPLICIT, CMD_BUF = 3, 0x10, 0x80000000, 1

@pytest.fixture
def qcom():
  kernel = FakeKernel()
  with opened("QCOM:IR3", [fake_iface(kernel)]) as dev:
    kernel.dev = dev
    yield kernel
  assert kernel.open_files == 0

def real(n=64, value=1.0) -> Tensor: return Tensor(np.full(n, value, np.float32)).realize()
def handle(kernel, t: Tensor) -> int: return kernel.at(int(t.uop.buffer.get_buf("QCOM").va_addr)).handle
def address(t: Tensor) -> int: return int(t.uop.buffer.get_buf("QCOM").va_addr)

def checked(kernel, submits):
  """Each list is exactly what its stream and arguments point at."""
  for s in submits:
    assert s.flags == PIPE_3D0 | NO_IMPLICIT
    handles = [h for _, h in s.bos]
    assert all(f == READ_WRITE for f, _ in s.bos)
    assert len(handles) == len(set(handles)), "a handle twice: EALREADY on a real kernel"
    assert set(handles) == needed(s, kernel)
    typ, idx, offset, size = s.cmd
    assert typ == CMD_BUF and idx == 0 and offset % 4 == 0 and size % 4 == 0 and size
    packets(s.ib)
  return submits

def run(kernel, f, *args):
  """The checked submits that f(*args) makes."""
  n = len(kernel.submits)
  f(*args)
  return checked(kernel, kernel.submits[n:])

# *** buffer lists

def test_eager_kernels_list_what_they_use(qcom):
  a, b, unused = real(), real(), real()
  out = a + b
  (s,) = run(qcom, out.realize)
  handles = {h for _, h in s.bos}
  assert {handle(qcom, a), handle(qcom, b), handle(qcom, out)} <= handles and handle(qcom, unused) not in handles
  assert len(handles) == 4, "three tensors, and one slab for all that is the runtime's"

def captured(fn, *first):
  f = TinyJit(fn)
  for args in first: f(*args)
  return f

def test_replacement_inputs_take_the_place_of_the_captured_ones(qcom):
  w, xs = real(), [real(value=i) for i in range(6)]
  f = captured(lambda x: ((x + w).contiguous() * 2).contiguous().realize(), (xs[0],), (xs[1],))
  for x in xs[2:] + xs[:2]:
    (s,) = run(qcom, f, x)
    handles = {h for _, h in s.bos}
    assert handle(qcom, x) in handles and handle(qcom, w) in handles
    assert not {handle(qcom, y) for y in xs if y is not x} & handles
    assert address(x) in set().union(*map(addresses, arguments(s, qcom)))

def sub(base: Buffer, size: int, offset: int) -> Tensor:
  """`size` floats, `offset` elements into a buffer, as an input of its own."""
  return Tensor(UOp.from_buffer(Buffer("QCOM", size, dtypes.float32, base=base, offset=offset * 4).ensure_allocated()))

def test_offset_views_are_addressed_where_they_start_and_list_their_base(qcom):
  base = Buffer("QCOM", 4096, dtypes.float32).allocate()
  f = captured(lambda x: (x * 2).contiguous().realize(), (real(17),), (real(17),))
  for off in (0, 17, 1023, 4079):
    v = sub(base, 17, off)
    (s,) = run(qcom, f, v)
    assert int(base.get_buf("QCOM").va_addr) + 4 * off in set().union(*map(addresses, arguments(s, qcom)))

def test_two_inputs_in_one_bo_are_one_entry_and_two_addresses(qcom):
  base = Buffer("QCOM", 4096, dtypes.float32).allocate()
  f = captured(lambda x, y: (x * 2 + y).contiguous().realize(), (real(17), real(17)), (real(17), real(17)))
  (s,) = run(qcom, f, sub(base, 17, 34), sub(base, 17, 170))
  found, start = set().union(*map(addresses, arguments(s, qcom))), int(base.get_buf("QCOM").va_addr)
  assert {start + 136, start + 680} <= found
  assert len(s.bos) == 3                                       # the base, the output, the slab

def test_an_input_that_is_a_captured_weight_too_is_listed_once(qcom):
  w = real()
  f = captured(lambda x: (x + w).contiguous().realize(), (real(),), (real(),))
  (s,) = run(qcom, f, w)
  assert [h for _, h in s.bos].count(handle(qcom, w)) == 1
  assert sum(a.count(address(w).to_bytes(8, "little")) for a in arguments(s, qcom)) == 2

def test_an_output_of_one_kernel_and_input_of_the_next(qcom):
  f = captured(lambda x: (((x + 1).contiguous() * 2).contiguous() - 3).contiguous().sum().contiguous().realize(), (real(),), (real(),))
  (s,) = run(qcom, f, real())
  dispatches = sum(p.opcode == EXEC_CS for p in packets(s.ib))
  assert dispatches == 4 and len(s.bos) <= 1 + 1 + dispatches  # slab, input, and at most one buffer a kernel writes

@pytest.mark.parametrize("batch_size", [0, 1, 2, 32])
def test_captures_of_many_kernels(qcom, batch_size):
  with Context(JIT_BATCH_SIZE=batch_size):
    ws = [real(64 + i) for i in range(9)]
    def net(x):
      for w in ws: x = (x.sum() + w).contiguous()
      return x.realize()
    f = captured(net, (real(),), (real(),))
    ss = run(qcom, f, real())
    assert {handle(qcom, w) for w in ws} <= {h for s in ss for _, h in s.bos}
    kernels = sum(p.opcode == EXEC_CS for s in ss for p in packets(s.ib))
    assert kernels >= 9
    assert all(len(s.bos) <= 4 + kernels + len(ws) for s in ss)

def test_submits_of_a_split_batch_have_lists_of_their_own(qcom, monkeypatch):
  monkeypatch.setattr(ops_qcom, "SUBMIT_BUDGET_MS", 1e-9)
  w, v = real(), real()
  f = captured(lambda x: ((x + w).contiguous() * v).contiguous().realize(), (real(),), (real(),))
  ss = run(qcom, f, real())
  assert len(ss) == 2
  assert [[handle(qcom, t) in {h for _, h in s.bos} for t in (w, v)] for s in ss] == [[True, False], [False, True]]
  assert ss[0].cmd[2] + ss[0].cmd[3] <= ss[1].cmd[2] or ss[1].cmd[2] + ss[1].cmd[3] <= ss[0].cmd[2]

@pytest.mark.parametrize("largest,submits", [(100, 1), (300, 2)])
def test_a_batch_is_split_for_the_largest_values_of_its_variables(qcom, monkeypatch, largest, submits):
  """Two kernels that each read and write v floats: by memory, they take 8 * v / EST_GBPS."""
  monkeypatch.setattr(ops_qcom, "SUBMIT_BUDGET_MS", 2 * 8 * 200 / (ops_qcom.EST_GBPS * 1e6))
  t, v = real(300), Variable("v", 1, largest)
  f = TinyJit(lambda x, v: ((x[:v] * 2).contiguous() + 1).contiguous().realize())
  for n in (5, 6, 7): ss = run(qcom, f, t, v.bind(n))
  assert len(ss) == submits

def test_symbolic_variables_change_arguments_and_group_counts_not_lists(qcom):
  t = real(300)
  f = TinyJit(lambda x, v: (x[v:v + 17] + v).contiguous().realize())
  for n in range(2): f(t, Variable("v", 0, 283).bind(n))
  seen = []
  for n in (0, 5, 283):
    (s,) = run(qcom, f, t, Variable("v", 0, 283).bind(n))
    assert n in np.frombuffer(b"".join(arguments(s, qcom)), np.int32)
    seen.append(s.bos)
  assert seen[0] == seen[1] == seen[2]

def test_a_profiled_batch_writes_its_timestamps_into_listed_memory(qcom):
  with Context(PROFILE=1):
    f = captured(lambda x: ((x + 1).contiguous().sum() * 2).contiguous().realize(), (real(),), (real(),))
    (s,) = run(qcom, f, real())
    stamps = [p.args[1] | p.args[2] << 32 for p in packets(s.ib) if p.opcode == REG_TO_MEM]
    assert len(stamps) == len(set(stamps)) >= 2 and all(qcom.at(a).handle in {h for _, h in s.bos} for a in stamps)

def test_small_things_share_slabs(qcom):
  for i in range(40): (real(50 + i) + i).realize()
  own = {h for s in qcom.submits for _, h in s.bos}
  assert len(qcom.dev.allocator.slabs) == 1 and qcom.dev.allocator.slabs[0].buf.meta.handle in own
  assert all(len(s.bos) <= 3 for s in checked(qcom, qcom.submits))

def test_a_buffer_list_is_complete_whatever_the_number_of_the_submit(qcom):
  """Numbers are 64 bits, the device's own timeline shows its low 32."""
  near, kept = (1 << 32) - 3, []
  qcom.dev.queue.submits = qcom.dev.queue.timeline = qcom.dev.done[0] = near
  for n in range(6):
    kept += [(a:=real()), (b:=real())]                         # which no submit has listed before
    (s,) = run(qcom, (a + b).realize)
    assert {handle(qcom, a), handle(qcom, b)} <= {h for _, h in s.bos}, f"submit {near + n + 1:#x}"
    qcom.dev.synchronize()
  assert qcom.dev.queue.timeline == near + 6 and qcom.dev.done[0] == 3

# *** life of a buffer

def test_memory_is_created_mapped_and_released_once(qcom):
  before = set(qcom.bos)
  buf = Buffer("QCOM", 1 << 20, dtypes.float32).allocate()
  (h,) = set(qcom.bos) - before
  bo = qcom.bos[h]
  hb = buf.get_buf("QCOM")
  assert hb.va_addr == bo.iova != hb.cpu_view().addr == bo.cpu
  del buf, hb
  qcom.dev.allocator.free_cache()
  assert h not in qcom.bos and bo.cpu not in qcom.by_cpu
  assert qcom.calls.count(GEM_CLOSE) == 1

@pytest.mark.parametrize("nr,code,words", [(GEM_NEW, errno.ENOMEM, "out of memory"), (GEM_INFO, errno.ENOSPC, "address space"),
                                           (GEM_INFO, errno.ENOMEM, "out of memory")])
def test_a_failed_allocation_leaves_no_handle(qcom, nr, code, words):
  before = set(qcom.bos)
  qcom.fail[nr] = [code, code]
  with pytest.raises(MemoryError, match=words): Buffer("QCOM", 1 << 20, dtypes.float32).allocate()
  assert set(qcom.bos) == before
  Buffer("QCOM", 1 << 20, dtypes.float32).allocate()

def test_an_interrupt_leaves_the_submitter_no_memory_that_was_given_back(qcom):
  """Ctrl-C at each line of what makes room for another allocation: the tables that C reads and writes are those that are alive."""
  live, code = qcom.dev.iface.live, type(qcom.dev.iface.live).add.__code__
  def interrupted_at(line):
    def trace(frame, event, arg):
      if frame.f_code is code and event == "line" and frame.f_lineno == line: raise KeyboardInterrupt
      return trace
    return trace
  lines, raised = {n for _, _, n in code.co_lines() if n is not None}, 0
  for n, line in enumerate(sorted(lines)):
    while len(live.starts) < len(live.arr): live.add(1 << 60 | len(live.starts) << 20, 4096, len(live.marks) - 1, 0)
    old = sys.gettrace()
    sys.settrace(interrupted_at(line))
    try: live.add(1 << 61 | n << 20, 4096, len(live.marks), 0)
    except KeyboardInterrupt: raised += 1
    finally: sys.settrace(old)
    assert (qcom.dev.queue.allocs, qcom.dev.queue.marks) == (ctypes.addressof(live.arr), live.marks.buffer_info()[0]), f"line {line}"
  assert raised > 5

def test_a_freed_weight_never_reaches_the_kernel(qcom):
  w = real()
  f = captured(lambda x: (x + w).contiguous().realize(), (real(),), (real(),))
  x, n = real(), len(qcom.submits)
  w.uop.buffer.deallocate()
  with pytest.raises(QCOMError, match="freed"): f(x)
  assert len(qcom.submits) == n

# *** errors

@pytest.mark.parametrize("code", [getattr(errno, e) for e in "EINVAL ENOENT EALREADY EFAULT ENOMEM ENOSPC EPERM ENXIO EBUSY".split()])
def test_a_rejected_submit_is_one_error_with_the_facts(qcom, code):
  a = real()
  qcom.fail[SUBMIT] = [code]
  with pytest.raises(QCOMError) as e: (a + 1).realize()
  assert "MSM_GEM_SUBMIT" in str(e.value) and errno.errorcode[code] in str(e.value)
  n = len(qcom.submits)
  out = (a + 2).realize()
  checked(qcom, qcom.submits[n:])
  out.numpy()                                                  # no second error

@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_an_interrupted_submit_is_made_again(qcom, code):
  a = real()
  qcom.fail[SUBMIT] = [code] * 3
  n = len(qcom.submits)
  (a + 1).realize()
  assert len(qcom.submits) == n + 1 and not qcom.fail[SUBMIT]

def test_nothing_computed_after_a_failed_submit_is_a_result(qcom):
  a = real()
  f = captured(lambda x: (x + 1).contiguous().realize(), (a,), (a,))
  out = f(a)
  qcom.fail[SUBMIT] = [errno.EINVAL]
  with pytest.raises(QCOMError, match="EINVAL"): f(a)
  n = len(qcom.submits)
  with pytest.raises(QCOMError, match="undefined"): out.numpy()
  with pytest.raises(QCOMError, match="undefined"): (out * 2).realize()
  assert len(qcom.submits) == n, "work on undefined contents was submitted"
  f(a)
  out.numpy()

def test_the_first_half_of_a_failed_batch_is_waited_for(qcom, monkeypatch):
  monkeypatch.setattr(ops_qcom, "SUBMIT_BUDGET_MS", 1e-9)
  f = captured(lambda x: ((x + 1).contiguous() * 2).contiguous().realize(), (real(),), (real(),))
  x = real()
  real_submit, state = qcom._submit, {"n": 0}
  def second_fails(*args):
    state["n"] += 1
    if state["n"] == 2: raise OSError(errno.EINVAL, "second")
    real_submit(*args)
  qcom._submit = second_fails
  waits = qcom.calls.count(WAIT_FENCE)
  with pytest.raises(QCOMError, match="ran 1 of its 2 parts only"): f(x)
  assert qcom.calls.count(WAIT_FENCE) > waits
  run(qcom, f, x)

@pytest.mark.parametrize("later", [False, True], ids=["the last submit", "one before the last"])
def test_a_hang_is_seen_though_the_fence_signals(qcom, later):
  a, b = real(), real()
  qcom.hang = True
  out = (a + 1).realize()
  qcom.hang = False
  if later: (b * 3).realize()
  with pytest.raises(QCOMError, match="lost.*hang recovery"): out.numpy()
  with pytest.raises(QCOMError, match="undefined"): out.numpy()
  (a + 2).realize().numpy()

def test_a_loss_is_not_forgotten_with_the_runs_that_are(qcom):
  a = real()
  f, g = captured(lambda x: (x + 1).realize(), (a,), (a,)), captured(lambda x: (x * 2).realize(), (a,), (a,))
  qcom.dev.synchronize()
  qcom.hang = True
  out = f(a)
  qcom.hang = False
  with pytest.raises(QCOMError, match="lost.*hang recovery"):
    for _ in range(300): g(a)                                  # nobody waits
  with pytest.raises(QCOMError, match="undefined"): out.numpy()
  f(a)
  out.numpy()

def test_a_submit_that_signalled_is_not_asked_about(qcom):
  a = real()
  (a + 1).realize()
  qcom.dev.synchronize()
  qcom.calls.clear()
  (a + 1).realize()
  qcom.dev.synchronize()
  assert [c for c in qcom.calls if c != GEM_NEW and c != GEM_INFO] == [SUBMIT, WAIT_FENCE]

def test_an_eager_launch_is_compiled_once(qcom, monkeypatch):
  compiled, real_compile = [], realize.compile_calls
  monkeypatch.setattr(realize, "compile_calls", lambda *args: compiled.append(args) or real_compile(*args))
  def launches(*args: Tensor) -> int:
    compiled.clear()
    (args[0] * args[1] + 7).realize()
    return len(compiled)
  a, b, c = real(), real(), real()
  launches(a, b)
  assert [launches(*x) for x in ((a, b), (b, a), (c, b), (real(), real()))] == [0] * 4
  assert [launches(a, a), launches(b, b)] == [1, 0], "one buffer at both places is another kernel"
  with Context(NOLOCALS=1): assert [launches(a, b), launches(a, c)] == [1, 0]
  with Context(DEBUG=2): assert [launches(a, b), launches(a, c)] == [1, 0], "timestamps are part of what is compiled"
  assert launches(a, b) == 0
