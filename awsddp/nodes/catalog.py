"""What nodes may ask the mirror for, and by which names.

A node knows a host by a name of our own below `awsddp.invalid` (RFC 6761), and a file that an index page
names by a link that this machine has signed. The user's configuration, or a table of ours, grants all.
"""

import base64
import hashlib
import hmac
import json
import re
import secrets
from pathlib import Path
from urllib.parse import unquote, urlsplit

from awsddp.nodes.upstream import Grant, Kind, RefusedError, origin, place_of, without_login

_HOST = "awsddp.invalid"
FILES = f"files.{_HOST}"
"""The host name of signed links."""
METADATA = ".metadata"
"""What is appended to the URL of a wheel for its metadata (PEP 658)."""
_CONDA = "https://conda.anaconda.org"
_DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")
_URL = re.compile(r"https?://[^\s\"'<>#;,\\]+")
_SOURCE = re.compile(rf"(?P<git>git\+)?(?P<url>{_URL.pattern})")
_REVISION = re.compile(r"(?P<url>https?://[^/]+/.+?)(?P<revision>@[^@]*)?")
_LOGIN = re.compile(r"https?://([^/@\s]+)@")
_LINK = re.compile(rf"http://{re.escape(FILES)}/[0-9a-f]+/([\w-]+)/[^\s\"'<>)]*")
_CHANNEL = re.compile(r"^(\S+?)::|\[.*\bchannel=['\"]?([^,'\"\]]+)")
"""The channel of a package of an environment.yml: conda-forge::numpy, numpy[channel=conda-forge]."""


class Catalog:
    """The grants of one installation.

    `everything` that nodes fetch is granted, or only folders of this machine and what has a login. `key`
    signs links: with the same one a file has the same URL next time, and a node may have it in its cache.
    """

    def __init__(self, *, everything: bool, key: bytes) -> None:
        self.everything = everything
        self.grants: list[Grant] = []
        self.origins: dict[str, str] = {}
        self._key = key

    @property
    def names(self) -> tuple[str, ...]:
        """The host names by which nodes know the mirror."""
        return (FILES, *self.origins) if self.grants else ()

    def name(self, url: str) -> str:
        """Return how a node names a URL, which is granted or not."""
        of = origin(url)
        host = f"{hashlib.sha256(of.encode()).hexdigest()[:12]}.{_HOST}"
        parts = urlsplit(url)
        self.origins[host] = f"{parts.scheme}://{parts.netloc}"
        return f"http://{host}{parts.path}" + (f"?{parts.query}" if parts.query else "")

    def grant(self, kind: Kind, url: str) -> str:
        """Grant a URL, which may hold a login, and return how a node names it. Raises ValueError."""
        plain, login = without_login(url), _LOGIN.match(url)
        one = Grant(kind, plain.rstrip("/") if kind == "git" else plain, login[1] if login else "")
        if one not in self.grants:
            self.grants.append(one)
        return self.link(plain, is_named=True) if kind == "file" else self.name(plain)

    def show(self, place: str, kind: Kind) -> str:
        """Return how a node names a URL or a folder, which is granted: by a name of our own, or as it is."""
        if not (is_here(place) or _LOGIN.match(place) or (self.everything and _URL.fullmatch(place))):
            return place
        if _URL.match(place):
            # whoever installs says what is wrong with a malformed one
            return self.grant(kind, place) if place_of(place) else place
        path = Path(unquote(urlsplit(place).path) if place.startswith("file:") else place).resolve()
        return self.grant(kind, path.as_uri() + "/" * path.is_dir())

    def show_index(self, place: str) -> str:
        """Return how a node names an index."""
        return self.show(place, "index")

    def show_links(self, place: str) -> str:
        """Return how a node names a page, or a folder, of links."""
        return self.show(place, "page")

    def show_line(self, line: str) -> str:
        """Return a requirement as a node gets it: with the name of its URL, and its revision as it is."""

        def shown(found: re.Match[str]) -> str:
            repository = _REVISION.fullmatch(found["url"]) if found["git"] else None
            if repository is None:
                return self.show(found["url"], "file")
            return f"git+{self.show(repository['url'], 'git')}{repository['revision'] or ''}"

        return _SOURCE.sub(shown, line)

    def show_conda(self, text: str) -> str:
        """Return an environment.yml as a node gets it; its channels are granted."""
        document = json.loads(text)
        if channels := document.get("channels"):
            document["channels"] = [self.show_channel(one) for one in channels]
        document["dependencies"] = [self._show_package(one) for one in document["dependencies"]]
        return json.dumps(document)

    def _show_package(self, package: str | dict[str, list[str]]) -> str | dict[str, list[str]]:
        """Return a package of conda, or a list of those of pip, as a node gets it."""
        if isinstance(package, dict):
            return {"pip": [self.show_line(line) for line in package["pip"]]}
        found = _CHANNEL.search(package)
        channel = (found[1] or found[2]) if found else ""
        return package.replace(channel, self.show_channel(channel), 1) if channel else package

    def show_channel(self, channel: str) -> str:
        """Return a channel as a node gets it: conda finds one without a URL by `conda_environ`."""
        if _URL.match(channel):
            return self.show(channel, "tree")
        if self.everything and re.match(r"\w", channel):
            for url in _DEFAULTS if channel == "defaults" else [f"{_CONDA}/{channel}"]:
                self.grant("tree", url)
        return channel

    def conda_environ(self) -> dict[str, str]:
        """Return the variables by which conda finds the channels of no URL."""
        for channel in ("conda-forge", "defaults"):
            self.show_channel(channel)
        defaults = ",".join(self.name(url) for url in _DEFAULTS)
        return {"CONDA_CHANNEL_ALIAS": self.name(_CONDA), "CONDA_DEFAULT_CHANNELS": defaults}

    def real_names(self, text: str) -> str:
        """Return a text with the real names of indexes and files."""
        text = _LINK.sub(lambda shown: _decode(shown[1])[1:], text)
        for host, real in self.origins.items():
            text = text.replace(f"http://{host}", real)
        return text

    def link(self, url: str, *, is_named: bool) -> str:
        """Return a link that this machine signs; `is_named`: its host may have a private address."""
        told = ("+" if is_named else "-") + url
        text = base64.urlsafe_b64encode(told.encode()).decode().rstrip("=")
        return f"http://{FILES}/{self._sign(text)}/{text}/{urlsplit(url).path.rpartition('/')[2]}"

    def read_link(self, path: str) -> tuple[str, bool]:
        """Return the URL of a link that was signed, and whether its host is named. Raises RefusedError."""
        _, signature, text, name, *_ = [*path.split("/"), "", "", "", ""]
        if not hmac.compare_digest(signature.encode(), self._sign(text).encode()):
            raise RefusedError(FILES, "no page has this link")
        told = _decode(text)
        return told[1:] + METADATA * name.endswith(METADATA), told.startswith("+")

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()[:32]


def is_here(place: str) -> bool:
    """Tell whether an index or a place of links is a folder or a file of this machine."""
    path = Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place)
    return bool(place) and path.exists()


def urls_in(text: str) -> list[str]:
    """Return the URLs of a text that name a host."""
    return list(filter(place_of, _URL.findall(text)))


def signing_key(folder: Path) -> bytes:
    """Return the key that signs links, which is kept in a folder of this machine."""
    file = folder / "mirror.key"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not file.exists():
        file.touch(mode=0o600)
        file.write_bytes(secrets.token_bytes(32))
    return file.read_bytes()


def _decode(text: str) -> str:
    """Return the text of a link, "" for none."""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        return ""
