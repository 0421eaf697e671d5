"""Kernel ABI facts for the kernel models, obtained from a C compiler.

  python layouts.py                      rewrite msm.json from the UAPI headers shipped in the pinned ziglang package
  python layouts.py --check              compare msm.json with those headers; exit 1 and name the differences
  python layouts.py --kgsl HEADER --source TEXT    rewrite kgsl.json from a downstream msm_kgsl.h (no package ships one)
  python layouts.py --kgsl HEADER --check          compare kgsl.json with that header

JSON: "structs": {name: {"size": bytes, "fields": {name: [offset, size]}, "signed": [fields]}}, "constants": {name: value}, "ioctls": {name: number}.
Fields of anonymous unions appear under their own names. No number is written by hand: clang's AST and preprocessor supply the names, and a
compiled object holds sizeof, offsetof and macro values. Nothing is executed, so aarch64 (where the GPU lives) and x86_64 (where the virtual GPU
runs) are both compiled, and a difference between them is an error.
"""
from __future__ import annotations
import argparse, importlib.metadata, importlib.util, json, pathlib, re, struct, subprocess, sys, tempfile

HERE = pathlib.Path(__file__).parent
ZIG_VERSION = "0.17.1"
TARGETS = ("aarch64-linux-musl", "x86_64-linux-musl")
MAGIC = b"qcom-abi-facts\0\0"

MSM_INCLUDE = "#include <drm/msm_drm.h>\n"
# drm.h also describes legacy DRI1 and display interfaces that no render client uses.
MSM_RECORDS = r"drm_msm_\w+|drm_version|drm_gem_close|drm_prime_handle|drm_get_cap|drm_syncobj_\w+"
MSM_MACROS = (r"MSM_\w+|DRM_MSM_\w+|DRM_CAP_\w+|DRM_SYNCOBJ_\w+|DRM_IOCTL_BASE|DRM_COMMAND_BASE|DRM_COMMAND_END|DRM_CLOEXEC|DRM_RDWR|"
              r"DRM_IOCTL_(?:MSM_\w+|VERSION|GET_CAP|GEM_CLOSE|PRIME_\w+|SYNCOBJ_\w+)")
# The UAPI export step strips the kernel's annotation macros; a header taken from a kernel tree still has them.
KGSL_INCLUDE = "#include <stddef.h>\n#include <stdint.h>\n#define __user\n#include \"msm_kgsl.h\"\n"
KGSL_RECORDS, KGSL_MACROS = r"kgsl_\w+", r"KGSL_\w+|IOCTL_KGSL_\w+"

SIGNED = {"char", "signed char", "short", "int", "long", "long long"}

class LayoutError(RuntimeError):
  """A header or compiler that does not give the facts asked for; the message names cause and remedy."""

def ziglang() -> pathlib.Path:
  """Directory of the installed ziglang package. LayoutError if it is absent or not the pinned version."""
  spec = importlib.util.find_spec("ziglang")
  if spec is None or spec.origin is None: raise LayoutError(f"the ziglang package is not installed; pip install ziglang=={ZIG_VERSION}")
  if (found:=importlib.metadata.version("ziglang")) != ZIG_VERSION:
    raise LayoutError(f"ziglang {found} is installed, but the layouts are pinned to the headers in {ZIG_VERSION}; pip install ziglang=={ZIG_VERSION}")
  return pathlib.Path(spec.origin).parent

def zig(*args: str, ok_to_fail: bool = False) -> subprocess.CompletedProcess[str]:
  out = subprocess.run([sys.executable, "-m", "ziglang", *args], capture_output=True, text=True)
  if out.returncode and not ok_to_fail: raise LayoutError(f"zig {' '.join(args[:3])} failed; is the header complete?\n{out.stderr[-2000:]}")
  return out

def system_dirs(target: str) -> list[str]:
  """The directories `zig cc -target` searches; plain clang (needed for the AST dump, which makes no object) does not know them."""
  lib, arch = ziglang()/"lib", target.split("-")[0]
  names = [f"{arch}-linux-musl", "generic-musl", f"{'x86' if arch == 'x86_64' else arch}-linux-any", "any-linux-any"]
  return ["-isystem", str(lib/"include")] + [a for n in names for a in ("-isystem", str(lib/"libc"/"include"/n))]

