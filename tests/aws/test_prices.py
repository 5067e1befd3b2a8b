"""Prices: on demand from AWS's own list, spot from the market's history."""

from datetime import UTC, datetime
from typing import Any

import pytest

from awsddp.aws.client import AwsClient
from tests.support.moto_cloud import Cloud, plan_for


def test_on_demand_prices_are_those_of_the_pricing_api(aws: AwsClient, cloud: Cloud) -> None:
    cloud.prices = {"g6.48xlarge": 11.5, "g5.48xlarge": 10.25}
    plan = plan_for(aws)
    assert plan.instance_type == "g5.48xlarge"
    assert plan.price.machines == pytest.approx(2 * 10.25)
    assert plan.price.source == "AWS Pricing API"


def test_spot_prices_are_those_of_the_zones(aws: AwsClient, cloud: Cloud) -> None:
    plan = plan_for(aws, spot=True, instance_type="g6.48xlarge")
    assert plan.market == "spot"
    assert plan.price.machines == pytest.approx(2 * 0.00001)
    assert plan.price.source.startswith("spot market")


def test_only_a_budget_on_spot_reads_the_prices_of_the_last_7_days(
    aws: AwsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, requests = aws.call, []

    def record(operation: str, parameters: dict[str, Any], **options: Any) -> dict[str, Any]:
        if operation == "DescribeSpotPriceHistory":
            requests.append((parameters["InstanceTypes"], datetime.now(UTC) - parameters["StartTime"]))
        return call(operation, parameters, **options)

    monkeypatch.setattr(aws, "call", record)
    plan_for(aws, budget_usd=100.0, instance_type="g6.48xlarge")
    assert requests == []
    plan_for(aws, spot=True, instance_type="g6.48xlarge")
    assert len(requests) == 1
    plan = plan_for(aws, spot=True, budget_usd=100.0, instance_type="g6.48xlarge")
    _, (types, age) = sorted(requests[1:], key=lambda request: request[1])
    assert (types, age.days) == (["g6.48xlarge"], 7)
    assert plan.budget is not None
    assert plan.budget.usd_per_hour == pytest.approx(plan.price_usd_per_hour)
