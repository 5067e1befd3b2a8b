"""A cluster that exists becomes what is asked for: grown, shrunk, mended, started, rebuilt, kept longer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from awsddp.cluster import Cluster, Node, Target
from awsddp.errors import ConfigError, NodeError
from awsddp.plan import Convergence, Facts, LaunchPlan, Standing, converge, make_plan
from awsddp.report import money, node_name
from awsddp.spec import remembered
from awsddp.state import Record
from awsddp.verbs.context import Context, facts_of
from awsddp.verbs.costs import bill_of
from awsddp.verbs.launching import carry_out
from awsddp.verbs.nodes import JUMP, Ready, connect

if TYPE_CHECKING:
    from awsddp.aws.session import Aws

Confirm = Callable[[LaunchPlan | str], None]

# What holds from now on without a launch.
_REACH = (JUMP, "network.ssh_cidr", "access.user", "cluster.expires", "cluster.idle", "cluster.budget_usd")
_LOST = "what only the disks of ended nodes hold is lost; results come home first"


def changes(
    ctx: Context, aws: "Aws", record: Record, clusters: Sequence[Cluster], facts: Facts, *, now: datetime
) -> Convergence:
    """Return what stands between the cluster and the spec. `clusters` are all of its name and owner.

    Raises ConfigError where the spec cannot be meant, CloudError where AWS cannot be asked.
    """
    from awsddp.aws.instances import impaired

    mine = next((one for one in clusters if one.id == record.id), nowhere(ctx, record))
    bill = bill_of(ctx, record, mine, aws)  # what ended meanwhile costs no more
    standing = Standing(
        cluster=mine,
        nodes=record.nodes,
        instance_type=record.instance_type,
        expires=record.expires,
        image=record.asked.get("cluster.image"),
        spent_usd=bill.cost_usd if bill else None,
        price_usd_per_hour=record.price_usd_per_hour,
        impaired=impaired(aws, mine.live),
        others=tuple(one for one in clusters if one.id != record.id and one.live),
    )
    return converge(ctx.spec, standing, image_id=facts.image.id, callers=facts.callers, now=now)


def nowhere(ctx: Context, record: Record) -> Cluster:
    """Return the cluster of a record of which nothing exists."""
    region = record.target.region or ""
    return Cluster(name=ctx.spec.name, id=record.id, owner=record.owner, region=region, nodes=())


def plan_of(ctx: Context, aws: "Aws", record: Record, change: Convergence, target: Target) -> LaunchPlan:
    """Return the plan that launches what is missing, with all the steps. Raises as `make_plan` does.

    New nodes beside others belong to the same owner, whoever adds them.
    """
    facts = facts_of(aws, change.spec, target)
    if change.nodes:
        facts = replace(facts, owner=record.owner)
    plan = make_plan(change.spec, facts, numbers=change.numbers, zone=change.zone)
    warnings = (*plan.warnings, *((_LOST,) if change.of("end") else ()))
    return replace(plan, steps=change.steps, warnings=warnings)


def carry_out_changes(
    ctx: Context,
    aws: "Aws",
    record: Record,
    clusters: Sequence[Cluster],
    facts: Facts,
    target: Target,
    confirm: Confirm,
) -> tuple[Record, tuple[Node, ...]]:
    """Take every step but the last, the expiry, which the nodes are told as they are prepared.

    SSH is opened without a question; before a machine begins or ends `confirm` is asked. Results that are not
    home are fetched from nodes that end. Raises ConfigError where a job runs on one of them, NodeError where
    its results cannot be had, and what a launch raises. Cut off anywhere, it goes on when it is run again.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    change = changes(ctx, aws, record, clusters, facts, now=now)
    mine = next((one for one in clusters if one.id == record.id), None)
    _open_ssh(ctx, aws, mine, change)
    plan = plan_of(ctx, aws, record, change, target) if change.numbers else None
    ending = _ending(mine, change)
    # A launch writes its own size down, once AWS is asked for it: one that is refused changes nothing.
    size = change.spec.cluster.nodes if plan is None else min(record.nodes, change.spec.cluster.nodes)
    after = replace(
        record,
        nodes=size,
        expires=change.expires,
        price_usd_per_hour=_price(record, size),
        ssh_user=ctx.spec.access.user or record.ssh_user,
        asked=record.asked | {key: value for key, value in remembered(ctx.spec).items() if key in _REACH},
    )
    if change.asked_about:
        _refuse_running(ctx, record, mine, ending)
        _refuse_others(clusters, change)
        confirm(plan or _told(ctx, after, change))
    if after != record:
        ctx.folder.write(after)
    if after.expires != record.expires:
        ctx.folder.note("extended", id=record.id, expires=after.expires)
    for step in change.steps:
        if step.do in ("end", "start"):
            ctx.say(str(step))
    if ending and mine is not None:
        after = _end(ctx, aws, after, mine, ending)
    _end_others(ctx, aws, clusters, change)
    after = _start(ctx, aws, after, change)
    if plan is None:
        return after, change.nodes
    after, launched = carry_out(ctx, aws, plan, target, after, now=now)
    return after, tuple(sorted((*change.nodes, *launched), key=lambda node: node.node))


def _open_ssh(ctx: Context, aws: "Aws", mine: Cluster | None, change: Convergence) -> None:
    from awsddp.aws.access import move_ssh

    for step in change.of("open"):
        assert mine is not None and mine.group is not None, "only an open group can be opened elsewhere"
        ctx.say(str(step))
        move_ssh(aws, mine.group, change.spec.network.ssh_cidr, on_event=ctx.say)


