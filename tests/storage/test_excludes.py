"""Patterns of results that stay on the nodes."""

import pytest

from awsddp.errors import ConfigError
from awsddp.storage.excludes import exclude_patterns


def test_an_invalid_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"job\.exclude"):
        exclude_patterns(["!"])
