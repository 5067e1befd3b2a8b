"""Find the newest checkpoint in fetched results, and stage it for the nodes."""

import contextlib
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from awsddp.agent.s3.checkpoints import (
    LATEST,
    CheckpointPath,
    checkpoint_sort_key,
    find_checkpoints,
    find_flaw,
)

_SHARD = re.compile(rb"__\d+_\d+\.distcp")
"""The names of torch.distributed.checkpoint's files; .metadata names all files of its checkpoint."""
_OPTIMIZER_STATES = "_optim_states.pt"
"""With ZeRO, DeepSpeed writes one such file per rank."""


def find_newest_checkpoint(results: Path, *, world_size: int | None = None) -> "Checkpoint | None":
    """Return the checkpoint in `results` (runs/JOB) to resume from, or None if there is no checkpoint.

    agent/s3/checkpoints.py decides which files are checkpoints and which one is the newest. Nodes share no
    file system, so a checkpoint folder's files may be on several nodes. A checkpoint that lacks the files of
    a node is left out. DeepSpeed's checkpoints do not name their files; with `world_size`, those with fewer
    optimizer states than ranks are left out.
    """
    job, results = results.name, results.resolve()
    nodes = sorted(path for path in results.glob("node*") if path.is_dir())
    by_path: defaultdict[str, list[Path]] = defaultdict(list)
    for node in nodes:
        for path in node.rglob("*"):
            if path.is_file() and not path.is_symlink():
                by_path[path.relative_to(node).as_posix()].append(path)
    links = [link for node in nodes if (link := node / LATEST).is_symlink()]
    targets = [link.resolve() for link in links]
    targets = [target for target in targets if target.is_relative_to(results)]
    named = {"/".join(target.relative_to(results).parts[1:]) for target in targets}
    best: tuple[tuple[bool, bool, float], Checkpoint] | None = None
    for match, paths in find_checkpoints(by_path, named).items():
        files_of = [path for name in paths for path in by_path[name]]
        for checkpoint, files in _make_checkpoints(job, results, match, files_of):
            flaws = {path: find_flaw(path, path.as_posix()) for path in _metadata_files(match, files)}
            if "torn" in flaws.values() and not match.trees:
                continue
            if match.trees and _lacks_files(files, world_size):
                continue
            modified = max(path.stat().st_mtime for path in files)
            key = checkpoint_sort_key(
                match.name, modified, is_weights="weights" in flaws.values(), named=named
            )
            if best is None or key >= best[0]:
                best = key, replace(checkpoint, modified=modified)
    return best[1] if best else None


def _lacks_files(files: Sequence[Path], world_size: int | None) -> bool:
    """Return True if a checkpoint folder lacks files, for example those of a lost node.

    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """
    names = {path.name for path in files}
    for path in files:
        if path.name == ".metadata" and {text.decode() for text in _SHARD.findall(path.read_bytes())} - names:
            return True
    states = sum(name.endswith(_OPTIMIZER_STATES) for name in names)
    return 0 < states < (world_size or 0)


def _make_checkpoints(
    job: str, results: Path, match: CheckpointPath, files: list[Path]
) -> Iterator[tuple["Checkpoint", list[Path]]]:
    """Yield each checkpoint with its files. Either each file is a checkpoint, or the files of all nodes
    together are one checkpoint folder."""
    if not match.trees:
        for path in files:
            yield Checkpoint(job=job, parts=(path,)), [path]
        return
    tops = sorted({results / path.relative_to(results).parts[0] / match.name for path in files})
    yield Checkpoint(job=job, parts=tuple(tops), members=frozenset(files)), files


def _metadata_files(match: CheckpointPath, files: Iterable[Path]) -> list[Path]:
    """Return a checkpoint's files that describe its content."""
    return [path for path in files if not match.trees or path.as_posix().endswith(f"/{match.name}/.metadata")]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A job's checkpoint: a file, or a folder that is divided among the nodes.

    `parts` has the path of the file, or the folder's path in each node's results. `members` has the files in
    a folder. `modified` is when its newest file was written (Unix time, by the node's clock), and `run_id` is
    the id of the job's run (None: the job's record is missing).
    """

    job: str
    parts: tuple[Path, ...]
    members: frozenset[Path] = frozenset()
    modified: float = 0.0
    run_id: str | None = None

    @property
    def name(self) -> str:
        """The file or folder name within `folder` on a node."""
        return self.parts[0].name

    @property
    def display_path(self) -> str:
        """The path to show to the user."""
        return str(self.parts[0])

    @property
    def folder(self) -> str:
        """The folder on a node that receives the checkpoint, next to the project folder."""
        return f"resume-{self.job}"

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """Yield a temporary folder that contains only the checkpoint, made of hard links where possible."""
        import tempfile

        parent = self.parts[0].parent
        with tempfile.TemporaryDirectory(dir=parent, prefix=".resume-") as folder:
            for part in self.parts:
                for path in self.members or self.parts:
                    if path.is_relative_to(part):
                        target = Path(folder, self.name, path.relative_to(part))
                        target.parent.mkdir(parents=True, exist_ok=True)
                        _link(path, target)
            yield Path(folder)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or a file system without hard links
        shutil.copy2(source, target)
