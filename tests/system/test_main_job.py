"""The main job on two real nodes: launch, sync, train, fetch the results, terminate."""

import json
import re
import signal
import time
from typing import Any

import pytest

from tests.support.lab import Lab
from tests.support.numbers_of_a_page import Page, check
from tests.support.traces import find_traces

ARGV = """
import sys
import torch.distributed as dist
import torch
rank, local_rank, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=4)
total = torch.tensor([rank])
dist.all_reduce(total)
print("local", local_rank, "sum", int(total))
dist.barrier()
dist.destroy_process_group()
"""

ENVIRONMENT = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), "on", os.uname().nodename)
dist.barrier()
dist.destroy_process_group()
"""

SAVES = """
import os, pathlib
rank = int(os.environ["RANK"])
folder = pathlib.Path("saved_models")
folder.mkdir(exist_ok=True)
(folder / "x.pth").write_text(f"weights of rank {rank}")
pathlib.Path(os.environ["AWSDDP_RUN_DIR"], f"rank{rank}.txt").write_text("kept")
"""

FAILS = """
import os, time
rank = int(os.environ["RANK"])
print("rank", rank, "starts", flush=True)
if rank == 2:
    print("about to fail")
    raise SystemExit(3)
time.sleep(600)
"""

LATE = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(10)
    print("the last one")
"""

COUNTS = """
import os, time
for number in range(400):
    print("rank", os.environ["RANK"], "line", number, flush=True)
    time.sleep(0.02)
"""

WRITES = """
import json, os, pathlib, time
rank = int(os.environ["RANK"])
folder = pathlib.Path("runs")
folder.mkdir(exist_ok=True)
for step in range(100_000):
    with (pathlib.Path(os.environ["AWSDDP_RUN_DIR"]) / "metrics.jsonl").open("a") as file:
        row = {"rank": rank, "step": step, "loss": 1 / (step + 1), "time": time.time()}
        file.write(json.dumps(row) + "\\n")
    if int(os.environ["LOCAL_RANK"]) == 0:
        with (folder / "events.out.tfevents.1").open("a") as file:
            file.write(f"event {step}\\n")
    time.sleep(0.5)
"""

MEASURED = """
import json, os, time
rank = int(os.environ["RANK"])
with open(os.environ["AWSDDP_RUN_DIR"] + "/metrics.jsonl", "a") as file:
    for step in range(1, 10_000):
        time.sleep(0.2 if rank == 2 else 0.1)
        row = {"rank": rank, "step": step, "total_steps": 10_000, "loss": 1 / step, "time": time.time()}
        print(json.dumps(row), file=file, flush=True)
"""


@pytest.mark.prove
def test_the_bundled_program_trains_on_both_nodes(cluster: Lab) -> None:
    result = cluster.json("train", "--world-size", "4", "--name", "bundled")
    assert result["state"] == "succeeded"
    assert {rank["node"] for rank in result["ranks"]} == {0, 1}
    assert result["accuracy"] > 0.97
    results_dir = cluster.project / result["home"]
    assert (results_dir / "loss.svg").read_text().startswith("<svg")
    assert (results_dir / "logs" / "rank3.log").is_file()
    assert json.loads((results_dir / "job.json").read_text())["state"] == "succeeded"


@pytest.mark.prove
def test_a_script_gets_rank_and_address_in_its_arguments(cluster: Lab) -> None:
    cluster.script("argv.py", ARGV)
    shown = cluster.run(
        "train",
        "argv.py",
        "--world-size",
        "4",
        "--",
        "{rank}",
        "{local_rank}",
        "tcp://{master_addr}:{master_port}",
    )
    assert shown.returncode == 0, shown.stderr
    for rank in range(4):
        assert f"[rank {rank} @ node{rank // 2}] local {rank % 2} sum 6" in shown.stdout.splitlines()


@pytest.mark.prove
def test_a_script_reads_the_environment(cluster: Lab) -> None:
    cluster.script("environment.py", ENVIRONMENT)
    shown = cluster.run("train", "environment.py", "--world-size", "4")
    assert shown.returncode == 0, shown.stderr
    assert sum("of 4 on" in line for line in shown.stdout.splitlines()) == 4


def test_each_rank_can_have_its_own_script(cluster: Lab) -> None:
    for rank in (0, 1):
        cluster.script(f"train_rank{rank}.py", f"print('file of rank {rank}')")
    shown = cluster.run("train", "train_rank{rank}.py", "--world-size", "2")
    assert shown.returncode == 0, shown.stderr
    assert "[rank 1 @ node1] file of rank 1" in shown.stdout.splitlines()


