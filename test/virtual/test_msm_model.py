"""The MSM DRM model against the kernel's rules, one row a rule: where the kernel says so, what is done, what comes back."""
from __future__ import annotations
import ctypes, errno, fcntl, json, mmap, os, resource, select, signal, struct, threading, time
from dataclasses import dataclass
from collections.abc import Callable
from typing import Any
import pytest
from hypothesis import given, settings, strategies as st
from test.mockgpu import qcom
from test.mockgpu.qcom import msm
from test.mockgpu.qcom.kernel import ETOOSMALL, GpuViolation, libc, real_mmap
from test.virtual.rig import Stream
from test.virtual.kernel_client import CACHED, COHERENT, READ, RW, SUBMIT_3D, UNCACHED, WC, WRITE, HeldGPU, Msm, boot, deadline, errno_of

ALL, OLD, NEW = ("6.1", "6.6", "6.12", "7.2"), ("6.1", "6.6"), ("6.12", "7.2")
NO_IMPLICIT, FD_IN, FD_OUT, SUDO, SYNC_IN, SYNC_OUT, SN_IN = (1 << b for b in (31, 30, 29, 28, 27, 26, 25))
BAD = 0xdeadbeef                                       # a handle or address nobody has

@dataclass
class Rule:
  """`do(c)` with a fresh client (`c.bo`: a 4 KiB WC BO) gives `want`: 0, an errno, or for do's that return a value, that value."""
  source: str
  what: str
  do: Callable[[Any], Any]
  want: Any = 0
  kernels: tuple[str, ...] = ("6.12",)
  settings: dict[str, Any] | None = None
  def __str__(self) -> str: return f"{self.source}: {self.what}".replace(" ", "-").replace("/", "|")

def cmd(c: Any, **kw: Any) -> Any: return c.submit([(c.bo, READ)], [(1, 0, 0, 16)], **kw)
def sync(c: Any, *entries: tuple[int, int, int]) -> int: return c.buffer(b"".join(msm.SYNCOBJ.struct.pack(*e) for e in entries))
def syncobj(c: Any, flags: int = 0) -> int: return c("SYNCOBJ_CREATE", flags=flags).handle
def purged(c: Any) -> int:
  c.mmap(h:=c.new())
  c("GEM_MADVISE", handle=h, madv=1)
  c.machine.msm.shrink()
  return h

