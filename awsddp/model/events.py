"""Progress of a verb."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Progress of a verb: `who` is at `text`: "node1", "" for what the verb does now, None for its messages.

    `fraction` of it is done; where it is a transfer, of `size` bytes.
    """

    text: str
    who: str | None = None
    fraction: float | None = None
    size: int | None = None


OnEvent = Callable[[Event], None]
