"""Jobs of which one waits for another, and their states."""

from awsddp.model.records import JobRecord
from awsddp.session.connect import list_jobs_on_nodes
from tests.support.folder_nodes import World

NOTES = "import os, time; print('code', {code}, os.getcwd(), flush=True); time.sleep({sleep})\n"


def script(code: int, sleep: float = 0.0) -> str:
    return NOTES.format(code=code, sleep=sleep)


def jobs(world: World) -> dict[str, JobRecord]:
    return {job.job: job for job in list_jobs_on_nodes(world.connected())}


def states(world: World) -> dict[str, str]:
    return {name: job.state for name, job in jobs(world).items()}
