"""Single instructions, assembled by Mesa, executed by the native engine, against numpy over edge values.

The expectations are written from the ISA's description in plain numpy, not from the engine's table.
"""
import itertools
import numpy as np
import pytest
import tinygrad  # noqa: F401  (sets the recursion limit, which hypothesis wants to find as it was)
from hypothesis import HealthCheck, given, settings, strategies as st
from test.mockgpu.qcom.ir3.isa import BY_NAME, CONDS, ROWS, UnknownInstruction
from test.virtual.ir3_lab import pad, run

rng = np.random.default_rng(7)
np_err = {"all": "ignore"}
U = {16: np.uint16, 32: np.uint32}
S = {16: np.int16, 32: np.int32}
F = {16: np.float16, 32: np.float32}

INTS = {w: np.array([*{0, 1, 2, 3, 5, 7, 15, 16, 17, 31, 32, 33, 63, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0x8000, 0xffff, 0x10000, 0x7fffff, 0x800000,
                       0xffffff,
                       0x1000000, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff, 0x12345678, 0xdeadbeef}], np.uint64).astype(U[w]) for w in (16, 32)}
with np.errstate(over="ignore"):
  FLOATS = {w: np.array([0.0, -0.0, 0.5, -0.5, 1, -1, 1.5, -1.5, 2.5, -2.5, 3.49999, 0.1, -0.7, 7, 100.25, -1000.5, 4096.7, 65504, -65504, 65520, 1e9,
                         -3e9, 2147483648,
                           4294967040, 1e-3, -1e-6, 3e-5, 6e-8, 1e-40, -1e-40, 1.1754944e-38, 3.4e38, np.inf, -np.inf, np.nan],
                           np.float64).astype(F[w])
            for w in (16, 32)}

def flush(x: np.ndarray) -> np.ndarray:
  """Subnormals to signed zero."""
  tiny = np.finfo(x.dtype).tiny
  return np.where(np.abs(x) < tiny, np.copysign(x.dtype.type(0), x), x).astype(x.dtype)

def fop(fn, w: int):
  """A float operation with flushed inputs and outputs, rounded once to the width."""
  wide = np.float64 if w == 32 else np.float32
  def f(*args):
    with np.errstate(**np_err): return flush(np.asarray(fn(*(flush(a).astype(wide) for a in args))).astype(F[w]))
  return f

def minmax(pick):
  return lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, pick(a, b)))

def mad(w: int):
  def f(a, b, c):
    with np.errstate(**np_err):
      wide = np.float64 if w == 32 else np.float32
      p = flush((flush(a).astype(wide) * flush(b).astype(wide)).astype(F[w]))
      return flush((p.astype(wide) + flush(c).astype(wide)).astype(F[w]))
  return f

def pyint(fn, w: int, signed: bool, out: int | None = None):
  """An integer operation in Python ints, wrapped to `out` bits."""
  def f(*args):
    cols = [(a.view(S[w]) if signed else a).astype(object) for a in args]
    return np.array([int(fn(*v)) & ((1 << (out or w)) - 1) for v in zip(*cols)], U[out or w])
  return f

def s24(x: int) -> int: return ((x & 0xffffff) ^ 0x800000) - 0x800000
def clz(x: int, w: int) -> int: return w - x.bit_length() if x else -1

CMP = dict(zip(CONDS, (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)))

