"""msm_drm.py held against a C compiler: every size, offset, constant and ioctl number, and the bytes of filled structs, for aarch64 and x86_64.

The bindings' numbers become _Static_asserts and initialisers in a C file that includes the kernel's own headers. Nothing is executed, so the
foreign architecture is checked as strictly as the host's. What the headers define and the bindings lack is found in the preprocessed headers.
"""
from __future__ import annotations
import ctypes, functools, importlib.util, itertools, os, pathlib, re, shutil, subprocess, sys, tempfile, unittest
from typing import Any
from unittest.mock import patch
from tinygrad.runtime.autogen import msm_drm
from tinygrad.runtime.support import c

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGETS = ("aarch64-linux-musl", "x86_64-linux-musl")
INCLUDES = "#include <stddef.h>\n#include <fcntl.h>\n#include <drm/msm_drm.h>\n"
# what a render-node client calls beside the driver's own ioctls
GENERIC_IOCTLS = {"DRM_IOCTL_VERSION", "DRM_IOCTL_GET_CAP", "DRM_IOCTL_GEM_CLOSE", "DRM_IOCTL_PRIME_HANDLE_TO_FD", "DRM_IOCTL_PRIME_FD_TO_HANDLE"}

def zig_cc(target: str, *args: str, source: str, out: str | None = None) -> subprocess.CompletedProcess[bytes]:
  with tempfile.TemporaryDirectory() as tmp:
    (src:=pathlib.Path(tmp)/"abi.c").write_text(source)
    return subprocess.run([sys.executable, "-m", "ziglang", "cc", "-target", target, *args, str(src), "-o", out or str(src.with_suffix(".out"))],
                          capture_output=True)

def structs() -> dict[str, type[c.Struct]]:
  return {n.removeprefix("struct_"): v for n, v in vars(msm_drm).items() if n.startswith("struct_drm_")}

def fields(cls: type[c.Struct]) -> list[tuple[str, str, Any, int]]:
  """(C name, Python name, ctypes type, offset in bytes); a Python keyword got an underscore."""
  return [("or" if n == "_or" else n, n, typ, off) for n, typ, off in cls._real_fields_]  # type: ignore[attr-defined]

def constants() -> dict[str, int]:
  return {n: v for n, v in vars(msm_drm).items() if re.match(r"(__)?MSM_|DRM_", n) and isinstance(v, int)} | \
    {"DRM_IOCTL_BASE": ord(msm_drm.DRM_IOCTL_BASE)}

def ioctls() -> dict[str, functools.partial]:
  return {n: v for n, v in vars(msm_drm).items() if n.startswith("DRM_IOCTL_") and isinstance(v, functools.partial)}

def request_of(call: functools.partial) -> int:
  """The request number that really reaches the ioctl system call."""
  with patch("fcntl.ioctl", return_value=0) as sys_ioctl: call(-1)
  return sys_ioctl.call_args.args[1]

def is_int(typ: Any) -> bool: return issubclass(typ, ctypes._SimpleCData) and typ is not ctypes.c_void_p  # type: ignore[attr-defined]
def is_signed(typ: Any) -> bool: return typ(-1).value < 0

def asserts() -> dict[str, str]:
  """One C condition for each claim the bindings make."""
  ret = {}
  for s, cls in structs().items():
    ret[f"sizeof {s}"] = f"sizeof(struct {s}) == {ctypes.sizeof(cls)}"
    for f, _, typ, off in fields(cls):
      ret[f"offset {s}.{f}"] = f"offsetof(struct {s}, {f}) == {off}"
      ret[f"size {s}.{f}"] = f"sizeof(((struct {s}*)0)->{f}) == {ctypes.sizeof(typ)}"
      if is_int(typ): ret[f"sign {s}.{f}"] = f"(((__typeof__(((struct {s}*)0)->{f}))-1) < 0) == {int(is_signed(typ))}"
  return ret | {f"constant {n}": f"(long long)({n}) == {v}LL" for n, v in constants().items()} | \
    {f"ioctl {n}": f"{n} == {request_of(call)}UL" for n, call in ioctls().items()}

