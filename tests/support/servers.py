"""Sources of packages: indexes, with a password or TLS; a proxy that records requests; git repositories."""

import base64
import datetime
import functools
import http.server
import ipaddress
import os
import re
import select
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

PASSWORD = "canary-7f3a"
BUILT_BY = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'


@dataclass
class Served:
    """A server: its port and its requests, all and those of pip, as "GET /path"."""

    port: int = 0
    requests: list[str] = field(default_factory=list)
    pip_requests: list[str] = field(default_factory=list)
    is_held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def _running(
    handler: Callable[..., http.server.BaseHTTPRequestHandler], served: Served, tls: Path | None = None
) -> Iterator[Served]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.daemon_threads = True
        served.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield served
        finally:
            served.release.set()
            server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    served: Served

    def log_message(self, *args: object) -> None:
        self.served.requests.append(f"{self.command} {self.path}")
        if getattr(self, "headers", {}).get("User-Agent", "").startswith("pip/"):
            self.served.pip_requests.append(f"{self.command} {self.path}")


@contextmanager
def serve_folder(folder: Path, *, tls: Path | None = None) -> Iterator[Served]:
    """Serve a folder; over TLS if there is a certificate."""
    handler = type("Folder", (_Quiet,), {"served": Served()})
    with _running(functools.partial(handler, directory=str(folder)), handler.served, tls) as served:
        yield served


