"""What several verbs do with a cluster that is up: look at it, connect to its nodes, bring a job home."""

import contextlib
import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp import report
from awsddp.cluster import Cluster, Job, Node, Prepared
from awsddp.errors import ConfigError, NodeError, NotFoundError
from awsddp.jobs import launchers, results
from awsddp.nodes.failures import split
from awsddp.nodes.results import Fetched, Wanted
from awsddp.report import Event, node_name
from awsddp.spec import seconds
from awsddp.state import Record, write_private
from awsddp.verbs.context import NOWHERE, Context, Found, found
from awsddp.verbs.settling import settled

if TYPE_CHECKING:
    from awsddp.aws.session import Aws
    from awsddp.nodes.ahead import HeadStart
    from awsddp.nodes.jump import Jump
    from awsddp.nodes.transport import Endpoint, Fleet

ANSWER_S = 60.0
JUMP = "network.jump"
FETCH_S = 600.0
"""How long another client of this machine may be at it, bringing the same results home."""


def import_beside(module: str) -> None:
    """Import a module that will be needed while AWS or a node is waited for."""
    threading.Thread(target=importlib.import_module, args=(module,), daemon=True).start()


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A cluster whose nodes are prepared and, as AWS says, running. `nodes` are sorted by number.

    `ahead` are the connections that were begun while AWS was asked.
    """

    aws: "Aws"
    record: Record
    nodes: tuple[Node, ...]
    ahead: "HeadStart | None" = None

    def prepared(self, node: int) -> Prepared:
        """Return what was found on a node."""
        return next(one for one in self.record.prepared if one.node == node)


@contextlib.contextmanager
def ready(ctx: Context) -> Iterator[Ready]:
    """Yield the cluster, ready to work. Raises NotFoundError, NodeError where it is not, CloudError."""
    with _head_start(ctx) as ahead, found(ctx) as seen:
        yield replace(ready_in(ctx, seen), ahead=ahead)


@contextlib.contextmanager
def _head_start(ctx: Context) -> "Iterator[HeadStart | None]":
    """Begin to connect to the nodes where the folder last saw them, unless that is over a jump host.

    What AWS says decides what is used.
    """
    from awsddp.nodes.ahead import HeadStart
    from awsddp.nodes.sync import read_ssh_config

    ahead = None
    with contextlib.suppress(OSError, ValueError, ConfigError):
        if jump_of(ctx, ctx.folder.read()) is None:
            known = read_ssh_config(ctx.folder.ssh_config.read_text(encoding="utf-8"))
            ahead = HeadStart(known, key=ctx.folder.key, known_hosts=ctx.folder.known_hosts)
    try:
        yield ahead
    finally:
        if ahead is not None:
            ahead.close()


def ready_in(ctx: Context, seen: Found | None) -> Ready:
    """Return the cluster of a search, ready to work. Raises NotFoundError or NodeError where it is not."""
    name = ctx.spec.name
    record, nodes = login_to(ctx, seen)
    assert seen is not None
    running = {node.instance_id for node in nodes if node.state == "running"}
    if not running and all(node.state in ("stopped", "stopping") for node in nodes):
        raise NodeError(f"cluster {name} is stopped", "", "awsddp up   # start it")
    if not record.prepared or {one.instance_id for one in record.prepared} != running:
        raise NodeError(
            f"cluster {name} is not ready",
            f"{len(running)} of its {len(nodes)} nodes run, {len(record.prepared)} were prepared",
            "awsddp up   # finish it",
        )
    return Ready(aws=seen.aws, record=record, nodes=nodes)


def living(ctx: Context, seen: Found | None) -> Cluster:
    """Return the cluster of a search, of which something lives, once AWS lists what this machine made ready.

    Raises NotFoundError, CloudError.
    """
    cluster = seen.cluster if seen else None
    if seen is not None and seen.record is not None:
        cluster = settled(seen.aws, ctx.spec.name, seen.record, cluster)
    if cluster is None or not cluster.live:
        looked = ", ".join(seen.looked if seen else NOWHERE)
        raise NotFoundError(f"no cluster {ctx.spec.name}", f"looked in: {looked}", "awsddp up   # make it")
    return cluster


def login_to(ctx: Context, seen: Found | None) -> tuple[Record, tuple[Node, ...]]:
    """Return the record and the nodes of a cluster whose key is here. Raises NotFoundError, CloudError."""
    cluster = living(ctx, seen)
    record = seen.record if seen else None
    if record is None or record.id != cluster.id or not ctx.folder.key.exists():
        raise NotFoundError(
            f"cluster {cluster.name} exists, but its key is not on this machine",
            f"{ctx.folder.path} does not hold it",
            "go to the machine that made it, or end it: awsddp down",
        )
    return record, cluster.live


def chosen_nodes(nodes: Sequence[Node], number: int | None) -> tuple[Node, ...]:
    """Return the node of this number, or all of them. Raises NotFoundError."""
    chosen = tuple(node for node in nodes if number in (None, node.node))
    if not chosen:
        known = ", ".join(node_name(node.node) for node in nodes)
        raise NotFoundError(f"no {node_name(number or 0)} in this cluster", f"there are: {known}")
    return chosen


def endpoints(record: Record, nodes: Sequence[Node]) -> "tuple[Endpoint, ...]":
    """Return how each node is reached. Raises NodeError for a node without an address."""
    from awsddp.nodes.transport import Endpoint

    lost = [node_name(node.node) for node in nodes if node.address is None]
    if lost:
        raise NodeError(f"{', '.join(lost)}: no address", "the instance does not run", "awsddp status")
    return tuple(
        Endpoint(
            node=node.node,
            instance_id=node.instance_id,
            host=str(node.address),
            port=record.target.ssh_port,
            user=record.ssh_user,
        )
        for node in nodes
    )


def jump_of(ctx: Context, record: Record | None = None) -> "Jump | None":
    """Return the jump host that is asked for now, else the one that the cluster was made with."""
    asked = record.asked if record is not None and JUMP not in ctx.spec.given else {}
    name = asked.get(JUMP, ctx.spec.network.jump)
    if not name:
        return None
    from awsddp.nodes.jump import Jump

    return Jump(name=name, folder=ctx.home)


def reach_jump(ctx: Context) -> None:
    """Connect to the jump host, if there is one, before anything is made that only it leads to.

    Raises JumpFailure, ConfigError.
    """
    jump = jump_of(ctx)
    if jump is not None:
        from awsddp.nodes.jump import reach

        reach(jump)


def connect(
    ctx: Context,
    record: Record,
    nodes: Sequence[Node],
    *,
    deadline_s: float = 60,
    partial: bool = False,
    ahead: "HeadStart | None" = None,
) -> "Fleet":
    """Return the connections to the nodes, to be entered; the ssh_config for rsync is written beside."""
    from awsddp.nodes.transport import Fleet

    places = write_ssh_config(ctx, record, nodes)
    return Fleet(
        places,
        key=ctx.folder.key,
        known_hosts=ctx.folder.known_hosts,
        jump=jump_of(ctx, record),
        deadline_s=deadline_s,
        partial=partial,
        ahead=ahead,
        on_event=ctx.on_event,
    )


def reach(ctx: Context, cluster: Ready, nodes: Sequence[Node] | None = None) -> "Fleet":
    """Return the connections to all or some nodes of a cluster that is ready, to be entered."""
    return connect(ctx, cluster.record, cluster.nodes if nodes is None else nodes, ahead=cluster.ahead)


def write_ssh_config(ctx: Context, record: Record, nodes: Sequence[Node]) -> "tuple[Endpoint, ...]":
    """Write how the nodes are reached for ssh, rsync and editors, where it changed, and return it."""
    from awsddp.nodes.sync import ssh_config

    places = endpoints(record, nodes)
    jump = jump_of(ctx, record)
    text = ssh_config(places, ctx.folder.key, ctx.folder.known_hosts, jump=jump).encode()
    if not ctx.folder.ssh_config.exists() or ctx.folder.ssh_config.read_bytes() != text:
        write_private(ctx.folder.ssh_config, text)
    return places


def ask(
    fleet: "Fleet", requests: Mapping[int, Mapping[str, Any]], *, timeout_s: float = ANSWER_S
) -> dict[int, dict[str, Any]]:
    """Send each node its request and return the answers. Raises NodeError or what a node says it is."""
    said = {node: bytearray() for node in requests}

    def on_data(node: int, data: bytes) -> bool:
        said[node] += data
        return launchers.is_whole(said[node])

    messages = {node: launchers.message(request) for node, request in requests.items()}
    ends = split(fleet.converse(launchers.program(), messages, on_data, timeout_s=timeout_s))
    return {
        node: launchers.answer(bytes(said[node]), node=node, stderr=end.stderr) for node, end in ends.items()
    }


def ask_all(fleet: "Fleet", request: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Send every connected node the same request."""
    return ask(fleet, dict.fromkeys(fleet.nodes, request))


