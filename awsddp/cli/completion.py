"""Completions besides verbs and options: read from this machine's files, AWS is not asked."""

import click
from click.shell_completion import CompletionItem


def clusters(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the clusters that this machine knows."""
    from awsddp.state import home

    names = sorted(path.parent.name for path in home().glob("clusters/*/cluster.json"))
    return [name for name in names if name.startswith(incomplete)]


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the jobs of the cluster, as last seen, the newest first."""
    from awsddp.cli.options import Globals
    from awsddp.state import Folder, home

    record = Folder(home(), ctx.ensure_object(Globals).name).read(newer=True)
    found = [job.job for job in reversed(record.jobs)] if record is not None else []
    return [job for job in found if job.startswith(incomplete)]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell itself offer files: scripts, requirements."""
    return [CompletionItem(incomplete, type="file")]


def instance_types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the instance types with GPUs that awsddp knows."""
    from awsddp.compat.types import GPU_TYPES

    return sorted(name for name in GPU_TYPES if name.startswith(incomplete))
