"""The pages about clusters and jobs: print documents as text and tables."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from awsddp.cli.command_line import resume_command, with_global_options
from awsddp.cli.table import line, place_name, table
from awsddp.model.rank_columns import make_rank_columns
from awsddp.model.records import ACTIVE, Cause, JobRecord
from awsddp.model.recovery_text import describe_recoveries
from awsddp.model.saving_text import describe_saving
from awsddp.util.formatting import age, counted, duration, elapsed_seconds, money, node_name, size_text

if TYPE_CHECKING:
    from awsddp.model import documents


_BUDGET_WARNING = 0.8
_MAX_EXCLUDED_PATHS = 10
_MEASURES = (
    ("step", "step {}"),
    ("fraction", "{:.0%}"),
    ("steps_per_second", "{:.3g} steps/s"),
    ("loss", "loss {:.4g}"),
)


def cluster_page(cluster: "documents.ClusterDocument") -> None:
    """Show a cluster: its nodes, its jobs, its cost and its expiry."""
    if cluster.state == "absent":
        line(f"Cluster {cluster.cluster}: absent. Searched: {', '.join(cluster.looked) or 'nowhere'}.")
        if cluster.target == "aws":
            line(with_global_options("Every cluster in every region: awsddp status --all"))
        return
    line(f"Cluster {cluster.cluster}: {cluster.state}, {len(cluster.nodes)} x {_type_and_place(cluster)}")
    if nics := {node.nic for node in cluster.nodes if node.nic is not None}:
        counts = ", ".join(map(str, sorted({node.gpus for node in cluster.nodes if node.gpus is not None})))
        line(f"GPUs per node: {counts}; network interface: {', '.join(sorted(nics))}")
    has_idle = any(node.idle_left_s is not UNSET for node in cluster.nodes)
    table(
        ("node", "instance", "state", "public", "private", *["idle left"] * has_idle),
        [
            (node_name(node.node), node.instance_id, node.state, node.public_ip, node.private_ip)
            + ((_idle_left(cluster, node.idle_left_s),) if has_idle else ())
            for node in cluster.nodes
        ],
    )
    if cluster.jobs:
        rows = [(job.job, _state_and_age(job), _job_place(job), _progress(job)) for job in cluster.jobs]
        table(("job", "state", "results", "progress"), rows)
        line(*_upload_lines(cluster.jobs), *_hang_lines(cluster.jobs), *_recovery_lines(cluster.jobs))
    line(_cost(cluster))
    budget, cost = cluster.budget_usd, cluster.cost_usd
    if budget and cost is not None and cost >= _BUDGET_WARNING * budget:
        spent = f"{cost / budget:.0%} of the {money(budget)} budget is spent"
        line(f"Warning: {spent}; at 100 % the nodes are terminated.")


def _type_and_place(cluster: "documents.ClusterDocument | documents.CostedCluster") -> str:
    return f"{cluster.instance_type} in {place_name(cluster.target, cluster.region)}"


def _idle_left(cluster: "documents.ClusterDocument", seconds: "int | UnsetType | None") -> str:
    """Return the idle time that a node has left, or the configured idle time if the node did not answer."""
    return f"{cluster.idle}? (no answer)" if not isinstance(seconds, int) else duration(float(seconds))


def _progress(job: JobRecord) -> str:
    """Return a running job's progress, taken from the first rank that writes metrics."""
    if not job.progress:
        return ""
    measures = ((template, getattr(job.progress[0], name)) for name, template in _MEASURES)
    parts = [template.format(value) for template, value in measures if value is not None]
    return ", ".join(parts + [f"slowest: rank {job.slowest_rank}"] * (job.slowest_rank is not None))


def _state(job: "documents.SeenJob | documents.ListedJob") -> str:
    """Return a job's state, preceded by "seen" if the job may have ended since this machine last saw it."""
    return job.state if job.reported or job.state not in ACTIVE else f"seen {job.state}"


def _upload_lines(jobs: "Sequence[documents.SeenJob | documents.ListedJob]") -> list[str]:
    """Return the upload state of each job whose nodes have just reported that they are still uploading."""
    return [
        f"{job.job} saves to {job.save_to}/{job.job}: {describe_saving(job.saving)}"
        for job in jobs
        if job.reported and job.saving is not None and not job.saving.is_complete
    ]


def _recovery_lines(jobs: "Sequence[JobRecord]") -> list[str]:
    """Return a line for each job that a recovery started: why, from which checkpoint, and what was lost."""
    return [describe_recoveries(job)[-1] for job in jobs if job.recoveries]


