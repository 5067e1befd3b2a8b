"""The plot of the loss."""

import re
from xml.etree import ElementTree

from awsddp.storage.loss_plot import plot_loss


def test_a_plot_has_eight_ranks_and_the_slowest_is_among_them() -> None:
    rows = [{"rank": rank, "step": step, "loss": 1 / step} for rank in range(12) for step in range(1, 2001)]
    svg = plot_loss(rows, title="loss", outlier=11)
    assert svg is not None
    assert re.findall(r"rank \d+", svg) == [f"rank {rank}" for rank in (*range(7), 11)]
    assert svg.count("<polyline") == 8
    assert len(svg) < 100_000


def test_a_plot_spans_its_points() -> None:
    svg = plot_loss([{"step": 10, "loss": 3.0}, {"step": 20, "loss": 1.0}], title="loss")
    assert svg is not None
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    (line,) = root.iter(f"{space}polyline")
    assert line.get("points") == "60.0,24.0 548.0,238.0"
    rows = [(text.text, text.get("x"), text.get("y")) for text in root.iter(f"{space}text")]
    assert {("1", "54", "242.0"), ("3", "54", "28.0"), ("10", "60", "256"), ("20", "548", "256")} <= set(rows)


def test_a_single_point_has_no_plot() -> None:
    assert plot_loss([{"loss": 1.0}], title="x") is None
    assert plot_loss([{"loss": 1.0}, {"accuracy": 1.0}], title="x") is None
