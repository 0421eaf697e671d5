"""`dev doctor`: what it learns from a kernel, asked on the kernel models of the virtual Adreno, and what it advises."""
from __future__ import annotations
import errno, json, os, pathlib, stat, sys, types
import pytest
from test.mockgpu import qcom
from test.stack.site import ROOT

sys.path.append(str(ROOT))  # behind build/tree, so that tinygrad and test stay those of the built tree
from stack import doctor

MSM, KGSL = "/dev/dri/renderD128", "/dev/kgsl-3d0"

def ask_msm(**settings) -> doctor.Finding:
  qcom.configure(**settings)
  with qcom.open_node(MSM) as node: return doctor.drm_node(MSM, node.ioctl, {})

def test_msm_node_is_described_by_what_the_kernel_says():
  found = ask_msm()
  assert found.state == "ok" and found.subject == MSM
  assert found.facts["driver"] == "msm" and found.facts["chip_id"] == 0x06030002 and found.facts["priorities"] == 3
  assert "Adreno 630" in found.text and "0x06030002" in found.text and "4 GiB" in found.text

def test_a_board_without_private_page_tables_is_noticed():
  found = ask_msm(private_vm=False)
  assert found.state == "ok" and found.facts["va_size"] == "EINVAL" and "shared with the kernel" in found.text

def test_missing_firmware_is_named():
  found = ask_msm(gpu=False)
  assert found.state == "problem" and "no GPU is bound" in found.text and "a630_sqe.fw" in found.remedy

def test_another_chip_is_refused_with_the_list_of_supported_ones():
  found = ask_msm(chip_id=0x06040001)
  assert found.state == "problem" and "0x06040001" in found.text and "Adreno 630" in found.remedy

def test_kgsl_node():
  qcom.configure()
  with qcom.open_node(KGSL) as node: found = doctor.kgsl_node(KGSL, node.ioctl, {})
  assert found.state == "ok" and found.facts["chip_id"] >> 16 == 0x0603 and found.facts["gmem_bytes"] == 0x100000 and found.facts["device_id"] == 1

def test_a_driver_that_refuses_the_question_is_a_problem_not_a_crash(tmp_path: pathlib.Path):
  def facts_of(ioctl, facts): raise OSError(errno.ENOTTY, "no")
  (tmp_path / "node").touch()
  found = doctor.probe(str(tmp_path / "node"), facts_of)
  assert found.state == "problem" and "ENOTTY" in found.text

def test_a_node_that_cannot_be_opened_comes_with_what_to_do(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  (tmp_path / "renderD128").touch()
  def refuse(*_args): raise OSError(errno.EACCES, "denied")
  monkeypatch.setattr(doctor.os, "open", refuse)
  found = doctor.probe(str(tmp_path / "renderD128"), lambda i, f: pytest.fail("was opened"))
  assert found.state == "problem" and "EACCES" in found.text and found.remedy

@pytest.mark.parametrize("mode, gid, advice", [
  (0o660, 54321, "usermod -aG 54321"),         # the group may, the user is not in it
  (0o600, 54321, "udev rule"),                 # nobody but the owner may
  (0o660, os.getgid(), "security module"),     # the mode allows it, so something else does not
])
def test_advice_fits_the_mode_of_the_node(mode, gid, advice):
  st = types.SimpleNamespace(st_mode=stat.S_IFCHR | mode, st_gid=gid)
  assert advice in doctor.access_remedy(MSM, st)  # type: ignore[arg-type]

def test_the_self_test_runs_on_the_node_that_works_mainline_first():
  ok, bad = (lambda node: doctor.Finding(node, "ok", "")), (lambda node: doctor.Finding(node, "problem", ""))
  assert doctor.choose([ok(MSM), ok(KGSL)]) == "MSM+QCOM"
  assert doctor.choose([bad(MSM), ok(KGSL)]) == "KGSL+QCOM"
  assert doctor.choose([bad(MSM), bad(KGSL)]) == "MOCKMSM+QCOM"

def test_the_self_test_reports_a_device_that_does_not_open():
  found = doctor.selftest("NOSUCH+QCOM")
  assert found.state == "problem" and found.text.startswith("DEV=NOSUCH+QCOM: ") and "DEBUG=2" in found.remedy

def test_the_self_test_passes_on_the_virtual_device_and_says_that_it_is_virtual():
  found = doctor.selftest("MOCKMSM+QCOM")
  assert found.state == "ok" and "VIRTUAL" in found.text and found.facts["arch"] == "a630"

def test_json_report_is_one_object_and_agrees_with_the_exit_status(capsys: pytest.CaptureFixture[str]):
  status = doctor.main(["--json"])
  report = json.loads(capsys.readouterr().out)
  assert report["ok"] == (status == 0) == all(f["state"] != "problem" for f in report["findings"])
  assert {"system", "stack", "clang", "Mesa", "self-test"} <= {f["subject"] for f in report["findings"]}
