import unittest
import numpy as np
from tinygrad import Device, Tensor, Variable, dtypes
from tinygrad.helpers import Context

class TestImageDot(unittest.TestCase):
  """IMAGE=1 computes matmul with the packed 1x1 convolution of the image path, on every device."""
  def check(self, *shapes:tuple[tuple[int, ...], tuple[int, ...]], **context):
    rng = np.random.default_rng(0)
    for a, b in shapes:
      with self.subTest(f"{a} @ {b}"), Context(IMAGE=1, **context):
        x, y = [rng.standard_normal(s, dtype=np.float32) for s in (a, b)]
        got = (Tensor(x) @ Tensor(y)).numpy()
        self.assertEqual(got.shape, (want:=x @ y).shape)
        tol = 2e-2 if context else 1e-5
        np.testing.assert_allclose(got, want, rtol=tol, atol=tol)

  def test_broadcast_of_the_left(self):
    self.check(((1, 3, 4), (2, 4, 5)), ((3, 4), (2, 4, 5)), ((2, 1, 3, 4), (1, 5, 4, 2)), ((2, 1, 3, 4), (5, 4, 2)))
  def test_broadcast_of_the_right(self): self.check(((2, 5, 3, 4), (2, 1, 4, 2)), ((2, 3, 8, 8), (2, 1, 8, 4)), ((3, 2, 2, 3, 4), (3, 1, 1, 4, 2)))
  def test_broadcast_of_both(self): self.check(((5, 3, 4), (2, 5, 4, 2)), ((2, 1, 4, 3, 4), (1, 3, 1, 4, 6)), ((1, 1, 3), (4, 3, 3)))
  def test_no_broadcast(self):
    self.check(((2, 3), (3, 4)), ((2, 3, 4), (2, 4, 5)), ((2, 5, 3, 4), (5, 4, 2)), ((2, 3, 4), (4, 5)), ((7, 2, 3, 4), (1, 1, 4, 2)),
               ((1, 1), (1, 1)))
  def test_vectors(self): self.check(((3,), (3,)), ((2, 4), (4,)), ((2, 3, 4), (4,)), ((4,), (4, 5)), ((4,), (2, 4, 5)), ((1, 1, 4), (2, 4, 5)))
  def test_nothing_in_it(self): self.check(((0, 3, 4), (4, 5)), ((2, 0, 4), (4, 5)), ((2, 3, 0), (0, 5)))
  def test_half_images(self): self.check(((3, 8), (2, 8, 5)), ((2, 5, 3, 4), (2, 1, 4, 2)), ((2, 4), (4,)), FLOAT16=1)

  def test_batches_that_do_not_broadcast(self):
    for a, b in (((2, 3, 4), (3, 4, 5)), ((2, 2, 3, 4), (3, 4, 5))):
      with self.subTest(f"{a} @ {b}"), Context(IMAGE=1), self.assertRaisesRegex(IndexError, "broadcast"): Tensor.empty(*a) @ Tensor.empty(*b)

  def test_dtypes_images_do_not_hold(self):
    with Context(IMAGE=1):
      x = Tensor([[(1 << 24) + 1, 3], [1, 2]], dtype=dtypes.int32) @ Tensor([[1, 0], [0, 1]], dtype=dtypes.int32)
      self.assertEqual((x.dtype, x.tolist()), (dtypes.int32, [[(1 << 24) + 1, 3], [1, 2]]))
      b = Tensor([[True, False], [True, True]]) @ Tensor([[True, True], [False, True]])
      self.assertEqual((b.dtype, b.tolist()), (dtypes.bool, [[True, True], [True, True]]))
      if dtypes.float64 not in Device.default.renderer.supported_dtypes(): return
      d = Tensor([[1 + 2**-40]], dtype=dtypes.float64) @ Tensor([[1.0]], dtype=dtypes.float64)
      self.assertEqual((d.dtype, d.item()), (dtypes.float64, 1 + 2**-40))

  def test_symbolic(self):
    x, y = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32), np.eye(4, dtype=np.float32)
    with Context(IMAGE=1): got = (Tensor(x).realize()[:Variable("n", 1, 8).bind(3)] @ Tensor(y)).sum().item()
    self.assertAlmostEqual(got, x[:3].sum(), places=4)

  def test_conv_of_other_ranks(self):
    rng = np.random.default_rng(0)
    for n in (1, 3):
      x, w = Tensor(rng.standard_normal((2, 3) + (6,)*n, dtype=np.float32)), Tensor(rng.standard_normal((4, 3) + (3,)*n, dtype=np.float32))
      with Context(IMAGE=0): want = x.conv2d(w, padding=1).numpy()
      with Context(IMAGE=1), self.subTest(f"{n}D"): np.testing.assert_allclose(x.conv2d(w, padding=1).numpy(), want, rtol=1e-5, atol=1e-5)
  def test_conv_of_other_channels(self):
    with Context(IMAGE=1), self.assertRaisesRegex(AssertionError, "does not match the shape of the weights"):
      Tensor.empty(1, 4, 8, 8).conv2d(Tensor.empty(4, 3, 3, 3))

if __name__ == "__main__": unittest.main()
