"""Format times, durations, sizes, counts and money as text. This module does no I/O."""

from datetime import UTC, datetime


def node_name(node: int) -> str:
    """Return a node's name: node0, node1, ..."""
    return f"node{node}"


def size_text(size: int) -> str:
    """Return a size in bytes as text for display: 12 kB."""
    for unit, scale, digits in (("GB", 1e9, 1), ("MB", 1e6, 1), ("kB", 1e3, 0)):
        if size >= scale:
            return f"{size / scale:.{digits}f} {unit}"
    return f"{size} bytes"


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun: "1 node", "2 nodes"; the plural is `noun` with `ending`."""
    return f"{count} {noun}{ending * (count != 1)}"


def files_text(files: int, size: int) -> str:
    """Return a text with the number of files and their total size: "1 file, 12 kB"."""
    return f"{counted(files, 'file')}, {size_text(size)}"


def utc(moment: datetime) -> str:
    """Return a time in the form that tags and documents use: 2026-11-21T08:45:00Z."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def optional_utc(moment: datetime | None) -> str | None:
    """Return `utc(moment)`, or None if there is no time."""
    return utc(moment) if moment else None


def duration(seconds: float) -> str:
    """Return a duration as text for display: 12.3 s, 4 min 5 s, 23 h 59 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def elapsed_seconds(since: str | None, until: str | None = None) -> float | None:
    """Return the seconds from `since` to `until` (default: now), or None if `since` is None."""
    if since is None:
        return None
    end = datetime.fromisoformat(until) if until else datetime.now(UTC)
    return max(0.0, (end - datetime.fromisoformat(since)).total_seconds())


def age(moment: str | None) -> str:
    """Return how long ago a time was, in a single unit: 48 s, 2 h, 3 days. Return "" if `moment` is None."""
    if (seconds := elapsed_seconds(moment)) is None:
        return ""
    units = (("days", 172800, 86400), ("h", 3600, 3600), ("min", 60, 60), ("s", 0, 1))
    return next(f"{seconds // size:.0f} {unit}" for unit, least, size in units if seconds >= least)


def money(usd: float | None) -> str:
    """Return an amount in US dollars for display, or "unknown" if the amount is None."""
    return "unknown" if usd is None else f"${usd:,.2f}"
