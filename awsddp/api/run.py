"""run: a cluster for the time of a with block."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from awsddp.api.cluster import Cluster
from awsddp.cluster.run import down_or_stop, with_gpus, with_idle
from awsddp.errors import AwsddpError, ConfigError, UsageError
from awsddp.model.events import OnEvent
from awsddp.session.next_steps import advising

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
    """Bring a cluster up, yield it, and terminate it on every way out, as `awsddp run`.

    `keys` and `agreed` are those of `Cluster.up`; unused nodes end themselves after 10 minutes. Results that
    cannot be fetched at the end stay on the nodes, which are stopped then. Raises ConfigError for a cluster
    that exists already, what `up` raises, and what ends the block; then a failed ending is a note on it.
    """
    cluster = Cluster(name, local=local, on_event=on_event, **keys)
    if (state := cluster.status().state) != "absent":
        raise ConfigError(
            f"cluster {name} already exists", f"it is {state}", "use another name, or Cluster()"
        )
    session = with_gpus(cluster.session) if agreed is None else agreed.cluster.session
    asked = cluster._of(with_idle(session))
    try:
        asked.up(agreed and replace(agreed, cluster=asked))
        yield cluster
    except BaseException as error:
        if not isinstance(error, ConfigError | UsageError) or cluster.session.folder.read() is not None:
            _end_block(cluster, error)
        raise
    _end_block(cluster, None)


def _end_block(cluster: "Cluster", error: BaseException | None) -> None:
    cluster.close()
    try:
        with advising(cluster.session):
            down_or_stop(cluster.session)
    except AwsddpError as second:
        if error is None:
            raise
        error.add_note(str(second))
