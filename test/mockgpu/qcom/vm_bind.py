"""VM_BIND of MSM DRM (6.17 and later): an address space whose mappings the client makes itself, in jobs of a queue.

Checks and their order: msm_ioctl_vm_bind and lookup_op in drivers/gpu/drm/msm/msm_gem_vma.c. A submit of such a file lists no BOs: everything that is
bound is there. Idle bound BOs are never evicted here, which a kernel may do as it brings them back before the next submit runs.
"""
from __future__ import annotations
import errno, os
from typing import TYPE_CHECKING, Any, NamedTuple
from test.mockgpu.qcom.kernel import PAGE, Abi, Entity, Fence, copy_from_user, error
if TYPE_CHECKING: from test.mockgpu.qcom.msm import MSM, Bo, Client, Vm

ABI = Abi("msm.json")
OP = ABI.layout("drm_msm_vm_bind_op")
OP_BYTES = 56                                           # a kernel-side entry: struct msm_vm_bind_op
MAP, MAP_NULL, UNMAP = ABI.MSM_VM_BIND_OP_MAP, ABI.MSM_VM_BIND_OP_MAP_NULL, ABI.MSM_VM_BIND_OP_UNMAP

class Binding(NamedTuple):
  """[iova, iova+size) shows the BO from `offset` on."""
  iova: int
  size: int
  bo: Bo
  offset: int

class Bindings:
  """The mappings of one VM as the client has asked for them. What a job does to the pagetable follows when it runs."""
  def __init__(self) -> None: self.all: list[Binding] = []

  def replace(self, iova: int, size: int, new: Binding | None) -> tuple[list[Binding], list[Binding]]:
    """Takes [iova, iova+size) out, or puts `new` there: (mappings that end, mappings that begin). Those at the edges are split."""
    end = iova + size
    gone = [b for b in self.all if b.iova < end and iova < b.iova + b.size]
    begin = []
    for b in gone:
      if b.iova < iova: begin.append(b._replace(size=iova - b.iova))
      if (tail:=b.iova + b.size - end) > 0: begin.append(Binding(end, tail, b.bo, b.offset + b.size - tail))
    if new is not None: begin.append(new)
    for b in gone:
      self.all.remove(b)
      b.bo.bound -= 1
    for b in begin: b.bo.bound += 1
    self.all = sorted(self.all + begin, key=lambda b: b.iova)
    return gone, begin

def ioctl(m: MSM, c: Client, a: Any) -> None:
  """DRM_IOCTL_MSM_VM_BIND, behind the checks for a GPU and a VM."""
  vm = m.vm(c)
  if vm.unusable: raise error(errno.EPIPE, "the VM is unusable")
  if not c.vm_bind: raise error(errno.EINVAL, "not a VM_BIND file")
  if a.flags & ~ABI.MSM_VM_BIND_FLAGS: raise error(errno.EINVAL, f"flags {a.flags:#x}")
  q = m._queue(c, a.queue_id)
  if not q.flags & ABI.MSM_SUBMITQUEUE_VM_BIND: raise error(errno.EINVAL, f"queue {q.id} is not for VM_BIND")
  out_fd = m.machine.syncs.create() if a.flags & ABI.MSM_VM_BIND_FENCE_FD_OUT else None
  try: fence = _bind(m, c, a, vm, q)
  except BaseException:
    for fd in out_fd or (): os.close(fd)
    raise
  if out_fd is not None: a.fence_fd = m.machine.syncs.install(out_fd, fence)

