"""What is wrong with which node: checks from the answers to a probe. Pure.

Where no figure is promised nodes are compared with each other.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from awsddp.cluster import Check, Node, Prepared, write_numbers
from awsddp.jobs.ranks import Rank
from awsddp.report import node_name, size_text

MOST_SKEW_S = 2.0
LEAST_DISK = 1_000_000_000
LEAST_MEMORY = 1_000_000_000
ALIKE = 0.75
"""A node has as much memory as the others that has more than this part of theirs."""
SLOW = 1 / 3
"""A node is slow that reaches less than this part of what the others reach, twice."""

Answers = Mapping[int, Mapping[str, Any]]
Dial = tuple[int, int, str]


@dataclass(frozen=True, kw_only=True)
class Probes:
    """What the nodes answered to `probe`, and this machine's clock before and after (Unix time).

    `silent` holds why a node gave no answer.
    """

    nodes: Mapping[int, Node]
    prepared: Mapping[int, Prepared]
    answers: Answers
    asked: tuple[float, float]
    silent: Mapping[int, str] = field(default_factory=dict)


def replacement(node: Node) -> str:
    """Return the command that replaces a node."""
    return f"awsddp up -o cluster.replace={node.instance_id}   # replaces {node_name(node.node)}"


def failing(checks: Sequence[Check]) -> set[int]:
    """Return the nodes that have a check that failed."""
    return {check.node for check in checks if check.ok is False and check.node is not None}


def quick_checks(probes: Probes) -> list[Check]:
    """Return the checks that take no time: an answer, GPUs, disk, memory, clock."""
    offsets = _offsets(probes)
    checks = [_check(probes, node, "answer", False, why) for node, why in sorted(probes.silent.items())]
    for node in sorted(probes.answers):
        checks += [
            *_gpus(probes, node),
            _at_least(probes, node, "disk", "disk_free", LEAST_DISK),
            _at_least(probes, node, "memory", "memory_free", LEAST_MEMORY),
            _clock(probes, node, offsets[node]),
        ]
    return checks


def thorough_checks(probes: Probes) -> list[Check]:
    """Return those that need a thorough probe: ECC, Xid, NVLink; and whether the nodes are alike."""
    checks = []
    for node, answer in sorted(probes.answers.items()):
        if answer["smi"]:
            checks += _gpu_health(probes, node, answer)
    return checks + _alike(probes)


def _check(probes: Probes, node: int, name: str, ok: bool, value: str, expected: str = "") -> Check:
    hint = "" if ok else replacement(probes.nodes[node])
    return Check(name=name, node=node, ok=ok, value=value, expected=expected, hint=hint)


def _gpus(probes: Probes, node: int) -> list[Check]:
    """Return the check of how many GPUs the driver sees; none on nodes that have none, or pretended ones."""
    prepared, answer = probes.prepared[node], probes.answers[node]
    if prepared.driver is None:
        return []
    seen = len(answer["smi"]) if "smi" in answer else answer["gpus"] or 0
    ok = seen >= prepared.gpus
    return [_check(probes, node, "GPUs", ok, f"{seen} of {prepared.gpus}", f"{prepared.gpus}")]


def _at_least(probes: Probes, node: int, name: str, key: str, least: int) -> Check:
    free = probes.answers[node][key]
    return _check(probes, node, name, free >= least, f"{size_text(free)} free", f"{size_text(least)} free")


def _offsets(probes: Probes) -> dict[int, float]:
    """Return how far each node's clock is from the median of all clocks, this machine's among them (s)."""
    here = sum(probes.asked) / 2
    differences = {node: answer["time"] - here for node, answer in probes.answers.items()}
    middle = statistics.median([0.0, *differences.values()])
    return {node: difference - middle for node, difference in differences.items()}


def _clock(probes: Probes, node: int, offset: float) -> Check:
    allowed = MOST_SKEW_S + probes.asked[1] - probes.asked[0]
    ok = abs(offset) <= allowed
    value = (
        f"within {MOST_SKEW_S:g} s" if ok else f"{abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"
    )
    return _check(probes, node, "clock", ok, value, f"within {MOST_SKEW_S:g} s of the other clocks")


def _gpu_health(probes: Probes, node: int, answer: Mapping[str, Any]) -> list[Check]:
    errors = {number: gpu["errors"] for number, gpu in enumerate(answer["smi"]) if gpu["errors"]}
    said = [f"GPU {number}: {count} uncorrectable" for number, count in errors.items()]
    faults = [f"GPU {number}: {text}" for number, gpu in enumerate(answer["smi"]) for text in gpu["faults"]]
    xids = Counter(number for _, number in answer["xids"])
    reported = [
        f"Xid {number}" + (f" ({count} times)" if count > 1 else "") for number, count in xids.items()
    ]
    links = answer["links_down"]
    return [
        _check(probes, node, "ECC", not said, ", ".join(said) or "no uncorrectable errors"),
        _check(probes, node, "GPU state", not faults, ", ".join(faults) or "no faults"),
        _check(probes, node, "Xid", not reported, ", ".join(reported) or "none since the boot"),
        _check(probes, node, "NVLink", not links, f"{links} inactive links" if links else "no inactive link"),
    ]


def _alike(probes: Probes) -> list[Check]:
    """Return, for each thing that a job needs alike, the nodes that differ from most others."""
    if len(probes.answers) < 2:
        return []
    kinds: dict[str, Callable[[int, Mapping[str, Any]], str]] = {
        "CPUs": lambda node, answer: f"{answer['cpus']:g}",
        "memory": lambda node, answer: _memory(probes, answer["memory_size"]),
        "GPUs": lambda node, answer: ", ".join(_models(answer["smi"])),
        "driver": lambda node, answer: str(probes.prepared[node].driver or ""),
        "torch": lambda node, answer: str(probes.prepared[node].torch or ""),
        "CUDA": lambda node, answer: str(probes.prepared[node].cuda or ""),
        "kernel": lambda node, answer: answer["kernel"],
    }
    checks = []
    for kind, read in kinds.items():
        values = {node: read(node, answer) for node, answer in sorted(probes.answers.items())}
        counts = Counter(values.values()).most_common()
        if len(counts) == 1:
            continue
        usual = counts[0][0] if counts[0][1] > counts[1][1] else _better(kind, values)
        odd = [node for node, value in values.items() if value != usual]
        for node in odd:
            checks.append(
                _check(
                    probes, node, f"alike: {kind}", False, values[node] or "none", f"{usual} as the others"
                )
            )
    same = [kind for kind in kinds if not any(check.name == f"alike: {kind}" for check in checks)]
    return [*checks, Check(name="alike", ok=True, value=", ".join(same))] if same else checks


def _memory(probes: Probes, size: int) -> str:
    """Return a node's memory; of nodes that are alike it differs a little from boot to boot."""
    usual = statistics.median_high(answer["memory_size"] for answer in probes.answers.values())
    return f"{(usual if size > usual * ALIKE else size) / 2**30:.1f} GiB"