def failed_asserts(target: str, conditions: dict[str, str]) -> set[str]:
  src = INCLUDES + "".join(f'_Static_assert({cond}, "{name}");\n' for name, cond in conditions.items())
  out = zig_cc(target, "-c", "-ferror-limit=0", source=src)
  bad = {m.decode() for m in re.findall(rb"static assertion failed[^:]*: ([^\n]+)", out.stderr)}
  if out.returncode and not bad: raise AssertionError(out.stderr.decode())
  return bad

def fill(cls: type[c.Struct], values: Any) -> tuple[c.Struct, str]:
  """The struct with a different value in every integer field, and the C initialiser that must give the same bytes."""
  obj, init, end = cls(), [], 0
  for cname, name, typ, off in fields(cls):
    if off < end: continue  # a later member of a union
    end = off + ctypes.sizeof(typ)
    if is_int(typ):
      v = -next(values) if is_signed(typ) else 2**(8*ctypes.sizeof(typ)) - next(values)
      setattr(obj, name, v)
      init.append(f".{cname} = {v}" + ("" if v < 0 else "ULL"))
    elif issubclass(typ, c.Struct):
      inner, text = fill(typ, values)
      setattr(obj, name, inner)
      init.append(f".{cname} = {text}")
  return obj, "{ " + ", ".join(init) + " }"

@functools.cache
def preprocessed(*args: str) -> str:
  with tempfile.TemporaryDirectory() as tmp:
    out = zig_cc(TARGETS[0], "-E", *args, source="#include <drm/msm_drm.h>\n", out=(dst:=f"{tmp}/abi.i"))
    if out.returncode: raise AssertionError(out.stderr.decode())
    return pathlib.Path(dst).read_text()

@unittest.skipUnless(importlib.util.find_spec("ziglang"), "the C compiler and kernel headers come from: pip install ziglang==0.17.1")
class TestMSMDRMABI(unittest.TestCase):
  def test_every_claim_holds_in_c(self):
    claims = asserts()
    self.assertGreater(len(claims), 500)
    for target in TARGETS:
      with self.subTest(target=target): self.assertEqual(failed_asserts(target, claims), set())

  def test_a_false_claim_is_found(self):
    for kind in ("sizeof ", "offset ", "size ", "sign ", "constant ", "ioctl "):
      name, cond = next((n, c) for n, c in asserts().items() if n.startswith(kind))
      left, right = cond.rsplit(" == ", 1)
      self.assertEqual(failed_asserts(TARGETS[0], {name: f"{left} == {right} + 1"}), {name})

  def test_filled_structs_have_the_bytes_c_gives_them(self):
    magic = b"msm-drm-abi-test"
    objs = [(s, *fill(cls, itertools.count(1))) for s, cls in structs().items()]
    members = "\n".join(f"  struct {s} m_{s} __attribute__((aligned(16)));" for s, _, _ in objs)
    src = f"{INCLUDES}const struct {{\n  char magic[16];\n{members}\n}} all = {{ {{ {', '.join(map(str, magic))} }},\n" + \
      ",\n".join(init for _, _, init in objs) + " };\n"
    for target in TARGETS:
      with tempfile.TemporaryDirectory() as tmp:
        built = zig_cc(target, "-c", source=src, out=(obj_path:=f"{tmp}/abi.o"))
        self.assertEqual(built.returncode, 0, built.stderr.decode())
        data = pathlib.Path(obj_path).read_bytes()
      pos = data.index(magic) + len(magic)
      for s, obj, _ in objs:
        with self.subTest(target=target, struct=s): self.assertEqual(bytes(obj).hex(), data[pos:pos+ctypes.sizeof(obj)].hex())
        pos += (ctypes.sizeof(obj) + 15) // 16 * 16

  def test_nothing_of_the_driver_header_is_missing(self):
    text, defines = preprocessed("-P"), preprocessed("-dM")
    in_header = {n: body for n, body in re.findall(r"struct\s+(drm_msm_\w+)\s*\{(.*?)\n\};", text, re.S)}
    self.assertGreater(len(in_header), 15)
    for s, body in in_header.items():
      want = re.findall(r"(\w+)(?:\[\w+\])?;", body)
      self.assertEqual([cname for cname, *_ in fields(structs()[s])], want, s)
    names = set(re.findall(r"^#define ((?:__)?MSM_\w+|DRM_MSM_\w+|DRM_IOCTL_MSM_\w+) \S", defines, re.M))
    self.assertGreater(len(names), 100)
    self.assertEqual({n for n in names if not hasattr(msm_drm, n)}, set())
    self.assertLessEqual(GENERIC_IOCTLS, set(ioctls()))

  def test_a_call_sends_the_filled_struct(self):
    with patch("fcntl.ioctl", return_value=0) as sys_ioctl:
      out = msm_drm.DRM_IOCTL_MSM_GEM_NEW(7, size=1 << 20, flags=msm_drm.MSM_BO_WC)
    self.assertEqual(sys_ioctl.call_args.args[:1], (7,))
    self.assertIs(sys_ioctl.call_args.args[2], out)
    self.assertEqual(bytes(out), (1 << 20).to_bytes(8, "little") + (0x20000).to_bytes(4, "little") + bytes(4))

