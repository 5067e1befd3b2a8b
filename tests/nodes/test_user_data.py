import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from awsddp.nodes.hostkeys import make_key
from awsddp.nodes.user_data import USER_DATA_LIMIT, user_data
from tests.nodes.ssh_hosts import wait_until

yaml = pytest.importorskip("yaml")

EXPIRES = datetime(2026, 11, 22, 8, 0, tzinfo=UTC)


def test_user_data_is_what_cloud_init_takes_and_ec2_has_room_for(tmp_path: Path) -> None:
    text = user_data(host_key=make_key("seed"), expires_at=EXPIRES)
    assert text.startswith("#cloud-config\n")
    assert len(text.encode()) < USER_DATA_LIMIT
    if shutil.which("cloud-init") is None:
        pytest.skip("cloud-init is not installed")
    (tmp_path / "user-data").write_text(text)
    done = subprocess.run(
        ["cloud-init", "schema", "--config-file", tmp_path / "user-data"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_user_data_holds_the_host_key_and_the_deadline() -> None:
    seed = make_key("seed")
    document = yaml.safe_load(user_data(host_key=seed, expires_at=EXPIRES))
    assert document["ssh_keys"] == {"ed25519_private": seed.private, "ed25519_public": seed.public}
    assert f"'{int(EXPIRES.timestamp())} 2026-11-22T08:00:00Z'" in document["bootcmd"][0]


def test_the_deadline_is_one_moment_in_whatever_zone_it_is_said() -> None:
    seed = make_key("seed")
    local = EXPIRES.astimezone(timezone(timedelta(hours=9)))
    assert user_data(host_key=seed, expires_at=local) == user_data(host_key=seed, expires_at=EXPIRES)


class Machine:
    """The user data's boot commands and watchdog, with a folder for /etc and a systemctl that notes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "etc/systemd/system").mkdir(parents=True)
        bin = root / "bin"
        bin.mkdir()
        (bin / "systemctl").write_text(f'#!/bin/sh\necho "$*" >> "{root}/calls"\n')
        (bin / "curl").write_text("#!/bin/sh\nexit 22\n")
        (bin / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.05\n")
        for program in bin.iterdir():
            program.chmod(0o755)
        self.environ = {"PATH": f"{bin}:{os.environ['PATH']}"}
        self.watchdog: subprocess.Popen[bytes] | None = None

    def boot(self, expires_at: datetime) -> None:
        [script] = yaml.safe_load(user_data(host_key=make_key("seed"), expires_at=expires_at))["bootcmd"]
        for folder in ("/etc/", "/run/", "/proc/"):
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
    assert time.time() >= int(machine.expires.read_text().split()[0])


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
