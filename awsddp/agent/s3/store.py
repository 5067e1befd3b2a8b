"""Upload, download and list S3 objects, on nodes and clients. No file is left incomplete.

This module requires boto3. s3transfer transfers large objects, and botocore retries requests. A reader gets
exactly the object that a list names, or else `ObjectChanged` is raised:
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
CONCURRENCY = 16
_THREADS = 8
"""How many parts of large objects are transferred at once. With more threads, a Python process is slower."""
DATA_FOLDER = ".data"
"""The folder for data that clients send to nodes, next to the jobs' folders."""
_ACTIVE_STATES = ("claimed", "waiting", "running")
_DAY, _WEEK = timedelta(days=1), timedelta(days=7)
MOST_BYTES = 2 << 20
"""Maximum size of a JSON document that is written or read."""
_MAX_ITEMS = 300_000
"""Maximum number of objects and arrays in a document, which then takes less than 64 MB when parsed."""
PART_BYTES = 8 << 20
"""Minimum size of an object that is transferred in parts."""
MOST_PART_BYTES = 2 * PART_BYTES
"""Maximum size of a part of a growing file, which is read into memory."""
SIGNATURE = "awsddp-signature"
"""The metadata key that holds a document's signature."""
PARTIAL_FOLDER = ".awsddp-parts"
"""The subfolder for incomplete downloads."""


class S3Uri(NamedTuple):
    """A bucket, and a prefix without a slash at either end. The prefix "" means the whole bucket."""

    bucket: str
    prefix: str

    def key(self, name: str) -> str:
        """Return the key for `name` under the prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def join(self, name: str) -> S3Uri:
        """Return the URI for `name` under the prefix."""
        return self._replace(prefix=self.key(name))

    def __str__(self) -> str:
        return f"s3://{'/'.join(filter(None, self))}"


class S3Object(NamedTuple):
    """A listed object, with the key, the size in bytes, and the ETag that are in the list.

    If there is a `digest`, it is the SHA-256 of the first `size` bytes, and the object may have grown since.
    """

    key: str
    size: int
    etag: str
    digest: str = ""


class Document(NamedTuple):
    """A JSON document as it was read from S3, not yet parsed."""

    body: bytes
    etag: str
    signature: str = ""

    def parse(self) -> Any:
        """Return the parsed JSON. Raises ValueError."""
        return parse_json(self.body)


def parse_json(body: bytes) -> Any:
    """Parse a document whose size was checked. Raises ValueError."""
    if body.count(b"{") + body.count(b"[") > _MAX_ITEMS:
        raise ValueError("it has more items than awsddp writes")
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def is_refusal(error: BaseException) -> bool:
    """Return True if S3 refused a request, which therefore cannot take effect later."""
    reply = getattr(error, "response", {}).get("ResponseMetadata", {})
    return 400 <= int(reply.get("HTTPStatusCode", 0)) < 500


def signature(secret: str, launch: str, name: str, body: bytes) -> str:
    """Return the signature that a launch's node adds to a document: an HMAC with the launch's secret."""
    return hmac.new(secret.encode(), f"{launch}/{name}\n".encode() + body, "sha256").hexdigest()


class ObjectChanged(Exception):
    """The error for an object that was replaced or deleted after it was listed."""


class Upload(Protocol):
    """An upload in progress."""

    def done(self) -> bool:
        """Return True if the upload has ended."""

    def cancel(self) -> object:
        """Cancel the upload, unless it has ended.

        The upload of a small file continues if it is already running.
        """

    def result(self) -> Any:
        """Wait for the upload to end. Raises the upload's error if the upload failed."""


def node_session() -> Any:
    """Return a botocore session for a node. The session retries if the metadata service is busy.

    By default, botocore sends only one request, with a timeout of 1 s, and then continues without a role.
    """
    import botocore.session

    session: Any = botocore.session.Session()
    session.set_config_variable("metadata_service_timeout", 5)
    session.set_config_variable("metadata_service_num_attempts", 3)
    return session


