"""Ignore files: .awsddpignore, or those of git, also above the synced folder. https://git-scm.com/docs/gitignore"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pathspec import GitIgnoreSpec

from awsddp.errors import ConfigError

_GIT_S = 2.0
_LIST_S = 20.0


class Rules(NamedTuple):
    """Patterns, and what holds them (`by`): the path of an ignore file, or sync.ignore.

    They are relative to `folder` in the synced folder ("" or "sub/"), or to a folder that has it at `below`.
    """

    by: str
    spec: GitIgnoreSpec
    folder: str = ""
    below: str = ""

    def verdict(self, path: str) -> bool | None:
        """Return whether a path of the synced folder is ignored, None where nothing here names it.

        What names a folder above it does not name the path: that decides whether it is looked at.
        """
        path = self.below + path[len(self.folder) :]
        pattern: Any
        for pattern in reversed(self.spec.patterns):
            if pattern.include is not None and pattern.regex.search(path) and _names(pattern, path):
                return bool(pattern.include)
        return None


def _names(pattern: Any, path: str) -> bool:
    """Tell whether a pattern names this path; its group ps_d is the end of the folder that it names.

    data/** names what is in data/, and not the folder.
    """
    is_inside = pattern.regex.pattern.endswith("/")
    return any(
        not (is_inside and match.end() == len(path))
        if match.groupdict().get("ps_d") is None
        else match.start("ps_d") == len(path) - 1
        for match in pattern.regex.finditer(path)
    )


def rules(lines: Iterable[str], by: str, *, folder: str = "", below: str = "") -> Rules:
    """Return the rules that these lines hold. Raises ConfigError."""
    try:
        return Rules(by, GitIgnoreSpec.from_lines(lines), folder, below)
    except ValueError as error:
        raise ConfigError(f"{by}: not a gitignore pattern", str(error)) from error


def rules_of(file: Path, by: str, *, folder: str = "", below: str = "") -> Rules:
    """Return the rules of an ignore file. Raises ConfigError."""
    try:
        text = file.read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise ConfigError(f"cannot read {by}", error.strerror or str(error)) from error
    return rules(text.splitlines(), by, folder=folder, below=below)


def rules_of_git(root: Path) -> tuple[Rules, ...]:
    """Return what git has beside the .gitignore files of a folder: those above it in its repository,
    info/exclude and core.excludesFile; the first that names a path decides.

    None where the folder lies in no repository. A file that names the folder itself, or one above it, does
    not count: who syncs the folder wants what is in it. Raises ConfigError.
    """
    found = _repository(root)
    if found is None:
        return ()
    top, common = found
    places = [(folder / ".gitignore", folder) for folder in root.parents if folder.is_relative_to(top)]
    places += [(common / "info" / "exclude", top)]
    places += [(file, top) for file in _excludes_files(root)]
    return tuple(_above(root, places))


def tracked_files(root: Path) -> list[str]:
    """Return the files that git tracks although an ignore file names them; [] without git or a repository.

    Raises OSError where git does not say.
    """
    if _repository(root) is None or (git := shutil.which("git")) is None:
        return []
    argv = [git, "-C", os.fspath(root), "ls-files", "-z", "--cached", "--ignored", "--exclude-standard"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_LIST_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"git ls-files did not end within {_LIST_S:g} s") from error
    if done.returncode != 0:
        raise OSError(os.fsdecode(done.stderr).strip().partition("\n")[0])
    return [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]


def _repository(root: Path) -> tuple[Path, Path] | None:
    """Return the top of the work tree that a folder lies in, and its repository."""
    return next(((top, common) for top in (root, *root.parents) if (common := _common_dir(top))), None)


def _above(root: Path, places: Iterable[tuple[Path, Path]]) -> Iterator[Rules]:
    for file, folder in places:
        if not file.is_file():
            continue
        parts = root.relative_to(folder).parts
        below = "".join(f"{part}/" for part in parts)
        one = rules_of(file, _shown(file, root), below=below)
        folders = ("/".join(parts[: count + 1]) + "/" for count in range(len(parts)))
        if not any(one._replace(below="").verdict(folder) for folder in folders):
            yield one


def _shown(file: Path, root: Path) -> str:
    """Return how a message names an ignore file."""
    home = Path.home()
    if file.is_relative_to(home) and not root.is_relative_to(file.parent):
        return f"~/{file.relative_to(home)}"
    return os.path.relpath(file, root)


def _common_dir(top: Path) -> Path | None:
    """Return the repository whose work tree has this top; of a further work tree the first one's."""
    git = top / ".git"
    with contextlib.suppress(OSError):
        if git.is_file():  # of a work tree or a submodule
            kind, _, place = git.read_text(encoding="utf-8", errors="surrogateescape").partition("gitdir:")
            git = git if kind else top / place.strip()
        if (git / "HEAD").is_file():
            common = git / "commondir"
            return git / common.read_text().strip() if common.is_file() else git
    return None


def _excludes_files(root: Path) -> list[Path]:
    """Return the file that core.excludesFile names; the default one if it is not set, or git is missing."""
    argv = ["git", "-C", os.fspath(root), "config", "--type=path", "--get", "core.excludesFile"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            argv, capture_output=True, timeout=_GIT_S, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode == 0:
            name = os.fsdecode(done.stdout.removesuffix(b"\n"))
            return [root / name] if name else []
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return [Path(config, "git", "ignore")]
