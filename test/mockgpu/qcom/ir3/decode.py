"""IR3 machine code -> decoded instructions, by the rows of isa.py. Field positions: Mesa src/freedreno/isa/ir3*.xml."""
from __future__ import annotations
import re, struct
from dataclasses import dataclass
from test.mockgpu.qcom.ir3.isa import (ATOMICS, BY_KEY, FLOAT_NAMES, FLOAT_TABLE, LEFT_OUT, REG_A0, REG_A1, REG_P0, REG_NONE, TYPES, Row,
                                       UnknownInstruction, is_half, type_size)

SHFL = {1: "xor", 2: "up", 3: "down", 6: "rup", 7: "rdown"}

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
  @property
  def is_a1(self) -> bool: return self.kind == "gpr" and self.num == REG_A1

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
  slot: int = 0             # texture, UAV or UBO, where `index` does not hold it; brac: bit
  sampler: int = 0
  index: Operand | None = None   # register with the slot; of a texture: sampler, texture in two half registers
  dims: int = 2             # coordinates of an image, 1 to 3
  mods: str = ""            # textures: a (array), o (offset), 1 (printed .1d), u (index is uniform); UAVs: t (typed), u; shfl: its mode
  shift: int = 0            # ldg.a, stg.a; brcst.active: log2 of the cluster
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
    if name == "brac": name, ops = f"brac.{self.slot}", f"#{self.target - self.pc}"
    elif form == "branch": ops = "".join(f"{'!' if inv else ''}p0.{'xyzw'[c]}, " for c, inv in self.cond) + f"#{self.target - self.pc}"
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
      if self.dst is not None and self.dst.is_a1: name = "mova1"
    elif form == "gat": ops = ", ".join(map(str, (self.dst, *self.src)))
    elif form == "sct": ops = ", ".join(map(str, (self.dst, *self.dst2, self.src[0])))
    elif form == "movmsk": flags, name = flags.replace(f"(rpt{self.rpt})", ""), f"movmsk.w{32 * (self.rpt + 1)}"
    elif form in ("ldg", "ldl"):
      ops = f"{self.dst}, {name[2]}[{self.src[0]}{f'{self.offset:+d}' if self.offset else ''}], {self.count}"
    elif form in ("stg", "stl"):
      ops = f"{name[2]}[{self.src[0]}{f'{self.offset:+d}' if self.offset else ''}], {self.src[1]}, {self.count}"
    elif form in ("ldg.a", "stg.a"):
      ts, off, src2 = type_size(self.types[0]).bit_length() - 1, f"+{self.offset}" if self.offset else "", self.src[1]
      at = f"(({src2}{off})<<{ts})" if not self.shift else f"((({src2}<<{self.shift}){off})<<{ts})"
      if not self.offset: at = f"({src2}<<{ts + self.shift})"
      if ts == 0: at = f"{src2}{off}"
      ops = f"{self.dst}, g[{self.src[0]}+{at}], {self.count}" if form == "ldg.a" else f"g[{self.src[0]}+{at}], {self.src[2]}, {self.count}"
    elif form in ("ldg.k", "stc"):
      ops = f"c[{self.slot if not self.mods else f'a1.x+{self.slot}' if self.slot else 'a1.x'}], "
      ops += f"{self.src[0]}, {self.count}" if form == "stc" else f"g[{self.src[0]}{f'{self.offset:+d}' if self.offset else ''}], {self.count}"
    elif form in ("tex", "getsize"):
      name += (".3d" if self.dims == 3 and "a" not in self.mods else "") + "".join(f".{m}" for m in "ao" if m in self.mods)
      if self.index is not None: name += ".s2en" + (".uniform" if "u" in self.mods else ".nonuniform")
      if "1" in self.mods: name += ".1d"             # as Mesa prints it, whatever the texture is
      at = str(self.index) if self.index is not None else f"t#{self.slot}" if form == "getsize" else f"s#{self.sampler}, t#{self.slot}"
      mask = "".join("xyzw"[i] for i in range(4) if self.count >> i & 1)
      ops = f"({self.types[0]})({mask}){self.dst}, {', '.join(map(str, self.src))}, {at}"
    elif form in ("lanes1", "lanes2"):
      name += f".w{1 << self.shift}" if self.shift else ""
      ops = f"({self.types[0]})({''.join('xyzw'[i] for i in range(4) if self.count >> i & 1)}){self.dst}, {', '.join(map(str, self.src))}"
    elif form == "shfl": name = f"shfl.{self.mods}.{self.types[0]}"
    elif form in ("atomic.l", "atomic.g"):
      at = f"l[{self.src[0]}]" if form == "atomic.l" else str(self.src[0])
      name, ops = f"{name}.untyped.1d.{self.types[0]}.1.{form[-1]}", f"{self.dst}, {at}, {self.src[1]}"
    elif form in ("atomic.b", "ldib", "stib", "resinfo"):
      typed, mode = "typed" if "t" in self.mods else "untyped", "imm" if self.index is None else "uniform" if "u" in self.mods else "nonuniform"
      name = f"{name}.{typed}.{self.dims}d.{self.types[0]}.{self.count}.{mode}"
      regs = (self.dst,) if form == "resinfo" else (self.dst, self.src[0]) if form == "ldib" else self.src
      ops = ", ".join(map(str, (*regs, self.slot if self.index is None else self.index)))
    elif form in ("ldc", "ldc.k"):
      mode = "imm" if self.index is None else "uniform" if "u" in self.mods else "nonuniform"
      name = f"ldc.offset{self.offset}.{self.count}.{mode}" if form == "ldc" else f"ldc.{self.count}.k.{mode}"
      ops = f"{self.dst if form == 'ldc' else 'c[a1.x]'}, {self.src[0]}, {self.slot if self.index is None else self.index}"
    elif form == "sync": name, ops = name + "".join(f".{c}" for c in self.scope), ""
    if name == "getlast": name += f".w{2 << (self.word >> 52 & 7)}"
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
  if (r := BY_KEY.get(key)) is None:
    name, why = LEFT_OUT.get(key, LEFT_OUT.get(key[:-1], ("", "")))
    raise _Bad(f"{name}, {why}" if name else what)
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
    form = i.row.form if i.name != "brac" else "brac"
    _zero(w, 43, 43, *((40, 42) if i.name != "nop" else ()), *((0, 39) if form in ("none", "pred") else (32, 36) if form != "brac" else ()),
          *((45, 48, 50, 54 if i.name != "getlast" else 51) if form in ("none", "target", "brac") else (45, 48, 50, 54) if form == "pred" else (48,
              51)))
    if form == "brac": i.slot = _bits(w, 32, 36)
    c1, c2 = (_bits(w, 53, 54), b(52)), (_bits(w, 46, 47), b(45))
    if i.row.form in ("branch", "target"): i.target = pc + _sext(w & 0xffffffff, 32)
    if form in ("branch", "pred"): i.cond = (c1, c2) if i.name in ("brao", "braa") else (c1,)

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
      if max(d0, *a) >= REG_A0: raise _Bad(f"{i.name} of a special register")
      if mode == 0: _zero(w, 24, 31)
      i.dst = _dst(d0, half)
      if mode == 0: i.src, i.dst2 = (s(a[0]), s(a[1])), (_dst(a[2], half),)
      elif mode == 1: i.src, i.dst2 = tuple(s(n) for n in a), tuple(_dst(d0 + k, half) for k in range(1, 4))
      else: i.src, i.dst2 = tuple(s(a[0] + k) for k in range(4)), tuple(_dst(n, half) for n in a[1:])
      return i
    if opc != 0: raise _Bad(f"cat1 opcode {opc}: movs, not made for a630")
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
    i.dst = Operand("rgpr", w >> 32 & 0xff, is_half(TYPES[dt])) if b(49) else _dst(w >> 32 & 0xff, is_half(TYPES[dt]))
    if i.dst.is_a0 and (st, dt, i.rpt) != (4, 4, 0): raise _Bad("a0.x written by other than mova")
    if i.dst.is_pred: raise _Bad("p0 written by a move")
    if b(49) and i.dst.num in (REG_A0, REG_A1): raise _Bad(f"relative destination {i.dst.num}")
    if i.dst.is_a1 and (st, dt, i.rpt) != (2, 2, 0): raise _Bad("a1.x written by other than mova1")

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
    i.row = _row((5, 31, int(b(53)), _bits(w, 19, 20) if b(53) else 0) if opc == 31 else (5, opc), f"cat5 opcode {opc}")
    form = i.row.form
    if form == "sync": _zero(w, 0, 53)
    else: _texture(i, w)

  elif cat == 6:
    opc, t = _bits(w, 54, 58), TYPES[_bits(w, 49, 51)]
    i.types = (t,)
    if b(23) and _bits(w, 20, 22) == 6 and _bits(w, 14, 19) in (6, 29) and _bits(w, 52, 53) == 2 and not b(0):
      raise _Bad(f"{'ldib.b' if _bits(w, 14, 19) == 6 else 'stib.b'} with an immediate offset, not made for a630")
    if not b(0) and opc == 0 or _bits(w, 14, 19) in (29, 6, 15, 30) and _bits(w, 20, 23) & 7 == 6 and opc == 0 and _bits(w, 52,
        53) == 2 and not b(40):
      _descriptor(i, w)
    elif ATOMICS.get(opc) or opc in (19, 20): _atomic(i, w)
    elif opc == 27: _shuffle(i, w)
    else: _load_store(i, w)

  else:
    opc = _bits(w, 55, 58)
    i.row = _row((7, opc), f"cat7 opcode {opc}")
    _zero(w, 40, 43, 45, 48, 50, 50, *((49, 49) if opc > 1 else ()))
    if i.name in ("bar", "fence") and not b(49): raise _Bad("reserved bit 49 clear")
    if i.name == "bar": _zero(w, 51, 52)
    if i.name == "sleep": _zero(w, 52, 54)
    i.scope = "" if i.name == "icinv" else "sl"[b(51)] if i.name == "sleep" else "".join(c for c, bit in (("g", 54), ("l", 53), ("r", 52), ("w",
        51)) if b(bit))

  if i.dst is not None and i.dst.kind == "gpr" and (i.dst.num in (REG_A0, REG_A1) and cat != 1 or i.dst.num > REG_P0 + 3
                                                    or REG_A1 < i.dst.num < REG_P0):
    raise _Bad(f"destination register id {i.dst.num:#x}")
  return i

