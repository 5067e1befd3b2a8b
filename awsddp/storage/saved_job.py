"""Download a job that was saved to S3 (--save-to) from its URI, s3://bucket/prefix/JOB, without its nodes.

The nodes that wrote the objects are not trusted: paths are checked like paths in a node's answers. Only the
version of a file that the node's list describes is downloaded. If the object has changed, the list is read
again.
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
from awsddp.agent.s3.store import CONCURRENCY, ObjectChanged, S3Uri, Store
from awsddp.agent_client.job_reports import encode_job, merge_job
from awsddp.errors import AwsddpError, ConfigError, NodeError, NotFoundError
from awsddp.model.documents import NodeFiles
from awsddp.model.node_answers import Manifest, ResultFile, check_manifest
from awsddp.model.records import ACTIVE, JobRecord, Target
from awsddp.session.context import Session
from awsddp.session.locate import open_target
from awsddp.settings.values import parse_s3_uri
from awsddp.storage.checkpoints import Checkpoint
from awsddp.storage.local_names import assign_local_names, matches_sample
from awsddp.storage.results_dir import is_fetched, refuse_other_job
from awsddp.storage.saved_lists import MAX_READS, ListReader, NodeFileList, Part, SavedFile, quote_uri
from awsddp.util.formatting import node_name
from awsddp.util.parallel import run_each

if TYPE_CHECKING:
    from awsddp.nodes.rsync import Progress

_LOGS = ("logs/", ".awsddp/")
_METRICS = ("/run/metrics.jsonl", f"/run/{DUMP}")
_JOB_SUBFOLDER = re.compile(r"parts|lists|node\d+")
"""The names of a job's subfolders in S3."""
_MAX_NAMED = 10
"""The maximum number of files, nodes or jobs that a message names."""
_REPORTS = 200
"""How often a transfer's progress is reported."""


class FilesChanged(AwsddpError, exit_code=1, kind="changing", retryable=True):
    """Files changed at every attempt to read them. All other results of `job` were downloaded (`fetched`)."""

    def __init__(
        self, uri: S3Uri, paths: Sequence[str], job: JobRecord, fetched: Mapping[int, NodeFiles]
    ) -> None:
        message = "changing faster than it can be read"
        step = f"awsddp fetch {quote_uri(uri)}   # again, once the job writes less"
        if job.state not in ACTIVE:
            message = "not in S3 as listed"
            options = f"--bucket {uri.bucket} --prefix {shlex.quote(uri.prefix)}/"
            step = (
                f"aws s3api list-object-versions {options}   # lists older versions, if the bucket keeps them"
            )
        why = f"these files' lists at {uri} were read {MAX_READS} more times; all other files were fetched"
        super().__init__(f"{message}: {_shorten(paths)}", why, step)
        self.job, self.fetched = job, fetched


class IncompleteUpload(NodeError):
    """S3 does not have all results of an ended `job`. The results in S3 were downloaded (`fetched`)."""

    def __init__(
        self, uri: S3Uri, nodes: Sequence[int], job: JobRecord, fetched: Mapping[int, NodeFiles]
    ) -> None:
        super().__init__(
            f"a part of the results of {job.job} is not at {uri}",
            f"{_shorten([node_name(node) for node in nodes])} did not save all; the saved files were fetched",
            f"awsddp fetch {job.job}   # fetches from the nodes; run this on the machine that has their key",
        )
        self.job, self.fetched = job, fetched


@dataclass(frozen=True)
class _Node:
    """A node's list, as saved and as a manifest; `rows` has the saved files by staging path."""

    listed: NodeFileList
    manifest: Manifest
    rows: Mapping[str, SavedFile]


