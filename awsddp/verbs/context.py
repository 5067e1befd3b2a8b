"""What a command knows before it begins: what was asked, where, and whom to tell."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.cluster import Cluster, Target
from awsddp.errors import AwsddpError, CloudError, ConfigError
from awsddp.report import Event, OnEvent
from awsddp.spec import ClusterSpec, JobSpec
from awsddp.state import Folder, Record
from awsddp.verbs import local
from awsddp.verbs.trail import Trail

if TYPE_CHECKING:
    from awsddp.aws.session import Aws
    from awsddp.plan import Facts


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every verb gets. `local` tells that --local was given; `folder` may hold nothing yet.

    `agree` answers a question that comes up on the way; where nobody can be asked the answer is no.
    """

    spec: ClusterSpec
    job: JobSpec
    folder: Folder
    on_event: OnEvent
    local: bool = False
    agree: Callable[[str], bool] = lambda question: False

    @property
    def home(self) -> Path:
        """$AWSDDP_HOME."""
        return self.folder.root

    def say(self, text: str) -> None:
        """Tell one step of the verb itself."""
        self.on_event(Event(text))

    def say_of_node(self, text: str) -> None:
        """Tell what a node is at: "node0 i-0ab pending" is told of node0."""
        who, _, rest = text.partition(" ")
        self.on_event(Event(rest, who))


def aws_of(ctx: Context, target: Target, *, trail: Path | None = None, login: "Aws | None" = None) -> "Aws":
    """Return the gateway to a target, whose calls are written down with the cluster, or in another folder.

    With `login` it uses that gateway's credentials. Raises ConfigError.
    """
    from awsddp.aws.session import Aws

    return Aws(target, on_call=Trail(trail or ctx.folder.path), login=login)


def owner_of(aws: "Aws", record: Record | None) -> str:
    """Return the owner of a cluster: that of its record, who may have logged in otherwise, else the caller.

    A cloud that brings its own keys knows its caller for as long as it lives. Raises CloudError, ConfigError.
    """
    if record is None or record.target.access_key_id is not None:
        return aws.identity().user_id
    return record.owner


def check_account(ctx: Context, aws: "Aws", record: Record) -> None:
    """Raise ConfigError where the credentials are of another account than the cluster's."""
    account = aws.identity().account
    if record.account not in ("", account):
        raise ConfigError(
            f"cluster {ctx.spec.name} belongs to AWS account {record.account}",
            f"these credentials are of account {account}; nothing was changed or forgotten",
            "use credentials of the cluster's account: awsddp --profile NAME ...",
        )


def facts_of(aws: "Aws", spec: ClusterSpec, target: Target) -> "Facts":
    """Read what a plan for `spec` needs, and hold the user's own login key against EC2's half of it.

    Raises ConfigError, CloudError.
    """
    from awsddp.aws.facts import gather

    facts = gather(aws, spec, caller_address=target.caller_address, target=target.name)
    if spec.access.key and spec.access.key_file:
        from awsddp.nodes.connection import check_own_key

        check_own_key(own_key_file(spec), name=spec.access.key, public=facts.public_key)
    return facts


def own_key_file(spec: ClusterSpec) -> Path:
    """Return where `access.key_file` is."""
    return Path(str(spec.access.key_file)).expanduser().absolute()


@contextlib.contextmanager
def target_for(ctx: Context) -> Iterator[Target]:
    """Yield where `up` and `plan` go: --local, else --region and --profile, else what the cluster remembers.

    Raises ConfigError where the cluster of this name lives elsewhere.
    """
    record = ctx.folder.read()
    asked = ctx.spec.cluster
    wants_local = ctx.local or (
        record is not None and record.target.name == "local" and not asked.region and not asked.profile
    )
    with contextlib.ExitStack() as stack:
        target: Target | None = None
        if wants_local:
            target = stack.enter_context(local.opened(ctx.home, ctx.on_event))
            if target is not None and "cluster.region" in ctx.spec.said and asked.region != target.region:
                raise ConfigError(
                    f"cluster.region: the local cloud is {target.region}, not {asked.region}",
                    "",
                    f"leave --region out, or --region {target.region}; without --local it is on AWS",
                )
        if target is None:
            remembered = record.target if record else Target()
            target = Target(
                region=asked.region or remembered.region, profile=asked.profile or remembered.profile
            )
        if record is not None and record.target.place != target.place:
            raise ConfigError(
                f"cluster {ctx.spec.name} lives in {record.target.place}, not in {target.place}",
                "one name is one cluster",
                f"awsddp -c {ctx.spec.name}-2 up ...   # another name\nawsddp down   # end the first one",
            )
        yield target


