"""What was asked: flags over AWSDDP_* variables over awsddp.toml over defaults.

A cluster that exists keeps its own settings, which stand in the place of awsddp.toml's (`overlaid`).

The sections below are the sections of awsddp.toml, their fields its keys, and their types its schema. A flag
is an override of a key (`--nodes 4` is `cluster.nodes=4`), a variable is named after it
(`AWSDDP_CLUSTER_NODES`), so that there is one place where a value is read, checked and explained.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from awsddp.errors import ConfigError

FILE = "awsddp.toml"
OPTION = "option"
"""The source of a setting that the command line gave."""
SSM = "ssm"
"""The `network.jump` that is no host: AWS Systems Manager."""
NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
MIN_HEARTBEAT_TIMEOUT_S = 5.0
MAX_DURATION_S = 365 * 86400.0
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|)")
_NODES = re.compile(r"(\d{1,4})(?::(\d{1,4}))?", re.ASCII)
_ON = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?(?::(\d{1,3})(?:-(\d{1,3}))?)?", re.ASCII)
_SIZE = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(kB|[MGT]B)", re.IGNORECASE | re.ASCII)
_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_JUMP = re.compile(r"((?:\w[\w.@+-]*@)?)(?:\[([0-9A-Fa-f:.]+)\]|(\w[\w.-]*))(?::(\d{1,5}))?", re.ASCII)
OF_ONE_COMMAND = frozenset(
    {"cluster.replace", "capacity.retry_until_up", "job.resume", "job.after", "job.on"}
)
"""Keys that a command line alone sets: in awsddp.toml each later command would repeat them."""
_MOMENTARY = OF_ONE_COMMAND | {
    "cluster.nodes",
    "cluster.profile",
    "cluster.region",
    "env.variables",
    "env.secrets",
}
"""Keys that hold for one command or one job, or that the cluster's record holds elsewhere."""
_OF_COMMAND = (_MOMENTARY - {"cluster.nodes"}) | {"cluster.max_price_usd", "capacity.experimental"}
"""Keys that hold for one command, also where awsddp.toml sets them: limits, consent and the login."""
_EXCLUSIVE = frozenset({"cluster.instance_type", "cluster.gpus", "capacity.reservation"})
"""Mutually exclusive keys."""
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """[cluster]: the instances. `expires` is a duration such as "24h", counted from the launch; nodes unused
    for `idle` ("off": never) shut down earlier. `up` replaces the instances whose ids `replace` lists.

    `instance_type` may name several, "g6.48xlarge,g5.48xlarge": the first that AWS has. `gpus` are the GPUs
    per node, such as "A100:8". `spot` "first" takes on-demand instances where there are no spot ones. A plan
    that costs more than `max_price_usd` per hour is refused, the nodes end when they have cost `budget_usd`;
    both are for all nodes together.
    """

    region: str | None = None
    profile: str | None = None
    nodes: int = 2
    instance_type: str | None = None
    gpus: str | None = None
    image: str | None = None
    disk_gb: int | None = None
    spot: bool | Literal["first"] = False
    expires: str = "24h"
    idle: str = "60m"
    max_price_usd: float | None = None
    budget_usd: float | None = None
    replace: tuple[str, ...] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """The instance types that are named, in the order in which they are tried."""
        return tuple(dict.fromkeys(re.findall(r"[^,\s]+", self.instance_type or "")))

    @property
    def markets(self) -> tuple[Literal["spot", "on-demand"], ...]:
        """The markets that are tried, in order."""
        return ("spot", "on-demand") if self.spot == "first" else ("spot",) if self.spot else ("on-demand",)


@dataclass(frozen=True, kw_only=True)
class NetworkSection:
    """[network]: the nodes' network and SSH access. Without `ssh_cidr` only the caller's address has access.

    It holds address blocks and ids of security groups. `subnet` and `security_group` are ids of ones
    that exist; they are used and never changed. With `address` "private" the nodes get no public address. SSH
    goes through the host `jump` ("user@host:port", or a name of ~/.ssh/config), or with "ssm" through AWS
    Systems Manager, which needs no open port; "" is none.
    """

    subnet: str | None = None
    security_group: str | None = None
    ssh_cidr: tuple[str, ...] = ()
    address: Literal["public", "private"] = "public"
    jump: str | None = None


