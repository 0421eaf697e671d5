"""The shader core as a machine: control flow, barriers, memory kinds, faults, strict checks, hangs, counters. Programs are assembled by Mesa."""
import ctypes, threading, time
import numpy as np
import pytest
from test.mockgpu.qcom.ir3.native import Dispatch, Engine, ShaderFault, ShaderHang, UnknownInstruction
from test.mockgpu.qcom.memory import BoInfo
from test.virtual.ir3_asm import assemble
from test.virtual.ir3_core import Memory, engine, image_descriptor
from test.virtual.ir3_lab import run

LANE = np.arange(64, dtype=np.uint32)
OUT = "shl.b r40.x, r0.x, 2\nadd.u r40.x, r40.x, c0.x\nmov.u32u32 r40.y, c0.y\n"   # r40.xy = &out[local id]

def launch(text: str, mem: Memory | None = None, consts: tuple[int, ...] = (), local=(64, 1, 1), groups=(1, 1, 1), **kw) -> None:
  """Runs a program whose consts start with the given dwords."""
  mem = mem or Memory()
  c = np.zeros(1024, np.uint32)
  c[:len(consts)] = consts
  eng = kw.pop("eng", None) or engine()
  with mem.space.running(): eng.run(eng.program(assemble(text)), Dispatch(groups=groups, local=local, consts=c, space=mem.space, **kw))

def words(addr: int) -> tuple[int, int]: return addr & 0xffffffff, addr >> 32

def fault(text: str, **kw) -> ShaderFault:
  with pytest.raises(ShaderFault) as e: launch(text, **kw)
  return e.value

# *** control flow

def test_divergent_branches_rejoin():
  out = run("cmps.u.lt p0.x, r0.x, 20\ncmps.u.lt p0.y, r0.x, 40\nmov.u32u32 r2.x, 0\nbr !p0.x, #3\nadd.u r2.x, r2.x, 1\njump #5\n(jp)br !p0.y, #3\n"
            "add.u r2.x, r2.x, 10\njump #2\n"
            "(jp)add.u r2.x, r2.x, 100\n(jp)add.u r2.x, r2.x, 1000", {}, {"r2.x": np.uint32})
  assert (out["r2.x"] == np.where(LANE < 20, 1001, np.where(LANE < 40, 1010, 1100))).all()

