"""Job: a job of a cluster, as an object; and what a job is now, by its nodes or by this machine."""

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from awsddp.agent_client.logs import LogLine, split_lines
from awsddp.errors import JobError
from awsddp.job.cancel import cancel
from awsddp.job.registry import job_now
from awsddp.model.events import Event
from awsddp.model.records import Cause, JobRecord, JobState
from awsddp.session.next_steps import advised
from awsddp.storage.results_dir import metrics_of
from awsddp.util.parallel import soon

if TYPE_CHECKING:
    from awsddp.model import documents
    from awsddp.session.context import Cluster


class JobFailed(JobError):
    """A job did not succeed. `cause` says which rank failed first, and why; `job` is the job."""

    def __init__(self, job: "Job", state: JobState, cause: Cause | None) -> None:
        super().__init__(
            f"job {job.name} {state}",
            cause.explanation if cause is not None else "",
            advised(job.cluster, f"awsddp logs {job.name}"),
        )
        self.job = job
        self.cause = cause


class Job:
    """A job of a cluster. Its methods ask the nodes, unless all of its results are fetched.

    `told` is the `train` document that the last method got, None before one did.
    """

    def __init__(self, cluster: "Cluster", name: str, told: "documents.JobDocument | None" = None) -> None:
        self.cluster = cluster
        self.name = name
        self.told = told

    @property
    def results(self) -> Path:
        """The folder that receives the results, as far as they are fetched."""
        return self.cluster.results / self.name

    @property
    def state(self) -> JobState:
        """waiting, running, succeeded, failed, cancelled or interrupted, now."""
        return self.record().state

    @property
    def cause(self) -> Cause | None:
        """Why it failed; None where it did not."""
        return self.record().cause

    def record(self) -> JobRecord:
        """Return what is known of the job now. Raises NotFoundError, NodeError, CloudError."""
        with self.cluster.asking() as cluster:
            return job_now(cluster, self.name)

    def logs(self, *, follow: bool = True) -> Iterator[LogLine]:
        """Yield every line of every rank from the first on, until the job ends; those so far if not `follow`.

        A thread follows the job and fetches its results at the end; the thread that iterates calls
        `on_event`. Raises what `awsddp logs -f` does.
        """
        from awsddp.job.logs import logs

        mailbox: SimpleQueue[LogLine | Event | None] = SimpleQueue()
        left = threading.Event()

        def on_lines(data: bytes) -> None:
            if left.is_set():
                raise _Left
            for line in split_lines(data):
                mailbox.put(line)

        def work() -> None:
            try:
                heard = self.cluster.but(on_event=mailbox.put)
                self.told = logs(heard, job=self.name, follow=follow, on_lines=on_lines)
            finally:
                mailbox.put(None)

        following = soon(work)
        try:
            while (mail := mailbox.get()) is not None:
                if isinstance(mail, Event):
                    self.cluster.on_event(mail)
                else:
                    yield mail
            with self.cluster.asking():
                following.result()
        finally:
            left.set()

    def wait(self, *, check: bool = True) -> "Job":
        """Wait for the job's end and its results, and return it.

        Raises JobFailed for a job that did not succeed, unless `check` is False; what `awsddp logs -f` does.
        """
        from awsddp.job.logs import logs

        with self.cluster.asking() as cluster:
            self.told = logs(cluster, job=self.name, follow=True, on_lines=lambda data: None)
        record = self.record()
        if check and record.state != "succeeded":
            raise JobFailed(self, record.state, record.cause)
        return self

    def cancel(self) -> "Job":
        """End the job: its ranks get SIGTERM, the grace, SIGKILL. Raises NotFoundError, NodeError."""
        with self.cluster.asking() as cluster:
            self.told = cancel(cluster, job=self.name)
        return self

    def fetch(self) -> "documents.FetchDocument":
        """Fetch the job's results, and return the `fetch` document. Raises what `Cluster.fetch` does."""
        return self.cluster.fetch(self.name)

    def why(self) -> "documents.WhyDocument":
        """Return where each rank is, and which are behind; the job runs on. Of an ended job: its cause.

        Raises NotFoundError, NodeError.
        """
        from awsddp.job.why import why

        with self.cluster.asking() as cluster:
            return why(cluster, self.name)

    def report(self) -> "documents.JobReport":
        """Write runs/JOB/report.html from what is here, and return its document. Raises ConfigError."""
        from awsddp.job.report import write_report

        with self.cluster.asking() as cluster:
            return write_report(cluster, job=self.name)

    def metrics(self, *, frame: bool = False) -> Any:
        """Return the fetched rows of `$AWSDDP_RUN_DIR/metrics.jsonl` of the first node, a dict each.

        With `frame` a pandas.DataFrame. Raises ImportError where pandas is not installed.
        """
        rows = metrics_of(self.results)
        if not frame:
            return rows
        import pandas

        return pandas.DataFrame(rows)

    def __repr__(self) -> str:
        return f"Job({self.name!r})"


class _Left(Exception):
    """Nobody reads the lines any more."""
