"""Prices: on demand from AWS's own list, spot from the market's history."""

from datetime import UTC, datetime
from typing import Any

import pytest

from awsddp.aws.client import AwsClient
from tests.support.moto_cloud import Cloud, plan_for


def test_prices_are_aws_own_where_it_tells_them(aws: AwsClient, cloud: Cloud) -> None:
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
    call, asked = aws.call, []

    def noted(operation: str, parameters: dict[str, Any], **where: Any) -> dict[str, Any]:
        if operation == "DescribeSpotPriceHistory":
            asked.append((parameters["InstanceTypes"], datetime.now(UTC) - parameters["StartTime"]))
        return call(operation, parameters, **where)

    monkeypatch.setattr(aws, "call", noted)
    plan_for(aws, budget_usd=100.0, instance_type="g6.48xlarge")
    assert asked == []
    plan_for(aws, spot=True, instance_type="g6.48xlarge")
    assert len(asked) == 1
    plan = plan_for(aws, spot=True, budget_usd=100.0, instance_type="g6.48xlarge")
    _, (week, since) = sorted(asked[1:], key=lambda one: one[1])
    assert (week, since.days) == (["g6.48xlarge"], 7)
    assert plan.budget is not None
    assert plan.budget.usd_per_hour == pytest.approx(plan.price_usd_per_hour)
