"""The version of awsddp."""

__version__ = "0.1.0"
