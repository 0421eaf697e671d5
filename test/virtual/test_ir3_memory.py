"""Atomics, UAV and UBO access, indexed addresses, constants written by the program: Mesa's assembler, the native engine, Python integers."""
import itertools, struct
import numpy as np
import pytest
from test.mockgpu.qcom.ir3.image import FORMATS
from test.mockgpu.qcom.ir3.isa import ATOMICS
from test.virtual.ir3_core import Memory
from test.virtual.test_ir3_engine import OUT, fault, launch, words

EDGE = [0, 1, 2, 0x7fffffff, 0x80000000, 0x80000001, 0xfffffffe, 0xffffffff, 0x12345678]

def s32(x: int) -> int: return (x & 0xffffffff) - (x >> 31 << 32)

def apply(op: str, signed: bool, old: int, data: int, compare: int = 0) -> int:
  key = s32 if signed else lambda x: x
  return {"add": old + data, "sub": old - data, "xchg": data, "cmpxchg": data if old == compare else old, "min": min(old, data, key=key),
          "max": max(old, data, key=key), "and": old & data, "or": old | data, "xor": old ^ data}[op] & 0xffffffff

def buffer_descriptor(iova: int, elements: int, fmt: int = 75) -> bytes:
  """An SSBO: 32-bit unsigned elements."""
  return struct.pack("<16I", fmt << 22, elements & 0x7fff | elements >> 15 << 15, 4 << 29, 0, iova & 0xffffffff, iova >> 32, *[0] * 10)

def ubo(iova: int, vec4s: int) -> bytes: return (iova | vec4s << 49).to_bytes(8, "little")

ATOMIC_CASES = [(op, t) for op in ATOMICS.values() for t in (("u32", "s32") if op in ("min", "max") else ("u32",))]

def table(op: str) -> tuple[np.ndarray, ...]:
  """64 triples of old value, data, compare (equal to the old value in half of the cases)."""
  rows = [(a, b, a if k % 2 else b) for k, (a, b) in enumerate(itertools.product(EDGE, EDGE))][:64]
  return tuple(np.array(c, np.uint32) for c in zip(*rows))

LOAD = "ldg.u32 r2.x, g[r40.x], 1\nadd.u r42.x, r40.x, 256\nmov.u32u32 r42.y, r40.y\nldg.u32 r2.y, g[r42.x], 1\n"   # data, compare

@pytest.mark.parametrize("op,t", ATOMIC_CASES)
def test_atomics_of_every_kind_of_memory(op, t):
  """One word a fiber: global, local and buffer forms leave the same memory and give back the old value."""
  old, data, compare = table(op)
  want = [apply(op, t == "s32", int(a), int(b), int(c)) for a, b, c in zip(old, data, compare)]
  for form in "glb":
    mem = Memory()
    src, cell, dst = mem.alloc(512), mem.alloc(256), mem.alloc(512)
    mem.view(src, 512).view(np.uint32)[:] = np.concatenate([data, compare])
    mem.view(cell, 256).view(np.uint32)[:] = old
    head = OUT + LOAD + "shl.b r43.x, r0.x, 2\nadd.u r44.x, r43.x, c0.z\nmov.u32u32 r44.y, c0.w\nadd.u r46.x, r43.x, c1.x\nmov.u32u32 r46.y, c1.y\n"
    text = {"g": f"atomic.g.{op}.untyped.1d.{t}.1.g r5.x, r44.x, r2.x\n",
            "l": f"ldg.u32 r6.x, g[r44.x], 1\nstl.u32 l[r43.x], r6.x, 1\natomic.{op}.untyped.1d.{t}.1.l r5.x, l[r43.x], r2.x\n"
                 "ldl.u32 r6.x, l[r43.x], 1\nstg.u32 g[r44.x], r6.x, 1\n",
            "b": ("mov.u32u32 r5.y, r2.y\nmov.u32u32 r5.z, r2.x\n" if op == "cmpxchg" else "mov.u32u32 r5.y, r2.x\n")
                 + f"atomic.b.{op}.untyped.1d.{t}.1.imm r5.x, r0.x, 0\n"}[form]
    launch(head + text + "stg.u32 g[r46.x], r5.x, 1\nend", mem, (*words(src), *words(cell), *words(dst)), local_bytes=1024,
           uavs=[buffer_descriptor(cell, 64)])
    assert mem.view(dst, 256).view(np.uint32).tolist() == old.tolist(), f"{form}: old values"
    assert mem.view(cell, 256).view(np.uint32).tolist() == want, f"{form}: memory"

