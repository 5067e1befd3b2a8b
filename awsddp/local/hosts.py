"""Hosts for instances, without containers: a host is only a record, or an sshd that runs without root rights.

Hosts in containers are in nspawn.py.

Without root rights, a host consists of a folder and an sshd that listens on an address in 127.0.0.0/8. The
folder has `root` (the host's etc, opt and run), `home`, and `bin`, which comes first in the PATH and has
replacements for sudo and systemctl. The variable AWSDDP_ROOT has the path of `root`. Hosts see each other's
files and processes, security groups are not enforced, and there is no metadata service. User data can be a
plain script or the cloud-config that awsddp sends.
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
from awsddp.local.machine import SEARCH, CloudPaths, run_to_log

MOMENT_S = 0.1  # how long a state change takes if hosts are records only


class Condition(Enum):
    """The state of a host."""

    ABSENT = "absent"  # the host was never created, or this machine was restarted: boot the host
    STARTING = "starting"
    UP = "up"  # the host answers
    OFF = "off"  # the host was powered off from inside, or on request
    RESTARTING = "restarting"  # the host was rebooted from inside: boot it again
    BROKEN = "broken"  # the host could not be started; `Hosts.failure_reason` returns the reason


@dataclass(frozen=True)
class HostSpec:
    """Holds the facts about an instance that its host needs. `rehearsal` is the instance type whose GPUs
    torch simulates."""

    instance_id: str
    address: str
    name: str
    user_data: bytes
    public_keys: tuple[str, ...]
    has_torch: bool
    disk_gib: int
    rehearsal: str | None = None


class Hosts:
    """All of a local cloud's hosts. Hosts of this class are records whose states change after a moment.

    Calls for the same instance are never concurrent. Each call can be repeated.
    """

    ssh_port = 22

    def __init__(self, paths: CloudPaths) -> None:
        self._paths = paths
        self._conditions: dict[str, tuple[Condition, float]] = {}

    def folder(self, instance_id: str) -> Path:
        """Return the folder with a host's files."""
        return self._paths.nodes / instance_id

    def boot(self, spec: HostSpec) -> None:
        """Create a host if it does not exist, and start it. Return without waiting until the host answers."""
        self._set_condition(spec.instance_id, Condition.UP)

    def shut_down(self, instance_id: str, *, reboot: bool = False) -> None:
        """Start an orderly power-off or reboot of a host, without waiting for its end."""
        self._set_condition(instance_id, Condition.UP if reboot else Condition.OFF)

    def cut_power(self, instance_id: str) -> None:
        """Kill a host's processes, but keep its files."""
        self._set_condition(instance_id, Condition.OFF)

    def remove(self, instance_id: str) -> None:
        """Kill a host's processes and remove its files."""
        time.sleep(MOMENT_S)
        self._conditions.pop(instance_id, None)

    def condition(self, instance_id: str) -> Condition:
        """Return a host's state."""
        condition, since = self._conditions.get(instance_id, (Condition.ABSENT, 0.0))
        return condition if time.monotonic() >= since else Condition.STARTING

    def failure_reason(self, instance_id: str) -> str:
        """Return one line that says why a host is broken."""
        console, tail = self.folder(instance_id) / "console.log", ""
        with suppress(FileNotFoundError):
            tail = console.read_text(errors="replace")[-2000:]
        if "Too many open files" in tail:  # systemd's last message
            return (
                "the nodes of this machine have used up fs.inotify.max_user_instances; "
                "raise it: sysctl -w fs.inotify.max_user_instances=1024"
            )
        return [*tail.splitlines()[-1:], "the host ended before it answered"][0]

    def apply_rules(self, instance_id: str, ruleset: str) -> None:
        """Apply the nftables rules from a host's security groups."""

    def apply_faults(self, instance_id: str, effects: frozenset[str]) -> bool:
        """Apply faults (faults.py) to a host and end the host's other faults; return False if the host has
        not booted yet."""
        return True

    def fail_gpu(self, instance_id: str) -> None:
        """Make a host's first GPU fail until the host reboots."""

    def set_host_names(self, names: dict[str, str]) -> None:
        """Write all hosts' names and addresses to every host."""

    def _read_number(self, instance_id: str, name: str) -> int | None:
        """Return the number that a host's file `name` contains, or None if the file is missing or has no
        number."""
        with suppress(FileNotFoundError, ValueError):
            return int((self.folder(instance_id) / name).read_text())
        return None

    def _set_condition(self, instance_id: str, condition: Condition) -> None:
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
# A script that replaces systemctl. The script has only the commands that user data and awsddp's preparation
# of nodes use.
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
    """All hosts in a local cloud that has no root rights. The hosts use only the packages in torch's
    environment."""

    ssh_port = 7722  # not the system sshd's port, and lower than the ephemeral ports

    def boot(self, spec: HostSpec) -> None:
        node = self.folder(spec.instance_id)
        loopback_cleanup.kill_processes(self._mark(spec.instance_id))
        is_first = not (node / "booted").exists()
        if is_first:
            self._create(node, spec)
        for name in ("off", "again", "sshd.pid"):
            (node / name).unlink(missing_ok=True)
        shutil.rmtree(node / "root/run", ignore_errors=True)
        (node / "root/run/cloud-init").mkdir(parents=True)
        environ = self._environ(node, spec.instance_id)
        with (node / "console.log").open("ab") as console:
            run_user_data(
                spec.user_data, root=node / "root", first=is_first, environ=environ, console=console
            )
            (node / "booted").touch()
            if _next_condition(node) is None:
                self._start_sshd(node, spec, environ, console)

    def _create(self, node: Path, spec: HostSpec) -> None:
        """Create a host's files."""
        root = node / "root"
        for folder in ("home", "bin", "root/etc/ssh", "root/etc/systemd/system", "root/opt"):
            shutil.rmtree(node / folder, ignore_errors=True)
            (node / folder).mkdir(parents=True)
        values = {
            "node": node,
            "root": root,
            "mark": self._mark(spec.instance_id),
            "address": spec.address,
            "port": self.ssh_port,
            "python": shutil.which("python3", path=SEARCH) or sys.executable,
            "ending": node / "bin/ending.py",
        }
        # `loopback_cleanup` finds this sshd's processes by its configuration's name.
        (node / self._mark(spec.instance_id)).write_text(SSHD_CONFIG.format(**values))
        (root / "etc/ssh/authorized_keys").write_text("".join(f"{key}\n" for key in spec.public_keys))
        shutil.copy(loopback_cleanup.__file__, node / "bin/ending.py")
        for name, text in (("enter", ENTER), ("systemctl", SYSTEMCTL), ("sudo", SUDO)):
            (node / "bin" / name).write_text(text.format(**values))
            (node / "bin" / name).chmod(0o755)
        if spec.has_torch:
            _link_torch(root / "opt/pytorch", image.ensure_torch("loopback"), spec.rehearsal)
        key = root / "etc/ssh/ssh_host_ed25519_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)

    def _start_sshd(self, node: Path, spec: HostSpec, environ: dict[str, str], console: IO[bytes]) -> None:
        sshd = shutil.which("sshd", path=SEARCH) or "/usr/sbin/sshd"
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        # This fails if the port is taken. sshd runs as a daemon and would report a taken port only in its
        # log.
        socket.create_server((spec.address, self.ssh_port)).close()
        settings = ["-f", str(node / self._mark(spec.instance_id)), "-E", str(node / "sshd.log")]
        run_to_log(console, "setsid", "--fork", sshd, *settings, env=environ, check=True)

    def shut_down(self, instance_id: str, *, reboot: bool = False) -> None:
        node = self.folder(instance_id)
        command = [str(node / "bin/systemctl"), "reboot" if reboot else "poweroff"]
        # The command gets the host's mark instead of the daemon's, because the command may run longer than
        # the daemon.
        environ = self._environ(node, instance_id)
        with (node / "console.log").open("ab") as console:
            run_to_log(console, "setsid", "--fork", *command, env=environ, check=True)

    def cut_power(self, instance_id: str) -> None:
        loopback_cleanup.kill_processes(self._mark(instance_id))

    def remove(self, instance_id: str) -> None:
        loopback_cleanup.kill_processes(self._mark(instance_id))
        shutil.rmtree(self.folder(instance_id), ignore_errors=True)

    def condition(self, instance_id: str) -> Condition:
        mark, pid = self._mark(instance_id), self._read_number(instance_id, "sshd.pid")
        next_condition = _next_condition(self.folder(instance_id))
        if next_condition is None and pid is not None:
            return Condition.UP if loopback_cleanup.has_mark(pid, mark) else Condition.ABSENT
        is_alive = bool(loopback_cleanup.find_processes(mark))  # also while the host starts or ends
        if next_condition is not None:
            return Condition.UP if is_alive else next_condition
        return Condition.STARTING if is_alive else Condition.ABSENT

    def _mark(self, instance_id: str) -> str:
        return f"{self._paths.tag}-{instance_id}"

    def _environ(self, node: Path, instance_id: str) -> dict[str, str]:
        return {
            "PATH": f"{node / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(node / "home"),
            "AWSDDP_ROOT": str(node / "root"),
            "AWSDDP_HOST": self._mark(instance_id),
        }


