"""What was asked: every setting once, at its field.

The sections below are the sections of awsddp.toml, their fields its keys, and their types its schema. All
that is known of a key is at its field: the options, the variables (`AWSDDP_CLUSTER_NODES`), the starter file
and the keywords of the Python API are made from it. loader.py reads them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from awsddp.model.records import Frozen
from awsddp.settings.values import (
    LEAST_TERM,
    check_amount,
    data_sources,
    gpus_of,
    idle_seconds,
    jump_host,
    lasting,
    nodes_range,
    s3_place,
    seconds,
    size_of,
    whole,
)

FILE = "awsddp.toml"
OPTION = "option"
"""The source of a setting that the command line gave."""
SSM = "ssm"
"""The `network.jump` that is no host: AWS Systems Manager."""
Value = str | int | float | tuple[str, ...] | dict[str, str] | None
"""What a key may have."""
Given = Value | Sequence[object]
"""What may be typed for a key, before it is converted."""
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Setting:
    """What is known of a key: its default, its help, and its option with the form of the value ("": none).

    The starter file shows `example` and `comment`, else the default and the help. `check` is called with the
    value, and raises ConfigError for an invalid one; `load` names the key.
    """

    default: Any
    help: str
    option: str = ""
    example: Given = None
    comment: str = ""
    check: Callable[[Any], object] | None = None


def setting(default: _Kind, help: str, option: str = "", **more: Any) -> _Kind:
    """Return the field of a key, of which a Setting with these arguments is known."""
    made = Setting(default, help, option, **more)
    return field(default_factory=lambda: default, metadata={"setting": made})


_JOB_LASTS = lasting("1s", "the job would end as it begins")


class Section(Frozen):
    """A section of awsddp.toml."""


class ClusterSection(Section):
    """[cluster]: the instances."""

    region: str | None = setting(None, "AWS region.  [default: the AWS configuration's]", example="us-east-1")
    profile: str | None = setting(None, "AWS profile.", example="work")
    nodes: int = setting(2, "How many nodes.", "--nodes N", check=whole(1, 1000))
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
        check=whole(1, 65536),
    )
    spot: bool | Literal["first"] = setting(
        False,
        "Spot instances: cheaper, but AWS may reclaim them.",
        "--spot",
        comment='Cheaper, but AWS may reclaim them; "first": on-demand where there are none.',
    )
    max_price_usd: float | None = setting(
        None, "Refuse plans over this per hour, in all.", example=60.0, check=check_amount
    )
    budget_usd: float | None = setting(
        None, "Terminate the nodes when this is spent.", "--budget USD", example=500.0, check=check_amount
    )
    idle: str = setting(
        "60m", "Shut down after this time without a job or a login; off.", "--idle TIME", check=idle_seconds
    )
    expires: str = setting(
        "24h",
        "Terminate the nodes after this: 90m, 24h, 7d.",
        "--expires TIME",
        check=lasting(LEAST_TERM, "EC2 bills each node for at least a minute"),
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


class NetworkSection(Section):
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


class AccessSection(Section):
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


class CapacitySection(Section):
    """[capacity]: where and how instances are found."""

    zones: tuple[str, ...] = setting((), "Tried in order.  [default: cheapest first]", example=["us-east-1a"])
    regions: tuple[str, ...] = setting((), "Tried after the zones and types.", example=["us-west-2"])
    reservation: str | None = setting(None, "A capacity reservation or block.", example="cr-0a1b2c3d")
    efa: bool = setting(False, "Use EFA interfaces.")
    placement_group: bool = setting(
        True, "Place nodes with GPUs close together, with EFA always, else where AWS has room so."
    )
    retry_until_up: bool = setting(False, "Try everything again until there is capacity.")
    experimental: bool = setting(False, "Allow what was never launched on AWS.")


class LocalSection(Section):
    """[local]: the local cloud; without effect on AWS."""

    gpus: Literal["on", "off"] = setting("on", '--local rehearses GPUs on the CPU; "off": gloo on the CPU.')


class EnvSection(Section):
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
        None,
        '"client": all through this machine; "node": nothing.  [default: what nodes lack]',
        example="client",
    )
    index_url: str | None = setting(None, "Where packages are found.", example="https://pypi.org/simple")
    ca_bundle: str | None = setting(None, "Certificates, if a proxy replaces them.", example="~/company.pem")
    proxy: str | None = setting(None, "For packages.", example="http://proxy:3128")
    variables: dict[str, str] = setting(
        {},
        "Set this for every rank (repeatable); NAME alone: a secret, its value from this environment.",
        "--env-var NAME[=VALUE]",
        example={"OMP_NUM_THREADS": "8"},
        comment="Set for every rank.",
    )
    secrets: tuple[str, ...] = setting(
        (), "Set for every rank, to the values here; never written down.", example=["WANDB_API_KEY"]
    )


class SyncSection(Section):
    """[sync]: what is sent to the nodes."""

    workdir: str = setting(".", "The folder that the nodes get.")
    ignore: tuple[str, ...] = setting(
        (),
        "Not sent, as what .gitignore lists.",
        example=["!/data/"],
        comment='Sent although .gitignore lists it; "/data/": not sent, as what .gitignore lists.',
    )


class DataSection(Section):
    """[data]: what every node gets before the ranks start."""

    sources: tuple[str, ...] = setting(
        (),
        "Copy this to each node: s3://bucket/prefix, hf://datasets/NAME, ./folder (repeatable).",
        "--data [NAME=]SOURCE",
        example=["s3://my-bucket/imagenet"],
        comment="Copied to each node, to $AWSDDP_DATA/imagenet.",
        check=data_sources,
    )
    requester_pays: bool = setting(False, "You pay for what is read of the buckets of others.")


class JobSection(Section):
    """[job]: what runs."""

    script: str | None = setting(None, "What ranks run.  [default: the bundled program]", example="train.py")
    args: tuple[str, ...] = setting((), "Its arguments.", example=["--lr", "0.1"])
    world_size: int | None = setting(
        None, "Total ranks.  [default: one per GPU]", "--world-size N", example=16, check=whole(1, 100_000)
    )
    nproc_per_node: int | None = setting(
        None,
        "Ranks per node; gpu: one per GPU, the default.",
        "--nproc-per-node N",
        example=8,
        comment="Ranks per node.",
        check=whole(1, 1024),
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
        check=whole(0, 1000),
    )
    module: bool = setting(False, "SCRIPT is a module (python -m).", "-m --module")
    prefix: tuple[str, ...] = setting(
        (), "Words before each command: nsys, docker run.", example=["numactl", "--cpunodebind={local_rank}"]
    )
    name: str | None = setting(
        None, "The job's name.  [default: train-1, train-2, by the script]", "--name NAME", example="baseline"
    )
    outputs: tuple[str, ...] = setting(
        (),
        "Also fetch this path (repeatable).",
        "--output PATH",
        example=["checkpoints"],
        comment="Also fetched, besides new and changed files.",
    )
    results: str = setting("runs", "The local folder for results.")
    save_to: str | None = setting(
        None,
        "Nodes save results here while the job runs.",
        "--save-to s3://BUCKET/PREFIX",
        example="s3://my-bucket/runs",
        check=s3_place,
    )
    exclude: tuple[str, ...] = setting((), "Not fetched, as in .gitignore.", example=["data/", "*.tmp"])
    results_limit: str = setting("20GB", "Of new and changed files; above it, it asks.", check=size_of)
    timeout: str | None = setting(
        None, "End the job after this: 90m, 24h.", "--timeout TIME", example="12h", check=_JOB_LASTS
    )
    hang_after: str | None = setting(
        None, "End the job when no rank writes a line for this long.", example="10m", check=_JOB_LASTS
    )
    grace: str = setting("30s", "Between SIGTERM and SIGKILL, to save a checkpoint.", check=seconds)
    heartbeat_timeout: str = setting(
        "5m",
        "End the job when a node is silent this long.",
        check=lasting("5s", "nodes send a heartbeat every 2 s"),
    )

    @property
    def elastic(self) -> bool:
        """Whether the job asks for what only torch's elastic agent does."""
        return self.max_restarts is not None or self.nnodes is not None

    @property
    def launcher_name(self) -> str:
        """The launcher: the one that was set, else the one that the other keys imply."""
        return self.launcher or ("torchrun" if self.elastic else "ssh")

    @property
    def gpus_on(self) -> dict[int, tuple[int, ...]]:
        """The nodes that `on` names, each with its GPUs (none: all of them)."""
        return gpus_of(self.on) if self.on is not None else {}

    @property
    def work_folder(self) -> str:
        """The synced folder on a node: jobs on some of its GPUs have one each, as they run side by side."""
        parts = any(self.gpus_on.values())
        return f"work-{re.sub('[^0-9-]+', '_', self.on or '')}" if parts else "work"

    @property
    def max_nodes(self) -> int | None:
        """How many nodes the job uses at most."""
        return None if self.nnodes is None else nodes_range(self.nnodes)[1]

    def min_nodes(self, nodes: int) -> int:
        """Return with how many of its `nodes` the job goes on."""
        return nodes if self.nnodes is None else min(nodes, nodes_range(self.nnodes)[0])


