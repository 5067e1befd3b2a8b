"""A job that was saved to S3 (--save-to), by s3://bucket/prefix/JOB: brought here without its nodes.

What is there was written by nodes, which are not trusted: their names are checked as if they had answered.
"""

import contextlib
import hashlib
import os
import posixpath
import shlex
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard, TypeVar

import msgspec

from awsddp.answers import Manifest, NodeJob, ResultFile, check_job, check_manifest, converted
from awsddp.errors import AwsddpError, ConfigError, NodeError, NotFoundError
from awsddp.jobs.files import Checkpoint, name_at_home
from awsddp.jobs.results import encode, job_document
from awsddp.jobs.supervisor.folder import NAME
from awsddp.jobs.supervisor.objects import AT_ONCE, Place, Store, Thing, join
from awsddp.jobs.supervisor.stacks import DUMP
from awsddp.parallel import each
from awsddp.records import ACTIVE, JobRecord, NodeNumber, Target, Text
from awsddp.results import is_fetched, refuse_another
from awsddp.returns import NodeFiles
from awsddp.search import target_for
from awsddp.values import s3_place

if TYPE_CHECKING:
    from awsddp.cluster import Cluster
    from awsddp.nodes.rsync import Progress

_READ_AT_ONCE = ("logs/", ".awsddp/")
_METRICS = ("/run/metrics.jsonl", f"/run/{DUMP}")
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
_Of = TypeVar("_Of")


class _File(msgspec.Struct, frozen=True):
    size: _Size
    modified: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    parts: tuple[tuple[str, _Size], ...]


class _Node(msgspec.Struct, frozen=True):
    """What nodeK.json says (supervisor/shelf.py)."""

    files: dict[str, _File] = {}
    links: dict[str, str] = {}
    ended: bool = False
    error: Text = ""


class _Checkpoint(msgspec.Struct, frozen=True):
    name: Text
    files: tuple[tuple[NodeNumber, str, int, tuple[tuple[str, _Size], ...]], ...]


class _Job(msgspec.Struct, frozen=True):
    """What job.json says; no `document` before the ranks ran. `state` is "running" until all is saved."""

    state: Text = "running"
    nodes: tuple[NodeNumber, ...] = ()
    document: NodeJob | None = None
    checkpoint: _Checkpoint | None = None


