"""One clock for the cloud and all commands, which only sleeping moves."""

import mmap
import struct
import time
from datetime import UTC, datetime, timedelta
from typing import Any

FASTER = 200
SLEEP = time.sleep


class Clock:
    """A clock of several processes, which only sleeping moves."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, 8)

    def read(self) -> float:
        """Return the seconds that all processes slept."""
        return float(struct.unpack("d", self._page[:])[0])

    def sleep(self, seconds: float) -> None:
        """Move the clock and sleep 1/FASTER of the time; threads that sleep at once move the clock once."""
        end = self.read() + seconds
        SLEEP(seconds / FASTER)
        self.move(max(end, self.read()))

    def move(self, seconds: float) -> None:
        """Set what `read` returns."""
        self._page[:] = struct.pack("d", seconds)

    def now(self, zone: Any = UTC) -> datetime:
        """Return the time of day of this clock."""
        return datetime.now(zone) + timedelta(seconds=self.read())
