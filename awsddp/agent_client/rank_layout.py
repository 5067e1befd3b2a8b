"""The layout of a job: which rank runs where, with which environment and arguments. Pure."""

import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from awsddp.errors import UsageError
from awsddp.model.records import Node, Prepared
from awsddp.plan.project import source_folders
from awsddp.settings.spec import JobSection, JobSpec
from awsddp.settings.values import data_sources, gpus_of
from awsddp.util.shipped_files import REMOTE_DIR

CPU_RANKS_PER_NODE = 2
"""Ranks of a node without GPUs of its own (or with pretended ones), where nothing else is asked for."""

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
"""Placeholders of a job, and the variable in a rank's environment that has the value ("": none has)."""
DATA = "awsddp/data"
"""The folder of the data on a node, in the home folder."""
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
"""What names of variables that hold a secret contain."""
_FILLED = "|".join(name for name, variable in PLACEHOLDERS.items() if variable)
_LONE = re.compile(rf"(?<![{{$])\{{({_FILLED})\}}(?!\}})")
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of a job. `node` is the number of its node in the cluster, `node_rank` in the job."""

    rank: int
    local_rank: int
    node: int
    node_rank: int
    world_size: int
    local_world_size: int
    nnodes: int


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a job meet, and under which name."""

    job: str
    master_addr: str
    master_port: int


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node of a job: its record, the facts that `prepare` found, and its synced folder (absolute).

    `gpus` are those that the job may use (none: all that there are), `resume` is where its checkpoint is,
    `sources` are the folders of the synced one that its packages are imported from, `data` the names of the
    data that it has.
    """

    node: Node
    prepared: Prepared
    workdir: str
    gpus: tuple[int, ...] = ()
    resume: str | None = None
    sources: tuple[str, ...] = ()
    data: tuple[str, ...] = ()

    @property
    def only_data(self) -> str | None:
        """The path of the data of the only source, None where there is not exactly one."""
        return posixpath.join(self.prepared.home, DATA, self.data[0]) if len(self.data) == 1 else None

    def environment(self, job: str, variables: Mapping[str, str]) -> dict[str, str]:
        """Return what all ranks of the job get alike on the node: the user's `variables`, which win over all
        but the run folder, the job's checkpoint and data, its part of the GPUs, and its packages on the
        PYTHONPATH, after the user's own.

        NCCL takes `=nic` for that name alone, else for a prefix
        (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname).
        """
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))} if self.gpus else {}
        sources = [posixpath.join(self.workdir, one) for one in self.sources]
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
        }

    def folder(self, job: str) -> str:
        """Return the job's folder on the node."""
        return posixpath.join(self.prepared.home, ".awsddp", "jobs", job)


def hosts_of(
    nodes: Iterable[Node],
    prepared: Mapping[int, Prepared],
    spec: JobSpec,
    *,
    folder: str,
    resume: str | None,
) -> list[Host]:
    """Return the nodes of a job as it finds them; `prepared` goes by their numbers.

    `folder` is the job's synced folder and `resume` its checkpoint, both below REMOTE_DIR.
    """
    sources = source_folders(Path(spec.sync.workdir))
    data = tuple(one.name for one in data_sources(spec.data.sources))

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


def layout(
    nodes: Sequence[int],
    *,
    gpus: int | Mapping[int, int],
    world_size: int | None = None,
    nproc_per_node: int | None = None,
) -> tuple[Rank, ...]:
    """Lay `world_size` ranks out over `nodes`, contiguous by node and equally many on each.

    `gpus` is how many the job may use on each node, rehearsed ones too; 0 (none, or pretended) sets no limit.
    Without a world size every node is used; one smaller than the cluster uses the first nodes. Raises
    UsageError, naming what fits.
    """
    limits = dict.fromkeys(nodes, gpus) if isinstance(gpus, int) else gpus
    least = min((limits[node] for node in nodes if limits[node]), default=CPU_RANKS_PER_NODE)
    count, each = _shape(len(nodes), least, world_size, nproc_per_node)
    used = nodes[:count]
    for limit in (limits[node] for node in used):
        if limit and each > limit:
            raise UsageError(
                f"{_many(each, 'rank')} per node do not fit: a node has {_many(limit, 'GPU')}",
                "each rank drives a GPU of its own",
                f"try: --world-size {sum(limits[node] for node in used)}, or more nodes",
            )
    places = [(node_rank, node, local) for node_rank, node in enumerate(used) for local in range(each)]
    return tuple(
        Rank(
            rank=rank,
            local_rank=local_rank,
            node=node,
            node_rank=node_rank,
            world_size=len(places),
            local_world_size=each,
            nnodes=count,
        )
        for rank, (node_rank, node, local_rank) in enumerate(places)
    )


def ranks_on(requested: JobSection, has: Mapping[int, int]) -> tuple[Rank, ...]:
    """Return the ranks of a job on nodes with so many GPUs each. Raises UsageError."""
    gpus = _chosen_gpus(requested.on, has)
    return layout(
        list(gpus)[: requested.max_nodes],
        gpus=gpus,
        world_size=requested.world_size,
        nproc_per_node=requested.nproc_per_node,
    )


def _chosen_gpus(text: str | None, has: Mapping[int, int]) -> Mapping[int, int]:
    """Return how many GPUs the job may use, by node, on the nodes that `job.on` names. Raises UsageError."""
    if text is None:
        return has
    for node, gpus in gpus_of(text).items():
        if node not in has:
            raise UsageError(f"--on {text}: there is no node{node}", f"nodes are: {', '.join(map(str, has))}")
        if gpus and gpus[-1] >= has[node]:
            raise UsageError(f"--on {text}: node{node} has no GPU {gpus[-1]}", f"it has {has[node]} GPUs")
    return {node: len(gpus) or has[node] for node, gpus in gpus_of(text).items()}


