"""Every buffer a submit lists is needed: taken out of the raw ioctl, the virtual GPU names the missing BO and the packet or instruction."""
from __future__ import annotations
import contextlib, ctypes, struct
import numpy as np
import pytest
from test.qcom_open import virtual
from test.mockgpu import qcom
from test.mockgpu.qcom.kernel import Abi
from tinygrad import Tensor, TinyJit, UOp, dtypes
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.device import Buffer
from tinygrad.helpers import Context
from tinygrad.runtime import ops_qcom
from tinygrad.runtime.support.qcom_iface import QCOMError
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

ABI = Abi("msm.json")
FIELDS = ABI.facts["structs"]["drm_msm_gem_submit"]["fields"]
NR_BOS, BOS = FIELDS["nr_bos"][0], FIELDS["bos"][0]

class Thief:
  """Between client and kernel: takes `handle` out of the list of every GEM_SUBMIT, as raw bytes. `lists`: handles as the client wrote them."""
  def __init__(self, msm):
    self.handle, self.lists, self.real = 0, list[list[int]](), msm.ioctl
    msm.ioctl = self.ioctl
  def ioctl(self, file, request, arg):
    if request & 0xff != ABI.ioctls["DRM_IOCTL_MSM_GEM_SUBMIT"] & 0xff: return self.real(file, request, arg)
    raw = (ctypes.c_char * (request >> 16 & 0x3fff)).from_address(arg)
    (n,), (bos,) = struct.unpack_from("<I", raw, NR_BOS), struct.unpack_from("<Q", raw, BOS)
    entries = [ctypes.string_at(bos + 16 * i, 16) for i in range(n)]
    handles = [struct.unpack("<IIQ", e)[1] for e in entries]
    self.lists.append(handles)
    kept = ctypes.create_string_buffer(b"".join(e for e, h in zip(entries, handles) if h != self.handle) or b"\0")
    struct.pack_into("<I", raw, NR_BOS, n - (self.handle in handles))
    struct.pack_into("<Q", raw, BOS, ctypes.addressof(kept))
    try: return self.real(file, request, arg)
    finally:
      struct.pack_into("<I", raw, NR_BOS, n)
      struct.pack_into("<Q", raw, BOS, bos)

def spilling_matmul(c, a, b):
  """64x64 with a 16x16 tile a thread: more accumulators than registers, so the compiler spills to private memory."""
  i, j, k = UOp.range(64, 0), UOp.range(64, 1), UOp.range(64, 2, AxisType.REDUCE)
  total = (a[i, k] * b[k, j]).reduce(k, arg=Ops.ADD)
  return c[i, j].store(total).end(i, j).sink(arg=KernelInfo(name="spilling", opts_to_apply=(Opt(OptOps.UPCAST, 0, 16), Opt(OptOps.UPCAST, 1, 16))))

def handle_of(dev, t: Tensor) -> int: return dev.iface.live.find(int(t.uop.buffer.get_buf("QCOM").va_addr)).handle
def signal_handle(dev, name) -> int: return dev.iface.live.find(int(dev.signal(name)._buf.va_addr)).handle

def recover(dev):
  for _ in range(3):
    with contextlib.suppress(QCOMError, qcom.GpuViolation): dev.synchronize()

