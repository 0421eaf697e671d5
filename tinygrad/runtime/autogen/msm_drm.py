# mypy: disable-error-code="empty-body"
from __future__ import annotations
import ctypes
from typing import Literal, TypeAlias
from tinygrad.runtime.support.c import _IO, _IOW, _IOR, _IOWR
from tinygrad.runtime.support import c
import os
# from drm/drm.h and drm/msm_drm.h, Linux 7.2 UAPI as in ziglang 0.17.1; regenerate with ./autogen.sh
@c.record
class struct_drm_version(c.Struct):
  SIZE = 64
  version_major: int
  version_minor: int
  version_patchlevel: int
  name_len: int
  name: c.POINTER[ctypes.c_ubyte]
  date_len: int
  date: c.POINTER[ctypes.c_ubyte]
  desc_len: int
  desc: c.POINTER[ctypes.c_ubyte]
__kernel_size_t: TypeAlias = ctypes.c_uint64
struct_drm_version.register_fields([('version_major', ctypes.c_int32, 0), ('version_minor', ctypes.c_int32, 4), ('version_patchlevel', ctypes.c_int32, 8), ('name_len', ctypes.c_uint64, 16), ('name', c.POINTER[ctypes.c_ubyte], 24), ('date_len', ctypes.c_uint64, 32), ('date', c.POINTER[ctypes.c_ubyte], 40), ('desc_len', ctypes.c_uint64, 48), ('desc', c.POINTER[ctypes.c_ubyte], 56)])
@c.record
class struct_drm_gem_close(c.Struct):
  SIZE = 8
  handle: int
  pad: int
__u32: TypeAlias = ctypes.c_uint32
struct_drm_gem_close.register_fields([('handle', ctypes.c_uint32, 0), ('pad', ctypes.c_uint32, 4)])
@c.record
class struct_drm_get_cap(c.Struct):
  SIZE = 16
  capability: int
  value: int
__u64: TypeAlias = ctypes.c_uint64
struct_drm_get_cap.register_fields([('capability', ctypes.c_uint64, 0), ('value', ctypes.c_uint64, 8)])
@c.record
class struct_drm_prime_handle(c.Struct):
  SIZE = 12
  handle: int
  flags: int
  fd: int
__s32: TypeAlias = ctypes.c_int32
struct_drm_prime_handle.register_fields([('handle', ctypes.c_uint32, 0), ('flags', ctypes.c_uint32, 4), ('fd', ctypes.c_int32, 8)])
@c.record
class struct_drm_syncobj_create(c.Struct):
  SIZE = 8
  handle: int
  flags: int
struct_drm_syncobj_create.register_fields([('handle', ctypes.c_uint32, 0), ('flags', ctypes.c_uint32, 4)])
@c.record
class struct_drm_syncobj_destroy(c.Struct):
  SIZE = 8
  handle: int
  pad: int
struct_drm_syncobj_destroy.register_fields([('handle', ctypes.c_uint32, 0), ('pad', ctypes.c_uint32, 4)])
@c.record
class struct_drm_syncobj_handle(c.Struct):
  SIZE = 24
  handle: int
  flags: int
  fd: int
  pad: int
  point: int
struct_drm_syncobj_handle.register_fields([('handle', ctypes.c_uint32, 0), ('flags', ctypes.c_uint32, 4), ('fd', ctypes.c_int32, 8), ('pad', ctypes.c_uint32, 12), ('point', ctypes.c_uint64, 16)])
@c.record
class struct_drm_syncobj_transfer(c.Struct):
  SIZE = 32
  src_handle: int
  dst_handle: int
  src_point: int
  dst_point: int
  flags: int
  pad: int
struct_drm_syncobj_transfer.register_fields([('src_handle', ctypes.c_uint32, 0), ('dst_handle', ctypes.c_uint32, 4), ('src_point', ctypes.c_uint64, 8), ('dst_point', ctypes.c_uint64, 16), ('flags', ctypes.c_uint32, 24), ('pad', ctypes.c_uint32, 28)])
@c.record
class struct_drm_syncobj_wait(c.Struct):
  SIZE = 40
  handles: int
  timeout_nsec: int
  count_handles: int
  flags: int
  first_signaled: int
  pad: int
  deadline_nsec: int
