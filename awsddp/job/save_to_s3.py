"""--save-to: check the bucket before the launch, claim the job's name in S3, and wait for uploads to finish.

The uploader on the nodes is agent/s3/uploader.py.
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
from awsddp.agent.s3.store import S3Uri
from awsddp.agent_client.calls import NameTaken
from awsddp.agent_client.program import UPLOADER_MODULES, node_program
from awsddp.errors import AwsddpError, CloudError, ConfigError
from awsddp.job.reported import choose_job
from awsddp.model.events import Event
from awsddp.model.node_answers import NameClaimResult
from awsddp.model.records import JobRecord, Target
from awsddp.model.records import Saving as SavingNow
from awsddp.model.saving_text import describe_saving
from awsddp.plan.policy import role_policy
from awsddp.plan.records import Facts, SaveTarget
from awsddp.plan.save_checks import bucket_in_other_region, bucket_not_found
from awsddp.session.connect import list_jobs_on_nodes
from awsddp.session.context import ConnectedCluster, LocatedCluster
from awsddp.settings.values import parse_data_sources, parse_s3_uri
from awsddp.storage.datasets import list_data, send_s3_packages
from awsddp.storage.excludes import exclude_patterns
from awsddp.storage.saved_job import derive_signing_secret, open_store, verify_in_s3
from awsddp.util.formatting import files_text, node_name
from awsddp.util.parallel import results_or_raise

SCAN_INTERVAL_S, GROWING_INTERVAL_S, HEARTBEAT_INTERVAL_S = 1.0, 30.0, 10.0
"""The minimum number of seconds between scans, uploads of a growing file, and heartbeats to the first
node."""
_CLAIM_S = 240.0
_STILL_S = 120.0
"""How many seconds uploads may make no progress before `down` fetches the remaining files."""
_POLL_S = 1.0
LOCAL_PROFILE = "awsddp-local"
"""The default instance profile for nodes of the local cloud."""


def add_s3_facts(cluster: LocatedCluster, facts: Facts) -> Facts:
    """Return the facts with the job's data, and with the facts about `save_to` that this login can read.

    Raises the ConfigError of `list_data`.
    """
    from awsddp.aws import account_resources

    aws, job, save_to = cluster.aws, cluster.session.job_spec, cluster.session.job_spec.job.save_to
    data = list_data(job, cluster.target, internet=facts.image.has_internet)
    if save_to or any(source.kind == "s3" for source in parse_data_sources(job.data.sources)):
        facts = replace(facts, subnets=account_resources.with_s3_routes(aws, facts.subnets))
    if save_to is None:
        return replace(facts, data=data)
    saving = SaveTarget(
        uri=save_to,
        lacks=tuple(account_resources.list_missing_actions(aws, facts.role, save_to) if facts.role else ()),
    )
    uri = S3Uri(*parse_s3_uri(save_to))
    with contextlib.suppress(AwsddpError), open_store(cluster.target, uri) as store:
        saving = replace(saving, region=store.get_region(uri.bucket))
    return replace(facts, data=data, saving=saving)


def prepare_local_saving(cluster: LocatedCluster) -> LocatedCluster:
    """Return the cluster. If the job saves to S3 from the local cloud, the cluster gets an instance profile.

    A missing profile or bucket is created and reported. Raises ConfigError or CloudError.
    """
    from awsddp.aws.api_errors import none_if_refused

    session, aws = cluster.session, cluster.aws
    save_to, access = session.job_spec.job.save_to, session.spec.access
    if cluster.target.name != "local" or save_to is None:
        return cluster
    _refuse_loopback(cluster.target, save_to)
    name, bucket = access.instance_profile or LOCAL_PROFILE, parse_s3_uri(save_to)[0]
    role, profile = {"RoleName": name}, {"InstanceProfileName": name}

    def make(operation: str, parameters: dict[str, Any], service: str = "iam") -> bool:
        return none_if_refused(lambda: aws.call(operation, parameters, service=service)) is not None

    created = [f"bucket {bucket}"] * make("CreateBucket", {"Bucket": bucket}, "s3")
    if is_new := make("CreateInstanceProfile", profile):
        created.append(f"instance profile {name}")
        make("CreateRole", {**role, "AssumeRolePolicyDocument": "{}"})
        make("AddRoleToInstanceProfile", {**role, **profile})
    if is_new or name == LOCAL_PROFILE:
        policy = json.dumps(role_policy(session.spec, session.job_spec))
        named = {
            "PolicyName": hashlib.sha256(policy.encode()).hexdigest()
        }  # policies for other settings may be in use
        aws.call("PutRolePolicy", {**role, **named, "PolicyDocument": policy}, service="iam")
    if created:
        note = (
            "on AWS you create these yourself, and awsddp doctor --iam-policy nodes prints the role's policy"
        )
        session.say(f"created in the local cloud: {' and '.join(created)}; {note}")
    spec = replace(session.spec, access=replace(access, instance_profile=name))
    return replace(cluster, session=session.with_settings(spec))


def _refuse_loopback(target: Target, save_to: str) -> None:
    """Raise ConfigError for a local cloud whose nodes have no metadata service and therefore no role."""
    if target.node_s3 is not None and target.node_s3 == target.endpoint:
        raise ConfigError(
            f"nodes in loopback mode cannot save to {save_to}",
            "the nodes have no metadata service from which they could get the credentials of a role",
            "awsddp local stop && awsddp local start   # as root, with the Debian packages of docs/local.md",
        )


def claim_job_name(connected: ConnectedCluster, launches: Mapping[int, Launch], refused: list[str]) -> None:
    """If job.save_to is set, make the first node claim the job's name at that S3 URI.

    Adds the uploads to the launch requests. Raises NameTaken after adding the taken names to `refused`,
    ConfigError if the node cannot write to job.save_to, or NodeError.
    """
    launch, requested = next(iter(launches.values())), connected.session.job_spec.job
    if requested.save_to is None:
        return
    _refuse_loopback(connected.cluster.target, requested.save_to)
    prepared = connected.cluster.record.prepared_by_node
    first, pythons = launch.first_node.node, {node: prepared[node].python for node in launches}
    order = {
        "place": parse_s3_uri(requested.save_to),
        "region": connected.cluster.aws.region,
        "endpoint": connected.cluster.target.node_s3,
        "job": launch.job,
        "by": launch.first_node.instance_id,
        "exclude": exclude_patterns(requested.exclude),
        "launch": launch.launch,
        "secret": derive_signing_secret(connected.session, launch.job),
    }
    result = _try_claim(connected, first, pythons[first], order)
    if result.code == "boto3":
        send_s3_packages(connected, list(launches))
        result = _try_claim(connected, first, pythons[first], order)
    if result.code == "taken":
        refused += [launch.job, *result.names]
        reason = f"{requested.save_to} has a job of this name, from this or another cluster"
        raise NameTaken(f"job {launch.job} already exists", reason, "choose another --name")
    if result.code:
        raise _claim_error(result, connected.cluster, first)
    for node, launch_request in launches.items():
        more = {
            "do": "save",
            "look_s": SCAN_INTERVAL_S,
            "parts_s": GROWING_INTERVAL_S,
            "beat_s": HEARTBEAT_INTERVAL_S,
        }
        argv, stdin = node_program(pythons[node], UPLOADER_MODULES, {**order, **more})
        launch_request.saving = {"argv": argv, "stdin": base64.b64encode(stdin).decode()}


def _try_claim(
    connected: ConnectedCluster, node: int, python: str, order: Mapping[str, Any]
) -> NameClaimResult:
    """Make a node claim the name. The claim needs the same permissions as the uploads. Raises NodesFailed."""
    from awsddp.nodes.environments import run_programs

    program = node_program(python, UPLOADER_MODULES, {**order, "do": "claim"})
    failed = f"{connected.session.job_spec.job.save_to} could not be checked"
    return results_or_raise(
        run_programs(
            connected.fleet, {node: program}, NameClaimResult, failure_message=failed, silent_s=_CLAIM_S
        )
    )[node]


def _claim_error(result: NameClaimResult, cluster: LocatedCluster, node: int) -> AwsddpError:
    """Return the error for a node that cannot save to S3, with the reason and the next step."""
    save_to, region, node_label = (
        str(cluster.session.job_spec.job.save_to),
        cluster.aws.region,
        node_name(node),
    )
    bucket, reason = parse_s3_uri(save_to)[0], " ".join(result.said.split())[:1000]
    if result.code == "bucket":
        return bucket_not_found(bucket, region, reason)
    if result.code == "region":
        return bucket_in_other_region(bucket, result.what, region)
    if result.code in ("throttled", "unreachable"):
        return _retryable_error(
            result.code, node_label=node_label, save_to=save_to, reason=reason, region=region
        )
    profile_option = (
        "" if cluster.target.name == "local" else " -o access.instance_profile=NAME"
    )  # the local cloud creates a profile
    failed, why, remedy = {
        "role": (
            f"{node_label} has no role, so it cannot save to {save_to}",
            reason,
            f"awsddp down && awsddp up{profile_option}   # nodes with a role's permissions",
        ),
        "right": (
            f"the role of {node_label} has no permission {result.what} in {save_to}",
            reason,
            "awsddp doctor --iam-policy nodes   # prints the permissions that the role needs",
        ),
        "boto3": (
            f"{node_label} has no boto3 that can save to {save_to}",
            reason,
            "awsddp exec -- python3 -m pip install boto3",
        ),
        "other": (f"{node_label} cannot save to {save_to}", reason, "awsddp doctor"),
    }[result.code]
    return ConfigError(failed, why, remedy)


def _retryable_error(code: str, *, node_label: str, save_to: str, reason: str, region: str) -> CloudError:
    """Return the retryable error for a node whose requests S3 did not serve."""
    failed, steps = (
        f"S3 did not accept what {node_label} wrote to {save_to}",
        ["run the same command again in a minute"],
    )
    if code == "unreachable":
        failed = f"{node_label} does not reach {save_to}"
        endpoint = f"--service-name com.amazonaws.{region}.s3 --route-table-ids TABLE"
        steps.append(
            f"aws ec2 create-vpc-endpoint --vpc-id VPC {endpoint}   # if its subnet has no route to S3"
        )
    kind = "throttled" if "SlowDown" in reason else "unavailable"
    error = CloudError(failed, reason, "\n".join(steps), kind=kind)
    error.retryable = True
    return error


def wait_until_saved(connected: ConnectedCluster, job: JobRecord) -> bool:
    """Wait for an ended job's last upload, and return True if all of the job's results are saved.

    All results are saved if the reachable nodes report this and S3 has the files that these nodes list. If
    results are missing, or if uploads make no progress, the reason is reported.
    """
    session = connected.session
    saving, counts, until = None, None, time.monotonic() + _STILL_S
    uri = f"{job.save_to}/{job.job}"
    while time.monotonic() < until:
        saving = choose_job(list_jobs_on_nodes(connected, partial=True), job.job).saving
        if saving is not None and saving.ended:
            break
        if saving is not None and counts != _counts(saving):
            counts, until = _counts(saving), time.monotonic() + _STILL_S
            session.on_event(Event(f"saving {job.job} to {job.save_to}: {describe_saving(saving)}", ""))
        time.sleep(_POLL_S)
    if saving is not None and saving.ended and not saving.error:
        if is_there := verify_in_s3(session, job):
            session.say(f"the results of {job.job} are in {uri}: {files_text(saving.files, saving.bytes)}")
        return is_there
    why = saving.error if saving is not None and saving.error else "its uploads make no progress"
    session.say(f"not all results of {job.job} are in {uri}: {why}")
    return False


def _counts(saving: SavingNow) -> tuple[int, int, int, int]:
    """Return the counters that change while results are uploaded."""
    return saving.files, saving.bytes, saving.pending_files, saving.pending_bytes


def abort_uploads(cluster: LocatedCluster, jobs: Iterable[JobRecord]) -> None:
    """Abort the incomplete multipart uploads of ended jobs, if this login is allowed to do so."""
    ended: dict[str, list[str]] = {}
    for job in jobs:
        if job.save_to is not None:
            ended.setdefault(job.save_to, []).append(job.job)
    for save_to, names in ended.items():
        uri = S3Uri(*parse_s3_uri(save_to))
        with contextlib.suppress(AwsddpError), open_store(cluster.target, uri) as store:
            store.abort(uri, ended_jobs=names)
