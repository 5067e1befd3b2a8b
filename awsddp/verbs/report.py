"""report: a job as a page, from what is at home; and money, over every cluster that this machine made."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from awsddp import report as facts
from awsddp.errors import NotFoundError
from awsddp.verbs.context import Context
from awsddp.verbs.results import job_at_home, job_result, metrics, place_of


def report(ctx: Context, *, job: str | None = None) -> dict[str, Any]:
    """Return a job (the newest by default) as design.md's `train` document, with what lies at home of it.

    `files` are (path, bytes), `metrics` the last row that its program wrote down. Raises NotFoundError for a
    job that is neither at home nor remembered.
    """
    at_home = job_at_home(ctx, job)
    record = ctx.folder.read()
    remembered = [one for one in record.jobs if job in (None, one.job)] if record else []
    found = at_home or (remembered[-1] if remembered else None)
    if found is None:
        folder = place_of(ctx, "x").parent
        raise NotFoundError(
            f"no job {job}" if job else "no job",
            f"looked in {folder}/ and in the cluster's folder",
            "awsddp jobs",
        )
    place = place_of(ctx, found.job)
    rows = metrics(place)
    files = [(str(path.relative_to(place)), path.stat().st_size) for path in sorted(_files(place))]
    return job_result(ctx, found) | {"files": files, "metrics": rows[-1] if rows else None}


def costs(ctx: Context) -> dict[str, Any]:
    """Return what each cluster of this machine cost by the list price, and their total on AWS.

    Clusters of the local cloud cost nothing; what they would have cost on EC2 is a total of its own.
    """
    now = datetime.now(UTC)
    bills = []
    for folder in (*ctx.home.glob("history/*"), *ctx.home.glob("clusters/*")):
        ledger = folder / "ledger.jsonl"
        if ledger.is_file():
            rows = facts.json_lines(ledger.read_text(encoding="utf-8", errors="replace"))
            bill = facts.ledger_bill([row for row in rows if "time" in row], now)
            if bill is not None:
                name = folder.name[:-9] if folder.parent.name == "history" else folder.name
                bills.append({"cluster": name, **bill})
    bills.sort(key=lambda bill: bill["from"])
    return {
        "clusters": bills,
        "total_usd": _total(bills, "aws"),
        "would_have_cost_usd": _total(bills, "local"),
    }


def _total(bills: list[dict[str, Any]], target: str) -> float:
    return round(sum(bill["cost_usd"] or 0.0 for bill in bills if bill["target"] == target), 2)


def _files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else []
