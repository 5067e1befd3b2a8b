"""Hosts without root: for each an sshd of the user's own, on an address of 127.0.0.0/8, and a folder.

A host's folder holds `root` (its etc, opt and run, which AWSDDP_ROOT names to what runs on it), `home`, and
`bin`, which comes first in the PATH and stands in for sudo and systemctl. Files and processes are not hidden
from one another, groups are not enforced, and there is no metadata service.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

from awsddp.local import cloudconfig, ending, torchenv
from awsddp.local.hosts import Condition, Hosts, HostSpec
from awsddp.local.place import run_into
from awsddp.local.requirements import SEARCH

SSHD_CONFIG = """\
ListenAddress {address}:{port}
HostKey {root}/etc/ssh/ssh_host_ed25519_key
PidFile {node}/sshd.pid
AuthorizedKeysFile {root}/etc/ssh/authorized_keys
ForceCommand {node}/bin/enter
SetEnv AWSDDP_HOST={mark}
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
MaxStartups 100
AcceptEnv LANG LC_*
"""
ENTER = """\
#!/bin/sh
export HOME='{node}/home' AWSDDP_ROOT='{root}' AWSDDP_HOST='{mark}'
export PATH='{node}/bin':/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd "$HOME" || exit
exec sh -c "${{SSH_ORIGINAL_COMMAND:-exec ${{SHELL:-/bin/sh}} -i}}"
"""
SUDO = """\
#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
exec "$@"
"""
# What user data and preparation ask of systemd.
SYSTEMCTL = """\
#!/bin/sh
node='{node}' units='{root}/etc/systemd/system'
verb=$1; shift
for unit; do
    case $unit in -*) continue ;; esac
    case $unit in ssh.service | sshd.service) pid=$node/sshd.pid ;; *) pid=$node/root/run/$unit.pid ;; esac
    case $verb in
        is-active)
            if [ -s "$pid" ] && kill -0 "$(cat "$pid")" 2>/dev/null; then echo active
            else echo inactive; exit 3
            fi ;;
        start | restart)
            command=$(sed -n 's/^ExecStart=//p' "$units/$unit") || exit 5
            if grep -q '^Type=oneshot' "$units/$unit"; then continue; fi
            setsid sh -c "while :; do $command; sleep 1; done" </dev/null >>"$node/console.log" 2>&1 &
            echo $! > "$pid" ;;
        reload) kill -HUP "$(cat "$pid")" ;;
    esac
