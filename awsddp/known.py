"""What this machine and the nodes know: jobs, found, told by the nodes, ended; and what a cluster costs."""

import contextlib
import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp import billing
from awsddp.advice import advised
from awsddp.billing import Bill
from awsddp.errors import AwsddpError, ConfigError, NodeError, NoRegion, NotFoundError, UsageError
from awsddp.jobs.files import Checkpoint, newest_checkpoint
from awsddp.reach import REACH_S, connect_reachable, say_missing, told_jobs
from awsddp.records import ACTIVE, Frozen, JobRecord, Listed, widened
from awsddp.release import release_saved, release_unbegun
from awsddp.report import elapsed, iso, node_name, utc
from awsddp.resources import is_bundled
from awsddp.results import job_result, missing, reached, saved_job
from awsddp.returns import CostedCluster, JobDocument, JobsDocument, ListedJob
from awsddp.saved import brought, is_saved, opened
from awsddp.state import Past, Record, pasts, read_rows
from awsddp.values import seconds

if TYPE_CHECKING:
    from awsddp.cluster import Cluster


_NEWEST = 5
"""How many jobs are named where one is not found."""


def told_job(cluster: "Cluster", name: str | None, *, ran: bool = False) -> JobRecord:
    """Return a job (`full_name`), or the last one, as the nodes that answer know it.

    The last one that runs, or else has run, comes first where `ran` is wanted and no name is given.
    Raises UsageError, NotFoundError, and NodeError for one that is remembered and whose nodes are missing.
    """
    jobs = told_jobs(cluster, partial=True)
    unbegun = release_unbegun(cluster, jobs)
    name = full_name(cluster, name, (job.job for job in jobs))
    refuse_unbegun(name, unbegun)
    if ran and name is None:
        running = tuple(job for job in jobs if job.state == "running")
        jobs = running or tuple(job for job in jobs if job.state != "waiting") or jobs
    try:
        return choose_job(jobs, name)
    except NotFoundError:
        remembered = [job for job in cluster.record.jobs if job.job == name and job.nodes]
        for job in remembered:
            why = "\n".join(missing(cluster, job).values())
            raise NodeError(f"no reachable node knows job {name}", why, "awsddp jobs") from None
        raise


def refuse_unbegun(name: str | None, unbegun: Collection[str]) -> None:
    """Raise NotFoundError for a job that was never launched."""
    if name in unbegun:
        why = "the command that was to start it ended before its nodes heard of it"
        raise NotFoundError(
            f"job {name} never began", why, f"awsddp train --name {name} SCRIPT   # its name is free"
        )


def end_ranks(
    cluster: "Cluster", job: str, *, grace_s: float | None = None, launch: str | None = None
) -> None:
    """End a job on every node that knows it: TERM, the grace, KILL; return when it has ended.

    With `launch` only where the job is of that launch.
    """
    from awsddp.jobs.protocol import ANSWER_S, ask
    from awsddp.jobs.supervisor import requests

    grace = seconds(cluster.job_spec.job.grace) if grace_s is None else grace_s
    states = ask(cluster.fleet, dict.fromkeys(cluster.fleet.answering, requests.State()))
    knows = {node for node, state in states.items() if any(one.job == job for one in state.jobs)}
    request = requests.Cancel(job=job, grace=grace, launch=launch)
    ask(cluster.fleet, dict.fromkeys(knows, request), timeout_s=grace + ANSWER_S)


def end_job(cluster: "Cluster", job: JobRecord) -> JobRecord:
    """End a job that still runs, with its grace, and return it as it is then."""
    if job.state not in ACTIVE:
        return job
    ranks = (
        f": its ranks get {cluster.job_spec.job.grace} to save" if job.state == "running" else ", which waits"
    )
    cluster.say(f"ending job {job.job}{ranks}")
    end_ranks(cluster, job.job)
    return choose_job(told_jobs(cluster, partial=True), job.job)


