"""What the cloud knows, on the disk: written before a reply that changed it, read when the daemon starts."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moto
from moto.backends import get_backend
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends

from awsddp.errors import LocalCloudError

BACKENDS: dict[str, Any] = {name: get_backend(name) for name in ("ec2", "iam", "kms", "sts")}
KEPT = 1000  # so many states are remembered


@dataclass
class Store:
    """The pickled state in one file."""

    path: Path
    living: Path
    _past: list[tuple[float, bytes]] | None = None

    def remember(self, wanted: bool) -> None:
        """From now on keeps what was, for `as_it_was`; or forgets it."""
        if wanted and self._past is None:
            self._past = [(time.time(), self._pickled())]
        elif not wanted:
            self._past = None

    @contextmanager
    def as_it_was(self, region: str, *, seconds: float) -> Iterator[None]:
        """Within it EC2 is in this region as it was so long ago, or when it was first kept."""
        kept = [data for moment, data in self._past or () if moment <= time.time() - seconds]
        data = kept[-1] if kept else self._past[0][1] if self._past else self._pickled()
        regions = ec2_backends[DEFAULT_ACCOUNT_ID]
        now = regions[region]
        then = pickle.loads(data)["backends"]["ec2"].get((DEFAULT_ACCOUNT_ID, region), now)
        dict.__setitem__(regions, region, then)
        try:
            yield
        finally:
            dict.__setitem__(regions, region, now)

    def load(self) -> None:
        """Puts what was saved back into moto; nothing saved is fine.

        :raises LocalCloudError: the file cannot be read, or another version of moto wrote it.
        """
        if not self.path.exists():
            return
        try:
            saved = pickle.loads(self.path.read_bytes())
            version = saved["moto"]
        except Exception as error:  # a cut or foreign pickle may raise anything
            raise _unusable(f"{self.path} cannot be read: {type(error).__name__}: {error}") from error
        if version != moto.__version__:
            raise _unusable(f"it was made with moto {version}, and moto {moto.__version__} is installed")
        for service, regions in saved["backends"].items():
            for (account, region), backend in regions.items():
                dict.__setitem__(BACKENDS[service][account], region, backend)

    def save(self) -> None:
        """Writes everything down; when it returns a power cut loses nothing."""
        data = self._pickled()
        if self._past is not None:
            self._past = [*self._past[-KEPT:], (time.time(), data)]
        backends: list[Any] = [backend for _, _, backend in ec2_backends.iter_backends()]
        if alive := any(one.state != "terminated" for each in backends for one in each.all_instances()):
            self.living.touch()
        new = self.path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.path)
        if not alive:
            self.living.unlink(missing_ok=True)

    def _pickled(self) -> bytes:
        regions = {
            service: {(account, region): backend for account, region, backend in backends.iter_backends()}
            for service, backends in BACKENDS.items()
        }
        return pickle.dumps({"moto": moto.__version__, "backends": regions}, pickle.HIGHEST_PROTOCOL)

    def size(self) -> int:
        """How many back ends of EC2 there are: a read makes that of a region, with its VPC, on first use."""
        return sum(1 for _ in ec2_backends.iter_backends())


def _unusable(why: str) -> LocalCloudError:
    return LocalCloudError(
        "the local cloud's state cannot be used", why=why, next="awsddp local stop   # it ends all instances"
    )
