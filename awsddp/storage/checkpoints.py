"""The newest checkpoint among the results here."""

import contextlib
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from awsddp.agent.s3.checkpoints import LATEST, Found, find_checkpoints, flaw_of, worth


def newest_checkpoint(results: Path) -> "Checkpoint | None":
    """Return the checkpoint of `results` (runs/JOB) to resume, None without one (agent/s3/checkpoints.py).

    Nodes share no file system: a folder may have files on each.
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
    named = {"/".join(one.relative_to(results).parts[1:]) for one in targets if one.is_relative_to(results)}
    best: tuple[tuple[bool, bool, float], Checkpoint] | None = None
    for one, paths in find_checkpoints(by_path, named).items():
        files_of = [path for name in paths for path in by_path[name]]
        for made, files in _made(job, results, one, files_of):
            flaws = {path: flaw_of(path, path.as_posix()) for path in _described(one, files)}
            if "torn" in flaws.values() and not one.trees:
                continue
            modified = max(path.stat().st_mtime for path in files)
            key = worth(one.name, modified, is_weights="weights" in flaws.values(), named=named)
            if best is None or key >= best[0]:
                best = key, made
    return best[1] if best else None


def _made(
    job: str, results: Path, one: Found, files: list[Path]
) -> Iterator[tuple["Checkpoint", list[Path]]]:
    """Yield a checkpoint with its files: of a file those of each node, of a folder all nodes together."""
    if not one.trees:
        for path in files:
            yield Checkpoint(job=job, parts=(path,)), [path]
        return
    tops = sorted({results / path.relative_to(results).parts[0] / one.name for path in files})
    yield Checkpoint(job=job, parts=tuple(tops), members=frozenset(files)), files


def _described(one: Found, files: Iterable[Path]) -> list[Path]:
    """Return the files of a checkpoint that say what it holds."""
    return [path for path in files if not one.trees or path.as_posix().endswith(f"/{one.name}/.metadata")]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint of the job `job`: a file, or the parts of a folder that its nodes have, with its files."""

    job: str
    parts: tuple[Path, ...]
    members: frozenset[Path] = frozenset()

    @property
    def name(self) -> str:
        """Its name in the folder `folder` on a node."""
        return self.parts[0].name

    @property
    def shown(self) -> str:
        """Where it is, as it is told."""
        return str(self.parts[0])

    @property
    def folder(self) -> str:
        """The folder beside the synced one that holds it on a node."""
        return f"resume-{self.job}"

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield a folder that holds it alone, for as long as the context; files are linked, not copied."""
        import tempfile

        beside = self.parts[0].parent
        with tempfile.TemporaryDirectory(dir=beside, prefix=".resume-") as folder:
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
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
