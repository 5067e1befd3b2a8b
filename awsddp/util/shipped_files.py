"""Finds the files that ship beside the package: train/ and templates/, in a checkout and in a wheel."""

import string
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
REMOTE_DIR = "awsddp"
"""The folder of the synced folders, in the home folder of a node's user."""
BUNDLED = "train"
"""The folder of the bundled programs on a node, beside the synced one."""
BUNDLED_SCRIPT = "main.py"


def shipped_folder(name: str) -> Path:
    """Return a folder that ships beside the package: "train", its programs, or "templates"."""
    packed = _PACKAGE / f"_{name}"  # where the wheel carries it (pyproject.toml, force-include)
    return packed if packed.is_dir() else _PACKAGE.parent / name


def is_bundled(script: str) -> bool:
    """Return whether a job's script is the bundled program, as it is named on a node."""
    return script.endswith(f"/{BUNDLED}/{BUNDLED_SCRIPT}")


def template(name: str) -> str:
    """Return the text of the template `name`, such as "user_data.yaml"."""
    return (shipped_folder("templates") / name).read_text(encoding="utf-8")


class _Rendered(string.Template):
    delimiter = "@@"  # shells and units use the dollar themselves


def render(name: str, **values: object) -> str:
    """Return the template `name` with its places, written @@{place}, filled in; each must have a value."""
    return _Rendered(template(name)).substitute(values)
