"""Find a cluster: its target, what AWS lists there, and clusters with the same name elsewhere.

A cluster's target (local cloud, region, account) is taken from its record, not from the current settings.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.errors import CloudError, ConfigError, NodeError, NotFoundError
from awsddp.local import client as local
from awsddp.model.records import ClusterListing, Target
from awsddp.nodes.node_failures import NodeFailure
from awsddp.session.context import LocatedCluster, Session
from awsddp.settings.spec import ClusterSpec
from awsddp.state import Record, list_cluster_histories
from awsddp.util.formatting import node_name
from awsddp.util.parallel import NodesFailed, run_each

if TYPE_CHECKING:
    from awsddp.aws.client import AwsClient
    from awsddp.aws.teardown import Teardown
    from awsddp.plan.records import Facts


# AWS lists terminated instances for about an hour. An instance that was launched less than an hour ago and is
# missing is therefore not listed yet.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/terminating-instances.html
TERMINATED_LISTED_FOR = timedelta(hours=1)


def aws_client_for(
    session: Session, target: Target, *, trail: Path | None = None, login: "AwsClient | None" = None
) -> "AwsClient":
    """Return an AWS client for a target.

    The client's calls are recorded in `trail`, by default in the cluster's folder. With `login`, the new
    client uses that client's credentials. Raises ConfigError.
    """
    from awsddp.aws.client import AwsClient, Trail

    return AwsClient(
        target, on_call=Trail(trail or session.folder.path), login=login, report_wait=session.say
    )


def find_owner(aws: "AwsClient", record: Record | None) -> str:
    """Return a cluster's owner: the owner in the record or, without a record, the caller's AWS identity.

    The record's owner is used because the login may have changed since the record was written. In a local
    cloud, the owner is always the AWS identity of the caller. Raises CloudError or ConfigError.
    """
    if record is None or record.target.access_key_id is not None:
        return aws.identity().user_id
    return record.owner


def check_account(cluster: LocatedCluster) -> None:
    """Raise ConfigError if the credentials and the cluster belong to different accounts."""
    account, record = cluster.aws.identity().account, cluster.record
    if record.account not in ("", account):
        raise ConfigError(
            f"cluster {cluster.session.spec.name} belongs to AWS account {record.account}",
            f"these credentials belong to account {account}; nothing was changed",
            "use credentials of the cluster's account: awsddp --profile NAME ...",
        )


def gather_facts(
    aws: "AwsClient", spec: ClusterSpec, target: Target, record: Record | None = None
) -> "Facts":
    """Return the facts for a plan of `spec`. Check that the user's own login key matches the key in EC2.

    With a `record`, the owner in the facts is the record's owner, not the caller's AWS identity. Raises
    ConfigError, CloudError.
    """
    from awsddp.aws.plan_facts import gather_facts

    facts = gather_facts(
        aws,
        spec,
        caller_address=target.caller_address,
        target=target.name,
        cluster_id=record.id if record else "",
    )
    if spec.access.key:
        from awsddp.nodes.connection import check_key_file

        check_key_file(resolve_key_file(spec), name=spec.access.key, public=facts.public_key)
    return replace(facts, owner=find_owner(aws, record))


def resolve_key_file(spec: ClusterSpec) -> Path:
    """Return the absolute path of `access.key_file`."""
    return Path(str(spec.access.key_file)).expanduser().absolute()


def resolve_target(session: Session, record: Record | None) -> Target:
    """Return the target in a record. No setting changes the target, except that --profile selects another
    login.

    If there is no record, returns the target in the settings. Raises ConfigError if the command line names a
    target that differs from the record's.
    """
    requested, typed = session.spec.cluster, session.spec.from_cli
    if record is None:
        configured = Target(region=requested.region, profile=requested.profile)
        return Target(name="local") if session.local else configured
    target = record.target
    region = requested.region if "cluster.region" in typed else None
    profile = requested.profile if "cluster.profile" in typed else None
    if target.name == "local":
        other = "" if session.local else region or (profile and f"AWS as profile {profile}")
    else:
        other = "the local cloud" if session.local else region if region != target.region else ""
    if other:
        raise _other_target_error(session, record, other)
    return replace(target, profile=profile or target.profile)


def _other_target_error(session: Session, record: Record, other: str) -> ConfigError:
    """Return the error for a cluster that exists, but not in the requested target `other`."""
    name, actual = session.spec.name, record.target.location
    return ConfigError(
        f"cluster {name} is in {actual}, not in {other}",
        "on this machine a cluster's name is unique; nothing was changed",
        f"awsddp status   # without another region, profile or --local: the cluster in {actual}\n"
        "awsddp down   # end it there\n"
        f"awsddp -c {name}-2 up ...   # another name",
    )


@contextlib.contextmanager
def open_target(session: Session, record: Record | None) -> Iterator[Target]:
    """Yield the target for `up` and `plan`: the record's or, if there is no record, the settings' target.

    Starts the local cloud if it is the target. Raises ConfigError if the cluster exists in another target.
    """
    requested = session.spec.cluster
    resolved = resolve_target(session, record)
    if resolved.name != "local":
        if record is not None and requested.region not in (None, resolved.region):
            raise _other_target_error(session, record, str(requested.region))
        yield resolved
        return
    if "cluster.region" in session.spec.from_cli:
        local.check_region(requested.region)
    with local.open_cloud(session.home, session.on_event, recorded_home=resolved.daemon_home) as target:
        assert target is not None, "it was started"
        yield target


@contextlib.contextmanager
def find_cluster(
    session: Session,
    *,
    ignore_newer: bool = False,
    all_resources: bool = False,
    all_regions: bool = True,
    name_lock_holder: bool = False,
) -> Iterator[LocatedCluster]:
    """Search the target in the cluster's record, whatever the settings are, and yield the cluster.

    If there is no record, the search covers these targets in order: the local cloud, if it is running; the
    given or configured region; and every enabled region, if `all_regions` is True. If there is a record, one
    call lists the nodes; with `all_resources`, the other resources are listed as well. With `ignore_newer`, a
    record that a newer awsddp wrote is treated as missing. With `name_lock_holder`, an error about nodes
    names the command that is changing the cluster. If there are no credentials and no record, the cluster is
    treated as absent.

    Raises CloudError if AWS does not answer, and ConfigError if the command line names a target that differs
    from the record's.
    """
    record, cluster = session.folder.read(ignore_newer=ignore_newer), None
    with contextlib.ExitStack() as stack:
        try:
            cluster = _search(session, record, stack, all_resources=all_resources, all_regions=all_regions)
            yield cluster
        except (NodeError, NotFoundError) as error:
            if cluster is not None and isinstance(error, NodeFailure | NodesFailed):
                _add_ended_nodes(cluster, error)
            if name_lock_holder:
                _add_lock_holder(session, error)
            raise


def _search(
    session: Session,
    record: Record | None,
    stack: contextlib.ExitStack,
    *,
    all_resources: bool,
    all_regions: bool,
) -> LocatedCluster:
    """Search only the target of the record; if there is no record, search the possible targets in order."""
    default = Target(name="local") if record is None else resolve_target(session, record)
    nearest = LocatedCluster(session=session, target=default, local_record=record)
    searched: tuple[str, ...] = ()
    for target in _list_targets(session, record, stack, ending=all_resources):
        searched = (*searched, target.location)
        try:
            candidate = LocatedCluster(
                session=session, target=target, local_record=record, searched_places=searched
            )
            nearest = _search_target(candidate, all_resources=all_resources or record is None)
        except (CloudError, ConfigError) as error:
            # If there are no credentials, a cluster that this machine has terminated is "absent".
            no_account = isinstance(error, ConfigError) or getattr(error, "code", "") == "NoCredentialsError"
            ended = any((session.home / "history").glob(f"{session.spec.name}-????????"))
            if record is not None or not (no_account and (nearest.aws_client is not None or ended)):
                raise
            break
        if nearest.listing is not None:
            return nearest
    return _search_regions(nearest) if all_regions and record is None else nearest


def _list_targets(
    session: Session, record: Record | None, stack: contextlib.ExitStack, *, ending: bool
) -> Iterator[Target]:
    """Yield the targets to search, in order; the local cloud is included only if it is running."""
    target, requested = resolve_target(session, record), session.spec.cluster
    if target.name == "local" or not (record or requested.region or requested.profile):
        opened = local.open_cloud(
            session.home, session.on_event, start=False, may_stop=ending, recorded_home=target.daemon_home
        )
        if (running := stack.enter_context(opened)) is not None:
            yield running
    if target.name != "local":
        yield target


def _search_target(
    cluster: LocatedCluster, *, all_resources: bool = True, login: "AwsClient | None" = None
) -> LocatedCluster:
    """Search the cluster's target; return the cluster with its AWS client and listing."""
    from awsddp.aws.clusters import find_clusters_of_other_sessions

    aws = aws_client_for(cluster.session, cluster.target, login=login)
    cluster = refresh_listing(replace(cluster, aws_client=aws), all_resources=all_resources)
    if cluster.local_record is not None and cluster.own_listing is None:
        check_account(cluster)
    if cluster.listing is None:
        sessions = find_clusters_of_other_sessions(aws, cluster.session.spec.name, aws.identity().user_id)
        return replace(cluster, other_session_listings=sessions)
    return cluster


