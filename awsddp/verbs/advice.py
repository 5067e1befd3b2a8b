"""The commands that messages recommend. They repeat or continue what was requested, where it was.

And what an interrupted command leaves behind: what may still cost money, and the commands that end it.
"""

import os
import re
import shlex
from collections.abc import Mapping

from awsddp.cluster import ACTIVE, Job
from awsddp.errors import AwsddpError, Interrupted
from awsddp.jobs.ranks import SECRET
from awsddp.report import iso, money
from awsddp.resources import is_bundled
from awsddp.spec import NOT_SHOWN, OPTION, option_words, options_of, settings
from awsddp.state import Folder, Record
from awsddp.verbs.context import Context

OF_CLUSTER = (
    *("plan", "up", "status", "sync", "train", "jobs", "logs", "cancel", "fetch", "exec", "ssh", "doctor"),
    *("report", "stop", "down", "run"),
)
"""The verbs that work on one cluster, and take -c in advice."""
_COMMAND = re.compile(rf"\bawsddp (?=(?:{'|'.join(OF_CLUSTER)})\b)")
_ELSEWHERE = ("cluster.region", "cluster.profile", "sync.workdir")
"""Keys that are global options, or those of a job."""


def global_words(
    folder: Folder, *, local: bool, region: str | None, profile: str | None, is_kept: bool = True
) -> list[str]:
    """Return the global options that a command needs to mean this cluster; `region` and `profile` as given.

    What the cluster's record holds is left out, unless the command may be typed once it is gone (not
    `is_kept`).
    """
    default = os.environ.get("AWSDDP_CLUSTER") or "default"
    words = ["-c", folder.name] if folder.name != default else []
    record = folder.read(newer=True) if is_kept else None
    if record is not None:  # no option moves a cluster
        other = record.target.name == "aws" and profile not in (None, record.target.profile)
        return [*words, "--profile", str(profile)] if other else words
    for name, value in (("--profile", profile), ("--region", region)):
        words += [name, value] if value else []
    return [*words, "--local"] if local else words


def global_words_of(ctx: Context, *, is_kept: bool = True) -> list[str]:
    """Return `global_words` for the cluster of a context."""
    record, typed = ctx.folder.read(newer=True), ctx.spec.from_cli
    return global_words(
        ctx.folder,
        local=ctx.local or (record is not None and record.target.name == "local"),
        region=ctx.spec.cluster.region if "cluster.region" in typed else None,
        profile=ctx.spec.cluster.profile if "cluster.profile" in typed else None,
        is_kept=is_kept,
    )


def named(text: str, words: list[str]) -> str:
    """Return `text` with these global options in each of its commands that has none yet."""

    def filled(match: re.Match[str]) -> str:
        given = match.string[match.end() :].partition("\n")[0].split()
        needed = [shlex.quote(word) for word in words if word != "--local" or word not in given]
        return "".join(f"{word} " for word in ["awsddp", *needed])

    return _COMMAND.sub(filled, text)


def up_again(ctx: Context) -> str:
    """Return the `up` that continues this command: with the options that were typed."""
    return shlex.join(
        ["awsddp", "up", *_typed(ctx, "cluster", "network", "access", "capacity", "tags", "env")]
    )


def train_again(ctx: Context, job: Job, changes: Mapping[str, object]) -> str:
    """Return the command that runs the job again with `changes`, by key of awsddp.toml.

    `run` ends its cluster: then it is a `run` with the cluster's options that were typed.
    """
    words = [*global_words_of(ctx, is_kept=ctx.verb != "run"), ctx.verb]
    if ctx.verb == "run":
        words += _typed(ctx, "cluster", "network", "access", "capacity", "tags")
    plain = {name: value for name, value in ctx.job.env.variables.items() if not SECRET.search(name)}
    return shlex.join(["awsddp", *words, *job_words(job, changes, variables=plain)])


def job_words(
    job: Job, changes: Mapping[str, object] | None = None, *, variables: Mapping[str, str] | None = None
) -> list[str]:
    """Return the arguments of `train` for a job as it was requested, with `changes` by key of awsddp.toml.

    A variable gets its value from `variables`; without one, it is read where the command is typed.
    """
    known = variables or {}
    options = options_of(job.options) | dict(changes or {})
    words = []
    for key, value in options.items():
        name = key.removeprefix("env.variables.")
        if name == key:
            words += option_words(key, value)
        else:
            given = known.get(name) if value is None else value
            words += ["--env-var", name if given is None else f"{name}={given}"]
    words += ["--resume", job.resumed] if job.resumed else []
    words += [] if job.script is None or is_bundled(job.script) else [job.script]
    return [*words, *(["--", *job.args] if job.args else [])]


def _typed(ctx: Context, *sections: str) -> list[str]:
    """Return the options of these sections of awsddp.toml that this command line set."""
    return [
        word
        for key, value, source in settings(ctx.spec, ctx.job)
        if source == OPTION and key.partition(".")[0] in sections and key not in (*NOT_SHOWN, *_ELSEWHERE)
        for word in option_words(key, value)
    ]


def interruption(ctx: Context) -> Interrupted:
    """Return the error that an interrupted command ends with, from the cluster's folder alone."""
    record = ctx.folder.read(newer=True)
    if record is None and ctx.local:
        next = "awsddp local status\nawsddp local stop   # end it and all that it has"
        return Interrupted("interrupted", "the local cloud may be running", next)
    if record is None:
        return Interrupted("interrupted", f"no record of cluster {ctx.spec.name} on this machine")
    running = [job.job for job in record.jobs if job.state in ACTIVE]
    why = [f"they expire at {iso(record.expires)}"]
    if running:
        why.append(f"job {running[-1]} keeps running without this machine, unless it has ended")
    ways = [f"awsddp logs -f {job}   # follow it and fetch its results" for job in running[-1:]]
    if not record.prepared:
        ways.append(f"{up_again(ctx)}   # continue")
    ways.append("awsddp down   # terminate them")
    return Interrupted(f"interrupted: {_machines(record)}", "\n".join(why), "\n".join(ways))


def what_runs_on(ctx: Context, error: AwsddpError) -> None:
    """Add to an error what may still run and cost money, where AWS cannot be asked any more."""
    record = ctx.folder.read(newer=True)
    if record is None:
        return
    ids = ", ".join(one.instance_id for one in record.prepared)
    ids = f" ({ids})" if ids else ""
    error.why = f"{error.why}\n{_machines(record)}{ids}; they expire at {iso(record.expires)}".lstrip("\n")
    error.next = f"{error.next}\nawsddp down   # then end them".lstrip("\n")


def _machines(record: Record) -> str:
    machines = f"{record.nodes} x {record.instance_type} may run"
    if record.target.name == "local":
        return f"{machines} in the local cloud, free of charge"
    return f"{machines} in {record.target.region}, at {money(record.price_usd_per_hour)} per hour"
