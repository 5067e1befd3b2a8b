"""Submit a job: claim the right to start jobs, choose its name and slot, send files, launch."""

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import convert, structs, to_builtins

from awsddp.agent import messages
from awsddp.agent.messages import Launch
from awsddp.agent_client import launch_requests
from awsddp.agent_client.calls import ANSWER_S, NameTaken, call_each_node, call_nodes, call_nodes_in_sequence
from awsddp.agent_client.node_checks import preflight
from awsddp.agent_client.rank_layout import Rank, describe_ranks, make_hosts
from awsddp.errors import AwsddpError, InUse, NotFoundError, UsageError
from awsddp.job.cancel import end_ranks
from awsddp.job.environment import ensure_environment
from awsddp.job.registry import JobRegistry
from awsddp.job.release import describe_client, release_unknown_jobs
from awsddp.job.script import read_commit
from awsddp.model.node_answers import ClaimResult, LaunchFacts, Slots
from awsddp.model.records import JobNode, JobRecord, Node, RankResult
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.settings.spec import JobSpec
from awsddp.state import TAG_CHANGE_S
from awsddp.storage.checkpoints import Checkpoint
from awsddp.storage.results_dir import read_job
from awsddp.util.formatting import files_text, node_name, optional_utc
from awsddp.util.parallel import results_or_raise, run_both, run_in_thread
from awsddp.util.shipped_files import BUNDLED, BUNDLED_SCRIPT, REMOTE_DIR

if TYPE_CHECKING:
    from awsddp.job.lives import NextLife
    from awsddp.nodes.fleet import Fleet
    from awsddp.nodes.project_files import Listing

