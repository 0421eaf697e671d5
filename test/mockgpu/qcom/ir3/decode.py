"""IR3 machine code -> decoded instructions, by the rows of isa.py. Field positions: Mesa src/freedreno/isa/ir3*.xml."""
from __future__ import annotations
import re, struct
from dataclasses import dataclass
from test.mockgpu.qcom.ir3.isa import BY_KEY, FLOAT_NAMES, FLOAT_TABLE, REG_A0, REG_A1, REG_P0, REG_NONE, TYPES, Row, UnknownInstruction, is_half

@dataclass(slots=True)
class Operand:
  """kind: gpr, const (num = 4*vec4 + component), imm (num = value), flut (num = float table index), rgpr/rconst (a0.x + num)."""
  kind: str
  num: int
  half: bool = False
  neg: bool = False
  abs: bool = False
  r: bool = False           # advances with (rptN)
  last: bool = False        # last read of the register, a scheduling hint

  @property
  def is_pred(self) -> bool: return self.kind == "gpr" and REG_P0 <= self.num < REG_P0 + 4
  @property
  def is_a0(self) -> bool: return self.kind == "gpr" and self.num == REG_A0

  def __str__(self) -> str:
    mod = ("(absneg)" if self.neg and self.abs else "(neg)" if self.neg else "(abs)" if self.abs else "") + ("(r)" if self.r else "")
    mod = ("(last)" if self.last else "") + mod
    h = "h" if self.half else ""
    if self.kind == "gpr": return mod + reg_name(self.num, self.half)
    if self.kind == "const": return f"{mod}{h}c{self.num >> 2}.{'xyzw'[self.num & 3]}"
    if self.kind == "imm":
      return mod + (f"h({self.num})" if self.half else str(self.num))
    if self.kind == "flut": return f"{mod}{h}({FLOAT_NAMES[self.num]})"
    return f"{mod}{h}{'r' if self.kind == 'rgpr' else 'c'}<a0.x{f' + {self.num}' if self.num else ''}>"

def reg_name(num: int, half: bool = False) -> str:
  if num >> 2 == REG_A0 >> 2: return f"a{num & 3}.x"
  if num >> 2 == REG_P0 >> 2: return f"p0.{'xyzw'[num & 3]}"
  return f"{'h' if half else ''}r{num >> 2}.{'xyzw'[num & 3]}"

