"""Read a project's dependencies, metadata and source folders from its files, without running its code."""

import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awsddp.errors import ConfigError

Table = dict[Any, Any]
"""A TOML or YAML table, as in a pyproject.toml or an environment.yml."""
_VERSION = re.compile(r"v?\d[\w.!+-]*")
SCM_VERSION = "SETUPTOOLS_SCM_PRETEND_VERSION"
"""The variable that overrides all projects' versions in setuptools-scm and hatch-vcs; with the suffix
_FOR_NAME it overrides one project's version (https://setuptools-scm.readthedocs.io/en/latest/overrides/).
"""
UNKNOWN_VERSION = "0+unknown"
"""The placeholder version of a project whose real version is known only after a build. Versioneer uses the
same version if there is no tag.
"""
_SCRIPTS = (("scripts", "console_scripts"), ("gui-scripts", "gui_scripts"))


@dataclass(frozen=True, kw_only=True)
class Project:
    """The files that install a project without its code, for nodes that receive the project folder by sync.

    `info` is the name of the metadata folder. `metadata` and `entry_points` are the texts of the files in
    that folder (core metadata and https://packaging.python.org/en/latest/specifications/entry-points/).
    `sources` are the folders from which the project's packages are imported.
    """

    info: str
    metadata: str
    entry_points: str
    sources: tuple[str, ...]

    @property
    def has_version(self) -> bool:
        """True if the project's version is known without a build."""
        return not self.info.endswith(f"-{UNKNOWN_VERSION}.dist-info")


def read_toml(file: Path) -> Table:
    """Read a TOML file. Raises OSError or ValueError."""
    return tomllib.loads(file.read_text(encoding="utf-8-sig"))


def toml_list(table: Any, *keys: str) -> list[Any]:
    """Return the value at a path of keys in a TOML document as a list: [] if missing, [text] for a text."""
    value = _get(table, *keys)
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def list_dependencies(document: Table, folder: Path, extras: Sequence[str], *, location: str) -> list[str]:
    """Return the requirements in a project's pyproject.toml, including those of the given extras.

    `location` is the line that requests the project; the error message contains it. Raises ConfigError if
    anything other than [project] determines the requirements.
    """
    if other_source := next(_other_sources(document, folder, extras), ""):
        raise ConfigError(
            f"env.file: {location}: {other_source} decides what the project needs",
            "only [project] dependencies in pyproject.toml are read, because no project code runs here",
            "list them in a requirements.txt instead of `-e .`, and name that file: --env requirements.txt",
        )
    return list(dict.fromkeys(_lines(document, extras)))


def _lines(document: Table, extras: Sequence[str], visited: tuple[str, ...] = ()) -> Iterator[str]:
    lines = [] if visited else toml_list(document, "project", "dependencies")
    for key in extras:
        if key and key not in visited:
            lines = [*lines, *toml_list(document, "project", "optional-dependencies", key)]
    name = "".join(map(str, toml_list(document, "project", "name")))
    own_extras = re.compile(rf"{re.escape(name)}\s*\[([^\]]*)\]", re.IGNORECASE)
    for line in (line for line in lines if isinstance(line, str)):
        if match := own_extras.fullmatch(line.strip()):  # dev = ["mine[test]"]
            nested = [extra.strip() for extra in match[1].split(",")]
            yield from _lines(document, nested, (*visited, *extras, "."))
        else:
            yield line


def _other_sources(document: Table, folder: Path, extras: Sequence[str]) -> Iterator[str]:
    """Yield the parts of the project other than [project] that determine its requirements."""
    dynamic = toml_list(document, "project", "dynamic")
    for key in ("dependencies", *["optional-dependencies"] * any(extras)):
        if key in dynamic:
            yield f"`dynamic = [{key!r}]`"
    if "project" in document:  # all tools give precedence to this table
        return
    tool = document.get("tool", {})
    for keys in (("poetry", "dependencies"), ("flit", "metadata", "requires")):
        if _get(tool, *keys):
            yield f"[tool.{'.'.join(keys)}]"
    for name in ("setup.py", "setup.cfg"):
        file = folder / name
        if file.is_file() and b"install_requires" in file.read_bytes():
            yield name