@dataclass(frozen=True, kw_only=True)
class AccessSection:
    """[access]: the login, and the nodes' permissions. `user` is the login name, else the image's own.

    `key_file` is the private half of a key pair that exists in EC2, and has its name ("~/.ssh/laptop.pem");
    left out, each cluster has a key of its own. `instance_profile` is a name or an ARN, `kms_key` an id,
    alias or ARN that encrypts the disks.
    """

    key_file: str | None = None
    user: str | None = None
    instance_profile: str | None = None
    kms_key: str | None = None

    @property
    def key(self) -> str | None:
        """The name in EC2 of the user's own key pair."""
        return Path(self.key_file).stem if self.key_file else None


@dataclass(frozen=True, kw_only=True)
class CapacitySection:
    """[capacity]: where and how instances are found.

    `zones` are tried in their order, then the other types, then the other `regions`, then the other market;
    with `retry_until_up` all of them again until there is capacity.
    `reservation` is the id of a capacity reservation or block. `efa` asks for EFA interfaces. `experimental`
    allows what was never launched on AWS.
    """

    zones: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    reservation: str | None = None
    efa: bool = False
    retry_until_up: bool = False
    experimental: bool = False


@dataclass(frozen=True, kw_only=True)
class LocalSection:
    """[local]: the local cloud; without effect on AWS. `gpus` "on" rehearses the GPUs of the instance type on
    the CPU, with a rank for each; "off" leaves them out: jobs run gloo on the CPU.
    """

    gpus: Literal["on", "off"] = "on"


@dataclass(frozen=True, kw_only=True)
class EnvSection:
    """[env]: the Python of the ranks. `variables` are set for every rank; `secrets` are names of variables
    whose values come from the environment of this command, and are never written down.

    `kind` "image" installs what `file` names over the image's Python and keeps its torch; "venv" and "conda"
    (the default for an environment.yml) make one with `python`, and torch as `file` asks for it. `setup` are
    commands that each node runs once, in the synced folder. With `packages_from` "client" packages come from
    this machine (left out: where nodes have no internet). `index_url`, `ca_bundle` and `proxy` say where
    packages are found.
    """

    kind: Literal["image", "venv", "conda"] | None = None
    file: str | None = None
    python: str | None = None
    setup: tuple[str, ...] = ()
    packages_from: Literal["node", "client"] | None = None
    index_url: str | None = None
    ca_bundle: str | None = None
    proxy: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SyncSection:
    """[sync]: what is sent to the nodes. `ignore` holds further gitignore patterns."""

    workdir: str = "."
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobSection:
    """[job]: what runs. Durations as "90m"; `grace` is the time between TERM and KILL on cancel.

    The job fails when a node is silent for `heartbeat_timeout`, and when no rank writes to its log for
    `hang_after`.

    `outputs` are paths on the node, relative to the synced folder or absolute, fetched beside new and
    changed files; `results` is the local folder for them. New and changed files that match `exclude`
    (gitignore patterns) stay on the node; over `results_limit`, all nodes together, a question comes first.

    `launcher` is "ssh" (a process per rank; one that fails ends the job) or "torchrun" (torch's elastic
    agent). Only the agent restarts ranks, `max_restarts` times, and goes on with MIN of MAX nodes
    (`nnodes` "MIN:MAX"): either implies it.

    `resume` names the job whose newest checkpoint the ranks get ("last": the last one of the same script).

    `after` names a job, or "all": this one starts when that one has ended, however it ended, and with it all
    that run or wait on its nodes when it is launched.

    `on` names nodes ("0,2-3"), or GPUs of nodes ("0:4-7,1:0-3"), that the job uses; jobs on other nodes or
    GPUs run at the same time. `prefix` are words before each rank's command, such as those of numactl or
    docker run.
    """

    script: str | None = None
    args: tuple[str, ...] = ()
    world_size: int | None = None
    nproc_per_node: int | None = None
    launcher: str = ""
    nnodes: str | None = None
    resume: str | None = None
    after: str | None = None
    on: str | None = None
    max_restarts: int | None = None
    module: bool = False
    prefix: tuple[str, ...] = ()
    name: str | None = None
    outputs: tuple[str, ...] = ()
    results: str = "runs"
    exclude: tuple[str, ...] = ()
    results_limit: str = "20GB"
    timeout: str | None = None
    hang_after: str | None = None
    grace: str = "30s"
    heartbeat_timeout: str = "5m"

    @property
    def elastic(self) -> bool:
        """Whether the job asks for what only torch's elastic agent does."""
        return self.max_restarts is not None or self.nnodes is not None

    @property
    def launcher_name(self) -> str:
        """The launcher: the one that was set, else the one that the other keys imply."""
        return self.launcher or ("torchrun" if self.elastic else "ssh")

    @property
    def work_folder(self) -> str:
        """The synced folder on a node: jobs on some of its GPUs have one each, as they run side by side."""
        parts = self.on is not None and any(gpus for gpus in gpus_of(self.on).values())
        return f"work-{re.sub('[^0-9-]+', '_', self.on or '')}" if parts else "work"

    @property
    def max_nodes(self) -> int | None:
        """How many nodes the job uses at most."""
        return None if self.nnodes is None else nodes_range(self.nnodes)[1]

    def min_nodes(self, nodes: int) -> int:
        """Return with how many of its `nodes` the job goes on."""
        return nodes if self.nnodes is None else min(nodes, nodes_range(self.nnodes)[0])


