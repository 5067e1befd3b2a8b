"""What a node or a rank said, as a terminal may get it: it moves no cursor, sets no title, hides nothing."""

import re

# C0 but tab, DEL and C1; marks that change the direction of text; separators that look like a new line;
# bytes of a file's name that are no UTF-8.
_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_LINES = re.compile(f"[{_CONTROL}]")
_IN_LINE = re.compile(f"[\n{_CONTROL}]")

# A colour stays; other sequences go, whole; what is left of control bytes is shown.
_BYTES = re.compile(
    rb"(\x1b\[[0-9;:]*m)"
    rb"|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_X][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
    rb"|([\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)|\xc2[\x80-\x9f])"
)


def line(text: str) -> str:
    """Return a text as one line, with its control characters made visible."""
    return _IN_LINE.sub(_visible, text)


def lines(text: str) -> str:
    """Return a text with its control characters made visible; new lines stay."""
    return _IN_LINES.sub(_visible, text)


def colours_only(data: bytes, *, none: bool = False) -> bytes:
    """Return the output of ranks or commands for a terminal: control sequences are removed, colours stay.

    With `none` colours are removed too.
    """

    def safe(match: re.Match[bytes]) -> bytes:
        colour = b"" if none else match[1]
        return colour or b"".join(b"\\x%02x" % byte for byte in match[2] or b"")

    return _BYTES.sub(safe, data)


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # os.fsdecode() of a byte
        code -= 0xDC00
    return "\\n" if code == 10 else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
