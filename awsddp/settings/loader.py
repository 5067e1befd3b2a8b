"""Load settings: options override AWSDDP_* variables, which override awsddp.toml, which overrides defaults.

An existing cluster's own settings replace those in awsddp.toml (`with_cluster_settings`).
"""

import contextlib
import json
import math
import os
import shlex
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from awsddp.errors import ConfigError, UsageError
from awsddp.settings.spec import (
    KEYS,
    KEYWORDS,
    OPTION,
    OPTIONS,
    SECTIONS,
    SETTINGS,
    ClusterSpec,
    EnvSection,
    JobSection,
    JobSpec,
    OptionValue,
    Section,
    Value,
)
from awsddp.settings.values import VARIABLE_NAME, check_name

ONE_COMMAND_KEYS = frozenset(
    {"cluster.replace", "capacity.retry_until_up", "job.resume", "job.after", "job.on"}
)
"""Keys that only a command line can set, because in awsddp.toml they would apply to every later command."""
_MOMENTARY = ONE_COMMAND_KEYS.union(
    ("cluster.nodes", "cluster.profile", "cluster.region", "env.variables", "env.secrets")
)
"""Keys that are not among a cluster record's settings: they apply to one command or one job, or the record
has other fields for them.
"""
_OF_COMMAND = (_MOMENTARY - {"cluster.nodes"}) | {"cluster.max_price_usd", "capacity.experimental"}
"""Keys whose values in awsddp.toml also apply to an existing cluster, because they belong to the command:
limits, consent and the login.
"""
SECRETS = frozenset(key for key, definition in SETTINGS.items() if definition.is_secret)
"""Keys whose values are never shown, recorded or written to a command line."""
EXCLUSIVE_KEYS = frozenset({"cluster.instance_type", "cluster.gpus", "capacity.reservation"})
"""Mutually exclusive keys."""
_TABLES = (*SECTIONS, "tags")
_Any = TypeVar("_Any", ClusterSpec, JobSpec)


def load(
    name: str = "default",
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, OptionValue] = {},
    labels: Mapping[str, str] = {},
) -> tuple[ClusterSpec, JobSpec]:
    """Return the settings of the cluster `name` and of its jobs.

    `file` is the awsddp.toml to read, which need not exist. `overrides` maps "section.key" to the value that
    the user typed, and `labels` maps "section.key" to the option that the user typed ("--nodes"). Raises
    ConfigError if a key is unknown, if a value or the cluster's name is invalid, or if the file is not TOML.
    The message has the key as the user typed it.
    """
    check_name(name)
    sections: dict[str, Section] = {section: kind() for section, kind in SECTIONS.items()}
    tags: dict[str, str] = {}
    sources: dict[str, str] = {}
    from_file = _read_keys(file) if file is not None and os.path.lexists(file) else ()
    typed = [(labels.get(key, key), key, value, OPTION) for key, value in overrides.items()]
    key_labels = {}
    for label, key, value, source in (*from_file, *_read_variables(environ), *typed):
        if key in ONE_COMMAND_KEYS and source != OPTION:
            words = shlex.join(["awsddp", "...", *option_arguments(key, value)])
            raise ConfigError(f"{label} holds for one command", "", f"{words}   # on the command line")
        if key in SECRETS and label.startswith("-"):
            variable = f"AWSDDP_{key.replace('.', '_')}".upper()
            why = "every user of this machine can read a command line"
            raise ConfigError(f"{label} is a secret", why, f"read -rs {variable} && export {variable}")
        sources[_set_key(sections, tags, key, value, label)], key_labels[key] = source, label
    for key in filter(key_labels.get, KEYS):
        _check_value(key, sections[key.partition(".")[0]], key_labels[key])

    def make_spec(kind: type[_Any], **more: Any) -> _Any:
        names = {field.name for field in fields(kind)}
        spec_sources = {key: source for key, source in sources.items() if key.partition(".")[0] in names}
        more |= {name: section for name, section in sections.items() if name in names}
        return kind(**more, sources=spec_sources, labels=key_labels)

    cluster, job = make_spec(ClusterSpec, name=name, tags=tags), make_spec(JobSpec)
    _check_job(job)
    return replace(cluster, gpus_needed=_gpus_needed(cluster.cluster.nodes, job.job)), job


def _is_job_key(key: str) -> bool:
    return hasattr(JobSpec, key.partition(".")[0])


