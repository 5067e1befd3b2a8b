"""What an interrupted command leaves behind: what may still cost money, and the words that end it."""

import contextlib

from awsddp.errors import ConfigError, Interrupted
from awsddp.report import iso, money
from awsddp.state import Record
from awsddp.verbs.context import Context


def interruption(ctx: Context) -> Interrupted:
    """Return the error that an interrupted command ends with, from the cluster's folder alone."""
    record: Record | None = None
    with contextlib.suppress(ConfigError):
        record = ctx.folder.read()
    if record is None:
        return Interrupted(
            "interrupted", f"this machine knows of nothing that runs for cluster {ctx.spec.name}"
        )
    running = [job.job for job in record.jobs if job.state == "running"]
    machines = f"{record.nodes} x {record.instance_type}"
    where = "in the local cloud, for nothing"
    if record.target.name != "local":
        where = f"in {record.target.region}, at {money(record.price_usd_per_hour)} an hour"
    why = [f"they end themselves at {iso(record.expires)}"]
    if running:
        why.append(f"job {running[-1]} goes on without this machine, unless it has ended")
    ways = [f"awsddp logs -f {job}   # follow it, bring its results home" for job in running[-1:]]
    if not record.prepared:
        ways.append("awsddp up   # go on")
    ways.append("awsddp down   # end them")
    return Interrupted(f"interrupted: {machines} may run {where}", "\n".join(why), "\n".join(ways))
