"""EC2's documented limits on what a request holds, for the plan and for the local cloud.

Lengths are characters unless they say bytes. Pure.
"""

import re

# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html#tag-restrictions
TAG_KEY = 128
TAG_VALUE = 256
TAGS = 50
"""Tags of a resource; those that AWS itself puts there do not count."""
TAG_RESERVED = "aws:"
"""No key begins so, in capitals or not."""
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_ImportKeyPair.html
KEY_NAME = 255
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateSecurityGroup.html
GROUP_NAME = 255
GROUP_DESCRIPTION = 255
GROUP_TEXT = re.compile(r"[a-zA-Z0-9 ._\-:/()#,@\[\]+=&;{}!$*]*")
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreatePlacementGroup.html
PLACEMENT_NAME = 255
# https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html#vpc-limits-security-groups
RULES = 60
"""Rules of a security group in one direction, IPv4 and IPv6 each; one that names a group counts as both."""
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html
USER_DATA_BYTES = 16 * 1024
# https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
CLIENT_TOKEN = 64
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
