"""Runs one set of kernels and tells the state each dispatch ran with. A child process of test_against_unmodified.py, for any QCOM driver:

    DEV=... python dispatch_log.py CASE ... > log.json

{case: {"result": sha256, "dispatches": [{"kernel": compiler's metadata, "registers": {name: value}, "loads": .., "constants": .., ..}]}}
Addresses become names: "code", "args+N", "in0+N", "out+N", or "tmpN+N" for buffers nobody named, in order of appearance.
"""
from __future__ import annotations
import hashlib, json, sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
import numpy as np
from tinygrad import Tensor, TinyJit, Variable, dtypes
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.engine.realize import run_linear
from tinygrad.helpers import Context
from tinygrad.runtime.support import compiler_mesa
from test.mockgpu.qcom import current, registers

rng = np.random.default_rng(7)
def rand(*shape: int) -> np.ndarray: return rng.random(shape, np.float32) * 2 - 1
def ints(*shape: int) -> np.ndarray: return rng.integers(-10**12, 10**12, shape)

def long_program(x: Any, sin: Callable[[Any], Any]) -> Any:
  """More than 64 instruction groups in one kernel."""
  for n in range(60): x = x + sin(x * 3 + n) * 0.02
  return x

def optimized(t: Tensor, *opts: Opt) -> Tensor:
  """Realizes `t`, which must be one kernel, with these optimizations instead of the ones that tinygrad would choose."""
  linear, var_vals = t.linear_with_vars()
  (call,) = linear.src
  ast = call.src[0].replace(arg=replace(call.src[0].arg, opts_to_apply=opts))
  run_linear(linear.replace(src=(call.replace(src=(ast, *call.src[1:])),)), var_vals)
  return t

def grouped(x: Tensor, y: Tensor) -> Tensor: return optimized(x @ y, Opt(OptOps.GROUPTOP, 0, 8), Opt(OptOps.LOCAL, 0, 4))

def outer(x: Tensor, y: Tensor) -> Tensor:
  """256 accumulators a thread, which can name 192 scalar registers."""
  return optimized((x.reshape(32, 1, 8) * y.reshape(1, 32, 8)).sum(2), Opt(OptOps.UPCAST, 0, 16), Opt(OptOps.UPCAST, 1, 16))

def replayed(a: np.ndarray, b: np.ndarray) -> tuple[list[Tensor], list[Tensor]]:
  """Three kernels captured and replayed: eager, captured, and replayed with another input."""
  f = TinyJit(lambda x: (((x + 1).contiguous() * 3).contiguous() - 5).contiguous().realize())
  ts = [Tensor(a).realize(), Tensor(b).realize()]
  return ts, [f(t) if n < 2 else f(t).clone().realize() for n, t in enumerate((*ts, ts[0]))][-1:]

def conv(half: bool) -> tuple:
  x, w = rand(1, 16, 24, 24), rand(16, 16, 3, 3)
  pad = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
  want = sum(np.einsum("nchw,oc->nohw", pad[:, :, i:i + 24, j:j + 24], w[:, :, i, j]) for i in range(3) for j in range(3))
  def run(t: Tensor, k: Tensor) -> Tensor:
    with Context(FLOAT16=int(half)): return t.conv2d(k, padding=1).relu().realize()
  return [x, w], run, np.maximum(want, 0), 0.1 if half else 1e-4

