"""The protocol with a node: how requests are sent to the program there, and how its answers are read.

The requests themselves: supervisor/requests.py.
"""

import base64
import bz2
import functools
import json
import posixpath
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from awsddp import answers
from awsddp.config import with_secrets
from awsddp.errors import AwsddpError, ConfigError, InUse, JobError, NodeError, NotFoundError, UsageError
from awsddp.jobs.supervisor import requests
from awsddp.jobs.supervisor.follow import MAGIC
from awsddp.jobs.supervisor.requests import Answer, Launch, Machine, Place, Request
from awsddp.parallel import split
from awsddp.spec import JobSpec
from awsddp.values import seconds

if TYPE_CHECKING:
    from awsddp.jobs.ranks import Host, Rank
    from awsddp.jobs.supervisor.requests import Fact

ANSWER_S = 60.0
"""How long a node may take to answer."""
FIRST_PORT = 29400
SLOTS = 64
JOIN_SECONDS = 60.0
"""How long the first node waits for the supervisors of the others."""
EVENTS_AT_ONCE_BYTES = 16 << 20
"""How much of a node's event files is fetched at once while its job is followed."""
_MOST_ARGS, _MOST_CHARACTERS = 1000, 1000

# The modules of the node's program, each after those that it imports; the last one has main().
_MODULES = (
    "requests",
    "job_causes",
    "folder",
    "link",
    "peers",
    "follow",
    "walk",
    "manifest",
    "metrics",
    "launch",
    "main",
)
# Those of supervisor/saver.py, which runs in a Python of its own.
SAVER = (
    *("requests", "job_causes", "folder", "checkpoints", "walk", "manifest", "objects"),
    *("pages", "shelf", "trial", "saver"),
)
_PACKAGE = "awsddp.jobs.supervisor"

# The node needs no copy of the program, so that it cannot have an old one: the source comes first on stdin.
_BOOT = """\
import bz2, json, sys, types
stdin = sys.stdin.buffer
for name, source in json.loads(bz2.decompress(stdin.read(int(stdin.readline())))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
sys.exit(module.main(stdin))
"""


class NameTaken(UsageError):
    """A node has a job of this name."""


_ERRORS = {
    "usage": UsageError,
    "taken": NameTaken,
    "busy": InUse,
    "notfound": NotFoundError,
    "node": NodeError,
    "job": JobError,
}
# Docstrings and comments stay here; their lines do not, so that a traceback names the right one.
_NOT_SENT = re.compile(r'^( *"")".*?"""$|^ *#.*?$', re.MULTILINE | re.DOTALL)


@functools.cache
def program() -> tuple[list[str], bytes]:
    """Return the node's program: its remote command (to be quoted word by word) and the beginning of stdin.

    Then come messages, one for each request. The command is the same for all: nothing of the user's is ever
    part of it.
    """
    return ["python3", "-I", "-c", _BOOT], _part(_packed(_MODULES))


def node_program(python: str, modules: tuple[str, ...], document: object) -> tuple[list[str], bytes]:
    """Return what runs a program of its own on a node with this interpreter, as `program`.

    The last of the modules has main(), which reads `document`.
    """
    return [python, "-I", "-c", _BOOT], _part(_packed(modules)) + _part(json.dumps(document).encode())


@functools.cache
def _packed(modules: tuple[str, ...]) -> bytes:
    return bz2.compress(json.dumps([(f"{_PACKAGE}.{name}", _source(name)) for name in modules]).encode())


def _source(name: str) -> str:
    source = (Path(__file__).parent / "supervisor" / f"{name}.py").read_text("utf-8")
    return _NOT_SENT.sub(lambda found: (found[1] or "") + "\n" * found[0].count("\n"), source)


def message(request: Request[Any]) -> bytes:
    """Return `request` as the program reads it."""
    extra = {"modules": base64.b64encode(_packed(request.extra)).decode()} if request.extra else {}
    return _part(json.dumps({**request.to_json(), **extra}).encode())


