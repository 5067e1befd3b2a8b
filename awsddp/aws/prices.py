"""Reads prices: on demand from the Pricing API where it answers, spot from the market's own history."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws

_BUDGET_SINCE = timedelta(days=7)
History = dict[tuple[str, str], list[tuple[datetime, float]]]
"""Spot prices and when each began, by type and zone."""


def on_demand(aws: Aws, names: Iterable[str]) -> dict[str, float]:
    """Return the price of one machine of each type on demand, US dollars per hour; {} where unknown."""
    fixed = {
        "regionCode": aws.region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
    }
    filters = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in fixed.items()]
    filters.append({"Type": "ANY_OF", "Field": "instanceType", "Value": ",".join(sorted(names))})
    try:
        asked = {"ServiceCode": "AmazonEC2", "Filters": filters}
        products = aws.pages("GetProducts", asked, "PriceList", service="pricing")
    except Refused:
        return {}  # the table that ships is used instead
    found: dict[str, float] = {}
    for text in products:
        product = json.loads(text) if isinstance(text, str) else text
        attributes = product["product"]["attributes"]
        metal = attributes["instanceType"].endswith(".metal")
        if attributes.get("tenancy") == ("Dedicated" if metal else "Shared"):
            found[attributes["instanceType"]] = max(_hourly(product), default=0.0)
    return {name: price for name, price in found.items() if price}


def _hourly(product: dict[str, Any]) -> list[float]:
    terms = product.get("terms", {}).get("OnDemand", {}).values()
    return [
        float(dimension["pricePerUnit"]["USD"])
        for term in terms
        for dimension in term["priceDimensions"].values()
        if "USD" in dimension["pricePerUnit"]
    ]


def spot(aws: Aws, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the spot price of one machine now, by type and zone; {} if AWS does not return it."""
    return _by_type(spot_history(aws, names, since=datetime.now(UTC)), lambda prices: prices[-1])


def highest_spot(aws: Aws, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the highest spot price of one machine in the last 7 days, by type and zone; {} if unknown."""
    return _by_type(spot_history(aws, names, since=datetime.now(UTC) - _BUDGET_SINCE), max)


def _by_type(history: History, pick: Callable[[list[float]], float]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, zone), prices in history.items():
        found[name][zone] = pick([price for _, price in prices])
    return dict(found)


def spot_history(aws: Aws, names: Iterable[str], *, since: datetime) -> History:
    """Return the spot prices of one machine; {} if AWS has none, or no type is named.

    The first may have begun before `since`, when it was in force:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html
    """
    parameters: dict[str, Any] = {
        "InstanceTypes": sorted(names),
        "StartTime": since,
        "ProductDescriptions": ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
    }
    if not parameters["InstanceTypes"]:
        return {}
    try:
        history = aws.pages("DescribeSpotPriceHistory", parameters)
    except Refused:
        return {}
    found: dict[tuple[str, str], dict[datetime, float]] = defaultdict(dict)
    for entry in sorted(history, key=lambda entry: entry["Timestamp"]):
        price = float(entry["SpotPrice"])
        found[entry["InstanceType"], entry["AvailabilityZone"]][entry["Timestamp"]] = price
    return {key: list(prices.items()) for key, prices in found.items()}
