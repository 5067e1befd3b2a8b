"""S3: buckets as folders, objects as files. Bodies are streamed; nothing of it is in the pickled state.

A file of an object is its body, a description in JSON, and the length of that in 8 bytes: it appears whole
under its name, or not at all.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import msgspec
from botocore import xform_name
from moto.core.exceptions import ServiceException
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.access_control import S3IAMRequest
from werkzeug.http import http_date, parse_range_header
from werkzeug.wrappers import Response

from awsddp.local import faults, requests, rights
from awsddp.local.emulator import USER, Emulator
from awsddp.local.faults import Faults
from awsddp.local.machine import write_json
from awsddp.local.requests import Refusal
from awsddp.local.s3 import ERRORS, NAME, XMLNS, Bucket, Call, Stored, description, exactly, read, refused

PAGE = 1000
PART_AT_LEAST = 5 << 20
PUBLIC = ("HeadBucket", "ListObjectsV2", "GetObject", "HeadObject")
BODIES = ("GetObject", "PutObject", "UploadPart")


class Buckets:
    """The WSGI application. Its lock is held while names change, never while a body is on its way."""

    def __init__(self, folder: Path, unfinished: Path, emulator: Emulator, faults: Faults) -> None:
        self._folder = folder
        self._emulator = emulator
        self._faults = faults
        self._lock = threading.Lock()
        self._unfinished = unfinished
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        call = Call(environ)
        try:
            reply = self._answer(call)
        except ConnectionError:
            _hang_up(environ)
            raise
        except ServiceException as error:
            reply = _refusal(call, error)
        except Exception:
            traceback.print_exc()
            reply = _refusal(call, refused("InternalError"))
        reply.headers["x-amz-request-id"] = uuid.uuid4().hex[:16].upper()
        if call.found is not None:
            reply.headers["x-amz-bucket-region"] = call.found.region
        return reply(environ, start_response)

    def _answer(self, call: Call) -> Response:
        with self._emulator.lock:
            if call.header("authorization"):
                _identify(call)
            fault = self._faults.strike(call.operation, (call.bucket, call.key, call.region))
        effect = fault.effect if fault is not None else ""
        if effect and effect not in faults.CALL_EFFECTS:
            assert fault is not None
            raise faults.refusal(fault, instance_type="such", zone="any zone")
        if fault is not None and effect == "delay":
            time.sleep(fault.seconds)
        call.check()
        self._authorise(call)
        call.cut = effect == "cut"
        if call.cut and call.operation not in BODIES:
            raise ConnectionResetError("a fault: the connection is cut")
        reply: Response = getattr(self, f"_{xform_name(call.operation)}")(call)
        if fault is not None and effect == "late":
            time.sleep(fault.seconds)
        if effect == "lost":
            raise ConnectionResetError("a fault: the reply is lost")
        return reply

    def _authorise(self, call: Call) -> None:
        """Find the bucket, and see whether the caller may do this to it. Raises Refusal where not."""
        named = "/".join(filter(None, (call.bucket, call.key))) or "*"
        if call.operation not in ("ListBuckets", "CreateBucket"):
            found = call.found = self._bucket(call.bucket)
            if call.region not in ("", found.region):
                raise refused("PermanentRedirect")
            if call.header("x-amz-expected-bucket-owner", found.owner) != found.owner:
                raise refused("AccessDenied")
            public, ours = found.public and call.operation in PUBLIC, found.owner == DEFAULT_ACCOUNT_ID
            payer = bool(call.caller) and call.header("x-amz-request-payer") == "requester"
            open_ = public and (payer or not found.requester_pays)
            if not (ours and call.caller) and not open_:
                raise refused("AccessDenied")
            if public and (ours or not call.caller):
                return
        elif not call.caller:
            raise refused("AccessDenied")
        if call.operation != "DeleteObjects":  # which asks for each
            call.may(rights.ACTIONS[call.operation], named)

    def _bucket(self, name: str) -> Bucket:
        with suppress(FileNotFoundError):
            if NAME.fullmatch(name):
                return msgspec.json.decode((self._folder / name / "bucket.json").read_bytes(), type=Bucket)
        raise refused("NoSuchBucket")

    def _change(self, call: Call, **fields: Any) -> Response:
        with self._lock:
            changed = msgspec.structs.replace(self._bucket(call.bucket), **fields)
            write_json(self._folder / call.bucket / "bucket.json", msgspec.to_builtins(changed))
        return Response()

    def _list_buckets(self, call: Call) -> Response:
        with self._lock:
            names = sorted(path.name for path in self._folder.glob("*") if NAME.fullmatch(path.name))
            found = {name: self._bucket(name) for name in names}
        ours = [(name, one) for name, one in found.items() if one.owner == DEFAULT_ACCOUNT_ID]
        listed = [
            {"Name": name, "CreationDate": _time(one.created), "BucketRegion": one.region}
            for name, one in ours
        ]
        owner = {"ID": DEFAULT_ACCOUNT_ID}
        return _xml("ListAllMyBucketsResult", {"Owner": owner, "Buckets": {"Bucket": listed}})

    def _create_bucket(self, call: Call) -> Response:
        if not NAME.fullmatch(call.bucket):
            raise refused("InvalidBucketName")
        region = call.region
        if call.header("content-length", "0") != "0":
            region = call.document().findtext("{*}LocationConstraint") or region
        at = self._folder / call.bucket
        with self._lock:
            if at.exists():
                ours = self._bucket(call.bucket).owner == DEFAULT_ACCOUNT_ID
                raise refused("BucketAlreadyOwnedByYou" if ours else "BucketAlreadyExists")
            self._folder.mkdir(mode=0o700, exist_ok=True)
            at.mkdir()
            for name in ("objects", "uploads"):
                (at / name).mkdir()
            made = Bucket(region, DEFAULT_ACCOUNT_ID, time.time(), public=call.public)
            write_json(at / "bucket.json", msgspec.to_builtins(made))
        return Response(headers={"Location": f"/{call.bucket}"})

    def _delete_bucket(self, call: Call) -> Response:
        with self._lock:
            if any((self._folder / call.bucket / "objects").iterdir()):
                raise refused("BucketNotEmpty")
            shutil.rmtree(self._folder / call.bucket)
        return Response(status=204)

    def _head_bucket(self, call: Call) -> Response:
        return Response()

    def _get_bucket_location(self, call: Call) -> Response:
        region = self._bucket(call.bucket).region
        return _xml("LocationConstraint", "" if region == "us-east-1" else region)

    def _get_bucket_lifecycle_configuration(self, call: Call) -> Response:
        text = self._bucket(call.bucket).lifecycle
        if not text:
            raise refused("NoSuchLifecycleConfiguration")
        return Response(text, content_type="application/xml")

    def _put_bucket_lifecycle_configuration(self, call: Call) -> Response:
        return self._change(call, lifecycle=ElementTree.tostring(call.document(), encoding="unicode"))

    def _get_bucket_request_payment(self, call: Call) -> Response:
        pays = self._bucket(call.bucket).requester_pays
        return _xml("RequestPaymentConfiguration", {"Payer": "Requester" if pays else "BucketOwner"})

    def _put_bucket_request_payment(self, call: Call) -> Response:
        return self._change(call, requester_pays=call.document().findtext("{*}Payer") == "Requester")

    def _put_bucket_acl(self, call: Call) -> Response:
        return self._change(call, public=call.public)

    def _list_objects_v2(self, call: Call) -> Response:
        asked, coded = call.query, call.query.get("encoding-type") == "url"
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        room = min(int(asked.get("max-keys") or PAGE), PAGE)
        token = base64.urlsafe_b64decode(asked.get("continuation-token", ""))
        start = b"" if token else asked.get("start-after", "").encode()
        entries: dict[bytes, Stored | None] = {}  # None: of a common prefix
        with self._lock:
            paths = list((self._folder / call.bucket / "objects").iterdir())
            every = sorted((read(path) for path in paths), key=lambda one: one.key.encode())
        for one in every:
            if one.key.startswith(prefix) and one.key.encode() > start:
                head, found, _ = one.key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                name = f"{prefix}{head}{delimiter}".encode() if found else one.key.encode()
                if name > token:
                    entries[name] = None if found else one
        page, more = list(entries.items())[:room], len(entries) > room

        def shown(text: str) -> str:
            return quote(text, safe="/*-._") if coded else text

        content: dict[str, Any] = {
            "Name": call.bucket,
            "Prefix": shown(prefix),
            "MaxKeys": str(room),
            **({"Delimiter": shown(delimiter)} if delimiter else {}),
            **({"EncodingType": "url"} if coded else {}),
            "KeyCount": str(len(page)),
            "IsTruncated": str(more).lower(),
            "Contents": [
                {**_entry(one), "Key": shown(one.key), "StorageClass": "STANDARD"} for _, one in page if one
            ],
            "CommonPrefixes": [{"Prefix": shown(name.decode())} for name, one in page if one is None],
        }
        if more and page:
            content["NextContinuationToken"] = base64.urlsafe_b64encode(page[-1][0]).decode()
        return _xml("ListBucketResult", content)

    def _object(self, call: Call, key: str | None = None) -> Path:
        """The file of an object, which may not be there."""
        name = hashlib.sha256((call.key if key is None else key).encode()).hexdigest()
        return self._folder / call.bucket / "objects" / name

    def _put_object(self, call: Call) -> Response:
        return self._receive(call, self._object(call))

    def _get_object(self, call: Call) -> Response:
        try:
            file = self._object(call).open("rb")
        except FileNotFoundError:
            if call.found is not None and not call.found.public:
                call.may(rights.ACTIONS["ListObjectsV2"], call.bucket)
            raise refused("NoSuchKey") from None
        one = description(file)
        call.check_condition(one)
        headers = {**one.headers, "ETag": f'"{one.etag}"', "Last-Modified": http_date(one.modified)}
        first, last, status = 0, one.size, 200
        if wanted := parse_range_header(call.header("range")):
            if (part := wanted.range_for_length(one.size)) is None:
                raise refused("InvalidRange")
            (first, last), status = part, 206
            headers["Content-Range"] = f"bytes {first}-{last - 1}/{one.size}"
        headers |= {"Accept-Ranges": "bytes", "Content-Length": str(last - first)}
        file.seek(first)
        body = exactly(file, last - first)
        if call.cut:
            body = chain(exactly(file, (last - first) // 2), _cut(call.environ))
        reply = Response(body, status, headers)
        reply.call_on_close(file.close)
        return reply

    _head_object = _get_object

    def _delete_object(self, call: Call) -> Response:
        with self._lock:
            self._object(call).unlink(missing_ok=True)
        return Response(status=204)

    def _delete_objects(self, call: Call) -> Response:
        tree, content = call.document(), {"Deleted": list[Any](), "Error": list[Any]()}
        for key in [one.text or "" for one in tree.findall("{*}Object/{*}Key")]:
            try:
                call.may(rights.ACTIONS["DeleteObject"], f"{call.bucket}/{key}")
            except Refusal as error:
                content["Error"].append({"Key": key, "Code": error.code, "Message": error.message})
                continue
            with self._lock:
                self._object(call, key).unlink(missing_ok=True)
            content["Deleted"].append({"Key": key})
        if tree.findtext("{*}Quiet") == "true":
            content["Deleted"] = []
        return _xml("DeleteResult", content)

    def _upload(self, call: Call) -> Path:
        """The folder of an upload. Raises Refusal where there is none of its key."""
        name = call.query["uploadId"]
        at: Path = self._folder / call.bucket / "uploads" / name
        with suppress(FileNotFoundError):
            if name.isalnum() and read(at / "upload").key == call.key:
                return at
        raise refused("NoSuchUpload")

    def _create_multipart_upload(self, call: Call) -> Response:
        at = self._folder / call.bucket / "uploads" / uuid.uuid4().hex
        at.mkdir()
        with self._temporary() as file:
            self._keep(call, file, Stored(call.key, headers=call.kept()), at / "upload")
        names = {"Bucket": call.bucket, "Key": call.key, "UploadId": at.name}
        return _xml("InitiateMultipartUploadResult", names)

    def _list_multipart_uploads(self, call: Call) -> Response:
        prefix = call.query.get("prefix", "")
        with self._lock:
            paths = list((self._folder / call.bucket / "uploads").glob("*/upload"))
            every = [(read(path), path.parent.name) for path in paths]
        found = sorted((one.key.encode(), name, one) for one, name in every if one.key.startswith(prefix))
        coded = call.query.get("encoding-type") == "url"
        listed = [
            {
                "Key": quote(one.key, safe="/*-._") if coded else one.key,
                "UploadId": name,
                "Initiated": _time(one.modified),
            }
            for _, name, one in found
        ]
        content = {"Bucket": call.bucket, "IsTruncated": "false", "Upload": listed}
        return _xml("ListMultipartUploadsResult", content | ({"EncodingType": "url"} if coded else {}))

    def _upload_part(self, call: Call) -> Response:
        return self._receive(call, self._upload(call) / str(int(call.query["partNumber"])))

    def _complete_multipart_upload(self, call: Call) -> Response:
        at, md5, size = self._upload(call), hashlib.md5(), 0
        named = [
            ((one.findtext("{*}PartNumber") or ""), (one.findtext("{*}ETag") or "").strip('"'))
            for one in call.document().findall("{*}Part")
        ]
        with self._temporary() as file:
            for number, etag in named:
                with suppress(FileNotFoundError), (at / str(int(number))).open("rb") as part:
                    if (one := description(part)).etag == etag:
                        if number != named[-1][0] and one.size < PART_AT_LEAST:
                            raise refused("EntityTooSmall")
                        sent = 0
                        while sent < one.size:
                            sent += os.sendfile(file.fileno(), part.fileno(), sent, one.size - sent)
                        md5.update(bytes.fromhex(etag))
                        size += sent
                        continue
                raise refused("InvalidPart")
            file.seek(0, io.SEEK_END)
            whole = Stored(
                call.key, size, f"{md5.hexdigest()}-{len(named)}", headers=read(at / "upload").headers
            )
            self._keep(call, file, whole, self._object(call))
        shutil.rmtree(at, ignore_errors=True)
        names = {"Bucket": call.bucket, "Key": call.key, "ETag": f'"{whole.etag}"'}
        return _xml("CompleteMultipartUploadResult", names)

    def _abort_multipart_upload(self, call: Call) -> Response:
        shutil.rmtree(self._upload(call), ignore_errors=True)
        return Response(status=204)

    def _receive(self, call: Call, at: Path) -> Response:
        with self._temporary() as file:
            size, md5 = call.receive(file)
            self._keep(call, file, Stored(call.key, size, md5, headers=call.kept()), at)
        return Response(headers={"ETag": f'"{md5}"'})

    @contextmanager
    def _temporary(self) -> Iterator[IO[bytes]]:
        path = self._unfinished / uuid.uuid4().hex
        try:
            with path.open("xb") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def _keep(self, call: Call, file: IO[bytes], stored: Stored, at: Path) -> None:
        """Give a file its description and its name.

        :raises Refusal: the bucket or the upload is gone, or a condition of the caller's does not hold.
        """
        text = msgspec.json.encode(stored)
        file.write(text + len(text).to_bytes(8))
        file.flush()
        with self._lock:
            call.check_condition(read(at) if at.exists() else None)
            try:
                Path(file.name).rename(at)
            except FileNotFoundError:
                raise refused("NoSuchUpload" if "uploadId" in call.query else "NoSuchBucket") from None


def _identify(call: Call) -> None:
    """Find who signed a request, and which policies hold for them. Raises ServiceException for nobody."""
    match = requests.SCOPE.fullmatch(call.header("authorization"))
    if match is None or match[3] != "s3":
        raise refused("AuthorizationHeaderMalformed")
    if abs(requests.seconds_late(call.environ)) > requests.SIGNED_FOR_S:
        raise refused("RequestTimeTooSkewed")
    key = requests.find_signer(call.environ, S3IAMRequest, url=f"http://local{call.environ['RAW_URI']}")
    call.caller, call.region = key.arn, match[2]
    if not key.arn.endswith(f":user/{USER}"):
        call.policies = []
        with suppress(ServiceException):  # the role is gone
            call.policies = [text for text in key.collect_policies() if isinstance(text, str)]


def _hang_up(environ: dict[str, Any]) -> None:
    with suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def _cut(environ: dict[str, Any]) -> Iterator[bytes]:
    """A body that ends here, though more was promised."""
    _hang_up(environ)
    yield b""
    raise ConnectionResetError("a fault: the connection is cut")


def _entry(one: Stored) -> dict[str, str]:
    return {"LastModified": _time(one.modified), "ETag": f'"{one.etag}"', "Size": str(one.size)}


def _time(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%dT%H:%M:%S.000Z}"


def _refusal(call: Call, error: ServiceException) -> Response:
    status = ERRORS.get(error.code, (400, ""))[0]
    resource = str(call.environ["PATH_INFO"]).encode("latin-1").decode("utf-8", "replace")
    content = {"Code": error.code, "Message": error.message, "Resource": resource}
    return _xml("Error", content, status=status)


def _xml(root: str, content: Any, *, status: int = 200) -> Response:
    text = _element(root, content)
    if root != "Error":
        text = text.replace(">", f' xmlns="{XMLNS}">', 1)
    return Response(f'<?xml version="1.0" encoding="UTF-8"?>\n{text}', status, content_type="application/xml")


def _element(name: str, content: Any) -> str:
    if isinstance(content, list):
        return "".join(_element(name, one) for one in content)
    if isinstance(content, dict):
        inner = "".join(_element(child, one) for child, one in content.items())
    else:
        inner = escape(content, {"\r": "&#13;"})
    return f"<{name}>{inner}</{name}>"
