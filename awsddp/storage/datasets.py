"""--data: what its sources hold, for a plan; and onto the nodes of a job, before its ranks."""

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

from awsddp.agent.file_tree import stamp_of
from awsddp.agent.s3.store import AT_ONCE, FOLDERS, Changed, Place, Store, Thing, signature
from awsddp.agent_client import program
from awsddp.agent_client.rank_layout import DATA
from awsddp.errors import ConfigError, NodeError, NotFoundError
from awsddp.model.events import Event
from awsddp.model.records import Amount, Target, Text
from awsddp.plan.records import Data
from awsddp.plan.save_checks import no_bucket
from awsddp.session.context import ConnectedCluster, LocatedCluster
from awsddp.settings.loader import with_secrets
from awsddp.settings.spec import JobSpec
from awsddp.settings.values import Source, data_sources, s3_place
from awsddp.storage.checkpoints import Checkpoint
from awsddp.storage.saved_job import SavedCheckpoint, opened, store_at
from awsddp.storage.saved_lists import TRIES, Ref
from awsddp.util.format import amount, node_name, size_text
from awsddp.util.parallel import NodesFailed, each, split

if TYPE_CHECKING:
    from awsddp.nodes.project_files import Listing

MOST_LISTED = 100_000
"""How many objects of a source a plan lists, in 100 requests."""
_MODULES = ("file_tree", "s3.store", "s3.download")
_PACKAGES = ("botocore", "s3transfer", "jmespath", "dateutil", "six", "urllib3")
"""What agent/s3/store.py needs, of this machine, for a node whose Python lacks it."""
_MODELS = ("s3", "sts", "endpoints.json", "partitions.json", "sdk-default-configuration.json", "_retry.json")
"""Which models of AWS's services go with it."""
BUNDLE = "boto3"
_PAGE_BYTES = 1 << 20
"""How long a page of what a bucket has of a folder is, about."""
_Row = tuple[int, int, int, int, str]
_LISTS = 20
"""How often, about, it is written down while a folder goes to a bucket what of it is there."""
_SILENT_S = 120.0
_PASSED = ("HF_", "SSL_CERT_FILE", "REQUESTS_CABUNDLE", "http_proxy", "https_proxy", "no_proxy")
"""How variables of the job begin that Hugging Face's program gets."""


class _Said(msgspec.Struct, frozen=True):
    """The answer of agent/s3/download.py."""

    copied: Amount = 0
    bytes: Amount = 0
    lacks: bool = False
    changed: bool = False
    failed: Text = ""
    why: Text = ""
    next: Text = ""


def check_sources(spec: JobSpec, *, internet: bool = True) -> None:
    """Raise ConfigError for a folder of data that is not here, and for what the nodes cannot reach."""
    label = spec.label("data.sources")
    for one in data_sources(spec.data.sources):
        if one.kind == "folder" and not Path(one.at).expanduser().is_dir():
            next = "name a folder, or s3://bucket/prefix"
            raise ConfigError(f"{label}: {one.at} is no folder here", "", next)
        if one.kind == "hf" and not internet:
            next = f"hf download {one.at} --repo-type dataset --local-dir data   # here; then --data ./data"
            raise ConfigError(f"{label}: the nodes do not reach {one}", "they have no internet", next)


def listed_data(spec: JobSpec, target: Target, *, internet: bool) -> tuple[Data, ...]:
    """Return what the sources of a job's data hold, as far as this machine's login may list them.

    Raises ConfigError for a folder that cannot be sent, for what the nodes cannot reach or S3 does not have.
    """
    check_sources(spec, internet=internet)
    return tuple(each(partial(_listed, spec, target), data_sources(spec.data.sources)))


