"""Create the cluster's key pair, security group and placement group, or update the existing ones."""

from functools import partial

from awsddp.aws.api_errors import AwsRefused, none_if_refused
from awsddp.aws.client import AwsClient, Reply
from awsddp.aws.clusters import Filters, SecurityGroup, tagged
from awsddp.aws.waits import VISIBLE_S, poll, retry_while_transient
from awsddp.errors import CloudError
from awsddp.model.events import Event, OnEvent
from awsddp.plan.records import LaunchPlan, Request
from awsddp.plan.requests import RequestValues, ssh_permission
from awsddp.util.parallel import run_all_with_events, run_each

_NOT_YET = frozenset({"InvalidGroup.NotFound", "InvalidGroupId.NotFound", "InvalidSecurityGroupID.NotFound"})


def is_group_unknown(refusal: AwsRefused) -> bool:
    """Return True if AWS does not find the group, which may be because it was created a moment ago."""
    return refusal.code in _NOT_YET


def _exists_already(refusal: AwsRefused) -> bool:
    """Return True if the requested resource already exists."""
    return refusal.code.endswith(".Duplicate")


def ensure_launch_resources(
    aws: AwsClient, plan: LaunchPlan, values: RequestValues, *, on_event: OnEvent
) -> str:
    """Create what the plan's instances need, in parallel; return the id of their security group.

    Raises CloudError.
    """
    ensures = (_ensure_group, _ensure_key, _ensure_placement)
    group, *_ = run_all_with_events(
        [partial(ensure, aws, plan, values) for ensure in ensures], on_event=on_event
    )
    return str(group)


def _create(aws: AwsClient, plan: LaunchPlan, values: RequestValues, operation: str) -> Reply | None:
    """Send one of the plan's requests; return None if the plan has no such request or its resource exists."""
    if not plan.has_request(operation):
        return None
    request = values.resolve(plan.request(operation))
    return none_if_refused(partial(aws.call, operation, request.parameters), _exists_already)


def _ensure_placement(aws: AwsClient, plan: LaunchPlan, values: RequestValues, on_event: OnEvent) -> None:
    """Create the plan's placement group, if the plan has one, and wait until the group is available.

    Raises CloudError.
    """
    if not plan.has_request("CreatePlacementGroup"):
        return
    name, created = values.ids["name"], _create(aws, plan, values, "CreatePlacementGroup")
    if created is not None:
        on_event(Event(f"placement group {name} made", ""))
        if created.get("PlacementGroup", {}).get("State") == "available":
            return

    def available() -> bool | None:
        groups = aws.paginate("DescribePlacementGroups", {"GroupNames": [name]})
        return True if any(group.get("State") == "available" for group in groups) else None

    usable = partial(poll, available, deadline_s=VISIBLE_S)
    retry_while_transient(
        usable, is_transient=lambda refusal: refusal.code == "InvalidPlacementGroup.Unknown"
    )


def _ensure_key(aws: AwsClient, plan: LaunchPlan, values: RequestValues, on_event: OnEvent) -> None:
    """Import the cluster's public key, unless the key pair (its name contains the cluster's id) exists.
    Raises CloudError.
    """
    if _create(aws, plan, values, "ImportKeyPair") is not None:
        on_event(Event(f"key pair {values.ids['name']} imported", ""))


def _ensure_group(aws: AwsClient, plan: LaunchPlan, values: RequestValues, on_event: OnEvent) -> str:
    """Create the cluster's security group with its rules, unless it exists, and return its id.

    An existing group gets the missing rules, and port 22 is closed to addresses that the plan does not list.
    The user's own group is not changed. Raises CloudError.
    """
    if not plan.has_request("CreateSecurityGroup"):
        return str(plan.request("RunInstances").parameters["NetworkInterfaces"][0]["Groups"][0])
    created = _create(aws, plan, values, "CreateSecurityGroup")
    group = _find_group(aws, values) if created is None else str(created["GroupId"])
    if created is not None:
        on_event(Event(f"security group {group} made", ""))
    rules = [
        values.resolve(plan.request(f"AuthorizeSecurityGroup{side}"), security_group=group)
        for side in ("Ingress", "Egress")
    ]
    run_each(lambda rule: _authorize(aws, rule), rules)
    if created is None:
        _close_stale(aws, group, plan.ssh_cidrs, on_event=on_event)
    return group


def replace_ssh_sources(aws: AwsClient, group: str, cidrs: tuple[str, ...], *, on_event: OnEvent) -> None:
    """Open port 22 in the cluster's own group to these addresses only. Raises CloudError."""
    rules = {"GroupId": group, "IpPermissions": [ssh_permission(cidr) for cidr in cidrs]}
    if cidrs:
        _authorize(aws, Request("AuthorizeSecurityGroupIngress", rules))
    _close_stale(aws, group, cidrs, on_event=on_event)


def _find_group(aws: AwsClient, values: RequestValues) -> str:
    name, cluster_id = values.ids["name"], values.ids["cluster_id"]
    filters: Filters = [*tagged("awsddp:id", cluster_id), {"Name": "group-name", "Values": [name]}]

    def find() -> str | None:
        groups = aws.read(SecurityGroup, "DescribeSecurityGroups", {"Filters": filters})
        return groups[0].group_id if groups else None

    group = poll(find, deadline_s=VISIBLE_S)
    if group is None:
        raise CloudError(
            f"security group {name} already exists, but does not belong to this cluster",
            f"no group of that name has the tag awsddp:id={cluster_id}",
            f"inspect it: aws ec2 describe-security-groups --filters Name=group-name,Values={name}",
        )
    return group


def _authorize(aws: AwsClient, rules: Request) -> None:
    """Add rules. If one of them already exists, AWS adds none; in that case, each rule is added in its own
    call.
    """
    add = partial(aws.call, rules.operation, rules.parameters)
    added = none_if_refused(
        partial(retry_while_transient, add, is_transient=is_group_unknown), _exists_already
    )
    permissions = rules.parameters["IpPermissions"]
    if added is None and len(permissions) > 1:
        for permission in permissions:
            alone = Request(rules.operation, {**rules.parameters, "IpPermissions": [permission]})
            _authorize(aws, alone)


def _close_stale(aws: AwsClient, group: str, cidrs: tuple[str, ...], *, on_event: OnEvent) -> None:
    """Close port 22 in the cluster's own group to every address and group that is not in `cidrs`."""
    read = partial(aws.read, SecurityGroup, "DescribeSecurityGroups", {"GroupIds": [group]})
    for permission in retry_while_transient(read, is_transient=is_group_unknown)[0].ip_permissions:
        stale = [source for source in permission.sources if source not in cidrs]
        if stale and permission.from_port == 22:
            rules = {"GroupId": group, "IpPermissions": list(map(ssh_permission, stale))}
            close = partial(aws.call, "RevokeSecurityGroupIngress", rules)
            closed = partial(retry_while_transient, close, is_transient=is_group_unknown)
            none_if_refused(closed, lambda refusal: refusal.code == "InvalidPermission.NotFound")
            on_event(Event(f"port 22 closed for {len(stale)} former addresses"))
