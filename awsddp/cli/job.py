"""The commands `awsddp train`, `run`, `jobs`, `logs`, `cancel`, `fetch` and `report`."""

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
from awsddp.cli.options import Verb, complete_files
from awsddp.cli.options import complete_jobs as complete_jobs
from awsddp.cli.pages import down_page, fetch_page, job_page, jobs_page, report_page, run_page
from awsddp.cli.plan_page import launch_question
from awsddp.errors import Interrupted, UsageError
from awsddp.model.records import ACTIVE
from awsddp.settings.spec import OptionValue

if TYPE_CHECKING:
    from awsddp.model.documents import FetchDocument

_SHOWN_BY_RUN = (
    "nodes instance_type gpus spot budget_usd expires sources world_size nproc_per_node outputs name "
    "timeout detach"
)


class Launch(Verb):
    """A verb with [SCRIPT] [-- ARGS]; everything after the first -- is passed to the script."""

    finishes = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remove the script's arguments, then let click parse the other arguments."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta["awsddp.script_args"] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Add the script's arguments to the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


def read_job_overrides(values: dict[str, OptionValue]) -> dict[str, OptionValue]:
    """Return the job's options, its script and its arguments as settings that override awsddp.toml."""
    script, args = values.get("script"), click.get_current_context().meta["awsddp.script_args"]
    script_overrides: dict[str, OptionValue] = {} if script is None else {"job.script": script}
    args_overrides: dict[str, OptionValue] = {"job.args": list(args)} if args else {}
    return invocation.read_overrides(values) | script_overrides | args_overrides


def refuse_launcher(ctx: click.Context, options: Globals) -> None:
    """Raise UsageError for a launcher's command line, or for a file after `--` if no script is set.

    Otherwise these words would become the bundled program's arguments.
    """
    from awsddp.cli.suggestions import is_launcher_command

    script, args = ctx.params["script"], ctx.meta["awsddp.script_args"]
    is_refused = False
    # Unlike Path's methods, os.path's return False for a name that no file can have.
    if script is not None and not os.path.exists(script) and not ctx.params["module"]:  # noqa: PTH110
        is_refused = (not Path(script).suffix or "=" in script) and is_launcher_command([script, *args])
    elif script is None and args and not args[0].startswith("-"):
        is_file = args[0].endswith((".py", ".sh")) or os.path.isfile(args[0])  # noqa: PTH113
        is_refused = is_launcher_command(args) or (
            is_file and invocation.specs(options)[1].job.script is None
        )
    if is_refused:
        raise click.UsageError(
            f"{script or args[0]}: SCRIPT is the program of each rank, and ARGS are its arguments", ctx
        )


@click.command("train", cls=Launch)
@click.argument("script", required=False, shell_complete=complete_files)
@invocation.add_options("train")
@click.option("--detach", is_flag=True, help="Return when the ranks run; `awsddp logs -f` follows the job.")
@click.pass_context
def train(ctx: click.Context, /, options: Globals, *, detach: bool, **values: Any) -> None:
    """Sync the project, start the ranks, stream their logs, fetch the results.

    Nodes (or, with --on, GPUs) run one job at a time. While another job runs, nothing is started (exit 3);
    with --after the new job waits instead.
    Without SCRIPT the bundled program trains on handwritten digits. SCRIPT and ARGS may contain {rank},
    {local_rank}, {world_size}, {local_world_size}, {node_rank}, {nnodes}, {master_addr}, {master_port},
    {init_file}, {resume} and {data}; write {{ and }} for braces.
    """
    from awsddp.cluster.train import train_job

    refuse_launcher(ctx, options)
    with invocation.opened(options, read_job_overrides(values)) as (session, show):
        next_step = "awsddp down   # terminate the nodes"
        page = functools.partial(job_page, next_step=next_step, streamed=not detach)
        with show.partial_result(page):
            job = train_job(session, on_lines=show.lines, detach=detach)
        show.result(job, page)
    ctx.exit(0 if detach or job.state == "succeeded" else 1)


