"""Invalid answers to the questions of `awsddp init`."""

import re
from pathlib import Path

import pytest

from tests.support.init_questions import run_init


def test_init_asks_again_after_an_invalid_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.py", "requirements.txt"):
        (tmp_path / name).touch()
    answers = [
        *("us-est-1", "us-east-1"),
        *("0", "3"),
        *("g6.xlrge", "p2.xlarge", "t3.micro,g6.xlarge"),
        *("-5", "20"),
        *("tran.py", "abc", "abc"),
        *("5", "requirments.txt", "requirements.txt"),
    ]
    config, output = run_init(tmp_path, monkeypatch, None, "\n".join([*answers, ""]))
    assert config["cluster"] == {
        "region": "us-east-1",
        "nodes": 3,
        "instance_type": "t3.micro,g6.xlarge",
        "budget_usd": 20.0,
    }
    assert (config["job"], config["env"]) == ({"script": "abc"}, {"file": "requirements.txt"})
    for hint in ("us-east-1", "g6.xlarge", "train.py", "requirements.txt"):
        assert re.search(rf"Did you mean .*{re.escape(hint)}", output), output
    assert "p2.xlarge is no longer offered by AWS" in output
