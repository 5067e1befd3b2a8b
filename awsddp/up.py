"""up: plan, confirm, launch. An existing cluster is finished, repaired or resized, or stays unchanged."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from awsddp.advice import advised, command_words
from awsddp.compat.types import GPU_TYPES, PRICE_DATE
from awsddp.config import differences, overlaid, remembered, settings
from awsddp.errors import ConfigError, UsageError
from awsddp.jobs.health import replacement
from awsddp.known import name_left_out
from awsddp.nodes import rsync
from awsddp.parallel import NodesFailed, both, import_soon
from awsddp.plan import refuse_untried
from awsddp.plan.converge import TYPE_KEYS, is_of_type
from awsddp.plan.environment import make_environment_plan, refuse_unlike
from awsddp.plan.records import LIST_PRICE, Facts, LaunchPlan
from awsddp.plan.selection import offers as offered
from awsddp.reach import REACH_S, listed_files, publish, reach_jump
from awsddp.reconcile import (
    CHANGEABLE,
    Confirm,
    changes,
    launch,
    own_or_empty,
    plan_everywhere,
    plan_of,
    reconcile,
)
from awsddp.records import Node, Prepared, Target
from awsddp.report import counted, money
from awsddp.returns import ClusterDocument, Offer, OffersDocument
from awsddp.saving import rehearsed, with_s3
from awsddp.search import (
    aws_of,
    check_account,
    end,
    facts_of,
    look,
    owner_of,
    target_for,
    target_of,
    wait_until_listed,
)
from awsddp.spec import FILE, ClusterSpec
from awsddp.state import Record
from awsddp.status import cluster_document, refresh
from awsddp.train import ensure_environment
from awsddp.values import idle_seconds

if TYPE_CHECKING:
    from awsddp.cluster import Cluster


@dataclass(frozen=True)
class Plan:
    """What `up` would do. `launch` has every detail; a notebook shows a table."""

    launch: LaunchPlan
    cluster: "Cluster"

    @property
    def price_usd_per_hour(self) -> float | None:
        """The list price of all nodes together; None where it is unknown."""
        return self.launch.price_usd_per_hour

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as a table of two columns."""
        one = self.launch
        return [
            ("cluster", f"{one.cluster}, {one.target}, {one.region}"),
            ("nodes", f"{one.nodes} x {one.instance_type}, {counted(one.kind.gpus, 'GPU')} each"),
            ("image", one.image.name),
            ("price per hour", money(one.price_usd_per_hour)),
            *(("step", str(step)) for step in one.steps),
            *(("warning", text) for text in one.warnings),
        ]

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{key} {text}' for key, text in self.rows()[:4])})"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th>{escape(key)}</th><td>{escape(text)}</td></tr>" for key, text in self.rows()
        )
        return f"<table>{cells}</table>"


def up(cluster: "Cluster", *, confirm: Confirm) -> ClusterDocument:
    """Launch the cluster, or change an existing one to match the spec, and return the `up` document.

    `confirm` is called with the plan before a launch, with a sentence before instances are only started or
    terminated, and raises to refuse. Raises ConfigError, CloudError, CapacityError, NodeError or
    LeftoverError; run again, `up` continues where it stopped.
    """
    with cluster.folder.lock("up"), target_for(cluster, record := cluster.folder.read()) as target:
        facts, cluster = read_all(cluster, target, record)
        hosts = facts.image.has_hosts

        def ask(what: LaunchPlan | str) -> None:
            if isinstance(what, LaunchPlan):
                refuse_untried(what)
            if hosts:
                rsync.program()  # before anything costs money
                reach_jump(cluster)
            confirm(what)

        cluster.nodes = _nodes(cluster, facts, ask)
        _prepare(cluster, hosts=hosts)
        if hosts:
            make_environment(cluster)
            name_left_out(cluster)
        _end_others(cluster)
        if hosts:
            publish(cluster)
        return cluster_document(cluster, refresh(cluster) if hosts else ())


def make_environment(cluster: "Cluster") -> None:
    """Build the environment of [env] on the nodes, and remember it for later jobs.

    Raises ConfigError, NodeError also where the nodes differ in torch, CUDA, driver or GPUs.
    """
    from awsddp.nodes.sync import push

    record = cluster.record
    refuse_unlike(
        {
            one.node: {"torch": one.torch, "CUDA": one.cuda, "driver": one.driver, "GPUs": one.gpus}
            for one in record.prepared
        }
    )
    requested = remembered(cluster.job_spec)
    if requested:
        cluster.remember(asked=record.asked | requested)
        with cluster.connect() as fleet:
            ensure_environment(
                cluster, send_files=lambda: push(listed_files(cluster), fleet, on_event=cluster.on_event)
            )


