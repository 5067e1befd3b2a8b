"""Mutation tests: `python tools/mutants.py [WORD ...]` applies rows of mutants.toml to a copy of the tree.

The test of a row must fail when the row's mutation is applied. A WORD selects the rows whose file name
contains it. The exit code is 1 if a mutation survives, if the text that a mutation changes is no longer in
its file, or if a test fails without a mutation.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "runs", "dist")
LIMIT_S = 300
PASSED, FAILED = 0, 1  # pytest's exit codes


@dataclass(frozen=True)
class Mutant:
    """One mutation: `before` becomes `after` in `file`, and `test` must fail."""

    file: str
    before: str
    after: str
    test: str

    def apply(self, tree: Path) -> None:
        """Apply the mutation to `tree`. Raises ValueError unless the file has `before` exactly once."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has this text {text.count(self.before)} times: {self.before!r}")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")


def mutants() -> list[Mutant]:
    """Return the mutations of tools/mutants.toml."""
    table = tomllib.loads((TREE / "tools/mutants.toml").read_text("utf-8"))
    return [Mutant(**row) for row in table["mutant"]]


def outcome(tree: Path, *tests: str) -> int:
    """Run tests in a copy of the tree, with the copy's modules, and return pytest's exit code."""
    words = ["-m", "pytest", "-n", "0", "-x", "--timeout", str(LIMIT_S), *tests]
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([sys.executable, *words], cwd=tree, env=environ, capture_output=True, text=True)
    if result.returncode not in (PASSED, FAILED):
        print(result.stdout[-2000:], result.stderr[-2000:], sep="\n")
    return result.returncode


def lives(mutant: Mutant, tree: Path) -> bool:
    """Apply a mutation, run its test, revert it, and print the result; return True if it survived."""
    path, start = tree / mutant.file, time.monotonic()
    original = path.read_bytes()
    try:
        mutant.apply(tree)
        is_killed = outcome(tree, mutant.test) == FAILED
        result = "killed" if is_killed else "SURVIVED"
    except ValueError as error:
        is_killed, result = False, f"STALE ({error})"
    finally:
        path.write_bytes(original)
    print(f"{time.monotonic() - start:6.1f} s  {result}  {mutant.file}: {mutant.before.strip()}", flush=True)
    return not is_killed


def main(words: list[str]) -> int:
    """Apply the selected mutations; return 1 if one survives."""
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.file for word in words)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="awsddp-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(TREE, tree, ignore=LEFT_OUT)
        if outcome(tree, *sorted({mutant.test for mutant in chosen})) != PASSED:
            print("the tests fail without any mutation: make test")
            return 1
        survivors = [mutant for mutant in chosen if lives(mutant, tree)]
    print(f"{len(chosen)} mutations, {len(survivors)} survived, {time.monotonic() - start:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
