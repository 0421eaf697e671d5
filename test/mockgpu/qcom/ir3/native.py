"""The fast IR3 shader core: builds and drives engine.c.

The engine is compiled once for all programs and cached by content. `Engine.program` decodes, `Engine.run` launches a grid. Accesses that
hardware would answer with an SMMU fault read 0 or are dropped, and are reported: `run` finishes the job, then raises the first ShaderFault,
whose `faults` holds all of them.
"""
from __future__ import annotations
import contextlib, ctypes, functools, hashlib, os, pathlib, pickle, re, shlex, subprocess, sys, sysconfig, tempfile, time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
import numpy as np
from test.mockgpu.qcom.ir3.decode import Instr, decode_one
from test.mockgpu.qcom.ir3 import image
from test.mockgpu.qcom.ir3.image import Image, Sampler
from test.mockgpu.qcom.ir3.isa import REG_NONE, ROUND_EVEN, ROWS, SHARED_FIRST, SHARED_LAST, UnknownInstruction
from test.mockgpu.qcom.ir3.translate import LANES, OP, ROUTINES, UOP, UNI, VECTORS, Code, Translator, Step, reachable, relative_files, steps_of

FAULTS = ("unmapped", "not_resident", "readonly", "out_of_bounds", "misaligned", "undefined_register", "undefined_const", "undefined_local",
          "fetch_past_end", "local_out_of_bounds", "private_out_of_bounds", "hang", "barrier_divergence", "stale", "unsettled", "call_stack",
          "image_type", "undefined_private", "branch_stack")
MAX_FAULTS = 64
CFLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
          "-fno-strict-aliasing", "-fwrapv", "-fvisibility=hidden", "-pthread")

class ShaderFault(Exception):
  """A shader did what hardware does not allow. pc: instruction index; address: global, or a local/private byte offset, or a register or const id."""
  def __init__(self, kind: str, pc: int = 0, lane: int = 0, workgroup: tuple[int, int, int] = (0, 0, 0), address: int = 0, size: int = 0,
               write: bool = False, text: str = ""):
    self.kind, self.pc, self.lane, self.workgroup = kind, pc, lane, workgroup
    self.address, self.size, self.write, self.text = address, size, write, text
    self.faults: list[ShaderFault] = [self]
    super().__init__(f"{kind}: {'write' if write else 'read'} of {size} bytes at {address:#x} by instruction {pc}"
                     f"{f' ({text})' if text else ''}, lane {lane}, workgroup {workgroup}")

class ShaderHang(ShaderFault): pass

class _Fault(ctypes.Structure):
  _fields_ = [("addr", ctypes.c_uint64), *((n, ctypes.c_uint32) for n in ("kind", "pc", "lane", "size", "write")), ("wg", ctypes.c_uint32 * 3)]

class _Run(ctypes.Structure):
  _fields_ = [*((n, ctypes.c_void_p) for n in ("uops", "unis", "consts", "poison", "segs", "tex", "uav", "ubo", "samp", "abort", "faults",
                                               "bb", "def_init")),
              *((n, ctypes.c_uint64) for n in ("seed", "bytes_read", "bytes_written")), ("budget", ctypes.c_int64),
              *((n, ctypes.c_uint32) for n in ("nuni", "npoison32", "npoison16", "nsegs", "ntex", "nuav", "nubo", "nsamp", "nbb", "wave_bytes",
                                               "def_base", "ndefs", "ndef_init")),
              *((n, ctypes.c_uint32 * 3) for n in ("groups", "local", "size", "goff")), ("ids", ctypes.c_int32 * 13),
              *((n, ctypes.c_uint32) for n in ("local_bytes", "pvt_bytes", "order", "threads", "max_faults", "nfaults", "strict_local", "hang",
                                               "cf_mask", "own_consts", "branch_stack"))]

