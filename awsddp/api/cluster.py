"""Cluster, Plan and Job: the Python API's objects.

These objects do not print or handle signals: progress goes to `on_event`, and failures raise the same errors
as on the command line. Methods import modules when they are called, so that `status`, for example, loads only
what it uses.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, Unpack

from awsddp.agent_client.logs import LogLine, parse_lines
from awsddp.errors import JobError, NodeError, UsageError
from awsddp.model.events import Event, OnEvent
from awsddp.model.records import Cause, JobRecord, JobState
from awsddp.plan.records import LaunchPlan
from awsddp.session.context import Session
from awsddp.session.locate import resolve_target
from awsddp.session.next_steps import complete_commands, completing_errors
from awsddp.settings import loader
from awsddp.settings.spec import ClusterSpec, JobSpec
from awsddp.settings.values import check_file_names, check_name
from awsddp.state import ClusterFolder
from awsddp.storage.results_dir import read_metrics
from awsddp.util.formatting import counted, money
from awsddp.util.parallel import ignore_event, run_in_thread

if TYPE_CHECKING:
    from awsddp.api.keywords import JobKeys, Keys
    from awsddp.cluster.reconcile import Confirm
    from awsddp.model import documents


class Cluster:
    """The cluster with this name, which `awsddp -c NAME` also selects; the cluster need not exist yet.

    The constructor reads no files and sends no requests. `local`, `region` and `profile` have the same
    meaning as the command-line options with these names. Every other keyword, such as `workdir=...` or
    `results=...`, is a key of awsddp.toml and applies to all methods. awsddp.toml is read from the current
    folder. `on_event` is called with each progress event, on the thread that called the method or iterates
    over `Job.logs`. The constructor raises UsageError for a keyword that is not a key of awsddp.toml, and
    ConfigError for an invalid name. The methods raise ConfigError for an invalid value.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        local: bool = False,
        on_event: OnEvent = ignore_event,
        **keys: "Unpack[Keys]",
    ) -> None:
        check_name(name)
        check_file_names()
        self.name = name
        self.local = local
        self.on_event = on_event
        self._keys = loader.check_keywords(keys)
        self._open = contextlib.ExitStack()

    @cached_property
    def session(self) -> Session:
        """The cluster's name and settings; the settings are loaded on first use."""
        return Session(
            name=self.name,
            local=self.local,
            on_event=self.on_event,
            keys=self._keys,
        )

    @property
    def spec(self) -> ClusterSpec:
        """The cluster's settings, from keywords, variables and awsddp.toml. Raises ConfigError."""
        return self.session.spec

    @property
    def job_spec(self) -> JobSpec:
        """The settings of the cluster's jobs: [job], [env] and [sync]. Raises ConfigError."""
        return self.session.job_spec

    @property
    def folder(self) -> ClusterFolder:
        """The cluster's folder on this machine; it may be empty."""
        return self.session.folder

    @property
    def home(self) -> Path:
        """$AWSDDP_HOME."""
        return self.session.home

    @property
    def results(self) -> Path:
        """The local results folder, which has one folder per job. Raises ConfigError."""
        return self.session.results

    def _with(self, keys: Mapping[str, object]) -> Self:
        """Return a copy of the cluster with these keys added. Raises UsageError for an unknown key."""
        if not keys:
            return self
        all_keys = {**self.session.keys, **loader.check_keywords(keys)}
        return self._of(replace(self.session, keys=all_keys, settings=None))

    def _of(self, session: Session) -> Self:
        """Return a copy of the cluster with another session."""
        other = copy.copy(self)
        other.session = session
        return other

    def plan(self, **keys: "Unpack[Keys]") -> "Plan":
        """Return what `up` would do with these keys (for example, `nodes=2, instance_type="g5.xlarge"`).

        Changes nothing. Raises ConfigError or CloudError.
        """
        from awsddp.cluster.plan import plan

        configured = self._with(keys)
        with completing_errors(configured.session):
            return Plan(plan(configured.session), configured)

    def up(
        self, agreed: "Plan | None" = None, *, confirm: "Confirm | None" = None, **keys: "Unpack[Keys]"
    ) -> "documents.ClusterDocument":
        """Launch and prepare the nodes, or change what exists; return the `up` document.

        `up` is idempotent: it finishes, repairs or resizes a cluster. On AWS, `up` needs consent: a plan
        (`agreed`), `max_price_usd` (per hour, for all nodes together) in the keys or in awsddp.toml, or
        `confirm`. `confirm` is called with the plan before a launch. If instances are only started or
        terminated, `confirm` is called with a question instead. To refuse, `confirm` raises an exception.
        Raises UsageError if there is no consent, and the errors of `awsddp up`.
        """
        from awsddp.cluster.up import up

        session = (self if agreed is None else agreed.cluster)._with(keys).session
        with completing_errors(session):
            return up(session, confirm=confirm or consent(session, agreed))

    def status(self, *, ask_nodes: bool = False) -> "documents.ClusterDocument":
        """Return the `status` document; a cluster that is not found is "absent". Raises CloudError.

        With `ask_nodes`, the document has each node's `idle_left_s`, as last counted by the node's watchdog.
        """
        from awsddp.cluster.status import status

        with completing_errors(self.session):
            return status(self.session, ask_nodes=ask_nodes)

    def sync(self, *, confirm: Callable[[str], None] = lambda question: None) -> "documents.SyncDocument":
        """Send the project folder to every node and return the `sync` document.

        `confirm` is called for each running job, because the job's files would change. To refuse, `confirm`
        raises an exception. Raises ConfigError or NodeError.
        """
        from awsddp.cluster.sync import sync

        with completing_errors(self.session):
            return sync(self.session, confirm=confirm)

    def train(
        self,
        script: str | None = None,
        *,
        args: Sequence[Any] = (),
        on_lines: Callable[[bytes], None] | None = None,
        **keys: "Unpack[JobKeys]",
    ) -> "Job":
        """Send the project folder, start a job, and return the job once its ranks run.

        If there is no script, the job runs the bundled program. `on_lines` is called with the ranks' labelled
        lines as they arrive; if it is given, `train` returns only when the job has ended and its results are
        fetched. `keys` are keys of [job], [env] and [sync], such as `world_size=4`. Raises the errors of
        `awsddp train`.
        """
        from awsddp.cluster.train import train_job

        options = {"script": script, "args": [str(item) for item in args] or None, **keys}
        configured = self._with({key: value for key, value in options.items() if value is not None})
        with completing_errors(configured.session):
            document = train_job(
                configured.session, on_lines=on_lines or ignore_event, detach=on_lines is None
            )
            return Job(configured, document["job"], document)

    def jobs(self) -> "list[Job]":
        """Return the jobs on the nodes, oldest first. Raises NotFoundError, NodeError or CloudError."""
        from awsddp.job.reported import query_jobs
        from awsddp.session.connect import preconnected_cluster

        with completing_errors(self.session), preconnected_cluster(self.session) as cluster:
            return [Job(self, job.job) for job in query_jobs(cluster)]

    def job(self, name: str) -> "Job":
        """Return one of this cluster's jobs by its name, a part of its name, or `last`.

        Raises UsageError or NotFoundError.
        """
        from awsddp.job.reported import get_job

        with completing_errors(self.session):
            return Job(self, get_job(self.session, name).job)

    def exec(
        self,
        words: Sequence[str],
        *,
        node: int | None = None,
        stdin: bytes = b"",
        on_output: Callable[[int, bytes, bool], None] = lambda node, data, is_error: None,
    ) -> "documents.ExecDocument":
        """Run a command on all nodes (or `node`) and return the `exec` document, whatever its exit codes.

        Several words are a program and its arguments; a single word is a line for bash. `on_output` is called
        with a node's number, a piece of output, and True if the piece is from stderr. Raises NotFoundError or
        NodeError.
        """
        from awsddp.cluster.remote import run_on_nodes

        with completing_errors(self.session):
            return run_on_nodes(self.session, words=words, node=node, stdin=stdin, on_output=on_output)

    def fetch(
        self, job: str | None = None, *, refetch: bool = False, confirm: "Confirm | None" = None
    ) -> "documents.FetchDocument":
        """Fetch the results of a job (the last by default), and return the `fetch` document.

        Results that are already fetched are not fetched again, unless `refetch` is True. Stopped nodes with
        results are started; `confirm` has the same meaning as for `up`. Raises NotFoundError, or NodeError if
        a part is missing.
        """
        from awsddp.cluster.up import up
        from awsddp.job.fetch import fetch

        with completing_errors(self.session):
            start = partial(up, self.session, confirm=confirm or consent(self.session, None))
            return fetch(self.session, job=job, refetch=refetch, start=start)

    def doctor(self) -> "documents.DoctorDocument":
        """Return the `doctor` document: checks of the cluster's nodes, or of a launch if there is no cluster.

        Changes nothing. Raises InUse, ConfigError or CloudError, or NodeError if no node can be reached.
        """
        from awsddp.cluster.doctor import check_before_launch, check_cluster

        with completing_errors(self.session):
            return check_cluster(self.session) or check_before_launch(self.session)

    def stop(self, *, confirm: Callable[[str], None] = lambda question: None) -> "documents.ClusterDocument":
        """Stop the instances, keep their disks, and return the `status` document.

        `confirm` is called first and raises an exception to refuse. Raises the errors of `awsddp stop`.
        """
        from awsddp.cluster.stop import stop

        with completing_errors(self.session):
            return stop(self.session, confirm=confirm)

    def down(
        self,
        *,
        discard: bool = False,
        known_only: bool = False,
        confirm: Callable[[str], None] = lambda question: None,
        lose: Callable[[NodeError], bool] = lambda error: False,
    ) -> "documents.DownDocument":
        """Terminate the cluster and return the `down` document. Unfetched results are fetched first.

        With `known_only`, a cluster without a record on this machine is refused. `confirm` is called before
        anything is terminated and raises an exception to refuse. With `discard`, nothing is fetched. If
        results cannot be fetched, `lose` is called with the NodeError. The cluster is then terminated only if
        `lose` returns True; otherwise, the error is raised. Raises LeftoverError or CloudError.
        """
        from awsddp.cluster.down import down

        self.close()
        with completing_errors(self.session):
            return down(self.session, discard=discard, known_only=known_only, confirm=confirm, lose=lose)

    def fabric(self) -> Any:
        """Return a fabric.Group of the nodes in order, which uses the cluster's key, host keys and jump host.

        Needs the extra `fabric`. `Cluster.close` closes the group's connections. Raises ConfigError,
        NotFoundError or NodeError.
        """
        from awsddp.nodes.fabric_group import fabric_group
        from awsddp.session.connect import list_endpoints, make_login, publish_addresses, ready_cluster

        with completing_errors(self.session), ready_cluster(self.session) as cluster:
            cluster = publish_addresses(cluster)
            group = fabric_group(
                list_endpoints(cluster, cluster.nodes), make_login(self.session, cluster.record)
            )
        self._open.callback(group.close)
        return group

    def close(self) -> None:
        """Close the connections that `fabric` opened. The cluster and its jobs keep running."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Cluster({self.name!r})"


@dataclass(frozen=True)
class Plan:
    """Holds what `up` would do. `launch` is the complete plan. A notebook shows a Plan as a table."""

    launch: LaunchPlan
    cluster: "Cluster"

    @property
    def price_usd_per_hour(self) -> float | None:
        """The list price of all nodes together, or None if it is unknown."""
        return self.launch.price_usd_per_hour

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as a table with two columns."""
        launch = self.launch
        return [
            ("cluster", f"{launch.cluster}, {launch.target}, {launch.region}"),
            ("nodes", f"{launch.nodes} x {launch.instance_type}, {counted(launch.kind.gpus, 'GPU')} each"),
            ("image", launch.image.name),
            ("price per hour", money(launch.price_usd_per_hour)),
            *(("step", str(step)) for step in launch.steps),
            *(("warning", text) for text in launch.warnings),
        ]

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{key} {text}' for key, text in self.rows()[:4])})"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th>{escape(key)}</th><td>{escape(text)}</td></tr>" for key, text in self.rows()
        )
        return f"<table>{cells}</table>"


