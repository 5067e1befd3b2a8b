"""The state of a verb, in three immutable steps: Session (settings), LocatedCluster, ConnectedCluster.

Each step contains the one before. A function takes the step that it needs and returns an updated copy.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from awsddp.model.events import Event, OnEvent
from awsddp.model.records import ClusterListing, Node, Target
from awsddp.settings import loader
from awsddp.settings.spec import FILE, KEYWORDS, ClusterSpec, JobSpec
from awsddp.state import ClusterFolder, Record, awsddp_home
from awsddp.util.parallel import ignore_event

if TYPE_CHECKING:
    from awsddp.aws.client import AwsClient
    from awsddp.nodes.connection import Preconnect
    from awsddp.nodes.fleet import Fleet


_NO_TARGET = Target()


@dataclass(frozen=True, kw_only=True)
class Session:
    """Holds the user's request: a cluster's name, settings and folder, and callbacks that prompt the user.

    `home` is $AWSDDP_HOME, `local` is the option --local. `keys` are keywords of the Python API, each of
    which is an awsddp.toml key. `settings` are the specs of the cluster and the job if they are already
    loaded; otherwise they are loaded on first access. `verb` is the verb that starts a job: after the job,
    `run` terminates the cluster, and `train` does not. `confirms` asks the user whether to continue, and
    returns False if there is no terminal. `ask` asks the user a question, and returns None if there is no
    terminal.
    """

    name: str
    home: Path = field(default_factory=awsddp_home)
    local: bool = False
    on_event: OnEvent = ignore_event
    keys: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[ClusterSpec, JobSpec] | None = None
    verb: Literal["train", "run"] = "train"
    confirms: Callable[[str], bool] = lambda question: False
    ask: Callable[[str], bool | None] = lambda question: None

    @cached_property
    def _specs(self) -> tuple[ClusterSpec, JobSpec]:
        if self.settings is not None:
            return self.settings
        overrides = {KEYWORDS[key]: value for key, value in self.keys.items()}
        labels = {KEYWORDS[key]: key for key in self.keys}
        return loader.load(self.name, file=Path(FILE), overrides=overrides, labels=labels)

    @property
    def spec(self) -> ClusterSpec:
        """The cluster's settings, from options, environment variables and awsddp.toml. Raises ConfigError."""
        return self._specs[0]

    @property
    def job_spec(self) -> JobSpec:
        """The settings of the cluster's jobs: [job], [env] and [sync]. Raises ConfigError."""
        return self._specs[1]

    @cached_property
    def folder(self) -> ClusterFolder:
        """The cluster's folder on this machine; it may be empty."""
        return ClusterFolder(self.home, self.name)

    @property
    def results(self) -> Path:
        """The local results folder, which has one folder per job. Raises ConfigError."""
        return Path(self.job_spec.sync.workdir) / self.job_spec.job.results

    def with_settings(self, spec: ClusterSpec | None = None, job_spec: JobSpec | None = None) -> Self:
        """Return the session with other settings; None keeps the current spec."""
        return replace(self, settings=(spec or self.spec, job_spec or self.job_spec))

    def say(self, text: str) -> None:
        """Report a step that a verb takes."""
        self.on_event(Event(text))


@dataclass(frozen=True, kw_only=True)
class LocatedCluster:
    """A session's cluster, with its target, its record, and what AWS lists there.

    `aws_client` is None if the target is the local cloud and the local cloud is not running. `local_record`
    is None if this machine has no record of the cluster. `listing` is None if AWS lists nothing.
    `other_listings` are clusters with the same name and owner but another id, which exist if two machines
    launched at the same time. If AWS lists no cluster of this owner, `other_session_listings` are the
    clusters with this name that other sessions of the user's role created. `searched_places` has the searched
    locations, by the names that messages show. `nodes` are the usable nodes; `excluded` are nodes that exist
    but cannot be used now. `preconnect` are connections that were opened in advance.
    """

    session: Session
    target: Target = _NO_TARGET
    aws_client: "AwsClient | None" = None
    local_record: Record | None = None
    listing: ClusterListing | None = None
    other_listings: tuple[ClusterListing, ...] = ()
    other_session_listings: tuple[ClusterListing, ...] = ()
    searched_places: tuple[str, ...] = ("the local cloud, which is not running",)
    nodes: tuple[Node, ...] = ()
    excluded: tuple[Node, ...] = ()
    preconnect: "Preconnect" = field(default_factory=dict)

    @property
    def aws(self) -> "AwsClient":
        """The AWS client of the cluster's target."""
        assert self.aws_client is not None, "the target is AWS, or a running local cloud"
        return self.aws_client

    @property
    def record(self) -> Record:
        """The cluster's record on this machine; use it only where a record is sure to exist."""
        assert self.local_record is not None, "the cluster has a record"
        return self.local_record

    @property
    def own_listing(self) -> ClusterListing | None:
        """The listing, or None if its id differs from the record's."""
        is_own = (
            self.listing is not None
            and self.local_record is not None
            and self.listing.id == self.local_record.id
        )
        return self.listing if is_own else None

    @property
    def all_listings(self) -> tuple[ClusterListing, ...]:
        """All listings with this name and owner."""
        return (self.listing, *self.other_listings) if self.listing is not None else ()

    @property
    def unfetched_jobs(self) -> list[str]:
        """The jobs whose results are not fetched, according to the tags of living nodes."""
        return self.listing.unfetched if self.listing is not None else []

    @property
    def job_spec(self) -> JobSpec:
        """The settings of the cluster's jobs, completed with the settings in the record."""
        return loader.with_cluster_settings(
            self.session.job_spec, self.local_record.asked if self.local_record is not None else {}
        )

    def with_nodes(self, nodes: Sequence[Node], *, all_nodes: Collection[Node]) -> Self:
        """Return the cluster with `nodes` as its usable nodes; the others in `all_nodes` are excluded."""
        return replace(
            self, nodes=tuple(nodes), excluded=tuple(node for node in all_nodes if node not in nodes)
        )

    def update_record(self, **changes: Any) -> Self:
        """Set fields of the record in the folder; return the cluster with that record. Raises ConfigError."""
        return self.change_record(lambda record: replace(record, **changes))

    def change_record(self, change: Callable[[Record], Record]) -> Self:
        """Replace the record in the folder with `change(record)`; return the cluster with the new record.

        Raises ConfigError.
        """
        return replace(self, local_record=self.session.folder.update(change) or change(self.record))


@dataclass(frozen=True, kw_only=True)
class ConnectedCluster:
    """A located cluster with connections to its nodes."""

    cluster: LocatedCluster
    fleet: "Fleet"

    @property
    def session(self) -> Session:
        """The cluster's session."""
        return self.cluster.session
