"""Tags written to instances that are there, though AWS may not list them everywhere yet."""

from collections.abc import Sequence

from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.aws.waits import CLOCK, Clock, patiently


def unlisted(refusal: Refused) -> bool:
    """Whether AWS does not find an instance, which may have been launched a moment ago."""
    return refusal.code == "InvalidInstanceID.NotFound"


def tag(aws: Aws, instance_ids: Sequence[str], name: str, value: str, *, clock: Clock = CLOCK) -> None:
    """Write a tag of instances, or take it off where `value` is empty. Raises CloudError."""
    operation, pair = "CreateTags", {"Key": name, "Value": value}
    if not value:
        operation, pair = "DeleteTags", {"Key": name}
    request = {"Resources": list(instance_ids), "Tags": [pair]}
    patiently(lambda: aws.call(operation, request), passes=unlisted, clock=clock)
