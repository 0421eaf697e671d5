"""Programs and command streams that nobody meant: always a finding or an error with a name, never a crash, a hang or an error of the emulator's own.

The suite runs a few hundred. A long run, which says how many and what came of them: python -m test.virtual.test_fuzz shaders|streams COUNT [SEED]
"""
from __future__ import annotations
import collections, faulthandler, random, sys
import numpy as np
from test.mockgpu.qcom.gpu import Strict
from test.mockgpu.qcom.ir3.native import Dispatch, ShaderFault, UnknownInstruction
from test.virtual.ir3_asm import assemble
from test.virtual.ir3_core import Memory, engine, image_descriptor
from test.virtual.rig import Rig, Stream
from test.virtual.test_qcomcl import by_hand
from test.virtual.test_ir3_reference import Random

# forms that the random programs leave out
OTHERS = """
mova a0.x, hr1.x\nmov.u32u32 r8.x, r<a0.x + 16>\nmov.u32u32 r<a0.x + 40>, r8.x\nmov.u16u16 hr8.x, hr<a0.x + 4>
isam (f32)(xyzw)r4.x, r2.x, s#0, t#0
sam (f32)(xyzw)r8.x, r4.x, s#0, t#0
stib.b.typed.2d.f32.4.imm r4.x, r2.x, 0\nldib.b.typed.2d.f32.4.imm r8.x, r2.x, 0
atomic.g.add.untyped.1d.u32.1.g r6.x, r22.x, r5.x\natomic.max.untyped.1d.u32.1.l r7.x, l[r20.x], r5.x\nldc.offset0.4.imm r9.x, r1.x, 0
shfl.xor.u32 r10.x, r5.x, 3\nquad_shuffle.brcst (u32)(x)r10.y, r5.x, r6.x\nmovmsk.w64 r11.x
swz.u32u32 r1.x, r2.x, r2.y, r1.y\nstc.u32 c[120], r1.x, 2
call #2\njump #3\n(jp)add.u r1.x, r1.x, 1\nret\n(jp)bar.g\ngetone #2\nnop\n(jp)nop
""".strip()

# out[thread] = its address
KERNEL = "shl.b r6.x, r48.x, 8\nshl.b r6.y, r0.x, 2\nadd.u r7.x, r6.x, r6.y\n" \
         "add.u r7.x, r7.x, c0.x\nmov.u32u32 r7.y, c0.y\nstg.u32 g[r7.x], r7.x, 1\nend"

def program(rnd: random.Random) -> bytes:
  """Machine code of a random program with some of its bits, words or places changed."""
  text = Random(rnd).program(rnd.randint(5, 40))
  if rnd.random() < 0.5: text = text.replace("mov.u32u32 r21.x, 0\n", f"mov.u32u32 r21.x, 0\n{rnd.choice(OTHERS.splitlines())}\n", 1)
  words = np.frombuffer(assemble(text), np.uint64).tolist()
  for _ in range(rnd.choice((1, 1, 2, 4, 16))):
    k, other = rnd.randrange(len(words)), rnd.randrange(len(words))
    match rnd.randrange(9):
      case 0 | 1 | 2: words[k] ^= 1 << rnd.randrange(64)
      case 7 | 8: words[k] ^= 1 << rnd.randrange(40)    # operands
      case 3: words[k] ^= rnd.getrandbits(64) & rnd.getrandbits(64) & rnd.getrandbits(64)
      case 4: words[k] = rnd.getrandbits(64)
      case 5: words[k], words[other] = words[other], words[k]
      case 6: words[k] = words[k] & 0xffffff00ffffffff | rnd.randrange(256) << 32       # another destination
  return np.array(words, np.uint64).tobytes()

def shader(seed: int) -> str:
  """Runs the program of `seed` and says what came of it. Anything but a result or one of the engine's errors is raised."""
  rnd = random.Random(seed)
  mem, code = Memory(), program(rnd)
  base, image = mem.alloc(1 << 16), mem.alloc(1 << 12)
  mem.view(base, 1 << 16)[:] = np.random.default_rng(seed).integers(0, 256, 1 << 16, np.uint8)
  consts = np.random.default_rng(seed).integers(0, 1 << 32, 1024, np.uint32)
  consts[:2] = base & 0xffffffff, base >> 32
  tex, uav = image_descriptor(image, (8, 8, 4), 4, True), image_descriptor(image, (8, 8, 4), 4, False)
  merged = rnd.random() < 0.3
  d = Dispatch((2, 1, 1), (rnd.choice((64, 128, 100, 1)), 1, 1), consts, mem.space, local_bytes=1024, pvt_bytes=512,
               branchstack=rnd.choice((0, 1, 4)), strict=rnd.random() < 0.7, merged_regs=merged, budget=3000,
               textures=[tex], uavs=[uav], samplers=[bytes(16)], ubos=[bytes(8)])
  try:
    with mem.space.running(): engine().run(engine().program(code, merged_regs=merged), d)
  except ShaderFault as e: return e.kind
  except UnknownInstruction: return "unknown_instruction"
  except ValueError: return "refused"
  return "ran"

