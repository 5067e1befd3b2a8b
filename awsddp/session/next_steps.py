"""Complete the commands that messages recommend, and report what an interrupted command leaves behind.

A message contains a short command ("awsddp up   # continue"). `complete_commands` adds the options that
select the cluster, and those on the current command line.
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
from awsddp.plan.recovery import MACHINE_CAUSES
from awsddp.session.advice import Command, Line, parse_message
from awsddp.session.context import Session
from awsddp.session.resume_option import resume_option
from awsddp.settings.loader import (
    EXCLUSIVE_KEYS,
    KEYS_NOT_RECORDED,
    list_settings,
    option_arguments,
    parse_job_arguments,
)
from awsddp.settings.spec import OPTION, OptionValue
from awsddp.settings.verbs import HEEDS, JOB_KEYS, SCRIPT_KEYS, command_arguments, script_arguments
from awsddp.state import ClusterFolder, Record
from awsddp.util.formatting import money, optional_utc
from awsddp.util.shipped_files import is_bundled

_AWS = re.compile(r"\baws (?=(ec2|iam|s3|s3api) )")
_HIDDEN = (KEYS_NOT_RECORDED - {"job.resume", *SCRIPT_KEYS}) | {"cluster.region", "cluster.profile"}
"""The keys that are never added to a command here: possible secrets, global options, and keys added
elsewhere."""


def global_options(
    folder: ClusterFolder, *, local: bool, region: str | None, profile: str | None, has_record: bool = True
) -> list[str]:
    """Return the global options that select this cluster.

    `region` and `profile` are None if they were not requested. With `has_record`, options that the record
    implies are omitted; pass False for a command that is typed after a `down`.
    """
    default = os.environ.get("AWSDDP_CLUSTER") or "default"
    words = ["-c", folder.name] if folder.name != default else []
    record = folder.read(ignore_newer=True)
    if record is not None and has_record:  # no option can move a cluster
        is_other_profile = record.target.name == "aws" and profile not in (None, record.target.profile)
        return [*words, "--profile", str(profile)] if is_other_profile else words
    if record is not None:
        local = record.target.name == "local"
        profile, region = profile or record.target.profile, region or record.target.region
    if local:
        return [*words, "--local"]
    words += ["--profile", profile] if profile else []
    return words + (["--region", region] if region else [])


def complete_commands(session: Session, text: str, *, job: JobRecord | None = None) -> str:
    """Return a message with its commands completed, so that the user can type them as they are.

    Each command gets the global options that select the cluster. A command at the start of a line also gets
    those options of the current command line that the command's verb reads and that the command does not set.
    With `job`, `train` gets that job's options, script and arguments, and becomes `run` if the current verb
    is `run`; `recover` gets the job's name. A command after a `down` on the same line gets the cluster's
    settings. AWS CLI commands get the local cloud's variables if the cluster is in the local cloud.
    """
    return "\n".join(
        str(_complete_line(session, line, job)) for line in parse_message(_with_local_cloud(session, text))
    )


def _with_local_cloud(session: Session, text: str) -> str:
    """Return the message; if the cluster is in the local cloud, AWS CLI commands get the variables for it."""
    if not _AWS.search(text):
        return text
    record = session.folder.read(ignore_newer=True)
    if not (record.target.name == "local" if record is not None else session.local):
        return text
    from awsddp.local.client import list_aws_variables

    if client_variables := list_aws_variables(
        session.home, record.target.daemon_home if record is not None else None
    ):
        prefix = shlex.join(client_variables)
        return text if prefix in text else _AWS.sub(lambda match: f"{prefix} {match[0]}", text)
    return "awsddp local start   # it shows how any AWS client reaches the local cloud"


def _complete_line(session: Session, line: Line, job: JobRecord | None) -> Line:
    """Return a line with all options added to its commands."""
    if not line.has_commands:
        return line
    if line.is_typed:
        line = _with_all_options(session, _without_up(line) if session.verb == "run" else line, job)
    # The local cloud has one region and no profile.
    typed = frozenset() if " --local" in str(line) else session.spec.from_cli
    region = session.spec.cluster.region if "cluster.region" in typed else None
    profile = session.spec.cluster.profile if "cluster.profile" in typed else None
    words = partial(global_options, session.folder, local=session.local, region=region, profile=profile)
    return line.with_options(words(), words(has_record=False))


def _without_up(line: Line) -> Line:
    """Return the line with `up ... && train ...` joined to one `train` with all options.

    `run` needs this, because it includes `up`.
    """
    parts = list(line.parts)
    for index in range(len(parts) - 2):
        up, joined, train = parts[index : index + 3]
        if joined != " && " or not isinstance(up, Command) or not isinstance(train, Command):
            continue
        if (up.verb, train.verb) == ("up", "train"):
            train = replace(train, typed=f"{up.typed} {train.typed}".strip())
            return replace(line, parts=(*parts[:index], train, *parts[index + 3 :]))
    return line


def _with_all_options(session: Session, line: Line, job: JobRecord | None) -> Line:
    """Return a line with the current command line's options, or the job's, added to its commands."""
    parts: list[Command | str] = []
    is_gone = False
    for part in line.parts:
        if isinstance(part, Command):
            parts.append(_with_options(session, part, job, is_gone=is_gone))
            is_gone |= part.verb == "down"
        else:
            parts.append(part)
    return replace(line, parts=tuple(parts))


def _with_options(session: Session, command: Command, job: JobRecord | None, *, is_gone: bool) -> Command:
    typed_words = command.words
    if typed_words is None:
        return command
    verb = session.verb if command.verb == "train" and job is not None else command.verb
    options = _options_for(session, verb, job, is_gone=is_gone)
    added = command_arguments(
        verb, {key: value for key, value in options.items() if not _sets_key(typed_words, key)}
    )
    if job is not None and "--resume" in typed_words:
        options["job.args"] = [*job.args, *resume_words(session, job)]
    script = [job.job] if verb == "recover" and job is not None else script_arguments(options)
    script = [] if {"SCRIPT", "--", *script[:1]} & {*typed_words} else script
    return replace(command, verb=verb, verb_options=tuple(added), script_words=tuple(script))


def _sets_key(words: Sequence[str], key: str) -> bool:
    """Return True if the words of a command set `key`, or another key that excludes `key`."""
    same = EXCLUSIVE_KEYS if key in EXCLUSIVE_KEYS else {key, key.removeprefix("env.variables.")}
    signs = {option_arguments(other, "")[0] for other in same} - {"-o"}
    return not signs.isdisjoint(words) or any(word.partition("=")[0] in same for word in words)


def _options_for(
    session: Session, verb: str, job: JobRecord | None, *, is_gone: bool
) -> dict[str, OptionValue]:
    """Return the settings that a verb reads, by key, from the command line or from the job."""
    all_settings = list_settings(session.spec, session.job_spec)
    options: dict[str, OptionValue] = {key: value for key, value, source in all_settings if source == OPTION}
    variables = {
        f"env.variables.{name}": None if SECRET.search(name) else text
        for name, text in session.job_spec.env.variables.items()
    }
    options |= variables if "env.variables" in options else {}
    record = session.folder.read(ignore_newer=True) if is_gone else None
    if record is not None:
        current = {key: value for key, value, _ in all_settings}
        recorded = {"cluster.nodes": record.nodes} | record.asked
        options = {key: value for key, value in recorded.items() if current.get(key) != value} | options
        options.pop("cluster.replace", None)  # the node to replace is gone as well
    if job is not None and verb in ("train", "run"):
        options = {key: value for key, value in options.items() if not key.startswith(JOB_KEYS)}
        options |= job_options(job)
        options |= {key: variables[key] for key in options.keys() & variables.keys()}
    return {
        key: value for key, value in options.items() if key.startswith(HEEDS[verb]) and key not in _HIDDEN
    }


def job_options(job: JobRecord) -> dict[str, OptionValue]:
    """Return a job's settings by awsddp.toml key. The values of the job's variables are not known.

    Keys that do not belong to a job, such as an SSH rule, are ignored, because nodes report these settings
    and nodes are not trusted.
    """
    options = {
        key: value for key, value in parse_job_arguments(job.options).items() if key.startswith(JOB_KEYS)
    }
    if job.started is not None:
        options.pop("job.after", None)  # the job that this job waited for has ended
    options |= {"job.resume": job.resumed} if job.resumed else {}
    return options | {"job.script": job.script, "job.args": job.args}


def make_recover_line(session: Session, job: JobRecord) -> str:
    """Return the shell line that continues a job's run after a machine's fault, without a terminal."""
    options = global_options(
        session.folder, local=session.local, region=None, profile=session.spec.cluster.profile
    )
    words = ["awsddp", *options, "recover", job.job, "--detach"]
    words += ["-o", "capacity.retry_until_up=true"] if session.spec.capacity.retry_until_up else []
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"


def resume_note(session: Session, job: JobRecord) -> str:
    """Return a note if a job's script does not take a checkpoint as an option or argument, or else ""."""
    option = _resume_option(session, job)
    takes = option is not None or any("{resume}" in argument for argument in job.args)
    return "" if takes else "   # the script has to read $AWSDDP_RESUME"


