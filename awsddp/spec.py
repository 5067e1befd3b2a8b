"""What was asked: flags over AWSDDP_* variables over awsddp.toml over defaults.

A cluster that exists keeps its own settings, which stand in the place of awsddp.toml's (`overlaid`).

The sections below are the sections of awsddp.toml, their fields its keys, and their types its schema. All
that is known of a key is at its field: the options, the variables (`AWSDDP_CLUSTER_NODES`), the starter file
and the keywords of the Python API are made from it.
"""

import contextlib
import json
import math
import os
import re
import shlex
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
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
_MOMENTARY = OF_ONE_COMMAND.union(
    ("cluster.nodes", "cluster.profile", "cluster.region", "env.variables", "env.secrets")
)
"""Keys that hold for one command or one job, or that the cluster's record holds elsewhere."""
_OF_COMMAND = (_MOMENTARY - {"cluster.nodes"}) | {"cluster.max_price_usd", "capacity.experimental"}
"""Keys that hold for one command, also where awsddp.toml sets them: limits, consent and the login."""
EXCLUSIVE = frozenset({"cluster.instance_type", "cluster.gpus", "capacity.reservation"})
"""Mutually exclusive keys."""
_Value = TypeVar("_Value")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """Return the seconds of a duration such as "90", "30s", "90m", "24h" or "7d". Raises ConfigError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"invalid duration {text!r}", "", "use 30s, 90m, 24h or 7d   # docs/cost.md")
    found = float(match[1]) * _SECONDS[match[2]]
    if found > MAX_DURATION_S:
        raise ConfigError(f"{text[:40]!r} is out of range", "", "a duration of 365d or less")
    return found


def size_of(text: str) -> float:
    """Return the bytes of `job.results_limit`, such as "500MB" or "20GB". Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"invalid size {text!r}", "", "use 500MB, 20GB or 1.5TB   # docs/results.md")
    return float(match[1]) * _BYTES[match[2].upper()]


def nodes_range(text: str) -> tuple[int, int]:
    """Return MIN and MAX of `job.nnodes`, "MIN:MAX" or a number. Raises ConfigError."""
    match = _NODES.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < low <= high:
        raise ConfigError(f"invalid range {text!r}", "", "write it as MIN:MAX, such as 1:4")
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
                f"invalid value {text!r}",
                f"{part!r} is neither nodes nor GPUs of nodes, or names a node twice",
                "write it as 0,2-3 (nodes) or 0:4-7,1:0-3 (GPUs of nodes)",
            )
        found |= dict.fromkeys(nodes, gpus)
    return dict(sorted(found.items()))


def _numbers(first: str, last: str | None) -> tuple[int, ...]:
    return tuple(range(int(first), int(last or first) + 1))


def idle_seconds(text: str) -> int:
    """Return the seconds of `cluster.idle`, 0 for "off". Raises ConfigError."""
    found = 0 if text == "off" else int(seconds(text))
    if found == 0 and text != "off":
        raise ConfigError(f"{text!r} is too short", "", 'from 1s to 365d, or "off"')
    return found


def jump_host(text: str) -> tuple[str, int | None]:
    """Return ssh's destination for `network.jump`, and its port if given. Raises ConfigError."""
    match = _JUMP.fullmatch(text)
    if match is None or not 0 < int(match[4] or 22) < 65536:
        raise ConfigError(
            f"invalid jump host {text!r}",
            "only one host; configure more hops as ProxyJump in ~/.ssh/config",
            "use user@host, user@host:2222, or a name of your ~/.ssh/config",
        )
    return f"{match[1]}{match[2] or match[3]}", int(match[4]) if match[4] else None


def _from(low: int, high: int) -> Callable[[int], None]:
    """Return the check of a number."""

    def check(value: int) -> None:
        if not low <= value <= high:
            raise ConfigError(f"{value} is out of range", "", f"a whole number from {low} to {high}")

    return check


def _heartbeat(text: str) -> None:
    if seconds(text) < 5:
        raise ConfigError(f"{text} is too short", "nodes send a heartbeat every 2 s", "use 5 s or more")


