"""Random histories: all verbs that ask AWS, faults, kills, lost folders and nodes, another laptop, and time.

A history that fails is printed as the steps that it took, with its seed: `AWSDDP_SEED=N` draws the histories
of that seed again, in the same order; AWSDDP_FULL=1 draws more and longer ones. A replay may part from what
it replays where two threads of one command race for the call at which it is killed.
"""

import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from awsddp.aws.clusters import node_of
from awsddp.cluster import inventory
from awsddp.cluster.doctor import check_before_launch as doctor
from awsddp.cluster.down import down
from awsddp.cluster.plan import plan
from awsddp.cluster.status import status
from awsddp.cluster.stop import stop
from awsddp.cluster.up import up
from awsddp.state import ClusterFolder
from tests.support.acts import detached, fetched, held, hold, ran, status_all, trained, whoami
from tests.support.seed import FULL, SEED
from tests.support.world import PHASES, Kill, Login, Outcome, World, tags, yes

LIMITS = settings(
    max_examples=250 if FULL else 14,
    stateful_step_count=16 if FULL else 10,
    database=None,
    deadline=None,
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
    "ModifyInstanceAttribute",
    "CreateTags",
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
CIDRS = st.sampled_from(["203.0.113.7/32", "203.0.113.7/32", "198.51.100.7/32"])
ID = re.compile(r"'awsddp:id', 'Value': '(\w+)'")
SIGNALS = st.builds(
    Kill,
    st.just("*"),
    st.integers(1, 40),
    st.sampled_from(PHASES),
    st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]),
)
OURS: tuple[Login, ...] = ("key", "sso", "role", "unnamed")
OTHERWISE, ELSEWHERE = st.sampled_from([up, status, down]), st.sampled_from([up, stop, status, down])
LATE = timedelta(seconds=60)
HOMES = st.sampled_from(["home", "home", "home", "elsewhere"])


COUNT: Counter[str] = Counter()


