"""doctor: what a launch needs, and what the nodes have. Changes nothing."""

import contextlib
import json
import secrets as random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from awsddp.agent import messages
from awsddp.agent_client import launch_requests, node_checks
from awsddp.agent_client.calls import ANSWER_S, ask
from awsddp.agent_client.rank_layout import Host, layout
from awsddp.compat.types import network_gbyte_s, quota_of
from awsddp.errors import AwsddpError, ConfigError, NodeError, NoRegion, NotFoundError
from awsddp.job.save_to_s3 import rehearsed, with_s3
from awsddp.model import node_answers
from awsddp.model.documents import DoctorDocument, QuotaDocument
from awsddp.model.records import Check
from awsddp.nodes import rsync
from awsddp.plan.records import Facts, names
from awsddp.plan.requests import Values
from awsddp.session.connect import connect_reachable, jump_of, preconnected_cluster, told_jobs
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.session.locate import aws_of, facts_of, target_for
from awsddp.session.next_steps import advised
from awsddp.settings.spec import JobSection
from awsddp.util.shipped_files import shipped_folder, template

GROUP_S, RANK_S, MOST_GROUP_S = 60.0, 2.0, 180.0
"""How long ranks may take to import torch, to form a process group and to time an all-reduce: so long, so
much longer for each rank (nodes of the local cloud share CPUs), and at most."""
CLAIM_S = 5.0
LEAST_SHARE = 0.5
"""Of the network bandwidth that a type promises: below it the nodes are measured in pairs."""
LEAST_GBYTE_S = 0.005
"""So, too, where nothing is promised: no network is that slow."""
HERE_BYTES = 3_000_000
"""What each of two nodes sends here: between themselves they cannot tell which is slow."""


def before_launch(session: Session) -> DoctorDocument:
    """Return the `doctor` document of what can be checked before a launch.

    Changes nothing, but as `rehearsed`. A check that fails hides no other. Raises ConfigError where the
    cluster's name is taken elsewhere, and as `rehearsed`.
    """
    from awsddp.aws.preflight import (
        CONFIGURATION,
        OF_REGION,
        before_launch,
        failed,
        not_checked,
        uploads_check,
    )

    with target_for(session, record := session.folder.read()) as target:
        try:
            aws = aws_of(session, target)
        except ConfigError as error:
            name = "region" if isinstance(error, NoRegion) else CONFIGURATION
            return _checks(session, (failed(name, error), *not_checked(name, *OF_REGION)))
        here = rehearsed(LocatedCluster(session=session, target=target, gateway=aws))
        spec = here.session.spec

        def facts() -> Facts:
            return with_s3(here, facts_of(aws, spec, target, record))

        checks = [*before_launch(aws, spec, _stand_ins(session), facts=facts)]
        if (place := session.job_spec.job.save_to) is not None:
            checks += uploads_check(aws, place)
    return _checks(session, checks)


def _stand_ins(session: Session) -> Values:
    """Return values for what a launch would make, for calls that change nothing."""
    from awsddp.nodes.hostkeys import make_key

    ids = names(session.spec.name, random.token_hex(4))
    secrets = {"public_key": make_key("awsddp dry run").public, "user_data": "#cloud-config\n{}\n"}
    return Values(ids=ids, secrets=secrets, now=datetime.now(UTC))


def _checks(session: Session, checks: Sequence[Check]) -> DoctorDocument:
    """Return the document of the checks, and of those of this machine's programs and of a jump host."""
    found = [_tried("rsync and ssh", rsync.program), *checks]
    if (jump := jump_of(session)) is not None:
        found.append(_tried("jump host", jump.reach, jump.name))
    return checks_document(session, found)


def _tried(name: str, attempt: Callable[[], object], value: str = "") -> Check:
    """Return the check of what `attempt` returns; `value` is shown instead."""
    from awsddp.aws.preflight import failed

    try:
        found = attempt()
    except AwsddpError as error:
        return failed(name, error)
    return Check(name=name, ok=True, value=value or str(found))


