"""The steps from the existing cluster to the requested one."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from awsddp.errors import ConfigError
from awsddp.model.billing import Rate
from awsddp.model.records import ClusterListing, Node
from awsddp.plan.converge import ExistingCluster, Reconciliation, plan_reconciliation
from awsddp.plan.records import Step
from awsddp.settings.loader import load
from awsddp.settings.spec import ClusterSpec

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
CREATED = NOW - timedelta(hours=20)
EXPIRES = CREATED + timedelta(hours=24)
CLIENT = "203.0.113.7/32"


def make_node(number: int, **changes: Any) -> Node:
    base = Node(
        node=number,
        instance_id=f"i-{number}",
        state="running",
        instance_type="g5.xlarge",
        zone="us-east-1b",
        image_id="ami-1",
        launched=CREATED,
        expires=EXPIRES,
    )
    return replace(base, **changes)


def cluster_of(
    *nodes: Node, size: int | None = None, opened: tuple[str, ...] = (CLIENT,), **changes: Any
) -> ExistingCluster:
    cluster = ClusterListing(
        name="demo",
        id="0a1b2c3d",
        owner="AIDAEXAMPLE",
        region="us-east-1",
        nodes=nodes,
        created=CREATED,
        group="sg-1",
        ssh_cidrs=opened,
    )
    fields: dict[str, Any] = {
        "cluster": cluster,
        "nodes": len(nodes) if size is None else size,
        "instance_type": "g5.xlarge",
        "expires": EXPIRES,
    }
    return ExistingCluster(**(fields | changes))


def request(**keys: Any) -> ClusterSpec:
    return load("demo", environ={}, overrides={key.replace("__", "."): value for key, value in keys.items()})[
        0
    ]


def plan(spec: ClusterSpec, existing: ExistingCluster, *, image_id: str = "ami-1") -> Reconciliation:
    return plan_reconciliation(spec, existing, image_id=image_id, callers=(CLIENT,), now=NOW)


PAIR = (make_node(0), make_node(1))
LATER = NOW + timedelta(hours=24)

CASES: dict[str, tuple[ClusterSpec, ExistingCluster, tuple[Step, ...]]] = {
    "nothing requested, nothing to do": (request(), cluster_of(*PAIR), ()),
    "as many as there are": (request(cluster__nodes=2), cluster_of(*PAIR), ()),
    "more nodes": (
        request(cluster__nodes=4),
        cluster_of(*PAIR),
        (Step(do="launch", numbers=(2, 3)),),
    ),
    "fewer nodes: the highest numbers end": (
        request(cluster__nodes=1),
        cluster_of(*PAIR),
        (Step(do="end", numbers=(1,), instances=("i-1",), why="1 node requested"),),
    ),
    "one node was lost": (
        request(),
        cluster_of(make_node(0), make_node(1, state="terminated")),
        (Step(do="launch", numbers=(1,), why="node1 ended"),),
    ),
    "one node is shutting down": (
        request(),
        cluster_of(make_node(0, state="shutting-down"), make_node(1)),
        (Step(do="launch", numbers=(0,), why="node0 ended"),),
    ),
    "all nodes were lost": (
        request(),
        cluster_of(size=2),
        (Step(do="launch", numbers=(0, 1), why="node0, node1 ended"),),
    ),
    "one node is impaired": (
        request(),
        cluster_of(*PAIR, impaired=frozenset({"i-1"})),
        (
            Step(do="end", numbers=(1,), instances=("i-1",), why="AWS's status checks report it impaired"),
            Step(do="launch", numbers=(1,)),
        ),
    ),
    "one node is to be replaced": (
        request(cluster__replace=("i-1", "i-gone")),
        cluster_of(*PAIR),
        (
            Step(
                do="end",
                numbers=(1,),
                instances=("i-1",),
                why="its replacement is requested; the node is lost even if AWS has no other machine",
            ),
            Step(do="launch", numbers=(1,)),
        ),
    ),
    "two nodes are stopped: they start with a new expiry": (
        request(),
        cluster_of(make_node(0, state="stopped"), make_node(1, state="stopping")),
        (
            Step(do="start", numbers=(0, 1), instances=("i-0", "i-1")),
            Step(do="expire", instances=("i-0", "i-1"), value="2026-11-22T12:00:00Z"),
        ),
    ),
    "two clients filled one number: the first stays": (
        request(),
        cluster_of(make_node(0), make_node(1), make_node(1, instance_id="i-9", launched=NOW), size=2),
        (Step(do="end", numbers=(1,), instances=("i-9",), why="i-1 is node1 already"),),
    ),
    "a node that the cluster gave up": (
        request(),
        cluster_of(make_node(-1, instance_id="i-9"), *PAIR, size=2),
        (Step(do="end", numbers=(-1,), instances=("i-9",), why="2 nodes requested"),),
    ),
    "another type": (
        request(cluster__instance_type="g6.xlarge"),
        cluster_of(*PAIR),
        (
            *(
                Step(
                    do="end",
                    numbers=(number,),
                    instances=(f"i-{number}",),
                    why="it is a g5.xlarge, but g6.xlarge is requested: it is rebuilt",
                )
                for number in (0, 1)
            ),
            Step(do="launch", numbers=(0, 1)),
        ),
    ),
    "the second of two requested types": (
        request(cluster__instance_type="p4d.24xlarge,g5.xlarge"),
        cluster_of(*PAIR),
        (),
    ),
    "without GPUs": (
        request(local__gpus="off"),
        cluster_of(make_node(0)),
        (
            Step(
                do="end",
                numbers=(0,),
                instances=("i-0",),
                why="local.gpus is on, but off is requested: it is rebuilt",
            ),
            Step(do="launch", numbers=(0,)),
        ),
    ),
    "still without GPUs": (request(local__gpus="off"), cluster_of(*PAIR, gpus="off"), ()),
    "GPUs that it has": (request(cluster__gpus="A10G:1"), cluster_of(*PAIR), ()),
    "the expiry is requested: it counts from now": (
        request(cluster__expires="24h"),
        cluster_of(*PAIR),
        (Step(do="expire", instances=("i-0", "i-1"), value="2026-11-22T12:00:00Z"),),
    ),
    "the expiry is requested twice within a minute": (
        request(cluster__expires="24h"),
        cluster_of(
            *(make_node(number, expires=LATER - timedelta(seconds=40)) for number in (0, 1)),
            expires=LATER - timedelta(seconds=40),
        ),
        (),
    ),
    "one node has an older expiry": (
        request(),
        cluster_of(make_node(0, expires=LATER), make_node(1), expires=LATER),
        (Step(do="expire", instances=("i-1",), value="2026-11-22T12:00:00Z"),),
    ),
    "the client has another address": (
        request(),
        cluster_of(*PAIR, opened=("198.51.100.9/32", "10.0.0.0/8")),
        (
            Step(
                do="open",
                value=f"10.0.0.0/8, {CLIENT}",
                why=f"{CLIENT} is new, 198.51.100.9/32 is closed",
            ),
        ),
    ),
    "the client is within an open block": (request(), cluster_of(*PAIR, opened=("203.0.113.0/24",)), ()),
    "a jump host is requested": (
        request(network__jump="bastion", network__ssh_cidr="sg-0123456789abcdef0"),
        cluster_of(*PAIR),
        (
            Step(
                do="open",
                value="sg-0123456789abcdef0",
                why=f"sg-0123456789abcdef0 is new, {CLIENT} is closed",
            ),
        ),
    ),
    "Systems Manager is requested": (
        request(network__jump="ssm"),
        cluster_of(*(replace(node, profile="arn:aws:iam::1:instance-profile/trainers") for node in PAIR)),
        (Step(do="open", value="", why=f"{CLIENT} is closed"),),
    ),
    "a group that the user opened stays": (request(), cluster_of(*PAIR, opened=("sg-12345678", CLIENT)), ()),
    "the user's own security group is not changed": (
        request(),
        cluster_of(*PAIR, cluster=replace(cluster_of(*PAIR).cluster, group=None, ssh_cidrs=None)),
        (),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_reconciliation_has_the_expected_steps(case: str) -> None:
    spec, existing, expected = CASES[case]
    assert plan(spec, existing).steps == expected


def test_a_reconciled_cluster_needs_no_more_steps() -> None:
    change = plan(request(cluster__nodes=3), cluster_of(*PAIR))
    grown = cluster_of(*PAIR, *(make_node(number) for number in change.numbers))
    assert plan(request(cluster__nodes=3), grown).steps == ()


def test_added_nodes_have_the_type_image_and_zone_of_the_existing_nodes() -> None:
    change = plan(
        request(
            cluster__nodes=3,
            cluster__instance_type="p4d.24xlarge,g5.xlarge",
            capacity__regions='["eu-west-1"]',
        ),
        cluster_of(*PAIR),
    )
    spec = change.spec
    assert (spec.cluster.nodes, spec.cluster.instance_type, spec.cluster.image) == (3, "g5.xlarge", "ami-1")
    assert (spec.capacity.regions, change.zone) == ((), "us-east-1b")
    assert (spec.cluster.expires, spec.network.ssh_cidr) == ("14400s", (CLIENT,))


def test_a_cluster_that_is_rebuilt_may_use_any_zone_of_the_region() -> None:
    change = plan(request(cluster__instance_type="g6.xlarge"), cluster_of(*PAIR))
    assert (change.zone, change.nodes, change.spec.cluster.image) == (None, (), None)


def test_the_instance_type_stays_after_all_nodes_are_lost() -> None:
    assert plan(request(), cluster_of(size=2)).spec.cluster.instance_type == "g5.xlarge"


@pytest.mark.parametrize(
    ("before", "image_id", "count"),
    [(None, "ami-2", 2), ("ami-1", "ami-2", 2), ("ami-2", "ami-2", 0), (None, "ami-1", 0)],
)
def test_nodes_are_rebuilt_only_for_an_image_that_was_not_requested_before(
    before: str | None, image_id: str, count: int
) -> None:
    change = plan(request(cluster__image="ami-2"), cluster_of(*PAIR, image=before), image_id=image_id)
    assert len(change.steps_of("end")) == count


def test_a_second_cluster_with_the_same_name_is_ended() -> None:
    other = replace(cluster_of(make_node(0, instance_id="i-8")).cluster, id="ffffffff")
    [step] = plan(request(), cluster_of(*PAIR, others=(other,))).steps
    assert (step.do, step.instances, step.value) == ("end", ("i-8",), "ffffffff")
    assert "second cluster demo (ffffffff)" in str(step)


def test_a_longer_expiry_in_the_file_moves_the_expiry_and_a_shorter_one_does_not() -> None:
    for text, moved in (("48h", True), ("24h", False), ("1h", False)):
        spec, _ = load("demo", environ={"AWSDDP_CLUSTER_EXPIRES": text})
        assert bool(plan(spec, cluster_of(*PAIR)).steps_of("expire")) is moved, text


def test_a_budget_ends_a_cluster_earlier_the_more_nodes_it_has() -> None:
    existing = cluster_of(*PAIR, spent_usd=40.0, rate=Rate(usd_per_hour=40.0))
    two_nodes = plan(request(cluster__budget_usd=100.0), existing)
    assert two_nodes.expires == NOW + timedelta(hours=1.5)
    four_nodes = plan(request(cluster__budget_usd=100.0, cluster__nodes=4), existing)
    assert four_nodes.expires == NOW + timedelta(hours=0.75)
    assert plan(request(cluster__budget_usd=1000.0), existing).expires == EXPIRES
    # A difference of seconds does not move the expiry.
    repeated = replace(existing, expires=two_nodes.expires + timedelta(seconds=20))
    assert plan(request(cluster__budget_usd=100.0), repeated).expires == repeated.expires


def test_a_step_that_moves_the_expiry_names_the_assumed_spot_price() -> None:
    rate = Rate(usd_per_hour=40.0, source="the highest spot price of the last 7 days")
    [step] = plan(request(cluster__budget_usd=100.0), cluster_of(*PAIR, spent_usd=40.0, rate=rate)).steps
    assert str(step) == (
        "move the expiry to 2026-11-21T13:30:00Z: the budget of $100.00 ($40.00 spent) at up to $40.00 per "
        "hour, the highest spot price of the last 7 days"
    )


def test_unknown_spending_is_estimated_at_the_assumed_price_since_the_launch() -> None:
    existing = cluster_of(*PAIR, spent_usd=None, rate=Rate(usd_per_hour=40.0))  # 20 h old
    assert plan(request(cluster__budget_usd=900.0), existing).expires == NOW + timedelta(hours=2.5)


def test_a_rebuilt_cluster_has_the_remaining_budget() -> None:
    existing = cluster_of(*PAIR, spent_usd=99.0, rate=Rate(usd_per_hour=40.0))
    change = plan(request(cluster__budget_usd=100.0, cluster__instance_type="g6.xlarge"), existing)
    assert (change.nodes, change.spent_usd) == ((), 99.0)
    assert change.spec.cluster.budget_usd == 100.0


def test_nodes_without_a_role_are_not_moved_to_systems_manager() -> None:
    spec = request(network__jump="ssm", access__instance_profile="arn:aws:iam::1:instance-profile/x/trainers")
    existing = cluster_of(*PAIR, make_node(2, profile="arn:aws:iam::1:instance-profile/trainers"))
    with pytest.raises(
        ConfigError, match=r"network\.jump: node0, node1 without an instance profile"
    ) as refused:
        plan(spec, existing)
    assert refused.value.next.startswith(
        "for i in i-0 i-1; do aws ec2 associate-iam-instance-profile --instance-id $i "
        "--iam-instance-profile Name=trainers --region us-east-1; done   #"
    )
    # Nodes that are replaced get the role of the spec, and without one nothing is closed either.
    rebuilt = replace(spec, cluster=replace(spec.cluster, replace=("i-0", "i-1")))
    assert [step.do for step in plan(rebuilt, existing).steps] == ["open", "end", "end", "launch"]
    with pytest.raises(ConfigError, match=r"needs access\.instance_profile"):
        plan(replace(rebuilt, access=replace(spec.access, instance_profile=None)), existing)


@pytest.mark.parametrize("price", [40.0, None])
def test_a_budget_that_is_spent_is_refused(price: float | None) -> None:
    existing = cluster_of(*PAIR, spent_usd=99.0, rate=Rate(usd_per_hour=price))
    with pytest.raises(ConfigError, match=r"cluster\.budget_usd: \$100\.00 is spent"):
        plan(request(cluster__budget_usd=100.0), existing)
