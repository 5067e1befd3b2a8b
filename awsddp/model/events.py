"""The progress that a verb reports."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """A progress report. `who` is a node ("node1"), "" for the current step of the verb, None for a message.

    `text` describes the progress, of which `fraction` is done; `size` is the total size of a transfer in
    bytes.
    """

    text: str
    who: str | None = None
    fraction: float | None = None
    size: int | None = None


OnEvent = Callable[[Event], None]
