"""The git commit of the code that a job runs."""

import os
import subprocess
from pathlib import Path, PurePosixPath

_TIMEOUT_S = 2.0


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
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    head, *rest = done.stdout.decode(errors="replace").splitlines()
    commit = head.removeprefix("# branch.oid ")
    return (None, None) if commit == "(initial)" else (commit, any(line[:1] != "#" for line in rest))