@pytest.mark.parametrize("uche", (False, True))
def test_fibers_of_all_groups_add_to_one_word_and_see_each_value_once(uche):
  mem = Memory(uche=uche)
  cell, dst = mem.alloc(4), mem.alloc(64 * 7 * 64 * 4)
  launch("mov.u32u32 r2.x, c0.x\nmov.u32u32 r2.y, c0.y\nmov.u32u32 r3.x, 3\natomic.g.add.untyped.1d.u32.1.g r4.x, r2.x, r3.x\n"
         "mull.u r5.x, r48.x, 448\nadd.u r5.x, r5.x, r0.x\nshl.b r5.x, r5.x, 2\nadd.u r6.x, r5.x, c0.z\nmov.u32u32 r6.y, c0.w\n"
         "(sy)stg.u32 g[r6.x], r4.x, 1\nend", mem, (*words(cell), *words(dst)), (448, 1, 1), (64, 1, 1))
  mem.space.uche_flush()
  n = 448 * 64
  assert mem.view(cell, 4).view(np.uint32)[0] == 3 * n
  assert np.sort(mem.view(dst, 4 * n).view(np.uint32)).tolist() == list(range(0, 3 * n, 3))

def test_atomic_faults():
  mem = Memory()
  a = mem.alloc(4096)
  atomic = "mov.u32u32 r3.x, 1\natomic.g.add.untyped.1d.u32.1.g r4.x, r40.x, r3.x\nend"
  f = fault("add.u r40.x, c0.x, 2\nmov.u32u32 r40.y, c0.y\n" + atomic, mem=mem, consts=words(a), local=(1, 1, 1))
  assert (f.kind, f.address, f.write) == ("misaligned", a + 2, True)
  assert fault("mov.u32u32 r40.x, c0.x\nmov.u32u32 r40.y, c0.y\n" + atomic, mem=mem, consts=words(0x5000)).kind == "unmapped"
  f = fault("mov.u32u32 r2.x, 1024\natomic.add.untyped.1d.u32.1.l r4.x, l[r2.x], r0.x\nend", local_bytes=1024)
  assert (f.kind, f.address) == ("local_out_of_bounds", 1024)
  assert fault("shl.b r2.x, r0.x, 2\natomic.add.untyped.1d.u32.1.l r4.x, l[r2.x], r0.x\nend", local_bytes=1024).kind == "undefined_local"
  launch("shl.b r2.x, r0.x, 2\natomic.xchg.untyped.1d.u32.1.l r4.x, l[r2.x], r0.x\nend", local_bytes=1024)
  f = fault("mov.u32u32 r5.y, 1\natomic.b.add.untyped.1d.u32.1.imm r5.x, r0.x, 1\nend", uavs=[buffer_descriptor(a, 4)], mem=mem)
  assert (f.kind, f.address) == ("out_of_bounds", 1)
  half = buffer_descriptor(a, 4, next(k for k, v in FORMATS.items() if v == ("UINT", 16, 1)))
  assert fault("mov.u32u32 r5.y, 1\natomic.b.add.untyped.1d.u32.1.imm r5.x, r0.x, 0\nend", uavs=[half], mem=mem).kind == "image_type"

@pytest.mark.parametrize("t,n", [(t, n) for t in ("u32", "s32", "f32", "u16") for n in (1, 2, 3, 4)])
@pytest.mark.parametrize("mode", ("imm", "uniform", "nonuniform"))
def test_raw_buffer_loads_and_stores_are_bounded_element_by_element(t, n, mode):
  """Two buffers; the nonuniform form takes them alternately. 40 elements of 64 exist: beyond them loads give 0, stores go nowhere."""
  size = int(t[1:]) // 8
  h, dt = ("h", np.uint16) if size == 2 else ("", np.uint32)
  mem = Memory()
  bufs = [mem.alloc(4096) for _ in range(4)]
  data = np.random.default_rng(4).integers(0, 1 << 8 * size, (2, 64 * 4)).astype(dt)
  for k in range(2): mem.view(bufs[k], data[k].nbytes)[:] = data[k].view(np.uint8)
  bound = 40 * n * size // 4 + 1                                # in 32-bit units, inside an element of 16 bits
  desc = [buffer_descriptor(b, bound) for b in bufs]
  slot = {"imm": ("1", "3"), "uniform": ("r9.x", "r9.y"), "nonuniform": ("r8.x", "r8.y")}[mode]
  launch(f"and.b r8.x, r0.x, 1\nadd.u r8.y, r8.x, 2\nmov.u32u32 r9.x, 1\nmov.u32u32 r9.y, 3\nmull.u r2.x, r0.x, {n}\n"
         f"ldib.b.untyped.1d.{t}.{n}.{mode} {h}r4.x, r2.x, {slot[0]}\n(sy)stib.b.untyped.1d.{t}.{n}.{mode} {h}r4.x, r2.x, {slot[1]}\nend",
         mem, uavs=desc)
  limit = bound * 4 // size
  for k in range(2):
    want = np.zeros(64 * n, dt)
    for lane in range(64):
      if (1 if mode != "nonuniform" else lane & 1) == k:
        for c in range(lane * n, lane * n + n):
          if c < limit: want[c] = data[k][c]
    assert (mem.view(bufs[2 + k], 64 * n * size).view(dt) == want).all()

