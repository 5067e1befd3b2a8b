"""A request to S3: which operation it is, what it may do, and its body as it comes in."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qsl, quote

import msgspec
from moto.core.parse import RequestParserError, RestXMLParser
from moto.core.utils import get_service_model
from werkzeug.datastructures import EnvironHeaders, Headers

from awsddp.local import rights
from awsddp.local.requests import Refusal

CHUNK = 1 << 20
TEXT_LIMIT = 4 << 20
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
BODIES = ("GetObject", "PutObject", "UploadPart")
TAKEN = {
    *("Bucket", "Key", "ContentLength", "ContentType", "ContentEncoding", "ContentMD5", "Metadata", "Range"),
    *("IfMatch", "IfNoneMatch", "RequestPayer", "Prefix", "Delimiter", "MaxKeys", "ContinuationToken"),
    *("EncodingType", "PartNumber", "UploadId", "MultipartUpload", "Delete", "CreateBucketConfiguration"),
    *("LifecycleConfiguration", "MaxBuckets"),
}
"""The parameters that are carried out, beside checksums, and the ACL of a bucket."""
VALUES = {"ACL": ("private", "public-read"), "IfNoneMatch": ("*",)}


class Bucket(msgspec.Struct, frozen=True):
    """What `bucket.json` says; everybody may read a `public` one."""

    region: str
    owner: str
    created: float = 0.0
    public: bool = False
    requester_pays: bool = False
    lifecycle: dict[str, Any] = {}


class Stored(msgspec.Struct, frozen=True):
    """The description of an object, of a part, or of an upload.

    `tag`: its ETag; `kept`: what its owner noted.
    """

    key: str
    size: int = 0
    tag: str = ""
    modified: float = msgspec.field(default_factory=time.time)
    kept: dict[str, Any] = {}


@cache
def operations() -> dict[tuple[str, str], list[tuple[set[str], str]]]:
    """S3's operations by method and path, each with the parameters and headers that tell it apart."""
    found: dict[tuple[str, str], list[tuple[set[str], str]]] = defaultdict(list)
    for name in get_service_model("s3").operation_names:
        one: Any = get_service_model("s3").operation_model(name)
        path, _, query = one.http["requestUri"].partition("?")
        marks = {word.partition("=")[0] for word in query.split("&") if word}
        for key in one.input_shape.required_members if one.input_shape else ():
            place = one.input_shape.members[key].serialization
            if place.get("location") in ("querystring", "header"):
                marks.add(place["name"])
        if not one.deprecated:
            found[one.http["method"], path].append((marks, name))
    return found