def setting(
    default: _Value, help: str, option: str = "", *, example: Any = None, comment: str = "", check: Any = None
) -> _Value:
    """Return the field of a key: its default, its help, and its option with the form of the value.

    The starter file shows `example`, else the default, and `comment`, else the help. `check` is called with
    the value, and raises ConfigError for an invalid one; `load` names the key.
    """
    example, comment = default if example is None else example, comment or help
    return field(default_factory=lambda: default, metadata=locals())


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """[cluster]: the instances."""

    region: str | None = setting(None, "AWS region.  [default: the AWS configuration's]", example="us-east-1")
    profile: str | None = setting(None, "AWS profile.", example="work")
    nodes: int = setting(2, "How many nodes.", "--nodes N", check=_from(1, 1000))
    instance_type: str | None = setting(
        None,
        "EC2 instance type.  [default: the cheapest with enough GPUs; `up`: 8]",
        "--instance-type TYPE",
        example="g6.48xlarge",
        comment='Or several: "g6.48xlarge,g5.48xlarge".  [default: cheapest]',
    )
    gpus: str | None = setting(
        None, "GPUs per node: A100:8, A100-80GB:8, L4.", "--gpus GPU:N", example="A100:8"
    )
    image: str | None = setting(
        None,
        "Image: an id, a name pattern, or an SSM parameter.  [default: DLAMI]",
        "--image IMAGE",
        example="ami-0a1b2c3d",
    )
    disk_gb: int | None = setting(
        None,
        "Root disk.  [default: image + 100, at least 200]",
        "--disk GB",
        example=200,
        check=_from(1, 65536),
    )
    spot: bool | Literal["first"] = setting(
        False,
        "Spot instances: cheaper, but AWS may reclaim them.",
        "--spot",
        comment='Cheaper, but AWS may reclaim them; "first": on-demand where there are none.',
    )
    max_price_usd: float | None = setting(None, "Refuse plans over this per hour, in all.", example=60.0)
    budget_usd: float | None = setting(
        None, "Terminate the nodes when this is spent.", "--budget USD", example=500.0
    )
    idle: str = setting(
        "60m", "Shut down after this time without a job or a login; off.", "--idle TIME", check=idle_seconds
    )
    expires: str = setting(
        "24h", "Terminate the nodes after this: 90m, 24h, 7d.", "--expires TIME", check=seconds
    )
    replace: tuple[str, ...] = setting((), "Ids of the instances that `up` replaces.")

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
    """[network]: the nodes' network and SSH access."""

    subnet: str | None = setting(None, "One that exists; it is not changed.", example="subnet-0a1b2c3d")
    security_group: str | None = setting(None, "One that exists; it is not changed.", example="sg-0a1b2c3d")
    ssh_cidr: tuple[str, ...] = setting(
        (), 'Who may log in, or "sg-...".  [default: only this machine]', example=["203.0.113.0/24"]
    )
    address: Literal["public", "private"] = setting("public", '"private": the nodes get no public address.')
    jump: str | None = setting(
        None,
        'SSH goes through this host, or a name of ~/.ssh/config; "ssm": AWS Systems Manager.',
        example="ubuntu@203.0.113.9",
        check=lambda text: text and jump_host(text),
    )


@dataclass(frozen=True, kw_only=True)
class AccessSection:
    """[access]: the login, and the nodes' permissions."""

    user: str | None = setting(None, "The login name.  [default: the image's]", example="ubuntu")
    key_file: str | None = setting(
        None, 'The private half of the EC2 key "laptop".  [default: a new one]', example="~/.ssh/laptop.pem"
    )
    instance_profile: str | None = setting(
        None, "What the nodes may do in AWS: a name or an ARN.  [default: nothing]", example="training"
    )
    kms_key: str | None = setting(
        None, "Encrypts the disks: an id, alias or ARN.  [default: the account's]", example="alias/training"
    )

    @property
    def key(self) -> str | None:
        """The name in EC2 of the user's own key pair."""
        return Path(self.key_file).stem if self.key_file else None


@dataclass(frozen=True, kw_only=True)
class CapacitySection:
    """[capacity]: where and how instances are found."""

    zones: tuple[str, ...] = setting((), "Tried in order.  [default: cheapest first]", example=["us-east-1a"])
    regions: tuple[str, ...] = setting((), "Tried after the zones and types.", example=["us-west-2"])
    reservation: str | None = setting(None, "A capacity reservation or block.", example="cr-0a1b2c3d")
    efa: bool = setting(False, "Use EFA interfaces.")
    retry_until_up: bool = setting(False, "Try everything again until there is capacity.")
    experimental: bool = setting(False, "Allow what was never launched on AWS.")


