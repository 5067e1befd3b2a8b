"""The launcher `ssh`: the supervisor starts each rank as a process of its own."""

from collections.abc import Sequence

from awsddp.jobs.ranks import Host, Process, Rank, Rendezvous, expand, identity, interpreter
from awsddp.spec import JobSpec


def processes(
    spec: JobSpec, ranks: Sequence[Rank], *, host: Host, rendezvous: Rendezvous
) -> tuple[Process, ...]:
    """Return one process per rank, with the environment that torchrun gives a worker."""
    return tuple(_process(spec, rank, host, rendezvous) for rank in ranks)


def _process(spec: JobSpec, rank: Rank, host: Host, rendezvous: Rendezvous) -> Process:
    folder = host.folder(rendezvous.job)

    def expanded(texts: Sequence[str]) -> list[str]:
        return [
            expand(text, rank, rendezvous=rendezvous, folder=folder, resume=host.resume) for text in texts
        ]

    script, *args = expanded([spec.job.script or "", *spec.job.args])
    before, begin = interpreter(spec, script, python=host.prepared.ranks_python)
    file = begin + script
    return Process(
        ranks=(rank.rank,),
        argv=(*expanded(spec.job.prefix), *before, file, *args),
        environment=host.environment(rendezvous.job, spec.env.variables)
        | identity(rank, rendezvous=rendezvous, folder=folder),
        log=f"rank{rank.rank}.log",
        script=None if spec.job.module else file,
    )