R = Rule
RULES = [
  # --- drm_ioctl
  R("drm_ioctl", "a number no driver has", lambda c: c.file.ioctl(0xc01864f0, bytearray(24)), errno.EINVAL),
  R("drm_ioctl", "0x49 is a hole", lambda c: c.file.ioctl(0xc0186449, bytearray(24)), errno.EINVAL, ALL),
  R("drm_ioctl", "VM_BIND before drm_gpuvm", lambda c: c.file.ioctl(c.abi.ioctls["DRM_IOCTL_MSM_VM_BIND"], bytearray(88)), errno.EINVAL, ALL),
  R("drm_ioctl", "PERFCNTR_CONFIG is 7.2's",
    lambda c: c.file.ioctl(c.abi.ioctls["DRM_IOCTL_MSM_PERFCNTR_CONFIG"], bytearray(32)), errno.EINVAL, ALL[:3]),
  R("drm_ioctl", "a bad argument pointer", lambda c: c.file.ioctl(c.request("GEM_NEW"), 16), errno.EFAULT),
  R("drm_ioctl", "a NULL argument pointer", lambda c: c.file.ioctl(c.request("GEM_NEW"), 0), errno.EFAULT),
  R("drm_ioctl", "a shorter struct: the missing tail is zero",
    lambda c: c.file.ioctl(c.request("GET_PARAM") & ~(0x3fff << 16) | 16 << 16, bytearray(struct.pack("<IIQ", 0x10, 3, 0)))),
  R("drm_ioctl", "a longer struct: the tail is ignored",
    lambda c: c.file.ioctl(c.request("GET_PARAM") & ~(0x3fff << 16) | 40 << 16, bytearray(struct.pack("<IIQII", 0x10, 3, 0, 0, 0) + b"\xff" * 16))),
  # --- adreno_get_param, adreno_set_param
  R("msm_ioctl_get_param", "pipe is not 3D0", lambda c: c.param(3, pipe=1), errno.EINVAL),
  R("msm_ioctl_get_param", "pad", lambda c: c.param(3, pad=1), errno.EINVAL),
  R("msm_ioctl_get_param", "the pipe is checked before the GPU", lambda c: c.param(3, pipe=0), errno.EINVAL, ALL, {"gpu": False}),
  R("msm_ioctl_get_param", "no GPU bound", lambda c: c.param(3), errno.ENXIO, ALL, {"gpu": False}),
  R("adreno_get_param", "len", lambda c: c.param(3, len=4), errno.EINVAL),
  R("adreno_get_param", "unknown", lambda c: c.param(0x77), errno.EINVAL),
  R("adreno_get_param", "write-only", lambda c: c.param(0xc), errno.EINVAL),
  R("adreno_get_param", "GPU_ID", lambda c: c.param(1), 630),
  R("adreno_get_param", "GMEM_SIZE", lambda c: c.param(2), 1 << 20),
  R("adreno_get_param", "CHIP_ID", lambda c: c.param(3), 0x06030002),
  R("adreno_get_param", "MAX_FREQ", lambda c: c.param(4), 710_000_000),
  R("adreno_get_param", "TIMESTAMP", lambda c: c.param(5), 123456789),
  R("adreno_get_param", "GMEM_BASE", lambda c: c.param(6), 0x100000),
  R("adreno_get_param", "PRIORITIES, one ring", lambda c: c.param(7), 3),
  R("adreno_get_param", "PRIORITIES, enable_preemption", lambda c: c.param(7), 12, settings={"preemption": True}),
  R("adreno_get_param", "PP_PGTABLE is no capability test", lambda c: c.param(8), 0),
  R("adreno_get_param", "FAULTS", lambda c: c.param(9), 0),
  R("adreno_get_param", "SUSPENDS", lambda c: c.param(10), 0),
  R("adreno_get_param", "VA_START", lambda c: c.param(14), 1 << 32, ALL),
  R("adreno_get_param", "VA_SIZE", lambda c: c.param(15), 1 << 32, ALL),
  R("adreno_get_param", "VA_START of the shared VM", lambda c: c.param(14), errno.EINVAL, ALL, {"private_vm": False}),
  R("adreno_get_param", "HIGHEST_BANK_BIT, RAYTRACING", lambda c: (c.param(16), c.param(17)), (15, 0), NEW),
  R("adreno_get_param", "HIGHEST_BANK_BIT is 6.12's", lambda c: c.param(16), errno.EINVAL, OLD),
  R("adreno_get_param", "UCHE_TRAP_BASE", lambda c: c.param(20), 0x1fffffffff000, ("7.2",)),
  R("adreno_get_param", "UBWC_SWIZZLE, MACROTILE_MODE", lambda c: (c.param(18), c.param(19)), (6, 0), ("7.2",)),
  R("adreno_get_param", "UBWC_SWIZZLE came after 6.12", lambda c: c.param(18), errno.EINVAL, ALL[:3]),
  R("adreno_get_param", "HAS_PRR", lambda c: c.param(21), 0, ("7.2",)),
  R("adreno_get_param", "AQE", lambda c: c.param(23), 0, ("7.2",)),
  R("adreno_get_param", "AQE is 7.2's", lambda c: c.param(23), errno.EINVAL, ALL[:3]),
  R("msm_ioctl_set_param", "pipe is not 3D0", lambda c: c("SET_PARAM", pipe=1, param=12), errno.EINVAL),
  R("msm_ioctl_set_param", "pad", lambda c: c("SET_PARAM", pipe=0x10, pad=1, param=12), errno.EINVAL),
  R("msm_ioctl_set_param", "no GPU bound", lambda c: c("SET_PARAM", pipe=0x10, param=12), errno.ENXIO, ALL, {"gpu": False}),
  R("adreno_set_param", "CMDLINE by pointer", lambda c: c("SET_PARAM", pipe=0x10, param=13, value=c.buffer(b"python x.py"), len=11)),
  R("adreno_set_param", "unknown", lambda c: c("SET_PARAM", pipe=0x10, param=0x77), errno.EINVAL),
  R("adreno_set_param", "EN_VM_BIND came with drm_gpuvm", lambda c: c("SET_PARAM", pipe=0x10, param=22, value=1), errno.EINVAL, ALL[:3]),
  R("adreno_set_param", "COMM by pointer", lambda c: c("SET_PARAM", pipe=0x10, param=12, value=c.buffer(b"tinygrad"), len=8)),
  R("adreno_set_param", "COMM over a page", lambda c: c("SET_PARAM", pipe=0x10, param=12, value=c.buffer(5000), len=4097), errno.EINVAL),
  R("adreno_set_param", "COMM, bad pointer", lambda c: c("SET_PARAM", pipe=0x10, param=12, value=16, len=8), errno.EFAULT),
  R("adreno_set_param", "SYSPROF without perfmon", lambda c: c("SET_PARAM", pipe=0x10, param=11, value=1), errno.EPERM),
  R("adreno_set_param", "SYSPROF with len", lambda c: c("SET_PARAM", pipe=0x10, param=11, value=1, len=4), errno.EINVAL),
  R("adreno_set_param", "read-only", lambda c: c("SET_PARAM", pipe=0x10, param=3), errno.EINVAL),
  R("adreno_set_param", "EN_VM_BIND once the VM exists", lambda c: (c.param(3), c("SET_PARAM", pipe=0x10, param=22, value=1)), errno.EBUSY, ("7.2",)),
  R("adreno_set_param", "EN_VM_BIND, shared VM",
    lambda c: c("SET_PARAM", pipe=0x10, param=22, value=1), errno.EINVAL, ("7.2",), {"private_vm": False}),
  # --- msm_ioctl_gem_new
  R("msm_ioctl_gem_new", "flags 0", lambda c: c.new(flags=0), errno.EINVAL, ALL),
  R("msm_ioctl_gem_new", "UNCACHED", lambda c: c.new(flags=UNCACHED), errno.EINVAL, ALL),
  R("msm_ioctl_gem_new", "SCANOUT and GPU_READONLY", lambda c: c.new(flags=WC | 1 | 2) and 0, 0, ALL),
  R("msm_ioctl_gem_new", "CACHED, CACHED_COHERENT", lambda c: (c.new(flags=CACHED), c.new(flags=COHERENT)) and 0, 0, ALL),
  R("msm_ioctl_gem_new", "two cache modes", lambda c: c.new(flags=WC | CACHED), errno.EINVAL),
  R("msm_ioctl_gem_new", "a bit outside the mask", lambda c: c.new(flags=WC | 0x100), errno.EINVAL),
  R("msm_ioctl_gem_new", "NO_SHARE before 6.17", lambda c: c.new(flags=WC | 4), errno.EINVAL, ALL[:3]),
  R("msm_ioctl_gem_new", "NO_SHARE", lambda c: c.new(flags=WC | 4) and 0, 0, ("7.2",)),
  R("msm_ioctl_gem_new", "NO_SHARE with the shared VM", lambda c: c.new(flags=WC | 4), errno.EINVAL, ("7.2",), {"private_vm": False}),
  R("msm_ioctl_gem_new", "size 0", lambda c: c.new(0), errno.EINVAL, ALL),
  R("msm_ioctl_gem_new", "flags are checked before size", lambda c: c.new(0, 0x100), errno.EINVAL),
  R("msm_ioctl_gem_new", "4 GiB truncates to 0 in a u32", lambda c: c.new(1 << 32), errno.EINVAL, ALL[:3]),
  R("msm_ioctl_gem_new", "4 GiB + 1 page truncates to 1 page", lambda c: mapped(c, c.new((1 << 32) + 4096), 8192), errno.EINVAL, ALL[:3]),
  R("msm_ioctl_gem_new", "4 GiB are 4 GiB", lambda c: c.new(1 << 32) and 0, 0, ("7.2",)),
  R("msm_ioctl_gem_new", "handles count from 1", lambda c: (c.bo, c.new(), c.new()), (1, 2, 3)),
  R("drm_gem_handle_create", "the lowest free handle is next",
    lambda c: (c.new(), c.new(), c.close_bo(2), c.close_bo(1), c.new(), c.new())[4:], (1, 2)),
  # --- msm_ioctl_gem_info
  R("msm_ioctl_gem_info", "pad", lambda c: c.info(c.bo, 0, pad=1), errno.EINVAL),
  R("msm_ioctl_gem_info", "len with GET_OFFSET", lambda c: c.info(c.bo, 0, len=1), errno.EINVAL),
  R("msm_ioctl_gem_info", "len with GET_IOVA", lambda c: c.info(c.bo, 1, len=1), errno.EINVAL),
  R("msm_ioctl_gem_info", "len with SET_IOVA", lambda c: c.info(c.bo, 4, len=1), errno.EINVAL),
  R("msm_ioctl_gem_info", "len with GET_FLAGS", lambda c: c.info(c.bo, 5, len=1), errno.EINVAL),
  R("msm_ioctl_gem_info", "unknown info before the handle", lambda c: c.info(BAD, 99), errno.EINVAL),
  R("msm_ioctl_gem_info", "len is checked before the handle", lambda c: c.info(BAD, 1, len=1), errno.EINVAL),
  R("msm_ioctl_gem_info", "handle", lambda c: c.info(BAD, 1), errno.ENOENT),
  R("msm_ioctl_gem_info", "GET_IOVA without a GPU", lambda c: c.iova(c.bo), errno.EINVAL, ALL, {"gpu": False}),
  R("msm_ioctl_gem_info", "GET_FLAGS echoes the allocation", lambda c: c.info(c.new(flags=COHERENT | 2), 5), COHERENT | 2),
  R("msm_ioctl_gem_info", "GET_FLAGS of an import", lambda c: c.info(c.import_(heap_fd(c)), 5), errno.EINVAL),
  R("msm_ioctl_gem_info_set_name", "32 bytes", lambda c: c.info(c.bo, 2, c.buffer(b"x" * 32), len=32), errno.EINVAL),
  R("msm_ioctl_gem_info_set_name", "31 bytes", lambda c: c.info(c.bo, 2, c.buffer(b"x" * 31), len=31) and 0),
  R("msm_ioctl_gem_info_set_name", "bad pointer", lambda c: c.info(c.bo, 2, 16, len=5), errno.EFAULT),
  R("msm_ioctl_gem_info_get_name", "too small", lambda c: (c.info(c.bo, 2, c.buffer(b"abc"), len=3), c.info(c.bo, 3, c.buffer(8), len=2)), ETOOSMALL),
  R("msm_ioctl_gem_info_get_name", "round trip",
    lambda c: (c.info(c.bo, 2, c.buffer(b"abc"), len=3), c.info(c.bo, 3, p:=c.buffer(8), len=8), c.last.len, c.bytes_at(p, 4))[2:], (3, b"abc\0")),
  R("msm_ioctl_gem_info_set_metadata", "129 bytes", lambda c: c.info(c.bo, 6, c.buffer(129), len=129), errno.EOVERFLOW, NEW),
  R("msm_ioctl_gem_info_set_metadata", "before 6.8", lambda c: c.info(c.bo, 6, c.buffer(8), len=8), errno.EINVAL, OLD),
  R("msm_ioctl_gem_info_get_metadata", "too small", lambda c: (c.info(c.bo, 6, c.buffer(8), len=8), c.info(c.bo, 7, c.buffer(8), len=4)), ETOOSMALL),
  R("msm_ioctl_gem_info_iova", "first BO at VA_START, next one behind it", lambda c: (c.iova(c.bo), c.iova(c.new())), (1 << 32, (1 << 32) + 4096)),
  R("msm_ioctl_gem_info_iova", "idempotent", lambda c: c.iova(c.bo) - c.iova(c.bo), 0),
  R("msm_ioctl_gem_info_iova", "VA full", lambda c: c.iova(c.new(1 << 20)), errno.ENOSPC, ALL, {"va_size": 1 << 19}),
  R("msm_ioctl_gem_info_iova", "shared VM: below 4 GiB, behind the kernel's own buffers",
    lambda c: c.iova(c.bo), (16 << 20) + sum(size for _, size, _ in msm.KERNEL_BOS), ALL, {"private_vm": False}),
  R("msm_ioctl_gem_info_set_iova", "chosen address", lambda c: (c.info(c.bo, 4, 0x123456000), c.iova(c.bo))[1], 0x123456000),
  R("msm_ioctl_gem_info_set_iova", "shared VM", lambda c: c.info(c.bo, 4, 0x123456000), errno.EOPNOTSUPP, ALL, {"private_vm": False}),
  R("msm_ioctl_gem_info_set_iova", "unaligned", lambda c: c.info(c.bo, 4, 0x123456004), errno.ENOSPC),
  R("msm_ioctl_gem_info_set_iova", "outside the VM", lambda c: c.info(c.bo, 4, 0x1000), errno.ENOSPC),
  R("msm_ioctl_gem_info_set_iova", "occupied", lambda c: c.info(c.new(), 4, c.iova(c.bo)), errno.ENOSPC),
  R("msm_ioctl_gem_info_set_iova", "already elsewhere", lambda c: (c.iova(c.bo), c.info(c.bo, 4, 0x123456000)), errno.EBUSY),
  R("msm_ioctl_gem_info_set_iova", "EBUSY drops the old address too",
    lambda c: (c.info(c.bo, 4, 0x140000000), errno_of(lambda: c.info(c.bo, 4, 0x123456000)), c.iova(c.bo))[1:], (errno.EBUSY, 1 << 32)),
  R("msm_ioctl_gem_info_set_iova", "0 releases", lambda c: (c.info(c.bo, 4, 0x140000000), c.info(c.bo, 4, 0), c.iova(c.bo))[2], 1 << 32),
  R("msm_gem_vma_purge", "SET_IOVA 0 of a busy BO, 6.1", lambda c: (cmd(c), c.info(c.bo, 4, 0)), errno.EBUSY, ("6.1",)),
  R("msm_gem_vma_purge", "SET_IOVA 0 of a busy BO does not wait", lambda c: (cmd(c), c.info(c.bo, 4, 0))[1], 0, ALL[1:]),
  # --- cpu_prep, cpu_fini, madvise
  R("msm_ioctl_gem_cpu_prep", "op", lambda c: c.prep(c.bo, 0x10), errno.EINVAL),
  R("msm_ioctl_gem_cpu_prep", "op before the handle", lambda c: c.prep(BAD, 0x10), errno.EINVAL),
  R("msm_ioctl_gem_cpu_prep", "handle", lambda c: c.prep(BAD, 1), errno.ENOENT),
  R("msm_ioctl_gem_cpu_prep", "idle", lambda c: c.prep(c.bo, 3)),
  R("msm_gem_cpu_prep", "NOSYNC while busy", lambda c: (cmd(c), c.prep(c.bo, WRITE | 4, 5)), errno.EBUSY),
  R("msm_gem_cpu_prep", "a deadline that has passed polls", lambda c: (cmd(c), c.prep(c.bo, WRITE, -1)), errno.EBUSY),
  R("msm_gem_cpu_prep", "deadline passes while waiting", lambda c: (cmd(c), c.prep(c.bo, WRITE, 0.02)), errno.ETIMEDOUT),
  R("msm_gem_cpu_prep", "READ does not wait for readers", lambda c: (cmd(c), c.prep(c.bo, READ))[1], None),
  R("msm_gem_cpu_prep", "READ waits for writers", lambda c: (c.submit([(c.bo, WRITE)]), c.prep(c.bo, READ)), errno.EBUSY),
  R("msm_gem_cpu_prep", "an unlisted BO is never busy", lambda c: (cmd(c), c.prep(c.new(), WRITE))[1], None),
  R("msm_ioctl_gem_cpu_fini", "handle", lambda c: c("GEM_CPU_FINI", handle=BAD), errno.ENOENT),
  R("msm_ioctl_gem_cpu_fini", "no-op", lambda c: c("GEM_CPU_FINI", handle=c.bo) and 0),
  R("msm_ioctl_gem_madvise", "madv", lambda c: c("GEM_MADVISE", handle=c.bo, madv=2), errno.EINVAL),
  R("msm_ioctl_gem_madvise", "handle", lambda c: c("GEM_MADVISE", handle=BAD, madv=0), errno.ENOENT),
  R("msm_gem_madvise", "retained",
    lambda c: (c("GEM_MADVISE", handle=c.bo, madv=1).retained, c("GEM_MADVISE", handle=c.bo, madv=0).retained), (1, 1)),
  R("msm_gem_purge", "purging is one-way", lambda c: c("GEM_MADVISE", handle=purged(c), madv=0).retained, 0),
  R("msm_gem_pin_vma_locked", "listing a DONTNEED BO", lambda c: (c("GEM_MADVISE", handle=c.bo, madv=1), cmd(c)), errno.EBUSY),
  R("msm_gem_pin_vma_locked", "listing a purged BO", lambda c: c.submit([(purged(c), READ)]), errno.EBUSY),
  # --- submit queues
  R("msm_ioctl_submitqueue_new", "flags", lambda c: c.queue(flags=4), errno.EINVAL),
  R("msm_ioctl_submitqueue_new", "no GPU", lambda c: c.queue(), errno.ENODEV, ALL, {"gpu": False}),
  R("msm_submitqueue_create", "VM_BIND queue on a legacy file", lambda c: c.queue(0, 2), errno.EINVAL, ALL),
  R("msm_submitqueue_create", "ALLOW_PREEMPT with one ring", lambda c: c.queue(1, 1), errno.EINVAL, ALL),
  R("msm_submitqueue_create", "priority 3 of 3", lambda c: c.queue(3), errno.EINVAL, ALL),
  R("msm_submitqueue_create", "ids count up and are not reused",
    lambda c: (c.queue(0), c.queue(2), c("SUBMITQUEUE_CLOSE", value=2), c.queue(1))[::3], (1, 3)),
  R("msm_submitqueue_init", "queue 0 is there from the start, with priority 1", lambda c: (cmd(c), c.gpu.jobs[0].priority)[1], 1, ALL),
  R("msm_submitqueue_remove", "queue 0 stays", lambda c: c("SUBMITQUEUE_CLOSE", value=0), errno.ENOENT),
  R("msm_submitqueue_remove", "unknown", lambda c: c("SUBMITQUEUE_CLOSE", value=9), errno.ENOENT),
  R("msm_ioctl_submitqueue_query", "pad", lambda c: c("SUBMITQUEUE_QUERY", pad=1), errno.EINVAL),
  R("msm_submitqueue_query", "queue before param", lambda c: c("SUBMITQUEUE_QUERY", id=9, param=9), errno.ENOENT),
  R("msm_submitqueue_query", "param", lambda c: c("SUBMITQUEUE_QUERY", param=1), errno.EINVAL),
  R("msm_submitqueue_query", "len 0", lambda c: c("SUBMITQUEUE_QUERY", data=16) and 0),
  R("msm_submitqueue_query", "bad pointer", lambda c: c("SUBMITQUEUE_QUERY", data=16, len=4), errno.EFAULT),
  R("msm_submitqueue_query", "two bytes of it",
    lambda c: (c("SUBMITQUEUE_QUERY", data=(p:=c.buffer(b"\xff" * 4)), len=2), c.bytes_at(p, 4))[1], b"\0\0\xff\xff"),
  # --- wait_fence
  R("msm_ioctl_wait_fence", "flags", lambda c: c.wait(0, flags=2), errno.EINVAL),
  R("msm_ioctl_wait_fence", "BOOST", lambda c: c.wait(0, flags=1), None, NEW),
  R("msm_ioctl_wait_fence", "BOOST was pad", lambda c: c.wait(0, flags=1), errno.EINVAL, OLD),
  R("msm_ioctl_wait_fence", "no GPU", lambda c: c.wait(7, queue=9), None, ALL, {"gpu": False}),
  R("msm_ioctl_wait_fence", "queue", lambda c: c.wait(0, queue=9), errno.ENOENT),
  R("wait_fence", "not yet submitted", lambda c: c.wait(1), errno.EINVAL),
  R("wait_fence", "retired or never issued but behind", lambda c: (cmd(c), c.gpu.finish(), c.wait(1), c.wait(0), c.wait(0xfffffff0))[-1], None),
  R("wait_fence", "poll", lambda c: c.wait(cmd(c).fence, -1), errno.ETIMEDOUT),
  R("wait_fence", "deadline", lambda c: c.wait(cmd(c).fence, 0.02), errno.ETIMEDOUT),
  # --- gem_submit, in the kernel's order of checks
  R("msm_ioctl_gem_submit", "no GPU first", lambda c: c.submit(pad=1), errno.ENXIO, ALL, {"gpu": False}),
  R("msm_ioctl_gem_submit", "pad", lambda c: c.submit(pad=1, flags=0x1234), errno.EINVAL),
  R("msm_ioctl_gem_submit", "pipe", lambda c: c.submit(flags=0x11), errno.EINVAL),
  R("msm_ioctl_gem_submit", "unknown flag", lambda c: c.submit(flags=SUBMIT_3D | 1 << 20, queue=9), errno.EINVAL),
  R("msm_ioctl_gem_submit", "SUDO", lambda c: c.submit(flags=SUBMIT_3D | SUDO, queue=9), errno.EINVAL),
  R("msm_ioctl_gem_submit", "queue before tables", lambda c: c.submit(queue=9, nr_bos=1, bos=16), errno.ENOENT),
  R("submit_create", "tables beyond one kmalloc", lambda c: c.submit(nr_bos=1 << 20, bos=16), errno.ENOMEM),
  R("msm_ioctl_gem_submit", "in-fence is no sync_file",
    lambda c: c.submit(flags=SUBMIT_3D | FD_IN, fence_fd=c.file.fd, nr_bos=1, bos=16), errno.EINVAL),
  R("msm_syncobj_parse_deps", "bad pointer",
    lambda c: c.submit(flags=SUBMIT_3D | SYNC_IN, in_syncobjs=16, nr_in_syncobjs=1, syncobj_stride=16), errno.EFAULT),
  R("msm_syncobj_parse_deps", "point without timelines",
    lambda c: c.submit(flags=SUBMIT_3D | SYNC_IN, in_syncobjs=sync(c, (1, 0, 5)), nr_in_syncobjs=1, syncobj_stride=16), errno.EOPNOTSUPP),
  R("msm_syncobj_parse_deps", "flags",
    lambda c: c.submit(flags=SUBMIT_3D | SYNC_IN, in_syncobjs=sync(c, (9, 2, 0)), nr_in_syncobjs=1, syncobj_stride=16), errno.EINVAL),
  R("msm_syncobj_parse_deps", "handle",
    lambda c: c.submit(flags=SUBMIT_3D | SYNC_IN, in_syncobjs=sync(c, (9, 0, 0)), nr_in_syncobjs=1, syncobj_stride=16), errno.ENOENT),
  R("drm_syncobj_find_fence", "no fence attached",
    lambda c: c.submit(flags=SUBMIT_3D | SYNC_IN, in_syncobjs=sync(c, (syncobj(c), 0, 0)), nr_in_syncobjs=1, syncobj_stride=16), errno.EINVAL),
  R("msm_syncobj_parse_post_deps", "handle",
    lambda c: c.submit(flags=SUBMIT_3D | SYNC_OUT, out_syncobjs=sync(c, (9, 0, 0)), nr_out_syncobjs=1, syncobj_stride=16), errno.EINVAL),
  R("msm_syncobj_parse_post_deps", "flags",
    lambda c: c.submit(flags=SUBMIT_3D | SYNC_OUT, out_syncobjs=sync(c, (syncobj(c), 1, 0)), nr_out_syncobjs=1, syncobj_stride=16), errno.EINVAL),
  R("submit_lookup_objects", "BO table", lambda c: c.submit(nr_bos=1, bos=16), errno.EFAULT),
  R("submit_lookup_objects", "neither READ nor WRITE", lambda c: c.submit([(c.bo, 0)]), errno.EINVAL),
  R("submit_lookup_objects", "unknown BO flag", lambda c: c.submit([(c.bo, READ | 0x10)]), errno.EINVAL),
  R("submit_lookup_objects", "per-BO NO_IMPLICIT", lambda c: c.submit([(c.bo, READ | 8)]) and 0, 0, ALL[1:]),
  R("submit_lookup_objects", "per-BO NO_IMPLICIT is 6.6's", lambda c: c.submit([(c.bo, READ | 8)]), errno.EINVAL, ("6.1",)),
  R("submit_lookup_objects", "unknown handle is EINVAL, not ENOENT", lambda c: c.submit([(BAD, READ)]), errno.EINVAL, ALL),
  R("submit_lookup_objects", "flags of entry 0 before the fault at entry 1",
    lambda c: c.submit(nr_bos=2, bos=edge_of_page(c, msm.BO.struct.pack(0, 1, 0))), errno.EINVAL),
  R("submit_lookup_objects", "all flags before any handle",
    lambda c: c.submit([(BAD, READ)], nr_bos=2, bos=edge_of_page(c, msm.BO.struct.pack(READ, BAD, 0))), errno.EFAULT),
  R("submit_lookup_cmds", "BO table before cmd table", lambda c: c.submit([(BAD, READ)], nr_cmds=1, cmds=16), errno.EINVAL),
  R("submit_lookup_cmds", "cmd table", lambda c: c.submit([(c.bo, READ)], nr_cmds=1, cmds=16), errno.EFAULT),
  R("submit_lookup_cmds", "type", lambda c: c.submit([(c.bo, READ)], [(0x1234, 0, 0, 16)]), errno.EINVAL),
  R("submit_lookup_cmds", "size not a multiple of 4", lambda c: c.submit([(c.bo, READ)], [(1, 0, 0, 6)]), errno.EINVAL),
  R("submit_lock_objects", "one handle twice", lambda c: c.submit([(c.bo, READ), (c.bo, READ)]), errno.EALREADY, NEW),
  R("submit_lock_objects", "one handle twice, before 6.8", lambda c: c.submit([(c.bo, READ), (c.bo, READ)]), errno.EINVAL, OLD),
  R("submit_lock_objects", "a duplicate is found before a bad index", lambda c: c.submit([(c.bo, READ)] * 2, [(1, 9, 0, 16)]), errno.EALREADY, NEW),
  R("submit_lock_objects", "an unknown handle is found before a duplicate",
    lambda c: c.submit([(c.bo, READ), (c.bo, READ), (BAD, READ)]), errno.EINVAL, NEW),
  R("submit_lock_objects", "a NO_SHARE BO listed once", lambda c: c.submit([(c.new(flags=WC | 4), READ)]), errno.EALREADY, ("7.2",)),
  R("submit_pin_objects", "VA full", lambda c: c.submit([(c.new(1 << 20), READ)]), errno.ENOSPC, ALL, {"va_size": 1 << 19}),
  R("submit_pin_objects", "out of memory", lambda c: c.submit([(c.new(1 << 20), READ)]), errno.ENOMEM, ALL, {"memory": 1 << 19}),
  R("msm_ioctl_gem_submit", "submit_idx", lambda c: c.submit([(c.bo, READ)], [(1, 1, 0, 16)]), errno.EINVAL, ALL),
  R("msm_ioctl_gem_submit", "size 0", lambda c: c.submit([(c.bo, READ)], [(1, 0, 0, 0)]), errno.EINVAL),
  R("msm_ioctl_gem_submit", "past the end of the BO", lambda c: c.submit([(c.bo, READ)], [(1, 0, 4092, 8)]), errno.EINVAL),
  R("msm_ioctl_gem_submit", "up to the end of the BO", lambda c: c.submit([(c.bo, READ)], [(1, 0, 4092, 4)]) and 0),
  R("msm_ioctl_gem_submit", "size+offset in 32 bits", lambda c: c.submit([(c.bo, READ)], [(1, 0, 0xfffffff0, 0x20)]) and 0, 0, ALL[:3]),
  R("msm_ioctl_gem_submit", "size+offset in 64 bits", lambda c: c.submit([(c.bo, READ)], [(1, 0, 0xfffffff0, 0x20)]), errno.EINVAL, ("7.2",)),
  R("msm_ioctl_gem_submit", "relocs on a6xx", lambda c: c.submit([(c.bo, READ)], [(1, 0, 0, 16, 1, c.buffer(24))]), errno.EINVAL, ALL[1:]),
  R("submit_lookup_cmds", "reloc table", lambda c: c.submit([(c.bo, READ)], [(1, 0, 0, 16, 1, 16)]), errno.EFAULT, ALL),
  R("msm_ioctl_gem_submit", "FENCE_SN_IN 0", lambda c: cmd(c, flags=SUBMIT_3D | SN_IN, fence=0), errno.EINVAL),
  R("msm_ioctl_gem_submit", "FENCE_SN_IN", lambda c: cmd(c, flags=SUBMIT_3D | SN_IN, fence=77).fence, 77),
  R("msm_ioctl_gem_submit", "FENCE_SN_IN moves what counts as submitted",
    lambda c: (cmd(c, flags=SUBMIT_3D | SN_IN, fence=77), errno_of(lambda: c.wait(78)), errno_of(lambda: c.wait(50)))[1:], (errno.EINVAL, 0)),
  R("msm_ioctl_gem_submit", "FENCE_SN_IN in use",
    lambda c: (cmd(c, flags=SUBMIT_3D | SN_IN, fence=77), cmd(c, flags=SUBMIT_3D | SN_IN, fence=77)), errno.EINVAL),
  R("msm_ioctl_gem_submit", "fences count from 1 in each queue", lambda c: (cmd(c).fence, cmd(c).fence, cmd(c, queue=c.queue()).fence), (1, 2, 1)),
  R("msm_ioctl_gem_submit", "ids are cyclic below INT_MAX", lambda c: wrapped(c), (msm.INT_MAX - 1, 1, 2)),
  R("msm_ioctl_gem_submit", "presumed of a BO and pad of a cmd are ignored",
    lambda c: c.submit(nr_bos=1, bos=c.buffer(msm.BO.struct.pack(READ, c.bo, BAD)), nr_cmds=1,
                       cmds=c.buffer(msm.CMD.struct.pack(1, 0, 0, 16, BAD, 0, 0))) and 0),
  R("msm_ioctl_gem_submit", "tables without entries may be anywhere", lambda c: c.submit(bos=16, cmds=16) and 0),
  R("msm_ioctl_gem_submit", "BOs without cmds", lambda c: c.submit([(c.bo, WRITE)]).fence, 1),
  # --- closing, sharing, mapping
  R("drm_gem_close_ioctl", "unknown handle", lambda c: c.close_bo(BAD), errno.EINVAL, ALL),
  R("drm_gem_close_ioctl", "twice", lambda c: (c.close_bo(c.bo), c.close_bo(c.bo)), errno.EINVAL),
  R("drm_prime_handle_to_fd_ioctl", "flags", lambda c: c("PRIME_HANDLE_TO_FD", handle=c.bo, flags=1), errno.EINVAL),
  R("drm_prime_handle_to_fd_ioctl", "handle", lambda c: c.export(BAD), errno.ENOENT),
  R("msm_gem_prime_export", "NO_SHARE", lambda c: c.export(c.new(flags=WC | 4)), errno.EPERM, ("7.2",)),
  R("drm_prime_fd_to_handle_ioctl", "closed descriptor", lambda c: c.import_(9999), errno.EBADF),
  R("drm_prime_fd_to_handle_ioctl", "not a dma-buf", lambda c: c.import_(c.file.fd), errno.EINVAL),
  R("drm_prime_fd_to_handle_ioctl", "own export gives the own handle", lambda c: c.import_(c.export(c.bo)) - c.bo, 0),
  R("drm_prime_fd_to_handle_ioctl", "the same dma-buf twice", lambda c: (c.import_(fd:=heap_fd(c)) - c.import_(fd)), 0),
  R("drm_gem_mmap", "offset inside a BO", lambda c: c.file.mmap(0, 4096, RW, 1, c.offset(c.new(8192)) + 4096), errno.EINVAL),
  R("drm_gem_mmap", "nobody's offset", lambda c: c.file.mmap(0, 4096, RW, 1, 1 << 40), errno.EINVAL),
  R("drm_gem_mmap", "longer than the BO", lambda c: c.mmap(c.bo, 8192), errno.EINVAL),
  R("drm_gem_mmap", "shorter than the BO", lambda c: c.mmap(c.new(8192), 4096) and 0),
  R("drm_gem_mmap", "another file's BO", lambda c: c.file.mmap(0, 4096, RW, 1, (o:=Msm()).offset(o.new())), errno.EACCES),
  # --- syncobjs
  R("drm_syncobj_create_ioctl", "flags", lambda c: syncobj(c, 2), errno.EINVAL),
  R("drm_syncobj_destroy_ioctl", "unknown", lambda c: c("SYNCOBJ_DESTROY", handle=3), errno.EINVAL),
  R("drm_syncobj_wait_ioctl", "unknown", lambda c: c("SYNCOBJ_WAIT", handles=c.buffer(struct.pack("<I", 3)), count_handles=1), errno.ENOENT),
  R("drm_syncobj_wait_ioctl", "no handles", lambda c: c("SYNCOBJ_WAIT"), errno.EINVAL),
  R("drm_syncobj_wait_ioctl", "no fence",
    lambda c: c("SYNCOBJ_WAIT", handles=c.buffer(struct.pack("<I", syncobj(c))), count_handles=1), errno.EINVAL),
  R("drm_syncobj_wait_ioctl", "timeout is ETIME",
    lambda c: c("SYNCOBJ_WAIT", handles=c.buffer(struct.pack("<I", syncobj(c))), count_handles=1, flags=2), errno.ETIME),
  R("drm_syncobj_wait_ioctl", "signalled",
    lambda c: c("SYNCOBJ_WAIT", handles=c.buffer(struct.pack("<I", syncobj(c, 1))), count_handles=1).first_signaled, 0),
  R("drm_getcap", "PRIME import and export", lambda c: c("GET_CAP", capability=5).value, 3),
  R("drm_getcap", "unknown", lambda c: c("GET_CAP", capability=0x99), errno.EINVAL),
  # --- VM_BIND, PERFCNTR: what a legacy client gets
  R("msm_ioctl_vm_bind", "no GPU", lambda c: c("VM_BIND"), errno.ENXIO, ("7.2",), {"gpu": False}),
  R("msm_ioctl_vm_bind", "not a VM_BIND file", lambda c: c("VM_BIND"), errno.EINVAL, ("7.2",)),
  # --- IGT tests/msm: what its CI expects of a6xx
  R("IGT msm_submit", "empty-submit", lambda c: c.submit().fence, 1, ALL),
  R("IGT msm_submit", "invalid-queue-submit", lambda c: c.submit(queue=0x1234), errno.ENOENT, ALL),
  R("IGT msm_submit", "invalid-flags-submit", lambda c: c.submit(flags=0x1234), errno.EINVAL, ALL),
  R("IGT msm_submit", "invalid-in-fence-submit", lambda c: c.submit(flags=SUBMIT_3D | FD_IN, fence_fd=c.file.fd), errno.EINVAL, ALL),
  R("IGT msm_submit", "invalid-duplicate-bo-submit", lambda c: c.submit([(c.bo, READ)] * 2), errno.EALREADY, NEW),
  R("IGT msm_submit", "invalid-cmd-idx-submit", lambda c: c.submit([(c.bo, READ)], [(1, 3, 0, 16)]), errno.EINVAL, ALL),
  R("IGT msm_submit", "invalid-cmd-type-submit", lambda c: c.submit([(c.bo, READ)], [(0x1234, 0, 0, 16)]), errno.EINVAL, ALL),
  *(R("IGT msm_submitoverhead", f"submitbench-{n}-bos{name}", lambda c, n=n, flags=flags: overhead(c, n, flags), 0, ALL if n == 100 else ("6.12",))
    for n in (10, 100, 250, 500, 1000) for name, flags in (("", 0), ("-no-implicit-sync", NO_IMPLICIT))),
  R("IGT msm_bo", "bo-alloc-zero-size", lambda c: c.new(0), errno.EINVAL, ALL),
  R("IGT msm_bo", "bo-alloc-invalid-flags", lambda c: c.new(flags=0xffffffff), errno.EINVAL, ALL),
  R("IGT msm_bo", "bo-alloc-writecombine", lambda c: c.new(flags=WC) and 0, 0, ALL),
  R("IGT msm_bo", "bo-alloc-uncached", lambda c: c.new(flags=UNCACHED), errno.EINVAL, ALL),
  R("IGT msm_bo", "bo-get-offset-invalid", lambda c: c.offset(0xDEADBEEF), errno.ENOENT, ALL),
  R("IGT msm_bo", "bo-get-iova-invalid", lambda c: c.iova(0xDEADBEEF), errno.ENOENT, ALL),
  R("IGT msm_bo", "bo-invalid-info-type", lambda c: c.info(c.bo, 0xff), errno.EINVAL, ALL),
  R("IGT msm_bo", "bo-get-offset-consistency", lambda c: c.offset(c.bo) - c.offset(c.bo), 0, ALL),
]

