"""What a project's files say of it, none of its code run: dependencies, metadata, where its packages lie."""

import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awsddp.errors import ConfigError

Table = dict[Any, Any]
"""A table of TOML or YAML, in the shape of pyproject.toml or of conda."""
_VERSION = re.compile(r"v?\d[\w.!+-]*")
SCM_VERSION = "SETUPTOOLS_SCM_PRETEND_VERSION"
"""What setuptools-scm and hatch-vcs take for the version of all projects; with _FOR_ and a name, of that one
(https://setuptools-scm.readthedocs.io/en/latest/overrides/)."""
UNKNOWN_VERSION = "0+unknown"
"""The version of a project that only its build knows, as versioneer has it where no tag is."""
_SCRIPTS = (("scripts", "console_scripts"), ("gui-scripts", "gui_scripts"))


@dataclass(frozen=True, kw_only=True)
class Project:
    """What a node gets of a project whose folder is synced: what an installation has beside the code.

    `info` is the name of its metadata's folder, `metadata` and `entry_points` the files in it (core metadata
    and https://packaging.python.org/en/latest/specifications/entry-points/), `sources` the folders from which
    its packages are imported.
    """

    info: str
    metadata: str
    entry_points: str
    sources: tuple[str, ...]

    @property
    def has_version(self) -> bool:
        """Whether its version is known without a build."""
        return not self.info.endswith(f"-{UNKNOWN_VERSION}.dist-info")


def read_toml(file: Path) -> Table:
    """Return what a TOML file holds. Raises OSError, ValueError."""
    return tomllib.loads(file.read_text(encoding="utf-8-sig"))


def toml_list(table: Any, *keys: str) -> list[Any]:
    """Return what a TOML document has at a path of keys, as a list; [] for nothing."""
    value = _at(table, *keys)
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def dependencies_of(document: Table, folder: Path, extras: Sequence[str], *, place: str) -> list[str]:
    """Return the lines of a project's pyproject.toml, with those of its extras; none where it has none.

    `place` is where it is asked for. Raises ConfigError where something else than [project] decides them.
    """
    if elsewhere := next(_elsewhere(document, folder, extras), ""):
        raise ConfigError(
            f"env.file: {place}: {elsewhere} decides what the project needs",
            "only [project] dependencies of pyproject.toml are read: no code of a project runs here",
            "list them in a requirements.txt, in place of `-e .`, and name it: --env requirements.txt",
        )
    return list(dict.fromkeys(_lines(document, extras)))


def _lines(document: Table, extras: Sequence[str], seen: tuple[str, ...] = ()) -> Iterator[str]:
    lines = [] if seen else toml_list(document, "project", "dependencies")
    for key in extras:
        if key and key not in seen:
            lines = [*lines, *toml_list(document, "project", "optional-dependencies", key)]
    name = "".join(map(str, toml_list(document, "project", "name")))
    own = re.compile(rf"{re.escape(name)}\s*\[([^\]]*)\]", re.IGNORECASE)
    for line in filter(lambda one: isinstance(one, str), lines):
        if inner := own.fullmatch(line.strip()):  # dev = ["mine[test]"]
            yield from _lines(document, [one.strip() for one in inner[1].split(",")], (*seen, *extras, "."))
        else:
            yield line


def _elsewhere(document: Table, folder: Path, extras: Sequence[str]) -> Iterator[str]:
    """Yield what else than [project] says what a project needs."""
    dynamic = toml_list(document, "project", "dynamic")
    for key in ("dependencies", *["optional-dependencies"] * any(extras)):
        if key in dynamic:
            yield f"`dynamic = [{key!r}]`"
    if "project" in document:  # it then decides for all tools
        return
    tool = document.get("tool", {})
    for keys in (("poetry", "dependencies"), ("flit", "metadata", "requires")):
        if _at(tool, *keys):
            yield f"[tool.{'.'.join(keys)}]"
    for name in ("setup.py", "setup.cfg"):
        file = folder / name
        if file.is_file() and b"install_requires" in file.read_bytes():
            yield name


