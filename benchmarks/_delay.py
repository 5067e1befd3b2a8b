"""TCP proxies that add a delay each way and count round trips, for machines without netem."""

import contextlib
import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

Change = Callable[[bytes], bytes]


class DelayProxy:
    """Listens on `near` and forwards to `target`; `turns` counts how often a client waited for a response.

    Each piece of data from the target is passed to `change`, and the proxy forwards the result.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        delay_s: float,
        near: tuple[str, int] = ("127.0.0.1", 0),
        change: Change = bytes,
    ) -> None:
        self.turns = 0
        self.connections = 0
        self._target = target
        self._delay_s = delay_s
        self._change = change
        self._listener = socket.create_server(near)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        time.sleep(2 * self._delay_s)  # SYN and its response
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pending = threading.Event()
        for source, sink, is_request in ((near, far, True), (far, near, False)):
            self._carry(source, sink, is_request=is_request, pending=pending)

    def _carry(
        self, source: socket.socket, sink: socket.socket, *, is_request: bool, pending: threading.Event
    ) -> None:
        """Start threads that forward data from `source` to `sink` after `delay_s`, without a rate limit."""
        pipe: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def read() -> None:
            data = b"first"
            while data:
                try:
                    data = source.recv(1 << 18)
                except OSError:
                    data = b""
                if data and is_request and not pending.is_set():
                    pending.set()
                    self.turns += 1
                if data and not is_request:
                    pending.clear()
                    data = self._change(data)
                pipe.put((time.monotonic() + self._delay_s, data))

        def write() -> None:
            while True:
                due, data = pipe.get()
                time.sleep(max(0.0, due - time.monotonic()))
                with contextlib.suppress(OSError):
                    if not data:
                        sink.shutdown(socket.SHUT_WR)
                        return
                    sink.sendall(data)

        for work in (read, write):
            threading.Thread(target=work, daemon=True).start()


class Distance:
    """Proxies that delay a client's connections to a local cloud and to its nodes by `delay_s` each way.

    The client uses the endpoint `url` in place of AWS. In the endpoint's responses, the address of each node
    is replaced by an address of this machine at which a proxy to the node's sshd listens. Both addresses have
    the same length, so that the length of a response does not change. The nodes of two local clouds have
    different addresses, and so have the proxies. `at_launch` is the result of `count` at the last response to
    RunInstances.
    """

    def __init__(self, endpoint: str, *, delay_s: float) -> None:
        url = urlsplit(endpoint)
        self._delay_s = delay_s
        self._nodes: dict[str, DelayProxy] = {}
        self.at_launch: dict[str, int] = {}
        self._aws = DelayProxy(
            (str(url.hostname), int(url.port or 80)), delay_s=delay_s, change=self._replace_addresses
        )
        self.url = f"http://127.0.0.1:{self._aws.port}"

    def count(self) -> dict[str, int]:
        """Return the round trips so far under "AWS" and "a node".

        "a node" is the node with the most round trips. The figure for this node includes the round trips that
        open connections; the figure for AWS does not.
        """
        nodes = [node.turns + node.connections for node in self._nodes.values()]
        return {"AWS": self._aws.turns, "a node": max(nodes, default=0)}

    def close(self) -> None:
        """Accept no more connections."""
        for proxy in (self._aws, *self._nodes.values()):
            proxy.close()

    def _replace_addresses(self, data: bytes) -> bytes:
        if b"<RunInstancesResponse" in data:
            self.at_launch = self.count()
        return re.sub(rb"(?<=<ipAddress>)10\.\d(\d+)(\.\d+\.\d+)", self._proxy, data)

    def _proxy(self, address: "re.Match[bytes]") -> bytes:
        near = f"127.{address[1].decode()}{address[2].decode()}"
        if near not in self._nodes:
            self._nodes[near] = DelayProxy((address[0].decode(), 22), delay_s=self._delay_s, near=(near, 22))
        return near.encode()
