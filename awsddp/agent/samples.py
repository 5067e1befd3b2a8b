"""Sample the CPU, GPU and network use of this node's ranks every 10 s."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from awsddp.agent.diagnosis.stacks import list_processes
from awsddp.agent.job_folder import JobFolder, write_json
from awsddp.agent.messages import Launch, Response

_EVERY_SECONDS = 10.0
_NVIDIA_SMI = ("--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")


class _Counters(NamedTuple):
    """The CPU seconds of each process (rank, pid), and the bytes that the node has transferred."""

    at: float
    used: dict[tuple[int | None, int], float]
    sent: int | None


class Samples:
    """Writes the mean resource use since the previous sample to samples.json in the job's folder.

    Because nvidia-smi may take seconds, its output is read when the next sample is taken.
    """

    def __init__(self, request: Launch, folder: JobFolder) -> None:
        self._folder = folder
        self._ranks = [(rank, local) for rank, local, node in request.layout if node == request.node]
        self._nic = request.processes[0].environment.get("GLOO_SOCKET_IFNAME", "")
        self._gpus = request.gpus
        self._nvidia_smi = shutil.which("nvidia-smi")
        self._output_file = folder.path / "nvidia-smi.csv"
        self._child: subprocess.Popen[bytes] | None = None
        self._due_at = 0.0
        self._previous: _Counters | None = None

    def take(self) -> None:
        """Take a sample if one is due. Ignores OSError, because a full disk must not end the job."""
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + _EVERY_SECONDS
        with contextlib.suppress(OSError):
            gpus = self._query_gpus()
            processes = list_processes(self._folder.run)
            cpu_seconds_of = {(process.rank, process.pid): process.cpu_s for process in processes}
            network = network_bytes(Path("/proc/net/dev").read_text("ascii"), self._nic)
            sample = _Counters(now, cpu_seconds_of, network)
            if self._previous is not None:
                self._write(self._previous, sample, gpus)
            self._previous = sample

    def _write(self, before: _Counters, sample: _Counters, gpus: dict[int, tuple[float, int]]) -> None:
        (began, used_before, sent_before), (now, used, sent) = before, sample
        per_second = None if sent is None or sent_before is None else (sent - sent_before) / (now - began)
        visible = self._gpus or sorted(gpus)
        gpus_per_rank = len(visible) // len(self._ranks)
        rows = []
        for rank, local_rank in self._ranks:
            keys = [key for key in used if key[0] == rank and used[key] and key in used_before]
            seconds = sum(used[key] - used_before[key] for key in keys)
            first = local_rank * gpus_per_rank
            rank_gpus = [gpus[gpu] for gpu in visible[first : first + gpus_per_rank] if gpu in gpus]
            usage = Response(
                rank=rank,
                cpu_percent=round(100 * seconds / (now - began), 1) if keys else None,
                gpu_percent=sum(percent for percent, _ in rank_gpus) / len(rank_gpus) if rank_gpus else None,
                gpu_memory_bytes=sum(memory for _, memory in rank_gpus) if rank_gpus else None,
                network_bytes_per_second=None if per_second is None else round(max(0.0, per_second)),
            )
            rows.append(usage)
        write_json(self._folder.samples, {"ranks": rows}, sync=False)

    def _query_gpus(self) -> dict[int, tuple[float, int]]:
        """Return {} while nvidia-smi runs, or else return its parsed output and start it again."""
        if self._nvidia_smi is None or (self._child is not None and self._child.poll() is None):
            return {}
        gpus = (
            read_gpus(self._output_file.read_text("ascii", "replace")) if self._output_file.exists() else {}
        )
        with self._output_file.open("wb") as file:
            self._child = subprocess.Popen(
                [self._nvidia_smi, *_NVIDIA_SMI],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.DEVNULL,
            )
        return gpus


def read_gpus(text: str) -> dict[int, tuple[float, int]]:
    """Return each GPU's utilization (percent) and used memory (bytes), from nvidia-smi's CSV (in MiB)."""
    gpus = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # the value is [N/A], or the line is an error
            index, percent, mebibytes = line.split(",")
            gpus[int(index)] = float(percent), int(mebibytes) << 20
    return gpus


def network_bytes(text: str, nic: str) -> int | None:
    """Return how many bytes `nic` has received and sent, or None if /proc/net/dev (`text`) has no `nic`."""
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == nic:
            fields = numbers.split()
            return int(fields[0]) + int(fields[8])
    return None
