"""Uploads in parts."""

from typing import Any


def upload_one_part(s3: Any, target: dict[str, Any], body: bytes) -> dict[str, Any]:
    """Upload one part; return the parameters of CompleteMultipartUpload."""
    begun = s3.create_multipart_upload(**target)["UploadId"]
    sent = s3.upload_part(**target, UploadId=begun, PartNumber=1, Body=body)
    return {
        **target,
        "UploadId": begun,
        "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": sent["ETag"]}]},
    }
