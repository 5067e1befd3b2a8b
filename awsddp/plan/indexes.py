"""Read package indexes from [env], a project's file and this machine's pip configuration, in that order."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

CREDENTIALS = re.compile(r"//[^/@\s]+@")
LOGIN = re.compile(r"https?://[^/@\s:]+:(?!\$\{)[^/@\s]+@")
"""A URL that contains the password itself instead of the name of a variable that has it."""
OPTION = re.compile(
    r"(-i|--index-url|--extra-index-url|-f|--find-links|--no-index|--pre|--prefer-binary|--trusted-host)\b"
    r"[= ]*(.*)"
)
"""A line in a requirements file that sets a pip option about indexes."""
_PIP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Indexes:
    """The package indexes; the default is PyPI.

    URLs may contain credentials. `find_links` are URLs and folders: a relative folder is on this machine
    (`is_local_folder`), and an absolute folder is on the machine that installs the packages. `pre` allows
    pre-releases; `ca` has the hosts' CA certificates as PEM text.
    """

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    no_index: bool = False
    pre: bool = False
    prefer_binary: bool = False
    ca: str = ""

    def with_defaults(self, other: "Indexes") -> "Indexes":
        """Return these indexes with the lists in `other` appended; other settings that are missing come from
        `other`.
        """

        def merged(name: str) -> tuple[str, ...]:
            return tuple(dict.fromkeys((*getattr(self, name), *getattr(other, name))))

        return Indexes(
            index_url=self.index_url or other.index_url,
            extra_index_urls=merged("extra_index_urls"),
            find_links=merged("find_links"),
            trusted_hosts=merged("trusted_hosts"),
            no_index=self.no_index or (other.no_index and not self.index_url),
            pre=self.pre or other.pre,
            prefer_binary=self.prefer_binary or other.prefer_binary,
            ca=self.ca or other.ca,
        )

    @property
    def environ(self) -> dict[str, str]:
        """The indexes as environment variables for pip, uv and conda's pip, to keep passwords off command
        lines.

        `ca` is left out, since each machine has its own file with the certificates. `no_index` is set only
        for pip, since uv has no variable for it. uv is set to behave like pip: it uses the best release of
        all indexes and the machine's own certificates (https://docs.astral.sh/uv/pip/compatibility/).
        """
        extra, links = " ".join(self.extra_index_urls), self.find_links
        variables = {
            "PIP_INDEX_URL": self.index_url,
            "PIP_EXTRA_INDEX_URL": extra,
            "PIP_FIND_LINKS": " ".join(links),
            "PIP_TRUSTED_HOST": " ".join(self.trusted_hosts),
            "PIP_NO_INDEX": "1" * self.no_index,
            "PIP_PRE": "1" * self.pre,
            "PIP_PREFER_BINARY": "1" * self.prefer_binary,
            "UV_DEFAULT_INDEX": self.index_url,
            "UV_INDEX": extra,
            "UV_FIND_LINKS": ",".join(links),
            "UV_INSECURE_HOST": " ".join(self.trusted_hosts),
            "UV_PRERELEASE": "allow" * self.pre,
            "UV_INDEX_STRATEGY": "unsafe-best-match",
            "UV_SYSTEM_CERTS": "1",
            "UV_NATIVE_TLS": "1",
        }
        return {name: value for name, value in variables.items() if value}


def is_local_folder(location: str) -> bool:
    """Return True if an item in `find_links` is a folder on this machine, relative to the current folder."""
    return "://" not in location and not Path(location).is_absolute()


def parse_option(name: str, value: str, folder: Path) -> Indexes:
    """Return the indexes that an option (OPTION) sets in a requirements file in `folder`."""
    key = {"i": "index-url", "f": "find-links"}.get(name.lstrip("-"), name.lstrip("-"))
    if key == "find-links" and is_local_folder(value) and (folder / value).is_dir():
        value = os.path.relpath(folder / value)
    return _parse({key: value or "true"})


def read_pip_indexes() -> Indexes:
    """Return the indexes that this machine's pip configuration sets; the call takes half a second.

    Returns the default indexes if pip fails or its certificates cannot be read.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PIP_TIMEOUT_S
        )
        settings = dict(
            re.findall(r"^(\S+?)=(['\"].*)$", process.stdout.decode(errors="replace"), re.MULTILINE)
        )
        last: dict[str, str] = {}
        for section in ("global.", "install.", ":env:."):  # a later one takes precedence
            keys = [key for key in settings if key.startswith(section)]
            last |= {key.removeprefix(section): ast.literal_eval(settings[key]) for key in keys}
        ca = Path(last["cert"]).read_text(encoding="ascii") if last.get("cert") else ""
    except (OSError, ValueError, SyntaxError, subprocess.TimeoutExpired):
        return Indexes()
    indexes = _parse(last)
    folders = (os.path.relpath(link) if Path(link).is_dir() else link for link in indexes.find_links)
    return replace(indexes, ca=ca, find_links=tuple(folders))


def _parse(by_key: Mapping[str, str]) -> Indexes:
    """Return the indexes that pip's configuration sets; `by_key` maps each key to its value, as pip prints
    it.
    """
    values = {key: value.split() for key, value in by_key.items()}
    on = {key for key, value in by_key.items() if value.lower() in ("1", "yes", "true", "on")}
    return Indexes(
        index_url=by_key.get("index-url", ""),
        extra_index_urls=tuple(values.get("extra-index-url", ())),
        find_links=tuple(values.get("find-links", ())),
        trusted_hosts=tuple(values.get("trusted-host", ())),
        no_index="no-index" in on,
        pre="pre" in on,
        prefer_binary="prefer-binary" in on,
    )
