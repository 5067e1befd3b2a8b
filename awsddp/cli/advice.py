"""The commands that a message recommends, as this user has to type them."""

from awsddp.cli.signals import WATCH
from awsddp.records import JobRecord
from awsddp.state import Folder, home
from awsddp.verbs import advice


def named(text: str, *, job: JobRecord | None = None) -> str:
    """Return `text` with its commands as `verbs.advice.advised` does; before a verb begins, its cluster's."""
    if WATCH.context is not None:
        return advice.advised(WATCH.context, text, job=job)
    if (options := WATCH.options) is None:
        return text
    folder = Folder(home(), options.name)
    words = advice.global_words(folder, local=options.local, region=options.region, profile=options.profile)
    return advice.named(text, words)