class Saved:
    """What a prefix in S3 says of a job. `job` is its record, `where` its place; when it `is_over` the first
    node has nothing to say any more.
    """

    def __init__(self, cluster: "Cluster", store: Store, where: Place) -> None:
        self._cluster, self._store, self.where = cluster, store, where
        index = self._read("job.json", _Job)
        if index is None or index.document is None:
            what = "no job" if index is None else "its ranks have not started: no results of the job"
            above, names = self._around()
            why, look = "", f"aws s3 ls {_typed(above)}/   # what is there"
            if names:
                why = f"{above}/ has {', '.join(names[-10:])}"
                look = f"awsddp jobs {_typed(above.below(names[-1]))}"
            raise NotFoundError(f"{what} at {where}", why, look)
        self._index, told = index, index.document
        self.is_over = index.state not in ACTIVE
        with self._checked("job.json"):
            check_job(told, told.node, posixpath.basename(where.prefix))
        self.job = replace(
            job_document({told.node: told}, results=cluster.job_spec.job.results), save_to=str(_above(where))
        )
        self._nodes = {node: self._read(f"node{node}.json", _Node) or _Node() for node in index.nodes}

    @property
    def lacking(self) -> tuple[int, ...]:
        """The nodes whose results are not all there."""
        return tuple(node for node, one in self._nodes.items() if not one.ended or one.error)

    def _around(self) -> tuple[Place, list[str]]:
        """Return the place itself, or else that above it, and what may be the jobs there."""
        names: list[str] = []
        for above in (self.where, _above(self.where)):
            with contextlib.suppress(self._store.client.exceptions.ClientError):
                found = islice(self._store.folders(above), 1000)
                if names := [one for one in found if NAME.fullmatch(one)]:
                    break
        return above, names

    def _read(self, name: str, kind: type[_Of]) -> _Of | None:
        with self._checked(name):
            found = self._store.read(self.where, name)
            return None if found is None else converted(found, kind, paths=True)

    @contextlib.contextmanager
    def _checked(self, name: str) -> Iterator[None]:
        """Raise NodeError for what is wrong with an object that a node writes, or with what it lists."""
        try:
            yield
        except (ValueError, RecursionError, OverflowError, EOFError, msgspec.ValidationError) as error:
            at, why = self.where.below(name), str(error)[:2000]
            look = f"aws s3 cp {_typed(at)} -   # what it says: others than the nodes may write there"
            raise NodeError(f"{at} is not as a node writes it", why, look) from error

    def bring(self, *, whole: bool) -> dict[int, NodeFiles]:
        """Bring the results into the folder of the job, `whole` or the logs and metrics alone.

        What is there as it should be does not travel; where all was there it is all again. Raises
        ConfigError, NodeError.
        """
        from awsddp.nodes.results import pull

        job = self.job
        refuse_another(self._cluster, job)
        if whole:
            self._store.abort(_above(self.where), over=())
        whole = whole or is_fetched(self._cluster.results / job.job, job)
        files = name_at_home({node: self._manifest(node) for node in self._nodes})
        wanted: dict[int, list[ResultFile]] = {node: [] for node in self._nodes}
        for one in files:
            if whole or one.home.startswith(_READ_AT_ONCE) or one.home.endswith(_METRICS):
                wanted[one.node].append(one)
        missing = self.lacking if whole else tuple(self._nodes)
        listed = {(one.node, one.path): one for one in files}
        return pull(
            wanted,
            self._cluster.results / job.job,
            look=lambda _: listed,
            also=lambda _: {"job.json": encode(replace(job, missing=missing))},
            transfer=self._transfer,
            on_event=self._cluster.on_event,
        )

    def _manifest(self, node: int) -> Manifest:
        """Return what a node saved, as it would list it itself. Raises NodeError for what it may not."""
        found = self._nodes[node]
        with self._checked(f"node{node}.json"):
            lines = []
            for home, one in found.files.items():
                sample = hashlib.sha256(f"{node}/{one.parts}".encode()).hexdigest()
                lines.append(_line(home, one.size, one.parts, modified=one.modified, sample=sample))
            lines += [_line(home, target=target) for home, target in found.links.items()]
            return self._listed(node, lines)

    def _listed(self, node: int, lines: Sequence[Mapping[str, Any]]) -> Manifest:
        """Return what a node lists. Raises ValueError, ValidationError for what it may not."""
        made = msgspec.convert({"files": lines, "skipped": []}, Manifest)
        check_manifest(made, node, [one.rank for one in self.job.ranks if one.node == node])
        return made

    def _transfer(
        self, files: Sequence[ResultFile], folder: Path, progress: "Progress", stop: threading.Event
    ) -> None:
        """Download files of a node to their paths below a folder, several at once: their parts, cut to size
        and joined. What an earlier call has brought there is not brought again.

        Raises NodeError for a part that is not as it was listed, ClientError.
        """
        from awsddp.nodes.results import is_here

        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            progress.report(done := done + count)

        missing = [one for one in files if not is_here(folder / one.path[1:], one)]
        for at in range(0, len(missing), AT_ONCE):
            if stop.is_set():
                return
            each(partial(self._bring, folder, on_bytes), missing[at : at + AT_ONCE])

    def _bring(self, folder: Path, on_bytes: Callable[[int], None], one: ResultFile) -> None:
        path, parts = folder / one.path[1:], self._nodes[one.node].files[one.path[1:]].parts
        things = {str(at): Thing(self.where.key(key), size, "") for at, (key, size) in enumerate(parts)}
        with tempfile.TemporaryDirectory(dir=folder) as made:
            try:
                self._store.bring(self.where, things, Path(made), on_bytes)
            except self._store.client.exceptions.ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                    raise
                why, again = "a job that runs replaces files", f"awsddp fetch {_typed(self.where)}   # again"
                raise NodeError(f"{one.home} is no longer at {self.where}", why, again) from error
            with self._checked(f"node{one.node}.json"):
                join([(Path(made, at), thing.size) for at, thing in things.items()], path)
        os.utime(path, ns=(one.modified, one.modified))

    def checkpoint(self) -> "SavedCheckpoint":
        """Return the newest checkpoint that is whole. Raises ConfigError where there is none."""
        found = self._index.checkpoint
        if found is None or not found.files:
            raise ConfigError(
                f"no checkpoint at {self.where}", "none was whole", f"awsddp logs {_typed(self.where)}"
            )
        files: dict[str, list[list[Any]]] = {}
        with self._checked("job.json"):
            for node, home, size, parts in found.files:
                top = f"node{node}/{found.name}"
                if not f"{home}/".startswith(f"{top}/"):
                    raise ValueError(f"{home!r} is no part of {found.name!r}")
                self._listed(node, [_line(home, size, parts)])
                files[posixpath.basename(found.name) + home[len(top) :]] = [list(one) for one in parts]
        where = Path(f"{self.where}/{found.name}")
        return SavedCheckpoint(job=self.job.job, parts=(where,), place=self.where, files=files)


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint(Checkpoint):
    """A checkpoint in S3: for each of its files the keys below `place`, and their sizes (bytes)."""

    place: Place
    files: Mapping[str, Sequence[Sequence[Any]]]


