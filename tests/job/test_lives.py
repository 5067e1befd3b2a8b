"""The jobs of a run, the checkpoint from which it goes on, and how many steps it repeats."""

import json
from pathlib import Path
from typing import Any

import pytest

from awsddp.job.checkpoint import find_run_id
from awsddp.job.lives import (
    describe_recovery,
    find_checkpoint_of_run,
    list_lives,
    make_next_session,
    with_job_settings,
)
from awsddp.job.registry import JobView
from awsddp.model.records import JobNode, JobRecord, RankResult, Recovery
from tests.support.folder_nodes import World

RANKS = tuple(RankResult(rank=rank, local_rank=0, node=rank, exit_code=1, seconds=9.0) for rank in (0, 1))
NODES = (JobNode(node=0, instance_id="i-0"), JobNode(node=1, instance_id="i-1"))


def make_job(name: str = "w-1", **fields: Any) -> JobRecord:
    values: dict[str, Any] = {
        "state": "failed",
        "cause": None,
        "ranks": RANKS,
        "nodes": NODES,
        "world_size": 2,
    }
    values |= {"home": f"runs/{name}", "run_id": "a1", "script": "w.py", **fields}
    return JobRecord(job=name, **values)


def make_view(world: World, job: JobRecord, steps: dict[int, float], files: dict[str, float]) -> JobView:
    """Return a fetched job with these steps in its metrics, by time, and these files of rank 0, by time."""
    import os

    run = world.project / "runs" / job.job / "node0" / "run"
    run.mkdir(parents=True)
    rows = [json.dumps({"step": step, "time": time}) for step, time in steps.items()]
    (run / "metrics.jsonl").write_text("\n".join([*rows, ""]))
    for name, time in files.items():
        (run / name).write_bytes(b"optim")
        os.utime(run / name, (time, time))
    return JobView(job=job, folder=run.parent.parent, history=None, launched="")


@pytest.mark.parametrize(
    ("files", "checkpoint", "repeated"),
    [
        ({"state-40.pt": 1000.0, "step-20.pt": 900.0}, "state-40.pt", 3),
        ({"latest.pt": 1000.5}, "latest.pt", 3),
        ({"checkpoint-41.pt": 1001.0}, "checkpoint-41.pt", 2),
        ({}, None, 43),
    ],
)
def test_a_run_repeats_the_steps_after_its_checkpoint(
    world: World, files: dict[str, float], checkpoint: str | None, repeated: int
) -> None:
    view = make_view(world, make_job(), {40: 1000.0, 41: 1001.0, 43: 1003.0}, files)
    found = find_checkpoint_of_run(world.session(), [view])
    assert (found and found.name) == checkpoint
    assert describe_recovery(view, found, [view]).steps_repeated == repeated


def test_a_run_goes_on_from_an_earlier_job_if_the_last_one_saved_nothing(world: World) -> None:
    first = make_view(world, make_job(), {4: 3.9, 5: 5.0}, {"state-4.pt": 4.0})
    last = make_view(world, make_job("w-1.2"), {6: 9.0}, {})
    found = find_checkpoint_of_run(world.session(), [first, last])
    assert found is not None and found.job == "w-1"
    assert describe_recovery(last, found, [first, last]).steps_repeated == 2


def test_a_sharded_checkpoint_without_the_files_of_a_lost_node_is_left_out(world: World) -> None:
    view = make_view(world, make_job(), {5: 5.0}, {})
    for step, shards in ((1, ("__0_0.distcp", "__1_0.distcp")), (2, ("__0_0.distcp",))):
        folder = view.folder / "node0" / "run" / f"step-{step}"
        folder.mkdir()
        (folder / ".metadata").write_bytes(b"optim __0_0.distcp __1_0.distcp")
        for name in shards:
            (folder / name).write_bytes(b"x")
    found = find_checkpoint_of_run(world.session(), [view])
    assert found is not None and found.name == "step-1"


def test_the_jobs_of_a_run_are_in_order_and_other_jobs_are_left_out(world: World) -> None:
    first = make_job()
    second = make_job("w-1.2", recoveries=(Recovery(job="w-1", kind="xid"),))
    resumed_by_hand = make_job("other")
    world.folder.save_jobs(second, resumed_by_hand, first)
    assert [view.job.job for view in list_lives(world.session(), second)] == ["w-1", "w-1.2"]


def test_a_job_of_an_older_awsddp_and_the_job_that_continues_it_are_one_run(world: World) -> None:
    first = make_job(run_id=None)
    second = make_job("w-1.2", run_id=find_run_id(first), recoveries=(Recovery(job="w-1", kind="xid"),))
    world.folder.save_jobs(second, first, make_job("other", run_id=None))
    for job in (first, second):
        assert [view.job.job for view in list_lives(world.session(), job)] == ["w-1", "w-1.2"]


def test_the_next_job_has_a_free_name_the_settings_and_the_checkpoint_argument(world: World) -> None:
    (world.project / "w.py").write_text("parser.add_argument('--resume')\n")
    job = make_job(args=("--lr", "1"), options=("-o", "job.timeout=1h", "-o", "job.recover=2"))
    (world.project / "runs" / "w-1.2").mkdir(parents=True)
    session = with_job_settings(world.session(), job)
    section = make_next_session(session, job, {"w-1.3"}, nodes=2, resumed="w-1").job_spec.job
    assert (section.name, section.timeout, section.recover) == ("w-1.4", "1h", 2)
    assert section.args == ("--lr", "1", "--resume", "{resume}")
    fewer = make_next_session(session, job, set(), nodes=1, resumed=None).job_spec.job
    assert (fewer.world_size, fewer.nproc_per_node, fewer.args) == (None, 1, ("--lr", "1"))
    recoveries = (Recovery(job="w-1", kind="xid"),)
    later = make_job("w-1.2", args=section.args, recoveries=recoveries)
    for resumed, args in (("w-1", section.args), (None, ("--lr", "1"))):
        third = make_next_session(session, later, set(), nodes=2, resumed=resumed)
        assert third.job_spec.job.args == args


def test_the_values_of_variables_are_read_from_the_environment(world: World) -> None:
    job = make_job(options=("--env-var", "WIDTH"))
    assert with_job_settings(world.session(), job).job_spec.env.secrets == ("WIDTH",)


def test_the_path_of_a_checkpoint_is_relative_to_the_project(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.project)
    view = make_view(world, make_job(), {5: 5.0}, {"state-4.pt": 4.0})
    recovery = describe_recovery(view, find_checkpoint_of_run(world.session(), [view]), [view])
    assert recovery.checkpoint == str(Path("runs/w-1/node0/run/state-4.pt"))
