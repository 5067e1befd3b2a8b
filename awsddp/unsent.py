"""Data that stays here although a program names it: what an ignore file keeps from the nodes."""

import ast
import contextlib
import itertools
import json
import os
import shlex
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.advice import advised
from awsddp.errors import NodeError
from awsddp.nodes.sync import Listing, project_files
from awsddp.report import size_text
from awsddp.spec import FILE, OPTION, JobSpec

if TYPE_CHECKING:
    from awsddp.cluster import Cluster
    from awsddp.nodes.transport import Fleet, Result


_NO_DATA = frozenset(
    ["build", "dist", "env", "lightning_logs", "logs", "mlruns", "outputs", "runs", "venv", "wandb"]
)
"""Folders that programs write, by their usual names."""
_MOST_FILES = 20_000
"""How many files of a folder are counted, so that a question comes at once."""
LARGE_BYTES = 1e6
_MISSING = 'cd ~/awsddp/work 2>/dev/null; for name; do [ -e "$name" ] || printf "%s\\0" "$name"; done'
_LOOK_S = 20.0


def with_named_data(cluster: "Cluster") -> "Cluster":
    """Ask for each path that .gitignore keeps here and the script names whether to send it, once.

    Returns the cluster, for a yes with a `sync.ignore` that sends the path. Where nobody can be asked, it is
    reported and stays here: a script may download what it names. Raises ConfigError for a folder that cannot
    be sent.
    """
    job, script = cluster.job_spec, cluster.job_spec.job.script
    record = cluster.folder.read(newer=True)
    nodes = record.nodes if record else cluster.spec.cluster.nodes
    listing = project_files(job, home=cluster.home)
    data = _kept_data(listing, job)
    for path in _named(data, _words(script, job)) if script else ():
        size, about = _about(path, data, listing.root, f" x {nodes} nodes" if nodes > 1 else "")
        if not size:
            continue
        about += f" and {script} mentions it"
        agreed = cluster.ask(f"{about}: send it?")
        patterns = [*job.sync.ignore, f"{'/' if agreed is False else '!/'}{path}"]
        if agreed:
            job = replace(job, sync=replace(job.sync, ignore=tuple(patterns)))
            job = replace(job, sources={**job.sources, "sync.ignore": OPTION})
        told = f"{about}: not sent; to send it" if agreed is None else f"{path}: to answer for all jobs"
        cluster.say(f"{told}: ignore = {json.dumps(patterns)} in [sync] of {FILE}")
    return cluster.but(job_spec=job)


def data_folders(job: JobSpec, *, home: Path) -> dict[str, str]:
    """Return the folders at the project's top that .gitignore keeps here, with what to say of each.

    Those below LARGE_BYTES are left out. Raises ConfigError for a folder that cannot be sent.
    """
    listing = project_files(job, home=home)
    data = _kept_data(listing, job)
    found = {path: _about(path, data, listing.root) for path in data if path.find("/") == len(path) - 1}
    return {path: about for path, (size, about) in found.items() if size >= LARGE_BYTES}


def _kept_data(listing: Listing, job: JobSpec) -> dict[str, str]:
    """Return what .gitignore files keep here and may be data, each with the file; a folder ends with "/".

    Left out: hidden files, results, virtual environments, folders that programs write. What .awsddpignore and
    sync.ignore name was decided for the nodes.
    """
    written = _NO_DATA.union(map(os.path.normpath, (job.job.results, *job.job.outputs)))
    return {
        path: by
        for path, by in listing.kept
        if by.endswith(".gitignore")
        and written.isdisjoint((os.path.normpath(path), *path.split("/")))
        and "/." not in f"/{path}"
        and not os.path.exists(listing.root / path / "pyvenv.cfg")  # noqa: PTH110  # of no readable folder
    }


def _about(path: str, data: Mapping[str, str], root: Path, times: str = "") -> tuple[int, str]:
    """Return how many bytes of `data` are at or below `path`, and what to say of them.

    Counts _MOST_FILES files; links hold nothing.
    """
    held = [root / one for one in data if one.startswith(path)]
    trees = ([one] if one.is_symlink() or one.is_file() else one.rglob("*") for one in held)
    files = (one for tree in trees for one in tree if one.is_file() and not one.is_symlink())
    size, more = 0, None
    with contextlib.suppress(OSError):  # one is gone meanwhile, or cannot be read
        size = sum(one.lstat().st_size for one in itertools.islice(files, _MOST_FILES))
        more = next(files, None)
    text = "more than " * (more is not None) + size_text(size).replace(".0 ", " ")
    by = next(by for one, by in data.items() if one.startswith(path))
    return size, f"{path} ({text}{times}) is in {by}"


def _words(script: str, job: JobSpec) -> set[str]:
    """Return the texts of the script, and its arguments, as paths of the synced folder.

    A path may be relative to the script's own folder. A script that Python cannot parse has none.
    """
    path = Path(script.replace(".", "/") + ".py" if job.job.module else script)
    found = {part for word in job.job.args for part in word.split("=")}
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script's own, such as an invalid escape
        texts = ast.walk(ast.parse((Path(job.sync.workdir) / path).read_bytes()))
        found |= {one.value for one in texts if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return {os.path.normpath(Path(folder, word)) for word in found if word for folder in ("", path.parent)}


def _named(data: Mapping[str, str], words: Iterable[str]) -> list[str]:
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


def say_unsent(cluster: "Cluster", fleet: "Fleet", nodes: Collection[int], words: Sequence[str]) -> None:
    """Say which files that a failed command names are here alone, and what sends them."""
    named = _named_files(Path(cluster.job_spec.sync.workdir), words)
    if not (nodes and named):
        return
    answers: Mapping[int, Result] = {}
    with contextlib.suppress(NodeError):
        answers = fleet.run(["sh", "-c", _MISSING, "sh", *named], nodes=nodes, timeout_s=_LOOK_S)
    missing = {name for one in answers.values() for name in one.stdout.decode(errors="replace").split("\0")}
    listing = project_files(cluster.job_spec, home=cluster.home) if missing.intersection(named) else None
    for name in named:
        if listing is not None and name in missing:
            found = listing.keeper(name)
            why = (
                f"{found[1]} keeps {found[0]} here" if found else advised(cluster, "awsddp sync   # sends it")
            )
            cluster.say(f"{name} is here, and not on the nodes: {why}")


def _named_files(workdir: Path, words: Sequence[str]) -> list[str]:
    """Return the words of a command that are files of the synced folder."""
    try:
        split = shlex.split(words[0]) if len(words) == 1 else list(words)
    except ValueError:
        split = words[0].split()
    found = dict.fromkeys(
        word.removeprefix("./") for word in split if word and not word.startswith(("-", "/"))
    )
    # Unlike Path.exists it is False, too, for a name that no file can have.
    return [word for word in found if word and os.path.exists(workdir / word)]  # noqa: PTH110