def _gpus_needed(nodes: int, job: JobSection) -> int | None:
    """Return how many GPUs one node's ranks use, or None if the user does not set the number of ranks."""
    used = len(job.gpus_on) if job.on is not None else min(nodes, job.max_nodes or nodes)
    return job.nproc_per_node or (job.world_size and math.ceil(job.world_size / used))


def settings_to_record(spec: ClusterSpec | JobSpec) -> dict[str, Value]:
    """Return the explicit settings to store in the cluster's record: {"access.key_file": value}."""
    return {key: _value_of(spec, key) for key in sorted(spec.explicit - _MOMENTARY)}


def with_cluster_settings(spec: _Any, cluster_settings: Mapping[str, OptionValue]) -> _Any:
    """Return a copy of a spec with its existing cluster's settings (`cluster_settings`: {key: value}).

    An option or a variable overrides a cluster's setting; awsddp.toml does not, except for [env].
    Returns the spec itself if there are no cluster settings. Raises ConfigError for an invalid value.
    """
    if not cluster_settings:
        return spec
    dropped = spec.from_file - _OF_COMMAND if isinstance(spec, ClusterSpec) else frozenset()
    typed = spec.explicit - dropped
    overriding = typed | (EXCLUSIVE_KEYS if typed & EXCLUSIVE_KEYS else frozenset())
    sections: dict[str, Section] = {name: getattr(spec, name) for name in SECTIONS if hasattr(spec, name)}
    used = {*sections, "tags"} if isinstance(spec, ClusterSpec) else {"env"}
    inherited = {key for key in cluster_settings if key.partition(".")[0] in used and key not in overriding}
    defaults = {key: SETTINGS[key].default for key in dropped & SETTINGS.keys()}
    tags: dict[str, str] = {}
    for key, value in (defaults | {key: cluster_settings[key] for key in inherited}).items():
        _set_key(sections, tags, key, value, key)
    sources = {key: source for key, source in spec.sources.items() if key not in dropped}
    changes: dict[str, Any] = {**sections}
    if isinstance(spec, ClusterSpec):
        changes["tags"] = tags | {name: text for name, text in spec.tags.items() if f"tags.{name}" in typed}
    return replace(spec, **changes, sources=sources | dict.fromkeys(inherited, "cluster"))


def find_differences(spec: ClusterSpec, cluster_spec: ClusterSpec) -> dict[str, tuple[Value, Value]]:
    """Return {key: (value in awsddp.toml, cluster's value)} for each key for which these two values differ.

    `cluster_spec` is the spec that `with_cluster_settings` returned for `spec`. Keys that cannot be combined
    with an option or a variable that is set are omitted.
    """
    typed = spec.explicit - spec.from_file
    keys = spec.from_file - (EXCLUSIVE_KEYS if typed & EXCLUSIVE_KEYS else frozenset())
    pairs = {key: (_value_of(spec, key), _value_of(cluster_spec, key)) for key in sorted(keys)}
    return {key: values for key, values in pairs.items() if values[0] != values[1]}


def _value_of(spec: ClusterSpec | JobSpec, key: str) -> Value:
    section, _, name = key.partition(".")
    holder = getattr(spec, section)
    value: Value = holder.get(name) if section == "tags" else getattr(holder, name)
    return value


def list_settings(spec: ClusterSpec, job: JobSpec) -> list[tuple[str, Value, str]]:
    """Return (key, value, source) for every key with a value; the source is "default" or as in `sources`."""
    sources = {**job.sources, **spec.sources}
    rows = [(key, _value_of(job if _is_job_key(key) else spec, key)) for key in KEYS if key not in SECRETS]
    rows += [("notify.url", f"(secret, {job.notify.host})")] * (job.notify.url is not None)
    rows += [(f"tags.{name}", value) for name, value in spec.tags.items()]
    shown = [(key, value) for key, value in rows if key in sources or value not in (None, (), {}, "", False)]
    return [(key, value, sources.get(key, "default")) for key, value in shown]


def with_secrets(spec: JobSpec, environ: Mapping[str, str] = os.environ) -> JobSpec:
    """Return the job with its secrets as environment variables. Raises ConfigError if a secret is not set."""
    missing = [name for name in spec.env.secrets if name not in environ]
    if missing:
        label = spec.labels.get(f"env.secrets.{missing[0]}", spec.label("env.secrets"))
        raise ConfigError(
            f"{label}: {', '.join(missing)} not set in this environment",
            "a secret is read from this environment when a job starts, and is not stored",
            "\n".join(
                f"read -rs {name} && export {name}   # enter the value, then repeat the command"
                for name in missing
            ),
        )
    values = {name: environ[name] for name in spec.env.secrets}
    return replace(spec, env=replace(spec.env, variables=spec.env.variables | values))


