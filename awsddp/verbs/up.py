"""up: plan, ask, do. On a cluster that exists it finishes what was interrupted, or changes nothing."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from awsddp.cluster import Cluster, Node, Prepared, Target
from awsddp.errors import ConfigError
from awsddp.plan import Facts, LaunchPlan, refuse_untried
from awsddp.report import money, node_name
from awsddp.spec import seconds
from awsddp.state import Record
from awsddp.verbs.context import Context, aws_of, target_for
from awsddp.verbs.launching import carry_out, plan_everywhere
from awsddp.verbs.nodes import connect, import_beside
from awsddp.verbs.status import cluster_document

if TYPE_CHECKING:
    from awsddp.aws.session import Aws

Confirm = Callable[[LaunchPlan | str], None]


def up(ctx: Context, *, confirm: Confirm) -> dict[str, Any]:
    """Bring the cluster up and return it as design.md's `up` document.

    `confirm` is called with the plan before anything is made, with a sentence before stopped nodes are
    started, and raises to refuse. Raises ConfigError, CloudError, CapacityError or NodeError; run again, `up`
    goes on where it stopped.
    """
    from awsddp.aws.clusters import find_cluster

    with ctx.folder.lock("up"), target_for(ctx) as target:
        aws = aws_of(ctx, target)
        facts, cluster = _read(ctx, aws, target)
        record, nodes = _nodes(ctx, aws, facts, cluster, replace(target, region=aws.region), confirm)
        if record.target.region not in (None, aws.region):
            aws = aws_of(ctx, record.target)  # another region, that the spec lists
        record = _prepare(ctx, aws, record, nodes, hosts=facts.image.tags.get("awsddp:hosts") != "none")
        return cluster_document(ctx, record, find_cluster(aws, ctx.spec.name, record.owner))


def _read(ctx: Context, aws: "Aws", target: Target) -> tuple[Facts, Cluster | None]:
    """Read what the plan needs and what exists, side by side."""
    from awsddp.aws.clusters import find_cluster
    from awsddp.aws.facts import gather

    with ThreadPoolExecutor(max_workers=1) as pool:
        existing = pool.submit(lambda: find_cluster(aws, ctx.spec.name, aws.identity().user_id))
        facts = gather(aws, ctx.spec, caller_address=target.caller_address, target=target.name)
        return facts, existing.result()


def _nodes(
    ctx: Context,
    aws: "Aws",
    facts: Facts,
    cluster: Cluster | None,
    target: Target,
    confirm: Confirm,
) -> tuple[Record, tuple[Node, ...]]:
    """Return the cluster's nodes: those that live (stopped ones are started), those of a launch that was cut
    off, or new ones."""
    from awsddp.aws.instances import resume
    from awsddp.aws.teardown import teardown

    record = ctx.folder.read()
    if cluster is not None and cluster.live:
        return _started(ctx, aws, _same(ctx, record, cluster), cluster, confirm)
    if record is not None and record.intent is not None:
        resumed = resume(aws, record.intent, on_event=ctx.say)
        if resumed:
            return record, resumed
    plan = plan_everywhere(ctx, target, facts)
    refuse_untried(plan)
    confirm(plan)
    if cluster is not None and (record is None or record.id != cluster.id):
        teardown(aws, cluster, on_event=ctx.say)
        record = None
    return carry_out(ctx, aws, plan, target, record)


def _same(ctx: Context, record: Record | None, cluster: Cluster) -> Record:
    """Return the record of a cluster that lives. Raises ConfigError where it is not this machine's."""
    if record is None or record.id != cluster.id or not ctx.folder.key.exists():
        raise ConfigError(
            f"cluster {cluster.name} exists, but its key is not on this machine",
            f"it was made elsewhere, or {ctx.folder.path} was lost",
            "awsddp down   # end it; then awsddp up\nawsddp -c other-name up   # or leave it alone",
        )
    if len(cluster.live) != ctx.spec.cluster.nodes:
        raise ConfigError(
            f"cluster {cluster.name} has {len(cluster.live)} nodes, not {ctx.spec.cluster.nodes}",
            "its size is fixed once it is launched",
            f"awsddp up --nodes {len(cluster.live)}   # keep it\nawsddp down   # or end it and start anew",
        )
    return record


