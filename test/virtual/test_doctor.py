"""The doctor: what it learns from a kernel, asked on the kernel models, what it advises, and what its self-test notices."""
from __future__ import annotations
import contextlib, errno, json, os, pathlib, stat, types
from collections.abc import Sequence
import pytest
from test.mockgpu import qcom
from tinygrad.runtime.support import qcom_doctor as doctor

MSM, KGSL = "/dev/dri/renderD128", "/dev/kgsl-3d0"

@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch):
  """ask(node, **settings): the doctor's finding on `node` of a virtual machine."""
  @contextlib.contextmanager
  def opened(node: str):
    with qcom.open_node(node, os.O_RDWR) as f: yield f.ioctl
  def one(node: str, **settings) -> doctor.Finding:
    qcom.configure(**settings)
    with monkeypatch.context() as m:
      m.setattr(doctor, "opened", opened)
      real, device = os.stat, types.SimpleNamespace(st_mode=stat.S_IFCHR | 0o660, st_uid=0, st_gid=54321)
      m.setattr(os, "stat", lambda path, **kw: device if path == node else real(path, **kw))
      return doctor.probe(node, doctor.kgsl_node if node == KGSL else doctor.drm_node)
  return one

def test_msm_node_is_described_by_what_the_kernel_says(ask):
  found = ask(MSM)
  assert found.state == "ok" and found.subject == MSM
  assert found.facts["driver"] == "msm" and found.facts["chip_id"] == 0x06030002 and found.facts["priorities"] == 3
  assert found.facts["faults"] == 0 and found.facts["gmem_bytes"] == 1 << 20
  for text in ("Adreno 630", "0x06030002", "4 GiB", "1024 KiB of GMEM", "3 priorities", "0 hang recoveries", "suspends", "msm 1."):
    assert text in found.text

def test_a_board_without_private_page_tables_is_noticed(ask):
  found = ask(MSM, private_vm=False)
  assert found.state == "ok" and found.facts["va_size"] == "EINVAL" and "shared with the kernel" in found.text

def test_missing_firmware_is_named(ask, monkeypatch: pytest.MonkeyPatch):
  found = ask(MSM, gpu=False)
  assert found.state == "problem" and "no GPU is bound" in found.text and "a630_zap.mbn" in found.remedy and "initramfs" in found.remedy
  have = {"/lib/firmware/**/*a6*": ["/lib/firmware/qcom/a630_sqe.fw.zst", "/lib/firmware/qcom/a630_gmu.bin"]}
  monkeypatch.setattr(doctor.glob, "glob", lambda p, recursive=False: have.get(p, []))
  found = ask(MSM, gpu=False)
  assert found.facts["firmware"] == ["a630_sqe.fw", "a630_gmu.bin"] and "missing below /lib/firmware: a630_zap.mbn)" in found.remedy
  have["/lib/firmware/qcom/**/*zap*"] = ["/lib/firmware/qcom/sdm845/beryllium/a630_zap.mbn"]
  assert "the board may want another one" in ask(MSM, gpu=False).remedy

def test_another_chip_is_refused_with_the_list_of_supported_ones(ask):
  found = ask(MSM, chip_id=0x06040001)
  assert found.state == "problem" and "0x06040001" in found.text and "Adreno 630" in found.remedy

def test_kgsl_node(ask):
  found = ask(KGSL)
  assert found.state == "ok" and found.facts["chip_id"] >> 16 == 0x0603 and found.facts["gmem_bytes"] == 0x100000 and found.facts["device_id"] == 1
  assert "kgsl 3." in found.text

@pytest.mark.parametrize("node,ioctl,name", [(MSM, "VERSION", "DRM_IOCTL_VERSION"), (MSM, "GET_PARAM", "DRM_IOCTL_MSM_GET_PARAM"),
                                             (KGSL, "DEVICE_GETPROPERTY", "IOCTL_KGSL_DEVICE_GETPROPERTY")])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_policy_that_lets_the_node_be_opened_and_forbids_its_ioctls(ask, node, ioctl, name, code):
  found = ask(node, fail={ioctl: {"1-99": code}})
  assert found.state == "problem" and found.subject == node and f"refuses {name}: {errno.errorcode[code]}" in found.text
  assert "SELinux" in found.remedy and "its group is right" in found.remedy

