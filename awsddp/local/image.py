"""A node's disk image: this machine's system, changed to look like a fresh image, and torch's environment.

A node's root is an overlay with three layers, from top to bottom: the node's own folder, a common layer, and
`/`. The common layer hides everything on the machine that is not part of its system (home folders, data,
services, accounts, secrets) with whiteouts and opaque folders, and adds a small configuration for systemd,
sshd and cloud-init.

Deep Learning AMIs have torch at /opt/pytorch. A node gets torch's environment from a cache, which is mounted
read-only at this path. The environment's Python may be in a home folder that nodes do not see (pyenv, uv), so
this Python is mounted at /opt/python, and the environment refers to that path.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from awsddp.compat.types import GPU_TYPES
from awsddp.errors import LocalCloudError
from awsddp.local.machine import run
from awsddp.util.shipped_files import shipped_folder

TOP_SYSTEM = {"bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "var"}
TOP_EMPTY = ("boot", "dev", "home", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp")

# Entries in /etc that belong to the system and reveal nothing about the machine's users, services or secrets.
ETC_SYSTEM = {
    *("alternatives", "adduser.conf", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "dbus-1"),
    *("debian_version", "default", "deluser.conf", "dpkg", "gai.conf", "host.conf", "inputrc", "issue"),
    *("issue.net", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf", "locale.gen"),
    *("localtime", "login.defs", "logrotate.d", "lsb-release", "magic", "magic.mime", "mime.types"),
    *("mke2fs.conf", "mtab", "networks", "os-release", "pam.conf", "pam.d", "perl", "profile", "protocols"),
    *("python3", "python3.11", "python3.12", "python3.13", "rpc", "security", "selinux", "services", "ssl"),
    *("shells", "skel", "sudo.conf", "terminfo"),
    *("timezone", "vim", "xattr.conf"),
}
VAR_KEPT = {"lib", "lock", "run"}
VAR_EMPTY = ("backups", "cache", "local", "log", "mail", "opt", "spool", "tmp")
VAR_LIB_KEPT = {"dpkg", "pam", "python", "ucf"}
VAR_LIB_EMPTY = ("apt", "cloud", "dbus", "misc", "private", "sudo", "systemd")

# These units are masked to save inotify instances, whose limit all nodes share
# (fs.inotify.max_user_instances): a path unit uses one, and a user's systemd uses three.
MASKED_UNITS = (
    "getty.target",
    "systemd-ask-password-console.path",
    "systemd-ask-password-wall.path",
    "systemd-firstboot.service",
    "systemd-random-seed.service",
    "user@.service",
)

# The node imitates an Ubuntu image.
CLOUD_CFG = """\
datasource_list: [NoCloud]
network: {config: disabled}
users: [default]
disable_root: true
ssh_pwauth: false
ssh_genkeytypes: [ed25519]
cloud_init_modules: [bootcmd, write-files, set_hostname, users-groups, ssh]
cloud_config_modules: [set-passwords, runcmd]
cloud_final_modules: [write-files-deferred, scripts-user, ssh-authkey-fingerprints, keys-to-console,
  final-message]
system_info:
  distro: ubuntu
  default_user:
    name: ubuntu
    lock_passwd: true
    groups: [adm, sudo]
    sudo: ["ALL=(ALL) NOPASSWD:ALL"]
    shell: /bin/bash
"""

SSHD_CONFIG = Path("/usr/share/openssh/sshd_config")
"""The openssh package's default configuration, which a fresh system has in /etc/ssh."""
# The node creates this file once sshd answers. The daemon sees the file through a bind mount, and sets the
# instance's state to "running".
UP_MARK = "var/lib/misc/answers"
UP_UNIT = f"""\
[Unit]
Description=Tells the local cloud that this instance answers
After=ssh.service systemd-user-sessions.service
[Service]
Type=oneshot
ExecStart=/bin/touch /{UP_MARK}
"""