__s64: TypeAlias = ctypes.c_int64
struct_drm_syncobj_wait.register_fields([('handles', ctypes.c_uint64, 0), ('timeout_nsec', ctypes.c_int64, 8), ('count_handles', ctypes.c_uint32, 16), ('flags', ctypes.c_uint32, 20), ('first_signaled', ctypes.c_uint32, 24), ('pad', ctypes.c_uint32, 28), ('deadline_nsec', ctypes.c_uint64, 32)])
@c.record
class struct_drm_syncobj_timeline_wait(c.Struct):
  SIZE = 48
  handles: int
  points: int
  timeout_nsec: int
  count_handles: int
  flags: int
  first_signaled: int
  pad: int
  deadline_nsec: int
struct_drm_syncobj_timeline_wait.register_fields([('handles', ctypes.c_uint64, 0), ('points', ctypes.c_uint64, 8), ('timeout_nsec', ctypes.c_int64, 16), ('count_handles', ctypes.c_uint32, 24), ('flags', ctypes.c_uint32, 28), ('first_signaled', ctypes.c_uint32, 32), ('pad', ctypes.c_uint32, 36), ('deadline_nsec', ctypes.c_uint64, 40)])
@c.record
class struct_drm_syncobj_eventfd(c.Struct):
  SIZE = 24
  handle: int
  flags: int
  point: int
  fd: int
  pad: int
struct_drm_syncobj_eventfd.register_fields([('handle', ctypes.c_uint32, 0), ('flags', ctypes.c_uint32, 4), ('point', ctypes.c_uint64, 8), ('fd', ctypes.c_int32, 16), ('pad', ctypes.c_uint32, 20)])
@c.record
class struct_drm_syncobj_array(c.Struct):
  SIZE = 16
  handles: int
  count_handles: int
  pad: int
struct_drm_syncobj_array.register_fields([('handles', ctypes.c_uint64, 0), ('count_handles', ctypes.c_uint32, 8), ('pad', ctypes.c_uint32, 12)])
@c.record
class struct_drm_syncobj_timeline_array(c.Struct):
  SIZE = 24
  handles: int
  points: int
  count_handles: int
  flags: int
struct_drm_syncobj_timeline_array.register_fields([('handles', ctypes.c_uint64, 0), ('points', ctypes.c_uint64, 8), ('count_handles', ctypes.c_uint32, 16), ('flags', ctypes.c_uint32, 20)])
@c.record
class struct_drm_msm_timespec(c.Struct):
  SIZE = 16
  tv_sec: int
  tv_nsec: int
struct_drm_msm_timespec.register_fields([('tv_sec', ctypes.c_int64, 0), ('tv_nsec', ctypes.c_int64, 8)])
@c.record
class struct_drm_msm_param(c.Struct):
  SIZE = 24
  pipe: int
  param: int
  value: int
  len: int
  pad: int
struct_drm_msm_param.register_fields([('pipe', ctypes.c_uint32, 0), ('param', ctypes.c_uint32, 4), ('value', ctypes.c_uint64, 8), ('len', ctypes.c_uint32, 16), ('pad', ctypes.c_uint32, 20)])
@c.record
class struct_drm_msm_gem_new(c.Struct):
  SIZE = 16
  size: int
  flags: int
  handle: int
struct_drm_msm_gem_new.register_fields([('size', ctypes.c_uint64, 0), ('flags', ctypes.c_uint32, 8), ('handle', ctypes.c_uint32, 12)])
@c.record
class struct_drm_msm_gem_info(c.Struct):
  SIZE = 24
  handle: int
  info: int
  value: int
  len: int
  pad: int
