"""Probe nodes and check the results.

Values without a fixed limit are compared between the nodes.
"""

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from awsddp.agent import messages
from awsddp.agent_client.calls import RequestTransport, call_each_node
from awsddp.agent_client.rank_layout import Rank
from awsddp.errors import AwsddpError, NodeError
from awsddp.model.node_answers import Gpu, ProbeResult, RankStep
from awsddp.model.records import Check, Node, PreparedNode, format_node_numbers
from awsddp.util.formatting import node_name, size_text

DIAL_S = 2.0
"""Timeout of a connection between two nodes."""
MOST_SKEW_S = 2.0
LEAST_BYTES = 1_000_000_000
"""How many free bytes a node needs on its disk and in its memory."""
ALIKE = 0.75
"""Memory sizes count as equal if they differ by less than this factor."""
SLOW = 1 / 3
"""A node is slow if its rate is below this fraction of the usual rate."""

Dial = tuple[int, int, str]


HARDWARE_XIDS = frozenset({48, 62, 63, 64, 74, 79, 94, 95, 119, 120, 140})
"""The Xids that are a GPU's own fault (diagnosis/causes.py). https://docs.nvidia.com/deploy/xid-errors/"""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """The nodes' responses to `probe`, and the time on this machine before and after the probe (Unix time).

    `unanswered` holds the errors for the nodes that did not respond.
    """

    nodes: Mapping[int, Node]
    prepared: Mapping[int, PreparedNode]
    answers: Mapping[int, ProbeResult]
    request_times: tuple[float, float]
    unanswered: Mapping[int, str] = field(default_factory=dict)


def replace_command(node: Node) -> str:
    """Return the command that replaces a node."""
    return f"awsddp up -o cluster.replace={node.instance_id}   # replaces {node_name(node.node)}"


def node_check(node: Node, name: str, ok: bool | None, value: str, expected: str = "") -> Check:
    """Return a check of a node. If the check has failed, its hint is to replace the node."""
    hint = replace_command(node) if ok is False else ""
    return Check(name=name, node=node.node, ok=ok, value=value, expected=expected, hint=hint)


def _check(probes: Probes, node: int, name: str, ok: bool, value: str, expected: str = "") -> Check:
    return node_check(probes.nodes[node], name, ok, value, expected)


def failing_nodes(checks: Sequence[Check]) -> set[int]:
    """Return the nodes with a failed check."""
    return {check.node for check in checks if check.ok is False and check.node is not None}


def preflight(
    fleet: RequestTransport,
    nodes: Sequence[Node],
    prepared: Mapping[int, PreparedNode],
    launches: Mapping[int, messages.Launch],
) -> None:
    """Check a job's nodes before the job is launched: connections, GPUs, disk, memory, clock.

    Raises NodeError with the failed checks.
    """
    launch = launches[min(launches)]
    probes = probe_nodes(fleet, nodes, prepared, ports=(launch.master_port, launch.link_port))
    checks = quick_checks(probes)
    failed = [check for check in [*checks, *check_connections(fleet, probes)] if check.ok is False]
    if failed:
        raise NodeError(
            "; ".join(_sentence(check) for check in failed),
            "these checks run before the ranks start",
            "awsddp doctor   # check everything\n" + "\n".join(dict.fromkeys(check.hint for check in failed)),
        )


def _sentence(check: Check) -> str:
    prefix = "" if check.node is None else f"{node_name(check.node)}: "
    return f"{prefix}{check.name}: {check.value}"


def probe_nodes(
    fleet: RequestTransport,
    nodes: Sequence[Node],
    prepared: Mapping[int, PreparedNode],
    *,
    ports: tuple[int, ...] = (),
    thorough: bool = False,
) -> Probes:
    """Send a probe request to each node. `ports` are the job's ports on its first node."""
    numbers = {node.node: node for node in nodes}
    requests = {
        number: messages.Probe(
            address=str(node.private_ip), ports=ports if number == min(numbers) else (), thorough=thorough
        )
        for number, node in numbers.items()
    }
    began = time.time()
    outcomes = call_each_node(fleet, requests)
    return Probes(
        nodes=numbers,
        prepared=prepared,
        answers={node: outcome for node, outcome in outcomes.items() if not isinstance(outcome, AwsddpError)},
        request_times=(began, time.time()),
        unanswered={
            node: outcome.message for node, outcome in outcomes.items() if isinstance(outcome, AwsddpError)
        },
    )


