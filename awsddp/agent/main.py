"""Serve a client's requests about jobs, over one connection."""

from __future__ import annotations

import base64
import bz2
import json
import os
import sys
import time
import types
from typing import Any, BinaryIO

from awsddp.agent.job_folder import CommandError, Document, JobFolder, list_job_folders, read_json
from awsddp.agent.launch import CLAIM
from awsddp.agent.log_stream import MAGIC, follow
from awsddp.agent.messages import REQUEST_TYPES, Follow, State, to_json_value
from awsddp.agent.metrics import read_metrics

_PACKAGE = __name__.rpartition(".")[0]


def main(stdin: BinaryIO) -> int:
    """Serve each request on stdin (a line with its length, then JSON) until stdin ends.

    Each response on stdout is a line of JSON: {"error": {"message", "why", "kind"}} if the request failed.
    The response to `Follow` consists of frames (log_stream.py). Return the exit status, which is 1 if any
    request failed.
    """
    out = sys.stdout.buffer
    all_done = True
    try:
        while length := stdin.readline():
            all_done = _handle_request(json.loads(stdin.read(int(length))), out) and all_done
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter's flush at exit must not raise
        return 1
    finally:
        CLAIM.release()
    return 0 if all_done else 1


def _handle_request(document: Any, out: BinaryIO) -> bool:
    """Serve one request. Return True if the request succeeded."""
    _load_modules(document.pop("modules", None))
    name = document["do"]
    if name not in ("probe", "dial") and f"{_PACKAGE}.probe" in sys.modules:
        sys.modules[f"{_PACKAGE}.probe"].close()
    out.write(MAGIC)
    is_done = True
    try:
        if name not in REQUEST_TYPES:
            raise CommandError(f"unknown request {name}", kind="usage")
        request = REQUEST_TYPES[name].from_json(document)
        if isinstance(request, Follow):
            follow(request, out)
            return True
        answer = getattr(sys.modules[f"{_PACKAGE}.{request.module}"], name)(request)
    except BrokenPipeError:
        raise
    except CommandError as error:
        answer, is_done = {"error": error.document}, False
    except OSError as error:
        answer, is_done = {"error": CommandError(f"the node failed: {error}", kind="node").document}, False
    out.write(json.dumps(to_json_value(answer)).encode() + b"\n")
    out.flush()
    return is_done


def _load_modules(packed: str | None) -> None:
    """Load the modules that a request contains."""
    if packed is None:
        return
    for name, source in json.loads(bz2.decompress(base64.b64decode(packed))):
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)


def state(_: State) -> dict[str, list[Document]]:
    """Return all jobs' documents. A running job's document includes its ranks' progress and resource use."""
    return {"jobs": [_with_metrics(folder) for folder in list_job_folders()]}


def _with_metrics(folder: JobFolder) -> Document:
    document = folder.document()
    document.saving = _read_saving(folder)
    if document.state == "running":
        document.metrics = read_metrics(folder)
        document.samples = (read_json(folder.samples) or {"ranks": []})["ranks"]
    return document


def _read_saving(folder: JobFolder) -> dict[str, Any] | None:
    """Return saving.json with `silent_s`, the seconds since it was written (0.0: the uploader is done)."""
    saving: dict[str, Any] | None = read_json(folder.saving)
    if saving is not None:
        at = saving.pop("at", None)
        silent_s = time.time() - at if isinstance(at, (int, float)) and not saving.get("ended") else 0.0
        saving["silent_s"] = max(0.0, round(silent_s, 1))
    return saving
