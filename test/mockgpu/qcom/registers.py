"""The a6xx registers a compute client meets: names, fields, and what a dispatch depends on.

Offsets are dword indices, fields are `NAME hi:lo`. Names follow Mesa 25.2 (registers/adreno/a6xx.xml), old names in parentheses.
A register that is not in this table stops the command processor, as a bad register write stops the real one.
"""
from __future__ import annotations
import functools, re
from dataclasses import dataclass

# need: "d" every dispatch depends on it; "t" / "s" / "u" a dispatch with textures / samplers / UAVs does; "p" one with private memory does;
# "g" the group counts of RUN_OPENCL; "b" bindless; "x" a fixed value of this chip (Mesa common/freedreno_devices.py) that other clients may change
TABLE = """
0883 8 CP_SCRATCH                 -  VALUE 31:0
0e12   UCHE_UNKNOWN_0E12          x  VALUE 31:0                                           = 10000001
0e19   UCHE_CLIENT_PF             x  PERFSEL 7:0                                          = 00000004
8600   GRAS_DBG_ECO_CNTL          -  VALUE 31:0                                           = 00000880
8e01   RB_UNKNOWN_8E01            -  VALUE 31:0                                           = 00000001
8e04   RB_DBG_ECO_CNTL            -  VALUE 31:0                                           = 04100000
8e07   RB_CCU_CNTL                -  VALUE 31:0
9600   VPC_DBG_ECO_CNTL           -  VALUE 31:0                                           = 00000000
9804   PC_MODE_CNTL               -  VALUE 7:0                                            = 0000001f
9805   PC_POWER_CNTL              -  VALUE 2:0                                            = 00000001
a0f8   VFD_POWER_CNTL             -  VALUE 2:0                                            = 00000001
a9b0   SP_CS_CNTL_0               d  THREADMODE 0, HALFREGFOOTPRINT 6:1, FULLREGFOOTPRINT 12:7, UNK13 13, BRANCHSTACK 19:14, THREADSIZE 20, \
UNK21 21, UNK22 22, EARLYPREAMBLE 23, MERGEDREGS 31
a9b1   SP_CS_CNTL_1               d  SHARED_SIZE 4:0, CONSTANTRAMMODE 6:5
a9b2   SP_CS_BOOLEAN_CF_MASK      d  MASK 31:0
a9b3   SP_CS_PROGRAM_COUNTER_OFFSET d OFFSET 31:0
a9b4   SP_CS_BASE                 d  LO 31:5
a9b5   SP_CS_BASE_HI              d  HI 16:0
a9b6   SP_CS_PVT_MEM_PARAM        d  MEMSIZEPERITEM 7:0, HWSTACKSIZEPERTHREAD 31:24
a9b7   SP_CS_PVT_MEM_BASE         p  LO 31:5
a9b8   SP_CS_PVT_MEM_BASE_HI      p  HI 16:0
a9b9   SP_CS_PVT_MEM_SIZE         p  TOTALPVTMEMSIZE 17:0, PERWAVEMEMLAYOUT 31
a9ba   SP_CS_TSIZE                t  COUNT 7:0
a9bb   SP_CS_CONFIG               d  BINDLESS_TEX 0, BINDLESS_SAMP 1, BINDLESS_UAV 2, BINDLESS_UBO 3, ENABLED 8, NTEX 16:9, NSAMP 21:17, NUAV 28:22
a9bc   SP_CS_INSTR_SIZE           d  GROUPS 27:0
a9bd   SP_CS_PVT_MEM_STACK_OFFSET p  OFFSET 18:0
a9c2   SP_CS_WIE_CNTL_0           -  WGIDCONSTID 7:0, WGSIZECONSTID 15:8, WGOFFSETCONSTID 23:16, LOCALIDREGID 31:24
a9c3   SP_CS_WIE_CNTL_1           -  LINEARLOCALIDREGID 7:0, SINGLE_SP_CORE 8, THREADSIZE 9, THREADSIZE_SCALAR 10
a9e2   SP_CS_SAMPLER_BASE         s  LO 31:4
a9e3   SP_CS_SAMPLER_BASE_HI      s  HI 16:0
a9e6   SP_CS_TEXMEMOBJ_BASE       t  LO 31:6
a9e7   SP_CS_TEXMEMOBJ_BASE_HI    t  HI 16:0
a9e8 10 SP_CS_BINDLESS_BASE       b  DESC_SIZE_OR_HI 31:0
a9f2   SP_CS_UAV_BASE             u  LO 31:4
a9f3   SP_CS_UAV_BASE_HI          u  HI 16:0
aa00   SP_CS_USIZE                u  COUNT 6:0
ab00   SP_MODE_CNTL               d  CONSTANT_DEMOTION_ENABLE 0, ISAMMODE 2:1, SHARED_CONSTS_ENABLE 3
ab05   SP_PS_INSTR_SIZE           -  GROUPS 27:0
ae00   SP_DBG_ECO_CNTL            x  VALUE 31:0                                           = 00000000
ae03   SP_CHICKEN_BITS            x  VALUE 31:0                                           = 00001430
ae04   SP_FLOAT_CNTL              d  F16_NO_INF 3
ae0f   SP_PERFCTR_SHADER_MASK     -  VS 0, HS 1, DS 2, GS 3, FS 4, CS 5
b180   TPL1_CS_BORDER_COLOR_BASE  s  LO 31:7
b181   TPL1_CS_BORDER_COLOR_BASE_HI s HI 16:0
b309   TPL1_MODE_CNTL             t  ISAMMODE 1:0, TEXCOORDROUNDMODE 2, UNK3 3, NEARESTMIPSNAP 5, UNK6 6, DESTDATATYPEOVERRIDE 7
b600   TPL1_DBG_ECO_CNTL          x  VALUE 31:0                                           = 00108000
b602   TPL1_DBG_ECO_CNTL1         -  VALUE 31:0
b983   SP_REG_PROG_ID_0           -  FACEREGID 7:0, SAMPLEID 15:8, SAMPLEMASK 23:16, CENTERRHW 31:24
b984   SP_REG_PROG_ID_1           -  IJ_PERSP_PIXEL 7:0, IJ_LINEAR_PIXEL 15:8, IJ_PERSP_CENTROID 23:16, IJ_LINEAR_CENTROID 31:24
b985   SP_REG_PROG_ID_2           -  IJ_PERSP_SAMPLE 7:0, IJ_LINEAR_SAMPLE 15:8, XYCOORDREGID 23:16, ZWCOORDREGID 31:24
b986   SP_REG_PROG_ID_3           -  LINELENGTHREGID 7:0, FOVEATIONQUALITYREGID 15:8
b987   SP_CS_CONST_CONFIG         d  CONSTLEN 7:0, ENABLED 8, READ_IMM_SHARED_CONSTS 9
b990   SP_CS_NDRANGE_0            d  KERNELDIM 1:0, LOCALSIZEX 11:2, LOCALSIZEY 21:12, LOCALSIZEZ 31:22
b991   SP_CS_NDRANGE_1            d  GLOBALSIZE_X 31:0
b992   SP_CS_NDRANGE_2            d  GLOBALOFF_X 31:0
b993   SP_CS_NDRANGE_3            d  GLOBALSIZE_Y 31:0
b994   SP_CS_NDRANGE_4            d  GLOBALOFF_Y 31:0
b995   SP_CS_NDRANGE_5            d  GLOBALSIZE_Z 31:0
b996   SP_CS_NDRANGE_6            d  GLOBALOFF_Z 31:0
b997   SP_CS_CONST_CONFIG_0       d  WGIDCONSTID 7:0, WGSIZECONSTID 15:8, WGOFFSETCONSTID 23:16, LOCALIDREGID 31:24
b998   SP_CS_WGE_CNTL             d  LINEARLOCALIDREGID 7:0, SINGLE_SP_CORE 8, THREADSIZE 9, THREADSIZE_SCALAR 10
b999   SP_CS_KERNEL_GROUP_X       g  COUNT 31:0
b99a   SP_CS_KERNEL_GROUP_Y       g  COUNT 31:0
b99b   SP_CS_KERNEL_GROUP_Z       g  COUNT 31:0
b9c0 10 HLSQ_CS_BINDLESS_BASE     b  DESC_SIZE_OR_HI 31:0
b9d0   HLSQ_CS_CTRL_REG1          -  SHARED_SIZE 4:0, CONSTANTRAMMODE 6:5
bb08   SP_UPDATE_CNTL             -  VS_STATE 0, HS_STATE 1, DS_STATE 2, GS_STATE 3, FS_STATE 4, CS_STATE 5, CS_UAV 6, GFX_UAV 7, \
GFX_SHARED_CONST 8, CS_BINDLESS 13:9, GFX_BINDLESS 18:14, CS_SHARED_CONST 19
bb10   SP_PS_CONST_CONFIG         -  CONSTLEN 7:0, ENABLED 8, READ_IMM_SHARED_CONSTS 9
bb11   HLSQ_SHARED_CONSTS         d  ENABLE 0
be04   HLSQ_DBG_ECO_CNTL          x  VALUE 31:0                                           = 00080000
"""

