"""up: plan, confirm, launch. An existing cluster is finished, repaired or resized, or stays unchanged."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from awsddp.errors import ConfigError
from awsddp.jobs.health import replacement
from awsddp.nodes import rsync
from awsddp.nodes.failures import NodesFailed
from awsddp.parallel import both, import_soon
from awsddp.plan import refuse_untried
from awsddp.plan.environment import make_environment_plan
from awsddp.plan.records import Facts, LaunchPlan
from awsddp.records import ACTIVE, Node, Prepared, Target
from awsddp.report import node_name
from awsddp.spec import idle_seconds, overlaid
from awsddp.state import Record
from awsddp.verbs.advice import advised
from awsddp.verbs.cluster import REACH_S, ClusterHandle
from awsddp.verbs.context import Context, aws_of, check_account, facts_of, owner_of, reach_jump, target_for
from awsddp.verbs.converging import Confirm, own_or_empty, reconcile, say_differences
from awsddp.verbs.environment import environment_of
from awsddp.verbs.launching import launch, plan_everywhere
from awsddp.verbs.status import cluster_document


def up(ctx: Context, *, confirm: Confirm) -> dict[str, Any]:
    """Launch the cluster, or change an existing one to match the spec, and return the `up` document.

    `confirm` is called with the plan before a launch, with a sentence before instances are only started or
    terminated, and raises to refuse. Raises ConfigError, CloudError, CapacityError, NodeError or
    LeftoverError; run again, `up` continues where it stopped.
    """
    with ctx.folder.lock("up"), target_for(ctx) as target:
        facts, cluster = read(ctx, target)
        hosts = facts.image.has_hosts

        def ask(what: LaunchPlan | str) -> None:
            if isinstance(what, LaunchPlan):
                refuse_untried(what)
            if hosts:
                rsync.program()  # before anything costs money
                reach_jump(cluster.ctx)
            confirm(what)

        cluster.nodes = _nodes(cluster, facts, ask)
        _prepare(cluster, hosts=hosts)
        if hosts:
            environment_of(cluster)
            _name_left_out(cluster)
        _end_others(cluster)
        if hosts:
            cluster.publish()
        return cluster_document(cluster)


def as_before(ctx: Context) -> Context:
    """Return the context with the settings of the cluster, for all that no option and no variable sets."""
    record = ctx.folder.read()
    if record is None:
        return ctx
    job = overlaid(ctx.job, record.asked)
    return replace(ctx, spec=overlaid(ctx.spec, record.settings), job=job)


def read(requested: Context, target: Target) -> tuple[Facts, ClusterHandle]:
    """Read the plan's facts and find the cluster, in parallel; the handle has the settings of the cluster.

    What awsddp.toml says and they do not is reported. Raises CloudError, ConfigError, also for an invalid
    environment.
    """
    ctx = as_before(requested)
    say_differences(requested, ctx.spec)
    aws, record = aws_of(ctx, target), ctx.folder.read()

    cluster = ClusterHandle(ctx=ctx, target=replace(target, region=aws.region), gateway=aws, known=record)

    def look() -> None:
        owner = owner_of(aws, record)
        if record is not None:
            check_account(ctx, aws, record)
        import_soon("awsddp.nodes.hostkeys")  # not before: the first call to AWS would wait for it
        cluster.look(owner=owner)

    facts, _ = both(lambda: facts_of(aws, ctx.spec, target, record), look)
    make_environment_plan(ctx.job.env, internet=facts.image.has_internet, driver=None)
    return facts, cluster


def to_reconcile(cluster: ClusterHandle) -> bool:
    """Return whether there is a cluster to reconcile; else one is launched.

    Raises ConfigError for a running cluster whose key is not on this machine.
    """
    ctx, record = cluster.ctx, cluster.known
    live = [one for one in cluster.all_listed if one.live]
    if record is not None and (ctx.folder.key.exists() or not record.prepared):
        there = any(one.id == record.id for one in live)
        if there or (record.prepared and not live):
            return True
    if not live:
        return False
    raise ConfigError(
        f"cluster {live[0].name} exists, but this machine does not have its key",
        f"it was made elsewhere, or {ctx.folder.path} was lost",
        "awsddp down   # end it; then awsddp up\nawsddp -c other-name up   # or leave it alone",
    )


def _nodes(cluster: ClusterHandle, facts: Facts, confirm: Confirm) -> tuple[Node, ...]:
    """Return the cluster's nodes: those that stay, those of an interrupted launch, and new ones."""
    _finish_launch(cluster)
    if to_reconcile(cluster):
        return reconcile(cluster, facts, confirm)
    plan = plan_everywhere(cluster, facts)
    confirm(plan)
    for left in cluster.all_listed:
        if cluster.known is None or left.id != cluster.known.id:
            cluster.end(left)
    return launch(cluster, plan)