@dataclass(slots=True)
class Instr:
  """One instruction. `pc` counts instructions from the start of the program. Fields a form does not have keep their defaults."""
  pc: int
  word: int
  row: Row
  dst: Operand | None = None
  src: tuple[Operand, ...] = ()
  dst2: tuple[Operand, ...] = ()   # further destinations of swz/sct
  rpt: int = 0
  nop: int = 0
  sy: bool = False
  ss: bool = False
  jp: bool = False
  ul: bool = False
  ei: bool = False
  sat: bool = False
  width: int = 32           # operand width of ALU instructions
  target: int = 0           # branch target, an instruction index
  cond: tuple[tuple[int, bool], ...] = ()   # predicate component, inverted
  types: tuple[str, ...] = ()               # cat1: source, destination; memory: data
  round: int = 0
  offset: int = 0           # memory: bytes
  count: int = 0            # memory: components; isam: write mask
  slot: int = 0             # texture or UAV
  sampler: int = 0
  scope: str = ""           # cat7: flags g, l, r, w

  @property
  def name(self) -> str: return self.row.name

  def __str__(self) -> str:
    head = "".join(f"({f})" for f, on in (("sy", self.sy), ("ss", self.ss), ("jp", self.jp), ("sat", self.sat), (f"rpt{self.rpt}", self.rpt),
                                           (f"nop{self.nop}", self.nop)) if on) + (" " if self.nop else "")
    flags = head + ("(ul)" if self.ul else "")
    form, ops = self.row.form, ", ".join(str(o) for o in ((self.dst,) if self.dst else ()) + self.dst2 + self.src)
    name, ops = self.name, ("(ei)" if self.ei else "") + ops
    if form == "cat3b": ops = re.sub(r"h\((\d+)\)", r"\1", ops)
    if form == "branch": ops = "".join(f"{'!' if inv else ''}p0.{'xyzw'[c]}, " for c, inv in self.cond) + f"#{self.target - self.pc}"
    elif form == "target": ops = f"#{self.target - self.pc}"
    elif form in ("none", "pred"): ops = ""
    elif form == "mov":
      src, n = str(self.src[0]), self.src[0].num
      if self.src[0].kind == "imm" and self.types[0] in ("f32", "f16"):
        f = struct.unpack("<e", struct.pack("<H", n & 0xffff)) if self.types[0] == "f16" else struct.unpack("<f", struct.pack("<I", n))
        src = f"{'h' if self.types[0] == 'f16' else ''}({f[0]:f})"
      elif self.src[0].kind == "imm": src = hex(n) if n > 0x1000 and self.types[0] == "u32" else str(n - (n >> 31 << 32) if self.types[0] == "s32"
          else (n & 0xffff) - (n >> 15 & 1) * 65536 if self.types[0] == "s16" else n)
      ops = f"{('', '(even)', '(pos_infinity)', '(neg_infinity)')[self.round]}{self.dst}, {src}"
      if self.dst is not None and self.dst.is_a0: name = "mova"
    elif form == "gat": ops = ", ".join(map(str, (self.dst, *self.src)))
    elif form == "sct": ops = ", ".join(map(str, (self.dst, *self.dst2, self.src[0])))
    elif form == "movmsk": flags, name = flags.replace(f"(rpt{self.rpt})", ""), f"movmsk.w{32 * (self.rpt + 1)}"
    elif form in ("ldg", "ldl"):
      ops = f"{self.dst}, {name[2]}[{self.src[0]}{f'{self.offset:+d}' if self.offset else ''}], {self.count}"
    elif form in ("stg", "stl"):
      ops = f"{name[2]}[{self.src[0]}{f'{self.offset:+d}' if self.offset else ''}], {self.src[1]}, {self.count}"
    elif form == "isam":
      name += "" if self.word >> 18 & 1 else ".1d"   # as Mesa prints it, whatever the texture is
      mask = "".join("xyzw"[i] for i in range(4) if self.count >> i & 1)
      ops = f"({self.types[0]})({mask}){self.dst}, {self.src[0]}, s#{self.sampler}, t#{self.slot}"
    elif form == "stib": name, ops = f"stib.b.typed.2d.{self.types[0]}.{self.count}.imm", f"{self.src[0]}, {self.src[1]}, {self.slot}"
    elif form == "sync": name, ops = name + "".join(f".{c}" for c in self.scope), ""
    return f"{flags}{name}{' ' if ops else ''}{ops}"

def _bits(w: int, lo: int, hi: int) -> int: return (w >> lo) & ((1 << (hi - lo + 1)) - 1)
def _sext(v: int, bits: int) -> int: return v - (1 << bits) if v >> (bits - 1) & 1 else v

class _Bad(Exception): pass

def _zero(v: int, *ranges: int) -> None:
  """Refuses set bits in the inclusive ranges lo, hi, lo, hi, ..."""
  for lo, hi in zip(ranges[::2], ranges[1::2]):
    if _bits(v, lo, hi): raise _Bad(f"reserved bits {hi}:{lo} = {_bits(v, lo, hi):#x}")

def _multisrc(v: int, half: bool) -> Operand:
  """16-bit operand of cat2 and cat4."""
  kind, neg, ab = v >> 11 & 7, bool(v >> 14 & 1), bool(v >> 15 & 1)
  if kind == 0:
    _zero(v, 8, 9)
    return Operand("gpr", v & 0xff, half, neg, ab, last=bool(v >> 10 & 1))
  if kind == 1: return Operand("rconst" if v >> 10 & 1 else "rgpr", _sext(v & 0x3ff, 10), half, neg, ab)
  if kind & 3 == 2: return Operand("const", v & 0x7ff, half, neg, ab)
  if kind == 4: return Operand("imm", _sext(v & 0x7ff, 11), half, neg, ab)
  if kind == 5:
    if (v & 0x3ff) >= len(FLOAT_TABLE): raise _Bad(f"float table index {v & 0x3ff}")
    if bool(v >> 10 & 1) != half: raise _Bad("float immediate of the other width")
    return Operand("flut", v & 0x3ff, half, neg, ab)
  raise _Bad(f"source kind {kind}")

