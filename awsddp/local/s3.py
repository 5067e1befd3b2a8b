"""A request to S3: which operation it is, what it may do, and its body as it comes in."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qsl
from xml.etree import ElementTree

import msgspec

from awsddp.local import rights
from awsddp.local.requests import Refusal

CHUNK = 1 << 20
TEXT_LIMIT = 4 << 20
EMPTY_SHA256 = hashlib.sha256().hexdigest()
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"
ERRORS = {
    "AccessDenied": (403, "Access Denied"),
    "AuthorizationHeaderMalformed": (400, "The authorization header is malformed."),
    "BadDigest": (400, "The checksum you specified did not match the calculated checksum."),
    "BucketAlreadyExists": (409, "The requested bucket name is not available."),
    "BucketAlreadyOwnedByYou": (409, "Your previous request to create the named bucket succeeded."),
    "BucketNotEmpty": (409, "The bucket you tried to delete is not empty"),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed size"),
    "EntityTooSmall": (400, "Your proposed upload is smaller than the minimum allowed size"),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "InvalidAccessKeyId": (403, ""),
    "InvalidArgument": (400, "Invalid Argument"),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
    "InvalidPart": (400, "One or more of the specified parts could not be found."),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    "KeyTooLongError": (400, "Your key is too long"),
    "MalformedXML": (400, "The XML you provided was not well-formed."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchLifecycleConfiguration": (404, "The lifecycle configuration does not exist"),
    "NoSuchUpload": (404, "The specified multipart upload does not exist."),
    "NotImplemented": (501, ""),
    "PermanentRedirect": (301, "The bucket you are attempting to access is in another region."),
    "PreconditionFailed": (412, "At least one of the pre-conditions you specified did not hold"),
    "RequestTimeTooSkewed": (403, "The difference between the request time and the server's is too large."),
    "ServiceUnavailable": (503, ""),
    "SignatureDoesNotMatch": (403, ""),
    "SlowDown": (503, ""),
    "XAmzContentSHA256Mismatch": (400, "The provided 'x-amz-content-sha256' does not match the body."),
}
FORMS = {
    "GET service": "ListBuckets",
    "PUT bucket": "CreateBucket",
    "DELETE bucket": "DeleteBucket",
    "HEAD bucket": "HeadBucket",
    "GET bucket location": "GetBucketLocation",
    "GET bucket list-type": "ListObjectsV2",
    "GET bucket uploads": "ListMultipartUploads",
    "GET bucket lifecycle": "GetBucketLifecycleConfiguration",
    "PUT bucket lifecycle": "PutBucketLifecycleConfiguration",
    "GET bucket requestPayment": "GetBucketRequestPayment",
    "PUT bucket requestPayment": "PutBucketRequestPayment",
    "PUT bucket acl": "PutBucketAcl",
    "POST bucket delete": "DeleteObjects",
    "GET key": "GetObject",
    "HEAD key": "HeadObject",
    "PUT key": "PutObject",
    "DELETE key": "DeleteObject",
    "POST key uploads": "CreateMultipartUpload",
    "PUT key partNumber uploadId": "UploadPart",
    "POST key uploadId": "CompleteMultipartUpload",
    "DELETE key uploadId": "AbortMultipartUpload",
}
"""What a request is: its method, what it names, and the parameters that make it another operation."""
PLAIN = {
    *("prefix", "delimiter", "max-keys", "continuation-token", "start-after", "encoding-type", "x-id"),
    *("fetch-owner", "max-buckets", "max-uploads"),
}
HEADERS = re.compile(
    "HTTP_X_AMZ_(DATE|CONTENT_SHA256|SECURITY_TOKEN|DECODED_CONTENT_LENGTH|TRAILER|CHECKSUM_.*|USER_AGENT"
    "|SDK_CHECKSUM_ALGORITHM|META_.*|ACL|REQUEST_PAYER|EXPECTED_BUCKET_OWNER)"
)


class Bucket(msgspec.Struct, frozen=True):
    """What `bucket.json` says; everybody may read a `public` one."""

    region: str
    owner: str
    created: float = 0.0
    public: bool = False
    requester_pays: bool = False
    lifecycle: str = ""


class Stored(msgspec.Struct, frozen=True):
    """The description of an object, of a part, or of an upload."""

    key: str
    size: int = 0
    etag: str = ""
    modified: float = msgspec.field(default_factory=time.time)
    headers: dict[str, str] = {}


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
        level = "key" if self.key else "bucket" if self.bucket else "service"
        form = [self.environ["REQUEST_METHOD"], level, *sorted(self.query.keys() - PLAIN)]
        self.operation = FORMS.get(" ".join(form), "")
        if self.header("x-amz-copy-source"):
            self.operation = ""
        self._what = " ".join(form)

    def header(self, name: str, otherwise: str = "") -> str:
        """A header's value; "" where it was not sent."""
        known = name.upper().replace("-", "_")
        return str(self.environ.get(known if known.startswith("CONTENT_") else f"HTTP_{known}", otherwise))

    def check(self) -> None:
        """Raise Refusal where something would have no effect."""
        lacking = [] if self.operation else [self._what]
        lacking += [
            name[5:].lower().replace("_", "-")
            for name in self.environ
            if name.startswith("HTTP_X_AMZ_") and not HEADERS.fullmatch(name)
        ]
        lacking += [name for name in ("If-Modified-Since", "If-Unmodified-Since") if self.header(name)]
        if self.header("if-none-match") not in ("", "*") or self.header("x-amz-content-sha256").endswith(
            "P256"
        ):
            lacking.append("this If-None-Match or signature")
        acls = ("private", "public-read") if self.operation in ("CreateBucket", "PutBucketAcl") else ()
        if self.header("x-amz-acl") not in ("", *acls):
            lacking.append("this ACL")
        if lacking:
            raise Refusal("NotImplemented", f"The local cloud does not carry out {', '.join(lacking)}.")
        if not all(self.query.get(name, "0").isdigit() for name in ("max-keys", "partNumber")):
            raise refused("InvalidArgument")
        if len(self.key.encode()) > 1024:
            raise refused("KeyTooLongError")

    @property
    def public(self) -> bool:
        """Whether the ACL that it names opens a bucket to everybody."""
        return self.header("x-amz-acl") == "public-read"

    def kept(self) -> dict[str, str]:
        """The headers that come back with an object: its type, and what its owner noted."""
        notes = {name for name in self.environ if name.startswith("HTTP_X_AMZ_META_")}
        return {
            "Content-Type": self.header("content-type") or "binary/octet-stream",
            **{name[5:].lower().replace("_", "-"): self.environ[name] for name in notes},
        }

    def may(self, action: str, resource: str) -> None:
        """Raise Refusal where the policies of the caller do not allow it."""
        if self.policies is None:
            return
        context = {"s3:prefix": self.query.get("prefix", "")}
        decision = rights.decide(self.policies, action, f"arn:aws:s3:::{resource}", context)
        if decision != "allowed":
            why = rights.DENIED[decision].format(action)
            text = f'is not authorized to perform: {action} on resource: "arn:aws:s3:::{resource}"'
            raise Refusal("AccessDenied", f"User: {self.caller} {text} {why}")

    def check_condition(self, now: Stored | None) -> None:
        """Raise Refusal where what is under the key is not what the caller expects there."""
        wanted = self.header("if-match").strip('"')
        if wanted and now is None:
            raise refused("NoSuchKey")
        if now and (self.header("if-none-match") or wanted not in ("", "*", now.etag)):
            raise refused("PreconditionFailed")

    def receive(self, file: IO[bytes]) -> tuple[int, str]:
        """Write the body into a file; its size and its MD5.

        :raises Refusal: a checksum is wrong, or there is no length.
        :raises ConnectionError: the client has gone, or a fault cuts the connection.
        """
        sent, source = self.header("x-amz-content-sha256"), self.environ["wsgi.input"]
        trailer: dict[str, str] = {}
        length = self.header("x-amz-decoded-content-length") or self.header("content-length")
        if not length.isdigit():
            raise refused("MissingContentLength")
        if sent.startswith("STREAMING-"):
            if self.environ.get("wsgi.input_terminated"):
                source = io.BufferedReader(source, CHUNK)
            chunks = unchunked(source, trailer)
        else:
            chunks = exactly(source, int(length))
        md5, sha256, crc32, size = hashlib.md5(), hashlib.sha256(), 0, 0
        hashed = len(sent) == len(EMPTY_SHA256)
        for data in chunks:
            file.write(data)
            md5.update(data)
            if hashed:
                sha256.update(data)
            crc32, size = zlib.crc32(data, crc32), size + len(data)
            if self.cut and 2 * size >= int(length):
                raise ConnectionResetError("a fault: the connection is cut")
        if size != int(length):
            raise ConnectionResetError("the body is not as long as it was said to be")
        if hashed and sha256.hexdigest() != sent:
            raise refused("XAmzContentSHA256Mismatch")
        sums = {
            self.header("content-md5"): md5.digest(),
            self.header("x-amz-checksum-crc32"): crc32.to_bytes(4),
            trailer.get("x-amz-checksum-crc32", ""): crc32.to_bytes(4),
        }
        if any(one and one != base64.b64encode(real).decode() for one, real in sums.items()):
            raise refused("BadDigest")
        return size, md5.hexdigest()

    def document(self) -> ElementTree.Element:
        """The body as XML. Raises Refusal where it is none."""
        if int(self.header("content-length") or 0) > TEXT_LIMIT:
            raise refused("EntityTooLarge")
        self.receive(text := io.BytesIO())
        try:
            return ElementTree.fromstring(text.getvalue())
        except ElementTree.ParseError:
            raise refused("MalformedXML") from None


def refused(code: str) -> Refusal:
    """The refusal with a code of S3, in its words."""
    return Refusal(code, ERRORS[code][1])


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