struct_drm_msm_gem_info.register_fields([('handle', ctypes.c_uint32, 0), ('info', ctypes.c_uint32, 4), ('value', ctypes.c_uint64, 8), ('len', ctypes.c_uint32, 16), ('pad', ctypes.c_uint32, 20)])
@c.record
class struct_drm_msm_gem_cpu_prep(c.Struct):
  SIZE = 24
  handle: int
  op: int
  timeout: struct_drm_msm_timespec
struct_drm_msm_gem_cpu_prep.register_fields([('handle', ctypes.c_uint32, 0), ('op', ctypes.c_uint32, 4), ('timeout', struct_drm_msm_timespec, 8)])
@c.record
class struct_drm_msm_gem_cpu_fini(c.Struct):
  SIZE = 4
  handle: int
struct_drm_msm_gem_cpu_fini.register_fields([('handle', ctypes.c_uint32, 0)])
@c.record
class struct_drm_msm_syncobj(c.Struct):
  SIZE = 16
  handle: int
  flags: int
  point: int
struct_drm_msm_syncobj.register_fields([('handle', ctypes.c_uint32, 0), ('flags', ctypes.c_uint32, 4), ('point', ctypes.c_uint64, 8)])
@c.record
class struct_drm_msm_gem_submit_reloc(c.Struct):
  SIZE = 24
  submit_offset: int
  _or: int
  shift: int
  reloc_idx: int
  reloc_offset: int
struct_drm_msm_gem_submit_reloc.register_fields([('submit_offset', ctypes.c_uint32, 0), ('_or', ctypes.c_uint32, 4), ('shift', ctypes.c_int32, 8), ('reloc_idx', ctypes.c_uint32, 12), ('reloc_offset', ctypes.c_uint64, 16)])
@c.record
class struct_drm_msm_gem_submit_cmd(c.Struct):
  SIZE = 32
  type: int
  submit_idx: int
  submit_offset: int
  size: int
  pad: int
  nr_relocs: int
  relocs: int
  iova: int
struct_drm_msm_gem_submit_cmd.register_fields([('type', ctypes.c_uint32, 0), ('submit_idx', ctypes.c_uint32, 4), ('submit_offset', ctypes.c_uint32, 8), ('size', ctypes.c_uint32, 12), ('pad', ctypes.c_uint32, 16), ('nr_relocs', ctypes.c_uint32, 20), ('relocs', ctypes.c_uint64, 24), ('iova', ctypes.c_uint64, 24)])
@c.record
class struct_drm_msm_gem_submit_bo(c.Struct):
  SIZE = 16
  flags: int
  handle: int
  presumed: int
struct_drm_msm_gem_submit_bo.register_fields([('flags', ctypes.c_uint32, 0), ('handle', ctypes.c_uint32, 4), ('presumed', ctypes.c_uint64, 8)])
@c.record
class struct_drm_msm_gem_submit(c.Struct):
  SIZE = 72
  flags: int
  fence: int
  nr_bos: int
  nr_cmds: int
  bos: int
  cmds: int
  fence_fd: int
  queueid: int
  in_syncobjs: int
  out_syncobjs: int
  nr_in_syncobjs: int
  nr_out_syncobjs: int
  syncobj_stride: int
  pad: int
struct_drm_msm_gem_submit.register_fields([('flags', ctypes.c_uint32, 0), ('fence', ctypes.c_uint32, 4), ('nr_bos', ctypes.c_uint32, 8), ('nr_cmds', ctypes.c_uint32, 12), ('bos', ctypes.c_uint64, 16), ('cmds', ctypes.c_uint64, 24), ('fence_fd', ctypes.c_int32, 32), ('queueid', ctypes.c_uint32, 36), ('in_syncobjs', ctypes.c_uint64, 40), ('out_syncobjs', ctypes.c_uint64, 48), ('nr_in_syncobjs', ctypes.c_uint32, 56), ('nr_out_syncobjs', ctypes.c_uint32, 60), ('syncobj_stride', ctypes.c_uint32, 64), ('pad', ctypes.c_uint32, 68)])
@c.record
class struct_drm_msm_vm_bind_op(c.Struct):
  SIZE = 40
  op: int
  handle: int
  obj_offset: int
  iova: int
  range: int
  flags: int
  pad: int
