"""--data: list a job's data sources for a plan, and copy them to its nodes before the ranks start."""

import contextlib
import hashlib
import importlib.util
import itertools
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from awsddp.agent.file_tree import stat_stamp
from awsddp.agent.s3.store import CONCURRENCY, DATA_FOLDER, ObjectChanged, S3Object, S3Uri, Store, signature
from awsddp.agent_client import program
from awsddp.agent_client.rank_layout import DATA
from awsddp.errors import ConfigError, NodeError, NotFoundError
from awsddp.model.events import Event
from awsddp.model.records import Amount, Target, Text
from awsddp.plan.records import Data
from awsddp.plan.save_checks import bucket_not_found
from awsddp.session.context import ConnectedCluster, LocatedCluster
from awsddp.settings.loader import with_secrets
from awsddp.settings.spec import JobSpec
from awsddp.settings.values import Source, parse_data_sources, parse_s3_uri
from awsddp.storage.checkpoints import Checkpoint
from awsddp.storage.saved_job import SavedCheckpoint, open_saved_job, open_store
from awsddp.storage.saved_lists import MAX_READS, PageRef
from awsddp.util.formatting import files_text, node_name, size_text
from awsddp.util.parallel import NodesFailed, results_or_raise, run_each

if TYPE_CHECKING:
    from awsddp.nodes.project_files import Listing

MAX_LISTED = 100_000
"""The maximum number of objects that a plan lists in a source, which takes 100 requests."""
_MODULES = ("file_tree", "s3.store", "s3.download")
_PACKAGES = ("botocore", "s3transfer", "jmespath", "dateutil", "six", "urllib3")
"""The packages on this machine that a node without boto3 needs for agent/s3/store.py."""
_MODELS = ("s3", "sts", "endpoints.json", "partitions.json", "sdk-default-configuration.json", "_retry.json")
"""The botocore data files that are sent with these packages."""
BUNDLE = "boto3"
_PAGE_BYTES = 1 << 20
"""The approximate size of a page in the list of sent files (bytes)."""
_Row = tuple[int, int, int, int, str]
_LIST_WRITES = 20
"""Approximately how many times the list of sent files is written while a folder is uploaded."""
_SILENT_S = 120.0
_PASSED_PREFIXES = ("HF_", "SSL_CERT_FILE", "REQUESTS_CABUNDLE", "http_proxy", "https_proxy", "no_proxy")
"""Prefixes of the job variables that are passed to Hugging Face's program."""


class _DownloadResult(msgspec.Struct, frozen=True):
    """The answer from agent/s3/download.py."""

    copied: Amount = 0
    bytes: Amount = 0
    lacks: bool = False
    changed: bool = False
    failed: Text = ""
    why: Text = ""
    next: Text = ""


def check_sources(spec: JobSpec, *, internet: bool = True) -> None:
    """Raise ConfigError if a local data folder is missing or the nodes cannot reach a source."""
    label = spec.label("data.sources")
    for source in parse_data_sources(spec.data.sources):
        if source.kind == "folder" and not Path(source.at).expanduser().is_dir():
            step = "name a folder, or s3://bucket/prefix"
            raise ConfigError(f"{label}: {source.at} is not a local folder", "", step)
        if source.kind == "hf" and not internet:
            command = f"hf download {source.at} --repo-type dataset --local-dir data"
            step = f"{command}   # on this machine; then use --data ./data"
            raise ConfigError(
                f"{label}: the nodes cannot reach {source}", "they have no internet access", step
            )


def list_data(spec: JobSpec, target: Target, *, internet: bool) -> tuple[Data, ...]:
    """Return the size and file count of a job's data sources, if this machine's login can list them.

    Raises ConfigError for a folder that cannot be sent, and for sources that the nodes cannot reach or that
    S3 does not have.
    """
    check_sources(spec, internet=internet)
    return tuple(run_each(partial(_list_source, spec, target), parse_data_sources(spec.data.sources)))


