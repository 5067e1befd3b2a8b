"""The commands that a message recommends, with the global options that they need to mean this cluster."""

from awsddp.cli.signals import WATCH
from awsddp.state import Folder, home
from awsddp.verbs import advice


def named(text: str) -> str:
    """Return `text` with `awsddp VERB` as `awsddp -c NAME --region ... VERB`, where that is needed."""
    options = WATCH.options
    if options is None:
        return text
    folder = Folder(home(), options.name)
    words = advice.global_words(folder, local=options.local, region=options.region, profile=options.profile)
    return advice.named(text, words)
