"""`awsddp fetch`: results home."""

import contextlib
from pathlib import Path

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb
from awsddp.errors import Interrupted


@click.command("fetch", cls=Verb)
@click.option("--job", metavar="JOB", help="Which job.  [default: the last]")
@click.option(
    "--output", "outputs", multiple=True, metavar="PATH", help="Bring this path home as well (repeatable)."
)
@click.option("--to", type=click.Path(path_type=Path), metavar="DIR", help="Where to.  [default: runs/JOB]")
def command(options: Globals, *, job: str | None, outputs: tuple[str, ...], to: Path | None) -> None:
    """Bring a job's results home: its logs, its run folder, new and changed files.

    Where a node is gone or stopped the rest comes home, and what is missing is named (exit 6). A cluster that
    stopped by itself with results is started, after a question, and ended afterwards, after another.
    """
    from awsddp.cli.pages import down_page, sync_page
    from awsddp.cli.questions import down_question, launch_question
    from awsddp.verbs.down import down
    from awsddp.verbs.fetch import fetch

    asked: dict[str, object] = {"job.outputs": list(outputs)} if outputs else {}
    with session.opened(options, asked) as (ctx, show):
        with screen.told_first(options, show, sync_page):
            confirm = launch_question(options, show, ctx.spec)
            result = fetch(ctx, job=job, to=to, anew=bool(outputs), confirm=confirm)
        show.pause()
        if not options.json:
            sync_page(result)
        if result.get("started"):
            with contextlib.suppress(Interrupted):  # the answer was no: idle ends them
                result["down"] = down(ctx, confirm=down_question(options, show))
                show.pause()
                if not options.json:
                    down_page(result["down"])
        if options.json:
            screen.document(result)
