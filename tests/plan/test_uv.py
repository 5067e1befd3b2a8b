"""How uv is called."""

from pathlib import Path

import pytest

from awsddp.plan.requirements import read_requirements
from tests.support.resolving import choose, lock


def test_the_users_settings_of_uv_are_ignored(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes install with pip, which does not read them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path("config").absolute()))
    file = lock(index)
    Path("others.txt").write_text("tiny==9\n")
    monkeypatch.setenv("UV_CONSTRAINT", str(Path("others.txt").absolute()))
    for folder in (Path("config/uv"), Path()):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "uv.toml").write_text("what uv cannot read")
    assert choose("tiny\n") == (("tiny==1.0",), "")
    assert "tiny==1.0" in read_requirements(file).lines
