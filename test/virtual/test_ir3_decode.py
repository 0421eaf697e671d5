"""The instruction table's decoder against Mesa's disassembler, over code Mesa's compiler made here and over assembled forms it does not make."""
import re
import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context
from test.mockgpu.qcom.ir3.decode import decode, decode_one
from test.mockgpu.qcom.ir3.isa import UnknownInstruction
from test.virtual import ir3_core
from test.virtual.ir3_asm import assemble, disassemble

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
  text = text.replace("(last)", "").replace(" + 0>", ">")
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
isam.1d (f32)(xyz)r0.x, r1.x, s#2, t#3; stib.b.typed.2d.f16.4.imm hr0.x, r1.x, 1; bar.g; fence.g.w; prede"""

@pytest.mark.parametrize("text", [t.strip() for line in FORMS.splitlines() for t in line.split(";")])
def test_decoder_reads_assembled_forms_as_mesa_does(text):
  code = assemble(text)
  want = disassemble(code)[0]
  got = str(decode_one(int.from_bytes(code[:8], "little")))
  assert normal(got) == normal(want)

UNKNOWN = {"atomic": 0xc7ff000000000001, "sam": 0xa0c01f0000000001, "dp4acc": 0x6680000000002000, "kill": 0x0280000000000000,
           "chmask": 0x0200000000000000 | 9 << 55}

@pytest.mark.parametrize("word", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_encodings_are_refused_by_name(word):
  with pytest.raises(UnknownInstruction) as e: decode_one(word, 12)
  assert e.value.offset == 12 and e.value.encoding == word and f"{word:#018x}" in str(e.value)

def test_corrupted_instructions_decode_as_mesa_does_or_not_at_all(corpus):
  """Compiled words with one to three bits flipped: whatever this decoder accepts, Mesa accepts and prints alike."""
  rng = np.random.default_rng(3)
  words = np.unique(np.concatenate([np.frombuffer(c, np.uint64) for c in corpus]))
  words = rng.choice(words, 6000)
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
