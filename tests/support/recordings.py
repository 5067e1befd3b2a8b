"""Responses as AWS returns them (tests/support/recorded/), for awsddp's own client of AWS.

Each file names its sources (public logs, recordings and examples, botocore's model), and has a response as
boto3 returns it (times as ISO texts), or an error. The fields and types are those of AWS; most values are
made up.
"""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from botocore.model import ListShape, MapShape, OperationModel, Shape, StructureShape

from awsddp.aws import account_resources, clusters, instances, plan_facts, prices
from awsddp.aws.client import AwsClient, Identity
from awsddp.model.records import Node, Target
from awsddp.util.parallel import ignore_event

FOLDER = Path(__file__).parent / "recorded"
LAUNCH = {"ImageId": "ami-0a", "MinCount": 2, "MaxCount": 2}
RUNNING = Node(
    node=0,
    instance_id="i-00000000000000007",
    state="running",
    instance_type="t3.micro",
    zone="us-east-1c",
    image_id="ami-0a",
)
EPOCH = datetime.fromisoformat("2026-01-01T00:00:00+00:00")


@cache
def recording(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return document


@dataclass
class Replay:
    """A client of AWS with recorded responses: `answers` has the document of each operation."""

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: dict[str, OperationModel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.aws = AwsClient(Target(region="us-east-1", access_key_id="testing", secret_access_key="testing"))
        self.aws._session.register("before-call", self._answer)

    def play(self, *names: str) -> None:
        self.answers = {recording(name)["operation"]: recording(name) for name in names}

    def parsed_answer(self, operation: str) -> Any:
        """Return the recorded response of an operation as botocore returns it."""
        return parse_shape(self.models[operation].output_shape, deepcopy(self.answers[operation]["answer"]))

    def _answer(self, model: OperationModel, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.models[model.name] = model
        document = self.answers[model.name]
        status = document.get("status", 200)
        metadata = {"HTTPStatusCode": status, "HTTPHeaders": {}, "RequestId": "r-1"}
        parsed = {"Error": document["error"]} if "error" in document else self.parsed_answer(model.name)
        return SimpleNamespace(status_code=status), {**parsed, "ResponseMetadata": metadata}


def parse_shape(shape: Shape | None, value: Any) -> Any:
    """Return a value with parsed times, as botocore does. Raises KeyError for a field that botocore lacks."""
    match shape:
        case StructureShape():
            return {key: parse_shape(shape.members[key], child) for key, child in value.items()}
        case ListShape():
            return [parse_shape(shape.member, child) for child in value]
        case MapShape():
            return {key: parse_shape(shape.value, child) for key, child in value.items()}
    if shape is not None and shape.type_name == "timestamp":
        return datetime.fromisoformat(value)
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "boolean": (bool,),
        "integer": (int,),
        "long": (int,),
        "double": (float,),
        "float": (float,),
    }
    assert shape is None or isinstance(value, kinds[shape.type_name]), (shape, value)
    return value


def resources_of(kind: clusters.ResourceKind) -> Callable[[AwsClient], Any]:
    return lambda aws: clusters.list_resources(aws, [], [kind])


def of_type(name: str) -> Callable[[AwsClient], Any]:
    return lambda aws: plan_facts._describe_type(aws, name)


PARSERS: dict[tuple[str, ...], Callable[[AwsClient], Any]] = {
    ("DescribeInstanceTypes-g6f.xlarge",): of_type("g6f.xlarge"),
    ("DescribeInstanceTypes-g7e.12xlarge",): of_type("g7e.12xlarge"),
    ("DescribeInstanceTypes-p6-b300.48xlarge",): of_type("p6-b300.48xlarge"),
    ("DescribeInstanceTypes-p4d.24xlarge",): of_type("p4d.24xlarge"),
    ("DescribeInstanceTypeOfferings-zones",): lambda aws: plan_facts._offers(aws, ["g6.xlarge"]),
    ("DescribeRegions-enabled",): plan_facts.list_enabled_regions,
    ("DescribeImages-dlami",): lambda aws: plan_facts.find_image(aws, None),
    ("GetParameters-dlami", "DescribeImages-dlami"): lambda aws: plan_facts.find_image(aws, "/aws/service/x"),
    ("GetServiceQuota-g",): lambda aws: plan_facts._quota(aws, "L-DB2E81BA"),
    ("GetProducts-instance",): lambda aws: prices.read_on_demand_prices(aws, ["g6.xlarge"]),
    ("DescribeSpotPriceHistory-last",): lambda aws: prices.read_spot_history(aws, ["g6.xlarge"], since=EPOCH),
    ("GetCallerIdentity-sso",): lambda aws: Identity.from_reply(
        aws.call("GetCallerIdentity", {}, service="sts")
    ),
    ("RunInstances-two",): lambda aws: instances._run(aws, LAUNCH, on_event=ignore_event),
    ("DescribeInstances-stopped",): lambda aws: clusters.describe(aws, []),
    ("DescribeInstanceStatus-impaired",): lambda aws: instances.list_impaired(aws, [RUNNING]),
    ("DescribeNetworkInterfaces-in-use",): resources_of(clusters.INTERFACES),
    ("DescribeVolumes-in-use",): resources_of(clusters.KINDS[1]),
    ("DescribeSecurityGroups-rules",): resources_of(clusters.GROUPS),
    ("DescribePlacementGroups-cluster",): resources_of(clusters.PLACEMENTS),
    ("DescribeKeyPairs-ed25519",): resources_of(clusters.KEYS),
    (
        "DescribeSubnets-default",
        "DescribeRouteTables-ways",
        "DescribeVpcEndpoints-s3",
    ): lambda aws: account_resources.with_s3_routes(aws, account_resources.find_subnets(aws, None)),
    ("DescribeCapacityReservations-active",): lambda aws: account_resources.find_reservation(aws, "cr-0a"),
    ("GetInstanceProfile-role",): lambda aws: account_resources.find_role(aws, "trainers"),
    ("DescribeKey-asymmetric",): lambda aws: account_resources.check_disk_key(aws, "alias/disks"),
    ("SimulatePrincipalPolicy-denied",): lambda aws: list(
        account_resources.list_missing_actions(aws, "arn:aws:iam::123456789012:role/trainers", "s3://runs")
    ),
}
"""The parsers of awsddp/aws/, by the recordings that they read."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each field of a response, including structures and lists."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield (*path, key)
            yield from leaves(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))


def without_field(answer: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """Return a copy of a response without a field."""
    copied = deepcopy(answer)
    *above, last = path
    parent: Any = copied
    for key in above:
        parent = parent[key]
    del parent[last]
    return copied


def read_fields(replay: Replay, names: tuple[str, ...]) -> dict[str, set[tuple[str, ...]]]:
    """Return the fields that a parser reads, by operation: those without which its result differs."""
    fields: dict[str, set[tuple[str, ...]]] = {}
    replay.play(*names)
    before = outcome(replay, names)
    for operation, document in list(replay.answers.items()):
        for path in leaves(document["answer"]):
            replay.answers[operation] = {**document, "answer": without_field(document["answer"], path)}
            if outcome(replay, names) != before:
                fields.setdefault(operation, set()).add(tuple(key for key in path if isinstance(key, str)))
        replay.answers[operation] = document
    return fields


def outcome(replay: Replay, names: tuple[str, ...]) -> Any:
    """Return the result of a parser, or the repr of its exception."""
    try:
        return PARSERS[names](replay.aws)
    except Exception as error:
        return repr(error)
