"""Report data that a program mentions but that is not synced, for example because git ignores it."""

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
    find_mentions,
    find_source,
    list_ignored_data,
    list_output_folders,
    match_mentions,
)
from awsddp.nodes.project_files import Listing, list_project_files
from awsddp.session.context import Session
from awsddp.session.next_steps import complete_commands
from awsddp.settings.spec import FILE, OPTION, JobSpec
from awsddp.util.formatting import size_text

if TYPE_CHECKING:
    from awsddp.nodes.fleet import Fleet, Result


_MOST_FILES = 20_000
"""The maximum number of files that are counted in a folder. The limit lets a question appear without
delay."""
LARGE_BYTES = 1e6
_MISSING = 'cd ~/awsddp/work 2>/dev/null; for name; do [ -e "$name" ] || printf "%s\\0" "$name"; done'
_CHECK_S = 20.0


def ask_about_unsynced_data(session: Session) -> Session:
    """Ask whether to send each git-ignored path that the job mentions; report other unsynced paths.

    Returns the session with a `sync.ignore` that sends the paths to which the user agreed. If there is no
    terminal, paths are reported and not sent, because a script may download the data that it mentions. Raises
    ConfigError for a folder that cannot be sent.
    """
    job, script = session.job_spec, session.job_spec.job.script
    listing = list_project_files(job, awsddp_home=session.home)
    if not script:
        return session
    record = session.folder.read(ignore_newer=True)
    nodes = record.nodes if record else session.spec.cluster.nodes
    mentions = find_mentions(script, job)
    files = _find_local_files(mentions, listing.root, list_output_folders(job))
    data = list_ignored_data(listing, job, files)
    named = match_mentions(data, mentions)
    for path in named:
        size, about = _describe(path, data, listing.root, f" x {nodes} nodes" if nodes > 1 else "")
        if not size:
            continue
        about += f" and {find_source(mentions, path)} mentions it"
        agreed = session.ask(f"{about}: send it?")
        patterns = [*job.sync.ignore, f"{'/' if agreed is False else '!/'}{path}"]
        if agreed:
            job = replace(job, sync=replace(job.sync, ignore=tuple(patterns)))
            job = replace(job, sources={**job.sources, "sync.ignore": OPTION})
        advice = f"{about}: not sent; to send it" if agreed is None else f"{path}: to answer for all jobs"
        session.say(f"{advice}: ignore = {json.dumps(patterns)} in [sync] of {FILE}")
    for path in files:
        if covers(named, path):
            continue
        reason, remedy = _why_not_sent(listing, path, is_argument=mentions[path] == ARGUMENTS)
        if reason:
            session.say(
                f"{path} is here and is not sent ({reason}): a node has what an earlier job left there, or "
                f"nothing; to send it: {remedy}"
            )
    return session.with_settings(job_spec=job)


def describe_ignored_folders(job: JobSpec, *, home: Path) -> dict[str, str]:
    """Return the git-ignored folders at the top of the project, each with its description.

    Folders that are smaller than LARGE_BYTES are left out. Raises ConfigError for a folder that cannot be
    sent.
    """
    listing = list_project_files(job, awsddp_home=home)
    data = list_ignored_data(listing, job)
    folders = {path: _describe(path, data, listing.root) for path in data if path.find("/") == len(path) - 1}
    return {path: about for path, (size, about) in folders.items() if size >= LARGE_BYTES}


def _find_local_files(mentions: Mapping[str, str], root: Path, outputs: Collection[str]) -> list[str]:
    """Return the mentioned paths that exist locally as files or, for arguments, as files or folders.

    The folders `outputs`, to which programs write, are left out.
    """
    paths = []
    for path, source in mentions.items():
        is_hidden = "/." in f"/{path}" and source != ARGUMENTS
        if not (is_hidden or path.startswith(".." + os.sep) or path in (".", "..", *outputs)):
            local_path = os.path.join(root, path)  # noqa: PTH118  # False for a name that no file can have
            if os.path.isfile(local_path) or (source == ARGUMENTS and os.path.isdir(local_path)):  # noqa: PTH112, PTH113
                paths.append(path)
    return sorted(paths)


