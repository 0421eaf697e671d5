import os, subprocess, sys, unittest

COMMON = """
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
"""

RUNS = """
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

# y, z and w need each other in this order; which of them are compiled when all run as one linear
PARTS = """
for compiled in ("y", "z", "w", "yz", "yw", "zw", ""):
  y = (real() + 1).contiguous()
  z = Tensor(data, device="PYTHON").to("CPU") * y
  w = (z.contiguous() - 4).contiguous()
  parts = [t.schedule_linear() for t in (y, z.contiguous(), w)]
  run_linear(parts[0].replace(src=tuple(c for n, p in zip("yzw", parts) for c in (compile_linear(p) if n in compiled else p).src)))
  np.testing.assert_equal(w.numpy(), data * (data + 1) - 4, err_msg=compiled)
print("fine")
"""

class TestHCQ2Compiled(unittest.TestCase):
  def test_runs(self): self.check(RUNS)
  def test_runs_with_what_is_not_compiled(self): self.check(PARTS)

  def check(self, code):
    env = dict(os.environ, DEV="CPU", HCQ2="1")
    got = subprocess.run([sys.executable, "-c", COMMON + code], capture_output=True, text=True, timeout=300, env=env)
    self.assertEqual(got.stdout, "fine\n", got.stderr)

if __name__ == "__main__": unittest.main()
