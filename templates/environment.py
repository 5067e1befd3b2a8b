"""Create the ranks' environment. Runs on a node with its python3 (3.8 or newer, standard library only).

Reads a JSON object from stdin and writes lines of JSON: {"at": text} for progress, and the response last.

    {"do": "look" or "build", "client": USER@HOST, "stamp", "setup_stamp", "kind", "python",
     "image": path of the image's python, "setup": [], "lines": [], "constraints": [], "torch": [], "conda",
     "projects": [{"info", "metadata", "entry_points", "sources": []}],
     "environ": {}: variables of all commands, "install": {}: of package installers, "ca", "miniforge": URL}

    {"ready": bool, "python": path, "facts": {}, "platform": {}}     no "platform" if ready
    {"failed": step, "said": its last lines}

An environment is in ~/awsddp/env/STAMP, and it is complete once it has a ready.json. An interrupted build is
continued. Old environments are removed if the disk is short of space, except the latest and those in use.
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
ENVIRONMENTS = HOME / "awsddp/env"
WORK = HOME / "awsddp/work"
LOCK_S = 1800
TAIL_LINES = 40
PROGRESS_S = 2
FREE_SHARE = 0.25  # the share of a disk that is kept free for other environments and for results
POLL_MS = 500
END_S = 5
PIPE_BYTES = 2**20  # this is larger than a pipe's buffer
# The image's python runs this to report the facts that the client needs to resolve packages.
PLATFORM = """
import json, platform, site, sys
from importlib import metadata
packages = {dist.metadata["Name"]: dist.version for dist in metadata.distributions() if dist.metadata["Name"]}
print(json.dumps({"version": platform.python_version(), "machine": platform.machine(),
    "libc": platform.libc_ver()[1], "packages": packages, "site": site.getsitepackages()}))
"""
# The environment's python runs this at the end to report the facts that must be equal on all nodes.
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
# Runs as root and waits for other package installations' locks, such as those during the first boot.
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
"""The state of this build, which is recorded for other clients that wait for the build."""


class Failed(Exception):
    """A step failed. Its arguments are the step and the step's last output."""


def send(**fields):
    """Send one line of JSON to the client."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def run_step(step, argv, env=None, cwd=None):
    """Run a command, send some of its lines as progress, and return its output. Raises Failed."""
    send(at=step)
    record_build(doing=step)
    try:
        process = subprocess.Popen(
            [str(arg) for arg in argv],
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
            lines = read_output(step, process)
        except (BrokenPipeError, SystemExit):  # the client disconnected, or SIGTERM was received
            terminate(process)
            raise
    if process.wait() != 0:
        tail = lines[-TAIL_LINES:] or ["no output"]
        raise Failed(step, "\n".join([*tail, f"exit code {process.returncode}"]))
    return "\n".join(lines)


def read_output(step, process):
    """Return the lines that a command prints until it ends. Processes that the command started may still
    write later.

    Raises SystemExit if the client has disconnected.
    """
    output, reported, unread = [], time.monotonic(), b""
    pipe, client = process.stdout.fileno(), sys.stdout.fileno()
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    poller.register(client, 0)  # this reports only errors and hang-ups
    while True:
        is_over = process.poll() is not None
        ready = [descriptor for descriptor, _ in poller.poll(0 if is_over else POLL_MS)]
        if client in ready:
            sys.exit("the client is gone")
        data = os.read(pipe, PIPE_BYTES) if pipe in ready else b""
        *lines, unread = (unread + data).split(b"\n")
        is_closed = pipe in ready and not data
        for line in [*lines, unread] if is_over or is_closed else lines:
            text = line.decode(errors="replace").rstrip()
            output += [text] if line is not unread or text else []
            if text.strip() and time.monotonic() - reported > PROGRESS_S:
                reported = time.monotonic()
                send(at=step + ": " + text.partition(" (from ")[0].strip()[:200])
        if is_closed:
            return output
        # Keep a reader on the pipe: without one, SIGPIPE would end processes that the command started.
        if is_over:
            subprocess.Popen(["cat"], stdin=pipe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return output


def terminate(process):
    """Terminate a command and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(END_S)