def full_name(cluster: "Cluster", text: str | None, told: Iterable[str] = ()) -> str | None:
    """Return the name of the job that `text` means: a name, `last` (None), or a part of one name alone.

    A name comes before a part; those that nodes have `told` and those in the project's folder before the
    others of this machine. A job in S3 is brought here, but its results. What is in no name is returned as it
    is. Raises UsageError for a part of several, and as `saved.opened`.
    """
    if text is None or text == "last":
        return None
    if is_saved(text):
        return brought(cluster, text)[0].job
    known = all_jobs(cluster)
    own = [one.job.job for one in known if one.folder.parent == cluster.results.absolute()]
    own += told
    every = [*(one.job.job for one in known), *own]
    for names in (own, every) if text and text not in every else ():
        found = [name for name in dict.fromkeys(names) if text in name]
        if len(found) > 1:
            shown = ", ".join(found[-_NEWEST:])
            raise UsageError(f"several jobs have {text} in their name", shown, "use more of the name")
        if found:
            return found[0]
    return text


def choose_job(jobs: Sequence[JobRecord], name: str | None) -> JobRecord:
    """Return the job of this name, or the last one. Raises NotFoundError."""
    chosen = next((job for job in reversed(jobs) if name in (None, job.job)), None)
    if chosen is None:
        why, advice = "no jobs on this cluster yet", "awsddp train"
        if jobs:
            names = ", ".join(job.job for job in jobs[-_NEWEST:])
            why, advice = f"the newest jobs: {names}", "awsddp jobs   # all of them"
            if near := difflib.get_close_matches(name or "", [job.job for job in jobs], n=1):
                advice = f"did you mean {near[0]}?\n{advice}"
        raise NotFoundError(f"no job {name}" if name else "no job", why, advice)
    return chosen


def jobs_of_all(
    cluster: "Cluster", names: Sequence[str] = (), *, since: datetime | None = None
) -> JobsDocument:
    """Return the jobs of these `names` (`full_name`), or all, the oldest first, and what they cost (`since`).

    All are those of this machine's clusters, and the nodes' own. Unreachable nodes are named, as is a cluster
    that has ended. Raises what keeps the nodes from an answer, with the document as its `result`;
    NotFoundError where a job, or any cluster of this name, was never made here (`default`, which nobody
    named: where there is no job either); UsageError.
    """
    bill = None
    if names and all(map(is_saved, names)):
        return jobs_document(cluster, (), None, [brought(cluster, one)[0].job for one in names])
    try:
        with cluster.partly_ready() as cluster:
            bill = bill_of(cluster, cluster.listed)
            return jobs_document(cluster, known_jobs(cluster), bill, names, since=since)
    except AwsddpError as error:
        error.result = found = jobs_document(cluster, (), bill, names, since=since)
        was_here = any(one.cluster == cluster.spec.name for one in found.clusters)
        nobody_named = cluster.spec.name == "default" and cluster.folder.read(newer=True) is None
        absent = isinstance(error, NotFoundError) and was_here
        if nobody_named and not was_here:
            absent = isinstance(error, NotFoundError | ConfigError if found.jobs else NoRegion)
        if not absent:
            raise
        if not isinstance(error, NoRegion):  # and nothing was ever here
            cluster.say(error.summary)
        return found


def known_jobs(cluster: "Cluster") -> tuple[JobRecord, ...]:
    """Return every job that the nodes know, oldest first.

    Unreachable nodes are named. Raises NotFoundError, and NoNodes if no node is reachable.
    """
    with connect_reachable(cluster):
        known = told_jobs(cluster, partial=True)
        say_missing(cluster)
        cluster.folder.remember(*known)
        release_saved(cluster, known)
        release_unbegun(cluster, known)
        return known


