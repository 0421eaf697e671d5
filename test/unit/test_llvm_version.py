import os, subprocess, sys, tempfile, unittest

class TestLLVMVersion(unittest.TestCase):
  def run_with(self, path:str) -> str:
    env = {**os.environ, "DEV": "CPU:LLVM", "LLVM_PATH": path, "PARALLEL": "0", "CCACHE": "0"}
    done = subprocess.run([sys.executable, "-c", "from tinygrad import Tensor\nprint((Tensor([1, 2, 3]) + 1).tolist())"], env=env,
                          capture_output=True, text=True)
    return done.stdout + done.stderr

  def test_too_old(self):
    # a library with the functions of LLVM 15 that are called first, and none that is newer
    with tempfile.TemporaryDirectory() as tmp:
      parts = ("Target", "TargetInfo", "TargetMC", "AsmParser", "AsmPrinter")
      names = [f"LLVMInitialize{arch}{part}" for arch in ("X86", "AArch64") for part in parts]
      names += ["LLVMGetHostCPUName", "LLVMGetHostCPUFeatures"]
      with open(f"{tmp}/old.c", "w") as f: f.write("".join(f'const char *{n}(void) {{ return ""; }}\n' for n in names))
      path = f"{tmp}/libLLVM-15.so"
      try: subprocess.run([sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-nostdlib", "-o", path, f"{tmp}/old.c"], check=True,
                          capture_output=True)
      except subprocess.CalledProcessError as e: self.skipTest(f"needs a C compiler that links (pip install ziglang): {e.stderr[-200:]!r}")
      self.assertRegex(self.run_with(path), f"LLVM 16 or newer is needed, {path} is older")

  def test_of_the_system(self):
    out = self.run_with(os.environ.get("LLVM_PATH", ""))
    if "LLVM 16 or newer" in out or "failed to load" in out: self.skipTest(out.splitlines()[-1])
    self.assertIn("[2, 3, 4]", out)

if __name__ == "__main__": unittest.main()