struct_drm_msm_vm_bind_op.register_fields([('op', ctypes.c_uint32, 0), ('handle', ctypes.c_uint32, 4), ('obj_offset', ctypes.c_uint64, 8), ('iova', ctypes.c_uint64, 16), ('range', ctypes.c_uint64, 24), ('flags', ctypes.c_uint32, 32), ('pad', ctypes.c_uint32, 36)])
@c.record
class struct_drm_msm_vm_bind(c.Struct):
  SIZE = 88
  flags: int
  nr_ops: int
  fence_fd: int
  queue_id: int
  in_syncobjs: int
  out_syncobjs: int
  nr_in_syncobjs: int
  nr_out_syncobjs: int
  syncobj_stride: int
  op_stride: int
  op: struct_drm_msm_vm_bind_op
  ops: int
struct_drm_msm_vm_bind.register_fields([('flags', ctypes.c_uint32, 0), ('nr_ops', ctypes.c_uint32, 4), ('fence_fd', ctypes.c_int32, 8), ('queue_id', ctypes.c_uint32, 12), ('in_syncobjs', ctypes.c_uint64, 16), ('out_syncobjs', ctypes.c_uint64, 24), ('nr_in_syncobjs', ctypes.c_uint32, 32), ('nr_out_syncobjs', ctypes.c_uint32, 36), ('syncobj_stride', ctypes.c_uint32, 40), ('op_stride', ctypes.c_uint32, 44), ('op', struct_drm_msm_vm_bind_op, 48), ('ops', ctypes.c_uint64, 48)])
@c.record
class struct_drm_msm_wait_fence(c.Struct):
  SIZE = 32
  fence: int
  flags: int
  timeout: struct_drm_msm_timespec
  queueid: int
struct_drm_msm_wait_fence.register_fields([('fence', ctypes.c_uint32, 0), ('flags', ctypes.c_uint32, 4), ('timeout', struct_drm_msm_timespec, 8), ('queueid', ctypes.c_uint32, 24)])
@c.record
class struct_drm_msm_gem_madvise(c.Struct):
  SIZE = 12
  handle: int
  madv: int
  retained: int
struct_drm_msm_gem_madvise.register_fields([('handle', ctypes.c_uint32, 0), ('madv', ctypes.c_uint32, 4), ('retained', ctypes.c_uint32, 8)])
@c.record
class struct_drm_msm_submitqueue(c.Struct):
  SIZE = 12
  flags: int
  prio: int
  id: int
struct_drm_msm_submitqueue.register_fields([('flags', ctypes.c_uint32, 0), ('prio', ctypes.c_uint32, 4), ('id', ctypes.c_uint32, 8)])
@c.record
class struct_drm_msm_submitqueue_query(c.Struct):
  SIZE = 24
  data: int
  id: int
  param: int
  len: int
  pad: int
struct_drm_msm_submitqueue_query.register_fields([('data', ctypes.c_uint64, 0), ('id', ctypes.c_uint32, 8), ('param', ctypes.c_uint32, 12), ('len', ctypes.c_uint32, 16), ('pad', ctypes.c_uint32, 20)])
@c.record
class struct_drm_msm_perfcntr_group(c.Struct):
  SIZE = 32
  group_name: c.Array[ctypes.c_ubyte, Literal[16]]
  nr_countables: int
  pad: int
  countables: int
struct_drm_msm_perfcntr_group.register_fields([('group_name', c.Array[ctypes.c_ubyte, Literal[16]], 0), ('nr_countables', ctypes.c_uint32, 16), ('pad', ctypes.c_uint32, 20), ('countables', ctypes.c_uint64, 24)])
@c.record
class struct_drm_msm_perfcntr_config(c.Struct):
  SIZE = 32
  flags: int
  nr_groups: int
  groups: int
  period: int
  bufsz_shift: int
  group_stride: int
