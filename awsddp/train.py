"""train: check, lay out the ranks, send the files, launch, stream the logs, fetch the results.

From a job to its ranks: the right to start it, its name and slot, its files, environment, supervisors.
"""

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

from awsddp.answers import Claimed, Slots
from awsddp.config import overlaid, words_of
from awsddp.data import bring, bring_checkpoint, check_sources
from awsddp.errors import AwsddpError, InUse, NotFoundError, UsageError
from awsddp.follow import attend
from awsddp.jobs import protocol
from awsddp.jobs.files import Checkpoint, check_script, commit_of
from awsddp.jobs.health import preflight
from awsddp.jobs.protocol import ANSWER_S, NameTaken, answers_in_turn, answers_of, ask
from awsddp.jobs.ranks import Host, Rank, ordered, ranks_on, ranks_text
from awsddp.jobs.supervisor import requests
from awsddp.jobs.supervisor.requests import Launch
from awsddp.known import checkpoint_of, end_ranks, full_name
from awsddp.local.client import check_memory
from awsddp.parallel import both, soon, split
from awsddp.plan.environment import make_environment_plan
from awsddp.plan.indexes import LOGIN
from awsddp.plan.project import source_folders
from awsddp.reach import listed_files
from awsddp.records import ACTIVE, JobNode, JobRecord, Node, RankResult
from awsddp.release import owner, release_unknown
from awsddp.report import amount, iso, node_name
from awsddp.resources import BUNDLED, BUNDLED_SCRIPT
from awsddp.results import check_results_dir, job_result, saved_job
from awsddp.returns import JobDocument
from awsddp.saving import claim, rehearsed
from awsddp.spec import JobSpec
from awsddp.state import TAGS_S, Record
from awsddp.values import data_sources, gpus_of

if TYPE_CHECKING:
    from awsddp.cluster import Cluster
    from awsddp.nodes.sync import Listing
    from awsddp.nodes.transport import Fleet
    from awsddp.plan.records import LaunchPlan


CLAIM_S = 60.0
"""How long another client, here or elsewhere, may be at it, starting a job."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WORDS = ("all", "last")
_NAMES = 5
"""How many automatic names may be taken by others in the moment of the launch."""


def train(cluster: "Cluster", *, on_lines: Callable[[bytes], None], detach: bool = False) -> JobDocument:
    """Run a job to its end, fetch its results, and return it as the `train` document.

    With `detach` return once the ranks run; `logs` follows the job and fetches its results. `on_lines` gets
    the labelled lines of the ranks as they arrive. Raises UsageError for an invalid job, InUse where another
    job runs, NotFoundError or NodeError for a cluster that is not ready, Interrupted after Ctrl-C.
    """
    from awsddp.unsent import with_named_data

    check(cluster, detach=detach)
    checkpoint = checkpoint_of(cluster)
    if checkpoint is not None:
        cluster.say(f"resuming from {checkpoint.shown}")
    if cluster.verb == "train" and cluster.folder.read() is not None:  # `run` asks before its `up`
        cluster = with_named_data(cluster)
    listing = listed_files(cluster)
    with cluster.ready() as cluster:
        ranks = _layout(cluster)
        protocol.check_spec(cluster.job_spec, nodes=ranks[0].nnodes)
        if cluster.record.pretended and cluster.job_spec.job.after is None:
            check_memory(len(ranks), nodes=ranks[0].nnodes)
        _say_unfetched(cluster)
        rehearsed(cluster)
        with cluster.connect():
            try:
                job = start(cluster, ranks, listing, checkpoint)
            except InUse as busy:
                if detach:
                    busy.next = busy.next.replace("awsddp train", "awsddp train --detach")
                raise
            if detach:
                return job_result(cluster, job)
            return attend(cluster, job, on_lines=on_lines)


def _say_unfetched(cluster: "Cluster") -> None:
    """Name jobs whose results this one may overwrite on the nodes: it works in the same synced folder."""
    ended = {job.job: job for job in cluster.record.jobs if job.state not in ACTIVE}
    names = [name for name in cluster.unfetched if name in ended and not _is_saved(ended[name])]
    if names and cluster.job_spec.job.after is None:
        named, one = ", ".join(names), names[-1]
        cluster.say(
            f"what this job overwrites of the results of {named} is lost: awsddp fetch {one}   # before"
        )


def _is_saved(job: JobRecord) -> bool:
    return job.saving is not None and job.saving.is_whole


def check(cluster: "Cluster", *, detach: bool) -> None:
    """Refuse a missing script, an invalid name or placeholder, and an unset secret, before any cost; without
    `detach` also results that cannot be written here.

    Raises UsageError, ConfigError.
    """
    asked = cluster.job_spec.job
    protocol.check_spec(cluster.job_spec, nodes=1)
    check_results_dir(cluster, is_used=not detach)
    check_sources(cluster.job_spec)
    make_environment_plan(cluster.job_spec.env, internet=None, driver=None)
    if asked.name is not None:
        _check_name(cluster, asked.name)
    if asked.script is not None:
        check_script(Path(cluster.job_spec.sync.workdir), asked.script, module=asked.module)


def _check_name(cluster: "Cluster", name: str) -> None:
    """Raise UsageError for a name that no job may have, or that one whose results are here has."""
    another, folder = "choose another --name", cluster.results / name
    if not _NAME.fullmatch(name):
        characters = "use up to 64 letters, digits, dots, dashes and underscores"
        raise UsageError(f"invalid job name {name!r}", "", characters)
    if name in _WORDS:
        why = "--after and --resume use it as a keyword"
        raise UsageError(f"job name {name!r} is reserved", why, another)
    if folder.exists():
        raise UsageError(f"job {name} already exists", _content(cluster, name), another)


def _content(cluster: "Cluster", name: str) -> str:
    """Return what the folder of a job's results holds, and how the job ended if that is known."""
    folder, record = cluster.results / name, cluster.folder.read()
    job = saved_job(folder)
    states = [job.state] if job else [one.state for one in record.jobs if one.job == name] if record else []
    files = [path for path in folder.rglob("*") if path.is_file()]
    held = amount(len(files), sum(path.stat().st_size for path in files)) if files else "it is empty"
    return f"{folder} exists: {', '.join([*states, held])}"


