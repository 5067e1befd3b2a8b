"""One job out of what its nodes say."""

from typing import Any

import pytest
from msgspec.structs import replace

from awsddp.agent_client.job_reports import decode_job, encode_job, merge_job, merge_jobs
from awsddp.errors import ConfigError, NotFoundError
from awsddp.model import node_answers
from awsddp.model.records import Saving


def document(
    node: int, state: str, codes: list[int | None], *, complete: bool, **more: Any
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
    more = {"job": "j", "created": "2026-01-01T00:00:00+00:00", "cause": None, **more}
    said = {"node": node, "state": state, "complete": complete, "ranks": ranks, **more}
    return node_answers.convert_answer(said, node_answers.NodeJob)


def lost(node: int) -> dict[str, Any]:
    return {"rank": None, "node": node, "tail": [], "explanation": f"node{node} was lost"}


def test_first_node_speaks_for_the_whole_job() -> None:
    first = document(0, "running", [0, None, None, None], complete=True)
    second = document(1, "running", [None, None, 0, None], complete=False)
    job = merge_job({1: second, 0: first})
    assert (job.state, [rank.exit_code for rank in job.ranks]) == ("running", [0, None, 0, None])
    assert job.home == "runs/j"


def test_a_node_that_speaks_for_the_whole_job_is_believed_before_one_that_saw_a_part() -> None:
    whole = document(0, "running", [None] * 4, complete=True)
    part = document(1, "failed", [None] * 4, complete=False, cause=lost(0))
    assert merge_job({0: whole, 1: part}).state == "running"


def test_only_a_new_line_ends_a_line_of_the_tail() -> None:
    line = "a\x0bb\x0cc\x1cd\x85e\u2028f"
    cause = {**lost(0), "tail": [line, "two\nlines", ""]}
    job = merge_job({0: document(0, "failed", [1] * 4, complete=True, cause=cause)})
    assert job.cause is not None and job.cause.tail == (line, "two", "lines", "")


def test_final_word_on_any_node_counts() -> None:
    first = document(0, "interrupted", [None] * 4, complete=True, cause=lost(0))
    second = document(1, "succeeded", [0] * 4, complete=True)
    assert merge_job({1: second}).state == "succeeded"
    assert merge_job({0: replace(first, state="running"), 1: second}).state == "succeeded"


def test_when_the_first_node_cannot_be_asked_the_others_tell() -> None:
    second = document(1, "failed", [None, None, -15, -15], complete=False, cause=lost(0))
    job = merge_job({1: second})
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.node, job.cause.explanation) == (0, "node0 was lost")


def test_job_that_nobody_knows_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        merge_job({})


def test_jobs_are_listed_oldest_first() -> None:
    new = document(0, "running", [None], complete=True, job="a", created="2026-02-01T00:00:00+00:00")
    old = document(0, "failed", [1], complete=True, job="b")
    assert [job.job for job in merge_jobs({0: [new, old], 1: []})] == ["b", "a"]


def test_job_survives_its_file() -> None:
    job = merge_job({0: document(0, "failed", [3, -15], complete=True, cause=lost(1))}, results="out")
    assert decode_job(encode_job(job)) == job
    assert job.home == "out/j"
    with pytest.raises(ConfigError):
        decode_job(encode_job(job)[:-20])


def test_no_node_leaves_another_out_of_the_job() -> None:
    machines = [{"node": node, "instance_id": f"i-{node}"} for node in (0, 1)]
    honest = document(0, "running", [0, None], complete=True, nodes=machines)
    lies = [{"node": 0, "instance_id": "i-gone"}, machines[1]]
    for told in (lies, machines[1:], []):
        job = merge_job({0: honest, 1: document(1, "succeeded", [0, 0], complete=True, nodes=told)})
        assert {(one.node, one.instance_id) for one in job.nodes} >= {(0, "i-0")}


def test_job_has_what_its_launch_kept_and_when_it_ran() -> None:
    facts = {"script": "train.py", "args": ["--lr", "0.1"], "commit": "c0", "dirty": True, "missing": "x"}
    running = document(0, "running", [0, None], complete=True, facts=facts, script=1)
    job = merge_job({0: running})
    assert (job.script, job.args, job.commit, job.dirty) == ("train.py", ("--lr", "0.1"), "c0", True)
    assert (job.world_size, job.launcher, job.missing) == (2, "ssh", ())
    assert (job.started, job.ended) == ("1970-01-01T00:00:01Z", None)
    assert merge_job({0: replace(running, state="failed")}).ended == "1970-01-01T00:00:02Z"


def test_saving_counts_what_all_nodes_say_and_names_those_that_cannot_be_asked() -> None:
    told = {"files": 1, "bytes": 2, "pending_files": 3, "pending_bytes": 4, "ended": True}
    nodes = [{"node": node, "instance_id": f"i-{node}"} for node in (0, 1)]
    first = document(0, "succeeded", [0] * 4, complete=True, nodes=nodes, saving={**told, "silent_s": 0.5})
    second = document(1, "succeeded", [0] * 4, complete=True, nodes=nodes, saving={**told, "silent_s": 70.0})
    both = merge_job({0: first, 1: second}).saving
    assert both == Saving(files=2, bytes=4, pending_files=6, pending_bytes=8, ended=True, silent_s=70.0)
    assert both.is_complete
    alone = merge_job({0: first}).saving
    assert alone == Saving(
        files=1, bytes=2, pending_files=3, pending_bytes=4, ended=True, silent_s=0.5, unasked=(1,)
    )
    assert not alone.is_complete
