"""doctor: check what a launch needs, or check a cluster's nodes. Changes nothing."""

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
from awsddp.agent_client.calls import ANSWER_S, call_nodes
from awsddp.agent_client.rank_layout import Host, layout_ranks
from awsddp.compat.types import find_quota, network_gbyte_s
from awsddp.errors import AwsddpError, ConfigError, NodeError, NoRegion, NotFoundError
from awsddp.job.save_to_s3 import add_s3_facts, prepare_local_saving
from awsddp.model import node_answers
from awsddp.model.documents import DoctorDocument, QuotaDocument
from awsddp.model.records import Check
from awsddp.nodes import rsync
from awsddp.plan.records import Facts, resource_names
from awsddp.plan.requests import RequestValues
from awsddp.session.connect import connect_reachable, find_jump_host, list_jobs_on_nodes, preconnected_cluster
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.session.locate import aws_client_for, gather_facts, open_target
from awsddp.session.next_steps import complete_commands
from awsddp.settings.spec import JobSection
from awsddp.util.shipped_files import shipped_folder, template

GROUP_S, RANK_S, MOST_GROUP_S = 60.0, 2.0, 180.0
"""The time limit for ranks to import torch, form a process group and time an all-reduce. The limit is a fixed
time plus a time per rank (because the local cloud's nodes share CPUs), up to a maximum."""
CLAIM_S = 5.0
LEAST_SHARE = 0.5
"""Nodes are measured in pairs if an all-reduce reaches less than this share of the type's network
bandwidth."""
LEAST_GBYTE_S = 0.005
"""The limit for types whose bandwidth is unknown. Every type's network is faster than this."""
UPLOAD_BYTES = 3_000_000
"""The amount of data that each of two nodes sends to this machine, to show which node is slow. A measurement
between the two nodes cannot show this."""


def check_before_launch(session: Session) -> DoctorDocument:
    """Return the `doctor` document with the checks that are possible before a launch.

    The checks change nothing, except what `prepare_local_saving` creates. All checks run, even after one
    fails. Raises ConfigError if the cluster exists in another target, and the errors of
    `prepare_local_saving`.
    """
    from awsddp.aws.preflight import (
        CONFIGURATION,
        REGION_CHECKS,
        before_launch,
        check_interrupted_uploads,
        failed_check,
        skipped_checks,
    )

    with open_target(session, record := session.folder.read()) as target:
        try:
            aws = aws_client_for(session, target)
        except ConfigError as error:
            name = "region" if isinstance(error, NoRegion) else CONFIGURATION
            return _with_local_checks(
                session, (failed_check(name, error), *skipped_checks(name, *REGION_CHECKS))
            )
        cluster = prepare_local_saving(LocatedCluster(session=session, target=target, aws_client=aws))
        spec = cluster.session.spec

        def facts() -> Facts:
            return add_s3_facts(cluster, gather_facts(aws, spec, target, record))

        checks = [*before_launch(aws, spec, _placeholders(session), facts=facts)]
        if (save_to := session.job_spec.job.save_to) is not None:
            checks += check_interrupted_uploads(aws, save_to)
    return _with_local_checks(session, checks)


def _placeholders(session: Session) -> RequestValues:
    """Return placeholders, for dry-run calls, in place of the resources that a launch would create."""
    from awsddp.nodes.hostkeys import make_key

    ids = resource_names(session.spec.name, random.token_hex(4))
    secrets = {"public_key": make_key("awsddp dry run").public, "user_data": "#cloud-config\n{}\n"}
    return RequestValues(ids=ids, secrets=secrets, now=datetime.now(UTC))


def _with_local_checks(session: Session, checks: Sequence[Check]) -> DoctorDocument:
    """Return the document for `checks` and for checks of this machine's programs and the jump host."""
    all_checks = [_run_check("rsync and ssh", rsync.find_rsync), *checks]
    if (jump := find_jump_host(session)) is not None:
        all_checks.append(_run_check("jump host", jump.ensure_connected, jump.name))
    all_checks += check_notify(session, internet=None)
    return make_doctor_document(session, all_checks)


