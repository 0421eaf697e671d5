"""The KGSL model against msm-4.9's rules, one row a rule; and the unmodified tinygrad 0.14.0 driver as a client nobody here wrote."""
from __future__ import annotations
import ctypes, errno, functools, mmap, os, pathlib, re, select, struct, subprocess, sys, tarfile, threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import pytest
from hypothesis import given, settings, strategies as st
from test.mockgpu import qcom
from test.mockgpu.qcom import kgsl
from test.mockgpu.qcom.gpu import FaultRecord
from test.mockgpu.qcom.kernel import ENOTSUPP, GpuViolation, libc, real_mmap
from test.mockgpu.qcom.report import Violation
from test.virtual.kernel_client import RW, HeldGPU, Kgsl, Msm, boot, errno_of
from test.virtual.unmodified import base_archives, environment

BAD = 0xdeadbeef
SVM, VA = 0x700000000, 0x500000000
PREAMBLE, NO_GMEM, SECURE, USER_TS, NO_FT, PER_TS = 0x10, 2, 0x20000, 0x80, 0x200, 0x40
OK_CTX = PREAMBLE | NO_GMEM
CPU_MAP, ALIGN12, READONLY = 0x10000000, 12 << 16, 0x01000000
CONSUMED, RETIRED, QUEUED = 1, 2, 3

@dataclass
class Rule:
  """`do(c)` with a fresh client (`c.ctx`: a context, `c.ib`: the address of a mapped object) gives `want`: 0, an errno, or its value."""
  source: str
  what: str
  do: Callable[[Any], Any]
  want: Any = 0
  settings: dict[str, Any] | None = None

class Client(Kgsl):
  def __init__(self, machine: Any, gpu: HeldGPU, flags: int = OK_CTX):
    super().__init__()
    self.machine, self.gpu = machine, gpu
    self.fds, self.maps = list[int](), list[tuple[int, int]]()
    self.ctx = self.context(flags)
    self.id = self.alloc()
    self.ib = self.mmap(self.id)
  def close(self) -> None:
    self.gpu.close()
    super().close()
    qcom.munmap(self.ib, 4096)
    for fd in self.fds: os.close(fd)
    for m in self.maps: libc.munmap(*m)
  def host(self, size: int = 8192, prot: int = RW) -> int:
    self.maps.append((a:=real_mmap(0, size, prot, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1), size))
    return a

def heap_fd(c: Any, size: int = 4096) -> int:
  with qcom.open_node(qcom.HEAP_NODE) as heap:
    heap.ioctl(0xc0184800, buf:=bytearray(struct.pack("<QIIQ", size, 0, os.O_CLOEXEC | os.O_RDWR, 0)))
  c.fds.append(fd:=struct.unpack_from("<I", buf, 8)[0])
  return fd
def fixed(c: Any, at: int) -> int:
  c.maps.append((at, 4096))
  return c.mmap(c.alloc(), start=at, flags=1 | 0x10)
def user_mem(c: Any, **kw: Any) -> Any: return c("MAP_USER_MEM", **{"memtype": 2, "len": 4096, **kw})
def import_fd(c: Any, fd: int, **kw: Any) -> int:
  return c("GPUOBJ_IMPORT", **{"type": 3, "priv": c.buffer(struct.pack("<i", fd)), "priv_len": 4, **kw}).id
def free(c: Any, id: int, **kw: Any) -> Any: return c("GPUOBJ_FREE", id=id, **kw)
def command(c: Any, **kw: Any) -> int: return c.command(c.ctx, [(c.ib, 16)], **kw)
def set_pwr(c: Any, kind: int = 1, ctx: int | None = None, level: int = 1, size: int = 4, sizebytes: int = 24) -> Any:
  data = struct.pack("<IIQQ", kind, c.ctx if ctx is None else ctx, c.buffer(struct.pack("<I", level)), size)
  return c("SETPROPERTY", type=0x12, value=c.buffer(data), sizebytes=sizebytes)
def syncs(c: Any, *entries: tuple[int, bytes]) -> dict[str, Any]:
  table = b"".join(kgsl.SYNC.struct.pack(c.buffer(data), len(data), kind) for kind, data in entries)
  return {"synclist": c.buffer(table), "syncsize": 24, "numsyncs": len(entries)}
def fault(c: Any, n: int = 1) -> int:
  for _ in range(n):
    errno_of(lambda: command(c))
    c.gpu.finish(status="hang")
  return n

