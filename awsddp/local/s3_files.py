"""S3 requests (operation, permissions and body), and the format of the files that store objects."""

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
MAX_PARTS = 10_000
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
STREAMED_OPERATIONS = ("GetObject", "PutObject", "UploadPart")
SUPPORTED_PARAMETERS = {
    *("Bucket", "Key", "ContentLength", "ContentType", "ContentEncoding", "ContentMD5", "Metadata", "Range"),
    *("RequestPayer", "Prefix", "MaxKeys", "ContinuationToken", "EncodingType", "UploadId"),
    *("MultipartUpload", "CreateBucketConfiguration", "LifecycleConfiguration", "MaxBuckets"),
    *(f"{name}.IfMatch" for name in ("GetObject", "HeadObject", "PutObject", "CompleteMultipartUpload")),
    *("PutObject.IfNoneMatch", "CompleteMultipartUpload.IfNoneMatch"),
    *("ListObjectsV2.Delimiter", "ListMultipartUploads.KeyMarker"),
    *("ListMultipartUploads.UploadIdMarker", "ListMultipartUploads.MaxUploads"),
    *("UploadPart.PartNumber", "PutBucketAcl.ACL", "ListParts.PartNumberMarker", "ListParts.MaxParts"),
}
"""The parameters that all operations, or one operation, support in addition to the checksum parameters."""
VALUES = {
    "ACL": ("private", "public-read"),
    "ContentEncoding": ("aws-chunked",),
    "IfNoneMatch": ("*",),
}


class Headers(dict[str, str]):
    """Holds a request's headers, whose names are case-insensitive. Lookups must be fast, because moto looks
    up 50 headers per request."""

    def __setitem__(self, name: str, value: str) -> None:
        super().__setitem__(name.lower(), value)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).lower())

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


class Bucket(msgspec.Struct, frozen=True):
    """Holds the content of `bucket.json`. A `public` bucket can be read without a signature."""

    region: str
    owner: str
    created: float = 0.0
    public: bool = False
    requester_pays: bool = False
    lifecycle: dict[str, Any] = {}


class ObjectInfo(msgspec.Struct, frozen=True):
    """Describes an object, a part or an upload.

    `tag` is the ETag, and `kept` has the content type and the user metadata.
    """

    key: str
    size: int = 0
    tag: str = ""
    modified: float = msgspec.field(default_factory=time.time)
    kept: dict[str, Any] = {}


@dataclass
class S3Call:
    """A request. `caller` is the signer's ARN, or "" if the request is unsigned. If `policies` is None,
    everything is allowed.

    `bucket_info` is set once the bucket is known. `is_cut` is True if a fault cuts the connection in the
    middle of the body.

    :raises NotFound: the request matches no S3 operation.
    """

    environ: dict[str, Any] = field(repr=False)
    caller: str = ""
    region: str = ""
    policies: list[str] | None = None
    bucket_info: Bucket | None = None
    is_cut: bool = False

    def __post_init__(self) -> None:
        request: Any = Request(self.environ)
        self.headers = Headers((name.lower(), value) for name, value in request.headers)
        self.query = request.args
        self._model, self._labels = get_service_router("s3").match(request)
        self.operation: str = self._model.name
        self.bucket: str = self._labels.get("Bucket", "")
        self.key: str = self._labels.get("Key", "")

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The parsed parameters, named as in boto3, without a streamed body.

        :raises Refusal: a parameter is invalid or not supported.
        """
        if self.operation not in iam.ACTIONS:
            raise _unsupported(self.operation)
        body = io.BytesIO()
        if self.operation not in STREAMED_OPERATIONS and "content-length" in self.headers:
            self.receive_body(body)
        request: Any = {"headers": self.headers, "values": self.query, "url_params": self._labels}
        request["body"] = body.getvalue()
        try:
            arguments: dict[str, Any] = RestXMLParser(self._model).parse(request)
        except (ValueError, RequestParserError) as error:
            raise Refusal("InvalidArgument", str(error)) from None
        for name, value in arguments.items():
            is_supported = name.startswith("Checksum") or SUPPORTED_PARAMETERS & {
                name,
                f"{self.operation}.{name}",
            }
            if not is_supported or value not in VALUES.get(name, (value,)):
                raise _unsupported(f"{name} in {self.operation}")
        return arguments

    def get_object_metadata(self) -> dict[str, Any]:
        """Return the content type and the user metadata that are stored with an object."""
        return {name: self.arguments[name] for name in ("ContentType", "Metadata") if name in self.arguments}

    def encode_key(self, text: str) -> str:
        """Return a key as it appears in a listing, URL-encoded if the request has this option."""
        return quote(text, safe="/*-._") if "EncodingType" in self.arguments else text

    def check_permission(self, operation: str, resource: str) -> None:
        """Raise Refusal if the call's policies do not allow an operation on a resource."""
        if self.policies is None:
            return
        action = iam.ACTIONS[operation]
        context = {f"s3:{name}": value for name, value in self.query.items()}
        decision = iam.decide(self.policies, action, f"arn:aws:s3:::{resource}", context)
        if decision != "allowed":
            why = iam.DENIED[decision].format(action)
            text = f'is not authorized to perform: {action} on resource: "arn:aws:s3:::{resource}"'
            raise Refusal("AccessDenied", f"User: {self.caller} {text} {why}")

    def receive_body(self, file: IO[bytes]) -> tuple[int, str]:
        """Write the body into a file; return its size and its ETag.

        :raises Refusal: a checksum is wrong.
        :raises ConnectionError: the client disconnected, or a fault cuts the connection.
        """
        content_hash, source = self.headers.get("x-amz-content-sha256", ""), self.environ["wsgi.input"]
        length = int(self.headers.get("x-amz-decoded-content-length") or self.headers["content-length"])
        if content_hash.startswith("STREAMING-"):
            if self.environ.get("wsgi.input_terminated"):
                source = io.BufferedReader(source, CHUNK)
            chunks = decode_chunks(source, self.headers)
        else:
            chunks = read_exactly(source, length)
        md5, sha256, crc32, size = hashlib.md5(), hashlib.sha256(), 0, 0
        for data in chunks:
            file.write(data)
            md5.update(data)
            sha256.update(data)
            crc32, size = zlib.crc32(data, crc32), size + len(data)
            if self.is_cut and 2 * size >= length:
                break
        if self.is_cut or size != length:
            raise ConnectionResetError("the body does not have the announced length")
        checksums = [
            (content_hash if len(content_hash) == 2 * sha256.digest_size else "", sha256.hexdigest()),
            (self.headers.get("content-md5"), base64.b64encode(md5.digest()).decode()),
            (self.headers.get("x-amz-checksum-crc32"), base64.b64encode(crc32.to_bytes(4)).decode()),
        ]
        if any(expected and expected != actual for expected, actual in checksums):
            raise Refusal("BadDigest", "The checksum you specified did not match the calculated checksum.")
        return size, f'"{md5.hexdigest()}"'


