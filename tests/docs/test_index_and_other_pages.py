"""Every `awsddp ...` line of README and docs is parsed as typed; every key and TOML block of them is valid.

What a line does is tested elsewhere; those that need an account cannot be run here.
"""

import re
import tomllib
from itertools import takewhile
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import click
import pytest

from awsddp import __version__
from awsddp.settings.loader import load
from tests.support.command_lines import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "commands.md"]
CHEAP = "awsddp run train.py --nodes 2 --instance-type g6.xlarge --budget 2"
SVG = "{http://www.w3.org/2000/svg}"


def list_command_lines(text: str) -> set[str]:
    """Return the command lines in the code of a page: of blocks, and between backquotes."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4,}(.*)$", text, re.MULTILINE)
    rows = [
        row.strip().removeprefix("$ ").removeprefix("- run: ")
        for block in blocks
        for row in block.splitlines()
    ]
    rows += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    parts = [part.strip() for row in rows for part in re.split(r"; |&& |, then ", row)]
    return {part for part in parts if re.match(r"(AWS\w+=\S+ )?awsddp [a-z-]", part)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_line_of_a_page_is_parsed(page: Path) -> None:
    wrong = {}
    for line in sorted(list_command_lines(page.read_text(encoding="utf-8"))):
        try:
            parse(line)
        except (click.UsageError, ValueError) as error:
            wrong[line] = str(error)
    assert not wrong


def test_a_line_with_a_wrong_verb_option_or_key_is_found() -> None:
    assert list_command_lines("x `awsddp up --nodes 2` y\n\n    awsddp down   # now\n") == {
        "awsddp up --nodes 2",
        "awsddp down   # now",
    }
    for line in ("awsddp upp", "awsddp up --nods 2", "awsddp status -o cluster.nope=1", "awsddp local begin"):
        with pytest.raises(Exception, match=r"upp|nods|nope|begin"):
            parse(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_toml_block_of_a_page_is_valid(page: Path, tmp_path: Path) -> None:
    for block in re.findall(
        r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        assert tomllib.loads(block)
        (tmp_path / "awsddp.toml").write_text(block)
        load(file=tmp_path / "awsddp.toml", environ={})


def test_the_first_screen_has_the_cheap_command_with_and_without_local_and_fits() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        text = page.read_text(encoding="utf-8")
        head, _, tail = text.partition("\n    ")
        block = [*takewhile(lambda row: row.startswith("    "), f"    {tail}".splitlines())]
        assert "Never run on a real AWS account yet" in head
        assert [f"    {CHEAP} --local", f"    {CHEAP}"] == [row for row in block if " run " in row]
        assert max(map(len, block)) <= 80
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_badges_match_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    badges = re.findall(r"shields\.io/badge/(\S+?)-\w+\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    labels = [unquote(badge).replace("--", "\0").replace("-", " ").replace("_", " ") for badge in badges]
    assert [label.replace("\0", "-") for label in labels] == [
        f"version {__version__} unreleased",
        f"python {package['requires-python'].removeprefix('>=')}+",
        f"license {package['license']}",
        "AWS never run",
    ]
    assert "\n## 0.1.0 (unreleased)" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_recording_is_short_and_small_and_names_no_path_of_its_machine(theme: str) -> None:
    file = ROOT / "docs" / f"recording-{theme}.svg"
    text = file.read_text(encoding="utf-8")
    rows = ["".join(row.itertext()) for row in ElementTree.fromstring(text).iter(f"{SVG}g")]
    assert float(re.findall(r"animation:play ([\d.]+)s", text)[0]) <= 20
    assert file.stat().st_size < 300_000
    assert any("loss 0." in row for row in rows) and any("SIGKILL" in row for row in rows)
    assert any("nothing is left" in row for row in rows)
    for name in ("/tmp", "/home", "/root", Path.home().name + "@", str(ROOT)):
        assert name not in "\n".join(rows)
