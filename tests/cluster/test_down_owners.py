"""The owner of a cluster, and who may terminate it: other logins, accounts, machines without a record."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import describe, tagged
from awsddp.aws.login import session_name
from awsddp.cli.command_line import Globals
from awsddp.cli.plan_page import launch_question
from awsddp.cli.screen import Screen
from awsddp.cluster.down import down
from awsddp.cluster.status import status
from awsddp.errors import ConfigError, NotFoundError, UsageError
from tests.support.machine import Machine, On


def assume_role(aws: AwsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the login to a role: another UserId in the same account."""
    role = {"RoleArn": "arn:aws:iam::123456789012:role/gpu", "RoleSessionName": "sso-user"}
    keys = aws.call("AssumeRole", role, service="sts")["Credentials"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys["SecretAccessKey"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", keys["SessionToken"])


def run_down(machine: Machine, **options: Any) -> tuple[dict[str, Any], str]:
    questions: list[str] = []
    return down(machine.context(), confirm=questions.append, **options), "\n".join(questions)


def test_a_cluster_that_grows_under_another_login_keeps_its_owner(
    on: On, aws: AwsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = on("laptop")
    before = laptop.launch_two_nodes()
    assume_role(aws, monkeypatch)
    assert len(laptop.up(cluster__nodes=3)["nodes"]) == 3
    nodes = describe(aws, tagged("awsddp:id", before.id))
    assert {node.tags["awsddp:owner"] for node in nodes} == {before.owner}
    assert len(run_down(laptop)[0]["terminated"]) == 3


@pytest.mark.parametrize("lost", [1, 2])
def test_replacements_under_another_login_keep_the_owner_of_the_cluster(
    on: On, aws: AwsClient, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    laptop = on("laptop")
    before = laptop.launch_two_nodes()
    aws.call("TerminateInstances", {"InstanceIds": [node.instance_id for node in before.nodes[:lost]]})
    assume_role(aws, monkeypatch)
    assert len(laptop.up()["nodes"]) == 2
    nodes = describe(aws, tagged("awsddp:id", before.id))
    assert {node.tags["awsddp:owner"] for node in nodes} == {before.owner}


def test_verbs_refuse_a_cluster_of_another_account_and_keep_its_record(on: On, aws: AwsClient) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    record = laptop.folder.read()
    assert record is not None
    prepared = tuple(replace(node, instance_id=f"i-elsewhere{node.node}") for node in record.prepared)
    foreign = replace(record, account="999999999999", owner="AIDAOTHER", id="0badcafe", prepared=prepared)
    laptop.folder.write(foreign)
    for verb in (status, lambda ctx: down(ctx, confirm=print), lambda _: laptop.up()):
        with pytest.raises(ConfigError, match="belongs to AWS account 999999999999") as error:
            verb(laptop.context())
        assert "123456789012" in error.value.why
    assert laptop.folder.read() == foreign
    assert laptop.folder.key.exists()


def test_down_says_on_which_machine_and_when_a_cluster_was_launched(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-desk (2)")
    laptop, desk = on("laptop"), on("desk")
    cluster = laptop.launch_two_nodes()
    with pytest.raises(UsageError, match="-y does not end cluster demo") as error:
        run_down(desk, known_only=True)
    assert "gpu-desk -2-" in error.value.why
    assert cluster.live == laptop.cluster.live
    assert cluster.created is not None
    result, question = run_down(desk)
    assert len(result["terminated"]) == 2
    assert f"created at {cluster.created:%Y-%m-%dT%H:%M:%SZ} on gpu-desk -2-" in question


def test_yes_terminates_a_cluster_that_this_machine_launched(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    assert len(run_down(laptop, known_only=True)[0]["terminated"]) == 2


def test_a_relaunched_cluster_expires_after_its_first_duration(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes(cluster__expires="2h")
    laptop.aws.call("TerminateInstances", {"InstanceIds": [node.instance_id for node in laptop.cluster.live]})
    result = laptop.up()
    remaining = datetime.fromisoformat(result["expires"]) - datetime.now(UTC)
    assert 7100 < remaining.total_seconds() <= 7200


def test_a_shorter_expiry_of_a_later_up_is_not_extended_by_the_next(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes(cluster__expires="24h")
    shorter = laptop.up(cluster__expires="1h")["expires"]
    assert laptop.up()["expires"] == shorter


@pytest.mark.parametrize(("hours", "warned"), [(3, True), (30, False)])
def test_the_plan_warns_if_credentials_expire_before_the_nodes(
    on: On, monkeypatch: pytest.MonkeyPatch, hours: int, warned: bool
) -> None:
    laptop = on("laptop")
    expiry = datetime.now(UTC) + timedelta(hours=hours)
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", expiry.isoformat())
    laptop.launch_two_nodes(cluster__expires="24h")
    (launched,) = laptop.questions
    assert not isinstance(launched, str)
    assert any("credentials end in " in text for text in launched.warnings) == warned


@pytest.mark.parametrize("key", ["instance_type", "gpus", "max_price_usd", "budget_usd", None])
def test_yes_answers_questions_and_chooses_no_price(on: On, key: str | None) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    (plan,) = laptop.questions
    values = {"instance_type": "g5.xlarge", "gpus": "A10G:1", "max_price_usd": 5.0, "budget_usd": 100.0}
    spec = laptop.context(**({f"cluster__{key}": values[key]} if key else {})).spec
    options = Globals(yes=True, quiet=True)
    ask = launch_question(Screen(options), spec)
    if key is not None:
        ask(plan)
        return
    with pytest.raises(UsageError, match=r"-y does not choose a price: 2 x g5\.xlarge cost") as error:
        ask(plan)
    assert "--budget USD" in error.value.next


def assume_session(aws: AwsClient, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Change the login to a role session with the name that awsddp gives it on this host."""
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    monkeypatch.setattr("socket.gethostname", lambda: host)
    role = {"RoleArn": "arn:aws:iam::123456789012:role/gpu", "RoleSessionName": session_name()}
    keys = aws.call("AssumeRole", role, service="sts")["Credentials"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys["SecretAccessKey"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", keys["SessionToken"])


def test_a_cluster_of_another_session_of_the_role_is_reported(
    on: On, aws: AwsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.call("CreateRole", {"RoleName": "gpu", "AssumeRolePolicyDocument": "{}"}, service="iam")
    assume_session(aws, monkeypatch, "laptop")
    laptop, desk = on("laptop"), on("desk")
    laptop.up(cluster__nodes=2, cluster__instance_type="g5.xlarge", network__ssh_cidr="10.0.0.7")
    assume_session(aws, monkeypatch, "desk.example.com")
    for verb in (status, lambda ctx: down(ctx, confirm=print)):
        with pytest.raises(NotFoundError) as error:
            verb(desk.context())
        assert error.value.exit_code == 7
        assert error.value.why == "2 x g5.xlarge in us-east-1, made by awsddp-ann@laptop"
        assert "role_session_name = awsddp-ann@laptop" in error.value.next
    assert status(laptop.context())["state"] == "ready"  # although the host has another name now
    assume_session(aws, monkeypatch, "laptop")
    assert len(run_down(desk)[0]["terminated"]) == 2  # as advised
    assume_session(aws, monkeypatch, "desk.example.com")
    assert status(desk.context())["state"] == "absent"
