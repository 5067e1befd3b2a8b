"""What a project says that it needs: requirements.txt, pyproject.toml, uv.lock, environment.yml."""

import codecs
import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from awsddp.errors import ConfigError
from awsddp.plan.conda import line_of, not_on_a_node, read_conda

_COMMENT = re.compile(r"(^|\s)#.*$")
_HASH = re.compile(r"\s+--hash[= ]\S+")
_INCLUDE = re.compile(r"(-r|--requirement|-c|--constraint)[= ]*(\S.*)")
_INDEX = re.compile(r"(-i|--index-url|--extra-index-url|-f|--find-links|--no-index|--pre|--prefer-binary)\b")
_EDITABLE = re.compile(r"(-e|--editable)[= ]*(?=[a-z][a-z+]*://(?<!file://))")
"""What is fetched by a URL is installed, not edited."""
_PROJECT = re.compile(r"(?:-e|--editable)?[= ]*([\"']?)\./?(?:\[(?P<extras>[^\]]*)\])?\1")
# https://packaging.python.org/en/latest/specifications/dependency-specifiers/
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*\s*(\[[^]]*\])?\s*($|[;@(]|===?|~=|!=|<|>)|[a-z][a-z+]*://")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
FOLDERS = frozenset({"-f", "--find-links"})
"""The options of pip that name a folder."""
CONDA_SUFFIXES = (".yml", ".yaml")
IMAGE_PACKAGES = re.compile(r"torch|torchvision|torchaudio|triton|nvidia[-_].*|pytorch[-_]triton.*")
"""Names that the image's build of torch decides; nothing that a project asks for may replace them."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Lines as pip reads them. `options` are the file's own words for pip, as ("--index-url", "https://...").

    `conda` is an environment.yml, which conda reads itself, and `variables` those that it sets.
    """

    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    conda: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_requirements(file: Path) -> Requirements:
    """Return what `file` asks for; files that it includes are read too, and `${NAME}` is a variable of here.
    A line for the project itself stands for its dependencies: its folder is synced.

    Raises ConfigError for a file that is not there or holds what cannot be meant.
    """
    if file.name == "uv.lock":
        return Requirements(lines=tuple(_locked(_toml(file), file)))
    if file.suffix == ".toml":
        return Requirements(lines=_dependencies(_toml(file), file))
    if file.suffix in CONDA_SUFFIXES:
        return _conda(_text(file), file)
    return _collected(_text(file), file)


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell writes
        return data.decode("utf-16" if wide else "utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"env.file: {file} cannot be read", why, "name a file that exists: --env FILE"
        ) from error


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"env.file: {file} is not valid TOML", str(error)) from error


def _conda(text: str, file: Path) -> Requirements:
    """Return what conda gets: its `pip` lines are read as those of a requirements file are."""
    found = read_conda(text, file)
    pip = _collected("\n".join(found.pip), file, lambda line: line_of(line, text, file))
    if pip.constraints:
        raise ConfigError(
            f"env.file: {file}: constraints below pip",
            "only this file is passed to conda",
            'write the versions into the file, or use a requirements.txt and env.kind = "venv"',
        )
    options = [one for one in re.split(r" (?=-)", " ".join(pip.options)) if one]
    for one in options:
        name, _, folder = one.partition(" ")
        if is_folder_here(name, folder):
            raise not_on_a_node(one, str(file))
    channels = tuple(_VARIABLE.sub(_value, one) for one in found.channels)
    found = dataclasses.replace(found, channels=channels, pip=(*options, *pip.lines))
    return Requirements(conda=found.text, variables=dict(found.variables))