@unittest.skipUnless((ROOT/"autogen.sh").exists() and importlib.util.find_spec("ziglang"), "autogen.sh and ziglang are not in this tree")
class TestAutogen(unittest.TestCase):
  def check(self, root: pathlib.Path) -> subprocess.CompletedProcess[str]:
    # the compiler and tinygrad this test imported, wherever they came from
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([str(root/"autogen.sh"), "--check"], capture_output=True, text=True, env=env)

  def copy(self, tmp: str, edit) -> pathlib.Path:
    (dst:=pathlib.Path(tmp)/"tinygrad/runtime/autogen").mkdir(parents=True)
    shutil.copy(ROOT/"autogen.sh", tmp)
    (dst/"msm_drm.py").write_text(edit((ROOT/"tinygrad/runtime/autogen/msm_drm.py").read_text()))
    return dst/"msm_drm.py"

  def test_the_committed_file_is_what_the_generator_makes(self):
    out = self.check(ROOT)
    self.assertEqual(out.returncode, 0, out.stderr)

  def test_drift_is_reported_and_not_repaired(self):
    with tempfile.TemporaryDirectory() as tmp:
      path = self.copy(tmp, lambda s: s.replace("MSM_BO_WC = 0x00020000", "MSM_BO_WC = 0x00010000"))
      before = path.read_text()
      out = self.check(pathlib.Path(tmp))
      self.assertEqual(out.returncode, 1)
      self.assertIn("+MSM_BO_WC = 0x00020000", out.stderr)
      self.assertIn("run ./autogen.sh", out.stderr)
      self.assertEqual(path.read_text(), before)

  def test_an_unpinned_header_is_refused(self):
    with tempfile.TemporaryDirectory() as tmp:
      self.copy(tmp, str)
      script = pathlib.Path(tmp)/"autogen.sh"
      script.write_text(re.sub(r'("msm_drm\.h": ")[0-9a-f]{8}', r"\g<1>00000000", script.read_text()))
      out = self.check(pathlib.Path(tmp))
      self.assertEqual(out.returncode, 1)
      self.assertRegex(out.stderr, "msm_drm.h of ziglang .* pinned is 00000000")

  def test_the_file_names_no_machine(self):
    self.assertEqual(re.findall(r"""["'\s(]/\w+/.*""", (ROOT/"tinygrad/runtime/autogen/msm_drm.py").read_text()), [])

if __name__ == "__main__": unittest.main()
