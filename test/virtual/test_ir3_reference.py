"""The fast shader core against the slow one: random programs assembled by Mesa, and kernels that Mesa's compiler made for tinygrad. Bit for bit;
a NaN in a float register equals any NaN."""
from __future__ import annotations
import gc, random, re
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context
from test.mockgpu.qcom.ir3 import reference
from test.mockgpu.qcom.ir3.isa import INDEX
from test.mockgpu.qcom.ir3.native import Dispatch
from test.virtual import ir3_core
from test.virtual.ir3_asm import assemble
from test.virtual.ir3_core import Memory, engine

# Registers of a random program by what they hold: 32-bit integers, floats, 16-bit integers, halves. r0, r20 and up belong to the frame.
FILES = {"i": [f"r{n}.{c}" for n in (1, 2, 3) for c in "xyzw"], "f": [f"r{n}.{c}" for n in (4, 5, 6) for c in "xyzw"],
         "s": [f"hr{n}.{c}" for n in (1, 2) for c in "xyzw"], "h": [f"hr{n}.{c}" for n in (3, 4) for c in "xyzw"]}
ORDER = [r for regs in FILES.values() for r in regs]
INT2 = ("add.u", "add.s", "sub.u", "sub.s", "min.u", "min.s", "max.u", "max.s", "and.b", "or.b", "xor.b", "shl.b", "shr.b", "ashr.b", "getbit.b",
        "mull.u", "mul.u24", "mul.s24")
INT1 = ("not.b", "bfrev.b", "clz.b", "clz.s", "cbits.b", "absneg.s")
FLOAT2, FLOAT1 = ("add.f", "mul.f", "min.f", "max.f"), ("floor.f", "ceil.f", "rndne.f", "rndaz.f", "trunc.f", "sign.f", "absneg.f", "rcp", "rsq",
                                                        "sqrt")
CONDS = ("lt", "le", "gt", "ge", "eq", "ne")
FLUT = ("(0.0)", "(0.5)", "(1.0)", "(2.0)", "(e)", "(pi)", "(4.0)")
CONST0 = 64                                             # c16.x and up: 16 random constants

