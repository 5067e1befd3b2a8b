"""Following a job: its lines to the end, over connections that break, then its results."""

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

from awsddp.agent import messages
from awsddp.agent.manifest import EVENTS
from awsddp.agent_client import calls, job_reports, program
from awsddp.agent_client.calls import answers_beside, ask
from awsddp.agent_client.logs import Merger
from awsddp.errors import AwsddpError, Interrupted, LetGo, NodeError
from awsddp.job.cancel import end_ranks
from awsddp.job.explain import explained
from awsddp.job.fetch import MANIFEST_S, bring, manifest_request
from awsddp.job.reported import choose_job
from awsddp.model.documents import JobDocument
from awsddp.model.events import Event
from awsddp.model.node_answers import ResultFile
from awsddp.model.records import ACTIVE, Cause, JobRecord, Node
from awsddp.model.saving_text import saving_text
from awsddp.session.context import ConnectedCluster, Session
from awsddp.session.cost import note_fetched
from awsddp.session.next_steps import advised, costs, resume_note
from awsddp.settings.values import seconds
from awsddp.storage.local_names import name_at_home
from awsddp.storage.results_dir import job_result, refuse_another, still_missing
from awsddp.util.format import duration, node_name

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
EVERY_S = 30.0
BYTES_PER_SECOND = 100e3
"""How much is fetched on average: after 16 MB nothing is for 160 s."""
BUSY = 0.05
"""The share of the time that a node may spend on listing them."""


def merger_of(session: Session, job: JobRecord, shown: Collection[int] | None = None) -> Merger:
    """Return what merges a job's logs: all ranks are written to files, those in `shown` are shown.

    Raises ConfigError where the files are another job's.
    """
    refuse_another(session, job)
    return Merger(nodes_by_rank(job), folder=session.results / job.job / "logs", job=job.job, shown=shown)


def nodes_by_rank(job: JobRecord) -> dict[int, int]:
    return {rank.rank: rank.node for rank in job.ranks}


def finish(connected: ConnectedCluster, job: JobRecord) -> JobDocument:
    """Fetch the results of a job that was followed, and return it as the `train` document.

    The job's state is remembered first; an error that keeps results away carries the document as its
    `result`. Missing results of a job that did not succeed are only reported: it has a cause of its own.
    """
    session = connected.session
    try:
        session.folder.remember(job)
        bring(connected, job)
        lost = still_missing(connected, job)
        if lost and job.state == "succeeded":
            raise NodeError("a part of its results is missing", "\n".join(lost.values()))
    except AwsddpError as error:
        error.result = told = job_result(session, job)
        where = "fetched, and also on the nodes" if told.fetched else "not all fetched"
        error.message = f"job {job.job} {job.state}, its results are {where}: {error.message}"
        error.next = f"awsddp fetch {job.job}   # again" + (f"\n{error.next}" if error.next else "")
        raise
    for text in lost.values():
        session.say(text)
    return job_result(session, job)


def attend(connected: ConnectedCluster, job: JobRecord, *, on_lines: Callable[[bytes], None]) -> JobDocument:
    """Follow a job to its end and fetch its results. Ctrl-C ends the job; a closed terminal leaves it."""
    session, merger = connected.session, merger_of(connected.session, job)
    try:
        session.on_event(Event("waiting for the first lines of the ranks", ""))
        watch = Watch(connected, job, merger=merger, on_lines=on_lines)
        job = watch.run()
    except LetGo:
        raise
    except KeyboardInterrupt:
        session.say(
            f"interrupted: ending job {job.job}, its ranks get {session.job_spec.job.grace} to save; "
            "Ctrl-C again leaves the job running"
        )
        end_ranks(connected, job.job)
        watch = Watch(connected, job, merger=merger, on_lines=on_lines)
        job = watch.run()
        ended = finish(watch.connected, job)
    else:
        return finish(watch.connected, job)
    ways = ["awsddp down   # terminate them"]
    if ended.checkpoint:
        again = advised(session, f"awsddp train --resume {job.job}", job=ended)
        ways.insert(0, again + (resume_note(session, ended) or "   # continue from its checkpoint"))
    raise Interrupted(
        f"interrupted: job {job.job} was {job.state}, its results are in {job.home}/",
        f"the nodes still run{costs(connected.cluster.record)}",
        "\n".join(ways),
    )


class _Interruption(Exception):
    """A node was lost, or it is time to connect to one again: the streams are left for a moment."""