def _part(data: bytes) -> bytes:
    return b"%d\n%s" % (len(data), data)


def is_whole(said: bytes | bytearray, *, count: int = 1) -> bool:
    """Tell whether the output of a node so far holds complete answers to `count` requests (but follow)."""
    return said.endswith(b"\n") and not said.endswith(MAGIC) and said.count(MAGIC) >= count


def answer(stdout: bytes, *, request: Request[Answer], node: int, stderr: bytes = b"") -> Answer:
    """Return the answer to `request` in the output of `node`, checked (answers.py).

    Raises the error that it names; NodeError for no answer and for what no such answer may be.
    """
    _, mark, said = stdout.partition(MAGIC)
    if not mark or not said.strip():
        why = (stderr or stdout)[-2000:].decode("utf-8", "replace").strip()
        raise NodeError(f"node{node} gave no answer", why, "awsddp doctor")
    with answers.refused(node):
        document = answers.parsed(said)
        if "error" not in document:
            paths = isinstance(request, requests.Manifest)
            found = answers.converted(document, _answer_type(type(request)), paths=paths)
            _check_against(found, request, node)
            return found
        failure = msgspec.convert(document, answers.Failed).error
    raise _ERRORS[failure.kind](f"node{node}: {failure.message}", failure.why)


def _answer_type(kind: type[Request[Answer]]) -> type[Answer]:
    """Return the class of awsddp/answers.py that a request names in its brackets."""
    (name,) = kind.__orig_bases__[0].__args__  # type: ignore[attr-defined]
    found: type[Answer] = getattr(answers, name.__forward_arg__.rpartition(".")[2])
    return found


def _check_against(found: Any, request: Request[Any], node: int) -> None:
    """Raise ValueError where an answer speaks of something else than its request."""
    if isinstance(found, answers.Jobs):
        for job in found.jobs:
            answers.check_job(job, node, None)
        if len({job.job for job in found.jobs}) != len(found.jobs):
            raise ValueError("one job twice")
    if isinstance(request, requests.Cancel):
        answers.check_job(found, node, request.job)
    if isinstance(request, requests.Launch) and found.job != request.job:
        raise ValueError(f"it speaks of job {found.job!r}, not of {request.job!r}")
    if isinstance(request, requests.Dial) and sorted(one[:2] for one in found.dials) != sorted(
        (node, port) for node, _, port in request.peers
    ):
        raise ValueError("it dialed other addresses than requested")
    if isinstance(request, requests.Manifest):
        answers.check_manifest(found, node, [rank for rank, at in request.ranks if at == node])


class Ended(Protocol):
    """How a program on a node ended, and what it said."""

    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...


class Carrier(Protocol):
    """What takes requests to nodes: the connections of nodes/transport.py."""

    def request(
        self,
        program: tuple[Sequence[str], bytes],
        messages: Mapping[int, bytes],
        on_data: Callable[[int, bytes], bool],
        *,
        timeout_s: float | None = None,
    ) -> Mapping[int, Ended | NodeError]: ...

    def run_each(
        self, requests: Mapping[int, tuple[Sequence[str], bytes]], *, timeout_s: float
    ) -> Mapping[int, Ended | NodeError]: ...


def ask(
    fleet: Carrier, asked: Mapping[int, Request[Answer]], *, timeout_s: float = ANSWER_S
) -> dict[int, Answer]:
    """Send each node its request and return the answers. Raises NodeError, or the error a node reports."""
    found: dict[int, Answer | AwsddpError] = answers_of(fleet, asked, timeout_s=timeout_s)
    return split(found)


def answers_of(
    fleet: Carrier, asked: Mapping[int, Request[Answer]], *, timeout_s: float = ANSWER_S
) -> dict[int, Answer | AwsddpError]:
    """Send each node its request and return its answer, or the error that came instead."""
    turns = {node: [request] for node, request in asked.items()}
    return {node: one for node, (one,) in answers_in_turn(fleet, turns, timeout_s=timeout_s).items()}


