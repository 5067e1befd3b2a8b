"""Find the data paths that a job mentions in its arguments, its script and the project modules it imports."""

import ast
import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from awsddp.nodes.project_files import Listing, list_project_files
from awsddp.settings.spec import JobSpec

_NO_DATA = frozenset(
    ["build", "dist", "env", "lightning_logs", "logs", "mlruns", "outputs", "runs", "venv", "wandb"]
)
"""The usual names of folders that programs write to."""
ARGUMENTS = "the command line"
"""The source that is named for a path in the script's arguments."""
_MOST_MODULES = 200


def find_mentioned_data(job: JobSpec, *, script: str, home: Path) -> list[tuple[str, str]]:
    """Return the git-ignored paths that a job mentions, each with its ignore file. Raises ConfigError."""
    listing = list_project_files(job, awsddp_home=home)
    data = list_ignored_data(listing, job)
    named = match_mentions(data, find_mentions(script, job))
    return [(path, next(file for entry, file in data.items() if entry.startswith(path))) for path in named]


def list_ignored_data(listing: Listing, job: JobSpec, files: Iterable[str] = ()) -> dict[str, str]:
    """Return the git-ignored paths that may be data, each with its ignore file; a folder ends with "/".

    Leaves out hidden files, results, virtual environments, and paths that .awsddpignore or sync.ignore
    excludes on purpose. Folders that programs write to are left out too, unless one of `files` is in them.
    """
    outputs = list_output_folders(job)
    return {
        path: ignore_file
        for path, ignore_file in listing.ignored
        if ignore_file not in ("awsddp", "sync.ignore")
        and not ignore_file.endswith(".awsddpignore")
        and (
            outputs.isdisjoint((os.path.normpath(path), *path.split("/")))
            or any(covers([path], file) for file in files)
        )
        and "/." not in f"/{path}"
        and not os.path.exists(listing.root / path / "pyvenv.cfg")  # noqa: PTH110  # False for an unreadable folder
    }


def list_output_folders(job: JobSpec) -> frozenset[str]:
    return _NO_DATA.union(map(os.path.normpath, (job.job.results, *job.job.outputs)))


def covers(folders: Iterable[str], path: str) -> bool:
    """Return True if a path is one of these folders or lies in one."""
    return any(f"{path}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)


def find_mentions(script: str, job: JobSpec) -> dict[str, str]:
    """Return the paths that a job may mean, relative to the project folder, each with its source.

    Sources are the arguments, the strings in the script, and strings that look like paths in imported project
    modules. A path may be relative to the script's folder. Files that Python cannot parse are skipped.
    """
    root, folder = Path(job.sync.workdir), "" if job.job.module else os.path.dirname(script)  # noqa: PTH120
    name = script.removesuffix(".py").replace("/", ".")
    pending = [name] if job.job.module else [""]
    texts = dict.fromkeys((part for argument in job.job.args for part in argument.split("=")), ARGUMENTS)
    read = set[str]()
    while pending and len(read) < _MOST_MODULES:
        module = pending.pop(0)
        for path in _module_files(module, folder) if module else [script]:
            if path not in read and (tree := _parse(root / path)) is not None:
                read.add(path)
                for node in ast.walk(tree):
                    text = node.value if isinstance(node, ast.Constant) else None
                    if isinstance(text, str) and (module in ("", name) or {"/", "."} & {*text}):
                        texts.setdefault(text, path)
                pending += _imports(tree, module)
    parents = {folder, os.path.dirname(_module_files(name, "")[0]) if job.job.module else folder, ""}  # noqa: PTH120
    return {
        os.path.normpath(os.path.join(parent, text)): source  # noqa: PTH118
        for parent in parents
        for text, source in reversed(texts.items())
        if text and "\0" not in text and "\n" not in text
    }


def _parse(path: Path) -> ast.Module | None:
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the script, such as an invalid escape
        return ast.parse(path.read_bytes())
    return None


def _module_files(module: str, folder: str) -> list[str]:
    """Return the files that may hold a module: in the script's folder, the project folder or src/."""
    path = module.replace(".", "/")
    tops = dict.fromkeys(f"{top}/" if top else "" for top in (folder, "", "src"))
    return [f"{top}{path}{end}" for top in tops for end in (".py", "/__main__.py", "/__init__.py")]


def _imports(tree: ast.Module, module: str) -> Iterator[str]:
    """Yield the full names of imported modules and of other imported names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*above, *([node.module] if node.module else [])])
            yield from filter(None, [name, *(f"{name}.{alias.name}".lstrip(".") for alias in node.names)])


def find_source(mentions: Mapping[str, str], path: str) -> str:
    """Return the source that mentions a path, a folder above that path, or a path inside it."""
    sources = (
        source
        for mention, source in mentions.items()
        if covers([path], mention) or covers([mention], path.rstrip("/"))
    )
    return next(sources, ARGUMENTS)


def match_mentions(data: Mapping[str, str], mentions: Iterable[str]) -> list[str]:
    """Return the data paths that a job mentions.

    These are the paths in `data` that equal or contain a path in `mentions`, and the folders in `mentions`
    that contain a path in `data`.
    """
    tops = {Path(path).parts[0] for path in data}
    matches = {
        f"{mention}/" if path.startswith(f"{mention}/") else path
        for mention in mentions
        if mention.partition("/")[0] in tops
        for path in data
        if path.startswith(f"{mention}/") or f"{mention}/".startswith(f"{path.rstrip('/')}/")
    }
    return sorted(matches)
