"""Runs on a node (its own python3, 3.8 or newer, standard library only): makes the environment of the ranks.

Reads one JSON object from stdin, and writes lines of JSON: {"at": text} as it goes on, the answer last.

    {"do": "look" or "build", "client": who asks, "stamp", "setup_stamp", "kind", "python",
     "image": path of the image's python, "setup": [], "lines": [], "constraints": [], "torch": [], "conda",
     "projects": [{"info", "metadata", "entry_points", "sources": []}],
     "environ": {}: variables of all commands, "install": {}: of those that install, "ca", "miniforge": URL}

    {"ready": bool, "python": path, "facts": {}, "platform": {}}     the platform where it is not ready
    {"failed": what was being done, "said": its last lines}

An environment lies in ~/awsddp/env/STAMP and is whole when its ready.json is there. One that an interrupted
build left is continued. Others stay while the disk has room, those that are in use, and the last one.
"""

import contextlib
import fcntl
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ.get("HOME") or "~").expanduser()
PLACE = HOME / "awsddp/env"
WORK = HOME / "awsddp/work"
LOCK_S = 1800
TAIL = 40
TELL_S = 2
ROOM = 0.25  # of a disk, for the next environment and for results
POLL_MS = 500
END_S = 5
PIPE_BYTES = 2**20  # more than a pipe holds
# Run by the image's python: what is there, so that the client can choose packages for it.
PLATFORM = """
import json, platform, site, sys
from importlib import metadata
found = {one.metadata["Name"]: one.version for one in metadata.distributions() if one.metadata["Name"]}
print(json.dumps({"version": platform.python_version(), "machine": platform.machine(),
    "libc": platform.libc_ver()[1], "packages": found, "site": site.getsitepackages()}))
"""
# Run by the environment's python at the end: what all nodes must have alike.
FACTS = """
import json, platform
facts = {"python": platform.python_version()}
try:
    import torch
except ModuleNotFoundError:
    torch = None
if torch is not None:
    facts.update(torch=torch.__version__, cuda=torch.version.cuda, torch_file=torch.__file__)
    facts["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if facts["cuda"] else None
    except Exception:
        facts["nccl"] = None
print(json.dumps(facts))
"""
PROGRAM = "#!{}\nimport sys\nfrom {} import {}\nsys.exit({}())\n"
# Run as root: other programs hold these while they install packages, as on a first boot.
PACKAGE_LOCK = """
import fcntl, sys, time
deadline = time.monotonic() + 600
for path in ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock"):
    try:
        stream = open(path, "r+b")
    except OSError:
        continue
    while True:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                sys.exit("another program has held %s for 600 s" % path)
            time.sleep(0.2)
"""


BUILD = {}
"""What this build says of itself to another one that waits for it."""


class Failed(Exception):
    """A step failed: what, and what it said last."""


def tell(**what):
    """Write one line to the client."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def run(step, argv, env=None, cwd=None):
    """Run a command, tell some of its lines as progress, and return what it said. Raises Failed."""
    tell(at=step)
    note(doing=step)
    try:
        process = subprocess.Popen(
            [str(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ, **(env or {})),
            cwd=cwd and str(cwd),
            start_new_session=True,
        )
    except OSError as error:
        raise Failed(step, str(error)) from error
    with process.stdout:
        try:
            said = follow(step, process)
        except (BrokenPipeError, SystemExit):  # nobody reads what this program writes, or SIGTERM
            end(process)
            raise
    if process.wait() != 0:
        tail = said[-TAIL:] or ["no output"]
        raise Failed(step, "\n".join([*tail, f"exit code {process.returncode}"]))
    return "\n".join(said)


def follow(step, process):
    """Return the lines of a command until it ends, though what it has started goes on and may write more.

    Raises SystemExit where the client is gone.
    """
    said, told, unread = [], time.monotonic(), b""
    pipe, client = process.stdout.fileno(), sys.stdout.fileno()
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    poller.register(client, 0)  # errors and hang-ups alone
    while True:
        is_over = process.poll() is not None
        ready = [found for found, _ in poller.poll(0 if is_over else POLL_MS)]
        if client in ready:
            sys.exit("the client is gone")
        data = os.read(pipe, PIPE_BYTES) if pipe in ready else b""
        *lines, unread = (unread + data).split(b"\n")
        is_closed = pipe in ready and not data
        for line in [*lines, unread] if is_over or is_closed else lines:
            text = line.decode(errors="replace").rstrip()
            said += [text] if line is not unread or text else []
            if text.strip() and time.monotonic() - told > TELL_S:
                told = time.monotonic()
                tell(at=step + ": " + text.partition(" (from ")[0].strip()[:200])
        if is_closed:
            return said
        if is_over:  # without a reader, the next line would end what it has started
            subprocess.Popen(["cat"], stdin=pipe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return said


def end(process):
    """End a command with its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(END_S)


