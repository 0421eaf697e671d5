"""Decoded IR3 -> micro-ops of engine.c for one way of being launched (which registers the dispatch fills).

The translator gives every register the program uses a 64-lane vector in the wave context, expands repeats, and splits what an instruction does
beyond its row (source modifiers, saturation, width change, predicate destination, merged half registers) into separate micro-ops.
It also proves which register reads follow a write on every path; only the others are checked at run time.
"""
from __future__ import annotations
import dataclasses, struct
from dataclasses import dataclass
import numpy as np
from test.mockgpu.qcom.ir3.decode import Instr, Operand, reg_name
from test.mockgpu.qcom.ir3.isa import (FLOAT_TABLE, INDEX, REG_A0, REG_NONE, REG_P0, SHARED_FIRST, SHARED_LAST, UnknownInstruction, cov_lane, is_half,
                                       lanes, type_size)

# Routines written in engine.c, in the order of its handler tables; lane functions follow.
ROUTINES = ("BB", "JUMP", "BR", "GETONE", "GETLAST", "CALL", "RET", "END", "FETCH", "PREDT", "PREDF", "PREDE", "BAR", "PSET32", "PSET16", "PGET32",
            "PGET16", "RELG32", "RELG16", "RELGM", "RELD32", "RELD16", "RELDM", "RELC", "CONST", "BCAST32", "MOVMSK", "SHFL32", "SHFL16", "BRCST32",
            "BRCST16", "QUAD32", "QUAD16", "DEFINE", "DEFCOPY", "CHECK",
            *(f"{op}{n}" for op in ("LDG", "STG", "LDL", "STL", "LDP", "STP") for n in (1, 2, 4)),
            "ADDRA", "STC", "LDGK", "LDC", "ATOMG", "ATOML", "TEX", "SIZE", "UAV")
LANES = lanes()
OP = {name: i for i, name in enumerate((*ROUTINES, *LANES))}

UOP = np.dtype([("op", "<u2"), ("aux", "<u2"), ("d", "<i4"), ("a", "<i4"), ("b", "<i4"), ("c", "<i4"), ("imm", "<i4"), ("pc", "<u4"), ("x", "<u4")])
UNI = np.dtype([("off", "<i4"), ("kind", "<u4"), ("val", "<u4")])
IMM32, IMM16, CONST32, CONST16, CONST16F = range(5)
VECTORS = 8192              # bytes of the wave context before the first vector

Reg = tuple[str, int]       # ("r"|"h", register id); as a unit of definedness with merged registers, halves are ("m", id)

@dataclass(slots=True)
class Step:
  """One execution of an instruction (repeats are several): registers read and written. `copy`: an undefined source makes the result undefined."""
  reads: list[Reg]
  writes: list[Reg]
  copy: bool = False

@dataclass
class Code:
  """A translated program. Offsets are bytes from the wave context."""
  uops: np.ndarray
  unis: np.ndarray
  poison32: list[int]
  poison16: list[int]
  wave_bytes: int
  ids: list[int]                            # vectors the dispatch fills: local id, workgroup id, size, offset (3 each), linear local id; 0 = absent
  defs: tuple[int, int]                     # offset and number of definedness masks
  def_init: list[int]                       # masks of registers the dispatch fills
  blocks: int
  rows: tuple[np.ndarray, np.ndarray, np.ndarray]   # block, row index, executions per visit
  consts: list[tuple[int, int, int]]        # const component, pc of a reader, its block
  half_consts: bool
  checks: int                               # run-time definedness checks that remain
  own_consts: bool                          # the program writes constants

def steps_of(i: Instr) -> list[Step]:
  """Register traffic of an instruction, in execution order."""
  def regs(num: int, half: bool, n: int = 1) -> list[Reg]:
    return [("h" if half else "r", k) for k in range(num, num + n) if k < REG_A0]
  def of(o: Operand, k: int) -> list[Reg]: return regs(o.num + (k if o.r else 0), o.half) if o.kind == "gpr" else []
  form, out = i.row.form, []
  if form in ("cat2", "cat3", "cat3b", "cat4", "mov"):
    assert i.dst is not None
    for k in range(i.rpt + 1):
      writes = regs(i.dst.num + k, i.dst.half) if i.dst.kind == "gpr" else []
      plain = form == "mov" and i.row.name.startswith("mov.") and i.src[0].kind == "gpr" and len(writes) == 1
      out.append(Step([r for o in i.src for r in of(o, k)], writes, plain))
  elif form in ("swz", "gat", "sct"):
    assert i.dst is not None
    out = [Step(of(s, 0), regs(d.num, d.half), True) for s, d in zip(i.src, (i.dst, *i.dst2))]
  else:
    reads, written = traffic(i) if form != "movmsk" else ([], [(i.dst.num, False, i.rpt + 1)])  # type: ignore[union-attr]
    for num, half, n in (*reads, *written):
      if num + n > REG_A0: raise UnknownInstruction(i.pc, i.word, f"{i.name} with {reg_name(min(num + n - 1, 0xff), half)}")
    out.append(Step([r for group in reads for r in regs(*group)], [r for group in written for r in regs(*group)]))
  return out

