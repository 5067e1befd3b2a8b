"""Starts `awsddp` fast: in a fork of a server process that has already imported boto3, paramiko and rich.

Each command imports awsddp's own modules, as `python -m awsddp` does. A command whose environment differs in
variables that Python reads at startup is started as a new Python process.
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
_TEST_ENVIRON = dict(os.environ)
_lock = threading.Lock()
_servers: dict[int, socket.socket] = {}
"""The connection to the server, by the id of the test process."""


class Started:
    """A started command, with the interface of subprocess.Popen."""

    def __init__(self, done: int) -> None:
        self._done, self._buffer = done, b""
        self.returncode: int | None = None
        self.pid = int(self._line(None))

    def _line(self, timeout: float | None) -> bytes:
        ends = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._buffer:
            remaining_s = None if ends is None else max(0.0, ends - time.monotonic())
            if not select.select([self._done], [], [], remaining_s)[0]:
                raise subprocess.TimeoutExpired("awsddp", timeout or 0.0)
            self._buffer += os.read(self._done, 100) or b"-9\n"
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code. Raises TimeoutExpired."""
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
    """Run `awsddp` as subprocess.run does, with `text` on its stdin. Raises TimeoutExpired."""
    argv = [sys.executable, "-m", "awsddp", *words]
    if not has_python_variables_of_tests(env):
        return subprocess.run(
            argv, cwd=cwd, env=env, input=text, capture_output=True, text=True, timeout=timeout
        )
    pipes = [os.pipe() for _ in range(3)]
    (theirs_in, ours_in), (out, theirs_out), (err, theirs_err) = pipes
    started = start(words, cwd=cwd, env=env, streams=(theirs_in, theirs_out, theirs_err))
    for end in (theirs_in, theirs_out, theirs_err):
        os.close(end)
    writer = threading.Thread(target=_write_all, args=(ours_in, text.encode()), daemon=True)
    writer.start()
    output: dict[int, bytearray] = {out: bytearray(), err: bytearray()}
    ends = time.monotonic() + timeout
    opened = [out, err]
    while opened:
        ready = select.select(opened, [], [], max(0.0, ends - time.monotonic()))[0]
        if not ready:
            started.kill()
            started.wait()
            raise subprocess.TimeoutExpired(argv, timeout, bytes(output[out]), bytes(output[err]))
        for end in ready:
            if data := os.read(end, 1 << 16):
                output[end] += data
            else:
                opened.remove(end)
                os.close(end)
    shown = [bytes(output[end]).decode().replace("\r\n", "\n") for end in (out, err)]
    return subprocess.CompletedProcess(argv, started.wait(timeout), *shown)


def start(
    words: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    streams: tuple[int, int, int],
    terminal: bool = False,
) -> Started:
    """Start `awsddp` with `streams` as stdin, stdout and stderr; with `terminal` in a session of its own."""
    ours, theirs = os.pipe()
    payload = json.dumps([list(words), str(cwd), dict(env), terminal]).encode()
    with _lock:
        server = _servers.get(os.getpid()) or _servers.setdefault(os.getpid(), _start_server())
        rights = array.array("i", [*streams, theirs]).tobytes()
        header = len(payload).to_bytes(8, "big")
        server.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        server.sendall(payload)
    os.close(theirs)
    return Started(ours)


def _write_all(end: int, data: bytes) -> None:
    with open(end, "wb") as stream:
        try:
            stream.write(data)
            stream.flush()
        except BrokenPipeError:
            return  # the command has ended


def has_python_variables_of_tests(env: Mapping[str, str]) -> bool:
    """Return True if this environment and that of the tests have equal variables of Python."""

    def select_variables(environ: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environ.items() if name.startswith(_OF_PYTHON)}

    return select_variables(env) == select_variables(_TEST_ENVIRON)


def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-m", "tests.support.quick_start", str(theirs.fileno())]
    env = {name: value for name, value in _TEST_ENVIRON.items() if not name.startswith("AWS_")}
    env |= dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    tree = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(words, cwd=tree, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _serve(connection: socket.socket) -> Sequence[str] | None:
    """Fork for each request; return the arguments in the child, and None when the test process has closed."""
    running: dict[int, int] = {}
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(awake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process
    while True:
        ready = select.select([connection, awake], [], [])[0]
        if awake in ready:
            os.read(awake, 1 << 12)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                done = running.pop(ended[0])
                os.write(done, b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
                os.close(done)
        if connection not in ready:
            continue
        header, rights, *_ = connection.recvmsg(8, socket.CMSG_SPACE(4 * 4))
        if not header:
            return None
        streams = array.array("i")
        streams.frombytes(rights[0][2])
        size, payload = int.from_bytes(header, "big"), b""
        while len(payload) < size:
            payload += connection.recv(size - len(payload))
        words, cwd, env, terminal = json.loads(payload)
        if pid := os.fork():
            running[pid] = streams.pop()
            os.write(running[pid], b"%d\n" % pid)
            for end in streams:
                os.close(end)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (*running.values(), streams.pop(), connection.fileno(), awake, wake):
            os.close(end)
        connection.detach()
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


def _reopen_streams() -> None:
    """Open the standard streams as Python does at startup."""
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
    """Import the libraries, and load botocore's service descriptions once for all commands."""
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
    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        _reopen_streams()
        sys.argv = [str(Path(__file__).parents[2] / "awsddp/__main__.py"), *arguments]
        runpy.run_module("awsddp", run_name="__main__", alter_sys=True)
