"""The commands `awsddp local`: control the local cloud."""

import dataclasses
import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from awsddp.cli import invocation
from awsddp.cli.command_line import Globals
from awsddp.cli.options import Verb, global_options
from awsddp.cli.screen import Screen
from awsddp.cli.table import line, table
from awsddp.errors import ConfigError, UsageError
from awsddp.local import client as cloud
from awsddp.model.documents import StoppedDocument
from awsddp.session.context import Session
from awsddp.settings.values import parse_duration

if TYPE_CHECKING:
    from awsddp.model.documents import Fault, LocalDocument


@click.group("local", params=global_options(hidden=True))
def local() -> None:
    """Control the local cloud: EC2 and real hosts on this machine, for rehearsals and tests.

    `--local` starts the local cloud if necessary. A local cloud that `awsddp local start` has
    started runs until `awsddp local stop`.
    """


@local.command("start", cls=Verb)
@click.option("--no-hosts", "mode", flag_value="records", help="Emulate the EC2 API only; no host boots.")
@click.option(
    "--loopback", "mode", flag_value="loopback", help="Use hosts that need no root: one sshd process each."
)
@click.option(
    "--share",
    multiple=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Mount this folder read-only on every node that boots later (repeatable).",
)
def start(options: Globals, mode: str | None, share: tuple[Path, ...]) -> None:
    """Start the local cloud's daemon unless it is running."""
    with _opened(options) as (session, show):
        show.result(cloud.start(session.home, mode=mode, share=share), local_page)


@local.command("status", cls=Verb)
def status(options: Globals) -> None:
    """Show the endpoint, credentials, mode, instances and faults."""
    with _opened(options) as (session, show):
        show.result(cloud.status(session.home), local_page)


@local.command("stop", cls=Verb)
def stop(options: Globals) -> None:
    """Stop the daemon and its instances, and remove all that it created."""
    with _opened(options) as (session, show):
        existed = cloud.stop(session.home)
        text = "Local cloud stopped, nothing is left." if existed else "No local cloud was running."
        show.result(StoppedDocument(stopped=existed), lambda _: show.say(text))


@local.group("fault", params=global_options(hidden=True))
def fault() -> None:
    """Inject faults into EC2 API calls and nodes."""


@fault.command("add", cls=Verb)
@click.argument("subject", metavar="WHAT")
@click.argument("effect")
@click.option("--for", "lasts", metavar="TIME", help="Duration: 30s, 5m.  [default: until cleared]")
@click.option(
    "--times", type=click.IntRange(min=1), metavar="N", help="Number of calls to affect.  [default: all]"
)
@click.option("--seconds", type=float, metavar="S", help="Seconds for delay, late and stale.  [default: 5]")
@click.option("--notice", metavar="TIME", help="Warning time before a simulated spot reclaim.  [default: 2m]")
@click.option(
    "--only",
    metavar="WORD",
    help="Affect only calls with this value: a zone, a type, an id or placement-group.",
)
def fault_add(
    options: Globals, subject: str, effect: str, lasts: str | None, notice: str | None, **values: Any
) -> None:
    """Inject a fault into WHAT: an API operation (`*`: any) or a node.

    For an operation, EFFECT is an EC2 error code (InsufficientInstanceCapacity, RequestLimitExceeded),
    or: `delay`, a delay before the call takes effect; `late`, a delay of the response; `cut`, no connection
    and no effect; `lost`, the response is lost after the effect; `stale`, the response is some seconds old.

    A node is an instance id, or `node1` of the cluster. EFFECT is `cut`, no packets in or out; `one-way`,
    outgoing packets are dropped; `slow-network` and `slow-cpu`; `frozen`, no process runs; `full-disk`, no
    disk space left; `oom`, almost no memory left; `clock`, 2 minutes fast; `hostkey`, a different host key;
    or once: `reboot` or `poweroff`, as if started inside the node; `reclaim`, a spot reclaim after a notice;
    `xid`, GPU 0 fails until the node reboots.
    """
    with _opened(options) as (session, show):
        values |= {"for_s": _seconds(lasts, "--for"), "notice_s": _seconds(notice, "--notice")}
        choices = {name: value for name, value in values.items() if value is not None}
        if number := re.fullmatch(r"node(\d{1,4})", subject):
            subject = cloud.find_instance_id(session.home, options.name, int(number[1]))
        show.result(cloud.add_fault(session.home, subject, effect, **choices), faults_page)


@fault.command("list", cls=Verb)
def fault_list(options: Globals) -> None:
    """List the active faults with their numbers."""
    with _opened(options) as (session, show):
        show.result([*cloud.status(session.home).faults], faults_page)


@fault.command("clear", cls=Verb)
@click.argument("number", type=int, required=False)
def fault_clear(options: Globals, number: int | None) -> None:
    """Remove fault NUMBER, or all faults."""
    with _opened(options) as (session, show):
        show.result(cloud.clear_faults(session.home, number), faults_page)


def _opened(options: Globals) -> AbstractContextManager[tuple[Session, Screen]]:
    """Yield the session and screen for a verb that controls the local cloud, as if --local were given."""
    return invocation.opened(dataclasses.replace(options, local=True))


def _seconds(text: str | None, option: str) -> float | None:
    """Return an option's duration in seconds, or None if the option is not given.

    Raises UsageError for an invalid duration.
    """
    try:
        return None if text is None else parse_duration(text)
    except ConfigError:
        raise UsageError(f"{option}: invalid duration {text!r}", "", "use 30s, 5m or 1h") from None


def local_page(cloud: "LocalDocument") -> None:
    """Show the local cloud: its mode, the settings that any EC2 client needs, its instances and faults."""
    line(f"Local cloud in {cloud.mode} mode: {cloud.why}")
    line("For any EC2 client:")
    for variable, value in (
        ("AWS_ENDPOINT_URL", cloud.endpoint),
        ("AWS_DEFAULT_REGION", cloud.region),
        ("AWS_ACCESS_KEY_ID", cloud.access_key_id),
        ("AWS_SECRET_ACCESS_KEY", cloud.secret_access_key),
    ):
        print(f"  export {variable}={value}")  # not wrapped, so that it can be copied
    live = [instance for instance in cloud.instances if instance.state != "terminated"]
    if live:
        rows = [
            (
                *(instance.instance_id, instance.name, instance.state),
                *(instance.instance_type, instance.private_ip, instance.region),
            )
            for instance in live
        ]
        table(("instance", "name", "state", "type", "address", "region"), rows)
    else:
        line("No instances.")
    if ended := len(cloud.instances) - len(live):
        line(f"{ended} terminated within the last hour.")
    if cloud.faults:
        faults_page(cloud.faults)


def faults_page(faults: "Sequence[Fault]") -> None:
    """Show the local cloud's active faults."""
    if not faults:
        line("No faults.")
        return
    rows = []
    for fault in faults:
        until = time.strftime("%H:%M:%S", time.localtime(fault.heals_at)) if fault.heals_at else ""
        is_node = fault.operation.startswith("i-")
        call_cells = ("", "", "") if is_node else (fault.times or "always", fault.seconds, fault.only)
        rows.append((fault.id, fault.operation, fault.effect, *call_cells, until))
    table(("fault", "target", "effect", "times", "seconds", "only", "until"), rows)
