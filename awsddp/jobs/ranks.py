"""The layout of a job: which rank runs where, with which environment and arguments. Pure."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from awsddp.cluster import Node, Prepared
from awsddp.errors import UsageError

CPU_RANKS_PER_NODE = 2
"""Ranks of a node without GPUs of its own (or with pretended ones), where nothing else is asked for."""

PLACEHOLDERS = (
    "rank",
    "local_rank",
    "world_size",
    "local_world_size",
    "node_rank",
    "nnodes",
    "master_addr",
    "master_port",
    "init_file",
)
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
    """A node of a job: its record, the facts that `prepare` found, and its synced folder (absolute)."""

    node: Node
    prepared: Prepared
    workdir: str

    def folder(self, job: str) -> str:
        """Return the job's folder on the node."""
        return posixpath.join(self.prepared.home, ".awsddp", "jobs", job)


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that the supervisor of a node starts in the synced folder.

    `ranks` end when it ends, each with its exit code (-N: signal N). `log` is the file in logs/ that receives
    its output: rank3.log where it is rank 3; else launcher0.log on node 0, and its ranks write their own
    rank3.log. `environment` is added to the node's. `script` must exist on the node (None: do not check).
    """

    ranks: tuple[int, ...]
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log: str
    script: str | None = None


def layout(
    nodes: Sequence[int],
    *,
    gpus: int,
    world_size: int | None = None,
    nproc_per_node: int | None = None,
) -> tuple[Rank, ...]:
    """Lay `world_size` ranks out over `nodes`, contiguous by node and equally many on each.

    `gpus` is how many each node's torch finds, rehearsed ones too; 0 (none, or pretended) sets no limit.
    Without a world size every node is used; one smaller than the cluster uses the first nodes. Raises
    UsageError, naming what fits.
    """
    count, each = _shape(len(nodes), gpus or CPU_RANKS_PER_NODE, world_size, nproc_per_node)
    if gpus and each > gpus:
        raise UsageError(
            f"{each} ranks per node do not fit: a node has {_many(gpus, 'GPU')}",
            "each rank drives a GPU of its own",
            f"try: --world-size {gpus * len(nodes)}, or more nodes",
        )
    return tuple(
        Rank(
            rank=node_rank * each + local_rank,
            local_rank=local_rank,
            node=node,
            node_rank=node_rank,
            world_size=count * each,
            local_world_size=each,
            nnodes=count,
        )
        for node_rank, node in enumerate(nodes[:count])
        for local_rank in range(each)
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


def environment(
    rank: Rank,
    *,
    rendezvous: Rendezvous,
    nic: str,
    folder: str,
    variables: Mapping[str, str],
) -> dict[str, str]:
    """Return what `rank` gets on top of its node's environment (and of `defaults`).

    The names and values are those that torchrun of torch 2.13 gives its workers
    (torch/distributed/elastic/agent/server/local_elastic_agent.py, _start_workers). `nic` carries the node's
    private address; `folder` is the job's folder on the node; `variables` are the user's own: they win over
    all but the rank's identity. NCCL takes `=nic` for that name alone, else for a prefix
    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname).
    """
    return {
        "NCCL_SOCKET_IFNAME": f"={nic}",
        "GLOO_SOCKET_IFNAME": nic,
        "TP_SOCKET_IFNAME": nic,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **variables,
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
        "AWSDDP_RUN_DIR": f"{folder}/run",
    }


def defaults(local_world_size: int) -> dict[str, str]:
    """Return what a rank gets where its node's environment does not say otherwise, as torchrun does."""
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **({"OMP_NUM_THREADS": "1"} if local_world_size > 1 else {}),
    }


def expand(text: str, rank: Rank, *, rendezvous: Rendezvous, folder: str) -> str:
    """Fill the placeholders of `text` in for `rank`; a doubled brace is a brace.

    Raises UsageError for an unknown placeholder, a lone brace, and {init_file} on several nodes, which share
    no file system.
    """
    values = {
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "world_size": rank.world_size,
        "local_world_size": rank.local_world_size,
        "node_rank": rank.node_rank,
        "nnodes": rank.nnodes,
        "master_addr": rendezvous.master_addr,
        "master_port": rendezvous.master_port,
        "init_file": f"{folder}/init",
    }

    def fill(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        name = match[1]
        if name not in values:
            raise _unknown(match[0], text)
        if name == "init_file" and rank.nnodes > 1:
            raise UsageError(
                "{init_file} needs a single node",
                "nodes share no file system",
                "try: tcp://{master_addr}:{master_port}",
            )
        return str(values[name])

    return _BRACES.sub(fill, text)


def _unknown(found: str, text: str) -> UsageError:
    return UsageError(
        f"invalid placeholder {found} in {text!r}",
        f"placeholders are: {' '.join(f'{{{name}}}' for name in PLACEHOLDERS)}",
        "double a literal brace: {{ or }}",
    )


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
