"""`plan` of an existing cluster, and what it refuses."""

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
    before = laptop.launch_two_nodes()
    larger = plan(laptop.context(cluster__nodes=3))
    assert [str(step) for step in larger.steps] == ["launch node2"]
    assert [
        request.parameters["MinCount"] for request in larger.requests if "MinCount" in request.parameters
    ] == [1]
    assert larger.nodes == 3
    same = plan(laptop.context())
    assert (same.steps, same.requests) == ((), ())
    assert laptop.cluster == before


def test_the_plan_of_an_existing_cluster_has_steps_only_if_something_changes(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    unchanged = plan(laptop.context())
    assert (unchanged.exists, unchanged.steps, unchanged.makes) == (True, (), [])
    larger = plan(laptop.context(cluster__nodes=3))
    assert (larger.exists, [str(step) for step in larger.steps]) == (True, ["launch node2"])


def test_plan_and_up_refuse_another_torch_than_the_images_except_in_a_rehearsal(
    on: On, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "needs.txt"
    file.write_text("torch==2.3.1\n")
    keys: dict[str, Any] = {"cluster__instance_type": "g5.xlarge", "network__ssh_cidr": "10.0.0.7"}
    keys["env__file"], laptop = str(file), on("laptop")
    plan(laptop.context(**keys))
    monkeypatch.setattr(Image, "pretends", False)
    for verb in (plan, lambda cluster: up(cluster, confirm=lambda _: None)):
        with pytest.raises(ConfigError, match=r"torch==2\.3\.1 needs another torch than the image's 2\.12"):
            verb(laptop.context(**keys))
    assert cloud.requests_of("RunInstances") == []
