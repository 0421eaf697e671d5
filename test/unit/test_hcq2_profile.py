import json, os, subprocess, sys, tempfile, unittest

CHILD = """
import itertools, json
import numpy as np
from tinygrad import Device, Tensor, TinyJit
from tinygrad.device import Compiled, ProfileGraphEvent
from tinygrad.helpers import perf_counter_us

def fresh(device): return Tensor(np.arange(1 << 16, dtype=np.float32), device="PYTHON").to(device).realize()
def sync():
  for d in ("CPU", "CPU:1"): Device[d].synchronize()

def spans(run):
  # six runs that nobody waits for: each kernel's span by device, and the host's, in us
  for _ in range(3): run()
  sync()
  Compiled.profile_events.clear()
  before = float(perf_counter_us())
  for _ in range(6): run()
  sync()
  found = {}
  for e in Compiled.profile_events:
    for x in e.ents if isinstance(e, ProfileGraphEvent) else ():
      found.setdefault(x.device, []).append((float(e.sigs[x.st_id]), float(e.sigs[x.en_id])))
  return found, before, float(perf_counter_us())

xs, y = itertools.cycle([fresh("CPU"), fresh("CPU")]), fresh("CPU:1")
shards = Tensor(np.arange(1 << 17, dtype=np.float32), device="PYTHON").shard(("CPU", "CPU:1"), axis=0).realize()
two = TinyJit(lambda x: ((x + 1).contiguous() * 2).realize())
devices = TinyJit(lambda x, y: ((x + 1).realize(), ((y + 1).contiguous() * 2).realize()))
sharded = TinyJit(lambda x: (x + 1).realize())
print("FOUND", json.dumps({"replays": spans(lambda: two(next(xs))), "eager": spans(lambda: (y * 3).realize()),
                           "devices": spans(lambda: devices(next(xs), y)), "shards": spans(lambda: sharded(shards))}))
"""

UNTIMED = """
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import Context
f = TinyJit(lambda x: ((x + 1).contiguous() * 2).realize())
for i in range(3):
  x = Tensor([1.0, i], device="PYTHON").to("CPU").realize()
  with Context(DEBUG=2 if i == 2 else 0): f(x)
"""

class TestHCQ2Untimed(unittest.TestCase):
  def test_captured_without_timestamps(self):
    # two kernels of one submit: when both had ended is all that is known
    env = {**os.environ, "DEV": "CPU", "HCQ2": "1", "PROFILE": "0", "DEBUG": "0", "JIT": "1", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", UNTIMED], env=env, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if "*** CPU" in line]
    self.assertEqual(len(lines), 2, done.stdout)
    self.assertNotIn(" tm ", lines[0])
    self.assertRegex(lines[1], r" tm .*ms \(all 2 kernels, host\)$")

class TestHCQ2Profile(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    with tempfile.TemporaryDirectory() as tmp: # the profile is written there when the child ends
      env = {**os.environ, "DEV": "CPU", "HCQ2": "1", "PROFILE": "1", "JIT": "1", "TMPDIR": tmp}
      done = subprocess.run([sys.executable, "-c", CHILD], env=env, stdout=subprocess.PIPE, text=True)
    cls.found = json.loads(next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), "FOUND {}")[6:])

  def check(self, name:str, kernels:dict[str, int]):
    found, before, after = self.found[name]
    for device, expected in kernels.items():
      got = found.get(device, [])
      self.assertEqual(len(got), 6 * expected, f"{len(got)} of {6 * expected} kernels in the profile of {device}")
      # kernels of one queue run one after the other, so their spans are disjoint, and all of them lie between the first call and the last synchronize
      flat = [t for span in got for t in span]
      self.assertEqual(flat, sorted(flat))
      self.assertTrue(before <= flat[0] and flat[-1] <= after, (before, flat[0], flat[-1], after))
      self.assertTrue(all(en > st for st, en in got), got)

  def test_replays(self): self.check("replays", {"CPU": 2})
  def test_eager(self): self.check("eager", {"CPU:1": 1})
  def test_two_devices(self): self.check("devices", {"CPU": 1, "CPU:1": 2})
  def test_shards(self): self.check("shards", {"CPU": 1, "CPU:1": 1})

if __name__ == "__main__": unittest.main()