@dataclass
class Dispatch:
  """One grid launch as the CP has resolved it. Sizes in bytes, register ids as in the ISA (252 = absent), footprints in vec4."""
  groups: tuple[int, int, int]
  local: tuple[int, int, int]
  consts: np.ndarray                                   # uint32[1024]
  space: Any                                           # memory.Space
  size: tuple[int, int, int] | None = None             # threads of the grid; None: groups * local, else the last groups may be partial
  offset: tuple[int, int, int] = (0, 0, 0)             # global offset in threads, counted in by the WGOFFSET register
  const_valid: np.ndarray | None = None                # bool[1024]; None: every const counts as loaded
  wgid_reg: int = SHARED_FIRST
  lid_reg: int = 0
  wgsize_reg: int = REG_NONE
  wgoffset_reg: int = REG_NONE
  linear_lid_reg: int = REG_NONE
  full_regs: int = 48
  half_regs: int = 48
  branchstack: int = 32                                # pairs of places where fibers may wait for the others
  local_bytes: int = 0
  pvt_bytes: int = 0                                   # per fiber
  demote: bool = True
  merged_regs: bool = False
  f16_no_inf: bool = False
  textures: list[bytes] = field(default_factory=list)
  samplers: list[bytes] = field(default_factory=list)
  borders: list[bytes] = field(default_factory=list)   # border colour entry of each sampler
  uavs: list[bytes] = field(default_factory=list)
  ubos: list[bytes] = field(default_factory=list)
  cf_mask: int = 0                                     # SP_CS_BOOLEAN_CF_MASK, tested by brac
  order: str | int = "forward"                         # forward, reversed, or a seed
  budget: int = 1 << 34                                # instructions a wave may execute before it counts as hung
  strict: bool = True                                  # definedness of registers, consts and local memory
  abort: ctypes.c_int32 | None = None                  # set to 1 from another thread to stop the run

@dataclass(frozen=True)
class Facts:
  """What a launch must know of a program. Registers: highest id used, -1 for none."""
  uses_local: bool
  uses_private: bool
  max_full: int
  max_half: int
  relative: bool

