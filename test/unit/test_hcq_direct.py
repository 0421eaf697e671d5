import os, subprocess, sys, textwrap, unittest

def run(code:str, **env) -> str:
  """Output of `code` in a fresh interpreter: HCQ2 is chosen when tinygrad is imported."""
  return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True).stdout

DROPPED = """
  import gc
  from tinygrad import Tensor, TinyJit
  from tinygrad.helpers import GlobalCounters
  def capture_and_drop():
    @TinyJit
    def f(x): return ((x + 1).contiguous() * 2).contiguous().sum().realize()
    for i in range(3): f(Tensor.full((1 << 16,), float(i)).contiguous().realize())
    del f
    gc.collect()
    return GlobalCounters.mem_used
  capture_and_drop()
  first = capture_and_drop()
  print(max(capture_and_drop() - first for _ in range(2)) < 1 << 16)
"""

class TestHCQCaptures(unittest.TestCase):
  def test_a_dropped_capture_frees_its_intermediates(self): self.assertEqual(run(DROPPED, DEV="CPU", HCQ2="1").strip(), "True")

if __name__ == "__main__": unittest.main()