def _texture(i: Instr, w: int) -> None:
  """cat5: isam, isaml, sam, saml, getsize, brcst.active, quad_shuffle."""
  b = lambda n: bool(w >> n & 1)
  name, form = i.name, i.row.form
  i.types, i.count = (TYPES[_bits(w, 44, 46)],), _bits(w, 40, 43)
  i.dst = _dst(w >> 32 & 0xff, is_half(i.types[0]))
  if type_size(i.types[0]) == 1 or i.types[0] == "u8_32": raise _Bad(f"{name} of {i.types[0]}")
  if not i.count: raise _Bad(f"{name} with an empty write mask")
  if form in ("lanes1", "lanes2"):
    _zero(w, 17, 18, 21, 31, 47, 52)
    if form == "lanes1": _zero(w, 9, 16)
    if i.count != 1: raise _Bad(f"{name} write mask {i.count:#x}")
    half = not b(0)
    if half != is_half(i.types[0]): raise _Bad(f"{name} that converts")
    i.src = (Operand("gpr", _bits(w, 1, 8), half),) + ((Operand("gpr", _bits(w, 9, 16), half),) if form == "lanes2" else ())
    if name == "brcst.active": i.shift = _bits(w, 19, 20) + 1
    return
  for bit, what in ((50, "a vector load" if name == "isam" else "shadow"), (53, "an immediate offset" if name == "isam" else "projection"), (17,
      "bit 17")):
    if b(bit): raise _Bad(f"{name} with {what}")
  if not b(0): raise _Bad(f"{name} with half coordinates")
  _zero(w, 47, 47, *((18, 18) if name != "isam" else ()))
  i.mods = "a" * b(49) + "o" * b(52) + "1" * (name == "isam" and not b(18))
  if b(48) and b(49): raise _Bad(f"{name} of a cube array")
  i.dims = 2 + (b(48) or b(49))
  if b(51):
    mode = _bits(w, 29, 31)
    if mode not in (0, 4): raise _Bad(f"{name} with bindless descriptors")
    _zero(w, 19, 20)
    i.index, i.mods = Operand("gpr", _bits(w, 21, 28), True), i.mods + "u" * (mode == 0)
  else:
    _zero(w, 19, 20)
    i.sampler, i.slot = _bits(w, 21, 24), _bits(w, 25, 31)
  if form == "getsize":
    _zero(w, 9, 16, 48, 49, 52, 52, *(() if b(51) else (21, 24)))
    if i.types[0] not in ("u32", "s32"): raise _Bad(f"getsize of {i.types[0]}")
  two = name in ("isaml", "saml") or b(52)
  if not two: _zero(w, 9, 16)
  i.src = (Operand("gpr", _bits(w, 1, 8)),) + ((Operand("gpr", _bits(w, 9, 16)),) if two else ())