class Program:
  """A program. Translations are kept on disk, by content and by the version of the tables that made them: decoding costs more than most launches."""
  def __init__(self, code: bytes, merged_regs: bool):
    if not code or len(code) % 8: raise ValueError(f"IR3 code of {len(code)} bytes: not a positive multiple of 8")
    self.merged_regs, self._words = merged_regs, code
    self._file = cache_dir() / f"programs-{_tables()}" / hashlib.sha256(code + bytes([merged_regs])).hexdigest()[:32]
    self.facts, self._code = self._load()

  def _load(self) -> tuple[Facts, dict[tuple, Code]]:
    with contextlib.suppress(Exception): return pickle.loads(self._file.read_bytes())      # absent, or torn: decoded anew
    regs = {r for ss in self._steps.values() for s in ss for r in (*s.reads, *s.writes)}
    if self.merged_regs: regs = {("r", n // 2) if f == "h" else (f, n) for f, n in regs}
    ins = self.instrs.values()
    return Facts(any(i.name[:3] in ("ldl", "stl") or i.row.form == "atomic.l" for i in ins), any(i.name[:3] in ("ldp", "stp") for i in ins),
                 max((n for f, n in regs if f == "r" and n < SHARED_FIRST), default=-1), max((n for f, n in regs if f == "h"), default=-1),
                 bool(relative_files(self.instrs, self.merged_regs))), {}

  @functools.cached_property
  def instrs(self) -> dict[int, Instr]:
    """Instruction index -> Instr for everything control flow can reach. Raises UnknownInstruction."""
    decoded: dict[int, Instr] = {}
    failed: dict[int, UnknownInstruction] = {}
    for pc, w in enumerate(np.frombuffer(self._words, "<u8").tolist()):
      try: decoded[pc] = decode_one(w, pc)
      except UnknownInstruction as e: failed[pc] = e
    live = reachable(decoded)
    for pc in sorted(failed):
      if pc == 0 or any(pc - 1 == p and decoded[p].name not in ("end", "jump", "ret") or decoded[p].row.form in ("branch", "target")
                        and decoded[p].target == pc for p in live): raise failed[pc]
    return {pc: decoded[pc] for pc in sorted(live)}

  @functools.cached_property
  def _steps(self) -> dict[int, list[Step]]: return {pc: steps_of(i) for pc, i in self.instrs.items()}

  def translated(self, ids: tuple[int, ...], strict: bool, cov_round: int, full_regs: int) -> Code:
    """`ids`: registers of local id, workgroup id, size and offset (3 each) and linear local id."""
    key = (ids, strict, cov_round, full_regs if self.facts.relative else 0)
    if key not in self._code:
      self._code[key] = Translator(self.instrs, self._steps, merged=self.merged_regs, ids=ids, strict=strict, cov_round=cov_round,
                                   full_regs=full_regs).result()
      with contextlib.suppress(OSError): self._save()         # a full or read-only disk only costs time
    return self._code[key]

  def _save(self) -> None:
    self._file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=self._file.parent, delete=False) as tmp: tmp.write(pickle.dumps((self.facts, self._code)))
    os.replace(tmp.name, self._file)

@functools.cache
def _tables() -> str:
  """Names the version of everything a translation depends on."""
  here = pathlib.Path(__file__).parent
  return hashlib.sha256(b"".join((here / f).read_bytes() for f in ("isa.py", "decode.py", "translate.py", "native.py"))).hexdigest()[:12]

def cache_dir() -> pathlib.Path: return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "qcom-virtual"

# *** building the engine

def _ident(key: str) -> str: return re.sub(r"\W", "_", key)

def lanes_header() -> str:
  """C source of the lane functions and of the handler tables, from the instruction table."""
  out = []
  for lane in LANES.values():
    w = type_bits(lane.src[0])
    expr = re.sub(r"\bUMASK\b", "0xffffu" if w == 16 else "0xffffffffu", re.sub(r"\bW\b", str(w), lane.expr))
    out.append(f"LANE{len(lane.src)}({_ident(lane.key)}, {lane.dst}, {', '.join(lane.src)}, {expr})")
  for table in ("full", "masked"):
    out.append(f"static const void *const {table}[] = {{" + ", ".join([f"op_{r}" for r in ROUTINES] + [f"{table}_{_ident(k)}" for k in LANES]) + "};")
  return "\n".join(out) + "\n"

def type_bits(t: str) -> int: return 32 if t[1:] == "32" else 16

def _compiler() -> list[str]:
  if cc := os.environ.get("QCOM_MOCK_CC"): return shlex.split(cc)
  try: import ziglang  # type: ignore[import-not-found]
  except ImportError:
    raise RuntimeError("the shader engine needs a C compiler with musttail: install the 'ziglang' package or set QCOM_MOCK_CC (clang)") from None
  return [str(pathlib.Path(ziglang.__file__).parent / "zig"), "cc"]

def compile_c(source: pathlib.Path, flags: Sequence[str], headers: Mapping[str, str] | None = None) -> pathlib.Path:
  """Path of the shared library made of `source` and generated `headers`, built on first use for this CPU and cached under $XDG_CACHE_HOME by content.
  Raises RuntimeError with the compiler's message."""
  headers, cc = headers or {}, [*_compiler(), *flags]
  cpu = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0] if os.path.exists("/proc/cpuinfo") else sysconfig.get_platform()
  cpu = "\n".join(line for line in cpu.splitlines() if line.startswith(("flags", "Features", "model name")))
  parts = [source.read_bytes(), *(h.encode() for h in headers.values()), " ".join(cc).encode(), cpu.encode(), sys.platform.encode()]
  key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
  if (lib := (cache := cache_dir()) / f"{source.stem}-{key}.so").exists(): return lib
  cache.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=cache) as tmp:
    for name, text in headers.items(): (pathlib.Path(tmp) / name).write_text(text)
    r = subprocess.run([*cc, f"-I{tmp}", str(source), "-o", f"{tmp}/out.so", "-lm"], capture_output=True, text=True)
    if r.returncode: raise RuntimeError(f"the shader engine does not compile ({shlex.join(cc)}):\n{source}\n{r.stderr[-4000:]}")
    os.replace(f"{tmp}/out.so", lib)
  return lib

def build() -> pathlib.Path:
  """Path of the compiled engine. Raises RuntimeError with the compiler's message."""
  return compile_c(pathlib.Path(__file__).parent / "engine.c", CFLAGS, {"lanes.h": lanes_header()})

# *** running

