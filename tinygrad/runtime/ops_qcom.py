from __future__ import annotations
import contextlib, ctypes, functools, gc, hashlib, itertools, math, os, struct, sys, time, warnings, weakref
assert sys.platform != 'win32'
from dataclasses import replace
from decimal import Decimal
from typing import Any, Sequence, cast
from tinygrad.device import Buffer, BufferSpec, Compiled, Device, ProfileDeviceEvent, Program, TinyELF
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import DEBUG, IMAGE, PROFILE, ContextVar, ansistrip, ceildiv, cpu_profile, dedup, from_mv, getenv, is_image_shape, mv_address
from tinygrad.helpers import perf_counter_us, prod, round_up, to_mv
from tinygrad.renderer import Estimates
from tinygrad.renderer.nir import IR3Renderer
from tinygrad.runtime.autogen import mesa
from tinygrad.runtime.support import hcq2
from tinygrad.runtime.support.hcq import HCQBuffer
from tinygrad.runtime.support.hcq2 import HCQ_RUNTIME_DEV, HCQ2Compiled, HCQAllocator, HCQInfo, make_buf, make_call
from tinygrad.runtime.support.hcq2 import get_submit, make_binary_patch, make_patches, make_submit
from tinygrad.runtime.support.memory import TLSFAllocator
from tinygrad.runtime.support.qcom_iface import BATCH, BEYOND_REPAIR, CLOSED, DEAD, FREE, LOST, NO_NODE, OUTDATED, PATCH, REF, REF_FIRST, REF_INPUT
from tinygrad.runtime.support.qcom_iface import RECURS, REF_OWN, REF_READ, REF_WRITTEN, REOPEN, REPORT, SEG, QCOMError, QCOMIface, ifaces
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat, sint
from tinygrad.engine.realize import estimate_uop, get_call_arg_uops, get_call_name, get_call_outs_ins, get_call_var_uops, get_runtime
from tinygrad.engine.realize import runtime_cache, view_base

BUFTYPE_TEX, BUFTYPE_IBO = 1, 2

# *****************
# 1. PM4 and register fields

@functools.cache
def field_place(name:str) -> tuple[int, int, int]:
  return getattr(mesa, f"{name}__MASK"), getattr(mesa, f"{name}__SHIFT"), getattr(mesa, f"{name}__SHR", 0)

def field(name:str, val:Any) -> Any:
  """`val` (bytes, vec4, ...) in the place and the unit of register field `name`. Raises ValueError for what the field can't express."""
  mask, shift, shr = field_place(name)
  if isinstance(val, UOp): return (val >> shr if shr else val).cast(dtypes.uint32) * (1 << shift)
  if val & (1 << shr) - 1: raise ValueError(f"{val} is not a multiple of {1 << shr}, the unit of register field {name}")
  if val < 0 or (val >> shr << shift) & ~mask: raise ValueError(f"{val} does not fit register field {name} ({(mask >> shift).bit_length()} bits)")
  return val >> shr << shift

def reg(name:str, **fields) -> Any:
  """Value of register or packet dword `name` from its fields (see field), bools for one-bit flags."""
  def one(f:str, v:Any) -> Any: return (getattr(mesa, f) if v else 0) if isinstance(v, bool) else field(f, v)
  vals = [one(f"{name}_{k.removeprefix('_').upper()}", v) for k,v in fields.items()]
  return functools.reduce(lambda a,b: a + b, vals, 0)

def parity(val:int) -> int: return 1 ^ (val.bit_count() & 1)
def pkt7_hdr(opcode:int, cnt:int) -> int: return mesa.CP_TYPE7_PKT | cnt & 0x3FFF | parity(cnt) << 15 | (opcode & 0x7F) << 16 | parity(opcode) << 23
def pkt4_hdr(regno:int, cnt:int) -> int: return mesa.CP_TYPE4_PKT | cnt & 0x7F | parity(cnt) << 7 | (regno & 0x3FFFF) << 8 | parity(regno) << 27
def ctz(v:int) -> int: return (v & -v).bit_length() - 1

class Addr:
  """A GPU address in a stream or in arguments: `buf` (a UOp, None for the arena that holds both) plus an offset in bytes, a multiple of `align`."""
  def __init__(self, buf:Any, offset:int=0, align:int=1): self.buf, self.offset, self.align = buf, offset, align

