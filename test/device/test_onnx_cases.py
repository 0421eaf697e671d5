"""A sample of onnx_cases, an operator or two of each kind, called, captured and replayed. All of them: docs/models.md.

Without DEV: on the virtual Adreno 630, through both interfaces.
"""
from __future__ import annotations
import json, os, pathlib, subprocess, sys
import pytest
from tinygrad.helpers import DEV

pytest.importorskip("onnx")
SAMPLE = {
  "convolution": "conv_with_strides_and_asymmetric_padding ConvTranspose2d Conv2d_groups",
  "matmul": "gemm_all_attributes matmul_1d_3d qlinearmatmul_2D_uint8_float32",
  "pooling": "averagepool_2d_ceil_last_window_starts_on_pad maxpool_2d_ceil globalaveragepool",
  "normalization": "batchnorm_epsilon layer_normalization_2d_axis1 instancenorm_example lrn",
  "attention": "attention_4d rotary_embedding softmax_axis_0",
  "reduction": "argmax_default_axis_example reduce_l1_default_axes_keepdims_example",
  "elementwise": "gelu_default_1 mod_broadcast pow_bcast_array acosh where_long_example bitwise_and_i16_3d",
  "indices": "gather_2d_indices scatternd_add onehot_negative_indices top_k_negative_axis",
  "shapes": "slice_default_steps reflect_pad tile depthtospace_crd_mode_example concat_2d_axis_1 split_equal_parts_2d",
  "sampling": "resize_downsample_scales_cubic_A_n0p5_exclude_outside upsample_nearest",
  "types": "dequantizelinear_axis quantizelinear isinf"}
ASKED = repr(DEV) # the environment may have what another test module took as the default
DEVICES = [ASKED] if DEV.device == "QCOM" else ["MOCKMSM+QCOM:IR3", "MOCKKGSL+QCOM:IR3"] if not ASKED else []

@pytest.mark.skipif(not DEVICES, reason=f"DEV={ASKED} is not an Adreno")
@pytest.mark.parametrize("dev", DEVICES)
def test_operators_of_each_kind_agree_with_onnx(dev: str, tmp_path: pathlib.Path) -> None:
  names = [f"test_{n}" for group in SAMPLE.values() for n in group.split()]
  if len(DEVICES) > 1: names = names[DEVICES.index(dev)::2]
  only, out = tmp_path / "only.json", tmp_path / "out.json"
  only.write_text(json.dumps(dict.fromkeys(names, "ok")))
  env = {**os.environ, "DEV": dev, "PARALLEL": "0", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
  done = subprocess.run([sys.executable, "-m", "test.device.onnx_cases", "--replay", "--only", str(only), "--out", str(out)],
                        env=env, capture_output=True, text=True, timeout=570)
  if "no usable QCOM device" in done.stderr and not dev.startswith("MOCK"): pytest.skip(done.stderr.strip().splitlines()[-1])
  assert out.is_file(), done.stderr[-3000:]
  assert json.loads(out.read_text()) == dict.fromkeys(names, "ok"), done.stdout
