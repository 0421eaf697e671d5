"""Images: every format, addressing and filtering of the texture path and of UAVs, against numpy. Format numbers are held against Mesa's table."""
import itertools, struct
import numpy as np
import pytest
from test.mockgpu.qcom.ir3 import image
from test.mockgpu.qcom.ir3.image import FORMATS
from test.virtual.ir3_core import Memory
from test.virtual.test_ir3_engine import fault, launch, words

rng = np.random.default_rng(17)
ADDRESS = "shl.b r40.x, r0.x, 4\nadd.u r40.x, r40.x, c0.x\nmov.u32u32 r40.y, c0.y\n"      # r40.xy = &out[local id], 16 bytes each
XY = "and.b r2.x, r0.x, 15\nshr.b r2.y, r0.x, 4\nadd.u r2.x, r2.x, -2\nadd.u r2.y, r2.y, -1\n"   # texel (id % 16 - 2, id / 16 - 1)
FMT = {v: k for k, v in FORMATS.items()}

def descriptor(iova: int, w: int, h: int, fmt: tuple = ("FLOAT", 32, 4), *, pitch: int = 0, swiz: int = 0o3210, depth: int = 1, layer: int = 0,
               typ: int = 1) -> bytes:
  """pitch, layer in bytes (layers are multiples of 4096)."""
  pitch = pitch or w * fmt[1] * fmt[2] // 8
  return struct.pack("<16I", FMT[fmt] << 22 | swiz << 4, w | h << 15, pitch << 7 | typ << 29, layer >> 12, iova & 0xffffffff,
                     iova >> 32 | depth << 17, *[0] * 10)

def texels(fmt: tuple, shape: tuple) -> np.ndarray:
  """Random raw texels, extremes included."""
  kind, bits, comps = fmt
  raw = rng.integers(0, 1 << bits, (*shape, comps), dtype=np.uint64).astype(f"u{bits // 8}")
  raw.ravel()[:6] = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1]
  if kind == "FLOAT": raw = rng.standard_normal((*shape, comps)).astype(f"f{bits // 8}").view(raw.dtype)
  return raw

def values(fmt: tuple, raw: np.ndarray) -> np.ndarray:
  """What a shader reads: float32 or 32-bit integers, four channels, the missing ones 0, 0, 1."""
  kind, bits, comps = fmt
  if kind == "FLOAT": v = raw.view(f"f{bits // 8}").astype(np.float32)
  elif kind == "UNORM": v = (raw.astype(np.float64) / ((1 << bits) - 1)).astype(np.float32)
  elif kind == "SNORM": v = np.maximum(raw.view(f"i{bits // 8}").astype(np.float64) / ((1 << (bits - 1)) - 1), -1).astype(np.float32)
  else: v = raw.astype(np.uint32) if kind == "UINT" else raw.view(f"i{bits // 8}").astype(np.int32)
  out = np.zeros((*v.shape[:-1], 4), v.dtype)
  out[..., 3] = 1
  out[..., :comps] = v
  return out

def test_format_numbers_are_mesas():
  from tinygrad.runtime.autogen import mesa
  for fmt, (kind, bits, comps) in FORMATS.items(): assert mesa.enum_a6xx_format[fmt] == "FMT6_" + f"{bits}_" * comps + kind

def register_type(fmt: tuple) -> str: return {"UINT": "u32", "SINT": "s32"}.get(fmt[0], "f32")

@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_every_format_is_read_as_numpy_converts_it(fmt):
  """13 x 5 texels (a width that is no multiple of 4) with a pitch of 256 bytes; outside the image all channels are 0."""
  mem, w, h, t = Memory(), 13, 5, register_type(fmt)
  src, dst = mem.alloc(256 * h), mem.alloc(128 * 16)
  raw = texels(fmt, (h, w))
  for y in range(h): mem.view(src + 256 * y, raw[y].nbytes)[:] = raw[y].view(np.uint8).ravel()
  want = np.zeros((8, 16, 4), np.uint32)
  want[1:1 + h, 2:2 + w] = values(fmt, raw).view(np.uint32)
  for op in (f"isam ({t})(xyzw)r4.x, r2.x, s#0, t#0", f"ldib.b.typed.2d.{t}.4.imm r4.x, r2.x, 0"):
    d = descriptor(src, w, h, fmt, pitch=256)
    launch(XY + ADDRESS + op + "\n(sy)stg.u32 g[r40.x], r4.x, 4\nend", mem, words(dst), (128, 1, 1), textures=[d], uavs=[d])
    assert (mem.view(dst, 2048).view(np.uint32).reshape(8, 16, 4) == want).all(), op

