"""Describe recoveries for messages and pages. This module does no I/O."""

from awsddp.model.records import JobRecord, Recovery
from awsddp.util.formatting import counted, duration, money


def describe_lost_work(job: str, recovery: Recovery) -> str:
    """Return a sentence about what a job's run lost: why `job` ended, and from where the run goes on."""
    start = f"from {recovery.checkpoint}" if recovery.checkpoint else "from step 0, without a checkpoint"
    steps = recovery.steps_repeated
    repeated = "" if steps is None else f", {counted(steps, 'step')} repeated"
    return f"{job} ended ({recovery.kind}): the run goes on {start}{repeated}"


def describe_recoveries(job: JobRecord) -> list[str]:
    """Return a line for each recovery of a job's run until the job's start, oldest first."""
    lines = []
    name, world_size = job.job, job.world_size
    for recovery in reversed(job.recoveries):
        lines.append(_describe_recovery(name, recovery, world_size=world_size))
        name, world_size = recovery.job, recovery.earlier_world_size
    return lines[::-1]


def _describe_recovery(name: str, recovery: Recovery, *, world_size: int) -> str:
    parts = [f"{name}: {describe_lost_work(recovery.job, recovery)}"]
    if recovery.seconds_lost is not None:
        parts.append(f"{duration(recovery.seconds_lost)} lost")
    if recovery.cost_usd is not None:
        parts.append(f"{recovery.job} cost {money(recovery.cost_usd)}")
    if 0 < recovery.earlier_world_size != world_size:
        parts.append(
            f"{world_size} ranks instead of {recovery.earlier_world_size}: the global batch size changes, so "
            "adapt the learning rate"
        )
    return ", ".join(parts)
