"""plan: show what `up` would do and cost, and list the settings and the instance types that AWS offers."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from awsddp.cluster.launch import plan_everywhere
from awsddp.cluster.reconcile import make_change_plan, plan_changes
from awsddp.compat.types import GPU_TYPES, PRICE_DATE
from awsddp.errors import ConfigError
from awsddp.model.records import Target
from awsddp.plan.environment import make_environment_plan
from awsddp.plan.records import LIST_PRICE, Facts, LaunchPlan
from awsddp.plan.selection import list_offers as offered
from awsddp.session.configured import report_differences, with_record_settings
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.locate import (
    aws_client_for,
    check_account,
    find_owner,
    gather_facts,
    open_target,
    refresh_listing,
)
from awsddp.settings.loader import list_settings
from awsddp.state import Record
from awsddp.util.parallel import import_in_thread, run_both

if TYPE_CHECKING:
    from awsddp.model.documents import OffersDocument


def read_facts_and_cluster(
    requested: Session, target: Target, record: Record | None
) -> "tuple[Facts, LocatedCluster]":
    """Return the facts that the plan needs, and the cluster with its listing, both requested in parallel.

    The cluster's settings come from its record, if there is one. Settings in awsddp.toml that differ from the
    record are reported. Raises CloudError or ConfigError, for example for an invalid environment.
    """
    session = with_record_settings(requested, record)
    if record is not None:
        report_differences(requested, session.spec, record)
    aws = aws_client_for(session, target)
    located_target = replace(target, region=aws.region)
    cluster = LocatedCluster(session=session, target=located_target, aws_client=aws, local_record=record)
    if session.job_spec.job.save_to is not None:
        from awsddp.job.save_to_s3 import prepare_local_saving

        cluster = prepare_local_saving(cluster)
        session = cluster.session

    def list_nodes() -> LocatedCluster:
        owner = find_owner(aws, record)
        if record is not None:
            check_account(cluster)
        import_in_thread("awsddp.nodes.hostkeys")  # importing this earlier would delay the first call to AWS
        return refresh_listing(cluster, owner=owner)

    facts, cluster = run_both(lambda: gather_facts(aws, session.spec, target, record), list_nodes)
    if session.job_spec.job.save_to is not None or session.job_spec.data.sources:
        from awsddp.job.save_to_s3 import add_s3_facts

        facts = add_s3_facts(cluster, facts)
    image = facts.image
    environment = make_environment_plan(session.job_spec.env, internet=image.has_internet, driver=None)
    if environment.lines:
        from awsddp.plan.resolve import check_packages

        torch = None if image.pretends else image.shown.torch
        machine = image.architecture.replace("arm64", "aarch64")
        why = check_packages(environment, image_torch=torch, machine=machine, cache=session.home / "packages")
        if why:
            session.say(f"{environment.name} could not be checked: {why}")
    return facts, cluster


def must_reconcile(cluster: LocatedCluster) -> bool:
    """Return True if there is a cluster to reconcile, or False if `up` launches a cluster.

    Raises ConfigError for a running cluster whose key is not on this machine.
    """
    record = cluster.local_record
    live = [listed for listed in cluster.all_listings if listed.live]
    if record is not None and (cluster.session.folder.key.exists() or not record.prepared):
        is_live = any(listed.id == record.id for listed in live)
        if is_live or (record.prepared and not live):
            return True
    if not live:
        return False
    raise ConfigError(
        f"cluster {live[0].name} exists, but this machine does not have its key",
        f"the cluster was created on another machine, or {cluster.session.folder.path} was lost",
        "awsddp down   # end it; then awsddp up\nawsddp -c other-name up   # or use another name",
    )


def plan(session: Session) -> LaunchPlan:
    """Return the plan that `up` would carry out now. The plan for an existing cluster lists the changes.

    Raises ConfigError for an invalid spec or environment, or CloudError if AWS does not answer or refuses a
    request.
    """
    record = session.folder.read()
    with open_target(session, record) as target:
        facts, cluster = read_facts_and_cluster(session, target, record)
        if not must_reconcile(cluster):
            return plan_everywhere(cluster, facts)
        now = datetime.now(UTC).replace(microsecond=0)
        return make_change_plan(cluster, plan_changes(cluster, facts, now=now), facts)


def list_plan_settings(session: Session) -> list[tuple[str, Any, str]]:
    """Return the key, the value and the source of each setting that has a value. Sends no requests."""
    completed = with_record_settings(session, session.folder.read())
    return list_settings(completed.spec, completed.job_spec)


def find_offers(session: Session) -> "OffersDocument":
    """Return every GPU instance type that the region offers, its price, and whether the quota allows it.

    Raises CloudError if AWS does not answer.
    """
    from awsddp.model.documents import Offer, OffersDocument

    with open_target(session, session.folder.read()) as target:
        facts = gather_facts(aws_client_for(session, target), session.spec, target)
        choices = offered(facts, session.spec)
    return OffersDocument(
        region=facts.region,
        target=facts.target,
        nodes=session.spec.cluster.nodes,
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
            for choice in choices
        ),
    )
