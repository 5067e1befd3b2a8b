"""What --since takes."""

from datetime import datetime

import pytest

from awsddp.errors import UsageError
from awsddp.verbs.logs import moment

NOW = datetime(2026, 11, 21, 14, 0)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10m", datetime(2026, 11, 21, 13, 50)),
        ("90", datetime(2026, 11, 21, 13, 58, 30)),
        ("2d", datetime(2026, 11, 19, 14, 0)),
        ("13:30", datetime(2026, 11, 21, 13, 30)),
        ("14:30", datetime(2026, 11, 20, 14, 30)),
        ("13:30:05", datetime(2026, 11, 21, 13, 30, 5)),
        ("2026-11-20", datetime(2026, 11, 20)),
        ("2026-11-20T23:00", datetime(2026, 11, 20, 23, 0)),
        ("2026-11-20 23:00", datetime(2026, 11, 20, 23, 0)),
    ],
)
def test_since_is_a_duration_a_time_of_day_or_a_date(text: str, meant: datetime) -> None:
    assert moment(text, now=NOW) == meant


@pytest.mark.parametrize("text", ["", "soon", "-5m", "25:00", "2026-13-01", "9" * 30 + "d", "0001-01-01"])
def test_since_is_nothing_else(text: str) -> None:
    with pytest.raises(UsageError, match="--since"):
        moment(text, now=NOW)
