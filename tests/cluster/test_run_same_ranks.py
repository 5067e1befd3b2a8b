"""The same command starts the same ranks in the local cloud and on AWS, or is refused on both."""

import importlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from awsddp.agent_client.rank_layout import Rank, layout_on_nodes
from awsddp.aws.client import AwsClient
from awsddp.aws.plan_facts import gather_facts
from awsddp.cli.main import cli
from awsddp.cluster.run import with_gpus
from awsddp.errors import AwsddpError, CloudError, UsageError
from awsddp.job.train import check_ranks
from awsddp.local import cgroups
from awsddp.model.records import TargetName
from awsddp.plan.launch_plan import make_plan
from awsddp.plan.records import Facts, LaunchPlan
from awsddp.session.context import Session
from awsddp.settings.spec import ClusterSpec, LocalSection
from tests.support.moto_cloud import Cloud, spec

IMAGE = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 9.9 (Ubuntu 24.04) 20260822"
TAGS: Mapping[TargetName, dict[str, str]] = {"aws": {}, "local": {"awsddp:gpus": "rehearsed"}}
Lines = tuple[str, ...]
TYPES: dict[Lines, tuple[str, int]] = {
    ("run",): ("g6.xlarge", 2),
    ("run --nodes 3 train.py",): ("g6.xlarge", 3),
    ("run --nodes 2 --world-size 4 -y",): ("g6.12xlarge", 4),  # as `make demo` types it
    ("run --world-size 16",): ("g6.48xlarge", 16),
    ("run --nodes 1 --nproc-per-node 3",): ("g6.12xlarge", 3),
    ("run --instance-type g6.xlarge",): ("g6.xlarge", 2),
    ("run --gpus A10G --world-size 8",): ("g5.12xlarge", 8),
    ("run --gpus L4:4 --nproc-per-node 1",): ("g6.12xlarge", 2),
    ("run --world-size 8 -o job.on=0",): ("g6.48xlarge", 8),
    ("up --nodes 2", "train --world-size 16"): ("g6.48xlarge", 16),
    ("up", "train train.py"): ("g6.48xlarge", 16),
    ("up --nodes 1 -o job.world_size=1", "train"): ("g6.xlarge", 1),
    ("up --instance-type g6.xlarge", "train"): ("g6.xlarge", 2),
}
REFUSED: dict[Lines, tuple[type[AwsddpError], str, str]] = {
    ("run --instance-type g6.xlarge --world-size 16",): (
        UsageError,
        "8 ranks per node do not fit: a node has 1 GPU",
        "try: --world-size 2, or more nodes",
    ),
    ("up --instance-type g6.xlarge", "train --world-size 4"): (
        UsageError,
        "2 ranks per node do not fit: a node has 1 GPU",
        "try: --world-size 2, or more nodes",
    ),
    ("run --world-size 64",): (
        CloudError,
        "AWS offers no type with 32 GPUs per node in us-east-1",
        "try: --nodes 8; or name a type",
    ),
}


class Intercepted(Exception):
    """Carries the session of the verb that was typed."""


@dataclass
class Targets:
    """The facts of AWS and of the local cloud for a plan."""

    facts: dict[TargetName, Facts]
    capture_session: Callable[[str], Session]

    def start(self, lines: Lines, target: TargetName) -> tuple[LaunchPlan, tuple[Rank, ...]]:
        """Return the plan of these commands, and the ranks of the job."""
        first, last = self.capture_session(lines[0]), self.capture_session(lines[-1])
        if lines[0].startswith("run"):
            first = with_gpus(first)
        plan = make_plan(first.spec, self.facts[target])
        return plan, layout_on_nodes(last.job_spec.job, dict.fromkeys(range(plan.nodes), plan.job_gpus))


