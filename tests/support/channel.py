"""A conda channel as conda lays it out: packages as archives and their index, served over HTTP."""

import functools
import hashlib
import http.server
import io
import json
import platform
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

VERSION = platform.python_version()
SUBDIR = {"x86_64": "linux-64"}.get(platform.machine(), f"linux-{platform.machine()}")
MINOR = ".".join(VERSION.split(".")[:2])
_NO_BYTES = hashlib.sha256(b"").hexdigest()


def write_package(
    channel: Path,
    name: str,
    version: str = "1.0",
    *,
    build: str = "0",
    depends: Sequence[str] = (),
    noarch: bool = False,
    files: Mapping[str, str] = {},
    links: Mapping[str, str] = {},
) -> None:
    """Write a package of `files`, by path, and of symbolic links. A `noarch` package is pure Python."""
    subdir = "noarch" if noarch else SUBDIR
    index = {"name": name, "version": version, "build": build, "build_number": 0, "subdir": subdir}
    index |= {"depends": list(depends), "license": "MIT", "timestamp": 1_700_000_000_000}
    paths = [
        {
            "_path": path,
            "path_type": "hardlink",
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "size_in_bytes": len(text.encode()),
        }
        for path, text in files.items()
    ]
    paths += [
        {"_path": path, "path_type": "softlink", "sha256": _NO_BYTES, "size_in_bytes": 0} for path in links
    ]
    info = {
        "info/paths.json": json.dumps({"paths": paths, "paths_version": 1}),
        "info/files": "".join(f"{path}\n" for path in (*files, *links)),
    }
    if noarch:
        index["noarch"] = "python"
        link = {"noarch": {"type": "python"}, "package_metadata_version": 1}
        info["info/link.json"] = json.dumps(link)
    info["info/index.json"] = json.dumps(index)
    for folder in (channel / "noarch", channel / SUBDIR):
        folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(channel / subdir / f"{name}-{version}-{build}.tar.bz2", "w:bz2") as archive:
        for path, text in (info | dict(files)).items():
            member = tarfile.TarInfo(path)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
        for path, target in links.items():
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)


def module(version: str, *, noarch: bool = False, name: str) -> dict[str, str]:
    """Return the files of a package whose one module holds its version."""
    folder = "" if noarch else f"lib/python{MINOR}/"
    return {f"{folder}site-packages/{name}.py": f"VERSION = {version!r}\n"}


def make_channel(folder: Path, *, base: Path | None = None, pip_folder: Path | None = None) -> None:
    """Fill `folder` with packages, as conda-forge has them.

    Python and pip are those of this process, or those at the paths `base` and `own_pip` of a node.
    """
    import pip

    base, pip_folder = base or Path(sys.executable).resolve(), pip_folder or Path(pip.__file__).parent
    for version in (VERSION, "3.7.12"):
        config = f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {version}\n"
        write_package(
            folder,
            "python",
            version,
            build="h0_cpython",
            files={"pyvenv.cfg": config},
            links={"bin/python": str(base)},
        )
    pip_links = {"site-packages/pip": str(pip_folder)}
    write_package(folder, "pip", pip.__version__, noarch=True, depends=("python >=3.7",), links=pip_links)
    for version in ("1.24.4", "1.26.4", "2.1.0"):
        write_package(
            folder,
            "numpy",
            version,
            build=f"py{MINOR.replace('.', '')}h64a7726_0",
            depends=(f"python >={MINOR},<{MINOR}.9999",),
            files=module(version, name="numpy"),
        )
    for name, depends in {"tqdm": ("colorama", "python"), "colorama": ("python",)}.items():
        files = module("4.66", name=name, noarch=True)
        write_package(folder, name, "4.66", build="pyhd8ed1ab_0", noarch=True, depends=depends, files=files)
    write_package(folder, "greedy", depends=("numpy >=9",))
    write_package(folder, "library", files={"lib/library.so": ""})
    write_index(folder)


def write_index(channel: Path) -> None:
    """Write the repodata.json of each subdir, from the metadata in its archives."""
    for subdir in ("noarch", SUBDIR):
        _write_index(channel / subdir)


def _write_index(folder: Path) -> None:
    packages = {}
    for path in sorted(folder.glob("*.tar.bz2")):
        data = path.read_bytes()
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            index = archive.extractfile("info/index.json")
            assert index is not None
            packages[path.name] = json.loads(index.read()) | {
                "md5": hashlib.md5(data).hexdigest(),
                "sha256": hashlib.sha256(data).hexdigest(),
                "size": len(data),
            }
    repodata = {"info": {"subdir": folder.name}, "packages": packages, "packages.conda": {}}
    (folder / "repodata.json").write_text(json.dumps(repodata | {"removed": [], "repodata_version": 1}))


@contextmanager
def serve_channels(folder: Path) -> Iterator[str]:
    """Serve a folder of channels and yield its URL."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
