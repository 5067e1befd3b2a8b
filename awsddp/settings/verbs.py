"""Map each verb to the settings that it uses, and settings to the arguments of a command line."""

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
_RESULTS = (*_REACH, "job.results", "job.exclude", "job.outputs", "sync.workdir")
HEEDS = {
    **dict.fromkeys(("plan", "doctor"), _NODES),
    **dict.fromkeys(("status", "cancel", "exec", "ssh"), _REACH),
    **dict.fromkeys(("jobs", "logs", "why", "fetch", "report", "stop", "down"), _RESULTS),
    "up": (*_NODES, *_RESULTS),
    "sync": (*_REACH, "sync."),
    "train": (*_REACH, *OF_JOB),
    "run": ("",),
}
"""The verbs that work on one cluster (-c), each with the keys of awsddp.toml that it uses, by prefix."""
HAS_OPTION = {
    "plan": ("cluster.", "env.file", "data.", "job.save_to"),
    "up": ("cluster.", "env.file", "data.", "job.save_to"),
    "train": ("job.", "env.", "data."),
    "fetch": ("job.outputs",),
    "run": ("",),
}
"""The keys, by prefix, that have their own option on a verb; other keys are set with -o."""
SCRIPT = ("job.script", "job.args")


def command_words(verb: str, options: Mapping[str, Given]) -> list[str]:
    """Return the arguments that set these keys on a verb, without those of `script_arguments`."""
    words: list[str] = []
    for key, value in options.items():
        name = key.removeprefix("env.variables.")
        if name != key:  # without a value it is read from the environment of the command
            words += ["--env-var", name if value is None else f"{name}={value}"]
        elif key not in SCRIPT:
            make_arguments = option_words if key.startswith(HAS_OPTION.get(verb, ())) else key_words
            words += make_arguments(key, value)
    return words


def script_words(options: Mapping[str, Given]) -> list[str]:
    """Return the script (omitted if it is the bundled one) and its arguments."""
    script, args = map(options.get, SCRIPT)
    words = [script] if isinstance(script, str) and script and not is_bundled(script) else []
    return [*words, "--", *map(str, args)] if args and isinstance(args, list | tuple) else words
