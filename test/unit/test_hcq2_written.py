import os, pathlib, pickle, subprocess, sys, tempfile, unittest

CHILD = """
import numpy as np
from tinygrad import GlobalCounters, Tensor, TinyJit

def real(n=6): return Tensor(np.arange(n, dtype=np.float32), device="PYTHON").to("CPU").realize()
def feedback(f, ref, steps=6):
  x, r = real(), np.arange(6, dtype=np.float32)
  for _ in range(steps): x, r = f(x), ref(r)
  return x.tolist() == r.tolist()

def two_kernels(x): return (x.flip(0).contiguous() + 1)[1:].cat(x[:1]).contiguous().realize()
def viewed(x): return x.reshape(2, 3).T.contiguous().reshape(6).realize()
weights = real()
print("ring", feedback(TinyJit(lambda x: x[1:].cat(x[:1]).contiguous().realize()), lambda r: np.roll(r, -1)))
print("two_kernels", feedback(TinyJit(two_kernels), lambda r: np.concatenate([(r[::-1] + 1)[1:], r[:1]])))
print("viewed", feedback(TinyJit(viewed), lambda r: r.reshape(2, 3).T.reshape(-1)))
print("by_name", feedback((lambda f: lambda x: f(x=x))(TinyJit(lambda x: x.flip(0).contiguous().realize())), lambda r: r[::-1]))

state, bump = real(), TinyJit(lambda x: x.assign(x + weights).realize())
for _ in range(5): bump(state)
print("in_place", state.tolist() == [6.0 * n for n in range(6)])

f = TinyJit(lambda x: ((x * 2).contiguous().realize() + weights).contiguous().realize())
for n in range(4): f(real())
before = GlobalCounters.mem_used
f.captured.free_intermediates()
print("freed", before - GlobalCounters.mem_used >= 2 * 6 * 4)
print("again", f(real()).tolist() == [3.0 * n for n in range(6)])
"""

TRACED = """
from tinygrad import Tensor, TinyJit
f = TinyJit(lambda x: ((x + 1).contiguous().realize() * 3).contiguous().realize())
for _ in range(4): out = f(Tensor([0., 1.], device="PYTHON").to("CPU").realize())
print(out.tolist())
"""

class TestHCQ2Written(unittest.TestCase):
  """A capture knows the buffers it overwrites, though HCQ2 refers to them by address: an input among them is copied, and they can be freed."""
  @classmethod
  def setUpClass(cls):
    env = {**os.environ, "DEV": "CPU", "HCQ2": "1", "PARALLEL": "0"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True)
    cls.found, cls.log = dict(line.split() for line in done.stdout.splitlines()), done.stdout + done.stderr

  def test_outputs_fed_back(self):
    for name in ("ring", "two_kernels", "viewed", "by_name"):
      with self.subTest(name): self.assertEqual(self.found.get(name), "True", self.log)
  def test_a_traced_run_is_written(self): # VIZ pickles what calls say of themselves: that must hold no buffer, whose contents would be copied
    with tempfile.TemporaryDirectory() as tmp:
      env = {**os.environ, "DEV": "CPU", "HCQ2": "1", "PARALLEL": "0", "VIZ": "-1", "TMPDIR": tmp}
      done = subprocess.run([sys.executable, "-c", TRACED], env=env, capture_output=True, text=True)
      self.assertEqual((done.returncode, done.stderr), (0, ""))
      self.assertIn("[3.0, 6.0]", done.stdout)
      with open(next(pathlib.Path(tmp).glob("rewrites.pkl*")), "rb") as f: self.assertGreater(len(pickle.load(f).rewrites), 0)
  def test_in_place(self): self.assertEqual(self.found.get("in_place"), "True", self.log)
  def test_free_intermediates(self): self.assertEqual((self.found.get("freed"), self.found.get("again")), ("True", "True"), self.log)

if __name__ == "__main__": unittest.main()
