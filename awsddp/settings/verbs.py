"""Map each verb to the settings that it uses, and convert settings to command-line arguments."""

from collections.abc import Mapping

from awsddp.settings.loader import key_arguments, option_arguments
from awsddp.settings.spec import OptionValue
from awsddp.util.shipped_files import is_bundled

_NODES = (
    *("cluster.", "network.", "access.", "capacity.", "local.", "tags."),
    *("env.file", "env.kind", "env.python", "env.packages_from", "env.ca_bundle", "data."),
    *("job.save_to", "notify."),
)
_REACH = ("network.jump",)
JOB_KEYS = ("env.", "sync.", "data.", "job.", "notify.")
"""The prefixes of a job's keys."""
_RESULTS = (*_REACH, "job.results", "job.exclude", "job.outputs", "sync.workdir")
HEEDS = {
    **dict.fromkeys(("plan", "doctor"), _NODES),
    **dict.fromkeys(("status", "cancel", "exec", "ssh"), _REACH),
    **dict.fromkeys(("jobs", "logs", "why", "fetch", "report", "stop", "down"), _RESULTS),
    "up": (*_NODES, *_RESULTS),
    "sync": (*_REACH, "sync."),
    "train": (*_REACH, *JOB_KEYS, "capacity.retry_until_up"),
    "recover": (*_RESULTS, "job.recover", "capacity.retry_until_up"),
    "run": ("",),
}
"""Maps each verb that works on one cluster (-c) to the prefixes of the awsddp.toml keys that it uses."""
HAS_OPTION = {
    "plan": ("cluster.", "env.file", "data.", "job.save_to"),
    "up": ("cluster.", "env.file", "data.", "job.save_to"),
    "train": ("job.", "env.", "data."),
    "fetch": ("job.outputs",),
    "run": ("",),
}
"""Maps a verb to the prefixes of the keys for which it has command-line options; -o sets the other keys."""
SCRIPT_KEYS = ("job.script", "job.args")


def command_arguments(verb: str, options: Mapping[str, OptionValue]) -> list[str]:
    """Return the arguments that set these keys for a verb, leaving out those in `script_arguments`."""
    words: list[str] = []
    for key, value in options.items():
        name = key.removeprefix("env.variables.")
        if name != key:  # a variable without a value is read from this environment
            words += ["--env-var", name if value is None else f"{name}={value}"]
        elif key not in SCRIPT_KEYS:
            make_arguments = option_arguments if key.startswith(HAS_OPTION.get(verb, ())) else key_arguments
            words += make_arguments(key, value)
    return words


def script_arguments(options: Mapping[str, OptionValue]) -> list[str]:
    """Return the script (omitted if it is the bundled program) and the script's arguments."""
    script, args = map(options.get, SCRIPT_KEYS)
    words = [script] if isinstance(script, str) and script and not is_bundled(script) else []
    return [*words, "--", *map(str, args)] if args and isinstance(args, list | tuple) else words