def job_now(cluster: "Cluster", name: str) -> JobRecord:
    """Return a job (`full_name`) as it is now: by what this machine knows if it has ended, else by its nodes.

    Raises UsageError, NotFoundError, NodeError, CloudError.
    """
    found = find_job(cluster, name)
    if found is not None and found.job.state not in ACTIVE:
        return found.job
    with cluster.partly_ready() as cluster:
        jobs = known_jobs(cluster)
        return choose_job(jobs, full_name(cluster, name, (job.job for job in jobs)))


def jobs_document(
    cluster: "Cluster",
    reported: Collection[JobRecord],
    bill: Bill | None = None,
    names: Sequence[str] = (),
    *,
    since: datetime | None = None,
) -> JobsDocument:
    """Return the `jobs` document, of the jobs of these `names` (`full_name`) alone where there are some.

    With `since` jobs and clusters that ended before are left out, and so is what clusters cost before.
    `reported` are the jobs as the cluster's nodes have just told them, `bill` is the cluster's account, where
    AWS has just been asked for it. Raises NotFoundError, UsageError.
    """
    known = all_jobs(cluster, reported)
    chosen = [known_job(cluster, name, known) for name in names] if names else known
    chosen = [one for one in chosen if not _was_before(one.job.ended, since)]
    clusters = []
    for past in pasts(cluster.home):
        account = bill if bill is not None and past.folder == cluster.folder.path else past.bill
        if account is not None and not _was_before(iso(account.ended), since):
            if since is not None and account.cost_usd is not None:
                earlier = billing.cost_until(past.rows, since)
                account = replace(account, cost_usd=round(max(0.0, account.cost_usd - earlier), 2))
            used = sum(one.job_usd or 0.0 for one in known if one.past and one.past.folder == past.folder)
            idle = None if account.cost_usd is None or since else round(max(0.0, account.cost_usd - used), 2)
            costed = widened(
                CostedCluster,
                account,
                cluster=past.name,
                began=utc(account.began),
                ended=iso(account.ended),
                idle_usd=idle,
            )
            clusters.append(costed)
    return JobsDocument(
        jobs=tuple(one.listed() for one in chosen),
        clusters=tuple(sorted(clusters, key=lambda one: one.began)),
        total_usd=_total(clusters, "aws"),
        would_have_cost_usd=_total(clusters, "local"),
        since=iso(since),
    )


def _was_before(ended: str | None, since: datetime | None) -> bool:
    return ended is not None and since is not None and datetime.fromisoformat(ended) < since


def _total(clusters: Iterable[CostedCluster], target: str) -> float:
    return round(sum(one.cost_usd or 0.0 for one in clusters if one.target == target), 2)


class FoundJob(Frozen):
    """A job that this machine knows: its results directory, and its cluster where there is a ledger of it.

    `launched` is when, as text; `reported` tells that its nodes have just told it. `share` is the part of its
    nodes' price that it pays: less than 1.0 where other jobs ran on them at the same time.
    """

    job: JobRecord
    folder: Path
    past: Past | None
    launched: str
    reported: bool = False
    share: float = 1.0

    @property
    def seconds(self) -> float | None:
        """How long the job ran, by its record; until now for one that runs."""
        return elapsed(self.job.started, self.job.ended)

    @property
    def job_usd(self) -> float | None:
        """What the job's nodes cost while it ran, by list price; jobs that share a node share its price."""
        seconds, price = self.seconds, self.job.price_usd_per_hour
        return None if seconds is None or price is None else round(seconds / 3600 * price * self.share, 4)

    def listed(self) -> ListedJob:
        """Return the job with its cluster, its time and its cost."""
        launch = self.past and self.past.launched
        name, key = self.past and self.past.name, launch and launch.id
        how_far = reached(self.folder, self.job)
        return widened(ListedJob, self, self.job, how_far, cluster=name, cluster_id=key)


