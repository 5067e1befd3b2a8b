"""Copies data to this node, from S3 and from Hugging Face, and makes each what its listing names.

A program of its own, under the Python of the image (storage/datasets.py sends it). It reads what to copy from
stdin, and says JSON, a line each: how far it is, and at last what it did or why it failed.

~/awsddp/data/NAME         the data; ~/awsddp/data is a link where an instance store has room
~/awsddp/data/.NAME.json   its stamp: the source, and each path that it brought, with size and ETag
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

from awsddp.agent.file_tree import is_ephemeral, real, walk
from awsddp.agent.s3.store import PARTS, Changed, Place, Store, Thing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import BinaryIO

_LISTINGS = 3
"""How often a bucket may change while it is copied."""
_AT_ONCE = 2000
_SENT = "folder"
"""The source of what a client sends."""
_DENIED = ("AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "ExpiredToken", "NoCredentialsError")
_CHANGED = "Changed"
_AGAIN = "awsddp train   # again: it goes on"
_RIGHTS = "awsddp doctor --iam-policy nodes   # what the role of access.instance_profile needs: docs/data.md"
_ROLE = "awsddp down && awsddp up -o access.instance_profile=NAME   # nodes with the rights of a role"


class Refusal(Exception):
    """Why data cannot be copied, and what to do; `code` is S3's, or _CHANGED."""

    def __init__(self, message: str, why: str = "", next: str = "", code: str = "") -> None:
        super().__init__(message)
        self.code = code
        shown = "".join(letter for letter in why[-2000:] if letter.isprintable() or letter == "\n")
        self.document: dict[str, Any] = {"failed": message, "why": shown.strip(), "next": next}
        if code == _CHANGED:
            self.document["changed"] = True


def main(stdin: BinaryIO) -> int:
    """Copy what stdin asks for, and say so. Returns 0 whatever comes of it, as that is said."""
    asked = json.loads(stdin.read(int(stdin.readline())))
    sys.path.insert(0, asked["packages"])
    telling = _Telling()
    try:
        told = (_exact if "place" in asked else _copied)(asked, telling)
    except Refusal as refusal:
        told = refusal.document
    except ImportError as error:
        next = "awsddp exec -- python3 -m pip install boto3"
        told = {"lacks": True, **Refusal("its Python cannot read S3", str(error), next).document}
    except OSError as error:
        why, need = str(error), telling.of or asked.get("bytes", 0)
        if error.errno == errno.ENOSPC and need:
            why += f"; {need / 1e9:.1f} GB of data are to be copied"
        told = Refusal("data cannot be written", why, "awsddp exec -- df -h   # the free space").document
    telling.end()
    _say(**told)
    return 0


