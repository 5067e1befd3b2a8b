"""Reads prices: on demand from the Pricing API where it answers, spot from the market's own history."""

import json
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from awsddp.aws.api_errors import Refused, unless_refused
from awsddp.aws.client import Aws, Shape

History = dict[tuple[str, str], list[tuple[datetime, float]]]
"""Spot prices and when each began, by type and zone."""


def on_demand(aws: Aws, names: Iterable[str], *, named: str | None = None) -> dict[str, float]:
    """Return the price of one machine of each type on demand, US dollars per hour; {} where unknown.

    How ANY_OF takes several values is in no page of AWS's: where it brings nothing, the `named` type is asked
    for alone.
    """
    found = _products(aws, "ANY_OF", ",".join(sorted(names)))
    if found == {} and named is not None:
        found = _products(aws, "TERM_MATCH", named)
    return {name: price for name, price in (found or {}).items() if price}


def _products(aws: Aws, how: str, types: str) -> dict[str, float] | None:
    """Return the prices that the Pricing API has; None where it does not answer: there is a table of them."""
    fixed = {
        "regionCode": aws.region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
    }
    filters = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in fixed.items()]
    filters.append({"Type": how, "Field": "instanceType", "Value": types})
    asked = {"ServiceCode": "AmazonEC2", "Filters": filters}
    try:
        texts = aws.pages("GetProducts", asked, "PriceList", service="pricing")
    except Refused as refusal:
        return {} if refusal.code == "InvalidParameterException" else None
    found: dict[str, float] = {}
    for text in texts:
        product = json.loads(text) if isinstance(text, str) else text
        attributes, terms = product["product"]["attributes"], product.get("terms", {}).get("OnDemand", {})
        prices = [
            float(dimension["pricePerUnit"].get("USD", 0.0))
            for term in terms.values()
            for dimension in term["priceDimensions"].values()
        ]
        metal = attributes["instanceType"].endswith(".metal")
        if attributes.get("tenancy") == ("Dedicated" if metal else "Shared"):
            found[attributes["instanceType"]] = max(prices, default=0.0)
    return found


def spot(aws: Aws, names: Iterable[str], *, days: int = 0) -> dict[str, dict[str, float]]:
    """Return the spot price of one machine, by type and zone; {} if AWS does not return it.

    That is the price now, or the highest of so many `days`.
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    history = spot_history(aws, names, since=datetime.now(UTC) - timedelta(days=days))
    for (name, zone), prices in history.items():
        usd = [price for _, price in prices]
        found[name][zone] = max(usd) if days else usd[-1]
    return dict(found)


class _SpotPrice(Shape):
    instance_type: str
    availability_zone: str
    timestamp: datetime
    spot_price: float


def spot_history(aws: Aws, names: Iterable[str], *, since: datetime) -> History:
    """Return the spot prices of one machine; {} if AWS has none, or no type is named.

    The first may have begun before `since`, when it was in force:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html
    """
    if not (asked := sorted(names)):
        return {}
    products = ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]
    parameters = {"InstanceTypes": asked, "StartTime": since, "ProductDescriptions": products}
    history = unless_refused(lambda: aws.read(_SpotPrice, "DescribeSpotPriceHistory", parameters)) or ()
    found: dict[tuple[str, str], dict[datetime, float]] = defaultdict(dict)
    for entry in sorted(history, key=lambda entry: entry.timestamp):
        found[entry.instance_type, entry.availability_zone][entry.timestamp] = entry.spot_price
    return {key: list(prices.items()) for key, prices in found.items()}
