"""From a plan to instances: over zones, types, regions and markets, and again where that was asked for."""

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.cluster import Node, Target
from awsddp.errors import AwsddpError, CapacityError
from awsddp.plan import Facts, LaunchPlan, make_plan, names
from awsddp.spec import idle_seconds, remembered
from awsddp.state import Record, write_private
from awsddp.verbs.context import Context, aws_of, facts_of, own_key_file
from awsddp.verbs.costs import launched

if TYPE_CHECKING:
    from awsddp.aws.session import Aws

# Between two rounds of --retry-until-up: capacity comes back in minutes, not in seconds.
FIRST_PAUSE_S, MOST_PAUSE_S = 30.0, 300.0


def plan_everywhere(ctx: Context, aws: "Aws", target: Target, facts: Facts) -> LaunchPlan:
    """Return the plan of the region that `facts` are of; what `capacity.regions` lists are alternatives.

    A region where the spec cannot be is told as a warning. Raises the first region's refusal where none can.
    """
    others = [region for region in ctx.spec.capacity.regions if region != facts.region]
    with ThreadPoolExecutor(max_workers=max(1, len(others))) as pool:
        away = [pool.submit(_plan_in, ctx, target, region, aws) for region in others]
        made: list[LaunchPlan] = []
        refusals: list[AwsddpError] = []
        here: Callable[[], LaunchPlan] = partial(make_plan, ctx.spec, facts)
        for attempt in (here, *(future.result for future in away)):
            try:
                plan = attempt()
                made += [replace(plan, alternatives=()), *plan.alternatives]
            except AwsddpError as refusal:
                refusals.append(refusal)
    if not made:
        raise refusals[0]
    markets = list(dict.fromkeys(plan.market for plan in made))
    first, *later = sorted(made, key=lambda plan: markets.index(plan.market))
    warnings = (*first.warnings, *(f"passed over: {refusal.message}" for refusal in refusals))
    return replace(first, warnings=warnings, alternatives=tuple(later))


def _plan_in(ctx: Context, target: Target, region: str, login: "Aws") -> LaunchPlan:
    capacity = ctx.spec.capacity
    zones = tuple(zone for zone in capacity.zones if zone.startswith(region))
    spec = replace(ctx.spec, capacity=replace(capacity, zones=zones))
    aws = aws_of(ctx, replace(target, region=region), login=login)
    return make_plan(spec, facts_of(aws, spec, target))


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """What all attempts of one round share: the cluster's id, its keys, when it began, what was before it."""

    cluster_id: str
    before: Record | None
    target: Target
    now: datetime
    host_key: str
    secrets: dict[str, str]


def carry_out(
    ctx: Context,
    aws: "Aws",
    plan: LaunchPlan,
    target: Target,
    record: Record | None,
    *,
    now: datetime | None = None,
) -> tuple[Record, tuple[Node, ...]]:
    """Make the key, the groups and the instances; each step is written down before it is taken.

    `record` is what the folder knows of the cluster, whose id and nodes stay; the plan's expiry counts from
    `now`. Where AWS has no machines for the plan its alternatives are tried in order, each shown; with
    `capacity.retry_until_up` all of them again, until there are machines. What a refused launch made is taken
    away again. Raises CapacityError, CloudError or ConfigError.
    """
    from awsddp.aws.waits import CLOCK, growing

    cluster_id = record.id if record else secrets.token_hex(4)
    for pause in growing(FIRST_PAUSE_S, MOST_PAUSE_S):
        begun = now or datetime.now(UTC).replace(microsecond=0)
        shared = _Launch(
            cluster_id=cluster_id, before=record, target=target, now=begun, **_keys(ctx, plan, begun)
        )
        try:
            return _round(ctx, aws, plan, shared)
        except CapacityError as error:
            if not ctx.spec.capacity.retry_until_up:
                raise
            ctx.say(f"{error.message}: asking again in {pause:.0f} s; Ctrl-C ends it")
            CLOCK.sleep(pause)
    raise AssertionError("growing() never ends")


def _round(ctx: Context, aws: "Aws", plan: LaunchPlan, shared: _Launch) -> tuple[Record, tuple[Node, ...]]:
    """Try the plan and its alternatives once."""
    from awsddp.aws.instances import NEXT_ZONE
    from awsddp.aws.refusals import Refused, Unanswered

    failures: list[AwsddpError] = []
    for one in (plan, *plan.alternatives):
        if one.region != aws.region:
            _take_away(ctx, aws, shared)
            aws = aws_of(ctx, replace(shared.target, region=one.region), login=aws)
        try:
            return _attempt(ctx, aws, one, shared)
        except CapacityError as error:
            failures.append(error)
        except Refused as refusal:
            if isinstance(refusal, Unanswered):
                raise
            if refusal.code not in NEXT_ZONE:
                _take_away(ctx, aws, shared)
                raise
            failures.append(refusal)
        ctx.say(failures[-1].message)
    _take_away(ctx, aws, shared)
    raise _nowhere(failures)