def test_a_failing_rank_is_named_and_the_others_end(cluster: Lab) -> None:
    cluster.script("fails.py", FAILS)
    started = time.monotonic()
    result = cluster.json("train", "fails.py", "--world-size", "4", code=1)
    assert time.monotonic() - started < 60  # the other ranks sleep for ten minutes
    cause = result["cause"]
    assert (result["state"], cause["rank"], cause["node"], cause["exit_code"]) == ("failed", 2, 1, 3)
    assert cause["tail"][-1] == "about to fail"
    seconds = {rank["rank"]: rank["seconds"] for rank in result["ranks"]}
    assert max(seconds.values()) - seconds[2] < 3


@pytest.mark.prove
def test_train_waits_for_a_rank_that_runs_longer_than_the_others(cluster: Lab) -> None:
    cluster.script("late.py", LATE)
    shown = cluster.run("train", "late.py", "--world-size", "4")
    assert shown.returncode == 0, shown.stderr
    assert "[rank 0 @ node0] the last one" in shown.stdout.splitlines()


def test_results_of_each_node_are_fetched_and_the_next_sync_deletes_nothing(cluster: Lab) -> None:
    cluster.script("saves.py", SAVES)
    result = cluster.json("train", "saves.py", "--world-size", "2", "--name", "saves")
    results_dir = cluster.project / result["home"]
    assert (results_dir / "node0" / "saved_models" / "x.pth").read_text() == "weights of rank 0"
    assert (results_dir / "node1" / "saved_models" / "x.pth").read_text() == "weights of rank 1"
    assert (results_dir / "node1" / "run" / "rank1.txt").read_text() == "kept"
    (cluster.project / "saves.py").unlink()
    cluster.script(".gitignore", "kept/\n")
    cluster.script("kept/here.bin", "")
    assert {"by": ".gitignore", "paths": ["kept/"]} in cluster.json("sync")["kept"]
    cluster.script(
        "look.py",
        "from pathlib import Path\n"
        "print('still', Path('saved_models/x.pth').read_text(), Path('saves.py').exists())",
    )
    shown = cluster.run("train", "look.py", "--world-size", "2")
    assert "[rank 1 @ node1] still weights of rank 1 False" in shown.stdout.splitlines()


GOES_ON = """
import os, pathlib
found = os.environ.get("AWSDDP_RESUME")
print("goes on with", pathlib.Path(found).read_text() if found else "nothing", flush=True)
if os.environ["RANK"] == "0":
    pathlib.Path(os.environ["AWSDDP_RUN_DIR"], "step-1.pt").write_text("the first")
"""


def test_each_node_gets_the_checkpoint_that_a_job_resumes_from(cluster: Lab) -> None:
    cluster.script("goes_on.py", GOES_ON)
    for more, text in (("--name", "before"), "nothing"), (("--resume", "before"), "the first"):
        shown = cluster.run("train", "goes_on.py", "--world-size", "2", *more)
        assert shown.returncode == 0, shown.stderr
        lines = [f"[rank {rank} @ node{rank}] goes on with {text}" for rank in range(2)]
        assert sorted(shown.stdout.splitlines()) == lines


def test_a_killed_client_leaves_the_job_and_logs_shows_every_line_once(cluster: Lab) -> None:
    cluster.script("counts.py", COUNTS)
    client = cluster.start("train", "counts.py", "--world-size", "4", "--name", "counted")
    assert client.stdout is not None
    while b"line 20" not in client.stdout.readline():
        assert client.poll() is None
    unanswered = cluster.run("sync")
    assert (unanswered.returncode, "Job counted runs on the nodes" in unanswered.stderr) == (2, True)
    client.send_signal(signal.SIGKILL)
    client.communicate()
    shown = cluster.run("logs", "-f", "counted")
    assert shown.returncode == 0, shown.stderr
    expected = sorted(
        f"[rank {rank} @ node{rank // 2}] rank {rank} line {n}" for rank in range(4) for n in range(400)
    )
    assert sorted(shown.stdout.splitlines()) == expected
    folder = cluster.project / "runs" / "counted"
    assert (folder / "logs" / "rank3.log").read_text() == "".join(f"rank 3 line {n}\n" for n in range(400))
    assert json.loads((folder / "job.json").read_text())["state"] == "succeeded"


