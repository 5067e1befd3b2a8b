"""train: run a job and, with --recover, continue it after a machine's fault."""

from collections.abc import Callable

from awsddp.model.documents import JobDocument
from awsddp.session.context import Session


def train_job(session: Session, *, on_lines: Callable[[bytes], None], detach: bool = False) -> JobDocument:
    """Run a job and return its `train` document; with `job.recover`, the document of the run's last job.

    Takes the arguments of `train` and raises its errors, and those of `train_and_recover`.
    """
    from awsddp.job.train import train

    if session.job_spec.job.recover is None:
        return train(session, on_lines=on_lines, detach=detach)
    from awsddp.cluster.recover import train_and_recover  # imports `up`, which a plain job does not need

    return train_and_recover(session, on_lines=on_lines, detach=detach)
