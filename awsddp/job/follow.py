"""Follow a job to its end, reconnecting as needed, then fetch its results."""

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
from awsddp.agent_client.calls import call_nodes, call_nodes_separately
from awsddp.agent_client.logs import Merger
from awsddp.errors import AwsddpError, Interrupted, NodeError, Terminated
from awsddp.job.cancel import end_ranks
from awsddp.job.explain import explain_cause
from awsddp.job.fetch import MANIFEST_S, fetch_from_nodes, make_manifest_request
from awsddp.job.notify import LAST_EVENTS_S, send_left_events
from awsddp.job.reported import choose_job
from awsddp.model.documents import JobDocument
from awsddp.model.events import Event
from awsddp.model.node_answers import ResultFile
from awsddp.model.records import ACTIVE, Cause, JobRecord, Node
from awsddp.model.saving_text import describe_saving
from awsddp.session.context import ConnectedCluster, Session
from awsddp.session.cost import record_fetch_cost
from awsddp.session.next_steps import complete_commands, describe_cost, resume_note
from awsddp.settings.values import parse_duration
from awsddp.storage.local_names import assign_local_names
from awsddp.storage.results_dir import find_unfetched_parts, make_job_result, refuse_other_job
from awsddp.util.formatting import duration, node_name

SILENT_S = 12.0
HINT_S = 300.0
"""A job that prints nothing for this long is reported as silent."""
EXTRA_PATIENCE_S = 60.0
"""How much longer than `job.heartbeat_timeout` awsddp tries to reconnect, because agents notice a break
later.

If a node's sshd refuses connections and another node has reported the job's end, awsddp tries to reconnect
only for this time."""
_CONNECT_S = 5.0
_RETRY_S = 10.0  # the pause between two attempts while other nodes are followed
_CHECK_S = 1.0
_GONE = ("terminated", "stopped")
_FRUITLESS = 30  # how many consecutive streams a node may end without sending data
FETCH_INTERVAL_S = 30.0
BYTES_PER_SECOND = 100e3
"""The limit on the average rate at which event files are fetched. For example, after 16 MB nothing is fetched
for 160 s."""
MAX_LISTING_SHARE = 0.05
"""The maximum share of a node's time that is spent on listing event files."""


def make_merger(session: Session, job: JobRecord, shown: Collection[int] | None = None) -> Merger:
    """Return the merger for a job's logs.

    The merger writes all lines to files, and returns the lines from the ranks in `shown`.

    Raises ConfigError if the files belong to another job.
    """
    refuse_other_job(session, job)
    return Merger(
        map_ranks_to_nodes(job), folder=session.results / job.job / "logs", job=job.job, shown_ranks=shown
    )


def map_ranks_to_nodes(job: JobRecord) -> dict[int, int]:
    return {rank.rank: rank.node for rank in job.ranks}


def fetch_followed_job(connected: ConnectedCluster, job: JobRecord) -> JobDocument:
    """Fetch the results of a followed job and return its `train` document.

    Records the job's state first. If fetching fails, the error's `result` is the document. If the job did not
    succeed, missing results are only reported, because the document already has the cause of the failure.
    """
    session = connected.session
    with contextlib.suppress(AwsddpError):
        send_left_events(connected, job, wait_s=LAST_EVENTS_S)
    try:
        session.folder.save_jobs(job)
        fetch_from_nodes(connected, job)
        lost = find_unfetched_parts(connected, job)
        if lost and job.state == "succeeded":
            raise NodeError("a part of its results is missing", "\n".join(lost.values()))
    except AwsddpError as error:
        error.result = document = make_job_result(session, job)
        status = "fetched, and also on the nodes" if document.fetched else "not all fetched"
        error.message = f"job {job.job} {job.state}, its results are {status}: {error.message}"
        error.next = f"awsddp fetch {job.job}   # again" + (f"\n{error.next}" if error.next else "")
        raise
    for text in lost.values():
        session.say(text)
    return make_job_result(session, job)


def follow_to_end(
    connected: ConnectedCluster, job: JobRecord, *, on_lines: Callable[[bytes], None]
) -> JobDocument:
    """Follow a job to its end and fetch its results. Ctrl-C ends the job; a closed terminal does not."""
    session, merger = connected.session, make_merger(connected.session, job)
    try:
        session.on_event(Event("waiting for the first lines of the ranks", ""))
        watch = JobFollower(connected, job, merger=merger, on_lines=on_lines)
        job = watch.run()
    except Terminated:
        raise
    except KeyboardInterrupt:
        session.say(
            f"interrupted: ending job {job.job}, whose ranks get {session.job_spec.job.grace} to save; "
            "Ctrl-C again leaves the job running"
        )
        end_ranks(connected, job.job)
        watch = JobFollower(connected, job, merger=merger, on_lines=on_lines)
        job = watch.run()
        ended = fetch_followed_job(watch.connected, job)
    else:
        return fetch_followed_job(watch.connected, job)
    steps = ["awsddp down   # terminate them"]
    if ended.checkpoint:
        rerun = complete_commands(session, f"awsddp train --resume {job.job}", job=ended)
        steps.insert(0, rerun + (resume_note(session, ended) or "   # continue from its checkpoint"))
    raise Interrupted(
        f"interrupted: job {job.job} was {job.state}, its results are in {job.home}/",
        f"the nodes still run{describe_cost(connected.cluster.record)}",
        "\n".join(steps),
    )


