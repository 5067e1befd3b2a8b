"""Copy data sets from S3 and Hugging Face to this node, until the files match the source's listing.

This module is a separate program that runs under the image's Python (storage/datasets.py sends it). The
program reads the request from stdin and prints lines of JSON: the progress, and finally the result or the
error.

~/awsddp/data/NAME         the data; ~/awsddp/data is a link if an instance store has enough space
~/awsddp/data/.NAME.json   the data's stamp: its source, and the size and ETag of each copied path
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import posixpath
import shutil
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.agent.file_tree import is_ephemeral, resolve_links, walk
from awsddp.agent.s3.store import PARTIAL_FOLDER, ObjectChanged, S3Object, S3Uri, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import BinaryIO

_MAX_LISTINGS = 3
"""How many times a bucket is listed if it changes while it is copied."""
_BATCH_FILES = 2000
_SENT_BY_CLIENT = "folder"
"""The source that the stamp names if a client sent the data."""
_DENIED = ("AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "ExpiredToken", "NoCredentialsError")
_CHANGED = "Changed"
_AGAIN = "awsddp train   # again: the copy continues"
_RIGHTS = "awsddp doctor --iam-policy nodes   # permissions for access.instance_profile: docs/data.md"
_ROLE = "awsddp down && awsddp up -o access.instance_profile=NAME   # gives nodes the permissions of a role"


class CopyError(Exception):
    """The error for data that cannot be copied, with the reason and the next step.

    `code` is the error code from S3, or _CHANGED.
    """

    def __init__(self, message: str, why: str = "", next_step: str = "", code: str = "") -> None:
        super().__init__(message)
        self.code = code
        shown = "".join(letter for letter in why[-2000:] if letter.isprintable() or letter == "\n")
        self.document: dict[str, Any] = {"failed": message, "why": shown.strip(), "next": next_step}
        if code == _CHANGED:
            self.document["changed"] = True


def main(stdin: BinaryIO) -> int:
    """Copy the data that the request on stdin names, and print the result. Returns 0, even after an error."""
    request = json.loads(stdin.read(int(stdin.readline())))
    sys.path.insert(0, request["packages"])
    progress = _Progress()
    try:
        result = (_copy_files if "place" in request else _copy_sources)(request, progress)
    except CopyError as refusal:
        result = refusal.document
    except ImportError as error:
        next_step = "awsddp exec -- python3 -m pip install boto3"
        result = {"lacks": True, **CopyError("its Python cannot read S3", str(error), next_step).document}
    except OSError as error:
        why, need = str(error), progress.total or request.get("bytes", 0)
        if error.errno == errno.ENOSPC and need:
            why += f"; the data to copy has {need / 1e9:.1f} GB"
        result = CopyError("data cannot be written", why, "awsddp exec -- df -h   # the free space").document
    progress.end()
    _print_json(**result)
    return 0


def _print_json(**document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


class _Progress:
    """Prints the progress every second, and ends this process and `child` if the client is gone.

    `child` is another program that downloads to the folder `filled`.
    """

    def __init__(self) -> None:
        self.total = self.copied = self.files = 0
        self.child: subprocess.Popen[bytes] | None = None
        self.filled: Path | None = None
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)
        self._thread.start()

    def add(self, count: int) -> None:
        """Add `count`, which can be negative, to the number of received bytes."""
        with self._lock:
            self.copied += count

    def end(self) -> None:
        """Stop printing."""
        self._over.set()
        self._thread.join()

    def _report(self) -> None:
        while not self._over.wait(1):
            copied, total, details = max(self.copied, 0) + sum(_file_sizes(self.filled)), self.total, {}
            text = f"copying data: {copied / 1e6:,.0f} MB" if copied else "looking at the data"
            if total:
                text = f"copying {total / 1e6:,.0f} MB of data"
                details = {"fraction": min(1.0, copied / total), "size": total}
            try:
                _print_json(at=text, **details)
            except OSError:
                if self.child is not None:
                    self.child.kill()
                os._exit(1)


def _store(request: Mapping[str, Any], *, unsigned: bool = False) -> Store:
    """Return the store for a request. Raises ImportError if boto3 is missing or too old in this Python."""
    payer = request.get("payer", False)
    return Store(region=request["region"], endpoint=request["endpoint"], payer=payer, unsigned=unsigned)


@contextlib.contextmanager
def _raise_refusals(uri: S3Uri) -> Iterator[None]:
    """Raise CopyError if S3 refuses a request or cannot be reached, or if an object has changed."""
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import RetriesExceededError

    try:
        yield
    except ObjectChanged as error:
        failure = f"{uri} changed while it was copied"
        raise CopyError(failure, f"{error} was replaced or deleted", _AGAIN, _CHANGED) from error
    except (BotoCoreError, ClientError, RetriesExceededError) as error:
        code = getattr(error, "response", {}).get("Error", {}).get("Code", type(error).__name__)
        failure, next_step = "cannot be read", _AGAIN
        if code in _DENIED:
            failure = "may not be read"
            next_step = _ROLE if code == "NoCredentialsError" else _RIGHTS
        elif code == "NoSuchBucket":
            next_step = "aws s3 ls   # your buckets"
        raise CopyError(f"{uri} {failure}", str(error), next_step, code) from error


def _copy_files(request: dict[str, Any], progress: _Progress) -> dict[str, Any]:
    """Replace the folder's content with the files that the request names.

    The client has checked the files' paths.

    Raises CopyError, OSError.
    """
    uri, folder = S3Uri(*request["place"]), Path(request["folder"])
    objects_by_path = {
        path: [S3Object(uri.key(key), *fields) for key, *fields in parts]
        for path, parts in request["files"].items()
    }
    shutil.rmtree(str(folder), ignore_errors=True)
    progress.total = sum(s3_object.size for objects in objects_by_path.values() for s3_object in objects)
    with _raise_refusals(uri), contextlib.closing(_store(request)) as store:
        store.download_files(uri, objects_by_path, folder, progress.add)
    return {"copied": len(objects_by_path), "bytes": progress.copied}


def _copy_sources(request: dict[str, Any], progress: _Progress) -> dict[str, Any]:
    """Copy all sources and return the result. Only one client copies at a time. Raises CopyError, OSError."""
    folder = Path(request["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_store = partial(_store, request)
    with folder.with_name("data.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        listings = {
            source["name"]: list_objects(S3Uri(source["at"], source["part"]), make_store)
            for source in request["sources"]
            if source["kind"] == "s3"
        }
        need = sum(s3_object.size for _, objects in listings.values() for s3_object in objects)
        _make_data_folder(folder, need + request["bytes"])
        for source in request["sources"]:
            top = folder / source["name"]
            _check_no_links(top, ())
            if source["kind"] == "s3":
                uri, listed = S3Uri(source["at"], source["part"]), listings[source["name"]]
                _update_folder(uri, listed, top, progress, make_store)
            elif source["kind"] == "hf":
                _download_hugging_face(source["at"], source["part"], top, request, progress)
            else:  # the client sends its folder itself
                stamp = Stamp(top)
                if stamp.source not in ("", _SENT_BY_CLIENT):
                    stamp.reset(_SENT_BY_CLIENT)
                stamp.source = _SENT_BY_CLIENT
                stamp.write()
    return {"copied": progress.files, "bytes": progress.copied}


def list_objects(
    uri: S3Uri, make_store: Callable[..., Store], *, most: int | None = None
) -> tuple[Store, list[S3Object]]:
    """Return a store that is allowed to list `uri`, and the objects at `uri` (at most `most`).

    `make_store` returns the store. If S3 refuses a signed request, the store sends unsigned requests, which
    public buckets allow. Raises CopyError.
    """
    first_refusal: CopyError | None = None
    for unsigned in (False, True):
        store = make_store(unsigned=unsigned)
        try:
            with _raise_refusals(uri):
                objects = list(itertools.islice(store.list(uri), most))
            break
        except CopyError as refusal:
            store.close()
            first_refusal = first_refusal or refusal
            if unsigned or refusal.code not in _DENIED:
                raise first_refusal from refusal
    if not objects:
        next_step = f"aws s3 ls s3://{uri.bucket}/   # lists the keys; a source ends before a /"
        raise CopyError(f"{uri} holds no objects", "", next_step)
    return store, objects


def map_paths(uri: S3Uri, objects: Iterable[S3Object]) -> dict[str, S3Object]:
    """Return {path under `uri`: object}. Raises CopyError for a key that cannot be a path.

    Keys that end with "/" represent folders, and are left out.
    """
    start = len(uri.key(""))
    objects_by_path = {
        s3_object.key[start:]: s3_object
        for s3_object in objects
        if s3_object.key[start:] and not s3_object.key.endswith("/")
    }
    folders = {"", "/"}
    for path in objects_by_path:
        while (path := posixpath.dirname(path)) not in folders:
            folders.add(path)
    for path, s3_object in objects_by_path.items():
        if why := _path_problem(path) or ("other keys use its name as a folder" if path in folders else ""):
            next_step = "rename the object, or choose a prefix that does not contain it"
            raise CopyError(f"{uri}: the key {s3_object.key[:200]!a} cannot be a file", why, next_step)
    return objects_by_path


def _path_problem(path: str) -> str:
    """Return the reason why a path is not allowed, or "" if it is allowed."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a part of the key is empty, '.' or '..'"
    if any(ord(letter) < 32 or 127 <= ord(letter) < 160 or 0xD800 <= ord(letter) < 0xE000 for letter in path):
        return "the key has control characters"
    if max(len(part.encode()) for part in parts) > 255 or len(path.encode()) > 3800:
        return "the key is too long for a file's path"
    return f"{PARTIAL_FOLDER} is in use" if parts[0] == PARTIAL_FOLDER else ""