def all_jobs(cluster: "Cluster", reported: Collection[JobRecord] = ()) -> list[FoundJob]:
    """Return the jobs of this machine's clusters and those whose results are in the project's folder.

    The oldest comes first. `reported` are as for `jobs_document`.
    """
    made = list(pasts(cluster.home))
    found = [one for past in made for one in jobs_of(cluster, past, reported)]
    known = {(one.folder, one.job.nodes) for one in found}
    for path in cluster.results.absolute().glob("*/job.json"):
        job = saved_job(path.parent)
        if job is not None and (path.parent, job.nodes) not in known:
            own = next((past for past in made if _has_run(past, job)), None)
            found.append(FoundJob(job=job, folder=path.parent, past=own, launched=job.started or ""))
    return sorted(_shared(found), key=lambda one: one.launched)


def _shared(found: Sequence[FoundJob]) -> list[FoundJob]:
    """Return the jobs with the shares of their nodes' price that they pay."""
    now = datetime.now(UTC)
    spans = []
    for one in found:
        start, end = (
            moment and datetime.fromisoformat(moment) for moment in (one.job.started, one.job.ended)
        )
        began, ids = start or now, frozenset(node.instance_id for node in one.job.nodes)
        spans.append((began, max(began, end or now), ids if start else frozenset()))
    return [replace(one, share=share) for one, share in zip(found, billing.shares(spans), strict=True)]


def jobs_of(cluster: "Cluster", past: Past, reported: Collection[JobRecord] = ()) -> list[FoundJob]:
    """Return the jobs of one cluster, the oldest first: as its nodes `reported` them, else as last seen.

    The results say how a job ended, also where they were moved into the project's folder. A job that was last
    seen active on a cluster that has ended was interrupted.
    """
    found = []
    live = {job.job: job for job in reported if past.folder == cluster.folder.path}
    seen = {job.job: job for job in past.record.jobs} if past.record else {}
    rows = {row.job: row for row in past.rows if row.event == "train" and row.job and row.home}
    ended = bill.ended if (bill := past.bill) else None
    for name in dict.fromkeys((*rows, *seen, *live)):
        row, last, here = rows.get(name), seen.get(name), (cluster.results / name).absolute()
        home = Path(row.home) if row and row.home else here
        saved = ((folder, saved_job(folder)) for folder in (home, here))
        own = ((at, job) for at, job in saved if job and _has_run(past, job, seen=last))
        folder, kept = next(own, (home, None))
        job = live.get(name) or (kept if kept and kept.state not in ACTIVE else last or kept)
        if job is None:
            continue
        launched = row.time.isoformat() if row else job.started or ""
        if ended is not None and job.state in ACTIVE and name not in live:
            job = replace(job, state="interrupted", ended=iso(ended))
        found.append(FoundJob(job=job, folder=folder, past=past, launched=launched, reported=name in live))
    return sorted(found, key=lambda one: one.launched)


def _has_run(past: Past, job: JobRecord, *, seen: JobRecord | None = None) -> bool:
    """Tell whether a job ran on machines of this cluster; on those of the job `seen`, where it is known."""
    return job.nodes == seen.nodes if seen else any(one.instance_id in past.instances for one in job.nodes)


def known_job(cluster: "Cluster", name: str | None, known: list[FoundJob] | None = None) -> FoundJob:
    """Return what `find_job` finds. Raises NotFoundError, UsageError."""
    found = find_job(cluster, name, known)
    if found is None:
        what = f"no job {name}" if name else "no jobs have run from this machine"
        where = f"searched {cluster.results}/ and the clusters of {cluster.home}"
        raise NotFoundError(what, where, "awsddp jobs   # all jobs")
    return found


