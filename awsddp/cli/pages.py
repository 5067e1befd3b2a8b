"""The page of each verb's result: text and tables on stdout."""

import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from awsddp.cli.advice import named
from awsddp.cli.render import line, table
from awsddp.records import ACTIVE, JobRecord
from awsddp.report import duration, money, node_name, rank_columns, size_text

if TYPE_CHECKING:
    from awsddp.verbs.run import RunResult


_BUDGET_WARNING = 0.8
_FRESH_S = 15.0
"""How old what a node said of a job may be, if the command that shows it has asked the node."""
_MOST_KEPT = 10
_MEASURES = (
    ("step", "step {}"),
    ("fraction", "{:.0%}"),
    ("steps_per_second", "{:.3g} steps/s"),
    ("loss", "loss {:.4g}"),
)


def cluster_page(result: dict[str, Any]) -> None:
    """Show a cluster: its nodes, its jobs, what it costs and until when."""
    name, state = result["cluster"], result["state"]
    if state == "absent":
        line(f"Cluster {name}: absent. Searched: {', '.join(result['looked']) or 'nowhere'}.")
        if result["target"] == "aws":
            line(named("Every cluster in every region: awsddp status --all"))
        return
    where = "the local cloud" if result["target"] == "local" else result["region"]
    line(f"Cluster {name}: {state}, {len(result['nodes'])} x {result['instance_type']} in {where}")
    gpus, nics = ({node[key] for node in result["nodes"]} - {None} for key in ("gpus", "nic"))
    if nics:
        counts = ", ".join(map(str, sorted(gpus)))
        line(f"GPUs per node: {counts}; network interface: {', '.join(sorted(nics))}")
    asked = any("idle_left_s" in node for node in result["nodes"])
    table(
        ("node", "instance", "state", "public", "private", *(["idle left"] if asked else [])),
        [
            [f"node{node['node']}"]
            + [node[key] for key in ("instance_id", "state", "public_ip", "private_ip")]
            + ([_idle_left(result, node["idle_left_s"])] if asked else [])
            for node in result["nodes"]
        ],
    )
    if result["jobs"]:
        table(
            ("job", "state", "results", "progress"),
            [(job["job"], _seen(job), _place(job), _progress(job)) for job in result["jobs"]],
        )
    line(_cost(result))
    if warning := _warning(result["budget_usd"], result["cost_usd"]):
        line(warning)


def _idle_left(result: dict[str, Any], seconds: int | None) -> str:
    """Return the idle time that a node has left; one that did not answer has the configured time at most."""
    return f"{result['idle']}? (no answer)" if seconds is None else duration(float(seconds))


def _progress(job: dict[str, Any]) -> str:
    """Return how far a job that runs is, by the metrics of its first rank that writes them."""
    if not job["progress"]:
        return ""
    first, slowest = job["progress"][0], job["slowest_rank"]
    parts = [text for key, form in _MEASURES if first[key] is not None and (text := form.format(first[key]))]
    return ", ".join([*parts, *([f"slowest: rank {slowest}"] if slowest is not None else [])])


def _seen(job: dict[str, Any]) -> str:
    """Return a job's state; "running" is as of the last contact with a node, which may be this command's."""
    if job["state"] != "running":
        return str(job["state"])
    seen = datetime.fromisoformat(job["last_seen"]).astimezone() if job["last_seen"] else None
    if seen is None:
        return "last seen running"
    if (datetime.now(UTC) - seen).total_seconds() < _FRESH_S:
        return "running"
    today = seen.date() == datetime.now().date()
    return f"last seen running at {seen:%H:%M}" if today else f"last seen running on {seen:%Y-%m-%d at %H:%M}"


def _place(job: dict[str, Any]) -> str:
    """Return where a job's results are; a folder that has the job's name is not repeated."""
    if not job["fetched"]:
        return _incomplete(job) or "on the nodes"
    folder, _, name = str(job["home"]).rpartition("/")
    return f"in {folder}/" if folder and name == job["job"] else str(job["home"])


