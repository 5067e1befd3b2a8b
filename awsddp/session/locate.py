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
from awsddp.session.context import LocatedCluster, Session
from awsddp.settings.spec import ClusterSpec
from awsddp.state import Record, pasts
from awsddp.util.format import node_name
from awsddp.util.parallel import NodesFailed, each

if TYPE_CHECKING:
    from awsddp.aws.client import Aws
    from awsddp.aws.teardown import Teardown
    from awsddp.plan.records import Facts


# Terminated instances are listed for about as long: until then one that is not listed is not listed yet.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/terminating-instances.html
LISTED = timedelta(hours=1)


def aws_of(
    session: Session, target: Target, *, trail: Path | None = None, login: "Aws | None" = None
) -> "Aws":
    """Return the gateway to a target. Its calls are recorded in the cluster's folder, or in `trail`.

    With `login` it uses that gateway's credentials. Raises ConfigError.
    """
    from awsddp.aws.client import Aws, Trail

    return Aws(target, on_call=Trail(trail or session.folder.path), login=login, say=session.say)


def owner_of(aws: "Aws", record: Record | None) -> str:
    """Return the owner of a cluster: that of its record, whose login may differ now, else the caller.

    In a local cloud always the caller. Raises CloudError, ConfigError.
    """
    if record is None or record.target.access_key_id is not None:
        return aws.identity().user_id
    return record.owner


