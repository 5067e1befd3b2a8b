"""Count the code lines that ship: Python without docstrings, blank lines and comments, and other text.

python tools/code_lines.py [FOLDER]     # a line per package and the totals; FOLDER is a checkout

It counts awsddp/ and templates/. Lines of other text (TOML, YAML, HTML, JSON, ssh_config) count if they are
not blank and not only a comment.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return the number of a module's lines that have code; each string statement counts as a docstring."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    """Print the counts of each package, of all Python that ships, and of other text."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    python: Counter[str] = Counter()
    others = 0
    for file in (*root.glob("awsddp/**/*"), *root.glob("templates/**/*")):
        if file.is_dir() or "__pycache__" in file.parts:
            continue
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            python["/".join(file.relative_to(root).parts[:-1][:2])] += code_lines(text)
        else:
            others += sum(
                bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines()
            )
    for room, count in sorted(python.items()):
        print(f"{count:6,} {room}")
    print(f"{python.total():6,} lines of Python that ship")
    print(f"{others:6,} lines of other text that ships")


if __name__ == "__main__":
    main()