def check_connections(fleet: RequestTransport, probes: Probes) -> list[Check]:
    """Return the checks of the connections between every two nodes, in both directions."""
    targets = {
        node: [(node, str(probes.nodes[node].private_ip), port) for port in answer.ports]
        for node, answer in probes.answers.items()
    }
    requests = {
        node: messages.Dial(
            peers=[peer for other, peers in targets.items() if other != node for peer in peers],
            seconds=DIAL_S,
        )
        for node in targets
    }
    outcomes = call_each_node(fleet, requests)
    dials = {node: answer.dials for node, answer in outcomes.items() if not isinstance(answer, AwsddpError)}
    return dial_checks(probes, dials)


def quick_checks(probes: Probes) -> list[Check]:
    """Return the fast checks: response, GPUs, disk, memory, clock."""
    checks = [_check(probes, node, "answer", False, why) for node, why in sorted(probes.unanswered.items())]
    client_time = sum(probes.request_times) / 2
    ahead = {node: answer.time - client_time for node, answer in probes.answers.items()}
    middle = statistics.median([0.0, *ahead.values()])  # across all clocks, including this machine's
    for node, answer in sorted(probes.answers.items()):
        checks += _gpus(probes, node)
        for name, free in (("disk", answer.disk_free), ("memory", answer.memory_free)):
            value, least = f"{size_text(free)} free", f"{size_text(LEAST_BYTES)} free"
            checks.append(_check(probes, node, name, free >= LEAST_BYTES, value, least))
        checks.append(_clock(probes, node, ahead[node] - middle))
    return checks


def thorough_checks(probes: Probes) -> list[Check]:
    """Return the checks that need a thorough probe: ECC, Xid, NVLink, and whether the nodes are alike."""
    checks = []
    for node, answer in sorted(probes.answers.items()):
        for name, problems in _gpu_problems(answer).items() if answer.smi else ():
            checks.append(_check(probes, node, name, not problems, ", ".join(problems) or "none"))
    return checks + _equality_checks(probes)


def find_reclaimed_nodes(probes: Probes) -> set[int]:
    """Return the nodes that EC2 is about to reclaim (spot)."""
    return {node for node, answer in probes.answers.items() if answer.shutdown == "spot"}


def find_failed_nodes(probes: Probes) -> set[int]:
    """Return the nodes whose thorough probe shows that a GPU failed: ECC errors, a hardware Xid, a reset that
    is needed, or a GPU that is missing."""
    return {
        node
        for node, answer in probes.answers.items()
        if not HARDWARE_XIDS.isdisjoint(answer.xids)
        or any(
            gpu.errors or any("throttled" not in fault for fault in gpu.faults) for gpu in answer.smi or ()
        )
        or not all(check.ok for check in _gpus(probes, node))
    }


def _gpus(probes: Probes, node: int) -> list[Check]:
    """Return the check of the driver's GPU count, or [] for a node with no GPUs or with simulated ones."""
    prepared, answer = probes.prepared[node], probes.answers[node]
    if prepared.driver is None:
        return []
    count = len(answer.smi) if answer.smi is not None else answer.gpus or 0
    ok = count >= prepared.gpus
    return [_check(probes, node, "GPUs", ok, f"{count} of {prepared.gpus}", f"{prepared.gpus}")]


def _clock(probes: Probes, node: int, offset: float) -> Check:
    within = f"within {MOST_SKEW_S:g} s"
    ok = abs(offset) <= MOST_SKEW_S + probes.request_times[1] - probes.request_times[0]
    value = within if ok else f"{abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"
    return _check(probes, node, "clock", ok, value, f"{within} of the other clocks")


