"""Options that Mesa's compiler takes from the environment and kernels that are in the cache already."""
import os, subprocess, sys, tempfile, unittest

SCRIPT = """
from tinygrad import Tensor
from tinygrad.helpers import Context, dedup
from tinygrad.engine.realize import to_program_cache
from tinygrad.runtime.support.compiler_mesa import IR3Compiler
a = Tensor.empty(16, 16)
(a @ a).realize()
print(sum(IR3Compiler.unpack_lib(p.to_elf().lib)[0].pvtmem_size for p in to_program_cache.values()))
"""

class TestIR3DebugCache(unittest.TestCase):
  def compiled(self, cache: str, options: str) -> int:
    """Bytes of private memory of a matmul's code."""
    env = {**os.environ, "DEV": "NULL:IR3:a630", "XDG_CACHE_HOME": cache, "IR3_SHADER_DEBUG": options,
           "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    self.assertEqual(done.returncode, 0, done.stderr)
    return int(done.stdout.split()[-1])

  def test_other_options_other_code(self):
    with tempfile.TemporaryDirectory() as cache:
      self.assertEqual(self.compiled(cache, ""), 0)
      self.assertGreater(self.compiled(cache, "spillall"), 0, "the kernel of the run without spillall came from the cache")
      self.assertEqual(self.compiled(cache, ""), 0)

if __name__ == "__main__": unittest.main()