def traffic(i: Instr) -> tuple[list[tuple[int, bool, int]], list[tuple[int, bool, int]]]:
  """Registers of a memory, texture or subgroup instruction, as (first, half, number): read, written."""
  form, n, reads, writes = i.row.form, i.count, [], []
  def r(k: int, count: int = 1) -> None:
    if i.src[k].kind == "gpr": reads.append((i.src[k].num, i.src[k].half, count))
  def w(count: int) -> None:
    assert i.dst is not None
    writes.append((i.dst.num, i.dst.half, count))
  if i.index is not None: reads.append((i.index.num, i.index.half, 2 if i.index.half else 1))
  if form in ("ldg", "ldl", "ldg.a"):
    r(0, 1 if form == "ldl" else 2)
    if form == "ldg.a": r(1)
    w(n)
  elif form in ("stg", "stl"):
    r(0, 2 if form == "stg" else 1)
    r(1, n)
  elif form == "stg.a":
    r(0, 2)
    r(1)
    r(2, n)
  elif form == "ldg.k": r(0, 2)
  elif form == "stc": r(0, n)
  elif form in ("ldc", "ldc.k"):
    r(0)
    if form == "ldc": w(n)
  elif form in ("tex", "getsize"):
    assert i.dst is not None
    r(0, 1 if form == "getsize" else i.dims)
    if len(i.src) > 1: r(1, (i.dims - ("a" in i.mods)) * ("o" in i.mods) + (i.name in ("isaml", "saml")))
    writes += [(i.dst.num + k, i.dst.half, 1) for k in range(4) if n >> k & 1]
  elif form in ("lanes1", "lanes2", "shfl"):
    assert i.dst is not None
    for k in range(len(i.src)): r(k)
    if i.name == "brcst.active": reads.append((i.dst.num, i.dst.half, 1))      # fibers of the lower half keep theirs
    w(1)
  elif form in ("atomic.l", "atomic.g"):
    r(0, 1 if form == "atomic.l" else 2)
    r(1, 1 + i.name.endswith("cmpxchg"))
    w(1)
  elif form == "atomic.b":
    reads += [(i.src[0].num + 1, False, 1 + i.name.endswith("cmpxchg"))]
    r(1, i.dims)
    writes.append((i.src[0].num, False, 1))
  elif form == "ldib":
    r(0, i.dims)
    w(n)
  elif form == "stib":
    r(0, n)
    r(1, i.dims)
  elif form == "resinfo": w(3)
  return reads, writes

def writes_consts(instrs: dict[int, Instr]) -> bool: return any(i.row.form in ("stc", "ldg.k", "ldc.k") for i in instrs.values())

def relative_files(instrs: dict[int, Instr], merged: bool) -> set[str]:
  """Register files a program indexes with a0.x."""
  return {"h" if o.half and not merged else "r" for i in instrs.values() for o in (*i.src, *((i.dst,) if i.dst else ())) if o.kind == "rgpr"}

