"""What to type next: the commands that messages recommend, as this user has to type them, where it is.

A message names a command ("awsddp up   # continue"), and `advised` adds what selects the cluster and what was
asked. And what an interrupted command leaves behind.
"""

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from awsddp.agent_client.rank_layout import SECRET
from awsddp.errors import AwsddpError, Interrupted
from awsddp.model.records import ACTIVE, JobRecord
from awsddp.session.advice import Command, Line, read_advice
from awsddp.session.context import Session
from awsddp.session.resume_option import resume_option
from awsddp.settings.loader import EXCLUSIVE, NOT_SHOWN, option_words, options_of, settings
from awsddp.settings.spec import OPTION, Given
from awsddp.settings.verbs import HEEDS, OF_JOB, SCRIPT, command_words, script_words
from awsddp.state import Folder, Record
from awsddp.util.format import iso, money
from awsddp.util.shipped_files import is_bundled

_AWS = re.compile(r"\baws (?=(ec2|iam|s3|s3api) )")
_HIDDEN = (NOT_SHOWN - {"job.resume", *SCRIPT}) | {"cluster.region", "cluster.profile"}
"""Keys that no advice repeats: they may hold a secret, are said otherwise, or are global options."""


def global_words(
    folder: Folder, *, local: bool, region: str | None, profile: str | None, is_kept: bool = True
) -> list[str]:
    """Return the global options that a command needs to mean this cluster; `region` and `profile` as given.

    What the cluster's record holds is left out, unless the command is typed once it is gone (not `is_kept`).
    """
    default = os.environ.get("AWSDDP_CLUSTER") or "default"
    words = ["-c", folder.name] if folder.name != default else []
    record = folder.read(newer=True)
    if record is not None and is_kept:  # no option moves a cluster
        other = record.target.name == "aws" and profile not in (None, record.target.profile)
        return [*words, "--profile", str(profile)] if other else words
    if record is not None:
        local = record.target.name == "local"
        profile, region = profile or record.target.profile, region or record.target.region
    if local:
        return [*words, "--local"]
    words += ["--profile", profile] if profile else []
    return words + (["--region", region] if region else [])


def advised(session: Session, text: str, *, job: JobRecord | None = None) -> str:
    """Return a message with its commands as this user has to type them.

    Each gets the global options that select the cluster. One at the start of a line also gets what was asked:
    the options of this command line that its verb heeds, but for those that the text names itself; `train`
    those of `job`, its script and arguments, and where `run` ended the cluster with the job it is that `run`.
    What follows a `down` in the same line gets what the cluster was asked for. AWS's own commands go to the
    local cloud where the cluster is there.
    """
    return "\n".join(str(_for_user(session, line, job)) for line in read_advice(_rehearsed(session, text)))


def _rehearsed(session: Session, text: str) -> str:
    """Return a message whose commands of AWS's command line reach the local cloud where it is there."""
    if not _AWS.search(text):
        return text
    record = session.folder.read(newer=True)
    if not (record.target.name == "local" if record is not None else session.local):
        return text
    from awsddp.local.client import variables

    if found := variables(session.home, record.target.daemon_home if record is not None else None):
        reached = shlex.join(found)
        return text if reached in text else _AWS.sub(lambda match: f"{reached} {match[0]}", text)
    return "awsddp local start   # it shows how any AWS client reaches the local cloud"


def _for_user(session: Session, line: Line, job: JobRecord | None) -> Line:
    """Return a line with the global options of each command, if it is typed also with what was asked.

    After a `down` there is no cluster any more.
    """
    if not line.has_commands:
        return line
    if line.is_typed:
        line = _asked_for(session, _without_up(line) if session.verb == "run" else line, job)
    typed = frozenset() if " --local" in str(line) else session.spec.from_cli  # one region, and no profile
    region = session.spec.cluster.region if "cluster.region" in typed else None
    profile = session.spec.cluster.profile if "cluster.profile" in typed else None
    words = partial(global_words, session.folder, local=session.local, region=region, profile=profile)
    return line.with_options(words(), words(is_kept=False))


def _without_up(line: Line) -> Line:
    """Return a line whose `train` has the options of an `up` before it: `run` brings its own cluster up."""
    parts = list(line.parts)
    for at in range(len(parts) - 2):
        up, joined, train = parts[at : at + 3]
        if joined != " && " or not isinstance(up, Command) or not isinstance(train, Command):
            continue
        if (up.verb, train.verb) == ("up", "train"):
            train = replace(train, typed=f"{up.typed} {train.typed}".strip())
            return replace(line, parts=(*parts[:at], train, *parts[at + 3 :]))
    return line


def _asked_for(session: Session, line: Line, job: JobRecord | None) -> Line:
    """Return a line whose commands have what was asked: by this command line, or of the job."""
    parts: list[Command | str] = []
    is_gone = False
    for part in line.parts:
        if isinstance(part, Command):
            parts.append(_with_asked(session, part, job, is_gone=is_gone))
            is_gone |= part.verb == "down"
        else:
            parts.append(part)
    return replace(line, parts=tuple(parts))


def _with_asked(session: Session, command: Command, job: JobRecord | None, *, is_gone: bool) -> Command:
    given = command.words
    if given is None:
        return command
    verb = session.verb if command.verb == "train" and job is not None else command.verb
    asked = _asked(session, verb, job, is_gone=is_gone)
    added = command_words(verb, {key: value for key, value in asked.items() if not _names(given, key)})
    if job is not None and "--resume" in given:
        asked["job.args"] = [*job.args, *_resume_words(session, job)]
    last = script_words(asked)
    last = [] if {"SCRIPT", "--", *last[:1]} & {*given} else last
    return replace(command, verb=verb, asked=tuple(added), last=tuple(last))