def _make_data_folder(folder: Path, need: int) -> None:
    """Make the folder for all data, on the instance store with the most free space if `need` bytes fit there.

    If the folder is a link to an instance store that was emptied by a stop of the instance, the link's target
    is created again. Raises OSError.
    """
    if folder.is_symlink():
        _make_folder(Path(os.readlink(str(folder))))  # noqa: PTH115
    if folder.exists():
        return
    candidates = [(shutil.disk_usage(str(path)).free, path / "awsddp-data") for path in _instance_stores()]
    free, best = max(candidates, default=(-1, folder))
    if free < need:
        folder.mkdir()
        return
    _make_folder(best)
    folder.symlink_to(best)


def _instance_stores(mounts: Path = Path("/proc/self/mounts")) -> list[Path]:
    """Return the mount points of the instance stores."""
    mount_points = []
    for line in mounts.read_text("utf-8", "replace").splitlines():
        path = Path(line.split()[1].replace("\\040", " "))
        with contextlib.suppress(OSError):
            if path.is_dir() and is_ephemeral(path.stat().st_dev):
                mount_points.append(path)
    return mount_points


def _make_folder(path: Path) -> None:
    """Make a folder that belongs to this user, with sudo if necessary."""
    try:
        path.mkdir(exist_ok=True)
    except PermissionError:
        owner = ["-o", str(os.getuid()), "-g", str(os.getgid())]
        command = ["sudo", "-n", "install", "-d", *owner, str(path)]
        if subprocess.run(command, capture_output=True).returncode:
            raise


