"""--save-to: results go to S3 while the job runs. Its name is claimed there first, and `down` waits.

The nodes do the rest: jobs/supervisor/saver.py.
"""

import base64
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from awsddp.answers import Tried, read_answer
from awsddp.data import send_packages
from awsddp.errors import AwsddpError, ConfigError, NodeError
from awsddp.jobs.files import exclude_patterns
from awsddp.jobs.protocol import SAVER, NameTaken, node_program
from awsddp.jobs.supervisor.requests import Launch
from awsddp.known import choose_job
from awsddp.reach import told_jobs
from awsddp.records import JobRecord
from awsddp.report import Event, amount, node_name
from awsddp.values import s3_place

if TYPE_CHECKING:
    from awsddp.cluster import Cluster

LOOK_S, PARTS_S, BEAT_S = 2.0, 30.0, 10.0
"""How often a saver looks, sends what has grown, and tells the first node that it lives, at most."""
_CLAIM_S = 240.0
_STILL_S = 120.0
"""For how long nothing may be saved before `down` fetches what is left."""
_POLL_S = 1.0
_RIGHTS = "s3:ListBucket, s3:GetObject, s3:PutObject and s3:AbortMultipartUpload"


def claim(cluster: "Cluster", launches: Mapping[int, Launch], refused: list[str]) -> None:
    """Claim the job's name at job.save_to, if any, by its first node, and have the launches save there.

    Raises NameTaken, once the names that are taken are among those `refused`; ConfigError for what keeps the
    node from saving, NodeError.
    """
    launch, asked = next(iter(launches.values())), cluster.job_spec.job
    if asked.save_to is None:
        return
    first, pythons = launch.first.node, {node: cluster.record.found[node].python for node in launches}
    order = {
        "place": asked.save_to,
        "region": cluster.aws.region,
        "endpoint": cluster.target.node_s3,
        "job": launch.job,
        "launch": launch.launch,
        "exclude": exclude_patterns(asked.exclude),
    }
    found = _tried(cluster, first, pythons[first], order)
    if found.code == "boto3":
        send_packages(cluster, list(launches))
        found = _tried(cluster, first, pythons[first], order)
    if found.code == "taken":
        refused += [launch.job, *found.names]
        where = f"{asked.save_to} has one, of this or another cluster"
        raise NameTaken(f"job {launch.job} already exists", where, "choose another --name")
    if found.code:
        raise _refusal(found, cluster, first)
    for node, one in launches.items():
        more = {"do": "save", "look_s": LOOK_S, "parts_s": PARTS_S, "beat_s": BEAT_S}
        argv, stdin = node_program(pythons[node], SAVER, {**order, **more})
        one.saving = {"argv": argv, "stdin": base64.b64encode(stdin).decode()}


def _tried(cluster: "Cluster", node: int, python: str, order: Mapping[str, Any]) -> Tried:
    """Have a node claim the name with every right that saving needs. Raises NodeError."""
    program = node_program(python, SAVER, {**order, "do": "claim"})
    end = cluster.fleet.run_each({node: program}, timeout_s=_CLAIM_S)[node]
    if isinstance(end, NodeError):
        raise end
    if end.exit_code != 0:
        raise NodeError(f"{node_name(node)} could not try {order['place']}", end.tail(), "awsddp doctor")
    return read_answer(end.stdout, Tried, node=node)


def _refusal(found: Tried, cluster: "Cluster", node: int) -> AwsddpError:
    """Return the error that says what keeps a node from saving, and what to do."""
    where, region, who = str(cluster.job_spec.job.save_to), cluster.aws.region, node_name(node)
    bucket, said = s3_place(where)[0], " ".join(found.said.split())[:1000]
    failed, why, remedy = {
        "role": (
            f"{who} has no role, so that it cannot save to {where}",
            said,
            "awsddp down && awsddp up -o access.instance_profile=NAME   # nodes with the rights of a role",
        ),
        "right": (
            f"the role of {who} has no right {found.what} in {where}",
            said,
            f"give it {_RIGHTS} there; docs/saving.md shows the policy",
        ),
        "bucket": (
            f"there is no bucket {bucket}",
            said,
            f"aws s3 mb s3://{bucket} --region {region}   # or another --save-to",
        ),
        "region": (
            f"bucket {bucket} is in {found.what}, the nodes are in {region}",
            "what crosses regions is slow and costs money",
            f"name a bucket in {region}: --save-to s3://BUCKET/PREFIX",
        ),
        "unreachable": (
            f"{who} does not reach {where}",
            said,
            "give its subnet a way to S3, such as a gateway endpoint of its VPC",
        ),
        "boto3": (f"{who} has no boto3 that saves to {where}", said, "awsddp doctor"),
        "other": (f"{who} cannot save to {where}", said, "awsddp doctor"),
    }[found.code]
    return ConfigError(failed, why, remedy)


def wait_until_saved(cluster: "Cluster", job: JobRecord) -> bool:
    """Wait for the last upload of a job that has ended, and tell whether all its results are saved.

    Where nothing moves any more, or something could not be saved, it says so.
    """
    saving, left, until = None, None, time.monotonic() + _STILL_S
    while time.monotonic() < until:
        saving = choose_job(told_jobs(cluster, partial=True), job.job).saving
        if saving is None or saving.ended:
            break
        now = saving.pending_files, saving.pending_bytes
        if now != left:
            left, until = now, time.monotonic() + _STILL_S
            cluster.on_event(Event(f"saving {job.job} to {job.save_to}: {amount(*now)} left", ""))
        time.sleep(_POLL_S)
    where = f"{job.save_to}/{job.job}"
    if saving is not None and saving.is_whole:
        cluster.say(f"the results of {job.job} are in {where}: {amount(saving.files, saving.bytes)}")
        return True
    why = saving.error if saving is not None and saving.error else "its nodes do not go on"
    cluster.say(f"not all results of {job.job} are in {where}: {why}")
    return False
