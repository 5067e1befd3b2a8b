"""The files from which nodes build an environment."""

from pathlib import Path

import pytest

from awsddp.job import environment


@pytest.mark.parametrize(
    ("line", "shows"),
    [
        ("--index-url https://bob:secret@host/simple", True),
        ("git+https://me:token@host/org/lib", True),
        ("--index-url https://${USER}:${TOKEN}@host/simple", False),
        ("git+https://git@host/org/lib", False),
        ("six==1.16.0", False),
    ],
)
def test_a_password_in_a_synced_requirements_file_is_detected(
    tmp_path: Path, line: str, *, shows: bool
) -> None:
    file = tmp_path / "project" / "requirements.txt"
    file.parent.mkdir()
    file.write_text(f"six\n{line}\n")
    assert environment._shows_password(file, file.parent) == shows
    assert not environment._shows_password(file, tmp_path / "another")
