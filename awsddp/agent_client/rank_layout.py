"""Distribute a job's ranks over its nodes, and create their environment and arguments.

Does no I/O on nodes.
"""

import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from awsddp.errors import UsageError
from awsddp.model.records import Node, PreparedNode
from awsddp.plan.project import source_folders
from awsddp.settings.spec import JobSection, JobSpec
from awsddp.settings.values import parse_data_sources, parse_gpus
from awsddp.util.formatting import counted
from awsddp.util.shipped_files import REMOTE_DIR

CPU_RANKS_PER_NODE = 2
"""Default number of ranks on a node without GPUs or with simulated ones."""

PLACEHOLDERS = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "nnodes": "GROUP_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "init_file": "",
    "resume": "",
    "data": "",
}
"""A job's placeholders, each with the rank's environment variable that holds its value ("": no variable)."""
DATA = "awsddp/data"
"""The folder for data sets in a node's home folder."""
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
"""Matches the names of variables that hold a secret."""
_NAMES = "|".join(name for name, variable in PLACEHOLDERS.items() if variable)
_SINGLE = re.compile(rf"(?<![{{$])\{{({_NAMES})\}}(?!\}})")
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of a job's processes.

    `node` is the number of the process's node in the cluster, and `node_rank` is that node's number in the
    job.
    """

    rank: int
    local_rank: int
    node: int
    node_rank: int
    world_size: int
    local_world_size: int
    nnodes: int


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The address and name of a job's rendezvous."""

    job: str
    master_addr: str
    master_port: int


