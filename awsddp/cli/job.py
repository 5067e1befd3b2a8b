"""`awsddp train`, `run`, `jobs`, `logs`, `cancel`, `fetch`, `report`: a job and its results."""

import contextlib
import functools
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from awsddp.cli import invocation
from awsddp.cli.cluster import TERMINATION
from awsddp.cli.command_line import Globals
from awsddp.cli.options import Verb, files
from awsddp.cli.options import jobs as complete_jobs
from awsddp.cli.pages import down_page, fetch_page, job_page, jobs_page, report_page, run_page
from awsddp.cli.plan_page import launch_question
from awsddp.errors import Interrupted, UsageError
from awsddp.settings.spec import Given

if TYPE_CHECKING:
    from awsddp.model.documents import FetchDocument

_SHOWN_BY_RUN = (
    "nodes instance_type gpus spot budget_usd expires sources world_size nproc_per_node outputs name "
    "timeout detach"
)


class Launch(Verb):
    """A verb with [SCRIPT] [-- ARGS]: everything after the first -- goes to the script."""

    finishes = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the script's arguments away before click reads the rest."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["awsddp.script_args"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Show where the script's arguments go."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


def job_overrides(given: dict[str, Given]) -> dict[str, Given]:
    """Return the job's options, its script and the script's arguments as overrides."""
    script, words = given.get("script"), click.get_current_context().meta["awsddp.script_args"]
    found = invocation.overrides(given) | ({} if script is None else {"job.script": script})
    return found | ({"job.args": list(words)} if words else {})


def refuse_command(ctx: click.Context, options: Globals) -> None:
    """Raise UsageError for the command line of a launcher, and for a file behind -- where no script is set:
    they would be the arguments of another program.
    """
    from awsddp.cli.suggestions import starts_ranks

    typed, words = ctx.params["script"], ctx.meta["awsddp.script_args"]
    is_launcher = False
    # Unlike those of Path these are False, too, for a name that no file can have.
    if typed is not None and not os.path.exists(typed) and not ctx.params["module"]:  # noqa: PTH110
        is_launcher = (not Path(typed).suffix or "=" in typed) and starts_ranks([typed, *words])
    elif typed is None and words and not words[0].startswith("-"):
        is_file = words[0].endswith((".py", ".sh")) or os.path.isfile(words[0])  # noqa: PTH113
        is_launcher = starts_ranks(words) or (is_file and invocation.specs(options)[1].job.script is None)
    if is_launcher:
        raise click.UsageError(
            f"{typed or words[0]}: SCRIPT is what each rank runs, and ARGS its arguments", ctx
        )


@click.command("train", cls=Launch)
@click.argument("script", required=False, shell_complete=files)
@invocation.options_of("train")
@click.option("--detach", is_flag=True, help="Return once the ranks run; `awsddp logs -f` follows them.")
@click.pass_context
def train(ctx: click.Context, /, options: Globals, *, detach: bool, **given: Any) -> None:
    """Sync, launch the ranks, stream their logs, fetch the results.

    Nodes (or, with --on, GPUs) run one job at a time: if another one runs, nothing is launched (exit 3),
    unless --after has this one wait.
    Without SCRIPT the bundled program trains on handwritten digits. SCRIPT and ARGS may hold {rank},
    {local_rank}, {world_size}, {local_world_size}, {node_rank}, {nnodes}, {master_addr}, {master_port},
    {init_file}, {resume} and {data}; a doubled brace is a brace.
    """
    from awsddp.job.train import train

    refuse_command(ctx, options)
    with invocation.opened(options, job_overrides(given)) as (session, show):
        page = functools.partial(job_page, next="awsddp down   # terminate the nodes", streamed=not detach)
        with show.partial(page):
            told = train(session, on_lines=show.lines, detach=detach)
        show.result(told, page)
    ctx.exit(0 if detach or told.state == "succeeded" else 1)


class Run(Launch):
    """Takes every option of `up` and `train`; its help page shows the usual ones."""

    ends_cluster = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for param in self.params:
            if isinstance(param, click.Option) and param.name not in _SHOWN_BY_RUN.split():
                param.hidden = True


@click.command("run", cls=Run)
@click.argument("script", required=False, shell_complete=files)
@invocation.options_of("run")
@click.option(
    "--detach", is_flag=True, help="Return once the ranks run; the nodes end themselves afterwards."
)
@click.pass_context
def run(ctx: click.Context, /, options: Globals, *, detach: bool, **given: Any) -> None:
    """up, train and down in one: nothing is left, whatever happens.

    Takes every option of `awsddp up` and `awsddp train`; see their --help for the rest.
    With --detach the nodes end 10 minutes (--idle) after the job: stopped while they hold results, which
    `awsddp fetch` starts again unless all is in S3 (--save-to), else terminated.
    """
    from awsddp.cluster.run import run_job, with_idle

    refuse_command(ctx, options)
    with invocation.opened(options, job_overrides(given), verb="run") as (session, show):
        confirm = launch_question(show, with_idle(session).spec)
        with show.partial(run_page):
            result = run_job(session, confirm=confirm, on_lines=show.lines, detach=detach)
        show.result(result, functools.partial(run_page, detached=detach))
    ctx.exit(0 if detach or (result.train and result.train.state == "succeeded") else 1)


