"""The estimate of an A630's times: what it counts of a launch, the model over it, table and drawing. Whether it is right only hardware could tell."""
from __future__ import annotations
import json, os, pathlib, re, subprocess, sys
import xml.etree.ElementTree as xml
import numpy as np
import pytest
from test.mockgpu.qcom import estimate
from test.mockgpu.qcom.estimate import Work
from test.qcom_open import virtual
from tinygrad import Tensor
from tinygrad.helpers import Context

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "estimates.md"

def works(kind: str, f, **context) -> list[Work]:
  """What the launches of `f` counted."""
  found: list[Work] = []
  with Context(**context), virtual(kind, estimate="") as (machine, _):
    launched = machine.gpu.estimate.launched
    def record(*args) -> Work:
      found.append(w := launched(*args))
      return w
    machine.gpu.estimate.launched = record
    f()
  return found

@pytest.mark.parametrize("kind", ["MSM", "KGSL"])
def test_traffic_and_waves_of_a_sum_of_vectors(kind):
  """n floats each of two inputs and an output: every byte is accessed once, and the buffers are that large."""
  n = 1 << 16
  x = np.arange(n, dtype=np.float32)
  def run() -> None: np.testing.assert_array_equal((Tensor(x).realize() + Tensor(x * 2).realize()).numpy(), x * 3)
  (w,) = works(kind, run)
  assert w.accessed == w.traffic == w.buffers == 3 * 4 * n
  per = n // 64 // w.waves                              # vec4 loads: a fiber does several elements
  assert w.waves * 64 * per == n and per in (1, 2, 4) and w.waves >= w.groups
  assert w.instructions["sfu"] == w.instructions["texture"] == 0 and w.instructions["memory"] in (3 * w.waves * per, 3 * w.waves)
  assert w.instructions["alu"] >= n // 64

def test_what_is_read_again_counts_as_a_hit():
  """Each element of a 64 x 64 operand of a matrix product is needed 64 times; memory sees it once."""
  a = np.eye(64, dtype=np.float32)
  (w,) = works("MSM", lambda: (Tensor(a).realize() @ Tensor(a).realize()).numpy())
  assert w.traffic == w.buffers == 3 * 4 * 64 * 64 and w.accessed > 4 * w.traffic

def test_special_functions_and_textures_are_told_apart():
  x = np.linspace(1, 2, 4096, dtype=np.float32).reshape(64, 64)
  sines = works("MSM", lambda: Tensor(x).realize().sqrt().numpy())
  assert sum(w.instructions["sfu"] for w in sines) >= 4096 // 64
  images = works("MSM", lambda: (Tensor(x).realize() @ Tensor(x).realize()).numpy(), IMAGE=1)
  assert any(w.instructions["texture"] and w.buffers >= 4096 * 2 for w in images)

def work(**kw) -> Work:
  base = {"waves": 4096, "groups": 1024, "full_regs": 4, "instructions": dict.fromkeys(estimate.CLASSES, 0), "accessed": 0, "buffers": 0}
  instructions = {**base["instructions"], **kw.pop("instructions", {})}
  return Work(**{**base, **kw, "instructions": instructions})

@pytest.mark.parametrize("kw,part,us", [                # worked by hand at 710 MHz, 2 SPs
  ({"instructions": {"alu": 4096 * 1000}}, "alu", 4096 * 1000 * 64 / 512 / 710),
  ({"instructions": {"sfu": 4096 * 1000}}, "sfu", 4096 * 1000 * 64 / 128 / 710),
  ({"instructions": {"texture": 4096 * 100}}, "texture", 4096 * 100 * 64 / 24 / 710),
  ({"accessed": 100_000_000, "buffers": 100_000_000}, "memory", 100_000_000 / (29.9e3 * 2 / 3)),
  ({"accessed": 100_000_000, "buffers": 1_000_000}, "cache", 100_000_000 / 128 / 710),
  ({"waves": 1, "groups": 1, "instructions": {"alu": 10_000}}, "latency", 10_000 * 4 / 710),
  ({"waves": 4096, "full_regs": 48, "instructions": {"alu": 4096 * 1000}}, "latency", 4096 * 1000 * 4 / 8 / 710),   # 4 waves fit an SP
  ({"waves": 2, "groups": 1, "instructions": {"memory": 200}}, "latency", 100 * (4 + 50) / 710)])
def test_the_model_by_hand(kw, part, us):
  got, bound = work(**kw).estimate()
  assert bound == part and got == pytest.approx(us + 5.0)

def test_a_launch_that_does_nothing_costs_its_launch(): assert work().estimate() == (5.0, "launch")

def test_the_page_has_the_constants_of_the_model():
  page = DOCS.read_text()
  rows = dict(re.findall(r"^\| `(\w+)` \| ([\d./]+) \|", page, re.M))
  names = {n for n in vars(estimate) if n.isupper() and type(vars(estimate)[n]) in (int, float)}
  assert set(rows) == names
  for n, v in rows.items(): assert eval(v) == pytest.approx(vars(estimate)[n]), n

SCRIPT = "from tinygrad import Tensor; a = Tensor.ones(64, 64).contiguous().realize(); print(((a @ a).contiguous() + 1).sum().item())"

def test_a_script_gets_a_table_and_a_drawing(tmp_path):
  path = tmp_path / "run.svg"
  env = {**os.environ, "DEV": "MOCKMSM+QCOM", "QCOM_MOCK": json.dumps({"estimate": str(path)}),
         "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
  done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
  assert done.returncode == 0 and float(done.stdout) == 64 * 64 * 65, done.stderr
  lines = [t for t in done.stderr.splitlines() if t.strip()]
  assert lines[0].startswith("ESTIMATE for an Adreno 630") and "never compared with hardware" in lines[0] and "instructions of one wave" in lines[0]
  assert lines[1].startswith("kernel")
  names = [t.split()[0] for t in lines[2:-1]]
  assert len(names) >= 2 and sum(float(t.split("%")[0].split()[-1]) for t in lines[2:-1]) == pytest.approx(100, abs=0.1 * len(names))
  texts = [t.text or "" for t in xml.parse(path).iter("{http://www.w3.org/2000/svg}text")]
  assert any("ESTIMATE" in t and "not a measurement" in t for t in texts) and set(names) <= set(texts)
