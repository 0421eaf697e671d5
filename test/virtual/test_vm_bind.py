"""VM_BIND of the 7.2 profile: msm_ioctl_vm_bind and lookup_op (msm_gem_vma.c), and what such a file may not do any more."""
from __future__ import annotations
import ctypes, errno, os, select, struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import pytest
from hypothesis import given, settings, strategies as st
from test.mockgpu import qcom
from test.mockgpu.qcom import vm_bind
from test.mockgpu.qcom.gpu import Strict
from test.virtual.kernel_client import READ, SUBMIT_3D, WC, Msm, boot, errno_of
from test.virtual.rig import Stream

UNMAP, MAP, MAP_NULL = 0, 1, 2
VA, BAD = 1 << 32, 0xdeadbeef
FD_IN, FD_OUT, BIND_QUEUE = 1, 2, 2

class Client(Msm):
  """A file that manages its VM: `bo` of 16 KiB, `q` a VM_BIND queue, `c.bind(op, ...)` one operation a tuple."""
  def __init__(self, enable: bool = True):
    super().__init__()
    if enable: self("SET_PARAM", pipe=0x10, param=22, value=1)
    self.bo = self.new(16384)
    self.q = self.queue(0, BIND_QUEUE) if enable else 0

  def bind(self, *ops: tuple, **kw: Any) -> Any:
    """ops: (op, handle, obj_offset, iova, range[, flags])."""
    packed = [vm_bind.OP.struct.pack(*(o + (0,) * (6 - len(o))), 0) for o in ops]
    inline = {"op": packed[0]} if len(packed) == 1 else {"op": struct.pack("<Q32x", self.buffer(b"".join(packed)) if packed else 0)}
    return self("VM_BIND", **{"queue_id": self.q, "nr_ops": len(ops), **inline, **kw})

@dataclass
class Rule:
  """`do(c)` gives `want`: 0 or an errno."""
  source: str
  what: str
  do: Callable[[Any], Any]
  want: int = errno.EINVAL
  settings: dict[str, Any] | None = None
  enable: bool = True

def one(c: Any, op: int = MAP, handle: int | None = None, offset: int = 0, iova: int = VA, size: int = 4096, flags: int = 0, **kw: Any) -> Any:
  return c.bind((op, (c.bo if op == MAP else 0) if handle is None else handle, offset, iova, size, flags), **kw)
def syncs(c: Any, *entries: tuple) -> int: return c.buffer(b"".join(struct.pack("<IIQ", *e) for e in entries))

