"""Requests and answers: what a client asks a node about its jobs, over one connection."""

from __future__ import annotations

import base64
import bz2
import json
import os
import signal
import sys
import time
import types
from typing import Any, BinaryIO

from awsddp.jobs.supervisor.claim import CLAIM, claim
from awsddp.jobs.supervisor.folder import FINAL, CommandError, JobFolder, folders, read_json, write_json
from awsddp.jobs.supervisor.follow import follow
from awsddp.jobs.supervisor.job_causes import cause_of_node
from awsddp.jobs.supervisor.launch import launch, slots
from awsddp.jobs.supervisor.manifest import hashes, manifest
from awsddp.jobs.supervisor.metrics import metrics
from awsddp.jobs.supervisor.peers import report_lost
from awsddp.jobs.supervisor.wire import MAGIC

_CANCEL_SECONDS = 30.0  # beyond the grace, until everything must be gone
_LOST_SECONDS = 5.0
_PROBE = "awsddp.jobs.supervisor.probe"
_PROBES = ("probe", "dial")


def main(stdin: BinaryIO) -> int:
    """Answer on stdout each request that comes (a line with its length, then JSON), until stdin ends.

    An answer is a line of JSON, {"error": {"message", "why", "kind"}} where it cannot be done; that of follow
    is frames. Return the exit status: 1 where anything could not be done.
    """
    out = sys.stdout.buffer
    done = True
    try:
        while length := stdin.readline():
            done = _serve(json.loads(stdin.read(int(length))), out) and done
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's last flush says nothing
        return 1
    finally:
        CLAIM.release()
    return 0 if done else 1


def _serve(request: dict[str, Any], out: BinaryIO) -> bool:
    """Answer one request, and return whether it was done."""
    _load(request.pop("modules", None))
    if request["do"] not in _PROBES and _PROBE in sys.modules:
        sys.modules[_PROBE].close()
    out.write(MAGIC)
    try:
        if request["do"] == "follow":
            follow(JobFolder(request["job"]), request, out)
            return True
        answer = _answer(request)
    except BrokenPipeError:
        raise
    except CommandError as error:
        answer = {"error": error.document}
    except OSError as error:
        answer = {"error": {"message": f"the node failed: {error}", "why": "", "kind": "node"}}
    out.write(json.dumps(answer).encode() + b"\n")
    out.flush()
    return "error" not in answer


def _load(packed: str | None) -> None:
    """Load the modules that came with a request, as the program itself was loaded."""
    if packed is None:
        return
    for name, source in json.loads(bz2.decompress(base64.b64decode(packed))):
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    kind = request["do"]
    if kind == "claim":
        return claim(request)
    if kind == "unclaim":
        CLAIM.release()
        return {"claimed": False, "free_s": 0.0}
    if kind == "launch":
        return launch(request)
    if kind == "state":
        return {"jobs": [_with_metrics(folder) for folder in folders()]}
    if kind == "slots":
        return slots(request["ports"], request["gpus"])
    if kind == "manifest":
        return manifest(JobFolder(request["job"]), request)
    if kind == "hashes":
        return hashes(request["paths"])
    if kind == "stacks":
        from awsddp.jobs.supervisor.stacks import stacks

        return stacks(JobFolder(request["job"]))
    if kind in _PROBES:
        answer: dict[str, Any] = getattr(sys.modules[_PROBE], kind)(request)
        return answer
    if kind == "cancel":
        return _cancel(JobFolder(request["job"]), request["grace"], request["launch"])
    if kind == "lost":
        return {"heard": _lost(JobFolder(request["job"]), request["node"], request["why"], request["kind"])}
    raise CommandError(f"unknown request {kind}", kind="usage")


def _with_metrics(folder: JobFolder) -> dict[str, Any]:
    """Return the document of a job, while it runs with the progress of its ranks and what they use."""
    document = folder.document()
    if document["state"] != "running":
        return document
    samples = (read_json(folder.samples) or {"ranks": []})["ranks"]
    return {**document, "metrics": metrics(folder), "samples": samples}


def _cancel(folder: JobFolder, grace: float | None, launch: str | None) -> dict[str, Any]:
    """End a job that runs, and return its document when it has ended. One that has ended is left as it is.

    So is one that was not launched by `launch`, where that is given.
    """
    document = folder.document()
    mine = launch in (None, folder.request().get("launch"))
    if mine:
        seconds = folder.request()["grace"] if grace is None else grace
        cause = cause_of_node(folder.request(), None, "cancelled")
        if not _ask_to_end(folder, {"state": "cancelled", "grace": seconds, "cause": cause}):
            return folder.document()
        end = time.monotonic() + seconds + _CANCEL_SECONDS
        while time.monotonic() < end and document["state"] not in FINAL:
            time.sleep(0.05)
            document = folder.document()
    return document


def _lost(folder: JobFolder, node: int, why: str, kind: str) -> bool:
    """Tell the first node that `node` is lost; without the first node this one ends its part of the job."""
    request = folder.request()
    if node != request["nodes"][0]["node"]:
        return report_lost(request, node, why, kind=kind, seconds=_LOST_SECONDS)
    return _ask_to_end(folder, {"state": "failed", "lost": why, "kind": kind})


def _ask_to_end(folder: JobFolder, how: dict[str, Any]) -> bool:
    """Have the supervisor of a job that runs end it, and return whether there is one."""
    document = folder.document()
    if document["state"] in FINAL or "pid" not in document:
        return False
    write_json(folder.cancel, how)
    try:
        os.kill(document["pid"], signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True
