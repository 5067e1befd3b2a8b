"""A secret reaches the ranks, and no file."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.errors import ConfigError
from awsddp.settings.loader import job_arguments, list_settings, load, settings_to_record, with_secrets
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


URL = f"https://hooks.example/{VALUE}"


def test_the_url_of_events_is_shown_by_its_host_and_is_not_recorded() -> None:
    cluster, job = load(environ={"AWSDDP_NOTIFY_URL": URL, "AWSDDP_NOTIFY_FORMAT": "json"})
    assert (job.notify.url, job.notify.format) == (URL, "json")
    rows = {key: value for key, value, _ in list_settings(cluster, job)}
    assert rows["notify.url"] == "(secret, hooks.example)"
    texts = [rows, repr(job), job_arguments(job), settings_to_record(job), settings_to_record(cluster)]
    assert VALUE not in str(texts)
    assert job_arguments(job) == ("-o", "notify.format=json")


def test_the_url_of_events_is_refused_on_a_command_line() -> None:
    label = {"notify.url": "-o notify.url"}
    with pytest.raises(ConfigError, match=r"-o notify\.url is a secret") as refused:
        load(environ={}, overrides={"notify.url": URL}, labels=label)
    assert VALUE not in str(vars(refused.value))
    assert (
        load(environ={}, overrides={"notify.url": URL}, labels={"notify.url": "notify_url"})[1].notify.url
        == URL
    )


@pytest.mark.parametrize("value", [[URL], {"x": URL}, URL.replace("https", "gopher")])
def test_error_for_an_invalid_url_of_events_does_not_have_it(value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        load(environ={}, overrides={"notify.url": value})
    assert VALUE not in str(vars(refused.value))