@dataclass(frozen=True, kw_only=True)
class LocalSection:
    """[local]: the local cloud; without effect on AWS."""

    gpus: Literal["on", "off"] = setting("on", '--local rehearses GPUs on the CPU; "off": gloo on the CPU.')


@dataclass(frozen=True, kw_only=True)
class EnvSection:
    """[env]: the Python of the ranks."""

    kind: Literal["image", "venv", "conda"] | None = setting(
        None, '"venv" by uv; "image" keeps its torch.  [default: image, or conda]', example="venv"
    )
    file: str | None = setting(
        None,
        "What the ranks import: requirements.txt, pyproject.toml, uv.lock, environment.yml.",
        "--env FILE",
        example="requirements.txt",
    )
    python: str | None = setting(None, "Of a venv or conda environment; torch is the file's.", example="3.12")
    setup: tuple[str, ...] = setting(
        (), "Run once on each node, in the synced folder.", example=["sudo apt-get install -y ffmpeg"]
    )
    packages_from: Literal["node", "client"] | None = setting(
        None, '"client": fetched here and sent.  [default: where nodes have no internet]', example="client"
    )
    index_url: str | None = setting(None, "Where packages are found.", example="https://pypi.org/simple")
    ca_bundle: str | None = setting(None, "Certificates, if a proxy replaces them.", example="~/company.pem")
    proxy: str | None = setting(None, "For packages.", example="http://proxy:3128")
    variables: dict[str, str] = setting(  # noqa: RUF009
        {},
        "Set this for every rank (repeatable); NAME alone: a secret, its value from this environment.",
        "--env-var NAME[=VALUE]",
        example={"OMP_NUM_THREADS": "8"},
        comment="Set for every rank.",
    )
    secrets: tuple[str, ...] = setting(
        (), "Set for every rank, to the values here; never written down.", example=["WANDB_API_KEY"]
    )


@dataclass(frozen=True, kw_only=True)
class SyncSection:
    """[sync]: what is sent to the nodes."""

    workdir: str = setting(".", "The folder that the nodes get.")
    ignore: tuple[str, ...] = setting((), "Not sent, as what .gitignore lists.", example=["data/", "*.ckpt"])


