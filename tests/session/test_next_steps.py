"""Commands in messages select this cluster, and messages name what may still cost money."""

import json
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click
import pytest
from botocore.exceptions import EndpointConnectionError

from awsddp.api.cluster import Cluster, Job, JobFailed
from awsddp.aws.api_errors import translate_error
from awsddp.cli import failures
from awsddp.cli.command_line import COMMAND, Globals, with_global_options
from awsddp.cli.main import cli
from awsddp.errors import CloudError, Interrupted, Terminated
from awsddp.local import control
from awsddp.model.records import Cause, Target, TargetName
from awsddp.model.records import JobRecord as JobRecord
from awsddp.nodes.node_failures import NodeFailure
from awsddp.session.context import Session
from awsddp.session.next_steps import complete_commands, describe_cost, make_interrupted_error
from awsddp.settings.loader import load, option_arguments
from awsddp.settings.spec import OPTIONS
from awsddp.settings.verbs import HAS_OPTION
from awsddp.state import ClusterFolder
from tests.support.advice_lines import parse_commands, texts
from tests.support.lab import Lab
from tests.support.launched_cluster import RECORD


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterFolder]:
    monkeypatch.setenv("AWSDDP_HOME", str(tmp_path))
    monkeypatch.delenv("AWSDDP_CLUSTER", raising=False)
    cluster_folder = ClusterFolder(tmp_path, "second")
    session = Session(name="second", home=tmp_path, settings=load("second", environ={}))
    monkeypatch.setattr(COMMAND, "session", session)
    yield cluster_folder


def make_session(
    folder: ClusterFolder, local: bool = False, verb: Literal["train", "run"] = "train", **keys: object
) -> Session:
    """Return the session of a command line that sets these keys."""
    settings = load(folder.name, environ={}, overrides=keys)
    return Session(name=folder.name, home=folder.root, settings=settings, local=local, verb=verb)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Globals(), "awsddp up   # continue"),
        (Globals(cluster="second"), "awsddp -c second up   # continue"),
        (
            Globals(region="eu-west-1", profile="my own"),
            "awsddp --profile 'my own' --region eu-west-1 up   # continue",
        ),
        (Globals(local=True), "awsddp --local up   # continue"),
    ],
)
def test_a_recommended_command_has_the_global_options_that_it_needs(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch, options: Globals, expected: str
) -> None:
    monkeypatch.setattr(COMMAND, "options", options)
    monkeypatch.setattr(COMMAND, "session", None)  # before the verb is parsed
    assert with_global_options("awsddp up   # continue") == expected
    assert with_global_options("awsddp -c other-name up") == "awsddp -c other-name up"


