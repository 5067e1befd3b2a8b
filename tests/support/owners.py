"""Launches under another owner, with another id, or that expire at another time."""

from dataclasses import replace
from typing import Any

from awsddp.plan.records import LaunchPlan, resource_names

OTHER = "AIDASOMEBODYELSE"


def ids(cluster_id: str) -> dict[str, str]:
    return resource_names("demo", cluster_id)


def tagging(plan: LaunchPlan, **tags: str) -> LaunchPlan:
    """The plan with other values of our own tags: another owner's, or one that expires another time."""

    def put(value: Any) -> Any:
        match value:
            case {"Key": key} if key.removeprefix("awsddp:") in tags:
                return {"Key": key, "Value": tags[key.removeprefix("awsddp:")]}
            case dict():
                return {key: put(item) for key, item in value.items()}
            case list():
                return [put(item) for item in value]
        return value

    changed = tuple(replace(one, parameters=put(one.parameters)) for one in plan.requests)
    return replace(plan, requests=changed)
