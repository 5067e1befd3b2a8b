"""Read the options that verbs share, and open a verb's session and screen."""

import contextlib
import dataclasses
import os
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import click

from awsddp.cli.command_line import COMMAND, Globals
from awsddp.cli.options import complete_files, complete_instance_types, complete_jobs
from awsddp.cli.screen import Screen
from awsddp.errors import UsageError
from awsddp.session.context import Session
from awsddp.session.next_steps import completing_errors
from awsddp.settings.loader import load, option_arguments
from awsddp.settings.spec import FILE, OPTIONS, SECTIONS, ClusterSpec, JobSpec, OptionValue
from awsddp.settings.values import VARIABLE_NAME
from awsddp.settings.verbs import HAS_OPTION

_ASSIGNMENT = re.compile(VARIABLE_NAME.pattern + "=", re.ASCII)


def _ranks_per_node(value: Any) -> Any:
    """Return a number of ranks, or torchrun's value "gpu"."""
    return value if value == "gpu" else click.INT.convert(value, None, None)


_COMPLETIONS = {
    "cluster.instance_type": complete_instance_types,
    "env.file": complete_files,
    "job.resume": complete_jobs,
}


def add_options(verb: str) -> Callable[[Any], Any]:
    """Return a decorator that gives a command the options that set keys of awsddp.toml for `verb`."""

    def decorate(function: Any) -> Any:
        for key in reversed(OPTIONS):
            if key.startswith(HAS_OPTION[verb]):
                function = _option(key)(function)
        return function

    return decorate


def _option(key: str) -> Callable[[Any], Any]:
    """Return the click option that sets a key.

    The option has the key's type, and can be repeated if the key has many values.
    """
    setting, (section, _, name) = OPTIONS[key], key.partition(".")
    hint = typing.get_type_hints(SECTIONS[section])[name]
    kinds = {hint, typing.get_origin(hint), *typing.get_args(hint)}
    flag, *more = setting.option.split()
    help_text = setting.help + (f"  [default: {setting.default}]" if setting.default else "")
    if bool in kinds:
        return click.option(flag, *more, name, is_flag=True, default=None, help=help_text)
    return click.option(
        flag,
        name,
        type=_ranks_per_node if key == "job.nproc_per_node" else next(iter(kinds & {int, float}), str),
        multiple=key == "env.file" or not kinds.isdisjoint({tuple, dict}),
        shell_complete=_COMPLETIONS.get(key),
        metavar=more[0],
        help=help_text,
    )


def read_overrides(values: dict[str, OptionValue]) -> dict[str, OptionValue]:
    """Return a dict that maps each key of awsddp.toml that the command line sets to its value.

    `values` maps click's parameter names to values. `--env NAME=VALUE` has the same effect as --env-var, and
    raises UsageError if the verb has no --env-var.
    """
    by_key: dict[str, OptionValue] = {}
    for key in OPTIONS:
        value = values.get(key.partition(".")[2])
        if value is None or value == ():
            continue
        texts = [str(item) for item in value] if isinstance(value, tuple) else []
        if key == "env.file":
            files = [text for text in texts if not _ASSIGNMENT.match(text) or os.path.exists(text)]  # noqa: PTH110
            by_key |= {key: files[-1]} if files else {}
            texts = [text for text in texts if text not in files]
            _check_env_variables(texts, has_env_var="variables" in values)
        if key in ("env.file", "env.variables"):
            by_key |= dict(map(_parse_variable, texts))
        elif key == "job.nproc_per_node":
            by_key[key] = None if value == "gpu" else value
        else:
            by_key[key] = texts or value
    return by_key


def _check_env_variables(variables: list[str], *, has_env_var: bool) -> None:
    """Store a note for each variable that --env sets.

    Raises UsageError if --env sets a variable and the verb has no --env-var.
    """
    names = [text.partition("=")[0] for text in variables]
    if names and not has_env_var:
        raise UsageError(
            f"--env {names[0]}=...: not a file",
            "variables belong to a job",
            f"awsddp train --env-var {names[0]}=VALUE",
        )
    notes = [f"--env {name}=... sets a variable; it means the same as --env-var {name}=..." for name in names]
    click.get_current_context().meta["awsddp.notes"] = notes


