"""`awsddp exec`: a command on every node."""

import sys

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb


@click.command("exec", cls=Verb, context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, metavar="COMMAND...")
@click.option("--node", type=int, metavar="N", help="Only on this node.  [default: all]")
@click.option("-i", "--stdin", is_flag=True, help="Send stdin to every node.")
@click.pass_context
def command(
    ctx: click.Context, /, options: Globals, *, words: tuple[str, ...], node: int | None, stdin: bool
) -> None:
    """Run a command on all nodes at once, in the synced folder.

    Several words are a program and its arguments; a single word is a command line for bash. Placeholders are
    those of `train`, with one rank per node:

    \b
      awsddp exec nvidia-smi -L
      awsddp exec 'df -h / | tail -1'
      awsddp exec -- torchrun --nnodes {nnodes} --node-rank {node_rank} \\
          --master-addr {master_addr} train.py
    """
    from awsddp.verbs.exec import exec

    if not words:
        raise click.UsageError("Missing command.", ctx)
    sent = sys.stdin.buffer.read() if stdin else b""
    with session.opened(options) as (context, show):
        result = exec(context, words=words, node=node, stdin=sent, on_output=show.output)
        show.result(result, lambda _: None)
        failed = [one for one in result["nodes"] if one["exit_code"] != 0]
        for one in failed:
            code = one["exit_code"]
            how = "a signal ended the command" if code == -1 else f"exited with code {code}"
            show.say(f"node{one['node']}: {how}")
    ctx.exit(1 if failed else 0)
