"""What verbs do in AWS that need machines beside, and documents of those that return something else."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from awsddp.aws import power
from awsddp.cluster import inventory, run
from awsddp.cluster.doctor import before_launch as doctor
from awsddp.errors import CloudError, NodeError
from awsddp.model.documents import JobDocument
from awsddp.model.records import Target
from awsddp.session.connect import use_reachable
from awsddp.session.context import Cluster
from awsddp.session.locate import aws_of


def trained(ctx: Cluster, **choices: object) -> dict[str, Any]:
    """Do in AWS what `train` does there; what it does beside needs machines."""
    with ctx.ready() as cluster:
        power.keep_on_poweroff(cluster.aws, cluster.nodes, "train-1")
        hold(ctx.home, {node.instance_id for node in cluster.nodes})
    return {}


def fetched(ctx: Cluster) -> dict[str, Any]:
    """Do in AWS what `fetch` does there, once the results of the nodes that run are home."""
    with ctx.partly_ready() as cluster:
        use_reachable(cluster)
        hold(ctx.home, held(ctx.home) - {node.instance_id for node in cluster.nodes})
        power.release(cluster.aws, cluster.nodes, "train-1")
        if any(node.unfetched for node in cluster.excluded):
            raise NodeError("a part of the results is missing")
    return {}


def held(home: Path) -> set[str]:
    """Return the instances that hold the only copy of results: of a job that started, and was not fetched."""
    return set((home / "held").read_text().split()) if (home / "held").exists() else set()


def hold(home: Path, instance_ids: Iterable[str]) -> None:
    """Write down which instances do."""
    (home / "held").write_text(" ".join(instance_ids))


def detached(ctx: Cluster, **choices: Any) -> dict[str, Any]:
    """Do in AWS what `run --detach` does there."""
    return _run(ctx, detach=True, **choices)


def ran(ctx: Cluster, **choices: Any) -> dict[str, Any]:
    """`run`, of a job that needs no machine."""
    return _run(ctx, detach=False, **choices)


def _run(ctx: Cluster, *, detach: bool, **choices: Any) -> dict[str, Any]:
    def job(ctx: Cluster, **_: object) -> JobDocument:
        trained(ctx)
        if not detach:
            fetched(ctx)
        return JobDocument(job="train-1", state="succeeded", cause=None, ranks=(), home="runs/train-1")

    run.train, run.check = job, lambda ctx, **_: None  # type: ignore[assignment]
    return run.run_job(ctx, on_lines=lambda lines: None, detach=detach, **choices)


def checked(ctx: Cluster) -> Any:
    """`doctor`, which as a command exits with 4 where a check failed."""
    document = doctor(ctx)
    failed = [check.value for check in document.checks if check.ok is False]
    if failed:
        raise CloudError("a check failed", "\n".join(failed), "awsddp doctor")
    return document


def whoami(ctx: Cluster) -> dict[str, Any]:
    """Return who calls, as AWS knows them."""
    return {"owner": aws_of(ctx, Target(region=ctx.spec.cluster.region)).identity().user_id}


def status_all(ctx: Cluster) -> dict[str, Any]:
    """`status --all`, as a document."""
    return {"clusters": inventory.status_all(ctx)}
