"""A6xx texture, UAV, UBO and sampler descriptors -> what engine.c reads. Layouts and numbers: Mesa registers/adreno/a6xx.xml, a6xx_enums.xml."""
from __future__ import annotations
import ctypes
import numpy as np

KINDS = ("", "FLOAT", "UNORM", "SNORM", "UINT", "SINT")
# a6xx_format: number -> (kind, bits a channel, channels)
FORMATS: dict[int, tuple[str, int, int]] = {
  fmt: (kind, bits, comps) for bits, comps, numbers in (
    (8, 1, {"UNORM": 3, "SNORM": 4, "UINT": 5, "SINT": 6}), (8, 2, {"UNORM": 15, "SNORM": 16, "UINT": 17, "SINT": 18}),
    (8, 4, {"UNORM": 48, "SNORM": 50, "UINT": 51, "SINT": 52}), (16, 1, {"UNORM": 21, "SNORM": 22, "FLOAT": 23, "UINT": 24, "SINT": 25}),
    (16, 2, {"UNORM": 67, "SNORM": 68, "FLOAT": 69, "UINT": 70, "SINT": 71}), (16, 4, {"UNORM": 96, "SNORM": 97, "FLOAT": 98, "UINT": 99,
                                                                                       "SINT": 100}),
    (32, 1, {"FLOAT": 74, "UINT": 75, "SINT": 76}), (32, 2, {"FLOAT": 103, "UINT": 104, "SINT": 105}),
    (32, 4, {"FLOAT": 130, "UINT": 131, "SINT": 132})) for kind, fmt in numbers.items()}
IDENTITY = 0o3210

class Image(ctypes.Structure):
  """struct image: a linear texture, UAV or UBO. Sizes in texels (a UBO: units of 16 bytes), pitches in bytes; kind 0: no descriptor."""
  _fields_ = [("base", ctypes.c_uint64), ("layer", ctypes.c_uint64),
              *((n, ctypes.c_uint32) for n in ("width", "height", "depth", "pitch", "texel", "kind", "bits", "comps", "swiz", "buffer"))]

class Sampler(ctypes.Structure):
  _fields_ = [("wrap", ctypes.c_uint32 * 3), *((n, ctypes.c_uint32) for n in ("linear_mag", "linear_min", "unnorm")), ("border", ctypes.c_uint32 * 4)]

def image(desc: bytes, *, swizzle: bool) -> Image:
  """A 16-dword descriptor; UAVs have no swizzle. Raises ValueError for what the engine does not address (tiled, compressed, mipmapped, cube, ...)."""
  d = [int(v) for v in np.frombuffer(desc, "<u4")]
  fmt, tile, typ, levels = d[0] >> 22 & 0xff, d[0] & 3, d[2] >> 29, d[0] >> 16 & 15
  if not any(d): return Image()
  if fmt not in FORMATS: raise ValueError(f"texture format {fmt} is not implemented (8, 16 and 32 bit channels of linear images are)")
  if tile or d[0] >> 30: raise ValueError(f"texture with TILE_MODE {tile}, SWAP {d[0] >> 30} is not implemented (only linear, WZYX)")
  if d[0] >> 2 & 1 or d[0] >> 20 & 3 or levels: raise ValueError("sRGB, multisampled or mipmapped textures are not implemented")
  if typ not in (0, 1, 3, 4): raise ValueError(f"texture type {typ} is not implemented (only 1-D, 2-D, 3-D, and buffers)")
  kind, bits, comps = FORMATS[fmt]
  base, texel = (d[4] & ~31) | (d[5] & 0x1ffff) << 32, bits * comps // 8
  swiz = d[0] >> 4 & 0xfff if swizzle else IDENTITY
  if any(swiz >> s & 7 > 5 for s in (0, 3, 6, 9)): raise ValueError(f"texture swizzle {swiz:#o} is not implemented")
  if typ == 4:
    if start := d[2] >> 16 & 63: raise ValueError(f"buffer descriptor with STARTOFFSETTEXELS {start} is not implemented")
    return Image(base, 0, d[1] & 0x3fffffff, 1, 1, 0, texel, KINDS.index(kind), bits, comps, swiz, 1)
  return Image(base, (d[3] & 0x7fffff) << 12, d[1] & 0x7fff, d[1] >> 15 & 0x7fff, max(1, d[5] >> 17 & 0x1fff), d[2] >> 7 & 0x3fffff, texel,
               KINDS.index(kind), bits, comps, swiz, 0)

def ubo(desc: bytes) -> Image:
  """Two dwords: address 48:0, size in vec4 above."""
  v = int.from_bytes(desc, "little")
  return Image(v & (1 << 49) - 1, 0, v >> 49, 1, 1, 0, 16, KINDS.index("UINT") if v else 0, 32, 4, IDENTITY, 1)

def border_offset(desc: bytes) -> int:
  """Where in the table of border colours the sampler's lies, in bytes."""
  return int.from_bytes(desc[8:12], "little") & ~127

def sampler(desc: bytes, border: bytes = bytes(16)) -> Sampler:
  """Four dwords, and the sampler's entry of the border colour table, whose first 16 bytes hold 32-bit channels. Raises ValueError as image()."""
  d = [int(v) for v in np.frombuffer(desc, "<u4")]
  mag, low, wrap = d[0] >> 1 & 3, d[0] >> 3 & 3, [d[0] >> s & 7 for s in (5, 8, 11)]
  if max(mag, low) > 1 or max(wrap) > 3: raise ValueError(f"sampler with filters {mag}, {low}, wraps {wrap} is not implemented")
  if d[2] >> 4 & 1: raise ValueError("sampler with a fast border colour is not implemented")
  if d[1] >> 1 & 7: raise ValueError("comparing samplers are not implemented")
  return Sampler((ctypes.c_uint32 * 3)(*wrap), mag, low, d[1] >> 5 & 1, (ctypes.c_uint32 * 4)(*np.frombuffer(border[:16], "<u4").tolist()))
