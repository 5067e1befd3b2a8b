"""Build HTML from elements. A string that is not an `Html` is escaped."""

import re
from html import escape

from awsddp.util import terminal_safe

_COLOR = re.compile(r"\x1b\[[0-9;:]*m")


class Html(str):
    """A string that is HTML; any other string is plain text."""


def to_html(value: object) -> str:
    """Return an `Html` unchanged, and any other value as escaped text.

    Colors are removed; other control characters are made visible.
    """
    return (
        value if isinstance(value, Html) else escape(terminal_safe.escape_lines(_COLOR.sub("", str(value))))
    )


def tag(name: str, *content: object, **attributes: object) -> Html:
    """Return an element; the attribute `class_` becomes HTML's class, and "_" in names becomes "-"."""
    attribute_text = "".join(
        f' {key.strip("_").replace("_", "-")}="{to_html(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{attribute_text}>{''.join(map(to_html, content))}</{name}>")
