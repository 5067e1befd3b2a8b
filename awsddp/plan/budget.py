"""How long a budget lasts, and the price that it assumes: a spot price may rise until the nodes end."""

from collections.abc import Iterable
from dataclasses import replace

from awsddp.compat.types import GPU_TYPES
from awsddp.errors import ConfigError
from awsddp.plan.records import Budget, Facts, Price, Rate
from awsddp.report import duration

LEAST_TERM_S = 300.0
"""The shortest time that a budget must last: booting and preparing the nodes takes most of it."""
_HIGHEST = "the highest spot price of the last 7 days"
_UNKNOWN = "the on-demand price: the spot prices of the last 7 days are unknown"


def spot_rate(price: Price, nodes: int, instance_type: str, zones: Iterable[str], facts: Facts) -> Rate:
    """Return what spot nodes in any of the zones cost at most: disks and addresses as in `price`."""
    highest, kind = facts.highest_spot_prices.get(instance_type, {}), GPU_TYPES.get(instance_type)
    each = facts.prices.get(instance_type, kind.price_usd_per_hour if kind else None)
    source, zones = _UNKNOWN, set(zones)
    if zones and zones <= highest.keys():
        each, source = max(highest[zone] for zone in zones), _HIGHEST
    machines = None if each is None else each * nodes
    return Rate(usd_per_hour=replace(price, machines=machines).total, source=source)


def lasts_s(budget: Budget) -> float:
    """Return the seconds that what is left of a budget lasts. Raises ConfigError where that is too short.

    A budget lasts for no time where no price is known.
    """
    if budget.usd_per_hour == 0:
        return float("inf")
    left_usd = max(0.0, budget.usd - budget.spent_usd)
    term_s = left_usd / budget.usd_per_hour * 3600 if budget.usd_per_hour is not None else 0.0
    if term_s < LEAST_TERM_S:
        raise ConfigError(
            f"cluster.budget_usd: ${budget.usd:,.2f} is spent, or does not last {duration(LEAST_TERM_S)}",
            f"the budget is {budget}",
            "a larger --budget, fewer --nodes, or another --instance-type",
        )
    return term_s
