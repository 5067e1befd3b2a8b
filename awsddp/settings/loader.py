"""Where settings come from: options over AWSDDP_* variables over awsddp.toml over defaults.

A cluster that exists keeps its own settings, which stand in the place of awsddp.toml's (`overlaid`).
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
    Given,
    JobSection,
    JobSpec,
    Section,
    Value,
)
from awsddp.settings.values import VARIABLE, check_name

OF_ONE_COMMAND = frozenset(
    {"cluster.replace", "capacity.retry_until_up", "job.resume", "job.after", "job.on"}
)
"""Keys that a command line alone sets: in awsddp.toml each later command would repeat them."""
_MOMENTARY = OF_ONE_COMMAND.union(
    ("cluster.nodes", "cluster.profile", "cluster.region", "env.variables", "env.secrets")
)
"""Keys that hold for one command or one job, or that the cluster's record holds elsewhere."""
_OF_COMMAND = (_MOMENTARY - {"cluster.nodes"}) | {"cluster.max_price_usd", "capacity.experimental"}
"""Keys that hold for one command, also where awsddp.toml sets them: limits, consent and the login."""
EXCLUSIVE = frozenset({"cluster.instance_type", "cluster.gpus", "capacity.reservation"})
"""Mutually exclusive keys."""
_TABLES = (*SECTIONS, "tags")
_Any = TypeVar("_Any", ClusterSpec, JobSpec)


def load(
    name: str = "default",
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Given] = {},
    labels: Mapping[str, str] = {},
) -> tuple[ClusterSpec, JobSpec]:
    """Read the settings of the cluster `name`.

    `file` is the awsddp.toml to read (absent: none), `overrides` maps "section.key" to a value as the user
    typed it, and `labels` to what was typed for the key ("--nodes"). Raises ConfigError, naming the key as it
    was given, for an unknown key, an invalid value, a file that is not TOML, or an invalid cluster name.
    """
    check_name(name)
    sections: dict[str, Section] = {section: kind() for section, kind in SECTIONS.items()}
    tags: dict[str, str] = {}
    sources: dict[str, str] = {}
    given = _keys_of(file) if file is not None and os.path.lexists(file) else ()
    typed = [(labels.get(key, key), key, value, OPTION) for key, value in overrides.items()]
    given_as = {}
    for label, key, value, source in (*given, *_variables(environ), *typed):
        if key in OF_ONE_COMMAND and source != OPTION:
            words = shlex.join(["awsddp", "...", *option_words(key, value)])
            raise ConfigError(f"{label} holds for one command", "", f"{words}   # on the command line")
        sources[_put(sections, tags, key, value, label)], given_as[key] = source, label
    for key in filter(given_as.get, KEYS):
        _check(key, sections[key.partition(".")[0]], given_as[key])

    def made(kind: type[_Any], **more: Any) -> _Any:
        names = {one.name for one in fields(kind)}
        own = {key: source for key, source in sources.items() if key.partition(".")[0] in names}
        more |= {name: section for name, section in sections.items() if name in names}
        return kind(**more, sources=own, labels=given_as)

    cluster, job = made(ClusterSpec, name=name, tags=tags), _checked(made(JobSpec))
    return replace(cluster, gpus_needed=_gpus_needed(cluster.cluster.nodes, job.job)), job


def _is_of_job(key: str) -> bool:
    return hasattr(JobSpec, key.partition(".")[0])


def _gpus_needed(nodes: int, job: JobSection) -> int | None:
    """Return how many GPUs the ranks of one node drive; None where their number is not requested."""
    used = len(job.gpus_on) if job.on is not None else min(nodes, job.max_nodes or nodes)
    return job.nproc_per_node or (job.world_size and math.ceil(job.world_size / used))


def remembered(spec: ClusterSpec | JobSpec) -> dict[str, Value]:
    """Return the explicit settings that hold for the life of the cluster, by key ("access.key_file")."""
    return {key: _value(spec, key) for key in sorted(spec.explicit - _MOMENTARY)}


