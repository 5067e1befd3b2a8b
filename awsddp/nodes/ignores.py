"""Read .awsddpignore and git's ignore files, including those above the project folder.
https://git-scm.com/docs/gitignore"""

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
    """Holds patterns and their `source`: the path of an ignore file, or sync.ignore.

    Patterns are relative to `folder`, which is in the project folder ("" or "sub/"). If the patterns are
    relative to a folder above the project folder, `prefix` is the project folder's path in that folder.
    """

    source: str
    spec: GitIgnoreSpec
    folder: str = ""
    prefix: str = ""

    def verdict(self, path: str) -> bool | None:
        """Return True if a path in the project folder is ignored, False if it is included, or else None.

        A pattern that matches only a parent folder does not count, because the caller applies the pattern to
        that folder.
        """
        path = self.prefix + path[len(self.folder) :]
        pattern: Any
        for pattern in reversed(self.spec.patterns):
            if pattern.include is not None and pattern.regex.search(path) and _matches_itself(pattern, path):
                return bool(pattern.include)
        return None


def _matches_itself(pattern: Any, path: str) -> bool:
    """Return True if a pattern matches this path, and not only a parent folder of the path.

    In pathspec's regex, the group ps_d matches the slash at the end of the matched folder. The pattern
    data/** matches everything in data/, but not data/ itself.
    """
    is_inside = pattern.regex.pattern.endswith("/")
    return any(
        not (is_inside and match.end() == len(path))
        if match.groupdict().get("ps_d") is None
        else match.start("ps_d") == len(path) - 1
        for match in pattern.regex.finditer(path)
    )


def parse_rules(lines: Iterable[str], source: str, *, folder: str = "", prefix: str = "") -> Rules:
    """Parse lines from an ignore file. Raises ConfigError."""
    try:
        return Rules(source, GitIgnoreSpec.from_lines(lines), folder, prefix)
    except ValueError as error:
        raise ConfigError(f"{source}: not a gitignore pattern", str(error)) from error


def read_rules(file: Path, source: str, *, folder: str = "", prefix: str = "") -> Rules:
    """Read an ignore file. Raises ConfigError."""
    try:
        text = file.read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise ConfigError(f"cannot read {source}", error.strerror or str(error)) from error
    return parse_rules(text.splitlines(), source, folder=folder, prefix=prefix)


def read_git_rules(root: Path) -> tuple[Rules, ...]:
    """Return git's rules from files outside a folder, or () if there is no repository.

    The files are the .gitignore files above the folder, info/exclude and core.excludesFile. The first match
    decides. A file that ignores the folder itself or a parent folder is left out, because the user wants to
    sync the folder. Raises ConfigError.
    """
    repository = _find_repository(root)
    if repository is None:
        return ()
    top, git_dir = repository
    files = [(folder / ".gitignore", folder) for folder in root.parents if folder.is_relative_to(top)]
    files += [(git_dir / "info" / "exclude", top)]
    files += [(file, top) for file in _excludes_files(root)]
    return tuple(_rules_above(root, files))


def list_tracked_files(root: Path) -> list[str]:
    """Return the files that git tracks although a rule ignores them, or [] without git or a repository.

    Raises OSError if git fails.
    """
    if _find_repository(root) is None or (git := shutil.which("git")) is None:
        return []
    argv = [git, "-C", os.fspath(root), "ls-files", "-z", "--cached", "--ignored", "--exclude-standard"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_LIST_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"git ls-files did not end within {_LIST_S:g} s") from error
    if done.returncode != 0:
        raise OSError(os.fsdecode(done.stderr).strip().partition("\n")[0])
    return [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]


def _find_repository(root: Path) -> tuple[Path, Path] | None:
    """Return the top folder of the work tree that contains a folder, and the work tree's git directory."""
    for top in (root, *root.parents):
        if git_dir := _common_dir(top):
            return top, git_dir
    return None


def _rules_above(root: Path, files: Iterable[tuple[Path, Path]]) -> Iterator[Rules]:
    """Yield the rules in `files`, which are pairs of an ignore file and its folder.

    Files that ignore `root` are left out.
    """
    for file, folder in files:
        if not file.is_file():
            continue
        parts = root.relative_to(folder).parts
        below = "".join(f"{part}/" for part in parts)
        file_rules = read_rules(file, _display_name(file, root), prefix=below)
        folders = ("/".join(parts[: count + 1]) + "/" for count in range(len(parts)))
        if not any(file_rules._replace(prefix="").verdict(folder) for folder in folders):
            yield file_rules


def _display_name(file: Path, root: Path) -> str:
    """Return an ignore file's path in the form that messages show."""
    user_home = Path.home()
    if file.is_relative_to(user_home) and not root.is_relative_to(file.parent):
        return f"~/{file.relative_to(user_home)}"
    return os.path.relpath(file, root)


def _common_dir(top: Path) -> Path | None:
    """Return the git directory that the work tree `top` uses, or None if `top` is not a work tree.

    A linked work tree uses the git directory of the main work tree.
    """
    git = top / ".git"
    with contextlib.suppress(OSError):
        if git.is_file():  # a linked work tree or a submodule
            kind, _, target = git.read_text(encoding="utf-8", errors="surrogateescape").partition("gitdir:")
            git = git if kind else top / target.strip()
        if (git / "HEAD").is_file():
            common = git / "commondir"
            return git / common.read_text().strip() if common.is_file() else git
    return None


def _excludes_files(root: Path) -> list[Path]:
    """Return a list with the file that core.excludesFile names.

    If this setting is not set, or if git is not installed, the list has git's default file. If the setting is
    empty, the list is empty.
    """
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
