"""One truth a question: whatever answers it, answers alike for the same facts."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent_client import job_reports
from awsddp.api.cluster import Cluster
from awsddp.cluster.fetch_unfetched import fetch_all
from awsddp.cluster.inventory import home
from awsddp.cluster.status import cluster_document
from awsddp.errors import AwsddpError, ConfigError, NodeError, NotFoundError, UsageError
from awsddp.job.checkpoint import checkpoint_of
from awsddp.job.fetch import bring, fetch
from awsddp.job.follow import merger_of
from awsddp.job.jobs import jobs_document
from awsddp.job.jobs import jobs_of_all as jobs
from awsddp.job.logs import logs
from awsddp.job.registry import JobRegistry
from awsddp.job.report import write_report as report
from awsddp.model.records import JobNode, JobRecord, JobState, Listed, Node, Prepared, RankResult, Target
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.session.cost import launched
from awsddp.session.locate import require_live
from awsddp.settings.loader import load
from awsddp.state import Folder, Record
from awsddp.storage.results_dir import job_result
from awsddp.util.format import iso
from tests.support.folder_nodes import FINDERS

ID = "0a1b2c3d"
BEGAN = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=2)


class Desk:
    """A machine that knows the cluster `default` of two nodes, and a project with results of its jobs."""

    def __init__(self, top: Path) -> None:
        self.project = top / "project"
        self.project.mkdir()
        self.folder = Folder(top / "home", "default")
        self.listed = tuple(
            Node(
                node=number,
                instance_id=f"i-{number}",
                state="running",
                instance_type="g6.xlarge",
                zone="us-east-1a",
                image_id="ami-0",
                private_ip=f"10.0.0.{number}",
                launched=BEGAN,
            )
            for number in (0, 1)
        )
        record = Record(
            id=ID,
            owner="me",
            target=Target(region="us-east-1"),
            created=BEGAN,
            expires=BEGAN + timedelta(hours=12),
            instance_type="g6.xlarge",
            nodes=2,
            gpus_per_node=1,
            pretended=False,
            ssh_user="ubuntu",
            price_usd_per_hour=2.2,
            disk_usd_per_hour=0.1,
            prepared=tuple(
                Prepared(node=number, instance_id=f"i-{number}", home="/", python="python3", nic="eth0")
                for number in (0, 1)
            ),
        )
        self.folder.write(record)
        self.folder.key.touch()
        self.note("launched", BEGAN, **launched(record, ("i-0", "i-1")).facts)

    def note(self, event: str, at: datetime, **facts: Any) -> None:
        self.folder.note(event, **facts | {"id": ID, "at": at})

    def session(self, project: Path | None = None, **keys: Any) -> Session:
        overrides = {"sync.workdir": str(project or self.project), **keys}
        settings = load("default", overrides=overrides, environ={})
        return Session(name="default", home=self.folder.root, settings=settings)

    def api(self) -> Cluster:
        """The cluster of the Python API."""
        return Cluster()._of(self.session())

    def train(
        self, name: str, state: JobState, *, minutes: float = 60, saved: JobState | None = None
    ) -> JobRecord:
        """Start a job, last seen in a state; `saved` is the state at which its results were fetched."""
        job = JobRecord(
            job=name,
            state=state,
            cause=None,
            ranks=tuple(
                RankResult(rank=rank, local_rank=0, node=rank, exit_code=0, seconds=9.0) for rank in (0, 1)
            ),
            home=f"runs/{name}",
            nodes=(JobNode(node=0, instance_id="i-0"), JobNode(node=1, instance_id="i-1")),
            script="train.py",
            started=iso(BEGAN + timedelta(minutes=minutes)),
            price_usd_per_hour=2.2,
        )
        self.folder.note("train", job=name, home=str(self.session().results / name))
        self.folder.remember(job)
        if saved is not None:
            self.save(replace(job, state=saved))
        return job

    def save(self, job: JobRecord, project: Path | None = None) -> None:
        folder = self.session(project).results / job.job
        (folder / "node0" / "run").mkdir(parents=True)
        (folder / "node0" / "run" / "a.pt").touch()
        (folder / "job.json").write_bytes(job_reports.encode(job))

    def located(self, session: Session | None = None) -> LocatedCluster:
        """The cluster as a search finds it."""
        return LocatedCluster(
            session=session or self.session(),
            target=Target(region="us-east-1"),
            known=self.folder.read(),
            listed=Listed(name="default", id=ID, owner="me", region="us-east-1", nodes=self.listed),
            searched=(),
        )

    def status(self, project: Path | None = None) -> dict[str, Any]:
        return cluster_document(self.located(self.session(project)))

    def end(self) -> None:
        """Terminate the cluster, as `down` does."""
        self.note("ended", BEGAN + timedelta(minutes=90))
        self.folder.retire(ID)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A machine whose cluster is found as its `listed` says; no node of it can be connected to."""
    made = Desk(tmp_path)

    @contextlib.contextmanager
    def find_cluster(session: Session, **_: object) -> Iterator[LocatedCluster]:
        if made.folder.read() is None:
            raise NotFoundError("no cluster default")
        yield made.located(session)

    for module in FINDERS:
        monkeypatch.setattr(module, "find_cluster", find_cluster)
    return made


