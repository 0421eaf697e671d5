import os, pathlib, pickle, subprocess, sys, tempfile, unittest
import numpy as np
from tinygrad import Tensor, TinyJit

# a process of its own counts buffers from the start, as the one that loads does
DUMP = """import pickle, sys
import numpy as np
from tinygrad import Tensor, TinyJit
k = float(sys.argv[2])
weight, bias = [Tensor(np.full(16, v, np.float32)).realize() for v in (k, k + 1)]
jit = TinyJit(lambda x: ((x * weight).contiguous() + bias).realize())
for i in range(3): jit(Tensor(np.full(16, i, np.float32)).realize())
with open(sys.argv[1], "wb") as f: pickle.dump((jit, weight, [weight, bias]), f)"""

LOAD = """import pickle, sys
import numpy as np
from tinygrad import Tensor
def const(v): return Tensor(np.full(16, v, np.float32)).realize()
def check(t, v): np.testing.assert_array_equal(t.numpy(), np.full(16, v, np.float32))
def load(k):
  with open(sys.argv[1] + "/" + str(k), "rb") as f: return pickle.load(f)
"""

class TestPickleSlots(unittest.TestCase):
  """Buffers are told apart by a number that every process counts from zero. What is loaded must not become what has that number here."""
  @classmethod
  def setUpClass(cls):
    cls.dir = tempfile.TemporaryDirectory()
    for k in (3, 5): subprocess.run([sys.executable, "-c", DUMP, str(pathlib.Path(cls.dir.name)/str(k)), str(k)], check=True, timeout=120)
  @classmethod
  def tearDownClass(cls): cls.dir.cleanup()

  def run_loader(self, script:str):
    ret = subprocess.run([sys.executable, "-c", LOAD + script, self.dir.name], capture_output=True, text=True, timeout=120, env=dict(os.environ))
    self.assertEqual(ret.returncode, 0, ret.stderr)

  def test_loaded_after_other_tensors(self):
    self.run_loader("""mine = [const(100 + i) for i in range(20)]
jit, weight, both = load(3)
check(weight, 3); check(both[1], 4)
for i in range(3): check(jit(const(i)), 3*i + 4)
for i, t in enumerate(mine): check(t, 100 + i)""")

  def test_tensors_made_after_loading(self):
    self.run_loader("""jit, weight, both = load(3)
mine = [const(100 + i) for i in range(40)]
for i, t in enumerate(mine): check(t, 100 + i)
check(weight, 3); check(both[1], 4); check(jit(const(2)), 10)""")

  def test_two_captures(self):
    self.run_loader("""(j3, w3, _), (j5, w5, _) = load(3), load(5)
for i in range(3):
  a, b = j3(const(i)), j5(const(i))
  check(a, 3*i + 4); check(b, 5*i + 6)""")

  def test_loaded_next_to_the_original(self):
    x = Tensor(np.arange(16, dtype=np.float32)).realize()
    y = pickle.loads(pickle.dumps(x))
    x.assign(x + 1).realize()
    np.testing.assert_array_equal(y.numpy(), np.arange(16, dtype=np.float32))
    np.testing.assert_array_equal(x.numpy(), np.arange(1, 17, dtype=np.float32))

  def test_capture_loaded_next_to_the_original(self):
    state = Tensor(np.zeros(16, np.float32)).realize()
    jit = TinyJit(lambda x: state.assign(state + x).realize())
    ones = Tensor(np.ones(16, np.float32)).realize()
    for _ in range(3): jit(ones)
    again = pickle.loads(pickle.dumps(jit))
    for k in (4, 5): np.testing.assert_array_equal(again(ones).numpy(), np.full(16, k, np.float32))
    np.testing.assert_array_equal(state.numpy(), np.full(16, 3, np.float32))

if __name__ == "__main__": unittest.main()
