"""`awsddp fetch`: results home."""

from pathlib import Path

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("fetch", cls=Verb)
@click.option("--job", metavar="JOB", help="Which job.  [default: the last]")
@click.option(
    "--output", "outputs", multiple=True, metavar="PATH", help="Bring this path home as well (repeatable)."
)
@click.option("--to", type=click.Path(path_type=Path), metavar="DIR", help="Where to.  [default: runs/JOB]")
def command(options: Globals, *, job: str | None, outputs: tuple[str, ...], to: Path | None) -> None:
    """Bring a job's results home: its logs, its run folder, new and changed files.

    Where a node is gone or stopped the rest comes home, and what is missing is named (exit 6).
    """
    from awsddp.cli.pages import sync_page
    from awsddp.verbs.fetch import fetch

    asked: dict[str, object] = {"job.outputs": list(outputs)} if outputs else {}
    with session.opened(options, asked) as (ctx, show):
        with screen.told_first(options, show, sync_page):
            result = fetch(ctx, job=job, to=to)
        show.pause()
        screen.document(result) if options.json else sync_page(result)