def test_loop_with_different_trip_counts():
  text = "mov.u32u32 r2.x, 0\nmov.u32u32 r2.y, 0\n(jp)cmps.u.ge p0.x, r2.x, r0.x\nbr p0.x, #4\nadd.u r2.y, r2.y, r2.x\nadd.u r2.x, r2.x, 1\n" \
         "jump #-4\n(jp)nop"
  out = run(text, {}, {"r2.x": np.uint32, "r2.y": np.uint32})
  assert (out["r2.x"] == LANE).all() and (out["r2.y"] == LANE * (LANE - 1) // 2).all()

@pytest.mark.parametrize("cond,want", (("brao p0.x, p0.y", (LANE < 8) | (LANE & 1 == 0)), ("braa p0.x, !p0.y", (LANE < 8) & (LANE & 1 == 1)),
                                       ("bany p0.x", LANE >= 0),
                                       ("ball p0.x", LANE < 0), ("bany p0.z", LANE < 0), ("ball p0.w", LANE >= 0)))
def test_branch_kinds(cond, want):
  out = run("cmps.u.lt p0.x, r0.x, 8\nand.b r3.x, r0.x, 1\ncmps.u.eq p0.y, r3.x, 0\ncmps.u.lt p0.z, r0.x, 0\ncmps.u.ge p0.w, r0.x, 0\n"
            f"mov.u32u32 r2.x, 1\n{cond}, #2\nmov.u32u32 r2.x, 0\n(jp)nop", {}, {"r2.x": np.uint32})
  assert (out["r2.x"] == want).all()

def test_predication_masks_writes_and_stores():
  mem = Memory()
  addr = mem.alloc(256)
  mem.view(addr, 256)[:] = 0xff
  launch(OUT + "cmps.u.lt p0.x, r0.x, 10\nmov.u32u32 r2.x, 1\npredt\nmov.u32u32 r2.x, 2\npredf\nmov.u32u32 r2.x, 3\nprede\n"
         "cmps.u.lt p0.x, r0.x, 32\npredt\n"
         "stg.u32 g[r40.x], r2.x, 1\nprede\nend", mem, words(addr))
  got = mem.view(addr, 256).view(np.uint32)
  assert (got[:32] == np.where(LANE[:32] < 10, 2, 3)).all() and (got[32:] == 0xffffffff).all()

def test_predication_false_side_first_and_refused_shapes():
  out = run("cmps.u.lt p0.x, r0.x, 10\npredf\nmov.u32u32 r2.x, 3\npredt\nmov.u32u32 r2.x, 2\nprede\npredf\n"
            "add.u r2.x, r2.x, 10\nprede", {}, {"r2.x": np.uint32})
  assert (out["r2.x"] == np.where(LANE < 10, 2, 13)).all()
  for text in ("predt\npredt\nprede\nend", "prede\nend", "predt\nnop\nend", "predt\njump #1\n(jp)prede\nend"):
    with pytest.raises(UnknownInstruction): launch(text)

@pytest.mark.parametrize("limit", (0, 64), ids=("none-true", "all-true"))
def test_predication_when_all_fibers_agree(limit):
  out = run(f"cmps.u.lt p0.x, r0.x, {limit}\nmov.u32u32 r2.x, 1\npredt\nadd.u r2.x, r2.x, 1\npredf\nadd.u r2.x, r2.x, 10\nprede\n"
            f"add.u r2.x, r2.x, 100", {}, {"r2.x": np.uint32})
  assert (out["r2.x"] == (111 if limit == 0 else 102)).all()

def test_getone_takes_one_fiber_and_call_returns():
  out = run("mov.u32u32 r2.x, 0\ngetone #2\njump #2\n(jp)mov.u32u32 r2.x, 1\n(jp)nop", {}, {"r2.x": np.uint32})
  assert out["r2.x"].sum() == 1
  out = run("mov.u32u32 r2.x, 1\ncmps.u.lt p0.x, r0.x, 5\ncall #4\nbr p0.x, #2\ncall #2\n(jp)jump #3\n(jp)add.u r2.x, r2.x, 7\nret\n(jp)nop", {},
            {"r2.x": np.uint32})
  assert (out["r2.x"] == np.where(LANE < 5, 8, 15)).all()

def test_early_end_lets_the_others_go_on():
  mem = Memory()
  addr = mem.alloc(256)
  launch(OUT + "cmps.u.lt p0.x, r0.x, 30\nbr p0.x, #2\nend\n(jp)mov.u32u32 r2.x, 9\nstg.u32 g[r40.x], r2.x, 1\nend", mem, words(addr))
  assert (mem.view(addr, 256).view(np.uint32) == np.where(LANE < 30, 9, 0)).all()

# *** ids, barriers, local and private memory

@pytest.mark.parametrize("order", ("forward", "reversed", 1, 99, 2 ** 64 - 1))
def test_every_fiber_of_every_group_runs_once_with_its_ids(order):
  local, groups = (7, 5, 3), (4, 3, 2)
  mem = Memory()
  n = int(np.prod(local) * np.prod(groups))
  addr = mem.alloc(n * 16)
  lin = "mull.u r10.x, r0.z, 35\nmull.u r10.y, r0.y, 7\nadd.u r10.x, r10.x, r10.y\nadd.u r10.x, r10.x, r0.x\nmull.u r10.z, r48.z, 12\n" \
        "mull.u r10.w, r48.y, 4\n" \
        "add.u r10.z, r10.z, r10.w\nadd.u r10.z, r10.z, r48.x\nmull.u r10.z, r10.z, 105\nadd.u r10.x, r10.x, r10.z\n"
  launch(lin + "shl.b r40.x, r10.x, 4\nadd.u r40.x, r40.x, c0.x\nmov.u32u32 r40.y, c0.y\nldg.u32 r12.x, g[r40.x], 1\nshl.b r11.x, r0.x, 8\n"
         "or.b r11.x, r11.x, r0.y\nshl.b r11.x, r11.x, 8\n"
         "or.b r11.x, r11.x, r0.z\nmov.u32u32 r11.y, r48.x\nmov.u32u32 r11.z, r48.y\nmov.u32u32 r11.w, r48.z\nadd.u r12.x, r12.x, 1\n"
         "shl.b r12.y, r12.x, 24\nor.b r11.x, r11.x, r12.y\n"
         "stg.u32 g[r40.x], r11.x, 4\nend", mem, words(addr), local, groups, order=order)
  got = mem.view(addr, n * 16).view(np.uint32).reshape(*groups[::-1], *local[::-1], 4)
  gz, gy, gx, z, y, x = np.indices((*groups[::-1], *local[::-1]))
  for k, want in enumerate((1 << 24 | x << 16 | y << 8 | z, gx, gy, gz)): assert (got[..., k] == want).all()

@pytest.mark.parametrize("order", ("forward", "reversed", 5))
def test_barrier_between_local_store_and_load(order):
  """256 fibers reverse their data through local memory: without the rendezvous a wave would read what another has not stored yet."""
  mem = Memory()
  addr = mem.alloc(1024 * 3)
  base = "shl.b r2.x, r48.x, 10\nshl.b r2.y, r0.x, 2\nadd.u r40.x, r2.x, r2.y\nadd.u r40.x, r40.x, c0.x\nmov.u32u32 r40.y, c0.y\n"
  launch(base + "mull.u r3.x, r48.x, 1000\nadd.u r3.x, r3.x, r0.x\nstl.u32 l[r2.y], r3.x, 1\n(ss)bar.g\nsub.u r4.x, c0.z, r2.y\n"
         "(ss)ldl.u32 r5.x, l[r4.x], 1\n(sy)stg.u32 g[r40.x], r5.x, 1\nend",
         mem, (*words(addr), 1020), (256, 1, 1), (3, 1, 1), local_bytes=1024, order=order)
  assert (mem.view(addr, 3072).view(np.uint32).reshape(3, 256) == np.arange(3)[:, None] * 1000 + np.arange(255, -1, -1)).all()

@pytest.mark.parametrize("size,t,h", ((4, "u32", ""), (2, "u16", "h"), (1, "u8", "h")))
def test_private_and_local_memory_of_every_width(size, t, h):
  vals = {f"{h}r{4 + k}.x": (LANE * 37 + k * 11).astype(np.uint32 if size == 4 else np.uint16) for k in range(2)}
  scale = {4: 2, 2: 1, 1: 0}[size]
  out = run(f"mov.u32u32 r2.x, 0\nstp.{t} p[r2.x+8], {h}r4.x, 1\nstp.{t} p[r2.x+16], {h}r5.x, 1\nldp.{t} {h}r6.x, p[r2.x+16], 1\n"
            f"ldp.{t} {h}r7.x, p[r2.x+8], 1\nshl.b r2.y, r0.x, {scale}\n"
            f"stl.{t} l[r2.y+{4 * size}], {h}r4.x, 1\nldl.{t} {h}r8.x, l[r2.y+{4 * size}], 1", vals,
            {f"{h}r{k}.x": np.uint32 if size == 4 else np.uint16 for k in (6, 7, 8)}, pvt_bytes=512, local_bytes=1024)
  m = (1 << 8 * size) - 1
  assert (out[f"{h}r6.x"] == vals[f"{h}r5.x"] & m).all() and (out[f"{h}r7.x"] == vals[f"{h}r4.x"] & m).all() and (out[f"{h}r8.x"]
                                                                                                                  == vals[f"{h}r4.x"] & m).all()

@pytest.mark.parametrize("uche", (False, True))
@pytest.mark.parametrize("pattern", ("contiguous", "strided", "uniform", "scattered"))
def test_vector_access_patterns(pattern, uche):
  """The coalesced fast paths and the per-lane path of ldg/stg give the same memory."""
  mem = Memory(uche=uche)
  src, dst, off = mem.alloc(1 << 16), mem.alloc(1 << 16), mem.alloc(256)
  data = np.random.default_rng(5).integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
  mem.view(src, 1 << 16).view(np.uint32)[:] = data
  offs = {"contiguous": LANE * 16, "strided": LANE * 48, "uniform": LANE * 0 + 64, "scattered": (LANE * 2654435761 >> 20).astype(np.uint32) % 4096
          * 16}[pattern].astype(np.uint32)
  mem.view(off, 256).view(np.uint32)[:] = offs
  pre = "shl.b r40.x, r0.x, 2\nadd.u r40.x, r40.x, c1.x\nmov.u32u32 r40.y, c1.y\nldg.u32 r2.x, g[r40.x], 1\n" \
        "add.u r41.x, r2.x, c0.x\nmov.u32u32 r41.y, c0.y\nadd.u r42.x, r2.x, c0.z\nmov.u32u32 r42.y, c0.w\n"
  for live in (64, 64, 37):
    mem.view(dst, 1 << 16)[:] = 0
    launch(pre + "ldg.u32 r4.x, g[r41.x], 4\nstg.u32 g[r42.x], r4.x, 4\nend", mem, (*words(src), *words(dst), *words(off)), (live, 1, 1))
    if uche:
      assert not mem.view(dst, 1 << 16).any(), "a store reached memory without a flush"
      mem.space.uche_flush()
      mem.space.uche_invalidate()
    want = np.zeros(1 << 14, np.uint32)
    for o in offs[:live]: want[o // 4:o // 4 + 4] = data[o // 4:o // 4 + 4]
    assert (mem.view(dst, 1 << 16).view(np.uint32) == want).all()

# *** images

@pytest.mark.parametrize("half", (False, True), ids=("32f", "16f"))
def test_image_load_store_with_pitch_and_out_of_range(half):
  mem, item = Memory(), 2 if half else 4
  h, w = 5, 16
  src, dst = mem.alloc(h * w * 4 * item), mem.alloc(h * w * 4 * item)
  dt = np.float16 if half else np.float32
  img = np.random.default_rng(2).standard_normal((h, w, 4)).astype(dt)
  mem.view(src, img.nbytes)[:] = img.view(np.uint8).ravel()
  launch("and.b r2.x, r0.x, 15\nshr.b r2.y, r0.x, 4\nadd.u r2.x, r2.x, -2\nisam.1d (f32)(xyzw)r4.x, r2.x, s#0, t#0\n"
         "(sy)(rpt3)add.f r4.x, (r)r4.x, (1.0)\nadd.u r3.x, r2.x, 4\n"
         "mov.u32u32 r3.y, r2.y\nstib.b.typed.2d.f32.4.imm r4.x, r3.x, 0\nend", mem, local=(128, 1, 1),
         textures=[image_descriptor(src, (h, w), item, True)],
         uavs=[image_descriptor(dst, (h, w), item, False)])
  got = mem.view(dst, img.nbytes).view(dt).reshape(h, w, 4)
  want = np.zeros_like(img)
  padded = np.concatenate([np.zeros((h, 2, 4), np.float32), img.astype(np.float32)], 1)[:, :w] + 1     # texels left of the image read 0
  want[:, 2:] = padded[:, :w - 2].astype(dt)
  np.testing.assert_array_equal(got, want)

def test_unsupported_texture_layouts_are_refused():
  bad = bytearray(image_descriptor(0x1000, (4, 16), 4, True))
  bad[0] |= 1
  with pytest.raises(ValueError, match="TILE_MODE"): launch("end", textures=[bytes(bad)])

# *** faults

def test_unmapped_access_reads_zero_drops_stores_and_names_lane_and_address():
  mem = Memory()
  addr = mem.alloc(4096)
  mem.view(addr, 4096)[:] = 7
  f = fault("shl.b r40.x, r0.x, 7\nadd.u r40.x, r40.x, c0.x\nmov.u32u32 r40.y, c0.y\nldg.u32 r2.x, g[r40.x], 1\nstg.u32 g[r40.x], r2.x, 1\nend",
            mem=mem, consts=words(addr))
  assert (f.kind, f.pc, f.lane, f.address, f.size, f.write) == ("unmapped", 3, 32, addr + 4096, 4, False)
  assert len(f.faults) == 64 and {x.kind for x in f.faults} == {"unmapped"} and {x.write for x in f.faults} == {False, True} and "ldg.u32" in str(f)
  assert (mem.view(addr, 4096) == 7).all()

def test_readonly_and_not_resident_and_misaligned():
  mem = Memory()
  a = mem.alloc(4096)
  page = np.zeros(8192, np.uint8)
  host = page.ctypes.data + (-page.ctypes.data % 4096)
  mem.space.map(0x5000000, 4096, host, readonly=True, bo=(ro := BoInfo(name="ro")))
  store, load = OUT + "stg.u32 g[r40.x], r0.x, 1\nend", OUT + "ldg.u32 r2.x, g[r40.x], 1\nend"
  assert fault(store, mem=mem, consts=words(0x5000000)).kind == "readonly" and not page.any()
  launch(load, mem, words(0x5000000))
  mem.space.set_resident([ro])
  assert fault(load, mem=mem, consts=words(a)).kind == "not_resident"
  mem.space.set_resident(None)
  f = fault(load, mem=mem, consts=words(a + 2))
  assert f.kind == "misaligned" and f.address == a + 2

def test_local_and_private_bounds():
  assert fault("shl.b r2.x, r0.x, 5\nstl.u32 l[r2.x], r0.x, 1\nend", local_bytes=1024).kind == "local_out_of_bounds"
  f = fault("mov.u32u32 r2.x, 508\nstp.u32 p[r2.x], r0.x, 2\nend", pvt_bytes=512)
  assert (f.kind, f.address, f.size) == ("private_out_of_bounds", 508, 8)
  assert fault("stl.u32 l[r0.x+1], r0.x, 1\nend", local_bytes=1024).kind == "misaligned"

def test_undefined_registers_are_reported_where_they_are_used():
  f = fault("add.u r2.x, r0.x, r3.y\nend")
  assert (f.kind, f.pc, f.address) == ("undefined_register", 0, 13)
  # defined on one path only: the fibers of the other path are reported, through a copy
  text = "cmps.u.lt p0.x, r0.x, 8\nbr !p0.x, #2\nmov.u32u32 r2.x, 5\n(jp)mov.u32u32 r3.x, r2.x\nadd.u r4.x, r3.x, 1\nend"
  f = fault(text)
  assert (f.kind, f.pc, f.lane, f.address) == ("undefined_register", 4, 8, 12)
  launch(text, local=(8, 1, 1))                # all take the defining path
  launch(text, strict=False)
  launch("mov.u32u32 r3.x, r2.x\nmov.u32u32 r4.x, r3.x\nend")   # copies alone are not a use
  f = fault("add.u hr2.x, hr1.x, 1\nend")
  assert f.kind == "undefined_register" and f.size == 2

def test_merged_registers_are_defined_half_by_half():
  """hr4.x and hr4.y are the halves of r2.x, hr6.x and hr6.y those of r3.x."""
  def go(body: str, outputs=("r8.x",)): return run(body, {}, dict.fromkeys(outputs, np.uint32), merged=True)
  low, both = "mov.u16u16 hr4.x, 7\n", "mov.u16u16 hr4.x, 7\nmov.u16u16 hr4.y, 9\n"
  assert (go(both + "add.u r8.x, r2.x, 1")["r8.x"] == 9 << 16 | 8).all()
  assert (go(low + "mov.u32u32 r3.x, r2.x\nadd.u hr16.x, hr6.x, 1\nmov.u16u16 hr16.y, 0")["r8.x"] == 8).all(), "a copy of a register half defined"
  some = "cmps.u.lt p0.x, r0.x, 5\npredt\nmov.u16u16 hr4.y, 9\nprede\n"
  for body, pc, address, size, lane in ((low + "add.u r8.x, r2.x, 1", 3, 8, 4, 0),
                                        (low + "mov.u32u32 r3.x, r2.x\nadd.u hr16.x, hr6.y, 1", 4, 25, 2, 0),
                                        (low + some + "add.u r8.x, r2.x, 1", 7, 8, 4, 5)):
    with pytest.raises(ShaderFault) as e: go(body)
    assert (e.value.kind, e.value.pc, e.value.address, e.value.size, e.value.lane) == ("undefined_register", pc, address, size, lane), body

def test_undefined_consts_and_local_memory():
  valid = np.zeros(1024, bool)
  valid[:4] = True
  f = fault("mov.u32u32 r2.x, c0.w\nadd.u r2.y, r0.x, c1.x\nend", const_valid=valid)
  assert (f.kind, f.pc, f.address) == ("undefined_const", 1, 4)
  launch("jump #2\nadd.u r2.y, r0.x, c1.x\n(jp)end", const_valid=valid)      # not reached
  f = fault("shl.b r2.x, r0.x, 2\ncmps.u.lt p0.x, r0.x, 9\npredt\nstl.u32 l[r2.x], r0.x, 1\nprede\nldl.u32 r3.x, l[r2.x], 1\nend", local_bytes=256)
  assert (f.kind, f.lane, f.address) == ("undefined_local", 9, 36)

@pytest.mark.parametrize("size,t,h", ((4, "u32", ""), (2, "u16", "h"), (1, "u8", "h")))
def test_private_memory_is_read_only_where_the_fiber_wrote(size, t, h):
  base = "mov.u32u32 r2.x, 64\ncmps.u.lt p0.x, r0.x, 9\n" + "mov.u16u16 hr4.x, 1\nmov.u16u16 hr4.y, 1\n" * bool(h)
  value = "hr4.x" if h else "r0.x"
  some = f"predt\nstp.{t} p[r2.x+{size}], {value}, 1\nprede\n"
  def load(n: int) -> str: return f"ldp.{t} {h}r3.x, p[r2.x+{size}], {n}\nend"
  f = fault(base + some + load(1), pvt_bytes=512, groups=(2, 1, 1))
  assert (f.kind, f.lane, f.address, f.size) == ("undefined_private", 9, 64 + size, size)
  every = f"stp.{t} p[r2.x+{size}], {value}, 1\n"
  launch(base + every + load(1), pvt_bytes=512)
  launch(base + some + f"predf\n{every}prede\n".replace("predf", "predf") + load(1), pvt_bytes=512) if False else None
  assert fault(base + every + load(2), pvt_bytes=512).address == 64 + 2 * size, "the second component was not stored"
  launch(base + some + load(1), pvt_bytes=512, strict=False)
  # what a wave stored is not there for the next one in its place
  f = fault(base + "cmps.u.lt p0.x, r48.x, 1\n" + some + load(1), pvt_bytes=512, groups=(2, 1, 1))
  assert f.workgroup == (1, 0, 0) and f.lane == 0

def nested(levels: int) -> str:
  """Ifs in ifs: the fibers below 32 go on, those below 16 of them, ...; the others wait behind the innermost block, each level in its own place."""
  br = [f"cmps.u.lt p0.x, r0.x, {32 >> k}\nbr !p0.x, #{3 * levels - 3 * k - 1}" for k in range(levels)]
  return "\n".join(br) + "\nadd.u r2.x, r2.x, 1\n" + "(jp)add.u r2.x, r2.x, 1\n" * levels

def test_the_branch_stack_must_hold_every_place_where_fibers_wait():
  head = "mov.u32u32 r2.x, 0\n"
  for levels in (1, 2, 3, 5):
    want = sum((LANE < 32 >> k).astype(np.uint32) for k in range(levels)) + 1
    assert (run(head + nested(levels), {}, {"r2.x": np.uint32}, branchstack=-(-levels // 2))["r2.x"] == want).all()
    f = fault(head + nested(levels) + "end", branchstack=(levels - 1) // 2)
    first = (levels - 1) // 2 * 2 + 1                   # the first depth beyond that many pairs
    assert (f.kind, f.pc, f.address) == ("branch_stack", 2 * first, first) and len(f.faults) == levels - first + 1
    launch(head + nested(levels) + "end", branchstack=0, strict=False)
  # if and else: behind the first block, its fibers wait for those of the second (Mesa's ir3_reconvergence.c counts two as well)
  both = "cmps.u.lt p0.x, r0.x, 8\nbr !p0.x, #3\nmov.u32u32 r2.x, 1\njump #2\n(jp)mov.u32u32 r2.x, 2\n(jp)end"
  assert [(f.pc, f.address) for f in fault(both, branchstack=0).faults] == [(1, 1), (3, 2)]
  launch(both, branchstack=1)
  launch(both, branchstack=0, local=(8, 1, 1))          # nobody diverges

def test_register_footprint_is_a_limit():
  f = fault("mov.u32u32 r9.x, 1\nend", full_regs=9)
  assert f.kind == "register_limit"
  launch("mov.u32u32 r9.x, 1\nend", full_regs=10)

def test_running_past_the_end_is_a_fetch_fault():
  eng = engine()
  code = assemble("mov.u32u32 r2.x, 1\nend")[:8]
  with pytest.raises(ShaderFault) as e: eng.run(eng.program(code), Dispatch((1, 1, 1), (1, 1, 1), np.zeros(1024, np.uint32), Memory().space))
  assert e.value.kind == "fetch_past_end" and e.value.pc == 1

@pytest.mark.parametrize("offset", (100, -100, 0x7fffffff, -0x80000000))
def test_a_branch_out_of_the_program_is_a_fetch_fault(offset):
  words = np.frombuffer(assemble("nop\njump #1\n(jp)end"), np.uint64).copy()
  words[1] = int(words[1]) & ~0xffffffff | offset & 0xffffffff
  with pytest.raises(ShaderFault) as e: engine().run(engine().program(words.tobytes()), Dispatch((1, 1, 1), (1, 1, 1), np.zeros(1024, np.uint32),
                                                                                                 Memory().space))
  assert e.value.kind == "fetch_past_end"

@pytest.mark.parametrize("text,at,reg", (("ldg.u32 r2.x, g[r0.x], 1", 14, "p0.w"),
                                         ("stg.u32 g[r0.x], r2.x, 4", 1, "r60.z"), ("ldl.u32 r2.x, l[r0.x], 2", 32, "r60.w")))
def test_memory_operands_are_plain_registers(text, at, reg):
  """Ids above r60.w are address, predicate and no registers; r60.z with four components runs into them."""
  num = {"p0.w": 0xfb, "r60.z": 0xf2, "r60.w": 0xf3}[reg]
  words = np.frombuffer(assemble(f"{text}\nend"), np.uint64).copy()
  words[0] = int(words[0]) & ~(0xff << at) | num << at
  with pytest.raises(UnknownInstruction, match=r"(ldg|stg|ldl)\.u32 with "): engine().program(words.tobytes())

def test_barrier_in_divergent_flow_is_reported():
  assert fault("cmps.u.lt p0.x, r0.x, 8\nbr !p0.x, #2\nbar.g\n(jp)end").kind == "barrier_divergence"

def test_unknown_instruction_comes_before_anything_runs():
  code = bytearray(assemble("mov.u32u32 r2.x, 1\nnop\nend"))
  code[8:16] = (0xc7ff000000000001).to_bytes(8, "little")
  with pytest.raises(UnknownInstruction) as e: engine().program(bytes(code))
  assert e.value.offset == 1
  code = bytearray(assemble("mov.u32u32 r2.x, 1\nend\nnop"))
  code[16:24] = b"\xff" * 8
  engine().program(bytes(code))                # behind the end: never fetched

# *** hang, abort, counters, environment

def test_endless_loop_hangs_after_its_budget():
  f = fault("(jp)add.u r2.x, r0.x, 1\njump #-1\nend", budget=10_000, groups=(50, 1, 1))
  assert isinstance(f, ShaderHang) and f.kind == "hang"

def test_abort_stops_an_endless_loop():
  flag = ctypes.c_int32(0)
  def kill():
    time.sleep(0.1)
    flag.value = 1
  t = threading.Thread(target=kill)
  t.start()
  launch("(jp)add.u r2.x, r0.x, 1\njump #-1\nend", abort=flag, groups=(8, 1, 1))
  t.join()

def test_counters_count_waves_and_active_lanes():
  eng = Engine()
  launch("cmps.u.lt p0.x, r0.x, 10\npredt\n(rpt3)mov.u32u32 r2.x, 0\nprede\nadd.u r3.x, r0.x, 1\nend", local=(100, 1, 1), groups=(3, 1, 1), eng=eng)
  c = eng.counts()
  assert c["cmps.u.lt"] == (6, 300) and c["add.u"] == (6, 300) and c["mov.u32u32"] == (3 * 4, 3 * 4 * 10) and c["end"] == (6, 300)

def test_float_mode_of_the_caller_is_untouched():
  tiny = np.array([1e-40], np.float32)
  run("add.f r2.x, r1.x, r1.x", {"r1.x": LANE}, {"r2.x": np.uint32})
  assert (tiny + tiny)[0] > 0

def test_results_do_not_depend_on_the_number_of_threads():
  mem = Memory()
  a = mem.alloc(64 * 4 * 500)
  text = "shl.b r2.x, r48.x, 8\nshl.b r2.y, r0.x, 2\nadd.u r2.x, r2.x, r2.y\nadd.u r40.x, r2.x, c0.x\nmov.u32u32 r40.y, c0.y\n" \
         "stg.u32 g[r40.x], r2.x, 1\nend"
  for threads in (1, 2, 7):
    mem.view(a, 64 * 4 * 500)[:] = 0xff
    launch(text, mem, words(a), groups=(500, 1, 1), eng=Engine(threads))
    assert (mem.view(a, 64 * 4 * 500).view(np.uint32) == np.arange(64 * 500) * 4).all()

@pytest.mark.parametrize("kw,what", ((dict(local=(1025, 1, 1)), "1 to 1024"), (dict(f16_no_inf=True), "F16_NO_INF"),
                                     (dict(wgid_reg=4), "shared register")))
def test_dispatches_the_engine_cannot_do_are_refused(kw, what):
  with pytest.raises(ValueError, match=what): launch("end", **kw)

def test_an_empty_grid_does_nothing(): launch(OUT + "stg.u32 g[r40.x], r0.x, 1\nend", groups=(4, 0, 1))

def test_stale_lines_are_reported():
  mem = Memory(uche=True)
  a = mem.alloc(256)
  text = OUT + "ldg.u32 r2.x, g[r40.x], 1\nend"
  launch(text, mem, words(a))
  mem.view(a, 256)[64:68] = 9                  # the CPU writes behind the cache's back
  assert mem.space.mark_stale() == 1
  f = fault(text, mem=mem, consts=words(a))
  assert f.kind == "stale" and f.address == a + 64
  mem.space.uche_invalidate()
  launch(text, mem, words(a))

# *** translations kept on disk

def test_a_program_of_an_earlier_process_runs_without_being_decoded(tmp_path, monkeypatch):
  """And still tells what faulted. A torn file is made again, a folder that cannot be written does no harm."""
  from test.mockgpu.qcom.ir3 import native
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  code, d = assemble(OUT + "ldg.u32 r2.x, g[r40.x], 1\nend"), lambda mem: Dispatch((1, 1, 1), (64, 1, 1), np.zeros(1024, np.uint32), mem.space)
  def run_it() -> ShaderFault:
    with pytest.raises(ShaderFault) as e: engine().run(native.Program(code, False), d(Memory()))
    return e.value
  first = run_it()
  kept, = (f for f in tmp_path.rglob("*") if f.is_file())
  decoded = []
  monkeypatch.setattr(native, "Translator", lambda *a, **k: decoded.append(1))
  again = run_it()
  assert not decoded and str(again) == str(first) and "ldg.u32 r2.x, g[r40.x], 1" in str(again)
  monkeypatch.undo()
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  kept.write_bytes(kept.read_bytes()[:100])
  assert str(run_it()) == str(first) and len(kept.read_bytes()) > 100
  monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
  assert str(run_it()) == str(first)

def test_a_kept_program_is_for_its_tables_and_register_mode(tmp_path, monkeypatch):
  from test.mockgpu.qcom.ir3 import native
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  code = assemble("end")
  files = {native.Program(code, m)._file for m in (False, True)}
  monkeypatch.setattr(native, "_tables", lambda: "other")
  assert len(files | {native.Program(code, False)._file}) == 3