def _next_condition(node: Path) -> Condition | None:
    """Return the state that a host will have after its shutdown, or None if it is not shutting down."""
    if (node / "off").exists():
        return Condition.OFF
    return Condition.RESTARTING if (node / "again").exists() else None


def _link_torch(environment: Path, torch: Path, instance_type: str | None) -> None:
    """Create an environment with the packages in `torch` and this machine's interpreter.

    :param instance_type: the instance type whose GPUs are simulated, or None to simulate none.
    """
    image.set_python(image.BASE_PYTHON, environment)
    packages = environment / image.PACKAGES
    packages.mkdir(parents=True)
    for entry in (torch / image.PACKAGES).iterdir():
        (packages / entry.name).symlink_to(entry)
    if instance_type is not None:
        image.install_rehearsal(packages, instance_type)


PATIENCE_S = 120.0
HOST_PATHS = re.compile(r"(?<![\w./-])(/etc/|/run/awsddp\b)")


Run = Callable[[list[str]], list[str]]
"""A function that runs a command and returns the command's errors."""


def run_user_data(
    user_data: bytes, *, root: Path, first: bool, environ: dict[str, str], console: IO[bytes]
) -> None:
    """Run the user data and write cloud-init's result file.

    :param first: True on the instance's first boot; later boots run `bootcmd` only.
    """
    text = HOST_PATHS.sub(lambda match: f"{root}{match[1]}", user_data.decode(errors="replace"))
    run = partial(_run, environ, console)
    errors: list[str] = []
    if text.startswith("#cloud-config"):
        errors = _run_cloud_config(text, root, first=first, run=run)
    elif text.startswith("#!") and first:
        script = root / "run/user-data"
        script.write_text(text)
        script.chmod(0o700)
        errors = run([str(script)])
    result = root / "run/cloud-init/result.json"
    result.write_text(json.dumps({"v1": {"datasource": "DataSourceLocal", "errors": errors}}))


