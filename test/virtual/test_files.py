"""Device nodes as files: mapping bookkeeping against a byte-by-byte reference, the range allocator, user copies, and tinygrad's file interface."""
from __future__ import annotations
import ctypes, errno, inspect, mmap, os, random, struct, sys, threading
from typing import Any
import numpy as np
import pytest
from test.mockgpu import qcom
from test.mockgpu.qcom.files import Vmas
from test.mockgpu.qcom.kernel import (LINE, PAGE, Abi, CpuCache, Entity, Fence, Ids, Layout, Ranges, Resv, copy_from_user, copy_to_user, libc,
                                      real_mmap)
from test.virtual.kernel_client import RW, Kgsl, Msm, boot

class Owner:
  def __init__(self) -> None: self.vmas = 0

@pytest.mark.parametrize("seed", range(5))
def test_mappings_agree_with_one_owner_per_page(seed: int) -> None:
  """Random mmap (over older mappings too) and munmap: owners, counts, and the offset of every page stay right."""
  rng, vmas, pages, owners = random.Random(seed), Vmas(), dict[int, tuple[Owner, int]](), list[Owner]()
  for _ in range(400):
    at, n = rng.randrange(64), rng.randrange(1, 9)
    before = {o for o, _ in pages.values()}
    dead = vmas.punch(at * PAGE, n * PAGE)
    for p in range(at, at + n): pages.pop(p, None)
    assert set(dead) == before - {o for o, _ in pages.values()}
    if rng.random() < 0.6:
      owners.append(o:=Owner())
      vmas.add(at * PAGE, n * PAGE, o, at * PAGE)
      for p in range(at, at + n): pages[p] = (o, p - at)
    for p in range(72):
      got = vmas.find(p * PAGE + 5)
      assert [(m.owner, (p * PAGE - m.base) // PAGE) for m in got] == ([pages[p]] if p in pages else [])
  live = [m for m in vmas.find(0, 1 << 40)]
  assert all(o.vmas == sum(m.owner is o for m in live) for o in owners)

@pytest.mark.parametrize("seed", range(5))
def test_ranges_is_first_fit_and_reuses(seed: int) -> None:
  rng, r, taken, total = random.Random(seed), Ranges(0x10000, 64 * PAGE), dict[int, int](), 64
  def used(page: int) -> bool: return any(a <= page < a + n for a, n in taken.items())
  for _ in range(600):
    if taken and rng.random() < 0.45:
      a = rng.choice(list(taken))
      r.release(0x10000 + a * PAGE, taken.pop(a) * PAGE)
    else:
      n, align = rng.randrange(1, 9), rng.choice((1, 1, 2, 8))
      first = next((p for p in range(total - n + 1) if (0x10 + p) % align == 0 and not any(used(q) for q in range(p, p + n))), None)
      got = r.alloc(n * PAGE, align * PAGE)
      assert got == (None if first is None else 0x10000 + first * PAGE)
      if first is not None: taken[first] = n
    at, n = rng.randrange(-2, 66), rng.randrange(1, 4)
    if free:=(at >= 0 and at + n <= total and not any(used(q) for q in range(at, at + n))): taken[at] = n
    assert r.reserve(0x10000 + at * PAGE, n * PAGE) == bool(free)
    assert r.used == sum(taken.values()) * PAGE
  for a, n in taken.items(): r.release(0x10000 + a * PAGE, n * PAGE)
  assert r.alloc(total * PAGE) == 0x10000

def test_ids_give_the_lowest_free_one() -> None:
  ids = Ids(1, 6)
  assert [ids.take() for _ in range(6)] == [1, 2, 3, 4, 5, None]
  for i in (4, 2): ids.give_back(i)
  assert [ids.take() for _ in range(3)] == [2, 4, None]

def test_resv_keeps_the_last_fence_of_a_context() -> None:
  """dma_resv_add_fence: a later write replaces the context's read, a later read does not replace its write."""
  r, a, b = Resv(), object(), object()
  f = [Fence(c, n) for n, c in enumerate((a, a, a, b))]
  r.add(f[0], 0)
  assert (r.busy(True), r.busy(False)) == ([f[0]], [])
  r.add(f[1], 1)
  r.add(f[2], 0)
  r.add(f[3], 0)
  assert (r.busy(True), r.busy(False)) == ([f[1], f[2], f[3]], [f[1]])
  f[1].signal()
  assert (r.busy(True), r.busy(False)) == ([f[2], f[3]], [])

def test_entity_keeps_order_behind_a_dependency() -> None:
  ran: list[int] = []
  e, dep, other = Entity(ran.append), Fence(object(), 1), Fence(object(), 2)
  e.push(0, [])
  e.push(1, [dep, other])
  e.push(2, [])
  assert ran == [0]
  dep.signal()
  assert ran == [0]
  other.signal()
  assert ran == [0, 1, 2]

# *** user copies and layouts

def test_bad_pointers_fault_instead_of_crashing() -> None:
  a = real_mmap(0, 2 * PAGE, RW, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
  libc.munmap(a + PAGE, PAGE)
  copy_to_user(a + PAGE - 4, b"edge")
  assert copy_from_user(a + PAGE - 4, 4) == b"edge"
  for call in (lambda: copy_from_user(a + PAGE - 4, 8), lambda: copy_to_user(a + PAGE - 4, bytes(8)), lambda: copy_from_user(0, 1),
               lambda: copy_from_user(1 << 63, 4), lambda: copy_to_user((1 << 64) - 4, b"x")):
    with pytest.raises(OSError) as e: call()
    assert e.value.errno == errno.EFAULT
  assert copy_from_user(0, 0) == b""                   # nothing is copied, so nothing faults
  libc.munmap(a, PAGE)

@pytest.mark.parametrize("file", ["msm.json", "kgsl.json"])
def test_layouts_agree_with_field_by_field_decoding(file: str) -> None:
  """Layout's one struct format against int.from_bytes of every field at its compiler-given offset."""
  abi, rng = Abi(file), random.Random(0)
  for name, facts in abi.facts["structs"].items():
    layout, data = abi.layout(name), rng.randbytes(facts["size"])
    rec, end = layout.unpack(data), 0
    for field, (off, size) in sorted(facts["fields"].items(), key=lambda kv: kv[1][0]):
      if off < end: continue                           # another member of a union
      end, raw = off + size, data[off:off + size]
      got = getattr(rec, {"or": "or_"}.get(field, field.lstrip("_")))
      assert got == (int.from_bytes(raw, "little", signed=field in facts["signed"]) if size in (1, 2, 4, 8) else raw), (name, field)
    covered = bytearray(layout.size)
    for off, size in facts["fields"].values(): covered[off:off + size] = b"\xff" * size
    assert layout.pack(rec) == bytes(a & b for a, b in zip(data, covered)), name

def test_layout_of_a_union_takes_the_first_member() -> None:
  layout = Layout("u", 12, {"a": [0, 4], "first": [4, 8], "second": [4, 4]}, ("a",))
  assert layout.pack(r:=layout.unpack(b"\xff" * 12)) == b"\xff" * 12 and (r.a, r.first) == (-1, 2**64 - 1) and not hasattr(r, "second")

def test_constants_of_the_header_only() -> None:
  with pytest.raises(AttributeError, match="MSM_BO_SHINY"): _ = Abi("msm.json").MSM_BO_SHINY

# *** files

def test_descriptors_are_real_and_unique() -> None:
  boot()
  nodes = [Msm(), Kgsl(), Msm()]
  assert len({n.file.fd for n in nodes}) == 3 and all(os.fstat(n.file.fd) for n in nodes)
  for n in nodes: n.close()
  with pytest.raises(OSError) as e: nodes[0].file.mmap(0, 4096, RW, 1, 0)
  assert e.value.errno == errno.EBADF

def test_a_dropped_file_is_closed() -> None:
  machine, _ = boot()
  c = Msm()
  c.new()
  del c
  assert machine.msm.live()["clients"] == machine.msm.live()["bos"] == 0

def test_arguments_of_every_kind() -> None:
  """ctypes objects, bytearrays and addresses; a buffer shorter than the request says is the caller's mistake."""
  boot()
  c = Msm()
  req, data = c.request("GEM_NEW"), b"\0\x10\0\0\0\0\0\0\0\0\2\0\0\0\0\0"
  class New(ctypes.Structure): _fields_ = [("size", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("handle", ctypes.c_uint32)]
  new, buf, arr = New(4096, 0x20000), bytearray(data), (ctypes.c_char * 16)(*data)
  for arg in (new, buf, memoryview(arr).cast("B"), ctypes.addressof(arr)): c.file.ioctl(req, arg)
  assert (new.handle, buf[12], arr[12]) == (1, 2, b"\4")
  with pytest.raises(ValueError, match="8 bytes, the request says 16"): c.file.ioctl(req, bytearray(8))
  c.close()

def test_bad_mmap_arguments() -> None:
  boot()
  c = Msm()
  off = c.offset(c.new())
  for start, size, flags, offset in ((0, 0, 1, off), (0, 4096, 1, off + 1), (100, 4096, 1 | 0x10, off)):
    with pytest.raises(OSError) as e: c.file.mmap(start, size, RW, flags, offset)
    assert e.value.errno == errno.EINVAL
  c.close()

def test_unmapping_nothing_is_munmap_s_business() -> None:
  assert qcom.munmap(0x10001, 4096) == -1 and ctypes.get_errno() == errno.EINVAL

def test_a_new_machine_leaves_the_old_one_s_files_usable() -> None:
  old, _ = boot()
  c = Msm()
  cpu = c.mmap(c.new())
  new, _ = boot()
  assert c.new() == 2 and new.msm.live()["clients"] == 0
  qcom.munmap(cpu, 4096)
  c.close()
  assert not any(old.msm.live().values())

def test_many_threads_on_one_file() -> None:
  machine, gpu = boot()
  gpu.auto = True
  c, errors = Msm(), list[BaseException]()
  def work() -> None:
    try:
      for _ in range(60):
        h = c.new()
        cpu = c.mmap(h)
        c.wait(c.submit([(h, 1)]).fence, 5)
        qcom.munmap(cpu, 4096)
        c.close_bo(h)
    except BaseException as e: errors.append(e)
  threads = [threading.Thread(target=work) for _ in range(6)]
  for t in threads: t.start()
  for t in threads: t.join()
  assert not errors and machine.msm.live() | {"handles": 0, "bos": 0, "mappings": 0, "iova_bytes": 0} == machine.msm.live()
  c.close()

def test_cache_maintenance_loses_nothing_that_the_cpu_writes_meanwhile() -> None:
  """A line at the edge of a client's buffer holds more than the buffer, for example what malloc keeps between its blocks."""
  cpu, ram, seen = (np.zeros((3, LINE // 8), np.uint64) for _ in range(3))
  cache, wrote = CpuCache(*(a.ctypes.data for a in (cpu, ram, seen)), cpu.nbytes), 0
  undone = list[int]()
  def meanwhile(frame: Any, event: str, arg: Any) -> Any:
    nonlocal wrote
    if frame.f_code is CpuCache.maintain.__code__ and event == "line":
      if cpu[0, 7] != wrote: undone.append(wrote)
      wrote += 1
      cpu[0, 7] = wrote
    return meanwhile
  for value in range(1, 4):
    ram[1, 3], cpu[2, 5] = value, value                       # a device's write, and a dirty line
    old = sys.gettrace()
    sys.settrace(meanwhile)
    try: cache.maintain(0, cpu.nbytes, clean=True, invalidate=True)
    finally: sys.settrace(old)
    assert wrote and cpu[0, 7] == wrote and not undone, "the CPU's write was undone"
    assert cpu[1, 3] == value and ram[2, 5] == value
  cache.maintain(0, cpu.nbytes, clean=True)
  assert (ram == cpu).all() and (seen == cpu).all()
  cpu[2, 5] = 9
  cache.maintain(0, cpu.nbytes, invalidate=True)
  assert cpu[2, 5] == 3, "invalidating drops what is dirty"

def test_cache_maintenance_brings_nothing_beyond_the_buffer() -> None:
  """What a device wrote back beside a buffer, with a whole line that it read earlier, must not undo what malloc has written there since."""
  for offset, size in ((16, 20), (0, 64), (56, 8), (64, 128), (40, 100)):
    cpu, ram, seen = (np.zeros((3, LINE // 8), np.uint64) for _ in range(3))
    ram[:] = 7
    CpuCache(*(a.ctypes.data for a in (cpu, ram, seen)), cpu.nbytes).maintain(offset, size, clean=True, invalidate=True)
    inside = [n for n, v in enumerate(cpu.reshape(-1)) if v]
    assert inside == list(range(offset // 8, -(-(offset + size) // 8))), f"{size} bytes at {offset}"

def test_dma_heap_refuses_what_the_kernel_refuses() -> None:
  """drivers/dma-buf/dma-heap.c: fd must be 0, no heap flags, no unknown fd flags; a length is needed."""
  machine, _ = boot()
  with qcom.open_node(qcom.HEAP_NODE) as heap:
    for size, fd, fd_flags, heap_flags in ((4096, 3, 0, 0), (4096, 0, 1 << 20, 0), (4096, 0, 0, 1), (0, 0, 0, 0)):
      with pytest.raises(OSError) as e: heap.ioctl(0xc0184800, bytearray(struct.pack("<QIIQ", size, fd, fd_flags, heap_flags)))
      assert e.value.errno == errno.EINVAL
    with pytest.raises(OSError) as e: heap.ioctl(0xc0184801, bytearray(24))
    assert e.value.errno == errno.ENOTTY
    with pytest.raises(OSError) as e: heap.mmap(0, 4096, RW, 1, 0)
    assert e.value.errno == errno.ENODEV
  assert machine.heap.reap() == 0

# *** tinygrad's interface

def test_mock_interface_has_tinygrad_s_surface() -> None:
  """Every public method of FileIOInterface, with the same parameters; static methods stay static."""
  hcq = pytest.importorskip("tinygrad.runtime.support.hcq")
  real = next(k for k in hcq.FileIOInterface.__mro__ if k.__name__ == "FileIOInterface")
  for name, member in vars(real).items():
    if not (callable(member) or isinstance(member, staticmethod)) or name in ("__del__",): continue
    mine = inspect.getattr_static(qcom.MockFileIOInterface, name)
    assert isinstance(mine, staticmethod) == isinstance(member, staticmethod), name
    def parameters(cls: type, name: str = name) -> list[str]: return list(inspect.signature(getattr(cls, name)).parameters)
    assert parameters(qcom.MockFileIOInterface) == parameters(real), name

def test_mock_interface_mixes_virtual_and_real(tmp_path: Any) -> None:
  boot()
  f = qcom.MockFileIOInterface
  (tmp_path / "x").write_text("real")
  r = f(str(tmp_path / "x"), os.O_RDWR)
  assert r.read() == "real" and r.read(offset=1, binary=True) == b"eal"
  r.write("R", offset=0)
  assert r.read(offset=0) == "Real" and f(str(tmp_path)).listdir() == ["x"] and f.exists(str(tmp_path / "x"))
  a = r.mmap(0, 4096, mmap.PROT_READ, mmap.MAP_SHARED, 0)
  assert ctypes.string_at(a, 4) == b"Real" and f.munmap(a, 4096) == 0
  a = f.anon_mmap(0, 4096, RW, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
  assert f.munmap(a, 4096) == 0
  with pytest.raises(OSError): f(str(tmp_path / "nothing"))
  assert "renderD128" in f("/dev/dri").listdir() if os.path.isdir("/dev/dri") else "renderD128" in qcom.listdir("/dev/dri")
  assert f.exists("/dev/kgsl-3d0") and f.exists("/dev/dri") and not f.exists("/dev/dri/renderD129")
  e = f.eventfd(3)
  assert os.read(e.fd, 8) == (3).to_bytes(8, "little")
  node = f("/dev/kgsl-3d0", os.O_RDWR)
  node.close()
  assert qcom.current().kgsl.live()["clients"] == 0
