"""The progress of a job, from the rows that its ranks write."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from awsddp.agent import messages
from awsddp.agent.job_folder import JobFolder, read_json
from awsddp.agent.messages import Told
from awsddp.agent.metrics import metrics
from awsddp.agent.samples import Samples, cpu_seconds, network_bytes, read_gpus
from awsddp.agent_client import job_reports
from awsddp.model.rank_columns import far_from_others
from awsddp.model.records import RankProgress
from tests.support.fleet import launch_of, until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def measured(top: Path, text: str) -> list[Told]:
    """Return the metrics of node 1 with ranks 2 and 3, which wrote `text`."""
    folder = JobFolder("job", top)
    folder.run.mkdir(exist_ok=True)
    (top / "job.json").write_text(
        json.dumps(launch_of(1, layout=[[0, 0, 0], [2, 0, 1], [3, 1, 1]]).to_json())
    )
    (folder.run / "metrics.jsonl").write_text(text)
    return metrics(folder)


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_last_rows_give_step_loss_rate_and_progress(tmp_path: Path) -> None:
    rows = [{"step": step, "time": 100 + step / 4, "loss": 1 / step} for step in (10, 20, 40)]
    expected = Told(rank=2, step=40, loss=1 / 40, steps_per_second=4.0, fraction=0.4)
    assert measured(tmp_path, lines(*rows, {"total_steps": 100}) + '{"step": 50, "ti') == [expected]


def test_ranks_of_a_node_share_the_file(tmp_path: Path) -> None:
    rows = [{"rank": rank, "step": step, "time": float(step * rank)} for step in (1, 2) for rank in (2, 3, 0)]
    told = [one.to_json() for one in measured(tmp_path, lines(*rows))]
    seen = {one["rank"]: one["steps_per_second"] for one in told}
    assert seen == {2: 0.5, 3: 0.333}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (lines({"epoch": 3, "epochs": 4}), "fraction", 0.75),
        (lines({"step": 9, "total_steps": 3}), "fraction", 1.0),
        (lines({"step": 1, "time": 5}), "steps_per_second", None),
        (lines({"step": 1, "time": 5}, {"step": 2, "time": 5}), "steps_per_second", None),
        (
            lines({"step": 90, "time": 1}, {"step": 10, "time": 2}, {"step": 20, "time": 4}),
            "steps_per_second",
            5.0,
        ),
        ('{"step": 1, "loss": NaN}\n{"loss": 1e999, "step": true}\n', "loss", None),
        ('{"step": "4"}\n[1]\nnot json\n{"step": 1e30}\n{"step": 3}\n', "step", 3),
        ("[" * 100_000 + "\n" + lines({"step": 3}), "step", 3),
    ],
)
def test_odd_rows_are_read_as_far_as_they_tell(tmp_path: Path, text: str, key: str, value: object) -> None:
    assert measured(tmp_path, text)[0].to_json()[key] == value


def test_no_rows_no_metrics(tmp_path: Path) -> None:
    assert measured(tmp_path, "") == []
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert metrics(JobFolder("job", tmp_path)) == []


@pytest.mark.parametrize(
    ("paces", "slowest"),
    [
        ([(100, 4.0), (99, 3.9)], None),
        ([(100, 4.0), (100, 3.0), (100, 2.0)], 2),
        ([(100, 4.0), (50, 4.0)], 1),
        ([(100, None), (0, None)], 1),
        ([(0, None), (0, 0.0)], None),
        ([], None),
    ],
)
def test_slowest_rank_is_behind_the_best(paces: list[tuple[int, float | None]], slowest: int | None) -> None:
    ranks = [
        RankProgress(rank=rank, step=step, steps_per_second=rate) for rank, (step, rate) in enumerate(paces)
    ]
    assert job_reports.slowest_rank(ranks) == slowest


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
    request = launch_of(1, layout=[[0, 0, 0], [2, 0, 1], [3, 1, 1]], processes=[process])
    variables = {"RANK": "3", "AWSDDP_RUN_DIR": str(folder.run)}
    with subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], env={**os.environ, **variables}
    ) as busy:
        samples = Samples(request, folder)

        def sampled() -> Any:
            samples._next = 0.0
            samples.take()
            return read_json(folder.samples)

        until(lambda: (cpu_seconds(busy.pid) or 0) > 0)
        until(lambda: (sampled() or {"ranks": [{}] * 2})["ranks"][1].get("gpu_percent"))
        used = cpu_seconds(busy.pid) or 0
        until(lambda: (cpu_seconds(busy.pid) or 0) > used)
        second, third = sampled()["ranks"]
        busy.kill()
    assert (second["rank"], second["cpu_percent"], second["gpu_percent"]) == (2, None, 97.0)
    assert (third["rank"], third["gpu_percent"], third["gpu_memory_bytes"]) == (3, 3.0, 512 << 20)
    assert third["cpu_percent"] > 0
    assert third["network_bytes_per_second"] >= 0


def test_value_far_from_the_others_is_marked() -> None:
    assert far_from_others({0: 90, 1: 92, 2: 20, 4: 91}, noise=10.0) == {2}
    assert far_from_others({0: 1, 1: 100}, noise=10.0) == set()  # which of the two?
    assert far_from_others({0: 1e7, 1: 1e7, 2: 9e7, 3: 9e7}, noise=1e6) == set()  # nor of two nodes
    assert far_from_others({0: 1e3, 1: 12e3, 2: 12e3}, noise=1e6) == set()  # nothing goes on
    assert far_from_others({}, noise=10.0) == set()


def test_job_that_runs_shows_its_progress(fleet: "Fleet") -> None:
    fleet.launch(
        "import json, os, time\n"
        "rank = int(os.environ['RANK'])\n"
        "with open(os.environ['AWSDDP_RUN_DIR'] + '/metrics.jsonl', 'a') as file:\n"
        "    for step in range(1, 5):\n"
        "        row = {'rank': rank, 'step': step, 'total_steps': 8, 'loss': 1 / step}\n"
        "        row['time'] = 1000 + step * (2 if rank == 3 else 1)\n"
        "        print(json.dumps(row), file=file, flush=True)\n"
        "print('up', flush=True)\ntime.sleep(600)\n"
    )
    until(fleet.up)
    told = {node: fleet.ask(node, messages.State()).jobs[0] for node in (0, 1)}
    job = job_reports.job_document(told)
    assert [(one.rank, one.step, one.loss, one.fraction) for one in job.progress] == [
        (rank, 4, 0.25, 0.5) for rank in range(4)
    ]
    assert [one.steps_per_second for one in job.progress] == [1.0, 1.0, 1.0, 0.5]
    assert job.slowest_rank == 3
    ended = fleet.ask(0, messages.Cancel(job="job", grace=0))
    assert job_reports.job_document({0: ended}).progress == ()