def _check_no_links(top: Path, data_paths: Iterable[str]) -> None:
    """Raise CopyError if `top` or a folder on one of `data_paths` is a link, which could point anywhere."""
    base = resolve_links(top.parent) / top.name
    for folder in {posixpath.dirname(path) for path in data_paths} | {""}:
        path = top / folder
        if resolve_links(path) != base / folder:
            raise CopyError(f"{path} leads out of the data folder", "it is a link", f"rm {path}")


class Stamp:
    """A data folder's stored state: its source, the copied files, and whether it is complete (`whole`)."""

    def __init__(self, top: Path) -> None:
        self._top, self._path = top, top.with_name(f".{top.name}.json")
        self._next = 0.0
        try:
            stored = json.loads(self._path.read_text("utf-8"))
            self.source, self.whole, self.files = stored["source"], stored["whole"], stored["files"]
        except (OSError, ValueError, KeyError, TypeError):
            self.source, self.whole, self.files = "", False, {}

    def add(self, path: str, s3_object: S3Object) -> None:
        """Record a copied file, and write the stamp at intervals."""
        self.files[path] = [s3_object.size, s3_object.etag]
        if time.monotonic() >= self._next:
            self.write()

    def write(self) -> None:
        """Write the stamp. The longer a write takes, the less often `add` writes. Raises OSError."""
        began, new = time.monotonic(), self._path.with_suffix(".new")
        document = {"source": self.source, "whole": self.whole, "files": self.files}
        new.write_text(json.dumps(document), "utf-8")
        new.replace(self._path)
        now = time.monotonic()
        self._next = now + 20 * (now - began)

    def reset(self, source: str) -> None:
        """Remove the folder with another source's data, and write an empty stamp. Raises OSError."""
        shutil.rmtree(str(self._top), ignore_errors=True)
        self.source, self.whole, self.files = source, False, {}
        self.write()


