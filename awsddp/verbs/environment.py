"""The environment of the ranks on all nodes: as [env] says now, else as it said for `up`."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from awsddp.plan.environment import make_environment_plan, refuse_unlike
from awsddp.spec import JobSpec, overlaid, remembered
from awsddp.state import Record
from awsddp.verbs import sync
from awsddp.verbs.cluster import ClusterHandle


def environment_of(cluster: ClusterHandle) -> None:
    """Build the environment of [env] on the nodes, and remember it for later jobs.

    Raises ConfigError, NodeError also where the nodes differ in torch, CUDA, driver or GPUs.
    """
    ctx, record = cluster.ctx, cluster.record
    refuse_unlike(
        {
            one.node: {"torch": one.torch, "CUDA": one.cuda, "driver": one.driver, "GPUs": one.gpus}
            for one in record.prepared
        }
    )
    requested = remembered(ctx.job)
    if requested:
        cluster.remember(asked=record.asked | requested)
        with cluster.connect() as fleet:
            ensure_environment(cluster, send_files=lambda: sync.send(ctx, fleet, sync.listed(ctx)))


def ensure_environment(cluster: ClusterHandle, *, send_files: Callable[[], object]) -> JobSpec:
    """Build the environment on the connected nodes, remember it, and return the job with its variables.

    Without packages and setup commands the nodes get no request. Raises ConfigError, NodeError.
    """
    ctx, record = cluster.ctx, cluster.record
    job = overlaid(ctx.job, record.asked)
    drivers = {one.driver for one in record.prepared}
    plan = make_environment_plan(
        job.env, internet=record.internet, driver=drivers.pop() if len(drivers) == 1 else None
    )
    made: Mapping[int, str | None] = {}
    if plan.has_packages or plan.setup:
        from awsddp.nodes import environments

        found = environments.ensure(
            cluster.fleet,
            plan,
            pythons={one.node: one.python for one in record.prepared},
            cache=ctx.home / "packages",
            ssh_config=ctx.folder.ssh_config,
            send_files=send_files,
            on_event=ctx.on_event,
        )
        made = {node: one.python for node, one in found.items()} if plan.has_packages else {}
    built = {one.instance_id: made.get(one.node) for one in record.prepared}
    if any(one.environment != built[one.instance_id] for one in record.prepared):

        def with_environments(now: Record) -> Record:  # another command may have added nodes
            prepared = (
                replace(one, environment=built.get(one.instance_id, one.environment)) for one in now.prepared
            )
            return replace(now, prepared=tuple(prepared))

        cluster.change(with_environments)
    # The ranks reach the internet as their packages did; of an environment.yml's variables the user's win.
    variables = {**plan.environ, **plan.variables}
    if plan.ca:
        bundle = f"{record.prepared[0].home}/awsddp/env/ca.pem"
        variables |= dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), bundle)
    return replace(job, env=replace(job.env, variables=variables | job.env.variables))
