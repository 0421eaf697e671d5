"""An ESTIMATE of what an Adreno 630 would take for each kernel that the virtual one ran, never held against hardware: see docs/estimates.md.

`QCOM_MOCK='{"estimate": "run.svg"}'` prints a table to stderr when the process ends and draws it.
"""
from __future__ import annotations
import atexit, html, math, sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
import numpy as np
from .ir3.image import image
from .ir3.isa import ROWS
if TYPE_CHECKING: from .cp import Pending

# What is assumed of the chip. The first line is specified (SDM845: highest operating point of the device tree, shader processors, LPDDR4X-1866 on 64
# bits), the limits of waves are Mesa's freedreno_devices.py. The others are guesses of the size that public benchmarks of this generation suggest.
CLOCK_MHZ, SPS, DRAM_PEAK_GBPS = 710, 2, 29.9
WAVES_PER_SP, REGISTERS_PER_SP = 16, 96 * 128          # resident waves of 64 fibers; vec4 registers, shared by them
ALU_LANES, SFU_LANES, TEXELS, UCHE_BYTES = 256, 64, 12, 64              # per clock and SP: full-precision lanes, special functions, fetches, bytes
DRAM_SHARE = 2 / 3                                     # of the peak that a kernel sees, the display and the CPU taking theirs
ISSUE_CLOCKS, MEMORY_CLOCKS, IN_FLIGHT = 4, 400, 8     # of one wave: between dependent instructions; of a miss, and accesses that share one
LAUNCH_US = 5.0                                        # state, waiting for idle, ramp

CLASSES = ("flow", "move", "alu", "alu", "sfu", "texture", "memory", "sync")       # by instruction category, as Mesa numbers them
CATEGORY = np.array([r.key[0] for r in ROWS])