def _collected(
    text: str, file: Path, place: Callable[[str], str] | None = None, *, seen: tuple[Path, ...] = ()
) -> Requirements:
    """Return what the text of a requirements file asks for.

    `place` names where a line stands, where that is not its number in `file`; `seen` are the files that
    include this one.
    """
    lines: list[str] = []
    constraints: list[str] = []
    options: list[str] = []
    seen = (*seen, file.resolve())
    for number, raw in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        line = _VARIABLE.sub(_value, _HASH.sub("", _COMMENT.sub("", raw)).strip())
        if not line:
            continue
        where = place(line) if place else f"{file}, line {number}"
        if project := _PROJECT.fullmatch(line):
            extras = [one.strip() for one in (project["extras"] or "").split(",")]
            lines += _of_project(file.parent / "pyproject.toml", extras)
            continue
        match = _INCLUDE.fullmatch(line)
        if match and "://" in match[2]:
            raise ConfigError(
                f"env.file: {where}: {line!r} is not fetched",
                "requirements files are read on this machine",
                "download it, and name the file",
            )
        if match:
            other = file.parent / match[2].strip()
            if other.resolve() not in seen:
                found = _collected(_text(other), other, seen=seen)
                (constraints if match[1] in ("-c", "--constraint") else lines).extend(found.lines)
                constraints += found.constraints
                options += found.options
        elif _INDEX.match(line):
            options += _option(line, file)
        else:
            lines.append(_checked(_EDITABLE.sub("", line), where))
    return Requirements(lines=tuple(lines), constraints=tuple(constraints), options=tuple(options))


def _of_project(file: Path, extras: Sequence[str], seen: tuple[str, ...] = ()) -> list[str]:
    """Return the dependencies of the project itself, whose folder is synced; none where it names none."""
    document = _toml(file) if file.is_file() else {}
    lines = [] if seen else _at(document, "project", "dependencies")
    for key in extras:
        if key and key not in seen:
            lines = [*lines, *_at(document, "project", "optional-dependencies", key)]
    name = "".join(map(str, _at(document, "project", "name")))
    own = re.compile(rf"{re.escape(name)}\s*\[([^\]]*)\]", re.IGNORECASE)
    found: list[str] = []
    for line in filter(lambda one: isinstance(one, str), lines):
        if inner := own.fullmatch(line.strip()):  # dev = ["mine[test]"]
            found += _of_project(file, [one.strip() for one in inner[1].split(",")], (*seen, *extras, "."))
        else:
            found.append(_checked(line, str(file)))
    return list(dict.fromkeys(found))


def is_folder_here(option: str, place: str) -> bool:
    """Tell whether an option of pip names a folder relative to this machine's, which no node has."""
    return option in FOLDERS and "://" not in place and not Path(place).is_absolute()


def canonical(name: str) -> str:
    """Return a package's name as pip compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _option(line: str, file: Path) -> list[str]:
    """Return an option's words; a folder is relative to the file that names it."""
    name, *value = re.split(r"[= ]+", line, maxsplit=1)
    if value and is_folder_here(name, value[0]) and (file.parent / value[0]).is_dir():
        value = [os.path.relpath(file.parent / value[0])]
    return [name, *value]


def _value(match: re.Match[str]) -> str:
    """Return the value of a variable in a requirements file; pip leaves one alone that is not set."""
    return os.environ.get(match[1]) or match[0]


def _checked(line: str, place: str) -> str:
    """Return a requirement. Raises ConfigError for what names a path of this machine, or is none."""
    if line.startswith("--") or re.match(r"-[^e]", line):
        raise ConfigError(
            f"env.file: {place}: {line!r} is an option that is not passed on to the nodes' pip",
            "options for indexes are, and -r, -c, -e",
            "remove the line, or write the option into the nodes' pip.conf by env.setup",
        )
    if line.startswith(("-", ".", "/")) or "file:" in line:
        raise not_on_a_node(line, place)
    if line == "@EXPLICIT":
        raise ConfigError(
            f"env.file: {place}: this is a conda package list, not a requirements file",
            "conda list --explicit lists conda packages by URL",
            "conda env export > environment.yml, then --env environment.yml",
        )
    if not _REQUIREMENT.match(line):
        name, equals, version = line.partition("=")
        version = version.partition("=")[0]  # conda list --export writes NAME=VERSION=BUILD
        raise ConfigError(
            f"env.file: {place}: {line!r} is not a requirement",
            "expected a name, optionally with a version (==1.2), or with @ and a URL",
            f"did you mean '{name.strip()}=={version.strip()}'?" if equals else "",
        )
    return line


def _dependencies(document: dict[str, Any], file: Path) -> tuple[str, ...]:
    found = document.get("project", {}).get("dependencies")
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigError(
            f"env.file: {file} has no [project] dependencies",
            "only these are installed; a tool that keeps them elsewhere can export them",
            "write a requirements.txt, and name it: --env requirements.txt",
        )
    return tuple(_checked(one, str(file)) for one in found)