def _started(
    ctx: Context, aws: "Aws", record: Record, cluster: Cluster, confirm: Confirm
) -> tuple[Record, tuple[Node, ...]]:
    """Start what is stopped. The new expiry is written down first; `_prepare` then tells it to the nodes."""
    from awsddp.aws.power import start

    off = [node for node in cluster.live if node.state in ("stopped", "stopping")]
    if off:
        hourly = money(record.price_usd_per_hour)
        confirm(
            f"Cluster {cluster.name}: {len(off)} x {off[0].instance_type} in {cluster.region} will be "
            f"started, at {hourly} an hour for all."
        )
        now = datetime.now(UTC).replace(microsecond=0)
        expires = now + timedelta(seconds=seconds(ctx.spec.cluster.expires))
        record = replace(record, expires=expires, prepared=())
        ctx.folder.write(record)
        ctx.say(f"starting {', '.join(node_name(node.node) for node in off)}")
        start(aws, off)
        ctx.folder.note("started", id=record.id, instances=[node.instance_id for node in off])
    return record, cluster.live


def _prepare(
    ctx: Context, aws: "Aws", record: Record, nodes: tuple[Node, ...], *, hosts: bool = True
) -> Record:
    """Wait until all nodes run, then make those ready that are not yet.

    Without `hosts` (the image says that nothing boots: a local cloud of records) there is nothing to make.
    """
    from awsddp.aws.instances import wait_running
    from awsddp.aws.waits import deadline_s
    from awsddp.nodes import hostkeys

    if hosts:
        import_beside("awsddp.nodes.provision")
    nodes = wait_running(
        aws,
        record.id,
        len(nodes),
        instance_ids=[node.instance_id for node in nodes],
        deadline_s=deadline_s([record.instance_type]),
        on_event=ctx.say_of_node,
    )
    if {found.instance_id for found in record.prepared} == {node.instance_id for node in nodes}:
        return record
    if record.intent is not None:
        known = hostkeys.read(ctx.folder.known_hosts)
        fresh = {
            node.instance_id: record.intent["host_key"] for node in nodes if node.instance_id not in known
        }
        hostkeys.accept(ctx.folder.known_hosts, fresh)
    if hosts:
        from awsddp.nodes import provision

        with connect(ctx, record, nodes, deadline_s=deadline_s([record.instance_type])) as fleet:
            prepared = provision.prepare(
                fleet,
                nodes,
                known_hosts=ctx.folder.known_hosts,
                expires_at=record.expires,
                on_event=ctx.on_event,
            )
    else:
        prepared = tuple(_unseen(record, node) for node in nodes)
    _confirm_expiry(ctx, aws, record, nodes)
    record = replace(record, prepared=prepared, intent=None)
    ctx.folder.write(record)
    ctx.folder.note("ready", id=record.id)
    return record


def _unseen(record: Record, node: Node) -> Prepared:
    """Return what is known of a node that nobody can log in to."""
    return Prepared(
        node=node.node, instance_id=node.instance_id, user=record.ssh_user, home="", python="", nic=""
    )


def _confirm_expiry(ctx: Context, aws: "Aws", record: Record, nodes: tuple[Node, ...]) -> None:
    """After a start: tag the nodes with the expiry they were told, and let a poweroff end them again, unless
    they owe results."""
    from awsddp.aws.clusters import find_cluster
    from awsddp.aws.power import poweroff, tag_expiry

    if record.intent is not None:  # of a launch: tagged and set by the request itself
        return
    seen = find_cluster(aws, ctx.spec.name, record.owner)
    if seen is not None and seen.expires != record.expires:
        tag_expiry(aws, nodes, record.expires)
        poweroff(aws, [node for node in nodes if not node.unfetched and not node.spot], "terminate")
