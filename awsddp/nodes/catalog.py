"""The URLs that nodes may request from the package mirror, and the host names that replace the URLs' hosts.

Each granted host has a generated name under `awsddp.invalid` (RFC 6761). If an index page links to a file,
nodes request the file with a link that this machine signed. All grants come from the user's configuration or
from the constants in this file.
"""

import base64
import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

from awsddp.nodes.upstream import Grant, Kind, RefusedError, host_port, origin, strip_login

_HOST = "awsddp.invalid"
FILES_HOST = f"files.{_HOST}"
"""The host name in signed links."""
METADATA_SUFFIX = ".metadata"
"""A wheel's URL with this suffix is the URL of the wheel's metadata (PEP 658)."""
_CONDA = "https://conda.anaconda.org"
_DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")
_URL = re.compile(r"https?://[^\s\"'<>#;,\\]+")
_SOURCE = re.compile(rf"(?P<git>git\+)?(?P<url>{_URL.pattern})")
_REVISION = re.compile(r"(?P<url>https?://[^/]+/.+?)(?P<revision>@[^@]*)?")
_LOGIN = re.compile(r"https?://([^/@\s]+)@")
_LINK = re.compile(rf"http://{re.escape(FILES_HOST)}/[0-9a-f]+/([\w-]+)/[^\s\"'<>)]*")
_CHANNEL = re.compile(r"^(\S+?)::|\[.*\bchannel=['\"]?([^,'\"\]]+)")
"""Matches a package's channel in environment.yml, as in conda-forge::numpy or numpy[channel=conda-forge]."""


