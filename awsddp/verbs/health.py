"""The health of a cluster: what `doctor` finds on its nodes, and what `train` checks before a job."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from awsddp import answers
from awsddp.compat.types import network_gbyte_s
from awsddp.errors import AwsddpError, NodeError, NotFoundError
from awsddp.jobs import health, protocol
from awsddp.jobs.ranks import Host, layout
from awsddp.records import Check
from awsddp.report import node_name
from awsddp.resources import template, train_folder
from awsddp.spec import JobSection
from awsddp.verbs.advice import advised
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context
from awsddp.verbs.requests import ANSWER_S, answering, answers_of, ask

DIAL_S = 2.0
"""How long a connection between two nodes may take."""
GROUP_S, RANK_S, MOST_GROUP_S = 60.0, 2.0, 180.0
"""How long ranks may take to import torch, to form a process group and to time an all-reduce: so long, so
much longer for each rank (nodes of the local cloud share CPUs), and at most."""
CLAIM_S = 5.0
LEAST_SHARE = 0.5
"""Of the network bandwidth that a type promises: below it the nodes are measured in pairs."""
LEAST_GBYTE_S = 0.005
"""So, too, where nothing is promised: no network is that slow."""
HERE_BYTES = 3_000_000
"""What each of two nodes sends here: between themselves they cannot tell which is slow."""


def preflight(cluster: ClusterHandle, requests: Mapping[int, Mapping[str, Any]]) -> None:
    """Check the nodes of a job before its launch `requests`: connections, GPUs, disk, memory, clock.

    Raises NodeError that names the nodes that are not fit.
    """
    launch = requests[min(requests)]
    probes = _probe(cluster, sorted(requests), ports=(launch["master_port"], launch["link_port"]))
    checks = health.quick_checks(probes)
    bad = [check for check in [*checks, *_dial(cluster, probes)] if check.ok is False]
    if bad:
        raise NodeError(
            "; ".join(_sentence(check) for check in bad),
            "checked before the ranks start",
            "awsddp doctor   # check everything\n" + "\n".join(dict.fromkeys(check.hint for check in bad)),
        )


def _sentence(check: Check) -> str:
    who = "" if check.node is None else f"{node_name(check.node)}: "
    return f"{who}{check.name}: {check.value}"


def doctor(ctx: Context) -> dict[str, Any] | None:
    """Return the `doctor` document of the nodes of a cluster that this machine knows, None without one.

    It is bounded in time, and ends no job. Raises NoNodes where no node can be reached, InUse while another
    client starts a job, CloudError.
    """
    if ctx.folder.read() is None:
        return None
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(ClusterHandle.partly_ready(ctx))
            stack.enter_context(cluster.connect_reachable())
        except NotFoundError:
            return None
        return checks_document(ctx, _checkup(cluster))


def checks_document(ctx: Context, checks: Sequence[Check]) -> dict[str, Any]:
    """Return the `doctor` document of these checks."""
    return {"checks": [asdict(replace(check, hint=advised(ctx, check.hint))) for check in checks]}


def _checkup(cluster: ClusterHandle) -> list[Check]:
    fleet = cluster.fleet
    # A node whose disk is full cannot hold the claim, and is named below.
    with contextlib.suppress(NodeError):
        ask(fleet, {min(fleet.nodes): protocol.claim_request("`awsddp doctor`", wait_s=CLAIM_S)})
    busy = [job.job for job in cluster.jobs(partial=True) if job.state == "running"]
    checks = _unreached(cluster)
    probes = _probe(cluster, answering(fleet), thorough=True)
    checks += [*health.quick_checks(probes), *health.thorough_checks(probes), *_dial(cluster, probes)]
    if busy:
        value = f"left out: job {', '.join(busy)} runs"
        return [*checks, Check(name="process group", ok=None, value=value)]
    fit = [node for node in probes.answers if node not in health.failing(checks)]
    return [*checks, *_group_checks(cluster, probes, fit)]


def _unreached(cluster: ClusterHandle) -> list[Check]:
    nodes = {node.node: node for node in cluster.nodes}
    whys = {node: failure.message.partition(": ")[2] for node, failure in cluster.fleet.failures.items()}
    checks = [
        health.node_check(nodes[node], "login", False, why, "SSH") for node, why in sorted(whys.items())
    ]
    for node in cluster.excluded:
        checks.append(health.node_check(node, "login", None, cluster.state_of(node).partition(" is ")[2]))
    return checks


def _probe(
    cluster: ClusterHandle, numbers: Sequence[int], *, ports: tuple[int, ...] = (), thorough: bool = False
) -> health.Probes:
    """Ask the nodes what they have; `ports` are those of the job on its first node."""
    nodes = {node.node: node for node in cluster.nodes if node.node in numbers}
    requests = {
        number: protocol.probe_request(
            str(nodes[number].private_ip), ports=ports if number == numbers[0] else (), thorough=thorough
        )
        for number in numbers
    }
    began = time.time()
    found = answers_of(cluster.fleet, requests, timeout_s=ANSWER_S)
    return health.Probes(
        nodes=nodes,
        prepared={number: cluster.prepared(number) for number in numbers},
        answers={node: one for node, one in found.items() if not isinstance(one, AwsddpError)},
        asked=(began, time.time()),
        silent={node: one.message for node, one in found.items() if isinstance(one, AwsddpError)},
    )


def _dial(cluster: ClusterHandle, probes: health.Probes) -> list[Check]:
    """Return the checks of the connections between every two nodes, in both directions."""
    targets = {
        node: [(node, str(probes.nodes[node].private_ip), port) for port in answer["ports"]]
        for node, answer in probes.answers.items()
    }
    requests = {
        node: protocol.dial_request(
            [peer for other, peers in targets.items() if other != node for peer in peers], seconds=DIAL_S
        )
        for node in targets
    }
    found = answers_of(cluster.fleet, requests, timeout_s=ANSWER_S)
    dials = {node: one["dials"] for node, one in found.items() if not isinstance(one, AwsddpError)}
    return health.dial_checks(probes, dials)


# The process group.


def _group_checks(cluster: ClusterHandle, probes: health.Probes, nodes: Sequence[int]) -> list[Check]:
    """Return the checks of a process group over all ranks of `nodes`; of parts where it is slow or hangs."""
    if len(nodes) < 2:
        return [Check(name="process group", ok=None, value="left out: fewer than two nodes are fit")]
    cluster.ctx.say(f"forming a process group on {len(nodes)} nodes (at most {MOST_GROUP_S:g} s)")
    (whole,) = _form(cluster, probes, [nodes])
    checks = [health.group_check(probes, whole)]
    if whole.gbyte_s is None:
        unclear = len(nodes) > 2 and not health.failing(checks)
    else:
        promised = _promise(cluster)
        unclear = whole.gbyte_s < (LEAST_GBYTE_S if promised is None else promised * LEAST_SHARE)
        value = f"{whole.gbyte_s:.2g} GB/s bus bandwidth of {len(whole.ranks)} ranks"
        expected = "" if promised is None else f"{promised:g} GB/s is the type's network"
        checks.append(Check(name="all-reduce", ok=None if unclear else True, value=value, expected=expected))
    if not unclear:
        return checks
    if len(nodes) == 2:
        return [*checks, *health.rate_checks(probes, "network", _to_here(cluster, nodes))]
    return [*checks, *health.rate_checks(probes, "pairs", _in_pairs(cluster, probes, nodes))]


def _in_pairs(cluster: ClusterHandle, probes: health.Probes, nodes: Sequence[int]) -> dict[int, float]:
    """Return the best rate of each node (MB/s) in process groups with each of two others; 0 if all fail.

    One that seems slow is measured once more, with one that is not.
    """
    cluster.ctx.say(f"forming process groups of two nodes (at most {2 * MOST_GROUP_S:g} s)")
    best = dict.fromkeys(nodes, 0.0)

    def measure(pairs: Sequence[tuple[int, int]]) -> None:
        for group in _form(cluster, probes, pairs):
            for one in group.ranks:
                best[one.node] = max(best[one.node], (group.gbyte_s or 0.0) * 1e3)

    for pairs in health.rounds(nodes):
        measure(pairs)
    slow = health.slow_nodes(best)
    if again := list(zip(slow, [node for node in nodes if node not in slow], strict=False)):
        measure(again)
    return best


def _to_here(cluster: ClusterHandle, nodes: Sequence[int]) -> dict[int, float]:
    """Return how fast each node sends to this machine (MB/s); 0 if it is lost."""
    rates = dict.fromkeys(nodes, 0.0)
    for node in nodes:
        began = time.monotonic()
        with contextlib.suppress(NodeError):
            cluster.fleet.run(["head", "-c", f"{HERE_BYTES}", "/dev/zero"], nodes=[node], timeout_s=ANSWER_S)
            rates[node] = HERE_BYTES / 1e6 / (time.monotonic() - began)
    return rates


def _promise(cluster: ClusterHandle) -> float | None:
    """Return the network bandwidth of the cluster's type in GB/s; None where GPUs are not real."""
    if any(one.driver is None for one in cluster.record.prepared):
        return None
    return network_gbyte_s(cluster.record.instance_type)


