"""conda's environment.yml, read here: conda ignores a key that it does not know, and fails late."""

import difflib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from awsddp.errors import ConfigError
from awsddp.spec import VARIABLE

KEYS = ("name", "channels", "dependencies", "prefix", "variables", "platforms")
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
_KEY = re.compile(r"^[\"']?(\w+)[\"']?\s*:", re.M)


@dataclass(frozen=True, kw_only=True)
class CondaFile:
    """What conda is asked for. `pip` are requirements, which conda gives to pip; `variables` are set by
    `conda activate`, which no rank runs."""

    channels: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """The file that conda gets: each text in quotes, without the name and prefix of another machine."""
        lines: list[str] = []
        for key in ("channels", "platforms"):
            if values := getattr(self, key):
                lines += [f"{key}:", *(f"- {json.dumps(value)}" for value in values)]
        lines += ["dependencies:", *(f"- {json.dumps(one)}" for one in self.packages)]
        lines += ["- pip:", *(f"  - {json.dumps(one)}" for one in self.pip)] if self.pip else []
        return "\n".join(lines) + "\n"


def read_conda(text: str, file: Path) -> CondaFile:
    """Return what an environment.yml asks for. Raises ConfigError for what conda would not understand."""
    document = _document(_ELSEWHERE.sub("", text), file)
    for key in document:
        if key not in KEYS and not str(key).startswith("x-"):  # where YAML's anchors are kept
            raise _unknown_key(str(key), text, file)
    for key, times in Counter(_KEY.findall(text)).items():
        if times > 1:
            raise ConfigError(f"env.file: {file} has {key!r} {times} times", "YAML keeps the last one only")
    packages: list[str] = []
    pip: list[str] = []
    for one in _list(document, "dependencies", file):
        if isinstance(one, dict) and list(one) == ["pip"]:
            pip += _strings(one, "pip", file)
        else:
            packages.append(_spec(one, text, file))
    if not packages and not pip:
        raise ConfigError(f"env.file: {file} has no dependencies", "nothing would be installed")
    return CondaFile(
        channels=_strings(document, "channels", file),
        packages=tuple(packages),
        pip=tuple(pip),
        platforms=_strings(document, "platforms", file),
        variables=_variables(document.get("variables") or {}, file),
    )


def line_of(words: str, text: str, file: Path) -> str:
    """Return where a file has `words`, as "FILE, line 3"."""
    for number, line in enumerate(text.splitlines(), 1):
        if words and words in line.partition(" #")[0]:
            return f"{file}, line {number}"
    return str(file)


def _document(text: str, file: Path) -> dict[Any, Any]:
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
    raise ConfigError(
        f"env.file: {file} has no dependencies", f"an environment.yml has the keys {', '.join(KEYS)}"
    )


def _unknown_key(key: str, text: str, file: Path) -> ConfigError:
    near = difflib.get_close_matches(key, KEYS, 1)
    advice = f"did you mean {near[0]!r}?" if near else ""
    if key == "pip":
        advice = "write '- pip:' as the last line of dependencies, and the packages below it"
    return ConfigError(
        f"env.file: {line_of(key, text, file)}: unknown key {key!r}",
        f"an environment.yml has the keys {', '.join(KEYS)}",
        advice,
    )


def _list(table: dict[Any, Any], key: str, file: Path) -> list[Any]:
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


def _strings(table: dict[Any, Any], key: str, file: Path) -> tuple[str, ...]:
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
        place = line_of(f"{name}:", text, file)
        written = re.search(rf"-\s+{re.escape(name)}\s*:\s*([\w.*]+)", text)
        exact = written[1] if written else version
        raise ConfigError(
            f"env.file: {place}: {name!r} is a key, not a package",
            "a package is one text: its name, =, its version",
            f"write '- {name}={exact}'" if isinstance(version, str | int | float) else "",
        )
    words = one.strip() if isinstance(one, str) else str(one)
    if isinstance(one, str) and _PATH.match(words):
        raise not_on_a_node(words, line_of(words, text, file))
    if not isinstance(one, str) or not _SPEC.fullmatch(words):
        raise ConfigError(
            f"env.file: {line_of(words, text, file)}: {words!r} is not a conda package",
            "expected a name, optionally with a version: numpy, numpy=1.26, 'numpy>=1.24,<2', "
            "conda-forge::numpy",
            "what only pip understands (extras, markers, git+https://...) belongs below '- pip:'",
        )
    return words


def not_on_a_node(words: str, place: str) -> ConfigError:
    """Return the refusal of a path of this machine."""
    return ConfigError(
        f"env.file: {place}: {words!r} does not work on a node",
        "a node gets names, versions and URLs; the synced folder holds the project itself",
        "name a package, or put a wheel into a folder, and add a line for pip: --find-links FOLDER",
    )


def _variables(found: Any, file: Path) -> tuple[tuple[str, str], ...]:
    if not isinstance(found, dict):
        raise ConfigError(f"env.file: {file}: variables are not a table", "each is a line NAME: value")
    for name, value in found.items():
        if not VARIABLE.fullmatch(str(name)):
            raise ConfigError(f"env.file: {file}: variables: {name!r} is not the name of a variable", "")
        if isinstance(value, bool) or not isinstance(value, str | int | float):  # on, yes, true
            raise _not_text(f"variables: {name}: {value!r}", file)
    return tuple((str(name), str(value)) for name, value in found.items())