@click.command("recover", cls=Verb)
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("--detach", is_flag=True, help="Return when the ranks run; do nothing while the job runs.")
@click.pass_context
def recover(ctx: click.Context, /, options: Globals, *, job: str | None, detach: bool) -> None:
    """Continue JOB (default: the last job) after a machine's fault, from its newest complete checkpoint.

    A machine's fault is a spot reclaim, a lost or powered off node, or a failed GPU or network device.
    Failed nodes are replaced. If AWS has no capacity for them, all nodes are launched elsewhere once their
    results are fetched. A job that failed by its own error is not continued. Type this in the project folder
    of the machine that started the job. Without --detach, the job is followed to its end, with further
    recoveries.
    """
    from awsddp.cluster.recover import recover

    with invocation.opened(options) as (session, show):
        page = functools.partial(
            job_page, next_step="awsddp down   # terminate the nodes", streamed=not detach
        )
        with show.partial_result(page):
            document = recover(session, job=job, on_lines=show.lines, detach=detach)
        show.result(document, page)
    ctx.exit(0 if document.state in ("succeeded", *ACTIVE) else 1)


class Run(Launch):
    """The verb `run`, which takes the options of `up` and `train`. The help lists only the usual options."""

    ends_cluster = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for param in self.params:
            if isinstance(param, click.Option) and param.name not in _SHOWN_BY_RUN.split():
                param.hidden = True


@click.command("run", cls=Run)
@click.argument("script", required=False, shell_complete=complete_files)
@invocation.add_options("run")
@click.option(
    "--detach", is_flag=True, help="Return when the ranks run; the nodes end automatically after the job."
)
@click.pass_context
def run(ctx: click.Context, /, options: Globals, *, detach: bool, **values: Any) -> None:
    """Run up, train and down in one command: the nodes are terminated even after a failure.

    `awsddp run` takes every option of `awsddp up` and `awsddp train`; the help pages of these two verbs show
    the options that are not listed below. With --detach the nodes end 10 minutes (--idle) after the job:
    nodes with results that are not in S3 (--save-to) are stopped, and all other nodes are terminated.
    `awsddp fetch` starts stopped nodes again.
    """
    from awsddp.cluster.run import run_job, with_idle

    refuse_launcher(ctx, options)
    with invocation.opened(options, read_job_overrides(values), verb="run") as (session, show):
        confirm = launch_question(show, with_idle(session).spec)
        with show.partial_result(run_page):
            result = run_job(session, confirm=confirm, on_lines=show.lines, detach=detach)
        show.result(result, functools.partial(run_page, detached=detach))
    ctx.exit(0 if detach or (result.train and result.train.state == "succeeded") else 1)


@click.command("jobs", cls=Verb)
@click.argument("names", nargs=-1, metavar="[JOB]...", shell_complete=complete_jobs)
@click.option("--since", metavar="DATE", help="Show only jobs and costs since this date (UTC): 2026-11-01.")
def jobs(options: Globals, *, names: tuple[str, ...], since: str | None) -> None:
    """List the jobs of this machine's clusters, including terminated ones, with their cost.

    The jobs of the selected cluster (-c) are shown as its nodes report them. With JOB, only these jobs are
    shown. With -v, the jobs' commands and each rank's progress are shown too.
    """
    from awsddp.job.jobs import list_jobs

    page = functools.partial(jobs_page, verbose=options.verbose > 0, chosen=bool(names))
    with invocation.opened(options) as (session, show), show.partial_result(page):
        show.result(list_jobs(session, names, since=_parse_date(since)), page)


def _parse_date(text: str | None) -> datetime | None:
    """Convert a date, or a date with a time, to a time in UTC. Raises UsageError."""
    try:
        date = datetime.fromisoformat(text) if text is not None else None
    except ValueError:
        raise UsageError(
            f"--since: invalid date {text!r}", "", "use 2026-11-01 or 2026-11-01T12:00"
        ) from None
    return date.replace(tzinfo=date.tzinfo or UTC) if date is not None else None


