"""Whole kernels: tinygrad programs compiled by Mesa's IR3 compiler and executed by the native engine, against numpy."""
import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context
from tinygrad.uop.ops import AxisType, KernelInfo, UOp
from test.virtual import ir3_core

rng = np.random.default_rng(11)
np_err = {"all": "ignore"}
INT = {"int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16, "int32": np.int32, "uint32": np.uint32, "int64": np.int64,
       "uint64": np.uint64}

@pytest.fixture
def dev(): return ir3_core.register()

def ints(dt, n=300, lo=None, hi=None):
  info = np.iinfo(dt)
  x = rng.integers(max(info.min, lo if lo is not None else info.min), min(info.max, hi if hi is not None else info.max), n, dtype=dt, endpoint=True)
  x[:4] = (info.min, info.max, 0, 1) if lo is None else x[:4]
  return x

@pytest.mark.parametrize("name", INT)
def test_integer_arithmetic(dev, name):
  dt = INT[name]
  a, b = ints(dt), ints(dt)
  nz = np.where(b == 0, 3, b).astype(dt)
  nz = np.where((nz == -1) & (a == np.iinfo(dt).min), 5, nz).astype(dt) if np.iinfo(dt).min < 0 else nz
  ta, tb, tn = Tensor(a, device=dev), Tensor(b, device=dev), Tensor(nz, device=dev)
  with np.errstate(**np_err):
    for got, want in ((ta + tb, a + b), (ta - tb, a - b), (ta * tb, a * b), (ta // tn, a // nz), (ta % tn, a % nz), (ta // 7, a // 7),
                      (ta & tb, a & b), (ta | tb, a | b),
                      (ta ^ tb, a ^ b), (ta.maximum(tb), np.maximum(a, b)), (ta.minimum(tb), np.minimum(a, b)), (ta < tb, a < b), (ta == tb, a == b),
                      (ta != tb, a != b), ((ta > 3).where(ta, tb), np.where(a > 3, a, b)), (ta.sum(), a.sum(dtype=got_type(dt))), (ta.max(), a.max()),
                      (ta.min(), a.min()),
                      (ta.argmax(), a.argmax()), (ta.cumsum(), a.cumsum(dtype=got_type(dt)))):
      np.testing.assert_array_equal(got.numpy(), want)

def got_type(dt):
  """Accumulator type of tinygrad's sum."""
  return np.dtype(dt) if np.dtype(dt).itemsize >= 4 else np.uint32 if np.dtype(dt).kind == "u" else np.int32

@pytest.mark.parametrize("name", ("int32", "uint32", "int64", "uint64", "uint8"))
def test_shifts_by_constants(dev, name):
  a = ints(INT[name], lo=0)
  t = Tensor(a, device=dev)
  with np.errstate(**np_err):
    for k in (1, 3, 7):
      np.testing.assert_array_equal((t << k).numpy(), a << k)
      np.testing.assert_array_equal((t >> k).numpy(), a >> k)

@pytest.mark.parametrize("src", [*INT, "bool", "float32", "float16"])
def test_casts(dev, src):
  a = rng.integers(0, 2, 128).astype(bool) if src == "bool" else (rng.standard_normal(128) * 50).astype(src) if src[0] == "f" else ints(INT[src], 128)
  t = Tensor(a, device=dev)
  for dst in (*INT, "bool", "float32", "float16"):
    small = np.abs(a) if src[0] == "f" and dst[0] == "u" else a   # a negative float to unsigned is undefined
    with np.errstate(**np_err): want = small.astype(dst)
    if dst == "float16" and src[0] != "f": want = np.where(np.abs(small.astype(np.float64)) < 65504, want, np.float16(0)).astype(np.float16)
    if src[0] == "f" and dst in ("int8", "uint8"): small, want = np.abs(small) % 100, (np.abs(small) % 100).astype(dst)
    got = (Tensor(small, device=dev) if small is not a else t).cast(getattr(dtypes, dst)).numpy()
    if dst == "float16" and src[0] != "f": got = np.where(np.abs(small.astype(np.float64)) < 65504, got, np.float16(0)).astype(np.float16)
    np.testing.assert_array_equal(got, want, err_msg=f"{src} -> {dst}")

@pytest.mark.parametrize("dt,tol", ((np.float32, 2e-6), (np.float16, 2e-3)), ids=("float32", "float16"))
def test_float_functions(dev, dt, tol):
  a, b = rng.standard_normal(400).astype(dt), rng.standard_normal(400).astype(dt)
  ta, tb = Tensor(a, device=dev), Tensor(b, device=dev)
  x, y = a.astype(np.float64), b.astype(np.float64)
  with np.errstate(**np_err):
    for got, want in ((ta + tb, x + y), (ta * tb, x * y), (ta / tb, x / y), (ta.exp(), np.exp(x)), (ta.abs().log(), np.log(np.abs(x))),
                      (ta.sin(), np.sin(x)), (ta.cos(), np.cos(x)),
                      (ta.abs().sqrt(), np.sqrt(np.abs(x))), (ta.abs().rsqrt(), 1 / np.sqrt(np.abs(x))), (ta.sigmoid(), 1 / (1 + np.exp(-x))),
                      (ta.tanh(), np.tanh(x)),
                      (ta.relu(), np.maximum(x, 0)), (ta.floor(), np.floor(x)), (ta.ceil(), np.ceil(x)), (ta.trunc(), np.trunc(x)),
                      (ta.round(), np.rint(x)),
                      (ta.exp2(), np.exp2(x)), (ta.abs().log2(), np.log2(np.abs(x))), (ta.abs().pow(tb), np.abs(x) ** y),
                      (ta.maximum(tb), np.maximum(x, y)), (ta.sign(), np.sign(x))):
      np.testing.assert_allclose(got.numpy().astype(np.float64), want, rtol=tol * 20, atol=tol)

def test_float_special_values(dev):
  a = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 3.4e38, 2e-38, 65504], np.float32)
  b = np.resize(a[::-1], 100)[: len(a)].copy()
  ta, tb = Tensor(a, device=dev), Tensor(b, device=dev)
  with np.errstate(**np_err):
    for got, want in ((ta + tb, a + b), (ta * tb, a * b), (ta < tb, a < b), (ta == tb, a == b), (ta != tb, a != b), (ta.isnan(), np.isnan(a)),
                      (ta.exp2(), np.exp2(a)),
                      (ta.relu(), np.where(a > 0, a, 0)), ((ta > 0).where(ta, tb), np.where(a > 0, a, b))):
      np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)