def as_before(cluster: "Cluster", record: Record | None) -> "Cluster":
    """Return the cluster with the settings of its record, for all that no option and no variable sets."""
    if record is None:
        return cluster
    job = overlaid(cluster.job_spec, record.asked)
    return cluster.but(spec=overlaid(cluster.spec, record.settings), job_spec=job)


def _say_differences(cluster: "Cluster", standing: ClusterSpec, record: Record) -> None:
    """Report what awsddp.toml says and the cluster does not have, and the `up` that changes it.

    `standing` is the spec of the cluster. Raises ConfigError for an invalid `cluster.gpus`.
    """
    found = differences(cluster.spec, standing)
    if found.keys() & set(TYPE_KEYS) and is_of_type(cluster.spec, record.instance_type):
        found = {key: values for key, values in found.items() if key not in TYPE_KEYS}
    if not found:
        return
    launched = {"cluster.instance_type": record.instance_type}
    parts, words = [], []
    for key, (wanted, has) in sorted(found.items(), key=lambda one: one[0] in CHANGEABLE):
        name = f"{key.removeprefix('cluster.')} = {_shown(wanted)}"
        if key in CHANGEABLE:
            parts.append(f"{name}, the cluster has {_shown(launched.get(key) if has is None else has)}")
            words += command_words("up", {key: wanted})
        else:
            parts.append(f"{name}, which only a new cluster gets")
    command = advised(cluster, shlex.join(["awsddp", "up", *words]))
    cluster.say(f"{FILE} says {'; '.join(parts)}{f': {command}' if words else ''}")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else "none" if value in (None, ()) else json.dumps(value)


def read_all(requested: "Cluster", target: Target, record: Record | None) -> tuple[Facts, "Cluster"]:
    """Read the plan's facts and find the cluster, in parallel; it has its settings then.

    What awsddp.toml says and they do not is reported. Raises CloudError, ConfigError, also for an invalid
    environment.
    """
    cluster = as_before(requested, record)
    if record is not None:
        _say_differences(requested, cluster.spec, record)
    aws = aws_of(cluster, target)
    cluster = rehearsed(cluster.but(target=replace(target, region=aws.region), gateway=aws, known=record))

    def list_nodes() -> None:
        owner = owner_of(aws, record)
        if record is not None:
            check_account(cluster)
        import_soon("awsddp.nodes.hostkeys")  # not before: the first call to AWS would wait for it
        look(cluster, owner=owner)

    facts, _ = both(lambda: facts_of(aws, cluster.spec, target, record), list_nodes)
    facts, image = with_s3(cluster, facts), facts.image
    environment = make_environment_plan(cluster.job_spec.env, internet=image.has_internet, driver=None)
    if environment.lines:
        from awsddp.plan.resolve import check

        torch = None if image.pretends else image.shown.torch
        machine = image.architecture.replace("arm64", "aarch64")
        why = check(environment, image_torch=torch, machine=machine, cache=cluster.home / "packages")
        if why:
            cluster.say(f"{environment.name} could not be checked: {why}")
    return facts, cluster


def to_reconcile(cluster: "Cluster") -> bool:
    """Return whether there is a cluster to reconcile; else one is launched.

    Raises ConfigError for a running cluster whose key is not on this machine.
    """
    record = cluster.known
    live = [one for one in cluster.all_listed if one.live]
    if record is not None and (cluster.folder.key.exists() or not record.prepared):
        there = any(one.id == record.id for one in live)
        if there or (record.prepared and not live):
            return True
    if not live:
        return False
    raise ConfigError(
        f"cluster {live[0].name} exists, but this machine does not have its key",
        f"it was made elsewhere, or {cluster.folder.path} was lost",
        "awsddp down   # end it; then awsddp up\nawsddp -c other-name up   # or leave it alone",
    )


def _nodes(cluster: "Cluster", facts: Facts, confirm: Confirm) -> tuple[Node, ...]:
    """Return the cluster's nodes: those that stay, those of an interrupted launch, and new ones."""
    _finish_launch(cluster)
    if to_reconcile(cluster):
        return reconcile(cluster, facts, confirm)
    plan = plan_everywhere(cluster, facts)
    confirm(plan)
    for left in cluster.all_listed:
        if cluster.known is None or left.id != cluster.known.id:
            end(cluster, left)
    return launch(cluster, plan)


