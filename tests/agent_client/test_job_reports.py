"""One job, merged from the reports of its nodes."""

from typing import Any

import pytest
from msgspec.structs import replace

from awsddp.agent_client.job_reports import decode_job, encode_job, merge_job, merge_jobs
from awsddp.errors import ConfigError, NotFoundError
from awsddp.model import node_answers
from awsddp.model.records import Hang, Saving


def report(
    node: int, state: str, codes: list[int | None], *, complete: bool, **extra: Any
) -> node_answers.NodeJob:
    ranks = [
        {
            "rank": rank,
            "local_rank": rank % 2,
            "node": rank // 2,
            "exit_code": code,
            "seconds": 1.0,
            "started": 1.0,
        }
        for rank, code in enumerate(codes)
    ]
    extra = {"job": "j", "created": "2026-01-01T00:00:00+00:00", "cause": None, **extra}
    fields = {"node": node, "state": state, "complete": complete, "ranks": ranks, **extra}
    return node_answers.convert_answer(fields, node_answers.NodeJob)


def lose_node(node: int) -> dict[str, Any]:
    return {"rank": None, "node": node, "tail": [], "explanation": f"node{node} was lost"}


def test_first_node_reports_the_whole_job() -> None:
    first = report(0, "running", [0, None, None, None], complete=True)
    second = report(1, "running", [None, None, 0, None], complete=False)
    job = merge_job({1: second, 0: first})
    assert (job.state, [rank.exit_code for rank in job.ranks]) == ("running", [0, None, 0, None])
    assert job.home == "runs/j"


def test_report_on_the_whole_job_counts_before_one_on_a_part() -> None:
    whole = report(0, "running", [None] * 4, complete=True)
    part = report(1, "failed", [None] * 4, complete=False, cause=lose_node(0))
    assert merge_job({0: whole, 1: part}).state == "running"


def test_tail_is_split_only_at_newlines() -> None:
    line = "a\x0bb\x0cc\x1cd\x85e\u2028f"
    cause = {**lose_node(0), "tail": [line, "two\nlines", ""]}
    job = merge_job({0: report(0, "failed", [1] * 4, complete=True, cause=cause)})
    assert job.cause is not None and job.cause.tail == (line, "two", "lines", "")


def test_final_state_on_any_node_counts() -> None:
    first = report(0, "interrupted", [None] * 4, complete=True, cause=lose_node(0))
    second = report(1, "succeeded", [0] * 4, complete=True)
    assert merge_job({1: second}).state == "succeeded"
    assert merge_job({0: replace(first, state="running"), 1: second}).state == "succeeded"


def test_other_nodes_report_the_job_without_the_first_one() -> None:
    second = report(1, "failed", [None, None, -15, -15], complete=False, cause=lose_node(0))
    job = merge_job({1: second})
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.node, job.cause.explanation) == (0, "node0 was lost")


def test_job_without_reports_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        merge_job({})


def test_jobs_are_listed_oldest_first() -> None:
    new = report(0, "running", [None], complete=True, job="a", created="2026-02-01T00:00:00+00:00")
    old = report(0, "failed", [1], complete=True, job="b")
    assert [job.job for job in merge_jobs({0: [new, old], 1: []})] == ["b", "a"]


def test_decoded_job_equals_the_encoded_one() -> None:
    job = merge_job({0: report(0, "failed", [3, -15], complete=True, cause=lose_node(1))}, results="out")
    assert decode_job(encode_job(job)) == job
    assert job.home == "out/j"
    with pytest.raises(ConfigError):
        decode_job(encode_job(job)[:-20])


def test_report_of_a_node_removes_no_other_node_from_the_job() -> None:
    machines = [{"node": node, "instance_id": f"i-{node}"} for node in (0, 1)]
    honest = report(0, "running", [0, None], complete=True, nodes=machines)
    lies = [{"node": 0, "instance_id": "i-gone"}, machines[1]]
    for nodes in (lies, machines[1:], []):
        job = merge_job({0: honest, 1: report(1, "succeeded", [0, 0], complete=True, nodes=nodes)})
        assert {(node.node, node.instance_id) for node in job.nodes} >= {(0, "i-0")}


def test_job_has_the_facts_of_its_launch_and_its_times() -> None:
    facts = {"script": "train.py", "args": ["--lr", "0.1"], "commit": "c0", "dirty": True, "missing": "x"}
    running = report(0, "running", [0, None], complete=True, facts=facts, script=1)
    job = merge_job({0: running})
    assert (job.script, job.args, job.commit, job.dirty) == ("train.py", ("--lr", "0.1"), "c0", True)
    assert (job.world_size, job.launcher, job.missing) == (2, "ssh", ())
    assert (job.started, job.ended) == ("1970-01-01T00:00:01Z", None)
    assert merge_job({0: replace(running, state="failed")}).ended == "1970-01-01T00:00:02Z"


def test_saving_is_the_sum_of_all_reports_and_names_nodes_without_one() -> None:
    saving = {"files": 1, "bytes": 2, "pending_files": 3, "pending_bytes": 4, "ended": True}
    nodes = [{"node": node, "instance_id": f"i-{node}"} for node in (0, 1)]
    first = report(0, "succeeded", [0] * 4, complete=True, nodes=nodes, saving={**saving, "silent_s": 0.5})
    second = report(1, "succeeded", [0] * 4, complete=True, nodes=nodes, saving={**saving, "silent_s": 70.0})
    both = merge_job({0: first, 1: second}).saving
    assert both == Saving(files=2, bytes=4, pending_files=6, pending_bytes=8, ended=True, silent_s=70.0)
    assert both.is_complete
    alone = merge_job({0: first}).saving
    assert alone == Saving(
        files=1, bytes=2, pending_files=3, pending_bytes=4, ended=True, silent_s=0.5, unasked=(1,)
    )
    assert not alone.is_complete


def test_hang_of_a_running_job_is_reduced_to_one_line() -> None:
    hang = {"state": "hung", "since": 9, "text": "It hangs:\n\x1b[1mfetched\n", "place": "a\nb", "rank": 1}
    running = report(0, "running", [None, None], complete=True, hang=hang)
    assert merge_job({0: running}).hang == Hang(
        state="hung", since=9, text="It hangs: \x1b[1mfetched", place="a b", rank=1
    )
    assert merge_job({0: replace(running, state="interrupted")}).hang is None


@pytest.mark.parametrize("wrong", [{"state": "x"}, {"place": "x" * 201}, {"rank": -1}, {"since": "now"}])
def test_hang_that_a_node_cannot_have_found_is_refused(wrong: dict[str, object]) -> None:
    hang = {"state": "hung", "since": 9, "text": "", "place": "", "rank": None, **wrong}
    with pytest.raises(ValueError, match=r"Expected|Invalid"):
        report(0, "running", [None], complete=True, hang=hang)