def check_account(cluster: LocatedCluster) -> None:
    """Raise ConfigError where the credentials are of another account than the cluster's."""
    account, record = cluster.aws.identity().account, cluster.record
    if record.account not in ("", account):
        raise ConfigError(
            f"cluster {cluster.session.spec.name} belongs to AWS account {record.account}",
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


def target_of(session: Session, record: Record | None) -> Target:
    """Return the place that a record names; no setting moves it, and only --profile changes who logs in.

    Without a record it is the place that is set now. Raises ConfigError where the command line names another
    place than the record.
    """
    requested, typed = session.spec.cluster, session.spec.from_cli
    if record is None:
        here = Target(region=requested.region, profile=requested.profile)
        return Target(name="local") if session.local else here
    target = record.target
    region = requested.region if "cluster.region" in typed else None
    profile = requested.profile if "cluster.profile" in typed else None
    if target.name == "local":
        other = "" if session.local else region or (profile and f"AWS as profile {profile}")
    else:
        other = "the local cloud" if session.local else region if region != target.region else ""
    if other:
        raise _elsewhere(session, record, other)
    return replace(target, profile=profile or target.profile)


def _elsewhere(session: Session, record: Record, other: str) -> ConfigError:
    """Return the error for a cluster that is not where it is requested."""
    name, place = session.spec.name, record.target.place
    return ConfigError(
        f"cluster {name} is in {place}, not in {other}",
        "cluster names are unique; nothing was changed or forgotten",
        f"awsddp status   # without another region, profile or --local: the cluster in {place}\n"
        "awsddp down   # end it there\n"
        f"awsddp -c {name}-2 up ...   # another name",
    )


@contextlib.contextmanager
def target_for(session: Session, record: Record | None) -> Iterator[Target]:
    """Open the target of `up` and `plan`: that of the record, else --local, else --region and --profile.

    Raises ConfigError if the cluster of this name exists elsewhere.
    """
    asked = session.spec.cluster
    chosen = target_of(session, record)
    if chosen.name != "local":
        if record is not None and asked.region not in (None, chosen.region):
            raise _elsewhere(session, record, str(asked.region))
        yield chosen
        return
    if "cluster.region" in session.spec.from_cli:
        local.check_region(asked.region)
    with local.opened(session.home, session.on_event, remembered=chosen.daemon_home) as target:
        assert target is not None, "it was started"
        yield target


@contextlib.contextmanager
def find_cluster(
    session: Session,
    *,
    newer: bool = False,
    whole: bool = False,
    everywhere: bool = True,
    names_holder: bool = False,
) -> Iterator[LocatedCluster]:
    """Search where the cluster is remembered, whatever is set now; without a record in the running local
    cloud, in the given or configured region, then, if `everywhere`, in every enabled region.

    One call lists the nodes of a cluster that is remembered; with `whole` also what exists beside them.
    With `newer` a folder that a newer awsddp wrote counts as lost. With `names_holder` an error of the
    nodes names the command that changes the cluster now. Raises CloudError where AWS does not answer; no
    account at all counts as nothing there, unless the folder remembers a cluster. Raises ConfigError
    where the command line names another place than the record.
    """
    record, cluster = session.folder.read(newer=newer), None
    with contextlib.ExitStack() as stack:
        try:
            cluster = _search(session, record, stack, whole=whole, everywhere=everywhere)
            yield cluster
        except (NodeError, NotFoundError) as error:
            if cluster is not None and isinstance(error, NodeFailure | NodesFailed):
                _name_ended(cluster, error)
            if names_holder:
                _name_holder(session, error)
            raise


def _search(
    session: Session, record: Record | None, stack: contextlib.ExitStack, *, whole: bool, everywhere: bool
) -> LocatedCluster:
    """Search the place that the record names, and no other; without a record the nearest places first."""
    place = Target(name="local") if record is None else target_of(session, record)
    nearest = LocatedCluster(session=session, target=place, known=record)
    searched: tuple[str, ...] = ()
    for target in _places(session, record, stack, ending=whole):
        searched = (*searched, target.place)
        try:
            here = LocatedCluster(session=session, target=target, known=record, searched=searched)
            nearest = _search_in(here, whole=whole or record is None)
        except (CloudError, ConfigError) as error:
            # There is no AWS to ask from here, and this machine has ended a cluster of this name: "absent".
            no_account = isinstance(error, ConfigError) or getattr(error, "code", "") == "NoCredentialsError"
            ended = any((session.home / "history").glob(f"{session.spec.name}-????????"))
            if record is not None or not (no_account and (nearest.gateway is not None or ended)):
                raise
            break
        if nearest.listed is not None:
            return nearest
    return _search_regions(nearest) if everywhere and record is None else nearest


def _places(
    session: Session, record: Record | None, stack: contextlib.ExitStack, *, ending: bool
) -> Iterator[Target]:
    """Yield the places to search, nearest first; a local cloud only where it runs."""
    place, requested = target_of(session, record), session.spec.cluster
    if place.name == "local" or not (record or requested.region or requested.profile):
        opened = local.opened(
            session.home, session.on_event, start=False, ending=ending, remembered=place.daemon_home
        )
        if (running := stack.enter_context(opened)) is not None:
            yield running
    if place.name != "local":
        yield place


def _search_in(cluster: LocatedCluster, *, whole: bool = True, login: "Aws | None" = None) -> LocatedCluster:
    """Look in the cluster's target, and return the cluster."""
    from awsddp.aws.clusters import of_other_sessions

    aws = aws_of(cluster.session, cluster.target, login=login)
    cluster = look(replace(cluster, gateway=aws), whole=whole)
    if cluster.known is not None and cluster.own is None:
        check_account(cluster)
    if cluster.listed is None:
        sessions = of_other_sessions(aws, cluster.session.spec.name, aws.identity().user_id)
        return replace(cluster, sessions=sessions)
    return cluster


def _search_regions(nearest: LocatedCluster) -> LocatedCluster:
    """Search the other enabled regions, side by side; return where the cluster is, else `nearest`."""
    from awsddp.aws.plan_facts import enabled_regions

    session = nearest.session
    if nearest.target.name == "local" or session.local or session.spec.cluster.region:
        return nearest
    aws = nearest.aws
    regions = [name for name in enabled_regions(aws) if name != aws.region]
    searched = (*nearest.searched, *regions)

    def search(region: str) -> LocatedCluster:
        there = replace(nearest.target, region=region)
        return _search_in(replace(nearest, target=there, searched=searched), login=aws)

    everywhere = each(search, regions)
    sessions = tuple(one for cluster in (nearest, *everywhere) for one in cluster.sessions)
    found = (cluster for cluster in everywhere if cluster.listed)
    return next(found, replace(nearest, searched=searched, sessions=sessions))


def look(cluster: LocatedCluster, *, owner: str | None = None, whole: bool = True) -> LocatedCluster:
    """Return the cluster with what AWS lists now by its name and owner, the record's own cluster first.

    The owner is that of the record, else the caller. If not `whole`, one call lists the nodes, and
    the rest is read only where no node lives. Raises CloudError.
    """
    from awsddp.aws.clusters import find_clusters

    record, name = cluster.known, cluster.session.spec.name
    owner = owner or (record.owner if record else cluster.aws.identity().user_id)
    known = record.remembered if record else None
    seen = () if whole else find_clusters(cluster.aws, name, owner, remembered=known, kinds=())
    clusters = tuple(one for one in seen if one.live)
    clusters = clusters or find_clusters(cluster.aws, name, owner, remembered=known)
    own = [one for one in clusters if record is not None and one.id == record.id]
    listed = next(iter((*own, *clusters)), None)
    return replace(cluster, listed=listed, others=tuple(one for one in clusters if one is not listed))


def wait_until_listed(cluster: LocatedCluster) -> LocatedCluster:
    """Wait for up to two minutes until AWS lists every instance that was prepared within the hour; return the
    cluster with them.

    Looks again only if something was missing. Raises CloudError.
    """
    from awsddp.aws.clusters import by_id, describe
    from awsddp.aws.waits import CLOCK, VISIBLE_S, poll

    record, own = cluster.record, cluster.own
    missing = {one.instance_id for one in record.prepared}
    missing -= {node.instance_id for node in own.nodes} if own else set()
    if not missing or CLOCK.now() - record.created > LISTED:
        return cluster
    # A cloud that brings its own keys knows its caller for as long as it lives: this is another one.
    if record.target.access_key_id is not None and record.owner != cluster.aws.identity().user_id:
        return cluster

    def found() -> bool | None:
        return True if len(describe(cluster.aws, by_id(*missing))) == len(missing) else None

    poll(found, deadline_s=VISIBLE_S)
    return look(cluster)


def wait_until_launches_show(cluster: LocatedCluster) -> LocatedCluster:
    """Wait until AWS lists the instances that this machine launched, or those of an interrupted launch;
    return the cluster with them.

    Raises CloudError.
    """
    from awsddp.aws.instances import appear, filled_by

    record, own = cluster.known, cluster.own
    if record is None:
        return cluster
    if record.intent is None:
        return wait_until_listed(cluster)
    if own and own.live and filled_by(record.intent) <= {node.node for node in own.live}:
        return cluster
    appear(cluster.aws, record.intent, on_event=cluster.session.on_event)
    return look(cluster)


def _name_ended(cluster: LocatedCluster, error: NodeError) -> None:
    """Add to a failure of nodes which of them EC2 has stopped or terminated meanwhile."""
    from awsddp.aws.clusters import by_id, describe

    with contextlib.suppress(CloudError):
        numbers = {node.instance_id: node.node for node in error.nodes}
        off = sorted(
            f"EC2 says: {node_name(numbers[one.instance_id])} is {one.state}"
            for one in (describe(cluster.aws, by_id(*numbers)) if numbers else ())
            if one.state != "running"
        )
        error.why = "\n".join(filter(None, (error.why, *off)))


def require_live(cluster: LocatedCluster) -> tuple[LocatedCluster, Listed]:
    """Return a cluster that has nodes, and what AWS lists of it. Raises NotFoundError, CloudError."""
    if cluster.gateway and cluster.known and (cluster.own is not None or cluster.listed is None):
        cluster = wait_until_listed(cluster)
    if cluster.listed is None or not cluster.listed.live:
        refuse_sessions(cluster)
        name, searched = cluster.session.spec.name, ", ".join(cluster.searched)
        creates = _creates(cluster.session, is_local=cluster.target.name == "local")
        raise NotFoundError(f"no cluster {name}", f"searched: {searched}", creates)
    return cluster, cluster.listed


def machines(cluster: LocatedCluster, listed: Listed) -> str:
    """Return how many machines of a listed cluster exist, of which type and where."""
    where = replace(cluster.target, region=listed.region).place
    return f"{len(listed.live)} x {listed.live[0].instance_type} in {where}"


def refuse_sessions(cluster: LocatedCluster) -> None:
    """Raise NotFoundError that names the clusters of this name by other sessions of the caller's role."""
    if not cluster.sessions:
        return
    made = [(one.owner.partition(":")[2], machines(cluster, one)) for one in cluster.sessions]
    raise NotFoundError(
        f"no cluster {cluster.session.spec.name} of this login; "
        "another session of your role has one, which costs money",
        "\n".join(f"{these}, made by {session}" for session, these in made),
        f"role_session_name = {made[0][0]} in the AWS profile makes it yours; then: awsddp down\n"
        "awsddp status --all   # what it costs",
    )


def end(cluster: LocatedCluster, listed: Listed) -> "Teardown":
    """End everything of a listed cluster. Raises CloudError."""
    from awsddp.aws.teardown import teardown

    return teardown(cluster.aws, listed, on_event=cluster.session.on_event)


def _name_holder(session: Session, error: NodeError | NotFoundError) -> None:
    """Name the command that changes the cluster now, or that it was terminated, as a cause of what fails."""
    holder, why = session.folder.holder(), ""
    if holder is not None:
        why = f"{holder} is changing the cluster"
    elif isinstance(error, NodeError) and session.folder.read(newer=True) is None:  # it had a record before
        why, error.next = "another command has terminated the cluster", _creates(session)
    error.why = "\n".join(filter(None, (error.why, why)))


def _creates(session: Session, *, is_local: bool = False) -> str:
    """Return the command that creates the cluster, where it was or was searched."""
    return f"awsddp up{' --local' if is_local or _was_local(session) else ''}   # create it"


def _was_local(session: Session) -> bool:
    """Return whether the last cluster of this name that this machine launched was in the local cloud."""
    own = [past.launched for past in pasts(session.home) if past.name == session.spec.name]
    last = max(filter(None, own), key=lambda row: row.time, default=None)
    return last is not None and last.target == "local"