def _locked(document: dict[str, Any], file: Path) -> Iterator[str]:
    """Yield the locked packages that the project needs, without what torch itself brings."""
    packages: dict[str, Any] = {one.get("name", ""): one for one in document.get("package", [])}
    roots = [one for one in packages.values() if _is_project(one.get("source", {}))]
    if not roots:
        raise ConfigError(
            f"env.file: {file} locks no project", "no package in it has the source '.'", "uv lock"
        )
    wanted = [(edge, "") for root in roots for edge in root.get("dependencies", [])]
    seen: set[tuple[str, str]] = set()
    while wanted:
        edge, outer = wanted.pop(0)
        name = edge["name"]
        marker = " and ".join(f"({one})" for one in (outer, edge.get("marker")) if one)
        package = packages.get(name, {})
        if (name, marker) in seen or _is_project(package.get("source", {})):
            continue
        seen.add((name, marker))
        if not _is_folder(package.get("source", {})):
            yield _pinned(edge, package, file) + (f" ; {marker}" if marker else "")
        if not IMAGE_PACKAGES.fullmatch(name):
            optional = package.get("optional-dependencies", {})
            extras = [one for key in edge.get("extra", ()) for one in optional.get(key, [])]
            wanted += [(one, marker) for one in (*package.get("dependencies", []), *extras)]


def _pinned(edge: dict[str, Any], package: dict[str, Any], file: Path) -> str:
    """Return the requirement that a locked package is."""
    name, source = edge["name"], package.get("source", {})
    if "git" in source:
        where, _, commit = source["git"].partition("#")
        url, _, query = where.partition("?")
        folder = parse_qs(query).get("subdirectory")
        return f"{name} @ git+{url}@{commit}" + (f"#subdirectory={folder[0]}" if folder else "")
    if "url" in source:
        return f"{name} @ {source['url']}"
    version = edge.get("version") or package.get("version")
    if "path" in source or version is None:
        raise ConfigError(
            f"env.file: {file}: {name} is locked to {source.get('path', 'no version')}",
            "a node gets names, versions and URLs",
            "put its wheel into a folder, and name both in a requirements.txt: --find-links FOLDER",
        )
    return f"{name}=={version}"


def _is_folder(source: dict[str, Any]) -> bool:
    """Whether a package is a folder of the project's own, which is synced."""
    return bool(source.keys() & {"editable", "virtual", "directory"})


def _is_project(source: dict[str, Any]) -> bool:
    return "." in (source.get("editable"), source.get("virtual"), source.get("directory"))


def source_folders(project: Path) -> tuple[str, ...]:
    """Return the folders, relative to the project's, from which its pyproject.toml has its packages imported.

    Build backends that are not told take `src`, where it holds packages
    (https://packaging.python.org/en/latest/discussions/src-layout-vs-flat-layout/). () is the project itself.
    """
    try:
        document = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    tools = document.get("tool", {})
    if not (document.keys() & {"project", "build-system"} or tools.keys() & {"poetry", "setuptools"}):
        return ()
    named = [
        *_at(tools, "setuptools", "packages", "find", "where"),
        *_at(tools, "setuptools", "package-dir", ""),
        *(one.get("from") for one in _at(tools, "poetry", "packages") if isinstance(one, dict)),
        *(
            str(Path(one).parent)
            for one in _at(tools, "hatch", "build", "targets", "wheel", "packages")
            if isinstance(one, str)
        ),
        "src",
    ]
    found = dict.fromkeys(Path(one).as_posix() for one in named if isinstance(one, str) and one)
    return tuple(one for one in found if _holds_packages(project, one))


def _at(table: Any, *keys: str) -> list[Any]:
    """Return what a TOML document has at a path of keys, as a list; [] for nothing."""
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, list) else [table] if isinstance(table, str) else []


def _holds_packages(project: Path, name: str) -> bool:
    folder = project / name
    inside = name != "." and folder.is_dir() and folder.resolve().is_relative_to(project.resolve())
    return inside and not (folder / "__init__.py").exists() and any(folder.rglob("*.py"))