def _hang_lines(jobs: "Sequence[documents.SeenJob | documents.ListedJob]") -> list[str]:
    """Return what the nodes found about each job that is silent and may hang."""
    return [f"{job.job}: {job.hang.text}" for job in jobs if job.reported and job.hang is not None]


def _state_and_age(job: "documents.SeenJob") -> str:
    """Return a job's state. For a job that was last seen running, the text includes how long ago that was."""
    has_age = _state(job) == "seen running" and job.last_seen
    return f"seen running {age(job.last_seen)} ago" if has_age else _state(job)


def _job_place(job: "documents.SeenJob") -> str:
    """Return the location of a job's results, without the last folder if that folder has the job's name."""
    if not job.fetched and job.saving is not None and job.saving.is_complete:
        return f"in {job.save_to}/"
    if not job.fetched:
        return _incomplete(job) or "on the nodes"
    folder, _, name = job.home.rpartition("/")
    return f"in {folder}/" if folder and name == job.job else job.home


def _incomplete(job: JobRecord) -> str:
    nodes = ", ".join(map(node_name, job.missing))
    return f"incomplete, missing {nodes}" if nodes else ""


def _cost(cluster: "documents.ClusterDocument") -> str:
    price = cluster.price_usd_per_hour
    if cluster.state == "stopped":
        from awsddp.compat.types import HOURS_PER_MONTH

        month = "" if price is None else f"{money(price * HOURS_PER_MONTH)} per month"
        cost = f"only the disks cost{', ' * bool(month)}{month}"
        if cluster.target == "local":
            cost = f"free, on this machine{f'; on EC2 its disks would cost {month}' * bool(month)}"
        return with_global_options(
            f"Stopped: {cost}. Start the nodes: awsddp up. Terminate them: awsddp down"
        )
    text = "Free, on this machine; on EC2 it would cost" if cluster.target == "local" else "Costs"
    text += f" {money(price)} per hour, {money(cluster.cost_usd)} so far"
    if cluster.expires:
        time_left = datetime.fromisoformat(cluster.expires) - datetime.now(UTC)
        text += f"; expires in {duration(max(0.0, time_left.total_seconds()))}"
        text += f", or after {cluster.idle} idle" if cluster.idle not in (None, "off") else ""
    return text + with_global_options(". Terminate now: awsddp down")


def clusters_page(clusters: "list[documents.FoundCluster]") -> None:
    """Show every cluster in the given order; an orphan has the state "orphan"."""
    if not clusters:
        line("No resource carries awsddp's tags in any searched region.")
        return
    rows = [
        (
            *(cluster.cluster, cluster.id, place_name(cluster.target, cluster.region)),
            "orphan" if cluster.orphan else cluster.state,
            *("you" if cluster.mine else cluster.owner, len(cluster.nodes), len(cluster.leftovers)),
            *(money(cluster.price_usd_per_hour), _minute(cluster.expires or "")),
        )
        for cluster in clusters
    ]
    table(("cluster", "id", "region", "state", "owner", "nodes", "others", "per hour", "expires, UTC"), rows)
    if any(cluster.orphan for cluster in clusters):
        line("Terminate the orphans: awsddp down --orphans")


def _minute(time: str) -> str:
    """Return a time without its seconds: 2026-11-21 08:45."""
    return time[:16].replace("T", " ")


def orphans_page(orphans: "documents.Orphans") -> None:
    """Show how many orphans were terminated."""
    line(f"{counted(len(orphans.clusters), 'orphan')} terminated. Searched: {', '.join(orphans.looked)}.")


def job_page(job: "documents.JobDocument", *, next_step: str = "", streamed: bool = False) -> None:
    """Show a job's result and, if the job has ended, `next_step`.

    For a failed job, the command that runs it again comes before `next_step`. `streamed` means that the
    terminal has just shown the ranks' output, so only the last line of the cause's output is repeated.
    """
    is_done = job.state not in ACTIVE and (job.fetched or job.state != "succeeded")
    steps = [*_rerun_steps(job), next_step] if next_step and is_done else []
    labels = ["  next: ", *["        "] * len(steps)]
    step_lines = [f"{label}{with_global_options(step)}" for label, step in zip(labels, steps, strict=False)]
    line(*job_lines(job, streamed=streamed), *step_lines, stderr=True)


def _rerun_steps(job: "documents.JobDocument") -> list[str]:
    """Return the command that runs a failed job again, or [] if the cause of the failure has a next step."""
    needs_rerun = job.state == "failed" and not (job.cause and job.cause.next)
    return [
        f"{with_global_options('awsddp train', job=job)}   # again, once the cause is removed"
    ] * needs_rerun


def _cause(cause: Cause | None) -> str:
    if cause is None:
        return ""
    who = "the job" if cause.node is None else node_name(cause.node)
    if cause.rank is not None:
        who = f"rank {cause.rank} @ {who}"
    return f"{who}: {cause.explanation}"


