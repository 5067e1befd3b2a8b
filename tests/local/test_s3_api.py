"""S3 of the local cloud, as its clients see it."""

import base64
import http.client
import json
import os
import subprocess
import sys
import threading
import zlib
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore import UNSIGNED
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError, ConnectionClosedError, HTTPClientError, IncompleteReadError

from awsddp.local import control
from awsddp.local.machine import CloudPaths
from tests.support.local_cloud import Cloud, add_fault, error_code_of
from tests.support.multipart import upload_one_part
from tests.support.s3_role import make_role

MB = 1 << 20


def list_keys(s3: Any, bucket: str) -> list[str]:
    return [item["Key"] for item in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_an_object_is_read_whole_and_in_ranges(records: Cloud, bucket: str) -> None:
    s3, body = records.client("s3"), os.urandom(20 * MB + 1)
    s3.upload_fileobj(BytesIO(body), bucket, "big", ExtraArgs={"Metadata": {"note": "mine"}})
    response = s3.get_object(Bucket=bucket, Key="big")
    assert (response["Body"].read(), response["Metadata"]) == (body, {"note": "mine"})
    assert response["ETag"].endswith('-3"')
    part = s3.get_object(
        Bucket=bucket, Key="big", Range=f"bytes={9 * MB}-{9 * MB + 4}", IfMatch=response["ETag"]
    )
    assert part["Body"].read() == body[9 * MB : 9 * MB + 5]
    assert s3.get_object(Bucket=bucket, Key="big", Range="bytes=-3")["Body"].read() == body[-3:]
    assert error_code_of(s3.get_object, Bucket=bucket, Key="big", Range=f"bytes={21 * MB}-") == "InvalidRange"
    assert error_code_of(s3.get_object, Bucket=bucket, Key="big", IfMatch='"no"') == "PreconditionFailed"
    assert error_code_of(s3.get_object, Bucket=bucket, Key="none") == "NoSuchKey"
    records.kill()
    assert list_keys(records.client("s3"), bucket) == ["big"]


def test_a_multipart_upload_is_invisible_until_it_is_complete(records: Cloud, bucket: str) -> None:
    s3 = records.client("s3")
    upload_id = s3.create_multipart_upload(Bucket=bucket, Key="parts/one")["UploadId"]
    upload: dict[str, Any] = {"Bucket": bucket, "Key": "parts/one", "UploadId": upload_id}
    responses = [s3.upload_part(**upload, PartNumber=number, Body=b"small") for number in (1, 2)]
    [listed] = s3.list_multipart_uploads(Bucket=bucket, Prefix="parts/")["Uploads"]
    assert (listed["Key"], listed["UploadId"], list_keys(s3, bucket)) == ("parts/one", upload_id, [])
    parts = [{"PartNumber": number, "ETag": response["ETag"]} for number, response in enumerate(responses, 1)]
    complete = s3.complete_multipart_upload
    assert error_code_of(complete, **upload, MultipartUpload={"Parts": parts}) == "EntityTooSmall"
    unknown = {"Parts": [{**parts[0], "PartNumber": 7}]}
    assert error_code_of(complete, **upload, MultipartUpload=unknown) == "InvalidPart"
    s3.abort_multipart_upload(**upload)
    assert error_code_of(s3.upload_part, **upload, PartNumber=3, Body=b"") == "NoSuchUpload"


def test_uploads_are_listed_while_others_are_aborted(records: Cloud, bucket: str) -> None:
    s3 = records.client("s3")
    upload_ids = [s3.create_multipart_upload(Bucket=bucket, Key="one")["UploadId"] for _ in range(50)]

    def abort_uploads() -> None:
        for upload_id in upload_ids:
            s3.abort_multipart_upload(Bucket=bucket, Key="one", UploadId=upload_id)

    thread = threading.Thread(target=abort_uploads)
    thread.start()
    remaining = len(upload_ids)
    while remaining:
        remaining = len(s3.list_multipart_uploads(Bucket=bucket).get("Uploads", ()))
    thread.join()


def test_one_of_several_simultaneous_conditional_puts_succeeds(records: Cloud, bucket: str) -> None:
    codes: list[str] = []

    def put(letter: str) -> None:
        try:
            records.client("s3").put_object(Bucket=bucket, Key="one", Body=letter * MB, IfNoneMatch="*")
            codes.append("won")
        except ClientError as error:
            codes.append(error.response["Error"]["Code"])

    threads = [threading.Thread(target=put, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == ["PreconditionFailed"] * 3 + ["won"]


def catch_error(call: Any, **parameters: Any) -> tuple[int, str]:
    """Return the HTTP status and the code with which a call is refused."""
    with pytest.raises(ClientError) as caught:
        call(**parameters)
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def test_metadata_and_content_type_are_returned_with_an_object(records: Cloud, bucket: str) -> None:
    s3, target = records.client("s3"), {"Bucket": bucket, "Key": "one"}
    metadata = {"awsddp-signature": "0f" * 32}
    put = s3.put_object(**target, Body=b"12345", ContentType="application/json", Metadata=metadata)
    for response in (s3.get_object(**target, Range="bytes=0-2"), s3.head_object(**target)):
        assert (response["Metadata"], response["ContentType"]) == (metadata, "application/json")
        assert response["ETag"] == put["ETag"]
    [listed] = s3.list_objects_v2(Bucket=bucket)["Contents"]
    assert (listed["ETag"], listed["Size"]) == (put["ETag"], 5)
    s3.put_object(**target, Body=b"123456")
    assert s3.head_object(**target)["Metadata"] == {}


def test_if_match_reads_only_the_listed_version_of_an_object(records: Cloud, bucket: str) -> None:
    s3, target = records.client("s3"), {"Bucket": bucket, "Key": "one"}
    old = s3.put_object(**target, Body=b"old bytes")["ETag"]
    part = {**target, "Range": "bytes=0-2", "IfMatch": old}
    assert s3.get_object(**part)["Body"].read() == b"old"
    assert s3.head_object(**target, IfMatch=old)["ContentLength"] == 9
    s3.put_object(**target, Body=b"new bytes")
    assert catch_error(s3.get_object, **part) == (412, "PreconditionFailed")
    assert catch_error(s3.head_object, **target, IfMatch=old)[0] == 412


def test_if_match_replaces_only_the_expected_version_of_an_object(records: Cloud, bucket: str) -> None:
    s3, target = records.client("s3"), {"Bucket": bucket, "Key": "one"}
    completion = upload_one_part(s3, target, b"parts")
    failed, absent = (412, "PreconditionFailed"), (404, "NoSuchKey")
    assert catch_error(s3.put_object, **target, Body=b"1", IfMatch='"none"') == absent
    assert catch_error(s3.complete_multipart_upload, **completion, IfMatch='"none"') == absent
    first = s3.put_object(**target, Body=b"1")["ETag"]
    assert catch_error(s3.put_object, **target, Body=b"2", IfMatch='"none"') == failed
    assert catch_error(s3.put_object, **target, Body=b"2", IfNoneMatch="*") == failed
    assert catch_error(s3.complete_multipart_upload, **completion, IfMatch='"none"') == failed
    assert catch_error(s3.complete_multipart_upload, **completion, IfNoneMatch="*") == failed
    assert s3.get_object(**target)["Body"].read() == b"1"
    second = s3.put_object(**target, Body=b"2", IfMatch=first)["ETag"]
    third = s3.complete_multipart_upload(**completion, IfMatch=second)["ETag"]
    response = s3.get_object(**target, IfMatch=third)
    assert (response["Body"].read(), len({first, second, third})) == (b"parts", 3)


def test_a_condition_reveals_nothing_without_permission_to_read(records: Cloud, bucket: str) -> None:
    owner, target = records.client("s3"), {"Bucket": bucket, "Key": "in/one"}
    etag = owner.put_object(**target, Body=b"1")["ETag"]
    _, writer = make_role(records, bucket, "s3:PutObject")
    assert error_code_of(writer.put_object, **target, Body=b"2", IfMatch=etag) == "AccessDenied"
    writer.put_object(**target, Body=b"2")


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        (None, "MalformedXML"),
        ([], "MalformedXML"),
        ([{"PartNumber": 1}], "MalformedXML"),
        ([{"ETag": '"0"'}], "MalformedXML"),
        ([{"PartNumber": 2, "ETag": '"0"'}, {"PartNumber": 1, "ETag": '"0"'}], "InvalidPartOrder"),
        ([{"PartNumber": 1, "ETag": '"0"'}, {"PartNumber": 1, "ETag": '"0"'}], "InvalidPartOrder"),
        ([{"PartNumber": 1, "ETag": '"0"'}], "InvalidPart"),
    ],
)
def test_an_upload_is_completed_only_with_its_parts_in_order(
    records: Cloud, bucket: str, parts: Any, code: str
) -> None:
    s3 = records.client("s3")
    completion = upload_one_part(s3, {"Bucket": bucket, "Key": "one"}, b"1")
    del completion["MultipartUpload"]
    payload = {} if parts is None else {"MultipartUpload": {"Parts": parts}}
    assert catch_error(s3.complete_multipart_upload, **completion, **payload) == (400, code)
    assert list_keys(s3, bucket) == []


def test_the_parts_of_an_upload_are_listed_with_their_times(records: Cloud, bucket: str) -> None:
    s3, before = records.client("s3"), datetime.now(UTC).replace(microsecond=0)
    upload_id = s3.create_multipart_upload(Bucket=bucket, Key="one")["UploadId"]
    upload: dict[str, Any] = {"Bucket": bucket, "Key": "one", "UploadId": upload_id}
    assert s3.list_parts(**upload).get("Parts", []) == []
    etags = {n: s3.upload_part(**upload, PartNumber=n, Body=b"x" * n)["ETag"] for n in (10, 2, 1)}
    pages = list(s3.get_paginator("list_parts").paginate(**upload, PaginationConfig={"PageSize": 2}))
    listed = [(row["PartNumber"], row["Size"], row["ETag"]) for page in pages for row in page["Parts"]]
    assert (listed, len(pages)) == ([(n, n, etags[n]) for n in (1, 2, 10)], 2)
    assert all(before <= row["LastModified"] <= datetime.now(UTC) for page in pages for row in page["Parts"])
    assert error_code_of(s3.upload_part, **upload, PartNumber=10_001, Body=b"") == "InvalidArgument"
    s3.abort_multipart_upload(**upload)
    assert catch_error(s3.list_parts, **upload) == (404, "NoSuchUpload")


def test_keys_are_listed_in_their_order_and_in_pages(records: Cloud, bucket: str) -> None:
    s3 = records.client("s3")
    odd = ["a b+c%20", "a/ä/1", "a/ä/2", "a/z", "b\x01", "z//", "ü&<>'\"", "\U0001f600", "\ufffd"]
    for key in odd:
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
    pages = list(
        s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, PaginationConfig={"PageSize": 2})
    )
    listed = [item["Key"] for page in pages for item in page["Contents"]]
    assert (listed, len(pages)) == (sorted(odd, key=str.encode), 5)
    subfolder = s3.list_objects_v2(Bucket=bucket, Prefix="a/", Delimiter="/")
    assert [prefix["Prefix"] for prefix in subfolder["CommonPrefixes"]] == ["a/ä/"]
    assert [item["Key"] for item in subfolder["Contents"]] == ["a/z"]
    first = s3.list_objects_v2(Bucket=bucket, Delimiter="/", MaxKeys=2)
    tail = s3.list_objects_v2(Bucket=bucket, Delimiter="/", ContinuationToken=first["NextContinuationToken"])
    assert first["CommonPrefixes"] == [{"Prefix": "a/"}]
    assert tail["KeyCount"] == 5
    for token in ("x", "/w=="):
        assert error_code_of(s3.list_objects_v2, Bucket=bucket, ContinuationToken=token) == "InvalidArgument"
    assert error_code_of(s3.delete_bucket, Bucket=bucket) == "BucketNotEmpty"
    for key in odd:
        s3.delete_object(Bucket=bucket, Key=key)
    s3.delete_bucket(Bucket=bucket)
    assert error_code_of(s3.head_bucket, Bucket=bucket) == "404"


