"""Objects of S3, down and up, alike on a node and on a client: each is whole under its name, or not there.

It needs boto3, in the Python that runs it. Transfers of large objects are s3transfer's, retries botocore's.
A reader gets the object that a list names, or `Changed`:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-reads.html
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from awsddp.agent.file_tree import open_file

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

_Item = TypeVar("_Item")

ATTEMPTS = 10
AT_ONCE = 16
_THREADS = 8
"""How many parts of large objects travel at once: more threads of one Python are slower, not faster."""
FOLDERS = ".data"
"""Beside the jobs: folders of data on their way to nodes."""
_LIVES = ("claimed", "waiting", "running")
_DAY, _WEEK = timedelta(days=1), timedelta(days=7)
MOST_BYTES = 2 << 20
"""How long a document of JSON may be, written or read."""
_MOST_ITEMS = 300_000
"""How many objects and arrays a document may hold: parsed, it then takes less than 64 MB of memory."""
PART_BYTES = 8 << 20
"""From what size on an object travels in parts."""
MOST_PART_BYTES = 2 * PART_BYTES
"""How long a part of a growing file may be: it is read into memory."""
SIGNATURE = "awsddp-signature"
"""The metadata of a document that names who wrote it."""
PARTS = ".awsddp-parts"
"""The folder, in that of the downloads, of those that are not whole."""


class Place(NamedTuple):
    """A bucket and a prefix in it, without slashes at its ends; "" is all of the bucket."""

    bucket: str
    prefix: str

    def key(self, name: str) -> str:
        """Return the key of what is called `name` below the prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def below(self, name: str) -> Place:
        """Return the place of what is called `name` below the prefix."""
        return self._replace(prefix=self.key(name))

    def __str__(self) -> str:
        return f"s3://{'/'.join(filter(None, self))}"


class Thing(NamedTuple):
    """An object as a list names it: its key, its size in bytes, and its ETag.

    With a `digest`, the SHA-256 of the first `size` bytes, the object may have grown since.
    """

    key: str
    size: int
    etag: str
    digest: str = ""


class Document(NamedTuple):
    """An object of JSON as it was read."""

    body: bytes
    etag: str
    signature: str = ""

    def parse(self) -> Any:
        """Return what it holds. Raises ValueError."""
        return parsed(self.body)


def parsed(body: bytes) -> Any:
    """Return the JSON of a document whose length was checked. Raises ValueError."""
    if body.count(b"{") + body.count(b"[") > _MOST_ITEMS:
        raise ValueError("it has more items than awsddp writes")
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def is_refusal(error: BaseException) -> bool:
    """Tell whether S3 refused a request, so that it has no effect, also later."""
    reply = getattr(error, "response", {}).get("ResponseMetadata", {})
    return 400 <= int(reply.get("HTTPStatusCode", 0)) < 500


def signature(secret: str, launch: str, name: str, body: bytes) -> str:
    """Return what shows that a node of a launch wrote a document: others do not know the secret."""
    return hmac.new(secret.encode(), f"{launch}/{name}\n".encode() + body, "sha256").hexdigest()


class Changed(Exception):
    """An object is not the one that a list names: another one by now, or gone."""


class Upload(Protocol):
    """An upload under way."""

    def done(self) -> bool:
        """Tell whether it has ended."""

    def cancel(self) -> object:
        """Give it up, unless it has ended; a small one goes on."""

    def result(self) -> Any:
        """Wait for its end. Raises what it failed with."""


def node_session() -> Any:
    """Return botocore's session for a node: with patience for its metadata service, which may be busy.

    Botocore itself asks it once, for a second, and then finds no role.
    """
    import botocore.session

    made: Any = botocore.session.Session()
    made.set_config_variable("metadata_service_timeout", 5)
    made.set_config_variable("metadata_service_num_attempts", 3)
    return made