def wrapped(c: Any) -> tuple[int, ...]:
  q = next(iter(c.machine.msm.clients)).queues[0]
  q.next_id = msm.INT_MAX - 1
  return tuple(cmd(c).fence for _ in range(3))

def overhead(c: Any, n: int, flags: int) -> int:
  """IGT's benchmark: the same list of BOs that are written, submitted again while the GPU has not begun."""
  bos = [(c.new(), WRITE) for _ in range(n)]
  for _ in range(3): c.submit(bos, flags=SUBMIT_3D | flags)
  return 0

def mapped(c: Any, handle: int, size: int) -> int: return c.mmap(handle, size)

def heap_fd(c: Any, size: int = 4096) -> int:
  """A dma-buf of another driver."""
  with qcom.open_node(qcom.HEAP_NODE) as heap:
    heap.ioctl(0xc0184800, buf:=bytearray(struct.pack("<QIIQ", size, 0, os.O_CLOEXEC | os.O_RDWR, 0)))
  c.fds.append(fd:=struct.unpack_from("<I", buf, 8)[0])
  return fd

def edge_of_page(c: Any, data: bytes) -> int:
  """Address of `data` such that the byte behind it is not mapped."""
  base = real_mmap(0, 8192, RW, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
  libc.munmap(base + 4096, 4096)
  c.maps.append((base, 4096))
  ctypes.memmove(base + 4096 - len(data), data, len(data))
  return base + 4096 - len(data)

class Client(Msm):
  """Msm plus what the rules use: a BO, the machine, and resources to give back."""
  def __init__(self, machine: Any, gpu: HeldGPU):
    super().__init__()
    self.machine, self.gpu, self.fds, self.maps = machine, gpu, list[int](), list[tuple[int, int]]()
    self.bo = self.new()
  def close(self) -> None:
    self.gpu.close()
    super().close()
    for fd in self.fds: os.close(fd)
    for m in self.maps: libc.munmap(*m)

@pytest.fixture
def client(request: Any) -> Any:
  c = Client(*boot(**getattr(request, "param", {})))
  yield c
  c.close()

@pytest.mark.parametrize("rule,kernel", [pytest.param(r, k, id=f"{k}-{r}") for r in RULES for k in r.kernels])
def test_rule(rule: Rule, kernel: str) -> None:
  c = Client(*boot(kernel=kernel, **(rule.settings or {})))
  try:
    try: got = rule.do(c)
    except OSError as e: got = e.errno
    if rule.want == 0 and not isinstance(got, int): got = 0          # a record: the call succeeded
    assert got == rule.want, f"{rule.source}: {rule.what}; the model logged {list(c.machine.dmesg)[-1:]}"
  finally: c.close()

# *** dispatch

def test_version_is_matched_by_name(client: Any) -> None:
  v = client("VERSION", name_len=32, name=(p:=client.buffer(32)))
  assert (client.bytes_at(p, 4), v.name_len, v.version_major, v.version_minor) == (b"msm\0", 3, 1, 12)
  v = client("VERSION", name_len=2, name=(p:=client.buffer(32)), desc_len=99, desc=(q:=client.buffer(99)))
  assert client.bytes_at(p, 4) == b"ms\0\0" and v.name_len == 3 and client.bytes_at(q, v.desc_len) == b"MSM Snapdragon DRM"

@pytest.mark.parametrize("kernel,minor", [("6.1", 9), ("6.6", 10), ("6.12", 12), ("7.2", 13)])
def test_uapi_minor(kernel: str, minor: int) -> None:
  boot(kernel=kernel)
  c = Msm()
  assert c("VERSION").version_minor == minor
  c.close()

def test_iowr_copies_back_on_failure(client: Any) -> None:
  """drm_ioctl: SUBMIT's struct comes back also when it fails, WAIT_FENCE's (IOW) never does."""
  with pytest.raises(OSError): client.submit([(client.bo, READ)], [(1, 9, 0, 16)], fence=0)
  assert client.last.nr_bos == 1
  buf = bytearray(client.abi.layout("drm_msm_gem_info").pack(client.abi.layout("drm_msm_gem_info").record(client.bo, 3, client.buffer(8), 8, 0)))
  client.file.ioctl(client.request("GEM_INFO"), buf)
  assert struct.unpack_from("<I", buf, 16)[0] == 0                   # len of an empty name

def test_iow_copies_nothing_back(client: Any) -> None:
  """SUBMITQUEUE_QUERY shortens `len` to what it wrote, where nobody sees it."""
  layout = client.abi.layout("drm_msm_submitqueue_query")
  buf = bytearray(layout.pack(layout.record(client.buffer(64), 0, 0, 64, 0)))
  before = bytes(buf)
  client.file.ioctl(client.request("SUBMITQUEUE_QUERY"), buf)
  assert bytes(buf) == before

# *** the order of checks: of several things wrong with a submit, the first in the kernel's order is the one that is reported

# name -> (errno, or None for the profile's errno of duplicates; what it changes). In the order of msm_ioctl_gem_submit.
DEFECTS: dict[str, tuple[int | None, Callable[[Any, dict[str, Any]], Any]]] = {
  "pad": (errno.EINVAL, lambda c, s: s.update(pad=1)),
  "queue": (errno.ENOENT, lambda c, s: s.update(queue=99)),
  "allocation": (errno.ENOMEM, lambda c, s: s.update(nr_bos=1 << 20)),
  "in-fence": (errno.EINVAL, lambda c, s: s.update(flags=s["flags"] | FD_IN, fence_fd=c.file.fd)),
  "in-syncobjs": (errno.EFAULT, lambda c, s: s.update(flags=s["flags"] | SYNC_IN, in_syncobjs=16, nr_in_syncobjs=1, syncobj_stride=16)),
  "out-syncobjs": (errno.EINVAL, lambda c, s: s.update(flags=s["flags"] | SYNC_OUT, out_syncobjs=sync(c, (9, 0, 0)), nr_out_syncobjs=1,
                                                       syncobj_stride=16)),
  "BO flags": (errno.EINVAL, lambda c, s: s["bos"].append((c.new(), 0))),
  "BO handle": (errno.EINVAL, lambda c, s: s["bos"].append((BAD, READ))),
  "cmd table": (errno.EFAULT, lambda c, s: s.update(nr_cmds=2, cmds=16)),
  "cmd type": (errno.EINVAL, lambda c, s: s["list"].append((9, 0, 0, 16))),
  "duplicate": (None, lambda c, s: s["bos"].append((c.bo, READ))),
  "address space": (errno.ENOSPC, lambda c, s: s["bos"].append((c.new(1 << 20), READ))),
  "cmd idx": (errno.EINVAL, lambda c, s: s["list"].append((1, 99, 0, 16))),
  "fence id": (errno.EINVAL, lambda c, s: s.update(flags=s["flags"] | SN_IN, fence=0)),
}

@settings(max_examples=150, deadline=None)
@given(kernel=st.sampled_from(ALL), wrong=st.sets(st.sampled_from(sorted(DEFECTS)), min_size=1, max_size=5))
def test_the_first_of_several_wrong_things_is_reported(kernel: str, wrong: set[str]) -> None:
  c = Client(*boot(kernel=kernel, va_size=1 << 19))
  try:
    s: dict[str, Any] = {"flags": SUBMIT_3D, "bos": [(c.bo, READ)], "list": [(1, 0, 0, 16)]}
    for name in sorted(wrong): DEFECTS[name][1](c, s)
    first = next(name for name in DEFECTS if name in wrong)
    want = DEFECTS[first][0]
    got = errno_of(lambda: c.submit(s.pop("bos"), s.pop("list"), **s))
    assert got == (msm.PROFILES[kernel].duplicate if want is None else want), f"{sorted(wrong)}: {first} comes first; {list(c.machine.dmesg)[-1:]}"
  finally: c.close()

def test_unknown_kernel_is_named() -> None:
  with pytest.raises(ValueError, match="6.1, 6.6, 6.12, 7.2"): qcom.configure(kernel="5.4")

def test_unknown_setting_is_named() -> None:
  with pytest.raises(TypeError, match="colour"): qcom.configure(colour="blue")

def test_rejections_are_logged_with_their_reason(client: Any) -> None:
  with pytest.raises(OSError): client.submit([(77, READ)])
  assert "handle 77" in client.machine.dmesg[-1] and "GEM_SUBMIT" in client.machine.dmesg[-1]

# *** memory

def test_mappings_share_memory_and_survive_close(client: Any) -> None:
  a, b = client.mmap(client.bo), client.mmap(client.bo)
  assert ctypes.string_at(a, 4096) == bytes(4096)
  ctypes.memmove(a, b"adreno", 6)
  client.close_bo(client.bo)
  assert ctypes.string_at(b, 6) == b"adreno"
  assert client.machine.msm.live() | {"handles": 0, "bos": 1, "mappings": 2} == client.machine.msm.live()
  qcom.munmap(a, 4096)
  qcom.munmap(b, 4096)
  assert client.machine.msm.live()["bos"] == 0

def test_new_memory_is_zero_and_addresses_are_reused(client: Any) -> None:
  for _ in range(3):
    h = client.new(8192)
    iova, off, cpu = client.iova(h), client.offset(h), client.mmap(h, 8192)
    assert ctypes.string_at(cpu, 8192) == bytes(8192)
    ctypes.memset(cpu, 0xff, 8192)
    qcom.munmap(cpu, 8192)
    client.close_bo(h)
    assert (h, iova, off) == (2, 1 << 32, client.offset(client.bo) + 4096)

def test_partial_munmap_keeps_the_rest(client: Any) -> None:
  h = client.new(4 * 4096)
  cpu = client.mmap(h, 4 * 4096)
  client.close_bo(h)
  qcom.munmap(cpu + 4096, 4096)
  assert client.machine.msm.live() | {"mappings": 2, "mapped_bytes": 3 * 4096, "bos": 2} == client.machine.msm.live()
  ctypes.memset(cpu + 2 * 4096, 7, 4096)
  qcom.munmap(cpu, 4 * 4096)
  assert client.machine.msm.live()["bos"] == 1

def test_map_fixed_over_a_mapping_releases_the_old_one(client: Any) -> None:
  h = client.new()
  cpu = client.mmap(h)
  client.close_bo(h)
  assert client.file.mmap(cpu, 4096, RW, mmap.MAP_SHARED | 0x10, client.offset(client.bo)) == cpu
  assert client.machine.msm.live()["bos"] == 1
  qcom.munmap(cpu, 4096)

def test_private_writable_mappings_are_refused(client: Any) -> None:
  assert errno_of(lambda: client.file.mmap(0, 4096, RW, mmap.MAP_PRIVATE, client.offset(client.bo))) == errno.EINVAL

def test_cached_bos_are_not_coherent(client: Any) -> None:
  """msm_drm.h: CACHED without COHERENT needs the client's own dc cvac / dc civac; CPU_PREP does not do it."""
  h = client.new(8192, CACHED)
  cpu = client.mmap(h, 8192)
  client.submit([(h, READ | WRITE)])
  client.gpu.finish()
  space, iova = client.gpu.done[0].space, client.iova(h)
  ctypes.memset(cpu, 7, 8192)
  client.prep(h, READ | WRITE)
  assert space.read(iova, 8192) == bytes(8192)
  qcom.cpu_cache("clean", cpu + 4100, 8)
  assert space.read(iova + 4096, 128) == b"\7" * 64 + bytes(64)
  space.write(iova, b"gpu")
  assert ctypes.string_at(cpu, 3) == b"\7\7\7"
  qcom.munmap(cpu + 4096, 4096)
  qcom.cpu_cache("invalidate", cpu, 1)
  assert ctypes.string_at(cpu, 65) == b"gpu" + bytes(61) + b"\7"
  for flags in (WC, COHERENT):
    other = client.mmap(k:=client.new(flags=flags))
    client.submit([(k, READ)])
    client.gpu.finish()
    ctypes.memset(other, 9, 4096)
    assert space.read(client.iova(k), 4) == b"\t" * 4
    qcom.munmap(other, 4096)
  qcom.munmap(cpu, 4096)
  with pytest.raises(ValueError, match="flush"): qcom.cpu_cache("wipe", cpu, 1)

def test_memory_limit_counts_pages_not_handles(client: Any) -> None:
  """GEM_NEW makes no pages; mmap (first touch) and a submit do, and closing gives them back."""
  client.machine.config.memory = 64 << 10
  hs = [client.new(32 << 10) for _ in range(4)]
  client.submit([(hs[0], READ)])
  cpu = client.mmap(hs[1], 32 << 10)
  assert errno_of(lambda: client.submit([(hs[2], READ)])) == errno.ENOMEM
  assert errno_of(lambda: client.mmap(hs[2], 32 << 10)) == errno.ENOMEM
  qcom.munmap(cpu, 32 << 10)
  client.close_bo(hs[1])
  client.submit([(hs[2], READ)])

def test_pte_states(client: Any) -> None:
  """GEM_NEW, mmap and GET_IOVA make no PTEs; a listing submit does; they stay until close."""
  space = client.machine.msm.vm(next(iter(client.machine.msm.clients))).space
  iova = client.iova(client.bo)
  qcom.munmap(client.mmap(client.bo), 4096)
  assert space.find(iova) is None
  assert errno_of(lambda: client.submit([(client.bo, READ)], [(1, 9, 0, 16)])) == errno.EINVAL
  assert space.find(iova) is not None                  # pinned before the cmds were checked
  client.close_bo(client.bo)
  assert space.find(iova) is None

def test_only_the_listed_are_resident(client: Any) -> None:
  a, b = client.bo, client.new()
  client.submit([(a, READ), (b, READ | WRITE)], [(1, 1, 8, 16)])
  client.submit([(b, READ)])
  assert [sorted(i.handle for i in j.resident) for j in client.gpu.jobs] == [[a, b], [b]]
  assert client.gpu.jobs[0].ibs == [(client.iova(b) + 8, 4)] and client.gpu.jobs[1].ibs == []

def test_gpu_readonly(client: Any) -> None:
  h = client.new(flags=WC | 2)
  client.submit([(h, READ)])
  space = client.gpu.jobs[0].space
  assert space.find(client.iova(h)).flags & 2 == 0
  client.submit([(client.bo, READ)])
  assert space.find(client.iova(client.bo)).flags & 2

def test_submit_offset_drops_low_bits_and_ib_targets_are_not_run(client: Any) -> None:
  client.submit([(client.bo, READ)], [(1, 0, 6, 8), (2, 0, 0, 16), (3, 0, 32, 4)])
  client.submit([(client.bo, READ)], [(3, 0, 32, 4)])
  at = client.iova(client.bo)
  client.gpu.finish(2)
  assert [j.ibs for j in client.gpu.done] == [[(at + 32, 1), (at + 4, 2)], []]      # the ring held no context, then ours

def test_relocs_on_6_1(client: Any) -> None:
  _, gpu = boot(kernel="6.1")
  c = Client(client.machine, gpu)
  cpu, other = c.mmap(c.bo), c.new()
  relocs = c.buffer(struct.pack("<IIiIQ", 4, 1, 0, 1, 0x10) + struct.pack("<IIiIQ", 8, 0, -32, 1, 0))
  c.submit([(c.bo, READ), (other, READ)], [(1, 0, 0, 16, 2, relocs)])
  assert struct.unpack("<4I", ctypes.string_at(cpu, 16)) == (0, (c.iova(other) + 0x10 & 0xffffffff) | 1, c.iova(other) >> 32, 0)
  assert errno_of(lambda: c.submit([(c.bo, READ)], [(1, 0, 0, 16, 1, c.buffer(struct.pack("<IIiIQ", 2, 0, 0, 0, 0)))])) == errno.EINVAL
  qcom.munmap(cpu, 4096)
  c.close()

def test_two_opens_are_two_address_spaces(client: Any) -> None:
  other = Msm()
  assert other.iova(other.new()) == client.iova(client.bo)
  client.submit([(client.bo, READ)])
  other.submit([(1, READ)])
  assert client.gpu.jobs[0].space is not client.gpu.jobs[1].space
  client.gpu.finish(2)
  other.close()

@pytest.mark.parametrize("client", [{"private_vm": False}], indirect=True)
def test_the_shared_vm_is_one_for_all(client: Any) -> None:
  other, first = Msm(), client.iova(client.bo)
  assert other.iova(other.new()) == first + 4096
  other.close()
  assert client.iova(client.new()) == first + 4096

def test_shrinker_evicts_idle_bos_only(client: Any) -> None:
  client.machine.config.swap = True
  h = client.new()
  cpu = client.mmap(h)
  ctypes.memset(cpu, 5, 4096)
  client.submit([(h, READ), (client.bo, READ)])
  client.gpu.finish()
  client.submit([(client.bo, READ)])
  iova, space = client.iova(h), client.gpu.jobs[0].space
  assert client.machine.msm.shrink() == 4096
  assert space.find(iova) is None and space.find(client.iova(client.bo)) is not None and client.iova(h) == iova
  client.submit([(h, READ)])
  assert space.find(iova) is not None and ctypes.string_at(cpu, 1) == b"\5"
  qcom.munmap(cpu, 4096)

def test_an_unlisted_bo_works_until_memory_gets_short() -> None:
  """What hides a forgotten entry of a buffer list: PTEs of an earlier submit stay, until the shrinker takes them."""
  from test.mockgpu.qcom.gpu import Strict
  machine = qcom.configure(swap=True, strict=Strict(residency=False, raise_to_waiter=False))
  c = Msm()
  a, ib = c.new(), c.new()
  cpu, cs = c.mmap(a), c.mmap(ib)
  s = Stream().mem_write(c.iova(a), 5)
  ctypes.memmove(cs, data:=struct.pack(f"<{len(s.words)}I", *s.words), len(data))
  c.wait(c.submit([(a, WRITE)]).fence, 10)
  c.wait(c.submit([(ib, READ)], [(1, 0, 0, len(data))]).fence, 10)
  assert ctypes.c_uint32.from_address(cpu).value == 5 and not machine.gpu.reports
  assert machine.gpu.idle(10) and machine.msm.shrink() == 8192
  ctypes.c_uint32.from_address(cpu).value = 0
  c.wait(c.submit([(ib, READ)], [(1, 0, 0, len(data))]).fence, 10)
  assert ctypes.c_uint32.from_address(cpu).value == 0 and [v.kind for v in machine.gpu.reports] == ["unmapped"]
  for at in (cpu, cs): qcom.munmap(at, 4096)
  c.close()

@pytest.mark.parametrize("kernel", ["6.6", "6.12", "7.2"])
@pytest.mark.parametrize("how", ["gpu", "mmap", "mmap-dmabuf"])
def test_igt_msm_shrink(kernel: str, how: str) -> None:
  """msm_shrink@copy-{gpu,mmap,mmap-dmabuf}-sanitycheck: twice as many BOs as there is memory for, written and read in turn; data stay."""
  size, n = 64 << 10, 8
  qcom.configure(kernel=kernel, memory=n // 2 * size + (64 << 10), swap=True, va_size=1 << 32)
  c, other = Msm(), Msm()
  cmds, bos = c.new(), [c.new(size) for _ in range(n)]
  cs = c.mmap(cmds)
  views = []
  for h in bos if how != "gpu" else ():
    if how == "mmap": views.append(c.mmap(h, size))
    else:
      fd = c.export(h)
      views.append(other.mmap(other.import_(fd), size))
      os.close(fd)
  def gpu(s: Stream, h: int) -> None:
    ctypes.memmove(cs, data:=struct.pack(f"<{len(s.words)}I", *s.words), len(data))
    c.wait(c.submit([(cmds, READ), (h, READ | WRITE)], [(1, 0, 0, len(data))]).fence, 20)
  for sweep in (1, 2):
    for i, h in enumerate(bos):
      at = c.iova(h)
      if how == "gpu":
        if sweep == 2: gpu(Stream().pkt7(0x75, 4, at, at >> 32, at + 4096, at >> 32), h)
        gpu(Stream().mem_write(at, *(100 * sweep + i + k for k in range(4))), h)
      elif sweep == 1: ctypes.memset(views[i], i + 1, size)
      else: gpu(Stream().pkt7(0x75, 4, at + size - 16, (at + size - 16) >> 32, at + 4096, at >> 32), h)
  for i, h in enumerate(bos):
    cpu = c.mmap(h, size)
    if how == "gpu": assert struct.unpack("<4I", ctypes.string_at(cpu + 4096, 16)) == tuple(100 + i + k for k in range(4))
    else: assert ctypes.string_at(cpu, size) == bytes([i + 1]) * size
    qcom.munmap(cpu, size)
  for v in views: qcom.munmap(v, size)
  qcom.munmap(cs, 4096)
  other.close()
  c.close()

def test_igt_msm_shrink_oom_and_madvise() -> None:
  """-oom: without swap the submit that does not fit fails and the others go on. -madvise: DONTNEED makes room, and `retained` tells."""
  machine = qcom.configure(memory=256 << 10)
  c = Msm()
  bos = [c.new(64 << 10) for _ in range(6)]
  got = [errno_of(lambda h=h: c.submit([(h, WRITE)])) for h in bos]
  assert got == [0] * 4 + [errno.ENOMEM] * 2
  assert machine.gpu.idle(10)
  c("GEM_MADVISE", handle=bos[0], madv=1)
  assert errno_of(lambda: c.submit([(bos[4], WRITE)])) == 0
  assert [c("GEM_MADVISE", handle=h, madv=0).retained for h in bos[:2]] == [0, 1]
  assert errno_of(lambda: c.submit([(bos[0], READ)])) == errno.EBUSY
  assert machine.gpu.idle(10)
  c.close()

def test_shrinker_purges_dontneed(client: Any) -> None:
  cpu = client.mmap(client.bo)
  ctypes.memset(cpu, 5, 4096)
  client.submit([(client.new(), READ)])
  client.gpu.finish()
  client("GEM_MADVISE", handle=client.bo, madv=1)
  assert client.machine.msm.shrink() == 4096           # without swap nothing WILLNEED goes
  assert ctypes.string_at(cpu, 4096) == bytes(4096) and client("GEM_MADVISE", handle=client.bo, madv=1).retained == 0
  qcom.munmap(cpu, 4096)

# *** closing

@pytest.mark.parametrize("client", [{"kernel": "6.12"}], indirect=True)
def test_close_of_a_busy_bo_keeps_it_to_job_end(client: Any) -> None:
  iova = client.iova(client.bo)
  client.submit([(client.bo, READ)])
  space = client.gpu.jobs[0].space
  client.close_bo(client.bo)
  assert client.machine.msm.live()["bos"] == 1 and space.find(iova) is not None
  client.gpu.finish()
  assert client.machine.msm.live()["bos"] == 0 and space.find(iova) is None

@pytest.mark.parametrize("client", [{"kernel": "7.2"}], indirect=True)
def test_close_of_a_busy_bo_waits_from_6_17_on(client: Any) -> None:
  client.submit([(client.bo, READ)])
  space, iova = client.gpu.jobs[0].space, client.iova(client.bo)
  t = client.gpu.finish_in(0.05)
  client.close_bo(client.bo)
  assert client.gpu.done and space.find(iova) is None
  t.join()
  assert client.iova(client.new()) == iova

@pytest.mark.parametrize("kernel,ran", [("6.12", 1), ("7.2", 0)])
def test_work_of_a_closed_file(kernel: str, ran: int) -> None:
  """Up to 6.16 queued jobs run, afterwards those not in the ring become no-ops."""
  _, gpu = boot(kernel=kernel)
  c = Msm()
  h = c.new()
  c.submit([(h, READ)], [(1, 0, 0, 16)])
  if kernel == "7.2": gpu.finish_in(0.05)
  c.file.close()
  if gpu.jobs: gpu.finish()
  assert [len(j.ibs) for j in gpu.done] == [ran]

def test_closing_the_file_releases_everything(client: Any) -> None:
  for _ in range(20): client.submit([(client.new(), READ)], flags=SUBMIT_3D | FD_OUT) and client.fds.append(client.last.fence_fd)
  client.gpu.finish(20)
  client.file.close()
  client.file.close()
  assert not any(client.machine.msm.live().values())
  assert errno_of(lambda: client.new()) == errno.EBADF

def test_no_descriptor_is_leaked() -> None:
  _, gpu = boot()
  def round_() -> None:
    c = Msm()
    hs = [c.new() for _ in range(8)]
    os.close(c.submit([(h, READ) for h in hs], flags=SUBMIT_3D | FD_OUT).fence_fd)
    assert errno_of(lambda: c.submit([(BAD, READ)], flags=SUBMIT_3D | FD_OUT)) == errno.EINVAL
    os.close(c.export(hs[0]))
    gpu.finish()
    c.close()
  round_()
  before = sorted(os.listdir("/proc/self/fd"))
  for _ in range(5): round_()
  assert sorted(os.listdir("/proc/self/fd")) == before

# *** waiting

def test_wait_returns_when_the_job_retires(client: Any) -> None:
  fence = cmd(client).fence
  client.gpu.finish_in(0.03)
  client.wait(fence, 5)
  assert client.gpu.pokes and client.gpu.pokes[-1] is client.gpu.done[0]

def test_fences_of_two_queues_are_apart(client: Any) -> None:
  q = client.queue(0)
  assert (cmd(client).fence, cmd(client, queue=q).fence) == (1, 1)
  assert [j.priority for j in client.gpu.jobs] == [1, 0]
  client.gpu.finish()
  client.wait(1)
  assert errno_of(lambda: client.wait(1, queue=q)) == errno.ETIMEDOUT
  client.gpu.finish()
  client.wait(1, queue=q)

def test_a_closed_queue_still_runs_its_work(client: Any) -> None:
  q = client.queue()
  cmd(client, queue=q)
  client("SUBMITQUEUE_CLOSE", value=q)
  assert errno_of(lambda: client.wait(1, queue=q)) == errno.ENOENT
  client.gpu.finish()
  assert client.machine.msm.live()["handles"] == 1

def test_deadlines_are_absolute_on_an_injectable_clock() -> None:
  now = [10**9]
  machine, gpu = boot(clock=lambda: now[0])
  c = Msm()
  fence = c.submit([(c.new(), READ)]).fence
  def wait(ns: int) -> None: c("WAIT_FENCE", fence=fence, timeout=msm.TIMESPEC.struct.pack(ns // 10**9, ns % 10**9))
  assert errno_of(lambda: wait(10**9)) == errno.ETIMEDOUT            # now: a poll
  t = threading.Timer(0.03, lambda: now.__setitem__(0, 3 * 10**9))
  t.start()
  assert errno_of(lambda: wait(2 * 10**9)) == errno.ETIMEDOUT
  t.join()
  gpu.finish()
  wait(0)
  c.close()

def test_an_interrupt_leaves_the_wait(client: Any) -> None:
  def boom(*_: Any) -> None: raise KeyboardInterrupt
  old = signal.signal(signal.SIGALRM, boom)
  try:
    fence = cmd(client).fence
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt): client.wait(fence, 30)
  finally: signal.signal(signal.SIGALRM, old)
  client.gpu.finish()
  client.wait(fence)

# *** ordering between submits

def test_implicit_sync_orders_writers_across_queues(client: Any) -> None:
  q = client.queue(0)
  client.submit([(client.bo, WRITE)])
  client.submit([(client.bo, READ)], queue=q)
  client.submit([(client.bo, READ)], queue=q, flags=SUBMIT_3D | NO_IMPLICIT)
  assert len(client.gpu.jobs) == 1                     # the reader waits, and what is behind it in the same entity
  client.gpu.finish()
  assert len(client.gpu.jobs) == 2
  client.gpu.finish(2)

def test_no_implicit_does_not_wait(client: Any) -> None:
  q = client.queue(0)
  client.submit([(client.bo, WRITE)])
  client.submit([(client.bo, READ)], queue=q, flags=SUBMIT_3D | NO_IMPLICIT)
  client.submit([(client.bo, READ | 8)], queue=q)
  assert len(client.gpu.jobs) == 3
  client.gpu.finish(3)

def test_6_1_orders_writers_despite_no_implicit() -> None:
  _, gpu = boot(kernel="6.1")
  c = Msm()
  h, q = c.new(), c.queue(0)
  c.submit([(h, READ)])
  c.submit([(h, WRITE)], queue=q, flags=SUBMIT_3D | NO_IMPLICIT)
  assert len(gpu.jobs) == 1
  gpu.finish(2)
  c.close()

def test_one_entity_per_priority(client: Any) -> None:
  """Queues of one file at the same priority are FIFO among themselves, whatever they depend on."""
  blocker, q0, q1 = syncobj(client), client.queue(0), client.queue(0)
  client.submit([(client.bo, WRITE)], flags=SUBMIT_3D | SYNC_OUT, out_syncobjs=sync(client, (blocker, 0, 0)), nr_out_syncobjs=1, syncobj_stride=16)
  client.submit(queue=q0, flags=SUBMIT_3D | SYNC_IN, in_syncobjs=sync(client, (blocker, 1, 0)), nr_in_syncobjs=1, syncobj_stride=16)
  client.submit(queue=q1)
  assert len(client.gpu.jobs) == 1
  client.gpu.finish()
  assert len(client.gpu.jobs) == 2
  handles = client.buffer(struct.pack("<I", blocker))
  assert errno_of(lambda: client("SYNCOBJ_WAIT", handles=handles, count_handles=1)) == errno.EINVAL      # RESET took its fence
  client.gpu.finish(2)

def test_sync_file_out_and_in(client: Any) -> None:
  fd = client.submit([(client.bo, WRITE)], flags=SUBMIT_3D | FD_OUT).fence_fd
  client.fds.append(fd)
  assert select.select([fd], [], [], 0)[0] == []
  assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
  out = client.submit(flags=SUBMIT_3D | FD_IN | FD_OUT, fence_fd=fd, queue=client.queue(0)).fence_fd
  client.fds.append(out)
  assert out != fd and len(client.gpu.jobs) == 1
  client.gpu.finish()
  assert select.select([fd, out], [], [], 0)[0] == [fd] and len(client.gpu.jobs) == 1
  client.gpu.finish()
  assert select.select([fd, out], [], [], 0)[0] == [fd, out]

def test_syncobjs_can_be_signalled_reset_and_destroyed(client: Any) -> None:
  handles = client.buffer(struct.pack("<I", s:=syncobj(client)))
  def state() -> int: return errno_of(lambda: client("SYNCOBJ_WAIT", handles=handles, count_handles=1))
  client("SYNCOBJ_SIGNAL", handles=handles, count_handles=1)
  assert state() == 0
  client("SYNCOBJ_RESET", handles=handles, count_handles=1)
  assert state() == errno.EINVAL
  client("SYNCOBJ_DESTROY", handle=s)
  assert state() == errno.ENOENT and syncobj(client) == s

def test_no_descriptor_left_for_the_out_fence(client: Any) -> None:
  """msm_ioctl_gem_submit: get_unused_fd fails before anything else was looked at; nothing was submitted."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
  try:
    while True: client.fds.append(os.dup(0))
  except OSError: pass
  try: assert errno_of(lambda: client.submit([(BAD, READ)], flags=SUBMIT_3D | FD_OUT)) == errno.EMFILE
  finally: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  assert not client.gpu.jobs and not client.machine.msm.submits

def test_syncobj_wait_any_and_all(client: Any) -> None:
  a, b = syncobj(client), syncobj(client)
  handles = client.buffer(struct.pack("<II", a, b))
  for s in (a, b): client.submit(flags=SUBMIT_3D | SYNC_OUT, out_syncobjs=sync(client, (s, 0, 0)), nr_out_syncobjs=1, syncobj_stride=16)
  client.gpu.finish()
  assert client("SYNCOBJ_WAIT", handles=handles, count_handles=2).first_signaled == 0
  assert errno_of(lambda: client("SYNCOBJ_WAIT", handles=handles, count_handles=2, flags=1)) == errno.ETIME
  client.gpu.finish_in(0.02)
  client("SYNCOBJ_WAIT", handles=handles, count_handles=2, flags=1, timeout_nsec=time.monotonic_ns() + 5 * 10**9)

# *** hangs, faults, reports

def test_hang_signals_the_fence_and_moves_only_counters(client: Any) -> None:
  """msm_gpu.c recover_worker: the killed submit's fence signals without error; QUERY FAULTS and PARAM FAULTS move; the file stays usable."""
  q = client.queue()
  fences = [cmd(client, queue=q).fence for _ in range(3)]
  client.gpu.finish()
  client.gpu.finish(status="hang")
  client.gpu.finish()
  for f in fences: client.wait(f, queue=q)
  assert (client.faults(q), client.faults(0), client.param(9)) == (1, 0, 1)
  assert any("hangcheck recover" in line for line in client.machine.dmesg)
  other = Msm()
  assert other.param(9) == 0
  other.close()
  cmd(client)

def test_hang_of_a_closed_file_counts_globally(client: Any) -> None:
  other = Msm()
  other.submit([(other.new(), READ)])
  other.close()
  client.gpu.finish(status="hang")
  assert client.param(9) == 1 and client.faults() == 0

def test_smmu_fault_is_invisible(client: Any) -> None:
  from test.mockgpu.qcom.gpu import FaultRecord
  fence = cmd(client).fence
  client.gpu.finish(status="fault", faults=[FaultRecord(0x1deaddead, True, "TRANSLATION", "CP", dmesg="*** gpu fault: iova=1deaddead")])
  client.wait(fence)
  assert (client.faults(), client.param(9)) == (0, 0) and "1deaddead" in client.machine.dmesg[-1]

def test_the_waiter_is_told_of_violations(client: Any) -> None:
  from test.mockgpu.qcom.report import Violation
  fence = cmd(client).fence
  client.gpu.finish(reports=[Violation("not_resident", "kernel add reads 0x100001000")])
  with pytest.raises(GpuViolation, match="0x100001000") as e: client.wait(fence)
  assert [v.kind for v in e.value.violations] == ["not_resident"]
  client.wait(fence)                                   # once
  fence = cmd(client).fence
  t = threading.Timer(0.03, lambda: client.gpu.finish(reports=[Violation("hang", "stuck")]))
  t.start()
  with pytest.raises(GpuViolation, match="stuck"): client.wait(fence + 0, 20)
  t.join()
  client.gpu.strict.raise_to_waiter = False
  fence = cmd(client).fence
  client.gpu.finish(reports=[Violation("hang", "stuck")])
  client.wait(fence)

# *** on the virtual GPU itself: IGT's tests of recovery and faults

@pytest.fixture
def igt(request: Any) -> Any:
  from test.mockgpu.qcom.gpu import Strict
  qcom.configure(strict=Strict(raise_to_waiter=False), hang_polls=200, **getattr(request, "param", {}))
  c = Msm()
  c.target, c.cmds = c.new(), c.new(1 << 16)
  c.cpu, c.cs = c.mmap(c.target), c.mmap(c.cmds, 1 << 16)
  yield c
  assert qcom.current().gpu.idle(20)
  c.close()
  for m in ((c.cpu, 4096), (c.cs, 1 << 16)): qcom.munmap(*m)

def run_stream(c: Any, slot: int, stream: Stream, **kw: Any) -> int:
  ctypes.memmove(c.cs + slot * 1024, data:=struct.pack(f"<{len(stream.words)}I", *stream.words), len(data))
  return c.submit([(c.cmds, READ), (c.target, WRITE)], [(1, 0, slot * 1024, len(data))], **kw).fence

def test_valid_submit(igt: Any) -> None:
  fd = run_stream(igt, 0, Stream().nop(0, 0, 0), flags=SUBMIT_3D | FD_OUT | NO_IMPLICIT) and igt.last.fence_fd
  assert select.select([fd], [], [], 10)[0] == [fd]
  os.close(fd)

@pytest.mark.parametrize("igt", [{"schedule": "asap"}, {"schedule": "late"}, {"schedule": 7}], indirect=True)
@pytest.mark.parametrize("bad", ["garbage", "stuck"])
def test_recovery(igt: Any, bad: str) -> None:
  """msm_recovery@hangcheck, gpu-fault: of 16 submits #10 hangs; the others' writes land, all fences signal, one fault is counted."""
  at, q = igt.iova(igt.target), igt.queue()
  fences = []
  for i in range(16):
    s = Stream().mem_write(at + 4 * i, i + 1) if i != 10 else Stream().wait_mem(at + 2048, 1) if bad == "stuck" else Stream()
    if i == 10 and bad == "garbage": s.words = [0xdeaddead, 0xdeaddead]
    fences.append(run_stream(igt, i, s, queue=q))
  for f in fences: igt.wait(f, 30, queue=q)
  assert struct.unpack("<16I", ctypes.string_at(igt.cpu, 64)) == tuple(0 if i == 10 else i + 1 for i in range(16))
  assert (igt.faults(q), igt.faults(), igt.param(9)) == (1, 0, 1)
  assert any("hangcheck recover" in line for line in qcom.current().dmesg)

def test_recovery_leaves_other_files_alone(igt: Any) -> None:
  """msm_recovery@gpu-fault-parallel: one of several clients hangs."""
  others = [Msm() for _ in range(6)]
  for o in others:
    o.target, o.cmds = o.new(), o.new(1 << 16)
    o.cpu, o.cs = o.mmap(o.target), o.mmap(o.cmds, 1 << 16)
  (garbage:=Stream()).words = [0xdeaddead]
  bad = run_stream(igt, 0, garbage)
  fences = [run_stream(o, 0, Stream().mem_write(o.iova(o.target), 42)) for o in others]
  igt.wait(bad, 30)
  for o, f in zip(others, fences):
    o.wait(f, 30)
    assert (ctypes.c_uint32.from_address(o.cpu).value, o.param(9), o.faults()) == (42, 0, 0)
    o.close()
    for m in ((o.cpu, 4096), (o.cs, 1 << 16)): qcom.munmap(*m)
  assert igt.param(9) == 1

def test_iova_fault(igt: Any) -> None:
  """msm_recovery@iova-fault: a CP write to an address without PTEs is dropped and logged; the submit completes and counts nothing."""
  at = igt.iova(igt.target)
  igt.wait(run_stream(igt, 0, Stream().mem_write(0x1deaddead, 1).mem_write(at, 5)), 30)
  assert (ctypes.c_uint32.from_address(igt.cpu).value, igt.faults(), igt.param(9)) == (5, 0, 0)
  assert any("gpu fault" in line and "1deaddeac" in line and "WRITE" in line for line in qcom.current().dmesg)

def test_an_unlisted_bo_faults_although_its_ptes_exist(igt: Any) -> None:
  other = igt.new()
  cpu = igt.mmap(other)
  igt.submit([(other, WRITE)])
  write = Stream().mem_write(igt.iova(other), 5)
  igt.wait(run_stream(igt, 0, write), 30)
  assert ctypes.c_uint32.from_address(cpu).value == 0
  assert [(v.kind, f"BO {other}" in str(v)) for v in qcom.current().gpu.reports] == [("not_resident", True)]
  qcom.munmap(cpu, 4096)

def test_client_polling_memory_sees_late_work(igt: Any) -> None:
  """A timeline value in memory is visible without any wait ioctl, also under schedule="late"."""
  qcom.current().gpu.schedule = "late"
  at, end = igt.iova(igt.target), time.monotonic() + 20
  run_stream(igt, 0, Stream().flush(at, 77))
  while ctypes.c_uint32.from_address(igt.cpu).value != 77 and time.monotonic() < end: time.sleep(0.001)
  assert ctypes.c_uint32.from_address(igt.cpu).value == 77

# *** dma-buf

def test_export_outlives_handle_and_file(client: Any) -> None:
  cpu = client.mmap(client.bo)
  ctypes.memmove(cpu, b"shared", 6)
  qcom.munmap(cpu, 4096)
  fd = client.export(client.bo)
  client.fds.append(fd)
  client.close_bo(client.bo)
  assert client.machine.msm.live()["bos"] == 1         # the descriptor holds it
  assert os.lseek(fd, 0, os.SEEK_END) == 4096
  with mmap.mmap(fd, 4096) as m: assert m[:6] == b"shared"
  other = Msm()
  h = other.import_(fd)
  other.submit([(h, READ)])
  assert ctypes.string_at(client.gpu.jobs[0].space.find(other.iova(h)).ram, 6) == b"shared"
  client.gpu.finish()
  other.close()
  assert client.machine.msm.live()["bos"] == 1
  os.close(client.fds.pop())
  assert client.machine.msm.live()["bos"] == 0

def test_import_of_a_foreign_buffer(client: Any) -> None:
  fd = heap_fd(client, 8192)
  with mmap.mmap(fd, 8192) as m: m[4096:4099] = b"cam"
  h = client.import_(fd)
  cpu = client.mmap(h, 8192)
  assert ctypes.string_at(cpu + 4096, 3) == b"cam"
  qcom.munmap(cpu, 8192)
  os.close(client.fds.pop())
  client.submit([(h, READ)])                           # the import holds its own reference
  assert client.machine.heap.reap() == 1
  client.gpu.finish()
  client.close_bo(h)
  assert client.machine.heap.reap() == 0

def test_two_imports_of_one_buffer_on_two_files_share_fences(client: Any) -> None:
  fd, other = heap_fd(client), Msm()
  a, b = client.import_(fd), other.import_(fd)
  client.submit([(a, WRITE)])
  assert errno_of(lambda: other.prep(b, READ)) == errno.EBUSY
  other.submit([(b, READ)])
  assert len(client.gpu.jobs) == 1                     # implicit sync, across files
  client.gpu.finish(2)
  other.close()

# *** the C entry point

def test_c_pointer_sets_errno(client: Any) -> None:
  fn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, use_errno=True)(qcom.ioctl_pointer())
  buf = client.buffer(struct.pack("<QII", 4096, WC, 0))
  assert fn(client.file.fd, client.request("GEM_NEW"), buf) == 0 and client.bytes_at(buf + 12, 4) == b"\2\0\0\0"
  assert fn(client.file.fd, client.request("GEM_NEW"), client.buffer(16)) == -1 and ctypes.get_errno() == errno.EINVAL
  assert fn(client.file.fd, client.request("GEM_NEW"), 16) == -1 and ctypes.get_errno() == errno.EFAULT

def test_c_pointer_passes_other_descriptors_to_libc() -> None:
  fn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, use_errno=True)(qcom.ioctl_pointer())
  r, w = os.pipe()
  n = ctypes.c_int()
  os.write(w, b"abc")
  assert fn(r, 0x541b, ctypes.addressof(n)) == 0 and n.value == 3    # FIONREAD
  os.close(r)
  os.close(w)
  assert fn(r, 0x541b, ctypes.addressof(n)) == -1 and ctypes.get_errno() == errno.EBADF

def test_c_pointer_from_a_foreign_thread(client: Any) -> None:
  fn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(qcom.ioctl_pointer())
  buf, got = client.buffer(struct.pack("<QII", 4096, WC, 0)), []
  t = threading.Thread(target=lambda: got.append(fn(client.file.fd, client.request("GEM_NEW"), buf)))
  t.start()
  t.join()
  assert got == [0]

def test_c_pointer_cannot_raise_but_nothing_is_lost(client: Any, capfd: Any) -> None:
  """A violation met by a wait through the C pointer is -1 there, and raised by the next wait from Python."""
  from test.mockgpu.qcom.report import Violation
  fn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, use_errno=True)(qcom.ioctl_pointer())
  fence = cmd(client).fence
  client.gpu.finish(reports=[Violation("hang", "stuck")])
  arg = client.buffer(msm.ABI.layout("drm_msm_wait_fence").struct.pack(fence, 0, deadline(1), 0))
  assert fn(client.file.fd, client.request("WAIT_FENCE"), arg) == -1 and ctypes.get_errno() == errno.EIO
  assert "stuck" in capfd.readouterr().err
  with pytest.raises(GpuViolation, match="stuck"): client.wait(fence)

