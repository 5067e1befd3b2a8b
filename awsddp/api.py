"""The Python API: the verbs as methods of a cluster and its jobs, for scripts, threads and notebooks.

Nothing here prints, asks or handles signals. Progress goes to `on_event`, failures are the errors of the
command line, and what costs money needs a plan or `max_price_usd`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, Unpack

from awsddp import spec
from awsddp.errors import AwsddpError, ConfigError, JobError, UsageError
from awsddp.jobs.logs import LogLine, split_lines
from awsddp.keywords import JobKeys, Keys
from awsddp.parallel import soon
from awsddp.plan.records import LaunchPlan
from awsddp.records import Cause, JobState
from awsddp.records import JobRecord as Record
from awsddp.report import Event, OnEvent, money
from awsddp.state import Folder, home
from awsddp.verbs.advice import advised
from awsddp.verbs.cancel import cancel
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context, target_of
from awsddp.verbs.down import down
from awsddp.verbs.jobs import job_now, known_jobs
from awsddp.verbs.logs import logs
from awsddp.verbs.plan import plan
from awsddp.verbs.results import metrics, results_dir
from awsddp.verbs.run import down_or_stop, with_gpus, with_idle
from awsddp.verbs.status import status
from awsddp.verbs.stop import stop
from awsddp.verbs.train import train
from awsddp.verbs.up import up

_KEYS = {key.replace("local.", "local_").rpartition(".")[2]: key for key in spec.KEYS}


class JobFailed(JobError):
    """A job did not succeed. `cause` says which rank failed first, and why; `job` is the job."""

    def __init__(self, job: "Job", state: JobState, cause: Cause | None) -> None:
        super().__init__(
            f"job {job.name} {state}",
            cause.explanation if cause is not None else "",
            advised(job._context, f"awsddp logs {job.name}"),
        )
        self.job = job
        self.cause = cause


@dataclass(frozen=True)
class Plan:
    """What `up` would do. `launch` has every detail; a notebook shows a table."""

    launch: LaunchPlan
    context: Context

    @property
    def price_usd_per_hour(self) -> float | None:
        """The list price of all nodes together; None where it is unknown."""
        return self.launch.price_usd_per_hour

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as a table of two columns."""
        one = self.launch
        return [
            ("cluster", f"{one.cluster}, {one.target}, {one.region}"),
            ("nodes", f"{one.nodes} x {one.instance_type}, {one.kind.gpus} GPUs each"),
            ("image", one.image.name),
            ("price per hour", money(one.price_usd_per_hour)),
            *(("step", str(step)) for step in one.steps),
            *(("warning", text) for text in one.warnings),
        ]

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th>{escape(key)}</th><td>{escape(text)}</td></tr>" for key, text in self.rows()
        )
        return f"<table>{cells}</table>"


