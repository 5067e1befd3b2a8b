"""The time that a node which shuts down has left, and how ranks and uploader share it."""

import math
import time
from pathlib import Path

import pytest

from awsddp.agent.messages import MAX_SHUTDOWN_GRACE
from awsddp.agent.shutdown import Shutdown, grace_at_shutdown, read_shutdown


def make_notice(in_s: float) -> Shutdown:
    return Shutdown("spot", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(math.ceil(time.time() + in_s))))


def test_reason_and_time_are_those_that_the_watchdog_recorded(tmp_path: Path) -> None:
    (tmp_path / "reason").write_text("spot 2026-11-23T20:30:00Z\n")
    assert read_shutdown(tmp_path / "reason") == ("spot", "2026-11-23T20:30:00Z")
    (tmp_path / "reason").write_text("expires\n")
    assert read_shutdown(tmp_path / "reason") == ("expires", "")
    assert read_shutdown(tmp_path / "none") == ("", "")


@pytest.mark.parametrize(
    ("in_s", "left_s"), [(100, 100), (40, 40), (3600, 120), (3, None), (0, None), (-500, None)]
)
def test_time_left_is_that_until_the_reclaim_unless_the_clock_must_be_wrong(
    in_s: float, left_s: float | None
) -> None:
    left = make_notice(in_s).seconds_left()
    assert left is left_s is None or left == pytest.approx(left_s, abs=1.5)


@pytest.mark.parametrize("at", ["", "soon", "2026-11-23"])
def test_time_that_cannot_be_read_is_not_known(at: str) -> None:
    assert Shutdown("spot", at).seconds_left() is None


@pytest.mark.parametrize(
    ("grace", "left_s", "saves", "expected"),
    [
        (30, None, False, 30),
        (900, None, True, 110),
        (30, 120, False, 110),  # at most what a shutdown waits for
        (30, 110, False, 105),
        (30, 120, True, 85),  # 5 s for the agents, 30 s for the uploader
        (60, 80, True, 60),  # a longer grace that was set takes from the uploader's share
        (30, 40, False, 35),
        (30, 40, True, 30),
        (1, 40, True, 25),
        (900, 40, False, 35),  # it cannot outlast the machine
        (0, 8, True, 1),
    ],
)
def test_grace_is_what_is_left_before_the_reclaim(
    grace: float, left_s: float | None, saves: bool, expected: float
) -> None:
    assert grace_at_shutdown(grace, left_s, saves=saves) == expected
    assert expected <= MAX_SHUTDOWN_GRACE