def consent(session: Session, agreed: Plan | None) -> "Confirm":
    """Return a `confirm` function for `up` that raises UsageError if there is no consent to the price."""
    limit = session.spec.cluster.max_price_usd if agreed is None else agreed.price_usd_per_hour
    is_local = resolve_target(session, session.folder.read()).name == "local"

    def confirm(change: LaunchPlan | str) -> None:
        price = None if isinstance(change, str) else change.price_usd_per_hour
        if is_local or (agreed is not None and price == limit):
            return
        if limit is None:
            raise UsageError(
                "up needs consent to a price",
                f"the cluster would cost {money(price)} per hour",
                "pass max_price_usd=..., or a plan: cluster.up(cluster.plan(...))",
            )
        if price is not None and price > limit:
            raise UsageError(
                f"the price is now {money(price)} per hour, which is over {money(limit)}",
                "",
                "make a new plan",
            )

    return confirm


class JobFailed(JobError):
    """A job did not succeed. `cause` has the rank that failed first and the reason; `job` is the job."""

    def __init__(self, job: "Job", state: JobState, cause: Cause | None) -> None:
        super().__init__(
            f"job {job.name} {state}",
            cause.explanation if cause is not None else "",
            complete_commands(job.cluster.session, f"awsddp logs {job.name}"),
        )
        self.job = job
        self.cause = cause


