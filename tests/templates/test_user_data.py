import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from awsddp.nodes.hostkeys import make_key
from awsddp.nodes.provision import render_user_data
from awsddp.settings.ec2_limits import MAX_USER_DATA_BYTES
from tests.support.ssh_hosts import wait_until

yaml = pytest.importorskip("yaml")

EXPIRES = datetime(2026, 11, 22, 8, 0, tzinfo=UTC)


def test_user_data_is_valid_for_cloud_init_and_within_the_limit_of_ec2(tmp_path: Path) -> None:
    text = render_user_data(host_key=make_key("seed"), expires_at=EXPIRES)
    assert text.startswith("#cloud-config\n")
    assert len(text.encode()) <= MAX_USER_DATA_BYTES
    if shutil.which("cloud-init") is None:
        pytest.skip("cloud-init is not installed")
    (tmp_path / "user-data").write_text(text)
    result = subprocess.run(
        ["cloud-init", "schema", "--config-file", tmp_path / "user-data"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_user_data_holds_the_host_key_and_the_deadline() -> None:
    seed = make_key("seed")
    document = yaml.safe_load(render_user_data(host_key=seed, expires_at=EXPIRES))
    assert document["ssh_keys"] == {"ed25519_private": seed.private, "ed25519_public": seed.public}
    assert f"'{int(EXPIRES.timestamp())} 2026-11-22T08:00:00Z'" in document["bootcmd"][0]


def test_deadline_is_independent_of_its_time_zone() -> None:
    seed = make_key("seed")
    local = EXPIRES.astimezone(timezone(timedelta(hours=9)))
    assert render_user_data(host_key=seed, expires_at=local) == render_user_data(
        host_key=seed, expires_at=EXPIRES
    )


class Machine:
    """Runs the boot commands and the watchdog of user data below a folder; systemctl records its calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("etc/systemd/system", "etc/ssh/sshd_config.d", "proc"):
            (root / folder).mkdir(parents=True)
        (root / "proc/uptime").symlink_to("/proc/uptime")
        programs = root / "bin"
        programs.mkdir()
        (programs / "systemctl").write_text(f'#!/bin/sh\necho "$*" >> "{root}/calls"\n')
        (programs / "curl").write_text("#!/bin/sh\nexit 22\n")
        (programs / "ss").write_text(f'#!/bin/sh\ncat "{root}/connections"\n')
        (programs / "journalctl").write_text(f'#!/bin/sh\ncat "{root}/journal"\n')
        for empty in ("connections", "journal"):
            (root / empty).touch()
        (programs / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.05\n")
        for program in programs.iterdir():
            program.chmod(0o755)
        self.environ = {"PATH": f"{programs}:{os.environ['PATH']}"}
        self.watchdog: subprocess.Popen[bytes] | None = None

    def boot(self, expires_at: datetime = EXPIRES, *, idle_s: int = 0) -> None:
        text = render_user_data(host_key=make_key("seed"), expires_at=expires_at, idle_s=idle_s)
        [script] = yaml.safe_load(text)["bootcmd"]
        for folder in ("/etc/", "/run/", "/proc/", "/home/"):
            script = script.replace(folder, f"{self.root}{folder}")
        subprocess.run(["sh", "-eu", "-c", script], env=self.environ, check=True)

    def start_watchdog(self) -> None:
        self.watchdog = subprocess.Popen(["sh", self.root / "etc/awsddp/watchdog"], env=self.environ)

    def start_job(self) -> subprocess.Popen[bytes]:
        """Start a process that /proc shows as the supervisor of a job."""
        process = subprocess.Popen(["/bin/sleep", "60"])
        (self.root / f"proc/{process.pid}").mkdir(parents=True)
        (self.root / "proc/1/comm").mkdir(parents=True)  # cannot be read, as if its process just ended
        (self.root / f"proc/{process.pid}/comm").write_text("awsddp-job\n")
        return process

    def read_calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def expires(self) -> Path:
        return self.root / "etc/awsddp/expires"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    node = Machine(tmp_path)
    yield node
    if node.watchdog is not None:
        node.watchdog.kill()
        node.watchdog.wait()


def test_boot_enables_and_starts_the_watchdog_and_stops_the_apt_timers(machine: Machine) -> None:
    machine.boot(EXPIRES)
    calls = machine.read_calls()
    assert "enable awsddp-expiry.service awsddp-jobs.service" in calls
    assert "start --no-block awsddp-expiry.service awsddp-jobs.service" in calls
    assert calls[0].startswith("mask apt-daily.timer apt-daily-upgrade.timer")
    unit = (machine.root / "etc/systemd/system/awsddp-expiry.service").read_text()
    assert "WantedBy=multi-user.target" in unit
    assert "Restart=always" in unit


def test_another_boot_keeps_an_expiry_that_was_moved(machine: Machine) -> None:
    machine.boot(EXPIRES)
    moved = f"{int(time.time()) + 60} moved\n"
    machine.expires.write_text(moved)
    machine.boot(EXPIRES)
    assert machine.expires.read_text() == moved


def test_boot_after_the_deadline_leaves_time_to_move_it(machine: Machine) -> None:
    machine.boot(EXPIRES)
    machine.expires.write_text("1 passed while it was off\n")
    machine.boot(EXPIRES)
    assert 800 < int(machine.expires.read_text().split()[0]) - time.time() <= 900


def test_watchdog_powers_off_once_the_deadline_has_passed(machine: Machine) -> None:
    machine.boot(datetime.now(UTC) + timedelta(seconds=2))
    machine.start_watchdog()
    assert "poweroff" not in machine.read_calls()
    wait_until(lambda: "poweroff" in machine.read_calls(), "poweroff")
    assert time.time() >= int(machine.expires.read_text().split()[0]) - 1  # it counts whole seconds


def test_watchdog_follows_a_deadline_that_is_moved(machine: Machine) -> None:
    machine.boot(datetime.now(UTC) + timedelta(days=1))
    machine.start_watchdog()
    machine.expires.write_text(f"{int(time.time()) - 1} now\n")
    wait_until(lambda: "poweroff" in machine.read_calls(), "poweroff")


@pytest.mark.parametrize("broken", ["", "never\n", "-5\n", "9 9 9", None])
def test_unreadable_deadline_is_replaced_by_the_first_one(machine: Machine, broken: str | None) -> None:
    machine.boot(datetime.now(UTC) - timedelta(seconds=1))
    machine.expires.unlink()
    if broken is not None:
        machine.expires.write_text(broken)
    machine.start_watchdog()
    wait_until(lambda: "poweroff" in machine.read_calls(), "poweroff")


@pytest.mark.parametrize(
    ("left_s", "term_s", "ends"), [(110, 9999, True), (130, 9999, False), (50, 600, True), (50, 400, False)]
)
def test_jobs_get_sigterm_two_minutes_or_a_tenth_of_the_term_before_the_deadline(
    machine: Machine, left_s: int, term_s: int, ends: bool
) -> None:
    job, reason = machine.start_job(), machine.root / "run/awsddp/shutdown"
    now = int(time.time())
    machine.boot(datetime.fromtimestamp(now + left_s, UTC))
    os.utime(machine.expires, (now + left_s - term_s, now + left_s - term_s))
    reason.write_text("" if ends else "expires\n")
    machine.start_watchdog()
    if ends:
        assert job.wait(timeout=20) == -15
        assert reason.read_text() == "expires\n"
    else:
        wait_until(lambda: not reason.exists(), "a check of the watchdog")
        assert job.poll() is None
    assert "poweroff" not in machine.read_calls()
    job.kill()
    job.wait()


METADATA = """\
#!/bin/sh
for url; do :; done
echo "$url" >> "@root/requests"
[ "$*" = "${*#*X-aws-ec2-metadata-token: TOKEN}" ] && [ "$url" = "${url%/api/token}" ] && exit 22
case $url in
  */latest/api/token) echo TOKEN ;;
  */latest/meta-data/instance-life-cycle) echo @market ;;
  */latest/meta-data/spot/instance-action) cat "@root/notice" ;;
  *) exit 22 ;;
