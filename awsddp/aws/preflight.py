"""Before a launch, check the credentials, the clock, the plan, and the permissions for the plan's calls.

A call with DryRun that would be allowed returns the error DryRunOperation:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/CommonParameters.html
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from awsddp.aws.api_errors import MOST_SKEW_S, AwsRefused, clock_skew_s
from awsddp.aws.client import AwsClient, Identity
from awsddp.errors import AwsddpError, CapacityError, ConfigError
from awsddp.model.records import Check
from awsddp.plan.launch_plan import make_plan
from awsddp.plan.records import Facts, LaunchPlan, Request
from awsddp.plan.requests import RequestValues
from awsddp.settings.spec import ClusterSpec
from awsddp.settings.values import parse_s3_uri
from awsddp.util.parallel import run_each

REGION_CHECKS = ("credentials", "clock", "plan", "permission")
"""The checks that need a region."""
CONFIGURATION = "configuration"
"""The check that fails if the AWS configuration is invalid."""
# Some calls that `up`, jobs, `stop` and `down` make need a resource, and AWS can check the permission for
# them only once the resource exists. Each row has the request that creates the resource, the kind of
# resource, and the calls that need it.
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
# The values in a launch request that refer to resources that do not exist yet.
_MISSING = ({"$ref": "name"}, {"$ref": "security_group"})
# The resource that a denial names: "... to perform: ec2:RunInstances on resource: arn:aws:ec2:...".
_DEFAULT_GROUP = ":security-group/"
_NO_GROUP = "needs a security group; a launch with the VPC's default group is denied"


def before_launch(
    aws: AwsClient, spec: ClusterSpec, values: RequestValues, *, facts: Callable[[], Facts]
) -> tuple[Check, ...]:
    """Run every check that is possible before any resource exists, and return the results; change nothing.

    `facts` reads the facts for a plan; `values` are placeholders for the ids that a launch would create. An
    error becomes a failed check; checks that depend on a failed check are shown as not checked.
    """
    try:
        checks = _check_caller(aws)
    except ConfigError as error:
        return (failed_check(CONFIGURATION, error), *skipped_checks(CONFIGURATION, *REGION_CHECKS))
    except AwsddpError as error:
        return (failed_check("credentials", error), *skipped_checks("credentials", *REGION_CHECKS[1:]))
    try:
        plan, quota = _plan_and_quota(spec, facts())
    except AwsddpError as error:
        return (*checks, failed_check("plan", error), *skipped_checks("plan", "permission"))
    summary = f"{plan.nodes} x {plan.instance_type} in {', '.join(plan.zones)}"
    if quota is None:
        checks.append(Check(name="plan", ok=True, value=f"{summary}; {plan.quota}"))
    else:
        checks += [Check(name="plan", ok=True, value=summary), quota]
    checks += [Check(name="warning", ok=None, value=text) for text in plan.warnings]
    try:
        return (*checks, *dry_run(aws, plan, values))
    except AwsddpError as error:
        return (*checks, failed_check("permission", error))


_RULE = {
    "ID": "cut uploads",
    "Status": "Enabled",
    "Filter": {"Prefix": ""},
    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
}


def check_interrupted_uploads(aws: AwsClient, uri: str) -> list[Check]:
    """Return a warning if the bucket of an S3 URI keeps interrupted uploads, which cost money.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpu-abort-incomplete-mpu-lifecycle-config.html
    """
    bucket, prefix = parse_s3_uri(uri)
    try:
        rules = aws.call("GetBucketLifecycleConfiguration", {"Bucket": bucket}, service="s3")["Rules"]
    except AwsRefused as refusal:
        if refusal.code != "NoSuchLifecycleConfiguration":
            return []  # the rules are unknown
        rules = []
    for rule in rules:
        rule_prefix = rule.get("Filter", rule).get("Prefix", "")
        aborts = "AbortIncompleteMultipartUpload" in rule and rule["Status"] == "Enabled"
        if aborts and f"{prefix}/".startswith(rule_prefix):
            return []
    configuration = shlex.quote(json.dumps({"Rules": [_RULE]}))
    hint = (
        f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket} "
        f"--lifecycle-configuration {configuration}   "
        "# this replaces existing rules: add them to the configuration"
    )
    value = f"bucket {bucket} keeps interrupted uploads, which cost money, until a lifecycle rule aborts them"
    return [Check(name="warning", ok=None, value=value, hint=hint)]


def failed_check(name: str, error: AwsddpError) -> Check:
    """Return a failed check that reports an error."""
    value = f"{error.message}: {error.why}" if error.why else error.message
    return Check(name=name, ok=False, value=value, hint=error.next)


def skipped_checks(missing: str, *names: str) -> tuple[Check, ...]:
    """Return checks with these names that are marked as not checked, because the check `missing` failed."""
    return tuple(Check(name=name, ok=None, value=f"not checked: needs {missing}") for name in names)


def _plan_and_quota(spec: ClusterSpec, facts: Facts) -> tuple[LaunchPlan, Check | None]:
    """Return the plan, and a failed check if its quota is too small. Raises what `make_plan` raises."""
    try:
        return make_plan(spec, facts), None
    except AwsddpError as error:
        if error.kind != "quota":
            raise
        return make_plan(spec, replace(facts, quotas={})), failed_check("quota", error)


def _check_caller(aws: AwsClient) -> list[Check]:
    """Check the credentials and this machine's clock. Raises CloudError."""
    reply = aws.call("GetCallerIdentity", {}, service="sts")
    end = aws.credentials_end()
    until = "" if end is None else f", until {end:%Y-%m-%d %H:%M} UTC"
    checks = [Check(name="credentials", ok=True, value=Identity.from_reply(reply).arn + until)]
    skew = clock_skew_s(reply.get("ResponseMetadata", {}), datetime.now(UTC))
    if skew is not None:
        is_right, side = abs(skew) <= MOST_SKEW_S, "behind" if skew > 0 else "ahead of"
        value, expected = f"{abs(skew):.0f} s {side} AWS's", f"within {MOST_SKEW_S} s"
        hint = "" if is_right else "sudo timedatectl set-ntp true"
        checks.append(Check(name="clock", ok=is_right, value=value, expected=expected, hint=hint))
    return checks


