"""Rows of metrics, valid or not."""

from awsddp.job.report_page import summarize_metrics
from awsddp.model.metric_rows import as_number, parse_json_lines, read_last_value
from awsddp.storage.loss_plot import plot_loss


def test_the_loss_of_a_job_is_that_of_its_lowest_rank() -> None:
    rows = [
        {"rank": 0, "loss": 3.0},
        {"rank": 1, "loss": 1.0},
        {"rank": 0, "loss": 2.0},
        {"rank": 1, "loss": 0.5},
    ]
    assert (
        summarize_metrics(rows)["loss"] == {"last": 2.0, "best": 2.0} and read_last_value(rows, "loss") == 2.0
    )
    others = [{"rank": 3, "loss": 7.0}, {"rank": 2, "loss": 6.0}, {"rank": 0, "step": 1}]
    assert read_last_value(others, "loss") == 6.0, "rank 0 writes none"
    assert read_last_value([{"loss": 4.0}, {"rank": 1, "loss": 5.0}], "loss") == 4.0


def test_invalid_rows_of_metrics_are_ignored() -> None:
    rows = parse_json_lines(
        '{"loss": 1, "step": "x"}\n{"loss": NaN}\n{"loss": 1e999, "accuracy": Infinity}\n[1]\nhalf {\n'
        f'{{"loss": 2, "step": {"9" * 400}, "accuracy": 0.5}}\n'
        + "[" * 100_000
        + '\n{"loss": 1e300, "rank": "x"}'
    )
    assert [as_number(row.get("loss")) for row in rows] == [1, None, None, 2, None]
    assert read_last_value(rows, "accuracy") == 0.5
    assert summarize_metrics(rows) == {"loss": {"last": 2, "best": 1}, "accuracy": {"last": 0.5, "best": 0.5}}
    plot = plot_loss(rows, title="<loss>")
    assert plot is not None
    assert "<loss>" not in plot