done
case $verb in poweroff | halt) mark=off ;; reboot) mark=again ;; *) exit 0 ;; esac
touch "$node/$mark"
exec setsid '{python}' '{ending}' '{mark}'
"""


class LoopbackHosts(Hosts):
    """All hosts of one local cloud. Of torch's environment the packages are used, its interpreter is not."""

    ssh_port = 7722  # beside the system's own sshd, and below what the kernel gives to connections

    def boot(self, spec: HostSpec) -> None:
        node = self.folder(spec.instance_id)
        ending.end(self._mark(spec.instance_id))
        if not (node / "made").exists():
            self._make(node, spec)
        for name in ("off", "again", "sshd.pid"):
            (node / name).unlink(missing_ok=True)
        shutil.rmtree(node / "root/run", ignore_errors=True)
        (node / "root/run/cloud-init").mkdir(parents=True)
        environ = self._environ(node, spec.instance_id)
        with (node / "console.log").open("ab") as console:
            first = not (node / "booted").exists()
            cloudconfig.carry_out(
                spec.user_data, root=node / "root", first=first, environ=environ, console=console
            )
            (node / "booted").touch()
            if _end(node) is None:
                self._start_sshd(node, spec, environ, console)

    def _make(self, node: Path, spec: HostSpec) -> None:
        """The host's files, from nothing."""
        root = node / "root"
        for folder in ("home", "bin", "root/etc/ssh", "root/etc/systemd/system", "root/opt"):
            shutil.rmtree(node / folder, ignore_errors=True)
            (node / folder).mkdir(parents=True)
        words = {
            "node": node,
            "root": root,
            "mark": self._mark(spec.instance_id),
            "address": spec.address,
            "port": self.ssh_port,
            "python": shutil.which("python3", path=SEARCH) or sys.executable,
            "ending": node / "bin/ending.py",
        }
        # Its name is how the processes of this sshd are found again.
        (node / self._mark(spec.instance_id)).write_text(SSHD_CONFIG.format(**words))
        (root / "etc/ssh/authorized_keys").write_text("".join(f"{key}\n" for key in spec.public_keys))
        shutil.copy(ending.__file__, node / "bin/ending.py")
        for name, text in (("enter", ENTER), ("systemctl", SYSTEMCTL), ("sudo", SUDO)):
            (node / "bin" / name).write_text(text.format(**words))
            (node / "bin" / name).chmod(0o755)
        if spec.has_torch:
            _show_torch(root / "opt/pytorch", torchenv.ensure("loopback"), spec.rehearsal)
        key = root / "etc/ssh/ssh_host_ed25519_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        (node / "made").touch()

    def _start_sshd(self, node: Path, spec: HostSpec, environ: dict[str, str], console: IO[bytes]) -> None:
        sshd = shutil.which("sshd", path=SEARCH) or "/usr/sbin/sshd"
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        # sshd would say it in its log alone, after it has become a daemon.
        socket.create_server((spec.address, self.ssh_port)).close()
        settings = ["-f", str(node / self._mark(spec.instance_id)), "-E", str(node / "sshd.log")]
        run_into(console, "setsid", "--fork", sshd, *settings, env=environ, check=True)

    def shut_down(self, instance_id: str, *, reboot: bool = False) -> None:
        node = self.folder(instance_id)
        (node / ("again" if reboot else "off")).touch()
        with (node / "console.log").open("ab") as console:
            end = [sys.executable, ending.__file__, self._mark(instance_id)]
            environ = self._environ(node, instance_id)  # not the daemon's mark: it outlives that
            run_into(console, "setsid", "--fork", *end, env=environ, check=True)

    def cut_power(self, instance_id: str) -> None:
        ending.end(self._mark(instance_id))

    def remove(self, instance_id: str) -> None:
        ending.end(self._mark(instance_id))
        shutil.rmtree(self.folder(instance_id), ignore_errors=True)

    def condition(self, instance_id: str) -> Condition:
        end, pid = _end(self.folder(instance_id)), self._number(instance_id, "sshd.pid")
        if end is None and pid is not None:
            return Condition.UP if ending.carries(pid, self._mark(instance_id)) else Condition.ABSENT
        alive = ending.marked(self._mark(instance_id))  # what shuts down or starts
        if end is not None:
            return Condition.UP if alive else end
        return Condition.STARTING if alive else Condition.ABSENT

    def _mark(self, instance_id: str) -> str:
        return f"{self._place.tag}-{instance_id}"

    def _environ(self, node: Path, instance_id: str) -> dict[str, str]:
        return {
            "PATH": f"{node / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(node / "home"),
            "AWSDDP_ROOT": str(node / "root"),
            "AWSDDP_HOST": self._mark(instance_id),
        }


def _end(node: Path) -> Condition | None:
    """Return what a host becomes that shuts down, None for one that does not."""
    if (node / "off").exists():
        return Condition.OFF
    return Condition.RESTARTING if (node / "again").exists() else None


def _show_torch(at: Path, torch: Path, instance_type: str | None) -> None:
    """An environment with the packages of another and the interpreter of this machine.

    :param instance_type: whose GPUs are rehearsed, None for none.
    """
    torchenv.point_at(torchenv.BASE_PYTHON, at)
    packages = at / torchenv.PACKAGES
    packages.mkdir(parents=True)
    for entry in (torch / torchenv.PACKAGES).iterdir():
        (packages / entry.name).symlink_to(entry)
    if instance_type is not None:
        torchenv.rehearse(packages, instance_type)
