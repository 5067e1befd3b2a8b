"""Compare and change a project folder. Runs on a node with its python3 (3.8 or newer, standard library only).

The first argument is the folder's name in ~/awsddp. Reads a record for each of the client's paths, and prints
the paths that differ, those that may differ, and those that an earlier sync sent but the client no longer
has:

    in:   <kind> <mode> <size> <mtime in ns> <version> <path> NUL       kind f, d or l
    out:  NUL, changed <path> NUL ... , unsure <sha256> <path> NUL ... , missing <path> NUL ...

The version of a client's file changes with every write, even if size and mtime do not. A file that has the
same size and mtime is listed as unsure, unless an earlier sync sent that version and no program on the node
has written the file since.

With the second argument `change`, the program reads three parts separated by NUL NUL: paths to remove,
records of paths that equal the client's (both lists separated by NUL), and records that are each followed by
the `size` bytes of the file's or link's content. Paths are removed only if an earlier sync sent them and the
node has not changed them. Then the third part is written, each path atomically. Errors go to stderr. A call
can be interrupted and repeated.
"""

# No contextlib, because its import takes 2 ms on each node.
# ruff: noqa: SIM105
# No pathlib, because file names are bytes, which pathlib does not support.
# ruff: noqa: PTH101, PTH103, PTH104, PTH106, PTH108, PTH111, PTH112, PTH114, PTH115, PTH118, PTH119, PTH120, PTH208, PTH123, PTH211

import os
import stat
import sys

HOME = os.path.expanduser(b"~")
FOLDER = os.fsencode(sys.argv[1])
WORK = os.path.join(HOME, b"awsddp", FOLDER)
SENT = os.path.join(HOME, b"awsddp", FOLDER + b".sent")  # outside WORK, because jobs write to WORK
# No data set has this name, because data sets' names do not begin with a dot.
VERSIONS = os.path.join(os.path.dirname(WORK), b"." + os.path.basename(WORK) + b".versions")
MOST_BYTES = 4 << 30
"""The most bytes that a call hashes. Further files count as changed, and rsync compares them."""


def records(data, fields):
    """Return the records in `data` as {path: its fields}."""
    parsed = {}
    for record in data.split(b"\0"):
        if record:
            *values, path = record.split(b" ", fields)
            parsed[path] = tuple(values)
    return parsed


def read(file, fields):
    """Return the records in a file, or {} if the file is missing or invalid."""
    try:
        with open(file, "rb") as stream:
            parsed = records(stream.read(), fields)
    except OSError:
        return {}
    return parsed if all(len(values) == fields for values in parsed.values()) else {}


def write(file, entries):
    """Replace a file by a file with the records `entries`, atomically."""
    with open(file + b".new", "wb") as stream:
        for path in sorted(entries):
            stream.write(b" ".join(entries[path] + (path,)) + b"\0")
    os.rename(file + b".new", file)


def read_sent():
    """Return the paths that earlier syncs sent: {path: (kind, mode, size, mtime)}."""
    return read(SENT, 4)


def read_versions():
    """Return {path: (version, stamp)} for sent files: the client's version and the node's stamp."""
    return read(VERSIONS, 2)


def status(path):
    """Return a path's lstat, or None if the path does not exist."""
    try:
        return os.lstat(os.path.join(WORK, path))
    except (OSError, ValueError):
        return None


def stamp(info):
    """Return the ctime and inode. No program can set the ctime, so every write changes this stamp."""
    return b"%d.%d" % (info.st_ctime_ns, info.st_ino)


def describe(info):
    """Return a path's record from its lstat."""
    kind = {stat.S_IFREG: b"f", stat.S_IFDIR: b"d", stat.S_IFLNK: b"l"}.get(stat.S_IFMT(info.st_mode), b"?")
    if kind == b"d":
        return (kind, b"%o" % (info.st_mode & 0o777), b"0", b"0")
    mode = b"%o" % (0 if kind == b"l" else info.st_mode & 0o777)
    return (kind, mode, b"%d" % info.st_size, b"%d" % info.st_mtime_ns)


