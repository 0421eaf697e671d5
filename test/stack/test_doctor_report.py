"""`dev doctor`, and the same report from what a wheel installs, away from this repository."""
from __future__ import annotations
import json, os, pathlib, subprocess, sys
import pytest
from test.stack.site import ROOT

sys.path.append(str(ROOT))  # behind build/tree, so that tinygrad and test stay those of the built tree
from stack import doctor, env as stack_env, series, wheel

def test_the_report_from_an_installed_wheel(tmp_path: pathlib.Path):
  """The self-test is on the virtual device, so the source tree's `test` is added to what the wheel has; without it, it is not run."""
  if not (ROOT / "build" / "dl").is_dir(): pytest.skip("needs the archives that `dev tree` downloads")
  stack, content = wheel.files(sys.executable)
  for name, data in content.items():
    if name.endswith((".py", "METADATA")):
      (at := tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
      at.write_bytes(data)
  env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "DEV")} | {"PYTHONPATH": str(tmp_path / "site")}
  cmd = [sys.executable, "-m", "tinygrad.runtime.support.qcom_doctor", "--json"]
  done = subprocess.run(cmd, cwd=tmp_path, env=env, capture_output=True, text=True)
  report = json.loads(done.stdout)
  found = {f["subject"]: f for f in report["findings"]}
  assert report["ok"] == (done.returncode == 0) == all(f["state"] != "problem" for f in report["findings"])
  assert {"system", "stack", "clang", "Mesa", "kernel cache"} <= set(found)
  assert f"tinygrad {wheel.version(stack)}, installed" in found["stack"]["text"]
  assert all(f["remedy"] for f in report["findings"] if f["state"] == "problem")
  if not any(f["state"] == "ok" and f["subject"].startswith("/dev/") for f in report["findings"]): assert found["self-test"]["state"] == "note"

def test_dev_doctor_tests_the_virtual_device_where_there_is_no_other():
  env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "DEV", "QCOM_MOCK")}
  done = subprocess.run([str(ROOT / "dev"), "doctor", "--json"], env=env, capture_output=True, text=True, cwd=ROOT)
  report = json.loads(done.stdout)
  tests = {f["subject"]: f for f in report["findings"] if f["subject"].startswith("self-test ")}
  assert report["ok"] == (done.returncode == 0) and set(tests) == {f"self-test {t}" for t in ("add", "matmul", "replay", "image")}, done.stderr
  assert all("exact on" in f["text"] and f["facts"]["arch"].startswith("a630") for f in tests.values()), tests
  assert tests["self-test image"]["facts"]["kernels_with_textures"] > 0
  virtual = "MOCK" in tests["self-test add"]["facts"]["DEV"]
  assert ("VIRTUAL" in tests["self-test add"]["text"]) == virtual and report["adreno"] != virtual
  assert {f["state"] for f in tests.values()} == {"note" if virtual else "ok"}, "what the virtual device does is not said to be ok of this machine"

def test_dev_doctor_leaves_a_missing_compiler_to_the_report(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
  def none() -> str: raise stack_env.Problem("no C compiler")
  monkeypatch.setattr(stack_env, "clang", none)
  monkeypatch.setenv("CC", "no-such-compiler")
  assert doctor.main(["--json"]) == 1
  found = {f["subject"]: f for f in json.loads(capfd.readouterr().out)["findings"]}
  assert found["clang"]["state"] == "problem" and found["Mesa"]["state"] == "ok" and "without a C compiler" in found["self-test"]["text"], found
  with pytest.raises(stack_env.Problem): stack_env.environment()

def test_musl_is_named_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
  monkeypatch.setattr(stack_env, "VENV", tmp_path / "venv")
  monkeypatch.setattr(stack_env.sysconfig, "get_config_var", {"SOABI": "cpython-312-aarch64-linux-musl"}.get)
  with pytest.raises(stack_env.Problem, match="musl .postmarketOS, Alpine.*glibc container.*/dev/dri"): stack_env.venv()
  assert not (tmp_path / "venv").exists()

@pytest.mark.parametrize("module", ["tinygrad.device", "tinygrad.runtime.support.qcom_doctor"])
def test_a_clone_without_an_installed_tinygrad_says_what_to_run(module: str):
  """There the package is this repository's folder, which has only what the stack adds."""
  env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
  done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, env=env, capture_output=True, text=True)
  assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
  assert f"./dev run -m {module}" in done.stderr and "pip install" in done.stderr, done.stderr
  assert "tinygrad/device.py" not in series.overlay_files(), "it must not stand in place of tinygrad's own"