def request_quota(session: Session, *, confirm: Callable[[str], None]) -> QuotaDocument:
    """Request the vCPU quota that the configuration needs, if it is too small.

    `confirm` is called with the request and raises to refuse. Raises CloudError where AWS refuses,
    ConfigError where no plan can be made or the quota is unknown.
    """
    from awsddp.plan.launch_plan import make_plan

    with target_for(session, record := session.folder.read()) as target:
        aws = aws_of(session, target)
        facts = facts_of(aws, session.spec, target, record)
        plan = make_plan(session.spec, replace(facts, quotas={}))  # as it would be with enough of it
        quota = quota_of(plan.instance_type, plan.market)
        if quota is None:
            raise ConfigError(
                f"unknown quota for {plan.market} {plan.kind.family}",
                "",
                "see https://console.aws.amazon.com/servicequotas/",
            )
        used, have = facts.used_vcpus.get(quota[0], 0), facts.quotas.get(quota[0])
        need = plan.nodes * plan.kind.vcpus + used
        told = QuotaDocument(
            quota=quota[0], name=quota[1], region=aws.region, need=need, have=have, request=None
        )
        if have is not None and have >= need:
            return told
        beside = f" and the {used} vCPUs in use" if used else ""
        known = "an unreadable number of" if have is None else f"{have:g}"
        confirm(
            f"{plan.nodes} x {plan.instance_type}{beside} need {need} vCPUs, and {quota[1]} ({quota[0]}) "
            f"allows {known} in {aws.region}. Ask AWS for {need}?"
        )
        asked = {"ServiceCode": "ec2", "QuotaCode": quota[0], "DesiredValue": float(need)}
        reply = aws.call("RequestServiceQuotaIncrease", asked, service="service-quotas")
        told.request = reply.get("RequestedQuota", {}).get("Id")
        return told


def of_nodes(session: Session) -> DoctorDocument | None:
    """Return the `doctor` document of the nodes of a cluster that this machine knows, None without one.

    It is bounded in time, and ends no job. Raises NoNodes where no node can be reached, InUse while another
    client starts a job, CloudError.
    """
    if session.folder.read() is None:
        return None
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(preconnected_cluster(session))
            connected = stack.enter_context(connect_reachable(cluster))
        except NotFoundError:
            return None
        return checks_document(session, _checkup(connected))


def checks_document(session: Session, checks: Sequence[Check]) -> DoctorDocument:
    """Return the `doctor` document of these checks."""
    return DoctorDocument(checks=tuple(replace(one, hint=advised(session, one.hint)) for one in checks))


def _checkup(connected: ConnectedCluster) -> list[Check]:
    fleet = connected.fleet
    # A node whose disk is full cannot hold the claim, and is named below.
    with contextlib.suppress(NodeError):
        ask(fleet, {min(fleet.nodes): messages.Claim(owner="`awsddp doctor`", wait_s=CLAIM_S)})
    busy = [job.job for job in told_jobs(connected, partial=True) if job.state == "running"]
    checks = _unreached(connected)
    nodes = [node for node in connected.cluster.nodes if node.node in fleet.answering]
    probes = node_checks.probed(fleet, nodes, connected.cluster.record.found, thorough=True)
    checks += [
        *node_checks.quick_checks(probes),
        *node_checks.thorough_checks(probes),
        *node_checks.dialed(fleet, probes),
    ]
    if busy:
        value = f"left out: job {', '.join(busy)} runs"
        return [*checks, Check(name="process group", ok=None, value=value)]
    fit = [node for node in probes.answers if node not in node_checks.failing(checks)]
    return [*checks, *_group_checks(connected, probes, fit)]


def _unreached(connected: ConnectedCluster) -> list[Check]:
    nodes = {node.node: node for node in connected.cluster.nodes}
    whys = {node: failure.message.partition(": ")[2] for node, failure in connected.fleet.failures.items()}
    checks = [
        node_checks.node_check(nodes[node], "login", False, why, "SSH") for node, why in sorted(whys.items())
    ]
    for node in connected.cluster.excluded:
        checks.append(
            node_checks.node_check(
                node, "login", None, connected.cluster.record.state_of(node).partition(" is ")[2]
            )
        )
    return checks


def _group_checks(
    connected: ConnectedCluster, probes: node_checks.Probes, nodes: Sequence[int]
) -> list[Check]:
    """Return the checks of a process group over all ranks of `nodes`; of parts where it is slow or hangs."""
    if len(nodes) < 2:
        return [Check(name="process group", ok=None, value="left out: fewer than two nodes are fit")]
    connected.session.say(f"forming a process group on {len(nodes)} nodes (at most {MOST_GROUP_S:g} s)")
    (whole,) = _form(connected, probes, [nodes])
    checks = [node_checks.group_check(probes, whole)]
    if whole.gbyte_s is None:
        unclear = len(nodes) > 2 and not node_checks.failing(checks)
    else:
        promised = _promise(connected.cluster)
        unclear = whole.gbyte_s < (LEAST_GBYTE_S if promised is None else promised * LEAST_SHARE)
        value = f"{whole.gbyte_s:.2g} GB/s bus bandwidth of {len(whole.ranks)} ranks"
        expected = "" if promised is None else f"{promised:g} GB/s is the type's network"
        checks.append(Check(name="all-reduce", ok=None if unclear else True, value=value, expected=expected))
    if not unclear:
        return checks
    if len(nodes) == 2:
        return [*checks, *node_checks.rate_checks(probes, "network", _to_here(connected, nodes))]
    return [*checks, *node_checks.rate_checks(probes, "pairs", _in_pairs(connected, probes, nodes))]


