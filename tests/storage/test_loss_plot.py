"""The loss, drawn."""

import re
from xml.etree import ElementTree

from awsddp.storage.loss_plot import plot_loss


def test_plot_has_a_line_for_each_of_eight_ranks_and_the_slowest_is_among_them() -> None:
    rows = [{"rank": rank, "step": step, "loss": 1 / step} for rank in range(12) for step in range(1, 2001)]
    drawn = plot_loss(rows, title="loss", outlier=11)
    assert drawn is not None
    assert re.findall(r"rank \d+", drawn) == [f"rank {rank}" for rank in (*range(7), 11)]
    assert drawn.count("<polyline") == 8
    assert len(drawn) < 100_000


def test_plot_spans_its_points() -> None:
    drawn = plot_loss([{"step": 10, "loss": 3.0}, {"step": 20, "loss": 1.0}], title="loss")
    assert drawn is not None
    picture = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    (line,) = picture.iter(f"{space}polyline")
    assert line.get("points") == "60.0,24.0 548.0,238.0"
    said = [(text.text, text.get("x"), text.get("y")) for text in picture.iter(f"{space}text")]
    assert {("1", "54", "242.0"), ("3", "54", "28.0"), ("10", "60", "256"), ("20", "548", "256")} <= set(said)


def test_one_point_is_no_plot() -> None:
    assert plot_loss([{"loss": 1.0}], title="x") is None
    assert plot_loss([{"loss": 1.0}, {"accuracy": 1.0}], title="x") is None
