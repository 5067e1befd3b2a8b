"""The launcher `ssh`: the agent starts each rank as a separate process."""

from collections.abc import Sequence

from awsddp.agent.messages import Process
from awsddp.agent_client.rank_layout import (
    Host,
    Rank,
    Rendezvous,
    expand_placeholders,
    rank_environment,
    resolve_interpreter,
)
from awsddp.settings.spec import JobSpec


def processes(
    spec: JobSpec, ranks: Sequence[Rank], *, host: Host, rendezvous: Rendezvous
) -> tuple[Process, ...]:
    """Return one process per rank, with the environment of a torchrun worker."""
    folder = host.folder(rendezvous.job)
    texts = (spec.job.script or "", *spec.job.args, *spec.job.prefix)

    def process(rank: Rank) -> Process:
        script, *expanded = (
            expand_placeholders(
                text, rank, rendezvous=rendezvous, folder=folder, resume=host.resume, data=host.only_data
            )
            for text in texts
        )
        args, prefix = expanded[: len(spec.job.args)], expanded[len(spec.job.args) :]
        command, path_prefix = resolve_interpreter(spec, script, python=host.prepared.ranks_python)
        file = path_prefix + script
        return Process(
            ranks=(rank.rank,),
            argv=(*prefix, *command, file, *args),
            environment=host.environment(rendezvous.job, spec.env.variables)
            | rank_environment(rank, rendezvous=rendezvous, folder=folder),
            log=f"rank{rank.rank}.log",
            script=None if spec.job.module else file,
            defaults=host.tracker_defaults(spec.job) if rank.rank == 0 else {},
        )

    return tuple(map(process, ranks))