@click.command("jobs", cls=Verb)
@click.argument("names", nargs=-1, metavar="[JOB]...", shell_complete=complete_jobs)
@click.option(
    "--since", metavar="DATE", help="Only what ran, and what it cost, since then (UTC): 2026-11-01."
)
def jobs(options: Globals, *, names: tuple[str, ...], since: str | None) -> None:
    """List the jobs of this machine's clusters, also of ended ones, and what they cost; those of the cluster
    as its nodes report them. With JOB these alone. -v: with what they run and each rank's progress.
    """
    from awsddp.job.jobs import jobs_of_all

    page = functools.partial(jobs_page, verbose=options.verbose > 0, chosen=bool(names))
    with invocation.opened(options) as (session, show), show.partial(page):
        show.result(jobs_of_all(session, names, since=_moment(since)), page)


def _moment(date: str | None) -> datetime | None:
    """Return the moment that a date, or a date with a time, names in UTC. Raises UsageError."""
    try:
        moment = datetime.fromisoformat(date) if date is not None else None
    except ValueError:
        raise UsageError(
            f"--since: invalid date {date!r}", "", "use 2026-11-01 or 2026-11-01T12:00"
        ) from None
    return moment.replace(tzinfo=moment.tzinfo or UTC) if moment is not None else None


@click.command("logs", cls=Verb)
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("-f", "--follow", is_flag=True, help="Follow to the job's end, then fetch its results.")
@click.option(
    "-n",
    "--tail",
    "last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the last N lines, and with -f what follows.",
)
@click.option("--rank", "ranks", type=int, multiple=True, metavar="N", help="Only this rank (repeatable).")
@click.pass_context
def logs(
    ctx: click.Context,
    /,
    options: Globals,
    *,
    job: str | None,
    follow: bool,
    last: int | None,
    ranks: tuple[int, ...],
) -> None:
    """Show the log lines of JOB (default: the last one).

    The last lines of several ranks are about equally many of each.
    """
    from awsddp.job.logs import logs

    with invocation.opened(options) as (session, show):
        step = "awsddp down   # terminate the nodes" if follow else ""
        page = functools.partial(job_page, next=step, streamed=not (last or ranks))
        with show.partial(page):
            result = logs(session, job=job, follow=follow, on_lines=show.lines, last=last, ranks=ranks)
        show.result(result, page)
    ctx.exit(0 if not follow or result.state == "succeeded" else 1)


@click.command("cancel", cls=Verb)
@click.argument("names", nargs=-1, metavar="[JOB]...", shell_complete=complete_jobs)
def cancel(options: Globals, *, names: tuple[str, ...]) -> None:
    """End each JOB (default: the last one running; all: those that run or wait): SIGTERM, then SIGKILL after
    `job.grace`.

    Its results stay on the nodes until `awsddp fetch`; a client that follows the job fetches them.
    """
    from awsddp.job.cancel import cancel_jobs

    with invocation.opened(options) as (session, show):
        ended = cancel_jobs(session, names)
        for one in ended:
            show.page(one, job_page)
        show.result(ended if _are_several(names) else ended[0], lambda _: None)


def _are_several(names: tuple[str, ...]) -> bool:
    """Tell whether the result of a verb is a list of documents."""
    return len(names) > 1 or "all" in names


@click.command("fetch", cls=Verb)
@click.argument("names", nargs=-1, metavar="[JOB]...", shell_complete=complete_jobs)
@click.option("--output", "outputs", multiple=True, metavar="PATH", help="Also fetch this path (repeatable).")
def fetch(options: Globals, *, names: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    """Fetch the results of each JOB (default: the last one; all: all on the nodes): its logs, its run folder,
    new and changed files.

    If a node is gone or stopped, the rest is fetched and the missing part is named (exit 6). A cluster that
    stopped by itself with results on it is started and terminated afterwards; both are asked first. What is
    all in S3 comes from there.
    """
    from awsddp.cluster.down import down
    from awsddp.cluster.up import up
    from awsddp.job.fetch import fetch, fetch_jobs

    explicit: dict[str, Given] = {"job.outputs": list(outputs)} if outputs else {}
    with invocation.opened(options, explicit) as (session, show), show.partial(fetch_page):
        confirm = launch_question(show, session.spec)
        start = functools.partial(up, session, confirm=confirm)

        def fetch_one(name: str | None = None) -> "FetchDocument":
            return fetch(session, job=name, anew=bool(outputs), start=start)

        on_document = functools.partial(show.page, page=fetch_page)
        if _are_several(names):
            found = fetch_jobs(session, names, fetch_one=fetch_one, on_document=on_document)
        else:
            found = [fetch_one(*names)]
            on_document(found[0])
        if any(one.started for one in found):
            with contextlib.suppress(Interrupted):  # the answer was no: the idle watchdog ends them
                found[-1].down = down(session, confirm=show.question(*TERMINATION))
                show.page(found[-1].down, down_page)
        show.result(found if _are_several(names) else found[0], lambda _: None)


@click.command("report", cls=Verb)
@click.argument("job", required=False, shell_complete=complete_jobs)
def report(options: Globals, *, job: str | None) -> None:
    """Write JOB (the last one) as one HTML file: state, cause, loss, ranks, cost, how to run it again."""
    from awsddp.job.report import write_report

    with invocation.opened(options) as (session, show):
        show.result(write_report(session, job=job), report_page)
