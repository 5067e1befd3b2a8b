"""The audit trail: every call to AWS that was made for a cluster, a line each, in calls.jsonl."""

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import msgspec

from awsddp.state import Folder

if TYPE_CHECKING:
    from awsddp.aws.session import Call


class Trail:
    """Hears of calls and writes them down. Secrets were redacted before.

    What is asked before a cluster has a folder is kept, and written once there is one; of a cluster that
    never comes to be nothing is written.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()

    def __call__(self, call: "Call") -> None:
        """Write one call down: when, how long, what, with which parameters, AWS's request id, its error."""
        with self._lock:
            self._waiting.append(msgspec.json.encode(call, enc_hook=str) + b"\n")
            if not self._folder.path.is_dir():
                return
            path = self._folder.path / "calls.jsonl"
            with contextlib.suppress(OSError):  # a folder that cannot be written holds no call up
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                with os.fdopen(descriptor, "ab") as stream:
                    stream.write(b"".join(self._waiting))
                self._waiting.clear()