class Store:
    """A thread-safe S3 client that uses one AWS identity.

    `session` is a botocore session, or None to use the node's role from the instance metadata. `endpoint` is
    None for AWS. With `payer`, the identity's account pays for requests to requester-pays buckets. Raises
    ImportError if boto3 is missing or too old in this Python.
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
            max_pool_connections=2 * CONCURRENCY,
            proxies={} if endpoint else None,
            s3={"addressing_style": "path"} if endpoint else None,
            **({"signature_version": UNSIGNED} if unsigned else {}),
        )
        botocore_session = session or node_session()
        self.client: Any = botocore_session.create_client(
            "s3", region_name=region, endpoint_url=endpoint, config=config
        )
        self._payer = {"RequestPayer": "requester"} if payer else {}
        self._transfers: Any = TransferManager(
            self.client, TransferConfig(max_request_concurrency=_THREADS, multipart_chunksize=PART_BYTES)
        )
        self._pool = ThreadPoolExecutor(CONCURRENCY)
        self._etags: dict[tuple[str, str], str] = {}
        for operation in ("PutObject", "CompleteMultipartUpload"):
            self.client.meta.events.register(f"before-parameter-build.s3.{operation}", _remember_key)
            self.client.meta.events.register(f"after-call.s3.{operation}", self._record_etag)

    def close(self) -> None:
        """Wait for transfers, and end the threads."""
        self._pool.shutdown()
        self._transfers.shutdown()

    def _record_etag(self, parsed: Mapping[str, Any], context: Mapping[str, Any], **_: object) -> None:
        """Record the ETag in the response to an upload, because s3transfer drops it."""
        if "ETag" in parsed:
            self._etags[context["awsddp"]] = parsed["ETag"].strip('"')

    def list(self, uri: S3Uri, *, name: str = "") -> Iterator[S3Object]:
        """Yield the objects whose keys begin with `uri` followed by `name`. Raises botocore's ClientError."""
        pages = self.client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=uri.bucket, Prefix=uri.key(name), **self._payer):
            for item in page.get("Contents", ()):
                yield S3Object(item["Key"], item["Size"], item["ETag"].strip('"'))

    def list_folders(self, uri: S3Uri, *, name: str = "") -> Iterator[str]:
        """Yield the folders directly under `uri` whose names begin with `name`.

        Raises botocore's ClientError.
        """
        pages = self.client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=uri.bucket, Prefix=uri.key(name), Delimiter="/"):
            for item in page.get("CommonPrefixes", ()):
                yield item["Prefix"][:-1].rpartition("/")[2]

    def get_region(self, bucket: str) -> str | None:
        """Return a bucket's region, "" if there is no such bucket, or None if S3 returns no region.

        S3 also returns the region if it refuses the request:
        https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html
        """
        from botocore.exceptions import ClientError

        try:
            response = self.client.head_bucket(Bucket=bucket)
        except ClientError as error:
            response = error.response
        metadata = response["ResponseMetadata"]
        region: str | None = metadata["HTTPHeaders"].get("x-amz-bucket-region")
        return "" if metadata["HTTPStatusCode"] == 404 else region

    def read(self, uri: S3Uri, name: str) -> Any:
        """Return an object's JSON, or None if there is no object. Raises ClientError, ValueError."""
        document = self.document(uri, name)
        return None if document is None else document.parse()

    def document(self, uri: S3Uri, name: str) -> Document | None:
        """Return an object's document, or None if there is no object.

        An AWS identity with permission to list only some prefixes gets AccessDenied for a missing object:
        https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
        Raises ClientError, or ValueError if the object is larger than MOST_BYTES.
        """
        from botocore.exceptions import ClientError

        parameters = {"Bucket": uri.bucket, "Key": uri.key(name)}
        try:
            return self._document(parameters)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code == "NoSuchKey" or (code == "AccessDenied" and not any(self.list(uri, name=name))):
                return None
            return self._document(parameters)  # the object may have been written since then

    def _document(self, parameters: Mapping[str, Any]) -> Document:
        def check(response: Mapping[str, Any]) -> int:
            if response["ContentLength"] > MOST_BYTES:
                raise ValueError(f"{response['ContentLength']:,} bytes are more than awsddp writes")
            return int(response["ContentLength"])

        response, body = self._get(parameters, check)
        return Document(body, response["ETag"].strip('"'), response["Metadata"].get(SIGNATURE, ""))

    def _get(
        self, parameters: Mapping[str, Any], check: Callable[[Mapping[str, Any]], int]
    ) -> tuple[Mapping[str, Any], bytes]:
        """Return a response and the first bytes of its body. Retries if the body is truncated.

        `check` takes the response, and returns how many bytes to read.
        """
        from s3transfer.exceptions import RetriesExceededError
        from s3transfer.utils import S3_RETRYABLE_DOWNLOAD_ERRORS

        last_error: BaseException = EOFError("the connection ended early")
        for _ in range(ATTEMPTS):
            response = self.client.get_object(**parameters, **self._payer)
            with contextlib.closing(response["Body"]) as body:
                size = check(response)
                try:
                    data = body.read(size) if size else b""
                except S3_RETRYABLE_DOWNLOAD_ERRORS as error:
                    last_error = error
                    continue
            if len(data) == size:
                return response, data
        raise RetriesExceededError(last_error) from last_error

    def write(
        self,
        uri: S3Uri,
        name: str,
        document: object,
        *,
        instead_of: str | None = None,
        sign: Callable[[str, bytes], str] | None = None,
    ) -> str | None:
        """Write a document and return its ETag.

        If `instead_of` is not None, the document is written only if the current document's ETag is
        `instead_of` ("": only if there is no current document). If the document is not written, the method
        returns None. `sign` returns the signature for a name and a body. Raises ClientError, or ValueError if
        the document is too large.
        """
        from botocore.exceptions import ClientError

        body = json.dumps(document).encode()
        if len(body) > MOST_BYTES:
            raise ValueError(f"{name} would have {len(body):,} bytes")
        parameters: dict[str, Any] = {"Metadata": {SIGNATURE: sign(name, body)}} if sign else {}
        if instead_of is not None:
            parameters |= {"IfMatch": f'"{instead_of}"'} if instead_of else {"IfNoneMatch": "*"}
        try:
            return self.put(uri, name, body, **parameters)
        except ClientError as error:
            codes = "PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"
            if instead_of is not None and error.response["Error"]["Code"] in codes:
                return None
            raise

    def put(self, uri: S3Uri, name: str, body: bytes, **parameters: Any) -> str:
        """Write a small object and return its ETag. Raises ClientError, BotoCoreError."""
        response = self.client.put_object(Bucket=uri.bucket, Key=uri.key(name), Body=body, **parameters)
        return str(response["ETag"]).strip('"')

    def abort(self, uri: S3Uri, *, ended_jobs: Container[str] | None = None) -> None:
        """Abort incomplete uploads under `uri` if AWS permits it. Raises BotoCoreError.

        If `ended_jobs` is not None, `uri` contains the folders of jobs and data. The method then aborts only
        the uploads of these jobs and of other jobs that have ended, and old uploads. Old uploads are aborted
        because the state of a job that was lost with its cluster remains "running".
        """
        from botocore.exceptions import ClientError

        uploads: list[Any] = []
        with contextlib.suppress(ClientError):
            pages = self.client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=uri.bucket, Prefix=uri.key("")):
                uploads += page.get("Uploads", ())
        for upload in uploads:
            with contextlib.suppress(ClientError, ValueError):
                if ended_jobs is None or self._is_abandoned(
                    uri, upload["Key"], upload["Initiated"], ended_jobs
                ):
                    parameters = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self.client.abort_multipart_upload(Bucket=uri.bucket, **parameters)

    def _is_abandoned(self, uri: S3Uri, key: str, started: datetime, over: Container[str]) -> bool:
        """Return True if an upload by awsddp will not be continued. Raises ClientError, ValueError.

        An upload of data can take days over a slow connection, so it counts as abandoned only after a week.
        """
        name, age = key[len(uri.key("")) :].partition("/")[0], datetime.now(started.tzinfo) - started
        if name == DATA_FOLDER:
            return age > _WEEK
        job = self.read(uri, f"{name}/job.json")
        if not isinstance(job, dict) or "save" not in job:
            return False
        return name in over or job.get("state") not in _ACTIVE_STATES or age > _DAY

    def upload(
        self,
        path: Path,
        uri: S3Uri,
        name: str,
        on_bytes: Callable[[int], None] = lambda count: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> Upload:
        """Start uploading a file, in parts if it is large. `on_end` is called in another thread.

        After the upload, `pop_etag` returns its ETag. The upload's `result` raises OSError, ClientError,
        BotoCoreError.
        """
        size = path.stat().st_size
        if size >= PART_BYTES:
            subscribers = [_TransferSubscriber(on_bytes, on_end)]
            upload: Upload = self._transfers.upload(
                str(path), uri.bucket, uri.key(name), subscribers=subscribers
            )
            return upload

        def put() -> None:
            with open_file(path) as file:
                body = file.read(size)
            self.put(uri, name, body)
            on_bytes(len(body))

        future = self._pool.submit(put)
        future.add_done_callback(lambda _: on_end())
        return future

    def pop_etag(self, uri: S3Uri, name: str) -> str:
        """Return and remove the stored ETag of the last upload to a name. Raises KeyError."""
        return self._etags.pop((uri.bucket, uri.key(name)))

    def upload_files(
        self, files: Mapping[str, Path], uri: S3Uri, on_bytes: Callable[[int], None] = lambda count: None
    ) -> dict[str, str]:
        """Upload files to names under `uri`, several at once, and return {name: ETag}.

        Raises OSError, ClientError, BotoCoreError.
        """
        uploads: dict[str, Upload] = {}
        try:
            for name, path in files.items():
                uploads[name] = self.upload(path, uri, name, on_bytes)
            for upload in uploads.values():
                upload.result()
        except BaseException:
            for upload in uploads.values():
                upload.cancel()
            raise
        return {name: self.pop_etag(uri, name) for name in files}

    def download_files(
        self,
        uri: S3Uri,
        wanted: Mapping[str, Sequence[S3Object]],
        folder: Path,
        on_bytes: Callable[[int], None] = lambda count: None,
        on_file: Callable[[str], None] = lambda path: None,
    ) -> None:
        """Download several files at once, each from its objects, to their paths in `folder`.

        Existing files are replaced. A file appears only when it is complete; then `on_file` is called in this
        thread. The paths must have been checked before. Raises ObjectChanged, OSError, ClientError,
        BotoCoreError.
        """
        partial_folder = folder / PARTIAL_FOLDER
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
        partial_paths = {path: partial_folder / str(number) for number, path in enumerate(wanted)}

        def download(path: str) -> None:
            self.download(uri.bucket, wanted[path], partial_paths[path], on_bytes)

        for path in self.run_each(download, wanted):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            partial_paths[path].replace(folder / path)
            on_file(path)
        partial_folder.rmdir()

    def run_each(self, work: Callable[[_Item], object], items: Iterable[_Item]) -> Iterator[_Item]:
        """Call `work` for several items at once. Yield the items in order, each when its call has ended.

        After an error, no more calls are started, and the error is raised when the running calls have ended.
        `work` must not call this store's `run_each`.
        """
        stop = threading.Event()

        def run(item: _Item) -> None:
            if not stop.is_set():
                work(item)

        futures = [(item, self._pool.submit(run, item)) for item in items]
        try:
            for item, future in futures:
                future.result()
                yield item
        finally:
            stop.set()
            wait([future for _, future in futures])

    def download(
        self,
        bucket: str,
        objects: Sequence[S3Object],
        path: Path,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Write the file `path` from its listed objects.

        Raises ObjectChanged if an object is not as listed, and OSError, ClientError or BotoCoreError.
        """
        with _raise_changed(objects[0].key if objects else ""):
            if len(objects) == 1 and objects[0].size >= PART_BYTES and not objects[0].digest:
                self._download_large(bucket, objects[0], path, on_bytes)
                return
            with path.open("wb") as file:
                for s3_object in objects:
                    on_bytes(file.write(self._download_small(bucket, s3_object)))

    def read_object(self, uri: S3Uri, s3_object: S3Object) -> bytes:
        """Return a small object's bytes; its key is relative to `uri`. Raises ObjectChanged, ClientError."""
        with _raise_changed(s3_object.key):
            return self._download_small(uri.bucket, s3_object._replace(key=uri.key(s3_object.key)))

    def _download_large(
        self, bucket: str, s3_object: S3Object, path: Path, on_bytes: Callable[[int], None]
    ) -> None:
        current = self.client.head_object(Bucket=bucket, Key=s3_object.key, **self._payer)
        if (current["ContentLength"], current["ETag"].strip('"')) != (s3_object.size, s3_object.etag):
            raise ObjectChanged(s3_object.key)
        subscribers = [_TransferSubscriber(on_bytes, listed=s3_object)]
        self._transfers.download(
            bucket, s3_object.key, str(path), self._payer, subscribers=subscribers
        ).result()

    def _download_small(self, bucket: str, s3_object: S3Object) -> bytes:
        """Return an object's bytes, or, if it has a digest, only the bytes that the digest covers.

        Raises ObjectChanged, ClientError.
        """
        if s3_object.size > (MOST_PART_BYTES if s3_object.digest else PART_BYTES) or not s3_object.etag:
            raise ObjectChanged(s3_object.key)
        parameters = {"Bucket": bucket, "Key": s3_object.key}
        if not s3_object.digest:
            parameters["IfMatch"] = f'"{s3_object.etag}"'
        elif s3_object.size:
            parameters["Range"] = f"bytes=0-{s3_object.size - 1}"

        def check(reply: Mapping[str, Any]) -> int:
            if reply["ContentLength"] != s3_object.size and (not s3_object.digest or s3_object.size):
                raise ObjectChanged(s3_object.key)
            return s3_object.size

        _, body = self._get(parameters, check)
        if s3_object.digest and hashlib.sha256(body).hexdigest() != s3_object.digest:
            raise ObjectChanged(s3_object.key)
        return body


@contextlib.contextmanager
def _raise_changed(key: str) -> Iterator[None]:
    """Raise ObjectChanged if S3 reports that an object was replaced or deleted."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in (404, 412, 416):
            raise ObjectChanged(key) from error
        raise


def _remember_key(params: Mapping[str, Any], context: dict[str, Any], **_: object) -> None:
    context["awsddp"] = params["Bucket"], params["Key"]


class _TransferSubscriber:
    """Receives a transfer's progress (in bytes) and its end, and pins a download to the listed object.

    s3transfer reports a negative count before it sends bytes again.
    """

    def __init__(
        self,
        on_bytes: Callable[[int], None],
        on_end: Callable[[], None] = lambda: None,
        listed: S3Object | None = None,
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
