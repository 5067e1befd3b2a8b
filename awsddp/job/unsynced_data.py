"""Data that stays here although a program names it: what an ignore file keeps from the nodes."""

import contextlib
import itertools
import json
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.errors import NodeError
from awsddp.job.script_paths import (
    ARGUMENTS,
    covers,
    kept_data,
    mentioned_by,
    mentions_of,
    named_paths,
    written_folders,
)
from awsddp.nodes.project_files import Listing, project_files
from awsddp.session.context import Session
from awsddp.session.next_steps import advised
from awsddp.settings.spec import FILE, OPTION, JobSpec
from awsddp.util.format import size_text

if TYPE_CHECKING:
    from awsddp.nodes.fleet import Fleet, Result


_MOST_FILES = 20_000
"""How many files of a folder are counted, so that a question comes at once."""
LARGE_BYTES = 1e6
_MISSING = 'cd ~/awsddp/work 2>/dev/null; for name; do [ -e "$name" ] || printf "%s\\0" "$name"; done'
_LOOK_S = 20.0


def with_named_data(session: Session) -> Session:
    """Ask for each path that git ignores and the job names whether to send it, once; report other paths that
    it names, that are here and that are not sent.

    Returns the session, for a yes with a `sync.ignore` that sends the path. Where nobody can be asked, it is
    reported and stays here: a script may download what it names. Raises ConfigError for a folder that cannot
    be sent.
    """
    job, script = session.job_spec, session.job_spec.job.script
    listing = project_files(job, home=session.home)
    if not script:
        return session
    record = session.folder.read(newer=True)
    nodes = record.nodes if record else session.spec.cluster.nodes
    mentions = mentions_of(script, job)
    files = _files_here(mentions, listing.root, written_folders(job))
    data = kept_data(listing, job, files)
    asked = named_paths(data, mentions)
    for path in asked:
        size, about = _about(path, data, listing.root, f" x {nodes} nodes" if nodes > 1 else "")
        if not size:
            continue
        about += f" and {mentioned_by(mentions, path)} mentions it"
        agreed = session.ask(f"{about}: send it?")
        patterns = [*job.sync.ignore, f"{'/' if agreed is False else '!/'}{path}"]
        if agreed:
            job = replace(job, sync=replace(job.sync, ignore=tuple(patterns)))
            job = replace(job, sources={**job.sources, "sync.ignore": OPTION})
        told = f"{about}: not sent; to send it" if agreed is None else f"{path}: to answer for all jobs"
        session.say(f"{told}: ignore = {json.dumps(patterns)} in [sync] of {FILE}")
    for path in files:
        if covers(asked, path):
            continue
        reason, remedy = _why_not_sent(listing, path, is_argument=mentions[path] == ARGUMENTS)
        if reason:
            session.say(
                f"{path} is here and is not sent ({reason}): a node has what an earlier job left there, or "
                f"nothing; to send it: {remedy}"
            )
    return session.with_settings(job_spec=job)


def data_folders(job: JobSpec, *, home: Path) -> dict[str, str]:
    """Return the folders at the project's top that .gitignore keeps here, with what to say of each.

    Those below LARGE_BYTES are left out. Raises ConfigError for a folder that cannot be sent.
    """
    listing = project_files(job, home=home)
    data = kept_data(listing, job)
    found = {path: _about(path, data, listing.root) for path in data if path.find("/") == len(path) - 1}
    return {path: about for path, (size, about) in found.items() if size >= LARGE_BYTES}


def _files_here(mentions: Mapping[str, str], root: Path, written: Collection[str]) -> list[str]:
    """Return the paths that a job certainly names: files that are here, of arguments folders, too.

    A folder that programs write is one of the results.
    """
    found = []
    for path, by in mentions.items():
        is_hidden = "/." in f"/{path}" and by != ARGUMENTS
        if not (is_hidden or path.startswith(".." + os.sep) or path in (".", "..", *written)):
            whole = os.path.join(root, path)  # noqa: PTH118  # no file may have this name
            if os.path.isfile(whole) or (by == ARGUMENTS and os.path.isdir(whole)):  # noqa: PTH112, PTH113
                found.append(path)
    return sorted(found)


def _why_not_sent(listing: Listing, path: str, *, is_argument: bool) -> tuple[str, str]:
    """Return why a path that is here is not sent, and what sends it; "" where it is sent."""
    copy = f"{shlex.join(['cp', '-r', path, '.'])}, and name the copy"
    if Path(path).is_absolute():
        is_mine = is_argument and Path(path).is_relative_to(Path.home())
        return ("only the synced folder is", copy) if is_mine else ("", "")
    if kept := listing.keeper(path):
        if kept[1] == "awsddp":
            return f"{kept[0]} never is", copy
        is_sent = any(entry.path == path for entry in listing.entries)
        return ("", "") if is_sent else (f"{kept[0]} is in {kept[1]}", _let_in(kept))
    reason = next((why for one, why in listing.skipped if f"{path}/".startswith(f"{one}/")), "")
    return reason, copy


def _let_in(kept: tuple[str, str]) -> str:
    """Return what sends a path that is kept here: of an ignored folder nothing can be let in alone."""
    return f"remove {kept[0]} from {kept[1]}" if kept[1] == "sync.ignore" else f"!/{kept[0]} in {kept[1]}"


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


def say_unsent(session: Session, fleet: "Fleet", nodes: Collection[int], words: Sequence[str]) -> None:
    """Say which files that a failed command names are here alone, and what sends them."""
    named = _named_files(Path(session.job_spec.sync.workdir), words)
    if not (nodes and named):
        return
    answers: Mapping[int, Result] = {}
    with contextlib.suppress(NodeError):
        answers = fleet.run(["sh", "-c", _MISSING, "sh", *named], nodes=nodes, timeout_s=_LOOK_S)
    missing = {name for one in answers.values() for name in one.stdout.decode(errors="replace").split("\0")}
    listing = project_files(session.job_spec, home=session.home) if missing.intersection(named) else None
    for name in named:
        if listing is not None and name in missing:
            found = listing.keeper(name)
            why = (
                f"{found[1]} keeps {found[0]} here" if found else advised(session, "awsddp sync   # sends it")
            )
            session.say(f"{name} is here, and not on the nodes: {why}")


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