def dry_run(aws: AwsClient, plan: LaunchPlan, values: RequestValues) -> tuple[Check, ...]:
    """Send the plan's requests with DryRun, and return a permission check for each request and each later
    call.

    The launch request omits resources that do not exist yet: the key, the cluster's own security group and
    its placement group. Without a group, EC2 uses the VPC's default group; if that is denied, a launch into
    the cluster's own group may still be allowed. Raises CloudError if AWS cannot be reached.
    """
    requests = [request for request in plan.requests if request.operation not in _OF_GROUP]
    launch = {"subnet": plan.subnets[0].id, "client_token": values.ids["cluster_id"]}

    def try_request(request: Request) -> Check:
        is_launch = request.operation == "RunInstances"
        parameters = _without_missing(request.parameters) if is_launch else request.parameters
        sent = values.resolve(Request(request.operation, {**parameters, "DryRun": True}), **launch)
        outcome, why = "allowed", ""
        try:
            aws.call(sent.operation, sent.parameters)
        except (AwsRefused, CapacityError) as refusal:
            if not (isinstance(refusal, AwsRefused) and refusal.code == "DryRunOperation"):
                outcome, why = "denied" if refusal.kind == "permission" else "refused", refusal.why
        if outcome == "denied" and parameters != request.parameters and _DEFAULT_GROUP in why:
            outcome, why = "not asked", _NO_GROUP
        return _check(request.operation, outcome, why)

    checks = run_each(try_request, requests)
    later = [
        _check(name, "not asked", f"needs {requirement}")
        for made_by, requirement, names in _LATER
        if plan.has_request(made_by)  # the user's own group is neither changed nor deleted
        for name in names
    ]
    return (*checks, *later)


def _without_missing(part: Any) -> Any:
    """Return a part of a launch request without references to resources that do not exist yet."""
    if isinstance(part, list):
        return [_without_missing(item) for item in part if item not in _MISSING]
    if isinstance(part, dict):
        filled = {key: _without_missing(value) for key, value in part.items() if value not in _MISSING}
        return {key: value for key, value in filled.items() if value not in ({}, [])}
    return part


def _check(operation: str, outcome: str, why: str) -> Check:
    """Return the check for a call; `outcome` is "allowed", "denied", "refused" or "not asked"."""
    return Check(
        name=f"permission {operation}",
        ok={"allowed": True, "not asked": None}.get(outcome, False),
        value=f"{outcome}: {why}" if why else outcome,
        expected="allowed",
        hint="awsddp doctor --iam-policy   # prints the policy that is needed" if outcome == "denied" else "",
    )
