"""Read prices: on-demand prices from the Pricing API, spot prices from EC2's spot price history."""

import json
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from awsddp.aws.api_errors import AwsRefused, none_if_refused
from awsddp.aws.client import AwsClient, Shape

SpotHistory = dict[tuple[str, str], list[tuple[datetime, float]]]
"""A dict that maps a type and a zone to a list of (time, spot price); each price is valid from its time."""


def read_on_demand_prices(
    aws: AwsClient, names: Iterable[str], *, named: str | None = None
) -> dict[str, float]:
    """Return {type: on-demand price of one instance in US dollars per hour}, or {} if unknown.

    AWS does not document how ANY_OF takes several values. If the request with ANY_OF returns no price, only
    the price of the type `named` is requested.
    """
    prices = _products(aws, "ANY_OF", ",".join(sorted(names)))
    if prices == {} and named is not None:
        prices = _products(aws, "TERM_MATCH", named)
    return {name: price for name, price in (prices or {}).items() if price}


def _products(aws: AwsClient, how: str, types: str) -> dict[str, float] | None:
    """Return the Pricing API's prices. Returns None if the API does not respond, because awsddp also ships a
    price table.
    """
    fixed = {
        "regionCode": aws.region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
    }
    filters = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in fixed.items()]
    filters.append({"Type": how, "Field": "instanceType", "Value": types})
    request = {"ServiceCode": "AmazonEC2", "Filters": filters}
    try:
        texts = aws.paginate("GetProducts", request, "PriceList", service="pricing")
    except AwsRefused as refusal:
        return {} if refusal.code == "InvalidParameterException" else None
    usd_by_type: dict[str, float] = {}
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
            usd_by_type[attributes["instanceType"]] = max(prices, default=0.0)
    return usd_by_type


def read_spot_prices(aws: AwsClient, names: Iterable[str], *, days: int = 0) -> dict[str, dict[str, float]]:
    """Return {(type, zone): spot price of one instance}, or {} if AWS returns no price.

    The price is the current one, or, if `days` is set, the highest in the last `days` days.
    """
    by_type: dict[str, dict[str, float]] = defaultdict(dict)
    history = read_spot_history(aws, names, since=datetime.now(UTC) - timedelta(days=days))
    for (name, zone), prices in history.items():
        usd = [price for _, price in prices]
        by_type[name][zone] = max(usd) if days else usd[-1]
    return dict(by_type)


class _SpotPrice(Shape):
    instance_type: str
    availability_zone: str
    timestamp: datetime
    spot_price: float


def read_spot_history(aws: AwsClient, names: Iterable[str], *, since: datetime) -> SpotHistory:
    """Return these types' spot prices for one instance, or {} if AWS has no prices or `names` is empty.

    The first price of each type and zone is the one that was valid at `since`; its time may be before
    `since`:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html
    """
    if not (type_names := sorted(names)):
        return {}
    products = ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]
    parameters = {"InstanceTypes": type_names, "StartTime": since, "ProductDescriptions": products}
    history = none_if_refused(lambda: aws.read(_SpotPrice, "DescribeSpotPriceHistory", parameters)) or ()
    series: dict[tuple[str, str], dict[datetime, float]] = defaultdict(dict)
    for entry in sorted(history, key=lambda entry: entry.timestamp):
        series[entry.instance_type, entry.availability_zone][entry.timestamp] = entry.spot_price
    return {key: list(prices.items()) for key, prices in series.items()}
