"""Pure functions that make the least-privilege IAM policy for a configuration, with conditions on tags.

templates/policy.json has every statement. A list item that is an object, such as {"spot": "ec2:..."}, maps a
fact to a text. The text is repeated for each value of the fact, and the value replaces the "@" in the text. A
statement or a condition with an empty list is removed. Sources, by statement:
- actions, their resources and condition keys:
  https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
- ${aws:userid} equals the tag `awsddp:owner` for every kind of credentials, including SSO:
  https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_variables.html
- FirstUse, the roles that AWS creates when a service is first used:
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html
  https://docs.aws.amazon.com/servicequotas/latest/userguide/using-service-linked-roles.html
- KeepDisksAtPoweroff has "IfExists", because it is untested on AWS whether each form of the call has the
  key:
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/iam-policy-structure.html#attribute-key
- KeepTagsTrue has "Null", because DeleteTags without keys removes all tags and "ForAllValues" would allow it.
- SshToOwnNodes and the two statements after it:
  https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-restrict-access-quickstart.html
- arn:* matches every partition, such as aws-cn and aws-us-gov; an account belongs to only one of them:
  https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_resource.html
  EC2's service name may end in .cn in China (see AWS::URLSuffix):
  https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/pseudo-parameter-reference.html
- LookWhetherItMaySave: https://docs.aws.amazon.com/IAM/latest/APIReference/API_SimulatePrincipalPolicy.html
- EncryptDisks and the statements next to it, which name a key's alias in a condition, because an alias is not
  a resource:
  https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html
  https://docs.aws.amazon.com/kms/latest/developerguide/alias-authorization.html
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from awsddp.compat.types import GPU_TYPES
from awsddp.errors import ConfigError
from awsddp.settings.spec import SSM, ClusterSpec, JobSpec
from awsddp.settings.values import parse_data_sources, parse_s3_uri
from awsddp.util.shipped_files import template

_READ = ("s3:GetObject",)
_ABORT = "s3:AbortMultipartUpload"
SAVE = ("s3:PutObject", *_READ, _ABORT)
_NO_JOB = JobSpec()


def least_policy(spec: ClusterSpec, job: JobSpec = _NO_JOB) -> dict[str, Any]:
    """Return the policy document that allows exactly the calls that the verbs make for this configuration.

    The policy allows changes only to resources whose tag `awsddp:owner` names the caller's AWS identity.
    """
    saved, folders = _save_prefixes(job), []
    if any(source.kind == "folder" for source in parse_data_sources(job.data.sources)):
        folders = [(bucket, f"{prefix}/.data".lstrip("/")) for bucket, prefix in saved]
    objects = [*_object_statements(_data_prefixes(job), _READ), *_object_statements(saved, (*_READ, _ABORT))]
    objects += [*_object_statements(folders, (*SAVE, "s3:DeleteObject")), *_upload_statements(job)]
    facts = _facts(spec) | {
        "s3": ("",) if objects else (),
        "saved bucket": tuple(bucket for bucket, _ in saved),
        "saving role": ("",) if saved and spec.access.instance_profile else (),
    }
    filled = _fill(json.loads(template("policy.json")), facts)
    return _document([*(statement for statement in filled if "Resource" in statement), *objects])


def role_policy(spec: ClusterSpec, job: JobSpec) -> dict[str, Any]:
    """Return the nodes' role policy document, which allows their S3 calls for jobs with this configuration.

    Raises ConfigError if the jobs do not use S3.
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
    """
    statements = [
        *_object_statements(_data_prefixes(job), _READ),
        *_object_statements(_save_prefixes(job), SAVE),
        *_upload_statements(job),
    ]
    if not statements:
        raise ConfigError(
            "the nodes need no rights",
            "neither data.sources nor job.save_to has an S3 URI",
            "awsddp doctor --iam-policy nodes -o job.save_to=s3://my-bucket/runs",
        )
    if key := _facts(spec)["disk key"]:  # buckets may be encrypted with this key as well
        through = {"StringLike": {"kms:ViaService": "s3.*.amazonaws.com*"}}
        actions = ["kms:GenerateDataKey", "kms:Decrypt"]
        statements.append({"Effect": "Allow", "Action": actions, "Resource": list(key), "Condition": through})
    return _document(statements)


def _document(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}


def _data_prefixes(job: JobSpec) -> list[tuple[str, str]]:
    """Return the bucket and the prefix of each data source in S3."""
    return [
        (source.at, source.part) for source in parse_data_sources(job.data.sources) if source.kind == "s3"
    ]


def _save_prefixes(job: JobSpec) -> list[tuple[str, str]]:
    """Return the bucket and the prefix for uploaded results, or [] if results are not uploaded."""
    return [parse_s3_uri(job.job.save_to)] if job.job.save_to is not None else []


def _object_statements(
    locations: Iterable[tuple[str, str]], actions: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Yield statements that allow the actions on objects with these prefixes, and listing those objects."""
    for bucket, prefix in locations:
        keys = f"{_literal(prefix)}/*" if prefix else "*"
        yield {"Effect": "Allow", "Action": list(actions), "Resource": [f"arn:*:s3:::{bucket}/{keys}"]}
        yield {
            "Effect": "Allow",
            "Action": ["s3:ListBucket"],
            "Resource": [f"arn:*:s3:::{bucket}"],
            "Condition": {"StringLike": {"s3:prefix": [keys]}},
        }


