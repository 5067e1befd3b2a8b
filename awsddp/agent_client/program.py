"""The program that travels to a node: the modules of awsddp/agent as one source."""

import bz2
import functools
import json
import re
from pathlib import Path

from awsddp import agent

# The modules of the node's program, each after those that it imports; the last one has main().
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
# Those of agent/s3/uploader.py, which runs in a Python of its own.
UPLOADER = (
    *("messages", "diagnosis.job_causes", "job_folder", "s3.checkpoints", "file_tree", "manifest"),
    *("s3.store", "s3.list_pages", "s3.checkpoint_index", "s3.claim", "s3.uploader"),
)
_PACKAGE = "awsddp.agent"
# The node needs no copy of the program, so that it cannot have an old one: the source comes first on stdin.
_BOOT = """\
import bz2, json, sys, types
stdin = sys.stdin.buffer
for name, source in json.loads(bz2.decompress(stdin.read(int(stdin.readline())))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
sys.exit(module.main(stdin))
"""
# Docstrings and comments stay here; their lines do not, so that a traceback names the right one.
_NOT_SENT = re.compile(r'^( *"")".*?"""$|^ *#.*?$', re.MULTILINE | re.DOTALL)


@functools.cache
def program() -> tuple[list[str], bytes]:
    """Return the node's program: its remote command (to be quoted word by word) and the beginning of stdin.

    Then come messages, one for each request. The command is the same for all: nothing of the user's is ever
    part of it.
    """
    return ["python3", "-I", "-c", _BOOT], part(pack(_MODULES))


def node_program(python: str, modules: tuple[str, ...], document: object) -> tuple[list[str], bytes]:
    """Return what runs a program of its own on a node with this interpreter, as `program`.

    The last of the modules has main(), which reads `document`.
    """
    return [python, "-I", "-c", _BOOT], part(pack(modules)) + part(json.dumps(document).encode())


@functools.cache
def pack(modules: tuple[str, ...]) -> bytes:
    return bz2.compress(json.dumps([(f"{_PACKAGE}.{name}", source_of(name)) for name in modules]).encode())


def source_of(name: str) -> str:
    """Return the source of a module of the agent, such as "s3.store", without docstrings and comments."""
    source = Path(agent.__file__).parent.joinpath(*name.split(".")).with_suffix(".py").read_text("utf-8")
    return _NOT_SENT.sub(lambda found: (found[1] or "") + "\n" * found[0].count("\n"), source)


def part(data: bytes) -> bytes:
    return b"%d\n%s" % (len(data), data)
