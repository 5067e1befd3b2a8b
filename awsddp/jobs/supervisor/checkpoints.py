"""What a checkpoint is, on a node and at home: a file, or a folder that one file marks."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SUFFIXES = (".pt", ".pth", ".ckpt")
MARKS = (".metadata", "trainer_state.json")
"""Files that make their folder a checkpoint, of torch.distributed.checkpoint and Hugging Face's Trainer: one
node writes them, as the last."""


def is_whole(path: Path) -> bool:
    """Tell whether the end of a file of torch.save was written: a rank may be killed while it saves.

    Raises OSError.
    """
    with path.open("rb") as file:
        begin = file.read(4)
    return begin != b"PK\x03\x04" or zipfile.is_zipfile(str(path))