KERNEL_LOG = str(Path(UP_MARK).with_name("kernel.log"))
"""A node's file with the kernel's messages about a failed GPU. It exists only after the fault `xid`."""
DMESG = f"""\
#!/bin/sh
# A node of the local cloud shares its kernel with the machine, and cannot read the kernel's log.
if [ -e /{KERNEL_LOG} ]; then exec cat /{KERNEL_LOG}; fi
exec /usr/bin/dmesg "$@"
"""

FILES = {
    "etc/environment": 'PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n',
    "etc/machine-id": "",
    "etc/motd": "A node of awsddp's local cloud. Its GPUs are simulated.\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\ngshadow: files\nhosts: files\n"
    "networks: files\nprotocols: files\nservices: files\n",
    # If this file did not exist, cloud-init would write it, and then restart an sshd that already answers.
    "etc/ssh/sshd_config.d/50-cloud-init.conf": "PasswordAuthentication no\n",
    "etc/sudoers": "Defaults env_reset\n"
    'Defaults secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n'
    "root ALL=(ALL:ALL) ALL\n%sudo ALL=(ALL:ALL) ALL\n@includedir /etc/sudoers.d\n",
    "etc/systemd/system/answers.service": UP_UNIT,
    "usr/local/bin/dmesg": DMESG,
}


def build_layer(folder: Path) -> None:
    """Create the layer in `folder`, which must not exist yet."""
    building = folder.with_name(folder.name + ".new")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True, mode=0o755)
    _mask(Path("/"), building, kept=TOP_SYSTEM, empty=TOP_EMPTY)
    _mask(
        Path("/etc"), building / "etc", kept=ETC_SYSTEM, empty=("apt", "ssh", "systemd", "cloud", "sudoers.d")
    )
    # The public certificates stay visible, and the machine's private keys are hidden.
    _mask(Path("/etc/ssl"), building / "etc/ssl", kept={"certs", "openssl.cnf"}, empty=())
    _mask(Path("/var"), building / "var", kept=VAR_KEPT, empty=VAR_EMPTY)
    _mask(Path("/var/lib"), building / "var/lib", kept=VAR_LIB_KEPT, empty=VAR_LIB_EMPTY)
    (building / "usr").mkdir()
    _make_opaque(building / "usr/local")
    for path in ("usr/local/bin", "usr/local/sbin", "usr/local/lib", "opt/pytorch", "opt/python"):
        (building / path).mkdir(parents=True, exist_ok=True)
    for path in ("tmp", "var/tmp"):
        (building / path).chmod(0o1777)
    (building / "root").chmod(0o700)
    for name, text in FILES.items():
        _write(building / name, text)
    (building / "etc/sudoers").chmod(0o440)
    (building / "usr/local/bin/dmesg").chmod(0o755)
    _write(building / "etc/ssh/sshd_config", SSHD_CONFIG.read_text())
    _write(building / "etc/cloud/cloud.cfg", CLOUD_CFG)
    logging = Path("/etc/cloud/cloud.cfg.d/05_logging.cfg")
    _write(building / logging.relative_to("/"), logging.read_text())
    _enable_units(building)
    _write_accounts(building)
    building.rename(folder)


def _mask(machine: Path, layer: Path, *, kept: set[str], empty: tuple[str, ...]) -> None:
    """Hide all entries in a folder on the machine except `kept`. The folders in `empty` stay visible, but
    empty."""
    layer.mkdir(exist_ok=True)
    for entry in machine.iterdir():
        if entry.name not in kept and entry.name not in empty:
            os.mknod(layer / entry.name, stat.S_IFCHR, os.makedev(0, 0))
    for name in empty:
        _make_opaque(layer / name)


def _make_opaque(folder: Path) -> None:
    folder.mkdir()
    os.setxattr(folder, "trusted.overlay.opaque", b"y")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)