def _layout(cluster: "Cluster") -> tuple[Rank, ...]:
    requested = cluster.job_spec.job
    found = cluster.record.found
    ranks = ranks_on(requested, {node.node: found[node.node].gpus for node in cluster.nodes})
    if requested.launcher_name != "torchrun":
        return ranks
    return ordered(ranks, {node.node: str(node.private_ip) for node in cluster.nodes})


def check_ranks(cluster: "Cluster", plan: "LaunchPlan") -> None:
    """Refuse ranks that the nodes of a plan, or of its alternatives, could not carry. Raises UsageError."""
    for one in (plan, *plan.alternatives):
        ranks = ranks_on(cluster.job_spec.job, dict.fromkeys(range(one.nodes), one.job_gpus))
        protocol.check_spec(cluster.job_spec, nodes=ranks[0].nnodes)
        if one.pretended:
            check_memory(len(ranks), nodes=ranks[0].nnodes)


def start(
    cluster: "Cluster", ranks: tuple[Rank, ...], listing: "Listing", checkpoint: "Checkpoint | None" = None
) -> JobRecord:
    """Send the files and start the job; one client at a time does so, on all machines.

    Nothing is sent while a job runs on the nodes, and nothing starts unless the nodes are fit (`preflight`)
    and AWS agreed that a poweroff keeps their disks. What fails is undone. Where another client, whose claim
    was not known, has taken the automatic name meanwhile, the next one is used. Raises InUse, UsageError for
    a name that is taken, CloudError, NodeError.
    """
    folder = cluster.folder
    refused: list[str] = []
    with folder.lock("train", wait_s=CLAIM_S):
        for attempt in count(1):
            try:
                nodes, launches = _launched(cluster, ranks, listing, checkpoint, refused)
                break
            except NameTaken:
                if cluster.job_spec.job.name is not None or attempt == _NAMES:
                    raise
        launch = next(iter(launches.values()))
        name = launch.job
        if (first := min(cluster.fleet.nodes)) not in launches:  # a launch there would have ended the claim
            with contextlib.suppress(AwsddpError):
                ask(cluster.fleet, {first: requests.Unclaim()})
    job = JobRecord(
        job=name,
        state="waiting" if launch.after else "running",
        cause=None,
        world_size=len(ranks),
        started=iso(datetime.now(UTC)),
        **launch.facts,
        ranks=tuple(
            RankResult(rank=one.rank, local_rank=one.local_rank, node=one.node, exit_code=None, seconds=0.0)
            for one in ranks
        ),
        home=f"{cluster.job_spec.job.results}/{name}",
        nodes=tuple(JobNode(node=node.node, instance_id=node.instance_id) for node in nodes),
    )
    try:
        folder.note("train", job=name, world_size=len(ranks), home=str((cluster.results / name).absolute()))
        folder.remember(job)
    except AwsddpError as error:  # it has started all the same
        follow = f"awsddp logs -f {name}   # follow it then\nawsddp cancel {name}   # or end it"
        error.message, error.next = f"job {name} was started, but {error.message}", f"{error.next}\n{follow}"
        raise
    record, gpus = cluster.record, cluster.record.found[ranks[0].node].gpus
    on_ec2 = record.gpus_per_node if record.pretended else gpus
    if launch.after:
        cluster.say(f"job {name} starts when these have ended: {', '.join(launch.after)}")
    else:
        cluster.say(f"job {name} runs {ranks_text(cluster.job_spec, ranks, gpus=gpus, on_ec2=on_ec2)}")
    return job