# what the CP refuses to user command streams, (first, last, may read): the kernel's CP_PROTECT setup for a630 (drm/msm a6xx_catalog.c)
PROTECTED = [(0x00000, 0x004ff, True), (0x00501, 0x00506, True), (0x0050b, 0x007ff, True), (0x0050e, 0x0050e, False), (0x00510, 0x00510, False),
             (0x00534, 0x00534, False), (0x00800, 0x00882, False), (0x008a0, 0x008a8, False), (0x008ab, 0x008cf, False), (0x008de, 0x0098c, True),
             (0x00900, 0x0094d, False), (0x0098d, 0x00bff, False), (0x00e00, 0x00e01, False), (0x00e03, 0x00e0f, False), (0x03c00, 0x03cc3, False),
             (0x03cc4, 0x05cc3, True), (0x08630, 0x087ff, False), (0x08e00, 0x08e00, False), (0x08e08, 0x08e08, False), (0x08e50, 0x08e6f, False),
             (0x09624, 0x097ff, False), (0x09e70, 0x09e71, False), (0x09e78, 0x09fff, False), (0x0a630, 0x0a7ff, False), (0x0ae02, 0x0ae02, False),
             (0x0ae50, 0x0b17f, False), (0x0b604, 0x0b604, False), (0x0be02, 0x0be03, False), (0x0be20, 0x0d5ff, False), (0x0f000, 0x0fbff, False),
             (0x0fc00, 0x11bff, True), (0x11c00, 0x3ffff, False)]

