"""Patterns of results that stay on the nodes."""

from collections.abc import Iterable

from awsddp.errors import ConfigError


def exclude_patterns(lines: Iterable[str]) -> list[tuple[str, bool]]:
    """Return gitignore patterns as the node matches them: regular expressions, and whether each excludes.

    Raises ConfigError.
    """
    from pathspec import GitIgnoreSpec

    try:
        spec = GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise ConfigError("job.exclude: not a gitignore pattern", str(error)) from error
    return [
        (one.regex.pattern, one.include) for one in spec.patterns if one.regex and one.include is not None
    ]
