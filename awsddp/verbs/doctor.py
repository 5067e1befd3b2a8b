"""doctor: check credentials, quota and permissions before a launch."""

import secrets as random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from awsddp.compat.types import quota_of
from awsddp.errors import AwsddpError, ConfigError
from awsddp.nodes import rsync
from awsddp.plan.records import names
from awsddp.plan.requests import Values
from awsddp.records import Check
from awsddp.verbs.context import Context, aws_of, facts_of, jump_of, target_for
from awsddp.verbs.health import checks_document


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
    """Return values for what a launch would make, for calls that change nothing."""
    from awsddp.nodes.hostkeys import make_key

    ids = names(ctx.spec.name, random.token_hex(4))
    secrets = {"public_key": make_key("awsddp dry run").public, "user_data": "#cloud-config\n{}\n"}
    return Values(ids=ids, secrets=secrets, now=datetime.now(UTC))


def _document(ctx: Context, checks: Sequence[Check]) -> dict[str, Any]:
    """Return the document of the checks, and of those of this machine's programs and of a jump host."""
    found = [_tried("rsync and ssh", rsync.program), *checks]
    if (jump := jump_of(ctx)) is not None:
        found.append(_tried("jump host", jump.reach, jump.name))
    return checks_document(ctx, found)


def _tried(name: str, attempt: Callable[[], object], value: str = "") -> Check:
    """Return the check of what `attempt` returns; `value` is shown instead."""
    from awsddp.aws.preflight import failed

    try:
        found = attempt()
    except AwsddpError as error:
        return failed(name, error)
    return Check(name=name, ok=True, value=value or str(found))


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
        quota = quota_of(plan.instance_type, plan.market)
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
