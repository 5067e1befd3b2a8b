"""`awsddp fetch`: results home."""

import contextlib

import click

from awsddp.cli import down as down_verb
from awsddp.cli import session
from awsddp.cli.completion import jobs
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import down_page, sync_page
from awsddp.cli.questions import launch_question
from awsddp.errors import Interrupted


@click.command("fetch", cls=Verb)
@click.argument("job", required=False, shell_complete=jobs)
@click.option("--output", "outputs", multiple=True, metavar="PATH", help="Also fetch this path (repeatable).")
def command(options: Globals, *, job: str | None, outputs: tuple[str, ...]) -> None:
    """Fetch the results of JOB (default: the last one): its logs, its run folder, new and changed files.

    If a node is gone or stopped, the rest is fetched and the missing part is named (exit 6). A cluster that
    stopped by itself with results on it is started and terminated afterwards; both are asked first.
    """
    from awsddp.verbs.down import down
    from awsddp.verbs.fetch import fetch

    explicit: dict[str, object] = {"job.outputs": list(outputs)} if outputs else {}
    with session.opened(options, explicit) as (ctx, show), show.partial(sync_page):
        confirm = launch_question(show, ctx.spec)
        result = fetch(ctx, job=job, anew=bool(outputs), confirm=confirm)
        show.page(result, sync_page)
        if result.get("started"):
            with contextlib.suppress(Interrupted):  # the answer was no: the idle watchdog ends them
                result["down"] = down(ctx, confirm=show.question(*down_verb.QUESTION))
                show.page(result["down"], down_page)
        show.result(result, lambda _: None)
