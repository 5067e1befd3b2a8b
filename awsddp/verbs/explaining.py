"""Why a job failed, where only this machine knows: what the project has, what it names, what is not sent."""

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from awsddp.errors import AwsddpError
from awsddp.plan.requirements import source_folders
from awsddp.records import Cause, JobRecord
from awsddp.spec import overlaid
from awsddp.verbs.advice import advised, command_words
from awsddp.verbs.context import Context
from awsddp.verbs.sync import found_here

_FILES = ("requirements.txt", "uv.lock", "pyproject.toml", "environment.yml")
_MODULE = re.compile(r"\w[\w.]*")
_WORD = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|([^\s'\",;:()]+)")
_VARIABLE = re.compile(r"\bos\b.*^KeyError: '([A-Z_][A-Z0-9_]*)'", re.DOTALL | re.MULTILINE)
_ON_NODE = re.compile(r"^(.*/awsddp/work[^/]*/|\./)")


def explained(ctx: Context, job: JobRecord) -> JobRecord:
    """Return the job; for a module, a file or a variable that its nodes do not have the cause says why."""
    cause = job.cause
    if cause is None:
        return job
    explain = {"import_error": _of_module, "file_not_found": _of_file, "exit": _of_variable}.get(cause.kind)
    with contextlib.suppress(AwsddpError, OSError, ValueError):  # the project has changed, or is gone
        if explain is not None:
            cause = explain(ctx, job, cause)
    return replace(job, cause=replace(cause, next=advised(ctx, cause.next, job=job)))


def _of_module(ctx: Context, job: JobRecord, cause: Cause) -> Cause:
    module = cause.values.get("module", "")
    if not _MODULE.fullmatch(module):  # a node says it, and a command that the user copies will hold it
        return cause
    top = module.partition(".")[0]
    project, listing = Path(ctx.job.sync.workdir), found_here(ctx)
    for path in _modules(project, module):
        if kept := listing.keeper(path):
            return _kept(ctx, job, cause, kept)
    for path in _modules(project, top):
        folder = Path(path).parent.as_posix()
        if folder in (*source_folders(project), Path(job.script or "").parent.as_posix()):
            return cause  # the script's own folder is where its imports come from
        advice = _again(ctx, job, {"env.variables.PYTHONPATH": folder})
        return _told(cause, f"{path} is on the nodes, and {folder} is not on the PYTHONPATH", advice)
    if module != top:  # Python names the whole path only where the package itself was found
        why = f"What imports it was written for another version of {top}"
        return _told(cause, why, f"set another version of it, or of {top}, with --env FILE")
    record = ctx.folder.read()
    asked = overlaid(ctx.job, record.asked if record else {}).env.file
    there = next((file for file in _FILES if (project / file).is_file()), None)
    file = asked or ((project / there).as_posix() if there else "requirements.txt")
    again = _again(ctx, job, {"env.file": file})
    if there and not asked:
        return _told(cause, f"{there} exists, but --env does not name it", again)
    why = f"{asked} did not install it" if asked else "no requirements file is there"
    return _told(cause, why, f"name the package of {top} in {file}, then: {again}")


def _of_file(ctx: Context, job: JobRecord, cause: Cause) -> Cause:
    listing = found_here(ctx)
    for match in _WORD.finditer(cause.explanation):
        word = _ON_NODE.sub("", (match[1] or match[2] or match[3]).rstrip("./"))
        if kept := listing.keeper(word):
            return _kept(ctx, job, cause, kept)
        for path, reason in listing.skipped:
            if f"{word}/".startswith(f"{path}/"):
                advice = "copy what it leads to into the folder, or onto each node: awsddp exec -- COMMAND"
                return _told(cause, f"{path} is here, and is not sent: {reason}", advice)
        if word.startswith("/") and Path(word).exists():
            why = f"{word} is on this machine alone: only the synced folder is sent"
            return _told(cause, why, f"move it into {listing.root}, or put it on the nodes")
    return cause


def _of_variable(ctx: Context, job: JobRecord, cause: Cause) -> Cause:
    found = _VARIABLE.search("\n".join(cause.tail))
    if found is None or found[1] not in os.environ:
        return cause
    advice = _again(ctx, job, {f"env.variables.{found[1]}": None})
    return _told(cause, f"{found[1]} is set here, and not on the nodes", advice)


def _kept(ctx: Context, job: JobRecord, cause: Cause, kept: tuple[str, str]) -> Cause:
    """Say that a path is here, and what keeps it from the nodes; advise to send all of its folder."""
    path, by = kept
    folder = path.rpartition("/")[0]
    let_in = f"!/{folder}/**" if folder and not path.endswith("/") else f"!/{path}"
    patterns = [*ctx.job.sync.ignore, let_in]
    advice = {
        "sync.ignore": "remove it from sync.ignore",
        "awsddp": f"move it out of {path}, which is never sent",
    }.get(by, f"{_again(ctx, job, {'sync.ignore': patterns})}   # or in awsddp.toml")
    return _told(cause, f"{path} is here, and {by} keeps it from the nodes", advice)


def _again(ctx: Context, job: JobRecord, changes: Mapping[str, object]) -> str:
    """Return the command that runs the job again with `changes`, by key of awsddp.toml."""
    return advised(ctx, shlex.join(["awsddp", "train", *command_words("train", changes)]), job=job)


def _told(cause: Cause, why: str, advice: str) -> Cause:
    return replace(cause, explanation=f"{cause.explanation} {why}.", next=advice)


def _modules(project: Path, module: str) -> Iterator[str]:
    """Yield where the project, or a folder at its top, has a module: its path, relative to the project."""
    tops = [one.name for one in sorted(project.iterdir()) if one.is_dir() and not one.name.startswith(".")]
    for folder in ("", *tops):
        path = Path(folder, *module.split("."))
        if any((project / path).glob("*.py")):
            yield path.as_posix()
        elif (project / f"{path}.py").is_file():
            yield f"{path.as_posix()}.py"