def _search_regions(nearest: LocatedCluster) -> LocatedCluster:
    """Search the other enabled regions in parallel; return the cluster if it is found, or else `nearest`."""
    from awsddp.aws.plan_facts import list_enabled_regions

    session = nearest.session
    if nearest.target.name == "local" or session.local or session.spec.cluster.region:
        return nearest
    aws = nearest.aws
    regions = [name for name in list_enabled_regions(aws) if name != aws.region]
    searched = (*nearest.searched_places, *regions)

    def search(region: str) -> LocatedCluster:
        target = replace(nearest.target, region=region)
        return _search_target(replace(nearest, target=target, searched_places=searched), login=aws)

    clusters = run_each(search, regions)
    sessions = tuple(listed for cluster in (nearest, *clusters) for listed in cluster.other_session_listings)
    matches = (cluster for cluster in clusters if cluster.listing)
    return next(matches, replace(nearest, searched_places=searched, other_session_listings=sessions))


def refresh_listing(
    cluster: LocatedCluster, *, owner: str | None = None, all_resources: bool = True
) -> LocatedCluster:
    """Return the cluster with a new listing by name and owner, preferably the listing with the record's id.

    The default owner is the record's owner or, without a record, the caller's AWS identity. Unless
    `all_resources` is set, one call lists the nodes, and other resources are listed only if there are no
    living nodes. Raises CloudError.
    """
    from awsddp.aws.clusters import find_clusters

    record, name = cluster.local_record, cluster.session.spec.name
    owner = owner or (record.owner if record else cluster.aws.identity().user_id)
    recorded = record.known_nodes if record else None
    nodes_only = (
        () if all_resources else find_clusters(cluster.aws, name, owner, remembered=recorded, kinds=())
    )
    listings = tuple(listing for listing in nodes_only if listing.live)
    listings = listings or find_clusters(cluster.aws, name, owner, remembered=recorded)
    of_record = [listing for listing in listings if record is not None and listing.id == record.id]
    chosen = next(iter((*of_record, *listings)), None)
    others = tuple(listing for listing in listings if listing is not chosen)
    return replace(cluster, listing=chosen, other_listings=others)


