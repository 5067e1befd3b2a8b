"""init: check the answers for a starter awsddp.toml without asking AWS."""

import difflib
from collections.abc import Collection
from pathlib import Path

from awsddp.compat.types import GPU_TYPES, RETIRED
from awsddp.errors import UsageError
from awsddp.job.script import check_script, find_similar_files


def check_answer(key: str, answer: str) -> str:
    """Return why an awsddp.toml key's value is probably wrong, with a suggestion, or "" if it looks right.

    Regions and types are those that botocore knows; AWS may have newer ones.
    """
    if key == "cluster.region":
        from awsddp.aws.client import list_known_regions

        return _check_known(answer, list_known_regions(), "an AWS region")
    if key == "cluster.instance_type":
        return next(filter(None, map(_check_type, answer.replace(",", " ").split())), "")
    if key == "job.script":
        try:
            check_script(Path(), answer, module=False)
        except UsageError as error:
            return f"{error.message}.{_suggest(find_similar_files(Path(), answer))}"
    if key == "env.file" and not Path(answer).expanduser().is_file():
        return f"file not found: {answer}.{_suggest(find_similar_files(Path(), answer))}"
    return ""


def _check_type(name: str) -> str:
    if name in RETIRED:
        return f"{name} is no longer offered by AWS."
    if name in GPU_TYPES:
        return ""
    from awsddp.aws.client import list_known_types

    return _check_known(name, {*GPU_TYPES, *list_known_types()}, "an instance type of EC2")


def _check_known(answer: str, names: Collection[str], noun: str) -> str:
    if answer in names:
        return ""
    return f"{answer} is not known as {noun}.{_suggest(difflib.get_close_matches(answer, names, n=2))}"


def _suggest(near: list[str]) -> str:
    return f" Did you mean {' or '.join(near)}?" if near else ""
