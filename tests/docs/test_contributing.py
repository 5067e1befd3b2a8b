"""docs/contributing.md names every file that a new verb or instance type touches: tried on a copy."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_EXAMPLE = re.compile(
    r"^(?:New file `(?P<new>[^`]+)`|In `(?P<old>[^`]+)`, below `(?P<line>[^`]+)`):"
    r"\n\n```(?:python)?\n(?P<code>.*?)```",
    re.M | re.S,
)


def read_section(title: str) -> str:
    return (
        (ROOT / "docs" / "contributing.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    )


def apply_section(title: str, top: Path) -> set[str]:
    """Do what the section says in the tree below `top`, and return the files it touches."""
    touched = set()
    for example in _EXAMPLE.finditer(read_section(title)):
        path = top / (example["new"] or example["old"])
        touched.add(str(path.relative_to(top)))
        if example["new"]:
            assert not path.exists()
            path.write_text(example["code"])
        else:
            before, line, after = path.read_text().partition(example["line"] + "\n")
            assert line, f"{path} has no line {example['line']}"
            path.write_text(before + line + example["code"] + after)
    return touched


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for part in ("awsddp", "train", "templates", "tests/support"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/__init__.py").touch()
    return tmp_path


def run_python(top: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(top), "AWSDDP_HOME": str(top / "home")}
    return subprocess.run([sys.executable, *arguments], cwd=top, env=environ, capture_output=True, text=True)


def test_a_verb_touches_the_files_that_are_named(copy: Path) -> None:
    assert apply_section("A verb", copy) == {
        "awsddp/cluster/hello.py",
        "awsddp/settings/verbs.py",
        "awsddp/cli/hello.py",
        "awsddp/cli/main.py",
        "awsddp/model/documents.py",
        "tests/support/schema.py",
    }
    process = run_python(copy, "-m", "awsddp", "hello", "-c", "mine", "--json")
    assert json.loads(process.stdout) == {"schema": 1, "greeting": "hello, mine"}, process.stderr
    assert json.loads(process.stderr)["text"] == "greeting"
    assert "Greet the cluster." in run_python(copy, "-m", "awsddp", "--help").stdout
    program = (
        "from awsddp.cli import command_line\n"
        "from tests.support.schema import DOCUMENTS\n"
        "command_line.COMMAND.options = command_line.Globals(cluster='mine')\n"
        "print(command_line.with_global_options('awsddp hello'), DOCUMENTS['hello'].__name__)"
    )
    assert run_python(copy, "-c", program).stdout == "awsddp -c mine hello HelloDocument\n"


def test_an_instance_type_touches_the_file_that_is_named(copy: Path) -> None:
    assert apply_section("An instance type", copy) == {"awsddp/compat/types.py"}
    program = (
        "from awsddp.compat import types\n"
        "kind = types.GPU_TYPES['g9.48xlarge']\n"
        "print(kind.gpus, kind.gpu, kind.price_usd_per_hour, types.find_quota(kind.name)[0])"
    )
    assert run_python(copy, "-c", program).stdout.startswith("8 L5 20.0 L-")


def test_a_launcher_touches_the_files_that_are_named(copy: Path) -> None:
    assert apply_section("A launcher", copy) == {
        "awsddp/agent_client/launchers/agent.py",
        "awsddp/agent_client/launchers/__init__.py",
    }
    program = "from awsddp.agent_client import launchers; print(launchers.launcher('agent').__module__)"
    assert run_python(copy, "-c", program).stdout == "awsddp.agent_client.launchers.agent\n"


def test_a_cause_touches_the_file_that_is_named(copy: Path) -> None:
    assert apply_section("A cause", copy) == {"awsddp/agent/diagnosis/causes.py"}
    program = (
        "from awsddp.agent.diagnosis.causes import Evidence, explain\n"
        "error = 'LicenseError: no seat for sim'\n"
        "print(explain(Evidence(1, error)).kind)"
    )
    assert run_python(copy, "-c", program).stdout == "no_license\n"


def test_the_files_that_the_page_names_exist() -> None:
    for page in ("contributing.md", "design.md"):
        text = (ROOT / "docs" / page).read_text()
        for name in re.findall(r"`((?:awsddp|tests|templates|docs|train|tools)/[\w/.]+)`", text):
            assert (ROOT / name).exists() or name.endswith(("hello.py", "agent.py")), f"{page}: {name}"
        for name in re.findall(r"\]\(([\w./]+)\)", text):
            assert (ROOT / "docs" / name).exists(), f"{page}: {name}"
