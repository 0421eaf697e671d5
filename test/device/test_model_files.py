"""examples/compile_model.py and run_model.py: an ONNX model into a file, that file in another process and on the other kernel, and what they refuse.

The scripts themselves hold outputs against onnxruntime and each other. Without DEV: compiled on the virtual Adreno through MSM.
"""
from __future__ import annotations
import os, pathlib, re, subprocess, sys
import numpy as np
import pytest
from tinygrad.helpers import DEV

onnx = pytest.importorskip("onnx")
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
ASKED = repr(DEV) # the environment may have what another test module took as the default
RUN = ASKED if DEV.device == "QCOM" else "MOCKMSM+QCOM:IR3" if not ASKED else ""
pytestmark = [pytest.mark.skipif(not RUN, reason=f"DEV={ASKED} is not an Adreno"),
              pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not in this tree")]

def script(name: str, *args: object, dev: str = RUN, **env: str) -> tuple[int, str]:
  """(exit status, all that was printed)."""
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "PARALLEL": "0", "DEV": dev, **env}
  done = subprocess.run([sys.executable, str(EXAMPLES / name), *map(str, args)], env=environment, capture_output=True, text=True, timeout=400)
  if "no usable QCOM device" in done.stdout and not dev.startswith("MOCK"): pytest.skip(done.stdout.strip().splitlines()[-1])
  return done.returncode, done.stdout + done.stderr

