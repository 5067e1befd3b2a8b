"""Random histories: all verbs that call AWS, faults, kills, lost folders and nodes, another client, and time.

A history that fails is printed as its steps, with its seed: `AWSDDP_SEED=N` draws the histories of that seed
again, in the same order; AWSDDP_FULL=1 draws more and longer ones. A replay may differ from the first run
where two threads of one command race for the call at which it is killed. Hypothesis orders the rules by their
names: another name draws other histories.
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
from tests.support.acts import (
    instances_with_results,
    run_attached,
    run_detached,
    run_fetch,
    run_train,
    set_instances_with_results,
    status_all,
    whoami,
)
from tests.support.seed import FULL, SEED
from tests.support.world import PHASES, Kill, Login, Outcome, World, agree, tags

LIMITS = settings(
    max_examples=250 if FULL else 14,
    stateful_step_count=16 if FULL else 10,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # no shrinking: it takes minutes
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
OWN_VERBS, FOREIGN_VERBS = st.sampled_from([up, status, down]), st.sampled_from([up, stop, status, down])
LATE = timedelta(seconds=60)
HOMES = st.sampled_from(["home", "home", "home", "elsewhere"])


COUNT: Counter[str] = Counter()


class Histories(RuleBasedStateMachine):
    """One account and two clients. `most` is the number of nodes that may exist by what was requested.

    Most histories begin with a cluster, and a rule that needs one launches it, else most steps do nothing.
    The state never decides what is drawn: two threads of a command may race to the call at which it is
    killed, and then the same draws lead to another state, which Hypothesis takes for an error of the test.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.cloud = world, world.cloud
        self.world.restore("empty")
        self.login: Login = "key"
        self.owner = ""
        self.most = 0
        self.resources: list[str] = []
        self.may_lose = False

    @initialize(login=st.sampled_from(OURS), nodes=st.sampled_from([0, 1, 2, 2, 3]), harm=HARM)
    def begin(self, login: Login, nodes: int, harm: Any) -> None:
        self.login = login
        self.owner = self.world.run(whoami, login=login).document["owner"]
        if nodes:
            self.up(nodes=nodes, harm=harm, home="home", cidr="203.0.113.7/32")

    def run(self, verb: Any, harm: Any, home: str, **choices: Any) -> Outcome:
        """Run a verb that is killed, or meets a fault, or neither.

        Only a client with a record of the cluster gets outdated lists: others cannot detect them.
        """
        kill, fault = (harm, None) if isinstance(harm, Kill) else (None, harm and (harm[0], *harm[1]))
        if fault and fault[1] == "stale" and not (self.home(home) / "clusters/demo").exists():
            fault = None
        COUNT["operations"] += 1
        choices.setdefault("login", self.login)
        return self.world.run(verb, home=self.home(home), kill=kill, fault=fault, **choices)

    def ensure_cluster(self) -> None:
        if not self.resources:
            self.up(nodes=2, harm=None, home="home", cidr="203.0.113.7/32")

    def home(self, name: str) -> Path:
        return self.world.root / name

    @rule(nodes=SIZES, harm=HARM, home=HOMES, cidr=CIDRS)
    def up(self, nodes: int, harm: Any, home: str, cidr: str) -> None:
        if self.unfetched():
            return
        before = {node_of(node).node for node in self.cloud.live_instances()}
        launched = len(self.cloud.instances())
        outcome = self.run(up, harm, home, nodes=nodes, overrides={"network.ssh_cidr": cidr}, confirm=agree)
        self.most = max(self.most, nodes)
        assert len(self.cloud.instances()) - launched <= len(set(range(nodes)) - before), (
            "more than requested"
        )
        if outcome.code == 0:
            assert outcome.document["state"] == "ready"
            assert [node["node"] for node in outcome.document["nodes"]] == list(range(nodes))
            assert [node["State"]["Name"] for node in self.cloud.live_instances()] == ["running"] * nodes
            self.most = nodes

    @rule(harm=HARM, home=HOMES)
    def stop(self, harm: Any, home: str) -> None:
        self.ensure_cluster()
        if self.unfetched():
            return
        outcome = self.run(stop, harm, home, confirm=agree)
        if outcome.code == 0:
            assert {node["State"]["Name"] for node in self.cloud.live_instances()} == {"stopped"}

    @rule(harm=HARM)
    def train(self, harm: Any) -> None:
        """From now on nodes hold unfetched results; without real hosts, nobody can fetch them."""
        self.ensure_cluster()
        if self.run(run_train, harm, "home").code == 0:
            assert len(self.unfetched()) == len(self.cloud.live_instances())
            assert {self.cloud.on_poweroff(key) for key in self.unfetched()} == {"stop"}

    @rule(harm=HARM)
    def fetch(self, harm: Any) -> None:
        self.ensure_cluster()
        if self.run(run_fetch, harm, "home").code == 0:
            assert self.unfetched() == []

    @rule(harm=HARM, home=HOMES)
    def down(self, harm: Any, home: str) -> None:
        """Another client cannot fetch unfetched results, and does not discard them."""
        unfetched, before = self.unfetched(), len(self.cloud.live_instances())
        discard = self.may_lose = bool(unfetched) and home == "home"
        outcome = self.run(down, harm, home, discard=discard, confirm=agree)
        if outcome.code == 0:
            self.check_nothing_left()
        if unfetched and not discard:
            assert outcome.code != 0
            assert len(self.cloud.live_instances()) == before
        elif harm is None:
            assert outcome.code == 0, outcome.text

    @rule(harm=HARM, home=HOMES, discard=st.booleans())
    def down_orphans(self, harm: Any, home: str, discard: bool) -> None:
        """Instances that are no orphans, or hold results, stay."""
        self.ensure_cluster()
        orphans, before = self.orphans(), self.alive()
        holding = set() if discard else orphans & {before[key] for key in self.unfetched()}
        orphans -= holding
        self.may_lose = discard
        outcome = self.run(inventory.down_orphans, harm, home, discard=discard, confirm=agree)
        stays = {key for key, cluster in before.items() if cluster not in orphans}
        assert stays <= self.alive().keys()
        if harm is None:
            assert outcome.code == (6 if holding else 0), outcome.text
            assert self.ids() & orphans == set()

    @rule(home=HOMES)
    def status(self, home: str) -> None:
        outcome = self.run(status, None, home)
        assert outcome.code == 0, outcome.text
        state = outcome.document["state"]
        if (
            state == "launching" and self.cloud.find_leftovers() == []
        ):  # killed just now: AWS may list it later
            record = ClusterFolder(self.home(home), "demo").read()
            assert record is not None and record.intent is not None
            assert self.world.clock.now() - record.created < timedelta(minutes=2)
        else:
            assert (state == "absent") == (self.cloud.find_leftovers() == [])

    @rule(home=HOMES)
    def status_all(self, home: str) -> None:
        outcome = self.run(status_all, None, home)
        assert outcome.code == 0, outcome.text
        is_orphan = {cluster["id"]: cluster["orphan"] for cluster in outcome.document["clusters"]}
        assert is_orphan.keys() == self.ids()
        assert {key for key, orphan in is_orphan.items() if orphan} == self.orphans()

    @rule(harm=HARM, home=HOMES, verb=st.sampled_from([plan, doctor]))
    def look(self, harm: Any, home: str, verb: Any) -> None:
        """`plan` and `doctor` change nothing; a cluster whose key is on another client cannot be planned."""
        before = self.alive()
        outcome = self.run(verb, harm, home)
        assert self.alive() == before
        assert harm is not None or outcome.code in (0, 3), outcome.text

    @rule(login=st.sampled_from(OURS), verb=OWN_VERBS, nodes=SIZES)
    def log_in_otherwise(self, login: Login, verb: Any, nodes: int) -> None:
        """Another login of the account works on the cluster of this client, which keeps its owner."""
        self.ensure_cluster()
        if self.unfetched() or ClusterFolder(self.home("home"), "demo").read() is None:
            return
        more = {} if verb is status else {"confirm": agree}
        outcome = self.run(verb, None, "home", nodes=nodes, login=login, **more)
        assert outcome.code == 0, outcome.text
        if verb is down:
            self.check_nothing_left()
        elif verb is up:
            self.most = nodes

    @rule(verb=FOREIGN_VERBS)
    def another_account(self, verb: Any) -> None:
        """Another account is refused, and neither resources nor the record change."""
        self.ensure_cluster()
        folder = ClusterFolder(self.home("home"), "demo")
        if folder.read() is None:
            return
        before, instances = self.lasting_resources(), len(self.cloud.instances())
        more = {} if verb is status else {"confirm": agree}
        outcome = self.run(verb, None, "home", login="another account", **more)
        assert (outcome.code, "belongs to AWS account" in outcome.text) == (3, True), outcome
        assert (self.lasting_resources(), len(self.cloud.instances())) == (before, instances)
        assert folder.read() is not None

    @rule(nodes=SIZES, harm=st.one_of(HARM, SIGNALS))
    def run_a_job(self, nodes: int, harm: Any) -> None:
        """Unless killed by -9 or refused by AWS, it leaves nothing, or stopped nodes that hold results."""
        if self.unfetched():
            return
        before = self.alive()
        outcome = self.run(run_attached, harm, "home", nodes=nodes, confirm=agree)
        self.most = max(self.most, nodes)
        if harm is None or (isinstance(harm, Kill) and outcome.code is not None):
            if outcome.code == 3:  # refused: the cluster exists, and its folder does not
                assert self.alive() == before
            elif outcome.code != 6:
                self.check_nothing_left()
            else:
                assert {node["State"]["Name"] for node in self.cloud.live_instances()} <= {
                    "stopping",
                    "stopped",
                }
                assert len(self.unfetched()) == len(self.cloud.live_instances())

    @rule(nodes=SIZES, harm=HARM)
    def run_and_leave(self, nodes: int, harm: Any) -> None:
        if self.unfetched():
            return
        outcome = self.run(run_detached, harm, "home", nodes=nodes, confirm=agree)
        self.most = max(self.most, nodes)
        if outcome.code == 0:
            assert len(self.unfetched()) == len(self.cloud.live_instances()) == nodes

    @rule()
    def nobody_uses_it(self) -> None:
        """The idle time passes: each running node powers itself off."""
        self.ensure_cluster()
        self.world.clock.move(self.world.clock.read() + 3600)
        self.cloud.power_off(
            [node for node in self.cloud.live_instances() if node["State"]["Name"] == "running"]
        )

    @rule()
    def lose_the_folder(self) -> None:
        shutil.rmtree(self.world.home / "clusters", ignore_errors=True)

    @rule()
    def lose_a_node(self) -> None:
        self.ensure_cluster()
        keys = [node["InstanceId"] for node in self.cloud.live_instances()]
        self.may_lose = True
        if keys:
            self.cloud.ec2.terminate_instances(InstanceIds=keys[:1])

    @rule(hours=st.sampled_from([0.01, 0.5, 2, 25]))
    def let_time_pass(self, hours: float) -> None:
        self.ensure_cluster()
        self.world.clock.move(self.world.clock.read() + timedelta(hours=hours).total_seconds())
        self.cloud.expire()

    @invariant()
    def no_result_is_lost(self) -> None:
        """An instance with the only copy of a result exists until that is fetched or discarded."""
        only, living = (
            instances_with_results(self.world.home),
            {node["InstanceId"] for node in self.cloud.live_instances()},
        )
        assert self.may_lose or only <= living
        if self.may_lose:
            set_instances_with_results(self.world.home, only & living)
        self.may_lose = False

    @invariant()
    def no_instance_is_late(self) -> None:
        """No instance runs past its expiry, with or without a client."""
        self.cloud.expire()
        now = self.world.clock.now()
        for node in self.cloud.live_instances():
            late = now - datetime.fromisoformat(tags(node)["awsddp:expires"])
            assert node["State"]["Name"] != "running" or late <= LATE

    @invariant()
    def no_more_lives_than_was_asked_for(self) -> None:
        assert len(self.cloud.live_instances()) <= self.most

    @invariant()
    def what_is_there_is_known_by_its_tags(self) -> None:
        """Every resource has the tags by which its owner, and nobody else, finds it without a folder."""
        ours = (
            "'awsddp:id'",
            "'awsddp:cluster', 'Value': 'demo'",
            f"'awsddp:owner', 'Value': '{self.owner}'",
        )
        self.resources = self.cloud.find_leftovers()
        assert [thing for thing in self.resources if not all(tag in thing for tag in ours)] == []

    def alive(self) -> dict[str, str]:
        """Return the id of the cluster of each instance that exists."""
        return {node["InstanceId"]: tags(node)["awsddp:id"] for node in self.cloud.live_instances()}

    def lasting_resources(self) -> tuple[dict[str, str], list[str]]:
        """Return the instances, and the resources that EC2 does not delete with a terminated instance."""
        of_instances = ("describe_instances", "describe_volumes", "describe_network_interfaces")
        return self.alive(), [
            thing for thing in self.cloud.find_leftovers() if not thing.startswith(of_instances)
        ]

    def ids(self) -> set[str]:
        """Return the ids of the clusters of all resources."""
        return {cluster_id for thing in self.cloud.find_leftovers() for cluster_id in ID.findall(thing)}

    def orphans(self) -> set[str]:
        """Return the ids of the clusters without an instance that is before its expiry."""
        now, lives = self.world.clock.now(), self.cloud.live_instances()
        expiries = [(tags(node)["awsddp:id"], tags(node)["awsddp:expires"]) for node in lives]
        return self.ids() - {key for key, expires in expiries if datetime.fromisoformat(expires) > now}

    def unfetched(self) -> list[str]:
        """Return the instances with unfetched results."""
        return [
            node["InstanceId"] for node in self.cloud.live_instances() if "awsddp:unfetched" in tags(node)
        ]

    def check_nothing_left(self) -> None:
        assert self.cloud.find_leftovers() == []
        self.most = 0

    def teardown(self) -> None:
        """Without a client, nodes end by themselves. `down` is allowed in every state, and leaves nothing."""
        COUNT["histories"] += 1
        self.world.clock.move(self.world.clock.read() + timedelta(days=2).total_seconds())
        self.cloud.expire()
        assert {node["State"]["Name"] for node in self.cloud.live_instances()} <= {"stopping", "stopped"}
        if self.owner:
            outcome = self.run(down, None, "home", discard=True, confirm=agree)
            assert outcome.code == 0, outcome.text
        self.check_nothing_left()


@pytest.mark.prove
@pytest.mark.timeout(7200)
def test_down_leaves_nothing_after_any_history(
    world: World, record_property: Callable[[str, object], None]
) -> None:
    COUNT.clear()
    try:
        run_state_machine_as_test(seed(SEED)(lambda: Histories(world)), settings=LIMITS)
        record_property("says", f"{COUNT['histories']} histories, {COUNT['operations']} commands")
    except BaseException as error:
        error.add_note(f"again: AWSDDP_SEED={SEED}{' AWSDDP_FULL=1' * FULL} pytest {__file__}")
        raise
