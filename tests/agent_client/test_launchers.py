"""A launcher is one function: a rank need not be a process that the agent starts."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.agent.messages import Process
from awsddp.agent_client import launchers
from awsddp.agent_client.logs import Merger
from awsddp.agent_client.rank_layout import Host, Rank, Rendezvous
from awsddp.errors import ConfigError, NodeError
from awsddp.settings.spec import JobSpec

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

AGENT = """
import os, subprocess, sys
first, count, logs, script = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
print('agent of', count, 'ranks', flush=True)
def start(rank):
    log = open(f'{logs}/rank{rank}.log', 'wb')
    return subprocess.Popen([sys.executable, script], stdout=log, env={**os.environ, 'RANK': str(rank)})
sys.exit(max(child.wait() for child in [start(first + number) for number in range(count)]))
"""


def make_agent_process(
    spec: JobSpec, ranks: Sequence[Rank], *, host: Host, rendezvous: Rendezvous
) -> tuple[Process, ...]:
    """Return one process for all ranks of a node, which write their own logs."""
    first, count = str(ranks[0].rank), str(len(ranks))
    logs, script = f"{host.folder(rendezvous.job)}/logs", str(spec.job.script)
    argv = (sys.executable, "-c", AGENT, first, count, logs, script)
    log = f"launcher{host.node.node}.log"
    return (
        Process(ranks=tuple(rank.rank for rank in ranks), argv=argv, environment={}, log=log, script=script),
    )


@pytest.fixture
def agent_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launchers.LAUNCHERS, "agent", make_agent_process)


@pytest.mark.usefixtures("agent_launcher")
def test_one_process_per_node_runs_several_ranks_with_a_log_each(fleet: "Fleet", tmp_path: "Path") -> None:
    job = fleet.run("import os\nprint('rank', os.environ['RANK'])\n", launcher="agent")
    assert (job.state, [rank.exit_code for rank in job.ranks]) == ("succeeded", [0, 0, 0, 0])
    merger = Merger({rank.rank: rank.node for rank in fleet.ranks}, folder=tmp_path / "logs")
    assert b"[rank 3 @ node1] rank 3\n" in fleet.follow(merger, 0) + fleet.follow(merger, 1)
    assert (fleet.folder(1) / "logs" / "launcher1.log").read_bytes() == b"agent of 2 ranks\n"


@pytest.mark.usefixtures("agent_launcher")
def test_exit_code_of_the_process_is_that_of_its_ranks(fleet: "Fleet") -> None:
    job = fleet.run("import os, sys\nsys.exit(3 * (os.environ['RANK'] == '2'))\n", launcher="agent")
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.rank, job.cause.exit_code, job.cause.tail) == (2, 3, ("agent of 2 ranks",))
    assert [rank.exit_code for rank in job.ranks[2:]] == [3, 3]
    assert fleet.processes() == []


def test_unknown_launcher_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"job\.launcher: no launcher 'mpi'") as caught:
        launchers.launcher("mpi")
    assert caught.value.next == "use ssh or torchrun"


@pytest.mark.parametrize("name", sorted(launchers.LAUNCHERS))
def test_every_launcher_starts_the_ranks_with_the_environments_python(fleet: "Fleet", name: str) -> None:
    fleet.hosts = [
        replace(host, prepared=replace(host.prepared, environment="/env/bin/python")) for host in fleet.hosts
    ]
    for request in fleet.requests("main.py", launcher=name).values():
        arguments = [argument for process in request.processes for argument in process.argv]
        assert "/env/bin/python" in arguments
        assert sys.executable not in arguments


@pytest.mark.parametrize("name", ["ssh", pytest.param("torchrun", marks=pytest.mark.prove)])
def test_prefix_is_placed_before_the_command_of_each_rank(fleet: "Fleet", name: str) -> None:
    script = "import os, sys\nprint(os.environ['SLOT'], sys.argv[1], sys.executable)\n"
    script += "sys.exit(7 * (sys.argv[1] == '3'))\n"
    job = fleet.run(
        script, launcher=name, args=("{rank}",), prefix=("env", "SLOT={local_rank}/{{{world_size}}}")
    )
    assert fleet.log(3) == f"1/{{4}} 3 {sys.executable}\n".encode()
    assert job.cause is not None
    assert job.cause.exit_code == 7


def test_missing_program_of_the_prefix_is_named_before_the_start(fleet: "Fleet") -> None:
    with pytest.raises(NodeError, match="nsys-nowhere cannot be run on this node"):
        fleet.launch("main.py", prefix=("nsys-nowhere", "profile"))
