#!/usr/bin/env bash
# Regenerates tinygrad/runtime/autogen/msm_drm.py with tinygrad's own binding generator from pinned Linux UAPI headers.
#   ./autogen.sh           write the file
#   ./autogen.sh --check   write nothing; exit 1 with a diff if the committed file is not what the generator makes
# Needs tinygrad on PYTHONPATH (or the tree that ./dev builds), the pinned ziglang, and libclang (package libclang, or LIBCLANG_PATH=<file>).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$([ -x "$here/.venv/bin/python" ] && echo "$here/.venv/bin/python" || echo python3)}
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$here/build/tree"
exec "$python" - "$here/tinygrad/runtime/autogen/msm_drm.py" "$@" << 'PY'
import contextlib, difflib, hashlib, importlib.metadata, importlib.util, io, os, pathlib, sys

ZIG = "0.17.1"
HEADERS = {"drm.h": "4f7cd5a40d86d87669a0a310fe3867d0ef5be92fd32990a594500a48e41c9ab5",
           "msm_drm.h": "c0226c5cf17e478f3111e1b5270878e860970aca9868201409964721e5d4606a"}
# drm.h is mostly legacy DRI1 and display interfaces; a render client needs these names of it.
GENERIC = r"VERSION|GET_CAP|GEM_CLOSE|PRIME_\w+|SYNCOBJ_\w+"
PATTERNS = [r"drm_msm_", r"(__)?MSM_", r"DRM_MSM_", r"DRM_IOCTL_MSM_", r"DRM_IO(R|W|WR)?$", r"DRM_IOCTL_BASE$", rf"DRM_IOCTL_({GENERIC})$",
            r"drm_(version|get_cap|gem_close|prime_handle|syncobj_\w+)$", r"DRM_COMMAND_", r"DRM_CAP_", r"DRM_SYNCOBJ_", r"DRM_(CLOEXEC|RDWR)$"]

def find(package: str) -> pathlib.Path | None:
  try: spec = importlib.util.find_spec(package)
  except ModuleNotFoundError: return None
  return pathlib.Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None

def generate() -> str:
  if (zig:=find("ziglang")) is None or (v:=importlib.metadata.version("ziglang")) != ZIG:
    sys.exit(f"autogen.sh: needs ziglang {ZIG}, found {v if zig else 'none'}; pip install ziglang=={ZIG}")
  if find("tinygrad") is None: sys.exit("autogen.sh: no tinygrad; put it on PYTHONPATH or build the tree with ./dev tree")
  # a bundled libclang spares the user an LLVM installation; the bindings look at this variable first
  if not os.environ.get("LIBCLANG_PATH") and (native:=find("clang.native")):
    os.environ["LIBCLANG_PATH"] = next((str(p) for n in ("libclang.so", "libclang.dylib") if (p:=native/n).exists()), "")
  include = zig/"lib/libc/include"
  for name, digest in HEADERS.items():
    if (got:=hashlib.sha256((include/"any-linux-any/drm"/name).read_bytes()).hexdigest()) != digest:
      sys.exit(f"autogen.sh: {name} of ziglang {ZIG} has sha256 {got}, pinned is {digest}; reinstall ziglang or review and re-pin")
  from tinygrad.runtime.support import autogen
  try: autogen.clang.clang_getClangVersion
  except AttributeError as e: sys.exit(f"autogen.sh: {e}; pip install libclang, or set LIBCLANG_PATH")
  dirs = ["any-linux-any", "aarch64-linux-any", "aarch64-linux-musl", "generic-musl"]
  with contextlib.redirect_stdout(log:=io.StringIO()):
    out = autogen.gen("msm_drm", [include/"any-linux-any/drm"/h for h in HEADERS], patterns=PATTERNS,
                      args=["-target", "aarch64-linux-musl", "-nostdinc", *(f"-I{include/d}" for d in dirs)],
                      prolog=["import os", f"# from drm/drm.h and drm/msm_drm.h, Linux 7.2 UAPI as in ziglang {ZIG}; regenerate with ./autogen.sh"],
                      # the fcntl flags are octal in C, which the generator cannot translate
                      rules=[(r"\bO_(RDWR|CLOEXEC)\b", r"os.O_\1")])
  if log.getvalue(): sys.exit(f"autogen.sh: the generator dropped a definition; widen PATTERNS or exclude it\n{log.getvalue()}")
  return out + "\n"

path, args = pathlib.Path(sys.argv[1]), sys.argv[2:]
if args not in ([], ["--check"]): sys.exit("usage: autogen.sh [--check]")
new, old = generate(), path.read_text() if path.exists() else ""
if not args: path.write_text(new)
elif new != old:
  sys.stderr.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), "committed", "generated", n=1))
  sys.exit(f"autogen.sh: {path.name} is not what the headers give; run ./autogen.sh and commit the result")
PY
