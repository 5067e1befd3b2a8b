"""A cluster as a verb sees it, in three steps: as it was asked for, as it was found, as it is connected.

One holds the other, and none of them changes: a function takes the one that it needs, and returns what it
learned.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from awsddp.model.events import Event, OnEvent
from awsddp.model.records import Listed, Node, Target
from awsddp.settings import loader
from awsddp.settings.spec import FILE, KEYWORDS, ClusterSpec, JobSpec
from awsddp.state import Folder, Record, home
from awsddp.util.parallel import ignore

if TYPE_CHECKING:
    from awsddp.aws.client import Aws
    from awsddp.nodes.connection import Preconnect
    from awsddp.nodes.fleet import Fleet


_NOWHERE = Target()


@dataclass(frozen=True, kw_only=True)
class Session:
    """What was asked: the cluster's name and the settings, its folder, and whom to tell and to ask.

    `home` is $AWSDDP_HOME, `local` is --local. `keys` are keywords of the API, each a key of awsddp.toml;
    `settings` are both specs where they are loaded already, else they are when one is first read. `verb` is
    what starts a job: `run` ends the cluster with it. `agree` answers a question of a verb that has begun
    (without a terminal: no), `ask` what only a person may answer (None where nobody can be asked).
    """

    name: str
    home: Path = field(default_factory=home)
    local: bool = False
    on_event: OnEvent = ignore
    keys: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[ClusterSpec, JobSpec] | None = None
    verb: Literal["train", "run"] = "train"
    agree: Callable[[str], bool] = lambda question: False
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
        """What is asked of the cluster, by options, variables and awsddp.toml. Raises ConfigError."""
        return self._specs[0]

    @property
    def job_spec(self) -> JobSpec:
        """What is asked of its jobs: [job], [env] and [sync]. Raises ConfigError."""
        return self._specs[1]

    @cached_property
    def folder(self) -> Folder:
        """What this machine remembers of the cluster; it may be empty."""
        return Folder(self.home, self.name)

    @property
    def results(self) -> Path:
        """The local folder that receives the results of the jobs, a folder each. Raises ConfigError."""
        return Path(self.job_spec.sync.workdir) / self.job_spec.job.results

    def with_settings(self, spec: ClusterSpec | None = None, job_spec: JobSpec | None = None) -> Self:
        """Return what was asked with other settings."""
        return replace(self, settings=(spec or self.spec, job_spec or self.job_spec))

    def say(self, text: str) -> None:
        """Report a step of a verb."""
        self.on_event(Event(text))


@dataclass(frozen=True, kw_only=True)
class LocatedCluster:
    """What was found of the cluster that a session asks for: where, and what AWS lists there.

    `gateway` is None where the local cloud is meant and is not running. `known` is the record of this
    machine, None where there is none. `listed` is what AWS lists, None where that is nothing; `others` are
    clusters of the same name and owner with another id, as two machines may make at once; `sessions` are
    clusters of this name by other sessions of the caller's role, where nothing else is listed. `searched`
    names the places, for messages. `nodes` are those to work with, `excluded` exist and are of no use now.
    `preconnect` holds connections that were begun before.
    """

    session: Session
    target: Target = _NOWHERE
    gateway: "Aws | None" = None
    known: Record | None = None
    listed: Listed | None = None
    others: tuple[Listed, ...] = ()
    sessions: tuple[Listed, ...] = ()
    searched: tuple[str, ...] = ("the local cloud, which is not running",)
    nodes: tuple[Node, ...] = ()
    excluded: tuple[Node, ...] = ()
    preconnect: "Preconnect" = field(default_factory=dict)

    @property
    def aws(self) -> "Aws":
        """The gateway to the cloud that the cluster is in."""
        assert self.gateway is not None, "there is a cloud to ask"
        return self.gateway

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

    @property
    def job_spec(self) -> JobSpec:
        """What is asked of its jobs, completed by what the cluster was made for."""
        return loader.overlaid(self.session.job_spec, self.known.asked if self.known is not None else {})

    def with_nodes(self, nodes: Sequence[Node], *, of: Collection[Node]) -> Self:
        """Return the cluster with these of its nodes to work with."""
        return replace(self, nodes=tuple(nodes), excluded=tuple(node for node in of if node not in nodes))

    def remember(self, **changes: Any) -> Self:
        """Change fields of the record in the folder, and return the cluster with it. Raises ConfigError."""
        return self.change_record(lambda record: replace(record, **changes))

    def change_record(self, change: Callable[[Record], Record]) -> Self:
        """Change the record in the folder, and return the cluster with it. Raises ConfigError."""
        return replace(self, known=self.session.folder.update(change) or change(self.record))


@dataclass(frozen=True, kw_only=True)
class ConnectedCluster:
    """A cluster that was found, and the connections to its nodes."""

    cluster: LocatedCluster
    fleet: "Fleet"

    @property
    def session(self) -> Session:
        """What was asked."""
        return self.cluster.session