@pytest.fixture
def targets(aws: AwsClient, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Targets:
    aws_facts = gather_facts(aws, spec(), caller_address="10.77.0.1")
    facts = {
        target: replace(aws_facts, target=target, image=replace(aws_facts.image, tags=tags))
        for target, tags in TAGS.items()
    }

    def intercept(session: Session, **_: Any) -> None:
        raise Intercepted(session)

    def capture_session(line: str) -> Session:
        argv = shlex.split(line)
        with monkeypatch.context() as patch, pytest.raises(Intercepted) as error:
            module, name = {
                "run": ("awsddp.cluster.run", "run_job"),
                "up": ("awsddp.cluster.up", "up"),
                "train": ("awsddp.job.train", "train"),
            }[argv[0]]
            patch.setattr(importlib.import_module(module), name, intercept)
            cli(argv, standalone_mode=False)
        session: Session = error.value.args[0]
        return session

    return Targets(facts, capture_session)


@pytest.mark.parametrize("lines", TYPES, ids="; ".join)
def test_a_command_starts_the_same_ranks_on_both_targets(targets: Targets, lines: Lines) -> None:
    local, aws = targets.start(lines, "local"), targets.start(lines, "aws")
    assert (local[0].instance_type, len(local[1])) == TYPES[lines]
    assert local[0].instance_type == aws[0].instance_type
    assert local[1] == aws[1]


@pytest.mark.parametrize("lines", REFUSED, ids="; ".join)
@pytest.mark.parametrize("target", TAGS)
def test_ranks_that_do_not_fit_are_refused(targets: Targets, lines: Lines, target: TargetName) -> None:
    kind, message, advice = REFUSED[lines]
    with pytest.raises(kind) as error:
        targets.start(lines, target)
    assert error.value.message == message
    assert advice in error.value.next


def test_run_refuses_ranks_that_exceed_this_machines_memory_before_the_launch(
    targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "spare_bytes", lambda: 3_900_000_000)
    line = "run --world-size 16"
    session = with_gpus(targets.capture_session(line))
    check_ranks(session, make_plan(session.spec, targets.facts["aws"]))
    with pytest.raises(UsageError, match="16 ranks do not fit into the memory of this machine") as error:
        check_ranks(session, make_plan(session.spec, targets.facts["local"]))
    assert error.value.next == "try: --world-size 8, or fewer --nodes"
    fitting = with_gpus(targets.capture_session("run --world-size 8"))
    check_ranks(fitting, make_plan(fitting.spec, targets.facts["local"]))


def test_local_gpus_off_plans_nodes_without_gpus(aws: AwsClient, cloud: Cloud) -> None:
    cloud.add_image(IMAGE, tags={"awsddp:gpus": "rehearsed"})
    base = spec(image=IMAGE)

    def plan_spec(spec: ClusterSpec) -> LaunchPlan:
        return make_plan(spec, gather_facts(aws, spec, caller_address="10.77.0.1"))

    def read_tags(plan: LaunchPlan) -> dict[str, Any]:
        [instance, *_] = plan.request("RunInstances").parameters["TagSpecifications"]
        return {tag["Key"]: tag["Value"] for tag in instance["Tags"]}

    on, off = plan_spec(base), plan_spec(replace(base, local=LocalSection(gpus="off")))
    assert (on.job_gpus, off.job_gpus, on.kind.gpus, off.kind.gpus) == (8, 0, 8, 8)
    assert read_tags(off) == {**read_tags(on), "awsddp:gpus": "pretended"}
    assert any("run gloo on the CPU" in text for text in off.warnings)


def test_run_refuses_a_file_for_rendezvous_on_several_nodes_before_the_launch(targets: Targets) -> None:
    single, several = (targets.capture_session(f"run --nodes {nodes} -- {{init_file}}") for nodes in (1, 2))
    check_ranks(single, make_plan(single.spec, targets.facts["aws"]))
    plan = make_plan(several.spec, targets.facts["aws"])
    with pytest.raises(UsageError, match=r"\{init_file\} needs a single node"):
        check_ranks(several, plan)
