"""Cluster: the object that the command line, scripts and notebooks share.

Nothing here prints, or handles signals. Progress goes to `on_event`, failures are the errors of the command
line. What only some methods need is imported where they use it: `status` needs AWS alone.
"""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from awsddp.errors import AwsddpError, NodeError
from awsddp.model.events import Event, OnEvent
from awsddp.model.records import Listed, Node, Target
from awsddp.settings import loader
from awsddp.settings.spec import FILE, KEYWORDS, ClusterSpec, JobSpec
from awsddp.settings.values import check_file_names, check_name
from awsddp.state import Folder, Record, home

if TYPE_CHECKING:
    from awsddp.api.cluster import Plan
    from awsddp.api.job import Job
    from awsddp.api.keywords import JobKeys, Keys
    from awsddp.aws.client import Aws
    from awsddp.cluster.reconcile import Confirm
    from awsddp.model import documents
    from awsddp.nodes.connection import Preconnect
    from awsddp.nodes.fleet import Fleet


class Cluster:
    """A cluster by its name, as `awsddp -c NAME`: it may exist already or not yet.

    The constructor asks nothing and reads nothing. `local` is --local, `region` and `profile` as on the
    command line; every other keyword is a key of awsddp.toml that holds for all methods (`workdir=...`,
    `results=...`). awsddp.toml is read from the current folder. `on_event` gets progress, on the thread that
    called the method or iterates `Job.logs`. Raises UsageError for a keyword that awsddp.toml does not have,
    ConfigError for an invalid name; the methods raise ConfigError for an invalid value.

    A method that works with what exists finds it first (`find`, `ready`), and works with a copy that knows:
    `gateway` is None where the local cloud is meant and there is none. `listed` is what AWS lists, None where
    that is nothing; `others` are clusters of the same name and owner with another id, as two machines may
    make at once. `known` is None where the folder is lost. `nodes` are those that the method works with,
    `excluded` exist and are of no use now. `searched` names the places, for messages. `sessions` are clusters
    of this name by other sessions of the caller's role, where nothing else is listed.
    """

    verb: Literal["train", "run"] = "train"
    """What starts a job: `run` ends the cluster with it."""
    target = Target()
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

    def __init__(
        self,
        name: str = "default",
        *,
        local: bool = False,
        on_event: OnEvent = lambda event: None,
        **keys: "Unpack[Keys]",
    ) -> None:
        check_name(name)
        check_file_names()
        self.name = name
        self.local = local
        self.on_event = on_event
        self.agree: Callable[[str], bool] = lambda question: False
        """Answers a question of a method that has begun; without a terminal the answer is no."""
        self.ask: Callable[[str], bool | None] = lambda question: None
        """Asks what only a person may answer; None where nobody can be asked."""
        self._keys = loader.known_keywords(keys)
        self._open = contextlib.ExitStack()

    # What was asked.

    @cached_property
    def _settings(self) -> tuple[ClusterSpec, JobSpec]:
        overrides = {KEYWORDS[key]: value for key, value in self._keys.items()}
        labels = {KEYWORDS[key]: key for key in self._keys}
        return loader.load(self.name, file=Path(FILE), overrides=overrides, labels=labels)

    @cached_property
    def spec(self) -> ClusterSpec:
        """What is asked of the cluster, by options, variables and awsddp.toml. Raises ConfigError."""
        return self._settings[0]

    @cached_property
    def job_spec(self) -> JobSpec:
        """What is asked of its jobs: [job], [env] and [sync]. Raises ConfigError."""
        return self._settings[1]

    @cached_property
    def folder(self) -> Folder:
        """What this machine remembers of the cluster; it may be empty."""
        return Folder(home(), self.name)

    @property
    def home(self) -> Path:
        """$AWSDDP_HOME."""
        return self.folder.root

    @property
    def results(self) -> Path:
        """The local folder that receives the results of the jobs, a folder each. Raises ConfigError."""
        return Path(self.job_spec.sync.workdir) / self.job_spec.job.results

    def but(self, **changes: Any) -> Self:
        """Return a copy with other attributes."""
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    @contextlib.contextmanager
    def asking(self, keys: Mapping[str, object] | None = None) -> Iterator[Self]:
        """Yield the cluster with these keys set, too. An error names what was typed, and what to type next.

        Raises UsageError for a key that awsddp.toml does not have.
        """
        asked = self
        if keys:
            asked = self.but(_keys={**self._keys, **loader.known_keywords(keys)})
            for read in ("_settings", "spec", "job_spec"):
                asked.__dict__.pop(read, None)
        try:
            yield asked
        except AwsddpError as error:
            from awsddp.session.next_steps import advise

            advise(asked, error)
            raise

    def say(self, text: str) -> None:
        """Report a step of a method."""
        self.on_event(Event(text))

    # The methods of the command line.

    def plan(self, **keys: "Unpack[Keys]") -> "Plan":
        """Return what `up` with these keys would do, such as `nodes=2, instance_type="g5.xlarge"`.

        Changes nothing. Raises ConfigError, CloudError.
        """
        from awsddp.api.cluster import Plan
        from awsddp.cluster.plan import plan

        with self.asking(keys) as asked:
            return Plan(plan(asked), asked)

    def up(
        self, agreed: "Plan | None" = None, *, confirm: "Confirm | None" = None, **keys: "Unpack[Keys]"
    ) -> "documents.ClusterDocument":
        """Launch and prepare the nodes, or change what exists; return the `up` document.

        Idempotent: finishes, repairs, resizes. On AWS this needs consent: a plan, or `max_price_usd` (per
        hour, all nodes together) among the keys or in awsddp.toml, or `confirm`, which is called with the
        plan before a launch, with a sentence before instances are only started or terminated, and raises to
        refuse. Raises UsageError without it, and what `awsddp up` raises.
        """
        from awsddp.api.cluster import consent
        from awsddp.cluster.up import up

        with (self if agreed is None else agreed.cluster).asking(keys) as asked:
            return up(asked, confirm=confirm or consent(asked, agreed))

    def status(self, *, ask_nodes: bool = False) -> "documents.ClusterDocument":
        """Return the `status` document; a cluster that is not found is "absent". Raises CloudError.

        With `ask_nodes` each node has `idle_left_s`, as its watchdog last counted.
        """
        from awsddp.cluster.status import status

        with self.asking() as asked:
            return status(asked, ask_nodes=ask_nodes)

    def sync(self, *, confirm: Callable[[str], None] = lambda question: None) -> "documents.SyncDocument":
        """Send the working folder to every node and return the `sync` document.

        `confirm` is called if a job runs, whose files would change, and raises to refuse. Raises ConfigError,
        NodeError.
        """
        from awsddp.cluster.sync import sync

        with self.asking() as asked:
            return sync(asked, confirm=confirm)

    def train(
        self,
        script: str | None = None,
        *,
        args: Sequence[Any] = (),
        on_lines: Callable[[bytes], None] | None = None,
        **keys: "Unpack[JobKeys]",
    ) -> "Job":
        """Send the files and start a job; return once its ranks run. Without a script the bundled program.

        With `on_lines`, which gets the labelled lines of the ranks as they arrive, return at the job's end,
        with its results fetched. `keys` are those of [job], [env] and [sync], such as `world_size=4`. Raises
        what `awsddp train` does.
        """
        from awsddp.api.job import Job
        from awsddp.job.train import train

        given = {"script": script, "args": [str(one) for one in args] or None, **keys}
        with self.asking({key: value for key, value in given.items() if value is not None}) as asked:
            told = train(asked, on_lines=on_lines or (lambda data: None), detach=on_lines is None)
            return Job(asked, told["job"], told)

    def jobs(self) -> "list[Job]":
        """Return the jobs that the nodes know, oldest first. Raises NotFoundError, NodeError, CloudError."""
        from awsddp.api.job import Job
        from awsddp.job.registry import known_jobs

        with self.asking() as asked, asked.partly_ready() as found:
            return [Job(self, one.job) for one in known_jobs(found)]

    def job(self, name: str) -> "Job":
        """Return a job of this cluster by its name, a part of that, or `last`.

        Raises UsageError, NotFoundError.
        """
        from awsddp.api.job import Job
        from awsddp.job.registry import job_now

        with self.asking() as asked:
            return Job(self, job_now(asked, name).job)

    def exec(
        self,
        words: Sequence[str],
        *,
        node: int | None = None,
        stdin: bytes = b"",
        on_output: Callable[[int, bytes, bool], None] = lambda node, data, is_error: None,
    ) -> "documents.ExecDocument":
        """Run a command on all nodes (or `node`) and return the `exec` document, whatever its exit codes.

        Several words are a program and its arguments, one word is a line for bash. `on_output` gets a node's
        number, what it said, and whether that was on stderr. Raises NotFoundError, NodeError.
        """
        from awsddp.cluster.remote import exec

        with self.asking() as asked:
            return exec(asked, words=words, node=node, stdin=stdin, on_output=on_output)

    def fetch(
        self, job: str | None = None, *, anew: bool = False, confirm: "Confirm | None" = None
    ) -> "documents.FetchDocument":
        """Fetch the results of a job (the last by default), and return the `fetch` document.

        Results that are here already need no node, unless `anew`. Nodes that stopped with results are
        started, for which `confirm` is as for `up`. Raises NotFoundError, NodeError where a part is missing.
        """
        from awsddp.api.cluster import consent
        from awsddp.cluster.up import up
        from awsddp.job.fetch import fetch

        with self.asking() as asked:
            start = partial(up, asked, confirm=confirm or consent(asked, None))
            return fetch(asked, job=job, anew=anew, start=start)

    def doctor(self) -> "documents.DoctorDocument":
        """Return the `doctor` document: of the cluster's nodes, without one of what a launch needs.

        Changes nothing. Raises NodeError where no node can be reached, InUse, ConfigError, CloudError.
        """
        from awsddp.cluster.doctor import before_launch, of_nodes

        with self.asking() as asked:
            return of_nodes(asked) or before_launch(asked)

    def stop(self, *, confirm: Callable[[str], None] = lambda question: None) -> "documents.ClusterDocument":
        """Stop the instances, keep their disks; return the `status` document.

        `confirm` is called first and raises to refuse. Raises what `awsddp stop` does.
        """
        from awsddp.cluster.stop import stop

        with self.asking() as asked:
            return stop(asked, confirm=confirm)

    def down(
        self,
        *,
        discard: bool = False,
        known_only: bool = False,
        confirm: Callable[[str], None] = lambda question: None,
        lose: Callable[[NodeError], bool] = lambda error: False,
    ) -> "documents.DownDocument":
        """Terminate everything and return the `down` document. Unfetched results are fetched first.

        With `known_only` a cluster that this machine has no record of is refused. `confirm` is called before
        anything is terminated and raises to refuse; `lose` is called with the error if results cannot be
        fetched. Raises that NodeError unless `discard`, or `lose` returns True; LeftoverError, CloudError.
        """
        from awsddp.cluster.down import down

        self.close()
        with self.asking() as asked:
            return down(asked, discard=discard, known_only=known_only, confirm=confirm, lose=lose)

    def fabric(self) -> Any:
        """Return a fabric.Group of the nodes, in order: the cluster's key, pinned host keys, jump host.

        Needs the extra `fabric`. `close` ends its connections. Raises ConfigError, NotFoundError, NodeError.
        """
        from awsddp.nodes.fabric_group import fabric_group
        from awsddp.session.connect import endpoints, login

        with self.asking() as asked, asked.ready() as found:
            group = fabric_group(endpoints(found, found.nodes), login(found))
        self._open.callback(group.close)
        return group

    def close(self) -> None:
        """Close the connections of `fabric()`. Ends nothing."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Cluster({self.name!r})"

    # What exists.

    def find(
        self,
        *,
        newer: bool = False,
        whole: bool = False,
        everywhere: bool = True,
        names_holder: bool = False,
    ) -> contextlib.AbstractContextManager["Cluster"]:
        """Search where the cluster is remembered, whatever is set now; without a record in the running local
        cloud, in the given or configured region, then, if `everywhere`, in every enabled region.

        One call lists the nodes of a cluster that is remembered; with `whole` also what exists beside them.
        With `newer` a folder that a newer awsddp wrote counts as lost. With `names_holder` an error of the
        nodes names the command that changes the cluster now. Raises CloudError where AWS does not answer; no
        account at all counts as nothing there, unless the folder remembers a cluster. Raises ConfigError
        where the command line names another place than the record.
        """
        from awsddp.session.locate import found

        record = self.folder.read(newer=newer)
        return found(self, record, whole=whole, everywhere=everywhere, names_holder=names_holder)

    @contextlib.contextmanager
    def ready(self, *, node: int | None = None) -> Iterator["Cluster"]:
        """Find the cluster, all nodes (or `node`) prepared and running.

        Raises NotFoundError, NodeError, CloudError.
        """
        from awsddp.session.connect import ready_nodes

        with self.partly_ready() as found:
            found.nodes = ready_nodes(found, node)
            yield found

    @contextlib.contextmanager
    def partly_ready(self) -> Iterator["Cluster"]:
        """Find the cluster; `reach.connect_reachable` works with those nodes that are prepared and running.

        Begins to connect to its last known addresses, unless that is over a jump host. What AWS says decides
        what is used. Raises CloudError.
        """
        from awsddp.session.connect import preconnected

        with preconnected(self, self.folder.read()) as preconnect, self.find(names_holder=True) as found:
            found.preconnect = preconnect
            yield found

    @contextlib.contextmanager
    def connect(
        self,
        nodes: Sequence[Node] | None = None,
        *,
        deadline_s: float = 60,
        partial: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> "Iterator[Fleet]":
        """Connect to the nodes (all that the method works with), for as long as the context.

        Raises NodesFailed where one cannot be reached; with `partial` the fleet's `failures` names it. What
        `meanwhile` raises, as for Fleet, ends the attempt.
        """
        from awsddp.session.connect import fleet_of

        chosen = self.nodes if nodes is None else nodes
        fleet = fleet_of(self, chosen, deadline_s=deadline_s, partial=partial, meanwhile=meanwhile)
        with fleet as self.connections:
            yield self.connections

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

    def use(self, nodes: Sequence[Node], *, of: Collection[Node]) -> None:
        """Work with these nodes of a cluster."""
        self.nodes = tuple(nodes)
        self.excluded = tuple(node for node in of if node not in nodes)

    def remember(self, **changes: Any) -> None:
        """Change fields of the record, here and in the folder. Raises ConfigError where the disk refuses."""
        self.change(lambda record: replace(record, **changes))

    def change(self, change: Callable[[Record], Record]) -> None:
        """Change the record by what it is now, here and in the folder. Raises ConfigError."""
        self.known = self.folder.update(change) or change(self.record)