def test_options_that_the_record_has_are_not_repeated(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write(RECORD)
    for profile, option in (("work", ""), ("other", " --profile other")):
        keys = {"cluster.region": "eu-west-1", "cluster.profile": profile}
        line = complete_commands(make_session(folder, **keys), "awsddp down")
        assert line == f"awsddp -c second{option} down"


def test_commands_of_a_rehearsal_do_not_address_aws(folder: ClusterFolder, tmp_path: Path) -> None:
    make = "aws s3 mb s3://b --region us-east-1   # or another --save-to"
    on_aws, rehearsed = make_session(folder), make_session(folder, local=True)
    assert complete_commands(on_aws, make) == make
    assert complete_commands(rehearsed, make).startswith("awsddp local start   #")
    info = control.start(tmp_path, mode="records")
    try:
        typed = shlex.split(complete_commands(rehearsed, f"first: {make}"), comments=True)
        assert f"AWS_ENDPOINT_URL={info.endpoint}" in typed and typed.index("aws") == 4
        folder.write(replace(RECORD, target=Target(name="local", region="us-east-1")))
        assert info.endpoint in complete_commands(on_aws, make), "the record says where the cluster is"
    finally:
        control.stop(tmp_path)


@pytest.mark.parametrize("is_json", [False, True])
def test_expired_credentials_are_reported_with_running_nodes_and_how_to_end_them(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_json: bool
) -> None:
    from botocore.exceptions import ClientError

    folder.write(RECORD)
    monkeypatch.setattr(COMMAND, "options", Globals(cluster="second", json=is_json))
    reply = {"Error": {"Code": "ExpiredToken", "Message": "expired"}, "ResponseMetadata": {}}
    error = translate_error(
        ClientError(reply, "DescribeInstances"), "DescribeInstances", location="eu-west-1"
    )
    assert failures.show_error(error) == 4
    output = "".join(capsys.readouterr())
    assert "2 x p4d.24xlarge may run in eu-west-1, at $65.54 per hour (i-0, i-1)" in output
    assert "awsddp -c second down" in output


def test_a_refusal_unrelated_to_credentials_names_no_running_nodes(
    folder: ClusterFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write(replace(RECORD))
    failures.show_error(CloudError("AWS throttles"))
    assert "may run" not in capsys.readouterr().err


def test_rsync_older_than_3_is_refused_before_a_launch(lab: Lab, tmp_path: Path) -> None:
    old = tmp_path / "bin" / "rsync"
    old.parent.mkdir()
    old.write_text(
        "#!/bin/sh\necho 'openrsync: protocol version 29'\necho 'rsync version 2.6.9 compatible'\n"
    )
    old.chmod(0o755)
    lab.environ["PATH"] = f"{old.parent}:{lab.environ['PATH']}"
    refused = lab.json("up", "--local", "--nodes", "1", "-y", code=3)["error"]
    assert "openrsync" in refused["why"]
    assert "brew install rsync" in refused["next"]
    assert lab.json("status", "--local")["state"] == "absent"


# Files with lines whose option or verb is inserted later.
BUILT = {
    "plan/selection.py",
    "cluster/inventory.py",
    "local/control.py",
    "agent_client/node_checks.py",
    "job/save_to_s3.py",
}


def test_every_line_of_a_message_that_starts_as_a_command_is_valid() -> None:
    wrong = {}
    for location, text in texts("1"):
        try:
            parse_commands(text)
        except Exception as error:
            wrong[location] = f"{text!r}: {error}"
    assert {location.partition(":")[0] for location in wrong} <= BUILT, wrong


@pytest.mark.prove
def test_the_next_step_after_a_rehearsal_uses_the_local_cloud_again(records: Lab) -> None:
    records.json("up", "--local", "--nodes", "1", "-y")
    records.json("down", "-y")
    refused = records.json("train", code=7)["error"]
    [line] = parse_commands(refused["next"])
    assert line == "awsddp up --local"
    assert records.json(*shlex.split(line)[1:], "--nodes", "1", "-y")["target"] == "local"
    records.json("down", "-y")


def test_the_next_step_of_an_interrupted_up_launches_no_second_node(records: Lab) -> None:
    file = records.project / "awsddp.toml"
    file.write_text("[cluster]\nnodes = 2\n")
    try:
        slow = records.run("local", "fault", "add", "DescribeInstances", "delay", "--seconds", "2")
        assert slow.returncode == 0
        client = records.start(
            "up", "--local", *["--nodes", "1", "--instance-type", "g6.xlarge"], "-y", "--json"
        )
        assert client.stderr is not None
        while b"asking for 1 x" not in (line := client.stderr.readline()):
            assert line
        time.sleep(0.5)  # time for the launch; the next step launches the node if this was too short
        client.send_signal(signal.SIGINT)
        error = json.loads(client.communicate(timeout=60)[0])["error"]
        assert records.run("local", "fault", "clear").returncode == 0
        [again, down] = parse_commands(error["next"])
        assert again == "awsddp up --nodes 1 --instance-type g6.xlarge"
        assert len(records.json(*shlex.split(again)[1:], "-y")["nodes"]) == 1
        assert len(records.json(*shlex.split(down)[1:], "-y")["terminated"]) == 1
    finally:
        file.unlink()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["down", "-y"], ["awsddp down   # goes on"]),
        (["fetch", "a b", "c"], ["awsddp fetch 'a b' c   # goes on", "awsddp logs -f one", "awsddp down"]),
        (["recover", "one"], ["awsddp recover one   # goes on", "awsddp logs -f one", "awsddp down"]),
        (["status"], ["awsddp logs -f one", "awsddp down"]),
    ],
)
def test_the_next_step_of_a_terminated_command_is_that_command(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch, typed: list[str], expected: list[str]
) -> None:
    job = JobRecord(job="one", state="running", cause=None, ranks=(), home="")
    folder.write(replace(RECORD, jobs=(job,)))
    session = COMMAND.session

    def cut(*_: object, **__: object) -> None:
        COMMAND.session = session
        raise Terminated(signal.SIGTERM)

    monkeypatch.setattr("awsddp.cli.invocation.specs", cut)
    with pytest.raises(Interrupted) as error:
        cli.main([*typed, "-c", "second"], standalone_mode=False)
    assert error.value.exit_code == 143
    lines = error.value.next.split("\n")
    assert [line for line, start in zip(lines, expected, strict=True) if not line.startswith(start)] == []