def _listed(spec: JobSpec, target: Target, source: Source) -> Data:
    data = Data(name=source.name, source=str(source))
    if source.kind == "folder":
        files = _files(source)
        return replace(data, bytes=files.size, files=len(files.entries))
    if source.kind == "hf":
        return replace(data, why="Hugging Face is not asked")
    from awsddp.agent.s3.download import Refusal, listing
    from awsddp.aws.login import session_of

    payer = spec.data.requester_pays
    make = partial(
        Store, region=target.region, endpoint=target.endpoint, session=session_of(target), payer=payer
    )
    try:
        store, things = listing(Place(source.at, source.part), make, most=MOST_LISTED)
    except Refusal as refusal:
        why = refusal.document["why"]
        if refusal.code in ("NoSuchBucket", ""):  # or nothing below the prefix
            raise ConfigError(str(refusal), why, refusal.document["next"]) from refusal
        return replace(data, why=f"{refusal}: {why}".rstrip(": "), requester_pays=payer)
    with contextlib.closing(store):
        return replace(
            data,
            bytes=sum(one.size for one in things),
            files=len(things),
            at_least=len(things) == MOST_LISTED,
            region=store.region(source.at),
            requester_pays=payer,
        )


def bring(connected: ConnectedCluster, nodes: Collection[int], spec: JobSpec) -> None:
    """Bring the data of a job to its nodes, all at once; what is there already does not travel.

    `spec` has the variables of its ranks. Raises ConfigError, CloudError, and NodesFailed, naming the source.
    """
    sources = list(data_sources(spec.data.sources))
    if not sources:
        return
    from awsddp.nodes.sync import push

    fleet = connected.fleet
    check_sources(spec, internet=connected.cluster.record.internet)
    folders = {one.name: _files(one) for one in sources if one.kind == "folder"}
    for name, listing in folders.items():
        for path, why in listing.skipped:
            connected.session.on_event(Event(f"not sent of the data {name}: {path}: {why}"))
    if spec.job.save_to is not None:
        above = Place(*s3_place(spec.job.save_to))
        for number, one in enumerate(sources):
            files = folders.get(one.name)  # objects know no links, and their keys are Unicode
            if files and files.size and all(it.kind != "l" and it.path.isprintable() for it in files.entries):
                try:
                    sources[number] = _by_bucket(connected.cluster, one.name, folders.pop(one.name), above)
                except NotFoundError as error:
                    raise no_bucket(above.bucket, connected.cluster.aws.region) from error
                except OSError as error:
                    why, next = str(error), "awsddp train   # again: what is there does not travel"
                    raise ConfigError(f"data {one.name} cannot be read", why, next) from error
    variables = with_secrets(spec).env.variables
    message = {
        "sources": [one._asdict() for one in sources],
        "bytes": sum(files.size for files in folders.values()),
        "payer": spec.data.requester_pays,
        "environ": {name: text for name, text in variables.items() if name.startswith(_PASSED)},
    }
    _ask(connected, nodes, message, DATA)
    for name, files in folders.items():
        folder = f"{DATA.rpartition('/')[2]}/{name}"
        push(files, fleet, folder=folder, nodes=nodes, on_event=connected.session.on_event)


