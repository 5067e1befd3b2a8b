"""Instance types with GPUs."""

import pytest

from awsddp.compat.releases import find_architecture
from awsddp.compat.types import GPU_TYPES, RETIRED, Market, find_quota
from tests.support.gpus import gpu


def test_a_part_of_a_gpu_is_shown_as_a_fraction_and_priced_by_its_own_date() -> None:
    eighth, half, whole = (GPU_TYPES[name] for name in ("g6f.xlarge", "gr6f.4xlarge", "g6.xlarge"))
    assert [kind.gpu_shown for kind in (eighth, half, whole)] == ["1/8 L4", "1/2 L4", "L4"]
    assert (eighth.gpus, eighth.memory_gb, eighth.price_date) == (1, 2.8, "2026-02-09")


def test_every_type_has_a_gpu_that_the_table_knows() -> None:
    for kind in GPU_TYPES.values():
        assert find_architecture(kind.gpu), kind.name
        assert gpu(kind.gpu).capability == kind.capability
        assert kind.cards >= kind.efa
    for retired in RETIRED.values():
        assert find_architecture(retired.gpu), retired.name


OTHERS = ("inf2", "trn1", "x2idn", "u-6tb1", "u7i-12tb", "dl1", "f2", "hpc7a", "mac2")


@pytest.mark.parametrize(
    ("type_", "market", "code"),
    [
        ("p5.48xlarge", "on-demand", "L-417A185B"),
        ("g6.48xlarge", "on-demand", "L-DB2E81BA"),
        ("t3.micro", "on-demand", "L-1216C47A"),
        ("m7i.large", "spot", "L-34B43A08"),
        ("im4gn.large", "on-demand", "L-1216C47A"),
        ("d3.xlarge", "on-demand", "L-1216C47A"),
        *((f"{family}.xlarge", "on-demand", None) for family in OTHERS),
        *((f"{family}.xlarge", "spot", None) for family in OTHERS),
        ("p5.48xlarge", "spot", "L-C4BD4855"),
        ("p4d.24xlarge", "spot", "L-7212CCBC"),
        ("g6.48xlarge", "spot", "L-3819A6DF"),
        ("p6-b200.48xlarge", "spot", None),
        ("p5.48xlarge", "capacity-block", None),
    ],
)
def test_the_quota_that_a_type_counts_against(type_: str, market: Market, code: str | None) -> None:
    quota = find_quota(type_, market)
    assert (quota[0] if quota else None) == code