def test_sizes_of_images_and_buffers():
  from test.virtual.ir3_core import image_descriptor
  mem = Memory()
  dst = mem.alloc(4096)
  uavs = [buffer_descriptor(dst, 100000), image_descriptor(dst, (5, 16), 4, False)]
  launch("resinfo.b.untyped.1d.u32.1.imm r2.x, 0\nresinfo.b.untyped.2d.u32.1.imm r3.x, 1\nmov.u32u32 r4.x, 0\ngetsize (u32)(xyz)r5.x, r4.x, t#0\n"
         "mov.u32u32 r6.x, c0.x\nmov.u32u32 r6.y, c0.y\nstg.u32 g[r6.x], r2.x, 3\nstg.u32 g[r6.x+12], r3.x, 3\nstg.u32 g[r6.x+24], r5.x, 3\nend", mem,
         words(dst), (1, 1, 1), uavs=uavs, textures=[image_descriptor(dst, (7, 32), 2, True)])
  assert mem.view(dst, 36).view(np.uint32).tolist() == [100000, 1, 1, 16, 5, 1, 32, 7, 1]

def test_constant_buffers_by_immediate_and_register():
  """ldc reads vec4s of the UBO that LOAD_STATE6 set up, from any component on; beyond its size 0."""
  mem = Memory()
  a, b, dst = mem.alloc(4096), mem.alloc(4096), mem.alloc(64 * 16)
  data = [np.random.default_rng(k).integers(0, 1 << 32, 1024, dtype=np.uint32) for k in range(2)]
  for iova, d in zip((a, b), data): mem.view(iova, 4096).view(np.uint32)[:] = d
  launch("shl.b r40.x, r0.x, 4\nadd.u r40.x, r40.x, c0.x\nmov.u32u32 r40.y, c0.y\nand.b r3.x, r0.x, 1\nldc.offset2.2.nonuniform r4.x, r0.x, r3.x\n"
         "ldc.offset1.2.imm r4.z, 3, 1\nstg.u32 g[r40.x], r4.x, 4\nend", mem, words(dst), ubos=[ubo(a, 50), ubo(b, 64)])
  got = mem.view(dst, 1024).view(np.uint32).reshape(64, 4)
  for lane in range(64):
    d, size = data[lane & 1], (50, 64)[lane & 1]
    assert got[lane].tolist() == [*(d[4 * lane + 2:4 * lane + 4].tolist() if lane < size else [0, 0]), *data[1][13:15].tolist()]
  assert fault("ldc.offset0.1.imm r4.x, 0, 2\nend", ubos=[ubo(a, 4)]).kind == "out_of_bounds"

@pytest.mark.parametrize("t,shift,off", [(t, s, o) for t in ("u32", "s32", "f32", "u16", "s16", "f16", "u8") for s in ((0, 1, 2, 3) if t != "u8"
    else (0,))
                                         for o in (0, 3)])