def _finish_launch(cluster: "Cluster") -> None:
    """Finish an interrupted launch, or wait until AWS lists the instances that this machine knows.

    The temporary host key of such a launch is accepted here: the next launch has its own.
    """
    from awsddp.aws.instances import filled_by, resume, wait_running

    record = cluster.known
    if record is None:
        return
    if record.intent is None:
        wait_until_listed(cluster)
        return
    own = own_or_empty(cluster)
    filled = filled_by(record.intent)
    nodes = tuple(node for node in own.live if node.node in filled)
    if {node.node for node in nodes} != filled or any(node.is_renumbered for node in nodes):
        resumed = resume(cluster.aws, record.intent, on_event=cluster.on_event)
        if not resumed:
            cluster.remember(intent=None)
            return
        keys = [node.instance_id for node in resumed]
        nodes = wait_running(cluster.aws, resumed, on_event=cluster.on_event)
        listed = (node for node in own.nodes if node.instance_id not in keys)
        own = replace(own, nodes=tuple(sorted((*nodes, *listed), key=lambda node: node.node)))
    accept_host_keys(cluster, nodes)
    cluster.others = tuple(one for one in cluster.all_listed if one.id != record.id)
    cluster.listed = own


def _prepare(cluster: "Cluster", *, hosts: bool = True) -> None:
    """Wait until all nodes run, prepare those that are not prepared, and set the expiry on all.

    The tag is written last: a node with the right tag has the expiry. Without `hosts` (the image says that
    nothing boots: a local cloud of records) there is nothing to prepare.
    """
    from awsddp.aws.instances import refuse_off, wait_running
    from awsddp.aws.power import poweroff, tag_expiry
    from awsddp.aws.waits import deadline_s

    aws, record = cluster.aws, cluster.record
    term_s = deadline_s([record.instance_type])
    if hosts:
        import_soon("awsddp.nodes.transport")
    nodes = cluster.nodes = wait_running(aws, cluster.nodes, deadline_s=term_s, on_event=cluster.on_event)
    late = [node for node in nodes if node.expires != record.expires]
    cluster.listed = replace(own_or_empty(cluster), nodes=nodes)
    known = {one.instance_id for one in record.prepared} == {node.instance_id for node in nodes}
    if known and not late and record.idle == cluster.spec.cluster.idle:
        publish(cluster)
        if hosts:
            _log_in(cluster)
        return
    accept_host_keys(cluster, nodes)
    if hosts:
        from awsddp.nodes import provision

        with cluster.connect(deadline_s=term_s, meanwhile=lambda: refuse_off(aws, nodes)) as fleet:
            prepared = provision.prepare(
                fleet,
                nodes,
                expires_at=record.expires,
                idle_s=idle_seconds(cluster.spec.cluster.idle),
                gpus=0 if record.pretended else record.gpus_per_node,
            )
    else:
        prepared = tuple(
            Prepared(node=node.node, instance_id=node.instance_id, home="", python="", nic="")
            for node in nodes
        )
    if late:
        free = [node.instance_id for node in late if not node.unfetched and not node.spot]
        poweroff(aws, free, "terminate")
        tag_expiry(aws, late, record.expires)
    cluster.remember(
        prepared=prepared,
        addresses={node.instance_id: node.address for node in nodes if node.address},
        intent=None,
        idle=cluster.spec.cluster.idle,
    )


def _log_in(cluster: "Cluster") -> None:
    """Log in to each node, which was ready before.

    Raises NodeError for one that was ended or stopped meanwhile, NodesFailed with the commands that repair.
    """
    from awsddp.aws.instances import refuse_off

    try:
        with cluster.connect(deadline_s=REACH_S):
            pass
    except NodesFailed as error:
        refuse_off(cluster.aws, cluster.nodes)
        layers = {getattr(one, "layer", "") for one in error.failures.values()}
        if layers <= {"refused", "banner"}:  # the machines are there, what answers on them is not
            silent = [node for node in cluster.nodes if node.node in error.failures]
            ways = [*map(replacement, silent)]
            if not any(node.spot for node in silent):
                boots = "boots the nodes anew: a job on them ends, their disks stay"
                ways.insert(0, f"awsddp stop && awsddp up   # {boots}")
            error.next = "\n".join(ways)
        raise