@dataclass(frozen=True, kw_only=True)
class _Spec:
    """Where the values of a spec come from.

    `sources` says it of each key that has one from anywhere ("cluster.nodes"): a file, a variable, "option",
    or "cluster" where it holds since the launch.
    """

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def explicit(self) -> frozenset[str]:
        """The keys that have a value from anywhere; of a job those of [env] alone."""
        return frozenset(key for key in self.sources if not key.startswith(("sync.", "job.")))


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(_Spec):
    """The requested cluster. `tags` are the user's own, put on every resource.

    `gpus_needed` is how many GPUs a node needs for the ranks of the job; None where it says nothing of them.
    """

    name: str = "default"
    cluster: ClusterSection = ClusterSection()
    network: NetworkSection = NetworkSection()
    access: AccessSection = AccessSection()
    capacity: CapacitySection = CapacitySection()
    local: LocalSection = LocalSection()
    gpus_needed: int | None = None
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def from_cli(self) -> frozenset[str]:
        """The keys that the command line set."""
        return frozenset(key for key, source in self.sources.items() if source == OPTION)

    @property
    def from_file(self) -> frozenset[str]:
        """The keys that awsddp.toml set, and that a cluster which exists does not take from it."""
        return frozenset(key for key, source in self.sources.items() if Path(source).name == FILE)


@dataclass(frozen=True, kw_only=True)
class JobSpec(_Spec):
    """The requested job."""

    env: EnvSection = EnvSection()
    sync: SyncSection = SyncSection()
    job: JobSection = JobSection()


_Any = TypeVar("_Any", ClusterSpec, JobSpec)
_OF_CLUSTER: dict[str, type] = {
    "cluster": ClusterSection,
    "network": NetworkSection,
    "access": AccessSection,
    "capacity": CapacitySection,
    "local": LocalSection,
}
_OF_JOB: dict[str, type] = {"env": EnvSection, "sync": SyncSection, "job": JobSection}
SECTIONS = _OF_CLUSTER | _OF_JOB
KEYS = tuple(f"{name}.{one.name}" for name, kind in SECTIONS.items() for one in dataclasses.fields(kind))


