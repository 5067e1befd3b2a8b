"""Define every setting once: the sections and keys of awsddp.toml.

Each class below is a section, each field a key, and its type the key's schema. The options, the variables
(`AWSDDP_CLUSTER_NODES`), the starter file and the Python API's keywords are generated from the fields.
loader.py reads the values.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from awsddp.model.records import Frozen
from awsddp.settings.values import (
    MIN_EXPIRY,
    check_positive_amount,
    min_duration_check,
    parse_data_sources,
    parse_duration,
    parse_gpus,
    parse_idle,
    parse_jump_host,
    parse_nodes_range,
    parse_notify_url,
    parse_s3_uri,
    parse_size,
    range_check,
)

FILE = "awsddp.toml"
OPTION = "option"
"""The source of a setting that the command line sets."""
SSM = "ssm"
"""The value of `network.jump` that selects AWS Systems Manager instead of a host."""
Value = str | int | float | tuple[str, ...] | tuple[int, ...] | dict[str, str] | None
"""The type of a key's value."""
OptionValue = Value | Sequence[object]
"""The type of a key's value before the conversion: a string, or any TOML or JSON value."""
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Setting:
    """A key's definition.

    `option` is the command-line option that sets the key, with a placeholder for its value, or "" if there is
    none. The starter file shows `example` and `comment`, or the default and the help if these are not given.
    `check` raises ConfigError if the value is invalid; `load` adds the key to the error's message. The value
    of a key that `is_secret` is never shown, recorded or written to a command line.
    """

    default: Any
    help: str
    option: str = ""
    example: OptionValue = None
    comment: str = ""
    check: Callable[[Any], object] | None = None
    is_secret: bool = False


def setting(default: _Kind, help_text: str, option: str = "", **more: Any) -> _Kind:
    """Return a dataclass field for a key; its metadata holds a Setting with these arguments."""
    definition = Setting(default, help_text, option, **more)
    shown = not definition.is_secret
    return field(default_factory=lambda: default, repr=shown, metadata={"setting": definition})


_JOB_LASTS = min_duration_check("1s", "the job would end immediately")


class Section(Frozen):
    """A section in awsddp.toml."""


class ClusterSection(Section):
    """[cluster]: the instances."""

    region: str | None = setting(None, "AWS region.  [default: the AWS configuration's]", example="us-east-1")
    profile: str | None = setting(None, "AWS profile.", example="work")
    nodes: int = setting(2, "Number of nodes.", "--nodes N", check=range_check(1, 1000))
    instance_type: str | None = setting(
        None,
        "EC2 instance type.  [default: the cheapest with enough GPUs; 8 for `up`]",
        "--instance-type TYPE",
        example="g6.48xlarge",
        comment='Or several: "g6.48xlarge,g5.48xlarge".  [default: cheapest]',
    )
    gpus: str | None = setting(
        None, "GPU model and number per node: A100:8, A100-80GB:8, L4.", "--gpus GPU:N", example="A100:8"
    )
    image: str | None = setting(
        None,
        "Image (AMI): an id, a name pattern, or an SSM parameter.  [default: DLAMI]",
        "--image IMAGE",
        example="ami-0a1b2c3d",
    )
    disk_gb: int | None = setting(
        None,
        "Size of the root disk.  [default: image + 100, at least 200]",
        "--disk GB",
        example=200,
        check=range_check(1, 65536),
    )
    spot: bool | Literal["first"] = setting(
        False,
        "Use spot instances: cheaper, but AWS may reclaim them.",
        "--spot",
        comment='Spot: cheaper, but AWS may reclaim them; "first": else on-demand.',
    )
    max_price_usd: float | None = setting(
        None,
        "Refuse a plan whose nodes together cost more per hour.",
        example=60.0,
        check=check_positive_amount,
    )
    budget_usd: float | None = setting(
        None,
        "Terminate the nodes when they have cost this much.",
        "--budget USD",
        example=500.0,
        check=check_positive_amount,
    )
    idle: str = setting(
        "60m",
        'Shut a node down after this time without a job or a login; "off": never.',
        "--idle TIME",
        check=parse_idle,
    )
    expires: str = setting(
        "24h",
        "Terminate the nodes after this time: 90m, 24h, 7d.",
        "--expires TIME",
        check=min_duration_check(MIN_EXPIRY, "EC2 bills each node for at least a minute"),
    )
    replace: tuple[str, ...] = setting((), "Ids of the instances that `up` replaces.")

    @property
    def types(self) -> tuple[str, ...]:
        """The requested instance types, in the order in which they are tried."""
        return tuple(dict.fromkeys(re.findall(r"[^,\s]+", self.instance_type or "")))

    @property
    def markets(self) -> tuple[Literal["spot", "on-demand"], ...]:
        """The markets to try, in this order."""
        return ("spot", "on-demand") if self.spot == "first" else ("spot",) if self.spot else ("on-demand",)