def accept_host_keys(cluster: "Cluster", nodes: Sequence[Node]) -> None:
    """Accept the temporary host key of the last launch from its nodes, which have no other yet."""
    from awsddp.nodes import hostkeys

    if (intent := cluster.record.intent) is not None:
        known = hostkeys.read(cluster.folder.known_hosts)
        new = [node.instance_id for node in nodes if node.instance_id not in known]
        hostkeys.accept(cluster.folder.known_hosts, dict.fromkeys(new, intent.host_key))


def _end_others(cluster: "Cluster") -> None:
    """Look again, and end other clusters of this name.

    Two machines may have launched at once, neither seeing the other's. Both keep the same one, the first,
    and end the other. Raises ConfigError where this machine's was ended.
    """
    record = cluster.record
    look(cluster)
    own = cluster.listed = cluster.own
    live = [one for one in cluster.all_listed if one.live]
    if own is None or not own.live or len(live) == 1:
        return
    first, *others = sorted(live, key=lambda one: (one.created or record.created, one.id))
    for other in others:
        nodes = ", ".join(node.instance_id for node in other.live)
        cluster.say(f"a second cluster {other.name} ({other.id}) was made at the same time: ending {nodes}")
        end(cluster, other)
    if first.id == record.id:
        return
    cluster.folder.retire(record.id)
    raise ConfigError(
        f"another machine made cluster {own.name} a moment before",
        f"its nodes stay: {', '.join(node.instance_id for node in first.live)}; those made here were ended",
        f"continue there; or awsddp -c {own.name}-2 up   # another name here",
    )


def plan(cluster: "Cluster") -> LaunchPlan:
    """Return the plan that `up` would carry out now; for a cluster that exists, with the steps to it.

    Raises ConfigError for an invalid spec or environment, CloudError where AWS does not answer or refuses.
    """
    record = cluster.folder.read()
    with target_for(cluster, record) as target:
        facts, cluster = read_all(cluster, target, record)
        if not to_reconcile(cluster):
            return plan_everywhere(cluster, facts)
        now = datetime.now(UTC).replace(microsecond=0)
        return plan_of(cluster, changes(cluster, facts, now=now), facts)


def settings_of(cluster: "Cluster") -> list[tuple[str, Any, str]]:
    """Return each setting that has a value, the value, and where it comes from. Sends no requests."""
    before = as_before(cluster, cluster.folder.read())
    return settings(before.spec, before.job_spec)


def offers(cluster: "Cluster") -> OffersDocument:
    """Return every instance type with GPUs that the region offers, its price, and if the quota allows it.

    Raises CloudError where AWS does not answer.
    """
    with target_for(cluster, cluster.folder.read()) as target:
        facts = facts_of(aws_of(cluster, target), cluster.spec, target)
        found = offered(facts, cluster.spec)
    return OffersDocument(
        region=facts.region,
        target=facts.target,
        nodes=cluster.spec.cluster.nodes,
        price_date=facts.price_date if facts.prices else PRICE_DATE,
        price_source="AWS Pricing API" if facts.prices else LIST_PRICE,
        offers=tuple(
            Offer(
                **vars(choice),
                gpu_memory_gb=GPU_TYPES[choice.instance_type].memory_gb,
                price_date=facts.price_date
                if choice.instance_type in facts.prices
                else GPU_TYPES[choice.instance_type].price_date,
                spot_usd_per_hour=min(facts.spot_prices.get(choice.instance_type, {}).values(), default=None),
            )
            for choice in found
        ),
    )


def consent(cluster: "Cluster", agreed: Plan | None) -> Confirm:
    """Return what `up` calls before it launches or ends machines. It raises UsageError without consent."""
    limit = cluster.spec.cluster.max_price_usd if agreed is None else agreed.price_usd_per_hour
    is_local = target_of(cluster, cluster.folder.read()).name == "local"

    def confirm(change: LaunchPlan | str) -> None:
        price = None if isinstance(change, str) else change.price_usd_per_hour
        if is_local or (agreed is not None and price == limit):
            return
        if limit is None:
            raise UsageError(
                "up needs consent to a price",
                f"it would cost {money(price)} per hour",
                "pass max_price_usd=..., or a plan: cluster.up(cluster.plan(...))",
            )
        if price is not None and price > limit:
            raise UsageError(
                f"the price is now {money(price)} per hour, over {money(limit)}", "", "make a new plan"
            )

    return confirm
