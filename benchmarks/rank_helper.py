"""CPU time that the helper in each rank adds to the start of Python and to training steps of two networks.

    python benchmarks/rank_helper.py [PAIRS]

Two gloo ranks train each network with and without the helper, interleaved. The networks are the digits
network, and resnet18 on random images of 64 x 64 pixels. The figures are CPU times, because wall times mean
nothing on a shared machine. Needs torch and torchvision.
"""

import argparse
import gzip
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = {"digits": 400, "resnet18": 10}


def main() -> int:
    """Print the medians with and without the helper, and the ratio of each pair."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", type=int, nargs="?", default=10)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        helper = Path(folder)
        source = (ROOT / "awsddp" / "agent" / "diagnosis" / "helper.py").read_text()
        (helper / "sitecustomize.py").write_text(source)
        settings = {"PYTHONPATH": folder, "AWSDDP_STACKS_DIR": folder}
        _report("start of python, CPU ms", [_pair(_start, settings, number) for number in range(3 * pairs)])
        for name in STEPS:
            measure = partial(_steps, name)
            rows = [_pair(measure, settings, number) for number in range(pairs)]
            _report(f"step of {name}, CPU ms", rows)
    return 0


def _pair(measure, settings: dict[str, str], number: int) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Return one measurement with and one without the helper; their order alternates with `number`."""
    if number % 2:
        without = measure({})
        return measure(settings), without
    return measure(settings), measure({})


def _start(settings: dict[str, str]) -> float:
    """Return the CPU time of a start of Python in ms."""
    process = subprocess.Popen([sys.executable, "-c", "pass"], env={**os.environ, **settings})
    used = os.wait4(process.pid, 0)[2]
    process.returncode = 0
    return (used.ru_utime + used.ru_stime) * 1e3


def _steps(name: str, settings: dict[str, str]) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", name],
            env={**os.environ, **settings, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return float(ranks[0].communicate()[0]) + 0 * len(ranks[1].communicate()[0])


def _rank(name: str) -> None:
    """Train the network `name`, and print the median CPU time of a step in ms."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    network, images, labels, size = _resnet18() if name == "resnet18" else _digits()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seconds = []
    for step in range(STEPS[name]):
        start = time.process_time()
        batch = torch.arange(size) + step * size % (len(labels) - size + 1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        seconds.append(time.process_time() - start)
    if dist.get_rank() == 0:
        print(statistics.median(seconds) * 1e3)
    dist.barrier()
    dist.destroy_process_group()


def _digits() -> tuple[Any, Any, Any, int]:
    """Return the network for the digits, the images, the labels, and the size of a batch."""
    import torch

    with gzip.open(ROOT / "train" / "digits.csv.gz", "rt") as file:
        rows = torch.tensor([[float(cell) for cell in line.split(",")] for line in file])
    layers = (torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    return torch.nn.Sequential(*layers), rows[:, :-1] / 16, rows[:, -1].long(), 64


def _resnet18() -> tuple[Any, Any, Any, int]:
    import torch

    sys.path.insert(0, str(ROOT / "train"))
    import models

    return models.resnet18(), torch.rand(8, 3, 64, 64), torch.arange(8), 8


def _report(name: str, pairs: list[tuple[float, float]]) -> None:
    helped, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(with_s / without_s for with_s, without_s in pairs)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    middle = statistics.median(ratios)
    print(
        f"{name:26}{helped:9.3f} with{bare:9.3f} without   ratio {middle:.3f} ({low:.3f} to {high:.3f}, "
        f"{len(pairs)} pairs)"
    )


if __name__ == "__main__":
    sys.exit(_rank(sys.argv[2]) if sys.argv[1:2] == ["rank"] else main())