def wait_until_listed(cluster: LocatedCluster) -> LocatedCluster:
    """Wait for up to two minutes until AWS lists every prepared instance; return the cluster.

    Waits only if the launch was less than an hour ago, and refreshes the listing only if an instance was
    missing. Raises CloudError.
    """
    from awsddp.aws.clusters import by_id, describe
    from awsddp.aws.waits import CLOCK, VISIBLE_S, poll

    record, own_cluster = cluster.record, cluster.own_listing
    missing = {node.instance_id for node in record.prepared}
    missing -= {node.instance_id for node in own_cluster.nodes} if own_cluster else set()
    if not missing or CLOCK.now() - record.created > TERMINATED_LISTED_FOR:
        return cluster
    # Every local cloud has its own access keys: if the identity differs, this is another local cloud.
    if record.target.access_key_id is not None and record.owner != cluster.aws.identity().user_id:
        return cluster

    def are_listed() -> bool | None:
        return True if len(describe(cluster.aws, by_id(*missing))) == len(missing) else None

    poll(are_listed, deadline_s=VISIBLE_S)
    return refresh_listing(cluster)


def wait_until_launched_listed(cluster: LocatedCluster) -> LocatedCluster:
    """Wait until AWS lists the instances that this machine launched, even in an interrupted launch.

    Returns the cluster with a listing that includes them. Raises CloudError.
    """
    from awsddp.aws.instances import find_launched_nodes, launched_numbers

    record, own_cluster = cluster.local_record, cluster.own_listing
    if record is None:
        return cluster
    if record.intent is None:
        return wait_until_listed(cluster)
    live = {node.node for node in own_cluster.live} if own_cluster else set()
    if live and launched_numbers(record.intent) <= live:
        return cluster
    find_launched_nodes(cluster.aws, record.intent, on_event=cluster.session.on_event)
    return refresh_listing(cluster)


