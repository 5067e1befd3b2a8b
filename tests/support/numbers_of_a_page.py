"""Checks every number of a report page against its source: job.json, the metrics or the samples.

A page has each number in `<data value="V" title="SOURCE">`; text outside of `<data>`, `<time>`, `<code>`,
`<pre>` and drawings has no digit.
"""

import json
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

_QUOTED = {"time", "code", "pre", "svg", "style", "title"}


class Page(HTMLParser):
    """The numbers of a page as (source, value), its times, and its text without a source."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, str]] = []
        self.times: list[str] = []
        self.bare = ""
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        self.tags.append(tag)
        if tag in _QUOTED or tag == "data":
            self._open.append(tag)
        if tag == "data":
            self.numbers.append((attributes["title"], attributes["value"]))
        if tag == "time":
            self.times.append(attributes["datetime"])

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[-1]:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self.bare += "" if self._open else data


def check(page: Page, folder: Path) -> set[str]:
    """Assert that each number equals its source in `folder`, runs/JOB; return the kinds of sources."""
    job = json.loads((folder / "job.json").read_text())
    files = [folder / f"node{node}/run/metrics.jsonl" for node in {rank["node"] for rank in job["ranks"]}]
    texts = [file.read_text() for file in sorted(files) if file.exists()]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    recent = [
        json.loads(line)
        for text in texts  # docs/results.md: the steps per second are of the last 64 KB
        for line in text[-64 * 1024 :].splitlines()[len(text) > 64 * 1024 :]
    ]
    assert not re.search(r"\d", page.bare), re.findall(r".*\d.*", page.bare)
    assert page.times == [job["started"]]
    for source, value in page.numbers:
        kind, _, path = source.partition(": ")
        match kind:
            case "job.json":
                expected = _of_job(job, path)
            case "metrics":
                expected = _of_metrics(recent if path.endswith("per_second") else rows, path)
            case "samples":
                expected = _of_samples(folder, path)
            case _:
                raise AssertionError(f"a number without a source: {source}")
        assert float(value) == pytest.approx(expected, rel=1e-3, abs=0.001), (source, value)
    return {source.partition(":")[0] for source, _ in page.numbers}


def _of_job(job: dict[str, Any], path: str) -> float:
    seconds = (datetime.fromisoformat(job["ended"]) - datetime.fromisoformat(job["started"])).total_seconds()
    derived = {
        "nodes, counted": len(job["nodes"]),
        "ended less started": seconds,
        "price_usd_per_hour over the time": seconds / 3600 * job["price_usd_per_hour"],
    }
    return float(derived[path] if path in derived else _at(job, path))


def _at(value: Any, path: str) -> Any:
    for name in re.findall(r"[^.\[\]]+", path):
        value = value[int(name)] if name.isdigit() else value[name]
    return value


def _of_metrics(rows: list[dict[str, Any]], path: str) -> float:
    name, _, key = path.partition(".")
    if not name.startswith("rank "):
        first = min(row["rank"] for row in rows if name in row)
        values = [row[name] for row in rows if name in row and row["rank"] == first]
        best = min(values) if name == "loss" else max(values)
        return float({"last": values[-1], "best": best}[key])
    of_rank = [row for row in rows if row["rank"] == int(name.removeprefix("rank "))]
    if key == "steps_per_second":
        return float((of_rank[-1]["step"] - of_rank[0]["step"]) / (of_rank[-1]["time"] - of_rank[0]["time"]))
    return float(of_rank[-1][key])


def _of_samples(folder: Path, path: str) -> float:
    rank, _, key = path.removeprefix("rank ").partition(".")
    files = [*folder.glob("logs/samples*.json"), *folder.glob(".awsddp/samples*.json")]
    samples = [json.loads(file.read_text())["ranks"] for file in files]
    (value,) = (row[key] for rows in samples for row in rows if row["rank"] == int(rank))
    return float(value)
