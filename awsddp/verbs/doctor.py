"""doctor: check credentials, quota and permissions before a launch."""

import secrets as random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from awsddp import compat
from awsddp.cluster import Check
from awsddp.errors import AwsddpError, ConfigError
from awsddp.nodes import rsync
from awsddp.plan import Values, names
from awsddp.plan.policy import least_policy
from awsddp.verbs.context import Context, aws_of, facts_of, jump_of, reach_jump, target_for


def doctor(ctx: Context) -> dict[str, Any]:
    """Return the `doctor` document of what can be checked before a launch. Changes nothing.

    A check that fails hides no other. Raises ConfigError where the cluster's name is taken elsewhere.
    """
    from awsddp.aws.preflight import OF_REGION, before_launch, failed, not_checked

    with target_for(ctx) as target:
        try:
            aws = aws_of(ctx, target)
        except ConfigError as error:
            return _document(ctx, (failed("region", error), *not_checked("region", *OF_REGION)))
        checks = before_launch(aws, ctx.spec, _stand_ins(ctx), facts=lambda: facts_of(aws, ctx.spec, target))
    return _document(ctx, checks)


def _stand_ins(ctx: Context) -> Values:
    """Return values for what a launch would make."""
    ids = names(ctx.spec.name, random.token_hex(4))
    return Values(ids=ids, secrets=stand_ins(), now=datetime.now(UTC))


def _document(ctx: Context, checks: Sequence[Check]) -> dict[str, Any]:
    return {"checks": [asdict(check) for check in (_programs(), *checks, *_jump(ctx))]}


def _programs() -> Check:
    """Return the check of the programs on this machine that `up` and `train` start."""
    from awsddp.aws.preflight import failed

    try:
        return Check(name="rsync and ssh", ok=True, value=rsync.program())
    except ConfigError as error:
        return failed("rsync and ssh", error)


def _jump(ctx: Context) -> list[Check]:
    """Return the check of the jump host, if there is one, by connecting to it."""
    from awsddp.aws.preflight import failed

    jump = jump_of(ctx)
    if jump is None:
        return []
    try:
        reach_jump(ctx)
    except AwsddpError as error:
        return [failed("jump host", error)]
    return [Check(name="jump host", ok=True, value=jump.name)]


def dry_run(ctx: Context) -> dict[str, Any]:
    """Return the permissions that `up` needs, each checked by a dry-run call to AWS.

    Raises ConfigError or CloudError where no plan can be made.
    """
    from awsddp.aws.permissions import dry_run as ask
    from awsddp.plan import make_plan

    with target_for(ctx) as target:
        aws = aws_of(ctx, target)
        plan = make_plan(ctx.spec, facts_of(aws, ctx.spec, target))
        told = ask(aws, plan, _stand_ins(ctx))
    return {"cluster": ctx.spec.name, "region": aws.region, "permissions": [asdict(one) for one in told]}


def iam_policy_of(ctx: Context) -> dict[str, Any]:
    """Return the least IAM policy that allows every verb for this configuration. Sends no requests."""
    return least_policy(ctx.spec)


def request_quota(ctx: Context, *, confirm: Callable[[str], None]) -> dict[str, Any]:
    """Request the vCPU quota that the configuration needs, if it is too small.

    `confirm` is called with the request and raises to refuse. Raises CloudError where AWS refuses,
    ConfigError where no plan can be made or the quota is unknown.
    """
    from awsddp.plan import make_plan

    with target_for(ctx) as target:
        aws = aws_of(ctx, target)
        facts = facts_of(aws, ctx.spec, target)
        plan = make_plan(ctx.spec, replace(facts, quotas={}))  # as it would be with enough of it
        quota = compat.quota_of(plan.instance_type, plan.market)
        if quota is None:
            raise ConfigError(
                f"unknown quota for {plan.market} {plan.kind.family}",
                "",
                "see https://console.aws.amazon.com/servicequotas/",
            )
        need, have = plan.nodes * plan.kind.vcpus, facts.quotas.get(quota[0])
        told = {"quota": quota[0], "name": quota[1], "region": aws.region, "need": need, "have": have}
        if have is not None and have >= need:
            return {**told, "request": None}
        known = "an unreadable number of" if have is None else f"{have:g}"
        confirm(
            f"{plan.nodes} x {plan.instance_type} need {need} vCPUs, and {quota[1]} ({quota[0]}) allows "
            f"{known} in {aws.region}. Ask AWS for {need}?"
        )
        asked = {"ServiceCode": "ec2", "QuotaCode": quota[0], "DesiredValue": float(need)}
        reply = aws.call("RequestServiceQuotaIncrease", asked, service="service-quotas")
        return {**told, "request": reply.get("RequestedQuota", {}).get("Id")}


def stand_ins() -> dict[str, str]:
    """Return placeholders for the secrets of a launch, for calls that change nothing."""
    from awsddp.nodes.hostkeys import make_key

    return {"public_key": make_key("awsddp dry run").public, "user_data": "#cloud-config\n{}\n"}
