"""Workers of torch's elastic agent: real agents, real ranks, two nodes of this machine."""

from typing import TYPE_CHECKING

import pytest

from awsddp.agent import messages
from tests.support.elastic import SECONDS, wait_for_all

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]

# Adds to a checkpoint in 6 steps over a gloo group; rank 3 fails at step 3 in its first lives.
TRAIN = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group('gloo')
    rank, life = dist.get_rank(), pathlib.Path(os.environ['AWSDDP_RUN_DIR'], 'lives')
    latest = pathlib.Path(os.environ['AWSDDP_RUN_DIR'], 'latest.pt')
    state = [torch.load(latest) if rank == 0 and latest.exists() else {'step': 0, 'sum': torch.zeros(1)}]
    dist.broadcast_object_list(state)
    state = state[0]
    print('rank', rank, 'of', dist.get_world_size(), 'begins at step', state['step'], flush=True)
    while state['step'] < 6:
        one = torch.ones(1)
        dist.all_reduce(one)
        state = {'step': state['step'] + 1, 'sum': state['sum'] + one}
        if rank == 0:
            torch.save(state, f'{latest}.new'); os.replace(f'{latest}.new', latest)
        dist.barrier()
        lives = len(life.read_text()) if life.exists() else 0
        if rank == 3 and state['step'] == 3 + lives and lives < int(sys.argv[1]):
            life.write_text('x' * (lives + 1))
            raise ValueError(f'life {lives}')
    print('rank', rank, 'has', state['sum'].item(), flush=True)
    dist.barrier(); time.sleep(0.2)
    dist.destroy_process_group()

main()
"""


def test_failed_worker_is_restarted_and_training_continues_from_its_checkpoint(fleet: "Fleet") -> None:
    fleet.launch(TRAIN, max_restarts=3, args=("1",))
    job = fleet.wait(seconds=SECONDS)
    assert job.state == "succeeded", (job, fleet.log(0))
    assert [rank.exit_code for rank in job.ranks] == [0, 0, 0, 0]
    (restart,) = job.restarts
    assert restart.startswith("1 of 3: rank 3 @ node1: ValueError: life 0")
    log = fleet.log(3).decode()
    assert log.index("begins at step 0") < log.index("ValueError: life 0") < log.index("begins at step 3")
    assert "rank 3 has 24.0" in log
    assert fleet.processes() == []


def test_cause_is_the_exception_of_the_worker_that_failed_first(fleet: "Fleet") -> None:
    fleet.launch(TRAIN, launcher="torchrun", max_restarts=1, args=("2",))
    job = fleet.wait(seconds=SECONDS)
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.rank, job.cause.node) == (3, 1)
    # Torch aborts where gloo loses its peers while the exception ends the process.
    assert job.cause.exit_code in (1, -6)
    assert job.cause.explanation.startswith("ValueError: life 1")
    assert "ValueError: life 1" in "\n".join(job.cause.tail)
    assert [text.partition(": ")[2][:34] for text in job.restarts] == ["rank 3 @ node1: ValueError: life 0"]
    assert fleet.document(0)["cause"] == fleet.document(1)["cause"]
    assert fleet.processes() == []


def test_cancel_gives_ranks_the_grace_and_leaves_no_process(fleet: "Fleet") -> None:
    fleet.launch(
        "import os, signal, subprocess, sys, time\n"
        "sleep = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'\n"
        "subprocess.Popen([sys.executable, '-c', sleep], start_new_session=True)\n"
        "def save(*_):\n    time.sleep(1.5); print('saved', flush=True); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, save if os.environ['RANK'] != '3' else signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(1)\n",
        launcher="torchrun",
    )
    wait_for_all(fleet)
    answer = fleet.send_request(1, messages.Cancel(job="job", grace=6))
    assert answer.state == "cancelled"
    job = fleet.wait()
    assert [rank.exit_code for rank in job.ranks] == [1, 1, 1, -9]
    assert [b"saved" in fleet.log(rank) for rank in range(4)] == [True, True, True, False]
    assert fleet.processes() == []
