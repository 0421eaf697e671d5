"""The unmodified tinygrad 0.14.0 and how to run it on the KGSL model."""
from __future__ import annotations
import os, pathlib, zipfile
import pytest

def base_archives() -> tuple[pathlib.Path, pathlib.Path]:
  """(sdist, wheel) of tinygrad 0.14.0 as set-up downloaded them, or where TINYGRAD_BASE_DIR says. Without them the test is skipped."""
  where = pathlib.Path(os.environ.get("TINYGRAD_BASE_DIR") or pathlib.Path(__file__).resolve().parents[2] / "build" / "dl")
  sdist, wheel = where / "tinygrad-0.14.0.tar.gz", where / "tinygrad-0.14.0-py3-none-any.whl"
  if not sdist.is_file() or not wheel.is_file(): pytest.skip(f"tinygrad 0.14.0's sdist and wheel are not in {where}; ./dev tree downloads them")
  return sdist, wheel

def environment(folder: pathlib.Path) -> dict[str, str]:
  """Unpacks the wheel into `folder`; what a child process needs to run it, driver included, on the KGSL model."""
  with zipfile.ZipFile(base_archives()[1]) as z: z.extractall(folder)
  path = [str(pathlib.Path(__file__).resolve().parent / "pristine"), str(folder), os.environ.get("PYTHONPATH", "")]
  return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "DEV": "MOCK+QCOM:IR3", "PARALLEL": "0"}
