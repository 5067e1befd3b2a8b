"""The cluster's key pair, security group and placement group: made once, found again, brought in line."""

from functools import partial

from awsddp.aws.api_errors import Refused, unless_refused
from awsddp.aws.client import Aws, Reply
from awsddp.aws.clusters import Filters, SecurityGroup, tagged
from awsddp.aws.waits import VISIBLE_S, patiently, poll
from awsddp.errors import CloudError
from awsddp.model.events import Event, OnEvent
from awsddp.plan.records import LaunchPlan, Request
from awsddp.plan.requests import Values, ssh_permission
from awsddp.util.parallel import all_reporting, each

_NOT_YET = frozenset({"InvalidGroup.NotFound", "InvalidGroupId.NotFound", "InvalidSecurityGroupID.NotFound"})


def not_yet(refusal: Refused) -> bool:
    """Whether AWS does not find the group, which may have been created a moment ago."""
    return refusal.code in _NOT_YET


def _is_there(refusal: Refused) -> bool:
    """Whether what is asked for is there already."""
    return refusal.code.endswith(".Duplicate")


def ensure_access(aws: Aws, plan: LaunchPlan, values: Values, *, on_event: OnEvent) -> str:
    """Make what the plan's instances need, side by side, and return the id of their security group.

    Raises CloudError.
    """
    works = [partial(ensure, aws, plan, values) for ensure in (_ensure_group, _ensure_key, _ensure_placement)]
    return str(all_reporting(works, on_event=on_event)[0])


def _make(aws: Aws, plan: LaunchPlan, values: Values, operation: str) -> Reply | None:
    """Carry out a request of the plan; None where there is such a thing, or the plan makes none."""
    if not plan.asks(operation):
        return None
    request = values.resolve(plan.request(operation))
    return unless_refused(partial(aws.call, operation, request.parameters), _is_there)


def _ensure_placement(aws: Aws, plan: LaunchPlan, values: Values, on_event: OnEvent) -> None:
    """Make the plan's placement group, if it has one of its own, and wait until it can be used.

    Raises CloudError.
    """
    if not plan.asks("CreatePlacementGroup"):
        return
    name, made = values.ids["name"], _make(aws, plan, values, "CreatePlacementGroup")
    if made is not None:
        on_event(Event(f"placement group {name} made", ""))
        if made.get("PlacementGroup", {}).get("State") == "available":
            return

    def available() -> bool | None:
        found = aws.pages("DescribePlacementGroups", {"GroupNames": [name]})
        return True if any(group.get("State") == "available" for group in found) else None

    usable = partial(poll, available, deadline_s=VISIBLE_S)
    patiently(usable, passes=lambda refusal: refusal.code == "InvalidPlacementGroup.Unknown")


def _ensure_key(aws: Aws, plan: LaunchPlan, values: Values, on_event: OnEvent) -> None:
    """Import the cluster's public key, unless it is there (its name holds the id). Raises CloudError."""
    if _make(aws, plan, values, "ImportKeyPair") is not None:
        on_event(Event(f"key pair {values.ids['name']} imported", ""))


def _ensure_group(aws: Aws, plan: LaunchPlan, values: Values, on_event: OnEvent) -> str:
    """Make the cluster's security group with its rules, unless it is there, and return its id.

    A group that is there gets the rules it lacks, and loses port 22 for addresses the plan does not name;
    the user's own is left as it is. Raises CloudError.
    """
    if not plan.asks("CreateSecurityGroup"):
        return str(plan.request("RunInstances").parameters["NetworkInterfaces"][0]["Groups"][0])
    made = _make(aws, plan, values, "CreateSecurityGroup")
    group = _find_group(aws, values) if made is None else str(made["GroupId"])
    if made is not None:
        on_event(Event(f"security group {group} made", ""))
    rules = [
        values.resolve(plan.request(f"AuthorizeSecurityGroup{side}"), security_group=group)
        for side in ("Ingress", "Egress")
    ]
    each(lambda rule: _authorize(aws, rule), rules)
    if made is None:
        _close_stale(aws, group, plan.ssh_cidrs, on_event=on_event)
    return group


def move_ssh(aws: Aws, group: str, cidrs: tuple[str, ...], *, on_event: OnEvent) -> None:
    """Open port 22 of our group for these addresses and for no others. Raises CloudError."""
    rules = {"GroupId": group, "IpPermissions": [ssh_permission(cidr) for cidr in cidrs]}
    if cidrs:
        _authorize(aws, Request("AuthorizeSecurityGroupIngress", rules))
    _close_stale(aws, group, cidrs, on_event=on_event)


def _find_group(aws: Aws, values: Values) -> str:
    name, cluster_id = values.ids["name"], values.ids["cluster_id"]
    filters: Filters = [*tagged("awsddp:id", cluster_id), {"Name": "group-name", "Values": [name]}]

    def look() -> str | None:
        found = aws.read(SecurityGroup, "DescribeSecurityGroups", {"Filters": filters})
        return found[0].group_id if found else None

    group = poll(look, deadline_s=VISIBLE_S)
    if group is None:
        raise CloudError(
            f"security group {name} already exists, but is not this cluster's",
            f"no group of that name has the tag awsddp:id={cluster_id}",
            f"inspect it: aws ec2 describe-security-groups --filters Name=group-name,Values={name}",
        )
    return group


def _authorize(aws: Aws, rules: Request) -> None:
    """Add rules. Where one of them is there already AWS adds none, so each is then added for itself."""
    add = partial(aws.call, rules.operation, rules.parameters)
    added = unless_refused(partial(patiently, add, passes=not_yet), _is_there)
    permissions = rules.parameters["IpPermissions"]
    if added is None and len(permissions) > 1:
        for permission in permissions:
            alone = Request(rules.operation, {**rules.parameters, "IpPermissions": [permission]})
            _authorize(aws, alone)


def _close_stale(aws: Aws, group: str, cidrs: tuple[str, ...], *, on_event: OnEvent) -> None:
    """Close port 22 of our group for every address and group that the plan does not name."""
    read = partial(aws.read, SecurityGroup, "DescribeSecurityGroups", {"GroupIds": [group]})
    for permission in patiently(read, passes=not_yet)[0].ip_permissions:
        stale = [one for one in permission.sources if one not in cidrs] if permission.from_port == 22 else []
        if stale:
            rules = {"GroupId": group, "IpPermissions": list(map(ssh_permission, stale))}
            close = partial(aws.call, "RevokeSecurityGroupIngress", rules)
            closed = partial(patiently, close, passes=not_yet)
            unless_refused(closed, lambda refusal: refusal.code == "InvalidPermission.NotFound")
            on_event(Event(f"port 22 closed for {len(stale)} former addresses"))
