"""Read the documents that a job's nodes wrote to S3 (docs/saving.md), checking limits and signatures.

job.json and nodeK.json list pages by key, size and ETag. A page whose size or ETag differs from its entry is
not read.
"""

import contextlib
import hmac
import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from awsddp.agent.s3.store import (
    MOST_BYTES,
    MOST_PART_BYTES,
    Document,
    ObjectChanged,
    S3Object,
    S3Uri,
    Store,
    parse_json,
    signature,
)
from awsddp.errors import NodeError
from awsddp.model.node_answers import Nanoseconds, NodeJob, check_job, convert_answer
from awsddp.model.records import NodeNumber, ShortText, Text

FORMAT = 2
"""The value of the `save` field in job.json."""
MAX_READS = 3
"""How many times a document or file is read again if it changes during the read."""
_MAX_FILES = 1_000_000
"""The maximum number of files and links in a job's results."""
_Size = Annotated[int, Meta(ge=0, lt=1 << 60)]
_Key = Annotated[str, Meta(min_length=1, max_length=4096)]
_Tag = Annotated[str, Meta(min_length=1, max_length=200)]
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Kind = TypeVar("_Kind", bound="_Index | _NodeList")


class PageRef(NamedTuple):
    """A reference to a page, with the page's key, size and ETag."""

    key: _Key
    size: Annotated[int, Meta(ge=0, le=MOST_BYTES)]
    etag: _Tag


class Part(NamedTuple):
    """An object that holds a file or a part of it. If `digest` is set, only the object's first `size` bytes
    count."""

    key: _Key
    size: _Size
    etag: _Tag
    digest: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class SavedFile(msgspec.Struct, frozen=True):
    """A saved file."""

    size: _Size
    modified: Nanoseconds
    sample: _Sha256
    stamp: tuple[Nanoseconds, _Size]
    parts: Annotated[tuple[Part, ...], Meta(max_length=100_000)]

    def check(self, path: str) -> None:
        """Raise ValueError if the parts' sizes do not add up to the file's size, or a part is too large."""
        if self.size != (length := sum(part.size for part in self.parts)):
            raise ValueError(f"{path!r} has {self.size:,} bytes, but its parts have {length:,}")
        largest = max((part.size for part in self.parts if part.digest or len(self.parts) > 1), default=0)
        if largest > MOST_PART_BYTES:
            raise ValueError(f"a part of {path!r} has {largest:,} bytes")

    def list_objects(self, uri: S3Uri) -> list[S3Object]:
        """Return the S3 objects of the file, for a job at `uri`."""
        return [S3Object(uri.key(part.key), part.size, part.etag, part.digest) for part in self.parts]


class _Page(msgspec.Struct, frozen=True):
    files: dict[str, SavedFile] = {}
    links: dict[str, str] = {}


_Pages = Annotated[tuple[PageRef, ...], Meta(max_length=64)]


class _NodeList(msgspec.Struct, frozen=True):
    """nodeK.json."""

    node: NodeNumber
    launch: ShortText
    pages: _Pages
    ended: bool = False
    error: Text = ""


class _Checkpoint(msgspec.Struct, frozen=True):
    name: Text
    pages: _Pages


class _Index(msgspec.Struct, frozen=True):
    """job.json. `document` is None before the ranks run. `state` is "running" until all results are saved."""

    launch: ShortText
    state: Text
    nodes: Annotated[tuple[NodeNumber, ...], Meta(max_length=10_000)] = ()
    document: NodeJob | None = None
    checkpoint: _Checkpoint | None = None


class NodeFileList(msgspec.Struct, frozen=True):
    """A node's list. `is_all` is True if the job has ended on the node and all its results are saved."""

    files: Mapping[str, SavedFile] = {}
    links: Mapping[str, str] = {}
    is_all: bool = False
    pages: Mapping[PageRef, Any] = {}