def identify_caller(call: S3Call) -> None:
    """Set the call's caller, who signed the request, and the caller's policies. Raises ServiceException."""
    match = ec2_http.SCOPE.fullmatch(call.headers["authorization"])
    if match is None or match[3] != "s3":
        raise Refusal("AuthorizationHeaderMalformed", "The authorization header is malformed.")
    if abs(ec2_http.signature_age_s(call.environ)) > ec2_http.SIGNED_FOR_S:
        why = "The difference between the request time and the server's is too large."
        raise Refusal("RequestTimeTooSkewed", why, status="403")
    key = ec2_http.find_signer(call.environ, S3IAMRequest, url=f"http://local{call.environ['RAW_URI']}")
    call.caller, call.region = key.arn, match[2]
    if not key.arn.endswith(f":user/{USER}"):
        call.policies = []
        with suppress(ServiceException):  # the role may have been removed
            call.policies = key.collect_policies()


def check_condition(holds: bool) -> None:
    """Raise Refusal if one of the request's preconditions does not hold."""
    if not holds:
        why = "At least one of the pre-conditions you specified did not hold"
        raise Refusal("PreconditionFailed", why, status="412")


def no_such_key_error() -> Refusal:
    """Return the error for a key without an object."""
    return Refusal("NoSuchKey", "The specified key does not exist.", status="404")


def get_part_number(call: S3Call) -> int:
    """Return the number of the uploaded part. Raises Refusal if it is out of range."""
    number: int = call.arguments["PartNumber"]
    if not 1 <= number <= MAX_PARTS:
        why = f"Part number must be an integer between 1 and {MAX_PARTS}, inclusive"
        raise Refusal("InvalidArgument", why)
    return number


def parse_parts(call: S3Call) -> list[tuple[int, str]]:
    """Return each part's number and ETag, as listed in a request to complete an upload.

    :raises Refusal: no part is listed, a part has no number or no ETag, or the parts are not in order.
    """
    try:
        rows = call.arguments["MultipartUpload"]["Parts"]
        parts = [(row["PartNumber"], row["ETag"].strip('"')) for row in rows]
    except KeyError:
        parts = []
    if not parts:
        why = "The XML you provided was not well-formed or did not validate against our published schema"
        raise Refusal("MalformedXML", why)
    if any(number >= following for (number, _), (following, _) in itertools.pairwise(parts)):
        why = "The list of parts was not in ascending order. Parts must be ordered by part number."
        raise Refusal("InvalidPartOrder", why)
    return parts


def _unsupported(feature: str) -> Refusal:
    return Refusal("NotImplemented", f"The local cloud does not carry out {feature}.", status="501")


def read_exactly(source: Any, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file, in chunks. Raises ConnectionError if the file ends earlier."""
    while size:
        data = source.read(min(size, CHUNK))
        if not data:
            raise ConnectionResetError("the body ended too soon")
        size -= len(data)
        yield data


def decode_chunks(source: Any, headers: Headers) -> Iterator[bytes]:
    """Yield the content of an aws-chunked body, and add its trailers to `headers`.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming.html
    """
    try:
        while size := int(source.readline(CHUNK).partition(b";")[0], 16):
            yield from read_exactly(source, size)
            source.readline(CHUNK)
    except ValueError:
        raise ConnectionResetError("a chunk without a length") from None
    for line in iter(lambda: source.readline(CHUNK).strip(), b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name] = value.strip()


def parse_description(file: IO[bytes]) -> ObjectInfo:
    """Return the description at the end of an object's file, and seek to the start of the file."""
    file.seek(-8, io.SEEK_END)
    length = int.from_bytes(file.read(8))
    file.seek(-8 - length, io.SEEK_END)
    info = msgspec.json.decode(file.read(length), type=ObjectInfo)
    file.seek(0)
    return info


def read_description(path: Path) -> ObjectInfo:
    """Return the description in an object's file. Raises FileNotFoundError if the file does not exist."""
    with path.open("rb") as file:
        return parse_description(file)
