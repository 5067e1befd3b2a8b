"""EC2's documented limits on what a request holds, for the plan and for the local cloud.

Lengths are characters unless they say bytes. Pure.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from awsddp.errors import ConfigError

# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html#tag-restrictions
TAG_KEY = 128
TAG_VALUE = 256
TAGS = 50
"""Tags of a resource; those that AWS itself puts there do not count."""
TAG_RESERVED = "aws:"
"""No key begins so, in capitals or not."""
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateSecurityGroup.html
GROUP_TEXT = re.compile(r"[a-zA-Z0-9 ._\-:/()#,@\[\]+=&;{}!$*]*")
# https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html#vpc-limits-security-groups
RULES = 60
"""Rules of a security group in one direction, IPv4 and IPv6 each; one that names a group counts as both."""
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html
USER_DATA_BYTES = 16 * 1024
# https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
CLIENT_TOKEN = 64
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Filtering.html
FILTER_VALUES = 200
"""Values of a filter in one request."""
OWN_TAGS = 9
"""Tags of an instance that awsddp writes, the one for unfetched jobs among them (docs/design.md)."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def tag_fault(key: str, value: str) -> str:
    """Return why EC2 would refuse a tag, "" if it would not."""
    if not key:
        return "its key is empty"
    if key.lower().startswith(TAG_RESERVED):
        return f"keys that begin with {TAG_RESERVED} are reserved for AWS"
    if len(key) > TAG_KEY:
        return f"its key has {len(key)} characters, EC2 accepts {TAG_KEY}"
    if len(value) > TAG_VALUE:
        return f"its value has {len(value)} characters, EC2 accepts {TAG_VALUE}"
    if _CONTROL.search(key + value):
        return "it contains a control character"
    return ""


def check_user_tags(tags: Mapping[str, str]) -> None:
    """Raise ConfigError for tags of the user's that cannot be put on every resource of a cluster."""
    for key, value in tags.items():
        fault = tag_fault(key, value)
        if key.startswith("awsddp:") or key == "Name":
            fault = "awsddp writes this tag itself"
        if fault:
            raise ConfigError(
                f"tags.{key}: {value!r} cannot be put on a resource",
                fault,
                "choose another key or a shorter value",
            )
    if len(tags) > TAGS - OWN_TAGS:
        raise ConfigError(
            f"tags: {len(tags)} tags are too many",
            f"a resource has at most {TAGS} tags, and awsddp needs {OWN_TAGS} of them",
            f"leave out {len(tags) - TAGS + OWN_TAGS}",
        )


def check_tag_specifications(requests: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ConfigError where a tag that awsddp itself writes is over a limit; placeholders are not."""
    for operation, parameters in requests:
        for one in parameters.get("TagSpecifications", ()):
            for tag in one["Tags"]:
                value = tag["Value"] if isinstance(tag["Value"], str) else ""
                if fault := tag_fault(tag["Key"], value):
                    raise ConfigError(
                        f"{operation}: EC2 would refuse the tag {tag['Key']} of the {one['ResourceType']}",
                        fault,
                        "launch fewer nodes at once, or report this with the command that you typed",
                    )


def check_rules(cidrs: Sequence[str]) -> None:
    """Raise ConfigError for more SSH sources than a group has rules, beside the one for the group itself."""
    for version, mark in (("IPv4", "."), ("IPv6", ":")):
        if (count := sum(mark in one or one.startswith("sg-") for one in cidrs)) > RULES - 1:
            raise ConfigError(
                f"network.ssh_cidr: {count} {version} address blocks and groups are too many",
                f"a security group has at most {RULES} rules, and one lets the nodes talk to each other",
                "name fewer and larger blocks, or your own group: -o network.security_group=sg-...",
            )