esac
"""


def serve_metadata(machine: Machine, market: str) -> Path:
    """Let `curl` answer as the metadata service (version 2); return the file with its spot notice."""
    text = METADATA.replace("@root", str(machine.root)).replace("@market", market)
    (machine.root / "bin/curl").write_text(text)
    return machine.root / "notice"


def test_spot_notice_ends_jobs_at_once_and_its_time_stays_the_reason(machine: Machine) -> None:
    job, reason = machine.start_job(), machine.root / "run/awsddp/shutdown"
    notice = serve_metadata(machine, "spot")
    node = IdleMachine(machine, idle_s=0)
    assert not node.is_powered_off()
    assert (job.poll(), reason.exists()) == (None, False)
    notice.write_text('{"action": "terminate", "time": "2026-11-23T20:30:00Z"}')
    assert job.wait(timeout=20) == -15
    notice.unlink()  # the metadata service does not answer this time
    assert not node.is_powered_off()
    assert reason.read_text() == "spot 2026-11-23T20:30:00Z\n"


def test_on_demand_instance_requests_its_life_cycle_once_and_no_spot_notice(machine: Machine) -> None:
    job = machine.start_job()
    serve_metadata(machine, "on-demand").write_text('{"action": "terminate", "time": "2026-11-23T20:30:00Z"}')
    node = IdleMachine(machine, idle_s=0)
    assert not node.is_powered_off()
    assert not node.is_powered_off()
    urls = (machine.root / "requests").read_text().splitlines()
    assert [url.rpartition("/latest/")[2] for url in urls] == ["api/token", "meta-data/instance-life-cycle"]
    assert job.poll() is None
    job.kill()
    job.wait()


def test_shutdown_sends_sigterm_to_a_job_and_waits_for_it(machine: Machine) -> None:
    machine.boot(EXPIRES)
    job = machine.start_job()
    reason = machine.root / "run/awsddp/shutdown"
    reason.write_text("expires\n")
    os.utime(reason, (1, 1))  # the deadline had passed, and was moved since
    stop = subprocess.Popen(["sh", machine.root / "etc/awsddp/end-jobs"], env=machine.environ)
    assert job.wait(timeout=20) == -15
    assert stop.poll() is None
    assert reason.read_text() == "poweroff\n"
    shutil.rmtree(machine.root / "proc")
    assert stop.wait(timeout=20) == 0


class IdleMachine:
    """A machine that expires in a day and whose uptime the test sets."""

    def __init__(self, machine: Machine, *, idle_s: int) -> None:
        self.machine = machine
        machine.boot(datetime.now(UTC) + timedelta(days=1), idle_s=idle_s)
        self.set_uptime(10)

    def set_uptime(self, seconds: float) -> None:
        path = self.machine.root / "proc/uptime"
        path.with_name("next").write_text(f"{seconds:.2f} 99.99\n")
        path.with_name("next").replace(path)

    def set_last_use(self, seconds: int) -> None:
        (self.machine.root / "run/awsddp/used").write_text(f"{seconds}\n")

    def is_powered_off(self) -> bool:
        """Return True if the next check of the watchdog powers the machine off."""
        if self.machine.watchdog is None:
            self.machine.start_watchdog()
        checks = self.machine.root / "checks"
        (self.machine.root / "bin/sleep").write_text(f'#!/bin/sh\necho >> "{checks}"\nexec /bin/sleep 0.05\n')
        checks.unlink(missing_ok=True)
        wait_until(lambda: checks.exists() and len(checks.read_text()) > 2, "two checks")
        return "poweroff" in self.machine.read_calls()


def test_unused_machine_ends_after_its_idle_time(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=3600)
    node.set_last_use(100)
    node.set_uptime(3699)
    assert not node.is_powered_off()
    node.set_uptime(3700)
    assert node.is_powered_off()


def test_machine_without_any_use_yet_ends_after_half_an_hour(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=60)
    node.set_uptime(700_000)  # the uptime of its host
    assert not node.is_powered_off()
    node.set_uptime(701_799)
    assert not node.is_powered_off()
    node.set_uptime(701_800)
    assert node.is_powered_off()


@pytest.mark.parametrize("use", ["job", "connection"])
def test_job_or_connection_is_use_until_it_ends(machine: Machine, use: str) -> None:
    node = IdleMachine(machine, idle_s=60)
    comm, connections = machine.root / "proc/4711/comm", machine.root / "connections"
    if use == "job":
        comm.parent.mkdir()
        comm.write_text("awsddp-job\n")
    else:
        connections.write_text("0 0 10.0.0.5:22 203.0.113.7:50000 cubic lastsnd:9 lastrcv:900 lastack:9\n")
    node.set_last_use(10)
    node.set_uptime(5000)
    assert not node.is_powered_off()
    connections.write_text("")
    comm.unlink(missing_ok=True)
    node.set_uptime(5059)
    assert not node.is_powered_off()
    node.set_uptime(5060)
    assert node.is_powered_off()


def test_silent_connection_is_use_until_its_last_packet(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=60)
    node.set_last_use(10)
    node.set_uptime(500)
    connections = machine.root / "connections"
    connections.write_text("0 0 10.0.0.5:22 203.0.113.7:50000 cubic lastrcv:59000\n")
    assert not node.is_powered_off()
    connections.write_text("0 0 10.0.0.5:22 203.0.113.7:50000 cubic lastrcv:61000\n")
    node.set_uptime(502)
    assert node.is_powered_off()


def test_login_between_two_checks_counts_from_its_own_time(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=600)
    (machine.root / "journal").write_text(
        "[ 4900.123456] node sshd[1]: Accepted publickey for ubuntu\n"
        "[ 4950.123456] node sshd[1]: Disconnected from user ubuntu\n"
    )
    node.set_last_use(10)
    node.set_uptime(5499)
    assert not node.is_powered_off()
    node.set_uptime(5500)
    assert node.is_powered_off()


def test_short_login_between_two_checks_is_use(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=60)
    (machine.root / "journal").write_text("[   12.000001] node sshd[1]: Accepted publickey\n")
    node.set_uptime(71)
    assert not node.is_powered_off()
    node.set_uptime(72)
    assert node.is_powered_off()


@pytest.mark.parametrize("shift_s", [-86400, 86400])
def test_jump_of_the_clock_moves_no_deadline(machine: Machine, shift_s: int) -> None:
    node = IdleMachine(machine, idle_s=0)
    machine.expires.write_text(f"{int(time.time()) + 100} soon\n")
    assert not node.is_powered_off()
    date = machine.root / "bin/date"
    date.write_text(f"#!/bin/sh\necho {int(time.time()) + shift_s}\n")
    date.chmod(0o755)
    node.set_uptime(90)
    assert not node.is_powered_off()
    node.set_uptime(111)
    assert node.is_powered_off()


def test_poweroff_that_hangs_is_forced(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=60)
    node.set_last_use(10)
    node.set_uptime(100)
    assert node.is_powered_off()
    assert "poweroff --force --force" not in machine.read_calls()
    node.set_uptime(140)
    node.is_powered_off()
    assert "poweroff --force --force" in machine.read_calls()


def test_restarted_watchdog_keeps_the_last_use(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=60)
    node.set_last_use(10)
    node.set_uptime(69)
    assert not node.is_powered_off()
    assert machine.watchdog is not None
    machine.watchdog.kill()
    machine.watchdog.wait()
    machine.start_watchdog()
    node.set_uptime(70)
    assert node.is_powered_off()


@pytest.mark.parametrize("idle", ["0", "never", ""])
def test_idle_time_can_be_turned_off_or_changed_on_a_running_machine(machine: Machine, idle: str) -> None:
    node = IdleMachine(machine, idle_s=0)
    node.set_last_use(10)
    node.set_uptime(500_000)
    (machine.root / "etc/awsddp/idle").write_text(f"{idle}\n")
    assert not node.is_powered_off()
    (machine.root / "etc/awsddp/idle").write_text("3600\n")
    assert node.is_powered_off()


class SavedJob:
    """A job with an uploader (saver), on a machine that records the uploaders that it starts."""

    def __init__(self, machine: Machine) -> None:
        self.node = IdleMachine(machine, idle_s=0)
        self.folder = machine.root / "home/ubuntu/.awsddp/jobs/train-1"
        self.folder.mkdir(parents=True)
        self.starts = machine.root / "started"
        program = machine.root / "bin/systemd-run"
        program.write_text(
            f'#!/bin/sh\necho "$*" >> "{self.starts}"\nwhile [ "$1" != python3 ]; do shift; done\nexec "$@"\n'
        )
        program.chmod(0o755)
        code = "import sys; print('says', sys.stdin.read())"
        request = {"argv": [sys.executable, "-c", code], "stdin": base64.b64encode(b"the order").decode()}
        (self.folder / "saver.json").write_text(json.dumps(request))
        (self.folder / "saver.lock").touch()
        self.set_ended(False)

    def set_ended(self, ended: bool) -> None:
        (self.folder / "saving.json").write_text(
            json.dumps({"files": 1, "error": '"ended": true', "ended": ended})
        )

    def count_starts(self, *, uptime_s: float) -> int:
        """Return how many uploaders were started until then."""
        self.node.set_uptime(uptime_s)
        self.node.is_powered_off()
        return len(self.starts.read_text().splitlines()) if self.starts.exists() else 0


def test_dead_uploader_is_restarted_as_the_user_of_its_job_with_growing_delays(
    machine: Machine,
) -> None:
    job = SavedJob(machine)
    starts = [job.count_starts(uptime_s=now) for now in (10, 19, 20, 39, 40, 79, 80, 81)]
    assert starts == [0, 0, 1, 1, 2, 2, 3, 3]
    arguments = job.starts.read_text().splitlines()[0].split()
    assert f"--uid={job.folder.owner()}" in arguments
    assert "--property=Before=awsddp-jobs.service" in arguments  # a shutdown waits for it, as for other jobs
    assert (job.folder / "saver.log").read_text() == "says the order\n" * 3
    assert (job.folder / "saver.log").stat().st_mode & 0o077 == 0


def test_running_or_finished_uploader_is_not_restarted(machine: Machine) -> None:
    job = SavedJob(machine)
    with (job.folder / "saver.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [job.count_starts(uptime_s=now) for now in (10, 20, 40)] == [0, 0, 0]
    job.set_ended(True)
    assert [job.count_starts(uptime_s=now) for now in (50, 60)] == [0, 0]
    job.set_ended(False)
    assert [job.count_starts(uptime_s=now) for now in (70, 80)] == [0, 1]


def test_reboot_starts_uploaders_of_jobs_with_unsaved_results(machine: Machine) -> None:
    job = SavedJob(machine)
    assert [job.count_starts(uptime_s=now) for now in (10, 20)] == [0, 1]
    assert machine.watchdog is not None
    machine.watchdog.kill()
    machine.watchdog.wait()
    machine.watchdog = None
    shutil.rmtree(machine.root / "run")
    machine.boot(datetime.now(UTC) + timedelta(days=1))
    assert [job.count_starts(uptime_s=now) for now in (5, 15)] == [1, 2]
