"""Programs in the vendor OpenCL compiler's container, with IR3 code inside: parsed as the unmodified driver parses them, and run by CP_RUN_OPENCL.

Executed on the virtual Adreno. The containers are built here (qcomcl.py), the vendor's compiler never made one of them.
"""
from __future__ import annotations
import dataclasses, hashlib, json, pathlib, pickle, struct, subprocess, sys, types
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from test.virtual.ir3_asm import assemble
from test.virtual.rig import Kernel, Rig, Stream
from test.virtual.qcomcl import BUF, IBO, TEX, Container, containers
from test.virtual.unmodified import environment
from tinygrad import Tensor, TinyJit, Variable, dtypes
from tinygrad.device import Buffer, TinyELF
from tinygrad.helpers import DEV, Context
from tinygrad.runtime import ops_qcom

# *** the parser, on the same bytes as the unmodified driver's

CODE = bytes(range(256)) * 3
VARIANTS = {
  "plain": Container(CODE, "add", [(0, BUF), (8, BUF), (16, BUF)]),
  "nothing": Container(CODE[:8], "k"),
  "constants": Container(CODE, "a_longer_name", [(16, BUF)], [(0xdeadbeef, 0, 4), (0xbeef, 6, 2), (1, 2044, 4), (7, 64, 4)]),
  "images": Container(CODE, "conv", [(0, IBO), (0, TEX), (0, TEX), (0, TEX), (32, BUF)], [(5, 128, 4)], samplers=1, fregs=12, hregs=3),
  "two_written": Container(CODE, "conv2", [(0, IBO), (0, IBO), (0, TEX), (8, BUF), (24, BUF)], samplers=1),
  "spills": Container(CODE, "sp", [(0, BUF)], pvtmem=1300, shmem=4096, branchstack=5, entry=64, fregs=48, hregs=48),
  "spaced": Container(CODE, "gap", [(40, BUF), (8, BUF)], [(9, 32, 4)], gap=24, arg_bytes=72),
  **{f"name_{n}": Container(CODE, "x" * n, [(8, BUF)], samplers=n % 2) for n in (1, 2, 3, 4, 5)},
}
def signature(c: Container) -> tuple:
  """What tinygrad would say of the arguments: every plain one a buffer, images of 4x16 texels."""
  return tuple((f"data{i}", i, dtypes.float32, (4, 16, 4) if kind in (TEX, IBO) else (64,)) for i, (_, kind) in enumerate(c.args))

UNMODIFIED = """
import json, pickle, sys, types
from tinygrad.runtime.ops_qcom import QCOMProgram
out = {}
for name, (lib, kernel) in pickle.load(open(sys.argv[1], "rb")).items():
  p = QCOMProgram.__new__(QCOMProgram)
  p.name = kernel
  try: p._parse_lib(lib)
  except Exception as e: out[name] = f"{type(e).__name__}: {e}"; continue
  out[name] = {"image": bytes(p.image).hex(), "size": p.image_size, "sampler": p.samplers, "consts": sorted((o, c & (256**n - 1), n)
                for c, o, n in p.consts_info), **{k: getattr(p, k) for k in ("prg_offset", "brnchstck", "pvtmem", "shmem", "samp_cnt", "buf_offs",
                "tex_cnt", "ibo_cnt", "ibo_off", "tex_off", "samp_off", "fregs", "hregs")}}
json.dump(out, sys.stdout)
"""

class OpenCL:
  """Stands for a device whose renderer is not IR3."""
  renderer = None

def parse(c: Container | bytes, name: str = "kernel", sig: tuple = ()) -> ops_qcom.QCOMProgram:
  lib, name, sig = (c.build(), c.name, signature(c)) if isinstance(c, Container) else (c, name, sig)
  return ops_qcom.QCOMProgram(OpenCL(), TinyELF(lib, name, DEV.target("QCOM"), sig)) # type: ignore[arg-type]

