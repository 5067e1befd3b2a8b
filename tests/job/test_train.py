"""Jobs on parts of a cluster, and their ranks."""

import json
from dataclasses import replace

import pytest

from awsddp.errors import InUse, UsageError
from awsddp.job import submit
from awsddp.job import train as train_module
from awsddp.job.cancel import end_ranks
from awsddp.session.connect import list_jobs_on_nodes
from tests.support.folder_nodes import World

SLEEPS = "import os, time; print('up', os.getcwd(), flush=True); time.sleep(600)\n"


def set_gpus(world: World, gpus: int) -> None:
    world.folder.write(
        replace(world.record, prepared=tuple(replace(node, gpus=gpus) for node in world.record.prepared))
    )


def start(world: World, name: str, on: str | None, **job: object) -> list[dict[int, list[str]]]:
    """Start a job, and return the requests of each round trip."""
    (world.project / "w.py").write_text(SLEEPS)
    line = world.open_connections()
    connected = world.connected(world.session(script="w.py", name=name, on=on, **job), line)
    submit.submit_job(connected, train_module._place_ranks(connected.cluster), None)  # type: ignore[arg-type]
    return line.requests  # type: ignore[no-any-return]


def test_a_job_that_does_not_use_the_first_node_releases_its_claim_there(world: World) -> None:
    """Otherwise no job could start on the first node while `train` follows this one."""
    requests = start(world, "a", "1")
    assert requests[-2:] == [{1: ["launch"]}, {0: ["unclaim"]}]
    assert start(world, "b", "0")[-1] == {0: ["launch"]}
    for name in ("a", "b"):
        end_ranks(world.connected(), name, grace_s=0)


@pytest.mark.prove
def test_jobs_on_other_nodes_and_gpus_run_at_the_same_time(world: World) -> None:
    set_gpus(world, 4)
    start(world, "a", "0:0-1")
    start(world, "b", "0:2-3")
    start(world, "c", "1")
    for on in ("0", "0:1-2", "1:0", None):
        with pytest.raises(InUse, match=r"job [abc] runs on node"):
            start(world, "d", on)
    jobs = {job.job: job for job in list_jobs_on_nodes(world.connected())}
    assert {name: job.state for name, job in jobs.items()} == dict.fromkeys("abc", "running")
    assert {name: {rank.node for rank in job.ranks} for name, job in jobs.items()} == {
        "a": {0},
        "b": {0},
        "c": {1},
    }
    workdirs = {world.homes.folder(node, job).joinpath("job.json") for node, job in ((0, "a"), (0, "b"))}
    assert len({path.read_text().partition('"workdir": "')[2].partition('"')[0] for path in workdirs}) == 2
    for name in jobs:
        end_ranks(world.connected(), name, grace_s=0)


def test_a_job_on_some_gpus_of_a_node_sees_only_these(world: World) -> None:
    set_gpus(world, 4)
    start(world, "j", "1:2-3", args=["{rank}"])
    request = json.loads((world.homes.folder(1, "j") / "job.json").read_text())
    assert request["layout"] == [[0, 0, 1], [1, 1, 1]]
    assert request["workdir"].endswith("/awsddp/work-1_2-3")
    first, second = request["processes"]
    assert (first["argv"][1:], second["argv"][1:]) == (["w.py", "0"], ["w.py", "1"])
    chosen = {name: first["environment"][name] for name in ("CUDA_VISIBLE_DEVICES", "RANK")}
    assert chosen == {"CUDA_VISIBLE_DEVICES": "2,3", "RANK": "0"}
    end_ranks(world.connected(), "j", grace_s=0)


def test_gpus_and_nodes_that_do_not_exist_are_refused(world: World) -> None:
    set_gpus(world, 4)
    for on, why in (("2", "no node2"), ("0:2-4", "no GPU 4")):
        with pytest.raises(UsageError, match=why):
            train_module._place_ranks(world.located(world.session(script="w.py", on=on)))
