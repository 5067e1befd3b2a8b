"""status: the nodes, their cost and expiry, from AWS; the jobs as last seen. Of one cluster, or of all."""

import contextlib
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from awsddp import report
from awsddp.advice import command_words, job_options, script_words
from awsddp.answers import OURS
from awsddp.config import NOT_SHOWN
from awsddp.errors import AwsddpError, CloudError, LeftoverError, LocalCloudError, NoRegion
from awsddp.jobs import results
from awsddp.known import FoundJob, all_jobs, bill_of, jobs_of, known_job
from awsddp.local import client as local
from awsddp.reach import reachable, told_jobs
from awsddp.records import ACTIVE, MORE, JobRecord, Listed, RankUsage, Target, widened
from awsddp.release import release_saved, release_unbegun
from awsddp.report import money
from awsddp.results import is_fetched, job_result, loss_rows, ranks_of, written_progress
from awsddp.returns import (
    ClusterDocument,
    FoundCluster,
    HomeDocument,
    JobReport,
    KnownCluster,
    KnownJob,
    NodeState,
    Orphans,
    SeenJob,
)
from awsddp.search import aws_of, look, refuse_sessions, target_for, wait_until_launches_show
from awsddp.spec import Given
from awsddp.state import Folder, Past, Record, living, pasts, write_private

if TYPE_CHECKING:
    from awsddp.aws.clusters import Everywhere, Holding
    from awsddp.aws.session import Aws
    from awsddp.cluster import Cluster
    from awsddp.nodes.transport import Fleet


ASK_S = 5.0
"""How long connecting to a node may take before a running job is shown as last seen."""

# This login is not a use of the node: the watchdog ignores its port.
_READ_IDLE = (
    'set -- $SSH_CONNECTION; echo "$2" | sudo -n tee -a /run/awsddp/asked > /dev/null; cat /run/awsddp/left'
)

PAGE = "report.html"
_SIZE = ("cluster.nodes", "cluster.instance_type", "cluster.gpus")


def status(cluster: "Cluster", *, ask_nodes: bool = False) -> ClusterDocument:
    """Return the cluster as the `status` document; a cluster that is not found is "absent".

    Without a record only the running local cloud and one region are searched; `status_all` searches every
    region. With `ask_nodes` each node has `idle_left_s`, as its watchdog last counted; None where it did not
    answer within seconds. Raises CloudError where AWS does not answer, NotFoundError where another session of
    the caller's role has a cluster of this name.
    """
    with cluster.find(newer=True, everywhere=False) as cluster:
        found = cluster_document(cluster, refresh(cluster))
        if found.state == "absent":
            refuse_sessions(cluster)
        if ask_nodes and cluster.own is not None:
            left = _idle_left(cluster)
            for node in found.nodes:
                node.idle_left_s = left.get(node.node)
        return found


def _idle_left(cluster: "Cluster") -> dict[int, int]:
    """Return the idle seconds that nodes have left, by number, without those that do not answer."""
    words: dict[int, bytes] = {}

    def hear(node: int, data: bytes) -> None:
        words[node] = words.get(node, b"") + data[:99]

    with contextlib.suppress(AwsddpError), _connected(cluster) as fleet:
        request = (("sh", "-c", _READ_IDLE), b"")
        fleet.stream(dict.fromkeys(fleet.nodes, request), hear, silent_after_s=ASK_S)
    return {node: int(word) for node, word in words.items() if re.fullmatch(rb"\d{1,9}\n", word)}


def _connected(cluster: "Cluster") -> "AbstractContextManager[Fleet]":
    """Connect to the nodes that can be reached and were prepared from here, and work with them."""
    live = cluster.own.live if cluster.own else ()
    cluster.use([node for node in reachable(live) if cluster.record.is_prepared(node)], of=live)
    return cluster.connect(deadline_s=ASK_S, partial=True)


def refresh(cluster: "Cluster") -> tuple[JobRecord, ...]:
    """Remember how far jobs are that ran or saved to S3 when last seen; return them, if nodes answer."""
    record = cluster.known
    told: tuple[JobRecord, ...] = ()
    if record is None or cluster.own is None or not _is_due(cluster, record.jobs):
        return ()
    with contextlib.suppress(AwsddpError), _connected(cluster):
        told = told_jobs(cluster, partial=True)
        cluster.folder.remember(*told)
        release_saved(cluster, told)
        release_unbegun(cluster, told)
        cluster.known = cluster.folder.read()
    return told


def _is_due(cluster: "Cluster", jobs: Collection[JobRecord]) -> bool:
    """Tell whether the nodes may know more than this machine: of a job that ran or saved when it was last
    seen, or of one that their tags name and it does not know. Whoever asks them uses them.
    """
    if set(cluster.unfetched) - {job.job for job in jobs} - {MORE}:
        return True
    return any(job.state in ACTIVE or (job.job in cluster.unfetched and _saves(job)) for job in jobs)


