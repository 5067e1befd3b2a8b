"""Build the requests that launch a job on its nodes, and choose its ports."""

import posixpath
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from awsddp.agent.messages import Launch, LaunchNode, LayoutRow
from awsddp.agent_client.program import module_source
from awsddp.errors import ConfigError, NodeError, UsageError
from awsddp.model import node_answers
from awsddp.settings.loader import job_arguments, with_secrets
from awsddp.settings.spec import JobSpec
from awsddp.settings.values import parse_duration

if TYPE_CHECKING:
    from awsddp.agent.messages import Fact
    from awsddp.agent_client.rank_layout import Host, Rank

FIRST_PORT = 29400
SLOTS = 64
JOIN_SECONDS = 60.0
"""How long the first node waits for the other nodes' agents."""
LOOKS = (1800.0, 60.0)
"""After how many seconds of silence the nodes look whether the job hangs, and the time between two looks."""
_MOST_ARGS, _MOST_CHARACTERS = 1000, 1000


def check_spec(spec: JobSpec, *, nodes: int) -> None:
    """Check a job on `nodes` nodes for unset secrets, an unknown launcher and invalid placeholders.

    Raises ConfigError, UsageError.
    """
    from awsddp.agent_client.launchers import launcher
    from awsddp.agent_client.rank_layout import parse_template

    with_secrets(spec)
    launcher(spec.job.launcher_name)
    data = "data" if len(spec.data.sources) == 1 else None
    for word in (*spec.job.prefix, spec.job.script or "", *spec.job.args):
        parse_template(word, nnodes=nodes, folder="", resume=spec.job.resume, data=data)


def make_launch_requests(
    spec: JobSpec,
    *,
    job: str,
    ranks: "Sequence[Rank]",
    hosts: "Sequence[Host]",
    slot: int,
    requested_spec: JobSpec | None = None,
    facts: "Mapping[str, Fact] | None" = None,
    after: Sequence[str] = (),
) -> dict[int, Launch]:
    """Return {node: request}. A request launches a node's part once the jobs in `after` have ended.

    `hosts` are the nodes that `ranks` run on, in any order. `facts` are fields that nodes store and report
    with the job (commit, dirty, resumed, run_id, recoveries, instance_type, price_usd_per_hour). The options
    of `requested_spec` are added to these fields, and a job without a `run_id` begins a run with the launch's
    id. The processes' environment contains the values of the job's secrets. Raises UsageError for invalid
    placeholders or a missing script, and ConfigError for a secret that is not set on this machine.
    """
    from awsddp.agent_client.launchers import launcher
    from awsddp.agent_client.rank_layout import Rendezvous, default_environment

    if not spec.job.script:
        raise UsageError("no script to run", "", "awsddp train SCRIPT")
    spec, hang_after = with_secrets(spec), spec.job.hang_after
    launch, secret = secrets.token_hex(8), secrets.token_hex(32)
    stored = {**_facts(spec, requested_spec), "run_id": launch, **(facts or {})}
    by_node = {host.node.node: replace(host, run_id=str(stored["run_id"])) for host in hosts}
    used = [by_node[node] for node in sorted({rank.node for rank in ranks})]
    port, link_port = _ports(slot)
    rendezvous = Rendezvous(job=job, master_addr=_private_ip(used[0]), master_port=port)
    processes = launcher(spec.job.launcher_name)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    nodes = [
        LaunchNode(node=host.node.node, private_ip=_private_ip(host), instance_id=host.node.instance_id)
        for host in used
    ]
    layout = [LayoutRow(rank.rank, rank.local_rank, rank.node) for rank in ranks]
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
            processes=processes(spec, _ranks_on(ranks, host), host=host, rendezvous=rendezvous),
            secret=secret,
            master_port=port,
            link_port=link_port,
            join_s=JOIN_SECONDS,
            silent_s=parse_duration(spec.job.heartbeat_timeout),
            timeout=None if spec.job.timeout is None else parse_duration(spec.job.timeout),
            grace=parse_duration(spec.job.grace),
            outputs=spec.job.outputs,
            defaults=default_environment(ranks[0].local_world_size),
            helper=module_source("diagnosis.helper"),
            gpus=host.gpus,
            after=after,
            secrets=spec.env.secrets,
            facts=stored,
            hang_after=None if hang_after in (None, "off") else parse_duration(hang_after),
            looks=() if hang_after == "off" else LOOKS,
            ends_when_hung=spec.job.recover is not None,
            elastic=_elastic(spec, len(used)),
        )
        for host in used
    }


def _facts(spec: JobSpec, requested_spec: JobSpec | None) -> "dict[str, Fact]":
    """Return the facts about a job from its settings, with texts truncated to a limited length."""
    script, args = _bounded(spec.job.script or ""), map(_bounded, spec.job.args[:_MOST_ARGS])
    launcher, save_to = spec.job.launcher_name, spec.job.save_to
    options = {} if requested_spec is None else {"options": job_arguments(requested_spec)}
    return {"script": script, "args": tuple(args), "launcher": launcher, "save_to": save_to, **options}


def _elastic(spec: JobSpec, nodes: int) -> dict[str, int] | None:
    """Return the limits for torch's elastic agent, or None for a launcher without an elastic agent."""
    if spec.job.launcher_name != "torchrun":
        return None
    return {"min_nodes": spec.job.min_nodes(nodes), "max_restarts": spec.job.max_restarts or 0}


def list_job_ports() -> list[int]:
    """Return all ports that a job can use.

    Only a job's first node needs to check which of these ports are taken. Local nodes may share a machine,
    where concurrent checks would conflict.
    """
    return [port for slot in range(SLOTS) for port in _ports(slot)]


def choose_slot(responses: Mapping[int, node_answers.Slots], *, first: int) -> int:
    """Return the lowest slot that no node uses and whose ports are free on node `first`.

    `responses` maps each node to its response to `messages.Slots`. Raises ConfigError if there is no such
    slot.
    """
    used = {slot for response in responses.values() for slot in response.used}
    taken = set(responses[first].taken)
    for slot in range(SLOTS):
        if slot not in used and taken.isdisjoint(_ports(slot)):
            return slot
    raise ConfigError(
        f"node{first} has no free ports for another job",
        f"each of the {SLOTS} pairs of ports from {FIRST_PORT}, in steps of 10, is in use",
        f"awsddp exec --node {first} 'ss -tlnp'   # shows which processes use the ports",
    )


def _ports(slot: int) -> tuple[int, int]:
    """Return a slot's MASTER_PORT, and its port for the agents."""
    port = FIRST_PORT + 10 * slot
    return port, port + 1


def _bounded(text: str) -> str:
    """Return a text truncated to a limited length, with bytes that are not UTF-8 replaced."""
    return text[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()


def _ranks_on(ranks: "Sequence[Rank]", host: "Host") -> "list[Rank]":
    return [rank for rank in ranks if rank.node == host.node.node]


def _private_ip(host: "Host") -> str:
    if host.node.private_ip is None:
        raise NodeError(f"node{host.node.node} has no private address", f"it is {host.node.state}")
    return host.node.private_ip