class Cluster:
    """A cluster by its name, as `awsddp -c NAME`: it may exist already or not yet.

    The constructor sends no requests. `local` is --local, `region` and `profile` as on the command line;
    every other keyword is a key of awsddp.toml that holds for all methods (`workdir=...`, `results=...`).
    awsddp.toml is read from the current folder. `on_event` gets progress, on the thread that called the
    method or iterates `Job.logs`. Raises ConfigError.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        local: bool = False,
        on_event: OnEvent = lambda event: None,
        **keys: Unpack[Keys],
    ) -> None:
        self.name = name
        self._local = local
        self._on_event = on_event
        self._keys = keys
        self._open = contextlib.ExitStack()
        self._context()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections of `fabric()`. Ends nothing."""
        self._open.close()

    def plan(self, **keys: Unpack[Keys]) -> Plan:
        """Return what `up` with these keys would do, such as `nodes=2, instance_type="g5.xlarge"`.

        Changes nothing. Raises ConfigError, CloudError.
        """
        with _advising(self._context(keys)) as context:
            return Plan(plan(context), context)

    def up(self, agreed: Plan | None = None, **keys: Unpack[Keys]) -> dict[str, Any]:
        """Launch and prepare the nodes, or change what exists; return the `up` document.

        Idempotent: finishes, repairs, resizes. On AWS this needs consent: a plan, or `max_price_usd` (per
        hour, all nodes together) among the keys or in awsddp.toml. Raises UsageError without it, and what
        `awsddp up` raises.
        """
        return _up(self._context(keys) if agreed is None else agreed.context, agreed)

    def status(self) -> dict[str, Any]:
        """Return the `status` document. Raises CloudError."""
        with _advising(self._context()) as context:
            return status(context)

    def train(self, script: str | None = None, *, args: Sequence[Any] = (), **keys: Unpack[JobKeys]) -> "Job":
        """Send the files and start a job; return once its ranks run. Without a script the bundled program.

        `keys` are those of [job], [env] and [sync], such as `world_size=4`. Raises what `awsddp train` does.
        """
        given = {"script": script, "args": [str(one) for one in args] or None, **keys}
        known = {key: value for key, value in given.items() if value is not None}
        with _advising(self._context(known)) as context:
            document = train(context, on_lines=lambda data: None, detach=True)
        return Job(context, document["job"])

    def jobs(self) -> "list[Job]":
        """Return the jobs that the nodes know, oldest first. Raises NotFoundError, NodeError, CloudError."""
        with _advising(self._context()) as context, ClusterHandle.partly_ready(context) as cluster:
            return [Job(context, one.job) for one in known_jobs(cluster)]

    def job(self, name: str) -> "Job":
        """Return a job of this cluster by its name. Raises NotFoundError, also in its methods."""
        with _advising(self._context()) as context:
            job_now(context, name)
        return Job(context, name)

    def stop(self) -> dict[str, Any]:
        """Stop the instances, keep their disks; return the `status` document. Raises what `stop` does."""
        with _advising(self._context()) as context:
            return stop(context, confirm=lambda question: None)

    def down(self, *, discard: bool = False) -> dict[str, Any]:
        """Terminate everything and return the `down` document. Unfetched results are fetched first.

        Raises NodeError where they cannot be, unless `discard`; LeftoverError, CloudError.
        """
        self.close()
        with _advising(self._context()) as context:
            return down(context, discard=discard, confirm=lambda question: None)

    def fabric(self) -> Any:
        """Return a fabric.Group of the nodes, in order: the cluster's key, pinned host keys, jump host.

        Needs the extra `fabric`. `close` ends its connections. Raises ConfigError, NotFoundError, NodeError.
        """
        from awsddp.nodes.fabric_group import fabric_group

        with _advising(self._context()) as context, ClusterHandle.ready(context) as cluster:
            group = fabric_group(cluster.endpoints(), **cluster.login())
        self._open.callback(group.close)
        return group

    def _context(self, keys: Mapping[str, object] | None = None) -> Context:
        """Return the context of one verb. Raises UsageError for a key that awsddp.toml does not have."""
        merged = {**self._keys, **(keys or {})}
        if unknown := [key for key in merged if key not in _KEYS]:
            raise UsageError(f"unknown keyword {unknown[0]!r}", "", spec.nearest(unknown[0], _KEYS))
        overrides = {_KEYS[key]: value for key, value in merged.items()}
        labels = {_KEYS[key]: key for key in merged}
        cluster, job = spec.load(self.name, file=Path(spec.FILE), overrides=overrides, labels=labels)
        return Context(
            spec=cluster,
            job=job,
            folder=Folder(home(), self.name),
            on_event=self._on_event,
            local=self._local,
        )

    def __repr__(self) -> str:
        return f"Cluster({self.name!r})"


