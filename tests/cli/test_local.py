"""`local fault` as it is typed, where no node has a machine of its own. What faults do: tests/local."""

import pytest

from tests.support.lab import Lab


@pytest.fixture(scope="module")
def one_node(records: Lab) -> Lab:
    assert records.run("up", "--local", "--nodes", "1", "-y").returncode == 0
    return records


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("node9", "cut"), "the cluster default has no node9\n  why: its nodes are node0"),
        (("node0", "cut", "--for", "soon"), "--for: invalid duration 'soon'"),
        (("node0", "frozen"), "this local cloud runs in records mode"),
    ],
)
def test_a_fault_of_a_node_that_cannot_be_is_exit_2_with_the_choices(
    one_node: Lab, words: tuple[str, ...], told: str
) -> None:
    shown = one_node.run("local", "fault", "add", *words)
    assert (shown.returncode, told in shown.stderr) == (2, True), shown.stderr


def test_a_fault_of_calls_heals_by_itself_too(records: Lab) -> None:
    shown = records.run("local", "fault", "add", "RunInstances", "lost", "--for", "1h")
    assert shown.stdout.split()[:7] == ["fault", "target", "effect", "times", "seconds", "only", "until"]
    (fault,) = records.json("local", "status")["faults"]
    assert (fault["operation"], fault["heals_at"] is None) == ("RunInstances", False)
    assert records.run("local", "fault", "clear").stdout == "No faults.\n"
