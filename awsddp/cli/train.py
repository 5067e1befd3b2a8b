"""`awsddp train`: sync, launch, stream, fetch."""

import shlex
from typing import Any

import click

from awsddp.cli import session
from awsddp.cli.completion import files
from awsddp.cli.options import Globals, Verb, dashed
from awsddp.cli.pages import job_page
from awsddp.errors import UsageError


class Launch(Verb):
    """A verb with [SCRIPT] [-- ARGS]: everything after the first -- goes to the script."""

    allow_extra_args = True  # so that we can say where they belong
    finishes = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the script's arguments away before click reads the rest."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["awsddp.script_args"] = tuple(args[at + 1 :])
        try:
            rest = super().parse_args(ctx, args[:at])
        except click.NoSuchOption as error:
            raise _for_the_script(ctx, args, error) from None
        if rest and not ctx.resilient_parsing:
            ctx.fail(f"Unexpected arguments: {' '.join(rest)}. The script's own arguments follow --")
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Show where the script's arguments go."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


def _for_the_script(ctx: click.Context, args: list[str], error: click.NoSuchOption) -> Exception:
    """Return the error, with the right line where the unknown option stands behind a script."""
    names = [dashed(word.partition("=")[0]) for word in args]
    at = names.index(error.option_name) if error.option_name in names else 0
    if not any(word.endswith((".py", ".sh")) or word in ("-m", "--module") for word in args[:at]):
        return error
    tail = [word for word in args[at:] if word != "--"]
    return UsageError(
        error.format_message().partition(" (")[0].partition(" Did you")[0],
        "the script's own options follow --",
        shlex.join(["awsddp", str(ctx.info_name), *args[:at], "--", *tail]),
    )


def job_overrides(given: dict[str, Any]) -> dict[str, object]:
    """Return the job's options, its script and the script's arguments as overrides."""
    found = session.overrides(given)
    if given.get("script") is not None:
        found["job.script"] = given["script"]
    words = click.get_current_context().meta["awsddp.script_args"]
    return found | ({"job.args": list(words)} if words else {})


@click.command("train", cls=Launch)
@click.argument("script", required=False, shell_complete=files)
@session.options_of("train")
@click.option("--detach", is_flag=True, help="Return once the ranks run; `awsddp logs -f` follows them.")
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, detach: bool, **given: Any) -> None:
    """Sync, launch the ranks, stream their logs, fetch the results.

    Nodes (or, with --on, GPUs) run one job at a time: if another one runs, nothing is launched (exit 3),
    unless --after has this one wait.
    Without SCRIPT the bundled program trains on handwritten digits. SCRIPT and ARGS may hold {rank},
    {local_rank}, {world_size}, {local_world_size}, {node_rank}, {nnodes}, {master_addr}, {master_port},
    {init_file} and {resume}; a doubled brace is a brace.
    """
    from awsddp.verbs.train import train

    with session.opened(options, job_overrides(given)) as (context, show):
        with show.partial(job_page):
            result = train(context, on_lines=show.lines, detach=detach)
        show.result(result, job_page)
    ctx.exit(0 if detach or result["state"] == "succeeded" else 1)
