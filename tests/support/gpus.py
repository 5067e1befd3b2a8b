"""Architectures of GPUs."""

from awsddp.compat.releases import Architecture, find_architecture


def gpu(name: str) -> Architecture:
    architecture = find_architecture(name)
    assert architecture is not None
    return architecture