def stop(number, frame):
    """At SIGTERM: end this program as the end of its client does, its command first."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit("SIGTERM ended this build")


def ask(python, program):
    """Return what a python answers to a program above, its last line."""
    if program == FACTS:
        tell(at="importing torch, to compare the nodes")
    done = subprocess.run([str(python), "-c", program], stdin=subprocess.DEVNULL, capture_output=True)
    try:
        return json.loads(done.stdout.decode().splitlines()[-1])
    except (ValueError, IndexError):
        said = done.stderr.decode(errors="replace")[-2000:]
        raise Failed("asking " + str(python), said or "no answer") from None


def write(path, text, mode=0o644):
    """Replace a file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    new.touch(mode=mode)
    new.write_text(text)
    new.replace(path)


@contextlib.contextmanager
def private(path, text):
    """Write a file that may hold passwords, for this user alone and until the end of a block."""
    write(path, text, mode=0o600)
    try:
        yield path
    finally:
        path.unlink()


def read(path):
    """Return the JSON of a file, None where it is not there or cut short."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def note(**what):
    """Write down what this build does, for those who wait for it."""
    BUILD.update(what)
    with contextlib.suppress(OSError):  # a full disk: the command itself says so
        write(PLACE / "build.json", json.dumps(BUILD))


def locked(asked):
    """Wait until no other build runs on this node; the lock ends with this process."""
    PLACE.mkdir(parents=True, exist_ok=True)
    lock = (PLACE / "lock").open("w")
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            note(client=asked["client"], pid=os.getpid(), since=time.strftime("%H:%M", time.gmtime()))
            return lock
        except OSError:
            of = dict(
                {"client": "?", "pid": 0, "since": "?", "doing": "?"}, **(read(PLACE / "build.json") or {})
            )
            text = "waiting for a build of {client} on this node, since {since} UTC, process {pid}: {doing}"
            if time.monotonic() > deadline:
                raise Failed(text.format(**of), f"it has no end after {LOCK_S} s") from None
            tell(at=text.format(**of))
            time.sleep(1)


def reach(asked):
    """Return the variables by which pip, uv and conda find their packages."""
    env = dict(asked["environ"])
    if asked["ca"]:
        bundle = PLACE / "ca.pem"
        write(bundle, asked["ca"])
        names = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CONDA_SSL_VERIFY")
        env.update(dict.fromkeys(names, str(bundle)))
    return env


def pip_install(python):
    """Return the words that install packages by a python's pip."""
    options = ["--no-input", "--progress-bar", "off", "--retries", "2"]
    return [python, "-m", "pip", "--disable-pip-version-check", "install", *options]


def install(pip, place, asked, env, kept=()):
    """Install the project's packages by a pip; `kept` are pins of what stays as it is."""
    if not asked["lines"]:
        return
    files = {"requirements": asked["lines"], "constraints": [*asked["constraints"], *kept]}
    with contextlib.ExitStack() as stack:
        lines, constraints = (
            stack.enter_context(private(place / f"awsddp/{name}.txt", "".join(one + "\n" for one in of)))
            for name, of in files.items()
        )
        run("installing", [*pip, "-r", lines, "-c", constraints], env=env)


def link_programs(place, folders):
    """Write the programs of packages (torchrun...) in some folders, started by the environment's python."""
    from importlib import metadata  # here, because a look need not wait for it

    python = place / "bin/python"
    entries = [entry for dist in metadata.distributions(path=folders) for entry in dist.entry_points]
    for entry in entries:
        path = place / "bin" / entry.name
        if entry.group == "console_scripts" and not path.exists():
            module, _, name = entry.value.partition("[")[0].strip().partition(":")
            path.write_text(PROGRAM.format(python, module, name.split(".")[0], name))
            path.chmod(0o755)


