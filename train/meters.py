"""What a run says and keeps: meters, metrics as JSON lines, configuration, versions, a plot of the loss."""

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


def run_folder() -> Path:
    """Return the folder that this run keeps its files in: $AWSDDP_RUN_DIR, or a new one under runs/."""
    return Path(os.environ.get("AWSDDP_RUN_DIR") or f"runs/local-{time.strftime('%Y%m%d-%H%M%S')}")


class Progress:
    """The meters of an epoch: time a batch, time waiting for data, loss, top-1, top-5.

    Loss and hits are summed on the device, and the host waits for the device only where they are read.
    """

    def __init__(self, device: torch.device, *, hits: bool) -> None:
        self.hits, self.device = hits, device
        self.begin()

    def begin(self) -> None:
        """Start an epoch."""
        self.window, self.epoch, self.last = ([torch.zeros((), device=self.device)] * 3 for _ in range(3))
        self.window_images = self.epoch_images = self.last_images = self.batches = 0
        self.data_s = self.data_total_s = self.batch_s = 0.0
        self.started = self.window_started = self.mark = time.perf_counter()

    def data_ready(self) -> None:
        """The batch is here: what follows is work."""
        self.data_s = time.perf_counter() - self.mark
        self.data_total_s += self.data_s

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Take in the mean `loss` of a batch, and with `hits` how often `logits` [B, classes] were right."""
        self.last_images = len(labels)
        self.last = [loss.detach() * self.last_images]
        if self.hits:
            found = logits.detach().topk(5).indices == labels[:, None]
            self.last += [found[:, 0].sum(), found.sum()]
        self.window = [total + new for total, new in zip(self.window, self.last, strict=False)]
        self.window_images += self.last_images

    def batch_done(self) -> None:
        """The batch is over."""
        now = time.perf_counter()
        self.batch_s, self.mark = now - self.mark, now
        self.batches += 1

    def row(self) -> dict[str, float]:
        """Return the means over all ranks since the last call, and images a second. A collective call."""
        sums = torch.stack([*self.window, torch.tensor(float(self.window_images), device=self.device)])
        dist.all_reduce(sums)
        *values, images = sums.tolist()
        seconds = time.perf_counter() - self.window_started
        self.epoch = [total + new for total, new in zip(self.epoch, self.window, strict=False)]
        self.epoch_images += self.window_images
        self.window = [torch.zeros((), device=self.device)] * 3
        self.window_images, self.window_started = 0, time.perf_counter()
        names = ("loss", "train_top1", "train_top5") if self.hits else ("loss",)
        means = {name: value / max(1, images) for name, value in zip(names, values, strict=False)}
        return {**means, "images_per_second": round(images / seconds, 1)}

    def line(self) -> str:
        """Return this rank's own meters: the last batch, and in brackets the epoch so far."""
        mean_s = (time.perf_counter() - self.started) / max(1, self.batches)
        line = f"Time {self.batch_s:.3f} ({mean_s:.3f})"
        line += f"  Data {self.data_s:.4f} ({self.data_total_s / max(1, self.batches):.4f})"
        images = self.epoch_images + self.window_images
        for name, last, before, now in zip(
            ("Loss", "Prec@1", "Prec@5"), self.last, self.epoch, self.window, strict=False
        ):
            line += f"  {name} {float(last) / self.last_images:.4f} ({float(before + now) / images:.4f})"
        return line


class Metrics:
    """Appends rows to metrics.jsonl in `folder`, each written through at once so that a crash loses none.

    Rank 0 keeps one; elsewhere `folder` is None and nothing is written.
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
        """Return the rows that are whole."""
        if self.path is None or not self.path.exists():
            return []
        return [
            json.loads(line)
            for line in self.path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def forget_after(self, step: int) -> None:
        """Drop the rows past `step`: a resumed run writes them again."""
        if self.path and self.path.exists():
            kept = [row for row in self.rows() if row["step"] <= step]
            aside = self.path.with_suffix(".aside")
            aside.write_text("".join(json.dumps(row) + "\n" for row in kept))
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


def draw(rows: list[dict[str, Any]], path: Path, *, title: str, width: int = 640, height: int = 360) -> None:
    """Write the loss over the steps of `rows` as an SVG, with the held-out accuracy where there is one."""
    loss = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    accuracy = [(row["step"], row["accuracy"]) for row in rows if "accuracy" in row]
    if not loss:
        return
    right, top = max(step for step, _ in loss), max(value for _, value in loss) or 1.0

    def line(points: list[tuple[int, float]], high: float, colour: str) -> str:
        spots = (
            f"{40 + (width - 60) * x / right:.1f},{height - 30 - (height - 60) * y / high:.1f}"
            for x, y in points
        )
        return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(spots)}"/>'

    def text(x: float, y: float, words: str, colour: str = "#444") -> str:
        return f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="12" fill="{colour}">{words}</text>'

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
