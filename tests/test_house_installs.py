"""No page and no message installs awsddp by a name or from a path that another user may control."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    *ROOT.glob("*.*"),
    *(ROOT / "Dockerfile", ROOT / "Makefile"),
    *(
        path
        for folder in ("awsddp", "docs", "templates", "tools", "train")
        for path in (ROOT / folder).rglob("*.*")
    ),
    *(ROOT / ".github").rglob("*.*"),
]
_FROM_AN_INDEX = re.compile(
    r"\b(?:pip3?|pipx|uv|uvx|poetry|conda)\b(?! (?:tool )?uninstall)[^#\n`]*[\s'\"=]awsddp(?:\[[\w,]+\])?"
    r"(?=['\"`\s=<>~]|$)(?! @)"
)


def find_installs_by_name(text: str) -> list[str]:
    """Return the lines that install the package awsddp by its name."""
    return [line.strip() for line in text.splitlines() if _FROM_AN_INDEX.search(line)]


@pytest.mark.parametrize(
    "line",
    [
        "    pipx install awsddp",
        '"upgrade: pip install -U awsddp"',
        "run: pip install 'awsddp[local]==1.0'",
        "or: `uvx awsddp`",
        "uv tool install awsddp",
    ],
)
def test_a_line_that_installs_by_name_is_detected(line: str) -> None:
    assert find_installs_by_name(line)


def test_no_text_installs_awsddp_by_its_unregistered_name() -> None:
    texts = {
        path: path.read_text(errors="replace") for path in TEXTS if path.is_file() and path.suffix != ".pyc"
    }
    read = {str(path.relative_to(ROOT)) for path in texts}
    assert {"README.md", "docs/local.md", "awsddp/nodes/login.py", "templates/prepare.py"} <= read
    assert {path: lines for path, text in texts.items() if (lines := find_installs_by_name(text))} == {}
    assert [
        path for path, text in texts.items() if re.search(r"(?:-o\s*|-\w*o |> )/tmp/\S+\.(deb|rpm|sh)", text)
    ] == []
