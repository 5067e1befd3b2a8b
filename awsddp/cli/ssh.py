"""`awsddp ssh`: a shell on one node, by the system's own ssh."""

import os
import re
import shlex
import shutil
import sys

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.errors import ConfigError, UsageError

_NODE = re.compile(r"(?:node)?(\d+)")


@click.command("ssh", cls=Verb, context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, metavar="[COMMAND...]")
@click.option("--node", type=int, default=0, metavar="N", help="Which node.  [default: 0]")
@click.option("-L", "ports", multiple=True, metavar="SPEC", help="Forward a port here: 6006:localhost:6006.")
def command(options: Globals, *, words: tuple[str, ...], node: int, ports: tuple[str, ...]) -> None:
    """Open a shell on a node, or run a command there; terminal, stdin and exit code are ssh's own.

    -L is ssh's own, too. With --json: print the ssh command for other programs to run.
    """
    from awsddp.verbs.ssh import ssh

    if words and (named := _NODE.fullmatch(words[0])):
        raise UsageError(
            f"{words[0]}: the words are a command for node{node}",
            "--node names the node",
            shlex.join(["awsddp", "ssh", "--node", named[1], *words[1:]]),
        )
    with session.opened(options) as (ctx, show):
        tty = sys.stdin.isatty() and sys.stdout.isatty()
        argv = ssh(ctx, node=node, words=words, ports=ports, tty=tty)
        show.result({"command": argv}, lambda _: None)
    if options.json:
        return
    program = shutil.which("ssh")
    if program is None:
        raise ConfigError("ssh not found on this machine", "", "install openssh-client")
    os.execv(program, argv)