def _descriptor(i: Instr, w: int) -> None:
  """cat6, the a6xx encoding: UAVs and UBOs by slot."""
  b, t, o = lambda n: bool(w >> n & 1), i.types[0], _bits(w, 14, 19)
  constants = b(52) and o == 30
  i.row = _row((6, "b", o, "k") if constants else (6, "b", o), f"cat6 a6xx opcode {o}")
  name, form, mode = i.name, i.row.form, _bits(w, 6, 7)
  if b(8): raise _Bad(f"{name} with bindless descriptors")
  _zero(w, 1, 3)
  _zero(w, 4, 5, 40, 40, 54, 58)
  if mode == 3: raise _Bad("descriptor mode 3")
  if not b(53) or b(52) != (form in ("atomic.b", "ldc.k")): raise _Bad("reserved bits 53:52")
  if mode: i.index, i.mods = Operand("gpr", _bits(w, 41, 48)), "u" * (mode == 1)
  else: i.slot = _bits(w, 41, 48)
  i.count, data = _bits(w, 12, 13) + 1, _bits(w, 32, 39)
  if form in ("ldc", "ldc.k"):
    if _bits(w, 20, 22) != 4: raise _Bad("reserved bits 22:20")
    if t not in ("u32",) or b(11): raise _Bad(f"{name} of {t}" if not b(11) else "ldc.u, not made for a630")
    i.src = (Operand("imm" if b(23) else "gpr", _bits(w, 24, 31)),)
    if form == "ldc": i.offset, i.dst = _bits(w, 9, 10), _dst(data, False)
    else:
      i.count = data + 1
      _zero(w, 9, 13)
    return
  if _bits(w, 20, 23) != 6: raise _Bad("reserved bits 23:20")
  if form in ("stib", "resinfo"): _zero(w, 0, 0)
  i.dims = _bits(w, 9, 10) + 1
  if b(11): i.mods += "t"
  coord = Operand("gpr", _bits(w, 24, 31))
  if form == "resinfo":
    _zero(w, 24, 31)
    if t not in ("u32", "s32"): raise _Bad(f"resinfo of {t}")
    i.dst = _dst(data, False)
    return
  if i.dims == 4: raise _Bad(f"{name} with 4 coordinates")
  if form == "atomic.b":
    if t not in ("u32", "s32"): raise _Bad(f"{name} of {'u64' if t == 'u8' else t}")
    if i.count != 1: raise _Bad(f"{name} of {i.count} components")
    i.src = (Operand("gpr", data), coord)
    return
  if type_size(t) == 1 or t == "u8_32": raise _Bad(f"{name} of {t}")
  if "t" not in i.mods and i.dims != 1: raise _Bad(f"{name} that is untyped with {i.dims} coordinates")
  reg = Operand("gpr", data, is_half(t))
  if form == "ldib": i.dst, i.src = _dst(data, is_half(t)), (coord,)
  else: i.src = (reg, coord)

