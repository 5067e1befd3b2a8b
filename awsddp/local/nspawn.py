"""Hosts in systemd-nspawn: real systemd, real OpenSSH and real cloud-init over the machine's own system.

Each host is a folder: `upper` and `work` of its overlay, `hosts` (its /etc/hosts), `console.log`, `exit` (the
exit status of its last run: 133 asks for a reboot). The overlay is mounted in a mount namespace of its
own, so that it is gone when the host is, however it ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from awsddp.local import cgroups, network, rootfs
from awsddp.local.hosts import Condition, HostSpec
from awsddp.local.inside import Servers
from awsddp.local.place import Place
from awsddp.local.torchenv import TorchEnvironment

REBOOT_STATUS = 133
SEED = "var/lib/cloud/seed/nocloud"
RUNTIME = Path("/run/systemd/nspawn")

# $1 cgroups, one a line, the rest what to run in them. Who waits for this knows that the host is in them.
LAUNCHER = """\
groups=$1; shift
for group in $groups; do echo $$ > "$group/cgroup.procs" || exit 1; done
exec setsid --fork unshare --mount sh -c "$1" sh "$@"
"""
# $2 the host's folder, the rest the command. Runs in a mount namespace of its own.
WRAPPER = """\
node=$2; shift 2
echo $$ > "$node/wrapper"
if mount -t overlay overlay -o "lowerdir=/,upperdir=$node/upper,workdir=$node/work" "$node/root"; then
    "$@" & echo $! > "$node/pid"; wait $!
