from __future__ import annotations
import pathlib, pytest
from test.stack.site import ROOT, Site

@pytest.fixture
def site(tmp_path: pathlib.Path) -> Site:
  if not (ROOT / ".venv" / "requirements.sha256").is_file(): pytest.skip("needs the .venv that `dev` makes")
  return Site(tmp_path / "clone", ROOT / ".venv")
