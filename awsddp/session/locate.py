"""Where a cluster is: the place that is asked, what AWS lists there, and who may be asked instead.

Local cloud, region and account follow the cluster's record, never what is set now.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.errors import CloudError, ConfigError, NodeError, NotFoundError
from awsddp.local import client as local
from awsddp.model.records import Listed, Target
from awsddp.nodes.node_failures import NodeFailure
from awsddp.settings.spec import ClusterSpec
from awsddp.state import Record, pasts
from awsddp.util.format import node_name
from awsddp.util.parallel import NodesFailed, each

if TYPE_CHECKING:
    from awsddp.aws.client import Aws
    from awsddp.aws.teardown import Teardown
    from awsddp.plan.records import Facts
    from awsddp.session.context import Cluster


# Terminated instances are listed for about as long: until then one that is not listed is not listed yet.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/terminating-instances.html
LISTED = timedelta(hours=1)


def aws_of(
    cluster: "Cluster", target: Target, *, trail: Path | None = None, login: "Aws | None" = None
) -> "Aws":
    """Return the gateway to a target. Its calls are recorded in the cluster's folder, or in `trail`.

    With `login` it uses that gateway's credentials. Raises ConfigError.
    """
    from awsddp.aws.client import Aws, Trail

    return Aws(target, on_call=Trail(trail or cluster.folder.path), login=login, say=cluster.say)


def owner_of(aws: "Aws", record: Record | None) -> str:
    """Return the owner of a cluster: that of its record, whose login may differ now, else the caller.

    In a local cloud always the caller. Raises CloudError, ConfigError.
    """
    if record is None or record.target.access_key_id is not None:
        return aws.identity().user_id
    return record.owner


def check_account(cluster: "Cluster") -> None:
    """Raise ConfigError where the credentials are of another account than the cluster's."""
    account, record = cluster.aws.identity().account, cluster.record
    if record.account not in ("", account):
        raise ConfigError(
            f"cluster {cluster.spec.name} belongs to AWS account {record.account}",
            f"these credentials are of account {account}; nothing was changed or forgotten",
            "use credentials of the cluster's account: awsddp --profile NAME ...",
        )


def facts_of(aws: "Aws", spec: ClusterSpec, target: Target, record: Record | None = None) -> "Facts":
    """Read what a plan for `spec` needs, and check that the user's own login key matches the one in EC2.

    What is launched for the cluster of `record` gets its owner, whoever logs in. Raises ConfigError,
    CloudError.
    """
    from awsddp.aws.plan_facts import gather

    facts = gather(
        aws,
        spec,
        caller_address=target.caller_address,
        target=target.name,
        cluster_id=record.id if record else "",
    )
    if spec.access.key:
        from awsddp.nodes.connection import check_own_key

        check_own_key(own_key_file(spec), name=spec.access.key, public=facts.public_key)
    return replace(facts, owner=owner_of(aws, record))


def own_key_file(spec: ClusterSpec) -> Path:
    """Return where `access.key_file` is."""
    return Path(str(spec.access.key_file)).expanduser().absolute()


def target_of(cluster: "Cluster", record: Record | None) -> Target:
    """Return the place that a record names; no setting moves it, and only --profile changes who logs in.

    Without a record it is the place that is set now. Raises ConfigError where the command line names another
    place than the record.
    """
    requested, typed = cluster.spec.cluster, cluster.spec.from_cli
    if record is None:
        here = Target(region=requested.region, profile=requested.profile)
        return Target(name="local") if cluster.local else here
    target = record.target
    region = requested.region if "cluster.region" in typed else None
    profile = requested.profile if "cluster.profile" in typed else None
    if target.name == "local":
        other = "" if cluster.local else region or (profile and f"AWS as profile {profile}")
    else:
        other = "the local cloud" if cluster.local else region if region != target.region else ""
    if other:
        raise _elsewhere(cluster, record, other)
    return replace(target, profile=profile or target.profile)


def _elsewhere(cluster: "Cluster", record: Record, other: str) -> ConfigError:
    """Return the error for a cluster that is not where it is requested."""
    name, place = cluster.spec.name, record.target.place
    return ConfigError(
        f"cluster {name} is in {place}, not in {other}",
        "cluster names are unique; nothing was changed or forgotten",
        f"awsddp status   # without another region, profile or --local: the cluster in {place}\n"
        "awsddp down   # end it there\n"
        f"awsddp -c {name}-2 up ...   # another name",
    )


@contextlib.contextmanager
def target_for(cluster: "Cluster", record: Record | None) -> Iterator[Target]:
    """Open the target of `up` and `plan`: that of the record, else --local, else --region and --profile.

    Raises ConfigError if the cluster of this name exists elsewhere.
    """
    asked = cluster.spec.cluster
    chosen = target_of(cluster, record)
    if chosen.name != "local":
        if record is not None and asked.region not in (None, chosen.region):
            raise _elsewhere(cluster, record, str(asked.region))
        yield chosen
        return
    if "cluster.region" in cluster.spec.from_cli:
        local.check_region(asked.region)
    with local.opened(cluster.home, cluster.on_event, remembered=chosen.daemon_home) as target:
        assert target is not None, "it was started"
        yield target