def overlaid(spec: _Any, asked: Mapping[str, Given]) -> _Any:
    """Return a spec with what its cluster was requested with, `asked` by key; without any, the spec itself.

    Only an option or a variable changes what the cluster has; awsddp.toml does not, but for [env]. Raises
    ConfigError for an invalid value.
    """
    if not asked:
        return spec
    dropped = spec.from_file - _OF_COMMAND if isinstance(spec, ClusterSpec) else frozenset()
    typed = spec.explicit - dropped
    decided = typed | (EXCLUSIVE if typed & EXCLUSIVE else frozenset())
    standing: dict[str, Section] = {name: getattr(spec, name) for name in SECTIONS if hasattr(spec, name)}
    heeded = {*standing, "tags"} if isinstance(spec, ClusterSpec) else {"env"}
    kept = {key for key in asked if key.partition(".")[0] in heeded and key not in decided}
    defaults = {key: SETTINGS[key].default for key in dropped & SETTINGS.keys()}
    tags: dict[str, str] = {}
    for key, value in (defaults | {key: asked[key] for key in kept}).items():
        _put(standing, tags, key, value, key)
    sources = {key: source for key, source in spec.sources.items() if key not in dropped}
    changed: dict[str, Any] = {**standing}
    if isinstance(spec, ClusterSpec):
        changed["tags"] = tags | {name: text for name, text in spec.tags.items() if f"tags.{name}" in typed}
    return replace(spec, **changed, sources=sources | dict.fromkeys(kept, "cluster"))


def differences(spec: ClusterSpec, standing: ClusterSpec) -> dict[str, tuple[Value, Value]]:
    """Return the keys of awsddp.toml whose values the cluster does not have, each with both values.

    `standing` is `overlaid` of `spec`. A key that an option or a variable excludes is left out.
    """
    typed = spec.explicit - spec.from_file
    keys = spec.from_file - (EXCLUSIVE if typed & EXCLUSIVE else frozenset())
    found = {key: (_value(spec, key), _value(standing, key)) for key in sorted(keys)}
    return {key: values for key, values in found.items() if values[0] != values[1]}


def _value(spec: ClusterSpec | JobSpec, key: str) -> Value:
    section, _, name = key.partition(".")
    holder = getattr(spec, section)
    found: Value = holder.get(name) if section == "tags" else getattr(holder, name)
    return found


def settings(spec: ClusterSpec, job: JobSpec) -> list[tuple[str, Value, str]]:
    """Return every key that has a value, the value, and its source ("default", or as in `sources`)."""
    sources = {**job.sources, **spec.sources}
    found = [(key, _value(job if _is_of_job(key) else spec, key)) for key in KEYS]
    found += [(f"tags.{name}", value) for name, value in spec.tags.items()]
    set_ = [(key, value) for key, value in found if key in sources or value not in (None, (), {}, "", False)]
    return [(key, value, sources.get(key, "default")) for key, value in set_]


def with_secrets(spec: JobSpec, environ: Mapping[str, str] = os.environ) -> JobSpec:
    """Return the job with the values of its secrets as variables. Raises ConfigError if one is not set."""
    missing = [name for name in spec.env.secrets if name not in environ]
    if missing:
        label = spec.labels.get(f"env.secrets.{missing[0]}", spec.label("env.secrets"))
        raise ConfigError(
            f"{label}: {', '.join(missing)} not set in this environment",
            "the value of a secret is read here when a job starts, and is not kept",
            "\n".join(
                f"read -rs {name} && export {name}   # type the value, then the command again"
                for name in missing
            ),
        )
    values = {name: environ[name] for name in spec.env.secrets}
    return replace(spec, env=replace(spec.env, variables=spec.env.variables | values))


