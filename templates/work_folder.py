"""Runs on a node (python3 3.8 or newer, standard library only): compares a folder of ours with what home has.

Its first word is the folder's name below ~/awsddp. Reads one record for each path that home sends, and tells
which paths differ here, and which an earlier sync sent and home did not name now:

    in:   <kind> <mode> <size> <mtime in ns> <path> NUL       kind f, d or l
    out:  NUL, changed <path> NUL ... , missing <path> NUL ...

With the second word `change` it reads paths that are to be removed, with NUL between them, NUL, NUL, and
then records, each followed by `size` bytes, what the file or link holds. It removes only what an earlier sync
sent, and while it is as it was sent: what this node made or changed stays. Then it puts the records in place,
each at once. What fails is told on stderr. May be repeated and interrupted.
"""

# File names are bytes here, which pathlib does not take.
# ruff: noqa: PTH101, PTH103, PTH104, PTH106, PTH108, PTH111, PTH112, PTH114, PTH118, PTH120, PTH123, PTH211

import contextlib
import os
import stat
import sys

HOME = os.path.expanduser(b"~")
FOLDER = os.fsencode(sys.argv[1])
WORK = os.path.join(HOME, b"awsddp", FOLDER)
SENT = os.path.join(HOME, b"awsddp", FOLDER + b".sent")  # outside the folder that a job sees


def records(data):
    """Return {path: (kind, mode, size, mtime)}."""
    found = {}
    for record in data.split(b"\0"):
        if record:
            kind, mode, size, mtime, path = record.split(b" ", 4)
            found[path] = (kind, mode, size, mtime)
    return found


def read_sent():
    """Return what earlier syncs sent, as records."""
    try:
        with open(SENT, "rb") as stream:
            return records(stream.read())
    except (OSError, ValueError):
        return {}


def write_sent(sent):
    """Replace the list of what was sent, at once."""
    with open(SENT + b".new", "wb") as stream:
        for path in sorted(sent):
            stream.write(b" ".join(sent[path] + (path,)) + b"\0")
    os.rename(SENT + b".new", SENT)


def here(path):
    """Return the record of a path as it is on this node, None where it is not there."""
    try:
        found = os.lstat(os.path.join(WORK, path))
    except (OSError, ValueError):
        return None
    kind = {stat.S_IFREG: b"f", stat.S_IFDIR: b"d", stat.S_IFLNK: b"l"}.get(stat.S_IFMT(found.st_mode), b"?")
    if kind == b"d":
        return (kind, b"%o" % (found.st_mode & 0o777), b"0", b"0")
    mode = b"%o" % (0 if kind == b"l" else found.st_mode & 0o777)
    return (kind, mode, b"%d" % found.st_size, b"%d" % found.st_mtime_ns)


def same(path, record):
    """Whether a path is here as the record says; a file system may keep whole seconds alone."""
    found = here(path)
    if found is None or found[:3] != record[:3]:
        return False
    mtime, wanted = int(found[3]), int(record[3])
    return mtime == wanted or (mtime % 10**9 == 0 and mtime // 10**9 == wanted // 10**9)


def compare(wanted):
    """Return the differing and the missing paths; from now on the wanted ones count as sent."""
    os.makedirs(WORK, exist_ok=True)
    sent = read_sent()
    changed = [path for path in wanted if not same(path, wanted[path])]
    missing = [path for path in sent if path not in wanted]
    both = dict(sent)
    both.update(wanted)
    if both != sent:
        write_sent(both)
    return changed, missing


def remove(paths):
    """Remove what was sent and is still as it was sent; then the folders that this leaves empty."""
    sent = read_sent()
    parents = set()
    for path in paths:
        if path in sent and same(path, sent[path]):
            whole = os.path.join(WORK, path)
            with contextlib.suppress(OSError):
                (os.rmdir if sent[path][0] == b"d" else os.unlink)(whole)
            parents.add(os.path.dirname(path))
        sent.pop(path, None)
    for folder in sorted(parents, key=len, reverse=True):
        while folder and folder not in sent:
            try:
                os.rmdir(os.path.join(WORK, folder))
            except OSError:
                break
            folder = os.path.dirname(folder)
    write_sent(sent)


def receive(data):
    """Put the paths in place that the records name."""
    at = 0
    while at < len(data):
        end = data.index(b"\0", at)
        kind, mode, size, mtime, path = data[at:end].split(b" ", 4)
        at = end + 1 + int(size)
        put(os.path.join(WORK, path), kind, int(mode, 8), int(mtime), data[end + 1 : at])


def put(path, kind, mode, mtime, held):
    """Replace a path; a folder gives way only where it is empty."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if kind == b"d":
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
            os.unlink(path)
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
        return
    new = os.path.join(HOME, b"awsddp", FOLDER + b".new.%d" % os.getpid())
    try:
        if kind == b"l":
            os.symlink(held, new)
        else:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(held)
            os.chmod(new, mode)
        os.utime(new, ns=(mtime, mtime), follow_symlinks=False)
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        os.rename(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def main():
    """Answer on stdout."""
    data = sys.stdin.buffer.read()
    if sys.argv[2:]:
        gone, _, held = data.partition(b"\0\0")
        if gone:
            remove(gone.split(b"\0"))
        receive(held)
        return
    changed, missing = compare(records(data))
    out = sys.stdout.buffer
    out.write(b"\0")  # ends whatever the login shell's own files have printed
    for word, paths in ((b"changed ", changed), (b"missing ", missing)):
        for path in paths:
            out.write(word + path + b"\0")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(str(error))
