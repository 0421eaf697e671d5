"""Build backend of `pip install .`: the drop-in wheel of stack/wheel.py. The unmodified tinygrad is downloaded by sha256 during the build."""
from __future__ import annotations
import pathlib, sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from stack import wheel
from stack.env import Problem

def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
  try: return wheel.build(pathlib.Path(wheel_directory), sys.executable).name
  except Problem as e: raise SystemExit(f"tinygrad+msm: {e}") from e

def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
  raise NotImplementedError("there is no sdist of this stack: build the wheel from a clone (`pip wheel --no-deps .` or `./dev wheel`)")
