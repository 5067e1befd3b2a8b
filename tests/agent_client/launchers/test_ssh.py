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
