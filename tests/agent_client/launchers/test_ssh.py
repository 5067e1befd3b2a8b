"""The launcher that starts each rank itself."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def test_a_shell_script_runs_in_its_shell(fleet: "Fleet", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fleet.workdirs[0])
    fleet.write(
        "train.sh", "[[ -n $BASH_VERSION ]] && echo rank $RANK of $WORLD_SIZE $1 $(command -v python)\n"
    )
    job = fleet.run("train.sh", args=("a b",))
    assert job.state == "succeeded", job.cause
    assert fleet.log(1) == f"rank 1 of 4 a b {Path(sys.executable).parent}/python\n".encode()


def test_sources_of_a_project_come_after_the_users_pythonpath(fleet: "Fleet") -> None:
    fleet.hosts = [replace(host, sources=("src",)) for host in fleet.hosts]
    for variables, paths in (({}, "{}/src"), ({"PYTHONPATH": "vendor"}, "vendor:{}/src")):
        environ = fleet.requests("main.py", variables=variables)[1].processes[0].environment
        assert environ["PYTHONPATH"] == paths.format(fleet.workdirs[1])


PRINT_TRACKERS = """
import os
names = ("AWSDDP_RUN_ID", "WANDB_RUN_ID", "WANDB_RESUME")
print(*(os.environ.get(name, "-") for name in names))
"""


@pytest.mark.parametrize("settings", [{"resume": "last"}, {"recover": 1}])
def test_rank_0_of_a_job_that_goes_on_continues_its_run_at_wandb(
    fleet: "Fleet", settings: dict[str, object]
) -> None:
    job = fleet.run(PRINT_TRACKERS, **settings)
    expected = [f"{job.run_id} {job.run_id} allow\n", *[f"{job.run_id} - -\n"] * 3]
    assert [fleet.log(rank).decode() for rank in range(4)] == expected


def test_the_users_own_run_at_wandb_stays(fleet: "Fleet") -> None:
    request = fleet.requests(PRINT_TRACKERS, resume="last", variables={"WANDB_RUN_ID": "mine"})[0]
    assert request.processes[0].environment["WANDB_RUN_ID"] == "mine"
    assert fleet.requests(PRINT_TRACKERS)[0].processes[0].defaults == {}, "a new job"
    fleet.environment = {"WANDB_RESUME": "must"}  # of the node
    fleet.run(PRINT_TRACKERS, resume="last", variables={"WANDB_RUN_ID": "mine"})
    assert fleet.log(0).decode().split()[1:] == ["mine", "must"]
