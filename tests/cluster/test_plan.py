"""`plan` over a cluster that exists, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from awsddp.cluster.plan import plan
from awsddp.cluster.up import up
from awsddp.errors import ConfigError
from awsddp.plan.records import Image
from tests.support.machine import On
from tests.support.moto_cloud import Cloud


def test_the_plan_of_a_cluster_that_exists_shows_the_steps_and_changes_nothing(on: On) -> None:
    laptop = on("laptop")
    before = laptop.first()
    made = plan(laptop.context(cluster__nodes=3))
    assert [str(step) for step in made.steps] == ["launch node2"]
    assert [
        request.parameters["MinCount"] for request in made.requests if "MinCount" in request.parameters
    ] == [1]
    assert made.nodes == 3
    same = plan(laptop.context())
    assert (same.steps, same.requests) == ((), ())
    assert laptop.cluster == before


def test_a_plan_over_a_living_cluster_says_what_would_change_or_nothing(on: On) -> None:
    laptop = on("laptop")
    laptop.first()
    unchanged = plan(laptop.context())
    assert (unchanged.exists, unchanged.steps, unchanged.makes) == (True, (), [])
    larger = plan(laptop.context(cluster__nodes=3))
    assert (larger.exists, [str(step) for step in larger.steps]) == (True, ["launch node2"])


def test_another_torch_than_the_images_is_refused_at_the_plan_and_a_rehearsal_has_its_own(
    on: On, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "needs.txt"
    file.write_text("torch==2.3.1\n")
    asked: dict[str, Any] = {"cluster__instance_type": "g5.xlarge", "network__ssh_cidr": "10.0.0.7"}
    asked["env__file"], laptop = str(file), on("laptop")
    plan(laptop.context(**asked))
    monkeypatch.setattr(Image, "pretends", False)
    for verb in (plan, lambda cluster: up(cluster, confirm=lambda _: None)):
        with pytest.raises(ConfigError, match=r"torch==2\.3\.1 needs another torch than the image's 2\.12"):
            verb(laptop.context(**asked))
    assert cloud.sent("RunInstances") == []
