"""The audit trail of whole commands has each call to AWS; private keys are in their own file alone."""

import json
import stat
from pathlib import Path
from typing import Any

from awsddp.cluster.down import down
from awsddp.cluster.inventory import down_orphans
from awsddp.cluster.up import up
from tests.support.world import Kill, World, agree

SECRET = b"PRIVATE KEY-----"


def read_files(home: Path) -> dict[str, bytes]:
    """Return every file below a folder by its name; check that only its owner can read it."""
    paths = [path for path in home.rglob("*") if path.is_file()]
    shared = [
        path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077 and path.parent.name != "locks"
    ]
    assert shared == []
    return {str(path.relative_to(home)): path.read_bytes() for path in paths}


def read_trail(home: Path) -> list[dict[str, Any]]:
    """Return the calls in the only audit trail below a folder."""
    [trail] = home.rglob("calls.jsonl")
    return [json.loads(line) for line in trail.read_text().splitlines()]


def test_the_host_key_of_a_launch_is_only_in_its_intent_and_only_until_the_nodes_are_ready(
    world: World,
) -> None:
    world.run(up, confirm=agree, kill=Kill("RunInstances", 1, "before it is sent"))
    cut = read_files(world.home)
    assert {name for name, text in cut.items() if SECRET in text} == {
        "clusters/demo/key",
        "clusters/demo/cluster.json",
    }
    intent = json.loads(cut["clusters/demo/cluster.json"])["intent"]
    assert SECRET.decode() in intent["parameters"]["UserData"]
    assert world.run(up, confirm=agree).code == 0
    assert {name for name, text in read_files(world.home).items() if SECRET in text} == {"clusters/demo/key"}
    launches = [call for call in read_trail(world.home) if call["operation"] == "RunInstances"]
    assert {call["parameters"]["UserData"] for call in launches} == {"[REDACTED]"}
    assert world.run(down, confirm=agree).code == 0
    assert [name for name, text in read_files(world.home).items() if SECRET in text] == []


def test_every_call_is_in_the_trail_with_its_request_id_and_its_attempts(world: World) -> None:
    world.cloud.fault("CreateSecurityGroup", "InternalError", times=1)
    outcome = world.run(up, confirm=agree)
    assert outcome.code == 0
    recorded = read_trail(world.home)
    assert all(call["request_id"] for call in recorded if call["service"] in ("ec2", "sts"))
    assert sum(call["attempts"] for call in recorded) == len(outcome.calls)
    [creation] = [call for call in recorded if call["operation"] == "CreateSecurityGroup"]
    assert (creation["attempts"], creation["error"]) == (2, None)


def test_down_from_another_machine_records_its_calls_in_a_trail_of_the_cluster(world: World) -> None:
    elsewhere = world.root / "elsewhere"
    assert world.run(up, confirm=agree).code == 0
    assert world.run(down, home=elsewhere, confirm=agree).code == 0
    ended = {call["operation"] for call in read_trail(elsewhere)}
    assert {"TerminateInstances", "DeleteSecurityGroup", "DeletePlacementGroup", "DeleteKeyPair"} <= ended
    world.restore("empty")
    world.run(up, confirm=agree, kill=Kill("RunInstances", 1, "before it is sent"))
    [ended_id] = world.run(down_orphans, home=elsewhere, confirm=agree).document["clusters"]
    [trail] = elsewhere.rglob("calls.jsonl")
    assert trail.parent.name == f"demo-{ended_id}"
    assert {"DeleteSecurityGroup", "DeleteKeyPair"} <= {call["operation"] for call in read_trail(elsewhere)}
    assert read_files(elsewhere)
