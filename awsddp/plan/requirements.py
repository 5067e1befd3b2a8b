"""What a project says that it needs: requirements.txt, pyproject.toml, uv.lock, environment.yml."""

import codecs
import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec

from awsddp.errors import ConfigError
from awsddp.plan.indexes import OPTION, Indexes, is_folder_here, of_option
from awsddp.values import VARIABLE

_COMMENT = re.compile(r"(^|\s)#.*$")
_HASH = re.compile(r"\s+--hash[= ]\S+")
_INCLUDE = re.compile(r"(-r|--requirement|-c|--constraint)[= ]*(\S.*)")
_EDITABLE = re.compile(r"(-e|--editable)[= ]*(?=[a-z][a-z+]*://(?<!file://))")
"""What is fetched by a URL is installed, not edited."""
_PROJECT = re.compile(r"(?:-e|--editable)?[= ]*([\"']?)\./?(?:\[(?P<extras>[^\]]*)\])?\1")
# https://packaging.python.org/en/latest/specifications/dependency-specifiers/
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*\s*(\[[^]]*\])?\s*($|[;@(]|===?|~=|!=|<|>)|[a-z][a-z+]*://")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
CONDA_SUFFIXES = (".yml", ".yaml")
IMAGE_PACKAGES = re.compile(r"torch|torchvision|torchaudio|triton|nvidia[-_].*|pytorch[-_]triton.*")
"""Names that the image's build of torch decides; nothing that a project asks for may replace them."""

_CONDA_KEYS = ("name", "channels", "dependencies", "prefix", "variables", "platforms")
_KEYS_ARE = f"an environment.yml has the keys {', '.join(_CONDA_KEYS)}"
_CLAUSE = r"[\w.*+!-]+"
_OPERATOR = r"(?:==|>=|<=|!=|~=|=|<|>)\s*"
_VERSIONS = rf"(?:\s+|\s*{_OPERATOR}){_CLAUSE}(?:\s*[,|]\s*(?:{_OPERATOR})?{_CLAUSE})*"
_BRACKET = r"\s*\[\s*\w+\s*=[^]]*\]"
# https://docs.conda.io/projects/conda/en/stable/user-guide/concepts/pkg-specs.html#package-match-specifications
_SPEC = re.compile(
    r"(?:[^\s\[\]=<>!~;@]+::)?[A-Za-z0-9_][\w.-]*"
    rf"(?:{_VERSIONS}(?:(?:\s*=\s*|\s+)[\w.*^$+]+)?)?(?:{_BRACKET})?"
    r"|https?://\S+\.(?:conda|tar\.bz2)(?:#\w+)?"
)
_PATH = re.compile(r"\.{0,2}/|~|file:")
_OTHER = r"(?:win|osx|not (?:linux|unix))\w*"
_ELSEWHERE = re.compile(rf"^[ \t]*-[ \t].*#[ \t]*\[ *{_OTHER}(?: or {_OTHER})* *\][ \t]*$", re.M)
"""A line for other systems than the nodes', as conda-build and conda-lock mark it. conda reads a comment."""
_YAML_KEY = re.compile(r"^[\"']?(\w+)[\"']?\s*:", re.M)

Table = dict[Any, Any]
"""A table of TOML or YAML, in the shape of uv, of pyproject.toml or of conda."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Lines as pip reads them, and where it finds them.

    `conda` is an environment.yml, which conda reads itself, and `variables` those that it sets.
    """

    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    indexes: Indexes = dataclasses.field(default_factory=Indexes)
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


def _toml(file: Path) -> Table:
    try:
        return tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"env.file: {file} is not valid TOML", str(error)) from error


def _conda(text: str, file: Path) -> Requirements:
    """Return what conda gets: each text in quotes, without the name and prefix of another machine.

    Read here, because conda ignores a key that it does not know, and fails late. Its `pip` lines are read as
    those of a requirements file are; its variables are set by `conda activate`, which no rank runs.
    """
    document = _yaml(_ELSEWHERE.sub("", text), file)
    for key in document:
        if key not in _CONDA_KEYS and not str(key).startswith("x-"):  # where YAML's anchors are kept
            near = difflib.get_close_matches(str(key), _CONDA_KEYS, 1)
            advice = f"did you mean {near[0]!r}?" if near else ""
            if key == "pip":
                advice = "write '- pip:' as the last line of dependencies, and the packages below it"
            where = _line_of(str(key), text, file)
            raise ConfigError(f"env.file: {where}: unknown key {str(key)!r}", _KEYS_ARE, advice)
    for key, times in Counter(_YAML_KEY.findall(text)).items():
        if times > 1:
            raise ConfigError(f"env.file: {file} has {key!r} {times} times", "YAML keeps the last one only")
    packages: list[str] = []
    below_pip: list[str] = []
    for one in _list(document, "dependencies", file):
        if isinstance(one, dict) and list(one) == ["pip"]:
            below_pip += _strings(one, "pip", file)
        else:
            packages.append(_spec(one, text, file))
    if not packages and not below_pip:
        raise ConfigError(f"env.file: {file} has no dependencies", "nothing would be installed")
    channels = [_filled(one) for one in _strings(document, "channels", file)]
    platforms, variables = _strings(document, "platforms", file), _variables(document, file)
    pip = _collected("\n".join(below_pip), file, lambda line: _line_of(line, text, file))
    if pip.constraints:
        raise ConfigError(
            f"env.file: {file}: constraints below pip",
            "only this file is passed to conda",
            'write the versions into the file, or use a requirements.txt and env.kind = "venv"',
        )
    for folder in filter(is_folder_here, pip.indexes.find_links):
        raise _not_on_a_node(f"--find-links {folder}", str(file))
    lines: list[str] = []
    for key, values in (("channels", channels), ("platforms", platforms), ("dependencies", packages)):
        if values or key == "dependencies":
            lines += [f"{key}:", *(f"- {json.dumps(value)}" for value in values)]
    if pip.lines:
        lines += ["- pip:", *(f"  - {json.dumps(one)}" for one in pip.lines)]
    return Requirements(conda="\n".join(lines) + "\n", variables=variables, indexes=pip.indexes)


