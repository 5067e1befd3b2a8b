"""Open SSH connections to nodes: verify host keys, retry while nodes boot, name the step that failed."""

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
from awsddp.nodes.login import Endpoint, Jump, Login, NodeSocket
from awsddp.nodes.node_failures import NodeFailure, find_program, tail
from awsddp.util.formatting import node_name
from awsddp.util.parallel import ignore_event, run_in_thread

# Without a handler, Python prints each failed handshake that paramiko logs. awsddp reports these failures
# itself.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

_DIAL_S = 4.0  # short, because a booting node drops packets and TCP retransmits slowly
_HANDSHAKE_S = 15.0
_KEEPALIVE_S = 10
_UNANSWERED_MS = 30_000
_PRECONNECT_S = 15.0
_LOGIN_PATIENCE_S = 5.0  # during the boot, sshd may start before the user's account exists
# sshd 9.8 and later versions add a penalty of 5 s for each login that PAM refuses, and drop clients with a
# penalty of more than 15 s (PerSourcePenalties in https://man.openbsd.org/sshd_config). With these pauses,
# and 5 s after each later attempt, the penalty is at most 14 s.
_CLOSED_PAUSES_S = (1.0, 2.0, 3.0)
_LAST_CLOSED_PAUSE_S = 5.0
_BOOT_KEY_PAUSE_S = 1.0  # a connection that ends before a login adds 1 s of penalty
_FORWARDING = (
    "awsddp exec -- grep -riE 'TcpForwarding|PermitListen|DisableForwarding' /etc/ssh   # shows the reason\n"
    "-o env.packages_from=node   # if nodes have internet access"
)
_WINDOW = 8 * 2**20  # bytes in flight; paramiko's 2 MiB limit a log to 10 MB/s at a latency of 200 ms
_FORWARD_WINDOW = 64 * 1024  # small, because there are many connections with small requests


