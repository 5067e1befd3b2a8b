"""From a plan to instances: over zones, types, regions and markets, with retries on request."""

import secrets
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from awsddp.errors import AwsddpError, CapacityError
from awsddp.parallel import each
from awsddp.plan import make_plan
from awsddp.plan.records import Facts, LaunchPlan, names
from awsddp.plan.requests import Values
from awsddp.records import Node
from awsddp.spec import idle_seconds, remembered
from awsddp.state import Folder, Record, make_folder, write_private
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context, aws_of, facts_of, own_key_file
from awsddp.verbs.ledger import launched

# Between two rounds of capacity.retry_until_up: capacity comes back in minutes, not in seconds.
FIRST_PAUSE_S, MOST_PAUSE_S = 30.0, 300.0


def plan_everywhere(cluster: ClusterHandle, facts: Facts) -> LaunchPlan:
    """Return the plan for the region of `facts`; those for `capacity.regions` are its alternatives.

    A region without a plan is a warning. Raises the first region's error if no region has one.
    """
    plans: list[LaunchPlan] = []
    refusals: list[AwsddpError] = []
    regions = dict.fromkeys((facts.region, *cluster.ctx.spec.capacity.regions))
    for made in each(lambda region: _plan_in(cluster, region, facts), regions):
        if isinstance(made, LaunchPlan):
            plans += [replace(made, alternatives=()), *made.alternatives]
        else:
            refusals.append(made)
    if not plans:
        raise refusals[0]
    markets = list(dict.fromkeys(plan.market for plan in plans))
    first, *later = sorted(plans, key=lambda plan: markets.index(plan.market))
    warnings = (*first.warnings, *(f"skipped: {refusal.message}" for refusal in refusals))
    return replace(first, warnings=warnings, alternatives=tuple(later))


def _plan_in(cluster: ClusterHandle, region: str, facts: Facts) -> LaunchPlan | AwsddpError:
    """Return the plan of a region, or why there is none; `facts` are of the first one."""
    ctx, capacity = cluster.ctx, cluster.ctx.spec.capacity
    try:
        if region == facts.region:
            return make_plan(ctx.spec, facts)
        zones = tuple(zone for zone in capacity.zones if zone.startswith(region))
        spec = replace(ctx.spec, capacity=replace(capacity, zones=zones))
        target = replace(cluster.target, region=region)
        return make_plan(spec, facts_of(aws_of(ctx, target, login=cluster.aws), spec, target, cluster.known))
    except AwsddpError as error:
        return error


def launch(cluster: ClusterHandle, plan: LaunchPlan, *, now: datetime | None = None) -> tuple[Node, ...]:
    """Create the key, the groups and the instances; each step is recorded before it is taken.

    A known cluster keeps its id and nodes; the plan's expiry counts from `now`. Without capacity the plan's
    alternatives are tried in order; with `capacity.retry_until_up` again and again, until there is capacity.
    What a refused launch created is removed. The handle then has the record and the gateway of the region of
    the launch. Raises CapacityError, CloudError or ConfigError.
    """
    from awsddp.aws.waits import CLOCK, growing

    ctx = cluster.ctx
    cluster_id = cluster.known.id if cluster.known else secrets.token_hex(4)
    for pause in growing(FIRST_PAUSE_S, MOST_PAUSE_S):
        begun = now or datetime.now(UTC).replace(microsecond=0)
        try:
            return _round(cluster, plan, *_values(ctx, plan, cluster_id, begun))
        except CapacityError as error:
            if not ctx.spec.capacity.retry_until_up:
                raise
            ctx.say(f"{error.message}: retrying in {pause:.0f} s; Ctrl-C stops")
            CLOCK.sleep(pause)
    raise AssertionError("growing() never ends")


def _round(cluster: ClusterHandle, plan: LaunchPlan, values: Values, host_key: str) -> tuple[Node, ...]:
    """Try the plan and its alternatives once."""
    from awsddp.aws.instances import NEXT_ZONE
    from awsddp.aws.refusals import Refused

    ctx = cluster.ctx
    failures: list[AwsddpError] = []
    for one in (plan, *plan.alternatives):
        if one.region != cluster.aws.region:
            _clean_up(cluster, values)
            cluster.gateway = aws_of(ctx, replace(cluster.target, region=one.region), login=cluster.aws)
        try:
            return _attempt(cluster, one, values, host_key)
        except (CapacityError, Refused) as error:
            if isinstance(error, Refused) and error.code not in NEXT_ZONE:
                if error.kind != "unavailable":
                    _clean_up(cluster, values)
                raise
            failures.append(error)
        ctx.say(failures[-1].message)
    _clean_up(cluster, values)
    raise _no_capacity(failures)


