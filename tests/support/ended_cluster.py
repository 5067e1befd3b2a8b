"""An awsddp home with a cluster that has ended, and a project with the results of its jobs."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.session.context import Session
from awsddp.settings.loader import load

BEGAN = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)


HOSTILE = '<script>alert(1)</script> & "quoted" \x1b[31mred\x1b[0m \x1b]0;title\x07 \u202ebackwards'


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


class Home:
    """An awsddp home with the ended cluster `default`, and a project with the results of its jobs."""

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
        """Write the results of a job of four ranks into the project; rank 3 has the pace `slow`."""
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
            target = folder / f"node{rank // 2}" / "run"
            target.mkdir(parents=True, exist_ok=True)
            pace = slow if rank == 3 else 1.0
            with (target / "metrics.jsonl").open("a") as file:
                for step in range(1, 31):
                    row = {"rank": rank, "step": step, "loss": 2.5 / step, "accuracy": step / 40}
                    file.write(json.dumps(row | {"time": 1000 + step / pace}) + "\n")
        for node in (0, 1):
            sampled = [
                {"rank": rank, "cpu_percent": 400.0 if rank == 3 else 98.5, "network_bytes_per_second": 2e6}
                for rank in (2 * node, 2 * node + 1)
            ]
            target = folder / ("logs" if node else ".awsddp")  # an older awsddp wrote samples to .awsddp
            target.mkdir(exist_ok=True)
            (target / f"samples{node}.json").write_text(json.dumps({"ranks": sampled}))
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
