"""Launch nodes: plan each region, try the plans in order, and clean up after a failure."""

import secrets
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from awsddp.compat.types import find_quota
from awsddp.errors import AwsddpError, CapacityError, CloudError
from awsddp.model.records import LaunchIntent
from awsddp.plan.launch_plan import make_plan
from awsddp.plan.records import Facts, LaunchPlan, resource_names
from awsddp.plan.requests import RequestValues
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.cost import make_launch_row
from awsddp.session.locate import aws_client_for, gather_facts, resolve_key_file, terminate
from awsddp.settings.loader import settings_to_record
from awsddp.settings.values import parse_idle
from awsddp.state import ClusterFolder, Record
from awsddp.util.parallel import run_each

# The shortest and longest pauses with capacity.retry_until_up. Capacity returns within minutes, not seconds.
FIRST_PAUSE_S, MOST_PAUSE_S = 30.0, 300.0


def launch(cluster: LocatedCluster, plan: LaunchPlan, *, now: datetime | None = None) -> LocatedCluster:
    """Create the key, the security groups and the instances, and record each step before it begins.

    Returns the cluster with its record, the AWS client for the region of the launch, and only the new nodes.
    An existing cluster keeps its id and nodes. `now` is the time from which the plan's expiry counts. If AWS
    has no capacity, the plan's alternatives are tried in order (repeatedly with `capacity.retry_until_up`).
    If AWS refuses the launch, everything that the launch created is removed. Raises CapacityError, CloudError
    or ConfigError.
    """
    from awsddp.aws.waits import CLOCK, growing_pauses

    cluster_id = cluster.local_record.id if cluster.local_record else secrets.token_hex(4)
    has_waited = False
    for pause in growing_pauses(FIRST_PAUSE_S, MOST_PAUSE_S):
        started = now or datetime.now(UTC).replace(microsecond=0)
        try:
            launched = _try_alternatives(
                cluster, plan, *_launch_values(cluster.session, plan, cluster_id, started)
            )
        except CapacityError as error:
            if not cluster.session.spec.capacity.retry_until_up:
                raise
            cluster.session.say(f"{error.message}: retrying in {pause:.0f} s; Ctrl-C stops")
            has_waited = True
            CLOCK.sleep(pause)
            continue
        if has_waited:
            _notify_capacity(launched)
        return launched
    raise AssertionError("growing() never ends")


def _notify_capacity(cluster: LocatedCluster) -> None:
    """Notify the user that a launch that had to wait for capacity has its nodes, which cost money now."""
    from awsddp.session.notify import CAPACITY, notify_event

    record = cluster.record
    text = f"has its {len(cluster.nodes)} x {record.instance_type} after it waited for capacity"
    notify_event(cluster.session, CAPACITY, job=None, key=record.created.isoformat(), text=text)


def _try_alternatives(
    cluster: LocatedCluster, plan: LaunchPlan, values: RequestValues, host_key: str
) -> LocatedCluster:
    """Launch the plan or, if that fails, the first of its alternatives that can be launched."""
    from awsddp.aws.api_errors import AwsRefused
    from awsddp.aws.instances import NEXT_ZONE, OVER_QUOTA

    failures: list[AwsddpError] = []
    exhausted: set[tuple[str, tuple[str, str] | None]] = set()
    for attempt in (plan, *plan.alternatives):
        quota = attempt.region, find_quota(attempt.instance_type, attempt.market)
        if quota in exhausted:
            continue
        if attempt.region != cluster.aws.region:
            _clean_up(cluster, values)
            target = replace(cluster.target, region=attempt.region)
            cluster = replace(cluster, aws_client=aws_client_for(cluster.session, target, login=cluster.aws))
        try:
            return _launch_once(cluster, attempt, values, host_key)
        except (CapacityError, AwsRefused) as error:
            if isinstance(error, AwsRefused) and error.code in OVER_QUOTA:
                exhausted.add(quota)
            elif isinstance(error, AwsRefused) and error.code not in NEXT_ZONE:
                if error.kind != "unavailable":
                    _clean_up(cluster, values)
                raise
            failures.append(error)
        cluster.session.say(failures[-1].message)
    _clean_up(cluster, values)
    raise _no_capacity(failures)


def _launch_values(
    session: Session, plan: LaunchPlan, cluster_id: str, now: datetime
) -> tuple[RequestValues, str]:
    """Return the values that all requests in one round share, and the nodes' temporary host key."""
    from awsddp.nodes.hostkeys import ensure_login_key, make_key
    from awsddp.nodes.provision import render_user_data

    host_key = make_key("awsddp temporary host key")
    # With a budget, more expensive alternatives expire earlier, so this is the earliest expiry. Each node
    # gets its final expiry when it is prepared.
    expires_s = min(option.expires_s for option in (plan, *plan.alternatives))
    data = render_user_data(
        host_key=host_key,
        expires_at=now + timedelta(seconds=expires_s),
        idle_s=parse_idle(session.spec.cluster.idle),
    )
    key_file = resolve_key_file(session.spec) if session.spec.access.key is not None else None
    secrets = {"public_key": ensure_login_key(session.folder, user_key=key_file), "user_data": data}
    return RequestValues(
        ids=resource_names(session.spec.name, cluster_id), secrets=secrets, now=now
    ), host_key.public


