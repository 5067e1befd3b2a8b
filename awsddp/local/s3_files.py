"""A request to S3: which operation it is, what it may do, and its body as it comes in."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import re
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import msgspec
from moto.core.exceptions import ServiceException
from moto.core.parse import RequestParserError, RestXMLParser
from moto.core.request import Request
from moto.core.routing import get_service_router
from moto.iam.access_control import S3IAMRequest

from awsddp.local import ec2_http, iam
from awsddp.local.ec2_http import Refusal
from awsddp.local.emulator import USER

CHUNK = 1 << 20
MOST_PARTS = 10_000
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
BODIES = ("GetObject", "PutObject", "UploadPart")
TAKEN = {
    *("Bucket", "Key", "ContentLength", "ContentType", "ContentEncoding", "ContentMD5", "Metadata", "Range"),
    *("RequestPayer", "Prefix", "MaxKeys", "ContinuationToken", "EncodingType", "UploadId"),
    *("MultipartUpload", "CreateBucketConfiguration", "LifecycleConfiguration", "MaxBuckets"),
    *(f"{name}.IfMatch" for name in ("GetObject", "HeadObject", "PutObject", "CompleteMultipartUpload")),
    *("PutObject.IfNoneMatch", "CompleteMultipartUpload.IfNoneMatch"),
    *("ListObjectsV2.Delimiter", "ListMultipartUploads.KeyMarker"),
    *("ListMultipartUploads.UploadIdMarker", "ListMultipartUploads.MaxUploads"),
    *("UploadPart.PartNumber", "PutBucketAcl.ACL", "ListParts.PartNumberMarker", "ListParts.MaxParts"),
}
"""The parameters that are carried out, of all operations or of one, beside checksums."""
VALUES = {
    "ACL": ("private", "public-read"),
    "ContentEncoding": ("aws-chunked",),
    "IfNoneMatch": ("*",),
}


class Headers(dict[str, str]):
    """The headers of a request; the case of their names does not matter. moto looks up 50 of them."""

    def __setitem__(self, name: str, value: str) -> None:
        super().__setitem__(name.lower(), value)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).lower())

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


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


@dataclass
class Call:
    """One request. `caller` is the ARN of who signed it, "" for nobody; `policies`: None for all rights.

    :raises NotFound: it is for no operation of S3.
    """

    environ: dict[str, Any] = field(repr=False)
    caller: str = ""
    region: str = ""
    policies: list[str] | None = None
    found: Bucket | None = None
    cut: bool = False

    def __post_init__(self) -> None:
        request: Any = Request(self.environ)
        self.headers = Headers((name.lower(), value) for name, value in request.headers)
        self.query = request.args
        self._model, self._labels = get_service_router("s3").match(request)
        self.operation: str = self._model.name
        self.bucket: str = self._labels.get("Bucket", "")
        self.key: str = self._labels.get("Key", "")

    @cached_property
    def asked(self) -> dict[str, Any]:
        """Its parameters as boto3 names them, but for a body that is streamed.

        :raises Refusal: ones that cannot be read, or that would have no effect.
        """
        if self.operation not in iam.ACTIONS:
            raise _lacking(self.operation)
        text = io.BytesIO()
        if self.operation not in BODIES and "content-length" in self.headers:
            self.receive(text)
        sent: Any = {"headers": self.headers, "values": self.query, "url_params": self._labels}
        sent["body"] = text.getvalue()
        try:
            asked: dict[str, Any] = RestXMLParser(self._model).parse(sent)
        except (ValueError, RequestParserError) as error:
            raise Refusal("InvalidArgument", str(error)) from None
        for name, value in asked.items():
            known = name.startswith("Checksum") or TAKEN & {name, f"{self.operation}.{name}"}
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
        action = iam.ACTIONS[operation]
        context = {f"s3:{name}": value for name, value in self.query.items()}
        decision = iam.decide(self.policies, action, f"arn:aws:s3:::{resource}", context)
        if decision != "allowed":
            why = iam.DENIED[decision].format(action)
            text = f'is not authorized to perform: {action} on resource: "arn:aws:s3:::{resource}"'
            raise Refusal("AccessDenied", f"User: {self.caller} {text} {why}")

    def receive(self, file: IO[bytes]) -> tuple[int, str]:
        """Write the body into a file; its size and its ETag.

        :raises Refusal: a checksum is wrong.
        :raises ConnectionError: the client has gone, or a fault cuts the connection.
        """
        sent, source = self.headers.get("x-amz-content-sha256", ""), self.environ["wsgi.input"]
        length = int(self.headers.get("x-amz-decoded-content-length") or self.headers["content-length"])
        if sent.startswith("STREAMING-"):
            if self.environ.get("wsgi.input_terminated"):
                source = io.BufferedReader(source, CHUNK)
            chunks = unchunked(source, self.headers)
        else:
            chunks = exactly(source, length)
        md5, sha256, crc32, size = hashlib.md5(), hashlib.sha256(), 0, 0
        for data in chunks:
            file.write(data)
            md5.update(data)
            sha256.update(data)
            crc32, size = zlib.crc32(data, crc32), size + len(data)
            if self.cut and 2 * size >= length:
                break
        if self.cut or size != length:
            raise ConnectionResetError("the body is not as long as it was said to be")
        sums = [
            (sent if len(sent) == 2 * sha256.digest_size else "", sha256.hexdigest()),
            (self.headers.get("content-md5"), base64.b64encode(md5.digest()).decode()),
            (self.headers.get("x-amz-checksum-crc32"), base64.b64encode(crc32.to_bytes(4)).decode()),
        ]
        if any(one and one != real for one, real in sums):
            raise Refusal("BadDigest", "The checksum you specified did not match the calculated checksum.")
        return size, f'"{md5.hexdigest()}"'


def identify(call: Call) -> None:
    """Find who signed a request, and which policies hold for them. Raises ServiceException for nobody."""
    match = ec2_http.SCOPE.fullmatch(call.headers["authorization"])
    if match is None or match[3] != "s3":
        raise Refusal("AuthorizationHeaderMalformed", "The authorization header is malformed.")
    if abs(ec2_http.seconds_late(call.environ)) > ec2_http.SIGNED_FOR_S:
        why = "The difference between the request time and the server's is too large."
        raise Refusal("RequestTimeTooSkewed", why, status="403")
    key = ec2_http.find_signer(call.environ, S3IAMRequest, url=f"http://local{call.environ['RAW_URI']}")
    call.caller, call.region = key.arn, match[2]
    if not key.arn.endswith(f":user/{USER}"):
        call.policies = []
        with suppress(ServiceException):  # the role is gone
            call.policies = key.collect_policies()


def check_condition(holds: bool) -> None:
    """Raise Refusal where what is under a key is not what the caller expects there."""
    if not holds:
        why = "At least one of the pre-conditions you specified did not hold"
        raise Refusal("PreconditionFailed", why, status="412")


def no_such_key() -> Refusal:
    """The refusal of a key that has no object."""
    return Refusal("NoSuchKey", "The specified key does not exist.", status="404")


def part_number(call: Call) -> int:
    """The number of the part that is uploaded. Raises Refusal for one that no part can have."""
    number: int = call.asked["PartNumber"]
    if not 1 <= number <= MOST_PARTS:
        why = f"Part number must be an integer between 1 and {MOST_PARTS}, inclusive"
        raise Refusal("InvalidArgument", why)
    return number


def named_parts(call: Call) -> list[tuple[int, str]]:
    """Number and ETag of each part that completes an upload.

    :raises Refusal: there is none, one lacks a number or an ETag, or they are not in order.
    """
    try:
        listed = call.asked["MultipartUpload"]["Parts"]
        named = [(one["PartNumber"], one["ETag"].strip('"')) for one in listed]
    except KeyError:
        named = []
    if not named:
        why = "The XML you provided was not well-formed or did not validate against our published schema"
        raise Refusal("MalformedXML", why)
    if any(one >= other for (one, _), (other, _) in itertools.pairwise(named)):
        why = "The list of parts was not in ascending order. Parts must be ordered by part number."
        raise Refusal("InvalidPartOrder", why)
    return named


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


def unchunked(source: Any, headers: Headers) -> Iterator[bytes]:
    """What is in the chunks of an aws-chunked body; what follows them is put into `headers`.

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
        headers[name] = value.strip()


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
