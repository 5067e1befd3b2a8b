"""Fills in the templates that are sent to nodes, and what a configuration of ssh holds."""

import os
import string
from pathlib import Path

from awsddp.errors import ConfigError
from awsddp.resources import template


class _Rendered(string.Template):
    delimiter = "@@"  # shells and units use the dollar themselves


def render(name: str, **values: object) -> str:
    """Return the template `name` with its places, written @@{place}, filled in; each must have a value."""
    return _Rendered(template(name)).substitute(values)


def config_path(path: Path) -> str:
    """Return a path as a word of ssh_config, which expands %, ~ and ${} and knows quotes and backslashes."""
    text = os.fspath(path.absolute())
    if "\n" in text or "${" in text:
        raise ConfigError(
            f"{text!r}: ssh cannot use a path with a newline or ${{", "", "set another AWSDDP_HOME"
        )
    escaped = text.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
