"""GPUs by their names."""

from awsddp.compat.releases import Architecture, find_architecture


def gpu(name: str) -> Architecture:
    found = find_architecture(name)
    assert found is not None
    return found
