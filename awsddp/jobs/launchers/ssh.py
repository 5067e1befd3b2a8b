"""The launcher `ssh`: the supervisor starts each rank as a process of its own."""

from collections.abc import Sequence

from awsddp.jobs.ranks import Host, Process, Rank, Rendezvous, environment, expand, runner
from awsddp.spec import JobSpec


def processes(
    spec: JobSpec, ranks: Sequence[Rank], *, host: Host, rendezvous: Rendezvous
) -> tuple[Process, ...]:
    """Return one process per rank, with the environment that torchrun gives a worker."""
    return tuple(_process(spec, rank, host, rendezvous) for rank in ranks)


def _process(spec: JobSpec, rank: Rank, host: Host, rendezvous: Rendezvous) -> Process:
    folder = host.folder(rendezvous.job)
    script, *args = (
        expand(text, rank, rendezvous=rendezvous, folder=folder, resume=host.resume)
        for text in (spec.job.script or "", *spec.job.args)
    )
    before = ("-m",) if spec.job.module else runner(spec, script)
    is_word = not spec.job.module and (script.startswith("-") or before)
    file = f"./{script}" if is_word else script  # python reads "-c.py" as an option
    return Process(
        ranks=(rank.rank,),
        argv=(host.prepared.ranks_python, *before, file, *args),
        environment=environment(
            rank,
            rendezvous=rendezvous,
            nic=host.prepared.nic,
            folder=folder,
            variables=host.variables(spec.env.variables),
        ),
        log=f"rank{rank.rank}.log",
        script=None if spec.job.module else file,
    )