@pytest.mark.parametrize("m,k,n", ((4, 4, 4), (64, 64, 64), (17, 33, 9), (128, 96, 160)))
@pytest.mark.parametrize("dt", (np.float32, np.float16), ids=("float32", "float16"))
def test_matmul(dev, m, k, n, dt):
  a, b = rng.standard_normal((m, k)).astype(dt), rng.standard_normal((k, n)).astype(dt)
  np.testing.assert_allclose((Tensor(a, device=dev) @ Tensor(b, device=dev)).numpy(), a.astype(np.float64) @ b.astype(np.float64), rtol=2e-2 if dt
                             == np.float16 else 1e-4,
                             atol=5e-2 if dt == np.float16 else 1e-4)

def test_integer_matmul_is_exact(dev):
  a, b = ints(np.int32, 40 * 24).reshape(40, 24), ints(np.int32, 24 * 16).reshape(24, 16)
  np.testing.assert_array_equal((Tensor(a, device=dev) @ Tensor(b, device=dev)).numpy(), a @ b)

@pytest.mark.parametrize("shape,axis", (((2000,), 0), ((64, 300), 1), ((300, 64), 0), ((4, 50, 60), (1, 2)), ((1 << 16,), 0)), ids=str)
def test_reductions_with_local_memory_and_barriers(dev, shape, axis):
  a = rng.integers(-9, 9, shape).astype(np.float32)
  t = Tensor(a, device=dev)
  np.testing.assert_array_equal(t.sum(axis).numpy(), a.sum(axis))
  np.testing.assert_array_equal(t.max(axis).numpy(), a.max(axis))
  np.testing.assert_allclose(t.mean(axis).numpy(), a.mean(axis), rtol=1e-5, atol=1e-6)

