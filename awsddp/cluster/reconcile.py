"""Making an existing cluster match its spec: grow, shrink, repair, start, rebuild, keep longer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from awsddp.cluster.launch import launch
from awsddp.compat.types import ADDRESS_USD_PER_HOUR
from awsddp.errors import CapacityError, ConfigError, NodeError
from awsddp.model.billing import Rate
from awsddp.model.records import ACTIVE, Listed, Node, unfetched_jobs
from awsddp.plan.converge import Convergence, Standing, converge
from awsddp.plan.launch_plan import make_plan, spot_rate
from awsddp.plan.records import Facts, LaunchPlan
from awsddp.session.configured import REACH_KEYS
from awsddp.session.connect import JUMP, connect, reach_jump, reachable, told_jobs
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.cost import bill_of
from awsddp.session.locate import end, facts_of
from awsddp.session.next_steps import costs
from awsddp.settings.loader import remembered
from awsddp.state import Record
from awsddp.util.format import node_name

Confirm = Callable[[LaunchPlan | str], None]

_LOST = "results are fetched first; everything else on the disks of terminated nodes is lost"


def changes(cluster: LocatedCluster, facts: Facts, *, now: datetime) -> Convergence:
    """Return the difference between the cluster and the spec.

    Raises ConfigError for an invalid spec, CloudError where AWS does not answer.
    """
    from awsddp.aws.instances import impaired

    record, own = cluster.record, own_or_empty(cluster)
    bill = bill_of(cluster, own)  # what ended meanwhile costs no more
    standing = Standing(
        cluster=own,
        nodes=record.nodes,
        instance_type=record.instance_type,
        expires=record.expires,
        image=record.asked.get("cluster.image"),
        gpus=record.asked.get("local.gpus", "on")
        if facts.image.pretends
        else cluster.session.spec.local.gpus,
        spent_usd=bill.cost_usd if bill else None,
        rate=_rate(cluster, facts, own),
        impaired=impaired(cluster.aws, own.live),
        others=tuple(_others(cluster)),
    )
    return converge(cluster.session.spec, standing, image_id=facts.image.id, callers=facts.callers, now=now)


def _rate(cluster: LocatedCluster, facts: Facts, own: Listed) -> Rate:
    """Return what a budget assumes that the nodes of the record cost per hour."""
    record, zones = cluster.record, {node.zone for node in own.live if node.spot}
    if not zones:
        return Rate(usd_per_hour=record.price_usd_per_hour)
    address = ADDRESS_USD_PER_HOUR if cluster.session.spec.network.address == "public" else 0.0
    fixed_usd = (record.disk_usd_per_hour + address) * record.nodes
    return spot_rate(fixed_usd, record.nodes, record.instance_type, zones, facts)


def own_or_empty(cluster: LocatedCluster) -> Listed:
    """Return what AWS lists of the record's own cluster; one without nodes where that is nothing."""
    record, name = cluster.record, cluster.session.spec.name
    region = record.target.region or ""
    return cluster.own or Listed(name=name, id=record.id, owner=record.owner, region=region, nodes=())


def plan_of(cluster: LocatedCluster, change: Convergence, found: Facts) -> LaunchPlan:
    """Return the plan that launches what is missing, with all the steps; what its job needs is as `found`.

    Raises as `make_plan` does.
    """
    facts = facts_of(cluster.aws, change.spec, cluster.target, cluster.record)
    facts = replace(facts, data=found.data, saving=found.saving)
    plan = make_plan(change.spec, facts, numbers=change.numbers, zone=change.zone, spent_usd=change.spent_usd)
    warnings = (*plan.warnings, *((_LOST,) if change.of("end") else ()))
    return replace(plan, exists=True, steps=change.steps, warnings=warnings)