NOT_SHOWN = frozenset(
    [f"job.{name}" for name in ("script", "args", "name", "resume")]
    + [f"env.{name}" for name in ("variables", "setup", "index_url", "proxy")]
)
"""Keys that the record of a job does not have: it has others for them, or they may hold a secret."""


def words_of(spec: JobSpec) -> tuple[str, ...]:
    """Return the settings of a job that are not defaults, as arguments of a command line: -o job.timeout=1h.

    Its script, arguments and name are left out, and what may hold a secret: the values of variables, commands
    and URLs.
    """
    words: list[str] = []
    for key in filter(_is_of_job, KEYS):
        value = _value(spec, key)
        if value != SETTINGS[key].default and key not in NOT_SHOWN:
            words += key_words(key, value)
    typed = spec.sources.get("env.variables", OPTION) == OPTION  # else awsddp.toml sets them again
    return (*words, *(word for name in spec.env.variables if typed for word in ("--env-var", name)))


def key_words(key: str, value: object) -> list[str]:
    """Return the arguments that set a key of awsddp.toml on any verb's command line."""
    return ["-o", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]


def option_words(key: str, value: object) -> list[str]:
    """Return the arguments that set a key where its option is there, if it has one."""
    if key not in OPTIONS or value is None or value is False or value in ([], ()):
        return key_words(key, value)
    flag = OPTIONS[key].option.split()[0]
    if isinstance(value, list | tuple):
        return [word for one in value for word in (flag, str(one))]
    return [flag] if value is True else [flag, str(value)]


def options_of(words: Sequence[str]) -> dict[str, Given]:
    """Return the values by key that `words_of` gave as arguments; each variable's value is None."""
    found: dict[str, Given] = {}
    for sign, word in zip(words[::2], words[1::2], strict=False):
        key, _, text = word.partition("=")
        if sign == "--env-var":
            found[f"env.variables.{word}"] = None
        elif sign == "-o":
            found[key] = text
            if text in ("true", "false") or text.startswith("["):
                with contextlib.suppress(ValueError):
                    found[key] = json.loads(text)
    return found


def _keys_of(file: Path) -> Iterator[tuple[str, str, Any, str]]:
    """Yield (place, "section.key", value, file) for each key of a file. Raises ConfigError."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8-sig"), parse_float=_Written)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"cannot read {file}", str(error), "fix the file, or move it away") from error
    for section, table in document.items():
        if not isinstance(table, dict):
            raise _unknown(f"{file}: {section}", section, _TABLES)
        for key, value in table.items():
            yield f"{file}: [{section}] {key}", f"{section}.{key}", value, str(file)


class _Written(str):
    """A number of awsddp.toml as it was written: python = 3.10 is not 3.1."""


def _variables(environ: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return (variable, "section.key", text, variable) for each AWSDDP_SECTION_KEY that is set."""
    names = {f"AWSDDP_{key.replace('.', '_')}".upper(): key for key in KEYS}
    return [(name, key, environ[name], name) for name, key in names.items() if name in environ]


def _put(sections: dict[str, Section], tags: dict[str, str], key: str, value: object, place: str) -> str:
    """Put the value of a key into its section, and return the key; of one variable that of all."""
    section, _, name = key.partition(".")
    if section == "tags" and name:
        tags[name] = str(value)
        return key
    if section not in SECTIONS:
        raise _unknown(place, section, _TABLES)
    own = sections[section]
    group, _, variable = name.partition(".")
    if isinstance(own, EnvSection) and variable and group in ("variables", "secrets"):
        sections[section] = _with_variable(own, variable, str(value) if group == "variables" else None)
        return f"env.{group}"
    hints = typing.get_type_hints(type(own))
    if name not in hints:
        raise _unknown(place, name, hints)
    sections[section] = replace(own, **{name: _convert(value, hints[name], place)})
    return key


