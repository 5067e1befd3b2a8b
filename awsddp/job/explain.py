"""Why a module, package, file or variable is missing on the nodes, by what is here."""

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from awsddp.errors import AwsddpError
from awsddp.job.rehearsal_gaps import lacking
from awsddp.model.records import Cause, JobRecord
from awsddp.session.context import Session
from awsddp.session.next_steps import advised, job_options
from awsddp.settings.loader import overlaid
from awsddp.settings.spec import Given
from awsddp.settings.verbs import command_words

_FILES = ("requirements.txt", "uv.lock", "pyproject.toml", "environment.yml")
_MODULE = re.compile(r"\w[\w.]*")
_WORD = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|<([^>\n]+)>|([^\s'\",;:()<>]+)")
_VARIABLE = re.compile(r"\bos\b.*^KeyError: '([A-Z_][A-Z0-9_]*)'", re.DOTALL | re.MULTILINE)
_ON_NODE = re.compile(r"^(.*/awsddp/work[^/]*/|\./)")


def explained(session: Session, job: JobRecord) -> JobRecord:
    """Return the job; for a module, a package, a file or a variable that its nodes do not have, and for what
    a rehearsal lacks, the cause says why.
    """
    cause = job.cause
    if cause is None:
        return job
    explain = {
        "import_error": _of_module,
        "no_metadata": _of_package,
        "file_not_found": _of_file,
        "exit": _of_exit,
    }.get(cause.kind)
    record = session.folder.read()
    with contextlib.suppress(AwsddpError, OSError, ValueError):  # the project has changed, or is gone
        if record is not None and (lack := lacking(record.target, cause)):
            cause = _told(cause, *lack)
        elif explain is not None:
            cause = explain(session, job, cause)
    return replace(job, cause=replace(cause, next=advised(session, cause.next, job=job)))


def _of_module(session: Session, job: JobRecord, cause: Cause) -> Cause:
    from awsddp.nodes.project_files import project_files
    from awsddp.plan.project import source_folders

    module = cause.values.get("module", "")
    if not _MODULE.fullmatch(module):  # a node says it, and a command that the user copies will hold it
        return cause
    top = module.partition(".")[0]
    project, listing = Path(session.job_spec.sync.workdir), project_files(session.job_spec, home=session.home)
    for path in _modules(project, module):
        if kept := listing.keeper(path):
            return _kept_here(session, job, cause, kept)
    for path in _modules(project, top):
        folder = Path(path).parent.as_posix()
        if folder in (*source_folders(project), Path(job.script or "").parent.as_posix()):
            return cause  # the script's own folder is where its imports come from
        advice = _again(session, job, {"env.variables.PYTHONPATH": folder})
        return _told(cause, f"{path} is on the nodes, and {folder} is not on the PYTHONPATH", advice)
    if module != top:  # Python names the whole path only where the package itself was found
        why = f"What imports it was written for another version of {top}"
        return _told(cause, why, f"set another version of it, or of {top}, with --env FILE")
    record = session.folder.read()
    asked = overlaid(session.job_spec, record.asked if record else {}).env.file
    there = next((file for file in _FILES if (project / file).is_file()), None)
    file = asked or ((project / there).as_posix() if there else "requirements.txt")
    again = _again(session, job, {"env.file": file})
    if there and not asked:
        return _told(cause, f"{there} exists, but --env does not name it", again)
    why = f"{asked} did not install it" if asked else "no requirements file is there"
    return _told(cause, why, f"name the package of {top} in {file}, then: {again}")


def _of_package(session: Session, job: JobRecord, cause: Cause) -> Cause:
    from awsddp.plan.project import read_toml
    from awsddp.plan.requirements import canonical

    package = cause.values.get("package", "")
    if not _MODULE.fullmatch(package.replace("-", "_")):  # as in _of_module
        return cause
    folder = Path(session.job_spec.sync.workdir)
    file, record = folder / "pyproject.toml", session.folder.read()
    asked = overlaid(session.job_spec, record.asked if record else {}).env.file
    document = read_toml(file) if file.is_file() else {}
    is_own = canonical(str(document.get("project", {}).get("name", ""))) == canonical(package)
    again = _again(session, job, {"env.file": asked or (file.as_posix() if is_own else "requirements.txt")})
    if not is_own:
        return _told(
            cause, f"{asked or '--env'} does not name it", f"name {package} in a requirements.txt: {again}"
        )
    if asked and Path(asked).suffix not in (".toml", ".lock"):
        return _told(
            cause, f"{asked} does not name the project itself", f"add the line -e . to {asked}: {again}"
        )
    return _told(cause, "The project itself is installed where --env names it", again)


def _of_file(session: Session, job: JobRecord, cause: Cause) -> Cause:
    """Say why a file is missing that the cause names; where it names none, which data stays here."""
    from awsddp.job.script_paths import named_data

    found = _of_path(session, job, cause)
    if found is not cause or not job.script:
        return found
    spec = session.job_spec
    asked = replace(
        spec, job=replace(spec.job, args=job.args, module=bool(job_options(job).get("job.module")))
    )
    kept = named_data(asked, script=job.script, home=session.home)
    return _kept_here(session, job, cause, kept[0]) if kept else cause


def _of_path(session: Session, job: JobRecord, cause: Cause, *, files: bool = False) -> Cause:
    """Say why a path is missing that the cause names; with `files` it must be a file here."""
    from awsddp.nodes.project_files import ASTRAY, project_files

    listing = project_files(session.job_spec, home=session.home)
    for match in _WORD.finditer(cause.explanation):
        word = _ON_NODE.sub("", next(filter(None, match.groups())).rstrip("./"))
        if files and not os.path.isfile(listing.root / word):  # noqa: PTH113  # no file may have this name
            continue
        if kept := listing.keeper(word):
            return _kept_here(session, job, cause, kept)
        for path, reason in listing.skipped:
            if f"{word}/".startswith(f"{path}/"):
                advice = "copy what it leads to into the folder, or onto each node: awsddp exec -- COMMAND"
                if reason == ASTRAY:
                    target = os.path.relpath(
                        os.path.realpath(listing.root / path), (listing.root / path).parent
                    )
                    advice = shlex.join(["ln", "-sfn", target, path])
                return _told(cause, f"{path} is here, and is not sent: {reason}", advice)
        if word.startswith("/") and Path(word).exists():
            why = f"{word} is on this machine alone: only the synced folder is sent"
            return _told(cause, why, f"move it into {listing.root}, or put it on the nodes")
    return cause


def _of_exit(session: Session, job: JobRecord, cause: Cause) -> Cause:
    found = _of_variable(session, job, cause)
    return _of_path(session, job, cause, files=True) if found is cause else found


def _of_variable(session: Session, job: JobRecord, cause: Cause) -> Cause:
    found = _VARIABLE.search("\n".join(cause.tail))
    if found is None or found[1] not in os.environ:
        return cause
    advice = _again(session, job, {f"env.variables.{found[1]}": None})
    return _told(cause, f"{found[1]} is set here, and not on the nodes", advice)


def _kept_here(session: Session, job: JobRecord, cause: Cause, kept: tuple[str, str]) -> Cause:
    """Say that a path is here, and what keeps it from the nodes; advise to send all of its folder."""
    path, by = kept
    folder = path.rpartition("/")[0]
    let_in = f"!/{folder}/**" if folder and not path.endswith("/") else f"!/{path}"
    patterns = [*session.job_spec.sync.ignore, let_in]
    advice = {
        "sync.ignore": "remove it from sync.ignore",
        "awsddp": f"move it out of {path}, which is never sent",
    }.get(by, f"{_again(session, job, {'sync.ignore': patterns})}   # or in awsddp.toml")
    return _told(cause, f"{path} is here, and {by} keeps it from the nodes", advice)


def _again(session: Session, job: JobRecord, changes: Mapping[str, Given]) -> str:
    """Return the command that runs the job again with `changes`, by key of awsddp.toml."""
    return advised(session, shlex.join(["awsddp", "train", *command_words("train", changes)]), job=job)


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
