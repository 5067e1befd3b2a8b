"""From what was asked and what exists to the steps between them, by equality."""

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
HERE = "203.0.113.7/32"


def node(number: int, **changes: Any) -> Node:
    made = Node(
        node=number,
        instance_id=f"i-{number}",
        state="running",
        instance_type="g5.xlarge",
        zone="us-east-1b",
        image_id="ami-1",
        launched=CREATED,
        expires=EXPIRES,
    )
    return replace(made, **changes)


def standing(
    *nodes: Node, size: int | None = None, opened: tuple[str, ...] = (HERE,), **changes: Any
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
    given: dict[str, Any] = {
        "cluster": cluster,
        "nodes": len(nodes) if size is None else size,
        "instance_type": "g5.xlarge",
        "expires": EXPIRES,
    }
    return ExistingCluster(**(given | changes))


def asked(**keys: Any) -> ClusterSpec:
    return load("demo", environ={}, overrides={key.replace("__", "."): value for key, value in keys.items()})[
        0
    ]


def steps(spec: ClusterSpec, exists: ExistingCluster, *, image_id: str = "ami-1") -> Reconciliation:
    return plan_reconciliation(spec, exists, image_id=image_id, callers=(HERE,), now=NOW)


PAIR = (node(0), node(1))
LATER = NOW + timedelta(hours=24)

CASES: dict[str, tuple[ClusterSpec, ExistingCluster, tuple[Step, ...]]] = {
    "nothing asked, nothing to do": (asked(), standing(*PAIR), ()),
    "as many as there are": (asked(cluster__nodes=2), standing(*PAIR), ()),
    "more": (
        asked(cluster__nodes=4),
        standing(*PAIR),
        (Step(do="launch", numbers=(2, 3)),),
    ),
    "fewer: the highest go": (
        asked(cluster__nodes=1),
        standing(*PAIR),
        (Step(do="end", numbers=(1,), instances=("i-1",), why="1 node requested"),),
    ),
    "one was lost": (
        asked(),
        standing(node(0), node(1, state="terminated")),
        (Step(do="launch", numbers=(1,), why="node1 ended"),),
    ),
    "one is on its way out": (
        asked(),
        standing(node(0, state="shutting-down"), node(1)),
        (Step(do="launch", numbers=(0,), why="node0 ended"),),
    ),
    "all were lost": (
        asked(),
        standing(size=2),
        (Step(do="launch", numbers=(0, 1), why="node0, node1 ended"),),
    ),
    "one is impaired": (
        asked(),
        standing(*PAIR, impaired=frozenset({"i-1"})),
        (
            Step(do="end", numbers=(1,), instances=("i-1",), why="AWS's status checks report it impaired"),
            Step(do="launch", numbers=(1,)),
        ),
    ),
    "one is to be replaced": (
        asked(cluster__replace=("i-1", "i-gone")),
        standing(*PAIR),
        (
            Step(
                do="end",
                numbers=(1,),
                instances=("i-1",),
                why="its replacement is requested; it is lost even if AWS has no other machine",
            ),
            Step(do="launch", numbers=(1,)),
        ),
    ),
    "two are stopped: they start with a new term": (
        asked(),
        standing(node(0, state="stopped"), node(1, state="stopping")),
        (
            Step(do="start", numbers=(0, 1), instances=("i-0", "i-1")),
            Step(do="expire", instances=("i-0", "i-1"), value="2026-11-22T12:00:00Z"),
        ),
    ),
    "two clients filled one number: the first stays": (
        asked(),
        standing(node(0), node(1), node(1, instance_id="i-9", launched=NOW), size=2),
        (Step(do="end", numbers=(1,), instances=("i-9",), why="i-1 is node1 already"),),
    ),
    "one that the cluster gave up": (
        asked(),
        standing(node(-1, instance_id="i-9"), *PAIR, size=2),
        (Step(do="end", numbers=(-1,), instances=("i-9",), why="2 nodes requested"),),
    ),
    "another type": (
        asked(cluster__instance_type="g6.xlarge"),
        standing(*PAIR),
        (
            *(
                Step(
                    do="end",
                    numbers=(number,),
                    instances=(f"i-{number}",),
                    why="it is a g5.xlarge, g6.xlarge is requested: it is rebuilt",
                )
                for number in (0, 1)
            ),
            Step(do="launch", numbers=(0, 1)),
        ),
    ),
    "a type that was tried second is as good": (
        asked(cluster__instance_type="p4d.24xlarge,g5.xlarge"),
        standing(*PAIR),
        (),
    ),
    "without GPUs": (
        asked(local__gpus="off"),
        standing(node(0)),
        (
            Step(
                do="end",
                numbers=(0,),
                instances=("i-0",),
                why="local.gpus is on, off is requested: it is rebuilt",
            ),
            Step(do="launch", numbers=(0,)),
        ),
    ),
    "without GPUs, as it was made": (asked(local__gpus="off"), standing(*PAIR, gpus="off"), ()),
    "GPUs that it has": (asked(cluster__gpus="A10G:1"), standing(*PAIR), ()),
    "the expiry is said: it counts from now": (
        asked(cluster__expires="24h"),
        standing(*PAIR),
        (Step(do="expire", instances=("i-0", "i-1"), value="2026-11-22T12:00:00Z"),),
    ),
    "the expiry is said twice within a minute": (
        asked(cluster__expires="24h"),
        standing(
            *(node(number, expires=LATER - timedelta(seconds=40)) for number in (0, 1)),
            expires=LATER - timedelta(seconds=40),
        ),
        (),
    ),
    "one was not told the expiry": (
        asked(),
        standing(node(0, expires=LATER), node(1), expires=LATER),
        (Step(do="expire", instances=("i-1",), value="2026-11-22T12:00:00Z"),),
    ),
    "the user is elsewhere now": (
        asked(),
        standing(*PAIR, opened=("198.51.100.9/32", "10.0.0.0/8")),
        (
            Step(
                do="open",
                value=f"10.0.0.0/8, {HERE}",
                why=f"{HERE} is new, 198.51.100.9/32 is closed",
            ),
        ),
    ),
    "the user is within a block that is open": (asked(), standing(*PAIR, opened=("203.0.113.0/24",)), ()),
    "over a jump host from now on": (
        asked(network__jump="bastion", network__ssh_cidr="sg-0123456789abcdef0"),
        standing(*PAIR),
        (
            Step(
                do="open",
                value="sg-0123456789abcdef0",
                why=f"sg-0123456789abcdef0 is new, {HERE} is closed",
            ),
        ),
    ),
    "through Systems Manager from now on": (
        asked(network__jump="ssm"),
        standing(*(replace(one, profile="arn:aws:iam::1:instance-profile/trainers") for one in PAIR)),
        (Step(do="open", value="", why=f"{HERE} is closed"),),
    ),
    "a group that somebody named stays": (asked(), standing(*PAIR, opened=("sg-12345678", HERE)), ()),
    "a group of one's own is left alone": (
        asked(),
        standing(*PAIR, cluster=replace(standing(*PAIR).cluster, group=None, ssh_cidrs=None)),
        (),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_steps(case: str) -> None:
    spec, exists, expected = CASES[case]
    assert steps(spec, exists).steps == expected


def test_what_was_carried_out_needs_no_more_steps() -> None:
    change = steps(asked(cluster__nodes=3), standing(*PAIR))
    grown = standing(*PAIR, *(node(number) for number in change.numbers))
    assert steps(asked(cluster__nodes=3), grown).steps == ()


def test_what_is_launched_beside_others_is_as_they_are() -> None:
    change = steps(
        asked(
            cluster__nodes=3,
            cluster__instance_type="p4d.24xlarge,g5.xlarge",
            capacity__regions='["eu-west-1"]',
        ),
        standing(*PAIR),
    )
    spec = change.spec
    assert (spec.cluster.nodes, spec.cluster.instance_type, spec.cluster.image) == (3, "g5.xlarge", "ami-1")
    assert (spec.capacity.regions, change.zone) == ((), "us-east-1b")
    assert (spec.cluster.expires, spec.network.ssh_cidr) == ("14400s", (HERE,))


def test_what_takes_the_place_of_all_may_go_anywhere_in_the_region() -> None:
    change = steps(asked(cluster__instance_type="g6.xlarge"), standing(*PAIR))
    assert (change.zone, change.nodes, change.spec.cluster.image) == (None, (), None)


def test_after_the_loss_of_all_the_type_stays() -> None:
    assert steps(asked(), standing(size=2)).spec.cluster.instance_type == "g5.xlarge"


@pytest.mark.parametrize(
    ("asked_before", "now_id", "ended"),
    [(None, "ami-2", 2), ("ami-1", "ami-2", 2), ("ami-2", "ami-2", 0), (None, "ami-1", 0)],
)
def test_another_image_is_one_that_was_not_asked_for_before(
    asked_before: str | None, now_id: str, ended: int
) -> None:
    change = steps(asked(cluster__image="ami-2"), standing(*PAIR, image=asked_before), image_id=now_id)
    assert len(change.steps_of("end")) == ended


def test_a_second_cluster_of_the_name_is_named_and_ended() -> None:
    other = replace(standing(node(0, instance_id="i-8")).cluster, id="ffffffff")
    [step] = steps(asked(), standing(*PAIR, others=(other,))).steps
    assert (step.do, step.instances, step.value) == ("end", ("i-8",), "ffffffff")
    assert "second cluster demo (ffffffff)" in str(step)


def test_a_longer_term_in_the_file_moves_the_expiry_and_a_shorter_one_does_not() -> None:
    for text, moved in (("48h", True), ("24h", False), ("1h", False)):
        spec, _ = load("demo", environ={"AWSDDP_CLUSTER_EXPIRES": text})
        assert bool(steps(spec, standing(*PAIR)).steps_of("expire")) is moved, text


def test_a_budget_ends_a_cluster_earlier_the_more_nodes_it_has() -> None:
    exists = standing(*PAIR, spent_usd=40.0, rate=Rate(usd_per_hour=40.0))
    kept = steps(asked(cluster__budget_usd=100.0), exists)
    assert kept.expires == NOW + timedelta(hours=1.5)
    grown = steps(asked(cluster__budget_usd=100.0, cluster__nodes=4), exists)
    assert grown.expires == NOW + timedelta(hours=0.75)
    assert steps(asked(cluster__budget_usd=1000.0), exists).expires == EXPIRES
    # What was computed a moment ago is not moved by seconds.
    again = replace(exists, expires=kept.expires + timedelta(seconds=20))
    assert steps(asked(cluster__budget_usd=100.0), again).expires == again.expires


def test_a_budget_on_spot_tells_the_price_that_moves_the_expiry() -> None:
    rate = Rate(usd_per_hour=40.0, source="the highest spot price of the last 7 days")
    [step] = steps(asked(cluster__budget_usd=100.0), standing(*PAIR, spent_usd=40.0, rate=rate)).steps
    assert str(step) == (
        "move the expiry to 2026-11-21T13:30:00Z: the budget of $100.00 ($40.00 spent) at up to $40.00 per "
        "hour, the highest spot price of the last 7 days"
    )


def test_a_cluster_whose_cost_is_unknown_has_spent_its_budget_at_the_assumed_price_since_its_launch() -> None:
    exists = standing(*PAIR, spent_usd=None, rate=Rate(usd_per_hour=40.0))  # 20 h old
    assert steps(asked(cluster__budget_usd=900.0), exists).expires == NOW + timedelta(hours=2.5)


def test_a_cluster_that_is_rebuilt_has_the_budget_that_is_left_at_the_price_of_its_new_type() -> None:
    exists = standing(*PAIR, spent_usd=99.0, rate=Rate(usd_per_hour=40.0))
    change = steps(asked(cluster__budget_usd=100.0, cluster__instance_type="g6.xlarge"), exists)
    assert (change.nodes, change.spent_usd) == ((), 99.0)
    assert change.spec.cluster.budget_usd == 100.0


def test_nodes_without_a_role_are_not_moved_to_systems_manager() -> None:
    spec = asked(network__jump="ssm", access__instance_profile="arn:aws:iam::1:instance-profile/x/trainers")
    exists = standing(*PAIR, node(2, profile="arn:aws:iam::1:instance-profile/trainers"))
    with pytest.raises(
        ConfigError, match=r"network\.jump: node0, node1 without an instance profile"
    ) as refused:
        steps(spec, exists)
    assert refused.value.next.startswith(
        "for i in i-0 i-1; do aws ec2 associate-iam-instance-profile --instance-id $i "
        "--iam-instance-profile Name=trainers --region us-east-1; done   #"
    )
    # Nodes that are replaced get the role of the spec, and without one nothing is closed either.
    rebuilt = replace(spec, cluster=replace(spec.cluster, replace=("i-0", "i-1")))
    assert [step.do for step in steps(rebuilt, exists).steps] == ["open", "end", "end", "launch"]
    with pytest.raises(ConfigError, match=r"needs access\.instance_profile"):
        steps(replace(rebuilt, access=replace(spec.access, instance_profile=None)), exists)


@pytest.mark.parametrize("price", [40.0, None])
def test_a_budget_that_is_spent_is_refused(price: float | None) -> None:
    exists = standing(*PAIR, spent_usd=99.0, rate=Rate(usd_per_hour=price))
    with pytest.raises(ConfigError, match=r"cluster\.budget_usd: \$100\.00 is spent"):
        steps(asked(cluster__budget_usd=100.0), exists)