@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Camera frames with open height and width, a small vector, two outputs, one of which is a slice of the other."""
  rng, h, t = np.random.default_rng(6), onnx.helper, onnx.TensorProto
  weights = {"w": rng.standard_normal((8, 3, 3, 3), np.float32) * .2, "m": rng.standard_normal((8, 10), np.float32),
             "n": rng.standard_normal((5, 10), np.float32), "from": np.array([2]), "to": np.array([5]), "axis": np.array([1])}
  nodes = [h.make_node("Conv", ["img", "w"], ["c"], pads=[1] * 4, strides=[2, 2]), h.make_node("Relu", ["c"], ["r"]),
           h.make_node("GlobalAveragePool", ["r"], ["p"]), h.make_node("Flatten", ["p"], ["f"]), h.make_node("MatMul", ["f", "m"], ["x"]),
           h.make_node("MatMul", ["state", "n"], ["y"]), h.make_node("Add", ["x", "y"], ["out"]),
           h.make_node("Slice", ["out", "from", "to", "axis"], ["part"])]
  graph = h.make_graph(nodes, "g", [h.make_tensor_value_info("img", t.FLOAT, ["n", 3, "h", "w"]), h.make_tensor_value_info("state", t.FLOAT, [1, 5])],
                       [h.make_tensor_value_info("out", t.FLOAT, None), h.make_tensor_value_info("part", t.FLOAT, None)],
                       [onnx.numpy_helper.from_array(v, n) for n, v in weights.items()])
  path = tmp_path_factory.mktemp("model") / "m.onnx"
  onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), path)
  return path

def test_from_onnx_to_another_process(model: pathlib.Path) -> None:
  out, array, outputs = model.with_name("m.pkl"), model.with_name("img.npy"), model.with_name("out.npz")
  flags = {"IMAGE": "1", "FLOAT16": "1", "NOLOCALS": "1", "JIT_BATCH_SIZE": "0", "OPENPILOT_HACKS": "1"}
  status, text = script("compile_model.py", model, out, "--shape", "img=1,3,12,20", **flags)
  assert status == 0 and "compile_model: ok" in text, text
  assert re.search(r"^  kernels +[1-9]\d*$", text, re.M) and re.search(r"^  copies +1$", text, re.M), text # "state", which lies in host memory
  assert "inputs                 img float32 (1, 3, 12, 20) on QCOM, state float32 (1, 5) on NPY" in text, text
  np.save(array, np.ones((1, 3, 12, 20), np.float32))
  np.save(wrong := model.with_name("wrong.npy"), np.ones((1, 4, 64, 32), np.uint8))
  np.save(other := model.with_name("other.npy"), np.ones((1, 3, 12, 20), np.int32))
  np.save(state := model.with_name("state.npy"), np.ones((1, 5), np.float32))
  for dev in (RUN, "MOCKKGSL+QCOM:IR3") if RUN.startswith("MOCKMSM") else (RUN,): # the file is not one kernel's
    status, text = script("run_model.py", out, "--input", f"img={array}", "--input", f"state={state}", "--save", outputs, dev=dev)
    assert status == 0, text
    for words in ("VIRTUAL" if dev.startswith("MOCK") else "real", "on QCOM, state float32 (1, 5) on NPY", "IMAGE=1 FLOAT16=1 NOLOCALS=1"):
      assert words in text, text
    with np.load(outputs) as found: np.testing.assert_array_equal(found["part"], found["out"][:, 2:5])
  # the page's code, which takes arrays and then two frames of a dma-buf, gives the same
  if (page := EXAMPLES.parent / "docs" / "models.md").is_file():
    blocks, seen = re.findall(r"```python\n(.*?)```", page.read_text(), re.S), model.with_name("seen.npz")
    assert len(blocks) == 2
    own = "".join(f"{b}\nnp.savez({str(seen)!r}.replace('seen', 'seen{i}'), **outputs)\n" for i, b in enumerate(blocks))
    (file := model.with_name("own.py")).write_text(own.replace('"model.pkl"', repr(str(out))))
    status, text = script(str(file), PYTHONPATH=os.pathsep.join([str(EXAMPLES), *(p or os.getcwd() for p in sys.path)]))
    assert status == 0, text
    for i in range(2):
      with np.load(outputs) as want, np.load(model.with_name(f"seen{i}.npz")) as found:
        for name in ("out", "part"): np.testing.assert_array_equal(found[name], want[name])
  for args, dev, words in (((out,), "CPU", ("m.pkl was compiled for QCOM a630 by IR3", "this process computes on CPU",
                                                   "with DEV=QCOM:IR3, or DEV=MOCKMSM+QCOM:IR3 where")),
                           ((model,), RUN, ("no model file of this version", "compile the model again")),
                           ((out, "--input", "image=x.npy"), RUN, ("no input 'image'", "img, state")),
                           ((out, "--input", f"img={model}"), RUN, ("is no array that np.save wrote",)),
                           ((out, "--input", f"img={wrong}"), RUN, ("uint8 (1, 4, 64, 32), input 'img' is float32 (1, 3, 12, 20)", ".reshape")),
                           ((out, "--input", f"img={other}"), RUN, ("int32 (1, 3, 12, 20), input 'img' is float32 (1, 3, 12, 20)", ".astype")),
                           ((out, "--input", f"state={array}"), RUN, ("float32 (1, 3, 12, 20)", "input 'state' is float32 (1, 5)"))):
    status, text = script("run_model.py", *args, dev=dev)
    assert status == 1 and all(w in text for w in words), text
  data = out.read_bytes()
  for cut in (data[:len(data) // 2], data[:-8] + bytes(8)):
    out.write_bytes(cut)
    status, text = script("run_model.py", out)
    assert status == 1 and "can't be loaded" in text and "compile the model again" in text, text

def test_what_is_not_compiled(model: pathlib.Path) -> None:
  out, wrong, lacking, h, t = model.with_name("none.pkl"), model.with_name("wrong.npy"), model.with_name("det.onnx"), onnx.helper, onnx.TensorProto
  np.save(wrong, np.ones((1, 4, 64, 32), np.uint8))
  graph = h.make_graph([h.make_node("Relu", ["x"], ["r"]), h.make_node("Det", ["r"], ["d"])], "g", [h.make_tensor_value_info("x", t.FLOAT, [3, 3])],
                       [h.make_tensor_value_info("d", t.FLOAT, None)])
  onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 11)], ir_version=8), lacking)
  for args, dev, words in (((model, out), RUN, ("input 'img' open, (any, 3, any, any)", "--shape img=1,3,1,1")),
                           ((model, out, "--shape", "img=1,4,12,20"), RUN, ("(any, 3, any, any) in the model, not (1, 4, 12, 20)",)),
                           ((model, out, "--shape", "img=1,3,a,20"), RUN, ("--shape img=1,3,a,20 is no shape", "img=1,3,320,320")),
                           ((model, out, "--shape", "img=1,3,0,20"), RUN, ("--shape img=1,3,0,20 is no shape",)),
                           ((model, out, "--shape", "img"), RUN, ("--shape is NAME=VALUE, not 'img'",)),
                           ((model, out.with_name("none") / "m.pkl"), RUN, ("there is no folder", "none, make it first")),
                           ((model, out.parent), RUN, ("is a folder, name a file in it",)),
                           ((model, model.parent / ".." / model.parent.name / model.name), RUN, ("is the model itself, name another file",)),
                           ((__file__, out), RUN, ("can't be read as an ONNX model",)),
                           ((model, out, "--shape", "img=1,3,12,20", "--input", f"img={wrong}"), RUN,
                            ("uint8 (1, 4, 64, 32), input 'img' is float32 (1, 3, 12, 20)", ".reshape")),
                           ((lacking, out), RUN, ("tinygrad's ONNX importer", "no operator Det of ai.onnx 11", "computes 'd'", "without it")),
                           ((model, out), "CPU", ("DEV=CPU is not an Adreno",))):
    status, text = script("compile_model.py", *args, dev=dev)
    assert status == 1 and all(w in text for w in words), text
  for option, value, words in (("--runs", "0", "'0' is not a whole number from 1"), ("--seed", "-1", "'-1' is not a whole number from 0"),
                               ("--tolerance", "nan", "'nan' is not a number from 0")):
    status, text = script("compile_model.py", model, out, option, value)
    assert status == 2 and f"argument {option}: {words}" in text, text
  for option in ("--save", "--json"):
    status, text = script("run_model.py", model, option, out.with_name("none") / "x")
    assert status == 1 and f"run_model: FAILED {option} " in text and "make it first" in text, text
  status, text = script("compile_model.py", model, out, "--shape", "img=1,3,12,20", ONNXLIMIT="1") # as docs/debugging.md has it
  assert status == 1 and "the model gave no output 'out', but r: unset ONNXLIMIT" in text, text
  assert not out.exists()

@pytest.mark.parametrize("kind", ["uint8", "int8", "uint16", "int32", "uint32", "int64", "bool", "float16"])
def test_inputs_of_other_kinds_come_back_from_the_file(tmp_path: pathlib.Path, kind: str) -> None:
  """Camera frames are bytes; a file names the type of each of its inputs."""
  h, dtype = onnx.helper, np.dtype(kind)
  graph = h.make_graph([h.make_node("Cast", ["frame"], ["f"], to=onnx.TensorProto.FLOAT), h.make_node("ReduceSum", ["f"], ["out"])], "g",
                       [h.make_tensor_value_info("frame", h.np_dtype_to_tensor_dtype(dtype), [2, 6])],
                       [h.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)])
  onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
  np.save(tmp_path / "frame.npy", array := (np.arange(12).reshape(2, 6) % 5).astype(dtype))
  status, text = script("compile_model.py", tmp_path / "m.onnx", tmp_path / "m.pkl", "--input", f"frame={tmp_path / 'frame.npy'}")
  assert status == 0 and "compile_model: ok" in text, text
  status, text = script("run_model.py", tmp_path / "m.pkl", "--input", f"frame={tmp_path / 'frame.npy'}", "--save", tmp_path / "out.npz")
  assert status == 0, text
  with np.load(tmp_path / "out.npz") as found: assert float(found["out"].item()) == float(array.astype(np.float32).sum())