def test_indexed_addresses(t, shift, off):
  """ldg.a and stg.a: base + (((index << shift) + offset) << log2 size), the index unsigned, without wrapping at 32 bits."""
  size = int(t[1:]) // 8
  h, dt = ("", np.uint32) if size == 4 else ("h", np.uint16)
  mem = Memory()
  src, dst = mem.alloc(1 << 14), mem.alloc(1 << 14)
  data = np.random.default_rng(8).integers(0, 256, 1 << 14, dtype=np.uint8)
  mem.view(src, 1 << 14)[:] = data
  log = size.bit_length() - 1
  at = f"(((r3.x<<{shift})+{off})<<{log})" if shift and off else f"((r3.x+{off})<<{log})" if off \
    else f"(r3.x<<{shift + log})"
  if log == 0:
    at = f"r3.x+{off}"                                          # Mesa's assembler has no syntax for a shift of bytes
  base = "mov.u32u32 r5.x, c0.x\nmov.u32u32 r5.y, c0.y\nmov.u32u32 r6.x, c0.z\nmov.u32u32 r6.y, c0.w\nmov.u32u32 r3.x, r0.x\n"
  launch(base + f"ldg.a.{t} {h}r8.x, g[r5.x+{at}], 1\n(sy)stg.a.{t} g[r6.x+{at}], {h}r8.x, 1\nend", mem, (*words(src), *words(dst)))
  want = np.zeros(1 << 14, np.uint8)
  for lane in range(64):
    o = ((lane << shift) + off) << log
    want[o:o + size] = data[o:o + size]
  assert (mem.view(dst, 1 << 14) == want).all()
  if t == "u32" and not off and not shift:      # an index of 2^30 and more: past 4 GiB
    f = fault("mov.u32u32 r5.x, c0.x\nmov.u32u32 r5.y, c0.y\nmov.u32u32 r3.x, c0.z\nldg.a.u32 r8.x, g[r5.x+(r3.x<<2)], 1\nend",
              mem=mem, consts=(*words(src), 0x80000001, 0), local=(1, 1, 1))
    assert (f.kind, f.address) == ("unmapped", src + (0x80000001 << 2))

@pytest.mark.parametrize("t", ("u32", "s32", "f32"))
def test_programs_write_constants(t):
  """stc, ldg.k and ldc.k, with and without a1.x; later reads, also indexed and narrowed ones, see them."""
  mem = Memory()
  src, dst = mem.alloc(4096), mem.alloc(64 * 16)
  data = np.random.default_rng(3).integers(0, 1 << 32, 256, dtype=np.uint32)
  mem.view(src, 1024).view(np.uint32)[:] = data
  for order in ("forward", "reversed"):
    launch("mov.u32u32 r2.x, 11\nmov.u32u32 r2.y, 22\nmov.u32u32 r6.x, c0.z\nmov.u32u32 r6.y, c0.w\nshps #8\n"
           f"stc.{t} c[32], r2.x, 2\nmova1 a1.x, 40\nstc.{t} c[a1.x+4], r2.x, 1\nldg.k.{t} c[48], g[r6.x+8], 4\n"
           f"ldg.k.{t} c[a1.x+20], g[r6.x], 1\nmova1 a1.x, 64\nldc.2.k.imm c[a1.x], 5, 0\nshpe\n"
           "add.u r4.x, c8.x, c8.y\nadd.u r4.y, c11.x, c12.z\nmov.u32u32 r4.z, c15.x\nmov.s16s16 hr1.x, 71\nmova a0.x, hr1.x\n"
           "mov.u32u32 r4.w, c<a0.x + 0>\n" + OUT.replace("r0.x, 2", "r0.x, 4") + "stg.u32 g[r40.x], r4.x, 4\nend", mem, (*words(dst), *words(src)),
           ubos=[ubo(src, 64)], groups=(3, 1, 1), order=order)
    want = [33, (11 + int(data[4])) & 0xffffffff, int(data[0]), int(data[4 * 5 + 7])]
    assert (mem.view(dst, 1024).view(np.uint32).reshape(64, 4) == want).all()
  assert fault(f"mova1 a1.x, 1023\nstc.{t} c[a1.x], r0.x, 2\nend").kind in ("out_of_bounds", "undefined_register")

def test_early_groups_do_not_leak_constants_into_later_ones():
  """Each group starts from the constants of the dispatch."""
  mem = Memory()
  dst = mem.alloc(4 * 8)
  launch("mov.u32u32 r2.x, c8.x\nadd.u r2.x, r2.x, 5\nstc.u32 c[32], r2.x, 1\nmov.u32u32 r3.x, c8.x\nshl.b r4.x, r48.x, 2\nadd.u r4.x, r4.x, c0.x\n"
         "mov.u32u32 r4.y, c0.y\nstg.u32 g[r4.x], r3.x, 1\nend", mem, (*words(dst), *[0] * 30, 7), (1, 1, 1), (8, 1, 1))
  assert mem.view(dst, 32).view(np.uint32).tolist() == [12] * 8
