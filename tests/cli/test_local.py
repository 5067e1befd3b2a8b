"""The command line of `local fault`, in records mode. The effects of faults: tests/local."""

import pytest

from tests.support.lab import Lab


@pytest.fixture(scope="module")
def one_node(records: Lab) -> Lab:
    assert records.run("up", "--local", "--nodes", "1", "-y").returncode == 0
    return records


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("node9", "cut"), "the cluster default has no node9\n  why: its nodes are node0"),
        (("node0", "cut", "--for", "soon"), "--for: invalid duration 'soon'"),
        (("node0", "frozen"), "this local cloud runs in records mode"),
    ],
)
def test_an_invalid_fault_of_a_node_is_exit_2_with_the_choices(
    one_node: Lab, arguments: tuple[str, ...], text: str
) -> None:
    shown = one_node.run("local", "fault", "add", *arguments)
    assert (shown.returncode, text in shown.stderr) == (2, True), shown.stderr


def test_a_fault_of_calls_ends_after_its_duration(records: Lab) -> None:
    shown = records.run("local", "fault", "add", "RunInstances", "lost", "--for", "1h")
    assert shown.stdout.split()[:7] == ["fault", "target", "effect", "times", "seconds", "only", "until"]
    (fault,) = records.json("local", "status")["faults"]
    assert (fault["operation"], fault["heals_at"] is None) == ("RunInstances", False)
    assert records.run("local", "fault", "clear").stdout == "No faults.\n"
