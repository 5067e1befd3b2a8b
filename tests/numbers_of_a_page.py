"""Finds every number of a report page again: in job.json, the metrics, the ledger, the calls or the disk.

On a page a number stands in `<data value="V" title="SOURCE">`; text outside of `<data>`, `<time>`, `<code>`,
`<pre>` and drawings has no digit.
"""

import json
import re
from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from awsddp import billing

_QUOTED = {"time", "code", "pre", "svg", "style", "title"}


class Page(HTMLParser):
    """The numbers of a page, as (source, value), its times, and the text that has no source."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, str]] = []
        self.times: list[str] = []
        self.bare = ""
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.tags.append(tag)
        if tag in _QUOTED or tag == "data":
            self._open.append(tag)
        if tag == "data":
            self.numbers.append((given["title"], given["value"]))
        if tag == "time":
            self.times.append(given["datetime"])

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[-1]:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self.bare += "" if self._open else data


def moments(folder: Path, ledger: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[datetime]:
    """Return every moment that the files name, and the ends that follow from them."""
    job = json.loads((folder / "job.json").read_text())
    found = [datetime.fromisoformat(row[key]) for row in ledger for key in ("time", "at") if key in row]
    for call in calls:
        at = datetime.fromisoformat(call["at"])
        found += [at, at + timedelta(seconds=call["seconds"])]
    started = datetime.fromisoformat(job["started"])
    return [*found, started, *(started + timedelta(seconds=rank["seconds"]) for rank in job["ranks"])]


def check(page: Page, document: dict[str, Any], folder: Path, cluster: Path) -> set[str]:
    """Assert that each number is what its source says; return the kinds of sources that were seen.

    `folder` is runs/JOB, `cluster` the folder with the ledger and the calls.
    """
    job = json.loads((folder / "job.json").read_text())
    ledger, calls = (
        [json.loads(line) for line in (cluster / name).read_text().splitlines()]
        for name in ("ledger.jsonl", "calls.jsonl")
    )
    rows = [
        json.loads(line)
        for node in sorted({rank["node"] for rank in job["ranks"]})
        for file in folder.glob(f"node{node}/run/metrics.jsonl")
        for line in file.read_text().splitlines()
    ]
    known = moments(folder, ledger, calls)
    made = datetime.fromisoformat(document["made"])
    first = datetime.fromisoformat(document["timeline_from"])
    assert not re.search(r"\d", page.bare), re.findall(r".*\d.*", page.bare)
    for text in page.times:
        assert any(abs((one - datetime.fromisoformat(text)).total_seconds()) < 1 for one in (made, *known)), (
            text
        )
    for source, value in page.numbers:
        kind, _, rest = source.partition(": ")
        match kind:
            case "job.json":
                expected = _of_job(job, rest)
            case "metrics":
                expected = _of_metrics(rows, rest)
            case "ledger":
                expected = _of_ledger(ledger, rest, made)
            case "timeline":
                expected = len(document["timeline"]) if rest == "calls" else float(value)
                if rest == "calls":
                    expected = sum(step["who"] == "AWS" for step in document["timeline"])
            case _:
                expected = _of_document(document, folder, kind)
        assert float(value) == pytest.approx(expected, rel=1e-3, abs=0.001), (source, value)
    for step in document["timeline"]:
        for moment in (step["start_s"], step["end_s"]):
            if moment is not None:
                at = first + timedelta(seconds=moment)
                assert any(abs((one - at).total_seconds()) < 1.001 for one in known), step
    return {re.split(r"[:\[]", source)[0] for source, _ in page.numbers}


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
    name, _, what = path.partition(".")
    if not name.startswith("rank "):
        values = [row[name] for row in rows if name in row]
        return float(
            {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)}[what]
        )
    own = [row for row in rows if row["rank"] == int(name.removeprefix("rank "))]
    if what == "steps_per_second":
        return float((own[-1]["step"] - own[0]["step"]) / (own[-1]["time"] - own[0]["time"]))
    return float(own[-1][what])


def _of_ledger(rows: list[dict[str, Any]], path: str, made: datetime) -> float:
    bill = billing.account(rows, made)
    assert bill is not None
    assert bill.cost_usd is not None
    return bill.cost_usd if path == "cluster_usd" else bill.parts_usd[path.removesuffix("_usd")]


def _of_document(document: dict[str, Any], folder: Path, path: str) -> float:
    if path.startswith("timeline"):
        step = _at(document, path.partition(".")[0])
        if path.endswith("end_s less start_s"):
            return float(step["end_s"] - step["start_s"])
        return float(step["start_s"])
    if path.startswith("files["):
        return (folder / _at(document, path)[0]).stat().st_size
    if path.startswith("excerpts["):
        one = _at(document, path.partition(".")[0])
        log = (folder / "logs" / f"rank{one['rank']}.log").read_text(errors="replace")
        assert all(line in log for line in one["lines"])
        return float(_at(document, path))
    raise AssertionError(f"a number without a source: {path}")
