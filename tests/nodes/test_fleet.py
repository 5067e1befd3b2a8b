import getpass
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from awsddp.errors import ConfigError, NodeError
from awsddp.model.events import Event
from awsddp.nodes import hostkeys
from awsddp.nodes.connection import connect, load_key
from awsddp.nodes.fleet import Fleet, Result, command_line
from awsddp.nodes.hostkeys import make_key
from awsddp.nodes.node_failures import NodeFailure
from awsddp.util import parallel
from awsddp.util.parallel import NodesFailed, ignore_event, results_or_raise
from tests.support.ssh_hosts import Lab, wait_until

MakeLab = Callable[[int], Lab]
NASTY = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "$(touch canary)",
    "`touch canary`",
    "-n",
    "\n",
    "a\nb",
    "*",
    "~",
    "\\",
    "ü",
    ";",
]


def get_layers(error: NodesFailed) -> dict[int, str]:
    return {
        node: failure.layer for node, failure in error.failures.items() if isinstance(failure, NodeFailure)
    }


def test_command_runs_on_all_nodes_with_one_result_per_node(make_lab: MakeLab) -> None:
    lab = make_lab(3)
    with lab.fleet() as fleet:
        assert fleet.nodes == (0, 1, 2)
        results = fleet.run(["sh", "-c", "pwd; echo oh >&2; cat; exit 3"], stdin=b"in", timeout_s=20)
    assert results == {
        host.node: Result(exit_code=3, stdout=f"{host.home}\nin".encode(), stderr=b"oh\n")
        for host in lab.hosts
    }


def test_each_node_gets_its_own_arguments_and_stdin(make_lab: MakeLab) -> None:
    with make_lab(2).fleet() as fleet:
        results = fleet.run_each({0: (["cat"], b"zero"), 1: (["rev"], b"one")}, timeout_s=20)
    assert results == {
        0: Result(exit_code=0, stdout=b"zero", stderr=b""),
        1: Result(exit_code=0, stdout=b"eno", stderr=b""),
    }