def _literal(text: str) -> str:
    """Return a name escaped for a policy: `*`, `?` and `${` have a special meaning there.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_variables.html#policy-vars-specialchars
    """
    return re.sub(r"[*?$]", r"${\g<0>}", text)


def _upload_statements(job: JobSpec) -> Iterator[dict[str, Any]]:
    """Yield statements that allow listing all uploads in buckets, which IAM cannot limit to a prefix."""
    for bucket, _ in _save_prefixes(job):
        resources = [f"arn:*:s3:::{bucket}"]
        yield {"Effect": "Allow", "Action": ["s3:ListBucketMultipartUploads"], "Resource": resources}


def _fill(part: Any, facts: Mapping[str, tuple[str, ...]]) -> Any:
    """Return a part of the template with its facts filled in and its empty lists removed."""
    if isinstance(part, dict):
        filled = {key: _fill(value, facts) for key, value in part.items()}
        return {key: value for key, value in filled.items() if value}
    if not isinstance(part, list):
        return part
    items: list[Any] = []
    for item in part:
        if isinstance(item, dict) and "Sid" not in item:
            [(fact, text)] = item.items()
            items += [text.replace("@", value) for value in facts[fact]]
        else:
            items.append(_fill(item, facts))
    return items


def _facts(spec: ClusterSpec) -> dict[str, tuple[str, ...]]:
    """Return {fact in the template: its values}. A yes-or-no fact has the value "" if it is true, else no
    value.
    """
    access, capacity, network = spec.access, spec.capacity, spec.network
    reserved, kms_key = capacity.reservation, _literal(access.kms_key or "")
    key_scope, _, alias = kms_key.rpartition("alias/")
    by_alias = alias != kms_key
    grouped = spec.cluster.nodes > 1 and not reserved and capacity.placement_group
    named = {
        "subnet": _literal(network.subnet or "") or "*",
        "security group": _literal(network.security_group or ""),
        "reservation": _literal(reserved or ""),
        "key": _literal(access.key or ""),
        "profile": _arn("iam::*:instance-profile", _literal(access.instance_profile or "")),
        "disk key": f"{key_scope or 'arn:*:kms:*:*:'}key/*" if by_alias else _arn("kms:*:*:key", kms_key),
        "disk key alias": alias if by_alias else None,
    }
    holds = {
        "strange type": any(name not in GPU_TYPES for name in spec.cluster.types),
        "spot": bool(spec.cluster.spot),
        "on-demand": "on-demand" in spec.cluster.markets,
        "quota": not reserved,  # a reservation already counts against the quota
        "new key": not access.key,
        "new group": not network.security_group,
        "several nodes": spec.cluster.nodes > 1,
        "new placement group": grouped,
        "group to leave": grouped and "on-demand" in spec.cluster.markets,
        "ssm": network.jump == SSM,
    }
    image = (spec.cluster.image or "").removeprefix("resolve:ssm:")
    return {
        "image parameter": (_literal(image),) if image[:1] == "/" else (),
        **{fact: (value,) if value else () for fact, value in named.items()},
        **{fact: ("",) if is_so else () for fact, is_so in holds.items()},
    }


def _arn(scope: str, name: str | None) -> str | None:
    """Return the ARN for a name; the name can already be an ARN."""
    return f"arn:*:{scope}/{name}" if name and not name.startswith("arn:") else name