def is_same(info, record):
    """Return True if an lstat matches a record, even if the file system stores only whole seconds."""
    if info is None:
        return False
    actual = describe(info)
    if actual[:3] != record[:3]:
        return False
    mtime, expected = int(actual[3]), int(record[3])
    return mtime == expected or (mtime % 10**9 == 0 and mtime // 10**9 == expected // 10**9)


def compare(wanted):
    """Return the changed paths, the unsure paths with their digests, and the missing paths.

    The wanted paths are recorded as sent.
    """
    os.makedirs(WORK, exist_ok=True)
    sent, versions = read_sent(), read_versions()
    changed, unsure, budget = [], [], MOST_BYTES
    for path, record in wanted.items():
        info = status(path)
        if not is_same(info, record):
            changed.append(path)
        elif record[0] != b"d" and versions.get(path) != (record[4], stamp(info)):
            budget -= info.st_size
            if budget < 0:
                changed.append(path)
            else:
                unsure.append(digest(path) + b" " + path)
    missing = [path for path in sent if path not in wanted]
    updated = dict(sent)
    updated.update((path, record[:4]) for path, record in wanted.items())
    if updated != sent:
        write(SENT, updated)
    stale = [path for path in changed if path in versions]
    # Stale paths are sent next. If they kept their old stamps, the node would seem to have changed them.
    for path in stale:
        del versions[path]
    if stale:
        write(VERSIONS, versions)
    return changed, unsure, missing


def digest(path):
    """Return the SHA-256 of what a file or link contains, or "-" if it cannot be read."""
    import hashlib  # imported late, because it takes 5 ms and most syncs do not need it

    checksum, full_path = hashlib.sha256(), os.path.join(WORK, path)
    try:
        if os.path.islink(full_path):
            checksum.update(os.readlink(full_path))
        else:
            with open(full_path, "rb") as stream:
                for part in iter(lambda: stream.read(1 << 20), b""):
                    checksum.update(part)
    except OSError:
        return b"-"
    return checksum.hexdigest().encode()


def remove(paths):
    """Remove the paths that were sent and have not changed since, and the folders that become empty."""
    sent, versions = read_sent(), read_versions()
    parents = set()
    for path in paths:
        info = status(path)
        is_sent = path in sent and is_same(info, sent[path])
        if is_sent and (path not in versions or versions[path][1] == stamp(info)):
            full_path = os.path.join(WORK, path)
            try:
                (os.rmdir if sent[path][0] == b"d" else os.unlink)(full_path)
            except OSError:
                pass
            parents.add(os.path.dirname(path))
        sent.pop(path, None)
        versions.pop(path, None)
    for folder in sorted(parents, key=len, reverse=True):
        while folder and folder not in sent:
            try:
                os.rmdir(os.path.join(WORK, folder))
            except OSError:
                break
            folder = os.path.dirname(folder)
    write(SENT, sent)
    write(VERSIONS, versions)


def record_versions(received):
    """Record the client's versions of received paths ({path: record}), unless they have changed since."""
    versions = read_versions()
    for path, record in received.items():
        info = status(path)
        if record[0] != b"d" and is_same(info, record):
            versions[path] = (record[4], stamp(info))
        remove_bytecode(path)
    write(VERSIONS, versions)


def remove_bytecode(path):
    """Remove a module's bytecode, because Python detects a changed module only by its size and mtime."""
    name, dot, suffix = os.path.basename(path).rpartition(b".")
    cache = os.path.join(WORK, os.path.dirname(path), b"__pycache__")
    if suffix != b"py" or not dot:
        return
    try:
        for file in os.listdir(cache):
            if file.startswith(name + b".") and file.endswith(b".pyc"):
                os.unlink(os.path.join(cache, file))
    except OSError:
        pass


def receive(data):
    """Write the paths in `data`, and return their records by path."""
    start, received = 0, {}
    while start < len(data):
        end = data.index(b"\0", start)
        kind, mode, size, mtime, version, path = data[start:end].split(b" ", 5)
        start = end + 1 + int(size)
        put(os.path.join(WORK, path), kind, int(mode, 8), int(mtime), data[end + 1 : start])
        received[path] = (kind, mode, size, mtime, version)
    return received


def put(path, kind, mode, mtime, content):
    """Write a path atomically. A folder at the path is replaced only if it is empty."""
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
            os.symlink(content, new)
        else:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(content)
            os.chmod(new, mode)
        os.utime(new, ns=(mtime, mtime), follow_symlinks=False)
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        os.rename(new, path)
    except BaseException:
        try:
            os.unlink(new)
        except OSError:
            pass
        raise


def main():
    """Serve the request on stdin."""
    data = sys.stdin.buffer.read()
    if sys.argv[2:]:
        removed, current, packed = data.split(b"\0\0", 2)
        if removed:
            remove(removed.split(b"\0"))
        received = records(current, 5)
        received.update(receive(packed))
        if received:
            record_versions(received)
        return
    changed, unsure, missing = compare(records(data, 5))
    out = sys.stdout.buffer
    out.write(b"\0")  # ends the output from the login shell's startup files
    for prefix, paths in ((b"changed ", changed), (b"unsure ", unsure), (b"missing ", missing)):
        for path in paths:
            out.write(prefix + path + b"\0")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(str(error))
