"""The progress of a job, from the rows that its ranks write."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from awsddp.agent import messages
from awsddp.agent.job_folder import JobFolder
from awsddp.agent.messages import Response
from awsddp.agent.metrics import read_metrics
from awsddp.agent_client import job_reports
from awsddp.model.records import RankProgress
from tests.support.fleet import make_launch
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def measure(top: Path, text: str) -> list[Response]:
    """Write `text` as the rows of node 1 with ranks 2 and 3, and return its metrics."""
    folder = JobFolder("job", top)
    folder.run.mkdir(exist_ok=True)
    (top / "job.json").write_text(
        json.dumps(make_launch(1, layout=[[0, 0, 0], [2, 0, 1], [3, 1, 1]]).to_json())
    )
    (folder.run / "metrics.jsonl").write_text(text)
    return read_metrics(folder)


def encode_rows(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_last_rows_give_step_loss_rate_and_progress(tmp_path: Path) -> None:
    rows = [{"step": step, "time": 100 + step / 4, "loss": 1 / step} for step in (10, 20, 40)]
    expected = Response(rank=2, step=40, loss=1 / 40, steps_per_second=4.0, fraction=0.4)
    assert measure(tmp_path, encode_rows(*rows, {"total_steps": 100}) + '{"step": 50, "ti') == [expected]


def test_ranks_of_a_node_share_the_file(tmp_path: Path) -> None:
    rows = [{"rank": rank, "step": step, "time": float(step * rank)} for step in (1, 2) for rank in (2, 3, 0)]
    reports = [report.to_json() for report in measure(tmp_path, encode_rows(*rows))]
    rates = {report["rank"]: report["steps_per_second"] for report in reports}
    assert rates == {2: 0.5, 3: 0.333}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (encode_rows({"epoch": 3, "epochs": 4}), "fraction", 0.75),
        (encode_rows({"step": 9, "total_steps": 3}), "fraction", 1.0),
        (encode_rows({"step": 1, "time": 5}), "steps_per_second", None),
        (encode_rows({"step": 1, "time": 5}, {"step": 2, "time": 5}), "steps_per_second", None),
        (
            encode_rows({"step": 90, "time": 1}, {"step": 10, "time": 2}, {"step": 20, "time": 4}),
            "steps_per_second",
            5.0,
        ),
        ('{"step": 1, "loss": NaN}\n{"loss": 1e999, "step": true}\n', "loss", None),
        ('{"step": "4"}\n[1]\nnot json\n{"step": 1e30}\n{"step": 3}\n', "step", 3),
        ("[" * 100_000 + "\n" + encode_rows({"step": 3}), "step", 3),
    ],
)
def test_malformed_rows_are_skipped(tmp_path: Path, text: str, key: str, value: object) -> None:
    assert measure(tmp_path, text)[0].to_json()[key] == value


def test_job_without_rows_has_no_metrics(tmp_path: Path) -> None:
    assert measure(tmp_path, "") == []
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert read_metrics(JobFolder("job", tmp_path)) == []


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
def test_slowest_rank_is_the_one_behind(paces: list[tuple[int, float | None]], slowest: int | None) -> None:
    ranks = [
        RankProgress(rank=rank, step=step, steps_per_second=rate) for rank, (step, rate) in enumerate(paces)
    ]
    assert job_reports.find_slowest_rank(ranks) == slowest


def test_running_job_reports_its_progress(fleet: "Fleet") -> None:
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
    until(fleet.ranks_are_up)
    reports = {node: fleet.send_request(node, messages.State()).jobs[0] for node in (0, 1)}
    job = job_reports.merge_job(reports)
    assert [(row.rank, row.step, row.loss, row.fraction) for row in job.progress] == [
        (rank, 4, 0.25, 0.5) for rank in range(4)
    ]
    assert [row.steps_per_second for row in job.progress] == [1.0, 1.0, 1.0, 0.5]
    assert job.slowest_rank == 3
    ended = fleet.send_request(0, messages.Cancel(job="job", grace=0))
    assert job_reports.merge_job({0: ended}).progress == ()
