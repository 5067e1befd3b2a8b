"""Make an existing cluster match its spec: add, terminate, replace and start nodes, and set the expiry."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from awsddp.cluster.launch import launch
from awsddp.compat.types import ADDRESS_USD_PER_HOUR
from awsddp.errors import CapacityError, ConfigError, NodeError
from awsddp.model.billing import Rate
from awsddp.model.records import ACTIVE, ClusterListing, Node, list_unfetched_jobs
from awsddp.plan.converge import ExistingCluster, Reconciliation, plan_reconciliation
from awsddp.plan.launch_plan import highest_spot_rate, make_plan
from awsddp.plan.records import Facts, LaunchPlan
from awsddp.session.configured import KEYS_WITHOUT_LAUNCH
from awsddp.session.connect import JUMP_KEY, check_jump_host, connect, filter_reachable, list_jobs_on_nodes
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.cost import compute_bill
from awsddp.session.locate import gather_facts, terminate
from awsddp.session.next_steps import describe_cost
from awsddp.settings.loader import settings_to_record
from awsddp.state import Record
from awsddp.util.formatting import node_name

Confirm = Callable[[LaunchPlan | str], None]

_LOST = "results are fetched first; everything else on the disks of terminated nodes is lost"


def plan_changes(cluster: LocatedCluster, facts: Facts, *, now: datetime) -> Reconciliation:
    """Return the changes that make the cluster match the spec.

    Raises ConfigError for an invalid spec, or CloudError if AWS does not answer.
    """
    from awsddp.aws.instances import list_impaired

    record, own_listing = cluster.record, own_listing_or_empty(cluster)
    bill = compute_bill(cluster, own_listing)  # also records in the ledger which nodes have ended
    current = ExistingCluster(
        cluster=own_listing,
        nodes=record.nodes,
        instance_type=record.instance_type,
        expires=record.expires,
        image=record.asked.get("cluster.image"),
        gpus=record.asked.get("local.gpus", "on")
        if facts.image.pretends
        else cluster.session.spec.local.gpus,
        spent_usd=bill.cost_usd if bill else None,
        rate=_rate(cluster, facts, own_listing),
        impaired=list_impaired(cluster.aws, own_listing.live),
        others=tuple(_other_live(cluster)),
    )
    return plan_reconciliation(
        cluster.session.spec, current, image_id=facts.image.id, callers=facts.callers, now=now
    )


def _rate(cluster: LocatedCluster, facts: Facts, own_listing: ClusterListing) -> Rate:
    """Return the hourly rate that a budget assumes for the record's nodes."""
    record, zones = cluster.record, {node.zone for node in own_listing.live if node.spot}
    if not zones:
        return Rate(usd_per_hour=record.price_usd_per_hour)
    address = ADDRESS_USD_PER_HOUR if cluster.session.spec.network.address == "public" else 0.0
    fixed_usd = (record.disk_usd_per_hour + address) * record.nodes
    return highest_spot_rate(fixed_usd, record.nodes, record.instance_type, zones, facts)


def own_listing_or_empty(cluster: LocatedCluster) -> ClusterListing:
    """Return the listing of the record's cluster, or an empty listing if AWS does not list the cluster."""
    record, name = cluster.record, cluster.session.spec.name
    region = record.target.region or ""
    return cluster.own_listing or ClusterListing(
        name=name, id=record.id, owner=record.owner, region=region, nodes=()
    )


def make_change_plan(cluster: LocatedCluster, change: Reconciliation, job_facts: Facts) -> LaunchPlan:
    """Return the plan for a change, with all its steps; `job_facts` has the job's data sources and `save_to`.

    Raises the errors of `make_plan`.
    """
    facts = gather_facts(cluster.aws, change.spec, cluster.target, cluster.record)
    facts = replace(facts, data=job_facts.data, saving=job_facts.saving)
    plan = make_plan(change.spec, facts, numbers=change.numbers, zone=change.zone, spent_usd=change.spent_usd)
    warnings = (*plan.warnings, *((_LOST,) if change.steps_of("end") else ()))
    return replace(plan, exists=True, steps=change.steps, warnings=warnings)


