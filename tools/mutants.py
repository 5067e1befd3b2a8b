"""Mutation tests: `python tools/mutants.py [WORD ...]` makes those of mutants.toml in a copy of the tree.

The named test must fail for it. Words choose mutations by their file. The exit code is 1 where a mutation
survives, where its text is no longer in the file, or where a test fails without it.
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
        """Make it in `tree`. Raises ValueError where `before` does not stand there exactly once."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} holds {text.count(self.before)} times: {self.before!r}")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")


def mutants() -> list[Mutant]:
    """Return the table."""
    return [
        Mutant(**row) for row in tomllib.loads((TREE / "tools/mutants.toml").read_text("utf-8"))["mutant"]
    ]


def outcome(tree: Path, *tests: str) -> int:
    """Run tests of a copy of the tree, which finds its own modules first, and return pytest's exit code."""
    words = ["-m", "pytest", "-n", "0", "-x", "--timeout", str(LIMIT_S), *tests]
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=tree, env=environ, capture_output=True, text=True)
    if done.returncode not in (PASSED, FAILED):
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    return done.returncode


def lives(mutant: Mutant, tree: Path) -> bool:
    """Make a mutation, run its test, and take it back; say how it went and whether it survived."""
    path, begun = tree / mutant.file, time.monotonic()
    whole = path.read_bytes()
    try:
        mutant.apply(tree)
        killed = outcome(tree, mutant.test) == FAILED
        word = "killed" if killed else "SURVIVED"
    except ValueError as error:
        killed, word = False, f"STALE ({error})"
    finally:
        path.write_bytes(whole)
    print(f"{time.monotonic() - begun:6.1f} s  {word}  {mutant.file}: {mutant.before.strip()}", flush=True)
    return not killed


def main(words: list[str]) -> int:
    """Make the chosen mutations; return 1 where one survives."""
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.file for word in words)]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="awsddp-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(TREE, tree, ignore=LEFT_OUT)
        if outcome(tree, *sorted({mutant.test for mutant in chosen})) != PASSED:
            print("the tests fail without any mutation: make test")
            return 1
        survivors = [mutant for mutant in chosen if lives(mutant, tree)]
    print(f"{len(chosen)} mutations, {len(survivors)} survived, {time.monotonic() - begun:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
