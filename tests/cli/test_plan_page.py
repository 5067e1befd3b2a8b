"""The page of `awsddp plan`, and that of the offers."""

from dataclasses import replace
from typing import Any

import pytest

from awsddp.cli.plan_page import _node_text, offers_page, plan_page
from awsddp.plan.records import Facts
from tests.support.narrow_terminal import find_long_lines, set_width
from tests.support.plan_facts import DLAMI, FACTS
from tests.support.plan_facts import plan as planned
from tests.support.records import as_attributes


def test_a_plan_of_a_cluster_without_changes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    made = planned(nodes=1, instance_type="g6.48xlarge")
    plan_page(replace(made, exists=True))
    assert "nothing would change" in capsys.readouterr().out
    plan_page(made)
    assert "nothing would change" not in capsys.readouterr().out


ORDINARY = replace(
    FACTS,
    offers={**FACTS.offers, "g6.xlarge": ("us-east-1a", "us-east-1b"), "g6.2xlarge": ("us-east-1a",)},
)


REHEARSED = replace(ORDINARY, target="local", image=replace(DLAMI, tags={"awsddp:gpus": "rehearsed"}))


@pytest.mark.parametrize(
    ("facts", "cluster"),
    [
        (ORDINARY, {"instance_type": "g6.xlarge", "nodes": 2}),
        (ORDINARY, {"nodes": 2, "budget_usd": 20.0}),
        (ORDINARY, {"nodes": 4, "gpus": "L4", "spot": True}),
        (REHEARSED, {"nodes": 2}),
        (REHEARSED, {"nodes": 2, "budget_usd": 20.0}),
    ],
)
def test_a_plan_fits_one_screen_and_has_the_price_in_the_first_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, facts: Facts, cluster: dict[str, Any]
) -> None:
    monkeypatch.setattr("awsddp.cli.table.width", lambda stderr: 80)
    plan_page(planned(facts, **cluster))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 23  # and the prompt
    assert any(line.startswith("price") for line in lines[:4])
    first = [line.partition(" ")[0] for line in lines]
    assert first[:2] == ["cluster", "nodes"]
    assert not {"EFA", "placement"} & {*first}
    assert not any("(Running" in line and "L-" in line for line in lines)


def test_a_verbose_plan_shows_the_details(capsys: pytest.CaptureFixture[str]) -> None:
    plan_page(planned(ORDINARY, instance_type="g6.xlarge", nodes=2), verbose=True)
    shown = capsys.readouterr().out
    for detail in ("EFA ", "placement ", "L-DB2E81BA", "ami-0123456789abcdef0", "data transfer out"):
        assert detail in shown, detail


def test_offers_name_the_date_of_each_price(capsys: pytest.CaptureFixture[str]) -> None:
    def offer(name: str, usd: float | None, date: str) -> dict[str, Any]:
        fields = {"gpus_per_node": 1, "gpu": "L4", "fits_quota": True, "zones": ["us-east-1a"]}
        return {"instance_type": name, "price_usd_per_hour": usd, "price_date": date, **fields}

    header = {"region": "us-east-1", "nodes": 1, "price_source": "list price", "price_date": "2026-07-20"}
    offers = [offer("g6f.large", 0.2, "2026-02-09"), offer("g6.xlarge", 0.8, "2026-07-20")]
    offers_page(as_attributes({**header, "offers": [*offers, offer("g7.2xlarge", None, "2026-02-09")]}))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "us-east-1, list price, 2026-07-20; quota for 1 node:"
    assert last == "list price of 2026-02-09: g6f.large"


@pytest.mark.parametrize("facts", [ORDINARY, REHEARSED])
def test_an_unknown_price_is_shown_as_unknown(capsys: pytest.CaptureFixture[str], facts: Facts) -> None:
    offers = {**facts.offers, "p5e.48xlarge": ("us-east-1a",)}
    plan_page(planned(replace(facts, offers=offers), instance_type="p5e.48xlarge", nodes=1))
    [price] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("price")]
    assert price.split(maxsplit=1)[1] == ("free; on EC2 unknown" if facts is REHEARSED else "unknown")


def test_a_plan_of_a_type_without_gpus_says_so() -> None:
    machine = {"gpus": 0, "gpu": "", "memory_gb": 0, "vcpus": 2, "ram_gb": 8, "network": "<=10"}
    plan = {"kind": machine, "disk_gb": 200}
    assert _node_text(as_attributes(plan)) == "no GPU, 2 vCPUs, 8 GiB, <=10 Gbit/s, 200 GB disk"


@pytest.mark.parametrize("columns", [80, 60])
def test_a_plan_and_its_choices_fit(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_width(monkeypatch, columns)
    plan_page(planned(nodes=4, spot=True))
    assert find_long_lines(capsys.readouterr().out, columns) == []
