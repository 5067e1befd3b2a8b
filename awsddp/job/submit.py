"""Submitting a job: the right to start it, its name and slot, files, environment, launch."""

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

from awsddp.agent import messages
from awsddp.agent.messages import Launch
from awsddp.agent_client import launch_requests
from awsddp.agent_client.calls import ANSWER_S, NameTaken, answers_in_turn, answers_of, ask
from awsddp.agent_client.node_checks import preflight
from awsddp.agent_client.rank_layout import Rank, hosts_of, ranks_text
from awsddp.errors import AwsddpError, InUse, NotFoundError, UsageError
from awsddp.job.cancel import end_ranks
from awsddp.job.environment import ensure_environment
from awsddp.job.registry import JobRegistry
from awsddp.job.release import owner, release_unknown
from awsddp.job.script import commit_of
from awsddp.model.node_answers import Claimed, Slots
from awsddp.model.records import JobNode, JobRecord, Node, RankResult
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.settings.spec import JobSpec
from awsddp.state import TAGS_S
from awsddp.storage.checkpoints import Checkpoint
from awsddp.storage.results_dir import saved_job
from awsddp.util.format import amount, iso, node_name
from awsddp.util.parallel import both, soon, split
from awsddp.util.shipped_files import BUNDLED, BUNDLED_SCRIPT, REMOTE_DIR

if TYPE_CHECKING:
    from awsddp.nodes.fleet import Fleet
    from awsddp.nodes.project_files import Listing

