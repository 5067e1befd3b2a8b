"""What happened, as figures and text."""

import json

from awsddp.report import json_lines, last_value, loss_plot


def test_whatever_a_program_writes_down_as_its_metrics_can_be_shown() -> None:
    rows = json_lines(
        '{"loss": 1, "step": "x"}\n{"loss": NaN}\n{"loss": 1e999, "accuracy": Infinity}\n[1]\nhalf {\n'
        f'{{"loss": 2, "step": {"9" * 400}, "accuracy": 0.5}}\n' + "[" * 100_000
    )
    assert [row.get("loss") for row in rows] == [1, None, None, 2]
    assert last_value(rows, "accuracy") == 0.5
    plot = loss_plot(rows, title="<loss>")
    assert plot is not None
    assert "<loss>" not in plot
    json.dumps(rows, allow_nan=False)
