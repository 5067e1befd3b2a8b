"""`why` of an ended job: its cause, the lines before it, the next step; no node is asked."""

import json
from pathlib import Path

import pytest

from awsddp.agent.diagnosis.stacks import DUMP, NodeStacks, Process, read_sources
from awsddp.agent.messages import to_json_value
from awsddp.cli.doctor_page import why_page
from awsddp.job.why import why
from tests.support.ended_cluster import CAUSE, Home


def test_why_shows_the_cause_of_a_failed_job_once(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.job("one", 100)
    cause = CAUSE | {"explanation": "FileNotFoundError: data.csv", "tail": ["Traceback", "last line"]}
    home.job("two", 200, state="failed", cause=cause)
    why_page(why(home.session()))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("Job two") and "failed" in first
    assert [line for line in lines if "data.csv" in line] == [
        "  cause: rank 2 @ node1: FileNotFoundError: data.csv"
    ]
    index = lines.index("  | Traceback")
    assert lines[index : index + 3] == ["  | Traceback", "  | last line", "  next: awsddp logs"]


def test_why_says_that_a_job_succeeded(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.job("one", 100)
    document = why(home.session(), "one")
    assert (document.state, document.behind, document.ranks) == ("succeeded", (), ())
    why_page(document)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Job one") and "succeeded" in first


def test_why_shows_where_the_ranks_of_a_hung_job_were(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    explanation = "No rank wrote to its log for 60 s. Rank 3 (node1) is behind."
    folder = home.job(
        "one", 100, state="failed", cause=CAUSE | {"rank": 3, "kind": "hang", "explanation": explanation}
    )
    for node in (0, 1):
        stacks = 'Current thread 0x1 (most recent call first):\n  File "/w/train.py", line {} in step\n'
        ranks = [
            Process(10, 1, 2 * node, "S", joined=True, stacks=stacks.format(4)),
            Process(11, 1, 2 * node + 1, "S", joined=True, stacks=stacks.format(9 if node else 4)),
        ]
        dump = NodeStacks("/w", 60.0, ranks, {"/w/train.py:4": "loss.backward()", "/w/train.py:9": "sleep()"})
        (folder / f"node{node}" / "run" / DUMP).write_text(json.dumps(to_json_value(dump)))
    document = why(home.session(), "one")
    assert [rank.source for rank in document.ranks] == ["loss.backward()"] * 3 + ["sleep()"]
    why_page(document, verbose=True)
    output = capsys.readouterr().out
    assert "  ranks 0-3 (node0, node1)" not in output
    assert "  ranks 0-2 (node0, node1)  train.py:4  loss.backward()\n" in output
    assert "  rank 3 (node1)            train.py:9  sleep()\n" in output
    assert "rank 3\n  | train.py:9 in step\n" in output


def test_source_lines_are_only_of_the_program_and_bounded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n    loss.backward()  # é\n" + "x" * 1000 + "\n")
    (tmp_path / "large.py").write_text("x = 1\n" * 200_000)
    library = tmp_path / "lib" / "python3" / "torch.py"
    library.parent.mkdir(parents=True)
    library.write_text("inside\n")
    frames = "".join(
        f'  File "{file}", line {line} in step\n'
        for file, line in [
            (f"{tmp_path}/train.py", 2),
            ("train.py", 3),
            ("train.py", 99),
            ("large.py", 1),
            ("gone.py", 1),
            (library, 1),
            ("/dev/zero", 1),
            (tmp_path, 1),
        ]
    )
    sources = read_sources(str(tmp_path), frames)
    assert sources == {
        f"{tmp_path}/train.py:2": "loss.backward()  # é",
        "train.py:3": "x" * 200,
        "train.py:99": "",
    }
