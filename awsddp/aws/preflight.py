"""What can be known before a launch: the caller, the clock, the region, the plan, the permissions."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from awsddp import compat
from awsddp.aws.facts import enabled_regions
from awsddp.aws.permissions import Permission, dry_run
from awsddp.aws.refusals import MOST_SKEW_S, Refused
from awsddp.aws.session import Aws
from awsddp.cluster import Check
from awsddp.errors import AwsddpError
from awsddp.plan import Facts, LaunchPlan, Values, make_plan
from awsddp.spec import ClusterSpec, seconds

_OF_PLAN = ("offer", "quota", "image", "subnets", "permission")
"""The checks that need a plan."""
OF_REGION = ("credentials", "clock", *_OF_PLAN)
"""The checks that need a region."""


def before_launch(
    aws: Aws, spec: ClusterSpec, values: Values, *, facts: Callable[[], Facts]
) -> tuple[Check, ...]:
    """Return every check that can be made before anything exists; nothing is changed.

    `facts` reads what a plan needs; `values` stand for what a launch would make. A refusal becomes
    a check that failed; what depends on it is shown as not checked.
    """
    try:
        checks = [*_caller(aws, spec, values.now), _region(aws)]
    except AwsddpError as error:
        return (failed("credentials", error), *not_checked("credentials", "clock", "region", *_OF_PLAN))
    try:
        read = facts()
        plan, quota = _plan_and_quota(spec, read)
    except AwsddpError as error:
        return (*checks, failed("plan", error), *not_checked("plan", *_OF_PLAN))
    checks += _plan(plan, read, quota)
    try:
        asked = dry_run(aws, plan, values)
    except AwsddpError as error:
        return (*checks, failed("permission", error))
    return (*checks, *map(_permission, asked))


def failed(name: str, error: AwsddpError) -> Check:
    """Return a refusal as a check that failed."""
    value = f"{error.message}: {error.why}" if error.why else error.message
    return Check(name=name, ok=False, value=value, hint=error.next)


def not_checked(missing: str, *names: str) -> tuple[Check, ...]:
    """Return the checks that depend on one that failed."""
    return tuple(Check(name=name, ok=None, value=f"not checked: needs {missing}") for name in names)


def _plan_and_quota(spec: ClusterSpec, facts: Facts) -> tuple[LaunchPlan, Check | None]:
    """Return the plan, and the check of a quota that is too small for it. Raises as `make_plan` does."""
    try:
        return make_plan(spec, facts), None
    except AwsddpError as error:
        if error.kind != "quota":
            raise
        return make_plan(spec, replace(facts, quotas={})), failed("quota", error)


def _caller(aws: Aws, spec: ClusterSpec, now: datetime) -> list[Check]:
    """Return the checks of the credentials, their end and this machine's clock. Raises CloudError."""
    reply = aws.call("GetCallerIdentity", {}, service="sts")
    checks = [Check(name="credentials", ok=True, value=reply["Arn"])]
    ends = aws.credentials_end()
    if ends is not None:
        expires = now + timedelta(seconds=seconds(spec.cluster.expires, place="cluster.expires"))
        checks.append(
            Check(
                name="credentials end",
                ok=True if ends >= expires else None,
                value=f"{ends:%Y-%m-%d %H:%M} UTC",
                expected=f"after the cluster's expiry, {expires:%Y-%m-%d %H:%M} UTC",
                hint="" if ends >= expires else "log in again before then; the nodes expire by themselves",
            )
        )
    date = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if date:
        skew = (parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds()
        good = abs(skew) <= MOST_SKEW_S
        hint = "" if good else "sudo timedatectl set-ntp true"
        checks.append(
            Check(
                name="clock",
                ok=good,
                value=f"{abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} AWS's",
                expected=f"within {MOST_SKEW_S} s",
                hint=hint,
            )
        )
    return checks


def _region(aws: Aws) -> Check:
    try:
        enabled = enabled_regions(aws)
    except Refused as refusal:
        return Check(name="region", ok=None, value=refusal.why, hint=refusal.next)
    ok = aws.region in enabled
    return Check(
        name="region",
        ok=ok,
        value=aws.region,
        expected="enabled for this account",
        hint="" if ok else f"enable it in the AWS console, or one of: {', '.join(enabled)}",
    )


def _plan(plan: LaunchPlan, facts: Facts, too_small: Check | None) -> list[Check]:
    quota = compat.quota_of(plan.instance_type, plan.market)
    readable = facts.reservation is not None or (quota is not None and facts.quotas.get(quota[0]) is not None)
    known = compat.image_facts(plan.image.name)
    inside = [
        part
        for part in (f"torch {known.torch}" if known.torch else "", known.cuda and f"CUDA {known.cuda}")
        if part
    ]
    subnets = [subnet for subnet in facts.subnets if subnet.id in {zone.subnet for zone in plan.subnets}]
    checks = [
        Check(name="offer", ok=True, value=f"{plan.instance_type} in {', '.join(plan.zones)}"),
        too_small
        or Check(
            name="quota",
            ok=True if readable else None,
            value=plan.quota,
            hint="" if readable else "allow servicequotas:GetServiceQuota, or see the console",
        ),
        Check(
            name="image",
            ok=None if plan.image.deprecated else True,
            value=f"{plan.image.id} {plan.image.name}" + (f" ({', '.join(inside)})" if inside else ""),
            hint=f"deprecated since {plan.image.deprecated[:10]}" if plan.image.deprecated else "",
        ),
        Check(
            name="subnets",
            ok=True,
            value=", ".join(f"{subnet.id} ({subnet.free_addresses} free)" for subnet in subnets),
            expected=f"{len(plan.numbers)} free addresses, and a route out",
        ),
    ]
    if facts.group is not None:
        lacks = "; ".join(facts.group.lacks)
        checks.append(
            Check(name="security group", ok=not lacks, value=f"{facts.group.id} {lacks}".strip(), hint=lacks)
        )
    if facts.reservation is not None:
        held = facts.reservation
        checks.append(
            Check(name="reservation", ok=True, value=f"{held.id}: {held.free} x {held.instance_type} free")
        )
    checks += [Check(name="warning", ok=None, value=text) for text in plan.warnings]
    return checks


def _permission(told: Permission) -> Check:
    ok = {"allowed": True, "denied": False, "refused": False, "not asked": None}[told.answer]
    value = told.answer if not told.why else f"{told.answer}: {told.why}"
    hint = "awsddp doctor --iam-policy   # prints what is needed" if told.answer == "denied" else ""
    return Check(name=f"permission {told.operation}", ok=ok, value=value, expected="allowed", hint=hint)
