"""Who am I, and with whom: the place of this process in the job, and the process group."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


class LaunchError(Exception):
    """The launch does not fit together. The text says what is wrong and what to type."""


@dataclass(frozen=True)
class Place:
    """This process among the others: its rank of `world_size`, its number on its node, and how they meet."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    init_method: str | None  # None: alone


def find_place(
    positional: list[int],
    *,
    env: Mapping[str, str],
    local_rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
) -> Place:
    """Return the place that argv (`RANK LOCAL_RANK`, `--local_rank`, ...) and, where silent, `env` give.

    With no rank anywhere the process is alone. Raises LaunchError when what is given does not fit together.
    """
    if len(positional) == 1:
        raise LaunchError("RANK without LOCAL_RANK. Type: main.py RANK LOCAL_RANK")
    try:
        rank = positional[0] if positional else int(env.get("RANK", 0))
        local = positional[1] if positional else local_rank
        local = int(env.get("LOCAL_RANK", 0)) if local is None else local
        size = world_size or int(env.get("WORLD_SIZE", 0))
        local_size = int(env.get("LOCAL_WORLD_SIZE", 0))
    except ValueError as error:
        raise LaunchError(
            f"RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE must be numbers: {error}"
        ) from error
    if not size:
        if positional or "RANK" in env:
            raise LaunchError(f"rank {rank} of how many? Give --world-size or WORLD_SIZE.")
        size = 1
    if not 0 <= rank < size:
        raise LaunchError(f"rank {rank} does not fit a world of {size}: ranks go from 0 to {size - 1}.")
    if size > 1 and not init_method:
        if not {"MASTER_ADDR", "MASTER_PORT"} <= env.keys():
            raise LaunchError(
                "where do the ranks meet? Give --init-method tcp://HOST:PORT or set MASTER_ADDR, MASTER_PORT."
            )
        init_method = "env://"
    return Place(rank, local, size, local_size or size, init_method)


def choose_device(name: str, place: Place) -> torch.device:
    """Return the device of this rank: `name` is cpu, cuda, or auto (cuda where there is a GPU).

    Raises LaunchError when the GPU numbered LOCAL_RANK is not there.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    if place.local_rank >= gpus:
        raise LaunchError(
            f"local rank {place.local_rank} wants GPU {place.local_rank}, and this machine has {gpus}: "
            f"start at most {gpus} ranks here, or give --device cpu."
        )
    return torch.device("cuda", place.local_rank)


def share_cores(place: Place) -> None:
    """Divide the cores among the ranks of the node, unless OMP_NUM_THREADS says: idle threads spin."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // place.local_world_size))


def join(place: Place, *, device: torch.device, backend: str | None = None, timeout_s: float = 600) -> None:
    """Form the process group: by default gloo for tensors on the CPU and nccl for those on a GPU.

    Raises LaunchError when the group does not form: a port that is taken, ranks that do not come, or that
    were told of another world size.
    """
    default = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    chosen = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend or default
    rank, size, timeout = place.rank, place.world_size, timedelta(seconds=timeout_s)
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        if place.init_method:
            store, *_ = next(rendezvous(place.init_method, rank, size, timeout=timeout))
            store.set_timeout(timeout)
        told = store.compare_set("world_size", "", str(size)).decode()
        if told != str(size):
            raise LaunchError(f"rank {rank} was told of a world of {size}, another rank of {told}.")
        dist.init_process_group(chosen, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, AssertionError) as error:  # the last for an unknown backend
        raise LaunchError(
            f"rank {place.rank} of {place.world_size} found no group at {place.init_method}: {error}"
        ) from error


def leave() -> None:
    """End the process group together.

    The pause is for gloo (seen with torch 2.13): a group destroyed while a peer is still in its last
    collective aborts that peer, about once in 20 groups.
    """
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def end(code: int) -> NoReturn:
    """End this process; at once where it did not leave the group, because it failed.

    A regular exit may be aborted by gloo's threads then, or wait for them for ever (seen with torch 2.13).
    """
    if dist.is_initialized():
        os._exit(code)
    sys.exit(code)


class Stop:
    """SIGTERM, agreed on: all ranks stop after the same step, with a checkpoint.

    The handler only sets a flag: a rank inside a collective must not act alone. The ranks tell each other by
    one all_reduce (on the CPU) after each step. Where steps are so short that this would be felt, it is after
    every so many: `LOOK_S` apart, and `MOST_STEPS` at most.
    """

    LOOK_S = 0.1
    MOST_STEPS = 20

    def __init__(self) -> None:
        self.asked = False
        self.steps, self.every, self.since = 0, 1, time.perf_counter()
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, *_: object) -> None:
        self.asked = True

    def agreed(self) -> bool:
        """Say whether any rank was asked to stop; every rank calls this after each step."""
        self.steps += 1
        if self.steps < self.every:
            return False
        now = time.perf_counter()
        told = torch.tensor([float(self.asked), (now - self.since) / self.steps])
        dist.all_reduce(told)
        asked, step_s = (told / dist.get_world_size()).tolist()
        self.every = max(1, min(self.MOST_STEPS, int(self.LOOK_S / step_s)))
        self.steps, self.since = 0, now
        return bool(asked)


def is_broken(error: RuntimeError) -> bool:
    """Say whether `error` is what a rank sees when another one is gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "Connection" in str(error)


def spawn(run: Callable[[list[str]], int], ranks: int, argv: list[str]) -> int:
    """Start `ranks` processes on this machine that call `run(argv)`; return the first exit code not 0.

    SIGTERM is passed on to them. Spawned, not forked: a fork keeps locks that other threads held.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    own = {**env, **os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = torch.multiprocessing.spawn(_spawned, (run, argv, own), nprocs=ranks, join=False)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGTERM) for pid in processes.pids()])
    try:
        while not processes.join(grace_period=30):
            pass
    except torch.multiprocessing.ProcessExitedException as ended:
        return int(ended.exit_code)
    return 0


def _spawned(rank: int, run: Callable[[list[str]], int], argv: list[str], env: dict[str, str]) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    at = argv.index("--spawn")
    end(run(argv[:at] + argv[at + 2 :]))
