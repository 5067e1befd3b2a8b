"""Before a job that saves to S3 starts: its name there is claimed, with every right that saving needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.jobs.supervisor.folder import NAME
from awsddp.jobs.supervisor.objects import Place, Store, node_session

if TYPE_CHECKING:
    from collections.abc import Mapping


_DENIED = ("AccessDenied", "AllAccessDisabled", "403")
_TRIAL = ".awsddp"
"""A small object below the prefix, the same for all jobs."""


def store_of(order: Mapping[str, Any]) -> Store:
    """Return the store that an order names, with the rights of the node's role and no others.

    boto3 may lie in ~/awsddp/boto3. Raises ImportError where there is none.
    """
    sys.path.append(str(Path.home() / "awsddp" / "boto3"))
    session = node_session()
    chain = session.get_component("credential_provider").providers
    chain[:] = [one for one in chain if one.METHOD == "iam-role"]
    return Store(region=order["region"], endpoint=order["endpoint"], session=session)


def attempt(order: Mapping[str, Any]) -> dict[str, Any]:
    """Claim the name of the order's job at its place, and return what came of it (answers.Tried)."""
    try:
        store = store_of(order)
    except ImportError as error:
        return {"code": "boto3", "said": str(error)}
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    trial = _Trial(store, order)
    try:
        return trial.run()
    except NoCredentialsError as error:
        return {"code": "role", "said": str(error)}
    except BotoCoreError as error:
        return {"code": "unreachable", "said": str(error)}
    except ClientError as error:
        code = error.response["Error"]["Code"]
        kind = "right" if code in _DENIED else "bucket" if code in ("404", "NoSuchBucket") else "other"
        return {"code": kind, "what": trial.right, "said": str(error)}


class _Trial:
    def __init__(self, store: Store, order: Mapping[str, Any]) -> None:
        self._store, self._order = store, order
        self._top = Place(*order["place"])
        self._at = self._top.below(order["job"])
        self.right = "s3:ListBucket"

    def run(self) -> dict[str, Any]:
        """Use every right; the name is claimed as the last."""
        region = self._store.region(self._top.bucket)
        if region and region != self._order["region"]:
            return {"code": "region", "what": region}
        next(self._store.list(self._at), None)
        self._write_and_read()
        if self._claimed_by() is not None:
            return self._taken()
        self._store.abort(self._top, over=())
        job = {"job": self._order["job"], "save": 1, "launch": self._order["launch"], "state": "claimed"}
        self._store.write(self._at, "job.json", {**job, "checkpoint": None}, new=True)
        # A put whose reply was lost is refused when it is sent again: what is there tells.
        return {"code": ""} if self._claimed_by() == self._order["launch"] else self._taken()

    def _claimed_by(self) -> str | None:
        found = self._store.read(self._at, "job.json")
        return None if found is None else str(found.get("launch"))

    def _write_and_read(self) -> None:
        self.right = "s3:PutObject"
        self._store.write(self._top, _TRIAL, {})
        self.right = "s3:AbortMultipartUpload"
        self._abort_nothing()
        self.right = "s3:GetObject"
        self._store.read(self._top, _TRIAL)

    def _abort_nothing(self) -> None:
        """Give up an upload that there is not, which needs the right all the same."""
        from botocore.exceptions import ClientError

        named = {"Bucket": self._top.bucket, "Key": self._top.key(_TRIAL), "UploadId": "none"}
        try:
            self._store.client.abort_multipart_upload(**named)
        except ClientError as error:
            if error.response["Error"]["Code"] in _DENIED:
                raise

    def _taken(self) -> dict[str, Any]:
        """Answer with the names there that begin alike, so that the next choice is free."""
        self.right = "s3:ListBucket"
        stem = self._order["job"].rstrip("0123456789")
        pages = self._store.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._top.bucket, Prefix=self._top.key(stem), Delimiter="/"
        )
        found = [one["Prefix"][:-1] for page in pages for one in page.get("CommonPrefixes", ())]
        names = [path.rpartition("/")[2] for path in found]
        return {"code": "taken", "names": [one for one in names if NAME.fullmatch(one)]}
