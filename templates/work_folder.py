"""Runs on a node (python3 3.8 or newer, standard library only): compares a folder of ours with what home has.

Its first word is the folder's name below ~/awsddp. Reads one record for each path that home sends, and tells
which paths differ here, which may differ, and which an earlier sync sent and home did not name now:

    in:   <kind> <mode> <size> <mtime in ns> <version> <path> NUL       kind f, d or l
    out:  NUL, changed <path> NUL ... , unsure <sha256> <path> NUL ... , missing <path> NUL ...

A version names what a file of home's holds: one that is written anew has another, whatever its size and time.
A file of the right size and time is unsure unless it came with that version and was not written here since.

With the second word `change` it reads three parts with NUL NUL between them: paths that are to be removed;
records of what is here as home has it (each with NUL between them); and records, each followed by `size`
bytes, what the file or link holds. It removes only what an earlier sync sent, and while it is as it was sent:
what this node made or changed stays. Then it puts the records in place, each at once. What fails is told on
stderr. May be repeated and interrupted.
"""

# contextlib takes 2 ms to import, on each node.
# ruff: noqa: SIM105
# File names are bytes here, which pathlib does not take.
# ruff: noqa: PTH101, PTH103, PTH104, PTH106, PTH108, PTH111, PTH112, PTH114, PTH115, PTH118, PTH119, PTH120, PTH208, PTH123, PTH211

import os
import stat
import sys

HOME = os.path.expanduser(b"~")
FOLDER = os.fsencode(sys.argv[1])
WORK = os.path.join(HOME, b"awsddp", FOLDER)
SENT = os.path.join(HOME, b"awsddp", FOLDER + b".sent")  # outside the folder that a job sees
# No folder has such a name: those of data begin with no dot.
VERSIONS = os.path.join(os.path.dirname(WORK), b"." + os.path.basename(WORK) + b".versions")
MOST_BYTES = 4 << 30
"""How much is read in one go to be sure; rsync compares the rest."""


def records(data, fields):
    """Return {path: the fields before it}."""
    found = {}
    for record in data.split(b"\0"):
        if record:
            *values, path = record.split(b" ", fields)
            found[path] = tuple(values)
    return found


def read(file, fields):
    """Return the records of a file of ours; none where it is missing, or not ours."""
    try:
        with open(file, "rb") as stream:
            found = records(stream.read(), fields)
    except OSError:
        return {}
    return found if all(len(values) == fields for values in found.values()) else {}


def write(file, found):
    """Replace a file of ours by these records, at once."""
    with open(file + b".new", "wb") as stream:
        for path in sorted(found):
            stream.write(b" ".join(found[path] + (path,)) + b"\0")
    os.rename(file + b".new", file)


def read_sent():
    """Return what earlier syncs sent: {path: (kind, mode, size, mtime)}."""
    return read(SENT, 4)


def read_versions():
    """Return of which version of home's a path is, and its time of change and inode since: by path.

    No program can set the time of change.
    """
    return read(VERSIONS, 2)


def status(path):
    """Return the lstat of a path, None where it is not there."""
    try:
        return os.lstat(os.path.join(WORK, path))
    except (OSError, ValueError):
        return None


def written(found):
    """Return what changes with each write here, whatever time a program sets."""
    return b"%d.%d" % (found.st_ctime_ns, found.st_ino)


def described(found):
    """Return the record of what has this lstat."""
    kind = {stat.S_IFREG: b"f", stat.S_IFDIR: b"d", stat.S_IFLNK: b"l"}.get(stat.S_IFMT(found.st_mode), b"?")
    if kind == b"d":
        return (kind, b"%o" % (found.st_mode & 0o777), b"0", b"0")
    mode = b"%o" % (0 if kind == b"l" else found.st_mode & 0o777)
    return (kind, mode, b"%d" % found.st_size, b"%d" % found.st_mtime_ns)