def _enable_units(layer: Path) -> None:
    system = layer / "etc/systemd/system"
    wants = system / "multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (system / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
    (system / "sshd.service").symlink_to("/lib/systemd/system/ssh.service")
    # Enable only units that a fresh Ubuntu image would start, and no unit that waits for hardware.
    units = Path("/lib/systemd/system")
    always = ("ssh.service", "cloud-config.service", "cloud-final.service")
    for path in (*map(units.joinpath, always), *units.glob("cloud-init*.service")):
        if "hotplug" not in path.name:
            (wants / path.name).symlink_to(path)
    (wants / "answers.service").symlink_to("../answers.service")
    for unit in MASKED_UNITS:
        (system / unit).symlink_to("/dev/null")
    generators = layer / "etc/systemd/system-generators"
    generators.mkdir()
    for generator in Path("/lib/systemd/system-generators").iterdir():
        (generators / generator.name).symlink_to("/dev/null")


def _write_accounts(layer: Path) -> None:
    """Write the system's accounts and groups, but no passwords, group members or human users."""
    for name, shadow_name in (("passwd", "shadow"), ("group", "gshadow")):
        rows = [line.split(":") for line in Path("/etc", name).read_text().splitlines()]
        rows = [fields for fields in rows if not 1000 <= int(fields[2]) < 65534]
        if name == "group":
            rows = [[*fields[:3], ""] for fields in rows]
        _write(layer / "etc" / name, "".join(":".join(fields) + "\n" for fields in rows))
        shadow = ":*:19000:0:99999:7:::" if name == "passwd" else ":*::"
        _write(layer / "etc" / shadow_name, "".join(f"{fields[0]}{shadow}\n" for fields in rows))
        (layer / "etc" / shadow_name).chmod(0o640)


TORCH_VERSION = "2.13.0"
TORCHVISION_VERSION = "0.28.0"
OTHER_PACKAGES = ("numpy", "pillow", "boto3")  # other packages that Deep Learning AMIs have
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_NAME = "-".join(("torch", TORCH_VERSION, "torchvision", TORCHVISION_VERSION, *OTHER_PACKAGES))
TORCH_FOLDER = Path("/opt/pytorch")
BASE = Path(sys.base_prefix)
BASE_IN_NODE = BASE if Path("/usr") == BASE else Path("/opt/python")
"""The folder that contains this process's Python in a node."""
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
BASE_PYTHON = BASE / "bin" / PYTHON
PACKAGES = Path("lib", PYTHON, "site-packages")
"""The folder that contains an environment's packages, relative to the environment."""


def cache_folder() -> Path:
    """Return $AWSDDP_CACHE if set, or /var/cache/awsddp for root, or awsddp in the user's cache folder."""
    if folder := os.environ.get("AWSDDP_CACHE"):
        return Path(folder)
    if os.geteuid() == 0:
        return Path("/var/cache/awsddp")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "awsddp"


