"""plan: what `up` would do, or what could be had at all. Reads AWS, changes nothing."""

from dataclasses import asdict
from typing import Any

from awsddp import compat
from awsddp.cluster import Target
from awsddp.plan import Facts, LaunchPlan
from awsddp.plan import offers as offered
from awsddp.verbs.context import Context, aws_of, target_for
from awsddp.verbs.launching import plan_everywhere


def plan(ctx: Context) -> LaunchPlan:
    """Return the plan that `up` would carry out now.

    Raises ConfigError where the spec cannot be meant, CloudError where AWS does not answer or allow it.
    """
    with target_for(ctx) as target:
        return plan_everywhere(ctx, target, _facts(ctx, target))


def offers(ctx: Context) -> dict[str, Any]:
    """Return every type with GPUs to be had in the region: its price, and whether the quota allows it.

    Raises CloudError where AWS does not answer.
    """
    with target_for(ctx) as target:
        facts = _facts(ctx, target)
    found = offered(facts, ctx.spec.cluster.nodes)
    return {
        "region": facts.region,
        "target": facts.target,
        "nodes": ctx.spec.cluster.nodes,
        "price_date": facts.price_date if facts.prices else compat.PRICE_DATE,
        "offers": [
            {
                **asdict(choice),
                "gpu_memory_gb": compat.GPU_TYPES[choice.instance_type].memory_gb,
                "spot_usd_per_hour": min(
                    facts.spot_prices.get(choice.instance_type, {}).values(), default=None
                ),
            }
            for choice in found
        ],
    }


def _facts(ctx: Context, target: Target) -> Facts:
    from awsddp.aws.facts import gather

    return gather(aws_of(ctx, target), ctx.spec, caller_address=target.caller_address, target=target.name)
