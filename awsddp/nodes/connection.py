"""One SSH connection to one node: strict about its host key, patient while it boots, clear when it fails."""

import contextlib
import errno
import itertools
import logging
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import paramiko

from awsddp.errors import ConfigError
from awsddp.model.events import Event, OnEvent
from awsddp.nodes import hostkeys
from awsddp.nodes.login import Endpoint, Jump, Line, Login
from awsddp.nodes.node_failures import NodeFailure, find_program, tail
from awsddp.util.format import node_name
from awsddp.util.parallel import ignore, soon

# paramiko logs each failed handshake; what matters of it is in our own errors.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

_DIAL_S = 4.0  # a machine that is not up yet drops packets: better dial anew than wait for TCP's slow repeats
_HANDSHAKE_S = 15.0
_KEEPALIVE_S = 10
_UNANSWERED_MS = 30_000
_EARLY_S = 15.0
_LOGIN_PATIENCE_S = 5.0  # at boot sshd may answer a moment before the account is there
# sshd 9.8 and later adds 5 s of penalty per login that PAM refuses, and drops whoever has more than 15 s:
# PerSourcePenalties in https://man.openbsd.org/sshd_config. With these pauses, then 5 s, it is at most 14 s.
_CLOSED_PAUSES_S = (1.0, 2.0, 3.0)
_LAST_CLOSED_PAUSE_S = 5.0
_BOOT_KEY_PAUSE_S = 1.0  # each connection that ends before a login is 1 s of penalty
_FORWARDING = (
    "awsddp exec -- grep -riE 'TcpForwarding|PermitListen|DisableForwarding' /etc/ssh   # what forbids it\n"
    "-o env.packages_from=node   # where nodes have internet"
)
_WINDOW = 8 * 2**20  # bytes in flight: 2 MiB, the default, holds a log to 10 MB/s at 200 ms
_FORWARD_WINDOW = 64 * 1024  # what a node sends ahead over each of many connections: requests, no logs


@dataclass(frozen=True, kw_only=True)
class Connection:
    """An open, verified, logged-in transport over `line`; `host_key` is the public key that verified it."""

    endpoint: Endpoint
    line: Line
    transport: paramiko.Transport
    host_key: str
    channels: "SimpleQueue[Future[paramiko.Channel]]" = field(default_factory=SimpleQueue, repr=False)

    def __post_init__(self) -> None:
        self._open_ahead()

    def open_channel(self) -> paramiko.Channel:
        """Return a channel for a command: one is always opened ahead, which saves it a round trip.

        Raises SSHException.
        """
        channel = self.channels.get()
        self._open_ahead()
        return channel.result()

    def _open_ahead(self) -> None:
        self.channels.put(soon(self.transport.open_session, window_size=_WINDOW))

    def forward(self, serve: Callable[[paramiko.Channel], None]) -> int:
        """Listen on a port of the node's loopback interface, and return it; `serve` gets each connection.

        It runs on the connection's own thread. What the node sends ahead is held in memory, so that a channel
        takes little of it. Raises NodeFailure.
        """
        self.transport.default_window_size = _FORWARD_WINDOW
        try:
            return self.transport.request_port_forward("127.0.0.1", 0, lambda channel, *_: serve(channel))
        except (paramiko.SSHException, OSError, EOFError) as error:
            if not self.transport.is_active():
                raise self.endpoint.failure("lost", "the connection was lost", str(error)) from error
            raise self.endpoint.failure(
                "command", "its sshd forwards no connections", str(error), _FORWARDING
            ) from error

    def end_forward(self, port: int) -> None:
        """Stop listening on a port, without waiting for the node."""
        self.transport.default_window_size = _WINDOW
        with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
            self.transport.global_request("cancel-tcpip-forward", ("127.0.0.1", port), wait=False)

    def drop(self) -> None:
        """Cut the connection without waiting for anything: whoever reads or writes it is woken."""
        with contextlib.suppress(OSError):  # it may be cut already
            self.line.socket.shutdown(socket.SHUT_RDWR)
        self.transport.close()
        self.line.close()


