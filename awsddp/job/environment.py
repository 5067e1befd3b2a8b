"""Build a job's environment on its nodes."""

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
    """Build the environment on the connected nodes.

    Returns the cluster with the environment in its record, and the job with the environment's variables.
    If there are no packages and no setup commands, no request is sent to the nodes. Raises ConfigError or
    NodeError.
    """
    record = connected.cluster.record
    job = connected.cluster.job_spec
    drivers = {node.driver for node in record.prepared}
    plan = make_environment_plan(
        job.env,
        internet=record.internet,
        driver=drivers.pop() if len(drivers) == 1 else None,
        workdir=Path(job.sync.workdir),
    )
    pythons: Mapping[int, str | None] = {}
    if job.env.file and _shows_password(Path(job.env.file).expanduser(), Path(job.sync.workdir)):
        why = f"{job.env.file} contains a password, and is sent to the nodes with the project folder"
        connected.session.say(f"{why}: replace the password with ${{NAME}}, a variable of this machine")
    if plan.has_packages or plan.setup:
        from awsddp.nodes import environments

        responses = environments.ensure_environments(
            connected.fleet,
            plan,
            pythons={node.node: node.python for node in record.prepared},
            cache=connected.session.home / "packages",
            send_files=send_files,
        )
        pythons = (
            {node: environment.python for node, environment in responses.items()} if plan.has_packages else {}
        )
    pythons_by_instance = {node.instance_id: pythons.get(node.node) for node in record.prepared}
    if any(node.environment != pythons_by_instance[node.instance_id] for node in record.prepared):

        def with_environments(record: Record) -> Record:  # another command may have added nodes
            prepared = (
                replace(node, environment=pythons_by_instance.get(node.instance_id, node.environment))
                for node in record.prepared
            )
            return replace(record, prepared=tuple(prepared))

        connected = replace(connected, cluster=connected.cluster.change_record(with_environments))
    # The ranks use the packages' proxies and certificates. The user's variables override environment.yml's.
    variables = {**plan.environ, **plan.variables}
    if plan.indexes.ca:
        bundle = f"{record.prepared[0].home}/awsddp/env/ca.pem"
        variables |= dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), bundle)
    return connected, replace(job, env=replace(job.env, variables=variables | job.env.variables))


def _shows_password(file: Path, workdir: Path) -> bool:
    """Return True if a requirements file contains a URL with a login and lies in the project folder."""
    is_inside = file.resolve().is_relative_to(workdir.resolve())
    return is_inside and LOGIN.search(file.read_text(encoding="utf-8", errors="replace")) is not None
