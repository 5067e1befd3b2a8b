"""What a project says that it needs: requirements.txt, pyproject.toml, uv.lock, environment.yml.

Lines are gathered here; whether they are requirements, and can be met, uv says (resolve.py).
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
from awsddp.plan.indexes import OPTION, Indexes, is_folder_here, of_option
from awsddp.plan.project import Project, Table, dependencies_of, read_project, read_toml
from awsddp.plan.uv import run_uv

_LINE = re.compile(r"(?:.*\\\n)*.+")
"""A line, with those that continue it."""
_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_CODING = re.compile(rb"(?:[^\n]*\n)?[ \t]*#[^\n]*?coding[:=][ \t]*([-\w.]+)")
"""The encoding that a comment of the first two lines names, as pip takes it (PEP 263)."""
_NAME_FILE = "name a file that exists: --env FILE"
_HASH = re.compile(r"\s+--hash[= ]\S+")
_INCLUDE = re.compile(r"(-r|--requirement|-c|--constraint)[= ]*(\S.*)")
_EDITABLE = re.compile(r"(-e|--editable)[= ]*(?=[a-z][a-z+]*://(?<!file://))")
"""What is fetched by a URL is installed, not edited."""
_PROJECT = re.compile(r"(?:-e|--editable)?[= ]*([\"']?)\./?(?:\[(?P<extras>[^\]]*)\])?\1")
_PATH = re.compile(r"-e|--editable|\.{0,2}/|\.|~|.*\bfile:")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_REGISTRY = re.compile(r'registry = "(?!https://(?:pypi|download\.pytorch)\.org/)(https?://[^"]+)"')
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
CONDA_SUFFIXES = (".yml", ".yaml")
_OTHER_KINDS = (".lock", ".toml", *CONDA_SUFFIXES)
IMAGE_PACKAGES = re.compile(r"torch|torchvision|torchaudio|triton|nvidia[-_].*|pytorch[-_]triton.*")
"""Names that the image's build of torch decides; nothing that a project asks for may replace them."""
_TORCH = ("torch", "torchvision", "torchaudio")