class ListReader:
    """Reads a job's documents at an S3 URI.

    If the job's `secret` is given, documents that the job's nodes did not sign are refused. Invalid documents
    raise NodeError.
    """

    def __init__(self, store: Store, uri: S3Uri, *, secret: str | None = None) -> None:
        self._store, self.uri, self._secret = store, uri, secret

    def read_index(self) -> _Index | None:
        """Return job.json, or None if the file does not exist."""
        with self.translating_errors("job.json"):
            index = self._read("job.json", _Index)
            if index is not None and index.document is not None:
                self._check_index(index, index.document)
            return index

    def _check_index(self, index: _Index, document: NodeJob) -> None:
        check_job(document, document.node, posixpath.basename(self.uri.prefix))
        job_nodes = sorted(node.node for node in document.nodes)
        if not job_nodes or sorted(index.nodes) != job_nodes or len(set(job_nodes)) != len(job_nodes):
            raise ValueError(f"it names the nodes {list(index.nodes)[:20]}, but its job has {job_nodes[:20]}")

    def read_node(self, node: int, *, launch: str, earlier: NodeFileList | None = None) -> NodeFileList:
        """Return the list of a node in this launch; pages that `earlier` has are not read again."""
        name, pages = f"node{node}.json", earlier.pages if earlier else {}
        for _ in range(MAX_READS):
            with self.translating_errors(name):
                node_list = self._read(name, _NodeList)
                if node_list is None or node_list.launch != launch:
                    return NodeFileList()
                if node_list.node != node:
                    raise ValueError(f"it is for node{node_list.node}")
            with contextlib.suppress(ObjectChanged):
                pages = self._pages(node_list.pages, pages)
                files = {path: row for page in pages.values() for path, row in page.files.items()}
                links = {path: target for page in pages.values() for path, target in page.links.items()}
                return NodeFileList(files, links, node_list.ended and not node_list.error, pages)
        raise self.make_changing_error(name)

    def read_checkpoint(self, index: _Index) -> tuple[str, dict[str, SavedFile]] | None:
        """Return the name and the files of the newest complete checkpoint, or None if there is none.

        Raises ObjectChanged if job.json must be read again.
        """
        if index.checkpoint is None:
            return None
        pages = self._pages(index.checkpoint.pages, {})
        return index.checkpoint.name, {
            path: row for page in pages.values() for path, row in page.files.items()
        }

    def _pages(self, refs: Sequence[PageRef], earlier: Mapping[PageRef, _Page]) -> dict[PageRef, _Page]:
        """Return the pages; pages that are in `earlier` are not read again. Raises ObjectChanged."""
        pages: dict[PageRef, _Page] = {}
        for ref in refs:
            with self.translating_errors(ref.key):
                pages[ref] = earlier.get(ref) or self._page(ref)
                if sum(len(page.files) + len(page.links) for page in pages.values()) > _MAX_FILES:
                    raise ValueError(f"over {_MAX_FILES:,} files")
        return pages

    def _page(self, ref: PageRef) -> _Page:
        page = convert_answer(
            parse_json(self._store.read_object(self.uri, S3Object(*ref))), _Page, paths=True
        )
        for path, row in page.files.items():
            row.check(path)
        return page

    def _read(self, name: str, kind: type[_Kind]) -> _Kind | None:
        """Return a document, or None if it is missing. Raises ValueError if the document is invalid, and
        NodeError if it is unsigned."""
        document = self._store.document(self.uri, name)
        if document is None:
            return None
        content = document.parse()
        if isinstance(content, dict) and name == "job.json" and (save := content.get("save")) != FORMAT:
            raise ValueError(f"its format is {save!r:.20}; this awsddp reads {FORMAT}")
        message = convert_answer(content, kind, paths=True)
        if not isinstance(message, _Index) or message.document is not None:  # a claim is not signed
            self._verify(name, document, message.launch)
        return message

    def _verify(self, name: str, document: Document, launch: str) -> None:
        """Raise NodeError for a document that none of the job's nodes has signed."""
        if self._secret is None or hmac.compare_digest(
            signature(self._secret, launch, name, document.body).encode(), document.signature.encode()
        ):
            return
        uri = self.uri.join(name)
        why = "its signature was not made with this machine's key for the cluster"
        raise NodeError(f"{uri} was not written by a node of this job", why, self._show_command(uri))

    @contextlib.contextmanager
    def translating_errors(self, name: str) -> Iterator[None]:
        """Turn errors in the context into a NodeError, which says that the document `name` is not valid."""
        try:
            yield
        except (ValueError, RecursionError, OverflowError, msgspec.ValidationError) as error:
            uri, why = self.uri.join(name), str(error)[:2000]
            raise NodeError(f"{uri} is not valid", why, self._show_command(uri)) from error

    def _show_command(self, uri: S3Uri) -> str:
        return f"aws s3 cp {quote_uri(uri)} -   # shows the document; others may have write access"

    def make_changing_error(self, name: str) -> NodeError:
        """Return the error for a document that changes whenever its pages are read."""
        why = f"it was read {MAX_READS} times"
        step = "repeat the command once the job writes less"
        return NodeError(f"{self.uri.join(name)} is changing faster than it can be read", why, step)


def quote_uri(uri: S3Uri) -> str:
    """Return an S3 URI quoted for a shell."""
    return shlex.quote(str(uri))
