"""The IR3 (Adreno 6xx) instruction table: one row an instruction, named as freedreno's disassembler prints it.

A row says how the instruction is recognised (`key`), how its operands are laid out (`form`), and, for everything that works lane by lane, what it
computes: `sem` gives a result type, source types and a C expression in a, b, c. The native engine's handlers are generated from these
expressions, so this file is the only place where arithmetic is defined. Operations that touch memory, masks or control flow are engine routines.

Encodings and semantics: Mesa's src/freedreno/isa/ir3*.xml and ir3 compiler; where those are silent the choice is marked "assumed".
Arithmetic of either width flushes subnormals, operands and results: turnip offers nothing else (tu_device.cc, float controls). Moves keep bits.
An encoding without a row is an error, never a guess.
"""
from __future__ import annotations
import functools
from dataclasses import dataclass

TYPES = ("f16", "f32", "u16", "u32", "s16", "s32", "u8", "u8_32")   # u8_32, a byte in a full register, has no rows: not made for A6xx compute
CONDS = ("lt", "le", "gt", "ge", "eq", "ne")
COND_OPS = ("<", "<=", ">", ">=", "==", "!=")

# Values of the float immediates a multi-source operand can index.
FLOAT_TABLE = (0.0, 0.5, 1.0, 2.0, 2.718281828459045, 3.141592653589793, 0.3183098861837907, 0.6931471805599453, 1.4426950408889634,
               0.30102999566398120, 3.321928094887362, 4.0)
FLOAT_NAMES = ("0.0", "0.5", "1.0", "2.0", "e", "pi", "1/pi", "1/log2(e)", "log2(e)", "1/log2(10)", "log2(10)", "4.0")

REG_A0, REG_A1, REG_P0, REG_NONE = 0xf4, 0xf5, 0xf8, 0xfc
SHARED_FIRST, SHARED_LAST = 48 * 4, 55 * 4 + 3
ROUND_ZERO, ROUND_EVEN, ROUND_POS, ROUND_NEG = range(4)

class UnknownInstruction(Exception):
  """An encoding outside the table. `offset` is in instructions from the start of the program, `encoding` the 64-bit word."""
  def __init__(self, offset: int, encoding: int, name: str):
    self.offset, self.encoding, self.name = offset, encoding, name
    super().__init__(f"IR3 instruction {offset} ({encoding:#018x}) is not implemented: {name}")

def type_size(t: str) -> int: return int(t[1:].split('_')[0]) // 8
def is_half(t: str) -> bool: return t not in ("f32", "u32", "s32", "u8_32")

@dataclass(frozen=True, slots=True)
class Lane:
  """One lane-wise function of the engine: `key` names it, `dst`/`src` are scalar types, `expr` the C expression in a, b, c."""
  key: str
  dst: str
  src: tuple[str, ...]
  expr: str

@dataclass(frozen=True, eq=False, slots=True)
class Row:
  name: str                 # mnemonic without flags
  key: tuple                # what the decoder looks up
  form: str                 # operand form, see decode.py
  sem: str = ""             # "result:sources" in type letters f/u/s (width of the operation) or full type names; empty for engine routines
  expr: str = ""
  width: int = 0            # fixed operand width in bits, 0 = the FULL bit decides
  sat: str = ""             # expression under (sat), "clamp" = result clamped to [0, 1], "" = (sat) is not known for this row
  note: str = ""

  @functools.cache
  def lane(self, width: int, sat: bool = False) -> Lane:
    """The lane function at operand width 16 or 32."""
    if self.name == "absneg.f": return Lane(f"mov.u{width}", f"f{width}", (f"f{width}",), "a")  # bits, not values: no flush
    res, srcs = self.sem.split(":")
    full = lambda t: t if len(t) > 1 else f"{t}{width}"
    expr = self.sat if sat and self.sat != "clamp" else self.expr
    return Lane(f"{self.name}{'.sat' if sat and self.sat != 'clamp' else ''}.{width}", full(res), tuple(full(t) for t in srcs.split(",") if t), expr)

ROWS: list[Row] = []
def row(*args, **kwargs) -> None: ROWS.append(Row(*args, **kwargs))