@contextlib.contextmanager
def found(
    cluster: "Cluster", record: Record | None, *, whole: bool, everywhere: bool, names_holder: bool
) -> "Iterator[Cluster]":
    """Search for the cluster, as `Cluster.find`, and name what has happened to its nodes where they fail."""
    here = cluster
    with contextlib.ExitStack() as stack:
        try:
            here = _search(cluster, record, stack, whole=whole, everywhere=everywhere)
            yield here
        except (NodeError, NotFoundError) as error:
            if isinstance(error, NodeFailure | NodesFailed):
                _name_ended(here, error)
            if names_holder:
                _name_holder(cluster, error)
            raise


def _search(
    cluster: "Cluster", record: Record | None, stack: contextlib.ExitStack, *, whole: bool, everywhere: bool
) -> "Cluster":
    """Search the place that the record names, and no other; without a record the nearest places first."""
    place = Target(name="local") if record is None else target_of(cluster, record)
    nearest = cluster.but(target=place, known=record)
    searched: tuple[str, ...] = ()
    for target in _places(cluster, record, stack, ending=whole):
        searched = (*searched, target.place)
        try:
            here = cluster.but(target=target, known=record, searched=searched)
            nearest = _search_in(here, whole=whole or record is None)
        except (CloudError, ConfigError) as error:
            # There is no AWS to ask from here, and this machine has ended a cluster of this name: "absent".
            no_account = isinstance(error, ConfigError) or getattr(error, "code", "") == "NoCredentialsError"
            ended = any((cluster.home / "history").glob(f"{cluster.spec.name}-????????"))
            if record is not None or not (no_account and (nearest.gateway is not None or ended)):
                raise
            break
        if nearest.listed is not None:
            return nearest
    return _search_regions(nearest) if everywhere and record is None else nearest


def _places(
    cluster: "Cluster", record: Record | None, stack: contextlib.ExitStack, *, ending: bool
) -> Iterator[Target]:
    """Yield the places to search, nearest first; a local cloud only where it runs."""
    place, requested = target_of(cluster, record), cluster.spec.cluster
    if place.name == "local" or not (record or requested.region or requested.profile):
        opened = local.opened(
            cluster.home, cluster.on_event, start=False, ending=ending, remembered=place.daemon_home
        )
        if (running := stack.enter_context(opened)) is not None:
            yield running
    if place.name != "local":
        yield place


def _search_in(cluster: "Cluster", *, whole: bool = True, login: "Aws | None" = None) -> "Cluster":
    """Look in the cluster's target, and return the cluster."""
    from awsddp.aws.clusters import of_other_sessions

    cluster.gateway = aws = aws_of(cluster, cluster.target, login=login)
    look(cluster, whole=whole)
    if cluster.known is not None and cluster.own is None:
        check_account(cluster)
    if cluster.listed is None:
        cluster.sessions = of_other_sessions(aws, cluster.spec.name, aws.identity().user_id)
    return cluster


def _search_regions(nearest: "Cluster") -> "Cluster":
    """Search the other enabled regions, side by side; return where the cluster is, else `nearest`."""
    from awsddp.aws.plan_facts import enabled_regions

    if nearest.target.name == "local" or nearest.local or nearest.spec.cluster.region:
        return nearest
    aws = nearest.aws
    regions = [name for name in enabled_regions(aws) if name != aws.region]
    searched = (*nearest.searched, *regions)

    def search(region: str) -> "Cluster":
        there = replace(nearest.target, region=region)
        return _search_in(nearest.but(target=there, searched=searched), login=aws)

    everywhere = each(search, regions)
    sessions = tuple(one for cluster in (nearest, *everywhere) for one in cluster.sessions)
    found = (cluster for cluster in everywhere if cluster.listed)
    return next(found, nearest.but(searched=searched, sessions=sessions))


def look(cluster: "Cluster", *, owner: str | None = None, whole: bool = True) -> None:
    """Read what AWS lists now by this name and owner, the record's own cluster first.

    The owner is that of the record, else the caller. If not `whole`, one call lists the nodes, and
    the rest is read only where no node lives. Raises CloudError.
    """
    from awsddp.aws.clusters import find_clusters

    record, name = cluster.known, cluster.spec.name
    owner = owner or (record.owner if record else cluster.aws.identity().user_id)
    known = record.remembered if record else None
    seen = () if whole else find_clusters(cluster.aws, name, owner, remembered=known, kinds=())
    clusters = tuple(one for one in seen if one.live)
    clusters = clusters or find_clusters(cluster.aws, name, owner, remembered=known)
    own = [one for one in clusters if record is not None and one.id == record.id]
    cluster.listed = next(iter((*own, *clusters)), None)
    cluster.others = tuple(one for one in clusters if one is not cluster.listed)


