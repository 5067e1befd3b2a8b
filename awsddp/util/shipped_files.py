"""Find the files that ship with the package (train/ and templates/), both in a checkout and in a wheel."""

import string
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
REMOTE_DIR = "awsddp"
"""awsddp's folder in the home directory of a node's user; it contains the project folders."""
BUNDLED = "train"
"""The folder on a node that holds the bundled programs, next to the project folder."""
BUNDLED_SCRIPT = "main.py"


def shipped_folder(name: str) -> Path:
    """Return a folder that ships with the package: "train" (the bundled programs) or "templates"."""
    packed = _PACKAGE / f"_{name}"  # the folder's path in a wheel (pyproject.toml, force-include)
    return packed if packed.is_dir() else _PACKAGE.parent / name


def is_bundled(script: str) -> bool:
    """Return True if a script, given as its path on a node, is the bundled program."""
    return script.endswith(f"/{BUNDLED}/{BUNDLED_SCRIPT}")


def template(name: str) -> str:
    """Return the text of the template `name`, such as "user_data.yaml"."""
    return (shipped_folder("templates") / name).read_text(encoding="utf-8")


class _Rendered(string.Template):
    delimiter = "@@"  # not "$", which shell scripts and systemd units use


def render(name: str, **values: object) -> str:
    """Return the template `name` with its placeholders @@{key} replaced by values.

    Raises KeyError if there is no value for a placeholder.
    """
    return _Rendered(template(name)).substitute(values)
