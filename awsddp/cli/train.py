"""`awsddp train`: sync, launch, stream, bring home."""

from typing import Any

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import job_page


class Launch(Verb):
    """A verb with [SCRIPT] [-- ARGS]: everything after the first -- goes to the script."""

    allow_extra_args = True  # so that we can say where they belong
    finishes = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the script's arguments away before click reads the rest."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["awsddp.script_args"] = tuple(args[at + 1 :])
        rest = super().parse_args(ctx, args[:at])
        if rest:
            ctx.fail(f"Unexpected arguments: {' '.join(rest)}. The script's own arguments follow --")
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Show where the script's arguments go."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


def job_overrides(given: dict[str, Any]) -> dict[str, object]:
    """Return the job's options, its script and the script's arguments as overrides."""
    found = session.overrides(given)
    if given.get("script") is not None:
        found["job.script"] = given["script"]
    words = click.get_current_context().meta["awsddp.script_args"]
    return found | ({"job.args": list(words)} if words else {})


@click.command("train", cls=Launch)
@click.argument("script", required=False)
@session.options_of(session.JOB_OPTIONS)
@click.option("--detach", is_flag=True, help="Return once the ranks run; `awsddp logs -f` follows them.")
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, detach: bool, **given: Any) -> None:
    """Sync, launch the ranks, stream their logs, fetch the results.

    A node runs one job at a time: if another one is running, nothing is sent or launched (exit 3).
    Without SCRIPT the bundled program trains on handwritten digits. SCRIPT and ARGS may hold {rank},
    {local_rank}, {world_size}, {local_world_size}, {node_rank}, {nnodes}, {master_addr}, {master_port} and
    {init_file}; a doubled brace is a brace.
    """
    from awsddp.verbs.train import train

    with session.opened(options, job_overrides(given)) as (context, show):
        with show.partial(job_page):
            result = train(context, on_lines=show.lines, detach=detach)
        show.result(result, job_page)
    ctx.exit(0 if detach or result["state"] == "succeeded" else 1)
