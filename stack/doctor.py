"""`dev doctor`: the report of tinygrad.runtime.support.qcom_doctor, which a wheel has too, in the environment of `dev run`."""
from __future__ import annotations
import subprocess
from stack import env
from stack.env import PYTHON, Problem

def main(args: list[str]) -> int:
  """dev doctor [--json]. Exit status 0 if nothing needs to be done, 1 otherwise."""
  if args not in ([], ["--json"]): raise Problem("usage: dev doctor [--json]")
  return subprocess.run([str(PYTHON), "-m", "tinygrad.runtime.support.qcom_doctor", *args], env=env.environment(compiler=False)).returncode