def _get(table: Any, *keys: str) -> Any:
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def read_project(document: Table, folder: Path) -> Project | None:
    """Return the files that install the project in `folder` without its code, or None if the project has no
    name.

    The version is UNKNOWN_VERSION if only a build could determine it.
    """
    name = _get(document, "project", "name")
    if not isinstance(name, str):
        return None
    name_on_disk = re.sub(r"[-_.]+", "_", name).lower()
    version = next(filter(_VERSION.fullmatch, _versions(document, folder, name_on_disk)), UNKNOWN_VERSION)
    dependencies = toml_list(document, "project", "dependencies")
    requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in dependencies)
    groups = {group: _get(document, "project", key) for key, group in _SCRIPTS}
    if isinstance(entry_points := _get(document, "project", "entry-points"), dict):
        groups |= entry_points
    sections = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in groups.items()
        if isinstance(entries, dict)
    ]
    return Project(
        info=f"{name_on_disk}-{version}.dist-info",
        metadata=f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        entry_points="\n".join(sections),
        sources=tuple((folder / source).resolve().as_posix() for source in source_folders(folder) or (".",)),
    )


def _versions(document: Table, folder: Path, name_on_disk: str) -> Iterator[str]:
    """Yield candidates for the version: from pyproject.toml, then from files that it names, from environment
    variables and from an installation. A candidate can be "" or an expression.
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
                yield _assigned_text(variable, _read(folder / source / f"{path}{end}"))
    for name in toml_list(tool, "hatch", "version", "path"):
        yield _assigned_text("__version__|VERSION", _read(folder / str(name)))
    for variable in (f"{SCM_VERSION}_FOR_{name_on_disk.upper()}", SCM_VERSION):
        yield os.environ.get(variable, "")
    yield _built_version(name_on_disk, folder)


def _built_version(name: str, folder: Path) -> str:
    """Return the version that `pip install -e .` wrote on this machine, or "" if there is no such
    installation.
    """
    for source in (*source_folders(folder), "."):
        for file in sorted((folder / source).glob("*.egg-info/PKG-INFO")):
            match = re.search(r"^Version: (\S+)", _read(file), re.MULTILINE)
            if match and re.sub(r"[-_.]+", "_", file.parent.stem).lower() == name:
                return match[1]
    return ""


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _assigned_text(variable: str, text: str) -> str:
    """Return the string literal that a module assigns to a variable, or "" if it assigns an expression."""
    literal = r"""["']([^"']+)["'][ \t]*(?:[#;].*)?$"""
    match = re.search(rf"^(?:{variable})\s*(?::[^=\n]*)?=\s*{literal}", text, re.MULTILINE)
    return match[1] if match else ""


def source_folders(project: Path) -> tuple[str, ...]:
    """Return the folders from which the project's packages are imported, relative to the project folder.

    If no folder is configured, build backends use `src` if it has packages
    (https://packaging.python.org/en/latest/discussions/src-layout-vs-flat-layout/). The result () means the
    project folder.
    """
    try:
        document = read_toml(project / "pyproject.toml")
    except (OSError, ValueError):
        return ()
    tools = document.get("tool", {})
    if not (document.keys() & {"project", "build-system"} or tools.keys() & {"poetry", "setuptools"}):
        return ()
    poetry_packages = toml_list(tools, "poetry", "packages")
    hatch_packages = toml_list(tools, "hatch", "build", "targets", "wheel", "packages")
    names = [
        *toml_list(tools, "setuptools", "packages", "find", "where"),
        *toml_list(tools, "setuptools", "package-dir", ""),
        *(package.get("from") for package in poetry_packages if isinstance(package, dict)),
        *(str(Path(package).parent) for package in hatch_packages if isinstance(package, str)),
        "src",
    ]
    folders = dict.fromkeys(Path(name).as_posix() for name in names if isinstance(name, str) and name)
    return tuple(folder for folder in folders if _holds_packages(project, folder))


def _holds_packages(project: Path, name: str) -> bool:
    folder = project / name
    is_inside = name != "." and folder.is_dir() and folder.resolve().is_relative_to(project.resolve())
    return is_inside and not (folder / "__init__.py").exists() and any(folder.rglob("*.py"))
