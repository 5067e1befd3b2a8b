"""Users read and copy the bundled programs: no function is long or has many branches."""

import ast
from pathlib import Path

import pytest

TRAIN = Path(__file__).resolve().parents[2] / "train"
MOST_LINES, MOST_BRANCHES = 60, 12
BRANCH = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case)


def branches(function: ast.FunctionDef) -> int:
    nodes = list(ast.walk(function))
    operators = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    conditions = sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return sum(isinstance(node, BRANCH) for node in nodes) + operators + conditions


@pytest.mark.parametrize("file", sorted(TRAIN.glob("*.py")), ids=lambda file: file.name)
def test_every_function_is_short_and_has_few_branches(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MOST_LINES and branches(node) <= MOST_BRANCHES, (node.name, lines, branches(node))
