"""Exclude patterns for results."""

from collections.abc import Iterable

from awsddp.errors import ConfigError


def exclude_patterns(lines: Iterable[str]) -> list[tuple[str, bool]]:
    """Return gitignore patterns in the form for nodes: pairs of a regular expression, and True if it excludes
    paths.

    Raises ConfigError.
    """
    from pathspec import GitIgnoreSpec

    try:
        spec = GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise ConfigError("job.exclude: not a gitignore pattern", str(error)) from error
    return [
        (pattern.regex.pattern, pattern.include)
        for pattern in spec.patterns
        if pattern.regex and pattern.include is not None
    ]