def cancel(ctx: Context, fleet: "Fleet", job: str, *, grace_s: float | None = None) -> None:
    """End a job on every node that knows it: TERM, the grace, KILL; return when it has ended."""
    grace = seconds(ctx.job.job.grace) if grace_s is None else grace_s
    knows = {node for node, told in ask_all(fleet, launchers.state_request()).items() if _knows(told, job)}
    request = launchers.cancel_request(job, grace=grace)
    ask(fleet, dict.fromkeys(knows, request), timeout_s=grace + ANSWER_S)


def _knows(told: Mapping[str, Any], job: str) -> bool:
    return any(known["job"] == job for known in told["jobs"])


def jobs_on(ctx: Context, fleet: "Fleet") -> tuple[Job, ...]:
    """Return every job that the connected nodes know, oldest first."""
    told = ask_all(fleet, launchers.state_request())
    return results.jobs({node: answer["jobs"] for node, answer in told.items()}, results=ctx.job.job.results)


def choose_job(jobs: Sequence[Job], name: str | None) -> Job:
    """Return the job of this name, or the last one. Raises NotFoundError."""
    chosen = next((job for job in reversed(jobs) if name in (None, job.job)), None)
    if chosen is None:
        known = (
            f"known are: {', '.join(job.job for job in jobs)}" if jobs else "no job has run on this cluster"
        )
        raise NotFoundError(f"no job {name}" if name else "no job", known, "awsddp train")
    return chosen


