"""Stand-ins for verbs that need nodes: only their calls to AWS; and verbs that return no document."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from awsddp.aws import power
from awsddp.cluster import inventory, run
from awsddp.cluster.doctor import check_before_launch as doctor
from awsddp.errors import CloudError, NodeError
from awsddp.model.documents import JobDocument
from awsddp.model.records import Target
from awsddp.session.connect import preconnected_cluster, ready_cluster, require_reachable
from awsddp.session.context import Session
from awsddp.session.locate import aws_client_for


def run_train(session: Session, **choices: object) -> dict[str, Any]:
    """Make the calls of `train` to AWS, without nodes."""
    with ready_cluster(session) as cluster:
        power.keep_on_poweroff(cluster.aws, cluster.nodes, "train-1")
        set_instances_with_results(session.home, {node.instance_id for node in cluster.nodes})
    return {}


def run_fetch(session: Session) -> dict[str, Any]:
    """Make the calls of `fetch` to AWS, after the results of the running nodes were copied."""
    with preconnected_cluster(session) as preconnected:
        cluster = require_reachable(preconnected)
        set_instances_with_results(
            session.home, instances_with_results(session.home) - {node.instance_id for node in cluster.nodes}
        )
        power.release(cluster.aws, cluster.nodes, "train-1")
        if any(node.unfetched for node in cluster.excluded):
            raise NodeError("a part of the results is missing")
    return {}


def instances_with_results(home: Path) -> set[str]:
    """Return the instances that hold the only copy of results: of a job that started and was not fetched."""
    return set((home / "held").read_text().split()) if (home / "held").exists() else set()


def set_instances_with_results(home: Path, instance_ids: Iterable[str]) -> None:
    """Set which instances hold the only copy of results."""
    (home / "held").write_text(" ".join(instance_ids))


def run_detached(session: Session, **choices: Any) -> dict[str, Any]:
    """Make the calls of `run --detach` to AWS."""
    return _run(session, detach=True, **choices)


def run_attached(session: Session, **choices: Any) -> dict[str, Any]:
    """Call `run` with a job that needs no node."""
    return _run(session, detach=False, **choices)


def _run(session: Session, *, detach: bool, **choices: Any) -> dict[str, Any]:
    def job(session: Session, **_: object) -> JobDocument:
        run_train(session)
        if not detach:
            run_fetch(session)
        return JobDocument(job="train-1", state="succeeded", cause=None, ranks=(), home="runs/train-1")

    run.train, run.check_job = job, lambda session, **_: None  # type: ignore[assignment]
    return run.run_job(session, on_lines=lambda lines: None, detach=detach, **choices)


def run_doctor(session: Session) -> Any:
    """Return the document of `doctor`. Raises CloudError (exit code 4) if a check failed."""
    document = doctor(session)
    failed = [check.value for check in document.checks if check.ok is False]
    if failed:
        raise CloudError("a check failed", "\n".join(failed), "awsddp doctor")
    return document


def whoami(session: Session) -> dict[str, Any]:
    """Return the id by which AWS identifies the caller."""
    return {"owner": aws_client_for(session, Target(region=session.spec.cluster.region)).identity().user_id}


def status_all(session: Session) -> dict[str, Any]:
    """Return what `status --all` lists, as a document."""
    return {"clusters": inventory.status_all(session)}
