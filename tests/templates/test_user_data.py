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


def test_user_data_is_what_cloud_init_takes_and_ec2_has_room_for(tmp_path: Path) -> None:
    text = render_user_data(host_key=make_key("seed"), expires_at=EXPIRES)
    assert text.startswith("#cloud-config\n")
    assert len(text.encode()) <= MAX_USER_DATA_BYTES
    if shutil.which("cloud-init") is None:
        pytest.skip("cloud-init is not installed")
    (tmp_path / "user-data").write_text(text)
    done = subprocess.run(
        ["cloud-init", "schema", "--config-file", tmp_path / "user-data"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_user_data_holds_the_host_key_and_the_deadline() -> None:
    seed = make_key("seed")
    document = yaml.safe_load(render_user_data(host_key=seed, expires_at=EXPIRES))
    assert document["ssh_keys"] == {"ed25519_private": seed.private, "ed25519_public": seed.public}
    assert f"'{int(EXPIRES.timestamp())} 2026-11-22T08:00:00Z'" in document["bootcmd"][0]


def test_the_deadline_is_one_moment_in_whatever_zone_it_is_said() -> None:
    seed = make_key("seed")
    local = EXPIRES.astimezone(timezone(timedelta(hours=9)))
    assert render_user_data(host_key=seed, expires_at=local) == render_user_data(
        host_key=seed, expires_at=EXPIRES
    )


class Machine:
    """The user data's boot commands and watchdog, with a folder for /etc and a systemctl that notes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("etc/systemd/system", "etc/ssh/sshd_config.d", "proc"):
            (root / folder).mkdir(parents=True)
        (root / "proc/uptime").symlink_to("/proc/uptime")
        bin = root / "bin"
        bin.mkdir()
        (bin / "systemctl").write_text(f'#!/bin/sh\necho "$*" >> "{root}/calls"\n')
        (bin / "curl").write_text("#!/bin/sh\nexit 22\n")
        (bin / "ss").write_text(f'#!/bin/sh\ncat "{root}/connections"\n')
        (bin / "journalctl").write_text(f'#!/bin/sh\ncat "{root}/journal"\n')
        for empty in ("connections", "journal"):
            (root / empty).touch()
        (bin / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.05\n")
        for program in bin.iterdir():
            program.chmod(0o755)
        self.environ = {"PATH": f"{bin}:{os.environ['PATH']}"}
        self.watchdog: subprocess.Popen[bytes] | None = None

    def boot(self, expires_at: datetime = EXPIRES, *, idle_s: int = 0) -> None:
        text = render_user_data(host_key=make_key("seed"), expires_at=expires_at, idle_s=idle_s)
        [script] = yaml.safe_load(text)["bootcmd"]
        for folder in ("/etc/", "/run/", "/proc/", "/home/"):
            script = script.replace(folder, f"{self.root}{folder}")
        subprocess.run(["sh", "-eu", "-c", script], env=self.environ, check=True)

    def watch(self) -> None:
        self.watchdog = subprocess.Popen(["sh", self.root / "etc/awsddp/watchdog"], env=self.environ)

    def job(self) -> subprocess.Popen[bytes]:
        """Start what /proc takes for the supervisor of a job."""
        process = subprocess.Popen(["/bin/sleep", "60"])
        (self.root / f"proc/{process.pid}").mkdir(parents=True)
        (self.root / "proc/1/comm").mkdir(parents=True)  # cannot be read: as of a process that just ends
        (self.root / f"proc/{process.pid}/comm").write_text("awsddp-job\n")
        return process

    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def expires(self) -> Path:
        return self.root / "etc/awsddp/expires"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    if made.watchdog is not None:
        made.watchdog.kill()
        made.watchdog.wait()


def test_the_boot_enables_and_starts_the_watchdog_and_stops_the_apt_timers(machine: Machine) -> None:
    machine.boot(EXPIRES)
    calls = machine.calls()
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


def test_a_start_after_the_deadline_leaves_time_to_move_it(machine: Machine) -> None:
    machine.boot(EXPIRES)
    machine.expires.write_text("1 passed while it was off\n")
    machine.boot(EXPIRES)
    assert 800 < int(machine.expires.read_text().split()[0]) - time.time() <= 900


def test_the_watchdog_powers_off_once_the_deadline_has_passed(machine: Machine) -> None:
    machine.boot(datetime.now(UTC) + timedelta(seconds=2))
    machine.watch()
    assert "poweroff" not in machine.calls()
    wait_until(lambda: "poweroff" in machine.calls(), "poweroff")
    assert time.time() >= int(machine.expires.read_text().split()[0]) - 1  # it counts whole seconds


def test_the_watchdog_follows_a_deadline_that_is_moved(machine: Machine) -> None:
    machine.boot(datetime.now(UTC) + timedelta(days=1))
    machine.watch()
    machine.expires.write_text(f"{int(time.time()) - 1} now\n")
    wait_until(lambda: "poweroff" in machine.calls(), "poweroff")


@pytest.mark.parametrize("broken", ["", "never\n", "-5\n", "9 9 9", None])
def test_without_a_readable_deadline_the_first_one_holds(machine: Machine, broken: str | None) -> None:
    machine.boot(datetime.now(UTC) - timedelta(seconds=1))
    machine.expires.unlink()
    if broken is not None:
        machine.expires.write_text(broken)
    machine.watch()
    wait_until(lambda: "poweroff" in machine.calls(), "poweroff")


@pytest.mark.parametrize(
    ("left_s", "term_s", "asked"), [(110, 9999, True), (130, 9999, False), (50, 600, True), (50, 400, False)]
)
def test_jobs_are_asked_to_end_two_minutes_or_a_tenth_of_the_term_before_the_deadline(
    machine: Machine, left_s: int, term_s: int, asked: bool
) -> None:
    job, reason = machine.job(), machine.root / "run/awsddp/shutdown"
    now = int(time.time())
    machine.boot(datetime.fromtimestamp(now + left_s, UTC))
    os.utime(machine.expires, (now + left_s - term_s, now + left_s - term_s))
    reason.write_text("" if asked else "expires\n")
    machine.watch()
    if asked:
        assert job.wait(timeout=20) == -15
        assert reason.read_text() == "expires\n"
    else:
        wait_until(lambda: not reason.exists(), "a look")
        assert job.poll() is None
    assert "poweroff" not in machine.calls()
    job.kill()
    job.wait()


METADATA = """\
#!/bin/sh
for url; do :; done
echo "$url" >> "@root/asked"
[ "$*" = "${*#*X-aws-ec2-metadata-token: TOKEN}" ] && [ "$url" = "${url%/api/token}" ] && exit 22
case $url in
  */latest/api/token) echo TOKEN ;;
  */latest/meta-data/instance-life-cycle) echo @market ;;
  */latest/meta-data/spot/instance-action) cat "@root/notice" ;;
  *) exit 22 ;;
