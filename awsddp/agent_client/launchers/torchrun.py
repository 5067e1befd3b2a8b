"""The launcher `torchrun`: torch's elastic agent on each node starts, watches and restarts the ranks."""

import json
import math
from collections.abc import Sequence
from functools import partial

from awsddp.agent.messages import MAX_SHUTDOWN_GRACE, Process
from awsddp.agent_client.program import module_source
from awsddp.agent_client.rank_layout import Host, Rank, Rendezvous, parse_template, resolve_interpreter
from awsddp.settings.spec import JobSpec
from awsddp.settings.values import parse_duration

_JOIN_SECONDS = 600
_LAST_CALL_SECONDS = 30


def processes(
    spec: JobSpec, ranks: Sequence[Rank], *, host: Host, rendezvous: Rendezvous
) -> tuple[Process, ...]:
    """Return the process of torch's agent on `host`, which runs agent/torchrun_worker.py for each rank."""
    folder, first = host.folder(rendezvous.job), ranks[0]

    def templates(texts: Sequence[str]) -> list[list[str]]:
        parse = partial(
            parse_template, nnodes=first.nnodes, folder=folder, resume=host.resume, data=host.only_data
        )
        return [parse(text) for text in texts]

    script, *args = templates([spec.job.script or "", *spec.job.args])
    python = host.prepared.ranks_python
    interpreter_argv, path_prefix = resolve_interpreter(spec, "".join(script), python=python)
    script[0] = path_prefix + script[0]
    rank_argv = [*templates(spec.job.prefix), *([arg] for arg in interpreter_argv), script, *args]
    worker_json = (json.dumps(rank_argv), json.dumps(host.tracker_defaults(spec.job)))
    worker = ("-E", "-s", "-S", f"{folder}/worker.py", folder, str(first.rank), *worker_json)
    return (
        Process(
            ranks=tuple(rank.rank for rank in ranks),
            argv=(*_agent(spec, len(ranks), host, rendezvous, first.nnodes), python, *worker),
            environment={
                # A shared store outlives a rendezvous round and passes its keys to the next round. Restarts
                # on several nodes then hang, or use the addresses of ended ranks:
                # https://github.com/pytorch/pytorch/issues/135712
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                **host.environment(rendezvous.job, spec.env.variables),
                # Time between TERM and KILL for torch's workers. It is longer than their ranks' grace.
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(
                    math.ceil(max(parse_duration(spec.job.grace), MAX_SHUTDOWN_GRACE)) + 5
                ),
            },
            log=f"launcher{host.node.node}.log",
            script=script[0] if len(script) == 1 and not spec.job.module else None,
            files={"worker.py": module_source("torchrun_worker")},
        ),
    )


def _agent(spec: JobSpec, count: int, host: Host, rendezvous: Rendezvous, nodes: int) -> tuple[str, ...]:
    """Return the command for torch's agent, up to the program that the agent starts for each rank."""
    return (
        *(host.prepared.ranks_python, "-m", "torch.distributed.run"),
        *("--nnodes", f"{spec.job.min_nodes(nodes)}:{nodes}", "--nproc-per-node", str(count)),
        *("--rdzv-backend", "c10d", "--rdzv-id", rendezvous.job),
        *("--rdzv-endpoint", f"{rendezvous.master_addr}:{rendezvous.master_port}"),
        *("--rdzv-conf", _rendezvous_conf(spec, is_first=host.node.private_ip == rendezvous.master_addr)),
        *("--local-addr", str(host.node.private_ip), "--log-dir", f"{host.folder(rendezvous.job)}/agent"),
        *("--max-restarts", str(spec.job.max_restarts or 0), "--no-python"),
    )


def _rendezvous_conf(spec: JobSpec, *, is_first: bool) -> str:
    """Return the --rdzv-conf that makes torch give up a node after `job.heartbeat_timeout` instead of 15 s.

    https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
    """
    silent_s = int(parse_duration(spec.job.heartbeat_timeout))
    interval = 5 if silent_s >= 15 else 1
    conf = {
        "is_host": int(is_first),
        "join_timeout": _JOIN_SECONDS + silent_s,
        "last_call_timeout": min(_LAST_CALL_SECONDS, silent_s),
        "keep_alive_interval": interval,
        "keep_alive_max_attempt": math.ceil(silent_s / interval),
    }
    return ",".join(f"{key}={value}" for key, value in conf.items())
