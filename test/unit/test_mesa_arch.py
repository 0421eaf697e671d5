import os, platform, subprocess, sys, tempfile, unittest

def run(script:str, dev:str, **env:str) -> subprocess.CompletedProcess:
  return subprocess.run([sys.executable, "-c", "from tinygrad import Tensor, Device\n"+script], capture_output=True, text=True, timeout=120,
                        env={**os.environ, "DEV":dev, "PARALLEL":"0", "CCACHE":"0", **env})

class TestMesaArch(unittest.TestCase):
  def check_one_error(self, dev:str, *words:str, **env:str):
    ret = run("(Tensor.empty(4) + 1).realize()", dev, **env)
    self.assertEqual(ret.returncode, 1)
    self.assertEqual(ret.stderr.count("Traceback"), 1, f"more than one error: {ret.stderr}")
    for w in words: self.assertIn(w, ret.stderr.splitlines()[-1])

  def test_ir3_no_arch(self): self.check_one_error("NULL:IR3", "IR3", "a630")
  def test_ir3_other_adreno(self): self.check_one_error("NULL:IR3:a640", "a640", "a630")
  def test_ir3_a7xx(self): self.check_one_error("NULL:IR3:a730,IMAGE_PITCH_ALIGNMENT=64", "a730", "a630")
  def test_ir3_nonsense(self): self.check_one_error("NULL:IR3:nonsense", "nonsense", "a630")
  def test_nak_nonsense(self): self.check_one_error("NULL:NAK:nonsense", "nonsense", "sm_")
  def test_qcomcl_other_adreno(self): self.check_one_error("NULL:QCOMCL:a640", "a640", "a630")
  @unittest.skipIf(platform.machine() == "aarch64", "the compiler runs natively")
  def test_qcomcl_without_network(self):
    with tempfile.TemporaryDirectory() as tmp:
      self.check_one_error("NULL:QCOMCL:a630", "QCOMCL", "image", "IR3", XDG_CACHE_HOME=tmp, https_proxy="http://127.0.0.1:9", no_proxy="")

if __name__ == "__main__": unittest.main()
