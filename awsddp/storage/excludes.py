"""Exclude patterns for results."""

from collections.abc import Iterable

from awsddp.errors import ConfigError


def exclude_patterns(lines: Iterable[str]) -> list[tuple[str, bool]]:
    """Convert gitignore patterns to the form that nodes use. Each pattern becomes a pair: a regular
    expression, and a bool that is True if the pattern excludes paths.

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