def test_c_pointer_turns_an_interrupt_into_eintr(client: Any) -> None:
  def boom(*_: Any) -> None: raise KeyboardInterrupt
  fn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, use_errno=True)(qcom.ioctl_pointer())
  arg = client.buffer(msm.ABI.layout("drm_msm_wait_fence").struct.pack(fence:=cmd(client).fence, 0, deadline(30), 0))
  old = signal.signal(signal.SIGALRM, boom)
  try:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    assert (fn(client.file.fd, client.request("WAIT_FENCE"), arg), ctypes.get_errno()) == (-1, errno.EINTR)
  finally: signal.signal(signal.SIGALRM, old)
  with pytest.raises(KeyboardInterrupt): client.wait(fence, 30)

# *** fork, failures on order, counters

def test_fork_gives_a_clear_answer(client: Any) -> None:
  r, w = os.pipe()
  if (pid:=os.fork()) == 0:
    try: client.new()
    except RuntimeError as e: os.write(w, str(e).encode())
    finally: os._exit(0)
  os.close(w)
  assert os.waitpid(pid, 0)[1] == 0
  assert b"does not cross a fork" in os.read(r, 4096)
  os.close(r)
  client.new()                                         # the parent goes on

ORDERED = {"GEM_NEW": {2: errno.ENOMEM}, "GEM_SUBMIT": {"1-3": errno.EINTR}, "mmap": {1: errno.ENOMEM}}