def answers_in_turn(
    fleet: Carrier, asked: Mapping[int, Sequence[Request[Any]]], *, timeout_s: float = ANSWER_S
) -> dict[int, list[Any]]:
    """Send each node its requests, which it serves one after the other, in one round trip.

    What comes of each is its answer, or the error that came instead. A request that fails does not keep a
    node from serving the next one.
    """
    output = {node: bytearray() for node in asked}

    def on_data(node: int, data: bytes) -> bool:
        answers.take(output[node], data, node=node)
        return is_whole(output[node], count=len(asked[node]))

    messages = {node: b"".join(map(message, several)) for node, several in asked.items()}
    ends = fleet.request(program(), messages, on_data, timeout_s=timeout_s)
    return {node: _answers(node, asked[node], bytes(output[node]), end) for node, end in ends.items()}


def answers_beside(
    fleet: Carrier, asked: Mapping[int, Request[Answer]], *, timeout_s: float
) -> dict[int, Answer | AwsddpError]:
    """Return the same from another thread, while the nodes' programs answer requests: by other programs."""
    argv, source = program()
    commands = {node: (argv, source + message(request)) for node, request in asked.items()}
    ends = fleet.run_each(commands, timeout_s=timeout_s)
    return {
        node: end if isinstance(end, NodeError) else _answer(node, asked[node], end.stdout, end)
        for node, end in ends.items()
    }


def _answers(node: int, asked: Sequence[Request[Any]], output: bytes, end: Ended | NodeError) -> list[Any]:
    """Return the answers in a node's output, in the order of `requests`."""
    _, *parts = output.split(MAGIC, len(asked))
    rest = b"" if parts else output
    parts = [MAGIC + part for part in parts] + [rest] * (len(asked) - len(parts))
    return [_answer(node, one, part, end) for one, part in zip(asked, parts, strict=True)]


def _answer(node: int, request: Request[Any], output: bytes, end: Ended | NodeError) -> Any:
    if isinstance(end, NodeError):
        return end
    try:
        return answer(output, request=request, node=node, stderr=end.stderr)
    except AwsddpError as error:
        return error


def check_spec(spec: JobSpec, *, nodes: int) -> None:
    """Refuse what `launch_requests` would of a job on so many nodes: an unset secret, an unknown launcher, an
    invalid placeholder in its command. Raises ConfigError, UsageError.
    """
    from awsddp.jobs.launchers import launcher
    from awsddp.jobs.ranks import template

    with_secrets(spec)
    launcher(spec.job.launcher_name)
    data = "data" if len(spec.data.sources) == 1 else None
    for word in (*spec.job.prefix, spec.job.script or "", *spec.job.args):
        template(word, nnodes=nodes, folder="", resume=spec.job.resume, data=data)