def on_sigterm(number, frame):
    """Handle SIGTERM: end the current command, then this program."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit("SIGTERM ended this build")


def run_json(python, program):
    """Run PLATFORM or FACTS with a python, and return the JSON in the last line of output. Raises Failed."""
    if program == FACTS:
        send(at="importing torch, to compare the nodes")
    done = subprocess.run([str(python), "-c", program], stdin=subprocess.DEVNULL, capture_output=True)
    try:
        return json.loads(done.stdout.decode().splitlines()[-1])
    except (ValueError, IndexError):
        stderr = done.stderr.decode(errors="replace")[-2000:]
        raise Failed("running " + str(python), stderr or "no output") from None


def write(path, text, mode=0o644):
    """Replace a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    new.touch(mode=mode)
    new.write_text(text)
    new.replace(path)


@contextlib.contextmanager
def private_file(path, text):
    """Write, with mode 0600, a file that may contain passwords; remove it when the block ends."""
    write(path, text, mode=0o600)
    try:
        yield path
    finally:
        path.unlink()


def read(path):
    """Return the JSON in a file, or None if the file does not exist or is invalid."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def record_build(**fields):
    """Record the state of this build for clients that wait for it."""
    BUILD.update(fields)
    with contextlib.suppress(OSError):  # if the disk is full, the build's commands report it
        write(ENVIRONMENTS / "build.json", json.dumps(BUILD))


def wait_for_lock(request):
    """Wait until no other build runs on this node, and return the lock file."""
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    lock = (ENVIRONMENTS / "lock").open("w")
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            record_build(
                client=request["client"], pid=os.getpid(), since=time.strftime("%H:%M", time.gmtime())
            )
            return lock
        except OSError:
            build = {"client": "?", "pid": 0, "since": "?", "doing": "?"}
            build.update(read(ENVIRONMENTS / "build.json") or {})
            text = "waiting for a build of {client} on this node, since {since} UTC, process {pid}: {doing}"
            if time.monotonic() > deadline:
                raise Failed(text.format(**build), f"the build has not ended after {LOCK_S} s") from None
            send(at=text.format(**build))
            time.sleep(1)


def installer_environ(request):
    """Return the environment variables for pip, uv and conda in this installation."""
    env = dict(request["environ"])
    if request["ca"]:
        bundle = ENVIRONMENTS / "ca.pem"
        write(bundle, request["ca"])
        names = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CONDA_SSL_VERIFY")
        env.update(dict.fromkeys(names, str(bundle)))
    return env


def pip_install(python):
    """Return the beginning of a `pip install` command."""
    options = ["--no-input", "--progress-bar", "off", "--retries", "2"]
    return [python, "-m", "pip", "--disable-pip-version-check", "install", *options]


def install(pip, prefix, request, env, pins=()):
    """Install the project's packages with the command `pip`. `pins` fix installed packages' versions."""
    if not request["lines"]:
        return
    files = {"requirements": request["lines"], "constraints": [*request["constraints"], *pins]}
    with contextlib.ExitStack() as stack:
        lines, constraints = (
            stack.enter_context(
                private_file(prefix / f"awsddp/{name}.txt", "".join(f"{line}\n" for line in content))
            )
            for name, content in files.items()
        )
        run_step("installing", [*pip, "-r", lines, "-c", constraints], env=env)


def link_programs(prefix, folders):
    """Write the console scripts (torchrun...) of the packages in `folders`, for the environment's python."""
    from importlib import metadata  # imported late, because checking for an environment does not need it

    python = prefix / "bin/python"
    entries = [entry for dist in metadata.distributions(path=folders) for entry in dist.entry_points]
    for entry in entries:
        path = prefix / "bin" / entry.name
        if entry.group == "console_scripts" and not path.exists():
            module, _, name = entry.value.partition("[")[0].strip().partition(":")
            path.write_text(PROGRAM.format(python, module, name.split(".")[0], name))
            path.chmod(0o755)


def add_projects(prefix, request):
    """Add the metadata, entry points and .pth file that an installation of the synced projects would add.

    In sys.path, the folders of the .pth file come after the ranks' PYTHONPATH. This order is needed, because
    the ranks' project folder may differ from WORK.
    """
    for packages in prefix.glob("lib/python3*/site-packages") if request["projects"] else ():
        for project in request["projects"]:
            write(packages / project["info"] / "METADATA", project["metadata"])
            write(packages / project["info"] / "entry_points.txt", project["entry_points"])
        folders = [WORK / folder for project in request["projects"] for folder in project["sources"]]
        write(packages / "awsddp_projects.pth", "".join(f"{folder}\n" for folder in folders))
        link_programs(prefix, [str(packages)])


