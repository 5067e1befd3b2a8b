"""Which settings each verb heeds, and the words of a command line that set them."""

from collections.abc import Mapping

from awsddp.settings.loader import key_words, option_words
from awsddp.settings.spec import Given
from awsddp.util.shipped_files import is_bundled

_NODES = (
    *("cluster.", "network.", "access.", "capacity.", "local.", "tags."),
    *("env.file", "env.kind", "env.python", "env.packages_from", "env.ca_bundle", "data."),
    "job.save_to",
)
_REACH = ("network.jump",)
OF_JOB = ("env.", "sync.", "data.", "job.")
"""The keys of a job, by prefix."""
_HOME = (*_REACH, "job.results", "job.exclude", "job.outputs", "sync.workdir")
HEEDS = {
    **dict.fromkeys(("plan", "doctor"), _NODES),
    **dict.fromkeys(("status", "cancel", "exec", "ssh"), _REACH),
    **dict.fromkeys(("jobs", "logs", "why", "fetch", "report", "stop", "down"), _HOME),
    "up": (*_NODES, *_HOME),
    "sync": (*_REACH, "sync."),
    "train": (*_REACH, *OF_JOB),
    "run": ("",),
}
"""The verbs that work on one cluster and take -c, and which keys of awsddp.toml each heeds, by prefix."""
HAS_OPTION = {
    "plan": ("cluster.", "env.file", "data.", "job.save_to"),
    "up": ("cluster.", "env.file", "data.", "job.save_to"),
    "train": ("job.", "env.", "data."),
    "fetch": ("job.outputs",),
    "run": ("",),
}
"""The keys, by prefix, that have an option of their own on a verb; the other keys are set with -o there."""
SCRIPT = ("job.script", "job.args")


def command_words(verb: str, options: Mapping[str, Given]) -> list[str]:
    """Return the options of a verb that set these keys of awsddp.toml; `script_words` come last."""
    words: list[str] = []
    for key, value in options.items():
        name = key.removeprefix("env.variables.")
        if name != key:  # without a value it is read where the command is typed
            words += ["--env-var", name if value is None else f"{name}={value}"]
        elif key not in SCRIPT:
            written = option_words if key.startswith(HAS_OPTION.get(verb, ())) else key_words
            words += written(key, value)
    return words


def script_words(options: Mapping[str, Given]) -> list[str]:
    """Return the script, none for the bundled one, and its arguments."""
    script, args = map(options.get, SCRIPT)
    words = [script] if isinstance(script, str) and script and not is_bundled(script) else []
    return [*words, "--", *map(str, args)] if args and isinstance(args, list | tuple) else words