def _at(table: Any, *keys: str) -> Any:
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def read_project(document: Table, folder: Path) -> Project | None:
    """Return what an installation of the project in `folder` has beside its code; None where it has no name.

    A version that is known only once the project is built is UNKNOWN_VERSION.
    """
    name = _at(document, "project", "name")
    if not isinstance(name, str):
        return None
    name_on_disk = re.sub(r"[-_.]+", "_", name).lower()
    version = next(filter(_VERSION.fullmatch, _versions(document, folder, name_on_disk)), UNKNOWN_VERSION)
    needs = "".join(f"Requires-Dist: {one}\n" for one in toml_list(document, "project", "dependencies"))
    groups = {group: _at(document, "project", key) for key, group in _SCRIPTS}
    if isinstance(more := _at(document, "project", "entry-points"), dict):
        groups |= more
    sections = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in groups.items()
        if isinstance(entries, dict)
    ]
    return Project(
        info=f"{name_on_disk}-{version}.dist-info",
        metadata=f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        entry_points="\n".join(sections),
        sources=tuple((folder / one).resolve().as_posix() for one in source_folders(folder) or (".",)),
    )


def _versions(document: Table, folder: Path, name_on_disk: str) -> Iterator[str]:
    """Yield what may be the version: of pyproject.toml, of a file that it names, of the environment, of an
    installation; first what counts first. What a file computes, and "", is no version.
    """
    tool = document.get("tool", {})
    for version in (*toml_list(document, "project", "version"), *toml_list(tool, "poetry", "version")):
        yield str(version)
    for name in toml_list(tool, "setuptools", "dynamic", "version", "file"):
        yield _read(folder / str(name)).strip()
    for attribute in toml_list(tool, "setuptools", "dynamic", "version", "attr"):
        module, _, variable = str(attribute).rpartition(".")
        path = module.replace(".", "/")
        for source in (*source_folders(folder), "."):
            for end in (".py", "/__init__.py"):
                yield _assigned(variable, _read(folder / source / f"{path}{end}"))
    for name in toml_list(tool, "hatch", "version", "path"):
        yield _assigned("__version__|VERSION", _read(folder / str(name)))
    for variable in (f"{SCM_VERSION}_FOR_{name_on_disk.upper()}", SCM_VERSION):
        yield os.environ.get(variable, "")
    yield _built_version(name_on_disk, folder)


def _built_version(name: str, folder: Path) -> str:
    """Return the version that `pip install -e .` has left here, which programs of this machine see, too."""
    for source in (*source_folders(folder), "."):
        for file in sorted((folder / source).glob("*.egg-info/PKG-INFO")):
            found = re.search(r"^Version: (\S+)", _read(file), re.MULTILINE)
            if found and re.sub(r"[-_.]+", "_", file.parent.stem).lower() == name:
                return found[1]
    return ""


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _assigned(variable: str, text: str) -> str:
    """Return the text that a module assigns to a variable; "" where it computes it."""
    literal = r"""["']([^"']+)["'][ \t]*(?:[#;].*)?$"""
    found = re.search(rf"^(?:{variable})\s*(?::[^=\n]*)?=\s*{literal}", text, re.MULTILINE)
    return found[1] if found else ""


def source_folders(project: Path) -> tuple[str, ...]:
    """Return the folders, relative to the project's, from which its pyproject.toml has its packages imported.

    Build backends that are not told take `src`, where it holds packages
    (https://packaging.python.org/en/latest/discussions/src-layout-vs-flat-layout/). () is the project itself.
    """
    try:
        document = read_toml(project / "pyproject.toml")
    except (OSError, ValueError):
        return ()
    tools = document.get("tool", {})
    if not (document.keys() & {"project", "build-system"} or tools.keys() & {"poetry", "setuptools"}):
        return ()
    named = [
        *toml_list(tools, "setuptools", "packages", "find", "where"),
        *toml_list(tools, "setuptools", "package-dir", ""),
        *(one.get("from") for one in toml_list(tools, "poetry", "packages") if isinstance(one, dict)),
        *(
            str(Path(one).parent)
            for one in toml_list(tools, "hatch", "build", "targets", "wheel", "packages")
            if isinstance(one, str)
        ),
        "src",
    ]
    found = dict.fromkeys(Path(one).as_posix() for one in named if isinstance(one, str) and one)
    return tuple(one for one in found if _holds_packages(project, one))


def _holds_packages(project: Path, name: str) -> bool:
    folder = project / name
    inside = name != "." and folder.is_dir() and folder.resolve().is_relative_to(project.resolve())
    return inside and not (folder / "__init__.py").exists() and any(folder.rglob("*.py"))
