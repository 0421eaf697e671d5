"""The layouts the kernel models decode raw ioctl bytes with: reproducible, and the same ABI the clients' own bindings describe."""
from __future__ import annotations
import ctypes, functools, importlib.util, json, pathlib, shutil, subprocess, sys, types
import pytest
from tinygrad.runtime.autogen import kgsl, msm_drm

ABI = pathlib.Path(__file__).resolve().parents[1]/"mockgpu/qcom/abi"
FACTS = {name: json.loads((ABI/f"{name}.json").read_text()) for name in ("msm", "kgsl")}
BINDINGS = [("kgsl", kgsl, "struct_kgsl_", "IOCTL_KGSL_", "KGSL_"), ("msm", msm_drm, "struct_drm_", "DRM_IOCTL_", ("MSM_", "DRM_MSM_"))]

def request(call: functools.partial) -> int:
  """Number of a binding's ioctl from its direction, type, number and struct, as <asm-generic/ioctl.h> packs them."""
  direction, base, nr, typ = call.args
  return direction << 30 | ctypes.sizeof(typ) << 16 | base << 8 | nr

@pytest.mark.parametrize("name,mod,struct,ioctl,const", BINDINGS, ids=["kgsl", "msm"])
def test_bindings_and_model_agree(name: str, mod: types.ModuleType, struct: str, ioctl: str, const: str|tuple[str, ...]):
  facts, attrs = FACTS[name], vars(mod)
  structs = {n.removeprefix("struct_"): v for n, v in attrs.items() if n.startswith(struct)}
  ioctls = {n: v for n, v in attrs.items() if n.startswith(ioctl) and isinstance(v, functools.partial)}
  constants = {n: v for n, v in attrs.items() if n.startswith(const) and isinstance(v, int)}
  assert len(structs) > 30 and len(ioctls) > 25 and len(constants) > 100
  for n, cls in structs.items():
    layout = {("or" if f == "_or" else f): [off, ctypes.sizeof(typ)] for f, typ, off in cls._real_fields_}
    assert (ctypes.sizeof(cls), layout) == (facts["structs"][n]["size"], facts["structs"][n]["fields"]), n
    signed = [f for f, typ, _ in cls._real_fields_ if issubclass(typ, ctypes._SimpleCData) and typ is not ctypes.c_void_p and typ(-1).value < 0]
    assert signed == facts["structs"][n]["signed"], n
  assert {n: request(v) for n, v in ioctls.items()} == {n: facts["ioctls"][n] for n in ioctls}
  # C gives 1 << 31 the value of an int, Python a positive one; both are the same 32 bits
  assert {n: v % 2**64 if v > 2**32 else v % 2**32 for n, v in constants.items()} == \
    {n: v % 2**64 if (v:=facts["constants"][n]) > 2**32 else v % 2**32 for n in constants}

@pytest.mark.parametrize("name", FACTS)
def test_ioctl_numbers_carry_the_size_of_their_struct(name: str):
  sizes = {s["size"] for s in FACTS[name]["structs"].values()} | {4}
  assert all(n >> 16 & 0x3fff in sizes for n in FACTS[name]["ioctls"].values())

def check(*args: str, script: pathlib.Path = ABI/"layouts.py") -> subprocess.CompletedProcess[str]:
  return subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True)

@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs the pinned headers: pip install ziglang==0.17.1")
class TestLayouts:
  def test_msm_json_is_what_the_headers_give(self):
    out = check("--check")
    assert out.returncode == 0, out.stderr

  @pytest.mark.parametrize("old,new,named", [
    ('"fence_fd": [32, 4]', '"fence_fd": [36, 4]', "structs.drm_msm_gem_submit"),
    ('"MSM_BO_WC": 131072', '"MSM_BO_WC": 65536', "constants.MSM_BO_WC"),
    ('"DRM_IOCTL_GEM_CLOSE": 1', '"DRM_IOCTL_GEM_CLOSE": 2', "ioctls.DRM_IOCTL_GEM_CLOSE")])
  def test_an_edited_number_is_named(self, tmp_path: pathlib.Path, old: str, new: str, named: str):
    script = pathlib.Path(shutil.copy(ABI/"layouts.py", tmp_path))
    text = (ABI/"msm.json").read_text()
    assert old in text
    (tmp_path/"msm.json").write_text(text.replace(old, new))
    out = check("--check", script=script)
    assert out.returncode == 1 and named in out.stderr

  def test_kgsl_extraction_reads_a_header(self, tmp_path: pathlib.Path):
    # no package ships msm_kgsl.h, so the path that made kgsl.json is exercised on a header with the features that one has
    (tmp_path/"msm_kgsl.h").write_text("""
      #include <linux/types.h>
      #include <linux/ioctl.h>
      #define KGSL_IOC_TYPE 0x09
      #define KGSL_TOP (1 << 31)
      #define KGSL_NOT_A_NUMBER struct kgsl_x
      enum kgsl_kind { KGSL_KIND_A = 3, KGSL_KIND_B };
      struct kgsl_x { void __user *p; int fd; union { uint64_t a; unsigned short b; }; unsigned int __pad[3]; };
      #define IOCTL_KGSL_X _IOWR(KGSL_IOC_TYPE, 0x7f, struct kgsl_x)
    """)
    script = pathlib.Path(shutil.copy(ABI/"layouts.py", tmp_path))
    assert (out:=check("--kgsl", str(tmp_path/"msm_kgsl.h"), "--source", "a test", script=script)).returncode == 0, out.stderr
    got = json.loads((tmp_path/"kgsl.json").read_text())
    assert got == {"source": "a test", "structs": {"kgsl_x": {"size": 40, "signed": ["fd"],
                     "fields": {"p": [0, 8], "fd": [8, 4], "a": [16, 8], "b": [16, 2], "__pad": [24, 12]}}},
                   "constants": {"KGSL_IOC_TYPE": 9, "KGSL_TOP": -2**31, "KGSL_KIND_A": 3, "KGSL_KIND_B": 4},
                   "ioctls": {"IOCTL_KGSL_X": 3 << 30 | 40 << 16 | 9 << 8 | 0x7f}}
