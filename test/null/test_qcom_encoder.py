"""Packets, register fields, descriptors, arguments and program facts, against the numbers of the register database. No GPU, no kernel.

FIELDS and the layouts below are typed from the register database (a6xx.xml: bit ranges and units), not from the tables that
the runtime uses.
"""
from __future__ import annotations
import struct
from types import SimpleNamespace
import numpy as np
import pytest
from hypothesis import given, strategies as st
from test.null.qcom_fake import EV_CACHE_FLUSH_TS, EV_CACHE_INVALIDATE, EV_LABEL, FakeKernel, fake_iface, packets, registers
from test.qcom_open import opened
from tinygrad import Tensor, UOp, dtypes
from tinygrad.device import TinyELF
from tinygrad.renderer.nir import IR3Renderer
from tinygrad.runtime import ops_qcom
from tinygrad.runtime.ops_qcom import Addr, QCOMProgram, Stream, field, pkt4_hdr, pkt7_hdr, reg

# register -> {field: (lowest bit, bits, unit if it is not 1)}
FIELDS = {
  "A6XX_SP_CS_CNTL_0": {"halfregfootprint": (1, 6), "fullregfootprint": (7, 6), "branchstack": (14, 6)},
  "A6XX_SP_CS_CNTL_1": {"shared_size": (0, 5), "constantrammode": (5, 2)},
  "A6XX_SP_CS_PVT_MEM_PARAM": {"memsizeperitem": (0, 8, 512), "hwstacksizeperthread": (24, 8)},
  "A6XX_SP_CS_PVT_MEM_SIZE": {"totalpvtmemsize": (0, 18, 4096)},
  "A6XX_SP_CS_PVT_MEM_STACK_OFFSET": {"offset": (0, 19, 2048)},
  "A6XX_SP_CS_CONFIG": {"ntex": (9, 8), "nsamp": (17, 5), "nuav": (22, 7)},
  "A6XX_SP_CS_CONST_CONFIG": {"constlen": (0, 8, 4)},
  "A6XX_SP_CS_NDRANGE_0": {"kerneldim": (0, 2), "localsizex": (2, 10), "localsizey": (12, 10), "localsizez": (22, 10)},
  "A6XX_SP_CS_CONST_CONFIG_0": {"wgidconstid": (0, 8), "wgsizeconstid": (8, 8), "wgoffsetconstid": (16, 8), "localidregid": (24, 8)},
  "A6XX_SP_CS_WGE_CNTL": {"linearlocalidregid": (0, 8)},
  "A6XX_SP_MODE_CNTL": {"isammode": (1, 2)},
  "A6XX_TPL1_MODE_CNTL": {"isammode": (0, 2)},
  "CP_LOAD_STATE6_0": {"dst_off": (0, 14), "state_type": (14, 2), "state_src": (16, 2), "state_block": (18, 4), "num_unit": (22, 10)},
  "CP_REG_TO_MEM_0": {"reg": (0, 18), "cnt": (18, 12)},
  "CP_EVENT_WRITE_0": {"event": (0, 8)},
  "A6XX_TEX_CONST_0": {"swiz_x": (4, 3), "swiz_y": (7, 3), "swiz_z": (10, 3), "swiz_w": (13, 3), "fmt": (22, 8)},
  "A6XX_TEX_CONST_1": {"width": (0, 15), "height": (15, 15)},
  "A6XX_TEX_CONST_2": {"pitchalign": (0, 4), "pitch": (7, 22), "type": (29, 3)},
  "A6XX_TEX_SAMP_0": {"wrap_s": (5, 3), "wrap_t": (8, 3), "wrap_r": (11, 3)},
}
FLAGS = {("A6XX_SP_CS_CONFIG", "enabled"): 8, ("A6XX_SP_CS_CONST_CONFIG", "enabled"): 8, ("A6XX_SP_MODE_CNTL", "constant_demotion_enable"): 0,
         ("A6XX_SP_UPDATE_CNTL", "cs_state"): 5, ("A6XX_SP_UPDATE_CNTL", "cs_uav"): 6, ("A6XX_SP_PERFCTR_SHADER_MASK", "cs"): 5,
         ("CP_REG_TO_MEM_0", "_64b"): 30, ("A6XX_TEX_SAMP_1", "unnorm_coords"): 5, ("A6XX_TEX_SAMP_1", "cubemapseamlessfiltoff"): 4}