class NetworkSection(Section):
    """[network]: the nodes' network and SSH access."""

    subnet: str | None = setting(None, "An existing subnet; it is not changed.", example="subnet-0a1b2c3d")
    security_group: str | None = setting(
        None, "An existing security group; it is not changed.", example="sg-0a1b2c3d"
    )
    ssh_cidr: tuple[str, ...] = setting(
        (),
        'Who may log in: CIDR blocks, "sg-...".  [default: only this machine]',
        example=["203.0.113.0/24"],
    )
    address: Literal["public", "private"] = setting("public", '"private": the nodes get no public address.')
    jump: str | None = setting(
        None,
        'Jump host for SSH, or a name of ~/.ssh/config; "ssm": AWS Systems Manager.',
        example="ubuntu@203.0.113.9",
        check=lambda text: text and parse_jump_host(text),
    )


class AccessSection(Section):
    """[access]: the login, and the nodes' permissions."""

    user: str | None = setting(None, "The login name.  [default: the image's]", example="ubuntu")
    key_file: str | None = setting(
        None,
        "Private key of your EC2 key pair of this name.  [default: a new pair]",
        example="~/.ssh/laptop.pem",
    )
    instance_profile: str | None = setting(
        None,
        "The nodes' AWS permissions: a name or an ARN.  [default: none]",
        example="training",
    )
    kms_key: str | None = setting(
        None,
        "Key that encrypts the disks: an id, alias or ARN.  [default: the account's]",
        example="alias/training",
    )

    @property
    def key(self) -> str | None:
        """The name of the user's own EC2 key pair."""
        return Path(self.key_file).stem if self.key_file else None


class CapacitySection(Section):
    """[capacity]: where and how to find instances."""

    zones: tuple[str, ...] = setting(
        (), "Zones to try, in order.  [default: cheapest first]", example=["us-east-1a"]
    )
    regions: tuple[str, ...] = setting(
        (), "Regions to try after all zones and types failed.", example=["us-west-2"]
    )
    reservation: str | None = setting(
        None, "A capacity reservation or capacity block.", example="cr-0a1b2c3d"
    )
    efa: bool = setting(False, "Use EFA interfaces.")
    placement_group: bool = setting(True, "Place GPU nodes close together; without EFA only if AWS has room.")
    retry_until_up: bool = setting(False, "Retry all alternatives until capacity is available.")
    experimental: bool = setting(False, "Allow features that were never tested on AWS.")


class LocalSection(Section):
    """[local]: the local cloud; no effect on AWS."""

    gpus: Literal["on", "off"] = setting(
        "on", '"on": --local simulates GPUs on the CPU; "off": ranks use gloo on the CPU.'
    )


class EnvSection(Section):
    """[env]: the ranks' Python."""

    kind: Literal["image", "venv", "conda"] | None = setting(
        None,
        '"venv": built by uv; "image": keeps its torch.  [default: image, or conda]',
        example="venv",
    )
    file: str | None = setting(
        None,
        "File with the ranks' packages: requirements.txt, pyproject.toml, uv.lock, environment.yml.",
        "--env FILE",
        example="requirements.txt",
    )
    python: str | None = setting(
        None,
        "Python version for venv or conda. The packages file sets the torch version.",
        example="3.12",
    )
    setup: tuple[str, ...] = setting(
        (),
        "Commands to run once on each node, in the project folder.",
        example=["sudo apt-get install -y ffmpeg"],
    )
    packages_from: Literal["node", "client"] | None = setting(
        None,
        '"client": all packages through this machine; "node": none.  [default: what nodes cannot reach]',
        example="client",
    )
    index_url: str | None = setting(None, "URL of the package index.", example="https://pypi.org/simple")
    ca_bundle: str | None = setting(
        None, "CA certificates, if a proxy replaces the servers' own.", example="~/company.pem"
    )
    proxy: str | None = setting(None, "HTTP proxy for package downloads.", example="http://proxy:3128")
    variables: dict[str, str] = setting(
        {},
        "Set an environment variable for every rank (repeatable). NAME alone is a secret: its value is "
        "read from this machine's environment.",
        "--env-var NAME[=VALUE]",
        example={"OMP_NUM_THREADS": "8"},
        comment="Environment variables for every rank.",
    )
    secrets: tuple[str, ...] = setting(
        (),
        "Variables for every rank, with values from this environment; never stored.",
        example=["WANDB_API_KEY"],
    )