def _atomic(i: Instr, w: int) -> None:
  """cat6 atomics on local memory and on addresses."""
  b, t, opc = lambda n: bool(w >> n & 1), i.types[0], _bits(w, 54, 58)
  g = b(52)
  i.row = _row((6, opc, "g" if g else "l"), f"cat6 opcode {opc}")
  _zero(w, 1, 10, 11, 13, 40, 48, 53, 53)
  if not b(0): raise _Bad("reserved bit 0 clear")
  if t not in ("u32", "s32"): raise _Bad(f"{i.name} of {'u64' if t == 'u8' and g else t}")
  if b(22) or b(23): raise _Bad(f"{i.name} with an immediate")
  i.dst, i.src = _dst(w >> 32 & 0xff, False), (Operand("gpr", _bits(w, 14, 21)), Operand("gpr", _bits(w, 24, 31)))

def _shuffle(i: Instr, w: int) -> None:
  t, mode = i.types[0], _bits(w, 45, 47)
  i.row = _row((6, 27), "shfl")
  _zero(w, 0, 0, 9, 22, 40, 44, 48, 48)
  if _bits(w, 52, 53) != 2: raise _Bad("reserved bits 53:52")
  if mode not in SHFL: raise _Bad(f"shfl mode {mode}")
  if type_size(t) == 1 or t == "u8_32": raise _Bad(f"shfl of {t}")
  half = is_half(t)
  i.mods, i.dst = SHFL[mode], _dst(w >> 32 & 0xff, half)
  i.src = (Operand("gpr", _bits(w, 1, 8), half), Operand("imm" if w >> 23 & 1 else "gpr", _bits(w, 24, 31)))