def _finish_launch(cluster: ClusterHandle) -> None:
    """Finish an interrupted launch, or wait until AWS lists the instances that this machine knows.

    The temporary host key of such a launch is accepted here: the next launch has its own.
    """
    from awsddp.aws.instances import filled_by, resume, wait_running

    ctx, record = cluster.ctx, cluster.known
    if record is None:
        return
    if record.intent is None:
        cluster.wait_until_listed()
        return
    own = own_or_empty(cluster)
    filled = filled_by(record.intent)
    nodes = tuple(node for node in own.live if node.node in filled)
    if not filled or {node.node for node in nodes} != filled:
        resumed = resume(cluster.aws, record.intent, on_event=ctx.on_event)
        if not resumed:
            cluster.remember(intent=None)
            return
        keys = [node.instance_id for node in resumed]
        nodes = wait_running(cluster.aws, record.id, len(keys), awaited=resumed, on_event=ctx.on_event)
        listed = (node for node in own.nodes if node.instance_id not in keys)
        own = replace(own, nodes=tuple(sorted((*nodes, *listed), key=lambda node: node.node)))
    accept_host_keys(ctx, record, nodes)
    cluster.others = tuple(one for one in cluster.all_listed if one.id != record.id)
    cluster.listed = own


def _prepare(cluster: ClusterHandle, *, hosts: bool = True) -> None:
    """Wait until all nodes run, prepare those that are not prepared, and set the expiry on all.

    The tag is written last: a node with the right tag has the expiry. Without `hosts` (the image says that
    nothing boots: a local cloud of records) there is nothing to prepare.
    """
    from awsddp.aws.instances import refuse_off, wait_running
    from awsddp.aws.power import poweroff, tag_expiry
    from awsddp.aws.waits import deadline_s

    ctx, aws, record = cluster.ctx, cluster.aws, cluster.record
    term_s = deadline_s([record.instance_type])
    if hosts:
        import_soon("awsddp.nodes.provision")
    nodes = cluster.nodes = wait_running(
        aws, record.id, len(cluster.nodes), awaited=cluster.nodes, deadline_s=term_s, on_event=ctx.on_event
    )
    late = [node for node in nodes if node.expires != record.expires]
    cluster.listed = replace(own_or_empty(cluster), nodes=nodes)
    known = {one.instance_id for one in record.prepared} == {node.instance_id for node in nodes}
    if known and not late and record.idle == ctx.spec.cluster.idle:
        cluster.publish()
        if hosts:
            _log_in(cluster)
        return
    accept_host_keys(ctx, record, nodes)
    if hosts:
        from awsddp.nodes import provision

        with cluster.connect(deadline_s=term_s, meanwhile=lambda: refuse_off(aws, nodes)) as fleet:
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
        prepared = tuple(
            Prepared(node=node.node, instance_id=node.instance_id, home="", python="", nic="")
            for node in nodes
        )
    if late:
        free = [node.instance_id for node in late if not node.unfetched and not node.spot]
        poweroff(aws, free, "terminate")
        tag_expiry(aws, late, record.expires)
    cluster.remember(
        prepared=prepared,
        addresses={node.instance_id: node.address for node in nodes if node.address},
        intent=None,
        idle=ctx.spec.cluster.idle,
    )


