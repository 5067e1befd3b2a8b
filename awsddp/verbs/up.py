"""up: plan, ask, do. On a cluster that exists it finishes what was interrupted, mends, resizes, or changes
nothing."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from awsddp.cluster import Cluster, Node, Prepared, Target
from awsddp.errors import ConfigError
from awsddp.nodes import rsync
from awsddp.plan import Facts, LaunchPlan, refuse_untried
from awsddp.spec import idle_seconds, overlaid, overlaid_environment
from awsddp.state import Record
from awsddp.verbs.context import Context, aws_of, check_account, facts_of, owner_of, target_for
from awsddp.verbs.converging import Confirm, carry_out_changes, nowhere
from awsddp.verbs.environment import check_environment, environment_of
from awsddp.verbs.launching import carry_out, plan_everywhere
from awsddp.verbs.nodes import connect, import_beside, reach_jump, write_ssh_config
from awsddp.verbs.settling import settled
from awsddp.verbs.status import cluster_document

if TYPE_CHECKING:
    from awsddp.aws.session import Aws


def up(ctx: Context, *, confirm: Confirm) -> dict[str, Any]:
    """Bring the cluster up, or what exists of it to what is asked for, and return the `up` document.

    `confirm` is called with the plan before anything is launched, with a sentence before machines are only
    started or ended, and raises to refuse. Raises ConfigError, CloudError, CapacityError, NodeError or
    LeftoverError; run again, `up` goes on where it stopped.
    """
    with ctx.folder.lock("up"), target_for(ctx) as target:
        ctx = as_before(ctx)
        check_environment(ctx)
        aws = aws_of(ctx, target)
        facts, clusters = read(ctx, aws, target)
        hosts = facts.image.tags.get("awsddp:hosts") != "none"

        def ask(what: LaunchPlan | str) -> None:
            if isinstance(what, LaunchPlan):
                refuse_untried(what)
            if hosts:
                rsync.program()  # before anything costs money
                reach_jump(ctx)
            confirm(what)

        record, nodes = _nodes(ctx, aws, facts, clusters, replace(target, region=aws.region), ask)
        if record.target.region not in (None, aws.region):
            aws = aws_of(ctx, record.target)  # another region, that the spec lists
        record = _prepare(ctx, aws, record, nodes, hosts=hosts)
        cluster = _only(ctx, aws, record)
        if hosts and cluster is not None:
            record = environment_of(ctx, record, cluster.live)
        return cluster_document(ctx, record, cluster)


def as_before(ctx: Context) -> Context:
    """Return the context with what was asked for before wherever nobody says anything else now."""
    record = ctx.folder.read()
    if record is None:
        return ctx
    job = overlaid_environment(ctx.job, record.asked)
    return replace(ctx, spec=overlaid(ctx.spec, record.asked), job=job)


def read(ctx: Context, aws: "Aws", target: Target) -> tuple[Facts, tuple[Cluster, ...]]:
    """Read what the plan needs and what exists by this name, side by side. Raises CloudError, ConfigError."""
    from awsddp.aws.clusters import find_clusters

    def look() -> tuple[Cluster, ...]:
        record = ctx.folder.read()
        owner = owner_of(aws, record)
        if record is not None:
            check_account(ctx, aws, record)
        import_beside("awsddp.nodes.hostkeys")  # not before: the first call to AWS would wait for it
        return find_clusters(aws, ctx.spec.name, owner)

    with ThreadPoolExecutor(max_workers=1) as pool:
        existing = pool.submit(look)
        facts = facts_of(aws, ctx.spec, target)
        return facts, existing.result()


def known(ctx: Context, clusters: Sequence[Cluster]) -> Record | None:
    """Return the record of the cluster where there is one to converge; None: there is one to launch.

    Raises ConfigError for a cluster that lives and whose key is not on this machine, as for one that another
    machine made once all that this one had made was gone.
    """
    record = ctx.folder.read()
    live = [one for one in clusters if one.live]
    ours = record is not None and (ctx.folder.key.exists() or not record.prepared)
    if record is not None and ours:
        there = any(one.id == record.id for one in live)
        if there or (record.prepared and not live):
            return record
    if not live:
        return None
    raise ConfigError(
        f"cluster {live[0].name} exists, but its key is not on this machine",
        f"it was made elsewhere, or {ctx.folder.path} was lost",
        "awsddp down   # end it; then awsddp up\nawsddp -c other-name up   # or leave it alone",
    )


def _nodes(
    ctx: Context,
    aws: "Aws",
    facts: Facts,
    clusters: tuple[Cluster, ...],
    target: Target,
    confirm: Confirm,
) -> tuple[Record, tuple[Node, ...]]:
    """Return the cluster's nodes: those that stay, those of a launch that was cut off, and new ones."""
    from awsddp.aws.teardown import teardown

    clusters = _finished(ctx, aws, clusters)
    record = known(ctx, clusters)
    if record is not None:
        return carry_out_changes(ctx, aws, record, clusters, facts, target, confirm)
    plan = plan_everywhere(ctx, aws, target, facts)
    confirm(plan)
    record = ctx.folder.read()
    for left in clusters:
        if record is None or left.id != record.id:
            teardown(aws, left, on_event=ctx.say)
    return carry_out(ctx, aws, plan, target, record)