class _Spec(Frozen):
    """Where the values of a spec come from.

    `sources` says it of each key that has one from anywhere ("cluster.nodes"): a file, a variable, "option",
    or "cluster" where it holds since the launch. `labels` has the words for it in messages.
    """

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    labels: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def explicit(self) -> frozenset[str]:
        """The keys that have a value from anywhere; of a job those of [env] alone."""
        return frozenset(key for key in self.sources if not key.startswith(("sync.", "data.", "job.")))

    def label(self, key: str) -> str:
        """Return a key as it was given: --nodes, -o cluster.nodes, AWSDDP_CLUSTER_NODES, a line of a file."""
        return key if self.sources.get(key, "cluster") == "cluster" else self.labels.get(key, key)


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


class JobSpec(_Spec):
    """The requested job."""

    env: EnvSection = EnvSection()
    sync: SyncSection = SyncSection()
    data: DataSection = DataSection()
    job: JobSection = JobSection()


SECTIONS: dict[str, type[Section]] = {
    one.name: type(one.default)
    for one in (*fields(ClusterSpec), *fields(JobSpec))
    if isinstance(one.default, Section)
}
SETTINGS: dict[str, Setting] = {
    f"{name}.{one.name}": one.metadata["setting"] for name, kind in SECTIONS.items() for one in fields(kind)
}
KEYS = tuple(SETTINGS)
_KEYWORDS = {"data.sources": "data", "local.gpus": "local_gpus"}
KEYWORDS = {_KEYWORDS.get(key, key).rpartition(".")[2]: key for key in KEYS}
"""The keys of awsddp.toml by the keywords that set them in Python."""
_LAST = ("env.file", "env.variables", "job.name", "job.timeout")
OPTIONS = {key: SETTINGS[key] for key in sorted(KEYS, key=_LAST.__contains__) if SETTINGS[key].option}
"""The keys that have an option, in the order of the help pages."""
