"""Shared options of the verbs, and the context made from them."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from awsddp.cli.completion import files, instance_types, jobs
from awsddp.cli.options import Globals
from awsddp.cli.screen import Screen
from awsddp.cli.signals import WATCH
from awsddp.errors import UsageError
from awsddp.spec import FILE, VARIABLE, JobSpec, load
from awsddp.state import Folder, home
from awsddp.verbs.context import Context

_ASSIGNMENT = re.compile(VARIABLE.pattern + "=", re.ASCII)


def _per_node(value: Any) -> Any:
    """Return a number of ranks, or torchrun's word "gpu"."""
    return value if value == "gpu" else click.INT.convert(value, None, None)


_ENVIRONMENT = click.option(
    "--env",
    "file",
    multiple=True,
    shell_complete=files,
    metavar="FILE",
    help="What the ranks import: requirements.txt, pyproject.toml, uv.lock, environment.yml.",
)

PLAN_OPTIONS = {
    "cluster.nodes": click.option("--nodes", type=int, metavar="N", help="How many nodes.  [default: 2]"),
    "cluster.instance_type": click.option(
        "--instance-type",
        shell_complete=instance_types,
        metavar="TYPE",
        help="EC2 instance type.  [default: the cheapest with enough GPUs; `up`: 8]",
    ),
    "cluster.gpus": click.option("--gpus", metavar="GPU:N", help="GPUs per node: A100:8, A100-80GB:8, L4."),
    "cluster.image": click.option(
        "--image",
        metavar="IMAGE",
        help="Image: an id, a name pattern, or an SSM parameter.  [default: DLAMI]",
    ),
    "cluster.disk_gb": click.option(
        "--disk", "disk_gb", type=int, metavar="GB", help="Root disk.  [default: image + 100, at least 200]"
    ),
    "cluster.spot": click.option(
        "--spot", is_flag=True, default=None, help="Spot instances: cheaper, but AWS may reclaim them."
    ),
    "cluster.budget_usd": click.option(
        "--budget",
        "budget_usd",
        type=float,
        metavar="USD",
        help="Terminate the nodes when this is spent.",
    ),
    "cluster.idle": click.option(
        "--idle",
        metavar="TIME",
        help="Shut down after this time without a job or a login; off.  [default: 60m]",
    ),
    "cluster.expires": click.option(
        "--expires", metavar="TIME", help="Terminate the nodes after this: 90m, 24h, 7d.  [default: 24h]"
    ),
    "env.file": _ENVIRONMENT,
}

JOB_OPTIONS = {
    "job.world_size": click.option(
        "--world-size", type=int, metavar="N", help="Total ranks.  [default: one per GPU]"
    ),
    "job.nproc_per_node": click.option(
        "--nproc-per-node",
        type=_per_node,
        metavar="N",
        help="Ranks per node; gpu: one per GPU, the default.",
    ),
    "job.nnodes": click.option(
        "--nnodes", metavar="MIN:MAX", help="Continue with MIN of MAX nodes; implies torchrun's agent."
    ),
    "job.resume": click.option(
        "--resume",
        shell_complete=jobs,
        metavar="last|JOB",
        help="Give the ranks the newest checkpoint of a job: $AWSDDP_RESUME and {resume}.",
    ),
    "job.after": click.option(
        "--after", metavar="JOB|all", help="Start when this job, or all on the nodes, have ended; no client."
    ),
    "job.on": click.option(
        "--on",
        metavar="NODES",
        help="Use these nodes (0,2-3), or GPUs of nodes (0:4-7), and leave the others to other jobs.",
    ),
    "job.max_restarts": click.option(
        "--max-restarts",
        type=int,
        metavar="N",
        help="Restart the ranks up to N times; implies torchrun's agent.",
    ),
    "job.module": click.option(
        "-m", "--module", is_flag=True, default=None, help="SCRIPT is a module (python -m)."
    ),
    "job.outputs": click.option(
        "--output",
        "outputs",
        multiple=True,
        metavar="PATH",
        help="Also fetch this path (repeatable).",
    ),
    "env.file": _ENVIRONMENT,
    "env.variables": click.option(
        "--env-var",
        "variables",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="Set this for every rank (repeatable); NAME alone: a secret, its value from this environment.",
    ),
    "job.name": click.option(
        "--name", metavar="NAME", help="The job's name.  [default: script, time, 4 digits]"
    ),
    "job.timeout": click.option("--timeout", metavar="TIME", help="End the job after this: 90m, 24h."),
}


