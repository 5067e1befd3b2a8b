"""Building the environment of a job on its nodes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from awsddp.plan.environment import make_environment_plan
from awsddp.plan.indexes import LOGIN
from awsddp.session.context import ConnectedCluster
from awsddp.settings.spec import JobSpec
from awsddp.state import Record


def ensure_environment(
    connected: ConnectedCluster, *, send_files: Callable[[], object]
) -> "tuple[ConnectedCluster, JobSpec]":
    """Build the environment on the connected nodes, and return the cluster that remembers it, and the job
    with its variables.

    Without packages and setup commands the nodes get no request. Raises ConfigError, NodeError.
    """
    record = connected.cluster.record
    job = connected.cluster.job_spec
    drivers = {one.driver for one in record.prepared}
    plan = make_environment_plan(
        job.env,
        internet=record.internet,
        driver=drivers.pop() if len(drivers) == 1 else None,
        workdir=Path(job.sync.workdir),
    )
    made: Mapping[int, str | None] = {}
    if job.env.file and _shows_password(Path(job.env.file).expanduser(), Path(job.sync.workdir)):
        why = f"{job.env.file} holds a password, and goes to the nodes with the folder"
        connected.session.say(f"{why}: write ${{NAME}} there, which stands for a variable of this machine")
    if plan.has_packages or plan.setup:
        from awsddp.nodes import environments

        found = environments.ensure(
            connected.fleet,
            plan,
            pythons={one.node: one.python for one in record.prepared},
            cache=connected.session.home / "packages",
            send_files=send_files,
        )
        made = {node: one.python for node, one in found.items()} if plan.has_packages else {}
    built = {one.instance_id: made.get(one.node) for one in record.prepared}
    if any(one.environment != built[one.instance_id] for one in record.prepared):

        def with_environments(now: Record) -> Record:  # another command may have added nodes
            prepared = (
                replace(one, environment=built.get(one.instance_id, one.environment)) for one in now.prepared
            )
            return replace(now, prepared=tuple(prepared))

        connected = replace(connected, cluster=connected.cluster.change_record(with_environments))
    # The ranks reach the internet as their packages did; of an environment.yml's variables the user's win.
    variables = {**plan.environ, **plan.variables}
    if plan.indexes.ca:
        bundle = f"{record.prepared[0].home}/awsddp/env/ca.pem"
        variables |= dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), bundle)
    return connected, replace(job, env=replace(job.env, variables=variables | job.env.variables))


def _shows_password(file: Path, workdir: Path) -> bool:
    """Tell whether a file of requirements has a URL with a login, and lies in the synced folder."""
    is_inside = file.resolve().is_relative_to(workdir.resolve())
    return is_inside and LOGIN.search(file.read_text(encoding="utf-8", errors="replace")) is not None