def _collected(
    text: str, file: Path, place: Callable[[str], str] | None = None, *, seen: tuple[Path, ...] = ()
) -> Requirements:
    """Return what the text of a requirements file asks for.

    `place` names where a line stands, where that is not its number in `file`; `seen` are the files that
    include this one.
    """
    lines: list[str] = []
    constraints: list[str] = []
    indexes = Indexes()
    seen = (*seen, file.resolve())
    for number, raw in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        line = _filled(_HASH.sub("", _COMMENT.sub("", raw)).strip())
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
                indexes = found.indexes.otherwise(indexes)
        elif option := OPTION.fullmatch(line):
            indexes = of_option(*_option(option[1], option[2], file)).otherwise(indexes)
        else:
            lines.append(_checked(_EDITABLE.sub("", line), where))
    return Requirements(lines=tuple(lines), constraints=tuple(constraints), indexes=indexes)


def _of_project(file: Path, extras: Sequence[str], seen: tuple[str, ...] = ()) -> list[str]:
    """Return the dependencies of the project itself, whose folder is synced; none where it names none."""
    document = _toml(file) if file.is_file() else {}
    lines = [] if seen else toml_list(document, "project", "dependencies")
    for key in extras:
        if key and key not in seen:
            lines = [*lines, *toml_list(document, "project", "optional-dependencies", key)]
    name = "".join(map(str, toml_list(document, "project", "name")))
    own = re.compile(rf"{re.escape(name)}\s*\[([^\]]*)\]", re.IGNORECASE)
    found: list[str] = []
    for line in filter(lambda one: isinstance(one, str), lines):
        if inner := own.fullmatch(line.strip()):  # dev = ["mine[test]"]
            found += _of_project(file, [one.strip() for one in inner[1].split(",")], (*seen, *extras, "."))
        else:
            found.append(_checked(line, str(file)))
    return list(dict.fromkeys(found))


