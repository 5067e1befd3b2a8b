"""init: a starter awsddp.toml: every key, its meaning, and the values that were chosen."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from awsddp.errors import ConfigError
from awsddp.resources import template
from awsddp.spec import FILE


def init(folder: Path, chosen: Mapping[str, str | int | float] | None = None) -> Path:
    """Write the starter file into `folder` and return its path; `chosen` are values by key ("cluster.nodes").

    Raises ConfigError if the file exists or cannot be written.
    """
    path = folder / FILE
    refuse_existing(path)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(starter(chosen or {}))
    except OSError as error:
        raise ConfigError(f"cannot write {path}", error.strerror or str(error)) from error
    return path


def refuse_existing(path: Path) -> None:
    """Raise ConfigError if the file exists."""
    if path.exists():
        raise ConfigError(f"{path} already exists", "", "edit it, or move it away")


def starter(chosen: Mapping[str, str | int | float]) -> str:
    """Return the starter file with these keys set and every other one commented out."""
    section, lines = "", []
    for line in template(FILE).splitlines():
        heading, key = re.match(r"\[(\w+)\]", line), re.match(r"# (\w+) = ", line)
        section = heading[1] if heading else section
        name = f"{section}.{key[1]}" if key else ""
        lines.append(f"{name.partition('.')[2]} = {json.dumps(chosen[name])}" if name in chosen else line)
    return "\n".join(lines) + "\n"