def test_softmax_layernorm_attention(dev):
  q, k, v = (rng.standard_normal((2, 4, 16, 8)).astype(np.float32) for _ in range(3))
  def softmax(x): return (e := np.exp(x - x.max(-1, keepdims=True))) / e.sum(-1, keepdims=True)
  np.testing.assert_allclose(Tensor(q, device=dev).softmax().numpy(), softmax(q), rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(Tensor(q, device=dev).layernorm().numpy(), (q - q.mean(-1, keepdims=True)) / np.sqrt(q.var(-1, keepdims=True) + 1e-5),
                             rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(Tensor(q, device=dev).scaled_dot_product_attention(Tensor(k, device=dev), Tensor(v, device=dev)).numpy(),
                             softmax(q @ k.swapaxes(-1, -2) / np.sqrt(8)) @ v, rtol=1e-4, atol=1e-5)

def test_convolution_pool_and_padding(dev):
  x, w = rng.standard_normal((1, 4, 12, 12)).astype(np.float32), rng.standard_normal((6, 4, 3, 3)).astype(np.float32)
  p = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
  want = np.einsum("ncijkl,ockl->noij", np.lib.stride_tricks.sliding_window_view(p, (3, 3), axis=(2, 3)), w)
  t = Tensor(x, device=dev).conv2d(Tensor(w, device=dev), padding=1)
  np.testing.assert_allclose(t.numpy(), want, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(t.max_pool2d().numpy(), want.reshape(1, 6, 6, 2, 6, 2).max((3, 5)), rtol=1e-4, atol=1e-4)

def test_movement_gather_sort(dev):
  a = ints(np.int32, 240).reshape(4, 5, 12)
  t = Tensor(a, device=dev)
  idx = rng.integers(0, 12, (4, 5, 7)).astype(np.int32)
  np.testing.assert_array_equal(t.permute(2, 0, 1).contiguous().numpy(), a.transpose(2, 0, 1))
  np.testing.assert_array_equal(t.flip(1).contiguous().numpy(), a[:, ::-1])
  np.testing.assert_array_equal(t.pad(((1, 0), (0, 2), (3, 0))).contiguous().numpy(), np.pad(a, ((1, 0), (0, 2), (3, 0))))
  np.testing.assert_array_equal(t.gather(2, Tensor(idx, device=dev)).numpy(), np.take_along_axis(a, idx, 2))
  np.testing.assert_array_equal(t.sort(2)[0].numpy(), np.sort(a, 2))
  np.testing.assert_array_equal((Tensor.arange(1000).to(dev) + Tensor([0], device=dev)).numpy(), np.arange(1000))

def test_threefry_random_numbers_equal_those_of_the_cpu(dev):
  out = []
  for d in (dev, "CPU"):
    Tensor.manual_seed(42)
    out.append(Tensor.rand(500, device=d).numpy())
  np.testing.assert_array_equal(*out)

@pytest.mark.parametrize("order", ("reversed", 12345, 2 ** 63 + 7))
def test_results_do_not_depend_on_the_order_of_workgroups(dev, order):
  a = rng.integers(-99, 99, (200, 130)).astype(np.int32)
  t = Tensor(a, device=dev).realize()
  ir3_core.options["order"] = order
  try:
    np.testing.assert_array_equal((t @ t.T).numpy(), a @ a.T)
    np.testing.assert_array_equal(t.sum(0).numpy(), a.sum(0))
    np.testing.assert_array_equal((t * 3 + 1).numpy(), a * 3 + 1)
  finally: ir3_core.options["order"] = "forward"

def test_training_step(dev):
  x, w, y = rng.standard_normal((32, 20)).astype(np.float32), rng.standard_normal((20, 5)).astype(np.float32), rng.integers(0, 5, 32)
  t = Tensor(w, device=dev)
  t.is_param_(True) if hasattr(t, "is_param_") else None
  t.requires_grad = True
  loss = (Tensor(x, device=dev) @ t).sparse_categorical_crossentropy(Tensor(y.astype(np.int32), device=dev))
  loss.backward()
  z = x.astype(np.float64) @ w
  p = np.exp(z - z.max(1, keepdims=True))
  p /= p.sum(1, keepdims=True)
  np.testing.assert_allclose(loss.numpy(), -np.log(p[np.arange(32), y]).mean(), rtol=1e-5)
  p[np.arange(32), y] -= 1
  np.testing.assert_allclose(t.grad.numpy(), x.T @ p / 32, rtol=1e-3, atol=1e-5)

def test_unoptimised_kernels_use_loops_and_private_memory(dev):
  a = rng.standard_normal((20, 30)).astype(np.float32)
  with Context(NOOPT=1):
    np.testing.assert_allclose((Tensor(a, device=dev) @ Tensor(a.T.copy(), device=dev)).numpy(), a @ a.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(Tensor(a, device=dev).max(1).numpy(), a.max(1))

def test_a_kernel_reads_what_it_stored(dev):
  a, b = (rng.standard_normal((10, 10)).astype(np.float32) for _ in range(2))
  def matmul(c: UOp, a: UOp, b: UOp) -> UOp:
    i, j, k = UOp.range(10, 0), UOp.range(10, 1), UOp.range(10, 2, axis_type=AxisType.REDUCE)
    c = c[i, j].set(0.0)
    return c[i, j].set(c.after(k)[i, j] + a[i, k] * b[k, j], end=k).end(i, j).sink(arg=KernelInfo(opts_to_apply=()))
  out = Tensor.full((10, 10), 1e6, device=dev).contiguous().realize()
  got = Tensor.custom_kernel(out, Tensor(a, device=dev), Tensor(b, device=dev), fxn=matmul)[0]
  np.testing.assert_allclose(got.numpy(), a @ b, rtol=1e-5, atol=1e-5)

@pytest.mark.parametrize("half", (0, 1), ids=("texels-32", "texels-16"))
def test_images(dev, half):
  name = ir3_core.register("a630,IMAGE_PITCH_ALIGNMENT=64")
  x, w = rng.standard_normal((1, 16, 16, 16)).astype(np.float32), rng.standard_normal((16, 16, 3, 3)).astype(np.float32)
  want = np.einsum("ncijkl,ockl->noij", np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), axis=(2, 3)), w)
  before = ir3_core.engine().counts()
  with Context(IMAGE=1, FLOAT16=half):
    tx = Tensor(x, device=name).realize()
    got = tx.conv2d(Tensor(w, device=name).realize(), padding=1).relu().numpy()
    a, b = rng.standard_normal((64, 128)).astype(np.float32), rng.standard_normal((128, 64)).astype(np.float32)
    mm = (Tensor(a, device=name).realize() @ Tensor(b, device=name).realize()).numpy()
  np.testing.assert_allclose(got, np.maximum(want, 0), rtol=2e-2 if half else 1e-4, atol=5e-2 if half else 1e-4)
  np.testing.assert_allclose(mm, a @ b, rtol=2e-2 if half else 1e-4, atol=1e-1 if half else 1e-4)
  after = ir3_core.engine().counts()
  assert all(after.get(op, (0, 0))[1] > before.get(op, (0, 0))[1] for op in ("isam", "stib.b")), "no image instruction ran"