def _incomplete(job: dict[str, Any]) -> str:
    nodes = ", ".join(map(node_name, job["missing"]))
    return f"incomplete, missing {nodes}" if nodes else ""


def _warning(budget: float | None, cost: float | None) -> str:
    if not budget or cost is None or cost < _BUDGET_WARNING * budget:
        return ""
    return f"Warning: {cost / budget:.0%} of the {money(budget)} budget is spent; at 100 % the nodes end."


def _cost(result: dict[str, Any]) -> str:
    if result["state"] == "stopped":
        from awsddp.compat.types import HOURS_PER_MONTH

        price, is_local = result["price_usd_per_hour"], result["target"] == "local"
        disks = "" if price is None else f", {money(price * HOURS_PER_MONTH)} per month"
        cost = "on EC2 only the disks would cost" if is_local else "only the disks cost"
        return named(f"Stopped: {cost}{disks}. Start the nodes: awsddp up. Terminate them: awsddp down")
    would = "would cost" if result["target"] == "local" else "costs"
    text = (
        f"{would} {money(result['price_usd_per_hour'])} per hour on EC2, {money(result['cost_usd'])} so far"
    )
    if result["expires"]:
        left = datetime.fromisoformat(result["expires"]) - datetime.now(UTC)
        text += f"; expires in {duration(max(0.0, left.total_seconds()))}"
        text += f", or after {result['idle']} idle" if result["idle"] not in (None, "off") else ""
    return text + named(". Terminate now: awsddp down")


def all_page(found: list[dict[str, Any]]) -> None:
    """Show every cluster, ours first; orphans are named as such."""
    if not found:
        line("No resource carries awsddp's tags in any searched region.")
        return
    rows = [
        (
            *(one[key] for key in ("cluster", "id", "region")),
            "orphan" if one["orphan"] else one["state"],
            "you" if one["mine"] else one["owner"],
            len(one["nodes"]),
            len(one["leftovers"]),
            money(one["price_usd_per_hour"]),
            (one["expires"] or "")[:16].replace("T", " "),
        )
        for one in found
    ]
    table(("cluster", "id", "region", "state", "owner", "nodes", "others", "per hour", "expires, UTC"), rows)
    if any(one["orphan"] for one in found):
        line("Terminate the orphans: awsddp down --orphans")


def orphans_page(ended: dict[str, Any]) -> None:
    """Show how many orphans were ended."""
    count = len(ended["clusters"])
    line(f"{count} orphan{'s' * (count != 1)} terminated. Searched: {', '.join(ended['looked'])}.")


def job_page(result: dict[str, Any]) -> None:
    """Show a job's end, its cause and its results directory."""
    for text in job_lines(result):
        line(text, stderr=True)


def _cause(cause: dict[str, Any] | None) -> str:
    if cause is None:
        return ""
    who = "the job" if cause["node"] is None else f"node{cause['node']}"
    if cause["rank"] is not None:
        who = f"rank {cause['rank']} @ {who}"
    return f"{who}: {cause['explanation']}"


def job_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines on a job's end, its cause and its results directory."""
    lines = [f"Job {result['job']}: {result['state']}"]
    if result["state"] in ACTIVE:
        name = result["job"]
        return [
            *lines,
            named(f"  follow it: awsddp logs -f {name}"),
            named(f"  end it: awsddp cancel {name}"),
        ]
    if result["cause"]:
        lines.append(f"  cause: {_cause(result['cause'])}")
        lines += [f"  | {text}" for text in result["cause"]["tail"]]
        lines += [named(f"  next: {result['cause']['next']}")] if result["cause"]["next"] else []
    if result.get("accuracy") is not None:
        data = f", {result['data']}" if result.get("data") else ""
        lines.append(f"  accuracy on held-out data: {result['accuracy']:.2%}{data}")
    lines.append(f"  results: {_results(result)}")
    if result.get("checkpoint"):
        job = msgspec.convert(result, JobRecord)
        again = named(f"awsddp train --resume {job.job}", job=job)
        lines.append(f"  checkpoint: {result['checkpoint']}; continue from it: {again}")
    return lines