class Translator:
  def __init__(self, instrs: dict[int, Instr], steps: dict[int, list[Step]], *, merged: bool, ids: tuple[int, ...], strict: bool, cov_round: int,
               full_regs: int = 0):
    self.instrs, self.merged, self.strict, self.cov_round = instrs, merged, strict, cov_round
    self.out: list[tuple] = []
    self.unis: dict[tuple[int, int], int] = {}
    self.consts: dict[int, tuple[int, int]] = {}
    self.half_consts = False
    self.top = VECTORS
    self.slots: dict[Reg, int] = {}
    self.temps: dict[str, list[int]] = {"r": [], "h": []}
    self.used = {"r": 0, "h": 0}
    self.block = -1
    wanted: list[Reg | None] = [("r", reg + k) if reg != REG_NONE else None for reg, n in zip(ids, (3, 3, 3, 3, 1)) for k in range(n)]
    self.fill = {r for r in wanted if r}
    self.steps = steps
    self.relative, self.own_consts = relative_files(instrs, merged), writes_consts(instrs)
    self.limit = {"r": full_regs * 4, "h": full_regs * 4}
    self._allocate()
    self._flow()
    self._prove()
    self._emit_all()
    self.ids = [self.slots[r] if r else 0 for r in wanted]

  # *** registers

  def _vector(self, file: str, n: int = 1) -> int:
    size = 256 if file == "r" else 128
    self.top = -(-self.top // 256) * 256 if file == "r" else self.top
    off, self.top = self.top, self.top + size * n
    return off

  def _allocate(self) -> None:
    holes = {(("h" if i.dst.half else "r"), i.dst.num + k) for i in self.instrs.values() if i.row.form in ("tex", "getsize") and i.dst is not None
             and not (i.dst.half and self.merged) for k in range(i.count.bit_length())}
    used = sorted({self._holder(r) for ss in self.steps.values() for s in ss for r in (*s.reads, *s.writes)} | self.fill | holes)
    for file in ("r", "h"):
      ids = [n for f, n in used if f == file]
      if file in self.relative:
        hi = max([n for n in ids if n < SHARED_FIRST] + [self.limit[file] - 1, 3]) + 1
        self.limit[file] = hi
        base = self._vector(file, hi)
        for n in range(hi): self.slots[file, n] = base + n * (256 if file == "r" else 128)
        ids = [n for n in ids if n >= hi]
      for n in ids: self.slots[file, n] = self._vector(file)
    self.a0, self.a1 = self._vector("h"), self._vector("h")

  def _holder(self, r: Reg) -> Reg: return ("r", r[1] // 2) if self.merged and r[0] == "h" else r

  def _units(self, r: Reg) -> list[Reg]:
    """What of a register can be defined by itself."""
    if not self.merged: return [r]
    return [("m", r[1])] if r[0] == "h" else [("m", 2 * r[1]), ("m", 2 * r[1] + 1)]

  def _temp(self, file: str) -> int:
    if self.used[file] == len(self.temps[file]): self.temps[file].append(self._vector(file))
    self.used[file] += 1
    return self.temps[file][self.used[file] - 1]

  # *** control flow graph

  def _flow(self) -> None:
    ins, lead = self.instrs, {0}
    pred_stop: dict[int, int] = {}
    self.second: set[int] = set()
    open_at: int | None = None
    for pc in sorted(ins):
      i = ins[pc]
      if i.row.form in ("branch", "target"):
        lead |= {i.target, pc + 1}
        if open_at is not None: raise UnknownInstruction(pc, i.word, f"{i.name} between predt and prede")
      elif i.name in ("end", "ret", "bar"): lead.add(pc + 1)
      elif i.name in ("predt", "predf", "prede"):
        if open_at is not None: pred_stop[open_at] = pc
        elif i.name == "prede": raise UnknownInstruction(pc, i.word, "prede without predt or predf")
        if open_at is not None and i.name != "prede":
          first = ins[open_at]   # the other side of the same condition, in either order; it sees the predicate as the first one did
          if open_at in self.second or (first.name, first.cond) == (i.name, i.cond) or first.cond != i.cond:
            raise UnknownInstruction(pc, i.word, f"{i.name} behind {first.name}")
          self.second.add(pc)
        lead |= {pc, pc + 1}
        open_at = None if i.name == "prede" else pc
    if open_at is not None: raise UnknownInstruction(open_at, ins[open_at].word, "predt or predf without prede")
    self.leaders = sorted(pc for pc in lead if pc in ins)
    self.pred_stop = pred_stop
    self.end_of: dict[int, int] = {}
    for start in self.leaders:
      pc = start
      while pc + 1 in ins and pc + 1 not in lead and ins[pc].name not in ("end", "jump"): pc += 1
      self.end_of[start] = pc
    self.succ: dict[int, list[int]] = {}
    for start in self.leaders:
      last = ins[self.end_of[start]]
      pc, nxt = last.pc, last.pc + 1
      if last.name in ("end", "ret"): to = []
      elif last.name == "jump": to = [last.target]
      elif last.name == "call": to = [last.target, nxt]
      elif last.row.form in ("branch", "target"): to = [last.target, nxt]
      elif pc in self.second: to = [pred_stop[pc]]
      elif last.name in ("predt", "predf"): to = [nxt, pred_stop[pc] + (pred_stop[pc] in self.second)]
      else: to = [nxt]
      self.succ[start] = [t for t in to if t in ins]

  # *** definedness

  def _prove(self) -> None:
    """Forward analysis: which registers are written on every path to a read. Leaves reads to be checked and writes to be noted at run time."""
    regs = sorted(self.slots)
    bit = {u: 1 << n for n, u in enumerate(sorted({u for r in regs for u in self._units(r)}))}
    bits = {r: sum(bit[u] for u in self._units(r)) for r in {*regs, *(r for ss in self.steps.values() for s in ss for r in (*s.reads, *s.writes))}}
    everything = (1 << len(bit)) - 1
    start = sum(bits[r] for r in self.fill)
    state = {b: everything for b in self.leaders}
    state[0] = start
    def copied(st: Step) -> list[tuple[Reg, Reg]]: return list(zip(self._units(st.writes[0]), self._units(st.reads[0])))
    def run(b: int, s: int) -> int:
      for pc in range(b, self.end_of[b] + 1):
        for st in self.steps[pc]:
          if st.copy: s = s & ~bits[st.writes[0]] | sum(bit[d] for d, src in copied(st) if s & bit[src])
          else:
            for r in st.writes: s |= bits[r]
      return s
    work = list(self.leaders)
    while work:
      b = work.pop()
      out = run(b, state[b])
      for t in self.succ[b]:
        if (new := state[t] & out) != state[t]:
          state[t] = new
          work.append(t)
    self.check: dict[tuple[int, int], list[tuple[Reg, Reg]]] = {}      # registers and what of them is not known to be written
    self.poison = {r for r in regs if r[0] in self.relative}
    copies: list[tuple[Reg, Reg]] = []
    tracked: set[Reg] = set()
    calls = any(i.name in ("call", "ret") for i in self.instrs.values())
    dynamic = self.strict and not self.relative and not calls
    for b in self.leaders:
      s = state[b]
      for pc in range(b, self.end_of[b] + 1):
        for k, st in enumerate(self.steps[pc]):
          unknown = [(r, u) for r in st.reads for u in self._units(r) if not s & bit[u]]
          self.poison.update(self._holder(r) for r, _ in unknown)
          if st.copy:
            copies += [(d, src) for d, src in copied(st) if not s & bit[src]]
            s = s & ~bits[st.writes[0]] | sum(bit[d] for d, src in copied(st) if s & bit[src])
          else:
            if unknown and dynamic: self.check[pc, k] = unknown
            tracked.update(u for _, u in unknown)
            for r in st.writes: s |= bits[r]
    if calls: self.poison.update(regs)
    grew = True
    while grew:
      grew = False
      for d, src in copies:
        if d in tracked and src not in tracked: tracked, grew = tracked | {src}, True
    self.tracked = {r: n for n, r in enumerate(sorted(tracked))} if dynamic else {}
    self.top = -(-self.top // 256) * 256
    self.def_base = self.top
    self.top += 8 * len(self.tracked)
    self.poison -= self.fill

  def _mask(self, r: Reg) -> int: return self.def_base + 8 * self.tracked[r]

  # *** emission

  def emit(self, op: str, pc: int, *, d: int = 0, a: int = 0, b: int = 0, c: int = 0, imm: int = 0, aux: int = 0) -> None:
    self.out.append((OP[op], aux, d, a, b, c, imm, pc, len(self.out)))

  def _relative(self, file: str) -> dict[str, int]:
    """Vector of register 0, number of registers."""
    whole = self.merged and file == "h"
    return {"a": self.slots["r" if whole else file, 0], "c": self.limit["r"] * 2 if whole else self.limit[file]}

  def uniform(self, kind: int, val: int, pc: int) -> int:
    if kind >= CONST16: self.half_consts = True
    if kind >= CONST32:
      if self.own_consts:
        self.emit("CONST", pc, d=(off := self._temp("r" if kind == CONST32 else "h")), imm=val, aux=kind - CONST32)
        return off
      self.consts.setdefault(val, (pc, self.block))
    if (kind, val) not in self.unis: self.unis[kind, val] = self._vector("r" if kind in (IMM32, CONST32) else "h")
    return self.unis[kind, val]

  def source(self, o: Operand, cls: str, k: int, pc: int) -> int:
    """Offset of the vector of a source operand; `cls` f/u/s is the class the instruction reads it as."""
    file, num = "h" if o.half else "r", o.num + (k if o.r else 0)
    if o.kind == "gpr":
      if o.is_pred:
        self.emit(f"PGET{16 if o.half else 32}", pc, d=(off := self._temp(file)), aux=num - REG_P0)
      elif num == REG_A0:
        if not o.half: raise UnknownInstruction(pc, self.instrs[pc].word, "a0.x as a full register source")
        off = self.a0
      elif num >= REG_A0: raise UnknownInstruction(pc, self.instrs[pc].word, f"source {reg_name(num, o.half)}")
      elif o.half and self.merged:
        self.emit(f"halves.{('lo', 'hi')[num & 1]}", pc, d=(off := self._temp("h")), a=self.slots["r", num // 2])
      else: off = self.slots[file, num]
    elif o.kind == "const": off = self.uniform(CONST32 if not o.half else CONST16F if cls == "f" else CONST16, num, pc)
    elif o.kind == "imm": off = self.uniform(IMM16, o.num & 0xffff, pc) if o.half else self.uniform(IMM32, o.num & 0xffffffff, pc)
    elif o.kind == "flut":
      if o.half: off = self.uniform(IMM16, int(np.float16(FLOAT_TABLE[o.num]).view(np.uint16)), pc)
      else: off = self.uniform(IMM32, struct.unpack("<I", struct.pack("<f", FLOAT_TABLE[o.num]))[0], pc)
    elif o.kind == "rgpr":
      op = f"RELG{32 if not o.half else 'M' if self.merged else 16}"
      self.emit(op, pc, d=(off := self._temp(file)), b=self.a0, imm=num, **self._relative(file))
    else:
      if o.half: self.half_consts = True
      self.emit("RELC", pc, d=(off := self._temp(file)), b=self.a0, imm=num, aux=0 if not o.half else 2 if cls == "f" else 1)
    if o.neg or o.abs:
      mod = "nabs" if o.neg and o.abs else "neg" if o.neg else "abs"
      w = 16 if o.half else 32
      name = f"{mod}.f{w}" if cls == "f" else f"{mod}.u{w}" if cls != "b" else f"not.u{w}"
      self.emit(name, pc, d=(new := self._temp(file)), a=off)
      off = new
    return off

  def store(self, o: Operand, k: int, res: str, pc: int, op: str, sat: bool = False, **kw: int) -> None:
    """Emits `op` so that its result (type `res`) lands in operand o, whatever the width and kind of o."""
    file = "h" if is_half(res) else "r"
    num, want = o.num + k, "h" if o.half or o.is_a0 or o.is_a1 else "r"
    special = self.a0 if o.is_a0 else self.a1 if o.is_a1 else 0
    simple = o.kind == "gpr" and want == file and not o.is_pred and num < REG_A0 and not (want == "h" and self.merged)
    target = self.slots[file, num] if simple else special if special and file == "h" else self._temp(file)
    self.emit(op, pc, d=target, **kw)
    if sat: self.emit(f"sat.{res}", pc, d=target, a=target)
    if simple:
      if file == "r" and SHARED_FIRST <= num <= SHARED_LAST: self.emit("BCAST32", pc, d=target, a=target)
      return
    if o.is_pred:
      self.emit("PSET16" if file == "h" else "PSET32", pc, a=target, aux=num - REG_P0)
      return
    if want != file:
      wide = {"f16": "f32", "u16": "u32", "s16": "s32", "f32": "f16", "u32": "u16", "s32": "s16"}[res]
      lane = cov_lane(res, wide, self.cov_round)
      assert lane is not None
      plain = o.kind == "gpr" and num < REG_A0 and not special and not (want == "h" and self.merged)
      new = special or (self.slots[want, num] if plain else self._temp(want))
      self.emit(lane.key, pc, d=new, a=target)
      target = new
      if plain or special: return
    if special: return
    if o.kind == "rgpr":
      base = self._relative(want)
      self.emit(f"RELD{32 if want == 'r' else 'M' if self.merged else 16}", pc, d=base["a"], a=target, b=self.a0, c=base["c"], imm=num)
    elif num >= REG_A0: raise UnknownInstruction(pc, self.instrs[pc].word, f"destination {reg_name(num, o.half)}")
    else:  # merged half
      full = self.slots["r", num // 2]
      self.emit(f"merge.{('lo', 'hi')[num & 1]}", pc, d=full, a=full, b=target)

  def _emit_all(self) -> None:
    start: dict[int, int] = {}
    rows: list[tuple[int, int, int]] = []
    for n, b in enumerate(self.leaders):
      self.block = n
      start[b] = len(self.out)
      counts: dict[int, int] = {}
      for pc in range(b, self.end_of[b] + 1):
        i = self.instrs[pc]
        counts[INDEX[i.name]] = counts.get(INDEX[i.name], 0) + (1 if i.row.form in ("none", "swz", "gat", "sct", "movmsk") else i.rpt + 1)
      rows += [(n, r, c) for r, c in counts.items()]
      self.emit("BB", b, d=n, imm=sum(counts.values()))
      for pc in range(b, self.end_of[b] + 1): self._emit(self.instrs[pc])
      last = self.instrs[self.end_of[b]]
      if last.name not in ("end", "jump", "ret") and not (n + 1 < len(self.leaders) and self.leaders[n + 1] == last.pc + 1):
        self.emit("FETCH", last.pc + 1)
    beyond = len(self.out)
    self.emit("FETCH", max(self.instrs) + 1)
    code = np.array(self.out, dtype=UOP) if self.out else np.zeros(0, UOP)
    for op in ("JUMP", "BR", "GETONE", "GETLAST", "CALL", "PREDT", "PREDF"):
      for k in np.flatnonzero(code["op"] == OP[op]): code["d"][k] = start.get(int(code["d"][k]), beyond)
    self.code, self.rows = code, rows

  def _emit(self, i: Instr) -> None:
    pc, form, name = i.pc, i.row.form, i.name
    self.used = {"r": 0, "h": 0}
    if form in ("cat2", "cat3", "cat3b", "cat4"): self._alu(i)
    elif form == "mov": self._mov(i)
    elif form in ("swz", "gat", "sct"): self._swz(i)
    elif form == "branch":
      (c1, inv1), (c2, inv2) = (i.cond[0], i.cond[-1]) if i.cond else ((0, False), (0, False))
      kind = {"br": 0, "brao": 1, "braa": 2, "brac": 3, "bany": 4, "ball": 5}[name]
      self.emit("BR", pc, d=self._to(i), c=i.slot, aux=c1 | inv1 << 2 | c2 << 3 | inv2 << 5 | kind << 8)
    elif name == "jump": self.emit("JUMP", pc, d=self._to(i))
    elif name == "call": self.emit("CALL", pc, d=self._to(i))
    elif name == "ret": self.emit("RET", pc)
    elif name in ("getone", "getlast"): self.emit(name.upper(), pc, d=self._to(i))
    elif name == "shps": pass                   # every wave runs the preamble
    elif name == "end": self.emit("END", pc)
    elif name in ("predt", "predf"):
      if pc in self.second: self.emit("PREDF", pc, d=self.pred_stop[pc])
      else:
        c, inv = i.cond[0]
        self.emit("PREDT", pc, d=self.pred_stop[pc], aux=c | (inv ^ (name == "predf")) << 2)
    elif name == "prede": self.emit("PREDE", pc)
    elif name == "bar": self.emit("BAR", pc)
    elif form == "none" or form == "sync": pass
    else:
      self._checks(pc, 0)
      self._memory(i)
      self._notes(pc, 0)

  def _to(self, i: Instr) -> int: return i.target if i.target in self.instrs else -1   # beyond the program: the fetch fails there

  def _checks(self, pc: int, k: int) -> None:
    for r, unit in self.check.get((pc, k), ()): self.emit("CHECK", pc, a=self._mask(unit), imm=r[1], aux=int(r[0] == "h"))

  def _notes(self, pc: int, k: int) -> None:
    st = self.steps[pc][k]
    sources = self._units(st.reads[0]) if st.copy else []
    for n, unit in enumerate(u for r in st.writes for u in self._units(r)):
      if unit not in self.tracked: continue
      if st.copy and sources[n] in self.tracked: self.emit("DEFCOPY", pc, d=self._mask(unit), a=self._mask(sources[n]))
      else: self.emit("DEFINE", pc, d=self._mask(unit))

  def _alu(self, i: Instr) -> None:
    clamp = i.sat and i.row.sat == "clamp"
    if i.sat and not i.row.sat: raise UnknownInstruction(i.pc, i.word, f"(sat){i.name}")
    lane = i.row.lane(i.width, i.sat)
    assert i.dst is not None
    for k in range(i.rpt + 1):
      self.used = {"r": 0, "h": 0}
      self._checks(i.pc, k)
      bitwise = i.name.endswith(".b") and i.name != "clz.b"
      offs = [self.source(o, "b" if bitwise else t[0], k, i.pc) for o, t in zip(i.src, lane.src)]
      self.store(i.dst, k, lane.dst, i.pc, lane.key, clamp, **dict(zip("abc", offs)))
      self._notes(i.pc, k)

  def _mov(self, i: Instr) -> None:
    st, dt = i.types
    lane = cov_lane(st, dt, i.round or self.cov_round)
    if lane is None: raise UnknownInstruction(i.pc, i.word, i.name)
    if st[0] == "f" and dt[0] != "f": lane = cov_lane(st, dt, i.round)
    assert i.dst is not None and lane is not None
    src = dataclasses.replace(i.src[0], half=True) if is_half(st) else i.src[0]  # an 8-bit immediate is printed as full and read as half
    res = {"u8": "u16", "s8": "u16"}.get(lane.dst, lane.dst)
    for k in range(i.rpt + 1):
      self.used = {"r": 0, "h": 0}
      self._checks(i.pc, k)
      self.store(i.dst, k, res, i.pc, lane.key, a=self.source(src, st[0], k, i.pc))
      self._notes(i.pc, k)

  def _swz(self, i: Instr) -> None:
    dsts = (i.dst, *i.dst2)
    t = "u16" if is_half(i.types[0]) else "u32"
    file = "h" if t == "u16" else "r"
    held = []
    for s in i.src:
      self.emit(f"mov.{t}", i.pc, d=(tmp := self._temp(file)), a=self.source(s, "u", 0, i.pc))
      held.append(tmp)
    for k, (d, tmp) in enumerate(zip(dsts, held)):
      assert d is not None
      self._checks(i.pc, k)
      self.store(d, 0, t, i.pc, f"mov.{t}", a=tmp)
      self._notes(i.pc, k)

  def _run(self, num: int, half: bool, n: int, pc: int) -> int:
    """Offset of n consecutive registers; merged halves are gathered into temporaries."""
    if not (half and self.merged): return self.slots["h" if half else "r", num]
    return self._merged_run(n)

  def _merged_run(self, n: int) -> int:
    while len(self.temps["h"]) < 64 and not self._four(): self.temps["h"].append(self._vector("h"))
    return self._four()

  def _four(self) -> int:
    """Four adjacent half temporaries, 0 if there are none yet."""
    t = self.temps["h"]
    return next((t[k] for k in range(len(t) - 3) if all(t[k + j] == t[k] + 128 * j for j in range(4))), 0)

  def _gather(self, num: int, half: bool, n: int, pc: int) -> int:
    """Offset of n consecutive registers for reading."""
    off = self._run(num, half, n, pc)
    if half and self.merged:
      for k in range(n): self.emit(f"halves.{('lo', 'hi')[num + k & 1]}", pc, d=off + 128 * k, a=self.slots["r", (num + k) // 2])
    return off

  def _scatter(self, num: int, half: bool, mask: int, off: int, pc: int) -> None:
    """After an instruction wrote the registers of `mask` from `num` on to `off`."""
    for k in range(4):
      if mask >> k & 1 and half and self.merged:
        full = self.slots["r", (num + k) // 2]
        self.emit(f"merge.{('lo', 'hi')[num + k & 1]}", pc, d=full, a=full, b=off + 128 * k)
      elif mask >> k & 1 and not half and SHARED_FIRST <= num + k <= SHARED_LAST: self.emit("BCAST32", pc, d=off + 256 * k, a=off + 256 * k)

  def _memory(self, i: Instr) -> None:
    pc, form, n = i.pc, i.row.form, i.count
    reg = lambda num: self.slots["r", num]
    cls = {"f": 0, "u": 1, "s": 2}[i.types[0][0]] if i.types else 0
    load, at = i.dst, 0
    mask = n if form in ("tex", "getsize") else 7 if form == "resinfo" else 1 if form[:6] == "atomic" or form in ("lanes1", "lanes2",
        "shfl") else (1 << n) - 1
    if load is not None: at = self._run(load.num, load.half, mask.bit_length(), pc)
    slot = i.slot if i.index is None else self._gather(i.index.num, True, 2, pc) if i.index.half else reg(i.index.num)
    if form == "movmsk":
      assert load is not None
      self.emit("MOVMSK", pc, d=reg(load.num), aux=i.rpt + 1)
      return
    if form in ("tex", "getsize"):
      assert load is not None
      second = reg(i.src[1].num) if len(i.src) > 1 else 0
      if form == "getsize": self.emit("SIZE", pc, d=at, a=reg(i.src[0].num), c=slot, aux=n | (i.index is not None) << 5)
      else:
        aux = n | load.half << 4 | cls << 5 | i.dims << 7 | ("a" in i.mods) << 9 | ("o" in i.mods) << 10 | (i.name in ("isaml", "saml")) << 11
        self.emit("TEX", pc, d=at, a=reg(i.src[0].num), b=second, c=slot, imm=i.sampler,
                  aux=aux | (i.index is not None) << 12 | (i.name[0] == "s") << 13)
    elif form == "resinfo": self.emit("SIZE", pc, d=at, c=slot, aux=7 | 1 << 4 | (i.index is not None) << 5)
    elif form in ("ldib", "stib", "atomic.b"):
      data, coord = (load, i.src[0]) if form == "ldib" else (i.src[0], i.src[1])
      assert data is not None
      if form == "stib": at = self._gather(data.num, data.half, n, pc)
      elif form == "atomic.b": at = reg(data.num)
      what = 0 if form == "ldib" else 1 if form == "stib" else i.row.key[2] | (i.types[0] == "s32") << 8
      aux = n | data.half << 3 | cls << 4 | i.dims << 6 | ("t" in i.mods) << 8 | (i.index is not None) << 9
      self.emit("UAV", pc, d=at, a=reg(coord.num), c=slot, imm=what, aux=aux)
    elif form in ("atomic.l", "atomic.g"):
      aux = i.row.key[1] | (i.types[0] == "s32") << 8
      a, b = reg(i.src[0].num), reg(i.src[1].num)
      if form == "atomic.l": self.emit("ATOML", pc, d=at, a=a, b=b, aux=aux)
      else: self.emit("ATOMG", pc, d=at, a=a, b=b, c=reg(i.src[0].num + 1), aux=aux)
    elif form in ("ldc", "ldc.k"):
      off, ind = i.src[0], i.index is not None
      where = {"a": reg(off.num)} if off.kind == "gpr" else {"imm": off.num}
      if form == "ldc": self.emit("LDC", pc, d=at, c=slot, aux=n | i.offset << 4 | ind << 8, **where)
      else: self.emit("LDC", pc, d=n, b=self.a1, c=slot, aux=ind << 8 | 1 << 9, **where)
    elif form == "stc": self.emit("STC", pc, a=reg(i.src[0].num), b=self.a1 if "a" in i.mods else 0, imm=i.slot, aux=n)
    elif form == "ldg.k":
      self.emit("LDGK", pc, d=i.offset, a=reg(i.src[0].num), b=self.a1 if "a" in i.mods else 0, c=reg(i.src[0].num + 1), imm=i.slot, aux=n)
    elif form in ("lanes1", "lanes2", "shfl"):
      assert load is not None
      size, a = 16 if load.half else 32, self._gather(i.src[0].num, load.half, 1, pc)
      if form == "shfl":
        index = i.src[1]
        self.emit(f"SHFL{size}", pc, d=at, a=a, b=reg(index.num) if index.kind == "gpr" else 0, imm=index.num if index.kind == "imm" else 0,
                  aux={"xor": 1, "up": 2, "down": 3, "rup": 6, "rdown": 7}[i.mods])
      elif i.name == "brcst.active":
        if load.half and self.merged: raise UnknownInstruction(pc, i.word, "brcst.active of a half register with merged registers")
        self.emit(f"BRCST{size}", pc, d=at, a=a, aux=1 << i.shift)
      else:
        if form == "lanes2" and load.half and self.merged: raise UnknownInstruction(pc, i.word, "quad_shuffle.brcst of merged half registers")
        b = self.slots["h" if load.half else "r", i.src[1].num] if form == "lanes2" else 0
        self.emit(f"QUAD{size}", pc, d=at, a=a, b=b, aux=("brcst", "horiz", "vert", "diag").index(i.name[13:]))
    else:
      if load is None: at = self._gather(i.src[-1].num, i.src[-1].half, n, pc)
      lo, wide = i.src[0].num, form[:3] in ("ldg", "stg")
      a, b = reg(lo), reg(lo + 1) if wide else 0
      if form[-2:] == ".a":
        size = type_size(i.types[0]).bit_length() - 1
        a, b = self._temp("r"), self._temp("r")
        self.emit("ADDRA", pc, d=a, b=b, a=reg(lo), c=reg(i.src[1].num), aux=i.shift | i.offset << 4 | size << 8)
      self.emit(f"{i.name[:3].upper()}{type_size(i.types[0])}", pc, d=at, a=a, b=b, imm=0 if form[-2:] == ".a" else i.offset, aux=n)
    if load is not None: self._scatter(load.num, load.half, mask, at, pc)

  def result(self) -> Code:
    rows = np.array(self.rows, np.int64).reshape(-1, 3)
    unis = np.array([(off, kind, val) for (kind, val), off in self.unis.items()], UNI)
    return Code(self.code, unis, [self.slots[r] for r in sorted(self.poison) if r[0] == "r"],
                [self.slots[r] for r in sorted(self.poison) if r[0] == "h"],
                -(-self.top // 4096) * 4096, self.ids, (self.def_base, len(self.tracked)),
                [self._mask(u) for r in self.fill for u in self._units(r) if u in self.tracked], len(self.leaders),
                (rows[:, 0], rows[:, 1], rows[:, 2]),
                [(c, pc, b) for c, (pc, b) in self.consts.items()], self.half_consts, len(self.check),
                self.own_consts)

def reachable(instrs: dict[int, Instr]) -> set[int]:
  """Instructions control flow can get to from instruction 0."""
  seen, work = set(), [0]
  while work:
    pc = work.pop()
    while pc in instrs and pc not in seen:
      seen.add(pc)
      i = instrs[pc]
      if i.row.form in ("branch", "target"): work.append(i.target)
      if i.name in ("end", "jump", "ret"): break
      pc += 1
  return seen

