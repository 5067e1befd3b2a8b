"""The options of the verbs of jobs."""

from datetime import UTC, datetime

import pytest

from awsddp.cli.job import _parse_date
from awsddp.errors import UsageError


def test_a_date_is_parsed_as_utc_or_refused() -> None:
    assert _parse_date("2026-11-01") == datetime(2026, 11, 1, tzinfo=UTC) and _parse_date(None) is None
    assert _parse_date("2026-11-01T12:00") == datetime(2026, 11, 1, 12, tzinfo=UTC)
    with pytest.raises(UsageError, match="--since: invalid date '3'"):
        _parse_date("3")