def _results(result: dict[str, Any]) -> str:
    fetch = named(f"awsddp fetch {result['job']}")
    if result["fetched"]:
        return f"{result['home']}/"
    if part := _incomplete(result):
        return f"{result['home']}/, {part}: {fetch}"
    return f"on the nodes; fetch them: {fetch}"


def jobs_page(result: dict[str, Any], *, verbose: bool = False) -> None:
    """Show each cluster with its jobs, the newest last, and the costs; `verbose`: also what each job ran."""
    for cluster in (*result["clusters"], None):
        own = cluster and cluster["id"]
        jobs = [job for job in result["jobs"] if job["cluster_id"] == own]
        if cluster or jobs:
            line(_bill(cluster) if cluster else "Jobs of clusters that this machine has no ledger of:")
        if jobs:
            table(("job", "state", "ranks", "time", "cost", "cause"), [_job_row(job) for job in jobs])
        for job in jobs if verbose else ():
            _job_details(job)
    if not result["jobs"]:
        line(named("No jobs yet. Start one: awsddp train"))
    if result["clusters"]:
        line(
            f"On AWS: {money(result['total_usd'])}, by list price and this machine's ledger. "
            f"Rehearsals (free), would have cost: {money(result['would_have_cost_usd'])}."
        )


def _job_row(job: dict[str, Any]) -> tuple[object, ...]:
    took, usd = job["seconds"], job["job_usd"]
    cost = "" if usd is None else money(usd)
    time = "" if took is None else duration(took)
    seen = "" if job["reported"] or job["state"] not in ACTIVE else "last seen "
    return job["job"], seen + job["state"], len(job["ranks"]), time, cost, _cause(job["cause"])


def _bill(cluster: dict[str, Any]) -> str:
    """Return what a cluster was, and what it cost, with and without jobs."""
    begin, end = (str(cluster[key] or "now")[:16].replace("T", " ") for key in ("began", "ended"))
    is_local = cluster["target"] == "local"
    idle = "" if cluster["idle_usd"] is None else f", {money(cluster['idle_usd'])} of it without a job"
    return (
        f"Cluster {cluster['cluster']}, {cluster['nodes']} x {cluster['instance_type']} in "
        f"{'the local cloud' if is_local else cluster['region']}, {begin} to {end}: "
        f"{money(cluster['cost_usd'])}{idle}{' (not billed)' * is_local}"
    )


def _job_details(job: dict[str, Any]) -> None:
    commit = "unknown commit" if job["commit"] is None else f"commit {job['commit'][:12]}"
    price = "" if job["price_usd_per_hour"] is None else f", {money(job['price_usd_per_hour'])} per hour"
    line(
        f"{job['job']}: {shlex.join([job['script'] or '?', *job['args']])}; "
        f"{commit}{' with changes' * bool(job['dirty'])}; {job['launcher']}, {job['world_size']} ranks on "
        f"{len(job['nodes'])} x {job['instance_type']}{price}; {job['started']} to {job['ended'] or 'now'}"
    )
    ranks_table(job)


def ranks_table(job: dict[str, Any]) -> None:
    """Show metrics and usage of each rank that has some; usage far from that of the others has a star."""
    columns = list(rank_columns(job))
    ranks = sorted({rank for column in columns for rank in column.values})
    rows = [
        [
            "slowest" if rank == job["slowest_rank"] else "",
            rank,
            *(one.shown.get(rank, "") for one in columns),
        ]
        for rank in ranks
    ]
    if rows:
        table(("", "rank", *(one.heading for one in columns)), rows)


def report_page(result: dict[str, Any]) -> None:
    """Show a job's end, its cost, and where its page is."""
    for text in job_lines(result):
        line(text)
    if result["job_usd"] is not None:
        line(f"  {'would have cost' if result['target'] == 'local' else 'cost'}: {money(result['job_usd'])}")
    line(f"page: {result['page']}")


