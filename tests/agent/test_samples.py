"""What ranks use of their node: GPU, CPU, network."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent.diagnosis.stacks import list_processes
from awsddp.agent.job_folder import JobFolder, read_json
from awsddp.agent.samples import Samples, network_bytes, read_gpus
from tests.support.fleet import make_launch
from tests.support.waiting import until

# nvidia-smi 550 with the options of samples.py, as its documentation and issues show it.
SMI = "0, 97, 40536\n1, 3, 512\n2, [N/A], [N/A]\n"


def test_output_of_nvidia_smi_is_read() -> None:
    assert read_gpus(SMI) == {0: (97.0, 40536 << 20), 1: (3.0, 512 << 20)}
    assert read_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == {}


def test_network_of_one_interface_is_counted() -> None:
    text = "Inter-|   Receive  |  Transmit\n face |bytes ...\n  ens5: 1000 1 0 0 0 0 0 0 2000 1 0 0 0 0 0 0\n"
    assert (network_bytes(text, "ens5"), network_bytes(text, "ens")) == (3000, None)


def test_usage_of_a_rank_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{SMI}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    folder = JobFolder("job", tmp_path)
    process = {"ranks": [2, 3], "argv": [], "environment": {"GLOO_SOCKET_IFNAME": "lo"}, "log": ""}
    request = make_launch(1, layout=[[0, 0, 0], [2, 0, 1], [3, 1, 1]], processes=[process])
    variables = {"RANK": "3", "AWSDDP_RUN_DIR": str(folder.run)}
    with subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], env={**os.environ, **variables}
    ) as busy:
        samples = Samples(request, folder)

        def take_sample() -> Any:
            samples._next = 0.0
            samples.take()
            return read_json(folder.samples)

        def cpu_seconds() -> float:
            return sum(process.cpu_s for process in list_processes(folder.run))

        until(lambda: cpu_seconds() > 0)
        until(lambda: (take_sample() or {"ranks": [{}] * 2})["ranks"][1].get("gpu_percent"))
        used = cpu_seconds()
        until(lambda: cpu_seconds() > used)
        second, third = take_sample()["ranks"]
        busy.kill()
    assert (second["rank"], second["cpu_percent"], second["gpu_percent"]) == (2, None, 97.0)
    assert (third["rank"], third["gpu_percent"], third["gpu_memory_bytes"]) == (3, 3.0, 512 << 20)
    assert third["cpu_percent"] > 0
    assert third["network_bytes_per_second"] >= 0
