"""Answers in the format of AWS (tests/support/recorded/), read by each parser of awsddp/aws/."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from awsddp.aws import account_resources, clusters
from awsddp.compat.types import GPU_TYPES
from awsddp.errors import AwsddpError, CapacityError, ConfigError
from tests.support.recordings import FOLDER, PARSERS, Replay, recording

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
ERRORS = [name for name in NAMES if "error" in recording(name)]


@pytest.fixture(scope="module")
def replay(server: object) -> Replay:
    return Replay()


def parse(replay: Replay, *names: str) -> Any:
    replay.play(*names)
    return PARSERS[names](replay.aws)


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_names_its_source_and_has_a_parser(name: str) -> None:
    entry = recording(name)
    assert entry["facts_from"]
    assert name.startswith(f"{entry['operation']}-")
    assert ("error" in entry) != ("answer" in entry)
    assert "error" in entry or any(name in names for names in PARSERS)


@pytest.mark.parametrize("name", ["g6f.xlarge", "p6-b300.48xlarge", "p4d.24xlarge"])
def test_described_types_match_the_table(replay: Replay, name: str) -> None:
    kind, row = parse(replay, f"DescribeInstanceTypes-{name}"), GPU_TYPES[name]
    assert kind.memory_gb == pytest.approx(row.memory_gb, abs=0.1)
    described = replace(kind, memory_gb=row.memory_gb, capability=row.capability)
    price = {"price_usd_per_hour": row.price_usd_per_hour, "price_date": row.price_date}
    assert replace(described, **price) == row


def test_a_type_has_the_name_that_ec2_gives_its_gpu(replay: Replay) -> None:
    kind = parse(replay, "DescribeInstanceTypes-g7e.12xlarge")
    assert (kind.gpu, kind.gpus, kind.network, kind.efa) == ("RTX PRO Server 6000", 2, "400", 1)


def test_nodes_of_a_launch_are_in_the_order_of_their_numbers(replay: Replay) -> None:
    first, second = parse(replay, "RunInstances-two")
    assert [(node.node, node.instance_id[-1]) for node in (first, second)] == [(0, "9"), (1, "7")]
    assert first.uses == (
        ("SecurityGroups", "launch-wizard-1", "sg-0a"),
        ("KeyPairs", "mine", "mine"),
    )
    assert not first.spot


def test_stopped_instances_with_fields_of_2026_are_read(replay: Replay) -> None:
    nodes = parse(replay, "DescribeInstances-stopped")
    assert [(node.node, node.state, node.zone) for node in nodes] == [
        (0, "stopped", "us-east-1c"),
        (1, "stopped", "us-east-1c"),
    ]
    node = nodes[0]
    assert node.changed == datetime(2026, 2, 19, 22, 12, 56, tzinfo=UTC)
    assert clusters.find_end_cause(node) == (
        "node_lost",
        "Client.UserInitiatedShutdown: User initiated shutdown",
    )
    assert node.profile == "arn:aws:iam::123456789012:instance-profile/trainers"
    assert (node.expires, node.unfetched) == (datetime(2026, 2, 20, tzinfo=UTC), ("seq-1",))


def test_subnets_have_their_routes_to_the_internet_and_to_s3(replay: Replay) -> None:
    names = ("DescribeSubnets-default", "DescribeRouteTables-ways", "DescribeVpcEndpoints-s3")
    routes = {subnet.id: (subnet.route, subnet.table, subnet.reaches_s3) for subnet in parse(replay, *names)}
    assert routes == {
        "subnet-0a": ("internet", "rtb-0a", True),
        "subnet-0b": ("private", "rtb-0b", True),
        "subnet-0c": ("none", "rtb-0c", True),  # its NAT gateway is gone; S3 is reached by the endpoint
    }


@pytest.mark.parametrize(
    ("cidr", "efa", "lacks"),
    [
        ("203.0.113.7/32", False, 0),
        ("203.0.113.7/32", True, 1),
        ("198.51.100.7/32", False, 1),
        ("sg-0b", False, 1),  # only port 443 is open for it
    ],
)
def test_missing_rules_of_a_group_with_prefix_lists_and_groups_are_counted(
    replay: Replay, cidr: str, efa: bool, lacks: int
) -> None:
    replay.play("DescribeSecurityGroups-rules")
    group = account_resources.read_own_group(replay.aws, "sg-0a", cidrs=(cidr,), efa=efa)
    assert (group.id, group.vpc, len(group.lacks)) == ("sg-0a", "vpc-0a", lacks)


def test_ssh_sources_of_a_group_are_read_without_its_other_rules(replay: Replay) -> None:
    [group] = parse(replay, "DescribeSecurityGroups-rules")
    assert group.ssh_cidrs == ("203.0.113.0/24", "2001:db8::/32")


@pytest.mark.parametrize(
    "names", [("DescribeImages-dlami",), ("GetParameters-dlami", "DescribeImages-dlami")], ids=["name", "ssm"]
)
def test_the_newest_image_is_the_same_by_name_and_by_parameter(
    replay: Replay, names: tuple[str, ...]
) -> None:
    image = parse(replay, *names)
    assert (image.id, image.shown.torch, image.shown.driver) == ("ami-0d7cd40a7956dd2c4", "2.13", 595)
    assert (image.root_device, image.root_gb, image.ssh_user) == ("/dev/sda1", 75, "ubuntu")
    assert (image.owner, image.deprecated, image.newer) == ("amazon", "", "")


def test_the_last_page_of_prices_ends_the_pagination(replay: Replay) -> None:
    [(key, history)] = parse(replay, "DescribeSpotPriceHistory-last").items()
    assert (key, [usd for _, usd in history]) == (("g6.xlarge", "us-east-1a"), [0.33, 0.3421])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DescribeInstanceTypeOfferings-zones", {"g6.xlarge": ("us-east-1a", "us-east-1b")}),
        ("DescribeRegions-enabled", ("eu-central-1", "us-east-1")),
        ("GetServiceQuota-g", 0.0),
        ("GetProducts-instance", {"g6.xlarge": 0.8048}),
        ("DescribeInstanceStatus-impaired", frozenset({"i-00000000000000007"})),
        ("GetInstanceProfile-role", "arn:aws:iam::123456789012:role/trainers"),
        ("SimulatePrincipalPolicy-denied", ["s3:PutObject", "s3:PutObject"]),
    ],
)
def test_an_answer_with_one_value_is_parsed(replay: Replay, name: str, value: object) -> None:
    assert parse(replay, name) == value


@pytest.mark.parametrize(
    ("name", "by", "in_use", "instance"),
    [
        ("DescribeNetworkInterfaces-in-use", "eni-00000000000000007", True, "i-00000000000000007"),
        ("DescribeVolumes-in-use", "vol-0a", True, "i-00000000000000007"),
        ("DescribeSecurityGroups-rules", "sg-0a", False, ""),
        ("DescribePlacementGroups-cluster", "ours", False, ""),
        ("DescribeKeyPairs-ed25519", "mine", False, ""),
    ],
)
def test_resources_other_than_instances_are_parsed(
    replay: Replay, name: str, by: str, in_use: bool, instance: str
) -> None:
    [item] = parse(replay, name)
    assert (item.by, item.in_use, item.instance) == (by, in_use, instance)
    assert item.tags == {"awsddp:id": "0a1b2c3d"}


def test_a_key_an_identity_and_a_reservation_are_parsed(replay: Replay) -> None:
    replay.play("DescribeKeyPairs-ed25519")
    assert account_resources.read_own_key(replay.aws, "mine") == "ssh-ed25519 AAAAC3Nz mine"
    assert parse(replay, "GetCallerIdentity-sso").user_id == "AROAEXAMPLE:anna@example.com"
    held = parse(replay, "DescribeCapacityReservations-active")
    assert (held.instance_type, held.zone, held.free, held.state, held.tenancy) == (
        "g6.xlarge",
        "us-east-1a",
        1,
        "active",
        "default",
    )
    assert held.ends == datetime(2026, 12, 1, 11, 30, tzinfo=UTC)


def test_a_signing_key_cannot_encrypt_disks(replay: Replay) -> None:
    with pytest.raises(ConfigError, match="cannot encrypt disks") as caught:
        parse(replay, "DescribeKey-asymmetric")
    assert caught.value.why == "the key is for SIGN_VERIFY, but disks need a symmetric key"


# An error's kind, what its reason holds, and what its next step holds.
EXPECTED = {
    "DescribeInstances-closed-region": ("credentials", "AuthFailure", ""),
    "GetCallerIdentity-closed-region": ("credentials", "InvalidClientTokenId", ""),
    "RunInstances-no-capacity": ("capacity", "choosing us-east-1a", "again later"),
    "RunInstances-vcpu-limit": ("quota", "limit of 0", "--request-quota"),
    "RunInstances-pending-verification": ("aws", "being validated", "wait for its email"),
    "RunInstances-denied": ("permission", "explicit deny in a service control policy", "permission"),
    "PutObject-precondition": ("aws", "PreconditionFailed", ""),
    "UploadPart-gone": ("aws", "NoSuchUpload", ""),
    "GetObject-archived": ("aws", "InvalidObjectState", ""),
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "RunInstances": {"ImageId": "ami-0a", "MinCount": 1, "MaxCount": 1},
    "PutObject": {"Bucket": "runs", "Key": "a"},
    "UploadPart": {"Bucket": "runs", "Key": "a", "UploadId": "example", "PartNumber": 1},
    "GetObject": {"Bucket": "runs", "Key": "a"},
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_recorded_error_has_its_kind_its_reason_and_its_next_step(replay: Replay, name: str) -> None:
    replay.play(name)
    entry = recording(name)
    kind, why, hint = EXPECTED[name]
    with pytest.raises(AwsddpError) as caught:
        replay.aws.call(entry["operation"], PARAMETERS.get(entry["operation"], {}), service=entry["service"])
    error = caught.value
    assert (error.kind, isinstance(error, CapacityError)) == (kind, kind == "capacity")
    assert why in error.why
    assert len(error.why) < 600  # without the encoded message of a denial
    assert hint in error.next
