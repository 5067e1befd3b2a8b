"""The table of mutations (tools/mutants.toml) fits the tree: `make mutants` makes them."""

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TREE = Path(__file__).resolve().parents[2]


def load_program() -> Any:
    spec = importlib.util.spec_from_file_location("mutants", TREE / "tools/mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


MUTANTS = load_program().mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.file)
def test_a_mutation_still_fits_its_file_and_its_test_exists(mutant: Any) -> None:
    assert (TREE / mutant.file).read_text().count(mutant.before) == 1
    assert mutant.before != mutant.after
    file, _, name = mutant.test.partition("::")
    functions = {
        node.name
        for node in ast.walk(ast.parse((TREE / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert name.partition("[")[0] in functions


def test_a_mutation_whose_text_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("a = 1\na = 1\n")
    for before in ("b = 1", "a = 1"):
        with pytest.raises(ValueError, match=r"file\.py has this text"):
            load_program().Mutant("file.py", before, "", "test").apply(tmp_path)
