"""Waits for ranks that torch's elastic agent starts."""

from typing import TYPE_CHECKING

from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

SECONDS = 200.0


def wait_for_all(fleet: "Fleet") -> None:
    until(fleet.ranks_are_up, seconds=SECONDS)