@dataclass(frozen=True, kw_only=True)
class JobSection:
    """[job]: what runs."""

    script: str | None = setting(None, "What ranks run.  [default: the bundled program]", example="train.py")
    args: tuple[str, ...] = setting((), "Its arguments.", example=["--lr", "0.1"])
    world_size: int | None = setting(
        None, "Total ranks.  [default: one per GPU]", "--world-size N", example=16, check=_from(1, 100_000)
    )
    nproc_per_node: int | None = setting(
        None,
        "Ranks per node; gpu: one per GPU, the default.",
        "--nproc-per-node N",
        example=8,
        comment="Ranks per node.",
        check=_from(1, 1024),
    )
    launcher: str = setting(
        "", '"torchrun": torch\'s elastic agent.  [default: "ssh", a process per rank]', example="torchrun"
    )
    nnodes: str | None = setting(
        None,
        "Continue with MIN of MAX nodes; implies torchrun's agent.",
        "--nnodes MIN:MAX",
        example="1:4",
        check=nodes_range,
    )
    resume: str | None = setting(
        None,
        "Give the ranks the newest checkpoint of a job: $AWSDDP_RESUME and {resume}.",
        "--resume last|JOB",
    )
    after: str | None = setting(
        None, "Start when this job, or all on the nodes, have ended; no client.", "--after JOB|all"
    )
    on: str | None = setting(
        None,
        "Use these nodes (0,2-3), or GPUs of nodes (0:4-7), and leave the others to other jobs.",
        "--on NODES",
        check=gpus_of,
    )
    max_restarts: int | None = setting(
        None,
        "Restart the ranks up to N times; implies torchrun's agent.",
        "--max-restarts N",
        example=3,
        check=_from(0, 1000),
    )
    module: bool = setting(False, "SCRIPT is a module (python -m).", "-m --module")
    prefix: tuple[str, ...] = setting(
        (), "Words before each command: nsys, docker run.", example=["numactl", "--cpunodebind={local_rank}"]
    )
    name: str | None = setting(
        None, "The job's name.  [default: script, time, 4 digits]", "--name NAME", example="baseline"
    )
    outputs: tuple[str, ...] = setting(
        (),
        "Also fetch this path (repeatable).",
        "--output PATH",
        example=["checkpoints"],
        comment="Also fetched, besides new and changed files.",
    )
    results: str = setting("runs", "The local folder for results.")
    exclude: tuple[str, ...] = setting((), "Not fetched, as in .gitignore.", example=["data/", "*.tmp"])
    results_limit: str = setting("20GB", "Of new and changed files; above it, it asks.", check=size_of)
    timeout: str | None = setting(
        None, "End the job after this: 90m, 24h.", "--timeout TIME", example="12h", check=seconds
    )
    hang_after: str | None = setting(
        None, "End the job when no rank writes a line for this long.", example="10m", check=seconds
    )
    grace: str = setting("30s", "Between SIGTERM and SIGKILL, to save a checkpoint.", check=seconds)
    heartbeat_timeout: str = setting("5m", "End the job when a node is silent this long.", check=_heartbeat)

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
    or "cluster" where it holds since the launch. `labels` has the words for it in messages.
    """

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    labels: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def explicit(self) -> frozenset[str]:
        """The keys that have a value from anywhere; of a job those of [env] alone."""
        return frozenset(key for key in self.sources if not key.startswith(("sync.", "job.")))

    def label(self, key: str) -> str:
        """Return a key as it was given: --nodes, -o cluster.nodes, AWSDDP_CLUSTER_NODES, a line of a file."""
        return key if self.sources.get(key, "cluster") == "cluster" else self.labels.get(key, key)


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
SECTIONS: dict[str, type] = {
    one.name: type(one.default)
    for one in (*fields(ClusterSpec), *fields(JobSpec))
    if is_dataclass(one.default)
}
SETTINGS = {f"{name}.{one.name}": one.metadata for name, kind in SECTIONS.items() for one in fields(kind)}
KEYS = tuple(SETTINGS)
_LAST = ("env.file", "env.variables", "job.name", "job.timeout")
OPTIONS = {key: SETTINGS[key] for key in sorted(KEYS, key=_LAST.__contains__) if SETTINGS[key]["option"]}
"""The keys that have an option, in the order of the help pages."""


def load(
    name: str = "default",
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] = {},
    labels: Mapping[str, str] = {},
) -> tuple[ClusterSpec, JobSpec]:
    """Read the settings of the cluster `name`.

    `file` is the awsddp.toml to read (absent: none), `overrides` maps "section.key" to a value as the user
    typed it, and `labels` to what was typed for the key ("--nodes"). Raises ConfigError, naming the key as it
    was given, for an unknown key, an invalid value, a file that is not TOML, or an invalid cluster name.
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
            raise _unknown(f"{file}: {section}", section, values)
    given = [
        (f"{file}: [{section}] {key}", f"{section}.{key}", value, str(file))
        for section, table in document.items()
        for key, value in table.items()
    ]
    typed = [(labels.get(key, key), key, value, OPTION) for key, value in overrides.items()]
    given_as = {}
    for label, key, value, source in (*given, *_variables(environ), *typed):
        if key in OF_ONE_COMMAND and source != OPTION:
            words = shlex.join(["awsddp", "...", *option_words(key, value)])
            raise ConfigError(f"{label} holds for one command", "", f"{words}   # on the command line")
        sources[_put(values, key, value, label)], given_as[key] = source, label
    sections = {section: kind(**values[section]) for section, kind in SECTIONS.items()}
    for key in filter(given_as.get, KEYS):
        _check(key, sections[key.partition(".")[0]], given_as[key])

    def made(kind: type[_Any], **more: Any) -> _Any:
        names = {one.name for one in fields(kind)}
        own = {key: source for key, source in sources.items() if key.partition(".")[0] in names}
        more |= {name: section for name, section in sections.items() if name in names}
        return kind(**more, sources=own, labels=given_as)

    needed = _gpus_needed(sections["cluster"].nodes, sections["job"])
    cluster = made(ClusterSpec, name=name, tags=values["tags"], gpus_needed=needed)
    return cluster, _checked(made(JobSpec))