class _Interruption(Exception):
    """Raised to stop streaming so that lost nodes can be reconnected."""


@dataclass(eq=False)
class JobFollower:
    """Follows a job to its end over connections that may break at any time.

    Once the job is marked as interrupted, `connected` has the nodes' states from EC2. `merger` has the output
    received so far. `to_the_end` has the same meaning as in `messages.Follow`.
    """

    connected: ConnectedCluster
    job: JobRecord
    _: KW_ONLY
    merger: Merger
    on_lines: Callable[[bytes], None]
    to_the_end: bool = True
    _lost_at: dict[int, float] = field(default_factory=dict, init=False)  # when the node was lost
    _fruitless: Counter[int] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self._fleet, self._restarts = self.connected.fleet, len(self.job.restarts)
        self._hang_text = ""
        self._patience_s = (
            parse_duration(self.connected.session.job_spec.job.heartbeat_timeout) + EXTRA_PATIENCE_S
        )
        self._followed, self._last_output = set(self._fleet.nodes_of_job(self.job)), time.monotonic()
        self._instances = {
            node.instance_id: node.node
            for node in self.connected.cluster.nodes
            if node.node in self._followed
        }

    def run(self) -> JobRecord:
        """Pass on every line once, from the first byte, and return the job in its final state.

        awsddp tries to reconnect to a lost node until the agents have given up on the node, or until EC2
        reports that the node is gone. The job's state is then the state that the other nodes report, or
        `interrupted` if EC2 reports that all nodes are gone. Raises NodeError if no node has reported a
        state.
        """
        with (
            BackgroundFetch(self.connected, self.job).running()
            if self.to_the_end
            else contextlib.nullcontext()
        ):
            self._follow()
        if lines := self.merger.finish():
            self.on_lines(lines)
        documents = self.merger.documents
        job = (
            job_reports.merge_job(documents, results=self.connected.session.job_spec.job.results)
            if documents
            else self.job
        )
        if job.state in ACTIVE and not self._followed:
            job = self._mark_interrupted(job)
        if not documents and job is self.job:
            raise NodeError(
                f"cannot reach any node of job {self.job.job}", "", "awsddp status   # what still runs"
            )
        return explain_cause(self.connected.session, job)

    def _mark_interrupted(self, job: JobRecord) -> JobRecord:
        """Return the job, marked as interrupted if EC2 reports that all of its nodes are gone.

        In that case, `connected` is also updated with the nodes' states from EC2.
        """
        from awsddp.agent.diagnosis.job_causes import cause_of_kind

        off: dict[int, Node] = {}
        with contextlib.suppress(AwsddpError):
            off = self._find_stopped()
        if not off or len(off) < len(self._instances):
            return job
        nodes = tuple(
            replace(off[node.node], node=node.node) if node.node in off else node
            for node in self.connected.cluster.nodes
        )
        self.connected = replace(self.connected, cluster=replace(self.connected.cluster, nodes=nodes))
        first = min(off)
        kind, why = _end_of(off[first])
        row = cause_of_kind(kind, why=why, job=job.job)._replace(node=first, values={})
        cause = Cause(**row._replace(instance_id=off[first].instance_id)._asdict())
        return replace(job, state="interrupted", cause=cause, progress=(), usage=(), slowest_rank=None)

    def _find_stopped(self) -> dict[int, Node]:
        """Return the nodes that EC2 reports as not running, by node number. Raises CloudError."""
        from awsddp.aws.clusters import by_id, describe

        described = describe(self.connected.cluster.aws, by_id(*self._instances))
        return {
            self._instances[node.instance_id]: node
            for node in described
            if node.state not in ("pending", "running")
        }

    def _follow(self) -> None:
        """Follow every node until it has sent everything or is given up."""
        while any(not self.merger.has_ended(node) for node in self._followed):
            for node, why in self._stream().items():
                self._lost_at[node] = time.monotonic()
                self._fruitless[node] += 1
                self.connected.session.on_event(
                    Event(f"the stream ended: {why}; reconnecting", node_name(node))
                )
            if self._lost_at:
                self._give_up_gone()
                self._connect()

    def _stream(self) -> Mapping[int, str]:
        """Follow the connected nodes until one is lost or all have ended, and return {lost node: reason}."""
        nodes = [
            node for node in self._followed if node not in self._lost_at and not self.merger.has_ended(node)
        ]
        requests = {}
        for node in nodes:
            offsets = self.merger.attach(node)
            request = messages.Follow(job=self.job.job, offsets=offsets, to_the_end=self.to_the_end)
            request.tail = self.merger.tail
            requests[node] = calls.encode_request(request)
        now = time.monotonic()
        until, check_at = now + _RETRY_S, now + _CHECK_S

        def on_data(node: int, data: bytes) -> bool:
            nonlocal check_at
            del self._fruitless[node]
            now = time.monotonic()
            if lines := self.merger.feed(node, data):
                self.on_lines(lines)
                self._last_output = max(now, self._last_output)
            self._report_restarts()
            self._report_hang()
            self._hint_at_why(now)
            if now >= check_at:
                check_at = now + _CHECK_S
                if (self._lost_at and now >= until) or self._find_lost(nodes):
                    raise _Interruption
            return self.merger.has_ended(node)

        try:
            outcomes = self._fleet.request(
                program.agent_program(), requests, on_data, silent_after_s=SILENT_S
            )
        except _Interruption:
            return {node: self._fleet.failures[node].summary for node in self._find_lost(nodes)}
        return {
            node: end.summary if isinstance(end, NodeError) else " / ".join(end.tail().splitlines())
            for node, end in outcomes.items()
            if not self.merger.has_ended(node)
        }

    def _report_restarts(self) -> None:
        """Report each time the ranks restart, with the reason."""
        restarts = max(
            (document.restarts for document in self.merger.documents.values()), key=len, default=()
        )
        for text in restarts[self._restarts :]:
            self.connected.session.say(f"restart {text}")
        self._restarts = max(self._restarts, len(restarts))

    def _report_hang(self) -> None:
        """Report each time the nodes find something new about a job that is silent."""
        documents = self.merger.documents.values()
        hang = next((document.hang for document in documents if document.complete and document.hang), None)
        text = "" if hang is None else job_reports.sanitize_hang(hang).text
        if text and text != self._hang_text:
            self.connected.session.say(text)
        self._hang_text = text

    def _hint_at_why(self, now: float) -> None:
        """After HINT_S without output, report (once) the command that shows where the ranks are."""
        if any(document.state == "waiting" for document in self.merger.documents.values()):
            self._last_output = max(now, self._last_output)
        if self.to_the_end and now - self._last_output >= HINT_S:
            self._last_output = math.inf
            after = duration(HINT_S).removesuffix(" 0 s")
            command = complete_commands(
                self.connected.session, f"awsddp why {self.job.job}   # where its ranks are"
            )
            self.connected.session.say(f"no output for {after}: {command}")

    def _find_lost(self, nodes: Collection[int]) -> set[int]:
        connected = set(self._fleet.nodes)
        return {node for node in nodes if node not in connected and not self.merger.has_ended(node)}

    def _connect(self) -> None:
        """Reconnect to lost nodes, and give up nodes that were lost for too long."""
        if len(self._lost_at) == len(self._followed):
            time.sleep(_CHECK_S)  # nothing else limits the rate of attempts
        self._fleet.reconnect(self._lost_at, deadline_s=_CONNECT_S, partial=True)
        for node, since in list(self._lost_at.items()):
            if self._fruitless[node] > _FRUITLESS:
                self._give_up(node)
            elif node in self._fleet.nodes:
                del self._lost_at[node]
                self.connected.session.on_event(Event("connected again", node_name(node)))
            elif time.monotonic() - since > self._patience(node):
                self._give_up(node)

    def _patience(self, node: int) -> float:
        """Return how many seconds a node may be lost before it is given up.

        The time is shorter if the node's sshd refuses connections and another node has reported the job's
        end.
        """
        refuses = getattr(self._fleet.failures.get(node), "layer", "") == "refused"
        has_ended = any(document.state not in ACTIVE for document in self.merger.documents.values())
        return EXTRA_PATIENCE_S if refuses and has_ended else self._patience_s

    def _give_up(self, node: int) -> None:
        del self._lost_at[node]
        self._followed.discard(node)

    def _give_up_gone(self) -> None:
        """Give up the nodes that EC2 reports as gone, and notify the nodes that wait for them."""
        with contextlib.suppress(AwsddpError):
            gone = {number: node for number, node in self._find_stopped().items() if node.state in _GONE}
            for number in sorted(self._lost_at.keys() & gone):
                self._give_up(number)
                self._report_gone(number, *_end_of(gone[number]))

    def _report_gone(self, node: int, kind: str, why: str) -> None:
        """Notify the first node, which coordinates the job, that `node` is gone.

        If the first node is gone, notify all other nodes.
        """
        nodes = {rank.node for rank in self.job.ranks}
        recipients = nodes if node == min(nodes) else {min(nodes)}
        recipients = (recipients & self._followed) - self._lost_at.keys() - {node}
        request = messages.Lost(job=self.job.job, node=node, why=why, kind=kind)
        reports = {number: request for number in recipients if not self.merger.has_ended(number)}
        if reports:
            with contextlib.suppress(AwsddpError):
                call_nodes(self._fleet, reports, timeout_s=_CONNECT_S * 2)