def test_parsed_as_the_unmodified_driver_parses(tmp_path: pathlib.Path) -> None:
  work = tmp_path / "containers.pickle"
  work.write_bytes(pickle.dumps({n: (c.build(), c.name) for n, c in VARIANTS.items()}))
  (script := tmp_path / "parse.py").write_text(UNMODIFIED)
  env = environment(tmp_path / "wheel")
  run = subprocess.run([sys.executable, str(script), str(work)], env=env, capture_output=True, text=True, timeout=120)
  assert run.returncode == 0, run.stderr[-2000:]
  theirs = json.loads(run.stdout)
  assert list(theirs) == list(VARIANTS)
  for name, c in VARIANTS.items():
    p, want = parse(c), theirs[name]
    ours = {k: getattr(p, k) for k in (
      "prg_offset", "brnchstck", "pvtmem", "shmem", "samp_cnt", "buf_offs", "tex_cnt", "ibo_cnt", "ibo_off", "tex_off",
      "samp_off", "fregs", "hregs")}
    ours["consts"] = sorted([o, int.from_bytes(v, "little"), len(v)] for o, v in p.consts)
    assert p.image[:want["size"]].hex() == want.pop("image"), name
    assert len(p.image) == p.instrlen * 128 >= want["size"] > len(p.image) - 128 and not any(p.image[want["size"]:]), "whole groups, and no more"
    assert len(want.pop("sampler")) == 4 * p.nsamplers and want.pop("size") == len(c.code)
    assert ours == want, name
    # and both agree with what was put in
    assert (p.prg_offset, p.brnchstck, p.pvtmem, p.shmem, p.fregs, p.hregs) == (c.entry, c.branchstack, c.pvtmem, c.shmem, c.fregs, c.hregs)
    assert p.buf_offs == [at for at, kind in c.args if kind == BUF] and len(p.consts) == len(c.consts)

# *** containers that are not what they say: one error, naming the kernel and what is wrong

FINE = Container(CODE, "victim", [(0, IBO), (0, TEX), (8, BUF), (16, BUF)], [(1, 32, 4), (2, 36, 2)], samplers=1)

def put(at: int, value: int) -> bytes:
  lib = bytearray(FINE.build())
  struct.pack_into("<I", lib, at, value)
  return bytes(lib)
def descriptor() -> int: return struct.unpack_from("<I", FINE.build(), 0x110)[0]
def regs() -> int: return struct.unpack_from("<I", FINE.build(), 0x34)[0]

@pytest.mark.parametrize("lib,words", [
  (b"", "the image's size would be at 0x100"), (b"\x7fELF" + bytes(100), "would be at"), (FINE.build()[:300], "its image"),
  (FINE.build()[:-96], "plain arguments"), (put(0x100, 0), "its image is 0x0 bytes"), (put(0x100, 1 << 31), "its image is 0x80000000"),
  (put(0xc0, 0xfffffff0), "at 0xfffffff0"), (put(0x110, 0xffffff00), "the entry point would be at"), (put(0x34, 0x7fffffff), "full registers would"),
  (put(descriptor() + 0xc4, len(CODE)), "the entry point is"), (put(descriptor() + 0x108, 128), "twice the branch stack is 0x80, 0x7f is possible"),
  (put(descriptor() + 0xc8, 1 << 20), "private memory is 0x100000"), (put(descriptor() + 0xd8, 40 << 10), "40960 bytes of local memory"),
  (put(descriptor() + 0xdc, 2), "2 samplers"), (put(regs() + 0x14, 64), "full registers is 0x40"), (put(regs() + 0x18, 1 << 20), "half registers"),
  (put(0xac, 0xffff), "its constants at 0xffff"), (put(0xac, 0), "a constant"),
  (dataclasses.replace(FINE, args=FINE.args[:3]).build(), "1 plain arguments and 2 images, 2 and 2 are passed"),
  (dataclasses.replace(FINE, args=[*FINE.args, (0, TEX)]).build(), "2 plain arguments and 3 images"),
  (dataclasses.replace(FINE, args=[*FINE.args[:3], (2044, BUF)]).build(), "an argument is at byte 2044 of 2048"),
  (dataclasses.replace(FINE, consts=[(1, 2048, 4)]).build(), "a constant is at byte 2048"),
])
def test_a_broken_container_is_named(lib: bytes, words: str) -> None:
  with pytest.raises(RuntimeError) as e: parse(lib, "victim", signature(FINE))
  assert words in str(e.value) and "victim" in str(e.value), str(e.value)

