"""The cluster that a command works on: find it, connect to it, its jobs, their results, its end.

What only requests to nodes need is imported where they are sent: `status` needs AWS alone.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from awsddp.errors import AwsddpError, CloudError, ConfigError, NodeError, NotFoundError
from awsddp.nodes.failures import NodeFailure, NodesFailed
from awsddp.parallel import each, soon
from awsddp.records import ACTIVE, ENDED, JobRecord, Listed, Node, Prepared, Target, unfetched_jobs
from awsddp.report import node_name
from awsddp.spec import seconds
from awsddp.state import Record
from awsddp.verbs import local
from awsddp.verbs.context import Context, aws_of, check_account, jump_of, target_of
from awsddp.verbs.ledger import note_fetched, was_local

if TYPE_CHECKING:
    from awsddp.aws.session import Aws
    from awsddp.aws.teardown import Teardown
    from awsddp.nodes.connection import Endpoint, Preconnect
    from awsddp.nodes.jump import Jump
    from awsddp.nodes.results import Fetched
    from awsddp.nodes.transport import Fleet

REACH_S = 20.0
"""How long connecting to a node may take before the others are asked without it."""
FETCH_S = 600.0
"""How long another client of this machine may take to fetch the same results."""
FRESH_S = 2.0
"""How old the nodes' tags may be that are written back, if no client of this machine has held them since."""
# Terminated instances are listed for about as long: until then one that is not listed is not listed yet.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/terminating-instances.html
LISTED = timedelta(hours=1)
OFF = ("stopping", "stopped")
"""EC2's states of an instance that `up` starts."""
_NEWEST = 5
"""How many jobs are named where one is not found."""


class NoNodes(NodeError):
    """The cluster exists, and none of its nodes can be reached now. `stopped` hold these jobs."""

    stopped: tuple[str, ...] = ()