esac
"""


def with_metadata(machine: Machine, market: str) -> Path:
    """Let `curl` answer as version 2 of the metadata does; return the file of the notice."""
    text = METADATA.replace("@root", str(machine.root)).replace("@market", market)
    (machine.root / "bin/curl").write_text(text)
    return machine.root / "notice"


def test_a_spot_notice_ends_the_jobs_at_once_and_its_time_stays_the_reason(machine: Machine) -> None:
    job, reason = machine.job(), machine.root / "run/awsddp/shutdown"
    notice = with_metadata(machine, "spot")
    node = IdleMachine(machine, idle_s=0)
    assert not node.ended()
    assert (job.poll(), reason.exists()) == (None, False)
    notice.write_text('{"action": "terminate", "time": "2026-11-23T20:30:00Z"}')
    assert job.wait(timeout=20) == -15
    notice.unlink()  # the metadata do not answer once
    assert not node.ended()
    assert reason.read_text() == "spot 2026-11-23T20:30:00Z\n"


def test_what_is_no_spot_instance_is_asked_once_and_told_of_no_notice(machine: Machine) -> None:
    job = machine.job()
    with_metadata(machine, "on-demand").write_text('{"action": "terminate", "time": "2026-11-23T20:30:00Z"}')
    node = IdleMachine(machine, idle_s=0)
    assert not node.ended()
    assert not node.ended()
    asked = (machine.root / "asked").read_text().splitlines()
    assert [url.rpartition("/latest/")[2] for url in asked] == ["api/token", "meta-data/instance-life-cycle"]
    assert job.poll() is None
    job.kill()
    job.wait()


def test_job_is_asked_to_end_at_a_shutdown_and_waited_for(machine: Machine) -> None:
    machine.boot(EXPIRES)
    job = machine.job()
    reason = machine.root / "run/awsddp/shutdown"
    reason.write_text("expires\n")
    os.utime(reason, (1, 1))  # the time was over, and was moved since
    stop = subprocess.Popen(["sh", machine.root / "etc/awsddp/end-jobs"], env=machine.environ)
    assert job.wait(timeout=20) == -15
    assert stop.poll() is None
    assert reason.read_text() == "poweroff\n"
    shutil.rmtree(machine.root / "proc")
    assert stop.wait(timeout=20) == 0


class IdleMachine:
    """A machine of a day's term whose uptime only the test moves."""

    def __init__(self, machine: Machine, *, idle_s: int) -> None:
        self.machine = machine
        machine.boot(datetime.now(UTC) + timedelta(days=1), idle_s=idle_s)
        self.uptime(10)

    def uptime(self, seconds: float) -> None:
        path = self.machine.root / "proc/uptime"
        path.with_name("next").write_text(f"{seconds:.2f} 99.99\n")
        path.with_name("next").replace(path)

    def used(self, seconds: int) -> None:
        (self.machine.root / "run/awsddp/used").write_text(f"{seconds}\n")

    def ended(self) -> bool:
        """Tell whether one look of the watchdog at the machine powers it off."""
        if self.machine.watchdog is None:
            self.machine.watch()
        marks = self.machine.root / "looks"
        (self.machine.root / "bin/sleep").write_text(f'#!/bin/sh\necho >> "{marks}"\nexec /bin/sleep 0.05\n')
        marks.unlink(missing_ok=True)
        wait_until(lambda: marks.exists() and len(marks.read_text()) > 2, "two looks")
        return "poweroff" in self.machine.calls()


