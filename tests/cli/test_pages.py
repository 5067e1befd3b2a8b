"""The text pages of clusters and jobs: the last known state, and the location of the results."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from awsddp.cli.failures import run_command
from awsddp.cli.main import cli
from awsddp.cli.pages import cluster_page, job_lines, ranks_table, sync_page
from awsddp.model.documents import ExecDocument, JobDocument, NodeOutput, SeenJob
from awsddp.model.records import Hang, JobState, Saving, merge_records
from awsddp.state import ClusterFolder
from awsddp.util.formatting import optional_utc
from tests.support.launched_cluster import RECORD
from tests.support.records import as_attributes


def make_job(state: JobState, **more: object) -> JobDocument:
    return JobDocument(job="j", state=state, cause=None, ranks=(), home="runs/j", **more)  # type: ignore[arg-type]


def job_row(capsys: pytest.CaptureFixture[str], **seen: object) -> str:
    return job_rows(capsys, make_job("running"), **seen)[0]


def job_rows(capsys: pytest.CaptureFixture[str], document: JobDocument, **seen: object) -> list[str]:
    """Return the row of a job in `status`, and the lines after it."""
    cluster_page(
        as_attributes(
            {
                "cluster": "default",
                "state": "ready",
                "target": "local",
                "region": "here",
                "instance_type": "g6.xlarge",
                "nodes": [],
                "jobs": [merge_records(SeenJob, document, fetched=False, **seen)],
                "price_usd_per_hour": 1.0,
                "cost_usd": 1.0,
                "budget_usd": None,
                "idle": None,
                "expires": None,
            }
        )
    )
    lines = capsys.readouterr().out.splitlines()
    return lines[next(at for at, line in enumerate(lines) if line.startswith("j ")) :]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("local", "Stopped: free, on this machine; on EC2 its disks would cost $730.00 per month. "),
        ("aws", "Stopped: only the disks cost, $730.00 per month. "),
    ],
)
def test_the_page_of_a_stopped_cluster_has_the_cost_of_its_disks(
    capsys: pytest.CaptureFixture[str], target: str, text: str
) -> None:
    cluster_page(
        as_attributes(
            {
                "cluster": "default",
                "state": "stopped",
                "target": target,
                "region": "here",
                "instance_type": "g6.xlarge",
                "nodes": [],
                "jobs": [],
                "price_usd_per_hour": 1.0,
                "cost_usd": 1.0,
                "budget_usd": None,
            }
        )
    )
    assert text in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("pretended", "arguments"), [(True, ["-L"]), (True, []), (False, ["-L"])])
def test_exec_of_nvidia_smi_in_a_rehearsal_says_that_gpus_are_simulated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pretended: bool,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWSDDP_HOME", str(tmp_path))
    monkeypatch.delenv("AWSDDP_CLUSTER", raising=False)
    ClusterFolder(tmp_path, "default").write(replace(RECORD, pretended=pretended))
    document = ExecDocument(nodes=(NodeOutput(node=0, exit_code=127, stdout="", stderr=""),))
    monkeypatch.setattr("awsddp.cluster.remote.run_on_nodes", lambda *_, **__: document)
    monkeypatch.setattr("sys.argv", ["awsddp", "exec", "nvidia-smi", *arguments])
    assert run_command(cli) == 1
    assert ("GPUs of a rehearsal are simulated" in " ".join(capsys.readouterr().err.split())) is pretended


def test_a_running_job_is_shown_as_reported_or_as_last_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = optional_utc(datetime.now(UTC))
    assert "  running  " in job_row(capsys, last_seen=now, reported=True)
    assert "  seen running 0 s ago  on the nodes" in job_row(capsys, last_seen=now).replace(" 1 s", " 0 s")
    before = datetime.now(UTC) - timedelta(hours=2, minutes=59)
    assert "  seen running 2 h ago  on the nodes" in job_row(capsys, last_seen=optional_utc(before))
    assert "  seen running  on the nodes" in job_row(capsys, last_seen=None)


@pytest.mark.parametrize(
    ("state", "saving", "location", "lines"),
    [
        (
            "running",
            Saving(files=5, bytes=7, pending_files=1),
            "on the nodes",
            ["5 files, 7 bytes in S3, 1 file, 0 bytes left"],
        ),
        (
            "running",
            Saving(silent_s=300),
            "on the nodes",
            ["0 files, 0 bytes in S3, uploads have stopped (no heartbeat for 5 min 0 s)"],
        ),
        ("failed", Saving(ended=True, error="AccessDenied"), "on the nodes", ["not saved: AccessDenied"]),
        ("failed", Saving(ended=True), "in s3://b/runs/", []),
    ],
)
def test_status_shows_the_progress_of_saving_or_why_it_stopped(
    capsys: pytest.CaptureFixture[str], state: JobState, saving: Saving, location: str, lines: list[str]
) -> None:
    saves = make_job(state, save_to="s3://b/runs", saving=saving)
    first, *others = job_rows(capsys, saves, last_seen=None, reported=True)
    assert f"  {location}" in first
    rows = [row for row in others if row.startswith("j saves to s3://b/runs/j: ")]
    assert len(rows) == len(lines)
    assert all(text in row for text, row in zip(lines, rows, strict=True))
    assert not any("saves to" in row for row in job_rows(capsys, saves, last_seen=None))


def test_status_shows_what_the_nodes_found_about_a_silent_job(capsys: pytest.CaptureFixture[str]) -> None:
    text = "The job hangs: rank 3 (node1) is behind: train.py:9 in step."
    hangs = make_job(
        "running", hang=Hang(state="hung", since=1.0, text=text, place="train.py:9 in step", rank=3)
    )
    assert f"j: {text}" in job_rows(capsys, hangs, last_seen=None, reported=True)
    assert f"j: {text}" not in job_rows(capsys, hangs, last_seen=None)


def test_verbose_sync_shows_the_largest_and_the_excluded_files(capsys: pytest.CaptureFixture[str]) -> None:
    sync_page(
        as_attributes(
            {
                "nodes": [{"node": 0, "files": 3, "bytes": 1_200_000}],
                "largest": [{"path": "data/", "bytes": 1_200_000}],
                "kept": [{"by": ".gitignore", "paths": [f"{number}.pt" for number in range(12)]}],
            }
        ),
        verbose=True,
    )
    output = capsys.readouterr().out
    assert "Largest: data/ 1.2 MB\n" in output
    assert "Not sent, excluded by .gitignore: 0.pt, 1.pt," in output and output.endswith("9.pt and 2 more\n")


def test_job_lines_name_the_location_of_the_results() -> None:
    on_nodes = "  results: on the nodes; fetch them: awsddp fetch j"
    page = "  page: awsddp report j"
    assert job_lines(make_job("cancelled", fetched=False)) == ["Job j: cancelled", on_nodes]
    assert job_lines(make_job("succeeded", fetched=True)) == ["Job j: succeeded", "  results: runs/j/", page]
    partly = "  results: runs/j/, incomplete, missing node1: awsddp fetch j"
    assert job_lines(make_job("failed", fetched=False, missing=(1,))) == ["Job j: failed", partly, page]


def test_an_outlier_in_the_usage_of_ranks_has_a_star(capsys: pytest.CaptureFixture[str]) -> None:
    usage = [
        {"rank": rank, "cpu_percent": cpu, "gpu_percent": None, "gpu_memory_bytes": 4.2e10}
        for rank, cpu in enumerate((101.0, 99.0, 12.0))
    ]
    ranks_table(as_attributes({"progress": [], "usage": usage, "slowest_rank": 2}))
    heading, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading == ["rank", "CPU", "GPU", "memory"]
    assert rows[1:] == [["1", "99%", "42.0", "GB"], ["slowest", "2", "12%", "*", "42.0", "GB"]]
