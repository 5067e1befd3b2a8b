"""The protocol with a node: requests to the supervisor's program, and the command that sends one.

Requests that need nothing made up are written where they are sent: "state" asks for the documents of all
jobs, "unclaim" gives the right to start one back, "stacks" asks what the processes of a job do at this
moment, "hashes" for the size and sha256 of files, and "lost" tells a node of a job that another one is gone.
"""

import base64
import bz2
import functools
import json
import posixpath
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.answers import check
from awsddp.errors import ConfigError, InUse, JobError, NodeError, NotFoundError, UsageError
from awsddp.jobs.supervisor.follow import MAGIC
from awsddp.spec import JobSpec, seconds, with_secrets

if TYPE_CHECKING:
    from awsddp.jobs.ranks import Host, Rank

FIRST_PORT = 29400
SLOTS = 64
JOIN_SECONDS = 60.0
"""How long the first node waits for the supervisors of the others."""
LEASE_SECONDS = 1800
"""How long a client that has vanished without a goodbye keeps others from starting a job."""
EVENTS_AT_ONCE_BYTES = 16 << 20
"""How much of a node's event files is fetched at once while its job is followed."""
AT_ONCE_BYTES = 256 << 10
"""How much of a node's results may come with the answer that lists them."""
_MOST_ARGS, _MOST_CHARACTERS = 1000, 1000

