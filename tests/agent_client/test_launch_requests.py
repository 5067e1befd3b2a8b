"""The launch requests of the nodes, before any is sent."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from awsddp.agent import messages
from awsddp.agent.log_stream import MAGIC
from awsddp.agent_client import calls, launch_requests
from awsddp.errors import ConfigError, InUse, JobError, NodeError, NotFoundError, UsageError
from awsddp.model.node_answers import Slots
from awsddp.settings.spec import JobSection, JobSpec

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def test_requests_differ_only_in_the_fields_of_the_node(fleet: "Fleet") -> None:
    launches = fleet.requests("main.py", args=("{rank}", "{local_rank}"))
    keys = {"node", "folder", "workdir", "processes"}
    common = [
        {key: value for key, value in launches[node].to_json().items() if key not in keys} for node in (0, 1)
    ]
    assert common[0] == common[1]
    assert [process.argv[1:] for process in launches[1].processes] == [
        ("main.py", "2", "0"),
        ("main.py", "3", "1"),
    ]
    assert launches[1].link_port == launches[1].master_port + 1
    assert len(launches[0].secret) == 64


@pytest.mark.parametrize(
    ("settings", "looks", "ends", "hang_after"),
    [
        ({}, launch_requests.LOOKS, False, None),
        ({"recover": 2}, launch_requests.LOOKS, True, None),
        ({"hang_after": "2h"}, launch_requests.LOOKS, False, 7200.0),
        ({"hang_after": "off", "recover": 2}, (), True, None),
    ],
)
def test_nodes_look_at_a_silent_job_unless_that_is_off(
    fleet: "Fleet",
    settings: dict[str, object],
    looks: tuple[float, ...],
    ends: bool,
    hang_after: float | None,
) -> None:
    request = fleet.requests("main.py", **settings)[0]
    assert (request.looks, request.ends_when_hung, request.hang_after) == (looks, ends, hang_after)


def test_ports_follow_the_slot(fleet: "Fleet") -> None:
    fleet.port = launch_requests.FIRST_PORT + 30
    request = fleet.requests("main.py", slot=3)[0]
    assert (request.master_port, request.link_port) == (29430, 29431)


def test_module_and_script_names_are_not_parsed_as_options_of_python(fleet: "Fleet") -> None:
    assert fleet.requests("pkg.train", module=True)[0].processes[0].argv[1:] == ("-m", "pkg.train")
    assert fleet.requests("-c.py")[0].processes[0].argv[1:] == ("./-c.py",)


def test_record_of_the_arguments_is_bounded_and_unicode(fleet: "Fleet") -> None:
    args = ("x" * 200_000, "\udcff", *map(str, range(2000)))
    request = fleet.requests("main.py", args=args)[0]
    assert request.processes[0].argv[2:] == args
    assert [len(text) for text in request.facts["args"][:2]] == [1000, 1]
    json.dumps(request.facts, ensure_ascii=False).encode()
    assert len(request.facts["args"]) == 1000


def test_job_without_a_script_is_refused(fleet: "Fleet") -> None:
    fleet.requests("main.py")
    with pytest.raises(UsageError, match="no script"):
        launch_requests.make_launch_requests(
            JobSpec(), job="job", ranks=fleet.ranks, hosts=fleet.hosts, slot=0
        )


def test_node_without_an_address_is_named(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    fleet.hosts[0] = replace(fleet.hosts[0], node=replace(fleet.hosts[0].node, private_ip=None))
    with pytest.raises(NodeError, match="node0 has no private address"):
        fleet.requests("main.py")


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (b"", NodeError),
        (b"bash: python3: command not found", NodeError),
        (MAGIC + b'{"half', NodeError),
        (MAGIC + b'{"error": {"message": "m", "why": "w", "kind": "usage"}}', UsageError),
        (MAGIC + b'{"error": {"message": "m", "why": "w", "kind": "busy"}}', InUse),
        (MAGIC + b'{"error": {"message": "m", "why": "w", "kind": "notfound"}}', NotFoundError),
        (MAGIC + b'{"error": {"message": "m", "why": "w", "kind": "job"}}', JobError),
    ],
)
def test_malformed_answer_raises_an_error_of_its_kind(output: bytes, error: type[Exception]) -> None:
    with pytest.raises(error, match="node4"):
        calls.parse_response(output, request=messages.State(), node=4, stderr=b"sh: no")


def test_answer_is_parsed_after_the_output_of_a_login_script() -> None:
    output = b"Welcome {\n" + MAGIC + b'{"jobs": []}\n'
    assert calls.parse_response(output, request=messages.State(), node=0).jobs == ()


def test_lowest_slot_that_is_free_everywhere_is_chosen() -> None:
    answers = {
        0: Slots(used=(0,), taken=(29411,), jobs={}),
        1: Slots(used=(2,), taken=(29430,), jobs={}),
    }
    assert launch_requests.choose_slot(answers, first=0) == 3
    ports = [port + 10 * slot for port in (29400, 29401) for slot in range(64)]
    with pytest.raises(ConfigError, match="node0 has no free ports"):
        launch_requests.choose_slot({0: Slots(used=(), taken=tuple(ports), jobs={})}, first=0)


def test_durations_of_the_spec_are_seconds_in_the_request(fleet: "Fleet") -> None:
    fleet.requests("main.py")
    spec = JobSpec(job=JobSection(script="x.py", timeout="90m", grace="1m", outputs=("out",)))
    request = launch_requests.make_launch_requests(
        spec, job="j", ranks=fleet.ranks, hosts=fleet.hosts, slot=0
    )[1]
    assert (request.timeout, request.grace, request.outputs) == (5400.0, 60.0, ("out",))


def test_every_rank_gets_the_id_of_the_run_that_the_launch_begins_or_continues(fleet: "Fleet") -> None:
    request = fleet.requests("main.py")[1]
    assert request.facts["run_id"] == request.launch
    assert {process.environment["AWSDDP_RUN_ID"] for process in request.processes} == {request.launch}
    spec = JobSpec(job=JobSection(script="x.py"))
    request = launch_requests.make_launch_requests(
        spec, job="j", ranks=fleet.ranks, hosts=fleet.hosts, slot=0, facts={"run_id": "first", "life": 2}
    )[1]
    assert (request.facts["run_id"], request.facts["life"], request.launch != "first") == ("first", 2, True)
    assert {process.environment["AWSDDP_RUN_ID"] for process in request.processes} == {"first"}