class Job:
    """A job of a cluster. Its methods ask the nodes, unless all of its results are fetched."""

    def __init__(self, context: Context, name: str) -> None:
        self._context = context
        self.name = name

    @property
    def results(self) -> Path:
        """The folder that receives the results, as far as they are fetched."""
        return results_dir(self._context, self.name)

    @property
    def state(self) -> JobState:
        """waiting, running, succeeded, failed, cancelled or interrupted, now."""
        return self.record().state

    @property
    def cause(self) -> Cause | None:
        """Why it failed; None where it did not."""
        return self.record().cause

    def record(self) -> Record:
        """Return what is known of the job now. Raises NotFoundError, NodeError, CloudError."""
        with _advising(self._context) as context:
            return job_now(context, self.name)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the fetched rows of `$AWSDDP_RUN_DIR/metrics.jsonl` of the first node."""
        return metrics(self.results)

    def logs(self) -> Iterator[LogLine]:
        """Yield every line of every rank from the first on, until the job ends.

        A thread follows the job and fetches its results at the end; the thread that iterates calls
        `on_event`. Raises what `awsddp logs -f` does.
        """
        mailbox: SimpleQueue[LogLine | Event | None] = SimpleQueue()
        left = threading.Event()

        def on_lines(data: bytes) -> None:
            if left.is_set():
                raise _Left
            for line in split_lines(data):
                mailbox.put(line)

        def follow() -> None:
            try:
                context = replace(self._context, on_event=mailbox.put)
                logs(context, job=self.name, follow=True, on_lines=on_lines)
            finally:
                mailbox.put(None)

        following = soon(follow)
        try:
            while (mail := mailbox.get()) is not None:
                if isinstance(mail, Event):
                    self._context.on_event(mail)
                else:
                    yield mail
            with _advising(self._context):
                following.result()
        finally:
            left.set()

    def wait(self, *, check: bool = True) -> "Job":
        """Wait for the job's end and its results, and return it.

        Raises JobFailed for a job that did not succeed, unless `check` is False; what `awsddp logs -f` does.
        """
        with _advising(self._context) as context:
            logs(context, job=self.name, follow=True, on_lines=lambda data: None)
        record = self.record()
        if check and record.state != "succeeded":
            raise JobFailed(self, record.state, record.cause)
        return self

    def cancel(self) -> "Job":
        """End the job: its ranks get SIGTERM, the grace, SIGKILL. Raises NotFoundError, NodeError."""
        with _advising(self._context) as context:
            cancel(context, job=self.name)
        return self

    def __repr__(self) -> str:
        return f"Job({self.name!r})"


@contextlib.contextmanager
def run(
    name: str = "default",
    *,
    agreed: Plan | None = None,
    local: bool = False,
    on_event: OnEvent = lambda event: None,
    **keys: Unpack[Keys],
) -> Iterator[Cluster]:
    """Bring a cluster up, yield it, and terminate it on every way out, as `awsddp run`.

    `keys` and `agreed` are those of `Cluster.up`; unused nodes end themselves after 10 minutes. Results that
    cannot be fetched at the end stay on the nodes, which are stopped then. Raises ConfigError for a cluster
    that exists already, what `up` raises, and what ends the block; then a failed ending is a note on it.
    """
    cluster = Cluster(name, local=local, on_event=on_event, **keys)
    if (state := cluster.status()["state"]) != "absent":
        raise ConfigError(
            f"cluster {name} already exists", f"it is {state}", "use another name, or Cluster()"
        )
    context = with_idle(with_gpus(cluster._context()) if agreed is None else agreed.context)
    try:
        _up(context, agreed)
        yield cluster
    except BaseException as error:
        if not isinstance(error, ConfigError | UsageError) or context.folder.read() is not None:
            _end(cluster, error)
        raise
    _end(cluster, None)


def _end(cluster: Cluster, error: BaseException | None) -> None:
    cluster.close()
    try:
        with _advising(cluster._context()) as context:
            down_or_stop(context)
    except AwsddpError as second:
        if error is None:
            raise
        error.add_note(str(second))


class _Left(Exception):
    """Nobody reads the lines any more."""


@contextlib.contextmanager
def _advising(context: Context) -> Iterator[Context]:
    """Yield `context`; the commands that an error recommends get the options that select its cluster."""
    try:
        yield context
    except AwsddpError as error:
        error.message = spec.as_given(error.message, context.spec, context.job)
        error.next = advised(context, error.next)
        raise


def _up(context: Context, agreed: Plan | None) -> dict[str, Any]:
    limit = context.spec.cluster.max_price_usd if agreed is None else agreed.price_usd_per_hour
    with _advising(context):
        return up(context, confirm=_consent(context, limit, agreed))


def _consent(
    context: Context, limit: float | None, agreed: Plan | None
) -> Callable[[LaunchPlan | str], None]:
    """Return what `up` calls before it launches or ends machines. It raises UsageError without consent."""
    is_local = target_of(context, context.folder.read()).name == "local"

    def confirm(change: LaunchPlan | str) -> None:
        price = None if isinstance(change, str) else change.price_usd_per_hour
        if is_local or (agreed is not None and price == limit):
            return
        if limit is None:
            raise UsageError(
                "up needs consent to a price",
                f"it would cost {money(price)} per hour",
                "pass max_price_usd=..., or a plan: cluster.up(cluster.plan(...))",
            )
        if price is not None and price > limit:
            raise UsageError(
                f"the price is now {money(price)} per hour, over {money(limit)}", "", "make a new plan"
            )

    return confirm