class StoredJob:
    """A job as stored under an S3 URI. `is_over` is True if the first node has written the final state."""

    def __init__(self, session: Session, store: Store, uri: S3Uri) -> None:
        self._session, self._store, self.uri = session, store, uri
        started, self._secret = _find_started_job(session, uri), None
        if started is not None and session.folder.key.exists():
            self._secret = derive_signing_secret(session, started.job)
        self._lists = ListReader(store, uri, secret=self._secret)
        index = self._lists.read_index()
        if index is None or index.document is None:
            raise self._not_found_error(is_job=index is not None)
        self._index, document = index, index.document
        self.is_over = index.state not in ACTIVE
        job = merge_job({document.node: document}, results=session.job_spec.job.results)
        self.job = replace(job, save_to=str(_parent(uri)))
        if started is not None and started.nodes and set(started.nodes) != set(self.job.nodes):
            raise NodeError(
                f"{uri} holds a job with the same name that other nodes saved",
                f"the nodes of {started.job} are {_shorten([node.instance_id for node in started.nodes])}",
                f"aws s3 ls {quote_uri(uri)}/   # shows the objects; others may have write access",
            )
        self._nodes = dict(
            zip(index.nodes, run_each(self._read, index.nodes, at_most=CONCURRENCY), strict=True)
        )
        self._downloaded: dict[tuple[int, str], ResultFile] = {}
        self._reading = threading.Lock()

    @property
    def incomplete_nodes(self) -> tuple[int, ...]:
        """The nodes whose results are not completely in S3."""
        return tuple(sorted(number for number, node in self._nodes.items() if not node.listed.is_all))

    def explain_incomplete(self, job: JobRecord) -> str:
        """Return why S3 does not have all results of this machine's job, or "" if it has all of them.

        Every listed object must be in the bucket, with the listed size and ETag.
        """
        if self._secret is None:
            return "this machine does not have the key to verify who wrote it"
        if not job.nodes or set(self.job.nodes) != set(job.nodes):
            return "the results there come from other nodes"
        if not self.is_over:
            return "the job has not ended there"
        if self.incomplete_nodes:
            return f"{_shorten([node_name(node) for node in self.incomplete_nodes])} did not save all"
        parts = (part for node in self._nodes.values() for row in node.rows.values() for part in row.parts)
        needed = {(self.uri.key(part.key), part.size, part.etag) for part in parts}
        for thing in self._store.list(self.uri):
            needed.discard((thing.key, thing.size, thing.etag))
        absent = [ascii(key) for key, *_ in sorted(needed)]
        return f"not in S3 as listed: {_shorten(absent)}" if absent else ""

    def _not_found_error(self, *, is_job: bool) -> NotFoundError:
        """Return the error for a URI without results; the error suggests jobs near the URI."""
        message = "no results of the job yet" if is_job else "no job"
        nearby, names = self._find_nearby_jobs(is_job=is_job)
        why, command = "", f"aws s3 ls {quote_uri(nearby)}/   # what is there"
        if names:
            why = f"{nearby}/ has {', '.join(names[-_MAX_NAMED:])}"
            command = f"awsddp jobs {quote_uri(nearby.join(names[-1]))}"
        return NotFoundError(f"{message} at {self.uri}", why, command)

    def _find_nearby_jobs(self, *, is_job: bool) -> tuple[S3Uri, list[str]]:
        """Return the URI or its parent, and the names of folders there that may be other jobs."""
        parent, job_name = _parent(self.uri), posixpath.basename(self.uri.prefix)
        for nearby in (parent,) if is_job else (self.uri, parent):
            with contextlib.suppress(self._store.client.exceptions.ClientError):
                folders = islice(self._store.list_folders(nearby), 1000)
                names = [
                    name for name in folders if NAME.fullmatch(name) and not _JOB_SUBFOLDER.fullmatch(name)
                ]
                if names := [name for name in names if nearby != parent or name != job_name]:
                    return nearby, names
        return parent, []

    def _read(self, node: int, before: NodeFileList | None = None) -> _Node:
        """Read the list that a node saved, and check it like a manifest from a node. Raises NodeError."""
        listed = self._lists.read_node(node, launch=self._index.launch, earlier=before)
        with self._lists.translating_errors(f"node{node}.json"):
            entries = [
                _entry(path, size=row.size, modified=row.modified, sample=row.sample, **_stamp(row))
                for path, row in listed.files.items()
            ]
            entries += [_entry(path, target=target) for path, target in listed.links.items()]
            manifest = self._manifest(node, entries)
        return _Node(listed, manifest, {_staging_path(path): row for path, row in listed.files.items()})

    def _manifest(self, node: int, entries: Sequence[Mapping[str, Any]]) -> Manifest:
        """Return a node's checked manifest. Raises ValueError or ValidationError."""
        manifest = msgspec.convert({"files": entries, "skipped": []}, Manifest)
        check_manifest(manifest, node, [rank.rank for rank in self.job.ranks if rank.node == node])
        return manifest

    def download(self, *, all_results: bool) -> dict[int, NodeFiles]:
        """Download the logs and metrics or, with `all_results`, all results, into the results folder.

        Files that are already downloaded are skipped. If the folder once had all results, existing files stay
        and missing files are restored. Raises ConfigError or NodeError. Raises FilesChanged after all other
        files are downloaded.
        """
        from awsddp.nodes.download import pull

        job, folder = self.job, self._session.results / self.job.job
        refuse_other_job(self._session, job, strict=True)
        if all_results:
            self._store.abort(_parent(self.uri), ended_jobs=())
        is_here, unread = is_fetched(folder, job), list[ResultFile]()

        def last(changed: Sequence[ResultFile]) -> Mapping[str, bytes]:
            unread.extend(file for file in changed if file.path in self._nodes[file.node].rows)
            lacking = {
                *(self.incomplete_nodes if all_results else self._nodes),
                *(file.node for file in unread),
            }
            content = encode_job(replace(job, missing=tuple(sorted(lacking))))
            return {} if is_here else {"job.json": content}

        downloaded = pull(
            self._select_files(folder, whole=all_results, is_here=is_here),
            folder,
            list_files=self._current_files,
            matches_sample=matches_sample,
            last_files=last,
            transfer=self._transfer,
            on_event=self._session.on_event,
        )
        if empty := [node_name(number) for number, node in self._nodes.items() if not node.manifest.files]:
            self._session.say(f"no files of {_shorten(empty)} at {self.uri}")
        fetched = {node: downloaded.get(node, NodeFiles(node=node, files=0, bytes=0)) for node in self._nodes}
        if unread:
            raise FilesChanged(self.uri, [file.home for file in unread], job, fetched)
        return fetched

    def _select_files(self, folder: Path, *, whole: bool, is_here: bool) -> dict[int, list[ResultFile]]:
        wanted: dict[int, list[ResultFile]] = {}
        manifests = {number: node.manifest for number, node in self._nodes.items()}
        for file in assign_local_names(manifests):
            stays = is_here and os.path.lexists(folder / file.home)
            is_read = file.home.startswith(_LOGS) or file.home.endswith(_METRICS)
            if not stays and (whole or is_here or is_read):
                wanted.setdefault(file.node, []).append(file)
        return wanted

    def _current_files(self, _: Collection[int]) -> dict[tuple[int, str], ResultFile]:
        """Return the listed files; files already downloaded are described as they were when downloaded."""
        listed = {
            (number, file.path): file for number, node in self._nodes.items() for file in node.manifest.files
        }
        return listed | self._downloaded

    def _transfer(
        self, files: Sequence[ResultFile], folder: Path, progress: "Progress", stop: threading.Event
    ) -> None:
        """Download several of a node's files in parallel to their paths under a folder.

        Files that an earlier call has downloaded are skipped. Raises ClientError.
        """
        from awsddp.nodes.download import is_downloaded

        done = shown = 0

        def on_bytes(count: int) -> None:
            nonlocal done, shown
            if stop.is_set():
                raise CancelledError
            done += count
            if abs(done - shown) > progress.size / _REPORTS:
                progress.report(shown := done)

        missing = [file for file in files if not is_downloaded(folder / file.path[1:], file, matches_sample)]
        for _ in self._store.run_each(partial(self._download, folder, on_bytes), missing):
            pass

    def _download(self, folder: Path, on_bytes: Callable[[int], None], file: ResultFile) -> None:
        """Download a file as the node's list describes it, and set its time; read the list again if needed.

        Skips a file that is no longer listed or that changes at every attempt.
        """
        path = folder / file.path[1:]
        for attempt in range(1 + MAX_READS):
            row = self._nodes[file.node].rows.get(file.path)
            if row is None:
                return
            try:
                self._store.download(self.uri.bucket, row.list_objects(self.uri), path, on_bytes)
            except ObjectChanged:
                if attempt < MAX_READS:
                    self._read_again(file, row)
                continue
            os.utime(path, ns=(row.modified, row.modified))
            downloaded = msgspec.structs.replace(
                file, size=row.size, modified=row.modified, sample=None, **_stamp(row)
            )
            self._downloaded[file.node, file.path] = downloaded
            return

    def _read_again(self, file: ResultFile, row: SavedFile) -> None:
        """Read a node's list again, unless another thread has already replaced the list that has `row`."""
        with self._reading:
            if self._nodes[file.node].rows.get(file.path) is row:
                self._nodes[file.node] = self._read(file.node, self._nodes[file.node].listed)

    def read_checkpoint(self) -> "SavedCheckpoint":
        """Return the newest complete checkpoint. Raises NodeError, or ConfigError if no checkpoint is
        complete."""
        index = self._index
        for _ in range(1 + MAX_READS):
            with contextlib.suppress(ObjectChanged):
                return self._checkpoint(self._lists.read_checkpoint(index))
            index = self._lists.read_index() or index
        raise self._lists.make_changing_error("job.json")

    def _checkpoint(self, checkpoint: tuple[str, Mapping[str, SavedFile]] | None) -> "SavedCheckpoint":
        name, rows = checkpoint or ("", {})
        if not rows:
            command = f"awsddp logs {quote_uri(self.uri)}"
            raise ConfigError(f"no checkpoint at {self.uri}", "no checkpoint is complete", command)
        files: dict[str, tuple[Part, ...]] = {}
        with self._lists.translating_errors("job.json"):
            for path, row in rows.items():
                node = next((number for number in self._nodes if path.startswith(f"node{number}/")), None)
                top = f"node{node}/{name}"
                if node is None or not f"{path}/".startswith(f"{top}/"):
                    raise ValueError(f"{path!r} is no part of {name!r}")
                self._manifest(node, [_entry(path, size=row.size)])
                files[posixpath.basename(name) + path[len(top) :]] = row.parts
        parts = (Path(f"{self.uri}/{name}"),)
        modified = max(row.modified for row in rows.values()) / 1e9
        return SavedCheckpoint(job=self.job.job, parts=parts, modified=modified, uri=self.uri, files=files)


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint(Checkpoint):
    """A checkpoint in S3; `files` has each file's parts, with keys under `uri`."""

    uri: S3Uri
    files: Mapping[str, Sequence[Part]]

    @property
    def display_path(self) -> str:
        """The S3 URI to show to the user."""
        return str(self.parts[0]).replace(":/", "://", 1)