NOWHERE = ("the local cloud, which does not run",)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The answer to a search: what AWS and the folder know of the cluster, and where was looked.

    `others` are clusters of the same name and owner with another id, as two machines may make at once.
    `record` is None where the folder is lost or speaks of another place.
    """

    aws: "Aws"
    target: Target
    cluster: Cluster | None
    record: Record | None
    looked: tuple[str, ...]
    others: tuple[Cluster, ...] = ()

    def machines(self, cluster: Cluster) -> str:
        """Return what of a cluster that was found lives, and where, in words."""
        where = replace(self.target, region=cluster.region).place
        return f"{len(cluster.live)} x {cluster.live[0].instance_type} in {where}"


@contextlib.contextmanager
def found(ctx: Context, *, newer: bool = False, whole: bool = False) -> Iterator[Found | None]:
    """Look for the cluster where it is remembered; without a memory in the running local cloud, in the
    given or configured region, then in every enabled region. None: the local cloud is meant, and none runs.

    One call finds the nodes of a cluster that is remembered; with `whole` what exists beside them is looked
    for, too. With `newer` a folder that a newer awsddp wrote counts as lost. Raises CloudError where AWS
    cannot be asked; no account at all counts as nothing there, unless the folder remembers a cluster.
    """
    record = ctx.folder.read(newer=newer)
    asked = ctx.spec.cluster
    if record is not None and not _speaks_of(record, ctx):
        record = None
    with contextlib.ExitStack() as stack:
        looked: list[str] = []
        nearest: Found | None = None
        for target in _near(ctx, record, stack, ending=whole):
            looked.append(target.place)
            try:
                nearest = _look(ctx, record, target, tuple(looked), whole=whole)
            except (CloudError, ConfigError) as error:
                if record is not None or not _no_account(error) or not (nearest or _ended_here(ctx)):
                    raise
                break
            if nearest.cluster is not None:
                break
        if nearest is not None and nearest.cluster is None and record is None:
            nearest = _everywhere(ctx, nearest) if not (ctx.local or asked.region) else nearest
        yield nearest


def _speaks_of(record: Record, ctx: Context) -> bool:
    asked = ctx.spec.cluster
    if record.target.name == "local":
        return not (asked.region or asked.profile)
    return not ctx.local and asked.region in (None, record.target.region)


def _near(
    ctx: Context, record: Record | None, stack: contextlib.ExitStack, *, ending: bool
) -> Iterator[Target]:
    """Yield the places to look in, nearest first."""
    asked = ctx.spec.cluster
    if record is not None and record.target.name != "local":
        yield replace(record.target, profile=asked.profile or record.target.profile)
        return
    if record is not None or not (asked.region or asked.profile):
        running = stack.enter_context(local.opened(ctx.home, ctx.on_event, start=False, ending=ending))
        if running is not None:
            yield running
    if record is None and not ctx.local:
        yield Target(region=asked.region, profile=asked.profile)


def _look(
    ctx: Context,
    record: Record | None,
    target: Target,
    looked: tuple[str, ...],
    *,
    whole: bool = True,
    login: "Aws | None" = None,
) -> Found:
    from awsddp.aws.clusters import find_clusters, glance

    aws = aws_of(ctx, target, login=login)
    owner = record.owner if record else aws.identity().user_id
    clusters = () if whole or record is None else glance(aws, ctx.spec.name, owner)
    clusters = clusters or find_clusters(aws, ctx.spec.name, owner)
    known = (one for one in clusters if record is not None and one.id == record.id)
    mine = next(known, clusters[0] if clusters else None)
    if record is not None and (mine is None or mine.id != record.id):
        check_account(ctx, aws, record)
    others = tuple(one for one in clusters if one is not mine)
    return Found(aws=aws, target=target, cluster=mine, record=record, looked=looked, others=others)


def _everywhere(ctx: Context, nearest: Found) -> Found:
    """Look in the other enabled regions, side by side; return where the cluster is, else `nearest`."""
    from concurrent.futures import ThreadPoolExecutor

    from awsddp.aws.facts import enabled_regions

    if nearest.target.name == "local":
        return nearest
    others = [name for name in enabled_regions(nearest.aws) if name != nearest.aws.region]
    looked = (*nearest.looked, *others)
    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = pool.map(
            lambda name: _look(ctx, None, replace(nearest.target, region=name), looked, login=nearest.aws),
            others,
        )
        return next((answer for answer in answers if answer.cluster), replace(nearest, looked=looked))


def _no_account(error: AwsddpError) -> bool:
    """Tell whether there is no AWS to ask from here: no region, or no credentials at all."""
    return isinstance(error, ConfigError) or getattr(error, "code", "") == "NoCredentialsError"


def _ended_here(ctx: Context) -> bool:
    """Tell whether this machine has ended a cluster of this name, so that "absent" is the answer."""
    return any((ctx.home / "history").glob(f"{ctx.spec.name}-????????"))
