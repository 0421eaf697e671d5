"""Mesa's own IR3 assembler and disassembler (libtinymesa), as functions on text and bytes."""
from __future__ import annotations
import ctypes, functools, re, tempfile
from typing import Any

@functools.cache
def _compiler() -> Any:
  from tinygrad.runtime.support.compiler_mesa import IR3Compiler
  return IR3Compiler("a630")

def assemble(text: str, merged: bool = False) -> bytes:
  """Machine code of one or more instructions in freedreno syntax, `end` included if the text has it. ValueError: Mesa does not parse it."""
  from tinygrad.runtime.autogen import mesa
  from tinygrad.runtime.support.compiler_mesa import rzalloc
  libc = ctypes.CDLL(None)
  libc.fmemopen.restype, libc.fmemopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
  libc.fclose.argtypes = [ctypes.c_void_p]
  parse = mesa.dll.ir3_parse
  parse.restype, parse.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
  cc = _compiler().cc
  v = rzalloc(mesa.struct_ir3_shader_variant, type=mesa.MESA_SHADER_COMPUTE, compiler=ctypes.pointer(cc), key=mesa.struct_ir3_shader_key()).contents
  v.const_state = rzalloc(mesa.struct_ir3_const_state, ctypes.pointer(v))
  v.mergedregs = merged
  info, src = ctypes.create_string_buffer(4096), text.encode() + b"\n"
  fp = libc.fmemopen(src, len(src), b"r")
  try:
    if not parse(ctypes.addressof(v), ctypes.addressof(info), fp): raise ValueError(f"Mesa does not assemble:\n{text}")
  finally: libc.fclose(fp)
  lib = mesa.ir3_shader_assemble(v)
  if not lib: raise ValueError(f"Mesa does not encode:\n{text}")
  code = ctypes.string_at(lib, v.info.size)
  mesa.ralloc_free(ctypes.pointer(v))
  return code

def word_of(key: tuple) -> int:
  """A word with the opcode that a key of the instruction table stands for (isa.py); operands as they come: register 0, one component, u32."""
  cat, opc = key[0], key[-1]
  if cat == 0: return key[1] << 49 | key[2] << 55 | (key[3] << 37 if len(key) > 3 else 0)
  if cat == 2: body = key[1] << 53 | 1 << 52
  elif cat == 3: body = opc << 55 | key[1] << 13
  elif cat == 5: body = opc << 54 | 1
  elif cat == 6: body = opc << 14 | 6 << 20 | 1 << 53 | 3 << 49 if key[1] == "b" else opc << 54 | 3 << 49 | 1 << 23 | 1 << 24 | 1
  else: body = opc << {1: 57, 7: 55}[cat]
  return cat << 61 | body

def disassemble(code: bytes) -> list[str]:
  """One line an instruction, as Mesa prints them; branch targets as #offset."""
  from tinygrad.runtime.autogen import libc, mesa
  with tempfile.TemporaryFile("w+") as tf:
    fp = libc.fdopen(tf.fileno(), b"w")
    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
    def mark(data: Any, n: int, instr: Any) -> None: libc.fputs(f"@{n}@".encode(), fp)
    mesa.ir3_isa_disasm(code, len(code), ctypes.cast(fp, ctypes.POINTER(mesa.struct__IO_FILE)),
                        mesa.struct_isa_decode_options(630, True, 0, False, pre_instr_cb=mark))
    libc.fflush(fp)
    tf.seek(0)
    return [re.sub(r"^@\d+@", "", line).strip() for line in tf.read().splitlines() if line.startswith("@")]