def _names(given: Sequence[str], key: str) -> bool:
    """Return whether the words of a command set a key, or one that excludes it."""
    same = EXCLUSIVE if key in EXCLUSIVE else {key, key.removeprefix("env.variables.")}
    signs = {option_words(one, "")[0] for one in same} - {"-o"}
    return not signs.isdisjoint(given) or any(word.partition("=")[0] in same for word in given)


def _asked(session: Session, verb: str, job: JobRecord | None, *, is_gone: bool) -> dict[str, Given]:
    """Return what was asked and this verb heeds, by key: by this command line, or for the job."""
    now = settings(session.spec, session.job_spec)
    found: dict[str, Given] = {key: value for key, value, source in now if source == OPTION}
    variables = {
        f"env.variables.{name}": None if SECRET.search(name) else text
        for name, text in session.job_spec.env.variables.items()
    }
    found |= variables if "env.variables" in found else {}
    record = session.folder.read(newer=True) if is_gone else None
    if record is not None:
        standing = {key: value for key, value, _ in now}
        asked = {"cluster.nodes": record.nodes} | record.asked
        found = {key: value for key, value in asked.items() if standing.get(key) != value} | found
        found.pop("cluster.replace", None)  # that machine is gone, too
    if job is not None and verb in ("train", "run"):
        found = {key: value for key, value in found.items() if not key.startswith(OF_JOB)}
        found |= job_options(job)
        found |= {key: variables[key] for key in found.keys() & variables.keys()}
    return {key: value for key, value in found.items() if key.startswith(HEEDS[verb]) and key not in _HIDDEN}


def job_options(job: JobRecord) -> dict[str, Given]:
    """Return what a job was asked, by key of awsddp.toml; the values of its variables are not known.

    Its nodes say it: a key that is not a job's, such as a rule for SSH, is left out.
    """
    found = {key: value for key, value in options_of(job.options).items() if key.startswith(OF_JOB)}
    if job.started is not None:
        found.pop("job.after", None)  # that job has ended
    found |= {"job.resume": job.resumed} if job.resumed else {}
    return found | {"job.script": job.script, "job.args": job.args}


def resume_note(session: Session, job: JobRecord) -> str:
    """Return what the script of a job has to do so that --resume continues it, "" where it does that."""
    option = _resume_option(session, job)
    takes = option is not None or any("{resume}" in word for word in job.args)
    return "" if takes else "   # the script has to read $AWSDDP_RESUME"


def _resume_words(session: Session, job: JobRecord) -> list[str]:
    """Return the arguments that give the script of a job its checkpoint, where it needs some more."""
    option = _resume_option(session, job)
    return [option, "{resume}"] if option and not any("{resume}" in word for word in job.args) else []


def _resume_option(session: Session, job: JobRecord) -> str | None:
    if not job.script or is_bundled(job.script):
        return ""
    return resume_option(Path(session.job_spec.sync.workdir), job.script)


@contextlib.contextmanager
def advising(session: Session) -> Iterator[None]:
    """Within the context an error names what was typed, and what to type next."""
    try:
        yield
    except AwsddpError as error:
        advise(session, error)
        raise


def advise(session: Session, error: AwsddpError) -> None:
    """Word an error as this user typed: the key that it begins with, and the commands that it recommends."""
    key, colon, rest = error.message.partition(": ")
    error.message = session.job_spec.label(session.spec.label(key)) + colon + rest
    error.next = advised(session, error.next)


def interruption(session: Session, *, again: str = "") -> Interrupted:
    """Return the error that an interrupted command ends with, from the cluster's folder alone.

    `again` is the command that goes on where it was cut.
    """
    record = session.folder.read(newer=True)
    if record is None and session.local:
        next = "awsddp local status\nawsddp local stop   # end it and all that it has"
        return Interrupted("interrupted", "the local cloud may be running", next)
    if record is None:
        return Interrupted("interrupted", f"no record of cluster {session.spec.name} on this machine")
    running = [job.job for job in record.jobs if job.state in ACTIVE]
    why = [f"they expire at {iso(record.expires)}"]
    if running:
        why.append(f"job {running[-1]} keeps running without this machine, unless it has ended")
    ways = [f"{again}   # goes on"] if again else []
    if again == "awsddp down":
        return Interrupted(f"interrupted: {_machines(record)}", "\n".join(why), *ways)
    ways += [f"awsddp logs -f {job}   # follow it and fetch its results" for job in running[-1:]]
    if not record.prepared:
        ways.append("awsddp up   # continue")
    ways.append("awsddp down   # terminate them")
    return Interrupted(f"interrupted: {_machines(record)}", "\n".join(why), "\n".join(ways))


def what_runs_on(session: Session, error: AwsddpError) -> None:
    """Add to an error what may still run and cost money, where AWS cannot be asked any more."""
    record = session.folder.read(newer=True)
    if record is None:
        return
    ids = ", ".join(one.instance_id for one in record.prepared)
    ids = f" ({ids})" if ids else ""
    error.why = f"{error.why}\n{_machines(record)}{ids}; they expire at {iso(record.expires)}".lstrip("\n")
    error.next = f"{error.next}\nawsddp down   # then end them".lstrip("\n")


def _machines(record: Record) -> str:
    return f"{record.nodes} x {record.instance_type} may run{costs(record)}"


def costs(record: Record) -> str:
    """Return where a cluster runs and what that costs, to end a sentence about its nodes."""
    if record.target.name == "local":
        return " on this machine, free"
    return f" in {record.target.region}, at {money(record.price_usd_per_hour)} per hour"