def _in_pairs(
    connected: ConnectedCluster, probes: node_checks.Probes, nodes: Sequence[int]
) -> dict[int, float]:
    """Return the best rate of each node (MB/s) in process groups with each of two others; 0 if all fail.

    One that seems slow is measured once more, with one that is not.
    """
    connected.session.say(f"forming process groups of two nodes (at most {2 * MOST_GROUP_S:g} s)")
    best = dict.fromkeys(nodes, 0.0)

    def measure(pairs: Sequence[tuple[int, int]]) -> None:
        for group in _form(connected, probes, pairs):
            for one in group.ranks:
                best[one.node] = max(best[one.node], (group.gbyte_s or 0.0) * 1e3)

    for pairs in node_checks.rounds(nodes):
        measure(pairs)
    slow = node_checks.slow_nodes(best)
    if again := list(zip(slow, [node for node in nodes if node not in slow], strict=False)):
        measure(again)
    return best


def _to_here(connected: ConnectedCluster, nodes: Sequence[int]) -> dict[int, float]:
    """Return how fast each node sends to this machine (MB/s); 0 if it is lost."""
    rates = dict.fromkeys(nodes, 0.0)
    for node in nodes:
        began = time.monotonic()
        with contextlib.suppress(NodeError):
            connected.fleet.run(
                ["head", "-c", f"{HERE_BYTES}", "/dev/zero"], nodes=[node], timeout_s=ANSWER_S
            )
            rates[node] = HERE_BYTES / 1e6 / (time.monotonic() - began)
    return rates


def _promise(cluster: LocatedCluster) -> float | None:
    """Return the network bandwidth of the cluster's type in GB/s; None where GPUs are not real."""
    if any(one.driver is None for one in cluster.record.prepared):
        return None
    return network_gbyte_s(cluster.record.instance_type)


def _form(
    connected: ConnectedCluster, probes: node_checks.Probes, groups: Sequence[Sequence[int]]
) -> list[node_checks.Group]:
    """Run train/probe.py, as a job would, on each of `groups` of nodes at once; return what its ranks say."""
    groups = [sorted(nodes) for nodes in groups]  # the ranks of a launch meet on its lowest node
    formed = [
        node_checks.Group(layout(nodes, gpus={node: probes.prepared[node].gpus for node in nodes}))
        for nodes in groups
    ]
    limit = min(GROUP_S + RANK_S * sum(len(group.ranks) for group in formed), MOST_GROUP_S)
    asked = connected.session.job_spec
    spec = replace(asked, job=JobSection(script="probe.py"), env=replace(asked.env, secrets=()))
    slots = ask(
        connected.fleet, {nodes[0]: messages.Slots(ports=launch_requests.job_ports()) for nodes in groups}
    )
    starter, program = template("start_ranks.py"), (shipped_folder("train") / "probe.py").read_text("utf-8")
    commands = {}
    for nodes, group in zip(groups, formed, strict=True):
        hosts = [Host(node=probes.nodes[node], prepared=probes.prepared[node], workdir="/") for node in nodes]
        slot = launch_requests.choose_slot(slots, first=nodes[0])
        launch = launch_requests.launch_requests(
            spec, job="doctor", ranks=group.ranks, hosts=hosts, slot=slot
        )
        for node, request in launch.items():
            ranks = [process.environment for process in request.processes]
            words = json.dumps({"ranks": ranks, "seconds": limit, "program": program})
            commands[node] = ([probes.prepared[node].ranks_python, "-c", starter], words.encode())
    _hear(connected, commands, formed, timeout_s=limit + 10)
    return formed


def _hear(
    connected: ConnectedCluster,
    commands: Mapping[int, Any],
    groups: Sequence[node_checks.Group],
    *,
    timeout_s: float,
) -> None:
    """Start the ranks of `groups` and take up what they say."""
    of = {one.node: group for group in groups for one in group.ranks}
    rest = dict.fromkeys(commands, b"")

    def on_data(node: int, data: bytes) -> None:
        *lines, rest[node] = (rest[node] + data).split(b"\n")
        if len(rest[node]) > node_answers.MOST_BYTES:
            raise node_answers.malformed(node, "an endless line")
        own = {one.rank for one in of[node].ranks if one.node == node}
        for line in lines:
            if (step := node_answers.rank_step(line, node=node, ranks=own)) is not None:
                of[node].hear(step)

    connected.fleet.stream(commands, on_data, timeout_s=timeout_s)