def _say(**document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


class _Telling:
    """Says every second how far the copy is; a client that is gone ends it, and its child.

    That is another program, which fills a folder.
    """

    def __init__(self) -> None:
        self.of = self.at = self.files = 0
        self.child: subprocess.Popen[bytes] | None = None
        self.filled: Path | None = None
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
            at, of, far = max(self.at, 0) + sum(_sizes(self.filled)), self.of, {}
            text = f"copying data: {at / 1e6:,.0f} MB" if at else "looking at the data"
            if of:
                text, far = f"copying {of / 1e6:,.0f} MB of data", {"fraction": min(1.0, at / of), "size": of}
            try:
                _say(at=text, **far)
            except OSError:
                if self.child is not None:
                    self.child.kill()
                os._exit(1)


def _store(asked: Mapping[str, Any], *, unsigned: bool = False) -> Store:
    """Return S3 as it is asked for. Raises ImportError where this Python lacks what that needs."""
    payer = asked.get("payer", False)
    return Store(region=asked["region"], endpoint=asked["endpoint"], payer=payer, unsigned=unsigned)


@contextlib.contextmanager
def _reading(where: Place) -> Iterator[None]:
    """Raise Refusal for what S3 refuses, where it cannot be reached, and for an object that has changed."""
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import RetriesExceededError

    try:
        yield
    except Changed as error:
        failed = f"{where} changed while it was copied"
        raise Refusal(failed, f"{error} is another object by now", _AGAIN, _CHANGED) from error
    except (BotoCoreError, ClientError, RetriesExceededError) as error:
        code = getattr(error, "response", {}).get("Error", {}).get("Code", type(error).__name__)
        failed, next = "cannot be read", _AGAIN
        if code in _DENIED:
            failed, next = "may not be read", _ROLE if code == "NoCredentialsError" else _RIGHTS
        elif code == "NoSuchBucket":
            next = "aws s3 ls   # your buckets"
        raise Refusal(f"{where} {failed}", str(error), next, code) from error


def _exact(asked: dict[str, Any], telling: _Telling) -> dict[str, Any]:
    """Make the folder hold the files that are named, and nothing else; the client has checked their paths.

    Raises Refusal, OSError.
    """
    where, folder = Place(*asked["place"]), Path(asked["folder"])
    files = {
        path: [Thing(where.key(key), *rest) for key, *rest in parts] for path, parts in asked["files"].items()
    }
    shutil.rmtree(str(folder), ignore_errors=True)
    telling.of = sum(thing.size for things in files.values() for thing in things)
    with _reading(where), contextlib.closing(_store(asked)) as store:
        store.bring(where, files, folder, telling.add)
    return {"copied": len(files), "bytes": telling.at}


def _copied(asked: dict[str, Any], telling: _Telling) -> dict[str, Any]:
    """Copy all sources, one client's at a time, and return what was copied. Raises Refusal, OSError."""
    folder = Path(asked["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    make = partial(_store, asked)
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
            else:  # a folder of the client's, which sends it
                stamp = Stamp(top)
                if stamp.source not in ("", _SENT):
                    stamp.begin_anew(_SENT)
                stamp.source = _SENT
                stamp.write()
    return {"copied": telling.files, "bytes": telling.at}


def listing(
    where: Place, make: Callable[..., Store], *, most: int | None = None
) -> tuple[Store, list[Thing]]:
    """Return a store that may read a place, and what it lists (up to `most`).

    That is the caller's, else one of nobody, for a public bucket. Raises Refusal.
    """
    first: Refusal | None = None
    for unsigned in (False, True):
        store = make(unsigned=unsigned)
        try:
            with _reading(where):
                things = list(itertools.islice(store.list(where), most))
            break
        except Refusal as refusal:
            store.close()
            first = first or refusal
            if unsigned or refusal.code not in _DENIED:
                raise first from refusal
    if not things:
        next = f"aws s3 ls s3://{where.bucket}/   # what is there; a source is what comes before a /"
        raise Refusal(f"{where} holds no objects", "", next)
    return store, things


def paths(where: Place, things: Iterable[Thing]) -> dict[str, Thing]:
    """Return the objects by the path that each gets. Raises Refusal for a key that no path may have.

    Keys that end with a "/" stand for folders, and get none.
    """
    start = len(where.key(""))
    found = {one.key[start:]: one for one in things if one.key[start:] and not one.key.endswith("/")}
    folders = {"", "/"}
    for path in found:
        while (path := posixpath.dirname(path)) not in folders:
            folders.add(path)
    for path, one in found.items():
        if why := _fault(path) or ("others lie in it, as in a folder" if path in folders else ""):
            next = "rename the object, or name a prefix without it"
            raise Refusal(f"{where}: the key {one.key[:200]!a} cannot be a file", why, next)
    return found


def _fault(path: str) -> str:
    """Return why no file may have this path, "" where one may."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a part of it is empty, '.' or '..'"
    if any(ord(letter) < 32 or 127 <= ord(letter) < 160 or 0xD800 <= ord(letter) < 0xE000 for letter in path):
        return "it holds control characters"
    if max(len(part.encode()) for part in parts) > 255 or len(path.encode()) > 3800:
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
    free = [(shutil.disk_usage(str(path)).free, path / "awsddp-data") for path in _stores()]
    room, best = max(free, default=(-1, folder))
    if room < need:
        folder.mkdir()
        return
    _make_folder(best)
    folder.symlink_to(best)


def _stores(mounts: Path = Path("/proc/self/mounts")) -> list[Path]:
    """Return where instance stores are mounted."""
    found = []
    for line in mounts.read_text("utf-8", "replace").splitlines():
        path = Path(line.split()[1].replace("\\040", " "))
        with contextlib.suppress(OSError):
            if path.is_dir() and is_ephemeral(path.stat().st_dev):
                found.append(path)
    return found


def _make_folder(path: Path) -> None:
    """Make a folder of this user's, also where only root may."""
    try:
        path.mkdir(exist_ok=True)
    except PermissionError:
        owner = ["-o", str(os.getuid()), "-g", str(os.getgid())]
        words = ["sudo", "-n", "install", "-d", *owner, str(path)]
        if subprocess.run(words, capture_output=True).returncode:
            raise


def _check_inside(top: Path, some: Iterable[str]) -> None:
    """Raise Refusal where the folder of data, or of a path in it, is a link: it may lead anywhere."""
    base = real(top.parent) / top.name
    for folder in {posixpath.dirname(path) for path in some} | {""}:
        path = top / folder
        if real(path) != base / folder:
            raise Refusal(f"{path} leads out of the folder of the data", "a link lies there", f"rm {path}")


class Stamp:
    """What is known of the data in a folder: its source, the files that this brought, if it is `whole`."""

    def __init__(self, top: Path) -> None:
        self._top, self._path = top, top.with_name(f".{top.name}.json")
        self._next = 0.0
        try:
            told = json.loads(self._path.read_text("utf-8"))
            self.source, self.whole, self.files = told["source"], told["whole"], told["files"]
        except (OSError, ValueError, KeyError, TypeError):
            self.source, self.whole, self.files = "", False, {}

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
        self._next = now + 20 * (now - began)

    def begin_anew(self, source: str) -> None:
        """Remove the folder, which another source filled, and forget what was in it. Raises OSError."""
        shutil.rmtree(str(self._top), ignore_errors=True)
        self.source, self.whole, self.files = source, False, {}
        self.write()


def _bring(
    where: Place,
    listed: tuple[Store, list[Thing]],
    top: Path,
    telling: _Telling,
    make: Callable[..., Store],
) -> None:
    """Make the folder hold what its listing names: what differs travels. Raises Refusal, OSError."""
    store, things = listed
    for _ in range(_LISTINGS):
        try:
            with contextlib.closing(store), _reading(where):
                _fill(top, where, store, paths(where, things), telling)
                return
        except Refusal as refusal:
            if refusal.code != _CHANGED:
                raise
        store, things = listing(where, make)
    raise Refusal(
        f"{where} changes while it is copied", f"{_LISTINGS} times", "train again once it is complete"
    )


def _fill(top: Path, where: Place, store: Store, wanted: Mapping[str, Thing], telling: _Telling) -> None:
    stamp = Stamp(top)
    if stamp.source == _SENT or stamp.source.startswith("hf:"):
        stamp.begin_anew("")
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
        raise Refusal(f"{where} does not fit on the disk", why, "awsddp down && awsddp up --disk GB")
    telling.of = telling.at + need
    _remove(top, gone)
    top.mkdir(exist_ok=True)
    stamp.source = str(where)
    stamp.files = {path: held for path, held in stamp.files.items() if path in wanted and path not in missing}
    try:
        names = iter(missing)
        while batch := {path: [missing[path]] for path in itertools.islice(names, _AT_ONCE)}:
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
            with contextlib.suppress(OSError):  # it holds more
                os.removedirs(str((top / path).parent))


def _download(name: str, revision: str, top: Path, asked: dict[str, Any], telling: _Telling) -> None:
    """Have Hugging Face's own program download a data set, once for each revision.

    It is installed into an environment of its own where there is none. Raises Refusal.
    """
    stamp, source = Stamp(top), f"hf://datasets/{name}@{revision}"
    if stamp.source != source:
        stamp.begin_anew(source)
    elif stamp.whole and top.is_dir():
        return
    own = top.parent.parent / "hf"
    places = [str(Path(sys.executable).parent), str(own / "bin"), os.environ.get("PATH", "")]
    environ = {"NO_COLOR": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **asked["environ"]}
    environ = {**os.environ, **environ, "PATH": os.pathsep.join(places)}

    def run(*words: str) -> None:
        telling.child = child = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said, _ = child.communicate()
        if child.returncode:
            next = "--env-var HF_TOKEN   # if it is private or gated\n"
            next += "awsddp exec -- pip install huggingface_hub   # if the program hf is missing"
            raise Refusal(f"{source} could not be downloaded", said.decode("utf-8", "replace"), next)

    if shutil.which("hf", path=environ["PATH"]) is None:
        run(sys.executable, "-m", "venv", str(own))
        run(str(own / "bin/python"), "-m", "pip", "install", "--quiet", "huggingface_hub")
    what = ("--repo-type", "dataset", "--revision", revision, "--local-dir", str(top))
    telling.filled = top
    run("hf", "download", name, *what)
    sizes, telling.filled = _sizes(top), None
    telling.add(sum(sizes))
    telling.files += len(sizes)
    stamp.whole = True
    stamp.write()


def _sizes(top: Path | None) -> list[int]:
    return [info.st_size for _, info in walk(top, lambda *_: None)] if top else []
