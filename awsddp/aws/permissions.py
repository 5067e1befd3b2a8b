"""Asks AWS whether the caller may do what a plan needs, without doing it.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/CommonParameters.html (DryRun): a call that would be
allowed is refused with DryRunOperation.
"""

from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.errors import CapacityError
from awsddp.parallel import each
from awsddp.plan.records import LaunchPlan, Request
from awsddp.plan.requests import Values
from awsddp.records import Check

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
# The resource that a denial names: "... to perform: ec2:RunInstances on resource: arn:aws:ec2:...".
_DEFAULT_GROUP = ":security-group/"
_NO_GROUP = "needs a security group; with the VPC's default one it is denied"


def dry_run(aws: Aws, plan: LaunchPlan, values: Values) -> tuple[Check, ...]:
    """Send the plan's requests with DryRun, and return for each the check whether it is allowed.

    What does not exist yet is left out of the launch that is asked for: the key, the cluster's own group and
    placement group. Without a group EC2 takes the VPC's default one, so that where that is what is denied
    nothing is told of a launch into one's own. Raises CloudError where AWS cannot be asked at all.
    """
    asked = [request for request in plan.requests if request.operation not in _OF_GROUP]
    launch = {"subnet": plan.subnets[0].subnet, "client_token": values.ids["cluster_id"]}

    def ask(request: Request) -> Check:
        known = _without_unmade(request)
        answer, why = _ask(aws, values.resolve(known, **launch))
        if answer == "denied" and known != request and _DEFAULT_GROUP in why:
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


def _without_unmade(request: Request) -> Request:
    if request.operation != "RunInstances":
        return request
    made = dict(request.parameters)
    if isinstance(made["KeyName"], dict):
        del made["KeyName"]
    if isinstance(made.get("Placement", {}).get("GroupName"), dict):
        del made["Placement"]
    made["NetworkInterfaces"] = [
        {key: value for key, value in nic.items() if key != "Groups" or not isinstance(value[0], dict)}
        for nic in made["NetworkInterfaces"]
    ]
    return Request(request.operation, made)


def _ask(aws: Aws, request: Request) -> tuple[str, str]:
    """Return the answer to a dry run, and AWS's own words where it is no."""
    try:
        aws.call(request.operation, {**request.parameters, "DryRun": True})
    except (Refused, CapacityError) as refusal:
        if not (isinstance(refusal, Refused) and refusal.code == "DryRunOperation"):
            return "denied" if refusal.kind == "permission" else "refused", refusal.why
    return "allowed", ""


def _check(operation: str, answer: str, why: str) -> Check:
    """Return the check of a call: "allowed", "denied", "refused", or "not asked" for lack of something."""
    return Check(
        name=f"permission {operation}",
        ok={"allowed": True, "not asked": None}.get(answer, False),
        value=f"{answer}: {why}" if why else answer,
        expected="allowed",
        hint="awsddp doctor --iam-policy   # prints what is needed" if answer == "denied" else "",
    )
