"""report: a job as a page, from what is at home."""

from pathlib import Path
from typing import Any

from awsddp.errors import NotFoundError
from awsddp.verbs.context import Context
from awsddp.verbs.results import job_at_home, job_result, metrics, results_dir


def report(ctx: Context, *, job: str | None = None) -> dict[str, Any]:
    """Return a job (the newest by default) as the `train` document, with what lies at home of it.

    `files` are (path, bytes), `metrics` the last row that its program wrote down. Raises NotFoundError for a
    job that is neither at home nor remembered.
    """
    at_home = job_at_home(ctx, job)
    record = ctx.folder.read()
    remembered = [one for one in record.jobs if job in (None, one.job)] if record else []
    found = at_home or (remembered[-1] if remembered else None)
    if found is None:
        folder = results_dir(ctx, "x").parent
        raise NotFoundError(
            f"no job {job}" if job else "no job",
            f"searched {folder}/ and in the cluster's folder",
            "awsddp jobs",
        )
    place = results_dir(ctx, found.job)
    rows = metrics(place)
    files = [(str(path.relative_to(place)), path.stat().st_size) for path in sorted(_files(place))]
    return job_result(ctx, found) | {"files": files, "metrics": rows[-1] if rows else None}


def _files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else []
