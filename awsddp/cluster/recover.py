"""recover: after a machine's fault, repair the cluster and continue the job from its newest checkpoint."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from awsddp.agent_client.calls import NameTaken
from awsddp.cluster.down import down
from awsddp.cluster.run_state import RunState, observe_run
from awsddp.cluster.up import up
from awsddp.errors import AwsddpError, ConfigError, Interrupted
from awsddp.job.checkpoint import find_run_id
from awsddp.job.fetch import fetch
from awsddp.job.follow import follow_to_end
from awsddp.job.lives import (
    NextLife,
    describe_changed_files,
    describe_recovery,
    find_checkpoint_of_run,
    list_lives,
    list_variables,
    make_next_session,
    with_job_settings,
)
from awsddp.job.registry import JobRegistry, JobView
from awsddp.job.reported import find_job_on_nodes
from awsddp.job.train import check_job, train
from awsddp.model.documents import JobDocument
from awsddp.model.records import JobRecord
from awsddp.model.recovery_text import describe_lost_work
from awsddp.plan.recovery import FIRST_PAUSE_S, MAX_REFUSALS, RecoveryStep, plan_recovery_step
from awsddp.session.connect import connect_reachable, preconnected_cluster
from awsddp.session.context import Session
from awsddp.session.next_steps import complete_commands, make_recover_line
from awsddp.session.notify import GIVEN_UP, RECOVERED, notify_event
from awsddp.settings.loader import with_cluster_settings
from awsddp.storage.results_dir import make_job_result
from awsddp.util.formatting import counted

LOCK_PART = "recover"
"""The part of a cluster that is locked while a client follows a run, so that only one client continues it."""
_Lines = Callable[[bytes], None]


def train_and_recover(session: Session, *, on_lines: _Lines, detach: bool = False) -> JobDocument:
    """Run a job as `train` does, and continue it after a machine's fault, as often as `job.recover` allows.

    Returns the `train` document of the last job of the run. Raises the errors of `train`, and ConfigError if
    another client follows a run on this cluster.
    """
    began = datetime.now(UTC)
    started: list[JobRecord] = []

    def on_start(job: JobRecord) -> None:
        started.append(job)
        _report_start(session, job, detach=detach)

    failure: AwsddpError | None = None
    with session.folder.lock(session.verb, part=LOCK_PART):
        try:
            document = train(session, on_lines=on_lines, detach=detach, on_start=on_start)
            if detach:
                return document
        except AwsddpError as error:
            if not started or isinstance(error, Interrupted):
                raise
            failure = error
            session.say(error.summary)
        return _Recovery(session, started[0], on_lines, began, failure=failure).run()


def recover(session: Session, *, job: str | None, on_lines: _Lines, detach: bool = False) -> JobDocument:
    """Continue the run of `job` (default: the last job) if a machine's fault ended it.

    The job is followed to its end, with further recoveries; with `detach`, returns once the next job's ranks
    run. A job that has succeeded is returned unchanged, with `detach` also a job that runs. Raises
    NotFoundError for an unknown job, ConfigError if this is not the job's project folder or if another client
    follows the run, and the error of a step that failed repeatedly.
    """
    began = datetime.now(UTC)
    view = JobRegistry(session).require(job)
    session = with_job_settings(session, view.job)
    _refuse_other_run(session, view)
    if session.job_spec.job.recover is None:  # once, each time that it is typed
        limit = len(list_lives(session, view.job))
        section = replace(session.job_spec.job, recover=limit)
        session = session.with_settings(job_spec=replace(session.job_spec, job=section))
    with session.folder.lock("recover", part=LOCK_PART):
        return _Recovery(session, view.job, on_lines, began, detach=detach).run()


def _refuse_other_run(session: Session, view: JobView) -> None:
    """Raise ConfigError if a job ran on another cluster, or if its results are in another project."""
    name, cluster = view.job.job, view.history.name if view.history is not None else session.name
    if cluster != session.name:
        raise ConfigError(f"{name} ran on cluster {cluster}", "", f"awsddp -c {cluster} recover {name}")
    if view.folder.parent != session.results.absolute():
        raise ConfigError(
            f"{name} is not a job of this project",
            f"its results are in {view.folder}",
            f"awsddp recover {name}   # in the project folder of {name}",
        )


def _report_start(session: Session, job: JobRecord, *, detach: bool) -> None:
    """Report what a recovery will do; for a detached job, also the line for cron that starts it."""
    requested = session.job_spec.job
    limit = counted(requested.recover or 0, "time")
    until = "" if requested.resume is not None else "; until it has one, it would start from step 0"
    session.say(
        f"after a machine's fault, {job.job} goes on up to {limit} from its newest complete checkpoint{until}"
    )
    if detach:
        line, names = make_recover_line(session, job), list_variables(job)
        session.say(f"it goes on only when this line is run, for example by cron every 5 minutes: {line}")
        if names:
            session.say(f"these variables must be set for this line: {', '.join(names)}")


@dataclass
class _Recovery:
    """Continues one run. `began` is when the user started the command. `detach` returns once a job runs.
    `failure` is the error of the last step, if it failed."""

    session: Session
    job: JobRecord
    on_lines: _Lines
    began: datetime
    detach: bool = False
    failure: AwsddpError | None = None
    _refusals: int = field(default=0, init=False)
    _moved: bool = field(default=False, init=False)
    _nodes: int | None = field(default=None, init=False)

    def run(self) -> JobDocument:
        """Take one step after the other until the run has ended, or until a job runs (`detach`)."""
        while True:
            state, step = self._plan()
            if step.pause_s and step.do != "end":
                self._sleep(step.pause_s)
                state, step = self._plan()  # the user may have ended the run
            if step.do == "end" or (step.do == "follow" and self.detach):
                return self._end(state, step)
            if step.do not in ("follow", "fetch"):
                self._check_job()
            try:
                self._take(step, state)
            except Interrupted:
                raise
            except AwsddpError as error:
                self.session.say(error.summary)
                if step.do == "fetch" and self._observe().situation.is_fetched:
                    continue  # only the part of a lost node is missing
                self._refusals, self.failure = self._refusals + 1, error

    def _plan(self) -> tuple[RunState, RecoveryStep]:
        state = self._observe()
        situation = replace(
            state.situation, refusals=self._refusals, moved=self._moved, ended_by=self._find_end(state)
        )
        return state._replace(situation=situation), plan_recovery_step(situation)

    def _find_end(self, state: RunState) -> str:
        """Return the verb with which the user ended the run after its last job was launched, or "".

        A `recover` without `detach`, which no timer types, ignores an end before it. All times are by this
        machine's clock, which may differ from the nodes' clocks.
        """
        end = self.session.folder.find_end_of_runs(find_run_id(self.job))
        if end is None:
            return ""
        verb, ended_at = end
        launched = state.last.launched if self.detach else ""
        since = datetime.fromisoformat(launched) if launched else self.began
        return verb if ended_at > since else ""

    def _check_job(self) -> None:
        """Raise UsageError or ConfigError if the next job cannot start, before anything costs money."""
        section = replace(self.session.job_spec.job, name=None)  # it gets another name
        job_spec = replace(self.session.job_spec, job=section)
        check_job(self.session.with_settings(job_spec=job_spec), detach=True)

    def _observe(self) -> RunState:
        """Return the run's state, and try again if AWS does not answer. Raises CloudError or ConfigError."""
        for attempt in range(1, MAX_REFUSALS + 1):
            try:
                return observe_run(self.session, self.job, nodes=self._nodes)
            except AwsddpError as error:
                if not error.retryable or attempt == MAX_REFUSALS:
                    raise
                self.session.say(error.summary)
                self._sleep(FIRST_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _end(self, state: RunState, step: RecoveryStep) -> JobDocument:
        """Return the document of the run's last job. Raises the error of a step that failed repeatedly."""
        view = state.last
        document = make_job_result(self.session, view.job, folder=view.folder)
        if step.why:
            self.session.say(f"{view.job.job} does not go on: {step.why}")
            self._notify(GIVEN_UP, view.job, f"does not go on: {step.why}")
            document = self._without_recover(document, state)
        if self.failure is not None and not state.situation.ended_by:
            self.failure.result = document
            raise self.failure
        return document

    def _without_recover(self, document: JobDocument, state: RunState) -> JobDocument:
        """Return the document of a run that does not go on; its next step is not `recover`."""
        if document.cause is None or "awsddp recover" not in document.cause.next or state.situation.ended_by:
            return document
        command = "awsddp train"
        with contextlib.suppress(AwsddpError):  # S3 cannot be read
            if find_checkpoint_of_run(self.session, state.lives) is not None:
                command += f" --resume {document.job}"
        next_step = complete_commands(self.session, f"{command}   # a new run", job=state.last.job)
        return replace(document, cause=replace(document.cause, next=next_step))

    def _notify(self, event: str, job: JobRecord, text: str) -> None:
        """Send an event about a job of the run to `notify.url`, if it is set."""
        key = f"{find_run_id(job)} {len(job.recoveries)} {job.state}"
        notify_event(self.session, event, job=job.job, key=key, text=text)

    def _sleep(self, seconds: float) -> None:
        from awsddp.aws.waits import CLOCK

        self.session.say(f"trying again in {seconds:.0f} s")
        CLOCK.sleep(seconds)

    def _take(self, step: RecoveryStep, state: RunState) -> None:
        """Take a step. Raises its AwsddpError if it failed."""
        if step.do == "follow":
            self._follow(state)
        elif step.do == "fetch":
            fetch(self.session, job=state.last.job.job, start=lambda: None)
        elif step.do == "repair":
            self._repair(step, state)
        elif step.do == "move":
            self._move(step)
        else:
            self._start(state)
        self._refusals, self.failure = 0, None

    def _follow(self, state: RunState) -> None:
        with preconnected_cluster(self.session) as cluster, connect_reachable(cluster) as connected:
            job = find_job_on_nodes(connected, state.last.job.job)
            follow_to_end(connected, job, on_lines=self.on_lines)

    def _repair(self, step: RecoveryStep, state: RunState) -> None:
        """Replace failed nodes, launch missing nodes and start stopped nodes."""
        if step.why:
            self.session.say(f"{step.why}: {state.last.job.job} goes on with {counted(step.nodes, 'node')}")
        self._nodes = step.nodes
        up(self._make_session(step, state), confirm=lambda _: None)

    def _move(self, step: RecoveryStep) -> None:
        """Terminate the cluster, after its results are fetched; the next step launches it in any place."""
        self.session.say(f"{step.why}: terminating all nodes, to launch {step.nodes} elsewhere")
        self._nodes = step.nodes
        down(self.session, confirm=lambda _: None, ends_runs=False)
        self._moved = True

    def _make_session(self, step: RecoveryStep, state: RunState) -> Session:
        """Return the session for `up`: the cluster's settings, the step's nodes, and the remaining time.

        The settings that this command line requested for the first launch do not start a new term.
        """
        settings, is_local = self._read_settings(state)
        spec = with_cluster_settings(self.session.spec, settings)
        cluster = replace(spec.cluster, nodes=step.nodes, replace=step.replace)
        changed = ["cluster.nodes"]
        if not state.nodes:
            cluster = replace(cluster, expires=f"{max(0, int(state.situation.left_s))}s")
            changed.append("cluster.expires")
        if (budget := settings.get("cluster.budget_usd")) is not None:
            cluster = replace(cluster, budget_usd=budget)
            changed.append("cluster.budget_usd")
        capacity = replace(spec.capacity, retry_until_up=False)  # this class repeats the step
        sources = {key: source for key, source in spec.sources.items() if key != "cluster.expires"}
        sources |= dict.fromkeys(changed, "recover")
        spec = replace(spec, cluster=cluster, capacity=capacity, sources=sources)
        return replace(self.session, local=is_local).with_settings(spec)

    def _read_settings(self, state: RunState) -> tuple[dict[str, Any], bool]:
        """Return the cluster's settings, and True if it is in the local cloud.

        If the cluster was terminated, they are those of its last launch, and its cost is no longer part of
        the budget.
        """
        record, history = self.session.folder.read(), state.last.history
        if record is not None and record.settings:
            return dict(record.asked), record.target.name == "local"
        rows = [row for row in history.rows if row.event == "launched"] if history is not None else []
        if history is None or not rows:
            return {}, self.session.local
        settings, bill = dict(rows[-1].asked or {}), history.bill
        if "cluster.budget_usd" in settings and bill is not None and bill.cost_usd is not None:
            settings["cluster.budget_usd"] -= bill.cost_usd
        return settings, rows[-1].target == "local"

    def _start(self, state: RunState) -> None:
        """Start the job that continues the run, and follow it to its end (unless `detach`)."""
        lives, last = state.lives, state.last
        checkpoint = find_checkpoint_of_run(self.session, lives)
        recovery = describe_recovery(last, checkpoint, lives)
        self.session.say(describe_lost_work(last.job.job, recovery))
        if changed := describe_changed_files(self.session, last.job):
            self.session.say(f"changed since {last.job.job} started, and sent as they are now: {changed}")
        taken = {view.job.job for view in JobRegistry(self.session).jobs}
        life = NextLife(
            run_id=find_run_id(last.job),
            checkpoint=checkpoint,
            recoveries=(*last.job.recoveries, recovery),
        )
        while True:
            session = make_next_session(
                self.session,
                last.job,
                taken,
                nodes=state.situation.nodes,
                resumed=checkpoint.job if checkpoint is not None else None,
            )
            try:
                train(
                    session,
                    on_lines=self.on_lines,
                    detach=self.detach,
                    next_life=life,
                    on_start=lambda job: self._notify(
                        RECOVERED, job, f"goes on: {describe_lost_work(last.job.job, recovery)}"
                    ),
                )
                return
            except NameTaken:  # a client was killed after it had claimed the name
                taken.add(str(session.job_spec.job.name))