def _keys(ctx: Context, plan: LaunchPlan, now: datetime) -> dict[str, Any]:
    """Return the keys of one launch: the throw-away host key, and what is sent of it and of the login key."""
    from awsddp.nodes.hostkeys import make_key
    from awsddp.nodes.user_data import user_data

    host_key = make_key("awsddp throw-away host key")
    # A budget ends dearer alternatives earlier; each node is told its own expiry as it is prepared.
    expires_s = min(one.expires_s for one in (plan, *plan.alternatives))
    data = user_data(
        host_key=host_key,
        expires_at=now + timedelta(seconds=expires_s),
        idle_s=idle_seconds(ctx.spec.cluster.idle),
    )
    return {
        "host_key": host_key.public,
        "secrets": {"public_key": _login_key(ctx), "user_data": data},
    }


def _attempt(ctx: Context, aws: "Aws", plan: LaunchPlan, shared: _Launch) -> tuple[Record, tuple[Node, ...]]:
    from awsddp.aws.access import ensure_access
    from awsddp.aws.instances import launch

    record = _record(ctx, plan, shared, account=aws.identity().account)
    ctx.folder.write(record)
    given: dict[str, Any] = {"secrets": shared.secrets, "now": shared.now, "on_event": ctx.say}
    ids = names(plan.cluster, record.id)
    group = ensure_access(aws, plan, ids=ids, **given)

    def write_intent(intent: dict[str, Any]) -> None:
        ctx.folder.write(replace(record, intent={**intent, "host_key": shared.host_key}))

    nodes = launch(aws, plan, ids={**ids, "security_group": group}, write_intent=write_intent, **given)
    made = [node.instance_id for node in nodes]
    ctx.folder.note("launched", id=record.id, instances=made, **launched(record))
    return ctx.folder.read() or record, nodes


def _take_away(ctx: Context, aws: "Aws", shared: _Launch) -> None:
    """Delete what a launch that came to nothing made in a region; what stays is told.

    The folder then knows again what it knew before.
    """
    from awsddp.aws.clusters import find_clusters
    from awsddp.aws.teardown import teardown

    record = ctx.folder.read()
    if record is not None:
        ctx.folder.write(shared.before or replace(record, intent=None, asked={}))
    found = find_clusters(aws, ctx.spec.name, record.owner if record else aws.identity().user_id)
    for cluster in found:
        if cluster.id == shared.cluster_id and not cluster.live:
            for left in teardown(aws, cluster, on_event=ctx.say).leftovers:
                ctx.say(f"left in {aws.region}: {left}")


def _nowhere(failures: list[AwsddpError]) -> AwsddpError:
    if len(failures) == 1:
        return failures[0]
    return CapacityError(
        "AWS has none of the machines that were listed, in any place that was allowed",
        "; ".join(f"{failure.message}: {failure.why}" for failure in failures),
        "try again later, with --retry-until-up, or list other capacity.types, regions or markets",
    )


def _record(ctx: Context, plan: LaunchPlan, shared: _Launch, *, account: str) -> Record:
    before = shared.before
    return Record(
        id=shared.cluster_id,
        owner=plan.owner,
        account=account,
        target=replace(shared.target, region=plan.region),
        created=shared.now,
        expires=shared.now + timedelta(seconds=plan.expires_s),
        instance_type=plan.instance_type,
        nodes=plan.nodes,
        gpus_per_node=plan.gpus_per_node,
        pretended=plan.pretended,
        ssh_user=plan.ssh_user,
        price_usd_per_hour=plan.price_usd_per_hour,
        disk_usd_per_hour=round(plan.price.disks / plan.nodes, 6),
        asked=remembered(ctx.spec),
        prepared=before.prepared if before else (),
        jobs=before.jobs if before else (),
    )


def _login_key(ctx: Context) -> str:
    """Return the public half of the cluster's login key; the private half is 0600 from birth.

    With `access.key` the user's own private key is pointed to, never copied.
    """
    from awsddp.nodes.hostkeys import make_key

    if ctx.spec.access.key is not None:
        _point_to(ctx.folder.key, own_key_file(ctx.spec))
        return ""
    public = ctx.folder.path / "key.pub"
    if not (ctx.folder.key.exists() and public.exists()):
        made = make_key(f"awsddp {ctx.spec.name}")
        write_private(ctx.folder.key, made.private.encode())
        write_private(public, made.public.encode() + b"\n")
    return public.read_text(encoding="utf-8").strip()


def _point_to(link: Path, own: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    link.unlink(missing_ok=True)
    link.symlink_to(own)