def test_a_machine_that_nobody_uses_ends_after_its_idle_time(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=3600)
    node.used(100)
    node.uptime(3699)
    assert not node.ended()
    node.uptime(3700)
    assert node.ended()


def test_a_machine_that_nobody_has_used_yet_has_half_an_hour(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=60)
    node.uptime(700_000)  # of its host
    assert not node.ended()
    node.uptime(701_799)
    assert not node.ended()
    node.uptime(701_800)
    assert node.ended()


@pytest.mark.parametrize("use", ["job", "connection"])
def test_a_job_and_a_connection_are_use_until_they_end(machine: Machine, use: str) -> None:
    node = IdleMachine(machine, idle_s=60)
    comm, connections = machine.root / "proc/4711/comm", machine.root / "connections"
    if use == "job":
        comm.parent.mkdir()
        comm.write_text("awsddp-job\n")
    else:
        connections.write_text("0 0 10.0.0.5:22 203.0.113.7:50000 cubic lastsnd:9 lastrcv:900 lastack:9\n")
    node.used(10)
    node.uptime(5000)
    assert not node.ended()
    connections.write_text("")
    comm.unlink(missing_ok=True)
    node.uptime(5059)
    assert not node.ended()
    node.uptime(5060)
    assert node.ended()


def test_a_connection_whose_client_is_silent_counts_from_its_last_word(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=60)
    node.used(10)
    node.uptime(500)
    connections = machine.root / "connections"
    connections.write_text("0 0 10.0.0.5:22 203.0.113.7:50000 cubic lastrcv:59000\n")
    assert not node.ended()
    connections.write_text("0 0 10.0.0.5:22 203.0.113.7:50000 cubic lastrcv:61000\n")
    node.uptime(502)
    assert node.ended()


def test_a_login_between_two_looks_counts_from_its_own_time(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=600)
    (machine.root / "journal").write_text(
        "[ 4900.123456] node sshd[1]: Accepted publickey for ubuntu\n"
        "[ 4950.123456] node sshd[1]: Disconnected from user ubuntu\n"
    )
    node.used(10)
    node.uptime(5499)
    assert not node.ended()
    node.uptime(5500)
    assert node.ended()


def test_a_short_login_is_use_though_no_look_met_it(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=60)
    (machine.root / "journal").write_text("[   12.000001] node sshd[1]: Accepted publickey\n")
    node.uptime(71)
    assert not node.ended()
    node.uptime(72)
    assert node.ended()


@pytest.mark.parametrize("shift_s", [-86400, 86400])
def test_a_clock_that_jumps_moves_no_deadline(machine: Machine, shift_s: int) -> None:
    node = IdleMachine(machine, idle_s=0)
    machine.expires.write_text(f"{int(time.time()) + 100} soon\n")
    assert not node.ended()
    date = machine.root / "bin/date"
    date.write_text(f"#!/bin/sh\necho {int(time.time()) + shift_s}\n")
    date.chmod(0o755)
    node.uptime(90)
    assert not node.ended()
    node.uptime(111)
    assert node.ended()