def expect(name: str, w: int):
  """(function on raw arrays, result kind u/f, result bits) of a row at operand width w."""
  if name.startswith(("cmps.f", "cmpv.f")):
    c = CMP[name[7:]]
    one = 1 if name[3] == "s" else (1 << w) - 1
    def f(a, b):
      with np.errstate(**np_err): return np.where(c(flush(a), flush(b)), one, 0).astype(U[w])
    return f, "u", w
  if name.startswith("cmp"):
    c, one = CMP[name[7:]], 1 if name[3] == "s" else (1 << w) - 1
    view = S[w] if name[5] == "s" else U[w]
    return lambda a, b: np.where(c(a.view(view), b.view(view)), one, 0).astype(U[w]), "u", w
  sh = w - 1
  ints = {
    "add.u": (lambda a, b: a + b, False), "add.s": (lambda a, b: a + b, True), "sub.u": (lambda a, b: a - b, False),
    "sub.s": (lambda a, b: a - b, True),
    "min.u": (min, False), "min.s": (min, True), "max.u": (max, False), "max.s": (max, True), "absneg.s": (lambda a: a, True),
    "and.b": (lambda a, b: a & b, False), "or.b": (lambda a, b: a | b, False), "not.b": (lambda a: ~a, False), "xor.b": (lambda a, b: a ^ b, False),
    "bfrev.b": (lambda a: int(f"{a:0{w}b}"[::-1], 2), False), "clz.b": (lambda a: clz(a, w), False),
    "clz.s": (lambda a: clz(a if a >= 0 else ~a, w), True),
    "shl.b": (lambda a, b: a << (b & sh), False), "shr.b": (lambda a, b: a >> (b & sh), False), "ashr.b": (lambda a, b: a >> (b & sh), True),
    "getbit.b": (lambda a, b: a >> (b & sh) & 1, False), "cbits.b": (lambda a: bin(a).count("1"), False),
    "mad.u16": (lambda a, b, c: a * b + c, False), "mad.s16": (lambda a, b, c: a * b + c, True),
    "madsh.u16": (lambda a, b, c: ((a & 0xffff) * (b >> 16) << 16) + c, False),
    "madsh.m16": (lambda a, b, c: ((a & 0xffff) * (b >> 16) << 16) + c, False),
    "mad.u24": (lambda a, b, c: (a & 0xffffff) * (b & 0xffffff) + c, False), "mad.s24": (lambda a, b, c: s24(a) * s24(b) + c, True),
    "sel.b16": (lambda a, b, c: a if b else c, False), "sel.b32": (lambda a, b, c: a if b else c, False),
    "sad.s16": (lambda a, b, c: abs(a - b) + c, True), "sad.s32": (lambda a, b, c: abs(a - b) + c, True),
    "shrm": (lambda a, b, c: b >> (a & sh) & c, False), "shlm": (lambda a, b, c: b << (a & sh) & c, False),
    "shrg": (lambda a, b, c: b >> (a & sh) | c, False), "shlg": (lambda a, b, c: b << (a & sh) | c, False),
    "andg": (lambda a, b, c: b & a | c, False)}
  if name in ints: return pyint(*((ints[name][0], w, ints[name][1]))), "u", w
  if name in ("mul.u24", "mul.s24", "mull.u"):
    fn = {"mul.u24": lambda a, b: (a & 0xffffff) * (b & 0xffffff), "mul.s24": lambda a, b: (a if w == 16 else s24(a)) * (b if w == 16 else s24(b)),
          "mull.u": lambda a, b: (a & 0xffff) * (b & 0xffff)}[name]
    return pyint(fn, w, name == "mul.s24", 32), "u", 32
  if name in ("mad.f16", "mad.f32"): return mad(w), "f", w
  floats = {"add.f": np.add, "mul.f": np.multiply, "min.f": minmax(np.minimum), "max.f": minmax(np.maximum),
            "sign.f": lambda a: np.nan_to_num(np.sign(a)),
            "floor.f": np.floor, "ceil.f": np.ceil, "rndne.f": np.rint, "trunc.f": np.trunc,
            "rndaz.f": lambda a: np.where(np.isfinite(a) & (np.abs(a) < 2.0 ** 52), np.copysign(np.floor(np.abs(a) + 0.5), a), a)}
  if name == "absneg.f": return lambda a: a, "f", w
  return fop(floats[name], w), "f", w

SFU = {"rcp": (np.reciprocal, 2.5), "rsq": (lambda x: 1 / np.sqrt(x), 2), "sqrt": (np.sqrt, 3), "exp2": (np.exp2, None), "log2": (np.log2, 3),
       "sin": (np.sin, None),
       "cos": (np.cos, None), "hrsq": (lambda x: 1 / np.sqrt(x), 2), "hlog2": (np.log2, 3), "hexp2": (np.exp2, None)}

def operands(name: str, w: int, n: int, fl: bool) -> list[np.ndarray]:
  base = FLOATS[w] if fl else INTS[w]
  if n == 1: return list(pad(np.concatenate([base, rng.integers(0, 1 << w, 64, dtype=np.uint64).astype(U[w]).view(base.dtype)])))
  pairs = np.array(list(itertools.product(range(len(base)), repeat=2)))
  cols = [base[pairs[:, 0]], base[pairs[:, 1]]]
  if n == 3: cols.append(base[rng.integers(0, len(base), len(pairs))])
  return list(pad(*cols))

def same(got: np.ndarray, want: np.ndarray, inputs: list[np.ndarray], what: str) -> None:
  """Bit equality, any NaN for a NaN, either zero where the sign of zero is open."""
  eq = got == want
  if want.dtype.kind == "f": eq |= np.isnan(got) & np.isnan(want)
  bad = np.flatnonzero(~eq)
  if bad.size == 0: return
  k = bad[0]
  raise AssertionError(f"{what}: {bad.size} lanes differ, first: inputs {[i[k] for i in inputs]} gave {got[k]!r}, expected {want[k]!r}")

ALU = [(r.name, w) for r in ROWS if r.form in ("cat2", "cat3", "cat3b") for w in ((r.width,) if r.width else (16, 32))]

@pytest.mark.parametrize("name,w", ALU, ids=lambda v: str(v))
def test_alu_row_computes_what_numpy_does(name, w):
  row = BY_NAME[name]
  n = len(row.sem.split(":")[1].split(","))
  fl = row.sem.split(":")[1].startswith("f")
  fn, kind, out = expect(name, w)
  ins = operands(name, w, n, fl)
  h, ho = "h" if w == 16 else "", "h" if out == 16 else ""
  regs = [f"{h}r{k + 1}.x" for k in range(n)]
  got = run(f"{name} {ho}r8.x, {', '.join(regs)}", {r: a.view(U[w]) for r, a in zip(regs, ins)},
            {f"{ho}r8.x": (F if kind == "f" else U)[out]})[f"{ho}r8.x"]
  same(got, fn(*(a if fl else a.view(U[w]) for a in ins)), ins, f"{name} at {w} bits")

