"""The pages of clusters and jobs: text and tables on stdout."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from awsddp.cli.command_line import named, resuming
from awsddp.cli.table import line, place_name, table
from awsddp.model.rank_columns import rank_columns
from awsddp.model.records import ACTIVE, Cause, JobRecord
from awsddp.model.saving_text import saving_text
from awsddp.util.format import age, counted, duration, elapsed, money, node_name, size_text

if TYPE_CHECKING:
    from awsddp.model import documents


_BUDGET_WARNING = 0.8
_MOST_KEPT = 10
_MEASURES = (
    ("step", "step {}"),
    ("fraction", "{:.0%}"),
    ("steps_per_second", "{:.3g} steps/s"),
    ("loss", "loss {:.4g}"),
)


def cluster_page(cluster: "documents.ClusterDocument") -> None:
    """Show a cluster: its nodes, its jobs, what it costs and until when."""
    if cluster.state == "absent":
        line(f"Cluster {cluster.cluster}: absent. Searched: {', '.join(cluster.looked) or 'nowhere'}.")
        if cluster.target == "aws":
            line(named("Every cluster in every region: awsddp status --all"))
        return
    line(f"Cluster {cluster.cluster}: {cluster.state}, {len(cluster.nodes)} x {_machines(cluster)}")
    if nics := {node.nic for node in cluster.nodes if node.nic is not None}:
        counts = ", ".join(map(str, sorted({node.gpus for node in cluster.nodes if node.gpus is not None})))
        line(f"GPUs per node: {counts}; network interface: {', '.join(sorted(nics))}")
    asked = any(node.idle_left_s is not UNSET for node in cluster.nodes)
    table(
        ("node", "instance", "state", "public", "private", *["idle left"] * asked),
        [
            (node_name(node.node), node.instance_id, node.state, node.public_ip, node.private_ip)
            + ((_idle_left(cluster, node.idle_left_s),) if asked else ())
            for node in cluster.nodes
        ],
    )
    if cluster.jobs:
        rows = [(job.job, _seen(job), _job_place(job), _progress(job)) for job in cluster.jobs]
        table(("job", "state", "results", "progress"), rows)
        line(*_saving(cluster.jobs))
    line(_cost(cluster))
    budget, cost = cluster.budget_usd, cluster.cost_usd
    if budget and cost is not None and cost >= _BUDGET_WARNING * budget:
        line(f"Warning: {cost / budget:.0%} of the {money(budget)} budget is spent; at 100 % the nodes end.")


def _machines(cluster: "documents.ClusterDocument | documents.CostedCluster") -> str:
    return f"{cluster.instance_type} in {place_name(cluster.target, cluster.region)}"


def _idle_left(cluster: "documents.ClusterDocument", seconds: "int | UnsetType | None") -> str:
    """Return the idle time that a node has left; one that did not answer has the configured time at most."""
    return f"{cluster.idle}? (no answer)" if not isinstance(seconds, int) else duration(float(seconds))


def _progress(job: JobRecord) -> str:
    """Return how far a job that runs is, by the metrics of its first rank that writes them."""
    if not job.progress:
        return ""
    measures = ((form, getattr(job.progress[0], name)) for name, form in _MEASURES)
    parts = [form.format(value) for form, value in measures if value is not None]
    return ", ".join(parts + [f"slowest: rank {job.slowest_rank}"] * (job.slowest_rank is not None))


def _state(job: "documents.SeenJob | documents.ListedJob") -> str:
    """Return a job's state: as last seen, unless its nodes have just told it or it has ended."""
    return job.state if job.reported or job.state not in ACTIVE else f"seen {job.state}"


def _saving(jobs: "Sequence[documents.SeenJob | documents.ListedJob]") -> list[str]:
    """Return how far the results of jobs are in S3, of those whose nodes have just said so and go on."""
    return [
        f"{job.job} saves to {job.save_to}/{job.job}: {saving_text(job.saving)}"
        for job in jobs
        if job.reported and job.saving is not None and not job.saving.is_whole
    ]


def _seen(job: "documents.SeenJob") -> str:
    """Return a job's state, and for one that runs how long ago it was seen to."""
    is_seen = _state(job) == "seen running" and job.last_seen
    return f"seen running {age(job.last_seen)} ago" if is_seen else _state(job)


def _job_place(job: "documents.SeenJob") -> str:
    """Return where a job's results are; a folder that has the job's name is not repeated."""
    if not job.fetched and job.saving is not None and job.saving.is_whole:
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
        return named(f"Stopped: {cost}. Start the nodes: awsddp up. Terminate them: awsddp down")
    text = "Free, on this machine; on EC2 it would cost" if cluster.target == "local" else "Costs"
    text += f" {money(price)} per hour, {money(cluster.cost_usd)} so far"
    if cluster.expires:
        left = datetime.fromisoformat(cluster.expires) - datetime.now(UTC)
        text += f"; expires in {duration(max(0.0, left.total_seconds()))}"
        text += f", or after {cluster.idle} idle" if cluster.idle not in (None, "off") else ""
    return text + named(". Terminate now: awsddp down")


