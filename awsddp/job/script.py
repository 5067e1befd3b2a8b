"""A job's local script: check that it exists, find similar names, read its commit."""

import difflib
import os
import re
import subprocess
from pathlib import Path, PurePosixPath

from awsddp.errors import UsageError

_GIT_S = 2.0
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def check_script(workdir: Path, script: str, *, module: bool) -> None:
    """Raise UsageError if the project folder does not have the script.

    A module is refused only if the project folder has the module's package, but not the module, because the
    nodes may have packages that are not in the project folder.
    """
    pattern = _PLACEHOLDER.sub("*", script.replace("[", "[[]"))
    patterns = [pattern]
    if module:
        path = pattern.replace(".", "/")
        if not _any_file(workdir, f"{path.partition('/')[0]}/__init__.py"):
            return
        patterns = [f"{path}.*", f"{path}/*"]
    if not any(_any_file(workdir, alternative) for alternative in patterns):
        near = [] if module else find_similar_files(workdir, script)
        raise UsageError(
            f"{'module' if module else 'script'} not found: {script}",
            f"searched in the project folder, {workdir.resolve()}",
            f"did you mean {near[0]}?" if near else "name a file there, or set sync.workdir",
        )


def find_similar_files(folder: Path, path: str) -> list[str]:
    """Return the file with the most similar name in the parent folder of `path`, or [] if there is none."""
    parent = (folder / path).parent
    try:
        by_name = {file.name: str(file.relative_to(folder)) for file in parent.iterdir() if file.is_file()}
    except (OSError, ValueError):  # no such folder, or a folder outside the project
        return []
    name = Path(path).name
    near = difflib.get_close_matches(name, by_name, n=1)
    near = near or [file for file in by_name if Path(file).stem == name]
    return [by_name[file] for file in near]


def _any_file(folder: Path, pattern: str) -> bool:
    """Return True if a file in `folder` matches `pattern`, and False if `pattern` is invalid."""
    try:
        return not Path(pattern).is_absolute() and any(path.is_file() for path in folder.glob(pattern))
    except (OSError, ValueError, NotImplementedError):
        return False


def read_commit(workdir: Path, *, results: str) -> tuple[str | None, bool | None]:
    """Return the commit of `workdir`, and True if files differ from it (new files count).

    Git-ignored files and the folder `results` do not count. Takes at most 2 s. Returns None for both if there
    is no git, repository or commit.
    """
    argv = ["git", "-C", os.fspath(workdir), "status", "--porcelain=v2", "--branch", "--no-ahead-behind"]
    has_results = not PurePosixPath(results).is_absolute() and ".." not in PurePosixPath(results).parts
    try:
        status = subprocess.run(
            [*argv, "--", ".", *([f":(exclude,literal){results}"] if has_results else [])],
            capture_output=True,
            timeout=_GIT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    head, *changes = status.stdout.decode(errors="replace").splitlines()
    commit = head.removeprefix("# branch.oid ")
    return (None, None) if commit == "(initial)" else (commit, any(line[:1] != "#" for line in changes))
