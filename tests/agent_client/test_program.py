"""The program that is sent to a node: complete, small, and the same for every request."""

import ast
import bz2
import json
from pathlib import Path

import pytest

from awsddp import agent
from awsddp.agent import messages
from awsddp.agent_client import calls, program

TYPES = ("awsddp.model",)
"""The package from which messages.py imports the types of answers, for type checkers only."""


AGENT = Path(agent.__file__).parent


FILES = {
    ".".join(path.relative_to(AGENT).with_suffix("").parts): path
    for path in sorted(AGENT.rglob("*.py"))
    if path.name != "__init__.py"
}
"""The files of the agent, by the names of their modules below it."""


S3 = {name for name in FILES if name.startswith("s3.")}
"""The upload of results and the download of data: separate programs, in a Python with boto3."""


NOTIFIER = set(program.NOTIFIER_MODULES) - {"messages", "diagnosis.job_causes", "job_folder"}
"""The notifier: a separate program."""


ALONE = {"diagnosis.helper", "torchrun_worker"}
"""Files that a process of the job runs."""


def test_command_is_the_same_for_every_request() -> None:
    argv, _ = program.agent_program()
    assert argv[:3] == ["python3", "-I", "-c"]
    assert "$" not in "".join(argv)
    message = calls.encode_request(messages.Cancel(job="$(touch canary)"))
    assert message == b'73\n{"do": "cancel", "job": "$(touch canary)", "grace": null, "launch": null}'


def test_sent_program_is_small() -> None:
    _, stdin = program.agent_program()
    assert len(stdin) < 14 * 1460, "it is to fit the first window of a TCP connection"


def test_sent_program_is_complete_and_in_order() -> None:
    _, stdin = program.agent_program()
    length, _, rest = stdin.partition(b"\n")
    modules = json.loads(bz2.decompress(rest[: int(length)]))
    sent = [name.removeprefix("awsddp.agent.") for name, _ in modules]
    # sent with the requests that need them
    separate = (ALONE | S3 | NOTIFIER).union(*(kind.extra for kind in messages.REQUEST_TYPES.values()))
    assert sorted(sent) == sorted(FILES.keys() - separate)
    texts = [text for _, text in modules]
    for index, name in enumerate(sent):
        source = FILES[name].read_text()
        assert texts[index].count("\n") == source.count("\n"), "a traceback is to name the right line"
        tree = ast.parse(source)
        needs = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        ours = [need.removeprefix("awsddp.agent.") for need in needs if need.startswith("awsddp.agent.")]
        assert set(ours) - separate <= set(sent[:index])


@pytest.mark.parametrize("module", FILES)
def test_agent_is_python_3_8_and_needs_nothing_else(module: str) -> None:
    import sys

    tree = ast.parse(FILES[module].read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert (
                name.startswith("awsddp.agent.")
                or name in TYPES
                or name.partition(".")[0]
                in {
                    *sys.stdlib_module_names,
                    "sitecustomize",
                    *(("botocore", "s3transfer") if module in S3 else ()),
                }
            )
        assert not isinstance(node, ast.Match)