def _by_bucket(cluster: LocatedCluster, name: str, files: "Listing", above: Place) -> Source:
    """Have a bucket hold a folder of this machine's, and return what its nodes copy it from.

    What is there already does not travel. Raises CloudError, ConfigError, OSError.
    """
    from awsddp.aws.login import session_name
    from awsddp.nodes.catalog import signing_key

    owner = hashlib.sha256(f"{session_name()}:{files.root}".encode()).hexdigest()[:16]
    above = above.below(f"{FOLDERS}/{owner}")
    where = above.below(name)
    paths = (one.path for one in files.entries if one.kind == "f")
    wanted = {path: stamp_of(Path(files.root, path).stat()) for path in paths}
    with store_at(cluster.target, where) as store:
        there = {one.key.removeprefix(f"{where.prefix}/"): (one.size, one.etag) for one in store.list(where)}
        sent = _Sent(store, above, name, secret=signing_key(cluster.session.home / "packages").hex())
        sent.read(lambda path, row: row[:4] == wanted.get(path) and (row[0], row[4]) == there.get(path))
        missing = {path: Path(files.root, path) for path in wanted if path not in sent.rows}
        size, done = sum(wanted[path][0] for path in missing), 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            text = f"sending {size_text(size)} of data to {where}"
            cluster.session.on_event(Event(text, who="", fraction=min(1.0, max(done, 0) / size), size=size))

        def delete(path: str) -> None:
            store.client.delete_object(Bucket=where.bucket, Key=where.key(path))

        sent.write()
        for _ in store.each(delete, there.keys() - wanted.keys()):
            pass
        names, count = iter(missing), max(AT_ONCE, len(missing) // _LISTS)
        while batch := list(itertools.islice(names, count)):
            etags = store.send({path: missing[path] for path in batch}, where, on_bytes)
            sent.rows |= {path: (*wanted[path], etags[path]) for path in batch}
            sent.write()
    return Source(name, "s3", where.bucket, where.prefix)


class _Sent:
    """Which files of a folder a bucket has: `rows` hold the stamp of each and its ETag there, by path.

    They lie in pages, ABOVE/.NAME/0 and so on, which ABOVE/NAME.json lists; that is signed with a `secret` of
    this machine, as others may write there.
    """

    def __init__(self, store: Store, above: Place, name: str, *, secret: str) -> None:
        self._store, self._above, self._name, self._secret = store, above, name, secret
        self._pages: dict[bytes, Ref] = {}
        self.rows: dict[str, _Row] = {}

    def read(self, holds: Callable[[str, _Row], bool]) -> None:
        """Take in what is written down there and `holds`; what no awsddp wrote tells nothing."""
        wrong = ValueError, RecursionError, msgspec.ValidationError, Changed
        with contextlib.suppress(*wrong):
            document = self._store.document(self._above, f"{self._name}.json")
            if document is None or document.signature != self._sign(f"{self._name}.json", document.body):
                return
            for ref in msgspec.convert(document.parse(), tuple[Ref, ...]):
                with contextlib.suppress(*wrong):
                    body = self._store.content(self._above, Thing(*ref))
                    page = msgspec.json.decode(body, type=dict[str, _Row])
                    self.rows |= {path: row for path, row in page.items() if holds(path, row)}
                    self._pages[body] = ref

    def write(self) -> None:
        """Write down what is known, as far as it is not written. Raises ClientError."""
        pages: dict[bytes, Ref] = {}
        for number, rows in enumerate(_split(self.rows)):
            body, key = msgspec.json.encode(rows), f".{self._name}/{number}"
            known = self._pages.get(body)
            if known is None or known.key != key:
                known = Ref(key, len(body), self._store.put(self._above, key, body))
            pages[body] = known
        if pages != self._pages:
            self._store.write(self._above, f"{self._name}.json", list(pages.values()), sign=self._sign)
        self._pages = pages

    def _sign(self, name: str, body: bytes) -> str:
        return signature(self._secret, FOLDERS, name, body)


def _split(rows: Mapping[str, _Row]) -> Iterator[dict[str, _Row]]:
    """Yield rows of at most about _PAGE_BYTES as JSON, in their order."""
    page: dict[str, _Row] = {}
    size = 0
    for path, row in rows.items():
        page[path] = row
        size += 6 * len(path) + 150  # at most
        if size > _PAGE_BYTES:
            yield page
            page, size = {}, 0
    yield page


def bring_checkpoint(connected: ConnectedCluster, checkpoint: Checkpoint, nodes: Collection[int]) -> None:
    """Send a checkpoint to nodes of a job, or have them bring it from S3. Raises NodesFailed, ConfigError."""
    from awsddp.nodes.project_files import files_to_send
    from awsddp.nodes.sync import push

    if isinstance(checkpoint, SavedCheckpoint):
        _bring_saved(connected, checkpoint, nodes)
        return
    with checkpoint.staged() as staged:
        push(files_to_send(staged), connected.fleet, folder=checkpoint.folder, nodes=nodes)


def _bring_saved(connected: ConnectedCluster, checkpoint: SavedCheckpoint, nodes: Collection[int]) -> None:
    """Have nodes bring a checkpoint from S3; where a job that runs replaces it meanwhile, the new one.

    Raises NodesFailed, ConfigError where another one is the newest by now: the ranks get this one's name.
    """
    folder, where = f"awsddp/{checkpoint.folder}", str(checkpoint.place)
    for attempt in range(1 + TRIES):
        try:
            _ask(connected, nodes, {"place": checkpoint.place, "files": checkpoint.files}, folder)
            return
        except NodesFailed as failed:
            changed = any(getattr(one, "layer", "") == "changed" for one in failed.failures.values())
            if not changed or attempt == TRIES:
                raise
        with opened(connected.session, where) as saved:
            newest = saved.checkpoint()
        if newest.name != checkpoint.name:
            why = f"{newest.shown} is the newest one now"
            again = "awsddp train   # again: it takes that one"
            raise ConfigError(f"{checkpoint.shown} was replaced while it was brought", why, again)
        checkpoint = newest


def send_packages(connected: ConnectedCluster, nodes: Collection[int]) -> None:
    """Send nodes whose Python cannot talk to S3 what this machine's does it with. Raises NodesFailed."""
    from awsddp.nodes.project_files import files_to_send
    from awsddp.nodes.sync import push

    with _packages() as bundle:
        push(
            files_to_send(bundle),
            connected.fleet,
            folder=BUNDLE,
            nodes=nodes,
            on_event=connected.session.on_event,
        )


def _files(source: Source) -> "Listing":
    from awsddp.nodes.project_files import files_to_send

    return files_to_send(Path(source.at).expanduser(), results=".awsddp")


def _ask(
    connected: ConnectedCluster, nodes: Collection[int], message: Mapping[str, Any], folder: str
) -> None:
    """Have nodes copy to a folder in their home folder, with what that needs. Raises NodesFailed."""
    from awsddp.nodes.environments import answers
    from awsddp.nodes.node_failures import Layer, NodeFailure

    place = {"region": connected.cluster.aws.region, "endpoint": connected.cluster.target.node_s3}

    def copy(nodes: Collection[int]) -> dict[int, _Said | NodeError]:
        requests = {}
        for node in nodes:
            found = connected.cluster.record.found[node]
            folders = {"folder": f"{found.home}/{folder}", "packages": f"{found.home}/awsddp/{BUNDLE}"}
            asked = {**message, **place, **folders}
            requests[node] = program.node_program(found.python, _MODULES, asked)
        failed = "the data could not be copied"
        return answers(connected.fleet, requests, _Said, failed=failed, silent_s=_SILENT_S)

    told = copy(nodes)
    lacking = [node for node, one in told.items() if isinstance(one, _Said) and one.lacks]
    if lacking:
        send_packages(connected, lacking)
        told |= copy(lacking)
    for node, one in told.items():
        if isinstance(one, _Said) and one.failed:
            layer: Layer = "changed" if one.changed else "files"
            told[node] = NodeFailure(node, layer, one.failed, one.why, one.next)
    for node, said in split(told).items():
        if "place" in message or any(one["kind"] != "folder" for one in message["sources"]):
            text = f"data: {amount(int(said.copied), int(said.bytes))} copied"
            connected.session.on_event(Event(text, who=node_name(node), fraction=1.0))


@contextlib.contextmanager
def _packages() -> Iterator[Path]:
    """Yield a folder with the packages of this machine that a node needs to reach S3."""
    with tempfile.TemporaryDirectory() as made:
        for name in _PACKAGES:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None, "botocore needs it"
            path = Path(spec.origin)
            if path.name != "__init__.py":
                shutil.copy2(path, made)
                continue
            shutil.copytree(path.parent, Path(made, name), ignore=_left_out)
        yield Path(made)


def _left_out(folder: str, names: list[str]) -> list[str]:
    is_models = folder.endswith("/botocore/data")
    return [name for name in names if name == "__pycache__" or (is_models and name not in _MODELS)]