def count_reads(pid: int | None) -> int:
    """Return how many reads a process has made."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["syscr"])


def test_a_listing_reads_no_object_twice_and_outlives_the_daemon(records: Cloud, bucket: str) -> None:
    s3, expected = records.client("s3"), [f"{number:03}" for number in range(200)]
    for key in expected:
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
    for _ in range(2):
        before = count_reads(records.info.pid)
        assert list_keys(s3, bucket) == expected
        assert count_reads(records.info.pid) - before < len(expected)
        records.kill()
        s3 = records.client("s3")
        assert list_keys(s3, bucket) == expected
        s3.delete_object(Bucket=bucket, Key=expected.pop(7))


def test_uploads_are_listed_in_pages_and_outlive_the_daemon(records: Cloud, bucket: str) -> None:
    s3 = records.client("s3")
    uploads = [
        (key, s3.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"])
        for key in ("a", "in/1", "in/1", "in/1", "in/2")
    ]
    records.kill()
    s3 = records.client("s3")
    pages = s3.get_paginator("list_multipart_uploads").paginate(
        Bucket=bucket, Prefix="in/", PaginationConfig={"PageSize": 2}
    )
    assert [(row["Key"], row["UploadId"]) for page in pages for row in page["Uploads"]] == uploads[1:]
    tail = s3.list_multipart_uploads(Bucket=bucket, KeyMarker="in/1")
    assert [row["Key"] for row in tail["Uploads"]] == ["in/2"]
    assert error_code_of(s3.list_multipart_uploads, Bucket=bucket, Delimiter="/") == "NotImplemented"


def read_peak_memory_kb(pid: int | None) -> int:
    [line] = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmHWM")]
    return int(line.split()[1])


def test_a_large_object_is_not_held_in_memory(records: Cloud, bucket: str, tmp_path: Path) -> None:
    s3, large = records.client("s3"), tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(300 * MB)
    s3.put_object(Bucket=bucket, Key="warm", Body=b"")
    before = read_peak_memory_kb(records.info.pid)
    with large.open("rb") as file:
        s3.put_object(Bucket=bucket, Key="large", Body=file)
    s3.upload_file(str(large), bucket, "parts", Config=TransferConfig(multipart_chunksize=64 * MB))
    s3.get_object(Bucket=bucket, Key="parts", Range=f"bytes={299 * MB}-")["Body"].read()
    assert read_peak_memory_kb(records.info.pid) - before < 60_000


@pytest.mark.parametrize("trailer", [True, False])
def test_a_body_can_be_sent_in_signed_or_unsigned_chunks(records: Cloud, bucket: str, trailer: bool) -> None:
    kind = "STREAMING-UNSIGNED-PAYLOAD-TRAILER" if trailer else "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    mark, crc = b"" if trailer else b";chunk-signature=" + b"0" * 64, zlib.crc32(b"hello, world").to_bytes(4)
    end = b"x-amz-checksum-crc32:" + base64.b64encode(crc) + b"\r\n" if trailer else b""
    body = b"7%b\r\nhello, \r\n5%b\r\nworld\r\n0%b\r\n%b\r\n" % (mark, mark, mark, end)

    def put(body: bytes) -> int:
        path, host = f"/{bucket}/chunks", records.info.endpoint.removeprefix("http://")
        headers = {"Host": host, "X-Amz-Decoded-Content-Length": "12", "Content-Encoding": "aws-chunked"}
        request: Any = AWSRequest("PUT", f"http://{host}{path}", headers, b"")
        signer: Any = S3SigV4Auth(
            Credentials(records.info.access_key_id, records.info.secret_access_key), "s3", "us-east-1"
        )
        signer.payload = lambda _: kind
        signer.add_auth(request)
        connection = http.client.HTTPConnection(host)
        connection.request("PUT", path, body, dict(request.headers))
        return connection.getresponse().status

    assert put(body) == 200
    assert records.client("s3").get_object(Bucket=bucket, Key="chunks")["Body"].read() == b"hello, world"
    if trailer:
        assert put(body.replace(b"world", b"World")) == 400


def test_a_cut_put_leaves_nothing_and_a_lost_reply_leaves_the_object(records: Cloud, bucket: str) -> None:
    s3, body = records.client("s3"), os.urandom(4 * MB)
    add_fault(records.info, "PutObject", "cut", times=2, only="one")
    for data in (body, b""):
        with pytest.raises((ConnectionClosedError, HTTPClientError)):
            s3.put_object(Bucket=bucket, Key="one", Body=data)
    assert list_keys(s3, bucket) == []
    assert not list(CloudPaths(records.home).uploads.iterdir())
    add_fault(records.info, "PutObject", "lost", times=1)
    with pytest.raises(ConnectionClosedError):
        s3.put_object(Bucket=bucket, Key="one", Body=body)
    assert s3.get_object(Bucket=bucket, Key="one")["Body"].read() == body
    add_fault(records.info, "GetObject", "cut", times=1)
    with pytest.raises((IncompleteReadError, HTTPClientError)):
        s3.get_object(Bucket=bucket, Key="one")["Body"].read()
    add_fault(records.info, "GetObject", "SlowDown", times=1, only=bucket)
    with pytest.raises(ClientError) as caught:
        s3.get_object(Bucket=bucket, Key="one")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503


def test_a_bucket_is_readable_by_its_owner_or_if_it_is_public(records: Cloud, bucket: str) -> None:
    s3, anonymous = records.client("s3"), records.client("s3", config=Config(signature_version=UNSIGNED))
    s3.put_object(Bucket=bucket, Key="one", Body=b"1")
    assert error_code_of(anonymous.get_object, Bucket=bucket, Key="one") == "AccessDenied"
    s3.put_bucket_acl(Bucket=bucket, ACL="public-read")
    assert anonymous.get_object(Bucket=bucket, Key="one")["Body"].read() == b"1"
    assert error_code_of(anonymous.put_object, Bucket=bucket, Key="two", Body=b"") == "AccessDenied"
    file = CloudPaths(records.home).buckets / bucket / "bucket.json"
    document, changes = json.loads(file.read_text()), {"public": True, "requester_pays": True}
    file.write_text(json.dumps({**document, "owner": "999999999999", **changes}))
    assert error_code_of(anonymous.get_object, Bucket=bucket, Key="one") == "AccessDenied"
    assert error_code_of(s3.get_object, Bucket=bucket, Key="one") == "AccessDenied"
    assert s3.get_object(Bucket=bucket, Key="one", RequestPayer="requester")["Body"].read() == b"1"
    assert error_code_of(s3.put_object, Bucket=bucket, Key="two", Body=b"") == "AccessDenied"
    assert error_code_of(s3.create_bucket, Bucket=bucket) == "BucketAlreadyExists"


def test_a_bucket_of_another_region_redirects(records: Cloud, bucket: str) -> None:
    s3, far = records.client("s3"), f"far-{bucket[:40]}"
    s3.create_bucket(Bucket=far, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    plain = records.client("s3")
    regions: list[str] = []
    plain.meta.events.register_first(
        "needs-retry.s3.*",
        lambda response, **_: regions.append(
            f"{response[0].status_code} {response[0].headers.get('x-amz-bucket-region')}"
        ),
    )
    plain.head_bucket(Bucket=far)  # boto3 follows
    assert regions == ["301 eu-west-1", "200 eu-west-1"]


def test_unsupported_requests_and_unknown_credentials_are_refused(records: Cloud, bucket: str) -> None:
    s3, target = records.client("s3"), {"Bucket": bucket, "Key": "one"}
    assert error_code_of(s3.copy_object, **target, CopySource=target) == "NotImplemented"
    assert error_code_of(s3.put_object, **target, StorageClass="GLACIER") == "NotImplemented"
    assert error_code_of(s3.put_object, **target, ACL="public-read") == "NotImplemented"
    assert error_code_of(s3.put_object, **target, ContentEncoding="gzip") == "NotImplemented"
    assert error_code_of(s3.delete_object, **target, IfMatch="*") == "NotImplemented"
    assert error_code_of(s3.get_bucket_versioning, Bucket=bucket) == "NotImplemented"
    assert error_code_of(s3.create_bucket, Bucket=bucket) == "BucketAlreadyOwnedByYou"
    assert error_code_of(s3.list_objects_v2, Bucket="no-such-bucket") == "NoSuchBucket"
    wrong, unknown = {"aws_secret_access_key": "x" * 40}, {"aws_access_key_id": "AKIAUNKNOWN"}
    assert error_code_of(records.client("s3", **wrong).list_buckets) == "SignatureDoesNotMatch"
    assert error_code_of(records.client("s3", **unknown).list_buckets) == "InvalidAccessKeyId"
    ends = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 3}}
    assert (
        error_code_of(s3.get_bucket_lifecycle_configuration, Bucket=bucket) == "NoSuchLifecycleConfiguration"
    )
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [ends]})
    [rule] = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert (rule["ID"], rule["Expiration"]) == ("old", {"Days": 3})


def test_the_aws_cli_uploads_and_downloads(records: Cloud, bucket: str, tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": records.info.access_key_id,
        "AWS_SECRET_ACCESS_KEY": records.info.secret_access_key,
        "AWS_DEFAULT_REGION": records.info.region,
        "AWS_ENDPOINT_URL": records.info.endpoint,
    }

    def aws(*arguments: str) -> str:
        command = [Path(sys.executable).with_name("aws"), "s3", *arguments]
        return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout

    body = os.urandom(9 * MB)
    (tmp_path / "one").write_bytes(body)
    aws("cp", str(tmp_path / "one"), f"s3://{bucket}/folder/one")
    assert "folder/one" in aws("ls", "--recursive", f"s3://{bucket}")
    aws("cp", "--recursive", f"s3://{bucket}/folder", str(tmp_path / "back"))
    assert (tmp_path / "back/one").read_bytes() == body


def test_stop_removes_the_buckets(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path, control.start(tmp_path, mode="records"))
    cloud.client("s3").create_bucket(Bucket="short-lived")
    assert cloud.info.node_s3 is None
    control.stop(tmp_path)
    assert not list(tmp_path.rglob("short-lived"))
