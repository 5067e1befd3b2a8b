"""api/keywords.py has the keys of settings/spec.py: rewritten by `python -m tests.api.test_keywords`."""

import json
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, Unpack

import pytest

import awsddp
from awsddp.api import keywords
from awsddp.cluster import reconcile
from awsddp.model import documents
from awsddp.settings.spec import KEYWORDS, SECTIONS

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "awsddp" / "api" / "keywords.py"
_ROWS = re.compile(r"(?<=class _Shared\(TypedDict, total=False\):\n).*?(?=\n\nclass Keys)", re.DOTALL)
_ELSEWHERE = ("name", "script", "args")
"""Keys that have the name of an argument of some methods."""
SNIPPET = """
import awsddp

cluster = awsddp.Cluster("demo", local=True, workdir=".", script="train.py")
cluster.up(nodes=2, spot="first", max_price_usd=30)
cluster.train("train.py", args=["--lr", 0.1], world_size=4, name="first", local_gpus="off")
cluster.train(world_sise=4)
cluster.plan(nodes="two")
cluster.up(name="first")
with awsddp.run("short", node=2):
    pass
"""


def render_module() -> str:
    """Return the module with the rows of its keys regenerated."""
    text = "".join(
        f"    {name}: {_type(_hint(key))}\n" for name, key in KEYWORDS.items() if name not in _ELSEWHERE
    )
    return _ROWS.sub(lambda _: text, MODULE.read_text())


def _hint(key: str) -> Any:
    section, _, name = key.partition(".")
    return typing.get_type_hints(SECTIONS[section])[name]


def _type(hint: Any) -> str:
    """Return the source of a type, with any sequence for a tuple of settings/spec.py."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type, args))
    if origin is Literal:
        return f"Literal[{', '.join(json.dumps(value) for value in args)}]"
    containers = {tuple: "Sequence[str]", dict: "dict[str, str]"}
    return "None" if hint is type(None) else containers.get(origin, getattr(hint, "__name__", ""))


def test_the_keywords_are_the_keys_of_spec_py() -> None:
    assert MODULE.read_text() == render_module(), "run: python -m tests.api.test_keywords"


NAMES = {
    **vars(keywords),
    "Cluster": awsddp.Cluster,
    "Confirm": reconcile.Confirm,
    "Job": awsddp.Job,
    "Plan": awsddp.Plan,
    "documents": documents,
}
"""Names that are imported for types only."""


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        (awsddp.Cluster.__init__, keywords.Keys),
        (awsddp.Cluster.plan, keywords.Keys),
        (awsddp.Cluster.up, keywords.Keys),
        (awsddp.Cluster.train, keywords.JobKeys),
        (awsddp.run, keywords.Keys),
    ],
)
def test_a_method_takes_every_key_as_a_keyword(function: Any, keys: Any) -> None:
    hints = typing.get_type_hints(function, localns=NAMES)
    assert hints["keys"] == Unpack[keys]
    assert KEYWORDS.keys() - {*_ELSEWHERE} == keys.__annotations__.keys() - {*_ELSEWHERE}
    assert not keys.__annotations__.keys() & (hints.keys() - {"keys"})


@pytest.mark.prove
def test_mypy_sees_a_keyword_that_does_not_exist_and_a_wrong_type(tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--strict", str(file)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    errors = [
        line.split(": ", 1)[1] for line in output.splitlines() if "snippet.py:" in line and "error" in line
    ]
    assert len(errors) == 4, output
    assert 'Unexpected keyword argument "world_sise" for "train"' in errors[0]
    assert 'Argument "nodes" to "plan"' in errors[1]
    assert 'Unexpected keyword argument "name" for "up"' in errors[2]
    assert 'Unexpected keyword argument "node" for "run"' in errors[3]


if __name__ == "__main__":
    MODULE.write_text(render_module())