@dataclass(frozen=True, kw_only=True)
class Connection:
    """An authenticated SSH transport to a node. `host_key` is the public key that verified the node."""

    endpoint: Endpoint
    node_socket: NodeSocket
    transport: paramiko.Transport
    host_key: str
    channels: "SimpleQueue[Future[paramiko.Channel]]" = field(default_factory=SimpleQueue, repr=False)

    def __post_init__(self) -> None:
        self._open_ahead()

    def open_channel(self) -> paramiko.Channel:
        """Return a channel that was opened in advance to save a round trip. Raises SSHException."""
        channel = self.channels.get()
        self._open_ahead()
        return channel.result()

    def _open_ahead(self) -> None:
        self.channels.put(run_in_thread(self.transport.open_session, window_size=_WINDOW))

    def forward(self, serve: Callable[[paramiko.Channel], None]) -> int:
        """Listen on a port on the node's loopback interface, and return the port.

        `serve` is called with each connection, on the transport's thread. The connections have small
        windows, because unread data is held in memory. Raises NodeFailure.
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
        """Close the connection without waiting, so that blocked reads and writes fail."""
        with contextlib.suppress(OSError):  # the socket may be closed already
            self.node_socket.socket.shutdown(socket.SHUT_RDWR)
        self.transport.close()
        self.node_socket.close()


Preconnect = dict[Endpoint, Future[Connection]]
"""Connections that are being opened, by endpoint. A connection is removed when it is used."""


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


def check_key_file(path: Path, *, name: str, public: str) -> None:
    """Check that `access.key_file` is a usable private key and belongs to the key pair `name`.

    `public` is the public key that EC2 returned, or "" if EC2 did not return one. Raises ConfigError.
    """
    setting, file = f"access.key_file: {path}", shlex.quote(str(path))
    program = find_program("ssh-keygen", f"it checks {setting}", "install openssh-client")
    result = subprocess.run(
        [program, "-y", "-P", "", "-f", path], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if result.returncode != 0:
        raise ConfigError(
            f"{setting} cannot be used as the private half of {name}",
            tail(result.stderr),
            f"chmod 600 {file}   # only you may read the file\n"
            f"ssh-keygen -p -N '' -f {file}   # on a copy: removes the passphrase, for unattended jobs",
        )
    file_public = " ".join(result.stdout.split()[:2])
    if public and file_public != " ".join(public.split()[:2]):
        raise ConfigError(
            f"{setting} is not the private half of {name}",
            f"EC2 has a different public key under that name; the file's public key is {file_public}",
            "set access.key_file to the key pair's private key; aws ec2 describe-key-pairs lists the pairs",
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
    """Connect to a node; retry until the deadline while it boots.

    Raises NodeFailure immediately if the host key is not accepted, after a few seconds if the login is
    refused, and otherwise at the deadline with the last cause. Raises JumpFailure if the jump host refuses
    the connection. Until cloud-init installs the launch's temporary key, an image may have other host keys.
    While only the temporary key is accepted, the function therefore retries after a mismatch. No login is
    sent before the host key matches.
    """
    began = time.monotonic()
    refused_since: float | None = None
    reported_layer, next_pause = "", 0.1
    closed_pauses = itertools.chain(_CLOSED_PAUSES_S, itertools.repeat(_LAST_CLOSED_PAUSE_S))
    while True:
        try:
            left_s = max(1.0, began + deadline_s - time.monotonic())
            return _attempt(endpoint, key, login, left_s)
        except NodeFailure as failure:
            now = time.monotonic()
            refused_since = (refused_since or now) if failure.layer == "login" else None
            is_final = refused_since is not None and now - refused_since >= _LOGIN_PATIENCE_S
            pause = next_pause
            if isinstance(failure, _LoginClosed):
                pause = next(closed_pauses)
            elif failure.layer == "host key":
                is_final, pause = not _awaits_boot_key(endpoint, login), _BOOT_KEY_PAUSE_S
            if is_final or now + pause > began + deadline_s or stop.is_set():
                raise
            if failure.layer != reported_layer:
                reported_layer = failure.layer
                on_event(Event(f"waiting for SSH ({reported_layer})", who=node_name(endpoint.node)))
        stop.wait(pause)
        longest_pause = 1.0 if login.jump else 0.3  # each attempt through a jump host starts a process
        next_pause = min(longest_pause, next_pause * 1.3)


class _LoginClosed(NodeFailure):
    """The node closed the connection during the login. pam_nologin does this while "System is booting up"."""


def _awaits_boot_key(endpoint: Endpoint, login: Login) -> bool:
    """Return True if the node's only accepted host key is the launch's temporary key."""
    return hostkeys.load_keys(login.known_hosts).get(endpoint.instance_id) == (login.boot_key,)


def preconnect(endpoints: Collection[Endpoint], login: Login) -> Preconnect:
    """Start one connection attempt to each node at the node's last known address, all at once.

    The caller adds `close_when_connected` as a callback to futures that it does not use. Raises ConfigError
    for an invalid login key.
    """
    no_retry = threading.Event()
    no_retry.set()
    dial = partial(connect, key=load_key(login.key), login=login, deadline_s=_PRECONNECT_S)
    return {
        endpoint: run_in_thread(dial, endpoint, stop=no_retry, on_event=ignore_event)
        for endpoint in endpoints
    }


def close_when_connected(future: Future[Connection]) -> None:
    """Close an unused connection once it is open. This function is a callback of the connection's future."""
    if future.exception() is None:
        future.result().drop()


def _attempt(endpoint: Endpoint, key: paramiko.PKey, login: Login, left_s: float) -> Connection:
    accepted = hostkeys.load_keys(login.known_hosts).get(endpoint.instance_id, ())
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
        host_key = f"{public.get_name()} {public.get_base64()}"
        if host_key not in accepted:
            raise endpoint.failure("host key", "host key mismatch", f"it showed: {host_key}")
        _log_in(endpoint, transport, key)
        on_failure.pop_all()
    transport.set_keepalive(_KEEPALIVE_S)
    return Connection(endpoint=endpoint, node_socket=line, transport=transport, host_key=host_key)


def _dial(endpoint: Endpoint, jump: Jump | None, left_s: float) -> NodeSocket:
    try:
        if jump is not None:
            return jump.dial(endpoint.host, endpoint.port, min(jump.dial_timeout_s, left_s))
        connected = socket.create_connection((endpoint.host, endpoint.port), min(_DIAL_S, left_s))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # this machine has reached its limit on open files
            raise
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        if jump is not None:
            message = f"unreachable through {jump.name}"
            raise endpoint.failure("no route", message, why, jump.advice) from error
        if isinstance(error, ConnectionRefusedError):
            raise endpoint.failure("refused", "no sshd is listening", why) from error
        raise endpoint.failure("no route", "unreachable", why) from error
    connected.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # without this option, each command waits 40 ms for an ACK
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux, fail if the peer acknowledges nothing
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    return NodeSocket(connected)


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
        banner = (transport.get_banner() or b"").decode(errors="replace").strip()
        why = banner or str(error)
        if not transport.is_active():
            message = f"connection closed during login ({endpoint})"
            raise _LoginClosed(endpoint.node, "banner", message, why) from error
        raise endpoint.failure("login", f"login refused for {endpoint.user}", why) from error