CLAIM_S = 60.0
"""How long another client, here or elsewhere, may be at it, starting a job."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WORDS = ("all", "last")
TRIES = 5
"""How many automatic names may be taken by others in the moment of the launch."""


def start(
    connected: ConnectedCluster,
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None" = None,
) -> JobRecord:
    """Send the files and start the job; one client at a time does so, on all machines.

    Nothing is sent while a job runs on the nodes, and nothing starts unless the nodes are fit (`preflight`)
    and AWS agreed that a poweroff keeps their disks. What fails is undone. Where another client, whose claim
    was not known, has taken the automatic name meanwhile, the next one is used. Raises InUse, UsageError for
    a name that is taken, CloudError, NodeError.
    """
    session = connected.session
    nodes, launches = _launch_alone(connected, ranks, listing, checkpoint)
    launch = next(iter(launches.values()))
    job = _record_of(session, launch, ranks, nodes)
    _write_down(session, job)
    record, gpus = connected.cluster.record, connected.cluster.record.found[ranks[0].node].gpus
    on_ec2 = record.gpus_per_node if record.pretended else gpus
    if launch.after:
        session.say(f"job {job.job} starts when these have ended: {', '.join(launch.after)}")
    else:
        session.say(f"job {job.job} runs {ranks_text(session.job_spec, ranks, gpus=gpus, on_ec2=on_ec2)}")
    return job


def _launch_alone(
    connected: ConnectedCluster,
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None",
) -> tuple[list[Node], dict[int, Launch]]:
    """Start the job while no other client here may, under the next automatic name where one is taken; return
    its nodes and what they were sent.
    """
    session, fleet = connected.session, connected.fleet
    refused: list[str] = []
    with session.folder.lock("train", wait_s=CLAIM_S):
        for attempt in count(1):
            try:
                nodes, launches = _launched(connected, ranks, listing, checkpoint, refused)
                break
            except NameTaken:
                if session.job_spec.job.name is not None or attempt == TRIES:
                    raise
        if (first := min(fleet.nodes)) not in launches:  # a launch there would have ended the claim
            with contextlib.suppress(AwsddpError):
                ask(fleet, {first: messages.Unclaim()})
    return nodes, launches


def _record_of(session: Session, launch: Launch, ranks: Sequence[Rank], nodes: Sequence[Node]) -> JobRecord:
    """Return the job that has just been launched."""
    return JobRecord(
        job=launch.job,
        state="waiting" if launch.after else "running",
        cause=None,
        world_size=len(ranks),
        started=iso(datetime.now(UTC)),
        **launch.facts,
        ranks=tuple(
            RankResult(rank=one.rank, local_rank=one.local_rank, node=one.node, exit_code=None, seconds=0.0)
            for one in ranks
        ),
        home=f"{session.job_spec.job.results}/{launch.job}",
        nodes=tuple(JobNode(node=node.node, instance_id=node.instance_id) for node in nodes),
    )


def _write_down(session: Session, job: JobRecord) -> None:
    """Write a job that has started to the ledger and the record. Raises AwsddpError that says so."""
    name, home = job.job, str((session.results / job.job).absolute())
    try:
        session.folder.note("train", job=name, world_size=job.world_size, home=home)
        session.folder.remember(job)
    except AwsddpError as error:
        follow = f"awsddp logs -f {name}   # follow it then\nawsddp cancel {name}   # or end it"
        error.message, error.next = f"job {name} was started, but {error.message}", f"{error.next}\n{follow}"
        raise


def _launched(
    connected: ConnectedCluster,
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None",
    refused: list[str],
) -> tuple[list[Node], dict[int, Launch]]:
    """Start the job under a name that is not `refused`, and return its nodes and what they were sent.

    Raises NameTaken, once the name is among those `refused`, where a node has a job of that name by now.
    """
    connected, launches, sending = _requests(connected, ranks, listing, checkpoint, refused)
    nodes = [node for node in connected.cluster.nodes if node.node in launches]
    launch = next(iter(launches.values()))
    with _undone(connected, nodes, launch) as others:
        checked = soon(preflight, connected.fleet, nodes, connected.cluster.record.found, launches)
        both(
            partial(sending, bundled=connected.session.job_spec.job.script is None),
            lambda: _keep(connected.cluster, nodes, launch.job),
        )
        checked.result()
        if checkpoint is not None:
            from awsddp.storage.datasets import bring_checkpoint

            bring_checkpoint(connected, checkpoint, set(launches))
        if connected.session.job_spec.job.save_to is not None:
            from awsddp.job.save_to_s3 import claim

            claim(connected, launches, refused)
        told = answers_of(connected.fleet, launches)
        others.update(node for node, one in told.items() if isinstance(one, NameTaken))
        refused += [launch.job] if others else []
        split(told)
    return nodes, launches


def _requests(
    connected: ConnectedCluster,
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None" = None,
    refused: Collection[str] = (),
) -> tuple[ConnectedCluster, dict[int, Launch], Callable[..., object]]:
    """Return the cluster with the environment of the job, the launch requests by node, once the nodes have
    said that nothing is in the way, and what sends the job's files. All nodes are asked which names of jobs
    are taken.

    The claim, on the cluster's first node, holds until that node launches, or is told that another one did.
    """
    from awsddp.nodes.sync import push

    session, fleet = connected.session, connected.fleet
    asked = session.job_spec.job
    commit = soon(commit_of, Path(session.job_spec.sync.workdir), results=asked.results)
    used = sorted({rank.node for rank in ranks})
    ports = {used[0]: launch_requests.job_ports()}
    everyone = sorted({*used, *fleet.nodes})
    questions = {
        one: messages.Slots(ports=ports.get(one, ()), gpus=asked.gpus_on.get(one, ())) for one in everyone
    }
    told = _claimed(fleet, questions)
    release_unknown(
        connected.cluster, connected.cluster.nodes, {node: one.jobs for node, one in told.items()}
    )
    answers = {node: told[node] for node in used}
    after, job = awaited(session, answers), next_job_name(connected.cluster, told, refused)
    # A job that waits has a copy, as others use theirs.
    folder = asked.work_folder if asked.after is None else f"work-{job}"
    sending = partial(push, listing, fleet, folder=folder, nodes=set(used), on_event=session.on_event)
    connected, spec = ensure_environment(connected, send_files=sending)
    if spec.data.sources:
        from awsddp.storage.datasets import bring

        bring(connected, used, spec)
    slot = launch_requests.choose_slot(answers, first=used[0])
    nodes = [node for node in connected.cluster.nodes if node.node in used]
    resume = f"{checkpoint.folder}/{checkpoint.name}" if checkpoint else None
    record, (name, dirty) = connected.cluster.record, commit.result()
    price = record.price_usd_per_hour
    facts = {
        "resumed": checkpoint.job if checkpoint else None,
        "commit": name,
        "dirty": dirty,
        "instance_type": record.instance_type,
        "price_usd_per_hour": None if price is None else round(price / record.nodes * len(used), 6),
    }
    launches = launch_requests.launch_requests(
        _spec(connected.cluster, spec),
        job=job,
        ranks=ranks,
        hosts=hosts_of(nodes, record.found, session.job_spec, folder=folder, resume=resume),
        slot=slot,
        asked=connected.cluster.job_spec,
        facts=facts,
        after=after,
    )
    return connected, launches, sending


def _claimed(fleet: "Fleet", questions: Mapping[int, messages.Slots]) -> dict[int, Slots]:
    """Return the answers to `questions`, given while no other client could launch. Raises InUse.

    The claim and they share a round trip. Where another client has held the claim meanwhile, or a job runs,
    of which some nodes may not know yet, the nodes are asked again; so, too, where one does not answer.
    """
    first, began, claimant = min(fleet.nodes), time.monotonic(), owner("train")
    turns: dict[int, list[messages.Request[Any]]] = {node: [one] for node, one in questions.items()}
    turns[first] = [messages.Claim(owner=claimant, wait_s=0), *turns.get(first, [])]
    told = answers_in_turn(fleet, turns)
    claimed, answers = told[first][0], {node: told[node][-1] for node in questions}
    is_mine = isinstance(claimed, Claimed) and claimed.free_s >= time.monotonic() - began
    if is_mine and all(isinstance(one, Slots) and not any(one.jobs.values()) for one in answers.values()):
        return answers
    ask(fleet, {first: messages.Claim(owner=claimant, wait_s=CLAIM_S)}, timeout_s=CLAIM_S + ANSWER_S)
    return ask(fleet, questions)


def awaited(session: Session, answers: Mapping[int, Slots]) -> tuple[str, ...]:
    """Return the jobs that a job waits for: the one that it names, and all that are in its way now.

    `answers` are those to `messages.Slots`. Without a name, and "all" is one, nothing may be in the way.
    Raises InUse, UsageError, NotFoundError.
    """
    asked = session.job_spec.job.after
    in_the_way = {job: nodes for told in answers.values() for job, nodes in told.jobs.items() if nodes}
    if asked is None:
        named = session.job_spec.job.name
        is_taken = any(named in told.jobs for told in answers.values())
        name = f" --name {named}" if named and not is_taken else ""
        for job, nodes in in_the_way.items():
            raise InUse(
                f"job {job} runs on {', '.join(map(node_name, nodes))}",
                f"a node runs one job at a time{', and those that wait come first' * (len(in_the_way) > 1)}",
                f"awsddp logs -f {job}   # wait for its end and its results\n"
                f"awsddp cancel {job}   # or end it\n"
                f"awsddp train --after {job}{name}   # or let this one wait",
            )
        return ()
    known = list(dict.fromkeys(job for told in answers.values() for job in told.jobs))
    if asked != "all":
        asked = JobRegistry(session).name(asked, told=known) or (known[-1] if known else "last")
    if asked not in (*known, "all"):
        raise NotFoundError(
            f"no job {asked} on the nodes of this one",
            f"they know: {', '.join(known) or 'none'}",
            "awsddp jobs   # and their nodes",
        )
    return tuple(job for job in known if job == asked or job in in_the_way)


def _keep(cluster: LocatedCluster, nodes: Sequence[Node], job: str) -> None:
    """Have AWS keep the nodes' disks at a poweroff, for the job. Raises CloudError."""
    from awsddp.aws.power import keep_on_poweroff

    with cluster.session.folder.lock("train", part="tags", wait_s=TAGS_S):
        keep_on_poweroff(cluster.aws, nodes, job)


