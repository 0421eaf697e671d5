"""Images end to end: tinygrad with IMAGE=1 on both kernels' virtual GPU, half and full texels, against numpy.

A run without image instructions fails."""
from __future__ import annotations
import numpy as np
import pytest
from test.qcom_open import virtual
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import Context

rng = np.random.default_rng(23)
def f32(*shape: int) -> np.ndarray: return rng.standard_normal(shape).astype(np.float32)

def name(p: tuple[str, int]) -> str: return f"{p[0]}-{'half' if p[1] else 'float'}"
ALL = pytest.mark.parametrize("half", [(k, h) for k in ("MSM", "KGSL") for h in (0, 1)], ids=name, indirect=True)

@pytest.fixture(params=[("MSM", 0), ("KGSL", 1)], ids=name)
def half(request):
  """A device with IMAGE=1; afterwards images must have been read and written."""
  kind, half = request.param
  with Context(IMAGE=1, FLOAT16=half), virtual(kind) as (machine, dev):     # the device asks for IMAGE when it opens
    counts = machine.gpu.instructions
    before = {n: counts().get(n, (0, 0))[1] for n in ("isam", "stib.b")}
    yield half
    assert all(counts().get(n, (0, 0))[1] > before[n] for n in before), "no image instruction ran"
    assert not machine.gpu.reports, "\n".join(map(str, machine.gpu.reports))

def close(got: np.ndarray, want: np.ndarray, half: int, scale: float = 1.0) -> None:
  np.testing.assert_allclose(got, want, rtol=2e-2 if half else 1e-4, atol=(4e-2 if half else 1e-4) * scale)

def conv(x: np.ndarray, w: np.ndarray, pad: int, stride: int = 1) -> np.ndarray:
  p = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
  return np.einsum("ncijkl,ockl->noij", np.lib.stride_tricks.sliding_window_view(p, w.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride], w)

@pytest.mark.parametrize("c,size,o,k,pad,stride", ((16, 16, 16, 3, 1, 1), (12, 11, 20, 3, 1, 2), (4, 13, 8, 1, 0, 1)))
def test_convolutions(half, c, size, o, k, pad, stride):
  x, w, b = f32(1, c, size, size), f32(o, c, k, k), f32(o)
  t = Tensor(x).realize().conv2d(Tensor(w).realize(), Tensor(b).realize(), padding=pad, stride=stride).relu()
  close(t.numpy(), np.maximum(conv(x, w, pad, stride) + b[None, :, None, None], 0), half, np.sqrt(c * k * k))

@ALL
@pytest.mark.parametrize("m,k,n", ((8, 64, 32), (17, 36, 60)))
def test_matrix_products(half, m, k, n):
  a, b = f32(m, k), f32(k, n)
  close((Tensor(a).realize() @ Tensor(b).realize()).numpy(), a @ b, half, np.sqrt(k))

@ALL
def test_several_images_in_another_order_than_the_arguments(half):
  """Five inputs of different sizes of one kernel, each with a weight of its own, made and used in different orders (a shared variable in a loop
  over images gave all of them the last one's descriptor: tinygrad PR 14920)."""
  arrays = [f32(64, 64) for _ in range(5)]
  ts = [Tensor(a).realize() for a in arrays]
  for order in ((4, 2, 0, 3, 1), (3, 4, 1, 0, 2)):
    got = sum((ts[n] * float(k + 1) for k, n in enumerate(order)), start=ts[order[0]] @ ts[order[1]])
    want = arrays[order[0]] @ arrays[order[1]] + sum(arrays[n] * (k + 1) for k, n in enumerate(order))
    close(got.numpy(), want, half, 8)

def test_a_replayed_network_of_images(half):
  w1, w2 = f32(8, 4, 3, 3), f32(8, 8, 3, 3)
  t1, t2 = Tensor(w1).realize(), Tensor(w2).realize()
  @TinyJit
  def net(x): return (x.conv2d(t1, padding=1).relu().conv2d(t2, padding=1) + 1).realize()
  for _ in range(4):
    x = f32(1, 4, 12, 12)
    close(net(Tensor(x).realize()).numpy(), conv(np.maximum(conv(x, w1, 1), 0), w2, 1) + 1, half, 12)

def test_a_camera_frame(half):
  """1440 x 960 bytes and floats, the sizes of the report on wide image inputs (tinygrad issues 7606, 6958)."""
  frame, gain = rng.integers(0, 256, (1, 1, 960, 1440), dtype=np.uint8), f32(4, 1, 4, 4)
  x = Tensor(frame).realize().cast(dtypes.float) / 255
  got = x.conv2d(Tensor(gain).realize(), stride=4).numpy()
  close(got, conv(frame.astype(np.float32) / 255, gain, 0, 4), half, 4)
  wide = f32(960, 1440)
  close((Tensor(wide).realize() * 2 + Tensor(wide[:, ::-1].copy()).realize()).numpy(), wide * 2 + wide[:, ::-1], half)
  small = f32(1440, 8)
  close((Tensor(wide).realize() @ Tensor(small).realize()).numpy(), wide @ small, half, 40)

def test_whatever_size_images_or_buffers_give_the_same(half):
  """Widths that are no multiple of 4 texels, single rows, more rows than columns: whether tinygrad makes an image of it or not."""
  for shape in ((5, 7), (1, 64), (64, 1), (3, 68), (66, 4), (33, 100)):
    a, b = f32(*shape), f32(*shape)
    close(((Tensor(a).realize() + 1) * Tensor(b).realize()).numpy(), (a + 1) * b, half)
    close((Tensor(a).realize() * 3).sum(-1).numpy(), (a * 3).sum(-1), half, 10)
