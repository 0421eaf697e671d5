import os, subprocess, sys, unittest

CHILD = """
from tinygrad.runtime import ops_cpu
compiled, do_to_program = [], ops_cpu.do_to_program
ops_cpu.do_to_program = lambda sink, renderer: compiled.append(sink.arg.name) or do_to_program(sink, renderer)
from tinygrad import Device, Tensor
dev = Device["CPU"]
print("opened", len(compiled))
x, y = (Tensor(list(range(9)), device="PYTHON").to("CPU").realize() for _ in range(2))
print("result", (x * y + 1).tolist() == [n * n + 1 for n in range(9)])
dev.synchronize()
print("again", (x - y).sum().item() == 0, len(set(compiled)) == len(compiled) > 0)
"""

class TestCPULazy(unittest.TestCase):
  """What the CPU device's worker runs is compiled when it is first needed: another device may open CPU only to compile or to hold a table."""
  def run_child(self, **env):
    done = subprocess.run([sys.executable, "-c", CHILD], env={**os.environ, "DEV": "CPU", "PARALLEL": "0", **env}, capture_output=True, text=True)
    self.assertEqual(done.returncode, 0, done.stderr)
    return done.stdout.split("\n")
  def test_nothing_is_compiled_to_open_the_device(self):
    for env in ({}, {"HCQ2": "1"}):
      with self.subTest(env): self.assertEqual(self.run_child(**env)[:2], ["opened 0", "result True"])
  def test_once(self): self.assertEqual(self.run_child(HCQ2="1")[2], "again True True")

if __name__ == "__main__": unittest.main()