fi
echo $? > "$node/exit.new"; mv "$node/exit.new" "$node/exit"
"""


class NspawnHosts:
    """All hosts of one local cloud."""

    def __init__(
        self,
        place: Place,
        image: TorchEnvironment,
        *,
        metadata: Servers,
        share: Callable[[], list[Path]] = list,
    ) -> None:
        self._place = place
        self._image = image
        self._metadata = metadata
        self._share = share
        self._hosts = "127.0.0.1 localhost\n"

    def boot(self, spec: HostSpec) -> None:
        node = self._folder(spec.instance_id)
        cgroups.end(self._place, spec.instance_id)
        if not (node / "made").exists():
            self._make(node, spec)
        for name in ("exit", "pid", "wrapper", f"upper/{rootfs.UP_MARK}"):
            (node / name).unlink(missing_ok=True)
        self._metadata.close(spec.instance_id)
        network.plug_in(self._place, spec.instance_id, spec.address, prefix=spec.prefix)
        network.load_rules(self._place, spec.instance_id, (node / "rules").read_text())
        self._metadata.open(spec.instance_id, self._place.machine(spec.instance_id))
        groups = cgroups.make(self._place, spec.instance_id)
        with (node / "console.log").open("ab") as console:
            launch = ["sh", "-c", LAUNCHER, "sh", "\n".join(map(str, groups)), WRAPPER, str(node)]
            subprocess.run(
                [*launch, *self._command(node, spec)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_NSPAWN_TMPFS_TMP": "0"},
                check=True,
            )

    def _make(self, node: Path, spec: HostSpec) -> None:
        """The host's files, from nothing."""
        node.mkdir(parents=True, exist_ok=True)
        for name in ("upper", "work", "root"):
            shutil.rmtree(node / name, ignore_errors=True)
        for name in ("work", "root"):
            (node / name).mkdir()
        rootfs.build_layer(node / "upper", libraries=self._image.libraries)
        _write_seed(node / "upper" / SEED, spec)
        (node / "hosts").write_text(self._hosts)
        (node / "made").touch()
        (node / "hosts").write_text(self._hosts)  # `announce` may have come between

    def _command(self, node: Path, spec: HostSpec) -> list[str]:
        binds = self._image.binds if spec.has_torch else ()
        shown = [f"--bind-ro={_escape(source)}:{_escape(target)}" for source, target in binds]
        shown += [f"--bind-ro={_escape(path)}" for path in self._share()]
        return [
            *("systemd-nspawn", "--quiet", f"--directory={node / 'root'}", "--boot", "--register=no"),
            *("--keep-unit", f"--network-namespace-path=/run/netns/{self._place.machine(spec.instance_id)}"),
            *(f"--machine={self._place.machine(spec.instance_id)}", f"--hostname={spec.name.split('.')[0]}"),
            *("--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=read-only"),
            *(f"--bind={_escape(node / 'hosts')}:/etc/hosts", *shown),
        ]

    def shut_down(self, instance_id: str, *, reboot: bool = False) -> None:
        if (pid := self._pid(instance_id)) is None:
            return
        if not reboot:
            os.kill(pid, signal.SIGTERM)
            return
        for child in _children(pid):
            os.kill(child, signal.SIGRTMIN + 5)

    def cut_power(self, instance_id: str) -> None:
        cgroups.end(self._place, instance_id)

    def remove(self, instance_id: str) -> None:
        cgroups.end(self._place, instance_id)
        self._metadata.close(instance_id)
        network.unplug(self._place, instance_id)
        shutil.rmtree(self._folder(instance_id), ignore_errors=True)
        with suppress(OSError):
            (RUNTIME / "propagate" / self._place.machine(instance_id)).rmdir()
        forget_locks()

    def condition(self, instance_id: str) -> Condition:
        node = self._folder(instance_id)
        if (node / "exit").exists():
            status = int((node / "exit").read_text())
            if status == REBOOT_STATUS:
                return Condition.RESTARTING
            answered = os.path.lexists(node / "upper" / rootfs.UP_MARK)
            return Condition.OFF if status == 0 or answered else Condition.BROKEN
        if not cgroups.processes(self._place, instance_id):
            return Condition.ABSENT
        if os.path.lexists(node / "upper" / rootfs.UP_MARK):
            return Condition.UP
        return Condition.STARTING

    def complaint(self, instance_id: str) -> str:
        lines = self.console(instance_id)[-2000:].decode(errors="replace").splitlines()
        return lines[-1] if lines else "the host ended before it answered"

    def console(self, instance_id: str) -> bytes:
        try:
            return (self._folder(instance_id) / "console.log").read_bytes()
        except FileNotFoundError:
            return b""

    def apply_rules(self, instance_id: str, ruleset: str) -> None:
        node = self._folder(instance_id)
        node.mkdir(parents=True, exist_ok=True)
        if (node / "rules").exists() and (node / "rules").read_text() == ruleset:
            return
        (node / "rules").write_text(ruleset)
        if (network.NAMESPACES / self._place.machine(instance_id)).exists():
            network.load_rules(self._place, instance_id, ruleset)

    def announce(self, names: dict[str, str]) -> None:
        self._hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name} {name.split('.')[0]}\n" for address, name in sorted(names.items())
        )
        for mark in self._place.nodes.glob("*/made"):
            # In place: the file is mounted over /etc/hosts, a new one would not be seen.
            with suppress(FileNotFoundError):
                (mark.parent / "hosts").write_text(self._hosts)
            # After a restart of the daemon its sockets in the hosts are gone.
            self._metadata.open(mark.parent.name, self._place.machine(mark.parent.name))

    def exits(self, instance_id: str) -> int | None:
        # Not nspawn itself: the wrapper ends when the exit status is written.
        if (pid := self._pid(instance_id, "wrapper")) is None:
            return None
        with suppress(ProcessLookupError):
            return os.pidfd_open(pid)
        return None

    def _folder(self, instance_id: str) -> Path:
        return self._place.nodes / instance_id

    def _pid(self, instance_id: str, name: str = "pid") -> int | None:
        """The pid of its nspawn, if it lives: a recorded number may be another process's by now."""
        try:
            pid = int((self._folder(instance_id) / name).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if pid in cgroups.processes(self._place, instance_id) else None


def forget_locks() -> None:
    """Removes the lock files that killed nspawns left, as nspawn itself does when it ends."""
    for path in (RUNTIME / "locks").glob("inode-*"):
        with suppress(OSError), path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _write_seed(folder: Path, spec: HostSpec) -> None:
    """The NoCloud seed: what EC2's metadata server would say."""
    folder.mkdir(parents=True)
    meta_data = {
        "instance-id": spec.instance_id,
        "local-hostname": spec.name.split(".")[0],
        "public-keys": list(spec.public_keys),
    }
    (folder / "meta-data").write_text(json.dumps(meta_data))
    (folder / "user-data").write_bytes(spec.user_data)
    (folder / "user-data").chmod(0o600)


def _escape(path: Path) -> str:
    """nspawn splits bind arguments at colons."""
    return str(path).replace("\\", "\\\\").replace(":", "\\:")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
