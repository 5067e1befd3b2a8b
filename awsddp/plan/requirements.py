"""Read a project's requirements: requirements.txt, pyproject.toml, uv.lock, environment.yml.

The lines are only collected; uv checks whether they are valid and can be met (resolve.py).
"""

import codecs
import dataclasses
import functools
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from awsddp.errors import ConfigError
from awsddp.plan.indexes import OPTION, Indexes, is_local_folder, parse_option
from awsddp.plan.project import Project, Table, list_dependencies, read_project, read_toml
from awsddp.plan.uv import run_uv

_LINE = re.compile(r"(?:.*\\\n)*.+")
"""A line with its continuation lines."""
_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_CODING = re.compile(rb"(?:[^\n]*\n)?[ \t]*#[^\n]*?coding[:=][ \t]*([-\w.]+)")
"""A comment in the first two lines that names the file's encoding (PEP 263); pip matches it in the same way.
"""
_NAME_FILE = "name a file that exists: --env FILE"
_HASH = re.compile(r"\s+--hash[= ]\S+")
_INCLUDE = re.compile(r"(-r|--requirement|-c|--constraint)[= ]*(\S.*)")
_EDITABLE = re.compile(r"(-e|--editable)[= ]*(?=[a-z][a-z+]*://(?<!file://))")
"""The option -e before a URL. It is removed, so that the URL's package is not installed as editable."""
_PROJECT = re.compile(r"(?:-e|--editable)?[= ]*([\"']?)\./?(?:\[(?P<extras>[^\]]*)\])?\1")
_PATH = re.compile(r"-e|--editable|\.{0,2}/|\.|~|.*\bfile:")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_REGISTRY = re.compile(r'registry = "(?!https://(?:pypi|download\.pytorch)\.org/)(https?://[^"]+)"')
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
CONDA_SUFFIXES = (".yml", ".yaml")
_OTHER_KINDS = (".lock", ".toml", *CONDA_SUFFIXES)
IMAGE_PACKAGES = re.compile(r"torch|torchvision|torchaudio|triton|nvidia[-_].*|pytorch[-_]triton.*")
"""The packages that belong to the image's torch; a project's requirements must not replace them."""
_TORCH = ("torch", "torchvision", "torchaudio")