# *** cat0: flow control. Engine routines; key = (0, high bit 49, opc 58:55, branch type)
for _i, _n in enumerate(("br", "brao", "braa", "brac", "bany", "ball", "brax")):
  if _n != "brax": row(_n, (0, 0, 1, _i), "branch", note="taken if SP_CS_BOOLEAN_CF_MASK has the bit" if _n == "brac" else "")
row("nop", (0, 0, 0), "none")
row("jump", (0, 0, 2), "target")
row("call", (0, 0, 3), "target")
row("ret", (0, 0, 4), "none")
row("end", (0, 0, 6), "none")
row("getlast", (0, 1, 4), "target", note="taken by the first cluster of 8 with active fibers, but for its last active one; W has no effect")
row("getone", (0, 1, 5), "target", note="one active fiber takes the branch")
row("shps", (0, 1, 7), "target", note="every wave runs the preamble: what it computes is the same for all of them")
row("shpe", (0, 1, 8), "none")
row("predt", (0, 1, 13), "pred")
row("predf", (0, 1, 14), "pred")
row("prede", (0, 1, 15), "none")

# *** cat1: moves and conversions; key = (1, opc 58:57, source type, destination type)
def _cov(src: str, dst: str, rnd: int) -> tuple[str, str] | None:
  """(sem, C expression) of a conversion, None where the result is not known."""
  fs, fd = src[0] == "f", dst[0] == "f"
  if fs and fd: return (f"{dst}:{src}", "a") if dst == "f32" else (f"{dst}:{src}", ("a", f"rnd_h(a, {rnd})")[rnd != ROUND_EVEN])
  if fs:
    if type_size(dst) == 1: return None
    return f"{dst}:{src}", f"f2i_{dst}({('truncf', 'rintf', 'ceilf', 'floorf')[rnd]}(a))"
  # A6xx reads u8 sources with bit 7 as a sign, for every integer destination.
  if fd: return None if type_size(src) == 1 else (f"{dst}:{src}", f"i2f_{dst}((double)a, {rnd})" if rnd != ROUND_EVEN else "(float)a")
  return f"{dst}:{'s8' if src == 'u8' else src}", "a"

def cov_lane(src: str, dst: str, rnd: int = ROUND_ZERO) -> Lane | None:
  """Lane function of `cov.<src><dst>` with round field `rnd`; equal types are a raw copy."""
  if src == dst != "u8_32" or (src[0] != "f" and dst[0] != "f" and src[1:] == dst[1:] == "16") or {src, dst} == {"u32", "s32"}:
    t = "u16" if is_half(dst) else "u32"
    return Lane(f"mov.{t}", t, (t,), "a")
  if "u8_32" in (src, dst) or (c := _cov(src, dst, rnd)) is None: return None
  sem, expr = c
  d, s = sem.split(":")
  exact = (src[0] != "f" and dst[0] != "f") or dst == "f32" and src in ("f16", "u16", "s16")
  if exact and dst[0] == "f" and src != "f16": expr = "(float)a"
  return Lane(f"cov.{src}{dst}" + ("" if exact else f".r{rnd}"), d, (s,), expr)

for _si, _s in enumerate(TYPES):
  for _di, _d in enumerate(TYPES):
    if _s == _d != "u8_32": row(f"mov.{_s}{_d}", (1, 0, _si, _di), "mov")
    elif cov_lane(_s, _d) is not None: row(f"cov.{_s}{_d}", (1, 0, _si, _di), "mov")
  if _s[1:] != "8" and _s != "u8_32":
    for _m, _o in enumerate(("swz", "gat", "sct")): row(f"{_o}.{_s}{_s}", (1, 2, _si, _si, _m), _o)
row("movmsk", (1, 3), "movmsk")

# *** cat2: two-source ALU; key = (2, opc, cond)
def alu2(name: str, opc: int, sem: str, expr: str, *, sat: str = "", cond: int = 0, width: int = 0, note: str = "") -> None:
  row(name, (2, opc, cond), "cat2", sem, expr, width, sat, note)

