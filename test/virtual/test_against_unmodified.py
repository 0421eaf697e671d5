"""Our driver and the unmodified tinygrad 0.14.0 driver, on the same virtual GPU, with the same kernels: what differs, dispatch by dispatch?

Nothing but the entries of DIFFERENCES, each with the value that either side must have. docs/differences.md explains them to a reader.
"""
from __future__ import annotations
import json, os, pathlib, subprocess, sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
import pytest
from test.virtual.unmodified import environment

Kernel = dict[str, Any]                                 # dispatch_log's metadata of a compiled kernel, sizes in bytes

def whole(n: int, unit: int) -> int: return -(-n // unit)
def constants(k: Kernel) -> int:
  """Bytes of the constants a kernel has: the file up to constlen (vec4) and its immediates, in units of 4 vec4."""
  return whole(max(16 * k["constlen"], k["immediates_at"] + k["immediates"], 16), 64) * 64
def per_fiber(k: Kernel) -> int: return whole(k["pvtmem"], 512) * 512
def stack_bytes(k: Kernel) -> int: return whole((1 << (per_fiber(k) - 1).bit_length() if per_fiber(k) else 1) * 128 * 16, 4096) * 4096
def padded(k: Kernel) -> int: return whole(k["size"], 128)

class Difference(NamedTuple):
  why: str
  unmodified: Callable[[Kernel], Any]                   # None: not written
  ours: Callable[[Kernel], Any]

def fixed(value: int, why: str, old: int | None = None) -> Difference: return Difference(why, lambda k: old, lambda k: value)

LEFT_ALONE = "compute depends on it and another client of the GPU may have left another value"
CHIP = "a630's value (Mesa freedreno_devices.py); another client of the GPU may have left another value"

DIFFERENCES: dict[str, Difference] = {
  "SP_CS_CONST_CONFIG": Difference("CONSTLEN counts 4 vec4, the shift is lost in the generated table and 256 lands on ENABLED: CONSTLEN is 0",
                                   lambda k: 0x100, lambda k: 0x100 | constants(k) // 64),
  "SP_CS_PVT_MEM_STACK_OFFSET": Difference("the unit is 2 KiB, bytes are written: 19 bits cannot hold them. The stack follows an SP's memory",
                                           lambda k: stack_bytes(k) & 0x7ffff, lambda k: per_fiber(k) * 128 * 16 // 2048),
  "SP_CS_PVT_MEM_BASE": Difference("a kernel without private memory has none", lambda k: "scratch", lambda k: "scratch" if k["pvtmem"] else 0),
  "SP_CS_TSIZE": Difference("the number of texture descriptors", lambda k: 0x80, lambda k: k["tex"]),
  "SP_CS_USIZE": Difference("the number of UAV descriptors", lambda k: 0x40, lambda k: k["uav"]),
  "SP_CS_INSTR_SIZE": Difference("groups of 16 instructions as the compiler counts them; the image's size has four spare instructions more",
                                 padded, lambda k: k["instrlen"]),
  "SP_PS_INSTR_SIZE": Difference("programs of more than 64 groups hang at times without it (Mesa issue 5892)",
                                 lambda k: None, lambda k: k["instrlen"] if k["instrlen"] > 64 else None),
  "SP_CS_SAMPLER_BASE": Difference("descriptors follow the constants that the kernel has, not room for 128 vec4",
                                   lambda k: f"args+{2048 + 64 * (k['tex'] + k['uav'])}" if k["tex"] else None,
                                   lambda k: f"args+{constants(k) + 64 * (k['tex'] + k['uav'])}" if k["tex"] else None),
  "SP_CS_TEXMEMOBJ_BASE": Difference("as for samplers", lambda k: "args+2048" if k["tex"] else None,
                                     lambda k: f"args+{constants(k)}" if k["tex"] else None),
  "SP_CS_UAV_BASE": Difference("as for samplers", lambda k: f"args+{2048 + 64 * k['tex']}" if k["uav"] else None,
                               lambda k: f"args+{constants(k) + 64 * k['tex']}" if k["uav"] else None),
  "TPL1_CS_BORDER_COLOR_BASE": Difference("written once a submit, not only for kernels with samplers",
                                          lambda k: "zeros" if k["tex"] else None, lambda k: "zeros"),
  "SP_FLOAT_CNTL": fixed(0, LEFT_ALONE),
  "HLSQ_SHARED_CONSTS": fixed(0, LEFT_ALONE),
  "TPL1_DBG_ECO_CNTL": fixed(0x108000, CHIP, old=0),
  "SP_CHICKEN_BITS": fixed(0x1430, CHIP),
  "SP_DBG_ECO_CNTL": fixed(0, CHIP),
  "HLSQ_DBG_ECO_CNTL": fixed(0x80000, CHIP),
  "UCHE_CLIENT_PF": fixed(4, CHIP),
  "UCHE_UNKNOWN_0E12": fixed(0x10000001, CHIP),
  "load of constants": Difference("256 vec4 from wherever they lie read past the end of the arguments", lambda k: ["args+0", 0, 4096],
                                  lambda k: ["args+0", 0, constants(k)]),
  "load of shader": Difference("a preload of what the instruction cache holds: the groups of the program, 64 at most",
                               lambda k: ["code", 0, padded(k) * 128], lambda k: ["code", 0, min(k["instrlen"], 64) * 128]),
  **{f"load of {what}": Difference("from where the descriptors lie, see SP_CS_SAMPLER_BASE",
                                   lambda k, n=n, size=size, reg=reg: [DIFFERENCES[reg].unmodified(k), 0, size * k[n]] if k[n] else None,
                                   lambda k, n=n, size=size, reg=reg: [DIFFERENCES[reg].ours(k), 0, size * k[n]] if k[n] else None)
     for what, n, size, reg in (("sampler", "tex", 16, "SP_CS_SAMPLER_BASE"), ("texture", "tex", 64, "SP_CS_TEXMEMOBJ_BASE"),
                                ("uav", "uav", 64, "SP_CS_UAV_BASE"))},
}

PLAIN = ("elementwise", "variable", "matmul", "reduction", "half", "int64", "bytes", "softmax", "long", "spill", "replay")
IMAGE = ("image", "image_half")

def run(driver: str, image: bool, wheel: dict[str, str]) -> dict[str, Any]:
  """dispatch_log's record of a driver: "unmodified", KGSL or MSM."""
  env = wheel if driver == "unmodified" else {**os.environ, "DEV": f"MOCK{driver}+QCOM:IR3", "PARALLEL": "0"}
  child = subprocess.run([sys.executable, str(pathlib.Path(__file__).with_name("dispatch_log.py")), *(IMAGE if image else PLAIN)],
                         env={**env, "IMAGE": str(int(image))}, capture_output=True, text=True, timeout=280)
  assert child.returncode == 0, f"{driver}: {child.stderr[-3000:]}"
  record: dict[str, Any] = json.loads(child.stdout)
  return record

def state(dispatch: dict[str, Any]) -> dict[str, Any]: return {**dispatch["registers"], **{f"load of {k}": v for k, v in dispatch["loads"].items()}}

def compare(case: str, n: int, theirs: dict[str, Any], ours: dict[str, Any], seen: Counter[str]) -> list[str]:
  """What is not as DIFFERENCES says, in words. Counts in `seen` where the two really differ."""
  k, out = ours["kernel"], []
  for key in ("kernel", "groups", "textures", "samplers", "uavs"):
    if theirs[key] != ours[key]: out.append(f"{key}: {theirs[key]}, ours {ours[key]}")
  if theirs["constants"][:len(ours["constants"])] != ours["constants"]: out.append(f"constants: {theirs['constants']}, ours {ours['constants']}")
  a, b = state(theirs), state(ours)
  for name in sorted(a.keys() | b.keys() | DIFFERENCES.keys()):
    old, new = a.get(name), b.get(name)
    seen[name] += old != new
    want = (DIFFERENCES[name].unmodified(k), DIFFERENCES[name].ours(k)) if name in DIFFERENCES else (old, old)
    if (old, new) != want: out.append(f"{name}: {old}, ours {new}; expected {want[0]}, ours {want[1]}")
  need = per_fiber(k) * 128 * 16 * 2                    # 128 fibers of 16 waves on 2 SPs
  if ours["scratch_room"] < need: out.append(f"{need} bytes of private memory are needed, {ours['scratch_room']} are there")
  return [f"{case}, dispatch {n}: {line}" for line in out]

@pytest.mark.parametrize("image", [False, True], ids=["plain", "image"])
def test_same_state_apart_from_what_is_explained(tmp_path: pathlib.Path, image: bool) -> None:
  """The same dispatches in the same order with the same machine code, and results equal bit for bit. MSM and KGSL differ in how a stream reaches the
  GPU, not in what it says."""
  theirs, ours = run("unmodified", image, environment(tmp_path)), run("KGSL", image, {})
  assert list(theirs) == list(ours) == list(IMAGE if image else PLAIN)
  seen, wrong, kernels = Counter[str](), list[str](), list[Kernel]()
  for case in theirs:
    a, b = theirs[case]["dispatches"], ours[case]["dispatches"]
    assert len(a) == len(b) > 0, f"{case}: {len(a)} dispatches, ours {len(b)}"
    for n, (x, y) in enumerate(zip(a, b)): wrong += compare(case, n, x, y, seen)
    kernels += [x["kernel"] for x in b]
    assert theirs[case]["result"] == ours[case]["result"], f"{case}: other bits in the result"
  assert not wrong, "\n".join(wrong)
  # the set of kernels meets every entry, otherwise it says nothing about it
  images = {n for n in DIFFERENCES if n.endswith(("SAMPLER_BASE", "TEXMEMOBJ_BASE", "UAV_BASE", "sampler", "texture", "uav"))}
  assert {n for n in seen if seen[n]} | (set() if image else images) >= DIFFERENCES.keys()
  if image: assert {k["tex"] for k in kernels} >= {0, 1, 2}
  else: assert all(any(k[n] for k in kernels) for n in ("pvtmem", "shared")) and any(k["instrlen"] > 64 and not k["pvtmem"] for k in kernels)
  assert run("MSM", image, {}) == ours

def test_differences_are_documented() -> None:
  page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "differences.md"
  if not page.is_file(): pytest.skip("docs/ is in the stack's own repository only")
  text = page.read_text()
  assert [n for n in DIFFERENCES if n.removeprefix("load of ") not in text] == []
