"""The launcher `ssh`: the supervisor starts each rank as a process of its own."""

from collections.abc import Sequence

from awsddp.jobs.ranks import Host, Process, Rank, Rendezvous, environment, expand
from awsddp.spec import JobSpec


def processes(
    spec: JobSpec, ranks: Sequence[Rank], *, host: Host, rendezvous: Rendezvous
) -> tuple[Process, ...]:
    """Return one process per rank, with the environment that torchrun gives a worker."""
    return tuple(_process(spec, rank, host, rendezvous) for rank in ranks)


def _process(spec: JobSpec, rank: Rank, host: Host, rendezvous: Rendezvous) -> Process:
    folder = host.folder(rendezvous.job)
    script, *args = (
        expand(text, rank, rendezvous=rendezvous, folder=folder)
        for text in (spec.job.script or "", *spec.job.args)
    )
    file = f"./{script}" if script.startswith("-") else script  # python reads "-c.py" as an option
    return Process(
        ranks=(rank.rank,),
        argv=(host.prepared.ranks_python, *(("-m", script) if spec.job.module else (file,)), *args),
        environment=environment(
            rank,
            rendezvous=rendezvous,
            nic=host.prepared.nic,
            folder=folder,
            variables=spec.env.variables,
        ),
        log=f"rank{rank.rank}.log",
        script=None if spec.job.module else file,
    )