def as_given(message: str, *specs: ClusterSpec | JobSpec) -> str:
    """Return a message that begins with a key ("cluster.gpus: ...") with what was typed for it."""
    key, colon, rest = message.partition(": ")
    for spec in specs:
        key = spec.label(key)
    return key + colon + rest


def _is_of_job(key: str) -> bool:
    return hasattr(JobSpec, key.partition(".")[0])


def _gpus_needed(nodes: int, job: JobSection) -> int | None:
    """Return how many GPUs the ranks of one node drive; None where their number is not requested."""
    used = len(gpus_of(job.on)) if job.on is not None else min(nodes, job.max_nodes or nodes)
    return job.nproc_per_node or (job.world_size and math.ceil(job.world_size / used))


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
    decided = typed | (EXCLUSIVE if typed & EXCLUSIVE else frozenset())
    sections = SECTIONS.keys() - vars(JobSpec) | {"tags"} if isinstance(spec, ClusterSpec) else {"env"}
    kept = {key for key in asked if key.partition(".")[0] in sections and key not in decided}
    values: dict[str, Any] = {section: {} for section in sections}
    defaults = {key: SETTINGS[key]["default"] for key in dropped & SETTINGS.keys()}
    for key, value in (defaults | {key: asked[key] for key in kept}).items():
        _put(values, key, value, key)
    tags = values.pop("tags", {})
    changed = {name: replace(getattr(spec, name), **keys) for name, keys in values.items() if keys}
    if isinstance(spec, ClusterSpec):
        changed["tags"] = tags | {name: text for name, text in spec.tags.items() if f"tags.{name}" in typed}
    sources = {key: source for key, source in spec.sources.items() if key not in dropped}
    return replace(spec, **changed, sources=sources | dict.fromkeys(kept, "cluster"))


def differences(spec: ClusterSpec, standing: ClusterSpec) -> dict[str, tuple[Any, Any]]:
    """Return the keys of awsddp.toml whose values the cluster does not have, each with both values.

    `standing` is `overlaid` of `spec`. A key that an option or a variable excludes is left out.
    """
    typed = spec.explicit - spec.from_file
    keys = spec.from_file - (EXCLUSIVE if typed & EXCLUSIVE else frozenset())
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
        if value != SETTINGS[key]["default"] and key not in NOT_SHOWN:
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
    flag = OPTIONS[key]["option"].split()[0]
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
        raise _unknown(place, section, values)
    hints = typing.get_type_hints(SECTIONS[section])
    group, _, variable = name.partition(".")
    if section == "env" and variable and group in ("variables", "secrets"):
        _set_variable(values[section], variable, str(value) if group == "variables" else None)
        return f"env.{group}"
    if name not in hints:
        raise _unknown(place, name, hints)
    values[section][name] = _convert(value, hints[name], place)
    return key


def _set_variable(env: dict[str, Any], name: str, value: str | None) -> None:
    """Set a variable, or make it a secret (None); it is one of the two, as the last setting says."""
    variables = {key: text for key, text in env.get("variables", {}).items() if key != name}
    secrets = [key for key in env.get("secrets", ()) if key != name]
    variables |= {} if value is None else {name: value}
    secrets += [name] if value is None else []
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
    origin = typing.get_origin(hint)
    return origin is Literal or (origin in (None, types.UnionType) and str in (hint, *typing.get_args(hint)))


def _form(hint: Any) -> str:
    forms = {
        Literal: f"one of: {', '.join(map(str, typing.get_args(hint)))}",
        tuple: 'a list of strings, such as ["a", "b"]',
        dict: 'names and strings, such as { A = "1" }',
    }
    return forms.get(typing.get_origin(hint), f"expected: {getattr(hint, '__name__', str(hint))}")


def _unknown(place: str, word: str, known: Collection[str]) -> ConfigError:
    return ConfigError(f"{place}: unknown key {word!r}", "", nearest(word, known))


def nearest(word: str, known: Collection[str]) -> str:
    """Return the hint for an unknown word: the one that is meant, else all."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _check(key: str, section: object, label: str) -> None:
    """Refuse a value that no cluster or job can have. Raises ConfigError."""
    check, value = SETTINGS[key]["check"], getattr(section, key.partition(".")[2])
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
