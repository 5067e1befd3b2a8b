"""The examples of docs/python.md, a notebook and a Fabric task on two local nodes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lab import Lab

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
TRAIN = """
import json, os, sys
assert sys.argv[1:] in ([], ["--lr", "0.1"])
print("hello")
with open(os.environ["AWSDDP_RUN_DIR"] + "/metrics.jsonl", "a") as rows:
    rows.write(json.dumps({"step": 1, "loss": 0.5}) + "\\n")
"""
pytestmark = pytest.mark.prove


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab with real SSH hosts and the scripts of the page."""
    made = Lab(tmp_path_factory.mktemp("page"))
    made.script("train.py", TRAIN)
    made.script("fails.py", "import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    assert made.run("local", "start", "--loopback").returncode == 0
    yield made
    made.close()


def list_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_all_examples_of_the_page_run_in_order(lab: Lab) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", "\n".join(list_examples())],
        cwd=lab.project,
        env=lab.environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert "3 1 hello" in result.stdout
    assert "1 3 " in result.stdout  # the cause: rank 1, exit code 3
    assert lab.json("status", "-c", "demo")["state"] == "absent"
    assert lab.json("status", "-c", "short")["state"] == "absent"


def test_a_notebook_shows_the_plan_as_a_table_and_trains(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    for key in [key for key in os.environ if key not in lab.environ]:
        monkeypatch.delenv(key)
    for key, value in lab.environ.items():
        monkeypatch.setenv(key, value)
    cells = [
        "import awsddp\ncluster = awsddp.Cluster('book', local=True)\nplan = cluster.plan(nodes=2)\nplan",
        "cluster.up(plan)['state']",
        "[(line.rank, line.text) for line in cluster.train('train.py', world_size=2).logs()]",
        "cluster.down()['state']",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel = {"metadata": {"path": str(lab.project)}}
    NotebookClient(book, timeout=120, kernel_name="python3", resources=kernel).execute()
    outputs = [cell.outputs for cell in book.cells]
    assert {output.output_type for cell in outputs for output in cell} == {"execute_result"}
    assert outputs[0][0].data["text/html"].startswith("<table><tr><th>cluster</th>")
    assert outputs[1][0].data["text/plain"] == "'ready'"
    assert sorted(eval(outputs[2][0].data["text/plain"])) == [(0, "hello"), (1, "hello")]


def test_a_fabric_task_runs_on_two_nodes_and_refuses_another_host_key(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fabric
    import paramiko

    import awsddp
    from awsddp.nodes import hostkeys

    for key, value in lab.environ.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(lab.project)

    @fabric.task
    def read_home(connection: fabric.Connection) -> str:
        return str(connection.run("echo $HOME", hide=True).stdout.strip())

    with awsddp.run("tasks", nodes=2, local=True) as cluster:
        assert len({read_home(connection) for connection in cluster.fabric()}) == 2
        known_hosts = lab.home / "clusters" / "tasks" / "known_hosts"
        before = known_hosts.read_text()
        (first, first_keys), (second, second_keys) = hostkeys.load_keys(known_hosts).items()
        swapped = [*(f"{first} {key}" for key in second_keys), *(f"{second} {key}" for key in first_keys)]
        known_hosts.write_text("\n".join(swapped) + "\n")
        group = cluster.fabric()
        with pytest.raises(fabric.exceptions.GroupException) as refused:
            group.run("true", hide=True)
        assert all(isinstance(error, paramiko.SSHException) for error in refused.value.result.values())
        known_hosts.write_text(before)