def stream(rig: Rig, seed: int) -> str:
  """Submits a dispatch, with other packets around it, of which some dwords are changed. What the job reports, and "ok" or "hang"."""
  rnd = random.Random(seed)
  for b in rig.bufs[1:]: rig.space.unmap(b.iova)
  del rig.bufs[1:]
  k = by_hand(rig, assemble(KERNEL), wgid=192)
  out, args = rig.alloc(4096, "out"), rig.alloc(4096, "args")
  args.put(np.array([out.iova], np.uint64))
  s = Stream().nop(1, 2, 3).mem_write(out.iova, 1, 2, 3).wait_mem(out.iova, 1).timestamp(out.iova + 64)
  inner = Stream().nop(7).mem_write(out.iova + 8, 5).words
  s.call(rig.alloc(4096, "inner").put(np.array(inner, np.uint32)).iova, len(inner))
  s = rig.dispatch(s, k, args, (2, 1, 1), (64, 1, 1)).timestamp(out.iova + 128)
  at, payload = 0, list[int]()
  while at < len(s.words):                              # mostly what packets carry: a changed header is soon found out
    count = s.words[at] & (0x7f if s.words[at] >> 28 == 4 else 0x3fff)
    payload, at = payload + list(range(at + 1, at + 1 + count)), at + 1 + count
  for _ in range(rnd.choice((1, 1, 2, 3, 8))):
    n, other = rnd.choice(payload) if rnd.random() < 0.85 else rnd.randrange(len(s.words)), rnd.choice(payload)
    match rnd.randrange(5):
      case 0 | 1: s.words[n] ^= 1 << rnd.randrange(32)
      case 2: s.words[n] = rnd.getrandbits(32)
      case 3: s.words[n] = s.words[other]
      case 4: s.words[n] = rnd.choice((0, 1, 0x7fffffff, 0xffffffff, s.words[n] + 1, s.words[n] - 1)) & 0xffffffff
  job = rig.job(s)
  rig.gpu.submit(job)
  rig.gpu.poke(job)
  if not job.wait(2): rig.gpu.kill(job, "the hang check's time is over")    # a huge grid, as the kernel would end it
  assert job.wait(30), f"stream {seed} does not end"
  found = sorted({v.kind for v in job.result.reports})
  assert "internal" not in found, "\n".join(map(str, job.result.reports))
  return job.result.status + "".join(f" {f}" for f in found)

def streams(first: int, count: int) -> collections.Counter[str]:
  rig, seen = Rig(strict=Strict(raise_to_waiter=False), hang_polls=3, budget=3000), collections.Counter[str]()
  for seed in range(first, first + count): seen[stream(rig, seed)] += 1
  rig.close()
  return seen

def shaders(first: int, count: int) -> collections.Counter[str]:
  return collections.Counter(shader(seed) for seed in range(first, first + count))

def test_changed_programs() -> None:
  seen = shaders(0, 250)
  assert len(seen) > 6 and seen["ran"] > 10 and seen["unknown_instruction"] > 10, seen

def test_what_long_runs_found() -> None:
  assert shader(8851) == "unknown_instruction"          # halves of a repeated instruction reached into the address registers: a KeyError

def test_changed_streams() -> None:
  seen = streams(0, 150)
  assert len(seen) > 8 and sum(n for k, n in seen.items() if k.startswith("hang")) > 20 and seen["ok"] > 3, seen

def main(what: str, count: str, seed: str = "0") -> None:
  faulthandler.enable()
  def watch(n: int) -> None: faulthandler.dump_traceback_later(120, exit=True)
  total = collections.Counter[str]()
  for n in range(int(seed), int(seed) + int(count), 100):
    watch(n)
    total += {"shaders": shaders, "streams": streams}[what](n, min(100, int(seed) + int(count) - n))
    print(f"{what} {n + 100 - int(seed)}", flush=True)
  faulthandler.cancel_dump_traceback_later()
  print({"what": what, "count": count, "seed": seed, **dict(total.most_common())})

if __name__ == "__main__": main(*sys.argv[1:])