def all_page(found: "list[documents.FoundCluster]") -> None:
    """Show every cluster, ours first; orphans are named as such."""
    if not found:
        line("No resource carries awsddp's tags in any searched region.")
        return
    rows = [
        (
            *(one.cluster, one.id, place_name(one.target, one.region), "orphan" if one.orphan else one.state),
            *("you" if one.mine else one.owner, len(one.nodes), len(one.leftovers)),
            *(money(one.price_usd_per_hour), _minute(one.expires or "")),
        )
        for one in found
    ]
    table(("cluster", "id", "region", "state", "owner", "nodes", "others", "per hour", "expires, UTC"), rows)
    if any(one.orphan for one in found):
        line("Terminate the orphans: awsddp down --orphans")


def _minute(moment: str) -> str:
    return moment[:16].replace("T", " ")


def orphans_page(ended: "documents.Orphans") -> None:
    """Show how many orphans were ended."""
    line(f"{counted(len(ended.clusters), 'orphan')} terminated. Searched: {', '.join(ended.looked)}.")


def job_page(job: "documents.JobDocument", *, next: str = "", streamed: bool = False) -> None:
    """Show a job's end, and what to type `next`; where the job failed, first what runs it again.

    `streamed`: the terminal has just shown what its ranks wrote, and of the cause's lines the last is enough.
    """
    steps = [next] if next and job.state not in ACTIVE and (job.fetched or job.state != "succeeded") else []
    steps = [*_again(job), *steps] if steps else []
    labels = ["  next: ", *["        "] * len(steps)]
    ends = [f"{label}{named(step)}" for label, step in zip(labels, steps, strict=False)]
    line(*job_lines(job, streamed=streamed), *ends, stderr=True)


def _again(job: "documents.JobDocument") -> list[str]:
    """Return what runs a job again that failed for a reason of its own, for which no other step is known."""
    is_plain = job.state == "failed" and not (job.cause and job.cause.next)
    return [f"{named('awsddp train', job=job)}   # again, once the cause is removed"] * is_plain


def _cause(cause: Cause | None) -> str:
    if cause is None:
        return ""
    who = "the job" if cause.node is None else node_name(cause.node)
    if cause.rank is not None:
        who = f"rank {cause.rank} @ {who}"
    return f"{who}: {cause.explanation}"


def job_lines(job: "documents.JobDocument", *, streamed: bool = False) -> list[str]:
    """Return the lines on a job's end: what it reached, its cause, its results, and what to type next.

    Of a cause that was `streamed` already at most the last line is repeated.
    """
    name, lines = job.job, [f"Job {job.job}: {job.state}"]
    if job.state in ACTIVE:
        follow, end = f"  follow it: awsddp logs -f {name}", f"  end it: awsddp cancel {name}"
        return [*lines, named(follow), named(end)]
    took = elapsed(job.started, job.ended) if job.ended else None
    facts = [] if took is None else [f"in {duration(took)}"]
    facts += [counted(len(job.ranks), "rank")] if job.ranks else []
    facts += [] if job.loss is None else [f"loss {job.loss:.4g}"]
    lines = [" ".join([*lines, ", ".join(facts)]).strip()]
    if (cause := job.cause) and cause.kind != "cancelled":
        tail = [one for one in cause.tail[-1:] if one not in cause.explanation] if streamed else cause.tail
        lines += [f"  cause: {_cause(cause)}", *(f"  | {text}" for text in tail)]
        lines += [named(f"  next: {cause.next}")] if cause.next else []
    if job.accuracy is not None:
        lines.append(f"  accuracy on held-out data: {job.accuracy:.2%}{f', {job.data}' if job.data else ''}")
    lines.append(f"  results: {_results(job)}")
    if job.checkpoint:
        again = f"; continue from it: {resuming(job)}"
        lines.append(f"  checkpoint: {job.checkpoint}{again * (job.state != 'succeeded')}")
    shown = hasattr(job, "page") or not (job.fetched or job.missing)
    return lines if shown else [*lines, named(f"  page: awsddp report {name}")]


def _results(job: "documents.JobDocument") -> str:
    fetch = named(f"awsddp fetch {job.job}")
    if job.fetched:
        return f"{job.home}/"
    if part := _incomplete(job):
        return f"{job.home}/, {part}: {fetch}"
    return f"on the nodes; fetch them: {fetch}"


def jobs_page(found: "documents.JobsDocument", *, verbose: bool = False, chosen: bool = False) -> None:
    """Show the jobs, the newest last, a line each, then the clusters that live and all costs.

    `verbose`: also what each job ran, its cause, and clusters that have ended. Jobs that were `chosen` are
    shown alone, with their arguments.
    """
    if found.jobs:
        second, last = ("arguments", "progress") if chosen else ("age", "progress, or cause")
        rows = [_job_row(job, chosen) for job in found.jobs]
        table(("job", "state", second, "time", "loss", "cost", last), rows, cut=not chosen)
        line(*_saving(found.jobs))
    else:
        line(named("No jobs yet. Start one: awsddp train"))
    for job in found.jobs if verbose else ():
        _job_details(job)
    clusters = () if chosen else found.clusters
    line(*(_bill(cluster) for cluster in clusters if verbose or not cluster.ended))
    if clusters:
        covers = "list price of nodes and disks" if found.since else "list price"
        line(
            f"On AWS{_since(found.since)}: {money(found.total_usd)} ({covers}). "
            f"Rehearsals (free) would have cost: {money(found.would_have_cost_usd)}."
        )


