"""The document of a plan."""

import pytest

from awsddp.plan.records import plan_to_document
from tests.support.plan_facts import plan


def test_the_document_has_the_price_by_part_and_the_reason() -> None:
    made = plan_to_document(plan(instance_type="g6.48xlarge", expires="10h"))
    parts = made["price_parts"]
    assert made["price_usd_per_hour"] == pytest.approx(sum(parts.values()), abs=1e-4)
    assert made["price_until_expiry_usd"] == pytest.approx(made["price_usd_per_hour"] * 10, abs=0.01)
    assert (made["why"], made["market"]) == ("requested", "on-demand")
    assert made["efa"] == {"count": 0, "most": 1, "why": "capacity.efa asks for it"}
    assert (made["memory_gb"], made["network_gbit"], made["vcpus"]) == (768, "100", 192)
    assert (made["image"]["torch"], made["image"]["cuda"], made["image"]["driver"]) == ("2.12", "13.0", 595)
    assert made["quota"] == "384 of 768 vCPUs (Running On-Demand G and VT instances, L-DB2E81BA)"