def job_lines(job: "documents.JobDocument", *, streamed: bool = False) -> list[str]:
    """Return the lines that show a job's result: duration, loss, cause, results, and next steps.

    If the ranks' output has already been `streamed`, at most its last line is repeated.
    """
    name, lines = job.job, [f"Job {job.job}: {job.state}"]
    if job.state in ACTIVE:
        follow, end = f"  follow it: awsddp logs -f {name}", f"  end it: awsddp cancel {name}"
        return [*lines, with_global_options(follow), with_global_options(end)]
    seconds = elapsed_seconds(job.started, job.ended) if job.ended else None
    facts = [] if seconds is None else [f"in {duration(seconds)}"]
    facts += [counted(len(job.ranks), "rank")] if job.ranks else []
    facts += [] if job.loss is None else [f"loss {job.loss:.4g}"]
    lines = [" ".join([*lines, ", ".join(facts)]).strip()]
    lines += [f"  {text}" for text in describe_recoveries(job)]
    if (cause := job.cause) and cause.kind != "cancelled":
        tail = [text for text in cause.tail[-1:] if text not in cause.explanation] if streamed else cause.tail
        lines += [f"  cause: {_cause(cause)}", *(f"  | {text}" for text in tail)]
        lines += [with_global_options(f"  next: {cause.next}")] if cause.next else []
    if job.accuracy is not None:
        lines.append(f"  accuracy on held-out data: {job.accuracy:.2%}{f', {job.data}' if job.data else ''}")
    lines.append(f"  results: {_results(job)}")
    if job.checkpoint:
        resume = f"; continue from it: {resume_command(job)}"
        lines.append(f"  checkpoint: {job.checkpoint}{resume * (job.state != 'succeeded')}")
    suggests_page = not hasattr(job, "page") and (job.fetched or job.missing)
    return [*lines, with_global_options(f"  page: awsddp report {name}")] if suggests_page else lines


def _results(job: "documents.JobDocument") -> str:
    fetch = with_global_options(f"awsddp fetch {job.job}")
    if job.fetched:
        return f"{job.home}/"
    if incomplete := _incomplete(job):
        return f"{job.home}/, {incomplete}: {fetch}"
    return f"on the nodes; fetch them: {fetch}"


def jobs_page(document: "documents.JobsDocument", *, verbose: bool = False, chosen: bool = False) -> None:
    """Show the jobs, one per line with the newest last, then the live clusters and the total cost.

    `verbose` adds each job's command and cause, and the terminated clusters. `chosen` means that the user
    named the jobs: only these are shown, with their arguments.
    """
    if document.jobs:
        second, last = ("arguments", "progress") if chosen else ("age", "progress, or cause")
        rows = [_job_row(job, chosen) for job in document.jobs]
        table(("job", "state", second, "time", "loss", "cost", last), rows, cut=not chosen)
        line(*_upload_lines(document.jobs), *_hang_lines(document.jobs), *_recovery_lines(document.jobs))
    else:
        line(with_global_options("No jobs yet. Start one: awsddp train"))
    for job in document.jobs if verbose else ():
        _job_details(job)
    clusters = () if chosen else document.clusters
    line(*(_bill(cluster) for cluster in clusters if verbose or not cluster.ended))
    if clusters:
        price = "list price of nodes and disks" if document.since else "list price"
        line(
            f"On AWS{_since(document.since)}: {money(document.total_usd)} ({price}). "
            f"Rehearsals (free) would have cost: {money(document.would_have_cost_usd)}."
        )


def _since(time: str | None) -> str:
    return f" since {_minute(time)} UTC, launched from this machine, without S3" if time else ""


def _job_row(job: "documents.ListedJob", chosen: bool) -> tuple[object, ...]:
    seconds = "" if job.seconds is None else duration(job.seconds)
    cost = "" if job.job_usd is None else money(job.job_usd)
    loss = "" if job.loss is None else f"{job.loss:.4g}"
    step = "" if job.step is None else f"step {job.step}"
    last = step if job.fraction is None else f"{job.fraction:.0%}"
    if job.cause is not None and job.cause.kind != "cancelled" and not chosen:
        last = job.cause.explanation
    second = shlex.join(job.args) if chosen else age(job.started)
    return job.job, _state(job), second, seconds, loss, cost, last


def _bill(cluster: "documents.CostedCluster") -> str:
    """Return a line with a cluster's type, lifetime and cost."""
    idle = "" if cluster.idle_usd is None else f", {money(cluster.idle_usd)} of it while idle"
    return (
        f"Cluster {cluster.cluster}, {cluster.nodes} x {_type_and_place(cluster)}, "
        f"{_minute(cluster.began)} to {_minute(cluster.ended or 'now')}: "
        f"{money(cluster.cost_usd)}{idle}{' (not billed)' * (cluster.target == 'local')}"
    )


