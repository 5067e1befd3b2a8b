"""The launcher that starts torch's elastic agent on each node."""

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
