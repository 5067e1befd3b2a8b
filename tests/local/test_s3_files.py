"""The files of the local cloud's S3."""

import os
from pathlib import Path

from awsddp.local import control
from awsddp.local.machine import CloudPaths
from tests.support.local_cloud import Cloud
from tests.support.multipart import upload_one_part


def test_files_of_the_local_s3_are_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    paths = CloudPaths(tmp_path)
    paths.buckets.mkdir(mode=0o755)
    umask = os.umask(0)
    try:
        cloud = Cloud(tmp_path, control.start(tmp_path, mode="records"))
    finally:
        os.umask(umask)
    try:
        s3, target = cloud.client("s3"), {"Bucket": "mine", "Key": "one"}
        s3.create_bucket(Bucket="mine")
        s3.put_object(**target, Body=b"1")
        upload_one_part(s3, target, b"part")
        files = [path for folder in (paths.buckets, paths.uploads) for path in (folder, *folder.rglob("*"))]
        modes = {(path.is_dir(), oct(path.stat().st_mode & 0o777)) for path in files}
        assert (modes, len(files)) == ({(True, "0o700"), (False, "0o600")}, 10)
    finally:
        control.stop(tmp_path)