def _cat3src(v: int, half: bool, second: bool) -> Operand:
  """13-bit operand of cat3."""
  if v >> 12 & 1: return Operand("imm", v & 0xfff, half) if second else Operand("const", v & 0x7ff, half) if not v >> 11 & 1 else _bad("source")
  if v >> 11 & 1: return Operand("rconst" if v >> 10 & 1 else "rgpr", _sext(v & 0x3ff, 10), half)
  _zero(v, 8, 9)
  return Operand("gpr", v & 0xff, half, last=bool(v >> 10 & 1))

def _bad(what: str) -> Operand: raise _Bad(what)

def _dst(num: int, half: bool) -> Operand: return Operand("gpr", num, half and num < REG_A0)

def _row(key: tuple, what: str) -> Row:
  if (r := BY_KEY.get(key)) is None: raise _Bad(what)
  return r

def decode_one(w: int, pc: int = 0) -> Instr:
  """Decodes one 64-bit word. Raises UnknownInstruction for anything without a row."""
  try: return _decode(w, pc)
  except _Bad as e: raise UnknownInstruction(pc, w, str(e)) from None

def _decode(w: int, pc: int) -> Instr:
  cat = w >> 61
  b = lambda n: bool(w >> n & 1)
  i = Instr(pc, w, None, sy=b(60), jp=b(59))  # type: ignore[arg-type]
  if cat < 5 or cat == 7: i.ss = b(44)
  if 0 < cat < 5: i.ul, i.rpt = b(45), _bits(w, 40, 41)

  if cat == 0:
    hi, opc = _bits(w, 49, 49), _bits(w, 55, 58)
    i.rpt = _bits(w, 40, 42)
    btype = _bits(w, 37, 39)
    i.row = _row((0, hi, opc, btype) if (hi, opc) == (0, 1) else (0, hi, opc), f"cat0 opcode {hi << 4 | opc}"
                 + (f" branch type {btype}" if opc == 1 else ""))
    _zero(w, 43, 43, *((40, 42) if i.name != "nop" else ()), *((0, 39) if i.row.form in ("none", "pred") else (32, 36)),
          *((45, 48, 50, 54) if i.row.form in ("none", "target") else (45, 48, 50, 51) if i.row.form == "pred" else (48, 51)))
    c1, c2 = (_bits(w, 53, 54), b(52)), (_bits(w, 46, 47), b(45))
    if i.row.form in ("branch", "target"): i.target = pc + _sext(w & 0xffffffff, 32)
    if i.row.form in ("branch", "pred"): i.cond = (c1, c2) if i.name in ("brao", "braa") else (c1,)

  elif cat == 1:
    opc, st, dt = _bits(w, 57, 58), _bits(w, 50, 52), _bits(w, 46, 48)
    if opc == 3:
      _zero(w, 0, 31, 42, 43, 49, 49, 53, 56)
      if (st, dt) != (3, 3): raise _Bad("movmsk of other types than u32")
      i.row, i.dst, i.types = _row((1, 3), "movmsk"), _dst(w >> 32 & 0xff, False), ("u32", "u32")
      return i
    if opc == 2:
      mode = i.rpt
      _zero(w, 42, 43, 49, 49, 53, 56)
      if st != dt: raise _Bad("swz/gat/sct that converts")
      i.row, i.rpt = _row((1, 2, st, dt, mode), f"cat1 swz mode {mode}"), 0
      i.types, half = (TYPES[st], TYPES[dt]), is_half(TYPES[st])
      a, s = [w >> 8 * k & 0xff for k in range(4)], lambda n: Operand("gpr", n, half)
      d0 = w >> 32 & 0xff
      i.dst = _dst(d0, half)
      if mode == 0: i.src, i.dst2 = (s(a[0]), s(a[1])), (_dst(a[2], half),)
      elif mode == 1: i.src, i.dst2 = tuple(s(n) for n in a), tuple(_dst(d0 + k, half) for k in range(1, 4))
      else: i.src, i.dst2 = tuple(s(a[0] + k) for k in range(4)), tuple(_dst(n, half) for n in a[1:])
      return i
    if opc != 0: raise _Bad(f"cat1 opcode {opc}")
    i.row = _row((1, 0, st, dt), f"cov.{TYPES[st]}{TYPES[dt]}")
    i.types, i.round = (TYPES[st], TYPES[dt]), _bits(w, 55, 56)
    half, kind = is_half(TYPES[st]), _bits(w, 53, 54)
    _zero(w, 42, 42)
    if kind == 1: _zero(w, 11, 31)
    if kind == 0: _zero(w, 12, 31, *((8, 10) if not b(11) else ()))
    if kind == 2: src = Operand("imm", w & 0xffffffff, half and TYPES[st][1:] != "8")
    elif kind == 1: src = Operand("const", w & 0x7ff, half)
    elif kind == 0 and b(11): src = Operand("rconst" if b(10) else "rgpr", _sext(w & 0x3ff, 10), half)
    elif kind == 0: src = Operand("gpr", w & 0xff, half)
    else: raise _Bad("cat1 source kind 3")
    src.r, i.src = b(43), (src,)
    i.dst = Operand("rgpr", _sext(w >> 32 & 0xff, 8), is_half(TYPES[dt])) if b(49) else _dst(w >> 32 & 0xff, is_half(TYPES[dt]))

  elif cat in (2, 4):
    opc, full = _bits(w, 53, 58), b(52)
    cmp_op = cat == 2 and opc in (5, 7, 20, 21, 33, 34)
    i.row = _row((cat, opc, _bits(w, 48, 50) if cmp_op else 0) if cat == 2 else (4, opc), f"cat{cat} opcode {opc}")
    i.width = 32 if full else 16
    if i.row.width and i.row.width != i.width: raise _Bad(f"{i.name} at {i.width} bits")
    i.sat, i.ei = b(42), cat == 2 and b(47)
    i.dst = _dst(w >> 32 & 0xff, full == b(46))
    n = len(i.row.sem.split(":")[1].split(","))
    i.src = (_multisrc(w & 0xffff, not full),) + ((_multisrc(w >> 16 & 0xffff, not full),) if n == 2 else ())
    rr = (b(43), b(51))
    if i.rpt or cat == 4: i.src = _advance(i.src, rr)
    else: i.nop = rr[0] + 2 * rr[1]

  elif cat == 3:
    opc, second = _bits(w, 55, 58), b(13)
    i.row = _row((3, int(second), opc), f"cat3 opcode {opc}" + (" (second table)" if second else ""))
    full = b(42) if second else i.row.width == 32
    i.width = 32 if full else 16
    i.sat = not second and b(42)
    i.dst = _dst(w >> 32 & 0xff, full == b(46))
    s1, s3 = _cat3src(w & 0x1fff, not full, second), _cat3src(w >> 16 & 0x1fff, not full, second)
    s2 = Operand("gpr", _bits(w, 47, 54), not full)
    s1.neg, s2.neg, s3.neg = b(14), b(30), b(31)
    i.src = (s1, s2, s3)
    rr = (b(43), b(15), b(29))
    if i.rpt: i.src = _advance(i.src, rr)
    else: i.nop = rr[0] + 2 * rr[1]
    if not i.nop and not i.rpt: s3.r = rr[2]

  elif cat == 5:
    opc = _bits(w, 54, 58)
    i.row = _row((5, opc), f"cat5 opcode {opc}")
    for bit, what in ((48, "3d"), (49, "array"), (50, "shadow"), (51, "s2en"), (52, "offset"), (53, "projection")):
      if b(bit): raise _Bad(f"isam with {what}")
    _zero(w, 9, 16, 19, 20)
    if not b(0): raise _Bad("isam with half coordinates")
    i.types, i.count, i.sampler, i.slot = (TYPES[_bits(w, 44, 46)],), _bits(w, 40, 43), _bits(w, 21, 24), _bits(w, 25, 31)
    if i.types[0] not in ("f32", "f16"): raise _Bad(f"isam of {i.types[0]}")
    if i.count not in (1, 3, 7, 15): raise _Bad(f"isam write mask {i.count:#x}")
    i.dst, i.src = _dst(w >> 32 & 0xff, is_half(i.types[0])), (Operand("gpr", _bits(w, 1, 8)),)

  elif cat == 6:
    opc, t = _bits(w, 54, 58), TYPES[_bits(w, 49, 51)]
    i.types = (t,)
    if not b(0) and opc == 0:
      o = _bits(w, 14, 19)
      i.row = _row((6, "b", o), f"cat6 a6xx opcode {o}")
      _zero(w, 4, 5)
      if _bits(w, 20, 23) != 6: raise _Bad("reserved bits 23:20")
      if b(8) or _bits(w, 6, 7) != 0 or not b(11) or _bits(w, 9, 10) != 1: raise _Bad("stib that is bindless, indirect, untyped or not 2-D")
      i.count, i.slot = _bits(w, 12, 13) + 1, _bits(w, 41, 48)
      if t not in ("f32", "f16"): raise _Bad(f"stib of {t}")
      i.src = (Operand("gpr", w >> 32 & 0xff, is_half(t)), Operand("gpr", _bits(w, 24, 31)))
      return i
    i.row = _row((6, opc, TYPES.index(t)), f"cat6 opcode {opc}")
    half = is_half(t)
    if not b(23) or not b(0 if i.row.form[0] == "l" else 40): raise _Bad("reserved bit clear")
    _zero(w, 52, 53, *{"ldg": (27, 31, 40, 48), "stg": (0, 0, 14, 22, 27, 31), "ldl": (22, 22, 40, 48), "stl": (0, 0, 14, 22)}[i.row.form])
    if i.row.form == "ldg":
      if b(22): raise _Bad("ldg.a")
      i.offset, i.count = _sext(_bits(w, 1, 13), 13), _bits(w, 24, 26)
      i.src, i.dst = (Operand("gpr", _bits(w, 14, 21)),), _dst(w >> 32 & 0xff, half)
    elif i.row.form == "ldl":
      i.offset, i.count = _sext(_bits(w, 1, 13), 13), _bits(w, 24, 31)
      i.src, i.dst = (Operand("gpr", _bits(w, 14, 21)),), _dst(w >> 32 & 0xff, half)
    else:
      if i.row.form == "stg" and b(52): raise _Bad("stg.a")
      i.offset = _sext(_bits(w, 9, 13) << 8 | _bits(w, 32, 39), 13)
      i.count = _bits(w, 24, 26) if i.row.form == "stg" else _bits(w, 24, 31)
      i.src = (Operand("gpr", _bits(w, 41, 48)), Operand("gpr", _bits(w, 1, 8), half))
    if not 1 <= i.count <= 4: raise _Bad(f"{i.name} of {i.count} components")

  else:
    opc = _bits(w, 55, 58)
    i.row = _row((7, opc), f"cat7 opcode {opc}")
    _zero(w, 40, 43, 45, 48, 50, 50)
    if i.name == "bar": _zero(w, 51, 52)
    i.scope = "" if i.name == "icinv" else "".join(c for c, bit in (("g", 54), ("l", 53), ("r", 52), ("w", 51)) if b(bit))

  if i.dst is not None and i.dst.kind == "gpr" and (i.dst.num == REG_A1 or i.dst.num > REG_P0 + 3 or REG_A1 < i.dst.num < REG_P0):
    raise _Bad(f"destination register id {i.dst.num:#x}")
  return i

def _advance(src: tuple[Operand, ...], rr: tuple[bool, ...]) -> tuple[Operand, ...]:
  for s, r in zip(src, rr): s.r = r
  return src

def decode(code: bytes) -> list[Instr]:
  """Decodes a program up to the last instruction that is not padding (`nop` behind the last `end`). Length must be a multiple of 8 bytes."""
  if len(code) % 8: raise ValueError(f"IR3 code of {len(code)} bytes: not a multiple of 8")
  words = struct.unpack(f"<{len(code) // 8}Q", code)
  n = len(words)
  while n and words[n - 1] == 0: n -= 1
  return [decode_one(w, pc) for pc, w in enumerate(words[:n])]

__all__ = ["Instr", "Operand", "decode", "decode_one", "reg_name", "REG_NONE"]
