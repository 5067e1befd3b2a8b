"""Objects of S3, down and up, alike on a node and on a client: each is whole under its name, or not there.

It needs boto3, in the Python that runs it. Transfers are s3transfer's, attempts botocore's own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping
    from pathlib import Path

ATTEMPTS = 10
AT_ONCE = 16
FOLDERS = ".data"
"""Beside the jobs: folders of data on their way to nodes."""
_LIVES, _DAY = ("claimed", "waiting", "running"), timedelta(days=1)
MOST_BYTES = 256 << 20
"""How long an object of JSON may be that is read: none of awsddp's is longer."""
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
    """An object of a listing: its key, its size in bytes, and its ETag ("": not known)."""

    key: str
    size: int
    etag: str


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
            max_pool_connections=AT_ONCE,
            proxies={} if endpoint else None,
            s3={"addressing_style": "path"} if endpoint else None,
            **({"signature_version": UNSIGNED} if unsigned else {}),
        )
        made = session or node_session()
        self.client: Any = made.create_client("s3", region_name=region, endpoint_url=endpoint, config=config)
        self._payer = {"RequestPayer": "requester"} if payer else {}
        self._transfers: Any = TransferManager(self.client, TransferConfig(max_request_concurrency=AT_ONCE))

    def close(self) -> None:
        """Wait for what travels, and end its threads."""
        self._transfers.shutdown()

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
        """Return the JSON of an object, None where there is none. Raises ClientError, ValueError.

        Who may list some prefixes only is refused what is not there.
        https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
        """
        from botocore.exceptions import ClientError

        asked = {"Bucket": where.bucket, "Key": where.key(name), **self._payer}
        try:
            reply = self.client.get_object(**asked)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code == "NoSuchKey" or (code == "AccessDenied" and not any(self.list(where, name=name))):
                return None
            reply = self.client.get_object(**asked)  # it may have come meanwhile
        with contextlib.closing(reply["Body"]) as body:
            if reply["ContentLength"] > MOST_BYTES:
                raise ValueError(f"{reply['ContentLength']:,} bytes are more than awsddp writes")
            try:
                return json.loads(body.read())
            except RecursionError as error:
                raise ValueError(str(error)) from error

    def write(self, where: Place, name: str, document: object, *, new: bool = False) -> bool:
        """Write a small object of JSON. With `new` only where none is, and return whether that was so.

        Raises ClientError.
        """
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if new else {}
        body = json.dumps(document).encode()
        try:
            self.client.put_object(Bucket=where.bucket, Key=where.key(name), Body=body, **condition)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            raise
        return True

    def abort(self, where: Place, *, over: Container[str] | None = None) -> None:
        """Give up what was begun below a place and not completed, as far as the caller has the right to.

        With `over` the place holds jobs and data, and it is that of jobs that have ended, or are named, and
        what was begun a day ago: a job that went with its cluster says for ever that it runs. Raises
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
        """Tell whether nobody goes on with an upload of awsddp's. Raises ClientError, ValueError."""
        name = key[len(where.key("")) :].partition("/")[0]
        job = self.read(where, f"{name}/job.json") if name != FOLDERS else {"save": 1, "state": "running"}
        if not isinstance(job, dict) or "save" not in job:
            return False
        ends = name in over or job.get("state") not in _LIVES
        return ends or datetime.now(begun.tzinfo) - begun > _DAY

    def send(
        self, files: Mapping[str, Path], where: Place, on_bytes: Callable[[int], None] = lambda count: None
    ) -> None:
        """Upload files to names below a place, several at once, in parts where they are large.

        Raises OSError, ClientError, BotoCoreError.
        """
        told = [_Told(on_bytes, None)]
        transfers = {
            name: self._transfers.upload(str(path), where.bucket, where.key(name), subscribers=told)
            for name, path in files.items()
        }
        _wait(transfers, lambda name: None)

    def bring(
        self,
        where: Place,
        wanted: Mapping[str, Thing],
        folder: Path,
        on_bytes: Callable[[int], None] = lambda count: None,
        on_file: Callable[[str], None] = lambda path: None,
    ) -> None:
        """Download objects to their paths in `folder`, several at once; what is there is replaced.

        Each appears when it is whole, and is the one that was listed: another one by then is a ClientError,
        PreconditionFailed. Raises OSError, BotoCoreError. Who calls has made the paths harmless.
        """
        parts = folder / PARTS
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
        transfers, at = {}, {path: parts / str(number) for number, path in enumerate(wanted)}
        for path, one in wanted.items():
            transfers[path] = self._transfers.download(
                where.bucket, one.key, str(at[path]), self._payer, subscribers=[_Told(on_bytes, one)]
            )

        def put(path: str) -> None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            at[path].replace(folder / path)
            on_file(path)

        _wait(transfers, put)
        parts.rmdir()


def join(parts: Iterable[tuple[Path, int]], path: Path) -> None:
    """Write a file of parts, each cut to its size (bytes). Raises OSError, EOFError where one is shorter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as whole:
        for part, size in parts:
            with part.open("rb") as file:
                while size and (data := file.read(min(size, 1 << 20))):
                    size -= whole.write(data)
            if size:
                raise EOFError(f"{path.name} lacks {size:,} bytes")


def _wait(transfers: Mapping[str, Any], done: Callable[[str], None]) -> None:
    """Wait for transfers, and tell of each that is done; where one fails the others are given up.

    Raises what it failed with.
    """
    try:
        for name, one in transfers.items():
            one.result()
            done(name)
    except BaseException:
        for one in transfers.values():
            one.cancel()
        raise


class _Told:
    """Hears how many bytes have travelled. s3transfer takes back what it sends again: a negative count.

    A download asks for the very object that was listed, and for nothing before.
    """

    def __init__(self, on_bytes: Callable[[int], None], listed: Thing | None) -> None:
        self._on_bytes, self._listed = on_bytes, listed

    def on_progress(self, bytes_transferred: int, **_: object) -> None:
        self._on_bytes(bytes_transferred)

    def on_queued(self, future: Any, **_: object) -> None:
        if self._listed is not None:
            future.meta.provide_transfer_size(self._listed.size)
            if self._listed.etag:
                future.meta.provide_object_etag(self._listed.etag)