def check_notify(session: Session, *, internet: bool | None) -> list[Check]:
    """Send a test event from this machine, and return its check; an empty list if notify.url is not set.

    `internet` is True if the nodes have internet access, and None if that is not known.
    """
    if (notify := session.job_spec.notify).url is None:
        return []
    from awsddp.agent.notify.events import make_event
    from awsddp.job.notify import describe_doubt
    from awsddp.session.notify import send_event

    now, text = time.time(), "sends a test event from `awsddp doctor`"
    event = make_event(
        "test",
        f"cluster {session.name} {text}",
        key=random.token_hex(8),
        cluster=session.name,
        job=None,
        now=now,
    )
    outcome = send_event(session, event)
    if outcome.state != "delivered":
        hint = "enter the URL again: read -rs AWSDDP_NOTIFY_URL && export AWSDDP_NOTIFY_URL"
        return [Check(name="notify", ok=False, value=f"{notify.host}: {outcome.why}", hint=hint)]
    doubt = describe_doubt(session, internet=internet)
    value = f"{notify.host} took a test event from this machine{doubt and f'; {doubt}'}"
    return [Check(name="notify", ok=True, value=value)]


def _run_check(name: str, attempt: Callable[[], object], value: str = "") -> Check:
    """Call `attempt` and return its outcome as a check that shows `value` (by default, the call's result)."""
    from awsddp.aws.preflight import failed_check

    try:
        result = attempt()
    except AwsddpError as error:
        return failed_check(name, error)
    return Check(name=name, ok=True, value=value or str(result))


def request_quota(session: Session, *, confirm: Callable[[str], None]) -> QuotaDocument:
    """Request a larger vCPU quota if the configuration needs one, and return what is needed and requested.

    `confirm` is called with the question and raises an exception to refuse. Raises CloudError if AWS refuses
    the request, or ConfigError if no plan can be made or the quota is unknown.
    """
    from awsddp.plan.launch_plan import make_plan

    with open_target(session, record := session.folder.read()) as target:
        aws = aws_client_for(session, target)
        facts = gather_facts(aws, session.spec, target, record)
        plan = make_plan(session.spec, replace(facts, quotas={}))  # the plan as if the quota were sufficient
        quota = find_quota(plan.instance_type, plan.market)
        if quota is None:
            raise ConfigError(
                f"unknown quota for {plan.market} {plan.kind.family}",
                "",
                "see https://console.aws.amazon.com/servicequotas/",
            )
        code, name = quota
        used, limit = facts.used_vcpus.get(code, 0), facts.quotas.get(code)
        needed = plan.nodes * plan.kind.vcpus + used
        document = QuotaDocument(
            quota=code, name=name, region=aws.region, need=needed, have=limit, request=None
        )
        if limit is not None and limit >= needed:
            return document
        in_use = f" and the {used} vCPUs in use" if used else ""
        allowed = "an unknown number" if limit is None else f"{limit:g}"
        confirm(
            f"{plan.nodes} x {plan.instance_type}{in_use} need {needed} vCPUs, and {name} ({code}) "
            f"allows {allowed} in {aws.region}. Request {needed} vCPUs from AWS?"
        )
        parameters = {"ServiceCode": "ec2", "QuotaCode": code, "DesiredValue": float(needed)}
        reply = aws.call("RequestServiceQuotaIncrease", parameters, service="service-quotas")
        document.request = reply.get("RequestedQuota", {}).get("Id")
        return document


def check_cluster(session: Session) -> DoctorDocument | None:
    """Return the `doctor` document for the cluster's nodes, or None if the cluster has no record here.

    The checks take a limited time, and do not end any jobs. Raises NoReachableNodes if no node can be
    reached, InUse if another client is starting a job, or CloudError.
    """
    if session.folder.read() is None:
        return None
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(preconnected_cluster(session))
            connected = stack.enter_context(connect_reachable(cluster))
        except NotFoundError:
            return None
        checks = _check_nodes(connected)
        checks += check_notify(session, internet=connected.cluster.record.internet)
        return make_doctor_document(session, checks)


def make_doctor_document(session: Session, checks: Sequence[Check]) -> DoctorDocument:
    """Return the `doctor` document with these checks."""
    return DoctorDocument(
        checks=tuple(replace(check, hint=complete_commands(session, check.hint)) for check in checks)
    )