class Random:
  """Writes a program of nested branches, loops and predicated regions, from a source of choices."""
  def __init__(self, rnd: random.Random): self.rnd, self.loops = rnd, 0
  def reg(self, cls: str) -> str: return self.rnd.choice(FILES[cls])

  def src(self, cls: str, mods: bool = True) -> str:
    half, kind = cls in "sh", self.rnd.random()
    mod = self.rnd.choice(("", "", "(neg)", "(abs)", "(absneg)")) if mods and cls in "fh" else ""
    if kind < 0.7: return mod + self.reg(cls)
    if kind < 0.85: return mod + f"{'h' * half}c{(n := CONST0 + self.rnd.randrange(16)) >> 2}.{'xyzw'[n & 3]}"
    if cls in "fh": return ("h" if half else "") + self.rnd.choice(FLUT)
    v = self.rnd.randint(-1024, 1023)
    return f"h({v})" if half else str(v)

  def line(self) -> str:
    r, cls = self.rnd, self.rnd.choice("iiiffsh")
    wide, w = {"i": "f", "f": "i", "s": "h", "h": "s"}[cls], 16 if cls in "sh" else 32
    sat = "(sat)" if r.random() < 0.1 else ""
    kind = r.randrange(13)
    flt = cls in "fh"
    if kind < 4:
      if flt: return f"{sat}{r.choice(FLOAT2)} {self.reg(cls)}, {self.src(cls)}, {self.mreg(cls)}"
      op = r.choice(INT2)
      dst = self.reg("i") if op in ("mull.u", "mul.u24", "mul.s24") else self.reg(cls)
      return f"{sat if op[:3] in ('add', 'sub') else ''}{op} {dst}, {self.src(cls)}, {self.reg(cls)}"
    if kind == 4:
      op = r.choice(FLOAT1 if flt else INT1)
      return f"{op} {self.reg(cls)}, {self.mreg(cls) if op in ('rcp', 'rsq', 'sqrt') else self.src(cls, op != 'absneg.f')}"
    if kind == 5:
      t = "f" if flt else r.choice("us")
      dst = r.choice((self.reg("i"), self.reg("s"), f"p0.{r.choice('xyzw')}"))
      return f"{r.choice(('cmps', 'cmpv'))}.{t}.{r.choice(CONDS)} {dst}, {self.src(cls)}, {self.mreg(cls)}"
    if kind == 6:
      sign = lambda: r.choice(("", "(neg)"))
      if flt: return f"{sat}mad.f{w} {self.reg(cls)}, {sign()}{self.reg(cls)}, {self.reg(cls)}, {sign()}{self.reg(cls)}"
      op = r.choice(("mad.u16", "mad.s16", "sad.s16", "shrm", "shlg", "andg")) if w == 16 else \
        r.choice(("madsh.m16", "madsh.u16", "mad.u24", "mad.s24", "sad.s32", "shrm", "shlm", "shrg", "shlg", "andg"))
      first = str(r.randrange(40)) if op in ("shrm", "shlg", "shlm", "shrg") and r.random() < 0.5 else self.reg(cls)
      return f"{op} {self.reg(cls)}, {first}, {self.reg(cls)}, {self.reg(cls)}"
    if kind == 7: return f"sel.b{w} {self.reg(cls)}, {self.reg(cls)}, {self.reg('s' if w == 16 else 'i')}, {self.reg(cls)}"
    if kind == 8:
      a, b = r.sample("ifsh", 2)
      t = {c: r.choice({"i": ("u32", "s32"), "f": ("f32",), "s": ("u16", "s16"), "h": ("f16",)}[c]) for c in (a, b)}
      return f"cov.{t[a]}{t[b]} {self.reg(b)}, {self.reg(a)}"
    if kind == 9: return f"swz.u{w}u{w} {', '.join(r.sample(FILES[cls], 2))}, {self.reg(cls)}, {self.reg(cls)}"
    if kind == 10:
      n, first = r.randint(1, 3), FILES[cls].index
      dst, a = (r.choice([x for x in FILES[cls] if first(x) + n < len(FILES[cls])]) for _ in range(2))
      op = r.choice(FLOAT2 if flt else INT2[:13])
      return f"(rpt{n}){op} {dst}, (r){a}, {self.reg(cls)}"
    if kind == 11 and cls != wide: return f"mov.{'f' if flt else 'u'}{w}{'f' if flt else 'u'}{w} {self.reg(cls)}, {self.reg(cls)}"
    return f"and.b p0.{r.choice('xyzw')}, {self.reg('i')}, {r.choice((1, 2, 3, 64))}"

  def mreg(self, cls: str) -> str: return self.rnd.choice(("", "(neg)", "(abs)") if cls in "fh" else ("",)) + self.reg(cls)

  def memory(self) -> list[str]:
    """Local and private memory of the fiber's own, an atomic on its own word."""
    c = self.rnd.choice("if")
    return self.rnd.choice(([f"stl.u32 l[r20.x], {self.reg(c)}, 1", f"ldl.u32 {self.reg(c)}, l[r20.x], 1"],
                            [f"stp.u32 p[r20.y+8], {self.reg(c)}, 1", f"ldp.u32 {self.reg(c)}, p[r20.y+8], 1"],
                            [f"stp.u16 p[r20.y+4], {self.reg('h')}, 1", f"ldp.u16 {self.reg('h')}, p[r20.y+4], 1"],
                            [f"atomic.g.{self.rnd.choice(('add', 'xor', 'max'))}.untyped.1d.u32.1.g {self.reg('i')}, r20.z, {self.reg('i')}"]))

  def block(self, depth: int, size: int) -> list[str]:
    out: list[str] = []
    while len(out) < size:
      kind = self.rnd.random() if depth else 1.0
      if kind < 0.12:                                   # if, or if and else
        cond = self.rnd.choice(("br p0.x", "br !p0.y", "brao p0.x, !p0.z", "braa p0.y, p0.w", "bany p0.z", "ball !p0.x"))
        yes, no = self.block(depth - 1, size // 2), self.block(depth - 1, size // 2) if self.rnd.random() < 0.5 else []
        if no: yes.append(f"jump #{len(no) + 1}")
        out += [f"{cond}, #{len(yes) + 1}", *yes, *no]
      elif kind < 0.2 and self.loops < 3:               # loop: as often as the fiber's own count, at most 7 times
        k, self.loops = self.loops, self.loops + 1
        body = self.block(0, size // 3)
        out += [f"mov.u32u32 r21.{'xyz'[k]}, r20.w", f"cmps.u.eq p0.x, r21.{'xyz'[k]}, 0", f"br p0.x, #{len(body) + 3}", *body,
                f"sub.u r21.{'xyz'[k]}, r21.{'xyz'[k]}, 1", f"jump #-{len(body) + 3}"]
      elif kind < 0.3:
        both = [["predt", *self.straight(3)], ["predf", *self.straight(3)]]
        self.rnd.shuffle(both)
        out += [*both[0], *(both[1] if self.rnd.random() < 0.6 else []), "prede"]
      elif kind < 0.36: out += self.memory()
      else: out.append(self.line())
    return out

  def straight(self, n: int) -> list[str]:
    """Lines without a write to a predicate."""
    out: list[str] = []
    while len(out) < n:
      if "p0." not in (line := self.line()): out.append(line)
    return out

  def program(self, size: int) -> str:
    head = ["mov.u32u32 r20.z, 256", "mull.u r22.x, r0.x, r20.z", "shl.b r22.y, r48.x, 14", "add.u r22.x, r22.x, r22.y", "add.u r22.x, r22.x, c0.x",
            "mov.u32u32 r22.y, c0.y", "shl.b r20.x, r0.x, 2", "mov.u32u32 r20.y, 0", "and.b r20.w, r0.x, 7"]
    head += [f"ldg.u{16 if r[0] == 'h' else 32} {r}, g[r22.x+{4 * k}], 1" for k, r in enumerate(ORDER)]
    head += ["add.u r20.z, r22.x, 252", "mov.u32u32 r21.x, r22.y", "mov.u32u32 r21.y, 0", "mov.u32u32 r21.z, 0"]
    head = [line.replace("r20.z, r22.x, 252", "r23.x, r22.x, 252").replace("r21.x, r22.y", "r23.y, r22.y") for line in head]
    head += [f"and.b p0.{c}, r{1 + k}.x, 1" for k, c in enumerate("xyz")] + ["cmps.u.lt p0.w, r0.x, 40"]
    body = [line.replace("r20.z", "r23.x") for line in self.block(2, size)]
    tail = [f"stg.u{16 if r[0] == 'h' else 32} g[r22.x+{4 * k}], {r}, 1" for k, r in enumerate(ORDER)]
    return "\n".join([*head, "mov.u32u32 r21.x, 0", *body, *tail, "end"])

def compare(text: str, seed: int, fibers: int = 64, groups: int = 1, merged: bool = False) -> None:
  rng = np.random.default_rng(seed)
  mem, n = Memory(), fibers * groups
  base = mem.alloc(256 * 64 * groups)
  data = rng.integers(0, 1 << 32, (groups, 64, 64), dtype=np.uint32) >> rng.choice((0, 0, 8, 16, 24, 31), (groups, 64, 64)).astype(np.uint32)
  k = len(FILES["i"])
  floats = np.where(rng.random((groups, 64, 12)) < 0.3, rng.choice([0, -0.0, 1, -1, 0.5, np.inf, -np.inf, np.nan, 1e-40, 3e38, 65504, 2.5], (groups,
      64, 12)),
                    rng.standard_normal((groups, 64, 12)) * 100).astype(np.float32)
  data[..., k:k + 12] = floats.view(np.uint32)
  with np.errstate(over="ignore"): data[..., k + 20:k + 28] = floats[..., :8].astype(np.float16).view(np.uint16)
  mem.view(base, data.nbytes)[:] = data.view(np.uint8).ravel()
  consts = np.zeros(1024, np.uint32)
  consts[:2] = base & 0xffffffff, base >> 32
  consts[CONST0:CONST0 + 16] = rng.standard_normal(16).astype(np.float32).view(np.uint32)
  d = Dispatch((groups, 1, 1), (fibers, 1, 1), consts, mem.space, local_bytes=1024, pvt_bytes=512, merged_regs=merged)
  prog = engine().program(assemble(text, merged), merged_regs=merged)
  slow = reference.Memory({a: bytearray(m.tobytes()) for a, m in mem.keep.items()})
  engine().run(prog, d)
  reference.run(prog.instrs, d, slow, merged=prog.merged_regs)
  got = mem.view(base, data.nbytes).view(np.uint32).reshape(-1, 64)
  want = np.frombuffer(slow.pieces[base], np.uint32)[:got.size].reshape(-1, 64)
  bad = got != want
  as_f = [x[:, k:k + 12].copy().view(np.float32) for x in (got, want)]
  bad[:, k:k + 12] &= ~(np.isnan(as_f[0]) & np.isnan(as_f[1]))
  as_h = [(x[:, k + 20:k + 28] & 0xffff).astype(np.uint16).view(np.float16) for x in (got, want)]
  bad[:, k + 20:k + 28] &= ~(np.isnan(as_h[0]) & np.isnan(as_h[1]))
  if bad.any():
    lane, col = (int(v[0]) for v in np.nonzero(bad))
    what = ORDER[col] if col < len(ORDER) else f"word {col}"
    raise AssertionError(f"{bad.any(1).sum()} of {n} fibers differ, first: fiber {lane}, {what}: fast {got[lane, col]:#x}, slow {want[lane, col]:#x}"
                         f"\n{text}")

@pytest.mark.parametrize("seed", range(40))
def test_random_programs_leave_the_same_memory(seed):
  rnd = random.Random(seed)
  compare(Random(rnd).program(rnd.randint(20, 60)), seed, fibers=rnd.choice((64, 64, 37, 1)), groups=rnd.choice((1, 2)))

@pytest.mark.parametrize("seed", range(100, 115))
def test_random_programs_with_merged_registers(seed):
  """16-bit integers lie in the halves of r1, which the program uses as a whole as well; half floats in r10."""
  rnd = random.Random(seed)
  text = re.sub(r"\bhr([1-4])\.", lambda m: f"hr{(0, 2, 3, 20, 21)[int(m[1])]}.", Random(rnd).program(rnd.randint(20, 60)))
  compare(text, seed, fibers=rnd.choice((64, 37)), merged=True)

@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.integers(8, 30), st.integers(0, 1 << 20))
def test_hypothesis_finds_no_program_on_which_the_cores_differ(rnd, size, seed): compare(Random(rnd).program(size), seed, fibers=33)

# *** compiled kernels

@pytest.fixture
def both(monkeypatch):
  """Every kernel of the bare device also runs on the slow core, on a copy of memory; the copies are compared afterwards."""
  name, fast, ran = ir3_core.register(), engine().run, []
  ir3_core.register("a630,IMAGE_PITCH_ALIGNMENT=64")
  def run(prog, d):
    slow = reference.Memory({a: bytearray(m.tobytes()) for a, m in ir3_core.memory.keep.items()})
    fast(prog, d)
    reference.run(prog.instrs, d, slow, merged=prog.merged_regs)
    for a, m in slow.pieces.items():
      if m != ir3_core.memory.keep[a].tobytes():
        o = int(np.flatnonzero(np.frombuffer(m, np.uint8) != ir3_core.memory.keep[a])[0]) & ~3
        raise AssertionError(f"byte {o}: fast {ir3_core.memory.keep[a][o:o + 4].tobytes().hex()}, slow {m[o:o + 4].hex()}")
    ran.append(prog)
  gc.collect()                                          # what earlier tests left behind would be copied for every kernel
  monkeypatch.setattr(engine(), "run", run)
  yield name, ran

rng = np.random.default_rng(11)
I = {dt: rng.integers(0, 100, 24).astype(dt) for dt in (np.int8, np.int32, np.uint64)}
F, G = rng.standard_normal((8, 12)).astype(np.float32), rng.standard_normal((12, 8)).astype(np.float32)

KERNELS = {
  "int": lambda dev: [f for a in I.values() for t in (Tensor(a, device=dev),) for f in (t * t + 3, t // 7, t % (t + 1), t.max(), t < 9,
                                                                                        t.cast(dtypes.float))],
  "float": lambda dev: [f for t in (Tensor(F, device=dev),) for f in (t * 2 + 1, t.relu(), t.floor() + t.ceil().round(), (t > 0).where(t, -t),
                                                                      t.max(1),
                                                                        t.cast(dtypes.int), t.cast(dtypes.half), t.abs().sqrt(), t / (t * t + 1),
                                                                        t.argmax(1))],
  "half": lambda dev: [f for t in (Tensor(F.astype(np.float16), device=dev),) for f in (t * t + t, t.max(0), t.cast(dtypes.int), t.maximum(0.5),
                                                                                        t.sum())],
  "matmul": lambda dev: [Tensor(F, device=dev) @ Tensor(G, device=dev), Tensor(F.astype(np.float16), device=dev) @ Tensor(G.astype(np.float16),
      device=dev)],
  "local": lambda dev: [Tensor(np.arange(2000, dtype=np.float32), device=dev).sum(), Tensor(np.arange(512, dtype=np.int32), device=dev).max()],
  "scan": lambda dev: [Tensor(I[np.int32], device=dev).cumsum(), Tensor(I[np.int32][:6], device=dev).sort()[0]],
}

@pytest.mark.parametrize("what", KERNELS)
@pytest.mark.parametrize("noopt", (0, 1), ids=("optimised", "plain"))
def test_compiled_kernels_leave_the_same_memory(both, what, noopt):
  dev, ran = both
  with Context(NOOPT=noopt):
    for t in KERNELS[what](dev): t.realize()
  assert ran

@pytest.mark.parametrize("half", (0, 1), ids=("texels-32", "texels-16"))
def test_compiled_image_kernels_leave_the_same_memory(both, half):
  _, ran = both
  with Context(IMAGE=1, FLOAT16=half):
    a, b = (Tensor(x, device="IR3IMG").realize() for x in (rng.standard_normal((16, 64)).astype(np.float32), rng.standard_normal((64,
        16)).astype(np.float32)))
    (a @ b).relu().realize()
  assert any(i.name == "isam" for p in ran for i in p.instrs.values())

def test_the_random_programs_execute_most_of_the_alu_table():
  """Otherwise the comparison says nothing."""
  names = set()
  for seed in range(40):
    rnd = random.Random(seed)
    names |= {i.name for i in engine().program(assemble(Random(rnd).program(rnd.randint(20, 60)))).instrs.values()}
  want = {*INT2, *INT1, *FLOAT2, *FLOAT1, "mad.f32", "mad.f16", "madsh.m16", "sel.b32", "sel.b16", "shrm", "andg", "predt", "predf", "brao", "braa",
          "bany",
          "atomic.g.add", "ldp.u32", "stl.u32"}
  assert want <= names and names <= INDEX.keys(), want - names