def test_a_driver_that_refuses_the_question_is_a_problem_not_a_crash(ask):
  found = ask(MSM, fail={"VERSION": {"1-99": errno.ENOTTY}})
  assert found.state == "problem" and "refuses DRM_IOCTL_VERSION: ENOTTY" in found.text and "not the expected driver" in found.remedy

def test_a_node_that_cannot_be_opened_comes_with_what_to_do(ask):
  found = ask(MSM, denied=(MSM,))
  assert found.state == "problem" and "cannot be opened: EACCES (crw-rw----)" in found.text and "usermod -aG 54321" in found.remedy

@pytest.mark.parametrize("mode, gid, advice", [
  (0o660, 54321, "usermod -aG 54321"),         # the group may, the user is not in it
  (0o600, 54321, "udev rule"),                 # nobody but the owner may
  (0o660, os.getgid(), "security module"),     # the mode allows it, so something else does not
])
def test_advice_fits_the_mode_of_the_node(mode, gid, advice, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(doctor, "read", lambda path: "")
  assert advice in doctor.access_remedy(MSM, types.SimpleNamespace(st_mode=stat.S_IFCHR | mode, st_gid=gid))  # type: ignore[arg-type]

def test_selinux_is_named_with_the_context(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(doctor, "read", {"/sys/fs/selinux/enforce": "1", "/proc/self/attr/current": "u:r:shell:s0"}.get)
  assert "SELinux, which is enforcing (context u:r:shell:s0)" in doctor.policy()

def test_a_cache_that_cannot_be_written(tmp_path: pathlib.Path):
  (tmp_path / "file").touch(mode=0o400)
  assert doctor.writable("c", str(tmp_path / "a" / "b"), "do").state == "ok"
  found = doctor.writable("c", str(tmp_path / "file" / "b"), "move it")
  assert found.state == "problem" and found.remedy == "move it"

@pytest.mark.parametrize("cc,text", [("no-such-compiler", "is not on PATH"), ("false", "does not compile")])
def test_a_compiler_that_does_not_work(monkeypatch: pytest.MonkeyPatch, cc, text):
  monkeypatch.setenv("CC", cc)
  from tinygrad.helpers import getenv
  getenv.cache_clear()                             # ClangCompiler asks there
  try: found = doctor.compiler()
  finally:
    monkeypatch.undo()
    getenv.cache_clear()
  assert found.state == "problem" and text in found.text and "CC" in found.remedy
  assert doctor.compiler().state == "ok"

def test_a_library_that_is_not_there_is_not_passed_over(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setenv("MESA_PATH", "/nonexistent/libtinymesa.so")
  found = doctor.mesa()
  assert found.state == "problem" and "MESA_PATH=/nonexistent/libtinymesa.so is no file" in found.text and found.remedy

def test_the_self_test_runs_on_the_node_that_works_mainline_first(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.delenv("DEV", raising=False)
  ok, bad = (lambda node: doctor.Finding(node, "ok", "")), (lambda node: doctor.Finding(node, "problem", ""))
  assert doctor.choose([ok(MSM), ok(KGSL)]) == "MSM+QCOM"
  assert doctor.choose([bad(MSM), ok(KGSL)]) == "KGSL+QCOM"
  assert doctor.choose([bad(MSM), bad(KGSL)]) == "MOCKMSM+QCOM"
  monkeypatch.setenv("DEV", "QCOM")
  assert doctor.choose([bad(MSM), ok(KGSL)]) == "QCOM"
  assert doctor.choose([bad(MSM)]) is None, "the node's finding has the reason already"
  for dev, nodes in (("MSM+QCOM", [bad(MSM), ok(KGSL)]), ("KGSL+QCOM", [ok(MSM), bad(KGSL)])):
    monkeypatch.setenv("DEV", dev)
    assert doctor.choose(nodes) is None and doctor.choose(nodes[::-1] + [ok(MSM), ok(KGSL)]) == dev

@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
  """report(nodes, dev): (exit status, output) of the doctor, as a list of lines, on a machine where this one has its host."""
  def run(paths: list[str], dev: str, *args: str, host: Sequence[doctor.Finding] = ()) -> tuple[int, list[str]]:
    monkeypatch.setenv("DEV", dev)
    monkeypatch.setattr(doctor, "host", lambda: [*host])
    monkeypatch.setattr(doctor.glob, "glob", lambda p, recursive=False: paths if "renderD" in p else [])
    monkeypatch.setattr(doctor, "probe", lambda node, ask: doctor.Finding(node, "problem", "cannot be opened: EACCES", "join the group"))
    status = doctor.main(list(args))
    return status, capsys.readouterr().out.splitlines()
  return run

@pytest.mark.parametrize("nodes,cause", [([], "no /dev/dri/renderD* and no /dev/kgsl-3d0"), ([MSM], "cannot be opened: EACCES")])
def test_one_cause_is_one_problem(report, nodes, cause):
  status, lines = report(nodes, "QCOM")
  assert status == 1 and sum(" !! " in line for line in lines) == 1 and cause in lines[0] and "-> " in lines[1], lines
  assert lines[-1] == "doctor: NO RESULT FOR HARDWARE, no usable Adreno 630 in this machine; 1 problem(s)", lines
  assert "self-test: not run" in lines[-2], lines

def test_a_device_that_does_not_open_is_told_once(report, monkeypatch: pytest.MonkeyPatch):
  """A node of another GPU only, which is no problem of its own."""
  monkeypatch.setenv("QCOM_MOCK", json.dumps({"nodes": []}))
  status, lines = report([], "MOCKMSM+QCOM")
  assert status == 1 and [line for line in lines if " !! " in line] == [line for line in lines if "MOCKMSM+QCOM does not open: " in line], lines
  assert sum("does not open" in line for line in lines) == 1, lines

def test_a_machine_without_an_adreno_is_not_called_ok(report, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(doctor, "selftest", lambda dev: [doctor.Finding("self-test add", "ok", f"DEV={dev}")])
  status, lines = report([], "")
  assert status == 0 and lines[-1] == "doctor: NO RESULT FOR HARDWARE, no usable Adreno 630 in this machine; no other problem", lines
  status, lines = report([], "", "--json")
  found = json.loads("\n".join(lines))
  assert status == 0 and found["ok"] and not found["adreno"], lines

@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dev", ["", "QCOM"])
def test_a_container_without_nodes_is_told_to_get_them(report, monkeypatch: pytest.MonkeyPatch, dev, inside):
  monkeypatch.setattr(doctor, "selftest", lambda dev: [])
  monkeypatch.setattr(doctor, "container", lambda: inside)
  status, lines = report([], dev)
  assert status == (1 if dev else 0) and ("pass /dev/dri (or /dev/kgsl-3d0) into it" in "\n".join(lines)) == inside, lines

def test_without_a_compiler_the_rest_is_reported(report, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(doctor, "selftest", lambda dev: pytest.fail("it cannot run"))
  status, lines = report([], "", host=[doctor.Finding("clang", "problem", "clang is not on PATH", "install clang")])
  assert status == 1 and any("self-test: not run without a C compiler" in line for line in lines) and "; 1 problem(s)" in lines[-1], lines

def test_json_for_a_public_report_has_no_home_folder(report, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(doctor, "selftest", lambda dev: [doctor.Finding("self-test add", "ok", "/home/owner/.cache and /home/owner2/x")])
  monkeypatch.setenv("HOME", "/home/owner")
  _, lines = report([], "", "--json")
  assert "~/.cache and /home/owner2/x" in "\n".join(lines), lines

def test_the_self_test_reports_a_device_that_does_not_open():
  (found,) = doctor._selftest("NOSUCH+QCOM", 0, "", 120)
  assert found.state == "problem" and found.text.startswith("DEV=NOSUCH+QCOM does not open: ") and "DEBUG=2" in found.remedy and found.facts["stderr"]

def test_the_self_test_notices_a_gpu_that_computes_nothing(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setenv("QCOM_MOCK", json.dumps({"execute": False}))
  found = doctor._selftest("MOCKKGSL+QCOM", 0, "", 120)
  assert found and all(f.state == "problem" for f in found), found
