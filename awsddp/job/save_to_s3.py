"""--save-to: results go to S3 while the job runs. What a launch needs for it is looked for before, the job's
name is claimed there first, and `down` waits.

The nodes do the rest: agent/s3/uploader.py.
"""

import base64
import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from awsddp.agent.messages import Launch
from awsddp.agent.s3.store import Place
from awsddp.agent_client.calls import NameTaken
from awsddp.agent_client.program import UPLOADER, node_program
from awsddp.errors import AwsddpError, CloudError, ConfigError
from awsddp.job.reported import choose_job
from awsddp.model.events import Event
from awsddp.model.node_answers import Tried
from awsddp.model.records import JobRecord, Target
from awsddp.model.records import Saving as SavingNow
from awsddp.model.saving_text import saving_text
from awsddp.plan.policy import role_policy
from awsddp.plan.records import Facts, Saving
from awsddp.plan.save_checks import no_bucket, other_region
from awsddp.session.connect import told_jobs
from awsddp.session.context import ConnectedCluster, LocatedCluster
from awsddp.settings.values import data_sources, s3_place
from awsddp.storage.datasets import listed_data, send_packages
from awsddp.storage.excludes import exclude_patterns
from awsddp.storage.saved_job import in_bucket, signing_secret, store_at
from awsddp.util.format import amount, node_name
from awsddp.util.parallel import split

LOOK_S, PARTS_S, BEAT_S = 1.0, 30.0, 10.0
"""How often a saver looks, sends what has grown, and tells the first node that it lives, at most."""
_CLAIM_S = 240.0
_STILL_S = 120.0
"""For how long nothing may be saved before `down` fetches what is left."""
_POLL_S = 1.0
REHEARSED = "awsddp-local"
"""The instance profile that nodes of the local cloud get where none is named."""


def with_s3(cluster: LocatedCluster, facts: Facts) -> Facts:
    """Return the facts with what the job reads and where its results go, as far as that may be asked.

    Raises ConfigError as `listed_data`.
    """
    from awsddp.aws import account_resources

    aws, job, place = cluster.aws, cluster.session.job_spec, cluster.session.job_spec.job.save_to
    data = listed_data(job, cluster.target, internet=facts.image.has_internet)
    if place or any(one.kind == "s3" for one in data_sources(job.data.sources)):
        facts = replace(facts, subnets=account_resources.with_s3(aws, facts.subnets))
    if place is None:
        return replace(facts, data=data)
    saving = Saving(
        place=place, lacks=tuple(account_resources.lacking(aws, facts.role, place) if facts.role else ())
    )
    where = Place(*s3_place(place))
    with contextlib.suppress(AwsddpError), store_at(cluster.target, where) as store:
        saving = replace(saving, region=store.region(where.bucket))
    return replace(facts, data=data, saving=saving)


def rehearsed(cluster: LocatedCluster) -> LocatedCluster:
    """Return the cluster with an instance profile, where it is of the local cloud and its job saves to S3.

    What lacks of that and of the bucket is made, and reported. Raises ConfigError, CloudError.
    """
    from awsddp.aws.api_errors import unless_refused

    session, aws = cluster.session, cluster.aws
    place, access = session.job_spec.job.save_to, session.spec.access
    if cluster.target.name != "local" or place is None:
        return cluster
    _refuse_loopback(cluster.target, place)
    name, bucket = access.instance_profile or REHEARSED, s3_place(place)[0]
    role, profile = {"RoleName": name}, {"InstanceProfileName": name}

    def make(operation: str, asked: dict[str, Any], service: str = "iam") -> bool:
        return unless_refused(lambda: aws.call(operation, asked, service=service)) is not None

    made = [f"bucket {bucket}"] * make("CreateBucket", {"Bucket": bucket}, "s3")
    if is_new := make("CreateInstanceProfile", profile):
        made.append(f"instance profile {name}")
        make("CreateRole", {**role, "AssumeRolePolicyDocument": "{}"})
        make("AddRoleToInstanceProfile", {**role, **profile})
    if is_new or name == REHEARSED:
        policy = json.dumps(role_policy(session.spec, session.job_spec))
        named = {"PolicyName": hashlib.sha256(policy.encode()).hexdigest()}  # others may be in use
        aws.call("PutRolePolicy", {**role, **named, "PolicyDocument": policy}, service="iam")
    if made:
        told = "on AWS you make them, and awsddp doctor --iam-policy nodes prints the role's policy"
        session.say(f"made in the local cloud: {' and '.join(made)}; {told}")
    spec = replace(session.spec, access=replace(access, instance_profile=name))
    return replace(cluster, session=session.with_settings(spec))


def _refuse_loopback(target: Target, place: str) -> None:
    """Raise ConfigError for a local cloud whose nodes have no metadata service, and so no role."""
    if target.node_s3 is not None and target.node_s3 == target.endpoint:
        raise ConfigError(
            f"nodes in loopback mode cannot save to {place}",
            "they have no metadata service that gives them the credentials of a role",
            "awsddp local stop && awsddp local start   # as root, with the Debian packages of docs/local.md",
        )


