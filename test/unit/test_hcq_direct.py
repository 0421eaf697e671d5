import os, subprocess, sys, textwrap, unittest

def run(code:str, **env) -> str:
  """Output of `code` in a fresh interpreter: HCQ2 is chosen when tinygrad is imported."""
  return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=True).stdout

DROPPED = """
  import gc
  from tinygrad import Tensor, TinyJit
  from tinygrad.helpers import GlobalCounters
  def capture_and_drop():
    @TinyJit
    def f(x): return ((x + 1).contiguous() * 2).contiguous().sum().realize()
    for i in range(4): f(Tensor.full((1 << 16,), float(i)).contiguous().realize())
    del f
    gc.collect()
    return GlobalCounters.mem_used
  capture_and_drop()
  first = capture_and_drop()
  print([capture_and_drop() - first for _ in range(4)][-1] < 1 << 16)
"""

FREED = """
  from tinygrad import Tensor, TinyJit
  @TinyJit
  def f(x): return ((x + 1).contiguous() * 2).contiguous().realize()
  def call(i): return f(Tensor.full((64,), float(i)).contiguous().realize()).tolist() == [(i + 1) * 2.0] * 64
  before = [call(i) for i in range(4)]
  f.captured.free_intermediates()
  keep = Tensor.full((64,), 7.0).contiguous().realize()
  print(all(before) and all(call(i) for i in range(4)) and keep.tolist() == [7.0] * 64)
"""

class TestHCQCaptures(unittest.TestCase):
  def test_a_dropped_capture_frees_its_intermediates(self): self.assertEqual(run(DROPPED, DEV="CPU", HCQ2="1").strip(), "True")
  def test_a_capture_runs_after_free_intermediates(self): self.assertEqual(run(FREED, DEV="CPU", HCQ2="1").strip(), "True")

if __name__ == "__main__": unittest.main()
