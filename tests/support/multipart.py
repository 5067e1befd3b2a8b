"""Uploads in parts."""

from typing import Any


def in_parts(s3: Any, named: dict[str, Any], body: bytes) -> dict[str, Any]:
    """What completes an upload of one part."""
    begun = s3.create_multipart_upload(**named)["UploadId"]
    sent = s3.upload_part(**named, UploadId=begun, PartNumber=1, Body=body)
    return {
        **named,
        "UploadId": begun,
        "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": sent["ETag"]}]},
    }
