"""The health of a cluster: what `doctor` finds on its nodes, and what `train` checks before a job."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from awsddp import answers, compat
from awsddp.cluster import Check, Node
from awsddp.errors import AwsddpError, NodeError, NotFoundError
from awsddp.jobs import health, protocol
from awsddp.jobs.ranks import Rendezvous, environment, layout
from awsddp.report import node_name
from awsddp.resources import template
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context
from awsddp.verbs.requests import ANSWER_S, Answer, answering, answers_of, ask

if TYPE_CHECKING:
    from awsddp.nodes.transport import Fleet

DIAL_S = 2.0
"""How long a connection between two nodes may take."""
SEND_S = 0.3
"""How long two nodes measure the rate of a connection."""
ROUNDS = 3
"""How many other nodes each node measures that with."""
TEXT_MB = 3
"""What each of two nodes sends here: between themselves they cannot tell which is slow."""
GROUP_S, RANK_S, MOST_GROUP_S = 60.0, 2.0, 180.0
"""How long ranks may take to import torch, to form a process group and to time an all-reduce: so long, so
much longer for each rank (nodes of the local cloud share CPUs), and at most."""
RETRIES = 2
"""How often a node that seems slow is measured again."""
CLAIM_S = 5.0
GPU_BYTES, CPU_BYTES = 256 << 20, 4 << 20
LEAST_SHARE = 0.5
"""Of the network bandwidth that a type promises: below it nodes are compared in pairs."""


def preflight(cluster: ClusterHandle, requests: Mapping[int, Mapping[str, Any]]) -> None:
    """Check the nodes of a job before its launch `requests`: connections, GPUs, disk, memory, clock.

    Raises NodeError that names the nodes that are not fit.
    """
    ports = protocol.job_ports(requests[min(requests)])
    probes = _probe(cluster, sorted(requests), ports=ports)
    checks = health.quick_checks(probes)
    bad = [check for check in [*checks, *_dial(cluster, probes)] if check.ok is False]
    if bad:
        raise NodeError(
            "; ".join(_sentence(check) for check in bad),
            "checked before the ranks start (job.preflight)",
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
        except NotFoundError:
            return None
        stack.enter_context(cluster.connect_reachable())
        return {"checks": [asdict(check) for check in _checkup(cluster)]}


def _checkup(cluster: ClusterHandle) -> list[Check]:
    fleet = cluster.fleet
    with contextlib.suppress(
        NodeError
    ):  # a node whose disk is full cannot hold the claim, and is named below
        ask(fleet, {min(fleet.nodes): protocol.claim_request("`awsddp doctor`", wait_s=CLAIM_S)})
    busy = [job.job for job in cluster.jobs(partial=True) if job.state == "running"]
    checks = _unreached(cluster)
    probes = _probe(cluster, answering(fleet), thorough=True)
    checks += [*health.quick_checks(probes), *health.thorough_checks(probes), *_dial(cluster, probes)]
    if busy:
        value = f"speeds and process group left out: job {', '.join(busy)} runs"
        return [*checks, Check(name="process group", ok=None, value=value)]
    fit = [node for node in probes.answers if node not in health.failing(checks)]
    checks += _rates(cluster, probes, fit)
    checks += _speed(cluster, probes)
    fit = [node for node in fit if node not in health.failing(checks)]
    return [*checks, *_group_checks(cluster, probes, fit)]


def _unreached(cluster: ClusterHandle) -> list[Check]:
    nodes = {node.node: node for node in cluster.nodes}
    return [
        Check(
            name="login",
            node=number,
            ok=False,
            value=failure.message.partition(": ")[2],
            expected="SSH",
            hint=health.replacement(nodes[number]),
        )
        for number, failure in sorted(cluster.fleet.failures.items())
    ] + [
        Check(name="login", node=one.node, ok=None, value=cluster.state_of(one).partition(" is ")[2])
        for one in cluster.excluded
    ]


def _probe(
    cluster: ClusterHandle, numbers: Sequence[int], *, ports: tuple[int, ...] = (), thorough: bool = False
) -> health.Probes:
    """Ask the nodes what they have; `ports` are those of the job on its first node."""
    nodes = {node.node: node for node in cluster.nodes if node.node in numbers}
    requests = {
        number: protocol.probe_request(
            _address(nodes[number]), ports=ports if number == numbers[0] else (), thorough=thorough
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


def _address(node: Node) -> str:
    assert node.private_ip is not None, "a node that runs has one"
    return node.private_ip


def _answered(fleet: "Fleet", requests: Mapping[int, Mapping[str, Any]]) -> dict[int, Answer]:
    found = answers_of(fleet, requests, timeout_s=ANSWER_S)
    return {node: answer for node, answer in found.items() if not isinstance(answer, AwsddpError)}


def _dial(cluster: ClusterHandle, probes: health.Probes) -> list[Check]:
    """Return the checks of the connections between every two nodes, in both directions."""
    targets = {
        node: [(node, _address(probes.nodes[node]), port) for port in answer["ports"]]
        for node, answer in probes.answers.items()
    }
    requests = {
        node: protocol.dial_request(
            [peer for other, peers in targets.items() if other != node for peer in peers], seconds=DIAL_S
        )
        for node in targets
    }
    found = _answered(cluster.fleet, requests)
    return health.dial_checks(probes, {node: answer["dials"] for node, answer in found.items()})


def _speed(cluster: ClusterHandle, probes: health.Probes) -> list[Check]:
    """Return the check of the CPUs: a node that seems slow is measured again, with one that is not."""
    speeds = {node: answer["speed"] for node, answer in probes.answers.items()}
    if len(speeds) < 2:
        return []
    slow = health.slow_nodes(speeds)
    reference = max(speeds, key=speeds.__getitem__)
    for _ in range(RETRIES if slow else 0):
        again = _probe(cluster, sorted({*slow, reference}), thorough=True).answers
        least = again[reference]["speed"] * health.SLOW if reference in again else 0.0
        slow = {node for node in slow if node not in again or again[node]["speed"] < least}
    return health.speed_checks(probes, "CPU speed", speeds, slow)


def _rates(cluster: ClusterHandle, probes: health.Probes, nodes: Sequence[int]) -> list[Check]:
    """Return the check of the network: each node sends to others, and each receives; the best rate counts."""
    if len(nodes) < 2:
        return []
    best = _measured(cluster, probes, health.rounds(nodes, most=ROUNDS))
    if not best:
        return []
    slow = health.slow_nodes(best)
    for _ in range(RETRIES if slow and len(slow) < len(nodes) else 0):
        good = [node for node in nodes if node not in slow]
        again = _measured(cluster, probes, [[(node, good[0])] for node in sorted(slow)])
        best |= {node: max(rate, best.get(node, 0.0)) for node, rate in again.items()}
        slow &= health.slow_nodes(best)
    return health.speed_checks(probes, "network", best, slow)


def _measured(
    cluster: ClusterHandle, probes: health.Probes, rounds: Sequence[Sequence[tuple[int, int]]]
) -> dict[int, float]:
    """Return the best rate of each node (MB/s), its slower direction; of two nodes that to this machine."""
    nodes = {node for pairs in rounds for pair in pairs for node in pair}
    if len(nodes) == 2 and len(rounds) == 1 and len(probes.answers) == 2:
        return _to_here(cluster, probes)
    sent: dict[int, float] = {}
    received: dict[int, float] = {}
    for pairs in rounds:
        for turned in (False, True):
            ways = [(two, one) if turned else (one, two) for one, two in pairs]
            for (giver, taker), rate in _rate(cluster, probes, ways).items():
                sent[giver] = max(sent.get(giver, 0.0), rate)
                received[taker] = max(received.get(taker, 0.0), rate)
    return {node: min(rate, received.get(node, rate)) for node, rate in sent.items()}


def _rate(
    cluster: ClusterHandle, probes: health.Probes, ways: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    requests: dict[int, dict[str, Any]] = {}
    for giver, taker in ways:
        port = probes.answers[taker]["ports"][-1]
        requests[giver] = protocol.send_request(_address(probes.nodes[taker]), port, seconds=SEND_S)
        requests[taker] = protocol.receive_request(seconds=SEND_S)
    found = _answered(cluster.fleet, requests)
    return {
        (giver, taker): answer["bytes"] / 1e6 / max(answer["seconds"], SEND_S / 10)
        for giver, taker in ways
        if (answer := found.get(taker)) is not None
    }


def _to_here(cluster: ClusterHandle, probes: health.Probes) -> dict[int, float]:
    """Return how fast each node sends to this machine (MB/s), the better one of two times."""
    best: dict[int, float] = {}
    for node in [*probes.answers, *probes.answers]:
        began = time.monotonic()
        if _answered(cluster.fleet, {node: protocol.text_request(TEXT_MB)}):
            best[node] = max(best.get(node, 0.0), TEXT_MB / (time.monotonic() - began))
    return best


# The process group.


def _group_checks(cluster: ClusterHandle, probes: health.Probes, nodes: Sequence[int]) -> list[Check]:
    """Return the checks of a process group over all ranks of `nodes`; in pairs where it is slow or hangs."""
    if len(nodes) < 2:
        return [Check(name="process group", ok=None, value="left out: fewer than two nodes are fit")]
    cluster.ctx.say(f"forming a process group on {len(nodes)} nodes (at most {MOST_GROUP_S:g} s)")
    (whole,) = _form(cluster, probes, [nodes])
    checks = [health.group_check(probes, whole)]
    promised = _promise(cluster)
    slow = whole.is_whole and promised is not None and whole.bandwidth < promised * LEAST_SHARE
    if whole.is_whole:
        value = f"{whole.bandwidth:.2g} GB/s bus bandwidth of {len(whole.ranks)} ranks"
        expected = "" if promised is None else f"{promised:g} GB/s is the type's network"
        checks.append(Check(name="all-reduce", ok=None if slow else True, value=value, expected=expected))
    if (slow or (not whole.is_whole and not health.failing(checks))) and len(nodes) > 2:
        cluster.ctx.say(f"forming process groups of two nodes (at most {2 * MOST_GROUP_S:g} s)")
        checks += _in_pairs(cluster, probes, nodes)
    return checks


def _in_pairs(cluster: ClusterHandle, probes: health.Probes, nodes: Sequence[int]) -> list[Check]:
    """Return the nodes that fail, or are slow, with each of two others."""
    best: dict[int, float] = dict.fromkeys(nodes, 0.0)
    for pairs in health.rounds(nodes, most=2 + len(nodes) % 2):  # so that each node meets two others
        for group in _form(cluster, probes, pairs):
            rate = group.bandwidth if group.is_whole else 0.0
            for node in {one.node for one in group.ranks}:
                best[node] = max(best[node], rate)
    slow = health.slow_nodes(best) | {node for node, rate in best.items() if not rate}
    if len(slow) == len(nodes):
        return [Check(name="pairs", ok=False, value="no two nodes form a process group")]
    return health.speed_checks(probes, "pairs", {node: rate * 1e3 for node, rate in best.items()}, slow)


def _promise(cluster: ClusterHandle) -> float | None:
    """Return the network bandwidth of the cluster's type in GB/s; None where GPUs are not real."""
    if any(one.driver is None for one in cluster.record.prepared):
        return None
    return compat.network_gbyte_s(cluster.record.instance_type)