def one(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [row] = [row for row in rows if row["job"] == name]
    return row


@pytest.mark.parametrize(
    ("seen", "saved", "state"),
    [
        ("running", None, "running"),
        ("waiting", None, "waiting"),
        ("succeeded", "running", "succeeded"),  # its results were fetched as it ran, and it was seen since
        ("running", "failed", "failed"),  # another home of this project has fetched them
        ("cancelled", "cancelled", "cancelled"),
    ],
)
def test_a_job_has_one_state(desk: Desk, seen: JobState, saved: JobState | None, state: JobState) -> None:
    desk.train("j", seen, saved=saved)
    session = desk.session()
    [known] = home(session)["clusters"]
    surfaces = {
        "status": one(desk.status()["jobs"], "j")["state"],
        "jobs": one(jobs_document(session, ())["jobs"], "j")["state"],
        "bare awsddp": one(known["jobs"], "j")["state"],
        "report": report(session, job="j")["state"],
    }
    if state not in ("running", "waiting"):  # else the Python API asks the nodes
        surfaces["Python API"] = desk.api().job("j").state
    assert surfaces == dict.fromkeys(surfaces, state)


@pytest.mark.parametrize("saved", [None, "running", "waiting"])
def test_a_job_that_its_cluster_took_along_was_interrupted(desk: Desk, saved: JobState | None) -> None:
    job = desk.train("j", "running", saved=saved)
    desk.note("ended", BEGAN + timedelta(minutes=90))  # and something else of it could not be terminated
    desk.listed = tuple(replace(node, state="terminated") for node in desk.listed)
    [known] = home(desk.session())["clusters"]
    assert [one(found, "j")["state"] for found in (desk.status()["jobs"], known["jobs"])] == [
        "interrupted"
    ] * 2
    desk.folder.retire(ID)
    if saved is None:
        desk.save(job)
    session = desk.session()
    [told] = jobs(session)["jobs"]
    assert (told["state"], told["ended"]) == ("interrupted", iso(BEGAN + timedelta(minutes=90)))
    assert report(session, job="j")["state"] == "interrupted"
    assert logs(session, job="j", follow=False, on_lines=lambda data: None)["state"] == "interrupted"
    assert desk.api().job("j").state == "interrupted"


def test_the_end_of_another_cluster_of_its_name_interrupts_no_job(desk: Desk) -> None:
    desk.train("j", "running")
    desk.folder.note("ended", id="ffffffff")
    assert one(jobs_document(desk.session(), ())["jobs"], "j")["state"] == "running"
    assert desk.status()["jobs"][0]["state"] == "running"


def missing(job: JobRecord) -> JobRecord:
    return replace(job, missing=(1,))


def elsewhere(job: JobRecord) -> JobRecord:
    return replace(job, nodes=(JobNode(node=0, instance_id="i-other"),))


@pytest.mark.parametrize(
    ("change", "fetched"),
    [
        (None, False),
        (lambda job: job, True),
        (missing, False),
        (elsewhere, False),
        (lambda job: replace(job, state="running"), False),
    ],
    ids=["nothing", "all", "a part", "another job of its name", "as it ran"],
)
@pytest.mark.parametrize("owed", [True, False], ids=["tagged", "released"])
def test_results_are_fetched_for_all_or_for_none(
    desk: Desk, change: Callable[[JobRecord], JobRecord] | None, fetched: bool, owed: bool
) -> None:
    job = desk.train("j", "succeeded")
    if change is not None:
        desk.save(change(job))
    desk.listed = tuple(replace(node, unfetched=("j",) if owed else ()) for node in desk.listed)
    session, away = desk.session(), desk.session(desk.project.parent)
    surfaces = {
        "status": one(desk.status()["jobs"], "j")["fetched"],
        "status, from another folder": one(desk.status(desk.project.parent)["jobs"], "j")["fetched"],
        "train, logs, cancel": job_result(session, job)["fetched"],
        "report": report(session, job="j")["fetched"],
        "report, from another folder": report(away, job="j")["fetched"],
    }
    assert surfaces == dict.fromkeys(surfaces, fetched)


def test_results_that_were_moved_or_fetched_elsewhere_are_of_the_same_job(desk: Desk, tmp_path: Path) -> None:
    job = desk.train("j", "succeeded")
    other = tmp_path / "moved"
    desk.save(job, other)
    [row] = jobs_document(desk.session(other), ())["jobs"]
    assert (row["job"], row["cluster"]) == ("j", "default")
    assert report(desk.session(other), job="j")["fetched"]
    assert desk.status(other)["jobs"][0]["fetched"]


def test_the_last_job_is_the_one_that_was_launched_last(desk: Desk) -> None:
    desk.train("first", "succeeded", minutes=10, saved="succeeded")
    second = desk.train("second", "succeeded", minutes=20, saved="succeeded")
    desk.folder.remember(replace(second, job="first", started=iso(BEGAN + timedelta(minutes=10))))
    (desk.session().results / "first" / "job.json").touch()  # it was seen and fetched last
    desk.listed = tuple(replace(node, state="stopped") for node in desk.listed)
    session = desk.session(**{"job.script": "train.py", "job.resume": "last"})
    checkpoint = checkpoint_of(session)
    assert checkpoint is not None
    surfaces = {
        "jobs": jobs_document(session, ())["jobs"][-1]["job"],
        "status": desk.status()["jobs"][-1]["job"],
        "report": report(session)["job"],
        "logs": logs(session, job=None, follow=False, on_lines=lambda data: None)["job"],
        "fetch": fetch(session, start=print)["job"],
        "train --resume last": checkpoint.job,
    }
    assert surfaces == dict.fromkeys(surfaces, "second")


def costs(desk: Desk) -> tuple[float, float]:
    """Return the price and the cost of the cluster, on which `jobs`, that looks first, and `status` agree."""
    with pytest.raises(AwsddpError) as away:
        jobs(desk.session())
    [cluster] = away.value.document()["clusters"]  # type: ignore[misc, str-bytes-safe]
    told = desk.status()
    assert cluster["price_usd_per_hour"] == told["price_usd_per_hour"]
    assert cluster["cost_usd"] == pytest.approx(told["cost_usd"], abs=0.02)
    return told["price_usd_per_hour"], told["cost_usd"]


def test_a_cluster_that_stopped_by_itself_has_one_price_and_one_cost(desk: Desk) -> None:
    stopped = BEGAN + timedelta(hours=1)
    desk.listed = tuple(
        replace(node, state="stopped", changed=stopped, unfetched=("j",)) for node in desk.listed
    )
    assert costs(desk) == (0.2, pytest.approx(2.4, abs=0.2))
    assert home(desk.session())["clusters"][0]["price_usd_per_hour"] == 0.2


def test_a_cluster_that_outlives_the_expiry_that_is_known_here_has_one_cost(desk: Desk) -> None:
    desk.note("extended", BEGAN, expires=(BEGAN + timedelta(hours=1)).isoformat())
    desk.listed = tuple(replace(node, private_ip=None) for node in desk.listed)
    hours = (datetime.now(UTC) - BEGAN) / timedelta(hours=1)
    assert costs(desk) == (2.2, pytest.approx(2.2 * hours, abs=0.05))


def test_the_error_of_down_names_the_price_of_what_runs(desk: Desk) -> None:
    first, second = desk.listed
    stopped = replace(second, state="stopped", changed=BEGAN, unfetched=("j",))
    desk.listed = (first, stopped)
    located = desk.located()
    desk.folder.key.unlink()
    with pytest.raises(AwsddpError, match="the results of j are not fetched") as refused:
        fetch_all(*require_live(located))
    price = desk.status()["price_usd_per_hour"]
    assert price == 1.2
    assert refused.value.why.endswith(f"until then the nodes cost ${price:.2f} per hour")


def test_every_verb_finds_a_job_by_a_part_of_its_name_and_a_name_before_a_part(desk: Desk) -> None:
    for minutes, name in enumerate(("train-1", "train-10", "lr-0.1"), start=1):
        desk.train(name, "succeeded", minutes=minutes, saved="succeeded")
    desk.listed = tuple(replace(node, state="stopped") for node in desk.listed)
    session = desk.session()

    def listed(*texts: str) -> list[str]:
        with pytest.raises(NodeError) as stopped:  # it shows what this machine knows all the same
            jobs(session, texts)
        return [job["job"] for job in stopped.value.result["jobs"]]

    def resumed(text: str) -> str:
        checkpoint = checkpoint_of(desk.session(**{"job.script": "train.py", "job.resume": text}))
        assert checkpoint is not None
        return checkpoint.job

    verbs: dict[str, Callable[[str], str]] = {
        "jobs": lambda text: listed(text)[0],
        "report": lambda text: report(session, job=text)["job"],
        "logs": lambda text: logs(session, job=text, follow=False, on_lines=lambda data: None)["job"],
        "fetch": lambda text: fetch(session, job=text, start=print)["job"],
        "train --resume": resumed,
        "Python API": lambda text: desk.api().job(text).name,
    }
    for text, name in {"train-1": "train-1", "10": "train-10", "lr": "lr-0.1"}.items():
        assert {verb: find(text) for verb, find in verbs.items()} == dict.fromkeys(verbs, name)
    assert listed("last", "10") == ["lr-0.1", "train-10"]
    for find in verbs.values():
        with pytest.raises(UsageError, match="several jobs have tra in their name") as refused:
            find("tra")
        assert (refused.value.why, refused.value.exit_code) == ("train-1, train-10", 2)
    for text in ("nope", "", "*", ".*"):
        with pytest.raises(NotFoundError) as unknown:
            report(session, job=text)
        assert unknown.value.exit_code == 7


def test_job_of_this_project_comes_before_those_of_others_but_not_before_a_name(
    desk: Desk, tmp_path: Path
) -> None:
    desk.train("theirs-7", "succeeded")
    desk.folder.note("train", job="theirs-7", home=str(tmp_path / "other" / "theirs-7"))
    desk.train("train-7", "succeeded", saved="succeeded")
    session = desk.session()
    later = Folder(desk.folder.root, "later")
    later.note("launched", id="ffffffff", instances=["i-9"], target="aws", node_usd_per_hour=1.0, nodes=1)
    later.note("train", job="train-7", home=str(tmp_path / "other" / "train-7"))
    again = replace(desk.train("x", "succeeded"), job="train-7", nodes=(JobNode(node=0, instance_id="i-9"),))
    desk.save(again, tmp_path / "other")
    later.note("train", job="train-7", home=str(desk.session(tmp_path / "other").results / "train-7"))
    both = [job.cluster for job in jobs_document(session, ())["jobs"] if job.job == "train-7"]
    assert both == ["default", "later"]
    [chosen] = jobs_document(session, (), names=["7"])["jobs"]
    assert (chosen.job, chosen.cluster, report(session, job="7").cluster) == ("train-7", "default", "default")
    registry = JobRegistry(session)
    assert registry.name("7") == "train-7"
    assert registry.name("theirs-7") == "theirs-7"
    assert registry.name("theirs") == "theirs-7"
    with pytest.raises(UsageError, match="several jobs have 7"):
        registry.name("7", told=["new-77"])
    assert registry.name("new", told=["new-77"]) == "new-77"
    assert [registry.name(text) for text in (None, "last")] == [None, None]


def test_results_of_another_job_of_that_name_are_neither_mixed_nor_lost(desk: Desk) -> None:
    theirs = desk.train("train-1", "succeeded")
    desk.save(replace(theirs, nodes=(JobNode(node=0, instance_id="i-older"),)))
    before = {path: path.stat().st_mtime_ns for path in desk.session().results.rglob("*")}
    fleet: Any = None
    connected = ConnectedCluster(cluster=desk.located(), fleet=fleet)
    writes: tuple[Callable[[], object], ...] = (
        lambda: bring(connected, theirs),
        lambda: merger_of(desk.session(), theirs),
    )
    for write in writes:
        with pytest.raises(ConfigError, match="job train-1 has no folder for its results") as refused:
            write()
        assert refused.value.next.startswith("mv ")
    assert {path: path.stat().st_mtime_ns for path in desk.session().results.rglob("*")} == before
