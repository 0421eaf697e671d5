"""docs/kernel-rules.md says what the tests hold, and nothing else."""
from __future__ import annotations
import ast, pathlib
import pytest
from test.virtual import kernel_rules, test_kgsl_model, test_msm_model, test_vm_bind

HERE = pathlib.Path(__file__).resolve().parent

def test_every_row_of_the_tables_is_listed() -> None:
  """The page is made of the source; here the tables themselves are counted. One row stands for the sizes of IGT's msm_submitoverhead."""
  listed = kernel_rules.rows()
  for module in (test_msm_model, test_vm_bind, test_kgsl_model):
    names = {(r.source, r.what) for r in listed if r.file == pathlib.Path(module.__file__ or "").name}
    rules = [r for r in module.RULES if r.source != "IGT msm_submitoverhead"]
    assert {(r.source, r.what) for r in rules} == {n for n in names if n[0] != "IGT msm_submitoverhead"}
    assert len(rules) > 35

def test_every_test_that_is_named_exists() -> None:
  for o in kernel_rules.OTHERS:
    for name in o.tests:
      file, function = name.split("::")
      assert function in {n.name for n in ast.parse((HERE / file).read_text()).body if isinstance(n, ast.FunctionDef)}, name

def test_the_page_is_current() -> None:
  page = HERE.parents[1] / "docs" / "kernel-rules.md"
  if not page.is_file(): pytest.skip("docs/ is in the stack's own repository only")
  assert page.read_text() == kernel_rules.page(), "run: PYTHONPATH=. python -m test.virtual.kernel_rules > docs/kernel-rules.md"