def make_overlay(prefix, request, env):
    """Create a venv and add the image's packages: a venv made from a venv sees only the base Python's
    packages."""
    python = prefix / "bin/python"
    if not python.exists():
        run_step("making the environment", [request["image"], "-m", "venv", "--without-pip", prefix])
    image_facts = run_json(request["image"], PLATFORM)
    version = image_facts["version"].split(".")
    packages = prefix / "lib" / "python{}.{}".format(*version[:2]) / "site-packages"
    adding = "; ".join(f"site.addsitedir({folder!r})" for folder in image_facts["site"])
    write(packages / "awsddp_image.pth", "import site; " + adding + "\n")
    install(pip_install(python), prefix, request, env)
    send(at="linking the image's programs")
    link_programs(prefix, image_facts["site"])
    actual, expected = run_json(python, FACTS), run_json(request["image"], FACTS)
    if actual.get("torch_file") != expected.get("torch_file"):
        why = "import torch finds {} ({}), not the image's {} ({})"
        values = [facts.get(key) for facts in (actual, expected) for key in ("torch", "torch_file")]
        raise Failed("keeping the image's torch", why.format(*values))
    return python


def find_program(name, *paths):
    """Return the path of a program on the PATH or among `paths`, or "" if it is not installed."""
    return shutil.which(name) or next((str(path) for path in paths if path.exists()), "")


def ensure_uv(request, env):
    """Return the path of uv; install uv if it is missing."""
    fallback = ENVIRONMENTS / "tools/bin/uv"
    program = find_program("uv", HOME / ".local/bin/uv", fallback)
    if not program:
        argv = [*pip_install(request["image"]), "--target", ENVIRONMENTS / "tools", "uv"]
        run_step("installing uv", argv, env=env)
    return program or str(fallback)


def make_venv(prefix, request, env):
    """Create a venv with uv and the requested Python, and install torch and then the packages."""
    program = ensure_uv(request, env)
    python = prefix / "bin/python"
    if not python.exists():
        args = ["venv", "--no-project", "--python", request["python"] or request["image"], prefix]
        run_step("making the environment", [program, *args], env=env)
    no_index = ["--no-index"] if "PIP_NO_INDEX" in env else []
    pip = [program, "pip", "install", "--no-progress", *no_index, "--python", python]
    run_step("installing torch", [*pip, *request["torch"]], env=env)
    versions = run_json(python, PLATFORM)["packages"]
    pins = [f"{name}=={versions[name]}" for name in ("torch", "torchvision") if name in versions]
    install(pip, prefix, request, env, pins)
    return python


def ensure_conda(request, env):
    """Return the path of conda; install miniforge if conda is missing."""
    fallback = ENVIRONMENTS / "miniforge/bin/conda"
    program = find_program(
        "conda", Path("/opt/conda/bin/conda"), *sorted(HOME.glob("mini*/bin/conda")), fallback
    )
    if not program:
        installer = ENVIRONMENTS / "miniforge.sh"
        url = request["miniforge"].format(platform.machine())
        options = ["-fsSL", "--retry", "2", "--connect-timeout", "20", "--speed-time", "30", "-m", "900"]
        run_step("fetching miniforge", ["curl", *options, "-o", installer, url], env=env)
        run_step(
            "installing miniforge", ["bash", installer, "-b", "-u", "-p", ENVIRONMENTS / "miniforge"], env=env
        )
        installer.unlink()
    return program or str(fallback)


def make_conda(prefix, request, env):
    """Create a conda environment from environment.yml or with the requested Python; install pip packages."""
    program = ensure_conda(request, env)
    python = prefix / "bin/python"
    if request["conda"]:
        verb, yes = ("update", []) if (prefix / "conda-meta").exists() else ("create", ["--yes"])
        with private_file(ENVIRONMENTS / "environment.yml", request["conda"]) as file:
            args = ["env", verb, "--prefix", prefix, "--file", file, *yes]
            run_step("making the environment by conda", [program, *args], env=env)
    elif not python.exists():
        args = ["create", "--yes", "--prefix", prefix, "python=" + request["python"], "numpy", "pip"]
        run_step("making the environment by conda", [program, *args], env=env)
    if not python.exists():
        raise Failed(
            "making the environment by conda", "There is no Python: no package in environment.yml contains it"
        )
    pip = pip_install(python)
    if request["torch"]:
        run_step("installing torch", [*pip, *request["torch"]], env=env)
    install(pip, prefix, request, env)
    return python