def add_projects(place, asked):
    """Add what an installation of the synced projects would have beside their code.

    The ranks' own PYTHONPATH comes before: they may work in another folder than WORK.
    """
    for packages in place.glob("lib/python3*/site-packages") if asked["projects"] else ():
        for one in asked["projects"]:
            for name, text in (("METADATA", one["metadata"]), ("entry_points.txt", one["entry_points"])):
                write(packages / one["info"] / name, text)
        folders = [WORK / folder for one in asked["projects"] for folder in one["sources"]]
        write(packages / "awsddp_projects.pth", "".join(f"{folder}\n" for folder in folders))
        link_programs(place, [str(packages)])


def overlay(place, asked, env):
    """Make an environment over the image's: a venv made from a venv shows the base's packages only."""
    python = place / "bin/python"
    if not python.exists():
        run("making the environment", [asked["image"], "-m", "venv", "--without-pip", place])
    found = ask(asked["image"], PLATFORM)
    version = found["version"].split(".")
    packages = place / "lib" / "python{}.{}".format(*version[:2]) / "site-packages"
    adding = "; ".join(f"site.addsitedir({folder!r})" for folder in found["site"])
    write(packages / "awsddp_image.pth", "import site; " + adding + "\n")
    install(pip_install(python), place, asked, env)
    tell(at="linking the image's programs")
    link_programs(place, found["site"])
    has, image = ask(python, FACTS), ask(asked["image"], FACTS)
    if has.get("torch_file") != image.get("torch_file"):
        why = "import torch finds {} ({}), not the image's {} ({})"
        words = [one.get(key) for one in (has, image) for key in ("torch", "torch_file")]
        raise Failed("keeping the image's torch", why.format(*words))
    return python


def installed(name, *places):
    """Return the path of a program, "" where it is neither on the PATH nor among the places."""
    return shutil.which(name) or next((str(path) for path in places if path.exists()), "")


def uv(asked, env):
    """Return the path of uv; where there is none it is installed beside the environments."""
    own = PLACE / "tools/bin/uv"
    found = installed("uv", HOME / ".local/bin/uv", own)
    if not found:
        words = [*pip_install(asked["image"]), "--target", PLACE / "tools", "uv"]
        run("installing uv", words, env=env)
    return found or str(own)


def venv(place, asked, env):
    """Make an environment of its own: uv, the asked-for Python, torch, then the packages."""
    program = uv(asked, env)
    python = place / "bin/python"
    if not python.exists():
        words = ["venv", "--no-project", "--python", asked["python"] or asked["image"], place]
        run("making the environment", [program, *words], env=env)
    alone = ["--no-index"] if "PIP_NO_INDEX" in env else []
    pip = [program, "pip", "install", "--no-progress", *alone, "--python", python]
    run("installing torch", [*pip, *asked["torch"]], env=env)
    has = ask(python, PLATFORM)["packages"]
    kept = [f"{name}=={has[name]}" for name in ("torch", "torchvision") if name in has]
    install(pip, place, asked, env, kept)
    return python


def conda_program(asked, env):
    """Return the path of conda; where there is none miniforge is installed beside the environments."""
    own = PLACE / "miniforge/bin/conda"
    found = installed("conda", Path("/opt/conda/bin/conda"), *sorted(HOME.glob("mini*/bin/conda")), own)
    if not found:
        installer = PLACE / "miniforge.sh"
        url = asked["miniforge"].format(platform.machine())
        words = ["-fsSL", "--retry", "2", "--connect-timeout", "20", "--speed-time", "30", "-m", "900"]
        run("fetching miniforge", ["curl", *words, "-o", installer, url], env=env)
        run("installing miniforge", ["bash", installer, "-b", "-u", "-p", PLACE / "miniforge"], env=env)
        installer.unlink()
    return found or str(own)


def conda(place, asked, env):
    """Make conda's environment from the user's environment.yml, or pinned; then torch and the rest by pip."""
    program = conda_program(asked, env)
    python = place / "bin/python"
    if asked["conda"]:
        verb, yes = ("update", []) if (place / "conda-meta").exists() else ("create", ["--yes"])
        with private(PLACE / "environment.yml", asked["conda"]) as file:
            words = ["env", verb, "--prefix", place, "--file", file, *yes]
            run("making the environment by conda", [program, *words], env=env)
    elif not python.exists():
        words = ["create", "--yes", "--prefix", place, "python=" + asked["python"], "numpy", "pip"]
        run("making the environment by conda", [program, *words], env=env)
    if not python.exists():
        raise Failed(
            "making the environment by conda", "No python: environment.yml names no package with one"
        )
    pip = pip_install(python)
    if asked["torch"]:
        run("installing torch", [*pip, *asked["torch"]], env=env)
    install(pip, place, asked, env)
    return python


