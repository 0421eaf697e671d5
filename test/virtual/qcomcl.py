"""The container of Qualcomm's OpenCL compiler, built by hand, with IR3 machine code of Mesa's compiler inside.

The vendor's compiler can't be had here. What a container holds and where is what ops_qcom reads: a header with offsets at fixed places, a table of
constants that ends where the image starts, the image, register counts, and a descriptor followed by name, samplers and arguments.
"""
from __future__ import annotations
import contextlib, dataclasses, re, struct
from collections.abc import Iterator

from typing import Any
import pytest
from test.virtual.ir3_asm import assemble, disassemble

BUF, TEX, IBO = 0, 1, 2                                 # kinds of arguments
HEADER, REGS, DESC = 0x118, 0x20, 0x158                 # bytes
WGID, WGSIZE, FREE = 0xcf, 0xc0, 0xd4                   # register ids: what a container's code is entered with, r51.w and r48.x, and r53.x

@dataclasses.dataclass
class Container:
  """Sizes in bytes. args: (byte of the constant file, kind); consts: (value, byte of the constant file, 2 or 4 bytes)."""
  code: bytes
  name: str = "kernel"
  args: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  consts: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
  samplers: int = 0
  entry: int = 0
  branchstack: int = 0                                  # the file holds twice of it
  pvtmem: int = 0
  shmem: int = 0
  fregs: int = 8
  hregs: int = 4
  arg_bytes: int = 40                                   # an entry says how long it is; the fields that are read fill 32
  gap: int = 0                                          # bytes between the tables, which nothing may depend on

  def build(self) -> bytes:
    gap = b"\x5a" * self.gap
    def words(size: int, **at: int) -> bytearray:
      out = bytearray(b"\xa5" * size)
      for where, v in at.items(): struct.pack_into("<I", out, int(where[1:], 16), v)
      return out
    regs = words(REGS, _14=self.fregs, _18=self.hregs)
    consts = b"".join(struct.pack("<I12xIII12x", v, at // size, 0, size // 4) for v, at, size in self.consts)
    desc = words(DESC, _c4=self.entry, _c8=self.pvtmem, _d8=self.shmem, _dc=self.samplers, _108=2 * self.branchstack)
    tail = bytes(desc) + self.name.encode()
    regs_at = HEADER + len(gap)
    consts_at = regs_at + REGS + len(gap)
    image_at = consts_at + len(consts)
    desc_at = image_at + len(self.code) + len(gap)
    tail += bytes(-(desc_at + len(tail)) % 4) + b"\x77" * 8 * self.samplers
    for at, kind in self.args: tail += struct.pack("<8I", self.arg_bytes, 0, 0, at // 4, 0, 0, 0, kind) + b"\x33" * (self.arg_bytes - 32)
    header = words(HEADER, _34=regs_at, _ac=consts_at, _b0=len(self.consts), _c0=image_at, _100=len(self.code), _110=desc_at)
    return bytes(header) + gap + bytes(regs) + gap + consts + self.code + gap + tail + bytes(32)

def from_ir3(lib: bytes, signature: tuple, name: str) -> Container:
  """The container form of a program of tinygrad's IR3 compiler. A prologue moves the ids from where OpenCL code gets them to where Mesa put them."""
  from tinygrad.helpers import is_image_shape
  from tinygrad.device import TinyELF
  from tinygrad.runtime.autogen import mesa
  from tinygrad.runtime.support.compiler_mesa import IR3Compiler
  v, cs, imm, code = IR3Compiler.unpack_lib(lib)
  def reg(n: int, file: str = "r") -> str: return f"{file}{n >> 2}.{'xyzw'[n & 3]}"
  moves = list[str]()
  if (params := cs.allocs.consts[mesa.IR3_CONST_ALLOC_DRIVER_PARAMS]).size_vec4:      # a workgroup's size is in constants there, in registers here
    lines = disassemble(code)
    lines, size_at = lines[:max(i for i, line in enumerate(lines) if line.endswith("end")) + 1], params.offset_vec4 * 4 + 8
    text = "\n".join(lines)
    assert assemble(text)[:8 * len(lines)] == code[:8 * len(lines)], f"Mesa does not read what it printed:\n{text}"
    for i in range(3): text = re.sub(rf"\b{re.escape(reg(size_at + i, 'c'))}\b", reg(FREE + i), text)
    code, moves = assemble(text), [f"mov.u32u32 {reg(FREE + i)}, {reg(WGSIZE + i)}" for i in range(3)]
  if (wg := v.cs.work_group_id) != 252: moves += [f"mov.u32u32 {reg(wg + i)}, {reg(WGID + i)}" for i in range(3)]
  if (lid := v.cs.local_invocation_id) not in (0, 252): moves += [f"mov.u32u32 {reg(lid + i)}, {reg(i)}" for i in (2, 1, 0)]
  prologue = assemble("\n".join([*moves, "(rpt5)nop", "end"]))[:8 * (len(moves) + 1)] if moves else b""
  base, imm_at = cs.ubo_state.range[0].offset, cs.allocs.max_const_offset_vec4 * 16
  plain = [(dt, shape) for _, _, dt, shape in signature if not is_image_shape(shape)]
  nbufs = sum(shape != () for _, shape in plain)        # variables have no shape
  args = [(base + 8 * i, BUF) for i in range(nbufs)]
  args += [(base + at, BUF) for at, _ in TinyELF.iter_sig(tuple((None, 0, dt, ()) for dt, _ in plain[nbufs:]), 8 * nbufs)]
  ntex = v.image_mapping.num_tex
  args += [(0, IBO)] * (v.num_uavs - ntex) + [(0, TEX)] * ntex
  assert list(v.image_mapping.tex_to_image[:ntex]) == list(range(ntex)), "OpenCL code numbers textures in the order of its arguments"
  words = struct.unpack(f"<{len(imm) // 4}I", imm)
  return Container(prologue + code, name, args, [(w, imm_at + 4 * i, 4) for i, w in enumerate(words)], int(ntex > 0), 0, v.branchstack, v.pvtmem_size,
                   v.shared_size, v.info.max_reg + 1, v.info.max_half_reg + 1)

@contextlib.contextmanager
def containers(log: list[Container] | None = None) -> Iterator[None]:
  """Inside, the QCOM driver, ours or the unmodified one, gets every kernel of tinygrad's IR3 renderer as a container and runs it as OpenCL code.
  A Container in the place of a program is taken as it is."""
  from tinygrad.codegen import to_program_cache
  from tinygrad.runtime import ops_qcom
  from tinygrad.runtime.support.compiler_mesa import IR3Compiler
  def separate_files(compiler: Any, src: str) -> bytes: # of full and half registers, as OpenCL code has them; not for the compiler's cache
    merged, compiler.cc.mergedregs = compiler.cc.mergedregs, False
    try: return bytes(compiler.compile(src))
    finally: compiler.cc.mergedregs = merged
  class OpenCL(ops_qcom.QCOMProgram): # type: ignore[misc, valid-type]
    def __init__(self, dev: Any, obj: Any):
      c = obj.lib if isinstance(obj.lib, Container) else from_ir3(obj.lib, obj.signature, obj.name)
      if log is not None: log.append(c)
      with pytest.MonkeyPatch.context() as m:
        m.setattr(ops_qcom, "IR3Renderer", ())          # the device's renderer is none of these
        super().__init__(dev, dataclasses.replace(obj, lib=c.build()))
  with pytest.MonkeyPatch.context() as m:
    m.setattr(ops_qcom, "QCOMProgram", OpenCL)
    m.setattr(IR3Compiler, "compile_cached", separate_files)
    to_program_cache.clear()
    yield
    to_program_cache.clear()
