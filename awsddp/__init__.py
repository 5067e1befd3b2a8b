"""awsddp: from a laptop to a DistributedDataParallel model trained on N EC2 GPU nodes in one command."""

from typing import TYPE_CHECKING, Any

from awsddp.errors import AwsddpError as AwsddpError
from awsddp.errors import CapacityError as CapacityError
from awsddp.errors import CloudError as CloudError
from awsddp.errors import ConfigError as ConfigError
from awsddp.errors import Interrupted as Interrupted
from awsddp.errors import InUse as InUse
from awsddp.errors import JobError as JobError
from awsddp.errors import LeftoverError as LeftoverError
from awsddp.errors import LocalCloudError as LocalCloudError
from awsddp.errors import NodeError as NodeError
from awsddp.errors import NotFoundError as NotFoundError
from awsddp.errors import UsageError as UsageError
from awsddp.util.version import __version__ as __version__

_EXPORTS = {
    **dict.fromkeys(("Cluster", "Job", "JobFailed", "Plan"), "awsddp.api.cluster"),
    "run": "awsddp.api.run",
    "Event": "awsddp.model.events",
    "LogLine": "awsddp.agent_client.logs",
}

if TYPE_CHECKING:
    from awsddp.agent_client.logs import LogLine as LogLine
    from awsddp.api.cluster import Cluster as Cluster
    from awsddp.api.cluster import Job as Job
    from awsddp.api.cluster import JobFailed as JobFailed
    from awsddp.api.cluster import Plan as Plan
    from awsddp.api.run import run as run
    from awsddp.model.events import Event as Event


def __getattr__(name: str) -> Any:
    """Import one of the API's names when it is first used, so that `import awsddp` is fast."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'awsddp' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """Return the module's names, including those that are imported on first use."""
    return [*globals(), *_EXPORTS]
