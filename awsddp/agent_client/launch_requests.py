"""From a job to the requests that launch it: what each node gets, and its ports."""

import posixpath
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from awsddp.agent.messages import Launch, Machine, Place
from awsddp.agent_client.program import source_of
from awsddp.errors import ConfigError, NodeError, UsageError
from awsddp.model import node_answers
from awsddp.settings.loader import with_secrets, words_of
from awsddp.settings.spec import JobSpec
from awsddp.settings.values import seconds

if TYPE_CHECKING:
    from awsddp.agent.messages import Fact
    from awsddp.agent_client.rank_layout import Host, Rank

FIRST_PORT = 29400
SLOTS = 64
JOIN_SECONDS = 60.0
"""How long the first node waits for the supervisors of the others."""
_MOST_ARGS, _MOST_CHARACTERS = 1000, 1000


def check_spec(spec: JobSpec, *, nodes: int) -> None:
    """Refuse what `launch_requests` would of a job on so many nodes: an unset secret, an unknown launcher, an
    invalid placeholder in its command. Raises ConfigError, UsageError.
    """
    from awsddp.agent_client.launchers import launcher
    from awsddp.agent_client.rank_layout import template

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
    asked: JobSpec | None = None,
    facts: "Mapping[str, Fact] | None" = None,
    after: Sequence[str] = (),
) -> dict[int, Launch]:
    """Return, by node, the request that launches its part of the job `job`, after the jobs `after` ended.

    `hosts` are the nodes that `ranks` (of `layout`) names, in any order. `facts` are what its nodes are to
    keep of it and tell in its document: commit, dirty, resumed, instance_type, price_usd_per_hour; so are the
    options of the job as it was `asked` for.
    The values of the job's secrets are in the environment of its processes, `secrets` names them. Raises
    UsageError for invalid placeholders and without a script, ConfigError for a secret that is not set here.
    """
    from awsddp.agent_client.launchers import launcher
    from awsddp.agent_client.rank_layout import Rendezvous, defaults

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
            helper=source_of("diagnosis.helper"),
            gpus=host.gpus,
            after=after,
            secrets=spec.env.secrets,
            facts={**_facts(spec, asked), **(facts or {})},
            hang_after=None if spec.job.hang_after is None else seconds(spec.job.hang_after),
            elastic=_elastic(spec, len(used)),
        )
        for host in used
    }


def _facts(spec: JobSpec, asked: JobSpec | None) -> "dict[str, Fact]":
    """Return what is told of a job later, its words as `_shown`."""
    script, args = _shown(spec.job.script or ""), map(_shown, spec.job.args[:_MOST_ARGS])
    launcher, save_to = spec.job.launcher_name, spec.job.save_to
    options = {} if asked is None else {"options": words_of(asked)}
    return {"script": script, "args": tuple(args), "launcher": launcher, "save_to": save_to, **options}


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


def choose_slot(found: Mapping[int, node_answers.Slots], *, first: int) -> int:
    """Return the lowest slot that is used on no node and whose ports are free on the node `first`.

    `found` are the answers to `messages.Slots`, by node. Raises ConfigError where there is none.
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