def _load_store(i: Instr, w: int) -> None:
  """cat6: loads and stores of global, local and private memory, and of the constant file."""
  b, t, opc = lambda n: bool(w >> n & 1), i.types[0], _bits(w, 54, 58)
  key: tuple = (6, opc, TYPES.index(t))
  if opc == 0 and b(52): key += ("k",)
  elif opc == 0 and b(22) or opc == 3 and b(52): key += ("a",)
  i.row = _row(key, f"cat6 opcode {opc} of {t}")
  form, half = i.row.form, is_half(t)
  if not b(23) and form != "ldg.k" or not b({"ldg": 0, "ldl": 0, "ldg.a": 0, "ldg.k": 0, "stc": 23}.get(form, 40)): raise _Bad("reserved bit clear")
  _zero(w, 53, 53, *{"ldg": (27, 31, 40, 48, 52, 52), "ldg.a": (27, 31, 40, 48, 11, 11, 52, 52), "ldg.k": (22, 22, 26, 31, 41, 48),
                     "stg": (0, 0, 14, 22, 27, 31, 52, 52), "stg.a": (0, 0, 11, 11, 14, 22, 27, 31), "ldl": (22, 22, 40, 48, 52, 52),
                     "stl": (0, 0, 14, 22, 52, 52), "stc": (0, 0, 9, 22, 27, 31, 41, 48, 52, 52)}[form])
  off13, gpr = _sext(_bits(w, 1, 13), 13), lambda lo, h=False: Operand("gpr", _bits(w, lo, lo + 7), h)
  i.count = _bits(w, 24, 31) if form in ("ldl", "stl") else _bits(w, 23, 26) if form == "ldg.k" else _bits(w, 24, 26)
  if form in ("ldg", "ldl"): i.offset, i.src, i.dst = off13, (gpr(14),), _dst(w >> 32 & 0xff, half)
  elif form == "ldg.a":
    i.offset, i.shift = _bits(w, 9, 10), _bits(w, 12, 13)
    i.src, i.dst = (gpr(14), gpr(1)), _dst(w >> 32 & 0xff, half)
  elif form == "stg.a":
    i.offset, i.shift = _bits(w, 9, 10), _bits(w, 12, 13)
    i.src = (gpr(41), gpr(32), gpr(1, half))
  elif form in ("ldg.k", "stc"):
    i.offset, i.src = (off13, (gpr(14),)) if form == "ldg.k" else (0, (gpr(1),))
    i.slot, i.mods = _bits(w, 32, 39), "a" * b(40)
  else:
    i.offset = _sext(_bits(w, 9, 13) << 8 | _bits(w, 32, 39), 13)
    i.src = (gpr(41), gpr(1, half))
  if not 1 <= i.count <= (15 if form == "ldg.k" else 4): raise _Bad(f"{i.name} of {i.count} components")

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
