"""What happened, as figures and text."""

import json
import re

from awsddp.page import loss_plot, plots
from awsddp.report import json_lines, last_value


def test_whatever_a_program_writes_down_as_its_metrics_can_be_shown() -> None:
    rows = json_lines(
        '{"loss": 1, "step": "x"}\n{"loss": NaN}\n{"loss": 1e999, "accuracy": Infinity}\n[1]\nhalf {\n'
        f'{{"loss": 2, "step": {"9" * 400}, "accuracy": 0.5}}\n'
        + "[" * 100_000
        + '\n{"loss": 1e300, "rank": "x"}'
    )
    assert [row.get("loss") for row in rows] == [1, None, None, 2, 1e300]
    assert last_value(rows, "accuracy") == 0.5
    plot = loss_plot(rows, title="<loss>")
    assert plot is not None
    assert "<loss>" not in plot
    json.dumps(rows, allow_nan=False)


def test_plot_has_a_line_for_each_of_eight_ranks_and_the_slowest_is_among_them() -> None:
    rows = [
        {"rank": rank, "step": step, "loss": 1 / step, "time": float(step)}
        for rank in range(12)
        for step in range(1, 2001)
    ]
    drawn = plots(rows, outlier=11)
    assert list(drawn) == ["Loss", "Steps per second"]
    assert re.findall(r"rank \d+", drawn["Loss"]) == [f"rank {rank}" for rank in (*range(7), 11)]
    assert all(len(svg) < 100_000 for svg in drawn.values())
    assert "<script" not in drawn["Loss"]


def test_one_point_is_no_plot() -> None:
    assert loss_plot([{"loss": 1.0}], title="x") is None
    assert plots([{"loss": 1.0}, {"accuracy": 1.0}]) == {}