alu2("add.f", 0, "f:f,f", "a + b", sat="clamp")
alu2("min.f", 1, "f:f,f", "(ftz(a) < ftz(b) || b != b) ? ftz(a) : ftz(b)", sat="clamp", note="one NaN gives the other operand (assumed)")
alu2("max.f", 2, "f:f,f", "(ftz(a) > ftz(b) || b != b) ? ftz(a) : ftz(b)", sat="clamp", note="one NaN gives the other operand (assumed)")
alu2("mul.f", 3, "f:f,f", "a * b", sat="clamp")
alu2("sign.f", 4, "f:f", "ftz(a) > 0 ? 1.0f : ftz(a) < 0 ? -1.0f : 0.0f", sat="clamp")
for _i, _c in enumerate(CONDS):
  alu2(f"cmps.f.{_c}", 5, "u:f,f", f"ftz(a) {COND_OPS[_i]} ftz(b)", cond=_i)
  alu2(f"cmpv.f.{_c}", 7, "u:f,f", f"ftz(a) {COND_OPS[_i]} ftz(b) ? ~0u : 0u", cond=_i)
  for _t, _cmps, _cmpv in (("u", 20, 33), ("s", 21, 34)):
    alu2(f"cmps.{_t}.{_c}", _cmps, f"u:{_t},{_t}", f"a {COND_OPS[_i]} b", cond=_i)
    alu2(f"cmpv.{_t}.{_c}", _cmpv, f"u:{_t},{_t}", f"a {COND_OPS[_i]} b ? ~0u : 0u", cond=_i)
alu2("absneg.f", 6, "f:f", "a", sat="clamp", note="the modifiers do the work")
alu2("floor.f", 9, "f:f", "floorf(ftz(a))", sat="clamp")
alu2("ceil.f", 10, "f:f", "ceilf(ftz(a))", sat="clamp")
alu2("rndne.f", 11, "f:f", "rintf(ftz(a))", sat="clamp")
alu2("rndaz.f", 12, "f:f", "roundf(ftz(a))", sat="clamp")
alu2("trunc.f", 13, "f:f", "truncf(ftz(a))", sat="clamp")
alu2("add.u", 16, "u:u,u", "a + b", sat="(((a + b) & UMASK) < a) ? UMASK : a + b")
alu2("add.s", 17, "s:s,s", "a + b", sat="sclamp((int64_t)a + b, W)")
alu2("sub.u", 18, "u:u,u", "a - b", sat="a < b ? 0u : a - b")
alu2("sub.s", 19, "s:s,s", "a - b", sat="sclamp((int64_t)a - b, W)")
for _n, _o, _t, _c in (("min.u", 22, "u", "<"), ("min.s", 23, "s", "<"), ("max.u", 24, "u", ">"), ("max.s", 25, "s", ">")):
  alu2(_n, _o, f"{_t}:{_t},{_t}", f"a {_c} b ? a : b")
alu2("absneg.s", 26, "s:s", "a", note="the modifiers do the work")
alu2("and.b", 28, "u:u,u", "a & b")
alu2("or.b", 29, "u:u,u", "a | b")
alu2("not.b", 30, "u:u", "~a")
alu2("xor.b", 31, "u:u,u", "a ^ b")
alu2("mul.u24", 48, "u32:u,u", "(a & 0xffffffu) * (b & 0xffffffu)")
alu2("mul.s24", 49, "s32:s,s", "(int32_t)((uint32_t)sext24(a) * (uint32_t)sext24(b))")
alu2("mull.u", 50, "u32:u,u", "(a & 0xffffu) * (b & 0xffffu)")
alu2("bfrev.b", 51, "u:u", "bitrev(a) >> (32 - W)")
alu2("clz.s", 52, "s:s", "(a ^ (a >> 31)) == 0 ? -1 : clz32(a ^ (a >> 31)) - (32 - W)")
alu2("clz.b", 53, "s:u", "a == 0 ? -1 : clz32(a) - (32 - W)")
alu2("shl.b", 54, "u:u,u", "a << (b & (W - 1))", note="count masked to the operand width")
alu2("shr.b", 55, "u:u,u", "a >> (b & (W - 1))")
alu2("ashr.b", 56, "s:s,s", "a >> (b & (W - 1))")
alu2("getbit.b", 59, "u:u,u", "(a >> (b & (W - 1))) & 1")
alu2("cbits.b", 61, "u:u", "popcount(a)")