def find_job(cluster: "Cluster", name: str | None, known: list[FoundJob] | None = None) -> FoundJob | None:
    """Return a job (`full_name`) that this machine knows: one in the project's folder before others.

    Without a name the one that was launched last, on a cluster of this name if there is one. `known` is what
    `all_jobs` returned. Raises UsageError.
    """
    name = full_name(cluster, name, (one.job.job for one in known or () if one.reported))
    found = [one for one in known or all_jobs(cluster) if name in (None, one.job.job)]

    def rank(one: FoundJob) -> tuple[bool, bool]:
        is_own = one.past is not None and one.past.name == cluster.spec.name
        return name is not None and one.folder == (cluster.results / name).absolute(), is_own

    return max(reversed(found), key=rank, default=None)


def checkpoint_of(cluster: "Cluster") -> Checkpoint | None:
    """Return the checkpoint that `job.resume` names (None: it names none). Raises ConfigError, UsageError."""
    if cluster.job_spec.job.resume is None:
        return None
    asked = cluster.job_spec.job.resume
    if is_saved(asked):
        return _saved_checkpoint(cluster, asked)
    job = full_name(cluster, asked) or _last_job(cluster)
    checkpoint = newest_checkpoint(cluster.results / job)
    kept = saved_job(cluster.results / job)
    if checkpoint is None and kept is not None and kept.save_to is not None:
        return _saved_checkpoint(cluster, f"{kept.save_to}/{job}")
    if checkpoint is None:
        raise ConfigError(
            f"job {job} has no checkpoint here",
            f"{cluster.results / job} has no run/latest, and no file or folder that is all of a checkpoint",
            f"awsddp fetch {job}   # if its results are on the nodes",
        )
    return checkpoint


def _saved_checkpoint(cluster: "Cluster", uri: str) -> Checkpoint:
    with opened(cluster, uri) as saved:
        return saved.checkpoint()


def _last_job(cluster: "Cluster") -> str:
    """Return the job of the same script that was launched last, of those whose results are here.

    Raises ConfigError.
    """
    script, here = cluster.job_spec.job.script, cluster.results.absolute()
    for one in reversed(all_jobs(cluster)):
        ran = one.job.script or ""
        is_same = is_bundled(ran) if script is None else normpath(ran) == normpath(script)
        if is_same and one.folder.parent == here and saved_job(one.folder) is not None:
            return one.job.job
    raise ConfigError(
        f"no job of {script or 'the bundled program'} has results here", "", "name a job: --resume JOB"
    )


def cancel(cluster: "Cluster", *, job: str | None = None) -> JobDocument:
    """End a job (`full_name`; the last that runs by default) and return it as the `train` document.

    A job that has ended is returned as it is. Results stay on the nodes until they are fetched. Unreachable
    nodes are named; the others end the job. Raises NotFoundError for an unknown job, or if none runs; NoNodes
    if no node is reachable.
    """
    return cancel_jobs(cluster, [] if job is None else [job])[0]


def cancel_jobs(cluster: "Cluster", names: Sequence[str]) -> list[JobDocument]:
    """End several jobs as `cancel` does, those that wait first; "all" means all that run or wait.

    Raises as `cancel`, for an unknown name before any job is ended.
    """
    with cluster.partly_ready() as cluster, connect_reachable(cluster):
        jobs = told_jobs(cluster, partial=True)
        say_missing(cluster)
        unbegun = release_unbegun(cluster, jobs)
        active = [one for one in jobs if one.state in ACTIVE]
        running = [one for one in active if one.state == "running"]
        if not (active if "all" in names else running) and ("all" in names or set(names) <= {"last"}):
            raise NotFoundError("no job is running on this cluster", "", "awsddp jobs   # ended jobs")
        chosen = list(active) if "all" in names else []
        for text in names or ("last",):
            if text != "all":
                name = full_name(cluster, text, (one.job for one in jobs))
                refuse_unbegun(name, unbegun)
                chosen.append(choose_job(running if name is None else jobs, name))
        documents = []
        # The newest first: none of those that wait is to start because another one ends.
        for one in sorted({job.job: job for job in reversed(chosen)}.values(), key=_runs):
            ended = end_job(cluster, one)
            cluster.folder.remember(ended)
            documents.append(job_result(cluster, ended))
        return documents