def _form(
    cluster: ClusterHandle, probes: health.Probes, groups: Sequence[Sequence[int]]
) -> list[health.Group]:
    """Form a process group on each of `groups` of nodes at once, and return what their ranks did."""
    formed, requests, program = [], {}, template("process_group.py")
    layouts = [
        layout(list(nodes), gpus={node: probes.prepared[node].gpus for node in nodes}) for nodes in groups
    ]
    limit = min(GROUP_S + RANK_S * sum(map(len, layouts)), MOST_GROUP_S)
    for nodes, ranks in zip(groups, layouts, strict=True):
        is_real = probes.prepared[nodes[0]].driver is not None
        size = GPU_BYTES if is_real else CPU_BYTES
        formed.append(health.Group(ranks=ranks, at={one.rank: "" for one in ranks}, whys={}, bytes=size))
        port = cluster.ctx.job.job.master_port
        first = nodes[0]
        questions = {node: protocol.slots_request(port, is_first=node == first) for node in nodes}
        slots = ask(cluster.fleet, questions)
        rendezvous = Rendezvous(
            job="doctor",
            master_addr=_address(probes.nodes[first]),
            master_port=protocol.choose_port(slots, first=first, master_port=port),
        )
        for node in nodes:
            asked = {
                "ranks": [
                    environment(
                        one,
                        rendezvous=rendezvous,
                        nic=probes.prepared[node].nic,
                        folder="/tmp",
                        variables=cluster.ctx.job.env.variables,
                    )
                    for one in ranks
                    if one.node == node
                ],
                "backend": "nccl" if is_real else "gloo",
                "seconds": limit,
                "bytes": size,
                "program": program,
            }
            words = [probes.prepared[node].ranks_python, "-c", program]
            requests[node] = (words, json.dumps(asked).encode())
    _stream(cluster, requests, formed, timeout_s=limit + 10)
    return formed


def _stream(
    cluster: ClusterHandle, requests: Mapping[int, Any], groups: Sequence[health.Group], *, timeout_s: float
) -> None:
    of = {one.node: group for group in groups for one in group.ranks}
    rest = dict.fromkeys(requests, b"")

    def on_data(node: int, data: bytes) -> None:
        *lines, rest[node] = (rest[node] + data).split(b"\n")
        if len(rest[node]) > answers.MOST_BYTES:
            raise answers.malformed(node, "an endless line")
        own = {one.rank for one in of[node].ranks if one.node == node}
        for text in lines:
            said = answers.rank_step(text, node=node, ranks=own)
            if said is None:
                continue
            of[node].at[said.rank] = said.at
            if said.at == "failed":
                of[node].whys[said.rank] = said.why
            if said.at == "reduced":
                of[node].seconds = max(of[node].seconds or 0.0, said.seconds or 0.0)

    cluster.fleet.stream(requests, on_data, silent_after_s=None, timeout_s=timeout_s)