@pytest.mark.parametrize("client", [{"fail": ORDERED}], indirect=True)
def test_failures_on_order(client: Any) -> None:
  assert errno_of(lambda: client.new()) == errno.ENOMEM and client.new() == 2
  assert [errno_of(lambda: cmd(client)) for _ in range(4)] == [errno.EINTR] * 3 + [0]
  assert errno_of(lambda: client.mmap(client.bo)) == errno.ENOMEM
  assert client.machine.msm.calls["GEM_SUBMIT"] == 4 and len(client.machine.msm.submits) == 1

def test_counters_and_submit_log(client: Any) -> None:
  b = client.new(8192)
  cpu = client.mmap(b, 8192)
  client.submit([(client.bo, READ), (b, READ | WRITE)], [(1, 0, 64, 32)], flags=SUBMIT_3D | NO_IMPLICIT)
  record = client.machine.msm.submits[-1]
  assert (record.handles, record.bos[1], record.cmds, record.fence) == ([client.bo, b], (b, READ | WRITE), [(1, 0, 64, 32)], 1)
  assert record.flags == SUBMIT_3D | NO_IMPLICIT
  assert client.machine.msm.live() == {"clients": 1, "handles": 2, "bos": 2, "bytes": 3 * 4096, "iova_bytes": 3 * 4096, "mappings": 1,
                                       "mapped_bytes": 8192, "fences": 1, "queues": 1}
  qcom.munmap(cpu, 8192)