def _run_cloud_config(text: str, root: Path, *, first: bool, run: Run) -> list[str]:
    yaml: Any = importlib.import_module("yaml")  # installed with moto's server; it has no types
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"Failed loading yaml blob: {error}"]
    if not isinstance(config, dict):
        return ["the user data is not a mapping"]
    errors: list[str] = []
    if first:
        _write_host_keys(config.get("ssh_keys") or {}, root / "etc/ssh")
        for file in config.get("write_files") or []:
            path = root / file["path"].removeprefix(str(root)).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.get("content", ""))
            path.chmod(int(str(file.get("permissions", "0644")), 8))
    commands = [*(config.get("bootcmd") or []), *((config.get("runcmd") or []) if first else [])]
    for command in commands:
        argv = ["sh", "-c", command] if isinstance(command, str) else [str(argument) for argument in command]
        errors += run(argv)
    return errors


def _write_host_keys(keys: dict[str, str], folder: Path) -> None:
    for name, text in keys.items():
        kind, _, part = name.rpartition("_")
        path = folder / f"ssh_host_{kind}_key{'.pub' if part == 'public' else ''}"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(text if text.endswith("\n") else f"{text}\n")


def _run(environ: dict[str, str], console: IO[bytes], argv: list[str]) -> list[str]:
    try:
        status = run_to_log(console, *argv, env=environ, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return [f"{argv[0]}: exit {status}"] if status else []
