"""An S3 server that stores buckets as folders and objects as files. Bodies are streamed and are not in the
pickled state.

An object's file has the object's body, a description in JSON, and the description's length in 8 bytes. The
file is renamed to its final name once it is complete.
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
    BUCKET_NAME,
    STREAMED_OPERATIONS,
    Bucket,
    ObjectInfo,
    S3Call,
    check_condition,
    get_part_number,
    identify_caller,
    no_such_key_error,
    parse_description,
    parse_parts,
    read_description,
    read_exactly,
)

PAGE = 1000
PART_AT_LEAST = 5 << 20
LAST = chr(sys.maxunicode)
PUBLIC = ("HeadBucket", "ListObjectsV2", "GetObject", "HeadObject")


class S3App:
    """The WSGI application for S3. The application's lock is held while names change, but never while a body
    is transferred."""

    def __init__(self, folder: Path, unfinished: Path, emulator: Emulator, faults: Faults) -> None:
        self._folder = folder
        self._emulator = emulator
        self._faults = faults
        self._lock = threading.Lock()
        self._object_listings: dict[str, Listing] = {}
        self._upload_listings: dict[str, Listing] = {}
        self._temporary_files = unfinished
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if folder.exists():
            folder.chmod(0o700)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        try:
            call = S3Call(environ)
            response = self._handle(call)
        except NotFound as error:
            return error(environ, start_response)
        except ConnectionError:
            close_connection(environ)
            raise
        except ServiceException as error:
            response = _make_response("HeadBucket", error)
        except Exception:
            traceback.print_exc()
            response = _make_response("HeadBucket", internal_error("We encountered an internal error."))
        response.headers["x-amz-request-id"] = uuid.uuid4().hex[:16].upper()
        if call.bucket_info is not None:
            response.headers["x-amz-bucket-region"] = call.bucket_info.region
        return response(environ, start_response)

    def _handle(self, call: S3Call) -> Response:
        with self._emulator.lock:
            if "authorization" in call.headers:
                identify_caller(call)
            fault = self._faults.take_fault(call.operation, (call.bucket, call.key, call.region))
        effect, seconds = (fault.effect, fault.seconds) if fault else ("", 0.0)
        if fault and effect not in faults.CALL_EFFECTS:
            raise faults.make_refusal(fault)
        if effect == "delay":
            time.sleep(seconds)
        self._authorize(call)
        call.is_cut = effect == "cut"
        if call.is_cut and call.operation not in STREAMED_OPERATIONS:
            raise ConnectionResetError("a fault: the connection is cut")
        result = getattr(self, f"_{xform_name(call.operation)}")(call) or {}
        response = _make_response(call.operation, result, result.pop("Body", None))
        if "ContentRange" in result:
            response.status_code = 206
        if effect == "late":
            time.sleep(seconds)
        if effect == "lost":
            raise ConnectionResetError("a fault: the response is lost")
        return response

    def _authorize(self, call: S3Call) -> None:
        """Set a call's bucket. Raises Refusal if the bucket does not exist or the client has no
        permission."""
        is_own, is_public = True, False
        if call.operation not in ("ListBuckets", "CreateBucket"):
            bucket = call.bucket_info = self._read_bucket(call.bucket)
            if call.region not in ("", bucket.region):
                why = "The bucket you are attempting to access is in another region."
                raise Refusal("PermanentRedirect", why, status="301")
            is_own = bucket.owner == DEFAULT_ACCOUNT_ID
            can_pay = (bool(call.caller) and "RequestPayer" in call.arguments) or not bucket.requester_pays
            is_public = bucket.public and call.operation in PUBLIC and can_pay
        if is_public and (is_own or not call.caller):
            return
        if not call.caller or not (is_own or is_public):
            raise Refusal("AccessDenied", "Access Denied")
        call.check_permission(call.operation, "/".join(filter(None, (call.bucket, call.key))) or "*")

    def _read_bucket(self, name: str) -> Bucket:
        with suppress(FileNotFoundError):
            if BUCKET_NAME.fullmatch(name):
                return msgspec.json.decode((self._folder / name / "bucket.json").read_bytes(), type=Bucket)
        raise Refusal("NoSuchBucket", "The specified bucket does not exist")

    def _change_bucket(self, call: S3Call, **fields: Any) -> None:
        with self._lock:
            changed = msgspec.structs.replace(self._read_bucket(call.bucket), **fields)
            write_json(self._folder / call.bucket / "bucket.json", msgspec.to_builtins(changed))

    def _list_buckets(self, call: S3Call) -> dict[str, Any]:
        with self._lock:
            names = sorted(path.parent.name for path in self._folder.glob("*/bucket.json"))
            buckets = [(name, self._read_bucket(name)) for name in names]
        rows = [
            {"Name": name, "CreationDate": bucket.created, "BucketRegion": bucket.region}
            for name, bucket in buckets
            if bucket.owner == DEFAULT_ACCOUNT_ID
        ]
        return {"Owner": {"ID": DEFAULT_ACCOUNT_ID}, "Buckets": rows}

    def _create_bucket(self, call: S3Call) -> dict[str, Any]:
        if not BUCKET_NAME.fullmatch(call.bucket):
            raise Refusal("InvalidBucketName", "The specified bucket is not valid.")
        region = call.arguments.get("CreateBucketConfiguration", {}).get("LocationConstraint", call.region)
        folder = self._folder / call.bucket
        with self._lock:
            if folder.exists():
                if self._read_bucket(call.bucket).owner == DEFAULT_ACCOUNT_ID:
                    raise Refusal("BucketAlreadyOwnedByYou", "The bucket that you tried to create is yours.")
                raise Refusal("BucketAlreadyExists", "The requested bucket name is not available.")
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for path in (folder, folder / "objects", folder / "uploads"):
                path.mkdir(mode=0o700)
            bucket = Bucket(region, DEFAULT_ACCOUNT_ID, time.time())
            write_json(folder / "bucket.json", msgspec.to_builtins(bucket))
        return {"Location": f"/{call.bucket}"}

    def _delete_bucket(self, call: S3Call) -> None:
        with self._lock:
            if any((self._folder / call.bucket / "objects").iterdir()):
                raise Refusal("BucketNotEmpty", "The bucket you tried to delete is not empty")
            self._object_listings.pop(call.bucket, None)
            self._upload_listings.pop(call.bucket, None)
            shutil.rmtree(self._folder / call.bucket)

    def _head_bucket(self, call: S3Call) -> None:
        pass

    def _get_bucket_lifecycle_configuration(self, call: S3Call) -> dict[str, Any]:
        if lifecycle := self._read_bucket(call.bucket).lifecycle:
            return lifecycle
        raise Refusal("NoSuchLifecycleConfiguration", "The lifecycle configuration does not exist")

    def _put_bucket_lifecycle_configuration(self, call: S3Call) -> None:
        self._change_bucket(call, lifecycle=call.arguments["LifecycleConfiguration"])

    def _put_bucket_acl(self, call: S3Call) -> None:
        self._change_bucket(call, public=call.arguments["ACL"] == "public-read")

    def _list_objects_v2(self, call: S3Call) -> dict[str, Any]:
        arguments = call.arguments
        try:
            after = base64.urlsafe_b64decode(arguments.get("ContinuationToken", "")).decode()
        except ValueError:
            raise Refusal("InvalidArgument", "The continuation token provided is incorrect") from None
        with self._lock:
            page, has_more = self._objects(call.bucket).page(
                arguments.get("Prefix", ""),
                after=after,
                limit=min(arguments.get("MaxKeys", PAGE), PAGE),
                delimiter=arguments.get("Delimiter", ""),
            )
        contents = [
            {"Key": call.encode_key(name), "Size": info.size, "ETag": info.tag, "LastModified": info.modified}
            for name, info in page.items()
            if info
        ]
        prefixes = [{"Prefix": call.encode_key(name)} for name, info in page.items() if info is None]
        token = base64.urlsafe_b64encode(list(page)[-1].encode()).decode() if has_more else None
        return {
            "EncodingType": arguments.get("EncodingType"),
            "KeyCount": len(page),
            "IsTruncated": has_more,
            "NextContinuationToken": token,
            "Contents": contents,
            "CommonPrefixes": prefixes,
        }

    def _objects(self, bucket: str) -> Listing:
        """Return the listing of a bucket's objects. The caller holds the lock."""
        if bucket not in self._object_listings:
            objects = map(read_description, (self._folder / bucket / "objects").iterdir())
            self._object_listings[bucket] = Listing({info.key: info for info in objects})
        return self._object_listings[bucket]

    def _uploads(self, bucket: str) -> Listing:
        """Return the listing of a bucket's incomplete multipart uploads. The caller holds the lock."""
        if bucket not in self._upload_listings:
            uploads = [
                (path.parent, read_description(path))
                for path in (self._folder / bucket).glob("uploads/*/upload")
            ]
            self._upload_listings[bucket] = Listing(
                {_upload_name(info.key, folder): info for folder, info in uploads}
            )
        return self._upload_listings[bucket]

    def _object_path(self, call: S3Call) -> Path:
        """Return the path of an object's file, even if the object does not exist."""
        name = hashlib.sha256(call.key.encode()).hexdigest()
        return self._folder / call.bucket / "objects" / name

    def _put_object(self, call: S3Call) -> dict[str, Any]:
        return self._receive(call, self._object_path(call))

    def _get_object(self, call: S3Call) -> dict[str, Any]:
        try:
            file = self._object_path(call).open("rb")
        except FileNotFoundError:
            if call.bucket_info is not None and not call.bucket_info.public:
                call.check_permission("ListObjectsV2", call.bucket)
            raise no_such_key_error() from None
        info = parse_description(file)
        check_condition(call.arguments.get("IfMatch", info.tag).strip('"') == info.tag.strip('"'))
        result = {**info.kept, "ETag": info.tag, "LastModified": info.modified}
        start, end = 0, info.size
        if requested := parse_range_header(call.arguments.get("Range")):
            if (part := requested.range_for_length(info.size)) is None:
                raise Refusal("InvalidRange", "The requested range is not satisfiable")
            start, end = part
            result["ContentRange"] = f"bytes {start}-{end - 1}/{info.size}"
        file.seek(start)
        size = end - start
        body = read_exactly(file, size // 2 if call.is_cut else size)
        return {**result, "ContentLength": size, "Body": body}

    _head_object = _get_object

    def _delete_object(self, call: S3Call) -> None:
        with self._lock:
            self._objects(call.bucket).drop(call.key)
            self._object_path(call).unlink(missing_ok=True)

    def _find_upload(self, call: S3Call) -> Path:
        """Return an upload's folder. Raises Refusal if the call's key has no upload with this id."""
        upload_id = call.arguments["UploadId"]
        folder: Path = self._folder / call.bucket / "uploads" / upload_id
        with suppress(FileNotFoundError):
            if upload_id.isalnum() and read_description(folder / "upload").key == call.key:
                return folder
        raise Refusal("NoSuchUpload", "The specified multipart upload does not exist.")

    def _create_multipart_upload(self, call: S3Call) -> dict[str, Any]:
        upload_id = f"{time.time_ns():016x}{uuid.uuid4().hex[:16]}"  # ids sort in order of creation
        folder = self._folder / call.bucket / "uploads" / upload_id
        folder.mkdir(mode=0o700)
        info = ObjectInfo(call.key, kept=call.get_object_metadata())
        with self._open_temporary() as file:
            self._save(call, file, info, folder / "upload")
        return {"Bucket": call.bucket, "Key": call.key, "UploadId": upload_id}

    def _list_multipart_uploads(self, call: S3Call) -> dict[str, Any]:
        arguments, key = call.arguments, call.arguments.get("KeyMarker", "")
        prefix = arguments.get("Prefix", "")
        after = f"{key}\0{arguments.get('UploadIdMarker', LAST)}" if key else ""
        limit = min(arguments.get("MaxUploads", PAGE), PAGE)
        with self._lock:
            page, has_more = self._uploads(call.bucket).page(prefix, after=after, limit=limit)
        uploads = [
            {
                "Key": call.encode_key(info.key),
                "UploadId": name.rpartition("\0")[2],
                "Initiated": info.modified,
            }
            for name, info in page.items()
            if info
        ]
        last = uploads[-1] if has_more else {}
        return {
            "Bucket": call.bucket,
            "IsTruncated": has_more,
            "NextKeyMarker": last.get("Key"),
            "NextUploadIdMarker": last.get("UploadId"),
            "Uploads": uploads,
            "EncodingType": arguments.get("EncodingType"),
        }

    def _upload_part(self, call: S3Call) -> dict[str, Any]:
        return self._receive(call, self._find_upload(call) / str(get_part_number(call)))

    def _list_parts(self, call: S3Call) -> dict[str, Any]:
        folder, after = self._find_upload(call), call.arguments.get("PartNumberMarker", 0)
        limit = min(call.arguments.get("MaxParts", PAGE), PAGE)
        with self._lock:
            numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
            page = [number for number in numbers if number > after][:limit]
            parts = [(number, read_description(folder / str(number))) for number in page]
        return {
            **{name: call.arguments[name] for name in ("Bucket", "Key", "UploadId")},
            "PartNumberMarker": after,
            "NextPartNumberMarker": page[-1] if page else 0,
            "MaxParts": limit,
            "IsTruncated": bool(page) and page[-1] != numbers[-1],
            "Parts": [
                {"PartNumber": number, "Size": part.size, "ETag": part.tag, "LastModified": part.modified}
                for number, part in parts
            ],
        }

    def _complete_multipart_upload(self, call: S3Call) -> dict[str, Any]:
        folder, md5, sizes = self._find_upload(call), hashlib.md5(), list[int]()
        with self._open_temporary() as file:
            for number, tag in parse_parts(call):
                if sizes and sizes[-1] < PART_AT_LEAST:
                    raise Refusal("EntityTooSmall", "A part other than the last is smaller than 5 MiB")
                with suppress(FileNotFoundError), (folder / str(number)).open("rb") as part_file:
                    part = parse_description(part_file)
                    if part.tag.strip('"') == tag:
                        for data in read_exactly(part_file, part.size):
                            file.write(data)
                        md5.update(bytes.fromhex(tag))
                        sizes.append(part.size)
                        continue
                raise Refusal("InvalidPart", "One or more of the specified parts could not be found.")
            tag = f'"{md5.hexdigest()}-{len(sizes)}"'
            info = ObjectInfo(call.key, sum(sizes), tag, kept=read_description(folder / "upload").kept)
            self._save(call, file, info, self._object_path(call))
        with self._lock, suppress(Refusal):  # another request may have removed the upload
            self._remove_upload(call)
        return {"Bucket": call.bucket, "Key": call.key, "ETag": tag}

    def _abort_multipart_upload(self, call: S3Call) -> None:
        with self._lock:
            self._remove_upload(call)

    def _remove_upload(self, call: S3Call) -> None:
        """Remove an upload. Raises Refusal if it does not exist."""
        folder = self._find_upload(call)
        self._uploads(call.bucket).drop(_upload_name(call.key, folder))
        shutil.rmtree(folder)

    def _receive(self, call: S3Call, path: Path) -> dict[str, Any]:
        with self._open_temporary() as file:
            size, tag = call.receive_body(file)
            self._save(call, file, ObjectInfo(call.key, size, tag, kept=call.get_object_metadata()), path)
        return {"ETag": tag}

    @contextmanager
    def _open_temporary(self) -> Iterator[IO[bytes]]:
        path = self._temporary_files / uuid.uuid4().hex
        try:
            path.touch(mode=0o600, exist_ok=False)
            with path.open("r+b") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def _save(self, call: S3Call, file: IO[bytes], info: ObjectInfo, path: Path) -> None:
        """Append the description to a temporary file and rename the file to `path`.

        :raises Refusal: the bucket or the upload no longer exists, or a precondition does not hold.
        """
        text = msgspec.json.encode(info)
        file.write(text + len(text).to_bytes(8))
        file.flush()
        with self._lock:
            self._check_conditions(call, path)
            try:
                Path(file.name).rename(path)
            except FileNotFoundError:
                self._read_bucket(call.bucket)
                self._find_upload(call)
                raise
            if path == self._object_path(call):
                self._objects(call.bucket).put(call.key, info)
            elif path.name == "upload":
                self._uploads(call.bucket).put(_upload_name(call.key, path.parent), info)

    def _check_conditions(self, call: S3Call, path: Path) -> None:
        """Raise Refusal if one of the request's preconditions does not hold for the existing object.

        https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
        """
        check_condition("IfNoneMatch" not in call.arguments or not path.exists())
        if (expected := call.arguments.get("IfMatch")) is not None:
            call.check_permission("GetObject", f"{call.bucket}/{call.key}")
            try:
                check_condition(read_description(path).tag.strip('"') == expected.strip('"'))
            except FileNotFoundError:
                raise no_such_key_error() from None


def _upload_name(key: str, upload: Path) -> str:
    """Return an upload's name in its bucket's listing."""
    return f"{key}\0{upload.name}"


def close_connection(environ: dict[str, Any]) -> None:
    """Close a request's connection without a response."""
    with suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def _make_response(operation: str, result: object, body: Iterator[bytes] | None = None) -> Response:
    """Return the HTTP response for an operation's result or error, in the operation's format."""
    model: Any = get_service_model("s3").operation_model(operation)
    serialized = S3Serializer(model).serialize(result)
    status = serialized["status_code"]
    if status == 400:  # the serializer's default for errors that are not in the model
        status = getattr(result, "status", status)
    return Response(body or serialized["body"], status, serialized["headers"])