R = Rule
RULES = [
  R("kgsl_ioctl", "unknown number", lambda c: c.file.ioctl(0xc01809f0, bytearray(24)), errno.ENOTTY),
  R("kgsl_ioctl", "only the number selects the handler", lambda c: c.file.ioctl(0xc0040947, bytearray(4)), errno.EINVAL),
  R("kgsl_ioctl", "bad argument pointer", lambda c: c.file.ioctl(c.request("GPUOBJ_ALLOC"), 16), errno.EFAULT),
  # --- memory
  R("kgsl_ioctl_gpuobj_alloc", "size 0", lambda c: c.alloc(0), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_alloc", "over UINT_MAX", lambda c: c.alloc(1 << 32), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_alloc", "secure", lambda c: c.alloc(4096, 8), errno.EOPNOTSUPP),
  R("kgsl_ioctl_gpuobj_alloc", "unknown flags vanish",
    lambda c: c("GPUOBJ_ALLOC", size=100, flags=CPU_MAP | ALIGN12 | 1 << 40).flags, CPU_MAP | ALIGN12),
  R("kgsl_ioctl_gpuobj_alloc", "alignment is capped at 32 MiB",
    lambda c: c("GPUOBJ_ALLOC", size=100, flags=CPU_MAP | 30 << 16).flags >> 16 & 0xff, 25),
  R("kgsl_ioctl_gpuobj_alloc", "write-through becomes write-back", lambda c: c("GPUOBJ_ALLOC", size=100, flags=CPU_MAP | 2 << 26).flags >> 26 & 3, 3),
  R("kgsl_ioctl_gpuobj_alloc", "page sizes, ids from 1",
    lambda c: (lambda r: (r.size, r.mmapsize, r.id))(c("GPUOBJ_ALLOC", size=5000, flags=CPU_MAP)), (8192, 8192, 2)),
  R("kgsl_ioctl_gpuobj_alloc", "out of memory", lambda c: c.alloc(1 << 20), errno.ENOMEM, {"memory": 1 << 19}),
  R("kgsl_ioctl_gpuobj_alloc", "address space full", lambda c: c.alloc(1 << 20, 0), errno.ENOMEM, {"kgsl_va_size": 1 << 19}),
  R("kgsl_ioctl_gpuobj_info", "unknown", lambda c: c("GPUOBJ_INFO", id=9), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_info", "without USE_CPU_MAP mapped at once", lambda c: c("GPUOBJ_INFO", id=c.alloc(4096, 0)).gpuaddr, VA),
  R("kgsl_ioctl_gpuobj_info", "with USE_CPU_MAP no address before mmap", lambda c: c("GPUOBJ_INFO", id=c.alloc()).gpuaddr, 0),
  R("kgsl_ioctl_gpuobj_info", "then the CPU's", lambda c: (lambda r: (r.gpuaddr, r.va_addr))(c("GPUOBJ_INFO", id=c.id)), (SVM, SVM)),
  R("kgsl_ioctl_gpumem_alloc_id", "gives the address", lambda c: c("GPUMEM_ALLOC_ID", size=4096, flags=0).gpuaddr, VA),
  R("kgsl_ioctl_gpumem_get_info", "by address", lambda c: c("GPUMEM_GET_INFO", gpuaddr=c.ib + 100).id, 1),
  R("kgsl_ioctl_gpuobj_free", "unknown", lambda c: free(c, 9), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_free", "twice", lambda c: (free(c, c.id), free(c, c.id)), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_free", "event, foreign context",
    lambda c: free(c, c.id, flags=1, type=1, priv=c.buffer(struct.pack("<II", 99, 1)), len=8), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_free", "event, wrong length", lambda c: free(c, c.id, flags=1, type=1, priv=c.buffer(8), len=4), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_free", "event, negative fence",
    lambda c: free(c, c.id, flags=1, type=2, priv=c.buffer(struct.pack("<i", -1)), len=4), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_free", "event, unknown type", lambda c: free(c, c.id, flags=1, type=7), errno.EINVAL),
  R("kgsl_ioctl_sharedmem_free", "no entry there", lambda c: c("SHAREDMEM_FREE", gpuaddr=BAD), errno.EINVAL),
  R("kgsl_ioctl_sharedmem_free", "any address inside", lambda c: c("SHAREDMEM_FREE", gpuaddr=c.ib + 4095) and 0),
  R("kgsl_mmap", "unknown id", lambda c: c.mmap(9), errno.EINVAL),
  R("kgsl_mmap", "already mapped", lambda c: c.mmap(c.id), errno.EBUSY),
  R("kgsl_mmap", "shorter", lambda c: c.mmap(c.alloc(8192)), errno.ERANGE),
  R("kgsl_mmap", "longer", lambda c: c.mmap(c.alloc(), 8192), errno.ERANGE),
  R("kgsl_mmap", "freed", lambda c: (free(c, i:=c.alloc()), c.mmap(i)), errno.EINVAL),
  R("kgsl_mmap", "MAP_FIXED outside the window", lambda c: c.mmap(c.alloc(), start=0x10000000, flags=1 | 0x10), errno.ENOMEM),
  R("kgsl_mmap", "MAP_FIXED where another object lies", lambda c: c.mmap(c.alloc(), start=c.ib, flags=1 | 0x10), errno.ENOMEM),
  R("kgsl_mmap", "MAP_FIXED where nothing lies", lambda c: fixed(c, SVM + 0x5000000) - SVM, 0x5000000),
  R("kgsl_mmap", "window full", lambda c: c.mmap(c.alloc(1 << 20), 1 << 20), errno.ENOMEM, {"kgsl_va_size": 1 << 19}),
  R("kgsl_ioctl_map_user_mem", "memtype", lambda c: user_mem(c, memtype=0), errno.EOPNOTSUPP),
  R("kgsl_ioctl_map_user_mem", "hostptr 0", lambda c: user_mem(c), errno.EINVAL),
  R("kgsl_ioctl_map_user_mem", "hostptr unaligned", lambda c: user_mem(c, hostptr=c.host() + 64), errno.EINVAL),
  R("kgsl_setup_anon_useraddr", "len 0", lambda c: user_mem(c, hostptr=c.host(), len=0), errno.EINVAL),
  R("kgsl_setup_anon_useraddr", "len no page multiple", lambda c: user_mem(c, hostptr=c.host(), len=100), errno.EINVAL),
  R("kgsl_setup_anon_useraddr", "offset", lambda c: user_mem(c, hostptr=c.host(), offset=4096), errno.EINVAL),
  R("memdesc_sg_virt", "not mapped", lambda c: user_mem(c, hostptr=0x10000), errno.EFAULT),
  R("memdesc_sg_virt", "partly mapped", lambda c: (a:=c.host(), libc.munmap(a + 4096, 4096), user_mem(c, hostptr=a, len=8192)), errno.EFAULT),
  R("check_vma", "read-only memory for a GPU that writes", lambda c: user_mem(c, hostptr=c.host(prot=mmap.PROT_READ)), errno.EFAULT),
  R("check_vma", "read-only memory, GPUREADONLY", lambda c: user_mem(c, hostptr=c.host(prot=mmap.PROT_READ), flags=READONLY) and 0),
  R("kgsl_setup_dmabuf_useraddr", "own memory is EFAULT", lambda c: user_mem(c, hostptr=c.ib), errno.EFAULT),
  R("kgsl_ioctl_map_user_mem", "address of its own", lambda c: user_mem(c, hostptr=c.host()).gpuaddr, VA),
  R("kgsl_ioctl_map_user_mem", "ION is a dma-buf by descriptor", lambda c: user_mem(c, memtype=3, fd=heap_fd(c)).gpuaddr, VA),
  R("kgsl_ioctl_map_user_mem", "ION, no dma-buf", lambda c: user_mem(c, memtype=3, fd=c.file.fd), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_import", "struct length", lambda c: import_fd(c, 3, priv_len=8), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_import", "struct pointer", lambda c: import_fd(c, 3, priv=16), errno.EFAULT),
  R("kgsl_ioctl_gpuobj_import", "negative descriptor", lambda c: import_fd(c, -1), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_import", "closed descriptor", lambda c: import_fd(c, 9999), errno.EBADF),
  R("kgsl_ioctl_gpuobj_import", "not a dma-buf", lambda c: import_fd(c, c.file.fd), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_import", "another type", lambda c: import_fd(c, 3, type=0), ENOTSUPP),
  R("kgsl_ioctl_gpuobj_import", "USE_CPU_MAP is stripped", lambda c: c("GPUOBJ_INFO", id=import_fd(c, heap_fd(c), flags=CPU_MAP)).gpuaddr, VA),
  R("kgsl_ioctl_gpuobj_sync", "none", lambda c: c("GPUOBJ_SYNC"), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_sync", "129", lambda c: c("GPUOBJ_SYNC", objs=c.buffer(24 * 129), obj_len=24, count=129), errno.EINVAL),
  R("kgsl_ioctl_gpuobj_sync", "128", lambda c: c("GPUOBJ_SYNC", objs=c.buffer(24 * 128), obj_len=24, count=128) and 0),
  # --- contexts
  R("adreno_drawctxt_create", "PREAMBLE and NO_GMEM_ALLOC", lambda c: c.context(PREAMBLE), errno.EINVAL),
  R("adreno_drawctxt_create", "secure", lambda c: c.context(OK_CTX | SECURE), errno.EOPNOTSUPP),
  R("adreno_drawctxt_create", "PER_CONTEXT_TS and priority 8 are forced",
    lambda c: c("DRAWCTXT_CREATE", flags=OK_CTX).flags, OK_CTX | PER_TS | 8 << 12),
  R("adreno_drawctxt_create", "chosen priority", lambda c: c("DRAWCTXT_CREATE", flags=OK_CTX | 3 << 12).flags >> 12 & 15, 3),
  R("adreno_drawctxt_create", "too many", lambda c: [c.context() for _ in range(400)], errno.ENOSPC),
  R("kgsl_ioctl_drawctxt_destroy", "unknown", lambda c: c("DRAWCTXT_DESTROY", drawctxt_id=99), errno.EINVAL),
  R("kgsl_ioctl_drawctxt_destroy", "another file's", lambda c: (o:=Kgsl(), o("DRAWCTXT_DESTROY", drawctxt_id=c.ctx)), errno.EINVAL),
  # --- commands
  R("kgsl_ioctl_gpu_command", "too many IBs before the context", lambda c: c.command(99, numcmds=100001), errno.EINVAL),
  R("kgsl_ioctl_gpu_command", "too many syncpoints", lambda c: c.command(c.ctx, numsyncs=33), errno.EINVAL),
  R("kgsl_ioctl_gpu_command", "context", lambda c: c.command(99), errno.EINVAL),
  R("kgsl_ioctl_gpu_command", "another file's context", lambda c: Kgsl().command(c.ctx), errno.EINVAL),
  R("kgsl_drawobj_cmd_add_cmdlist", "no list", lambda c: c.command(c.ctx, numcmds=1), errno.EINVAL),
  R("kgsl_drawobj_cmd_add_cmdlist", "entry size 0", lambda c: command(c, cmdsize=0), errno.EINVAL),
  R("kgsl_drawobj_cmd_add_cmdlist", "bad pointer", lambda c: command(c, cmdlist=16), errno.EFAULT),
  R("kgsl_drawobj_cmd_add_cmdlist", "no IB flag", lambda c: c.command(c.ctx, [(c.ib, 16)], ib_flags=8), errno.EINVAL),
  R("kgsl_drawobj_cmd_add_memlist", "no MEMOBJ flag", lambda c: command(c, objlist=c.buffer(32), objsize=32, numobjs=1), errno.EINVAL),
  R("_verify_ib", "size 0", lambda c: c.command(c.ctx, [(c.ib, 0)]), errno.EINVAL),
  R("_verify_ib", "over 0xfffff dwords", lambda c: c.command(c.ctx, [(c.ib, 0x400000)]), errno.EINVAL),
  R("_verify_ib", "outside the pagetable's range", lambda c: c.command(c.ctx, [(0x1000, 16)]), errno.EINVAL),
  R("_verify_ib", "whether it is mapped is not checked", lambda c: c.command(c.ctx, [(SVM + 0x100000, 16)]), 1),
  R("adreno_dispatcher_queue_cmds", "timestamps count from 1", lambda c: (command(c), command(c), c.command(c.context(), [(c.ib, 16)])), (1, 2, 1)),
  R("adreno_dispatcher_queue_cmds", "no IBs is a marker", lambda c: c.command(c.ctx), 1),
  R("adreno_dispatcher_queue_cmds", "a marker retires in order",
    lambda c: (command(c), c.command(c.ctx), c.gpu.finish(), c.timestamp(c.ctx), c.gpu.finish(), c.timestamp(c.ctx))[3::2], (1, 2)),
  R("adreno_dispatcher_queue_cmds", "invalid context", lambda c: (fault(c, 4), command(c)), errno.EDEADLK),
  R("get_timestamp", "user timestamps must grow",
    lambda c: (x:=c.context(OK_CTX | USER_TS), c.command(x, timestamp=7), c.command(x, timestamp=7)), errno.ERANGE),
  R("get_timestamp", "user timestamp", lambda c: c.command(c.context(OK_CTX | USER_TS), timestamp=7), 7),
  R("kgsl_drawobj_sync_add_sync", "type", lambda c: command(c, **syncs(c, (9, b"\0" * 8))), errno.EINVAL),
  R("kgsl_drawobj_sync_add_sync", "unknown context", lambda c: command(c, **syncs(c, (0, struct.pack("<II", 99, 1)))), errno.EINVAL),
  R("kgsl_drawobj_sync_add_sync", "future timestamp", lambda c: command(c, **syncs(c, (0, struct.pack("<II", c.ctx, 1)))), errno.EINVAL),
  R("kgsl_drawobj_sync_add_sync", "no sync_file", lambda c: command(c, **syncs(c, (1, struct.pack("<i", c.file.fd)))), errno.EINVAL),
  # --- timestamps
  R("kgsl_ioctl_cmdstream_readtimestamp_ctxtid", "type", lambda c: c.timestamp(c.ctx, 4), errno.EINVAL),
  R("kgsl_ioctl_cmdstream_readtimestamp_ctxtid", "context", lambda c: c.timestamp(99), errno.EINVAL),
  R("kgsl_ioctl_device_waittimestamp_ctxtid", "context", lambda c: c.wait(99, 0), errno.EINVAL),
  R("kgsl_ioctl_device_waittimestamp_ctxtid", "not queued yet", lambda c: c.wait(c.ctx, 1), errno.EINVAL),
  R("kgsl_ioctl_device_waittimestamp_ctxtid", "0 has always retired", lambda c: c.wait(c.ctx, 0), None),
  R("kgsl_ioctl_device_waittimestamp_ctxtid", "relative milliseconds", lambda c: c.wait(c.ctx, command(c), 5), errno.ETIMEDOUT),
  R("kgsl_ioctl_device_waittimestamp_ctxtid", "invalid context", lambda c: (fault(c, 4), c.wait(c.ctx, 1)), errno.EDEADLK),
  R("kgsl_ioctl_device_waittimestamp_ctxtid", "user timestamps may lie ahead", lambda c: c.wait(c.context(OK_CTX | USER_TS), 5), errno.ETIMEDOUT),
  R("kgsl_ioctl_timestamp_event", "type", lambda c: c("TIMESTAMP_EVENT", type=1, context_id=c.ctx), errno.EINVAL),
  # --- properties
  R("adreno_getproperty", "unknown", lambda c: c.property(0x99, 4), errno.EINVAL),
  R("adreno_getproperty", "size", lambda c: c.property(1, 36), errno.EINVAL),
  R("adreno_getproperty", "bad pointer", lambda c: c("DEVICE_GETPROPERTY", type=1, value=16, sizebytes=40), errno.EFAULT),
  R("adreno_getproperty", "DEVICE_INFO, gpu_id stays 0",
    lambda c: struct.unpack("<IIIxxxxQIxxxxQ", c.property(1, 40)), (1, 0x06030002, 1, 0x100000, 0, 0x100000)),
  R("adreno_getproperty", "MMU_ENABLE takes more room", lambda c: c.property(6, 8)[:4], b"\1\0\0\0"),
  R("adreno_getproperty", "UCHE_GMEM_VADDR", lambda c: c.property(0x13, 8), struct.pack("<Q", 0x100000)),
  R("adreno_getproperty", "DEVICE_BITNESS", lambda c: c.property(0x18, 4), struct.pack("<I", 48)),
  R("adreno_getproperty", "VERSION, 16 bytes", lambda c: struct.unpack("<4I", c.property(8, 16))[:2], (3, 14)),
  R("adreno_getproperty", "RESET_STAT, context", lambda c: c.property(9, 4, struct.pack("<I", 99)), errno.EINVAL),
  R("adreno_getproperty", "RESET_STAT, innocent life", lambda c: c.property(9, 4, struct.pack("<I", c.ctx)), bytes(4)),
  R("adreno_setproperty", "unknown", lambda c: c("SETPROPERTY", type=1, sizebytes=4), errno.EINVAL),
  R("adreno_setproperty", "constraint size", lambda c: set_pwr(c, sizebytes=20), errno.EINVAL),
  R("adreno_set_constraint", "context", lambda c: set_pwr(c, ctx=99), errno.EINVAL),
  R("adreno_set_constraint", "data size", lambda c: set_pwr(c, size=8), errno.EINVAL),
  R("adreno_set_constraint", "level", lambda c: set_pwr(c, level=2), errno.EINVAL),
  R("adreno_set_constraint", "type", lambda c: set_pwr(c, kind=9), errno.EINVAL),
  R("adreno_set_constraint", "max, then none",
    lambda c: (set_pwr(c), c.machine.kgsl.contexts[c.ctx].pwrlevel, set_pwr(c, kind=0), c.machine.kgsl.contexts[c.ctx].pwrlevel)[1::2], (1, None)),
]

@pytest.fixture
def client(request: Any) -> Any:
  param = dict(getattr(request, "param", {}))
  flags = param.pop("flags", OK_CTX)
  c = Client(*boot(**param), flags=flags)
  yield c
  c.close()

@pytest.mark.parametrize("rule", [pytest.param(r, id=f"{r.source}-{r.what}".replace(" ", "-")) for r in RULES])
def test_rule(rule: Rule) -> None:
  c = Client(*boot(**(rule.settings or {})))
  try:
    try: got = rule.do(c)
    except OSError as e: got = e.errno
    if rule.want == 0 and not isinstance(got, int): got = 0
    assert got == rule.want, f"{rule.source}: {rule.what}; the model logged {list(c.machine.dmesg)[-1:]}"
  finally: c.close()

# *** the order of checks

# In the order of kgsl_ioctl_gpu_command and adreno_dispatcher_queue_cmds: errno, and what it changes
DEFECTS: dict[str, tuple[int, Callable[[Any, dict[str, Any]], Any]]] = {
  "too many": (errno.EINVAL, lambda c, s: s.update(numsyncs=33, synclist=16, syncsize=24)),
  "context": (errno.EINVAL, lambda c, s: s.update(context_id=99)),
  "syncs": (errno.EFAULT, lambda c, s: s.update(numsyncs=s.get("numsyncs", 1), synclist=16, syncsize=24)),
  "IB flags": (errno.EINVAL, lambda c, s: s.update(ib_flags=8)),
  "objects": (errno.EFAULT, lambda c, s: s.update(objlist=16, objsize=32, numobjs=1)),
  "invalid context": (errno.EDEADLK, lambda c, s: fault(c, 4)),
  "IB size": (errno.EINVAL, lambda c, s: s.update(ibs=[(c.ib, 0)])),
}

@settings(max_examples=80, deadline=None)
@given(wrong=st.sets(st.sampled_from(sorted(DEFECTS)), min_size=1, max_size=4))
def test_the_first_of_several_wrong_things_is_reported(wrong: set[str]) -> None:
  c = Client(*boot())
  try:
    s: dict[str, Any] = {"ibs": [(c.ib, 16)]}
    for name in sorted(wrong, reverse=True): DEFECTS[name][1](c, s)      # "too many" before "syncs"
    first = next(name for name in DEFECTS if name in wrong)
    got = errno_of(lambda: c.command(c.ctx, s.pop("ibs"), **s))
    assert got == DEFECTS[first][0], f"{sorted(wrong)}: {first} comes first; {list(c.machine.dmesg)[-1:]}"
  finally: c.close()

# *** dispatch and memory

def test_nothing_is_copied_back_on_failure(client: Any) -> None:
  buf = bytearray(client.abi.layout("kgsl_gpuobj_alloc").struct.pack(0, 0x123, 5, 6, 7, 0, 0))
  before = bytes(buf)
  assert errno_of(lambda: client.file.ioctl(client.request("GPUOBJ_ALLOC"), buf)) == errno.EINVAL
  assert bytes(buf) == before

def test_gpu_address_is_the_cpu_address(client: Any) -> None:
  for size in (4096, 1 << 20, 12288):
    a = client.mmap(i:=client.alloc(size), size)
    assert SVM <= a < SVM + (1 << 32) and client("GPUOBJ_INFO", id=i).gpuaddr == a and ctypes.string_at(a, size) == bytes(size)
    ctypes.memmove(a + size - 4, b"tail", 4)
    assert client.machine.kgsl.space.read(a + size - 4, 4) == b"tail"
    client.maps.append((a, size))
  assert client.mmap(client.alloc(4096, CPU_MAP | 21 << 16)) % (1 << 21) == 0
  client.maps.append((client("GPUOBJ_INFO", id=5).gpuaddr, 4096))

def test_mmap_avoids_what_the_process_has_there(client: Any) -> None:
  blocked = real_mmap(client.ib + 4096, 8192, RW, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000, -1)
  a = client.mmap(client.alloc())
  assert not blocked <= a < blocked + 8192 and a != client.ib
  client.maps += [(blocked, 8192), (a, 4096)]
  hint = SVM + 0x4000000
  client.maps.append((b:=client.mmap(client.alloc(), start=hint), 4096))
  assert b == hint

def test_object_goes_with_free_and_munmap_in_any_order(client: Any) -> None:
  space = client.machine.kgsl.space
  for order in ("free first", "munmap first"):
    a = client.mmap(i:=client.alloc())
    steps = [lambda i=i: free(client, i), lambda a=a: qcom.munmap(a, 4096)]
    for n, step in enumerate(steps if order == "free first" else steps[::-1]):
      assert space.find(a) is not None, (order, n)
      step()
    assert space.find(a) is None and client.alloc() == i
    free(client, i)

def test_free_does_not_wait_and_event_free_does(client: Any) -> None:
  a, b = client.alloc(4096, 0), client.alloc(4096, 0)
  ts = command(client)
  free(client, b, flags=1, type=1, priv=client.buffer(struct.pack("<II", client.ctx, ts)), len=8)
  free(client, a)
  assert errno_of(lambda: client("GPUOBJ_INFO", id=a)) == errno.EINVAL and client("GPUOBJ_INFO", id=b).size == 4096
  client.gpu.finish()
  assert errno_of(lambda: client("GPUOBJ_INFO", id=b)) == errno.EINVAL

def test_host_memory_is_seen_by_the_gpu_after_cache_maintenance(client: Any) -> None:
  host = client.host()
  ctypes.memmove(host, b"host", 4)
  m, part = user_mem(client, hostptr=host, len=8192), user_mem(client, hostptr=host + 4096)
  space = client.machine.kgsl.space
  assert m.gpuaddr != host and space.read(m.gpuaddr, 4) == bytes(4)
  qcom.cpu_cache("clean", host, 4)
  assert space.read(m.gpuaddr, 4) == b"host"
  space.write(m.gpuaddr + 4096, b"gpu!")
  assert ctypes.string_at(host + 4096, 4) == bytes(4) and space.read(part.gpuaddr, 4) == b"gpu!"
  qcom.cpu_cache("invalidate", host + 4096, 4)
  assert ctypes.string_at(host + 4096, 4) == b"gpu!"
  ctypes.memmove(host + 64, b"lost", 4)                 # dirty lines that are dropped, and their neighbours
  ctypes.memmove(host + 128, b"kept", 4)
  qcom.cpu_cache("invalidate", host + 64, 4)
  qcom.cpu_cache("flush", host + 128, 4)
  assert ctypes.string_at(host + 64, 4) == bytes(4) and ctypes.string_at(host + 128, 4) == space.read(m.gpuaddr + 128, 4) == b"kept"
  for gpuaddr in (m.gpuaddr, part.gpuaddr): client("SHAREDMEM_FREE", gpuaddr=gpuaddr)
  assert space.find(m.gpuaddr) is None and ctypes.string_at(host, 4) == b"host" and not client.machine.kgsl.host.maps

def test_a_cached_dmabuf_needs_sync_in_both_directions(client: Any) -> None:
  """drivers/dma-buf/heaps/system_heap.c: attaching cleans; later the end of a CPU write cleans, and the start of a CPU read invalidates."""
  fd = heap_fd(client)
  def cpu(data: bytes) -> None: os.pwrite(fd, data, 0)
  cpu(b"first")
  at = client("GPUOBJ_INFO", id=import_fd(client, fd)).gpuaddr
  space = client.machine.kgsl.space
  assert space.read(at, 5) == b"first"
  cpu(b"later")
  assert space.read(at, 5) == b"first"
  qcom.dmabuf_sync(fd, 6)
  assert space.read(at, 5) == b"later"
  space.write(at, b"gpu's")
  assert os.pread(fd, 5, 0) == b"later"
  qcom.dmabuf_sync(fd, 1)
  assert os.pread(fd, 5, 0) == b"gpu's"
  for args, code in (((fd, 8), errno.EINVAL), ((fd, 4), errno.EINVAL), ((client.file.fd, 1), errno.ENOTTY), ((9999, 1), errno.EBADF)):
    assert errno_of(functools.partial(qcom.dmabuf_sync, *args)) == code

def test_dmabuf_of_the_msm_side_is_shared(client: Any) -> None:
  m = Msm()
  cpu = m.mmap(h:=m.new())
  ctypes.memmove(cpu, b"camera", 6)
  client.fds.append(fd:=m.export(h))
  at = client("GPUOBJ_INFO", id=import_fd(client, fd)).gpuaddr
  assert client.machine.kgsl.space.read(at, 6) == b"camera"
  qcom.munmap(cpu, 4096)
  m.close()
  assert client.machine.kgsl.space.read(at, 6) == b"camera"

def test_memory_is_the_process_s_contexts_the_file_s(client: Any) -> None:
  other = Kgsl()
  assert other("GPUOBJ_INFO", id=client.id).gpuaddr == client.ib
  x = other.context()
  assert other.command(x, [(client.ib, 16)]) == 1 and client.gpu.jobs[0].resident is None
  client.gpu.finish()
  other.close()
  assert client.machine.kgsl.live()["entries"] == 1 and x not in client.machine.kgsl.contexts

def test_closing_the_last_file_releases_everything() -> None:
  machine, gpu = boot()
  c = Kgsl()
  c.context()
  a = c.mmap(c.alloc(1 << 20), 1 << 20)
  c.alloc(1 << 16, 0)
  c.close()
  assert machine.kgsl.live() | {"clients": 0, "contexts": 0, "entries": 1, "mappings": 1} == machine.kgsl.live()   # the CPU still maps one
  qcom.munmap(a, 1 << 20)
  assert not any(machine.kgsl.live().values()) and machine.pages == 0

def test_names_and_types_are_metadata(client: Any) -> None:
  client("GPUOBJ_SET_INFO", id=client.id, flags=3, metadata=client.buffer(b"weights\0"), metadata_len=8, type=10)
  assert client.machine.kgsl.entries[client.id].info.name == "weights" and client("GPUOBJ_INFO", id=client.id).flags >> 8 & 0xff == 10
  assert errno_of(lambda: client("GPUOBJ_SET_INFO", id=client.id, flags=1, metadata=client.buffer(99), metadata_len=99)) == errno.EINVAL
  assert errno_of(lambda: client("GPUOBJ_SET_INFO", id=99)) == errno.EINVAL
  client("GPUMEM_SYNC_CACHE", id=client.id, op=3)
  client("GPUMEM_SYNC_CACHE", gpuaddr=client.ib, op=3)
  assert errno_of(lambda: client("GPUMEM_SYNC_CACHE", id=99)) == errno.EINVAL

def test_host_memory_at_its_own_address(client: Any) -> None:
  """MAP_USER_MEM with USE_CPU_MAP: the GPU uses the pointer itself, if it lies in the shared window."""
  at = real_mmap(SVM + 0x8000000, 4096, RW, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000, -1)
  client.maps.append((at, 4096))
  assert user_mem(client, hostptr=at, flags=CPU_MAP).gpuaddr == at
  assert errno_of(lambda: user_mem(client, hostptr=client.host(), flags=CPU_MAP)) == errno.ENOMEM
  assert client.machine.kgsl.live()["entries"] == 2

def test_mmap_hint_that_the_process_occupies(client: Any) -> None:
  hint = real_mmap(SVM + 0x9000000, 4096, RW, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000, -1)
  client.maps.append((hint, 4096))
  a = client.mmap(client.alloc(), start=hint)
  assert a != hint and client.machine.kgsl.svm.used == 2 * 4096
  client.maps.append((a, 4096))

def test_no_gpu() -> None:
  boot(gpu=False)
  before = len(os.listdir("/proc/self/fd"))
  assert errno_of(Kgsl) == errno.ENODEV and len(os.listdir("/proc/self/fd")) == before

def test_readonly_objects(client: Any) -> None:
  a = client.mmap(client.alloc(4096, CPU_MAP | READONLY))
  assert client.machine.kgsl.space.find(a).flags & 2 == 0
  client.maps.append((a, 4096))

# *** timestamps, waiting, ordering

def test_timestamps_move_in_order(client: Any) -> None:
  assert (command(client), command(client)) == (1, 2)
  assert [client.timestamp(client.ctx, k) for k in (CONSUMED, RETIRED, QUEUED)] == [0, 0, 2]
  client.gpu.finish()
  assert [client.timestamp(client.ctx, k) for k in (CONSUMED, RETIRED, QUEUED)] == [1, 1, 2]
  client.gpu.finish_in(0.03)
  client.wait(client.ctx, 2, 5000)
  assert client.timestamp(client.ctx) == 2

@pytest.mark.parametrize("forever", [0, 0xffffffff])
def test_wait_forever(client: Any, forever: int) -> None:
  ts = command(client)
  client.gpu.finish_in(0.03)
  client.wait(client.ctx, ts, forever)

def test_timestamps_wrap(client: Any) -> None:
  ctx = client.machine.kgsl.contexts[client.ctx]
  ctx.queued = ctx.retired = 0xfffffffe
  assert [command(client) for _ in range(3)] == [0xffffffff, 0, 1]
  assert errno_of(lambda: client.wait(client.ctx, 2)) == errno.EINVAL
  client.gpu.finish(2)
  client.wait(client.ctx, 0)
  assert errno_of(lambda: client.wait(client.ctx, 1)) == errno.ETIMEDOUT

def test_commands_wait_for_other_contexts_and_fences(client: Any) -> None:
  other = client.context()
  ts = command(client)
  client.command(other, [(client.ib, 16)], **syncs(client, (0, struct.pack("<II", client.ctx, ts))))
  assert len(client.gpu.jobs) == 1
  client("TIMESTAMP_EVENT", type=2, context_id=other, timestamp=1, priv=(p:=client.buffer(4)), len=4)
  client.fds.append(fd:=struct.unpack("<i", client.bytes_at(p, 4))[0])
  client.command(client.ctx, **syncs(client, (1, struct.pack("<i", fd))))       # sync only: what follows waits
  assert command(client) == 2
  assert len(client.gpu.jobs) == 1 and select.select([fd], [], [], 0)[0] == []
  client.gpu.finish()
  assert len(client.gpu.jobs) == 1
  client.gpu.finish()
  assert select.select([fd], [], [], 0)[0] == [fd] and len(client.gpu.jobs) == 1

@pytest.mark.parametrize("client", [{"kgsl_wait_s": 0.02}], indirect=True)
def test_a_full_queue_blocks_then_times_out(client: Any) -> None:
  for _ in range(65): command(client)
  assert errno_of(lambda: command(client)) == errno.ETIMEDOUT
  client.machine.config.kgsl_wait_s = 5
  client.gpu.finish_in(0.03)
  assert command(client) == 66

def test_fences_of_timestamps_still_to_come(client: Any) -> None:
  client("TIMESTAMP_EVENT", type=2, context_id=client.ctx, timestamp=2, priv=(p:=client.buffer(4)), len=4)
  client.fds.append(fd:=struct.unpack("<i", client.bytes_at(p, 4))[0])
  object_ = client.alloc(4096, 0)
  free(client, object_, flags=1, type=2, priv=client.buffer(struct.pack("<i", fd)), len=4)
  for n in (1, 2):
    assert select.select([fd], [], [], 0)[0] == [] and client("GPUOBJ_INFO", id=object_).size == 4096
    assert command(client) == n
    client.gpu.finish()
  assert select.select([fd], [], [], 0)[0] == [fd] and errno_of(lambda: client("GPUOBJ_INFO", id=object_)) == errno.EINVAL
  client("TIMESTAMP_EVENT", type=2, context_id=client.ctx, timestamp=1, priv=p, len=4)
  client.fds.append(fd:=struct.unpack("<i", client.bytes_at(p, 4))[0])
  assert select.select([fd], [], [], 0)[0] == [fd]     # long retired
  before = len(os.listdir("/proc/self/fd"))
  assert errno_of(lambda: client("TIMESTAMP_EVENT", type=2, context_id=client.ctx, timestamp=9, priv=16, len=4)) == errno.EFAULT
  assert len(os.listdir("/proc/self/fd")) == before

# *** faults

def test_eproto_queues_but_hides_the_timestamp(client: Any) -> None:
  command(client)
  client.gpu.finish(status="fault", faults=[FaultRecord(BAD, False, "TRANSLATION", "UCHE")])
  client.wait(client.ctx, 1)                           # recovered: no error here
  with pytest.raises(OSError) as e: command(client, timestamp=77)
  assert e.value.errno == errno.EPROTO and client.last.timestamp == 77 and client.timestamp(client.ctx, QUEUED) == 2
  assert command(client) == 3
  client.gpu.finish(2)
  client.wait(client.ctx, 3)

@pytest.mark.parametrize("client", [{"flags": OK_CTX | NO_FT}], indirect=True)
def test_no_fault_tolerance_invalidates_at_once(client: Any) -> None:
  """tinygrad's context: pending timestamps are forced, waiters wake with EDEADLK, for ever; memory and other contexts live on."""
  for _ in range(3): command(client)
  t = client.gpu.finish_in(0.03, status="hang")
  assert errno_of(lambda: client.wait(client.ctx, 3, 0xffffffff)) == errno.EDEADLK
  t.join()
  assert client.timestamp(client.ctx) == 3 and errno_of(lambda: command(client)) == errno.EDEADLK
  client.gpu.finish(2)
  assert [len(j.ibs) for j in client.gpu.done] == [1, 0, 0]          # nothing of an invalid context runs
  new = client.context()
  assert client.command(new, [(client.ib, 16)]) == 1

def test_four_faults_in_three_seconds_invalidate() -> None:
  now = [10**9]
  c = Client(*boot(clock=lambda: now[0]))
  fault(c, 3)
  now[0] += 4 * 10**9
  fault(c, 3)
  assert errno_of(lambda: command(c)) == errno.EPROTO and command(c) == 8
  c.gpu.finish(status="hang")
  assert errno_of(lambda: command(c)) == errno.EDEADLK
  c.close()

def test_reset_status_names_guilty_and_innocent(client: Any) -> None:
  def status(x: int) -> int: return struct.unpack("<I", client.property(9, 4, struct.pack("<I", x)))[0]
  bystander, idle = client.context(), client.context()
  command(client)
  client.command(bystander, [(client.ib, 16)])
  client.gpu.finish(status="hang")
  assert (status(client.ctx), status(bystander), status(idle)) == (1, 2, 0)
  assert (status(client.ctx), status(bystander)) == (0, 0)           # reading clears

def test_destroy_waits_for_the_gpu_and_detaches(client: Any) -> None:
  x = client.context()
  ts = client.command(x, [(client.ib, 16)])
  got: list[int] = []
  t = threading.Thread(target=lambda: got.append(errno_of(lambda: client.wait(x, ts, 0xffffffff))))
  t.start()
  client.gpu.finish_in(0.05)
  client("DRAWCTXT_DESTROY", drawctxt_id=x)
  t.join()
  assert got in ([errno.ENOENT], [0]) and client.gpu.done and client.context() == x

def test_the_waiter_is_told_of_violations(client: Any) -> None:
  ts = command(client)
  client.gpu.finish(reports=[Violation("stale_line", "missing invalidate")])
  with pytest.raises(GpuViolation, match="missing invalidate"): client.wait(client.ctx, ts)
  client.wait(client.ctx, ts)

# *** the rest

@pytest.mark.parametrize("client", [{"fail": {"GPUOBJ_ALLOC": {2: errno.ENOMEM}, "GPU_COMMAND": {range(1, 3): errno.EINTR}}}], indirect=True)
def test_failures_on_order(client: Any) -> None:
  assert [errno_of(lambda: client.alloc()) for _ in range(2)] == [errno.ENOMEM, 0]
  assert [errno_of(lambda: command(client)) for _ in range(3)] == [errno.EINTR, errno.EINTR, 0]

def test_sysfs_files() -> None:
  boot(sysfs={"idle_timer": "4294967276"})
  files = qcom.MockFileIOInterface
  assert files("/sys/class/kgsl/kgsl-3d0/idle_timer").read() == "4294967276\n" and files.exists("/sys/class/kgsl/kgsl-3d0/gpu_model")
  f = files("/sys/class/kgsl/kgsl-3d0/idle_timer", os.O_RDWR)
  f.write("10")
  assert f.read().splitlines()[0] == "10"

def test_command_log(client: Any) -> None:
  command(client)
  assert client.machine.kgsl.commands[-1] == (client.ctx, 1, 0, [(client.ib, 4)])
  assert client.machine.kgsl.live()["pending"] == 1

# *** the unmodified driver

def test_unmodified_tinygrad_passes_its_tiny_tests(tmp_path: pathlib.Path) -> None:
  """DEV=MOCK+QCOM:IR3 with the pristine wheel: its own driver, its own test/test_tiny.py, strict apart from what that driver is known for."""
  (tmp_path / "run").mkdir()
  env = environment(tmp_path / "wheel")
  with tarfile.open(base_archives()[0]) as t:
    tiny = t.extractfile("tinygrad-0.14.0/test/test_tiny.py")
    assert tiny is not None
    (tmp_path / "run" / "test_tiny.py").write_bytes(tiny.read())
  run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "test_tiny.py"],
                       cwd=tmp_path / "run", env=env, capture_output=True, text=True, timeout=550)
  assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
  passed = re.search(r"(\d+) passed", run.stdout)
  assert passed is not None and int(passed[1]) >= 19, run.stdout[-500:]