class Store:
    """S3 as one caller sees it. Thread-safe.

    `session` is botocore's or None: that of the node's role, from its metadata. `endpoint` is None for AWS's.
    With `payer` the caller pays for what it reads in the buckets of others. Raises ImportError where this
    Python has no boto3, or one without what is used here.
    """

    def __init__(
        self,
        *,
        region: str | None,
        endpoint: str | None = None,
        session: Any = None,
        payer: bool = False,
        unsigned: bool = False,
    ) -> None:
        from botocore import UNSIGNED
        from botocore.config import Config
        from s3transfer.futures import TransferMeta
        from s3transfer.manager import TransferConfig, TransferManager

        if not hasattr(TransferMeta, "provide_object_etag"):
            raise ImportError("its s3transfer is older than 0.11")
        config = Config(
            connect_timeout=5,
            read_timeout=60,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            max_pool_connections=2 * AT_ONCE,
            proxies={} if endpoint else None,
            s3={"addressing_style": "path"} if endpoint else None,
            **({"signature_version": UNSIGNED} if unsigned else {}),
        )
        made = session or node_session()
        self.client: Any = made.create_client("s3", region_name=region, endpoint_url=endpoint, config=config)
        self._payer = {"RequestPayer": "requester"} if payer else {}
        self._transfers: Any = TransferManager(
            self.client, TransferConfig(max_request_concurrency=_THREADS, multipart_chunksize=PART_BYTES)
        )
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._etags: dict[tuple[str, str], str] = {}
        for operation in ("PutObject", "CompleteMultipartUpload"):
            self.client.meta.events.register(f"before-parameter-build.s3.{operation}", _remember_key)
            self.client.meta.events.register(f"after-call.s3.{operation}", self._keep_etag)

    def close(self) -> None:
        """Wait for what travels, and end its threads."""
        self._pool.shutdown()
        self._transfers.shutdown()

    def _keep_etag(self, parsed: Mapping[str, Any], context: Mapping[str, Any], **_: object) -> None:
        """Keep the ETag of a reply to an upload: s3transfer drops the reply."""
        if "ETag" in parsed:
            self._etags[context["awsddp"]] = parsed["ETag"].strip('"')

    def list(self, where: Place, *, name: str = "") -> Iterator[Thing]:
        """Yield the objects below a place whose key goes on with `name`. Raises botocore's ClientError."""
        pages = self.client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=where.bucket, Prefix=where.key(name), **self._payer):
            for one in page.get("Contents", ()):
                yield Thing(one["Key"], one["Size"], one["ETag"].strip('"'))

    def folders(self, where: Place, *, name: str = "") -> Iterator[str]:
        """Yield the names below a place that begin with `name` and have objects below them.

        Raises botocore's ClientError.
        """
        pages = self.client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=where.bucket, Prefix=where.key(name), Delimiter="/"):
            for one in page.get("CommonPrefixes", ()):
                yield one["Prefix"][:-1].rpartition("/")[2]

    def region(self, bucket: str) -> str | None:
        """Return the region of a bucket, "" where there is none; None where S3 does not tell.

        It does with a refusal, too: https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html
        """
        from botocore.exceptions import ClientError

        try:
            reply = self.client.head_bucket(Bucket=bucket)
        except ClientError as error:
            reply = error.response
        told = reply["ResponseMetadata"]
        found: str | None = told["HTTPHeaders"].get("x-amz-bucket-region")
        return "" if told["HTTPStatusCode"] == 404 else found

    def read(self, where: Place, name: str) -> Any:
        """Return the JSON of an object, None where there is none. Raises ClientError, ValueError."""
        found = self.document(where, name)
        return None if found is None else found.parse()

    def document(self, where: Place, name: str) -> Document | None:
        """Return an object of at most MOST_BYTES, None where there is none. Raises ClientError, ValueError.

        Who may list some prefixes only is refused what is not there.
        https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
        """
        from botocore.exceptions import ClientError

        asked = {"Bucket": where.bucket, "Key": where.key(name)}
        try:
            return self._document(asked)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code == "NoSuchKey" or (code == "AccessDenied" and not any(self.list(where, name=name))):
                return None
            return self._document(asked)  # it may have come meanwhile

    def _document(self, asked: Mapping[str, Any]) -> Document:
        def check(reply: Mapping[str, Any]) -> int:
            if reply["ContentLength"] > MOST_BYTES:
                raise ValueError(f"{reply['ContentLength']:,} bytes are more than awsddp writes")
            return int(reply["ContentLength"])

        reply, body = self._get(asked, check)
        return Document(body, reply["ETag"].strip('"'), reply["Metadata"].get(SIGNATURE, ""))

    def _get(
        self, asked: Mapping[str, Any], check: Callable[[Mapping[str, Any]], int]
    ) -> tuple[Mapping[str, Any], bytes]:
        """Return a reply and its body, of as many bytes as `check` allows. What is cut is asked for again."""
        from s3transfer.exceptions import RetriesExceededError
        from s3transfer.utils import S3_RETRYABLE_DOWNLOAD_ERRORS

        last: BaseException = EOFError("the connection ended early")
        for _ in range(ATTEMPTS):
            reply = self.client.get_object(**asked, **self._payer)
            with contextlib.closing(reply["Body"]) as body:
                size = check(reply)
                try:
                    data = body.read(size) if size else b""
                except S3_RETRYABLE_DOWNLOAD_ERRORS as error:
                    last = error
                    continue
            if len(data) == size:
                return reply, data
        raise RetriesExceededError(last) from last

    def write(
        self,
        where: Place,
        name: str,
        document: object,
        *,
        instead_of: str | None = None,
        sign: Callable[[str, bytes], str] | None = None,
    ) -> str | None:
        """Write a document and return its ETag.

        `instead_of` is the ETag that it must have now, "" where there must be none: else None is returned.
        `sign` returns the signature of a name and a body. Raises ClientError, ValueError for too long a body.
        """
        from botocore.exceptions import ClientError

        body = json.dumps(document).encode()
        if len(body) > MOST_BYTES:
            raise ValueError(f"{name} would have {len(body):,} bytes")
        more: dict[str, Any] = {"Metadata": {SIGNATURE: sign(name, body)}} if sign else {}
        if instead_of is not None:
            more |= {"IfMatch": f'"{instead_of}"'} if instead_of else {"IfNoneMatch": "*"}
        try:
            return self.put(where, name, body, **more)
        except ClientError as error:
            codes = "PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"
            if instead_of is not None and error.response["Error"]["Code"] in codes:
                return None
            raise

    def put(self, where: Place, name: str, body: bytes, **more: Any) -> str:
        """Write a small object and return its ETag. Raises ClientError, BotoCoreError."""
        reply = self.client.put_object(Bucket=where.bucket, Key=where.key(name), Body=body, **more)
        return str(reply["ETag"]).strip('"')

    def abort(self, where: Place, *, over: Container[str] | None = None) -> None:
        """Give up what was begun below a place and not completed, as far as the caller has the right to.

        With `over` the place holds jobs and data, and it is that of jobs that have ended, or are named, and
        what was begun long ago: a job that went with its cluster says for ever that it runs. Raises
        BotoCoreError.
        """
        from botocore.exceptions import ClientError

        begun: list[Any] = []
        with contextlib.suppress(ClientError):
            pages = self.client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=where.bucket, Prefix=where.key("")):
                begun += page.get("Uploads", ())
        for one in begun:
            with contextlib.suppress(ClientError, ValueError):
                if over is None or self._is_left(where, one["Key"], one["Initiated"], over):
                    named = {"Key": one["Key"], "UploadId": one["UploadId"]}
                    self.client.abort_multipart_upload(Bucket=where.bucket, **named)

    def _is_left(self, where: Place, key: str, begun: datetime, over: Container[str]) -> bool:
        """Tell whether nobody goes on with an upload of awsddp's. Raises ClientError, ValueError.

        A file of data may travel for days over a slow line.
        """
        name, age = key[len(where.key("")) :].partition("/")[0], datetime.now(begun.tzinfo) - begun
        if name == FOLDERS:
            return age > _WEEK
        job = self.read(where, f"{name}/job.json")
        if not isinstance(job, dict) or "save" not in job:
            return False
        return name in over or job.get("state") not in _LIVES or age > _DAY

    def upload(
        self,
        path: Path,
        where: Place,
        name: str,
        on_bytes: Callable[[int], None] = lambda count: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> Upload:
        """Begin to upload a file, in parts where it is large. `on_end` is called in another thread.

        The result is for `etag`; it raises OSError, ClientError, BotoCoreError.
        """
        size = path.stat().st_size
        if size >= PART_BYTES:
            told = [_Told(on_bytes, on_end)]
            upload: Upload = self._transfers.upload(
                str(path), where.bucket, where.key(name), subscribers=told
            )
            return upload

        def put() -> None:
            with open_file(path) as file:
                body = file.read(size)
            self.put(where, name, body)
            on_bytes(len(body))

        future = self._pool.submit(put)
        future.add_done_callback(lambda _: on_end())
        return future

    def etag(self, where: Place, name: str) -> str:
        """Return the ETag that the last upload to a name was answered with, once. Raises KeyError."""
        return self._etags.pop((where.bucket, where.key(name)))

    def send(
        self, files: Mapping[str, Path], where: Place, on_bytes: Callable[[int], None] = lambda count: None
    ) -> dict[str, str]:
        """Upload files to names below a place, several at once; return their ETags.

        Raises OSError, ClientError, BotoCoreError.
        """
        uploads: dict[str, Upload] = {}
        try:
            for name, path in files.items():
                uploads[name] = self.upload(path, where, name, on_bytes)
            for one in uploads.values():
                one.result()
        except BaseException:
            for one in uploads.values():
                one.cancel()
            raise
        return {name: self.etag(where, name) for name in files}

    def bring(
        self,
        where: Place,
        wanted: Mapping[str, Sequence[Thing]],
        folder: Path,
        on_bytes: Callable[[int], None] = lambda count: None,
        on_file: Callable[[str], None] = lambda path: None,
    ) -> None:
        """Download files, each of its objects, to their paths in `folder`, several at once.

        What is there is replaced. Each appears when it is whole, and is the one that was listed; `on_file` is
        called in this thread.
        Raises Changed, OSError, ClientError, BotoCoreError. Who calls has made the paths harmless.
        """
        parts = folder / PARTS
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
        came = {path: parts / str(number) for number, path in enumerate(wanted)}

        def download(path: str) -> None:
            self.download(where.bucket, wanted[path], came[path], on_bytes)

        for path in self.each(download, wanted):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            came[path].replace(folder / path)
            on_file(path)
        parts.rmdir()

    def each(self, work: Callable[[_Item], object], items: Iterable[_Item]) -> Iterator[_Item]:
        """Do work for all items, several at once, and yield each, in their order, once it is done.

        Raises the first error; then no more is begun, and what is under way has ended. The work must not wait
        for other work of this kind.
        """
        stop = threading.Event()

        def do(item: _Item) -> None:
            if not stop.is_set():
                work(item)

        begun = [(item, self._pool.submit(do, item)) for item in items]
        try:
            for item, future in begun:
                future.result()
                yield item
        finally:
            stop.set()
            wait([future for _, future in begun])

    def download(
        self,
        bucket: str,
        things: Sequence[Thing],
        path: Path,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Write a file of the objects that it consists of, each as its list names it.

        Raises Changed where one is not, OSError, ClientError, BotoCoreError.
        """
        with _as_listed(things[0].key if things else ""):
            if len(things) == 1 and things[0].size >= PART_BYTES and not things[0].digest:
                self._download_large(bucket, things[0], path, on_bytes)
                return
            with path.open("wb") as file:
                for thing in things:
                    on_bytes(file.write(self._download_small(bucket, thing)))

    def content(self, where: Place, thing: Thing) -> bytes:
        """Return a small object as it is listed, by its key below a place. Raises Changed, ClientError."""
        with _as_listed(thing.key):
            return self._download_small(where.bucket, thing._replace(key=where.key(thing.key)))

    def _download_large(self, bucket: str, thing: Thing, path: Path, on_bytes: Callable[[int], None]) -> None:
        now = self.client.head_object(Bucket=bucket, Key=thing.key, **self._payer)
        if (now["ContentLength"], now["ETag"].strip('"')) != (thing.size, thing.etag):
            raise Changed(thing.key)
        told = [_Told(on_bytes, listed=thing)]
        self._transfers.download(bucket, thing.key, str(path), self._payer, subscribers=told).result()

    def _download_small(self, bucket: str, thing: Thing) -> bytes:
        """Return the bytes of an object, or those that its digest is of. Raises Changed, ClientError."""
        if thing.size > (MOST_PART_BYTES if thing.digest else PART_BYTES) or not thing.etag:
            raise Changed(thing.key)
        asked = {"Bucket": bucket, "Key": thing.key}
        if not thing.digest:
            asked["IfMatch"] = f'"{thing.etag}"'
        elif thing.size:
            asked["Range"] = f"bytes=0-{thing.size - 1}"

        def check(reply: Mapping[str, Any]) -> int:
            if reply["ContentLength"] != thing.size and (not thing.digest or thing.size):
                raise Changed(thing.key)
            return thing.size

        _, body = self._get(asked, check)
        if thing.digest and hashlib.sha256(body).hexdigest() != thing.digest:
            raise Changed(thing.key)
        return body


@contextlib.contextmanager
def _as_listed(key: str) -> Iterator[None]:
    """Raise Changed where S3 says that an object is not the one that was asked for, or is gone."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in (404, 412, 416):
            raise Changed(key) from error
        raise


def _remember_key(params: Mapping[str, Any], context: dict[str, Any], **_: object) -> None:
    context["awsddp"] = params["Bucket"], params["Key"]


class _Told:
    """Hears how many bytes have travelled, and of the end. s3transfer takes back what it sends again: a
    negative count. A download asks for the very object that was listed.
    """

    def __init__(
        self,
        on_bytes: Callable[[int], None],
        on_end: Callable[[], None] = lambda: None,
        listed: Thing | None = None,
    ) -> None:
        self._on_bytes, self._on_end, self._listed = on_bytes, on_end, listed

    def on_progress(self, bytes_transferred: int, **_: object) -> None:
        self._on_bytes(bytes_transferred)

    def on_done(self, **_: object) -> None:
        self._on_end()

    def on_queued(self, future: Any, **_: object) -> None:
        if self._listed is not None:
            future.meta.provide_transfer_size(self._listed.size)
            future.meta.provide_object_etag(f'"{self._listed.etag}"')
