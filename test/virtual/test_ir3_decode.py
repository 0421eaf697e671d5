"""The instruction table's decoder against Mesa's disassembler, over code Mesa's compiler made here and over assembled forms it does not make."""
import re
import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context
from test.mockgpu.qcom.ir3.decode import decode, decode_one
from test.mockgpu.qcom.ir3.isa import LEFT_OUT, UnknownInstruction
from test.virtual import ir3_core
from test.virtual.ir3_asm import assemble, disassemble, word_of

def programs() -> list[bytes]:
  """Machine code of a few dozen kernels of different kinds."""
  from tinygrad.runtime.support.compiler_mesa import IR3Compiler
  libs: dict[bytes, None] = {}
  compile_ = IR3Compiler.compile
  def record(self, src):
    libs[lib := compile_(self, src)] = None
    return lib
  dev, img = ir3_core.register(), ir3_core.register("a630,IMAGE_PITCH_ALIGNMENT=64")
  IR3Compiler.compile = record
  try:
    with Context(CCACHE=0):
      f, h = Tensor(np.ones((48, 64), np.float32), device=dev), Tensor(np.ones((48, 64), np.float16), device=dev)
      ints = [Tensor(np.ones(96, dt), device=dev) for dt in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)]
      for t in (f @ f.T, h @ h.T, f.softmax(), f.exp() + f.sin(), f.log().sqrt(), h.exp2() * h.tanh(), f.sum(), f.argmax(1), f.cast(dtypes.uint8),
                h.cast(dtypes.int32),
                f.pow(h.float()), f.floor() + f.round(), (f > 0).where(f, 2), f.max(0), f.cumsum(1)): t.realize()
      for t in ints:
        for u in (t * t + 3, t // 7, t // t, t % t, t.max(), t.cast(dtypes.float), t < 3): u.realize()
      ints[4].sort()[0].realize()
      with Context(IMAGE=1):
        a, b = Tensor(np.ones((64, 64), np.float32), device=img).realize(), Tensor(np.ones((64, 64), np.float32), device=img).realize()
        (a @ b).relu().realize()
  finally: IR3Compiler.compile = compile_
  return [IR3Compiler.unpack_lib(lib)[3] for lib in libs]

@pytest.fixture(scope="module")
def corpus() -> list[bytes]: return programs()

def normal(text: str) -> str:
  """Mesa prints the data register of local and private byte and half accesses without its h, and (last) at different places."""
  text = text.replace("(last)", "").replace(" + 0>", ">").replace("(r)(r)", "(r)")
  return re.sub(r"\bhr(?=\d)", "r", text) if re.search(r"\b(stl|stp|ldl|ldp)\.", text) else text

def test_decoder_reads_compiled_code_as_mesa_does(corpus):
  assert len(corpus) > 60
  count, names = 0, set()
  for code in corpus:
    want = disassemble(code)
    got = decode(code)
    assert len(want) == len(code) // 8 and any(i.name == "end" for i in got)
    for i, text in zip(got, want):
      assert normal(str(i)) == normal(text), f"{i.word:#018x}"
      names.add(i.name)
    count += len(got)
  assert count > 5000 and len(names) > 60

FORMS = """nop; (rpt2)nop; end; jump #-3; br p0.x, #7; br !p0.w, #7; brao p0.x, !p0.y, #2; braa !p0.z, p0.w, #2; bany p0.x, #1; ball !p0.y, #1
getone #1; ret; call #4; add.f r0.x, (neg)r1.x, (abs)r2.y; (sat)mul.f hr0.x, hr1.x, c3.y; max.f r0.y, r1.z, (2.0)
cmps.f.ge p0.y, r1.x, r2.x; cmpv.u.lt r0.x, r1.x, r2.x; (rpt3)add.u r8.x, (r)r1.x, r2.y; and.b r1.x, hr1.x, hr2.x; bfrev.b r0.x, r1.x
cbits.b r0.x, r1.x; clz.s r0.x, r1.x; getbit.b r0.x, r1.x, 3; shl.b r0.x, c<a0.x + 4>, 2; or.b hr1.x, hr2.y, h(17)
mad.f32 r0.x, c1.x, r2.x, (neg)r3.x; mad.f16 hr0.x, hr1.x, hr2.x, hr3.x; mad.u24 r0.x, r1.x, r2.x, r3.x; sel.b16 hr0.x, hr1.x, hr2.x, hr3.x
sad.s32 r0.x, r1.x, r2.x, r3.x; shrm r0.x, 2, r1.x, r2.x; andg hr1.x, hr2.x, hr3.x, hr4.x; madsh.m16 r0.x, r1.x, r2.x, r3.x
(rpt1)mad.f32 r4.x, r6.z, (r)r8.y, (r)r4.x; rcp r0.x, r1.x; (ss)(rpt1)sqrt hr0.x, (r)hr1.x; exp2 r0.x, (neg)r1.x; hlog2 hr0.x, hr1.x
mov.u32u32 r0.x, 0x12345678; mov.f32f32 r0.x, r1.x; mova a0.x, hr0.x; mov.u32u32 r0.x, r<a0.x + 4>; mov.u32u32 r<a0.x + 9>, r0.x
cov.f32f16 hr0.x, c1.y; cov.u8s32 r0.x, hr1.x; swz.u32u32 r0.x, r0.y, r0.y, r0.x; gat.f32f32 r0.x, r1.x, r2.x, r3.x, r4.y
sct.u32u32 r0.x, r1.x, r2.y, r3.x, r4.x; movmsk.w64 r2.x; ldg.u32 r0.x, g[r0.z+16], 2; stg.u16 g[r1.x-8], hr0.x, 4
ldl.u32 r0.x, l[r0.x-4], 1; stl.u8 l[r1.x], hr0.x, 1; ldp.u16 hr0.x, p[r1.x+12], 2; stp.u32 p[r0.x+4], r1.x, 1
isam.1d (f32)(xyz)r0.x, r1.x, s#2, t#3; stib.b.typed.2d.f16.4.imm hr0.x, r1.x, 1; bar.g; fence.g.w; prede
atomic.add.untyped.1d.u32.1.l r0.x, l[r1.x], r2.x; atomic.cmpxchg.untyped.1d.u32.1.l r0.x, l[r1.x], r2.x
atomic.g.max.untyped.1d.s32.1.g r0.x, r1.x, r2.x; atomic.g.cmpxchg.untyped.1d.u32.1.g r0.x, r1.x, r2.x; atomic.b.add.typed.2d.u32.1.imm r0.x, r1.x, 0
atomic.b.cmpxchg.untyped.1d.u32.1.nonuniform r0.x, r1.x, r3.y; ldib.b.untyped.1d.u32.4.imm r0.x, r1.x, 0; ldib.b.typed.2d.f32.4.imm r0.x, r1.x, 0
ldib.b.typed.2d.u32.1.nonuniform r0.x, r1.x, r2.x; ldib.b.untyped.1d.u16.2.imm hr0.x, r1.x, 0; stib.b.untyped.1d.u32.4.imm r0.x, r1.x, 0
stib.b.typed.3d.u32.4.uniform r0.x, r1.x, r4.x; stib.b.typed.1d.f16.4.imm hr0.x, r1.x, 0; resinfo.b.untyped.2d.u32.1.imm r0.x, 0
ldc.offset0.4.imm r0.x, r1.x, 0; ldc.offset2.1.nonuniform r0.x, r1.x, r2.x; ldc.offset1.2.uniform r0.x, 17, r2.x; ldc.4.k.imm c[a1.x], r0.x, 0
ldg.a.u32 r0.x, g[r1.x+(r2.x<<2)], 1; ldg.a.u32 r0.x, g[r1.x+((r2.x+1)<<2)], 4; ldg.a.u16 hr0.x, g[r1.x+(((r2.x<<2)+3)<<1)], 2
ldg.a.u8 hr0.x, g[r1.x+r2.x+1], 1; stg.a.u32 g[r1.x+(r2.x<<2)], r3.x, 1; stg.a.u16 g[r1.x+(((r2.x<<2)+3)<<1)], hr3.x, 2
ldg.k.u32 c[8], g[r1.x+4], 4; stc.u32 c[8], r1.x, 4; stc.u32 c[a1.x], r1.x, 1; stc.f32 c[a1.x+4], r1.x, 2; mova1 a1.x, 3; mova1 a1.x, hr3.x
getlast.w8 #2; shps #3; shpe; brac.3 #2; isam (f32)(xyzw)r0.x, r1.x, s#0, t#1; isam.1d (u32)(xy)r0.x, r1.x, s#0, t#1
isam.1d (s32)(xzw)r0.x, r1.x, s#0, t#1; isam.1d (u16)(x)hr0.x, r1.x, s#0, t#1; isam.3d (f32)(x)r0.x, r1.x, s#0, t#1
isam.a (f32)(x)r0.x, r1.x, s#0, t#1
isam.o (f32)(x)r0.x, r1.x, r3.x, s#0, t#1; isam.s2en.uniform (f32)(x)r0.x, r1.x, hr2.x; isam.s2en.nonuniform (f32)(x)r0.x, r1.x, hr2.x
isaml (f32)(x)r0.x, r1.x, r3.x, s#0, t#1; isaml.a (f32)(x)r0.x, r1.x, r3.x, s#0, t#1; sam (f32)(xyzw)r0.x, r1.x, s#0, t#1
sam.3d (f32)(xyzw)r0.x, r1.x, s#0, t#1; sam.s2en.nonuniform (f16)(x)hr0.x, r1.x, hr2.x; sam.o (f32)(x)r0.x, r1.x, r3.x, s#0, t#1
saml (f32)(xyzw)r0.x, r1.x, r3.x, s#0, t#1; getsize (u32)(xyz)r0.x, r1.x, t#1; brcst.active.w8 (u32)(x)r0.x, r1.x; tcinv; sleep.l
quad_shuffle.brcst (u32)(x)r0.x, r1.x, r2.x; quad_shuffle.horiz (u16)(x)hr0.x, hr1.x; quad_shuffle.vert (u32)(x)r0.x, r1.x
quad_shuffle.diag (f32)(x)r0.x, r1.x; shfl.xor.u32 r0.x, r1.x, 1; shfl.up.u32 r0.x, r1.x, r2.x; shfl.down.u16 hr0.x, hr1.x, 1
shfl.rup.u32 r0.x, r1.x, 1; shfl.rdown.u32 r0.x, r1.x, 63"""

FORM_LIST = [t.strip() for line in FORMS.splitlines() for t in line.split(";")]

@pytest.mark.parametrize("text", FORM_LIST)
def test_decoder_reads_assembled_forms_as_mesa_does(text):
  code = assemble(text)
  want = disassemble(code)[0]
  got = str(decode_one(int.from_bytes(code[:8], "little")))
  assert normal(got) == normal(want)

# What Mesa assembles and this core leaves out, with the name that the error must give.
REFUSED = {"kill p0.x": "kill", "emit": "emit", "cut": "cut", "chmask": "chmask", "brax #2": "brax", "bkt #1": "bkt",
           "mgen.b r0.x, r1.x, r2.x": "mgen.b",
  "setrm r0.x, r1.x": "setrm", "shb r0.x, r1.x, r2.x": "shb", "msad r0.x, r1.x, r2.x": "msad", "sel.s16 hr0.x, hr1.x, hr2.x, hr3.x": "sel.s16",
  "sel.s32 r0.x, r1.x, r2.x, r3.x": "sel.s32", "sel.f16 hr0.x, hr1.x, hr2.x, hr3.x": "sel.f16", "sel.f32 r0.x, r1.x, r2.x, r3.x": "sel.f32",
  "dp2acc.mixed.low r0.x, r1.x, r2.x, r3.x": "dp2acc", "dp4acc.unsigned.low r0.x, r1.x, r2.x, r3.x": "dp4acc",
  "wmm hr0.x, hr1.x, hr2.x, 0": "wmm", "cov.f32u8 hr0.x, r1.x": "cov.f32u8", "cov.u8f32 r0.x, hr1.x": "cov.u8f32",
  "isam.v (f32)(xyzw)r0.x, r1.x+4, s#0, t#1": "isam with a vector load", "isam.base0 (f32)(x)r0.x, r1.x, s#0, t#1": "isam with bindless",
  "isam.1d (f32)(x)r0.x, hr1.x, s#0, t#1": "isam with half coordinates", "sam.p (f32)(x)r0.x, r1.x, s#0, t#1": "sam with projection",
  "sam.s (f32)(x)r0.x, r1.x, s#0, t#1": "sam with shadow", "samb (f32)(x)r0.x, r1.x, r3.x, s#0, t#1": "samb",
  "isamm (f32)(x)r0.x, r1.x, s#0, t#1": "isamm",
  "gather4r (f32)(xyzw)r0.x, r1.x, s#0, t#1": "gather4r", "getinfo (u32)(xyzw)r0.x, t#1": "getinfo", "getbuf (u32)(xyzw)r0.x, t#1": "getbuf",
  "getlod (f32)(x)r0.x, r1.x, s#0, t#1": "getlod", "dsx (f32)(x)r0.x, r1.x": "dsx", "dsypp.1 (x)r0.x, r1.x": "dsypp.1",
  "ldlw.u32 r0.x, l[r1.x+4], 2": "ldlw", "stlw.u32 l[r1.x+4], r2.x, 2": "stlw", "getspid.u32 r0.x": "getspid", "getwid.u32 r0.x": "getwid",
  "getfiberid.u32 r0.x": "getfiberid", "resbase.untyped.1d.u32.1.imm r0.x, 0": "resbase",
  "atomic.inc.untyped.1d.u32.1.l r0.x, l[r1.x], r2.x": "atomic.inc", "atomic.g.dec.untyped.1d.u32.1.g r0.x, r1.x, r2.x": "atomic.dec",
  "atomic.g.add.untyped.1d.u64.1.g r0.x, r1.x, r2.x": "atomic.g.add of u64",
  "atomic.b.add.untyped.1d.u32.1.uniform.base0 r0.x, r1.x, r3.y": "bindless",
  "ldib.b.untyped.1d.u32.1.imm r0.x, r1.x+4, 0": "ldib.b with an immediate offset",
  "stib.b.untyped.1d.u32.1.imm r0.x, r1.x+4, 0": "stib.b with an immediate",
  "ldc.offset0.1.imm.base0 r0.x, 4, 0": "ldc with bindless", "ldc.u.offset0.1.imm r0.x, 4, 0": "ldc.u", "ldl.u32 r0.x, l[r1.x+4], 8": "ldl.u32 of 8",
  "dccln.all": "dccln", "dcinv.all": "dcinv", "(eq)nop": "reserved bits 48:45"}

@pytest.mark.parametrize("text", REFUSED)
def test_what_is_left_out_is_refused_with_name_and_encoding(text):
  word = int.from_bytes(assemble(text)[:8], "little")
  with pytest.raises(UnknownInstruction, match=re.escape(REFUSED[text])) as e: decode_one(word, 12)
  assert e.value.offset == 12 and e.value.encoding == word and f"{word:#018x}" in str(e.value)

# Mesa makes nothing for an a630 of these words, so that the name is the table's alone. REFUSED has stlw in a form that Mesa knows.
NAMELESS = {(1, 1), (6, 11), (6, 31), (6, 15), (6, 29), (6, 14), (6, "b", 38), (7, 7), (7, 8)}

@pytest.mark.parametrize("key", LEFT_OUT, ids=lambda key: LEFT_OUT[key][0])
def test_everything_that_is_left_out_is_refused_by_mesas_name(key):
  word, name = word_of(key), LEFT_OUT[key][0]
  with pytest.raises(UnknownInstruction, match=re.escape(name)) as e: decode_one(word, 12)
  assert e.value.offset == 12 and e.value.encoding == word and f"{word:#018x}" in str(e.value)
  mesa = disassemble(word.to_bytes(8, "little"))[0]
  assert "no match" in mesa if key in NAMELESS else any(re.search(rf"^(; )?{re.escape(n)}\b", mesa) for n in name.split(" or ")), mesa

def test_every_opcode_is_a_row_or_refused_with_a_name():
  """All of the opcode bits of all categories, whatever the operands: no word is taken for something that it is not named as."""
  for cat, opcodes in ((0, [hi << 49 | o << 55 | b << 37 for hi in (0, 1) for o in range(16) for b in range(8)]), (1, [o << 57 for o in range(4)]),
                       (2, [o << 53 | c << 48 | f << 52 for o in range(64) for c in range(8) for f in (0, 1)]),
                       (3, [o << 55 | s << 13 for o in range(16) for s in (0, 1)]), (4, [o << 53 | f << 52 for o in range(64) for f in (0, 1)]),
                       (5, [o << 54 | 1 | 1 << 40 | 1 << 44 | 1 << 18 for o in range(32)]),
                       (6, [o << 54 | 3 << 49 | 1 << 23 | 1 << 24 | b for o in range(32) for b in (0, 1)]),
                       (6, [o << 14 | 6 << 20 | 1 << 53 | 3 << 49 for o in range(64)]), (7, [o << 55 for o in range(16)])):
    for word in (cat << 61 | bits for bits in opcodes):
      try: got = decode_one(word)
      except UnknownInstruction as e: assert e.name and f"{word:#018x}" in str(e), hex(word)
      else: assert normal(str(got)) == normal(disassemble(word.to_bytes(8, "little"))[0].split("\t; dontcare")[0]), hex(word)

def test_corrupted_instructions_decode_as_mesa_does_or_not_at_all(corpus):
  """Compiled words with one to three bits flipped: whatever this decoder accepts, Mesa accepts and prints alike."""
  rng = np.random.default_rng(3)
  words = np.unique(np.concatenate([np.frombuffer(c, np.uint64) for c in corpus]))
  forms = np.array([int.from_bytes(assemble(t)[:8], "little") for t in FORM_LIST], np.uint64)
  words = np.concatenate([rng.choice(words, 5000), np.repeat(forms, 20)])
  for _ in range(3): words ^= np.where(rng.random(words.size) < 0.6, np.uint64(1) << rng.integers(0, 64, words.size, dtype=np.uint64), np.uint64(0))
  texts, accepted, bad = disassemble(words.tobytes()), 0, []
  assert len(texts) == words.size
  for w, text in zip(words.tolist(), texts):
    try: i = decode_one(w)
    except UnknownInstruction: continue
    accepted += 1
    text = text.split("\t; dontcare")[0]
    if normal(str(i)) != normal(text): bad.append((hex(w), str(i), text))
  assert accepted > 2000 and not bad, f"{len(bad)} of {accepted}: {bad[:30]}"
