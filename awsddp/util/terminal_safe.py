"""Escape terminal control sequences in nodes' and ranks' output, which could move the cursor or hide text."""

import re

# These are C0 (except tab and newline), DEL, C1, marks that change the text direction, and line separators.
_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_NOT_UTF8 = "\ud800-\udfff"
"""Matches surrogates, which os.fsdecode() returns for bytes in a file's name that are not UTF-8."""
_IN_LINES = re.compile(f"[{_CONTROL}{_NOT_UTF8}]")
_IN_LINE = re.compile(f"[\n{_CONTROL}{_NOT_UTF8}]")
_IN_NAME = re.compile(f"[\t\n{_CONTROL}]")

# Group 1 is a colour, which stays. A match without a group is another sequence, which is removed. Groups 2
# and 3 are single control bytes and the characters in _CONTROL, which are made visible.
_BYTES = re.compile(
    rb"\x1b\[([0-9;:]*)m"
    rb"|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_X][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
    rb"|([\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)|\xc2[\x80-\x9f])"
    rb"|(\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9])"
)
_COLOURED = re.compile(rb"\x1b\[[0-9;:]*m[^\r\n]*")
_END = b"\x1b[0m"
# "8" hides text, except inside a colour code: 38;5;8 and 48;2;8;8;8.
# https://www.ecma-international.org/publications-and-standards/standards/ecma-48/ (8.3.117)
_OF_A_COLOUR = re.compile(rb"(?:^|;)0*(?:38|48|58);(?:5;\d*|2;\d*;\d*;\d*)")
_CONCEAL = re.compile(rb"(?:^|;)0*8(?:$|[;:])")


def escape_line(text: str) -> str:
    """Return text as one line, with all control characters made visible."""
    return _IN_LINE.sub(_escape, text)


def escape_name(text: str) -> str:
    """Return a file's name with control characters made visible; bytes that are not UTF-8 stay unchanged."""
    return _IN_NAME.sub(_escape, text)


def escape_lines(text: str) -> str:
    """Return text with all control characters except newlines made visible."""
    return _IN_LINES.sub(_escape, text)


def keep_colours(data: bytes, *, none: bool = False) -> bytes:
    """Make the output of ranks or commands safe for a terminal: colours are kept, but only until the end of
    the line.

    Other control sequences are removed. Characters that hide text or change its direction are made visible.
    With `none`, colours are removed, too.
    """

    def escape(match: re.Match[bytes]) -> bytes:
        if match[1] is None:
            escaped = escape_line(match[3].decode()).encode() if match[3] else b""
            return escaped or b"".join(b"\\x%02x" % byte for byte in match[2] or b"")
        if _CONCEAL.search(_OF_A_COLOUR.sub(b"", match[1])):
            return rb"\x1b" + match[0][1:]
        return b"" if none else match[0]

    shown = _BYTES.sub(escape, data)
    return _COLOURED.sub(rb"\g<0>" + _END, shown) if b"\x1b" in shown else shown


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, from os.fsdecode()
        code -= 0xDC00
    return "\\n" if code == 10 else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
