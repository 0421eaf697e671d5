"""Networks of the shapes that openpilot's and small language models have, on images and buffers, float32 and half, against tinygrad's CPU device."""
from __future__ import annotations
from collections.abc import Callable
import numpy as np
import pytest
from test.qcom_open import virtual
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import Context
from tinygrad.runtime.support.qcom_iface import QCOMError

rng = np.random.default_rng(28)
def random(*shape: int, scale: float = 1) -> np.ndarray: return (rng.standard_normal(shape) * scale).astype(np.float32)

def image_reads(machine) -> int: return sum(n for name, (_, n) in machine.gpu.engine.counts().items() if name.startswith("isam"))

def both_ways(kind: str, net: Callable[..., tuple[Tensor, ...]], *arrays: np.ndarray, half: int = 0) -> None:
  """IMAGE=0 and IMAGE=1 against the CPU, eager and replayed with other contents: within 2e-5 of an output's largest value, 1e-2 with half images."""
  sets = [arrays, tuple(np.ascontiguousarray(a[..., ::-1]) if i == 0 else a for i, a in enumerate(arrays))]
  with Context(DEV="CPU", IMAGE=0): want = [[t.numpy() for t in net(*(Tensor(a, device="CPU") for a in s))] for s in sets]
  for image in (0, 1):
    with Context(IMAGE=image, FLOAT16=half if image else 0), virtual(kind) as (machine, _):
      limit, jit = 1e-2 if half and image else 2e-5, TinyJit(lambda *x: tuple(t.contiguous() for t in net(*x)))
      for n in (0, 1, 0, 1):
        for got, w in zip(jit(*(Tensor(a).realize() for a in sets[n])), want[n], strict=True):
          np.testing.assert_allclose(got.numpy().astype(np.float64), w, 0, limit * max(1, np.abs(w).max()), err_msg=f"IMAGE={image}, run {n}")
      assert not machine.gpu.reports, machine.gpu.reports[0]
      assert (image_reads(machine) > 0) == bool(image), "images are used where they are asked for"

@pytest.mark.parametrize("width,channels,half", [(5, 3, 1), (17, 8, 0)])
def test_convolutions_of_any_width(width, channels, half):
  w1, w2 = random(12, channels, 3, 3, scale=.2), random(7, 12, 3, 3, scale=.1)
  def net(x: Tensor) -> tuple[Tensor, ...]:
    def w(a: np.ndarray) -> Tensor: return Tensor(a, device=x.device)
    return x.conv2d(w(w1), padding=1).relu().conv2d(w(w2), stride=2, padding=1).elu(),
  both_ways("MSM", net, random(1, channels, 9, width), half=half)

def test_several_small_heads():
  """openpilot's heads: 1 to a few values each, concatenated with a slice of the trunk."""
  trunk, heads = random(96, 64, scale=.1), [random(64, n, scale=.1) for n in (1, 2, 3, 5, 8, 33)]
  def net(x: Tensor) -> tuple[Tensor, ...]:
    f = (x @ Tensor(trunk, device=x.device)).relu()
    outs = [f @ Tensor(h, device=x.device) for h in heads]
    return Tensor.cat(*outs, f[:, :3], dim=1), outs[0]
  both_ways("KGSL", net, random(1, 96))

def test_several_images_in_one_kernel():
  """Report R27: one variable for all images of a kernel."""
  ws = [random(8, 8, 1, 1, scale=.3) for _ in range(4)]
  def net(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, b, c, d = ((x if i % 2 else y).conv2d(Tensor(w, device=x.device)).contiguous() for i, w in enumerate(ws))
    return (a * b - c * 2 + d).relu().conv2d(Tensor(ws[0], device=x.device)) + x, a - d
  both_ways("MSM", net, random(1, 8, 6, 20), random(1, 8, 6, 20))

def test_a_monitoring_camera():
  """Report R28: uint8 frames of 1440x960 as inputs, network outputs all zero."""
  w1, w2 = random(8, 1, 8, 8, scale=.05), random(8, 8, 5, 5, scale=.05)
  def net(x: Tensor) -> tuple[Tensor, ...]:
    f = ((x.cast(dtypes.float32) - 128) / 64).reshape(1, 1, 960, 1440).conv2d(Tensor(w1, device=x.device), stride=8).relu()
    return f.conv2d(Tensor(w2, device=x.device), stride=5).relu().mean((2, 3)), f[:, :, ::7, ::11]
  both_ways("MSM", net, rng.integers(0, 256, 1440 * 960).astype(np.uint8))

def test_inputs_that_start_anywhere_in_a_buffer():
  """An image's descriptor has no room for the lower bits of an address: such a view is refused in words, and its copy works."""
  w = random(8, 8, 1, 1, scale=.3)
  big, n = random(8 * 4 * 16 + 32), 8 * 4 * 16
  with Context(IMAGE=1), virtual("MSM") as (machine, _):
    base, weight = Tensor(big).realize(), Tensor(w).realize()
    def net(x: Tensor) -> Tensor: return x.reshape(1, 8, 4, 16).conv2d(weight).realize()
    for offset in (16, 1):
      want = np.einsum("oc,chw->ohw", w[:, :, 0, 0].astype(np.float64), big[offset:offset + n].reshape(8, 4, 16))
      view = base[offset:offset + n].contiguous().realize()
      if offset % 16:
        with pytest.raises(QCOMError, match="multiple of 64 bytes.*clone"): net(view).numpy()
        with Context(IMAGE=0): view = view.clone().realize()
      jit = TinyJit(net)
      for _ in range(3): np.testing.assert_allclose(jit(view).numpy()[0], want, 0, 1e-5)
    assert not machine.gpu.reports, machine.gpu.reports[0]

@pytest.mark.parametrize("n,k,half", [(1, 4096, False), (3, 1000, True), (16, 512, True)])
def test_a_language_model_s_decode(n, k, half):
  """A matrix times few columns."""
  w, x, kind = random(24, k, scale=k ** -.5), random(k, n), dtypes.half if half else dtypes.float32
  w16, x16 = (a.astype(np.float16) if half else a for a in (w, x))
  want = w16.astype(np.float64) @ x16.astype(np.float64)
  for image in (0, 1):
    with Context(IMAGE=image), virtual("KGSL" if image else "MSM"):
      got = (Tensor(w16) @ Tensor(x16)).cast(dtypes.float32).numpy()
      assert Tensor(w16).dtype == kind
      np.testing.assert_allclose(got, want, 0, 4e-3 if half else 1e-5, err_msg=f"IMAGE={image}")