def _saves(job: JobRecord) -> bool:
    """Tell whether a job saved to S3 when last seen, or had saved all, so that its nodes can be released."""
    saving = job.saving
    return job.save_to is not None and (saving is None or not saving.ended or saving.is_whole)


def cluster_document(cluster: "Cluster", told: Collection[JobRecord] = ()) -> ClusterDocument:
    """Return the document of `up` and `status` from what AWS, the folder and nodes that were asked know."""
    record, listed = cluster.known, cluster.listed
    nodes = listed.live if listed else ()
    prepared = {found.instance_id: found for found in record.prepared} if record else {}
    bill = bill_of(cluster, listed)
    expires = (listed.expires if listed else None) or (record.expires if record and nodes else None)
    return ClusterDocument(
        cluster=cluster.spec.name,
        state=report.cluster_state(
            listed,
            prepared=frozenset(prepared) if record else None,
            launching=cluster.gateway is not None and _launching(record, listed),
            size=record.nodes if record else None,
        ),
        target=cluster.target.name,
        region=listed.region if listed else cluster.target.region,
        instance_type=nodes[0].instance_type if nodes else (record.instance_type if record else None),
        nodes=tuple(
            widened(
                NodeState,
                node,
                nic=prepared[node.instance_id].nic if node.instance_id in prepared else None,
                gpus=record.gpus_per_node if record else 0,
            )
            for node in nodes
        ),
        jobs=_jobs_of(cluster, record, told) if record else (),
        price_usd_per_hour=bill.price_usd_per_hour if bill else None,
        cost_usd=bill.cost_usd if bill else None,
        budget_usd=record.asked.get("cluster.budget_usd") if record else None,
        expires=report.iso(expires),
        idle=record.idle or None if record and nodes else None,
        looked=cluster.searched,
    )


def _jobs_of(cluster: "Cluster", record: Record, told: Collection[JobRecord]) -> tuple[SeenJob, ...]:
    return tuple(
        widened(
            SeenJob,
            one.job,
            last_seen=report.iso(record.seen.get(one.job.job)),
            fetched=is_fetched(one.folder, one.job),
            reported=one.reported,
        )
        for one in jobs_of(cluster, living(cluster.folder), told)
    )


def _launching(record: Record | None, cluster: Listed | None) -> bool:
    """Whether a launch was written down that has not answered, and may still show."""
    if record is None or record.intent is None:
        return False
    from awsddp.aws.waits import VISIBLE_S

    return cluster is not None or datetime.now(UTC) - record.created < timedelta(seconds=VISIBLE_S)


def status_all(cluster: "Cluster") -> list[FoundCluster]:
    """Return the `status` documents of every cluster in every region, also of other owners, and of orphans.

    Those of the local cloud, too, if it runs; with --local those alone, with --region those of that region.
    Raises CloudError if no region answers.
    """
    with _searched(cluster) as places:
        return [_found(here, holding) for here, _, found in places for holding in found.holdings]


def down_orphans(cluster: "Cluster", *, discard: bool = False, confirm: Callable[[str], None]) -> Orphans:
    """Terminate the caller's resources whose cluster has no instance or is past its expiry; nothing else.

    A cluster with unfetched results is kept, unless `discard`. `confirm` is called with the list of orphans
    and raises to refuse. Raises LeftoverError if something was kept or could not be terminated, CloudError if
    AWS does not answer.
    """
    from awsddp.aws.teardown import teardown

    with _searched(cluster) as places:
        unused = [
            (here, holding)
            for here, _, found in places
            for holding in found.holdings
            if holding.orphan and not _lives(_recorded(here, holding.cluster, wait=True))
        ]
        owed = [holding.cluster for _, holding in unused if holding.cluster.unfetched]
        kept = [] if discard else owed
        orphans = [(here, holding) for here, holding in unused if holding.cluster not in kept]
        if orphans:
            confirm("Orphans:\n" + "\n".join(f"  {_orphan(here, one)}" for here, one in orphans) + "\n")
        terminated: list[str] = []
        left: list[str] = []
        for here, orphan in orphans:
            there = replace(here.target, region=orphan.cluster.region)
            trail = cluster.home / "history" / f"{orphan.cluster.name}-{orphan.cluster.id}"
            aws = aws_of(here, there, trail=trail, login=here.aws)
            ended = teardown(aws, orphan.cluster, on_event=cluster.on_event)
            terminated += ended.terminated
            left += ended.leftovers
        if left:
            raise LeftoverError(
                "not every orphan could be terminated",
                f"left: {', '.join(left)}",
                "awsddp down --orphans   # again; what is left may still cost money",
            )
        if kept:
            fetch = f"fetch {kept[0].unfetched[0]}"
            raise LeftoverError(
                "orphans that hold results were not terminated",
                "; ".join(f"{one.name} ({one.id}): results of {', '.join(one.unfetched)}" for one in kept),
                f"awsddp -c {kept[0].name} {fetch}   # or: awsddp down --orphans --discard",
            )
        return Orphans(
            clusters=tuple(orphan.cluster.id for _, orphan in orphans),
            terminated=tuple(terminated),
            leftovers=(),
            looked=tuple(region for _, regions, _ in places for region in regions),
            unread=tuple(text for _, _, found in places for text in found.unread),
        )