def test_each_buffer_of_a_submit_is_missed_when_it_is_not_listed(monkeypatch):
  monkeypatch.setattr(ops_qcom, "SLAB_MAX", 0)                # every allocation a BO of its own
  rng = np.random.default_rng(1)
  A, B, W = (rng.integers(-9, 9, (64, 64)).astype(np.float32) for _ in range(3))
  with virtual("MSM") as (machine, dev), Context(PROFILE=1):
    thief, zeros = Thief(machine.msm), Buffer("PYTHON", 64 * 64, dtypes.float32, opaque=memoryview(bytearray(4 * 64 * 64)))
    weight, empty = Tensor(W).realize(), Tensor.empty(64, 64).realize()
    f = TinyJit(lambda x: (Tensor.custom_kernel(empty, x, weight, fxn=spilling_matmul)[0] + weight).realize())
    xs = [Tensor(v).realize() for v in (A, B, A)]
    for x in xs[:2]: out = f(x)
    dev.synchronize()
    thief.lists.clear()
    f(xs[2])
    slots = [slot for e in dev.prof_ents.values() for slot in (e.st_id, e.en_id)]
    np.testing.assert_array_equal(out.numpy(), A @ W + W)
    assert len(thief.lists) == 1
    listed = thief.lists[0]
    assert len(listed) == len(set(listed))

    (spilling,) = [p for p in ops_qcom.programs.values() if p.name == "spilling"]
    assert spilling.pvtmem
    kinds = {"input": [handle_of(dev, xs[2])], "weight": [handle_of(dev, weight)], "output": [handle_of(dev, out)],
             "intermediate": [handle_of(dev, empty)], "private memory": [dev.iface.live.find(int(dev._scratch._buf.va_addr)).handle],
             "timeline": [signal_handle(dev, "timeline")], "arena": [listed[0]]}
    kinds["timestamp"] = sorted({signal_handle(dev, slot) for slot in slots})
    kinds["program"] = [h for h in listed if not any(h in hs for hs in kinds.values())]
    assert len(kinds["program"]) == 2 and len(kinds["timestamp"]) == 4, (kinds, listed)
    assert {h for hs in kinds.values() for h in hs} == set(listed)

    for kind, handles in kinds.items():
      for handle in handles:
        thief.handle, before = handle, len(machine.gpu.reports)
        if kind == "arena":                                   # the command then names what has become entry 0: too small, or not a command stream
          with pytest.raises((QCOMError, qcom.GpuViolation), match="MSM_GEM_SUBMIT.*EINVAL|cp_error"):
            f(xs[2])
            dev.synchronize()
        else:
          with pytest.raises(qcom.GpuViolation) as e:
            f(xs[2])
            dev.synchronize()
          found = [v for v in machine.gpu.reports[before:]
                   if v.kind == "not_resident" and any(f"BO {handle} " in d and "NOT in this submit" in d for d in v.details)]
          assert found, f"{kind} (BO {handle}) was not missed: {e.value}"
          text = str(found[0])
          assert "IB1" in text and "dword" in text, text
          if kind in ("input", "weight"): assert "ldg" in text and "lane" in text, text
          if kind in ("output", "intermediate"): assert "g[" in text and "lane" in text, text
          if kind == "private memory": assert "private memory" in text and "CP_EXEC_CS" in text, text # checked before the dispatch starts
          if kind == "timeline": assert "CP_EVENT_WRITE" in text, text
          if kind == "timestamp": assert "CP_REG_TO_MEM" in text, text
        thief.handle = 0
        recover(dev)
        empty.uop.buffer.copy_from(zeros)                     # the client's own buffer, written and read: nobody but the client can say what is in it
        np.testing.assert_array_equal(f(xs[1]).numpy(), B @ W + W, err_msg=f"after {kind} was missing")

def test_a_gpu_that_may_not_see_the_arena_says_so(monkeypatch):
  """The kernel has the command buffer, its pages are not there for the GPU: what happens when a list names the wrong BO."""
  with virtual("MSM") as (machine, dev):
    x = Tensor(np.arange(64, dtype=np.float32)).realize()
    (x + 1).numpy()
    real = machine.gpu.submit
    def submit(job):
      arena = min(job.resident, key=lambda bo: bo.handle != machine.msm.submits[-1].handles[0])
      job.resident.remove(arena)
      real(job)
    monkeypatch.setattr(machine.gpu, "submit", submit)
    with pytest.raises(qcom.GpuViolation, match="NOT in this submit's buffer list"): (x + 2).numpy()
    monkeypatch.undo()
    recover(dev)
    np.testing.assert_array_equal((x + 3).numpy(), np.arange(64) + 3)

@pytest.mark.parametrize("profile", [0, 1])
def test_nothing_else_is_listed(profile):
  """With slabs: the runtime's own BOs of a submit are at most 4, everything else is the caller's."""
  with virtual("MSM") as (machine, dev), Context(PROFILE=profile):
    w = Tensor(np.full(256, 3, np.float32)).realize()
    unused = [Tensor(np.full(256, i, np.float32)).realize() for i in range(4)]
    f = TinyJit(lambda x: ((x + w).contiguous() * 2).contiguous().realize())
    for i in range(4): out = f(x:=Tensor(np.full(256, i, np.float32)).realize())
    np.testing.assert_array_equal(out.numpy(), np.full(256, 12))
    listed = machine.msm.submits[-1].handles
    mine = {handle_of(dev, t) for t in (w, x, out)}
    assert mine <= set(listed)
    assert not {handle_of(dev, t) for t in unused} & set(listed)
    own = set(listed) - mine
    assert len(own) <= 1 + 4 and len(own - {s.buf.meta.handle for s in dev.allocator.slabs}) <= 1, "more than slabs and the intermediate buffer"