def claim(connected: ConnectedCluster, launches: Mapping[int, Launch], refused: list[str]) -> None:
    """Claim the job's name at job.save_to, if any, by its first node, and have the launches save there.

    Raises NameTaken, once the names that are taken are among those `refused`; ConfigError for what keeps the
    node from saving, NodeError.
    """
    launch, asked = next(iter(launches.values())), connected.session.job_spec.job
    if asked.save_to is None:
        return
    _refuse_loopback(connected.cluster.target, asked.save_to)
    prepared = connected.cluster.record.found
    first, pythons = launch.first.node, {node: prepared[node].python for node in launches}
    order = {
        "place": s3_place(asked.save_to),
        "region": connected.cluster.aws.region,
        "endpoint": connected.cluster.target.node_s3,
        "job": launch.job,
        "by": launch.first.instance_id,
        "exclude": exclude_patterns(asked.exclude),
        "launch": launch.launch,
        "secret": signing_secret(connected.session, launch.job),
    }
    found = _tried(connected, first, pythons[first], order)
    if found.code == "boto3":
        send_packages(connected, list(launches))
        found = _tried(connected, first, pythons[first], order)
    if found.code == "taken":
        refused += [launch.job, *found.names]
        where = f"{asked.save_to} has one, of this or another cluster"
        raise NameTaken(f"job {launch.job} already exists", where, "choose another --name")
    if found.code:
        raise _refusal(found, connected.cluster, first)
    for node, one in launches.items():
        more = {"do": "save", "look_s": LOOK_S, "parts_s": PARTS_S, "beat_s": BEAT_S}
        argv, stdin = node_program(pythons[node], UPLOADER, {**order, **more})
        one.saving = {"argv": argv, "stdin": base64.b64encode(stdin).decode()}


def _tried(connected: ConnectedCluster, node: int, python: str, order: Mapping[str, Any]) -> Tried:
    """Have a node claim the name with every right that saving needs. Raises NodesFailed."""
    from awsddp.nodes.environments import answers

    program = node_program(python, UPLOADER, {**order, "do": "claim"})
    failed = f"{connected.session.job_spec.job.save_to} could not be tried"
    return split(answers(connected.fleet, {node: program}, Tried, failed=failed, silent_s=_CLAIM_S))[node]


def _refusal(found: Tried, cluster: LocatedCluster, node: int) -> AwsddpError:
    """Return the error that says what keeps a node from saving, and what to do."""
    where, region, who = str(cluster.session.job_spec.job.save_to), cluster.aws.region, node_name(node)
    bucket, said = s3_place(where)[0], " ".join(found.said.split())[:1000]
    if found.code == "bucket":
        return no_bucket(bucket, region, said)
    if found.code == "region":
        return other_region(bucket, found.what, region)
    if found.code in ("throttled", "unreachable"):
        return _later(found.code, who=who, where=where, said=said, region=region)
    way = "" if cluster.target.name == "local" else " -o access.instance_profile=NAME"  # --local makes one
    failed, why, remedy = {
        "role": (
            f"{who} has no role, so that it cannot save to {where}",
            said,
            f"awsddp down && awsddp up{way}   # nodes with the rights of a role",
        ),
        "right": (
            f"the role of {who} has no right {found.what} in {where}",
            said,
            "awsddp doctor --iam-policy nodes   # what its role needs",
        ),
        "boto3": (
            f"{who} has no boto3 that saves to {where}",
            said,
            "awsddp exec -- python3 -m pip install boto3",
        ),
        "other": (f"{who} cannot save to {where}", said, "awsddp doctor"),
    }[found.code]
    return ConfigError(failed, why, remedy)


def _later(code: str, *, who: str, where: str, said: str, region: str) -> CloudError:
    """Return the error for S3 that did not do what a node asked: the same command may succeed later."""
    failed, steps = f"S3 did not take what {who} wrote to {where}", ["run the same command again in a minute"]
    if code == "unreachable":
        failed = f"{who} does not reach {where}"
        endpoint = f"--service-name com.amazonaws.{region}.s3 --route-table-ids TABLE"
        steps.append(
            f"aws ec2 create-vpc-endpoint --vpc-id VPC {endpoint}   # if its subnet has no way to S3"
        )
    kind = "throttled" if "SlowDown" in said else "unavailable"
    error = CloudError(failed, said, "\n".join(steps), kind=kind)
    error.retryable = True
    return error


def wait_until_saved(connected: ConnectedCluster, job: JobRecord) -> bool:
    """Wait for the last upload of a job that has ended, and tell whether all its results are saved.

    They are where the nodes that can be asked say so, and S3 holds what they list. Else it says why not, also
    where nothing moves any more.
    """
    session = connected.session
    saving, counts, until = None, None, time.monotonic() + _STILL_S
    where = f"{job.save_to}/{job.job}"
    while time.monotonic() < until:
        saving = choose_job(told_jobs(connected, partial=True), job.job).saving
        if saving is not None and saving.ended:
            break
        if saving is not None and counts != _counts(saving):
            counts, until = _counts(saving), time.monotonic() + _STILL_S
            session.on_event(Event(f"saving {job.job} to {job.save_to}: {saving_text(saving)}", ""))
        time.sleep(_POLL_S)
    if saving is not None and saving.ended and not saving.error:
        if is_there := in_bucket(session, job):
            session.say(f"the results of {job.job} are in {where}: {amount(saving.files, saving.bytes)}")
        return is_there
    why = saving.error if saving is not None and saving.error else "its nodes do not go on"
    session.say(f"not all results of {job.job} are in {where}: {why}")
    return False


def _counts(saving: SavingNow) -> tuple[int, int, int, int]:
    """Return what changes while results are saved."""
    return saving.files, saving.bytes, saving.pending_files, saving.pending_bytes


def abort(cluster: LocatedCluster, jobs: Iterable[JobRecord]) -> None:
    """Give up uploads of jobs that have ended which were never completed, as far as this login may."""
    over: dict[str, list[str]] = {}
    for one in jobs:
        if one.save_to is not None:
            over.setdefault(one.save_to, []).append(one.job)
    for save_to, names in over.items():
        where = Place(*s3_place(save_to))
        with contextlib.suppress(AwsddpError), store_at(cluster.target, where) as store:
            store.abort(where, over=names)
