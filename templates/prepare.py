"""Prepare a node and report its facts. Runs on the node as root with the node's python3 (3.8 or newer).

Takes a JSON object as its argument, and prints the response in JSON as the last line. A call can be repeated.

    {"do": "inspect", "user", "address", "rank0", "expires": [seconds, text] or null, "idle": seconds or null,
     "patience_s", "gpus": expected number, "gpus_patience_s"}
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

# The folder that contains etc and opt. It is not / if the host has no root folder of its own (local cloud,
# loopback mode).
ROOT = Path(os.environ.get("AWSDDP_ROOT", "/"))
ETC = ROOT / "etc/awsddp"
WATCHDOG = "awsddp-expiry.service"
CONDA = ("envs/*pytorch*/bin/python", "envs/*/bin/python", "bin/python")
# NCCL expects a prefix, or "=" and a name; Gloo and TensorPipe expect a name.
PROFILE = """\
# Written by awsddp, for login shells: the interface between the nodes, and the PATH of the ranks.
export NCCL_SOCKET_IFNAME='={nic}'
export GLOO_SOCKET_IFNAME='{nic}'
export TP_SOCKET_IFNAME='{nic}'
{path}
"""
# The commands that install rsync. apt-get may have to wait for the first boot's upgrades.
INSTALL = {
    "dnf": [["dnf", "-y", "install", "rsync"]],
    "yum": [["yum", "-y", "install", "rsync"]],
    "apt-get": [
        ["apt-get", "update"],
        ["apt-get", "-y", "-o", "DPkg::Lock::Timeout=60", "install", "rsync"],
    ],
}
GPUS_POLL_S = 1.0
# CUDA's error contains this text until nvidia-fabricmanager has set up the NVSwitches.
NOT_YET = "system not yet initialized"
# This program reads torch's version from a file, because importing torch takes seconds. It imports torch only
# to count the GPUs.
TORCH_FACTS = """
import importlib.util, json, os, sys
spec = importlib.util.find_spec("torch")
facts = {}
if spec and spec.origin:
    names = {}
    path = os.path.join(os.path.dirname(spec.origin), "version.py")
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
            facts["error"] = str(error)
print(json.dumps(facts))
"""


def is_rootless():
    """Return True if ROOT is an ordinary user's folder: this program then has no root rights, and there are
    no other users."""
    return str(ROOT) != "/"


def run(*argv, timeout_s=60):
    """Return a command's (exit code, output); the code is 127 if there is no such command, 124 after a
    timeout."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
    except FileNotFoundError:
        return 127, argv[0] + ": no such command"
    except subprocess.TimeoutExpired:
        return 124, " ".join(argv) + f": not ended after {timeout_s:g} s"
    return done.returncode, done.stdout.decode(errors="replace").strip()


def write(path, text, mode):
    """Replace a file atomically with one that has `mode`, unless the file already has this text."""
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
    """Return the text in a file, or None if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return None


def wait_for_boot(patience_s):
    """Wait until cloud-init has ended, and return its errors, or "" if there are none."""
    result = ROOT / "run/cloud-init/result.json"
    deadline = time.monotonic() + patience_s
    waiting = None if result.exists() else shutil.which("cloud-init")
    # This command also ends if cloud-init is disabled; otherwise result.json appears before it ends.
    if waiting:
        waiting = subprocess.Popen(
            [waiting, "status", "--wait"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while waiting.poll() is None and not result.exists():
                if time.monotonic() > deadline:
                    return f"the boot has not ended after {patience_s:g} s"
                time.sleep(0.05)
        finally:
            waiting.kill()
            waiting.wait()
    if result.exists():
        return "; ".join(json.loads(read(result))["v1"]["errors"])
    return run("cloud-init", "status", "--long")[1] if waiting and waiting.returncode else ""


def update_watchdog(expires, idle):
    """Write the expiry and the idle time unless they are None; return True if the watchdog is running."""
    if expires:
        write(ETC / "expires", "{} {}\n".format(*expires), 0o644)
    if idle is not None:
        # A node in the local cloud's loopback mode shares sshd with its machine, so its idle time is unknown.
        write(ETC / "idle", f"{0 if is_rootless() else idle}\n", 0o644)
    return run("systemctl", "is-active", WATCHDOG)[1] == "active"


def ensure_host_key():
    """Create the node's final host key if it does not exist, and return the key's public half."""
    path, new = ETC / "host_key", ETC / "host_key.new"
    code, public = run("ssh-keygen", "-y", "-f", str(path))
    if code != 0:
        ETC.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        code, output = run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "awsddp", "-f", str(new))
        if code != 0:
            raise SystemExit("ssh-keygen: " + output)
        new.rename(path)
        code, public = run("ssh-keygen", "-y", "-f", str(path))
    return " ".join(public.split()[:2])


def rekey():
    """Switch sshd to the final host key."""
    host_key = ROOT / "etc/ssh/ssh_host_ed25519_key"
    write(host_key.with_name(host_key.name + ".pub"), ensure_host_key() + " awsddp\n", 0o644)
    write(host_key, read(ETC / "host_key"), 0o600)
    for unit in ("ssh.service", "sshd.service"):
        if run("systemctl", "is-active", unit)[1] == "active":
            code, output = run("systemctl", "reload", unit)
            if code != 0:
                raise SystemExit("sshd cannot load its new host key: " + output)
            return {}
    raise SystemExit("neither ssh.service nor sshd.service is active")


def find_interface(address, rank0):
    """Return the network interface that has the route to rank 0's node.

    On rank 0's node, return the interface that has the node's address. Return None if there is no such
    interface.
    """
    if address == rank0:
        for line in run("ip", "-4", "-o", "addr", "show")[1].splitlines():
            fields = line.split()
            if "inet" in fields and fields[fields.index("inet") + 1].split("/")[0] == address:
                return fields[1].split("@")[0]
    match = re.search(r"\bdev (\S+)", run("ip", "-4", "-o", "route", "get", rank0)[1])
    return match.group(1) if match else None


def torch_facts(python, mode):
    """Return the facts about a python's torch, including the number of GPUs if `mode` is "gpus"."""
    code, output = run(python, "-I", "-c", TORCH_FACTS, mode, timeout_s=300)
    try:
        return json.loads(output.splitlines()[-1]) if code == 0 else {"error": output[-500:]}
    except (ValueError, IndexError):
        return {}