CLAIM_S = 60.0
"""How long another client, on any machine, may take to start a job."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = ("all", "last")
MAX_NAME_TRIES = 5
"""The maximum number of automatic names that are tried if other clients take them at the same time."""


def submit_job(
    connected: ConnectedCluster,
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None" = None,
    next_life: "NextLife | None" = None,
) -> JobRecord:
    """Send the files, start the job and return its record. `next_life` is set if the job continues a run.

    Only one client at a time can start a job, across all machines. Sends nothing while a job runs on the
    nodes. Starts nothing unless the nodes pass `preflight` and EC2 keeps the nodes' disks at a poweroff. A
    failed launch is rolled back. If another client takes the automatic name at the same time, the next name
    is used. Raises InUse, CloudError or NodeError, or UsageError if the name is taken.
    """
    session = connected.session
    nodes, launches = _launch_alone(connected, ranks, listing, checkpoint, next_life)
    launch = next(iter(launches.values()))
    job = _make_record(session, launch, ranks, nodes)
    _save_job(session, job)
    record, gpus = connected.cluster.record, connected.cluster.record.prepared_by_node[ranks[0].node].gpus
    on_ec2 = record.gpus_per_node if record.pretended else gpus
    if launch.after:
        session.say(f"job {job.job} starts when these jobs have ended: {', '.join(launch.after)}")
    else:
        session.say(f"job {job.job} runs {describe_ranks(session.job_spec, ranks, gpus=gpus, on_ec2=on_ec2)}")
    return job


def _launch_alone(
    connected: ConnectedCluster,
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None",
    next_life: "NextLife | None",
) -> tuple[list[Node], dict[int, Launch]]:
    """Start the job under this machine's lock. If an automatic name is taken, use the next name.

    Returns the job's nodes and their launch requests.
    """
    session, fleet = connected.session, connected.fleet
    refused: list[str] = []
    with session.folder.lock("train", wait_s=CLAIM_S):
        for attempt in count(1):
            try:
                nodes, launches = _launch_on_nodes(connected, ranks, listing, checkpoint, next_life, refused)
                break
            except NameTaken:
                if session.job_spec.job.name is not None or attempt == MAX_NAME_TRIES:
                    raise
        if (first := min(fleet.nodes)) not in launches:  # a launch on this node would have ended the claim
            with contextlib.suppress(AwsddpError):
                call_nodes(fleet, {first: messages.Unclaim()})
    return nodes, launches


def _make_record(session: Session, launch: Launch, ranks: Sequence[Rank], nodes: Sequence[Node]) -> JobRecord:
    """Return the record of the job that has just been launched."""
    return JobRecord(
        job=launch.job,
        state="waiting" if launch.after else "running",
        cause=None,
        world_size=len(ranks),
        started=optional_utc(datetime.now(UTC)),
        **structs.asdict(convert(launch.facts, LaunchFacts)),
        ranks=tuple(
            RankResult(
                rank=rank.rank, local_rank=rank.local_rank, node=rank.node, exit_code=None, seconds=0.0
            )
            for rank in ranks
        ),
        home=f"{session.job_spec.job.results}/{launch.job}",
        nodes=tuple(JobNode(node=node.node, instance_id=node.instance_id) for node in nodes),
    )


def _save_job(session: Session, job: JobRecord) -> None:
    """Add a started job to the ledger and the record.

    If this raises an AwsddpError, the error's next steps also include the commands for the running job.
    """
    name, home = job.job, str((session.results / job.job).absolute())
    try:
        session.folder.append_event("train", job=name, world_size=job.world_size, home=home)
        session.folder.save_jobs(job)
    except AwsddpError as error:
        follow = f"awsddp logs -f {name}   # then follow the job\nawsddp cancel {name}   # or end it"
        error.message, error.next = f"job {name} was started, but {error.message}", f"{error.next}\n{follow}"
        raise


def _launch_on_nodes(
    connected: ConnectedCluster,
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None",
    next_life: "NextLife | None",
    refused: list[str],
) -> tuple[list[Node], dict[int, Launch]]:
    """Start the job under a name that is not in `refused`; return its nodes and their launch requests.

    If a node already has a job with that name, adds the name to `refused` and raises NameTaken.
    """
    connected, launches, sending = _make_requests(connected, ranks, listing, checkpoint, next_life, refused)
    nodes = [node for node in connected.cluster.nodes if node.node in launches]
    launch = next(iter(launches.values()))
    with _roll_back(connected, nodes, launch) as others:
        checked = run_in_thread(
            preflight, connected.fleet, nodes, connected.cluster.record.prepared_by_node, launches
        )
        run_both(
            partial(sending, bundled=connected.session.job_spec.job.script is None),
            lambda: _keep_disks(connected.cluster, nodes, launch.job),
        )
        checked.result()
        if checkpoint is not None:
            from awsddp.storage.datasets import copy_checkpoint_to_nodes

            copy_checkpoint_to_nodes(connected, checkpoint, set(launches))
        if connected.session.job_spec.job.save_to is not None:
            from awsddp.job.save_to_s3 import claim_job_name

            claim_job_name(connected, launches, refused)
        answers = call_each_node(connected.fleet, launches)
        others.update(node for node, answer in answers.items() if isinstance(answer, NameTaken))
        refused += [launch.job] if others else []
        results_or_raise(answers)
    return nodes, launches


def _make_requests(
    connected: ConnectedCluster,
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None" = None,
    next_life: "NextLife | None" = None,
    refused: Collection[str] = (),
) -> tuple[ConnectedCluster, dict[int, Launch], Callable[..., object]]:
    """Return the cluster with the job's environment, the launch requests by node, and the file sender.

    The function first claims the right to start jobs, and queries all nodes for running jobs and taken names.
    The claim is on the cluster's first node, and lasts until that node launches the job or receives Unclaim.
    """
    from awsddp.nodes.sync import push

    session, fleet = connected.session, connected.fleet
    requested = session.job_spec.job
    commit = run_in_thread(read_commit, Path(session.job_spec.sync.workdir), results=requested.results)
    used = sorted({rank.node for rank in ranks})
    ports = {used[0]: launch_requests.list_job_ports()}
    requests = {
        node: messages.Slots(ports=ports.get(node, ()), gpus=requested.gpus_on.get(node, ()))
        for node in sorted({*used, *fleet.nodes})
    }
    slots = _claim_and_query(fleet, requests)
    release_unknown_jobs(
        connected.cluster, connected.cluster.nodes, {node: slots[node].jobs for node in slots}
    )
    answers = {node: slots[node] for node in used}
    after, job = resolve_after(session, answers), next_job_name(connected.cluster, slots, refused)
    # A waiting job gets its own copy of the project folder, because running jobs use theirs.
    folder = requested.work_folder if requested.after is None else f"work-{job}"
    sending = partial(push, listing, fleet, folder=folder, nodes=set(used), on_event=session.on_event)
    connected, spec = ensure_environment(connected, send_files=sending)
    if spec.data.sources:
        from awsddp.storage.datasets import copy_data_to_nodes

        copy_data_to_nodes(connected, used, spec)
    slot = launch_requests.choose_slot(answers, first=used[0])
    nodes = [node for node in connected.cluster.nodes if node.node in used]
    resume = f"{checkpoint.folder}/{checkpoint.name}" if checkpoint else None
    record, (name, dirty) = connected.cluster.record, commit.result()
    price = record.price_usd_per_hour
    facts: dict[str, Any] = {
        "resumed": checkpoint.job if checkpoint else None,
        **({"run_id": checkpoint.run_id} if checkpoint and checkpoint.run_id else {}),
        "commit": name,
        "dirty": dirty,
        "instance_type": record.instance_type,
        "price_usd_per_hour": None if price is None else round(price / record.nodes * len(used), 6),
    }
    if next_life is not None:
        facts |= {
            "run_id": next_life.run_id,
            "recoveries": to_builtins(next_life.recoveries),
        }
    launches = launch_requests.make_launch_requests(
        _with_script(connected.cluster, spec),
        job=job,
        ranks=ranks,
        hosts=make_hosts(nodes, record.prepared_by_node, session.job_spec, folder=folder, resume=resume),
        slot=slot,
        requested_spec=connected.cluster.job_spec,
        facts=facts,
        after=after,
    )
    if spec.notify.url is not None:
        from awsddp.job.notify import add_notifiers

        add_notifiers(connected, launches)
    return connected, launches, sending


def _claim_and_query(fleet: "Fleet", requests: Mapping[int, messages.Slots]) -> dict[int, Slots]:
    """Claim the right to start jobs, and return the answers to `requests` under this claim. Raises InUse.

    The claim and the requests share one round trip. The requests are sent again if another client held the
    claim in between, if a node did not answer, or if a job is running that some nodes may not have reported.
    """
    first, began, claimant = min(fleet.nodes), time.monotonic(), describe_client("train")
    turns: dict[int, list[messages.Request[Any]]] = {node: [request] for node, request in requests.items()}
    turns[first] = [messages.Claim(owner=claimant, wait_s=0), *turns.get(first, [])]
    responses = call_nodes_in_sequence(fleet, turns)
    claimed, answers = responses[first][0], {node: responses[node][-1] for node in requests}
    is_mine = isinstance(claimed, ClaimResult) and claimed.free_s >= time.monotonic() - began
    are_free = all(isinstance(answer, Slots) and not any(answer.jobs.values()) for answer in answers.values())
    if is_mine and are_free:
        return answers
    call_nodes(fleet, {first: messages.Claim(owner=claimant, wait_s=CLAIM_S)}, timeout_s=CLAIM_S + ANSWER_S)
    return call_nodes(fleet, requests)


def resolve_after(session: Session, answers: Mapping[int, Slots]) -> tuple[str, ...]:
    """Return the jobs to wait for: the job in `job.after`, and all jobs that occupy the nodes now.

    `answers` are the nodes' answers to `messages.Slots`. Raises InUse if `job.after` is not set and a job
    occupies the nodes, and UsageError or NotFoundError if `job.after` does not name exactly one job on the
    nodes.
    """
    requested = session.job_spec.job.after
    blocking = {job: nodes for slots in answers.values() for job, nodes in slots.jobs.items() if nodes}
    if requested is None:
        named = session.job_spec.job.name
        is_taken = any(named in slots.jobs for slots in answers.values())
        name = f" --name {named}" if named and not is_taken else ""
        for job, nodes in blocking.items():
            raise InUse(
                f"job {job} runs on {', '.join(map(node_name, nodes))}",
                f"a node runs one job at a time{', and waiting jobs start first' * (len(blocking) > 1)}",
                f"awsddp logs -f {job}   # wait for its end and its results\n"
                f"awsddp cancel {job}   # or end it\n"
                f"awsddp train --after {job}{name}   # or let this job wait",
            )
        return ()
    reported = list(dict.fromkeys(job for slots in answers.values() for job in slots.jobs))
    if requested != "all":
        requested = JobRegistry(session).resolve_name(requested, also_reported=reported) or (
            reported[-1] if reported else "last"
        )
    if requested not in (*reported, "all"):
        raise NotFoundError(
            f"no job {requested} on the nodes of this job",
            f"the nodes report: {', '.join(reported) or 'none'}",
            "awsddp jobs   # and their nodes",
        )
    return tuple(job for job in reported if job == requested or job in blocking)


def _keep_disks(cluster: LocatedCluster, nodes: Sequence[Node], job: str) -> None:
    """Make EC2 keep the nodes' disks at a poweroff, and tag the nodes with the job. Raises CloudError."""
    from awsddp.aws.power import keep_on_poweroff

    with cluster.session.folder.lock("train", part="tags", wait_s=TAG_CHANGE_S):
        keep_on_poweroff(cluster.aws, nodes, job)