class Catalog:
    """The grants for one installation. If `everything` is set, all of the nodes' downloads are granted.
    Otherwise only local folders and URLs with a login are granted. `key` signs links. The key does not
    change, so that a file keeps its URL and nodes can cache the file.
    """

    def __init__(self, *, everything: bool, key: bytes) -> None:
        self.everything = everything
        self.grants: list[Grant] = []
        self.origins: dict[str, str] = {}
        self._key = key

    @property
    def host_names(self) -> tuple[str, ...]:
        """The host names in the URLs that nodes request from the mirror."""
        return (FILES_HOST, *self.origins) if self.grants else ()

    def rewrite_url(self, url: str) -> str:
        """Return the URL that a node requests in place of `url`, without granting it."""
        host = f"{hashlib.sha256(origin(url).encode()).hexdigest()[:12]}.{_HOST}"
        parts = urlsplit(url)
        self.origins[host] = f"{parts.scheme}://{parts.netloc}"
        return f"http://{host}{parts.path}" + (f"?{parts.query}" if parts.query else "")

    def grant(self, kind: Kind, url: str) -> str:
        """Grant a URL, which may contain a login, and return the URL for nodes. Raises ValueError."""
        plain, login = strip_login(url), _LOGIN.match(url)
        grant = Grant(kind, plain.rstrip("/") if kind == "git" else plain, login[1] if login else "")
        if grant not in self.grants:
            self.grants.append(grant)
        return self.sign_link(plain, is_named=True) if kind == "file" else self.rewrite_url(plain)

    def rewrite_location(self, location: str, kind: Kind) -> str:
        """Grant `location` and return its URL for nodes, or `location` itself if the mirror does not serve
        it."""
        is_served = _LOGIN.match(location) or (self.everything and _URL.fullmatch(location))
        if not (is_served and host_port(location)) and not exists_locally(location):
            return location
        if _URL.match(location):
            return self.grant(kind, location)
        path = Path(unquote(urlsplit(location).path) if location.startswith("file:") else location).resolve()
        return self.grant(kind, path.as_uri() + "/" * path.is_dir())

    def rewrite_index(self, location: str) -> str:
        """Grant a package index, and return the result of `rewrite_location`."""
        return self.rewrite_location(location, "index")

    def rewrite_links_page(self, location: str) -> str:
        """Grant a page or a folder with links, and return the result of `rewrite_location`."""
        return self.rewrite_location(location, "page")

    def rewrite_requirement(self, line: str) -> str:
        """Return a requirement with its URL, but not its revision, rewritten for nodes."""

        def rewrite(match: re.Match[str]) -> str:
            repository = _REVISION.fullmatch(match["url"]) if match["git"] else None
            if repository is None:
                return self.rewrite_location(match["url"], "file")
            return f"git+{self.rewrite_location(repository['url'], 'git')}{repository['revision'] or ''}"

        return _SOURCE.sub(rewrite, line)

    def rewrite_conda_file(self, text: str) -> str:
        """Return an environment.yml with its channels and URLs rewritten for nodes."""
        document = json.loads(text)
        if channels := document.get("channels"):
            document["channels"] = [self.rewrite_channel(channel) for channel in channels]
        document["dependencies"] = [self._rewrite_package(package) for package in document["dependencies"]]
        return json.dumps(document)

    def _rewrite_package(self, package: str | dict[str, list[str]]) -> str | dict[str, list[str]]:
        """Return a conda package, or a list of pip packages, with URLs rewritten for nodes."""
        if isinstance(package, dict):
            return {"pip": [self.rewrite_requirement(line) for line in package["pip"]]}
        match = _CHANNEL.search(package)
        channel = (match[1] or match[2]) if match else ""
        return package.replace(channel, self.rewrite_channel(channel), 1) if channel else package

    def rewrite_channel(self, channel: str) -> str:
        """Return a channel rewritten for nodes; `conda_environ` resolves channels that have no URL."""
        if _URL.match(channel):
            return self.rewrite_location(channel, "tree")
        if self.everything and re.match(r"\w", channel):
            for url in _DEFAULTS if channel == "defaults" else [f"{_CONDA}/{channel}"]:
                self.grant("tree", url)
        return channel

    def conda_environ(self) -> dict[str, str]:
        """Return the environment variables that conda uses to resolve channels that have no URL."""
        for channel in ("conda-forge", "defaults"):
            self.rewrite_channel(channel)
        defaults = ",".join(self.rewrite_url(url) for url in _DEFAULTS)
        return {"CONDA_CHANNEL_ALIAS": self.rewrite_url(_CONDA), "CONDA_DEFAULT_CHANNELS": defaults}

    def restore_urls(self, text: str) -> str:
        """Return `text` with the original URLs in place of the URLs for nodes."""
        text = _LINK.sub(lambda link: _decode(link[1])[1:], text)
        for host, original in self.origins.items():
            text = text.replace(f"http://{host}", original)
        return text

    def sign_link(self, url: str, *, is_named: bool) -> str:
        """Return a signed link to a URL. If `is_named` is set, the URL's host may have a private address."""
        payload = ("+" if is_named else "-") + url
        text = base64.urlsafe_b64encode(payload.encode()).decode().rstrip("=")
        return f"http://{FILES_HOST}/{self._sign(text)}/{text}/{urlsplit(url).path.rpartition('/')[2]}"

    def verify_link(self, path: str) -> tuple[str, bool]:
        """Return the URL and `is_named` from a signed link. Raises RefusedError."""
        _, signature, text, name, *_ = [*path.split("/"), "", "", "", ""]
        if not hmac.compare_digest(signature.encode(), self._sign(text).encode()):
            raise RefusedError(FILES_HOST, "no page has this link")
        payload = _decode(text)
        return payload[1:] + METADATA_SUFFIX * name.endswith(METADATA_SUFFIX), payload.startswith("+")

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()[:32]


def exists_locally(location: str) -> bool:
    """Return True if the location of an index or links page is a local folder or file."""
    path = Path(unquote(urlsplit(location).path)) if location.startswith("file:") else Path(location)
    return bool(location) and path.exists()


def find_urls(text: str) -> list[str]:
    """Return all URLs in `text` that have a host."""
    return list(filter(host_port, _URL.findall(text)))


def signing_key(folder: Path) -> bytes:
    """Return the key that signs links. If the key does not exist, it is created in `folder`."""
    file = folder / "mirror.key"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not file.exists():
        with tempfile.NamedTemporaryFile(dir=folder) as new, contextlib.suppress(FileExistsError):
            new.write(secrets.token_bytes(32))
            new.flush()
            os.link(new.name, file)  # this is atomic, and fails if another command was faster
    return file.read_bytes()


def _decode(text: str) -> str:
    """Return a decoded part of a link, or "" if the part is invalid."""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        return ""