def _log_in(cluster: ClusterHandle) -> None:
    """Log in to each node, which was ready before. Raises NodesFailed with the commands that repair one."""
    try:
        with cluster.connect(deadline_s=REACH_S):
            pass
    except NodesFailed as error:
        layers = {getattr(one, "layer", "") for one in error.failures.values()}
        if layers <= {"refused", "banner"}:  # the machines are there, what answers on them is not
            silent = [node for node in cluster.nodes if node.node in error.failures]
            ways = [*map(replacement, silent)]
            if not any(node.spot for node in silent):
                boots = "boots the nodes anew: a job on them ends, their disks stay"
                ways.insert(0, f"awsddp stop && awsddp up   # {boots}")
            error.next = "\n".join(ways)
        raise


def _name_left_out(cluster: ClusterHandle) -> None:
    """Name the jobs that run or wait without a node that was replaced, and what starts them on all nodes.

    One that has begun continues from its checkpoint. Raises NodesFailed, NodeError.
    """
    ctx, living = cluster.ctx, {node.instance_id for node in cluster.nodes}
    left = {
        job.job: job
        for job in cluster.record.jobs
        if job.state in ACTIVE and not living.issuperset(one.instance_id for one in job.nodes)
    }
    if not left:
        return
    with cluster.connect(deadline_s=REACH_S):
        known = {job.job: job for job in cluster.jobs() if job.job in left}
    ctx.folder.remember(*known.values())
    for name, job in (left | known).items():
        lost = ", ".join(node_name(one.node) for one in job.nodes if one.instance_id not in living)
        ends = [f"awsddp cancel {name}"] if name in known and job.state in ACTIVE else []
        if ends and job.state == "running":
            ways = " && ".join([*ends, f"awsddp fetch {name}; awsddp train --resume {name}"])
            ctx.say(
                f"job {name} runs without {lost}, which was replaced; with it: {advised(ctx, ways, job=job)}"
            )
        elif job.state == "waiting" or (job.state in ("failed", "interrupted") and job.started is None):
            ways = " && ".join([*ends, "awsddp train" if name in known else "awsddp train --after all"])
            ctx.say(f"job {name} waited for {lost}, which was replaced: {advised(ctx, ways, job=job)}")


def accept_host_keys(ctx: Context, record: Record, nodes: Sequence[Node]) -> None:
    """Accept the temporary host key of the last launch from its nodes, which have no other yet."""
    from awsddp.nodes import hostkeys

    if record.intent is not None:
        known = hostkeys.read(ctx.folder.known_hosts)
        new = [node.instance_id for node in nodes if node.instance_id not in known]
        hostkeys.accept(ctx.folder.known_hosts, dict.fromkeys(new, record.intent["host_key"]))


def _end_others(cluster: ClusterHandle) -> None:
    """Look again, and end other clusters of this name.

    Two machines may have launched at once, neither seeing the other's. Both keep the same one, the first,
    and end the other. Raises ConfigError where this machine's was ended.
    """
    ctx, record = cluster.ctx, cluster.record
    cluster.look()
    own = cluster.listed = cluster.own
    live = [one for one in cluster.all_listed if one.live]
    if own is None or not own.live or len(live) == 1:
        return
    first, *others = sorted(live, key=lambda one: (one.created or record.created, one.id))
    for other in others:
        nodes = ", ".join(node.instance_id for node in other.live)
        ctx.say(f"a second cluster {other.name} ({other.id}) was made at the same time: ending {nodes}")
        cluster.end(other)
    if first.id == record.id:
        return
    ctx.folder.retire(record.id)
    raise ConfigError(
        f"another machine made cluster {own.name} a moment before",
        f"its nodes stay: {', '.join(node.instance_id for node in first.live)}; those made here were ended",
        f"continue there; or awsddp -c {own.name}-2 up   # another name here",
    )