@contextlib.contextmanager
def _roll_back(connected: ConnectedCluster, nodes: list[Node], launch: Launch) -> Iterator[set[int]]:
    """After an error, end the ranks of this launch and remove its tags from the nodes.

    Yields a set of nodes to exclude: nodes on which another launch has a job with the same name. These nodes
    keep their tags. If one of `nodes` cannot be reached, all nodes keep their tags; this is safe.
    """
    from awsddp.aws.power import release

    others: set[int] = set()
    try:
        yield others
    except BaseException:
        with contextlib.suppress(AwsddpError):
            end_ranks(connected, launch.job, grace_s=0, launch=launch.launch)
            if {node.node for node in nodes} <= set(connected.fleet.responsive_nodes):
                with connected.session.folder.lock("train", part="tags", wait_s=TAG_CHANGE_S):
                    release(
                        connected.cluster.aws, [node for node in nodes if node.node not in others], launch.job
                    )
        raise


def _with_script(cluster: LocatedCluster, spec: JobSpec) -> JobSpec:
    """Return the job's spec. If the job has no script, the bundled program becomes the job's script."""
    if spec.job.script is not None:
        return spec
    script = f"{cluster.record.prepared[0].home}/{REMOTE_DIR}/{BUNDLED}/{BUNDLED_SCRIPT}"
    return replace(spec, job=replace(spec.job, script=script, module=False))


