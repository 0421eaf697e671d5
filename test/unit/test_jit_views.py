import itertools, pickle, unittest
import numpy as np
from tinygrad import Device, Tensor, TinyJit, Variable, dtypes
from tinygrad.engine.jit import JitError

N = 64
def fresh(k:int) -> Tensor: return Tensor((np.arange(N) + 1000*k).astype(np.float32)).realize()
# offsets are multiples of 8 elements: where a view starts must not matter to the compiler here
VIEWS = {
  "whole": lambda t: t, "slice": lambda t: t[8:24], "contiguous": lambda t: t[8:24].contiguous(),
  "realized": lambda t: t[8:24].contiguous().realize(),
  "at zero": lambda t: t[:16].contiguous().realize(), "rows": lambda t: t.reshape(8, 8)[2:4].contiguous().realize().reshape(16),
  "view of view": lambda t: t[8:40].contiguous().realize()[8:24].contiguous().realize(),
  "lazy view of view": lambda t: t[8:40].contiguous().realize()[8:24],
  "expanded": lambda t: t[8:9].expand(16), "padded": lambda t: t[8:18].pad(((2, 4),)), "strided": lambda t: t[::4],
  "flipped": lambda t: t[8:24].flip(0),
  "transposed": lambda t: t[:16].reshape(4, 4).T.contiguous().realize().reshape(16), "bitcast": lambda t: t[8:24].bitcast(dtypes.int32),
  "realized bitcast": lambda t: t[8:24].contiguous().realize().bitcast(dtypes.int32).contiguous().realize(),
}