def resume_words(session: Session, job: JobRecord) -> list[str]:
    """Return the arguments to add so that a job's script gets the checkpoint."""
    option = _resume_option(session, job)
    return [option, "{resume}"] if option and not any("{resume}" in argument for argument in job.args) else []


def _resume_option(session: Session, job: JobRecord) -> str | None:
    if not job.script or is_bundled(job.script):
        return ""
    return resume_option(Path(session.job_spec.sync.workdir), job.script)


@contextlib.contextmanager
def completing_errors(session: Session) -> Iterator[None]:
    """Complete the labels and commands in an error that is raised in the context."""
    try:
        yield
    except AwsddpError as error:
        complete_error(session, error)
        raise


def complete_error(session: Session, error: AwsddpError) -> None:
    """Complete the commands in an error, in place. If the message begins with a key, write the key as the
    user wrote it."""
    key, colon, message = error.message.partition(": ")
    error.message = session.job_spec.label(session.spec.label(key)) + colon + message
    error.next = complete_commands(session, error.next)


def make_interrupted_error(session: Session, *, continue_command: str = "") -> Interrupted:
    """Return the error with which an interrupted command ends. Reads only the cluster's folder.

    `continue_command` is the command that continues the interrupted command's work.
    """
    record = session.folder.read(ignore_newer=True)
    next_steps = [f"{continue_command}   # goes on"] if continue_command else []
    if record is None and session.local:
        next_steps += ["awsddp local status", "awsddp local stop   # end the local cloud and its nodes"]
        return Interrupted("interrupted", "the local cloud may be running", "\n".join(next_steps))
    if record is None:
        no_record = f"no record of cluster {session.spec.name} on this machine"
        return Interrupted("interrupted", no_record, *next_steps)
    active = [job.job for job in record.jobs if job.state in ACTIVE]
    last = record.jobs[-1] if record.jobs else None
    is_lost = last is not None and last.cause is not None and last.cause.kind in MACHINE_CAUSES
    if session.job_spec.job.recover and last and is_lost and not continue_command:
        next_steps.append(f"awsddp recover {last.job}   # goes on")
    why = [f"they expire at {optional_utc(record.expires)}"]
    if active:
        why.append(f"job {active[-1]} keeps running without this machine, unless it has ended")
    if continue_command == "awsddp down":
        return Interrupted(f"interrupted: {_describe_nodes(record)}", "\n".join(why), *next_steps)
    next_steps += [f"awsddp logs -f {job}   # follow it and fetch its results" for job in active[-1:]]
    if not record.prepared:
        next_steps.append("awsddp up   # continue")
    next_steps.append("awsddp down   # terminate them")
    return Interrupted(f"interrupted: {_describe_nodes(record)}", "\n".join(why), "\n".join(next_steps))


def add_running_costs(session: Session, error: AwsddpError) -> None:
    """If AWS cannot be queried, add to an error which nodes may still run and cost money."""
    record = session.folder.read(ignore_newer=True)
    if record is None:
        return
    ids = ", ".join(node.instance_id for node in record.prepared)
    nodes = _describe_nodes(record) + (f" ({ids})" if ids else "")
    error.why = f"{error.why}\n{nodes}; they expire at {optional_utc(record.expires)}".lstrip("\n")
    error.next = f"{error.next}\nawsddp down   # then end them".lstrip("\n")


def _describe_nodes(record: Record) -> str:
    return f"{record.nodes} x {record.instance_type} may run{describe_cost(record)}"


def describe_cost(record: Record) -> str:
    """Return a cluster's location and hourly price, as the end of a sentence about its nodes."""
    if record.target.name == "local":
        return " on this machine, free"
    return f" in {record.target.region}, at {money(record.price_usd_per_hour)} per hour"
