"""Explain, from this machine's files, why a module, package, file or variable is missing on the nodes."""

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from awsddp.errors import AwsddpError
from awsddp.job.rehearsal_gaps import find_rehearsal_gap
from awsddp.model.records import Cause, JobRecord
from awsddp.session.context import Session
from awsddp.session.next_steps import complete_commands, job_options
from awsddp.settings.loader import with_cluster_settings
from awsddp.settings.spec import OptionValue
from awsddp.settings.verbs import command_arguments

_FILES = ("requirements.txt", "uv.lock", "pyproject.toml", "environment.yml")
_MODULE = re.compile(r"\w[\w.]*")
_WORD = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|<([^>\n]+)>|([^\s'\",;:()<>]+)")
_VARIABLE = re.compile(r"\bos\b.*^KeyError: '([A-Z_][A-Z0-9_]*)'", re.DOTALL | re.MULTILINE)
_ON_NODE = re.compile(r"^(.*/awsddp/work[^/]*/|\./)")


def explain_cause(session: Session, job: JobRecord) -> JobRecord:
    """Return the job. If this machine's files explain the cause, add the reason and a next step to the cause.

    The function explains missing modules, packages, files and variables, and failures that only a rehearsal
    has.
    """
    cause = job.cause
    if cause is None:
        return job
    explain = {
        "import_error": _explain_module,
        "no_metadata": _explain_package,
        "file_not_found": _explain_file,
        "exit": _explain_exit,
    }.get(cause.kind)
    record = session.folder.read()
    with contextlib.suppress(
        AwsddpError, OSError, ValueError
    ):  # the project may have changed or been removed
        if record is not None and (gap := find_rehearsal_gap(record.target, cause)):
            cause = _extend(cause, *gap)
        elif explain is not None:
            cause = explain(session, job, cause)
    return replace(job, cause=replace(cause, next=complete_commands(session, cause.next, job=job)))


def _explain_module(session: Session, job: JobRecord, cause: Cause) -> Cause:
    from awsddp.nodes.project_files import list_project_files
    from awsddp.plan.project import source_folders

    module = cause.values.get("module", "")
    if not _MODULE.fullmatch(module):  # a node's text must not get into a command that the user copies
        return cause
    top = module.partition(".")[0]
    project, listing = (
        Path(session.job_spec.sync.workdir),
        list_project_files(session.job_spec, awsddp_home=session.home),
    )
    for path in _find_modules(project, module):
        if entry := listing.find_ignored(path):
            return _explain_unsynced(session, job, cause, entry)
    for path in _find_modules(project, top):
        folder = Path(path).parent.as_posix()
        if folder in (*source_folders(project), Path(job.script or "").parent.as_posix()):
            return cause  # Python already searches this folder
        advice = _rerun_command(session, job, {"env.variables.PYTHONPATH": folder})
        return _extend(cause, f"{path} is on the nodes, and {folder} is not on the PYTHONPATH", advice)
    if module != top:  # Python names the whole path only if it found the package
        why = f"The code that imports it was written for another version of {top}"
        return _extend(cause, why, f"with --env FILE, set another version of that code's package or of {top}")
    record = session.folder.read()
    env_file = with_cluster_settings(session.job_spec, record.asked if record else {}).env.file
    project_file = next((file for file in _FILES if (project / file).is_file()), None)
    file = env_file or ((project / project_file).as_posix() if project_file else "requirements.txt")
    rerun = _rerun_command(session, job, {"env.file": file})
    if project_file and not env_file:
        return _extend(cause, f"{project_file} exists, but --env does not name it", rerun)
    why = f"{env_file} did not install it" if env_file else "the project has no requirements file"
    return _extend(cause, why, f"name the package of {top} in {file}, then: {rerun}")


def _explain_package(session: Session, job: JobRecord, cause: Cause) -> Cause:
    from awsddp.plan.project import read_toml
    from awsddp.plan.requirements import normalize_name

    package = cause.values.get("package", "")
    if not _MODULE.fullmatch(package.replace("-", "_")):  # as in _explain_module
        return cause
    folder = Path(session.job_spec.sync.workdir)
    file, record = folder / "pyproject.toml", session.folder.read()
    env_file = with_cluster_settings(session.job_spec, record.asked if record else {}).env.file
    document = read_toml(file) if file.is_file() else {}
    is_own = normalize_name(str(document.get("project", {}).get("name", ""))) == normalize_name(package)
    rerun = _rerun_command(
        session, job, {"env.file": env_file or (file.as_posix() if is_own else "requirements.txt")}
    )
    if not is_own:
        return _extend(
            cause, f"{env_file or '--env'} does not name it", f"name {package} in a requirements.txt: {rerun}"
        )
    if env_file and Path(env_file).suffix not in (".toml", ".lock"):
        return _extend(
            cause, f"{env_file} does not name the project itself", f"add the line -e . to {env_file}: {rerun}"
        )
    return _extend(cause, "The project itself is installed only if --env names it", rerun)


def _explain_file(session: Session, job: JobRecord, cause: Cause) -> Cause:
    """Explain why the file in the cause is missing, or else report job data that is not synced."""
    from awsddp.job.script_paths import find_mentioned_data

    explained_cause = _explain_path(session, job, cause)
    if explained_cause is not cause or not job.script:
        return explained_cause
    spec = session.job_spec
    spec_of_job = replace(
        spec, job=replace(spec.job, args=job.args, module=bool(job_options(job).get("job.module")))
    )
    named = find_mentioned_data(spec_of_job, script=job.script, home=session.home)
    return _explain_unsynced(session, job, cause, named[0]) if named else cause


def _explain_path(session: Session, job: JobRecord, cause: Cause, *, files: bool = False) -> Cause:
    """Explain why a path in the cause is missing on the nodes.

    With `files`, only paths of files on this machine are explained.
    """
    from awsddp.nodes.project_files import UNRESOLVABLE_LINK, list_project_files

    listing = list_project_files(session.job_spec, awsddp_home=session.home)
    for match in _WORD.finditer(cause.explanation):
        word = _ON_NODE.sub("", next(filter(None, match.groups())).rstrip("./"))
        if files and not os.path.isfile(listing.root / word):  # noqa: PTH113  # no file may have this name
            continue
        if entry := listing.find_ignored(word):
            return _explain_unsynced(session, job, cause, entry)
        for path, reason in listing.skipped:
            if f"{word}/".startswith(f"{path}/"):
                advice = "copy the data into the project folder, or onto each node: awsddp exec -- COMMAND"
                if reason == UNRESOLVABLE_LINK:
                    target = os.path.relpath(
                        os.path.realpath(listing.root / path), (listing.root / path).parent
                    )
                    advice = shlex.join(["ln", "-sfn", target, path])
                return _extend(cause, f"{path} is here, and is not sent: {reason}", advice)
        if word.startswith("/") and Path(word).exists():
            why = f"{word} is only on this machine: awsddp sends only the project folder"
            return _extend(cause, why, f"move it into {listing.root}, or put it on the nodes")
    return cause


def _explain_exit(session: Session, job: JobRecord, cause: Cause) -> Cause:
    explained_cause = _explain_variable(session, job, cause)
    return _explain_path(session, job, cause, files=True) if explained_cause is cause else explained_cause


def _explain_variable(session: Session, job: JobRecord, cause: Cause) -> Cause:
    match = _VARIABLE.search("\n".join(cause.tail))
    if match is None or match[1] not in os.environ:
        return cause
    advice = _rerun_command(session, job, {f"env.variables.{match[1]}": None})
    return _extend(cause, f"{match[1]} is set on this machine, but not on the nodes", advice)


def _explain_unsynced(session: Session, job: JobRecord, cause: Cause, entry: tuple[str, str]) -> Cause:
    """Return the cause with the reason why a path is not synced and how to send it.

    `entry` is a pair: the excluded path, and the file or key that excludes the path.
    """
    path, source = entry
    folder = path.rpartition("/")[0]
    include = f"!/{folder}/**" if folder and not path.endswith("/") else f"!/{path}"
    patterns = [*session.job_spec.sync.ignore, include]
    advice = {
        "sync.ignore": "remove it from sync.ignore",
        "awsddp": f"move it out of {path}, which is never sent",
    }.get(source, f"{_rerun_command(session, job, {'sync.ignore': patterns})}   # or in awsddp.toml")
    return _extend(cause, f"{path} is here, and {source} keeps it from the nodes", advice)


def _rerun_command(session: Session, job: JobRecord, changes: Mapping[str, OptionValue]) -> str:
    """Return the command that runs the job again with `changes`, a dict of awsddp.toml keys and values."""
    return complete_commands(
        session, shlex.join(["awsddp", "train", *command_arguments("train", changes)]), job=job
    )


def _extend(cause: Cause, why: str, advice: str) -> Cause:
    return replace(cause, explanation=f"{cause.explanation} {why}.", next=advice)


def _find_modules(project: Path, module: str) -> Iterator[str]:
    """Yield a module's paths in the project or in one of its top-level folders, relative to the project."""
    entries = sorted(project.iterdir())
    tops = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    for folder in ("", *tops):
        path = Path(folder, *module.split("."))
        if any((project / path).glob("*.py")):
            yield path.as_posix()
        elif (project / f"{path}.py").is_file():
            yield f"{path.as_posix()}.py"