def test_a_power_off_that_hangs_is_forced(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=60)
    node.used(10)
    node.uptime(100)
    assert node.ended()
    assert "poweroff --force --force" not in machine.calls()
    node.uptime(140)
    node.ended()
    assert "poweroff --force --force" in machine.calls()


def test_a_watchdog_that_was_killed_goes_on_where_it_was(machine: Machine) -> None:
    node = IdleMachine(machine, idle_s=60)
    node.used(10)
    node.uptime(69)
    assert not node.ended()
    assert machine.watchdog is not None
    machine.watchdog.kill()
    machine.watchdog.wait()
    machine.watch()
    node.uptime(70)
    assert node.ended()


@pytest.mark.parametrize("said", ["0", "never", ""])
def test_idle_can_be_turned_off_or_changed_while_it_runs(machine: Machine, said: str) -> None:
    node = IdleMachine(machine, idle_s=0)
    node.used(10)
    node.uptime(500_000)
    (machine.root / "etc/awsddp/idle").write_text(f"{said}\n")
    assert not node.ended()
    (machine.root / "etc/awsddp/idle").write_text("3600\n")
    assert node.ended()


class SavedJob:
    """The folder of a job whose results are saved, on a machine that notes which savers it starts."""

    def __init__(self, machine: Machine) -> None:
        self.node = IdleMachine(machine, idle_s=0)
        self.folder = machine.root / "home/ubuntu/.awsddp/jobs/train-1"
        self.folder.mkdir(parents=True)
        self.notes = machine.root / "started"
        program = machine.root / "bin/systemd-run"
        program.write_text(
            f'#!/bin/sh\necho "$*" >> "{self.notes}"\nwhile [ "$1" != python3 ]; do shift; done\nexec "$@"\n'
        )
        program.chmod(0o755)
        code = "import sys; print('says', sys.stdin.read())"
        order = {"argv": [sys.executable, "-c", code], "stdin": base64.b64encode(b"the order").decode()}
        (self.folder / "saver.json").write_text(json.dumps(order))
        (self.folder / "saver.lock").touch()
        self.ended(now=False)

    def ended(self, *, now: bool) -> None:
        (self.folder / "saving.json").write_text(
            json.dumps({"files": 1, "error": '"ended": true', "ended": now})
        )

    def starts(self, *, uptime_s: float) -> int:
        """Return how many savers were started by then."""
        self.node.uptime(uptime_s)
        self.node.ended()
        return len(self.notes.read_text().splitlines()) if self.notes.exists() else 0


def test_a_saver_that_has_died_is_started_again_as_its_jobs_user_and_less_often_each_time(
    machine: Machine,
) -> None:
    job = SavedJob(machine)
    starts = [job.starts(uptime_s=now) for now in (10, 19, 20, 39, 40, 79, 80, 81)]
    assert starts == [0, 0, 1, 1, 2, 2, 3, 3]
    words = job.notes.read_text().splitlines()[0].split()
    assert f"--uid={job.folder.owner()}" in words
    assert "--property=Before=awsddp-jobs.service" in words  # a shutdown waits for it, as for other jobs
    assert (job.folder / "saver.log").read_text() == "says the order\n" * 3
    assert (job.folder / "saver.log").stat().st_mode & 0o077 == 0


def test_a_saver_that_lives_or_has_ended_is_left_alone(machine: Machine) -> None:
    job = SavedJob(machine)
    with (job.folder / "saver.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [job.starts(uptime_s=now) for now in (10, 20, 40)] == [0, 0, 0]
    job.ended(now=True)
    assert [job.starts(uptime_s=now) for now in (50, 60)] == [0, 0]
    job.ended(now=False)
    assert [job.starts(uptime_s=now) for now in (70, 80)] == [0, 1]


def test_a_reboot_starts_the_savers_of_jobs_that_have_not_saved_all(machine: Machine) -> None:
    job = SavedJob(machine)
    assert [job.starts(uptime_s=now) for now in (10, 20)] == [0, 1]
    assert machine.watchdog is not None
    machine.watchdog.kill()
    machine.watchdog.wait()
    machine.watchdog = None
    shutil.rmtree(machine.root / "run")
    machine.boot(datetime.now(UTC) + timedelta(days=1))
    assert [job.starts(uptime_s=now) for now in (5, 15)] == [1, 2]
