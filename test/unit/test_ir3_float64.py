import os, subprocess, sys, unittest

def run(script:str) -> subprocess.CompletedProcess:
  """Runs the script in a child process: an abort in the compiler must not take the suite down."""
  return subprocess.run([sys.executable, "-c", "from tinygrad import Tensor, dtypes\n"+script], capture_output=True, text=True, timeout=120,
                        env={**os.environ, "DEV":"NULL:IR3:a630", "PARALLEL":"0", "CCACHE":"0"})

class TestIR3Float64(unittest.TestCase):
  def check_refused(self, *exprs:str):
    ret = run("x, f = Tensor.empty(16, dtype=dtypes.float64), Tensor.empty(16)\n" + "".join(f"""
try: ({e}).realize()
except RuntimeError as e: print("refused:", e)""" for e in exprs) + "\nprint('alive', (f + 1).realize().shape)")
    self.assertEqual(ret.returncode, 0, f"the process died: {ret.stderr[-300:]}")
    refused = [line for line in ret.stdout.splitlines() if line.startswith("refused:")]
    self.assertEqual(len(refused), len(exprs), ret.stdout)
    for line in refused:
      for word in ("dtypes.double", "array.astype(np.float32)", "device='CPU').float().to('NULL')"): self.assertIn(word, line)
    self.assertIn("alive", ret.stdout)

  def test_arithmetic(self): self.check_refused("x + 1", "x.sin()", "x.maximum(2)", "x // 3")
  def test_reduce(self): self.check_refused("x.sum()", "x.reshape(4, 4) @ x.reshape(4, 4)")
  def test_cast(self): self.check_refused("x.cast(dtypes.float32)", "f.cast(dtypes.float64)", "x.cast(dtypes.int64)", "x.cast(dtypes.bool)")
  # these do not abort, the compiled code reads half of the bits
  def test_compare(self): self.check_refused("x < 2", "(x == 0).where(f, 1)")

  def test_moving_still_compiles(self):
    ret = run("Tensor.empty(16, dtype=dtypes.float64).flip(0).contiguous().realize(); print('moved')")
    self.assertIn("moved", ret.stdout, ret.stderr[-300:])
  def test_ways_out(self):
    ret = run("""
import numpy as np
array = np.arange(4.0)
for t in (Tensor(array.astype(np.float32)), Tensor(array, device='CPU').float().to('NULL')): print((t + 1).realize().dtype)""")
    self.assertEqual(ret.stdout.split(), ["dtypes.float"] * 2, ret.stderr[-300:])
  def test_other_dtypes_compile(self):
    ret = run("for d in (dtypes.half, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.int64, dtypes.bool):"
              " (Tensor.empty(16, dtype=d)*2).realize()\nprint('ok')")
    self.assertIn("ok", ret.stdout, ret.stderr[-300:])

if __name__ == "__main__": unittest.main()