def load(
    name: str = "default",
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] | None = None,
) -> tuple[ClusterSpec, JobSpec]:
    """Read the settings of the cluster `name`.

    `file` is the awsddp.toml to read (absent: none), `overrides` maps "section.key" to a value as the user
    typed it. Raises ConfigError, naming the key, for an unknown key, a value of the wrong type, a file
    that is not TOML, or an invalid cluster name.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"invalid cluster name {name!r}",
            "a name is a lower-case letter, then up to 30 lower-case letters, digits and dashes",
            "try: awsddp -c my-cluster ...",
        )
    document = _read(file) if file is not None and os.path.lexists(file) else {}
    values: dict[str, Any] = {section: {} for section in (*SECTIONS, "tags")}
    sources: dict[str, str] = {}
    for section, table in document.items():
        if not isinstance(table, dict):
            raise _unknown(f"{file}: {section}", section, list(values))
    given = [
        (f"{file}: [{section}] {key}", f"{section}.{key}", value, str(file))
        for section, table in document.items()
        for key, value in table.items()
    ]
    typed = [(key, key, value, OPTION) for key, value in (overrides or {}).items()]
    for place, key, value, source in (*given, *_variables(environ), *typed):
        if key in OF_ONE_COMMAND and source != OPTION:
            words = shlex.join(["awsddp", "...", *option_words(key, value)])
            raise ConfigError(f"{place} holds for one command", "", f"{words}   # on the command line")
        sources[_put(values, key, value, place)] = source
    sections = {section: kind(**values[section]) for section, kind in SECTIONS.items()}
    _check(sections["cluster"], sections["job"])
    _check_secrets(sections["env"])
    if sections["network"].jump:
        jump_host(sections["network"].jump)
    return (
        ClusterSpec(
            name=name,
            **{section: sections[section] for section in _OF_CLUSTER},
            gpus_needed=_gpus_needed(sections["cluster"].nodes, sections["job"]),
            tags=values["tags"],
            sources={key: source for key, source in sources.items() if not _is_of_job(key)},
        ),
        JobSpec(
            **{section: sections[section] for section in _OF_JOB},
            sources={key: source for key, source in sources.items() if _is_of_job(key)},
        ),
    )


def _is_of_job(key: str) -> bool:
    return key.partition(".")[0] in _OF_JOB


def _gpus_needed(nodes: int, job: JobSection) -> int | None:
    """Return how many GPUs the ranks of one node drive; None where their number is not requested."""
    used = len(gpus_of(job.on)) if job.on is not None else min(nodes, job.max_nodes or nodes)
    if job.nproc_per_node is not None:
        return job.nproc_per_node
    if job.world_size is not None:
        return math.ceil(job.world_size / used)
    return None


def remembered(spec: ClusterSpec | JobSpec) -> dict[str, Any]:
    """Return the explicit settings that hold for the life of the cluster, by key ("access.key_file")."""
    return {key: _value(spec, key) for key in sorted(spec.explicit - _MOMENTARY)}


def overlaid(spec: _Any, asked: Mapping[str, Any]) -> _Any:
    """Return a spec with what its cluster was requested with, `asked` by key; without any, the spec itself.

    Only an option or a variable changes what the cluster has; awsddp.toml does not, but for [env]. Raises
    ConfigError for an invalid value.
    """
    if not asked:
        return spec
    dropped = spec.from_file - _OF_COMMAND if isinstance(spec, ClusterSpec) else frozenset()
    typed = spec.explicit - dropped
    decided = typed | (_EXCLUSIVE if typed & _EXCLUSIVE else frozenset())
    sections = (*_OF_CLUSTER, "tags") if isinstance(spec, ClusterSpec) else ("env",)
    kept = {key for key in asked if key.partition(".")[0] in sections and key not in decided}
    values: dict[str, Any] = {section: {} for section in sections}
    for section, _, name in (key.partition(".") for key in dropped):
        if section != "tags":
            values[section][name] = getattr(SECTIONS[section](), name)
    for key in kept:
        _put(values, key, asked[key], key)
    tags = values.pop("tags", {})
    changed = {
        name: dataclasses.replace(getattr(spec, name), **keys) for name, keys in values.items() if keys
    }
    if isinstance(spec, ClusterSpec):
        changed["tags"] = tags | {name: text for name, text in spec.tags.items() if f"tags.{name}" in typed}
    sources = {key: source for key, source in spec.sources.items() if key not in dropped}
    return dataclasses.replace(spec, **changed, sources=sources | dict.fromkeys(kept, "cluster"))


def differences(spec: ClusterSpec, standing: ClusterSpec) -> dict[str, tuple[Any, Any]]:
    """Return the keys of awsddp.toml whose values the cluster does not have, each with both values.

    `standing` is `overlaid` of `spec`. A key that an option or a variable excludes is left out.
    """
    typed = spec.explicit - spec.from_file
    keys = spec.from_file - (_EXCLUSIVE if typed & _EXCLUSIVE else frozenset())
    found = {key: (_value(spec, key), _value(standing, key)) for key in sorted(keys)}
    return {key: values for key, values in found.items() if values[0] != values[1]}


def _value(spec: ClusterSpec | JobSpec, key: str) -> Any:
    section, _, name = key.partition(".")
    holder = getattr(spec, section)
    return holder.get(name) if section == "tags" else getattr(holder, name)


def settings(spec: ClusterSpec, job: JobSpec) -> list[tuple[str, Any, str]]:
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
        raise ConfigError(
            f"env.secrets: {', '.join(missing)} not set in this environment",
            "the value of a secret is read here when a job starts, and is not kept",
            "\n".join(
                f"read -rs {name} && export {name}   # type the value, then the command again"
                for name in missing
            ),
        )
    values = {name: environ[name] for name in spec.env.secrets}
    return dataclasses.replace(spec, env=dataclasses.replace(spec.env, variables=spec.env.variables | values))


NOT_SHOWN = frozenset(
    (
        *("job.script", "job.args", "job.name", "job.resume"),
        *("env.variables", "env.setup", "env.index_url", "env.proxy"),
    )
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
        if value != _value(JobSpec(), key) and key not in NOT_SHOWN:
            words += ["-o", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    typed = spec.sources.get("env.variables", OPTION) == OPTION  # else awsddp.toml sets them again
    return (*words, *(word for name in spec.env.variables if typed for word in ("--env-var", name)))


OPTIONS = {
    "cluster.nodes": ("--nodes N", "How many nodes.  [default: 2]"),
    "cluster.instance_type": (
        "--instance-type TYPE",
        "EC2 instance type.  [default: the cheapest with enough GPUs; `up`: 8]",
    ),
    "cluster.gpus": ("--gpus GPU:N", "GPUs per node: A100:8, A100-80GB:8, L4."),
    "cluster.image": (
        "--image IMAGE",
        "Image: an id, a name pattern, or an SSM parameter.  [default: DLAMI]",
    ),
    "cluster.disk_gb": ("--disk GB", "Root disk.  [default: image + 100, at least 200]"),
    "cluster.spot": ("--spot", "Spot instances: cheaper, but AWS may reclaim them."),
    "cluster.budget_usd": ("--budget USD", "Terminate the nodes when this is spent."),
    "cluster.idle": (
        "--idle TIME",
        "Shut down after this time without a job or a login; off.  [default: 60m]",
    ),
    "cluster.expires": ("--expires TIME", "Terminate the nodes after this: 90m, 24h, 7d.  [default: 24h]"),
    "job.world_size": ("--world-size N", "Total ranks.  [default: one per GPU]"),
    "job.nproc_per_node": ("--nproc-per-node N", "Ranks per node; gpu: one per GPU, the default."),
    "job.nnodes": ("--nnodes MIN:MAX", "Continue with MIN of MAX nodes; implies torchrun's agent."),
    "job.resume": (
        "--resume last|JOB",
        "Give the ranks the newest checkpoint of a job: $AWSDDP_RESUME and {resume}.",
    ),
    "job.after": ("--after JOB|all", "Start when this job, or all on the nodes, have ended; no client."),
    "job.on": (
        "--on NODES",
        "Use these nodes (0,2-3), or GPUs of nodes (0:4-7), and leave the others to other jobs.",
    ),
    "job.max_restarts": ("--max-restarts N", "Restart the ranks up to N times; implies torchrun's agent."),
    "job.module": ("-m --module", "SCRIPT is a module (python -m)."),
    "job.outputs": ("--output PATH", "Also fetch this path (repeatable)."),
    "env.file": (
        "--env FILE",
        "What the ranks import: requirements.txt, pyproject.toml, uv.lock, environment.yml.",
    ),
    "env.variables": (
        "--env-var NAME[=VALUE]",
        "Set this for every rank (repeatable); NAME alone: a secret, its value from this environment.",
    ),
    "job.name": ("--name NAME", "The job's name.  [default: script, time, 4 digits]"),
    "job.timeout": ("--timeout TIME", "End the job after this: 90m, 24h."),
}
"""The options of the command line that set a key, with what their value is and their help."""


def option_words(key: str, value: object) -> list[str]:
    """Return the arguments of a command line that set a key of awsddp.toml."""
    if key not in OPTIONS or value is None or value is False or value in ([], ()):
        return ["-o", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    flag = OPTIONS[key][0].split()[0]
    if isinstance(value, list | tuple):
        return [word for one in value for word in (flag, str(one))]
    return [flag] if value is True else [flag, str(value)]


def options_of(words: Sequence[str]) -> dict[str, object]:
    """Return the values by key that `words_of` gave as arguments; each variable's value is None."""
    found: dict[str, object] = {}
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