def find_environment(home):
    """Return the facts about the first python that has torch; "python" is None if no python has torch."""
    patterns = [(ROOT, "opt/pytorch/bin/python"), *((ROOT, f"opt/conda/{python}") for python in CONDA)]
    patterns += [(home, f"{base}/{python}") for base in ("*conda*", "miniforge*") for python in CONDA]
    for folder, pattern in patterns:
        for python in sorted(folder.glob(pattern)):
            facts = torch_facts(str(python), "none")
            if "torch" in facts:
                return dict(facts, python=str(python))
    return {"python": None, "torch": None, "cuda": None, "gpus": 0, "rehearsed": False}


def fabric_state():
    """Return the state of nvidia-fabricmanager, or "active" if the node has no NVSwitches."""
    if not any((ROOT / "dev").glob("nvidia-nvswitch*")):
        return "active"
    return run("systemctl", "is-active", "nvidia-fabricmanager")[1]


def count_gpus(python, wanted, patience_s):
    """Return {"gpus": number of GPUs that torch finds}, with "gpus_said": evidence, if there are too few.

    Waits only until the NVSwitches are set up, because CUDA cannot be initialized before.
    """
    deadline = time.monotonic() + patience_s
    while True:
        state = fabric_state()
        facts = torch_facts(python, "gpus")
        error = facts.get("error", "")
        has_gpus = facts.get("gpus", 0) >= wanted
        is_starting = state not in ("active", "failed") or (NOT_YET in error and state != "failed")
        if (has_gpus and state == "active") or not is_starting or time.monotonic() > deadline:
            break
        time.sleep(GPUS_POLL_S)
    if has_gpus:
        return {"gpus": facts["gpus"]}
    smi = run("nvidia-smi", "-L")[1]
    evidence = ["nvidia-smi -L: " + (smi or "nothing"), "torch.cuda: " + (error or "no error")]
    evidence += [] if state == "active" else ["nvidia-fabricmanager: " + state]
    return {"gpus": facts.get("gpus", 0), "gpus_said": "\n".join(evidence)}


def install_rsync():
    """Install rsync if it is missing; return whether rsync is installed, and the installation's output."""
    output = ""
    if shutil.which("rsync") is None and not is_rootless():
        manager = next(filter(shutil.which, INSTALL), None)
        output = "" if manager else "no " + ", ".join(INSTALL) + " to install it with"
        for argv in INSTALL.get(manager, ()):
            output = " ".join(argv) + ": " + run(*argv, timeout_s=100)[1][-500:]
    return shutil.which("rsync") is not None, output


def driver_version():
    """Return the version of the node's GPU driver, or None if there is no driver."""
    version = read(Path("/sys/module/nvidia/version"))
    if version:
        return version.strip()
    code, output = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output.splitlines()[0] if code == 0 and output else None


def inspect(request):
    """Prepare the node as far as possible, and return facts about the node."""
    home = Path("~" if is_rootless() else "~" + request["user"]).expanduser()
    nic = find_interface(request["address"], request["rank0"])
    for folder in (home / "awsddp", home / "awsddp/work"):
        folder.mkdir(exist_ok=True)
        if not is_rootless():
            shutil.chown(folder, request["user"], pwd.getpwnam(request["user"]).pw_gid)
    # Without lingering, systemd removes the jobs' shared memory when the last login ends (RemoveIPC in
    # logind.conf(5)).
    if not is_rootless():
        run("loginctl", "enable-linger", request["user"])
    facts = dict(
        find_environment(home),
        home=str(home),
        nic=nic,
        host_key=ensure_host_key(),
    )
    if nic:
        path = 'export PATH={}:"$PATH"'.format(shlex.quote(str(Path(facts["python"] or "/bin/sh").parent)))
        write(ROOT / "etc/profile.d/awsddp.sh", PROFILE.format(nic=nic, path=path), 0o644)
    facts["complaint"] = wait_for_boot(request["patience_s"])  # late, because the boot continues
    facts["rsync"], facts["rsync_said"] = install_rsync()
    if request["gpus"] and facts["python"]:  # done after the boot, which starts drivers and their services
        facts.update(count_gpus(facts["python"], request["gpus"], request["gpus_patience_s"]))
    facts["driver"] = driver_version() if request["gpus"] else None
    facts["watched"] = update_watchdog(request["expires"], request["idle"])
    return facts


def main():
    """Serve the request and print the response as the last line."""
    request = json.loads(sys.argv[1])
    response = inspect(request) if request["do"] == "inspect" else rekey()
    sys.stdout.write("\n" + json.dumps(response) + "\n")


if __name__ == "__main__":
    main()