def ensure_torch(mode: str, *, on_event: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder of torch's environment in the cache. If the environment is missing, install it, which
    takes minutes.

    :param mode: the local cloud's mode. Loopback mode uses only the packages, not the interpreter.
    :raises LocalCloudError: torch could not be installed.
    """
    cache = cache_folder()
    folder = cache / f"{_NAME}-python-{platform.python_version()}-{platform.machine()}"
    if folder.exists():
        return folder
    same_minor = sorted(cache.glob(f"{_NAME}-{PYTHON.replace('python', 'python-')}.*-{platform.machine()}"))
    if same_minor and mode == "loopback":
        return same_minor[-1]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                on_event(f"installing torch {TORCH_VERSION} for the local cloud, once, into {folder}")
                _install(folder)
    except OSError as error:
        raise LocalCloudError(
            "torch for the local cloud cannot be kept in its cache",
            why=str(error),
            next_step="awsddp local stop   # then set AWSDDP_CACHE to a folder with 3 GB free, and try again",
        ) from error
    return folder


def find_python_library() -> Path | None:
    """Return the path of the shared Python library that a node needs from outside /usr, or None if it needs
    none."""
    # sysconfig is not used, because in Python 3.11 it returns None to the second of two threads that call it
    # at the same time.
    library = BASE / "lib" / f"lib{PYTHON}{sys.abiflags}.so.1.0"
    return library if BASE_IN_NODE != BASE and library.exists() else None


def _install(folder: Path) -> None:
    building = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(building, ignore_errors=True)
    index = os.environ.get("AWSDDP_TORCH_INDEX") or TORCH_INDEX
    install = partial(
        run,
        failed="torch could not be installed for the local cloud",
        next_step="awsddp local stop   # then set AWSDDP_TORCH_INDEX to an index that answers, and try again",
    )
    install(str(BASE_PYTHON), "-m", "venv", "--prompt", "pytorch", str(building))
    pip = [str(building / "bin/python"), "-I", "-m", "pip", "install", "--quiet"]
    options = ["--retries", "1", "--timeout", "15", "--disable-pip-version-check"]
    indexes = ["--index-url", index, "--extra-index-url", "https://pypi.org/simple"]
    install(*pip, *options, *indexes, f"torch=={TORCH_VERSION}", *OTHER_PACKAGES)
    # Without --no-deps, pip would install a CUDA build of torch for torchvision if the index has no CPU
    # builds.
    install(*pip, *options, *indexes, "--no-deps", f"torchvision=={TORCHVISION_VERSION}")
    _declare_operators(next(building.glob("lib/python*/site-packages")))
    # From here on the environment works only in a node, at /opt/pytorch, and no longer on this machine.
    set_python(BASE_IN_NODE / "bin" / PYTHON, building)
    for script in (building / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            script.write_bytes(
                script.read_bytes().replace(str(building).encode(), str(TORCH_FOLDER).encode())
            )
    building.rename(folder)


def _declare_operators(packages: Path) -> None:
    """Make torchvision import train/torchvision_operators.py if its compiled operators do not match torch.

    This function changes torchvision's own file, because a .pth file or a sitecustomize would slow down every
    start of Python.
    """
    name = "torchvision_operators"
    shutil.copy(shipped_folder("train") / f"{name}.py", packages)
    with (packages / "torchvision/extension.py").open("a") as file:
        file.write(f"\n\nif not _has_ops():  # written by awsddp\n    import {name}\n")


def set_python(python: Path, environment: Path) -> None:
    """Make an environment use the interpreter `python`. The environment may already have packages."""
    (environment / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("python", "python3", PYTHON):
        (environment / "bin" / name).unlink(missing_ok=True)
        (environment / "bin" / name).symlink_to(python)
    (environment / "pyvenv.cfg").write_text(
        f"home = {python.parent}\ninclude-system-site-packages = false\n"
        f"version = {platform.python_version()}\n"
    )


def get_rehearsed_type(instance: Any) -> str | None:
    """Return the type whose GPUs torch simulates on an instance, or None if torch simulates none."""
    tags = [(tag["key"], tag["value"]) for tag in instance.get_tags()]
    return None if ("awsddp:gpus", "pretended") in tags else str(instance.instance_type)


def install_rehearsal(packages: Path, instance_type: str) -> None:
    """Install templates/rehearse_gpu into `packages`; torch then simulates the type's GPUs, if it has any."""
    shutil.copytree(
        shipped_folder("templates") / "rehearse_gpu", packages / "rehearse_gpu", dirs_exist_ok=True
    )
    facts: dict[str, Any] = {}
    if kind := GPU_TYPES.get(instance_type):
        facts = {
            "count": kind.gpus,
            "name": f"NVIDIA {kind.gpu}",
            "memory_bytes": int(kind.memory_gb * 2**30),
            "capability": tuple(map(int, (kind.capability or "8.0").split("."))),
            "fault": f"/{KERNEL_LOG}",
        }
    # A sitecustomize would not be imported, because Debian's Python has its own, which comes first.
    (packages / "rehearse_gpu.pth").write_text(f"import rehearse_gpu; rehearse_gpu.pretend(**{facts!r})\n")
