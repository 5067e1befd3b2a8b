"""Patterns of results that stay on the nodes."""

import pytest

from awsddp.errors import ConfigError
from awsddp.storage.excludes import exclude_patterns


def test_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"job\.exclude"):
        exclude_patterns(["!"])
