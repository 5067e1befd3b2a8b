"""`awsddp` without a verb, and `awsddp init`: what to type first, here."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from awsddp.cli import session
from awsddp.cli.command_line import Globals
from awsddp.cli.options import Verb
from awsddp.cli.render import line, place_name
from awsddp.cli.screen import Screen
from awsddp.report import money
from awsddp.returns import InitDocument
from awsddp.spec import FILE

if TYPE_CHECKING:
    from awsddp.returns import HomeDocument, KnownCluster

_FIRST = """\
No clusters on this machine yet. To begin:

  awsddp run --local -y      rehearse everything here: no AWS account, no cost
  awsddp plan                show two nodes on EC2 and their price
  awsddp up                  launch them; then: awsddp train, awsddp down
  awsddp init                write a starter awsddp.toml into this folder
"""
_PACKAGES = "requirements.txt uv.lock pyproject.toml environment.yml"
_QUESTIONS = (
    ("cluster.region", "AWS region (empty: as AWS is configured)", "", ""),
    ("cluster.nodes", "Number of nodes", 2, ""),
    ("cluster.instance_type", "Instance type (awsddp plan --offers lists them)", "g6.xlarge", ""),
    ("cluster.budget_usd", "Terminate the nodes when they have cost, in US dollars", 10.0, ""),
    ("job.script", "Training script (empty: named on the command line)", "", "train.py main.py"),
    ("env.file", "File with its packages (empty: those of the image)", "", _PACKAGES),
)
"""The key, its question and its default, or the first of these files that is there."""


def show_home(options: Globals) -> None:
    """Show the clusters that this machine knows, and the next commands for each."""
    from awsddp.status import home

    with session.opened(options) as (cluster, show):
        show.result(home(cluster), home_page)


def home_page(known: "HomeDocument") -> None:
    """Show the clusters of `home`, or how to start."""
    for cluster in known.clusters:
        line(*_lines(cluster))
    if not known.clusters:
        print(_FIRST)
    if known.local_cloud:
        line("The local cloud is running: awsddp local status, awsddp local stop")
    line("All commands: awsddp --help")


def _lines(cluster: "KnownCluster") -> list[str]:
    name = "" if cluster.cluster == "default" else f" -c {cluster.cluster}"
    cost = "" if cluster.target == "local" else f", {money(cluster.price_usd_per_hour)} per hour"
    until = "expired at" if cluster.expired else "expires at"
    running = [job.job for job in cluster.jobs if job.state == "running"]
    return [
        f"Cluster {cluster.cluster}: {cluster.nodes} x {cluster.instance_type} in "
        f"{place_name(cluster.target, cluster.region)}{cost}; {until} {cluster.expires}",
        *(f"  job {job} was running when last seen: awsddp{name} logs -f {job}" for job in running),
        f"  awsddp{name} status   # its current state",
        f"  awsddp{name} train    # run a job on it",
        f"  awsddp{name} down     # terminate it",
    ]


@click.command("init", cls=Verb)
def init(options: Globals) -> None:
    """Write a starter awsddp.toml into this folder: every key, its default and meaning.

    At a terminal it asks a few questions first, unless -y or --json is given.
    """
    from awsddp.config import refuse_existing, write_starter

    screen = Screen(options)
    refuse_existing(Path(FILE))
    ask = sys.stdin.isatty() and sys.stderr.isatty() and not (options.yes or options.json)
    chosen = _answers() if ask else {}
    path = write_starter(Path(), chosen)
    rest = f"{', '.join(chosen)} set, the other keys are" if chosen else "Every key is"
    text = f"Wrote {path}. {rest} commented out. Next: awsddp plan"
    screen.result(InitDocument(file=str(path)), lambda _: screen.say(text))
    screen.close()


def _answers() -> dict[str, str | int | float]:
    """Ask on the terminal, and return the keys that got a value."""
    answers: dict[str, str | int | float] = {}
    for key, text, default, files in _QUESTIONS:
        found = next((name for name in files.split() if Path(name).is_file()), default)
        answer = click.prompt(text, default=found, err=True)
        answers |= {key: answer} if str(answer) else {}
    return answers