@contextmanager
def _searched(cluster: "Cluster") -> "Iterator[list[tuple[Cluster, list[str], Everywhere]]]":
    """Yield for each place the cluster with its target and a gateway, what was searched, and what was found.

    The places are the running local cloud and AWS; one of them where a setting, or the record, names it.
    """
    asked = cluster.spec.cluster
    is_set = cluster.local or asked.region or asked.profile
    record = None if is_set else cluster.folder.read()
    places = []
    with contextlib.ExitStack() as stack:
        if not is_set and (record is None or record.target.name != "local"):
            opened = local.opened(cluster.home, cluster.on_event, start=False)
            try:
                if (running := stack.enter_context(opened)) is not None:
                    places.append(_look_in(cluster, running))
            except LocalCloudError as error:
                cluster.say(f"not searched: the local cloud: {error.summary}")
        target = stack.enter_context(target_for(cluster, record))
        try:
            places.append(_look_in(cluster, target))
        except CloudError as error:
            if not places or getattr(error, "code", "") != "NoCredentialsError":
                raise
            cluster.say(f"not searched: AWS: {error.message}")
        yield places


def _look_in(cluster: "Cluster", target: Target) -> "tuple[Cluster, list[str], Everywhere]":
    """Search a place: all its regions, unless one is asked for. Needs no region that is configured."""
    from awsddp.aws.clusters import find_everywhere
    from awsddp.aws.facts import enabled_regions
    from awsddp.aws.session import OPEN_REGION

    try:
        aws = aws_of(cluster, target)
    except NoRegion:
        target = replace(target, region=OPEN_REGION)
        aws = aws_of(cluster, target)
    alone = cluster.spec.cluster.region is not None or target.name == "local"
    regions = [aws.region] if alone else list(enabled_regions(aws))

    def gateway(region: str) -> "Aws":
        return aws if region == aws.region else aws_of(cluster, replace(target, region=region), login=aws)

    found = find_everywhere(gateway, regions, owner=aws.identity().user_id, now=datetime.now(UTC))
    for text in found.unread:
        cluster.say(f"not searched: {text}")
    return cluster.but(target=target, gateway=aws), regions, found


def _found(cluster: "Cluster", holding: "Holding") -> FoundCluster:
    """Return a cluster's document. Of one that this machine has a record of, it says what `status` says."""
    listed = holding.cluster
    found = _recorded(cluster, listed)
    seen = cluster_document(found)
    return widened(
        FoundCluster,
        holding,
        listed,
        seen,
        cluster=listed.name,
        price_usd_per_hour=seen.price_usd_per_hour if found.known else holding.price_usd_per_hour,
        orphan=holding.orphan and not _lives(found),
        jobs=tuple(found.unfetched),
    )


def _lives(found: "Cluster") -> bool:
    """Tell whether nodes of a cluster live by its record, whatever their tags are, before its expiry."""
    lives = found.listed is not None and found.listed.live
    return bool(found.known and lives) and found.record.expires > datetime.now(UTC)


def _recorded(cluster: "Cluster", listed: Listed, *, wait: bool = False) -> "Cluster":
    """Return a cluster as `status` finds it, by its record, or as it is listed where this machine has none.

    With `wait` what was launched from here and is not listed yet is waited for, as `down` does.
    """
    here = cluster.but(
        name=listed.name,
        spec=replace(cluster.spec, name=listed.name),
        folder=Folder(cluster.home, listed.name),
    )
    record = here.folder.read(newer=True)
    if record is None or record.id != listed.id:
        return cluster.but(listed=listed)
    here.known, here.target = record, replace(cluster.target, region=listed.region)
    here.gateway = aws_of(here, here.target, login=cluster.aws)
    look(here)
    if wait:
        wait_until_launches_show(here)
    here.listed = here.own
    return here


def _orphan(here: "Cluster", holding: "Holding") -> str:
    cluster = holding.cluster
    what = [*(node.instance_id for node in cluster.live), *cluster.leftovers]
    owed = f"; results not fetched: {', '.join(cluster.unfetched)}" if cluster.unfetched else ""
    past = f", past its expiry of {report.iso(cluster.expires)}" if cluster.live else ""
    place = replace(here.target, region=cluster.region).place
    return (
        f"{cluster.name} ({cluster.id}) in {place}{past}: {', '.join(what)}, "
        f"{money(holding.price_usd_per_hour)} per hour{owed}"
    )


