"""What verbs do in AWS that need machines beside, and documents of those that return something else."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from awsddp.aws import power
from awsddp.errors import CloudError, NodeError
from awsddp.records import Target
from awsddp.verbs import everywhere, run
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context, aws_of
from awsddp.verbs.doctor import doctor


def trained(ctx: Context, **choices: object) -> dict[str, Any]:
    """Do in AWS what `train` does there; what it does beside needs machines."""
    with ClusterHandle.ready(ctx) as cluster:
        power.keep_on_poweroff(cluster.aws, cluster.nodes, "train-1")
        hold(ctx.home, {node.instance_id for node in cluster.nodes})
    return {}


def fetched(ctx: Context) -> dict[str, Any]:
    """Do in AWS what `fetch` does there, once the results of the nodes that run are home."""
    with ClusterHandle.partly_ready(ctx) as cluster:
        cluster.use_reachable()
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


def detached(ctx: Context, **choices: Any) -> dict[str, Any]:
    """Do in AWS what `run --detach` does there."""
    return _run(ctx, detach=True, **choices)


def ran(ctx: Context, **choices: Any) -> dict[str, Any]:
    """`run`, of a job that needs no machine."""
    return _run(ctx, detach=False, **choices)


def _run(ctx: Context, *, detach: bool, **choices: Any) -> dict[str, Any]:
    def job(ctx: Context, **_: object) -> dict[str, Any]:
        trained(ctx)
        return {"job": "train-1", "state": "succeeded"} | ({} if detach else fetched(ctx))

    run.train, run.check = job, lambda ctx, **_: None  # type: ignore[assignment]
    result = run.run(ctx, on_lines=lambda lines: None, detach=detach, **choices)
    if result.error is not None:
        raise result.error
    return result.document()


def checked(ctx: Context) -> dict[str, Any]:
    """`doctor`, which as a command exits with 4 where a check failed."""
    document = doctor(ctx)
    failed = [check["value"] for check in document["checks"] if check["ok"] is False]
    if failed:
        raise CloudError("a check failed", "\n".join(failed), "awsddp doctor")
    return document


def whoami(ctx: Context) -> dict[str, Any]:
    """Return who calls, as AWS knows them."""
    return {"owner": aws_of(ctx, Target(region=ctx.spec.cluster.region)).identity().user_id}


def status_all(ctx: Context) -> dict[str, Any]:
    """`status --all`, as a document."""
    return {"clusters": everywhere.status_all(ctx)}