_CONDA_KEYS = ("name", "channels", "dependencies", "prefix", "variables", "platforms")
_KEYS_ARE = (
    f"an environment.yml has the keys {', '.join(_CONDA_KEYS)}, each once; pip is a line of dependencies"
)
_OTHER = r"(?:win|osx|not (?:linux|unix))\w*"
_ELSEWHERE = re.compile(rf"^[ \t]*-[ \t].*#[ \t]*\[ *{_OTHER}(?: or {_OTHER})* *\][ \t]*$", re.MULTILINE)
"""A line for other systems than the nodes', as conda-build and conda-lock mark it. conda reads a comment."""
_YAML_KEY = re.compile(r"^[\"']?(\w+)[\"']?\s*:", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Lines as pip reads them, where each stands (`places`), and where pip finds them.

    `projects` are those that are installed without their code, which is synced. `conda` is an
    environment.yml, which conda reads itself, and `variables` those that it sets.
    """

    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)
    indexes: Indexes = dataclasses.field(default_factory=Indexes)
    projects: tuple[Project, ...] = ()
    conda: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_requirements(file: Path) -> Requirements:
    """Return what `file` asks for; files that it includes are read too, and `${NAME}` is a variable of here.
    A line for the project itself stands for its dependencies and its metadata: its folder is synced.

    Raises ConfigError for a file that is not there, or names what no node has.
    """
    if file.name == "uv.lock":
        project = file.parent / "pyproject.toml"
        own = _installed(_toml(project) if project.is_file() else {}, file.parent)
        return replace(_collected(_locked(file, _text(file)), file), projects=own)
    if file.suffix == ".toml":
        document = _toml(file)
        lines = dependencies_of(document, file.parent, (), place=str(file))
        if "project" not in document:
            raise ConfigError(
                f"env.file: {file} has no [project] dependencies",
                "only these are installed; a tool that keeps them elsewhere can export them",
                "write a requirements.txt, and name it: --env requirements.txt",
            )
        return replace(_collected("\n".join(lines), file), projects=_installed(document, file.parent))
    if file.suffix in CONDA_SUFFIXES:
        return _conda(_text(file), file)
    return _collected(_text(file), file)


def canonical(name: str) -> str:
    """Return a package's name as pip compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(line: str) -> str:
    """Return the name that a requirement begins with, as pip compares it; "" for a URL alone."""
    found = _NAME.match(line)
    return canonical(found[0]) if found and not line[found.end() :].startswith((":", "+")) else ""


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell writes
        named = _CODING.match(data)
        coding = "utf-16" if wide else named[1].decode() if named else "utf-8-sig"
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


def _installed(document: Table, folder: Path) -> tuple[Project, ...]:
    project = read_project(document, folder)
    return (project,) if project else ()


def _collected(text: str, file: Path, *, seen: tuple[Path, ...] = ()) -> Requirements:
    """Return what the text of a requirements file asks for; `seen` are the files that include this one."""
    places: dict[str, str] = {}
    constraints: list[str] = []
    indexes = Indexes()
    lines: list[str] = []
    projects: list[Project] = []
    seen = (*seen, file.resolve())
    for found in _LINE.finditer(text):
        line = _filled(" ".join(_HASH.sub("", _COMMENT.sub("", found[0]).replace("\\\n", " ")).split()))
        number = text.count("\n", 0, found.start()) + 1
        place = str(file) if file.suffix in _OTHER_KINDS else f"{file}, line {number}"
        if not line:
            continue
        if project := _PROJECT.fullmatch(line):
            extras = [one.strip() for one in (project["extras"] or "").split(",")]
            of_project = file.parent / "pyproject.toml"
            document = _toml(of_project) if of_project.is_file() else {}
            own = dependencies_of(document, file.parent, extras, place=place)
            projects += _installed(document, file.parent)
        elif include := _INCLUDE.fullmatch(line):
            other = file.parent / include[2].strip()
            if other.resolve() not in seen:
                more = _collected(_text(other), other, seen=seen)
                (constraints if include[1] in ("-c", "--constraint") else lines).extend(more.lines)
                constraints += more.constraints
                places |= more.places
                projects += more.projects
                indexes = more.indexes.otherwise(indexes)
            continue
        elif option := OPTION.fullmatch(line):
            indexes = of_option(option[1], option[2], file.parent).otherwise(indexes)
            continue
        else:
            own = [_EDITABLE.sub("", line)]
        for one in own:
            _check(one, place)
            places[one] = place
        lines += own
    return Requirements(
        lines=tuple(lines),
        constraints=tuple(constraints),
        places=places,
        indexes=indexes,
        projects=tuple({one.info: one for one in projects}.values()),
    )


def _filled(text: str) -> str:
    """Return a text with the values of its variables; pip leaves one alone that is not set."""
    return _VARIABLE.sub(lambda match: os.environ.get(match[1]) or match[0], text)


def _check(line: str, place: str) -> None:
    """Raise ConfigError for what names a path of this machine, and for an option that pip would not get."""
    if _PATH.match(line):
        raise ConfigError(
            f"env.file: {place}: {line!r} does not work on a node",
            "a node gets names, versions and URLs; the synced folder holds the project itself",
            "name a package, or put a wheel into a folder, and add a line for pip: --find-links FOLDER",
        )
    if line.startswith("-"):
        raise ConfigError(
            f"env.file: {place}: {line!r} is an option that is not passed on to the nodes' pip",
            "options for indexes are, and -r, -c, -e",
            "remove the line, or write the option into the nodes' pip.conf by env.setup",
        )


@functools.cache
def _locked(file: Path, text: str) -> str:
    """Return the locked packages that the project needs, as lines, without what torch itself brings."""
    words = "export --frozen --offline --no-dev --no-emit-workspace --no-hashes --no-header --no-annotate"
    every = run_uv(words.split(), {}, folder=file.parent)
    pruned = run_uv([*words.split(), *(f"--prune={name}" for name in _TORCH)], {}, folder=file.parent)
    if failed := every.failure or pruned.failure:
        raise ConfigError(f"env.file: {file} cannot be read", failed, "uv lock   # writes it anew")
    torch = [re.sub(r"\+[\w.]+", "", line) for line in every.lines if name_of(line) in _TORCH]
    others = dict.fromkeys(f"--extra-index-url {url}" for url in _REGISTRY.findall(text))
    return "\n".join([*others, *torch, *pruned.lines])


def _conda(text: str, file: Path) -> Requirements:
    """Return what conda gets: all but the name and prefix of another machine, and lines for other systems.

    Its `pip` lines are read as those of a requirements file are. Its variables are set by `conda activate`,
    which no rank runs. Refused is what conda would leave out without a word.
    """
    try:
        document = msgspec.yaml.decode(_ELSEWHERE.sub("", text).encode())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # a date without such a day; [[[[...
        why = str(error).replace('"<byte string>", ', "")
        raise ConfigError(f"env.file: {file} is not valid YAML", why) from error
    table = document if isinstance(document, dict) else {}
    packages, variables = table.get("dependencies"), table.get("variables") or {}
    if not isinstance(packages, list) or not packages or not isinstance(variables, dict):
        raise ConfigError(f"env.file: {file} has no dependencies", _KEYS_ARE)
    strange = [str(key) for key in table if key not in _CONDA_KEYS and not str(key).startswith("x-")]
    for key in (*strange, *(key for key, times in Counter(_YAML_KEY.findall(text)).items() if times > 1)):
        raise ConfigError(f"env.file: {file}: unknown or repeated key {key!r}", _KEYS_ARE)
    named = [one for one in packages if isinstance(one, str)]
    below = [one.get("pip") or [] for one in packages if isinstance(one, dict) and list(one) == ["pip"]]
    pip = _collected("\n".join(str(line) for lines in below for line in lines), file)
    if len(named) + len(below) < len(packages) or str in map(type, below) or pip.constraints:
        why = "a package is a text, as 'numpy=1.26'; below '- pip:' is a list of texts, without constraints"
        raise ConfigError(f"env.file: {file}: dependencies that conda does not take", why)
    for one in (*named, *(f"./{folder}" for folder in filter(is_folder_here, pip.indexes.find_links))):
        _check(one, str(file))
    asked = {key: [_filled(str(one)) for one in table.get(key) or ()] for key in ("channels", "platforms")}
    found: Table = {key: values for key, values in asked.items() if values}
    found["dependencies"] = [*named, {"pip": pip.lines}] if pip.lines else named
    return Requirements(
        conda=msgspec.json.encode(found).decode(),
        variables={str(name): str(value) for name, value in variables.items()},
        indexes=pip.indexes,
        projects=pip.projects,
    )
