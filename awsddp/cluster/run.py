"""run: launch, train, fetch, terminate; the nodes are terminated even after a failure."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from awsddp.cluster.down import down
from awsddp.cluster.reconcile import Confirm
from awsddp.cluster.stop import stop
from awsddp.cluster.train import train_job
from awsddp.cluster.up import up
from awsddp.errors import (
    AwsddpError,
    CloudError,
    ConfigError,
    Interrupted,
    InUse,
    LeftoverError,
    NodeError,
    Terminated,
    UsageError,
)
from awsddp.job.checkpoint import find_checkpoint_to_resume
from awsddp.job.submit import resolve_after
from awsddp.job.train import check_job, check_ranks
from awsddp.model.documents import DownDocument, RunDocument
from awsddp.plan.records import LaunchPlan
from awsddp.session.context import Session
from awsddp.session.next_steps import add_running_costs, describe_cost
from awsddp.storage.results_dir import find_fetched_job

IDLE = "10m"
"""The default idle time for the nodes of a `run`; it is short because no user logs in to them."""
END_S = 600.0
"""How long `run` tries to terminate its nodes while AWS does not answer. The nodes' default idle time
(`IDLE`) is over by then."""
_Result = TypeVar("_Result")


def run_job(
    session: Session, *, confirm: Confirm, on_lines: Callable[[bytes], None], detach: bool = False
) -> RunDocument:
    """Launch a cluster, run the job, fetch its results and terminate the cluster, even after a failure.

    With `detach`, return once the ranks run; the nodes shut down when they are idle. Before anything is
    created, raises the errors of `up`, and those of `train` for an invalid job. Raises InUse if another job
    runs on the cluster, which then stays unchanged. A later failure is raised with the document as its
    `result`.
    """
    from awsddp.job.unsynced_data import ask_about_unsynced_data

    check_job(session, detach=detach)
    find_checkpoint_to_resume(session)
    if session.job_spec.job.after not in (None, "all") and session.folder.read() is None:
        resolve_after(session, {})  # New nodes have no job to wait for.
    session = with_gpus(with_idle(ask_about_unsynced_data(session)))
    result = RunDocument(up=None, train=None, down=None, seconds={})
    failure: AwsddpError | None
    try:
        failure = _up_and_train(
            session, result, confirm=confirm, on_lines=_ignore_broken_pipe(on_lines), detach=detach
        )
        if detach and failure is None:
            return result
        failure = _tear_down(session, result) or failure
    except KeyboardInterrupt as stop:
        session.say("interrupted: terminating everything; Ctrl-C again exits immediately")
        record = session.folder.read()
        jobs = record.jobs[-1:] if record else ()
        fetched = [f"the results of {job.job} that could be fetched are in {job.home}" for job in jobs]
        failure = Interrupted("interrupted", "; ".join([*fetched, "nothing is left"]))
        if isinstance(stop, Terminated):
            failure.exit_code = 128 + stop.signal_number
        failure = _tear_down(session, result) or failure
    if result.train is not None and result.down is not None and find_fetched_job(session, result.train.job):
        result.train = replace(result.train, fetched=True)
        if not isinstance(failure, Interrupted):
            return result  # `down` fetched the results that `train` could not
    if failure is not None:
        failure.result = result
        raise failure
    return result


def with_idle(session: Session) -> Session:
    """Return the session with the idle time that `run` uses, unless the user set an idle time."""
    spec = session.spec
    if "cluster.idle" in spec.explicit:
        return session
    idle = replace(spec.cluster, idle=IDLE)
    sources = {**spec.sources, "cluster.idle": "run"}
    return session.with_settings(replace(spec, cluster=idle, sources=sources))


def with_gpus(session: Session) -> Session:
    """Return a session whose nodes need one GPU per rank; a node has one rank unless the user set more."""
    needed = session.spec.gpus_needed or 1
    return session.with_settings(replace(session.spec, gpus_needed=needed))


def _up_and_train(
    session: Session,
    result: RunDocument,
    *,
    confirm: Confirm,
    on_lines: Callable[[bytes], None],
    detach: bool,
) -> AwsddpError | None:
    """Run `up` and `train`; once something has been created, a failure is returned instead of raised."""

    def check_plan(change: LaunchPlan | str) -> None:
        if isinstance(change, LaunchPlan):
            check_ranks(session, change)
        confirm(change)

    try:
        result.up = _timed(result, "up", lambda: up(session, confirm=check_plan))
        result.train = _timed(result, "train", lambda: train_job(session, on_lines=on_lines, detach=detach))
    except InUse:  # the cluster existed before, and another job runs on it
        raise
    except Interrupted as error:
        return error if result.up is None else Interrupted(f"{error.message}, nothing is left")
    except AwsddpError as error:
        if result.up is None and isinstance(error, ConfigError | UsageError):
            raise
        result.train = error.result
        return error
    except Exception:  # even a bug in awsddp must not leave nodes running
        _tear_down(session, result)
        raise
    return None


def _tear_down(session: Session, result: RunDocument) -> AwsddpError | None:
    """Run `down`; return its error, or None."""
    try:
        result.down = _timed(result, "down", lambda: down_or_stop(session))
    except AwsddpError as error:
        return error
    return None


def down_or_stop(session: Session) -> DownDocument:
    """Terminate the cluster and return the `down` document; stop the nodes if results cannot be fetched.

    Retries for END_S while AWS does not answer. Raises NodeError or ConfigError if the nodes were stopped.
    Also raises the errors of `down`, with the resources that may still run, their price, and the command that
    terminates them.
    """
    from awsddp.aws.waits import CLOCK, growing_pauses

    until = CLOCK.monotonic() + END_S
    for pause in growing_pauses(2.0, 30.0):
        try:
            return _down_or_stop(session)
        except AwsddpError as error:
            if isinstance(error, NodeError | LeftoverError | ConfigError) and not isinstance(error, InUse):
                raise
            if not error.retryable or CLOCK.monotonic() >= until:
                if not (isinstance(error, CloudError) and error.needs_login):  # the command line adds it
                    add_running_costs(session, error)
                raise
            session.say(
                f"{error.message}: terminating again in {pause:.0f} s, for up to {END_S / 60:.0f} minutes"
            )
            CLOCK.sleep(pause)
    raise AssertionError("growing() never ends")


def _down_or_stop(session: Session) -> DownDocument:
    try:
        return down(session, confirm=lambda _: None)
    except NodeError as error:
        if isinstance(error.__cause__, CloudError) and error.__cause__.retryable:
            raise error.__cause__ from error  # no node failed, but AWS refused the request
        raise _stop_nodes(session, error) from error
    except InUse:
        raise
    except ConfigError as error:  # this machine cannot store the results
        raise _stop_nodes(session, error) from error


def _ignore_broken_pipe(on_lines: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a function that calls `on_lines` and ignores BrokenPipeError, so that the run continues."""

    def deliver(data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            on_lines(data)

    return deliver


def _stop_nodes(session: Session, error: NodeError | ConfigError) -> NodeError | ConfigError:
    """Stop the nodes whose results cannot be fetched, and return the error to raise.

    Raises CloudError if AWS does not answer.
    """
    record = session.folder.read()
    kind: type[NodeError | ConfigError] = NodeError
    next_steps = (
        "awsddp up && awsddp fetch   # once they can be reached\nawsddp down --discard   # terminate them"
    )
    if isinstance(error, ConfigError):  # This machine is at fault: do not advise the user to discard results.
        kind, next_steps = ConfigError, "awsddp up && awsddp down   # once this is corrected"
    try:
        stop(session, confirm=lambda _: None)
    except AwsddpError as second:
        if isinstance(second, CloudError) and second.retryable:
            raise
        why = f"{error.why}\nstopping the nodes failed as well: {second.message}"
        running = f"\nthe nodes still run{describe_cost(record)}" if record is not None else ""
        return kind(error.message, why + running, error.next)
    cost = "" if record is not None and record.target.name == "local" else ", and cost a little,"
    return kind(
        f"{error.message}; the nodes were stopped",
        f"{error.why}\nthe disks are kept{cost} until you terminate the nodes",
        next_steps,
    )


def _timed(result: RunDocument, stage: str, work: Callable[[], _Result]) -> _Result:
    started = time.monotonic()
    try:
        return work()
    finally:
        result.seconds[stage] = round(time.monotonic() - started, 2)
