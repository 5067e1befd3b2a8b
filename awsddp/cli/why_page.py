"""What a person reads of a job that hangs: who is behind, and the stacks, alike ones folded."""

from typing import Any

from awsddp.cli.render import line, table
from awsddp.report import duration, node_name
from awsddp.verbs.why import ranges

_STACKS = 4
_FRAMES = 12


def why_page(found: dict[str, Any]) -> None:
    """Show where each rank is, ranks that are in the same place in one line, then their stacks."""
    silent = found["silent_s"]
    output = "" if silent is None else f", no output for {duration(silent)}"
    line(f"Job {found['job']}: {found['state']}{output}")
    line(found["explanation"])
    headings = ("ranks", "nodes", "state", "at", "in", "worker processes at")
    folded = _folded(found["ranks"], _place)
    table(headings, [(*_who(ranks), *place) for place, ranks in folded])
    stacks = _folded([one for one in found["ranks"] if one["stack"]], lambda one: tuple(one["stack"]))
    behind = set(found["behind"])
    stacks.sort(key=lambda item: not behind & {one["rank"] for one in item[1]})
    for stack, ranks in stacks[:_STACKS]:
        line(f"ranks {_who(ranks)[0]}" if len(ranks) > 1 else f"rank {ranks[0]['rank']}")
        for frame in stack[-_FRAMES:]:
            line(f"  | {frame}")
    if len(stacks) > _STACKS:
        line(f"{len(stacks) - _STACKS} more stacks: awsddp doctor --why {found['job']} --json")


def _folded(ranks: list[dict[str, Any]], key: Any) -> list[tuple[Any, list[dict[str, Any]]]]:
    """Return the ranks by `key`, in the order of the first rank of each."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for one in ranks:
        groups.setdefault(key(one), []).append(one)
    return list(groups.items())


def _place(one: dict[str, Any]) -> tuple[str, ...]:
    collective = one["collective"]
    waits = f"{collective['operation']} {collective['number']}" if collective else ""
    workers = sorted({worker["where"] for worker in one["workers"] if worker["where"]})
    return one["state"], one["where"] or "", waits, ", ".join(workers)


def _who(ranks: list[dict[str, Any]]) -> tuple[str, str]:
    nodes = sorted({one["node"] for one in ranks})
    names = ", ".join(map(node_name, nodes)) if len(nodes) <= 3 else f"nodes {ranges(nodes)}"
    return ranges([one["rank"] for one in ranks]), names