def _with_variable(env: EnvSection, name: str, value: str | None) -> EnvSection:
    """Set a variable, or make it a secret (None); it is one of the two, as the last setting says."""
    variables = {key: text for key, text in env.variables.items() if key != name}
    secrets = tuple(key for key in env.secrets if key != name)
    if value is None:
        return replace(env, variables=variables, secrets=(*secrets, name))
    return replace(env, variables=variables | {name: value}, secrets=secrets)


def _convert(value: object, hint: Any, place: str) -> Any:
    """Return `value` as the field's type; a text that came from a flag or a variable may be a TOML value."""
    if isinstance(value, str) and not _takes_text(hint):
        try:
            value = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            if typing.get_origin(hint) is tuple:
                value = [value]
    if isinstance(value, int | float | _Written) and not isinstance(value, bool) and _takes_text(hint):
        value = str(value)
    if isinstance(value, list):
        value = [float(one) if isinstance(one, _Written) else one for one in value]
    if isinstance(value, dict):  # variables: text, though OMP_NUM_THREADS = 4 is a number of TOML
        value = {key: str(one) if type(one) in (int, _Written) else one for key, one in value.items()}
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: invalid value {value!r}", str(error), _form(hint)) from error


def _takes_text(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return origin is Literal or (origin in (None, types.UnionType) and str in (hint, *typing.get_args(hint)))


def _form(hint: Any) -> str:
    """Return what a value of this type looks like in TOML."""
    *first, last = _values(hint)
    return f"{', '.join(first)} or {last}" if first else last


def _values(hint: Any) -> list[str]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return [text for one in parts if one is not types.NoneType for text in _values(one)]
    if origin is Literal:
        return [f'"{one}"' for one in parts]
    forms = {
        bool: ["true", "false"],
        int: ["a whole number"],
        float: ["a number"],
        str: ["a string"],
        tuple: ['a list of strings, such as ["a", "b"]'],
        dict: ['names and strings, such as { A = "1" }'],
    }
    return forms[origin or hint]


def _unknown(place: str, word: str, known: Collection[str]) -> ConfigError:
    return ConfigError(f"{place}: unknown key {word!r}", "", nearest(word, known))


def known_keywords(keys: Mapping[str, object]) -> dict[str, Any]:
    """Return these keywords. Raises UsageError for one that awsddp.toml does not have."""
    if unknown := [key for key in keys if key not in KEYWORDS]:
        raise UsageError(f"unknown keyword {unknown[0]!r}", "", nearest(unknown[0], KEYWORDS))
    return dict(keys)


def nearest(word: str, known: Collection[str]) -> str:
    """Return the hint for an unknown word: the one that is meant, else all."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _check(key: str, section: object, label: str) -> None:
    """Refuse a value that no cluster or job can have. Raises ConfigError."""
    check, value = SETTINGS[key].check, getattr(section, key.partition(".")[2])
    if check is not None and value is not None:
        try:
            check(value)
        except ConfigError as error:
            error.message = f"{label}: {error.message}"
            raise


def _checked(spec: JobSpec) -> JobSpec:
    """Return the job unless its keys contradict each other. Raises ConfigError."""
    job, env, secrets = spec.job, spec.env, spec.label("env.secrets")
    if job.elastic and job.launcher_name != "torchrun":
        asking = [
            spec.label(key) for key in ("job.max_restarts", "job.nnodes") if _value(spec, key) is not None
        ]
        raise ConfigError(
            f"{spec.label('job.launcher')}: {job.launcher} does not support {' and '.join(asking)}",
            "only torch's elastic agent does",
            "-o job.launcher=torchrun, or omit --max-restarts and --nnodes",
        )
    for name in env.secrets:
        if not VARIABLE.fullmatch(name):
            raise ConfigError(
                f"{secrets}: an entry is not the name of a variable",
                "it holds names; each value is read from the environment of the command",
                'write it as secrets = ["WANDB_API_KEY"]',
            )
        if name in env.variables:
            raise ConfigError(f"{secrets}: {name} is in env.variables, too", "", "remove it from one of them")
    return spec


# The starter file.