@pytest.mark.parametrize(
    ("kind", "limit", "expected"),
    [
        ("spot_interruption", 3, ["recover -o job.recover=3 one", "down"]),
        ("exit", 3, ["down"]),
        ("spot_interruption", None, ["down"]),
    ],
)
def test_the_next_step_of_an_interrupted_recovery_is_recover(
    folder: ClusterFolder, kind: str, limit: int | None, expected: list[str]
) -> None:
    job = JobRecord(
        job="one", state="interrupted", cause=Cause(kind=kind, node=0, rank=None), ranks=(), home=""
    )
    folder.write(replace(RECORD, jobs=(job,)))
    session = make_session(folder, **{"job.recover": limit})
    lines = parse_commands(complete_commands(session, make_interrupted_error(session).next))
    assert lines == [f"awsddp -c second {line}" for line in expected]


def test_the_next_step_of_an_interrupted_up_has_the_typed_options(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWSDDP_CLUSTER", "second")
    folder.write(replace(RECORD, prepared=()))
    keys: dict[str, object] = {
        "cluster.nodes": 1,
        "cluster.instance_type": "g6.xlarge",
        "cluster.region": "eu-west-1",
        "local.gpus": "off",
        "env.variables.LR": "2",
        "job.results": "out",
        "job.save_to": "s3://results/runs",
    }
    ctx = make_session(folder, **keys)
    up, down = parse_commands(complete_commands(ctx, make_interrupted_error(ctx).next))
    needs = "--nodes 1 --instance-type g6.xlarge -o local.gpus=off"
    assert up == f"awsddp up {needs} -o job.results=out --save-to s3://results/runs"
    assert down == "awsddp down -o job.results=out"


def test_advice_to_create_the_cluster_again_names_no_old_instance(folder: ClusterFolder) -> None:
    folder.write(RECORD)
    [line] = complete_commands(
        make_session(folder, **{"cluster.replace": ["i-1"]}), "awsddp down && awsddp up"
    ).split("\n")
    assert line.endswith(" up") and "i-1" not in line


JOB = JobRecord(
    job="first",
    state="failed",
    cause=None,
    ranks=(),
    home="out/first",
    script="t.py",
    args=("--lr", "a b"),
    options=("-o", "job.world_size=4", "--env-var", "LR", "--env-var", "MY_TOKEN", "-o", "env.kind=venv"),
)
AGAIN = "--world-size 4 --env-var LR=2 --env-var MY_TOKEN -o env.kind=venv"
TYPED: dict[str, object] = {"job.results": "out", "env.variables.LR": "2", "env.variables.MY_TOKEN": "hidden"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("awsddp fetch first   # again", "awsddp fetch -o job.results=out first   # again"),
        (
            "awsddp fetch first -o job.results=DIR   # or there",
            "awsddp fetch first -o job.results=DIR   # or there",
        ),
        ("awsddp status   # then: awsddp up", "awsddp status   # then: awsddp up"),
        (
            "awsddp down && awsddp up   # anew",
            "awsddp down -o job.results=out && "
            "awsddp --profile work --region eu-west-1 up --nodes 3 --idle off -o job.results=out   # anew",
        ),
        (
            "awsddp train --env-var A=1   # why",
            f"awsddp train {AGAIN} --env-var A=1 t.py -- --lr 'a b'   # why",
        ),
        (
            "awsddp train --env-var LR=3 --resume first",
            f"awsddp train {AGAIN} --env-var LR=3 --resume first t.py -- --lr 'a b'".replace(
                " --env-var LR=2", ""
            ),
        ),
        ("awsddp train SCRIPT   # yours", f"awsddp train {AGAIN} SCRIPT   # yours"),
        ("awsddp recover   # goes on", "awsddp recover -o job.results=out first   # goes on"),
    ],
)
def test_advice_repeats_the_requested_settings_once(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setenv("AWSDDP_CLUSTER", "second")
    folder.write(replace(RECORD, nodes=3, asked={"cluster.idle": "off"}))
    ctx = make_session(folder, **TYPED)
    assert complete_commands(ctx, text, job=JOB) == expected
    assert complete_commands(ctx, expected, job=JOB) == expected
    parse_commands(expected)


def test_the_next_step_after_run_is_run(folder: ClusterFolder) -> None:
    folder.write(RECORD)
    ctx = make_session(folder, verb="run", **TYPED, **{"cluster.nodes": 1, "cluster.spot": True})
    [line] = parse_commands(complete_commands(ctx, "awsddp train --env requirements.txt", job=JOB))
    select = "-c second --profile work --region eu-west-1"
    assert line == (f"awsddp {select} run --nodes 1 --spot {AGAIN} --env requirements.txt t.py -- --lr 'a b'")


def test_options_of_a_job_from_a_node_set_no_key_of_the_cluster(folder: ClusterFolder) -> None:
    forged = replace(JOB, options=("-o", 'network.ssh_cidr=["0.0.0.0/0"]', "-o", "job.world_size=4"))
    line = complete_commands(make_session(folder, verb="run"), "awsddp train", job=forged)
    assert line == "awsddp -c second run --world-size 4 t.py -- --lr 'a b'"


def test_each_verb_has_the_options_that_advice_gives_it() -> None:
    for verb, sections in HAS_OPTION.items():
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None
        names = {name for param in command.params for name in param.opts}
        with_option = {key for key in OPTIONS if option_arguments(key, "x")[0] in names}
        assert with_option == {key for key in OPTIONS if key.startswith(sections)}, verb


@pytest.mark.parametrize(
    ("target", "expected"),
    [("local", " on this machine, free"), ("aws", " in eu-west-1, at $65.54 per hour")],
)
def test_the_description_of_the_cost_depends_on_the_target(target: TargetName, expected: str) -> None:
    assert describe_cost(replace(RECORD, target=Target(name=target, region="eu-west-1"))) == expected


def test_an_error_of_the_local_cloud_does_not_name_aws() -> None:
    error = EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
    failure = translate_error(error, "DescribeInstances", location="http://127.0.0.1:1", is_local=True)
    assert failure.message.startswith("could not reach the local cloud for")
    assert parse_commands(failure.next) == ["awsddp local status"]


def test_the_summary_of_a_lost_connection_is_one_line() -> None:
    error = NodeFailure(1, "lost", "connection lost", "no answer\nfor 12 s")
    assert error.summary == "node1: connection lost (no answer; for 12 s)"


def test_a_job_that_failed_names_its_cluster_and_the_local_cloud(folder: ClusterFolder) -> None:
    cluster = Cluster("second", local=True)
    assert parse_commands(JobFailed(Job(cluster, "j"), "failed", None).next) == [
        "awsddp -c second --local logs j"
    ]


SCRIPT = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # a rank that ends while another still connects would fail that
for name in ("train", "val"):
    with open(f"data/letters/{name}.txt") as file:
        assert file.read() == name
assert (dist.get_world_size(), os.environ["WIDTH"]) == (2, "8")
print("trained with", dist.get_world_size(), "ranks", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.prove
@pytest.mark.parametrize(
    "verb",
    ["train", "-c once run --local --nodes 1 --instance-type g4dn.12xlarge -o local.gpus=off"],
    ids=["train", "run"],
)
def test_the_next_step_after_an_unsent_file_runs_the_same_job(
    cluster: Lab, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "letters.py").write_text(SCRIPT)
    (tmp_path / ".gitignore").write_text("data/\n")
    letters = tmp_path / "data" / "letters"
    letters.mkdir(parents=True)
    for name in ("train", "val"):
        (letters / f"{name}.txt").write_text(name)
    yes = ["-y"] if "run" in verb else []
    arguments = [*verb.split(), *yes, "--world-size", "2", "--env-var", "WIDTH=8", "--json", "letters.py"]
    failed = cluster.run(*arguments, timeout=300, cwd=tmp_path)
    document = json.loads(failed.stdout)
    cause = (document.get("train") or document)["cause"]
    assert cause["kind"] == "file_not_found", failed.stderr
    assert failed.stderr.count("is in .gitignore and letters.py mentions it: not sent") == 1
    [line] = parse_commands(cause["next"])
    again = cluster.run(*shlex.split(line)[1:], *yes, timeout=300, cwd=tmp_path)
    assert again.returncode == 0, f"{line}\n{again.stderr}"
    assert again.stdout.count("trained with 2 ranks") == 2