def seconds(text: str, *, place: str = "duration") -> float:
    """Return the seconds of a duration such as "90", "30s", "90m", "24h" or "7d". Raises ConfigError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{place}: invalid duration {text!r}", "", "use 30s, 90m, 24h or 7d   # docs/cost.md"
        )
    found = float(match[1]) * _SECONDS[match[2]]
    if found > MAX_DURATION_S:
        raise ConfigError(f"{place}: {text[:40]!r} is out of range", "", "a duration of 365d or less")
    return found


def size_of(text: str) -> float:
    """Return the bytes of `job.results_limit`, such as "500MB" or "20GB". Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"job.results_limit: invalid size {text!r}", "", "use 500MB, 20GB or 1.5TB   # docs/results.md"
        )
    return float(match[1]) * _BYTES[match[2].upper()]


def nodes_range(text: str) -> tuple[int, int]:
    """Return MIN and MAX of `job.nnodes`, "MIN:MAX" or a number. Raises ConfigError."""
    match = _NODES.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < low <= high:
        raise ConfigError(f"job.nnodes: invalid range {text!r}", "", "write it as MIN:MAX, such as 1:4")
    return low, high


def gpus_of(text: str) -> dict[int, tuple[int, ...]]:
    """Return the nodes of `job.on`, each with its GPUs (none: all of them). Raises ConfigError."""
    found: dict[int, tuple[int, ...]] = {}
    for part in text.split(","):
        match = _ON.fullmatch(part.strip())
        nodes = _numbers(match[1], match[2]) if match else ()
        gpus = _numbers(match[3], match[4]) if match and match[3] else ()
        if not nodes or (match and match[3] and not gpus) or not found.keys().isdisjoint(nodes):
            raise ConfigError(
                f"job.on: invalid {text!r}",
                f"{part!r} is neither nodes nor GPUs of nodes, or names a node twice",
                "write it as 0,2-3 (nodes) or 0:4-7,1:0-3 (GPUs of nodes)",
            )
        found |= dict.fromkeys(nodes, gpus)
    return dict(sorted(found.items()))