@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(ALU), st.integers(0, 1 << 30), st.lists(st.integers(0, (1 << 32) - 1), max_size=3), st.sampled_from(("", "(rpt1)", "c20.y")))
def test_alu_rows_on_any_bits(case, seed, first, how):
  """As above on random patterns of few and many bits, and those that hypothesis picks; also repeated, and with a constant in the first place."""
  gen = np.random.default_rng(seed)
  words = (gen.integers(0, 1 << 32, 192) >> gen.integers(0, 32, 192) << gen.integers(0, 8, 192)).tolist()
  for k, v in enumerate(first): words[64 * k] = v
  name, w = case
  row = BY_NAME[name]
  n, fl = len(row.sem.split(":")[1].split(",")), row.sem.split(":")[1].startswith("f")
  fn, kind, out = expect(name, w)
  h, ho = "h" if w == 16 else "", "h" if out == 16 else ""
  ins = [np.array(words[64 * k:64 * k + 64], np.uint64).astype(U[w]) for k in range(n)]
  typed = [a.view(F[w]) if fl else a for a in ins]
  const = how[:1] == "c" and row.form != "cat3b"
  if const: ins[0] = np.full(64, ins[0][0])
  value = int(ins[0][0])
  if const and w == 16 and fl: value = int(ins[0][:1].view(np.float16).astype(np.float32).view(np.uint32)[0])     # demotion converts it back
  typed[0] = ins[0].view(F[w]) if fl else ins[0]
  regs = [f"{h}r{k + 1}.x" for k in range(n)]
  shown = [f"{h}c20.y", *regs[1:]] if const else regs
  got = run(f"{how if how[:1] == '(' else ''}{name} {ho}r8.x, {', '.join(shown)}", dict(zip(regs, ins)), {f"{ho}r8.x": (F if kind == "f"
      else U)[out]},
            consts={81: value})[f"{ho}r8.x"]
  want = fn(*typed)
  if const and w == 16 and fl: typed[0] = flush(typed[0])
  if name == "absneg.f" and const and w == 16: want = flush(want)      # the demotion is arithmetic
  same(got, want, typed, f"{how}{name} at {w} bits")

@pytest.mark.parametrize("name,w", [(r.name, w) for r in ROWS if r.form == "cat4" for w in ((r.width,) if r.width else (16, 32))], ids=str)
def test_special_function_is_within_its_bound(name, w):
  fn, ulp = SFU[name]
  base = FLOATS[w] if name not in ("sin", "cos") else np.linspace(-np.pi, np.pi, 256).astype(F[w])
  span = 20 if w == 32 else 9
  x, = pad(np.concatenate([base, np.exp(rng.uniform(-span, span, 512)).astype(F[w])]) if name not in ("sin", "cos") else base)
  if name in ("exp2", "hexp2"): x, = pad(np.concatenate([base, rng.uniform(-140, 140, 512).astype(F[w])]))
  h = "h" if w == 16 else ""
  got = run(f"{name} {h}r8.x, {h}r1.x", {f"{h}r1.x": x.view(U[w])}, {f"{h}r8.x": F[w]})[f"{h}r8.x"]
  with np.errstate(**np_err):
    exact = fn(flush(x).astype(np.float64))
    want = flush(exact.astype(F[w]))
    special = ~np.isfinite(want) | (want == 0)
    same(np.where(special, got, 0).astype(F[w]), np.where(special, want, 0).astype(F[w]), [x], f"{name} special values")
    err = np.abs(got.astype(np.float64) - exact)
    unit = np.spacing(np.abs(want)).astype(np.float64)
    bound = 2.0 ** -11 + unit if ulp is None and name in ("sin", "cos") else (3 + 2
        * np.abs(np.nan_to_num(x.astype(np.float64), posinf=0, neginf=0))) * unit if ulp is None \
      else np.maximum(ulp * unit, 2.0 ** -21 if "log" in name else 0)
    assert np.all(special | (err <= bound)), f"{name}: worst {np.max(np.where(special, 0, err / unit))} ulp"

