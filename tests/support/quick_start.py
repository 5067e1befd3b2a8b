"""`awsddp` in a process that need not import boto3, paramiko and rich again: forked from one that has them.

awsddp's own modules are imported by each command, as they are by `python -m awsddp`. A command whose
environment differs in what Python reads as it starts is started by Python itself.
"""

import array
import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import botocore.loaders
import botocore.session

LIBRARIES = (
    "boto3",
    "botocore.session",
    "click.shell_completion",
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "msgspec",
    "paramiko",
    "pathspec",
    "rich.live",
    "rich.progress",
    "rich.table",
)
_OF_PYTHON = ("PYTHON", "LANG", "LC_", "TZ", "LD_")
_HERE = dict(os.environ)
_alone = threading.Lock()
_servers: dict[int, socket.socket] = {}
"""That of each process that runs tests, by its id."""


class Started:
    """A command that was started; as subprocess.Popen, its `returncode` is that of its end."""

    def __init__(self, done: int) -> None:
        self._done, self._said = done, b""
        self.returncode: int | None = None
        self.pid = int(self._line(None))

    def _line(self, timeout: float | None) -> bytes:
        ends = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._said:
            left = None if ends is None else max(0.0, ends - time.monotonic())
            if not select.select([self._done], [], [], left)[0]:
                raise subprocess.TimeoutExpired("awsddp", timeout or 0.0)
            self._said += os.read(self._done, 100) or b"-9\n"
        line, _, self._said = self._said.partition(b"\n")
        return line

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended. Raises TimeoutExpired."""
        if self.returncode is None:
            self.returncode = int(self._line(timeout))
            os.close(self._done)
        return self.returncode

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)


def run(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], text: str, timeout: float
) -> "subprocess.CompletedProcess[str]":
    """Carry `awsddp` out as subprocess.run would, with `text` on its stdin. Raises TimeoutExpired."""
    argv = [sys.executable, "-m", "awsddp", *words]
    if not is_as_here(env):
        return subprocess.run(
            argv, cwd=cwd, env=env, input=text, capture_output=True, text=True, timeout=timeout
        )
    pipes = [os.pipe() for _ in range(3)]
    (theirs_in, ours_in), (out, theirs_out), (err, theirs_err) = pipes
    started = start(words, cwd=cwd, env=env, streams=(theirs_in, theirs_out, theirs_err))
    for end in (theirs_in, theirs_out, theirs_err):
        os.close(end)
    writer = threading.Thread(target=_written, args=(ours_in, text.encode()), daemon=True)
    writer.start()
    said: dict[int, bytearray] = {out: bytearray(), err: bytearray()}
    ends = time.monotonic() + timeout
    opened = [out, err]
    while opened:
        ready = select.select(opened, [], [], max(0.0, ends - time.monotonic()))[0]
        if not ready:
            started.kill()
            started.wait()
            raise subprocess.TimeoutExpired(argv, timeout, bytes(said[out]), bytes(said[err]))
        for end in ready:
            if data := os.read(end, 1 << 16):
                said[end] += data
            else:
                opened.remove(end)
                os.close(end)
    shown = [bytes(said[end]).decode().replace("\r\n", "\n") for end in (out, err)]
    return subprocess.CompletedProcess(argv, started.wait(timeout), *shown)


def start(
    words: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    streams: tuple[int, int, int],
    terminal: bool = False,
) -> Started:
    """Start `awsddp` with these as its stdin, stdout and stderr; `terminal`: they are that of a session."""
    ours, theirs = os.pipe()
    asked = json.dumps([list(words), str(cwd), dict(env), terminal]).encode()
    with _alone:
        server = _servers.get(os.getpid()) or _servers.setdefault(os.getpid(), _served())
        rights = array.array("i", [*streams, theirs]).tobytes()
        header = len(asked).to_bytes(8, "big")
        server.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        server.sendall(asked)
    os.close(theirs)
    return Started(ours)


def _written(end: int, data: bytes) -> None:
    with open(end, "wb") as stream:
        try:
            stream.write(data)
            stream.flush()
        except BrokenPipeError:
            return  # who reads no more has ended


def is_as_here(env: Mapping[str, str]) -> bool:
    """Tell whether Python would start alike in this environment and in that of the tests."""

    def read(one: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in one.items() if name.startswith(_OF_PYTHON)}

    return read(env) == read(_HERE)


def _served() -> socket.socket:
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-m", "tests.support.quick_start", str(theirs.fileno())]
    env = {name: value for name, value in _HERE.items() if not name.startswith("AWS_")}
    env |= dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    tree = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(words, cwd=tree, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _serve(own: socket.socket) -> Sequence[str] | None:
    """Fork for each request; return in the child what it is to carry out, and None at the end of all."""
    running: dict[int, int] = {}
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(awake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the tests is theirs
    while True:
        ready = select.select([own, awake], [], [])[0]
        if awake in ready:
            os.read(awake, 1 << 12)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                done = running.pop(ended[0])
                os.write(done, b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
                os.close(done)
        if own not in ready:
            continue
        header, rights, *_ = own.recvmsg(8, socket.CMSG_SPACE(4 * 4))
        if not header:
            return None
        streams = array.array("i")
        streams.frombytes(rights[0][2])
        size, asked = int.from_bytes(header, "big"), b""
        while len(asked) < size:
            asked += own.recv(size - len(asked))
        words, cwd, env, terminal = json.loads(asked)
        if pid := os.fork():
            running[pid] = streams.pop()
            os.write(running[pid], b"%d\n" % pid)
            for end in streams:
                os.close(end)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (*running.values(), streams.pop(), own.fileno(), awake, wake):
            os.close(end)
        own.detach()
        if terminal:
            os.setsid()
            fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
        for number, end in enumerate(streams):
            os.dup2(end, number)
        for end in set(streams):
            os.close(end)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        return list(words)


def _reopened() -> None:
    """Give this process the streams that Python makes as it starts."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        errors = "backslashreplace" if name == "stderr" else old.errors
        stream = open(  # noqa: SIM115
            number, "w" if number else "r", encoding=old.encoding, errors=errors, closefd=False
        )
        stream.reconfigure(line_buffering=name == "stderr" or stream.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _prepare() -> None:
    """Import the libraries, and have botocore read its descriptions of services once for all commands."""
    for library in LIBRARIES:
        importlib.import_module(library)
    models = botocore.loaders.Loader()
    botocore.session.create_loader = lambda path=None: models
    session = botocore.session.Session()
    session.set_credentials("none", "none")
    for service in ("ec2", "ssm", "sts"):
        session.create_client(service, region_name="us-east-1", endpoint_url="http://127.0.0.1:9")
    gc.freeze()


if __name__ == "__main__":
    _prepare()
    found = _serve(socket.socket(fileno=int(sys.argv[1])))
    if found is not None:
        _reopened()
        sys.argv = [str(Path(__file__).parents[2] / "awsddp/__main__.py"), *found]
        runpy.run_module("awsddp", run_name="__main__", alter_sys=True)