# *** cat3: three-source ALU; key = (3, second table, opc)
def alu3(name: str, opc: int, sem: str, expr: str, width: int, *, second: int = 0, sat: str = "", note: str = "") -> None:
  row(name, (3, second, opc), "cat3b" if second else "cat3", sem, expr, width, sat, note)

alu3("mad.u16", 0, "u:u,u,u", "a * b + c", 16)
alu3("madsh.u16", 1, "u:u,u,u", "(((a & 0xffffu) * (b >> 16)) << 16) + c", 32)
alu3("mad.s16", 2, "s:s,s,s", "a * b + c", 16)
alu3("madsh.m16", 3, "u:u,u,u", "(((a & 0xffffu) * (b >> 16)) << 16) + c", 32)
alu3("mad.u24", 4, "u:u,u,u", "(a & 0xffffffu) * (b & 0xffffffu) + c", 32)
alu3("mad.s24", 5, "s:s,s,s", "(int32_t)((uint32_t)sext24(a) * (uint32_t)sext24(b) + (uint32_t)c)", 32)
alu3("mad.f16", 6, "f:f,f,f", "rh(a * b) + c", 16, sat="clamp", note="not fused: the product is rounded")
alu3("mad.f32", 7, "f:f,f,f", "a * b + c", 32, sat="clamp", note="not fused: the product is rounded")
alu3("sel.b16", 8, "u:u,u,u", "b ? a : c", 16)
alu3("sel.b32", 9, "u:u,u,u", "b ? a : c", 32)
alu3("sad.s16", 14, "s:s,s,s", "(a > b ? a - b : b - a) + c", 16)
alu3("sad.s32", 15, "s:s,s,s", "(a > b ? a - b : b - a) + c", 32)
alu3("shrm", 8, "u:u,u,u", "(b >> (a & (W - 1))) & c", 0, second=1)
alu3("shlm", 9, "u:u,u,u", "(b << (a & (W - 1))) & c", 0, second=1)
alu3("shrg", 10, "u:u,u,u", "(b >> (a & (W - 1))) | c", 0, second=1)
alu3("shlg", 11, "u:u,u,u", "(b << (a & (W - 1))) | c", 0, second=1)
alu3("andg", 12, "u:u,u,u", "(b & a) | c", 0, second=1)

# *** cat4: special functions, computed in double and rounded once: inside the vendor's ulp bounds, not bit-equal to hardware. key = (4, opc)
def sfu(name: str, opc: int, expr: str, width: int = 0) -> None: row(name, (4, opc), "cat4", "f:f", expr, width, "clamp")

sfu("rcp", 0, "1.0f / ftz(a)")
sfu("rsq", 1, "sf_rsq(ftz(a))")
sfu("log2", 2, "sf_log2(ftz(a))")
sfu("exp2", 3, "sf_exp2(ftz(a))")
sfu("sin", 4, "sf_sin(ftz(a))")
sfu("cos", 5, "sf_cos(ftz(a))")
sfu("sqrt", 6, "sqrtf(ftz(a))")
sfu("hrsq", 9, "sf_rsq(ftz(a))", 16)
sfu("hlog2", 10, "sf_log2(ftz(a))", 16)
sfu("hexp2", 11, "sf_exp2(ftz(a))", 16)

# *** cat5: textures and data of other fibers; key = (5, opc), or (5, opc, bit 53, bits 20:19)
row("isam", (5, 0), "tex", note="integer texel coordinates, no filter; outside the image all channels are 0")
row("isaml", (5, 1), "tex")
row("sam", (5, 3), "tex", note="compute has no derivatives: level 0")
row("saml", (5, 5), "tex")
row("getsize", (5, 10), "getsize")
row("tcinv", (5, 28), "sync")
row("brcst.active", (5, 31, 0, 0), "lanes1", note="the last active fiber of a cluster's lower half gives its value to the upper half")
for _i, _n in enumerate(("brcst", "horiz", "vert", "diag")): row(f"quad_shuffle.{_n}", (5, 31, 1, _i), "lanes2" if _i == 0 else "lanes1")