@dataclass
class Reply:
    """A response; names of headers are sent in lower case, as HTTP/2 gateways do."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


def page(*urls: str, base: str = "") -> Reply:
    """Return an index page with links."""
    text = "".join(f'<a data-requires-python="&gt;=3.8" href="{url}">x</a>' for url in urls)
    return Reply(
        (f'<base href="{base}">' * bool(base) + text).encode(), headers={"content-type": "text/html"}
    )


@contextmanager
def serve_replies(replies: Mapping[str, Reply]) -> Iterator[Served]:
    """Serve replies by path, 404 for others; each request is recorded with its login."""

    class Replies(_Quiet):
        served = Served()

        def do_GET(self) -> None:
            reply = replies.get(self.path, Reply(status=404))
            self.send_response_only(reply.status)
            for name, value in {"content-length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)
            login = self.headers.get("Authorization", "").removeprefix("Basic ")
            words = (self.command, self.path, base64.b64decode(login).decode())
            self.served.requests.append(" ".join(filter(None, words)))

        do_HEAD = do_POST = do_GET

    with _running(Replies, Replies.served) as served:
        yield served


@contextmanager
def serve_git(folder: Path, *, password: str = "") -> Iterator[Served]:
    """Serve the repositories of a folder by `git http-backend`; "reader" may also push, with the password."""
    expected = "Basic " + base64.b64encode(f"reader:{password}".encode()).decode()

    class Git(_Quiet):
        served = Served()

        def do_GET(self) -> None:
            self.served.requests.append(f"{self.command} {self.path}")
            if password and self.headers.get("Authorization") != expected:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            path, _, query = self.path.partition("?")
            environ = {
                **os.environ,
                "GIT_PROJECT_ROOT": str(folder),
                "GIT_HTTP_EXPORT_ALL": "1",
                "REMOTE_USER": "reader",
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            }
            size = int(self.headers.get("Content-Length", 0))
            done = subprocess.run(
                ["git", "http-backend"], input=self.rfile.read(size), env=environ, stdout=subprocess.PIPE
            )
            head, _, body = done.stdout.partition(b"\r\n\r\n")
            status = re.search(rb"Status: (\d+)", head)
            self.send_response(int(status[1]) if status else 200)
            for line in head.decode().splitlines():
                self.send_header(*line.split(": ", 1))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    with _running(Git, Git.served) as served:
        yield served


@contextmanager
def serve_index(wheels: Path, *, files: str = "", password: str = "", hold: str = "") -> Iterator[Served]:
    """Serve wheels as a simple index below /simple/.

    Its pages link to wheels below `files`, or on this server. It requires `password` of the user "reader". A
    request of pip for a path that contains `hold` waits until `release` is set.
    """

    class Index(_Quiet):
        served = Served()

        def do_GET(self) -> None:
            expected = base64.b64encode(f"reader:{password}".encode()).decode()
            if password and self.headers.get("Authorization") != f"Basic {expected}":
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="index"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if hold and hold in self.path and self.headers["User-Agent"].startswith("pip"):
                self.served.is_held.set()
                self.served.release.wait(60)
            name = self.path.rstrip("/").rpartition("/")[2].replace("-", "_")
            if self.path.startswith("/simple/"):
                names = [
                    path.name for path in sorted(wheels.iterdir()) if path.name.lower().startswith(f"{name}-")
                ]
                if not names:
                    self.send_error(404)
                    return
                body = "".join(f'<a href="{files or "/files"}/{row}">{row}</a>\n' for row in names).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)
                return
            self.path = self.path.removeprefix("/files")
            super().do_GET()

        do_HEAD = do_GET

    with _running(functools.partial(Index, directory=str(wheels)), Index.served) as served:
        yield served


@contextmanager
def serve_proxy(*, password: str = "") -> Iterator[Served]:
    """Run a proxy, which requires `password` of the user "staff"."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        served = Served()

        def do_CONNECT(self) -> None:
            host, _, port = self.path.rpartition(":")
            self._through(host, int(port), b"")

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            words = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
            path = url.path + (f"?{url.query}" if url.query else "")
            line = f"{self.command} {path} HTTP/1.0\r\n{words}\r\n"
            size = int(self.headers.get("Content-Length", 0))
            self._through(str(url.hostname), url.port or 80, line.encode() + self.rfile.read(size))

        do_HEAD = do_POST = do_GET

        def _through(self, host: str, port: int, first: bytes) -> None:
            self.served.requests.append(f"{self.command} {self.path}")
            expected = base64.b64encode(f"staff:{password}".encode()).decode()
            if password and self.headers.get("Proxy-Authorization") != f"Basic {expected}":
                self.send_response(407)
                self.send_header("Proxy-Authenticate", 'Basic realm="proxy"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.close_connection = True
            with socket.create_connection((host, port)) as upstream:
                if first:
                    upstream.sendall(first)
                else:
                    self.send_response(200)
                    self.end_headers()
                while True:
                    for end in select.select([self.connection, upstream], [], [])[0]:
                        data = end.recv(65536)
                        if not data:
                            return
                        (upstream if end is self.connection else self.connection).sendall(data)

        def log_message(self, *args: object) -> None:
            pass

    with _running(Proxy, Proxy.served) as served:
        yield served


def make_certificate(folder: Path) -> Path:
    """Write a self-signed certificate of "localhost" and its key into one file; return the file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "certificate.pem"
    file.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return file


def certificate_only(file: Path) -> str:
    """Return the certificate of a file, without its key."""
    return file.read_text().partition("-----BEGIN PRIVATE")[0]


def make_repository(folder: Path, name: str, files: Mapping[str, str] = {}) -> Path:
    """Make a bare git repository of a package, with more files; return its folder."""
    tree, bare = folder / "tree", folder / f"{name}.git"
    tree.mkdir(parents=True)
    (tree / "setup.py").write_text(f"from setuptools import setup\nsetup(py_modules=[{name!r}])\n")
    (tree / "pyproject.toml").write_text(f"{BUILT_BY}[project]\nname = {name!r}\nversion = '1.0'\n")
    (tree / f"{name}.py").write_text("VERSION = '1.0 of git'\n")
    for path, text in files.items():
        (tree / path).write_text(text)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "one")):
        subprocess.run(["git", "-C", tree, *words], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", tree, bare], check=True)
    subprocess.run(["git", "-C", bare, "update-server-info"], check=True)
    subprocess.run(["git", "-C", bare, "config", "uploadpack.allowFilter", "true"], check=True)
    shutil.rmtree(tree)
    return bare