def _launch_once(
    cluster: LocatedCluster, plan: LaunchPlan, values: RequestValues, host_key: str
) -> LocatedCluster:
    """Launch one plan's nodes, after writing the record and the intent to the folder."""
    from awsddp.aws import instances
    from awsddp.aws.launch_resources import ensure_launch_resources

    aws, folder, on_event = cluster.aws, cluster.session.folder, cluster.session.on_event
    record = _make_record(cluster, plan, values)
    _save_record(folder, record)
    group = ensure_launch_resources(aws, plan, values, on_event=on_event)

    def write_intent(intent: LaunchIntent) -> None:
        _save_record(folder, replace(record, intent=replace(intent, host_key=host_key)))

    values = replace(values, ids={**values.ids, "security_group": group})
    nodes = instances.launch(aws, plan, values, write_intent=write_intent, on_event=on_event)
    row = make_launch_row(record, (node.instance_id for node in nodes))
    folder.append_event(row.event, **row.written_fields)
    return replace(cluster, local_record=folder.read() or record, nodes=nodes)


def _save_record(folder: ClusterFolder, record: Record) -> None:
    """Write the record of a launch; keep jobs that other commands have added in the meantime."""

    def change(current: Record) -> Record:
        return replace(record, jobs=current.jobs, seen=current.seen) if current.id == record.id else record

    if folder.update(change) is None:
        folder.write(record)


def _clean_up(cluster: LocatedCluster, values: RequestValues) -> None:
    """Delete what a failed launch created in a region, and restore the previous record.

    Leftovers and errors from AWS are reported, not raised.
    """
    from awsddp.aws.clusters import find_clusters

    session = cluster.session
    aws = cluster.aws
    record = session.folder.read()
    if record is not None:
        _save_record(session.folder, cluster.local_record or replace(record, intent=None, asked={}))
    try:
        for listed in find_clusters(
            aws, session.spec.name, record.owner if record else aws.identity().user_id
        ):
            if listed.id == values.ids["cluster_id"] and not listed.live:
                for leftover in terminate(cluster, listed).leftovers:
                    session.say(f"left in {aws.region}: {leftover}")
    except CloudError as error:  # the caller raises the launch's own error
        session.say(
            f"not cleaned up in {aws.region}: {error.message}; try again later: awsddp down --orphans"
        )


def _no_capacity(failures: list[AwsddpError]) -> AwsddpError:
    if len(failures) == 1 or not any(isinstance(failure, CapacityError) for failure in failures):
        return failures[-1]
    return CapacityError(
        "AWS has no capacity for any listed instance type, zone, region or market",
        "; ".join(f"{failure.message}: {failure.why}" for failure in failures),
        "try again later, or list more types (--instance-type A,B) or capacity.regions\n"
        "-o capacity.retry_until_up=true   # keep retrying until there is capacity",
    )


def _make_record(cluster: LocatedCluster, plan: LaunchPlan, values: RequestValues) -> Record:
    previous = cluster.local_record
    return Record(
        id=values.ids["cluster_id"],
        owner=plan.owner,
        account=cluster.aws.identity().account,
        target=replace(cluster.target, region=plan.region),
        created=values.now,
        expires=values.now + timedelta(seconds=plan.expires_s),
        instance_type=plan.instance_type,
        nodes=plan.nodes,
        gpus_per_node=plan.kind.gpus,
        pretended=plan.pretended,
        internet=plan.image.has_internet,
        ssh_user=plan.ssh_user,
        price_usd_per_hour=plan.price_usd_per_hour,
        disk_usd_per_hour=round(plan.price.disks / plan.nodes, 6),
        asked=settings_to_record(cluster.session.spec),
        prepared=previous.prepared if previous else (),
        addresses=previous.addresses if previous else {},
    )


def plan_everywhere(cluster: LocatedCluster, facts: Facts) -> LaunchPlan:
    """Return the plan for the region of `facts`; the plans for `capacity.regions` are its alternatives.

    If a region has no plan, the returned plan gets a warning. Raises the first region's error if no region
    has a plan.
    """
    plans: list[LaunchPlan] = []
    refusals: list[AwsddpError] = []
    regions = dict.fromkeys((facts.region, *cluster.session.spec.capacity.regions))
    for outcome in run_each(lambda region: _plan_in(cluster, region, facts), regions):
        if isinstance(outcome, LaunchPlan):
            plans += [replace(outcome, alternatives=()), *outcome.alternatives]
        else:
            refusals.append(outcome)
    if not plans:
        raise refusals[0]
    markets = list(dict.fromkeys(plan.market for plan in plans))
    first, *later = sorted(plans, key=lambda plan: markets.index(plan.market))
    warnings = (*first.warnings, *(f"skipped: {refusal.message}" for refusal in refusals))
    return replace(first, warnings=warnings, alternatives=tuple(later))


def _plan_in(cluster: LocatedCluster, region: str, facts: Facts) -> LaunchPlan | AwsddpError:
    """Return the plan for a region, or the error; `facts` are the first region's facts."""
    session = cluster.session
    capacity = session.spec.capacity
    try:
        if region == facts.region:
            return make_plan(session.spec, facts)
        zones = tuple(zone for zone in capacity.zones if zone.startswith(region))
        spec = replace(session.spec, capacity=replace(capacity, zones=zones))
        target = replace(cluster.target, region=region)
        other_facts = gather_facts(
            aws_client_for(session, target, login=cluster.aws), spec, target, cluster.local_record
        )
        return make_plan(spec, replace(other_facts, data=facts.data, saving=facts.saving))
    except AwsddpError as error:
        return error