ALL = [(r, f, *bits, *(1,) * (3 - len(bits))) for r, fs in FIELDS.items() for f, bits in fs.items()]

@pytest.mark.parametrize("register,name,low,bits,unit", ALL, ids=[f"{r}.{f}" for r, f, *_ in ALL])
def test_a_field_has_its_place_and_refuses_what_does_not_fit(register, name, low, bits, unit):
  for v in (0, 1, (1 << bits) - 1): assert reg(register, **{name: v * unit}) == v << low
  for v in (1 << bits, (1 << bits) + 1, 1 << 40, -1):
    with pytest.raises(ValueError, match=rf"{v * unit} does not fit.*{register}.*{bits} bits"): reg(register, **{name: v * unit})
  for v in (1, unit - 1, unit + 1) if unit > 1 else ():
    with pytest.raises(ValueError, match=rf"{v} is not a multiple of {unit}, the unit of register field {register}"): reg(register, **{name: v})

@pytest.mark.parametrize("register,name", list(FLAGS))
def test_a_flag_is_one_bit(register, name):
  assert reg(register, **{name: True}) == 1 << FLAGS[register, name] and reg(register, **{name: False}) == 0

def test_fields_of_a_register_do_not_overlap():
  for register, fs in FIELDS.items():
    full = {n: ((1 << bits) - 1) * (unit[0] if unit else 1) for n, (_, bits, *unit) in fs.items()}
    assert reg(register, **full) == sum(((1 << bits) - 1) << low for low, bits, *_ in fs.values())

def test_a_variable_is_placed_by_its_shift():
  v = UOp.variable("v", 0, 100)
  assert (field("A6XX_SP_CS_NDRANGE_0_LOCALSIZEY", v).substitute({v: v.const_like(7)}).simplify().val) == 7 << 12

# *** packets

def ones(v: int) -> int: return bin(v).count("1")

@given(st.integers(0, 0x7f), st.integers(0, 0x3fff))
def test_type_7_headers_have_odd_parity(opcode, count):
  h = pkt7_hdr(opcode, count)
  assert h >> 28 == 7 and h >> 16 & 0x7f == opcode and h & 0x3fff == count and not h & 0x0f004000
  assert (ones(opcode) + (h >> 23 & 1)) % 2 == 1 and (ones(count) + (h >> 15 & 1)) % 2 == 1

@given(st.integers(0, 0x3ffff), st.integers(0, 0x7f))
def test_type_4_headers_have_odd_parity(register, count):
  h = pkt4_hdr(register, count)
  assert h >> 28 == 4 and h >> 8 & 0x3ffff == register and h & 0x7f == count
  assert (ones(register) + (h >> 27 & 1)) % 2 == 1 and (ones(count) + (h >> 7 & 1)) % 2 == 1

def test_known_headers():
  """Words of real streams, as freedreno's decoder prints them: CP_WAIT_FOR_IDLE, CP_EVENT_WRITE with one dword, CP_EXEC_CS with four."""
  assert [pkt7_hdr(0x26, 0), pkt7_hdr(0x46, 1), pkt7_hdr(0x33, 4)] == [0x70268000, 0x70460001, 0x70b30004]

# *** one launch

PS_INSTR_SIZE, CS_INSTR_SIZE = 0xab05, 0xa9bc

ARENA, CODE, SCRATCH, BUFS = 0x1_2345_6000, 0x1_0bcd_e000, 0x1_4000_0000, [0x1_5000_0000 + 0x1000 * i for i in range(8)]

FACTS = dict(pvtmem=0, shmem=0, consts_bytes=256, fregs=5, hregs=2, brnchstck=0, mergedregs=False, prg_offset=0, instrlen=3, wgid=192, wgsz=0xfc,
             wgoff=0xfc, lid=0, samp_cnt=0, tex_cnt=0, ibo_cnt=0, nsamplers=0, tex_to_image=[], buf_off=0, consts=[], tex_off=256, ibo_off=256,
             samp_off=256)

