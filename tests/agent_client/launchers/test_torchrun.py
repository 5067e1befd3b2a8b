"""The launcher that starts torch's elastic agent on each node."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.elastic import SECONDS

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_ranks_get_the_variables_of_torchrun(fleet: "Fleet") -> None:
    fleet.launch(
        "import os, sys\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE GROUP_RANK MASTER_ADDR TORCHELASTIC_RESTART_COUNT'.split()\n"
        "print(*[os.environ[name] for name in names], *sys.argv[1:])\n",
        launcher="torchrun",
        args=("{rank}/{world_size}", "{{}}", "a b"),
    )
    job = fleet.wait(seconds=SECONDS)
    log = (fleet.folder(0) / "logs" / "launcher0.log").read_text()
    assert (job.state, [rank.exit_code for rank in job.ranks]) == ("succeeded", [0, 0, 0, 0]), (job, log)
    first = fleet.hosts[0].node.private_ip
    logs = [fleet.log(rank).decode() for rank in range(4)]
    assert logs == [f"{n} {n % 2} 4 {n // 2} {first} 0 {n}/4 {{}} a b\n" for n in range(4)]
    assert fleet.processes() == []


def test_the_worker_that_torch_makes_rank_0_continues_the_run_at_wandb(
    fleet: "Fleet", tmp_path: Path
) -> None:
    script = "import os; print(os.environ.get('WANDB_RUN_ID'), os.environ.get('WANDB_RESUME'))\n"
    request = fleet.requests(script, launcher="torchrun", resume="last")[1]
    (process,) = request.processes
    (tmp_path / "worker.py").write_text(process.files["worker.py"])
    for name in ("logs", "errors"):
        (tmp_path / name).mkdir()
    words = [text.replace(str(fleet.folder(1)), str(tmp_path)) for text in process.argv]
    start = words.index(f"{tmp_path}/worker.py")

    def run_worker(rank: int, **environment: str) -> str:
        numbers = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
        command = [sys.executable, *words[start:]]
        env = {**os.environ, **numbers, **environment}
        subprocess.run(command, env=env, cwd=request.workdir, check=True)
        return (tmp_path / "logs" / "rank2.log").read_text().splitlines()[-1]

    assert run_worker(0) == f"{request.launch} allow", "torch has renumbered this node's first rank"
    assert run_worker(0, WANDB_RUN_ID="mine") == "mine allow"
    assert run_worker(2) == "None None"
