"""Memory that others own: host pointers through KGSL, DMA-BUFs through both kernels. The GPU does not snoop the CPU's caches, as the models show."""
from __future__ import annotations
import ctypes, errno, gc, io, mmap, os, pickle, struct
import numpy as np
import pytest
from test.mockgpu import qcom
from test.qcom_open import virtual
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import Context
from tinygrad.runtime.support.qcom_iface import QCOMError

KINDS = ("MSM", "KGSL")
PAGE = 4096
WRITE, END = 2, 4                                     # DMA_BUF_SYNC_*
NO_IMPLICIT = 0x80000000                              # MSM_SUBMIT_NO_IMPLICIT

class Frame:
  """A buffer as a camera process has it: a DMA-BUF of a cached heap with a CPU mapping, or host memory; written by the CPU with what it owes."""
  def __init__(self, kind: str, size: int):
    self.fd = -1
    if kind == "pointer": self.map = mmap.mmap(-1, -(-size // PAGE) * PAGE)
    else:
      with qcom.open_node(qcom.HEAP_NODE) as heap:
        heap.ioctl(0xc0184800, buf:=bytearray(struct.pack("<QIIQ", size, 0, os.O_CLOEXEC | os.O_RDWR, 0)))
      self.fd = struct.unpack_from("<I", buf, 8)[0]
      self.map = mmap.mmap(self.fd, -(-size // PAGE) * PAGE)
    self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
  def write(self, data: np.ndarray, offset: int = 0) -> np.ndarray:
    self.map[offset:offset + data.nbytes] = data.tobytes()
    if self.fd >= 0: qcom.dmabuf_sync(self.fd, WRITE | END)
    return data
  def tensor(self, shape: tuple[int, ...], offset: int = 0, dtype=dtypes.uint8) -> Tensor:
    if self.fd >= 0: return Tensor.from_blob(None, shape, fd=self.fd, offset=offset, dtype=dtype, device="QCOM")
    return Tensor.from_blob(self.ptr + offset, shape, dtype=dtype, device="QCOM")
  def close(self) -> None:
    if self.fd >= 0: os.close(self.fd)
    self.fd = -1

WAYS = [("MSM", "dmabuf"), ("KGSL", "dmabuf"), ("KGSL", "pointer")]
rng = np.random.default_rng(18)
def random(n: int, dtype=np.uint8) -> np.ndarray:
  return rng.integers(0, 256, n).astype(dtype) if np.dtype(dtype).kind in "ui" else rng.standard_normal(n).astype(dtype)
def settle(dev) -> None:
  """What the device keeps after its first kernel is there, and nothing of that is in flight."""
  (Tensor([1.0, 2.0]) + 1).realize()
  dev.synchronize()
  gc.collect()
def live(machine, kind): return (machine.msm if kind == "MSM" else machine.kgsl).live()
def frees(machine, kind, way):
  return machine.msm.calls["GEM_CLOSE"] if kind == "MSM" else machine.kgsl.calls["SHAREDMEM_FREE" if way == "pointer" else "GPUOBJ_FREE"]

# *** what the CPU rewrites is never stale

@pytest.mark.parametrize("kind,way", WAYS)
@pytest.mark.parametrize("offset,n", [(0, 3 * PAGE), (77, 1001), (PAGE - 1, 2)])
def test_a_frame_that_is_rewritten_is_computed_on_not_only_copied(kind, way, offset, n):
  """Reports R15, R16: wrapped data that reads back right and computes wrong; contents changed after wrapping."""
  with virtual(kind):
    f = Frame(way, 4 * PAGE)
    t = f.tensor((n,), offset)
    for _ in range(3):
      data = f.write(random(n), offset)
      np.testing.assert_array_equal((t.cast(dtypes.int32) * 3 + 1).numpy(), data.astype(np.int32) * 3 + 1)
      np.testing.assert_array_equal(t.numpy(), data)

@pytest.mark.parametrize("kind,way", WAYS)
@pytest.mark.parametrize("batch", [0, 1])
def test_wraps_cached_for_the_life_of_a_process_are_inputs_of_a_capture(kind, way, batch):
  """As openpilot does: one wrap for each ring slot, made when the slot is first seen; the camera rewrites them for ever."""
  n = 2 * PAGE
  with virtual(kind), Context(JIT_BATCH_SIZE=batch):
    slots, wraps = [Frame(way, n) for _ in range(4)], dict[int, Tensor]()
    small = np.zeros(8, np.float32)
    gain, queue = Tensor(small, device="NPY"), Tensor.zeros(3, n // 2, dtype=dtypes.uint8).contiguous().realize()
    @TinyJit
    def step(frame: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
      half = frame[n // 4:n // 4 + n // 2]
      queue.assign(queue[1:].cat(half.reshape(1, -1)).contiguous())
      out = (queue.cast(dtypes.float32).sum(1) * gain.to("QCOM")[:3]).contiguous()
      Tensor.realize(queue, out)
      return out, half.clone() # without, it would be a view of the frame that was captured
    want = np.zeros((3, n // 2), np.uint8)
    for i in range(14):
      f = slots[i * 3 % 4]
      data, small[:] = f.write(random(n)), i
      out, half = step(frame=wraps.setdefault(f.ptr, f.tensor((n,))), gain=gain)
      want = np.concatenate([want[1:], data[None, n // 4:n // 4 + n // 2]])
      np.testing.assert_array_equal(out.numpy(), want.astype(np.float32).sum(1) * i, err_msg=f"step {i}")
      np.testing.assert_array_equal(half.numpy(), want[-1])
      np.testing.assert_array_equal(queue.numpy(), want)

@pytest.mark.parametrize("kind,way", WAYS)
def test_a_frame_that_a_capture_closes_over_is_read_anew_at_each_replay(kind, way):
  with virtual(kind):
    f = Frame(way, PAGE)
    t = f.tensor((1024,), dtype=dtypes.float32)
    add = TinyJit(lambda x: (x + t).realize())
    for i in range(6):
      data = f.write(random(1024, np.float32))
      np.testing.assert_array_equal(add(Tensor.full((1024,), float(i)).contiguous().realize()).numpy(), data + np.float32(i))

@pytest.mark.parametrize("kind,way", WAYS)
def test_the_gpu_s_writes_reach_whoever_reads_the_memory(kind, way):
  with virtual(kind):
    f = Frame(way, 2 * PAGE)
    f.write(random(2 * PAGE))
    t = f.tensor((1000,), PAGE, dtypes.float32)
    for i in range(3):
      f.write(random(1000, np.float32), PAGE)           # dirty lines under what the GPU writes
      t.assign(Tensor.arange(1000).cast(dtypes.float32) * i).realize()
      np.testing.assert_array_equal(t.numpy(), np.arange(1000, dtype=np.float32) * i)
      np.testing.assert_array_equal(np.frombuffer(f.map, np.float32, 1000, PAGE), np.arange(1000, dtype=np.float32) * i)
    t.assign(Tensor(new:=random(1000, np.float32))).realize()
    np.testing.assert_array_equal((t * 2).numpy(), new * 2)

# *** one buffer, its references and its end

@pytest.mark.parametrize("kind", KINDS)
def test_imports_of_one_buffer_are_counted_and_the_last_one_closes_it(kind):
  with virtual(kind) as (machine, dev):
    states = []
    for _ in range(2):                                  # what the kernels and the allocator keep is there after the first round
      handles = live(machine, kind).get("handles", 0)
      f = Frame("dmabuf", 4 * PAGE)
      data, fd2 = f.write(random(4 * PAGE)), os.dup(f.fd)
      parts = [f.tensor((PAGE,), o) for o in (0, PAGE, 3 * PAGE)]
      parts.append(Tensor.from_blob(None, (100,), fd=fd2, offset=5, dtype=dtypes.uint8, device="QCOM"))
      if kind == "MSM" and states: assert live(machine, kind)["handles"] == handles + 1
      os.close(fd2)
      f.close()                                         # the descriptors go, the memory stays
      for p, want in zip(parts, (data[:PAGE], data[PAGE:2*PAGE], data[3*PAGE:], data[5:105])):
        assert p.cast(dtypes.int32).sum().item() == want.astype(np.int64).sum()
      del p
      while parts:
        n = frees(machine, kind, "dmabuf")
        parts.pop()
        gc.collect()
        if kind == "MSM": assert frees(machine, kind, "dmabuf") - n == (not parts), f"{len(parts)} references are left"
        else: assert frees(machine, kind, "dmabuf") == n + 1
      del f
      settle(dev)
      assert not dev.iface.imports
      states.append((live(machine, kind), len(dev.iface.live.starts), len(os.listdir("/proc/self/fd")), machine.heap.reap()))
    assert states[0] == states[1]

@pytest.mark.parametrize("kind,way", WAYS)
def test_days_of_imports_leave_nothing(kind, way):
  with virtual(kind) as (machine, dev):
    f, states = Frame(way, 3000), []
    for i in range(160):
      data, t = f.write(random(3000)), f.tensor((2000,), 500)
      if i % 20 == 0: np.testing.assert_array_equal((t + 1).numpy(), data[500:2500] + np.uint8(1))
      del t
      if i % 80 == 79:
        settle(dev)
        states.append((live(machine, kind), len(dev.iface.live.starts), len(os.listdir("/proc/self/fd"))))
    assert states[0] == states[1] and not machine.kgsl.host.maps and frees(machine, kind, way) >= 160

def test_submits_that_share_memory_take_part_in_the_kernel_s_ordering():
  """Without NO_IMPLICIT a submit waits for the fences of a buffer's other users, and they for it."""
  with virtual("MSM") as (machine, dev):
    settle(dev)
    alone = machine.msm.submits[-1].flags
    f = Frame("dmabuf", PAGE)
    f.write(random(PAGE))
    (f.tensor((PAGE,)) + 1).realize()
    assert alone & NO_IMPLICIT and not machine.msm.submits[-1].flags & NO_IMPLICIT
    (Tensor([3.0, 2.0]) + 2).numpy()
    assert machine.msm.submits[-1].flags == alone

# *** refusals

@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_part_of_a_dmabuf_is_refused_in_words(kind):
  with virtual(kind) as (machine, dev):
    settle(dev)
    f, before = Frame("dmabuf", PAGE), live(machine, kind)
    descriptors, memfd, (r, w) = len(os.listdir("/proc/self/fd")) - 1, os.memfd_create("no dma-buf"), os.pipe() # f's own is closed below
    os.ftruncate(memfd, PAGE)
    def blob(fd, n=16, offset=0): return Tensor.from_blob(None, (n,), fd=fd, offset=offset, dtype=dtypes.uint8, device="QCOM")
    for args, error, words in (((f.fd, PAGE + 1), ValueError, "has no 4097 bytes at offset 0"), ((f.fd, 16, PAGE - 15), ValueError, "has no 16 byte"),
                               ((f.fd, 16, -1), ValueError, "offset -1"), ((memfd,), QCOMError, "is no DMA-BUF.*udmabuf"),
                               ((r,), QCOMError, "no DMA-BUF"), ((9999,), QCOMError, "9999 is not open"), ((-1,), QCOMError, "not open"),
                               ((1 << 40,), QCOMError, "not open")):
      with pytest.raises(error, match=words): blob(*args)
    os.close(f.fd)
    with pytest.raises(QCOMError, match="not open"): blob(f.fd)
    f.fd = -1
    for fd in (memfd, r, w): os.close(fd)
    gc.collect()
    assert live(machine, kind) == before and len(os.listdir("/proc/self/fd")) == descriptors
    np.testing.assert_array_equal((Tensor([1, 2, 3]) + 1).numpy(), [2, 3, 4])

@pytest.mark.parametrize("kind,name", [("MSM", "PRIME_FD_TO_HANDLE"), ("MSM", "GEM_INFO"), ("KGSL", "GPUOBJ_IMPORT")])
def test_a_kernel_that_fails_leaves_nothing_imported(kind, name):
  with virtual(kind) as (machine, dev):
    settle(dev)
    f, before = Frame("dmabuf", PAGE), live(machine, kind)
    model = machine.msm if kind == "MSM" else machine.kgsl
    machine.config.fail = {name: {model.calls[name] + 1: errno.ENOMEM}}
    with pytest.raises(QCOMError, match=f"{name}.*ENOMEM"): f.tensor((16,))
    assert live(machine, kind) == before and not dev.iface.imports
    data = f.write(random(16))
    np.testing.assert_array_equal((f.tensor((16,)) + 1).numpy(), data + np.uint8(1))

def test_msm_refuses_a_host_pointer_and_says_what_to_pass():
  host = np.zeros(64, np.float32)
  with virtual("MSM") as (machine, _):
    before = machine.msm.live()
    with pytest.raises(QCOMError, match=r"from_blob\(None, shape, fd=, offset=\)"):
      Tensor.from_blob(host.ctypes.data, (64,), dtype=dtypes.float32, device="QCOM")
    assert machine.msm.live() == before
    np.testing.assert_array_equal((Tensor([1, 2, 3]) + 1).numpy(), [2, 3, 4])

# *** pickles

@pytest.mark.parametrize("kind,way", WAYS)
def test_a_pickle_holds_the_contents_and_a_capture_takes_frames_again(kind, way):
  with virtual(kind):
    f = Frame(way, PAGE)
    data, t = f.write(random(PAGE)), f.tensor((1000,), 96)
    loaded = pickle.loads(pickle.dumps(t, protocol=5))
    f.write(random(PAGE))
    np.testing.assert_array_equal(loaded.numpy(), data[96:1096])
    np.testing.assert_array_equal((loaded + 1).numpy(), data[96:1096] + np.uint8(1))
    double = TinyJit(lambda frame: (frame.cast(dtypes.int32) * 2).realize())
    for _ in range(3): double(frame=t)
    buffers: list[pickle.PickleBuffer] = []
    again = pickle.load(io.BytesIO(pickle.dumps(double, protocol=5, buffer_callback=buffers.append)), buffers=buffers)
    for _ in range(2):
      data = f.write(random(PAGE))
      np.testing.assert_array_equal(again(frame=t).numpy(), data[96:1096].astype(np.int32) * 2)