class Made(QCOMProgram):
  """A program whose facts the test makes up, in place of what is parsed from a compiled one."""
  def _parse_ir3(self, lib): self.__dict__.update(lib)

def program(signature=(), **over) -> QCOMProgram:
  dev = SimpleNamespace(renderer=object.__new__(IR3Renderer))
  return Made(dev, SimpleNamespace(name="k", signature=signature, lib={**FACTS, **over})) # type: ignore[arg-type]

def resolve(s: Stream) -> bytes:
  """The stream with addresses filled in, as they are once patched."""
  out = bytearray(s.data)
  for o, v in s.places:
    assert isinstance(v, Addr) and not any(out[o:o + 8])
    struct.pack_into("<Q", out, o, (ARENA if v.buf is None else v.buf) + v.offset)
  return bytes(out)

def launch(p: QCOMProgram, groups=(4, 3, 2), local=(32, 2, 1), scratch=None):
  s = Stream()
  s.dispatch(p, Addr(CODE), Addr(None, 0x400), Addr(scratch) if scratch else None, groups, local)
  ps = packets(resolve(s))
  return ps, registers(ps)

def address(regs, r): return regs[r] | regs[r + 1] << 32

def test_registers_of_a_launch():
  ps, r = launch(program(shmem=5000, brnchstck=2))
  assert r[0xb990] == 3 | 31 << 2 | 1 << 12 | 0 << 22          # three dimensions; local size, minus one
  assert [r[0xb991 + i] for i in range(6)] == [128, 0, 6, 0, 2, 0] # threads and offsets
  assert r[0xb997] == 192 | 0xfc << 8 | 0xfc << 16 | 0 << 24 and r[0xb998] == 0xfc
  assert [r[0xb999 + i] for i in range(3)] == [4, 3, 2]
  assert r[0xa9b0] == 2 << 1 | 5 << 7 | 2 << 14                 # vec4 registers; waves of 64, files not merged
  assert r[0xa9b1] == 4 | 2 << 5                                # 5000 bytes need 5 KiB: field 4; 256 vec4 of constants
  assert r[0xa9b3] == 0 and address(r, 0xa9b4) == CODE
  assert r[0xa9bc] == 3                                         # groups of 16 instructions
  assert r[0xb987] == 256 // 64 | 1 << 8                        # CONSTLEN in 4 vec4
  assert r[0xab00] == 1 | 2 << 1 and r[0xb309] == 2             # isam as in GL, half constants are narrowed
  assert [r[0xb983 + i] for i in range(4)] == [0xfcfcfcfc] * 3 + [0xfc]
  assert r[0xa9bb] == 1 << 8 and r[0xbb08] == 0 and r[0xa9ba] == 0 and r[0xaa00] == 0
  assert [p.args for p in ps if p.opcode == 0x33] == [(0, 4, 3, 2)]

def test_constants_and_code_are_loaded_from_where_they_are():
  ps, _ = launch(program(consts_bytes=512, instrlen=7))
  loads = {(p.args[0] >> 18 & 0xf, p.args[0] >> 14 & 3): (p.args[0] >> 22, p.args[0] >> 16 & 3, p.args[0] & 0x3fff, p.args[1] | p.args[2] << 32)
           for p in ps if p.opcode == 0x34}
  assert loads == {(13, 1): (32, 2, 0, ARENA + 0x400), (13, 0): (7, 2, 0, CODE)}

@pytest.mark.parametrize("shmem,want", [(0, 1), (1024, 1), (1025, 1), (2048, 1), (2049, 2), (16 << 10, 15), (32 << 10, 31)])
def test_local_memory_is_declared_in_kib_minus_one_and_never_zero(shmem, want):
  """0 would mean all 32 KiB."""
  assert launch(program(shmem=shmem))[1][0xa9b1] & 0x1f == want