def reconcile(cluster: LocatedCluster, facts: Facts, confirm: Confirm) -> LocatedCluster:
    """Carry out the steps of the change, and return the cluster with its nodes.

    This function only records the expiry; `prepare_nodes` sets the expiry on the nodes. A new jump host is
    checked first. `confirm` is called before an instance is started or terminated, but not before SSH is
    opened. Unfetched results are fetched before their nodes are terminated. Raises ConfigError if a job runs
    on a node to terminate, NodeError if results cannot be fetched, and the errors of a launch. After an
    interruption, the next call continues the change.
    """
    session, record = cluster.session, cluster.record
    now = datetime.now(UTC).replace(microsecond=0)
    change = plan_changes(cluster, facts, now=now)
    if facts.image.has_hosts and session.spec.network.jump != record.asked.get(JUMP_KEY):
        check_jump_host(session)
    own_listing = own_listing_or_empty(cluster)
    _open_ssh(cluster, own_listing, change)
    plan = make_change_plan(cluster, change, facts) if change.numbers else None
    ending, other_clusters = _nodes_of_steps("end", change, own_listing.live), _other_live(cluster)
    changed = _changed_fields(session, record, change, is_launch=plan is not None)
    if change.needs_consent:
        _refuse_running(cluster, own_listing, ending)
        _refuse_others(other_clusters)
        if plan is not None or change.steps_of("end") or cluster.target.name != "local":
            confirm(plan or _question(session, replace(record, **changed), change))
    cluster = cluster.update_record(**changed)
    if change.expires != record.expires:
        session.folder.append_event("extended", id=record.id, expires=change.expires)
    for step in change.steps:
        if step.do in ("end", "start") or (step.do == "expire" and step.why):
            session.say(str(step))
    if ending:
        cluster = _end_nodes(cluster, own_listing, ending)
    for other in other_clusters:
        terminate(cluster, other)
    try:
        cluster = _start_nodes(cluster, _nodes_of_steps("start", change, change.nodes))
        cluster = replace(cluster, nodes=()) if plan is None else launch(cluster, plan, now=now)
    except CapacityError as error:
        if change.nodes:
            grouped = plan is not None and plan.placement is not None
            error.next = _steps_without_capacity(change, grouped=grouped)
        raise
    nodes = (*change.nodes, *cluster.nodes)
    return replace(cluster, nodes=tuple(sorted(nodes, key=lambda node: node.node)))


def _open_ssh(cluster: LocatedCluster, own_listing: ClusterListing, change: Reconciliation) -> None:
    """If the change has a step that opens SSH, allow SSH from the addresses in the spec."""
    from awsddp.aws.launch_resources import replace_ssh_sources

    for step in change.steps_of("open"):
        assert own_listing.group is not None, "only the security group of a listed cluster can be changed"
        cluster.session.say(str(step))
        cidrs = change.spec.network.ssh_cidr
        replace_ssh_sources(cluster.aws, own_listing.group, cidrs, on_event=cluster.session.on_event)


def _changed_fields(
    session: Session, record: Record, change: Reconciliation, *, is_launch: bool
) -> dict[str, Any]:
    """Return the record's fields that a change sets."""
    # A launch records the new size itself once AWS accepts it, so that a refused launch changes nothing.
    size = min(record.nodes, change.spec.cluster.nodes) if is_launch else change.spec.cluster.nodes
    applied = {
        key: value for key, value in settings_to_record(session.spec).items() if key in KEYS_WITHOUT_LAUNCH
    }
    return {
        "nodes": size,
        "expires": change.expires,
        "price_usd_per_hour": _price(record, size),
        "ssh_user": session.spec.access.user or record.ssh_user,
        "asked": record.asked | applied,
    }


def _nodes_of_steps(do: str, change: Reconciliation, nodes: Sequence[Node]) -> list[Node]:
    """Return the `nodes` that steps of the kind `do` apply to."""
    instance_ids = {key for step in change.steps_of(do) for key in step.instances}
    return [node for node in nodes if node.instance_id in instance_ids]


def _other_live(cluster: LocatedCluster) -> list[ClusterListing]:
    """Return the living clusters that other machines created with the same name; `up` terminates them."""
    return [listed for listed in cluster.all_listings if listed.id != cluster.record.id and listed.live]


def _price(record: Record, nodes: int) -> float | None:
    """Return the hourly price of this number of nodes, computed from the last launch's price."""
    price = record.price_usd_per_hour
    return price if price is None or nodes == record.nodes else round(price / record.nodes * nodes, 4)


def _question(session: Session, record: Record, change: Reconciliation) -> str:
    """Return the question for a change without a launch; `record` describes the cluster after the change."""
    steps = "".join(f"\n  {step}" for step in change.steps if step.do != "open")
    lost_note = f"\n  {_LOST}" if change.steps_of("end") else ""
    machines = f"{record.nodes} x {record.instance_type}{describe_cost(record)}"
    return f"Cluster {session.spec.name} will have {machines}:{steps}{lost_note}\n"


