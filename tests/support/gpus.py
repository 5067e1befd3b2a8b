"""GPUs by their names."""

from awsddp.compat.releases import Architecture, architecture_of


def gpu(name: str) -> Architecture:
    found = architecture_of(name)
    assert found is not None
    return found
