"""The process group: which rank this process is, and how ranks form the group, stop together and leave it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


class LaunchError(Exception):
    """A launch's values do not fit together. The message says what is wrong and what to type."""


@dataclass(frozen=True)
class World:
    """Describes the job's ranks, and the position of this process among them.

    `local_rank` and `local_size` count only the ranks on this machine.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    init_method: str | None  # the address at which the ranks meet, or None if there is one rank


def find_world(
    positional: Sequence[int] = (),
    local_rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
) -> World:
    """Return the world described by the arguments, else by the environment, else a world with one rank.

    `positional` is [RANK, LOCAL_RANK] or empty. Raises LaunchError if the values do not fit together.
    """
    if len(positional) == 1:
        raise LaunchError("RANK without LOCAL_RANK. Type: main.py RANK LOCAL_RANK")
    try:
        rank = positional[0] if positional else int(os.environ.get("RANK", "0"))
        if positional:
            local_rank = positional[1]
        elif local_rank is None:
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        size = world_size or int(os.environ.get("WORLD_SIZE", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    except ValueError as error:
        names = "RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE"
        raise LaunchError(f"{names} must be numbers: {error}") from error
    if not size and (positional or "RANK" in os.environ):
        raise LaunchError(f"rank {rank} of how many? Give --world-size or WORLD_SIZE.")
    return _check(World(rank, local_rank, size or 1, local_size or size or 1, init_method))


def _check(world: World) -> World:
    """Return `world`, with an init_method if one is needed.

    Raises LaunchError if the values do not fit together.
    """
    if not 0 <= world.rank < world.size:
        last = world.size - 1
        raise LaunchError(
            f"rank {world.rank} does not fit a world of {world.size}: ranks go from 0 to {last}."
        )
    if world.size == 1 or world.init_method:
        return world
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise LaunchError(
            "where do the ranks meet? Give --init-method tcp://HOST:PORT or set MASTER_ADDR, MASTER_PORT."
        )
    return replace(world, init_method="env://")


def choose_device(name: str, world: World) -> torch.device:
    """Return this rank's device. `name` is cpu, cuda, or auto (cuda if there is a GPU).

    A rank uses the GPU with the number LOCAL_RANK, because with the device "cuda" all ranks on a machine
    would share GPU 0. Raises LaunchError if the rank's GPU does not exist.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    if world.local_rank >= gpus:
        raise LaunchError(
            f"local rank {world.local_rank} needs GPU {world.local_rank}, and this machine has {gpus}: "
            f"start at most {gpus} ranks on it, or give --device cpu."
        )
    return torch.device("cuda", world.local_rank)


def divide_cores(world: World) -> None:
    """Divide the machine's cores among its ranks, unless OMP_NUM_THREADS is set.

    By default torch starts one thread per core in each rank, and a thread keeps a core busy while it waits.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // world.local_size))


def join(world: World, *, device: torch.device, backend: str | None = None, timeout_s: float = 600) -> None:
    """Form the process group. The default backend is gloo for CPU tensors and nccl for GPU tensors.

    Raises LaunchError if the group does not form: the port is taken, ranks are missing, or the ranks were
    started with different world sizes.
    """
    both = "cpu:gloo,cuda:nccl"  # nccl cannot send the CPU tensors of StopSignal and checkpoint.load
    backend = both if backend == "nccl" else backend or ("gloo" if device.type == "cpu" else both)
    rank, size, timeout = world.rank, world.size, timedelta(seconds=timeout_s)
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        if world.init_method:
            store, *_ = next(rendezvous(world.init_method, rank, size, timeout=timeout))
            store.set_timeout(timeout)
        first_size = store.compare_set("world_size", "", str(size)).decode()
        if first_size != str(size):
            raise LaunchError(f"rank {rank} has world size {size}, another rank has {first_size}.")
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, AssertionError) as error:  # AssertionError: an unknown backend
        raise LaunchError(
            f"rank {rank} of {size} cannot join a group at {world.init_method}: {error}"
        ) from error


def leave() -> None:
    """Leave the process group, all ranks together.

    The pause is needed with gloo (seen with torch 2.13). If a rank destroys the group while a peer is still
    in its last collective, the peer aborts in about one of 20 groups.
    """
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def end(code: int) -> NoReturn:
    """End this process with exit code `code`; end it at once if it failed and is therefore still in the
    group.

    After a failure gloo's threads may abort a regular exit, or block it forever (seen with torch 2.13).
    """
    if dist.is_initialized():
        os._exit(code)
    sys.exit(code)


class StopSignal:
    """A SIGTERM to any rank stops all ranks after the same step.

    The handler only sets a flag, because a rank must not leave a collective that others wait in. The ranks
    exchange their flags with an all_reduce on the CPU: after each step, or every `INTERVAL_S` seconds if
    steps are shorter, but at least every `MOST_STEPS` steps.
    """

    INTERVAL_S = 0.1
    MOST_STEPS = 20

    def __init__(self) -> None:
        self.received = False
        self.steps, self.interval, self.last_exchange = 0, 1, time.perf_counter()
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self.received = True

    def agreed(self) -> bool:
        """Return True if any rank received SIGTERM. Every rank calls this after each step."""
        self.steps += 1
        if self.steps < self.interval:
            return False
        now = time.perf_counter()
        totals = torch.tensor([float(self.received), (now - self.last_exchange) / self.steps])
        dist.all_reduce(totals)
        received, step_s = (totals / dist.get_world_size()).tolist()
        self.interval = max(1, min(self.MOST_STEPS, int(self.INTERVAL_S / step_s)))
        self.steps, self.last_exchange = 0, now
        return bool(received)


def is_broken(error: RuntimeError) -> bool:
    """Return True if `error` is of a kind that a rank raises when another rank has ended."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "Connection" in str(error)


def spawn(run: Callable[[list[str]], int], ranks: int, argv: list[str]) -> int:
    """Start `ranks` processes on this machine that call `run(argv)`; return the first nonzero exit code.

    SIGTERM is passed on to these processes. The processes are spawned, not forked, because a forked process
    keeps locks that other threads held.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = {**meeting, **os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = torch.multiprocessing.spawn(_run_rank, (run, argv, env), nprocs=ranks, join=False)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGTERM) for pid in processes.pids()])
    try:
        while not processes.join(grace_period=30):
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        return int(error.exit_code)
    return 0


def _run_rank(rank: int, run: Callable[[list[str]], int], argv: list[str], env: dict[str, str]) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    at = argv.index("--spawn")
    end(run(argv[:at] + argv[at + 2 :]))
