"""Control flow and data between the fibers of a wave: getlast, brac, preambles, ballots, shfl, brcst, quad_shuffle, against plain Python."""
import numpy as np
import pytest
from test.virtual.ir3_core import Memory
from test.virtual.ir3_lab import run
from test.virtual.test_ir3_engine import LANE, OUT, launch, words

MASKS = {"all": "cmps.u.ge p0.x, r0.x, 0", "low": "cmps.u.lt p0.x, r0.x, 21", "odd": "and.b p0.x, r0.x, 1", "high": "cmps.u.gt p0.x, r0.x, 37"}
ACTIVE = {"all": LANE >= 0, "low": LANE < 21, "odd": LANE % 2 == 1, "high": LANE > 37}
X = LANE * np.uint32(2654435761)

def masked(mask: str, text: str, outs: dict, ins: dict, setup: str = "", **kw) -> dict:
  """Runs `text` for the fibers of `mask` only."""
  n = len(text.strip().splitlines())
  return run(f"{setup}{MASKS[mask]}\nbr !p0.x, #{n + 1}\n{text}\n(jp)nop", ins, outs, **kw)

@pytest.mark.parametrize("mask", MASKS)
def test_getlast_sends_all_but_the_last_fiber_of_the_first_cluster(mask):
  out = masked(mask, "mov.u32u32 r2.x, 1\ngetlast.w8 #2\njump #2\n(jp)mov.u32u32 r2.x, 2\n(jp)nop", {"r2.x": np.uint32}, {}, "mov.u32u32 r2.x, 0\n")
  active = np.flatnonzero(ACTIVE[mask])
  first = [k for k in active if k // 8 == active[0] // 8]
  want = np.where(ACTIVE[mask], 1, 0)
  want[first[:-1]] = 2
  assert (out["r2.x"] == want).all()

@pytest.mark.parametrize("bit", (0, 3, 31))
def test_brac_tests_the_boolean_constant_mask(bit):
  mem = Memory()
  dst = mem.alloc(256)
  for on in (False, True):
    launch(f"mov.u32u32 r2.x, 1\nbrac.{bit} #2\nmov.u32u32 r2.x, 5\n(jp)" + OUT + "stg.u32 g[r40.x], r2.x, 1\nend", mem, words(dst),
           cf_mask=1 << bit if on else ~(1 << bit) & 0xffffffff)
    assert (mem.view(dst, 256).view(np.uint32) == (1 if on else 5)).all()

def test_a_preamble_runs_before_the_rest():
  out = run("mov.u32u32 r2.x, 3\nshps #3\nadd.u r2.x, r2.x, 4\nshpe\nadd.u r3.x, r2.x, r0.x", {}, {"r3.x": np.uint32})
  assert (out["r3.x"] == 7 + LANE).all()

SHIFTS = {"xor": lambda i, n: i ^ n, "up": lambda i, n: i - n, "down": lambda i, n: i + n, "rup": lambda i, n: (i - n) % 64, "rdown": lambda i,
          n: (i + n) % 64}

@pytest.mark.parametrize("mode", SHIFTS)
@pytest.mark.parametrize("n", (0, 1, 5, 16, 63))
@pytest.mark.parametrize("w,mask", ((32, "all"), (16, "low"), (32, "odd")))
def test_shfl_takes_the_value_of_a_fiber_at_a_distance(mode, n, w, mask):
  """Where the source fiber is active; elsewhere nothing is promised."""
  h, dt = ("h", np.uint16) if w == 16 else ("", np.uint32)
  x = X.astype(dt)
  for index in (str(n), "r4.x"):
    out = masked(mask, f"shfl.{mode}.u{w} {h}r2.x, {h}r1.x, {index}", {f"{h}r2.x": dt}, {f"{h}r1.x": x},
                 f"mov.u32u32 r4.x, {n}\nmov.u{w}u{w} {h}r2.x, 0\n")
    for i in np.flatnonzero(ACTIVE[mask]):
      j = SHIFTS[mode](int(i), n)
      if 0 <= j < 64 and ACTIVE[mask][j]: assert out[f"{h}r2.x"][i] == x[j]

@pytest.mark.parametrize("size", (2, 4, 8, 16))
@pytest.mark.parametrize("w,mask", ((32, "all"), (32, "low"), (16, "odd"), (16, "high")))
def test_brcst_gives_the_lower_halfs_last_active_value_to_the_upper_half(size, w, mask):
  h, dt = ("h", np.uint16) if w == 16 else ("", np.uint32)
  x = X.astype(dt)
  def patch(code: bytes) -> bytes:      # Mesa's assembler encodes w4 and w8 only
    words = np.frombuffer(code, np.uint64).copy()
    k, = np.flatnonzero(words >> np.uint64(53) == 0xa7c00000 >> 21)
    words[k] = words[k] & ~np.uint64(3 << 19) | np.uint64((size.bit_length() - 2) << 19)
    return words.tobytes()
  out = masked(mask, f"brcst.active.w8 (u{w})(x){h}r2.x, {h}r1.x", {f"{h}r2.x": dt}, {f"{h}r1.x": x}, f"mov.u{w}u{w} {h}r2.x, 7\n", patch=patch)
  want = np.full(64, 7, dt)
  for c in range(0, 64, size):
    low = [k for k in range(c, c + size // 2) if ACTIVE[mask][k]]
    for k in range(c + size // 2, c + size):
      if low and ACTIVE[mask][k]: want[k] = x[low[-1]]
  assert (out[f"{h}r2.x"] == want).all()

@pytest.mark.parametrize("w", (32, 16))
def test_quad_shuffles(w):
  h, dt = ("h", np.uint16) if w == 16 else ("", np.uint32)
  x, k = X.astype(dt), (LANE // 4 % 4).astype(dt)
  out = run(f"quad_shuffle.brcst (u{w})(x){h}r3.x, {h}r1.x, {h}r2.x\nquad_shuffle.horiz (u{w})(x){h}r4.x, {h}r1.x\n"
            f"quad_shuffle.vert (u{w})(x){h}r5.x, {h}r1.x\nquad_shuffle.diag (u{w})(x){h}r6.x, {h}r1.x", {f"{h}r1.x": x, f"{h}r2.x": k},
            {f"{h}r{r}.x": dt for r in (3, 4, 5, 6)})
  for r, j in ((3, LANE // 4 * 4 + k), (4, LANE ^ 1), (5, LANE ^ 2), (6, LANE ^ 3)): assert (out[f"{h}r{r}.x"] == x[j]).all()

@pytest.mark.parametrize("mask", MASKS)
def test_ballot_and_votes_as_the_compiler_builds_them(mask):
  """movmsk in one branch gives the ballot; bany and ball decide for the wave."""
  out = masked(mask, "cmps.u.lt p0.y, r1.x, 1023\nmov.u32u32 r2.x, 0\nmov.u32u32 r2.y, 0\nbr !p0.y, #2\nmovmsk.w64 r2.x\n(jp)mov.u32u32 r3.x, 1\n"
               "bany p0.y, #2\nmov.u32u32 r3.x, 0\n(jp)mov.u32u32 r3.y, 1\nball p0.y, #2\nmov.u32u32 r3.y, 0\n(jp)nop",
               {r: np.uint32 for r in ("r2.x", "r2.y", "r3.x", "r3.y")}, {"r1.x": X % 1300},
               "mov.u32u32 r2.x, 9\nmov.u32u32 r2.y, 9\nmov.u32u32 r3.x, 9\nmov.u32u32 r3.y, 9\n")
  below = ACTIVE[mask] & (X % 1300 < 1023)
  bits = sum(1 << int(k) for k in np.flatnonzero(below))
  for k in np.flatnonzero(ACTIVE[mask]):
    assert (out["r2.x"][k], out["r2.y"][k]) == ((bits & 0xffffffff, bits >> 32) if below[k] else (0, 0))
    assert (out["r3.x"][k], out["r3.y"][k]) == (below.any(), (below == ACTIVE[mask]).all())
