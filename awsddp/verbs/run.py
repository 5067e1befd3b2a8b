"""run: up, train, fetch and down in one. Nothing is left, whatever fails."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from awsddp.errors import (
    AwsddpError,
    CloudError,
    ConfigError,
    Interrupted,
    InUse,
    LeftoverError,
    LetGo,
    NodeError,
    UsageError,
)
from awsddp.plan.records import LaunchPlan
from awsddp.records import Target
from awsddp.verbs.advice import what_runs_on
from awsddp.verbs.context import Context
from awsddp.verbs.converging import Confirm
from awsddp.verbs.down import down
from awsddp.verbs.results import whole_at_home
from awsddp.verbs.stop import stop
from awsddp.verbs.train import check, check_ranks, train
from awsddp.verbs.up import up

IDLE = "10m"
"""The idle time of a run's nodes: no user logs in to them."""
END_S = 600.0
"""How long a run tries to terminate its nodes while AWS does not answer; then they are idle anyway."""


@dataclass(kw_only=True)
class RunResult:
    """Each stage's document (None if it was not reached), its time in seconds, and the final error."""

    up: dict[str, Any] | None = None
    train: dict[str, Any] | None = None
    down: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    error: AwsddpError | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the job succeeded."""
        return self.train is not None and self.train["state"] == "succeeded"

    def document(self) -> dict[str, Any]:
        """Return the `run` document."""
        return {"up": self.up, "train": self.train, "down": self.down, "seconds": self.seconds}


def run(
    ctx: Context, *, confirm: Confirm, on_lines: Callable[[bytes], None], detach: bool = False
) -> RunResult:
    """Launch a cluster, run the job, fetch its results and terminate the cluster, also after a failure.

    With `detach` return once the ranks run; the nodes shut down when they are idle. Raises what `up` raises
    before anything was created, UsageError for ranks that do not fit the nodes, and InUse: a cluster on which
    another job runs stays as it is. A later failure is the result's `error`.
    """
    check(ctx, detach=detach)
    ctx = with_gpus(with_idle(ctx))
    result = RunResult()
    try:
        _work(ctx, result, confirm=confirm, on_lines=_unheard(on_lines), detach=detach)
        if not (detach and result.error is None):
            _end(ctx, result)
    except KeyboardInterrupt as stop:
        ctx.say("interrupted: terminating everything; Ctrl-C again exits immediately")
        result.error = Interrupted(
            "interrupted", "the results that could be fetched are here, nothing is left"
        )
        if isinstance(stop, LetGo):
            result.error.exit_code = 128 + stop.number
        _end(ctx, result)
    if result.train is not None and result.down is not None and whole_at_home(ctx, result.train["job"]):
        result.train["fetched"] = True
        if not isinstance(result.error, Interrupted):
            result.error = None  # what `train` could not, `down` has
    return result


def with_idle(ctx: Context) -> Context:
    """Return the context with the idle time of a run, unless the user set one."""
    spec = ctx.spec
    if "cluster.idle" in spec.explicit:
        return ctx
    cluster = replace(spec.cluster, idle=IDLE)
    return replace(ctx, spec=replace(spec, cluster=cluster, sources={**spec.sources, "cluster.idle": "run"}))


def with_gpus(ctx: Context) -> Context:
    """Return the context with a GPU per node for each of its ranks: one rank, unless the user set more."""
    needed = ctx.spec.gpus_needed or 1
    return replace(ctx, spec=replace(ctx.spec, gpus_needed=needed))


def _work(
    ctx: Context, result: RunResult, *, confirm: Confirm, on_lines: Callable[[bytes], None], detach: bool
) -> None:
    """Run `up` and `train`; a failure after something was created is the result's error."""

    def fitting(what: LaunchPlan | str) -> None:
        if isinstance(what, LaunchPlan):
            check_ranks(ctx, what)
        confirm(what)

    try:
        result.up = _timed(result, "up", lambda: up(ctx, confirm=fitting))
        result.train = _timed(result, "train", lambda: train(ctx, on_lines=on_lines, detach=detach))
    except InUse:  # the cluster was there before, and another job runs on it
        raise
    except Interrupted as error:
        result.error = error if result.up is None else Interrupted(f"{error.message}, nothing is left")
    except AwsddpError as error:
        if result.up is None and isinstance(error, ConfigError | UsageError):
            raise
        result.train, result.error = error.result, error
    except Exception:  # a defect of ours must not leave a bill either
        _end(ctx, result)
        raise


def _end(ctx: Context, result: RunResult) -> None:
    try:
        result.down = _timed(result, "down", lambda: down_or_stop(ctx))
    except AwsddpError as error:
        result.error = error


def down_or_stop(ctx: Context) -> dict[str, Any]:
    """Terminate the cluster and return the `down` document; stop the nodes if results cannot be fetched.

    Tries again for END_S while AWS does not answer. Raises NodeError that says that the nodes were stopped,
    and what `down` raises, with what may still run, its price and how to end it.
    """
    from awsddp.aws.waits import CLOCK, growing

    until = CLOCK.monotonic() + END_S
    for pause in growing(2.0, 30.0):
        try:
            return _down_or_stop(ctx)
        except (NodeError, LeftoverError):
            raise
        except AwsddpError as error:
            if not error.retryable or CLOCK.monotonic() >= until:
                if not (isinstance(error, CloudError) and error.needs_login):  # the command line says it then
                    what_runs_on(ctx, error)
                raise
            ctx.say(
                f"{error.message}: terminating again in {pause:.0f} s, for up to {END_S / 60:.0f} minutes"
            )
            CLOCK.sleep(pause)
    raise AssertionError("growing() never ends")


def _down_or_stop(ctx: Context) -> dict[str, Any]:
    try:
        return down(ctx, confirm=lambda _: None)
    except NodeError as error:
        if isinstance(error.__cause__, CloudError) and error.__cause__.retryable:
            raise error.__cause__ from error  # AWS kept the results from being released, no node
        raise _stopped(ctx, error) from error


def _unheard(on_lines: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return `on_lines` without its BrokenPipeError: the run must reach its end."""

    def tell(data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            on_lines(data)

    return tell


def _stopped(ctx: Context, error: NodeError) -> NodeError:
    """Stop the nodes whose results cannot be fetched, and return the error that says so.

    Raises CloudError where AWS does not answer.
    """
    target = record.target if (record := ctx.folder.read()) is not None else Target()
    try:
        stop(ctx, confirm=lambda _: None)
    except AwsddpError as second:
        if isinstance(second, CloudError) and second.retryable:
            raise
        why = f"{error.why}\nstopping the nodes failed as well: {second.message}"
        return NodeError(error.message, f"{why}\nthey are still running{target.costs}", error.next)
    cost = "" if target.name == "local" else ", and cost a little,"
    return NodeError(
        f"{error.message}; the nodes were stopped",
        f"{error.why}\ntheir disks are kept{cost} until you terminate them",
        "awsddp up && awsddp fetch   # once they can be reached\nawsddp down --discard   # terminate them",
    )


def _timed(result: RunResult, stage: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        return work()
    finally:
        result.seconds[stage] = round(time.monotonic() - started, 2)