# The modules of the node's program, each after those that it imports; the last one has main().
_MODULES = (
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
# Those that only some requests need travel with them: the program fits the first window of a connection.
_REQUEST_MODULES = {
    "launch": (
        "diagnose",
        "causes",
        "processes",
        "coordinator",
        "elastic",
        "stacks",
        "samples",
        "serve",
        "hang",
    ),
    "stacks": ("stacks",),
    "probe": ("diagnose", "probe"),
}
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
_ERRORS = {
    "usage": UsageError,
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


@functools.cache
def _packed(modules: tuple[str, ...]) -> bytes:
    return bz2.compress(json.dumps([(f"{_PACKAGE}.{name}", _source(name)) for name in modules]).encode())


def _source(name: str) -> str:
    source = (Path(__file__).parent / "supervisor" / f"{name}.py").read_text("utf-8")
    return _NOT_SENT.sub(lambda found: (found[1] or "") + "\n" * found[0].count("\n"), source)


def message(request: Mapping[str, Any]) -> bytes:
    """Return `request` as the program reads it."""
    modules = _REQUEST_MODULES.get(request["do"])
    extra = {"modules": base64.b64encode(_packed(modules)).decode()} if modules else {}
    return _part(json.dumps({**request, **extra}).encode())


def _part(data: bytes) -> bytes:
    return b"%d\n%s" % (len(data), data)


def is_whole(said: bytes | bytearray, *, count: int = 1) -> bool:
    """Tell whether the output of a node so far holds complete answers to `count` requests (but follow)."""
    return said.endswith(b"\n") and not said.endswith(MAGIC) and said.count(MAGIC) >= count


def answer(stdout: bytes, *, request: Mapping[str, Any], node: int, stderr: bytes = b"") -> dict[str, Any]:
    """Return the answer to `request` in the output of `node`, validated (answers.py).

    Raises the error that it names; NodeError for no answer.
    """
    _, mark, said = stdout.partition(MAGIC)
    if not mark or not said.strip():
        why = (stderr or stdout)[-2000:].decode("utf-8", "replace").strip()
        raise NodeError(f"node{node} gave no answer", why, "awsddp doctor")
    document = check(said, request=request, node=node)
    if "error" in document:
        said_error = document["error"]
        raise _ERRORS[said_error["kind"]](f"node{node}: {said_error['message']}", said_error["why"])
    return document


def launch_requests(
    spec: JobSpec,
    *,
    job: str,
    ranks: "Sequence[Rank]",
    hosts: "Sequence[Host]",
    slot: int,
    facts: Mapping[str, Any] | None = None,
    after: Sequence[str] = (),
) -> dict[int, dict[str, Any]]:
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
    script, spec = _shown(spec.job.script), with_secrets(spec)
    by_node = {host.node.node: host for host in hosts}
    used = [by_node[node] for node in sorted({rank.node for rank in ranks})]
    port, link_port = _ports(slot)
    first = _private(used[0])
    rendezvous = Rendezvous(job=job, master_addr=first, master_port=port)
    processes = launcher(spec.job.launcher_name)
    common: dict[str, Any] = {
        "do": "launch",
        "job": job,
        "launch": secrets.token_hex(8),
        "slot": slot,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "nodes": [
            {"node": host.node.node, "private_ip": _private(host), "instance_id": host.node.instance_id}
            for host in used
        ],
        "facts": {
            "script": script,
            "args": tuple(_shown(text) for text in spec.job.args[:_MOST_ARGS]),
            "launcher": spec.job.launcher_name,
            **(facts or {}),
        },
        "layout": [(rank.rank, rank.local_rank, rank.node) for rank in ranks],
        "helper": _source("helper"),
        "secret": secrets.token_hex(32),
        "master_port": port,
        "link_port": link_port,
        "join_s": JOIN_SECONDS,
        "silent_s": seconds(spec.job.heartbeat_timeout),
        "timeout": None if spec.job.timeout is None else seconds(spec.job.timeout),
        "hang_after": None if spec.job.hang_after is None else seconds(spec.job.hang_after),
        "grace": seconds(spec.job.grace),
        "outputs": list(spec.job.outputs),
        "defaults": defaults(ranks[0].local_world_size),
        "after": list(after),
        "secrets": list(spec.env.secrets),
        "elastic": _elastic(spec, len(used)),
    }
    return {
        host.node.node: {
            **common,
            "node": host.node.node,
            "folder": host.folder(job),
            "workdir": host.workdir,
            "path": posixpath.dirname(host.prepared.ranks_python),
            "gpus": list(host.gpus),
            "processes": [
                asdict(one) for one in processes(spec, _of(ranks, host), host=host, rendezvous=rendezvous)
            ],
        }
        for host in used
    }


def _elastic(spec: JobSpec, nodes: int) -> dict[str, int] | None:
    """Return what torch's elastic agent may do on its own, None under a launcher without one."""
    if spec.job.launcher_name != "torchrun":
        return None
    return {"min_nodes": spec.job.min_nodes(nodes), "max_restarts": spec.job.max_restarts or 0}


def follow_request(job: str, *, offsets: Mapping[int, int], to_the_end: bool = True) -> dict[str, Any]:
    """Ask for everything that the ranks of a node say, from `offsets` (bytes, by rank) on.

    Without `to_the_end` only for what they have said so far.
    """
    known = {str(rank): offset for rank, offset in offsets.items()}
    return {"do": "follow", "job": job, "offsets": known, "to_the_end": to_the_end}


def cancel_request(job: str, *, grace: float | None = None, launch: str | None = None) -> dict[str, Any]:
    """Ask to end `job`; the answer is its document, at its end. `grace` (s): else as it was launched.

    With `launch`, the id in a launch request, only a job that this request has started ends.
    """
    return {"do": "cancel", "job": job, "grace": grace, "launch": launch}


def claim_request(owner: str, *, wait_s: float) -> dict[str, Any]:
    """Ask for the right to start a job, which a launch uses up; `owner` is shown to another client."""
    return {"do": "claim", "owner": owner, "wait_s": wait_s, "lease_s": LEASE_SECONDS}


def probe_request(address: str, *, ports: Sequence[int] = (), thorough: bool = False) -> dict[str, Any]:
    """Ask what the node has, and to listen on `ports` of `address` and one more (supervisor/probe.py)."""
    return {"do": "probe", "address": address, "ports": list(ports), "thorough": thorough}


def dial_request(peers: Sequence[tuple[int, str, int]], *, seconds: float) -> dict[str, Any]:
    """Ask to connect to ports of other nodes, (node, address, port), after all have answered `probe`."""
    return {"do": "dial", "peers": [list(peer) for peer in peers], "seconds": seconds}


def manifest_request(
    job: str, *, outputs: Sequence[str] = (), exclude: Sequence[tuple[str, bool]] = ()
) -> dict[str, Any]:
    """Ask for the results of `job` on the node (supervisor/manifest.py); small ones come with the answer.

    `outputs` are paths beside those of the launch, `exclude` the patterns of `exclude_patterns`.
    """
    request = {"do": "manifest", "job": job, "at_once": AT_ONCE_BYTES}
    return {**request, "outputs": list(outputs), "exclude": list(exclude)}


def events_request(
    job: str, *, outputs: Sequence[str], exclude: Sequence[tuple[str, bool]], known: Mapping[str, int]
) -> dict[str, Any]:
    """Ask for TensorBoard's event files of `job`, whole, but those whose size at home is `known`."""
    request = manifest_request(job, outputs=outputs, exclude=exclude)
    return {**request, "events": dict(known), "at_once": EVENTS_AT_ONCE_BYTES}


def slots_request(gpus: Sequence[int] = (), *, is_first: bool = True) -> dict[str, Any]:
    """Ask which jobs and slots the node has; the first one also which ports that a job could take are taken.

    Only that one, as local nodes may share a machine, where two that look would be in each other's way. With
    `gpus` a job that runs on other GPUs of the node is not told to run.
    """
    ports = {port for slot in range(SLOTS if is_first else 0) for port in _ports(slot)}
    return {"do": "slots", "ports": sorted(ports), "gpus": list(gpus)}


def choose_slot(answers: Mapping[int, Mapping[str, Any]], *, first: int) -> int:
    """Return the lowest slot that is used on no node and whose ports are free on the node `first`.

    `answers` are those to `slots_request`, by node. Raises ConfigError where there is none.
    """
    used = {slot for found in answers.values() for slot in found["used"]}
    taken = set(answers[first]["taken"])
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