def _runs(job: JobRecord) -> bool:
    return job.state == "running"


def name_left_out(cluster: "Cluster") -> None:
    """Name the jobs that run or wait without a node that was replaced, and what starts them on all nodes.

    One that has begun continues from its checkpoint. Raises NodesFailed, NodeError.
    """
    living = {node.instance_id for node in cluster.nodes}
    left = {
        job.job: job
        for job in cluster.record.jobs
        if job.state in ACTIVE and not living.issuperset(one.instance_id for one in job.nodes)
    }
    if not left:
        return
    with cluster.connect(deadline_s=REACH_S):
        known = {job.job: job for job in told_jobs(cluster) if job.job in left}
    cluster.folder.remember(*known.values())
    for name, job in (left | known).items():
        lost = ", ".join(node_name(one.node) for one in job.nodes if one.instance_id not in living)
        ends = [f"awsddp cancel {name}"] if name in known and job.state in ACTIVE else []
        if ends and job.state == "running":
            ways = " && ".join([*ends, f"awsddp fetch {name}; awsddp train --resume {name}"])
            cluster.say(
                f"job {name} runs without {lost}, which was replaced; with it: "
                f"{advised(cluster, ways, job=job)}"
            )
        elif job.state == "waiting" or (job.state in ("failed", "interrupted") and job.started is None):
            ways = " && ".join([*ends, "awsddp train" if name in known else "awsddp train --after all"])
            cluster.say(
                f"job {name} waited for {lost}, which was replaced: {advised(cluster, ways, job=job)}"
            )


def bill_of(cluster: "Cluster", listed: Listed | None) -> billing.Bill | None:
    """Return the account of the cluster in the folder, now; None where this machine did not launch it.

    What AWS lists and the ledger lacks is written down first, so that no later account is smaller. Where
    nodes are spot, AWS is asked for the prices that held since they were launched.
    """
    if (record := cluster.known) is None:
        return None
    now = datetime.now(UTC)
    rows = read_rows(cluster.folder.ledger)
    own = listed.nodes if listed is not None and listed.id == record.id else None
    nodes = own or ()
    lacking = billing.unwritten(billing.account(rows, now), own, launched=launched(record), now=now)
    spot = [node.launched for node in nodes if node.spot and node.launched]
    if spot:
        from awsddp.aws.prices import spot_history

        history = spot_history(cluster.aws, {node.instance_type for node in nodes}, since=min(spot))
        lacking += billing.repriced(rows, nodes, history, now=now)
    for row in lacking:
        with contextlib.suppress(ConfigError):  # a full disk here hides no price
            cluster.folder.note(row.event, **row.facts | {"id": record.id})
    running = {node.instance_id for node in nodes if node.state in ("pending", "running")}
    return billing.account([*rows, *lacking], now, running=running)


def note_fetched(cluster: "Cluster", job: str, size: int) -> None:
    """Write down what it costs that so many bytes of a job left AWS, by the list price."""
    if size:
        from awsddp.compat.types import EGRESS_USD_PER_GB

        usd = size / 1e9 * EGRESS_USD_PER_GB
        with contextlib.suppress(ConfigError):  # no result waits for its price
            cluster.folder.note("fetched", id=cluster.record.id, job=job, bytes=size, usd=round(usd, 6))


def launched(record: Record, instances: Iterable[str] = ()) -> billing.Row:
    """Return the ledger's row of a launch of the cluster: its machines, rates of a node, expiry."""
    price, disk = record.price_usd_per_hour, record.disk_usd_per_hour
    return widened(
        billing.Row,
        record,
        record.target,
        time=datetime.now(UTC),
        event="launched",
        instances=tuple(instances),
        target=record.target.name,
        node_usd_per_hour=None if price is None else round(price / record.nodes - disk, 6),
    )
