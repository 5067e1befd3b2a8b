"""The newest checkpoint among a job's results."""

from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".pt", ".pth", ".ckpt")
_DISTRIBUTED = ".metadata"
"""The file that torch.distributed.checkpoint writes last, on the node of its coordinator."""


def newest(results: Path) -> list[Path]:
    """Return the newest checkpoint of `results` (runs/JOB), a file or the parts of a folder, one per node.

    A file or folder run/latest counts before all others. Nodes share no file system: a folder of
    torch.distributed.checkpoint has files on each. Empty where there is none.
    """
    nodes = sorted(path for path in results.glob("node*") if path.is_dir())
    latest = [one for node in nodes if (one := _inside(node / "run" / "latest", results)) is not None]
    if not latest:
        latest = [found for node in nodes for found in _checkpoints(node)]
    if not latest:
        return []
    chosen = max(latest, key=_modified)
    if chosen.is_file():
        return [chosen]
    path = Path(*chosen.relative_to(results).parts[1:])
    return [node / path for node in nodes if (node / path).is_dir()]


def _inside(path: Path, results: Path) -> Path | None:
    """Return what `path` leads to, None where that is nothing, or outside of the results."""
    found = path.resolve()
    return found if found.exists() and found.is_relative_to(results.resolve()) else None


def _checkpoints(node: Path) -> Iterator[Path]:
    for path in node.rglob("*"):
        if path.name == _DISTRIBUTED and path.is_file():
            yield path.parent
        elif path.suffix in SUFFIXES and path.is_file() and not path.is_symlink():
            yield path


def _modified(path: Path) -> float:
    if path.is_file():
        return path.stat().st_mtime
    files = [one.stat().st_mtime for one in path.rglob("*") if one.is_file()]
    return max(files, default=0.0)
