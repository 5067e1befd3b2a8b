"""What can be known before a launch: the caller, the clock, the plan, the permissions."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from awsddp.aws.permissions import dry_run
from awsddp.aws.refusals import MOST_SKEW_S, skew_s
from awsddp.aws.session import Aws
from awsddp.errors import AwsddpError
from awsddp.plan import make_plan
from awsddp.plan.records import Facts, LaunchPlan
from awsddp.plan.requests import Values
from awsddp.records import Check
from awsddp.spec import ClusterSpec

OF_REGION = ("credentials", "clock", "plan", "permission")
"""The checks that need a region."""


def before_launch(
    aws: Aws, spec: ClusterSpec, values: Values, *, facts: Callable[[], Facts]
) -> tuple[Check, ...]:
    """Return every check that can be made before anything exists; nothing is changed.

    `facts` reads what a plan needs; `values` stand for what a launch would make. A refusal becomes
    a check that failed; what depends on it is shown as not checked.
    """
    try:
        checks = _caller(aws)
    except AwsddpError as error:
        return (failed("credentials", error), *not_checked("credentials", *OF_REGION[1:]))
    try:
        plan, quota = _plan_and_quota(spec, facts())
    except AwsddpError as error:
        return (*checks, failed("plan", error), *not_checked("plan", "permission"))
    made = f"{plan.nodes} x {plan.instance_type} in {', '.join(plan.zones)}"
    if quota is None:
        checks.append(Check(name="plan", ok=True, value=f"{made}; {plan.quota}"))
    else:
        checks += [Check(name="plan", ok=True, value=made), quota]
    checks += [Check(name="warning", ok=None, value=text) for text in plan.warnings]
    try:
        return (*checks, *dry_run(aws, plan, values))
    except AwsddpError as error:
        return (*checks, failed("permission", error))


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


def _caller(aws: Aws) -> list[Check]:
    """Return the checks of the credentials, with their end, and this machine's clock. Raises CloudError."""
    reply = aws.call("GetCallerIdentity", {}, service="sts")
    ends = aws.credentials_end()
    until = "" if ends is None else f", until {ends:%Y-%m-%d %H:%M} UTC"
    checks = [Check(name="credentials", ok=True, value=reply["Arn"] + until)]
    skew = skew_s(reply.get("ResponseMetadata", {}), datetime.now(UTC))
    if skew is None:
        return checks
    good = abs(skew) <= MOST_SKEW_S
    checks.append(
        Check(
            name="clock",
            ok=good,
            value=f"{abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} AWS's",
            expected=f"within {MOST_SKEW_S} s",
            hint="" if good else "sudo timedatectl set-ntp true",
        )
    )
    return checks
