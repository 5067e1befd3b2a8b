"""run: a context manager that launches a cluster and terminates it at the end."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from awsddp.api.cluster import Cluster
from awsddp.cluster.run import down_or_stop, with_gpus, with_idle
from awsddp.errors import AwsddpError, ConfigError, UsageError
from awsddp.model.events import OnEvent
from awsddp.session.next_steps import completing_errors

if TYPE_CHECKING:
    from awsddp.api.cluster import Plan
    from awsddp.api.keywords import Keys


@contextlib.contextmanager
def run(
    name: str = "default",
    *,
    agreed: "Plan | None" = None,
    local: bool = False,
    on_event: OnEvent = lambda event: None,
    **keys: "Unpack[Keys]",
) -> "Iterator[Cluster]":
    """Launch a cluster, yield it, and terminate it when the block ends, even after an error.

    `keys` and `agreed` have the same meaning as for `Cluster.up`; nodes that are idle for 10 minutes
    terminate themselves. If results cannot be fetched at the end, the nodes are stopped and keep the results.
    Raises ConfigError if the cluster already exists, the errors of `up`, and any error from the block. If the
    cluster cannot be terminated after an error in the block, that failure is added to the error as a note.
    """
    cluster = Cluster(name, local=local, on_event=on_event, **keys)
    if (state := cluster.status().state) != "absent":
        raise ConfigError(
            f"cluster {name} already exists", f"it is {state}", "use another name, or Cluster()"
        )
    session = with_gpus(cluster.session) if agreed is None else agreed.cluster.session
    launched = cluster._of(with_idle(session))
    try:
        launched.up(agreed and replace(agreed, cluster=launched))
        yield cluster
    except BaseException as error:
        if not isinstance(error, ConfigError | UsageError) or cluster.session.folder.read() is not None:
            _end_block(cluster, error)
        raise
    _end_block(cluster, None)


def _end_block(cluster: "Cluster", error: BaseException | None) -> None:
    cluster.close()
    try:
        with completing_errors(cluster.session):
            down_or_stop(cluster.session)
    except AwsddpError as second:
        if error is None:
            raise
        error.add_note(str(second))
