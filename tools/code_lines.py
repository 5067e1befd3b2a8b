"""Count the code lines of the core: no docstrings, blank lines or comments, and without awsddp/local/.

python tools/code_lines.py [FOLDER]     # a line per room and the total; FOLDER is a checkout
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
    """Return how many lines of a module hold code; a string that stands alone is a docstring."""
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
    """Print the counts of each room and of the core."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent) / "awsddp"
    rooms: Counter[str] = Counter()
    for file in root.rglob("*.py"):
        room = file.relative_to(root).parts[0]
        if room != "local":
            rooms[room] += code_lines(file.read_text(encoding="utf-8"))
    for room, count in sorted(rooms.items()):
        print(f"{count:6,} {room}")
    print(f"{rooms.total():6,} core")


if __name__ == "__main__":
    main()