_CONDA_KEYS = ("name", "channels", "dependencies", "prefix", "variables", "platforms")
_KEYS_ARE = (
    f"an environment.yml has the keys {', '.join(_CONDA_KEYS)}, each once; pip is an item in dependencies"
)
_OTHER = r"(?:win|osx|not (?:linux|unix))\w*"
_ELSEWHERE = re.compile(rf"^[ \t]*-[ \t].*#[ \t]*\[ *{_OTHER}(?: or {_OTHER})* *\][ \t]*$", re.MULTILINE)
"""A line that a comment for conda-build or conda-lock limits to other systems."""
_YAML_KEY = re.compile(r"^[\"']?(\w+)[\"']?\s*:", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Requirement lines for pip, the file and line number of each (`locations`), and the indexes for them.

    The `projects` are installed without their code, because sync sends it. `conda` is the part of an
    environment.yml that conda reads, and `variables` are the environment variables that the file sets.
    """

    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    locations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    indexes: Indexes = dataclasses.field(default_factory=Indexes)
    projects: tuple[Project, ...] = ()
    conda: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_requirements(file: Path) -> Requirements:
    """Return the requirements in `file` and the files it includes; `${NAME}` is an environment variable on
    this machine.

    A line for the project itself is replaced by the project's dependencies and metadata, since the project
    folder is synced. Raises ConfigError for a file that cannot be read, or for a path that no node has.
    """
    if file.name == "uv.lock":
        project = file.parent / "pyproject.toml"
        projects = _read_projects(_toml(project) if project.is_file() else {}, file.parent)
        return replace(_collect(_export_lock(file, _text(file)), file), projects=projects)
    if file.suffix == ".toml":
        document = _toml(file)
        lines = list_dependencies(document, file.parent, (), location=str(file))
        if "project" not in document:
            raise ConfigError(
                f"env.file: {file} has no [project] dependencies",
                "only those are installed; a tool that stores dependencies elsewhere can export them",
                "write a requirements.txt, and name it: --env requirements.txt",
            )
        return replace(_collect("\n".join(lines), file), projects=_read_projects(document, file.parent))
    if file.suffix in CONDA_SUFFIXES:
        return _conda(_text(file), file)
    return _collect(_text(file), file)


def normalize_name(name: str) -> str:
    """Return a package's normalized name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_name(line: str) -> str:
    """Return the normalized package name (PEP 503) of a requirement, or "" if it is only a URL."""
    match = _NAME.match(line)
    return normalize_name(match[0]) if match and not line[match.end() :].startswith((":", "+")) else ""


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # PowerShell writes UTF-16
        comment = _CODING.match(data)
        coding = "utf-16" if is_utf16 else comment[1].decode() if comment else "utf-8-sig"
        return data.decode(coding).replace("\r\n", "\n")
    except OSError as error:
        raise ConfigError(f"env.file: {file} cannot be read", error.strerror or "", _NAME_FILE) from error
    except (ValueError, LookupError) as error:
        raise ConfigError(f"env.file: {file} cannot be read", str(error), f"save {file} as UTF-8") from error


def _toml(file: Path) -> Table:
    try:
        return read_toml(file)
    except OSError as error:
        raise ConfigError(f"env.file: {file} cannot be read", error.strerror or "", _NAME_FILE) from error
    except ValueError as error:
        raise ConfigError(f"env.file: {file} is not valid TOML", str(error)) from error


def _read_projects(document: Table, folder: Path) -> tuple[Project, ...]:
    project = read_project(document, folder)
    return (project,) if project else ()


def _collect(text: str, file: Path, *, including: tuple[Path, ...] = ()) -> Requirements:
    """Return the requirements in a requirements file; `including` are the files that include `file`."""
    locations: dict[str, str] = {}
    constraints: list[str] = []
    indexes = Indexes()
    lines: list[str] = []
    projects: list[Project] = []
    including = (*including, file.resolve())
    for match in _LINE.finditer(text):
        line = _expand_variables(
            " ".join(_HASH.sub("", _COMMENT.sub("", match[0]).replace("\\\n", " ")).split())
        )
        number = text.count("\n", 0, match.start()) + 1
        location = str(file) if file.suffix in _OTHER_KINDS else f"{file}, line {number}"
        if not line:
            continue
        if project := _PROJECT.fullmatch(line):
            extras = [extra.strip() for extra in (project["extras"] or "").split(",")]
            pyproject = file.parent / "pyproject.toml"
            document = _toml(pyproject) if pyproject.is_file() else {}
            new_lines = list_dependencies(document, file.parent, extras, location=location)
            projects += _read_projects(document, file.parent)
        elif include := _INCLUDE.fullmatch(line):
            included = file.parent / include[2].strip()
            if included.resolve() not in including:
                nested = _collect(_text(included), included, including=including)
                (constraints if include[1] in ("-c", "--constraint") else lines).extend(nested.lines)
                constraints += nested.constraints
                locations |= nested.locations
                projects += nested.projects
                indexes = nested.indexes.with_defaults(indexes)
            continue
        elif option := OPTION.fullmatch(line):
            indexes = parse_option(option[1], option[2], file.parent).with_defaults(indexes)
            continue
        else:
            new_lines = [_EDITABLE.sub("", line)]
        for new_line in new_lines:
            _check_line(new_line, location)
            locations[new_line] = location
        lines += new_lines
    return Requirements(
        lines=tuple(lines),
        constraints=tuple(constraints),
        locations=locations,
        indexes=indexes,
        projects=tuple({project.info: project for project in projects}.values()),
    )


def _expand_variables(text: str) -> str:
    """Return a text with environment variables replaced by their values. Variables that are not set are left
    unchanged, as in pip.
    """
    return _VARIABLE.sub(lambda match: os.environ.get(match[1]) or match[0], text)


def _check_line(line: str, location: str) -> None:
    """Raise ConfigError for a line with a path on this machine or an option that is not passed to pip."""
    if _PATH.match(line):
        raise ConfigError(
            f"env.file: {location}: {line!r} does not work on a node",
            "only names, versions and URLs work on a node; the project is sent with its folder",
            "name a package, or put a wheel into a folder, and add a line for pip: --find-links FOLDER",
        )
    if line.startswith("-"):
        raise ConfigError(
            f"env.file: {location}: {line!r} is an option that is not passed on to the nodes' pip",
            "only the options for indexes, -r, -c and -e are supported",
            "remove the line, or write the option into the nodes' pip.conf with env.setup",
        )


@functools.cache
def _export_lock(file: Path, text: str) -> str:
    """Return the project's locked packages as lines, without torch's dependencies."""
    options = "export --frozen --offline --no-dev --no-emit-workspace --no-hashes --no-header --no-annotate"
    full = run_uv(options.split(), {}, folder=file.parent)
    pruned = run_uv([*options.split(), *(f"--prune={name}" for name in _TORCH)], {}, folder=file.parent)
    if failure := full.failure or pruned.failure:
        raise ConfigError(f"env.file: {file} cannot be read", failure, "uv lock   # writes it again")
    torch = [re.sub(r"\+[\w.]+", "", line) for line in full.lines if parse_name(line) in _TORCH]
    indexes = dict.fromkeys(f"--extra-index-url {url}" for url in _REGISTRY.findall(text))
    return "\n".join([*indexes, *torch, *pruned.lines])


def _conda(text: str, file: Path) -> Requirements:
    """Return the requirements in an environment.yml, but not its name, prefix or lines for other systems.

    The file's `pip` lines are read like a requirements file. Its variables are returned, because only `conda
    activate` would set them, and ranks do not run that command. Raises ConfigError for a part that conda
    would ignore silently.
    """
    try:
        document = msgspec.yaml.decode(_ELSEWHERE.sub("", text).encode())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # an impossible date; [[[[...
        why = str(error).replace('"<byte string>", ', "")
        raise ConfigError(f"env.file: {file} is not valid YAML", why) from error
    table = document if isinstance(document, dict) else {}
    packages, variables = table.get("dependencies"), table.get("variables") or {}
    if not isinstance(packages, list) or not packages or not isinstance(variables, dict):
        raise ConfigError(f"env.file: {file} has no dependencies", _KEYS_ARE)
    strange = [str(key) for key in table if key not in _CONDA_KEYS and not str(key).startswith("x-")]
    for key in (*strange, *(key for key, times in Counter(_YAML_KEY.findall(text)).items() if times > 1)):
        raise ConfigError(f"env.file: {file}: unknown or repeated key {key!r}", _KEYS_ARE)
    names = [package for package in packages if isinstance(package, str)]
    tables = [package for package in packages if isinstance(package, dict) and list(package) == ["pip"]]
    pip_lists = [table["pip"] or [] for table in tables]
    pip = _collect("\n".join(str(line) for lines in pip_lists for line in lines), file)
    if len(names) + len(pip_lists) < len(packages) or str in map(type, pip_lists) or pip.constraints:
        why = (
            "a package is a string, such as 'numpy=1.26'; '- pip:' has a list of strings, without constraints"
        )
        raise ConfigError(f"env.file: {file}: dependencies that conda does not accept", why)
    for entry in (*names, *(f"./{folder}" for folder in filter(is_local_folder, pip.indexes.find_links))):
        _check_line(entry, str(file))
    environment: Table = {}
    for key in ("channels", "platforms"):
        if values := [_expand_variables(str(value)) for value in table.get(key) or ()]:
            environment[key] = values
    environment["dependencies"] = [*names, {"pip": pip.lines}] if pip.lines else names
    return Requirements(
        conda=msgspec.json.encode(environment).decode(),
        variables={str(name): str(value) for name, value in variables.items()},
        indexes=pip.indexes,
        projects=pip.projects,
    )
