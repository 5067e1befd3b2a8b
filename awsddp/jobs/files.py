"""The files of a job on this machine: the commit of its code, the names of its results, its checkpoint."""

import contextlib
import difflib
import os
import posixpath
import re
import shutil
import subprocess
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import fsdecode, fsencode
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from awsddp import harmless
from awsddp.answers import Manifest, ResultFile
from awsddp.errors import ConfigError, UsageError
from awsddp.jobs.supervisor.checkpoints import LATEST, Found, find_checkpoints, flaw_of, worth
from awsddp.jobs.supervisor.manifest import sample

_GIT_S = 2.0
_RESUMES = re.compile(r"[\"'](--(?:resume|restore|load[-_](?:checkpoint|ckpt))(?:[-_]\w[\w-]*)?)[\"']")
_IS_FLAG = re.compile("store_true|store_false|BooleanOptional|is_flag")
_CALL = 300
"""How many characters of the call that declares an option are read."""
_LONGEST = 255  # bytes of a name, on all file systems of today
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


def resume_option(workdir: Path, script: str) -> str | None:
    """Return the option of a script or module that takes a checkpoint, "" if it reads $AWSDDP_RESUME itself.

    None where its text shows neither.
    """
    module = Path(*script.split("."))
    files = (Path(script), module.with_suffix(".py"), module / "__main__.py")
    path = next((workdir / one for one in files if (workdir / one).is_file()), None)
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path is not None else ""
    except OSError:
        text = ""
    if "AWSDDP_RESUME" in text:
        return ""
    for found in _RESUMES.finditer(text):
        if not _IS_FLAG.search(text[found.end() : found.end() + _CALL].partition("add_argument")[0]):
            return found[1]
    return "--resume_from_checkpoint" if "HfArgumentParser" in text and "TrainingArguments" in text else None


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


def exclude_patterns(lines: Iterable[str]) -> list[tuple[str, bool]]:
    """Return gitignore patterns as the node matches them: regular expressions, and whether each excludes.

    Raises ConfigError.
    """
    from pathspec import GitIgnoreSpec

    try:
        spec = GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise ConfigError("job.exclude: not a gitignore pattern", str(error)) from error
    return [
        (one.regex.pattern, one.include) for one in spec.patterns if one.regex and one.include is not None
    ]


def name_at_home(manifests: Mapping[int, Manifest]) -> list[ResultFile]:
    """Return the files, then the links, of all nodes under names that differ on every local file system.

    Names that differ in case or Unicode form only, or are equal, are told apart by a suffix: name~2. Control
    characters are written out, as in "a\\x1b": `ls` and a prompt show a name as it is.
    """
    names = _Names()
    found = [replace(one, node=node) for node, manifest in manifests.items() for one in manifest.files]
    found.sort(key=lambda one: (one.target is not None, one.node, one.home, one.path))
    homes = [names.add(one.home) for one in found]
    return [
        replace(one, home=home, target=one.target and names.of(one.target))
        for one, home in zip(found, homes, strict=True)
    ]


def begins(path: Path, one: ResultFile) -> bool:
    """Tell whether a file begins, in all likelihood, with what a node described. Raises OSError."""
    return sample(path, one.size) == one.sample


def over_limit(files: Iterable[ResultFile], limit: float, *, results: Path) -> list[ResultFile]:
    """Return what exceeds `limit` bytes in all: the largest files are left out first.

    What is in `results` (runs/JOB) already costs nothing more.
    """
    total, excess = 0, []
    for one in sorted(files, key=lambda one: (one.size, one.home)):
        path = results / one.home
        if not one.limited or (os.path.lexists(path) and path.lstat().st_size == one.size):
            continue
        total += one.size
        if total > limit:
            excess.append(one)
    return excess


class _Names:
    """Names within one local folder. The first that asks for a name gets it."""

    def __init__(self) -> None:
        self._taken: set[tuple[str, str]] = set()
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(lambda: 1)
        self._folders = {"": ""}
        self._files: dict[str, str] = {}

    def add(self, path: str) -> str:
        """Return the name of one more file that would be `path`."""
        given = self._free(path)
        self._files.setdefault(path, given)
        return given

    def of(self, path: str) -> str:
        """Return the name of the file or folder that would be `path`, as far as there is one."""
        return self._files.get(path) or self._folders.get(path) or harmless.name(path)

    def _free(self, path: str) -> str:
        above, name = posixpath.split(path)
        if above not in self._folders:
            self._folders[above] = self._free(above)
        folder = self._folders[above]
        name = fsdecode(fsencode(harmless.name(name))[:_LONGEST])
        stem = f"{name}~" if _key(name) == ".git" else name  # git runs what the settings in a .git say
        name, wanted = stem, (folder, _key(stem))
        while (folder, _key(name)) in self._taken:
            self._counts[wanted] += 1
            suffix = f"~{self._counts[wanted]}"
            name = fsdecode(fsencode(stem)[: _LONGEST - len(suffix)]) + suffix
        self._taken.add((folder, _key(name)))
        return posixpath.join(folder, name)


def _key(name: str) -> str:
    """Return what names have in common that some file system takes for one."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def newest_checkpoint(results: Path) -> "Checkpoint | None":
    """Return the checkpoint of `results` (runs/JOB) to resume from (checkpoints.py), None if there is none.

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