def _numbers(first: str, last: str | None) -> tuple[int, ...]:
    return tuple(range(int(first), int(last or first) + 1))


def idle_seconds(text: str) -> int:
    """Return the seconds of `cluster.idle`, 0 for "off". Raises ConfigError."""
    if text == "off":
        return 0
    found = int(seconds(text, place="cluster.idle"))
    if found == 0:
        raise ConfigError(f"cluster.idle: {text!r} is too short", "", 'from 1s to 365d, or "off"')
    return found


def jump_host(text: str) -> tuple[str, int | None]:
    """Return ssh's destination for `network.jump`, and its port if given. Raises ConfigError."""
    match = _JUMP.fullmatch(text)
    if match is None or not 0 < int(match[4] or 22) < 65536:
        raise ConfigError(
            f"network.jump: invalid jump host {text!r}",
            "only one host; configure more hops as ProxyJump in ~/.ssh/config",
            "use user@host, user@host:2222, or a name of your ~/.ssh/config",
        )
    return f"{match[1]}{match[2] or match[3]}", int(match[4]) if match[4] else None


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"), parse_float=_Written)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"cannot read {file}", str(error), "fix the file, or move it away") from error


class _Written(str):
    """A number of awsddp.toml as it was written: python = 3.10 is not 3.1."""


