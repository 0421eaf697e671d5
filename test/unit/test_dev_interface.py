import os, subprocess, sys, unittest
from tinygrad.device import Device
from tinygrad.helpers import Context

class TestDevInterface(unittest.TestCase):
  def check_refused(self, dev:str, target:str, way_out:str):
    with Context(DEV=target), self.assertRaisesRegex(RuntimeError, f"{dev.split(':')[0]} has no interface 'FOO'.*use DEV={way_out}$"): Device[dev]

  def test_dsp(self): self.check_refused("DSP", "FOO+DSP", "DSP")
  def test_keeps_renderer_and_arch(self): self.check_refused("CL:1", "FOO:0+CL:OPENCL:x", "CL:OPENCL:x")
  def test_second_target(self): self.check_refused("CL", "CPU;FOO+CL", "CL")
  def test_default_device(self):
    ret = subprocess.run([sys.executable, "-c", "from tinygrad import Tensor\nprint((Tensor.ones(4).contiguous()+1).tolist())"], capture_output=True,
                         text=True, timeout=60, env={**os.environ, "DEV":"FOO+CPU"})
    self.assertIn("CPU has no interface 'FOO'", ret.stderr, ret.stdout)

  def test_what_there_is_instead(self):
    for dev, words in (("zz+AMD", "AMD has no interface 'zz', there are KFD, "), ("KFX+AMD", "AMD has no interface 'KFX', did you mean: 'KFD'"),
                       ("CPU:FOO", "CPU has no renderer 'FOO', there are CLANG, LLVM")):
      ret = subprocess.run([sys.executable, "-c", "from tinygrad import Device\nDevice[Device.DEFAULT].renderer"], capture_output=True, text=True,
                           timeout=60, env={**os.environ, "DEV":dev})
      self.assertIn(words, ret.stderr)

  def test_interface_of_another_device(self):
    with Context(DEV="FOO+AMD"): self.assertEqual(Device["NPY"].device, "NPY")
  def test_interface_as_device(self):
    for dev in ("MSM", "CPU;KGSL", "NOPE:1"):
      with Context(DEV=dev), self.assertRaisesRegex(RuntimeError, f"no device '{(name:=dev.split(';')[-1].split(':')[0])}', there are .*CPU.*QCOM"):
        Device[name]
  def test_deprecation_before_opening(self):
    for dev, var, hint in (("CL", "CL_CC", "CL_CC=X is deprecated"), ("DSP", "DSP_CC", "DSP_CC=X is deprecated"),
                           ("QCOM", "QCOM_IR3", "QCOM_IR3=1 is deprecated, use DEV=QCOM:IR3"), ("AMD", "AMD_LLVM", "use DEV=AMD:LLVM")):
      ret = subprocess.run([sys.executable, "-c", f"from tinygrad import Device\nDevice[{dev!r}]"], capture_output=True, text=True, timeout=60,
                           env={**os.environ, "DEV":"", var:"X" if var.endswith("_CC") else "1"})
      self.assertIn(hint, ret.stderr)

if __name__ == "__main__": unittest.main()