def reconcile(cluster: LocatedCluster, facts: Facts, confirm: Confirm) -> LocatedCluster:
    """Take every step but the last, the expiry, which the nodes get when they are prepared; return the
    cluster with its nodes.

    SSH is opened without a question, a new jump host is reached first; `confirm` is called before an instance
    is started or terminated. Unfetched results are fetched first. Raises ConfigError if a job runs on a node
    to terminate, NodeError if its results cannot be fetched, and what a launch raises. An interrupted call
    continues when run again.
    """
    from awsddp.aws.launch_resources import move_ssh

    session, record = cluster.session, cluster.record
    now = datetime.now(UTC).replace(microsecond=0)
    change = changes(cluster, facts, now=now)
    if facts.image.has_hosts and session.spec.network.jump != record.asked.get(JUMP):
        reach_jump(session)
    own = own_or_empty(cluster)
    for step in change.of("open"):
        assert own.group is not None, "only an open group can be opened elsewhere"
        session.say(str(step))
        move_ssh(cluster.aws, own.group, change.spec.network.ssh_cidr, on_event=session.on_event)
    plan = plan_of(cluster, change, facts) if change.numbers else None
    ending, others = _named("end", change, own.live), _others(cluster)
    # A launch writes its own size down, once AWS is asked for it: one that is refused changes nothing.
    size = change.spec.cluster.nodes if plan is None else min(record.nodes, change.spec.cluster.nodes)
    changed: dict[str, Any] = {
        "nodes": size,
        "expires": change.expires,
        "price_usd_per_hour": _price(record, size),
        "ssh_user": session.spec.access.user or record.ssh_user,
        "asked": record.asked
        | {key: value for key, value in remembered(session.spec).items() if key in REACH_KEYS},
    }
    if change.needs_consent:
        _refuse_running(cluster, own, ending)
        _refuse_others(others)
        if plan is not None or change.of("end") or cluster.target.name != "local":
            confirm(plan or _question(session, replace(record, **changed), change))
    cluster = cluster.remember(**changed)
    if change.expires != record.expires:
        session.folder.note("extended", id=record.id, expires=change.expires)
    for step in change.steps:
        if step.do in ("end", "start") or (step.do == "expire" and step.why):
            session.say(str(step))
    if ending:
        cluster = _end_nodes(cluster, own, ending)
    for other in others:
        end(cluster, other)
    try:
        cluster = _start(cluster, _named("start", change, change.nodes))
        cluster = replace(cluster, nodes=()) if plan is None else launch(cluster, plan, now=now)
    except CapacityError as error:
        if change.nodes:
            error.next = _without_capacity(change, grouped=plan is not None and plan.placement is not None)
        raise
    nodes = (*change.nodes, *cluster.nodes)
    return replace(cluster, nodes=tuple(sorted(nodes, key=lambda node: node.node)))


def _named(do: str, change: Convergence, nodes: Sequence[Node]) -> list[Node]:
    """Return those of `nodes` that the steps of one kind name."""
    keys = {key for step in change.of(do) for key in step.instances}
    return [node for node in nodes if node.instance_id in keys]


def _others(cluster: LocatedCluster) -> list[Listed]:
    """Return the living clusters of the same name, which another machine made and `up` ends."""
    return [one for one in cluster.all_listed if one.id != cluster.record.id and one.live]


def _price(record: Record, nodes: int) -> float | None:
    """Return what so many nodes cost per hour, by what the last launch cost."""
    known = record.price_usd_per_hour
    return known if known is None or nodes == record.nodes else round(known / record.nodes * nodes, 4)


def _question(session: Session, record: Record, change: Convergence) -> str:
    """Return the question where nothing is launched; `record` is of the cluster as it will be."""
    steps = "".join(f"\n  {step}" for step in change.steps if step.do != "open")
    lost = f"\n  {_LOST}" if change.of("end") else ""
    machines = f"{record.nodes} x {record.instance_type}{costs(record)}"
    return f"Cluster {session.spec.name}, {machines}, once this is done:{steps}{lost}\n"


def _refuse_running(cluster: LocatedCluster, own: Listed, ending: Sequence[Node]) -> None:
    """Refuse to terminate nodes on which a job runs, or whose results cannot be fetched first."""
    owed = unfetched_jobs(ending)
    if not owed:
        return
    names = ", ".join(node_name(node.node) for node in ending)
    off = [node_name(node.node) for node in ending if node.unfetched and node.state != "running"]
    if off:
        raise NodeError(
            f"{names} cannot be ended: the results of {', '.join(owed)} are not fetched",
            f"{', '.join(off)} is not running",
            f"awsddp up --nodes {cluster.record.nodes} && awsddp fetch   # first\n"
            "awsddp down --discard   # or end all",
        )
    from awsddp.storage.results_dir import is_owed

    with connect(cluster, reachable(own.live), partial=True) as connected:
        lost = [
            node_name(node.node)
            for node in ending
            if node.unfetched and node.node in connected.fleet.failures
        ]
        owing = [job for job in told_jobs(connected) if is_owed(cluster.session, owed, job)]
    running = [job.job for job in owing if job.state in ACTIVE]
    if running:
        raise ConfigError(
            f"{names} cannot be ended: job {', '.join(running)} runs there",
            "",
            f"awsddp cancel {running[0]}   # end it\nawsddp logs -f {running[0]}   # or wait for it",
        )
    if lost:
        raise NodeError(
            f"{names} cannot be ended: the results of {', '.join(owed)} are not fetched",
            f"{', '.join(lost)} cannot be reached",
            "awsddp up   # again, later\nawsddp down --discard   # or end all, results too",
        )