def cases() -> dict[str, tuple[list[np.ndarray], Callable[..., Tensor], np.ndarray, float]]:
  """name -> (inputs, computation, expected result by numpy, largest difference)."""
  a, b, m, k, h, i, j = rand(4113), rand(4113), rand(96, 64), rand(64, 80), rand(3000).astype(np.float16), ints(999), ints(999)
  u, v = rand(32, 8), rand(32, 8)
  return {
    "elementwise": ([a, b], lambda x, y: (x * 2 + y).relu(), np.maximum(a * 2 + b, 0), 1e-6),
    "variable": ([a], lambda x: (x[:4096] * Variable("n", 1, 64).bind(7)).contiguous(), a[:4096] * 7, 1e-6),
    "matmul": ([m, k], grouped, m @ k, 1e-4),
    "reduction": ([rand(100, 1000) * 0 + 1], lambda x: x.sum(), np.float32(100000), 0),
    "half": ([h], lambda x: x * x + 1, (h * h + np.float16(1)), 1e-2),
    "int64": ([i, j], lambda x, y: x * 3 - y, i * 3 - j, 0),
    "bytes": ([(i & 255).astype(np.uint8)], lambda x: (x + 5).cast(dtypes.int32), ((i & 255).astype(np.uint8) + np.uint8(5)).astype(np.int32), 0),
    "softmax": ([m], lambda x: x.softmax(), np.exp(m - m.max(1, keepdims=True)) / np.exp(m - m.max(1, keepdims=True)).sum(1, keepdims=True), 1e-5),
    "long": ([a], lambda x: long_program(x, Tensor.sin), long_program(a, np.sin), 1e-3),
    "spill": ([u, v], outer, u @ v.T, 1e-5),
    "image": conv(False),
    "image_half": conv(True),
  }

# *** metadata of the compiled kernels, from where either driver unpacks them

programs: list[tuple[bytes, dict[str, Any]]] = []
unpack = compiler_mesa.IR3Compiler.unpack_lib
def unpacked(lib: bytes) -> Any:
  v, cs, imm, image = unpack(lib)
  params = cs.allocs.consts[compiler_mesa.mesa.IR3_CONST_ALLOC_DRIVER_PARAMS]
  programs.append((image, {
    "instrlen": v.instrlen, "size": v.info.size, "constlen": v.constlen, "immediates_at": cs.allocs.max_const_offset_vec4 * 16,
    "immediates": len(imm), "pvtmem": v.pvtmem_size, "shared": v.shared_size,
    "tex": v.image_mapping.num_tex, "uav": v.num_uavs - v.image_mapping.num_tex,
    "params": params.size_vec4, "sha256": hashlib.sha256(image).hexdigest()}))
  return v, cs, imm, image

# *** the observer

ADDRESS = {"SP_CS_BASE", "SP_CS_PVT_MEM_BASE", "SP_CS_SAMPLER_BASE", "SP_CS_TEXMEMOBJ_BASE", "SP_CS_UAV_BASE", "TPL1_CS_BORDER_COLOR_BASE"}

