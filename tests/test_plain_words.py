"""Code, help and docs are in plain technical English (docs/contributing.md, "Names and words")."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = re.compile(
    r"\b(told|anew|owed|meanwhile|beside|hears?|at home|tell whether|speaks? of|is none of|what is saved)\b",
    re.I,
)
PRONOUNS = {
    "one",
    "found",
    "asked",
    "told",
    "said",
    "own",
    "what",
    "where",
    "known",
    "given",
    "here",
    "there",
}
MODULES = [path for room in ("awsddp", "templates", "train") for path in sorted((ROOT / room).rglob("*.py"))]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings and comments of a module, or the lines of a page, without names in backticks."""
    with path.open("rb") as file:
        if path.suffix == ".md":
            texts = [(number, line.decode()) for number, line in enumerate(file, 1)]
        else:
            tokens = tokenize.tokenize(file.readline)
            texts = [
                (token.start[0], token.string)
                for token in tokens
                if token.type in (tokenize.STRING, tokenize.COMMENT)
            ]
    yield from ((number, re.sub(r"`[^`]*`", "", text)) for number, text in texts)


def test_no_sentence_has_a_word_of_the_old_dialect() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in (*MODULES, *PAGES)
        for number, text in sentences(path)
        for match in WORDS.finditer(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_variable_is_the_noun_that_it_holds() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.id if isinstance(node, ast.Name) else node.arg}"
        for path in MODULES
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if (isinstance(node, ast.arg) and node.arg in PRONOUNS)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRONOUNS)
    ]
    assert not wrong, "\n".join(wrong)
