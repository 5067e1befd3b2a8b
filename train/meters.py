"""What a run keeps of itself: metrics as JSON lines, its configuration and the versions it ran with."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def run_folder() -> Path:
    """Return the folder that this run keeps its files in: $AWSDDP_RUN_DIR, or a new one under runs/."""
    return Path(os.environ.get("AWSDDP_RUN_DIR") or f"runs/local-{time.strftime('%Y%m%d-%H%M%S')}")


class Metrics:
    """Appends rows to metrics.jsonl in `folder`, each written through at once so that a crash loses none.

    Rank 0 keeps one; elsewhere `folder` is None and nothing is written.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / "metrics.jsonl" if folder else None

    def write(self, **row: Any) -> None:
        """Append one row."""
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the rows past `step`: a resumed run writes them again."""
        if self.path and self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            aside = self.path.with_suffix(".aside")
            aside.write_text("".join(kept))
            aside.replace(self.path)


def write_config(folder: Path, settings: Mapping[str, Any], *, device: torch.device) -> None:
    """Write config.json: the settings and what they ran on."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "machine": platform.platform(),
    }
    text = json.dumps({"settings": dict(settings), "versions": versions}, indent=2, default=str)
    (folder / "config.json").write_text(text + "\n")
