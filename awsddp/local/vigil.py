"""Ends a daemon that nobody asked for by name, once nothing lives in it and no client is there.

A client that is killed while it starts one leaves it behind: the client's own end would have stopped it. One
whose files were removed ends, too: no command finds it any more.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from awsddp.local.control import client_lock
from awsddp.local.place import Place

LOOK_S = 1.0


def start(
    place: Place, *, lives: Callable[[], bool], end: Callable[[], None], lost: Callable[[], None]
) -> None:
    """Looks from now on, in a thread of its own; `end` is called, once, while no client can come between.

    `lost` is called where the files were removed.
    """
    threading.Thread(target=_watch, args=(place, lives, end, lost), name="vigil", daemon=True).start()


def _watch(
    place: Place, lives: Callable[[], bool], end: Callable[[], None], lost: Callable[[], None]
) -> None:
    forsaken_since: float | None = None
    while True:
        time.sleep(LOOK_S)
        try:
            settings = json.loads(place.settings.read_text())
        except FileNotFoundError:
            lost()
            return
        if not settings["auto"] or lives() or not _nobody(place):
            forsaken_since = None
            continue
        forsaken_since = forsaken_since or time.monotonic()
        if time.monotonic() - forsaken_since < settings["patience_s"]:
            continue
        with suppress(BlockingIOError), client_lock(place, wait=False):
            if _nobody(place) and not lives():
                end()
                return


def _nobody(place: Place) -> bool:
    """Whether no client is there: each holds the file's lock, shared."""
    try:
        with place.presence.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