@dataclass(frozen=True, kw_only=True)
class Host:
    """One of a job's nodes, with its record and the facts from its preparation.

    `workdir` is the absolute path of the project folder. `gpus` are the indices of the GPUs that the job is
    allowed to use (empty: all). `resume` is the checkpoint's path. `sources` are the folders in the project
    folder from which packages are imported. `data` are the names of the data sets on the node. `run_id` is
    the id that the job shares with the jobs that it continues.
    """

    node: Node
    prepared: PreparedNode
    workdir: str
    gpus: tuple[int, ...] = ()
    resume: str | None = None
    sources: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    run_id: str = ""

    @property
    def only_data(self) -> str | None:
        """The path of the data set if there is exactly one, or else None."""
        return posixpath.join(self.prepared.home, DATA, self.data[0]) if len(self.data) == 1 else None

    def environment(self, job: str, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment that all ranks of the job have on the node.

        The user's `variables` override everything except the run's folder and id, the checkpoint, the data
        and the GPUs. The folders of the job's packages are appended to PYTHONPATH. NCCL treats `=nic` as an
        exact name, and `nic` as a prefix
        (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname).
        """
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))} if self.gpus else {}
        sources = [posixpath.join(self.workdir, source) for source in self.sources]
        paths = ":".join(filter(None, (variables.get("PYTHONPATH"), *sources)))
        return {
            "NCCL_SOCKET_IFNAME": f"={self.prepared.nic}",
            "GLOO_SOCKET_IFNAME": self.prepared.nic,
            "TP_SOCKET_IFNAME": self.prepared.nic,
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            **variables,
            **gpus,
            **({"PYTHONPATH": paths} if sources else {}),
            **({"AWSDDP_RESUME": self.resume} if self.resume else {}),
            **({"AWSDDP_DATA": posixpath.join(self.prepared.home, DATA)} if self.data else {}),
            "AWSDDP_RUN_DIR": f"{self.folder(job)}/run",
            "AWSDDP_RUN_ID": self.run_id,
        }

    def tracker_defaults(self, job: JobSection) -> dict[str, str]:
        """Return the variables with which rank 0 continues its run at W&B, or {} for a job that neither
        continues another job nor can be recovered.

        With "allow", W&B resumes the run with this id or creates it. An id has at most 64 word characters
        (https://docs.wandb.ai/guides/track/environment-variables, https://docs.wandb.ai/guides/runs/resuming).
        """
        if job.resume is None and job.recover is None:
            return {}
        return {"WANDB_RUN_ID": self.run_id, "WANDB_RESUME": "allow"}

    def folder(self, job: str) -> str:
        """Return the job's folder on the node."""
        return posixpath.join(self.prepared.home, ".awsddp", "jobs", job)


def make_hosts(
    nodes: Iterable[Node],
    prepared: Mapping[int, PreparedNode],
    spec: JobSpec,
    *,
    folder: str,
    resume: str | None,
) -> list[Host]:
    """Return a job's hosts. The keys of `prepared` are node numbers.

    `folder` is the path of the job's project folder, and `resume` is the path of the job's checkpoint. Both
    paths are relative to REMOTE_DIR.
    """
    sources = source_folders(Path(spec.sync.workdir))
    data = tuple(source.name for source in parse_data_sources(spec.data.sources))

    def host(node: Node) -> Host:
        remote = f"{prepared[node.node].home}/{REMOTE_DIR}"
        return Host(
            node=node,
            prepared=prepared[node.node],
            workdir=f"{remote}/{folder}",
            gpus=spec.job.gpus_on.get(node.node, ()),
            sources=sources,
            data=data,
            resume=f"{remote}/{resume}" if resume else None,
        )

    return [host(node) for node in nodes]


def layout_ranks(
    nodes: Sequence[int],
    *,
    gpus: int | Mapping[int, int],
    world_size: int | None = None,
    nproc_per_node: int | None = None,
) -> tuple[Rank, ...]:
    """Return `world_size` ranks, with consecutive ranks on each of `nodes` and the same number on each node.

    `gpus` is the job's number of GPUs per node; 0 sets no limit. Without a world size, all nodes are used; if
    the world size is small, only the first nodes are used. Raises UsageError, which suggests values that fit.
    """
    limits = dict.fromkeys(nodes, gpus) if isinstance(gpus, int) else gpus
    default_ranks = min((limits[node] for node in nodes if limits[node]), default=CPU_RANKS_PER_NODE)
    count, per_node = _shape(len(nodes), default_ranks, world_size, nproc_per_node)
    used = nodes[:count]
    for limit in (limits[node] for node in used):
        if limit and per_node > limit:
            raise UsageError(
                f"{counted(per_node, 'rank')} per node do not fit: a node has {counted(limit, 'GPU')}",
                "each rank needs its own GPU",
                f"try: --world-size {sum(limits[node] for node in used)}, or more nodes",
            )
    slots = [(node_rank, node, local) for node_rank, node in enumerate(used) for local in range(per_node)]
    return tuple(
        Rank(
            rank=rank,
            local_rank=local_rank,
            node=node,
            node_rank=node_rank,
            world_size=len(slots),
            local_world_size=per_node,
            nnodes=count,
        )
        for rank, (node_rank, node, local_rank) in enumerate(slots)
    )


def layout_on_nodes(requested: JobSection, gpu_counts: Mapping[int, int]) -> tuple[Rank, ...]:
    """Return a job's ranks; `gpu_counts` has each node's number of GPUs. Raises UsageError."""
    gpus = _select_gpus(requested.on, gpu_counts)
    return layout_ranks(
        list(gpus)[: requested.max_nodes],
        gpus=gpus,
        world_size=requested.world_size,
        nproc_per_node=requested.nproc_per_node,
    )


def _select_gpus(text: str | None, gpu_counts: Mapping[int, int]) -> Mapping[int, int]:
    """Return the number of GPUs for the job on each node that `job.on` selects. Raises UsageError."""
    if text is None:
        return gpu_counts
    for node, gpus in parse_gpus(text).items():
        if node not in gpu_counts:
            raise UsageError(
                f"--on {text}: there is no node{node}", f"nodes are: {', '.join(map(str, gpu_counts))}"
            )
        if gpus and gpus[-1] >= gpu_counts[node]:
            raise UsageError(
                f"--on {text}: node{node} has no GPU {gpus[-1]}", f"it has {gpu_counts[node]} GPUs"
            )
    return {node: len(gpus) or gpu_counts[node] for node, gpus in parse_gpus(text).items()}


def describe_ranks(job: JobSpec, ranks: Sequence[Rank], *, gpus: int, on_ec2: int) -> str:
    """Return the number of ranks and the reason for it as text: "4 ranks: 2 nodes x 2 GPUs".

    `gpus` is the number of GPUs per node. `on_ec2` is the number of ranks that each node would run on EC2. If
    this number differs, the text for nodes without GPUs also has the total on EC2.
    """
    nodes, per_node = ranks[0].nnodes, ranks[0].local_world_size
    options = {f"job.{key}": getattr(job.job, key) for key in ("world_size", "nproc_per_node")}
    why = " ".join(f"{job.label(key)} {value}" for key, value in options.items() if value is not None)
    if not why:
        gpu_text = counted(per_node, "GPU") if gpus else f"{per_node}, without GPUs"
        why = f"{counted(nodes, 'node')} x {gpu_text}"
        if not gpus and on_ec2 not in (0, per_node):
            why += f"; on EC2 {nodes * on_ec2}, one per GPU"
    return f"{counted(len(ranks), 'rank')}: {why}"


def sort_for_torchrun(ranks: Sequence[Rank], addresses: Mapping[int, str]) -> tuple[Rank, ...]:
    """Return `ranks` renumbered in the order of torch's rendezvous, which sorts nodes by address.

    torch compares addresses as text, so 10.0.0.10 comes before 10.0.0.9 (dynamic_rendezvous.py, _NodeDesc).
    """
    nodes = sorted({rank.node for rank in ranks}, key=addresses.__getitem__)
    reordered = sorted(ranks, key=lambda rank: (nodes.index(rank.node), rank.local_rank))
    return tuple(
        replace(rank, rank=number, node_rank=nodes.index(rank.node)) for number, rank in enumerate(reordered)
    )


def _shape(
    available: int, default: int, world_size: int | None, ranks_per_node: int | None
) -> tuple[int, int]:
    """Return the number of nodes to use and the number of ranks per node. Raises UsageError."""
    if world_size is None:
        return available, default if ranks_per_node is None else ranks_per_node
    if ranks_per_node is None:
        count = min(available, world_size)
        if world_size % count:
            low = world_size - world_size % count
            raise UsageError(
                f"{world_size} ranks cannot be divided equally among {counted(count, 'node')}",
                "every node must run the same number of ranks",
                f"try: --world-size {low} or {low + count}",
            )
        return count, world_size // count
    if world_size % ranks_per_node or world_size > available * ranks_per_node:
        fits = [str(ranks_per_node * nodes) for nodes in range(1, available + 1)]
        raise UsageError(
            f"{world_size} ranks, {ranks_per_node} per node, do not fit {counted(available, 'node')}",
            f"with {ranks_per_node} per node, these world sizes fit: {', '.join(fits)}",
            f"try: --world-size {fits[-1]}, or omit --nproc-per-node",
        )
    return world_size // ranks_per_node, ranks_per_node


def rank_environment(rank: Rank, *, rendezvous: Rendezvous, folder: str) -> dict[str, str]:
    """Return a single rank's environment variables; `folder` is the job's folder on the node.

    The names and values are those that torchrun's workers have in torch 2.13
    (torch/distributed/elastic/agent/server/local_elastic_agent.py, _start_workers).
    """
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "GROUP_RANK": str(rank.node_rank),
        "GROUP_WORLD_SIZE": str(rank.nnodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank.rank),
        "ROLE_WORLD_SIZE": str(rank.world_size),
        "MASTER_ADDR": rendezvous.master_addr,
        "MASTER_PORT": str(rendezvous.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": rendezvous.job,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": f"{folder}/errors/rank{rank.rank}.json",
    }


def resolve_interpreter(spec: JobSpec, script: str, *, python: str) -> tuple[tuple[str, ...], str]:
    """Return the command that runs `script` on a node, and the prefix for the script's path ("./" or "").

    The command for a .py file is `python`; for other scripts, it depends on the "#!" line, the suffix .sh and
    the execute permission. The prefix "./" is needed because Python would read a path such as "-c.py" as an
    option. After `job.prefix`, Python is looked up on PATH, because a container has its own Python.
    """
    command: tuple[str, ...] = (posixpath.basename(python) if spec.job.prefix else python,)
    path = Path(spec.sync.workdir) / script
    if spec.job.module:
        return (*command, "-m"), ""
    if path.suffix != ".py" and path.is_file():
        with path.open("rb") as file:
            first_line = file.readline(256)
        if first_line.startswith(b"#!"):
            command = tuple(first_line[2:].decode("utf-8", "replace").strip().split(None, 1))
        elif path.suffix == ".sh":
            command = ("bash",)
        elif os.access(path, os.X_OK):
            command = ()
    is_python = bool(command) and posixpath.basename(command[0]) == posixpath.basename(python)
    return command, "" if is_python and not script.startswith("-") else "./"


def default_environment(local_world_size: int) -> dict[str, str]:
    """Return the variables that torchrun sets if they are not set in the node's environment."""
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **({"OMP_NUM_THREADS": "1"} if local_world_size > 1 else {}),
    }


def expand_placeholders(
    text: str,
    rank: Rank,
    *,
    rendezvous: Rendezvous,
    folder: str,
    resume: str | None = None,
    data: str | None = None,
) -> str:
    """Return `text` with the placeholders replaced for `rank`; a doubled brace is a literal brace.

    Raises UsageError for an unknown placeholder, for a single brace, for {resume} without a checkpoint, for
    {data} if there is not exactly one source, and for {init_file} on several nodes, because nodes share no
    file system.
    """
    environ = rank_environment(rank, rendezvous=rendezvous, folder=folder)
    parts = parse_template(text, nnodes=rank.nnodes, folder=folder, resume=resume, data=data)
    return "".join(environ[part] if number % 2 else part for number, part in enumerate(parts))


def fill_placeholders(text: str, rank: Rank, *, rendezvous: Rendezvous) -> str:
    """Return a node's command with its placeholders replaced; other braces belong to the shell."""
    environ = rank_environment(rank, rendezvous=rendezvous, folder="")
    return _SINGLE.sub(lambda match: environ[PLACEHOLDERS[match[1]]], text)


def parse_template(
    text: str, *, nnodes: int, folder: str, resume: str | None = None, data: str | None = None
) -> list[str]:
    """Return the literal parts of `text`, alternating with the variables that replace placeholders.

    Raises UsageError in the same cases as `expand_placeholders`.
    """
    parts, end = [""], 0
    for match in _BRACES.finditer(text):
        parts[-1] += text[end : match.start()]
        end = match.end()
        if match[0] in ("{{", "}}"):
            parts[-1] += match[0][0]
        elif match[1] not in PLACEHOLDERS:
            raise UsageError(
                f"invalid placeholder {match[0]} in {text!r}",
                f"placeholders are: {' '.join(f'{{{name}}}' for name in PLACEHOLDERS)}",
                "double a literal brace: {{ or }}",
            )
        elif match[1] == "init_file":
            if nnodes > 1:
                raise UsageError(
                    "{init_file} needs a single node",
                    "nodes share no file system",
                    "try: tcp://{master_addr}:{master_port}",
                )
            parts[-1] += f"{folder}/init"
        elif match[1] == "resume":
            if resume is None:
                raise UsageError("{resume} needs a checkpoint", "", "use --resume last, or --resume JOB")
            parts[-1] += resume
        elif match[1] == "data":
            if data is None:
                raise UsageError(
                    "{data} needs one source of data",
                    "of several, each lies at $AWSDDP_DATA/NAME",
                    "use --data SOURCE once   # docs/data.md",
                )
            parts[-1] += data
        else:
            parts += [PLACEHOLDERS[match[1]], ""]
    parts[-1] += text[end:]
    return parts
