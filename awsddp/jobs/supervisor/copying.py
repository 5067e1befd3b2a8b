"""Copies data to this node, from S3 and from Hugging Face, and makes each what its listing names.

A program of its own, under the Python of the image (awsddp/data.py sends it). It reads what to copy from
stdin, and says JSON, a line each: how far it is, and at last what it did or why it failed.

~/awsddp/data/NAME         the data; ~/awsddp/data is a link where an instance store has room
~/awsddp/data/.NAME.json   its stamp: the source, and each path that it brought, with size and ETag
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import posixpath
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.jobs.supervisor.objects import PARTS, Place, Store, Thing, join
from awsddp.jobs.supervisor.walk import is_ephemeral, real, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import BinaryIO

_LISTINGS = 3
"""How often a bucket may change while it is copied."""
_AT_ONCE = 2000
_PART_BYTES, _PATH_BYTES = 255, 3800
_SAVE_S = 2.0
_DENIED = ("AccessDenied", "AllAccessDisabled", "403", "InvalidAccessKeyId", "ExpiredToken")
_CHANGED = ("PreconditionFailed", "NoSuchKey", "412", "404")
_RIGHTS = "docs/data.md   # the policy that lets the role of access.instance_profile read it"


class Refusal(Exception):
    """Why data cannot be copied, and what to do."""

    def __init__(self, message: str, why: str = "", next: str = "") -> None:
        super().__init__(message)
        shown = "".join(letter for letter in why[-2000:] if letter.isprintable() or letter == "\n")
        self.document = {"failed": message, "why": shown.strip(), "next": next}


def main(stdin: BinaryIO) -> int:
    """Copy what stdin asks for, and say so. Returns 0 whatever comes of it, as that is said."""
    asked = json.loads(stdin.read(int(stdin.readline())))
    sys.path.insert(0, asked["packages"])
    if ("place" in asked or any(one["kind"] == "s3" for one in asked["sources"])) and not _has_packages():
        _say(lacks=True)
        return 0
    telling = _Telling()
    try:
        told = (_exact if "place" in asked else _copied)(asked, telling)
    except Refusal as refusal:
        told = refusal.document
    except OSError as error:
        told = Refusal("data cannot be written", str(error), "awsddp exec -- df -h   # room for it").document
    telling.end()
    _say(**told)
    return 0


def _has_packages() -> bool:
    """Tell whether this Python has what objects.py needs; an s3transfer before 0.11 lacks the method."""
    try:
        from s3transfer.futures import TransferMeta
    except ImportError:
        return False
    return hasattr(TransferMeta, "provide_object_etag")


def _say(**document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


class _Telling:
    """Says every second how far the copy is; a client that is gone ends it, and the program it waits for."""

    def __init__(self) -> None:
        self.of = self.at = self.files = 0
        self.child: subprocess.Popen[bytes] | None = None
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def add(self, count: int) -> None:
        """Count bytes that have arrived; a negative count takes some back."""
        with self._lock:
            self.at += count

    def end(self) -> None:
        """Say no more."""
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._over.wait(1):
            try:
                _say(at=self.at, of=self.of)
            except OSError:
                if self.child is not None:
                    self.child.kill()
                os._exit(1)


def _exact(asked: dict[str, Any], telling: _Telling) -> dict[str, Any]:
    """Make the folder hold what is named, and nothing else: files of parts, each cut to its size.

    Raises Refusal, OSError.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    where, folder = Place(*asked["place"]), Path(asked["folder"])
    shutil.rmtree(str(folder), ignore_errors=True)
    parts = {
        f"{number}/{at}": Thing(where.key(key), size, "")
        for number, several in enumerate(asked["files"].values())
        for at, (key, size) in enumerate(several)
    }
    telling.of, came = sum(one.size for one in parts.values()), folder / PARTS / "came"
    try:
        with contextlib.closing(Store(region=asked["region"], endpoint=asked["endpoint"])) as store:
            store.bring(where, parts, came, telling.add)
        for number, (path, several) in enumerate(asked["files"].items()):
            if why := _fault(path):
                raise Refusal(f"{where}: a checkpoint has no file {path[:200]!a}", why)
            join([(came / f"{number}/{at}", size) for at, (_, size) in enumerate(several)], folder / path)
            telling.files += 1
    except (BotoCoreError, ClientError, EOFError) as error:
        raise _unreadable(where, error) from error
    shutil.rmtree(str(folder / PARTS))
    return {"copied": telling.files, "bytes": telling.at}