def is_s3_uri(text: str | None) -> TypeGuard[str]:
    """Return True if `text` is an S3 URI."""
    return text is not None and text.startswith("s3://")


@contextlib.contextmanager
def open_store(target: Target, uri: S3Uri) -> Iterator[Store]:
    """Yield an S3 store with this machine's login. In the context, botocore's errors are turned into
    awsddp's.

    Raises CloudError, ConfigError, or NotFoundError if the bucket does not exist.
    """
    from awsddp.aws.login import session_of, translate_aws_errors

    with (
        translate_aws_errors(target, location=str(uri)),
        contextlib.closing(
            Store(region=target.region, endpoint=target.endpoint, session=session_of(target))
        ) as store,
    ):
        yield store


@contextlib.contextmanager
def open_saved_job(session: Session, uri: str) -> Iterator[StoredJob]:
    """Yield the job at s3://bucket/prefix/JOB, read with this machine's login.

    Raises NotFoundError, CloudError, or NodeError for invalid documents.
    """
    place = S3Uri(*parse_s3_uri(uri))
    with open_target(session, session.folder.read()) as target, open_store(target, place) as store:
        yield StoredJob(session, store, place)


def download_saved_job(
    session: Session, uri: str, *, all_results: bool = False
) -> tuple[JobRecord, dict[int, NodeFiles]]:
    """Download a job's record, logs and metrics into its results folder; with `all_results`, download all
    results.

    Returns the job and the files by node. Raises the same errors as `open_saved_job`, and ConfigError if the
    folder belongs to another job. With `all_results`, also raises FilesChanged and IncompleteUpload.
    """
    with open_saved_job(session, uri) as saved:
        if not saved.is_over:
            activity = saved.job.state if saved.job.state in ACTIVE else "still being saved"
            session.say(f"job {saved.job.job} was {activity} when it was last saved: more results may follow")
        try:
            downloaded = saved.download(all_results=all_results)
            if all_results and saved.is_over and saved.incomplete_nodes:
                raise IncompleteUpload(saved.uri, saved.incomplete_nodes, saved.job, downloaded)
            return saved.job, downloaded
        except FilesChanged as error:
            if all_results:
                raise
            session.say(error.message)
            return saved.job, dict(error.fetched)


