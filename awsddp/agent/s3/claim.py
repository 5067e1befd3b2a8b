"""Before a job that saves to S3 starts: its name there is claimed, with every right that saving needs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.agent.job_folder import NAME
from awsddp.agent.s3.store import Place, Store, node_session

if TYPE_CHECKING:
    from collections.abc import Mapping


_DENIED = ("AccessDenied", "AllAccessDisabled", "403")
_BUSY = ("SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded")
_CLAIM_S = 900.0
"""After what time a name is free again that was claimed for a job that never began."""
_ROLE_PAUSES_S = (0.5, 1.0, 2.0)
"""Between questions for the role: after a token that came too late botocore asks without one, in vain."""
_ROLE_S = 10.0
"""For how long it is asked again: a metadata service that is silent takes 30 s to give up each time."""
_TRIAL = ".awsddp"
"""A small object below the prefix, the same for all jobs."""


def store_of(order: Mapping[str, Any]) -> Store:
    """Return the store that an order names, with the rights of the node's role and no others.

    boto3 lies in ~/awsddp/boto3 where the image's did not do. Raises ImportError where there is none.
    """
    sys.path.insert(0, str(Path.home() / "awsddp" / "boto3"))
    session = node_session()
    chain = session.get_component("credential_provider").providers
    chain[:] = [one for one in chain if one.METHOD == "iam-role"]
    asks_until = time.monotonic() + _ROLE_S
    for pause_s in _ROLE_PAUSES_S:  # botocore keeps what it finds, and asks again where that was nothing
        if session.get_credentials() is not None or time.monotonic() > asks_until:
            break
        time.sleep(pause_s)
    return Store(region=order["region"], endpoint=order["endpoint"], session=session)


def attempt(order: Mapping[str, Any]) -> dict[str, Any]:
    """Claim the name of the order's job at its place, and return what came of it (answers.Tried)."""
    try:
        store = store_of(order)
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
        return _tried(store, Place(*order["place"]), order)
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


def _tried(store: Store, top: Place, order: Mapping[str, Any]) -> dict[str, Any]:
    """Use every right; the name is claimed as the last."""
    region = store.region(top.bucket)
    if region and region != order["region"]:
        return {"code": "region", "what": region}
    at = top.below(order["job"])
    next(store.list(at), None)
    store.write(top, _TRIAL, {})
    _abort_nothing(store, top)
    store.read(top, _TRIAL)
    store.abort(top, over=())
    if _claim(store, at, order):
        return {"code": ""}
    alike = store.folders(top, name=order["job"].rstrip("0123456789"))  # so that the next choice is free
    return {"code": "taken", "names": [one for one in alike if NAME.fullmatch(one)]}


def _claim(store: Store, at: Place, order: Mapping[str, Any]) -> bool:
    """Claim a job's name, which may have been claimed for a job that never began; tell whether it is ours."""
    job = {"job": order["job"], "save": 2, "by": order["by"], "launch": order["launch"]}
    job |= {"state": "claimed", "at": time.time()}
    instead_of = ""
    for _ in range(2):
        if store.write(at, "job.json", job, instead_of=instead_of):
            return True
        found = store.document(at, "job.json")
        try:
            there = found.parse() if found is not None else None
        except ValueError:
            return False
        if found is None or not isinstance(there, dict) or there.get("save") != 2:
            return False
        if there.get("launch") == order["launch"]:  # the reply to the write was lost
            return True
        is_free = there.get("by") == order["by"] or _is_old(there.get("at"))
        if there.get("state") != "claimed" or not is_free:
            return False
        instead_of = found.etag
    return False


def _is_old(claimed_at: object) -> bool:
    return isinstance(claimed_at, (int, float)) and time.time() - claimed_at > _CLAIM_S


def _abort_nothing(store: Store, top: Place) -> None:
    """Give up an upload that there is not, which needs the right all the same. Raises ClientError."""
    from botocore.exceptions import ClientError

    try:
        store.client.abort_multipart_upload(Bucket=top.bucket, Key=top.key(_TRIAL), UploadId="none")
    except ClientError as error:
        if error.response["Error"]["Code"] in _DENIED:
            raise