def _end_of(node: Node) -> tuple[str, str]:
    """Return why an instance is not running: the cause's kind, and the reason that EC2 reports."""
    from awsddp.aws.clusters import find_end_cause

    kind, why = find_end_cause(node)
    return kind, f"EC2 reports that its instance is {node.state} ({why})"


class BackgroundFetch:
    """Fetches event files that have grown, at most every 30 s, and reports if uploads to S3 stop.

    Also sends the job's events that its nodes cannot send.

    Errors are suppressed.
    """

    def __init__(self, connected: ConnectedCluster, job: JobRecord) -> None:
        self._connected, self._job = connected, job
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._fetched = 0
        self._is_uploading = True

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Fetch in a thread until the context ends."""
        threading.Thread(target=self._run, daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()
            with self._writing:  # wait for a write in progress; no file is written after this
                record_fetch_cost(self._connected.cluster, self._job.job, self._fetched)

    def _run(self) -> None:
        wait_s = FETCH_INTERVAL_S
        while not self._ended.wait(wait_s):
            began, before = time.monotonic(), self._fetched
            with contextlib.suppress(AwsddpError, OSError, LookupError, RuntimeError):
                self.fetch_event_files()  # the thread that reads logs reports and reopens a broken connection
            with contextlib.suppress(AwsddpError, OSError, LookupError, RuntimeError):
                self.report_uploads()
            with contextlib.suppress(AwsddpError, OSError, LookupError, RuntimeError):
                send_left_events(self._connected, self._job)
            took = time.monotonic() - began
            wait_s = max(
                FETCH_INTERVAL_S, took / MAX_LISTING_SHARE, (self._fetched - before) / BYTES_PER_SECOND
            )

    def report_uploads(self) -> None:
        """Report (once) that results are no longer uploaded, and why. Raises AwsddpError."""
        job, fleet = self._job, self._connected.fleet
        if job.save_to is None:
            return
        requests = dict.fromkeys(fleet.nodes_of_job(job), messages.State())
        answers = call_nodes_separately(fleet, requests, timeout_s=MANIFEST_S)
        documents = {
            node: answer.jobs for node, answer in answers.items() if not isinstance(answer, AwsddpError)
        }
        saving = choose_job(job_reports.merge_jobs(documents), job.job).saving
        if saving is None:
            return
        is_uploading = not saving.error and not saving.is_silent
        if self._is_uploading and not is_uploading:
            self._connected.session.say(f"saving {job.job} to {job.save_to}: {describe_saving(saving)}")
        self._is_uploading = is_uploading

    def fetch_event_files(self) -> None:
        """Fetch the event files that are new or have grown. Raises AwsddpError."""
        from awsddp.nodes.download import pull, rsync_transfer

        session, fleet = self._connected.session, self._connected.fleet
        target = session.results / self._job.job
        files = target.glob(f"node*/**/{EVENTS}*")
        sizes = {path.relative_to(target).as_posix(): path.lstat().st_size for path in files}
        at_once = calls.EVENTS_REQUEST_BYTES
        request = make_manifest_request(session, self._job, events=sizes, at_once=at_once)
        requests = dict.fromkeys(fleet.nodes_of_job(self._job), request)
        answers = call_nodes_separately(fleet, requests, timeout_s=MANIFEST_S)
        listed = {node: answer for node, answer in answers.items() if not isinstance(answer, AwsddpError)}
        wanted: dict[int, list[ResultFile]] = {}
        for file in assign_local_names(listed):
            if file.data is not None and file.path.rpartition("/")[2].startswith(EVENTS):
                wanted.setdefault(file.node, []).append(file)
        with self._writing, session.folder.lock("fetch", part="results"):
            if wanted and not self._ended.is_set():
                fetched = pull(wanted, target, transfer=rsync_transfer(session.folder.ssh_config))
                self._fetched += sum(node.bytes for node in fetched.values())
