"""A job that was saved to S3 (--save-to), by s3://bucket/prefix/JOB: brought here without its nodes.

What is there was written by nodes, which are not trusted: their names are checked as if they had answered.
A file comes as its list names it. Where it is another one by now, the list is read again.
"""

import contextlib
import hashlib
import hmac
import os
import posixpath
import re
import shlex
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from awsddp.agent.diagnosis.stacks import DUMP
from awsddp.agent.job_folder import NAME
from awsddp.agent.s3.store import AT_ONCE, Changed, Place, Store
from awsddp.agent_client.job_reports import encode, job_document
from awsddp.errors import AwsddpError, ConfigError, NodeError, NotFoundError
from awsddp.model.documents import NodeFiles
from awsddp.model.node_answers import Manifest, ResultFile, check_manifest
from awsddp.model.records import ACTIVE, JobRecord, Target
from awsddp.session.context import Session
from awsddp.session.locate import target_for
from awsddp.settings.values import s3_place
from awsddp.storage.checkpoints import Checkpoint
from awsddp.storage.local_names import begins, name_at_home
from awsddp.storage.results_dir import is_fetched, refuse_another
from awsddp.storage.saved_lists import TRIES, Listed, Lists, Part, Row, typed
from awsddp.util.format import node_name
from awsddp.util.parallel import each

if TYPE_CHECKING:
    from awsddp.nodes.rsync import Progress

_READ_AT_ONCE = ("logs/", ".awsddp/")
_METRICS = ("/run/metrics.jsonl", f"/run/{DUMP}")
_OF_A_JOB = re.compile(r"parts|lists|node\d+")
"""The folders that a job has at its place."""
_NAMED = 10
"""How many files, nodes or jobs are named one by one."""
_STEPS = 200
"""How often progress is reported."""


class Changing(AwsddpError, exit_code=1, kind="changing", retryable=True):
    """Files that were other ones each time that they were read. All else has come: `fetched`, of `job`."""

    def __init__(
        self, where: Place, homes: Sequence[str], job: JobRecord, fetched: Mapping[int, NodeFiles]
    ) -> None:
        again = f"awsddp fetch {typed(where)}   # again, once the job writes less"
        what, more = "changing faster than it can be read", again
        if job.state not in ACTIVE:
            what = "not there as it is listed"
            named = f"--bucket {where.bucket} --prefix {shlex.quote(where.prefix)}/"
            more = f"aws s3api list-object-versions {named}   # what was there, if the bucket keeps it"
        why = f"their lists at {where} were read {TRIES} more times; all else is here"
        super().__init__(f"{what}: {_few(homes)}", why, more)
        self.job, self.fetched = job, fetched


class Lacking(NodeError):
    """A job is over, and S3 has not all of its results. What is there has come: `fetched`, of `job`."""

    def __init__(
        self, where: Place, nodes: Sequence[int], job: JobRecord, fetched: Mapping[int, NodeFiles]
    ) -> None:
        super().__init__(
            f"a part of the results of {job.job} is not at {where}",
            f"{_few([node_name(node) for node in nodes])} did not save all; what is there is here",
            f"awsddp fetch {job.job}   # from its nodes, on the machine that has their key",
        )
        self.job, self.fetched = job, fetched


@dataclass(frozen=True)
class _Node:
    """What a node lists, and by path what each of its files consists of."""

    listed: Listed
    manifest: Manifest
    rows: Mapping[str, Row]