class Stream:
  """Dwords of a command stream or of kernel arguments. `places` are the bytes that are filled in later: an Addr two dwords, a UOp its own size."""
  def __init__(self, data:bytes=b"", places:Sequence[tuple[int, Addr|UOp]]=()): self.data, self.places = bytearray(data), list(places)
  def q(self, *vals):
    for v in vals:
      if isinstance(v, (Addr, UOp)): self.places.append((len(self.data), v))
      self.data += bytes(8) if isinstance(v, Addr) else bytes(4) if isinstance(v, UOp) else v.to_bytes(4, "little")
  def add(self, s:Stream, given:dict[Any, Addr]):
    """Appends a stream whose addresses are relative to names in `given`."""
    for o,v in s.places:
      self.places.append((len(self.data) + o, Addr((g:=given[v.buf]).buf, g.offset + v.offset, v.align) if isinstance(v, Addr) else v))
    self.data += s.data
  def cmd(self, opcode:int, *vals): self.q(pkt7_hdr(opcode, sum(1 + isinstance(v, Addr) for v in vals)), *vals)
  def reg(self, regno:int, *vals): self.q(pkt4_hdr(regno, sum(1 + isinstance(v, Addr) for v in vals)), *vals)
  def load_state(self, typ:int, block:int, units:int, addr:Addr):
    self.cmd(mesa.CP_LOAD_STATE6_FRAG, reg("CP_LOAD_STATE6_0", state_type=typ, state_src=mesa.SS6_INDIRECT, state_block=block, num_unit=units), addr)

  # a name for who reads a capture or a crash dump
  def note(self, text:str): self.cmd(mesa.CP_NOP, *struct.unpack(f"<{(n:=ceildiv(len(text), 4))}I", text.encode().ljust(4*n, b"\0")))

  # CPU writes become visible to shaders: UCHE may hold lines from before
  def invalidate(self):
    self.cmd(mesa.CP_EVENT_WRITE, mesa.CACHE_INVALIDATE)
    self.cmd(mesa.CP_WAIT_FOR_IDLE)
  # the GPU's writes reach memory, then `value` does
  def signal(self, addr:Addr, value:int=0):
    self.cmd(mesa.CP_WAIT_FOR_IDLE)
    self.cmd(mesa.CP_EVENT_WRITE, reg("CP_EVENT_WRITE_0", event=mesa.CACHE_FLUSH_TS), addr, value)
  # both ways; `zero` is a dword that is zero and stays so
  def flush(self, zero:Addr):
    self.signal(zero)
    self.invalidate()
  def timestamp(self, addr:Addr):
    self.cmd(mesa.CP_WAIT_FOR_IDLE)
    self.cmd(mesa.CP_REG_TO_MEM, reg("CP_REG_TO_MEM_0", reg=mesa.REG_A6XX_CP_ALWAYS_ON_COUNTER, cnt=2, _64b=True), addr)

  # state that compute depends on and that another client of the GPU may have left different. a630 values: Mesa freedreno_devices.py
  SP_FLOAT_CNTL = 0xae04
  def context_state(self, border_color:Addr):
    for r,v in ((mesa.REG_A6XX_SP_CHICKEN_BITS, 0x1430), (mesa.REG_A6XX_SP_DBG_ECO_CNTL, 0), (self.SP_FLOAT_CNTL, 0),
                (mesa.REG_A6XX_TPL1_DBG_ECO_CNTL, 0x108000), (mesa.REG_A6XX_HLSQ_DBG_ECO_CNTL, 0x80000), (mesa.REG_A6XX_UCHE_CLIENT_PF, 4),
                (mesa.REG_A6XX_UCHE_UNKNOWN_0E12, 0x10000001), (mesa.REG_A6XX_HLSQ_SHARED_CONSTS, 0),
                (mesa.REG_A6XX_SP_CS_BOOLEAN_CF_MASK, 0)): self.reg(r, v)
    self.reg(mesa.REG_A6XX_SP_PERFCTR_SHADER_MASK, reg("A6XX_SP_PERFCTR_SHADER_MASK", cs=True))
    self.reg(mesa.REG_A6XX_TPL1_CS_BORDER_COLOR_BASE, border_color)

  def dispatch(self, prg:QCOMProgram, code:Addr, args:Addr, scratch:Addr|None, global_size:Sequence[sint|float], local_size:Sequence[sint]):
    """One launch: `global_size` counts workgroups, `local_size` threads of each. `args` points at prg.consts_bytes of constants, then descriptors."""
    if prg.NIR and any(isinstance(g, float) and not g.is_integer() for g in global_size): raise RuntimeError(f"partial workgroups: {global_size=}")
    groups = [math.ceil(g) if isinstance(g, float) else g for g in global_size]
    threads = [round(t) if isinstance(t:=g * l, float) else t for g,l in zip(global_size, local_size)] # g is a quotient: g * l need not be whole
    prg.check_launch(groups, local_size)

    self.cmd(mesa.CP_SET_MARKER, reg("A6XX_CP_SET_MARKER_0", mode=mesa.RM6_COMPUTE))
    self.reg(mesa.REG_A6XX_SP_UPDATE_CNTL, reg("A6XX_SP_UPDATE_CNTL", cs_state=True, cs_uav=True))
    self.reg(mesa.REG_A6XX_SP_UPDATE_CNTL, 0)
    self.reg(mesa.REG_A6XX_SP_CS_TSIZE, prg.tex_cnt)
    self.reg(mesa.REG_A6XX_SP_CS_USIZE, prg.ibo_cnt)
    isam = mesa.ISAMMODE_GL if prg.NIR else mesa.ISAMMODE_CL
    self.reg(mesa.REG_A6XX_SP_MODE_CNTL, reg("A6XX_SP_MODE_CNTL", isammode=isam, constant_demotion_enable=prg.NIR))
    self.reg(mesa.REG_A6XX_TPL1_MODE_CNTL, reg("A6XX_TPL1_MODE_CNTL", isammode=isam))
    self.cmd(mesa.CP_WAIT_FOR_IDLE) # the dispatch before this one has finished, its state and its UCHE writes may be used

    wge = reg("A6XX_SP_CS_WGE_CNTL", linearlocalidregid=0xfc, threadsize=mesa.THREAD64)
    # Mesa's code has the workgroup's size among its constants, the vendor's in a register
    ids = reg("A6XX_SP_CS_CONST_CONFIG_0", wgidconstid=prg.wgid, wgsizeconstid=0xfc if prg.NIR else prg.wgsz, wgoffsetconstid=prg.wgoff,
              localidregid=prg.lid)
    self.reg(mesa.REG_A6XX_SP_CS_NDRANGE_0,
             reg("A6XX_SP_CS_NDRANGE_0", kerneldim=3, **{f"localsize{d}": l - 1 for d,l in zip("xyz", local_size)}),
             *itertools.chain(*((u32(t), 0) for t in threads)), ids, wge, *map(u32, groups))
    self.reg(mesa.REG_A6XX_SP_CS_CNTL_0,
             reg("A6XX_SP_CS_CNTL_0", threadsize=mesa.THREAD64, halfregfootprint=prg.hregs, fullregfootprint=prg.fregs, branchstack=prg.brnchstck,
                 mergedregs=prg.mergedregs),
             reg("A6XX_SP_CS_CNTL_1", constantrammode=mesa.CONSTLEN_256, shared_size=prg.shared_size), 0, prg.prg_offset, code,
             reg("A6XX_SP_CS_PVT_MEM_PARAM", memsizeperitem=prg.pvtmem_per_item), *((scratch,) if scratch is not None else (0, 0)),
             reg("A6XX_SP_CS_PVT_MEM_SIZE", totalpvtmemsize=prg.pvtmem_total))
    self.load_state(mesa.ST_CONSTANTS, mesa.SB6_CS_SHADER, prg.consts_bytes // 16, args)
    self.load_state(mesa.ST_SHADER, mesa.SB6_CS_SHADER, min(prg.instrlen, 64), code) # a preload, as much as the instruction cache has groups
    self.reg(mesa.REG_A6XX_SP_REG_PROG_ID_0, 0xfcfcfcfc, 0xfcfcfcfc, 0xfcfcfcfc, 0xfc,
             reg("A6XX_SP_CS_CONST_CONFIG", constlen=prg.consts_bytes // 16, enabled=True))
    self.reg(mesa.REG_A6XX_SP_CS_PVT_MEM_STACK_OFFSET, reg("A6XX_SP_CS_PVT_MEM_STACK_OFFSET", offset=prg.pvtmem_total))
    if prg.instrlen > 64: # hangs without, Mesa issue 5892
      self.reg(mesa.REG_A6XX_SP_PS_INSTR_SIZE, prg.instrlen)
      self.cmd(mesa.CP_EVENT_WRITE, mesa.LABEL)
    self.reg(mesa.REG_A6XX_SP_CS_INSTR_SIZE, prg.instrlen) # groups of 16 instructions

    def part(off:int) -> Addr: return Addr(args.buf, args.offset + off)
    if prg.samp_cnt:
      self.load_state(mesa.ST_SHADER, mesa.SB6_CS_TEX, prg.samp_cnt, part(prg.samp_off))
      self.reg(mesa.REG_A6XX_SP_CS_SAMPLER_BASE, part(prg.samp_off))
    if prg.tex_cnt:
      self.load_state(mesa.ST_CONSTANTS, mesa.SB6_CS_TEX, min(16, prg.tex_cnt), part(prg.tex_off))
      self.reg(mesa.REG_A6XX_SP_CS_TEXMEMOBJ_BASE, part(prg.tex_off))
    if prg.ibo_cnt:
      self.load_state(mesa.ST6_UAV, mesa.SB6_CS_SHADER, prg.ibo_cnt, part(prg.ibo_off))
      self.reg(mesa.REG_A6XX_SP_CS_UAV_BASE, part(prg.ibo_off))
    self.reg(mesa.REG_A6XX_SP_CS_CONFIG, reg("A6XX_SP_CS_CONFIG", enabled=True, nsamp=prg.samp_cnt, ntex=prg.tex_cnt, nuav=prg.ibo_cnt))
    if prg.NIR: self.cmd(mesa.CP_EXEC_CS, 0, *map(u32, groups))
    else: self.cmd(mesa.CP_RUN_OPENCL, 0)

def u32(x:sint) -> Any: return x.cast(dtypes.uint32) if isinstance(x, UOp) else int(x)

@functools.cache
def descriptor(height:int, width:int, itemsize:int, tex:bool) -> bytes:
  """The first 32 bytes of a texture's or a UAV's descriptor, without the address."""
  fmt, pitch = mesa.FMT6_32_32_32_32_FLOAT if itemsize == 4 else mesa.FMT6_16_16_16_16_FLOAT, width * 4 * itemsize
  swiz = {"swiz_x": 0, "swiz_y": 1, "swiz_z": 2, "swiz_w": 3} if tex else {}
  return struct.pack("<8I", reg("A6XX_TEX_CONST_0", fmt=fmt, **swiz) | (8 if tex else 0), reg("A6XX_TEX_CONST_1", width=width, height=height),
                     reg("A6XX_TEX_CONST_2", type=mesa.A6XX_TEX_2D, pitch=pitch, pitchalign=ctz(pitch)-6), 0, 0, 0,
                     reg("A6XX_TEX_CONST_6", plane_pitch=0x400000), 13)

@functools.cache
def sampler() -> bytes:
  """The first 8 bytes of a sampler's descriptor: texels by their coordinates, zero beyond the image."""
  c = mesa.A6XX_TEX_CLAMP_TO_BORDER
  return struct.pack("<2I", reg("A6XX_TEX_SAMP_0", wrap_s=c, wrap_t=c, wrap_r=c),
                     reg("A6XX_TEX_SAMP_1", unnorm_coords=True, cubemapseamlessfiltoff=True))

# *****************
# 2. programs

class QCOMProgram(Program['QCOMDevice']):
  """What a compiled kernel needs to be launched. Sizes in bytes unless the name says otherwise; register counts and descriptor counts as numbers."""
  def __init__(self, dev:QCOMDevice, obj:TinyELF):
    self.dev, self.name, self.signature, self.launches = dev, obj.name, obj.signature, dict[tuple, Stream]()
    self.NIR = isinstance(dev.renderer, IR3Renderer)
    (self._parse_ir3 if self.NIR else self._parse_cl)(obj.lib)
    self.pvtmem_per_item = round_up(self.pvtmem, 512)
    self.pvtmem_total = self.pvtmem_per_item * 128 * 16   # of one SP: 128 fibers of 16 waves; the call stack comes after it
    self.scratch_bytes = self.pvtmem_total * 2            # 2 SPs
    self.shared_size = max(1, (self.shmem - 1) // 1024)   # in 1 KiB, minus one
    self.max_threads = min(1024, ((384 * 32) // (max(1, (self.fregs + round_up(self.hregs, 2) // 2)) * 128)) * 128)
    if self.shmem > 32 << 10: raise RuntimeError(f"{self.name} needs {self.shmem} bytes of local memory, an Adreno 630 has 32768")
    if self.consts_bytes > 256 * 16: raise RuntimeError(f"{self.name} needs {self.consts_bytes} bytes of constants, an Adreno 630 has 4096")

  def check_launch(self, groups:Sequence[sint], local_size:Sequence[sint]):
    if any(isinstance(l, UOp) for l in local_size): raise RuntimeError(f"{self.name}: a workgroup must have a fixed size: {local_size}")
    if prod(local_size) > self.max_threads:
      raise RuntimeError(f"Too many resources requested for launch: {self.name} can have {self.max_threads} threads in a workgroup, not {local_size}")
    if any(l > 1024 for l in local_size) or any(not isinstance(g, UOp) and g * l >= 1 << 32 for g,l in zip(groups, local_size)):
      raise RuntimeError(f"Invalid global/local dims {tuple(groups)}, {tuple(local_size)}")

  def _parse_ir3(self, lib:bytes):
    from tinygrad.runtime.support.compiler_mesa import IR3Compiler
    v, cs, imm_vals, self.image = IR3Compiler.unpack_lib(lib)
    self.prg_offset, self.brnchstck, self.pvtmem, self.shmem, self.instrlen = 0, v.branchstack, v.pvtmem_size, v.shared_size, v.instrlen
    params = cs.allocs.consts[mesa.IR3_CONST_ALLOC_DRIVER_PARAMS]
    self.wgsz, self.wgoff = params.offset_vec4 * 4 + 8 if params.size_vec4 else 0xfc, 0xfc # the workgroup's size is in this constant
    self.wgid, self.lid = v.cs.work_group_id, v.cs.local_invocation_id
    self.fregs, self.hregs, self.mergedregs = v.info.max_reg + 1, v.info.max_half_reg + 1, v.mergedregs # merged: halves of full registers
    self.buf_off, imm_off = cs.ubo_state.range[0].offset, cs.allocs.max_const_offset_vec4 * 16
    self.consts = [(imm_off, imm_vals)]
    self.consts_bytes = round_up(max(v.constlen * 16, imm_off + len(imm_vals), 16), 64)
    # a texture and a sampler for each image that is read, then the images that are written
    self.samp_cnt, self.tex_cnt, self.ibo_cnt = (nt:=v.image_mapping.num_tex), nt, v.num_uavs - nt
    self.tex_to_image = list(v.image_mapping.tex_to_image[:nt])
    self.nsamplers = self.samp_cnt
    self.tex_off, self.ibo_off, self.samp_off = (c:=self.consts_bytes), c + 64 * self.tex_cnt, c + 64 * (self.tex_cnt + self.ibo_cnt)

  def _parse_cl(self, lib:bytes):
    """The vendor OpenCL compiler's container: the offsets of its tables are at fixed places. RuntimeError for one that can't be what it says."""
    def check(ok:bool, why:str):
      if not ok: raise RuntimeError(f"{self.name}: broken QCOMCL program of {len(lib)} bytes, {why}. Compile it again, or use Mesa's compiler (IR3)")
    def u32_at(off:int, what:str, limit:int=0xffffffff) -> int:
      check(off + 4 <= len(lib), f"{what} would be at {off:#x}")
      check((ret:=struct.unpack_from("<I", lib, off)[0]) <= limit, f"{what} is {ret:#x}, {limit:#x} is possible")
      return ret
    size, start, desc = u32_at(0x100, "the image's size"), u32_at(0xc0, "the image's offset"), u32_at(0x110, "the descriptor's offset")
    check(0 < size <= len(lib) - start, f"its image is {size:#x} bytes at {start:#x}")
    self.image, self.instrlen = lib[start:start+size] + bytes(-size % 128), ceildiv(size, 128) # whole groups are fetched
    self.prg_offset, self.brnchstck = u32_at(desc+0xc4, "the entry point", size - 1), u32_at(desc+0x108, "twice the branch stack", 127) // 2
    self.pvtmem, self.shmem = u32_at(desc+0xc8, "private memory", 255 * 512), u32_at(desc+0xd8, "local memory")
    self.wgid, self.wgsz, self.wgoff, self.lid = 0xcf, 0xc0, 0xcc, 0
    regs = u32_at(0x34, "the offset of the register counts")
    self.fregs, self.hregs, self.mergedregs = u32_at(regs+0x14, "full registers", 63), u32_at(regs+0x18, "half registers", 63), False
    if (nsamp:=u32_at(desc+0xdc, "the number of samplers")) > 1: raise RuntimeError(f"{self.name} declares {nsamp} samplers, 1 is supported")
    self.samp_cnt, self.nsamplers = (2, 2) if nsamp else (0, 0)
    pos, args = round_up(desc + 0x158 + len(self.name), 4) + 8 * nsamp, []
    while pos + 32 <= len(lib) and (length:=u32_at(pos, "an argument")):
      check(length >= 32, f"the argument at {pos:#x} has {length} bytes")
      args.append((u32_at(pos+12, "an argument's place") * 4, u32_at(pos+28, "an argument's type")))
      pos += length
    self.consts_bytes, self.consts = 2048, []
    images = [typ for _,typ in args if typ in (BUFTYPE_TEX, BUFTYPE_IBO)]
    self.buf_offs = [off for off,typ in args if typ not in (BUFTYPE_TEX, BUFTYPE_IBO)]
    nimg = sum(is_image_shape(shape) for _,_,_,shape in self.signature)
    check(len(images) == nimg and len(self.buf_offs) >= len(self.signature) - nimg,
          f"it has {len(self.buf_offs)} plain arguments and {len(images)} images, {len(self.signature) - nimg} and {nimg} are passed")
    check(all(o + 8 <= self.consts_bytes for o in self.buf_offs), f"an argument is at byte {max(self.buf_offs, default=0)} of {self.consts_bytes}")
    self.tex_cnt, self.ibo_cnt = images.count(BUFTYPE_TEX), images.count(BUFTYPE_IBO)
    self.image_order = [i for t in (BUFTYPE_IBO, BUFTYPE_TEX) for i,typ in enumerate(images) if typ == t] # the images written come first, as in NIR
    self.tex_to_image = list(range(self.tex_cnt))
    if u32_at(0xb0, "the number of constants"):
      check((table:=u32_at(0xac, "the offset of the constants")) <= start, f"its constants at {table:#x} are not before its image at {start:#x}")
      for p in range(table, start - 39, 40):
        nbytes = 2 << u32_at(p+24, "a constant's width", 1)
        check((off:=u32_at(p+16, "a constant's place") * nbytes) + nbytes <= self.consts_bytes, f"a constant is at byte {off} of {self.consts_bytes}")
        self.consts.append((off, lib[p:p+nbytes]))
    self.ibo_off, self.tex_off, self.samp_off = 2048, 2048 + 64 * self.ibo_cnt, 2048 + 64 * (self.tex_cnt + self.ibo_cnt)

  @property
  def args_bytes(self) -> int: return self.consts_bytes + 64 * (self.tex_cnt + self.ibo_cnt) + 16 * self.nsamplers

  def arguments(self, bufs:Sequence[Addr], vals:Sequence[Any], local_size:Sequence[int]) -> Stream:
    """Constants and descriptors of one launch, args_bytes long. `bufs` and `vals` as in the signature: buffers first, then variables."""
    data, values = bytearray(self.args_bytes), list[tuple[int, Addr|UOp]]()
    for off,val in self.consts: data[off:off+len(val)] = val
    if self.wgsz != 0xfc and self.NIR: struct.pack_into("<III", data, self.wgsz * 4, *local_size)
    sig = [(bufs[slot], dt, shape) for _,slot,dt,shape in self.signature[:len(bufs)]]
    ubos, imgs = [b for b,_,shape in sig if not is_image_shape(shape)], [x for x in sig if is_image_shape(x[2])]
    val_sig = self.signature[len(bufs):]
    if self.NIR:
      values += [(self.buf_off + 8*i, b) for i,b in enumerate(ubos)]
      offs = [self.buf_off + o for o,_ in TinyELF.iter_sig(val_sig, len(ubos) * 8)]
    else:
      imgs = [imgs[i] for i in self.image_order]
      values += list(zip(self.buf_offs, ubos))
      offs = self.buf_offs[len(ubos):]
    for off,(_,_,dt,_),v in zip(offs, val_sig, vals):
      if isinstance(v, UOp): values.append((off, v.cast(dt)))
      else: struct.pack_into(f"<{dt.fmt}", data, off, v)
    for i in range(self.tex_cnt): values.append(self._image(data, self.tex_off + 64*i, *imgs[self.ibo_cnt + self.tex_to_image[i]], tex=True))
    for i in range(self.ibo_cnt): values.append(self._image(data, self.ibo_off + 64*i, *imgs[i], tex=False))
    for i in range(self.nsamplers if self.NIR else min(self.nsamplers, 1)): data[self.samp_off+16*i:self.samp_off+16*i+8] = sampler()
    return Stream(data, values)

  def _image(self, data:bytearray, off:int, buf:Addr, dt:DType, shape:tuple, tex:bool) -> tuple[int, Addr]:
    if (pitch:=shape[1] * 4 * dt.itemsize) % 64: raise RuntimeError(f"{self.name}: an image row of {pitch} bytes is not a multiple of 64")
    data[off:off+32] = descriptor(shape[0], shape[1], dt.itemsize, tex)
    return off + 16, Addr(buf.buf, buf.offset, 64) # the descriptor has no room for lower bits

  def __call__(self, *bufs:HCQBuffer, global_size:tuple[int|float,int|float,int|float]=(1,1,1), local_size:tuple[int,int,int]=(1,1,1),
               vals:tuple[int|None, ...]=(), wait=False, timeout:int|None=None) -> float|None:
    """Launches outside of a batch and waits for it, which only the search for a workgroup size does. Returns seconds."""
    ts, scratch = [self.dev.signal(f"launch_{n}") for n in ("start", "end")], self.dev.scratch(self.scratch_bytes) if self.scratch_bytes else None
    enc = Encoder(lambda b: (int(b.va_addr), None))
    enc.launch(self, Addr(self.code._buf), [Addr(b) for b in bufs], vals, global_size, local_size, Addr(scratch._buf) if scratch else None,
               [Addr(t._buf) for t in ts])
    self.dev.run_encoder(enc.finish(Addr(self.dev.signal("timeline")._buf)), self.name)
    self.dev.synchronize(timeout)
    st, en = (t._buf.cpu_view().view(fmt='Q')[0] for t in ts)
    return (en - st) / self.dev.timestamp_divider / 1e6

  @functools.cached_property
  def code(self) -> Buffer: return self.dev.gpu_bytes(self.image)

# *****************
# 3. batches: one submission of everything between two points where the host takes part

# Estimated GPU time of one submit, in ms, at about half of what an Adreno 630 peaks at. A display shares the ring and gets its turn between submits.
SUBMIT_BUDGET_MS, EST_GFLOPS, EST_GBPS = 8.0, 300.0, 20.0

def estimate_ms(est:Estimates) -> float:
  """A batch is split when it is captured: what depends on variables counts with their upper bounds."""
  ops, mem = (x.vmax if isinstance(x, UOp) else x for x in (est.ops, est.mem))
  return max(ops / (EST_GFLOPS * 1e6), mem / (EST_GBPS * 1e6))

# Steps of the debug ladder, see docs/debugging.md. A comma-separated QCOM_DEBUG names some of:
#   single  one kernel per submit                   sync    and each is waited for: errors name the kernel that made them
#   flush   caches are written back and invalidated before and after each kernel
#   poison  memory that nobody has written is 0xff, which is -1 or NaN, also what was freed and is handed out again
QCOM_DEBUG, DEBUG_STEPS = ContextVar("QCOM_DEBUG", ""), ("single", "sync", "flush", "poison")
def debugging(step:str) -> bool: return bool(QCOM_DEBUG.value) and step in str(QCOM_DEBUG.value).split(",")

class Encoder:
  """
  Lays out an arena (arguments and IBs of a batch, in GPU memory) and the tables that the submitter in qcom_iface reads (in CPU memory).
  The same set of references patches addresses into the arena and becomes the buffer list: `refs` is filled by nothing but Addr.
  `resolve(buf)` gives an address (int or link-time UOp) and, for an input that changes from run to run, its index among the inputs.
  """
  def __init__(self, resolve):
    self.resolve, self.arena, self.values = resolve, bytearray(256), list[tuple[int, Any]]() # the first 256 bytes stay zero: border colours
    self.refs, self.flags, self.segs, self.used = {None: 0}, [0], list[tuple[int, int, list[int]]](), [0]
    self.patches:list[tuple[int, int, int, int]] = []
    self.ib, self.cost = Stream(), 0.0
    self.begin()

  def begin(self):
    self.ib.invalidate()
    self.ib.context_state(Addr(None, 0))

  def place(self, s:Stream, align:int) -> int:
    off = round_up(len(self.arena), align)
    self.arena += bytes(off - len(self.arena)) + s.data
    for o,v in s.places:
      if isinstance(v, UOp):
        self.values.append((off + o, v))
        continue
      if (idx:=self.refs.setdefault(v.buf, len(self.refs))) == len(self.flags): self.flags.append(0)
      self.patches.append((off + o, idx, v.align - 1, v.offset))
      self.used.append(idx)
    return off

  def split(self):
    if len(self.segs) or len(self.ib.data): self.segs.append((off:=self.place(self.ib, 64), len(self.arena) - off, dedup(self.used)))
    self.ib, self.cost, self.used = Stream(), 0.0, [0]

  def launch(self, prg:QCOMProgram, code:Addr, bufs:list[Addr], vals, global_size, local_size, scratch:Addr|None=None, ts:Sequence[Addr]=(),
             cost:float=0.0, outs:Sequence[int]=(), ins:Sequence[int]=(), own:Sequence[int]=()):
    if self.cost and self.cost + cost > SUBMIT_BUDGET_MS:
      self.split()
      self.begin()
    self.cost += cost
    if debugging("flush"): self.ib.flush(Addr(None, 0))
    if ts: self.ib.timestamp(ts[0])
    args = Addr(None, self.place(prg.arguments(bufs, vals, local_size), 64))
    # a launch of known sizes is encoded once for its program, addresses are filled in here
    if (s:=prg.launches.get(key:=(*global_size, *local_size))) is None:
      (s:=Stream()).note(prg.name)
      s.dispatch(prg, Addr("code"), Addr("args"), Addr("scratch") if scratch is not None else None, global_size, local_size)
      if not any(isinstance(x, UOp) for x in key): prg.launches[key] = s
    self.ib.add(s, {"code": code, "args": args, **({"scratch": scratch} if scratch is not None else {})})
    if ts: self.ib.timestamp(ts[1])
    if debugging("flush"): self.ib.flush(Addr(None, 0))
    for r in [self.refs[bufs[i].buf] for i in ins]: self.flags[r] |= REF_READ if self.flags[r] & REF_WRITTEN else REF_READ | REF_FIRST
    for idxs,flag in ((outs, REF_WRITTEN), (own, REF_OWN)):
      for i in idxs: self.flags[self.refs[bufs[i].buf]] |= flag

  def finish(self, timeline:Addr) -> Encoder:
    self.ib.signal(timeline)
    self.split()
    self.timeline_dst = sum(self.segs[-1][:2]) - 4
    return self

  def tables(self) -> tuple[bytes, dict[str, int], list[tuple[int, Any]]]:
    """Contents of the tables, the fields of the batch in them (offsets for pointers), and the addresses to be written into `refs` once known."""
    resolved = [(0, None) if b is None else self.resolve(b) for b in self.refs]
    refs = b"".join(REF.pack(0, slot or 0, f | (REF_INPUT if slot is not None else 0), 0) for f,(_,slot) in zip(self.flags, resolved))
    patches = sorted(self.patches, key=lambda p: resolved[p[1]][1] is not None)
    nstatic = sum(resolved[p[1]][1] is None for p in patches)
    offs = list(itertools.accumulate([len(refs), PATCH.size * len(patches), SEG.size * len(self.segs)]))
    firsts = itertools.accumulate((len(r) for _,_,r in self.segs), initial=0)
    blob = refs + b"".join([*(PATCH.pack(*p) for p in patches),
                            *(SEG.pack(o, sz, first, len(r)) for first,(o,sz,r) in zip(firsts, self.segs)),
                            *(struct.pack(f"<{len(r)}I", *r) for _,_,r in self.segs)])
    fields = {"refs": 0, "nrefs": len(self.refs), "patches": offs[0], "nstatic": nstatic, "npatches": len(patches), "segs": offs[1],
              "nsegs": len(self.segs), "segrefs": offs[2], "timeline_dst": self.timeline_dst}
    return blob + bytes(-len(blob) % 8), fields, [(REF.size * i, addr) for i,(addr,slot) in enumerate(resolved) if slot is None and i]

LAST, NREFS, NSEGS, ID = (BATCH.index(n) for n in ("last", "nrefs", "nsegs", "id"))
TABLE_POINTERS = ("refs", "patches", "segs", "segrefs")

# the slot comes from the contents: batches that run the same code share it
def code_uop(image:bytes, devs:tuple[str, ...]) -> UOp:
  slot = int.from_bytes(hashlib.sha256(image).digest()[:7], "little")
  code = UOp.placeholder((len(image) // 4,), dtypes.uint32, slot, device=devs).rtag("program")
  return code.after(make_binary_patch(code, image))

programs:weakref.WeakKeyDictionary[UOp, QCOMProgram] = weakref.WeakKeyDictionary()
def get_program(dev:QCOMDevice, prg:UOp) -> QCOMProgram:
  if (ret:=programs.get(prg)) is None: ret = programs[prg] = QCOMProgram(dev, prg.to_elf())
  return ret

def schedule_batch(batch:list[tuple[UOp, tuple[str, ...]]], profile:bool) -> list[UOp]:
  """A batch is one call: it waits for its own previous run, patches, submits, and signals the device's timeline."""
  if len(batch) > 1 and (debugging("single") or debugging("sync")): return [c for b in batch for c in schedule_batch([b], profile)]
  devs, cmds, kerns = batch[0][1], [], []
  if len(devs) > 1: raise RuntimeError(f"a kernel over several QCOM devices ({', '.join(devs)}) is not supported: buffers belong to one open device")
  for call,_ in batch:
    name, info = get_call_name(call, get_call_arg_uops(call)), HCQInfo(devs, estimate_uop(call))
    slots = tuple(next(UOp.unique_num) for _ in range(2)) if profile else ()
    ts = [UOp(Ops.INS, arg="timestamp", src=(make_buf(devs, s),)) for s in slots]
    cmds += [*ts[:1], call, *ts[1:]]
    kerns.append((devs, make_call(name, call.src[0], info), slots))
  est = sum((k.arg.aux.estimates for _,k,_ in kerns), start=Estimates()).simplify()
  return [make_call(f"submit {len(batch)} kernels: {ansistrip(kerns[0][1].arg.name)}{' ..' if len(batch) > 1 else ''}",
                    make_submit(*cmds, devs=devs, queue="COMPUTE:0").sink(), HCQInfo(devs, est, kernels=tuple(kerns)))]

def encode_batch(call:UOp) -> UOp|None:
  if not any(u.op is Ops.CUSTOM_FUNCTION and u.arg == "submit_cmdbuf" for u in call.src[0].src[0].src): return None # encoded already
  lin = get_submit(call).src[0]
  devs, dev = lin.arg[0], cast(QCOMDevice, Device[lin.arg[0][0]])
  args = [view_base(b)[0] for c in lin.src if c.op is Ops.CALL for b in get_call_arg_uops(c)]
  inputs = {slot:i for i,slot in enumerate(sorted(dedup([b.arg.slot for b in args if b.op is Ops.PARAM and b.tag is None])))}

  enc = Encoder(lambda b: (None, inputs[b.arg.slot]) if b.op is Ops.PARAM and b.tag is None else (b.getaddr(devs), None))
  for i,c in enumerate(lin.src):
    if c.op is not Ops.CALL: continue
    info, prg = c.src[0].arg, get_program(dev, c.src[0])
    scratch = UOp.placeholder((prg.scratch_bytes,), dtypes.uint8, 0, device=devs).rtag("private") if prg.scratch_bytes else None
    outs, ins = get_call_outs_ins(c)
    pos = {g:j for j,g in enumerate(info.globals)}
    bufs = [Addr(b, cast(int, off)) for b,off in (view_base(get_call_arg_uops(c)[g]) for g in info.globals)] # of sizes that are known
    ts = [Addr(x.src[0]) for x in (lin.src[i-1], lin.src[i+1])] if i and lin.src[i-1].op is Ops.INS else []
    # a buffer that is not allocated yet holds nothing: this capture writes it, as a whole, before it reads it
    own = [j for j,b in enumerate(bufs) if b.buf is not None and b.buf.op is Ops.BUFFER and not b.buf.buffer.is_allocated()]
    enc.launch(prg, Addr(code_uop(bytes(prg.image), devs)), bufs, get_call_var_uops(c, c.src[0]), info.global_size, info.local_size or (1, 1, 1),
               Addr(scratch) if scratch is not None else None, ts, estimate_ms(estimate_uop(c)), [pos[o] for o in outs],
               [pos[i] for i in ins if pos[i] not in own], own)
  blob, fields, addrs = enc.finish(Addr(make_buf(devs, tag="timeline_signal"))).tables()

  # what is known at link time is written then; the rest (variables) is left to the compiled call
  arena = UOp.placeholder((len(enc.arena) // 4,), dtypes.uint32, next(UOp.unique_num), device=devs).rtag("arena")
  table = UOp.placeholder((len(blob) // 8,), dtypes.uint64, next(UOp.unique_num), device=devs).rtag("table")
  batch = UOp.placeholder((len(BATCH),), dtypes.uint64, next(UOp.unique_num), device=devs).rtag("batch")
  table_addr = table.getaddr(("CPU",))
  words = [(8*i, arena.getaddr(("CPU",)) if n == "arena" else table_addr + fields[n] if n in TABLE_POINTERS else
            UOp.const(fields.get(n, 0), dtypes.uint64)) for i,n in enumerate(BATCH)]
  filled = batch.after(make_binary_patch(arena, bytes(enc.arena)), *make_patches(arena, enc.values), make_binary_patch(table, blob),
                       *make_patches(table, [(0, arena.getaddr(devs)), *addrs]), *make_patches(batch, words))
  fn, queue = make_buf(devs, tag="func:submit"), make_buf(devs, tag="queue")
  body = fn.index(0).load().call(queue.index(0), filled.index(0), ret_dtype=dtypes.void).sink()
  return call.replace(src=(UOp.custom_function("hcq", body), *call.src[1:]),
                      arg=replace(call.arg, aux=replace(call.arg.aux, input_idxs=((devs, tuple(inputs)),) if inputs else ())))

# *****************
# 4. memory

SLAB_BYTES, SLAB_MAX = 1 << 20, 256 << 10

class Slab:
  def __init__(self, buf:HCQBuffer): self.buf, self.tlsf, self.used = buf, TLSFAllocator(buf.size, block_size=256), 0

class QCOMAllocator(HCQAllocator['QCOMDevice']):
  supports_external_fd = True
  def __init__(self, dev:QCOMDevice):
    self.slabs:list[Slab] = []
    self.waiting:list[tuple[HCQBuffer, BufferSpec|None]] = [] # to be released when the GPU is done
    super().__init__(dev, supports_copy_from_disk=False, supports_transfer=False)

  # programs, arenas and signals come from slabs, so that a submit lists few BOs
  def _slab_alloc(self, size:int) -> HCQBuffer:
    with self.dev.iface.live.guarded():
      for slab in self.slabs + [None]:
        if slab is None: self.slabs.append(slab:=Slab(self.dev.iface.alloc(SLAB_BYTES)))
        try: off = slab.tlsf.alloc(size, 256)
        except MemoryError: continue
        slab.used += 1
        buf = slab.buf.offset(off, size)
        self.dev.iface.live.add(int(buf.va_addr), size, slab.buf.meta.handle, int(slab.buf.va_addr))
        buf.meta = (slab, off)
        return buf
    raise AssertionError("a fresh slab has room")

  def _alloc(self, size:int, options:BufferSpec) -> HCQBuffer:
    if options.external_fd is not None: return self.dev.iface.import_fd(options.external_fd, options.external_offset, size)
    if options.external_ptr is not None: return self.dev.iface.map_host(options.external_ptr, size)
    if options.cpu_access and size <= SLAB_MAX: return self._slab_alloc(size)
    buf = self.dev.iface.alloc(size)
    try: self.dev.iface.live.add(int(buf.va_addr), size, buf.meta.handle, int(buf.va_addr))
    except BaseException:
      self.dev.iface.free(buf)
      raise
    return buf

  def alloc(self, size:int, options:BufferSpec|None=None) -> HCQBuffer:
    self.dev.iface.check_process()
    if options is not None and options.is_external: return self._alloc(size, options) # freeing other memory would not make it possible
    with (live:=self.dev.iface.live).lock: # of what is cached, each goes to one
      try: buf = super().alloc(size, options)
      except MemoryError as e: # which tinygrad makes of whatever goes wrong
        if (c:=e.__cause__) is not None and not isinstance(c, MemoryError): raise c from c.__cause__
        raise MemoryError(f"{e}: {c}") from c
    try:
      if cached:=(a:=live.find(int(buf.va_addr))) is not None and a.birth == DEAD: live.rebirth(int(buf.va_addr))
      if debugging("poison"):
        if cached: self.dev.synchronize() # queued work may still use it
        ctypes.memset(buf.cpu_view().addr, 0xff, size)
    except BaseException: # a signal
      self.free(buf, size, options)
      raise
    return buf

  def free(self, opaque:HCQBuffer, size:int, options:BufferSpec|None=None):
    if opaque.va_addr >= LOST or self.dev.iface.pid != os.getpid(): return # in a fork, somebody else may hold the lock for ever
    if options is None or not options.is_external: self.dev.iface.live.rebirth(int(opaque.va_addr), dead=True)
    super().free(opaque, size, options)

  def free_cache(self):
    """As tinygrad's, but what is freed is out of the cache before, whatever interrupts it."""
    with self.dev.iface.live.lock:
      for (_, options),opaques in list(self.cache.items()):
        while opaques: self._free(opaques.pop(), options)

  def _free(self, opaque:HCQBuffer, options:BufferSpec|None=None):
    if self.dev.iface.closed or self.dev.iface.pid != os.getpid(): return
    if opaque.va_addr >= LOST: return
    self.waiting.append((opaque, options))
    self.dev.drain()
    self.release_waiting()

  def release_waiting(self):
    if not self.waiting: return
    with self.dev.iface.live.guarded():
      while self.waiting and not self.dev.inflight: # a wait failed, or others have submitted: the GPU may still use them
        with self.dev.keeping(): self._release(*self.waiting.pop())

  def _release(self, opaque:HCQBuffer, options:BufferSpec|None):
    if options is not None and options.external_fd is not None: self.dev.iface.release_fd(opaque)
    elif options is not None and options.external_ptr is not None: self.dev.iface.unmap_host(opaque)
    elif isinstance(opaque.meta, tuple):
      slab, off = opaque.meta
      self.dev.iface.live.remove(int(opaque.va_addr))
      slab.tlsf.free(off)
      slab.used -= 1
      if slab.used == 0 and len(self.slabs) > 1:
        self.slabs.remove(slab)
        self.dev.iface.free(slab.buf)
    else:
      self.dev.iface.live.remove(int(opaque.va_addr))
      self.dev.iface.free(opaque)

  def _do_map(self, buf:HCQBuffer) -> HCQBuffer: return self.dev.iface.map_host(buf.cpu_view().addr, buf.size)
  def _do_unmap(self, mb:HCQBuffer): self.dev.iface.unmap_host(mb)

  def _readable(self, buf:HCQBuffer) -> HCQBuffer:
    self.dev.synchronize()
    if (a:=self.dev.iface.live.find(int(buf.va_addr))) is None or a.tainted: raise self.dev.iface.undefined(int(buf.va_addr))
    return buf
  def _copyin(self, dest:HCQBuffer, src:memoryview):
    self.dev.synchronize() # queued work may still read it
    if dest.va_addr >= LOST: raise self.dev.iface.undefined(dest.va_addr)
    with cpu_profile(f"TINY -> {self.dev.device}", f"{self.dev.device}:COPY"), self.dev.iface.cpu_access(dest, write=True):
      ctypes.memmove(dest.cpu_view().addr, from_mv(src), len(src))
    self.dev.overwritten(int(dest.va_addr), len(src))
  def _copyout(self, dest:memoryview, src:HCQBuffer):
    self._readable(src)
    with cpu_profile(f"{self.dev.device} -> TINY", f"{self.dev.device}:COPY"), self.dev.iface.cpu_access(src, write=False):
      ctypes.memmove(from_mv(dest), src.cpu_view().addr, len(dest))
  # copies to the device must come through _copyin, which knows what they overwrite: no zero copy views
  @property
  def _as_buffer(self): raise AttributeError("_as_buffer")

# *****************
# 5. the device

LOST_WORK = "compute again what was in flight, on new contents where that updates in place"
KEPT = 256        # so many runs are remembered without anybody waiting, if half of them are over
CLOCK_PROBES = 10 # the tightest bounds of so many are good to about half of what a submit and its wait take

class QCOMDevice(HCQ2Compiled):
  ifaces, timestamp_divider, has_copy_queue, hcq_direct = ifaces, 19.2, False, True # timestamps are ticks of the 19.2 MHz always-on counter
  schedule_batch, encode_batch = staticmethod(schedule_batch), staticmethod(encode_batch)

  def __init__(self, device:str=""):
    self.bound:weakref.WeakKeyDictionary[UOp, tuple] = weakref.WeakKeyDictionary()
    self.batches:weakref.WeakSet[Buffer] = weakref.WeakSet() # of linked batches
    self.inflight:list[Run] = []
    self.kept:QCOMError|None = None
    if unknown:=[s for s in str(QCOM_DEBUG.value).split(",") if QCOM_DEBUG.value and s not in DEBUG_STEPS]:
      raise RuntimeError(f"QCOM_DEBUG={QCOM_DEBUG.value}: {', '.join(unknown)} is none of {', '.join(DEBUG_STEPS)}")
    if HCQ_RUNTIME_DEV.value != "CPU": raise RuntimeError(f"QCOM submits from compiled C: HCQ_RUNTIME_DEV must be CPU, not {HCQ_RUNTIME_DEV.value}")
    if (ms:=getenv("HCQDEV_WAIT_TIMEOUT_MS", 30000)) <= 0: raise RuntimeError(f"HCQDEV_WAIT_TIMEOUT_MS={ms}: it is a number of ms above 0")
    self.wait_timeout_ms = float(ms)
    try: self.iface:QCOMIface = self._select_iface(device)
    except ExceptionGroup as e:
      todo = [x.do for x in e.exceptions if isinstance(x, QCOMError)] # a node that is there counts more than one that is not
      raise QCOMError("no usable QCOM device: " + "; ".join(getattr(x, "what", str(x)).removeprefix(f"{CLOSED}: ") for x in e.exceptions),
                      next((d for d in todo if d != NO_NODE), NO_NODE)) from e
    try:
      self.queue, self.signals = self.iface.queue, dict[tuple, Buffer]()
      self.timestamps:weakref.WeakValueDictionary[tuple, Buffer] = weakref.WeakValueDictionary() # a batch's, as long as it is linked
      super().__init__(device, QCOMAllocator(self), self.iface.renderers, QCOMProgram,
                       arch=("a%d%d%d" + (",IMAGE_PITCH_ALIGNMENT=64" if IMAGE else "")) % self.iface.gpu_id)
      self.pm_bufferize = PatternMatcher([
        (UPat(Ops.PARAM, tag="func:submit"), lambda ctx: ctx[0].signal("func:submit", ctx[0].queue.prog.addr, device="CPU")),
        (UPat(Ops.PARAM, tag="queue"), lambda ctx: ctx[0].queue_buffer),
        (UPat(Ops.PARAM, tag="private", name="b"), lambda ctx, b: ctx[0].scratch(b.max_numel())),
      ]) + self.pm_bufferize
    except BaseException:
      self.iface.close()
      raise

  @functools.cached_property
  def queue_buffer(self) -> Buffer:
    return Buffer("CPU", 1, dtypes.uint64, options=BufferSpec(external_ptr=ctypes.addressof(self.queue)), preallocate=True)
  @functools.cached_property
  def done(self) -> memoryview: return self.signal("timeline")._buf.cpu_view().view(fmt='I').mv # the GPU writes the low 32 bits of the timeline

  def signal(self, name:str|int, init_value:int=0, device:str|None=None) -> Buffer: # type: ignore[override]
    cache:Any = self.timestamps if isinstance(name, int) else self.signals
    if (buf:=cache.get((name, device))) is None: buf = cache[name, device] = HCQ2Compiled.signal.__wrapped__(self, name, init_value, device)
    return buf

  def new_buffer(self, b:UOp, cache:bool) -> Buffer: # tables are read by the host only
    buf = Buffer("CPU" if b.tag in ("table", "batch") else self.device, b.max_numel(), b.dtype, options=BufferSpec(cpu_access=True, nolru=True))
    if b.tag == "batch": self.batches.add(buf)
    return buf

  def scratch(self, nbytes:int) -> Buffer:
    """Private memory, shared by all launches since they run one after the other."""
    if (s:=getattr(self, "_scratch", None)) is None or s.nbytes < nbytes:
      self._scratch = s = Buffer(self.device, nbytes, dtypes.uint8, options=BufferSpec(nolru=True), preallocate=True)
    return s

  def gpu_bytes(self, data:bytes) -> Buffer:
    buf = Buffer(self.device, len(data), dtypes.uint8, options=BufferSpec(cpu_access=True, nolru=True), preallocate=True)
    buf._buf.cpu_view()[:len(data)] = data
    return buf

  # *** running ***

  def bind(self, call:UOp, ast:UOp) -> tuple:
    """What a linked batch is run with: function, its arguments, the batch's words, and its ProgramInfo if it has variables."""
    if (b:=self.bound.get(call)) is None:
      if any(x.device == self.device and x.is_initialized() and x._buf.va_addr >= LOST for u in get_call_arg_uops(call) if (x:=u.buffer)):
        raise self.iface.undefined(LOST)
      if (PROFILE or DEBUG >= 2) and not all(prof for _,_,prof in call.arg.aux.kernels):
        warnings.warn(f"no GPU times of {call.arg.name!r}, it was captured without them; DEBUG=2 shows the host's time for all of it. "
                      "Capture it with PROFILE=1, also what is loaded from a file", stacklevel=2)
      bufs = [cast(Buffer, get_call_arg_uops(call)[i].buffer) for i in ast.arg.globals]
      batch = next(x for x in bufs if x in self.batches)
      args = [ctypes.c_uint64(x.get_buf("CPU").va_addr) for x in bufs]
      b = self.bound[call] = (get_runtime("CPU", ast).fxn, args, batch._buf.cpu_view().view(fmt='Q').mv, ast.arg if ast.arg.vars else None)
    return b

  def run_batch(self, call:UOp, ast:UOp, inputs:list[int], var_vals:dict[str, int]):
    """Runs a linked batch: `inputs` are the GPU addresses of its inputs in the order of HCQInfo.input_idxs."""
    fxn, args, batch, info = self.bind(call, ast)
    self._run(fxn, args if info is None else args + [ctypes.c_uint64(v) for v in info.vals(var_vals)], batch, inputs, call.arg.name, keep=call)

  def run_encoder(self, enc:Encoder, name:str): self._run(*self.link_encoder(enc, name))
  def link_encoder(self, enc:Encoder, name:str) -> tuple:
    """Arguments of _run for a batch that holds addresses already and has no inputs. It can run again."""
    blob, fields, addrs = enc.tables()
    arena, table = self.gpu_bytes(bytes(enc.arena)), bytearray(blob)
    for off,addr in [(0, arena._buf.va_addr), *addrs]: struct.pack_into("<Q", table, off, addr)
    fields |= {k: fields[k] + mv_address(table) for k in TABLE_POINTERS} | {"arena": arena._buf.cpu_view().addr}
    batch = (ctypes.c_uint64 * len(BATCH))(*[fields.get(n, 0) for n in BATCH])
    args = [ctypes.c_uint64(ctypes.addressof(x)) for x in (self.queue, batch)]
    return self.queue.prog.fxn, args, memoryview(batch).cast('B').cast('Q'), list[int](), name, (arena, table, batch)

  def _run(self, fxn, args:list, batch:memoryview, inputs:list[int], name:str, keep:Any=None):
    self.iface.check_process()
    while True:
      with (live:=self.iface.live).lock:
        self.settle()
        if self.kept is not None: self.raise_kept()
        if self.inflight and self.inflight[-1].rejected: self.synchronize() # it did not end so far
        if self.retired(batch[LAST]):
          if len(self.inflight) >= KEPT: self.prune()
          live.reserve(max(batch[NREFS], len(inputs)))
          live.inputs[:len(inputs)] = inputs
          with live.guarded(): # a finalizer would take a submit that is half done for one that a signal kept from being done
            self.inflight.append(Run(self.queue.timeline + 1, name, batch, inputs, keep))
            fxn(*args)
            self.settle()
          if debugging("sync"): self.synchronize()
          return
        last = next((r for r in self.inflight if r.timeline == batch[LAST]), None)
      if last is not None: self._wait(last) # the arena is patched in place

  def settle(self):
    """Completes the record of the last submit, which a signal may have kept its caller from. Raises the error of a batch that failed."""
    if self.inflight and (run:=self.inflight[-1]).fence is None:
      if self.queue.error: raise self.rejected(run)
      if run.timeline > self.queue.timeline: self.inflight.pop()
      else: run.fence = self.queue.fence

  def rejected(self, run:Run) -> QCOMError:
    """
    The error of a batch that failed. What the kernel took of it is waited for: the next run patches the same arena. If that does not end it stays in
    flight, with the timeline of the run before, since it writes none.
    """
    e = self.iface.submit_error(run.name, run.batch[NSEGS])
    run.rejected, run.timeline = True, self.queue.timeline
    self.queue.error = 0 # a signal before this: settle comes here again; after it: settle sets the fence
    run.fence = self.queue.fence
    try: self.synchronize()
    except QCOMError as other:
      if not self.inflight: # what does not end is told by the next wait
        return QCOMError(f"{e.what}. {other.what}", f"{LOST_WORK}, then {e.do.replace('run it', f'run {run.name!r}')}")
    return QCOMError(f"{e.what}. The results of earlier work had all arrived", e.do) if RECURS in e.do and not self.inflight else e

  def prune(self):
    """Forgets the oldest of what was submitted, if it is over: who never waits for all of it shall not keep it for ever."""
    if not self.retired((run:=self.inflight[KEPT//2-1]).timeline): return
    self._check(run)
    del self.inflight[:KEPT//2]

  def lose(self, buf:Buffer):
    """Nothing wrote `buf` although somebody asked for it: it must not be read before somebody does."""
    if not buf.is_allocated(): buf.base.allocate(opaque=HCQBuffer(LOST, buf.base.nbytes, owner=self))
    elif os.getpid() == self.iface.pid:
      with (live:=self.iface.live).lock:
        if (a:=live.find(int(buf.base.get_buf(self.device).va_addr))) is not None: a.tainted = a.tainted or OUTDATED
  def lose_batch(self, call:UOp, ast:UOp, inputs:list[int], half:bool):
    """`call`, a linked batch, did not run. `half`: some of what belongs to it did, so that what it updates in place is neither old nor new."""
    if os.getpid() != self.iface.pid: return
    with self.iface.live.guarded():
      if not (batch:=self.bind(call, ast)[2])[ID]: self.queue.batches = batch[ID] = self.queue.batches + 1
      for addr,flags in Run(0, call.arg.name, batch, inputs).written():
        if (half or not flags & REF_FIRST) and (a:=self.iface.live.find(addr)) is not None and a.tainted in (0, OUTDATED): a.tainted = batch[ID]
  def taint(self, run:Run):
    """The contents of what `run` was to write are undefined. It can run again, but not on what it was already updating in place."""
    for addr,flags in run.written():
      if (a:=self.iface.live.find(addr)) is None: continue
      a.tainted = run.batch[ID] if not flags & REF_READ and a.tainted in (0, OUTDATED, run.batch[ID]) else BEYOND_REPAIR

  # *** waiting ***

  def retired(self, timeline:int) -> bool: return timeline <= self.queue.timeline - ((self.queue.timeline - self.done[0]) & 0xffffffff)

  def _wait(self, run:Run, timeout:int|None=None):
    """Returns when `run` is over, in whoever's wait. A caller without the lock lets others allocate, free and submit meanwhile."""
    iface, limit, st, seen = self.iface, (timeout or self.wait_timeout_ms) / 1000, time.perf_counter(), None
    patient = timeout is None and not getenv("HCQDEV_WAIT_TIMEOUT_MS", 0)
    while True:
      try: over = iface.wait(cast(int, run.fence), int(min(limit * 1000, 500)))
      except QCOMError:
        if run in self.inflight: raise
        return
      with iface.live.guarded(): # a finalizer that waits would do all of this in the middle of it
        if run not in self.inflight: return
        if over:
          if not self.retired(run.timeline) or run is self.inflight[-1]: self._check(run)
          return
        if seen not in (None, self.done[0]) or (patient and iface.executing()): st = time.perf_counter()
        elif time.perf_counter() - st > limit:
          raise QCOMError(f"{self.device} timed out after {limit*1e3:.0f} ms without progress, waiting for {run.name!r}, which is still in flight. "
                          f"{self._progress(run)}", f"repeat what raised this, raise HCQDEV_WAIT_TIMEOUT_MS, or give up: {REOPEN}")
        seen = self.done[0]

  def _progress(self, run:Run) -> str:
    last = max((r.fence for r in self.inflight if self.retired(r.timeline) and not r.rejected), default=None)
    retired = last if last is not None else f"before {self.inflight[0].fence}"
    return f"For a report: fence {run.fence}, last submitted {self.queue.fence}, last retired {retired}. {self.iface.dump()}"

  def _check(self, run:Run):
    """`run` and what is before it are over: was all of it done? Nothing that a lost submit should have written may be taken for its result."""
    # nothing else could be lost
    if len(self.inflight) == 1 and run.batch[NSEGS] == 1 and self.retired(run.timeline) and not run.rejected and not self.iface.dead: return
    with self.iface.live.guarded():
      why = self.iface.lost()
      if run not in self.inflight: return # as the handler of a signal may, which nothing keeps out
      if len(self.inflight) == 1 and run.rejected: # the error of the batch has been raised, it has no results
        if why is not None: self.iface.recover(self.inflight)
        return
      if why is None and not self.retired(run.timeline): why = "it retired without running to its end"
      if why is None: return
      lost = next((r for r in self.inflight if not self.retired(r.timeline)), next((r for r in self.inflight if not r.rejected), run))
      progress = self._progress(run)
      for r in self.inflight: self.taint(r)
      # fences retire in order: the last one stands for all. If it does not, they are waited for again, and nothing is freed
      if not self.iface.wait(cast(int, self.inflight[-1].fence), int(self.wait_timeout_ms)):
        raise QCOMError(f"{self.device} lost {lost.name!r}: {why}, and what is in flight does not end. {progress}", f"give it up: {REOPEN}")
      self.done[0] = self.queue.timeline & 0xffffffff
      self.prof_ents.clear()
      self.iface.recover(self.inflight) # last: an interrupt before it only means that the loss is told once more
      raise QCOMError(f"{self.device} lost {lost.name!r}: {why}. Results in flight are refused. {progress}",
                      f"{LOST_WORK}, the device takes new work; {RECURS}")

  def synchronize(self, timeout:int|None=None):
    self.iface.check_process()
    with (lock:=self.iface.live.lock):
      self.settle()
      if self.kept is not None: self.raise_kept()
      last = self.inflight[-1] if self.inflight else None
    if last is not None: self._wait(last, timeout)
    with lock:
      if self.inflight and self.inflight[-1] is not last: # submitted by others meanwhile
        self.settle()
        if self.inflight: self._wait(self.inflight[-1], timeout)
      if self.prof_ents: self.collect_prof()
      self.inflight.clear()
      self.allocator.release_waiting()

  def _at_profile_finalize(self):
    """Relates the GPU's clock to the host's: a timestamp was taken after its submit was called and before the wait for it returned."""
    at, enc = self.signal("clock"), Encoder(lambda b: (int(b.va_addr), None))
    enc.ib.timestamp(Addr(at._buf))
    probe, after, before = self.link_encoder(enc.finish(Addr(self.signal("timeline")._buf)), "clock"), [], []
    for _ in range(CLOCK_PROBES):
      st = perf_counter_us()
      self._run(*probe)
      self.synchronize()
      en, gpu = perf_counter_us(), at._buf.cpu_view().view(fmt='Q')[0] / Decimal(self.timestamp_divider)
      after.append(st - gpu)
      before.append(en - gpu)
    lo, hi = max(after), min(before)
    Compiled.profile_events.append(ProfileDeviceEvent(self.device, (lo + hi) / 2, {**self.device_props(), "tdiff_error_us": (hi - lo) / 2}))

  @contextlib.contextmanager
  def keeping(self):
    """An error in here, where nobody can be told, is kept for who waits next."""
    try: yield
    except QCOMError as e: self.kept = self.kept or e
  def drain(self):
    """Waits, where nobody can be told. An error of what does not end is told by the next wait, which waits for the same."""
    with self.keeping():
      kept, self.kept = self.kept, None
      try: self.synchronize()
      except QCOMError:
        if not self.inflight: raise
      finally: self.kept = kept or self.kept

  def raise_kept(self):
    e, self.kept = self.kept, None
    raise cast(QCOMError, e)

  def overwritten(self, addr:int, nbytes:int):
    if (a:=self.iface.live.find(addr)) is not None and a.start == addr and nbytes >= a.end - a.start: a.tainted = 0

  def reopen(self):
    """
    Closes the device and opens it anew, after trouble that it does not get over. All buffers made before are gone: reading one, and running a capture
    that knows one, raises QCOMError. Raises RuntimeError if the device does not open; it stays closed then, and may be reopened later.
    """
    if os.getpid() != self.iface.pid: self.iface.check_process()
    with self.iface.live.lock:
      self.iface.close()
      for b in gc.get_objects():
        if type(b) is HCQBuffer and b.owner is self: b.va_addr, b.view = LOST, None
      for key in [k for k in runtime_cache if k[1] == self.device]: del runtime_cache[key]
      for c in (hcq2.hcq_compile_cache, hcq2.link_buf_cache, hcq2.link_linear_cache, programs, self.bound, self.signals, self.timestamps,
                self.allocator.cache, self.allocator.slabs, self.allocator.waiting, self.inflight, self.prof_ents): c.clear() # type: ignore[attr-defined]
      for k in ("done", "_scratch"): self.__dict__.pop(k, None)
      self.kept, self.queue.error, self.queue.fence = None, 0, 0
      self.iface = type(self.iface)(self, self.device_id)
      self.done[0] = self.queue.timeline & 0xffffffff

  def finalize(self):
    if os.getpid() != self.iface.pid: return
    try: self.synchronize()
    except RuntimeError as e: # a release that failed is the only one: it was made after all work had ended, and no work was taken since
      left, do = ("the program's results are right, its memory goes with it", "nothing") if getattr(e, "stage", "") == FREE else \
                 ("what the program had read is right, what it had not is lost", "if results are missing, run the program again")
      more = RECURS if RECURS in getattr(e, "do", "") else f"if it recurs, look at dmesg and {REPORT}"
      print(f"{self.device} failed at exit: {left}. {getattr(e, 'what', e)}. Do: {do}; {more}")
    Compiled.finalize(self)
    if DEBUG >= 2 and (n:=self.queue.submits):
      print(f"{self.device}: {n} submits, {self.queue.nbos / n:.1f} buffers and {self.queue.nbytes / n:.0f} bytes of commands in each, "
            f"{self.queue.batches} batches linked, {sum(s.buf.size for s in self.allocator.slabs) / 1e6:.1f} MB of programs and arguments")

class Run:
  """A batch that was submitted: its value of the device's timeline, the kernel's fence, and what it references."""
  def __init__(self, timeline:int, name:str, batch:memoryview, inputs:list[int], keep:Any=None):
    self.timeline, self.name, self.batch, self.inputs, self.keep = timeline, name, batch, inputs, keep
    self.fence:int|None = None
    self.rejected = False # the kernel took less than all of it
  def written(self) -> list[tuple[int, int]]:
    """Addresses the batch writes, and the flags of these refs."""
    refs = to_mv(self.batch[BATCH.index("refs")], REF.size * self.batch[NREFS])
    return [(self.inputs[i] if f & REF_INPUT else addr, f) for addr,i,f,_ in REF.iter_unpack(refs) if f & REF_WRITTEN]
