"""EC2's documented limits on requests, which the plan and the local cloud check.

Lengths are in characters, unless the limit's name contains BYTES. The functions are pure.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from awsddp.errors import ConfigError

# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html#tag-restrictions
MAX_TAG_KEY = 128
MAX_TAG_VALUE = 256
MAX_TAGS = 50
"""The most tags that a resource may have; tags that AWS itself sets do not count."""
RESERVED_TAG_PREFIX = "aws:"
"""Tag keys must not begin with this prefix, in upper or lower case."""
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateSecurityGroup.html
GROUP_DESCRIPTION = re.compile(r"[a-zA-Z0-9 ._\-:/()#,@\[\]+=&;{}!$*]*")
# https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html#vpc-limits-security-groups
MAX_RULES = 60
"""The most rules that a security group may have in one direction, counted separately for IPv4 and IPv6.

A rule that names a security group counts towards both limits.
"""
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html
MAX_USER_DATA_BYTES = 16 * 1024
# https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
MAX_CLIENT_TOKEN = 64
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Filtering.html
MAX_FILTER_VALUES = 200
"""The most values that a filter may have in one request."""
OWN_TAGS = 9
"""How many tags awsddp sets on an instance, including the tag for unfetched jobs (docs/design.md)."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def find_tag_fault(key: str, value: str) -> str:
    """Return the reason why EC2 would refuse a tag, or "" if EC2 would accept it."""
    if not key:
        return "its key is empty"
    if key.lower().startswith(RESERVED_TAG_PREFIX):
        return f"keys that begin with {RESERVED_TAG_PREFIX} are reserved for AWS"
    if len(key) > MAX_TAG_KEY:
        return f"its key has {len(key)} characters, but EC2 accepts only {MAX_TAG_KEY}"
    if len(value) > MAX_TAG_VALUE:
        return f"its value has {len(value)} characters, but EC2 accepts only {MAX_TAG_VALUE}"
    if _CONTROL.search(key + value):
        return "it contains a control character"
    return ""


def check_user_tags(tags: Mapping[str, str]) -> None:
    """Raise ConfigError if EC2 or awsddp does not allow these tags on all of a cluster's resources."""
    for key, value in tags.items():
        fault = find_tag_fault(key, value)
        if key.startswith("awsddp:") or key == "Name":
            fault = "awsddp writes this tag itself"
        if fault:
            raise ConfigError(
                f"tags.{key}: a resource cannot have the tag {value!r}",
                fault,
                "choose another key or a shorter value",
            )
    if len(tags) > MAX_TAGS - OWN_TAGS:
        raise ConfigError(
            f"tags: {len(tags)} tags are too many",
            f"a resource has at most {MAX_TAGS} tags, and awsddp needs {OWN_TAGS} of them",
            f"leave out {len(tags) - MAX_TAGS + OWN_TAGS}",
        )


def check_tag_specifications(requests: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ConfigError if a tag in these requests exceeds an EC2 limit. Placeholders are not checked."""
    for operation, parameters in requests:
        for specification in parameters.get("TagSpecifications", ()):
            for tag in specification["Tags"]:
                value = tag["Value"] if isinstance(tag["Value"], str) else ""
                if fault := find_tag_fault(tag["Key"], value):
                    raise ConfigError(
                        f"{operation}: EC2 would refuse the tag {tag['Key']} of the "
                        f"{specification['ResourceType']}",
                        fault,
                        "launch fewer nodes at once, or report this error and the command that you typed",
                    )


def check_rules(cidrs: Sequence[str]) -> None:
    """Raise ConfigError if there are more SSH sources than a security group has room for.

    The group needs one of its rules for the traffic between the nodes.
    """
    for version, mark in (("IPv4", "."), ("IPv6", ":")):
        if (count := sum(mark in source or source.startswith("sg-") for source in cidrs)) > MAX_RULES - 1:
            raise ConfigError(
                f"network.ssh_cidr: {count} {version} address blocks and groups are too many",
                f"a security group has at most {MAX_RULES} rules, and one is for the traffic between nodes",
                "name fewer and larger blocks, or your own group: -o network.security_group=sg-...",
            )