class TestJitViews(unittest.TestCase):
  def check(self, fxn, numpy_fxn, *calls:tuple[Tensor, ...]):
    jit = TinyJit(fxn)
    for i, args in enumerate(calls):
      want = numpy_fxn(*[x.numpy() for x in args])
      np.testing.assert_array_equal(jit(*args).numpy(), want, err_msg=f"call {i}")
    self.assertIsNotNone(jit.captured)

  def test_alternating_storage(self):
    for name, view in VIEWS.items():
      with self.subTest(name):
        x, y, z = [(view(fresh(k)),) for k in range(3)]
        self.check(lambda a: (a*2 + 1).realize(), lambda a: a*2 + 1, x, y, x, y, z, x)

  def test_fresh_storage(self):
    for name, view in VIEWS.items():
      with self.subTest(name): self.check(lambda a: ((a + 1).realize()*2).realize(), lambda a: (a + 1)*2, *[(view(fresh(k)),) for k in range(5)])

  def test_two_views(self):
    # of one base and of two
    some = [(n, VIEWS[n]) for n in ("slice", "realized", "at zero", "view of view", "padded", "flipped")]
    for (n1, v1), (n2, v2) in itertools.combinations(some, 2):
      for bases in (1, 2):
        with self.subTest(f"{n1}, {n2}, bases {bases}"):
          self.check(lambda a, b: (a*2 + b).realize(), lambda a, b: a*2 + b,
                     *[(v1(base:=fresh(k)), v2(base if bases == 1 else fresh(k + 10))) for k in range(5)])

  def test_view_next_to_its_base(self):
    for name in ("slice", "realized", "view of view", "realized bitcast"):
      with self.subTest(name):
        self.check(lambda a, b: (a[:16] + b.cast(dtypes.float32)*0 + b.bitcast(dtypes.float32)).realize(), lambda a, b: a[:16] + b.view(np.float32),
                   *[(base:=fresh(k), VIEWS[name](base)) for k in range(1, 6)])

  def test_views_in_containers(self):
    self.check(lambda a, b: (a + b).realize(), lambda a, b: a + b, *[(VIEWS["realized"](fresh(k)), VIEWS["slice"](fresh(k + 1))) for k in range(5)])
    jit = TinyJit(lambda a, rest: (a + rest[0] + rest[1]).realize())
    for k in range(5):
      rest = [VIEWS["realized"](base:=fresh(k)), VIEWS["at zero"](base)]
      np.testing.assert_array_equal(jit(x:=fresh(k)[:16], rest).numpy(), x.numpy() + rest[0].numpy() + rest[1].numpy())

  def test_several_kernels_and_feedback(self):
    jit = TinyJit(lambda x: x[1:].cat(x[:1]).realize())
    x, want = VIEWS["realized"](fresh(0)), np.arange(8, 24, dtype=np.float32)
    for i in range(6):
      with self.subTest(i):
        # the first call is the only one with a view
        try: x = jit(x)
        except JitError as e: self.assertIn("use .clone()", str(e)); break
        np.testing.assert_array_equal(x.numpy(), want:=np.roll(want, -1))

  def test_symbolic_view_next_to_a_realized_one(self):
    v, jit = Variable("n", 1, 16), TinyJit(lambda a, b: (a.sum() + b.sum()).realize())
    for k in range(1, 6):
      a, b = fresh(k), fresh(k + 1)
      want = a.numpy()[:k].sum() + b.numpy()[8:24].sum()
      self.assertEqual(jit(a[:v.bind(k)], VIEWS["realized"](b)).item(), want)

  def test_pickled(self):
    jit = TinyJit(lambda a: (a*2).realize())
    for k in range(3): jit(VIEWS["realized"](fresh(k)))
    again = pickle.loads(pickle.dumps(jit))
    np.testing.assert_array_equal(again(x:=VIEWS["realized"](fresh(9))).numpy(), x.numpy()*2)

  # *** what can't be replayed says so ***

  def check_refused(self, captured, called, *words:str):
    jit = TinyJit(lambda *a: (sum(a[1:], a[0]) + 1).realize())
    for k in range(2): jit(*captured(k))
    with self.assertRaises(JitError) as e: jit(*called(2))
    for w in words: self.assertIn(w, str(e.exception))
    self.assertEqual(".clone()" in str(e.exception), ".clone()" in words, "a copy is advised where it helps, and nowhere else")
    np.testing.assert_array_equal(jit(*(args:=captured(3))).numpy(), sum(a.numpy() for a in args) + 1)

  def test_base_of_another_size(self):
    mk = lambda n: lambda k: (Tensor(np.full(n, k, np.float32)).realize(),)
    self.check_refused(mk(4), mk(8), "input 0", "(4,)", "(8,)", "for each shape")
    self.check_refused(mk(4), mk(2), "input 0", "(4,)", "(2,)", "for each shape")
    self.check_refused(lambda k: (fresh(k)[8:24],), lambda k: (Tensor(np.zeros(2*N, np.float32)).realize()[8:24],),
                       "(64 elements)", "(128 elements)", ".clone()")
  def test_another_offset(self):
    self.check_refused(lambda k: (fresh(k)[8:24],), lambda k: (fresh(k)[16:32],), "the views differ", ".clone()")
    self.check_refused(lambda k: (fresh(k)[8:24].contiguous().realize(),), lambda k: (fresh(k)[16:32].contiguous().realize(),),
                       "the views differ", ".clone()")
  def test_view_instead_of_a_buffer(self):
    self.check_refused(lambda k: (Tensor(np.full(16, k, np.float32)).realize(),), lambda k: (VIEWS["realized"](fresh(k)),),
                       "as a view of", ".clone()")
  def test_other_sharing(self):
    self.check_refused(lambda k: ((b:=fresh(k))[:16], b[16:32]), lambda k: (fresh(k)[:16], fresh(k)[16:32]),
                       "input 1", "buffer 0", "buffer 1", ".clone()")
  def test_another_dtype(self):
    self.check_refused(lambda k: (fresh(k),), lambda k: (fresh(k).int().realize(),), "dtypes.float", "dtypes.int", "use .cast(dtypes.float)")
  def test_another_device(self):
    self.check_refused(lambda k: (fresh(k),), lambda k: (fresh(k).to("PYTHON").realize(),), "on PYTHON", f"use .to({Device.DEFAULT!r})")
  def test_empty_at_capture(self):
    jit = TinyJit(lambda x: (x + 1).realize())
    for _ in range(2): jit(Tensor.empty(16))
    with self.assertRaisesRegex(JitError, "never written.*write it before it is captured$"): jit(fresh(0)[:16].clone().realize())
  def test_empty_at_replay(self):
    jit = TinyJit(lambda x: (x + 1).realize())
    for k in range(2): jit(Tensor(np.full(16, k, np.float32)).realize())
    with self.assertRaisesRegex(JitError, "never written.*write it before the call$"): jit(Tensor.empty(16))
  def test_other_arguments(self):
    """Each that is missing, no Tensor or too many is named."""
    jit = TinyJit(lambda x, y=None, **_: (x if y is None else x + y).realize())
    for k in range(2): jit(x=fresh(k), y=fresh(k + 1))
    for args, kwargs, words in (((), {"x": fresh(0)}, ["input y is missing"]), ((), {}, ["input x is missing", "input y is missing"]),
                                ((fresh(0),), {"y": fresh(1)}, ["input x is missing, pass it by the same name or position", "input 0 was no Tensor"]),
                                ((), {"x": fresh(0), "y": np.zeros(N, np.float32)}, ["input y is of <class 'numpy.ndarray'>, wrap it in a Tensor"]),
                                ((), {"x": fresh(0), "y": fresh(1), "z": fresh(2)}, ["input z was no Tensor when it was captured, leave it out"])):
      with self.assertRaises(JitError) as e: jit(*args, **kwargs)
      for w in (*words, "captured with Tensors x, y"): self.assertIn(w, str(e.exception))
    np.testing.assert_array_equal(jit(x=(x:=fresh(5)), y=fresh(0)).numpy(), x.numpy() + fresh(0).numpy())
  def test_same_tensor_twice(self):
    with self.assertRaisesRegex(JitError, "use .clone"): TinyJit(lambda a, b: (a + b).realize())(x:=fresh(0), x)

if __name__ == "__main__": unittest.main()
