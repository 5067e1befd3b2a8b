"""What the ranks of this node use: CPU, GPU and network, sampled every 10 s."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from awsddp.agent.diagnosis.stacks import processes
from awsddp.agent.job_folder import JobFolder, write_json
from awsddp.agent.messages import Launch, Told

_EVERY_SECONDS = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")
_NVIDIA_SMI = ("--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")


class _Sample(NamedTuple):
    """The CPU time of each process (rank, pid) at a moment, and how much its node has sent and received."""

    at: float
    used: dict[tuple[int | None, int], float]
    sent: int | None


class Samples:
    """Writes samples.json in the job's folder: the means since the sample before.

    nvidia-smi takes up to seconds: what it said is read with the next sample.
    """

    def __init__(self, request: Launch, folder: JobFolder) -> None:
        self._folder = folder
        self._ranks = [(rank, local) for rank, local, node in request.layout if node == request.node]
        self._nic = request.processes[0].environment.get("GLOO_SOCKET_IFNAME", "")
        self._gpus = request.gpus
        self._nvidia_smi = shutil.which("nvidia-smi")
        self._said = folder.path / "nvidia-smi.csv"
        self._child: subprocess.Popen[bytes] | None = None
        self._next = 0.0
        self._before: _Sample | None = None

    def take(self) -> None:
        """Take a sample if it is time. A full disk ends no job."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        with contextlib.suppress(OSError):
            gpus = self._ask_gpus()
            used = {(one.rank, one.pid): cpu_seconds(one.pid) for one in processes(self._folder.run)}
            sent = network_bytes(Path("/proc/net/dev").read_text("ascii"), self._nic)
            sample = _Sample(now, used, sent)
            if self._before is not None:
                self._write(self._before, sample, gpus)
            self._before = sample

    def _write(self, before: _Sample, sample: _Sample, gpus: dict[int, tuple[float, int]]) -> None:
        (then, used_before, sent_before), (now, used, sent) = before, sample
        per_second = None if sent is None or sent_before is None else (sent - sent_before) / (now - then)
        visible = self._gpus or sorted(gpus)
        each = len(visible) // len(self._ranks)
        rows = []
        for rank, local in self._ranks:
            own = [one for one in used if one[0] == rank and used[one] and one in used_before]
            seconds = sum(used[one] - used_before[one] for one in own)
            mine = [gpus[gpu] for gpu in visible[local * each : (local + 1) * each] if gpu in gpus]
            usage = Told(
                rank=rank,
                cpu_percent=round(100 * seconds / (now - then), 1) if own else None,
                gpu_percent=sum(one[0] for one in mine) / len(mine) if mine else None,
                gpu_memory_bytes=sum(one[1] for one in mine) if mine else None,
                network_bytes_per_second=None if per_second is None else round(max(0.0, per_second)),
            )
            rows.append(usage)
        write_json(self._folder.samples, {"ranks": rows}, sync=False)

    def _ask_gpus(self) -> dict[int, tuple[float, int]]:
        """Return what nvidia-smi said when it was last asked, and ask it again if it has ended."""
        if self._nvidia_smi is None or (self._child is not None and self._child.poll() is None):
            return {}
        gpus = read_gpus(self._said.read_text("ascii", "replace")) if self._said.exists() else {}
        with self._said.open("wb") as file:
            self._child = subprocess.Popen(
                [self._nvidia_smi, *_NVIDIA_SMI],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.DEVNULL,
            )
        return gpus


def read_gpus(text: str) -> dict[int, tuple[float, int]]:
    """Return utilization (percent) and used memory (bytes) of each GPU; `text` is nvidia-smi's CSV in MiB."""
    gpus = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # [N/A], or an error
            index, percent, mebibytes = line.split(",")
            gpus[int(index)] = float(percent), int(mebibytes) << 20
    return gpus


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, 0.0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def network_bytes(text: str, nic: str) -> int | None:
    """Return how much an interface has received and sent, in the text of /proc/net/dev; None without it."""
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == nic:
            fields = numbers.split()
            return int(fields[0]) + int(fields[8])
    return None
