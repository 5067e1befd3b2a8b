"""Finds the machine image: the newest Deep Learning AMI, or the one that was asked for."""

from datetime import UTC, datetime
from typing import Any

from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.compat.images import DLAMI_NAMES, DLAMI_PARAMETERS, explained, ssh_user, torch_version
from awsddp.errors import ConfigError
from awsddp.plan.records import Image

_GONE = frozenset(
    {"InvalidAMIID.NotFound", "InvalidAMIID.Malformed", "InvalidAMIID.Unavailable", "InvalidParameterValue"}
)


def find_image(aws: Aws, asked: str | None) -> Image:
    """Return the image to launch.

    `asked` is an id ("ami-..."), an SSM parameter ("/aws/service/..."), or a name, in which `*` stands for
    anything; None means the newest Deep Learning AMI with PyTorch. Raises ConfigError where there is none.
    """
    place, tried = "cluster.image", asked or DLAMI_NAMES
    parameter = tried.removeprefix("resolve:ssm:")
    if asked is None:
        place, found = "the region's newest Deep Learning AMI", _default(aws)
    elif asked.startswith("ami-"):
        found = _by_id(aws, asked)
    elif parameter.startswith("/"):
        found = _by_parameter(aws, (parameter,))
    else:
        found = _by_name(aws, asked)
    if found is None:
        raise ConfigError(
            f"{place}: no image {tried!r} in {aws.region}",
            explained(tried)
            or "it was deregistered, is not shared with this account, or is in another region",
            "name one with --image: an id, a name with *, or an SSM parameter; "
            "without --image the newest Deep Learning AMI is taken",
        )
    return found


def _default(aws: Aws) -> Image | None:
    try:
        found = _by_parameter(aws, DLAMI_PARAMETERS)
    except Refused:
        found = None  # the search by name needs no permission in SSM
    return found or _by_name(aws, DLAMI_NAMES)


def _by_parameter(aws: Aws, names: tuple[str, ...]) -> Image | None:
    """Return the image that the first of these SSM parameters names; None where there is none."""
    reply = aws.call("GetParameters", {"Names": list(names)}, service="ssm")
    values = {parameter["Name"]: parameter["Value"] for parameter in reply["Parameters"]}
    first = next((values[name] for name in names if name in values), None)
    return _by_id(aws, first) if first else None


def _by_id(aws: Aws, image_id: str) -> Image | None:
    try:
        found = aws.call("DescribeImages", {"ImageIds": [image_id]})["Images"]
    except Refused as refusal:
        if refusal.code in _GONE:
            return None
        raise
    return _newest([_image(image) for image in found if image.get("State") == "available"])


def _by_name(aws: Aws, pattern: str) -> Image | None:
    """Return the newest image of this name; only where there is none, a deprecated one."""
    filters = [{"Name": "name", "Values": [pattern]}, {"Name": "state", "Values": ["available"]}]
    asked = {"Owners": ["amazon", "self"], "Filters": filters}
    found = aws.pages("DescribeImages", asked)
    found = found or aws.pages("DescribeImages", {**asked, "IncludeDeprecated": True})
    return _newest(list(map(_image, found)))


def _newest(images: list[Image]) -> Image | None:
    return max(images, key=lambda image: (torch_version(image.name), image.created, image.id), default=None)


def _image(described: dict[str, Any]) -> Image:
    name = described.get("Name", "")
    root = described.get("RootDeviceName", "/dev/sda1")
    disks = {disk.get("DeviceName"): disk.get("Ebs", {}) for disk in described.get("BlockDeviceMappings", [])}
    tags = {tag["Key"]: tag["Value"] for tag in described.get("Tags", [])}
    return Image(
        id=described["ImageId"],
        name=name,
        created=described.get("CreationDate", ""),
        architecture=described.get("Architecture", "x86_64"),
        root_device=root,
        root_gb=int(disks.get(root, {}).get("VolumeSize", 0)),
        ssh_user=tags.get("awsddp:ssh-user") or ssh_user(name),
        owner=described.get("ImageOwnerAlias") or described.get("OwnerId", ""),
        deprecated=_past(described.get("DeprecationTime", "")),
        platform=described.get("PlatformDetails", "Linux/UNIX"),
        tags=tags,
    )


def _past(moment: str) -> str:
    """Return a time of EC2's where it is past, else "": AWS tells it beforehand."""
    return moment if moment and datetime.fromisoformat(moment) < datetime.now(UTC) else ""
