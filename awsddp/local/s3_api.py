"""S3: buckets as folders, objects as files. Bodies are streamed; nothing of it is in the pickled state.

A file of an object is its body, a description in JSON, and the length of that in 8 bytes: it appears whole
under its name, or not at all.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
from botocore import xform_name
from moto.core.exceptions import ServiceException
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.core.serialize import S3Serializer
from moto.core.utils import get_service_model
from werkzeug.exceptions import NotFound
from werkzeug.http import parse_range_header
from werkzeug.wrappers import Response

from awsddp.local import faults
from awsddp.local.ec2_http import Refusal, internal_error
from awsddp.local.emulator import Emulator
from awsddp.local.faults import Faults
from awsddp.local.listing import Listing
from awsddp.local.machine import write_json
from awsddp.local.s3_files import (
    BODIES,
    NAME,
    Bucket,
    Call,
    Stored,
    check_condition,
    description,
    exactly,
    identify,
    named_parts,
    no_such_key,
    part_number,
    read,
)

PAGE = 1000
PART_AT_LEAST = 5 << 20
LAST = chr(sys.maxunicode)
PUBLIC = ("HeadBucket", "ListObjectsV2", "GetObject", "HeadObject")


class Buckets:
    """The WSGI application. Its lock is held while names change, never while a body is on its way."""

    def __init__(self, folder: Path, unfinished: Path, emulator: Emulator, faults: Faults) -> None:
        self._folder = folder
        self._emulator = emulator
        self._faults = faults
        self._lock = threading.Lock()
        self._by_key: dict[str, Listing] = {}
        self._begun: dict[str, Listing] = {}
        self._unfinished = unfinished
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if folder.exists():
            folder.chmod(0o700)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        try:
            call = Call(environ)
            reply = self._answer(call)
        except NotFound as error:
            return error(environ, start_response)
        except ConnectionError:
            hang_up(environ)
            raise
        except ServiceException as error:
            reply = _reply("HeadBucket", error)
        except Exception:
            traceback.print_exc()
            reply = _reply("HeadBucket", internal_error("We encountered an internal error."))
        reply.headers["x-amz-request-id"] = uuid.uuid4().hex[:16].upper()
        if call.found is not None:
            reply.headers["x-amz-bucket-region"] = call.found.region
        return reply(environ, start_response)

    def _answer(self, call: Call) -> Response:
        with self._emulator.lock:
            if "authorization" in call.headers:
                identify(call)
            fault = self._faults.strike(call.operation, (call.bucket, call.key, call.region))
        effect, seconds = (fault.effect, fault.seconds) if fault else ("", 0.0)
        if fault and effect not in faults.CALL_EFFECTS:
            raise faults.refusal(fault)
        if effect == "delay":
            time.sleep(seconds)
        self._authorise(call)
        call.cut = effect == "cut"
        if call.cut and call.operation not in BODIES:
            raise ConnectionResetError("a fault: the connection is cut")
        result = getattr(self, f"_{xform_name(call.operation)}")(call) or {}
        reply = _reply(call.operation, result, result.pop("Body", None))
        if "ContentRange" in result:
            reply.status_code = 206
        if effect == "late":
            time.sleep(seconds)
        if effect == "lost":
            raise ConnectionResetError("a fault: the reply is lost")
        return reply

    def _authorise(self, call: Call) -> None:
        """Find the bucket, and see whether the caller may do this to it. Raises Refusal where not."""
        ours, public = True, False
        if call.operation not in ("ListBuckets", "CreateBucket"):
            found = call.found = self._bucket(call.bucket)
            if call.region not in ("", found.region):
                why = "The bucket you are attempting to access is in another region."
                raise Refusal("PermanentRedirect", why, status="301")
            ours = found.owner == DEFAULT_ACCOUNT_ID
            pays = bool(call.caller) and "RequestPayer" in call.asked
            public = found.public and call.operation in PUBLIC and (pays or not found.requester_pays)
        if public and (ours or not call.caller):
            return
        if not call.caller or not (ours or public):
            raise Refusal("AccessDenied", "Access Denied")
        call.may(call.operation, "/".join(filter(None, (call.bucket, call.key))) or "*")

    def _bucket(self, name: str) -> Bucket:
        with suppress(FileNotFoundError):
            if NAME.fullmatch(name):
                return msgspec.json.decode((self._folder / name / "bucket.json").read_bytes(), type=Bucket)
        raise Refusal("NoSuchBucket", "The specified bucket does not exist")

    def _change(self, call: Call, **fields: Any) -> None:
        with self._lock:
            changed = msgspec.structs.replace(self._bucket(call.bucket), **fields)
            write_json(self._folder / call.bucket / "bucket.json", msgspec.to_builtins(changed))

    def _list_buckets(self, call: Call) -> dict[str, Any]:
        with self._lock:
            names = sorted(path.parent.name for path in self._folder.glob("*/bucket.json"))
            found = [(name, one) for name in names if (one := self._bucket(name)).owner == DEFAULT_ACCOUNT_ID]
        listed = [
            {"Name": name, "CreationDate": one.created, "BucketRegion": one.region} for name, one in found
        ]
        return {"Owner": {"ID": DEFAULT_ACCOUNT_ID}, "Buckets": listed}

    def _create_bucket(self, call: Call) -> dict[str, Any]:
        if not NAME.fullmatch(call.bucket):
            raise Refusal("InvalidBucketName", "The specified bucket is not valid.")
        region = call.asked.get("CreateBucketConfiguration", {}).get("LocationConstraint", call.region)
        at = self._folder / call.bucket
        with self._lock:
            if at.exists():
                if self._bucket(call.bucket).owner == DEFAULT_ACCOUNT_ID:
                    raise Refusal("BucketAlreadyOwnedByYou", "The bucket that you tried to create is yours.")
                raise Refusal("BucketAlreadyExists", "The requested bucket name is not available.")
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for one in (at, at / "objects", at / "uploads"):
                one.mkdir(mode=0o700)
            made = Bucket(region, DEFAULT_ACCOUNT_ID, time.time())
            write_json(at / "bucket.json", msgspec.to_builtins(made))
        return {"Location": f"/{call.bucket}"}

    def _delete_bucket(self, call: Call) -> None:
        with self._lock:
            if any((self._folder / call.bucket / "objects").iterdir()):
                raise Refusal("BucketNotEmpty", "The bucket you tried to delete is not empty")
            self._by_key.pop(call.bucket, None)
            self._begun.pop(call.bucket, None)
            shutil.rmtree(self._folder / call.bucket)

    def _head_bucket(self, call: Call) -> None:
        pass

    def _get_bucket_lifecycle_configuration(self, call: Call) -> dict[str, Any]:
        if found := self._bucket(call.bucket).lifecycle:
            return found
        raise Refusal("NoSuchLifecycleConfiguration", "The lifecycle configuration does not exist")

    def _put_bucket_lifecycle_configuration(self, call: Call) -> None:
        self._change(call, lifecycle=call.asked["LifecycleConfiguration"])

    def _put_bucket_acl(self, call: Call) -> None:
        self._change(call, public=call.asked["ACL"] == "public-read")

    def _list_objects_v2(self, call: Call) -> dict[str, Any]:
        asked = call.asked
        try:
            after = base64.urlsafe_b64decode(asked.get("ContinuationToken", "")).decode()
        except ValueError:
            raise Refusal("InvalidArgument", "The continuation token provided is incorrect") from None
        with self._lock:
            page, more = self._objects(call.bucket).page(
                asked.get("Prefix", ""),
                after=after,
                room=min(asked.get("MaxKeys", PAGE), PAGE),
                delimiter=asked.get("Delimiter", ""),
            )
        contents = [
            {"Key": call.shown(name), "Size": one.size, "ETag": one.tag, "LastModified": one.modified}
            for name, one in page.items()
            if one
        ]
        token = base64.urlsafe_b64encode(list(page)[-1].encode()).decode() if more else None
        return {
            "EncodingType": asked.get("EncodingType"),
            "KeyCount": len(page),
            "IsTruncated": more,
            "NextContinuationToken": token,
            "Contents": contents,
            "CommonPrefixes": [{"Prefix": call.shown(name)} for name, one in page.items() if one is None],
        }

    def _objects(self, bucket: str) -> Listing:
        """The objects of a bucket by their keys. Whoever calls holds the lock."""
        if bucket not in self._by_key:
            every = map(read, (self._folder / bucket / "objects").iterdir())
            self._by_key[bucket] = Listing({one.key: one for one in every})
        return self._by_key[bucket]

    def _uploads(self, bucket: str) -> Listing:
        """The uploads of a bucket that are not complete, by key and id. Whoever calls holds the lock."""
        if bucket not in self._begun:
            every = (self._folder / bucket).glob("uploads/*/upload")
            self._begun[bucket] = Listing(
                {_named(one.key, path.parent): one for path in every if (one := read(path))}
            )
        return self._begun[bucket]

    def _object(self, call: Call) -> Path:
        """The file of an object, which may not be there."""
        name = hashlib.sha256(call.key.encode()).hexdigest()
        return self._folder / call.bucket / "objects" / name

    def _put_object(self, call: Call) -> dict[str, Any]:
        return self._receive(call, self._object(call))

    def _get_object(self, call: Call) -> dict[str, Any]:
        try:
            file = self._object(call).open("rb")
        except FileNotFoundError:
            if call.found is not None and not call.found.public:
                call.may("ListObjectsV2", call.bucket)
            raise no_such_key() from None
        one = description(file)
        check_condition(call.asked.get("IfMatch", one.tag).strip('"') == one.tag.strip('"'))
        found = {**one.kept, "ETag": one.tag, "LastModified": one.modified}
        first, last = 0, one.size
        if wanted := parse_range_header(call.asked.get("Range")):
            if (part := wanted.range_for_length(one.size)) is None:
                raise Refusal("InvalidRange", "The requested range is not satisfiable")
            first, last = part
            found["ContentRange"] = f"bytes {first}-{last - 1}/{one.size}"
        file.seek(first)
        size = last - first
        body = exactly(file, size // 2 if call.cut else size)
        return {**found, "ContentLength": size, "Body": body}

    _head_object = _get_object

    def _delete_object(self, call: Call) -> None:
        with self._lock:
            self._objects(call.bucket).drop(call.key)
            self._object(call).unlink(missing_ok=True)

    def _upload(self, call: Call) -> Path:
        """The folder of an upload. Raises Refusal where there is none of its key."""
        name = call.asked["UploadId"]
        at: Path = self._folder / call.bucket / "uploads" / name
        with suppress(FileNotFoundError):
            if name.isalnum() and read(at / "upload").key == call.key:
                return at
        raise Refusal("NoSuchUpload", "The specified multipart upload does not exist.")

    def _create_multipart_upload(self, call: Call) -> dict[str, Any]:
        name = f"{time.time_ns():016x}{uuid.uuid4().hex[:16]}"  # those of one key are listed in their order
        at = self._folder / call.bucket / "uploads" / name
        at.mkdir(mode=0o700)
        one = Stored(call.key, kept=call.kept())
        with self._temporary() as file:
            self._keep(call, file, one, at / "upload")
        return {"Bucket": call.bucket, "Key": call.key, "UploadId": at.name}

    def _list_multipart_uploads(self, call: Call) -> dict[str, Any]:
        asked, key = call.asked, call.asked.get("KeyMarker", "")
        after = f"{key}\0{asked.get('UploadIdMarker', LAST)}" if key else ""
        room = min(asked.get("MaxUploads", PAGE), PAGE)
        with self._lock:
            page, more = self._uploads(call.bucket).page(asked.get("Prefix", ""), after=after, room=room)
        listed = [
            {"Key": call.shown(one.key), "UploadId": name.rpartition("\0")[2], "Initiated": one.modified}
            for name, one in page.items()
            if one
        ]
        last = listed[-1] if more else {}
        return {
            "Bucket": call.bucket,
            "IsTruncated": more,
            "NextKeyMarker": last.get("Key"),
            "NextUploadIdMarker": last.get("UploadId"),
            "Uploads": listed,
            "EncodingType": asked.get("EncodingType"),
        }

    def _upload_part(self, call: Call) -> dict[str, Any]:
        return self._receive(call, self._upload(call) / str(part_number(call)))

    def _list_parts(self, call: Call) -> dict[str, Any]:
        at, after = self._upload(call), call.asked.get("PartNumberMarker", 0)
        room = min(call.asked.get("MaxParts", PAGE), PAGE)
        with self._lock:
            numbers = sorted(int(path.name) for path in at.iterdir() if path.name.isdigit())
            page = [number for number in numbers if number > after][:room]
            parts = [(number, read(at / str(number))) for number in page]
        return {
            **{name: call.asked[name] for name in ("Bucket", "Key", "UploadId")},
            "PartNumberMarker": after,
            "NextPartNumberMarker": page[-1] if page else 0,
            "MaxParts": room,
            "IsTruncated": bool(page) and page[-1] != numbers[-1],
            "Parts": [
                {"PartNumber": number, "Size": one.size, "ETag": one.tag, "LastModified": one.modified}
                for number, one in parts
            ],
        }

    def _complete_multipart_upload(self, call: Call) -> dict[str, Any]:
        at, md5, sizes = self._upload(call), hashlib.md5(), list[int]()
        with self._temporary() as file:
            for number, tag in named_parts(call):
                if sizes and sizes[-1] < PART_AT_LEAST:
                    raise Refusal("EntityTooSmall", "A part but the last is smaller than 5 MiB")
                with suppress(FileNotFoundError), (at / str(number)).open("rb") as part:
                    one = description(part)
                    if one.tag.strip('"') == tag:
                        for data in exactly(part, one.size):
                            file.write(data)
                        md5.update(bytes.fromhex(tag))
                        sizes.append(one.size)
                        continue
                raise Refusal("InvalidPart", "One or more of the specified parts could not be found.")
            tag = f'"{md5.hexdigest()}-{len(sizes)}"'
            whole = Stored(call.key, sum(sizes), tag, kept=read(at / "upload").kept)
            self._keep(call, file, whole, self._object(call))
        with self._lock, suppress(Refusal):  # it was given up meanwhile
            self._forget(call)
        return {"Bucket": call.bucket, "Key": call.key, "ETag": tag}

    def _abort_multipart_upload(self, call: Call) -> None:
        with self._lock:
            self._forget(call)

    def _forget(self, call: Call) -> None:
        """Remove an upload. Raises Refusal where there is none."""
        at = self._upload(call)
        self._uploads(call.bucket).drop(_named(call.key, at))
        shutil.rmtree(at)

    def _receive(self, call: Call, at: Path) -> dict[str, Any]:
        with self._temporary() as file:
            size, tag = call.receive(file)
            self._keep(call, file, Stored(call.key, size, tag, kept=call.kept()), at)
        return {"ETag": tag}

    @contextmanager
    def _temporary(self) -> Iterator[IO[bytes]]:
        path = self._unfinished / uuid.uuid4().hex
        try:
            path.touch(mode=0o600, exist_ok=False)
            with path.open("r+b") as file:
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
            self._check_conditions(call, at)
            try:
                Path(file.name).rename(at)
            except FileNotFoundError:
                self._bucket(call.bucket)
                self._upload(call)
                raise
            if at == self._object(call):
                self._objects(call.bucket).put(call.key, stored)
            elif at.name == "upload":
                self._uploads(call.bucket).put(_named(call.key, at.parent), stored)

    def _check_conditions(self, call: Call, at: Path) -> None:
        """Compare the object that is there with what the caller expects. Raises Refusal where it is not so.

        https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
        """
        check_condition("IfNoneMatch" not in call.asked or not at.exists())
        if (wanted := call.asked.get("IfMatch")) is not None:
            call.may("GetObject", f"{call.bucket}/{call.key}")
            try:
                check_condition(read(at).tag.strip('"') == wanted.strip('"'))
            except FileNotFoundError:
                raise no_such_key() from None


def _named(key: str, upload: Path) -> str:
    """What an upload is called among those of its bucket."""
    return f"{key}\0{upload.name}"


def hang_up(environ: dict[str, Any]) -> None:
    """End the connection of a request that gets no answer."""
    with suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def _reply(operation: str, result: object, body: Iterator[bytes] | None = None) -> Response:
    """An answer, or a refusal, in the form of an operation."""
    model: Any = get_service_model("s3").operation_model(operation)
    made = S3Serializer(model).serialize(result)
    status = made["status_code"]
    if status == 400:  # or it is a code of which the model does not know
        status = getattr(result, "status", status)
    return Response(body or made["body"], status, made["headers"])