class Log:
  """Dispatches of one case. Buffers are named when the case is over: until then an address is ("at", start of its BO, offset)."""
  def __init__(self) -> None: self.dispatches, self.names = list[dict[str, Any]](), dict[int, str]()

  def __call__(self, p: Any, regs: dict[int, int]) -> None:
    space, d = p.dispatch.space, p.dispatch
    args = next((load.address for load in p.loads if load.what == "constants"), 0)
    def name(addr: int) -> Any:
      if addr == p.base: return "code"
      if args <= addr < args + 8192 and args: return f"args+{addr - args}"
      s = space.find(addr)
      return addr if s is None else ("at", s.iova, addr - s.iova)
    bo = space.find(p.base)
    kernel = max((k for k in programs if len(k[0]) <= bo.iova + bo.size - p.base and space.read_uche(p.base, len(k[0]))[0] == k[0]),
                 key=lambda k: len(k[0]))[1]
    named = {registers.name(r): v for r, v in regs.items()}
    for n, count in (("SP_CS_SAMPLER_BASE", d.samplers), ("SP_CS_TEXMEMOBJ_BASE", d.textures), ("SP_CS_UAV_BASE", d.uavs)):
      if not count:                                     # left by an earlier dispatch of the submit, this one does not look at it
        for half in (n, f"{n}_HI"): named.pop(half, None)
    if kernel["instrlen"] <= 64: named.pop("SP_PS_INSTR_SIZE", None)
    for n in ADDRESS & named.keys(): named[n] = named[n] | named.pop(f"{n}_HI") << 32
    pvt, border = named.get("SP_CS_PVT_MEM_BASE", 0), named.get("TPL1_CS_BORDER_COLOR_BASE")
    where = space.find(pvt)
    out = {n: name(v) if n in ADDRESS and v else v for n, v in named.items()}
    if where is not None: out["SP_CS_PVT_MEM_BASE"] = "scratch"
    if border is not None: out["TPL1_CS_BORDER_COLOR_BASE"] = "zeros" if space.read_uche(border, 128)[0] == bytes(128) else "not zeros"
    load = next(load for load in p.loads if load.what == "constants")
    consts, words = [], np.frombuffer(load.data, np.uint32).tolist()
    for n in range(0, len(words), 2):
      a = words[n] | words[n + 1] << 32
      consts += [name(a), None] if a >> 32 and space.find(a) is not None else words[n:n + 2]
    def descriptor(raw: bytes) -> list[Any]:
      w = np.frombuffer(raw, np.uint32).tolist()
      return [*w[:4], name(w[4] | w[5] << 32), None, *w[6:]] if len(w) == 16 else w
    self.dispatches.append({
      "kernel": kernel, "registers": out, "groups": list(d.groups), "constants": consts,
      "scratch_room": where.iova + where.size - pvt if where else 0,
      "loads": {x.what: [name(x.address), x.first, len(x.data)] for x in p.loads},
      **{what: [descriptor(x) for x in getattr(d, what)] for what in ("textures", "samplers", "uavs")}})

  def named(self) -> list[dict[str, Any]]:
    tmps: dict[int, str] = {}
    def walk(x: Any) -> Any:
      if isinstance(x, tuple): return f"{self.names.get(x[1]) or tmps.setdefault(x[1], f'tmp{len(tmps)}')}+{x[2]}"
      if isinstance(x, dict): return {k: walk(v) for k, v in x.items()}
      return [walk(v) for v in x] if isinstance(x, list) else x
    return walk(self.dispatches)

def address(t: Tensor) -> int: return int(t.uop.base.realized._buf.va_addr) # type: ignore[union-attr]

def separate_files(self: Any, arch: str) -> None:
  """Has ours compile for separate register files, as the unmodified driver does: the same machine code is wanted."""
  made(self, arch)
  self.cc.mergedregs, self.cachekey = False, None
made = compiler_mesa.IR3Compiler.__init__

def main(wanted: list[str]) -> None:
  compiler_mesa.IR3Compiler.__init__ = separate_files # type: ignore[method-assign]
  compiler_mesa.IR3Compiler.unpack_lib = staticmethod(unpacked) # type: ignore[method-assign]
  all_cases, gpu, out = cases(), None, {}
  Tensor.zeros(1).contiguous().realize()                # opens the device, and with it the machine
  gpu = current().gpu
  for case in wanted:
    log = Log()
    if case == "replay":
      gpu.observer = log
      ins, (res,) = replayed(a:=rand(1000), rand(1000))
      expected, limit = (a + 1) * 3 - 5, 1e-6
    else:
      arrays, compute, expected, limit = all_cases[case]
      ins = [Tensor(x).realize() for x in arrays]
      gpu.observer = log
      res = compute(*ins).realize()
    got = res.numpy()
    gpu.observer = None
    if gpu.reports: raise RuntimeError(f"{case}: {gpu.reports[0]}")
    assert not np.abs(got.astype(np.float64) - expected.astype(np.float64)).max() > limit, f"{case}: wrong result"
    log.names = {**{address(t): f"in{n}" for n, t in enumerate(ins)}, address(res): "out"}
    out[case] = {"result": hashlib.sha256(got.tobytes()).hexdigest(), "dispatches": log.named()}
  json.dump(out, sys.stdout)

if __name__ == "__main__": main(sys.argv[1:])
