"""The checks of a cluster from what its nodes measure."""

from collections.abc import Sequence
from typing import Any

import pytest

from awsddp.verbs import health
from tests.jobs.test_health import probes


def test_a_node_that_answers_only_the_second_measurement_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    again = {2: 11.0, 3: 90.0}
    measured = iter([{0: 100.0, 1: 110.0, 2: 10.0}, *[again] * health.RETRIES])
    monkeypatch.setattr(health, "_measured", lambda *_: next(measured))
    cluster: Any = None
    nodes: Sequence[int] = [3, 0, 1, 2]
    checks = health._rates(cluster, probes(4), nodes)
    assert [(check.node, check.ok) for check in checks] == [(2, False), (None, True)]
