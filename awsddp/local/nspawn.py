"""Hosts in systemd-nspawn: real systemd, OpenSSH and cloud-init on an overlay over the machine's own system.

Each host has a folder with these files: `disk.img` (a sparse file as large as the root volume, with the
overlay's `upper` and `work`), `seed` (the user data), `hosts` (the host's /etc/hosts), `marks` (files that
the host writes for the daemon), `console.log`, `exit` (the exit status of the host's last run; 133 requests a
reboot), and `rehearsal` (an overlay over torch). The disk and the overlay are mounted in the host's own mount
namespace, so that they are unmounted however the host ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from awsddp.local import cgroups, image, network
from awsddp.local.hosts import Condition, Hosts, HostSpec
from awsddp.local.machine import CloudPaths, run, run_to_log
from awsddp.state import try_lock

REBOOT_STATUS = 133
SEED = "var/lib/cloud/seed/nocloud"
MARKS = str(Path(image.UP_MARK).parent)
ANSWERS = f"marks/{Path(image.UP_MARK).name}"
KERNEL_LOG = f"marks/{Path(image.KERNEL_LOG).name}"
RUNTIME = Path("/run/systemd/nspawn")
FILLER = "filler"
CLOCK = "FAKETIME=+120s\nDONT_FAKE_MONOTONIC=1\nNO_FAKE_STAT=1\nLD_PRELOAD={library}\n"
"""Variables that make a login's processes see a wrong time: https://manpages.debian.org/faketime"""
HOST_KEY = "etc/ssh/ssh_host_ed25519_key"
XID = "NVRM: Xid (PCI:0000:00:1e): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
"""The driver's message for a GPU that has failed: https://docs.nvidia.com/deploy/xid-errors/"""

# $1 has the cgroups, one per line; the other arguments are the command. The script returns once the host is
# in the cgroups. The daemon's mark is removed, because the next daemon kills all processes with this mark.
# oom_score_adj makes the kernel kill the hosts' processes before the daemon and the machine's own processes.
LAUNCHER = """\
groups=$1; shift
echo 300 > /proc/self/oom_score_adj
for group in $groups; do echo $$ > "$group/cgroup.procs" || exit 1; done
exec env -u AWSDDP_HOST setsid --fork unshare --mount sh -c "$1" sh "$@"
"""
# $2 is the host's folder; the other arguments are the command. The script runs in its own mount namespace.
WRAPPER = """\
node=$2; shift 2
echo $$ > "$node/wrapper"
own=$node/disk
if mount -o loop "$node/disk.img" "$own" &&
    mount -t overlay overlay -o "lowerdir=/,upperdir=$own/upper,workdir=$own/work" "$node/root"; then
    "$@" & echo $! > "$node/pid"; wait $!
else
    false
fi
echo $? > "$node/exit.new"; mv "$node/exit.new" "$node/exit"
"""