def verify_in_s3(session: Session, job: JobRecord) -> bool:
    """If S3 has all results of a job, download its record, logs and metrics, and return True.

    Otherwise, report the reason (except for a job without `save_to`), and return False.
    """
    if job.save_to is None:
        return False
    uri = f"{job.save_to}/{job.job}"
    try:
        with open_saved_job(session, uri) as saved:
            why = saved.explain_incomplete(job)
            if not why:
                saved.download(all_results=False)
    except (AwsddpError, OSError) as error:
        why = error.summary if isinstance(error, AwsddpError) else str(error)
    if why:
        session.say(f"not all results of {job.job} are in {uri}: {why}")
    return not why


def derive_signing_secret(session: Session, job: str) -> str:
    """Return the secret with which a job's nodes sign their lists in S3. Raises OSError.

    The secret is derived from the cluster's key, which other users of the bucket do not have.
    """
    return hmac.new(session.folder.key.read_bytes(), f"saving {job}".encode(), hashlib.sha256).hexdigest()


def _find_started_job(session: Session, uri: S3Uri) -> JobRecord | None:
    """Return the job from this machine that saves to this URI, or None if there is no such job."""
    record = session.folder.read()
    for job in record.jobs if record is not None else ():
        if job.save_to is not None and S3Uri(*parse_s3_uri(job.save_to)).join(job.job) == uri:
            return job
    return None


def _entry(path: str, **more: object) -> dict[str, object]:
    """Return a result's manifest entry."""
    return {"path": _staging_path(path), "home": path, "size": 0, **more}


def _stamp(row: SavedFile) -> dict[str, int]:
    return dict(zip(("changed", "inode"), row.stamp, strict=True))


def _staging_path(path: str) -> str:
    """Return a result's staging path, which is a hash, because a list can give a file and a folder the same
    name."""
    return f"/{hashlib.sha256(os.fsencode(path)).hexdigest()}"


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _parent(uri: S3Uri) -> S3Uri:
    return S3Uri(uri.bucket, posixpath.dirname(uri.prefix))