@dataclass(frozen=True)
class Field:
  name: str
  hi: int
  lo: int
  @property
  def mask(self) -> int: return ((1 << (self.hi - self.lo + 1)) - 1) << self.lo

@dataclass(frozen=True)
class Register:
  """offset in dwords; `fixed` is the value this chip wants (None: free)."""
  offset: int
  name: str
  need: str
  fields: tuple[Field, ...]
  fixed: int | None = None

  @functools.cached_property
  def mask(self) -> int: return functools.reduce(int.__or__, (f.mask for f in self.fields))

  def decode(self, value: int) -> str:
    """`SP_CS_CNTL_1 = 0x41 (SHARED_SIZE 1, CONSTANTRAMMODE 2)`; bits outside every field are named."""
    parts = [f"{f.name} {(value & f.mask) >> f.lo}" for f in self.fields if value & f.mask and f.name not in ("VALUE", "LO", "HI")]
    if value & ~self.mask: parts.append(f"bits {value & ~self.mask:#x} belong to no field")
    return f"{self.name} = {value:#x}" + (f" ({', '.join(parts)})" if parts else "")

def _parse() -> dict[int, Register]:
  out: dict[int, Register] = {}
  for line in TABLE.strip().splitlines():
    m = re.fullmatch(r"(\w{4})(?: (\d+))?\s+(\w+)\s+([-\w])\s+(.*?)(?:\s+= (\w{8}))?", line)
    assert m is not None, line
    off, count, name, need, spec, fixed = m.groups()
    fields = []
    for f in spec.split(", "):
      fname, bits = f.split()
      hi, _, lo = bits.partition(":")
      fields.append(Field(fname, int(hi), int(lo or hi)))
    for i in range(int(count or 1)):
      reg = int(off, 16) + i
      out[reg] = Register(reg, f"{name}[{i}]" if count else name, need, tuple(fields), None if fixed is None else int(fixed, 16))
  return out

REGISTERS = _parse()
FIELDS = {(r.name, f.name): (r.offset, f.lo, f.mask >> f.lo) for r in REGISTERS.values() for f in r.fields}
CP_ALWAYS_ON_COUNTER, CP_ALWAYS_ON_COUNTER_HI = 0x980, 0x981      # 64 bit, 19.2 MHz

def needs(kinds: str) -> frozenset[int]:
  """Offsets of the registers that a dispatch with these needs (letters of TABLE) depends on."""
  return frozenset(r.offset for r in REGISTERS.values() if r.need in kinds)

def protected(reg: int, write: bool) -> bool: return any(lo <= reg <= hi and (write or not readable) for lo, hi, readable in PROTECTED)

def name(reg: int) -> str: return REGISTERS[reg].name if reg in REGISTERS else f"register {reg:#x}"