def _since(moment: str | None) -> str:
    return f" since {_minute(moment)} UTC, launched from here, without S3" if moment else ""


def _job_row(job: "documents.ListedJob", chosen: bool) -> tuple[object, ...]:
    took = "" if job.seconds is None else duration(job.seconds)
    cost = "" if job.job_usd is None else money(job.job_usd)
    loss = "" if job.loss is None else f"{job.loss:.4g}"
    at = "" if job.step is None else f"step {job.step}"
    last = at if job.fraction is None else f"{job.fraction:.0%}"
    if job.cause is not None and job.cause.kind != "cancelled" and not chosen:
        last = job.cause.explanation
    second = shlex.join(job.args) if chosen else age(job.started)
    return job.job, _state(job), second, took, loss, cost, last


def _bill(cluster: "documents.CostedCluster") -> str:
    """Return what a cluster was, and what it cost, with and without jobs."""
    idle = "" if cluster.idle_usd is None else f", {money(cluster.idle_usd)} of it while idle"
    return (
        f"Cluster {cluster.cluster}, {cluster.nodes} x {_machines(cluster)}, "
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
    """Show metrics and usage of each rank that has some; usage far from that of the others has a star."""
    columns = list(rank_columns(job.progress, job.usage))
    rows = [
        ["slowest" if rank == job.slowest_rank else "", rank, *(one.shown.get(rank, "") for one in columns)]
        for rank in sorted({rank for column in columns for rank in column.values})
    ]
    if rows:
        table(("", "rank", *(one.heading for one in columns)), rows)


def report_page(report: "documents.JobReport") -> None:
    """Show a job's end, its cost, and where its page is."""
    line(*job_lines(report))
    if report.job_usd is not None:
        line(f"  {_spent(report.target, report.job_usd)}")
    line(f"page: {report.page}")


def _spent(target: str | None, usd: float | None) -> str:
    return f"{'Free; on EC2' if target == 'local' else 'Cost:'} {money(usd)}"


def fetch_page(fetched: "documents.FetchDocument") -> None:
    """Show the files and bytes fetched per node, and where they are."""
    _files(fetched.nodes)
    line(f"Results: {fetched.home}/")


def _files(nodes: Sequence["documents.NodeFiles"]) -> None:
    table(("node", "files", "bytes"), [(node_name(one.node), one.files, f"{one.bytes:,}") for one in nodes])


def sync_page(sent: "documents.SyncDocument", *, verbose: bool = False) -> None:
    """Show the files and bytes sent per node; `verbose`: the largest, and what is not sent."""
    _files(sent.nodes)
    if not verbose:
        return
    if sent.largest:
        line(f"Largest: {', '.join(f'{one.path} {size_text(one.bytes)}' for one in sent.largest)}")
    for kept in sent.kept:
        more = len(kept.paths) - _MOST_KEPT
        paths = ", ".join(kept.paths[:_MOST_KEPT]) + (f" and {more:,} more" if more > 0 else "")
        line(f"Not sent, excluded by {kept.by}: {paths}")


def down_page(ended: "documents.DownDocument") -> None:
    """Show what was terminated, and that nothing is left."""
    if not ended.terminated and not ended.removed:
        looked = ", ".join(ended.looked) or "nowhere"
        line(f"Cluster {ended.cluster}: nothing to terminate. Searched: {looked}.")
        return
    instances = counted(len(ended.terminated), "instance")
    line(
        f"Cluster {ended.cluster}: {instances} terminated, nothing is left. "
        f"{_spent(ended.target, ended.cost_usd)} (list price)."
    )


def run_page(result: "documents.RunDocument", *, detached: bool = False) -> None:
    """Show the whole run: accuracy, the time of each stage, what it cost, and that nothing is left.

    Of one that is `detached`, and runs: when its nodes end.
    """
    if result.train:
        again = [f"  next: {step}" for step in _again(result.train)]
        line(*job_lines(result.train, streamed=not detached), *again)
    line(", ".join(f"{stage} took {duration(seconds)}" for stage, seconds in result.seconds.items()))
    if result.down:
        down_page(result.down)
    elif detached and result.up:
        job, held = result.train, "stopped while they hold results, else terminated"
        if job and job.save_to:
            held = f"stopped, spot terminated. Nothing is lost: the results go to {job.save_to}/{job.job}"
        line(f"The nodes end {result.up.idle} after the job, at {result.up.expires} at the latest: {held}.")
        line(named("Fetch the results and terminate the nodes: awsddp fetch. Terminate now: awsddp down"))
