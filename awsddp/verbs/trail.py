"""The audit trail: every call to AWS that was made for a cluster, a line each, in calls.jsonl."""

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from awsddp.private import make_folder, open_to_append

if TYPE_CHECKING:
    from awsddp.aws.session import Call


class Trail:
    """Hears of calls and writes them down in a folder. Secrets were redacted before.

    What is asked before a cluster has its folder is kept, and written once there is one; a call that may have
    changed something makes it. Of a cluster that never comes to be nothing is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()

    def __call__(self, call: "Call") -> None:
        """Write one call down: when, how long, what, with which parameters, AWS's request id, its error."""
        with self._lock, contextlib.suppress(OSError):  # a folder that cannot be written holds no call up
            self._waiting.append(msgspec.json.encode(call, enc_hook=str) + b"\n")
            if call.changes:
                make_folder(self._folder)
            elif not self._folder.is_dir():
                return
            with open_to_append(self._folder / "calls.jsonl") as stream:
                stream.write(b"".join(self._waiting))
            self._waiting.clear()
