"""The script of a job as it lies here: whether it exists, how it resumes, its commit."""

import difflib
import os
import re
import subprocess
from pathlib import Path, PurePosixPath

from awsddp.errors import UsageError

_GIT_S = 2.0
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def check_script(workdir: Path, script: str, *, module: bool) -> None:
    """Raise UsageError for a script that the synced folder does not have.

    A module is refused where its package is there and lacks it; other packages may be those of the nodes.
    """
    pattern = _PLACEHOLDER.sub("*", script.replace("[", "[[]"))
    patterns = [pattern]
    if module:
        path = pattern.replace(".", "/")
        if not _any_file(workdir, f"{path.partition('/')[0]}/__init__.py"):
            return
        patterns = [f"{path}.*", f"{path}/*"]
    if not any(_any_file(workdir, one) for one in patterns):
        near = [] if module else near_files(workdir, script)
        raise UsageError(
            f"{'module' if module else 'script'} not found: {script}",
            f"searched in the synced folder, {workdir.resolve()}",
            f"did you mean {near[0]}?" if near else "name a file there, or set sync.workdir",
        )


def near_files(folder: Path, path: str) -> list[str]:
    """Return the file whose name is most like that of `path`, in the folder where it would be."""
    beside = (folder / path).parent
    try:
        files = {str(one.relative_to(folder)): one.name for one in beside.iterdir() if one.is_file()}
    except (OSError, ValueError):  # no such folder, or one elsewhere
        return []
    name = Path(path).name
    by_name = {text: file for file, text in files.items()}
    near = difflib.get_close_matches(name, by_name, n=1)
    near = near or [one for one in by_name if Path(one).stem == name]
    return [by_name[one] for one in near]


def _any_file(folder: Path, pattern: str) -> bool:
    """Return whether the name of a file in `folder` matches; False for a pattern that no name can match."""
    try:
        return not Path(pattern).is_absolute() and any(path.is_file() for path in folder.glob(pattern))
    except (OSError, ValueError, NotImplementedError):
        return False


def commit_of(workdir: Path, *, results: str) -> tuple[str | None, bool | None]:
    """Return the commit of `workdir`, and whether files differ from it (new ones count); None if unknown.

    Ignored files and the folder `results` do not count. Takes 2 s at most, and is silent without git, without
    a repository or without a commit.
    """
    argv = ["git", "-C", os.fspath(workdir), "status", "--porcelain=v2", "--branch", "--no-ahead-behind"]
    inside = not PurePosixPath(results).is_absolute() and ".." not in PurePosixPath(results).parts
    try:
        done = subprocess.run(
            [*argv, "--", ".", *([f":(exclude,literal){results}"] if inside else [])],
            capture_output=True,
            timeout=_GIT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    head, *rest = done.stdout.decode(errors="replace").splitlines()
    commit = head.removeprefix("# branch.oid ")
    return (None, None) if commit == "(initial)" else (commit, any(line[:1] != "#" for line in rest))