def _values(ctx: Context, plan: LaunchPlan, cluster_id: str, now: datetime) -> tuple[Values, str]:
    """Return what all attempts of one round send, and the temporary host key that their nodes have."""
    from awsddp.nodes.hostkeys import make_key
    from awsddp.nodes.user_data import user_data

    host_key = make_key("awsddp temporary host key")
    # A budget ends more expensive alternatives earlier; each node gets its own expiry when it is prepared.
    expires_s = min(one.expires_s for one in (plan, *plan.alternatives))
    data = user_data(
        host_key=host_key,
        expires_at=now + timedelta(seconds=expires_s),
        idle_s=idle_seconds(ctx.spec.cluster.idle),
    )
    secrets = {"public_key": _login_key(ctx), "user_data": data}
    return Values(ids=names(ctx.spec.name, cluster_id), secrets=secrets, now=now), host_key.public


def _attempt(cluster: ClusterHandle, plan: LaunchPlan, values: Values, host_key: str) -> tuple[Node, ...]:
    from awsddp.aws import instances
    from awsddp.aws.access import ensure_access

    ctx, aws = cluster.ctx, cluster.aws
    record = _record(cluster, plan, values)
    _write(ctx.folder, record)
    group = ensure_access(aws, plan, values, on_event=ctx.on_event)

    def write_intent(intent: dict[str, Any]) -> None:
        _write(ctx.folder, replace(record, intent={**intent, "host_key": host_key}))

    values = replace(values, ids={**values.ids, "security_group": group})
    nodes = instances.launch(aws, plan, values, write_intent=write_intent, on_event=ctx.on_event)
    ctx.folder.note(
        "launched", id=record.id, instances=[node.instance_id for node in nodes], **launched(record)
    )
    cluster.known = ctx.folder.read() or record
    return nodes


def _write(folder: Folder, record: Record) -> None:
    """Write the record of a launch, with the jobs that other commands have started meanwhile."""

    def change(now: Record) -> Record:
        return replace(record, jobs=now.jobs, seen=now.seen) if now.id == record.id else record

    if folder.update(change) is None:
        folder.write(record)


def _clean_up(cluster: ClusterHandle, values: Values) -> None:
    """Delete what a failed launch created in a region; leftovers are reported.

    The folder then has its previous record.
    """
    from awsddp.aws.clusters import find_clusters

    ctx, aws = cluster.ctx, cluster.aws
    record = ctx.folder.read()
    if record is not None:
        _write(ctx.folder, cluster.known or replace(record, intent=None, asked={}))
    for one in find_clusters(aws, ctx.spec.name, record.owner if record else aws.identity().user_id):
        if one.id == values.ids["cluster_id"] and not one.live:
            for left in cluster.end(one).leftovers:
                ctx.say(f"left in {aws.region}: {left}")


def _no_capacity(failures: list[AwsddpError]) -> AwsddpError:
    if len(failures) == 1:
        return failures[0]
    return CapacityError(
        "AWS has no capacity for any listed instance type, zone, region or market",
        "; ".join(f"{failure.message}: {failure.why}" for failure in failures),
        "try again later, or list more types (--instance-type A,B) or capacity.regions\n"
        "-o capacity.retry_until_up=true   # keep retrying until there is capacity",
    )


def _record(cluster: ClusterHandle, plan: LaunchPlan, values: Values) -> Record:
    before = cluster.known
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
        asked=remembered(cluster.ctx.spec),
        prepared=before.prepared if before else (),
        addresses=before.addresses if before else {},
    )


def _login_key(ctx: Context) -> str:
    """Return the public half of the cluster's login key; the private half is 0600 from birth.

    With `access.key_file` the user's own private key is pointed to, never copied.
    """
    from awsddp.nodes.hostkeys import make_key

    if ctx.spec.access.key is not None:
        make_folder(ctx.folder.path)
        ctx.folder.key.unlink(missing_ok=True)
        ctx.folder.key.symlink_to(own_key_file(ctx.spec))
        return ""
    public = ctx.folder.path / "key.pub"
    if not (ctx.folder.key.exists() and public.exists()):
        made = make_key(f"awsddp {ctx.spec.name}")
        write_private(ctx.folder.key, made.private.encode())
        write_private(public, made.public.encode() + b"\n")
    return public.read_text(encoding="utf-8").strip()
