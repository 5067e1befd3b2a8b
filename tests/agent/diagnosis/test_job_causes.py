"""Causes that only a job as a whole shows, and the rows of their table."""

from awsddp.agent.diagnosis.causes import ECHOES, TABLE, Evidence, explain
from awsddp.agent.diagnosis.job_causes import WAITED, Row, cause_of_node, explain_early_exit, rows
from tests.support.fleet import make_launch
from tests.support.rank_logs import GLOO, exception_log


def test_kinds_that_another_rank_may_cause_are_rows_of_the_table() -> None:
    assert {row.kind for row in TABLE} >= ECHOES >= set(WAITED)


def test_lost_peer_is_explained_by_a_rank_that_ended_early() -> None:
    cause = explain(
        Evidence(1, exception_log(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:49360."))
    )
    plain = explain_early_exit(cause._replace(tail=["train.py", "in all_reduce"]), "Rank 1 had ended. ")
    assert (plain.kind, plain.retryable) == ("left_early", False)
    assert plain.explanation.startswith("Rank 1 had ended. RuntimeError: ")
    tail = ['  File "/x/torch/autograd/graph.py", line 979, in _engine']
    uneven = explain_early_exit(cause._replace(tail=tail), "Rank 1 had ended. ")
    assert uneven.kind == "uneven_batches"


def test_row_of_a_table_has_its_conditions_and_its_next_step() -> None:
    table = """
# a comment
a_kind (retryable): A text: with {value}.
  said ^one|two
  said (?P<value>three)
  killed
  next do this   # or that
exit:"""
    conditions = {"said": "^one|two|(?P<value>three)", "killed": ""}
    assert rows(table) == (
        Row("a_kind", "A text: with {value}.", True, conditions, "do this   # or that"),
        Row("exit", "", False, {}),
    )


def test_cause_of_a_node_names_its_instance_and_a_next_step() -> None:
    request = make_launch()
    cause = cause_of_node(request, 1, "node_lost", why="node1 was lost")
    assert (cause.instance_id, cause.explanation, cause.retryable) == ("i-1", "node1 was lost.", True)
    assert cause.next.startswith("awsddp recover job ")
    assert cause_of_node(request, None, "timeout", seconds=90.0).node is None