def test_channel_opens_before_a_command_needs_it(make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[paramiko.Channel] = []
    used: list[paramiko.Channel] = []
    open_session, exec_command = paramiko.Transport.open_session, paramiko.Channel.exec_command

    def open_ahead(transport: paramiko.Transport, **options: int) -> paramiko.Channel:
        opened.append(open_session(transport, **options))
        return opened[-1]

    def execute(channel: paramiko.Channel, line: str) -> None:
        assert channel in opened
        used.append(channel)
        exec_command(channel, line)

    monkeypatch.setattr(paramiko.Transport, "open_session", open_ahead)
    monkeypatch.setattr(paramiko.Channel, "exec_command", execute)
    with make_lab(1).fleet() as fleet:
        for count in (1, 2, 3):
            wait_until(lambda count=count: len(opened) == count, "a channel for the next command")  # type: ignore[misc]
            assert fleet.run(["echo", "up"], timeout_s=20)[0].stdout == b"up\n"
    assert used == opened[:3]


def test_arguments_arrive_unchanged(make_lab: MakeLab) -> None:
    lab = make_lab(1)
    with lab.fleet() as fleet:
        result = fleet.run(["printf", "%s\\0", *NASTY], timeout_s=20)[0]
    assert result.stdout.decode().split("\0")[:-1] == NASTY
    assert not (lab.hosts[0].home / "canary").exists()


def test_command_line_quotes_each_argument() -> None:
    assert command_line(["echo", "a b", "$x"]) == "echo 'a b' '$x'"


def test_large_input_and_output_at_once_do_not_block(make_lab: MakeLab) -> None:
    data = os.urandom(2**20) * 24
    with make_lab(1).fleet() as fleet:
        result = fleet.run(["sh", "-c", "tee /dev/stderr"], stdin=data, timeout_s=60)[0]
    assert result.stdout == data
    assert result.stderr == data


def test_command_may_end_before_it_has_read_its_stdin(make_lab: MakeLab) -> None:
    with make_lab(1).fleet() as fleet:
        result = fleet.run(["sh", "-c", "exit 4"], stdin=b"x" * 2**25, timeout_s=20)[0]
    assert result.exit_code == 4


def test_command_that_a_signal_ends_has_exit_code_minus_1_or_137(make_lab: MakeLab) -> None:
    with make_lab(1).fleet() as fleet:
        assert fleet.run(["sh", "-c", "kill -9 $$"], timeout_s=20)[0].exit_code in (-1, 137)


def test_timeout_of_a_command_is_an_error_of_its_node_only(make_lab: MakeLab) -> None:
    with make_lab(2).fleet() as fleet:
        results = fleet.run_each({0: (["sleep", "60"], b""), 1: (["echo", "here"], b"")}, timeout_s=1)
        with pytest.raises(NodesFailed) as error:
            results_or_raise(results)
        assert get_layers(error.value) == {0: "silent"}
        assert error.value.results[1].stdout == b"here\n"
        fleet.reconnect([0])
        assert fleet.run(["true"], timeout_s=20)[0].exit_code == 0


@pytest.mark.parametrize("command", ["while :; do echo y; done", "while :; do echo y >&2; done"])
def test_endless_output_ends_at_the_timeout(make_lab: MakeLab, command: str) -> None:
    with make_lab(1).fleet() as fleet, pytest.raises(NodesFailed):
        fleet.run(["sh", "-c", command], timeout_s=0.5)


def test_wrong_host_key_fails_without_retries(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    hostkeys.set_keys(lab.known_hosts, {lab.hosts[1].endpoint.instance_id: make_key("another").public})
    with pytest.raises(NodesFailed) as error, lab.fleet(deadline_s=3600):
        pass
    assert get_layers(error.value) == {1: "host key"}
    assert error.value.exit_code == 6
    assert lab.hosts[1].host in str(error.value)


def test_booting_node_with_another_host_key_is_sent_nothing_and_retried(make_lab: MakeLab) -> None:
    lab = make_lab(1)
    host, boot_key = lab.hosts[0], make_key("temporary")
    hostkeys.set_keys(lab.known_hosts, {host.endpoint.instance_id: boot_key.public})
    events: list[Event] = []

    def restart_with_boot_key(event: Event) -> None:
        events.append(event)
        host.stop()
        (host.root / "etc/ssh/ssh_host_ed25519_key").write_text(boot_key.private)
        (host.root / "log").rename(host.root / "log of the foreign key")
        host.start()

    login = replace(lab.login(), boot_key=hostkeys.strip_comment(boot_key.public))
    with Fleet(lab.endpoints(), login, deadline_s=60, on_event=restart_with_boot_key) as fleet:
        assert fleet.host_key(0) == hostkeys.strip_comment(boot_key.public)
    assert events == [Event("waiting for SSH (host key)", who="node0")]
    log = (host.root / "log of the foreign key").read_text()
    assert "Connection from" in log
    assert getpass.getuser() not in log, "no name was sent, and no key"


def test_foreign_host_key_is_refused_at_the_boot_deadline(make_lab: MakeLab) -> None:
    lab = make_lab(1)
    boot_key = hostkeys.strip_comment(make_key("temporary").public)
    hostkeys.set_keys(lab.known_hosts, {lab.hosts[0].endpoint.instance_id: boot_key})
    login = replace(lab.login(), boot_key=boot_key)
    with pytest.raises(NodesFailed) as error, Fleet(lab.endpoints(), login, deadline_s=1.5):
        pass
    assert get_layers(error.value) == {0: "host key"}


def test_node_with_a_recorded_final_host_key_is_no_longer_booting(make_lab: MakeLab) -> None:
    lab = make_lab(1)
    boot_key, final_key = (hostkeys.strip_comment(make_key(name).public) for name in ("temporary", "last"))
    hostkeys.set_keys(lab.known_hosts, {lab.hosts[0].endpoint.instance_id: boot_key})
    hostkeys.add_keys(lab.known_hosts, {lab.hosts[0].endpoint.instance_id: final_key})
    login = replace(lab.login(), boot_key=boot_key)
    with pytest.raises(NodesFailed) as error, Fleet(lab.endpoints(), login, deadline_s=3600):
        pass
    assert get_layers(error.value) == {0: "host key"}


def test_retries_of_closed_logins_stay_below_the_penalty_limit_of_sshd(make_lab: MakeLab) -> None:
    """sshd_config(5), PerSourcePenalties: 5 s per login, which decay; above 15 s the address is refused."""

    class RecordedWaits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            if len(pauses) == 20:
                self.set()
            return True

    lab, pauses, penalty_s = make_lab(1), list[float](), 5.0
    host = lab.hosts[0]
    host.stop()
    (host.root / "authorized_keys").write_text("")
    with (host.root / "sshd_config").open("a") as config:
        config.write("MaxAuthTries 1\n")  # closes the connection, as PAM does
    host.start()
    with pytest.raises(NodeFailure, match="connection closed during login"):
        connect(
            host.endpoint,
            key=load_key(lab.key),
            login=lab.login(),
            deadline_s=3600,
            stop=RecordedWaits(),
            on_event=ignore_event,
        )
    assert pauses[0] == 1
    for pause in pauses:
        penalty_s = max(0.0, penalty_s - pause) + 5
        assert penalty_s <= 15


def test_node_without_a_known_host_key_is_refused(make_lab: MakeLab) -> None:
    lab = make_lab(1)
    hostkeys.remove_instances(lab.known_hosts, [lab.hosts[0].endpoint.instance_id])
    with pytest.raises(NodesFailed) as error, lab.fleet(deadline_s=3600):
        pass
    assert get_layers(error.value) == {0: "host key"}


def test_host_key_of_another_instance_is_refused(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    ids = [host.endpoint.instance_id for host in lab.hosts]
    keys = [host.seed.public for host in lab.hosts]
    hostkeys.set_keys(lab.known_hosts, {ids[0]: keys[1], ids[1]: keys[0]})
    with pytest.raises(NodesFailed) as error, lab.fleet():
        pass
    assert get_layers(error.value) == {0: "host key", 1: "host key"}
    assert str(error.value).startswith("2 of 2 nodes failed")


def test_either_of_two_accepted_host_keys_is_valid(make_lab: MakeLab) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    hostkeys.set_keys(lab.known_hosts, {host.endpoint.instance_id: make_key("next").public})
    hostkeys.add_keys(lab.known_hosts, {host.endpoint.instance_id: host.seed.public})
    with lab.fleet() as fleet:
        assert fleet.host_key(0) == hostkeys.strip_comment(host.seed.public)


def test_refused_login_key_is_reported(make_lab: MakeLab, isolated: Path) -> None:
    lab = make_lab(1)
    (isolated / ".ssh").mkdir()
    lab.key.rename(isolated / ".ssh/id_ed25519")  # the right key, in a file that must not be read
    lab.key.touch(mode=0o600)
    lab.key.write_text(make_key("wrong").private)
    with pytest.raises(NodesFailed) as error, lab.fleet():
        pass
    assert get_layers(error.value) == {0: "login"}


@pytest.mark.parametrize("text", [None, "", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"])
def test_missing_or_invalid_login_key_is_a_configuration_error(make_lab: MakeLab, text: str | None) -> None:
    lab = make_lab(1)
    lab.key.unlink()
    if text is not None:
        lab.key.write_text(text)
    with pytest.raises(ConfigError, match="login key"), lab.fleet():
        pass


def test_closed_port_frozen_server_and_unknown_host_are_different_layers(make_lab: MakeLab) -> None:
    lab = make_lab(3)
    lab.hosts[0].stop()
    lab.hosts[1].freeze()
    lab.hosts[2].host = "nowhere.invalid"
    with pytest.raises(NodesFailed) as error, lab.fleet(deadline_s=1):
        pass
    assert get_layers(error.value) == {0: "refused", 1: "banner", 2: "no route"}


def test_partial_fleet_uses_the_nodes_that_answer(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    lab.hosts[0].stop()
    with lab.fleet(deadline_s=0.5, partial=True) as fleet:
        assert fleet.nodes == (1,)
        assert list(fleet.failures) == [0]
        assert fleet.run(["true"], timeout_s=20)[1].exit_code == 0
        with pytest.raises(NodesFailed, match="no sshd is listening"):
            fleet.run(["true"], nodes=[0, 1], timeout_s=20)


def test_booting_node_is_waited_for(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    lab.hosts[1].stop()
    events: list[Event] = []

    def start_host(event: Event) -> None:
        events.append(event)
        if len(events) == 1:
            lab.hosts[1].start()

    with lab.fleet(on_event=start_host) as fleet:
        assert fleet.nodes == (0, 1)
    assert events[0] == Event("waiting for SSH (refused)", who="node1")


def test_error_of_on_idle_ends_the_wait_for_a_node(
    make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "MEANWHILE_S", 0.05)
    lab = make_lab(1)
    lab.hosts[0].stop()
    calls: list[int] = []

    def fail_later() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            raise NodeError("it was stopped")

    with pytest.raises(NodeError, match="it was stopped"), lab.fleet(deadline_s=600, on_idle=fail_later):
        pass
    assert len(calls) == 3


def test_stream_passes_output_to_the_main_thread(make_lab: MakeLab) -> None:
    received: dict[int, bytearray] = {0: bytearray(), 1: bytearray()}
    threads = set()

    def add(node: int, data: bytes) -> None:
        threads.add(threading.current_thread())
        received[node] += data

    program = ["sh", "-c", "seq 200000; echo oops >&2; exit 5"]
    with make_lab(2).fleet() as fleet:
        results = fleet.stream({0: (program, b""), 1: (["sed", "s/^/>/"], b"a\nb\n")}, add, silent_after_s=20)
    assert results == {
        0: Result(exit_code=5, stdout=b"", stderr=b"oops\n"),
        1: Result(exit_code=0, stdout=b"", stderr=b""),
    }
    assert received[0] == b"".join(b"%d\n" % number for number in range(1, 200001))
    assert received[1] == b">a\n>b\n"
    assert threads == {threading.main_thread()}


BEATS = ["sh", "-c", "while :; do echo beat; sleep 0.1; done"]


@pytest.mark.prove
def test_silent_node_is_dropped_and_the_others_continue(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    beats = {0: 0, 1: 0}

    def count(node: int, data: bytes) -> None:
        beats[node] += data.count(b"\n")
        if node == 1 and not lab.hosts[1].frozen:
            lab.hosts[1].freeze()

    program = ["sh", "-c", "for i in $(seq 40); do echo beat; sleep 0.1; done"]
    with lab.fleet() as fleet:
        results = fleet.stream({0: (program, b""), 1: (BEATS, b"")}, count, silent_after_s=1.5)
        assert fleet.nodes == (0,)
    assert isinstance(results[0], Result)
    assert results[0].exit_code == 0
    assert beats[0] == 40
    assert isinstance(results[1], NodeFailure)
    assert results[1].layer == "silent"


@pytest.mark.prove
def test_frozen_node_with_much_stdin_does_not_block_the_others(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    with lab.fleet() as fleet:
        lab.hosts[1].freeze()
        with pytest.raises(NodesFailed) as error:
            fleet.run(["wc", "-c"], stdin=b"x" * 2**24, timeout_s=6)
    assert get_layers(error.value) == {1: "silent"}
    assert error.value.results[0].stdout.split() == [b"%d" % 2**24]


def test_broken_connection_is_reported_as_lost(make_lab: MakeLab) -> None:
    lab = make_lab(2)

    def cut(node: int, data: bytes) -> None:
        if node == 1:
            for pid in lab.hosts[1].sessions():
                os.kill(pid, signal.SIGKILL)

    with lab.fleet() as fleet:
        results = fleet.stream({0: (["echo", "hi"], b""), 1: (BEATS, b"")}, cut, silent_after_s=60)
    assert isinstance(results[0], Result)
    assert isinstance(results[1], NodeError)
    assert isinstance(results[1], NodeFailure)
    assert results[1].layer == "lost"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_error_of_on_data_ends_all_streams_and_the_fleet_stays_usable(
    make_lab: MakeLab, error: type[BaseException]
) -> None:
    lab = make_lab(2)

    def stop(node: int, data: bytes) -> None:
        raise error

    with lab.fleet() as fleet:
        with pytest.raises(error):
            fleet.stream({0: (BEATS, b""), 1: (BEATS, b"")}, stop, silent_after_s=60)
        assert {result.exit_code for result in fleet.run(["true"], timeout_s=20).values()} == {0}


ECHO = ["sh", "-c", 'read hello; while read word; do [ "$word" ] || exit 7; echo "$hello $$ $word"; done']


def send(
    fleet: Fleet, messages: dict[int, bytes]
) -> tuple[dict[int, Result | NodeError], dict[int, list[bytes]]]:
    """Send a line to ECHO on each node; return the results, and the fields of each answer."""
    answers = dict.fromkeys(messages, b"")

    def is_complete(node: int, data: bytes) -> bool:
        answers[node] += data
        return answers[node].endswith(b"\n")

    results = fleet.request((ECHO, b"hi\n"), messages, is_complete, timeout_s=20)
    return results, {node: answer.split() for node, answer in answers.items()}


def test_one_program_per_node_answers_all_messages_of_a_connection(make_lab: MakeLab) -> None:
    with make_lab(2).fleet() as fleet:
        first = send(fleet, {0: b"a\n", 1: b"b\n"})[1]
        second = send(fleet, {0: b"c\n"})[1]
        third = send(fleet, {0: b"d\n", 1: b"e\n"})[1]
    assert [first[0][0], first[0][2], first[1][2]] == [b"hi", b"a", b"b"]
    assert [second[0][2], third[0][2], third[1][2]] == [b"c", b"d", b"e"]
    assert first[0][1] == second[0][1] == third[0][1]
    assert first[1][1] == third[1][1]


def test_ended_program_is_reported_and_the_next_message_starts_another(make_lab: MakeLab) -> None:
    with make_lab(2).fleet() as fleet:
        before = send(fleet, {0: b"a\n", 1: b"a\n"})[1]
        results, _ = send(fleet, {0: b"\n", 1: b"b\n"})
        after = send(fleet, {0: b"c\n", 1: b"c\n"})[1]
    assert results[0] == Result(exit_code=7, stdout=b"", stderr=b"")
    assert results[1] == Result(exit_code=0, stdout=b"", stderr=b"")
    assert before[0][1] != after[0][1]
    assert before[1][1] == after[1][1]


def test_interrupted_answer_does_not_reach_the_next_request(make_lab: MakeLab) -> None:
    def stop(node: int, data: bytes) -> bool:
        raise KeyboardInterrupt

    with make_lab(1).fleet() as fleet:
        with pytest.raises(KeyboardInterrupt):
            fleet.request((ECHO, b"hi\n"), {0: b"a\nb\nc\n"}, stop)
        assert send(fleet, {0: b"d\n"})[1][0][2:] == [b"d"]


def test_node_that_does_not_answer_a_message_is_dropped(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    with lab.fleet() as fleet:
        send(fleet, {0: b"a\n", 1: b"a\n"})
        lab.hosts[1].freeze()
        results = fleet.request((ECHO, b"hi\n"), {0: b"a\n", 1: b"a\n"}, lambda *_: True, timeout_s=1.5)
        assert fleet.nodes == (0,)
    assert isinstance(results[0], Result)
    assert isinstance(results[1], NodeFailure)
    assert results[1].layer == "silent"


def test_closed_fleet_leaves_no_sessions_and_no_threads(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    threads = set(threading.enumerate())
    with lab.fleet() as fleet:
        fleet.run(["true"], timeout_s=20)
    wait_until(lambda: not any(host.sessions() for host in lab.hosts), "the sessions' end")
    wait_until(lambda: set(threading.enumerate()) <= threads, "the threads' end")
