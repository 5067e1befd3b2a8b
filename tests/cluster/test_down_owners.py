"""Who owns a cluster, and who may end it: other logins, other accounts, machines without a record."""

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


def log_in_otherwise(aws: AwsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on with the credentials of a role: another UserId in the same account."""
    role = {"RoleArn": "arn:aws:iam::123456789012:role/gpu", "RoleSessionName": "sso-user"}
    keys = aws.call("AssumeRole", role, service="sts")["Credentials"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys["SecretAccessKey"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", keys["SessionToken"])


def end(machine: Machine, **more: Any) -> tuple[dict[str, Any], str]:
    questions: list[str] = []
    return down(machine.context(), confirm=questions.append, **more), "\n".join(questions)


def test_a_cluster_that_grows_under_another_login_keeps_its_owner(
    on: On, aws: AwsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = on("laptop")
    before = laptop.first()
    log_in_otherwise(aws, monkeypatch)
    assert len(laptop.up(cluster__nodes=3)["nodes"]) == 3
    found = describe(aws, tagged("awsddp:id", before.id))
    assert {node.tags["awsddp:owner"] for node in found} == {before.owner}
    assert len(end(laptop)[0]["terminated"]) == 3


@pytest.mark.parametrize("lost", [1, 2])
def test_what_replaces_lost_nodes_under_another_login_has_the_owner_of_the_cluster(
    on: On, aws: AwsClient, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    laptop = on("laptop")
    before = laptop.first()
    aws.call("TerminateInstances", {"InstanceIds": [node.instance_id for node in before.nodes[:lost]]})
    log_in_otherwise(aws, monkeypatch)
    assert len(laptop.up()["nodes"]) == 2
    found = describe(aws, tagged("awsddp:id", before.id))
    assert {node.tags["awsddp:owner"] for node in found} == {before.owner}


def test_another_account_is_named_and_nothing_is_forgotten(on: On, aws: AwsClient) -> None:
    laptop = on("laptop")
    laptop.first()
    record = laptop.folder.read()
    assert record is not None
    theirs = tuple(replace(one, instance_id=f"i-elsewhere{one.node}") for one in record.prepared)
    elsewhere = replace(record, account="999999999999", owner="AIDAOTHER", id="0badcafe", prepared=theirs)
    laptop.folder.write(elsewhere)
    for verb in (status, lambda ctx: down(ctx, confirm=print), lambda _: laptop.up()):
        with pytest.raises(ConfigError, match="belongs to AWS account 999999999999") as refused:
            verb(laptop.context())
        assert "123456789012" in refused.value.why
    assert laptop.folder.read() == elsewhere
    assert laptop.folder.key.exists()


def test_who_ends_a_cluster_is_told_who_made_it_where_and_when(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-desk (2)")
    laptop, desk = on("laptop"), on("desk")
    cluster = laptop.first()
    with pytest.raises(UsageError, match="-y does not end cluster demo") as refused:
        end(desk, known_only=True)
    assert "gpu-desk -2-" in refused.value.why
    assert cluster.live == laptop.cluster.live
    assert cluster.created is not None
    result, asked = end(desk)
    assert len(result["terminated"]) == 2
    assert f"made at {cluster.created:%Y-%m-%dT%H:%M:%SZ} on gpu-desk -2-" in asked


def test_what_this_machine_made_ends_without_its_name(on: On) -> None:
    laptop = on("laptop")
    laptop.first()
    assert len(end(laptop, known_only=True)[0]["terminated"]) == 2


def test_what_is_started_anew_has_the_term_it_was_made_with(on: On) -> None:
    laptop = on("laptop")
    laptop.first(cluster__expires="2h")
    laptop.aws.call("TerminateInstances", {"InstanceIds": [node.instance_id for node in laptop.cluster.live]})
    result = laptop.up()
    left = datetime.fromisoformat(result["expires"]) - datetime.now(UTC)
    assert 7100 < left.total_seconds() <= 7200


def test_a_term_that_is_said_later_is_remembered_and_never_made_longer(on: On) -> None:
    laptop = on("laptop")
    laptop.first(cluster__expires="24h")
    shorter = laptop.up(cluster__expires="1h")["expires"]
    assert laptop.up()["expires"] == shorter


@pytest.mark.parametrize(("hours", "told"), [(3, True), (30, False)])
def test_the_plan_says_when_credentials_end_before_the_nodes_do(
    on: On, monkeypatch: pytest.MonkeyPatch, hours: int, told: bool
) -> None:
    laptop = on("laptop")
    ends = datetime.now(UTC) + timedelta(hours=hours)
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", ends.isoformat())
    laptop.first(cluster__expires="24h")
    (launched,) = laptop.questions
    assert not isinstance(launched, str)
    assert any("credentials end in " in text for text in launched.warnings) == told


@pytest.mark.parametrize("key", ["instance_type", "gpus", "max_price_usd", "budget_usd", None])
def test_yes_answers_questions_and_chooses_no_price(on: On, key: str | None) -> None:
    laptop = on("laptop")
    laptop.first()
    (plan,) = laptop.questions
    values = {"instance_type": "g5.xlarge", "gpus": "A10G:1", "max_price_usd": 5.0, "budget_usd": 100.0}
    spec = laptop.context(**({f"cluster__{key}": values[key]} if key else {})).spec
    options = Globals(yes=True, quiet=True)
    ask = launch_question(Screen(options), spec)
    if key is not None:
        ask(plan)
        return
    with pytest.raises(UsageError, match=r"-y does not choose a price: 2 x g5\.xlarge cost") as refused:
        ask(plan)
    assert "--budget USD" in refused.value.next


def as_session(aws: AwsClient, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Go on as a session of one role that awsddp names, on a host."""
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    monkeypatch.setattr("socket.gethostname", lambda: host)
    role = {"RoleArn": "arn:aws:iam::123456789012:role/gpu", "RoleSessionName": session_name()}
    keys = aws.call("AssumeRole", role, service="sts")["Credentials"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys["SecretAccessKey"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", keys["SessionToken"])


def test_a_cluster_by_another_session_of_the_role_is_named(
    on: On, aws: AwsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.call("CreateRole", {"RoleName": "gpu", "AssumeRolePolicyDocument": "{}"}, service="iam")
    as_session(aws, monkeypatch, "laptop")
    laptop, desk = on("laptop"), on("desk")
    laptop.up(cluster__nodes=2, cluster__instance_type="g5.xlarge", network__ssh_cidr="10.0.0.7")
    as_session(aws, monkeypatch, "desk.example.com")
    for verb in (status, lambda ctx: down(ctx, confirm=print)):
        with pytest.raises(NotFoundError) as refused:
            verb(desk.context())
        assert refused.value.exit_code == 7
        assert refused.value.why == "2 x g5.xlarge in us-east-1, made by awsddp-ann@laptop"
        assert "role_session_name = awsddp-ann@laptop" in refused.value.next
    assert status(laptop.context())["state"] == "ready"  # the laptop in another network finds its own
    as_session(aws, monkeypatch, "laptop")
    assert len(end(desk)[0]["terminated"]) == 2  # as the advice says
    as_session(aws, monkeypatch, "desk.example.com")
    assert status(desk.context())["state"] == "absent"