def _copied(asked: dict[str, Any], telling: _Telling) -> dict[str, Any]:
    """Copy all sources, one client's at a time, and return what was copied. Raises Refusal, OSError."""
    folder = Path(asked["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    make = partial(Store, region=asked["region"], endpoint=asked["endpoint"], payer=asked["payer"])
    with folder.with_name("data.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        listed = {
            one["name"]: listing(Place(one["at"], one["part"]), make)
            for one in asked["sources"]
            if one["kind"] == "s3"
        }
        need = sum(thing.size for _, things in listed.values() for thing in things)
        _make_root(folder, need + asked["bytes"])
        for one in asked["sources"]:
            top = folder / one["name"]
            _check_inside(top, ())
            if one["kind"] == "s3":
                _bring(Place(one["at"], one["part"]), listed[one["name"]], top, telling, make)
            elif one["kind"] == "hf":
                _download(one["at"], one["part"], top, asked, telling)
            elif (stamp := Stamp(top)).source:  # a folder of the client's, which sends it, takes the place
                stamp.begin_anew()
    return {"copied": telling.files, "bytes": telling.at}


def listing(
    where: Place, make: Callable[..., Store], *, most: int | None = None
) -> tuple[Store, list[Thing]]:
    """Return a store that may read a place, and what it lists (up to `most`).

    That is the caller's, else one of nobody, for a public bucket. Raises Refusal.
    """
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    first: BotoCoreError | ClientError | None = None
    for unsigned in (False, True):
        store = make(unsigned=unsigned)
        try:
            things = list(itertools.islice(store.list(where), most))
        except NoCredentialsError as error:
            first = error
        except ClientError as error:
            first = first or error
            if _code(error) not in _DENIED:
                break
        except BotoCoreError as error:
            first = first or error
            break
        else:
            if not things:
                raise Refusal(f"{where} holds no objects", "", "a source is a prefix: what comes before a /")
            return store, things
        store.close()
    assert first is not None, "something was refused"
    raise _unreadable(where, first)


def _code(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def _unreadable(where: Place, error: Exception) -> Refusal:
    code = _code(error)
    if code in _DENIED or type(error).__name__ == "NoCredentialsError":
        return Refusal(f"{where} may not be read", str(error), _RIGHTS)
    next = (
        "correct the name of the bucket"
        if code == "NoSuchBucket"
        else "awsddp train ...   # again: it goes on"
    )
    return Refusal(f"{where} cannot be read", str(error), next)


def paths(where: Place, things: Iterable[Thing]) -> dict[str, Thing]:
    """Return the objects by the path that each gets. Raises Refusal for a key that no path may have.

    Keys that end with a "/" stand for folders, and get none.
    """
    found: dict[str, Thing] = {}
    folders: dict[str, str] = {}
    faults = []
    for one in things:
        path = one.key[len(where.prefix) + bool(where.prefix) :]
        if path and not path.endswith("/"):
            found[path] = one
            if fault := _fault(path):
                faults.append((one.key, fault))
            while (path := posixpath.dirname(path)) not in ("", "/") and path not in folders:
                folders[path] = one.key
    faults += [(folders[path], "a folder of it is an object, too") for path in folders.keys() & found.keys()]
    for key, why in faults:
        next = "rename the object, or name a prefix without it"
        raise Refusal(f"{where}: the key {key[:200]!a} cannot be a file", why, next)
    return found


def _fault(path: str) -> str:
    """Return why no file may have this path, "" where one may."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a part of it is empty, '.' or '..'"
    if any(ord(letter) < 32 or 127 <= ord(letter) < 160 or 0xD800 <= ord(letter) < 0xE000 for letter in path):
        return "it holds control characters"
    if max(len(part.encode()) for part in parts) > _PART_BYTES or len(path.encode()) > _PATH_BYTES:
        return "it is too long for a file"
    return f"{PARTS} is in use" if parts[0] == PARTS else ""


def _make_root(folder: Path, need: int) -> None:
    """Make the folder of all data, on the largest instance store that has room for `need` bytes, if one has.

    A store is empty after a stop: then the folder that the link names is made again. Raises OSError.
    """
    if folder.is_symlink():
        _make_folder(Path(os.readlink(str(folder))))  # noqa: PTH115
    if folder.exists():
        return
    free = {path: shutil.disk_usage(str(path)).free for path in _stores()}
    best = max(free, key=free.__getitem__, default=None)
    if best is None or free[best] < need:
        folder.mkdir()
        return
    _make_folder(best / "awsddp-data")
    folder.symlink_to(best / "awsddp-data")


def _stores(mounts: Path = Path("/proc/self/mounts")) -> list[Path]:
    """Return where instance stores are mounted."""
    found = []
    for line in mounts.read_text("utf-8", "replace").splitlines():
        path = Path(line.split()[1].replace("\\040", " "))
        try:
            if path.is_dir() and is_ephemeral(path.stat().st_dev):
                found.append(path)
        except OSError:
            continue
    return found


def _make_folder(path: Path) -> None:
    """Make a folder of this user's, also where only root may."""
    try:
        path.mkdir(exist_ok=True)
    except PermissionError:
        owner = ["-o", str(os.getuid()), "-g", str(os.getgid())]
        done = subprocess.run(["sudo", "-n", "install", "-d", *owner, str(path)], capture_output=True)
        if done.returncode:
            raise


def _check_inside(top: Path, some: Iterable[str]) -> None:
    """Raise Refusal where the folder of data, or of a path in it, is a link: it may lead anywhere."""
    base = real(top.parent) / top.name
    for folder in {posixpath.dirname(path) for path in some} | {""}:
        if real(top / folder) != base / folder:
            path = top / folder
            raise Refusal(f"{path} leads out of the folder of the data", "a link lies there", f"rm {path}")


class Stamp:
    """What is known of the data in a folder: its source, the files that this brought, if it is `whole`."""

    def __init__(self, top: Path) -> None:
        self._top, self._path = top, top.with_name(f".{top.name}.json")
        self.source, self.whole = "", False
        self.files: dict[str, list[Any]] = {}
        self._next = 0.0
        try:
            told = json.loads(self._path.read_text("utf-8"))
            self.source, self.whole, self.files = told["source"], told["whole"], told["files"]
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def brought(self, path: str, one: Thing) -> None:
        """Note that a file is there, and write it down at times."""
        self.files[path] = [one.size, one.etag]
        if time.monotonic() >= self._next:
            self.write()

    def write(self) -> None:
        """Replace what is written down; the larger it is the longer it rests. Raises OSError."""
        began, new = time.monotonic(), self._path.with_suffix(".new")
        document = {"source": self.source, "whole": self.whole, "files": self.files}
        new.write_text(json.dumps(document), "utf-8")
        new.replace(self._path)
        now = time.monotonic()
        self._next = now + max(_SAVE_S, 20 * (now - began))

    def begin_anew(self) -> None:
        """Remove the folder, which another source filled, and forget what was in it."""
        shutil.rmtree(str(self._top), ignore_errors=True)
        if self._path.exists():
            self._path.unlink()
        self.source, self.whole, self.files = "", False, {}


def _bring(
    where: Place,
    listed: tuple[Store, list[Thing]],
    top: Path,
    telling: _Telling,
    make: Callable[..., Store],
) -> None:
    """Make the folder hold what its listing names: what differs travels. Raises Refusal, OSError."""
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import RetriesExceededError

    store, things = listed
    for _ in range(_LISTINGS):
        with contextlib.closing(store):
            try:
                _fill(top, where, store, paths(where, things), telling)
                return
            except (BotoCoreError, ClientError, RetriesExceededError) as error:
                if _code(error) not in _CHANGED:
                    raise _unreadable(where, error) from error
        store, things = listing(where, make)
    raise Refusal(
        f"{where} changes while it is copied", f"{_LISTINGS} times", "train again once it is complete"
    )


def _fill(top: Path, where: Place, store: Store, wanted: Mapping[str, Thing], telling: _Telling) -> None:
    stamp = Stamp(top)
    if stamp.source.startswith("hf:"):
        stamp.begin_anew()
    missing = {
        path: one
        for path, one in wanted.items()
        if stamp.files.get(path) != [one.size, one.etag] or not _is_whole(top / path, one.size)
    }
    gone = {path: size for path, (size, _) in stamp.files.items() if path not in wanted}
    _check_inside(top, itertools.chain(missing, gone))
    room, need = shutil.disk_usage(str(top.parent)).free, sum(one.size for one in missing.values())
    if need > room:
        why = f"{need / 1e9:.1f} GB are missing, {room / 1e9:.1f} GB are free on {top.parent}"
        raise Refusal(f"{where} does not fit on the disk", why, "awsddp down && awsddp up --disk GB ...")
    telling.of = telling.at + need
    top.mkdir(exist_ok=True)
    _remove(top, gone)
    stamp.source = str(where)
    stamp.files = {path: held for path, held in stamp.files.items() if path in wanted and path not in missing}
    try:
        names = iter(missing)
        while batch := {path: missing[path] for path in itertools.islice(names, _AT_ONCE)}:
            store.bring(where, batch, top, telling.add, lambda path: stamp.brought(path, missing[path]))
            telling.files += len(batch)
    finally:
        stamp.write()


def _is_whole(path: Path, size: int) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def _remove(top: Path, gone: Mapping[str, int]) -> None:
    """Remove files that the source brought and has no more, unless they were changed; then empty folders."""
    for path, size in gone.items():
        if _is_whole(top / path, size):
            (top / path).unlink()
            try:
                while path := posixpath.dirname(path):
                    (top / path).rmdir()
            except OSError:  # it holds more
                continue


def _download(name: str, revision: str, top: Path, asked: dict[str, Any], telling: _Telling) -> None:
    """Have Hugging Face's own program download a data set, once for each revision. Raises Refusal."""
    stamp, source = Stamp(top), f"hf://datasets/{name}@{revision}"
    if stamp.source == source and stamp.whole and top.is_dir():
        return
    if stamp.source != source:
        stamp.begin_anew()
    stamp.source = source
    stamp.write()
    before = telling.at
    words = ["download", name, "--repo-type", "dataset", "--revision", revision, "--local-dir", str(top)]
    quiet = {"NO_COLOR": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environ = {**os.environ, **quiet, **asked["environ"]}
    with tempfile.TemporaryFile() as said:
        telling.child = subprocess.Popen(
            [_program(top.parent.parent, environ), *words],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        while True:
            try:
                code = telling.child.wait(2)
                break
            except subprocess.TimeoutExpired:
                telling.add(before + sum(_sizes(top)) - telling.at)
        if code:
            said.seek(0)
            why = said.read()[-1500:].decode("utf-8", "replace")
            next = "--env-var HF_TOKEN   # if it is private or gated"
            raise Refusal(f"{source} could not be downloaded", why, next)
    sizes = _sizes(top)
    telling.add(before + sum(sizes) - telling.at)
    telling.files += len(sizes)
    stamp.whole = True
    stamp.write()


def _sizes(top: Path) -> list[int]:
    return [info.st_size for _, info in walk(top, lambda path, why: None)]


def _program(folder: Path, environ: Mapping[str, str]) -> str:
    """Return Hugging Face's program, installed into an environment of its own where there is none.

    Raises Refusal.
    """
    own = folder / "hf"
    beside = [Path(sys.executable).with_name("hf"), own / "bin/hf"]
    found = [str(path) for path in beside if path.exists()] + [shutil.which("hf") or ""]
    if found[0]:
        return found[0]
    install = [str(own / "bin/python"), "-m", "pip", "install", "--quiet", "huggingface_hub"]
    for words in ([sys.executable, "-m", "venv", str(own)], install):
        done = subprocess.run(words, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            why = done.stdout[-1500:].decode("utf-8", "replace")
            next = "awsddp exec -- pip install huggingface_hub   # what it needs is the program hf"
            raise Refusal("Hugging Face's program hf cannot be installed", why, next)
    return str(own / "bin/hf")