# *** cat6: memory; classic key = (6, opc, type), with bit 52 (6, opc, type, 1), a6xx key = (6, "b", opc)
for _i, _t in enumerate(TYPES[:-1]):
  row(f"ldg.{_t}", (6, 0, _i), "ldg")
  row(f"ldl.{_t}", (6, 1, _i), "ldl")
  row(f"ldp.{_t}", (6, 2, _i), "ldl")
  row(f"stg.{_t}", (6, 3, _i), "stg")
  row(f"stl.{_t}", (6, 4, _i), "stl")
  row(f"stp.{_t}", (6, 5, _i), "stl")
  row(f"ldg.a.{_t}", (6, 0, _i, "a"), "ldg.a", note="base + (((src2 << shift) + offset) << log2(type size)), all in 64 bits")
  row(f"stg.a.{_t}", (6, 3, _i, "a"), "stg.a")
for _i, _t in enumerate(TYPES):
  if type_size(_t) == 4 and _t != "u8_32":
    row(f"ldg.k.{_t}", (6, 0, _i, "k"), "ldg.k")
    row(f"stc.{_t}", (6, 28, _i), "stc")
row("shfl", (6, 27), "shfl", note="the index is the same for all fibers; a source fiber that is not active gives nothing in particular")
# memory |= operation, old value returned; cmpxchg takes (data, compare), in the .b form (old, compare, data)
ATOMICS = {16: "add", 17: "sub", 18: "xchg", 21: "cmpxchg", 22: "min", 23: "max", 24: "and", 25: "or", 26: "xor"}
for _o, _n in ATOMICS.items():
  row(f"atomic.{_n}", (6, _o, "l"), "atomic.l")
  row(f"atomic.g.{_n}", (6, _o, "g"), "atomic.g")
  row(f"atomic.b.{_n}", (6, "b", _o), "atomic.b")
row("ldib.b", (6, "b", 6), "ldib")
row("stib.b", (6, "b", 29), "stib")
row("resinfo.b", (6, "b", 15), "resinfo")
row("ldc", (6, "b", 30), "ldc", note="offset and bound in units of 16 bytes")
row("ldc.k", (6, "b", 30, "k"), "ldc.k")

# *** cat7: synchronisation; key = (7, opc)
row("bar", (7, 0), "sync")
row("fence", (7, 1), "sync")
row("sleep", (7, 2), "sync")
row("icinv", (7, 3), "sync")

# What Mesa's tables know and this one leaves out: by the decoder's key, the name and why.
_GRAPHICS, _OPEN, _LATER = "for graphics stages", "Mesa's sources do not say what it computes", "not made for a630"
LEFT_OUT: dict[tuple, tuple[str, str]] = {
  (0, 0, 5): ("kill", _GRAPHICS), (0, 0, 7): ("emit", _GRAPHICS), (0, 0, 8): ("cut", _GRAPHICS), (0, 0, 9): ("chmask", _GRAPHICS),
  (0, 0, 10): ("chsh", _GRAPHICS), (0, 0, 11): ("flow_rev", _OPEN), (0, 0, 1, 6): ("brax", _OPEN), (0, 1, 0): ("bkt", _OPEN),
  (1, 1): ("movs", _LATER), (2, 57, 0): ("bary.f or flat.b", _GRAPHICS), (2, 58, 0): ("mgen.b", _OPEN), (2, 60, 0): ("setrm", _OPEN),
  (2, 62, 0): ("shb", _OPEN), (2, 63, 0): ("msad", _OPEN), (3, 0, 10): ("sel.s16", _OPEN), (3, 0, 11): ("sel.s32", _OPEN),
  (3, 0, 12): ("sel.f16", _OPEN), (3, 0, 13): ("sel.f32", _OPEN), (3, 1, 13): ("dp2acc or dp4acc", _LATER), (3, 1, 14): ("wmm", _LATER),
  **{(5, o): (n, "needs derivatives" if n in ("samb", "samgq", "getlod", "dsx", "dsy") else _GRAPHICS if "pp." in n or n[0] == "r"
              else "not modelled")
     for o, n in {2: "isamm", 4: "samb", 6: "samgq", 7: "getlod", 8: "conv", 9: "convm", 11: "getbuf", 12: "getpos", 13: "getinfo", 14: "dsx",
                  15: "dsy", 16: "gather4r", 17: "gather4g", 18: "gather4b", 19: "gather4a", 20: "samgp0", 21: "samgp1", 22: "samgp2", 23: "samgp3",
                  24: "dsxpp.1", 25: "dsypp.1", 26: "rgetpos", 27: "rgetinfo"}.items()},
  (6, 10): ("ldlw", _GRAPHICS), (6, 11): ("stlw", _GRAPHICS), (6, 31): ("ldlv", _GRAPHICS), (6, 19): ("atomic.inc", _OPEN),
  (6, 20): ("atomic.dec", _OPEN), (6, 15): ("resinfo", "replaced by resinfo.b on a6xx"), (6, 29): ("stsc", _LATER), (6, 14): ("ray_intersection",
      _LATER),
  (6, "b", 12): ("resbase", "bindless descriptors are not modelled"), (6, "b", 36): ("getspid", "names a physical processor"),
  (6, "b", 37): ("getwid", "names a physical wave slot"), (6, "b", 38): ("getfiberid", _LATER),
  (7, 4): ("dccln", _OPEN), (7, 5): ("dcinv", _OPEN), (7, 6): ("dcflu", _OPEN), (7, 7): ("lock or unlock", _LATER), (7, 8): ("alias", _LATER),
}

