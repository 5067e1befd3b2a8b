"""The commands that a message recommends, with the global options that they need to mean this cluster."""

import contextlib
import os
import re
import shlex

from awsddp.cli.options import Globals
from awsddp.cli.signals import WATCH
from awsddp.cli.verbs import VERBS
from awsddp.cluster import Target
from awsddp.errors import ConfigError
from awsddp.state import Folder, home

_VERBS = "|".join(name for name, entry in VERBS.items() if entry.of_cluster)


def named(text: str) -> str:
    """Return `text` with `awsddp VERB` as `awsddp -c NAME --region ... VERB`, where that is needed."""
    needed = _needed(WATCH.options) if WATCH.options else []

    def filled(match: re.Match[str]) -> str:
        given = match.string[match.end() :].partition("\n")[0].split()
        return "".join(f"{word} " for word in ["awsddp", *needed] if word != "--local" or word not in given)

    return re.sub(rf"\bawsddp (?=(?:{_VERBS})\b)", filled, text)


def _needed(options: Globals) -> list[str]:
    """Return the options that are not defaults, and not remembered with the cluster."""
    needed = []
    if options.name != (os.environ.get("AWSDDP_CLUSTER") or "default"):
        needed += ["-c", shlex.quote(options.name)]
    target = _remembered(options.name)
    if target is not None:  # no option moves a cluster
        other = target.name == "aws" and options.profile not in (None, target.profile)
        return [*needed, "--profile", shlex.quote(str(options.profile))] if other else needed
    for name, value in (("--profile", options.profile), ("--region", options.region)):
        needed += [name, shlex.quote(value)] if value else []
    return [*needed, "--local"] if options.local else needed


def _remembered(name: str) -> Target | None:
    """Return where a cluster is, by its record."""
    with contextlib.suppress(ConfigError):
        record = Folder(home(), name).read()
        return record.target if record is not None else None
    return None
