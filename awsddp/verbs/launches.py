"""What a job's launch needs again on a machine that takes the place of a lost one; kept while it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from awsddp.jobs.ranks import Rank
from awsddp.spec import JobSpec
from awsddp.state import Folder, write_private


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch as it was asked for, without values of env.secrets. `secret` is that of its supervisors.

    `after` are the jobs that it waits for.
    """

    spec: JobSpec
    ranks: tuple[Rank, ...]
    slot: int
    facts: dict[str, Any]
    secret: str
    after: tuple[str, ...] = ()


def keep(folder: Folder, job: str, launch: Launch) -> None:
    """Keep the launch of a job. Raises ConfigError where the disk refuses."""
    path = _path(folder, job)
    write_private(path, msgspec.json.encode(launch))


def kept(folder: Folder) -> dict[str, Launch]:
    """Return the launches that are kept, by job, without those that cannot be understood."""
    found = {}
    for path in _path(folder, "").parent.glob("*.json"):
        try:
            found[path.stem] = msgspec.json.decode(path.read_bytes(), type=Launch)
        except (OSError, ValueError):
            continue
    return found


def forget(folder: Folder, job: str) -> None:
    """Forget the launch of a job that has ended."""
    _path(folder, job).unlink(missing_ok=True)


def _path(folder: Folder, job: str) -> Path:
    return folder.path / "launches" / f"{job}.json"
