"""The command `awsddp` without a verb (an overview of the clusters) and `awsddp init`."""

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from awsddp.cli import invocation
from awsddp.cli.command_line import COMMAND, Globals
from awsddp.cli.options import Verb
from awsddp.cli.screen import Screen
from awsddp.cli.table import line, place_name
from awsddp.errors import ConfigError
from awsddp.model.documents import InitDocument
from awsddp.settings.spec import FILE, SETTINGS, JobSpec, OptionValue
from awsddp.state import awsddp_home
from awsddp.util.formatting import counted, money

if TYPE_CHECKING:
    from awsddp.model.documents import HomeDocument, KnownCluster

_FIRST = """\
  # rehearse on this machine: no AWS account, no cost (without train.py: a sample program)
  awsddp run --local train.py --nodes 2 --instance-type g6.xlarge --budget 2
  # the same on EC2: shows the price, asks, and terminates everything at the end
  awsddp run train.py --nodes 2 --instance-type g6.xlarge --budget 2
  # write a starter awsddp.toml into this folder
  awsddp init
"""
_PACKAGES = "requirements.txt uv.lock pyproject.toml environment.yml"
_QUESTIONS = (
    ("cluster.region", "AWS region (empty: the region of your AWS configuration)", "", ""),
    ("cluster.nodes", "Number of nodes", 2, ""),
    ("cluster.instance_type", "Instance type (awsddp plan --offers lists them)", "g6.xlarge", ""),
    ("cluster.budget_usd", "Budget in US dollars, at which the nodes are terminated", 10.0, ""),
    ("job.script", "Training script (empty: given on the command line)", "", "train.py main.py"),
    ("env.file", "File with the script's packages (empty: the image's packages)", "", _PACKAGES),
)
"""Each row has a key, a question, a default and file names; the first existing file replaces the default."""


def show_overview(options: Globals) -> None:
    """Show the clusters that have a record on this machine, and the next commands for each."""
    from awsddp.cluster.inventory import list_known_clusters

    with invocation.opened(options) as (session, show):
        show.result(list_known_clusters(session), overview_page)


def overview_page(document: "HomeDocument") -> None:
    """Show the recorded clusters or, if there are none, the commands to begin with."""
    for cluster in document.clusters:
        line(*_cluster_lines(cluster))
    if not document.clusters:
        counts = f"now; {counted(document.ended, 'cluster')} ended" if document.ended else "yet"
        line(f"No clusters on this machine {counts}. {'To begin:' * (not document.last_job)}".rstrip())
        if last := document.last_job:
            line(f"The last job, {last.job}: {last.state}. Its page: awsddp report {last.job}")
            line("All jobs: awsddp jobs")
            line("To begin again:")
        print(f"\n{_FIRST}")
    if document.local_cloud:
        line("The local cloud is running: awsddp local status, awsddp local stop")
    line("All commands: awsddp --help")


def _cluster_lines(cluster: "KnownCluster") -> list[str]:
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
    """Write a starter awsddp.toml into this folder: every key with its default and meaning.

    On a terminal it asks a few questions first, unless -y or --json is given.
    """
    from awsddp.settings.starter import refuse_existing, write_starter
    from awsddp.settings.verbs import command_arguments, script_arguments

    refuse_existing(Path(FILE))
    is_interactive = sys.stdin.isatty() and sys.stderr.isatty() and not (options.yes or options.json)
    COMMAND.unwritten_file = FILE
    chosen = _ask_questions() if is_interactive else {}
    COMMAND.unwritten_file = ""
    path = write_starter(Path(), chosen)
    text = f"It sets {', '.join(chosen)}; the other keys" if chosen else "All keys"
    files = {key: name for key, *_, names in _QUESTIONS if (name := _first_existing(names))}
    files = {} if is_interactive else files
    words = ["awsddp", "run", "--local", *command_arguments("run", files), *script_arguments(files)]
    with contextlib.closing(Screen(options)) as screen:
        screen.say(f"Wrote {path}. {text} are commented out.")
        screen.say(f"Next: {shlex.join(words)} (free, on this machine), then awsddp plan")
        screen.result(InitDocument(file=str(path)), lambda _: None)


def _ask_questions() -> dict[str, OptionValue]:
    """Ask the questions on the terminal, and return {key: answer} for all answers that are not empty."""
    from awsddp.job.unsynced_data import describe_ignored_folders

    answers: dict[str, OptionValue] = {}
    for key, text, default, names in _QUESTIONS:
        answer = _ask(key, text, _first_existing(names) or default)
        answers |= {key: answer} if str(answer) else {}
    with contextlib.suppress(ConfigError):  # the folder is the home directory, or is far too large
        unsynced = describe_ignored_folders(JobSpec(), home=awsddp_home()).items()
        patterns = [
            f"!/{path}"
            for path, description in unsynced
            if click.confirm(f"{description}: send it to the nodes?", default=False, err=True)
        ]
        answers |= {"sync.ignore": patterns} if patterns else {}
    return answers


def _ask(key: str, text: str, default: "str | float") -> OptionValue:
    """Ask until the answer is valid. An unknown name, such as a new region, is valid if it is typed twice."""
    from awsddp.job.starter_doubts import check_answer

    last: OptionValue = None
    while True:
        answer: OptionValue = click.prompt(text, default=default, err=True)
        try:
            if (check := SETTINGS[key].check) is not None:
                check(answer)
            if not str(answer) or answer == last or not (why := check_answer(key, str(answer))):
                return answer
            click.echo(f"  {why} To keep this answer, type it again.", err=True)
            last = answer
        except ConfigError as error:
            click.echo(f"  {error.summary}: {error.next}", err=True)


def _first_existing(names: str) -> str:
    """Return the first file in `names` (space-separated) that exists in the current folder, or ""."""
    return next((name for name in names.split() if Path(name).is_file()), "")