@dataclass
class Call:
    """One request. `caller` is the ARN of who signed it, "" for nobody; `policies`: None for all rights."""

    environ: dict[str, Any] = field(repr=False)
    caller: str = ""
    region: str = ""
    policies: list[str] | None = None
    found: Bucket | None = None
    cut: bool = False

    def __post_init__(self) -> None:
        path = str(self.environ["PATH_INFO"]).encode("latin-1").decode("utf-8", "replace")
        self.bucket, _, self.key = path.removeprefix("/").partition("/")
        self.query = dict(parse_qsl(self.environ.get("QUERY_STRING", ""), keep_blank_values=True))
        self.headers = Headers((name.lower(), value) for name, value in EnvironHeaders(self.environ))
        sent = {*self.query, *(name for name, _ in self.headers)}
        form = "/{Bucket}/{Key+}" if self.key else "/{Bucket}" if self.bucket else "/"
        rivals = [one for one in operations()[self.environ["REQUEST_METHOD"], form] if one[0] <= sent]
        self.operation = max(rivals, key=lambda one: len(one[0]), default=(sent, "this"))[1]

    @cached_property
    def asked(self) -> dict[str, Any]:
        """Its parameters as boto3 names them, but for a body that is streamed.

        :raises Refusal: ones that cannot be read, or that would have no effect.
        """
        if self.operation not in rights.ACTIONS:
            raise _lacking(self.operation)
        text = io.BytesIO()
        if self.operation not in BODIES and (length := self.headers.get("content-length")):
            if int(length) > TEXT_LIMIT:
                raise Refusal("EntityTooLarge", "Your proposed upload exceeds the maximum allowed size")
            self.receive(text)
        model: Any = get_service_model("s3").operation_model(self.operation)
        given: Any = {
            "body": text.getvalue(),
            "headers": self.headers,
            "values": self.query,
            "url_params": {"Bucket": self.bucket, "Key": self.key},
        }
        try:
            asked: dict[str, Any] = RestXMLParser(model).parse(given)
        except (ValueError, RequestParserError) as error:
            raise Refusal("InvalidArgument", str(error)) from None
        for name, value in asked.items():
            known = name in TAKEN or name.startswith("Checksum") or (name == "ACL" and not self.key)
            if not known or value not in VALUES.get(name, (value,)):
                raise _lacking(f"{name} in {self.operation}")
        return asked

    def kept(self) -> dict[str, Any]:
        """What comes back with an object: its type, and what its owner noted."""
        return {name: self.asked[name] for name in ("ContentType", "Metadata") if name in self.asked}

    def shown(self, text: str) -> str:
        """A key as a listing shows it to this caller."""
        return quote(text, safe="/*-._") if "EncodingType" in self.asked else text

    def may(self, operation: str, resource: str) -> None:
        """Raise Refusal where the policies of the caller do not allow it."""
        if self.policies is None:
            return
        action = rights.ACTIONS[operation]
        context = {"s3:prefix": self.query.get("prefix", "")}
        decision = rights.decide(self.policies, action, f"arn:aws:s3:::{resource}", context)
        if decision != "allowed":
            why = rights.DENIED[decision].format(action)
            text = f'is not authorized to perform: {action} on resource: "arn:aws:s3:::{resource}"'
            raise Refusal("AccessDenied", f"User: {self.caller} {text} {why}")

    def check_condition(self, now: Stored | None) -> None:
        """Raise Refusal where what is under the key is not what the caller expects there."""
        wanted = self.asked.get("IfMatch", "").strip('"')
        if wanted and now is None:
            raise Refusal("NoSuchKey", "The specified key does not exist.")
        if now and ("IfNoneMatch" in self.asked or wanted not in ("", "*", now.tag.strip('"'))):
            raise Refusal(
                "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
            )

    def receive(self, file: IO[bytes]) -> tuple[int, str]:
        """Write the body into a file; its size and its ETag.

        :raises Refusal: a checksum is wrong.
        :raises ConnectionError: the client has gone, or a fault cuts the connection.
        """
        sent, source = self.headers.get("x-amz-content-sha256", ""), self.environ["wsgi.input"]
        trailer: dict[str, str] = {}
        length = int(self.headers.get("x-amz-decoded-content-length") or self.headers["content-length"])
        if sent.startswith("STREAMING-"):
            if self.environ.get("wsgi.input_terminated"):
                source = io.BufferedReader(source, CHUNK)
            chunks = unchunked(source, trailer)
        else:
            chunks = exactly(source, length)
        md5, sha256, crc32, size = hashlib.md5(), hashlib.sha256(), 0, 0
        hashed = len(sent) == 2 * sha256.digest_size
        for data in chunks:
            file.write(data)
            md5.update(data)
            if hashed:
                sha256.update(data)
            crc32, size = zlib.crc32(data, crc32), size + len(data)
            if self.cut and 2 * size >= length:
                raise ConnectionResetError("a fault: the connection is cut")
        if size != length:
            raise ConnectionResetError("the body is not as long as it was said to be")
        crc = base64.b64encode(crc32.to_bytes(4)).decode()
        sums = [
            (sent if hashed else "", sha256.hexdigest()),
            (self.headers.get("content-md5"), base64.b64encode(md5.digest()).decode()),
            (self.headers.get("x-amz-checksum-crc32"), crc),
            (trailer.get("x-amz-checksum-crc32"), crc),
        ]
        if any(one and one != real for one, real in sums):
            raise Refusal("BadDigest", "The checksum you specified did not match the calculated checksum.")
        return size, f'"{md5.hexdigest()}"'


def _lacking(what: str) -> Refusal:
    return Refusal("NotImplemented", f"The local cloud does not carry out {what}.", status="501")


def exactly(source: Any, size: int) -> Iterator[bytes]:
    """The next bytes of a file, in pieces. Raises ConnectionError where it ends before."""
    while size:
        data = source.read(min(size, CHUNK))
        if not data:
            raise ConnectionResetError("the body ended too soon")
        size -= len(data)
        yield data


def unchunked(source: Any, trailer: dict[str, str]) -> Iterator[bytes]:
    """What is in the chunks of an aws-chunked body; what follows them is put into `trailer`.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming.html
    """
    try:
        while size := int(source.readline(CHUNK).partition(b";")[0], 16):
            yield from exactly(source, size)
            source.readline(CHUNK)
    except ValueError:
        raise ConnectionResetError("a chunk without a length") from None
    for line in iter(lambda: source.readline(CHUNK).strip(), b""):
        name, _, value = line.decode("latin-1").partition(":")
        trailer[name.lower()] = value.strip()


def description(file: IO[bytes]) -> Stored:
    """What the end of an object's file says; the file is at its start then."""
    file.seek(-8, io.SEEK_END)
    length = int.from_bytes(file.read(8))
    file.seek(-8 - length, io.SEEK_END)
    one = msgspec.json.decode(file.read(length), type=Stored)
    file.seek(0)
    return one


def read(path: Path) -> Stored:
    """The description in a file. Raises FileNotFoundError where there is none."""
    with path.open("rb") as file:
        return description(file)