class NspawnHosts(Hosts):
    """All of a local cloud's hosts, in systemd-nspawn."""

    def __init__(self, paths: CloudPaths) -> None:
        super().__init__(paths)
        self._hosts = "127.0.0.1 localhost\n"
        self._layer_lock = threading.Lock()

    def boot(self, spec: HostSpec) -> None:
        node = self.folder(spec.instance_id)
        cgroups.remove(self._paths, spec.instance_id)
        if not (node / "made").exists():
            self._create(node, spec)
        _write_seed(node / "seed", spec)
        if spec.rehearsal is not None:
            image.install_rehearsal(node / "rehearsal" / image.PACKAGES, spec.rehearsal)
        for name in ("exit", "pid", "wrapper", ANSWERS, KERNEL_LOG):
            (node / name).unlink(missing_ok=True)
        network.unplug(self._paths, spec.instance_id)
        network.plug_in(self._paths, spec.instance_id, spec.address)
        network.load_rules(self._paths, spec.instance_id, (node / "rules").read_text())
        groups = cgroups.create(self._paths, spec.instance_id)
        with (node / "console.log").open("ab") as console:
            launch = ["sh", "-c", LAUNCHER, "sh", "\n".join(map(str, groups)), WRAPPER, str(node)]
            environ = {
                "AWSDDP_HOST": self._paths.daemon_mark,
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                "SYSTEMD_NSPAWN_TMPFS_TMP": "0",
            }
            run_to_log(console, *launch, *self._command(node, spec), env=environ, check=True)

    def _create(self, node: Path, spec: HostSpec) -> None:
        """Create a host's files."""
        node.mkdir(parents=True, exist_ok=True)
        for name in ("disk", "root", "marks", "seed"):
            shutil.rmtree(node / name, ignore_errors=True)
            (node / name).mkdir()
        with self._layer_lock:
            if not (self._paths.layer / "work").exists():
                shutil.rmtree(self._paths.layer, ignore_errors=True)
                image.build_layer(self._paths.layer / "upper")
                (self._paths.layer / "work").mkdir()
        _format_disk(node / "disk.img", gib=spec.disk_gib, content=self._paths.layer)
        (node / "hosts").write_text(self._hosts)
        (node / "made").touch()
        (node / "hosts").write_text(self._hosts)  # `set_host_names` skipped it until now

    def _command(self, node: Path, spec: HostSpec) -> list[str]:
        settings = json.loads(self._paths.settings.read_text())  # `local start --share` may have changed it
        mounts = [f"--bind-ro={_escape(path)}" for path in settings["share"]]
        if spec.has_torch:
            torch = _escape(image.ensure_torch("nspawn"))
            if spec.rehearsal is None:
                mounts.append(f"--bind-ro={torch}:{image.TORCH_FOLDER}")
            else:
                mounts.append(f"--overlay-ro={torch}:{_escape(node / 'rehearsal')}:{image.TORCH_FOLDER}")
            if image.BASE_IN_NODE != image.BASE:
                mounts.append(f"--bind-ro={_escape(image.BASE)}:{image.BASE_IN_NODE}")
            # Mount the library over the machine's own library of the same name, which may be another patch
            # release.
            if library := image.find_python_library():
                lib = Path("/usr/lib")
                folders = [lib, *(path.parent for path in lib.glob(f"*/{library.name}"))]
                mounts += [f"--bind-ro={_escape(library)}:{folder}/{library.name}" for folder in folders]
        return [
            *("systemd-nspawn", "--quiet", f"--directory={node / 'root'}", "--boot", "--register=no"),
            *(
                "--keep-unit",
                f"--network-namespace-path=/run/netns/{self._paths.machine_name(spec.instance_id)}",
            ),
            *(
                f"--machine={self._paths.machine_name(spec.instance_id)}",
                f"--hostname={spec.name.split('.')[0]}",
            ),
            *("--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=read-only"),
            *(f"--bind={_escape(node / 'hosts')}:/etc/hosts", f"--bind={_escape(node / 'marks')}:/{MARKS}"),
            *(f"--bind-ro={_escape(node / 'seed')}:/{SEED}", "--tmpfs=/sys/block", *mounts),
        ]

    def shut_down(self, instance_id: str, *, reboot: bool = False) -> None:
        if (pid := self._pid(instance_id)) is None:
            return
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGRTMIN + (5 if reboot else 4))  # makes systemd reboot or power off

    def cut_power(self, instance_id: str) -> None:
        cgroups.remove(self._paths, instance_id)

    def remove(self, instance_id: str) -> None:
        cgroups.remove(self._paths, instance_id)
        network.unplug(self._paths, instance_id)
        shutil.rmtree(self.folder(instance_id), ignore_errors=True)

    def condition(self, instance_id: str) -> Condition:
        node = self.folder(instance_id)
        if (node / "exit").exists():
            status = int((node / "exit").read_text())
            if status == REBOOT_STATUS:
                return Condition.RESTARTING
            return Condition.OFF if status == 0 or (node / ANSWERS).exists() else Condition.BROKEN
        if not cgroups.list_processes(self._paths, instance_id):
            return Condition.ABSENT
        if (node / ANSWERS).exists():
            return Condition.UP
        return Condition.STARTING

    def apply_rules(self, instance_id: str, ruleset: str) -> None:
        node = self.folder(instance_id)
        node.mkdir(parents=True, exist_ok=True)
        (node / "rules").write_text(ruleset)
        if (network.NAMESPACES / self._paths.machine_name(instance_id)).exists():
            network.load_rules(self._paths, instance_id, ruleset)

    def apply_faults(self, instance_id: str, effects: frozenset[str]) -> bool:
        node, wrapper = self.folder(instance_id), self._pid(instance_id, "wrapper")
        if wrapper is None:
            return False
        cgroups.set_frozen(self._paths, instance_id, frozen="frozen" in effects)
        cgroups.limit_cpu(self._paths, instance_id, slow="slow-cpu" in effects)
        cgroups.limit_memory(self._paths, instance_id, tight="oom" in effects)
        disk = Path(f"/proc/{wrapper}/root{node / 'disk'}")  # mounted only in the host's namespace
        root = Path(f"/proc/{wrapper}/root{node / 'root'}")
        if disk.stat().st_dev == node.stat().st_dev or not os.path.ismount(root):
            return False
        try:
            if "full-disk" in effects:
                fill_disk(disk)
            else:
                (disk / FILLER).unlink(missing_ok=True)
            set_clock(root, ahead="clock" in effects)
            if set_host_key(root, other="hostkey" in effects):
                self._reload_sshd(instance_id)
        except FileNotFoundError:  # the host is ending
            return False
        return True

    def fail_gpu(self, instance_id: str) -> None:
        # As on Ubuntu, only root can read the log: agent/diagnosis/evidence.py then uses sudo.
        path = self.folder(instance_id) / KERNEL_LOG
        path.touch(mode=0o600)
        with path.open("a") as log:
            log.write(f"[{time.monotonic():12.6f}] {XID}\n")

    def _reload_sshd(self, instance_id: str) -> None:
        for pid in cgroups.list_processes(self._paths, instance_id):
            with suppress(OSError):
                if b"[listener]" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGHUP)

    def set_host_names(self, names: dict[str, str]) -> None:
        self._hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name} {name.split('.')[0]}\n" for address, name in sorted(names.items())
        )
        for mark in self._paths.nodes.glob("*/made"):
            # Overwrite the existing file, which is mounted over /etc/hosts, because a new file would not be
            # mounted.
            with suppress(FileNotFoundError):
                (mark.parent / "hosts").write_text(self._hosts)

    def _pid(self, instance_id: str, name: str = "pid") -> int | None:
        """Return the recorded pid, or None if that process is not the host's because the pid was reused."""
        pid = self._read_number(instance_id, name)
        return pid if pid in cgroups.list_processes(self._paths, instance_id) else None


