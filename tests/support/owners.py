"""Plans of launches with another owner, id or expiry."""

from dataclasses import replace
from typing import Any

from awsddp.plan.records import LaunchPlan, resource_names

OTHER = "AIDASOMEBODYELSE"


def ids(cluster_id: str) -> dict[str, str]:
    return resource_names("demo", cluster_id)


def with_tags(plan: LaunchPlan, **tags: str) -> LaunchPlan:
    """Return the plan with other values of awsddp's tags, e.g. another owner or expiry."""

    def put(value: Any) -> Any:
        match value:
            case {"Key": key} if key.removeprefix("awsddp:") in tags:
                return {"Key": key, "Value": tags[key.removeprefix("awsddp:")]}
            case dict():
                return {key: put(item) for key, item in value.items()}
            case list():
                return [put(item) for item in value]
        return value

    changed = tuple(replace(request, parameters=put(request.parameters)) for request in plan.requests)
    return replace(plan, requests=changed)
