"""Runs on a node as root (its own python3, 3.8 or newer, nothing else): makes it ready, says what it found.

Takes one word, a JSON object, and answers with one line of JSON, the last of its output. May be repeated.

    {"do": "inspect", "user", "address", "rank0", "expires": [seconds, text] or null, "idle": seconds or null,
     "patience_s", "gpus": how many there are to be, "gpus_patience_s"}
    {"do": "rekey"}
"""

import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

# Where a host that has no root of its own (the local cloud without namespaces) keeps its etc and opt.
ROOT = Path(os.environ.get("AWSDDP_ROOT", "/"))
ETC = ROOT / "etc/awsddp"
WATCHDOG = "awsddp-expiry.service"
CONDA = ("envs/*pytorch*/bin/python", "envs/*/bin/python", "bin/python")
# NCCL takes a prefix unless told "="; Gloo and TensorPipe take exact names and know no "=".
PROFILE = """\
# Written by awsddp, for login shells: the interface between the nodes, and the PATH that the ranks have.
export NCCL_SOCKET_IFNAME='={nic}'
export GLOO_SOCKET_IFNAME='{nic}'
export TP_SOCKET_IFNAME='{nic}'
{path}
"""
# What installs rsync where an image has none. apt-get may have to wait for the upgrades of the first boot.
INSTALL = {
    "dnf": [["dnf", "-y", "install", "rsync"]],
    "yum": [["yum", "-y", "install", "rsync"]],
    "apt-get": [
        ["apt-get", "update"],
        ["apt-get", "-y", "-o", "DPkg::Lock::Timeout=60", "install", "rsync"],
    ],
}
GPUS_POLL_S = 1.0
# What CUDA says until nvidia-fabricmanager has set up the NVSwitches.
NOT_YET = "system not yet initialized"
# Reads torch's version from its file: importing it takes seconds, and only a node with GPUs is asked more.
ASK = """
import importlib.util, json, os, sys
found = importlib.util.find_spec("torch")
facts = {}
if found and found.origin:
    names = {}
    path = os.path.join(os.path.dirname(found.origin), "version.py")
    with open(path) as stream:
        exec(compile(stream.read(), path, "exec"), names)
    shim = sys.modules.get("rehearse_gpu")
    facts = {"torch": str(names["__version__"]), "cuda": names.get("cuda"), "rehearsed": shim is not None}
    facts["gpus"] = shim.GPUS.count if shim else 0
    if sys.argv[1] == "gpus":
        import torch
        facts["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
        try:
            facts["gpus"] or torch.cuda.init()
        except Exception as error:
            facts["said"] = str(error)
print(json.dumps(facts))
"""


def rootless():
    """Whether ROOT is a folder of an ordinary user: then there is neither root nor another user."""
    return str(ROOT) != "/"


def run(*words, timeout_s=60):
    """Return (exit code, output) of a command; 127 where there is no such, 124 after `timeout_s`."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
    except FileNotFoundError:
        return 127, words[0] + ": no such command"
    except subprocess.TimeoutExpired:
        return 124, " ".join(words) + f": no end after {timeout_s:g} s"
    return done.returncode, done.stdout.decode(errors="replace").strip()


def write(path, text, mode):
    """Replace a file at once, with its mode from birth; leave it alone where it holds the text already."""
    if read(path) == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.rename(path)


def read(path):
    """Return a file's text, None where it is not there."""
    try:
        return path.read_text()
    except OSError:
        return None