@pytest.mark.parametrize("pvt", [1, 512, 513, 1024, 1100, 1536, 4096, 10000])
def test_private_memory(pvt):
  """Per fiber in 512 bytes, per SP (2048 fibers) in 4 KiB, the call stack behind it in 2 KiB, and two SPs."""
  p = program(pvtmem=pvt)
  _, r = launch(p, scratch=SCRATCH)
  units = -(-pvt // 512)
  assert r[0xa9b6] == units and address(r, 0xa9b7) == SCRATCH and r[0xa9b9] == units * 256
  assert r[0xa9bd] * 2048 == units * 512 * 2048
  assert p.scratch_bytes == units * 512 * 2048 * 2

def test_without_private_memory_nothing_is_programmed():
  _, r = launch(program())
  assert [r[0xa9b6 + i] for i in range(4)] == [0, 0, 0, 0] and r[0xa9bd] == 0

@pytest.mark.parametrize("instrlen", [1, 63, 64, 65, 436])
def test_programs_beyond_the_instruction_cache_get_the_workaround(instrlen):
  ps, r = launch(program(instrlen=instrlen))
  assert r[0xa9bc] == instrlen
  assert [p.args[0] >> 22 for p in ps if p.opcode == 0x34 and p.args[0] >> 14 & 3 == 0] == [min(instrlen, 64)]
  order = [(PS_INSTR_SIZE, p.args[0]) if p.reg == PS_INSTR_SIZE else ("event", p.args[0]) if p.opcode == 0x46 else (CS_INSTR_SIZE, p.args[0])
           for p in ps if p.reg in (PS_INSTR_SIZE, CS_INSTR_SIZE) or (p.opcode == 0x46 and p.args[0] == EV_LABEL)]
  assert order == ([(PS_INSTR_SIZE, instrlen), ("event", EV_LABEL)] if instrlen > 64 else []) + [(CS_INSTR_SIZE, instrlen)]

@pytest.mark.parametrize("over", [{"fregs": 64}, {"hregs": 64}, {"brnchstck": 64}, {"pvtmem": 256 * 512}])
def test_a_program_that_a_register_cannot_describe_is_refused(over):
  with pytest.raises((ValueError, RuntimeError)): launch(program(**over), local=(1, 1, 1), scratch=SCRATCH)

@pytest.mark.parametrize("groups,local", [((1,)*3, (1024, 2, 1)), ((1,)*3, (2048, 1, 1)), ((1 << 23, 1, 1), (512, 1, 1)), ((1,)*3, (0, 1, 1))])
def test_a_launch_that_the_chip_cannot_do_is_refused(groups, local):
  with pytest.raises((ValueError, RuntimeError)): launch(program(), groups, local)

@pytest.mark.parametrize("fregs,hregs,want", [(1, 0, 1024), (12, 0, 1024), (13, 0, 896), (48, 0, 256), (24, 48, 256), (47, 3, 128)])
def test_registers_limit_the_workgroup(fregs, hregs, want):
  """96 vec4 registers for each of 128 fibers, 8 waves pairs: a wave's registers are given out for 128 fibers."""
  per_fiber = max(1, fregs + (hregs + hregs % 2) // 2)
  assert program(fregs=fregs, hregs=hregs).max_threads == min(1024, 384 * 32 // (per_fiber * 128) * 128) == want

def test_a_batch_begins_with_invalidation_and_ends_with_flush_and_signal():
  enc = ops_qcom.Encoder(lambda b: (b, None))
  enc.launch(program(), Addr(CODE), [], (), (1, 1, 1), (1, 1, 1))
  enc.finish(Addr(BUFS[0]))
  (off, size, _), = enc.segs
  ps = packets(bytes(enc.arena[off:off + size]))
  events = [i for i, p in enumerate(ps) if p.opcode == 0x46]
  assert ps[events[0]].args == (EV_CACHE_INVALIDATE,) and ps[events[-1]].args[0] == EV_CACHE_FLUSH_TS and len(ps[events[-1]].args) == 4
  run = next(i for i, p in enumerate(ps) if p.opcode == 0x33)
  assert events[0] < run < events[-1] and ps[events[-1] - 1].opcode == 0x26, "the flush must wait for the dispatch"
  assert any(p.opcode == 0x26 for p in ps[events[0]:run])
  assert enc.timeline_dst == off + size - 4

def test_registers_that_another_client_may_have_changed_are_programmed():
  """a630 values of Mesa's freedreno_devices.py; SP_FLOAT_CNTL 0 keeps half infinities."""
  s = Stream()
  s.context_state(Addr(None, 0))
  r = registers(packets(resolve(s)))
  want = {0xae03: 0x1430, 0xae04: 0, 0xb600: 0x108000, 0xbe04: 0x80000, 0x0e12: 0x10000001, 0x0e19: 4, 0xae0f: 1 << 5, 0xbb11: 0, 0xa9b2: 0}
  assert {k: r.get(k) for k in want} == want
  assert address(r, 0xb180) == ARENA

# *** arguments and descriptors

def words(p: QCOMProgram, bufs, vals=(), local=(1, 1, 1)) -> bytes: return resolve(p.arguments([Addr(b) for b in bufs], vals, local))

def param(slot, dtype, shape=(16,)): return (f"p{slot}", slot, dtype, shape)

def test_pointers_come_in_signature_order_then_scalars_naturally_aligned():
  sig = (param(0, dtypes.float32), param(1, dtypes.float32), param(2, dtypes.float32), param(3, dtypes.int32, ()), param(4, dtypes.int32, ()))
  data = words(program(signature=sig, buf_off=16), BUFS[:3], (-5, 77))
  assert struct.unpack_from("<3Q2i", data, 16) == (*BUFS[:3], -5, 77)
  assert len(data) == 256 and not any(data[:16]) and not any(data[48:])

def test_immediates_go_where_the_compiler_wants_them():
  imm = np.arange(5, dtype=np.float32).tobytes()
  data = words(program(signature=(param(0, dtypes.float32),), consts=[(64, imm)]), BUFS[:1])
  assert data[64:84] == imm and struct.unpack_from("<Q", data)[0] == BUFS[0]

@pytest.mark.parametrize("dtype,fmt,texel", [(dtypes.float32, 130, 16), (dtypes.float16, 98, 8)])
def test_image_descriptors(dtype, fmt, texel):
  """Register database 5.1: a texture (swizzle x y z w) for each image read, a UAV for each written; 64-byte rows."""
  h, w = 37, 1000
  sig = (param(0, dtype, (h, w, 4)), param(1, dtype, (h, w, 4)))
  p = program(signature=sig, tex_cnt=1, ibo_cnt=1, samp_cnt=1, nsamplers=1, tex_to_image=[0], tex_off=256, ibo_off=320, samp_off=384)
  data = words(p, BUFS[:2])
  assert len(data) == 256 + 64 + 64 + 16
  for off, base, swizzle in ((256, BUFS[1], (0, 1, 2, 3)), (320, BUFS[0], (0, 0, 0, 0))):
    d = struct.unpack_from("<16I", data, off)
    assert d[0] & 3 == 0 and d[0] >> 22 & 0xff == fmt and d[0] >> 30 == 0 # linear, no component swap
    assert tuple(d[0] >> s & 7 for s in (4, 7, 10, 13)) == swizzle
    assert (d[1] & 0x7fff, d[1] >> 15 & 0x7fff) == (w, h)
    pitch, align = d[2] >> 7 & 0x3fffff, d[2] & 15
    assert pitch == w * texel and d[2] >> 29 == 1 and pitch % (64 << align) == 0
    assert d[4] | d[5] << 32 == base and d[5] < 1 << 17
    assert d[3] == 0 and not any(d[8:])
  s = struct.unpack_from("<4I", data, 384)
  assert s[0] >> 5 & 7 == s[0] >> 8 & 7 == s[0] >> 11 & 7 == 3 and s[0] & 0x1f == 0 and s[1] & 1 << 5, "clamp to border, nearest, texel coordinates"

def test_an_image_that_a_descriptor_cannot_describe_is_refused():
  for shape in ((37, 1 << 15, 4), (1 << 15, 64, 4), (37, 1001, 4)):
    p = program(signature=(param(0, dtypes.float16, shape),), ibo_cnt=1, ibo_off=256)
    with pytest.raises((ValueError, RuntimeError)): words(p, BUFS[:1])

def test_descriptor_registers_and_counts():
  sig = tuple(param(i, dtypes.float32, (8, 64, 4)) for i in range(5))
  p = program(signature=sig, tex_cnt=3, ibo_cnt=2, samp_cnt=3, nsamplers=3, tex_to_image=[2, 0, 1], tex_off=256, ibo_off=448, samp_off=576)
  ps, r = launch(p)
  assert r[0xa9bb] == 1 << 8 | 3 << 9 | 3 << 17 | 2 << 22 and r[0xa9ba] == 3 and r[0xaa00] == 2
  args = ARENA + 0x400
  assert (address(r, 0xa9e2), address(r, 0xa9e6), address(r, 0xa9f2)) == (args + 576, args + 256, args + 448)
  loads = {(p.args[0] >> 18 & 0xf, p.args[0] >> 14 & 3): (p.args[0] >> 22, p.args[1] | p.args[2] << 32) for p in ps if p.opcode == 0x34}
  assert loads[5, 0] == (3, args + 576) and loads[5, 1] == (3, args + 256) and loads[13, 3] == (2, args + 448)
  data = words(p, BUFS[:5])
  bases = [struct.unpack_from("<Q", data, off + 16)[0] for off in (256, 320, 384, 448, 512)]
  assert bases == [BUFS[2 + 2], BUFS[2 + 0], BUFS[2 + 1], BUFS[0], BUFS[1]], "textures are numbered by tex_to_image among the images read"

# *** what is taken from a compiled program

KERNELS = {
  "elementwise": lambda: Tensor.empty(1000) * 3 + 1,
  "reduction": lambda: Tensor.empty(64, 300).sum(axis=1),
  "matmul": lambda: Tensor.empty(64, 64) @ Tensor.empty(64, 64),
  "transcendental": lambda: (Tensor.empty(100).exp() / Tensor.empty(100).sin()).log2(),
  "integers": lambda: Tensor.empty(100, dtype=dtypes.int32) // 7 + Tensor.empty(100, dtype=dtypes.int32) % 5,
  "half": lambda: Tensor.empty(100, dtype=dtypes.float16).softmax(),
}

@pytest.mark.parametrize("name", list(KERNELS))
def test_program_facts(name):
  """Held against the machine code itself: where `end` is, which registers and constants it uses at most."""
  with opened("QCOM:IR3", [fake_iface(FakeKernel())]):
    KERNELS[name]().realize()
    found = list(ops_qcom.programs.values())
    assert found
    for p in found:
      code = struct.unpack(f"<{len(p.image) // 8}Q", p.image)
      end = next(i for i, w in enumerate(code) if w >> 61 == 0 and w >> 55 & 0xf == 6 and not w >> 49 & 1)
      assert p.instrlen == -(-(max(i for i, w in enumerate(code[:p.instrlen * 16]) if i <= end or w) + 1) // 16) or (end // 16) + 1 == p.instrlen
      assert p.instrlen * 128 <= len(p.image) and end < p.instrlen * 16
      assert 1 <= p.fregs <= 48 and p.hregs <= 48 and p.consts_bytes % 64 == 0 and p.consts_bytes <= 4096
      for off, imm in p.consts: assert off + len(imm) <= p.consts_bytes
      assert p.buf_off + 8 * len(p.signature) <= p.consts_bytes
      # mov from a constant to a full register: cat1, source kind 1
      consts = [w & 0x7ff for w in code[:end] if w >> 61 == 1 and w >> 57 & 3 == 0 and w >> 53 & 3 == 1]
      assert all(4 * c < p.consts_bytes for c in consts)

def test_a_program_with_too_many_samplers_or_constants_is_refused(monkeypatch):
  from tinygrad.runtime.support.compiler_mesa import IR3Compiler
  with opened("QCOM:IR3", [fake_iface(FakeKernel())]) as dev:
    (Tensor.empty(10) + 1).realize()
    elf: TinyELF = next(iter(ops_qcom.programs)).to_elf()
    real = IR3Compiler.unpack_lib
    for fields, words_ in (({"shared_size": 40 << 10}, "local memory"), ({"constlen": 300}, "constants")):
      def unpack(lib, fields=fields):
        v, *rest = real(lib)
        for k, val in fields.items(): setattr(v, k, val)
        return (v, *rest)
      monkeypatch.setattr(IR3Compiler, "unpack_lib", staticmethod(unpack))
      with pytest.raises(RuntimeError, match=words_): QCOMProgram(dev, elf)