def _launched(
    cluster: "Cluster",
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None",
    refused: list[str],
) -> tuple[list[Node], dict[int, Launch]]:
    """Start the job under a name that is not `refused`, and return its nodes and what they were sent.

    Raises NameTaken, once the name is among those `refused`, where a node has a job of that name by now.
    """
    launches, sending = _requests(cluster, ranks, listing, checkpoint, refused)
    nodes = [node for node in cluster.nodes if node.node in launches]
    launch = next(iter(launches.values()))
    with _undone(cluster, nodes, launch) as others:
        checked = soon(preflight, cluster.fleet, nodes, cluster.record.found, launches)
        both(
            partial(sending, bundled=cluster.job_spec.job.script is None),
            lambda: _keep(cluster, nodes, launch.job),
        )
        checked.result()
        if checkpoint is not None:
            bring_checkpoint(cluster, checkpoint, set(launches))
        claim(cluster, launches, refused)
        told = answers_of(cluster.fleet, launches)
        others.update(node for node, one in told.items() if isinstance(one, NameTaken))
        refused += [launch.job] if others else []
        split(told)
    return nodes, launches


def _requests(
    cluster: "Cluster",
    ranks: tuple[Rank, ...],
    listing: "Listing",
    checkpoint: "Checkpoint | None" = None,
    refused: Collection[str] = (),
) -> tuple[dict[int, Launch], Callable[..., object]]:
    """Return the launch requests by node, once the nodes have said that nothing is in the way, and what sends
    the job's files. All nodes are asked which names of jobs are taken.

    The claim, on the cluster's first node, holds until that node launches, or is told that another one did.
    """
    from awsddp.nodes.sync import push

    fleet = cluster.fleet
    commit = soon(commit_of, Path(cluster.job_spec.sync.workdir), results=cluster.job_spec.job.results)
    used = sorted({rank.node for rank in ranks})
    gpus = gpus_of(cluster.job_spec.job.on) if cluster.job_spec.job.on else {}
    ports = {used[0]: protocol.job_ports()}
    everyone = sorted({*used, *fleet.nodes})
    questions = {one: requests.Slots(ports=ports.get(one, ()), gpus=gpus.get(one, ())) for one in everyone}
    told = _claimed(fleet, questions)
    release_unknown(cluster, cluster.nodes, {node: one.jobs for node, one in told.items()})
    answers = {node: told[node] for node in used}
    after, job = awaited(cluster, answers), _free_name(cluster, told, refused)
    # A job that waits has a copy, as others use theirs.
    folder = cluster.job_spec.job.work_folder if cluster.job_spec.job.after is None else f"work-{job}"
    sending = partial(push, listing, fleet, folder=folder, nodes=set(used), on_event=cluster.on_event)
    spec = ensure_environment(cluster, send_files=sending)
    bring(cluster, used, spec)
    slot = protocol.choose_slot(answers, first=used[0])
    record, (name, dirty) = cluster.record, commit.result()
    price = record.price_usd_per_hour
    facts = {
        "options": words_of(overlaid(cluster.job_spec, record.asked)),
        "resumed": checkpoint.job if checkpoint else None,
        "commit": name,
        "dirty": dirty,
        "instance_type": record.instance_type,
        "price_usd_per_hour": None if price is None else round(price / record.nodes * len(used), 6),
    }
    launches = protocol.launch_requests(
        _spec(cluster, spec),
        job=job,
        ranks=ranks,
        hosts=_hosts(cluster, used, folder, checkpoint),
        slot=slot,
        facts=facts,
        after=after,
    )
    return launches, sending