def same(found, record):
    """Whether what has this lstat is as the record says; a file system may keep whole seconds alone."""
    if found is None:
        return False
    here = described(found)
    if here[:3] != record[:3]:
        return False
    mtime, wanted = int(here[3]), int(record[3])
    return mtime == wanted or (mtime % 10**9 == 0 and mtime // 10**9 == wanted // 10**9)


def compare(wanted):
    """Return the differing, the unsure (with their digests) and the missing paths.

    From now on the wanted ones count as sent.
    """
    os.makedirs(WORK, exist_ok=True)
    sent, versions = read_sent(), read_versions()
    changed, unsure, left = [], [], MOST_BYTES
    for path, record in wanted.items():
        found = status(path)
        if not same(found, record):
            changed.append(path)
        elif record[0] != b"d" and versions.get(path) != (record[4], written(found)):
            left -= found.st_size
            if left < 0:
                changed.append(path)
            else:
                unsure.append(digest(path) + b" " + path)
    missing = [path for path in sent if path not in wanted]
    both = dict(sent)
    both.update((path, record[:4]) for path, record in wanted.items())
    if both != sent:
        write(SENT, both)
    stale = [path for path in changed if path in versions]
    for path in stale:  # it is sent next: what is noted of it would make it look changed here
        del versions[path]
    if stale:
        write(VERSIONS, versions)
    return changed, unsure, missing


def digest(path):
    """Return the SHA-256 of what a file or link holds, "-" of what cannot be read."""
    import hashlib  # 5 ms, which most syncs need not take

    found, whole = hashlib.sha256(), os.path.join(WORK, path)
    try:
        if os.path.islink(whole):
            found.update(os.readlink(whole))
        else:
            with open(whole, "rb") as stream:
                for part in iter(lambda: stream.read(1 << 20), b""):
                    found.update(part)
    except OSError:
        return b"-"
    return found.hexdigest().encode()


def remove(paths):
    """Remove what was sent and is still as it was sent; then the folders that this leaves empty."""
    sent, versions = read_sent(), read_versions()
    parents = set()
    for path in paths:
        found = status(path)
        is_ours = path in sent and same(found, sent[path])
        if is_ours and (path not in versions or versions[path][1] == written(found)):
            whole = os.path.join(WORK, path)
            try:
                (os.rmdir if sent[path][0] == b"d" else os.unlink)(whole)
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


def note(arrived):
    """Note of which version of home's these paths are, {path: record}, where they are as the records say."""
    versions = read_versions()
    for path, record in arrived.items():
        found = status(path)
        if record[0] != b"d" and same(found, record):
            versions[path] = (record[4], written(found))
        forget_bytecode(path)
    write(VERSIONS, versions)


def forget_bytecode(path):
    """Remove what Python compiled of a module: it tells a module that changed by its size and time alone."""
    name, dot, end = os.path.basename(path).rpartition(b".")
    compiled = os.path.join(WORK, os.path.dirname(path), b"__pycache__")
    if end != b"py" or not dot:
        return
    try:
        for one in os.listdir(compiled):
            if one.startswith(name + b".") and one.endswith(b".pyc"):
                os.unlink(os.path.join(compiled, one))
    except OSError:
        pass


def receive(data):
    """Put the paths in place that the records name; return the records by path."""
    at, arrived = 0, {}
    while at < len(data):
        end = data.index(b"\0", at)
        kind, mode, size, mtime, version, path = data[at:end].split(b" ", 5)
        at = end + 1 + int(size)
        put(os.path.join(WORK, path), kind, int(mode, 8), int(mtime), data[end + 1 : at])
        arrived[path] = (kind, mode, size, mtime, version)
    return arrived


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
        try:
            os.unlink(new)
        except OSError:
            pass
        raise


def main():
    """Answer on stdout."""
    data = sys.stdin.buffer.read()
    if sys.argv[2:]:
        gone, as_home, held = data.split(b"\0\0", 2)
        if gone:
            remove(gone.split(b"\0"))
        arrived = records(as_home, 5)
        arrived.update(receive(held))
        if arrived:
            note(arrived)
        return
    changed, unsure, missing = compare(records(data, 5))
    out = sys.stdout.buffer
    out.write(b"\0")  # ends whatever the login shell's own files have printed
    for word, paths in ((b"changed ", changed), (b"unsure ", unsure), (b"missing ", missing)):
        for path in paths:
            out.write(word + path + b"\0")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(str(error))
