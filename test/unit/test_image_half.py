import json, os, subprocess, sys, unittest

CHILD = r"""
import json, re, sys
from tinygrad import Tensor, dtypes
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops
def half(*s): return Tensor.empty(*s, dtype=dtypes.half)
found = {}
for expr in sys.argv[1:]:
  realize.to_program_cache.clear()
  try: eval(expr).realize()
  except Exception as e: found[expr] = f"{type(e).__name__}: {e}"
  else:
    sources = [str(u.arg) for p in realize.to_program_cache.values() for u in p.src if u.op is Ops.SOURCE]
    found[expr] = [sum("read_imagef" in s for s in sources),
                   sum("read_imagef" in s and re.search(r"__global (half|ushort)\*(?! data0)", s) is not None for s in sources)]
print(json.dumps(found))
"""
MIXED = ("half(1, 64) @ half(64, 32)", "half(3, 20) @ half(20, 7)", "half(64, 64) * half(3)[:1]")
IMAGES = ("half(1, 16, 16, 16).conv2d(half(32, 16, 3, 3), padding=1)", "Tensor.empty(1, 64) @ Tensor.empty(64, 32)")

class TestImageHalf(unittest.TestCase):
  """Kernels that read halves from images, and from images and buffers at once: their sizes decide which can be an image."""
  def compiled(self, renderer:str, **env) -> dict:
    child = subprocess.run([sys.executable, "-c", CHILD, *MIXED, *IMAGES], capture_output=True, text=True, timeout=300,
                           env={**os.environ, "DEV": f"NULL:{renderer},IMAGE_PITCH_ALIGNMENT=64", "IMAGE": "1", "FLOAT16": "0",
                                "PARALLEL": "0", **env})
    self.assertEqual(child.returncode, 0, child.stderr[-500:])
    found = json.loads(child.stdout)
    self.assertEqual({k: v for k, v in found.items() if isinstance(v, str)}, {}, "does not compile")
    return found

  def test_opencl(self):
    for expr, (images, mixed) in self.compiled("OPENCL:adreno").items():
      self.assertGreater(images, 0, expr)
      if expr in MIXED: self.assertGreater(mixed, 0, expr)
  def test_opencl_half_images(self):
    for expr, (images, _) in self.compiled("OPENCL:adreno", FLOAT16="1").items(): self.assertGreater(images, 0, expr)
  def test_ir3(self): self.compiled("IR3:a630")

if __name__ == "__main__": unittest.main()