class Job:
    """One job on a cluster. Methods request the job's state from the nodes, unless all results are fetched.

    `last_document` is the job's last `train` document, or None if no method has returned one yet.
    """

    def __init__(
        self, cluster: "Cluster", name: str, last_document: "documents.JobDocument | None" = None
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.last_document = last_document

    @property
    def results(self) -> Path:
        """The job's local results folder."""
        return self.cluster.results / self.name

    @property
    def state(self) -> JobState:
        """The current state: waiting, running, succeeded, failed, cancelled or interrupted."""
        return self.record().state

    @property
    def cause(self) -> Cause | None:
        """Why the job failed, or None if it did not fail."""
        return self.record().cause

    def record(self) -> JobRecord:
        """Return the job's current record. Raises NotFoundError, NodeError or CloudError."""
        from awsddp.job.reported import get_job

        with completing_errors(self.cluster.session):
            return get_job(self.cluster.session, self.name)

    def logs(self, *, follow: bool = True) -> Iterator[LogLine]:
        """Yield every rank's lines until the job ends; without `follow`, yield only those printed so far.

        A separate thread follows the job and fetches its results at the end; `on_event` is called on the
        thread that iterates. Raises the errors of `awsddp logs -f`.
        """
        from awsddp.job.logs import logs

        queue: SimpleQueue[LogLine | Event | None] = SimpleQueue()
        stopped = threading.Event()

        def on_lines(data: bytes) -> None:
            if stopped.is_set():
                raise _Abandoned
            for line in parse_lines(data):
                queue.put(line)

        def work() -> None:
            try:
                session = replace(self.cluster.session, on_event=queue.put)
                self.last_document = logs(session, job=self.name, follow=follow, on_lines=on_lines)
            finally:
                queue.put(None)

        future = run_in_thread(work)
        try:
            while (item := queue.get()) is not None:
                if isinstance(item, Event):
                    self.cluster.session.on_event(item)
                else:
                    yield item
            with completing_errors(self.cluster.session):
                future.result()
        finally:
            stopped.set()

    def wait(self, *, check: bool = True) -> "Job":
        """Wait until the job has ended and its results are fetched; return the job.

        Raises the errors of `awsddp logs -f` and, unless `check` is False, JobFailed if the job did not
        succeed.
        """
        from awsddp.job.logs import logs

        with completing_errors(self.cluster.session):
            self.last_document = logs(
                self.cluster.session, job=self.name, follow=True, on_lines=lambda data: None
            )
        record = self.record()
        if check and record.state != "succeeded":
            raise JobFailed(self, record.state, record.cause)
        return self

    def cancel(self) -> "Job":
        """End the job: the ranks get SIGTERM, and SIGKILL after the grace period.

        Raises NotFoundError or NodeError.
        """
        from awsddp.job.cancel import cancel

        with completing_errors(self.cluster.session):
            self.last_document = cancel(self.cluster.session, job=self.name)
        return self

    def recover(self) -> "Job":
        """Continue the job's run after a machine's fault; wait for its end and return the run's last job.

        Raises the errors of `awsddp recover`.
        """
        from awsddp.cluster.recover import recover

        with completing_errors(self.cluster.session):
            document = recover(self.cluster.session, job=self.name, on_lines=lambda data: None)
        return Job(self.cluster, document.job, document)

    def fetch(self) -> "documents.FetchDocument":
        """Fetch the job's results, and return the `fetch` document. Raises the errors of `Cluster.fetch`."""
        return self.cluster.fetch(self.name)

    def why(self) -> "documents.WhyDocument":
        """Return the `why` document. For a running job, it has each rank's stack and the ranks that are
        behind; for an ended job, it has the cause of the end.

        The job keeps running. Raises NotFoundError or NodeError.
        """
        from awsddp.job.why import why

        with completing_errors(self.cluster.session):
            return why(self.cluster.session, self.name)

    def report(self) -> "documents.JobReport":
        """Write runs/JOB/report.html from the fetched results; return the document. Raises ConfigError."""
        from awsddp.job.report import write_report

        with completing_errors(self.cluster.session):
            return write_report(self.cluster.session, job=self.name)

    def metrics(self, *, frame: bool = False) -> Any:
        """Return the fetched rows of the first node's `$AWSDDP_RUN_DIR/metrics.jsonl`, as dicts.

        With `frame`, the rows are returned as a pandas.DataFrame. Raises ImportError if pandas is not
        installed.
        """
        rows = read_metrics(self.results)
        if not frame:
            return rows
        import pandas

        return pandas.DataFrame(rows)

    def __repr__(self) -> str:
        return f"Job({self.name!r})"


class _Abandoned(Exception):
    """Raised to stop the thread that `Job.logs` started, once the caller has closed the iterator."""
