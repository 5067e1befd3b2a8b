"""Following a job: the stream of each node, connected again when it breaks, until all have ended."""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from awsddp.errors import AwsddpError, NodeError
from awsddp.jobs import protocol, results
from awsddp.jobs.logs import Merger
from awsddp.records import ACTIVE, Cause, JobRecord
from awsddp.report import Event, duration, node_name
from awsddp.spec import seconds
from awsddp.verbs.advice import advised
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.events import Events
from awsddp.verbs.explaining import explained
from awsddp.verbs.requests import ask, holders

SILENT_S = 12.0
HINT_S = 300.0
"""After how long without a line a job is said to be silent."""
BEYOND_S = 60.0
"""How much longer than `job.heartbeat_timeout` we try to connect: the supervisors notice a break later.

So long, too, to a node whose sshd refuses, once the others say that the job has ended."""
_CONNECT_S = 5.0
_RETRY_S = 10.0  # between two tries while other nodes are followed
_CHECK_S = 1.0
_GONE = ("terminated", "stopped")
_FRUITLESS = 30  # streams in a row that a node may end before it has said anything


class _Interruption(Exception):
    """A node was lost, or it is time to connect to one again: the streams are left for a moment."""


@dataclass(eq=False)
class Watch:
    """A job that is followed to its end, over connections that may break at any time.

    `merger` has what was received before; `to_the_end` as for `protocol.follow_request`.
    """

    cluster: ClusterHandle
    job: JobRecord
    _: KW_ONLY
    merger: Merger
    on_lines: Callable[[bytes], None]
    to_the_end: bool = True
    _away: dict[int, float] = field(default_factory=dict, init=False)  # without a connection, and since when
    _fruitless: Counter[int] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self._ctx, self._fleet, self._restarts = self.cluster.ctx, self.cluster.fleet, len(self.job.restarts)
        self._patience_s = seconds(self._ctx.job.job.heartbeat_timeout) + BEYOND_S
        self._followed, self._heard_at = set(holders(self._fleet, self.job)), time.monotonic()
        self._instances = {
            node.instance_id: node.node for node in self.cluster.nodes if node.node in self._followed
        }

    def run(self) -> JobRecord:
        """Show every line, from the first byte, each once, and return the job as it is at the end.

        A node that falls silent is connected to again until its supervisors would give it up, or EC2 says
        that it is gone; then the job is what the others say of it, and interrupted where EC2 says that all
        are gone. Raises NodeError where nobody says.
        """
        with Events(self.cluster, self.job).followed() if self.to_the_end else contextlib.nullcontext():
            self._follow()
        if lines := self.merger.finish():
            self.on_lines(lines)
        told = self.merger.documents
        job = results.job_document(told, results=self._ctx.job.job.results) if told else self.job
        if job.state in ACTIVE and not self._followed:
            job = self._interrupted(job)
        if not told and job is self.job:
            raise NodeError(
                f"cannot reach any node of job {self.job.job}", "", "awsddp status   # what still runs"
            )
        return explained(self._ctx, job)

    def _interrupted(self, job: JobRecord) -> JobRecord:
        """Return a job that its nodes last called active: interrupted, where EC2 says that all are gone.

        The cluster's nodes are then as EC2 describes them.
        """
        from awsddp.aws.clusters import node_of
        from awsddp.jobs.supervisor.job_causes import JOB_TABLE, words_of

        off: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(AwsddpError):
            off = self._off()
        if not off or len(off) < len(self._instances):
            return job
        self.cluster.nodes = tuple(
            replace(node_of(off[node.node]), node=node.node) if node.node in off else node
            for node in self.cluster.nodes
        )
        first = min(off)
        kind, why = _end_of(off[first])
        row = next(row for row in JOB_TABLE if row.kind == kind)
        words = words_of(row, {"why": why})
        cause = Cause(rank=None, node=first, instance_id=off[first]["InstanceId"], **words)
        return replace(job, state="interrupted", cause=cause, progress=(), usage=(), slowest_rank=None)

    def _off(self) -> dict[int, dict[str, Any]]:
        """Return the followed nodes that do not run, by number, as EC2 describes them. Raises CloudError."""
        from awsddp.aws.clusters import by_id, describe

        described = describe(self.cluster.aws, by_id(*self._instances))
        return {
            self._instances[one["InstanceId"]]: one
            for one in described
            if one["State"]["Name"] not in ("pending", "running")
        }

    def _follow(self) -> None:
        """Follow every node until it has sent everything, or is given up."""
        while any(not self.merger.ended(node) for node in self._followed):
            for node, why in self._stream().items():
                self._away[node] = time.monotonic()
                self._fruitless[node] += 1
                self._ctx.on_event(Event(f"the stream ended: {why}; reconnecting", node_name(node)))
            if self._away:
                self._give_up_gone()
                self._connect()

    def _stream(self) -> Mapping[int, str]:
        """Follow the connected nodes until one is lost or all have ended; return who was lost, and why."""
        nodes = [node for node in self._followed if node not in self._away and not self.merger.ended(node)]
        requests = {}
        for node in nodes:
            offsets = self.merger.attach(node)
            request = protocol.follow_request(self.job.job, offsets=offsets, to_the_end=self.to_the_end)
            requests[node] = protocol.message(request)
        now = time.monotonic()
        until, check_at = now + _RETRY_S, now + _CHECK_S

        def on_data(node: int, data: bytes) -> bool:
            nonlocal check_at
            del self._fruitless[node]
            now = time.monotonic()
            if lines := self.merger.feed(node, data):
                self.on_lines(lines)
                self._heard_at = max(now, self._heard_at)
            self._tell_restarts()
            self._hint(now)
            if now >= check_at:
                check_at = now + _CHECK_S
                if (self._away and now >= until) or self._lost(nodes):
                    raise _Interruption
            return self.merger.ended(node)

        try:
            outcomes = self._fleet.request(protocol.program(), requests, on_data, silent_after_s=SILENT_S)
        except _Interruption:
            return {node: self._fleet.failures[node].summary for node in self._lost(nodes)}
        return {
            node: end.summary if isinstance(end, NodeError) else " / ".join(end.tail().splitlines())
            for node, end in outcomes.items()
            if not self.merger.ended(node)
        }

    def _tell_restarts(self) -> None:
        """Say of each new restart of the ranks which it is, and why."""
        restarts = max(
            (told.get("restarts", ()) for told in self.merger.documents.values()), key=len, default=()
        )
        for text in restarts[self._restarts :]:
            self._ctx.say(f"restart {text}")
        self._restarts = max(self._restarts, len(restarts))

    def _hint(self, now: float) -> None:
        """Name the command that shows where the ranks are, once, when none has written a line for long."""
        if any(told["state"] == "waiting" for told in self.merger.documents.values()):
            self._heard_at = max(now, self._heard_at)
        if self.to_the_end and now - self._heard_at >= HINT_S:
            self._heard_at = math.inf
            after = duration(HINT_S).removesuffix(" 0 s")
            command = advised(self._ctx, f"awsddp doctor --why {self.job.job}   # where its ranks are")
            self._ctx.say(f"no output for {after}: {command}")

    def _lost(self, nodes: Collection[int]) -> set[int]:
        connected = set(self._fleet.nodes)
        return {node for node in nodes if node not in connected and not self.merger.ended(node)}

    def _connect(self) -> None:
        """Connect to the nodes that are away, and give up those that were away for too long."""
        if len(self._away) == len(self._followed):
            time.sleep(_CHECK_S)  # nothing else sets the pace
        self._fleet.reconnect(self._away, deadline_s=_CONNECT_S, partial=True)
        for node, since in list(self._away.items()):
            if self._fruitless[node] > _FRUITLESS:
                self._give_up(node)
            elif node in self._fleet.nodes:
                del self._away[node]
                self._ctx.on_event(Event("connected again", node_name(node)))
            elif time.monotonic() - since > self._patience(node):
                self._give_up(node)

    def _patience(self, node: int) -> float:
        """Return how long a node may be away (s): less if its sshd refuses and the job has ended."""
        refuses = getattr(self._fleet.failures.get(node), "layer", "") == "refused"
        has_ended = any(told["state"] not in ACTIVE for told in self.merger.documents.values())
        return BEYOND_S if refuses and has_ended else self._patience_s

    def _give_up(self, node: int) -> None:
        del self._away[node]
        self._followed.discard(node)

    def _give_up_gone(self) -> None:
        """Give up the nodes that EC2 says are gone, and tell the nodes that wait for them."""
        with contextlib.suppress(AwsddpError):
            gone = {node: one for node, one in self._off().items() if one["State"]["Name"] in _GONE}
            for node in sorted(self._away.keys() & gone):
                self._give_up(node)
                self._report(node, *_end_of(gone[node]))

    def _report(self, node: int, kind: str, why: str) -> None:
        """Tell the first node, which coordinates the job, that `node` is gone; if that is it, the others."""
        nodes = {rank.node for rank in self.job.ranks}
        told = nodes if node == min(nodes) else {min(nodes)}
        request = {"do": "lost", "job": self.job.job, "node": node, "why": why, "kind": kind}
        requests = {
            one: request
            for one in (told & self._followed) - self._away.keys() - {node}
            if not self.merger.ended(one)
        }
        if requests:
            with contextlib.suppress(AwsddpError):
                ask(self._fleet, requests, timeout_s=_CONNECT_S * 2)


def _end_of(described: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of cause for an instance that does not run, and what EC2 says of it."""
    from awsddp.aws.clusters import end_of

    kind, why = end_of(described)
    return kind, f"EC2 says that its instance is {described['State']['Name']} ({why})"
