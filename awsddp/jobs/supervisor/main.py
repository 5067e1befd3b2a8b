"""One request, one answer: what a client asks a node about its jobs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any, BinaryIO

from awsddp.jobs.supervisor.folder import FINAL, CommandError, JobFolder, folders, write_json
from awsddp.jobs.supervisor.follow import follow
from awsddp.jobs.supervisor.launch import launch, slots
from awsddp.jobs.supervisor.manifest import manifest
from awsddp.jobs.supervisor.wire import MAGIC

_CANCEL_SECONDS = 30.0  # beyond the grace, until everything must be gone


def main(stdin: BinaryIO) -> int:
    """Read a request (a line with its length, then JSON) and answer on stdout. Return the exit status.

    The answer is one JSON object, {"error": {"message", "why", "kind"}} where it cannot be done; that of
    follow is frames.
    """
    request = json.loads(stdin.read(int(stdin.readline())))
    out = sys.stdout.buffer
    out.write(MAGIC)
    try:
        if request["do"] == "follow":
            follow(JobFolder(request["job"]), request["offsets"], out, to_the_end=request["to_the_end"])
            return 0
        answer = _answer(request)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's last flush says nothing
        return 1
    except CommandError as error:
        answer = {"error": error.document}
    except OSError as error:
        answer = {"error": {"message": f"the node could not do it: {error}", "why": "", "kind": "node"}}
    out.write(json.dumps(answer).encode() + b"\n")
    out.flush()
    return 1 if "error" in answer else 0


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    kind = request["do"]
    if kind == "launch":
        return launch(request)
    if kind == "state":
        chosen = folders() if request["job"] is None else [JobFolder(request["job"])]
        return {"jobs": [folder.document() for folder in chosen]}
    if kind == "slots":
        return slots(request["ports"])
    if kind == "manifest":
        return manifest(JobFolder(request["job"]))
    if kind == "cancel":
        return _cancel(JobFolder(request["job"]), request["grace"])
    raise CommandError(f"the node does not know how to {kind}", kind="usage")


def _cancel(folder: JobFolder, grace: float | None) -> dict[str, Any]:
    """End a job that runs, and return its document when it has ended. One that has ended is left as it is."""
    document = folder.document()
    if document["state"] not in FINAL and "pid" in document:
        seconds = folder.request()["grace"] if grace is None else grace
        write_json(folder.cancel, {"state": "cancelled", "grace": seconds})
        try:
            os.kill(document["pid"], signal.SIGTERM)
        except ProcessLookupError:
            return folder.document()
        end = time.monotonic() + seconds + _CANCEL_SECONDS
        while time.monotonic() < end and document["state"] not in FINAL:
            time.sleep(0.05)
            document = folder.document()
    return document
