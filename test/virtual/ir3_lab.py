"""Runs short IR3 programs lane by lane: inputs in registers, results back as arrays."""
from __future__ import annotations
import functools
from collections.abc import Callable
from typing import Any
import numpy as np
from test.mockgpu.qcom.ir3.native import Dispatch, Engine, Program
from test.mockgpu.qcom.memory import BoInfo
from test.virtual.ir3_asm import assemble
from test.virtual.ir3_core import Memory, engine

SPARE = 40                    # r40 and up: addresses, never used by the program under test

@functools.cache
def built(text: str, merged: bool = False) -> Program: return engine().program(assemble(text, merged), merged_regs=merged)

def run(body: str, inputs: dict[str, np.ndarray], outputs: dict[str, type], *, consts: dict[int, int] | None = None, local: int = 64,
        merged: bool = False,
        eng: Engine | None = None, patch: Callable[[bytes], bytes] | None = None, scratch: int = 0, memory: Memory | None = None,
        **kw: Any) -> dict[str, np.ndarray]:
  """Executes `body` once for each element. inputs: register name (`r1.x` or `hr1.x`) -> uint32/uint16 values, all of one length N (a multiple of
  `local`); outputs: register name -> dtype of 4 or 2 bytes. Register r0.x holds the local id at the start; r40-r47 are taken. consts 0..63 are taken.
  patch: last change to the machine code; scratch: address at which a page is mapped for the program;
  memory: the address space to run in, instead of a new one."""
  n = len(next(iter(inputs.values()))) if inputs else local
  mem = memory or Memory()
  if scratch:
    page = np.zeros(8192, np.uint8)
    mem.space.map(scratch, 4096, page.ctypes.data + -page.ctypes.data % 4096, bo=BoInfo(name="scratch"))
  consts_file = np.zeros(1024, np.uint32)
  for c, v in (consts or {}).items(): consts_file[c] = v & 0xffffffff
  pre = [f"shl.b r{SPARE}.z, r48.x, {local.bit_length() - 1}", f"add.u r{SPARE}.z, r{SPARE}.z, r0.x"]
  post = []
  addrs = []
  for k, (name, what) in enumerate([*inputs.items(), *outputs.items()]):
    size = (what.dtype.itemsize if isinstance(what, np.ndarray) else np.dtype(what).itemsize)
    iova = mem.alloc(n * size)
    consts_file[2 * k:2 * k + 2] = iova & 0xffffffff, iova >> 32
    addrs.append(iova)
    seq = [f"shl.b r{SPARE}.x, r{SPARE}.z, {size // 2}", f"add.u r{SPARE}.x, r{SPARE}.x, c{k // 2}.{'xz'[k & 1]}", f"mov.u32u32 r{SPARE}.y, "
           f"c{k // 2}.{'yw'[k & 1]}"]
    t = "u32" if size == 4 else "u16"
    if isinstance(what, np.ndarray):
      mem.view(iova, n * size)[:] = np.ascontiguousarray(what).view(np.uint8)
      pre += [*seq, f"ldg.{t} {name}, g[r{SPARE}.x], 1"]
    else: post += [*seq, f"stg.{t} g[r{SPARE}.x], {name}, 1"]
  text = "\n".join([*pre, body, *post, "end"])
  d = Dispatch(groups=(n // local, 1, 1), local=(local, 1, 1), consts=consts_file, space=mem.space, merged_regs=merged, **kw)
  e = eng or engine()
  e.run(e.program(patch(assemble(text, merged)), merged_regs=merged) if patch else built(text, merged), d)
  return {name: mem.view(addrs[len(inputs) + k], n * np.dtype(dt).itemsize).view(dt).copy() for k, (name, dt) in enumerate(outputs.items())}

def pad(*arrays: np.ndarray, to: int = 64) -> tuple[np.ndarray, ...]:
  """The arrays, repeated to a common multiple of `to` elements."""
  n = -(-max(len(a) for a in arrays) // to) * to
  return tuple(np.resize(a, n) for a in arrays)