def _add_ended_nodes(cluster: LocatedCluster, error: NodeError) -> None:
    """If EC2 has stopped or terminated nodes that an error is about, add their states to the error."""
    from awsddp.aws.clusters import by_id, describe

    with contextlib.suppress(CloudError):
        numbers = {node.instance_id: node.node for node in error.nodes}
        off = sorted(
            f"EC2 says: {node_name(numbers[instance.instance_id])} is {instance.state}"
            for instance in (describe(cluster.aws, by_id(*numbers)) if numbers else ())
            if instance.state != "running"
        )
        error.why = "\n".join(filter(None, (error.why, *off)))


def require_live(cluster: LocatedCluster) -> tuple[LocatedCluster, ClusterListing]:
    """Return the cluster and its listing. Raises CloudError, or NotFoundError if no node is living."""
    if (
        cluster.aws_client
        and cluster.local_record
        and (cluster.own_listing is not None or cluster.listing is None)
    ):
        cluster = wait_until_listed(cluster)
    if cluster.listing is None or not cluster.listing.live:
        refuse_other_sessions(cluster)
        name, searched = cluster.session.spec.name, ", ".join(cluster.searched_places)
        create_command = _create_command(cluster.session, is_local=cluster.target.name == "local")
        raise NotFoundError(f"no cluster {name}", f"searched: {searched}", create_command)
    return cluster, cluster.listing


def describe_nodes(cluster: LocatedCluster, listed: ClusterListing) -> str:
    """Return a string with the number, type and location of a listed cluster's living nodes."""
    location = replace(cluster.target, region=listed.region).location
    return f"{len(listed.live)} x {listed.live[0].instance_type} in {location}"


def refuse_other_sessions(cluster: LocatedCluster) -> None:
    """Raise NotFoundError if other sessions of the user's role have clusters with this name."""
    if not cluster.other_session_listings:
        return
    creators = [
        (listed.owner.partition(":")[2], describe_nodes(cluster, listed))
        for listed in cluster.other_session_listings
    ]
    raise NotFoundError(
        f"no cluster {cluster.session.spec.name} of this login; "
        "another session of your role has one, which costs money",
        "\n".join(f"{these}, made by {session}" for session, these in creators),
        f"role_session_name = {creators[0][0]} in the AWS profile makes it your cluster; then: awsddp down\n"
        "awsddp status --all   # what it costs",
    )


def terminate(cluster: LocatedCluster, listed: ClusterListing) -> "Teardown":
    """Terminate all of a listed cluster's resources. Raises CloudError."""
    from awsddp.aws.teardown import teardown

    return teardown(cluster.aws, listed, on_event=cluster.session.on_event)


def _add_lock_holder(session: Session, error: NodeError | NotFoundError) -> None:
    """Add to an error which command is changing the cluster, or that a command has terminated the cluster."""
    holder, why = session.folder.find_lock_holder(), ""
    if holder is not None:
        why = f"{holder} is changing the cluster"
    elif (
        isinstance(error, NodeError) and session.folder.read(ignore_newer=True) is None
    ):  # the cluster had a record before
        why, error.next = "another command has terminated the cluster", _create_command(session)
    error.why = "\n".join(filter(None, (error.why, why)))


def _create_command(session: Session, *, is_local: bool = False) -> str:
    """Return the command that creates the cluster in its last target or in the target that was searched."""
    return f"awsddp up{' --local' if is_local or _was_local(session) else ''}   # create it"


def _was_local(session: Session) -> bool:
    """Return True if the last cluster that this machine launched with this name was in the local cloud."""
    launches = [
        past.launch_row for past in list_cluster_histories(session.home) if past.name == session.spec.name
    ]
    last = max(filter(None, launches), key=lambda row: row.time, default=None)
    return last is not None and last.target == "local"