def _refuse_others(others: Sequence[Listed]) -> None:
    for other in others:
        if other.unfetched:
            raise ConfigError(
                f"a second cluster {other.name} ({other.id}) holds results of {', '.join(other.unfetched)}",
                "another machine made it, and only that one can fetch them",
                f"awsddp -c {other.name}-2 up   # another name here; or there: awsddp fetch",
            )


def _end_nodes(cluster: LocatedCluster, own: Listed, ending: Sequence[Node]) -> LocatedCluster:
    """Fetch the nodes' unfetched results, terminate them, and return the cluster that forgot them."""
    from awsddp.aws.teardown import end_nodes, give_up
    from awsddp.job.fetch import bring
    from awsddp.nodes import hostkeys
    from awsddp.storage.results_dir import is_owed

    session, folder, record = cluster.session, cluster.session.folder, cluster.record
    owed = unfetched_jobs(ending)
    if owed:
        with connect(cluster.with_nodes(reachable(own.live), of=own.live)) as connected:
            cluster = connected.cluster
            for job in told_jobs(connected):
                if is_owed(session, owed, job):
                    session.say(f"fetching the results of {job.job}")
                    bring(connected, job)
                    folder.remember(job)
    left = [node for node in ending if node.node >= record.nodes]
    if left:
        give_up(cluster.aws, left)
    end_nodes(cluster.aws, ending, on_event=session.on_event)
    gone = {node.instance_id for node in ending}
    hostkeys.forget(folder.known_hosts, gone)
    cluster = _forget_prepared(cluster, gone)
    folder.note("resized", id=record.id, instances=sorted(gone))
    return cluster


def _forget_prepared(cluster: LocatedCluster, instance_ids: set[str]) -> LocatedCluster:
    record = cluster.session.folder.read() or cluster.record
    kept = tuple(one for one in record.prepared if one.instance_id not in instance_ids)
    return cluster.remember(prepared=kept)


def _start(cluster: LocatedCluster, off: Sequence[Node]) -> LocatedCluster:
    """Start what is stopped. Its address changes, so it is prepared anew, and gets the new expiry there."""
    from awsddp.aws.power import start

    if not off:
        return cluster
    session, keys = cluster.session, {node.instance_id for node in off}
    grouped = session.spec.capacity.efa and session.spec.capacity.placement_group
    cluster = _forget_prepared(cluster, keys)
    start(cluster.aws, off, keeps_group=grouped, on_event=session.on_event)
    record = cluster.record
    session.folder.note("started", id=record.id, instances=sorted(keys), expires=record.expires)
    return cluster


def _without_capacity(change: Convergence, *, grouped: bool) -> str:
    """Return the ways out where AWS has no machines beside the nodes that stay, or none to start.

    `grouped` is whether they are to stand in the placement group. A group that is full is emptied by a stop:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-strategies.html
    """
    ways, kept = ["awsddp up   # again, later"], len(change.nodes)
    off = change.of("start")
    if change.spec.capacity.efa and (grouped or off):
        ways.append("awsddp up -o capacity.placement_group=false   # not close to the others")
        if not off and not any(node.spot for node in change.nodes):
            ways.append("awsddp stop && awsddp up   # AWS places all nodes anew, their disks stay")
    if not off and {node.node for node in change.nodes} == set(range(kept)):
        ways.append(f"awsddp up --nodes {kept}   # go on with {kept}")
    ways.append("awsddp down && awsddp up   # other machines, in any zone")
    return "\n".join(ways)