def _ending(mine: Cluster | None, change: Convergence) -> tuple[Node, ...]:
    gone = {key for step in change.of("end") for key in step.instances}
    return tuple(node for node in (mine.live if mine else ()) if node.instance_id in gone)


def _price(record: Record, nodes: int) -> float | None:
    """Return what so many nodes cost an hour, by what the last launch cost."""
    known = record.price_usd_per_hour
    return known if known is None or nodes == record.nodes else round(known / record.nodes * nodes, 4)


def _told(ctx: Context, record: Record, change: Convergence) -> str:
    """Return what is asked where nothing is launched; `record` is of the cluster as it will be."""
    steps = "".join(f"\n  {step}" for step in change.steps if step.do != "open")
    lost = f"\n  {_LOST}" if change.of("end") else ""
    return (
        f"Cluster {ctx.spec.name}, {record.nodes} x {record.instance_type} in {record.target.region} at "
        f"{money(record.price_usd_per_hour)} an hour for all, once this is done:{steps}{lost}\n"
    )


def _owed(nodes: Sequence[Node]) -> list[str]:
    return sorted({job for node in nodes for job in node.unfetched})


def _refuse_running(ctx: Context, record: Record, mine: Cluster | None, ending: Sequence[Node]) -> None:
    """Refuse to end nodes on which a job runs, or whose results nobody can fetch first."""
    from awsddp.verbs.node_jobs import jobs_on

    owed = _owed(ending)
    if not owed or mine is None:
        return
    names = ", ".join(node_name(node.node) for node in ending)
    off = [node_name(node.node) for node in ending if node.unfetched and node.state != "running"]
    if off:
        raise NodeError(
            f"{names} cannot be ended: the results of {', '.join(owed)} are not home",
            f"{', '.join(off)} does not run",
            f"awsddp up --nodes {record.nodes}; awsddp fetch   # first\nawsddp down --discard   # or end all",
        )
    with connect(ctx, record, _running(mine), partial=True) as fleet:
        lost = [node_name(node.node) for node in ending if node.unfetched and node.node in fleet.failures]
        running = [job.job for job in jobs_on(ctx, fleet) if job.state == "running" and job.job in owed]
    if running:
        raise ConfigError(
            f"{names} cannot be ended: job {', '.join(running)} runs there",
            "",
            f"awsddp cancel {running[0]}   # end it\nawsddp logs -f {running[0]}   # or wait for it",
        )
    if lost:
        raise NodeError(
            f"{names} cannot be ended: the results of {', '.join(owed)} are not home",
            f"{', '.join(lost)} cannot be reached",
            "awsddp up   # again, later\nawsddp down --discard   # or end all, results too",
        )


def _running(mine: Cluster) -> tuple[Node, ...]:
    return tuple(node for node in mine.live if node.state == "running" and node.address and node.node >= 0)


def _refuse_others(clusters: Sequence[Cluster], change: Convergence) -> None:
    ids = {step.value for step in change.of("end") if step.value}
    for other in clusters:
        if other.id in ids and _owed(other.live):
            raise ConfigError(
                f"there is a second cluster {other.name} ({other.id}) with results of "
                f"{', '.join(_owed(other.live))}",
                "another machine made it, and only that one can fetch them",
                f"awsddp fetch there; or awsddp -c {other.name}-2 up here",
            )


def _end(ctx: Context, aws: "Aws", record: Record, mine: Cluster, ending: Sequence[Node]) -> Record:
    """Bring home what the nodes owe, end them, and forget them."""
    from awsddp.aws.teardown import end_nodes, give_up
    from awsddp.nodes import hostkeys
    from awsddp.verbs.node_jobs import jobs_on
    from awsddp.verbs.results import bring_home, remember

    owed = _owed(ending)
    if owed:
        with connect(ctx, record, _running(mine)) as fleet:
            whole = Ready(aws=aws, record=record, nodes=_running(mine))
            for job in jobs_on(ctx, fleet):
                if job.job in owed:
                    ctx.say(f"bringing the results of {job.job} home")
                    bring_home(ctx, whole, fleet, job)
                    remember(ctx, job)
    left = [node for node in ending if node.node >= record.nodes]
    if left:
        give_up(aws, left)
    end_nodes(aws, ending, on_event=ctx.say)
    gone = {node.instance_id for node in ending}
    hostkeys.forget(ctx.folder.known_hosts, gone)
    now = ctx.folder.read() or record
    after = replace(now, prepared=tuple(one for one in now.prepared if one.instance_id not in gone))
    ctx.folder.write(after)
    ctx.folder.note("resized", id=record.id, instances=sorted(gone))
    return after


def _end_others(ctx: Context, aws: "Aws", clusters: Sequence[Cluster], change: Convergence) -> None:
    from awsddp.aws.teardown import teardown

    ids = {step.value for step in change.of("end") if step.value}
    for other in clusters:
        if other.id in ids:
            teardown(aws, other, on_event=ctx.say)


def _start(ctx: Context, aws: "Aws", record: Record, change: Convergence) -> Record:
    """Start what is stopped. Its address changes, so it is prepared anew, and told the new expiry there."""
    from awsddp.aws.power import start

    keys = {key for step in change.of("start") for key in step.instances}
    off = [node for node in change.nodes if node.instance_id in keys]
    if not off:
        return record
    after = replace(record, prepared=tuple(one for one in record.prepared if one.instance_id not in keys))
    ctx.folder.write(after)
    start(aws, off)
    ctx.folder.note("started", id=record.id, instances=sorted(keys), expires=record.expires)
    return after