KEYS_NOT_RECORDED = frozenset(
    [f"job.{name}" for name in ("script", "args", "name", "resume")]
    + [f"env.{name}" for name in ("variables", "setup", "index_url", "proxy")]
    + list(SECRETS)
)
"""Keys that a job record does not store among its settings.

The record has other fields for them, or they may contain a secret.
"""


def job_arguments(spec: JobSpec) -> tuple[str, ...]:
    """Return a job's settings that are not defaults, as command-line arguments: -o job.timeout=1h.

    The job's script, arguments and name are omitted. The values of variables, commands and URLs are omitted
    too, because they may contain a secret.
    """
    words: list[str] = []
    for key in filter(_is_job_key, KEYS):
        value = _value_of(spec, key)
        if value != SETTINGS[key].default and key not in KEYS_NOT_RECORDED:
            words += key_arguments(key, value)
    # Variables from awsddp.toml need no arguments, because that file sets them again.
    typed = spec.sources.get("env.variables", OPTION) == OPTION
    return (*words, *(word for name in spec.env.variables if typed for word in ("--env-var", name)))


def key_arguments(key: str, value: object) -> list[str]:
    """Return the arguments that set a key of awsddp.toml with -o, which every verb takes."""
    return ["-o", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]


def option_arguments(key: str, value: object) -> list[str]:
    """Return the arguments that set a key with its own command-line option, or with -o if it has none."""
    if key not in OPTIONS or value is None or value is False or value in ([], ()):
        return key_arguments(key, value)
    flag = OPTIONS[key].option.split()[0]
    if isinstance(value, list | tuple):
        return [word for item in value for word in (flag, str(item))]
    return [flag] if value is True else [flag, str(value)]


def parse_job_arguments(words: Sequence[str]) -> dict[str, OptionValue]:
    """Return {key: value} for arguments that `job_arguments` returned. A variable's value is None."""
    values: dict[str, OptionValue] = {}
    for sign, word in zip(words[::2], words[1::2], strict=False):
        key, _, text = word.partition("=")
        if sign == "--env-var":
            values[f"env.variables.{word}"] = None
        elif sign == "-o":
            values[key] = text
            if text in ("true", "false") or text.startswith("["):
                with contextlib.suppress(ValueError):
                    values[key] = json.loads(text)
    return values


def _read_keys(file: Path) -> Iterator[tuple[str, str, Any, str]]:
    """Yield (label, "section.key", value, file) for each key in a file. Raises ConfigError."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8-sig"), parse_float=_NumberText)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"cannot read {file}", str(error), "fix the file, or move it away") from error
    for section, table in document.items():
        if not isinstance(table, dict):
            raise _unknown_key(f"{file}: {section}", section, _TABLES)
        for key, value in table.items():
            yield f"{file}: [{section}] {key}", f"{section}.{key}", value, str(file)


class _NumberText(str):
    """A number in awsddp.toml, kept as text because `python = 3.10` must not become 3.1."""


def _read_variables(environ: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return (variable, "section.key", text, variable) for each AWSDDP_SECTION_KEY that is set."""
    names = {f"AWSDDP_{key.replace('.', '_')}".upper(): key for key in KEYS}
    return [(name, key, environ[name], name) for name, key in names.items() if name in environ]


def _set_key(sections: dict[str, Section], tags: dict[str, str], key: str, value: object, label: str) -> str:
    """Set a key in its section, and return the key ("env.variables" for env.variables.NAME)."""
    section, _, name = key.partition(".")
    if section == "tags" and name:
        tags[name] = str(value)
        return key
    if section not in SECTIONS:
        raise _unknown_key(label, section, _TABLES)
    values = sections[section]
    group, _, variable = name.partition(".")
    if isinstance(values, EnvSection) and variable and group in ("variables", "secrets"):
        sections[section] = _with_variable(values, variable, str(value) if group == "variables" else None)
        return f"env.{group}"
    hints = typing.get_type_hints(type(values))
    if name not in hints:
        raise _unknown_key(label, name, hints)
    converted = _convert(value, hints[name], label, is_secret=key in SECRETS)
    sections[section] = replace(values, **{name: converted})
    return key


