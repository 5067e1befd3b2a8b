"""The JSON documents have published types. Every test that reads a verb's --json checks it against them."""

import json

import pytest

from awsddp import errors
from awsddp.cli.main import VERBS, cli
from tests.support import schema
from tests.support.lab import Lab


def test_the_published_schema_matches_the_types() -> None:
    assert schema.PAGE.read_text() == schema.schema(), "run: python -m tests.support.schema"


def test_every_verb_has_a_type() -> None:
    assert {name.split(" ")[0] for name in schema.DOCUMENTS} == {*VERBS, ""}
    json.loads(schema.schema())


def test_a_key_that_the_type_lacks_is_an_error() -> None:
    with pytest.raises(AssertionError, match="newer"):
        schema.check({"schema": 1, "stopped": True, "newer": 1}, "local", "stop")
    with pytest.raises(AssertionError):
        schema.check({"schema": 2, "stopped": True}, "local", "stop")


def test_every_error_has_a_unique_kind_that_the_docs_list() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    ours = [kind.kind for kind in kinds if issubclass(kind, errors.AwsddpError)]
    assert len(ours) == len(set(ours))
    page = (schema.PAGE.parent / "design.md").read_text()
    for kind in (*ours, "credentials", "permission", "quota", "throttled", "unavailable"):
        assert f"| `{kind}` |" in page, kind


def test_each_command_has_the_name_of_its_verb() -> None:
    from click import Context

    commands = [cli.get_command(Context(cli), name) for name in VERBS]
    assert [command and command.name for command in commands] == list(VERBS)


@pytest.mark.prove
def test_records_mode_returns_every_document_that_needs_no_host(records: Lab) -> None:
    records.json("status", "--local")
    records.json("plan", "--local")
    records.json("plan", "--local", "--offers")
    records.json("local", "status")
    records.json("status", "--local", "--all")
    records.json("doctor", "--local")
    assert records.json("report", code=7)["error"]["kind"] == "not_found"
    records.json("down", "--local", "-y")
    records.json("local", "fault", "list")
    records.json("init")
    records.json("down", "--local", "--orphans", "-y")
    assert records.json("fetch", "--local", code=7)["error"]["kind"] == "not_found"
    assert records.json("train", "nowhere.py", code=2)["error"]["kind"] == "usage"
    assert json.loads(records.run("--json").stdout)["schema"] == 1