def wait_until_listed(cluster: "Cluster") -> None:
    """Wait for up to two minutes until AWS lists every instance that was prepared within the hour.

    Looks again only if something was missing. Raises CloudError.
    """
    from awsddp.aws.clusters import by_id, describe
    from awsddp.aws.waits import CLOCK, VISIBLE_S, poll

    record, own = cluster.record, cluster.own
    missing = {one.instance_id for one in record.prepared}
    missing -= {node.instance_id for node in own.nodes} if own else set()
    if not missing or CLOCK.now() - record.created > LISTED:
        return
    # A cloud that brings its own keys knows its caller for as long as it lives: this is another one.
    if record.target.access_key_id is not None and record.owner != cluster.aws.identity().user_id:
        return

    def found() -> bool | None:
        return True if len(describe(cluster.aws, by_id(*missing))) == len(missing) else None

    poll(found, deadline_s=VISIBLE_S)
    look(cluster)


def wait_until_launches_show(cluster: "Cluster") -> None:
    """Wait until AWS lists the instances that this machine launched, or those of an interrupted launch.

    Raises CloudError.
    """
    from awsddp.aws.instances import appear, filled_by

    record, own = cluster.known, cluster.own
    if record is None:
        return
    if record.intent is None:
        wait_until_listed(cluster)
    elif not (own and own.live and filled_by(record.intent) <= {node.node for node in own.live}):
        appear(cluster.aws, record.intent, on_event=cluster.on_event)
        look(cluster)


def _name_ended(cluster: "Cluster", error: NodeError) -> None:
    """Add to a failure of nodes which of them EC2 has stopped or terminated meanwhile."""
    from awsddp.aws.clusters import by_id, describe

    with contextlib.suppress(CloudError):
        numbers = {node.instance_id: node.node for node in cluster.nodes}
        off = sorted(
            f"EC2 says: {node_name(numbers[one.instance_id])} is {one.state}"
            for one in (describe(cluster.aws, by_id(*numbers)) if numbers else ())
            if one.state != "running"
        )
        error.why = "\n".join(filter(None, (error.why, *off)))


def require_live(cluster: "Cluster") -> Listed:
    """Return what AWS lists of a cluster that has nodes. Raises NotFoundError, CloudError."""
    if cluster.gateway and cluster.known and (cluster.own is not None or cluster.listed is None):
        wait_until_listed(cluster)
    if cluster.listed is None or not cluster.listed.live:
        refuse_sessions(cluster)
        name, searched = cluster.spec.name, ", ".join(cluster.searched)
        creates = _creates(cluster, is_local=cluster.target.name == "local")
        raise NotFoundError(f"no cluster {name}", f"searched: {searched}", creates)
    return cluster.listed


def machines(cluster: "Cluster", listed: Listed) -> str:
    """Return how many machines of a listed cluster exist, of which type and where."""
    where = replace(cluster.target, region=listed.region).place
    return f"{len(listed.live)} x {listed.live[0].instance_type} in {where}"


def refuse_sessions(cluster: "Cluster") -> None:
    """Raise NotFoundError that names the clusters of this name by other sessions of the caller's role."""
    if not cluster.sessions:
        return
    made = [(one.owner.partition(":")[2], machines(cluster, one)) for one in cluster.sessions]
    raise NotFoundError(
        f"no cluster {cluster.spec.name} of this login; "
        "another session of your role has one, which costs money",
        "\n".join(f"{these}, made by {session}" for session, these in made),
        f"role_session_name = {made[0][0]} in the AWS profile makes it yours; then: awsddp down\n"
        "awsddp status --all   # what it costs",
    )


def end(cluster: "Cluster", listed: Listed) -> "Teardown":
    """End everything of a listed cluster. Raises CloudError."""
    from awsddp.aws.teardown import teardown

    return teardown(cluster.aws, listed, on_event=cluster.on_event)


def _name_holder(cluster: "Cluster", error: NodeError | NotFoundError) -> None:
    """Name the command that changes the cluster now, or that it was terminated, as a cause of what fails."""
    holder, why = cluster.folder.holder(), ""
    if holder is not None:
        why = f"{holder} is changing the cluster"
    elif isinstance(error, NodeError) and cluster.folder.read(newer=True) is None:  # it had a record before
        why, error.next = "another command has terminated the cluster", _creates(cluster)
    error.why = "\n".join(filter(None, (error.why, why)))


def _creates(cluster: "Cluster", *, is_local: bool = False) -> str:
    """Return the command that creates the cluster, where it was or was searched."""
    return f"awsddp up{' --local' if is_local or _was_local(cluster) else ''}   # create it"


def _was_local(cluster: "Cluster") -> bool:
    """Return whether the last cluster of this name that this machine launched was in the local cloud."""
    own = [past.launched for past in pasts(cluster.home) if past.name == cluster.spec.name]
    last = max(filter(None, own), key=lambda row: row.time, default=None)
    return last is not None and last.target == "local"