def home(cluster: "Cluster") -> HomeDocument:
    """Return the clusters that this machine remembers, as last seen, and whether a local cloud runs.

    No requests are sent: a cluster may have ended since, which `status` shows.
    """
    clusters = [
        widened(
            KnownCluster,
            record,
            record.target,
            cluster=past.name,
            target=record.target.name,
            price_usd_per_hour=bill.price_usd_per_hour if (bill := past.bill) else None,
            expires=str(report.iso(record.expires)),
            expired=record.expires < datetime.now(UTC),
            jobs=tuple(KnownJob(job=one.job.job, state=one.job.state) for one in jobs_of(cluster, past)),
        )
        for past in pasts(cluster.home)
        if (record := past.record) is not None
    ]
    jobs = () if clusters else all_jobs(cluster)
    return HomeDocument(
        clusters=tuple(clusters),
        local_cloud=local.runs(cluster.home),
        ended=sum(past.record is None for past in pasts(cluster.home)),
        last_job=KnownJob(job=jobs[-1].job.job, state=jobs[-1].job.state) if jobs else None,
    )


def write_report(cluster: "Cluster", *, job: str | None = None) -> JobReport:
    """Write the page of a job, or the last one (runs/JOB/report.html), and return its document.

    No node gets a request: it shows what was fetched, and the ledger of its cluster. Raises NotFoundError for
    a job that this machine does not know, ConfigError where the page cannot be written.
    """
    from awsddp import page

    chosen = known_job(cluster, job)
    target = (chosen.folder / PAGE).absolute()
    rows = list(_rows(chosen))
    found = _page_of(cluster, chosen, rows, target)
    write_private(target, page.job_page(found, rows).encode())
    return found


def _page_of(cluster: "Cluster", found: FoundJob, rows: Sequence[Mapping[str, Any]], file: Path) -> JobReport:
    """Return a job as the `report` document; `file` is its page."""
    from awsddp import page

    job, launched = found.job, found.past and found.past.launched
    progress = written_progress(found.folder, job)
    slowest = results.slowest_rank(progress)
    job = replace(job, progress=progress, slowest_rank=slowest, usage=_usage(found) or job.usage)
    return widened(
        JobReport,
        replace(found, job=job).listed(),
        job_result(cluster, job, folder=found.folder),
        measures=page.measures(rows),
        target=launched and launched.target,
        region=launched and launched.region,
        again=tuple(_again(job, found.past)),
        page=str(file),
    )


def _rows(found: FoundJob) -> Iterator[dict[str, Any]]:
    """Yield what the ranks wrote down; a row that names no rank is of the first one of its node."""
    for node, ranks in ranks_of(found.job).items():
        for row in loss_rows(found.folder, node):
            yield {"rank": ranks[0]} | row


def _usage(found: FoundJob) -> tuple[RankUsage, ...]:
    """Return what the ranks used when their nodes last sampled it."""
    used: list[RankUsage] = []
    for node, ranks in ranks_of(found.job).items():
        for place in (OURS, "logs/"):  # there an older awsddp fetched it
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                data = (found.folder / f"{place}samples{node}.json").read_bytes()
                sampled = msgspec.json.decode(data, type=dict[str, tuple[RankUsage, ...]])
                used += [one for one in sampled.get("ranks", ()) if one.rank in ranks]
                break
    return tuple(used)


def _again(job: JobRecord, past: Past | None) -> list[str]:
    """Return the commands that run the job again: its code, a cluster like its own, the job, the end."""
    launched = past and past.launched
    awsddp = ["awsddp"] if past is None or past.name == "default" else ["awsddp", "-c", past.name]
    place = ["--region", launched.region] if launched and launched.region else []
    place = ["--local"] if launched and launched.target == "local" else place
    up: dict[str, Given] = {"cluster.nodes": len(job.nodes)}
    up |= {"cluster.instance_type": job.instance_type} if job.instance_type else {}
    asked_for = (launched and launched.asked) or {}
    up |= {key: value for key, value in asked_for.items() if key not in (*_SIZE, *NOT_SHOWN)}
    lines = [["git", "checkout", job.commit]] if job.commit else []
    lines.append([*awsddp, *place, "up", *command_words("up", up)])
    asked = {key: value for key, value in job_options(job).items() if key not in up or up[key] != value}
    lines.append([*awsddp, "train", *command_words("train", asked), *script_words(asked)])
    return [shlex.join(line) for line in (*lines, [*awsddp, "down"])]