def test_settings_from_the_environment(monkeypatch: Any) -> None:
  monkeypatch.setenv("QCOM_MOCK", '{"kernel": "6.6", "va_size": 1048576}')
  machine, _ = boot()
  c = Msm()
  assert machine.config.kernel == "6.6" and c.param(15) == 1 << 20
  c.close()
  assert boot(kernel="7.2")[0].config.kernel == "7.2"
  monkeypatch.setenv("QCOM_MOCK", "kernel=6.6")
  with pytest.raises(ValueError, match="JSON"): qcom.configure()

BAD_SETTINGS = [ # settings in QCOM_MOCK, and what the answer says beside the variable's name: what is wrong, what is allowed
  ([1], "is not a JSON object"), ({"colour": 1}, "no setting 'colour', there are kernel, chip_id"), ({"kernel": "5.4"}, "'5.4', allowed: 6.1, 6.6"),
  ({"schedule": "soon"}, "schedule is 'soon', allowed: asap, late"), ({"order": "up"}, "order is 'up', allowed: forward, reversed"),
  ({"execute": "no"}, "execute is 'no', allowed: true, false"), ({"gpu": 1}, "gpu is 1, allowed: true, false"),
  ({"va_size": "4G"}, "va_size is '4G', allowed: a whole number"), ({"chip_id": "0x06030002"}, "chip_id is '0x06030002', allowed: a whole number"),
  ({"hang_polls": 0}, "hang_polls is 0"), ({"counter_start": -1}, "counter_start is -1"), ({"memory": -1}, "allowed: a number of bytes"),
  ({"kgsl_wait_s": "1"}, "kgsl_wait_s is '1', allowed: seconds"), ({"nodes": ["/dev/x"]}, "allowed: a list of /dev/dri/renderD128, /dev/kgsl-3d0"),
  ({"denied": ["/dev/x"]}, "allowed: a list of /dev/dri/renderD128"), ({"rd": "/nonexistent/x.rd"}, "rd is '/nonexistent/x.rd', allowed: the name"),
  ({"estimate": "/nonexistent/x.svg"}, "estimate is"), ({"strict": "on"}, "strict must be 'off'"), ({"strict": {"colour": 1}}, "has no colour"),
  ({"strict": {"lenient": ["colour:x"]}}, "no kind colour, there are unmapped"), ({"fail": {"GEM_OLD": {"1": 5}}}, "calls are GET_PARAM"),
  ({"fail": {"GEM_NEW": {"first": 5}}}, "allowed: numbers of calls"), ({"fail": {"GEM_NEW": {"1": 9999}}}, "allowed: the number of an errno"),
]
@pytest.mark.parametrize("settings,words", BAD_SETTINGS, ids=lambda x: str(x)[:40])
def test_a_setting_that_means_nothing_is_named_with_what_is_allowed(monkeypatch: Any, settings: Any, words: str) -> None:
  monkeypatch.setenv("QCOM_MOCK", json.dumps(settings))
  with pytest.raises(ValueError) as e: qcom.configure()
  assert str(e.value).startswith("QCOM_MOCK") and words in str(e.value), str(e.value)

def test_nodes_can_be_absent_or_denied() -> None:
  qcom.configure(nodes=(qcom.KGSL_NODE,), denied=(qcom.KGSL_NODE,))
  assert errno_of(lambda: qcom.open_node(qcom.MSM_NODE)) == errno.ENOENT
  assert errno_of(lambda: qcom.open_node(qcom.KGSL_NODE)) == errno.EACCES