def copy_rehearsal(prefix, request):
    """Copy rehearse_gpu, if the image has it (in the local cloud), into the environment."""
    for folder in run_json(request["image"], PLATFORM)["site"] if request["image"] else ():
        hook = Path(folder, "rehearse_gpu.pth")
        for packages in prefix.glob("lib/python3*/site-packages") if hook.exists() else ():
            shutil.copytree(hook.with_suffix(""), packages / "rehearse_gpu", dirs_exist_ok=True)
            shutil.copy(hook, packages)


def run_setup(request, python, env):
    """Run the env.setup commands that have not been run yet, in the project folder."""
    done = ENVIRONMENTS / ("setup-" + request["setup_stamp"])
    count = read(done) or 0
    if count < len(request["setup"]):
        WORK.mkdir(parents=True, exist_ok=True)
        root = [] if os.geteuid() == 0 else ["sudo", "-n"]
        run_step("waiting for the packages of the first boot", [*root, "python3", "-I", "-c", PACKAGE_LOCK])
    path = str(Path(python).parent) + os.pathsep + os.environ.get("PATH", "")
    for number, command in list(enumerate(request["setup"]))[count:]:
        variables = dict(env, PATH=path, DEBIAN_FRONTEND="noninteractive")
        run_step(command, ["bash", "-c", command], env=variables, cwd=WORK)
        write(done, json.dumps(number + 1))


def ready_file(request):
    """Return the path of the file that marks the environment, or the plain image, as ready."""
    is_plain_image = request["kind"] == "image" and not (request["lines"] or request["projects"])
    return ENVIRONMENTS / "image.json" if is_plain_image else ENVIRONMENTS / request["stamp"] / "ready.json"


def find_ready(request):
    """Return the environment's Python path and facts, or None if the environment or its setup is
    incomplete."""
    ready = read(ready_file(request))
    if ready:
        os.utime(str(ready_file(request)))  # `remove_old` begins with the least recently used environment
    done = read(ENVIRONMENTS / ("setup-" + request["setup_stamp"])) or 0
    return ready if ready and done == len(request["setup"]) else None


def build(request):
    """Create the environment, run its setup, and return the environment's Python path and facts."""
    ready, env = ready_file(request), installer_environ(request)
    prefix, environment = ready.parent, None
    if prefix == ENVIRONMENTS:
        python = request["image"]
    else:
        environment = read(ready)
        make = {"image": make_overlay, "venv": make_venv, "conda": make_conda}[request["kind"]]
        python = (
            environment["python"] if environment else make(prefix, request, {**env, **request["install"]})
        )
        if not environment:
            add_projects(prefix, request)
        if not environment and request["kind"] != "image":
            copy_rehearsal(prefix, request)
    run_setup(request, python, env)
    if not environment:
        facts = run_json(python, FACTS)
        facts.pop("torch_file", None)  # this path may differ between nodes
        environment = {"python": str(python), "facts": facts}
        write(ready, json.dumps(environment))
        remove_old(prefix)
    return environment


def remove_old(prefix):
    """Remove environments, the least recently used first, until the disk has FREE_SHARE free.

    This environment, the previous one, and environments in use are kept.
    """
    ready_files = sorted(ENVIRONMENTS.glob("*/ready.json"), key=lambda path: path.stat().st_mtime)
    for ready in ready_files[:-2]:
        disk = shutil.disk_usage(ENVIRONMENTS)
        if disk.free > disk.total * FREE_SHARE:
            return
        if ready.parent != prefix and not is_used(ready.parent):
            ready.unlink()
            shutil.rmtree(ready.parent, ignore_errors=True)


def is_used(prefix):
    """Return True if a program in the environment is running."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            if os.fsencode(str(prefix) + "/") in path.read_bytes():
                return True
    return False


def main():
    """Serve the request and print the response as the last line."""
    signal.signal(signal.SIGTERM, on_sigterm)
    request = json.loads(sys.stdin.read())
    try:
        environment = find_ready(request)
        if not environment and request["do"] == "build":
            lock = wait_for_lock(request)
            environment = find_ready(request) or build(request)
            lock.close()
        if environment:
            send(ready=True, **environment)
        else:
            send(ready=False, python=None, facts={}, platform=run_json(request["image"], PLATFORM))
    except Failed as error:
        send(failed=error.args[0], said=error.args[1])
    except OSError as error:
        send(failed="writing its files", said=str(error))


if __name__ == "__main__":
    main()
