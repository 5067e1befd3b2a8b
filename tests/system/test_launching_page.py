"""docs/launching.md: the command lines that the page marks as run, on two local nodes."""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.seed import draw_cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "launching.md"
LINES = [
    line
    for line, run in re.findall(
        r"^\|[^|]*\| `awsddp (train .*)` \| (yes|no) \|$", PAGE.read_text(), re.MULTILINE
    )
    if run == "yes"
]
GROUP = """
import argparse, os, time
import torch, torch.distributed as dist
def work(**where):
    dist.init_process_group('gloo', **where)
    ranks = torch.tensor([float(dist.get_rank())]); dist.all_reduce(ranks)
    print(f'of {dist.get_world_size()} sum {ranks.item()}\\n', end='', flush=True)
    dist.barrier(); time.sleep(0.2); dist.destroy_process_group()
parser = argparse.ArgumentParser()
"""
SCRIPTS = {
    "train.py": "parser.add_argument('--lr', type=float, required=True)\nparser.parse_args()\nwork()\n",
    "old.py": (
        "parser.add_argument('--local_rank', type=int, required=True)\n"
        "assert parser.parse_args().local_rank == int(os.environ['LOCAL_RANK'])\nwork()\n"
    ),
    "spawn.py": (
        "for name in ('nodes', 'node-rank'): parser.add_argument(f'--{name}', type=int, required=True)\n"
        "parser.add_argument('--init', required=True)\n"
        "def one(local, args):\n"
        "    work(init_method=args.init, rank=args.node_rank * 2 + local, world_size=args.nodes * 2)\n"
        "if __name__ == '__main__':\n"
        "    torch.multiprocessing.spawn(one, args=(parser.parse_args(),), nprocs=2)\n"
    ),
}


def test_page_has_lines_that_are_run() -> None:
    assert len(LINES) == 6


@pytest.mark.prove
@pytest.mark.timeout(400)
@pytest.mark.parametrize("line", draw_cases(LINES, 3, label="lines of the page"))
def test_line_of_the_page_trains(cluster: Lab, line: str) -> None:
    for name, text in SCRIPTS.items():
        cluster.script(name, GROUP + text)
    result = cluster.run(*shlex.split(line), timeout=300)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^\[rank \d @ node\d\] of 4 sum 6\.0$", result.stdout, re.MULTILINE)) == 4