def _refuse_running(cluster: LocatedCluster, own_listing: ClusterListing, ending: Sequence[Node]) -> None:
    """Raise an error if a job runs on the nodes to terminate, or if their results cannot be fetched first."""
    unfetched = list_unfetched_jobs(ending)
    if not unfetched:
        return
    names = ", ".join(node_name(node.node) for node in ending)
    stopped = [node_name(node.node) for node in ending if node.unfetched and node.state != "running"]
    if stopped:
        raise NodeError(
            f"{names} cannot be ended: the results of {', '.join(unfetched)} are not fetched",
            f"{', '.join(stopped)} is not running",
            f"awsddp up --nodes {cluster.record.nodes} && awsddp fetch   # first\n"
            "awsddp down --discard   # or terminate all nodes and lose the results",
        )
    from awsddp.storage.results_dir import has_unfetched_results

    with connect(cluster, filter_reachable(own_listing.live), partial=True) as connected:
        unreachable = [
            node_name(node.node)
            for node in ending
            if node.unfetched and node.node in connected.fleet.failures
        ]
        jobs = [
            job
            for job in list_jobs_on_nodes(connected)
            if has_unfetched_results(cluster.session, unfetched, job)
        ]
    running = [job.job for job in jobs if job.state in ACTIVE]
    if running:
        raise ConfigError(
            f"{names} cannot be ended: job {', '.join(running)} runs there",
            "",
            f"awsddp cancel {running[0]}   # end it\nawsddp logs -f {running[0]}   # or wait for it",
        )
    if unreachable:
        raise NodeError(
            f"{names} cannot be ended: the results of {', '.join(unfetched)} are not fetched",
            f"{', '.join(unreachable)} cannot be reached",
            "awsddp up   # again, later\n"
            "awsddp down --discard   # or terminate all nodes and lose the results",
        )


def _refuse_others(other_clusters: Sequence[ClusterListing]) -> None:
    for other in other_clusters:
        if other.unfetched:
            raise ConfigError(
                f"a second cluster {other.name} ({other.id}) holds results of {', '.join(other.unfetched)}",
                "another machine created that cluster, and only that machine can fetch the results",
                f"awsddp -c {other.name}-2 up   # another name; or on that machine: awsddp fetch",
            )


def _end_nodes(
    cluster: LocatedCluster, own_listing: ClusterListing, ending: Sequence[Node]
) -> LocatedCluster:
    """Fetch the nodes' unfetched results, terminate the nodes, and return the cluster without them."""
    from awsddp.aws.teardown import give_up_nodes, terminate_nodes
    from awsddp.job.fetch import fetch_from_nodes
    from awsddp.nodes import hostkeys
    from awsddp.storage.results_dir import has_unfetched_results

    session, folder, record = cluster.session, cluster.session.folder, cluster.record
    unfetched = list_unfetched_jobs(ending)
    if unfetched:
        with connect(
            cluster.with_nodes(filter_reachable(own_listing.live), all_nodes=own_listing.live)
        ) as connected:
            cluster = connected.cluster
            for job in list_jobs_on_nodes(connected):
                if has_unfetched_results(session, unfetched, job):
                    session.say(f"fetching the results of {job.job}")
                    fetch_from_nodes(connected, job)
                    folder.save_jobs(job)
    surplus = [node for node in ending if node.node >= record.nodes]
    if surplus:
        give_up_nodes(cluster.aws, surplus)
    terminate_nodes(cluster.aws, ending, on_event=session.on_event)
    ended_ids = {node.instance_id for node in ending}
    hostkeys.remove_instances(folder.known_hosts, ended_ids)
    cluster = _forget_prepared(cluster, ended_ids)
    folder.append_event("resized", id=record.id, instances=sorted(ended_ids))
    return cluster


def _forget_prepared(cluster: LocatedCluster, instance_ids: set[str]) -> LocatedCluster:
    record = cluster.session.folder.read() or cluster.record
    remaining = tuple(node for node in record.prepared if node.instance_id not in instance_ids)
    return cluster.update_record(prepared=remaining)


def _start_nodes(cluster: LocatedCluster, stopped: Sequence[Node]) -> LocatedCluster:
    """Start stopped nodes, forget that they are prepared, and return the cluster.

    The nodes must be prepared again, because their addresses change and they get a new expiry.
    """
    from awsddp.aws.power import start

    if not stopped:
        return cluster
    session, instance_ids = cluster.session, {node.instance_id for node in stopped}
    grouped = session.spec.capacity.efa and session.spec.capacity.placement_group
    cluster = _forget_prepared(cluster, instance_ids)
    start(cluster.aws, stopped, keeps_group=grouped, on_event=session.on_event)
    record = cluster.record
    session.folder.append_event(
        "started", id=record.id, instances=sorted(instance_ids), expires=record.expires
    )
    return cluster


def _steps_without_capacity(change: Reconciliation, *, grouped: bool) -> str:
    """Return the next steps if AWS has no capacity for nodes to add or to start.

    `grouped` is True if the new nodes are launched into the placement group. Stopping the nodes frees a full
    group: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-strategies.html
    """
    next_steps, count = ["awsddp up   # again, later"], len(change.nodes)
    starts = change.steps_of("start")
    if change.spec.capacity.efa and (grouped or starts):
        next_steps.append("awsddp up -o capacity.placement_group=false   # not close to the others")
        if not starts and not any(node.spot for node in change.nodes):
            next_steps.append("awsddp stop && awsddp up   # AWS places all nodes again, their disks stay")
    if not starts and {node.node for node in change.nodes} == set(range(count)):
        next_steps.append(f"awsddp up --nodes {count}   # continue without the missing nodes")
    next_steps.append("awsddp down && awsddp up   # other machines, in any zone")
    return "\n".join(next_steps)