@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_every_format_is_written_as_numpy_converts_it(fmt):
  """Floats round to nearest even and clamp to the range of unorm and snorm; integers saturate. Stores outside the image go nowhere."""
  kind, bits, comps = fmt
  mem, w, h, t = Memory(), 13, 5, register_type(fmt)
  src, dst = mem.alloc(128 * 16), mem.alloc(256 * h + 4096)
  if t == "f32":
    v = rng.uniform(-1.6, 1.6, (8, 16, 4)).astype(np.float32)
    v[1, 2:9, 0] = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan if kind != "FLOAT" else 5]
    if kind in ("UNORM", "SNORM"): v[2, 2:10, 0] = (np.arange(8) + 0.5) / ((1 << (bits - (kind == "SNORM"))) - 1)
  else: v = rng.integers(0, 1 << 32, (8, 16, 4), dtype=np.uint32) >> rng.integers(0, 32, (8, 16, 4), dtype=np.uint32)
  mem.view(src, v.nbytes)[:] = v.view(np.uint8).ravel()
  mem.view(dst, 256 * h)[:] = 0xcc
  launch(XY + ADDRESS + f"ldg.u32 r4.x, g[r40.x], 4\n(sy)stib.b.typed.2d.{t}.4.imm r4.x, r2.x, 0\nend", mem, words(src), (128, 1, 1),
         uavs=[descriptor(dst, w, h, fmt, pitch=256, swiz=0)])
  x = v[1:1 + h, 2:2 + w, :comps]
  with np.errstate(all="ignore"):
    if kind == "FLOAT": want = x.astype(f"f{bits // 8}").view(f"u{bits // 8}")
    elif kind == "UNORM": want = np.rint(np.clip(np.nan_to_num(x.astype(np.float64), nan=0), 0, 1) * ((1 << bits) - 1)).astype(f"u{bits // 8}")
    elif kind == "SNORM":
      want = np.rint(np.clip(np.nan_to_num(x.astype(np.float64), nan=0), -1,
                             1) * ((1 << (bits - 1)) - 1)).astype(f"i{bits // 8}").view(f"u{bits // 8}")
    else:
      info = np.iinfo(f"{'u' if kind == 'UINT' else 'i'}{bits // 8}")
      want = np.clip((x if kind == "UINT" else x.view(np.int32)).astype(np.int64), info.min, info.max).astype(info.dtype).view(f"u{bits // 8}")
  got = mem.view(dst, 256 * h).reshape(h, 256)
  assert (np.ascontiguousarray(got[:, :w * comps * bits // 8]).view(f"u{bits // 8}").reshape(h, w, comps) == want).all()
  assert (got[:, w * comps * bits // 8:] == 0xcc).all(), "texels outside the image were written"

def test_half_registers_integers_and_masks():
  """16-bit data registers, write masks with holes, a swizzle with constants."""
  mem = Memory()
  src, dst = mem.alloc(4096), mem.alloc(4096)
  raw = texels(("UINT", 16, 4), (4, 16))
  mem.view(src, raw.nbytes)[:] = raw.view(np.uint8).ravel()
  launch("and.b r2.x, r0.x, 15\nshr.b r2.y, r0.x, 4\n" + ADDRESS + "mov.u16u16 hr4.y, 77\nisam (u16)(xzw)hr4.x, r2.x, s#0, t#0\n"
         "(sy)stg.u16 g[r40.x], hr4.x, 4\nisam (u32)(xyzw)r6.x, r2.x, s#0, t#1\n(sy)stg.u16 g[r40.x+8], hr4.x, 1\n"
         "stib.b.typed.2d.u16.4.imm hr4.x, r2.x, 0\nend",
         mem, words(dst), textures=[descriptor(src, 16, 4, ("UINT", 16, 4)), descriptor(src, 16, 4, ("UINT", 16, 4), swiz=0o5401)],
         uavs=[descriptor(dst + 2048, 16, 4, ("UINT", 16, 4))])
  got = mem.view(dst, 1024).view(np.uint16).reshape(4, 16, 8)
  want = raw.copy()
  want[..., 1] = 77
  assert (got[..., :4] == want).all() and (mem.view(dst + 2048, 512).view(np.uint16).reshape(4, 16, 4) == want).all()
  launch("and.b r2.x, r0.x, 15\nshr.b r2.y, r0.x, 4\n" + ADDRESS + "isam (u32)(xyzw)r6.x, r2.x, s#0, t#0\n(sy)stg.u32 g[r40.x], r6.x, 4\nend", mem,
         words(dst), textures=[descriptor(src, 16, 4, ("UINT", 16, 4), swiz=0o5401)])
  got = mem.view(dst, 1024).view(np.uint32).reshape(4, 16, 4)
  assert (got == np.stack([raw[..., 1], raw[..., 0], np.zeros((4, 16)), np.ones((4, 16))], -1)).all()

def test_layers_slices_offsets_and_slots_from_registers():
  """A 3-D image, an array, texel offsets, and texture numbers that differ between fibers."""
  mem, w, h, depth = Memory(), 8, 4, 3
  src, dst = mem.alloc(4096 * depth), mem.alloc(4096)
  raw = rng.integers(0, 1 << 32, (depth, h, w, 1), dtype=np.uint32)
  for z in range(depth): mem.view(src + 4096 * z, raw[z].nbytes)[:] = raw[z].view(np.uint8).ravel()
  tex = [descriptor(src, w, h, ("UINT", 32, 1), depth=depth, layer=4096, typ=typ) for typ in (3, 1)]
  ids = "and.b r2.x, r0.x, 7\nshr.b r3.x, r0.x, 3\nand.b r2.y, r3.x, 3\nshr.b r2.z, r0.x, 5\n"
  z, y, x = np.indices((4, 4, 8))
  padded = np.zeros((5, 6, 10), np.uint32)
  padded[:depth, 1:5, 1:9] = raw[..., 0]
  for op, dx, dy in (("isam.3d (u32)(x)r4.x, r2.x, s#0, t#0", 0, 0), ("isam.a (u32)(x)r4.x, r2.x, s#0, t#1", 0, 0),
                     ("isam.a.o (u32)(x)r4.x, r2.x, r5.x, s#0, t#1", 1, -1), ("isam.a.s2en.nonuniform (u32)(x)r4.x, r2.x, hr1.x", 0, 0),
                     ("isaml.a (u32)(x)r4.x, r2.x, r6.x, s#0, t#1", 0, 0)):
    launch(ids + "mov.u32u32 r5.x, 1\nmov.u32u32 r5.y, -1\nmov.u32u32 r6.x, 0\nmov.u16u16 hr1.x, 0\nand.b hr1.y, r0.x, 1\n" + ADDRESS + op
           + "\n(sy)stg.u32 g[r40.x], r4.x, 1\nend", mem, words(dst), (128, 1, 1), textures=tex)
    got = mem.view(dst, 2048).view(np.uint32).reshape(4, 4, 8, 4)[..., 0]
    assert (got == padded[z, y + 1 + dy, x + 1 + dx]).all(), op
  launch(ids + "mov.u32u32 r6.x, 1\n" + ADDRESS + "isaml.a (u32)(x)r4.x, r2.x, r6.x, s#0, t#1\n(sy)stg.u32 g[r40.x], r4.x, 1\nend", mem, words(dst),
         textures=tex)
  assert not mem.view(dst, 1024).view(np.uint32).reshape(64, 4)[:, 0].any(), "a level that does not exist reads 0"

def sampler(wrap: tuple, linear: bool, unnorm: bool, border: int = 0) -> bytes:
  return struct.pack("<4I", linear << 1 | linear << 3 | wrap[0] << 5 | wrap[1] << 8 | 3 << 11, unnorm << 5, border << 7, 0)

def wrapped(mode: int, i: np.ndarray, n: int) -> np.ndarray:
  """Texel index, -1 for the border."""
  if mode == 0: return i % n
  if mode == 1: return np.clip(i, 0, n - 1)
  if mode == 2: return np.where(i % (2 * n) < n, i % (2 * n), 2 * n - 1 - i % (2 * n))
  return np.where((i >= 0) & (i < n), i, -1)

def sampled(img: np.ndarray, u: np.ndarray, v: np.ndarray, wrap: tuple, linear: bool, border: np.ndarray) -> np.ndarray:
  """Coordinates in texels. Linear: 8 bits of sub-texel position."""
  h, w = img.shape[:2]
  def texel(x, y):
    x, y = wrapped(wrap[0], x, w), wrapped(wrap[1], y, h)
    return np.where(((x < 0) | (y < 0))[..., None], border, img[y, x])
  if not linear: return texel(np.floor(u).astype(int), np.floor(v).astype(int))
  u, v = (np.floor((c.astype(np.float64) - 0.5) * 256 + 0.5) / 256 for c in (u, v))
  x, y = np.floor(u).astype(int), np.floor(v).astype(int)
  fx, fy = (u - x)[..., None], (v - y)[..., None]
  return (texel(x, y) * (1 - fx) + texel(x + 1, y) * fx) * (1 - fy) + (texel(x, y + 1) * (1 - fx) + texel(x + 1, y + 1) * fx) * fy

@pytest.mark.parametrize("unnorm", (False, True), ids=("normalised", "texels"))
@pytest.mark.parametrize("linear", (False, True), ids=("nearest", "linear"))
@pytest.mark.parametrize("wrap", [*itertools.product(range(4), (1, 3))], ids=lambda w: f"wrap{w[0]}{w[1]}")
def test_sampling_with_filters_wraps_and_borders(wrap, linear, unnorm):
  mem, w, h = Memory(), 16, 8
  src, coords, dst = mem.alloc(w * h * 16), mem.alloc(256 * 8), mem.alloc(256 * 16)
  img = rng.standard_normal((h, w, 4)).astype(np.float32)
  mem.view(src, img.nbytes)[:] = img.view(np.uint8).ravel()
  uv = (rng.uniform(-1.5, 2.5, (256, 2)) * (w, h)).astype(np.float32)
  uv[:8] = [(0, 0), (w, h), (0.5, 0.5), (w - 0.5, h - 0.5), (-0.5, 3), (1, 1), (2 ** 20 + 3.5, 0), (-2.0 ** 20, -2.0 ** 20)]
  given = uv if unnorm else uv / np.float32((w, h))
  mem.view(coords, given.nbytes)[:] = given.astype(np.float32).view(np.uint8).ravel()
  border = np.array([0.25, -2, 3, 1], np.float32)
  for op in ("sam (f32)(xyzw)r4.x, r2.x, s#1, t#0", "saml (f32)(xyzw)r4.x, r2.x, r6.x, s#1, t#0"):
    launch("shl.b r5.x, r48.x, 9\nshl.b r5.y, r0.x, 3\nadd.u r5.x, r5.x, r5.y\nadd.u r3.x, r5.x, c0.z\nmov.u32u32 r3.y, c0.w\n"
           "ldg.u32 r2.x, g[r3.x], 2\nmov.u32u32 r6.x, 0\nshl.b r5.x, r5.x, 1\nadd.u r40.x, r5.x, c0.x\nmov.u32u32 r40.y, c0.y\n" + op
           + "\n(sy)stg.u32 g[r40.x], r4.x, 4\nend", mem, (*words(dst), *words(coords)), groups=(4, 1, 1), textures=[descriptor(src, w, h)],
           samplers=[sampler((0, 0), False, False), sampler(wrap, linear, unnorm)], borders=[bytes(16), border.tobytes()])
    got = mem.view(dst, 4096).view(np.float32).reshape(256, 4)
    want = sampled(img, uv[:, 0], uv[:, 1], wrap, linear, border)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-3 if linear else 0, err_msg=op)   # the last step of a sub-texel position is open

def test_mismatched_and_missing_descriptors_are_reported():
  mem = Memory()
  a = mem.alloc(4096)
  f, u = descriptor(a, 4, 4), descriptor(a, 4, 4, ("UINT", 32, 4))
  assert fault("isam (f32)(x)r4.x, r0.x, s#0, t#0\nend", mem=mem, textures=[u]).kind == "image_type"
  assert fault("isam (u32)(x)r4.x, r0.x, s#0, t#0\nend", mem=mem, textures=[f]).kind == "image_type"
  assert fault("stib.b.typed.2d.u32.1.imm r0.x, r0.x, 0\nend", mem=mem, uavs=[f]).kind == "image_type"
  assert fault("ldib.b.untyped.1d.u32.1.imm r4.x, r0.x, 0\nend", mem=mem, uavs=[u]).kind == "image_type"
  assert fault("isam (f32)(x)r4.x, r0.x, s#0, t#1\nend", mem=mem, textures=[f]).kind == "out_of_bounds"
  assert fault("isam (f32)(x)r4.x, r0.x, s#0, t#0\nend", mem=mem, textures=[bytes(64)]).kind == "out_of_bounds"
  assert fault("sam (f32)(x)r4.x, r0.x, s#0, t#0\nend", mem=mem, textures=[f]).kind == "out_of_bounds"     # no sampler
  assert fault("isam (f32)(x)r4.x, r0.x, s#0, t#0\nend", mem=mem, textures=[descriptor(a + 4096 - 32, 4, 1)], local=(4, 1, 1)).kind == "unmapped"

@pytest.mark.parametrize("change,text", (((0, 1), "TILE_MODE"), ((0, 1 << 30), "SWAP"), ((0, 1 << 2), "sRGB"), ((0, 1 << 16), "mipmapped"),
                                         ((0, 7 << 4), "swizzle"), ((2, 1 << 30), "type 3|type 2"), ((0, 1 << 29), "format")))
def test_layouts_that_are_not_modelled_are_refused(change, text):
  d = [*struct.unpack("<16I", descriptor(0x1000, 4, 4))]
  d[change[0]] ^= change[1]
  if change == (2, 1 << 30): d[2] = 2 << 29
  with pytest.raises(ValueError, match=text): image.image(struct.pack("<16I", *d), swizzle=True)

def test_samplers_that_are_not_modelled_are_refused():
  for d in ((2 << 1, 0, 0, 0), (4 << 5, 0, 0, 0), (0, 0, 1 << 4, 0), (0, 1 << 1, 0, 0)):
    with pytest.raises(ValueError): image.sampler(struct.pack("<4I", *d))

def test_merged_half_registers_hold_the_data_of_images_and_fibers():
  """With MERGEDREGS hr16 and up lie in r8 and up: neighbours in the same full register must stay."""
  from test.virtual.ir3_lab import run
  mem = Memory()
  src, dst = mem.alloc(4096), mem.alloc(4096)
  raw = texels(("UINT", 16, 4), (4, 16))
  mem.view(src, raw.nbytes)[:] = raw.view(np.uint8).ravel()
  x = rng.integers(0, 1 << 16, 64, dtype=np.uint16)
  ids = "and.b r2.x, r0.x, 15\nshr.b r2.y, r0.x, 4\n"
  slots = "mov.u16u16 hr24.x, 0\nmov.u16u16 hr24.y, 0\n"
  body = (ids + slots + "mov.u16u16 hr16.y, hr14.x\nisam.s2en.uniform (u16)(xz)hr16.x, r2.x, hr24.x\nshfl.xor.u16 hr17.x, hr14.x, 1\n"
          "quad_shuffle.vert (u16)(x)hr17.z, hr14.x\nstib.b.typed.2d.u16.4.imm hr16.x, r2.x, 0\nldib.b.typed.2d.u16.2.imm hr18.z, r2.x, 0")
  desc = [descriptor(a, 16, 4, ("UINT", 16, 4)) for a in (src, dst)]
  space = {"textures": desc[:1], "uavs": desc[1:]}
  outs = {f"hr{r}": np.uint16 for r in ("16.x", "16.y", "16.z", "17.x", "17.z", "18.z", "18.w")}
  out = run("mov.u16u16 hr16.w, 5\nmov.u16u16 hr17.y, 6\n" + body, {"hr14.x": x}, outs | {"hr17.y": np.uint16, "hr16.w": np.uint16}, merged=True,
            memory=mem, **space)
  lane = np.arange(64)
  px = raw.reshape(64, 4)
  for r, want in (("16.x", px[:, 0]), ("16.y", x), ("16.z", px[:, 2]), ("16.w", 5), ("17.x", x[lane ^ 1]), ("17.y", 6), ("17.z", x[lane ^ 2]),
                  ("18.z", px[:, 0]), ("18.w", x)):
    assert (out[f"hr{r}"] == want).all(), r
  got = mem.view(dst, 512).view(np.uint16).reshape(64, 4)
  assert (got == np.stack([px[:, 0], x, px[:, 2], np.full(64, 5)], 1)).all()
