"""Send a job's events from its node to the user's URL while the job runs, and for a while after its end.

The notifier is a separate process with a low CPU priority, outside the guard that kills the job's processes.
The URL is only in its memory. A node that has no access to the URL gets none; its notifier only finds the
events, and clients send them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from awsddp.agent.job_folder import CommandError, JobFolder, read_json, write_json
from awsddp.agent.notify.events import Order, find_events, is_first_node
from awsddp.agent.notify.pending import lock_notifier, max_requests, outbox_of, read_facts
from awsddp.agent.notify.post import encode_body, post

if TYPE_CHECKING:
    from collections.abc import Mapping

    from awsddp.agent.messages import Launch
    from awsddp.agent.notify.events import Facts

_LOOK_S = 1.0
_MIN_PAUSE_S, _MAX_PAUSE_S, _HURRIED_PAUSE_S = 0.5, 60.0, 2.0
_AFTER_END_S = 3600.0
"""How long events are sent after the job's end."""
_SHUTDOWN_S = 20.0
"""The same limit at a shutdown of the machine, which awsddp-jobs.service delays by at most 120 s."""
_UNSAVED_S = 600.0
"""How long uploads to S3 must have failed before the user is notified."""
_SILENT_UPLOADER_S = 120.0
_PROBE_S = 3.0
_PROBES = 3


def main(stdin: BinaryIO) -> int:
    """Send the events of the job that the message on stdin names. Return the exit status."""
    message = json.loads(stdin.read(int(stdin.readline())))
    os.nice(19)
    signal.signal(signal.SIGTERM, lambda *_: None)  # a shutdown is read from the watchdog's file
    with contextlib.suppress(CommandError):  # raised if the job's folder is gone
        folder = JobFolder(message["order"]["job"])
        if lock_notifier(folder) is not None:
            Notifier(folder, message).run()
    return 0


class Notifier:
    """Finds the events of a job, and sends them one after the other.

    `message` has `order` (the fields of Order), `url` (None: this node sends nothing) and `format`.
    """

    def __init__(self, folder: JobFolder, message: Mapping[str, Any]) -> None:
        self._folder, self._outbox = folder, outbox_of(folder)
        self._order = Order(**message["order"])
        self._url, self._format = message["url"], message["format"]
        self._unsaved = UnsavedClock()
        self._pause_s, self._failed_at = _MIN_PAUSE_S, -math.inf
        self._end_by: float | None = None
        self._is_deputy: bool | None = None
        write_json(folder.path / "notify.json", {"order": list(self._order), "sends": self._url is not None})

    def run(self) -> None:
        """Run until the job has ended and no event is left, or until the time for the events is over."""
        while True:
            facts = self._look()
            if self._is_over(facts):
                return
            if self._url is not None:
                self._send_next(facts)
            time.sleep(_LOOK_S)

    def _look(self) -> Facts:
        """Find new events. Raises CommandError if the job's folder is gone."""
        unsaved = self._unsaved.update(read_json(self._folder.saving), time.monotonic(), time.time())
        facts = read_facts(self._folder, unsaved)
        events = find_events(self._order, facts)
        if not is_first_node(facts.request) and any(event["event"] == "ended" for event in events):
            events = [event for event in events if event["event"] != "ended" or self._replaces_first(facts)]
        with contextlib.suppress(OSError):
            self._outbox.add(events)
        if facts.shutdown.reason:  # the shutdown then waits for this process, as for a job
            with contextlib.suppress(OSError):
                Path("/proc/self/comm").write_text("awsddp-job", encoding="ascii")
        return facts

    def _replaces_first(self, facts: Facts) -> bool:
        """Return True if this node is the lowest one that lives, after the loss of the first node."""
        if self._is_deputy is None:
            self._is_deputy = not any(is_alive(node, facts.request) for node in nodes_between(facts.request))
        return self._is_deputy

    def _send_next(self, facts: Facts) -> None:
        """Send the oldest event that is left, unless its next attempt has to wait."""
        event = next(iter(self._outbox.open_events()), None)
        pause_s = min(self._pause_s, _HURRIED_PAUSE_S) if facts.shutdown.reason else self._pause_s
        if event is None or time.monotonic() < self._failed_at + pause_s:
            return
        most = max_requests(facts, event)
        if event["requests"] < most:
            self._send(event, most)
        elif not self._folder.is_agent_running():  # no other node will report that it knows the job's end
            self._outbox.settle(event["id"], "gave up", event["why"])

    def _send(self, event: Mapping[str, Any], most: int) -> None:
        is_taken = False

        def may_send() -> bool:
            nonlocal is_taken
            is_taken = not self._outbox.claim(event["id"], most=most)
            return not is_taken

        outcome = post(self._url, encode_body(event, self._format), may_send=may_send)
        if is_taken:  # a client sends it
            return
        self._outbox.settle(event["id"], *outcome)
        if outcome.state in ("delivered", "refused"):
            self._pause_s, self._failed_at = _MIN_PAUSE_S, -math.inf
        else:
            self._pause_s, self._failed_at = min(2 * self._pause_s, _MAX_PAUSE_S), time.monotonic()

    def _is_over(self, facts: Facts) -> bool:
        if not facts.document.final or self._folder.is_agent_running():
            return False
        limit_s = _SHUTDOWN_S if facts.shutdown.reason else _AFTER_END_S
        now = time.monotonic()
        self._end_by = min(self._end_by or now + limit_s, now + limit_s)
        saving = read_json(self._folder.saving)
        is_saved = saving is None or bool(saving.get("ended"))
        return now >= self._end_by or (is_saved and not self._outbox.open_events())


class UnsavedClock:
    """Measures how long nothing has been saved to S3."""

    def __init__(self) -> None:
        self._since: float | None = None

    def update(self, saving: Mapping[str, Any] | None, now: float, wall: float) -> str:
        """Return why nothing is saved any more, or "" if results are saved or not for long enough.

        `saving` is the content of saving.json (None: the job does not save), `now` is in seconds on a
        monotonic clock, and `wall` is the Unix time.
        """
        why = describe_unsaved(saving, wall) if saving is not None else ""
        if not why:
            self._since = None
            return ""
        self._since = now if self._since is None else self._since
        is_over = saving is not None and bool(saving.get("ended"))
        return why if is_over or now - self._since >= _UNSAVED_S else ""


def describe_unsaved(saving: Mapping[str, Any], wall: float) -> str:
    """Return why the uploader saves nothing at the moment, or ""."""
    if saving.get("error"):
        return "its uploads were abandoned" if saving.get("ended") else "its uploads fail"
    is_silent = not saving.get("ended") and wall - saving.get("at", wall) > _SILENT_UPLOADER_S
    return "its uploader has died or hangs" if is_silent else ""


def nodes_between(request: Launch) -> list[str]:
    """Return the addresses of the job's nodes between the first node and this one."""
    numbers = [node.node for node in request.nodes]
    return [node.private_ip for node in request.nodes[1 : numbers.index(request.node)]]


def is_alive(address: str, request: Launch) -> bool:
    """Return True if the machine at `address` answers at all, even if it refuses the connection."""
    for _ in range(_PROBES):
        try:
            socket.create_connection((address, request.link_port), timeout=_PROBE_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            continue
        return True
    return False
