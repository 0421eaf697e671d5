"""The slow shader core: one fiber and one Python integer at a time, written from the ISA's description to check engine.c against.

It shares the decoder with the fast core and nothing else: arithmetic is on integers and doubles that are rounded once, control flow is "the active
fibers with the smallest program counter run". No strictness: what the fast core reports, this one raises as an error or leaves alone.
Where Mesa's sources are silent both cores make the choices that isa.py names.
"""
from __future__ import annotations
import math, struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
import numpy as np
from test.mockgpu.qcom.ir3.decode import Instr, Operand
from test.mockgpu.qcom.ir3.isa import FLOAT_TABLE, REG_A0, REG_A1, REG_NONE, REG_P0, SHARED_FIRST, SHARED_LAST, type_size

WAVE = 64

def signed(x: int, w: int) -> int: return (x & (1 << w) - 1) - ((x >> (w - 1) & 1) << w)

def flush(bits: int, w: int) -> int:
  """Subnormals to signed zero: turnip offers flush to zero and no preservation for both widths (tu_device.cc, float controls)."""
  return bits if bits & (0x7f800000 if w == 32 else 0x7c00) else bits & 1 << (w - 1)

def to_float(bits: int, w: int, ftz: bool = True) -> float:
  bits = flush(bits, w) if ftz else bits
  return struct.unpack("<f", struct.pack("<I", bits))[0] if w == 32 else struct.unpack("<e", struct.pack("<H", bits))[0]

def to_bits(x: float, w: int, ftz: bool = True) -> int:
  """Rounds a double to nearest even."""
  with np.errstate(over="ignore"): bits = int(np.float32(x).view(np.uint32)) if w == 32 else int(np.float64(x).astype(np.float16).view(np.uint16))
  return flush(bits, w) if ftz else bits

def rounded(x: float, mode: int) -> float:
  """To an integer: 0 toward zero, 1 nearest even, 2 up, 3 down."""
  return float((math.trunc, round, math.ceil, math.floor)[mode](x)) if math.isfinite(x) else x

def clz(x: int, w: int) -> int: return w - x.bit_length() if x else -1
def s24(x: int) -> int: return signed(x, 24)

def divide(a: float, b: float) -> float:
  if a != a or b != b: return math.nan
  return math.copysign(math.inf, a) * math.copysign(1, b) if b == 0 else a / b
def root(x: float) -> float: return math.sqrt(x) if x >= 0 else x if x == 0 else math.nan
def pick(a: float, b: float, first: bool) -> float: return b if a != a else a if b != b or first else b
def keep_sign(r: float, a: float) -> float: return math.copysign(r, a) if r == 0 else r

