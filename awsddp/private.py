"""Folders and files that their owner alone can read, whatever the umask is."""

import os
from pathlib import Path
from typing import IO


def make_folder(path: Path) -> None:
    """Make a folder and what is missing above it, each 0700: mkdir's own mode is for the last one alone.

    One that exists keeps its mode. Raises OSError.
    """
    for folder in reversed((path, *path.parents)):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def open_to_append(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """Open a file to read and append; one that is made is 0600. `buffering` as of open(). Raises OSError."""
    return open(path, "a+b", buffering, opener=_opened)


def _opened(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)
