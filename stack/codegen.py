"""Run inside a built tree: prints, as JSON, a hash of source and binary for a fixed set of kernels on the device that DEV names. Executes none."""
import hashlib, json, sys
from tinygrad import Tensor, Variable, dtypes  # type: ignore[attr-defined]
from tinygrad.engine.realize import compile_linear
from tinygrad.uop.ops import Ops

def kernels() -> dict[str, Tensor]:
  """One tensor per kind of kernel: elementwise, reduction, matmul, convolution, indexing, views, dtypes, loops, a symbolic shape."""
  def e(*shape: int, dtype=dtypes.float) -> Tensor: return Tensor.empty(*shape, dtype=dtype)
  n = Variable("n", 1, 64).bind(17)
  return {
    "add": e(1000) + e(1000), "broadcast": e(16, 1, 8) * e(1, 32, 8), "relu-chain": (e(4096) * 2 + 1).relu().exp2().sqrt(),
    "sum": e(64, 129).sum(1), "sum-all": e(300, 70).sum(), "softmax": e(32, 100).softmax(), "argmax": e(33, 65).argmax(1),
    "layernorm": e(16, 64).layernorm(), "cumsum": e(8, 256).cumsum(1),
    "matmul": e(64, 96) @ e(96, 80), "matmul-odd": e(13, 17) @ e(17, 11), "batched": e(3, 32, 16) @ e(3, 16, 24),
    "half": e(64, 64, dtype=dtypes.half) @ e(64, 64, dtype=dtypes.half),
    "conv": e(1, 8, 18, 18).conv2d(e(16, 8, 3, 3), padding=1), "depthwise": e(1, 8, 12, 12).conv2d(e(8, 1, 3, 3), groups=8),
    "pool": e(2, 4, 16, 16).max_pool2d(),
    "gather": e(100, 16)[e(25, dtype=dtypes.int)], "slice": e(40, 40)[3:17, ::2] + 1, "transpose": e(20, 30).permute(1, 0).contiguous(),
    "pad": e(10, 10).pad(((1, 2), (3, 4))) * 3, "flip": e(50).flip(0) + 1, "cat": e(5, 7).cat(e(6, 7)),
    "cast": e(64, dtype=dtypes.uint8).cast(dtypes.float) / 255, "int-div": e(64, dtype=dtypes.int) // 7 + e(64, dtype=dtypes.int) % 5,
    "bitcast": e(64).bitcast(dtypes.int) >> 3, "where": (e(77) > 0).where(e(77), -1.0), "sin": e(99).sin(), "symbolic": e(64, 4)[:n].sum(0) + 1,
  }

def main() -> None:
  seen: dict[str, object] = {}
  for name, t in kernels().items():
    try:
      programs = [c.src[0] for c in compile_linear(t.schedule_linear()).src if c.src[0].op is Ops.PROGRAM]
      seen[name] = [hashlib.sha256(repr([s.arg for s in p.src if s.op in (Ops.SOURCE, Ops.BINARY)]).encode()).hexdigest()[:16] for p in programs]
    except Exception as e: seen[name] = f"{type(e).__name__}: {e}"[:200]
  json.dump(seen, sys.stdout)

if __name__ == "__main__": main()