def _with_variable(env: EnvSection, name: str, value: str | None) -> EnvSection:
    """Return `env` with a variable, or a secret if `value` is None. An earlier value is replaced."""
    variables = {key: text for key, text in env.variables.items() if key != name}
    secrets = tuple(key for key in env.secrets if key != name)
    if value is None:
        return replace(env, variables=variables, secrets=(*secrets, name))
    return replace(env, variables=variables | {name: value}, secrets=secrets)


def _convert(value: object, hint: Any, label: str, *, is_secret: bool = False) -> Any:
    """Convert `value` to the field's type. Text from an option or a variable may contain a TOML value."""
    if isinstance(value, str) and not _takes_text(hint):
        with contextlib.suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {value}")["value"]
        if typing.get_origin(hint) is tuple and not isinstance(value, list):
            value = [value]
    if isinstance(value, int | float | _NumberText) and not isinstance(value, bool) and _takes_text(hint):
        value = str(value)
    if isinstance(value, list):
        value = [float(item) if isinstance(item, _NumberText) else item for item in value]
    if isinstance(value, dict):  # variables are text, although OMP_NUM_THREADS = 4 is a number in TOML
        value = {key: str(item) if type(item) in (int, _NumberText) else item for key, item in value.items()}
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        shown = "" if is_secret else f" {value!r}"
        why = "" if is_secret else str(error)
        raise ConfigError(f"{label}: invalid value{shown}", why, _describe_type(hint)) from error


def _takes_text(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return origin is Literal or (origin in (None, types.UnionType) and str in (hint, *typing.get_args(hint)))


def _describe_type(hint: Any) -> str:
    """Describe the values that a type allows in TOML: "true or false"."""
    *first, last = _allowed_values(hint)
    return f"{', '.join(first)} or {last}" if first else last


def _allowed_values(hint: Any) -> list[str]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return [text for part in parts if part is not types.NoneType for text in _allowed_values(part)]
    if origin is Literal:
        return [f'"{part}"' for part in parts]
    if origin is tuple and int in parts:
        return ["a list of whole numbers, such as [75, 76]"]
    forms = {
        bool: ["true", "false"],
        int: ["a whole number"],
        float: ["a number"],
        str: ["a string"],
        tuple: ['a list of strings, such as ["a", "b"]'],
        dict: ['names and strings, such as { A = "1" }'],
    }
    return forms[origin or hint]


def _unknown_key(label: str, key: str, known_keys: Collection[str]) -> ConfigError:
    return ConfigError(f"{label}: unknown key {key!r}", "", suggest_nearest(key, known_keys))


def check_keywords(keys: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of these keywords.

    Raises UsageError if a keyword does not belong to a key of awsddp.toml.
    """
    if unknown := [key for key in keys if key not in KEYWORDS]:
        raise UsageError(f"unknown keyword {unknown[0]!r}", "", suggest_nearest(unknown[0], KEYWORDS))
    return dict(keys)


def suggest_nearest(word: str, names: Collection[str]) -> str:
    """Return the hint for an unknown word: the name most similar to it, or all names if none is similar."""
    import difflib

    matches = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {matches[0]!r}?" if matches else f"known: {', '.join(names)}"


def _check_value(key: str, section: object, label: str) -> None:
    """Raise ConfigError, with `label` in its message, if a key's value is invalid."""
    check, value = SETTINGS[key].check, getattr(section, key.partition(".")[2])
    if check is not None and value is not None:
        try:
            check(value)
        except ConfigError as error:
            error.message = f"{label}: {error.message}"
            raise


def _check_job(spec: JobSpec) -> None:
    """Raise ConfigError if a job's keys contradict each other."""
    job, env, secrets = spec.job, spec.env, spec.label("env.secrets")
    if job.is_elastic and job.launcher_name != "torchrun":
        elastic_keys = [
            spec.label(key) for key in ("job.max_restarts", "job.nnodes") if _value_of(spec, key) is not None
        ]
        raise ConfigError(
            f"{spec.label('job.launcher')}: {job.launcher} does not support {' and '.join(elastic_keys)}",
            "only torch's elastic agent does",
            "-o job.launcher=torchrun, or omit --max-restarts and --nnodes",
        )
    for name in env.secrets:
        if not VARIABLE_NAME.fullmatch(name):
            raise ConfigError(
                f"{secrets}: an entry is not the name of a variable",
                "env.secrets lists names; each value is read from the command's environment",
                'write it as secrets = ["WANDB_API_KEY"]',
            )
        if name in env.variables:
            raise ConfigError(f"{secrets}: {name} is also in env.variables", "", "remove it from one of them")
