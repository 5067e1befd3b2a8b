"""`awsddp init`: a starter awsddp.toml."""

from pathlib import Path

import click

from awsddp.cli.options import Globals, Verb
from awsddp.cli.screen import Screen


@click.command("init", cls=Verb)
def command(options: Globals) -> None:
    """Write a starter awsddp.toml into this folder: every key, its default and meaning."""
    from awsddp.verbs.init import init

    path, screen = init(Path()), Screen(options)
    screen.result(
        {"file": str(path)},
        lambda _: screen.say(f"Wrote {path}. Every key is commented out. Next: awsddp plan"),
    )