@dataclass(eq=False)
class Watch:
    """A job that is followed to its end, over connections that may break at any time.

    `connected` has the nodes as EC2 describes them once the job was interrupted, `merger` what was received
    before; `to_the_end` as for `messages.Follow`.
    """

    connected: ConnectedCluster
    job: JobRecord
    _: KW_ONLY
    merger: Merger
    on_lines: Callable[[bytes], None]
    to_the_end: bool = True
    _away: dict[int, float] = field(default_factory=dict, init=False)  # without a connection, and since when
    _fruitless: Counter[int] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self._fleet, self._restarts = self.connected.fleet, len(self.job.restarts)
        self._patience_s = seconds(self.connected.session.job_spec.job.heartbeat_timeout) + BEYOND_S
        self._followed, self._heard_at = set(self._fleet.holders(self.job)), time.monotonic()
        self._instances = {
            node.instance_id: node.node
            for node in self.connected.cluster.nodes
            if node.node in self._followed
        }

    def run(self) -> JobRecord:
        """Show every line, from the first byte, each once, and return the job as it is at the end.

        A node that falls silent is connected to again until its supervisors would give it up, or EC2 says
        that it is gone; then the job is what the others say of it, and interrupted where EC2 says that all
        are gone. Raises NodeError where nobody says.
        """
        with Events(self.connected, self.job).followed() if self.to_the_end else contextlib.nullcontext():
            self._follow()
        if lines := self.merger.finish():
            self.on_lines(lines)
        told = self.merger.documents
        job = (
            job_reports.job_document(told, results=self.connected.session.job_spec.job.results)
            if told
            else self.job
        )
        if job.state in ACTIVE and not self._followed:
            job = self._interrupted(job)
        if not told and job is self.job:
            raise NodeError(
                f"cannot reach any node of job {self.job.job}", "", "awsddp status   # what still runs"
            )
        return explained(self.connected.session, job)

    def _interrupted(self, job: JobRecord) -> JobRecord:
        """Return a job that its nodes last called active: interrupted, where EC2 says that all are gone.

        The cluster's nodes are then as EC2 describes them.
        """
        from awsddp.agent.diagnosis.job_causes import cause_of_kind

        off: dict[int, Node] = {}
        with contextlib.suppress(AwsddpError):
            off = self._off()
        if not off or len(off) < len(self._instances):
            return job
        nodes = tuple(
            replace(off[node.node], node=node.node) if node.node in off else node
            for node in self.connected.cluster.nodes
        )
        self.connected = replace(self.connected, cluster=replace(self.connected.cluster, nodes=nodes))
        first = min(off)
        kind, why = _end_of(off[first])
        words = cause_of_kind(kind, why=why)._replace(node=first, values={})
        cause = Cause(**words._replace(instance_id=off[first].instance_id)._asdict())
        return replace(job, state="interrupted", cause=cause, progress=(), usage=(), slowest_rank=None)

    def _off(self) -> dict[int, Node]:
        """Return the followed nodes that do not run, by number, as EC2 describes them. Raises CloudError."""
        from awsddp.aws.clusters import by_id, describe

        described = describe(self.connected.cluster.aws, by_id(*self._instances))
        return {
            self._instances[one.instance_id]: one
            for one in described
            if one.state not in ("pending", "running")
        }

    def _follow(self) -> None:
        """Follow every node until it has sent everything, or is given up."""
        while any(not self.merger.ended(node) for node in self._followed):
            for node, why in self._stream().items():
                self._away[node] = time.monotonic()
                self._fruitless[node] += 1
                self.connected.session.on_event(
                    Event(f"the stream ended: {why}; reconnecting", node_name(node))
                )
            if self._away:
                self._give_up_gone()
                self._connect()

    def _stream(self) -> Mapping[int, str]:
        """Follow the connected nodes until one is lost or all have ended; return who was lost, and why."""
        nodes = [node for node in self._followed if node not in self._away and not self.merger.ended(node)]
        asked = {}
        for node in nodes:
            offsets = self.merger.attach(node)
            request = messages.Follow(job=self.job.job, offsets=offsets, to_the_end=self.to_the_end)
            request.tail = self.merger.tail
            asked[node] = calls.message(request)
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
            outcomes = self._fleet.request(program.program(), asked, on_data, silent_after_s=SILENT_S)
        except _Interruption:
            return {node: self._fleet.failures[node].summary for node in self._lost(nodes)}
        return {
            node: end.summary if isinstance(end, NodeError) else " / ".join(end.tail().splitlines())
            for node, end in outcomes.items()
            if not self.merger.ended(node)
        }

    def _tell_restarts(self) -> None:
        """Say of each new restart of the ranks which it is, and why."""
        restarts = max((told.restarts for told in self.merger.documents.values()), key=len, default=())
        for text in restarts[self._restarts :]:
            self.connected.session.say(f"restart {text}")
        self._restarts = max(self._restarts, len(restarts))

    def _hint(self, now: float) -> None:
        """Name the command that shows where the ranks are, once, when none has written a line for long."""
        if any(told.state == "waiting" for told in self.merger.documents.values()):
            self._heard_at = max(now, self._heard_at)
        if self.to_the_end and now - self._heard_at >= HINT_S:
            self._heard_at = math.inf
            after = duration(HINT_S).removesuffix(" 0 s")
            command = advised(self.connected.session, f"awsddp why {self.job.job}   # where its ranks are")
            self.connected.session.say(f"no output for {after}: {command}")

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
                self.connected.session.on_event(Event("connected again", node_name(node)))
            elif time.monotonic() - since > self._patience(node):
                self._give_up(node)

    def _patience(self, node: int) -> float:
        """Return how long a node may be away (s): less if its sshd refuses and the job has ended."""
        refuses = getattr(self._fleet.failures.get(node), "layer", "") == "refused"
        has_ended = any(told.state not in ACTIVE for told in self.merger.documents.values())
        return BEYOND_S if refuses and has_ended else self._patience_s

    def _give_up(self, node: int) -> None:
        del self._away[node]
        self._followed.discard(node)

    def _give_up_gone(self) -> None:
        """Give up the nodes that EC2 says are gone, and tell the nodes that wait for them."""
        with contextlib.suppress(AwsddpError):
            gone = {node: one for node, one in self._off().items() if one.state in _GONE}
            for node in sorted(self._away.keys() & gone):
                self._give_up(node)
                self._report(node, *_end_of(gone[node]))

    def _report(self, node: int, kind: str, why: str) -> None:
        """Tell the first node, which coordinates the job, that `node` is gone; if that is it, the others."""
        nodes = {rank.node for rank in self.job.ranks}
        told = nodes if node == min(nodes) else {min(nodes)}
        request = messages.Lost(job=self.job.job, node=node, why=why, kind=kind)
        reports = {
            one: request
            for one in (told & self._followed) - self._away.keys() - {node}
            if not self.merger.ended(one)
        }
        if reports:
            with contextlib.suppress(AwsddpError):
                ask(self._fleet, reports, timeout_s=_CONNECT_S * 2)


