"""How long awsddp waits for AWS."""

import pytest

from awsddp.aws.waits import deadline_s


@pytest.mark.parametrize(
    ("names", "minutes"),
    [
        (["g6.48xlarge"], 10),
        (["g5g.metal"], 30),
        (["p4d.24xlarge"], 30),
        (["g5.xlarge", "p5en.48xlarge"], 30),
        (["p3.2xlarge"], 10),
        ([], 10),
    ],
)
def test_large_and_bare_machines_have_half_an_hour_to_start_or_to_end(names: list[str], minutes: int) -> None:
    assert deadline_s(names) == 60 * minutes
