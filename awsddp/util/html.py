"""HTML from elements: what is no HTML is text, which is escaped."""

import re
from html import escape

from awsddp.util import terminal_safe

_COLOR = re.compile(r"\x1b\[[0-9;:]*m")


class Html(str):
    """HTML; any other string is text."""


def html(value: object) -> str:
    """Return HTML as it is, and a text escaped: without colors, other control characters visible."""
    return value if isinstance(value, Html) else escape(terminal_safe.lines(_COLOR.sub("", str(value))))


def tag(name: str, *content: object, **attributes: object) -> Html:
    """Return an element; `class_` and names with "_" are attributes as in HTML."""
    given = "".join(
        f' {key.strip("_").replace("_", "-")}="{html(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{''.join(map(html, content))}</{name}>")