def _finished(ctx: Context, aws: "Aws", clusters: tuple[Cluster, ...]) -> tuple[Cluster, ...]:
    """Return what exists once a launch that was cut off is finished, or AWS lists what is known to be there.

    The host key of such a launch is accepted here: the next brings its own.
    """
    from awsddp.aws.instances import filled_by, resume, wait_running

    record = ctx.folder.read()
    if record is None:
        return clusters
    mine = next((one for one in clusters if one.id == record.id), None)
    others = tuple(one for one in clusters if one.id != record.id)
    if record.intent is None:
        mine = settled(aws, ctx.spec.name, record, mine)
        return (mine, *others) if mine is not None else others
    mine = mine or nowhere(ctx, record)
    filled = filled_by(record.intent)
    nodes = tuple(node for node in mine.live if node.node in filled)
    if not filled or {node.node for node in nodes} != filled:
        came = resume(aws, record.intent, on_event=ctx.say)
        if not came:
            ctx.folder.write(replace(record, intent=None))
            return clusters
        keys = [node.instance_id for node in came]
        nodes = wait_running(aws, record.id, len(came), instance_ids=keys, on_event=ctx.say_of_node)
        listed = (node for node in mine.nodes if node.instance_id not in keys)
        mine = replace(mine, nodes=tuple(sorted((*nodes, *listed), key=lambda node: node.node)))
    accept_host_keys(ctx, record, nodes)
    return (mine, *others)


def _prepare(
    ctx: Context, aws: "Aws", record: Record, nodes: tuple[Node, ...], *, hosts: bool = True
) -> Record:
    """Wait until all nodes run, make those ready that are not yet, and tell all the expiry that holds.

    The tag is written last: where it is right the nodes know. Without `hosts` (the image says that nothing
    boots: a local cloud of records) there is nothing to make.
    """
    from awsddp.aws.instances import wait_running
    from awsddp.aws.power import tag_expiry
    from awsddp.aws.poweroff import poweroff
    from awsddp.aws.waits import deadline_s

    term_s = deadline_s([record.instance_type])
    if hosts:
        import_beside("awsddp.nodes.provision")
    nodes = wait_running(
        aws,
        record.id,
        len(nodes),
        instance_ids=[node.instance_id for node in nodes],
        deadline_s=term_s,
        on_event=ctx.say_of_node,
    )
    late = [node for node in nodes if node.expires != record.expires]
    known = {found.instance_id for found in record.prepared} == {node.instance_id for node in nodes}
    if known and not late and record.idle == ctx.spec.cluster.idle:
        write_ssh_config(ctx, record, nodes)
        return record
    accept_host_keys(ctx, record, nodes)
    if hosts:
        from awsddp.nodes import provision

        with connect(ctx, record, nodes, deadline_s=term_s) as fleet:
            prepared = provision.prepare(
                fleet,
                nodes,
                known_hosts=ctx.folder.known_hosts,
                expires_at=record.expires,
                idle_s=idle_seconds(ctx.spec.cluster.idle),
                gpus=0 if record.pretended else record.gpus_per_node,
                on_event=ctx.on_event,
            )
    else:
        prepared = tuple(_unseen(record, node) for node in nodes)
    if late:
        poweroff(aws, [node for node in late if not node.unfetched and not node.spot], "terminate")
        tag_expiry(aws, late, record.expires)
    record = replace(record, prepared=prepared, intent=None, idle=ctx.spec.cluster.idle)
    ctx.folder.write(record)
    ctx.folder.note("ready", id=record.id)
    return record


def _unseen(record: Record, node: Node) -> Prepared:
    """Return what is known of a node that nobody can log in to."""
    return Prepared(
        node=node.node, instance_id=node.instance_id, user=record.ssh_user, home="", python="", nic=""
    )


def accept_host_keys(ctx: Context, record: Record, nodes: Sequence[Node]) -> None:
    """Accept the throw-away host key of the last launch from its nodes, which have no other yet."""
    from awsddp.nodes import hostkeys

    if record.intent is not None:
        known = hostkeys.read(ctx.folder.known_hosts)
        new = [node.instance_id for node in nodes if node.instance_id not in known]
        hostkeys.accept(ctx.folder.known_hosts, dict.fromkeys(new, record.intent["host_key"]))


def _only(ctx: Context, aws: "Aws", record: Record) -> Cluster | None:
    """Return the cluster, once it is the only one of its name.

    Two machines may have launched at once, neither seeing the other's. Both keep the same one, the first,
    and end the other. Raises ConfigError where this machine's was ended.
    """
    from awsddp.aws.clusters import find_clusters
    from awsddp.aws.teardown import teardown

    found = [one for one in find_clusters(aws, ctx.spec.name, record.owner) if one.live]
    mine = next((one for one in found if one.id == record.id), None)
    if mine is None or len(found) == 1:
        return mine
    first, *others = sorted(found, key=lambda one: (one.created or record.created, one.id))
    for other in others:
        nodes = ", ".join(node.instance_id for node in other.live)
        ctx.say(f"a second cluster {other.name} ({other.id}) was made at the same time: ending {nodes}")
        teardown(aws, other, on_event=ctx.say)
    if first.id == record.id:
        return mine
    ctx.folder.retire(record.id)
    raise ConfigError(
        f"another machine made cluster {mine.name} a moment before",
        f"its nodes stay: {', '.join(node.instance_id for node in first.live)}; those made here were ended",
        f"go on there; or awsddp -c {mine.name}-2 up   # another name here",
    )