@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_containers_are_parsed_or_refused_in_words(data: st.DataObject) -> None:
  """Truncated anywhere, with words replaced where the parser looks and where it does not: a program whose every place lies inside, or one error."""
  lib = bytearray(FINE.build())
  tables = [0x34, 0xac, 0xb0, 0xc0, 0x100, 0x110, *(descriptor() + o for o in (0xc4, 0xc8, 0xd8, 0xdc, 0x108)), regs() + 0x14, regs() + 0x18,
            *range(len(lib) - 160, len(lib) - 3, 4)]
  for _ in range(data.draw(st.integers(1, 3))):
    at = data.draw(st.one_of(st.sampled_from(tables), st.integers(0, len(lib) - 4)))
    struct.pack_into("<I", lib, at, data.draw(st.one_of(st.integers(0, 0xffffffff), st.integers(0, 4096), st.integers(0, 3))))
  del lib[data.draw(st.one_of(st.just(len(lib)), st.integers(0, len(lib)))):]
  try: p = parse(bytes(lib), "victim", signature(FINE))
  except RuntimeError as e:
    assert "victim" in str(e) and ("broken QCOMCL program" in str(e) or "samplers" in str(e) or "local memory" in str(e)), str(e)
    return
  assert len(p.image) == 128 * p.instrlen and 0 <= p.prg_offset < len(p.image) and max(p.buf_offs) + 8 <= 2048
  assert all(o + len(v) <= 2048 for o, v in p.consts) and p.args_bytes == 2048 + 64 * 2 + 16 * p.nsamplers
  bufs = [ops_qcom.Addr(None, 64 * i) for i in range(4)]
  assert len(p.arguments(bufs, (), (1, 1, 1)).data) == p.args_bytes

# *** launches: machine code written by hand

IDS = """
mov.u32u32 r4.x, r51.x
mov.u32u32 r4.y, r51.y
mov.u32u32 r4.z, r51.z
add.u r5.x, r4.x, r0.x
add.u r5.y, r4.y, r0.y
add.u r5.z, r4.z, r0.z
mull.u r6.x, r5.z, c1.y
add.u r6.x, r6.x, r5.y
mull.u r6.x, r6.x, c1.x
add.u r6.x, r6.x, r5.x
shl.b r6.x, r6.x, 4
add.u r7.x, r6.x, c0.x
mov.u32u32 r7.y, c0.y
ldg.u32 r9.x, g[r7.x], 1
mov.u32u32 r8.y, r51.w
mov.u32u32 r8.z, r52.x
mov.u32u32 r8.w, r52.y
shl.b r8.y, r8.y, 16
(rpt5)nop
add.u r8.y, r8.y, r48.x
shl.b r8.z, r8.z, 16
(rpt5)nop
add.u r8.z, r8.z, r48.y
shl.b r8.w, r8.w, 16
(rpt5)nop
add.u r8.w, r8.w, r48.z
(sy)add.u r8.x, r9.x, 1
stg.u32 g[r7.x], r8.x, 4
end"""

@pytest.mark.parametrize("grid", [((8, 4, 2), (8, 2, 1)), ((10, 3, 2), (8, 2, 1)), ((1, 1, 5), (1, 1, 3)), ((33, 7, 3), (32, 4, 2)),
                                  ((70, 1, 1), (64, 1, 1)), ((5, 5, 5), (10, 10, 10))])