def _check_nodes(connected: ConnectedCluster) -> list[Check]:
    fleet = connected.fleet
    # The claim fails if the node's disk is full. Ignore this error, because a check below reports the full
    # disk.
    with contextlib.suppress(NodeError):
        call_nodes(fleet, {min(fleet.nodes): messages.Claim(owner="`awsddp doctor`", wait_s=CLAIM_S)})
    busy = [job.job for job in list_jobs_on_nodes(connected, partial=True) if job.state == "running"]
    checks = _login_checks(connected)
    nodes = [node for node in connected.cluster.nodes if node.node in fleet.responsive_nodes]
    probes = node_checks.probe_nodes(fleet, nodes, connected.cluster.record.prepared_by_node, thorough=True)
    checks += [
        *node_checks.quick_checks(probes),
        *node_checks.thorough_checks(probes),
        *node_checks.check_connections(fleet, probes),
    ]
    if busy:
        value = f"skipped: job {', '.join(busy)} is running"
        return [*checks, Check(name="process group", ok=None, value=value)]
    fit_nodes = [node for node in probes.answers if node not in node_checks.failing_nodes(checks)]
    return [*checks, *_group_checks(connected, probes, fit_nodes)]


def _login_checks(connected: ConnectedCluster) -> list[Check]:
    nodes = {node.node: node for node in connected.cluster.nodes}
    checks = []
    for number, failure in sorted(connected.fleet.failures.items()):
        why = failure.message.partition(": ")[2]
        checks.append(node_checks.node_check(nodes[number], "login", False, why, "SSH"))
    for node in connected.cluster.excluded:
        state = connected.cluster.record.describe_node_state(node).partition(" is ")[2]
        checks.append(node_checks.node_check(node, "login", None, state))
    return checks


def _group_checks(
    connected: ConnectedCluster, probes: node_checks.Probes, nodes: Sequence[int]
) -> list[Check]:
    """Check a process group of all ranks on `nodes` and, if it is slow or hangs, groups of two nodes."""
    if len(nodes) < 2:
        return [Check(name="process group", ok=None, value="skipped: fewer than two nodes are healthy")]
    connected.session.say(f"forming a process group on {len(nodes)} nodes (at most {MOST_GROUP_S:g} s)")
    (group,) = _run_groups(connected, probes, [nodes])
    checks = [node_checks.group_check(probes, group)]
    if group.gbyte_s is None:
        unclear = len(nodes) > 2 and not node_checks.failing_nodes(checks)
    else:
        type_gbyte_s = _network_gbyte_s(connected.cluster)
        least_gbyte_s = LEAST_GBYTE_S if type_gbyte_s is None else type_gbyte_s * LEAST_SHARE
        unclear = group.gbyte_s < least_gbyte_s
        value = f"{group.gbyte_s:.2g} GB/s bus bandwidth of {len(group.ranks)} ranks"
        expected = "" if type_gbyte_s is None else f"{type_gbyte_s:g} GB/s is the type's network"
        checks.append(Check(name="all-reduce", ok=None if unclear else True, value=value, expected=expected))
    if not unclear:
        return checks
    if len(nodes) == 2:
        return [*checks, *node_checks.rate_checks(probes, "network", _measure_uploads(connected, nodes))]
    return [*checks, *node_checks.rate_checks(probes, "pairs", _measure_pairs(connected, probes, nodes))]


def _measure_pairs(
    connected: ConnectedCluster, probes: node_checks.Probes, nodes: Sequence[int]
) -> dict[int, float]:
    """Return each node's best rate (MB/s) in process groups of two nodes, or 0 if all of its groups fail.

    Each node forms a group with each of two other nodes. A slow node is measured again, in a group with a
    node that is not slow.
    """
    connected.session.say(f"forming process groups of two nodes (at most {2 * MOST_GROUP_S:g} s)")
    best = dict.fromkeys(nodes, 0.0)

    def measure(pairs: Sequence[tuple[int, int]]) -> None:
        for group in _run_groups(connected, probes, pairs):
            for rank in group.ranks:
                best[rank.node] = max(best[rank.node], (group.gbyte_s or 0.0) * 1e3)

    for pairs in node_checks.ring_rounds(nodes):
        measure(pairs)
    slow = node_checks.slow_nodes(best)
    if repeated := list(zip(slow, [node for node in nodes if node not in slow], strict=False)):
        measure(repeated)
    return best