def _gpu_problems(answer: ProbeResult) -> dict[str, list[str]]:
    """Return {name of the check: problems} for a node's GPUs."""
    gpus, links = list(enumerate(answer.smi or ())), answer.links_down
    times = {xid: f" ({count} times)" if count > 1 else "" for xid, count in Counter(answer.xids).items()}
    return {
        "ECC": [f"GPU {number}: {gpu.errors} uncorrectable" for number, gpu in gpus if gpu.errors],
        "GPU state": [f"GPU {number}: {fault}" for number, gpu in gpus for fault in gpu.faults],
        "Xid": [f"Xid {xid}{count}" for xid, count in times.items()],
        "NVLink": [f"{links} inactive links"] if links else [],
    }


def _equality_checks(probes: Probes) -> list[Check]:
    """Return a failed check for each property in which a node differs from the majority.

    If several values are equally frequent, the greatest of them is the expected value.
    """
    if len(probes.answers) < 2:
        return []
    properties: dict[str, Callable[[int, ProbeResult], str]] = {
        "CPUs": lambda node, answer: f"{answer.cpus:g}",
        "memory": lambda node, answer: _memory(probes, answer.memory_size),
        "GPUs": lambda node, answer: ", ".join(_models(answer.smi or ())),
        "driver": lambda node, answer: str(probes.prepared[node].driver or ""),
        "torch": lambda node, answer: str(probes.prepared[node].torch or ""),
        "CUDA": lambda node, answer: str(probes.prepared[node].cuda or ""),
        "kernel": lambda node, answer: answer.kernel,
    }
    checks, equal = [], []
    for name, read in properties.items():
        values = {node: read(node, answer) for node, answer in sorted(probes.answers.items())}
        counts = Counter(values.values())
        usual = max(counts, key=lambda value: (counts[value], [*map(int, re.findall(r"\d+", value))]))
        different = {node: value or "none" for node, value in values.items() if value != usual}
        for node, value in different.items():
            checks.append(
                _check(probes, node, f"alike: {name}", False, value, f"{usual}, like the other nodes")
            )
        equal += [] if different else [name]
    return [*checks, Check(name="alike", ok=True, value=", ".join(equal))] if equal else checks


def _memory(probes: Probes, size: int) -> str:
    """Return a node's memory as text.

    Nearly equal sizes give the same text, because sizes vary between boots.
    """
    usual = statistics.median_high(answer.memory_size for answer in probes.answers.values())
    return f"{(usual if size > usual * ALIKE else size) / 2**30:.1f} GiB"


def _models(gpus: Sequence[Gpu]) -> list[str]:
    counts = Counter((gpu.name, gpu.memory_mib) for gpu in gpus)
    return [f"{count} x {name} {memory} MiB" for (name, memory), count in counts.items()]


def slow_nodes(rates: Mapping[int, float]) -> list[int]:
    """Return the nodes whose rate is 0 or less than a third of the median rate.

    With two nodes, the faster one's rate replaces the median.
    """
    usual = statistics.median_high(rates.values())
    return [node for node, rate in sorted(rates.items()) if rate < usual * SLOW or not rate]


def rate_checks(probes: Probes, name: str, rates: Mapping[int, float]) -> list[Check]:
    """Return the checks of a measured rate (MB/s): one for each slow node, and one for all other nodes."""
    usual, slow = statistics.median_high(rates.values()), slow_nodes(rates)
    checks = [
        _check(probes, node, name, False, f"{rates[node]:.1f} MB/s", f"about {usual:.1f} MB/s")
        for node in slow
    ]
    good = [rate for node, rate in rates.items() if node not in slow]
    if not good:
        return [Check(name=name, ok=False, value="no two nodes form a process group")]
    return [*checks, Check(name=name, ok=True, value=f"{min(good):.1f} to {max(good):.1f} MB/s")]


