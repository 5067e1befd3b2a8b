"""Valid command lines, files and environments with one fault each: exit 2 or 3, never a traceback.

The code from the arguments to the context of a verb runs, in this process. The verbs do not: a fault must be
found before the first request.
"""

import contextlib
import io
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awsddp.cli import failures
from awsddp.cli.main import VERBS, cli

NASTY = st.one_of(
    st.sampled_from(
        [
            "$(touch canary)",
            "`touch canary`",
            "; touch canary",
            "| touch canary",
            "&& touch canary",
            "",
            " ",
            "\n",
            "\x1b[31m",
            "-",
            "--",
            "-rf",
            "../../etc",
            "/",
            "~",
            "*",
            "'",
            '"',
            "\\",
            "%s",
            "{}",
            "{rank",
            "}}",
            "{nope}",
            "\u202egnp",
            "é" * 300,
            "a" * 4096,
            "0",
            "-1",
            "1e9",
            "NaN",
            "inf",
            "null",
            "[",
            "[[",
            "true",
            "0x10",
            "9" * 40,
            "\ud800",
            "{init_file}",
        ]
    ),
    st.text(max_size=40),
)
"""Arguments that a shell or a parser may misread."""

NUMBERS = ["--nodes", "--disk", "--world-size", "--nproc-per-node", "--budget"]
TEXTS = ["--instance-type", "--image", "--expires", "--gpus", "--timeout", "--env-var"]
TIMES = ["--expires", "--timeout"]
KEYS = [
    *("cluster.nodes", "cluster.expires", "job.grace", "job.timeout", "network.ssh_cidr", "job.args"),
    "network.jump",
]

# A fault: arguments, a file and variables that are invalid with each NASTY argument.
FAULTS = st.one_of(
    NASTY.filter(lambda text: not _is_valid(text)).map(lambda text: ([text], "", {})),
    st.tuples(st.sampled_from(NUMBERS), NASTY.filter(lambda text: not _is_number(text))).map(
        lambda pair: (["run", "--local", pair[0], pair[1]], "", {})
    ),
    st.tuples(st.sampled_from(["up", "train", "down", "status", "logs", "run"]), NASTY).map(
        lambda pair: ([pair[0], f"--nope{pair[1]}"], "", {})
    ),
    st.tuples(st.sampled_from(TIMES), NASTY.filter(lambda text: not _is_time(text))).map(
        lambda pair: (["run", "--local", f"{pair[0]}={pair[1]}"], "", {})
    ),
    NASTY.filter(lambda text: not _is_name(text) and text != "").map(
        lambda text: (["-c", text, "status"], "", {})
    ),
    NASTY.filter(lambda text: "=" not in text).map(lambda text: (["status", "-o", text], "", {})),
    NASTY.map(lambda text: (["status", "-o", f"nope{text}.key=1"], "", {})),
    NASTY.map(lambda text: (["train", f"nowhere{text}.py"], "", {})),
    NASTY.filter(lambda text: "=" not in text).map(lambda text: (["train", "--env-var", text], "", {})),
    NASTY.map(lambda text: (["status"], f"[cluster]\nnope = {text}", {})),
    NASTY.map(lambda text: (["status"], f"[nope{text}]\nx = 1", {})),
    NASTY.map(lambda text: (["status"], f"[cluster]\nnodes = {text!r}x", {})),
    NASTY.filter(lambda text: not _is_number(text) and "\0" not in text).map(
        lambda text: (["status"], "", {"AWSDDP_CLUSTER_NODES": text})
    ),
    NASTY.filter(lambda text: not _is_name(text) and text != "" and "\0" not in text).map(
        lambda text: (["status"], "", {"AWSDDP_CLUSTER": text})
    ),
    NASTY.filter(lambda text: not _is_time(text) and "\0" not in text).map(
        lambda text: (["status"], "", {"AWSDDP_CLUSTER_EXPIRES": text})
    ),
)


def _is_valid(text: str) -> bool:
    return text in VERBS or re.fullmatch(r"--|-[hqvy]+", text) is not None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is_time(text: str) -> bool:
    from awsddp.errors import ConfigError
    from awsddp.settings.values import parse_duration

    try:
        return parse_duration(text) >= 0
    except ConfigError:
        return False


def _is_name(text: str) -> bool:
    from awsddp.settings.values import CLUSTER_NAME

    return CLUSTER_NAME.fullmatch(text) is not None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, in which no argument was run as a command."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list(tmp_path.rglob("canary"))


def run_fault(folder: Path, arguments: list[str], file: str, variables: dict[str, str]) -> tuple[int, str]:
    """Run the command line in this process; return its exit code and stderr."""
    (folder / "awsddp.toml").write_bytes(file.encode("utf-8", "surrogatepass"))
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace"), io.StringIO()
    before = dict(os.environ)
    try:
        for name, value in variables.items():
            os.environ[name] = value.encode("utf-8", "replace").decode()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            argv, sys.argv = sys.argv, ["awsddp", *arguments]
            try:
                code = failures.run_command(cli)
            finally:
                sys.argv = argv
    finally:
        os.environ.clear()
        os.environ.update(before)
    return code, err.getvalue()


def check(folder: Path, fault: tuple[list[str], str, dict[str, str]]) -> None:
    code, text = run_fault(folder, *fault)
    assert code in (2, 3), (fault, code, text)
    assert "error: " in text, fault
    assert "Traceback" not in text, fault
    assert "unexpected" not in text.split("\n")[0], (fault, text)
    assert len(text) < 20_000, fault


_SETTINGS = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@settings(max_examples=300, derandomize=True, **_SETTINGS)
@given(fault=FAULTS)
def test_a_fault_is_refused(folder: Path, fault: tuple[list[str], str, dict[str, str]]) -> None:
    check(folder, fault)


@pytest.mark.prove
@pytest.mark.timeout(1200)
@settings(max_examples=10_000, derandomize=True, **_SETTINGS)
@given(fault=FAULTS)
def test_ten_thousand_faults_are_refused(folder: Path, fault: tuple[list[str], str, dict[str, str]]) -> None:
    check(folder, fault)
