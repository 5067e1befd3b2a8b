"""A TCP proxy that adds a delay each way and counts: what distance costs, on a machine without netem."""

import contextlib
import queue
import socket
import threading
import time


class DelayProxy:
    """Listens on 127.0.0.1 and forwards to `target`; `turns` counts how often a client waited."""

    def __init__(self, target: tuple[str, int], *, delay_s: float) -> None:
        self.turns = 0
        self.connections = 0
        self._target = target
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            self.connections += 1
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        time.sleep(2 * self._delay_s)  # SYN and its answer
        far = socket.create_connection(self._target)
        asked = threading.Event()
        for source, sink, asks in ((near, far, True), (far, near, False)):
            self._carry(source, sink, asks=asks, asked=asked)

    def _carry(
        self, source: socket.socket, sink: socket.socket, *, asks: bool, asked: threading.Event
    ) -> None:
        """Read at once, write what was read `delay_s` later: a delay, not a limit of the rate."""
        pipe: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def read() -> None:
            data = b"first"
            while data:
                try:
                    data = source.recv(1 << 18)
                except OSError:
                    data = b""
                if data and asks and not asked.is_set():
                    asked.set()
                    self.turns += 1
                if data and not asks:
                    asked.clear()
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
