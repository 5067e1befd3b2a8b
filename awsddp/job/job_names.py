"""Which names a job may have, and which are taken."""

import re
from collections.abc import Collection, Mapping
from itertools import count
from pathlib import Path

from awsddp.errors import UsageError
from awsddp.model.node_answers import Slots
from awsddp.session.context import LocatedCluster, Session
from awsddp.storage.results_dir import saved_job
from awsddp.util.format import amount, node_name
from awsddp.util.shipped_files import BUNDLED_SCRIPT

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WORDS = ("all", "last")
TRIES = 5
"""How many automatic names may be taken by others in the moment of the launch."""


def check_job_name(session: Session, name: str) -> None:
    """Raise UsageError for a name that no job may have, or that one whose results are here has."""
    another, folder = "choose another --name", session.results / name
    if not _NAME.fullmatch(name):
        characters = "use up to 64 letters, digits, dots, dashes and underscores"
        raise UsageError(f"invalid job name {name!r}", "", characters)
    if name in _WORDS:
        why = "--after and --resume use it as a keyword"
        raise UsageError(f"job name {name!r} is reserved", why, another)
    if folder.exists():
        raise UsageError(f"job {name} already exists", _content(session, name), another)


def _content(session: Session, name: str) -> str:
    """Return what the folder of a job's results holds, and how the job ended if that is known."""
    folder, record = session.results / name, session.folder.read()
    job = saved_job(folder)
    states = [job.state] if job else [one.state for one in record.jobs if one.job == name] if record else []
    files = [path for path in folder.rglob("*") if path.is_file()]
    held = amount(len(files), sum(path.stat().st_size for path in files)) if files else "it is empty"
    return f"{folder} exists: {', '.join([*states, held])}"


def next_job_name(cluster: LocatedCluster, answers: Mapping[int, Slots], refused: Collection[str]) -> str:
    """Return the job's name: the given one, else that of its script with the number that follows the highest.

    The nodes, their tags, the cluster's record and the results folder know no such job, nor is it `refused`.
    Raises UsageError for a given name that is taken.
    """
    given, results = cluster.session.job_spec.job.name, cluster.session.results
    if given is not None:
        if why := _why_taken(cluster, given, answers):
            raise UsageError(f"job {given} already exists", why, "choose another --name")
        return given
    known = {job for answer in answers.values() for job in answer.jobs}.union(cluster.unfetched, refused)
    stem = Path(cluster.session.job_spec.job.script or BUNDLED_SCRIPT).name.removesuffix(".py")
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:40] or "job"
    known.update((job.job for job in cluster.record.jobs), (path.name for path in results.glob(f"{stem}-*")))
    numbered = (re.fullmatch(rf"{re.escape(stem)}-(\d{{1,6}})", name, re.ASCII) for name in known)
    highest = max((int(found[1]) for found in numbered if found), default=0)
    names = (f"{stem}-{number}" for number in count(highest + 1))
    return next(name for name in names if name not in known and not (results / name).exists())


def _why_taken(cluster: LocatedCluster, name: str, answers: Mapping[int, Slots]) -> str:
    """Return why no job may have a name, "" where it is free: a node has such a job, or is tagged with it and
    was not asked, or results are here.
    """
    nodes = [node_name(node) for node, answer in sorted(answers.items()) if name in answer.jobs]
    if nodes:
        return f"{', '.join(nodes)} has a job of that name: awsddp jobs {name}"
    live = cluster.listed.live if cluster.listed is not None else ()
    tagged = [node_name(one.node) for one in live if one.node not in answers and name in one.unfetched]
    if tagged:
        return f"{', '.join(tagged)} holds results of a job of that name, by its tag"
    return _content(cluster.session, name) if (cluster.session.results / name).exists() else ""