@contextlib.contextmanager
def _undone(connected: ConnectedCluster, nodes: list[Node], launch: Launch) -> Iterator[set[int]]:
    """Undo what was begun where it fails: this launch's job, and the tags that only it has written.

    They stay, which is safe, where the nodes cannot be asked to end what may have started, and on the nodes
    that are yielded, to be filled: where another launch has a job of that name.
    """
    from awsddp.aws.power import release

    others: set[int] = set()
    try:
        yield others
    except BaseException:
        with contextlib.suppress(AwsddpError):
            end_ranks(connected, launch.job, grace_s=0, launch=launch.launch)
            if {node.node for node in nodes} <= set(connected.fleet.answering):
                with connected.session.folder.lock("train", part="tags", wait_s=TAGS_S):
                    release(
                        connected.cluster.aws, [one for one in nodes if one.node not in others], launch.job
                    )
        raise


def _spec(cluster: LocatedCluster, spec: JobSpec) -> JobSpec:
    """Return the job's spec with the bundled program as its script where none is named."""
    if spec.job.script is not None:
        return spec
    script = f"{cluster.record.prepared[0].home}/{REMOTE_DIR}/{BUNDLED}/{BUNDLED_SCRIPT}"
    return replace(spec, job=replace(spec.job, script=script, module=False))