def _variables(environ: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return (variable, "section.key", text, variable) for each AWSDDP_SECTION_KEY that is set."""
    names = {f"AWSDDP_{key.replace('.', '_')}".upper(): key for key in KEYS}
    return [(name, key, environ[name], name) for name, key in names.items() if name in environ]


def _put(values: dict[str, Any], key: str, value: object, place: str) -> str:
    """Put the value of a key into its section, and return the key; of one variable that of all."""
    section, _, name = key.partition(".")
    if section == "tags" and name:
        values["tags"][name] = str(value)
        return key
    if section not in SECTIONS:
        raise _unknown(place, section, [*SECTIONS, "tags"])
    hints = typing.get_type_hints(SECTIONS[section])
    group, _, variable = name.partition(".")
    if section == "env" and variable and group in ("variables", "secrets"):
        _set_variable(values[section], variable, str(value) if group == "variables" else None)
        return f"env.{group}"
    if name not in hints:
        raise _unknown(place, name, list(hints))
    values[section][name] = _convert(value, hints[name], place)
    return key


def _set_variable(env: dict[str, Any], name: str, value: str | None) -> None:
    """Set a variable, or make it a secret (None); it is one of the two, as the last setting says."""
    variables, secrets = dict(env.get("variables", {})), dict.fromkeys(env.get("secrets", ()))
    variables.pop(name, None)
    secrets.pop(name, None)
    if value is None:
        secrets[name] = None
    else:
        variables[name] = value
    env.update(variables=variables, secrets=tuple(secrets))


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
    if typing.get_origin(hint) is Literal:
        return True
    return hint is str or (isinstance(hint, types.UnionType) and str in hint.__args__)


def _form(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"one of: {', '.join(typing.get_args(hint))}"
    if typing.get_origin(hint) is tuple:
        return 'a list of strings, such as ["a", "b"]'
    if typing.get_origin(hint) is dict:
        return 'names and strings, such as { A = "1" }'
    return f"expected: {getattr(hint, '__name__', str(hint))}"


def _unknown(place: str, word: str, known: list[str]) -> ConfigError:
    import difflib

    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return ConfigError(f"{place}: unknown key {word!r}", "", hint)


def _check(cluster: ClusterSection, job: JobSection) -> None:
    """Refuse values that no cluster or job can have. Raises ConfigError."""
    limits = (
        ("cluster.nodes", cluster.nodes, 1, 1000),
        ("cluster.disk_gb", cluster.disk_gb, 1, 65536),
        ("job.world_size", job.world_size, 1, 100_000),
        ("job.nproc_per_node", job.nproc_per_node, 1, 1024),
        ("job.max_restarts", job.max_restarts, 0, 1000),
    )
    for place, value, low, high in limits:
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{place}: {value} is out of range", "", f"a whole number from {low} to {high}")
    seconds(cluster.expires, place="cluster.expires")
    idle_seconds(cluster.idle)
    seconds(job.grace, place="job.grace")
    if seconds(job.heartbeat_timeout, place="job.heartbeat_timeout") < MIN_HEARTBEAT_TIMEOUT_S:
        raise ConfigError(
            f"job.heartbeat_timeout: {job.heartbeat_timeout} is too short",
            "nodes send a heartbeat every 2 s",
            f"a duration of {MIN_HEARTBEAT_TIMEOUT_S:g} s or more",
        )
    size_of(job.results_limit)
    if job.nnodes is not None:
        nodes_range(job.nnodes)
    if job.on is not None:
        gpus_of(job.on)
    if job.elastic and job.launcher_name != "torchrun":
        raise ConfigError(
            f"job.launcher: {job.launcher} does not support job.max_restarts and job.nnodes",
            "only torch's elastic agent does",
            "-o job.launcher=torchrun, or omit --max-restarts and --nnodes",
        )
    if job.timeout is not None:
        seconds(job.timeout, place="job.timeout")
    if job.hang_after is not None:
        seconds(job.hang_after, place="job.hang_after")


def _check_secrets(env: EnvSection) -> None:
    """Refuse an invalid variable name, and a name that has a value in the file. Raises ConfigError."""
    for name in env.secrets:
        if not VARIABLE.fullmatch(name):
            raise ConfigError(
                "env.secrets: an entry is not the name of a variable",
                "it holds names; each value is read from the environment of the command",
                'write it as secrets = ["WANDB_API_KEY"]',
            )
        if name in env.variables:
            raise ConfigError(
                f"env.secrets: {name} is in env.variables, too", "", "remove it from one of them"
            )