BY_KEY: dict[tuple, Row] = {r.key: r for r in ROWS}
BY_NAME: dict[str, Row] = {r.name: r for r in ROWS}
INDEX: dict[str, int] = {r.name: i for i, r in enumerate(ROWS)}
assert len(BY_KEY) == len(ROWS) == len(BY_NAME) and not BY_KEY.keys() & LEFT_OUT.keys(), "duplicate row"

# Source modifiers and other helpers the translator composes instructions from.
HELPERS: tuple[Lane, ...] = (
  Lane("neg.f32", "u32", ("u32",), "a ^ 0x80000000u"), Lane("abs.f32", "u32", ("u32",), "a & 0x7fffffffu"),
  Lane("nabs.f32", "u32", ("u32",), "a | 0x80000000u"),
  Lane("neg.f16", "u16", ("u16",), "a ^ 0x8000u"), Lane("abs.f16", "u16", ("u16",), "a & 0x7fffu"), Lane("nabs.f16", "u16", ("u16",), "a | 0x8000u"),
  Lane("neg.u32", "u32", ("u32",), "0u - a"), Lane("abs.u32", "u32", ("s32",), "a < 0 ? 0u - (uint32_t)a : (uint32_t)a"),
  Lane("nabs.u32", "u32", ("s32",), "a < 0 ? (uint32_t)a : 0u - (uint32_t)a"),
  Lane("neg.u16", "u16", ("u16",), "0u - a"), Lane("abs.u16", "u16", ("s16",), "a < 0 ? 0u - (uint32_t)a : (uint32_t)a"),
  Lane("nabs.u16", "u16", ("s16",), "a < 0 ? (uint32_t)a : 0u - (uint32_t)a"),
  Lane("not.u32", "u32", ("u32",), "~a"), Lane("not.u16", "u16", ("u16",), "~a"),
  Lane("sat.f32", "f32", ("f32",), "a > 0 ? (a < 1 ? a : 1.0f) : 0.0f"), Lane("sat.f16", "f16", ("f16",), "a > 0 ? (a < 1 ? a : 1.0f) : 0.0f"),
  Lane("halves.lo", "u16", ("u32",), "a"), Lane("halves.hi", "u16", ("u32",), "a >> 16"),
  Lane("merge.lo", "u32", ("u32", "u16"), "(a & 0xffff0000u) | b"), Lane("merge.hi", "u32", ("u32", "u16"), "(a & 0xffffu) | (b << 16)"),
)

def lanes() -> dict[str, Lane]:
  """Every lane function the engine must provide, by key, in a stable order."""
  out: dict[str, Lane] = {h.key: h for h in HELPERS}
  for s in TYPES:
    for d in TYPES:
      for rnd in range(4):
        if (c := cov_lane(s, d, rnd)) is not None: out[c.key] = c
  for r in ROWS:
    if not r.sem: continue
    for w in (r.width,) if r.width else (16, 32):
      for sat in (False, True) if r.sat not in ("", "clamp") else (False,):
        lane = r.lane(w, sat)
        out.setdefault(lane.key, lane)
  return out