def place_of(ctx: Context, job: str) -> Path:
    """Return the folder at home that receives a job's results."""
    return Path(ctx.job.sync.workdir) / ctx.job.job.results / job


def bring_home(
    ctx: Context, cluster: Ready, fleet: "Fleet", job: Job, *, to: Path | None = None
) -> dict[int, Fetched]:
    """Fetch a job's results from its nodes, verified, and only then let the nodes forget that they owe them.

    One client at a time does so. Raises NodeError where a node does not send what it said, ConfigError where
    home has no room.
    """
    with ctx.folder.lock("fetch", part="results", wait_s=FETCH_S):
        return _bring_home(ctx, cluster, fleet, job, to if to is not None else place_of(ctx, job.job))


def _bring_home(ctx: Context, cluster: Ready, fleet: "Fleet", job: Job, target: Path) -> dict[int, Fetched]:
    from awsddp.aws.poweroff import release
    from awsddp.nodes.sync import pull

    used = sorted({rank.node for rank in job.ranks} & set(fleet.nodes))
    told = ask(fleet, dict.fromkeys(used, launchers.manifest_request(job.job)))
    manifests = {node: results.manifest(answer, node=node) for node, answer in told.items()}
    wanted = {
        node: [
            Wanted(remote=file.path, home=file.home, size=file.size, sha256=file.sha256, data=file.data)
            for file in manifest.files
            if file.sha256 is not None
        ]
        for node, manifest in manifests.items()
    }
    came = pull(
        wanted,
        target,
        ssh_config=ctx.folder.ssh_config,
        also={"job.json": results.encode(job)},
        on_event=ctx.on_event,
    )
    for node, manifest in manifests.items():
        for file in manifest.skipped:
            ctx.on_event(Event(f"not brought home: {file.path}: {file.why}", node_name(node)))
    _draw(target)
    if job.state != "running" and not fleet.failures:
        with tagging(ctx):
            release(cluster.aws, [node for node in cluster.nodes if node.node in used], job.job)
    return came


def tagging(ctx: Context) -> AbstractContextManager[None]:
    """Hold the tags that name jobs, which are read, changed and written back, against another client here."""
    return ctx.folder.lock("train", part="tags", wait_s=FETCH_S)


def _draw(target: Path) -> None:
    """Draw the loss that rank 0 wrote down, where it did."""
    rows = metrics(target)
    data = f", {name}" if (name := _data(rows)) else ""
    plot = report.loss_plot(rows, title=f"training loss, {target.name}{data}")
    if plot is not None:
        (target / "loss.svg").write_text(plot, encoding="utf-8")


def metrics(target: Path) -> list[dict[str, Any]]:
    """Return the metrics that the first node's run folder holds; none where there are none."""
    file = target / "node0" / "run" / "metrics.jsonl"
    return report.json_lines(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else []


def _data(rows: list[dict[str, Any]]) -> str | None:
    """Return what the program says it was tested on: the real set, or data made for a rehearsal."""
    return next((row["data"] for row in reversed(rows) if isinstance(row.get("data"), str)), None)


def job_result(ctx: Context, job: Job, *, target: Path | None = None) -> dict[str, Any]:
    """Return a job as the document of `train`, with the accuracy that its program wrote down."""
    rows = metrics(target if target is not None else place_of(ctx, job.job))
    found = {"accuracy": report.last_value(rows, "accuracy"), "data": _data(rows)}
    return report.job_document(job) | found


def remember(ctx: Context, *jobs: Job) -> None:
    """Keep jobs as last seen in the folder, for `status`."""
    record = ctx.folder.read()
    if record is not None:
        new = {job.job for job in jobs}
        others = tuple(one for one in record.jobs if one.job not in new)
        if (after := (*others, *jobs)) != record.jobs:
            ctx.folder.write(replace(record, jobs=after))