def booted(patience_s):
    """Wait until cloud-init is through; return what it complains of, "" for nothing."""
    result = ROOT / "run/cloud-init/result.json"
    deadline = time.monotonic() + patience_s
    waiting = None if result.exists() else shutil.which("cloud-init")
    if waiting:  # it knows when there is nothing to wait for; the file alone tells of the end at once
        waiting = subprocess.Popen(
            [waiting, "status", "--wait"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while waiting.poll() is None and not result.exists():
                if time.monotonic() > deadline:
                    return f"the boot has no end after {patience_s:g} s"
                time.sleep(0.05)
        finally:
            waiting.kill()
            waiting.wait()
    if result.exists():
        return "; ".join(json.loads(read(result))["v1"]["errors"])
    return run("cloud-init", "status", "--long")[1] if waiting and waiting.returncode else ""


def watched(expires, idle):
    """Change the expiry and the idle time where that is asked for; return whether the watchdog lives."""
    if expires:
        write(ETC / "expires", "{} {}\n".format(*expires), 0o644)
    if idle is not None:
        # The local cloud's loopback mode shares its machine's sshd and jobs: nobody knows what is used there.
        write(ETC / "idle", f"{0 if rootless() else idle}\n", 0o644)
    return run("systemctl", "is-active", WATCHDOG)[1] == "active"


def final_host_key():
    """Make the node's own host key beside the one it shows, once; return its public half."""
    path, new = ETC / "host_key", ETC / "host_key.new"
    code, public = run("ssh-keygen", "-y", "-f", str(path))
    if code != 0:
        ETC.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        code, said = run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "awsddp", "-f", str(new))
        if code != 0:
            raise SystemExit("ssh-keygen: " + said)
        new.rename(path)
        code, public = run("ssh-keygen", "-y", "-f", str(path))
    return " ".join(public.split()[:2])


def rekey():
    """Let sshd show the final host key from now on."""
    shown = ROOT / "etc/ssh/ssh_host_ed25519_key"
    write(shown.with_name(shown.name + ".pub"), final_host_key() + " awsddp\n", 0o644)
    write(shown, read(ETC / "host_key"), 0o600)
    for unit in ("ssh.service", "sshd.service"):
        if run("systemctl", "is-active", unit)[1] == "active":
            code, said = run("systemctl", "reload", unit)
            if code != 0:
                raise SystemExit("sshd cannot be told of its new host key: " + said)
            return {}
    raise SystemExit("neither ssh.service nor sshd.service is active")


def interface(address, rank0):
    """Return the interface between the nodes: by the route to rank 0; on rank 0 the one with its address."""
    if address == rank0:
        for line in run("ip", "-4", "-o", "addr", "show")[1].splitlines():
            words = line.split()
            if "inet" in words and words[words.index("inet") + 1].split("/")[0] == address:
                return words[1].split("@")[0]
    found = re.search(r"\bdev (\S+)", run("ip", "-4", "-o", "route", "get", rank0)[1])
    return found.group(1) if found else None


def ask(python, what):
    """Return what a python says of its torch ("none"), and of the GPUs that it finds ("gpus")."""
    code, said = run(python, "-I", "-c", ASK, what, timeout_s=300)
    try:
        return json.loads(said.splitlines()[-1]) if code == 0 else {"said": said[-500:]}
    except (ValueError, IndexError):
        return {}


def environment(home):
    """Return the first python that has torch, with what it says of itself; else "python" is None."""
    places = [(ROOT, "opt/pytorch/bin/python"), *((ROOT, f"opt/conda/{python}") for python in CONDA)]
    places += [(home, f"{base}/{python}") for base in ("*conda*", "miniforge*") for python in CONDA]
    for place, pattern in places:
        for python in sorted(place.glob(pattern)):
            facts = ask(str(python), "none")
            if "torch" in facts:
                return dict(facts, python=str(python))
    return {"python": None, "torch": None, "cuda": None, "gpus": 0, "rehearsed": False}


def fabric():
    """Return the state of what sets up the NVSwitches, "active" where there are none."""
    if not any((ROOT / "dev").glob("nvidia-nvswitch*")):
        return "active"
    return run("systemctl", "is-active", "nvidia-fabricmanager")[1]


def count(python, wanted, patience_s):
    """Return how many GPUs torch finds, and where they are too few what is said of that.

    CUDA refuses to begin while the NVSwitches are set up: that is waited for, nothing else.
    """
    deadline = time.monotonic() + patience_s
    while True:
        state = fabric()
        found = ask(python, "gpus")
        said = found.get("said", "")
        whole = found.get("gpus", 0) >= wanted
        coming = state not in ("active", "failed") or (NOT_YET in said and state != "failed")
        if (whole and state == "active") or not coming or time.monotonic() > deadline:
            break
        time.sleep(GPUS_POLL_S)
    if whole:
        return {"gpus": found["gpus"]}
    smi = run("nvidia-smi", "-L")[1]
    told = ["nvidia-smi -L: " + (smi or "nothing"), "torch.cuda: " + (said or "no error")]
    told += [] if state == "active" else ["nvidia-fabricmanager: " + state]
    return {"gpus": found.get("gpus", 0), "gpus_said": "\n".join(told)}


def rsync():
    """Return whether rsync is there, and what its installation says where the image has none."""
    said = ""
    if shutil.which("rsync") is None and not rootless():
        manager = next(filter(shutil.which, INSTALL), None)
        said = "" if manager else "no " + ", ".join(INSTALL) + " to install it with"
        for words in INSTALL.get(manager, ()):
            said = " ".join(words) + ": " + run(*words, timeout_s=100)[1][-500:]
    return shutil.which("rsync") is not None, said


def driver():
    """Return the version of the node's GPU driver, None where there is none."""
    version = read(Path("/sys/module/nvidia/version"))
    if version:
        return version.strip()
    code, said = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return said.splitlines()[0] if code == 0 and said else None


def inspect(asked):
    """Make the node ready as far as it can be, and return what was found."""
    home = Path("~" if rootless() else "~" + asked["user"]).expanduser()
    nic = interface(asked["address"], asked["rank0"])
    for folder in (home / "awsddp", home / "awsddp/work"):
        folder.mkdir(exist_ok=True)
        if not rootless():
            shutil.chown(folder, asked["user"], pwd.getpwnam(asked["user"]).pw_gid)
    if not rootless():  # else the jobs' shared memory goes with the last login (RemoveIPC, logind.conf(5))
        run("loginctl", "enable-linger", asked["user"])
    facts = dict(
        environment(home),
        home=str(home),
        nic=nic,
        host_key=final_host_key(),
    )
    if nic:
        path = 'export PATH={}:"$PATH"'.format(shlex.quote(str(Path(facts["python"] or "/bin/sh").parent)))
        write(ROOT / "etc/profile.d/awsddp.sh", PROFILE.format(nic=nic, path=path), 0o644)
    facts["complaint"] = booted(asked["patience_s"])  # the boot goes on meanwhile
    facts["rsync"], facts["rsync_said"] = rsync()
    if asked["gpus"] and facts["python"]:  # the drivers are loaded, and their services up, by now
        facts.update(count(facts["python"], asked["gpus"], asked["gpus_patience_s"]))
    facts["driver"] = driver() if asked["gpus"] else None
    facts["watched"] = watched(asked["expires"], asked["idle"])
    return facts


def main():
    """Do what was asked; the answer is the last line."""
    asked = json.loads(sys.argv[1])
    answer = inspect(asked) if asked["do"] == "inspect" else rekey()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