def dial_checks(probes: Probes, dials: Mapping[int, Sequence[Dial]]) -> list[Check]:
    """Return the checks of the connections between nodes; `dials` maps nodes to their responses to `dial`.

    The node with the most failed pairs gets a failed check, and these pairs then no longer count, so that as
    few nodes as possible fail.
    """
    failed = {(node, peer): why for node, results in dials.items() for peer, _, why in results if why}
    pairs = {frozenset(pair) for pair in failed}
    possible = {frozenset((node, peer)) for node, results in dials.items() for peer, _, _ in results}
    if not pairs:
        count = len(possible)
        value = "the pair of nodes connects" if count == 1 else f"all {count} pairs of nodes connect"
        return [Check(name="ports", ok=True, value=value)] if possible else []
    whys = ", ".join(sorted(set(failed.values())))
    if pairs == possible:
        hint = "the security group must allow all traffic from itself: docs/security.md"
        value = f"{_names(sorted(frozenset().union(*pairs)))} do not reach each other: {whys}"
        return [Check(name="ports", ok=False, value=value, hint=hint)]
    checks = []
    while pairs:
        failures = Counter(node for pair in pairs for node in pair)
        (worst, most), (_, second_most), *_ = failures.most_common()
        if most == second_most:
            first, second = min(map(sorted, pairs))
            pairs.discard(frozenset((first, second)))
            value = f"{node_name(first)} and {node_name(second)} do not reach each other: {whys}"
            hint = replace_command(probes.nodes[second])
            checks.append(Check(name="ports", ok=False, value=value, hint=hint))
            continue
        peers = sorted(node for pair in pairs if worst in pair for node in pair - {worst})
        checks.append(_check(probes, worst, "ports", False, f"no connection with {_names(peers)}: {whys}"))
        pairs = {pair for pair in pairs if worst not in pair}
    return checks


def _names(nodes: Sequence[int]) -> str:
    if len(nodes) < 4:
        return ", ".join(map(node_name, nodes))
    return f"nodes {format_node_numbers(nodes)}"


def ring_rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs that connect three or more nodes with their neighbours in a ring."""
    ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    paired = len(ring) // 2 * 2
    return [pairs for pairs in (ring[:paired:2], ring[1:paired:2], ring[paired:]) if pairs]


_STEPS = ("", "failed", "started", "arrived", "joined", "reduced")


class GroupProgress:
    """The ranks of a process group, and the last step that each rank reported, in the order of reports."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.steps = {rank.rank: RankStep(rank=rank.rank) for rank in ranks}

    def record(self, step: RankStep) -> None:
        """Record a rank's step. Steps that follow the rank's all-reduce are ignored."""
        if self.steps[step.rank].at != "reduced":
            del self.steps[step.rank]
            self.steps[step.rank] = step

    @property
    def gbyte_s(self) -> float | None:
        """The bus bandwidth (GB/s), or None if not all ranks have timed an all-reduce."""
        if any(step.at != "reduced" for step in self.steps.values()):
            return None
        return min(step.gbyte_s for step in self.steps.values())


def group_check(probes: Probes, group: GroupProgress) -> Check:
    """Return the check of a process group, which names the ranks that are furthest behind, and their states.

    If some ranks are behind the others, and all of them are on one node, the check is about that node.
    """
    if group.gbyte_s is not None:
        return Check(name="process group", ok=True, value=f"{len(group.ranks)} ranks")
    node_of = {rank.rank: rank.node for rank in group.ranks}
    steps = sorted(group.steps.values(), key=lambda step: _STEPS.index(step.at))
    behind = [step for step in steps if step.at == steps[0].at]
    states = [f"rank {step.rank} ({node_name(node_of[step.rank])}): {_state(step)}" for step in behind[:8]]
    more = f"; and {len(behind) - 8} more" if len(behind) > 8 else ""
    ahead = len(steps) - len(behind)
    others = f"; the other {ahead}: {steps[-1].at}" if ahead else ""
    value, nodes = "; ".join(states) + more + others, {node_of[step.rank] for step in behind}
    if ahead and len(nodes) == 1:
        return _check(probes, nodes.pop(), "process group", False, value, "all ranks join")
    return Check(name="process group", ok=False, value=value, expected="all ranks join")


def _state(step: RankStep) -> str:
    return step.why or step.at or "did not start"