def _list_source(spec: JobSpec, target: Target, source: Source) -> Data:
    data = Data(name=source.name, source=str(source))
    if source.kind == "folder":
        files = _list_files(source)
        return replace(data, bytes=files.size, files=len(files.entries))
    if source.kind == "hf":
        return replace(data, why="Hugging Face is not asked")
    from awsddp.agent.s3.download import CopyError, list_objects
    from awsddp.aws.login import session_of

    payer = spec.data.requester_pays
    make = partial(
        Store, region=target.region, endpoint=target.endpoint, session=session_of(target), payer=payer
    )
    try:
        store, objects = list_objects(S3Uri(source.at, source.part), make, most=MAX_LISTED)
    except CopyError as refusal:
        why = refusal.document["why"]
        if refusal.code in ("NoSuchBucket", ""):  # "": no object has the prefix
            raise ConfigError(str(refusal), why, refusal.document["next"]) from refusal
        return replace(data, why=f"{refusal}: {why}".rstrip(": "), requester_pays=payer)
    with contextlib.closing(store):
        return replace(
            data,
            bytes=sum(item.size for item in objects),
            files=len(objects),
            at_least=len(objects) == MAX_LISTED,
            region=store.get_region(source.at),
            requester_pays=payer,
        )


def copy_data_to_nodes(connected: ConnectedCluster, nodes: Collection[int], spec: JobSpec) -> None:
    """Copy a job's data to its nodes in parallel, except files that the nodes already have.

    `spec` has the ranks' variables. Raises ConfigError, CloudError, or NodesFailed with the source's name.
    """
    sources = list(parse_data_sources(spec.data.sources))
    if not sources:
        return
    from awsddp.nodes.sync import push

    fleet = connected.fleet
    check_sources(spec, internet=connected.cluster.record.internet)
    folders = {source.name: _list_files(source) for source in sources if source.kind == "folder"}
    for name, listing in folders.items():
        for path, why in listing.skipped:
            connected.session.on_event(Event(f"data {name}: not sent: {path}: {why}"))
    if spec.job.save_to is not None:
        parent = S3Uri(*parse_s3_uri(spec.job.save_to))
        for number, source in enumerate(sources):
            files = folders.get(source.name)  # S3 objects cannot be links, and their keys are Unicode
            if (
                files
                and files.size
                and all(file.kind != "l" and file.path.isprintable() for file in files.entries)
            ):
                try:
                    sources[number] = _upload_folder(
                        connected.cluster, source.name, folders.pop(source.name), parent
                    )
                except NotFoundError as error:
                    raise bucket_not_found(parent.bucket, connected.cluster.aws.region) from error
                except OSError as error:
                    step = "awsddp train   # again: files already sent are skipped"
                    raise ConfigError(f"data {source.name} cannot be read", str(error), step) from error
    variables = with_secrets(spec).env.variables
    message = {
        "sources": [source._asdict() for source in sources],
        "bytes": sum(files.size for files in folders.values()),
        "payer": spec.data.requester_pays,
        "environ": {name: text for name, text in variables.items() if name.startswith(_PASSED_PREFIXES)},
    }
    _download(connected, nodes, message, DATA)
    for name, files in folders.items():
        folder = f"{DATA.rpartition('/')[2]}/{name}"
        push(files, fleet, folder=folder, nodes=nodes, on_event=connected.session.on_event)


