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


def layers(error: NodesFailed) -> dict[int, str]:
    return {
        node: failure.layer for node, failure in error.failures.items() if isinstance(failure, NodeFailure)
    }


def test_a_command_runs_on_all_nodes_and_each_answers_for_itself(lab: MakeLab) -> None:
    three = lab(3)
    with three.fleet() as fleet:
        assert fleet.nodes == (0, 1, 2)
        results = fleet.run(["sh", "-c", "pwd; echo oh >&2; cat; exit 3"], stdin=b"in", timeout_s=20)
    assert results == {
        host.node: Result(exit_code=3, stdout=f"{host.home}\nin".encode(), stderr=b"oh\n")
        for host in three.hosts
    }


def test_each_node_gets_its_own_words_and_stdin(lab: MakeLab) -> None:
    with lab(2).fleet() as fleet:
        ends = fleet.run_each({0: (["cat"], b"zero"), 1: (["rev"], b"one")}, timeout_s=20)
    assert ends == {
        0: Result(exit_code=0, stdout=b"zero", stderr=b""),
        1: Result(exit_code=0, stdout=b"eno", stderr=b""),
    }


def test_a_command_finds_its_channel_open(lab: MakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[paramiko.Channel] = []
    run: list[paramiko.Channel] = []
    open_session, exec_command = paramiko.Transport.open_session, paramiko.Channel.exec_command

    def open_ahead(transport: paramiko.Transport, **more: int) -> paramiko.Channel:
        opened.append(open_session(transport, **more))
        return opened[-1]

    def execute(channel: paramiko.Channel, line: str) -> None:
        assert channel in opened
        run.append(channel)
        exec_command(channel, line)

    monkeypatch.setattr(paramiko.Transport, "open_session", open_ahead)
    monkeypatch.setattr(paramiko.Channel, "exec_command", execute)
    with lab(1).fleet() as fleet:
        for count in (1, 2, 3):
            wait_until(lambda count=count: len(opened) == count, "a channel for the next command")  # type: ignore[misc]
            assert fleet.run(["echo", "up"], timeout_s=20)[0].stdout == b"up\n"
    assert run == opened[:3]


def test_words_arrive_as_they_are(lab: MakeLab) -> None:
    one = lab(1)
    with one.fleet() as fleet:
        result = fleet.run(["printf", "%s\\0", *NASTY], timeout_s=20)[0]
    assert result.stdout.decode().split("\0")[:-1] == NASTY
    assert not (one.hosts[0].home / "canary").exists()


def test_the_command_line_is_one_quoted_word_after_the_other() -> None:
    assert command_line(["echo", "a b", "$x"]) == "echo 'a b' '$x'"


def test_much_in_and_much_out_at_once_does_not_block(lab: MakeLab) -> None:
    data = os.urandom(2**20) * 24
    with lab(1).fleet() as fleet:
        result = fleet.run(["sh", "-c", "tee /dev/stderr"], stdin=data, timeout_s=60)[0]
    assert result.stdout == data
    assert result.stderr == data


def test_a_command_may_end_before_it_has_read_its_stdin(lab: MakeLab) -> None:
    with lab(1).fleet() as fleet:
        result = fleet.run(["sh", "-c", "exit 4"], stdin=b"x" * 2**25, timeout_s=20)[0]
    assert result.exit_code == 4


def test_a_command_that_a_signal_ends_has_the_exit_code_minus_one(lab: MakeLab) -> None:
    with lab(1).fleet() as fleet:
        assert fleet.run(["sh", "-c", "kill -9 $$"], timeout_s=20)[0].exit_code in (-1, 137)


def test_a_command_that_takes_too_long_is_an_error_of_its_node_alone(lab: MakeLab) -> None:
    with lab(2).fleet() as fleet:
        ends = fleet.run_each({0: (["sleep", "60"], b""), 1: (["echo", "here"], b"")}, timeout_s=1)
        with pytest.raises(NodesFailed) as caught:
            results_or_raise(ends)
        assert layers(caught.value) == {0: "silent"}
        assert caught.value.results[1].stdout == b"here\n"
        fleet.reconnect([0])
        assert fleet.run(["true"], timeout_s=20)[0].exit_code == 0


@pytest.mark.parametrize("endless", ["while :; do echo y; done", "while :; do echo y >&2; done"])
def test_endless_output_ends_at_the_deadline_too(lab: MakeLab, endless: str) -> None:
    with lab(1).fleet() as fleet, pytest.raises(NodesFailed):
        fleet.run(["sh", "-c", endless], timeout_s=0.5)


def test_a_host_key_that_is_not_the_known_one_ends_it_at_once(lab: MakeLab) -> None:
    two = lab(2)
    hostkeys.set_keys(two.known_hosts, {two.hosts[1].endpoint.instance_id: make_key("another").public})
    with pytest.raises(NodesFailed) as caught, two.fleet(deadline_s=3600):
        pass
    assert layers(caught.value) == {1: "host key"}
    assert caught.value.exit_code == 6
    assert two.hosts[1].host in str(caught.value)


def test_a_node_in_its_boot_may_show_another_host_key_first_and_is_sent_nothing(lab: MakeLab) -> None:
    one = lab(1)
    host, temporary = one.hosts[0], make_key("temporary")
    hostkeys.set_keys(one.known_hosts, {host.endpoint.instance_id: temporary.public})
    said: list[Event] = []

    def show_it(event: Event) -> None:
        said.append(event)
        host.stop()
        (host.root / "etc/ssh/ssh_host_ed25519_key").write_text(temporary.private)
        (host.root / "log").rename(host.root / "log of the foreign key")
        host.start()

    login = replace(one.login(), boot_key=hostkeys.strip_comment(temporary.public))
    with Fleet(one.endpoints(), login, deadline_s=60, on_event=show_it) as fleet:
        assert fleet.host_key(0) == hostkeys.strip_comment(temporary.public)
    assert said == [Event("waiting for SSH (host key)", who="node0")]
    before = (host.root / "log of the foreign key").read_text()
    assert "Connection from" in before
    assert getpass.getuser() not in before, "no name was sent, and no key"


def test_a_foreign_host_key_is_refused_at_the_boot_deadline(lab: MakeLab) -> None:
    one = lab(1)
    temporary = hostkeys.strip_comment(make_key("temporary").public)
    hostkeys.set_keys(one.known_hosts, {one.hosts[0].endpoint.instance_id: temporary})
    login = replace(one.login(), boot_key=temporary)
    with pytest.raises(NodesFailed) as caught, Fleet(one.endpoints(), login, deadline_s=1.5):
        pass
    assert layers(caught.value) == {0: "host key"}


def test_a_node_that_has_shown_its_last_host_key_is_in_its_boot_no_more(lab: MakeLab) -> None:
    one = lab(1)
    temporary, last = (hostkeys.strip_comment(make_key(name).public) for name in ("temporary", "last"))
    hostkeys.set_keys(one.known_hosts, {one.hosts[0].endpoint.instance_id: temporary})
    hostkeys.add_keys(one.known_hosts, {one.hosts[0].endpoint.instance_id: last})
    login = replace(one.login(), boot_key=temporary)
    with pytest.raises(NodesFailed) as caught, Fleet(one.endpoints(), login, deadline_s=3600):
        pass
    assert layers(caught.value) == {0: "host key"}


def test_logins_that_a_booting_node_closes_stay_below_what_sshd_locks_out_for(lab: MakeLab) -> None:
    """sshd_config(5), PerSourcePenalties: 5 s each, taken off by the second; over 15 s the address is out."""

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            if len(pauses) == 20:
                self.set()
            return True

    one, pauses, penalty_s = lab(1), list[float](), 5.0
    host = one.hosts[0]
    host.stop()
    (host.root / "authorized_keys").write_text("")
    with (host.root / "sshd_config").open("a") as config:
        config.write("MaxAuthTries 1\n")  # closes the connection, as PAM does
    host.start()
    with pytest.raises(NodeFailure, match="connection closed during login"):
        connect(
            host.endpoint,
            key=load_key(one.key),
            login=one.login(),
            deadline_s=3600,
            stop=Waits(),
            on_event=ignore_event,
        )
    assert pauses[0] == 1
    for pause in pauses:
        penalty_s = max(0.0, penalty_s - pause) + 5
        assert penalty_s <= 15


def test_a_node_whose_host_key_is_not_known_is_not_even_called(lab: MakeLab) -> None:
    one = lab(1)
    hostkeys.remove_instances(one.known_hosts, [one.hosts[0].endpoint.instance_id])
    with pytest.raises(NodesFailed) as caught, one.fleet(deadline_s=3600):
        pass
    assert layers(caught.value) == {0: "host key"}


def test_the_key_of_another_instance_does_not_vouch_for_this_one(lab: MakeLab) -> None:
    two = lab(2)
    ids = [host.endpoint.instance_id for host in two.hosts]
    keys = [host.seed.public for host in two.hosts]
    hostkeys.set_keys(two.known_hosts, {ids[0]: keys[1], ids[1]: keys[0]})
    with pytest.raises(NodesFailed) as caught, two.fleet():
        pass
    assert layers(caught.value) == {0: "host key", 1: "host key"}
    assert str(caught.value).startswith("2 of 2 nodes failed")


def test_either_of_two_accepted_host_keys_is_right(lab: MakeLab) -> None:
    one = lab(1)
    host = one.hosts[0]
    hostkeys.set_keys(one.known_hosts, {host.endpoint.instance_id: make_key("next").public})
    hostkeys.add_keys(one.known_hosts, {host.endpoint.instance_id: host.seed.public})
    with one.fleet() as fleet:
        assert fleet.host_key(0) == hostkeys.strip_comment(host.seed.public)


def test_a_login_key_that_is_refused_is_said_to_be(lab: MakeLab, isolated: Path) -> None:
    one = lab(1)
    (isolated / ".ssh").mkdir()
    one.key.rename(isolated / ".ssh/id_ed25519")  # the right key, where no one is to look for it
    one.key.touch(mode=0o600)
    one.key.write_text(make_key("wrong").private)
    with pytest.raises(NodesFailed) as caught, one.fleet():
        pass
    assert layers(caught.value) == {0: "login"}


@pytest.mark.parametrize("text", [None, "", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"])
def test_a_login_key_that_is_none_is_a_matter_of_configuration(lab: MakeLab, text: str | None) -> None:
    one = lab(1)
    one.key.unlink()
    if text is not None:
        one.key.write_text(text)
    with pytest.raises(ConfigError, match="login key"), one.fleet():
        pass


def test_a_closed_port_a_frozen_server_and_a_name_without_address_are_told_apart(lab: MakeLab) -> None:
    four = lab(3)
    four.hosts[0].stop()
    four.hosts[1].freeze()
    four.hosts[2].host = "nowhere.invalid"
    with pytest.raises(NodesFailed) as caught, four.fleet(deadline_s=1):
        pass
    assert layers(caught.value) == {0: "refused", 1: "banner", 2: "no route"}


def test_with_partial_the_others_are_used(lab: MakeLab) -> None:
    two = lab(2)
    two.hosts[0].stop()
    with two.fleet(deadline_s=0.5, partial=True) as fleet:
        assert fleet.nodes == (1,)
        assert list(fleet.failures) == [0]
        assert fleet.run(["true"], timeout_s=20)[1].exit_code == 0
        with pytest.raises(NodesFailed, match="no sshd is listening"):
            fleet.run(["true"], nodes=[0, 1], timeout_s=20)


def test_a_node_that_boots_is_waited_for(lab: MakeLab) -> None:
    two = lab(2)
    two.hosts[1].stop()
    said: list[Event] = []

    def start_it(event: Event) -> None:
        said.append(event)
        if len(said) == 1:
            two.hosts[1].start()

    with two.fleet(on_event=start_it) as fleet:
        assert fleet.nodes == (0, 1)
    assert said[0] == Event("waiting for SSH (refused)", who="node1")


def test_what_meanwhile_raises_ends_the_wait_for_a_node_that_does_not_boot(
    lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "MEANWHILE_S", 0.05)
    made = lab(1)
    made.hosts[0].stop()
    looks: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            raise NodeError("it was stopped")

    with pytest.raises(NodeError, match="it was stopped"), made.fleet(deadline_s=600, on_idle=look):
        pass
    assert len(looks) == 3


def test_streams_are_handed_over_as_they_come(lab: MakeLab) -> None:
    came: dict[int, bytearray] = {0: bytearray(), 1: bytearray()}
    threads = set()

    def take(node: int, data: bytes) -> None:
        threads.add(threading.current_thread())
        came[node] += data

    program = ["sh", "-c", "seq 200000; echo oops >&2; exit 5"]
    with lab(2).fleet() as fleet:
        ends = fleet.stream({0: (program, b""), 1: (["sed", "s/^/>/"], b"a\nb\n")}, take, silent_after_s=20)
    assert ends == {
        0: Result(exit_code=5, stdout=b"", stderr=b"oops\n"),
        1: Result(exit_code=0, stdout=b"", stderr=b""),
    }
    assert came[0] == b"".join(b"%d\n" % number for number in range(1, 200001))
    assert came[1] == b">a\n>b\n"
    assert threads == {threading.main_thread()}


BEATS = ["sh", "-c", "while :; do echo beat; sleep 0.1; done"]


@pytest.mark.prove
def test_a_node_that_falls_silent_is_given_up_and_the_others_go_on(lab: MakeLab) -> None:
    two = lab(2)
    beats = {0: 0, 1: 0}

    def count(node: int, data: bytes) -> None:
        beats[node] += data.count(b"\n")
        if node == 1 and not two.hosts[1].frozen:
            two.hosts[1].freeze()

    program = ["sh", "-c", "for i in $(seq 40); do echo beat; sleep 0.1; done"]
    with two.fleet() as fleet:
        ends = fleet.stream({0: (program, b""), 1: (BEATS, b"")}, count, silent_after_s=1.5)
        assert fleet.nodes == (0,)
    assert isinstance(ends[0], Result)
    assert ends[0].exit_code == 0
    assert beats[0] == 40
    assert isinstance(ends[1], NodeFailure)
    assert ends[1].layer == "silent"


@pytest.mark.prove
def test_a_frozen_node_that_stdin_is_poured_into_holds_nobody_up(lab: MakeLab) -> None:
    two = lab(2)
    with two.fleet() as fleet:
        two.hosts[1].freeze()
        with pytest.raises(NodesFailed) as caught:
            fleet.run(["wc", "-c"], stdin=b"x" * 2**24, timeout_s=6)
    assert layers(caught.value) == {1: "silent"}
    assert caught.value.results[0].stdout.split() == [b"%d" % 2**24]


def test_a_connection_that_breaks_is_told_as_lost(lab: MakeLab) -> None:
    two = lab(2)

    def cut(node: int, data: bytes) -> None:
        if node == 1:
            for pid in two.hosts[1].sessions():
                os.kill(pid, signal.SIGKILL)

    with two.fleet() as fleet:
        ends = fleet.stream({0: (["echo", "hi"], b""), 1: (BEATS, b"")}, cut, silent_after_s=60)
    assert isinstance(ends[0], Result)
    assert isinstance(ends[1], NodeError)
    assert isinstance(ends[1], NodeFailure)
    assert ends[1].layer == "lost"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ValueError])
def test_what_on_data_raises_ends_all_streams_and_the_fleet_lives_on(
    lab: MakeLab, interrupt: type[BaseException]
) -> None:
    two = lab(2)

    def stop(node: int, data: bytes) -> None:
        raise interrupt

    with two.fleet() as fleet:
        with pytest.raises(interrupt):
            fleet.stream({0: (BEATS, b""), 1: (BEATS, b"")}, stop, silent_after_s=60)
        assert {result.exit_code for result in fleet.run(["true"], timeout_s=20).values()} == {0}


ECHO = ["sh", "-c", 'read hello; while read word; do [ "$word" ] || exit 7; echo "$hello $$ $word"; done']


def talk(
    fleet: Fleet, words: dict[int, bytes]
) -> tuple[dict[int, Result | NodeError], dict[int, list[bytes]]]:
    """Say a line to each node's ECHO and return how that ended, and the words of each answer."""
    said = dict.fromkeys(words, b"")

    def whole(node: int, data: bytes) -> bool:
        said[node] += data
        return said[node].endswith(b"\n")

    ends = fleet.request((ECHO, b"hi\n"), words, whole, timeout_s=20)
    return ends, {node: answer.split() for node, answer in said.items()}


def test_one_program_a_node_answers_all_messages_of_a_connection(lab: MakeLab) -> None:
    with lab(2).fleet() as fleet:
        first = talk(fleet, {0: b"a\n", 1: b"b\n"})[1]
        second = talk(fleet, {0: b"c\n"})[1]
        third = talk(fleet, {0: b"d\n", 1: b"e\n"})[1]
    assert [first[0][0], first[0][2], first[1][2]] == [b"hi", b"a", b"b"]
    assert [second[0][2], third[0][2], third[1][2]] == [b"c", b"d", b"e"]
    assert first[0][1] == second[0][1] == third[0][1]
    assert first[1][1] == third[1][1]


def test_a_program_that_ends_is_told_and_the_next_message_starts_another(lab: MakeLab) -> None:
    with lab(2).fleet() as fleet:
        before = talk(fleet, {0: b"a\n", 1: b"a\n"})[1]
        ends, _ = talk(fleet, {0: b"\n", 1: b"b\n"})
        after = talk(fleet, {0: b"c\n", 1: b"c\n"})[1]
    assert ends[0] == Result(exit_code=7, stdout=b"", stderr=b"")
    assert ends[1] == Result(exit_code=0, stdout=b"", stderr=b"")
    assert before[0][1] != after[0][1]
    assert before[1][1] == after[1][1]


def test_an_answer_that_was_interrupted_does_not_reach_who_asks_next(lab: MakeLab) -> None:
    def stop(node: int, data: bytes) -> bool:
        raise KeyboardInterrupt

    with lab(1).fleet() as fleet:
        with pytest.raises(KeyboardInterrupt):
            fleet.request((ECHO, b"hi\n"), {0: b"a\nb\nc\n"}, stop)
        assert talk(fleet, {0: b"d\n"})[1][0][2:] == [b"d"]


def test_a_node_that_does_not_answer_a_message_is_given_up(lab: MakeLab) -> None:
    two = lab(2)
    with two.fleet() as fleet:
        talk(fleet, {0: b"a\n", 1: b"a\n"})
        two.hosts[1].freeze()
        ends = fleet.request((ECHO, b"hi\n"), {0: b"a\n", 1: b"a\n"}, lambda *_: True, timeout_s=1.5)
        assert fleet.nodes == (0,)
    assert isinstance(ends[0], Result)
    assert isinstance(ends[1], NodeFailure)
    assert ends[1].layer == "silent"


def test_nothing_is_left_behind_by_a_fleet(lab: MakeLab) -> None:
    two = lab(2)
    before = set(threading.enumerate())
    with two.fleet() as fleet:
        fleet.run(["true"], timeout_s=20)
    wait_until(lambda: not any(host.sessions() for host in two.hosts), "the sessions' end")
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads' end")