def is_saved(text: str | None) -> TypeGuard[str]:
    """Tell whether a job is named by its place in S3."""
    return text is not None and text.startswith("s3://")


@contextlib.contextmanager
def store_at(target: Target, where: Place) -> Iterator[Store]:
    """Yield S3 as this machine's login sees it. Raises CloudError, ConfigError for what botocore raises in
    the context, NotFoundError where the bucket does not exist.
    """
    from awsddp.aws.session import session_of, translated

    with (
        translated(target, where=str(where)),
        contextlib.closing(
            Store(region=target.region, endpoint=target.endpoint, session=session_of(target))
        ) as store,
    ):
        yield store


@contextlib.contextmanager
def opened(cluster: "Cluster", uri: str) -> Iterator[Saved]:
    """Yield the job at s3://bucket/prefix/JOB, read with this machine's login.

    Raises NotFoundError, CloudError, NodeError for what no awsddp wrote.
    """
    where = Place(*s3_place(uri))
    with target_for(cluster, cluster.folder.read()) as target, store_at(target, where) as store:
        yield Saved(cluster, store, where)


def brought(cluster: "Cluster", uri: str, *, whole: bool = False) -> tuple[JobRecord, dict[int, NodeFiles]]:
    """Bring a job's record, logs and metrics into its folder here, `whole` all its results; return the job,
    and what came.

    Raises as `opened`, and ConfigError where the folder is another job's.
    """
    with opened(cluster, uri) as saved:
        if saved.job.state in ACTIVE:
            cluster.say(f"job {saved.job.job} was {saved.job.state} when it was last saved")
        return saved.job, saved.bring(whole=whole)


def in_bucket(cluster: "Cluster", job: JobRecord) -> bool:
    """Tell whether all results of a job are in S3, by what this machine reads there; then its record, logs
    and metrics come here.
    """
    if job.save_to is None:
        return False
    try:
        with opened(cluster, f"{job.save_to}/{job.job}") as saved:
            is_whole = saved.job.nodes == job.nodes and saved.is_over and not saved.lacking
            if is_whole:
                saved.bring(whole=False)
            return is_whole
    except AwsddpError as error:
        cluster.say(error.summary)
        return False


def _line(home: str, size: int = 0, parts: Iterable[tuple[str, int]] = (), **more: object) -> dict[str, Any]:
    """Return how a file is listed. Raises ValueError where its parts are not as long as it is."""
    if size != (length := sum(size for _, size in parts)):
        raise ValueError(f"{home!r} has {size:,} bytes, its parts have {length:,}")
    return {"path": f"/{home}", "home": home, "size": size, **more}


def _typed(where: Place) -> str:
    return shlex.quote(str(where))


def _above(where: Place) -> Place:
    return Place(where.bucket, posixpath.dirname(where.prefix))