def remove_stale_locks() -> None:
    """Remove the lock files of killed nspawn processes. A process that ends normally removes its lock
    file."""
    for path in (RUNTIME / "locks").glob("inode-*"):
        with suppress(OSError), path.open() as lock:
            if try_lock(lock):
                path.unlink()


def _format_disk(disk: Path, *, gib: int, content: Path) -> None:
    """Create a sparse disk of `gib` GiB with a folder's content.

    :raises LocalCloudError: mkfs.ext4 failed.
    """
    with disk.open("wb") as file:
        file.truncate(gib * 2**30)
    # With these options (few inodes, no journal, tables that are written when needed), a 200 GiB disk takes 3
    # MB and is created in 0.04 s.
    options = ["-m", "0", "-i", "65536", "-O", "^has_journal,^resize_inode"]
    options += ["-E", "lazy_itable_init=1,nodiscard"]
    command = ("mkfs.ext4", "-q", "-F", *options, "-d", str(content), str(disk))
    run(*command, failed="a node's disk could not be made")


def _write_seed(folder: Path, spec: HostSpec) -> None:
    """Write the seed for cloud-init's NoCloud, which replaces EC2's metadata service."""
    meta_data = {
        "instance-id": spec.instance_id,
        "local-hostname": spec.name.split(".")[0],
        "public-keys": list(spec.public_keys),
    }
    (folder / "meta-data").write_text(json.dumps(meta_data))
    (folder / "user-data").write_bytes(spec.user_data)
    (folder / "user-data").chmod(0o600)


def _escape(path: Path | str) -> str:
    """Escape a path for a bind argument, which nspawn splits at colons."""
    return str(path).replace("\\", "\\\\").replace(":", "\\:")


def fill_disk(disk: Path) -> None:
    """Allocate all free space in a file system."""
    with (disk / FILLER).open("ab") as file:
        block = os.statvfs(disk).f_frsize
        blocks = os.statvfs(disk).f_bavail
        while blocks:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, blocks * block)
            except OSError:  # because the file system's tables also need space
                blocks //= 2


def find_faketime() -> Path | None:
    """Return the library that shifts processes' clocks, or None if it is not installed."""
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


def set_clock(root: Path, *, ahead: bool) -> None:
    """Set the clock that processes of later logins to a node see. The clock is ahead of the correct time if
    `ahead` is True, and correct otherwise.

    :param root: the node's root folder.
    """
    path, variables = root / "etc/environment", CLOCK.format(library=find_faketime())
    text = path.read_text().replace(variables, "")
    path.write_text(text + variables if ahead else text)


def set_host_key(root: Path, *, other: bool) -> bool:
    """Replace a node's host key (`other`), or restore it; return True if sshd must reload its keys."""
    key, own_key = root / HOST_KEY, root / f"{HOST_KEY}.own"
    if other == own_key.exists():
        return False
    if other:
        new_key = root / f"{HOST_KEY}.other"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(new_key)], check=True)
        key.rename(own_key)
        new_key.rename(key)
    else:
        own_key.rename(key)
    return True
