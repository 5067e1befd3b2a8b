"""plan: what `up` would do, or the instance types on offer. Reads AWS, changes nothing."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from awsddp.compat.types import GPU_TYPES, PRICE_DATE
from awsddp.plan.records import LaunchPlan
from awsddp.plan.selection import offers as offered
from awsddp.spec import settings
from awsddp.verbs.context import Context, aws_of, facts_of, target_for
from awsddp.verbs.converging import changes, plan_of
from awsddp.verbs.launching import plan_everywhere
from awsddp.verbs.up import as_before, read, to_reconcile


def plan(ctx: Context) -> LaunchPlan:
    """Return the plan that `up` would carry out now; for a cluster that exists, with the steps to it.

    Raises ConfigError for an invalid spec or environment, CloudError where AWS does not answer or refuses.
    """
    with target_for(ctx) as target:
        facts, cluster = read(ctx, target)
        if not to_reconcile(cluster):
            return plan_everywhere(cluster, facts)
        now = datetime.now(UTC).replace(microsecond=0)
        return plan_of(cluster, changes(cluster, facts, now=now))


def settings_of(ctx: Context) -> list[tuple[str, Any, str]]:
    """Return each setting that has a value, the value, and where it comes from. Sends no requests."""
    before = as_before(ctx)
    return settings(before.spec, before.job)


def offers(ctx: Context) -> dict[str, Any]:
    """Return every instance type with GPUs that the region offers, its price, and if the quota allows it.

    Raises CloudError where AWS does not answer.
    """
    with target_for(ctx) as target:
        facts = facts_of(aws_of(ctx, target), ctx.spec, target)
    found = offered(facts, ctx.spec.cluster.nodes)
    return {
        "region": facts.region,
        "target": facts.target,
        "nodes": ctx.spec.cluster.nodes,
        "price_date": facts.price_date if facts.prices else PRICE_DATE,
        "offers": [
            {
                **asdict(choice),
                "gpu_memory_gb": GPU_TYPES[choice.instance_type].memory_gb,
                "spot_usd_per_hour": min(
                    facts.spot_prices.get(choice.instance_type, {}).values(), default=None
                ),
            }
            for choice in found
        ],
    }