def _claimed(fleet: "Fleet", questions: Mapping[int, requests.Slots]) -> dict[int, Slots]:
    """Return the answers to `questions`, given while no other client could launch. Raises InUse.

    The claim and they share a round trip. Where another client has held the claim meanwhile, or a job runs,
    of which some nodes may not know yet, the nodes are asked again; so, too, where one does not answer.
    """
    first, began, claimant = min(fleet.nodes), time.monotonic(), owner("train")
    turns: dict[int, list[requests.Request[Any]]] = {node: [one] for node, one in questions.items()}
    turns[first] = [requests.Claim(owner=claimant, wait_s=0), *turns.get(first, [])]
    told = answers_in_turn(fleet, turns)
    claimed, answers = told[first][0], {node: told[node][-1] for node in questions}
    is_mine = isinstance(claimed, Claimed) and claimed.free_s >= time.monotonic() - began
    if is_mine and all(isinstance(one, Slots) and not any(one.jobs.values()) for one in answers.values()):
        return answers
    ask(fleet, {first: requests.Claim(owner=claimant, wait_s=CLAIM_S)}, timeout_s=CLAIM_S + ANSWER_S)
    return ask(fleet, questions)


def awaited(cluster: "Cluster", answers: Mapping[int, Slots]) -> tuple[str, ...]:
    """Return the jobs that a job waits for: the one that it names, and all that are in its way now.

    `answers` are those to `requests.Slots`. Without a name, and "all" is one, nothing may be in the way.
    Raises InUse, UsageError, NotFoundError.
    """
    asked = cluster.job_spec.job.after
    in_the_way = {job: nodes for told in answers.values() for job, nodes in told.jobs.items() if nodes}
    if asked is None:
        named = cluster.job_spec.job.name
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
        asked = full_name(cluster, asked, known) or (known[-1] if known else "last")
    if asked not in (*known, "all"):
        raise NotFoundError(
            f"no job {asked} on the nodes of this one",
            f"they know: {', '.join(known) or 'none'}",
            "awsddp jobs   # and their nodes",
        )
    return tuple(job for job in known if job == asked or job in in_the_way)


def _free_name(cluster: "Cluster", answers: Mapping[int, Slots], refused: Collection[str]) -> str:
    """Return the job's name: the given one, else that of its script with the number that follows the highest.

    The nodes, their tags, the cluster's record and the results folder know no such job, nor is it `refused`.
    Raises UsageError for a given name that is taken.
    """
    given, results = cluster.job_spec.job.name, cluster.results
    if given is not None:
        if why := _why_taken(cluster, given, answers):
            raise UsageError(f"job {given} already exists", why, "choose another --name")
        return given
    known = {job for answer in answers.values() for job in answer.jobs}.union(cluster.unfetched, refused)
    stem = Path(cluster.job_spec.job.script or BUNDLED_SCRIPT).name.removesuffix(".py")
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:40] or "job"
    known.update((job.job for job in cluster.record.jobs), (path.name for path in results.glob(f"{stem}-*")))
    numbered = (re.fullmatch(rf"{re.escape(stem)}-(\d{{1,6}})", name, re.ASCII) for name in known)
    highest = max((int(found[1]) for found in numbered if found), default=0)
    names = (f"{stem}-{number}" for number in count(highest + 1))
    return next(name for name in names if name not in known and not (results / name).exists())


def _why_taken(cluster: "Cluster", name: str, answers: Mapping[int, Slots]) -> str:
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
    return _content(cluster, name) if (cluster.results / name).exists() else ""


def _keep(cluster: "Cluster", nodes: Sequence[Node], job: str) -> None:
    """Have AWS keep the nodes' disks at a poweroff, for the job. Raises CloudError."""
    from awsddp.aws.power import keep_on_poweroff

    with cluster.folder.lock("train", part="tags", wait_s=TAGS_S):
        keep_on_poweroff(cluster.aws, nodes, job)