def records(ast: dict, pattern: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
  """Field names, and the signed ones among them, of each complete struct whose name matches."""
  fields: dict[str, list[str]] = {}
  signed: dict[str, list[str]] = {}
  for node in ast["inner"]:
    if node["kind"] != "RecordDecl" or not node.get("completeDefinition") or not re.fullmatch(pattern, node.get("name", "")): continue
    anonymous = [n for n in node.get("inner", []) if n["kind"] == "RecordDecl" and "name" not in n]
    scalars = [n for r in [node, *anonymous] for n in r.get("inner", []) if n["kind"] == "FieldDecl" and "name" in n]
    if any(n.get("isBitfield") for n in scalars): raise LayoutError(f"struct {node['name']} has a bit-field, which has no byte offset")
    fields[node["name"]] = [n["name"] for n in node.get("inner", []) if n["kind"] in ("FieldDecl", "IndirectFieldDecl") and "name" in n]
    signed[node["name"]] = [n["name"] for n in scalars if (t:=n["type"]).get("desugaredQualType", t["qualType"]) in SIGNED]
  return dict(sorted(fields.items())), signed

def macros(source: str, flags: list[str], pattern: str) -> list[str]:
  return re.findall(rf"^#define ({pattern}) \S", zig("clang", *flags, "-E", "-dM", source).stdout, re.M)

def constants_of(source: pathlib.Path, text: str, names: list[str], flags: list[str]) -> list[str]:
  """Those of `names` the compiler accepts as integer constant expressions."""
  first = text.count("\n") + 1
  probe = source.with_name("probe.c")
  probe.write_text(text + "".join(f"enum {{ probe_{i} = (__typeof__(+({n})))({n}) }};\n" for i, n in enumerate(names)))
  log = zig("clang", *flags, "-fsyntax-only", "-w", "-ferror-limit=0", str(probe), ok_to_fail=True).stderr
  bad = {int(line) - first for line in re.findall(r"probe\.c:(\d+):\d+: error", log)}
  return [n for i, n in enumerate(names) if i not in bad]

def values(source: pathlib.Path, text: str, exprs: list[str], flags: list[str], target: str) -> list[int]:
  """Each expression's value, read from the bytes of a compiled object: works for a target this machine cannot run."""
  body = ",\n".join(f"  (long long)({e})" for e in exprs)
  source.write_text(f"{text}const struct {{ char magic[{len(MAGIC)}]; long long v[{len(exprs)}]; }} facts = {{ {{ "
                    + ",".join(map(str, MAGIC)) + f" }}, {{\n{body}\n}} }};\n")
  obj = source.with_suffix(".o")
  zig("cc", "-target", target, *flags, "-w", "-c", str(source), "-o", str(obj))
  data = obj.read_bytes()
  if (at:=data.find(MAGIC)) < 0: raise LayoutError(f"no facts in the object compiled for {target}")
  return list(struct.unpack_from(f"<{len(exprs)}q", data, at + len(MAGIC)))

def extract(text: str, record_pattern: str, macro_pattern: str, include: list[str]) -> dict:
  """Layouts and values of everything in the preprocessed `text` that matches. LayoutError if the targets disagree."""
  flags, found = [f"-I{d}" for d in include], []
  with tempfile.TemporaryDirectory() as tmp:
    for target in TARGETS:
      (source:=pathlib.Path(tmp)/"facts.c").write_text(text)
      plain = ["-target", target, "-nostdinc", *flags, *system_dirs(target)]
      ast = json.loads(zig("clang", *plain, "-fsyntax-only", "-w", "-Xclang", "-ast-dump=json", str(source)).stdout)
      fields, signed = records(ast, record_pattern)
      names = macros(str(source), plain, macro_pattern)
      names += [c["name"] for n in ast["inner"] if n["kind"] == "EnumDecl" for c in n["inner"] if re.fullmatch(macro_pattern, c.get("name", ""))]
      names = constants_of(source, text, sorted(set(names)), plain)
      exprs = [e for s, fs in fields.items() for e in [f"sizeof(struct {s})",
        *(x for f in fs for x in (f"__builtin_offsetof(struct {s}, {f})", f"sizeof(((struct {s}*)0)->{f})"))]]
      got = iter(values(source, text, exprs + names, flags, target))
      structs = {s: {"size": next(got), "fields": {f: [next(got), next(got)] for f in fs}, "signed": signed[s]} for s, fs in fields.items()}
      vals = {n: next(got) for n in names}
      is_ioctl = re.compile(r"(DRM_IOCTL_|IOCTL_KGSL_)(?!BASE)")
      found.append({"structs": structs, "constants": {n: v for n, v in vals.items() if not is_ioctl.match(n)},
                    "ioctls": {n: v for n, v in vals.items() if is_ioctl.match(n)}})
  if found[0] != found[1]: raise LayoutError(f"{' and '.join(TARGETS)} disagree: {differences(found[0], found[1])}")
  return found[0]

def differences(a: dict, b: dict) -> list[str]:
  return [f"{part}.{n}: {a[part].get(n)} != {b[part].get(n)}" for part in ("structs", "constants", "ioctls")
          for n in sorted({*a[part], *b[part]}) if a[part].get(n) != b[part].get(n)]

def write(path: pathlib.Path, facts: dict, source: str) -> None:
  parts = [f'  "source": {json.dumps(source)}']
  for part in ("structs", "constants", "ioctls"):
    parts.append(f'  "{part}": {{\n' + ",\n".join(f"    {json.dumps(n)}: {json.dumps(v)}" for n, v in facts[part].items()) + "\n  }")
  path.write_text("{\n" + ",\n".join(parts) + "\n}\n")

def main() -> int:
  ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  ap.add_argument("--check", action="store_true", help="compare instead of writing")
  ap.add_argument("--kgsl", metavar="HEADER", type=pathlib.Path, help="a downstream msm_kgsl.h")
  ap.add_argument("--source", help="where HEADER came from: repository, commit, path")
  args = ap.parse_args()
  try:
    if args.kgsl:
      if args.check == bool(args.source): ap.error("--kgsl needs --source (repository, commit, path) or --check")
      if args.kgsl.name != "msm_kgsl.h" or not args.kgsl.is_file(): ap.error("--kgsl wants the path of a file named msm_kgsl.h")
      path, facts = HERE/"kgsl.json", extract(KGSL_INCLUDE, KGSL_RECORDS, KGSL_MACROS, [str(args.kgsl.resolve().parent)])
    else:
      path, facts = HERE/"msm.json", extract(MSM_INCLUDE, MSM_RECORDS, MSM_MACROS, [])
    if not args.check:
      write(path, facts, args.source or f"ziglang {ZIG_VERSION} lib/libc/include/any-linux-any/drm/msm_drm.h, drm.h (Linux 7.2 UAPI)")
      return 0
    if not (diff:=differences(json.loads(path.read_text()), facts)): return 0
    print(f"{path.name} differs from the header (committed != compiled):", *diff, sep="\n  ", file=sys.stderr)
  except LayoutError as e: print(f"layouts.py: {e}", file=sys.stderr)
  return 1

if __name__ == "__main__": sys.exit(main())
