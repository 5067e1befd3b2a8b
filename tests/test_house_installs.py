"""No page and no message has a line that installs what somebody else may have put there."""

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


def installs_by_name(text: str) -> list[str]:
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
def test_a_line_that_installs_by_name_is_seen(line: str) -> None:
    assert installs_by_name(line)


def test_nothing_installs_awsddp_by_a_name_that_is_free_for_anybody_to_take() -> None:
    texts = {
        path: path.read_text(errors="replace") for path in TEXTS if path.is_file() and path.suffix != ".pyc"
    }
    read = {str(path.relative_to(ROOT)) for path in texts}
    assert {"README.md", "docs/local.md", "awsddp/nodes/login.py", "templates/prepare.py"} <= read
    assert {path: lines for path, text in texts.items() if (lines := installs_by_name(text))} == {}
    assert [
        path for path, text in texts.items() if re.search(r"(?:-o\s*|-\w*o |> )/tmp/\S+\.(deb|rpm|sh)", text)
    ] == []