def launch_requests(
    spec: JobSpec,
    *,
    job: str,
    ranks: "Sequence[Rank]",
    hosts: "Sequence[Host]",
    slot: int,
    facts: "Mapping[str, Fact] | None" = None,
    after: Sequence[str] = (),
) -> dict[int, Launch]:
    """Return, by node, the request that launches its part of the job `job`, after the jobs `after` ended.

    `hosts` are the nodes that `ranks` (of `layout`) names, in any order. `facts` are what its nodes are to
    keep of it and tell in its document: commit, dirty, options, resumed, instance_type, price_usd_per_hour.
    The values of the job's secrets are in the environment of its processes, `secrets` names them. Raises
    UsageError for invalid placeholders and without a script, ConfigError for a secret that is not set here.
    """
    from awsddp.jobs.launchers import launcher
    from awsddp.jobs.ranks import Rendezvous, defaults

    if not spec.job.script:
        raise UsageError("no script to run", "", "awsddp train SCRIPT")
    spec = with_secrets(spec)
    by_node = {host.node.node: host for host in hosts}
    used = [by_node[node] for node in sorted({rank.node for rank in ranks})]
    port, link_port = _ports(slot)
    rendezvous = Rendezvous(job=job, master_addr=_private(used[0]), master_port=port)
    processes = launcher(spec.job.launcher_name)
    launch, secret = secrets.token_hex(8), secrets.token_hex(32)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    nodes = [
        Machine(node=one.node.node, private_ip=_private(one), instance_id=one.node.instance_id)
        for one in used
    ]
    layout = [Place(rank.rank, rank.local_rank, rank.node) for rank in ranks]
    return {
        host.node.node: Launch(
            job=job,
            launch=launch,
            slot=slot,
            created=created,
            node=host.node.node,
            nodes=nodes,
            layout=layout,
            folder=host.folder(job),
            workdir=host.workdir,
            path=posixpath.dirname(host.prepared.ranks_python),
            processes=processes(spec, _of(ranks, host), host=host, rendezvous=rendezvous),
            secret=secret,
            master_port=port,
            link_port=link_port,
            join_s=JOIN_SECONDS,
            silent_s=seconds(spec.job.heartbeat_timeout),
            timeout=None if spec.job.timeout is None else seconds(spec.job.timeout),
            grace=seconds(spec.job.grace),
            outputs=spec.job.outputs,
            defaults=defaults(ranks[0].local_world_size),
            helper=_source("helper"),
            gpus=host.gpus,
            after=after,
            secrets=spec.env.secrets,
            facts={**_facts(spec), **(facts or {})},
            hang_after=None if spec.job.hang_after is None else seconds(spec.job.hang_after),
            elastic=_elastic(spec, len(used)),
        )
        for host in used
    }


def _facts(spec: JobSpec) -> "dict[str, Fact]":
    """Return what is told of a job later, its words as `_shown`."""
    script, args = _shown(spec.job.script or ""), map(_shown, spec.job.args[:_MOST_ARGS])
    launcher, save_to = spec.job.launcher_name, spec.job.save_to
    return {"script": script, "args": tuple(args), "launcher": launcher, "save_to": save_to}


def _elastic(spec: JobSpec, nodes: int) -> dict[str, int] | None:
    """Return what torch's elastic agent may do on its own, None under a launcher without one."""
    if spec.job.launcher_name != "torchrun":
        return None
    return {"min_nodes": spec.job.min_nodes(nodes), "max_restarts": spec.job.max_restarts or 0}


def job_ports() -> list[int]:
    """Return every port that a job could take.

    The first node of a job alone is asked about them, as local nodes may share a machine, where two that look
    would be in each other's way.
    """
    return [port for slot in range(SLOTS) for port in _ports(slot)]


def choose_slot(found: Mapping[int, answers.Slots], *, first: int) -> int:
    """Return the lowest slot that is used on no node and whose ports are free on the node `first`.

    `found` are the answers to `requests.Slots`, by node. Raises ConfigError where there is none.
    """
    used = {slot for one in found.values() for slot in one.used}
    taken = set(found[first].taken)
    for slot in range(SLOTS):
        if slot not in used and taken.isdisjoint(_ports(slot)):
            return slot
    raise ConfigError(
        f"node{first} has no free ports for another job",
        f"tried: {FIRST_PORT} and every tenth above, {SLOTS} in all, each with the next",
        f"awsddp exec --node {first} 'ss -tlnp'   # what holds them",
    )


def _ports(slot: int) -> tuple[int, int]:
    """Return MASTER_PORT and the supervisors' port of a slot."""
    port = FIRST_PORT + 10 * slot
    return port, port + 1


def _shown(text: str) -> str:
    """Return a word of the job as its record shows it: bounded, and Unicode whatever its bytes are."""
    return text[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()


def _of(ranks: "Sequence[Rank]", host: "Host") -> "list[Rank]":
    return [rank for rank in ranks if rank.node == host.node.node]


def _private(host: "Host") -> str:
    if host.node.private_ip is None:
        raise NodeError(f"node{host.node.node} has no private address", f"it is {host.node.state}")
    return host.node.private_ip
