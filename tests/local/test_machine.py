"""Which modes of the local cloud a machine supports."""

from pathlib import Path

import pytest

from awsddp.errors import LocalCloudError
from awsddp.local import machine


def test_an_unsupported_system_and_missing_python_packages_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalCloudError, match="not installed") as bare:
        machine.choose_mode("records", tmp_path)
    assert ".[local]" in bare.value.next
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    with pytest.raises(LocalCloudError, match="Linux only") as foreign:
        machine.choose_mode(None, tmp_path)
    assert "docker build" in foreign.value.next


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "SEARCH", str(tmp_path))
    monkeypatch.setattr(machine, "_why_no_namespaces", lambda: None)
    with pytest.raises(LocalCloudError) as caught:
        machine.choose_mode(None, tmp_path)
    assert "systemd-container, cloud-init" in caught.value.why
    packages, loopback, records = caught.value.next.splitlines()
    assert packages.startswith("apt-get install")
    assert loopback.startswith("awsddp local start --loopback ")
    assert records.startswith("awsddp local start --no-hosts ")
    with pytest.raises(LocalCloudError) as caught:
        machine.choose_mode("loopback", tmp_path)
    assert "openssh-server" in caught.value.why
    assert caught.value.next.splitlines()[1:] == [records]


@pytest.mark.parametrize("lack", ["not root", "no namespaces (Operation not permitted)"])
def test_loopback_mode_is_chosen_without_root_or_namespaces_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lack: str
) -> None:
    monkeypatch.setattr(machine, "_why_no_namespaces", lambda: lack)
    mode, why = machine.choose_mode(None, tmp_path)
    assert (mode, lack in why) == ("loopback", True)


def test_loopback_mode_refuses_a_home_with_spaces(tmp_path: Path) -> None:
    with pytest.raises(LocalCloudError, match="without spaces"):
        machine.choose_mode("loopback", tmp_path / "a b")