class Saved:
    """What a prefix in S3 says of a job. `job` is its record, `where` its place; when it `is_over` the first
    node has nothing to say any more.
    """

    def __init__(self, session: Session, store: Store, where: Place) -> None:
        self._session, self._store, self.where = session, store, where
        known, self._secret = _known(session, where), None
        if known is not None and session.folder.key.exists():
            self._secret = signing_secret(session, known.job)
        self._lists = Lists(store, where, secret=self._secret)
        index = self._lists.index()
        if index is None or index.document is None:
            raise self._nothing(is_job=index is not None)
        self._index, document = index, index.document
        self.is_over = index.state not in ACTIVE
        made = job_document({document.node: document}, results=session.job_spec.job.results)
        self.job = replace(made, save_to=str(_above(where)))
        if known is not None and known.nodes and set(known.nodes) != set(self.job.nodes):
            raise NodeError(
                f"{where} holds a job of that name of other nodes",
                f"those of {known.job} are {_few([one.instance_id for one in known.nodes])}",
                f"aws s3 ls {typed(where)}/   # others than the nodes may write there",
            )
        self._nodes = dict(zip(index.nodes, each(self._read, index.nodes, at_most=AT_ONCE), strict=True))
        self._came: dict[tuple[int, str], ResultFile] = {}
        self._reading = threading.Lock()

    @property
    def lacking(self) -> tuple[int, ...]:
        """The nodes whose results are not all there."""
        return tuple(sorted(node for node, one in self._nodes.items() if not one.listed.is_all))

    def why_not_all(self, job: JobRecord) -> str:
        """Return why this place does not hold all results of a job that this machine knows, "" where it does.

        What the lists name must be in the bucket, as they name it.
        """
        if self._secret is None:
            return "this machine has no key that shows who wrote what is there"
        if not job.nodes or set(self.job.nodes) != set(job.nodes):
            return "what is there is of other nodes"
        if not self.is_over:
            return "it is not over there"
        if self.lacking:
            return f"{_few([node_name(node) for node in self.lacking])} did not save all"
        parts = (part for node in self._nodes.values() for row in node.rows.values() for part in row.parts)
        needed = {(self.where.key(part.key), part.size, part.etag) for part in parts}
        for thing in self._store.list(self.where):
            needed.discard((thing.key, thing.size, thing.etag))
        absent = [ascii(key) for key, *_ in sorted(needed)]
        return f"not there as it is listed: {_few(absent)}" if absent else ""

    def _nothing(self, *, is_job: bool) -> NotFoundError:
        """Return the error for a place without results, which names other jobs around it."""
        what = "no results of the job yet" if is_job else "no job"
        around, names = self._around(is_job=is_job)
        why, look = "", f"aws s3 ls {typed(around)}/   # what is there"
        if names:
            why = f"{around}/ has {', '.join(names[-_NAMED:])}"
            look = f"awsddp jobs {typed(around.below(names[-1]))}"
        return NotFoundError(f"{what} at {self.where}", why, look)

    def _around(self, *, is_job: bool) -> tuple[Place, list[str]]:
        """Return the place itself, or else that above it, and what may be other jobs there."""
        above, own = _above(self.where), posixpath.basename(self.where.prefix)
        for around in (above,) if is_job else (self.where, above):
            with contextlib.suppress(self._store.client.exceptions.ClientError):
                found = islice(self._store.folders(around), 1000)
                names = [one for one in found if NAME.fullmatch(one) and not _OF_A_JOB.fullmatch(one)]
                if names := [one for one in names if around != above or one != own]:
                    return around, names
        return above, []

    def _read(self, node: int, before: Listed | None = None) -> _Node:
        """Read what a node lists, with names as it would list them itself. Raises NodeError."""
        found = self._lists.node(node, launch=self._index.launch, before=before)
        with self._lists.checked(f"node{node}.json"):
            lines = [
                _line(home, size=row.size, modified=row.modified, sample=row.sample, **_stamp(row))
                for home, row in found.files.items()
            ]
            lines += [_line(home, target=target) for home, target in found.links.items()]
            manifest = self._manifest(node, lines)
        return _Node(found, manifest, {_path(home): row for home, row in found.files.items()})

    def _manifest(self, node: int, lines: Sequence[Mapping[str, Any]]) -> Manifest:
        """Return what a node lists. Raises ValueError, ValidationError for what it may not."""
        made = msgspec.convert({"files": lines, "skipped": []}, Manifest)
        check_manifest(made, node, [one.rank for one in self.job.ranks if one.node == node])
        return made

    def bring(self, *, whole: bool) -> dict[int, NodeFiles]:
        """Bring the results into the folder of the job, `whole` or the logs and metrics alone.

        What is there as it should be does not travel; where all was there it is all again, and what lies
        there stays. Raises ConfigError, NodeError, and Changing once all else has come.
        """
        from awsddp.nodes.download import pull

        job, folder = self.job, self._session.results / self.job.job
        refuse_another(self._session, job, strict=True)
        if whole:
            self._store.abort(_above(self.where), over=())
        is_here, unread = is_fetched(folder, job), list[ResultFile]()

        def last(changed: Sequence[ResultFile]) -> Mapping[str, bytes]:
            unread.extend(one for one in changed if one.path in self._nodes[one.node].rows)
            lacking = {*(self.lacking if whole else self._nodes), *(one.node for one in unread)}
            made = encode(replace(job, missing=tuple(sorted(lacking))))
            return {} if is_here else {"job.json": made}

        came = pull(
            self._wanted(folder, whole=whole, is_here=is_here),
            folder,
            look=self._look,
            begins=begins,
            also=last,
            transfer=self._transfer,
            on_event=self._session.on_event,
        )
        if empty := [node_name(node) for node, one in self._nodes.items() if not one.manifest.files]:
            self._session.say(f"no files of {_few(empty)} at {self.where}")
        fetched = {node: came.get(node, NodeFiles(node=node, files=0, bytes=0)) for node in self._nodes}
        if unread:
            raise Changing(self.where, [one.home for one in unread], job, fetched)
        return fetched

    def _wanted(self, folder: Path, *, whole: bool, is_here: bool) -> dict[int, list[ResultFile]]:
        wanted: dict[int, list[ResultFile]] = {}
        for one in name_at_home({node: found.manifest for node, found in self._nodes.items()}):
            stays = is_here and os.path.lexists(folder / one.home)
            is_read = one.home.startswith(_READ_AT_ONCE) or one.home.endswith(_METRICS)
            if not stays and (whole or is_here or is_read):
                wanted.setdefault(one.node, []).append(one)
        return wanted

    def _look(self, _: Collection[int]) -> dict[tuple[int, str], ResultFile]:
        """Return the files as they are listed now, and what has come as it was when it came."""
        listed = {
            (node, one.path): one for node, found in self._nodes.items() for one in found.manifest.files
        }
        return listed | self._came

    def _transfer(
        self, files: Sequence[ResultFile], folder: Path, progress: "Progress", stop: threading.Event
    ) -> None:
        """Download files of a node to their paths below a folder, several at once.

        What an earlier call has brought there is not brought again. Raises ClientError.
        """
        from awsddp.nodes.download import is_here

        done = shown = 0

        def on_bytes(count: int) -> None:
            nonlocal done, shown
            if stop.is_set():
                raise CancelledError
            done += count
            if abs(done - shown) > progress.size / _STEPS:
                progress.report(shown := done)

        missing = [one for one in files if not is_here(folder / one.path[1:], one, begins)]
        for _ in self._store.each(partial(self._download, folder, on_bytes), missing):
            pass

    def _download(self, folder: Path, on_bytes: Callable[[int], None], one: ResultFile) -> None:
        """Download a file as its list names it, or as the list that is read again does. Then it has its time.

        What is not listed any more, or changes too often, is left.
        """
        path = folder / one.path[1:]
        for attempt in range(1 + TRIES):
            row = self._nodes[one.node].rows.get(one.path)
            if row is None:
                return
            try:
                self._store.download(self.where.bucket, row.things(self.where), path, on_bytes)
            except Changed:
                if attempt < TRIES:
                    self._read_again(one, row)
                continue
            os.utime(path, ns=(row.modified, row.modified))
            as_it_came = msgspec.structs.replace(
                one, size=row.size, modified=row.modified, sample=None, **_stamp(row)
            )
            self._came[one.node, one.path] = as_it_came
            return

    def _read_again(self, one: ResultFile, row: Row) -> None:
        """Read a node's list again, unless that of this row has been replaced meanwhile."""
        with self._reading:
            if self._nodes[one.node].rows.get(one.path) is row:
                self._nodes[one.node] = self._read(one.node, self._nodes[one.node].listed)

    def checkpoint(self) -> "SavedCheckpoint":
        """Return the newest checkpoint that is whole. Raises ConfigError where there is none, NodeError."""
        index = self._index
        for _ in range(1 + TRIES):
            with contextlib.suppress(Changed):
                return self._checkpoint(self._lists.checkpoint(index))
            index = self._lists.index() or index
        raise self._lists.changing("job.json")

    def _checkpoint(self, found: tuple[str, Mapping[str, Row]] | None) -> "SavedCheckpoint":
        name, rows = found or ("", {})
        if not rows:
            look = f"awsddp logs {typed(self.where)}"
            raise ConfigError(f"no checkpoint at {self.where}", "none was whole", look)
        files: dict[str, tuple[Part, ...]] = {}
        with self._lists.checked("job.json"):
            for home, row in rows.items():
                node = next((one for one in self._nodes if home.startswith(f"node{one}/")), None)
                top = f"node{node}/{name}"
                if node is None or not f"{home}/".startswith(f"{top}/"):
                    raise ValueError(f"{home!r} is no part of {name!r}")
                self._manifest(node, [_line(home, size=row.size)])
                files[posixpath.basename(name) + home[len(top) :]] = row.parts
        where = Path(f"{self.where}/{name}")
        return SavedCheckpoint(job=self.job.job, parts=(where,), place=self.where, files=files)


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint(Checkpoint):
    """A checkpoint in S3: for each of its files its parts, with their keys below `place`."""

    place: Place
    files: Mapping[str, Sequence[Part]]

    @property
    def shown(self) -> str:
        """Where it is, as it is told."""
        return str(self.parts[0]).replace(":/", "://", 1)


