"""What a project says that it needs: requirements.txt, pyproject.toml, uv.lock, environment.yml."""

import codecs
import difflib
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from awsddp.errors import ConfigError

_COMMENT = re.compile(r"(^|\s)#.*$")
_HASH = re.compile(r"\s+--hash[= ]\S+")
_INCLUDE = re.compile(r"(-r|--requirement|-c|--constraint)[= ]*(\S.*)")
_INDEX = re.compile(r"(-i|--index-url|--extra-index-url|-f|--find-links|--no-index|--pre|--prefer-binary)\b")
_PROJECT = re.compile(r"(-e|--editable)?[= ]*\.(\[[^\]]*\])?")
# https://packaging.python.org/en/latest/specifications/dependency-specifiers/
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*\s*(\[[^]]*\])?\s*($|[;@(]|===?|~=|!=|<|>)|[a-z][a-z+]*://")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
IMAGE_PACKAGES = re.compile(r"torch|torchvision|torchaudio|triton|nvidia[-_].*|pytorch[-_]triton.*")
"""Names that the image's build of torch decides; nothing that a project asks for may replace them."""
_CONDA_PATH = re.compile(r"\s*-\s+[\"']?(-[ecr]\b|--(editable|constraint|requirement)\b|\.)")
CONDA_KEYS = ("name", "channels", "dependencies", "prefix", "variables", "platforms")


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Lines as pip reads them. `options` are the file's own words for pip, as ("--index-url", "https://...").

    `conda` is the text of an environment.yml, which conda reads itself.
    """

    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    conda: str = ""


def read_requirements(file: Path) -> Requirements:
    """Return what `file` asks for; files that it includes are read too, and `${NAME}` is a variable of here.
    A line for the project itself is left out: its folder is synced.

    Raises ConfigError for a file that is not there or holds what cannot be meant.
    """
    if file.name == "uv.lock":
        return Requirements(lines=tuple(_locked(_toml(file), file)))
    if file.suffix == ".toml":
        return Requirements(lines=_dependencies(_toml(file), file))
    if file.suffix in (".yml", ".yaml"):
        text = _text(file)
        _check_conda(text, file)
        return Requirements(conda=text)
    lines: list[str] = []
    constraints: list[str] = []
    options: list[str] = []
    _collect(file, lines, constraints, options, seen=())
    return Requirements(lines=tuple(lines), constraints=tuple(constraints), options=tuple(options))


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


def _collect(
    file: Path, lines: list[str], constraints: list[str], options: list[str], *, seen: tuple[Path, ...]
) -> None:
    if file.resolve() in seen:
        return
    seen = (*seen, file.resolve())
    for number, raw in enumerate(_text(file).replace("\\\n", " ").splitlines(), 1):
        line = _VARIABLE.sub(_value, _HASH.sub("", _COMMENT.sub("", raw)).strip())
        if not line or _PROJECT.fullmatch(line):
            continue
        if match := _INCLUDE.fullmatch(line):
            included = constraints if match[1] in ("-c", "--constraint") else lines
            _collect(file.parent / match[2].strip(), included, constraints, options, seen=seen)
        elif _INDEX.match(line):
            options += re.split(r"[= ]+", line, maxsplit=1)
        else:
            lines.append(_checked(line, f"{file}, line {number}"))


def _value(match: re.Match[str]) -> str:
    """Return the value of a variable in a requirements file; pip leaves one alone that is not set."""
    return os.environ.get(match[1]) or match[0]


def _checked(line: str, place: str) -> str:
    """Return a requirement. Raises ConfigError for what names a path of this machine, or is none."""
    if line.startswith(("-", ".", "/")) or "file:" in line:
        raise ConfigError(
            f"env.file: {place}: {line!r} does not work on a node",
            "a node gets names, versions and URLs; the synced folder holds the project itself",
            "name a package, or put a wheel into a folder of env.find_links",
        )
    if not _REQUIREMENT.match(line):
        name, equals, version = line.partition("=")
        raise ConfigError(
            f"env.file: {place}: {line!r} is not a requirement",
            "it is a name, and after it nothing, a version as in ==1.2, or @ and a URL",
            f"did you mean '{name.strip()}=={version.strip()}'?" if equals else "",
        )
    return line


def _dependencies(document: dict[str, Any], file: Path) -> tuple[str, ...]:
    found = document.get("project", {}).get("dependencies")
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigError(
            f"env.file: {file} has no [project] dependencies",
            "these are what is installed; tools that keep them elsewhere can export them",
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
            extras = [one for key in edge.get("extra", ()) for one in _optional(package, key)]
            wanted += [(one, marker) for one in (*package.get("dependencies", []), *extras)]


def _optional(package: dict[str, Any], extra: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = package.get("optional-dependencies", {}).get(extra, [])
    return found


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
            "put its wheel into a folder of env.find_links, and name it in a requirements.txt",
        )
    return f"{name}=={version}"


def _is_folder(source: dict[str, Any]) -> bool:
    """Whether a package is a folder of the project's own, which is synced."""
    return bool(source.keys() & {"editable", "virtual", "directory"})


def _is_project(source: dict[str, Any]) -> bool:
    return "." in (source.get("editable"), source.get("virtual"), source.get("directory"))


def _check_conda(text: str, file: Path) -> None:
    """Refuse an environment.yml that conda would misread: conda ignores a key that it does not know."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise ConfigError(f"env.file: {file}, line {number}: a tab", "YAML is indented by spaces")
        if _CONDA_PATH.match(line):
            raise ConfigError(
                f"env.file: {file}, line {number}: {line.strip()!r} does not work on a node",
                "conda gets this file alone; the synced folder holds the project itself",
                "remove the line; list here what the other file lists",
            )
        if not line.strip() or line[0] in " -#" or line in ("---", "..."):
            continue
        key, colon, _ = line.partition(":")
        if not colon or key not in CONDA_KEYS:
            near = difflib.get_close_matches(key.strip(), CONDA_KEYS, 1)
            raise ConfigError(
                f"env.file: {file}, line {number}: {key.strip()!r} is no key of an environment.yml",
                f"its keys: {', '.join(CONDA_KEYS)}",
                f"did you mean {near[0]!r}?" if near else "",
            )
        keys.append(key)
    if "dependencies" not in keys:
        raise ConfigError(f"env.file: {file} has no dependencies", "nothing would be installed")


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