def canonical(name: str) -> str:
    """Return a package's name as pip compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _option(name: str, value: str, file: Path) -> tuple[str, str]:
    """Return an option and its value; a folder is relative to the file that names it."""
    if name.lstrip("-") in ("f", "find-links") and is_folder_here(value) and (file.parent / value).is_dir():
        value = os.path.relpath(file.parent / value)
    return name, value


def _filled(text: str) -> str:
    """Return a text with the values of its variables; pip leaves one alone that is not set."""
    return _VARIABLE.sub(lambda match: os.environ.get(match[1]) or match[0], text)


def _checked(line: str, place: str) -> str:
    """Return a requirement. Raises ConfigError for what names a path of this machine, or is none."""
    if line.startswith("--") or re.match(r"-[^e]", line):
        raise ConfigError(
            f"env.file: {place}: {line!r} is an option that is not passed on to the nodes' pip",
            "options for indexes are, and -r, -c, -e",
            "remove the line, or write the option into the nodes' pip.conf by env.setup",
        )
    if line.startswith(("-", ".", "/")) or "file:" in line:
        raise _not_on_a_node(line, place)
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


def _dependencies(document: Table, file: Path) -> tuple[str, ...]:
    found = document.get("project", {}).get("dependencies")
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigError(
            f"env.file: {file} has no [project] dependencies",
            "only these are installed; a tool that keeps them elsewhere can export them",
            "write a requirements.txt, and name it: --env requirements.txt",
        )
    return tuple(_checked(one, str(file)) for one in found)


def _locked(document: Table, file: Path) -> Iterator[str]:
    """Yield the locked packages that the project needs, without what torch itself brings."""
    packages: Table = {one.get("name", ""): one for one in document.get("package", [])}
    roots = [one for one in packages.values() if _folder(one) == "."]
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
        if (name, marker) in seen or _folder(package) == ".":
            continue
        seen.add((name, marker))
        if _folder(package) is None:  # else it is synced
            yield _pinned(edge, package, file) + (f" ; {marker}" if marker else "")
        if not IMAGE_PACKAGES.fullmatch(name):
            optional = package.get("optional-dependencies", {})
            extras = [one for key in edge.get("extra", ()) for one in optional.get(key, [])]
            wanted += [(one, marker) for one in (*package.get("dependencies", []), *extras)]


def _pinned(edge: Table, package: Table, file: Path) -> str:
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


def _folder(package: Table) -> str | None:
    """Return the folder that a locked package is, relative to the project; None where it is none."""
    source = package.get("source", {})
    return next((source[kind] for kind in ("editable", "virtual", "directory") if kind in source), None)


def toml_list(table: Any, *keys: str) -> list[Any]:
    """Return what a TOML document has at a path of keys, as a list; [] for nothing."""
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, list) else [table] if isinstance(table, str) else []


def _line_of(words: str, text: str, file: Path) -> str:
    """Return where a file has `words`, as "FILE, line 3"."""
    for number, line in enumerate(text.splitlines(), 1):
        if words and words in line.partition(" #")[0]:
            return f"{file}, line {number}"
    return str(file)


def _yaml(text: str, file: Path) -> Table:
    try:
        document = msgspec.yaml.decode(text.encode())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # a date without such a day; [[[[...
        tab = next((number for number, line in enumerate(text.splitlines(), 1) if re.match(r" *\t", line)), 0)
        fault, why = " is not valid YAML", str(error).replace('"<byte string>", ', "")
        if tab:
            fault, why = f", line {tab}: a tab", "YAML is indented by spaces"
        raise ConfigError(f"env.file: {file}{fault}", why) from error
    if isinstance(document, dict):
        return document
    raise ConfigError(f"env.file: {file} has no dependencies", _KEYS_ARE)


def _list(table: Table, key: str, file: Path) -> list[Any]:
    found = table.get(key)
    if found is None:
        return []
    if not isinstance(found, list):
        raise ConfigError(
            f"env.file: {file}: {key} is not a list",
            "each entry is a line that begins with '- '",
            f"{key}:\n- ...",
        )
    return found


def _strings(table: Table, key: str, file: Path) -> tuple[str, ...]:
    found = _list(table, key, file)
    for one in found:
        if not isinstance(one, str):
            raise _not_text(f"{key}: {one!r}", file)
    return tuple(found)


def _not_text(words: str, file: Path) -> ConfigError:
    why, advice = "YAML reads it as another type", "write it in quotes"
    return ConfigError(f"env.file: {file}: {words} is not text", why, advice)


def _spec(one: Any, text: str, file: Path) -> str:
    """Return a package of conda. Raises ConfigError for what is none."""
    if isinstance(one, dict) and len(one) == 1:
        name, version = next((str(key), value) for key, value in one.items())
        place = _line_of(f"{name}:", text, file)
        written = re.search(rf"-\s+{re.escape(name)}\s*:\s*([\w.*]+)", text)
        exact = written[1] if written else version
        raise ConfigError(
            f"env.file: {place}: {name!r} is a key, not a package",
            "a package is one text: its name, =, its version",
            f"write '- {name}={exact}'" if isinstance(version, str | int | float) else "",
        )
    words = one.strip() if isinstance(one, str) else str(one)
    if isinstance(one, str) and _PATH.match(words):
        raise _not_on_a_node(words, _line_of(words, text, file))
    if not isinstance(one, str) or not _SPEC.fullmatch(words):
        raise ConfigError(
            f"env.file: {_line_of(words, text, file)}: {words!r} is not a conda package",
            "expected a name, optionally with a version: numpy, numpy=1.26, 'numpy>=1.24,<2', "
            "conda-forge::numpy",
            "what only pip understands (extras, markers, git+https://...) belongs below '- pip:'",
        )
    return words


def _not_on_a_node(words: str, place: str) -> ConfigError:
    """Return the refusal of a path of this machine."""
    return ConfigError(
        f"env.file: {place}: {words!r} does not work on a node",
        "a node gets names, versions and URLs; the synced folder holds the project itself",
        "name a package, or put a wheel into a folder, and add a line for pip: --find-links FOLDER",
    )


def _variables(document: Table, file: Path) -> dict[str, str]:
    found = document.get("variables") or {}
    if not isinstance(found, dict):
        raise ConfigError(f"env.file: {file}: variables are not a table", "each is a line NAME: value")
    for name, value in found.items():
        if not VARIABLE.fullmatch(str(name)):
            raise ConfigError(f"env.file: {file}: variables: {name!r} is not the name of a variable", "")
        if isinstance(value, bool) or not isinstance(value, str | int | float):  # on, yes, true
            raise _not_text(f"variables: {name}: {value!r}", file)
    return {str(name): str(value) for name, value in found.items()}
