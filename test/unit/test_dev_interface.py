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

  def test_interface_of_another_device(self):
    with Context(DEV="FOO+AMD"): self.assertEqual(Device["NPY"].device, "NPY")
  def test_deprecation_before_opening(self):
    for dev in ("CL", "DSP"):
      ret = subprocess.run([sys.executable, "-c", f"from tinygrad import Device\nDevice[{dev!r}]"], capture_output=True, text=True, timeout=60,
                           env={**os.environ, "DEV":"", f"{dev}_CC":"X"})
      self.assertIn(f"{dev}_CC=X is deprecated", ret.stderr)

if __name__ == "__main__": unittest.main()
