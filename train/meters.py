"""An epoch's meters, and a run's files: metrics.jsonl, config.json and a plot of the loss."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def results_folder() -> Path:
    """Return the folder for this run's files: $AWSDDP_RUN_DIR, or a new folder in runs/."""
    return Path(os.environ.get("AWSDDP_RUN_DIR") or f"runs/local-{time.strftime('%Y%m%d-%H%M%S')}")


def count_hits(logits: Tensor, labels: Tensor) -> list[Tensor]:
    """Return how many labels are the top class in `logits` [B, classes], and how many are in the top 5."""
    hits = logits.topk(5).indices == labels[:, None]
    return [hits[:, 0].sum(), hits.sum()]


class Meters:
    """An epoch's meters: time per batch, time spent waiting for data, loss and, optionally, accuracy.

    If `accuracy` is set, top-1 and top-5 accuracy are measured. Sums stay on the device until they are read,
    because each .item() would wait for the GPU. A window consists of the batches since the last row in
    metrics.jsonl.
    """

    def __init__(self, device: torch.device, *, accuracy: bool) -> None:
        self.device = device
        self.names = ("loss", "train_top1", "train_top5") if accuracy else ("loss",)
        self.start_epoch()

    def start_epoch(self) -> None:
        """Reset all meters."""
        self.batch_sums, self.window_sums, self.epoch_sums = self._zeros(), self._zeros(), self._zeros()
        self.batch_images = self.window_images = self.epoch_images = self.batches = 0
        self.data_s = self.data_total_s = self.batch_s = 0.0
        self.epoch_start = self.window_start = self.batch_start = time.perf_counter()

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros((), device=self.device)] * len(self.names)

    def data_ready(self) -> None:
        """Record how long this process waited for the batch."""
        self.data_s = time.perf_counter() - self.batch_start
        self.data_total_s += self.data_s

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch's mean `loss` and, if accuracy is measured, its hits."""
        self.batch_images = len(labels)
        self.batch_sums = [loss.detach() * self.batch_images]
        if len(self.names) > 1:
            self.batch_sums += count_hits(logits.detach(), labels)
        self.window_sums = _add(self.window_sums, self.batch_sums)
        self.window_images += self.batch_images

    def batch_done(self) -> None:
        """Record how long the batch took, including the wait for it."""
        now = time.perf_counter()
        self.batch_s, self.batch_start = now - self.batch_start, now
        self.batches += 1

    def means(self) -> dict[str, float]:
        """Return the window's means over all ranks, and the images per second. This is a collective call."""
        sums = torch.stack([*self.window_sums, torch.tensor(float(self.window_images), device=self.device)])
        dist.all_reduce(sums)
        *totals, images = sums.tolist()
        seconds = time.perf_counter() - self.window_start
        self.epoch_sums = _add(self.epoch_sums, self.window_sums)
        self.epoch_images += self.window_images
        self.window_sums, self.window_images, self.window_start = self._zeros(), 0, time.perf_counter()
        means = {name: total / max(1, images) for name, total in zip(self.names, totals, strict=True)}
        return {**means, "images_per_second": round(images / seconds, 1)}

    def line(self) -> str:
        """Return this rank's meters as a line: for the last batch and, in brackets, for the epoch so far."""
        count, images = max(1, self.batches), self.epoch_images + self.window_images
        line = f"Time {self.batch_s:.3f} ({(time.perf_counter() - self.epoch_start) / count:.3f})"
        line += f"  Data {self.data_s:.4f} ({self.data_total_s / count:.4f})"
        totals = _add(self.epoch_sums, self.window_sums)
        for name, value, total in zip(("Loss", "Prec@1", "Prec@5"), self.batch_sums, totals, strict=True):
            line += f"  {name} {float(value) / self.batch_images:.4f} ({float(total) / images:.4f})"
        return line


def _add(sums: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    return [total + value for total, value in zip(sums, more, strict=True)]


class Metrics:
    """Appends each row to metrics.jsonl in `folder` at once, so that a crash loses no row.

    Only rank 0 writes: on other ranks `folder` is None and nothing is written.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / "metrics.jsonl" if folder else None
        self.started = time.perf_counter()

    def write(self, **row: Any) -> None:
        """Append a row, with the seconds since the start and the time of day."""
        if self.path:
            row["seconds"] = round(time.perf_counter() - self.started, 3)
            row["time"] = round(time.time(), 3)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Return the complete rows. A last row that a crash has truncated is omitted."""
        if self.path is None or not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def drop_after(self, step: int) -> None:
        """Remove the rows after `step`, because a resumed run writes them again."""
        if self.path and self.path.exists():
            rows = [row for row in self.rows() if row["step"] <= step]
            aside = self.path.with_suffix(".aside")
            aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
            aside.replace(self.path)


def write_config(folder: Path, settings: Mapping[str, Any], *, device: torch.device) -> None:
    """Create `folder` and, in it, config.json with the settings and the software versions used."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "machine": platform.platform(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"settings": dict(settings), "versions": versions}, indent=2, default=str)
    (folder / "config.json").write_text(text + "\n")


def draw(rows: list[dict[str, Any]], path: Path, *, title: str, width: int = 640, height: int = 360) -> None:
    """Write an SVG to `path`: the loss over the steps of `rows` and, if measured, the held-out accuracy."""
    loss = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    accuracy = [(row["step"], row["accuracy"]) for row in rows if "accuracy" in row]
    if not loss:
        return
    right, top = max(step for step, _ in loss), max(value for _, value in loss) or 1.0

    def line(points: list[tuple[int, float]], high: float, colour: str) -> str:
        coordinates = " ".join(
            f"{40 + (width - 60) * x / right:.1f},{height - 30 - (height - 60) * y / high:.1f}"
            for x, y in points
        )
        return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{coordinates}"/>'

    def text(x: float, y: float, content: str, colour: str = "#444") -> str:
        font = 'font-family="sans-serif" font-size="12"'
        return f'<text x="{x}" y="{y}" {font} fill="{colour}">{content}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" style="background:#fff">',
        f'<path d="M40 {height - 30}H{width - 20}M40 30V{height - 30}" stroke="#999" fill="none"/>',
        line(loss, top, "#c03030"),
        line(accuracy, 1.0, "#3060c0"),
        text(40, 20, title),
        text(4, 34, f"{top:.3g}"),
        text(28, height - 30, "0"),
        text(width - 60, height - 12, f"{right} steps"),
        text(width - 220, 20, "loss", "#c03030"),
        text(width - 180, 20, f"held-out accuracy {accuracy[-1][1]:.4f}" if accuracy else "", "#3060c0"),
        "</svg>",
    ]
    path.write_text("\n".join(parts) + "\n")