class SyncSection(Section):
    """[sync]: the files that are sent to the nodes."""

    workdir: str = setting(".", "The project folder, which is sent to the nodes.")
    ignore: tuple[str, ...] = setting(
        (),
        "Files not to send, in addition to .gitignore and in its syntax.",
        example=["!/data/"],
        comment='Rules as in .gitignore: "/data/" is not sent, "!/data/" is sent.',
    )


class DataSection(Section):
    """[data]: data sets that every node gets before the ranks start."""

    sources: tuple[str, ...] = setting(
        (),
        "Copy a data set to each node: s3://bucket/prefix, hf://datasets/NAME, ./folder (repeatable).",
        "--data [NAME=]SOURCE",
        example=["s3://my-bucket/imagenet"],
        comment="Copied to $AWSDDP_DATA/imagenet on each node.",
        check=parse_data_sources,
    )
    requester_pays: bool = setting(False, "Pay for requests to requester-pays buckets.")


class JobSection(Section):
    """[job]: the script and how it runs."""

    script: str | None = setting(
        None, "The script that each rank runs.  [default: the bundled program]", example="train.py"
    )
    args: tuple[str, ...] = setting((), "Arguments of the script.", example=["--lr", "0.1"])
    world_size: int | None = setting(
        None,
        "Total number of ranks.  [default: one per GPU]",
        "--world-size N",
        example=16,
        check=range_check(1, 100_000),
    )
    nproc_per_node: int | None = setting(
        None,
        "Ranks per node; gpu: one per GPU, the default.",
        "--nproc-per-node N",
        example=8,
        comment="Ranks per node.",
        check=range_check(1, 1024),
    )
    launcher: str = setting(
        "", '"torchrun": torch\'s elastic agent.  [default: "ssh", a process per rank]', example="torchrun"
    )
    nnodes: str | None = setting(
        None,
        "Continue while MIN of MAX nodes remain; implies the torchrun launcher.",
        "--nnodes MIN:MAX",
        example="1:4",
        check=parse_nodes_range,
    )
    resume: str | None = setting(
        None,
        "Pass the newest checkpoint of a job to the ranks: $AWSDDP_RESUME and {resume}.",
        "--resume last|JOB",
    )
    after: str | None = setting(
        None,
        "Start when this job, or all jobs on the nodes, have ended. No client has to wait.",
        "--after JOB|all",
    )
    on: str | None = setting(
        None,
        "Use only these nodes (0,2-3) or GPUs of nodes (0:4-7); other jobs may use the others.",
        "--on NODES",
        check=parse_gpus,
    )
    max_restarts: int | None = setting(
        None,
        "Restart the ranks up to N times; implies the torchrun launcher.",
        "--max-restarts N",
        example=3,
        check=range_check(0, 1000),
    )
    recover: int | None = setting(
        None,
        "After a machine's fault, go on up to N times: on repaired nodes, from the newest checkpoint.",
        "--recover N",
        example=3,
        check=range_check(1, 100),
    )
    recover_on: tuple[int, ...] = setting(
        (), "Exit codes of ranks after which the job also goes on.", example=[75]
    )
    module: bool = setting(False, "SCRIPT is a module (python -m).", "-m --module")
    prefix: tuple[str, ...] = setting(
        (),
        "Words to put before each rank's command: nsys, docker run.",
        example=["numactl", "--cpunodebind={local_rank}"],
    )
    name: str | None = setting(
        None,
        "Name of the job.  [default: from the script: train-1, train-2]",
        "--name NAME",
        example="baseline",
    )
    outputs: tuple[str, ...] = setting(
        (),
        "Also fetch this path (repeatable).",
        "--output PATH",
        example=["checkpoints"],
        comment="Paths to fetch besides new and changed files.",
    )
    results: str = setting("runs", "The local folder for results.")
    save_to: str | None = setting(
        None,
        "Upload results to S3 while the job runs.",
        "--save-to s3://BUCKET/PREFIX",
        example="s3://my-bucket/runs",
        check=parse_s3_uri,
    )
    exclude: tuple[str, ...] = setting(
        (), "Files not to fetch, as in .gitignore.", example=["data/", "*.tmp"]
    )
    results_limit: str = setting("20GB", "Ask before fetching more than this.", check=parse_size)
    timeout: str | None = setting(
        None, "End the job after this time: 90m, 24h.", "--timeout TIME", example="12h", check=_JOB_LASTS
    )
    hang_after: str | None = setting(
        None,
        'End the job if no rank writes a line for this long; "off": do not look if a silent job hangs.',
        example="10m",
        check=lambda text: text == "off" or _JOB_LASTS(text),
    )
    grace: str = setting(
        "30s", "Time between SIGTERM and SIGKILL, to save a checkpoint.", check=parse_duration
    )
    heartbeat_timeout: str = setting(
        "5m",
        "End the job if a node sends no heartbeat for this long.",
        check=min_duration_check("5s", "nodes send a heartbeat every 2 s"),
    )

    @property
    def is_elastic(self) -> bool:
        """True if the job needs torch's elastic agent."""
        return self.max_restarts is not None or self.nnodes is not None

    @property
    def launcher_name(self) -> str:
        """The configured launcher, or the one that the other keys imply."""
        return self.launcher or ("torchrun" if self.is_elastic else "ssh")

    @property
    def gpus_on(self) -> dict[int, tuple[int, ...]]:
        """The nodes in `on`, each with the GPUs to use; an empty tuple means all of the node's GPUs."""
        return parse_gpus(self.on) if self.on is not None else {}

    @property
    def work_folder(self) -> str:
        """The name of the project folder on a node; jobs that share a node's GPUs have one folder each."""
        shares_nodes = any(self.gpus_on.values())
        return f"work-{re.sub('[^0-9-]+', '_', self.on or '')}" if shares_nodes else "work"

    @property
    def max_nodes(self) -> int | None:
        """The most nodes that the job uses, or None if `nnodes` is not set."""
        return None if self.nnodes is None else parse_nodes_range(self.nnodes)[1]

    def min_nodes(self, nodes: int) -> int:
        """Return how many of the job's `nodes` must remain for the job to continue."""
        return nodes if self.nnodes is None else min(nodes, parse_nodes_range(self.nnodes)[0])