def options_of(*groups: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds the groups' options; `overrides` maps them to keys of awsddp.toml."""

    def decorate(function: Any) -> Any:
        options = {key: option for group in groups for key, option in group.items()}
        for option in reversed(options.values()):
            function = option(function)
        return function

    return decorate


def overrides(given: dict[str, Any]) -> dict[str, object]:
    """Return the options given on the command line, by key of awsddp.toml."""
    found: dict[str, object] = {}
    for key in (*PLAN_OPTIONS, *JOB_OPTIONS):
        value = given.get(key.partition(".")[2])
        if value is None or value == ():
            continue
        if key == "env.file":
            files = [text for text in value if not _ASSIGNMENT.match(text) or Path(text).exists()]
            found |= {key: files[-1]} if files else {}
            found |= _variables(given, [text for text in value if text not in files])
        elif key == "env.variables":
            found |= dict(map(_variable, value))
        elif key == "job.nproc_per_node":
            found[key] = None if value == "gpu" else value
        else:
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


def _variables(given: dict[str, Any], texts: list[str]) -> dict[str, object]:
    """Return what `--env NAME=VALUE` sets: the same as --env-var. Raises UsageError for a verb without it."""
    if texts and "variables" not in given:
        name = texts[0].partition("=")[0]
        raise UsageError(
            f"--env {name}=...: not a file",
            "variables belong to a job",
            f"awsddp train --env-var {name}=VALUE",
        )
    pairs = [_pair(text) for text in texts]
    notes = [f"--env {name}=... sets a variable, as --env-var {name}=... does" for name, _ in pairs]
    click.get_current_context().meta["awsddp.notes"] = notes
    return {f"env.variables.{name}": text for name, text in pairs}


def _variable(text: str) -> tuple[str, str | None]:
    """Return the key that --env-var sets, and its value: None for a secret. Raises UsageError."""
    if "=" in text:
        name, value = _pair(text)
        return f"env.variables.{name}", value
    if not VARIABLE.fullmatch(text):
        raise UsageError(
            f"--env-var {text}: not the name of a variable", "", "use --env-var NAME or --env-var NAME=VALUE"
        )
    return f"env.secrets.{text}", None


def _script_of(job: JobSpec) -> JobSpec:
    """Return the job with its script relative to the work folder, also where it was named from elsewhere."""
    script, workdir = job.job.script, Path(job.sync.workdir)
    if script is None or job.job.module:
        return job
    try:
        path = Path(script).parent.resolve() / Path(script).name
        known = not Path(script).is_absolute() and (workdir / script).exists()
        if known or not (path.is_file() and path.is_relative_to(workdir.resolve())):
            return job
        inside = str(path.relative_to(workdir.resolve()))
    except (OSError, ValueError, RuntimeError):  # a name that no file can have
        return job
    return dataclasses.replace(job, job=dataclasses.replace(job.job, script=inside))


@contextlib.contextmanager
def opened(options: Globals, explicit: dict[str, object] | None = None) -> Iterator[tuple[Context, Screen]]:
    """Yield a verb's context and its screen."""
    values: dict[str, object] = {}
    for text in options.override:
        key, value = _pair(text.removeprefix("="), sign="-o ")
        values[key] = value
    if options.region:
        values["cluster.region"] = options.region
    if options.profile:
        values["cluster.profile"] = options.profile
    spec, job = load(options.name, file=Path(FILE), overrides=values | (explicit or {}))
    with Screen(options) as screen:
        ctx = Context(
            spec=spec,
            job=_script_of(job),
            folder=Folder(home(), options.name),
            on_event=screen.event,
            local=options.local,
            agree=screen.agree,
        )
        WATCH.context = ctx
        for note in click.get_current_context().meta.get("awsddp.notes", ()):
            ctx.say(note)
        if unread := _unread():
            ctx.say(f"{unread} is not read: awsddp reads only the {FILE} in the current folder")
        yield ctx, screen


def _unread() -> Path | None:
    """Return the awsddp.toml of a folder above this one, where this one has none."""
    with contextlib.suppress(OSError):  # a folder that is gone, or that cannot be read
        here = Path.cwd()
        if not (here / FILE).exists():
            return next((folder / FILE for folder in here.parents if (folder / FILE).is_file()), None)
    return None


def _pair(text: str, *, sign: str = "--env-var ") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{sign}{text}: no value", "", f"use {sign}NAME=VALUE")
    return name, value
