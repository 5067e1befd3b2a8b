"""The page of a job: its numbers are those of the files, and text of nodes is escaped."""

from typing import Any

import pytest

from awsddp.job.report import write_report as report
from tests.support.ended_cluster import CAUSE, HOSTILE, Home
from tests.support.numbers_of_a_page import Page, check


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"state": "failed", "cause": CAUSE},
        {"state": "failed", "cause": CAUSE | {"rank": None, "kind": "hang", "tail": [], "next": ""}},
        {"resumed": "before", "options": ["-o", "job.timeout=1h"], "dirty": True},
        {"slow": 0.5},
    ],
    ids=["good", "failed", "hung", "resumed", "slow"],
)
def test_every_number_on_the_page_is_in_the_files(home: Home, fields: dict[str, Any]) -> None:
    folder = home.job("one", 100, **fields)
    document = report(home.session(), job="one")
    assert document["page"] == str(folder / "report.html")
    html = (folder / "report.html").read_text()
    page = Page(html)
    assert check(page, folder) == {"job.json", "metrics", "samples"}
    assert document["slowest_rank"] == (3 if "slow" in fields else None)
    assert html.count("<td>slowest</td>") == ("slow" in fields)
    assert [number for number in page.numbers if number[0].endswith("cpu_percent")] == [
        (f"samples: rank {rank}.cpu_percent", "400.0" if rank == 3 else "98.5") for rank in range(4)
    ]
    assert "400% *</data>" in html
    cause = fields.get("cause")
    assert ("Why it failed" in html) == (cause is not None)
    assert document["measures"]["loss"] == {"last": 2.5 / 30, "best": 2.5 / 30}
    assert html.count("<svg") == 1 and html.count("<polyline") == 4
    assert document["job_usd"] == pytest.approx(23 / 3600 * 10.2, abs=0.0001)
    assert "$0.07</data>" in html


def test_the_page_names_the_checkpoint_and_the_option_that_resumes_it(home: Home) -> None:
    folder = home.job("one", 100, state="failed", cause=CAUSE)
    report(home.session(), job="one")
    assert "Checkpoint" not in (folder / "report.html").read_text()
    (folder / "node0" / "model.pt").write_bytes(b"x")
    checkpoint = report(home.session(), job="one").checkpoint
    assert checkpoint is not None and checkpoint.endswith("one/node0/model.pt")
    html = (folder / "report.html").read_text()
    assert f"<code>--resume one</code> continues from <code>{checkpoint}</code>" in html


def test_what_a_node_wrote_is_escaped_and_the_page_loads_nothing(home: Home) -> None:
    folder = home.job("one", 100, state="failed", cause=CAUSE, args=[HOSTILE], script=HOSTILE)
    report(home.session(), job="one")
    html = (folder / "report.html").read_text()
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert html.count("default-src &#39;none&#39;") + html.count("default-src 'none'") == 1
    for forbidden in ("\x1b", "\x07", "\u202e", "https://", "url(", "<script"):
        assert forbidden not in html
    assert "&lt;script&gt;" in html
    assert "red \\x1b]0;title\\x07 \\u202ebackwards" in html
