"""The driving pipeline of examples/drive.py: frames in memory of others, warp, queues that are updated in the capture, vision, policy.

Eager, captured and reloaded runs are equal in every byte of outputs and queues, with JIT=1 and 2, JIT_BATCH_SIZE 0 and 32, with and without memory
planner; eager ones agree with numpy. 50 steps, openpilot's sizes: docs/models.md. Without DEV: on the virtual Adreno 630, through both interfaces.
"""
from __future__ import annotations
import os, pathlib, subprocess, sys
import pytest
from tinygrad.helpers import DEV

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "examples" / "drive.py"
ASKED = repr(DEV) # the environment may have what another test module took as the default
OPENPILOT = {"IMAGE": "1", "FLOAT16": "1", "NOLOCALS": "1", "OPENPILOT_HACKS": "1"}
VIRTUAL = [("MOCKMSM+QCOM:IR3", {}), ("MOCKKGSL+QCOM:IR3", OPENPILOT)]
RUNS = [(ASKED, {}), (ASKED, OPENPILOT)] if DEV.device == "QCOM" else VIRTUAL if not ASKED else []

@pytest.mark.skipif(not RUNS, reason=f"DEV={ASKED} is not an Adreno")
@pytest.mark.skipif(not SCRIPT.is_file(), reason="the examples are not in this tree")
@pytest.mark.parametrize("dev,flags", RUNS, ids=[f"{d}-{'openpilot' if f else 'plain'}" for d, f in RUNS])
def test_every_way_to_run_the_pipeline_gives_the_same_bytes(dev: str, flags: dict[str, str]) -> None:
  """Reports R4, R5 (shifted queues fed back), R8, R10 (planner, in-place inputs), R28 (capture against replay), R53 (kernels a call)."""
  env = {**os.environ, **flags, "DEV": dev, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
  done = subprocess.run([sys.executable, str(SCRIPT), "--steps", "8", "--reload"], env=env, capture_output=True, text=True, timeout=570)
  if "no usable QCOM device" in done.stdout and not dev.startswith("MOCK"): pytest.skip(done.stdout.strip().splitlines()[-1])
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
  lines = done.stdout.splitlines()
  assert len([x for x in lines if "equal, also loaded" in x]) == 8 and "no kernel compiled, equal" in done.stdout, done.stdout
  # every replay costs the same few kernels and submits, whatever the batch size: nothing is done for each frame on the host but two small copies
  assert len({x.split("=")[-1].split(" ", 1)[1].split(", enqueue")[0] for x in lines if "equal, also loaded" in x}) == 1, done.stdout
