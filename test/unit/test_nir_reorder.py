import ctypes, re, tempfile, unittest
from tinygrad import dtypes
from tinygrad.codegen import to_program
from tinygrad.helpers import Target
from tinygrad.renderer.nir import IR3Renderer
from tinygrad.runtime.autogen import libc, mesa
from tinygrad.runtime.support.compiler_mesa import deserialize
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, UOp

class TestNIRReorder(unittest.TestCase):
  @classmethod
  def setUpClass(cls): cls.renderer = IR3Renderer(Target("NULL", "IR3", "a630"))
  @classmethod
  def tearDownClass(cls): del cls.renderer

  def loads(self, *effects:UOp) -> list[bool]:
    """For every load of the kernel from global memory, in order of the program: may Mesa reorder it?"""
    prg = to_program(UOp.sink(*effects, arg=KernelInfo(opts_to_apply=())), self.renderer)
    shader = deserialize(next(s.arg for s in prg.src if s.op is Ops.SOURCE), self.renderer.compiler.nir_options)
    with tempfile.TemporaryFile("w+") as f:
      mesa.nir_print_shader(shader, ctypes.cast(fp:=libc.fdopen(f.fileno(), b"w"), ctypes.POINTER(mesa.struct__IO_FILE)))
      libc.fflush(fp)
      f.seek(0)
      text = f.read()
    mesa.ralloc_free(shader)
    return ["reorderable" in access for access in re.findall(r"@load_global \(.*?\) \(access=([\w|-]+)", text)]

  def buf(self, slot:int, *shape:int, dtype=dtypes.float) -> UOp: return UOp.placeholder(shape, dtype, slot=slot)

  def test_read_only(self):
    out, a, b = (self.buf(i, 16) for i in range(3))
    i = UOp.range(16, 0)
    self.assertEqual(self.loads(out[i].set(a[i] + b[i]).end(i)), [True, True])

  def test_in_place(self):
    a, b = self.buf(0, 16), self.buf(1, 16)
    i = UOp.range(16, 0)
    self.assertEqual(sorted(self.loads(a[i].set(a[i] + b[i]).end(i))), [False, True])

  def test_load_after_store(self):
    c, a, b = self.buf(0, 4, 4), self.buf(1, 4, 4), self.buf(2, 4, 4)
    i, j, k = UOp.range(4, 0), UOp.range(4, 1), UOp.range(4, 2, axis_type=AxisType.REDUCE)
    c = c[i, j].set(0.0)
    c = c[i, j].set(c.after(k)[i, j] + a[i, k] * b[k, j], end=k)
    self.assertEqual(sorted(self.loads(c.end(i, j))), [False, True, True])

  # bool is stored as a uint8 and a store of one buffer says nothing about another
  def test_two_outputs(self):
    m, c, a = self.buf(0, 16, dtype=dtypes.bool), self.buf(1, 16), self.buf(2, 16)
    i = UOp.range(16, 0)
    self.assertEqual(sorted(self.loads(m[i].set(m[i] & (a[i] < 1)).end(i), c[i].set(a[i]).end(i))), [False, True])

  def test_gated(self):
    a, b = self.buf(0, 16), self.buf(1, 16)
    i = UOp.range(16, 0)
    gated = (i < 7).where(a[i.valid(i < 7)], 0.0) + (i < 5).where(b[i.valid(i < 5)], 0.0)
    self.assertEqual(sorted(self.loads(a[i].set(gated).end(i))), [False, True])

if __name__ == "__main__": unittest.main()