def _bind(m: MSM, c: Client, a: Any, vm: Vm, q: Any) -> Fence:
  if a.nr_ops * OP_BYTES > 4 << 20: raise error(errno.ENOMEM, f"{a.nr_ops} operations do not fit in one allocation")
  deps = [m.machine.syncs.find(a.fence_fd)] if a.flags & ABI.MSM_VM_BIND_FENCE_FD_IN else []
  wanted = (ABI.MSM_SUBMIT_SYNCOBJ_IN if a.in_syncobjs else 0) | (ABI.MSM_SUBMIT_SYNCOBJ_OUT if a.out_syncobjs else 0)
  resets, outs = m._submit_syncobjs(c, a, wanted, deps)
  table = int.from_bytes(a.op[:8], "little")            # a single operation lies in the struct itself, where otherwise the pointer is
  ops = [_check(vm, OP.unpack(a.op if a.nr_ops == 1 else copy_from_user(table + i * OP.size, OP.size))) for i in range(a.nr_ops)]
  bos = [c.handles.get(op.handle) if op.handle else None for op in ops]
  for op, bo in zip(ops, bos):
    if op.handle and bo is None: raise error(errno.EINVAL, f"handle {op.handle} does not exist")
    if bo is not None and op.obj_offset + op.range > bo.size:
      raise error(errno.EINVAL, f"{op.range} bytes at {op.obj_offset:#x} of a BO of {bo.size}")
  for bo in bos:
    if bo is None: continue
    if bo.madv or bo.purged: raise error(errno.EBUSY, f"BO {bo.info} is DONTNEED or purged")
    m._get_pages(bo)
  steps = [vm.bindings.replace(op.iova, op.range, Binding(op.iova, op.range, bo, op.obj_offset) if bo is not None else None)
           for op, bo in zip(ops, bos)]
  job = Job(m, vm, steps, fence := Fence(q.entity, 0))
  for bo in bos:
    if bo is not None: bo.resv.add(fence, True)
  for handle in resets: c.syncobjs[handle] = None
  for handle in outs: c.syncobjs[handle] = fence
  q.entity.push(job, deps)
  return fence

def _check(vm: Vm, op: Any) -> Any:
  """lookup_op: a kernel reports the last of these that fails, which all give the same errno."""
  if op.flags & ~ABI.MSM_VM_BIND_OP_FLAGS: raise error(errno.EINVAL, f"operation flags {op.flags:#x}")
  for what, v in (("address", op.iova), ("bo_offset", op.obj_offset), ("range", op.range)):
    if v % PAGE: raise error(errno.EINVAL, f"{what} {v:#x} is not a multiple of {PAGE}")
  if not op.range or op.iova < vm.start or op.iova + op.range > vm.start + vm.size:
    raise error(errno.EINVAL, f"{op.range:#x} bytes at {op.iova:#x} are not in the VM")
  if (op.op == MAP) != bool(op.handle): raise error(errno.EINVAL, f"handle {op.handle} of operation {op.op}")
  if op.op == MAP_NULL: raise error(errno.EINVAL, "MAP_NULL needs an SMMU with PRR")
  if op.op not in (MAP, UNMAP): raise error(errno.EINVAL, f"operation {op.op}")
  return op

class Job:
  """Changes of the pagetable, made as soon as what they wait for has signalled."""
  def __init__(self, m: MSM, vm: Vm, steps: list[tuple[list[Binding], list[Binding]]], fence: Fence):
    self.model, self.vm, self.steps, self.fence = m, vm, steps, fence

  def run(self) -> None:
    """A page is mapped by one segment of the space. Dirty lines are written back first: the model's cache belongs to a segment."""
    space = self.vm.space
    space.uche_flush()
    for gone, begin in self.steps:
      for b in gone: space.unmap(b.iova)
      for b in begin:
        space.map(b.iova, b.size, b.bo.mem.ram + b.offset, readonly=bool(b.bo.flags & ABI.MSM_BO_GPU_READONLY), bo=b.bo.info)
    for gone, begin in self.steps:
      for b in (*gone, *begin): b.bo.resv.remove(self.fence)
    self.fence.signal()
    for gone, _ in self.steps:
      for b in gone: self.model.put(b.bo)

def entity() -> Entity:
  """The scheduler of a VM_BIND queue: jobs in order, each when its dependencies have signalled."""
  return Entity(lambda job: job.run())

def close(m: MSM, vm: Vm) -> None:
  """msm_gem_vm_close: waits for the last submit, then takes every mapping down."""
  m.wait(lambda: not vm.resv.busy(True), None)
  for b in list(vm.bindings.all):
    if vm.space.find(b.iova) is not None: vm.space.unmap(b.iova)
    vm.bindings.all.remove(b)
    b.bo.bound -= 1
    m.put(b.bo)

def submit_cmds(cmds: list[tuple]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
  """(IBs, CTX_RESTORE IBs) of a submit of a VM_BIND file, whose cmds name addresses."""
  ibs, restore = [], []
  for typ, idx, offset, size, _, nr_relocs, iova in cmds:
    if nr_relocs: raise error(errno.EINVAL, "nr_relocs must be zero with VM_BIND")
    if idx or offset: raise error(errno.EINVAL, "submit_idx and submit_offset must be zero with VM_BIND")
    if typ == ABI.MSM_SUBMIT_CMD_BUF: ibs.append((iova, size >> 2))
    elif typ == ABI.MSM_SUBMIT_CMD_CTX_RESTORE_BUF: restore.append((iova, size >> 2))
  return ibs, restore
