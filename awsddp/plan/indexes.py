"""Where packages come from: what [env], a project's file and this machine's pip say of it, in that order."""

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
"""A URL with a password that is written out, not the name of a variable."""
OPTION = re.compile(
    r"(-i|--index-url|--extra-index-url|-f|--find-links|--no-index|--pre|--prefer-binary|--trusted-host)\b"
    r"[= ]*(.*)"
)
"""A line of a requirements file that tells pip where packages are found, and which."""
_ASK_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Indexes:
    """Where packages are found; without anything: on PyPI.

    URLs may hold credentials. `find_links` are URLs and folders: a relative one is this machine's
    (`is_folder_here`), an absolute one that of whoever installs.
    `pre` admits releases before the final one; `ca` is the text of the certificates that the hosts show.
    """

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    no_index: bool = False
    pre: bool = False
    prefer_binary: bool = False
    ca: str = ""

    def otherwise(self, other: "Indexes") -> "Indexes":
        """Return these, filled up with those of `other`, which decide nothing that these decide."""

        def both(name: str) -> tuple[str, ...]:
            return tuple(dict.fromkeys((*getattr(self, name), *getattr(other, name))))

        return Indexes(
            index_url=self.index_url or other.index_url,
            extra_index_urls=both("extra_index_urls"),
            find_links=both("find_links"),
            trusted_hosts=both("trusted_hosts"),
            no_index=self.no_index or (other.no_index and not self.index_url),
            pre=self.pre or other.pre,
            prefer_binary=self.prefer_binary or other.prefer_binary,
            ca=self.ca or other.ca,
        )

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which pip, uv and conda's pip find packages so: no password in an argv.

        The certificates are a file of each machine: they are not among them, and uv has no variable for
        `no_index`. uv, as pip, takes the best release of all indexes, and the machine's own certificates
        (https://docs.astral.sh/uv/pip/compatibility/).
        """
        extra, links = " ".join(self.extra_index_urls), self.find_links
        found = {
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
        return {name: value for name, value in found.items() if value}


def is_folder_here(place: str) -> bool:
    """Tell whether a place of `find_links` is a folder of this machine, relative to the current one."""
    return "://" not in place and not Path(place).is_absolute()


def of_option(name: str, value: str, folder: Path) -> Indexes:
    """Return what an option of a requirements file in `folder` says, by its name (OPTION) and its value."""
    key = {"i": "index-url", "f": "find-links"}.get(name.lstrip("-"), name.lstrip("-"))
    if key == "find-links" and is_folder_here(value) and (folder / value).is_dir():
        value = os.path.relpath(folder / value)
    return _said({key: value or "true"})


def indexes_here() -> Indexes:
    """Return what this machine's pip is set to, by its files and its variables; it takes half a second.

    Nothing where pip does not answer, or names certificates that cannot be read.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S)
        told = dict(re.findall(r"^(\S+?)=(['\"].*)$", done.stdout.decode(errors="replace"), re.MULTILINE))
        last: dict[str, str] = {}
        for of in ("global.", "install.", ":env:."):  # the later one counts
            last |= {key.removeprefix(of): ast.literal_eval(told[key]) for key in told if key.startswith(of)}
        ca = Path(last["cert"]).read_text(encoding="ascii") if last.get("cert") else ""
    except (OSError, ValueError, SyntaxError, subprocess.TimeoutExpired):
        return Indexes()
    found = _said(last)
    folders = (os.path.relpath(one) if Path(one).is_dir() else one for one in found.find_links)
    return replace(found, ca=ca, find_links=tuple(folders))


def _said(by_key: Mapping[str, str]) -> Indexes:
    """Return what pip's own keys say, each with its value as pip writes it."""
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
