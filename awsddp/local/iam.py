"""Who may do what with S3: the policies of a role, as IAM reads them.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends

if TYPE_CHECKING:
    from awsddp.local.offers import Call

_PUTS = ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")
_OWN = (
    *("CreateBucket", "DeleteBucket", "PutBucketAcl"),
    *("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload"),
)
ACTIONS = {
    "ListBuckets": "s3:ListAllMyBuckets",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListParts": "s3:ListMultipartUploadParts",
    **{f"{verb}BucketLifecycleConfiguration": f"s3:{verb}LifecycleConfiguration" for verb in ("Get", "Put")},
    **dict.fromkeys(("HeadBucket", "ListObjectsV2"), "s3:ListBucket"),
    "HeadObject": "s3:GetObject",
    **dict.fromkeys(_PUTS, "s3:PutObject"),
    **{name: f"s3:{name}" for name in _OWN},
}
"""The operations of S3 that are carried out, and the right that each needs."""

_SPECIAL = re.compile(r"\$\{([*?$])\}")
DENIED = {
    "implicitDeny": "because no identity-based policy allows the {} action",
    "explicitDeny": "with an explicit deny in an identity-based policy",
}


def decide(policies: Iterable[str], action: str, resource: str, context: Mapping[str, str]) -> str:
    """Return what policies say of an action: allowed, implicitDeny or explicitDeny.

    :param policies: documents in JSON.
    :param context: the values that conditions may ask for. StringEquals and StringLike are known; a
        statement with another condition does not hold.
    """
    effects = set()
    for text in policies:
        for one in _listed(json.loads(text)["Statement"]):
            if _names(one, "Action", action) and _names(one, "Resource", resource) and _holds(one, context):
                effects.add(one["Effect"])
    if "Deny" in effects:
        return "explicitDeny"
    return "allowed" if "Allow" in effects else "implicitDeny"


def simulate(call: Call) -> dict[str, Any]:
    """Answer SimulatePrincipalPolicy for a role.

    :raises ServiceException: moto's NoSuchEntity.
    """
    asked = call.asked
    role = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].get_role_by_arn(asked["PolicySourceArn"])
    entries = asked.get("ContextEntries", ())
    context = {one["ContextKeyName"]: one["ContextKeyValues"][0] for one in entries}
    results = [
        {
            "EvalActionName": action,
            "EvalResourceName": resource,
            "EvalDecision": decide(role.policies.values(), action, resource, context),
        }
        for action in asked["ActionNames"]
        for resource in asked.get("ResourceArns", ["*"])
    ]
    return {"EvaluationResults": results, "IsTruncated": False}


def _names(statement: dict[str, Any], element: str, value: str) -> bool:
    """Whether a statement is of an action, which it may name in any case, or of a resource."""
    fold = str.lower if element == "Action" else str
    patterns = [fold(one) for one in _listed(statement.get(element, statement.get(f"Not{element}")))]
    return _like(fold(value), patterns) == (element in statement)


def _like(value: str, patterns: str | list[str]) -> bool:
    """Whether one of the patterns fits; `*` and `?` stand for anything, `${*}` for a `*`, and so on.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_variables.html#policy-vars-specialchars
    """
    plain = (_SPECIAL.sub(r"[\1]", one.replace("[", "[[]")) for one in _listed(patterns))
    return any(fnmatchcase(value, one) for one in plain)


def _equals(value: str, wanted: str | list[str]) -> bool:
    """Whether it is one of the texts."""
    return value in (_SPECIAL.sub(r"\1", one) for one in _listed(wanted))


def _holds(statement: dict[str, Any], context: Mapping[str, str]) -> bool:
    """Whether the conditions of a statement are met, all of them."""
    known = {"StringEquals": _equals, "StringLike": _like}
    return all(
        operator in known and name in context and known[operator](context[name], wanted)
        for operator, names in statement.get("Condition", {}).items()
        for name, wanted in names.items()
    )


def _listed(one: Any) -> list[Any]:
    return one if isinstance(one, list) else [one]