@dataclass
class Work:
  """What one launch did: executions by waves per class, bytes accessed by lanes, bytes of the buffers it was given, shape of the grid."""
  waves: int
  groups: int
  full_regs: int                                        # vec4 per fiber
  instructions: dict[str, int]
  accessed: int
  buffers: int

  @property
  def traffic(self) -> int:
    """Bytes that go to memory: what is accessed again is a hit, so no more than the buffers have."""
    return min(self.accessed, self.buffers) if self.buffers else self.accessed

  def parts(self) -> dict[str, float]:
    """Microseconds that each part of the chip would be busy. The slowest decides."""
    n, us = self.instructions, 1.0 / CLOCK_MHZ
    sps = min(SPS, max(1, self.groups))
    slots = sps * min(WAVES_PER_SP, max(1, REGISTERS_PER_SP // (64 * max(1, self.full_regs))))
    total, accesses = sum(n.values()), n["texture"] + n["memory"]
    rounds = math.ceil(self.waves / slots) / max(1, self.waves)         # waves that run at a time share these clocks
    return {"alu": 64 * (n["alu"] + n["move"] + n["flow"] + n["sync"]) / (ALU_LANES * sps) * us,
            "sfu": 64 * n["sfu"] / (SFU_LANES * sps) * us,
            "texture": 64 * n["texture"] / (TEXELS * sps) * us,
            "cache": self.accessed / (UCHE_BYTES * sps) * us,
            "memory": self.traffic / (DRAM_PEAK_GBPS * DRAM_SHARE * 1e3),
            "latency": (total * ISSUE_CLOCKS + accesses * MEMORY_CLOCKS / IN_FLIGHT) * rounds * us}

  def estimate(self) -> tuple[float, str]:
    """(microseconds of the launch, the part that decides)."""
    part, us = max(self.parts().items(), key=lambda p: p[1])
    return us + LAUNCH_US, part if us > LAUNCH_US else "launch"

@dataclass
class Kernel:
  name: str
  launches: int = 0
  us: float = 0.0
  bounds: dict[str, float] = field(default_factory=dict)                # us by the part that decided
  instructions: dict[str, int] = field(default_factory=dict)
  waves: int = 0
  traffic: int = 0

class Estimate:
  """Collects the launches of one virtual GPU. `path`: where the drawing goes, empty for none."""
  def __init__(self, path: str = ""):
    self.path, self.kernels = path, dict[str, Kernel]()
    if path: atexit.register(self.finish)

  def before(self, engine: Any) -> tuple[np.ndarray, int]: return engine.waves.copy(), engine.bytes_read + engine.bytes_written

  def launched(self, p: Pending, engine: Any, before: tuple[np.ndarray, int]) -> Work:
    counts, d = engine.waves - before[0], p.dispatch
    by = {c: 0 for c in CLASSES}
    for cat, n in enumerate(np.bincount(CATEGORY, counts, len(CLASSES))): by[CLASSES[cat]] += int(n)
    groups = math.prod(d.groups)
    work = Work(groups * -(-math.prod(d.local) // 64), groups, d.full_regs, by, engine.bytes_read + engine.bytes_written - before[1], buffers(d))
    k, (us, part) = self.kernels.setdefault(p.kernel, Kernel(p.kernel)), work.estimate()
    k.launches, k.us, k.waves, k.traffic = k.launches + 1, k.us + us, k.waves + work.waves, k.traffic + work.traffic
    k.bounds[part] = k.bounds.get(part, 0.0) + us
    for c, n in by.items(): k.instructions[c] = k.instructions.get(c, 0) + n
    return work

  def order(self) -> list[Kernel]: return sorted(self.kernels.values(), key=lambda k: -k.us)

  def table(self, rows: int = 30) -> str:
    total, found = sum(k.us for k in self.kernels.values()), self.order()
    head = (f"{'kernel':<44}", *map("{:>{}}".format, ("launches", "us each", "share", "bound by", "waves", "alu", "sfu", "tex", "mem", "MB"),
                                     (8, 9, 6, 9, 7, 6, 5, 5, 5, 8)))
    lines = [f"ESTIMATE for an Adreno 630 at {CLOCK_MHZ} MHz, from a model that was never compared with hardware: {total / 1e3:.3f} ms in "
             f"{sum(k.launches for k in found)} launches of {len(found)} kernels; "
             "alu (with moves), sfu, tex, mem: instructions of one wave; MB: of one launch", " ".join(head)]
    for k in found[:rows]:
      per = {c: n / max(1, k.waves) for c, n in k.instructions.items()}  # instructions of a wave
      lines.append(f"{k.name[:44]:<44} {k.launches:>8} {k.us / k.launches:>9.1f} {k.us / total:>6.1%} {max(k.bounds, key=lambda b: k.bounds[b]):>9} "
                   f"{k.waves // k.launches:>7} {per['alu'] + per['move']:>6.0f} {per['sfu']:>5.0f} {per['texture']:>5.0f} {per['memory']:>5.0f} "
                   f"{k.traffic / k.launches / 1e6:>8.3f}")
    if len(found) > rows: lines.append(f"and {len(found) - rows} more, {sum(k.us for k in found[rows:]) / total:.1%}")
    return "\n".join(lines)

  def svg(self, rows: int = 40) -> str:
    """Bars of each kernel's share, longest first, coloured by what decides."""
    colours = {"alu": "#4269d0", "sfu": "#a463f2", "texture": "#ff725c", "cache": "#6cc5b0", "memory": "#efb118", "latency": "#97bbf5",
               "launch": "#9c9c9c"}
    found, total = self.order()[:rows], sum(k.us for k in self.kernels.values())
    out, y = [], 64
    for k in found:
      part, width = max(k.bounds, key=lambda b: k.bounds[b]), 520 * k.us / max(found[0].us, 1e-9)
      out.append(f'<text x="318" y="{y + 12}" text-anchor="end">{html.escape(k.name[:44])}</text>'
                 f'<rect x="326" y="{y}" width="{max(1.0, width):.1f}" height="15" fill="{colours[part]}"/>'
                 f'<text x="{332 + width:.1f}" y="{y + 12}">{k.us / 1e3:.3f} ms, {k.us / total:.1%}</text>')
      y += 20
    legend = "".join(f'<rect x="{20 + 110 * i}" y="36" width="12" height="12" fill="{c}"/><text x="{36 + 110 * i}" y="47">{n}</text>'
                     for i, (n, c) in enumerate(colours.items()))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="{y + 16}" font-family="sans-serif" font-size="12">'
            f'<rect width="100%" height="100%" fill="white"/><text x="20" y="22" font-size="15">ESTIMATE for an Adreno 630, not a measurement: '
            f'{total / 1e3:.3f} ms; colour: what bounds the kernel</text>{legend}{"".join(out)}</svg>\n')

  def finish(self) -> None:
    """Prints the table and writes the drawing, once."""
    if not self.path or not self.kernels: return
    path, self.path = self.path, ""
    print(self.table(), file=sys.stderr)
    try:
      with open(path, "w") as f: f.write(self.svg())
    except OSError as e: print(f"cannot write the drawing: {e}", file=sys.stderr)
    else: print(f"drawn in {path}", file=sys.stderr)

def buffers(d: Any) -> int:
  """Bytes of the buffers that a launch was given: mappings that an address among its constants or a descriptor points into, each from there on."""
  words = np.asarray(d.consts, np.uint32).astype(np.uint64)
  addrs = {int(a) for a in words[::2] | words[1::2] << np.uint64(32) if a} | {t.base for t in
           [*(image(t, swizzle=True) for t in d.textures), *(image(t, swizzle=False) for t in d.uavs)] if t.base}
  spans: dict[int, int] = {}                            # end of a mapping -> lowest address in it
  for a in addrs:
    if (s := d.space.find(a)) is not None: spans[s.iova + s.size] = min(spans.get(s.iova + s.size, a), a)
  return sum(end - start for end, start in spans.items())
