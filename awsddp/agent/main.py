"""Requests and answers: what a client asks a node about its jobs, over one connection."""

from __future__ import annotations

import base64
import bz2
import json
import os
import sys
import time
import types
from typing import Any, BinaryIO

from awsddp.agent.job_folder import CommandError, Document, JobFolder, folders, read_json
from awsddp.agent.launch import CLAIM
from awsddp.agent.log_stream import MAGIC, follow
from awsddp.agent.messages import KINDS, Follow, State, plain
from awsddp.agent.metrics import metrics

_PACKAGE = __name__.rpartition(".")[0]


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


def _serve(document: Any, out: BinaryIO) -> bool:
    """Answer one request, and return whether it was done."""
    _load(document.pop("modules", None))
    name = document["do"]
    if name not in ("probe", "dial") and f"{_PACKAGE}.probe" in sys.modules:
        sys.modules[f"{_PACKAGE}.probe"].close()
    out.write(MAGIC)
    done = True
    try:
        if name not in KINDS:
            raise CommandError(f"unknown request {name}", kind="usage")
        request = KINDS[name].from_json(document)
        if isinstance(request, Follow):
            follow(request, out)
            return True
        answer = getattr(sys.modules[f"{_PACKAGE}.{request.module}"], name)(request)
    except BrokenPipeError:
        raise
    except CommandError as error:
        answer, done = {"error": error.document}, False
    except OSError as error:
        answer, done = {"error": CommandError(f"the node failed: {error}", kind="node").document}, False
    out.write(json.dumps(plain(answer)).encode() + b"\n")
    out.flush()
    return done


def _load(packed: str | None) -> None:
    """Load the modules that came with a request, as the program itself was loaded."""
    if packed is None:
        return
    for name, source in json.loads(bz2.decompress(base64.b64decode(packed))):
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)


def state(_: State) -> dict[str, list[Document]]:
    """Return the documents of all jobs, of one that runs with the progress of its ranks and what they use."""
    return {"jobs": [_with_metrics(folder) for folder in folders()]}


def _with_metrics(folder: JobFolder) -> Document:
    document = folder.document()
    document.saving = _saving(folder)
    if document.state == "running":
        document.metrics = metrics(folder)
        document.samples = (read_json(folder.samples) or {"ranks": []})["ranks"]
    return document


def _saving(folder: JobFolder) -> dict[str, Any] | None:
    """Return what saving.json says, with `silent_s`, how long ago the saver gave its last sign of life."""
    saving: dict[str, Any] | None = read_json(folder.saving)
    if saving is not None:
        at = saving.pop("at", None)
        silent_s = time.time() - at if isinstance(at, (int, float)) and not saving.get("ended") else 0.0
        saving["silent_s"] = max(0.0, round(silent_s, 1))
    return saving
