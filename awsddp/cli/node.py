"""The commands `awsddp sync`, `exec`, `ssh`, `doctor` and `why`, which work on nodes."""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import partial

import click

from awsddp.cli import invocation
from awsddp.cli.command_line import Globals
from awsddp.cli.options import Verb, complete_jobs
from awsddp.cli.pages import sync_page
from awsddp.errors import ConfigError, UsageError

_NODE = re.compile(r"(?:node)?(\d+)")


@click.command("sync", cls=Verb)
def sync(options: Globals) -> None:
    """Send the project folder to every node; with -v show the largest files and the excluded ones.

    Files that were created on a node are never deleted. If a job is running, the command needs your consent,
    because the job's files would change.
    """
    from awsddp.cluster.sync import sync

    with invocation.opened(options) as (session, show):
        confirm = show.question("Send the files anyway?", "nothing was sent")
        show.result(sync(session, confirm=confirm), partial(sync_page, verbose=options.verbose > 0))


@click.command("exec", cls=Verb, context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, metavar="COMMAND...")
@click.option("--node", type=int, metavar="N", help="Run the command only on this node.  [default: all]")
@click.option("-i", "--stdin", is_flag=True, help="Send stdin to every node.")
@click.pass_context
def exec_(
    ctx: click.Context, /, options: Globals, *, words: tuple[str, ...], node: int | None, stdin: bool
) -> None:
    """Run a command on all nodes in parallel, in the project folder.

    Several words are a program and its arguments; a single word is a command line for bash. The placeholders
    of `train` are replaced as for a job with one rank per node:

    \b
      awsddp exec nvidia-smi -L
      awsddp exec 'df -h / | tail -1'
      awsddp exec -- torchrun --nnodes {nnodes} --node-rank {node_rank} \\
          --master-addr {master_addr} train.py
    """
    if not words:
        raise click.UsageError("Missing command.", ctx)
    _refuse_node("exec", words)
    from awsddp.cluster import remote

    sent = sys.stdin.buffer.read() if stdin else b""
    with invocation.opened(options) as (session, show):
        result = remote.run_on_nodes(session, words=words, node=node, stdin=sent, on_output=show.output)
        show.result(result, lambda _: None)
        failed = [node_result for node_result in result.nodes if node_result.exit_code != 0]
        for node_result in failed:
            code = node_result.exit_code
            end = "a signal ended the command" if code == -1 else f"exited with code {code}"
            show.say(f"node{node_result.node}: {end}")
        record = session.folder.read()
        is_missing = any(node_result.exit_code == 127 for node_result in failed)
        lacks_smi = is_missing and "nvidia-smi" in shlex.join(words)
        if lacks_smi and record is not None and record.pretended:
            show.say(
                "the GPUs of a rehearsal are simulated, without nvidia-smi; the image on EC2 has nvidia-smi"
            )
    ctx.exit(1 if failed else 0)


def _refuse_node(verb: str, words: Sequence[str]) -> None:
    """Raise UsageError if a command's first word is a node's name."""
    if words and (match := _NODE.fullmatch(words[0])):
        raise UsageError(
            f"{words[0]} names a node, but the arguments must be a command to run on a node",
            "--node selects the node",
            shlex.join(["awsddp", verb, "--node", match[1], *words[1:]]),
        )


@click.command("ssh", cls=Verb, context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, metavar="[COMMAND...]")
@click.option("--node", type=int, default=0, metavar="N", help="Number of the node.  [default: 0]")
@click.option(
    "-L",
    "ports",
    multiple=True,
    metavar="SPEC",
    help="Forward a local port to the node: 6006:localhost:6006.",
)
def ssh(options: Globals, *, words: tuple[str, ...], node: int, ports: tuple[str, ...]) -> None:
    """Open a shell on a node, or run a command on it, with the program ssh.

    The terminal, stdin, the exit code and -L work as in ssh. With --json, print the ssh command instead.
    """
    from awsddp.cluster.remote import ssh

    _refuse_node("ssh", words)
    with invocation.opened(options) as (session, show):
        tty = sys.stdin.isatty() and sys.stdout.isatty()
        argv = ssh(session, node=node, words=words, ports=ports, tty=tty)
        show.result({"command": argv}, lambda _: None)
    if options.json:
        return
    program = shutil.which("ssh")
    if program is None:
        raise ConfigError("ssh not found on this machine", "", "install openssh-client")
    os.execv(program, argv)


@click.command("doctor", cls=Verb)
@click.option(
    "--iam-policy",
    type=click.Choice(("user", "nodes")),
    is_flag=False,
    flag_value="user",
    help="Print the minimal IAM policy for this configuration: for your user, or for the nodes' role.",
)
@click.option("--request-quota", is_flag=True, help="Request the missing quota from AWS.")
def doctor(options: Globals, *, iam_policy: str | None, request_quota: bool) -> int:
    """Check the nodes of a cluster: GPUs, disks, clocks, ports between all pairs, a process group, bandwidth.

    Without a cluster, check the requirements of a launch: credentials, permissions, quota, offers and
    compatibility. The checks change nothing.
    """
    from awsddp.cli.doctor_page import checks_page, health_page
    from awsddp.cli.plan_page import quota_page
    from awsddp.cluster import doctor as checks

    with invocation.opened(options) as (session, show):
        if iam_policy:
            from awsddp.plan.policy import least_policy, role_policy

            policy = role_policy if iam_policy == "nodes" else least_policy
            print(json.dumps(policy(session.spec, session.job_spec), indent=2))  # in AWS's own format
        elif request_quota:
            confirm = show.question("", "nothing was requested")
            show.result(checks.request_quota(session, confirm=confirm), quota_page)
        else:
            report, page, code = checks.check_cluster(session), health_page, 6
            if report is None:
                report, page, code = checks.check_before_launch(session), checks_page, 4
            show.result(report, page)
            failed = {check.name for check in report.checks if check.ok is False}
            return 3 if failed & {"region", "configuration"} else code if failed else 0
    return 0


@click.command("why", cls=Verb)
@click.argument("job", required=False, shell_complete=complete_jobs)
def why(options: Globals, *, job: str | None) -> None:
    """Show the current line of each rank of JOB (default: the last job), and which ranks the others wait for.

    The job continues to run. If it has ended, the cause is shown. With -v, the stacks are shown too.
    """
    from awsddp.cli.doctor_page import why_page
    from awsddp.job.why import why

    with invocation.opened(options) as (session, show):
        show.result(why(session, job), partial(why_page, verbose=options.verbose > 0))