@pytest.mark.parametrize("order", ["forward", "reversed", 3])
def test_every_thread_of_the_grid_runs_once_and_none_outside(grid: tuple, order: str | int) -> None:
  """Whole and partial workgroups in three dimensions: ids, sizes and offsets as OpenCL code finds them in its registers."""
  size, local = grid
  groups = tuple(s / n for s, n in zip(size, local))
  c = Container(assemble(IDS), "ids", [(0, BUF), (16, BUF), (20, BUF)], fregs=10, hregs=1)
  from test.qcom_open import virtual
  with containers(), virtual("KGSL") as (machine, dev):
    machine.gpu.order = order
    sig = ((None, 0, dtypes.uint32, (1,)), ("nx", 1, dtypes.int32, ()), ("ny", 2, dtypes.int32, ()))
    prg = ops_qcom.QCOMProgram(dev, TinyELF(c, "ids", DEV.target("QCOM"), sig)) # type: ignore[arg-type]
    room = [g * n for g, n in zip((-(-s // n) for s, n in zip(size, local)), local)]          # with room for whole groups
    out = Buffer("QCOM", 4 * int(np.prod(room)), dtypes.uint32, preallocate=True)
    assert prg(out._buf, global_size=groups, local_size=local, vals=(room[0], room[1]), wait=True) > 0
    got = out.numpy().reshape(*room[::-1], 4)
    assert any(record.ibs for record in machine.kgsl.commands) and machine.gpu.counters["dispatches"] == 1
  z, y, x = np.indices(room[::-1])
  inside = (x < size[0]) & (y < size[1]) & (z < size[2])
  np.testing.assert_array_equal(got[..., 0], inside)
  for k, (at, n) in enumerate(zip((x, y, z), local)): np.testing.assert_array_equal(got[..., 1 + k], np.where(inside, (at // n) << 16 | n, 0))

LINEAR = """
mov.u32u32 r6.x, r51.x
add.u r5.x, r6.x, r0.x
mull.u r6.y, r51.y, 64
add.u r6.z, r6.y, r0.y
shl.b r6.w, r5.x, 2
add.u r7.x, r6.w, c0.x
mov.u32u32 r7.y, c0.y
shl.b r8.x, r1.w, 8
add.u r8.x, r8.x, r51.z
shl.b r8.y, r6.y, 16
add.u r8.x, r8.x, r8.y
stg.u32 g[r7.x], r8.x, 1
end"""

def by_hand(rig: Rig, code: bytes, constlen: int = 4, wgid: int = 252) -> Kernel:
  """Machine code that needs 10 full registers and no half ones, loaded as a kernel of `rig`. Constants in vec4."""
  variant = types.SimpleNamespace(info=types.SimpleNamespace(max_reg=9, max_half_reg=-1), branchstack=0, shared_size=0, pvtmem_size=0,
                                  mergedregs=False, constlen=constlen, cs=types.SimpleNamespace(work_group_id=wgid, local_invocation_id=0))
  return rig.load(Kernel("by hand", code + bytes(-len(code) % 128), variant, None, b""))

@pytest.mark.parametrize("opencl", [False, True])
def test_global_offsets_and_linear_ids(opencl: bool) -> None:
  """SP_CS_NDRANGE_2/4/6 count into WGOFFSET, SP_CS_WGE_CNTL can ask for the number of a thread in its group. Neither driver uses them."""
  rig = Rig()
  out = rig.alloc(4096, "out")
  args = rig.alloc(4096, "args").put(struct.pack("<Q", out.iova))
  k = by_hand(rig, assemble(LINEAR))
  s = rig.setup(Stream(), k, args, (3, 1, 1), (40, 1, 1))
  for reg, v in ((0xb992, 5), (0xb994, 2), (0xb996, 77)): s.pkt4(reg, v)
  s.pkt4(0xb997, 252 | 252 << 8 | 0xcc << 16, 7).pkt4(0xb999, 3, 1, 1)
  if opencl: s.pkt4(0xb991, 100).pkt7(0x31, 0)
  else: s.pkt7(0x33, 0, 3, 1, 1)
  job = rig.run(s.wfi())
  assert job.result.status == "ok" and not job.result.reports, "\n".join(map(str, job.result.reports))
  n, want = 100 if opencl else 120, np.zeros(1024, np.uint32)
  i = np.arange(n)
  want[5:5 + n] = (i % 40) << 8 | 77 | (2 * 64) << 16
  np.testing.assert_array_equal(out.view(np.uint32), want)
  rig.close()

# *** launches: tinygrad's kernels, compiled by Mesa and put into containers

def run(image: bool = False) -> dict[str, str]:
  """A few computations with containers on the device that DEV names, each checked with numpy: name -> sha256 of the result."""
  out, rng = dict[str, str](), np.random.default_rng(11)
  a, b, x = rng.integers(-9, 9, (24, 40)).astype(np.float32), rng.integers(-9, 9, (40, 16)).astype(np.float32), rng.standard_normal(5000, np.float32)
  def case(name: str, t: Tensor, want: np.ndarray, tolerance: float = 0.0) -> None:
    np.testing.assert_allclose(got := t.numpy(), want, tolerance, tolerance, err_msg=name)
    out[name] = hashlib.sha256(got.tobytes()).hexdigest()
  ta, tb = Tensor(a).realize(), Tensor(b).realize()
  case("matmul", ta @ tb, a @ b)
  case("relu of matmul", ((ta @ tb).relu().contiguous() + 1) @ Tensor(np.ones((16, 32), np.float32)),
       (np.maximum(a @ b, 0) + 1) @ np.ones((16, 32), np.float32), 1e-3 if image else 0)
  if image:
    img, k = rng.standard_normal((1, 16, 20, 20), np.float32), rng.standard_normal((16, 16, 1, 1), np.float32)
    case("conv", Tensor(img).conv2d(Tensor(k)), np.einsum("nchw,oc->nohw", img, k[:, :, 0, 0]), 1e-3)
    return out
  case("max", (ta * 3 - 1).max(axis=1), (a * 3 - 1).max(axis=1))
  case("int", (ta.flatten().cast(dtypes.int32) * 12345).sum(), (a.astype(np.int32) * 12345).sum())
  case("softmax", ta.softmax(axis=1), np.exp(a) / np.exp(a).sum(1, keepdims=True), 1e-5)
  case("sum", Tensor(x).sum(), x.sum(), 1e-3)
  f = TinyJit(lambda t, v: (t * v + 1).contiguous().realize())
  for i in range(5):
    case(f"replay {i}", f(Tensor(y := x[100 * i:100 * i + 100]).realize(), Variable("v", 1, 50).bind(i + 3)), y * (i + 3) + 1, 1e-6)
  return out

@pytest.mark.parametrize("image", [False, True], ids=["plain", "image"])
def test_tinygrad_runs_on_containers_with_the_unmodified_driver_s_results(image: bool, tmp_path: pathlib.Path) -> None:
  from test.qcom_open import virtual
  log, where = list[Container](), list[str]()
  with Context(IMAGE=int(image), PARALLEL=0), containers(log), virtual("KGSL") as (machine, _):
    machine.gpu.observer = lambda p, registers: where.append(p.where)
    ours = run(image)
    assert not machine.gpu.reports
  assert where and all("CP_RUN_OPENCL" in w for w in where) and any(c.consts for c in log)
  assert any(kind == TEX for c in log for _, kind in c.args) if image else any(c.shmem for c in log)
  (script := tmp_path / "run.py").write_text("import json, sys\nfrom test.virtual.qcomcl import containers\n"
                                             "with containers():\n  from test.virtual.test_qcomcl import run\n"
                                             f"  json.dump(run({image}), sys.stdout)\n")
  env = {**environment(tmp_path / "wheel"), "IMAGE": str(int(image))}
  child = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=280)
  assert child.returncode == 0, child.stderr[-3000:]
  assert json.loads(child.stdout) == ours

def test_a_search_for_the_workgroup_tries_partial_ones() -> None:
  """Kernels without a workgroup size get one by trying: OpenCL code may run with groups that do not divide the grid."""
  from test.qcom_open import virtual
  sizes = set()
  with containers(), virtual("KGSL") as (machine, _), Context(NOLOCALS=1, PARALLEL=0):
    machine.gpu.observer = lambda p, registers: sizes.add((p.dispatch.size, p.dispatch.local, p.dispatch.groups))
    x = np.arange(37 * 11, dtype=np.float32).reshape(37, 11)
    np.testing.assert_array_equal((Tensor(x).T.contiguous() * 2).numpy(), x.T * 2)
    assert not machine.gpu.reports
  assert any(any(s % n for s, n in zip(size, local)) for size, local, _ in sizes), sizes