class Engine:
  """Owns the compiled engine. `waves`/`lanes`: executions per row of isa.ROWS, counted per wave and per active lane. Thread safe for run()."""
  _lib: ctypes.CDLL | None = None
  executed = np.zeros(len(ROWS), np.int64)              # by waves, of all engines of this process

  def __init__(self, threads: int = 0, cov_round: int = ROUND_EVEN):
    self.threads, self.cov_round = threads or os.cpu_count() or 1, cov_round
    if Engine._lib is None:
      lib = ctypes.CDLL(str(build()))
      lib.ir3_run.argtypes, lib.ir3_run.restype = [ctypes.POINTER(_Run)], ctypes.c_int
      lib.ir3_sizeof.argtypes, lib.ir3_sizeof.restype = [ctypes.c_uint32], ctypes.c_uint32
      want = (ctypes.sizeof(_Run), UOP.itemsize, UNI.itemsize, ctypes.sizeof(Image), ctypes.sizeof(_Fault), 48, ctypes.sizeof(Sampler))
      if (got := tuple(lib.ir3_sizeof(n) for n in range(7))) != want:
        raise RuntimeError(f"engine.c and native.py disagree on structures: {got} != {want}")
      if lib.ir3_sizeof(7) > VECTORS: raise RuntimeError("wave context is larger than translate.VECTORS")
      Engine._lib = lib
    self._programs: dict[tuple[bytes, bool], Program] = {}
    self.waves, self.lanes = np.zeros(len(ROWS), np.int64), np.zeros(len(ROWS), np.int64)
    self.bytes_read = self.bytes_written = 0

  def program(self, code: bytes, *, merged_regs: bool = False) -> Program:
    """Decodes (once per content). Raises UnknownInstruction for reachable code outside the table."""
    key = (hashlib.sha256(code).digest(), merged_regs)
    if key not in self._programs: self._programs[key] = Program(code, merged_regs)
    return self._programs[key]

  def run(self, prog: Program, d: Dispatch) -> None:
    """Runs the grid to its end; releases the GIL. Raises ShaderHang, or ShaderFault after the job is done.

    Before anything runs: UnknownInstruction, or ValueError for state the engine does not implement (texture layouts, F16_NO_INF, ...).
    """
    assert Engine._lib is not None
    if d.f16_no_inf: raise ValueError("SP_FLOAT_CNTL.F16_NO_INF is not implemented")
    if d.merged_regs != prog.merged_regs: raise ValueError("program was decoded for the other MERGEDREGS setting")
    if d.strict:
      for what, used, limit in (("full", prog.facts.max_full, d.full_regs), ("half", prog.facts.max_half, d.half_regs)):
        if used >= limit * 4: raise ShaderFault("register_limit", address=used, text=f"{what} register r{used >> 2} used, footprint is {limit} vec4")
    ids = (d.lid_reg, d.wgid_reg, d.wgsize_reg, d.wgoffset_reg, d.linear_lid_reg)
    for what, reg in zip(("WGID", "WGSIZE", "WGOFFSET"), ids[1:]):
      if reg != REG_NONE and not SHARED_FIRST <= reg <= SHARED_LAST - 2: raise ValueError(f"{what} id {reg:#x} is not a shared register (r48-r55)")
    code = prog.translated(ids, d.strict, self.cov_round, d.full_regs)
    if code.half_consts and not d.demote: raise ValueError("half-width constants without CONSTANT_DEMOTION_ENABLE are not implemented")
    total, fibers = d.groups[0] * d.groups[1] * d.groups[2], d.local[0] * d.local[1] * d.local[2]
    if not total: return
    size = d.size or tuple(g * n for g, n in zip(d.groups, d.local))
    if any(-(-s // n) != g for s, g, n in zip(size, d.groups, d.local)): raise ValueError(f"{size} threads are not {d.groups} groups of {d.local}")
    if not 0 < fibers <= 1024: raise ValueError(f"workgroup of {fibers} fibers: the A630 takes 1 to 1024")
    consts = np.ascontiguousarray(d.consts, np.uint32)
    if consts.size != 1024: raise ValueError(f"constant file of {consts.size} dwords instead of 1024")
    poison = np.array(code.poison32 + code.poison16 + [0], np.int32)
    def_init = np.array(code.def_init + [0], np.int32)
    tex, uav = [image.image(t, swizzle=True) for t in d.textures], [image.image(t, swizzle=False) for t in d.uavs]
    ubo, borders = [image.ubo(t) for t in d.ubos], [*d.borders, *[bytes(16)] * len(d.samplers)]
    samp = [image.sampler(t, b) for t, b in zip(d.samplers, borders)]
    arrays = [(kind * max(1, len(v)))(*v) for kind, v in ((Image, tex), (Image, uav), (Image, ubo), (Sampler, samp))]
    faults = (_Fault * MAX_FAULTS)()
    bb = np.zeros((code.blocks, 2), np.uint64)
    abort = d.abort if d.abort is not None else ctypes.c_int32(0)
    order = {"forward": 0, "reversed": 1}.get(d.order, 2) if isinstance(d.order, str) else 2
    work = total * -(-fibers // 64) * len(code.uops)
    segs = d.space.table()
    r = _Run(code.uops.ctypes.data, code.unis.ctypes.data, consts.ctypes.data, poison.ctypes.data, segs.ctypes.data,
             *map(ctypes.addressof, arrays), ctypes.addressof(abort), ctypes.addressof(faults), bb.ctypes.data, def_init.ctypes.data,
             (int(d.order) * 0x9e3779b97f4a7c15 & (1 << 64) - 1) if not isinstance(d.order, str) else 0, 0, 0, d.budget,
             len(code.unis), len(code.poison32), len(code.poison16), len(segs), len(tex), len(uav), len(ubo), len(samp),
             code.blocks, code.wave_bytes,
             code.defs[0], code.defs[1], len(code.def_init),
             d.groups, d.local, size, d.offset, tuple(code.ids), d.local_bytes if prog.facts.uses_local else 0, d.pvt_bytes
             if prog.facts.uses_private else 0,
             order, self.threads if work > 4000 else 1, MAX_FAULTS, 0, int(d.strict), 0, d.cf_mask,
             int(code.own_consts), 2 * d.branchstack if d.strict else 64)
    if Engine._lib.ir3_run(ctypes.byref(r)): raise MemoryError("the shader engine could not allocate its wave contexts")
    block, row, per = code.rows
    for counts in (self.waves, Engine.executed): np.add.at(counts, row, bb[block, 0].astype(np.int64) * per)
    np.add.at(self.lanes, row, bb[block, 1].astype(np.int64) * per)
    self.bytes_read += r.bytes_read
    self.bytes_written += r.bytes_written
    found = [self._fault(prog, f) for f in faults[:min(r.nfaults, MAX_FAULTS)]]
    if d.strict and d.const_valid is not None:
      for c, pc, b in code.consts:
        if not d.const_valid[c] and bb[b, 0]: found.append(ShaderFault("undefined_const", pc, address=c, size=4, text=str(prog.instrs[pc])))
    if found:
      first = next((f for f in found if f.kind == "hang"), found[0])
      first.faults = found
      raise first

  def _fault(self, prog: Program, f: _Fault) -> ShaderFault:
    kind = FAULTS[f.kind]
    cls = ShaderHang if kind == "hang" else ShaderFault
    return cls(kind, f.pc, f.lane, tuple(f.wg), f.addr, f.size, bool(f.write), str(prog.instrs[f.pc]) if f.pc in prog.instrs else "past the end")

  def counts(self) -> dict[str, tuple[int, int]]:
    """Executed rows: mnemonic -> (wave executions, lane executions)."""
    return {r.name: (int(w), int(n)) for r, w, n in zip(ROWS, self.waves, self.lanes) if w}

def rate(engine: Engine, prog: Program, d: Dispatch, seconds: float = 0.5) -> float:
  """Lane-instructions per second and core of a dispatch, repeated for about `seconds`."""
  before, t, n = int(engine.lanes.sum()), time.perf_counter(), 0
  while n == 0 or time.perf_counter() - t < seconds:
    engine.run(prog, d)
    n += 1
  return (int(engine.lanes.sum()) - before) / (time.perf_counter() - t) / engine.threads

__all__ = ["Dispatch", "Engine", "OP", "Program", "ShaderFault", "ShaderHang", "UnknownInstruction", "build", "rate"]