class Histories(RuleBasedStateMachine):
    """One account, one laptop and another. `most` is how many nodes may live by what was asked for.

    Most histories begin with a cluster, and what needs one gets one, as its absence is soon told. What there
    is never decides what is drawn: two threads of a command may race to the call at which it is killed, and
    then the same draws lead to another place, which Hypothesis takes for an error of the test.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.cloud = world, world.cloud
        self.world.restore("empty")
        self.login: Login = "key"
        self.owner = ""
        self.most = 0
        self.there: list[str] = []
        self.may_lose = False

    @initialize(login=st.sampled_from(OURS), nodes=st.sampled_from([0, 1, 2, 2, 3]), harm=HARM)
    def begin(self, login: Login, nodes: int, harm: Any) -> None:
        self.login = login
        self.owner = self.world.run(whoami, login=login).document["owner"]
        if nodes:
            self.up(nodes=nodes, harm=harm, home="home", cidr="203.0.113.7/32")

    def run(self, verb: Any, harm: Any, home: str, **choices: Any) -> Outcome:
        """Run a verb that is killed, or meets a fault, or neither.

        Old lists are told to those alone who remember the cluster: others can but believe what AWS lists.
        """
        kill, fault = (harm, None) if isinstance(harm, Kill) else (None, harm and (harm[0], *harm[1]))
        if fault and fault[1] == "stale" and not (self.home(home) / "clusters/demo").exists():
            fault = None
        COUNT["operations"] += 1
        choices.setdefault("login", self.login)
        return self.world.run(verb, home=self.home(home), kill=kill, fault=fault, **choices)

    def need(self) -> None:
        if not self.there:
            self.up(nodes=2, harm=None, home="home", cidr="203.0.113.7/32")

    def home(self, name: str) -> Path:
        return self.world.root / name

    @rule(nodes=SIZES, harm=HARM, home=HOMES, cidr=CIDRS)
    def up(self, nodes: int, harm: Any, home: str, cidr: str) -> None:
        if self.owed():
            return
        there = {node_of(one).node for one in self.cloud.living()}
        launched = len(self.cloud.instances())
        outcome = self.run(up, harm, home, nodes=nodes, asked={"network.ssh_cidr": cidr}, confirm=yes)
        self.most = max(self.most, nodes)
        assert len(self.cloud.instances()) - launched <= len(set(range(nodes)) - there), "more than asked"
        if outcome.code == 0:
            assert outcome.document["state"] == "ready"
            assert [node["node"] for node in outcome.document["nodes"]] == list(range(nodes))
            assert [one["State"]["Name"] for one in self.cloud.living()] == ["running"] * nodes
            self.most = nodes

    @rule(harm=HARM, home=HOMES)
    def stop(self, harm: Any, home: str) -> None:
        self.need()
        if self.owed():
            return
        outcome = self.run(stop, harm, home, confirm=yes)
        if outcome.code == 0:
            assert {one["State"]["Name"] for one in self.cloud.living()} == {"stopped"}

    @rule(harm=HARM)
    def train(self, harm: Any) -> None:
        """Results are owed from now on; the nodes are machines of records, so nobody could fetch them."""
        self.need()
        if self.run(trained, harm, "home").code == 0:
            assert len(self.owed()) == len(self.cloud.living())
            assert {self.cloud.on_poweroff(key) for key in self.owed()} == {"stop"}

    @rule(harm=HARM)
    def fetch(self, harm: Any) -> None:
        self.need()
        if self.run(fetched, harm, "home").code == 0:
            assert self.owed() == []

    @rule(harm=HARM, home=HOMES)
    def down(self, harm: Any, home: str) -> None:
        """From elsewhere results that are owed cannot be fetched, and are not discarded."""
        owed, lived = self.owed(), len(self.cloud.living())
        discard = self.may_lose = bool(owed) and home == "home"
        outcome = self.run(down, harm, home, discard=discard, confirm=yes)
        if outcome.code == 0:
            self.gone()
        if owed and not discard:
            assert outcome.code != 0
            assert len(self.cloud.living()) == lived
        elif harm is None:
            assert outcome.code == 0, outcome.told

    @rule(harm=HARM, home=HOMES, discard=st.booleans())
    def down_orphans(self, harm: Any, home: str, discard: bool) -> None:
        """What is no orphan lives on, and what holds results too."""
        self.need()
        orphans, before = self.orphans(), self.alive()
        kept = set() if discard else orphans & {before[key] for key in self.owed()}
        orphans -= kept
        self.may_lose = discard
        outcome = self.run(inventory.down_orphans, harm, home, discard=discard, confirm=yes)
        stays = {key for key, cluster in before.items() if cluster not in orphans}
        assert stays <= self.alive().keys()
        if harm is None:
            assert outcome.code == (6 if kept else 0), outcome.told
            assert self.ids() & orphans == set()

    @rule(home=HOMES)
    def status(self, home: str) -> None:
        outcome = self.run(status, None, home)
        assert outcome.code == 0, outcome.told
        state = outcome.document["state"]
        if state == "launching" and self.cloud.left() == []:  # it was cut off just now, and may still show
            record = ClusterFolder(self.home(home), "demo").read()
            assert record is not None and record.intent is not None
            assert self.world.clock.now() - record.created < timedelta(minutes=2)
        else:
            assert (state == "absent") == (self.cloud.left() == [])

    @rule(home=HOMES)
    def status_all(self, home: str) -> None:
        outcome = self.run(status_all, None, home)
        assert outcome.code == 0, outcome.told
        told = {one["id"]: one["orphan"] for one in outcome.document["clusters"]}
        assert told.keys() == self.ids()
        assert {key for key, orphan in told.items() if orphan} == self.orphans()

    @rule(harm=HARM, home=HOMES, verb=st.sampled_from([plan, doctor]))
    def look(self, harm: Any, home: str, verb: Any) -> None:
        """Nothing is changed by what only looks; a cluster whose key is elsewhere cannot be planned."""
        before = self.alive()
        outcome = self.run(verb, harm, home)
        assert self.alive() == before
        assert harm is not None or outcome.code in (0, 3), outcome.told

    @rule(login=st.sampled_from(OURS), verb=OTHERWISE, nodes=SIZES)
    def log_in_otherwise(self, login: Login, verb: Any, nodes: int) -> None:
        """Another login of this account works on what this machine made, and the cluster keeps its owner."""
        self.need()
        if self.owed() or ClusterFolder(self.home("home"), "demo").read() is None:
            return
        more = {} if verb is status else {"confirm": yes}
        outcome = self.run(verb, None, "home", nodes=nodes, login=login, **more)
        assert outcome.code == 0, outcome.told
        if verb is down:
            self.gone()
        elif verb is up:
            self.most = nodes

    @rule(verb=ELSEWHERE)
    def another_account(self, verb: Any) -> None:
        """It is told apart, and nothing is changed or forgotten."""
        self.need()
        folder = ClusterFolder(self.home("home"), "demo")
        if folder.read() is None:
            return
        before, instances = self.kept(), len(self.cloud.instances())
        more = {} if verb is status else {"confirm": yes}
        outcome = self.run(verb, None, "home", login="another account", **more)
        assert (outcome.code, "belongs to AWS account" in outcome.told) == (3, True), outcome
        assert (self.kept(), len(self.cloud.instances())) == (before, instances)
        assert folder.read() is not None

    @rule(nodes=SIZES, harm=st.one_of(HARM, SIGNALS))
    def run_a_job(self, nodes: int, harm: Any) -> None:
        """Whatever it meets but -9 and a refusal of AWS: nothing is left, or disks that hold results."""
        if self.owed():
            return
        before = self.alive()
        outcome = self.run(ran, harm, "home", nodes=nodes, confirm=yes)
        self.most = max(self.most, nodes)
        if harm is None or (isinstance(harm, Kill) and outcome.code is not None):
            if outcome.code == 3:  # refused: the cluster is there, and its folder is not
                assert self.alive() == before
            elif outcome.code != 6:
                self.gone()
            else:
                assert {one["State"]["Name"] for one in self.cloud.living()} <= {"stopping", "stopped"}
                assert len(self.owed()) == len(self.cloud.living())

    @rule(nodes=SIZES, harm=HARM)
    def run_and_leave(self, nodes: int, harm: Any) -> None:
        if self.owed():
            return
        outcome = self.run(detached, harm, "home", nodes=nodes, confirm=yes)
        self.most = max(self.most, nodes)
        if outcome.code == 0:
            assert len(self.owed()) == len(self.cloud.living()) == nodes

    @rule()
    def nobody_uses_it(self) -> None:
        """The idle time passes: each node that runs powers itself off."""
        self.need()
        self.world.clock.move(self.world.clock.read() + 3600)
        self.cloud.power_off([one for one in self.cloud.living() if one["State"]["Name"] == "running"])

    @rule()
    def lose_the_folder(self) -> None:
        shutil.rmtree(self.world.home / "clusters", ignore_errors=True)

    @rule()
    def lose_a_node(self) -> None:
        self.need()
        keys = [one["InstanceId"] for one in self.cloud.living()]
        self.may_lose = True
        if keys:
            self.cloud.ec2.terminate_instances(InstanceIds=keys[:1])

    @rule(hours=st.sampled_from([0.01, 0.5, 2, 25]))
    def let_time_pass(self, hours: float) -> None:
        self.need()
        self.world.clock.move(self.world.clock.read() + timedelta(hours=hours).total_seconds())
        self.cloud.expire()

    @invariant()
    def no_result_is_lost(self) -> None:
        """What holds the only copy of a result lives until that is at home or discarded."""
        only, living = held(self.world.home), {one["InstanceId"] for one in self.cloud.living()}
        assert self.may_lose or only <= living
        if self.may_lose:
            hold(self.world.home, only & living)
        self.may_lose = False

    @invariant()
    def no_instance_is_late(self) -> None:
        """None runs that is past its deadline, whoever came back or not."""
        self.cloud.expire()
        now = self.world.clock.now()
        for one in self.cloud.living():
            late = now - datetime.fromisoformat(tags(one)["awsddp:expires"])
            assert one["State"]["Name"] != "running" or late <= LATE

    @invariant()
    def no_more_lives_than_was_asked_for(self) -> None:
        assert len(self.cloud.living()) <= self.most

    @invariant()
    def what_is_there_is_known_by_its_tags(self) -> None:
        """So it is known without any folder, and to its owner alone."""
        ours = (
            "'awsddp:id'",
            "'awsddp:cluster', 'Value': 'demo'",
            f"'awsddp:owner', 'Value': '{self.owner}'",
        )
        self.there = self.cloud.left()
        assert [thing for thing in self.there if not all(tag in thing for tag in ours)] == []

    def alive(self) -> dict[str, str]:
        """Return the id of the cluster of each instance that lives."""
        return {one["InstanceId"]: tags(one)["awsddp:id"] for one in self.cloud.living()}

    def kept(self) -> tuple[dict[str, str], list[str]]:
        """Return what lives, and what is not an instance's: that of a terminated one goes by itself."""
        own = ("describe_instances", "describe_volumes", "describe_network_interfaces")
        return self.alive(), [thing for thing in self.cloud.left() if not thing.startswith(own)]

    def ids(self) -> set[str]:
        """Return the id of whatever there is."""
        return {found for thing in self.cloud.left() for found in ID.findall(thing)}

    def orphans(self) -> set[str]:
        """Return the ids of which no instance lives, or whose instances are past their expiry."""
        now, lives = self.world.clock.now(), self.cloud.living()
        expiries = [(tags(one)["awsddp:id"], tags(one)["awsddp:expires"]) for one in lives]
        return self.ids() - {key for key, expires in expiries if datetime.fromisoformat(expires) > now}

    def owed(self) -> list[str]:
        """Return the instances that owe results."""
        return [one["InstanceId"] for one in self.cloud.living() if "awsddp:unfetched" in tags(one)]

    def gone(self) -> None:
        assert self.cloud.left() == []
        self.most = 0

    def teardown(self) -> None:
        """Nobody comes back: all end themselves. `down` is legal in every state, and leaves nothing."""
        COUNT["histories"] += 1
        self.world.clock.move(self.world.clock.read() + timedelta(days=2).total_seconds())
        self.cloud.expire()
        assert {one["State"]["Name"] for one in self.cloud.living()} <= {"stopping", "stopped"}
        if self.owner:
            outcome = self.run(down, None, "home", discard=True, confirm=yes)
            assert outcome.code == 0, outcome.told
        self.gone()


@pytest.mark.prove
@pytest.mark.timeout(7200)
def test_whatever_happens_down_leaves_nothing(
    world: World, record_property: Callable[[str, object], None]
) -> None:
    COUNT.clear()
    try:
        run_state_machine_as_test(seed(SEED)(lambda: Histories(world)), settings=LIMITS)
        record_property("says", f"{COUNT['histories']} histories, {COUNT['operations']} commands")
    except BaseException as error:
        error.add_note(f"again: AWSDDP_SEED={SEED}{' AWSDDP_FULL=1' * FULL} pytest {__file__}")
        raise