def _upload_folder(cluster: LocatedCluster, name: str, files: "Listing", parent: S3Uri) -> Source:
    """Upload a local folder to the bucket, and return the S3 source from which the nodes copy it.

    Files that the bucket already has are skipped. Raises CloudError, ConfigError, OSError.
    """
    from awsddp.aws.login import session_name
    from awsddp.nodes.catalog import signing_key

    owner = hashlib.sha256(f"{session_name()}:{files.root}".encode()).hexdigest()[:16]
    parent = parent.join(f"{DATA_FOLDER}/{owner}")
    uri = parent.join(name)
    paths = (file.path for file in files.entries if file.kind == "f")
    wanted = {path: stat_stamp(Path(files.root, path).stat()) for path in paths}
    with open_store(cluster.target, uri) as store:
        prefix = f"{uri.prefix}/"
        stored = {item.key.removeprefix(prefix): (item.size, item.etag) for item in store.list(uri)}
        sent = _SentFiles(store, parent, name, secret=signing_key(cluster.session.home / "packages").hex())
        sent.read(lambda path, row: row[:4] == wanted.get(path) and (row[0], row[4]) == stored.get(path))
        missing = {path: Path(files.root, path) for path in wanted if path not in sent.rows}
        size, done = sum(wanted[path][0] for path in missing), 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            text = f"sending {size_text(size)} of data to {uri}"
            cluster.session.on_event(Event(text, who="", fraction=min(1.0, max(done, 0) / size), size=size))

        def delete(path: str) -> None:
            store.client.delete_object(Bucket=uri.bucket, Key=uri.key(path))

        sent.write()
        for _ in store.run_each(delete, stored.keys() - wanted.keys()):
            pass
        names, count = iter(missing), max(CONCURRENCY, len(missing) // _LIST_WRITES)
        while batch := list(itertools.islice(names, count)):
            etags = store.upload_files({path: missing[path] for path in batch}, uri, on_bytes)
            sent.rows |= {path: (*wanted[path], etags[path]) for path in batch}
            sent.write()
    return Source(name, "s3", uri.bucket, uri.prefix)


class _SentFiles:
    """The list of a local folder's files that are in a bucket. `rows` maps each path to its file stamp and
    ETag.

    The list is stored in pages, PARENT/.NAME/0 and so on. PARENT/NAME.json lists the pages. It is signed with
    this machine's `secret`, because others can write to the bucket.
    """

    def __init__(self, store: Store, parent: S3Uri, name: str, *, secret: str) -> None:
        self._store, self._parent, self._name, self._secret = store, parent, name, secret
        self._pages: dict[bytes, PageRef] = {}
        self.rows: dict[str, _Row] = {}

    def read(self, is_valid: Callable[[str, _Row], bool]) -> None:
        """Read the stored rows for which `is_valid` returns True. Ignores unsigned documents."""
        invalid = ValueError, RecursionError, msgspec.ValidationError, ObjectChanged
        with contextlib.suppress(*invalid):
            document = self._store.document(self._parent, f"{self._name}.json")
            if document is None or document.signature != self._sign(f"{self._name}.json", document.body):
                return
            for ref in msgspec.convert(document.parse(), tuple[PageRef, ...]):
                with contextlib.suppress(*invalid):
                    body = self._store.read_object(self._parent, S3Object(*ref))
                    page = msgspec.json.decode(body, type=dict[str, _Row])
                    self.rows |= {path: row for path, row in page.items() if is_valid(path, row)}
                    self._pages[body] = ref

    def write(self) -> None:
        """Write the pages that have changed, and the list of pages. Raises ClientError."""
        pages: dict[bytes, PageRef] = {}
        for number, rows in enumerate(_split(self.rows)):
            body, key = msgspec.json.encode(rows), f".{self._name}/{number}"
            ref = self._pages.get(body)
            if ref is None or ref.key != key:
                ref = PageRef(key, len(body), self._store.put(self._parent, key, body))
            pages[body] = ref
        if pages != self._pages:
            self._store.write(self._parent, f"{self._name}.json", list(pages.values()), sign=self._sign)
        self._pages = pages

    def _sign(self, name: str, body: bytes) -> str:
        return signature(self._secret, DATA_FOLDER, name, body)


def _split(rows: Mapping[str, _Row]) -> Iterator[dict[str, _Row]]:
    """Split rows, keeping their order, into pages with at most about _PAGE_BYTES of JSON."""
    page: dict[str, _Row] = {}
    size = 0
    for path, row in rows.items():
        page[path] = row
        size += 6 * len(path) + 150  # at most
        if size > _PAGE_BYTES:
            yield page
            page, size = {}, 0
    yield page


def copy_checkpoint_to_nodes(
    connected: ConnectedCluster, checkpoint: Checkpoint, nodes: Collection[int]
) -> None:
    """Send a checkpoint to nodes, or let them download it from S3. Raises NodesFailed or ConfigError."""
    from awsddp.nodes.project_files import list_files_to_send
    from awsddp.nodes.sync import push

    if isinstance(checkpoint, SavedCheckpoint):
        _send_saved_checkpoint(connected, checkpoint, nodes)
        return
    with checkpoint.stage() as staged:
        push(list_files_to_send(staged), connected.fleet, folder=checkpoint.folder, nodes=nodes)


def _send_saved_checkpoint(
    connected: ConnectedCluster, checkpoint: SavedCheckpoint, nodes: Collection[int]
) -> None:
    """Let nodes download a checkpoint from S3, and download it again if a running job replaces its files.

    Raises NodesFailed if a node fails. Raises ConfigError if the newest checkpoint now has another name than
    `checkpoint`, because the ranks expect that name.
    """
    folder, uri = f"awsddp/{checkpoint.folder}", str(checkpoint.uri)
    for attempt in range(1 + MAX_READS):
        try:
            _download(connected, nodes, {"place": checkpoint.uri, "files": checkpoint.files}, folder)
            return
        except NodesFailed as failed:
            changed = any(getattr(error, "layer", "") == "changed" for error in failed.failures.values())
            if not changed or attempt == MAX_READS:
                raise
        with open_saved_job(connected.session, uri) as saved:
            newest = saved.read_checkpoint()
        if newest.name != checkpoint.name:
            why = f"{newest.display_path} is the newest checkpoint now"
            step = "awsddp train   # again: uses the newest checkpoint"
            raise ConfigError(f"{checkpoint.display_path} was replaced while it was downloaded", why, step)
        checkpoint = newest


def send_s3_packages(connected: ConnectedCluster, nodes: Collection[int]) -> None:
    """Send this machine's S3 packages to nodes whose Python has no boto3. Raises NodesFailed."""
    from awsddp.nodes.project_files import list_files_to_send
    from awsddp.nodes.sync import push

    with _packages() as bundle:
        push(
            list_files_to_send(bundle),
            connected.fleet,
            folder=BUNDLE,
            nodes=nodes,
            on_event=connected.session.on_event,
        )


def _list_files(source: Source) -> "Listing":
    from awsddp.nodes.project_files import list_files_to_send

    return list_files_to_send(Path(source.at).expanduser(), results=".awsddp")


def _download(
    connected: ConnectedCluster, nodes: Collection[int], message: Mapping[str, Any], folder: str
) -> None:
    """Let nodes download to a folder in their home directory. Raises NodesFailed."""
    from awsddp.nodes.environments import run_programs
    from awsddp.nodes.node_failures import Layer, NodeFailure

    s3_settings = {"region": connected.cluster.aws.region, "endpoint": connected.cluster.target.node_s3}

    def copy(nodes: Collection[int]) -> dict[int, _DownloadResult | NodeError]:
        requests = {}
        for node in nodes:
            prepared = connected.cluster.record.prepared_by_node[node]
            folders = {"folder": f"{prepared.home}/{folder}", "packages": f"{prepared.home}/awsddp/{BUNDLE}"}
            request = {**message, **s3_settings, **folders}
            requests[node] = program.node_program(prepared.python, _MODULES, request)
        failed = "the data could not be copied"
        return run_programs(
            connected.fleet, requests, _DownloadResult, failure_message=failed, silent_s=_SILENT_S
        )

    results = copy(nodes)
    lacking = [
        node for node, result in results.items() if isinstance(result, _DownloadResult) and result.lacks
    ]
    if lacking:
        send_s3_packages(connected, lacking)
        results |= copy(lacking)
    for node, result in results.items():
        if isinstance(result, _DownloadResult) and result.failed:
            layer: Layer = "changed" if result.changed else "files"
            results[node] = NodeFailure(node, layer, result.failed, result.why, result.next)
    for node, result in results_or_raise(results).items():
        if "place" in message or any(source["kind"] != "folder" for source in message["sources"]):
            text = f"data: {files_text(int(result.copied), int(result.bytes))} copied"
            connected.session.on_event(Event(text, who=node_name(node), fraction=1.0))


@contextlib.contextmanager
def _packages() -> Iterator[Path]:
    """Yield a temporary folder with this machine's packages that a node needs for S3."""
    with tempfile.TemporaryDirectory() as folder:
        for name in _PACKAGES:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None, "botocore needs it"
            path = Path(spec.origin)
            if path.name != "__init__.py":
                shutil.copy2(path, folder)
                continue
            shutil.copytree(path.parent, Path(folder, name), ignore=_ignored_names)
        yield Path(folder)


def _ignored_names(folder: str, names: list[str]) -> list[str]:
    is_models = folder.endswith("/botocore/data")
    return [name for name in names if name == "__pycache__" or (is_models and name not in _MODELS)]