def _update_folder(
    uri: S3Uri,
    listed: tuple[Store, list[S3Object]],
    top: Path,
    progress: _Progress,
    make_store: Callable[..., Store],
) -> None:
    """Download objects that differ, until the folder matches the objects listed at `uri`.

    Raises CopyError, OSError.
    """
    store, objects = listed
    for _ in range(_MAX_LISTINGS):
        try:
            with contextlib.closing(store), _raise_refusals(uri):
                _download_missing(top, uri, store, map_paths(uri, objects), progress)
                return
        except CopyError as refusal:
            if refusal.code != _CHANGED:
                raise
        store, objects = list_objects(uri, make_store)
    raise CopyError(
        f"{uri} changes while it is copied",
        f"it changed during each of {_MAX_LISTINGS} attempts",
        "awsddp train   # again, once no program writes to the source",
    )


def _download_missing(
    top: Path, uri: S3Uri, store: Store, wanted: Mapping[str, S3Object], progress: _Progress
) -> None:
    stamp = Stamp(top)
    if stamp.source == _SENT_BY_CLIENT or stamp.source.startswith("hf:"):
        stamp.reset("")
    missing = {
        path: s3_object
        for path, s3_object in wanted.items()
        if stamp.files.get(path) != [s3_object.size, s3_object.etag]
        or not _has_size(top / path, s3_object.size)
    }
    removed = {path: size for path, (size, _) in stamp.files.items() if path not in wanted}
    _check_no_links(top, itertools.chain(missing, removed))
    free = shutil.disk_usage(str(top.parent)).free
    need = sum(s3_object.size for s3_object in missing.values())
    if need > free:
        why = f"{need / 1e9:.1f} GB remain to be copied, and {top.parent} has {free / 1e9:.1f} GB free"
        raise CopyError(f"{uri} does not fit on the disk", why, "awsddp down && awsddp up --disk GB")
    progress.total = progress.copied + need
    _remove(top, removed)
    top.mkdir(exist_ok=True)
    stamp.source = str(uri)
    stamp.files = {
        path: entry for path, entry in stamp.files.items() if path in wanted and path not in missing
    }
    try:
        names = iter(missing)
        while batch := {path: [missing[path]] for path in itertools.islice(names, _BATCH_FILES)}:
            store.download_files(uri, batch, top, progress.add, lambda path: stamp.add(path, missing[path]))
            progress.files += len(batch)
    finally:
        stamp.write()


def _has_size(path: Path, size: int) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size == size


def _remove(top: Path, removed: Mapping[str, int]) -> None:
    """Remove copied files that the source no longer has, and folders that are then empty.

    `removed` maps the files' paths to the sizes that were copied. A file that now has another size is kept.
    """
    for path, size in removed.items():
        if _has_size(top / path, size):
            (top / path).unlink()
            with contextlib.suppress(OSError):  # not empty
                os.removedirs(str((top / path).parent))


def _download_hugging_face(
    name: str, revision: str, top: Path, request: dict[str, Any], progress: _Progress
) -> None:
    """Download a data set with Hugging Face's program `hf`, once per revision.

    `hf` is installed into its own environment if it is missing. Raises CopyError.
    """
    stamp, source = Stamp(top), f"hf://datasets/{name}@{revision}"
    if stamp.source != source:
        stamp.reset(source)
    elif stamp.whole and top.is_dir():
        return
    venv = top.parent.parent / "hf"
    folders = [str(Path(sys.executable).parent), str(venv / "bin"), os.environ.get("PATH", "")]
    environ = {"NO_COLOR": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **request["environ"]}
    environ = {**os.environ, **environ, "PATH": os.pathsep.join(folders)}

    def run(*command: str) -> None:
        progress.child = child = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = child.communicate()
        if child.returncode:
            next_step = "--env-var HF_TOKEN   # if the data set is private or gated\n"
            next_step += "awsddp exec -- pip install huggingface_hub   # if the program hf is missing"
            raise CopyError(f"{source} could not be downloaded", output.decode("utf-8", "replace"), next_step)

    if shutil.which("hf", path=environ["PATH"]) is None:
        run(sys.executable, "-m", "venv", str(venv))
        run(str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "huggingface_hub")
    options = ("--repo-type", "dataset", "--revision", revision, "--local-dir", str(top))
    progress.filled = top
    run("hf", "download", name, *options)
    sizes, progress.filled = _file_sizes(top), None
    progress.add(sum(sizes))
    progress.files += len(sizes)
    stamp.whole = True
    stamp.write()


def _file_sizes(top: Path | None) -> list[int]:
    return [info.st_size for _, info in walk(top, lambda *_: None)] if top else []