def sync_page(result: dict[str, Any], *, verbose: bool = False) -> None:
    """Show the files and bytes sent or fetched per node; `verbose`: the largest, and what is not sent."""
    table(
        ("node", "files", "bytes"),
        [(f"node{node['node']}", node["files"], f"{node['bytes']:,}") for node in result["nodes"]],
    )
    if result.get("home"):
        line(f"Results: {result['home']}/")
    if not verbose:
        return
    if result["largest"]:
        shown = ", ".join(f"{one['path']} {size_text(one['bytes'])}" for one in result["largest"])
        line(f"Largest: {shown}")
    for kept in result["kept"]:
        more = len(kept["paths"]) - _MOST_KEPT
        paths = ", ".join(kept["paths"][:_MOST_KEPT]) + (f" and {more:,} more" if more > 0 else "")
        line(f"Not sent, matched by {kept['by']}: {paths}")


def down_page(result: dict[str, Any]) -> None:
    """Show what was terminated, and that nothing is left."""
    if not result["terminated"] and not result["removed"]:
        looked = ", ".join(result["looked"]) or "nowhere"
        line(f"Cluster {result['cluster']}: nothing to terminate. Searched: {looked}.")
        return
    count = len(result["terminated"])
    verb = "Would have cost" if result["target"] == "local" else "Cost"
    line(
        f"Cluster {result['cluster']}: {count} instance{'s' * (count != 1)} terminated, nothing is left. "
        f"{verb}: {money(result['cost_usd'])} on EC2 (list price)."
    )


def run_page(result: "RunResult") -> None:
    """Show the whole run: accuracy, the time of each stage, what it cost, and that nothing is left."""
    if result.train:
        for text in job_lines(result.train):
            line(text)
    table(("stage", "time"), [(stage, duration(seconds)) for stage, seconds in result.seconds.items()])
    if result.down:
        down_page(result.down)
    elif result.up and result.error is None:
        line(
            f"The nodes end {result.up['idle']} after the job, at {result.up['expires']} at the latest: "
            "stopped while they hold results, else terminated."
        )
        line(named("Fetch the results and terminate the nodes: awsddp fetch. Terminate now: awsddp down"))


def local_page(result: dict[str, Any]) -> None:
    """Show the local cloud: the settings for any EC2 client, its instances and faults."""
    line(f"Local cloud in {result['mode']} mode: {result['why']}")
    line("For any EC2 client:")
    for variable, key in (
        ("AWS_ENDPOINT_URL", "endpoint"),
        ("AWS_DEFAULT_REGION", "region"),
        ("AWS_ACCESS_KEY_ID", "access_key_id"),
        ("AWS_SECRET_ACCESS_KEY", "secret_access_key"),
    ):
        print(f"  export {variable}={result[key]}")  # never wrapped: to be copied
    live = [one for one in result["instances"] if one["state"] != "terminated"]
    ended = len(result["instances"]) - len(live)
    if live:
        keys = ("instance_id", "name", "state", "instance_type", "private_ip", "region")
        headings = ("instance", "name", "state", "type", "address", "region")
        table(headings, [[one[key] for key in keys] for one in live])
    else:
        line("No instances.")
    if ended:
        line(f"{ended} terminated within the last hour.")
    if result["faults"]:
        faults_page(result["faults"])


def faults_page(faults: Sequence[dict[str, Any]]) -> None:
    """Show the active faults of the local cloud."""
    if not faults:
        line("No faults.")
        return
    headings = ("fault", "target", "effect", "times", "seconds", "only", "until")
    table(headings, [_fault_row(one) for one in faults])


def _fault_row(fault: dict[str, Any]) -> list[Any]:
    at = fault["heals_at"]
    of_calls = [fault["times"] or "always", fault["seconds"], fault["only"]]
    return [
        *(fault[key] for key in ("id", "operation", "effect")),
        *(["", "", ""] if fault["operation"].startswith("i-") else of_calls),
        time.strftime("%H:%M:%S", time.localtime(at)) if at else "",
    ]
