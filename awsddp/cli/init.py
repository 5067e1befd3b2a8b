"""`awsddp init`: a starter awsddp.toml."""

import sys
from pathlib import Path
from typing import Any

import click

from awsddp.cli.options import Globals, Verb
from awsddp.cli.screen import Screen
from awsddp.spec import FILE

_QUESTIONS = (
    ("cluster.region", "AWS region (empty: as AWS is configured)", ""),
    ("cluster.nodes", "Number of nodes", 2),
    ("cluster.instance_type", "Instance type (awsddp plan --offers lists them)", "g6.xlarge"),
    ("cluster.budget_usd", "Terminate the nodes when they have cost, in US dollars", 10.0),
    ("job.script", "Training script (empty: named on the command line)", ""),
    ("env.file", "File with its packages (empty: those of the image)", ""),
)
_GUESSES = {
    "job.script": ("train.py", "main.py"),
    "env.file": ("requirements.txt", "uv.lock", "pyproject.toml", "environment.yml"),
}


@click.command("init", cls=Verb)
def command(options: Globals) -> None:
    """Write a starter awsddp.toml into this folder: every key, its default and meaning.

    At a terminal it asks a few questions first, unless -y or --json is given.
    """
    from awsddp.verbs.init import init, refuse_existing

    screen = Screen(options)
    refuse_existing(Path(FILE))
    ask = sys.stdin.isatty() and sys.stderr.isatty() and not (options.yes or options.json)
    chosen = _answers() if ask else {}
    path = init(Path(), chosen)
    rest = f"{', '.join(chosen)} set, the other keys are" if chosen else "Every key is"
    text = f"Wrote {path}. {rest} commented out. Next: awsddp plan"
    screen.result({"file": str(path)}, lambda _: screen.say(text))


def _answers() -> dict[str, Any]:
    """Ask on the terminal, and return the keys that got a value."""
    answers: dict[str, Any] = {}
    for key, text, default in _QUESTIONS:
        found = [name for name in _GUESSES.get(key, ()) if Path(name).is_file()]
        answer = click.prompt(text, default=found[0] if found else default, err=True)
        answers |= {key: answer} if str(answer) else {}
    return answers