INT_T = ("u16", "u32", "s16", "s32")
def np_type(t: str): return np.dtype({"f": "f", "u": "u", "s": "i"}[t[0]] + str(int(t[1:]) // 8))

@pytest.mark.parametrize("src,dst", [(s, d) for s in (*INT_T, "f16", "f32") for d in (*INT_T, "f16", "f32") if s != d], ids=str)
def test_conversion(src, dst):
  ws, wd = int(src[1:]), int(dst[1:])
  x, = pad(FLOATS[ws] if src[0] == "f" else INTS[ws])
  hs, hd = "h" if ws == 16 else "", "h" if wd == 16 else ""
  got = run(f"cov.{src}{dst} {hd}r8.x, {hs}r1.x", {f"{hs}r1.x": x.view(U[ws])}, {f"{hd}r8.x": np_type(dst)})[f"{hd}r8.x"]
  v = x.view(np_type(src))
  with np.errstate(**np_err):
    if src[0] == "f" and dst[0] != "f":
      info = np.iinfo(np_type(dst))
      want = np.array([0 if np.isnan(f) else info.max if f >= info.max else info.min if f <= info.min else int(f) for f in v.astype(np.float64)],
                      np_type(dst))
    elif src[0] == "f" or dst[0] == "f": want = flush((flush(v) if src[0] == "f" else v).astype(np_type(dst)))
    else: want = v.astype(np_type(dst))
  same(got, want, [v], f"cov.{src}{dst}")

def test_bytes_convert_with_the_a6xx_sign_oddity():
  x = np.arange(256, dtype=np.uint16).repeat(1)
  out = run("cov.u8s16 hr2.x, hr1.x\ncov.u8s32 r2.x, hr1.x\ncov.u8u16 hr3.x, hr1.x\ncov.s16u8 hr4.x, hr1.x\ncov.u8u16 hr3.y, hr4.x",
            {"hr1.x": x | 0x4200},
            {"hr2.x": np.int16, "r2.x": np.int32, "hr3.x": np.uint16, "hr4.x": np.uint16})
  signed = x.astype(np.uint8).view(np.int8)
  assert (out["hr2.x"] == signed).all() and (out["r2.x"] == signed).all() and (out["hr3.x"].view(np.int16) == signed).all() and (out["hr4.x"] & 0xff
                                                                                                                                 == x).all()

@pytest.mark.parametrize("src", ("u16", "s16", "u32", "s32"))
def test_narrowing_to_a_byte_keeps_the_low_eight_bits(src):
  w = int(src[1:])
  h = "h" if w == 16 else ""
  x, = pad(INTS[w])
  mem = run(f"cov.{src}u8 hr4.x, {h}r1.x\nmov.u32u32 r9.x, 0\nstp.u8 p[r9.x], hr4.x, 1\nldp.u8 hr5.x, p[r9.x], 1", {f"{h}r1.x": x},
            {"hr5.x": np.uint16},
            pvt_bytes=512)
  assert (mem["hr5.x"] == x & 0xff).all()

MODS = {"": lambda v: v, "(neg)": lambda v: -v, "(abs)": np.abs, "(absneg)": lambda v: -np.abs(v)}

@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("w", (16, 32))
def test_float_and_integer_source_modifiers(mod, w):
  h = "h" if w == 16 else ""
  f, i = pad(FLOATS[w], INTS[w])
  out = run(f"absneg.f {h}r4.x, {mod}{h}r1.x\nabsneg.s {h}r5.x, {mod}{h}r2.x\nadd.f {h}r6.x, {mod}{h}r1.x, {mod}{h}r1.x" if mod else
            f"absneg.f {h}r4.x, {h}r1.x\nabsneg.s {h}r5.x, {h}r2.x\nadd.f {h}r6.x, {h}r1.x, {h}r1.x", {f"{h}r1.x": f.view(U[w]), f"{h}r2.x": i},
            {f"{h}r4.x": F[w], f"{h}r5.x": S[w], f"{h}r6.x": F[w]})
  with np.errstate(**np_err):
    same(out[f"{h}r4.x"], MODS[mod](f), [f], "absneg.f")
    same(out[f"{h}r5.x"], MODS[mod](i.view(S[w])), [i], "absneg.s")
    g = flush(MODS[mod](f))
    same(out[f"{h}r6.x"], flush(g + g), [f], "add.f")

@pytest.mark.parametrize("name", ("add.f", "mul.f", "max.f", "min.f", "mad.f32"))
def test_float_saturation_clamps_and_makes_nan_zero(name):
  a, b = pad(*operands(name, 32, 2, True))
  three = name.startswith("mad")
  got = run(f"(sat){name} r8.x, r1.x, r2.x" + (", r1.x" if three else ""), {"r1.x": a.view(np.uint32), "r2.x": b.view(np.uint32)},
            {"r8.x": np.float32})["r8.x"]
  want = expect(name, 32)[0](a, b, *((a,) if three else ()))
  same(got, np.where(np.isnan(want), np.float32(0), np.clip(want, 0, 1)).astype(np.float32), [a, b], f"(sat){name}")

@pytest.mark.parametrize("w", (16, 32))
def test_integer_saturation(w):
  a, b = operands("add.u", w, 2, False)
  h = "h" if w == 16 else ""
  ops = {"add.u": lambda x, y: x + y, "sub.u": lambda x, y: x - y, "add.s": lambda x, y: x + y, "sub.s": lambda x, y: x - y}
  for name, fn in ops.items():
    got = run(f"(sat){name} {h}r8.x, {h}r1.x, {h}r2.x", {f"{h}r1.x": a, f"{h}r2.x": b}, {f"{h}r8.x": U[w]})[f"{h}r8.x"]
    view, lo, hi = (U[w], 0, (1 << w) - 1) if name[-1] == "u" else (S[w], -(1 << (w - 1)), (1 << (w - 1)) - 1)
    want = np.array([min(max(fn(int(x), int(y)), lo), hi) for x, y in zip(a.view(view), b.view(view))], view)
    same(got.view(view), want, [a, b], f"(sat){name}")

def test_saturation_without_a_known_meaning_is_refused():
  with pytest.raises(UnknownInstruction, match="and.b"): run("(sat)and.b r8.x, r1.x, r2.x",
                                                             {"r1.x": INTS[32][:64].repeat(3)[:64], "r2.x": INTS[32].repeat(3)[:64]},
                                                             {"r8.x": np.uint32})

@pytest.mark.parametrize("w", (16, 32))
def test_subnormals_are_flushed_by_arithmetic_and_kept_by_moves(w):
  """turnip, which passes Vulkan's conformance tests on a6xx, offers flush to zero for 16 and 32 bits and preservation for neither, and switches no
  mode for it (tu_device.cc: shaderDenormFlushToZeroFloat16/32 true, shaderDenormPreserveFloat16/32 false): the hardware always flushes."""
  h, one, tiny = "h" if w == 16 else "", F[w](1), F[w](np.finfo(F[w]).tiny)
  mags = np.arange(1, 1024, dtype=np.uint16) if w == 16 else np.unique(rng.integers(1, 1 << 23, 500, dtype=np.uint32))
  x, = pad(np.concatenate([mags, mags | U[w](1 << (w - 1))]).astype(U[w]))
  zero = np.copysign(F[w](0), x.view(F[w])).view(U[w])
  other = F[32 if w == 16 else 16]
  ho = "" if w == 16 else "h"
  ins = {f"{h}r1.x": x, f"{h}r2.x": np.full(len(x), one.view(U[w])), f"{h}r3.x": np.full(len(x), tiny.view(U[w]))}
  text = (f"add.f {h}r5.x, {h}r1.x, {h}r1.x\nmul.f {h}r5.y, {h}r1.x, {h}r2.x\nmad.f{w} {h}r5.z, {h}r1.x, {h}r2.x, {h}r1.x\n"
          f"max.f {h}r5.w, {h}r1.x, {h}r1.x\nfloor.f {h}r6.x, {h}r1.x\ncov.f{w}f{48 - w} {ho}r6.y, {h}r1.x\ncmps.f.eq {h}r6.z, {h}r1.x, {h}(0.0)\n"
          f"mul.f {h}r6.w, {h}r3.x, {h}(0.5)\nsub.u {h}r9.x, {h}r3.x, 1\nadd.f {h}r7.x, {h}r3.x, (neg){h}r9.x\nrcp {h}r7.y, {h}r1.x\n"
          f"{'hlog2' if w == 16 else 'log2'} {h}r7.z, {h}r1.x\n"
          f"mov.f{w}f{w} {h}r8.x, {h}r1.x\nabsneg.f {h}r8.y, (neg){h}r1.x\nsel.b{w} {h}r8.z, {h}r1.x, {h}r2.x, {h}r3.x")
  out = run(text, ins, {f"{h}r5.{c}": U[w] for c in "xyzw"} | {f"{h}r6.x": U[w], f"{ho}r6.y": other, f"{h}r6.z": U[w], f"{h}r6.w": F[w],
                                                               f"{h}r7.x": F[w],
                        f"{h}r7.y": F[w], f"{h}r7.z": F[w]} | {f"{h}r8.{c}": U[w] for c in "xyz"})
  for r in ("5.x", "5.y", "5.z", "5.w", "6.x"): same(out[f"{h}r{r}"], zero, [x], f"r{r}")
  same(out[f"{ho}r6.y"], np.copysign(other(0), x.view(F[w]).astype(np.float64)).astype(other), [x], "cov")
  assert (out[f"{h}r6.z"] == 1).all(), "a subnormal equals zero"
  assert (out[f"{h}r6.w"] == 0).all(), "a result below the normal range"
  assert (out[f"{h}r7.x"] == tiny).all(), "a subnormal operand of a sum"
  assert (out[f"{h}r7.y"] == np.copysign(np.inf, x.view(F[w]).astype(np.float64))).all() and np.isneginf(out[f"{h}r7.z"]).all()
  same(out[f"{h}r8.x"], x, [x], "mov")
  same(out[f"{h}r8.y"], x ^ U[w](1 << (w - 1)), [x], "absneg")
  same(out[f"{h}r8.z"], x, [x], "sel")

WIDTH_MIXES = ("and.b r8.x, hr1.x, hr2.x", "mul.f r8.x, hr1.x, hr2.x", "add.f r8.x, hr1.x, hr2.x", "cmps.f.lt r8.x, hr1.x, hr2.x", "add.u r8.x, "
               "hr1.x, hr2.x",
               "min.s r8.x, hr1.x, hr2.x", "mul.f hr8.x, r1.x, r2.x", "add.u hr8.x, r1.x, r2.x", "ashr.b hr8.x, r1.x, r2.x",
               "add.f hr8.x, r1.x, r2.x",
               "cmps.u.lt hr8.x, r1.x, r2.x", "shr.b hr8.x, r1.x, r2.x")

@pytest.mark.parametrize("text", WIDTH_MIXES)
def test_result_in_the_other_width(text):
  name, dst = text.split()[:2]
  w = 16 if "hr1" in text else 32
  fl = ".f" in name
  a, b = operands(name, w, 2, fl)
  fn, kind, _ = expect(name, w)
  h = "h" if w == 16 else ""
  out = 16 if dst[0] == "h" else 32
  res = (F if kind == "f" else S if name in ("min.s", "ashr.b") else U)
  got = run(text, {f"{h}r1.x": a.view(U[w]), f"{h}r2.x": b.view(U[w])}, {dst.rstrip(","): res[out]})[dst.rstrip(",")]
  with np.errstate(**np_err): want = fn(a if fl else a.view(U[w]), b if fl else b.view(U[w])).view(res[w]).astype(res[out])
  same(got, flush(want) if kind == "f" else want, [a, b], text)

def test_immediates_constants_and_float_table():
  x, = pad(INTS[32])
  f = np.linspace(-3, 3, len(x), dtype=np.float32)
  out = run("add.u r8.x, r1.x, 1023\nadd.u r8.y, r1.x, -1024\nsub.u r8.z, r1.x, c20.y\nmul.f r8.w, r2.x, (pi)\nmul.f r9.x, r2.x, (1/log2(10))\n"
            "and.b r9.y, r1.x, c20.z\n"
            "mov.u32u32 r9.z, 0x89abcdef", {"r1.x": x, "r2.x": f.view(np.uint32)},
            {r: np.uint32 for r in ("r8.x", "r8.y", "r8.z", "r8.w", "r9.x", "r9.y", "r9.z")},
            consts={81: 77, 82: 0xf0f0f0f0})
  same(out["r8.x"], x + np.uint32(1023), [x], "+1023")
  same(out["r8.y"], x - np.uint32(1024), [x], "-1024")
  same(out["r8.z"], x - np.uint32(77), [x], "const")
  same(out["r8.w"].view(np.float32), f * np.float32(np.pi), [f], "pi")
  same(out["r9.x"].view(np.float32), f * np.float32(np.log10(2)), [f], "1/log2(10)")
  same(out["r9.y"], x & np.uint32(0xf0f0f0f0), [x], "and const")
  assert (out["r9.z"] == 0x89abcdef).all()

def test_half_constants_are_demoted_by_operand_class():
  """A half operand reads the 32-bit constant: float operations convert it, others take the low 16 bits."""
  x, = pad(FLOATS[16])
  i, = pad(INTS[16], x[:1])[:1]
  n = len(x)
  out = run("add.f hr8.x, hr1.x, hc20.x\nadd.u hr8.y, hr2.x, hc20.y", {"hr1.x": x.view(np.uint16), "hr2.x": np.resize(i, n)},
            {"hr8.x": np.float16, "hr8.y": np.uint16},
            consts={80: int(np.float32(1.5).view(np.uint32)), 81: 0xabcd1234})
  with np.errstate(**np_err): same(out["hr8.x"], flush(flush(x) + np.float16(1.5)), [x], "demoted float")
  same(out["hr8.y"], np.resize(i, n) + np.uint16(0x1234), [i], "demoted int")

def test_repeat_advances_destination_and_marked_sources():
  a, b = pad(INTS[32], INTS[32][::-1].copy())
  ins = {f"r1.{c}": a + np.uint32(k) for k, c in enumerate("xyzw")} | {f"r2.{c}": b ^ np.uint32(k) for k, c in enumerate("xyzw")}
  out = run("(rpt3)add.u r8.x, (r)r1.x, r2.y\n(rpt3)mov.u32u32 r9.x, (r)r1.x\n(rpt3)shrg r10.x, 3, (r)r1.x, (r)r2.x\n"
            "(rpt2)sub.u r11.x, c20.x, (r)r1.y", ins,
            {f"r{r}.{c}": np.uint32 for r in (8, 9, 10) for c in "xyzw"} | {f"r11.{c}": np.uint32 for c in "xyz"}, consts={80: 1000})
  for k, c in enumerate("xyzw"):
    same(out[f"r8.{c}"], ins[f"r1.{c}"] + ins["r2.y"], [a], "add")
    same(out[f"r9.{c}"], ins[f"r1.{c}"], [a], "mov")
    same(out[f"r10.{c}"], ins[f"r1.{c}"] >> np.uint32(3) | ins[f"r2.{c}"], [a], "shrg")
    if k < 3: same(out[f"r11.{c}"], np.uint32(1000) - ins[f"r1.{'yzw'[k]}"], [a], "const minus")

WORDS = ("f16", "f32", "u16", "u32", "s16", "s32")

@pytest.mark.parametrize("t", WORDS)
def test_moves_of_every_type_copy_bits(t):
  """mov, swz, gat, sct move raw bits, NaN payloads and subnormals included, whatever the type says."""
  w = int(t[1:])
  h, x = "h" if w == 16 else "", pad(np.concatenate([INTS[w], FLOATS[w].view(U[w])]))[0]
  ins = {f"{h}r1.{c}": np.roll(x, k) for k, c in enumerate("xyzw")}
  out = run(f"mov.{t}{t} {h}r2.x, {h}r1.x\nswz.{t}{t} {h}r3.x, {h}r3.y, {h}r1.y, {h}r1.x\ngat.{t}{t} {h}r4.x, {h}r1.w, {h}r1.z, {h}r1.y, {h}r1.x\n"
            f"sct.{t}{t} {h}r5.x, {h}r6.y, {h}r7.z, {h}r8.w, {h}r1.x", ins,
            {f"{h}r{r}": U[w] for r in ("2.x", "3.x", "3.y", "4.x", "4.w", "5.x", "8.w")})
  for r, c in (("2.x", "x"), ("3.x", "y"), ("3.y", "x"), ("4.x", "w"), ("4.w", "x"), ("5.x", "x"), ("8.w", "w")):
    same(out[f"{h}r{r}"], ins[f"{h}r1.{c}"], [x], f"{t} r{r}")

@pytest.mark.parametrize("t", (*WORDS, "u8"))
def test_memory_of_every_type(t):
  """Loads and stores of each type and component count through global, local and private memory keep bits."""
  size = int(t[1:]) // 8
  h, dt = "" if size == 4 else "h", np.uint32 if size == 4 else np.uint16
  ins = {f"{h}r1.{c}": (rng.integers(0, 1 << 8 * size, 64)).astype(dt) for c in "xyzw"}
  for n in (1, 2, 3, 4):
    out = run(f"mull.u r9.x, r0.x, {n * size}\nmov.u32u32 r9.y, 0\nstl.{t} l[r9.x], {h}r1.x, {n}\nldl.{t} {h}r2.x, l[r9.x], {n}\n"
              f"stp.{t} p[r9.y+16], {h}r2.x, {n}\n"
              f"ldp.{t} {h}r3.x, p[r9.y+16], {n}\nmull.u r10.x, r0.x, {n * size}\nadd.u r10.x, r10.x, c20.x\nmov.u32u32 r10.y, 0\n"
              f"stg.{t} g[r10.x], {h}r3.x, {n}\n"
              f"ldg.{t} {h}r4.x, g[r10.x], {n}", ins, {f"{h}r4.{c}": dt for c in "xyzw"[:n]}, consts={80: 0x700000}, local_bytes=4096, pvt_bytes=512,
              scratch=0x700000)
    for c in "xyzw"[:n]: same(out[f"{h}r4.{c}"], ins[f"{h}r1.{c}"], [], f"{t} x{n} .{c}")

def test_movmsk_gives_the_active_fibers():
  x = np.arange(64, dtype=np.uint32)
  out = run("cmps.u.lt p0.x, r1.x, 40\nmov.u32u32 r2.x, 0\nmov.u32u32 r2.y, 0\nbr !p0.x, #2\nmovmsk.w64 r2.x\n(jp)nop\n(sy)fence.g.l.r.w\nicinv",
            {"r1.x": x},
            {"r2.x": np.uint32, "r2.y": np.uint32})
  assert (out["r2.x"] == np.where(x < 40, 0xffffffff, 0)).all() and (out["r2.y"] == np.where(x < 40, 0xff, 0)).all()

def test_byte_moves_keep_the_low_byte():
  x = np.arange(64, dtype=np.uint16) * 5
  out = run("mov.u8u8 hr2.x, hr1.x\ncov.u8u32 r2.x, hr1.x", {"hr1.x": x}, {"hr2.x": np.uint16, "r2.x": np.int32})
  assert (out["hr2.x"] & 0xff == x & 0xff).all() and (out["r2.x"] == (x & 0xff).astype(np.uint8).view(np.int8)).all()

ROUNDINGS = {1: "even", 2: "up", 3: "down", 0: "zero"}

@pytest.mark.parametrize("rnd", ROUNDINGS)
@pytest.mark.parametrize("src,dst", (("f32", "f16"), ("u32", "f32"), ("s32", "f32"), ("f32", "s32"), ("f32", "u32"), ("f16", "s16")))
def test_explicit_rounding(src, dst, rnd):
  """Bits 56:55 of cov. Mesa's assembler has no syntax for them, so they are set by hand; 0 means truncation for an engine set up that way."""
  from test.mockgpu.qcom.ir3.native import Engine
  ws, wd = int(src[1:]), int(dst[1:])
  vals = np.concatenate([FLOATS[ws], rng.standard_normal(64).astype(F[ws]) * F[ws](30)]) if src[0] == "f" else np.concatenate([INTS[32],
      rng.integers(0, 1 << 32, 64, dtype=np.uint32)])
  x, = pad(vals)
  hs, hd = "h" if ws == 16 else "", "h" if wd == 16 else ""
  def patch(code):
    words = np.frombuffer(code, np.uint64).copy()
    hit = [k for k, v in enumerate(words.tolist()) if v >> 61 == 1 and (v >> 50 & 7) != (v >> 46 & 7)]
    assert len(hit) == 1
    words[hit[0]] |= np.uint64(rnd << 55)
    return words.tobytes()
  got = run(f"cov.{src}{dst} {hd}r8.x, {hs}r1.x", {f"{hs}r1.x": x.view(U[ws])}, {f"{hd}r8.x": np_type(dst)}, patch=patch,
            eng=Engine(cov_round=0))[f"{hd}r8.x"]
  v = x.view(np_type(src)).astype(np.float64)
  with np.errstate(**np_err):
    if dst[0] != "f":
      info, r = np.iinfo(np_type(dst)), {"even": np.rint, "up": np.ceil, "down": np.floor,
                                         "zero": np.trunc}[ROUNDINGS[rnd]](flush(x.view(F[ws])).astype(np.float64))
      want = np.array([0 if np.isnan(f) else int(min(max(f, info.min), info.max)) for f in r], np_type(dst))
    else:
      near = v.astype(F[wd])
      wide, toward = near.astype(np.float64), {"up": np.inf, "down": -np.inf, "zero": 0}.get(ROUNDINGS[rnd])
      over = {"even": wide != wide, "up": wide < v, "down": wide > v, "zero": np.abs(wide) > np.abs(v)}[ROUNDINGS[rnd]]
      want = near if toward is None else np.where(over, np.nextafter(near, F[wd](toward)), near)
      want = flush(want.astype(F[wd]))
  same(got, want, [v], f"cov.{src}{dst} rounding {ROUNDINGS[rnd]}")

def test_swz_gat_sct_read_all_sources_first():
  ins = {f"r1.{c}": np.arange(64, dtype=np.uint32) * 7 + k for k, c in enumerate("xyzw")}
  out = run("swz.u32u32 r1.x, r1.y, r1.y, r1.x\ngat.u32u32 r4.x, r1.w, r1.z, r1.y, r1.x\nsct.u32u32 r5.w, r6.y, r7.z, r8.x, r4.x", ins,
            {"r1.x": np.uint32, "r1.y": np.uint32, "r4.x": np.uint32, "r4.w": np.uint32, "r5.w": np.uint32, "r8.x": np.uint32})
  assert (out["r1.x"] == ins["r1.y"]).all() and (out["r1.y"] == ins["r1.x"]).all()
  assert (out["r4.x"] == ins["r1.w"]).all() and (out["r4.w"] == ins["r1.y"]).all()
  assert (out["r5.w"] == ins["r1.w"]).all() and (out["r8.x"] == ins["r1.y"]).all()

def test_relative_registers_and_constants():
  k = (np.arange(64) % 8).astype(np.uint16)
  vals = {f"r{4 + n // 4}.{'xyzw'[n % 4]}": np.arange(64, dtype=np.uint32) * 100 + n for n in range(8)}
  out = run("mova a0.x, hr1.x\nmov.u32u32 r8.x, r<a0.x + 16>\nmov.u32u32 r8.y, c<a0.x + 80>\nmov.u32u32 r<a0.x + 40>, r8.x\nmov.u32u32 r9.x, r10.x\n"
            "mov.u32u32 r9.y, r11.w",
            {"hr1.x": k, "r10.x": np.zeros(64, np.uint32), "r11.w": np.zeros(64, np.uint32)} | vals,
            {r: np.uint32 for r in ("r8.x", "r8.y", "r9.x", "r9.y")},
            consts={80 + n: 1000 + n for n in range(8)})
  lane = np.arange(64)
  assert (out["r8.x"] == lane * 100 + k).all() and (out["r8.y"] == 1000 + k).all()
  assert (out["r9.x"] == np.where(k == 0, lane * 100, 0)).all() and (out["r9.y"] == np.where(k == 7, lane * 100 + 7, 0)).all()

def test_merged_halves_overlay_full_registers():
  x, = pad(INTS[32])
  out = run("add.u hr2.y, hr2.x, hr2.x\nmov.u32u32 r8.x, r1.x", {"r1.x": x}, {"r8.x": np.uint32}, merged=True)
  lo = x & np.uint32(0xffff)
  same(out["r8.x"], lo | (lo + lo) << np.uint32(16), [x], "merged add")

def test_relative_halves_of_merged_registers():
  """a0.x counts halves: hr16 is the low half of r8.x, hr16.y its high half."""
  k, v = (np.arange(64) % 8).astype(np.uint16), (np.arange(64) * 100).astype(np.uint16)
  fill = "".join(f"mov.u16u16 hr{16 + n // 4}.{'xyzw'[n % 4]}, {n + 1}\n" for n in range(8))
  out = run(fill + "mova a0.x, hr1.x\nmov.u16u16 hr20.x, hr<a0.x + 64>\nmov.u16u16 hr<a0.x + 64>, hr2.x\nmov.u16u16 hr20.y, hr17.y\n"
            "mov.u16u16 hr20.z, hr17.z",
            {"hr1.x": k, "hr2.x": v}, {r: np.uint16 for r in ("hr20.x", "hr20.y", "hr20.z")}, merged=True)
  assert (out["hr20.x"] == k + 1).all()
  assert (out["hr20.y"] == np.where(k == 5, v, 6)).all() and (out["hr20.z"] == np.where(k == 6, v, 7)).all()

def test_predicates_are_true_for_any_nonzero_result():
  x, = pad(INTS[32])
  out = run("and.b p0.y, r1.x, 3\ncmps.u.lt p0.x, r1.x, 100\nmov.u32u32 r8.x, 0\nmov.u32u32 r8.y, 0\nbr p0.y, #2\nmov.u32u32 r8.x, 1\n"
            "(jp)braa p0.x, !p0.y, #2\nmov.u32u32 r8.y, 1\n(jp)nop",
            {"r1.x": x}, {"r8.x": np.uint32, "r8.y": np.uint32})
  assert (out["r8.x"] == (x & 3 == 0)).all() and (out["r8.y"] == ~((x < 100) & (x & 3 == 0))).all()

def test_every_lane_function_row_has_a_proof():
  covered = {n for n, _ in ALU} | set(SFU)
  assert not [r.name for r in ROWS if r.sem and r.name not in covered]
