"""What data a job names: the paths in its arguments, its script, and what that imports of the project."""

import ast
import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from awsddp.nodes.project_files import Listing, project_files
from awsddp.settings.spec import JobSpec

_NO_DATA = frozenset(
    ["build", "dist", "env", "lightning_logs", "logs", "mlruns", "outputs", "runs", "venv", "wandb"]
)
"""Folders that programs write, by their usual names."""
ARGUMENTS = "the command line"
"""Who mentions a path that is an argument of the script."""
_MOST_MODULES = 200


def named_data(job: JobSpec, *, script: str, home: Path) -> list[tuple[str, str]]:
    """Return the paths that git ignores and a job names, each with the ignore file. Raises ConfigError."""
    listing = project_files(job, home=home)
    data = kept_data(listing, job)
    named = named_paths(data, mentions_of(script, job))
    return [(path, next(by for one, by in data.items() if one.startswith(path))) for path in named]


def kept_data(listing: Listing, job: JobSpec, files: Iterable[str] = ()) -> dict[str, str]:
    """Return what git ignores and may be data, each with the ignore file; a folder ends with "/".

    Left out: hidden files, results, virtual environments, folders that programs write, unless `files` lie in
    them. What .awsddpignore and sync.ignore name was decided for the nodes.
    """
    written = written_folders(job)
    return {
        path: by
        for path, by in listing.kept
        if by not in ("awsddp", "sync.ignore")
        and not by.endswith(".awsddpignore")
        and (
            written.isdisjoint((os.path.normpath(path), *path.split("/")))
            or any(covers([path], file) for file in files)
        )
        and "/." not in f"/{path}"
        and not os.path.exists(listing.root / path / "pyvenv.cfg")  # noqa: PTH110  # of no readable folder
    }


def written_folders(job: JobSpec) -> frozenset[str]:
    return _NO_DATA.union(map(os.path.normpath, (job.job.results, *job.job.outputs)))


def covers(folders: Iterable[str], path: str) -> bool:
    """Tell whether a path is one of these, or lies in one."""
    return any(f"{path}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)


def mentions_of(script: str, job: JobSpec) -> dict[str, str]:
    """Return the arguments, and the texts of the script and of the project's modules that it imports (of
    these what looks like a path), as paths of the synced folder, each with what has it.

    A path may be relative to the script's own folder. A file that Python cannot parse has none.
    """
    root, folder = Path(job.sync.workdir), "" if job.job.module else os.path.dirname(script)  # noqa: PTH120
    name = script.removesuffix(".py").replace("/", ".")
    pending = [name] if job.job.module else [""]
    texts = dict.fromkeys((part for word in job.job.args for part in word.split("=")), ARGUMENTS)
    read = set[str]()
    while pending and len(read) < _MOST_MODULES:
        module = pending.pop(0)
        for path in _places(module, folder) if module else [script]:
            if path not in read and (tree := _parsed(root / path)) is not None:
                read.add(path)
                for node in ast.walk(tree):
                    text = node.value if isinstance(node, ast.Constant) else None
                    if isinstance(text, str) and (module in ("", name) or {"/", "."} & {*text}):
                        texts.setdefault(text, path)
                pending += _imports(tree, module)
    above = {folder, os.path.dirname(_places(name, "")[0]) if job.job.module else folder, ""}  # noqa: PTH120
    return {
        os.path.normpath(os.path.join(place, text)): by  # noqa: PTH118
        for place in above
        for text, by in reversed(texts.items())
        if text and "\0" not in text and "\n" not in text
    }


def _parsed(path: Path) -> ast.Module | None:
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script's own, such as an invalid escape
        return ast.parse(path.read_bytes())
    return None


def _places(module: str, folder: str) -> list[str]:
    """Return where the project may have a module: in the script's folder, at its top, or in src/."""
    path = module.replace(".", "/")
    tops = dict.fromkeys(f"{top}/" if top else "" for top in (folder, "", "src"))
    return [f"{top}{path}{end}" for top in tops for end in (".py", "/__main__.py", "/__init__.py")]


def _imports(tree: ast.Module, module: str) -> Iterator[str]:
    """Yield the modules that one imports, by their whole names, and what may be modules of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*above, *([node.module] if node.module else [])])
            yield from filter(None, [name, *(f"{name}.{one.name}".lstrip(".") for one in node.names)])


def mentioned_by(mentions: Mapping[str, str], path: str) -> str:
    """Return what mentions a path, what it lies in, or what lies in it."""
    near = (by for one, by in mentions.items() if covers([path], one) or covers([one], path.rstrip("/")))
    return next(near, ARGUMENTS)


def named_paths(data: Mapping[str, str], words: Iterable[str]) -> list[str]:
    """Return the paths of `data` that a word names or lies in; the word itself, a folder, that holds some."""
    tops = {Path(path).parts[0] for path in data}
    found = {
        f"{word}/" if path.startswith(f"{word}/") else path
        for word in words
        if word.partition("/")[0] in tops
        for path in data
        if path.startswith(f"{word}/") or f"{word}/".startswith(f"{path.rstrip('/')}/")
    }
    return sorted(found)
