"""What can be known before a launch: the caller, the clock, the plan, and whether AWS allows its calls.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/CommonParameters.html (DryRun): a call that would be
allowed is refused with DryRunOperation.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from awsddp.aws.api_errors import MOST_SKEW_S, Refused, skew_s
from awsddp.aws.client import Aws, Identity
from awsddp.errors import AwsddpError, CapacityError, ConfigError
from awsddp.model.records import Check
from awsddp.plan.launch_plan import make_plan
from awsddp.plan.records import Facts, LaunchPlan, Request
from awsddp.plan.requests import Values
from awsddp.settings.spec import ClusterSpec
from awsddp.settings.values import s3_place
from awsddp.util.parallel import each

OF_REGION = ("credentials", "clock", "plan", "permission")
"""The checks that need a region."""
CONFIGURATION = "configuration"
"""The check that failed where the AWS configuration is invalid."""
# What `up`, jobs, `stop` and `down` call later on, and what has to exist before AWS can say whether it may:
# by the request that makes it.
_OF_GROUP = ("AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress", "RevokeSecurityGroupIngress")
_OF_INSTANCE = ("CreateTags", "DeleteTags", "StopInstances", "StartInstances", "TerminateInstances")
_LATER = (
    ("CreateSecurityGroup", "a security group", (*_OF_GROUP, "DeleteSecurityGroup")),
    ("ImportKeyPair", "a key pair", ("DeleteKeyPair",)),
    ("CreatePlacementGroup", "a placement group", ("DeletePlacementGroup",)),
    ("RunInstances", "a network interface", ("DeleteNetworkInterface",)),
    ("RunInstances", "a volume", ("DeleteVolume",)),
    ("RunInstances", "an instance", ("ModifyInstanceAttribute", *_OF_INSTANCE)),
)
# What a launch refers to before it is made.
_UNMADE = ({"$ref": "name"}, {"$ref": "security_group"})
# The resource that a denial names: "... to perform: ec2:RunInstances on resource: arn:aws:ec2:...".
_DEFAULT_GROUP = ":security-group/"
_NO_GROUP = "needs a security group; with the VPC's default one it is denied"


def before_launch(
    aws: Aws, spec: ClusterSpec, values: Values, *, facts: Callable[[], Facts]
) -> tuple[Check, ...]:
    """Return every check that can be made before anything exists; nothing is changed.

    `facts` reads what a plan needs; `values` stand for what a launch would make. A refusal becomes
    a check that failed; what depends on it is shown as not checked.
    """
    try:
        checks = _caller(aws)
    except ConfigError as error:
        return (failed(CONFIGURATION, error), *not_checked(CONFIGURATION, *OF_REGION))
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


_RULE = {
    "ID": "cut uploads",
    "Status": "Enabled",
    "Filter": {"Prefix": ""},
    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
}


def uploads_check(aws: Aws, place: str) -> list[Check]:
    """Return a warning where uploads that were cut would stay in the bucket of a place and cost money.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpu-abort-incomplete-mpu-lifecycle-config.html
    """
    bucket, prefix = s3_place(place)
    try:
        rules = aws.call("GetBucketLifecycleConfiguration", {"Bucket": bucket}, service="s3")["Rules"]
    except Refused as refusal:
        if refusal.code != "NoSuchLifecycleConfiguration":
            return []  # it is not known
        rules = []
    for rule in rules:
        below = rule.get("Filter", rule).get("Prefix", "")
        ends = "AbortIncompleteMultipartUpload" in rule and rule["Status"] == "Enabled"
        if ends and f"{prefix}/".startswith(below):
            return []
    told = shlex.quote(json.dumps({"Rules": [_RULE]}))
    hint = (
        f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket} --lifecycle-configuration {told}"
        "   # it takes the place of other rules: add them"
    )
    value = f"bucket {bucket} keeps uploads that were cut, which cost money, until a lifecycle rule ends them"
    return [Check(name="warning", ok=None, value=value, hint=hint)]


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
    checks = [Check(name="credentials", ok=True, value=Identity.of(reply).arn + until)]
    skew = skew_s(reply.get("ResponseMetadata", {}), datetime.now(UTC))
    if skew is not None:
        good, side = abs(skew) <= MOST_SKEW_S, "behind" if skew > 0 else "ahead of"
        value, expected = f"{abs(skew):.0f} s {side} AWS's", f"within {MOST_SKEW_S} s"
        hint = "" if good else "sudo timedatectl set-ntp true"
        checks.append(Check(name="clock", ok=good, value=value, expected=expected, hint=hint))
    return checks


def dry_run(aws: Aws, plan: LaunchPlan, values: Values) -> tuple[Check, ...]:
    """Send the plan's requests with DryRun, and return for each the check whether it is allowed.

    What does not exist yet is left out of the launch that is asked for: the key, the cluster's own group and
    placement group. Without a group EC2 takes the VPC's default one, so that where that is what is denied
    nothing is told of a launch into one's own. Raises CloudError where AWS cannot be asked at all.
    """
    asked = [request for request in plan.requests if request.operation not in _OF_GROUP]
    launch = {"subnet": plan.subnets[0].id, "client_token": values.ids["cluster_id"]}

    def ask(request: Request) -> Check:
        known = _made(request.parameters) if request.operation == "RunInstances" else request.parameters
        sent = values.resolve(Request(request.operation, {**known, "DryRun": True}), **launch)
        answer, why = "allowed", ""
        try:
            aws.call(sent.operation, sent.parameters)
        except (Refused, CapacityError) as refusal:
            if not (isinstance(refusal, Refused) and refusal.code == "DryRunOperation"):
                answer, why = "denied" if refusal.kind == "permission" else "refused", refusal.why
        if answer == "denied" and known != request.parameters and _DEFAULT_GROUP in why:
            answer, why = "not asked", _NO_GROUP
        return _check(request.operation, answer, why)

    answers = each(ask, asked)
    later = [
        _check(name, "not asked", f"needs {what}")
        for made_by, what, names in _LATER
        if plan.asks(made_by)  # the user's own is not changed, and not deleted
        for name in names
    ]
    return (*answers, *later)


def _made(part: Any) -> Any:
    """Return a part of a launch without what refers to something that does not exist yet."""
    if isinstance(part, list):
        return [_made(item) for item in part if item not in _UNMADE]
    if isinstance(part, dict):
        kept = {key: _made(value) for key, value in part.items() if value not in _UNMADE}
        return {key: value for key, value in kept.items() if value not in ({}, [])}
    return part


def _check(operation: str, answer: str, why: str) -> Check:
    """Return the check of a call: "allowed", "denied", "refused", or "not asked" for lack of something."""
    return Check(
        name=f"permission {operation}",
        ok={"allowed": True, "not asked": None}.get(answer, False),
        value=f"{answer}: {why}" if why else answer,
        expected="allowed",
        hint="awsddp doctor --iam-policy   # prints what is needed" if answer == "denied" else "",
    )
