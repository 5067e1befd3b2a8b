"""What an interrupted command leaves behind: what may still cost money, and the commands that end it."""

from awsddp.cluster import ACTIVE
from awsddp.errors import AwsddpError, Interrupted
from awsddp.report import iso, money
from awsddp.state import Record
from awsddp.verbs.advice import up_again
from awsddp.verbs.context import Context


def interruption(ctx: Context) -> Interrupted:
    """Return the error that an interrupted command ends with, from the cluster's folder alone."""
    record = ctx.folder.read(newer=True)
    if record is None and ctx.local:
        next = "awsddp local status\nawsddp local stop   # end it and all that it has"
        return Interrupted("interrupted", "the local cloud may be running", next)
    if record is None:
        return Interrupted("interrupted", f"no record of cluster {ctx.spec.name} on this machine")
    running = [job.job for job in record.jobs if job.state in ACTIVE]
    why = [f"they expire at {iso(record.expires)}"]
    if running:
        why.append(f"job {running[-1]} keeps running without this machine, unless it has ended")
    ways = [f"awsddp logs -f {job}   # follow it and fetch its results" for job in running[-1:]]
    if not record.prepared:
        ways.append(f"{up_again(ctx)}   # continue")
    ways.append("awsddp down   # terminate them")
    return Interrupted(f"interrupted: {_machines(record)}", "\n".join(why), "\n".join(ways))


def what_runs_on(ctx: Context, error: AwsddpError) -> None:
    """Add to an error what may still run and cost money, where AWS cannot be asked any more."""
    record = ctx.folder.read(newer=True)
    if record is None:
        return
    ids = ", ".join(one.instance_id for one in record.prepared)
    ids = f" ({ids})" if ids else ""
    error.why = f"{error.why}\n{_machines(record)}{ids}; they expire at {iso(record.expires)}".lstrip("\n")
    error.next = f"{error.next}\nawsddp down   # then end them".lstrip("\n")


def _machines(record: Record) -> str:
    machines = f"{record.nodes} x {record.instance_type} may run"
    if record.target.name == "local":
        return f"{machines} in the local cloud, free of charge"
    return f"{machines} in {record.target.region}, at {money(record.price_usd_per_hour)} per hour"