def _parse_variable(text: str) -> tuple[str, str | None]:
    """Return the key that --env-var sets, and its value (None for a secret).

    Raises UsageError if the text is invalid.
    """
    if "=" in text:
        name, value = _split_assignment(text)
        return f"env.variables.{name}", value
    if not VARIABLE_NAME.fullmatch(text):
        raise UsageError(
            f"--env-var {text}: not the name of a variable", "", "use --env-var NAME or --env-var NAME=VALUE"
        )
    return f"env.secrets.{text}", None


def _with_relative_script(job: JobSpec) -> JobSpec:
    """Return the job, with the path of a script in the project folder made relative to that folder."""
    script, workdir = job.job.script, Path(job.sync.workdir)
    if script is None or job.job.module:
        return job
    try:
        path = Path(script).parent.resolve() / Path(script).name
        is_relative = not Path(script).is_absolute() and (workdir / script).exists()
        if is_relative or not (path.is_file() and path.is_relative_to(workdir.resolve())):
            return job
        relative = str(path.relative_to(workdir.resolve()))
    except (OSError, ValueError, RuntimeError):  # no file can have the script's name
        return job
    return dataclasses.replace(job, job=dataclasses.replace(job.job, script=relative))


def specs(options: Globals, explicit: dict[str, OptionValue] | None = None) -> tuple[ClusterSpec, JobSpec]:
    """Return the cluster and job that the global options, `explicit` values and awsddp.toml request.

    Raises ConfigError.
    """
    assignments = (_split_assignment(text.removeprefix("="), sign="-o ") for text in options.override)
    values: dict[str, OptionValue] = dict(assignments)
    login = {"cluster.region": options.region, "cluster.profile": options.profile}
    typed = {key: value for key, value in login.items() if value} | (explicit or {})
    labels = {key: f"-o {key}" for key in values} | {key: _label(key) for key in typed}
    return load(options.name, file=Path(FILE), overrides=values | typed, labels=labels)


@contextlib.contextmanager
def opened(
    options: Globals,
    explicit: dict[str, OptionValue] | None = None,
    *,
    verb: Literal["train", "run"] = "train",
) -> Iterator[tuple[Session, Screen]]:
    """Yield a verb's session and screen; `verb` is "run" if the cluster is terminated after the job."""
    spec, job = specs(options, explicit)
    with contextlib.closing(Screen(options)) as screen:
        screen.begin()
        COMMAND.pause = screen.pause
        COMMAND.session = session = Session(
            name=options.name,
            local=options.local,
            settings=(spec, _with_relative_script(job)),
            on_event=screen.show_event,
            confirms=screen.agree,
            ask=screen.ask,
            verb=verb,
        )
        for note in click.get_current_context().meta.get("awsddp.notes", ()):
            session.say(note)
        if unread := _find_unread_file():
            session.say(f"{unread} is not read: awsddp reads only the {FILE} in the current folder")
        with completing_errors(session):
            yield session, screen


def _label(key: str) -> str:
    """Return the option or argument that sets a key: --nodes, --region, SCRIPT."""
    section, _, name = key.partition(".")
    if key in OPTIONS:
        return option_arguments(key, "")[0]
    return {"job": name.upper(), "env": "--env-var"}.get(section, f"--{name}")


def _find_unread_file() -> Path | None:
    """Return a parent folder's awsddp.toml if the current folder has none."""
    with contextlib.suppress(OSError):  # the current folder was removed or is not readable
        current = Path.cwd()
        if not (current / FILE).exists():
            return next((folder / FILE for folder in current.parents if (folder / FILE).is_file()), None)
    return None


def _split_assignment(text: str, *, sign: str = "--env-var ") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{sign}{text}: no value", "", f"use {sign}NAME=VALUE")
    return name, value