def _form(
    cluster: ClusterHandle, probes: health.Probes, groups: Sequence[Sequence[int]]
) -> list[health.Group]:
    """Run train/probe.py, as a job would, on each of `groups` of nodes at once; return what its ranks say."""
    groups = [sorted(nodes) for nodes in groups]  # the ranks of a launch meet on its lowest node
    formed = [
        health.Group(layout(nodes, gpus={node: probes.prepared[node].gpus for node in nodes}))
        for nodes in groups
    ]
    limit = min(GROUP_S + RANK_S * sum(len(group.ranks) for group in formed), MOST_GROUP_S)
    asked = cluster.ctx.job
    spec = replace(asked, job=JobSection(script="probe.py"), env=replace(asked.env, secrets=()))
    slots = ask(cluster.fleet, {nodes[0]: protocol.slots_request() for nodes in groups})
    starter, program = template("start_ranks.py"), (train_folder() / "probe.py").read_text("utf-8")
    requests = {}
    for nodes, group in zip(groups, formed, strict=True):
        hosts = [Host(node=probes.nodes[node], prepared=probes.prepared[node], workdir="/") for node in nodes]
        slot = protocol.choose_slot(slots, first=nodes[0])
        launch = protocol.launch_requests(spec, job="doctor", ranks=group.ranks, hosts=hosts, slot=slot)
        for node, request in launch.items():
            ranks = [process["environment"] for process in request["processes"]]
            words = json.dumps({"ranks": ranks, "seconds": limit, "program": program})
            requests[node] = ([probes.prepared[node].ranks_python, "-c", starter], words.encode())
    _hear(cluster, requests, formed, timeout_s=limit + 10)
    return formed


def _hear(
    cluster: ClusterHandle, requests: Mapping[int, Any], groups: Sequence[health.Group], *, timeout_s: float
) -> None:
    """Start the ranks of `groups` and take up what they say."""
    of = {one.node: group for group in groups for one in group.ranks}
    rest = dict.fromkeys(requests, b"")

    def on_data(node: int, data: bytes) -> None:
        *lines, rest[node] = (rest[node] + data).split(b"\n")
        if len(rest[node]) > answers.MOST_BYTES:
            raise answers.malformed(node, "an endless line")
        own = {one.rank for one in of[node].ranks if one.node == node}
        for line in lines:
            if (step := answers.rank_step(line, node=node, ranks=own)) is not None:
                of[node].hear(step)

    cluster.fleet.stream(requests, on_data, silent_after_s=None, timeout_s=timeout_s)