def _job_details(job: "documents.ListedJob") -> None:
    commit = "unknown commit" if job.commit is None else f"commit {job.commit[:12]}"
    price = "" if job.price_usd_per_hour is None else f", {money(job.price_usd_per_hour)} per hour"
    line(
        f"{job.job}: {shlex.join([job.script or '?', *job.args])}; "
        f"{commit}{' with changes' * bool(job.dirty)}; {job.launcher}, {job.world_size} ranks on "
        f"{len(job.nodes)} x {job.instance_type}{price}; {job.started} to {job.ended or 'now'}"
        f"{f'; cluster {job.cluster}' * bool(job.cluster)}"
    )
    line(*[f"  cause: {_cause(job.cause)}"] * bool(job.cause))
    ranks_table(job)


def ranks_table(job: "JobRecord") -> None:
    """Show the metrics and usage of each rank that has any.

    A star marks usage that differs from the other ranks' usage.
    """
    columns = list(make_rank_columns(job.progress, job.usage))
    ranks = sorted({rank for column in columns for rank in column.values})
    rows = [
        ["slowest" if rank == job.slowest_rank else "", rank]
        + [column.shown.get(rank, "") for column in columns]
        for rank in ranks
    ]
    if rows:
        table(("", "rank", *(column.heading for column in columns)), rows)


def report_page(report: "documents.JobReport") -> None:
    """Show a job's result, its cost, and where its HTML page is."""
    line(*job_lines(report))
    if report.job_usd is not None:
        line(f"  {_cost_text(report.target, report.job_usd)}")
    line(f"page: {report.page}")


def _cost_text(target: str | None, usd: float | None) -> str:
    return f"{'Free; on EC2' if target == 'local' else 'Cost:'} {money(usd)}"


def fetch_page(document: "documents.FetchDocument") -> None:
    """Show how many files and bytes were fetched from each node, and the results folder."""
    _files_table(document.nodes)
    line(f"Results: {document.home}/")


def _files_table(nodes: Sequence["documents.NodeFiles"]) -> None:
    rows = [(node_name(node.node), node.files, f"{node.bytes:,}") for node in nodes]
    table(("node", "files", "bytes"), rows)


def sync_page(document: "documents.SyncDocument", *, verbose: bool = False) -> None:
    """Show how many files and bytes each node got and, if `verbose`, the largest and the excluded files."""
    _files_table(document.nodes)
    if not verbose:
        return
    if document.largest:
        line(f"Largest: {', '.join(f'{file.path} {size_text(file.bytes)}' for file in document.largest)}")
    for excluded in document.kept:
        more = len(excluded.paths) - _MAX_EXCLUDED_PATHS
        paths = ", ".join(excluded.paths[:_MAX_EXCLUDED_PATHS])
        line(f"Not sent, excluded by {excluded.by}: {paths}{f' and {more:,} more' * (more > 0)}")


def down_page(document: "documents.DownDocument") -> None:
    """Show what was terminated, and the cost."""
    if not document.terminated and not document.removed:
        searched = ", ".join(document.looked) or "nowhere"
        line(f"Cluster {document.cluster}: nothing to terminate. Searched: {searched}.")
        return
    instances = counted(len(document.terminated), "instance")
    line(
        f"Cluster {document.cluster}: {instances} terminated, nothing is left. "
        f"{_cost_text(document.target, document.cost_usd)} (list price)."
    )


def run_page(result: "documents.RunDocument", *, detached: bool = False) -> None:
    """Show the whole run: the job's result, the time that each stage took, what was terminated, and the cost.

    `detached` means that the job still runs: the page then shows when its nodes end.
    """
    if result.train:
        rerun = [f"  next: {step}" for step in _rerun_steps(result.train)]
        line(*job_lines(result.train, streamed=not detached), *rerun)
    line(", ".join(f"{stage} took {duration(seconds)}" for stage, seconds in result.seconds.items()))
    if result.down:
        down_page(result.down)
    elif detached and result.up:
        job, outcome = result.train, "stopped while they hold results, else terminated"
        if job and job.save_to:
            outcome = f"stopped, spot terminated. Nothing is lost: the results go to {job.save_to}/{job.job}"
        line(
            f"The nodes end {result.up.idle} after the job, at {result.up.expires} at the latest: {outcome}."
        )
        line(
            with_global_options(
                "Fetch the results and terminate the nodes: awsddp fetch. Terminate now: awsddp down"
            )
        )