def _models(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    counts = Counter((gpu["name"], gpu["memory_mib"]) for gpu in gpus)
    return [f"{count} x {name} {memory} MiB" for (name, memory), count in counts.items()]


def _better(kind: str, values: Mapping[int, str]) -> str:
    """Return the value that is right where as many nodes have another: more of what is counted."""
    if kind in ("CPUs", "memory"):
        return max(values.values(), key=lambda value: float(value.split()[0]))
    return values[min(values)]


def slow_nodes(rates: Mapping[int, float]) -> set[int]:
    """Return the nodes that reach less than a third of the median of all; with two, of the better one."""
    if len(rates) < 2:
        return set()
    usual = statistics.median_high(rates.values())
    return {node for node, rate in rates.items() if rate < usual * SLOW}


def speed_checks(
    probes: Probes, name: str, rates: Mapping[int, float], slow: set[int], unit: str = "MB/s"
) -> list[Check]:
    """Return the checks of a measured rate: of the nodes that are `slow`, and one of the others."""
    usual = statistics.median_high(rates.values())
    checks = [
        _check(probes, node, name, False, f"{rates[node]:.0f} {unit}", f"about {usual:.0f} {unit}")
        for node in sorted(slow)
    ]
    good = [rate for node, rate in rates.items() if node not in slow]
    value = f"{min(good):.0f} to {max(good):.0f} {unit}"
    return [*checks, Check(name=name, ok=True, value=value)]


def dial_checks(probes: Probes, dials: Mapping[int, Sequence[Dial]]) -> list[Check]:
    """Return the check of the connections between the nodes; `dials` are the answers to `dial` by node.

    The nodes are named that explain what failed: each time the one that most of the rest has in common.
    """
    failed = {(node, to): why for node, found in dials.items() for to, _, why in found if why}
    pairs = {frozenset(pair) for pair in failed}
    possible = {frozenset((node, to)) for node, found in dials.items() for to, _, _ in found}
    if not pairs:
        return [Check(name="ports", ok=True, value=_pairs(len(possible)))] if possible else []
    whys = ", ".join(sorted(set(failed.values())))
    if pairs == possible:
        names = ", ".join(node_name(node) for node in sorted(dials)) if len(dials) < 4 else "the nodes"
        hint = "the security group must allow all traffic from itself: docs/security.md"
        return [Check(name="ports", ok=False, value=f"{names} do not reach each other: {whys}", hint=hint)]
    checks = []
    while pairs:
        count = Counter(node for pair in pairs for node in pair)
        (worst, most), *rest = count.most_common()
        if rest and rest[0][1] == most:
            first, second = sorted(sorted(map(sorted, pairs))[0])
            pairs.discard(frozenset((first, second)))
            value = f"{node_name(first)} and {node_name(second)} do not reach each other: {whys}"
            hint = replacement(probes.nodes[second])
            checks.append(Check(name="ports", ok=False, value=value, hint=hint))
            continue
        to = sorted(node for pair in pairs if worst in pair for node in pair - {worst})
        value = f"no connection with {_names(to)}: {whys}"
        checks.append(_check(probes, worst, "ports", False, value))
        pairs = {pair for pair in pairs if worst not in pair}
    return checks


def _pairs(count: int) -> str:
    return "the pair of nodes connects" if count == 1 else f"all {count} pairs of nodes connect"


def _names(nodes: Sequence[int]) -> str:
    if len(nodes) < 4:
        return ", ".join(map(node_name, nodes))
    return f"nodes {write_numbers(nodes)}"


def rounds(nodes: Sequence[int], *, most: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which each node meets others, at most `most` (the circle method)."""
    ring: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(min(most, len(ring) - 1)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(one, two) for one, two in pairs if one is not None and two is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce of `size` bytes, in GB/s, as nccl-tests defines it.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return size / seconds / 1e9 * 2 * (ranks - 1) / ranks


@dataclass(kw_only=True)
class Group:
    """What the ranks of a process group did: how far each came, why it failed, and its seconds."""

    ranks: tuple[Rank, ...]
    at: dict[int, str]
    whys: dict[int, str]
    seconds: float | None = None
    bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have timed an all-reduce."""
        return self.seconds is not None and all(self.at[one.rank] == "reduced" for one in self.ranks)

    @property
    def bandwidth(self) -> float:
        """The bus bandwidth in GB/s."""
        assert self.seconds is not None, "asked of a whole group"
        return bus_bandwidth(self.bytes, self.seconds, len(self.ranks))

    def behind(self) -> list[Rank]:
        """Return the ranks that came least far, in the order of their failures; none where all are even."""
        steps = {one.rank: _STEPS.index(self.at[one.rank]) for one in self.ranks}
        last = [one for one in self.ranks if steps[one.rank] == min(steps.values()) < max(steps.values())]
        order = list(self.whys)
        return sorted(last, key=lambda one: order.index(one.rank) if one.rank in order else one.rank)


_STEPS = ("", "failed", "started", "arrived", "joined", "reduced")


def group_check(probes: Probes, group: Group) -> Check:
    """Return the check of a process group: the ranks that came least far and why, of their node if one."""
    if group.is_whole:
        return Check(name="process group", ok=True, value=f"{len(group.ranks)} ranks")
    behind = group.behind() or list(group.ranks)
    came = "; ".join(f"rank {one.rank} ({node_name(one.node)}): {_came(group, one)}" for one in behind[:8])
    more = f"; and {len(behind) - 8} more" if len(behind) > 8 else ""
    rest = len(group.ranks) - len(behind)
    farthest = max((group.at[one.rank] for one in group.ranks), key=_STEPS.index)
    others = f"; the other {rest}: {farthest}" if rest else ""
    value, expected = came + more + others, "all ranks join"
    nodes = {one.node for one in group.behind()}
    if len(nodes) == 1:
        return _check(probes, nodes.pop(), "process group", False, value, expected)
    return Check(name="process group", ok=False, value=value, expected=expected)


def _came(group: Group, one: Rank) -> str:
    return group.whys.get(one.rank) or group.at[one.rank] or "did not start"
