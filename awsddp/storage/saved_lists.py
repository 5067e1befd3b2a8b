"""What the nodes of a job wrote to S3 (docs/saving.md): their documents, bounded, verified and checked.

job.json and nodeK.json name pages by key, size and ETag; a page is read as it is named, or not at all.
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
    Changed,
    Document,
    Place,
    Store,
    Thing,
    parsed,
    signature,
)
from awsddp.errors import NodeError
from awsddp.model.node_answers import Nanoseconds, NodeJob, check_job, converted
from awsddp.model.records import NodeNumber, Text, Word

FORMAT = 2
"""`save` of job.json."""
TRIES = 3
"""How often a document is read again, or a file, where it has changed meanwhile."""
_MOST_FILES = 1_000_000
"""How many files and links a job may list."""
_Size = Annotated[int, Meta(ge=0, lt=1 << 60)]
_Key = Annotated[str, Meta(min_length=1, max_length=4096)]
_Tag = Annotated[str, Meta(min_length=1, max_length=200)]
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Of = TypeVar("_Of", bound="_Index | _NodeList")


class Ref(NamedTuple):
    """A page: its key, size and ETag."""

    key: _Key
    size: Annotated[int, Meta(ge=0, le=MOST_BYTES)]
    etag: _Tag


class Part(NamedTuple):
    """An object that is a file or a part of one; with a `digest`, its first `size` bytes."""

    key: _Key
    size: _Size
    etag: _Tag
    digest: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class Row(msgspec.Struct, frozen=True):
    """A file that is saved."""

    size: _Size
    modified: Nanoseconds
    sample: _Sha256
    stamp: tuple[Nanoseconds, _Size]
    parts: Annotated[tuple[Part, ...], Meta(max_length=100_000)]

    def check(self, home: str) -> None:
        """Raise ValueError where its parts are not as long as it is, or too long to be joined."""
        if self.size != (length := sum(part.size for part in self.parts)):
            raise ValueError(f"{home!r} has {self.size:,} bytes, its parts have {length:,}")
        most = max((part.size for part in self.parts if part.digest or len(self.parts) > 1), default=0)
        if most > MOST_PART_BYTES:
            raise ValueError(f"a part of {home!r} has {most:,} bytes")

    def things(self, where: Place) -> list[Thing]:
        """Return the objects that it consists of, for a job at a place."""
        return [Thing(where.key(part.key), part.size, part.etag, part.digest) for part in self.parts]


class _Page(msgspec.Struct, frozen=True):
    files: dict[str, Row] = {}
    links: dict[str, str] = {}


_Pages = Annotated[tuple[Ref, ...], Meta(max_length=64)]


class _NodeList(msgspec.Struct, frozen=True):
    """nodeK.json."""

    node: NodeNumber
    launch: Word
    pages: _Pages
    ended: bool = False
    error: Text = ""


class _Checkpoint(msgspec.Struct, frozen=True):
    name: Text
    pages: _Pages


class _Index(msgspec.Struct, frozen=True):
    """job.json; no `document` before the ranks ran. `state` is "running" until all is saved."""

    launch: Word
    state: Text
    nodes: Annotated[tuple[NodeNumber, ...], Meta(max_length=10_000)] = ()
    document: NodeJob | None = None
    checkpoint: _Checkpoint | None = None


class Listed(msgspec.Struct, frozen=True):
    """What a node lists. `is_all`: it has ended, and nothing is left that it could not save."""

    files: Mapping[str, Row] = {}
    links: Mapping[str, str] = {}
    is_all: bool = False
    pages: Mapping[Ref, Any] = {}


class Lists:
    """Reads what nodes wrote about the job at `where`.

    With the `secret` of the job nothing is believed that its nodes did not sign. What no node writes raises
    NodeError.
    """

    def __init__(self, store: Store, where: Place, *, secret: str | None = None) -> None:
        self._store, self.where, self._secret = store, where, secret

    def index(self) -> _Index | None:
        """Return job.json, None where there is none."""
        with self.checked("job.json"):
            found = self._read("job.json", _Index)
            if found is not None and found.document is not None:
                self._check_index(found, found.document)
            return found

    def _check_index(self, index: _Index, document: NodeJob) -> None:
        check_job(document, document.node, posixpath.basename(self.where.prefix))
        known = sorted(one.node for one in document.nodes)
        if not known or sorted(index.nodes) != known or len(set(known)) != len(known):
            raise ValueError(f"it names the nodes {list(index.nodes)[:20]}, its job has {known[:20]}")

    def node(self, node: int, *, launch: str, before: Listed | None = None) -> Listed:
        """Return what a node of this launch lists; pages that `before` has are not read again."""
        name, pages = f"node{node}.json", before.pages if before else {}
        for _ in range(TRIES):
            with self.checked(name):
                found = self._read(name, _NodeList)
                if found is None or found.launch != launch:
                    return Listed()
                if found.node != node:
                    raise ValueError(f"it speaks for node{found.node}")
            with contextlib.suppress(Changed):
                pages = self._pages(found.pages, pages)
                files = {home: row for page in pages.values() for home, row in page.files.items()}
                links = {home: target for page in pages.values() for home, target in page.links.items()}
                return Listed(files, links, found.ended and not found.error, pages)
        raise self.changing(name)

    def checkpoint(self, index: _Index) -> tuple[str, dict[str, Row]] | None:
        """Return the name of the newest whole checkpoint and its files, None where there is none.

        Raises Changed where job.json is to be read again.
        """
        if index.checkpoint is None:
            return None
        pages = self._pages(index.checkpoint.pages, {})
        return index.checkpoint.name, {home: row for one in pages.values() for home, row in one.files.items()}

    def _pages(self, refs: Sequence[Ref], known: Mapping[Ref, _Page]) -> dict[Ref, _Page]:
        """Return pages. Raises Changed."""
        pages: dict[Ref, _Page] = {}
        for ref in refs:
            with self.checked(ref.key):
                pages[ref] = known.get(ref) or self._page(ref)
                if sum(len(one.files) + len(one.links) for one in pages.values()) > _MOST_FILES:
                    raise ValueError(f"over {_MOST_FILES:,} files")
        return pages

    def _page(self, ref: Ref) -> _Page:
        page = converted(parsed(self._store.content(self.where, Thing(*ref))), _Page, paths=True)
        for home, row in page.files.items():
            row.check(home)
        return page

    def _read(self, name: str, kind: type[_Of]) -> _Of | None:
        """Return a document that a node has signed, None where there is none. Raises ValueError."""
        document = self._store.document(self.where, name)
        if document is None:
            return None
        found = document.parse()
        if isinstance(found, dict) and name == "job.json" and (save := found.get("save")) != FORMAT:
            raise ValueError(f"its format is {save!r:.20}; this awsddp reads {FORMAT}")
        read = converted(found, kind, paths=True)
        if not isinstance(read, _Index) or read.document is not None:  # a claim says nothing
            self._verify(name, document, read.launch)
        return read

    def _verify(self, name: str, document: Document, launch: str) -> None:
        """Raise NodeError for a document that no node of the job has signed."""
        if self._secret is None or hmac.compare_digest(
            signature(self._secret, launch, name, document.body).encode(), document.signature.encode()
        ):
            return
        at = self.where.below(name)
        why = "its signature is not that of the cluster that this machine has the key of"
        raise NodeError(f"{at} was not written by a node of this job", why, self._look(at))

    @contextlib.contextmanager
    def checked(self, name: str) -> Iterator[None]:
        """Raise NodeError for what is wrong with an object that a node writes, or with what it lists."""
        try:
            yield
        except (ValueError, RecursionError, OverflowError, msgspec.ValidationError) as error:
            at, why = self.where.below(name), str(error)[:2000]
            raise NodeError(f"{at} is not as a node writes it", why, self._look(at)) from error

    def _look(self, at: Place) -> str:
        return f"aws s3 cp {typed(at)} -   # what it says: others than the nodes may write there"

    def changing(self, name: str) -> NodeError:
        """Return the error for a document that is another one each time that its pages are read."""
        why = f"it was read {TRIES} times"
        again = "the same command, once the job writes less"
        return NodeError(f"{self.where.below(name)} is changing faster than it can be read", why, again)


def typed(where: Place) -> str:
    """Return a place as it is typed in a shell."""
    return shlex.quote(str(where))
