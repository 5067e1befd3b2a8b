"""The wait for ranks under torch's elastic agent."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

SECONDS = 200.0


def wait_for_all(fleet: "Fleet") -> None:
    from tests.support.fleet import until

    until(fleet.up, seconds=SECONDS)
