"""Validates JSON documents against their published types, and writes docs/schema.json.

python -m tests.support.schema
"""

import json
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec

from awsddp.cli.main import VERBS
from awsddp.errors import SCHEMA
from awsddp.model import documents
from awsddp.plan.records import PlanDocument

DOCUMENTS: dict[str, Any] = {
    "": documents.HomeDocument,
    "init": documents.InitDocument,
    "plan": PlanDocument,
    "plan --offers": documents.OffersDocument,
    "up": documents.ClusterDocument,
    "status": documents.ClusterDocument,
    "status --all": list[documents.FoundCluster],
    "sync": documents.SyncDocument,
    "train": documents.JobDocument,
    "recover": documents.JobDocument,
    "jobs": documents.JobsDocument,
    "logs": documents.JobDocument,
    "cancel": documents.JobDocument | list[documents.JobDocument],
    "fetch": documents.FetchDocument | list[documents.FetchDocument],
    "exec": documents.ExecDocument,
    "ssh": documents.SshDocument,
    "doctor": documents.DoctorDocument,
    "doctor --request-quota": documents.QuotaDocument,
    "why": documents.WhyDocument,
    "report": documents.JobReport,
    "stop": documents.ClusterDocument,
    "down": documents.DownDocument,
    "down --orphans": documents.Orphans,
    "run": documents.RunDocument,
    "local start": documents.LocalDocument,
    "local status": documents.LocalDocument,
    "local stop": documents.StoppedDocument,
    "local fault": list[documents.Fault],
}
"""The document type of each verb, by the verb and the option that changes it."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "schema.json"


def schema() -> str:
    """Return the published JSON schema."""
    kinds = {f"awsddp {name}".strip(): kind for name, kind in DOCUMENTS.items()}
    kinds |= {"error": documents.ErrorDocument, "event": documents.EventLine}
    shapes, parts = msgspec.json.schema_components(kinds.values(), ref_template="#/$defs/{name}")
    verbs, parts = dict(zip(kinds, _normalize(shapes), strict=True)), _normalize(parts)
    return (
        '{"$schema": "https://json-schema.org/draft/2020-12/schema",\n'
        f'"title": "The documents of awsddp --json, schema {SCHEMA}",\n'
        f'"properties": {{\n{_rows(verbs)}\n}},\n"$defs": {{\n{_rows(parts)}\n}}}}\n'
    )


def _normalize(part: Any) -> Any:
    """Return a part of the schema without differences between versions of msgspec: some dedent docstrings,
    some give a default to fields that a function makes.
    """
    if isinstance(part, dict):
        copied = {key: _normalize(value) for key, value in part.items() if (key, value) != ("default", {})}
        text = part.get("description")
        return copied | ({"description": cleandoc(text)} if isinstance(text, str) else {})
    return [_normalize(item) for item in part] if isinstance(part, list | tuple) else part


def _rows(items: dict[str, Any]) -> str:
    return ",\n".join(f"{json.dumps(name)}: {json.dumps(item)}" for name, item in items.items())


def verb_of(words: tuple[str, ...]) -> str:
    """Return the key in DOCUMENTS of a command line."""
    verb = next((word for word in words if word in VERBS), "")
    keys = [key for key in DOCUMENTS if key.split(" ")[0] == verb and set(key.split()) <= set(words)]
    return max(keys, key=len)


def check(document: Any, *words: str) -> None:
    """Assert that a document, or each one of a list, has the schema version, its type, and no other key."""
    for item in document if isinstance(document, list) else [document]:
        assert item["schema"] == SCHEMA
    if "--iam-policy" in words:
        return
    bare: Any = [_strip(item) for item in document] if isinstance(document, list) else _strip(document)
    if isinstance(document, dict) and "error" in document:
        _validate({"error": bare.pop("error")}, documents.ErrorDocument)
        if not bare:
            return
    _validate(bare, DOCUMENTS[verb_of(words)])


def _strip(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "schema"}


def _validate(document: Any, kind: Any) -> None:
    typed = msgspec.to_builtins(msgspec.convert(document, kind))
    _require_keys(typed, document, "")


def _require_keys(typed: Any, shown: Any, path: str) -> None:
    if isinstance(shown, dict):
        assert set(shown) <= set(typed), f"{path}: {sorted(set(shown) - set(typed))} are not in the schema"
        for key, value in shown.items():
            _require_keys(typed[key], value, f"{path}.{key}")
    elif isinstance(shown, list):
        for index, value in enumerate(shown):
            _require_keys(typed[index], value, f"{path}[{index}]")


if __name__ == "__main__":
    PAGE.write_text(schema())