def is_saved(text: str | None) -> TypeGuard[str]:
    """Tell whether a job is named by its place in S3."""
    return text is not None and text.startswith("s3://")


@contextlib.contextmanager
def store_at(target: Target, where: Place) -> Iterator[Store]:
    """Yield S3 as this machine's login sees it. Raises CloudError, ConfigError for what botocore raises in
    the context, NotFoundError where the bucket does not exist.
    """
    from awsddp.aws.login import session_of, translated

    with (
        translated(target, where=str(where)),
        contextlib.closing(
            Store(region=target.region, endpoint=target.endpoint, session=session_of(target))
        ) as store,
    ):
        yield store


@contextlib.contextmanager
def opened(session: Session, uri: str) -> Iterator[Saved]:
    """Yield the job at s3://bucket/prefix/JOB, read with this machine's login.

    Raises NotFoundError, CloudError, NodeError for what no awsddp wrote.
    """
    where = Place(*s3_place(uri))
    with target_for(session, session.folder.read()) as target, store_at(target, where) as store:
        yield Saved(session, store, where)


def brought(session: Session, uri: str, *, whole: bool = False) -> tuple[JobRecord, dict[int, NodeFiles]]:
    """Bring a job's record, logs and metrics into its folder here, `whole` all its results; return the job,
    and what came.

    Raises as `opened`, ConfigError where the folder is another job's, and with `whole` Changing.
    """
    with opened(session, uri) as saved:
        if not saved.is_over:
            does = saved.job.state if saved.job.state in ACTIVE else "still being saved"
            session.say(f"job {saved.job.job} was {does} when it was last saved: more may come")
        try:
            came = saved.bring(whole=whole)
            if whole and saved.is_over and saved.lacking:
                raise Lacking(saved.where, saved.lacking, saved.job, came)
            return saved.job, came
        except Changing as error:
            if whole:
                raise
            session.say(error.message)
            return saved.job, dict(error.fetched)