def _why_not_sent(listing: Listing, path: str, *, is_argument: bool) -> tuple[str, str]:
    """Return why a local path is not sent and how to send it, or ("", "") if the path is sent."""
    copy = f"{shlex.join(['cp', '-r', path, '.'])}, and use the path of the copy"
    if Path(path).is_absolute():
        is_mine = is_argument and Path(path).is_relative_to(Path.home())
        return ("only the project folder is", copy) if is_mine else ("", "")
    if entry := listing.find_ignored(path):
        if entry[1] == "awsddp":
            return f"{entry[0]} never is", copy
        is_sent = any(sent.path == path for sent in listing.entries)
        return ("", "") if is_sent else (f"{entry[0]} is in {entry[1]}", _include_advice(entry))
    reason = next((why for skipped, why in listing.skipped if f"{path}/".startswith(f"{skipped}/")), "")
    return reason, copy


def _include_advice(entry: tuple[str, str]) -> str:
    """Return how to send an excluded path. An ignored folder can only be sent as a whole."""
    return (
        f"remove {entry[0]} from {entry[1]}" if entry[1] == "sync.ignore" else f"!/{entry[0]} in {entry[1]}"
    )


def _describe(path: str, data: Mapping[str, str], root: Path, times: str = "") -> tuple[int, str]:
    """Return how many bytes of `data` are at or under `path`, and a description.

    At most _MOST_FILES files are counted. Links are not counted.
    """
    tops = [root / entry for entry in data if entry.startswith(path)]
    trees = ([top] if top.is_symlink() or top.is_file() else top.rglob("*") for top in tops)
    files = (file for tree in trees for file in tree if file.is_file() and not file.is_symlink())
    size, next_file = 0, None
    with contextlib.suppress(OSError):  # a file was removed, or cannot be read
        size = sum(file.lstat().st_size for file in itertools.islice(files, _MOST_FILES))
        next_file = next(files, None)
    text = "more than " * (next_file is not None) + size_text(size).replace(".0 ", " ")
    ignore_file = next(file for entry, file in data.items() if entry.startswith(path))
    return size, f"{path} ({text}{times}) is in {ignore_file}"


def report_unsynced_files(
    session: Session, fleet: "Fleet", nodes: Collection[int], words: Sequence[str]
) -> None:
    """Report the files that a failed command mentions but the nodes do not have, and how to send them."""
    named = _find_mentioned_files(Path(session.job_spec.sync.workdir), words)
    if not (nodes and named):
        return
    answers: Mapping[int, Result] = {}
    with contextlib.suppress(NodeError):
        answers = fleet.run(["sh", "-c", _MISSING, "sh", *named], nodes=nodes, timeout_s=_CHECK_S)
    missing = {
        name for result in answers.values() for name in result.stdout.decode(errors="replace").split("\0")
    }
    listing = (
        list_project_files(session.job_spec, awsddp_home=session.home)
        if missing.intersection(named)
        else None
    )
    for name in named:
        if listing is not None and name in missing:
            entry = listing.find_ignored(name)
            why = (
                f"{entry[1]} keeps {entry[0]} here"
                if entry
                else complete_commands(session, "awsddp sync   # sends it")
            )
            session.say(f"{name} is on this machine, but not on the nodes: {why}")


def _find_mentioned_files(workdir: Path, words: Sequence[str]) -> list[str]:
    """Return the words of a command that are files in the project folder."""
    try:
        parts = shlex.split(words[0]) if len(words) == 1 else list(words)
    except ValueError:
        parts = words[0].split()
    candidates = dict.fromkeys(
        word.removeprefix("./") for word in parts if word and not word.startswith(("-", "/"))
    )
    # Unlike Path.exists, os.path.exists is False for a name that no file can have.
    return [word for word in candidates if word and os.path.exists(workdir / word)]  # noqa: PTH110
