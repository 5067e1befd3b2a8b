"""init: whether the answers for a starter awsddp.toml can be right, without AWS."""

import difflib
from collections.abc import Collection
from pathlib import Path

from awsddp.compat.types import GPU_TYPES, RETIRED
from awsddp.errors import UsageError
from awsddp.job.script import check_script, near_files


def doubt(key: str, answer: str) -> str:
    """Return why the value of a key is probably wrong, with what may be meant; "" where nothing is.

    `key` is one of awsddp.toml. Regions and types are those that botocore knows; AWS may have newer ones.
    """
    if key == "cluster.region":
        from awsddp.aws.client import known_regions

        return _unknown(answer, known_regions(), "an AWS region")
    if key == "cluster.instance_type":
        return next(filter(None, map(_doubt_of_type, answer.replace(",", " ").split())), "")
    if key == "job.script":
        try:
            check_script(Path(), answer, module=False)
        except UsageError as error:
            return f"{error.message}.{_meant(near_files(Path(), answer))}"
    if key == "env.file" and not Path(answer).expanduser().is_file():
        return f"file not found: {answer}.{_meant(near_files(Path(), answer))}"
    return ""


def _doubt_of_type(name: str) -> str:
    if name in RETIRED:
        return f"{name} is no longer offered by AWS."
    if name in GPU_TYPES:
        return ""
    from awsddp.aws.client import known_types

    return _unknown(name, {*GPU_TYPES, *known_types()}, "an instance type of EC2")


def _unknown(answer: str, known: Collection[str], what: str) -> str:
    if answer in known:
        return ""
    return f"{answer} is not known as {what}.{_meant(difflib.get_close_matches(answer, known, n=2))}"


def _meant(near: list[str]) -> str:
    return f" Did you mean {' or '.join(near)}?" if near else ""