@contextlib.contextmanager
def _undone(cluster: "Cluster", nodes: list[Node], launch: Launch) -> Iterator[set[int]]:
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
            end_ranks(cluster, launch.job, grace_s=0, launch=launch.launch)
            if {node.node for node in nodes} <= set(cluster.fleet.answering):
                with cluster.folder.lock("train", part="tags", wait_s=TAGS_S):
                    release(cluster.aws, [one for one in nodes if one.node not in others], launch.job)
        raise


def _spec(cluster: "Cluster", spec: JobSpec) -> JobSpec:
    """Return the job's spec with the bundled program as its script where none is named."""
    if spec.job.script is not None:
        return spec
    from awsddp.nodes.sync import REMOTE_DIR

    script = f"{cluster.record.prepared[0].home}/{REMOTE_DIR}/{BUNDLED}/{BUNDLED_SCRIPT}"
    return replace(spec, job=replace(spec.job, script=script, module=False))


def _shows_password(file: Path, workdir: Path) -> bool:
    """Tell whether a file of requirements has a URL with a login, and lies in the synced folder."""
    is_inside = file.resolve().is_relative_to(workdir.resolve())
    return is_inside and LOGIN.search(file.read_text(encoding="utf-8", errors="replace")) is not None


def _hosts(
    cluster: "Cluster", used: Collection[int], folder: str, checkpoint: "Checkpoint | None"
) -> list[Host]:
    from awsddp.nodes.sync import REMOTE_DIR

    requested = cluster.job_spec.job
    gpus = gpus_of(requested.on) if requested.on else {}
    sources = source_folders(Path(cluster.job_spec.sync.workdir))
    data = tuple(one.name for one in data_sources(cluster.job_spec.data.sources))

    def host(node: Node) -> Host:
        prepared = cluster.record.found[node.node]
        remote = f"{prepared.home}/{REMOTE_DIR}"
        return Host(
            node=node,
            prepared=prepared,
            workdir=f"{remote}/{folder}",
            gpus=gpus.get(node.node, ()),
            sources=sources,
            data=data,
            resume=f"{remote}/{checkpoint.folder}/{checkpoint.name}" if checkpoint else None,
        )

    return [host(node) for node in cluster.nodes if node.node in used]


def ensure_environment(cluster: "Cluster", *, send_files: Callable[[], object]) -> JobSpec:
    """Build the environment on the connected nodes, remember it, and return the job with its variables.

    Without packages and setup commands the nodes get no request. Raises ConfigError, NodeError.
    """
    record = cluster.record
    job = overlaid(cluster.job_spec, record.asked)
    drivers = {one.driver for one in record.prepared}
    plan = make_environment_plan(
        job.env,
        internet=record.internet,
        driver=drivers.pop() if len(drivers) == 1 else None,
        workdir=Path(job.sync.workdir),
    )
    made: Mapping[int, str | None] = {}
    if job.env.file and _shows_password(Path(job.env.file).expanduser(), Path(job.sync.workdir)):
        why = f"{job.env.file} holds a password, and goes to the nodes with the folder"
        cluster.say(f"{why}: write ${{NAME}} there, which stands for a variable of this machine")
    if plan.has_packages or plan.setup:
        from awsddp.nodes import environments

        found = environments.ensure(
            cluster.fleet,
            plan,
            pythons={one.node: one.python for one in record.prepared},
            cache=cluster.home / "packages",
            send_files=send_files,
        )
        made = {node: one.python for node, one in found.items()} if plan.has_packages else {}
    built = {one.instance_id: made.get(one.node) for one in record.prepared}
    if any(one.environment != built[one.instance_id] for one in record.prepared):

        def with_environments(now: Record) -> Record:  # another command may have added nodes
            prepared = (
                replace(one, environment=built.get(one.instance_id, one.environment)) for one in now.prepared
            )
            return replace(now, prepared=tuple(prepared))

        cluster.change(with_environments)
    # The ranks reach the internet as their packages did; of an environment.yml's variables the user's win.
    variables = {**plan.environ, **plan.variables}
    if plan.indexes.ca:
        bundle = f"{record.prepared[0].home}/awsddp/env/ca.pem"
        variables |= dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), bundle)
    return replace(job, env=replace(job.env, variables=variables | job.env.variables))