def check_job_name(session: Session, name: str) -> None:
    """Raise UsageError for an invalid or reserved name, or a name that has a results folder."""
    another, folder = "choose another --name", session.results / name
    if not _NAME.fullmatch(name):
        characters = "use up to 64 letters, digits, dots, dashes and underscores"
        raise UsageError(f"invalid job name {name!r}", "", characters)
    if name in _RESERVED:
        why = "--after and --resume use it as a keyword"
        raise UsageError(f"job name {name!r} is reserved", why, another)
    if folder.exists():
        raise NameTaken(f"job {name} already exists", _describe_folder(session, name), another)


def _describe_folder(session: Session, name: str) -> str:
    """Return a string with a job's state, if known, and the size of its results folder."""
    folder, record = session.results / name, session.folder.read()
    job = read_job(folder)
    recorded = [job] if job else [seen for seen in record.jobs if seen.job == name] if record else []
    states = [seen.state for seen in recorded]
    files = [path for path in folder.rglob("*") if path.is_file()]
    content = files_text(len(files), sum(path.stat().st_size for path in files)) if files else "it is empty"
    return f"{folder} exists: {', '.join([*states, content])}"


def next_job_name(cluster: LocatedCluster, answers: Mapping[int, Slots], refused: Collection[str]) -> str:
    """Return the configured job name, or else the script's name with the next free number.

    A numbered name is not in `refused`, and no job has it on the nodes, in the nodes' tags, in the cluster's
    record or in the results folder. Raises UsageError if the configured name is taken.
    """
    requested, results = cluster.session.job_spec.job.name, cluster.session.results
    if requested is not None:
        if why := _why_taken(cluster, requested, answers):
            raise NameTaken(f"job {requested} already exists", why, "choose another --name")
        return requested
    taken = {job for answer in answers.values() for job in answer.jobs}.union(cluster.unfetched_jobs, refused)
    stem = Path(cluster.session.job_spec.job.script or BUNDLED_SCRIPT).name.removesuffix(".py")
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:40] or "job"
    taken.update((job.job for job in cluster.record.jobs), (path.name for path in results.glob(f"{stem}-*")))
    numbered = (re.fullmatch(rf"{re.escape(stem)}-(\d{{1,6}})", name, re.ASCII) for name in taken)
    highest = max((int(match[1]) for match in numbered if match), default=0)
    names = (f"{stem}-{number}" for number in count(highest + 1))
    return next(name for name in names if name not in taken and not (results / name).exists())


def _why_taken(cluster: LocatedCluster, name: str, answers: Mapping[int, Slots]) -> str:
    """Return why a job name is taken, or "" if the name is free.

    A name is taken if a job on a node, a tag of a node that did not answer, or a results folder has the name.
    """
    nodes = [node_name(node) for node, answer in sorted(answers.items()) if name in answer.jobs]
    if nodes:
        return f"{', '.join(nodes)} has a job with that name: awsddp jobs {name}"
    live = cluster.listing.live if cluster.listing is not None else ()
    tagged = [node_name(node.node) for node in live if node.node not in answers and name in node.unfetched]
    if tagged:
        return f"{', '.join(tagged)} holds results of a job with that name, according to its tag"
    return _describe_folder(cluster.session, name) if (cluster.session.results / name).exists() else ""
