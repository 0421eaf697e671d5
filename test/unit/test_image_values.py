import os, subprocess, sys, unittest
from tinygrad.helpers import Context, IMAGE

def run(**env) -> subprocess.CompletedProcess:
  return subprocess.run([sys.executable, "-c", "from tinygrad.helpers import IMAGE\nprint('IMAGE is', IMAGE.value)"], capture_output=True, text=True,
                        timeout=60, env={**os.environ, **env})

class TestImageValues(unittest.TestCase):
  def check_refused(self, value:str, *words:str):
    self.assertNotEqual((ret:=run(IMAGE=value)).returncode, 0, f"IMAGE={value} was taken: {ret.stdout}")
    for w in words: self.assertIn(w, ret.stderr.splitlines()[-1])

  def test_two(self): self.check_refused("2", "IMAGE=2 is not supported", "1 (images)", "0 (buffers)")
  def test_negative(self): self.check_refused("-1", "IMAGE=-1 is not supported")
  def test_not_a_number(self): self.check_refused("yes", "IMAGE='yes'")
  def test_one_and_zero(self):
    for v in "01": self.assertEqual(run(IMAGE=v).stdout.strip(), f"IMAGE is {v}")
  def test_context(self):
    before = IMAGE.value
    with self.assertRaisesRegex(ValueError, "IMAGE=2 is not supported"), Context(IMAGE=2): pass
    self.assertEqual(IMAGE.value, before)
    with Context(IMAGE=1): self.assertTrue(IMAGE == 1 and IMAGE > 0 and bool(IMAGE))
    self.assertEqual(IMAGE.value, before)

if __name__ == "__main__": unittest.main()
