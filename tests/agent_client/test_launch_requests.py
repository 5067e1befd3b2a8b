"""What a node is told, before anything is sent."""

import ast
import bz2
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp import agent
from awsddp.agent import messages
from awsddp.agent.log_stream import MAGIC
from awsddp.agent_client import calls, launch_requests, program
from awsddp.errors import ConfigError, InUse, JobError, NodeError, NotFoundError, UsageError
from awsddp.model.node_answers import Slots
from awsddp.settings.spec import JobSection, JobSpec

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

TYPES = ("awsddp.model",)
"""Where messages.py has the types of answers from, for type checkers alone."""
AGENT = Path(agent.__file__).parent
FILES = {
    ".".join(path.relative_to(AGENT).with_suffix("").parts): path
    for path in sorted(AGENT.rglob("*.py"))
    if path.name != "__init__.py"
}
"""The files of the agent, by the names of their modules below it."""
S3 = {name for name in FILES if name.startswith("s3.")}
"""What saves results, and what fetches data: programs of their own, in a Python with boto3."""
ALONE = {"diagnosis.helper", "torchrun_worker"}
"""Files that a process of the job runs."""


def test_command_is_the_same_for_every_request() -> None:
    argv, _ = program.program()
    assert argv[:3] == ["python3", "-I", "-c"]
    assert "$" not in "".join(argv)
    message = calls.message(messages.Cancel(job="$(touch canary)"))
    assert message == b'73\n{"do": "cancel", "job": "$(touch canary)", "grace": null, "launch": null}'


def test_program_that_is_sent_is_small() -> None:
    _, stdin = program.program()
    assert len(stdin) < 14 * 1460, "it is to fit the first window of a TCP connection"


def test_program_that_is_sent_is_whole_and_in_order() -> None:
    _, stdin = program.program()
    length, _, rest = stdin.partition(b"\n")
    modules = json.loads(bz2.decompress(rest[: int(length)]))
    sent = [name.removeprefix("awsddp.agent.") for name, _ in modules]
    # these travel with the requests that need them
    others = (ALONE | S3).union(*(kind.extra for kind in messages.KINDS.values()))
    assert sorted(sent) == sorted(FILES.keys() - others)
    texts = [text for _, text in modules]
    for place, name in enumerate(sent):
        source = FILES[name].read_text()
        assert texts[place].count("\n") == source.count("\n"), "a traceback is to name the right line"
        tree = ast.parse(source)
        needs = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        ours = [need.removeprefix("awsddp.agent.") for need in needs if need.startswith("awsddp.agent.")]
        assert set(ours) - others <= set(sent[:place])


@pytest.mark.parametrize("module", FILES)
def test_program_of_the_node_is_python_3_8_and_needs_nothing_else(module: str) -> None:
    import sys

    tree = ast.parse(FILES[module].read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert (
                name.startswith("awsddp.agent.")
                or name in TYPES
                or name.partition(".")[0]
                in {
                    *sys.stdlib_module_names,
                    "sitecustomize",
                    *(("botocore", "s3transfer") if module in S3 else ()),
                }
            )
        assert not isinstance(node, ast.Match)


def test_requests_differ_only_in_what_is_the_nodes_own(fleet: "Fleet") -> None:
    launches = fleet.requests("main.py", args=("{rank}", "{local_rank}"))
    own = {"node", "folder", "workdir", "processes"}
    common = [
        {key: value for key, value in launches[node].to_json().items() if key not in own} for node in (0, 1)
    ]
    assert common[0] == common[1]
    assert [process.argv[1:] for process in launches[1].processes] == [
        ("main.py", "2", "0"),
        ("main.py", "3", "1"),
    ]
    assert launches[1].link_port == launches[1].master_port + 1
    assert len(launches[0].secret) == 64


def test_ports_follow_the_slot(fleet: "Fleet") -> None:
    fleet.port = launch_requests.FIRST_PORT + 30
    request = fleet.requests("main.py", slot=3)[0]
    assert (request.master_port, request.link_port) == (29430, 29431)


def test_module_and_option_like_names_are_no_options_of_python(fleet: "Fleet") -> None:
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
        launch_requests.launch_requests(JobSpec(), job="job", ranks=fleet.ranks, hosts=fleet.hosts, slot=0)


def test_node_without_an_address_is_named(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    fleet.hosts[0] = replace(fleet.hosts[0], node=replace(fleet.hosts[0].node, private_ip=None))
    with pytest.raises(NodeError, match="node0 has no private address"):
        fleet.requests("main.py")


@pytest.mark.parametrize(
    ("said", "error"),
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
def test_answer_that_is_none_becomes_an_error_of_its_kind(said: bytes, error: type[Exception]) -> None:
    with pytest.raises(error, match="node4"):
        calls.answer(said, request=messages.State(), node=4, stderr=b"sh: no")


def test_answer_is_found_behind_the_words_of_a_login_script() -> None:
    said = b"Welcome {\n" + MAGIC + b'{"jobs": []}\n'
    assert calls.answer(said, request=messages.State(), node=0).jobs == ()


def test_lowest_slot_that_is_free_everywhere_is_chosen() -> None:
    answers = {
        0: Slots(used=(0,), taken=(29411,), jobs={}),
        1: Slots(used=(2,), taken=(29430,), jobs={}),
    }
    assert launch_requests.choose_slot(answers, first=0) == 3
    every = [port + 10 * slot for port in (29400, 29401) for slot in range(64)]
    with pytest.raises(ConfigError, match="node0 has no free ports"):
        launch_requests.choose_slot({0: Slots(used=(), taken=tuple(every), jobs={})}, first=0)


def test_spec_reaches_the_request_in_seconds(fleet: "Fleet") -> None:
    fleet.requests("main.py")
    spec = JobSpec(job=JobSection(script="x.py", timeout="90m", grace="1m", outputs=("out",)))
    request = launch_requests.launch_requests(spec, job="j", ranks=fleet.ranks, hosts=fleet.hosts, slot=0)[1]
    assert (request.timeout, request.grace, request.outputs) == (5400.0, 60.0, ("out",))
