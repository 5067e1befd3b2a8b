"""The layer between the machine's system and a node's own files: what makes the one look like a fresh image.

A node's root is an overlay: its own folder over this layer over `/`. The layer hides everything of the
machine that is not its system (homes, data, services, accounts, secrets) with whiteouts and opaque folders,
and puts a small systemd, sshd and cloud-init configuration in their place.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

TOP_SYSTEM = {"bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "var"}
TOP_EMPTY = ("boot", "dev", "home", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp")

# What of /etc is the system's and holds nothing of the machine's users, services or secrets.
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

# A path unit takes an inotify instance, a user's own systemd three: all nodes share
# fs.inotify.max_user_instances.
MASKED_UNITS = (
    "getty.target",
    "systemd-ask-password-console.path",
    "systemd-ask-password-wall.path",
    "systemd-firstboot.service",
    "systemd-random-seed.service",
    "user@.service",
)

# Of the image that the node stands for, whose distribution it names.
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
"""The package's own: what a fresh system has in /etc/ssh."""
# When sshd answers, the instance is "running"; the daemon sees this file through a bind mount.
UP_MARK = "var/lib/misc/answers"
UP_UNIT = f"""\
[Unit]
Description=Tells the local cloud that this instance answers
After=ssh.service systemd-user-sessions.service
[Service]
Type=oneshot
ExecStart=/bin/touch /{UP_MARK}
"""

FILES = {
    "etc/environment": 'PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n',
    "etc/machine-id": "",
    "etc/motd": "A node of awsddp's local cloud. Its GPUs are simulated.\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\ngshadow: files\nhosts: files\n"
    "networks: files\nprotocols: files\nservices: files\n",
    # As cloud-init would write it, and then restart sshd, which has answered by then.
    "etc/ssh/sshd_config.d/50-cloud-init.conf": "PasswordAuthentication no\n",
    "etc/sudoers": "Defaults env_reset\n"
    'Defaults secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n'
    "root ALL=(ALL:ALL) ALL\n%sudo ALL=(ALL:ALL) ALL\n@includedir /etc/sudoers.d\n",
    "etc/systemd/system/answers.service": UP_UNIT,
}


def build_layer(folder: Path) -> None:
    """Make the layer in `folder`, which must not be there yet."""
    building = folder.with_name(folder.name + ".new")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True, mode=0o755)
    _mask(Path("/"), building, kept=TOP_SYSTEM, empty=TOP_EMPTY)
    _mask(
        Path("/etc"), building / "etc", kept=ETC_SYSTEM, empty=("apt", "ssh", "systemd", "cloud", "sudoers.d")
    )
    # The public certificates stay, the machine's private keys go.
    _mask(Path("/etc/ssl"), building / "etc/ssl", kept={"certs", "openssl.cnf"}, empty=())
    _mask(Path("/var"), building / "var", kept=VAR_KEPT, empty=VAR_EMPTY)
    _mask(Path("/var/lib"), building / "var/lib", kept=VAR_LIB_KEPT, empty=VAR_LIB_EMPTY)
    (building / "usr").mkdir()
    _empty(building / "usr/local")
    for path in ("usr/local/bin", "usr/local/sbin", "usr/local/lib", "opt/pytorch", "opt/python"):
        (building / path).mkdir(parents=True, exist_ok=True)
    for path in ("tmp", "var/tmp"):
        (building / path).chmod(0o1777)
    (building / "root").chmod(0o700)
    for name, text in FILES.items():
        _write(building / name, text)
    (building / "etc/sudoers").chmod(0o440)
    _write(building / "etc/ssh/sshd_config", SSHD_CONFIG.read_text())
    _write(building / "etc/cloud/cloud.cfg", CLOUD_CFG)
    logging = Path("/etc/cloud/cloud.cfg.d/05_logging.cfg")
    _write(building / logging.relative_to("/"), logging.read_text())
    _units(building)
    _accounts(building)
    building.rename(folder)


def _mask(machine: Path, layer: Path, *, kept: set[str], empty: tuple[str, ...]) -> None:
    """Hides each entry of a folder of the machine that is not kept; those in `empty` are there, but empty."""
    layer.mkdir(exist_ok=True)
    for entry in machine.iterdir():
        if entry.name not in kept and entry.name not in empty:
            os.mknod(layer / entry.name, stat.S_IFCHR, os.makedev(0, 0))
    for name in empty:
        _empty(layer / name)


def _empty(folder: Path) -> None:
    folder.mkdir()
    os.setxattr(folder, "trusted.overlay.opaque", b"y")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)


def _units(layer: Path) -> None:
    system = layer / "etc/systemd/system"
    wants = system / "multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (system / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
    (system / "sshd.service").symlink_to("/lib/systemd/system/ssh.service")
    # Only what a fresh Ubuntu image would start, and nothing that waits for hardware.
    own = Path("/lib/systemd/system")
    always = ("ssh.service", "cloud-config.service", "cloud-final.service")
    for path in (*map(own.joinpath, always), *own.glob("cloud-init*.service")):
        if "hotplug" not in path.name:
            (wants / path.name).symlink_to(path)
    (wants / "answers.service").symlink_to("../answers.service")
    for unit in MASKED_UNITS:
        (system / unit).symlink_to("/dev/null")
    generators = layer / "etc/systemd/system-generators"
    generators.mkdir()
    for generator in Path("/lib/systemd/system-generators").iterdir():
        (generators / generator.name).symlink_to("/dev/null")


def _accounts(layer: Path) -> None:
    """The system's own accounts and groups, without passwords and members; no user of the machine."""
    for name, hidden in (("passwd", "shadow"), ("group", "gshadow")):
        lines = [line.split(":") for line in Path("/etc", name).read_text().splitlines()]
        kept = [fields for fields in lines if not 1000 <= int(fields[2]) < 65534]
        if name == "group":
            kept = [[*fields[:3], ""] for fields in kept]
        _write(layer / "etc" / name, "".join(":".join(fields) + "\n" for fields in kept))
        rest = ":*:19000:0:99999:7:::" if name == "passwd" else ":*::"
        _write(layer / "etc" / hidden, "".join(f"{fields[0]}{rest}\n" for fields in kept))
        (layer / "etc" / hidden).chmod(0o640)