@dataclass(kw_only=True)
class ClusterHandle:
    """One cluster: what AWS lists of it, what the folder remembers, and the connections to its nodes.

    `gateway` is None where the local cloud is meant and there is none. `listed` is None where AWS lists
    nothing, `others` are clusters of the same name and owner with another id, as two machines may make at
    once. `known` is None where the folder is lost. `nodes` are those that the command works with, `excluded`
    exist and are of no use now. `searched` names the places, for messages. `sessions` are clusters of this
    name by other sessions of the caller's role, where nothing else is listed.
    """

    ctx: Context
    target: Target
    gateway: "Aws | None" = None
    known: Record | None = None
    listed: Listed | None = None
    others: tuple[Listed, ...] = ()
    sessions: tuple[Listed, ...] = ()
    searched: tuple[str, ...] = ("the local cloud, which is not running",)
    nodes: tuple[Node, ...] = ()
    excluded: tuple[Node, ...] = ()
    preconnect: "Preconnect | None" = None
    connections: "Fleet | None" = None

    @classmethod
    @contextlib.contextmanager
    def find(
        cls, ctx: Context, *, newer: bool = False, whole: bool = False, everywhere: bool = True
    ) -> "Iterator[ClusterHandle]":
        """Search where the cluster is remembered, whatever is set now; without a record in the running local
        cloud, in the given or configured region, then, if `everywhere`, in every enabled region.

        One call lists the nodes of a cluster that is remembered; with `whole` also what exists beside them.
        With `newer` a folder that a newer awsddp wrote counts as lost. Raises CloudError where AWS does not
        answer; no account at all counts as nothing there, unless the folder remembers a cluster. Raises
        ConfigError where the command line names another place than the record.
        """
        record = ctx.folder.read(newer=newer)
        with contextlib.ExitStack() as stack:
            cluster = _search(ctx, record, stack, whole=whole, everywhere=everywhere)
            with cluster.naming_ended():
                yield cluster

    @classmethod
    @contextlib.contextmanager
    def ready(cls, ctx: Context, *, node: int | None = None) -> "Iterator[ClusterHandle]":
        """Find the cluster, all nodes (or `node`) prepared and running.

        Raises NotFoundError, NodeError, CloudError.
        """
        with cls.partly_ready(ctx) as cluster:
            cluster.nodes = cluster.ready_nodes(node)
            yield cluster

    @classmethod
    @contextlib.contextmanager
    def partly_ready(cls, ctx: Context) -> "Iterator[ClusterHandle]":
        """Find the cluster; `connect_reachable` works with those nodes that are prepared and running.

        Begins to connect to its last known addresses, unless that is over a jump host. What AWS says decides
        what is used. Raises CloudError.
        """
        from awsddp.nodes.connection import Preconnect

        preconnect = None
        with naming_holder(ctx), contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, ConfigError):
                record = ctx.folder.read()
                if record is not None and jump_of(ctx, record) is None:
                    endpoints = _endpoints(record, record.prepared, record.addresses)
                    preconnect = Preconnect(endpoints, key=ctx.folder.key, known_hosts=ctx.folder.known_hosts)
                    stack.callback(preconnect.close)
            cluster = stack.enter_context(cls.find(ctx))
            cluster.preconnect = preconnect
            yield cluster

    @property
    def aws(self) -> "Aws":
        """The gateway to the cloud that the cluster is in."""
        assert self.gateway is not None, "there is a cloud to ask"
        return self.gateway

    @property
    def fleet(self) -> "Fleet":
        """The connections to the nodes, within `connect`."""
        assert self.connections is not None, "connected first"
        return self.connections

    @property
    def record(self) -> Record:
        """What this machine remembers of the cluster."""
        assert self.known is not None, "remembered, or refused before"
        return self.known

    @property
    def own(self) -> Listed | None:
        """What AWS lists of the record's own cluster."""
        is_own = self.listed is not None and self.known is not None and self.listed.id == self.known.id
        return self.listed if is_own else None

    @property
    def all_listed(self) -> tuple[Listed, ...]:
        """Everything that AWS lists by this name and owner."""
        return (self.listed, *self.others) if self.listed is not None else ()

    @property
    def unfetched(self) -> list[str]:
        """The jobs whose results are not fetched, by the tags of the nodes that live."""
        return self.listed.unfetched if self.listed is not None else []

    def is_prepared(self, node: Node) -> bool:
        """Return whether `up` has made this instance ready, so that its host key is known."""
        return any(one.instance_id == node.instance_id for one in self.record.prepared)

    def state_of(self, node: Node) -> str:
        """Return what a node is, in words: EC2's state, or "being prepared" on its way to ready."""
        starts = node.state in ("pending", "running") and not self.is_prepared(node)
        return f"{node_name(node.node)} is {'being prepared' if starts else node.state}"

    def prepared(self, node: int) -> Prepared:
        """Return what was found on a node."""
        return next(one for one in self.record.prepared if one.node == node)

    def machines(self, cluster: Listed) -> str:
        """Return how many machines of a listed cluster exist, of which type and where."""
        where = replace(self.target, region=cluster.region).place
        return f"{len(cluster.live)} x {cluster.live[0].instance_type} in {where}"

    def use(self, nodes: Sequence[Node], *, of: Sequence[Node]) -> None:
        """Work with these nodes of a cluster."""
        self.nodes = tuple(nodes)
        self.excluded = tuple(node for node in of if node not in nodes)

    def use_reachable(self) -> None:
        """Work with those nodes that are prepared and running.

        Raises NotFoundError, CloudError, NoNodes where there are none.
        """
        living = self.login_nodes()
        self.use([node for node in reachable(living) if self.is_prepared(node)], of=living)
        if not self.nodes:
            why = ", ".join(map(self.state_of, living))
            next = "awsddp up   # start or finish it"
            error = NoNodes(f"no node of cluster {self.ctx.spec.name} can be reached", why, next)
            if all(node.state in OFF for node in living):
                error.stopped = tuple(unfetched_jobs(living))
            raise error

    def remember(self, **changes: Any) -> None:
        """Change fields of the record, here and in the folder. Raises ConfigError where the disk refuses."""
        self.change(lambda record: replace(record, **changes))

    def change(self, change: Callable[[Record], Record]) -> None:
        """Change the record by what it is now, here and in the folder. Raises ConfigError."""
        self.known = self.ctx.folder.update(change) or change(self.record)

    # What exists.

    def look(self, *, owner: str | None = None, whole: bool = True) -> None:
        """Read what AWS lists now by this name and owner, the record's own cluster first.

        The owner is that of the record, else the caller. If not `whole`, one call lists the nodes, and
        the rest is read only where no node lives. Raises CloudError.
        """
        from awsddp.aws.clusters import find_clusters, glance

        record, name = self.known, self.ctx.spec.name
        owner = owner or (record.owner if record else self.aws.identity().user_id)
        known = record.remembered if record else None
        clusters = () if whole else glance(self.aws, name, owner, remembered=known)
        clusters = clusters or find_clusters(self.aws, name, owner, remembered=known)
        own = [one for one in clusters if record is not None and one.id == record.id]
        self.listed = next(iter((*own, *clusters)), None)
        self.others = tuple(one for one in clusters if one is not self.listed)

    def wait_until_listed(self) -> None:
        """Wait for up to two minutes until AWS lists every instance that was prepared within the hour.

        Looks again only if something was missing. Raises CloudError.
        """
        from awsddp.aws.clusters import by_id, describe
        from awsddp.aws.waits import CLOCK, VISIBLE_S, poll

        record, own = self.record, self.own
        missing = {one.instance_id for one in record.prepared}
        missing -= {node.instance_id for node in own.nodes} if own else set()
        if not missing or CLOCK.now() - record.created > LISTED:
            return
        # A cloud that brings its own keys knows its caller for as long as it lives: this is another one.
        if record.target.access_key_id is not None and record.owner != self.aws.identity().user_id:
            return

        def found() -> bool | None:
            return True if len(describe(self.aws, by_id(*missing))) == len(missing) else None

        poll(found, deadline_s=VISIBLE_S)
        self.look()

    def wait_until_launches_show(self) -> None:
        """Wait until AWS lists the instances that this machine launched, or those of an interrupted launch.

        Raises CloudError.
        """
        from awsddp.aws.instances import appear, filled_by

        record, own = self.known, self.own
        if record is None:
            return
        if record.intent is None:
            self.wait_until_listed()
        elif not (own and own.live and filled_by(record.intent) <= {node.node for node in own.live}):
            appear(self.aws, record.intent, on_event=self.ctx.on_event)
            self.look()

    @contextlib.contextmanager
    def naming_ended(self) -> Iterator[None]:
        """Add to a failure of nodes which of them EC2 has stopped or terminated meanwhile."""
        from awsddp.aws.clusters import by_id, describe

        try:
            yield
        except (NodeFailure, NodesFailed) as error:
            with contextlib.suppress(CloudError):
                numbers = {node.instance_id: node.node for node in self.nodes}
                off = sorted(
                    f"EC2 says: {node_name(numbers[one['InstanceId']])} is {one['State']['Name']}"
                    for one in (describe(self.aws, by_id(*numbers)) if numbers else ())
                    if one["State"]["Name"] != "running"
                )
                error.why = "\n".join(filter(None, (error.why, *off)))
            raise

    def require_live(self) -> Listed:
        """Return what AWS lists of a cluster that has nodes. Raises NotFoundError, CloudError."""
        if self.gateway and self.known and (self.own is not None or self.listed is None):
            self.wait_until_listed()
        if self.listed is None or not self.listed.live:
            self.refuse_sessions()
            name, searched = self.ctx.spec.name, ", ".join(self.searched)
            creates = _creates(self.ctx, is_local=self.target.name == "local")
            raise NotFoundError(f"no cluster {name}", f"searched: {searched}", creates)
        return self.listed

    def refuse_sessions(self) -> None:
        """Raise NotFoundError that names the clusters of this name by other sessions of the caller's role."""
        if not self.sessions:
            return
        made = [(one.owner.partition(":")[2], self.machines(one)) for one in self.sessions]
        raise NotFoundError(
            f"no cluster {self.ctx.spec.name} of this login; another session of your role has one, which "
            "costs money",
            "\n".join(f"{machines}, made by {session}" for session, machines in made),
            f"role_session_name = {made[0][0]} in the AWS profile makes it yours; then: awsddp down\n"
            "awsddp status --all   # what it costs",
        )

    def login_nodes(self) -> tuple[Node, ...]:
        """Return the nodes of a cluster whose key is here. Raises NotFoundError, CloudError."""
        cluster = self.require_live()
        if self.own is None or not self.ctx.folder.key.exists():
            raise NotFoundError(
                f"cluster {cluster.name} exists, but this machine does not have its key",
                f"{self.ctx.folder.path} does not hold it",
                "use the machine that made it, or terminate it: awsddp down",
            )
        return cluster.live

    def ready_nodes(self, number: int | None = None) -> tuple[Node, ...]:
        """Return the nodes, all (or the one of this number) prepared and running.

        Raises NotFoundError or NodeError, CloudError.
        """
        name, nodes = self.ctx.spec.name, self.login_nodes()
        if all(node.state in OFF for node in nodes):
            raise NodeError(f"cluster {name} is stopped", "", "awsddp up   # start it")
        chosen, living = choose_nodes(nodes, number), {node.instance_id for node in nodes}
        why = [
            self.state_of(node) for node in chosen if node.state != "running" or not self.is_prepared(node)
        ]
        if number is None:
            lost = (one for one in self.record.prepared if one.instance_id not in living)
            why += [f"{node_name(one.node)} ({one.instance_id}) is gone" for one in lost]
        if why:
            raise NodeError(f"cluster {name} is not ready", ", ".join(why), "awsddp up   # finish it")
        return nodes

    def end(self, cluster: Listed) -> "Teardown":
        """End everything of a listed cluster. Raises CloudError."""
        from awsddp.aws.teardown import teardown

        return teardown(self.aws, cluster, on_event=self.ctx.on_event)

    # Connections.

    @contextlib.contextmanager
    def connect(
        self,
        nodes: Sequence[Node] | None = None,
        *,
        deadline_s: float = 60,
        partial: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> "Iterator[Fleet]":
        """Connect to the nodes (all that the command works with), for as long as the context.

        Raises NodesFailed where one cannot be reached; with `partial` the fleet's `failures` names it. What
        `meanwhile` raises, as for Fleet, ends the attempt.
        """
        from awsddp.nodes.transport import Fleet

        with Fleet(
            self.endpoints(nodes),
            **self.login(),
            deadline_s=deadline_s,
            partial=partial,
            preconnect=self.preconnect,
            meanwhile=meanwhile,
            on_event=self.ctx.on_event,
        ) as self.connections:
            yield self.connections

    @contextlib.contextmanager
    def connect_reachable(self) -> "Iterator[Fleet]":
        """Connect to the nodes that can be reached, of those that are ready. Raises as `use_reachable`."""
        self.use_reachable()
        with self.connect(deadline_s=REACH_S, partial=True) as fleet:
            if not fleet.nodes:
                error = NodesFailed(fleet.failures, {}, len(self.nodes))
                raise NoNodes(error.message, error.why, error.next)
            yield fleet

    def login(self) -> dict[str, Any]:
        """Return what a login needs beside the address: key, known host keys, jump host."""
        folder = self.ctx.folder
        jump = jump_of(self.ctx, self.record)
        return {"key": folder.key, "known_hosts": folder.known_hosts, "jump": jump}

    def endpoints(self, nodes: Sequence[Node] | None = None) -> "tuple[Endpoint, ...]":
        """Return how nodes (all that the command works with) are reached; write where all nodes are.

        Raises NodeError for one without an address, ConfigError where the disk refuses.
        """
        chosen = self.nodes if nodes is None else nodes
        lost = [node_name(node.node) for node in chosen if node.address is None]
        if lost:
            raise NodeError(f"{', '.join(lost)}: no address", "the instance is not running", "awsddp status")
        self.publish()
        addresses = {node.instance_id: str(node.address) for node in chosen}
        return _endpoints(self.record, chosen, addresses, jump=self.login()["jump"])

    def publish(self) -> None:
        """Write where all nodes are, to the record and the ssh_config. Raises ConfigError."""
        from awsddp.nodes.sync import ssh_config

        listed = self.own.nodes if self.own else self.nodes
        running = {node.instance_id: str(node.address) for node in reachable(listed)}
        if not running.items() <= self.record.addresses.items():
            self.change(lambda record: replace(record, addresses={**record.addresses, **running}))
        login, seen = self.login(), {node.instance_id for node in listed}

        def entries(prefix: str) -> str:
            record = self.ctx.folder.read() or self.record
            # What AWS did not list when this command looked, another one has launched and prepared since.
            newer = {one.node: one for one in record.prepared if one.instance_id not in seen}
            nodes = newer | {node.node: node for node in reachable(listed)}
            addresses = {**record.addresses, **running}
            chosen = [node for _, node in sorted(nodes.items())]
            endpoints = _endpoints(record, chosen, addresses, jump=login["jump"])
            return ssh_config(endpoints, **login, prefix=prefix) if endpoints else ""

        self.ctx.folder.publish(entries)

    def say_missing(self) -> None:
        """Report which nodes of the cluster were skipped, and why."""
        living = {node.instance_id for node in (*self.nodes, *self.excluded)}
        for one in self.record.prepared:
            if one.instance_id not in living:
                self.ctx.say(f"{node_name(one.node)} ({one.instance_id}) is gone")
        for node in self.excluded:
            self.ctx.say(f"{self.state_of(node)}, and was skipped ({node.instance_id})")
        for number, failure in sorted(self.fleet.failures.items()):
            self.ctx.say(f"{node_name(number)} was skipped: {failure.message}")

    # Jobs.

    def jobs(self, *, partial: bool = False) -> tuple[JobRecord, ...]:
        """Return every job that the connected nodes know, oldest first.

        With `partial` a node that does not answer joins the fleet's failures, unless none does. A job that
        this machine does not remember is none of this cluster's where its name is taken in the results
        folder: no node may choose a folder of the user's.
        """
        from awsddp.jobs import results
        from awsddp.verbs.requests import answering, answers_of, whole
        from awsddp.verbs.results import results_dir

        request = {"do": "state"}
        answers = answers_of(self.fleet, dict.fromkeys(answering(self.fleet), request))
        failed = {node: answer for node, answer in answers.items() if isinstance(answer, NodeError)}
        if partial and len(failed) < len(answers):
            self.fleet.failures.update(failed)
            answers = {node: answer for node, answer in answers.items() if node not in failed}
        documents = {node: answer["jobs"] for node, answer in whole(answers).items()}
        jobs = results.jobs(documents, results=self.ctx.job.job.results)
        record = self.ctx.folder.read()
        known = {job.job for job in record.jobs} if record else set()
        return tuple(
            job for job in jobs if job.job in known or not os.path.lexists(results_dir(self.ctx, job.job))
        )

    def job(self, name: str | None) -> JobRecord:
        """Return the job of this name, or the last one, as the nodes that answer know it.

        Raises NotFoundError, and NodeError for one that is remembered and whose nodes all are missing.
        """
        try:
            return choose_job(self.jobs(partial=True), name)
        except NotFoundError:
            remembered = [job for job in self.record.jobs if job.job == name and job.nodes]
            for job in remembered:
                why = "\n".join(self.missing(job).values())
                raise NodeError(f"no reachable node knows job {name}", why, "awsddp jobs") from None
            raise

    def cancel(self, job: str, *, grace_s: float | None = None, launch: str | None = None) -> None:
        """End a job on every node that knows it: TERM, the grace, KILL; return when it has ended.

        With `launch` only where the job is of that launch.
        """
        from awsddp.jobs import protocol
        from awsddp.verbs.requests import ANSWER_S, answering, ask

        grace = seconds(self.ctx.job.job.grace) if grace_s is None else grace_s
        states = ask(self.fleet, {node: {"do": "state"} for node in answering(self.fleet)})
        knows = {node for node, state in states.items() if any(one["job"] == job for one in state["jobs"])}
        request = protocol.cancel_request(job, grace=grace, launch=launch)
        ask(self.fleet, dict.fromkeys(knows, request), timeout_s=grace + ANSWER_S)

    def end_job(self, job: JobRecord) -> JobRecord:
        """End a job that still runs, with its grace, and return it as it is then."""
        if job.state not in ACTIVE:
            return job
        ranks = f": its ranks have {self.ctx.job.job.grace}" if job.state == "running" else ", which waits"
        self.ctx.say(f"ending job {job.job}{ranks}")
        self.cancel(job.job)
        return choose_job(self.jobs(partial=True), job.job)

    def missing(self, job: JobRecord) -> dict[int, str]:
        """Return why a node's part of a job cannot be fetched now, by the number that the node had."""
        from awsddp.verbs.requests import holders

        reached = {self.fleet.endpoints[node].instance_id for node in holders(self.fleet, job)}
        living = {node.instance_id: node for node in (*self.nodes, *self.excluded)}
        reasons = {}
        for one in job.nodes:
            node, who = living.get(one.instance_id), f"{node_name(one.node)} ({one.instance_id})"
            if one.instance_id in reached:
                continue
            if node is None:
                reasons[one.node] = f"{who} is gone; its part of job {job.job} is lost"
            elif node.state in ENDED:
                lost = job.job in node.unfetched
                fate = "lost" if lost else "not here: who ended the node may have fetched it"
                reasons[one.node] = f"{who} is {node.state}; its part of job {job.job} is {fate}"
            elif node.state != "running":
                reasons[one.node] = f"{who} is {node.state}; it holds its part of job {job.job}"
            else:
                failure = self.fleet.failures.get(node.node)
                why = "it is being prepared" if failure is None else failure.summary
                reasons[one.node] = f"{who} holds its part of job {job.job}: {why}"
        return reasons

    def still_missing(self, job: JobRecord) -> dict[int, str]:
        """Return why parts of a job cannot be fetched now, by node, unless they were fetched before."""
        from awsddp.verbs.results import is_fetched, results_dir

        return {} if is_fetched(results_dir(self.ctx, job.job), job) else self.missing(job)

    # Results.

    def fetch(self, job: JobRecord) -> "dict[int, Fetched]":
        """Fetch a job's results from the nodes that can be reached now, verify them, then release the nodes.

        The job that is written beside them says what is missing. One client at a time does so. Over
        job.results_limit `ctx.agree` decides. Raises Unfetched where something that the job made stays on the
        nodes, NodeError where a node does not send what it listed, ConfigError where the disk is full.
        """
        lost = self.still_missing(job)
        job = replace(job, missing=tuple(lost))
        with self.ctx.folder.lock("fetch", part="results", wait_s=FETCH_S):
            self.ctx.folder.remember(job)
            return self._fetch(job, lost)

    def _fetch(self, job: JobRecord, lost: Mapping[int, str]) -> "dict[int, Fetched]":
        from awsddp.aws.power import release, unfetched_of
        from awsddp.jobs.results import encode
        from awsddp.nodes.results import pull
        from awsddp.verbs.requests import holders
        from awsddp.verbs.results import draw_loss, older_jobs, results_dir
        from awsddp.verbs.selecting import say_growing, select, unfetched

        folder = results_dir(self.ctx, job.job)
        nodes, began = holders(self.fleet, job), time.monotonic()
        held = [node for node in self.nodes if node.node in nodes]
        tagged = soon(unfetched_of, self.aws, held) if held and job.state not in ACTIVE else None
        selected = select(self.ctx, self.fleet, job, nodes, folder)

        def job_json(came: "Mapping[int, Fetched]") -> dict[str, bytes]:
            nonlocal selected
            selected = selected.after(job, came)
            missing = sorted({*job.missing, *(one.node for one in selected.owed)})
            return {"job.json": encode(replace(job, missing=tuple(missing)))}

        fetched = pull(
            selected.wanted,
            folder,
            ssh_config=self.ctx.folder.ssh_config,
            links=selected.links,
            also=job_json,
            on_event=self.ctx.on_event,
        )
        note_fetched(self.ctx, self.record, job.job, sum(one.bytes for one in fetched.values()))
        draw_loss(folder)
        say_growing(self.ctx, job, selected.growing)
        if selected.owed:
            error = unfetched(job, selected)
            error.why = "\n".join((error.why, *lost.values()))
            raise error
        if tagged is not None:
            with self._tags() as free_s:
                # A file's time is up to 10 ms late.
                fresh = time.monotonic() - began < min(free_s - 0.1, FRESH_S)
                older = older_jobs(self.ctx, self.fleet, tagged.result())
                release(self.aws, held, job.job, tagged=tagged.result() if fresh else None, older=older)
        return fetched

    def keep(self, nodes: Sequence[Node], job: str) -> None:
        """Have AWS keep the nodes' disks at a poweroff, for the job. Raises CloudError."""
        from awsddp.aws.power import keep_on_poweroff

        with self._tags():
            keep_on_poweroff(self.aws, nodes, job)

    def release(self, nodes: Sequence[Node], job: str) -> None:
        """Let the nodes forget that they owe the job's results. Raises CloudError."""
        from awsddp.aws.power import release

        with self._tags():
            release(self.aws, nodes, job)

    def _tags(self) -> AbstractContextManager[float]:
        """Hold the tags that name jobs, which are read, changed and written back, against other clients."""
        return self.ctx.folder.lock("train", part="tags", wait_s=FETCH_S)

    def finish(self, job: JobRecord) -> dict[str, Any]:
        """Fetch the results of a job that was followed, and return it as the `train` document.

        The job's state is remembered first; an error that keeps results away carries the document as its
        `result`. Missing results of a job that did not succeed are only reported: it has a cause of its own.
        """
        from awsddp.verbs.results import job_result

        try:
            self.ctx.folder.remember(job)
            self.fetch(job)
            lost = self.still_missing(job)
            if lost and job.state == "succeeded":
                raise NodeError("a part of its results is missing", "\n".join(lost.values()))
        except AwsddpError as error:
            error.result = job_result(self.ctx, job)
            where = "fetched, and also on the nodes" if error.result["fetched"] else "not all fetched"
            error.message = f"job {job.job} {job.state}, its results are {where}: {error.message}"
            error.next = f"awsddp fetch {job.job}   # again" + (f"\n{error.next}" if error.next else "")
            raise
        for text in lost.values():
            self.ctx.say(text)
        return job_result(self.ctx, job)


def choose_job(jobs: Sequence[JobRecord], name: str | None) -> JobRecord:
    """Return the job of this name, or the last one. Raises NotFoundError."""
    chosen = next((job for job in reversed(jobs) if name in (None, job.job)), None)
    if chosen is None:
        if not jobs:
            raise NotFoundError(
                f"no job {name}" if name else "no job", "no jobs on this cluster yet", "awsddp train"
            )
        names = ", ".join(job.job for job in jobs[-_NEWEST:])
        raise NotFoundError(f"no job {name}", f"the newest jobs: {names}", "awsddp jobs   # all of them")
    return chosen


def choose_nodes(nodes: Sequence[Node], number: int | None) -> tuple[Node, ...]:
    """Return the node of this number, or all of them. Raises NotFoundError."""
    chosen = tuple(node for node in nodes if number in (None, node.node))
    if not chosen:
        known = ", ".join(node_name(node.node) for node in nodes)
        raise NotFoundError(f"no {node_name(number or 0)} in this cluster", f"there are: {known}")
    return chosen


def reachable(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes that run and have an address."""
    return tuple(node for node in nodes if node.state == "running" and node.address and node.node >= 0)


@contextlib.contextmanager
def naming_holder(ctx: Context) -> Iterator[None]:
    """Name the command that changes the cluster now, or that it was terminated, as a cause of what fails."""
    try:
        yield
    except (NodeError, NotFoundError) as error:
        holder, why = ctx.folder.holder(), ""
        if holder is not None:
            why = f"{holder} is changing the cluster"
        elif isinstance(error, NodeError) and ctx.folder.read(newer=True) is None:  # it had a record before
            why, error.next = "another command has terminated the cluster", _creates(ctx)
        error.why = "\n".join(filter(None, (error.why, why)))
        raise


def _creates(ctx: Context, *, is_local: bool = False) -> str:
    """Return the command that creates the cluster, where it was or was searched."""
    return f"awsddp up{' --local' if is_local or was_local(ctx) else ''}   # create it"


def _endpoints(
    record: Record, nodes: Sequence[Node | Prepared], addresses: dict[str, str], *, jump: "Jump | None" = None
) -> "tuple[Endpoint, ...]":
    """Return how nodes are reached; `addresses` go by instance id."""
    from awsddp.nodes.connection import Endpoint

    return tuple(
        Endpoint(
            node=one.node,
            instance_id=one.instance_id,
            host=one.instance_id if jump is not None and jump.by_id else addresses[one.instance_id],
            port=record.target.ssh_port,
            user=record.ssh_user,
        )
        for one in nodes
        if one.instance_id in addresses
    )


# The search.


def _search(
    ctx: Context, record: Record | None, stack: contextlib.ExitStack, *, whole: bool, everywhere: bool
) -> ClusterHandle:
    """Search the place that the record names, and no other; without a record the nearest places first."""
    place = Target(name="local") if record is None else target_of(ctx, record)
    nearest = ClusterHandle(ctx=ctx, target=place, known=record)
    searched: tuple[str, ...] = ()
    for target in _places(ctx, record, stack, ending=whole):
        searched = (*searched, target.place)
        try:
            nearest = _search_in(ctx, record, target, searched, whole=whole or record is None)
        except (CloudError, ConfigError) as error:
            # There is no AWS to ask from here, and this machine has ended a cluster of this name: "absent".
            no_account = isinstance(error, ConfigError) or getattr(error, "code", "") == "NoCredentialsError"
            ended = any((ctx.home / "history").glob(f"{ctx.spec.name}-????????"))
            if record is not None or not (no_account and (nearest.gateway is not None or ended)):
                raise
            break
        if nearest.listed is not None:
            return nearest
    return _search_regions(nearest) if everywhere and record is None else nearest


def _places(
    ctx: Context, record: Record | None, stack: contextlib.ExitStack, *, ending: bool
) -> Iterator[Target]:
    """Yield the places to search, nearest first; a local cloud only where it runs."""
    place, requested = target_of(ctx, record), ctx.spec.cluster
    if place.name == "local" or not (record or requested.region or requested.profile):
        opened = local.opened(
            ctx.home, ctx.on_event, start=False, ending=ending, remembered=place.daemon_home
        )
        if (running := stack.enter_context(opened)) is not None:
            yield running
    if place.name != "local":
        yield place


def _search_in(
    ctx: Context,
    record: Record | None,
    target: Target,
    searched: tuple[str, ...],
    *,
    whole: bool = True,
    login: "Aws | None" = None,
) -> ClusterHandle:
    from awsddp.aws.clusters import of_other_sessions

    aws = aws_of(ctx, target, login=login)
    cluster = ClusterHandle(ctx=ctx, target=target, gateway=aws, known=record, searched=searched)
    cluster.look(whole=whole)
    if record is not None and cluster.own is None:
        check_account(ctx, aws, record)
    if cluster.listed is None:
        cluster.sessions = of_other_sessions(aws, ctx.spec.name, aws.identity().user_id)
    return cluster


def _search_regions(nearest: ClusterHandle) -> ClusterHandle:
    """Search the other enabled regions, side by side; return where the cluster is, else `nearest`."""
    from awsddp.aws.facts import enabled_regions

    ctx = nearest.ctx
    if nearest.target.name == "local" or ctx.local or ctx.spec.cluster.region:
        return nearest
    aws = nearest.aws
    regions = [name for name in enabled_regions(aws) if name != aws.region]
    searched = (*nearest.searched, *regions)

    def search(region: str) -> ClusterHandle:
        return _search_in(ctx, None, replace(nearest.target, region=region), searched, login=aws)

    everywhere = each(search, regions)
    sessions = tuple(one for cluster in (nearest, *everywhere) for one in cluster.sessions)
    found = (cluster for cluster in everywhere if cluster.listed)
    return next(found, replace(nearest, searched=searched, sessions=sessions))