def _measure_uploads(connected: ConnectedCluster, nodes: Sequence[int]) -> dict[int, float]:
    """Return {node: its upload rate to this machine in MB/s}. The rate of a lost node is 0."""
    rates = dict.fromkeys(nodes, 0.0)
    for node in nodes:
        began = time.monotonic()
        with contextlib.suppress(NodeError):
            connected.fleet.run(
                ["head", "-c", f"{UPLOAD_BYTES}", "/dev/zero"], nodes=[node], timeout_s=ANSWER_S
            )
            rates[node] = UPLOAD_BYTES / 1e6 / (time.monotonic() - began)
    return rates


def _network_gbyte_s(cluster: LocatedCluster) -> float | None:
    """Return the instance type's network bandwidth in GB/s, or None if its GPUs are not real."""
    if any(prepared.driver is None for prepared in cluster.record.prepared):
        return None
    return network_gbyte_s(cluster.record.instance_type)


def _run_groups(
    connected: ConnectedCluster, probes: node_checks.Probes, groups: Sequence[Sequence[int]]
) -> list[node_checks.GroupProgress]:
    """Run train/probe.py on all `groups` at the same time, and return each group with its ranks' reports."""
    groups = [sorted(nodes) for nodes in groups]  # the first node is the rendezvous of a group's ranks
    formed = [
        node_checks.GroupProgress(
            layout_ranks(nodes, gpus={node: probes.prepared[node].gpus for node in nodes})
        )
        for nodes in groups
    ]
    limit = min(GROUP_S + RANK_S * sum(len(group.ranks) for group in formed), MOST_GROUP_S)
    job_spec = connected.session.job_spec
    spec = replace(job_spec, job=JobSection(script="probe.py"), env=replace(job_spec.env, secrets=()))
    slots = call_nodes(
        connected.fleet,
        {nodes[0]: messages.Slots(ports=launch_requests.list_job_ports()) for nodes in groups},
    )
    starter, program = template("start_ranks.py"), (shipped_folder("train") / "probe.py").read_text("utf-8")
    commands = {}
    for nodes, group in zip(groups, formed, strict=True):
        hosts = [Host(node=probes.nodes[node], prepared=probes.prepared[node], workdir="/") for node in nodes]
        slot = launch_requests.choose_slot(slots, first=nodes[0])
        launch = launch_requests.make_launch_requests(
            spec, job="doctor", ranks=group.ranks, hosts=hosts, slot=slot
        )
        for node, request in launch.items():
            ranks = [process.environment for process in request.processes]
            words = json.dumps({"ranks": ranks, "seconds": limit, "program": program})
            commands[node] = ([probes.prepared[node].ranks_python, "-c", starter], words.encode())
    _stream_reports(connected, commands, formed, timeout_s=limit + 10)
    return formed


def _stream_reports(
    connected: ConnectedCluster,
    commands: Mapping[int, Any],
    groups: Sequence[node_checks.GroupProgress],
    *,
    timeout_s: float,
) -> None:
    """Start the groups' ranks, and add each rank's reports to its group."""
    group_of = {rank.node: group for group in groups for rank in group.ranks}
    unparsed = dict.fromkeys(commands, b"")

    def on_data(node: int, data: bytes) -> None:
        *lines, unparsed[node] = (unparsed[node] + data).split(b"\n")
        if len(unparsed[node]) > node_answers.MAX_BYTES:
            raise node_answers.make_malformed_error(node, "an endless line")
        own_ranks = {rank.rank for rank in group_of[node].ranks if rank.node == node}
        for line in lines:
            if (step := node_answers.read_rank_step(line, node=node, ranks=own_ranks)) is not None:
                group_of[node].record(step)

    connected.fleet.stream(commands, on_data, timeout_s=timeout_s)
