"""Pack the modules in awsddp/agent into the program that is sent to nodes."""

import bz2
import functools
import json
import re
from pathlib import Path

from awsddp import agent

# The agent's modules in import order; the last one has main().
_MODULES = (
    "messages",
    "diagnosis.job_causes",
    "job_folder",
    "peer_connection",
    "peers",
    "log_stream",
    "file_tree",
    "manifest",
    "metrics",
    "launch",
    "cancel",
    "main",
)
# The modules for agent/s3/uploader.py, which runs in a separate Python.
UPLOADER_MODULES = (
    *("messages", "diagnosis.job_causes", "job_folder", "s3.checkpoints", "file_tree", "manifest"),
    *("shutdown", "s3.store", "s3.list_pages", "s3.checkpoint_index", "s3.claim", "s3.uploader"),
)
# The modules for agent/notify/notifier.py.
NOTIFIER_MODULES = (
    *("messages", "diagnosis.job_causes", "job_folder", "shutdown", "notify.events", "notify.post"),
    *("notify.outbox", "notify.pending", "notify.notifier"),
)
_PACKAGE = "awsddp.agent"
# Nodes store no copy of the program, because a copy could be outdated. The source is sent first on stdin.
_BOOT = """\
import bz2, json, sys, types
stdin = sys.stdin.buffer
for name, source in json.loads(bz2.decompress(stdin.read(int(stdin.readline())))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
sys.exit(module.main(stdin))
"""
# Docstrings and comments are replaced by empty lines, so that tracebacks have the right line numbers.
_NOT_SENT = re.compile(r'^( *"")".*?"""$|^ *#.*?$', re.MULTILINE | re.DOTALL)


@functools.cache
def agent_program() -> tuple[list[str], bytes]:
    """Return the agent's remote command (not yet quoted) and the beginning of its stdin.

    The stdin continues with messages, one per request. The command is constant and contains no user data.
    """
    return ["python3", "-I", "-c", _BOOT], encode_part(pack(_MODULES))


def node_program(python: str, modules: tuple[str, ...], document: object) -> tuple[list[str], bytes]:
    """Return the remote command (not yet quoted) and the stdin of a separate program on a node.

    `python` is the program's interpreter. The last of `modules` has main(), which reads `document`.
    """
    return [python, "-I", "-c", _BOOT], encode_part(pack(modules)) + encode_part(
        json.dumps(document).encode()
    )


@functools.cache
def pack(modules: tuple[str, ...]) -> bytes:
    return bz2.compress(
        json.dumps([(f"{_PACKAGE}.{name}", module_source(name)) for name in modules]).encode()
    )


def module_source(name: str) -> str:
    """Return the source of an agent module, such as "s3.store", without docstrings and comments."""
    source = Path(agent.__file__).parent.joinpath(*name.split(".")).with_suffix(".py").read_text("utf-8")
    return _NOT_SENT.sub(lambda match: (match[1] or "") + "\n" * match[0].count("\n"), source)


def encode_part(data: bytes) -> bytes:
    return b"%d\n%s" % (len(data), data)