COMPARE: dict[str, Callable[[Any, Any], bool]] = {"lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
                                                  "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b}
FLOAT: dict[str, Callable[..., float]] = {
  "add.f": lambda a, b: a + b, "mul.f": lambda a, b: a * b, "min.f": lambda a, b: pick(a, b, a < b), "max.f": lambda a, b: pick(a, b, a > b),
  "sign.f": lambda a: 1.0 if a > 0 else -1.0 if a < 0 else 0.0, "floor.f": lambda a: keep_sign(rounded(a, 3), a),
  "ceil.f": lambda a: keep_sign(rounded(a, 2), a), "rndne.f": lambda a: keep_sign(rounded(a, 1), a), "trunc.f": lambda a: keep_sign(rounded(a, 0), a),
  "rndaz.f": lambda a: a if not math.isfinite(a) else keep_sign(math.copysign(math.floor(abs(a) + 0.5), a), a),
  "rcp": lambda a: divide(1.0, a), "rsq": lambda a: divide(1.0, root(a)) if a == a and a != math.inf else 0.0 if a == math.inf else a, "sqrt": root,
  "log2": lambda a: math.nan if a != a or a < 0 else -math.inf if a == 0 else a if a == math.inf else math.log2(a),
  "exp2": lambda a: a if a != a else math.inf if a > 200 else 0.0 if a < -200 else 2.0 ** a,
  "sin": lambda a: math.sin(a) if abs(a) < 2 ** 27 else math.nan, "cos": lambda a: math.cos(a) if abs(a) < 2 ** 27 else math.nan}
FLOAT |= {"hrsq": FLOAT["rsq"], "hlog2": FLOAT["log2"], "hexp2": FLOAT["exp2"]}
# name -> (signed operands, function of (width, operands))
INT: dict[str, tuple[bool, Callable[..., int]]] = {
  "add.u": (False, lambda w, a, b: a + b), "add.s": (True, lambda w, a, b: a + b), "sub.u": (False, lambda w, a, b: a - b),
  "sub.s": (True, lambda w, a, b: a - b), "min.u": (False, lambda w, a, b: min(a, b)), "min.s": (True, lambda w, a, b: min(a, b)),
  "max.u": (False, lambda w, a, b: max(a, b)), "max.s": (True, lambda w, a, b: max(a, b)), "absneg.s": (True, lambda w, a: a),
  "and.b": (False, lambda w, a, b: a & b), "or.b": (False, lambda w, a, b: a | b), "xor.b": (False, lambda w, a, b: a ^ b),
  "not.b": (False, lambda w, a: ~a), "bfrev.b": (False, lambda w, a: int(f"{a:0{w}b}"[::-1], 2)), "clz.b": (False, lambda w, a: clz(a, w)),
  "clz.s": (True, lambda w, a: clz(a if a >= 0 else ~a, w)), "shl.b": (False, lambda w, a, b: a << (b & w - 1)),
  "shr.b": (False, lambda w, a, b: a >> (b & w - 1)), "ashr.b": (True, lambda w, a, b: a >> (b & w - 1)),
  "getbit.b": (False, lambda w, a, b: a >> (b & w - 1) & 1), "cbits.b": (False, lambda w, a: a.bit_count()),
  "mul.u24": (False, lambda w, a, b: (a & 0xffffff) * (b & 0xffffff)), "mul.s24": (True, lambda w, a, b: s24(a) * s24(b)),
  "mull.u": (False, lambda w, a, b: (a & 0xffff) * (b & 0xffff)), "mad.u16": (False, lambda w, a, b, c: a * b + c),
  "mad.s16": (True, lambda w, a, b, c: a * b + c), "madsh.u16": (False, lambda w, a, b, c: ((a & 0xffff) * (b >> 16) << 16) + c),
  "madsh.m16": (False, lambda w, a, b, c: ((a & 0xffff) * (b >> 16) << 16) + c),
  "mad.u24": (False, lambda w, a, b, c: (a & 0xffffff) * (b & 0xffffff) + c), "mad.s24": (True, lambda w, a, b, c: s24(a) * s24(b) + c),
  "sel.b16": (False, lambda w, a, b, c: a if b else c), "sel.b32": (False, lambda w, a, b, c: a if b else c),
  "sad.s16": (True, lambda w, a, b, c: abs(a - b) + c), "sad.s32": (True, lambda w, a, b, c: abs(a - b) + c),
  "shrm": (False, lambda w, a, b, c: b >> (a & w - 1) & c), "shlm": (False, lambda w, a, b, c: b << (a & w - 1) & c),
  "shrg": (False, lambda w, a, b, c: b >> (a & w - 1) | c), "shlg": (False, lambda w, a, b, c: b << (a & w - 1) | c),
  "andg": (False, lambda w, a, b, c: b & a | c)}
WIDE = ("mul.u24", "mul.s24", "mull.u")             # 32-bit results at any operand width

class Memory:
  """Bytes by GPU address, in pieces. Raises IndexError for an access outside of every piece."""
  def __init__(self, pieces: dict[int, bytearray]): self.pieces = pieces
  def at(self, addr: int, n: int) -> tuple[bytearray, int]:
    for base, mem in self.pieces.items():
      if base <= addr and addr + n <= base + len(mem): return mem, addr - base
    raise IndexError(f"{n} bytes at {addr:#x}")
  def load(self, addr: int, n: int) -> int:
    mem, o = self.at(addr, n)
    return int.from_bytes(mem[o:o + n], "little")
  def store(self, addr: int, n: int, v: int) -> None:
    mem, o = self.at(addr, n)
    mem[o:o + n] = (v & (1 << 8 * n) - 1).to_bytes(n, "little")

@dataclass
class Fiber:
  lane: int
  regs: dict[tuple[bool, int], int] = field(default_factory=dict)     # (half, id) -> bits
  pred: list[bool] = field(default_factory=lambda: [False] * 4)
  a: list[int] = field(default_factory=lambda: [0, 0])                # a0.x, a1.x
  pc: int = 0
  latch: bool = False                 # p0.x at predt or predf
  inside: bool = False                # between predt or predf and prede
  masked: bool = False                # there, on the other side
  calls: list[int] = field(default_factory=list)
  private: dict[int, int] = field(default_factory=dict)
  done: bool = False

class Group:
  """One workgroup. `d` is a native.Dispatch."""
  def __init__(self, instrs: dict[int, Instr], d: Any, mem: Memory, wg: tuple[int, int, int], merged: bool, cov_round: int):
    self.instrs, self.d, self.mem, self.merged, self.cov_round = instrs, d, mem, merged, cov_round
    self.consts, self.local = [int(c) for c in d.consts], bytearray(d.local_bytes)
    n = d.local[0] * d.local[1] * d.local[2]
    self.waves = [[Fiber(k) for k in range(min(WAVE, n - at))] for at in range(0, n, WAVE)]
    for at, wave in enumerate(self.waves):
      for f in wave:
        lin = at * WAVE + f.lane
        own = (lin % d.local[0], lin // d.local[0] % d.local[1], lin // d.local[0] // d.local[1])
        for reg, vals in ((d.lid_reg, own), (d.wgid_reg, wg), (d.wgsize_reg, d.local), (d.wgoffset_reg, [g * s for g, s in zip(wg, d.local)])):
          if reg != REG_NONE:
            for k, v in enumerate(vals): f.regs[False, reg + k] = v

  def run(self, limit: int = 1 << 22) -> None:
    stopped = [False] * len(self.waves)
    while not all(all(f.done for f in w) for w in self.waves):
      for k, wave in enumerate(self.waves):
        while not stopped[k] and (live := [f for f in wave if not f.done]):
          limit -= 1
          if limit < 0: raise RuntimeError("the program does not end")
          pc = min(f.pc for f in live)
          at = [f for f in live if f.pc == pc]
          i = self.instrs[pc]
          for f in at: f.pc = pc + 1
          active = [f for f in at if not f.masked]
          if i.name == "bar": stopped[k] = True
          else: self.step(i, at, active)
      stopped = [False] * len(self.waves)

  # *** operands

  def reg(self, f: Fiber, half: bool, num: int) -> int:
    if half and self.merged: return f.regs.get((False, num // 2), 0) >> 16 * (num & 1) & 0xffff
    return f.regs.get((half, num), 0)

  def set(self, f: Fiber, half: bool, num: int, v: int) -> None:
    if half and self.merged:
      old, s = f.regs.get((False, num // 2), 0), 16 * (num & 1)
      f.regs[False, num // 2] = old & ~(0xffff << s) & 0xffffffff | (v & 0xffff) << s
    else: f.regs[half, num] = v & (0xffff if half else 0xffffffff)

  def raw(self, f: Fiber, o: Operand, cls: str, k: int) -> int:
    num, half = o.num + (k if o.r else 0), o.half
    if o.kind == "imm": return o.num & (0xffff if half else 0xffffffff)
    if o.kind == "flut": return to_bits(FLOAT_TABLE[o.num], 16 if half else 32)
    if o.kind in ("const", "rconst"):
      v = self.consts[num if o.kind == "const" else signed(f.a[0], 16) + o.num]
      return v if not half else to_bits(to_float(v, 32), 16) if cls == "f" else v & 0xffff
    if o.kind == "rgpr": return self.reg(f, half, signed(f.a[0], 16) + o.num)
    if REG_P0 <= num < REG_P0 + 4: return int(f.pred[num - REG_P0])
    return f.a[0] if num == REG_A0 else f.a[1] if num == REG_A1 else self.reg(f, half, num)

  def source(self, f: Fiber, o: Operand, cls: str, k: int) -> int:
    """Bits after (neg) and (abs); cls: f float, s or u integer, b bitwise."""
    w = 16 if o.half else 32
    v, top = self.raw(f, o, cls, k), 1 << (w - 1)
    if cls == "f": return (v & ~top if o.abs else v) ^ (top if o.neg else 0)
    if o.abs: v = abs(signed(v, w))
    if o.neg: v = ~v if cls == "b" else -v
    return v & (1 << w) - 1

  def write(self, f: Fiber, o: Operand, k: int, v: int, wave: list[Fiber]) -> None:
    num = o.num + k
    if o.kind == "rgpr": self.set(f, o.half, signed(f.a[0], 16) + num, v)
    elif REG_P0 <= num < REG_P0 + 4: f.pred[num - REG_P0] = v != 0
    elif num in (REG_A0, REG_A1): f.a[num - REG_A0] = v & 0xffff
    elif SHARED_FIRST <= num <= SHARED_LAST and not o.half:
      if f is wave[0]:
        for g in wave: self.set(g, False, num, v)
    else: self.set(f, o.half, num, v)

  # *** instructions

  def alu(self, i: Instr, f: Fiber, k: int) -> int:
    """Bits of the result at the width of the destination."""
    name, w = i.name, i.width
    assert i.dst is not None
    out = 16 if i.dst.half else 32
    if name in FLOAT or name in ("mad.f16", "mad.f32", "absneg.f"):
      src = [self.source(f, o, "f", k) for o in i.src]
      if name == "absneg.f": r = src[0]
      elif name[:3] == "mad":
        p = to_float(to_bits(to_float(src[0], w) * to_float(src[1], w), w), w)      # rounded before the sum
        r = to_bits(p + to_float(src[2], w), w)
      else:
        r = to_bits(FLOAT[name](*(to_float(s, w) for s in src)), w)
      if i.sat:
        x = to_float(r, w, False)
        r = to_bits(min(max(x, 0.0), 1.0) if x == x and x > 0 else 0.0, w, False)
      return r if out == w or i.dst.is_pred else to_bits(to_float(r, w), out)
    if name[:3] == "cmp":
      kind, cond = name.split(".")[1:]
      a, b = (self.source(f, o, kind, k) for o in i.src)
      x, y = (to_float(a, w), to_float(b, w)) if kind == "f" else (signed(a, w), signed(b, w)) if kind == "s" else (a, b)
      return (1 if name[3] == "s" else (1 << w) - 1) if COMPARE[cond](x, y) else 0
    sgn, fn = INT[name]
    cls = "b" if name.endswith(".b") and name != "clz.b" else "s" if sgn else "u"
    args = [self.source(f, o, cls, k) for o in i.src]
    r = fn(w, *(signed(a, w) if sgn else a for a in args))
    if i.sat: r = min(max(r, -(1 << w - 1)), (1 << w - 1) - 1) if sgn else min(max(r, 0), (1 << w) - 1)
    if name in WIDE: return r & (1 << out) - 1
    return (signed(r, w) if sgn or name == "clz.b" else r & (1 << w) - 1) & (1 << out) - 1

  def convert(self, i: Instr, v: int) -> int:
    st, dt = i.types
    ws, wd = 8 * type_size(st), 8 * type_size(dt)
    if st == dt or st[0] != "f" and dt[0] != "f" and ws == wd: return v
    if st[0] == "f" and dt[0] == "f":
      x, mode = to_float(v, ws), i.round or self.cov_round
      r = to_bits(x, wd)
      if wd == 16 and mode != 1 and math.isfinite(x):     # the neighbour on the other side, if rounding went the wrong way
        y = to_float(to_bits(x, wd, False), wd, False)
        if abs(y) > abs(x) if mode == 0 else y < x if mode == 2 else y > x:
          r = flush(int(np.nextafter(np.float16(y), np.float16({0: 0, 2: math.inf, 3: -math.inf}[mode])).view(np.uint16)), 16)
      return r
    if st[0] == "f":
      x = to_float(v, ws)
      lo, hi = (0, (1 << wd) - 1) if dt[0] == "u" else (-(1 << wd - 1), (1 << wd - 1) - 1)
      return (0 if x != x else hi if x == math.inf else lo if x == -math.inf else int(min(max(rounded(x, i.round), lo), hi))) & (1 << wd) - 1
    n = signed(v, ws) if st[0] == "s" or st == "u8" else v & (1 << ws) - 1     # A6xx extends u8 with its sign
    if dt[0] != "f": return n & (1 << wd) - 1
    near, mode = to_bits(float(n), wd), i.round or self.cov_round
    y = to_float(near, wd)
    if mode != 1 and math.isfinite(y) and (abs(y) > abs(n) if mode == 0 else y < n if mode == 2 else y > n):
      ft: Any = np.float32 if wd == 32 else np.float16
      near = int(np.nextafter(ft(y), ft({0: 0, 2: math.inf, 3: -math.inf}[mode])).view(np.uint32 if wd == 32 else np.uint16))
    elif mode != 1 and math.isinf(y) and (mode == 0 or mode == (3 if n > 0 else 2)): near = 0x7bff | (near & 0x8000)
    return near

  def step(self, i: Instr, at: list[Fiber], active: list[Fiber]) -> None:
    form = i.row.form
    if form in ("cat2", "cat3", "cat3b", "cat4", "mov"):
      assert i.dst is not None
      for k in range(i.rpt + 1):
        def value(f: Fiber, k: int = k) -> int:
          return self.convert(i, self.source(f, i.src[0], i.types[0][0], k)) if form == "mov" else self.alu(i, f, k)
        for f, v in [(f, value(f)) for f in active]: self.write(f, i.dst, k, v, active)
    elif form in ("swz", "gat", "sct"):
      for f in active:
        vals = [self.source(f, o, "u", 0) for o in i.src]
        for d, v in zip((i.dst, *i.dst2), vals): self.write(f, d, 0, v, active)     # type: ignore[arg-type]
    elif form in ("branch", "target", "none", "pred"): self.flow(i, at, active)
    elif form == "movmsk":
      bits = sum(1 << f.lane for f in active)
      for f in active:
        for k in range(i.rpt + 1): self.set(f, False, i.dst.num + k, bits >> 32 * k)    # type: ignore[union-attr]
    elif form in ("lanes1", "lanes2", "shfl"): self.exchange(i, active)
    elif form != "sync":
      for f in active: self.access(i, f)

  def flow(self, i: Instr, at: list[Fiber], active: list[Fiber]) -> None:
    name = i.name
    if name == "end":
      for f in active: f.done = True
    elif name in ("predt", "predf"):
      for f in at:
        if not f.inside: f.latch = f.pred[0]                # the second of the pair sees what the first one saw
        f.inside, f.masked = True, f.latch != (name == "predt")
    elif name == "prede":
      for f in at: f.inside = f.masked = False
    elif name == "ret":
      for f in active: f.pc = f.calls.pop()
    elif name == "call":
      for f in active:
        f.calls.append(i.pc + 1)
        f.pc = i.target
    elif name in ("shps", "shpe", "nop"): pass
    else:
      first = [f for f in active if f.lane // 8 == active[0].lane // 8]
      def cond(f: Fiber, n: int) -> bool: return f.pred[i.cond[n][0]] != i.cond[n][1]
      taken = {"jump": lambda f: True, "br": lambda f: cond(f, 0), "brao": lambda f: cond(f, 0) or cond(f, 1),
               "braa": lambda f: cond(f, 0) and cond(f, 1), "bany": lambda f: any(cond(g, 0) for g in active),
               "ball": lambda f: all(cond(g, 0) for g in active), "brac": lambda f: bool(self.d.cf_mask >> i.slot & 1),
               "getone": lambda f: f is active[0], "getlast": lambda f: f in first and f is not first[-1]}[name]
      for f in [f for f in active if taken(f)]: f.pc = i.target

  def exchange(self, i: Instr, active: list[Fiber]) -> None:
    assert i.dst is not None
    half, lanes = i.dst.half, {f.lane: f for f in active}
    src = {f.lane: self.reg(f, half, i.src[0].num) for f in active}
    for f in active:
      if i.name == "shfl":
        n = i.src[1].num if i.src[1].kind == "imm" else self.reg(active[0], False, i.src[1].num)
        j = {"xor": f.lane ^ n, "up": f.lane - n, "down": f.lane + n, "rup": (f.lane - n) % WAVE, "rdown": (f.lane + n) % WAVE}[i.mods]
      elif i.name == "brcst.active":
        size = 1 << i.shift
        base = f.lane // size * size
        low = [g for g in range(base, base + size // 2) if g in lanes]
        if f.lane < base + size // 2 or not low: continue
        j = low[-1]
      else:
        how = i.name.split(".")[1]
        j = f.lane // 4 * 4 + self.reg(f, half, i.src[1].num) % 4 if how == "brcst" else f.lane ^ {"horiz": 1, "vert": 2, "diag": 3}[how]
      self.set(f, half, i.dst.num, src.get(j, 0xffa5ffa5))

  def access(self, i: Instr, f: Fiber) -> None:
    form, n = i.row.form, i.count
    size = type_size(i.types[0])
    r = lambda num: self.reg(f, False, num)
    wide = lambda num: r(num) | r(num + 1) << 32
    if form in ("ldg", "stg", "ldg.a", "stg.a"):
      addr = wide(i.src[0].num) + (i.offset if form[-1] != "a" else ((r(i.src[1].num) << i.shift) + i.offset) * size)
      for k in range(n):
        if form[0] == "l": self.set(f, i.dst.half, i.dst.num + k, self.mem.load(addr + k * size, size))     # type: ignore[union-attr]
        else: self.mem.store(addr + k * size, size, self.reg(f, i.src[-1].half, i.src[-1].num + k))
    elif form in ("ldl", "stl"):
      at, store = r(i.src[0].num) + i.offset, form == "stl"
      for k in range(n):
        for b in range(size):
          o = at + k * size + b
          if i.name[2] == "l":
            if store: self.local[o] = self.reg(f, i.src[1].half, i.src[1].num + k) >> 8 * b & 255
          elif store: f.private[o] = self.reg(f, i.src[1].half, i.src[1].num + k) >> 8 * b & 255
        if not store:
          get = (lambda o: self.local[o]) if i.name[2] == "l" else (lambda o: f.private.get(o, 0xa5))
          self.set(f, i.dst.half, i.dst.num + k, sum(get(at + k * size + b) << 8 * b for b in range(size)))   # type: ignore[union-attr]
    elif form in ("atomic.g", "atomic.l"):
      addr, data, second = wide(i.src[0].num) if form[-1] == "g" else r(i.src[0].num), r(i.src[1].num), r(i.src[1].num + 1)
      mem = self.mem if form[-1] == "g" else Memory({0: self.local})
      old = mem.load(addr, 4)
      key = (lambda x: signed(x, 32)) if i.types[0] == "s32" else (lambda x: x)
      new = {"add": old + data, "sub": old - data, "xchg": data, "cmpxchg": data if old == second else old, "min": min(old, data, key=key),
             "max": max(old, data, key=key), "and": old & data, "or": old | data, "xor": old ^ data}[i.name.split(".")[-1]]
      mem.store(addr, 4, new)
      self.set(f, False, i.dst.num, old)                                                                    # type: ignore[union-attr]
    elif form == "tex" and i.name == "isam" or form == "stib" and i.dims == 2: self.image(i, f)
    else: raise NotImplementedError(i.name)

  def image(self, i: Instr, f: Fiber) -> None:
    """Four float channels of 32 or 16 bits, as tinygrad makes them."""
    store = i.row.form == "stib"
    d = struct.unpack("<16I", (self.d.uavs if store else self.d.textures)[i.slot])
    size = {130: 4, 98: 2}[d[0] >> 22 & 255]
    coord = i.src[1 if store else 0].num
    x, y = (self.reg(f, False, coord + k) for k in range(2))
    inside = x < d[1] & 0x7fff and y < d[1] >> 15 & 0x7fff
    addr = ((d[5] & 0x1ffff) << 32 | d[4]) + y * (d[2] >> 7 & 0x3fffff) + x * 4 * size
    half = i.types[0] == "f16"
    for c in range(4):
      if store and inside:
        v = to_float(self.reg(f, half, i.src[0].num + c), 16 if half else 32, False)
        self.mem.store(addr + c * size, size, to_bits(v, 8 * size, False))
      elif not store and i.count >> c & 1:
        v = to_float(self.mem.load(addr + c * size, size), 8 * size, False) if inside else 0.0
        self.set(f, half, i.dst.num + c, to_bits(v, 16 if half else 32, half))                              # type: ignore[union-attr]

def run(instrs: dict[int, Instr], d: Any, mem: Memory, *, merged: bool = False, cov_round: int = 1) -> None:
  """Runs a grid (a native.Dispatch) in order. Raises IndexError for a bad address, KeyError past the program, NotImplementedError."""
  for z in range(d.groups[2]):
    for y in range(d.groups[1]):
      for x in range(d.groups[0]): Group(instrs, d, mem, (x, y, z), merged, cov_round).run()

__all__ = ["Memory", "run"]