def test_names_with_shell_characters_work(cluster: Lab) -> None:
    names = ["with space.txt", "-rf", "it's", 'a"b', "new\nline", "$(touch canary)", "*", "ünï"]
    folder = cluster.project / "-odd folder"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(name)
    cluster.script(
        "list it.py",
        "import os, json; print(json.dumps(sorted(os.listdir('-odd folder')))); "
        "import sys; print(json.dumps(sys.argv[1:]))",
    )
    shown = cluster.run(
        "train", "list it.py", "--world-size", "1", "--", "a b", "$(touch canary)", "-x", "'q'"
    )
    assert shown.returncode == 0, shown.stderr
    outputs = [line.split("] ", 1)[1] for line in shown.stdout.splitlines()]
    assert json.loads(outputs[0]) == sorted(names)
    assert json.loads(outputs[1]) == ["a b", "$(touch canary)", "-x", "'q'"]
    assert not list(cluster.root.rglob("canary"))


@pytest.mark.prove
def test_event_files_are_fetched_during_a_job_and_every_number_of_the_report_is_right(
    cluster: Lab,
) -> None:
    cluster.script("writes.py", WRITES)
    client = cluster.start("train", "writes.py", "--world-size", "4", "--name", "written")
    folder = cluster.project / "runs" / "written"
    try:
        paths = [folder / f"node{node}" / "runs" / "events.out.tfevents.1" for node in (0, 1)]
        while not all(path.is_file() for path in paths):
            assert client.poll() is None
            time.sleep(0.2)
        assert paths[1].read_text().startswith("event 0\n")
        assert not (folder / "job.json").exists(), "the job still runs"
        assert cluster.run("cancel", "written").returncode == 0
        _, stderr = client.communicate(timeout=120)
        assert client.returncode == 1, stderr
    finally:
        client.kill()
        client.communicate()
    assert cluster.json("report")["job"] == "written"
    page = Page((folder / "report.html").read_text())
    assert check(page, folder) >= {"job.json", "metrics"}
    (listed,) = [job for job in cluster.json("jobs")["jobs"] if job["job"] == "written"]
    assert (listed["state"], listed["cluster"], listed["reported"]) == ("cancelled", "default", True)


def test_run_leaves_nothing(lab: Lab) -> None:
    lab.script("hello.py", "print('hello')")
    before = find_traces(lab.home)
    result = lab.json("run", "hello.py", "--local", "--nodes", "2", "--world-size", "2", "-y")
    assert result["train"]["state"] == "succeeded"
    assert len(result["down"]["terminated"]) == 2
    assert result["down"]["leftovers"] == []
    assert find_traces(lab.home) == before
    assert not (lab.home / "local").exists()


def test_up_twice_changes_nothing(cluster: Lab) -> None:
    first = cluster.json("up", "--local", "--nodes", "2", "-y")
    second = cluster.json("up", "--local", "--nodes", "2", "-y")
    assert first["state"] == second["state"] == "ready"
    assert first["nodes"] == second["nodes"]


def test_down_without_a_cluster_is_no_error(lab: Lab) -> None:
    for _ in range(2):
        result = lab.json("down", "--local", "-y")
        assert (result["state"], result["terminated"]) == ("absent", [])


@pytest.mark.prove
def test_progress_of_a_job_shows_while_it_runs(cluster: Lab) -> None:
    cluster.script("measured.py", MEASURED)
    name = cluster.json("train", "measured.py", "--world-size", "4", "--detach")["job"]
    try:
        deadline = time.monotonic() + 60
        while not _has_rates(job := cluster.jobs()[-1], 0, 2) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert (job["job"], job["slowest_rank"]) == (name, 2)
        ranks = {row["rank"]: row for row in job["progress"]}
        assert ranks[2]["steps_per_second"] < 0.9 * ranks[0]["steps_per_second"]
        assert re.search(r"slowest +2 +\d+ ", cluster.run("jobs", "-v").stdout)
        assert re.search(
            r"step \d+, \d+%, .* steps/s, loss .*, slowest: rank 2", cluster.run("status").stdout
        )
    finally:
        cancelled = cluster.json("cancel", name)
    assert cancelled["cause"]["kind"] == "cancelled"


def _has_rates(job: dict[str, Any], *ranks: int) -> bool:
    """Return True if these ranks have written the two rows that a rate needs."""
    rates = {row["rank"]: row["steps_per_second"] for row in job["progress"]}
    return all(rates.get(rank) is not None for rank in ranks)