R = Rule
RULES = [
  R("msm_ioctl_vm_bind", "no GPU", lambda c: c("VM_BIND"), errno.ENXIO, {"gpu": False}, False),
  R("msm_ioctl_vm_bind", "not a VM_BIND file", lambda c: c("VM_BIND"), enable=False),
  R("msm_ioctl_vm_bind", "flags before the queue", lambda c: c.bind(flags=4, queue_id=99)),
  R("msm_ioctl_vm_bind", "queue", lambda c: c.bind(queue_id=99), errno.ENOENT),
  R("msm_ioctl_vm_bind", "a queue of another type", lambda c: c.bind(queue_id=0)),
  R("vm_bind_job_create", "operations beyond one allocation", lambda c: c.bind(nr_ops=1 << 20), errno.ENOMEM),
  R("msm_ioctl_vm_bind", "in-fence is no sync_file", lambda c: c.bind(flags=FD_IN, fence_fd=c.file.fd)),
  R("msm_syncobj_parse_deps", "handle", lambda c: c.bind(in_syncobjs=syncs(c, (9, 0, 0)), nr_in_syncobjs=1, syncobj_stride=16), errno.ENOENT),
  R("msm_syncobj_parse_post_deps", "handle", lambda c: c.bind(out_syncobjs=syncs(c, (9, 0, 0)), nr_out_syncobjs=1, syncobj_stride=16)),
  R("vm_bind_job_lookup_ops", "table", lambda c: c.bind(nr_ops=2), errno.EFAULT),
  R("lookup_op", "flags", lambda c: one(c, flags=2)),
  R("lookup_op", "DUMP", lambda c: one(c, flags=1), 0),
  R("lookup_op", "iova alignment", lambda c: one(c, iova=VA + 4)),
  R("lookup_op", "bo_offset alignment", lambda c: one(c, offset=64)),
  R("lookup_op", "range alignment", lambda c: one(c, size=100)),
  R("lookup_op", "range below the VM", lambda c: one(c, iova=4096)),
  R("lookup_op", "range beyond the VM", lambda c: one(c, iova=2 * VA - 4096, size=8192)),
  R("lookup_op", "the last page of the VM", lambda c: one(c, iova=2 * VA - 4096), 0),
  R("lookup_op", "MAP without a handle", lambda c: one(c, handle=0)),
  R("lookup_op", "UNMAP with a handle", lambda c: one(c, UNMAP, c.bo)),
  R("lookup_op", "unknown operation", lambda c: one(c, 7)),
  R("lookup_op", "MAP_NULL without PRR", lambda c: one(c, MAP_NULL)),
  R("vm_bind_job_lookup_ops", "handle", lambda c: one(c, handle=BAD)),
  R("vm_bind_job_lookup_ops", "offset and range beyond the BO", lambda c: one(c, offset=12288, size=8192)),
  R("vm_bind_job_lookup_ops", "the whole BO", lambda c: one(c, size=16384), 0),
  R("vm_bind_job_pin_objects", "a DONTNEED BO", lambda c: (c("GEM_MADVISE", handle=c.bo, madv=1), one(c)), errno.EBUSY),
  R("vm_bind_job_pin_objects", "out of memory", lambda c: one(c, handle=c.new(1 << 20), size=1 << 20), errno.ENOMEM, {"memory": 1 << 19}),
  R("msm_ioctl_vm_bind", "no operations", lambda c: c.bind(), 0),
  R("msm_submitqueue_create", "VM_BIND queue with a priority", lambda c: c.queue(1, BIND_QUEUE)),
  R("adreno_set_param", "EN_VM_BIND 0 leaves the file as it is",
    lambda c: (c("SET_PARAM", pipe=0x10, param=22, value=0), c.iova(c.bo)) and 0, 0, None, False),
  R("adreno_set_param", "EN_VM_BIND with len", lambda c: c("SET_PARAM", pipe=0x10, param=22, value=1, len=4), enable=False),
  R("adreno_get_param", "any GET_PARAM makes the VM, also one that fails",
    lambda c: (errno_of(lambda: c.param(0x77)), c("SET_PARAM", pipe=0x10, param=22, value=1)), errno.EBUSY, None, False),
  R("msm_ioctl_gem_info_iova", "GET_IOVA", lambda c: c.iova(c.bo)),
  R("msm_ioctl_gem_info_set_iova", "SET_IOVA", lambda c: c.info(c.bo, 4, VA)),
  R("msm_ioctl_gem_submit", "a VM_BIND queue", lambda c: c.submit(queue=c.q)),
  R("submit_lookup_cmds", "submit_idx", lambda c: c.submit([(c.bo, READ)], [(1, 1, 0, 16)])),
  R("submit_lookup_cmds", "submit_offset", lambda c: c.submit([], [(1, 0, 16, 16)])),
  R("submit_lookup_cmds", "relocs", lambda c: c.submit([], [(1, 0, 0, 16, 1, 0)])),
  R("submit_lock_objects_vmbind", "duplicates are ignored", lambda c: c.submit([(c.bo, READ), (c.bo, READ)]) and 0, 0),
  R("submit_lock_objects_vmbind", "NO_SHARE BOs are usable", lambda c: c.submit([(c.new(flags=WC | 4), READ)]) and 0, 0),
]

@pytest.mark.parametrize("rule", [pytest.param(r, id=f"{r.source}-{r.what}".replace(" ", "-")) for r in RULES])
def test_rule(rule: Rule) -> None:
  machine, gpu = boot(kernel="7.2", **(rule.settings or {}))
  c = Client(rule.enable)
  try:
    got = errno_of(lambda: rule.do(c))
    assert got == rule.want, f"{rule.source}: {rule.what}; the model logged {list(machine.dmesg)[-1:]}"
  finally:
    gpu.finish(len(gpu.jobs))
    c.close()

# *** on the virtual GPU

@pytest.fixture
def live() -> Any:
  machine = qcom.configure(kernel="7.2", strict=Strict(raise_to_waiter=False), hang_polls=50)
  c = Client()
  c.machine, c.cmds = machine, c.new()
  c.cpu, c.cs = c.mmap(c.bo, 16384), c.mmap(c.cmds)
  c.bind((MAP, c.cmds, 0, VA + (8 << 20), 4096))
  yield c
  assert machine.gpu.idle(20)
  c.close()
  for at, n in ((c.cpu, 16384), (c.cs, 4096)): qcom.munmap(at, n)
  assert not any(machine.msm.live().values()), machine.msm.live()

def run(c: Any, s: Stream, **kw: Any) -> int:
  ctypes.memmove(c.cs, struct.pack(f"<{len(s.words)}I", *s.words), 4 * len(s.words))
  fence = c.submit([], [(1, 0, 0, 4 * len(s.words), 0, VA + (8 << 20))], **kw).fence
  c.wait(fence, 20)
  return fence
def u32(c: Any, at: int) -> int: return ctypes.c_uint32.from_address(c.cpu + at).value

def test_what_is_bound_is_there_without_a_list(live: Any) -> None:
  live.bind((MAP, live.bo, 4096, VA, 8192))
  run(live, Stream().mem_write(VA + 16, 5).mem_write(VA + 4096, 6))
  assert (u32(live, 4096 + 16), u32(live, 8192)) == (5, 6) and not live.machine.gpu.reports