Preconnect = dict[Endpoint, Future[Connection]]
"""Connections that are being opened, by endpoint; who takes one removes it."""


def load_key(path: Path) -> paramiko.PKey:
    """Return the login key in the file `path`. Raises ConfigError."""
    try:
        return paramiko.PKey.from_path(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"login key not found: {path}",
            "only the machine that made the cluster has it",
            "awsddp down   # works without it",
        ) from error
    except (OSError, ValueError, TypeError, paramiko.SSHException) as error:
        raise ConfigError(f"cannot use the login key {path}", str(error)) from error


def check_own_key(path: Path, *, name: str, public: str) -> None:
    """Look whether `access.key_file` can be used, and is the private half of the key pair `name`.

    `public` is its public half as EC2 has it, "" where that is not told. Raises ConfigError.
    """
    place, file = f"access.key_file: {path}", shlex.quote(str(path))
    program = find_program("ssh-keygen", f"it checks {place}", "install openssh-client")
    read = subprocess.run(
        [program, "-y", "-P", "", "-f", path], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if read.returncode != 0:
        raise ConfigError(
            f"{place} cannot be used as the private half of {name}",
            tail(read.stderr),
            f"chmod 600 {file}   # only you may be able to read it\n"
            f"ssh-keygen -p -N '' -f {file}   # unattended jobs enter no passphrase: on a copy",
        )
    own = " ".join(read.stdout.split()[:2])
    if public and own != " ".join(public.split()[:2]):
        raise ConfigError(
            f"{place} is not the private half of {name}",
            f"EC2 has another public key under that name; that of the file is {own}",
            "name the right file; its name is that of the key pair: aws ec2 describe-key-pairs",
        )


def connect(
    endpoint: Endpoint,
    *,
    key: paramiko.PKey,
    login: Login,
    deadline_s: float,
    stop: threading.Event,
    on_event: OnEvent,
) -> Connection:
    """Return a connection to a node; until the deadline try again while it boots.

    Raises NodeFailure: at once for a host key that is not accepted, after a few seconds for a login that is
    refused, at the deadline for the rest, with the last cause; JumpFailure where the jump host forbids it.
    An image may show keys of its own until cloud-init has written the temporary one of the launch, so a node
    that has not shown that yet is tried again: nothing is sent to it before.
    """
    began = time.monotonic()
    refused_since: float | None = None
    told, next_pause = "", 0.1
    closed_pauses = itertools.chain(_CLOSED_PAUSES_S, itertools.repeat(_LAST_CLOSED_PAUSE_S))
    while True:
        try:
            left_s = max(1.0, began + deadline_s - time.monotonic())
            return _attempt(endpoint, key, login, left_s)
        except NodeFailure as failure:
            now = time.monotonic()
            refused_since = (refused_since or now) if failure.layer == "login" else None
            tired = refused_since is not None and now - refused_since >= _LOGIN_PATIENCE_S
            pause = next_pause
            if isinstance(failure, _LoginClosed):
                pause = next(closed_pauses)
            elif failure.layer == "host key":
                tired, pause = not _awaits_boot_key(endpoint, login), _BOOT_KEY_PAUSE_S
            if tired or now + pause > began + deadline_s or stop.is_set():
                raise
            if failure.layer != told:
                told = failure.layer
                on_event(Event(f"waiting for SSH ({told})", who=node_name(endpoint.node)))
        stop.wait(pause)
        next_pause = min(
            1.0 if login.jump else 0.3, next_pause * 1.3
        )  # over a jump host each try is a process


class _LoginClosed(NodeFailure):
    """The node closed the connection during the login, as pam_nologin does while "System is booting up"."""


def _awaits_boot_key(endpoint: Endpoint, login: Login) -> bool:
    """Whether the temporary key of a launch is the only host key that the node may show."""
    return hostkeys.read(login.known_hosts).get(endpoint.instance_id) == (login.boot_key,)


def preconnect(endpoints: Collection[Endpoint], login: Login) -> Preconnect:
    """Begin to connect to nodes at their last known addresses: one attempt each, all at once.

    Host keys are checked as always; a connection that nobody takes gets `cut` as its callback. Raises
    ConfigError for an invalid login key.
    """
    once = threading.Event()
    once.set()
    connected = partial(connect, key=load_key(login.key), login=login, deadline_s=_EARLY_S)
    return {one: soon(connected, one, stop=once, on_event=ignore) for one in endpoints}


def cut(begun: Future[Connection]) -> None:
    """Cut a connection that was opened for nothing: what to do where it is done."""
    if begun.exception() is None:
        begun.result().drop()


def _attempt(endpoint: Endpoint, key: paramiko.PKey, login: Login, left_s: float) -> Connection:
    accepted = hostkeys.read(login.known_hosts).get(endpoint.instance_id, ())
    if not accepted:
        raise endpoint.failure("host key", "unknown host key", f"nothing for it in {login.known_hosts}")
    with contextlib.ExitStack() as on_failure:
        line = _dial(endpoint, login.jump, left_s)
        on_failure.callback(line.close)
        transport = paramiko.Transport(line.socket, default_window_size=_WINDOW)
        on_failure.callback(transport.close)
        timeout_s = min(_HANDSHAKE_S, left_s)
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = timeout_s
        _shake_hands(endpoint, transport, accepted)
        public = transport.get_remote_server_key()
        shown = f"{public.get_name()} {public.get_base64()}"
        if shown not in accepted:
            raise endpoint.failure("host key", "host key mismatch", f"it showed: {shown}")
        _log_in(endpoint, transport, key)
        on_failure.pop_all()
    transport.set_keepalive(_KEEPALIVE_S)
    return Connection(endpoint=endpoint, line=line, transport=transport, host_key=shown)


def _dial(endpoint: Endpoint, jump: Jump | None, left_s: float) -> Line:
    try:
        if jump is not None:
            return jump.dial(endpoint.host, endpoint.port, min(jump.dial_s, left_s))
        line = socket.create_connection((endpoint.host, endpoint.port), min(_DIAL_S, left_s))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # a limit of this machine
            raise
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        if jump is not None:
            message = f"unreachable through {jump.name}"
            raise endpoint.failure("no route", message, why, jump.advice) from error
        if isinstance(error, ConnectionRefusedError):
            raise endpoint.failure("refused", "no sshd is listening", why) from error
        raise endpoint.failure("no route", "unreachable", why) from error
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each command waits 40 ms for an ACK
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: a peer that acknowledges nothing is gone
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    return Line(line)


def _shake_hands(endpoint: Endpoint, transport: paramiko.Transport, accepted: tuple[str, ...]) -> None:
    options = transport.get_security_options()
    kinds = {public.split()[0] for public in accepted}
    options.key_types = tuple(kind for kind in options.key_types if kind in kinds)
    try:
        transport.start_client(timeout=transport.handshake_timeout)
        transport.get_remote_server_key()
    except paramiko.ssh_exception.IncompatiblePeer as error:
        raise endpoint.failure("host key", "no host key of the expected type", str(error)) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        why = str(error) or "connection closed"
        raise endpoint.failure("banner", "SSH handshake failed", why) from error


def _log_in(endpoint: Endpoint, transport: paramiko.Transport, key: paramiko.PKey) -> None:
    try:
        transport.auth_publickey(endpoint.user, key)
    except (paramiko.SSHException, OSError, EOFError) as error:
        said = (transport.get_banner() or b"").decode(errors="replace").strip()
        why = said or str(error)
        if not transport.is_active():
            message = f"connection closed during login ({endpoint})"
            raise _LoginClosed(endpoint.node, "banner", message, why) from error
        raise endpoint.failure("login", f"login refused for {endpoint.user}", why) from error
