"""What carries an instance: a record alone, or an sshd of the user's own; nspawn.py has the containers.

Without root a host is an sshd on an address of 127.0.0.0/8, and a folder. It holds `root` (its etc, opt and
run, which AWSDDP_ROOT names to what runs on it), `home`, and `bin`, which comes first in the PATH and stands
in for sudo and systemctl. Files and processes are not hidden from one another, groups are not enforced, and
there is no metadata service. User data is carried out as far as awsddp sends it, and plain scripts.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import IO, Any

from awsddp.local import image, loopback_cleanup
from awsddp.local.machine import SEARCH, Place, run_into

MOMENT_S = 0.1  # how long a change of state takes where nothing boots


class Condition(Enum):
    """What a host is doing."""

    ABSENT = "absent"  # never made, or its machine went down under it: boot it
    STARTING = "starting"
    UP = "up"  # answers
    OFF = "off"  # powered off from inside, or on request
    RESTARTING = "restarting"  # rebooted from inside: boot it again
    BROKEN = "broken"  # could not be started; `Hosts.complaint` says why


@dataclass(frozen=True)
class HostSpec:
    """An instance as its host needs to know it. `rehearsal`: the type whose GPUs its torch is to pretend."""

    instance_id: str
    address: str
    name: str
    user_data: bytes
    public_keys: tuple[str, ...]
    has_torch: bool
    disk_gib: int
    rehearsal: str | None = None


class Hosts:
    """All hosts of a local cloud: records alone, whose states change after a moment.

    Calls about one instance come one at a time; all may be repeated.
    """

    ssh_port = 22

    def __init__(self, place: Place) -> None:
        self._place = place
        self._conditions: dict[str, tuple[Condition, float]] = {}

    def folder(self, instance_id: str) -> Path:
        """Return where it keeps its files."""
        return self._place.nodes / instance_id

    def boot(self, spec: HostSpec) -> None:
        """Make the host if need be and start it; returns before it answers."""
        self._become(spec.instance_id, Condition.UP)

    def shut_down(self, instance_id: str, *, reboot: bool = False) -> None:
        """Ask for an orderly power-off or reboot; returns at once."""
        self._become(instance_id, Condition.UP if reboot else Condition.OFF)

    def cut_power(self, instance_id: str) -> None:
        """End all of its processes now; its files stay."""
        self._become(instance_id, Condition.OFF)

    def remove(self, instance_id: str) -> None:
        """End it and remove all that it was."""
        time.sleep(MOMENT_S)
        self._conditions.pop(instance_id, None)

    def condition(self, instance_id: str) -> Condition:
        """Return what it is doing."""
        condition, since = self._conditions.get(instance_id, (Condition.ABSENT, 0.0))
        return condition if time.monotonic() >= since else Condition.STARTING

    def complaint(self, instance_id: str) -> str:
        """Return why it is broken, in a line."""
        console, last = self.folder(instance_id) / "console.log", ""
        with suppress(FileNotFoundError):
            last = console.read_text(errors="replace")[-2000:]
        if "Too many open files" in last:  # systemd's last words
            return (
                "the nodes of this machine have used up fs.inotify.max_user_instances; "
                "raise it: sysctl -w fs.inotify.max_user_instances=1024"
            )
        return [*last.splitlines()[-1:], "the host ended before it answered"][0]

    def apply_rules(self, instance_id: str, ruleset: str) -> None:
        """Put its security groups in force (nftables)."""

    def suffer(self, instance_id: str, effects: frozenset[str]) -> bool:
        """Let it have these faults of faults.py, and heal others; false while it has not booted."""
        return True

    def announce(self, names: dict[str, str]) -> None:
        """Tell every host the names of all: address to name."""

    def _number(self, instance_id: str, name: str) -> int | None:
        """Return the number in one of its files, None where there is none."""
        with suppress(FileNotFoundError, ValueError):
            return int((self.folder(instance_id) / name).read_text())
        return None

    def _become(self, instance_id: str, condition: Condition) -> None:
        self._conditions[instance_id] = (condition, time.monotonic() + MOMENT_S)


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
        loopback_cleanup.end(self._mark(spec.instance_id))
        first = not (node / "booted").exists()
        if first:
            self._make(node, spec)
        for name in ("off", "again", "sshd.pid"):
            (node / name).unlink(missing_ok=True)
        shutil.rmtree(node / "root/run", ignore_errors=True)
        (node / "root/run/cloud-init").mkdir(parents=True)
        environ = self._environ(node, spec.instance_id)
        with (node / "console.log").open("ab") as console:
            carry_out(spec.user_data, root=node / "root", first=first, environ=environ, console=console)
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
        shutil.copy(loopback_cleanup.__file__, node / "bin/ending.py")
        for name, text in (("enter", ENTER), ("systemctl", SYSTEMCTL), ("sudo", SUDO)):
            (node / "bin" / name).write_text(text.format(**words))
            (node / "bin" / name).chmod(0o755)
        if spec.has_torch:
            _show_torch(root / "opt/pytorch", image.ensure("loopback"), spec.rehearsal)
        key = root / "etc/ssh/ssh_host_ed25519_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)

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
        ask = [str(node / "bin/systemctl"), "reboot" if reboot else "poweroff"]
        environ = self._environ(node, instance_id)  # not the daemon's mark: it outlives that
        with (node / "console.log").open("ab") as console:
            run_into(console, "setsid", "--fork", *ask, env=environ, check=True)

    def cut_power(self, instance_id: str) -> None:
        loopback_cleanup.end(self._mark(instance_id))

    def remove(self, instance_id: str) -> None:
        loopback_cleanup.end(self._mark(instance_id))
        shutil.rmtree(self.folder(instance_id), ignore_errors=True)

    def condition(self, instance_id: str) -> Condition:
        end, pid = _end(self.folder(instance_id)), self._number(instance_id, "sshd.pid")
        if end is None and pid is not None:
            return (
                Condition.UP if loopback_cleanup.carries(pid, self._mark(instance_id)) else Condition.ABSENT
            )
        alive = loopback_cleanup.marked(self._mark(instance_id))  # what shuts down or starts
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
    image.point_at(image.BASE_PYTHON, at)
    packages = at / image.PACKAGES
    packages.mkdir(parents=True)
    for entry in (torch / image.PACKAGES).iterdir():
        (packages / entry.name).symlink_to(entry)
    if instance_type is not None:
        image.rehearse(packages, instance_type)


PATIENCE_S = 120.0
OWN = re.compile(r"(?<![\w./-])(/etc/|/run/awsddp\b)")


Run = Callable[[list[str]], list[str]]
"""Runs a command and returns what went wrong."""


def carry_out(
    user_data: bytes, *, root: Path, first: bool, environ: dict[str, str], console: IO[bytes]
) -> None:
    """Does what the user data asks for and writes cloud-init's result file.

    :param first: the instance's first boot; later ones run `bootcmd` alone.
    """
    text = OWN.sub(lambda found: f"{root}{found[1]}", user_data.decode(errors="replace"))
    run = partial(_run, environ, console)
    errors: list[str] = []
    if text.startswith("#cloud-config"):
        errors = _cloud_config(text, root, first=first, run=run)
    elif text.startswith("#!") and first:
        script = root / "run/user-data"
        script.write_text(text)
        script.chmod(0o700)
        errors = run([str(script)])
    result = root / "run/cloud-init/result.json"
    result.write_text(json.dumps({"v1": {"datasource": "DataSourceLocal", "errors": errors}}))


def _cloud_config(text: str, root: Path, *, first: bool, run: Run) -> list[str]:
    yaml: Any = importlib.import_module("yaml")  # comes with moto's server; it has no types
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"Failed loading yaml blob: {error}"]
    if not isinstance(config, dict):
        return ["the user data is not a mapping"]
    errors: list[str] = []
    if first:
        _host_keys(config.get("ssh_keys") or {}, root / "etc/ssh")
        for file in config.get("write_files") or []:
            path = root / file["path"].removeprefix(str(root)).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.get("content", ""))
            path.chmod(int(str(file.get("permissions", "0644")), 8))
    commands = [*(config.get("bootcmd") or []), *((config.get("runcmd") or []) if first else [])]
    for command in commands:
        words = ["sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
        errors += run(words)
    return errors


def _host_keys(keys: dict[str, str], folder: Path) -> None:
    for name, text in keys.items():
        kind, _, half = name.rpartition("_")
        path = folder / f"ssh_host_{kind}_key{'.pub' if half == 'public' else ''}"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(text if text.endswith("\n") else f"{text}\n")


def _run(environ: dict[str, str], console: IO[bytes], words: list[str]) -> list[str]:
    try:
        status = run_into(console, *words, env=environ, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return [f"{words[0]}: exit {status}"] if status else []