def _end_of(node: Node) -> tuple[str, str]:
    """Return the kind of cause for an instance that does not run, and what EC2 says of it."""
    from awsddp.aws.clusters import end_of

    kind, why = end_of(node)
    return kind, f"EC2 says that its instance is {node.state} ({why})"


class Events:
    """Fetches what has grown every 30 s, and says when a job's results are no longer saved to S3.

    No error leaves it.
    """

    def __init__(self, connected: ConnectedCluster, job: JobRecord) -> None:
        self._connected, self._job = connected, job
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._fetched = 0
        self._is_saved = True

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Fetch in a thread, for as long as the context."""
        threading.Thread(target=self._run, daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()
            with self._writing:  # what is still being listed is not written any more
                note_fetched(self._connected.cluster, self._job.job, self._fetched)

    def _run(self) -> None:
        wait_s = EVERY_S
        while not self._ended.wait(wait_s):
            began, before = time.monotonic(), self._fetched
            with contextlib.suppress(AwsddpError, OSError, LookupError, RuntimeError):
                self.fetch()  # a connection that breaks is reported, and opened again, where logs are read
            with contextlib.suppress(AwsddpError, OSError, LookupError, RuntimeError):
                self.tell_saving()
            took = time.monotonic() - began
            wait_s = max(EVERY_S, took / BUSY, (self._fetched - before) / BYTES_PER_SECOND)

    def tell_saving(self) -> None:
        """Say once that results are no longer saved, and what keeps them from it. Raises AwsddpError."""
        job, fleet = self._job, self._connected.fleet
        if job.save_to is None:
            return
        asked = dict.fromkeys(fleet.holders(job), messages.State())
        answers = answers_beside(fleet, asked, timeout_s=MANIFEST_S)
        documents = {node: one.jobs for node, one in answers.items() if not isinstance(one, AwsddpError)}
        saving = choose_job(job_reports.jobs(documents), job.job).saving
        if saving is None:
            return
        is_saved = not saving.error and not saving.is_silent
        if self._is_saved and not is_saved:
            self._connected.session.say(f"saving {job.job} to {job.save_to}: {saving_text(saving)}")
        self._is_saved = is_saved

    def fetch(self) -> None:
        """Fetch the event files that are new or have grown. Raises AwsddpError."""
        from awsddp.nodes.download import by_rsync, pull

        session, fleet = self._connected.session, self._connected.fleet
        target = session.results / self._job.job
        files = target.glob(f"node*/**/{EVENTS}*")
        known = {path.relative_to(target).as_posix(): path.lstat().st_size for path in files}
        at_once = calls.EVENTS_AT_ONCE_BYTES
        request = manifest_request(session, self._job, events=known, at_once=at_once)
        wishes = dict.fromkeys(fleet.holders(self._job), request)
        answers = answers_beside(fleet, wishes, timeout_s=MANIFEST_S)
        listed = {node: one for node, one in answers.items() if not isinstance(one, AwsddpError)}
        wanted: dict[int, list[ResultFile]] = {}
        for one in name_at_home(listed):
            if one.data is not None and one.path.rpartition("/")[2].startswith(EVENTS):
                wanted.setdefault(one.node, []).append(one)
        with self._writing, session.folder.lock("fetch", part="results"):
            if wanted and not self._ended.is_set():
                came = pull(wanted, target, transfer=by_rsync(session.folder.ssh_config))
                self._fetched += sum(one.bytes for one in came.values())