def test_the_same_pages_at_two_addresses(live: Any) -> None:
  live.bind((MAP, live.bo, 0, VA, 4096), (MAP, live.bo, 0, VA + 0x10000, 4096))
  run(live, Stream().mem_write(VA, 7).pkt7(0x12).pkt7(0x75, 1, VA & 0xffffffff, VA >> 32, (VA & 0xffffffff) + 0x10008, VA >> 32))
  assert (u32(live, 0), u32(live, 8)) == (7, 7)

def test_a_mapping_over_others_splits_them(live: Any) -> None:
  other = live.new()
  live.bind((MAP, live.bo, 0, VA, 16384))
  live.bind((MAP, other, 0, VA + 4096, 4096))
  at = [VA + 4096 * i for i in range(4)]
  s = Stream()
  for i, a in enumerate(at): s.mem_write(a, i + 1)
  run(live, s)
  assert [u32(live, 4096 * i) for i in range(4)] == [1, 0, 3, 4]
  live.bind((UNMAP, 0, 0, VA + 4096, 8192))
  run(live, Stream().mem_write(at[0], 11).mem_write(at[2], 13).mem_write(at[3], 14))
  assert [u32(live, 4096 * i) for i in range(4)] == [11, 0, 3, 14]
  assert [v.kind for v in live.machine.gpu.reports] == ["unmapped"] and f"{VA + 8192:#x}" in live.machine.gpu.reports[0].summary
  live.bind((UNMAP, 0, 0, VA, 1 << 20))
  live.close_bo(other)
  assert live.machine.msm.live()["bos"] == 2

def test_a_bound_bo_outlives_its_handle(live: Any) -> None:
  h = live.new()
  live.bind((MAP, h, 0, VA, 4096))
  live.close_bo(h)
  run(live, Stream().mem_write(VA, 1))
  assert not live.machine.gpu.reports and live.machine.msm.live()["bos"] == 3
  live.bind((UNMAP, 0, 0, VA, 4096))
  assert live.machine.msm.live()["bos"] == 2

def test_jobs_of_a_bind_queue_wait_for_their_fences(live: Any) -> None:
  s = live("SYNCOBJ_CREATE").handle
  live("SYNCOBJ_RESET", handles=live.buffer(struct.pack("<I", s)), count_handles=1)
  gate = live.new()
  cpu = live.mmap(gate)
  live.bind((MAP, gate, 0, VA + (9 << 20), 4096))
  ctypes.memmove(live.cs, struct.pack("<8I", *(words := Stream().wait_mem(VA + (9 << 20), 1).words), *[0] * (8 - len(words))), 32)
  live.submit([], [(1, 0, 0, 4 * len(words), 0, VA + (8 << 20))], flags=SUBMIT_3D | 1 << 26, out_syncobjs=syncs(live, (s, 0, 0)), nr_out_syncobjs=1,
              syncobj_stride=16)
  fd = live.bind((MAP, live.bo, 0, VA, 4096), flags=FD_OUT, in_syncobjs=syncs(live, (s, 0, 0)), nr_in_syncobjs=1, syncobj_stride=16).fence_fd
  space = live.machine.msm.vm(next(iter(live.machine.msm.clients))).space
  assert space.find(VA) is None and select.select([fd], [], [], 0)[0] == []
  ctypes.c_uint32.from_address(cpu).value = 1
  assert select.select([fd], [], [], 20)[0] == [fd] and space.find(VA) is not None
  os.close(fd)
  qcom.munmap(cpu, 4096)
  live.close_bo(gate)

def test_a_hang_makes_the_vm_unusable(live: Any) -> None:
  """recover_worker: pending jobs become no-ops, SUBMIT and VM_BIND give EPIPE, another file goes on."""
  live.bind((MAP, live.bo, 0, VA, 4096))
  run(live, Stream().wait_mem(VA, 1))
  assert errno_of(lambda: live.submit()) == errno.EPIPE and errno_of(lambda: live.bind()) == errno.EPIPE
  assert live.param(9) == 1
  other = Client()
  assert other.submit().fence == 1 and other.param(9) == 0
  assert live.machine.gpu.idle(20)
  other.close()

@settings(max_examples=60, deadline=None)
@given(ops=st.lists(st.tuples(st.booleans(), st.integers(0, 15), st.integers(1, 8)), min_size=1, max_size=25))
def test_bindings_agree_with_one_owner_per_page(ops: list[tuple[bool, int, int]]) -> None:
  class Counted: bound = 0
  b, bos, pages = vm_bind.Bindings(), [], {}
  for mapping, at, n in ops:
    bo = Counted() if mapping else None
    bos += [bo] if bo is not None else []
    b.replace(at * 4096, n * 4096, vm_bind.Binding(at * 4096, n * 4096, bo, 0) if bo is not None else None) # type: ignore[arg-type]
    for i in range(n): pages[at + i] = (bo, i * 4096) if bo is not None else None
    got = {x.iova // 4096 + i: (x.bo, x.offset + 4096 * i) for x in b.all for i in range(x.size // 4096)}
    assert got == {k: v for k, v in pages.items() if v is not None}
    assert all(x.iova + x.size <= y.iova for x, y in zip(b.all, b.all[1:]))
  assert sum(x.bound for x in bos) == len(b.all)