def ranks_text(job: JobSpec, ranks: Sequence[Rank], *, gpus: int, on_ec2: int) -> str:
    """Return how many ranks a job has, and why: "4 ranks: 2 nodes x 2 GPUs".

    A node has so many GPUs for ranks, and `on_ec2` so many: where that makes another number it is said.
    """
    nodes, each = ranks[0].nnodes, ranks[0].local_world_size
    given = {f"job.{key}": getattr(job.job, key) for key in ("world_size", "nproc_per_node")}
    why = " ".join(f"{job.label(key)} {value}" for key, value in given.items() if value is not None)
    if not why:
        why = f"{_many(nodes, 'node')} x {_many(each, 'GPU') if gpus else f'{each}, without GPUs'}"
        why += f"; on EC2 {nodes * on_ec2}, one per GPU" if not gpus and on_ec2 not in (0, each) else ""
    return f"{_many(len(ranks), 'rank')}: {why}"


def ordered(ranks: Sequence[Rank], addresses: Mapping[int, str]) -> tuple[Rank, ...]:
    """Return the layout `ranks` with its nodes in the order that torch's rendezvous has: by address.

    It compares them as text: 10.0.0.10 comes before 10.0.0.9 (dynamic_rendezvous.py, _NodeDesc).
    """
    nodes = sorted({rank.node for rank in ranks}, key=addresses.__getitem__)
    moved = sorted(ranks, key=lambda rank: (nodes.index(rank.node), rank.local_rank))
    return tuple(
        replace(rank, rank=number, node_rank=nodes.index(rank.node)) for number, rank in enumerate(moved)
    )


def _shape(available: int, default: int, world_size: int | None, each: int | None) -> tuple[int, int]:
    """Return how many nodes are used and how many ranks run on each. Raises UsageError."""
    if world_size is None:
        return available, default if each is None else each
    if each is None:
        count = min(available, world_size)
        if world_size % count:
            low = world_size - world_size % count
            raise UsageError(
                f"{world_size} ranks do not divide over {_many(count, 'node')}",
                "every node runs equally many",
                f"try: --world-size {low} or {low + count}",
            )
        return count, world_size // count
    if world_size % each or world_size > available * each:
        fits = [str(each * nodes) for nodes in range(1, available + 1)]
        raise UsageError(
            f"{world_size} ranks, {each} per node, do not fit {_many(available, 'node')}",
            f"with {each} per node, these world sizes fit: {', '.join(fits)}",
            f"try: --world-size {fits[-1]}, or omit --nproc-per-node",
        )
    return world_size // each, each


def identity(rank: Rank, *, rendezvous: Rendezvous, folder: str) -> dict[str, str]:
    """Return what `rank` gets on top of its node's environment; `folder` is the job's folder on the node.

    The names and values are those that torchrun of torch 2.13 gives its workers
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


def interpreter(spec: JobSpec, script: str, *, python: str) -> tuple[tuple[str, ...], str]:
    """Return what runs `script` on a node: `python`, or what its first line "#!", .sh or the x bit says; and
    what its name begins with there, "./" or nothing: Python reads "-c.py" as an option.

    Behind the words of `job.prefix` Python goes by its name alone, as the PATH finds it: a container has its
    own.
    """
    words: tuple[str, ...] = (posixpath.basename(python) if spec.job.prefix else python,)
    path = Path(spec.sync.workdir) / script
    if spec.job.module:
        return (*words, "-m"), ""
    if path.suffix != ".py" and path.is_file():
        with path.open("rb") as file:
            first = file.readline(256)
        if first.startswith(b"#!"):
            words = tuple(first[2:].decode("utf-8", "replace").strip().split(None, 1))
        elif path.suffix == ".sh":
            words = ("bash",)
        elif os.access(path, os.X_OK):
            words = ()
    is_python = bool(words) and posixpath.basename(words[0]) == posixpath.basename(python)
    return words, "" if is_python and not script.startswith("-") else "./"


def defaults(local_world_size: int) -> dict[str, str]:
    """Return what a rank gets where its node's environment does not say otherwise, as torchrun does."""
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **({"OMP_NUM_THREADS": "1"} if local_world_size > 1 else {}),
    }


def expand(
    text: str,
    rank: Rank,
    *,
    rendezvous: Rendezvous,
    folder: str,
    resume: str | None = None,
    data: str | None = None,
) -> str:
    """Fill the placeholders of `text` in for `rank`; a doubled brace is a brace.

    Raises UsageError for an unknown placeholder, a lone brace, {resume} without a checkpoint, {data} without
    its one source, and {init_file} on several nodes, which share no file system.
    """
    environ = identity(rank, rendezvous=rendezvous, folder=folder)
    parts = template(text, nnodes=rank.nnodes, folder=folder, resume=resume, data=data)
    return "".join(environ[part] if number % 2 else part for number, part in enumerate(parts))


def fill(text: str, rank: Rank, *, rendezvous: Rendezvous) -> str:
    """Fill the placeholders of a node's command in; every other brace is the shell's, and stays."""
    environ = identity(rank, rendezvous=rendezvous, folder="")
    return _LONE.sub(lambda found: environ[PLACEHOLDERS[found[1]]], text)


def template(
    text: str, *, nnodes: int, folder: str, resume: str | None = None, data: str | None = None
) -> list[str]:
    """Return `text` as its literal parts, and between each two of them the variable that has the value.

    Raises UsageError, as `expand`.
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


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