def in_bucket(session: Session, job: JobRecord) -> bool:
    """Tell whether all results of a job are in S3, by what this machine reads there, and say why not.

    Where they are its record, logs and metrics come here.
    """
    if job.save_to is None:
        return False
    where = f"{job.save_to}/{job.job}"
    try:
        with opened(session, where) as saved:
            why = saved.why_not_all(job)
            if not why:
                saved.bring(whole=False)
    except (AwsddpError, OSError) as error:
        why = error.summary if isinstance(error, AwsddpError) else str(error)
    if why:
        session.say(f"not all results of {job.job} are in {where}: {why}")
    return not why


def signing_secret(session: Session, job: str) -> str:
    """Return the key with which the nodes of a job sign what they list in S3. Raises OSError.

    Whoever has the cluster's key derives it; others who may write below the prefix do not know it.
    """
    return hmac.new(session.folder.key.read_bytes(), f"saving {job}".encode(), hashlib.sha256).hexdigest()


def _known(session: Session, where: Place) -> JobRecord | None:
    """Return the job that this machine has started and that saves to this place, None where it knows none."""
    record = session.folder.read()
    for job in record.jobs if record is not None else ():
        if job.save_to is not None and Place(*s3_place(job.save_to)).below(job.job) == where:
            return job
    return None


def _line(home: str, **more: object) -> dict[str, object]:
    """Return how a result is listed."""
    return {"path": _path(home), "home": home, "size": 0, **more}


def _stamp(row: Row) -> dict[str, int]:
    return dict(zip(("changed", "inode"), row.stamp, strict=True))


def _path(home: str) -> str:
    """Return where a result is staged: the names of a list may be those of files and folders, too."""
    return f"/{hashlib.sha256(os.fsencode(home)).hexdigest()}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _above(where: Place) -> Place:
    return Place(where.bucket, posixpath.dirname(where.prefix))
