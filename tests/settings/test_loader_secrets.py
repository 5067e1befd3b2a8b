"""A secret reaches the ranks, and no file."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.errors import ConfigError
from awsddp.settings.loader import load, settings_to_record, with_secrets
from awsddp.settings.spec import JobSpec

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

VALUE = "s3cret-6e1f0a"
SCRIPT = """
import os
print("length", len(os.environ["OWN_TOKEN"]), os.environ["PLAIN"])
"""


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OWN_TOKEN", VALUE)
    return VALUE


def find_files_with(text: str, *folders: Path) -> Iterator[Path]:
    """Yield the files below folders that have a text in their name or content."""
    for folder in folders:
        for path in folder.rglob("*"):
            is_file = path.is_file() and not path.is_symlink()
            if text in path.name or (is_file and text.encode() in path.read_bytes()):
                yield path


@pytest.mark.parametrize("launcher", ["ssh", pytest.param("torchrun", marks=pytest.mark.prove)])
def test_a_secret_is_in_the_ranks_and_in_no_file(fleet: "Fleet", token: str, launcher: str) -> None:
    job = fleet.run(SCRIPT, secrets=("OWN_TOKEN",), variables={"PLAIN": "in the open"}, launcher=launcher)
    assert job.state == "succeeded", job.cause
    assert fleet.log(3) == b"length 13 in the open\n"
    assert list(find_files_with("in the open", *fleet.homes))
    assert list(find_files_with(token, *fleet.homes)) == []


def test_a_secret_that_is_not_set_is_refused_with_the_command_that_sets_it() -> None:
    key = "env.secrets.ABSENT"
    spec = load(environ={}, overrides={key: None}, labels={key: "--env-var"})[1]
    with pytest.raises(ConfigError, match="--env-var: ABSENT not set") as refused:
        with_secrets(spec, {})
    assert refused.value.next.startswith("read -rs ABSENT && export ABSENT")
    assert with_secrets(spec, {"ABSENT": "x"}).env.variables == {"ABSENT": "x"}


def test_the_last_setting_decides_if_a_variable_is_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "awsddp.toml"
    file.write_text('[env]\nsecrets = ["A", "B"]\nvariables = { C = "1" }\n')
    env = load(file=file, environ={}, overrides={"env.variables.A": "2", "env.secrets.C": None})[1].env
    assert (env.variables, env.secrets) == ({"A": "2"}, ("B", "C"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('secrets = ["sk-1234"]', "an entry is not the name of a variable"),
        ('secrets = ["A"]\nvariables = { A = "1" }', "A is also in env.variables"),
    ],
)
def test_an_invalid_secret_is_refused_and_not_shown(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "awsddp.toml"
    file.write_text(f"[env]\n{text}\n")
    with pytest.raises(ConfigError, match=message) as refused:
        load(file=file, environ={})
    assert "sk-1234" not in str(refused.value)


def test_secrets_belong_to_a_job_and_are_not_remembered() -> None:
    spec = load(environ={}, overrides={"env.secrets": ["PATH"], "env.python": "3.12"})[1]
    assert settings_to_record(spec) == {"env.python": "3.12"}
    assert with_secrets(replace(JobSpec(), env=spec.env)).env.variables == {"PATH": os.environ["PATH"]}
