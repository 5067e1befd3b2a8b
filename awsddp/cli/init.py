"""`awsddp init`: a starter awsddp.toml."""

from pathlib import Path

import click

from awsddp.cli import screen
from awsddp.cli.options import Globals, Verb


@click.command("init", cls=Verb)
def command(options: Globals) -> None:
    """Write a starter awsddp.toml into this folder: every key, its default, what it means."""
    from awsddp.verbs.init import init

    path = init(Path())
    if options.json:
        screen.document({"file": str(path)})
    else:
        screen.say(options, f"Wrote {path}. Every key is a comment until you change it. Next: awsddp plan")