def check_job_name(session: Session, name: str) -> None:
    """Raise UsageError for a name that no job may have, or that one whose results are here has."""
    another, folder = "choose another --name", session.results / name
    if not _NAME.fullmatch(name):
        characters = "use up to 64 letters, digits, dots, dashes and underscores"
        raise UsageError(f"invalid job name {name!r}", "", characters)
    if name in _WORDS:
        why = "--after and --resume use it as a keyword"
        raise UsageError(f"job name {name!r} is reserved", why, another)
    if folder.exists():
        raise UsageError(f"job {name} already exists", _content(session, name), another)


def _content(session: Session, name: str) -> str:
    """Return what the folder of a job's results holds, and how the job ended if that is known."""
    folder, record = session.results / name, session.folder.read()
    job = saved_job(folder)
    states = [job.state] if job else [one.state for one in record.jobs if one.job == name] if record else []
    files = [path for path in folder.rglob("*") if path.is_file()]
    held = amount(len(files), sum(path.stat().st_size for path in files)) if files else "it is empty"
    return f"{folder} exists: {', '.join([*states, held])}"


def next_job_name(cluster: LocatedCluster, answers: Mapping[int, Slots], refused: Collection[str]) -> str:
    """Return the job's name: the given one, else that of its script with the number that follows the highest.

    The nodes, their tags, the cluster's record and the results folder know no such job, nor is it `refused`.
    Raises UsageError for a given name that is taken.
    """
    given, results = cluster.session.job_spec.job.name, cluster.session.results
    if given is not None:
        if why := _why_taken(cluster, given, answers):
            raise UsageError(f"job {given} already exists", why, "choose another --name")
        return given
    known = {job for answer in answers.values() for job in answer.jobs}.union(cluster.unfetched, refused)
    stem = Path(cluster.session.job_spec.job.script or BUNDLED_SCRIPT).name.removesuffix(".py")
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:40] or "job"
    known.update((job.job for job in cluster.record.jobs), (path.name for path in results.glob(f"{stem}-*")))
    numbered = (re.fullmatch(rf"{re.escape(stem)}-(\d{{1,6}})", name, re.ASCII) for name in known)
    highest = max((int(found[1]) for found in numbered if found), default=0)
    names = (f"{stem}-{number}" for number in count(highest + 1))
    return next(name for name in names if name not in known and not (results / name).exists())


def _why_taken(cluster: LocatedCluster, name: str, answers: Mapping[int, Slots]) -> str:
    """Return why no job may have a name, "" where it is free: a node has such a job, or is tagged with it and
    was not asked, or results are here.
    """
    nodes = [node_name(node) for node, answer in sorted(answers.items()) if name in answer.jobs]
    if nodes:
        return f"{', '.join(nodes)} has a job of that name: awsddp jobs {name}"
    live = cluster.listed.live if cluster.listed is not None else ()
    tagged = [node_name(one.node) for one in live if one.node not in answers and name in one.unfetched]
    if tagged:
        return f"{', '.join(tagged)} holds results of a job of that name, by its tag"
    return _content(cluster.session, name) if (cluster.session.results / name).exists() else ""