struct_drm_msm_perfcntr_config.register_fields([('flags', ctypes.c_uint32, 0), ('nr_groups', ctypes.c_uint32, 4), ('groups', ctypes.c_uint64, 8), ('period', ctypes.c_uint64, 16), ('bufsz_shift', ctypes.c_uint32, 24), ('group_stride', ctypes.c_uint32, 28)])
DRM_CAP_DUMB_BUFFER = 0x1
DRM_CAP_VBLANK_HIGH_CRTC = 0x2
DRM_CAP_DUMB_PREFERRED_DEPTH = 0x3
DRM_CAP_DUMB_PREFER_SHADOW = 0x4
DRM_CAP_PRIME = 0x5
DRM_CAP_TIMESTAMP_MONOTONIC = 0x6
DRM_CAP_ASYNC_PAGE_FLIP = 0x7
DRM_CAP_CURSOR_WIDTH = 0x8
DRM_CAP_CURSOR_HEIGHT = 0x9
DRM_CAP_ADDFB2_MODIFIERS = 0x10
DRM_CAP_PAGE_FLIP_TARGET = 0x11
DRM_CAP_CRTC_IN_VBLANK_EVENT = 0x12
DRM_CAP_SYNCOBJ = 0x13
DRM_CAP_SYNCOBJ_TIMELINE = 0x14
DRM_CAP_ATOMIC_ASYNC_PAGE_FLIP = 0x15
DRM_RDWR = os.O_RDWR
DRM_CLOEXEC = os.O_CLOEXEC
DRM_SYNCOBJ_CREATE_SIGNALED = (1 << 0)
DRM_SYNCOBJ_FD_TO_HANDLE_FLAGS_IMPORT_SYNC_FILE = (1 << 0)
DRM_SYNCOBJ_FD_TO_HANDLE_FLAGS_TIMELINE = (1 << 1)
DRM_SYNCOBJ_HANDLE_TO_FD_FLAGS_EXPORT_SYNC_FILE = (1 << 0)
DRM_SYNCOBJ_HANDLE_TO_FD_FLAGS_TIMELINE = (1 << 1)
DRM_SYNCOBJ_WAIT_FLAGS_WAIT_ALL = (1 << 0)
DRM_SYNCOBJ_WAIT_FLAGS_WAIT_FOR_SUBMIT = (1 << 1)
DRM_SYNCOBJ_WAIT_FLAGS_WAIT_AVAILABLE = (1 << 2)
DRM_SYNCOBJ_WAIT_FLAGS_WAIT_DEADLINE = (1 << 3)
DRM_SYNCOBJ_QUERY_FLAGS_LAST_SUBMITTED = (1 << 0)
DRM_IOCTL_BASE = 'd'
DRM_IO = lambda nr: _IO(DRM_IOCTL_BASE,nr) # type: ignore
DRM_IOR = lambda nr,type: _IOR(DRM_IOCTL_BASE,nr,type) # type: ignore
DRM_IOW = lambda nr,type: _IOW(DRM_IOCTL_BASE,nr,type) # type: ignore
DRM_IOWR = lambda nr,type: _IOWR(DRM_IOCTL_BASE,nr,type) # type: ignore
DRM_IOCTL_VERSION = DRM_IOWR(0x00, struct_drm_version)
DRM_IOCTL_GEM_CLOSE = DRM_IOW (0x09, struct_drm_gem_close)
DRM_IOCTL_GET_CAP = DRM_IOWR(0x0c, struct_drm_get_cap)
DRM_IOCTL_PRIME_HANDLE_TO_FD = DRM_IOWR(0x2d, struct_drm_prime_handle)
DRM_IOCTL_PRIME_FD_TO_HANDLE = DRM_IOWR(0x2e, struct_drm_prime_handle)
DRM_IOCTL_SYNCOBJ_CREATE = DRM_IOWR(0xBF, struct_drm_syncobj_create)
DRM_IOCTL_SYNCOBJ_DESTROY = DRM_IOWR(0xC0, struct_drm_syncobj_destroy)
DRM_IOCTL_SYNCOBJ_HANDLE_TO_FD = DRM_IOWR(0xC1, struct_drm_syncobj_handle)
DRM_IOCTL_SYNCOBJ_FD_TO_HANDLE = DRM_IOWR(0xC2, struct_drm_syncobj_handle)
DRM_IOCTL_SYNCOBJ_WAIT = DRM_IOWR(0xC3, struct_drm_syncobj_wait)
DRM_IOCTL_SYNCOBJ_RESET = DRM_IOWR(0xC4, struct_drm_syncobj_array)
DRM_IOCTL_SYNCOBJ_SIGNAL = DRM_IOWR(0xC5, struct_drm_syncobj_array)
DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT = DRM_IOWR(0xCA, struct_drm_syncobj_timeline_wait)
DRM_IOCTL_SYNCOBJ_QUERY = DRM_IOWR(0xCB, struct_drm_syncobj_timeline_array)
DRM_IOCTL_SYNCOBJ_TRANSFER = DRM_IOWR(0xCC, struct_drm_syncobj_transfer)
DRM_IOCTL_SYNCOBJ_TIMELINE_SIGNAL = DRM_IOWR(0xCD, struct_drm_syncobj_timeline_array)
DRM_IOCTL_SYNCOBJ_EVENTFD = DRM_IOWR(0xCF, struct_drm_syncobj_eventfd)
DRM_COMMAND_BASE = 0x40
DRM_COMMAND_END = 0xA0
MSM_PIPE_NONE = 0x00
MSM_PIPE_2D0 = 0x01
MSM_PIPE_2D1 = 0x02
MSM_PIPE_3D0 = 0x10
MSM_PIPE_ID_MASK = 0xffff
MSM_PIPE_ID = lambda x: ((x) & MSM_PIPE_ID_MASK) # type: ignore
MSM_PIPE_FLAGS = lambda x: ((x) & ~MSM_PIPE_ID_MASK) # type: ignore
MSM_PARAM_GPU_ID = 0x01
MSM_PARAM_GMEM_SIZE = 0x02
MSM_PARAM_CHIP_ID = 0x03
MSM_PARAM_MAX_FREQ = 0x04
MSM_PARAM_TIMESTAMP = 0x05
MSM_PARAM_GMEM_BASE = 0x06
MSM_PARAM_PRIORITIES = 0x07
MSM_PARAM_PP_PGTABLE = 0x08
MSM_PARAM_FAULTS = 0x09
MSM_PARAM_SUSPENDS = 0x0a
MSM_PARAM_SYSPROF = 0x0b
MSM_PARAM_COMM = 0x0c
MSM_PARAM_CMDLINE = 0x0d
MSM_PARAM_VA_START = 0x0e
MSM_PARAM_VA_SIZE = 0x0f
MSM_PARAM_HIGHEST_BANK_BIT = 0x10
MSM_PARAM_RAYTRACING = 0x11
MSM_PARAM_UBWC_SWIZZLE = 0x12
MSM_PARAM_MACROTILE_MODE = 0x13
MSM_PARAM_UCHE_TRAP_BASE = 0x14
MSM_PARAM_HAS_PRR = 0x15
MSM_PARAM_EN_VM_BIND = 0x16
MSM_PARAM_AQE = 0x17
MSM_PARAM_NR_RINGS = MSM_PARAM_PRIORITIES
MSM_BO_SCANOUT = 0x00000001
MSM_BO_GPU_READONLY = 0x00000002
MSM_BO_NO_SHARE = 0x00000004
MSM_BO_CACHE_MASK = 0x000f0000
MSM_BO_CACHED = 0x00010000
MSM_BO_WC = 0x00020000
MSM_BO_UNCACHED = 0x00040000
MSM_BO_CACHED_COHERENT = 0x080000
MSM_BO_FLAGS = (MSM_BO_SCANOUT | MSM_BO_GPU_READONLY | MSM_BO_NO_SHARE | MSM_BO_CACHE_MASK)
MSM_INFO_GET_OFFSET = 0x00
MSM_INFO_GET_IOVA = 0x01
MSM_INFO_SET_NAME = 0x02
MSM_INFO_GET_NAME = 0x03
MSM_INFO_SET_IOVA = 0x04
MSM_INFO_GET_FLAGS = 0x05
MSM_INFO_SET_METADATA = 0x06
MSM_INFO_GET_METADATA = 0x07
MSM_PREP_READ = 0x01
MSM_PREP_WRITE = 0x02
MSM_PREP_NOSYNC = 0x04
MSM_PREP_BOOST = 0x08
MSM_PREP_FLAGS = (MSM_PREP_READ | MSM_PREP_WRITE | MSM_PREP_NOSYNC | MSM_PREP_BOOST | 0)
MSM_SYNCOBJ_RESET = 0x00000001
MSM_SYNCOBJ_FLAGS = ( MSM_SYNCOBJ_RESET | 0)
MSM_SUBMIT_CMD_BUF = 0x0001
MSM_SUBMIT_CMD_IB_TARGET_BUF = 0x0002
MSM_SUBMIT_CMD_CTX_RESTORE_BUF = 0x0003
MSM_SUBMIT_BO_READ = 0x0001
MSM_SUBMIT_BO_WRITE = 0x0002
MSM_SUBMIT_BO_DUMP = 0x0004
MSM_SUBMIT_BO_NO_IMPLICIT = 0x0008
MSM_SUBMIT_BO_FLAGS = (MSM_SUBMIT_BO_READ | MSM_SUBMIT_BO_WRITE | MSM_SUBMIT_BO_DUMP | MSM_SUBMIT_BO_NO_IMPLICIT)
MSM_SUBMIT_NO_IMPLICIT = 0x80000000
MSM_SUBMIT_FENCE_FD_IN = 0x40000000
MSM_SUBMIT_FENCE_FD_OUT = 0x20000000
MSM_SUBMIT_SUDO = 0x10000000
MSM_SUBMIT_SYNCOBJ_IN = 0x08000000
MSM_SUBMIT_SYNCOBJ_OUT = 0x04000000
MSM_SUBMIT_FENCE_SN_IN = 0x02000000
MSM_SUBMIT_FLAGS = ( MSM_SUBMIT_NO_IMPLICIT   | MSM_SUBMIT_FENCE_FD_IN   | MSM_SUBMIT_FENCE_FD_OUT  | MSM_SUBMIT_SUDO          | MSM_SUBMIT_SYNCOBJ_IN    | MSM_SUBMIT_SYNCOBJ_OUT   | MSM_SUBMIT_FENCE_SN_IN   | 0)
MSM_VM_BIND_OP_UNMAP = 0
MSM_VM_BIND_OP_MAP = 1
MSM_VM_BIND_OP_MAP_NULL = 2
MSM_VM_BIND_OP_DUMP = 1
MSM_VM_BIND_OP_FLAGS = ( MSM_VM_BIND_OP_DUMP | 0)
MSM_VM_BIND_FENCE_FD_IN = 0x00000001
MSM_VM_BIND_FENCE_FD_OUT = 0x00000002
MSM_VM_BIND_FLAGS = ( MSM_VM_BIND_FENCE_FD_IN | MSM_VM_BIND_FENCE_FD_OUT | 0)
MSM_WAIT_FENCE_BOOST = 0x00000001
MSM_WAIT_FENCE_FLAGS = ( MSM_WAIT_FENCE_BOOST | 0)
MSM_MADV_WILLNEED = 0
MSM_MADV_DONTNEED = 1
__MSM_MADV_PURGED = 2
MSM_SUBMITQUEUE_ALLOW_PREEMPT = 0x00000001
MSM_SUBMITQUEUE_VM_BIND = 0x00000002
MSM_SUBMITQUEUE_FLAGS = ( MSM_SUBMITQUEUE_ALLOW_PREEMPT | MSM_SUBMITQUEUE_VM_BIND | 0)
MSM_SUBMITQUEUE_PARAM_FAULTS = 0
MSM_PERFCNTR_STREAM = 0x00000001
MSM_PERFCNTR_UPDATE = 0x00000002
MSM_PERFCNTR_FLAGS = ( MSM_PERFCNTR_STREAM | MSM_PERFCNTR_UPDATE | 0)
DRM_MSM_GET_PARAM = 0x00
DRM_MSM_SET_PARAM = 0x01
DRM_MSM_GEM_NEW = 0x02
DRM_MSM_GEM_INFO = 0x03
DRM_MSM_GEM_CPU_PREP = 0x04
DRM_MSM_GEM_CPU_FINI = 0x05
DRM_MSM_GEM_SUBMIT = 0x06
DRM_MSM_WAIT_FENCE = 0x07
DRM_MSM_GEM_MADVISE = 0x08
DRM_MSM_SUBMITQUEUE_NEW = 0x0A
DRM_MSM_SUBMITQUEUE_CLOSE = 0x0B
DRM_MSM_SUBMITQUEUE_QUERY = 0x0C
DRM_MSM_VM_BIND = 0x0D
DRM_MSM_PERFCNTR_CONFIG = 0x0E
DRM_IOCTL_MSM_GET_PARAM = DRM_IOWR(DRM_COMMAND_BASE + DRM_MSM_GET_PARAM, struct_drm_msm_param)
DRM_IOCTL_MSM_SET_PARAM = DRM_IOW (DRM_COMMAND_BASE + DRM_MSM_SET_PARAM, struct_drm_msm_param)
DRM_IOCTL_MSM_GEM_NEW = DRM_IOWR(DRM_COMMAND_BASE + DRM_MSM_GEM_NEW, struct_drm_msm_gem_new)
DRM_IOCTL_MSM_GEM_INFO = DRM_IOWR(DRM_COMMAND_BASE + DRM_MSM_GEM_INFO, struct_drm_msm_gem_info)
DRM_IOCTL_MSM_GEM_CPU_PREP = DRM_IOW (DRM_COMMAND_BASE + DRM_MSM_GEM_CPU_PREP, struct_drm_msm_gem_cpu_prep)
DRM_IOCTL_MSM_GEM_CPU_FINI = DRM_IOW (DRM_COMMAND_BASE + DRM_MSM_GEM_CPU_FINI, struct_drm_msm_gem_cpu_fini)
DRM_IOCTL_MSM_GEM_SUBMIT = DRM_IOWR(DRM_COMMAND_BASE + DRM_MSM_GEM_SUBMIT, struct_drm_msm_gem_submit)
DRM_IOCTL_MSM_WAIT_FENCE = DRM_IOW (DRM_COMMAND_BASE + DRM_MSM_WAIT_FENCE, struct_drm_msm_wait_fence)
DRM_IOCTL_MSM_GEM_MADVISE = DRM_IOWR(DRM_COMMAND_BASE + DRM_MSM_GEM_MADVISE, struct_drm_msm_gem_madvise)
DRM_IOCTL_MSM_SUBMITQUEUE_NEW = DRM_IOWR(DRM_COMMAND_BASE + DRM_MSM_SUBMITQUEUE_NEW, struct_drm_msm_submitqueue)
DRM_IOCTL_MSM_SUBMITQUEUE_CLOSE = DRM_IOW (DRM_COMMAND_BASE + DRM_MSM_SUBMITQUEUE_CLOSE, __u32)
DRM_IOCTL_MSM_SUBMITQUEUE_QUERY = DRM_IOW (DRM_COMMAND_BASE + DRM_MSM_SUBMITQUEUE_QUERY, struct_drm_msm_submitqueue_query)
DRM_IOCTL_MSM_VM_BIND = DRM_IOWR(DRM_COMMAND_BASE + DRM_MSM_VM_BIND, struct_drm_msm_vm_bind)
DRM_IOCTL_MSM_PERFCNTR_CONFIG = DRM_IOW (DRM_COMMAND_BASE + DRM_MSM_PERFCNTR_CONFIG, struct_drm_msm_perfcntr_config)
