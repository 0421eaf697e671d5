"""`dev wheel`: the drop-in wheel, which is the published tinygrad wheel with the series' changes to tinygrad/ and a local version number."""
from __future__ import annotations
import base64, hashlib, os, pathlib, zipfile
from stack import env, series as ser, tree
from stack.env import Problem, ROOT, TREE, output_folder
from stack.series import Series, git, out

STAMP = (2026, 8, 25, 0, 0, 0)  # of every file in the wheel, so that equal content gives an equal wheel

def version(series: Series) -> str: return f"{series.base}+msm.{series.release}"

def record_line(name: str, data: bytes) -> str:
  return f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"

def changed_files(base: str, head: str) -> dict[str, bytes | None]:
  """Files below tinygrad/ that `head` changes against `base`: path -> content, None if it is removed."""
  paths = out(git(TREE, "diff", "--name-only", "--no-renames", base, head, "--", "tinygrad")).splitlines()
  removed = set(out(git(TREE, "diff", "--name-only", "--no-renames", "--diff-filter=D", base, head, "--", "tinygrad")).splitlines())
  return {p: None if p in removed else git(TREE, "cat-file", "blob", f"{head}:{p}").stdout for p in paths}

def metadata(text: str, series: Series) -> str:
  """METADATA of the published wheel, with this version, and a summary and a description that say what this is: tinygrad's authors did not make it."""
  ours = f"Version: {version(series)}\nSummary: tinygrad {series.base} with Adreno 630 support through MSM DRM and KGSL; no release of tinygrad's"
  head, sep, _ = text.partition("\n\n")
  lines = [line for line in head.splitlines() if line.split(":")[0] not in ("Summary", "Author", "Author-email", "Home-page", "Project-URL")]
  lines = [ours if line.startswith("Version: ") else line for line in lines]
  if ours not in lines: raise Problem("the published wheel's METADATA has no Version line; is base.txt right?")
  return "\n".join(lines) + (sep or "\n\n") + (
    f"tinygrad {series.base} (https://github.com/tinygrad/tinygrad) and a series of changes, which its authors neither made nor reviewed.\n"
    "Report what goes wrong to the repository or person that you had this wheel from, not to tinygrad.\n\n"
    "`python3 -m tinygrad.runtime.support.qcom_doctor` says what a machine lacks, and tests its GPU.\n")

def files(python: str | os.PathLike[str]) -> tuple[Series, dict[str, bytes]]:
  """(series, wheel content by name, RECORD last)."""
  series = ser.load()
  base, commits = tree.history(series, python)
  old, new = f"tinygrad-{series.base}.dist-info/", f"tinygrad-{version(series)}.dist-info/"
  with zipfile.ZipFile(env.base_archives(python)[1]) as z: content = {n.replace(old, new): z.read(n) for n in z.namelist() if not n.endswith("/")}
  for path, data in changed_files(base, commits[-1] if commits else base).items():
    if data is None: content.pop(path, None)
    else: content[path] = data
  content[new + "METADATA"] = metadata(content[new + "METADATA"].decode(), series).encode()
  content[new + "licenses/LICENSE.msm"] = (ROOT / "LICENSE").read_bytes()
  record = new + "RECORD"
  content.pop(record)
  listing = "".join(record_line(n, d) for n, d in sorted(content.items())) + f"{record},,\n"
  return series, {**dict(sorted(content.items())), record: listing.encode()}

def build(dest: pathlib.Path, python: str | os.PathLike[str] = env.PYTHON) -> pathlib.Path:
  """Writes the wheel to folder `dest`, whole or not at all. Returns its path."""
  series, content = files(python)
  path = dest / f"tinygrad-{version(series)}-py3-none-any.whl"
  with env.written_whole(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as z:
    for name, data in content.items():
      info = zipfile.ZipInfo(name, STAMP)
      info.external_attr, info.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
      z.writestr(info, data)
  return path

def main(args: list[str]) -> int:
  """dev wheel [DIR]"""
  if len(args) > 1: raise Problem("usage: dev wheel [DIR]")
  print(build(output_folder(pathlib.Path(args[0]) if args else ROOT / "dist")))
  return 0