@click.command("logs", cls=Verb)
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("-f", "--follow", is_flag=True, help="Follow the job to its end, then fetch its results.")
@click.option(
    "-n",
    "--tail",
    "last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show only the last N lines, and with -f all new lines.",
)
@click.option(
    "--rank", "ranks", type=int, multiple=True, metavar="N", help="Show only this rank (repeatable)."
)
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
    """Show the log lines of JOB (default: the last job).

    With --tail, about the same number of lines of each rank is shown.
    """
    from awsddp.job.logs import logs

    with invocation.opened(options) as (session, show):
        next_step = "awsddp down   # terminate the nodes" if follow else ""
        page = functools.partial(job_page, next_step=next_step, streamed=not (last or ranks))
        with show.partial_result(page):
            result = logs(session, job=job, follow=follow, on_lines=show.lines, last=last, ranks=ranks)
        show.result(result, page)
    ctx.exit(0 if not follow or result.state == "succeeded" else 1)


@click.command("cancel", cls=Verb)
@click.argument("names", nargs=-1, metavar="[JOB]...", shell_complete=complete_jobs)
def cancel(options: Globals, *, names: tuple[str, ...]) -> None:
    """End each JOB (default: the last running job; all: every running or waiting job).

    The ranks get SIGTERM, and SIGKILL after `job.grace`. The results stay on the nodes until `awsddp fetch`;
    a client that follows the job fetches them.
    """
    from awsddp.job.cancel import cancel_jobs

    with invocation.opened(options) as (session, show):
        cancelled = cancel_jobs(session, names)
        for job in cancelled:
            show.page(job, job_page)
        show.result(cancelled if _returns_list(names) else cancelled[0], lambda _: None)


def _returns_list(names: tuple[str, ...]) -> bool:
    """Return True if a verb's result is a list of documents."""
    return len(names) > 1 or "all" in names


@click.command("fetch", cls=Verb)
@click.argument("names", nargs=-1, metavar="[JOB]...", shell_complete=complete_jobs)
@click.option("--output", "outputs", multiple=True, metavar="PATH", help="Also fetch this path (repeatable).")
def fetch(options: Globals, *, names: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    """Fetch the results of each JOB (default: the last job; all: every job on the nodes).

    A job's results are its logs, its run folder, and new and changed files. If a node is gone or stopped, the
    results of the other nodes are fetched, and the missing part is reported (exit 6). If all nodes are
    stopped, the cluster is started for the download and terminated afterwards; both steps need your consent.
    Results that are completely in S3 are downloaded from there.
    """
    from awsddp.cluster.down import down
    from awsddp.cluster.up import up
    from awsddp.job.fetch import fetch, fetch_jobs

    explicit: dict[str, OptionValue] = {"job.outputs": list(outputs)} if outputs else {}
    with invocation.opened(options, explicit) as (session, show), show.partial_result(fetch_page):
        confirm = launch_question(show, session.spec)
        start = functools.partial(up, session, confirm=confirm)

        def fetch_one(name: str | None = None) -> "FetchDocument":
            return fetch(session, job=name, refetch=bool(outputs), start=start)

        on_document = functools.partial(show.page, page=fetch_page)
        if _returns_list(names):
            documents = fetch_jobs(session, names, fetch_one=fetch_one, on_document=on_document)
        else:
            documents = [fetch_one(*names)]
            on_document(documents[0])
        if any(document.started for document in documents):
            with contextlib.suppress(Interrupted):  # if the user refuses, the idle watchdog ends the nodes
                documents[-1].down = down(session, confirm=show.question(*TERMINATION))
                show.page(documents[-1].down, down_page)
        show.result(documents if _returns_list(names) else documents[0], lambda _: None)


@click.command("report", cls=Verb)
@click.argument("job", required=False, shell_complete=complete_jobs)
def report(options: Globals, *, job: str | None) -> None:
    """Write an HTML page about JOB (default: the last job).

    The page shows the job's state, cause, loss, ranks and cost, and the command that runs the job again.
    """
    from awsddp.job.report import write_report

    with invocation.opened(options) as (session, show):
        show.result(write_report(session, job=job), report_page)