class NotifySection(Section):
    """[notify]: where events of jobs are sent."""

    url: str | None = setting(
        None,
        "Send events of jobs to this URL. A secret: set AWSDDP_NOTIFY_URL instead.",
        example="https://hooks.slack.com/services/...",
        check=parse_notify_url,
        is_secret=True,
    )
    format: Literal["text", "json"] = setting(
        "text", '"text": {"text": ...}, as chats take it; "json": an event with its id.'
    )

    @property
    def host(self) -> str:
        """The host in `url`, which is no secret; "" if there is no URL."""
        return parse_notify_url(self.url) if self.url is not None else ""


class _Spec(Frozen):
    """Records where a spec's values were set.

    `sources` maps each key that was set ("cluster.nodes") to a file, a variable, "option", or "cluster" if
    the launch set the value. `labels` maps each of these keys to the key's name in messages.
    """

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    labels: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def explicit(self) -> frozenset[str]:
        """The keys that were set, except those in the sections [sync], [data], [job] and [notify]."""
        return frozenset(
            key for key in self.sources if not key.startswith(("sync.", "data.", "job.", "notify."))
        )

    def label(self, key: str) -> str:
        """Return a key as the user wrote it, such as --nodes, AWSDDP_CLUSTER_NODES or a line in a file."""
        return key if self.sources.get(key, "cluster") == "cluster" else self.labels.get(key, key)


class ClusterSpec(_Spec):
    """The requested cluster. `tags` are the user's own tags; every resource gets them.

    `gpus_needed` is how many GPUs a node needs for the job's ranks, or None if the job does not set the
    number of ranks.
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
        """The keys that were set on the command line."""
        return frozenset(key for key, source in self.sources.items() if source == OPTION)

    @property
    def from_file(self) -> frozenset[str]:
        """The keys that were set in awsddp.toml; their values do not change an existing cluster."""
        return frozenset(key for key, source in self.sources.items() if Path(source).name == FILE)


class JobSpec(_Spec):
    """The requested job."""

    env: EnvSection = EnvSection()
    sync: SyncSection = SyncSection()
    data: DataSection = DataSection()
    job: JobSection = JobSection()
    notify: NotifySection = NotifySection()


SECTIONS: dict[str, type[Section]] = {
    section.name: type(section.default)
    for section in (*fields(ClusterSpec), *fields(JobSpec))
    if isinstance(section.default, Section)
}
SETTINGS: dict[str, Setting] = {
    f"{section}.{key.name}": key.metadata["setting"]
    for section, kind in SECTIONS.items()
    for key in fields(kind)
}
KEYS = tuple(SETTINGS)
_KEYWORDS = {
    "data.sources": "data",
    "local.gpus": "local_gpus",
    "notify.url": "notify_url",
    "notify.format": "notify_format",
}
KEYWORDS = {_KEYWORDS.get(key, key).rpartition(".")[2]: key for key in KEYS}
"""Maps each keyword in the Python API to its key of awsddp.toml."""
_LAST = ("env.file", "env.variables", "job.name", "job.timeout")
OPTIONS = {key: SETTINGS[key] for key in sorted(KEYS, key=_LAST.__contains__) if SETTINGS[key].option}
"""The keys that have their own command-line option, in the order in which the help pages list them."""
