"""Permissions for S3. This module evaluates a role's policies by the same rules as IAM.

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
"""The supported S3 operations, each with the IAM action that it requires."""

_SPECIAL = re.compile(r"\$\{([*?$])\}")
DENIED = {
    "implicitDeny": "because no identity-based policy allows the {} action",
    "explicitDeny": "with an explicit deny in an identity-based policy",
}


def decide(policies: Iterable[str], action: str, resource: str, context: Mapping[str, str]) -> str:
    """Return the policies' decision about an action: allowed, implicitDeny or explicitDeny.

    :param policies: documents in JSON.
    :param context: the condition keys and their values. StringEquals and StringLike are supported; a
        statement with another condition does not apply.
    """
    effects = set()
    for text in policies:
        for statement in _as_list(json.loads(text)["Statement"]):
            if (
                _covers(statement, "Action", action)
                and _covers(statement, "Resource", resource)
                and _conditions_hold(statement, context)
            ):
                effects.add(statement["Effect"])
    if "Deny" in effects:
        return "explicitDeny"
    return "allowed" if "Allow" in effects else "implicitDeny"


def simulate(call: Call) -> dict[str, Any]:
    """Answer SimulatePrincipalPolicy for a role.

    :raises ServiceException: the role does not exist (moto's NoSuchEntity).
    """
    arguments = call.arguments
    role = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].get_role_by_arn(arguments["PolicySourceArn"])
    entries = arguments.get("ContextEntries", ())
    context = {entry["ContextKeyName"]: entry["ContextKeyValues"][0] for entry in entries}
    results = [
        {
            "EvalActionName": action,
            "EvalResourceName": resource,
            "EvalDecision": decide(role.policies.values(), action, resource, context),
        }
        for action in arguments["ActionNames"]
        for resource in arguments.get("ResourceArns", ["*"])
    ]
    return {"EvaluationResults": results, "IsTruncated": False}


def _covers(statement: dict[str, Any], element: str, value: str) -> bool:
    """Return True if a statement covers an action, ignoring the action's case, or a resource."""
    fold = str.lower if element == "Action" else str
    patterns = [fold(text) for text in _as_list(statement.get(element, statement.get(f"Not{element}")))]
    return _like(fold(value), patterns) == (element in statement)


def _like(value: str, patterns: str | list[str]) -> bool:
    """Return True if a pattern matches; `*` and `?` are wildcards, and `${*}`, `${?}`, `${$}` are literals.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_variables.html#policy-vars-specialchars
    """
    globs = (_SPECIAL.sub(r"[\1]", text.replace("[", "[[]")) for text in _as_list(patterns))
    return any(fnmatchcase(value, glob) for glob in globs)


def _equals(value: str, texts: str | list[str]) -> bool:
    """Return True if the value equals one of the texts."""
    return value in (_SPECIAL.sub(r"\1", text) for text in _as_list(texts))


def _conditions_hold(statement: dict[str, Any], context: Mapping[str, str]) -> bool:
    """Return True if all of a statement's conditions are met."""
    operators = {"StringEquals": _equals, "StringLike": _like}
    return all(
        operator in operators and key in context and operators[operator](context[key], texts)
        for operator, values in statement.get("Condition", {}).items()
        for key, texts in values.items()
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
