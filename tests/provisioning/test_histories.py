"""Random histories: commands, faults, kills, lost folders and nodes, another laptop, and time that passes.

A history is drawn by a seed that is always the same; AWSDDP_FULL=1 draws others, more and longer ones, and
`pytest --hypothesis-seed=N` draws those of one seed again.
"""

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from awsddp.verbs.down import down
from awsddp.verbs.status import status
from awsddp.verbs.stop import stop
from awsddp.verbs.up import up
from tests.provisioning.world import PHASES, Kill, Outcome, World, yes

WHOLE = bool(os.environ.get("AWSDDP_FULL"))
LIMITS = settings(
    max_examples=250 if WHOLE else 16,
    stateful_step_count=16 if WHOLE else 10,
    derandomize=not WHOLE,
    database=None,
    deadline=None,
    print_blob=True,
    phases=[Phase.generate],  # a history is not made shorter: that takes minutes
    suppress_health_check=list(HealthCheck),
)
EFFECTS = ("RequestLimitExceeded", "InternalError", "cut", "lost", "UnauthorizedOperation")
OPERATIONS = (
    "*",
    "RunInstances",
    "DescribeInstances",
    "DescribeSecurityGroups",
    "CreateSecurityGroup",
    "AuthorizeSecurityGroupIngress",
    "ImportKeyPair",
    "TerminateInstances",
    "StopInstances",
    "StartInstances",
    "DeleteSecurityGroup",
    "DeleteKeyPair",
)
SIZES = st.integers(1, 3)
NOTHING = st.none()
KILLS = st.builds(Kill, st.just("*"), st.integers(1, 30), st.sampled_from(PHASES))
FAULTS = st.tuples(
    st.sampled_from(OPERATIONS),
    st.one_of(
        st.tuples(st.sampled_from(EFFECTS), st.sampled_from([{}, {"times": 2}])),
        st.tuples(st.just("stale"), st.sampled_from([{"seconds": 5}, {"seconds": 30}])),
        st.tuples(st.just("InsufficientInstanceCapacity"), st.just({"times": 1})),
    ),
)
HARM = st.one_of(NOTHING, NOTHING, KILLS, FAULTS)
HOMES = st.sampled_from(["home", "home", "home", "elsewhere"])


class Histories(RuleBasedStateMachine):
    """One account, one laptop and another. `most` is how many nodes may live by what was asked for."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.cloud = world, world.cloud
        self.world.restore("empty")
        self.most = 0

    def run(self, verb: Any, harm: Any, home: str, **choices: Any) -> Outcome:
        """Run a verb that is killed, or meets a fault, or neither; the fault is over afterwards."""
        kill = harm if isinstance(harm, Kill) else None
        if harm is not None and kill is None:
            operation, (effect, how) = harm
            self.cloud.fault(operation, effect, **how)
        outcome = self.world.run(verb, home=self.home(home), kill=kill, **choices)
        self.cloud.mend()
        return outcome

    def home(self, name: str) -> Path:
        return self.world.root / name

    @rule(nodes=SIZES, harm=HARM, home=HOMES)
    def up(self, nodes: int, harm: Any, home: str) -> None:
        lived, launched = len(self.cloud.living()), len(self.cloud.instances())
        outcome = self.run(up, harm, home, nodes=nodes, confirm=yes)
        self.most = max(self.most, nodes)
        assert len(self.cloud.instances()) - launched <= max(0, nodes - lived), "more than asked"
        if outcome.code == 0:
            assert outcome.document["state"] == "ready"
            assert [node["node"] for node in outcome.document["nodes"]] == list(range(nodes))
            assert [one["State"]["Name"] for one in self.cloud.living()] == ["running"] * nodes
            self.most = nodes

    @rule(harm=HARM, home=HOMES)
    def stop(self, harm: Any, home: str) -> None:
        outcome = self.run(stop, harm, home, confirm=yes)
        if outcome.code == 0:
            assert {one["State"]["Name"] for one in self.cloud.living()} == {"stopped"}

    @rule(harm=HARM, home=HOMES)
    def down(self, harm: Any, home: str) -> None:
        outcome = self.run(down, harm, home, confirm=yes)
        if outcome.code == 0:
            self.gone()
        assert outcome.code == 0 or harm is not None, outcome.told

    @rule(home=HOMES)
    def status(self, home: str) -> None:
        outcome = self.run(status, None, home)
        assert outcome.code == 0, outcome.told
        assert (outcome.document["state"] == "absent") == (self.cloud.left() == [])

    @rule()
    def lose_the_folder(self) -> None:
        shutil.rmtree(self.world.home / "clusters", ignore_errors=True)

    @rule()
    def lose_a_node(self) -> None:
        keys = [one["InstanceId"] for one in self.cloud.living()]
        if keys:
            self.cloud.ec2.terminate_instances(InstanceIds=keys[:1])

    @rule(hours=st.sampled_from([0.01, 0.5, 2, 25]))
    def let_time_pass(self, hours: float) -> None:
        self.world.clock.move(self.world.clock.read() + timedelta(hours=hours).total_seconds())
        self.cloud.expire()

    @invariant()
    def no_more_lives_than_was_asked_for(self) -> None:
        assert len(self.cloud.living()) <= self.most

    @invariant()
    def what_is_there_is_known_by_its_tags(self) -> None:
        assert [thing for thing in self.cloud.left() if "awsddp:id" not in thing] == []

    def gone(self) -> None:
        assert self.cloud.left() == []
        self.most = 0

    def teardown(self) -> None:
        """`down` is legal in every state, and leaves nothing."""
        outcome = self.run(down, None, "home", confirm=yes)
        assert outcome.code == 0, outcome.told
        self.gone()


@pytest.mark.prove
@pytest.mark.timeout(7200)
def test_whatever_happens_down_leaves_nothing(world: World) -> None:
    run_state_machine_as_test(lambda: Histories(world), settings=LIMITS)
