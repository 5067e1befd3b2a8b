"""Claim a job's name in S3 before the job starts, and check all permissions that uploading needs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.agent.job_folder import NAME
from awsddp.agent.s3.store import S3Uri, Store, node_session

if TYPE_CHECKING:
    from collections.abc import Mapping


_DENIED = ("AccessDenied", "AllAccessDisabled", "403")
_BUSY = ("SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded")
_CLAIM_S = 900.0
"""How long a name remains claimed by a job that never starts."""
_ROLE_PAUSES_S = (0.5, 1.0, 2.0)
"""Pauses between requests for the role. If the token is late, botocore sends requests without a token."""
_ROLE_S = 10.0
"""How long to retry; each request to a metadata service that does not respond takes 30 s to time out."""
_TRIAL = ".awsddp"
"""The key of a small test object under the prefix; all jobs use the same key."""


def open_store(order: Mapping[str, Any]) -> Store:
    """Return the store for an order, with only the permissions of the node's role.

    boto3 is in ~/awsddp/boto3 if the image's boto3 is missing or too old. Raises ImportError if no usable
    boto3 is installed.
    """
    sys.path.insert(0, str(Path.home() / "awsddp" / "boto3"))
    session = node_session()
    providers = session.get_component("credential_provider").providers
    providers[:] = [provider for provider in providers if provider.METHOD == "iam-role"]
    deadline = time.monotonic() + _ROLE_S
    for pause_s in _ROLE_PAUSES_S:  # botocore caches credentials, and requests missing ones again
        if session.get_credentials() is not None or time.monotonic() > deadline:
            break
        time.sleep(pause_s)
    return Store(region=order["region"], endpoint=order["endpoint"], session=session)


def try_claim(order: Mapping[str, Any]) -> dict[str, Any]:
    """Claim the order's job name at its S3 URI, and return the outcome (`NameClaimResult`)."""
    try:
        store = open_store(order)
    except ImportError as error:
        return {"code": "boto3", "said": str(error)}
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectTimeoutError,
        EndpointConnectionError,
        NoCredentialsError,
    )

    try:
        return _claim_with_checks(store, S3Uri(*order["place"]), order)
    except NoCredentialsError as error:
        return {"code": "role", "said": str(error)}
    except (EndpointConnectionError, ConnectTimeoutError) as error:
        return {"code": "unreachable", "said": str(error)}
    except BotoCoreError as error:
        return {"code": "throttled", "said": str(error)}
    except ClientError as error:
        code, status = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
        kind = "right" if code in _DENIED else "bucket" if code in ("404", "NoSuchBucket") else "other"
        if status >= 500 or code in _BUSY:
            kind = "throttled"
        right = error.operation_name.replace("ListObjectsV2", "ListBucket")
        return {"code": kind, "what": f"s3:{right}", "said": str(error)}


def _claim_with_checks(store: Store, top: S3Uri, order: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request for each needed permission, then claim the name, and return the outcome."""
    region = store.get_region(top.bucket)
    if region and region != order["region"]:
        return {"code": "region", "what": region}
    job_uri = top.join(order["job"])
    next(store.list(job_uri), None)
    store.write(top, _TRIAL, {})
    _check_abort(store, top)
    store.read(top, _TRIAL)
    store.abort(top, ended_jobs=())
    if _claim(store, job_uri, order):
        return {"code": ""}
    similar_names = store.list_folders(
        top, name=order["job"].rstrip("0123456789")
    )  # the client picks a free name
    return {"code": "taken", "names": [name for name in similar_names if NAME.fullmatch(name)]}


def _claim(store: Store, job_uri: S3Uri, order: Mapping[str, Any]) -> bool:
    """Claim a job's name, even from a job that never started. Return True if the claim succeeded."""
    job = {"job": order["job"], "save": 2, "by": order["by"], "launch": order["launch"]}
    job |= {"state": "claimed", "at": time.time()}
    instead_of = ""
    for _ in range(2):
        if store.write(job_uri, "job.json", job, instead_of=instead_of):
            return True
        document = store.document(job_uri, "job.json")
        try:
            holder = document.parse() if document is not None else None
        except ValueError:
            return False
        if document is None or not isinstance(holder, dict) or holder.get("save") != 2:
            return False
        if holder.get("launch") == order["launch"]:  # our write succeeded, but its response was lost
            return True
        is_free = holder.get("by") == order["by"] or _is_old(holder.get("at"))
        if holder.get("state") != "claimed" or not is_free:
            return False
        instead_of = document.etag
    return False


def _is_old(claimed_at: object) -> bool:
    return isinstance(claimed_at, (int, float)) and time.time() - claimed_at > _CLAIM_S


def _check_abort(store: Store, top: S3Uri) -> None:
    """Check the permission to abort uploads by aborting an upload that does not exist. Raises ClientError."""
    from botocore.exceptions import ClientError

    try:
        store.client.abort_multipart_upload(Bucket=top.bucket, Key=top.key(_TRIAL), UploadId="none")
    except ClientError as error:
        if error.response["Error"]["Code"] in _DENIED:
            raise