def rehearse(place, asked):
    """In the local cloud: rehearse the GPUs in an environment of its own as the image's torch does."""
    for folder in ask(asked["image"], PLATFORM)["site"] if asked["image"] else ():
        hook = Path(folder, "rehearse_gpu.pth")
        for packages in place.glob("lib/python3*/site-packages") if hook.exists() else ():
            shutil.copytree(hook.with_suffix(""), packages / "rehearse_gpu", dirs_exist_ok=True)
            shutil.copy(hook, packages)


def setup(asked, python, env):
    """Run the commands that were not run yet, in their order, in the synced folder."""
    done = PLACE / ("setup-" + asked["setup_stamp"])
    count = read(done) or 0
    if count < len(asked["setup"]):
        WORK.mkdir(parents=True, exist_ok=True)
        root = [] if os.geteuid() == 0 else ["sudo", "-n"]
        run("waiting for the packages of the first boot", [*root, "python3", "-I", "-c", PACKAGE_LOCK])
    path = str(Path(python).parent) + os.pathsep + os.environ.get("PATH", "")
    for number, command in list(enumerate(asked["setup"]))[count:]:
        words = dict(env, PATH=path, DEBIAN_FRONTEND="noninteractive")
        run(command, ["bash", "-c", command], env=words, cwd=WORK)
        write(done, json.dumps(number + 1))


def ready_file(asked):
    """Return the file that tells of the finished environment; the image's own has one, too."""
    is_own = asked["kind"] == "image" and not (asked["lines"] or asked["projects"])
    return PLACE / "image.json" if is_own else PLACE / asked["stamp"] / "ready.json"


def look(asked):
    """Return what is there of the environment and its setup, None where something is to be done."""
    ready = read(ready_file(asked))
    if ready:
        os.utime(str(ready_file(asked)))  # `forget` removes what was not asked for
    done = read(PLACE / ("setup-" + asked["setup_stamp"])) or 0
    return ready if ready and done == len(asked["setup"]) else None


def build(asked):
    """Make what is missing; return the python and the facts."""
    ready, env = ready_file(asked), reach(asked)
    place, kept = ready.parent, None
    if place == PLACE:
        python = asked["image"]
    else:
        kept = read(ready)
        make = {"image": overlay, "venv": venv, "conda": conda}[asked["kind"]]
        python = kept["python"] if kept else make(place, asked, {**env, **asked["install"]})
        if not kept:
            add_projects(place, asked)
        if not kept and asked["kind"] != "image":
            rehearse(place, asked)
    setup(asked, python, env)
    if not kept:
        facts = ask(python, FACTS)
        facts.pop("torch_file", None)  # it tells where, not what
        kept = {"python": str(python), "facts": facts}
        write(ready, json.dumps(kept))
        forget(place)
    return kept


def forget(place):
    """Remove environments, the one first that was not asked for the longest, until the disk has room.

    This one stays, the one before it, and those in which a program runs.
    """
    made = sorted(PLACE.glob("*/ready.json"), key=lambda path: path.stat().st_mtime)
    for old in made[:-2]:
        disk = shutil.disk_usage(PLACE)
        if disk.free > disk.total * ROOM:
            return
        if old.parent != place and not is_used(old.parent):
            old.unlink()
            shutil.rmtree(old.parent, ignore_errors=True)


def is_used(place):
    """Return whether a program runs by the python of an environment."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if os.fsencode(str(place) + "/") in path.read_bytes():
                return True
    return False


def main():
    """Do what was asked; the answer is the last line."""
    signal.signal(signal.SIGTERM, stop)
    asked = json.loads(sys.stdin.read())
    try:
        found = look(asked)
        if not found and asked["do"] == "build":
            lock = locked(asked)
            found = look(asked) or build(asked)
            lock.close()
        if found:
            tell(ready=True, **found)
        else:
            tell(ready=False, python=None, facts={}, platform=ask(asked["image"], PLATFORM))
    except Failed as failed:
        tell(failed=failed.args[0], said=failed.args[1])
    except OSError as error:
        tell(failed="writing its files", said=str(error))


if __name__ == "__main__":
    main()
