"""Write the starter awsddp.toml."""

import json
from collections.abc import Mapping
from pathlib import Path

from awsddp.errors import ConfigError
from awsddp.settings.loader import ONE_COMMAND_KEYS
from awsddp.settings.spec import FILE, SETTINGS, OptionValue

_STARTER_HEAD = """\
# Settings of awsddp for this folder. Every key is shown with its default or an example, commented out:
# remove the "#" to set it. Options override variables (AWSDDP_CLUSTER_NODES=4), which override this file.
# When nodes end: docs/cost.md. Which files are sent and fetched: docs/files.md."""
_STARTER_TAGS = "\n[tags]\n" + '# team = "vision"'.ljust(34) + "  # Your own tags, on every resource.\n"


def write_starter(folder: Path, chosen: Mapping[str, OptionValue] | None = None) -> Path:
    """Write the starter file into `folder` and return its path. `chosen` maps keys (cluster.nodes) to values.

    Raises ConfigError if the file exists or cannot be written.
    """
    path = folder / FILE
    refuse_existing(path)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(starter_text(chosen or {}))
    except OSError as error:
        raise ConfigError(f"cannot write {path}", error.strerror or str(error)) from error
    return path


def refuse_existing(path: Path) -> None:
    """Raise ConfigError if the file exists."""
    if path.exists():
        raise ConfigError(f"{path} already exists", "", "edit it, or move it away")


def starter_text(chosen: Mapping[str, OptionValue]) -> str:
    """Return the starter file's text: the `chosen` keys are set, all other keys are commented out."""
    lines = [_STARTER_HEAD]
    for key in (key for key in SETTINGS if key not in ONE_COMMAND_KEYS):
        setting, (section, _, name) = SETTINGS[key], key.partition(".")
        heading = f"\n[{section}]"
        lines += [heading] if heading not in lines else []
        example = setting.default if setting.example is None else setting.example
        value = json.dumps(chosen.get(key, example))
        value = value.replace('": ', '" = ') if key == "env.variables" else value  # from JSON to TOML
        shown = f"{'' if key in chosen else '# '}{name} = {value}"
        lines.append(f"{shown:34}  # {setting.comment or setting.help}")
    return "\n".join([*lines, _STARTER_TAGS])
