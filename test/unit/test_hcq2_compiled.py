import os, subprocess, sys, unittest

CHILD = """
import numpy as np
from tinygrad import Tensor
from tinygrad.engine.realize import compile_linear, run_linear

def check(name, make, want, runs=1):
  out = make()
  linear = compile_linear(out.schedule_linear())
  for _ in range(runs): run_linear(linear)
  np.testing.assert_equal(out.numpy(), want, err_msg=name)

data = np.arange(24, dtype=np.float32).reshape(4, 6)
def real(): return Tensor(data, device="PYTHON").to("CPU").realize()
check("no inputs", lambda: Tensor.arange(256).clone(), np.arange(256))
check("one kernel", lambda: real() * 2 + 1, data * 2 + 1)
check("three kernels", lambda: ((real().sum(0).contiguous() + 1).contiguous() * real()).contiguous(), (data.sum(0) + 1) * data)
check("a copy", lambda: Tensor(data, device="PYTHON").to("CPU") + 3, data + 3)
check("runs twice", lambda: real() - 1, data - 1, 2)
x = real()
linear = compile_linear((x + 1).schedule_linear())
x.assign(Tensor(data + 1, device="PYTHON").to("CPU")).realize()
del x
run_linear(linear)
print("fine")
"""

class TestHCQ2Compiled(unittest.TestCase):
  def test_runs(self):
    got = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=300, env=dict(os.environ, DEV="CPU", HCQ2="1"))
    self.assertEqual(got.stdout, "fine\n", got.stderr)

if __name__ == "__main__": unittest.main()
